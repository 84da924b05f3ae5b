// Lengths of the batch slots: int32 [count], one thread per slot. Launched by trt_kvcache/kernels/cuda.py.
// Numbers are passed as 64-bit integers: see README.md.

// Values that one launch of store_values carries. kernels/lengths.py has the same number.
constexpr int kMaxStoredValues = 16;

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

// lengths[slot] = values[slot], or += where accumulate is not 0; count <= kMaxStoredValues, one block.
// The values are arguments of the launch, so nothing that the host does later can change them.
extern "C" __global__ void store_values(int* lengths, long long accumulate, long long count, long long value0, long long value1,
                                        long long value2, long long value3, long long value4, long long value5, long long value6,
                                        long long value7, long long value8, long long value9, long long value10, long long value11,
                                        long long value12, long long value13, long long value14, long long value15) {
    const long long values[kMaxStoredValues] = {value0, value1, value2,  value3,  value4,  value5,  value6,  value7,
                                                value8, value9, value10, value11, value12, value13, value14, value15};
    const int slot = global_thread();
    if (slot < count) lengths[slot] = static_cast<int>(values[slot]) + (accumulate ? lengths[slot] : 0);
}
