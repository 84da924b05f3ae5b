// The CPU half of what plugins/attention/*.cuh have for a GPU between #ifndef EMULATED_PTX and #endif, and of
// plugins/shared_memory.cuh.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "block.h"
#include "matrix.h"

#define EMULATED_PTX

struct Float16 {};
struct BFloat16 {};

using SharedAddress = unsigned char*;

inline SharedAddress shared_address(const void* place) { return static_cast<unsigned char*>(const_cast<void*>(place)); }

inline unsigned fetch_add_shared(SharedAddress address, unsigned value) {
    return value ? __atomic_fetch_add(reinterpret_cast<unsigned*>(address), value, __ATOMIC_RELAXED) : 0;
}
inline void count_shared(SharedAddress address) { fetch_add_shared(address, 1); }

inline SharedAddress xor_address(SharedAddress address, unsigned bits) {
    return reinterpret_cast<SharedAddress>(reinterpret_cast<size_t>(address) ^ bits);
}

// What is written at once, so that a sanitizer sees who wrote, is NaN: nobody may look before the copy was waited for.
inline void cp_async(SharedAddress to, const void* from, bool valid) {
    static const uint4 zeros{};
    const uint4* source = valid ? static_cast<const uint4*>(from) : &zeros;
    const volatile unsigned* read = &source->x;
    for (int i = 0; i < 4; i++) static_cast<void>(read[i]);
    *reinterpret_cast<uint4*>(to) = {~0u, ~0u, ~0u, ~0u};
    simt::running->block->copy_async(to, source, sizeof *source);
}
inline void cp_async_word(SharedAddress to, const void* from, bool valid) {
    static const unsigned zero = 0;
    const volatile unsigned* source = valid ? static_cast<const unsigned*>(from) : &zero;
    static_cast<void>(*source);
    *reinterpret_cast<unsigned*>(to) = ~0u;
    simt::running->block->copy_async(to, const_cast<const unsigned*>(source), sizeof zero);
}
inline const unsigned char* base_address(const unsigned char* address) { return address; }
struct L2Policy {};
inline L2Policy evict_first_policy() { return {}; }
inline void cp_async_with_policy(SharedAddress to, const void* from, bool valid, L2Policy) {
    cp_async(to, from, valid);
}
__attribute__((no_sanitize_thread)) inline void look_at(const volatile unsigned* from) {
    for (int i = 0; i < 4; i++) static_cast<void>(from[i]);
}
inline void cp_async_speculative(SharedAddress to, const void* from, bool valid, L2Policy) {
    if (valid) look_at(static_cast<const unsigned*>(from));
    static const uint4 zeros{};
    *reinterpret_cast<uint4*>(to) = {~0u, ~0u, ~0u, ~0u};
    simt::running->block->copy_async(to, valid ? from : &zeros, sizeof zeros, true);
}
inline uint4 load_once(const void* from, bool valid, L2Policy) {
    return valid ? *static_cast<const uint4*>(from) : uint4{};
}
inline uint4 load_once_if(const void* from, bool valid, L2Policy) {
    return valid ? *static_cast<const uint4*>(from) : uint4{~0u, ~0u, ~0u, ~0u};
}
inline void prefetch_l2_line(const void*) {}
inline void grid_dependency_wait() {}
inline void grid_dependents_may_launch() {}
inline void barrier_of_threads(int number, int count) { simt::running->block->named_barrier(number, count); }
inline void cp_async_commit_group() { simt::running->block->commit_copies(); }
template <int kGroups>
void cp_async_wait_group() {
    simt::running->block->wait_for_copies(kGroups);
}

inline void ldmatrix_x4(unsigned (&to)[4], SharedAddress row) {
    const uint4 words = *reinterpret_cast<const uint4*>(row);
    simt::MatrixRow mine{{words.x, words.y, words.z, words.w}, to};
    simt::running->block->together(&mine, "ldmatrix_x4", simt::exchange_rows);
}
inline void ldmatrix_x4_trans(unsigned (&to)[4], SharedAddress row) {
    const uint4 words = *reinterpret_cast<const uint4*>(row);
    simt::MatrixRow mine{{words.x, words.y, words.z, words.w}, to};
    simt::running->block->together(&mine, "ldmatrix_x4_trans", simt::exchange_rows_transposed);
}

inline unsigned transpose_matrix(unsigned words) {
    unsigned transposed;
    simt::MatrixWord mine{words, &transposed};
    simt::running->block->together(&mine, "transpose_matrix", simt::transpose_words);
    return transposed;
}

