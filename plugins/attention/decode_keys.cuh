// Products of the decode kernel for up to 8 rows of q. Keys, or columns of the head, are the rows of a fragment, and
// the rows of q its columns (mma.cuh). So there are no empty rows in a product, and the output takes half the
// registers. decode.cuh has the rest of the kernel.
#pragma once

#include "attention/decode_layout.cuh"
#include "attention/decode_quantized.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/schedule.cuh"
#include "attention/swizzle.cuh"

// B fragments of q: columns 2t, 2t+1 and 2t+8, 2t+9 of each 16. Beside quantized values, columns 4t and 4t+1 are in the
// place of the first two, and 4t+2 and 4t+3 in that of the others (stored_kv.cuh).
struct KeyQueries {
    static constexpr bool kInRegisters = true;
    unsigned words[kHeadDim / 16][2];
    float offset[4];  // what scores begin with (kKeyOffset)

    // `head`: rows of q.
    template <class Quantized = Stored>
    __device__ __forceinline__ void load(const unsigned char* head) {
        const int lane = threadIdx.x % 32;
        if constexpr (kQuantized) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                const uint2 four = *reinterpret_cast<const uint2*>(
                    head + swizzled_offset(lane / 4, 2 * d + lane % 4 / 2) + lane % 2 * 8);
                words[d][0] = four.x;
                words[d][1] = four.y;
            }
#pragma unroll
            for (int e = 0; e < 4; e++) offset[e] = 0;
            constexpr unsigned kOffset = kKeyOffset<Element, Quantized>;
            constexpr unsigned key[4] = {kOffset, kOffset, kOffset, kOffset};
#pragma unroll
            for (int d = 0; d < kHeadDim / 16 && kOffset; d++)
                mma_m16n8k16(Element{}, offset, key, words[d][0], words[d][1]);
        } else {
            const SharedAddress rows = shared_address(head);
            unsigned loaded[4];
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d += 2) {
                ldmatrix_x4(loaded, rows + swizzled_offset(lane % 8, min(2 * d + lane / 8, kRowChunks - 1)));
#pragma unroll
                for (int i = 0; i < 4 && 2 * d + i < kRowChunks; i++) words[d + i / 2][i % 2] = loaded[i];
            }
        }
    }
};

// Scores, and then probabilities, of a tile: lane l has keys g (elements 0 and 1) and g + 8 (2 and 3) of each 16, and
// rows 2t and 2t + 1.
using KeyScores = float[kTileTokens / 16][4];

// State of a warp for a head. Element e of a fragment of the output has row 2t + e % 2, and column g + 8 * (e / 2) of
// 16. With quantized values, columns come in pairs of neighbours: 2g + e / 2.
struct KeyState {
    float output[kHeadDim / 16][4];
    float maxima[2];  // of rows 2t and 2t + 1; the same in all lanes that have these
    float sums[2];    // of this lane's keys; the row's sum is column_sum

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int x = 0; x < kHeadDim / 4; x++) output[x / 4][x % 4] = 0;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            maxima[e] = kInitialMax;
            sums[e] = 0;
        }
    }

    // Turns scores into probabilities, and adds them to the sums. The maximum of a row is updated only when a score
    // exceeds it by kRescaleThreshold, so most steps need no shuffle. Rows must not depend on each other: without a
    // query head, a row has the undefined contents of shared memory.
    template <int kFragments>
    __device__ __forceinline__ void update(float (&scores)[kFragments][4], float factor) {
        float highest[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            highest[e] = maxima[e];
#pragma unroll
            for (int j = 0; j < kFragments; j++) highest[e] = fmaxf(highest[e], fmaxf(scores[j][e], scores[j][e + 2]));
        }
        if (__any_sync(~0u, fmaxf(highest[0] - maxima[0], highest[1] - maxima[1]) * factor > kRescaleThreshold)) {
#pragma unroll
            for (int e = 0; e < 2; e++) raise(e, followed(maxima[e], column_max(highest[e]), factor), factor);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float shift = maxima[e % 2] * factor;
#pragma unroll
            for (int j = 0; j < kFragments; j++) {
                scores[j][e] = exp2_approx(scores[j][e] * factor - shift);
                sums[e % 2] += scores[j][e];
            }
        }
    }

    __device__ __forceinline__ void scale_output(float factor) {
#pragma unroll
        for (int x = 0; x < kHeadDim / 4; x++) output[x / 4][x % 4] *= factor;
    }

