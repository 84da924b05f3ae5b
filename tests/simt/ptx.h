// The CPU half of plugins/ptx.cuh.
#pragma once

#include <cmath>

#include "block.h"
#include "matrix.h"

#define EMULATED_PTX

struct Float16 {};
struct BFloat16 {};

using SharedAddress = unsigned char*;

inline SharedAddress shared_address(const void* place) { return static_cast<unsigned char*>(const_cast<void*>(place)); }

inline SharedAddress flip_bits(SharedAddress address, unsigned bits) {
    return reinterpret_cast<SharedAddress>(reinterpret_cast<size_t>(address) ^ bits);
}

// What is written at once, so that a sanitizer sees who wrote, is NaN: nobody may look before the copy was waited for.
inline void copy_async(SharedAddress to, const void* from, bool valid) {
    static const uint4 zeros{};
    const uint4* source = valid ? static_cast<const uint4*>(from) : &zeros;
    const volatile unsigned* read = &source->x;
    for (int i = 0; i < 4; i++) static_cast<void>(read[i]);
    *reinterpret_cast<uint4*>(to) = {~0u, ~0u, ~0u, ~0u};
    simt::running->block->copy_async(to, source, sizeof *source);
}
inline void commit_copies() { simt::running->block->commit_copies(); }
template <int kGroups>
void wait_for_copies() {
    simt::running->block->wait_for_copies(kGroups);
}

inline void load_matrices(unsigned (&to)[4], SharedAddress row) {
    const uint4 words = *reinterpret_cast<const uint4*>(row);
    simt::MatrixRow mine{{words.x, words.y, words.z, words.w}, to};
    simt::running->block->together(&mine, "load_matrices", simt::exchange_rows);
}
inline void load_matrices_transposed(unsigned (&to)[4], SharedAddress row) {
    const uint4 words = *reinterpret_cast<const uint4*>(row);
    simt::MatrixRow mine{{words.x, words.y, words.z, words.w}, to};
    simt::running->block->together(&mine, "load_matrices_transposed", simt::exchange_rows_transposed);
}

inline void multiply_add(Float16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    simt::MatrixProduct mine{sum, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    simt::running->block->together(&mine, "multiply_add of Float16", simt::multiply_add_float16);
}
inline void multiply_add(BFloat16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    simt::MatrixProduct mine{sum, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    simt::running->block->together(&mine, "multiply_add of BFloat16", simt::multiply_add_bfloat16);
}

inline unsigned pack(Float16, float2 values) { return simt::to_float16(values.x) | static_cast<unsigned>(simt::to_float16(values.y)) << 16; }
inline unsigned pack(BFloat16, float2 values) { return simt::to_bfloat16(values.x) | static_cast<unsigned>(simt::to_bfloat16(values.y)) << 16; }
inline float2 unpack(Float16, unsigned word) { return {simt::of_float16(word & 0xFFFF), simt::of_float16(word >> 16)}; }
inline float2 unpack(BFloat16, unsigned word) { return {simt::of_bfloat16(word & 0xFFFF), simt::of_bfloat16(word >> 16)}; }

inline float power_of_2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }

inline unsigned take_ticket(unsigned* place, unsigned last) {
    unsigned before = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(place, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    }
    return before;
}
