// Histograms over the tokens of a row: each block counts its tokens in shared memory and adds what it found to the
// memory of the row.
#pragma once

#include "attention/math.cuh"
#include "sampling/row_chunk.cuh"
#include "sampling/row_workspace.cuh"
#include "shared_memory.cuh"

constexpr int kCopies = 4;  // of a coarse bin, in neighbouring words, for every fourth lane: fewer lanes of a warp meet
constexpr int kSharedBins = kFineAtOnce * kFineBins;
static_assert(kSharedBins >= (kCopies + 1) * kCoarseBins, "the same shared memory for both");

// Shared memory, all 0 but within a function of this file.
__device__ __forceinline__ unsigned* shared_bins() {
    SHARED_ARRAY(uint4, bins, kSharedBins / 4);
    return reinterpret_cast<unsigned*>(bins);
}
__device__ __forceinline__ void clear_bins() {
    static_assert(kSharedBins % (4 * kRowThreads) == 0, "as many bins for each thread");
#pragma unroll
    for (int i = 0; i < kSharedBins / 4; i += kRowThreads)
        reinterpret_cast<uint4*>(shared_bins())[i + threadIdx.x] = {0, 0, 0, 0};
}

// Their address, from another lane, as the compiler would otherwise compute it again at each use.
__device__ __forceinline__ SharedAddress address_of_bins() {
    return __shfl_sync(~0u, shared_address(shared_bins()), 0);
}

__device__ __forceinline__ unsigned lowest_of(const unsigned (&classes)[kTokensAtOnce]) {
    unsigned lowest = classes[0];
#pragma unroll
    for (int i = 1; i < kTokensAtOnce; i++) lowest = min(lowest, classes[i]);
    return lowest;
}

// Adds the counts of a block to the memory of a row: add(bin, load(bin)) for each bin that is not 0. Each block begins
// with another bin, to reduce contention of atomics.
template <class Load, class Add>
__device__ __forceinline__ void hand_in(int num_bins, int rank, Load load, Add add) {
    constexpr int kAtOnce = 4;
    __syncthreads();
    int start = rank * 32;
    while (start >= num_bins) start -= num_bins;
#pragma unroll 1
    for (int first = threadIdx.x; first < num_bins; first += kAtOnce * kRowThreads) {
        decltype(load(0)) loaded[kAtOnce];
        const auto bin_at = [&](int i) {
            const int bin = start + first + i * kRowThreads;
            return bin < num_bins ? bin : bin - num_bins;
        };
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) loaded[i] = first + i * kRowThreads < num_bins ? load(bin_at(i)) : 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            if (loaded[i]) add(bin_at(i), loaded[i]);
        }
    }
}

// The same for counts, most of which are 0: a warp looks at 128 of them at once.
__device__ __forceinline__ void hand_in_counts(int num_bins, int rank, unsigned* of_row) {
    constexpr int kBinsOfWarp = 128;  // and at least 8 times as many in all
    const int lane = threadIdx.x % 32, num_parts = num_bins / kBinsOfWarp;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < num_parts; i += kWarpsOfBlock) {
        // blocks begin with different ones
        const int turned = i + rank % 8, part = turned < num_parts ? turned : turned - num_parts;
        unsigned* const bins = shared_bins() + part * kBinsOfWarp;
        uint4& four = reinterpret_cast<uint4*>(bins)[lane];
        if (!__any_sync(~0u, four.x | four.y | four.z | four.w)) continue;
        unsigned counts[kBinsOfWarp / 32];
#pragma unroll
        for (int x = 0; x < kBinsOfWarp / 32; x++) counts[x] = bins[32 * x + lane];
        __syncwarp();
        four = {0, 0, 0, 0};
#pragma unroll
        for (int x = 0; x < kBinsOfWarp / 32; x++) {
            if (counts[x]) atomicAdd(of_row + part * kBinsOfWarp + 32 * x + lane, counts[x]);
        }
    }
}

// bin_of(token, logit): from 0 to num_bins - 1, a multiple of 128, or less than 0. For all threads of the block.
template <bool kIsKept, class BinOf>
__device__ __forceinline__ void add_counts(const RowChunk<kIsKept>& chunk, int rank, int num_bins, unsigned* of_row,
                                           BinOf bin_of) {
    const SharedAddress address = address_of_bins();
    const auto load = [&](int token, bool exists) -> int { return bin_of(token, chunk.logit_at(token, exists)); };
    for_each_token<1>(chunk.begin, chunk.end, load, [&](int bin) {
        if (bin >= 0) count_shared(address + bin * 4);
    });
    hand_in_counts(num_bins, rank, of_row);
}