private:
    // Makes a row relative to another maximum, which is at least as high.
    __device__ __forceinline__ void raise(int e, float maximum, float factor) {
        const float scale = exp2_approx((maxima[e] - maximum) * factor);
        maxima[e] = maximum;
        sums[e] *= scale;
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            output[d][e] *= scale;
            output[d][e + 2] *= scale;
        }
    }
};

// Layout of the vectors of 8 rows of output fragments in a ring tile: rows with the lowest two bits of their numbers
// swapped, and in the last four of them vectors in another order. Each lane of a warp has half a vector of two
// neighbouring rows, so the warp writes them without bank conflicts.
struct KeyOutputFragments {
    static __device__ __forceinline__ int swap_low_bits(int number) {
        return (number & ~3) | (number & 1) << 1 | (number >> 1 & 1);
    }
    static __device__ __forceinline__ int place_of(int row, int vector) {
        return swap_low_bits(row) * 4 + (vector ^ row / 4 * 2);
    }
    static __device__ __forceinline__ int row_at(int place) { return swap_low_bits(place / 4); }
    static __device__ __forceinline__ int vector_at(int place) { return place % 4 ^ place / 16 * 2; }
    // Vector v has columns 2v, 2v + 8, 2v + 1, 2v + 9; beside quantized values 4v to 4v + 3.
    static __device__ __forceinline__ float4 columns(float4 value) {
        return kQuantized ? value : float4{value.x, value.z, value.y, value.w};
    }
};

__device__ __forceinline__ void reset(KeyState& state) { state.reset(); }

template <>
struct DecodeLayout<8, true> {
    using Queries = KeyQueries;
    using State = KeyState;
    using Scores = KeyScores;
    using OutputFragments = KeyOutputFragments;
};

// Starts the softmax of a warp with the new token alone. new_token: k and v. Every row of A is the key, so every lane
// gets the products of its rows, and no shuffle is needed.
template <class Quantized = Stored>
__device__ __forceinline__ void start_with_new_token(KeyState& state, const KeyQueries& queries,
                                                     const unsigned char* new_token, const ScoreTransform& score,
                                                     float key_scale, float value_scale) {
    const int lane = threadIdx.x % 32;
    const unsigned *key = reinterpret_cast<const unsigned*>(new_token) + lane % 4,
                   *value = reinterpret_cast<const unsigned*>(new_token + kStoredRowBytes);
    float products[2][4] = {};  // two sums that do not wait for each other
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        const uint2 words = new_key_words(key, d);
        const unsigned a[4] = {words.x, words.x, words.y, words.y};
        mma_m16n8k16(Element{}, products[d % 2], a, queries.words[d][0], queries.words[d][1]);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const float product = (products[0][e] + products[1][e]) * key_scale;
        state.maxima[e] = score.has_softcap() ? score.softcap(product) : product;
        state.sums[e] = lane / 4 ? 0.0f : 1.0f;  // the probability is 1; one lane of those that have the row counts it
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        float2 columns;  // of elements 0 and 1, and of 2 and 3
        if constexpr (kQuantized) {
            const uint2 words = widen_in_order(Element{}, Quantized{}, value[4 * d + lane / 8]);
            columns = unpack(Element{}, lane / 4 % 2 ? words.y : words.x);
        } else {
            const float2 low = unpack(Element{}, value[8 * d + lane / 8]),
                         high = unpack(Element{}, value[8 * d + 4 + lane / 8]);
            columns = lane / 4 % 2 ? float2{low.y, high.y} : float2{low.x, high.x};
        }
#pragma unroll
        for (int e = 0; e < 4; e++) state.output[d][e] = (e / 2 ? columns.y : columns.x) * value_scale;
    }
}

