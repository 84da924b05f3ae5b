// Histograms over the tokens of a row: each block counts its tokens in shared memory and adds what it found to the memory of the row.
#pragma once

#include "attention/math.cuh"
#include "sampling/row_workspace.cuh"
#include "shared_memory.cuh"

constexpr int kTokensAtOnce = 8;                // that a thread loads before it looks at the first
constexpr int kTokensOfHistogram = 1 << 14;     // so that sums of 17 bits fit into 32
constexpr int kSharedBins = 3 * kCoarseBins;    // at least kFineBins
static_assert(kSharedBins >= kFineBins, "the same shared memory for both");

// The tokens of a row that this block works on.
struct RowChunk {
    const float* logits;
    int begin, end;

    // Calls visit(token, logit) with the same number of calls for all threads of the block; with -inf for tokens that do not exist.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for_each(begin, end, visit);
    }
    template <class Visit>
    __device__ __forceinline__ void for_each(int from, int to, Visit visit) const {
        for (int first = from; first < to; first += kTokensAtOnce * kRowThreads) {
            float loaded[kTokensAtOnce];
#pragma unroll
            for (int i = 0; i < kTokensAtOnce; i++) {
                const int token = first + i * kRowThreads + threadIdx.x;
                loaded[i] = token < to ? logits[token] : __uint_as_float(0xFF800000u);
            }
#pragma unroll
            for (int i = 0; i < kTokensAtOnce; i++) {
                if (first + i * kRowThreads < to) visit(first + i * kRowThreads + static_cast<int>(threadIdx.x), loaded[i]);
            }
        }
    }
};

// Adds one to a bin of shared memory for each lane; bin -1: none. For all lanes of a warp.
__device__ __forceinline__ void count_in_bin(unsigned* bins, int bin) {
    const unsigned counted = __ballot_sync(~0u, bin >= 0);
    if (!counted) return;
    const int lane = threadIdx.x % 32, leader = __ffs(counted) - 1, of_leader = __shfl_sync(~0u, bin, leader);
    if (__all_sync(~0u, bin < 0 || bin == of_leader)) {
        if (lane == leader) atomicAdd(bins + bin, static_cast<unsigned>(__popc(counted)));
    } else if (bin >= 0) {
        atomicAdd(bins + bin, 1u);
    }
}

// bin_of(token, logit): from 0 to num_bins - 1, or -1. For all threads of the block.
template <class BinOf>
__device__ __forceinline__ void add_counts(const RowChunk& chunk, int num_bins, unsigned* of_row, unsigned* bins, BinOf bin_of) {
    __syncthreads();
    for (int bin = threadIdx.x; bin < num_bins; bin += kRowThreads) bins[bin] = 0;
    __syncthreads();
    chunk.for_each([&](int token, float logit) { count_in_bin(bins, bin_of(token, logit)); });
    __syncthreads();
    for (int bin = threadIdx.x; bin < num_bins; bin += kRowThreads) {
        if (bins[bin]) atomicAdd(of_row + bin, bins[bin]);
    }
}

// Counts and weights by the high bits of the class.
template <class ClassOf>
__device__ __forceinline__ void add_weights(const RowChunk& chunk, RowWorkspace& row, unsigned* bins, ClassOf class_of_logit) {
    unsigned *const counts = bins, *const low = bins + kCoarseBins, *const high = bins + 2 * kCoarseBins;
    for (int from = chunk.begin; from < chunk.end; from += kTokensOfHistogram) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < kSharedBins; bin += kRowThreads) bins[bin] = 0;
        __syncthreads();
        chunk.for_each(from, min(chunk.end, from + kTokensOfHistogram), [&](int, float logit) {
            const unsigned token_class = class_of_logit(logit);
            const Weight weight = weight_of(token_class);
            const int bin = weight ? static_cast<int>(token_class >> kFineBits) : -1;
            const int of_first = __shfl_sync(~0u, bin, 0);
            const unsigned low_part = static_cast<unsigned>(weight & 0xFFFF), high_part = static_cast<unsigned>(weight >> 16);
            if (__all_sync(~0u, bin == of_first)) {
                if (bin < 0) return;
                const int low_sum = warp_sum(static_cast<int>(low_part)), high_sum = warp_sum(static_cast<int>(high_part));
                if (threadIdx.x % 32 == 0) {
                    atomicAdd(counts + bin, 32u);
                    atomicAdd(low + bin, static_cast<unsigned>(low_sum));
                    atomicAdd(high + bin, static_cast<unsigned>(high_sum));
                }
            } else if (bin >= 0) {
                atomicAdd(counts + bin, 1u);
                atomicAdd(low + bin, low_part);
                atomicAdd(high + bin, high_part);
            }
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < kCoarseBins; bin += kRowThreads) {
            if (!counts[bin]) continue;
            atomicAdd(row.coarse_count + bin, counts[bin]);
            atomicAdd(row.coarse_weight + bin, low[bin] + (static_cast<Weight>(high[bin]) << 16));
        }
    }
}

struct FoundBin {
    int bin;        // -1: the sum of all bins is not more than the target
    Number before;  // sum of the bins before it
};

// The first bin with which the sum of value_of(bin) exceeds the target. For all threads of the block; `found` and `scratch` in shared memory.
template <class ValueOf>
__device__ __forceinline__ FoundBin find_bin(int num_bins, Number target, FoundBin* found, Number* scratch, ValueOf value_of) {
    const int each = (num_bins + kRowThreads - 1) / kRowThreads, begin = min(num_bins, each * static_cast<int>(threadIdx.x)), end = min(num_bins, begin + each);
    Number sum = 0;
    for (int bin = begin; bin < end; bin++) sum += value_of(bin);
    __syncthreads();
    if (threadIdx.x == 0) *found = {-1, 0};
    Number before = block_prefix_sum(sum, scratch).before;
    if (before <= target && target < before + sum) {
        int bin = begin;
        for (Number value; before + (value = value_of(bin)) <= target; bin++) before += value;
        *found = {bin, before};
    }
    __syncthreads();
    return *found;
}
