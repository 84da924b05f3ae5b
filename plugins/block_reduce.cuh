// Reductions over the threads of a block.
#pragma once

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Highest {
    __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};

// Joins a value of each thread. `of_warps`: a place of shared memory for each warp, which no thread reads any more;
// `neutral`: joined with a value, it gives that value. Blocks are whole warps.
template <class Join>
__device__ __forceinline__ float block_reduce(float value, float neutral, float* of_warps, Join join) {
    for (int lanes = 16; lanes; lanes /= 2) value = join(value, __shfl_xor_sync(~0u, value, lanes));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) of_warps[warp] = value;
    __syncthreads();
    value = lane < warps ? of_warps[lane] : neutral;
    for (int lanes = 16; lanes; lanes /= 2) value = join(value, __shfl_xor_sync(~0u, value, lanes));
    return value;
}
