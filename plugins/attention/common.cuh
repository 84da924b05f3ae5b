// What the attention kernels share. A file is compiled once for each element and head dim: kernels/attention_tiles.py says with
// which numbers, and chooses them by the shared memory of the GPU.
#pragma once

#include "attention/ptx.cuh"
#include "shared.cuh"

using Element = ELEMENT;  // Float16 or BFloat16
constexpr int kHeadDim = HEAD_DIM;
constexpr int kPieces = kHeadDim / 8;        // of 16 bytes, in a row
constexpr int kWords = kHeadDim / 2;         // of two elements, in a row
constexpr int kRowBytes = 2 * kHeadDim;

// Scores lie above it, and what is masked below: its power of 2 is 0 whatever the maximum is.
constexpr float kLowest = -1e30f, kMasked = -3e38f;
constexpr float kLog2E = 1.44269504f;

// Rows that follow each other and lie in different banks.
constexpr unsigned kSpread = kPieces % 8 == 0 ? 8 : kPieces % 4 == 0 ? 4 : 2;

// Where a piece of a row lies in a tile of shared memory. Pieces of equal number in 8 rows that follow each other lie in
// different banks, without padding.
__device__ __forceinline__ unsigned piece_at(unsigned row, unsigned piece) {
    return row * kRowBytes + (piece ^ row / (8 / kSpread) % kSpread) * 16;
}

// What a lane loads of rows of a tile: a piece, `low` or the one after it, of each two pieces.
struct LanePieces {
    static constexpr bool kAligned = (kPieces & (kPieces - 1)) == 0;  // then the bits of an address can be flipped one by one
    SharedAddress tile, own;
    unsigned row, low;

    __device__ __forceinline__ LanePieces(SharedAddress tile, unsigned row, unsigned low)
        : tile(tile), own(tile + piece_at(row, low)), row(row), low(low) {}

    // Of pieces 2 * pair and on, `further` (a multiple of 8) rows below.
    __device__ __forceinline__ SharedAddress operator()(int pair, int further) const {
        if constexpr (kAligned) return flip_bits(own, 32 * pair) + further * kRowBytes;
        return tile + piece_at(row + further, 2 * pair + low);
    }
};

// The angles of one position: cosines, then sines, of the first 2 * pairs elements; element i turns with i + pairs.
struct Rotation {
    const float* cosines;
    int pairs;  // even

    __device__ __forceinline__ Rotation(const float* table, long long rotary_dim, int position)
        : cosines(table + position * rotary_dim), pairs(static_cast<int>(rotary_dim / 2)) {}

    __device__ __forceinline__ float2 cosine(int word) const { return reinterpret_cast<const float2*>(cosines)[word]; }
    __device__ __forceinline__ float2 sine(int word) const { return reinterpret_cast<const float2*>(cosines + pairs)[word]; }
};

// a * b + c * d, each rounded, so that it is the same everywhere.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) { return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d)); }

// The word of a row in global memory, turned.
__device__ __forceinline__ unsigned turned_word(const unsigned* row, int word, Rotation rotation) {
    const unsigned own = row[word];
    if (word >= rotation.pairs) return own;
    const int half = rotation.pairs / 2, angle = word < half ? word : word - half;
    const float sign = word < half ? -1.0f : 1.0f;
    const float2 x = unpack(Element{}, own), y = unpack(Element{}, row[word < half ? word + half : angle]);
    const float2 cosine = rotation.cosine(angle), sine = rotation.sine(angle);
    return pack(Element{}, {sum_of_products(x.x, cosine.x, sign * y.x, sine.x), sum_of_products(x.y, cosine.y, sign * y.y, sine.y)});
}

// Turns a word of a row of a tile, and the word that turns with it, `half` words on.
__device__ __forceinline__ void turn_in_tile(unsigned char* tile, int row, int word, int half, Rotation rotation) {
    unsigned* low = reinterpret_cast<unsigned*>(tile + piece_at(row, word / 4)) + word % 4;
    unsigned* high = reinterpret_cast<unsigned*>(tile + piece_at(row, (word + half) / 4)) + (word + half) % 4;
    const float2 a = unpack(Element{}, *low), b = unpack(Element{}, *high), cosine = rotation.cosine(word), sine = rotation.sine(word);
    *low = pack(Element{}, {sum_of_products(a.x, cosine.x, -b.x, sine.x), sum_of_products(a.y, cosine.y, -b.y, sine.y)});
    *high = pack(Element{}, {sum_of_products(b.x, cosine.x, a.x, sine.x), sum_of_products(b.y, cosine.y, a.y, sine.y)});
}

// From products of q and k to exponents of 2: `factor` times `of(product)`.
struct Score {
    float factor, inner;  // inner is 0 without a softcap

    __device__ __forceinline__ Score(double factor, double inner) : factor(static_cast<float>(factor)), inner(static_cast<float>(inner)) {}

    // tanh: 1 - 2 / (e^(2x) + 1), which cancels near 0; there its series.
    __device__ __forceinline__ float capped(float product) const {
        const float x = product * inner, square = x * x;
        if (square < 1.0f / 64) return x - x * square * (1.0f / 3 - square * (2.0f / 15));
        return 1 - 2 * reciprocal(power_of_2(x * (2 * kLog2E)) + 1);
    }
};

// A tile of probabilities as the left side of a product: tiles of scores are laid out as that side wants them.
__device__ __forceinline__ void pack_left(unsigned (&left)[4], const float (&low)[4], const float (&high)[4]) {
    left[0] = pack(Element{}, {low[0], low[1]});
    left[1] = pack(Element{}, {low[2], low[3]});
    left[2] = pack(Element{}, {high[0], high[1]});
    left[3] = pack(Element{}, {high[2], high[3]});
}

// Over the four lanes that share a row of a product.
__device__ __forceinline__ float sum_of_four(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}
__device__ __forceinline__ float max_of_four(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
