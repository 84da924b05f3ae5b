// The matrix of q in the decode kernels: kRows rows, in tiles of 16 for the tensor cores (or one of 8).
#pragma once

#include "attention/decode_params.cuh"
#include "attention/mma.cuh"
#include "attention/softmax_state.cuh"
#include "attention/swizzle.cuh"

template <int kRows>
constexpr int kRowTiles = kRows <= 16 ? 1 : kRows / 16;
template <int kRows>
constexpr int kRowsOfTile = kRows < 16 ? kRows : 16;
// Fragments of q of a head, of a warp.
template <int kRows>
using RowStates = SoftmaxState<kRowsOfTile<kRows>>[kRowTiles<kRows>];

// Scores, and then probabilities, of a tile.
template <int kRows>
using TileScores = float[kRowTiles<kRows>][kTileTokens / 8][4];

template <int kTiles, int kTileRows>
__device__ __forceinline__ void reset(SoftmaxState<kTileRows> (&states)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kTiles; m++) states[m].reset();
}

// A fragments of q. They stay in registers for the whole head, or, where the output takes too many of these, in shared
// memory. With 8 rows the registers of rows 8 to 15 are left out: they are zeros.
template <int kRows>
struct QueryFragments {
    static constexpr bool kInRegisters = kRows <= 16;
    unsigned words[kInRegisters ? kHeadDim / 16 : 1][kRowsOfTile<kRows> / 4];
    float offset[kRowTiles<kRows>][4];  // what scores begin with (kKeyOffset)
    SharedAddress shared;

    // `head`: rows of q. Beside quantized values, columns 4t and 4t+1 are in the place of 2t and 2t+1, and 4t+2 and
    // 4t+3 in that of 2t+8 and 2t+9 (stored_kv.cuh).
    template <class Quantized = Stored>
    __device__ __forceinline__ void load(const unsigned char* head) {
        const int lane = threadIdx.x % 32;
        const SharedAddress rows = shared_address(head);
        if constexpr (!kInRegisters) {
            shared = rows;
        } else if constexpr (kQuantized) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
#pragma unroll
                for (int i = 0; i < kRows / 8; i++) {
                    const uint2 four = *reinterpret_cast<const uint2*>(
                        head + swizzled_offset(8 * i + lane / 4, 2 * d + lane % 4 / 2) + lane % 2 * 8);
                    words[d][i] = four.x;
                    words[d][kRows / 8 + i] = four.y;
                }
            }
        } else if constexpr (kRows == 8) {
            unsigned loaded[4];
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d += 2) {
                ldmatrix_x4(loaded, rows + swizzled_offset(lane % 8, min(2 * d + lane / 8, kRowChunks - 1)));
#pragma unroll
                for (int i = 0; i < 4 && 2 * d + i < kRowChunks; i++) words[d + i / 2][i % 2] = loaded[i];
            }
        } else {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++)
                ldmatrix_x4(words[d], rows + swizzled_offset(lane % 16, 2 * d + lane / 16));
        }
#pragma unroll
        for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) offset[m][e] = 0;
            constexpr unsigned kOffset = kKeyOffset<Element, Quantized>;
#pragma unroll
            for (int d = 0; d < kHeadDim / 16 && kOffset; d++) {
                unsigned a[4];
                a_fragment(a, m, d);
                mma_m16n8k16(Element{}, offset[m], a, kOffset, kOffset);
            }
        }
    }
    // The A fragment of columns 16 * d to 16 * d + 15 of a row tile.
    __device__ __forceinline__ void a_fragment(unsigned (&a)[4], int row_tile, int d) const {
        if constexpr (kInRegisters) {
            a[0] = words[d][0];
            a[1] = kRows == 8 ? 0 : words[d][1];
            a[2] = words[d][kRows / 8];
            a[3] = kRows == 8 ? 0 : words[d][kRows / 4 - 1];
        } else {
            const int lane = threadIdx.x % 32;
            ldmatrix_x4(a, LdmatrixAddress(shared, lane % 16, lane / 16)(d, 16 * row_tile));
        }
    }
};
