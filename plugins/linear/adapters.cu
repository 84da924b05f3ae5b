// Updates of a product of a few rows by LoRA adapters, of which each slot has its own or none: out += (x A^T) B^T, with
// the ranks of the adapter of the row. Launched by trt_kvcache/kernels/adapter_kernels.py.
//
// A and B of all adapters are concatenated along the ranks; a row reads those of its adapter. They are small, so a
// launch takes the time of a few loads in a row: constants are loaded before the previous launch has ended, and the
// ranks are computed before the product with the base weights, which begins to load its weights meanwhile.

#include "attention/element.cuh"
#include "block_reduce.cuh"
#include "dependent_launch.cuh"
#include "shared_memory.cuh"

constexpr int kRankThreads = 256, kOutputThreads = 128;
constexpr int kVectorElements = 8;  // of 16 bytes
constexpr int kMaxVectors = 8;      // of the ranks of an adapter: 64 at most
constexpr int kGroupRows = 4;

// Consecutive rows of one slot, which a block handles.
struct RowGroup {
    int slot, begin, end;

    __device__ __forceinline__ RowGroup(int group, int slot_rows) {
        const int groups = (slot_rows + kGroupRows - 1) / kGroupRows, first = group % groups * kGroupRows;
        slot = group / groups;
        begin = slot * slot_rows + first;
        end = slot * slot_rows + min(first + kGroupRows, slot_rows);
    }
};

// Adds the products of two vectors of 8 elements.
template <class Element>
__device__ __forceinline__ float add_products(Element, uint4 a, uint4 b, float sum) {
    const unsigned first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = unpack(Element{}, first[i]), y = unpack(Element{}, second[i]);
        sum = fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
    }
    return sum;
}

// ranks[row][rank] = x[row] A[rank], for the rows whose slot has the adapter of this rank; others are not written.
// Grid: x over ranks, y over groups of rows.
template <class Element>
__device__ __forceinline__ void adapter_ranks(const uint4* x, const uint4* a, const int* owners, const int* numbers,
                                              float* ranks, int vectors, int slot_rows) {
    SHARED_ARRAY(float, sums, 2 * kRankThreads / 32);
    constexpr int kHeld = 4;  // vectors of A that a thread loads early
    const RowGroup group(blockIdx.y, slot_rows);
    const bool has_adapter = numbers[group.slot] == owners[blockIdx.x];
    a += static_cast<long long>(blockIdx.x) * vectors;
    uint4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const int at = threadIdx.x + i * kRankThreads;
        held[i] = has_adapter && at < vectors ? a[at] : uint4{};
    }
    grid_dependents_may_launch();
    grid_dependency_wait();  // also without the adapter: the next launch relies on the end of earlier ones
    if (!has_adapter) return;
#pragma unroll 1
    for (int row = group.begin; row < group.end; row++) {
        const uint4* const row_of_x = x + static_cast<long long>(row) * vectors;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            const int at = threadIdx.x + i * kRankThreads;
            if (at < vectors) sum = add_products(Element{}, held[i], row_of_x[at], sum);
        }
#pragma unroll 4
        for (int at = threadIdx.x + kHeld * kRankThreads; at < vectors; at += kRankThreads)
            sum = add_products(Element{}, a[at], row_of_x[at], sum);
        sum = block_reduce(sum, 0.0f, sums + row % 2 * (kRankThreads / 32), Sum{});
        if (threadIdx.x == 0) ranks[static_cast<long long>(row) * gridDim.x + blockIdx.x] = sum;
    }
}

// A part of the outputs, with the ranks that update it: rows of B begin at element `first`, `ranks` of them a row.
struct UpdatedOutputs {
    long long first_output, outputs, first, ranks;
};

// out[row][output] += ranks[row] B[output], over the ranks of the adapter of the row. `starts`: for each part, the first
// rank of each adapter from number 0, no adapter, on, and the end of the last one, at multiples of 8. Grid: x over the
// outputs of a part, y over parts, z over groups of rows.
template <class Element>
__device__ __forceinline__ void adapter_outputs(const float* ranks, const unsigned short* b,
                                                const UpdatedOutputs* parts, const int* starts, const int* numbers,
                                                unsigned short* out, int outputs, int total_ranks, int adapters,
                                                int slot_rows) {
    const RowGroup group(blockIdx.z, slot_rows);
    const UpdatedOutputs part = parts[blockIdx.y];
    const long long column = static_cast<long long>(blockIdx.x) * kOutputThreads + threadIdx.x;
    starts += blockIdx.y * (adapters + 2);
    const int number = numbers[group.slot], first = starts[number],
              vectors = column < part.outputs ? (starts[number + 1] - first) / kVectorElements : 0;
    const uint4* const of_adapter =
        reinterpret_cast<const uint4*>(b + part.first + column * part.ranks + (first - starts[0]));
    uint4 held[kMaxVectors];
#pragma unroll
    for (int i = 0; i < kMaxVectors; i++) held[i] = i < vectors ? of_adapter[i] : uint4{};
    grid_dependents_may_launch();
    grid_dependency_wait();
    if (!vectors) return;
    out += part.first_output + column;
#pragma unroll 1
    for (int row = group.begin; row < group.end; row++) {
        const float4* const of_row =
            reinterpret_cast<const float4*>(ranks + static_cast<long long>(row) * total_ranks + first);
        unsigned short* const to = out + static_cast<long long>(row) * outputs;
        float sum = unpack(Element{}, *to).x;
#pragma unroll
        for (int i = 0; i < kMaxVectors; i++) {
            if (i >= vectors) break;
            const unsigned words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
            const float4 low = of_row[2 * i], high = of_row[2 * i + 1];
            const float factors[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 values = unpack(Element{}, words[j]);
                sum = fmaf(values.y, factors[2 * j + 1], fmaf(values.x, factors[2 * j], sum));
            }
        }
        *to = static_cast<unsigned short>(pack(Element{}, {sum, 0.0f}));
    }
}

#define RANKS_PARAMETERS \
    const uint4 *x, const uint4 *a, const int *owners, const int *numbers, float *ranks, long long vectors, \
        long long slot_rows
#define RANKS_ARGUMENTS x, a, owners, numbers, ranks, static_cast<int>(vectors), static_cast<int>(slot_rows)

extern "C" __global__ void __launch_bounds__(kRankThreads) adapter_ranks_float16(RANKS_PARAMETERS) {
    adapter_ranks<Float16>(RANKS_ARGUMENTS);
}

extern "C" __global__ void __launch_bounds__(kRankThreads) adapter_ranks_bfloat16(RANKS_PARAMETERS) {
    adapter_ranks<BFloat16>(RANKS_ARGUMENTS);
}

#define OUTPUTS_PARAMETERS \
    const float *ranks, const unsigned short *b, const UpdatedOutputs *parts, const int *starts, const int *numbers, \
        unsigned short *out, long long outputs, long long total_ranks, long long adapters, long long slot_rows
#define OUTPUTS_ARGUMENTS \
    ranks, b, parts, starts, numbers, out, static_cast<int>(outputs), static_cast<int>(total_ranks), \
        static_cast<int>(adapters), static_cast<int>(slot_rows)

extern "C" __global__ void __launch_bounds__(kOutputThreads) adapter_outputs_float16(OUTPUTS_PARAMETERS) {
    adapter_outputs<Float16>(OUTPUTS_ARGUMENTS);
}

extern "C" __global__ void __launch_bounds__(kOutputThreads) adapter_outputs_bfloat16(OUTPUTS_PARAMETERS) {
    adapter_outputs<BFloat16>(OUTPUTS_ARGUMENTS);
}
