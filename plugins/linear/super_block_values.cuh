// Weights in super-blocks of 256 inputs (Q4_K, Q5_K and Q6_K of GGUF), as elements.
// trt_kvcache/kernels/super_block_layout.py defines their places in memory.
//
//     Q4K, Q5K   quantized value * (factor * scale) - factor of minimums * minimum: 6 bits of both for each 32 inputs
//     Q6K        (quantized value - 32) * (factor * scale): 8 bits of the scale for each 16 inputs
//
// A fragment is 16 outputs by 64 inputs. A lane has the same weights of it as in packed_values.cuh: the 4 lowest bits
// of its 32 values are stored as for Int4, and the other bits in words after them. Products are exact in float32: they
// have at most 24 bits. The difference is rounded to float32, as the gguf package does, and then to an element.
#pragma once

#include "attention/cp_async.cuh"
#include "linear/config.cuh"
#include "load_once.cuh"

struct Q4K {};
struct Q5K {};
struct Q6K {};

// Bits of a value beyond the lowest 4, which also is the number of words of a lane for them.
template <class Stored>
constexpr int kHighBitsOf = 0;
template <>
constexpr int kHighBitsOf<Q5K> = 1;
template <>
constexpr int kHighBitsOf<Q6K> = 2;

constexpr int kLowBytes = 32 * 16, kSuperBlockFragments = 4;

// 1024 or 128, whose last bits have room for 6 bits, minus these and minus what Q6K subtracts, and 1. Two of each.
template <class Type>
constexpr unsigned kValueBase = 0x43004300;
template <>
constexpr unsigned kValueBase<Float16> = 0x64006400;
template <class Type, bool kHasMinimums>
constexpr unsigned kMinusBase = kHasMinimums ? 0xC300C300 : 0xC320C320;
template <bool kHasMinimums>
constexpr unsigned kMinusBase<Float16, kHasMinimums> = kHasMinimums ? 0xE400E400 : 0xE420E420;
template <class Type>
constexpr unsigned kOne = 0x3F803F80;
template <>
constexpr unsigned kOne<Float16> = 0x3C003C00;

// A byte of a word as a float, or one of int8.
__device__ __forceinline__ float unsigned_byte(unsigned word, int index) {
    return __uint_as_float(0x4B000000 | (word >> (8 * index) & 0xFF)) - 8388608.0f;
}
__device__ __forceinline__ float signed_byte(unsigned word, int index) {
    return __uint_as_float(0x4B000000 | ((word >> (8 * index) & 0xFF) ^ 0x80)) - 8388736.0f;
}

// Registers of a lane for a fragment.
template <class Quantized>
struct SuperBlockFragment {
    static constexpr int kHighBits = kHighBitsOf<Quantized>;
    static constexpr bool kHasMinimums = kHighBits < 2;

    uint4 low;
    unsigned high[kHighBits ? kHighBits : 1];
    uint2 scales;  // a word for each half: two bytes of row g, then of row g + 8; scale and minimum, or two scales
    unsigned factors[2];  // float16: of scales and of minimums, for each row; or one word, of scales of both rows

