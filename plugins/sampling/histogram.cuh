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
__device__ __forceinline__ unsigned* shared_bins() {
    SHARED_ARRAY(unsigned, bins, kSharedBins);
    return bins;
}
__device__ __forceinline__ void clear_bins() {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < kSharedBins; bin += kRowThreads) shared_bins()[bin] = 0;
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
#pragma unroll 1
    for (int i = threadIdx.x; i < num_bins; i += kRowThreads) {
        int bin = rank * 32 + i;
        while (bin >= num_bins) bin -= num_bins;
        add(bin);
    }
    __syncthreads();
}

// bin_of(token, logit): from 0 to num_bins - 1, or -1. For all threads of the block.
template <int kAtOnce = kTokensAtOnce, class BinOf>
__device__ __forceinline__ void add_counts(const RowChunk& chunk, int rank, int num_bins, unsigned* of_row, BinOf bin_of) {
    unsigned* const bins = shared_bins();
    chunk.for_each<kAtOnce>([&](int token, float logit) {
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

// A coarse bin whose classes are counted, and where its count begins.
struct FineBins {
    int coarse, first;
};

// The classes of three coarse bins. For all threads of the block.
__device__ __noinline__ void add_fine_counts(const RowChunk chunk, int rank, int num_bins, unsigned* of_row, FineBins a, FineBins b, FineBins c) {
    add_counts(chunk, rank, num_bins, of_row, [&](int, float logit) {
        const unsigned token_class = chunk.class_at(logit);
        const int coarse = static_cast<int>(token_class >> kFineBits), bin = static_cast<int>(token_class % kFineBins);
        return coarse == a.coarse ? a.first + bin : coarse == b.coarse ? b.first + bin : coarse == c.coarse ? c.first + bin : -1;
    });
}

// Weights by the high bits of the class, and counts if they are asked for.
__device__ __forceinline__ void add_weights(const RowChunk& chunk, int rank, RowWorkspace& row, bool with_counts) {
    unsigned *const low = shared_bins(), *const high = low + kCoarseBins, *const counts = high + kCoarseBins;
#pragma unroll 1
    for (int from = chunk.begin; from < chunk.end; from += kTokensOfHistogram) {
        chunk.for_each(from, min(chunk.end, from + kTokensOfHistogram), [&](int, float logit) {
            const unsigned token_class = chunk.class_at(logit);
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

// Shared memory in which the thread that has found a bin tells the others.
__device__ __forceinline__ FoundBin* found_bin() {
    SHARED_ARRAY(FoundBin, found, 1);
    return found;
}

// Bins with their prefix sums. Each thread of the block has kBinsOfThread of them, of which it keeps the sum.
template <class ValueOf>
struct BinSums {
    static constexpr int kBinsOfThread = kFineBins / kRowThreads;
    static_assert(kCoarseBins % kBinsOfThread == 0 && kCoarseBins <= kFineBins, "a thread has as many bins or none");

    ValueOf value_of;
    const int first;
    Number own = 0, before, total;

    // The number of bins is kCoarseBins or kFineBins. For all threads of the block.
    __device__ __forceinline__ BinSums(int bins, ValueOf value_of) : value_of(value_of), first(kBinsOfThread * static_cast<int>(threadIdx.x)) {
        if (first < bins) {
#pragma unroll
            for (int i = 0; i < kBinsOfThread; i++) own += value_of(first + i);
        }
        const PrefixSum sum = block_prefix_sum(own);
        before = sum.before;
        total = sum.total;
    }

    // The first bin with which the sum exceeds the target. For all threads of the block.
    __device__ __forceinline__ FoundBin find(Number target) const {
        if (target >= total) return {-1, 0, 0};
        FoundBin* const found = found_bin();
        __syncthreads();
        if (before <= target && target < before + own) {
            FoundBin here{first, before, value_of(first)};
#pragma unroll 1
            while (here.before + here.value <= target) {
                here.before += here.value;
                here.value = value_of(++here.bin);
            }
            *found = here;
        }
        __syncthreads();
        return *found;
    }
};
