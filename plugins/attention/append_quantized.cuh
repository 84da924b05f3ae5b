// Quantization and append of a new token of a K/V head, by a warp.
#pragma once

#include "attention/prefill_params.cuh"
#include "attention/rope.cuh"

// Of a row, lane l has words l, l + 32, and so on.
constexpr int kWordsOfLane = (kRowWords + 31) / 32;
using LaneWords = unsigned[kWordsOfLane];

// Quantizes a row and writes it to `to`. With per-token scales (is_own) the scale is computed from the row and written
// to `scale`; otherwise it is read from there.
template <class Quantized>
__device__ __forceinline__ void quantize_row(Quantized, const LaneWords& row, unsigned char* to, float* scale,
                                             bool is_own) {
    const int lane = threadIdx.x % 32;
    float2 values[kWordsOfLane];
    float largest = 0, factor;
#pragma unroll
    for (int i = 0; i < kWordsOfLane; i++) {
        values[i] = unpack(Element{}, row[i]);
        largest = fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
    }
    if (is_own) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        factor = scale_of_row(Quantized{}, largest);
        if (lane == 0) *scale = factor;
    } else {
        factor = *scale;
    }
#pragma unroll
    for (int i = 0; i < kWordsOfLane; i++) {
        const unsigned quantized =
            quantize(Quantized{}, values[i].x, factor) | quantize(Quantized{}, values[i].y, factor) << 8;
        if (lane + 32 * i < kRowWords)
            reinterpret_cast<unsigned short*>(to)[lane + 32 * i] = static_cast<unsigned short>(quantized);
    }
}

// A token of a K/V head: `key`, with RoPE, and `value` to the rows `keys` and `values` of the cache.
template <class Quantized>
__device__ __forceinline__ void append_quantized(Quantized, const unsigned char* key, const unsigned char* value,
                                                 unsigned char* keys, unsigned char* values, const KVScales& scales,
                                                 int slot, int kv_head, int cache_row, RopeAngles angles) {
    const int lane = threadIdx.x % 32;
    LaneWords k, v;
#pragma unroll
    for (int i = 0; i < kWordsOfLane; i++) {
        // a lane past the end of the row reads its last word again, which does not change the largest magnitude
        const int word = min(lane + 32 * i, kRowWords - 1);
        k[i] = apply_rope(reinterpret_cast<const unsigned*>(key), word, angles);
        v[i] = reinterpret_cast<const unsigned*>(value)[word];
    }
    quantize_row(Quantized{}, k, keys, scales.of(slot, 0, kv_head, cache_row), scales.per_token);
    quantize_row(Quantized{}, v, values, scales.of(slot, 1, kv_head, cache_row), scales.per_token);
}
