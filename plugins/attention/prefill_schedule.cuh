// Schedule of prefill: the rows and the keys of each block.
//
// The rows of a K/V head of a slot are its new tokens times its query heads: row `token * group_size + head`. They are
// cut into row blocks of kBlockRows, so K and V are read once for as many rows as a block holds. A row block sees the
// tiles of keys from the window of its first token on. If the launch appends, new tokens are in none of these tiles,
// but in one more after them.
//
// Lengths live on the device, so the launch depends on shapes alone. If there are more blocks than row blocks, the
// tiles of each row block are divided into splits of tiles_per_split tiles, one for each block. tiles_per_split is the
// smaller of two numbers, and at least min_tiles_per_split. For the first, every row block gets the same number of
// blocks: the tiles of the longest row block, divided by that number. The second is the tiles of all row blocks,
// divided by the number of blocks that are left after one for each row block. A split belongs to one row block, because
// to begin with another one costs a block as much time as several tiles. In order: slot, row block, K/V head, split.
#pragma once

#include "attention/math.cuh"
#include "attention/new_tokens.cuh"
#include "attention/prefill_params.cuh"

// A row block of a slot, for any K/V head, and what lengths make of it.
template <bool kAppends, int kBlockRows, int kTileKeys>
struct RowBlock {
    static constexpr bool kHasNewTokens = kAppends;  // in its last tile
    int slot;
    int past, count;              // tokens in the cache, and new ones
    int first_row, rows;          // rows: 0 if there are no new tokens for it
    int first_token, first_head;  // of the first row
    int keys_end;                 // behind the last key in a tile
    int first_tile, num_tiles;    // num_tiles: with the one of the new tokens

    // `number`: slot * row_blocks + number of the row block in the slot. Each division takes long, and most calls have
    // one row block.
    __device__ __forceinline__ void load(const PrefillParams& params, int number) {
        slot = params.row_blocks > 1 ? divide(number, params.row_blocks) : number;
        past = params.lengths[slot];
        count = count_new_tokens(params.lengths, params.new_lengths, slot, params.width, params.max_sequence_length);
        first_row = (number - slot * params.row_blocks) * kBlockRows;
        rows = max(min(kBlockRows, count * params.group_size - first_row), 0);
        first_token = first_row > 0 ? divide(first_row, params.group_size) : 0;
        first_head = first_row - first_token * params.group_size;
        // any token of a tree may have no ancestors
        const int first_key = params.window > 0 ? max(0, past + (kTree ? 0 : first_token) - (params.window - 1)) : 0;
        keys_end = kAppends ? past : past + token_of(params, max(rows, 1) - 1) + 1;
        first_tile = first_key / kTileKeys;
        num_tiles = rows > 0 ? max((keys_end + kTileKeys - 1) / kTileKeys - first_tile, 0) + kAppends : 0;
    }
    // The new token of a row of the block, and which of its query heads.
    __device__ __forceinline__ int token_of(const PrefillParams& params, int row) const {
        return first_token + divide_small(first_head + row, params.group_size);
    }
    __device__ __forceinline__ int head_of(const PrefillParams& params, int row, int token) const {
        return first_head + row - (token - first_token) * params.group_size;
    }
    __device__ __forceinline__ int position_of(const PrefillParams& params, int token) const {
        return params.tree.position(past, slot, params.width, token);
    }
    // Written so that the machine code without trees adds the token to the past, not the other way round.
    __device__ __forceinline__ int position_of_row(const PrefillParams& params, int row) const {
        return kTree ? position_of(params, token_of(params, row)) : past + token_of(params, row);
    }
    // The row block of another lane.
    __device__ __forceinline__ RowBlock of_lane(int lane) const {
        RowBlock other;
        other.slot = __shfl_sync(~0u, slot, lane);
        other.past = __shfl_sync(~0u, past, lane);
        other.count = __shfl_sync(~0u, count, lane);
        other.first_row = __shfl_sync(~0u, first_row, lane);
        other.rows = __shfl_sync(~0u, rows, lane);
        other.first_token = __shfl_sync(~0u, first_token, lane);
        other.first_head = __shfl_sync(~0u, first_head, lane);
        other.keys_end = __shfl_sync(~0u, keys_end, lane);
        other.first_tile = __shfl_sync(~0u, first_tile, lane);
        other.num_tiles = __shfl_sync(~0u, num_tiles, lane);
        return other;
    }
};