inline void mma_m16n8k16(Float16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    simt::MatrixProduct mine{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    simt::running->block->together(&mine, "mma_m16n8k16 of Float16", simt::multiply_add_float16);
}
inline void mma_m16n8k16(BFloat16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    simt::MatrixProduct mine{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    simt::running->block->together(&mine, "mma_m16n8k16 of BFloat16", simt::multiply_add_bfloat16);
}

// Products of a warpgroup. Each warp has 16 of the 64 rows of A and of the product, so it does its part alone: a lane
// brings half a row of these, and its share of the rows of B. What is in shared memory is read at once, and the product
// is there when it is waited for, no sooner.
inline void warpgroup_begin() {}
inline void warpgroup_commit() { simt::running->block->commit_products(); }
template <int kGroups = 0, int kFragments>
void warpgroup_wait(float (&)[kFragments][4]) {
    simt::running->block->wait_for_products(kGroups);
}
template <int kParts>
void hold_registers(unsigned (&)[kParts][4]) {}
inline void shared_memory_fence() {}

// 16 bytes of a row of a panel, from an address in its first row on: bits 4 to 6 of an address are swizzled with bits 7
// to 9.
inline uint4 of_panel(SharedAddress start, int row, int chunk) {
    const size_t address = reinterpret_cast<size_t>(start) + 128 * row + 16 * chunk;
    return *reinterpret_cast<const uint4*>(address ^ (address >> 7 & 7) << 4);
}
inline void words_of_panel(unsigned* to, SharedAddress start, int row, int chunk) {
    const uint4 words = of_panel(start, row, chunk);
    std::memcpy(to, &words, sizeof words);
}
template <class Type, int kFragments>
void warpgroup_product(Type, float (&d)[kFragments][4], simt::WarpgroupProduct& mine) {
    constexpr bool is_float16 = std::is_same<Type, Float16>::value;
    mine.fragments = kFragments;
    simt::running->block->together(&mine, is_float16 ? "warpgroup_mma of Float16" : "warpgroup_mma of BFloat16",
                                   is_float16 ? simt::multiply_panels_float16 : simt::multiply_panels_bfloat16);
    simt::running->block->product(d[0], mine.product, 4 * kFragments);
}
template <class Type, int kFragments>
void warpgroup_mma(Type, float (&d)[kFragments][4], SharedAddress a, SharedAddress b) {
    simt::WarpgroupProduct mine{};
    const int lane = simt::lane();
    words_of_panel(mine.a, a, simt::running->number / 32 % 4 * 16 + lane / 2, lane % 2);
    for (int i = 0; i < kFragments / 2; i++) words_of_panel(mine.b[i], b, i * 16 + lane / 2, lane % 2);
    warpgroup_product(Type{}, d, mine);
}
template <class Type>
void warpgroup_mma_transposed(Type, float (&d)[8][4], const unsigned (&a)[4], SharedAddress b) {
    simt::WarpgroupProduct mine{};
    const int lane = simt::lane();
    mine.is_transposed = true;
    std::memcpy(mine.a, a, sizeof a);
    for (int i = 0; i < 4; i++) words_of_panel(mine.b[i], b, lane / 2, lane % 2 * 4 + i);
    warpgroup_product(Type{}, d, mine);
}

inline unsigned pack(Float16, float2 values) {
    return simt::to_float16(values.x) | static_cast<unsigned>(simt::to_float16(values.y)) << 16;
}
inline unsigned pack(BFloat16, float2 values) {
    return simt::to_bfloat16(values.x) | static_cast<unsigned>(simt::to_bfloat16(values.y)) << 16;
}
inline float2 unpack(Float16, unsigned word) { return {simt::of_float16(word & 0xFFFF), simt::of_float16(word >> 16)}; }
inline float2 unpack(BFloat16, unsigned word) {
    return {simt::of_bfloat16(word & 0xFFFF), simt::of_bfloat16(word >> 16)};
}

inline unsigned twice(unsigned word, int i) { return (word >> (16 * i) & 0xFFFF) * 0x00010001; }

// A double holds the product of two elements and the sum with a third one of these exponents exactly, and so does a
// float what comes out here.
template <class Type>
unsigned multiply_add(Type, unsigned a, unsigned b, unsigned c) {
    const float2 x = unpack(Type{}, a), y = unpack(Type{}, b), z = unpack(Type{}, c);
    const auto sum = [](double left, double right, double added) { return static_cast<float>(left * right + added); };
    return pack(Type{}, {sum(x.x, y.x, z.x), sum(x.y, y.y, z.y)});
}

#define FLOAT8_INSTRUCTIONS
inline uint2 float16_of_float8(unsigned quantized) {
    const auto element = [=](int i) { return simt::of_float8(quantized >> (8 * i) & 0xFF); };
    return {pack(Float16{}, {element(0), element(1)}), pack(Float16{}, {element(2), element(3)})};
}
inline unsigned float8_of_floats(float2 values) {
    return simt::to_float8(values.x) | static_cast<unsigned>(simt::to_float8(values.y)) << 8;
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }

inline int over_warp(int value, int (*join)(int, int)) {
    for (int distance = 16; distance > 0; distance /= 2) value = join(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}
inline int warp_sum(int value) {  // modulo 2^32, as the instruction
    return over_warp(
        value, [](int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); });
}
inline int warp_max(int value) {
    return over_warp(value, [](int a, int b) { return a > b ? a : b; });
}

// Word by word, the last one last: who sees its new value sees the others too.
inline unsigned* words_of(const float4* place) { return reinterpret_cast<unsigned*>(const_cast<float4*>(place)); }
inline void publish_vector(float4* place, float4 value) {
    unsigned words[4];
    std::memcpy(words, &value, sizeof words);
    for (int i = 0; i < 3; i++) __atomic_store_n(words_of(place) + i, words[i], __ATOMIC_RELAXED);
    __atomic_store_n(words_of(place) + 3, words[3] ? words[3] : 1u << 31, __ATOMIC_RELEASE);
}
inline bool is_published(float4 value) {
    unsigned word;
    std::memcpy(&word, &value.w, sizeof word);
    return word;
}
inline float4 poll_vector(const float4* place) {
    unsigned words[4]{};
    words[3] = __atomic_load_n(words_of(place) + 3, __ATOMIC_ACQUIRE);
    for (int i = 0; words[3] && i < 3; i++) words[i] = __atomic_load_n(words_of(place) + i, __ATOMIC_RELAXED);
    float4 value;
    std::memcpy(&value, words, sizeof value);
    return value;
}
inline void reset_vector(float4* place) { __atomic_store_n(words_of(place) + 3, 0u, __ATOMIC_RELAXED); }
inline void poll_again() { simt::running->block->look_again(); }

inline unsigned add_acq_rel(unsigned* word, unsigned value) {
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
inline unsigned load_acquire(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void add_release(unsigned* word, unsigned value) { __atomic_fetch_add(word, value, __ATOMIC_RELEASE); }
