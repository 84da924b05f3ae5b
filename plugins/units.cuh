// Bytes in units: as wide as addresses and sizes allow, several of them in flight in each thread.
#pragma once

// Threads of a block, and loads that a thread has in flight. kernels/cuda/launch.py has the same numbers.
constexpr int kThreads = 256;
constexpr int kInFlight = 4;

// The blocks along x share a run of units. A block takes kInFlight * blockDim.x units that lie together, of which a thread takes
// first_unit() and then every blockDim.x-th; and then those that are units_of_grid() further on.
__device__ __forceinline__ long long first_unit() { return static_cast<long long>(blockIdx.x) * kInFlight * blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long units_of_grid() { return static_cast<long long>(gridDim.x) * kInFlight * blockDim.x; }

// `to` and `from` do not overlap.
template <class Unit>
__device__ __forceinline__ void copy_run(unsigned char* to, const unsigned char* from, long long nbytes) {
    Unit* __restrict__ into = reinterpret_cast<Unit*>(to);
    const Unit* __restrict__ of = reinterpret_cast<const Unit*>(from);
    const long long count = nbytes / static_cast<long long>(sizeof(Unit)), apart = blockDim.x;
    for (long long first = first_unit(); first < count; first += units_of_grid()) {
        Unit units[kInFlight] = {};
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * apart < count) units[i] = of[first + i * apart];
        }
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * apart < count) into[first + i * apart] = units[i];
        }
    }
}

template <class Unit>
__device__ __forceinline__ void zero_run(unsigned char* run, long long nbytes) {
    Unit* into = reinterpret_cast<Unit*>(run);
    const long long count = nbytes / static_cast<long long>(sizeof(Unit)), apart = blockDim.x;
    for (long long first = first_unit(); first < count; first += units_of_grid()) {
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * apart < count) into[first + i * apart] = Unit{};
        }
    }
}

__device__ __forceinline__ long long address(const unsigned char* pointer) { return reinterpret_cast<long long>(pointer); }

// Calls `work(Unit{})` with the widest unit, up to 16 bytes, that divides all of `numbers`: addresses, strides and sizes, or-ed.
template <class Work>
__device__ __forceinline__ void with_widest_unit(long long numbers, Work work) {
    if (numbers % 16 == 0) {
        work(uint4{});
    } else if (numbers % 8 == 0) {
        work(uint2{});
    } else if (numbers % 4 == 0) {
        work(0u);
    } else if (numbers % 2 == 0) {
        work(static_cast<unsigned short>(0));
    } else {
        work(static_cast<unsigned char>(0));
    }
}
