// Host updates of single rows of the sampler. Launched by trt_kvcache/kernels/sampling_kernels.py.

#include "argument_lists.cuh"
#include "sampling/rows.cuh"

static_assert(sizeof(RowParams) == 64, "eight words");

// The parameters of a row, as words of 64 bits. One block.
extern "C" __global__ void set_row(long long* params, long long row, LIST_8(long long word)) {
    const long long words[] = {LIST_8(word)};
    if (threadIdx.x < 8) params[row * 8 + threadIdx.x] = select_value(words, threadIdx.x);
}

// Marks tokens of the prompt (kInPrompt), or adds `more` uses of generated tokens. uses [vocab].
extern "C" __global__ void count_tokens(unsigned* uses, const int* tokens, long long count, long long in_prompt,
                                        long long more) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    if (in_prompt) {
        atomicOr(uses + tokens[i], kInPrompt);
    } else {
        atomicAdd(uses + tokens[i], static_cast<unsigned>(more));
    }
}

// bias[tokens[i]] = values[i]; no token comes twice.
extern "C" __global__ void set_bias(float* bias, const int* tokens, const float* values, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) bias[tokens[i]] = values[i];
}
