// Weights of experts in super-blocks, fragment by fragment, which become elements in registers
// (linear/super_block_values.cuh). The matrices follow each other as in linear/packed_expert_weights.cuh.
#pragma once

#include "attention/cp_async.cuh"
#include "linear/super_block_values.cuh"

// ParamsOf: LinearParams, with `weight`.
template <class ParamsOf, int kTileCount, bool kHasGate>
class SuperBlockExperts {
    using Matrix = decltype(ParamsOf::weight);

public:
    using Params = ParamsOf;
    struct Fragment {
        typename Matrix::Fragment tiles[kTileCount];

        __device__ __forceinline__ uint4 elements(int tile, int i, int half) const {
            return tiles[tile].elements(i, half);
        }
    };
    static constexpr int kTiles = kTileCount, kDepth = kTiles == 1 ? 4 : 3;  // a fourth one of two tiles would spill
    static constexpr bool kGated = kHasGate;

    __device__ __forceinline__ SuperBlockExperts(const Params& params)
        : params_(params), policy_(evict_first_policy()) {
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
        constexpr int kLine = 128, kLines = Matrix::kFragmentBytes / kLine;
        const int lane = threadIdx.x % 32;
        if (lane >= kTiles * kLines) return;
        prefetch_l2_line(params_.weight.fragments_of(weight_tile(expert, tile, lane / kLines))
                         + static_cast<long long>(input / kFragmentInputs) * Matrix::kFragmentBytes
                         + lane % kLines * kLine);
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
    typename Matrix::Start starts_[kTiles];
};