// A coarse bin whose classes are counted, and where its count begins.
struct FineBins {
    int coarse, first;
};

// The classes of three coarse bins. For all threads of the block.
template <bool kIsKept>
__device__ __forceinline__ void add_fine_counts(const RowChunk<kIsKept>& chunk, int rank, int num_bins,
                                                unsigned* of_row, FineBins a, FineBins b, FineBins c) {
    const SharedAddress address = address_of_bins();
    const unsigned behind = static_cast<unsigned>(max(max(a.coarse, b.coarse), c.coarse) + 1) << kFineBits;
    const auto load = [&](int token, bool exists) -> unsigned { return chunk.class_at(chunk.logit_at(token, exists)); };
    const auto count = [&](unsigned (&classes)[kTokensAtOnce]) {
        if (lowest_of(classes) >= behind) return;
#pragma unroll
        for (const unsigned token_class : classes) {
            const int coarse = static_cast<int>(token_class >> kFineBits),
                      bin = static_cast<int>(token_class % kFineBins);
            int first = -kFineBins;
            if (coarse == c.coarse) first = c.first;
            if (coarse == b.coarse) first = b.first;
            if (coarse == a.coarse) first = a.first;
            if (first >= 0) count_shared(address + (first + bin) * 4);
        }
    };
    for_each_token(chunk.begin, chunk.end, load, count, [](int, unsigned, bool) {});
    hand_in_counts(num_bins, rank, of_row);
}

// Sums of weights by the high bits of the class, and counts on request. The weights in a bin are 24-bit multiples of one
// power of 2, so 32-bit sums suffice: a rare carry is added to the memory of the row at once.
template <bool kIsKept>
__device__ __forceinline__ void add_weights(const RowChunk<kIsKept>& chunk, int rank, RowWorkspace& row,
                                            bool with_counts) {
    const SharedAddress sums = address_of_bins() + threadIdx.x % kCopies * 4,
                        counts = address_of_bins() + kCopies * kCoarseBins * 4;
    const auto load = [&](int token, bool exists) -> unsigned { return chunk.class_at(chunk.logit_at(token, exists)); };
    const auto add = [&](unsigned (&classes)[kTokensAtOnce]) {
        if (lowest_of(classes) >= kClassesWithWeight) return;  // nearly all tokens of a row that is sure of some
        unsigned units[kTokensAtOnce], before[kTokensAtOnce];
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; i++) units[i] = units_of(classes[i]);
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; i++)
            before[i] = fetch_add_shared(sums + (classes[i] >> kFineBits) * (kCopies * 4), units[i]);
        if (with_counts) {
#pragma unroll
            for (int i = 0; i < kTokensAtOnce; i++) {
                if (units[i]) count_shared(counts + (classes[i] >> kFineBits) * 4);
            }
        }
        bool is_carried = false;
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; i++) is_carried |= before[i] + units[i] < before[i];
        if (!is_carried) return;
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; i++) {
            const Weight carry = static_cast<Weight>(before[i] + units[i] < before[i]) << 32 << unit_shift(classes[i]);
            if (carry) atomicAdd(row.coarse_weight + (classes[i] >> kFineBits), carry);
        }
    };
    for_each_token(chunk.begin, chunk.end, load, add, [](int, unsigned, bool) {});
    constexpr int kSumBits = 34;  // of four words; the count is above them, as a sum may be 0 where there are tokens
    uint4* const copies = reinterpret_cast<uint4*>(shared_bins());
    unsigned* const counted = shared_bins() + kCopies * kCoarseBins;
    const auto units_in = [&](int bin) -> Number {
        const uint4 units = copies[bin];
        return (static_cast<Number>(units.x) + units.y + units.z + units.w)
               | static_cast<Number>(with_counts ? counted[bin] : 0) << kSumBits;
    };
    hand_in(kCoarseBins, rank, units_in, [&](int bin, Number units) {
        const unsigned count = static_cast<unsigned>(units >> kSumBits);
        atomicAdd(row.coarse_weight + bin, (units & ((1ull << kSumBits) - 1))
                                               << unit_shift(static_cast<unsigned>(bin) << kFineBits));
        copies[bin] = {0, 0, 0, 0};
        if (!count) return;
        atomicAdd(row.coarse_count + bin, count);
        counted[bin] = 0;
    });
}

