// The product of a block: tiles of outputs, one after another, with weights from any source.
//
// W is the A of mma.m16n8k16 and x its B, so up to 8 rows of x take the time of one. A product does not depend on
// the order of the inputs, if it is the same on both sides: the 8 neighbouring inputs that a lane loads take the places
// of inputs 2t, 2t+1, 2t+8 and 2t+9 of two products.
//
//     block   every gridDim.x'th tile, of up to 16 or 32 outputs; with a gate, 16 of the gate and 16 of up. All tiles
//             have tile_outputs outputs: fewer than the maximum if all blocks then read about as much
//     warp    every kWarps'th fragment of 64 inputs. The sums of the warps are added in shared memory, in their order
//     lane    of a fragment: outputs g and g + 8 of each 16, inputs 8t to 8t+7 and 32 more (g: lane / 4, t: lane % 4)
#pragma once

#include "attention/mma.cuh"
#include "dependent_launch.cuh"
#include "gate_activation.cuh"
#include "linear/config.cuh"
#include "shared_memory.cuh"

// A value of `out`.
__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(unsigned short* to, float value) {
    *to = static_cast<unsigned short>(pack(Element{}, {value, 0.0f}));
}

// 64 inputs of x of a lane: rows g of each tile of 8.
struct InputFragment {
    uint4 words[kRowTiles][2];

    __device__ __forceinline__ void load(const unsigned char* const (&x_rows)[kRowTiles], int input, int inputs) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = input + half * kHalfInputs;
#pragma unroll
            for (int i = 0; i < kRowTiles; i++) {
                words[i][half] =
                    at < inputs ? *reinterpret_cast<const uint4*>(x_rows[i] + at * kElementBytes) : uint4{};
            }
        }
    }
};

// The same for inputs `input` + `ahead` on, with constant `ahead`: the steps of a group share an address.
__device__ __forceinline__ void load_ahead(InputFragment& to, const unsigned char* const (&x_rows)[kRowTiles],
                                           int input, int ahead, int inputs) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = ahead + half * kHalfInputs;
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
            const unsigned char* const from = x_rows[i] + static_cast<long long>(input) * kElementBytes;
            to.words[i][half] =
                inputs - input > at ? *reinterpret_cast<const uint4*>(from + at * kElementBytes) : uint4{};
        }
    }
}

// Fragment: gives the elements of a lane of a half of row g, or g + 8, of 16 outputs.
template <int kTiles, class Fragment>
__device__ __forceinline__ void add_products(float (&sums)[kTiles][kRowTiles][4], const Fragment& weights,
                                             const InputFragment& x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            const uint4 low = weights.elements(tile, 0, half), high = weights.elements(tile, 1, half);
            const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int i = 0; i < kRowTiles; i++) {
                const uint4& words = x.words[i][half];
                mma_m16n8k16(Element{}, sums[tile][i], first, words.x, words.y);
                mma_m16n8k16(Element{}, sums[tile][i], second, words.z, words.w);
            }
        }
    }
}

// The sums of the warps over a tile of 8 rows, in shared memory. A warp has rows of kStride floats, so that neither
// writes nor reads have bank conflicts. There are two buffers: one can be written while the other is read.
template <int kTiles>
struct PartialSums {
    static constexpr int kStride = kTiles * kTileOutputs + 4, kWarpFloats = kTileRows * kStride,
                         kFloats = kWarps * kWarpFloats;
    float* sums;

    __device__ __forceinline__ void put(const float (&sums_of_lane)[kTiles][kRowTiles][4], int row_tile) const {
        const int lane = threadIdx.x % 32;
        float* const mine = sums + threadIdx.x / 32 * kWarpFloats + 2 * (lane % 4) * kStride + lane / 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                mine[i % 2 * kStride + tile * kTileOutputs + i / 2 * 8] = sums_of_lane[tile][row_tile][i];
        }
    }
    __device__ __forceinline__ float total(int row, int output) const {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) sum += sums[warp * kWarpFloats + row * kStride + output];
        return sum;
    }
};

__device__ __forceinline__ float bias_of(const LinearParams& params, int output) {
    return params.bias ? unpack(Element{}, params.bias[output]).x : 0.0f;
}

