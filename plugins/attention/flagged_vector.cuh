// A vector of 16 bytes with a flag, by which one block passes a result to another without a counter or a fence. It is
// written and read by one instruction (st/ld.relaxed.gpu.b128, PTX ISA 8.3), so a reader sees all of it or nothing. The
// flag is its last word: 0 until the vector is published, and never 0 afterwards. A value of 0 is published as -0.
#pragma once

#ifndef EMULATED_PTX

__device__ __forceinline__ void publish_vector(float4* address, float4 value) {
    if (__float_as_uint(value.w) == 0) value.w = -0.0f;  // by bits: they may be those of something else than a float
    asm volatile(
        "{.reg .b128 all; .reg .b64 low, high;"
        " mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 all, {low, high};"
        "st.relaxed.gpu.global.b128 [%0], all;}" ::"l"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
        : "memory");
}
// Current content of the vector. is_published says if it is a result.
__device__ __forceinline__ float4 poll_vector(const float4* address) {
    float4 value;
    asm volatile(
        "{.reg .b128 all; .reg .b64 low, high; ld.relaxed.gpu.global.b128 all, [%4]; mov.b128 {low, high}, all;"
        "mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high;}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "l"(address)
        : "memory");
    return value;
}
__device__ __forceinline__ bool is_published(float4 value) { return __float_as_uint(value.w); }
// For the reader, once it has the value: the address is ready for the next launch.
__device__ __forceinline__ void reset_vector(float4* address) { address->w = 0; }
// Between two polls. The emulator lets other threads run here; a GPU does so anyway.
__device__ __forceinline__ void poll_again() {}

#endif
