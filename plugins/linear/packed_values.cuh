// Weights in 4 or 8 bits: (quantized value - zero point) * scale, rounded once to an element.
// trt_kvcache/kernels/packed_layout.py defines their places in memory.
//
// A fragment is 16 outputs by 64 inputs. A lane has 32 of its weights: of rows g and g + 8, and of each half of the
// inputs, the 8 that the lane multiplies. Their places in words are such that one mask gives two neighbours:
//
//     Int4   one vector: word 2i + h has row g + 8i of half h. Inputs 2k and 2k + 1 of the 8 are nibbles k and k + 4, 0
//            to 15. A shift by 8 brings nibbles 2, 3, 6 and 7 to the places of the others, where they are elements. For
//            float16 they are the last bits of the mantissa of 1024, or 16 times as large. For bfloat16 nothing is added:
//            bits up to 0x00FF count the smallest subnormal number, 2^-133. Times 2^127, or 2^123, they are 64 times too
//            small, so scales are multiplied with 64, which is exact below 2^122
//     E2m1   the same nibbles, of a sign, two bits of an exponent and one of a mantissa. In their places in an element they
//            are 2^14 (float16) or 2^126 (bfloat16) times too small, as subnormal numbers too
//     Int8   a vector for each half: words 2i and 2i + 1 have row g + 8i, four inputs each, in order
//     Float8 the same. They have no zero points, and are exact in float16 whatever an element is
//
// The difference is exact in an element, for it has at most 8 bits. So is its product with a scale in a fused
// multiply-add that rounds once; a power of two in one factor and its inverse in the other do not change it:
//
//     Scale is Element          one product of two elements; the same for E8m0 with BFloat16
//     Float16, for BFloat16     4 bits: the scale is the sum of two elements of 8 and 3 bits. The product with the second
//                               has at most 7 bits: it is exact, and is added to the product with the first
//     all others                in float32, which holds products of 8 and 16 bits exactly. With scales in float32 it
//                               rounds them, as the checkpoint reader does; so does Float8 for BFloat16
//
// NVFP4 is E2m1 with scales in Float8 of 16 inputs, which a factor of the matrix multiplies in float32: the sum of two
// floats, since some formats divide. Each expert has its own factor, which is stored for each tile. A lane has inputs of
// one group in each half. For BFloat16 the scale is the sum of two elements, as above, but with 16 of its 24 bits: the
// host chooses a factor for which these give the same weights.
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

constexpr bool kIsNvfp4 = kIsSame<Stored, E2m1> && kIsSame<Scale, Float8>;

// A type that holds all differences exactly.
template <class Type, class ScaleType>
struct ExactIn {
    using Of = Element;
};
template <class ScaleType>
struct ExactIn<Float8, ScaleType> {
    using Of = Float16;
};
template <>
struct ExactIn<E2m1, Float8> {
    using Of = BFloat16;
};
using Difference = ExactIn<Stored, Scale>::Of;

constexpr unsigned kMinusZero = 0x80008000, kSigns = 0x80008000;

// Numbers of quantized_values are multiplied with 1, or with E2m1 with 2^126 or 2^14.
template <class Type, class From>
constexpr unsigned kUnit = 0x3F803F80;
template <>
constexpr unsigned kUnit<Float16, Int8> = 0x3C003C00;
template <>
constexpr unsigned kUnit<BFloat16, E2m1> = 0x7E807E80;
template <>
constexpr unsigned kUnit<Float16, E2m1> = 0x74007400;

// The same for nibbles of Int4 in bits 4n to 4n + 3 of an element that has the bits of nibble_base: 1024, or none. An
// instruction has room for one constant, which is the mask; threadIdx.y is 0, but the compiler does not know.
__device__ __forceinline__ unsigned nibble_base(Float16) { return 0x64006400 | threadIdx.y; }
__device__ __forceinline__ unsigned nibble_base(BFloat16) { return 0; }
__device__ __forceinline__ unsigned nibble_unit(Float16, int n) { return n ? 0x2C002C00 : 0x3C003C00; }  // 2^-4, 1
__device__ __forceinline__ unsigned nibble_unit(BFloat16, int n) {
    return n ? 0x7D007D00 : 0x7F007F00;
}  // 2^123, 2^127

