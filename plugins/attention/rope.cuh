// Rotary position embedding (NeoX pairing): element i of the first rotary_dim elements of a row is rotated with element
// i + rotary_dim / 2. Products are rounded one by one, so that q and k come out the same in every kernel.
#pragma once

#include "attention/config.cuh"
#include "attention/swizzle.cuh"

// The angles of one position: rotary_dim / 2 cosines, then as many sines. Elements are handled two at a time, as words.
struct RopeAngles {
    const float* cosines;
    int num_pairs;  // rotary_dim / 2; even

    // table: [positions, 2, rotary_dim / 2]
    __device__ __forceinline__ RopeAngles(const float* table, long long rotary_dim, int position)
        : cosines(table + position * rotary_dim), num_pairs(static_cast<int>(rotary_dim / 2)) {}

    __device__ __forceinline__ float2 cosine(int word) const { return reinterpret_cast<const float2*>(cosines)[word]; }
    __device__ __forceinline__ float2 sine(int word) const {
        return reinterpret_cast<const float2*>(cosines + num_pairs)[word];
    }
};

// a * b + c * d without a fused multiply-add, whose use would be the compiler's choice.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) {
    return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d));
}

// One word of a contiguous row, with RoPE applied.
__device__ __forceinline__ unsigned apply_rope(const unsigned* row, int word, RopeAngles angles) {
    const unsigned own = row[word];
    if (word >= angles.num_pairs) return own;
    const int half = angles.num_pairs / 2, angle = word < half ? word : word - half;
    const float sign = word < half ? -1.0f : 1.0f;
    const float2 x = unpack(Element{}, own), y = unpack(Element{}, row[word < half ? word + half : angle]);
    const float2 cosine = angles.cosine(angle), sine = angles.sine(angle);
    return pack(Element{}, {sum_of_products(x.x, cosine.x, sign * y.x, sine.x),
                            sum_of_products(x.y, cosine.y, sign * y.y, sine.y)});
}

// A word and its partner, rotated.
__device__ __forceinline__ uint2 rotated(unsigned low, unsigned high, float2 cosine, float2 sine) {
    const float2 a = unpack(Element{}, low), b = unpack(Element{}, high);
    return {
        pack(Element{}, {sum_of_products(a.x, cosine.x, -b.x, sine.x), sum_of_products(a.y, cosine.y, -b.y, sine.y)}),
        pack(Element{}, {sum_of_products(b.x, cosine.x, a.x, sine.x), sum_of_products(b.y, cosine.y, a.y, sine.y)})};
}

// Rotates, in place, a word of a row of a tile and its partner `half` words further on.
template <class Layout = TileLayout<false, 0>>
__device__ __forceinline__ void rotate_in_tile(unsigned char* tile, int row, int word, int half, float2 cosine,
                                               float2 sine) {
    unsigned* low = reinterpret_cast<unsigned*>(tile + Layout::offset(row, word / 4)) + word % 4;
    unsigned* high = reinterpret_cast<unsigned*>(tile + Layout::offset(row, (word + half) / 4)) + (word + half) % 4;
    const unsigned own = *low, partner = *high;
    const uint2 both = rotated(own, partner, cosine, sine);
    *low = both.x;
    *high = both.y;
}

// The angles of a chunk, which is 4 words.
struct ChunkAngles {
    float4 cosines[2], sines[2];
};
__device__ __forceinline__ ChunkAngles chunk_angles(RopeAngles angles, int chunk) {
    const float4* const cosines = reinterpret_cast<const float4*>(angles.cosines) + 2 * chunk;
    const float4* const sines = cosines + angles.num_pairs / 4;
    return {{cosines[0], cosines[1]}, {sines[0], sines[1]}};
}

// A chunk and its partner, rotated.
struct ChunkPair {
    uint4 low, high;
};
__device__ __forceinline__ ChunkPair rotated_chunks(uint4 a, uint4 b, const ChunkAngles& angles) {
    const auto &c = angles.cosines, &s = angles.sines;
    const uint2 x = rotated(a.x, b.x, {c[0].x, c[0].y}, {s[0].x, s[0].y}),
                y = rotated(a.y, b.y, {c[0].z, c[0].w}, {s[0].z, s[0].w});
    const uint2 z = rotated(a.z, b.z, {c[1].x, c[1].y}, {s[1].x, s[1].y}),
                w = rotated(a.w, b.w, {c[1].z, c[1].w}, {s[1].z, s[1].w});
    return {{x.x, y.x, z.x, w.x}, {x.y, y.y, z.y, w.y}};
}

// A chunk of a row after RoPE: by chunks where rotary_dim ends with one, else by words.
__device__ __forceinline__ uint4 rotated_chunk(const uint4* row, int chunk, int rotary_dim, RopeAngles angles) {
    const int half = rotary_dim / 16;
    const uint4 own = row[chunk];
    if (8 * chunk >= rotary_dim) return own;
    if (rotary_dim % 16) {
        const unsigned* const words = reinterpret_cast<const unsigned*>(row);
        return {apply_rope(words, 4 * chunk, angles), apply_rope(words, 4 * chunk + 1, angles),
                apply_rope(words, 4 * chunk + 2, angles), apply_rope(words, 4 * chunk + 3, angles)};
    }
    const bool is_high = chunk >= half;
    const uint4 partner = row[is_high ? chunk - half : chunk + half];
    const ChunkPair both = rotated_chunks(is_high ? partner : own, is_high ? own : partner,
                                          chunk_angles(angles, is_high ? chunk - half : chunk));
    return is_high ? both.high : both.low;
}

// Rotates, in place, a chunk of a row of a tile and its partner `half` chunks further on.
template <class Layout = TileLayout<false, 0>>
__device__ __forceinline__ void rotate_chunks(unsigned char* tile, int row, int chunk, int half,
                                              const ChunkAngles& angles) {
    uint4* const low = reinterpret_cast<uint4*>(tile + Layout::offset(row, chunk));
    uint4* const high = reinterpret_cast<uint4*>(tile + Layout::offset(row, chunk + half));
    const ChunkPair both = rotated_chunks(*low, *high, angles);
    *low = both.low;
    *high = both.high;
}

// Applies RoPE in place to a word of a row of a tile, and to its partner `half` words further on.
__device__ __forceinline__ void apply_rope_in_tile(unsigned char* tile, int row, int word, int half,
                                                   RopeAngles angles) {
    rotate_in_tile(tile, row, word, half, angles.cosine(word), angles.sine(word));
}
