// The tokens of a row that a block works on.
#pragma once

#include "sampling/block_scan.cuh"
#include "sampling/weights.cuh"

constexpr int kTokensAtOnce = 2;

// Tokens from `begin` on are divided into runs of equal length, one for each warp: see run().
struct RowChunk {
    const float* logits;
    int begin, end;
    float largest, scale;  // the largest logit of the row, and RowParams::scale: see class_of()

    // The tokens of each warp among `count` ones.
    static __device__ __forceinline__ int run(int count) { return (count + kRowThreads - 1) / kRowThreads * 32; }

    __device__ __forceinline__ unsigned class_at(float logit) const { return class_of(largest, logit, scale); }

    // -inf for tokens that do not exist.
    __device__ __forceinline__ float logit_at(int token, bool exists) const { return exists ? logits[token] : __uint_as_float(0xFF800000u); }

    // Calls visit(token, what load(token, exists) gave), with the same number of calls for all lanes of a warp. A thread calls load() kAtOnce
    // times before it visits the first: what is slow, and does not depend on other lanes, belongs there.
    template <int kAtOnce = kTokensAtOnce, class Load, class Visit>
    __device__ __forceinline__ void for_each(int from, int to, Load load, Visit visit) const {
        const int length = run(to - from), first_of_run = from + static_cast<int>(threadIdx.x) / 32 * length, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int first = 0; first < length; first += 32 * kAtOnce) {
            decltype(load(0, false)) loaded[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int at = first + 32 * i, token = first_of_run + at + lane;
                loaded[i] = load(token, at < length && token < to);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                if (first + 32 * i < length) visit(first_of_run + first + 32 * i + lane, loaded[i]);
            }
        }
    }
};
