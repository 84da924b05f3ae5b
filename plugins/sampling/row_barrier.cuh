// A barrier for the blocks that share a row: all of them are resident, as the launch is cooperative.
#pragma once

#include "attention/flagged_vector.cuh"

#ifndef EMULATED_PTX

// Release: ordered after the earlier writes of this thread. Acquire: ordered after the writes of threads that changed the
// word before.
__device__ __forceinline__ unsigned add_acq_rel(unsigned* word, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* word) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(unsigned* word, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

#endif

// A word counts the blocks that have come, from launch to launch, and is never reset. A block reads where it begins
// before its first RowExchange, and so before any block comes to a barrier.
struct RowBarrier {
    unsigned* come;
    unsigned blocks, wanted;  // wanted: at first what the word was

    // Afterwards all blocks of the row see what any of them wrote before. For all threads of the block.
    __device__ __forceinline__ void wait() {
        wanted += blocks;
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(come, 1);
            while (static_cast<int>(load_acquire(come) - wanted) < 0) poll_again();
        }
        __syncthreads();
    }
};
