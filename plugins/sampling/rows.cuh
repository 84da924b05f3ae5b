// Parameters and results of a row. trt_kvcache/kernels/sampling_rows.py has the same fields.
#pragma once

constexpr long long kActive = 1, kGreedy = 2, kPenalised = 4, kBiased = 8, kLogprobs = 16;

struct RowParams {
    long long flags;
    unsigned long long seed, counter;  // the counter is advanced by each token
    long long top_k;                   // 0: all
    unsigned long long top_p;          // times 2^53, rounded up; 0: all
    unsigned long long min_weight;     // tokens of a smaller weight are dropped
    float scale;                       // 2^16 * log2(e) / temperature
    float repetition, frequency, presence;
};

constexpr int kNoError = 0, kBadLogits = 1, kNothingLeft = 2;

struct RowResult {
    int token, error;  // the token is -1 with an error
    int place;         // with an error: of the largest logit
    float logit;       // with an error: the largest logit
};

// Number of times that a token was generated. The highest bit: it is in the prompt.
constexpr unsigned kInPrompt = 0x80000000u;

// The logit after bias and penalties: the operations of LogitsEdits. Few tokens have any.
__device__ __noinline__ float edited_logit(float logit, float bias, unsigned uses, float repetition, float frequency,
                                           float presence) {
    logit = __fadd_rn(logit, bias);
    if (!uses) return logit;
    if (repetition != 1.0f) logit = logit < 0 ? __fmul_rn(logit, repetition) : __fdiv_rn(logit, repetition);
    const unsigned count = uses & ~kInPrompt;
    if (count) {
        if (frequency != 0.0f) logit = __fsub_rn(logit, __fmul_rn(frequency, static_cast<float>(count)));
        if (presence != 0.0f) logit = __fsub_rn(logit, presence);
    }
    return logit;
}