struct FoundBin {
    int bin;
    Number before, value;  // sum of the bins before it, and its own
};

// Shared memory in which the thread that finds a bin publishes it to the block.
constexpr int kFoundBins = 8;
__device__ __forceinline__ FoundBin* found_bins() {
    SHARED_ARRAY(FoundBin, found, kFoundBins);
    return found;
}

// Adjacent bins of a thread, which has all of them or none.
constexpr int kBinsOfThread = 4;
static_assert(kBinsOfThread * kRowThreads == kFineBins && kCoarseBins % kBinsOfThread == 0 && kCoarseBins <= kFineBins,
              "a block has all of them");
__device__ __forceinline__ int first_bin_of_thread() { return kBinsOfThread * static_cast<int>(threadIdx.x); }

// Those of a thread, from memory.
template <class Sum>
struct ThreadBins {
    Sum values[kBinsOfThread];
};
__device__ __forceinline__ uint4 counts_of_thread(const unsigned* bins, int num_bins) {
    return first_bin_of_thread() < num_bins ? reinterpret_cast<const uint4*>(bins)[threadIdx.x] : uint4{0, 0, 0, 0};
}
__device__ __forceinline__ ThreadBins<unsigned> as_bins(const uint4& counts) {
    return {{counts.x, counts.y, counts.z, counts.w}};
}
__device__ __forceinline__ ThreadBins<Weight> weights_of_thread(const Weight* coarse) {
    if (first_bin_of_thread() >= kCoarseBins) return {};
    const uint4* const words = reinterpret_cast<const uint4*>(coarse) + 2 * threadIdx.x;
    const uint4 a = words[0], b = words[1];
    const auto join = [](unsigned low, unsigned high) { return static_cast<Number>(high) << 32 | low; };
    return {{join(a.x, a.y), join(a.z, a.w), join(b.x, b.y), join(b.z, b.w)}};
}
// Weight of these numbers of tokens, of classes from `first_class` on, in units of these classes.
__device__ __forceinline__ ThreadBins<Number> units_of_thread(const uint4& counts, unsigned first_class) {
    if (!(counts.x | counts.y | counts.z | counts.w)) return {};
    ThreadBins<Number> units;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; i++)
        units.values[i] = static_cast<Number>(as_bins(counts).values[i]) * units_of(first_class + i);
    return units;
}

// Bins with their prefix sums.
template <class Sum>
struct BinSums {
    ThreadBins<Sum> bins;
    Sum before, total;  // of the threads before this one, of all

    BinSums() = default;
    // For all threads of the block.
    __device__ __forceinline__ explicit BinSums(const ThreadBins<Sum>& of_thread) : bins(of_thread) {
        const PrefixSum<Sum> sum = block_prefix_sum(own());
        before = sum.before;
        total = sum.total;
    }

    __device__ __forceinline__ Sum own() const {
        return bins.values[0] + bins.values[1] + bins.values[2] + bins.values[3];
    }

    // The first bin whose prefix sum exceeds the target, which is less than the sum of all bins. `place`: one of
    // kFoundBins that is not read any more. For all threads of the block.
    __device__ __forceinline__ FoundBin find(Sum target, int place) const {
        look_for(target, place);
        __syncthreads();
        return found_bins()[place];
    }
    // The same, but it is only there after the next __syncthreads().
    __device__ __forceinline__ void look_for(Sum target, int place) const {
        Sum left = target - before;  // may be negative, and so very large
        if (left >= own()) return;
        int i = 0;
        Sum value = bins.values[0], up_to = before;
#pragma unroll
        for (int next = 1; next < kBinsOfThread; next++) {
            if (left < value || i != next - 1) continue;
            left -= value;
            up_to += value;
            value = bins.values[next];
            i = next;
        }
        found_bins()[place] = {first_bin_of_thread() + i, up_to, value};
    }
    // A bin by its number. For all threads of the block.
    __device__ __forceinline__ FoundBin at(int bin, int place) const {
        const int i = bin - first_bin_of_thread();
        if (0 <= i && i < kBinsOfThread) {
            Sum value = bins.values[0], up_to = before;
#pragma unroll
            for (int next = 1; next < kBinsOfThread; next++) {
                if (next > i) continue;
                up_to += value;
                value = bins.values[next];
            }
            found_bins()[place] = {bin, up_to, value};
        }
        __syncthreads();
        return found_bins()[place];
    }
};
