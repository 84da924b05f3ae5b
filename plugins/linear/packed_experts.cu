// Products of up to 8 rows with chosen experts in 4 or 8 bits (linear/experts.cuh), which become elements in registers
// (linear/packed_values.cuh). Launched by trt_kvcache/kernels/expert_kernels.py.
//
// The matrices of all experts follow each other, in whole tiles of 16 outputs: with a gate, those of the gate, then those
// of up.

#include "linear/experts.cuh"
#include "linear/packed_values.cuh"

struct PackedExpertParams : ExpertParams {
    PackedMatrix weight;
};

template <int kTileCount, bool kHasGate, bool kHasZeroPoints>
class PackedExperts {
    static constexpr int kFragmentLoads = kTileCount * kVectors, kMaxDepth = 4;

public:
    using Params = PackedExpertParams;
    struct Fragment {
        PackedFragment<kHasZeroPoints> tiles[kTileCount];

        __device__ __forceinline__ uint4 elements(int tile, int i, int half) const {
            return tiles[tile].elements(i, half);
        }
    };
    static constexpr int kTiles = kTileCount,
                         kDepth = kLoads / kFragmentLoads < kMaxDepth ? kLoads / kFragmentLoads : kMaxDepth;
    static constexpr bool kGated = kHasGate;

    __device__ __forceinline__ PackedExperts(const Params& params) : params_(params), policy_(evict_first_policy()) {
        begin(0, 0);
    }

    __device__ __forceinline__ void begin(int expert, int tile) {
#pragma unroll
        for (int x = 0; x < kTiles; x++) starts_[x] = params_.weight.start(weight_tile(expert, tile, x));
    }

    // `input`: the first one of the lane. Behind the last input, finite weights.
    __device__ __forceinline__ void load(Fragment& fragment, int input) const {
#pragma unroll
        for (int x = 0; x < kTiles; x++)
            params_.weight.load(fragment.tiles[x], starts_[x], input / kFragmentInputs, 0, policy_);
    }

    // A line of a fragment for each lane.
    __device__ __forceinline__ void prefetch(int expert, int tile, int input) const {
        constexpr int kLine = 128, kLines = kFragmentBytes / kLine;
        const int lane = threadIdx.x % 32;
        if (lane >= kTiles * kLines) return;
        prefetch_l2_line(params_.weight.fragments_of(weight_tile(expert, tile, lane / kLines))
                         + static_cast<long long>(input / kFragmentInputs) * kFragmentBytes + lane % kLines * kLine);
    }

private:
    // Of 16 outputs of the tile: gate and up, or neighbours.
    __device__ __forceinline__ int weight_tile(int expert, int tile, int x) const {
        const int tiles = (params_.outputs + kTileOutputs - 1) / kTileOutputs;
        if (kGated) return (2 * expert + x) * tiles + tile;
        return expert * tiles + min(tile * kTiles + x, tiles - 1);
    }

    const Params& params_;
    const L2Policy policy_;
    PackedMatrix::Start starts_[kTiles];
};

#define ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, \
        const unsigned char *zero_points, EXPERT_ARGUMENTS, long long groups, long long group_shift
#define PARAMS \
    { \
        EXPERT_PARAMS, { \
            values, scales, zero_points, static_cast<int>((inputs + kFragmentInputs - 1) / kFragmentInputs), \
                static_cast<int>(groups), static_cast<int>(group_shift) \
        } \
    }

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_silu_mul(ARGUMENTS) {
    expert_products<PackedExperts<2, true, false>, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_gelu_tanh_mul(ARGUMENTS) {
    expert_products<PackedExperts<2, true, false>, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_clamped_swiglu(ARGUMENTS) {
    expert_products<PackedExperts<2, true, false>, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_linear(ARGUMENTS) {
    expert_products<PackedExperts<2, false, false>, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_relu2(ARGUMENTS) {
    expert_products<PackedExperts<2, false, false>, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_down_16(ARGUMENTS) {
    expert_products<PackedExperts<1, false, false>, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_experts_down_32(ARGUMENTS) {
    expert_products<PackedExperts<2, false, false>, true, void>(PARAMS);
}

// Nothing for values that have no zero points.
template <int kTiles, bool kGated, bool kSums, class Epilogue>
__device__ __forceinline__ void products_with_zero_points(const PackedExpertParams& params) {
    if constexpr (!kIsSame<Stored, E2m1>) expert_products<PackedExperts<kTiles, kGated, true>, kSums, Epilogue>(params);
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
