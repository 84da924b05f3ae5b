// How the blocks that share a row tell each other a number each, without a counter: a block publishes it as a flagged vector, all others poll.
#pragma once

#include "attention/flagged_vector.cuh"
#include "sampling/row_workspace.cuh"

// The flag of a vector is the number of the exchange. It goes on from launch to launch, so no vector has to be reset: block 0 writes down how
// many there were once all blocks have taken part in the first one, and so have read where to begin. A block that publishes for the next
// exchange has seen what all others published for this one, but these may still be polling: the slots of two exchanges take turns.
struct RowExchange {
    RowWorkspace& row;
    const int rank, blocks;
    const unsigned done_before;  // what row.exchanges was
    unsigned done = done_before;

    // Thread t gets the number of block t, threads from `blocks` on 0. `number` counts in thread 0 only. For all threads of the block.
    __device__ __forceinline__ Number with_all(Number number) {
        done++;
        const unsigned flag = 0x40000000 | (done & 0x0FFFFFFF);  // as a float neither 0 nor denormal nor NaN
        float4* const slots = row.slots[done % 2];
        if (threadIdx.x == 0) {
            const float low = __uint_as_float(static_cast<unsigned>(number)), high = __uint_as_float(static_cast<unsigned>(number >> 32));
            publish_vector(slots + rank, {low, high, 0, __uint_as_float(flag)});
        }
        if (static_cast<int>(threadIdx.x) >= blocks) return 0;
        float4 heard;
        while (__float_as_uint((heard = poll_vector(slots + threadIdx.x)).w) != flag) poll_again();
        return static_cast<Number>(__float_as_uint(heard.y)) << 32 | __float_as_uint(heard.x);
    }

    // After the last exchange. Where there was none, other blocks may not have read the number yet.
    __device__ __forceinline__ void finish() const {
        if (rank == 0 && threadIdx.x == 0 && done != done_before) row.exchanges = done;
    }
};