// The factor by which differences are too small: scales are multiplied with it.
template <class Type, class From>
constexpr int kScaleUnit = 1;
template <>
constexpr int kScaleUnit<BFloat16, Int4> = 64;

__device__ __forceinline__ unsigned word_of(const uint4& vector, int index) {
    return index < 2 ? (index == 0 ? vector.x : vector.y) : (index == 2 ? vector.z : vector.w);
}

// Eight quantized values of row g + 8i of a half, in order, plus a number that minus_zero_point takes away again.
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
__device__ __forceinline__ unsigned minus_zero_point(Type, Int8, unsigned zero_point) {
    return widen_in_order(Type{}, Int8{}, zero_point * 0x01010101).x ^ kSigns;
}
template <class Type>
__device__ __forceinline__ unsigned minus_zero_point(Type, E2m1, unsigned) {
    return kMinusZero;
}
// The same for nibbles in bits 4n to 4n + 3. zero_points: the bytes of rows g and g + 8, of which i chooses one.
__device__ __forceinline__ unsigned minus_zero_point(Float16, unsigned zero_points, int i, int n) {
    const unsigned both = __byte_perm(zero_points, 0, 0x4140);
    return twice(n ? both << 4 | 0xD400D400 : both | 0xE400E400, i);  // the last bits of the mantissa of -64 or -1024
}
__device__ __forceinline__ unsigned minus_zero_point(BFloat16, unsigned zero_points, int i, int) {
    const unsigned both = __byte_perm(zero_points, 0, 0x4140), minus_unit = nibble_unit(BFloat16{}, 0) ^ kSigns;
    return twice(multiply_add(BFloat16{}, both, minus_unit, kMinusZero), i);
}

// The zero points of weights that have none.
constexpr unsigned kMiddles = kIsSame<Stored, Int4> ? 0x0808 : 0;

// Eight quantized values of row g + 8i of a half, in order, minus their zero point, divided by kScaleUnit, or in
// NVFP4 by 2^126. zero_points: the bytes of rows g and g + 8.
template <class Type, class From>
__device__ __forceinline__ uint4 differences(Type, From, const uint4 (&vectors)[kVectors], unsigned zero_points, int i,
                                             int half) {
    const uint4 values = quantized_values(Type{}, From{}, vectors, i, half);
    if constexpr (kIsNvfp4) return values;
    const unsigned minus = minus_zero_point(Type{}, From{}, zero_points >> (8 * i) & 0xFF);
    const auto difference = [=](unsigned pair) { return multiply_add(Type{}, pair, kUnit<Type, From>, minus); };
    return {difference(values.x), difference(values.y), difference(values.z), difference(values.w)};
}
template <class Type>
__device__ __forceinline__ uint4 differences(Type, Int4, const uint4 (&vectors)[1], unsigned zero_points, int i,
                                             int half) {
    const unsigned low = word_of(vectors[0], 2 * i + half), high = low >> 8;
    const auto difference = [=](unsigned word, int n) {
        const unsigned pair = (word & 0x000F000F << 4 * n) | nibble_base(Type{});
        return multiply_add(Type{}, pair, nibble_unit(Type{}, n), minus_zero_point(Type{}, zero_points, i, n));
    };
    return {difference(low, 0), difference(low, 1), difference(high, 0), difference(high, 1)};
}
template <class Type>
__device__ __forceinline__ uint4 differences(Type, Float8, const uint4 (&vectors)[2], unsigned, int i, int half) {
    return quantized_values(Type{}, Float8{}, vectors, i, half);
}

// Scales of rows g and g + 8, as they are loaded.
template <class Type>
struct RowScales {
    unsigned words;

    // The scale of row g + 8i, twice, and as a float.
    __device__ __forceinline__ unsigned pair(int i) const { return twice(words, i); }
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

template <>
struct RowScales<Float8> {
    unsigned short bytes;

    __device__ __forceinline__ float value(int i) const {
        const float2 both = unpack(Float16{}, widen_in_order(Float16{}, Float8{}, bytes).x);
        return i ? both.y : both.x;
    }
};

// The factor of all scales of a matrix: none, or the sum of two floats, times 2^126.
template <class Type>
struct MatrixFactor {
    __device__ __forceinline__ float times(float scale) const { return scale; }
};
template <>
struct MatrixFactor<Float8> {
    float high, low;

