// The router of a routed MLP for a few rows: its logits, and the experts that it chooses, with their weights. Launched by
// trt_kvcache/kernels/router_kernels.py. All sums are float32.

#include "attention/element.cuh"
#include "block_reduce.cuh"
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

// A thread for each expert. trt_kvcache/kernels/router_kernels.py has the limit too.
constexpr int kMaxExperts = 512;

// A number that is greater for a greater score, and among equal ones for a lower expert; no score is -0. Those of experts
// differ, also where a score is NaN.
__device__ __forceinline__ unsigned long long rank_of(float score, int expert) {
    const unsigned bits = __float_as_uint(score);
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<unsigned>(expert);
}

// True if an expert is in one of the groups with the highest sums of their two highest scores. A thread for each expert;
// `highest` has room for two scores of each group.
__device__ __forceinline__ bool in_chosen_group(const unsigned long long* ranks, float* highest, int expert,
                                                float score, int experts, int groups, int groups_per_token) {
    const int size = experts / groups, group = expert / size;
    const bool exists = expert < experts;
    int place = 0;
    if (exists) {
        for (int i = 0; i < size; i++) place += ranks[group * size + i] > ranks[expert];
        if (place < 2) highest[2 * group + place] = score;
    }
    __syncthreads();
    if (!exists) return false;
    const unsigned long long rank = rank_of(highest[2 * group] + highest[2 * group + 1], group);
    int before = 0;
    for (int other = 0; other < groups; other++) {
        before += rank_of(highest[2 * other] + highest[2 * other + 1], other) > rank;
    }
    return before < groups_per_token;
}

// The `choices` highest scores of a row, of experts in `groups_per_token` groups, from the highest one on: an expert has
// the place that as many have before it as have a higher rank. Grid: a block for each row, with a thread for each expert,
// in whole warps.
extern "C" __global__ void __launch_bounds__(kMaxExperts)
    choose_experts(const float* logits, const float* choice_bias, const float* expert_scale, int* chosen,
                   float* weights, long long experts, long long choices, long long groups, long long groups_per_token,
                   long long softmax, long long renormalise, double sum_epsilon, double factor) {
    SHARED_ARRAY(float, of_warps, 2 * kMaxExperts / 32);
    SHARED_ARRAY(unsigned long long, ranks, kMaxExperts);
    SHARED_ARRAY(float, chosen_scores, kMaxExperts);
    const int expert = threadIdx.x;
    const bool exists = expert < experts;
    const float bias = choice_bias && exists ? choice_bias[expert] : 0.0f;
    const float scale = expert_scale && exists ? expert_scale[expert] : 1.0f;
    grid_dependency_wait();
    const float none = __uint_as_float(0xFF800000u);  // -infinity
    const float logit = exists ? logits[blockIdx.x * experts + expert] : none;
    float score;
    if (softmax) {
        const float highest = block_reduce(logit, none, of_warps, Highest{});
        score = exists ? expf(logit - highest) : 0.0f;
        score /= block_reduce(score, 0.0f, of_warps + kMaxExperts / 32, Sum{});
    } else {
        score = 1.0f / (1.0f + expf(-logit));
    }
    unsigned long long rank = rank_of(score + bias, expert);
    if (exists) ranks[expert] = rank;
    __syncthreads();
    if (groups > 1) {
        if (!in_chosen_group(ranks, chosen_scores, expert, score + bias, experts, groups, groups_per_token)) rank = 0;
        if (exists) ranks[expert] = rank;
        __syncthreads();
    }
    int place = 0;
#pragma unroll 8
    for (int other = 0; other < experts; other++) place += ranks[other] > rank;
    const bool is_chosen = exists && place < choices;
    if (is_chosen) {
        chosen[blockIdx.x * choices + place] = expert;
        chosen_scores[place] = score;
    }
    __syncthreads();
    // Not earlier: the blocks of the experts, one for each multiprocessor, would be placed while this block holds one of
    // them, and take up to 1.5 times as long.
    grid_dependents_may_launch();
    if (!is_chosen) return;
    float divisor = 1.0f;
    if (renormalise) {
        divisor = 0.0f;
        for (int other = 0; other < choices; other++) divisor += chosen_scores[other];
        divisor += static_cast<float>(sum_epsilon);
    }
    weights[blockIdx.x * choices + place] = score / divisor * static_cast<float>(factor) * scale;
}