// Work of a block: tiles begin to end of a row block, counted from its first one. None if begin is end.
template <class RowBlock>
struct PrefillWork {
    RowBlock rows{};
    int kv_head = 0;
    int begin = 0, end = 0;
    int first_block = 0, num_blocks = 1;  // that share the row block
    bool has_padding = false;             // some slot has fewer new tokens than there is room for

    // Order of tiles. If the last tile may hold the new tokens, tiles are processed from last to first, because RoPE is
    // applied to new tokens before the first step. has(tile): true if the tile belongs to the block.
    __device__ __forceinline__ int start() const { return RowBlock::kHasNewTokens ? end - 1 : begin; }
    static __device__ __forceinline__ int after(int tile, int steps = 1) {
        return RowBlock::kHasNewTokens ? tile - steps : tile + steps;
    }
    __device__ __forceinline__ bool has(int tile) const { return RowBlock::kHasNewTokens ? begin <= tile : tile < end; }
    __device__ __forceinline__ bool has_new_tokens(int tile) const {
        return RowBlock::kHasNewTokens && tile == rows.num_tiles - 1;
    }
};

// Row block `number`; with no tiles behind the last one.
template <class RowBlock>
__device__ __forceinline__ RowBlock row_block(const PrefillParams& params, int number) {
    RowBlock rows;
    const int last = params.batch_size * params.row_blocks - 1;
    rows.load(params, min(number, last));
    if (number > last) rows.num_tiles = 0;
    return rows;
}

// One block for each row block. Row blocks of the last tokens, which see most keys, come first (kFromLast). With kInPairs
// they come first in the first half of the grid, and the second half begins with the row blocks of the first tokens: so
// two blocks that share a multiprocessor have about as much work together as any other two.
template <class RowBlock>
__device__ __forceinline__ PrefillWork<RowBlock> whole_row_block(const PrefillParams& params) {
    PrefillWork<RowBlock> work;
    const int heads = params.batch_size * params.num_kv_heads, from_last = static_cast<int>(blockIdx.x) / heads;
    const int other = static_cast<int>(blockIdx.x) - from_last * heads, slot = other / params.num_kv_heads;
    work.kv_head = other - slot * params.num_kv_heads;
    const int half = (params.row_blocks + 1) / 2;
    const int number =
        params.order == kInPairs && from_last >= half ? from_last - half : params.row_blocks - 1 - from_last;
    work.rows.load(params, slot * params.row_blocks + number);
    work.end = work.rows.num_tiles;
    work.has_padding = true;  // as far as is known
    return work;
}

// Values that depend on shapes alone, computed before lengths can be read. Row blocks here are those of all slots and
// K/V heads.
struct BlocksForRowBlocks {
    int numbers;      // row blocks of one K/V head
    int alike, rest;  // blocks per row block if all get the same number; blocks left after one for each
    float inverse_alike, inverse_rest;
    int number, kv_head, split;  // of this block, if all get the same number; past the last row block if it gets none

    __device__ __forceinline__ explicit BlocksForRowBlocks(const PrefillParams& params) {
        numbers = params.batch_size * params.row_blocks;
        // there are at least as many blocks
        const int items = numbers * params.num_kv_heads, blocks = static_cast<int>(gridDim.x);
        alike = max(divide_small(blocks, items), 1);
        rest = blocks - items;
        inverse_alike = reciprocal_approx(static_cast<float>(alike));
        inverse_rest = reciprocal_approx(static_cast<float>(max(rest, 1)));
        const int item = divide_small(static_cast<int>(blockIdx.x), inverse_alike);
        split = static_cast<int>(blockIdx.x) - item * alike;
        number = divide_small(item, params.num_kv_heads);
        kv_head = item - number * params.num_kv_heads;
    }
};

