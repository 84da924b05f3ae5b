// The element types, and conversions to and from float. A word (`unsigned`) holds two elements, the first one in its
// lower half. Everything between #ifndef EMULATED_PTX and #endif, here and in the other headers, has a twin for the CPU
// in tests/simt/ptx.h.
#pragma once

#ifndef EMULATED_PTX

struct Float16 {};
struct BFloat16 {};

// Two floats to a word, rounded to nearest even.
__device__ __forceinline__ unsigned pack(Float16, float2 values) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values.y), "f"(values.x));
    return word;
}
__device__ __forceinline__ unsigned pack(BFloat16, float2 values) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values.y), "f"(values.x));
    return word;
}

// A word to two floats; exact.
__device__ __forceinline__ float2 unpack(Float16, unsigned word) {
    float2 values;
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(word));
    return values;
}
__device__ __forceinline__ float2 unpack(BFloat16, unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

// Element i of a word, twice: an instruction on pairs selects it itself.
__device__ __forceinline__ unsigned twice(unsigned word, int i) {
    unsigned first, second;
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; mov.b32 %0, {x, x}; mov.b32 %1, {y, y};}"
        : "=r"(first), "=r"(second)
        : "r"(word));
    return i ? second : first;
}

// a * b + c of two elements each, rounded once.
__device__ __forceinline__ unsigned multiply_add(Float16, unsigned a, unsigned b, unsigned c) {
    unsigned word;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}
__device__ __forceinline__ unsigned multiply_add(BFloat16, unsigned a, unsigned b, unsigned c) {
    unsigned word;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}

#endif
