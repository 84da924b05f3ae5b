// Products of many rows with their experts, with weights from any source: those of a prompt.
//
//     expert_tiles_*       into the experts: out[p] = activation(x[order[p] / choices] W[expert]^T + bias[expert])
//     expert_tiles_linear  also out of them: out[order[p]] = x[p] W[expert]^T + bias[expert]
//
// expert_order.cu sorts pairs of a row and one of its experts by expert, `order`, and cuts those of each expert into row
// tiles of up to kRows. Without row tiles, there is one matrix for all rows, in their order.
//
//     block   a row tile and kWarps * kWarpOutputs outputs. Grid: x over row tiles, of which some are empty; y over outputs
//     warp    kTiles * 16 outputs, of all rows of the tile; with a gate, half of them gate, half up
//     lane    its part of a fragment of W, as in product.cuh. W is the A of mma and x its B: weights go from memory to
//             registers and are converted there once for all rows of the tile, rows of x go through shared memory
//
// The result of a row does not depend on the others.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/mma.cuh"
#include "linear/expert_epilogues.cuh"
#include "linear/row_tile.cuh"

constexpr int kRows = kRowTiles * kTileRows;
constexpr int kStages = STAGES;  // of 64 inputs of all rows, in shared memory
constexpr int kChunks = kFragmentInputs * kElementBytes / 16, kStageBytes = kRows * kChunks * 16;

struct ExpertTileParams : ClampedParams {
    const int* order;          // null: row p is row p
    const RowTile* row_tiles;  // null: all rows have one matrix
    int choices;               // pairs that share a row of x; 0 if x has a row for each place, and out for each pair
};

// Offset of a chunk of a row in a stage. Lanes 0 to 7 read chunks 4h to 4h + 3 of two rows at once.
__device__ __forceinline__ unsigned stage_offset(int row, int chunk) {
    return (row * kChunks + (chunk ^ (row % 2 * (kChunks / 2)))) * 16;
}

// Copies 64 inputs of the rows of a tile at a time. A thread has the same chunk of every kStep'th row.
class RowStage {
    static constexpr int kStep = kThreads / kChunks, kCopies = (kRows + kStep - 1) / kStep;

public:
    __device__ __forceinline__ RowStage(const ExpertTileParams& params, const RowTile& tile, SharedAddress stages)
        : stages_(stages), inputs_(params.inputs) {
#pragma unroll
        for (int i = 0; i < kCopies; i++) {
            const int row = first_row() + i * kStep, place = tile.first + min(row, tile.count - 1);
            const int from = params.choices ? params.order[place] / params.choices : place;
            rows_[i] = params.x + static_cast<long long>(from) * params.inputs * kElementBytes + chunk() * 16;
        }
    }

    // Rows behind the last one of the tile are copies of it.
    __device__ __forceinline__ void copy(int fragment) const {
        const SharedAddress stage = stages_ + fragment % kStages * kStageBytes;
        const int input = fragment * kFragmentInputs;
#pragma unroll
        for (int i = 0; i < kCopies; i++) {
            const int row = first_row() + i * kStep;
            const bool valid = input + chunk() * 8 < inputs_;
            if (kRows % kStep == 0 || row < kRows)
                cp_async(stage + stage_offset(row, chunk()), valid ? rows_[i] + input * kElementBytes : rows_[i],
                         valid);
        }
    }

private:
    static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kChunks; }
    static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

    const SharedAddress stages_;
    const int inputs_;
    const unsigned char* rows_[kCopies];
};

__device__ __forceinline__ float tile_bias(const ExpertTileParams& params, long long first, int output) {
    return params.bias ? unpack(Element{}, params.bias[first + output]).x : 0.0f;
}

// Stores 8 rows of 16 outputs, of which a lane has outputs g and g + 8 of rows 2t and 2t + 1.
template <class RowOf>
__device__ __forceinline__ void store_tile(const ExpertTileParams& params, const float (&values)[4], int output,
                                           int row, int count, const RowOf& row_of) {
    const int lane = threadIdx.x % 32;
    unsigned short* const out = static_cast<unsigned short*>(params.out);
    const int mine = row + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned pair = transpose_matrix(pack(Element{}, {values[2 * i], values[2 * i + 1]}));
        const int at = output + 8 * i + lane % 4 * 2;
        if (mine >= count || at >= params.outputs) continue;
        unsigned short* const to = out + row_of(mine) * params.outputs + at;
        if (params.outputs % 2 == 0) {
            *reinterpret_cast<unsigned*>(to) = pair;
        } else {
            to[0] = static_cast<unsigned short>(pair);
            if (at + 1 < params.outputs) to[1] = static_cast<unsigned short>(pair >> 16);
        }
    }
}

// A constant as an argument.
template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

