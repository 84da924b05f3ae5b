// What a decoder layer does between its matrix products. Launched by trt_kvcache/kernels/cuda/decoder_layer.py.
// Elements have 16 bits; a thread handles words of two. Sums are float32.

#include "attention/element.cuh"
#include "dependent_launch.cuh"
#include "shared_memory.cuh"

constexpr int kMaxWarps = 32;
constexpr int kHeldWords = 4;  // that a thread keeps in registers between the two passes over a row, or over a unit of it

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

template <class Element>
__device__ __forceinline__ void add_squares(Element, unsigned word, float& squares) {
    const float2 values = unpack(Element{}, word);
    squares += values.x * values.x + values.y * values.y;
}

// Adds a word to one of the residual stream, rounds the sum and adds its squares to `squares`.
template <class Element>
__device__ __forceinline__ unsigned add_word(Element, unsigned hidden, unsigned change, float& squares) {
    const float2 before = unpack(Element{}, hidden), added = unpack(Element{}, change);
    const unsigned sum = pack(Element{}, {before.x + added.x, before.y + added.y});
    add_squares(Element{}, sum, squares);
    return sum;
}

template <class Element>
__device__ __forceinline__ unsigned scale_word(Element, unsigned sum, unsigned weight, float weight_offset, float scale) {
    const float2 value = unpack(Element{}, sum), factor = unpack(Element{}, weight);
    return pack(Element{}, {value.x * scale * (weight_offset + factor.x), value.y * scale * (weight_offset + factor.y)});
}

// hidden += change, rounded; out = hidden / sqrt(mean(hidden^2) + eps) * (weight_offset + weight). Grid: a block for each row of `words`
// words. The first kHeldWords words of a thread are loaded together; weights before the launch that makes `change` has ended.
template <class Element>
__device__ __forceinline__ void add_rms_norm(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out, long long words,
                                             double eps, double weight_offset) {
    const float offset = static_cast<float>(weight_offset);
    hidden += blockIdx.x * words;
    change += blockIdx.x * words;
    out += blockIdx.x * words;
    unsigned sums[kHeldWords], added[kHeldWords], weights[kHeldWords];
    const long long held = static_cast<long long>(kHeldWords) * blockDim.x;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        const long long word = threadIdx.x + static_cast<long long>(i) * blockDim.x;
        weights[i] = word < words ? weight[word] : 0;
    }
    grid_dependents_may_launch();  // this is short: the next launch can begin to read its weights
    grid_dependency_wait();
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        const long long word = threadIdx.x + static_cast<long long>(i) * blockDim.x;
        sums[i] = word < words ? hidden[word] : 0;
        added[i] = word < words ? change[word] : 0;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        const long long word = threadIdx.x + static_cast<long long>(i) * blockDim.x;
        sums[i] = add_word(Element{}, sums[i], added[i], squares);
        if (word < words) hidden[word] = sums[i];
    }
    for (long long word = held + threadIdx.x; word < words; word += blockDim.x) {
        hidden[word] = add_word(Element{}, hidden[word], change[word], squares);
    }
    const float mean = block_sum(squares) / static_cast<float>(2 * words), scale = 1.0f / sqrtf(mean + static_cast<float>(eps));
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        const long long word = threadIdx.x + static_cast<long long>(i) * blockDim.x;
        if (word < words) out[word] = scale_word(Element{}, sums[i], weights[i], offset, scale);
    }
    for (long long word = held + threadIdx.x; word < words; word += blockDim.x) {  // what this thread has written
        out[word] = scale_word(Element{}, hidden[word], weight[word], offset, scale);
    }
}

// q and k of a row of new tokens become x / sqrt(mean(x^2) + eps) * (weight_offset + weight), in place. The mean is that of a unit: of a head, or of
// all heads of q or of k. A row has q_units of q_words words, then k_units of k_words; what follows stays. Grid: x over units, a warp for each; y over
// rows, which are row_words apart.
template <class Element>
__device__ __forceinline__ void qk_rms_norm(unsigned* qkv, const unsigned* q_weight, const unsigned* k_weight, long long row_words, long long q_units,
                                            long long k_units, long long q_words, long long k_words, double eps, double weight_offset) {
    const int lane = threadIdx.x % 32;
    const long long unit = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (unit >= q_units + k_units) return;
    const bool is_q = unit < q_units;
    const long long words = is_q ? q_words : k_words, first = is_q ? unit * q_words : q_units * q_words + (unit - q_units) * k_words;
    const unsigned* const weight = is_q ? q_weight : k_weight;
    unsigned* const row = qkv + blockIdx.y * row_words + first;
    const float offset = static_cast<float>(weight_offset);
    unsigned values[kHeldWords], weights[kHeldWords];
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) weights[i] = lane + 32 * i < words ? weight[lane + 32 * i] : 0;
    grid_dependents_may_launch();
    grid_dependency_wait();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) values[i] = lane + 32 * i < words ? row[lane + 32 * i] : 0;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) add_squares(Element{}, values[i], squares);
    for (long long word = lane + 32 * kHeldWords; word < words; word += 32) add_squares(Element{}, row[word], squares);
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(2 * words) + static_cast<float>(eps));
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        if (lane + 32 * i < words) row[lane + 32 * i] = scale_word(Element{}, values[i], weights[i], offset, scale);
    }
    for (long long word = lane + 32 * kHeldWords; word < words; word += 32) row[word] = scale_word(Element{}, row[word], weight[word], offset, scale);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// out = silu(gate) * up. A row of gate_up is `words` words of gate, then as many of up. Grid: x along a row, y over rows.
template <class Element>
__device__ __forceinline__ void silu_mul(const unsigned* gate_up, unsigned* out, long long words) {
    const long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = blockIdx.y;
    grid_dependents_may_launch();
    grid_dependency_wait();
    if (word >= words) return;
    const float2 gate = unpack(Element{}, gate_up[2 * row * words + word]), up = unpack(Element{}, gate_up[(2 * row + 1) * words + word]);
    out[row * words + word] = pack(Element{}, {silu(gate.x) * up.x, silu(gate.y) * up.y});
}

extern "C" __global__ void add_rms_norm_float16(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out,
                                                long long words, double eps, double weight_offset) {
    add_rms_norm<Float16>(hidden, change, weight, out, words, eps, weight_offset);
}

extern "C" __global__ void add_rms_norm_bfloat16(unsigned* hidden, const unsigned* change, const unsigned* weight, unsigned* out,
                                                 long long words, double eps, double weight_offset) {
    add_rms_norm<BFloat16>(hidden, change, weight, out, words, eps, weight_offset);
}

#define QK_PARAMETERS                                                                                                                 \
    unsigned *qkv, const unsigned *q_weight, const unsigned *k_weight, long long row_words, long long q_units, long long k_units, \
        long long q_words, long long k_words, double eps, double weight_offset
#define QK_ARGUMENTS qkv, q_weight, k_weight, row_words, q_units, k_units, q_words, k_words, eps, weight_offset

extern "C" __global__ void qk_rms_norm_float16(QK_PARAMETERS) { qk_rms_norm<Float16>(QK_ARGUMENTS); }

extern "C" __global__ void qk_rms_norm_bfloat16(QK_PARAMETERS) { qk_rms_norm<BFloat16>(QK_ARGUMENTS); }

extern "C" __global__ void silu_mul_float16(const unsigned* gate_up, unsigned* out, long long words) {
    silu_mul<Float16>(gate_up, out, words);
}

extern "C" __global__ void silu_mul_bfloat16(const unsigned* gate_up, unsigned* out, long long words) {
    silu_mul<BFloat16>(gate_up, out, words);
}
