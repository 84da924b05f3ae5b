// Operations of a decoder layer between its matrix products. Launched by trt_kvcache/kernels/decoder_layer_kernels.py.
// Elements have 16 bits; a thread handles words of two. Sums are float32.

#include "attention/element.cuh"
#include "block_reduce.cuh"
#include "dependent_launch.cuh"
#include "gate_activation.cuh"
#include "shared_memory.cuh"

constexpr int kMaxWarps = 32;
// that a thread keeps in registers between the two passes over a row, or over a unit of it
constexpr int kHeldWords = 4;

template <class Element>
__device__ __forceinline__ void add_squares(Element, unsigned word, float& squares) {
    const float2 values = unpack(Element{}, word);
    squares += values.x * values.x + values.y * values.y;
}

// Factor of RMS norm for values with this sum of squares.
__device__ __forceinline__ float norm_scale(float squares, long long words, float eps) {
    return 1.0f / sqrtf(squares / static_cast<float>(2 * words) + eps);
}

template <class Element>
__device__ __forceinline__ unsigned add_word(Element, unsigned hidden, unsigned change) {
    const float2 before = unpack(Element{}, hidden), added = unpack(Element{}, change);
    return pack(Element{}, {before.x + added.x, before.y + added.y});
}

template <class Element>
__device__ __forceinline__ unsigned multiply_word(Element, unsigned word, float factor) {
    const float2 value = unpack(Element{}, word);
    return factor == 1.0f ? word : pack(Element{}, {value.x * factor, value.y * factor});
}

template <class Element>
__device__ __forceinline__ unsigned scale_word(Element, unsigned sum, unsigned weight, float weight_offset,
                                               float scale) {
    const float2 value = unpack(Element{}, sum), factor = unpack(Element{}, weight);
    return pack(Element{},
                {value.x * scale * (weight_offset + factor.x), value.y * scale * (weight_offset + factor.y)});
}

// Addend of the residual stream: a change as it is, or its norm, times a factor; and a factor of the sum. Each result
// is rounded.
struct ChangeParams {
    const unsigned* weight;  // of the norm of the change, or null
    float factor;
    const unsigned short* scale;  // of the sum: one element, or null for 1
};
template <class Element>
__device__ __forceinline__ unsigned changed_word(Element, unsigned change, unsigned weight, const ChangeParams& params,
                                                 float weight_offset, float scale) {
    if (params.weight) change = scale_word(Element{}, change, weight, weight_offset, scale);
    return multiply_word(Element{}, change, params.factor);
}

// hidden += change, rounded; then hidden *= scale, rounded; if there is `out`, it becomes
// hidden / sqrt(mean(hidden^2) + eps) * (weight_offset + weight). Grid: a block for each row of `words` words. The first
// kHeldWords words of a thread are loaded together; weights before the launch that makes `change` has ended.
// kPlain: the change is added as it is, without a scale, and there is `out`.
template <class Element, bool kPlain>
__device__ __forceinline__ void add_rms_norm(unsigned* hidden, const unsigned* change, const unsigned* weight,
                                             unsigned* out, long long words, double eps, double weight_offset,
                                             ChangeParams params) {
    SHARED_ARRAY(float, sums, 2 * kMaxWarps);
    const float offset = static_cast<float>(weight_offset), epsilon = static_cast<float>(eps);
    const bool norms = kPlain || out, norms_change = !kPlain && params.weight;
    hidden += blockIdx.x * words;
    change += blockIdx.x * words;
    if (norms) out += blockIdx.x * words;
    unsigned held[kHeldWords], added[kHeldWords], weights[kHeldWords], change_weights[kHeldWords] = {};
    // the first word that is not held
    const long long behind = static_cast<long long>(kHeldWords) * blockDim.x + threadIdx.x;
    const auto for_each_held = [&](auto use) {
#pragma unroll
        for (int i = 0; i < kHeldWords; i++) {
            const long long word = threadIdx.x + static_cast<long long>(i) * blockDim.x;
            use(i, word, word < words);
        }
    };
    for_each_held([&](int i, long long word, bool live) {
        weights[i] = norms && live ? weight[word] : 0;
        if constexpr (!kPlain) change_weights[i] = norms_change && live ? params.weight[word] : 0;
    });
    const float sum_scale = !kPlain && params.scale ? unpack(Element{}, *params.scale).x : 1.0f;
    grid_dependents_may_launch();  // this is short: the next launch can begin to read its weights
    grid_dependency_wait();
    for_each_held([&](int i, long long word, bool live) {
        held[i] = live ? hidden[word] : 0;
        added[i] = live ? change[word] : 0;
    });
    float change_scale = 1.0f;
    if (norms_change) {
        float squares = 0.0f;
        for_each_held([&](int i, long long, bool) { add_squares(Element{}, added[i], squares); });
        for (long long word = behind; word < words; word += blockDim.x) add_squares(Element{}, change[word], squares);
        change_scale = norm_scale(block_reduce(squares, 0.0f, sums + kMaxWarps, Sum{}), words, epsilon);
    }
    float squares = 0.0f;
    const auto sum_of = [&](unsigned before, unsigned word, unsigned change_weight) {
        if (!kPlain) word = changed_word(Element{}, word, change_weight, params, offset, change_scale);
        const unsigned sum = add_word(Element{}, before, word),
                       scaled = kPlain ? sum : multiply_word(Element{}, sum, sum_scale);
        add_squares(Element{}, scaled, squares);
        return scaled;
    };
    for_each_held([&](int i, long long word, bool live) {
        held[i] = sum_of(held[i], added[i], change_weights[i]);
        if (live) hidden[word] = held[i];
    });
    for (long long word = behind; word < words; word += blockDim.x)
        hidden[word] = sum_of(hidden[word], change[word], norms_change ? params.weight[word] : 0);
    if (!norms) return;
    const float scale = norm_scale(block_reduce(squares, 0.0f, sums, Sum{}), words, epsilon);
    for_each_held([&](int i, long long word, bool live) {
        if (live) out[word] = scale_word(Element{}, held[i], weights[i], offset, scale);
    });
    for (long long word = behind; word < words; word += blockDim.x) {  // what this thread has written
        out[word] = scale_word(Element{}, hidden[word], weight[word], offset, scale);
    }
}

