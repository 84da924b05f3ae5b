// Products of up to 8 rows with chosen experts in 16 bits (linear/experts.cuh). Launched by
// trt_kvcache/kernels/expert_kernels.py.

#include "linear/dense_weights.cuh"
#include "linear/experts.cuh"
#include "load_once.cuh"

struct DenseExpertParams : ExpertParams {
    const unsigned char* weight;
};

template <int kTileCount, bool kHasGate>
class DenseExperts {
public:
    using Params = DenseExpertParams;
    using Fragment = WeightFragment<kTileCount>;
    static constexpr int kTiles = kTileCount, kDepth = kLoads / (4 * kTiles);
    static constexpr bool kGated = kHasGate;

    __device__ __forceinline__ DenseExperts(const Params& params) : params_(params), policy_(evict_first_policy()) {}

    __device__ __forceinline__ void begin(int expert, int tile) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int row = 0; row < 2 * kTiles; row++) rows_[row] = weight_row(expert, tile, lane / 4 + 8 * row);
    }

    // `input`: the first one of the lane. Behind the last input, zeros.
    __device__ __forceinline__ void load(Fragment& weights, int input) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = input + half * kHalfInputs;
#pragma unroll
            for (int row = 0; row < 2 * kTiles; row++) {
                weights.words[row / 2][row % 2][half] =
                    load_once(rows_[row] + at * kElementBytes, at < params_.inputs, policy_);
            }
        }
    }

    // A line of a row for each lane.
    __device__ __forceinline__ void prefetch(int expert, int tile, int input) const {
        const int lane = threadIdx.x % 32;
        if (lane < kTiles * kTileOutputs) prefetch_l2_line(weight_row(expert, tile, lane) + input * kElementBytes);
    }

private:
    __device__ __forceinline__ const unsigned char* weight_row(int expert, int tile, int row) const {
        const long long outputs = static_cast<long long>(params_.outputs) * (kGated ? 2 : 1);
        return OutputTile<kTiles, kGated>::weight_row(params_, tile, row)
               + expert * outputs * params_.inputs * kElementBytes;
    }

    const Params& params_;
    const L2Policy policy_;
    const unsigned char* rows_[2 * kTiles];
};

#define ARGUMENTS const unsigned char *x, const unsigned char *weight, EXPERT_ARGUMENTS
#define PARAMS {EXPERT_PARAMS, weight}

extern "C" __global__ void __launch_bounds__(kThreads) experts_silu_mul(ARGUMENTS) {
    expert_products<DenseExperts<2, true>, false, TimesUp<Silu>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_gelu_tanh_mul(ARGUMENTS) {
    expert_products<DenseExperts<2, true>, false, TimesUp<GeluTanh>>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_clamped_swiglu(ARGUMENTS) {
    expert_products<DenseExperts<2, true>, false, ClampedSwiglu>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_linear(ARGUMENTS) {
    expert_products<DenseExperts<2, false>, false, Identity>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_relu2(ARGUMENTS) {
    expert_products<DenseExperts<2, false>, false, Relu2>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_down_16(ARGUMENTS) {
    expert_products<DenseExperts<1, false>, true, void>(PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_down_32(ARGUMENTS) {
    expert_products<DenseExperts<2, false>, true, void>(PARAMS);
}
