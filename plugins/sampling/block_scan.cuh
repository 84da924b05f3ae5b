// Sums, prefix sums and maxima over the threads of a block.
#pragma once

#include "attention/math.cuh"
#include "shared_memory.cuh"

constexpr int kRowThreads = 512;
constexpr int kWarpsOfBlock = kRowThreads / 32;

using Number = unsigned long long;

// Over the first kLanes lanes.
template <int kLanes = 32, class Sum>
__device__ __forceinline__ Sum warp_prefix_sum(Sum value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const Sum below = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

// Over all lanes of the warp, of numbers of up to 54 bits.
__device__ __forceinline__ unsigned sum_of_warp(unsigned value) {
    return static_cast<unsigned>(warp_sum(static_cast<int>(value)));
}
__device__ __forceinline__ Number sum_of_warp(Number value) {
    constexpr int kBits = 27;  // sums of 32 numbers of so many bits fit into 32
    const unsigned low = static_cast<unsigned>(value) & ((1u << kBits) - 1),
                   high = static_cast<unsigned>(value >> kBits);
    return sum_of_warp(low) + (static_cast<Number>(sum_of_warp(high)) << kBits);
}

template <class Sum>
struct PrefixSum {
    Sum before, total;
};

// Functions for all threads of a block are not inlined. A kernel that runs once among others starts with cold instruction
// caches, so repeated work should use the same code.

// The sum over the threads before this one, and over all.
template <class Sum>
__device__ __noinline__ PrefixSum<Sum> block_prefix_sum(Sum value) {
    SHARED_ARRAY(Sum, sums, kWarpsOfBlock);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Sum up_to = warp_prefix_sum(value);
    __syncthreads();
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    const Sum of_warps = warp_prefix_sum<kWarpsOfBlock>(lane < kWarpsOfBlock ? sums[lane] : 0);
    const Sum before_warp = __shfl_sync(~0u, of_warps, warp ? warp - 1 : 0);
    return {(warp ? before_warp : 0) + up_to - value, __shfl_sync(~0u, of_warps, kWarpsOfBlock - 1)};
}

// The sum over the warps before this one, and over all. There is a __syncthreads() between two calls.
template <class Sum>
__device__ __noinline__ PrefixSum<Sum> sums_of_warps(Sum value) {
    SHARED_ARRAY(Sum, sums, kWarpsOfBlock);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    value = sum_of_warp(value);
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    const Sum of_warp = lane < kWarpsOfBlock ? sums[lane] : 0;
    return {sum_of_warp(lane < warp ? of_warp : 0), sum_of_warp(of_warp)};
}

// By halves of 32 bits, for which there is one instruction each.
__device__ __forceinline__ Number largest_of_warp(Number value) {
    constexpr unsigned kSign = 0x80000000u;
    const int high = static_cast<int>(static_cast<unsigned>(value >> 32) ^ kSign), highest = warp_max(high);
    const int low =
        warp_max(high == highest ? static_cast<int>(static_cast<unsigned>(value) ^ kSign) : static_cast<int>(kSign));
    return static_cast<Number>(static_cast<unsigned>(highest) ^ kSign) << 32 | (static_cast<unsigned>(low) ^ kSign);
}

__device__ __noinline__ Number block_max(Number value) {
    SHARED_ARRAY(Number, largest, kWarpsOfBlock);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    value = largest_of_warp(value);
    __syncthreads();
    if (lane == 0) largest[warp] = value;
    __syncthreads();
    return largest_of_warp(lane < kWarpsOfBlock ? largest[lane] : 0);
}

// Of a division whose result is less than 2^20, by up to 2^24: a float is off by less than 1.
__device__ __forceinline__ Number quotient(Number dividend, unsigned divisor) {
    const unsigned about = static_cast<unsigned>(__fdiv_rn(static_cast<float>(dividend), static_cast<float>(divisor)));
    const long long left = static_cast<long long>(dividend - static_cast<Number>(about) * divisor);
    return left < 0 ? about - 1 : left < static_cast<long long>(divisor) ? about : about + 1;
}
