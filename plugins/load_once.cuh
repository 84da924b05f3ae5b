// Loads of data that is read once, by one thread: past the L1, and evicted first from the L2.
#pragma once

#include "attention/cp_async.cuh"

#ifndef EMULATED_PTX

// Loads 16 bytes that are constant while the kernel runs. If not `valid`, returns zeros and does not read `from`. The
// compiler does not move it across other such loads and waits (asm volatile).
__device__ __forceinline__ uint4 load_once(const void* from, bool valid, L2Policy policy) {
    uint4 words;
    asm volatile(
        "{.reg .pred valid; setp.ne.u32 valid, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@valid ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
        : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
        : "l"(from), "r"(static_cast<unsigned>(valid)), "l"(policy));
    return words;
}

// The same, but where not `valid` the words are any.
__device__ __forceinline__ uint4 load_once_if(const void* from, bool valid, L2Policy policy) {
    uint4 words;
    asm volatile(
        "{.reg .pred valid; setp.ne.u32 valid, %5, 0;\n"
        "@valid ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
        : "l"(from), "r"(static_cast<unsigned>(valid)), "l"(policy));
    return words;
}

#endif
