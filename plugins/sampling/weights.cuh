// The weights of tokens, as integers: the same on the device and in NumPy (trt_kvcache/kernels/token_weights.py
// defines them). Sums of integers do not depend on their order. All float operations are single ones, rounded to
// nearest: never an fma.
#pragma once

// A class is the distance of a logit to the largest one, in powers of 2 after the temperature, rounded to a multiple of
// 2^-16.
constexpr int kFractionBits = 16;
// The weight of the largest logit is 2^33; from here on a weight is 0.
constexpr int kWeightBits = 33;
constexpr unsigned kClasses = (kWeightBits + 1) << kFractionBits,
                   kClassesWithWeight = (kWeightBits << kFractionBits) + 1;

using Weight = unsigned long long;

// Bits of 2^23 as a float. The bits of a float n from 2^23 to 2^24 are these plus n - 2^23. So adding 2^23 rounds to an
// integer, which the bits then hold; this is faster than a conversion.
constexpr unsigned kBitsOfInteger = 0x4B000000u;

// scale: 2^16 * log2(e) / temperature.
__device__ __forceinline__ unsigned class_of(float largest, float logit, float scale) {
    const float distance = fminf(__fmul_rn(__fsub_rn(largest, logit), scale), static_cast<float>(kClasses));
    return __float_as_uint(__fadd_rn(distance, 0x1p23f)) - kBitsOfInteger;
}

// 2^(24 - fraction), rounded down, for the fraction of a class.
__device__ __forceinline__ unsigned mantissa_of(unsigned token_class) {
    const float fraction =
        __fsub_rn(__uint_as_float(kBitsOfInteger | (token_class & ((1u << kFractionBits) - 1))), 0x1p23f);
    float power = -0x1.ef66d0p-91f;
    power = __fadd_rn(__fmul_rn(power, fraction), 0x1.2da7d4p-71f);
    power = __fadd_rn(__fmul_rn(power, fraction), -0x1.c4fef8p-53f);
    power = __fadd_rn(__fmul_rn(power, fraction), 0x1.ebe392p-35f);
    power = __fadd_rn(__fmul_rn(power, fraction), -0x1.62e3bcp-17f);
    power = __fadd_rn(__fmul_rn(power, fraction), 1.0f);
    // it is from 0.5 to 1, and so a multiple of 2^-24
    return __float_as_uint(power) - (__float_as_uint(0.5f) - (1u << 23));
}

// 2^(33 - class / 2^16), rounded down, and so 0 from kClasses on. It falls with the class: the polynomial does for all
// 2^16 fractions.
__device__ __forceinline__ Weight weight_of(unsigned token_class) {
    return static_cast<Weight>(mantissa_of(token_class)) << (kWeightBits - 24) >> (token_class >> kFractionBits);
}

// The same in two parts, units << unit_shift: the shift is one for all classes of a power of 2, and units are at most
// 2^24.
__device__ __forceinline__ unsigned units_of(unsigned token_class) {
    return mantissa_of(token_class) >> max(static_cast<int>(token_class >> kFractionBits) - (kWeightBits - 24), 0);
}
__device__ __forceinline__ int unit_shift(unsigned token_class) {
    return max(kWeightBits - 24 - static_cast<int>(token_class >> kFractionBits), 0);
}

// The order of logits, as unsigned numbers: NaN is the largest, -0 and 0 are equal.
__device__ __forceinline__ unsigned order_of(float logit) {
    if (logit != logit) return ~0u;
    const unsigned bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(unsigned order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}
__device__ __forceinline__ bool is_finite(float logit) { return (__float_as_uint(logit) & 0x7F800000u) != 0x7F800000u; }

// A token with its logit, as one number that is never 0. Larger logits give larger numbers; of equal logits, lower ids do.
__device__ __forceinline__ unsigned long long ranked(float logit, int token) {
    return static_cast<unsigned long long>(order_of(logit)) << 32 | (~0u - static_cast<unsigned>(token));
}
__device__ __forceinline__ int token_of_ranked(unsigned long long ranked) {
    return static_cast<int>(~0u - static_cast<unsigned>(ranked));
}
__device__ __forceinline__ float logit_of_ranked(unsigned long long ranked) {
    return logit_of(static_cast<unsigned>(ranked >> 32));
}

// The same the other way round, in 52 bits: the first token has the smallest key. Ids have 20 bits.
constexpr int kTokenBits = 20, kMaxTokens = 1 << kTokenBits;
__device__ __forceinline__ unsigned long long key_of(float logit, int token) {
    return static_cast<unsigned long long>(~order_of(logit)) << kTokenBits | static_cast<unsigned>(token);
}
