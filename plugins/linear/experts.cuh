// Products of up to 8 rows with the experts that a router has chosen for them, with weights from any source.
//
//     experts_*       into the experts: out[row, choice] = activation(x[row] W[expert]^T + bias[expert])
//     experts_down_*  out of them: out[row] = sum over choices of weight * (x[row, choice] W[expert]^T + bias[expert])
//
// A block reads the choices of all rows and lists the experts among them, in ascending order. Each is read once, whatever
// the number of rows that have chosen it, and the others are not read. The grid depends on shapes alone.
//
//     units   of work of a block, every gridDim.x'th: into the experts, a tile of one of them; out of them, a tile of
//             all of them, one expert after another, so that a sum over choices has one order and stays in registers
//     items   of a warp: 64 inputs of a tile of an expert. Weights::kDepth of them are in flight, across tiles and experts
//
// The sum of a row does not depend on the other rows. Its order is the same whatever they choose, and products with an
// expert that the row has not chosen are left out: with inputs of 0 they would be NaN if a weight were infinite.

#pragma once

#include "attention/cp_async.cuh"
#include "linear/expert_epilogues.cuh"
#include "linear/product.cuh"

constexpr int kMaxPairs = 256;  // of a row and one of its choices; trt_kvcache/kernels/expert_kernels.py has it too
static_assert(kRowTiles == 1 && kMaxPairs <= kThreads, "a thread for each pair, one tile of rows");

struct ExpertParams : ClampedParams {
    const int* chosen;            // of each row, which are different
    const float* router_weights;  // of each choice; null for products into the experts
    int choices;                  // of a row
};

// The experts that some row has chosen, in shared memory.
struct ChosenExperts {
    int* chosen;          // of each pair
    float* weights;       // the same, with kSums
    int* experts;         // in ascending order
    signed char* choice;  // of each of them and each row: the place among the choices of that row, or -1
    int count;

    // `firsts`: room for kMaxPairs numbers.
    __device__ __forceinline__ void list(const ExpertParams& params, int* firsts) {
        constexpr int kNone = 0x7fffffff;
        const int pairs = params.rows * params.choices, pair = threadIdx.x;
        if (pair < pairs) chosen[pair] = params.chosen[pair];
        if (pair < pairs && params.router_weights) weights[pair] = params.router_weights[pair];
        for (int x = threadIdx.x; x < kMaxPairs * kTileRows; x += kThreads) choice[x] = -1;
        __syncthreads();
        const int expert = pair < pairs ? chosen[pair] : kNone;
        bool is_first = pair < pairs;
        for (int other = 0; other < pairs; other++) is_first &= other >= pair || chosen[other] != expert;
        if (pair < pairs) firsts[pair] = is_first ? expert : kNone;
        __syncthreads();
        count = 0;
        int rank = 0;
        for (int other = 0; other < pairs; other++) {
            count += firsts[other] != kNone;
            rank += firsts[other] < expert;
        }
        if (is_first) experts[rank] = expert;
        if (pair < pairs)
            choice[rank * kTileRows + pair / params.choices] = static_cast<signed char>(pair % params.choices);
        __syncthreads();
    }
    __device__ __forceinline__ int choice_of(int index, int row) const { return choice[index * kTileRows + row]; }
};

// Loads the items of a warp. kSums: units are tiles of all experts. Weights: gives the fragments of a tile of an expert.
template <class Weights, bool kSums>
class ExpertStream {
    using Params = typename Weights::Params;

public:
    static constexpr int kDepth = Weights::kDepth;

    __device__ __forceinline__ ExpertStream(const Params& params, const ChosenExperts& chosen)
        : params_(params), chosen_(chosen), weights_(params),
          first_input_(static_cast<int>(threadIdx.x) / 32 * kFragmentInputs + static_cast<int>(threadIdx.x) % 4 * 8),
          unit_(blockIdx.x), index_(0), x_inputs_(0), x_rows_{params.x} {
        begin_expert();
    }

    __device__ __forceinline__ int units() const { return kSums ? params_.tiles : params_.tiles * chosen_.count; }

