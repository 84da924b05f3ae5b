// Update of a state by one token of the gated delta rule.
//
// S = decay * S; change = beta * (v - k S); S = S + k^T change; out = q S. Both products with S are made before it
// changes: q (decay * S + k^T change) = decay * q S + (q k) change. So there is one reduction over rows for each token.
#pragma once

#include "recurrent/delta_rule_params.cuh"

// trt_kvcache/kernels/delta_rule_kernels.py has the same number.
constexpr int kDeltaMaxKeyDim = 128;

constexpr int kColumns = kPerVector<State>;

// Scalars of a token, for all columns.
struct DeltaStep {
    float decay, beta;
    float inverse_k;  // 1 / |k|
    float query;      // scale / |q|
    float key_query;  // scale * q k / |q|, of a k that has no norm yet

    // Of a column, from its v and k S: what is added to a row is k * change. Neither k has its norm.
    __device__ __forceinline__ float change(float v, float key_sum) const {
        return inverse_k * beta * (v - decay * inverse_k * key_sum);
    }
    // Of a column, from its q S and its change.
    __device__ __forceinline__ float output(float query_sum, float change) const {
        return decay * query * query_sum + key_query * change;
    }
};

__device__ __forceinline__ DeltaStep delta_step(const DeltaParams& params, float2 gates, float kk, float qq, float kq) {
    const float query = 1.0f / (sqrtf(static_cast<float>(params.key_dim)) * sqrtf(qq + kNormEpsilon));
    const float inverse_k = 1.0f / sqrtf(kk + kNormEpsilon);
    return {gates.x, gates.y, inverse_k, query, query * kq};
}

// Decay and beta of a token.
__device__ __forceinline__ float2 gates_of(const DeltaParams& params, long long slot, long long token, long long head) {
    const float a = load_element(Element{}, params.a.row(slot, token), head),
                b = load_element(Element{}, params.b.row(slot, token), head);
    const float2 gate = log_gates(params, a, b, head);
    return {expf(gate.x), gate.y};
}

// The head of q and k that a head has.
__device__ __forceinline__ long long key_head_of(const DeltaParams& params, long long head) {
    return static_cast<int>(head) / (static_cast<int>(params.heads) / static_cast<int>(params.key_heads));
}
