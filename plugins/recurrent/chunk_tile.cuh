// Tiles of shared memory. Their rows are the tokens of a chunk, or the rows of a matrix between tokens. SplitPair has
// numbers that are more precise than an element.
#pragma once

#include "attention/mma.cuh"

// Two values of 16 bits each, whose sum is a pair of floats.
template <class Type>
struct SplitPair {
    unsigned high, low;

    __device__ __forceinline__ SplitPair(Type, float2 values) {
        high = pack(Type{}, values);
        const float2 rounded = unpack(Type{}, high);
        low = pack(Type{}, {values.x - rounded.x, values.y - rounded.y});
    }
};

// A tile of rows of 16-bit elements: 16, 32, or a multiple of 64 of them. Chunks of 16 bytes are permuted, so that
// ldmatrix meets no bank conflict (attention/swizzle.cuh shows how).
template <int kRowElements>
struct ChunkTile {
    static constexpr int kRowBytes = 2 * kRowElements, kRowChunks = kRowElements / 8,
                         kPlaces = kRowChunks % 8 == 0 ? 8 : kRowChunks;
    static_assert(kPlaces == 8 || kPlaces == 4 || kPlaces == 2, "places are a power of 2");

    SharedAddress base;

    // Offset of a chunk of a row, in bytes.
    static __device__ __forceinline__ int offset(unsigned row, unsigned chunk) {
        return static_cast<int>(row * kRowBytes + (chunk ^ row / (8 / kPlaces) % kPlaces) * 16);
    }
    __device__ __forceinline__ SharedAddress at(int row, int chunk) const { return base + offset(row, chunk); }

    // A fragments of rows row to row + 15, elements 16 k to 16 k + 15.
    __device__ __forceinline__ void load_a(unsigned (&a)[4], int row, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(a, at(row + lane % 16, 2 * k + lane / 16));
    }
    // The same of the transposed tile: rows are elements 8 chunk to 8 chunk + 15, and k counts rows.
    __device__ __forceinline__ void load_a_trans(unsigned (&a)[4], int chunk, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4_trans(a, at(16 * k + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
    }
    // B fragments of two times 8 columns, which are rows row to row + 15: elements 0 and 1, and 2 and 3.
    __device__ __forceinline__ void load_b(unsigned (&b)[4], int row, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(b, at(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    }
    // The same of the transposed tile: columns are elements 8 chunk to 8 chunk + 15, and k counts rows.
    __device__ __forceinline__ void load_b_trans(unsigned (&b)[4], int chunk, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4_trans(b, at(16 * k + lane % 16, chunk + lane / 16));
    }
};

// A word of a row of a tile of [16 x 16].
__device__ __forceinline__ unsigned& tile_word(unsigned char* tile, int row, int column) {
    return *reinterpret_cast<unsigned*>(tile + ChunkTile<16>::offset(row, column / 8) + column % 8 * 2);
}
