// Products of the rows of a prompt with chosen experts in super-blocks (linear/expert_tiles.cuh). Launched by
// trt_kvcache/kernels/expert_tile_kernels.py.

#include "dependent_launch.cuh"
#include "linear/expert_tiles.cuh"
#include "linear/packed_expert_weights.cuh"
#include "linear/super_block_values.cuh"

struct SuperBlockTileParams : ExpertTileParams {
    SuperBlockMatrix<STORED> weight;
};

template <bool kGated>
using Weights = PackedExperts<SuperBlockTileParams, 2, kGated>;

#define ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, const unsigned char *factors, \
        EXPERT_TILE_ARGUMENTS
#define PARAMS \
    { \
        EXPERT_TILE_PARAMS, { values, scales, factors, static_cast<int>(inputs / kFragmentInputs) } \
    }

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_expert_tiles_silu_mul(ARGUMENTS) {
    expert_tiles<Weights<true>, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_expert_tiles_gelu_tanh_mul(ARGUMENTS) {
    expert_tiles<Weights<true>, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_expert_tiles_clamped_swiglu(ARGUMENTS) {
    expert_tiles<Weights<true>, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_expert_tiles_linear(ARGUMENTS) {
    expert_tiles<Weights<false>, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_expert_tiles_relu2(ARGUMENTS) {
    expert_tiles<Weights<false>, Relu2>(PARAMS);
}
