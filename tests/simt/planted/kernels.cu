// Kernels that are right, and kernels with one mistake each, for tests/simt/test_emulator.py. 64 threads a block;
// `out` holds 64 floats for each block. Those with a mistake have a name that says it.

extern "C" __global__ void barrier(float* out) {
    DYNAMIC_SHARED(float, shared);
    SHARED_ARRAY(float, copy, 64);
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    copy[threadIdx.x] = shared[(threadIdx.x + 33) % 64];
    __syncthreads();
    out[64 * blockIdx.x + threadIdx.x] = copy[63 - threadIdx.x];
}

extern "C" __global__ void missing_barrier(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[(threadIdx.x + 33) % 64];
}

// Right by the order in which the threads happen to run; the second value overtakes the first one's reader.
extern "C" __global__ void missing_second_barrier(float* out) {
    DYNAMIC_SHARED(float, shared);
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x == 0) shared[0] = i + 1;
        __syncthreads();
        sum += shared[0];
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void unwritten_shared(float* out) {
    DYNAMIC_SHARED(float, shared);
    if (threadIdx.x) shared[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x];
}

extern "C" __global__ void warp(float* out) {
    const int lane = threadIdx.x % 32;
    float sum = lane;
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);  // 496
    const float left = __shfl_up_sync(~0u, static_cast<float>(lane), 1, 8),
                right = __shfl_down_sync(~0u, lane * 1.0, 2);
    const unsigned odd = __ballot_sync(~0u, lane & 1);
    const int votes = __any_sync(~0u, lane == 7) + __all_sync(~0u, lane < 31);
    const int count = __syncthreads_count(lane < 3) + __syncthreads_or(threadIdx.x == 40);
    float third = 0;
    if (lane < 8) third = __shfl_sync(0xFFu, lane * 2.0f, 3, 4);  // lanes 3 and 7
    out[threadIdx.x] = sum + 1000 * (left + right) + 1e6f * third + (odd == 0xAAAAAAAAu) + votes + count;
}

extern "C" __global__ void warp_memory(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

// A shuffle does not order memory.
extern "C" __global__ void missing_syncwarp(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = threadIdx.x;
    __shfl_sync(~0u, 0, 0);
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

extern "C" __global__ void mixed_operations(float* out) {
    out[threadIdx.x] = threadIdx.x & 1 ? __shfl_xor_sync(~0u, 1.0f, 1) : __ballot_sync(~0u, 1);
}

extern "C" __global__ void lane_outside_its_mask(float* out) { out[threadIdx.x] = __shfl_sync(1u, 1.0f, 0); }

extern "C" __global__ void lane_that_never_comes(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else if (threadIdx.x != 40) {
        __syncwarp();
    }
    out[threadIdx.x] = 0;
}

extern "C" __global__ void copies(float* out) {
    DYNAMIC_SHARED(float, shared);
    __pipeline_memcpy_async(shared + threadIdx.x, out + threadIdx.x, 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    out[threadIdx.x] = shared[threadIdx.x] + 1;
}

extern "C" __global__ void unwaited_copy(float* out) {
    DYNAMIC_SHARED(float, shared);
    __pipeline_memcpy_async(shared + threadIdx.x, out + threadIdx.x, 4);
    __pipeline_commit();
    out[threadIdx.x] = 1;
}

// One group too many is left under way.
extern "C" __global__ void copy_waited_too_late(float* out) {
    DYNAMIC_SHARED(float, shared);
    __pipeline_memcpy_async(shared + threadIdx.x, out + threadIdx.x, 4);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    out[threadIdx.x] = shared[threadIdx.x];
    __pipeline_wait_prior(0);
}

extern "C" __global__ void missing_barrier_after_copy(float* out) {
    DYNAMIC_SHARED(float, shared);
    __pipeline_memcpy_async(shared + threadIdx.x, out + threadIdx.x, 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void counter(float* out) { atomicAdd(reinterpret_cast<int*>(out), 1); }

extern "C" __global__ void unordered_counter(float* out) {
    if (threadIdx.x == 0) out[0] += 1;
}

// Slots of 64 floats, a block for each: slot b goes to slot b - 1. A block may overwrite what another has yet to read.
extern "C" __global__ void racing_compaction(float* out) {
    if (blockIdx.x > 0) out[64 * (blockIdx.x - 1) + threadIdx.x] = out[64 * blockIdx.x + threadIdx.x];
}

// Each block waits for the one after it, the last one for the first.
extern "C" __global__ void next_block(float* out) {
    if (threadIdx.x) return;
    auto* const said = reinterpret_cast<float4*>(out - 4 * gridDim.x);
    publish_vector(said + blockIdx.x, {static_cast<float>(blockIdx.x), 0, 0, 1});
    const float4* const next = said + (blockIdx.x + 1) % gridDim.x;
    while (!is_published(poll_vector(next))) poll_again();
    out[64 * blockIdx.x] = poll_vector(next).x;
}

extern "C" __global__ void overrun(float* out) { out[64 * gridDim.x * blockIdx.x + threadIdx.x + 1] = 1; }

extern "C" __global__ void overrun_of_shared(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x + 1] = 1;
    __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void overrun_of_an_array(float* out) {
    SHARED_ARRAY(float, shared, 63);
    shared[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void misaligned(float* out) { reinterpret_cast<uint4*>(out + 1)[0] = uint4{}; }

// Each warp reverses its values.
extern "C" __global__ void barriers_of_warps(float* out) {
    DYNAMIC_SHARED(float, shared);
    const int warp = threadIdx.x / 32;
    for (int round = 0; round < 3; round++) {
        shared[threadIdx.x] = out[threadIdx.x];
        barrier_of_threads(1 + warp, 32);
        out[threadIdx.x] = shared[32 * warp + 31 - threadIdx.x % 32];
        barrier_of_threads(1 + warp, 32);
    }
}

// The values of the other warp, for which nobody has waited.
extern "C" __global__ void barrier_of_the_other_warp(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = out[threadIdx.x];
    barrier_of_threads(1 + threadIdx.x / 32, 32);
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void barrier_of_two_counts(float* out) {
    barrier_of_threads(1, threadIdx.x < 32 ? 32 : 64);
    out[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_that_is_never_full(float* out) {
    if (threadIdx.x < 32) barrier_of_threads(1, 64);
    out[threadIdx.x] = 1;
}