    // Rounded once: the host checks it for all scales.
    __device__ __forceinline__ float times(float scale) const { return __fmaf_rn(scale, high, __fmul_rn(scale, low)); }
};

// Multiplies differences of a row with its scale.
template <class Type>
class Scaling {
    static constexpr bool kIsOwn = kIsSame<Difference, Element>
                                   && (kIsSame<Type, Element> || (kIsSame<Type, E8m0> && kIsSame<Element, BFloat16>)),
                          kIsSplit = !kIsOwn && kIsSame<Type, Float16> && kIsSame<Stored, Int4>,
                          kIsSum = kIsNvfp4 && kIsSame<Element, BFloat16>;
    static constexpr int kTimes = kScaleUnit<Element, Stored>;

public:
    __device__ __forceinline__ Scaling(const RowScales<Type>& scales, const MatrixFactor<Type>& factor, int i) {
        if constexpr (kIsOwn && kTimes == 1) {
            high_ = scales.pair(i);
        } else if constexpr (kIsOwn) {
            high_ = twice(times_64(scales.words), i);
        } else if constexpr (kIsSplit) {  // the first 8 bits and the last 3 are bfloat16 without rounding
            const unsigned first = scales.words & 0xFFF8FFF8,
                           others = multiply_add(Float16{}, first, 0xBC00BC00, scales.words);
            high_ = twice(times_64(exact_bfloat16(first)), i);
            low_ = twice(times_64(exact_bfloat16(others)), i);
        } else if constexpr (kIsSum) {
            const float2 exact = {factor.times(scales.value(0)), factor.times(scales.value(1))};
            const unsigned first = pack(BFloat16{}, exact);
            const float2 rounded = unpack(BFloat16{}, first);
            high_ = twice(first, i);
            low_ = twice(pack(BFloat16{}, {exact.x - rounded.x, exact.y - rounded.y}), i);
        } else {
            factor_ = factor.times(scales.value(i)) * kTimes;
        }
    }

    __device__ __forceinline__ unsigned of(unsigned differences) const {
        if constexpr (kIsOwn) {
            return multiply_add(Element{}, differences, high_, kMinusZero);
        } else if constexpr (kIsSplit || kIsSum) {
            return multiply_add(Element{}, differences, high_, multiply_add(Element{}, differences, low_, kMinusZero));
        } else {
            const float2 values = unpack(Difference{}, differences);
            return pack(Element{}, {__fmul_rn(values.x, factor_), __fmul_rn(values.y, factor_)});
        }
    }

private:
    static __device__ __forceinline__ unsigned times_64(unsigned pair) {
        return multiply_add(BFloat16{}, pair, 0x42804280, kMinusZero);
    }
    // Of two of float16 that are bfloat16 without rounding.
    static __device__ __forceinline__ unsigned exact_bfloat16(unsigned pair) {
        const float2 values = unpack(Float16{}, pair);
        return __byte_perm(__float_as_uint(values.x), __float_as_uint(values.y), 0x7632);
    }

    unsigned high_, low_;
    float factor_;
};

// Registers of a lane for a fragment: quantized values, and for each half scales and zero points of rows g and g + 8.
template <bool kHasZeroPoints>
struct PackedFragment {
    uint4 vectors[kVectors];
    RowScales<Scale> scales[2];
    unsigned zero_points[2];
    MatrixFactor<Scale> factor;

    // The weights of row g + 8i of a half.
    __device__ __forceinline__ uint4 elements(int i, int half) const {
        const uint4 exact =
            differences(Difference{}, Stored{}, vectors, kHasZeroPoints ? zero_points[half] : kMiddles, i, half);
        const Scaling<Scale> scaling(scales[half], factor, i);
        return {scaling.of(exact.x), scaling.of(exact.y), scaling.of(exact.z), scaling.of(exact.w)};
    }
};

// A packed matrix.
struct PackedMatrix {
    const unsigned char *values, *scales, *zero_points;
    int fragments;            // of 64 inputs, of an output
    int groups, group_shift;  // of an output; a group is 2^group_shift halves of a fragment
    int scale_pairs;          // of a group of 16 outputs: 8, or with Float8 also 1 that all of them share
    // In NVFP4 groups are quarters of a fragment. There, group_shift and scale_pairs hold the bits of the factor of a single
    // matrix (high and low), and zero_points points to the factors of tiles, which experts and row tiles read.