// q and k of a row of new tokens become x / sqrt(mean(x^2) + eps) * (weight_offset + weight), in place; v becomes
// x / sqrt(mean(x^2) + v_eps). The mean is that of a unit: of a head, or of all heads of q or of k. A row has q_units
// of q_words words, then k_units of k_words and v_units of v_words; what follows stays. Grid: x over units, a warp for
// each; y over rows, which are row_words apart.
template <class Element>
__device__ __forceinline__ void qk_rms_norm(unsigned* qkv, const unsigned* q_weight, const unsigned* k_weight,
                                            long long row_words, long long q_units, long long k_units,
                                            long long v_units, long long q_words, long long k_words, long long v_words,
                                            double eps, double weight_offset, double v_eps) {
    const int lane = threadIdx.x % 32;
    const long long unit = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32,
                    first_v = q_units + k_units;
    if (unit >= first_v + v_units) return;
    const bool is_q = unit < q_units, is_v = unit >= first_v;
    const long long words = is_v ? v_words : (is_q ? q_words : k_words);
    const unsigned* const weight = is_v ? nullptr : (is_q ? q_weight : k_weight);
    unsigned* row = qkv + blockIdx.y * row_words;
    if (is_v) {
        row += q_units * q_words + k_units * k_words + (unit - first_v) * v_words;
    } else {
        row += is_q ? unit * q_words : q_units * q_words + (unit - q_units) * k_words;
    }
    const float offset = is_v ? 1.0f : static_cast<float>(weight_offset);  // the weights of v are 1
    const float epsilon = static_cast<float>(is_v ? v_eps : eps);
    unsigned values[kHeldWords], weights[kHeldWords];
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) weights[i] = weight && lane + 32 * i < words ? weight[lane + 32 * i] : 0;
    grid_dependents_may_launch();
    grid_dependency_wait();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) values[i] = lane + 32 * i < words ? row[lane + 32 * i] : 0;
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) add_squares(Element{}, values[i], squares);
    for (long long word = lane + 32 * kHeldWords; word < words; word += 32) add_squares(Element{}, row[word], squares);
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    const float scale = norm_scale(squares, words, epsilon);
#pragma unroll
    for (int i = 0; i < kHeldWords; i++) {
        if (lane + 32 * i < words) row[lane + 32 * i] = scale_word(Element{}, values[i], weights[i], offset, scale);
    }
    for (long long word = lane + 32 * kHeldWords; word < words; word += 32)
        row[word] = scale_word(Element{}, row[word], weight ? weight[word] : 0, offset, scale);
}

// out = Activation(gate) * up. A row of gate_up is `words` words of gate, then as many of up. Grid: x along a row, y
// over rows.
template <class Element, class Activation>
__device__ __forceinline__ void gated_mul(const unsigned* gate_up, unsigned* out, long long words) {
    const long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = blockIdx.y;
    grid_dependents_may_launch();
    grid_dependency_wait();
    if (word >= words) return;
    const float2 gate = unpack(Element{}, gate_up[2 * row * words + word]),
                 up = unpack(Element{}, gate_up[(2 * row + 1) * words + word]);
    out[row * words + word] = pack(Element{}, {Activation::of(gate.x) * up.x, Activation::of(gate.y) * up.y});
}

// out = Activation(gate) * factor, with the activation rounded as if it were stored. Rows of `factor` are factor_words
// apart.
template <class Element, class Activation>
__device__ __forceinline__ void activated_mul(const unsigned* gate, const unsigned* factor, unsigned* out,
                                              long long words, long long factor_words) {
    const long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = blockIdx.y;
    grid_dependents_may_launch();
    grid_dependency_wait();
    if (word >= words) return;
    const float2 before = unpack(Element{}, gate[row * words + word]),
                 by = unpack(Element{}, factor[row * factor_words + word]),
                 activated = unpack(Element{}, pack(Element{}, {Activation::of(before.x), Activation::of(before.y)}));
    out[row * words + word] = pack(Element{}, {activated.x * by.x, activated.y * by.y});
}

