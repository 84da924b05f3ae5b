// What a file of plugins/ is compiled with by a host compiler: `g++ -x c++ -include simt.h lengths.cu`, then
// SIMT_KERNEL for each kernel. It stands for what nvcc and NVRTC know without an #include.
//
// Each CUDA thread is a fiber. Blocks run one after another, or all at once where the launch is cooperative, and
// threads in turns, each until it waits for others (a barrier, an exchange within the warp, what another block writes)
// or ends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "block.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

#define threadIdx (simt::running->index)
#define blockIdx (simt::running->block_index)
#define blockDim (simt::running->block_size)
#define gridDim (simt::running->grid_size)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

using std::max;
using std::min;

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned word = 0;
    for (int i = 0; i < 4; i++) word |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
    return word;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
// What a cache should do with it means nothing here.
template <class Type>
Type __ldcs(const Type* address) {
    return *address;
}
template <class Type>
void __stcs(Type* address, Type value) {
    *address = value;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

// --- shared memory: see plugins/shared_memory.cuh ---

#define SHARED_ARRAY(type, name, count) \
    static char name##_which; \
    type* const name = static_cast<type*>(simt::running->block->shared_array(&name##_which, sizeof(type) * (count)))
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(simt::running->block->dynamic_shared())

// --- waiting for threads of the block ---

inline void __syncthreads() { simt::running->block->barrier(false); }
inline int __syncthreads_count(int predicate) {
    return static_cast<int>(simt::running->block->barrier(predicate != 0));
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }

// --- lanes of a warp ---

namespace simt {

inline int lane() { return static_cast<int>(running->number % 32); }

template <class T>
T shuffle(unsigned mask, T mine, int source, const char* what) {
    static_assert(sizeof(T) <= sizeof(Value) && std::is_trivially_copyable<T>::value, "a value of up to 16 bytes");
    Value value{};
    std::memcpy(&value, &mine, sizeof mine);
    value = running->block->exchange(mask, value, static_cast<unsigned>(source), what);
    std::memcpy(&mine, &value, sizeof mine);
    return mine;
}

// The lane at `offset` from this one, or this one where that would leave the group of `width` lanes.
inline int lane_at(int offset, int width) {
    const int in_group = lane() % width + offset;
    return 0 <= in_group && in_group < width ? lane() + offset : lane();
}

}  // namespace simt

inline void __syncwarp(unsigned mask = ~0u) { simt::running->block->sync_warp(mask); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return simt::running->block->ballot(mask, predicate != 0, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) {
    return simt::running->block->ballot(mask, predicate != 0, "__any_sync") != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return simt::running->block->ballot(mask, predicate != 0, "__all_sync") == mask;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int group = simt::lane() / width * width;
    return simt::shuffle(mask, value, group + (source & (width - 1)), "__shfl_sync");
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return simt::shuffle(mask, value, simt::lane_at(-static_cast<int>(delta), width), "__shfl_up_sync");
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return simt::shuffle(mask, value, simt::lane_at(static_cast<int>(delta), width), "__shfl_down_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    // earlier groups can be read, later ones not
    const int source = simt::lane() ^ lanes, end = (simt::lane() / width + 1) * width;
    return simt::shuffle(mask, value, source < end ? source : simt::lane(), "__shfl_xor_sync");
}

// --- asynchronous copies (cp.async) ---

inline void __pipeline_memcpy_async(void* to, const void* from, size_t nbytes) {
    simt::running->block->copy_async(to, from, nbytes);
}
inline void __pipeline_commit() { simt::running->block->commit_copies(); }
inline void __pipeline_wait_prior(int groups) { simt::running->block->wait_for_copies(groups); }

// --- atomic operations ---

inline int atomicAdd(int* place, int value) { return __atomic_fetch_add(place, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* place, unsigned value) {
    return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
inline unsigned atomicOr(unsigned* place, unsigned bits) { return __atomic_fetch_or(place, bits, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* place, unsigned long long value) {
    return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

// --- what plugins/attention/*.cuh have for a GPU ---

#include "ptx.h"

// --- kernels for the driver ---

namespace simt {

// Runs `kernel(arguments)` for every thread of the grid. Returns what went wrong, or null.
const char* run_grid(Extent grid, Extent block, size_t dynamic_nbytes, bool cooperative,
                     void (*kernel)(void** arguments), void** arguments);

template <auto kernel>
struct Launcher;

template <class... Parameters, void (*kernel)(Parameters...)>
struct Launcher<kernel> {
    static constexpr size_t sizes[] = {sizeof(Parameters)...};

    template <size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<Parameters*>(arguments[I])...);
    }
    static void call_all(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>{}); }
    static const char* run(Extent grid, Extent block, size_t dynamic_nbytes, bool cooperative, void** arguments) {
        return run_grid(grid, block, dynamic_nbytes, cooperative, call_all, arguments);
    }
    static constexpr Kernel describe() { return {sizeof...(Parameters), sizes, run}; }
};

}  // namespace simt

#define SIMT_KERNEL(name) extern "C" const simt::Kernel simt_kernel_##name = simt::Launcher<name>::describe();
