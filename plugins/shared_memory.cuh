// Shared memory of a block. The emulator of the tests (tests/simt) defines the same names: there every block gets its
// own, filled with NaN.
#pragma once

#ifndef SHARED_ARRAY

// An array of fixed size.
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
// The dynamic shared memory of the launch, aligned to 1024 bytes.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(1024) type name[]

// An address in the shared state space, as cp.async and ldmatrix take it: 32 bits. Adding bytes to it gives another
// such address.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Adds a value to a word, and returns the previous word. Does nothing for a value of 0, and returns 0.
__device__ __forceinline__ unsigned fetch_add_shared(SharedAddress address, unsigned value) {
    unsigned before;
    asm volatile(
        "{.reg .pred is_any; setp.ne.u32 is_any, %2, 0; mov.u32 %0, 0; @is_any atom.shared.add.u32 %0, [%1], %2;}"
        : "=&r"(before)
        : "r"(address), "r"(value)
        : "memory");
    return before;
}
// Adds 1. The additions of lanes to one word are combined.
__device__ __forceinline__ void count_shared(SharedAddress address) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

// Flips bits of an address.
__device__ __forceinline__ SharedAddress xor_address(SharedAddress address, unsigned bits) { return address ^ bits; }

#endif
