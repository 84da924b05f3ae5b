// Layout of the products of a decode kernel with this number of rows: by rows (decode_rows.cuh), or by keys
// (decode_keys.cuh) where 8 rows of 16 would be empty.
#pragma once

#include "attention/decode_params.cuh"
#include "attention/mma.cuh"
#include "attention/softmax_state.cuh"
#include "attention/stored_kv.cuh"

// Types of a layout: the fragments of q and the state of a head in a warp, the scores of a tile, and the layout of
// output fragments in shared memory.
template <int kRows, bool kByKeys = kRows == 8>
struct DecodeLayout;

// Maximum of a row after the score `higher`: unchanged unless the score exceeds it by kRescaleThreshold.
__device__ __forceinline__ float followed(float maximum, float higher, float factor) {
    return (higher - maximum) * factor > kRescaleThreshold ? higher : maximum;
}

// The scales of the tokens of a tile, in shared memory.
struct TileScales {
    const float* scales;

    __device__ __forceinline__ float of(int token) const { return scales[token]; }
    // Of an even token, and of the next one.
    __device__ __forceinline__ float2 operator()(int token) const {
        return reinterpret_cast<const float2*>(scales)[token / 2];
    }
};

// Both words that a lane has of 16 columns of a new key. `key`: its word at the lane's place in the quad.
template <class Quantized = Stored>
__device__ __forceinline__ uint2 new_key_words(const unsigned* key, int d) {
    if constexpr (kQuantized) {
        return widen_in_order(Element{}, Quantized{}, key[4 * d]);
    } else {
        return {key[8 * d], key[8 * d + 4]};
    }
}
