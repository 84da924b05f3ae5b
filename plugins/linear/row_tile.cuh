// A row tile: some pairs of a row and one of its experts, all with one expert.
#pragma once

struct RowTile {
    int expert, first, count, unused;  // pairs `first` to `first + count - 1` of the order
};
static_assert(sizeof(RowTile) == 16, "ROW_TILE_WIDTH int32 of trt_kvcache/kernels/expert_order_kernels.py");
