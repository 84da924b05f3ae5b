#include "launch_plan.hpp"

#include <algorithm>
#include <iterator>

namespace trt_kvcache {
namespace {

// The constants of trt_kvcache/kernels/attention_workspace.py.
constexpr int64_t kMaxDecodeBlocksPerSM = 2, kMaxFewRows = 32, kMaxPrefillRowsPerSM = 128;

// The constants of trt_kvcache/kernels/prefill_plan.py.
constexpr double kWholeBlocksPerSM = 3, kFewerWholeBlocksPerSM = 1.5, kMinSpareShare = 0.25;
constexpr int64_t kLongCache = 32, kLongCacheKeysPerSM = 1536;
constexpr int64_t kMinWarpgroupHeadDim = 128;
constexpr int64_t kShortCacheNbytesPerSM = 64 * 1024;
constexpr int64_t kElementNbytes = 2;

int64_t ceil_divide(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

// True if a few new tokens are faster in row blocks than in a decode kernel that has room for them.
bool prefers_row_blocks(AttentionKernels const& kernels, AttentionShape const& shape, int64_t multiprocessors) {
    if (shape.width == 1 || shape.quantized || !kernels.prefill[k64].warpgroups) return false;
    int64_t const nbytes = shape.batch * 2 * shape.num_kv_heads * shape.tokens * shape.head_dim * kElementNbytes;
    return nbytes <= kShortCacheNbytesPerSM * multiprocessors && 2 * shape.rows() > kernels.few.max_rows;
}

PrefillPlan plan_of(PrefillVariant variant, AttentionKernels const& kernels, AttentionShape const& shape,
                    int64_t multiprocessors) {
    PrefillTiles const& tiles = kernels.prefill[variant];
    int64_t const row_blocks = ceil_divide(shape.rows(), tiles.rows);
    int64_t const total = shape.batch * shape.num_kv_heads * row_blocks;
    int64_t const resident = multiprocessors * tiles.blocks_per_sm;
    int64_t const useful = total * (ceil_divide(shape.tokens, tiles.tile_keys * tiles.min_tiles) + 1);
    int64_t blocks = std::min({resident, useful, std::max<int64_t>(total, tiles.max_splits)});
    Order order = kSplit;
    if (variant == kWhole || total > resident) {
        blocks = total;
        order = kFromLast;
    } else if (tiles.blocks_per_sm == 2 && resident < (1 + kMinSpareShare) * total) {
        blocks = total;
        order = kInPairs;
    } else if (blocks <= total) {
        order = kFromLast;
    }
    // If all blocks are resident at once, each multiprocessor gets its share of them.
    int32_t const least = order == kFromLast ? 0 : tiles.spread_nbytes;
    bool const appends = !shape.quantized && variant <= k64;
    return {variant, row_blocks, blocks, order, appends, tiles.warps, std::max(tiles.shared_nbytes, least)};
}

}  // namespace

bool plan_decode(AttentionKernels const& kernels, AttentionShape const& shape, int64_t multiprocessors,
                 DecodePlan& plan) {
    if (prefers_row_blocks(kernels, shape, multiprocessors)) return false;
    bool const few = shape.width > 1;
    DecodeTiles const& tiles = few ? kernels.few : kernels.decode;
    if (tiles.warps == 0) return false;  // of large heads there are prefill kernels alone
    if (few && (shape.width > kMaxFewTokens || shape.rows() > tiles.max_rows)) return false;
    auto const compiled = std::find_if(std::begin(kDecodeRows), std::end(kDecodeRows),
                                       [&](int32_t rows) { return shape.rows() <= rows; });
    auto const index = static_cast<int32_t>(compiled - std::begin(kDecodeRows));
    int64_t const heads = shape.batch * shape.num_kv_heads;
    // All blocks that can be resident at once, but none that would have fewer tiles than pay for it.
    int64_t const useful_blocks = heads * ceil_divide(shape.tokens, tiles.tile_tokens * tiles.min_tiles_per_block);
    int64_t const blocks = std::min(multiprocessors * tiles.blocks_per_sm, useful_blocks);
    plan = {few, index, blocks, blocks / heads, ceil_divide(heads, blocks), tiles.warps, tiles.shared_nbytes[index]};
    return true;
}

PrefillPlan plan_prefill(AttentionKernels const& kernels, AttentionShape const& shape, int64_t multiprocessors) {
    auto const plan = [&](PrefillVariant variant) { return plan_of(variant, kernels, shape, multiprocessors); };
    PrefillTiles const& wide_tiles = kernels.prefill[kWide];
    PrefillPlan const wide = plan(kWide);
    int64_t const heads = shape.batch * shape.num_kv_heads, row_blocks = heads * wide.row_blocks;
    // A cache is long by comparison with the new tokens, and with the GPU.
    bool const is_long =
        shape.tokens >= kLongCache * shape.width && shape.tokens * row_blocks >= kLongCacheKeysPerSM * multiprocessors;
    if (shape.width <= kMaxAppendedWidth) {
        PrefillVariant variant = k64;
        if (shape.rows() <= 16) {
            variant = k16;
        } else if (shape.rows() <= 32 && !(kernels.prefill[k64].warpgroups && shape.head_dim >= kMinWarpgroupHeadDim)) {
            variant = k32;
        }
        PrefillPlan const few = plan(variant);
        bool const fits = shape.width <= kernels.prefill[variant].tile_keys && (few.row_blocks == 1 || few.splits());
        bool const shared = !shape.quantized && few.blocks >= 2 * heads * few.row_blocks;
        bool const in_wide =
            is_long && few.row_blocks > 1 && !shared && wide_tiles.warpgroups && wide_tiles.blocks_per_sm > 1;
        if (fits && !in_wide) return few;
    }
    if (!is_long && row_blocks <= multiprocessors) return plan(kShort);
    if (wide.splits()) return wide;
    PrefillPlan const whole = plan(kWhole);
    bool const fewer = wide_tiles.warpgroups && (is_long || wide_tiles.blocks_per_sm == 1);
    double const most = fewer ? kFewerWholeBlocksPerSM : kWholeBlocksPerSM;
    return static_cast<double>(whole.blocks) <= most * static_cast<double>(multiprocessors) ? wide : whole;
}

// A fragment is 16 columns of a row: four vectors of 4 floats, and one with maximum and sum
// (plugins/attention/split_kv_reduce.cuh).
int64_t row_nbytes_of_partials(int64_t head_dim) { return ceil_divide(head_dim, 16) * 5 * 16; }

int64_t flagged_rows(int64_t multiprocessors, int64_t group) {
    return multiprocessors * std::max(kMaxDecodeBlocksPerSM * group, kMaxPrefillRowsPerSM);
}

int64_t workspace_nbytes(int64_t group, int64_t head_dim) {
    int64_t const own = kMaxMultiprocessors * std::max(kMaxDecodeBlocksPerSM * group, kMaxFewRows);
    return (flagged_rows(kMaxMultiprocessors, group) + own) * row_nbytes_of_partials(head_dim);
}

int64_t flagged_rows_of(DecodePlan const&, AttentionShape const& shape, int64_t multiprocessors) {
    return kMaxDecodeBlocksPerSM * multiprocessors * shape.rows();
}

int64_t flagged_rows_of(PrefillPlan const& plan, AttentionKernels const& kernels) {
    return plan.splits() ? plan.blocks * kernels.prefill[plan.variant].rows : 0;
}

}  // namespace trt_kvcache
