// The launch plans of the plugin library, for a test that compares them with those of Python.
#include "launch_plan.hpp"

using namespace trt_kvcache;

// Sizes of a call in; out: 1 for a decode kernel, and the launch: see tests/plugin_library/test_launch_plan.py.
extern "C" __attribute__((visibility("default"))) void plan_of(int32_t arch, char const* dtype, char const* kv_dtype,
                                                               int64_t const* sizes, int64_t multiprocessors,
                                                               int64_t* plan) {
    AttentionShape const shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], kv_dtype != nullptr};
    AttentionKernels const& kernels =
        find_kernels(arch, 227 << 10, dtype, static_cast<int32_t>(shape.head_dim), kv_dtype);
    DecodePlan decode;
    if (plan_decode(kernels, shape, multiprocessors, decode)) {
        int64_t const flagged = flagged_rows_of(decode, shape, multiprocessors);
        int64_t const found[] = {1,
                                 decode.few,
                                 kDecodeRows[decode.row_index],
                                 decode.warps,
                                 decode.shared_nbytes,
                                 decode.blocks,
                                 decode.splits_per_head,
                                 decode.heads_per_block,
                                 flagged * row_nbytes_of_partials(shape.head_dim)};
        for (int64_t const one : found) *plan++ = one;
    } else {
        PrefillPlan const prefill = plan_prefill(kernels, shape, multiprocessors);
        int64_t const flagged = flagged_rows_of(prefill, kernels);
        int64_t const found[] = {0,
                                 prefill.variant,
                                 prefill.row_blocks,
                                 prefill.blocks,
                                 prefill.order,
                                 prefill.appends,
                                 prefill.warps,
                                 prefill.shared_nbytes,
                                 flagged * row_nbytes_of_partials(shape.head_dim)};
        for (int64_t const one : found) *plan++ = one;
    }
}

extern "C" __attribute__((visibility("default"))) int64_t workspace_of(int64_t group, int64_t head_dim) {
    return workspace_nbytes(group, head_dim);
}
