// Copying and zeroing runs of bytes, in vectors as wide as addresses and sizes allow, several loads in flight in each
// thread.
#pragma once

// Threads of a block, and loads that a thread has in flight. trt_kvcache/kernels/launch.py has the same numbers.
constexpr int kThreads = 256;
constexpr int kInFlight = 4;

// Division of contiguous vectors among the blocks along x. A block takes kInFlight * blockDim.x contiguous vectors. Of
// these a thread takes first_vector() and then every blockDim.x-th. The next ones of the block are grid_vectors()
// further.
__device__ __forceinline__ long long first_vector() {
    return static_cast<long long>(blockIdx.x) * kInFlight * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ long long grid_vectors() {
    return static_cast<long long>(gridDim.x) * kInFlight * blockDim.x;
}

// `to` and `from` must not overlap.
template <class Vector>
__device__ __forceinline__ void copy_bytes(unsigned char* to, const unsigned char* from, long long nbytes) {
    Vector* __restrict__ destination = reinterpret_cast<Vector*>(to);
    const Vector* __restrict__ source = reinterpret_cast<const Vector*>(from);
    const long long count = nbytes / static_cast<long long>(sizeof(Vector)), stride = blockDim.x;
    for (long long first = first_vector(); first < count; first += grid_vectors()) {
        Vector vectors[kInFlight] = {};
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * stride < count) vectors[i] = source[first + i * stride];
        }
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * stride < count) destination[first + i * stride] = vectors[i];
        }
    }
}

template <class Vector>
__device__ __forceinline__ void zero_bytes(unsigned char* to, long long nbytes) {
    Vector* destination = reinterpret_cast<Vector*>(to);
    const long long count = nbytes / static_cast<long long>(sizeof(Vector)), stride = blockDim.x;
    for (long long first = first_vector(); first < count; first += grid_vectors()) {
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (first + i * stride < count) destination[first + i * stride] = Vector{};
        }
    }
}

__device__ __forceinline__ long long address_of(const unsigned char* pointer) {
    return reinterpret_cast<long long>(pointer);
}

// Calls work(Vector{}) with the widest vector type, of up to 16 bytes, that everything is aligned to. `alignment` is
// the bitwise or of addresses, strides and sizes: a power of 2 divides all of them exactly if it divides this.
template <class Work>
__device__ __forceinline__ void with_widest_vector(long long alignment, Work work) {
    if (alignment % 16 == 0) {
        work(uint4{});
    } else if (alignment % 8 == 0) {
        work(uint2{});
    } else if (alignment % 4 == 0) {
        work(0u);
    } else if (alignment % 2 == 0) {
        work(static_cast<unsigned short>(0));
    } else {
        work(static_cast<unsigned char>(0));
    }
}
