// Products of a few rows with a matrix of weights: out = x W^T + bias. Launched by
// trt_kvcache/kernels/linear_kernels.py.
//
// The kernel is bound by reading W once. So a thread loads W from global memory straight into registers, 16 bytes at a
// time, with as many loads in flight as registers have room for, across the end of a tile into the next one. W is
// constant, so a block starts these loads before the previous launch, which computes x, has ended.
//
// W is the A of mma.m16n8k16 and x its B, so up to 8 rows of x take the time of one. A product does not depend on
// the order of the inputs, if it is the same on both sides: the 8 neighbouring inputs that a lane loads take the places
// of inputs 2t, 2t+1, 2t+8 and 2t+9 of two products.
//
//     block   every gridDim.x'th tile, of up to 16 or 32 outputs; with a gate, 16 of the gate and 16 of up. All tiles
//             have tile_outputs outputs: fewer than the maximum if blocks then read more equal amounts
//     warp    every kWarps'th fragment of 64 inputs. The sums of the warps are added in shared memory, in their order
//     lane    of a fragment: outputs g and g + 8 of each 16, inputs 8t to 8t+7 and 32 more (g: lane / 4, t: lane % 4)

#include "attention/cp_async.cuh"
#include "attention/element.cuh"
#include "attention/mma.cuh"
#include "dependent_launch.cuh"
#include "gate_activation.cuh"
#include "load_once.cuh"
#include "shared_memory.cuh"

// trt_kvcache/kernels/linear_tiles.py chooses these.
constexpr int kWarps = WARPS, kThreads = 32 * kWarps;
constexpr int kRowTiles = ROW_TILES;  // of 8 rows of x
constexpr int kLoads = LOADS;         // of 16 bytes, that a thread has in flight

using Element = ELEMENT;
constexpr int kElementBytes = 2;
constexpr int kTileOutputs = 16;  // of mma
constexpr int kTileRows = 8;
constexpr int kFragmentInputs = 64;                    // of a warp: 128 bytes, a line, of each output
constexpr int kHalfInputs = kFragmentInputs / 2;       // of a load of all its lanes
constexpr int kStepInputs = kWarps * kFragmentInputs;  // of all warps

struct LinearParams {
    const unsigned char *x, *weight;
    const unsigned short* bias;  // or null
    void* out;
    int rows, outputs, inputs;
    int tiles, tile_outputs;  // and outputs of each: at most OutputTile::kOutputs
    int prefetched_steps;     // that are brought into the L2, behind those that are loaded
};

// A value of `out`.
__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(unsigned short* to, float value) {
    *to = static_cast<unsigned short>(pack(Element{}, {value, 0.0f}));
}

// The outputs that a block computes at once. With a gate, outputs n and `outputs` + n of W are gate and up of output n.
template <int kTiles, bool kGated>
struct OutputTile {
    static constexpr int kOutputs = kGated ? kTileOutputs : kTiles * kTileOutputs;  // that there is room for

    // Start of row `row` of the kTiles * kTileOutputs rows of W of a tile. Rows after the last one are replaced by the
    // last one, so nothing else is loaded for them.
    static __device__ __forceinline__ const unsigned char* weight_row(const LinearParams& params, int tile, int row) {
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
};

// Loads the fragments of a warp, a group of kDepth of them after another: all those of a tile, then those of the
// block's next tile.
template <int kTiles, bool kGated>
class WeightStream {
    using Tile = OutputTile<kTiles, kGated>;

public:
    static constexpr int kDepth = kLoads / (4 * kTiles), kGroupInputs = kDepth * kStepInputs;

    __device__ __forceinline__ explicit WeightStream(const LinearParams& params, int first_input)
        : params_(params), policy_(evict_first_policy()), first_input_(first_input), tile_(blockIdx.x) {
        begin_tile();
    }

