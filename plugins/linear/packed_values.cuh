// Weights in 4 or 8 bits: (quantized value - zero point) * scale, rounded once to an element.
// trt_kvcache/kernels/packed_layout.py defines their places in memory.
//
// A fragment is 16 outputs by 64 inputs. A lane has 32 of its weights: of rows g and g + 8, and of each half of the
// inputs, the 8 that the lane multiplies. Their places in words are such that one mask gives two neighbours:
//
//     Int4   one vector: word 2i + h has row g + 8i of half h. Inputs 2k and 2k + 1 of the 8 are nibbles k and k + 4, 0
//            to 15. As the mantissa of 1024 (float16) or 128 (bfloat16) they are elements
//     E2m1   the same nibbles, of a sign, two bits of an exponent and one of a mantissa. In their places in an element they
//            are 2^14 (float16) or 2^126 (bfloat16) times too small, as subnormal numbers too
//     Int8   a vector for each half: words 2i and 2i + 1 have row g + 8i, four inputs each, in order
//     Float8 the same. They have no zero points, and are exact in float16 whatever an element is
//
// The difference is exact in an element, for it has at most 8 bits. So is its product with a scale in a fused
// multiply-add that rounds once:
//
//     Scale is Element          one product of two elements; the same for E8m0 with BFloat16
//     Float16, for BFloat16     4 bits: the scale is the sum of two elements of 8 and 3 bits. The product with the second
//                               has at most 7 bits: it is exact, and is added to the product with the first
//     all others                in float32, which holds products of 8 and 16 bits exactly. With scales in float32 it
//                               rounds them, as the checkpoint reader does; so does Float8 for BFloat16
#pragma once

#include "attention/stored_kv.cuh"
#include "linear/config.cuh"
#include "load_once.cuh"

struct Int4 {};
struct E2m1 {};
struct E8m0 {};  // an exponent of a power of two, as in bfloat16
struct Float32 {};

using Stored = STORED;
using Scale = SCALE;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// Vectors of 16 bytes of a lane for a fragment; bytes of a vector of all lanes, and of a fragment.
constexpr int kVectors = kIsSame<Stored, Int8> || kIsSame<Stored, Float8> ? 2 : 1, kVectorBytes = 32 * 16,
              kFragmentBytes = kVectors * kVectorBytes;

// False if quantized values are floating-point numbers.
constexpr bool kAllowsZeroPoints = kIsSame<Stored, Int4> || kIsSame<Stored, Int8>;

// A type that holds all differences exactly.
template <class Type>
struct ExactIn {
    using Of = Element;
};
template <>
struct ExactIn<Float8> {
    using Of = Float16;
};
using Difference = ExactIn<Stored>::Of;

constexpr unsigned kMinusZero = 0x80008000, kSigns = 0x80008000;

// Numbers of quantized_values are multiplied with 1, or with E2m1 with 2^126 or 2^14.
template <class Type, class From>
constexpr unsigned kUnit = 0x3F803F80;
template <>
constexpr unsigned kUnit<Float16, Int4> = 0x3C003C00;
template <>
constexpr unsigned kUnit<Float16, Int8> = 0x3C003C00;
template <>
constexpr unsigned kUnit<BFloat16, E2m1> = 0x7E807E80;
template <>
constexpr unsigned kUnit<Float16, E2m1> = 0x74007400;

// 1024 or 128, whose last bits have room for 4 bits.
template <class Type>
constexpr unsigned kNibbleBase = 0x43004300;
template <>
constexpr unsigned kNibbleBase<Float16> = 0x64006400;

__device__ __forceinline__ unsigned word_of(const uint4& vector, int index) {
    return index < 2 ? (index == 0 ? vector.x : vector.y) : (index == 2 ? vector.z : vector.w);
}

