// The tokens of a row that a block works on.
#pragma once

#include "sampling/block_scan.cuh"

constexpr int kTokensAtOnce = 5;  // that a thread loads before it looks at the first; 9 are a little slower on an H200

// Tokens from `begin` on are divided into runs of equal length, one for each warp: see run().
struct RowChunk {
    const float* logits;
    int begin, end;

    // The tokens of each warp among `count` ones.
    static __device__ __forceinline__ int run(int count) { return (count + kRowThreads - 1) / kRowThreads * 32; }

    // Calls visit(token, logit) with the same number of calls for all lanes of a warp; with -inf for tokens that do not exist.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for_each(begin, end, visit);
    }
    template <class Visit>
    __device__ __forceinline__ void for_each(int from, int to, Visit visit) const {
        for_each(from, to, [&](int token, bool exists) { return exists ? logits[token] : __uint_as_float(0xFF800000u); }, visit);
    }
    // With what load(token, exists) returns in place of the logit.
    template <class Load, class Visit>
    __device__ __forceinline__ void for_each(int from, int to, Load load, Visit visit) const {
        const int length = run(to - from), first_of_run = from + static_cast<int>(threadIdx.x) / 32 * length, lane = threadIdx.x % 32;
        for (int first = 0; first < length; first += 32 * kTokensAtOnce) {
            decltype(load(0, false)) loaded[kTokensAtOnce];
#pragma unroll
            for (int i = 0; i < kTokensAtOnce; i++) {
                const int at = first + 32 * i, token = first_of_run + at + lane;
                loaded[i] = load(token, at < length && token < to);
            }
#pragma unroll
            for (int i = 0; i < kTokensAtOnce; i++) {
                if (first + 32 * i < length) visit(first_of_run + first + 32 * i + lane, loaded[i]);
            }
        }
    }
};
