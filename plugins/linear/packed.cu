// Products of a few rows with a matrix of weights in 4 or 8 bits, and those weights as elements. Launched by
// trt_kvcache/kernels/packed_linear_kernels.py.
//
// The loads, the overlap with the launch before and the distribution over blocks and warps are those of linear.cu. The
// weights become elements in registers (linear/packed_values.cuh), which the tensor cores multiply.

#include "attention/cp_async.cuh"
#include "linear/packed_values.cuh"
#include "linear/product.cuh"
#include "load_once.cuh"

struct PackedParams : LinearParams {
    PackedMatrix weight;
};

// Of kTiles tiles of 16 outputs.
template <int kTiles, bool kHasZeroPoints>
struct PackedFragments {
    PackedFragment<kHasZeroPoints> tiles[kTiles];

    __device__ __forceinline__ uint4 elements(int tile, int i, int half) const { return tiles[tile].elements(i, half); }
};

template <int kTileCount, bool kGated, bool kHasZeroPoints>
class PackedStream {
    static constexpr int kFragmentLoads = kTileCount * kVectors, kMaxDepth = 4;

public:
    using Params = PackedParams;
    using Fragment = PackedFragments<kTileCount, kHasZeroPoints>;
    static constexpr bool kSkipsEmpty = true;
    static constexpr int kTiles = kTileCount;
    static constexpr int kDepth = kLoads / kFragmentLoads < kMaxDepth ? kLoads / kFragmentLoads : kMaxDepth;
    static constexpr int kInputsAhead = 1, kGroupInputs = kDepth * kStepInputs;

    __device__ __forceinline__ PackedStream(const PackedParams& params, int)
        : params_(params), policy_(evict_first_policy()), tile_(blockIdx.x) {
        begin_tile();
    }

    __device__ __forceinline__ void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int x = 0; x < kTiles; x++)
            params_.weight.load(fragment.tiles[x], weight_tile(x), fragment_ + step * kWarps, policy_);
    }

    __device__ __forceinline__ void next_group() {
        fragment_ += kDepth * kWarps;
        if (fragment_ - static_cast<int>(threadIdx.x) / 32 < params_.weight.fragments) return;
        tile_ += gridDim.x;
        begin_tile();
    }

    // Brings what comes behind the first group of this tile into the L2: a line of a fragment for each lane.
    __device__ __forceinline__ void prefetch() const {
        constexpr int kLine = 128, kLines = kFragmentBytes / kLine;
        const int lane = threadIdx.x % 32;
        if (lane >= kTiles * kLines) return;
#pragma unroll 1
        for (int step = 0; step < params_.prefetched_steps; step++) {
            const int at = fragment_ + (kDepth + step) * kWarps;
            if (at >= params_.weight.fragments) return;
            prefetch_l2_line(params_.weight.fragment_of(weight_tile(lane / kLines), at) + lane % kLines * kLine);
        }
    }

private:
    __device__ __forceinline__ void begin_tile() {
        fragment_ = tile_ < params_.tiles ? static_cast<int>(threadIdx.x) / 32 : params_.weight.fragments;
    }

    // Of 16 outputs of the tile: gate and up, or neighbours. There is always one, also after the last tile.
    __device__ __forceinline__ int weight_tile(int x) const {
        const int tile = min(tile_, params_.tiles - 1);
        if (kGated) return tile + x * (params_.outputs / kTileOutputs);
        return min(tile * kTiles + x, (params_.outputs - 1) / kTileOutputs);
    }

    const PackedParams& params_;
    const L2Policy policy_;
    int tile_;
    int fragment_;  // the next one of this warp in the tile
};

#define PACKED_ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, \
        const unsigned char *zero_points, const unsigned short *bias, void *out, long long rows, long long outputs, \
        long long inputs, long long tiles, long long tile_outputs, long long prefetched_steps, long long groups, \
        long long group_shift
#define PACKED_PARAMS \
    {{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), \
      static_cast<int>(tiles), static_cast<int>(tile_outputs), static_cast<int>(prefetched_steps)}, \
     packed_matrix(values, scales, zero_points, inputs, groups, group_shift)}

__device__ __forceinline__ PackedMatrix packed_matrix(const unsigned char* values, const unsigned char* scales,
                                                      const unsigned char* zero_points, long long inputs,
                                                      long long groups, long long group_shift) {
    return {values,
            scales,
            zero_points,
            static_cast<int>((inputs + kFragmentInputs - 1) / kFragmentInputs),
            static_cast<int>(groups),
            static_cast<int>(group_shift)};
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, false>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, false>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_float32_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, false>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_float32_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, false>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_silu_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, false>, true, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_gelu_tanh_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, false>, true, unsigned short, GeluTanh>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, true>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, true>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_float32_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, true>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_float32_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, true>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_silu_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, true>, true, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_gelu_tanh_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, true>, true, unsigned short, GeluTanh>(PACKED_PARAMS);
}

// Outputs of W from 16 * first_tile on as elements, [outputs, inputs]. A block has 16 of them, a warp every kWarps'th
// fragment of these.
template <bool kHasZeroPoints>
__device__ __forceinline__ void dequantize(const PackedMatrix& weight, unsigned short* out, long long outputs,
                                           long long inputs, long long first_tile) {
    const L2Policy policy = evict_first_policy();
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) / 32; at < weight.fragments; at += kWarps) {
        PackedFragment<kHasZeroPoints> fragment;
        weight.load(fragment, static_cast<int>(first_tile) + static_cast<int>(blockIdx.x), at, policy);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const long long input = at * kFragmentInputs + half * kHalfInputs + lane % 4 * 8;
            if (input >= inputs) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const long long output = static_cast<long long>(blockIdx.x) * kTileOutputs + lane / 4 + 8 * i;
                if (output < outputs)
                    *reinterpret_cast<uint4*>(out + output * inputs + input) = fragment.elements(i, half);
            }
        }
    }
}

#define DEQUANTIZE_ARGUMENTS \
    const unsigned char *values, const unsigned char *scales, const unsigned char *zero_points, unsigned short *out, \
        long long outputs, long long inputs, long long groups, long long group_shift, long long first_tile

extern "C" __global__ void __launch_bounds__(kThreads) packed_dequantize(DEQUANTIZE_ARGUMENTS) {
    dequantize<false>(packed_matrix(values, scales, zero_points, inputs, groups, group_shift), out, outputs, inputs,
                      first_tile);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_dequantize(DEQUANTIZE_ARGUMENTS) {
    dequantize<true>(packed_matrix(values, scales, zero_points, inputs, groups, group_shift), out, outputs, inputs,
                     first_tile);
}
