// Activations of gates, and softplus, from which time steps (Mamba-2) and decays (the gated delta rule) are computed.
#pragma once

#include "attention/math.cuh"

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// To about 2^-20.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
