// Attention sinks: each query head of a layer may have a learned logit that joins the softmax of its scores, after
// scale and softcap, and has no value. So it only adds to the sum that an output row is divided by. It is added once:
// after the blocks that share a head have been merged.
#pragma once

#include "attention/math.cuh"
#include "attention/softmax_state.cuh"

struct AttentionSinks {
    const float* logits;  // [num_kv_heads, group_size]; null: none

    // The sum of probabilities of a row with its sink, relative to the maximum of its scores; `factor` is that of
    // ScoreTransform. Infinite for a sink far above all scores: then the output is 0.
    __device__ __forceinline__ float added_to(float sum, float maximum, float factor, int query_head) const {
        if (logits == nullptr) return sum;
        return sum + exp2_approx(logits[query_head] * kLog2E - maximum * factor);
    }
};
