// Products of up to 8 rows with chosen experts in super-blocks (linear/experts.cuh). Launched by
// trt_kvcache/kernels/expert_kernels.py.

#include "linear/experts.cuh"
#include "linear/packed_expert_weights.cuh"
#include "linear/super_block_values.cuh"

struct SuperBlockExpertParams : ExpertParams {
    SuperBlockMatrix<STORED> weight;
};

template <int kTiles, bool kGated>
using Weights = PackedExperts<SuperBlockExpertParams, kTiles, kGated>;

#define ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, const unsigned char *factors, \
        EXPERT_ARGUMENTS
#define PARAMS \
    { \
        EXPERT_PARAMS, { values, scales, factors, static_cast<int>(inputs / kFragmentInputs) } \
    }

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_silu_mul(ARGUMENTS) {
    expert_products<Weights<2, true>, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_gelu_tanh_mul(ARGUMENTS) {
    expert_products<Weights<2, true>, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_clamped_swiglu(ARGUMENTS) {
    expert_products<Weights<2, true>, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_linear(ARGUMENTS) {
    expert_products<Weights<2, false>, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_relu2(ARGUMENTS) {
    expert_products<Weights<2, false>, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_down_16(ARGUMENTS) {
    expert_products<Weights<1, false>, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_experts_down_32(ARGUMENTS) {
    expert_products<Weights<2, false>, true, void>(PARAMS);
}
