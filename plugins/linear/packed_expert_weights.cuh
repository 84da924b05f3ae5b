// Packed weights of experts, fragment by fragment, which become elements in registers (linear/packed_values.cuh,
// linear/super_block_values.cuh).
//
// The matrices of all experts follow each other, in whole tiles of 16 outputs: with a gate, those of the gate, then those
// of up.
#pragma once

#include "attention/cp_async.cuh"

// ParamsOf: LinearParams, with `weight`: GroupedMatrix or SuperBlockMatrix.
template <class ParamsOf, int kTileCount, bool kHasGate>
class PackedExperts {
    using Matrix = decltype(ParamsOf::weight);

public:
    using Params = ParamsOf;
    struct Fragment {
        typename Matrix::Fragment tiles[kTileCount];

        __device__ __forceinline__ uint4 elements(int tile, int i, int half) const {
            return tiles[tile].elements(i, half);
        }
    };
    static constexpr int kTiles = kTileCount, kDepth = Matrix::expert_depth(kTileCount);
    static constexpr bool kGated = kHasGate;

    __device__ __forceinline__ PackedExperts(const Params& params) : params_(params), policy_(evict_first_policy()) {
        begin(0, 0);
    }

    __device__ __forceinline__ void begin(int expert, int tile) {
#pragma unroll
        for (int x = 0; x < kTiles; x++) {
            const int at = weight_tile(expert, tile, x);
            starts_[x] = params_.weight.start(at);
            factors_[x] = params_.weight.factor_of(at);
        }
    }

    // `input`: the first one of the lane. Behind the last input, finite weights.
    __device__ __forceinline__ void load(Fragment& fragment, int input) const {
#pragma unroll
        for (int x = 0; x < kTiles; x++)
            params_.weight.load_expert(fragment.tiles[x], starts_[x], factors_[x], input / kFragmentInputs, policy_);
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
    typename Matrix::Factor factors_[kTiles];
};
