// Products of up to 8 rows with chosen experts in 16 bits (linear/experts.cuh). Launched by
// trt_kvcache/kernels/expert_kernels.py.

#include "linear/dense_expert_weights.cuh"
#include "linear/experts.cuh"

struct DenseExpertParams : ExpertParams {
    const unsigned char* weight;
};

template <int kTiles, bool kGated>
using Weights = DenseExperts<DenseExpertParams, kTiles, kGated>;

#define ARGUMENTS const unsigned char *x, const unsigned char *weight, EXPERT_ARGUMENTS
#define PARAMS {EXPERT_PARAMS, weight}

extern "C" __global__ void __launch_bounds__(kThreads) experts_silu_mul(ARGUMENTS) {
    expert_products<Weights<2, true>, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_gelu_tanh_mul(ARGUMENTS) {
    expert_products<Weights<2, true>, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_clamped_swiglu(ARGUMENTS) {
    expert_products<Weights<2, true>, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_linear(ARGUMENTS) {
    expert_products<Weights<2, false>, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_relu2(ARGUMENTS) {
    expert_products<Weights<2, false>, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_down_16(ARGUMENTS) {
    expert_products<Weights<1, false>, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_down_32(ARGUMENTS) {
    expert_products<Weights<2, false>, true, void>(PARAMS);
}
