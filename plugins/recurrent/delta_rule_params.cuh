// Parameters of the kernels of the gated delta rule.
#pragma once

#include "recurrent/elements.cuh"
#include "recurrent/functions.cuh"

using Element = ELEMENT;
using State = STATE;

constexpr float kNormEpsilon = 1e-6f;

struct DeltaParams {
    Tokens q, k, v, a, b;
    const float* decay;    // [heads]: negative
    const float* dt_bias;  // [heads], or null
    const void* past;
    void* present;
    const int* new_lengths;
    long long width, heads, key_heads, key_dim, value_dim;
    void* out;  // [B, width, heads, value_dim]
};

// Logarithm of the decay and beta of a token, from what projections give.
__device__ __forceinline__ float2 log_gates(const DeltaParams& params, float a, float b, long long head) {
    const float step = softplus(a + (params.dt_bias ? params.dt_bias[head] : 0.0f));
    return {step * params.decay[head], sigmoid(b)};
}
