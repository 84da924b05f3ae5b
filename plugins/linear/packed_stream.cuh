// The packed weights of a block: loads of fragments, tile by tile. Matrix: GroupedMatrix or SuperBlockMatrix.
#pragma once

#include "attention/cp_async.cuh"
#include "linear/product.cuh"
#include "load_once.cuh"

template <class Matrix>
struct PackedParams : LinearParams {
    int out_stride;  // from a row of `out` to the next one
    Matrix weight;
};

// Of kTiles tiles of 16 outputs.
template <int kTiles, class Matrix>
struct PackedFragments {
    typename Matrix::Fragment tiles[kTiles];

    __device__ __forceinline__ uint4 elements(int tile, int i, int half) const { return tiles[tile].elements(i, half); }
};

template <int kTileCount, bool kGated, class Matrix>
class PackedStream {
    static constexpr int kFragmentLoads = kTileCount * Matrix::kVectors, kMaxDepth = 4;

public:
    using Params = PackedParams<Matrix>;
    using Fragment = PackedFragments<kTileCount, Matrix>;
    static constexpr bool kSkipsEmpty = true;
    static constexpr int kTiles = kTileCount;
    static constexpr int kDepth = kLoads / kFragmentLoads < kMaxDepth ? kLoads / kFragmentLoads : kMaxDepth;
    static constexpr bool kKeepsOrder = Matrix::kKeepsOrder && kDepth > 2;
    static constexpr int kInputsAhead = 1, kGroupInputs = kDepth * kStepInputs;

    __device__ __forceinline__ PackedStream(const Params& params, int, int first_tile)
        : params_(params), policy_(evict_first_policy()), tile_(first_tile) {
        begin_tile();
    }

    static __device__ __forceinline__ int out_stride(const Params& params) { return params.out_stride; }

    __device__ __forceinline__ void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int x = 0; x < kTiles; x++)
            params_.weight.load(fragment.tiles[x], starts_[x], fragment_, step * kWarps, policy_);
    }

    __device__ __forceinline__ void next_group() {
        fragment_ += kDepth * kWarps;
        if (fragment_ - static_cast<int>(threadIdx.x) / 32 < params_.weight.fragments) return;
        tile_ += gridDim.x;
        begin_tile();
    }

    // Brings what comes behind the first group of this tile into the L2.
    __device__ __forceinline__ void prefetch() const { prefetch_steps(kDepth, params_.prefetched_steps); }

    // Brings `count` steps of this tile into the L2: a line of a fragment for each lane.
    __device__ __forceinline__ void prefetch_steps(int first, int count) const {
        constexpr int kLine = 128, kLines = Matrix::kFragmentBytes / kLine;
        const int lane = threadIdx.x % 32;
        if (lane >= kTiles * kLines) return;
#pragma unroll 1
        for (int step = first; step < first + count; step++) {
            const int at = fragment_ + step * kWarps;
            if (at >= params_.weight.fragments) return;
            prefetch_l2_line(params_.weight.fragments_of(weight_tile(lane / kLines))
                             + static_cast<long long>(at) * Matrix::kFragmentBytes + lane % kLines * kLine);
        }
    }

private:
    __device__ __forceinline__ void begin_tile() {
        fragment_ = tile_ < params_.tiles ? static_cast<int>(threadIdx.x) / 32 : params_.weight.fragments;
#pragma unroll
        for (int x = 0; x < kTiles; x++) starts_[x] = params_.weight.start(weight_tile(x));
    }

    // Of 16 outputs of the tile: gate and up, or neighbours. There is always one, also after the last tile.
    __device__ __forceinline__ int weight_tile(int x) const {
        const int tile = min(tile_, params_.tiles - 1);
        if (kGated) return tile + x * (params_.outputs / kTileOutputs);
        return min(tile * kTiles + x, (params_.outputs - 1) / kTileOutputs);
    }

    const Params& params_;
    const L2Policy policy_;
    int tile_;
    int fragment_;  // the next one of this warp in the tile
    typename Matrix::Start starts_[kTiles];
};

__device__ __forceinline__ int fragments_of(long long inputs) {
    return static_cast<int>((inputs + kFragmentInputs - 1) / kFragmentInputs);
}

// Outputs of W from 16 * first_tile on as elements, [outputs, inputs]. A block has 16 of them, a warp every kWarps'th
// fragment of these.
template <class Matrix>
__device__ __forceinline__ void dequantize(const Matrix& weight, unsigned short* out, long long outputs,
                                           long long inputs, long long first_tile) {
    const L2Policy policy = evict_first_policy();
    const int lane = threadIdx.x % 32, tile = static_cast<int>(first_tile) + static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) / 32; at < weight.fragments; at += kWarps) {
        typename Matrix::Fragment fragment;
        weight.load(fragment, weight.start(tile), at, 0, policy);
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
