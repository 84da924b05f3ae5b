// K and V in eight bits: quantized values, each of which stands for its value times a scale.
// trt_kvcache/kernels/kv_quantization.py defines, bit by bit, how a row is quantized.
//
// A word holds four quantized values of a row, the first one in its lowest byte. As elements they come in two words. So
// what ldmatrix reads of a tile of quantized values is a B fragment, of k 16 and 8 columns:
//
//     ldmatrix          a word: quantized values 4t .. 4t+3 of row g
//                       widen_in_order: b0, b1 of K^T for key g, if lane t of the quad has columns 4t, 4t+1 and
//                       4t+2, 4t+3 of q
//     ldmatrix, trans   a word: quantized values 2g, 2g+1 of row 2t, and the same of row 2t+1
//                       widen: keys 2t and 2t+1 of V, of columns 2g and 2g+1
//
// So the 16 columns of a chunk are two B fragments of V, one of the even columns and one of the odd ones.
#pragma once

#include "attention/element.cuh"

// e4m3: sign, 4 bits of exponent, 3 bits of mantissa. 0x7F and 0xFF are NaN, and there is no infinity.
struct Float8 {
    static constexpr float kLargest = 448;
};
struct Int8 {
    static constexpr float kLargest = 127;
};

// True for a type of a cache with scales.
template <class Type>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<Float8> = true;
template <>
constexpr bool kHasScales<Int8> = true;

#ifndef EMULATED_PTX
#if __CUDA_ARCH__ >= 890
#define FLOAT8_INSTRUCTIONS

// Four quantized values as elements, in order; exact.
__device__ __forceinline__ uint2 float16_of_float8(unsigned quantized) {
    uint2 words;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(words.x), "=r"(words.y)
        : "r"(quantized));
    return words;
}
// Two floats to quantized values, rounded to nearest even, and to kLargest what is larger. NaN becomes 0x7F.
__device__ __forceinline__ unsigned float8_of_floats(float2 values) {
    unsigned short quantized;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(quantized) : "f"(values.y), "f"(values.x));
    return quantized;
}

#endif
#endif

// The same by integer operations, for GPUs before sm_89. NaN quantized values become 480.
__device__ __forceinline__ uint2 widen_by_bits(Float16, unsigned quantized) {
    // 2^8, by which the exponents' biases differ
    const unsigned even = quantized << 8, scale = 0x5C005C00, zero = 0x80008000;
    return {multiply_add(Float16{}, (even & 0x80008000) | (even >> 1 & 0x3F803F80), scale, zero),
            multiply_add(Float16{}, (quantized & 0x80008000) | (quantized >> 1 & 0x3F803F80), scale, zero)};
}
__device__ __forceinline__ uint2 widen_by_bits(BFloat16, unsigned quantized) {
    const unsigned even = quantized << 8, scale = 0x7B807B80, zero = 0x80008000;  // 2^120
    return {multiply_add(BFloat16{}, (even & 0x80008000) | (even >> 4 & 0x07F007F0), scale, zero),
            multiply_add(BFloat16{}, (quantized & 0x80008000) | (quantized >> 4 & 0x07F007F0), scale, zero)};
}
__device__ __forceinline__ unsigned float8_by_bits(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
    const float magnitude = fminf(fabsf(value), Float8::kLargest);
    if (value != value) return 0x7F;
    // denormal, or the smallest that is not
    if (magnitude < 1.0f / 64) return sign | static_cast<unsigned>(__float2int_rn(magnitude * 512));
    const unsigned exact = __float_as_uint(magnitude) - (120u << 23);
    return sign | (exact + 0x7FFFF + (exact >> 20 & 1)) >> 20;
}