// Eight quantized values of row g + 8i of a half, in order, plus a number that minus_zero_point takes away again.
template <class Type>
__device__ __forceinline__ uint4 quantized_values(Type, Int4, const uint4 (&vectors)[1], int i, int half) {
    const unsigned word = word_of(vectors[0], 2 * i + half);
    const auto pair = [=](int k) { return (word >> (4 * k) & 0x000F000F) | kNibbleBase<Type>; };
    return {pair(0), pair(1), pair(2), pair(3)};
}
template <class Type>
__device__ __forceinline__ uint4 quantized_values(Type, E2m1, const uint4 (&vectors)[1], int i, int half) {
    constexpr int kShift =
        kIsSame<Type, Float16> ? 3 : 6;  // from the bits behind the sign to the last ones of the exponent
    constexpr unsigned kMagnitude = 0x70007000 >> kShift;
    const unsigned word = word_of(vectors[0], 2 * i + half);
    const auto pair = [=](int k) {
        const unsigned high = word << (12 - 4 * k);
        return (high & kSigns) | (high >> kShift & kMagnitude);
    };
    return {pair(0), pair(1), pair(2), pair(3)};
}
template <class Type, class Bytes>
__device__ __forceinline__ uint4 quantized_values(Type, Bytes, const uint4 (&vectors)[2], int i, int half) {
    const uint2 first = widen_in_order(Type{}, Bytes{}, word_of(vectors[half], 2 * i)),
                second = widen_in_order(Type{}, Bytes{}, word_of(vectors[half], 2 * i + 1));
    return {first.x, first.y, second.x, second.y};
}

// Minus a zero point, and minus that number: two equal elements. zero_point: its byte.
template <class Type>
__device__ __forceinline__ unsigned minus_zero_point(Type, Int4, unsigned zero_point) {
    return (zero_point * 0x00010001 | kNibbleBase<Type>)^kSigns;
}
template <class Type>
__device__ __forceinline__ unsigned minus_zero_point(Type, Int8, unsigned zero_point) {
    return widen_in_order(Type{}, Int8{}, zero_point * 0x01010101).x ^ kSigns;
}
template <class Type, class Float>
__device__ __forceinline__ unsigned minus_zero_point(Type, Float, unsigned) {
    return kMinusZero;
}

// The zero point of weights that have none.
constexpr unsigned kMiddle = kIsSame<Stored, Int4> ? 8 : 0;

// Scales of rows g and g + 8, as they are loaded.
template <class Type>
struct RowScales {
    unsigned words;

    // The scale of row g + 8i, twice, and as a float.
    __device__ __forceinline__ unsigned pair(int i) const { return __byte_perm(words, 0, i ? 0x3232 : 0x1010); }
    __device__ __forceinline__ float value(int i) const {
        const float2 both = unpack(Type{}, words);
        return i ? both.y : both.x;
    }
};
template <>
struct RowScales<Float32> {
    float2 values;

    __device__ __forceinline__ float value(int i) const { return i ? values.y : values.x; }
};

template <>
struct RowScales<E8m0> {
    unsigned short bytes;

    __device__ __forceinline__ unsigned pair(int i) const { return (bits(i) >> 16) * 0x00010001; }
    __device__ __forceinline__ float value(int i) const { return __uint_as_float(bits(i)); }

private:
    // Of a float: 2^-127 is a subnormal one.
    __device__ __forceinline__ unsigned bits(int i) const {
        const unsigned exponent = bytes >> (8 * i) & 0xFF;
        return exponent ? exponent << 23 : 0x00400000;
    }
};

// Multiplies differences of a row with its scale.
template <class Type>
class Scaling {
    static constexpr bool kIsOwn = kIsSame<Difference, Element>
                                   && (kIsSame<Type, Element> || (kIsSame<Type, E8m0> && kIsSame<Element, BFloat16>)),
                          kIsSplit = !kIsOwn && kIsSame<Type, Float16> && kIsSame<Stored, Int4>;

public:
    __device__ __forceinline__ Scaling(const RowScales<Type>& scales, int i) {
        if constexpr (kIsOwn) {
            high_ = scales.pair(i);
        } else {
            factor_ = scales.value(i);
            if constexpr (kIsSplit) {  // the first 8 bits and the others are bfloat16 without rounding
                const unsigned first = __float_as_uint(factor_) & 0xFFFF0000,
                               others = __float_as_uint(factor_ - __uint_as_float(first));
                high_ = __byte_perm(first, 0, 0x3232);
                low_ = __byte_perm(others, 0, 0x3232);
            }
        }
    }

