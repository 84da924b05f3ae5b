// Approximate functions of one instruction, and reductions within a warp.
#pragma once

#ifndef EMULATED_PTX

// 2 to the power of x; relative error 2^-22. A denormal result is flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x; relative error 2^-23. A denormal result is flushed to 0.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over all lanes of the warp.
__device__ __forceinline__ int warp_sum(int value) {
    int sum;
    asm volatile("redux.sync.add.s32 %0, %1, 0xFFFFFFFF;" : "=r"(sum) : "r"(value));
    return sum;
}
__device__ __forceinline__ int warp_max(int value) {
    int maximum;
    asm volatile("redux.sync.max.s32 %0, %1, 0xFFFFFFFF;" : "=r"(maximum) : "r"(value));
    return maximum;
}

#endif

// Over a quad: the four lanes that hold one row of an accumulator fragment (see mma.cuh).
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
// Over the eight lanes with the same place in their quads, which hold two columns of an accumulator fragment.
__device__ __forceinline__ float column_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 4);
    value += __shfl_xor_sync(~0u, value, 8);
    return value + __shfl_xor_sync(~0u, value, 16);
}
__device__ __forceinline__ float column_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 4));
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 8));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 16));
}

// a / b for a >= 0 and 0 < b < 2^20; `inverse` is the approximate reciprocal of b. Float arithmetic is several times as
// fast here as integer division. The reciprocal leaves a small remainder, which the second quotient corrects.
__device__ __forceinline__ int divide(int a, int b, float inverse) {
    const int estimate = static_cast<int>(static_cast<float>(a) * inverse);
    return estimate + static_cast<int>(floorf((static_cast<float>(a - estimate * b) + 0.5f) * inverse));
}

__device__ __forceinline__ int divide(int a, int b) { return divide(a, b, reciprocal_approx(static_cast<float>(b))); }

// The same for a < 2^21, in half the time: the quotient of a + 1/2 is farther from the next integer than it is wrong.
__device__ __forceinline__ int divide_small(int a, float inverse) {
    return static_cast<int>((static_cast<float>(a) + 0.5f) * inverse);
}
__device__ __forceinline__ int divide_small(int a, int b) {
    return divide_small(a, reciprocal_approx(static_cast<float>(b)));
}
