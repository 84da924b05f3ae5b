// Output of a warp of a prefill block: the sums of its rows, with their maxima.
#pragma once

#include "attention/mma.cuh"
#include "attention/prefill_scores.cuh"
#include "attention/softmax_state.cuh"
#include "attention/swizzle.cuh"
#include "attention/warpgroup.cuh"

// Tiles: PrefillTiles, whose layout values have.
template <class Tiles, int kRowTiles, int kWarpKeys>
struct PrefillOutput {
    using Scores = PrefillScores<Tiles, kRowTiles, kWarpKeys>;
    using RowScales = float[kRowTiles][2];  // of this lane's two rows in each row tile
    using Probabilities = typename Scores::Packed;
    SoftmaxState<16> rows[kRowTiles];

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) rows[m].reset();
    }

    // Turns scores into probabilities relative to the maxima of their rows, and adds these to the sums. Maxima are
    // updated, and true is returned, only if a score in the warp exceeds the maximum of its row by kRescaleThreshold.
    // With kScalesLater, the output is still being computed then, and the caller must multiply it by `output_scales`.
    template <bool kScalesLater>
    __device__ __forceinline__ bool update_softmax(Scores& scores, float factor, RowScales& output_scales) {
        float highest[kRowTiles][2];
        bool is_far = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                highest[m][i] = rows[m].max_with(scores.fragments[m], i);
                is_far = is_far || (highest[m][i] - rows[m].maxima[i]) * factor > kRescaleThreshold;
            }
        }
        is_far = __any_sync(~0u, is_far);
        if (is_far) {
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if constexpr (kScalesLater) {
                        output_scales[m][i] = rows[m].rescale_sum(i, highest[m][i], factor);
                    } else {
                        rows[m].rescale(i, highest[m][i], factor);
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) rows[m].exponentiate(scores.fragments[m], i, factor);
        }
        return is_far;
    }
    __device__ __forceinline__ void scale(const RowScales& scales) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) rows[m].scale_output(i, scales[m][i]);
        }
    }

    // Adds probabilities times the values of a tile.
    __device__ __forceinline__ void add_products(const Scores& probabilities, const LdmatrixAddress& value_tile) {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++)
                pack_a_fragment(Element{}, a[m], probabilities.fragments[m][2 * j],
                                probabilities.fragments[m][2 * j + 1]);
#pragma unroll
            for (int d = 0; d < kWarpColumns / 16; d++) {
                unsigned b[4];
                ldmatrix_x4_trans(b, value_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, rows[m].output[2 * d], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, rows[m].output[2 * d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // The same by a warpgroup: `values` is the address of its values in their first panel. The output is complete after
    // wait(), which takes the same probabilities.
    __device__ __forceinline__ void begin_products(const Probabilities& a, SharedAddress values) {
        using Panel = float[8][4];
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++) {
#pragma unroll
            for (int panel = 0; panel < kHeadDim / 64; panel++) {
                const SharedAddress b = values + panel * Tiles::KeyLayout::kPanelBytes + 16 * j * 128;
                warpgroup_mma_transposed(Element{}, reinterpret_cast<Panel&>(rows[0].output[8 * panel]), a[j], b);
            }
        }
        warpgroup_commit();
    }
    __device__ __forceinline__ void wait(Probabilities& a) {
        warpgroup_wait(rows[0].output);
        hold_registers(a);
    }
};
