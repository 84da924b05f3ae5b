// Parameters of the kernels of Mamba-2.
#pragma once

#include "recurrent/elements.cuh"
#include "recurrent/functions.cuh"

using Element = ELEMENT;
using State = STATE;

struct MambaParams {
    Tokens x, dt, b, c;
    const float* a;  // [heads]: negative
    const float* d;  // [heads], or null
    const float* dt_bias;
    float dt_min, dt_max;
    const void* past;
    void* present;
    const int* new_lengths;
    long long width, heads, head_dim, groups, state_size, lanes;
    void* out;  // [B, width, heads, head_dim]
};

// The time step of a token, and what is left of the state after it.
__device__ __forceinline__ float2 time_step(const MambaParams& params, float dt, float bias, float a) {
    const float step = min(max(softplus(dt + bias), params.dt_min), params.dt_max);
    return {step, expf(step * a)};
}
