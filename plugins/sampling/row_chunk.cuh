// The tokens of a row that a block works on.
#pragma once

#include "sampling/block_scan.cuh"
#include "sampling/weights.cuh"

constexpr int kTokensAtOnce = 5;

// The logits of a block, after bias and penalties, if there is room for them.
__device__ __forceinline__ float* kept_logits() {
    DYNAMIC_SHARED(float, kept);
    return kept;
}

// Tokens from `begin` on are divided into runs of equal length, one for each warp: see run_of_warp(). Logits that are
// kept are in shared memory.
template <bool kIsKept>
struct RowChunk {
    const float* logits;  // of the row, or of this chunk if they are kept
    int begin, end;
    float largest, scale;  // the largest logit of the row, and RowParams::scale: see class_of()

    __device__ __forceinline__ unsigned class_at(float logit) const { return class_of(largest, logit, scale); }

    // -inf for tokens that do not exist.
    __device__ __forceinline__ float logit_at(int token, bool exists) const {
        return exists ? (kIsKept ? kept_logits()[token - begin] : logits[token]) : __uint_as_float(0xFF800000u);
    }
};

// The tokens of each warp among `count` ones.
__device__ __forceinline__ int run_of_warp(int count) { return (count + kRowThreads - 1) / kRowThreads * 32; }

// Visits the tokens of a thread from `from` to `to`, kAtOnce at a time: one = load(token, exists) of each, then
// prepare() all of them, then visit(token, one, exists). All lanes of a warp have as many calls, so some tokens do not
// exist. Slow code that does not depend on other lanes belongs into load(), where it overlaps.
template <int kAtOnce = kTokensAtOnce, class Load, class Prepare, class Visit>
__device__ __forceinline__ void for_each_token(int from, int to, Load load, Prepare prepare, Visit visit) {
    const int length = run_of_warp(to - from), first_of_run = from + static_cast<int>(threadIdx.x) / 32 * length,
              lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < length; first += 32 * kAtOnce) {
        decltype(load(0, false)) loaded[kAtOnce];
        const int token = first_of_run + first + lane, end = min(first_of_run + length, to);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) loaded[i] = load(token + 32 * i, token + 32 * i < end);
        prepare(loaded);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) visit(token + 32 * i, loaded[i], token + 32 * i < end);
    }
}
template <int kAtOnce = kTokensAtOnce, class Load, class Visit>
__device__ __forceinline__ void for_each_token(int from, int to, Load load, Visit visit) {
    for_each_token<kAtOnce>(
        from, to, load, [](auto&) {}, [&](int, const decltype(load(0, false))& one, bool) { visit(one); });
}