    __device__ __forceinline__ unsigned of(unsigned differences) const {
        if constexpr (kIsOwn) {
            return multiply_add(Element{}, differences, high_, kMinusZero);
        } else if constexpr (kIsSplit) {
            return multiply_add(Element{}, differences, high_, multiply_add(Element{}, differences, low_, kMinusZero));
        } else {
            const float2 values = unpack(Difference{}, differences);
            return pack(Element{}, {__fmul_rn(values.x, factor_), __fmul_rn(values.y, factor_)});
        }
    }

private:
    unsigned high_, low_;
    float factor_;
};

// Registers of a lane for a fragment: quantized values, and for each half scales and zero points of rows g and g + 8.
template <bool kHasZeroPoints>
struct PackedFragment {
    uint4 vectors[kVectors];
    RowScales<Scale> scales[2];
    unsigned zero_points[2];

    // The weights of row g + 8i of a half.
    __device__ __forceinline__ uint4 elements(int i, int half) const {
        const uint4 values = quantized_values(Difference{}, Stored{}, vectors, i, half);
        const unsigned zero_point = kHasZeroPoints ? zero_points[half] >> (8 * i) & 0xFF : kMiddle;
        const Scaling<Scale> scaling(scales[half], i);
        const auto weights = [&](unsigned pair) {
            if constexpr (kIsSame<Stored, Float8>) {
                return scaling.of(pair);
            } else {
                const unsigned minus = minus_zero_point(Element{}, Stored{}, zero_point);
                return scaling.of(multiply_add(Element{}, pair, kUnit<Element, Stored>, minus));
            }
        };
        return {weights(values.x), weights(values.y), weights(values.z), weights(values.w)};
    }
};

// A packed matrix.
struct PackedMatrix {
    const unsigned char *values, *scales, *zero_points;
    int fragments;            // of 64 inputs, of an output
    int groups, group_shift;  // of an output; a group is 2^group_shift halves of a fragment
    int scale_pairs;          // of a group of 16 outputs: 8, or with Float8 also 1 that all of them share

    // Starts of the fragments, and of the scales of row g, of 16 outputs.
    __device__ __forceinline__ int first_fragment(int tile) const { return tile * fragments; }
    __device__ __forceinline__ int first_row(int tile) const {
        return tile * groups * pairs() + min(static_cast<int>(threadIdx.x) % 32 / 4, pairs() - 1);
    }
    __device__ __forceinline__ const unsigned char* fragment_at(int index) const {
        return values + static_cast<long long>(index) * kFragmentBytes;
    }

    // Loads the part of a lane of a fragment of 16 outputs, with these starts; behind the last fragment any quantized
    // values, or zeros, and the scales of the last one.
    template <bool kZeros = false, bool kHasZeroPoints>
    __device__ __forceinline__ void load(PackedFragment<kHasZeroPoints>& to, int first, int row, int fragment,
                                         L2Policy policy) const {
        const int last = min(fragment, fragments - 1);
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            const unsigned char* const from = fragment_at(first + fragment) + v * kVectorBytes + threadIdx.x % 32 * 16;
            to.vectors[v] = kZeros ? load_once(from, fragment < fragments, policy)
                                   : load_once_if(from, fragment < fragments, policy);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = row + ((2 * last + half) >> group_shift) * pairs();
            to.scales[half] = reinterpret_cast<const RowScales<Scale>*>(scales)[at];
            if (kHasZeroPoints) to.zero_points[half] = reinterpret_cast<const unsigned short*>(zero_points)[at];
        }
    }

private:
    __device__ __forceinline__ int pairs() const { return kIsSame<Stored, Float8> ? scale_pairs : 8; }
};
