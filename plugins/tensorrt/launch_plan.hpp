// The kernel and the number of blocks of a call. It depends on shapes alone: lengths are on the device.
//
// As in trt_kvcache/kernels/decode_plan.py and prefill_plan.py, which say what was measured. A test compares both.
#pragma once

#include <cstdint>

#include "attention_kernels.hpp"

namespace trt_kvcache {

struct AttentionShape {
    int64_t batch, width, tokens;  // slots, new tokens of a slot, rows of a slot in the cache
    int64_t num_kv_heads, group, head_dim;
    bool quantized;

    int64_t rows() const { return width * group; }  // of a K/V head
};

struct DecodePlan {
    bool few;           // the kernels for a few new tokens
    int32_t row_index;  // in kDecodeRows
    int64_t blocks, splits_per_head, heads_per_block;
    int32_t warps, shared_nbytes;
};

// Assignment of row blocks to blocks, by the numbers of plugins/attention/prefill_params.cuh.
enum Order : int64_t { kFromLast = 0, kSplit = 1, kInPairs = 2 };

struct PrefillPlan {
    PrefillVariant variant;
    int64_t row_blocks, blocks;
    Order order;
    bool appends;  // otherwise another launch appends the new tokens first
    int32_t warps, shared_nbytes;

    bool splits() const { return order == kSplit; }
};

// Plans a launch of a decode kernel; false if a prefill kernel is to be taken.
bool plan_decode(AttentionKernels const& kernels, AttentionShape const& shape, int64_t multiprocessors,
                 DecodePlan& plan);
PrefillPlan plan_prefill(AttentionKernels const& kernels, AttentionShape const& shape, int64_t multiprocessors);

// The workspace: partial results of the blocks of a launch. Flagged rows, for other blocks, come first. It is sized for
// this number of multiprocessors, since an engine may run on another GPU than it was built on.
constexpr int64_t kMaxMultiprocessors = 256;
int64_t row_nbytes_of_partials(int64_t head_dim);
int64_t flagged_rows(int64_t multiprocessors, int64_t group);
int64_t workspace_nbytes(int64_t group, int64_t head_dim);

// Rows of flagged vectors that a launch uses; they must be zeros before it.
int64_t flagged_rows_of(DecodePlan const& plan, AttentionShape const& shape, int64_t multiprocessors);
int64_t flagged_rows_of(PrefillPlan const& plan, AttentionKernels const& kernels);

}  // namespace trt_kvcache
