// Log-probabilities of chosen tokens, and the most likely tokens with theirs. Launched by
// trt_kvcache/kernels/sampling_kernels.py. Grid: x the blocks of a row, y the rows. The last block of a row to finish
// merges the results of all of them.

#include "attention/math.cuh"
#include "dependent_launch.cuh"
#include "sampling/block_scan.cuh"
#include "sampling/row_barrier.cuh"
#include "sampling/rows.cuh"
#include "sampling/weights.cuh"
#include "shared_memory.cuh"

constexpr float kLog2E = 1.44269504f;
// Sums of probabilities are integers, so they do not depend on their order.
constexpr float kOne = 0x1p40f;

// Result of a block, followed by its most likely tokens as ranked().
struct ChunkSum {
    float largest;
    unsigned unused;
    Number sum;  // of exp(logit - largest), times kOne
};

// Ranked tokens, the largest first; 0 after the last one. For all threads of the block.
template <class RankedAt>
class Descending {
    int begin, end;
    RankedAt ranked_at;
    Number best;  // of the tokens of this thread that have not come yet

    __device__ __forceinline__ Number best_below(Number limit) const {
        Number found = 0;
        for (int i = begin + threadIdx.x; i < end; i += kRowThreads) {
            const Number value = ranked_at(i);
            if (value < limit) found = max(found, value);
        }
        return found;
    }

public:
    __device__ __forceinline__ Descending(int begin, int end, RankedAt ranked_at)
        : begin(begin), end(end), ranked_at(ranked_at), best(best_below(~0ull)) {}

    // Only the thread that had the token reads its tokens again.
    __device__ __forceinline__ Number next() {
        const Number found = block_max(best);
        if (found && found == best) best = best_below(found);
        return found;
    }
};

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * kLog2E); }

// out [rows, 1 + 2 * top], 32 bits each: the log-probability of the token, then `top` ids (-1: none), then the
// log-probabilities of these. Unchanged for rows without the request. workspace [rows, words_of_row], at least 1 + blocks * (2 + top) words of 64 bits
// each: the first is 0 between two launches.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    token_logprobs(const float* all_logits, long long row_stride, long long vocab, const RowParams* params,
                   const RowResult* results, unsigned* out, long long num_top, Number* workspace,
                   long long words_of_row) {
    SHARED_ARRAY(unsigned, arrived, 1);
    const long long row = blockIdx.y;
    grid_dependency_wait();
    if ((params[row].flags & (kActive | kLogprobs)) != (kActive | kLogprobs) || results[row].error) return;
    const float* const logits = all_logits + row * row_stride;
    const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x),
              top = static_cast<int>(num_top), of_block = 2 + top;
    const int size = (static_cast<int>(vocab) + blocks - 1) / blocks;
    const int begin = min(static_cast<int>(vocab), rank * size), end = min(static_cast<int>(vocab), begin + size);
    Number *const mine = workspace + row * words_of_row, *const found = mine + 1 + rank * of_block;

    Descending tokens(begin, end, [&](int token) { return ranked(logits[token], token); });
    float largest = 0;
    for (int i = 0; i < max(top, 1); i++) {
        const Number next = tokens.next();
        if (i == 0) largest = logit_of_ranked(next);
        if (threadIdx.x == 0 && i < top) found[2 + i] = next;
    }
    Number sum = 0;
    if (is_finite(largest)) {
        for (int token = begin + threadIdx.x; token < end; token += kRowThreads) {
            sum += static_cast<Number>(__fmul_rn(exp_approx(logits[token] - largest), kOne));
        }
    }
    sum = block_prefix_sum(sum).total;
    if (threadIdx.x == 0) {
        *reinterpret_cast<ChunkSum*>(found) = {largest, 0, sum};
        arrived[0] = add_acq_rel(reinterpret_cast<unsigned*>(mine), 1);
    }
    __syncthreads();
    if (static_cast<int>(arrived[0]) != blocks - 1) return;

    if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(mine) = 0;
    const auto sum_of = [&](int block) { return *reinterpret_cast<const ChunkSum*>(mine + 1 + block * of_block); };
    float highest = sum_of(0).largest;
    for (int block = 1; block < blocks; block++) highest = max(highest, sum_of(block).largest);
    double total = 0;
    for (int block = 0; block < blocks; block++) {
        const ChunkSum one = sum_of(block);
        if (one.sum) total += static_cast<double>(one.sum) * exp_approx(one.largest - highest);
    }
    const double logarithm = highest + log(total / kOne);
    unsigned* const of_row = out + row * (1 + 2 * top);
    if (threadIdx.x == 0) of_row[0] = __float_as_uint(static_cast<float>(logits[results[row].token] - logarithm));
    Descending merged(0, blocks * top, [&](int at) { return mine[1 + at / top * of_block + 2 + at % top]; });
    for (int i = 0; i < top; i++) {
        const Number next = merged.next();
        if (threadIdx.x == 0) {
            of_row[1 + i] = next ? static_cast<unsigned>(token_of_ranked(next)) : ~0u;
            of_row[1 + top + i] = __float_as_uint(next ? static_cast<float>(logit_of_ranked(next) - logarithm) : 0);
        }
    }
}
