// Products of a few rows with a matrix of weights: out = x W^T + bias. Launched by
// trt_kvcache/kernels/linear_kernels.py.
//
// The kernel is bound by reading W once. So a thread loads W from global memory straight into registers, 16 bytes at a
// time, with as many loads in flight as registers have room for, across the end of a tile into the next one. W is
// constant, so a block starts these loads before the previous launch, which computes x, has ended.
// linear/product.cuh describes the distribution of W over blocks, warps and lanes.

#include "attention/cp_async.cuh"
#include "linear/dense_weights.cuh"
#include "linear/product.cuh"
#include "load_once.cuh"

template <int kTileCount, bool kGated>
class WeightStream {
    using Tile = OutputTile<kTileCount, kGated>;

public:
    using Params = DenseParams;
    using Fragment = WeightFragment<kTileCount>;
    static constexpr bool kSkipsEmpty = false;
    static constexpr int kTiles = kTileCount, kDepth = kLoads / (4 * kTiles), kInputsAhead = kDepth,
                         kGroupInputs = kDepth * kStepInputs;

    __device__ __forceinline__ WeightStream(const DenseParams& params, int first_input, int first_tile)
        : params_(params), policy_(evict_first_policy()), first_input_(first_input), tile_(first_tile) {
        begin_tile();
    }

    static __device__ __forceinline__ int out_stride(const DenseParams& params) { return params.outputs; }

    __device__ __forceinline__ void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int ahead = step * kStepInputs + half * kHalfInputs;
            const bool valid = input_ + ahead < params_.inputs;
#pragma unroll
            for (int x = 0; x < 2 * kTiles; x++)
                fragment.words[x / 2][x % 2][half] = load_once(rows_[x] + ahead * kElementBytes, valid, policy_);
        }
    }

    __device__ __forceinline__ void next_group() {
        input_ += kGroupInputs;
        if (input_ - first_input_ < params_.inputs) {
#pragma unroll
            for (int x = 0; x < 2 * kTiles; x++) rows_[x] += kGroupInputs * kElementBytes;
            return;
        }
        tile_ += gridDim.x;
        begin_tile();
    }

    // Prefetches the data after the first group of this tile into the L2: a line of a row for each lane.
    __device__ __forceinline__ void prefetch() const {
        constexpr int kRows = kTiles * kTileOutputs, kSteps = 32 / kRows;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (tile_ >= params_.tiles) return;
        const unsigned char* const row = Tile::weight_row(params_, tile_, lane % kRows);
        const int first = kGroupInputs + warp * kFragmentInputs;
#pragma unroll 1
        for (int step = lane / kRows; step < params_.prefetched_steps && first + step * kStepInputs < params_.inputs;
             step += kSteps) {
            prefetch_l2_line(row + (first + step * kStepInputs) * kElementBytes);
        }
    }

private:
    __device__ __forceinline__ void begin_tile() {
        if (tile_ >= params_.tiles) {  // nothing more is loaded
            input_ = params_.inputs;
            return;
        }
        input_ = first_input_;
#pragma unroll
        for (int x = 0; x < 2 * kTiles; x++) {
            rows_[x] = Tile::weight_row(params_, tile_, static_cast<int>(threadIdx.x) % 32 / 4 + 8 * x)
                       + input_ * kElementBytes;
        }
    }

    const DenseParams& params_;
    const L2Policy policy_;
    const int first_input_;  // of this lane, in every row
    int input_;
    int tile_;
    const unsigned char* rows_[2 * kTiles];
};

#define LINEAR_ARGUMENTS \
    const unsigned char *x, const unsigned char *weight, const unsigned short *bias, void *out, long long rows, \
        long long outputs, long long inputs, long long tiles, long long tile_outputs, long long prefetched_steps
#define LINEAR_PARAMS \
    {{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), \
      static_cast<int>(tiles), static_cast<int>(tile_outputs), static_cast<int>(prefetched_steps)}, \
     weight}

extern "C" __global__ void __launch_bounds__(kThreads) linear_16(LINEAR_ARGUMENTS) {
    linear<WeightStream<1, false>, false, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_32(LINEAR_ARGUMENTS) {
    linear<WeightStream<2, false>, false, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_float32_16(LINEAR_ARGUMENTS) {
    linear<WeightStream<1, false>, false, float>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_float32_32(LINEAR_ARGUMENTS) {
    linear<WeightStream<2, false>, false, float>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_silu_mul(LINEAR_ARGUMENTS) {
    linear<WeightStream<2, true>, true, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_gelu_tanh_mul(LINEAR_ARGUMENTS) {
    linear<WeightStream<2, true>, true, unsigned short, GeluTanh>(LINEAR_PARAMS);
}
