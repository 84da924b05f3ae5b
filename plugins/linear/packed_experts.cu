// Products of up to 8 rows with chosen experts in 4 or 8 bits (linear/experts.cuh). Launched by
// trt_kvcache/kernels/expert_kernels.py.

#include "linear/experts.cuh"
#include "linear/packed_expert_weights.cuh"
#include "linear/packed_values.cuh"

template <bool kHasZeroPoints>
struct PackedExpertParams : ExpertParams {
    GroupedMatrix<kHasZeroPoints> weight;
};

template <int kTiles, bool kGated, bool kHasZeroPoints>
using Weights = PackedExperts<PackedExpertParams<kHasZeroPoints>, kTiles, kGated>;

#define ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, \
        const unsigned char *zero_points, EXPERT_ARGUMENTS, long long groups, long long group_shift, \
        long long scale_pairs
#define PARAMS \
    { \
        EXPERT_PARAMS, { \
            { \
                values, scales, zero_points, static_cast<int>((inputs + kFragmentInputs - 1) / kFragmentInputs), \
                    static_cast<int>(groups), static_cast<int>(group_shift), static_cast<int>(scale_pairs) \
            } \
        } \
    }

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_silu_mul(ARGUMENTS) {
    expert_products<Weights<2, true, false>, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_gelu_tanh_mul(ARGUMENTS) {
    expert_products<Weights<2, true, false>, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_clamped_swiglu(ARGUMENTS) {
    expert_products<Weights<2, true, false>, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_linear(ARGUMENTS) {
    expert_products<Weights<2, false, false>, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_relu2(ARGUMENTS) {
    expert_products<Weights<2, false, false>, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_down_16(ARGUMENTS) {
    expert_products<Weights<1, false, false>, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_down_32(ARGUMENTS) {
    expert_products<Weights<2, false, false>, true, void>(PARAMS);
}

// Nothing for values that have no zero points.
template <int kTiles, bool kGated, bool kSums, class Epilogue>
__device__ __forceinline__ void products_with_zero_points(const PackedExpertParams<true>& params) {
    if constexpr (kAllowsZeroPoints) expert_products<Weights<kTiles, kGated, true>, kSums, Epilogue>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_silu_mul(ARGUMENTS) {
    products_with_zero_points<2, true, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_gelu_tanh_mul(ARGUMENTS) {
    products_with_zero_points<2, true, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_clamped_swiglu(ARGUMENTS) {
    products_with_zero_points<2, true, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_linear(ARGUMENTS) {
    products_with_zero_points<2, false, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_relu2(ARGUMENTS) {
    products_with_zero_points<2, false, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_down_16(ARGUMENTS) {
    products_with_zero_points<1, false, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_experts_down_32(ARGUMENTS) {
    products_with_zero_points<2, false, true, void>(PARAMS);
}
