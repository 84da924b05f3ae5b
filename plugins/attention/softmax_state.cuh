// The online softmax of both attention kernels.
//
// A score is a product of q and k, with the softcap applied to it if there is one. A probability is 2^(factor * (score
// - maximum)): `factor` is log2(e) times the scale (or the softcap), so that one multiply-add and one ex2 per element
// are all there is to do. Maxima are those of scores, before `factor`.
#pragma once

#include "attention/config.cuh"
#include "attention/math.cuh"

// Initial maximum, below every score; and the score of a masked key. The latter is so far below kInitialMax that its
// probability is 0 with any maximum.
constexpr float kInitialMax = -1e30f, kMaskedScore = -3e38f;
constexpr float kLog2E = 1.44269504f;
// The output stays relative to an older maximum until a score is so many powers of 2 above it: a probability of up to
// 256 is as exact as one of 1, and most steps need no rescaling.
constexpr float kRescaleThreshold = 8;

// From products of q and k to exponents of 2.
struct ScoreTransform {
    float factor;           // of a score, in the exponent of 2
    float inverse_softcap;  // scale / softcap: what a product is multiplied with before tanh; 0 without a softcap

    __device__ __forceinline__ ScoreTransform(double factor, double inverse_softcap)
        : factor(static_cast<float>(factor)), inverse_softcap(static_cast<float>(inverse_softcap)) {}

    // Of products of which one factor has yet to be multiplied with `scale`.
    __device__ __forceinline__ ScoreTransform times(float scale) const {
        ScoreTransform scaled = *this;
        (has_softcap() ? scaled.inverse_softcap : scaled.factor) *= scale;
        return scaled;
    }

    __device__ __forceinline__ bool has_softcap() const { return inverse_softcap != 0; }

    // tanh(product * inverse_softcap), as 1 - 2 / (e^(2x) + 1). That cancels near 0, where the first terms of the
    // series are taken.
    __device__ __forceinline__ float softcap(float product) const {
        const float x = product * inverse_softcap, square = x * x;
        if (square < 1.0f / 64) return x - x * square * (1.0f / 3 - square * (2.0f / 15));
        return 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * kLog2E)) + 1);
    }
};

// Online softmax of a warp over kRows rows (8 or 16). The output is not yet divided by the sum of probabilities, and
// both are relative to the maximum of the row. Lane l holds row g = l / 4, and row g + 8 if there are 16, as
// accumulator fragments hold them (see mma.cuh). Below, `i` is 0 for row g and 1 for row g + 8; elements 2 * i and 2 *
// i + 1 of a fragment belong to it.
template <int kRows>
struct SoftmaxState {
    float output[kWarpColumns / 8][4];
    float maxima[kRows / 8];  // the same in all lanes of a quad
    float sums[kRows / 8];    // of this lane's columns; the row's sum is that of the quad

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int d = 0; d < kWarpColumns / 8; d++) {
#pragma unroll
            for (int e = 0; e < 4; e++) output[d][e] = 0;
        }
#pragma unroll
        for (int i = 0; i < kRows / 8; i++) {
            maxima[i] = kInitialMax;
            sums[i] = 0;
        }
    }

    // The maximum of the row so far and of the scores that this lane has of it.
    template <int kFragments>
    __device__ __forceinline__ float own_max_with(const float (&scores)[kFragments][4], int i) const {
        float maximum = maxima[i];
#pragma unroll
        for (int j = 0; j < kFragments; j++) maximum = fmaxf(maximum, fmaxf(scores[j][2 * i], scores[j][2 * i + 1]));
        return maximum;
    }
    // And of those that the other lanes have.
    template <int kFragments>
    __device__ __forceinline__ float max_with(const float (&scores)[kFragments][4], int i) const {
        return quad_max(own_max_with(scores, i));
    }

    // Makes everything relative to another maximum, which is at least as high.
    __device__ __forceinline__ void rescale(int i, float maximum, float factor) {
        scale_output(i, rescale_sum(i, maximum, factor));
    }

    // The same in two steps: returns what the output has yet to be multiplied with.
    __device__ __forceinline__ float rescale_sum(int i, float maximum, float factor) {
        const float scale = exp2_approx((maxima[i] - maximum) * factor);
        maxima[i] = maximum;
        sums[i] *= scale;
        return scale;
    }
    __device__ __forceinline__ void scale_output(int i, float scale) {
#pragma unroll
        for (int d = 0; d < kWarpColumns / 8; d++) {
            output[d][2 * i] *= scale;
            output[d][2 * i + 1] *= scale;
        }
    }

    // Turns scores into probabilities relative to the maximum, and adds them to the sum.
    template <int kFragments>
    __device__ __forceinline__ void exponentiate(float (&scores)[kFragments][4], int i, float factor) {
        const float shift = maxima[i] * factor;
#pragma unroll
        for (int j = 0; j < kFragments; j++) {
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                scores[j][e] = exp2_approx(scores[j][e] * factor - shift);
                sums[i] += scores[j][e];
            }
        }
    }
};
