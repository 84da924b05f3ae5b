// A barrier of some of the threads of a block.
#pragma once

#ifndef EMULATED_PTX

// Waits for all `count` threads, whole warps, that meet at the barrier of this number: 1 to 15, as __syncthreads has 0.
__device__ __forceinline__ void barrier_of_threads(int number, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count) : "memory");
}

#endif
