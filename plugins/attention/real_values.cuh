// Quantized values times a scale, as elements: the real values of a quantized cache, rounded once to the element type.
#pragma once

#include "attention/config.cuh"

// As widen_in_order of stored_kv.cuh, without permuting quantized values first.
__device__ __forceinline__ uint2 widen_in_order(Float16, Int8, unsigned quantized) {
    const unsigned positive = quantized ^ 0x80808080, one = 0x3C003C00, minus = 0xE480E480;  // 1, -1152
    return {multiply_add(Float16{}, __byte_perm(positive, 0x64646464, 0x4140), one, minus),
            multiply_add(Float16{}, __byte_perm(positive, 0x64646464, 0x4342), one, minus)};
}

// The exponent range of float16 is too small for scales. So with float16 the scales are multiplied by this power of 2, and
// the quantized values divided by it: both products then have the magnitude of the values.
template <class Type, class Quantized>
constexpr float kRaised = 1;
template <>
constexpr float kRaised<Float16, Int8> = 64;
template <>
constexpr float kRaised<Float16, Float8> = 256;

// Four quantized values divided by kRaised, exactly.
template <class Type, class Quantized>
__device__ __forceinline__ uint2 widen_lowered(Type, Quantized, unsigned quantized) {
    return widen_in_order(Type{}, Quantized{}, quantized);
}
__device__ __forceinline__ uint2 widen_lowered(Float16, Int8, unsigned quantized) {
    const unsigned positive = quantized ^ 0x80808080, inverse = 0x24002400, minus = 0xCC80CC80;  // 1 / 64, -1152 / 64
    return {multiply_add(Float16{}, __byte_perm(positive, 0x64646464, 0x4140), inverse, minus),
            multiply_add(Float16{}, __byte_perm(positive, 0x64646464, 0x4342), inverse, minus)};
}
__device__ __forceinline__ uint2 widen_lowered(Float16, Float8, unsigned quantized) {
    const uint2 values = widen_in_order(Float16{}, Float8{}, quantized);
    const unsigned inverse = 0x1C001C00, zero = 0x80008000;  // 1 / 256
    return {multiply_add(Float16{}, values.x, inverse, zero), multiply_add(Float16{}, values.y, inverse, zero)};
}

// The scale of a row, raised, as the sum of two elements: the nearest one, and the rest. Each is in both halves of a
// word.
struct SplitScale {
    unsigned nearest, rest;
};
template <class Type, class Quantized>
__device__ __forceinline__ SplitScale split_scale(Type, Quantized, float scale) {
    const float raised = scale * kRaised<Type, Quantized>;
    const unsigned nearest = pack(Type{}, {raised, raised});
    const float rest = raised - unpack(Type{}, nearest).x;
    return {nearest, pack(Type{}, {rest, rest})};
}

// Four quantized values times their scale.
template <class Type, class Quantized>
__device__ __forceinline__ uint2 real_values(Type, Quantized, unsigned quantized, SplitScale scale) {
    const uint2 lowered = widen_lowered(Type{}, Quantized{}, quantized);
    const unsigned zero = 0x80008000;
    return {multiply_add(Type{}, lowered.x, scale.nearest, multiply_add(Type{}, lowered.x, scale.rest, zero)),
            multiply_add(Type{}, lowered.y, scale.nearest, multiply_add(Type{}, lowered.y, scale.rest, zero))};
}
