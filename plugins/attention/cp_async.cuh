// Asynchronous copies of 16 bytes from global to shared memory (cp.async), L2 prefetches and cache policies: one thin
// wrapper for each instruction.
#pragma once

#include "shared_memory.cuh"

#ifndef EMULATED_PTX

// Copies 16 bytes; they have arrived once the commit group that the copy belongs to has been waited for. If not
// `valid`, zeros are written and `from` is not read.
__device__ __forceinline__ void cp_async(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void cp_async_word(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// The same address, computed here: constants that are added to it go into the instructions, instead of into registers
// for each of them.
__device__ __forceinline__ const unsigned char* base_address(const unsigned char* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// A cache policy for data that is read once: the L2 evicts it before everything else.
using L2Policy = unsigned long long;
__device__ __forceinline__ L2Policy evict_first_policy() {
    L2Policy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void cp_async_with_policy(SharedAddress to, const void* from, bool valid, L2Policy policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
// The same for bytes that another block may be writing at the same time; in that case the result must not be used. It
// is a function of its own because the emulator's race detection has to know.
__device__ __forceinline__ void cp_async_speculative(SharedAddress to, const void* from, bool valid, L2Policy policy) {
    cp_async_with_policy(to, from, valid, policy);
}

// Closes a commit group: all copies of this thread since the last one.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the kGroups youngest commit groups of this thread are still in flight.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Brings 128 bytes into the L2 and no further: a later read sees what is in memory by then.
__device__ __forceinline__ void prefetch_l2_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

#endif
