// The router of a routed MLP for a few rows: its logits, and the experts that it chooses, with their weights. Launched by
// trt_kvcache/kernels/router_kernels.py. All sums are float32.

#include "attention/element.cuh"
#include "dependent_launch.cuh"
#include "shared_memory.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = 8;
// of four weights, that a thread loads before it waits for the rows
constexpr int kHeldQuads = 8;

template <class Element>
__device__ __forceinline__ void add_products(Element, float& sum, uint2 x, float4 weight) {
    const float2 low = unpack(Element{}, x.x), high = unpack(Element{}, x.y);
    sum += low.x * weight.x + low.y * weight.y + high.x * weight.z + high.y * weight.w;
}

// logits[row, expert] = x[row] . weight[expert] + bias[expert]. Grid: x over experts; y over kRows rows each.
template <class Element>
__device__ __forceinline__ void router_logits(const uint2* x, const float4* weight, const float* bias, float* logits,
                                              long long rows, long long quads) {
    SHARED_ARRAY(float, sums, kRows* kWarps);
    const int expert = blockIdx.x, experts = gridDim.x, warp = threadIdx.x / 32;
    const long long first = static_cast<long long>(blockIdx.y) * kRows;
    const int count = static_cast<int>(min(static_cast<long long>(kRows), rows - first));
    weight += expert * quads;
    float4 held[kHeldQuads];
#pragma unroll
    for (int i = 0; i < kHeldQuads; i++) {
        const int quad = threadIdx.x + i * kThreads;
        held[i] = quad < quads ? weight[quad] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    grid_dependents_may_launch();
    grid_dependency_wait();
    for (int row = 0; row < count; row++) {
        const uint2* const from = x + (first + row) * quads;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kHeldQuads; i++) {
            const int quad = threadIdx.x + i * kThreads;
            if (quad < quads) add_products(Element{}, sum, from[quad], held[i]);
        }
        for (long long quad = threadIdx.x + kHeldQuads * kThreads; quad < quads; quad += kThreads) {
            add_products(Element{}, sum, from[quad], weight[quad]);
        }
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (threadIdx.x % 32 == 0) sums[row * kWarps + warp] = sum;
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= count) return;
    float sum = bias ? bias[expert] : 0.0f;
    for (int part = 0; part < kWarps; part++) sum += sums[row * kWarps + part];
    logits[(first + row) * experts + expert] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    router_logits_float16(const uint2* x, const float4* weight, const float* bias, float* logits, long long rows,
                          long long quads) {
    router_logits<Float16>(x, weight, bias, logits, rows, quads);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    router_logits_bfloat16(const uint2* x, const float4* weight, const float* bias, float* logits, long long rows,
                           long long quads) {
    router_logits<BFloat16>(x, weight, bias, logits, rows, quads);
}

// Experts of a row: a lane has every 32nd of them. trt_kvcache/kernels/router_kernels.py has the limits too.
constexpr int kExpertsPerLane = 16, kMaxChoices = 32;

__device__ __forceinline__ float warp_max(float value) {
    for (int lanes = 16; lanes; lanes /= 2) {
        const float other = __shfl_xor_sync(~0u, value, lanes);
        value = other > value ? other : value;
    }
    return value;
}
__device__ __forceinline__ float warp_sum(float value) {
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
}

// A number that is greater for a greater score, and among equal ones for a lower expert; no score is -0. It is never 0,
// so that each expert can be chosen, also with a score of NaN.
__device__ __forceinline__ unsigned long long rank_of(float score, int expert) {
    const unsigned bits = __float_as_uint(score);
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<unsigned>(expert);
}

struct Choice {
    const float* bias;  // of each expert, which its score has when experts are chosen; null for none
    int choices;        // of a row
    bool softmax, renormalise;
    float sum_epsilon, factor;
};

// The `choices` highest scores of a row. Grid: a block of one warp for each row.
__device__ __forceinline__ void choose_of_row(const float* logits, int* chosen, float* weights, int experts,
                                              const Choice& choice) {
    constexpr unsigned long long kNone = 0;
    const int lane = threadIdx.x;
    float scores[kExpertsPerLane];
    unsigned long long ranks[kExpertsPerLane];
    float biases[kExpertsPerLane];
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) {
        const int expert = lane + 32 * i;
        biases[i] = choice.bias && expert < experts ? choice.bias[expert] : 0.0f;
    }
    grid_dependents_may_launch();
    grid_dependency_wait();
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) {
        const int expert = lane + 32 * i;
        scores[i] = expert < experts ? logits[expert] : -INFINITY;
        highest = scores[i] > highest ? scores[i] : highest;
    }
    if (choice.softmax) {
        highest = warp_max(highest);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; i++) {  // 0 behind the last expert
            scores[i] = expf(scores[i] - highest);
            sum += scores[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; i++) scores[i] /= sum;
    } else {
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; i++) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    }
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) {
        const int expert = lane + 32 * i;
        ranks[i] = expert < experts ? rank_of(scores[i] + biases[i], expert) : kNone;
    }
    int own_expert = 0;  // of the choice with the number of this lane
    float own_score = 0.0f, sum = 0.0f;
    for (int number = 0; number < choice.choices; number++) {
        unsigned long long best = kNone;
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; i++) {
            if (ranks[i] > best) best = ranks[i], score = scores[i];
        }
        const unsigned long long own_best = best;
        for (int lanes = 16; lanes; lanes /= 2) {
            const unsigned long long other = __shfl_xor_sync(~0u, best, lanes);
            best = other > best ? other : best;
        }
        const int expert = static_cast<int>(~static_cast<unsigned>(best));
        score = __shfl_sync(~0u, score, expert % 32);
        sum += score;
        if (lane == number) own_expert = expert, own_score = score;
        if (own_best != best) continue;
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; i++) ranks[i] = ranks[i] == best ? kNone : ranks[i];
    }
    if (lane >= choice.choices) return;
    const float divisor = choice.renormalise ? sum + choice.sum_epsilon : 1.0f;
    chosen[lane] = own_expert;
    weights[lane] = own_score / divisor * choice.factor;
}

extern "C" __global__ void __launch_bounds__(32)
    choose_experts(const float* logits, const float* choice_bias, int* chosen, float* weights, long long experts,
                   long long choices, long long softmax, long long renormalise, double sum_epsilon, double factor) {
    const Choice choice{choice_bias,      static_cast<int>(choices),       softmax != 0,
                        renormalise != 0, static_cast<float>(sum_epsilon), static_cast<float>(factor)};
    choose_of_row(logits + blockIdx.x * experts, chosen + blockIdx.x * choices, weights + blockIdx.x * choices,
                  static_cast<int>(experts), choice);
}