template <class Weights, class Epilogue>
__device__ __forceinline__ void expert_tiles(const typename Weights::Params& params) {
    constexpr int kTiles = Weights::kTiles, kDepth = Weights::kDepth;
    constexpr bool kGated = Weights::kGated;
    constexpr int kWarpOutputs = (kGated ? 1 : kTiles) * kTileOutputs;
    DYNAMIC_SHARED(unsigned char, shared);
    grid_dependency_wait();
    RowTile tile{0, static_cast<int>(blockIdx.x) * kRows, 0, 0};
    if (params.row_tiles) {
        tile = params.row_tiles[blockIdx.x];
    } else {
        tile.count = min(kRows, params.rows - tile.first);
    }
    grid_dependents_may_launch();
    if (tile.count == 0) return;
    const SharedAddress stages = shared_address(shared);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int fragments = (params.inputs + kFragmentInputs - 1) / kFragmentInputs;
    const int unit = blockIdx.y * kWarps + warp;
    const RowStage rows(params, tile, stages);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; stage++) {
        if (stage < fragments) rows.copy(stage);
        cp_async_commit_group();
    }
    Weights weights(params);
    weights.begin(tile.expert, min(unit, (params.outputs - 1) / kWarpOutputs));
    typename Weights::Fragment held[kDepth];
    const int first_input = lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < kDepth; i++) {
        if (i < fragments) weights.load(held[i], i * kFragmentInputs + first_input);
    }
    float sums[kTiles][kRowTiles][4] = {};
    // Without branches between them, loads and products of several rows overlap.
    const auto multiply = [&](auto full) {
        constexpr bool kFull = decltype(full)::value;
#pragma unroll 1
        for (int group = 0; group < fragments; group += kDepth) {
#pragma unroll
            for (int i = 0; i < kDepth; i++) {
                const int fragment = group + i;
                if (fragment >= fragments) break;
                cp_async_wait_group<kStages - 2>();
                __syncthreads();
                if (fragment + kStages - 1 < fragments) rows.copy(fragment + kStages - 1);
                cp_async_commit_group();
                const unsigned char* const stage = shared + fragment % kStages * kStageBytes;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned first[kTiles][4], second[kTiles][4];
#pragma unroll
                    for (int x = 0; x < kTiles; x++) {
                        const uint4 low = held[i].elements(x, 0, half), high = held[i].elements(x, 1, half);
                        first[x][0] = low.x, first[x][1] = high.x, first[x][2] = low.y, first[x][3] = high.y;
                        second[x][0] = low.z, second[x][1] = high.z, second[x][2] = low.w, second[x][3] = high.w;
                    }
                    uint4 words[kRowTiles];
#pragma unroll
                    for (int row = 0; row < kRowTiles; row++)
                        words[row] = *reinterpret_cast<const uint4*>(
                            stage + stage_offset(row * kTileRows + lane / 4, half * (kChunks / 2) + lane % 4));
#pragma unroll
                    for (int row = 0; row < kRowTiles; row++) {
                        if (!kFull && row * kTileRows >= tile.count) break;
#pragma unroll
                        for (int x = 0; x < kTiles; x++) {
                            mma_m16n8k16(Element{}, sums[x][row], first[x], words[row].x, words[row].y);
                            mma_m16n8k16(Element{}, sums[x][row], second[x], words[row].z, words[row].w);
                        }
                    }
                }
                if (fragment + kDepth < fragments)
                    weights.load(held[i], (fragment + kDepth) * kFragmentInputs + first_input);
            }
        }
    };
    if (tile.count > kRows - kTileRows)
        multiply(Constant<true>{});
    else
        multiply(Constant<false>{});
    const auto row_of = [&](int row) -> long long {
        const int place = tile.first + row;
        return params.choices || !params.order ? place : params.order[place];
    };
    const long long first_bias = static_cast<long long>(tile.expert) * params.outputs * (kGated ? 2 : 1);
#pragma unroll
    for (int x = 0; x < (kGated ? 1 : kTiles); x++) {
        const int output = unit * kWarpOutputs + x * kTileOutputs;
        if (output >= params.outputs) break;
        float biases[2], up_biases[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = min(output + 8 * i + lane / 4, params.outputs - 1);
            biases[i] = tile_bias(params, first_bias, at);
            up_biases[i] = kGated ? tile_bias(params, first_bias + params.outputs, at) : 0.0f;
        }
#pragma unroll
        for (int row = 0; row < kRowTiles; row++) {
            if (row * kTileRows >= tile.count) break;
            float values[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float value = sums[x][row][i] + biases[i / 2];
                if constexpr (kGated) {
                    values[i] = Epilogue::of(params, value, sums[1][row][i] + up_biases[i / 2]);
                } else {
                    values[i] = Epilogue::of(value);
                }
            }
            store_tile(params, values, output, row * kTileRows, tile.count, row_of);
        }
    }
}

// Arguments of all such kernels, but for the weights, which follow x.
#define EXPERT_TILE_ARGUMENTS \
    const unsigned short *bias, void *out, const int *order, const RowTile *row_tiles, long long rows, \
        long long choices, long long outputs, long long inputs, long long tile_outputs, double alpha, double limit
#define EXPERT_TILE_PARAMS \
    {{{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), 0, \
       static_cast<int>(tile_outputs), 0}, \
      static_cast<float>(alpha), \
      static_cast<float>(limit)}, \
     order, \
     row_tiles, \
     static_cast<int>(choices)}