    __device__ __forceinline__ void load(WeightFragment<kTiles>& fragment, int step) const {
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

    const LinearParams& params_;
    const L2Policy policy_;
    const int first_input_;  // of this lane, in every row
    int input_;
    int tile_;
    const unsigned char* rows_[2 * kTiles];
};

// The same inputs of x: rows g of each tile of 8.
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

template <int kTiles>
__device__ __forceinline__ void add_products(float (&sums)[kTiles][kRowTiles][4], const WeightFragment<kTiles>& weights,
                                             const InputFragment& x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            const uint4 &low = weights.words[tile][0][half], &high = weights.words[tile][1][half];
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

// The sums of the warps over a tile of 8 rows, in shared memory. A warp has rows of kStride floats, so that neither writes
// nor reads have bank conflicts. There are two buffers: one can be written while the other is read.
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

// Activation: of the gate.
template <int kTiles, bool kGated, class Out, class Activation = Silu>
__device__ __forceinline__ void linear(const LinearParams& params) {
    using Tile = OutputTile<kTiles, kGated>;
    using Stream = WeightStream<kTiles, kGated>;
    using Partials = PartialSums<kTiles>;
    SHARED_ARRAY(float, shared_sums, 2 * Partials::kFloats);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_input = warp * kFragmentInputs + lane % 4 * 8;

    Stream weights(params, first_input);
    WeightFragment<kTiles> fragments[Stream::kDepth];
#pragma unroll
    for (int step = 0; step < Stream::kDepth; step++) weights.load(fragments[step], step);
    weights.prefetch();
    grid_dependency_wait();
    grid_dependents_may_launch();

    const unsigned char* x_rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
        x_rows[i] = params.x + min(i * kTileRows + lane / 4, params.rows - 1) * params.inputs * kElementBytes;
    }
    InputFragment x[Stream::kDepth];
#pragma unroll
    for (int step = 0; step < Stream::kDepth; step++)
        x[step].load(x_rows, first_input + step * kStepInputs, params.inputs);
    int turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
        float sums[kTiles][kRowTiles][4] = {};
#pragma unroll 1
        for (int group = 0; group < params.inputs; group += Stream::kGroupInputs) {
            weights.next_group();
            const int next = group + Stream::kGroupInputs < params.inputs ? group + Stream::kGroupInputs : 0;
#pragma unroll
            for (int step = 0; step < Stream::kDepth; step++) {
                const InputFragment inputs = x[step];
                x[step].load(x_rows, next + first_input + step * kStepInputs, params.inputs);
                add_products(sums, fragments[step], inputs);
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
            for (int x = threadIdx.x; x < rows * Tile::kOutputs; x += kThreads) {
                const int row = x / Tile::kOutputs, column = x % Tile::kOutputs;
                const int output = tile * params.tile_outputs + column;
                if (column >= params.tile_outputs || output >= params.outputs) continue;
                float value = partials.total(row, column) + bias_of(params, output);
                if constexpr (kGated) {
                    value = Activation::of(value)
                            * (partials.total(row, kTileOutputs + column) + bias_of(params, params.outputs + output));
                }
                store(static_cast<Out*>(params.out)
                          + static_cast<long long>(row_tile * kTileRows + row) * params.outputs + output,
                      value);
            }
            turn ^= 1;
        }
    }
}

#define LINEAR_ARGUMENTS \
    const unsigned char *x, const unsigned char *weight, const unsigned short *bias, void *out, long long rows, \
        long long outputs, long long inputs, long long tiles, long long tile_outputs, long long prefetched_steps
#define LINEAR_PARAMS \
    {x, \
     weight, \
     bias, \
     out, \
     static_cast<int>(rows), \
     static_cast<int>(outputs), \
     static_cast<int>(inputs), \
     static_cast<int>(tiles), \
     static_cast<int>(tile_outputs), \
     static_cast<int>(prefetched_steps)}

extern "C" __global__ void __launch_bounds__(kThreads) linear_16(LINEAR_ARGUMENTS) {
    linear<1, false, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_32(LINEAR_ARGUMENTS) {
    linear<2, false, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_float32_16(LINEAR_ARGUMENTS) {
    linear<1, false, float>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_float32_32(LINEAR_ARGUMENTS) {
    linear<2, false, float>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_silu_mul(LINEAR_ARGUMENTS) {
    linear<2, true, unsigned short>(LINEAR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_gelu_tanh_mul(LINEAR_ARGUMENTS) {
    linear<2, true, unsigned short, GeluTanh>(LINEAR_PARAMS);
}
