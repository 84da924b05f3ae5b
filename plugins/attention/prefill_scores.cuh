// Scores of a warp of a prefill block, for its rows and its keys of a tile. They become probabilities in place.
#pragma once

#include "attention/mma.cuh"
#include "attention/softmax_state.cuh"
#include "attention/swizzle.cuh"
#include "attention/thread_barrier.cuh"
#include "attention/token_tree.cuh"
#include "attention/warpgroup.cuh"

// Tiles: PrefillTiles, whose layouts queries and keys have.
template <class Tiles, int kRowTiles, int kWarpKeys>
struct PrefillScores {
    // Of each 16 rows and 8 keys, as accumulator fragments hold them (mma.cuh).
    float fragments[kRowTiles][kWarpKeys / 8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) fragments[m][j][e] = 0;
            }
        }
    }

    // Adds the products of queries and keys, over the columns of this warp.
    __device__ __forceinline__ void add_products(const LdmatrixAddress& queries, const LdmatrixAddress& key_tile) {
#pragma unroll
        for (int d = 0; d < kWarpColumns / 16; d++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) ldmatrix_x4(a[m], queries(d, 16 * m));
#pragma unroll
            for (int j = 0; j < kWarpKeys / 16; j++) {
                unsigned b[4];
                ldmatrix_x4(b, key_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, fragments[m][2 * j], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, fragments[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Adds up the products of the two warps that divide the columns: both get the same scores. sums: their shared memory,
    // kSumBytes; they alone meet at the barrier of this number.
    static constexpr int kSumBytes = 16 * kRowTiles * kWarpKeys * static_cast<int>(sizeof(float));
    __device__ __forceinline__ void add_other_columns(unsigned char* sums, int column_warp, int barrier) {
        float4* const place = reinterpret_cast<float4*>(sums) + threadIdx.x % 32;
        const auto each = [&](auto use) {
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int j = 0; j < kWarpKeys / 8; j++) use(fragments[m][j], place[(m * (kWarpKeys / 8) + j) * 32]);
            }
        };
        if (column_warp == 1) each([](float (&own)[4], float4& at) { at = {own[0], own[1], own[2], own[3]}; });
        barrier_of_threads(barrier, 64);
        if (column_warp == 0) {
            each([](float (&own)[4], float4& at) {
                const float4 other = at;
                own[0] += other.x, own[1] += other.y, own[2] += other.z, own[3] += other.w;
                at = {own[0], own[1], own[2], own[3]};
            });
        }
        barrier_of_threads(barrier, 64);
        if (column_warp == 1) {
            each([](float (&own)[4], float4& at) {
                const float4 both = at;
                own[0] = both.x, own[1] = both.y, own[2] = both.z, own[3] = both.w;
            });
        }
    }

    // The same by a warpgroup: queries and keys are its 64 rows and its keys in their first panels. They are there
    // behind wait().
    __device__ __forceinline__ void begin_products(SharedAddress queries, SharedAddress keys) {
        constexpr int kPartFragments = kWarpKeys % 64 ? 4 : 8;
        using Part = float[kPartFragments][4];
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; j += kPartFragments) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                const SharedAddress a = queries + d / 4 * Tiles::QueryLayout::kPanelBytes + d % 4 * 32;
                const SharedAddress b = keys + d / 4 * Tiles::KeyLayout::kPanelBytes + d % 4 * 32 + j * 8 * 128;
                warpgroup_mma(Element{}, reinterpret_cast<Part&>(fragments[0][j]), a, b);
            }
        }
        warpgroup_commit();
    }
    // kYounger: groups of products that were begun behind them, and may still run.
    template <int kYounger = 0>
    __device__ __forceinline__ void wait() {
        warpgroup_wait<kYounger>(fragments[0]);
    }

    // Multiplies each column with the scale of its key.
    __device__ __forceinline__ void apply_key_scales(const float* scales) {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; j++) {
            const float2 both = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int e = 0; e < 4; e++) fragments[m][j][e] *= e % 2 ? both.y : both.x;
            }
        }
    }

    __device__ __forceinline__ void apply_softcap(const ScoreTransform& score) {
        if (!score.has_softcap()) return;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) fragments[m][j][e] = score.softcap(fragments[m][j][e]);
            }
        }
    }

    // Causal, and within the window. places: of this lane's two rows in each row tile; first_key: of the warp's part of
    // the tile; past: the first key of a new token; there are no keys from keys_end on.
    __device__ __forceinline__ void apply_mask(const RowPlace (&places)[kRowTiles][2], int first_key, int past,
                                               int keys_end, int span) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int key = first_key + 8 * j + lane % 4 * 2 + e % 2;
                    const int distance = places[m][e / 2].distance_to(key, past);
                    if (distance < 0 || distance >= span || key >= keys_end) fragments[m][j][e] = kMaskedScore;
                }
            }
        }
    }

    // As the A fragments of a warpgroup's product with values.
    using Packed = unsigned[kWarpKeys / 16][4];
    __device__ __forceinline__ void pack(Packed& a) const {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++)
            pack_a_fragment(Element{}, a[j], fragments[0][2 * j], fragments[0][2 * j + 1]);
    }
};
