// The memory through which the blocks of a row exchange results. trt_kvcache/kernels/sampling_workspace.py has the same
// sizes.
#pragma once

#include "sampling/block_scan.cuh"
#include "sampling/weights.cuh"

// Classes are counted in two steps: by their high bits, then those of one such bin by their low bits.
constexpr int kFineBits = 11, kFineBins = 1 << kFineBits, kCoarseBins = kClasses >> kFineBits;
constexpr int kCoarseBits = 11, kNoCoarseBin = (1 << kCoarseBits) - 1;
static_assert(kCoarseBins <= kNoCoarseBin, "a number that no coarse bin has");
constexpr int kMaxBlocksOfRow = 128;
constexpr int kFineSlots = 5, kFineAtOnce = 3;  // bins whose classes are counted: in all, and in one pass

// Digits of a key_of(), the highest first: where each begins, and how many bits it has.
constexpr int kKeyDigits = 5;
__device__ __forceinline__ int shift_of_digit(int digit) { return digit < 2 ? 41 - 11 * digit : 40 - 10 * digit; }
__device__ __forceinline__ int bits_of_digit(int digit) { return digit < 2 ? 11 : 10; }

// Everything is 0 between two launches, except the first two words and the slots. Bins are read 16 bytes at a time.
struct RowWorkspace {
    unsigned at_barriers, exchanges;  // row_barrier.cuh, row_exchange.cuh
    Number likely_weight;             // of all tokens that min_p keeps
    float4 slots[2][kMaxBlocksOfRow];
    Weight coarse_weight[kCoarseBins];   // of the tokens in a bin
    unsigned coarse_count[kCoarseBins];  // only where top_k asks for it
    // for the borders of top_k and top_p, and for the token, of which two are guessed first
    unsigned fine_count[kFineSlots][kFineBins];
    unsigned key_count[kKeyDigits][kFineBins];  // tokens of the last class of top_k, by digits of key_of()
};
constexpr int kRowWorkspaceBytes = 99088;
static_assert(sizeof(RowWorkspace) == kRowWorkspaceBytes, "as the host allocates");
