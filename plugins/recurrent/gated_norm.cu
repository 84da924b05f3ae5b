// RMS norm with a gate, after the scan of a recurrent layer. Launched by trt_kvcache/kernels/gated_norm_kernels.py.
//
// A group of columns of a token has a warp of its own, or all warps of a block.

#include "dependent_launch.cuh"
#include "recurrent/elements.cuh"
#include "recurrent/functions.cuh"
#include "shared_memory.cuh"

// trt_kvcache/kernels/gated_norm_kernels.py has the same number.
constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / 32;

struct NormParams {
    Tokens x, gate;
    const void* weight;
    const int* new_lengths;
    long long slots, width, columns, group_size, weight_size, warps, gate_first;
    float epsilon;
    void* out;  // [B, width, columns]
};

// The values that are normed: x, or x times the gate.
template <class Element, int kCount>
__device__ __forceinline__ void load_normed(const NormParams& params, const unsigned char* x, const unsigned char* gate,
                                            long long column, float (&values)[kCount], float (&factors)[kCount]) {
    load_elements(Element{}, x, column, values);
    load_elements(Element{}, gate, column, factors);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        factors[i] = silu(factors[i]);
        if (params.gate_first) {
            values[i] *= factors[i];
            factors[i] = 1.0f;
        }
    }
}

template <class Element, int kCount>
__device__ __forceinline__ void gated_rms_norm(const NormParams& params) {
    SHARED_ARRAY(float, sums, kNormWarps);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, warps = static_cast<int>(params.warps);
    const long long groups = params.columns / params.group_size;
    // of a group of a token
    const long long index = static_cast<long long>(blockIdx.x) * (kNormWarps / warps) + warp / warps;
    const long long row = index / groups, slot = row / params.width, token = row % params.width,
                    first = index % groups * params.group_size;
    const int begin = (warp % warps * 32 + lane) * kCount, stride = warps * 32 * kCount;
    grid_dependency_wait();
    const bool is_there = slot < params.slots,
               is_new = is_there && token < count_new(params.new_lengths, slot, params.width);
    const unsigned char *x = params.x.row(slot, token), *gate = params.gate.row(slot, token);
    float squares = 0.0f, values[kCount], factors[kCount];
    if (is_new) {
        for (long long column = begin; column < params.group_size; column += stride) {
            load_normed<Element>(params, x, gate, first + column, values, factors);
#pragma unroll
            for (int i = 0; i < kCount; i++) squares += values[i] * values[i];
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    if (warps > 1) {
        if (lane == 0) sums[warp] = squares;
        __syncthreads();
        squares = 0.0f;
        for (int i = 0; i < warps; i++) squares += sums[warp / warps * warps + i];
    }
    if (!is_there) return;
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(params.group_size) + params.epsilon);
    for (long long column = begin; column < params.group_size; column += stride) {
        float weights[kCount], results[kCount] = {};
        if (is_new) {
            load_normed<Element>(params, x, gate, first + column, values, factors);
            load_elements(Element{}, params.weight, (first + column) % params.weight_size, weights);
#pragma unroll
            for (int i = 0; i < kCount; i++) results[i] = values[i] * scale * weights[i] * factors[i];
        }
        store_elements(Element{}, params.out, row * params.columns + first + column, results);
    }
}

template <class Element>
__device__ __forceinline__ void gated_rms_norm(const NormParams& params, long long in_vectors) {
    if (in_vectors) {
        gated_rms_norm<Element, kPerVector<Element>>(params);
    } else {
        gated_rms_norm<Element, 1>(params);
    }
}

#define PARAMETERS \
    const unsigned char *x, long long x_slot, long long x_token, const unsigned char *gate, long long gate_slot, \
        long long gate_token, const void *weight, const int *new_lengths, long long slots, long long width, \
        long long columns, long long group_size, long long weight_size, long long warps, long long gate_first, \
        double epsilon, long long in_vectors, void *out
#define ARGUMENTS \
    {{x, x_slot, x_token}, \
     {gate, gate_slot, gate_token}, \
     weight, \
     new_lengths, \
     slots, \
     width, \
     columns, \
     group_size, \
     weight_size, \
     warps, \
     gate_first, \
     static_cast<float>(epsilon), \
     out}

// Grid: x over groups of tokens.
extern "C" __global__ void __launch_bounds__(kNormThreads) gated_rms_norm_float16(PARAMETERS) {
    gated_rms_norm<Float16>(ARGUMENTS, in_vectors);
}
extern "C" __global__ void __launch_bounds__(kNormThreads) gated_rms_norm_bfloat16(PARAMETERS) {
    gated_rms_norm<BFloat16>(ARGUMENTS, in_vectors);
}
extern "C" __global__ void __launch_bounds__(kNormThreads) gated_rms_norm_float32(PARAMETERS) {
    gated_rms_norm<Float32>(ARGUMENTS, in_vectors);
}
