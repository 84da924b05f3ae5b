// The memory in which the blocks of a row meet. trt_kvcache/kernels/sampling_workspace.py has the same sizes.
#pragma once

#include "sampling/block_scan.cuh"
#include "sampling/weights.cuh"

// Classes are counted in two steps: by their high bits, then those of one such bin by their low bits.
constexpr int kFineBits = 11, kFineBins = 1 << kFineBits, kCoarseBins = kClasses >> kFineBits;
constexpr int kMaxBlocksOfRow = 128;

// Everything is 0 between two launches, except `generation` and the slots. A slot belongs to one block, which alone writes it.
struct RowWorkspace {
    unsigned barrier[2];
    int last_tie, unused;
    Number best[2][kMaxBlocksOfRow], best_edited[2][kMaxBlocksOfRow];  // taking turns, as a row may take one barrier only
    Number ties[kMaxBlocksOfRow], sums[kMaxBlocksOfRow];
    Number likely_weight;               // of all tokens that min_p keeps
    Weight coarse_weight[kCoarseBins];  // of the tokens in a bin
    unsigned coarse_count[kCoarseBins];
    unsigned fine_count[3][kFineBins];  // for the borders of top_k and top_p, and for the token
    unsigned order_count[3][kFineBins]; // tokens of the last class of top_k, by digits of their logits
};
constexpr int kRowWorkspaceBytes = 68376;
static_assert(sizeof(RowWorkspace) == kRowWorkspaceBytes, "as the host allocates");
