// Products of the rows of a prompt with chosen experts in 16 bits (linear/expert_tiles.cuh). Launched by
// trt_kvcache/kernels/expert_tile_kernels.py.

#include "dependent_launch.cuh"
#include "linear/dense_expert_weights.cuh"
#include "linear/expert_tiles.cuh"

struct DenseTileParams : ExpertTileParams {
    const unsigned char* weight;
};

template <bool kGated>
using Weights = DenseExperts<DenseTileParams, 2, kGated>;

#define ARGUMENTS const unsigned char *x, const unsigned char *weight, EXPERT_TILE_ARGUMENTS
#define PARAMS {EXPERT_TILE_PARAMS, weight}

extern "C" __global__ void __launch_bounds__(kThreads) expert_tiles_silu_mul(ARGUMENTS) {
    expert_tiles<Weights<true>, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) expert_tiles_gelu_tanh_mul(ARGUMENTS) {
    expert_tiles<Weights<true>, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) expert_tiles_clamped_swiglu(ARGUMENTS) {
    expert_tiles<Weights<true>, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) expert_tiles_linear(ARGUMENTS) {
    expert_tiles<Weights<false>, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) expert_tiles_relu2(ARGUMENTS) {
    expert_tiles<Weights<false>, Relu2>(PARAMS);
}