// One split of a row block for each block, if all row blocks see about the same number of keys. Each row block gets the
// same number of blocks; the remaining blocks get no work.
template <class RowBlock>
__device__ __forceinline__ PrefillWork<RowBlock> split_of_alike(const PrefillParams& params, int min_tiles_per_split,
                                                                const BlocksForRowBlocks& blocks) {
    PrefillWork<RowBlock> work;
    work.rows.load(params, min(blocks.number, blocks.numbers - 1));
    work.has_padding = work.rows.count < params.width;
    const int tiles_per_split =
        max(divide_small(work.rows.num_tiles + blocks.alike - 1, blocks.inverse_alike), min_tiles_per_split);
    work.kv_head = blocks.kv_head;
    work.first_block = static_cast<int>(blockIdx.x) - blocks.split;
    work.begin = blocks.split * tiles_per_split;
    work.end = blocks.number < blocks.numbers ? min(work.begin + tiles_per_split, work.rows.num_tiles) : 0;
    work.num_blocks = divide_small(work.rows.num_tiles + tiles_per_split - 1, tiles_per_split);
    return work;
}

// The same for any row blocks. For a whole warp; the same in all of them.
template <class RowBlock>
__device__ __forceinline__ PrefillWork<RowBlock> split_of_row_block(const PrefillParams& params,
                                                                    int min_tiles_per_split,
                                                                    const BlocksForRowBlocks& blocks) {
    if (params.batch_size == 1 && (RowBlock::kHasNewTokens || blocks.numbers == 1))
        return split_of_alike<RowBlock>(params, min_tiles_per_split, blocks);
    const int lane = threadIdx.x % 32, numbers = blocks.numbers;
    const RowBlock early = row_block<RowBlock>(params, lane);
    PrefillWork<RowBlock> work;
    int total = early.num_tiles, longest = total;
    bool is_padded = early.count < params.width;
#pragma unroll 1
    for (int first = 32; first < numbers; first += 32) {
        const RowBlock rows = row_block<RowBlock>(params, first + lane);
        total += rows.num_tiles;
        longest = max(longest, rows.num_tiles);
        is_padded = is_padded || rows.count < params.width;
    }
    work.has_padding = __any_sync(~0u, is_padded);
    total = warp_sum(total) * params.num_kv_heads;
    longest = warp_max(longest);
    int tiles_per_split = divide_small(longest + blocks.alike - 1, blocks.inverse_alike);
    if (blocks.rest > 0)
        tiles_per_split = min(tiles_per_split, divide(total + blocks.rest - 1, blocks.rest, blocks.inverse_rest));
    tiles_per_split = max(tiles_per_split, min_tiles_per_split);

    const float inverse = reciprocal_approx(static_cast<float>(tiles_per_split));
    int before = 0;  // splits of the row blocks before
#pragma unroll 1
    for (int first = 0; first < numbers; first += 32) {
        const RowBlock rows = first ? row_block<RowBlock>(params, first + lane) : early;
        const int splits = divide_small(rows.num_tiles + tiles_per_split - 1, inverse),
                  own = splits * params.num_kv_heads;
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(~0u, sum, distance);
            sum += lane >= distance ? lower : 0;
        }
        const unsigned beyond = __ballot_sync(~0u, before + sum > static_cast<int>(blockIdx.x));
        if (beyond) {
            const int found = __ffs(static_cast<int>(beyond)) - 1;
            before += __shfl_sync(~0u, sum - own, found);
            work.rows = rows.of_lane(found);
            work.num_blocks = __shfl_sync(~0u, splits, found);
            work.kv_head = divide_small(static_cast<int>(blockIdx.x) - before, work.num_blocks);
            work.first_block = before + work.kv_head * work.num_blocks;
            work.begin = (static_cast<int>(blockIdx.x) - work.first_block) * tiles_per_split;
            work.end = min(work.begin + tiles_per_split, work.rows.num_tiles);
            break;
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return work;
}