// Tiles `first_tile`, `first_tile` + gridDim.x, ... of a product. Weights: loads the fragments of a warp, a group of kDepth
// of them after another: all those of a tile, then those of the block's next tile. Activation: of the gate.
// `shared_sums`: two buffers of partial sums.
template <class Weights, bool kGated, class Out, class Activation>
__device__ __forceinline__ void tiles_of_block(const typename Weights::Params& params, int first_tile,
                                               float* shared_sums) {
    constexpr int kTiles = Weights::kTiles, kAhead = Weights::kInputsAhead,
                  kOutputs = kGated ? kTileOutputs : kTiles * kTileOutputs;
    using Partials = PartialSums<kTiles>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_input = warp * kFragmentInputs + lane % 4 * 8;

    Weights weights(params, first_input, first_tile);
    typename Weights::Fragment fragments[Weights::kDepth];
#pragma unroll
    for (int step = 0; step < Weights::kDepth; step++) weights.load(fragments[step], step);
    weights.prefetch();
    grid_dependency_wait();
    grid_dependents_may_launch();

    const unsigned char* x_rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
        x_rows[i] = params.x + min(i * kTileRows + lane / 4, params.rows - 1) * params.inputs * kElementBytes;
    }
    InputFragment x[kAhead];
#pragma unroll
    for (int step = 0; step < kAhead; step++) x[step].load(x_rows, first_input + step * kStepInputs, params.inputs);
    int turn = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < params.tiles; tile += gridDim.x) {
        float sums[kTiles][kRowTiles][4] = {};
#pragma unroll 1
        for (int group = 0; group < params.inputs; group += Weights::kGroupInputs) {
            weights.next_group();
            const int next = group + Weights::kGroupInputs < params.inputs ? group + Weights::kGroupInputs : 0;
#pragma unroll
            for (int step = 0; step < Weights::kDepth; step++) {
                const InputFragment inputs = x[step % kAhead];
                const int ahead = step + kAhead, from = (ahead < Weights::kDepth ? group : next) + first_input;
                if constexpr (Weights::kSkipsEmpty) {
                    load_ahead(x[step % kAhead], x_rows, from, ahead % Weights::kDepth * kStepInputs, params.inputs);
                    // Otherwise the compiler moves the loads of several steps behind the last of them.
                    if constexpr (Weights::kKeepsOrder) __syncwarp();
                    if (params.inputs - warp * kFragmentInputs - group > step * kStepInputs)
                        add_products(sums, fragments[step], inputs);
                } else {
                    x[step % kAhead].load(x_rows, from + ahead % Weights::kDepth * kStepInputs, params.inputs);
                    add_products(sums, fragments[step], inputs);
                }
                weights.load(fragments[step], step);
            }
        }
#pragma unroll
        for (int row_tile = 0; row_tile < kRowTiles; row_tile++) {
            const int rows = min(params.rows - row_tile * kTileRows, kTileRows);
            if (rows <= 0) break;
            const Partials partials{shared_sums + turn * Partials::kFloats};
            partials.put(sums, row_tile);
            __syncthreads();
#pragma unroll 1
            for (int x = threadIdx.x; x < rows * kOutputs; x += kThreads) {
                const int row = x / kOutputs, column = x % kOutputs;
                const int output = tile * params.tile_outputs + column;
                if (column >= params.tile_outputs || output >= params.outputs) continue;
                float value = partials.total(row, column) + bias_of(params, output);
                if constexpr (kGated) {
                    value = Activation::of(value)
                            * (partials.total(row, kTileOutputs + column) + bias_of(params, params.outputs + output));
                }
                store(static_cast<Out*>(params.out)
                          + static_cast<long long>(row_tile * kTileRows + row) * Weights::out_stride(params) + output,
                      value);
            }
            turn ^= 1;
        }
    }
}

// All tiles of a product, of all blocks.
template <class Weights, bool kGated, class Out, class Activation = Silu>
__device__ __forceinline__ void linear(const typename Weights::Params& params) {
    SHARED_ARRAY(float, shared_sums, 2 * PartialSums<Weights::kTiles>::kFloats);
    tiles_of_block<Weights, kGated, Out, Activation>(params, blockIdx.x, shared_sums);
}
