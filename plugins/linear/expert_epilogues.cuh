// Epilogues of products into experts, from the product of the gate and that of up.
#pragma once

#include "gate_activation.cuh"
#include "linear/config.cuh"

struct ClampedParams : LinearParams {
    float alpha, limit;  // of clamped SwiGLU
};

template <class Activation>
struct TimesUp {
    static __device__ __forceinline__ float of(const ClampedParams&, float gate, float up) {
        return Activation::of(gate) * up;
    }
};
struct ClampedSwiglu {
    static __device__ __forceinline__ float of(const ClampedParams& params, float gate, float up) {
        const float limit = params.limit;  // a NaN stays one
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return gate / (1.0f + expf(-params.alpha * gate)) * (up + 1.0f);
    }
};