// The A fragments of keys are what ldmatrix reads of a tile of elements, or makes of a tile of quantized values.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void compute_scores(KeyScores& scores, const KeyQueries& queries,
                                               const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    constexpr int kKeys = kQuantized ? 32 : 16;  // of one ldmatrix
    const LdmatrixAddress keys(shared_address(tile), lane % 16, lane / 16);
    const QuantizedAddress quantized_of(shared_address(tile), lane);
    KeyScores sums[kQKAccumulators] = {};
    if constexpr (kQuantized) {
#pragma unroll
        for (int x = 0; x < kTileTokens / 4; x++) sums[0][x / 4][x % 4] = queries.offset[x % 4];
    }
#pragma unroll
    for (int j = 0; j < kTileTokens / kKeys; j++) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned loaded[4];
            ldmatrix_x4(loaded, kQuantized ? quantized_of(d, kKeys * j) : keys(d, kKeys * j));
#pragma unroll
            for (int k = 0; k < kKeys / 16; k++) {
                float (&sum)[4] = sums[d % kQKAccumulators][kKeys / 16 * j + k];
                if constexpr (kQuantized) {
                    const uint2 low = widen_keys(Element{}, Quantized{}, loaded[2 * k]),
                                high = widen_keys(Element{}, Quantized{}, loaded[2 * k + 1]);
                    const unsigned a[4] = {low.x, high.x, low.y, high.y};
                    mma_m16n8k16(Element{}, sum, a, queries.words[d][0], queries.words[d][1]);
                } else {
                    mma_m16n8k16(Element{}, sum, loaded, queries.words[d][0], queries.words[d][1]);
                }
            }
        }
    }
#pragma unroll
    for (int x = 0; x < kTileTokens / 4; x++) {
        scores[x / 4][x % 4] = sums[0][x / 4][x % 4];
#pragma unroll
        for (int other = 1; other < kQKAccumulators; other++) scores[x / 4][x % 4] += sums[other][x / 4][x % 4];
    }
}

// Scores, which are products of quantized values still, times the scales of the keys.
template <int kRows>
__device__ __forceinline__ void scale_scores(const HeadScales& scales, const DecodeParams& params, KeyScores& scores,
                                             const TileScales& token_scales) {
    const int place = threadIdx.x % 32 / 4;
#pragma unroll
    for (int x = 0; x < kTileTokens / 8; x++) {
        const float scale = params.scales_per_token() ? token_scales.of(8 * x + place) : scales.key;
        scores[x / 2][x % 2 * 2] *= scale;
        scores[x / 2][x % 2 * 2 + 1] *= scale;
    }
}

// Applies softcap and mask, and turns scores into probabilities.
template <int kRows>
__device__ __forceinline__ void update_softmax(KeyState& state, KeyScores& scores, const DecodeParams& params,
                                               const TileCoord& at, int first_token, const ScoreTransform& score) {
    const int lane = threadIdx.x % 32;
    if (score.has_softcap()) {
#pragma unroll
        for (int x = 0; x < kTileTokens / 4; x++) scores[x / 4][x % 4] = score.softcap(scores[x / 4][x % 4]);
    }
    if (first_token + kTileTokens > at.position || first_token < at.last_first_key(params)) {
        int first_keys[2] = {at.first_key, at.first_key};  // of this lane's rows
        if constexpr (kMaxNewTokens > 1) {
#pragma unroll
            for (int e = 0; e < 2; e++)
                first_keys[e] = at.first_key_of(params, divide_small(lane % 4 * 2 + e, params.group_size));
        }
#pragma unroll
        for (int x = 0; x < kTileTokens / 4; x++) {
            const int key = first_token + x / 2 * 8 + lane / 4;
            if (key >= at.position || key < first_keys[x % 2]) scores[x / 4][x % 4] = kMaskedScore;
        }
    }
    state.update(scores, score.factor);
}

