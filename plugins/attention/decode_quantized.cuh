// Decode kernels over a cache with scales. Products of q and quantized values of K become scores, probabilities become
// factors of quantized values of V, and a new token is quantized before any block attends to it.
//
// One scale for all tokens of a head is a factor of its scores, and of its output. Scales of tokens are factors of
// single scores and probabilities. Probabilities times scales are rounded to elements, and a scale can be too small for
// Float16. So scales of V are relative to a power of 2, with which the output of a warp is multiplied in the end.
#pragma once

#include "attention/decode_params.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/query_fragments.cuh"

// Scales of the head that a warp works on.
struct HeadScales {
    float key = 1;    // of K, if it is the same for all tokens
    float value = 0;  // unit of this warp's output: the scale of V, or a power of 2

    // Before the first key of a head. new_scales: those of K, then of V, of the new tokens.
    __device__ __forceinline__ void start(const DecodeParams& params, const float* new_scales) {
        key = new_scales[0];
        value = params.scales_per_token() ? 0 : new_scales[kMaxNewTokens];
    }

    // Factor of the quantized values of a first value with this scale, for an output in the unit `value`.
    __device__ __forceinline__ float relative_to_new_value(const DecodeParams& params, float scale) {
        if (!params.scales_per_token()) return 1;
        value = power_below(scale);
        return scale * inverse_of(value);
    }

    // Multiplies the products of q with kFragments * 8 quantized keys by the scales of the keys. token_scales(key)
    // returns the scales of that key and the next.
    template <int kRows, int kFragments, class TokenScales>
    __device__ __forceinline__ void scale_scores(const DecodeParams& params,
                                                 float (&scores)[kRowTiles<kRows>][kFragments][4],
                                                 TokenScales token_scales) const {
        const int place = threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < kFragments; n++) {
            const float2 scale = params.scales_per_token() ? token_scales(8 * n + place) : float2{key, key};
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
                for (int e = 0; e < kRowsOfTile<kRows> / 4; e++) scores[m][n][e] *= e % 2 ? scale.y : scale.x;
            }
        }
    }

    // Multiplies the probabilities of kFragments * 8 tokens by the scales of their values; the sums of the softmax
    // already include them, unscaled.
    template <int kRows, int kFragments, class TokenScales>
    __device__ __forceinline__ void scale_probabilities(const DecodeParams& params, RowStates<kRows>& state,
                                                        float (&probabilities)[kRowTiles<kRows>][kFragments][4],
                                                        TokenScales token_scales) {
        if (!params.scales_per_token()) return;
        float2 scales[kFragments];
        float largest = 0;
#pragma unroll
        for (int n = 0; n < kFragments; n++) {
            scales[n] = token_scales(8 * n + threadIdx.x % 4 * 2);
            largest = fmaxf(largest, fmaxf(scales[n].x, scales[n].y));
        }
        const float power = power_below(quad_max(largest));
        if (power > value) {  // the same in all lanes
            const float less = raise(power);
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
                for (int d = 0; d < kHeadDim / 8; d++) {
#pragma unroll
                    for (int e = 0; e < kRowsOfTile<kRows> / 4; e++) state[m].output[d][e] *= less;
                }
            }
        }
        const float inverse = inverse_of(value);
#pragma unroll
        for (int n = 0; n < kFragments; n++) {
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
                for (int e = 0; e < kRowsOfTile<kRows> / 4; e++)
                    probabilities[m][n][e] *= (e % 2 ? scales[n].y : scales[n].x) * inverse;
            }
        }
    }

    // Changes the unit to another power of 2, and returns the factor that converts an output to it.
    __device__ __forceinline__ float raise(float power) {
        const float less = value * inverse_of(power);
        value = power;
        return less;
    }
    static __device__ __forceinline__ float power_below(float scale) {
        return __uint_as_float(__float_as_uint(scale) & 0x7F800000);
    }
    // 1 / power, exactly; any number for 0.
    static __device__ __forceinline__ float inverse_of(float power) {
        return __uint_as_float((254u << 23) - __float_as_uint(power));
    }
};

// Products of q and the quantized values of the keys of a tile. See stored_kv.cuh.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void multiply_quantized_keys(TileScores<kRows>& scores, const QueryFragments<kRows>& queries,
                                                        const unsigned char* tile) {
    const QuantizedAddress rows(shared_address(tile), threadIdx.x % 32);
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
        for (int x = 0; x < kTileTokens / 2; x++) scores[m][x / 4][x % 4] = queries.offset[m][x % 4];
    }
#pragma unroll
    for (int j = 0; j < kTileTokens / 32; j++) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned quantized[4];
            ldmatrix_x4(quantized, rows(d, 32 * j));
            unsigned a[kRowTiles<kRows>][4];
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) queries.a_fragment(a[m], m, d);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint2 b = widen_keys(Element{}, Quantized{}, quantized[i]);
#pragma unroll
                for (int m = 0; m < kRowTiles<kRows>; m++)
                    mma_m16n8k16(Element{}, scores[m][4 * j + i], a[m], b.x, b.y);
            }
        }
    }
}

