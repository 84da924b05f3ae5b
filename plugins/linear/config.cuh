// Sizes and parameters of products of a few rows with a matrix of weights.
#pragma once

#include "attention/element.cuh"

// trt_kvcache/kernels/linear_tiles.py chooses these.
constexpr int kWarps = WARPS, kThreads = 32 * kWarps;
constexpr int kRowTiles = ROW_TILES;  // of 8 rows of x
constexpr int kLoads = LOADS;         // of 16 bytes, that a thread has in flight

using Element = ELEMENT;
constexpr int kElementBytes = 2;
constexpr int kTileOutputs = 16;  // of mma
constexpr int kTileRows = 8;
constexpr int kFragmentInputs = 64;                    // of a warp: with 16 bits 128 bytes, a line, of each output
constexpr int kHalfInputs = kFragmentInputs / 2;       // of a load of all its lanes
constexpr int kStepInputs = kWarps * kFragmentInputs;  // of all warps

struct LinearParams {
    const unsigned char* x;
    const unsigned short* bias;  // or null
    void* out;
    int rows, outputs, inputs;
    int tiles, tile_outputs;  // and outputs of each: at most as many as there is room for
    int prefetched_steps;     // that are brought into the L2, behind those that are loaded
};
