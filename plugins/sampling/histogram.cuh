// Histograms over the tokens of a row: each block counts its tokens in shared memory and adds what it found to the memory of the row.
#pragma once

#include "attention/math.cuh"
#include "sampling/row_chunk.cuh"
#include "sampling/row_workspace.cuh"
#include "shared_memory.cuh"

constexpr int kTokensOfHistogram = 1 << 14;  // so that sums of 17 bits fit into 32
constexpr int kSharedBins = kFineAtOnce * kFineBins;
static_assert(kSharedBins >= 3 * kCoarseBins, "the same shared memory for both");

// Shared memory, all 0 but within a function of this file.
__device__ __forceinline__ void clear_bins(unsigned* bins) {
    for (int bin = threadIdx.x; bin < kSharedBins; bin += kRowThreads) bins[bin] = 0;
}

// Calls add_up(bin) once if all lanes of a warp meet in a bin, else add_one(bin) in each lane that has one; bin -1: none. For all lanes.
template <class AddUp, class AddOne>
__device__ __forceinline__ void add_to_bins(int bin, AddUp add_up, AddOne add_one) {
    if (__all_sync(~0u, bin == __shfl_sync(~0u, bin, 0))) {
        if (bin >= 0) add_up(bin);
    } else if (bin >= 0) {
        add_one(bin);
    }
}

// Adds to the memory of a row what each block has counted, beginning with another bin in each block, and clears it.
template <class Add>
__device__ __forceinline__ void hand_in(int num_bins, int rank, Add add) {
    __syncthreads();
    const int first = rank * 32 % num_bins + threadIdx.x;
    for (int i = 0; i < num_bins; i += kRowThreads) {
        if (i + static_cast<int>(threadIdx.x) >= num_bins) break;
        const int bin = first + i;
        add(bin < num_bins ? bin : bin - num_bins);
    }
    __syncthreads();
}

// bin_of(token, logit): from 0 to num_bins - 1, or -1. For all threads of the block.
template <class BinOf>
__device__ __forceinline__ void add_counts(const RowChunk& chunk, int rank, int num_bins, unsigned* of_row, unsigned* bins, BinOf bin_of) {
    chunk.for_each([&](int token, float logit) {
        add_to_bins(bin_of(token, logit), [&](int bin) {
            if (threadIdx.x % 32 == 0) atomicAdd(bins + bin, 32u);
        }, [&](int bin) { atomicAdd(bins + bin, 1u); });
    });
    hand_in(num_bins, rank, [&](int bin) {
        if (!bins[bin]) return;
        atomicAdd(of_row + bin, bins[bin]);
        bins[bin] = 0;
    });
}

// Weights by the high bits of the class, and counts if they are asked for.
template <class ClassOf>
__device__ __forceinline__ void add_weights(const RowChunk& chunk, int rank, RowWorkspace& row, unsigned* bins, bool with_counts,
                                            ClassOf class_of_logit) {
    unsigned *const low = bins, *const high = bins + kCoarseBins, *const counts = bins + 2 * kCoarseBins;
    for (int from = chunk.begin; from < chunk.end; from += kTokensOfHistogram) {
        chunk.for_each(from, min(chunk.end, from + kTokensOfHistogram), [&](int, float logit) {
            const unsigned token_class = class_of_logit(logit);
            const Weight weight = weight_of(token_class);
            const unsigned low_part = static_cast<unsigned>(weight & 0xFFFF), high_part = static_cast<unsigned>(weight >> 16);
            add_to_bins(weight ? static_cast<int>(token_class >> kFineBits) : -1, [&](int bin) {
                const int low_sum = warp_sum(static_cast<int>(low_part)), high_sum = warp_sum(static_cast<int>(high_part));
                if (threadIdx.x % 32) return;
                atomicAdd(low + bin, static_cast<unsigned>(low_sum));
                atomicAdd(high + bin, static_cast<unsigned>(high_sum));
                if (with_counts) atomicAdd(counts + bin, 32u);
            }, [&](int bin) {
                if (low_part) atomicAdd(low + bin, low_part);
                if (high_part) atomicAdd(high + bin, high_part);
                if (with_counts) atomicAdd(counts + bin, 1u);
            });
        });
        hand_in(kCoarseBins, rank, [&](int bin) {
            const Weight weight = low[bin] + (static_cast<Weight>(high[bin]) << 16);
            if (!weight) return;
            atomicAdd(row.coarse_weight + bin, weight);
            if (with_counts) atomicAdd(row.coarse_count + bin, counts[bin]);
            low[bin] = high[bin] = counts[bin] = 0;
        });
    }
}

struct FoundBin {
    int bin;               // -1: the sum of all bins is not more than the target
    Number before, value;  // sum of the bins before it, and its own
};

// Bins with their prefix sums, kBinsOfThread in each thread of the block.
template <int kBins>
struct BinSums {
    static constexpr int kBinsOfThread = (kBins + kRowThreads - 1) / kRowThreads;
    Number values[kBinsOfThread], before, total;

    // `scratch`: shared memory for kWarpsOfBlock numbers. For all threads of the block.
    template <class ValueOf>
    __device__ __forceinline__ BinSums(Number* scratch, ValueOf value_of) {
        Number own = 0;
#pragma unroll
        for (int i = 0; i < kBinsOfThread; i++) {
            const int bin = kBinsOfThread * static_cast<int>(threadIdx.x) + i;
            values[i] = bin < kBins ? value_of(bin) : 0;
            own += values[i];
        }
        const PrefixSum sum = block_prefix_sum(own, scratch);
        before = sum.before;
        total = sum.total;
    }

    // The first bin with which the sum exceeds the target. `found` in shared memory. For all threads of the block.
    __device__ __forceinline__ FoundBin find(Number target, FoundBin* found) const {
        if (target >= total) return {-1, 0, 0};
        __syncthreads();
        Number sum = before;
#pragma unroll
        for (int i = 0; i < kBinsOfThread; i++) {
            if (sum <= target && target < sum + values[i]) *found = {kBinsOfThread * static_cast<int>(threadIdx.x) + i, sum, values[i]};
            sum += values[i];
        }
        __syncthreads();
        return *found;
    }
};
