// Weights in 16 bits, as they are stored: the rows of a tile, and registers for a part of them.
#pragma once

#include "linear/config.cuh"

struct DenseParams : LinearParams {
    const unsigned char* weight;
};

// The outputs that a block computes at once. With a gate, outputs n and `outputs` + n of W are gate and up of output n.
template <int kTiles, bool kGated>
struct OutputTile {
    static constexpr int kOutputs = kGated ? kTileOutputs : kTiles * kTileOutputs;  // that there is room for

    // Start of row `row` of the kTiles * kTileOutputs rows of W of a tile. Rows after the last one are replaced by the
    // last one, so nothing else is loaded for them.
    template <class Params>
    static __device__ __forceinline__ const unsigned char* weight_row(const Params& params, int tile, int row) {
        const int column = min(row % kOutputs, params.tile_outputs - 1);
        const int output =
            min(tile * params.tile_outputs + column, params.outputs - 1) + row / kOutputs * params.outputs;
        return params.weight + static_cast<long long>(output) * params.inputs * kElementBytes;
    }
};

// Registers of a lane for 64 inputs of kTiles * kTileOutputs rows of W: the first and the second half of rows g and g +
// 8 of each tile.
template <int kTiles>
struct WeightFragment {
    uint4 words[kTiles][2][2];

    __device__ __forceinline__ uint4 elements(int tile, int i, int half) const { return words[tile][i][half]; }
};
