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
__device__ __forceinline__ uint4* shared_bins() {
    SHARED_ARRAY(uint4, bins, kSharedBins / 4);
    return bins;
}
__device__ __forceinline__ void clear_bins() {
    static_assert(kSharedBins % (4 * kRowThreads) == 0, "as many bins for each thread");
#pragma unroll
    for (int i = 0; i < kSharedBins / 4; i += kRowThreads) shared_bins()[i + threadIdx.x] = {0, 0, 0, 0};
}

// Their address, from another lane, as the compiler would otherwise compute it again at each use.
__device__ __forceinline__ SharedAddress address_of_bins() { return __shfl_sync(~0u, shared_address(shared_bins()), 0); }

// Whether all lanes of a warp meet in a bin.
__device__ __forceinline__ bool all_meet(int bin) { return __all_sync(~0u, bin == __shfl_sync(~0u, bin, 0)); }

// Hands to the memory of a row what each block has counted: calls add(bin) for every fourth bin, beginning with another one in each block.
template <class Add>
__device__ __forceinline__ void hand_in(int num_bins, int rank, Add add) {
    __syncthreads();
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < num_bins; i += 4 * kRowThreads) {
        int bin = rank * 32 + i;
        while (bin >= num_bins) bin -= num_bins;
        add(bin);
    }
    __syncthreads();
}

// Four bins, which are 0 afterwards.
__device__ __forceinline__ uint4 take_bins(uint4* bins) {
    const uint4 taken = *bins;
    *bins = {0, 0, 0, 0};
    return taken;
}

__device__ __forceinline__ void add_to_row(unsigned* of_row, const uint4& counts) {
    if (counts.x) atomicAdd(of_row, counts.x);
    if (counts.y) atomicAdd(of_row + 1, counts.y);
    if (counts.z) atomicAdd(of_row + 2, counts.z);
    if (counts.w) atomicAdd(of_row + 3, counts.w);
}

// bin_of(token, logit): from 0 to num_bins - 1, or less than 0. For all threads of the block.
template <int kAtOnce = kTokensAtOnce, class BinOf>
__device__ __forceinline__ void add_counts(const RowChunk& chunk, int rank, int num_bins, unsigned* of_row, BinOf bin_of) {
    const SharedAddress address = address_of_bins();
    const auto load = [&](int token, bool exists) -> int { return bin_of(token, chunk.logit_at(token, exists)); };
    chunk.for_each<kAtOnce>(chunk.begin, chunk.end, load, [&](int, int bin) {
        if (all_meet(bin)) {
            if (bin >= 0 && threadIdx.x % 32 == 0) add_shared(address + bin * 4, 32);
        } else if (bin >= 0) {
            count_shared(address + bin * 4);
        }
    });
    hand_in(num_bins, rank, [&](int bin) { add_to_row(of_row + bin, take_bins(shared_bins() + bin / 4)); });
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
        int first = -kFineBins;
        if (coarse == c.coarse) first = c.first;
        if (coarse == b.coarse) first = b.first;
        if (coarse == a.coarse) first = a.first;
        return first + bin;
    });
}

__device__ __forceinline__ void add_to_row(Weight* of_row, unsigned low, unsigned high) {
    if (low | high) atomicAdd(of_row, low + (static_cast<Weight>(high) << 16));
}

// A token in its coarse bin, -1 if it has no weight; the weight in two parts.
struct WeightInBin {
    int bin;
    unsigned low, high;
};

// Weights by the high bits of the class, and counts if they are asked for.
__device__ __forceinline__ void add_weights(const RowChunk& chunk, int rank, RowWorkspace& row, bool with_counts) {
    constexpr int kHigh = kCoarseBins * 4, kCounts = 2 * kHigh;
    const SharedAddress address = address_of_bins();
    const auto load = [&](int token, bool exists) -> WeightInBin {
        const unsigned token_class = chunk.class_at(chunk.logit_at(token, exists));
        const Weight weight = weight_of(token_class);
        const int bin = weight ? static_cast<int>(token_class >> kFineBits) : -1;
        return {bin, static_cast<unsigned>(weight & 0xFFFF), static_cast<unsigned>(weight >> 16)};
    };
#pragma unroll 1
    for (int from = chunk.begin; from < chunk.end; from += kTokensOfHistogram) {
        chunk.for_each(from, min(chunk.end, from + kTokensOfHistogram), load, [&](int, const WeightInBin& one) {
            unsigned low = one.low, high = one.high, count = 1;
            bool adds = one.bin >= 0;
            if (all_meet(one.bin)) {
                low = static_cast<unsigned>(warp_sum(static_cast<int>(low)));
                high = static_cast<unsigned>(warp_sum(static_cast<int>(high)));
                count = 32;
                adds = adds && threadIdx.x % 32 == 0;
            }
            if (!adds) return;
            const SharedAddress bin = address + one.bin * 4;
            add_shared(bin, low);
            add_shared(bin + kHigh, high);
            if (with_counts) add_shared(bin + kCounts, count);
        });
        hand_in(kCoarseBins, rank, [&](int bin) {
            uint4* const place = shared_bins() + bin / 4;
            const uint4 low = take_bins(place), high = take_bins(place + kCoarseBins / 4);
            add_to_row(row.coarse_weight + bin, low.x, high.x);
            add_to_row(row.coarse_weight + bin + 1, low.y, high.y);
            add_to_row(row.coarse_weight + bin + 2, low.z, high.z);
            add_to_row(row.coarse_weight + bin + 3, low.w, high.w);
            if (with_counts) add_to_row(row.coarse_count + bin, take_bins(place + kCoarseBins / 2));
        });
    }
}

struct FoundBin {
    int bin;               // -1: the sum of all bins is not more than the target
    Number before, value;  // sum of the bins before it, and its own
};

// Shared memory in which the thread that has found a bin tells the others.
constexpr int kFoundBins = 7;
__device__ __forceinline__ FoundBin* found_bins() {
    SHARED_ARRAY(FoundBin, found, kFoundBins);
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

    // The first bin with which the sum exceeds the target. `place`: one of kFoundBins, that nobody reads any more. For all threads of the block.
    __device__ __forceinline__ FoundBin find(Number target, int place) const {
        if (target >= total) return {-1, 0, 0};
        look_for(target, place);
        __syncthreads();
        return found_bins()[place];
    }
    // The same, but it is only there after the next __syncthreads(); the target is less than the sum of all.
    __device__ __forceinline__ void look_for(Number target, int place) const {
        if (target < before || target >= before + own) return;
        FoundBin here{first, before, value_of(first)};
#pragma unroll 1
        while (here.before + here.value <= target) {
            here.before += here.value;
            here.value = value_of(++here.bin);
        }
        found_bins()[place] = here;
    }
};