// Multiplies probabilities by the scales of their values; the sums of the softmax already include them, unscaled.
// scale_of(key) returns the scale of the value of a key.
template <int kFragments, class ScaleOf>
__device__ __forceinline__ void scale_fragments(HeadScales& scales, const DecodeParams& params, KeyState& state,
                                                float (&probabilities)[kFragments][4], ScaleOf scale_of) {
    if (!params.scales_per_token()) return;
    const int place = threadIdx.x % 32 / 4;
    float of_token[2 * kFragments], largest = 0;
#pragma unroll
    for (int x = 0; x < 2 * kFragments; x++) {
        of_token[x] = scale_of(8 * x + place);
        largest = fmaxf(largest, of_token[x]);
    }
    if (__any_sync(~0u, HeadScales::power_below(largest) > scales.value)) {
        state.scale_output(scales.raise(HeadScales::power_below(column_max(largest))));  // the same in all lanes
    }
    const float inverse = HeadScales::inverse_of(scales.value);
#pragma unroll
    for (int x = 0; x < 2 * kFragments; x++) {
        probabilities[x / 2][x % 2 * 2] *= of_token[x] * inverse;
        probabilities[x / 2][x % 2 * 2 + 1] *= of_token[x] * inverse;
    }
}
template <int kRows>
__device__ __forceinline__ void scale_probabilities(HeadScales& scales, const DecodeParams& params, KeyState& state,
                                                    KeyScores& probabilities, const TileScales& token_scales) {
    scale_fragments(scales, params, state, probabilities, [&](int token) { return token_scales.of(token); });
}

// Adds probabilities times the values of a tile to the output. Of 16 columns of quantized values, the even ones are the
// first rows of a fragment, the odd ones the last.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void accumulate_output(KeyState& state, const KeyScores& probabilities,
                                                  const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    constexpr int kKeys = kQuantized ? 32 : 16;
    const LdmatrixAddress values(shared_address(tile), lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const QuantizedAddress quantized_of(shared_address(tile), lane);
#pragma unroll
    for (int j = 0; j < kTileTokens / kKeys; j++) {
        unsigned b[kKeys / 16][2];
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++) {
            const float (&p)[4] = probabilities[kKeys / 16 * j + k];
            b[k][0] = transpose_matrix(pack(Element{}, {p[0], p[1]}));
            b[k][1] = transpose_matrix(pack(Element{}, {p[2], p[3]}));
        }
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned loaded[4];
            ldmatrix_x4_trans(loaded, kQuantized ? quantized_of(d, kKeys * j) : values(d, kKeys * j));
#pragma unroll
            for (int k = 0; k < kKeys / 16; k++) {
                if constexpr (kQuantized) {
                    const uint2 low = widen(Element{}, Quantized{}, loaded[2 * k]),
                                high = widen(Element{}, Quantized{}, loaded[2 * k + 1]);
                    const unsigned a[4] = {low.x, low.y, high.x, high.y};
                    mma_m16n8k16(Element{}, state.output[d], a, b[k][0], b[k][1]);
                } else {
                    mma_m16n8k16(Element{}, state.output[d], loaded, b[k][0], b[k][1]);
                }
            }
        }
    }
}

// Writes the maximum and the sum of each row of a warp.
template <int kRows>
__device__ __forceinline__ void write_totals(float2* totals, const KeyState& state) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const float sum = column_sum(state.sums[e]);
        if (lane < 4) totals[2 * lane + e] = {state.maxima[e], sum};
    }
}
// Writes the output as fragments of 16 columns: a lane has half a vector of each.
template <int kRows, int kRoundRows>
__device__ __forceinline__ void write_fragments(unsigned char* tile, const KeyState& state, int, int,
                                                const HeadScales& scales) {
    const int lane = threadIdx.x % 32, next_row = KeyOutputFragments::place_of(1, 0) * 2;
    float2* const to =
        reinterpret_cast<float2*>(tile) + KeyOutputFragments::place_of(lane % 4 * 2, lane / 8) * 2 + lane / 4 % 2;
    const float scale = kQuantized ? scales.value : 1.0f;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        to[64 * d] = {state.output[d][0] * scale, state.output[d][2] * scale};
        to[64 * d + next_row] = {state.output[d][1] * scale, state.output[d][3] * scale};
    }
}
