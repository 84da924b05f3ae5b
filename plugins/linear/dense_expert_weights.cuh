// Weights of experts in 16 bits, [E, outputs, inputs], fragment by fragment. With a gate, E has the rows of the gate first.
#pragma once

#include "attention/cp_async.cuh"
#include "linear/dense_weights.cuh"
#include "load_once.cuh"

// ParamsOf: LinearParams, with `weight`.
template <class ParamsOf, int kTileCount, bool kHasGate>
class DenseExperts {
public:
    using Params = ParamsOf;
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
