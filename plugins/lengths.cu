// Lengths of batch slots: int32 [count], one thread per slot. Launched by trt_kvcache/kernels/length_kernels.py.
// Numbers are passed as 64-bit integers: see README.md.

#include "argument_lists.cuh"
#include "compaction.cuh"

__device__ __forceinline__ int global_thread() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// lengths[slot] += increment
extern "C" __global__ void increment_scalar(int* lengths, long long increment, long long count) {
    const int slot = global_thread();
    if (slot < count) lengths[slot] += static_cast<int>(increment);
}

// lengths[slot] += increments[slot]
extern "C" __global__ void increment_tensor(int* lengths, const int* increments, long long count) {
    const int slot = global_thread();
    if (slot < count) lengths[slot] += increments[slot];
}

// lengths[slot] = values[slot], or += if accumulate is not 0. One block, count <= 16.
extern "C" __global__ void store_values(int* lengths, long long accumulate, long long count, LIST_16(long long value)) {
    const long long values[] = {LIST_16(value)};
    const int slot = global_thread();
    if (slot < count) lengths[slot] = static_cast<int>(select_value(values, slot)) + (accumulate ? lengths[slot] : 0);
}

// One block. All lengths are read before one is written, so all moves happen at once, and none of them uses kRegister.
template <int kCount>
__device__ __forceinline__ void compact_listed(int* lengths, long long count, const long long (&packed)[kCount]) {
    const Move move = unpack_move(select_value(packed, threadIdx.x));
    const bool moves = threadIdx.x < count;
    const int length = moves ? lengths[move.source] : 0;
    __syncthreads();
    if (moves) lengths[move.destination] = length;
}

// lengths[destination] = lengths[source], by a list of up to 8, 32 or 96 moves: any permutation.
extern "C" __global__ void compact_lengths_8(int* lengths, long long count, LIST_8(long long move)) {
    const long long packed[] = {LIST_8(move)};
    compact_listed(lengths, count, packed);
}

extern "C" __global__ void compact_lengths_32(int* lengths, long long count, LIST_32(long long move)) {
    const long long packed[] = {LIST_32(move)};
    compact_listed(lengths, count, packed);
}

extern "C" __global__ void compact_lengths_96(int* lengths, long long count, LIST_96(long long move)) {
    const long long packed[] = {LIST_96(move)};
    compact_listed(lengths, count, packed);
}

// The same by a mapping that is read on the device, int32 [old_batch], and that keeps the order. One block takes
// blockDim.x slots at a time, upwards. Slots only move down: so a later round reads nothing that an earlier one has
// written, and what it writes has been read by then, in an earlier round or before its barrier.
extern "C" __global__ void compact_lengths_mapped(int* lengths, const int* mapping, long long old_batch) {
    for (long long first = 0; first < old_batch; first += blockDim.x) {
        const long long slot = first + threadIdx.x;
        const int destination = slot < old_batch ? mapping[slot] : -1;
        const bool moves = 0 <= destination && destination < slot;
        const int length = moves ? lengths[slot] : 0;
        __syncthreads();
        if (moves) lengths[destination] = length;
    }
}