// Four quantized values to elements: x has quantized values 0 and 2, y has quantized values 1 and 3. Exact.
__device__ __forceinline__ uint2 widen(Float16, Float8, unsigned quantized) {
#ifdef FLOAT8_INSTRUCTIONS
    return float16_of_float8(__byte_perm(quantized, 0, 0x3120));
#else
    return widen_by_bits(Float16{}, quantized);
#endif
}
__device__ __forceinline__ uint2 widen(BFloat16, Float8, unsigned quantized) {
#ifdef FLOAT8_INSTRUCTIONS
    const uint2 halves = widen(Float16{}, Float8{}, quantized);
    return {pack(BFloat16{}, unpack(Float16{}, halves.x)), pack(BFloat16{}, unpack(Float16{}, halves.y))};
#else
    return widen_by_bits(BFloat16{}, quantized);
#endif
}
constexpr unsigned kMinus1152 = 0xE480E480;  // as two elements
// Two quantized values, whose bytes kBytes selects, plus 1152; exact. A quantized value plus 128 is the mantissa of
// 1024.
template <unsigned kBytes>
__device__ __forceinline__ unsigned plus_1152(unsigned quantized) {
    return __byte_perm(quantized ^ 0x80808080, 0x64646464, kBytes);
}
// The bytes of two quantized values of each word: kX of x, kY of y.
template <unsigned kX, unsigned kY>
__device__ __forceinline__ uint2 widen_bytes(Float16, unsigned quantized) {
    const unsigned one = 0x3C003C00;
    return {multiply_add(Float16{}, plus_1152<kX>(quantized), one, kMinus1152),
            multiply_add(Float16{}, plus_1152<kY>(quantized), one, kMinus1152)};
}
// The mantissa of 128 has only seven bits, those after the sign. The subtrahend depends on the sign: 128 or 256.
template <unsigned kX, unsigned kY>
__device__ __forceinline__ uint2 widen_bytes(BFloat16, unsigned quantized) {
    const unsigned x = __byte_perm(quantized, 0x43434343, kX), y = __byte_perm(quantized, 0x43434343, kY),
                   one = 0x3F803F80;
    return {multiply_add(BFloat16{}, x & 0xFF7FFF7F, one, (x & 0x00800080) | 0xC300C300),
            multiply_add(BFloat16{}, y & 0xFF7FFF7F, one, (y & 0x00800080) | 0xC300C300)};
}
template <class Type>
__device__ __forceinline__ uint2 widen(Type, Int8, unsigned quantized) {
    return widen_bytes<0x4240, 0x4341>(Type{}, quantized);
}

// The same in order: x has quantized values 0 and 1, y has quantized values 2 and 3.
template <class Type, class Quantized>
__device__ __forceinline__ uint2 widen_in_order(Type, Quantized, unsigned quantized) {
    return widen(Type{}, Quantized{}, __byte_perm(quantized, 0, 0x3120));
}
template <class Type>
__device__ __forceinline__ uint2 widen_in_order(Type, Int8, unsigned quantized) {
    return widen_bytes<0x4140, 0x4342>(Type{}, quantized);
}
#ifdef FLOAT8_INSTRUCTIONS
__device__ __forceinline__ uint2 widen_in_order(Float16, Float8, unsigned quantized) {
    return float16_of_float8(quantized);
}
#endif

// Quantized values of keys in order, as elements that may have a constant offset. The initial value of a score cancels
// the product of offset and q, which is cheaper than subtracting the offset from each element. Scores are rounded like
// sums of 1152 |q|: 2^-13 of a quantized value. kKeyOffset: minus the offset, in both halves of a word.
template <class Type, class Quantized>
constexpr unsigned kKeyOffset = 0;
template <>
constexpr unsigned kKeyOffset<Float16, Int8> = kMinus1152;
template <class Type, class Quantized>
__device__ __forceinline__ uint2 widen_keys(Type, Quantized, unsigned quantized) {
    return widen_in_order(Type{}, Quantized{}, quantized);
}
__device__ __forceinline__ uint2 widen_keys(Float16, Int8, unsigned quantized) {
    return {plus_1152<0x4140>(quantized), plus_1152<0x4342>(quantized)};
}

// The scale of a row with this largest magnitude: that becomes the largest quantized value.
template <class Quantized>
__device__ __forceinline__ float scale_of_row(Quantized, float largest) {
    return largest == 0 ? 1.0f : __fdiv_rn(largest, Quantized::kLargest);
}

// The quantized value of a value; NaN becomes 0x7F, or 0 in Int8.
__device__ __forceinline__ unsigned quantize(Float8, float value, float scale) {
    const float quotient = __fdiv_rn(value, scale);
#ifdef FLOAT8_INSTRUCTIONS
    return float8_of_floats({quotient, 0}) & 0xFF;
#else
    return float8_by_bits(quotient);
#endif
}
__device__ __forceinline__ unsigned quantize(Int8, float value, float scale) {
    const float quotient = __fdiv_rn(value, scale);
    const int rounded = __float2int_rn(fminf(fmaxf(quotient, -Int8::kLargest), Int8::kLargest));
    return quotient == quotient ? rounded & 0xFF : 0;
}
// Quantized values of four values, in a word.
template <class Quantized>
__device__ __forceinline__ unsigned quantize(Quantized, float2 low, float2 high, float scale) {
    return quantize(Quantized{}, low.x, scale) | quantize(Quantized{}, low.y, scale) << 8
           | quantize(Quantized{}, high.x, scale) << 16 | quantize(Quantized{}, high.y, scale) << 24;
}
