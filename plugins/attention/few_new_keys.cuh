// The start of a head with several new tokens and up to 8 rows, which are the columns of a product (decode_keys.cuh).
// The rest is in few_new_tokens.cuh.
#pragma once

#include "attention/decode_keys.cuh"
#include "attention/decode_quantized.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/schedule.cuh"

constexpr int kFewAtOnce = kQuantized ? 4 : 2;  // chunks of 16 columns in one ldmatrix

// Address that this lane passes to ldmatrix for chunks from `first` on, in row `row` of the keys or values of the new
// tokens.
__device__ __forceinline__ SharedAddress few_address(SharedAddress tile, int row, int first) {
    const int lane = threadIdx.x % 32;
    return tile
           + (kQuantized ? row * kRowBytes + 16 * min(first + lane / 8, kStoredRowChunks - 1)
                         : swizzled_offset(row, min(2 * first + lane / 8, kRowChunks - 1)));
}

// Products of q and the new tokens, which are the first 8 keys of an A fragment. If there are fewer than 8, the last one
// is repeated. `row`: start of the row that this lane passes to ldmatrix. `odd`: sums of every other chunk, to be added
// to the scores.
template <class Quantized = Stored>
__device__ __forceinline__ void multiply_few_keys(float (&scores)[4], float (&odd)[4], const KeyQueries& queries,
                                                  SharedAddress keys, int row) {
#pragma unroll
    for (int first = 0; first < kHeadDim / 16; first += kFewAtOnce) {
        unsigned loaded[4];
        ldmatrix_x4(loaded, few_address(keys, row, first));
#pragma unroll
        for (int i = 0; i < kFewAtOnce && first + i < kHeadDim / 16; i++) {
            uint2 words;
            if constexpr (kQuantized) {
                words = widen_in_order(Element{}, Quantized{}, loaded[i]);
            } else {
                words = {loaded[2 * i], loaded[2 * i + 1]};
            }
            const unsigned a[4] = {words.x, 0, words.y, 0};
            mma_m16n8k16(Element{}, i % 2 ? odd : scores, a, queries.words[first + i][0], queries.words[first + i][1]);
        }
    }
}

// Adds probabilities, as a B fragment of 8 keys, times the values of the new tokens to the output.
template <class Quantized = Stored>
__device__ __forceinline__ void accumulate_few_values(KeyState& state, unsigned probabilities, SharedAddress values,
                                                      int row) {
#pragma unroll
    for (int first = 0; first < kHeadDim / 16; first += kFewAtOnce) {
        unsigned loaded[4];
        ldmatrix_x4_trans(loaded, few_address(values, row, first));
#pragma unroll
        for (int i = 0; i < kFewAtOnce && first + i < kHeadDim / 16; i++) {
            uint2 words;
            if constexpr (kQuantized) {
                words = widen(Element{}, Quantized{}, loaded[i]);
            } else {
                words = {loaded[2 * i], loaded[2 * i + 1]};
            }
            const unsigned a[4] = {words.x, words.y, 0, 0};
            mma_m16n8k16(Element{}, state.output[first + i], a, probabilities, 0);
        }
    }
}

// Starts the softmax of a warp with the new tokens: a causal mask, within the window.
__device__ __forceinline__ void start_with_few(KeyState& state, const KeyQueries& queries, const DecodeParams& params,
                                               const TileCoord& at, unsigned char* head, const float* new_scales,
                                               HeadScales& head_scales) {
    static_assert(kMaxNewTokens <= 8, "the new tokens are half the keys of one fragment");
    using SharedMemory = DecodeSharedMemory<8>;
    const int lane = threadIdx.x % 32, row = min(lane % 8, at.count - 1), key = lane / 4;
    const auto scale_of = [&](int kv, int token) { return new_scales[kv * kMaxNewTokens + min(token, at.count - 1)]; };
    float scores[1][4] = {}, odd[4] = {};  // two sums that do not wait for each other
    multiply_few_keys(scores[0], odd, queries, shared_address(head + SharedMemory::kKeysOffset), row);
    const float key_scale = kQuantized ? scale_of(0, key) : 1.0f;
    const int span = params.window > 0 ? params.window : 0x7FFFFFFF;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float product = (scores[0][e] + odd[e]) * key_scale;
        if (params.score.has_softcap()) product = params.score.softcap(product);
        const int distance = divide_small(lane % 4 * 2 + e, params.group_size) - key;
        scores[0][e] = distance < 0 || distance >= span ? kMaskedScore : product;
        scores[0][e + 2] = kMaskedScore;  // there are 8 keys
    }
    state.update(scores, params.score.factor);
    if constexpr (kQuantized)
        scale_fragments(head_scales, params, state, scores, [&](int token) { return scale_of(1, token); });
    const unsigned probabilities = transpose_matrix(pack(Element{}, {scores[0][0], scores[0][1]}));
    accumulate_few_values(state, probabilities, shared_address(head + SharedMemory::kValuesOffset), row);
}