// Adds probabilities times the quantized values of the values of a tile to the output: of each 16 columns the even
// ones, then the odd ones.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void multiply_quantized_values(RowStates<kRows>& state,
                                                          const TileScores<kRows>& probabilities,
                                                          const unsigned char* tile) {
    const QuantizedAddress rows(shared_address(tile), threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < kTileTokens / 32; j++) {
        unsigned a[2][kRowTiles<kRows>][4];  // of 16 tokens each
#pragma unroll
        for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                pack_a_fragment(Element{}, a[k][m], probabilities[m][4 * j + 2 * k],
                                probabilities[m][4 * j + 2 * k + 1]);
            }
        }
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned quantized[4];
            ldmatrix_x4_trans(quantized, rows(d, 32 * j));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint2 b0 = widen(Element{}, Quantized{}, quantized[2 * k]),
                            b1 = widen(Element{}, Quantized{}, quantized[2 * k + 1]);
#pragma unroll
                for (int m = 0; m < kRowTiles<kRows>; m++) {
                    mma_m16n8k16(Element{}, state[m].output[2 * d], a[k][m], b0.x, b1.x);
                    mma_m16n8k16(Element{}, state[m].output[2 * d + 1], a[k][m], b0.y, b1.y);
                }
            }
        }
    }
}

// The same with the new tokens, which are the 8 keys of one B fragment. `row`: where the quantized values of the row
// begin that this lane passes to ldmatrix; rows are not swizzled. `odd`: sums of every other chunk, to be added to the
// scores.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void multiply_new_quantized_keys(float (&scores)[kRowTiles<kRows>][1][4],
                                                            float (&odd)[kRowTiles<kRows>][4],
                                                            const QueryFragments<kRows>& queries, SharedAddress row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kStoredRowChunks; first += 4) {
        unsigned quantized[4];
        ldmatrix_x4(quantized, row + 16 * min(first + lane / 8, kStoredRowChunks - 1));
#pragma unroll
        for (int i = 0; i < 4 && first + i < kStoredRowChunks; i++) {
            const uint2 b = widen_in_order(Element{}, Quantized{}, quantized[i]);
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                unsigned a[4];
                queries.a_fragment(a, m, first + i);
                mma_m16n8k16(Element{}, i % 2 ? odd[m] : scores[m][0], a, b.x, b.y);
            }
        }
    }
}
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void multiply_new_quantized_values(RowStates<kRows>& state,
                                                              const float (&probabilities)[kRowTiles<kRows>][1][4],
                                                              SharedAddress row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kStoredRowChunks; first += 4) {
        unsigned quantized[4];
        ldmatrix_x4_trans(quantized, row + 16 * min(first + lane / 8, kStoredRowChunks - 1));
#pragma unroll
        for (int i = 0; i < 4 && first + i < kStoredRowChunks; i++) {
            const uint2 b = widen(Element{}, Quantized{}, quantized[i]);
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                const float (&p)[4] = probabilities[m][0];
                const unsigned a[4] = {pack(Element{}, {p[0], p[1]}), pack(Element{}, {p[2], p[3]}), 0, 0};
                mma_m16n8k16(Element{}, state[m].output[2 * (first + i)], a, b.x, 0);
                mma_m16n8k16(Element{}, state[m].output[2 * (first + i) + 1], a, b.y, 0);
            }
        }
    }
}

// Quantizes a row of K or (kv: 1) V of a new token: word_of(x) gives two elements. The quantized values are written to
// `quantized`, and to the cache at `position`. With per-token scales, the scale is computed from the row and written to
// `scale` and to the cache; otherwise it is read from `scale`. For a whole warp.
template <class WordOf, class Quantized = Stored>
__device__ __forceinline__ void quantize_row(const DecodeParams& params, const TileCoord& at, int kv, int position,
                                             unsigned char* quantized, float* scale, WordOf word_of) {
    constexpr int kQuads = kHeadDim / 4, kLaneQuads = (kQuads + 31) / 32;
    const int lane = threadIdx.x % 32;
    float2 low[kLaneQuads], high[kLaneQuads];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneQuads; i++) {
        const int quad = lane + 32 * i;
        low[i] = high[i] = {0, 0};
        if (quad >= kQuads) continue;
        low[i] = unpack(Element{}, word_of(2 * quad));
        high[i] = unpack(Element{}, word_of(2 * quad + 1));
        largest =
            fmaxf(fmaxf(fmaxf(fabsf(low[i].x), fabsf(low[i].y)), fmaxf(fabsf(high[i].x), fabsf(high[i].y))), largest);
    }
    float used = *scale;
    if (params.scales_per_token())
        used = scale_of_row(Quantized{}, __uint_as_float(warp_max(static_cast<int>(__float_as_uint(largest)))));
    __syncwarp();  // all have read what may lie where `quantized` are
    unsigned char* const appended =
        params.cache + at.slot * params.slot_stride + kv * params.kv_stride
        + (static_cast<long long>(at.kv_head) * params.max_sequence_length + position) * kStoredRowBytes;
#pragma unroll
    for (int i = 0; i < kLaneQuads; i++) {
        const int quad = lane + 32 * i;
        if (quad >= kQuads) continue;
        const unsigned word = quantize(Quantized{}, low[i], high[i], used);
        reinterpret_cast<unsigned*>(quantized)[quad] = word;
        reinterpret_cast<unsigned*>(appended)[quad] = word;
    }
    if (!params.scales_per_token() || lane > 0) return;
    *scale = used;
    params.head_scales(at.slot, at.kv_head, kv)[position] = used;
}