    // Loads the next item; after the last one, zeros.
    __device__ __forceinline__ void load(typename Weights::Fragment& weights, InputFragment& x) {
        weights_.load(weights, input_);
        x.load(x_rows_, input_, x_inputs_);
        input_ += kStepInputs;
        if (input_ - first_input_ >= params_.inputs) next_expert();
    }

    // Prefetches the first item into the L2.
    __device__ __forceinline__ void prefetch() const {
        const int first = static_cast<int>(threadIdx.x) / 32 * kFragmentInputs;
        if (unit_ < units() && first < params_.inputs) weights_.prefetch(chosen_.experts[0], unit_, first);
    }

private:
    __device__ __forceinline__ void next_expert() {
        if (!kSums || ++index_ == chosen_.count) {
            unit_ += gridDim.x;
            index_ = 0;
        }
        begin_expert();
    }
    __device__ __forceinline__ void begin_expert() {
        if (unit_ >= units()) {  // nothing more is loaded, or nothing at all: there may be fewer units than blocks
            input_ = params_.inputs + kFragmentInputs;
            return;
        }
        const int index = kSums ? index_ : unit_ / params_.tiles, tile = kSums ? unit_ : unit_ % params_.tiles;
        weights_.begin(chosen_.experts[index], tile);
        const int row = min(static_cast<int>(threadIdx.x) % 32 / 4, params_.rows - 1),
                  choice = kSums ? chosen_.choice_of(index, row) : 0;
        const long long x_row = kSums ? row * params_.choices + max(choice, 0) : row;
        x_rows_[0] = params_.x + x_row * params_.inputs * kElementBytes;
        x_inputs_ = choice < 0 ? 0 : params_.inputs;
        input_ = first_input_;
    }

    const Params& params_;
    const ChosenExperts& chosen_;
    Weights weights_;
    const int first_input_;  // of this lane, in every row
    int unit_, index_;       // and the place in the list of the expert within the unit
    int input_, x_inputs_;   // x_inputs_: 0 if the row of this lane has not chosen the expert
    const unsigned char* x_rows_[1];
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kTiles][1][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[tile][0][i] = 0.0f;
    }
}

// Adds the products with an expert, times the weight that the router gave it, for the rows that have chosen it.
template <int kTiles>
__device__ __forceinline__ void add_weighted(float (&totals)[kTiles][1][4], const float (&sums)[kTiles][1][4],
                                             const ExpertParams& params, const ChosenExperts& chosen, int index) {
#pragma unroll
    for (int i = 0; i < 2; i++) {  // PartialSums::put has the places of rows and outputs
        const int row = threadIdx.x % 4 * 2 + i;
        const int choice = chosen.choice_of(index, row);
        if (choice < 0) continue;
        const float weight = chosen.weights[row * params.choices + choice];
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            totals[tile][0][i] += weight * sums[tile][0][i];
            totals[tile][0][i + 2] += weight * sums[tile][0][i + 2];
        }
    }
}

// Bias of an output of an expert, of `outputs` rows of W.
__device__ __forceinline__ float expert_bias(const ExpertParams& params, int expert, long long outputs, int output) {
    return params.bias ? unpack(Element{}, params.bias[expert * outputs + output]).x : 0.0f;
}

// Result for an output of a row, from the sums of all warps. `index`: of the expert, without kSums.
template <int kTiles, bool kGated, bool kSums, class Epilogue>
__device__ __forceinline__ void store_result(const ExpertParams& params, const ChosenExperts& chosen,
                                             const PartialSums<kTiles>& partials, int index, int row, int column,
                                             int output) {
    unsigned short* const out = static_cast<unsigned short*>(params.out);
    float value = partials.total(row, column);
    if constexpr (kSums) {
        for (int choice = 0; params.bias && choice < params.choices; choice++) {
            const int pair = row * params.choices + choice;
            value += chosen.weights[pair] * expert_bias(params, chosen.chosen[pair], params.outputs, output);
        }
        store(out + static_cast<long long>(row) * params.outputs + output, value);
    } else {
        const int choice = chosen.choice_of(index, row), expert = chosen.experts[index];
        if (choice < 0) return;
        const long long outputs = static_cast<long long>(params.outputs) * (kGated ? 2 : 1);
        value += expert_bias(params, expert, outputs, output);
        if constexpr (kGated) {
            const float up = partials.total(row, kTileOutputs + column)
                             + expert_bias(params, expert, outputs, params.outputs + output);
            value = Epilogue::of(params, value, up);
        } else {
            value = Epilogue::of(value);
        }
        store(out + (row * params.choices + choice) * static_cast<long long>(params.outputs) + output, value);
    }
}

