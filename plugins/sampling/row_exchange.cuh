// Exchange of one number per block among the blocks that share a row, without a counter: a block publishes it as a
// flagged vector, and all others poll.
#pragma once

#include "attention/flagged_vector.cuh"
#include "sampling/row_workspace.cuh"

// The flag of a vector is the number of the exchange. It goes on from launch to launch, so no vector has to be reset:
// block 0 writes down how many there were once all blocks have taken part in the first one, and so have read where to
// begin. A block that publishes for the next exchange has seen what all others published for this one, but these may
// still be polling: the slots of two exchanges take turns.
struct RowExchange {
    RowWorkspace& row;
    const int rank, blocks;
    const unsigned done_before;  // row.exchanges at the start of the launch
    unsigned done = done_before;

    // The largest number of all blocks. `number` counts in thread 0 only. For all threads of the block.
    __device__ __forceinline__ Number largest(Number number) {
        SHARED_ARRAY(Number, of_warps, kWarps);
        number = with_all(number);
        if (threadIdx.x < 32 * kWarps) {
            number = largest_of_warp(number);
            if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
        }
        __syncthreads();
        number = of_warps[0];
#pragma unroll
        for (int warp = 1; warp < kWarps; warp++) number = max(number, of_warps[warp]);
        return number;
    }

    // The sum over the blocks before this one, and over all. Otherwise the same.
    template <class Sum>
    __device__ __forceinline__ PrefixSum<Sum> sums(Sum number) {
        SHARED_ARRAY(PrefixSum<Sum>, of_warps, kWarps);
        number = static_cast<Sum>(with_all(number));
        if (threadIdx.x < 32 * kWarps) {
            const PrefixSum<Sum> of_warp{sum_of_warp(static_cast<int>(threadIdx.x) < rank ? number : 0),
                                         sum_of_warp(number)};
            if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
        }
        __syncthreads();
        PrefixSum<Sum> sum{0, 0};
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) {
            sum.before += of_warps[warp].before;
            sum.total += of_warps[warp].total;
        }
        return sum;
    }

    // After the last exchange. Where there was none, other blocks may not have read the number yet.
    __device__ __forceinline__ void finish() const {
        if (rank == 0 && threadIdx.x == 0 && done != done_before) row.exchanges = done;
    }

private:
    static constexpr int kWarps = kMaxBlocksOfRow / 32;  // warps that poll

    // Thread t gets the number of block t, threads from `blocks` on 0.
    __device__ __forceinline__ Number with_all(Number number) {
        done++;
        const unsigned flag = 0x40000000 | (done & 0x0FFFFFFF);  // as a float neither 0 nor denormal nor NaN
        float4* const slots = row.slots[done % 2];
        if (threadIdx.x == 0) {
            const float low = __uint_as_float(static_cast<unsigned>(number)),
                        high = __uint_as_float(static_cast<unsigned>(number >> 32));
            publish_vector(slots + rank, {low, high, 0, __uint_as_float(flag)});
        }
        if (static_cast<int>(threadIdx.x) >= blocks) return 0;
        float4 heard;
        while (__float_as_uint((heard = poll_vector(slots + threadIdx.x)).w) != flag) poll_again();
        return static_cast<Number>(__float_as_uint(heard.y)) << 32 | __float_as_uint(heard.x);
    }
};
