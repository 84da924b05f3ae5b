// Products of the rows of a prompt with chosen experts, or with one matrix, in 4 or 8 bits (linear/expert_tiles.cuh).
// Launched by trt_kvcache/kernels/expert_tile_kernels.py.

#include "dependent_launch.cuh"
#include "linear/expert_tiles.cuh"
#include "linear/packed_expert_weights.cuh"
#include "linear/packed_values.cuh"

template <bool kHasZeroPoints>
struct PackedTileParams : ExpertTileParams {
    GroupedMatrix<kHasZeroPoints> weight;
};

template <bool kGated, bool kHasZeroPoints>
using Weights = PackedExperts<PackedTileParams<kHasZeroPoints>, 2, kGated>;

#define ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, \
        const unsigned char *zero_points, EXPERT_TILE_ARGUMENTS, long long groups, long long group_shift, \
        long long scale_pairs
#define PARAMS \
    { \
        EXPERT_TILE_PARAMS, { \
            { \
                values, scales, zero_points, static_cast<int>((inputs + kFragmentInputs - 1) / kFragmentInputs), \
                    static_cast<int>(groups), static_cast<int>(group_shift), static_cast<int>(scale_pairs) \
            } \
        } \
    }

extern "C" __global__ void __launch_bounds__(kThreads) packed_expert_tiles_silu_mul(ARGUMENTS) {
    expert_tiles<Weights<true, false>, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_expert_tiles_gelu_tanh_mul(ARGUMENTS) {
    expert_tiles<Weights<true, false>, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_expert_tiles_clamped_swiglu(ARGUMENTS) {
    expert_tiles<Weights<true, false>, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_expert_tiles_linear(ARGUMENTS) {
    expert_tiles<Weights<false, false>, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_expert_tiles_relu2(ARGUMENTS) {
    expert_tiles<Weights<false, false>, Relu2>(PARAMS);
}

// Nothing for values that have no zero points.
template <bool kGated, class Epilogue>
__device__ __forceinline__ void tiles_with_zero_points(const PackedTileParams<true>& params) {
    if constexpr (kAllowsZeroPoints) expert_tiles<Weights<kGated, true>, Epilogue>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_expert_tiles_silu_mul(ARGUMENTS) {
    tiles_with_zero_points<true, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_expert_tiles_gelu_tanh_mul(ARGUMENTS) {
    tiles_with_zero_points<true, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_expert_tiles_clamped_swiglu(ARGUMENTS) {
    tiles_with_zero_points<true, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_expert_tiles_linear(ARGUMENTS) {
    tiles_with_zero_points<false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_expert_tiles_relu2(ARGUMENTS) {
    tiles_with_zero_points<false, Relu2>(PARAMS);
}
