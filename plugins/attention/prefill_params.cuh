// What the prefill kernels are told.
#pragma once

#include "attention/config.cuh"
#include "attention/softmax_state.cuh"

// Several blocks may share a row block; or one block has each. trt_kvcache/kernels/cuda/prefill_plan.py has the same numbers.
constexpr int kFromLast = 0, kSplit = 1, kInPairs = 2;

struct PrefillParams {
    const int *lengths, *new_lengths;  // [batch]; new_lengths may be null: `width` for all
    int max_sequence_length;           // rows of a head in the cache
    int window;                        // 0: no sliding window
    int batch_size, num_kv_heads, group_size, width;
    int row_blocks;                    // of `width` new tokens, for each slot and K/V head
    int order;                         // of row blocks: kSplit, or one block for each, kFromLast or kInPairs
    unsigned char* cache;              // [batch, 2, num_kv_heads, max_sequence_length, kHeadDim]; strides in bytes
    long long slot_stride, kv_stride;
    const unsigned char* q;            // [batch, width, num_kv_heads, group_size, kHeadDim]
    long long q_stride, q_token_stride;
    const unsigned char* k;            // [batch, width, num_kv_heads, kHeadDim], before RoPE
    long long k_stride, k_token_stride;
    const unsigned char* v;
    long long v_stride, v_token_stride;
    const float* cos_sin;              // [max_sequence_length or more, 2, rotary_dim / 2]
    int rotary_dim;
    ScoreTransform score;
    unsigned char* out;                // as q, contiguous
    float4* partials;                  // the workspace: see SplitKVReduce
};