    // Of 16 outputs, the part of a lane: of the first fragment, and the scales of row g of the first two groups, or twice
    // of the first one if fragments are not divided. And row g of the first group.
    struct Start {
        const unsigned char* values;
        const RowScales<Scale>* scales[2];
        int row;
    };

    __device__ __forceinline__ const unsigned char* fragments_of(int tile) const {
        return values + static_cast<long long>(tile * fragments) * kFragmentBytes;
    }
    __device__ __forceinline__ Start start(int tile) const {
        const int lane = threadIdx.x % 32,
                  row = tile * groups * pairs() + (kIsNvfp4 ? lane % 4 / 2 * 8 : 0) + min(lane / 4, pairs() - 1);
        const RowScales<Scale>* const first = reinterpret_cast<const RowScales<Scale>*>(scales) + row;
        return {fragments_of(tile) + lane * 16, {first, first + second_row()}, row};
    }

    // Loads the part of a lane of a fragment of 16 outputs, `ahead` ones behind another; behind the last fragment any
    // quantized values, or zeros, and the scales of the last one.
    template <bool kZeros = false, bool kHasZeroPoints>
    __device__ __forceinline__ void load(PackedFragment<kHasZeroPoints>& to, const Start& start, int fragment,
                                         int ahead, L2Policy policy) const {
        const unsigned char* const from = start.values + static_cast<long long>(fragment) * kFragmentBytes;
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            const unsigned char* const vector = from + ahead * kFragmentBytes + v * kVectorBytes;
            const bool valid = fragments - fragment > ahead;
            to.vectors[v] = kZeros ? load_once(vector, valid, policy) : load_once_if(vector, valid, policy);
        }
        const int last = min(fragment + ahead, fragments - 1), group = kIsNvfp4 ? 4 * last : 2 * last >> group_shift;
        if constexpr (kIsNvfp4) to.factor = {__int_as_float(group_shift), __int_as_float(scale_pairs)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if constexpr (kHasZeroPoints
                          || kIsSame<Stored, Float8> || kIsNvfp4) {  // there are no registers for more addresses
                const int row = start.row + group * pairs() + half * second_row();
                to.scales[half] = reinterpret_cast<const RowScales<Scale>*>(scales)[row];
                if (kHasZeroPoints) to.zero_points[half] = reinterpret_cast<const unsigned short*>(zero_points)[row];
            } else {
                to.scales[half] = start.scales[half][group * 8LL];
            }
        }
    }

private:
    __device__ __forceinline__ int pairs() const { return kIsSame<Stored, Float8> ? scale_pairs : 8; }
    // From the row of the first half of a fragment to that of the second one.
    __device__ __forceinline__ int second_row() const {
        if constexpr (kIsNvfp4) return 2 * 8;
        return group_shift == 0 ? pairs() : 0;
    }
};

// The same as the matrix of a PackedStream, or of experts.
template <bool kHasZeroPoints>
struct GroupedMatrix : PackedMatrix {
    using Fragment = PackedFragment<kHasZeroPoints>;
    static constexpr bool kKeepsOrder = !kIsSame<Scale, Float32>;  // there are no registers for it with these
    static constexpr int kVectors = ::kVectors, kFragmentBytes = ::kFragmentBytes;

    using Factor = MatrixFactor<Scale>;

    // Fragments of `tiles` tiles in flight. Registers suffice for 4, and for 3 if each of several tiles has a factor too.
    static constexpr int expert_depth(int tiles) {
        const int most = kIsNvfp4 && tiles > 1 ? 3 : 4, loads = tiles * kVectors;
        return kLoads / loads < most ? kLoads / loads : most;
    }

    __device__ __forceinline__ Factor factor_of(int tile) const {
        if constexpr (kIsNvfp4) return reinterpret_cast<const Factor*>(zero_points)[tile];
        return {};
    }
    __device__ __forceinline__ void load_expert(Fragment& to, const Start& start, const Factor& factor, int fragment,
                                                L2Policy policy) const {
        load<kIsSame<Stored, Float8>>(to, start, fragment, 0, policy);  // other values are finite, whatever the bits
        to.factor = factor;
    }
};
