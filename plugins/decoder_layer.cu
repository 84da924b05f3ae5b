// What a decoder layer does between its matrix products. Launched by trt_kvcache/kernels/cuda/decoder_layer.py.
// Elements have 16 bits; a thread handles words of two. Sums are float32.

#include "attention/element.cuh"
#include "shared_memory.cuh"

constexpr int kMaxWarps = 32;

// The sum of a value over the block.
__device__ __forceinline__ float block_sum(float value) {
    SHARED_ARRAY(float, sums, kMaxWarps);
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    float sum = lane < warps ? sums[lane] : 0.0f;
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

// hidden += change, rounded; out = hidden / sqrt(mean(hidden^2) + eps) * weight. Grid: a block for each row of `words` words.
template <class Element>
__device__ __forceinline__ void add_rms_norm(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out, long long words,
                                             double eps) {
    hidden += blockIdx.x * words;
    change += blockIdx.x * words;
    out += blockIdx.x * words;
    float squares = 0.0f;
    for (long long word = threadIdx.x; word < words; word += blockDim.x) {
        const float2 before = unpack(Element{}, hidden[word]), added = unpack(Element{}, change[word]);
        const unsigned sum = pack(Element{}, {before.x + added.x, before.y + added.y});
        hidden[word] = sum;
        const float2 rounded = unpack(Element{}, sum);
        squares += rounded.x * rounded.x + rounded.y * rounded.y;
    }
    const float mean = block_sum(squares) / static_cast<float>(2 * words), scale = 1.0f / sqrtf(mean + static_cast<float>(eps));
    for (long long word = threadIdx.x; word < words; word += blockDim.x) {  // what this thread has written
        const float2 value = unpack(Element{}, hidden[word]), factor = unpack(Element{}, weight[word]);
        out[word] = pack(Element{}, {value.x * scale * factor.x, value.y * scale * factor.y});
    }
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// out = silu(gate) * up. A row of gate_up is `words` words of gate, then as many of up. Grid: x along a row, y over rows.
template <class Element>
__device__ __forceinline__ void silu_mul(const unsigned* gate_up, unsigned* out, long long words) {
    const long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (word >= words) return;
    const float2 gate = unpack(Element{}, gate_up[2 * row * words + word]), up = unpack(Element{}, gate_up[(2 * row + 1) * words + word]);
    out[row * words + word] = pack(Element{}, {silu(gate.x) * up.x, silu(gate.y) * up.y});
}

extern "C" __global__ void add_rms_norm_float16(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out,
                                                long long words, double eps) {
    add_rms_norm<Float16>(hidden, change, weight, out, words, eps);
}

extern "C" __global__ void add_rms_norm_bfloat16(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out,
                                                 long long words, double eps) {
    add_rms_norm<BFloat16>(hidden, change, weight, out, words, eps);
}

extern "C" __global__ void silu_mul_float16(const unsigned* gate_up, unsigned* out, long long words) {
    silu_mul<Float16>(gate_up, out, words);
}

extern "C" __global__ void silu_mul_bfloat16(const unsigned* gate_up, unsigned* out, long long words) {
    silu_mul<BFloat16>(gate_up, out, words);
}