template <class Weights, bool kSums, class Epilogue>
__device__ __forceinline__ void expert_products(const typename Weights::Params& params) {
    using Stream = ExpertStream<Weights, kSums>;
    constexpr int kTiles = Weights::kTiles;
    constexpr bool kGated = Weights::kGated;
    using Partials = PartialSums<kTiles>;
    constexpr int kOutputs = kGated ? kTileOutputs : kTiles * kTileOutputs;
    SHARED_ARRAY(float, shared_sums, 2 * Partials::kFloats);
    SHARED_ARRAY(int, chosen_of_pairs, kMaxPairs);
    SHARED_ARRAY(float, weights_of_pairs, kMaxPairs);
    SHARED_ARRAY(int, experts, kMaxPairs);
    SHARED_ARRAY(int, firsts, kMaxPairs);
    SHARED_ARRAY(signed char, choices, kMaxPairs* kTileRows);

    // Products out of the experts follow those into them, which have waited for the router.
    if constexpr (!kSums) grid_dependency_wait();
    ChosenExperts chosen{chosen_of_pairs, weights_of_pairs, experts, choices, 0};
    chosen.list(params, firsts);
    Stream stream(params, chosen);
    if constexpr (kSums) {
        stream.prefetch();
        grid_dependency_wait();
    }
    grid_dependents_may_launch();

    typename Weights::Fragment weights[Stream::kDepth];
    InputFragment x[Stream::kDepth];
#pragma unroll
    for (int item = 0; item < Stream::kDepth; item++) stream.load(weights[item], x[item]);
    const int units = stream.units(), steps = (params.inputs + kStepInputs - 1) / kStepInputs;
    float sums[kTiles][1][4] = {}, totals[kTiles][1][4] = {};
    int unit = blockIdx.x, index = 0, step = 0, turn = 0;
#pragma unroll 1
    while (unit < units) {
#pragma unroll
        for (int item = 0; item < Stream::kDepth; item++) {
            if (unit >= units) break;
            add_products(sums, weights[item], x[item]);
            stream.load(weights[item], x[item]);
            if (++step < steps) continue;
            step = 0;
            if constexpr (kSums) {
                add_weighted(totals, sums, params, chosen, index);
                clear(sums);
                if (++index < chosen.count) continue;
                index = 0;
            }
            const Partials partials{shared_sums + turn * Partials::kFloats};
            partials.put(kSums ? totals : sums, 0);
            clear(sums);
            clear(totals);
            __syncthreads();
            const int tile = kSums ? unit : unit % params.tiles;
#pragma unroll 1
            for (int at = threadIdx.x; at < params.rows * kOutputs; at += kThreads) {
                const int column = at % kOutputs, output = tile * params.tile_outputs + column;
                if (column >= params.tile_outputs || output >= params.outputs) continue;
                store_result<kTiles, kGated, kSums, Epilogue>(params, chosen, partials, unit / params.tiles,
                                                              at / kOutputs, column, output);
            }
            turn ^= 1;
            unit += gridDim.x;
        }
    }
}

// Arguments of all such kernels, but for the weights, which follow x.
#define EXPERT_ARGUMENTS \
    const unsigned short *bias, void *out, const int *chosen, const float *router_weights, long long rows, \
        long long choices, long long outputs, long long inputs, long long tiles, long long tile_outputs, double alpha, \
        double limit
#define EXPERT_PARAMS \
    {{{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), \
       static_cast<int>(tiles), static_cast<int>(tile_outputs), 0}, \
      static_cast<float>(alpha), \
      static_cast<float>(limit)}, \
     chosen, \
     router_weights, \
     static_cast<int>(choices)}
