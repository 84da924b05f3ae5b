// A barrier for the blocks that share a row: all of them are resident, as the launch is cooperative.
#pragma once

#include "attention/flagged_vector.cuh"

#ifndef EMULATED_PTX

// Ordered with what this thread did before, and with what others did before they changed the word.
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
__device__ __forceinline__ void store_release(unsigned* word, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

#endif

struct RowBarrier {
    unsigned *arrived, *generation;  // arrived is 0 between two launches; the generation may be any number
    unsigned blocks, current;

    __device__ __forceinline__ RowBarrier(unsigned* words, unsigned blocks)
        : arrived(words), generation(words + 1), blocks(blocks), current(threadIdx.x == 0 ? load_acquire(words + 1) : 0) {}

    // What any block wrote before is there for all of them afterwards. For all threads of the block.
    __device__ __forceinline__ void wait() {
        __syncthreads();
        if (threadIdx.x == 0) {
            if (add_acq_rel(arrived, 1) == blocks - 1) {
                *arrived = 0;
                store_release(generation, current + 1);
            } else {
                while (load_acquire(generation) == current) poll_again();
            }
        }
        current++;
        __syncthreads();
    }
};