// out[row][i] = in[row][order[i]]: the columns of rows in another order. Elements of 16 bits, `words` pairs of them in a
// row. Grid: x over rows, y along a row.
extern "C" __global__ void gather_columns(const unsigned short* in, const int* order, unsigned* out, long long words) {
    const long long word = static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x;
    const uint2 columns = word < words ? reinterpret_cast<const uint2*>(order)[word] : uint2{};
    grid_dependents_may_launch();  // this is short: the product of the rows can begin to read its weights
    grid_dependency_wait();
    if (word >= words) return;
    in += 2 * row * words;
    out[row * words + word] = in[columns.x] | static_cast<unsigned>(in[columns.y]) << 16;
}

#define NORM_PARAMETERS \
    unsigned *hidden, const unsigned *change, const unsigned *weight, unsigned *out, long long words, double eps, \
        double weight_offset
#define NORM_ARGUMENTS hidden, change, weight, out, words, eps, weight_offset
#define CHANGE_PARAMETERS \
    NORM_PARAMETERS, const unsigned *change_weight, double change_factor, const unsigned short *scale
#define CHANGE_ARGUMENTS {change_weight, static_cast<float>(change_factor), scale}

extern "C" __global__ void add_rms_norm_float16(NORM_PARAMETERS) { add_rms_norm<Float16, true>(NORM_ARGUMENTS, {}); }

extern "C" __global__ void add_rms_norm_bfloat16(NORM_PARAMETERS) { add_rms_norm<BFloat16, true>(NORM_ARGUMENTS, {}); }

extern "C" __global__ void add_changed_rms_norm_float16(CHANGE_PARAMETERS) {
    add_rms_norm<Float16, false>(NORM_ARGUMENTS, CHANGE_ARGUMENTS);
}

extern "C" __global__ void add_changed_rms_norm_bfloat16(CHANGE_PARAMETERS) {
    add_rms_norm<BFloat16, false>(NORM_ARGUMENTS, CHANGE_ARGUMENTS);
}

#define QK_PARAMETERS \
    unsigned *qkv, const unsigned *q_weight, const unsigned *k_weight, long long row_words, long long q_units, \
        long long k_units, long long v_units, long long q_words, long long k_words, long long v_words, double eps, \
        double weight_offset, double v_eps
#define QK_ARGUMENTS \
    qkv, q_weight, k_weight, row_words, q_units, k_units, v_units, q_words, k_words, v_words, eps, weight_offset, v_eps

extern "C" __global__ void qk_rms_norm_float16(QK_PARAMETERS) { qk_rms_norm<Float16>(QK_ARGUMENTS); }

extern "C" __global__ void qk_rms_norm_bfloat16(QK_PARAMETERS) { qk_rms_norm<BFloat16>(QK_ARGUMENTS); }

extern "C" __global__ void silu_mul_float16(const unsigned* gate_up, unsigned* out, long long words) {
    gated_mul<Float16, Silu>(gate_up, out, words);
}

extern "C" __global__ void silu_mul_bfloat16(const unsigned* gate_up, unsigned* out, long long words) {
    gated_mul<BFloat16, Silu>(gate_up, out, words);
}

extern "C" __global__ void gelu_tanh_mul_float16(const unsigned* gate_up, unsigned* out, long long words) {
    gated_mul<Float16, GeluTanh>(gate_up, out, words);
}

extern "C" __global__ void gelu_tanh_mul_bfloat16(const unsigned* gate_up, unsigned* out, long long words) {
    gated_mul<BFloat16, GeluTanh>(gate_up, out, words);
}

#define ACTIVATED_PARAMETERS \
    const unsigned *gate, const unsigned *factor, unsigned *out, long long words, long long factor_words
#define ACTIVATED_ARGUMENTS gate, factor, out, words, factor_words

extern "C" __global__ void activated_mul_silu_float16(ACTIVATED_PARAMETERS) {
    activated_mul<Float16, Silu>(ACTIVATED_ARGUMENTS);
}

extern "C" __global__ void activated_mul_silu_bfloat16(ACTIVATED_PARAMETERS) {
    activated_mul<BFloat16, Silu>(ACTIVATED_ARGUMENTS);
}

extern "C" __global__ void activated_mul_gelu_tanh_float16(ACTIVATED_PARAMETERS) {
    activated_mul<Float16, GeluTanh>(ACTIVATED_ARGUMENTS);
}

extern "C" __global__ void activated_mul_gelu_tanh_bfloat16(ACTIVATED_PARAMETERS) {
    activated_mul<BFloat16, GeluTanh>(ACTIVATED_ARGUMENTS);
}