    // The weights of row g + 8i of a half.
    __device__ __forceinline__ uint4 elements(int i, int half) const {
        const unsigned bytes = half ? scales.y : scales.x;
        float scale, minus_minimum;
        if constexpr (kHasMinimums) {
            const float2 of_row = unpack(Float16{}, factors[i]);
            scale = __fmul_rn(of_row.x, unsigned_byte(bytes, 2 * i));
            minus_minimum = -__fmul_rn(of_row.y, unsigned_byte(bytes, 2 * i + 1));
        } else {
            const float2 of_rows = unpack(Float16{}, factors[0]);
            scale =
                __fmul_rn(i ? of_rows.y : of_rows.x, signed_byte(bytes, 2 * i + static_cast<int>(threadIdx.x) % 4 / 2));
            minus_minimum = -0.0f;
        }
        const int index = 2 * i + half;
        const unsigned word = index < 2 ? (index == 0 ? low.x : low.y) : (index == 2 ? low.z : low.w);
        const auto weights = [&](int k) {
            const unsigned values = (word >> (4 * k) & 0x000F000F) | high_bits(4 * index + k) | kValueBase<Element>;
            const float2 exact =
                unpack(Element{}, multiply_add(Element{}, values, kOne<Element>, kMinusBase<Element, kHasMinimums>));
            return pack(Element{},
                        {__fmaf_rn(exact.x, scale, minus_minimum), __fmaf_rn(exact.y, scale, minus_minimum)});
        };
        return {weights(0), weights(1), weights(2), weights(3)};
    }

private:
    // The other bits of a pair of values, at bits 4 and 20.
    __device__ __forceinline__ unsigned high_bits(int pair) const {
        if constexpr (kHighBits == 0) return 0;
        constexpr unsigned kMask = ((1 << kHighBits) - 1) * 0x00100010;
        const int first = kHighBits * pair, shift = first % 16 - 4;
        const unsigned word = high[first / 16];
        return (shift < 0 ? word << -shift : word >> shift) & kMask;
    }
};

template <class Quantized>
struct SuperBlockMatrix {
    using Fragment = SuperBlockFragment<Quantized>;
    static constexpr int kHighBits = Fragment::kHighBits;
    static constexpr bool kKeepsOrder = kHighBits == 0;  // the others have no registers for it
    static constexpr int kVectors = 1, kFragmentBytes = kLowBytes + 32 * 4 * kHighBits;

    const unsigned char *values, *scales, *factors;
    int fragments;  // of 64 inputs, of an output: a multiple of 4

    // Of 16 outputs: their first fragment.
    struct Start {
        int first;
    };

    __device__ __forceinline__ const unsigned char* fragments_of(int tile) const {
        return fragment_at(tile * fragments);
    }
    __device__ __forceinline__ Start start(int tile) const { return {tile * fragments}; }

    // Loads the part of a lane of a fragment of 16 outputs, `ahead` ones behind another; behind the last fragment the
    // last one, but any lowest bits.
    __device__ __forceinline__ void load(Fragment& to, const Start& start, int fragment, int ahead,
                                         L2Policy policy) const {
        const int lane = threadIdx.x % 32, row = lane / 4, at = fragment + ahead,
                  last = start.first + min(at, fragments - 1);
        to.low = load_once_if(fragment_at(start.first + at) + lane * 16, at < fragments, policy);
        const unsigned char* const high = fragment_at(last) + kLowBytes + lane * 4 * kHighBits;
        if constexpr (kHighBits == 1) to.high[0] = *reinterpret_cast<const unsigned*>(high);
        if constexpr (kHighBits == 2) {
            const uint2 both = *reinterpret_cast<const uint2*>(high);
            to.high[0] = both.x;
            to.high[1] = both.y;
        }
        to.scales = reinterpret_cast<const uint2*>(scales)[last * 8 + row];
        const int of_super_block = last / kSuperBlockFragments * 8 + row;
        if constexpr (Fragment::kHasMinimums) {
            const uint2 of_rows = reinterpret_cast<const uint2*>(factors)[of_super_block];
            to.factors[0] = of_rows.x;
            to.factors[1] = of_rows.y;
        } else {
            to.factors[0] = reinterpret_cast<const unsigned*>(factors)[of_super_block];
        }
    }

    struct Factor {};  // none of a tile

    // Fragments of `tiles` tiles in flight. A fourth one of two tiles would spill.
    static constexpr int expert_depth(int tiles) { return tiles == 1 ? 4 : 3; }

    __device__ __forceinline__ Factor factor_of(int) const { return {}; }
    __device__ __forceinline__ void load_expert(Fragment& to, const Start& start, const Factor&, int fragment,
                                                L2Policy policy) const {
        load(to, start, fragment, 0, policy);
    }

private:
    __device__ __forceinline__ const unsigned char* fragment_at(int index) const {
        return values + static_cast<long long>(index) * kFragmentBytes;
    }
};
