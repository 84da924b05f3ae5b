// Eight values of a row in 16 bytes, for partial results that blocks pass to each other: multiples of a unit, from
// -32767 to 32767, each plus 32768 and so never 0. Values share a unit, 1 / 32767 of the largest of them, so the
// rounding error is at most 2^-16 of that largest value.
#pragma once

#include "attention/math.cuh"

#ifndef EMULATED_PTX

// The larger of two; NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

#endif

constexpr float kPackedSteps = 32767, kSmallestPacked = 1e-30f;
// of a float whose lowest bit is 1, with room for a sign below it
constexpr unsigned kPackedExponent = 0x4B400000;
constexpr float kPackedZero = 12582912.0f + 32768.0f;  // such a float whose low 16 bits are those of 0

__device__ __forceinline__ float largest_of(float4 values, float other) {
    return max_or_nan(
        max_or_nan(max_or_nan(fabsf(values.x), fabsf(values.y)), max_or_nan(fabsf(values.z), fabsf(values.w))), other);
}
// Over a quad, as quad_max.
__device__ __forceinline__ float quad_max_or_nan(float value) {
    value = max_or_nan(value, __shfl_xor_sync(~0u, value, 1));
    return max_or_nan(value, __shfl_xor_sync(~0u, value, 2));
}
// If a value is NaN or infinite, the unit is too, and all values that are unpacked with it are NaN.
__device__ __forceinline__ float packed_unit(float largest) {
    return max_or_nan(largest, kSmallestPacked) * (1 / kPackedSteps);
}

__device__ __forceinline__ float4 pack_vector(float4 low, float4 high, float unit) {
    const float inverse = reciprocal_approx(unit);
    const auto word = [&](float first, float second) {
        const unsigned a = __float_as_uint(first * inverse + kPackedZero),
                       b = __float_as_uint(second * inverse + kPackedZero);
        return __uint_as_float((a & 0xFFFF) | b << 16);
    };
    return {word(low.x, low.y), word(low.z, low.w), word(high.x, high.y), word(high.z, high.w)};
}
// Adds the values of two words times `factor`, which is the unit times the wanted factor of the values.
__device__ __forceinline__ void add_packed(float4& to, float first, float second, float factor) {
    const unsigned a = __float_as_uint(first), b = __float_as_uint(second);
    to.x += factor * (__uint_as_float(kPackedExponent | (a & 0xFFFF)) - kPackedZero);
    to.y += factor * (__uint_as_float(kPackedExponent | a >> 16) - kPackedZero);
    to.z += factor * (__uint_as_float(kPackedExponent | (b & 0xFFFF)) - kPackedZero);
    to.w += factor * (__uint_as_float(kPackedExponent | b >> 16) - kPackedZero);
}
