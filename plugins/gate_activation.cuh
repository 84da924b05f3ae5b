// Activations of an MLP. Those of a gate are x times a sigmoid.
#pragma once

struct Silu {
    static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};

// GELU as x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2u).
struct GeluTanh {
    static __device__ __forceinline__ float of(float x) {
        return x / (1.0f + expf(-1.5957691f * (x + 0.044715f * x * x * x)));
    }
};

// max(x, 0)^2, without a gate. A NaN stays one.
struct Relu2 {
    static __device__ __forceinline__ float of(float x) { return x < 0.0f ? 0.0f : x * x; }
};
