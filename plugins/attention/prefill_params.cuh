// Parameters of the prefill kernels.
#pragma once

#include "attention/config.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax_state.cuh"
#include "attention/token_tree.cuh"

// Several blocks may share a row block; or one block has each. trt_kvcache/kernels/prefill_plan.py has the same
// numbers.
constexpr int kFromLast = 0, kSplit = 1, kInPairs = 2;

// Scales of a quantized cache; strides in floats.
struct KVScales {
    float* scales;  // [2, num_kv_heads], or [batch, 2, num_kv_heads, tokens]
    long long slot_stride, kv_stride, head_stride;
    bool per_token;

    __device__ __forceinline__ float* of(int slot, int kv, int kv_head, int token) const {
        return scales + slot * slot_stride + kv * kv_stride + kv_head * head_stride + (per_token ? token : 0);
    }
};

struct PrefillParams {
    const int *lengths, *new_lengths;  // [batch]; new_lengths may be null: `width` for all
    int max_sequence_length;           // rows of a head in the cache
    int window;                        // 0: no sliding window
    int batch_size, num_kv_heads, group_size, width;
    int row_blocks;        // of `width` new tokens, for each slot and K/V head
    int order;             // of row blocks: kSplit, or one block for each, kFromLast or kInPairs
    unsigned char* cache;  // [batch, 2, num_kv_heads, max_sequence_length, kHeadDim]; strides in bytes
    long long slot_stride, kv_stride;
    const unsigned char* q;  // [batch, width, num_kv_heads, group_size, kHeadDim]
    long long q_stride, q_token_stride;
    const unsigned char* k;  // [batch, width, num_kv_heads, kHeadDim], before RoPE
    long long k_stride, k_token_stride;
    const unsigned char* v;
    long long v_stride, v_token_stride;
    const float* cos_sin;  // [max_sequence_length or more, 2, rotary_dim / 2]
    int rotary_dim;
    ScoreTransform score;
    AttentionSinks sinks;
    unsigned char* out;     // as q, contiguous
    float4* partials;       // the workspace: see SplitKVReduce
    TokenTree tree;         // of the new tokens
    KVScales scales;        // of a quantized cache
    float value_scale = 1;  // what output is multiplied with

    // If heads have one scale each: so that products of quantized values become scores, and the output values.
    __device__ __forceinline__ void use_head_scales(int slot, int kv_head) {
        if (scales.per_token) return;
        score = score.times(*scales.of(slot, 0, kv_head, 0));
        value_scale = *scales.of(slot, 1, kv_head, 0);
    }
};
