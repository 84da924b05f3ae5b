// Schedule of decode: the tiles and heads of each block. Lengths live on the device, so the launch depends on shapes
// alone, and every warp computes the work of its block.
//
// Even split, if all heads have about the same length. With as many blocks as heads or more, splits_per_head blocks
// share a head. Each begins with kMinTilesPerBlock tiles that are known without lengths, and so are loaded before
// lengths have arrived; the other tiles of the head are split evenly. A head of 3 blocks (0, 1, 2) and 30 tiles, at
// least 8 for each block:
//
//     tile    0        8        16       24  26  28  30
//             |  0     |  1     |  2     | 0 | 1 | 2 |        block 0: [0, 8) and [24, 26): it skips 16 tiles
//
// With fewer blocks than heads a block takes heads_per_block whole heads.
//
// Stream-K, if lengths differ so much that the even split would take longer: the tiles of all heads of all slots form
// one sequence, of which every block takes an equal range. A range may begin and end in the middle of a head. The block
// with the last tile of a head merges it.
#pragma once

#include "attention/decode_params.cuh"
#include "attention/math.cuh"

// A tile of one K/V head of one slot, and what the length of the slot makes of it.
struct TileCoord {
    int slot, kv_head, tile;  // tile: from the first one inside the window
    int position;             // of the first new token; below 0 the slot takes no part
    int first_key;            // the first token inside its window
    int first_tile, num_tiles;
    int count;  // new tokens

    __device__ __forceinline__ void load_lengths(const DecodeParams& params) {
        set_lengths(params, params.lengths[slot], params.new_lengths ? params.new_lengths[slot] : params.width);
    }
    __device__ __forceinline__ void set_lengths(const DecodeParams& params, int length, int new_length) {
        if constexpr (kMaxNewTokens == 1) {
            count = 1;
            position = new_length > 0 && length < params.max_sequence_length ? max(length, -1) : -1;
        } else {
            count = length < 0 ? 0 : max(min(min(new_length, params.width), params.max_sequence_length - length), 0);
            position = count > 0 ? length : -1;
        }
        first_key = first_key_of(params, 0);
        first_tile = position < 0 ? 0 : first_key / kTileTokens;
        num_tiles = max((position + kTileTokens - 1) / kTileTokens - first_tile, 1);
    }
    // Rows of the head, if the slot takes part.
    __device__ __forceinline__ int rows(const DecodeParams& params) const {
        return (kMaxNewTokens == 1 ? 1 : count) * params.group_size;
    }
    // The first token inside the window of a new token.
    __device__ __forceinline__ int first_key_of(const DecodeParams& params, int token) const {
        return params.window > 0 ? max(0, position + token - (params.window - 1)) : 0;
    }
    // The latest of the first tokens inside the windows of all new tokens.
    __device__ __forceinline__ int last_first_key(const DecodeParams& params) const {
        return kMaxNewTokens == 1 ? first_key : first_key_of(params, count - 1);
    }
    // The first token of a warp's tile, if this is the tile of warp 0.
    __device__ __forceinline__ int first_token(int warp) const { return (first_tile + tile + warp) * kTileTokens; }
};

// Start of the block in the even split. Needs no lengths.
struct EvenSplitStart {
    int head;  // slot * num_kv_heads + kv_head; the number of heads if there is none for this block
    int slot, kv_head, tile;
    bool is_certain;  // there is a head, and without a sliding window its tiles begin at the first token
};

__device__ __forceinline__ EvenSplitStart even_split_start(const DecodeParams& params) {
    const int block = static_cast<int>(blockIdx.x), num_heads = params.batch_size * params.num_kv_heads,
              splits = params.splits_per_head;
    const int head = min(splits > 0 ? divide(block, splits) : block * params.heads_per_block, num_heads);
    const int slot = divide(min(head, num_heads - 1), params.num_kv_heads);
    const int tile = splits > 0 ? (block - head * splits) * kMinTilesPerBlock : 0;
    return {head, slot, head - slot * params.num_kv_heads, tile, head < num_heads && params.window == 0};
}

// Lengths that are loaded early, because everything waits for them: lane l has those of slot l, all lanes those of the
// block's first slot.
struct EarlyLengths {
    int lane_slot;  // l, or the last slot
    int lane_length, lane_new_length;
    int length, new_length;
};

__device__ __forceinline__ EarlyLengths load_early_lengths(const DecodeParams& params, int slot) {
    const int lane_slot = min(static_cast<int>(threadIdx.x % 32), params.batch_size - 1),
              lane_length = params.lengths[lane_slot];
    const int lane_new_length = params.new_lengths ? params.new_lengths[lane_slot] : params.width;
    return {lane_slot, lane_length, lane_new_length, params.lengths[slot],
            params.new_lengths ? params.new_lengths[slot] : params.width};
}

// Tiles of a head of a slot; 0 behind the last slot.
__device__ __forceinline__ int count_tiles(const DecodeParams& params, int slot) {
    TileCoord coord{min(slot, params.batch_size - 1), 0, 0, 0, 0, 0, 0, 0};
    coord.load_lengths(params);
    return slot < params.batch_size ? coord.num_tiles : 0;
}

// The work of this block: a range of tiles, numbered from the first tile of its first head (even split) or of all heads
// (stream-K).
struct WorkRange {
    bool is_even_split = true;
    int begin = 0, end = 0;
    int skip_at = -1, skip_tiles = 0;  // at tile skip_at, skip_tiles tiles of other blocks are left out (even split)
    int tiles_per_block = 1;           // stream-K: of every block but the last
    int first_block = 0;               // even split: of those that share the head
    TileCoord first{};                 // of tile `begin`
};

// Even split: the tiles of one split of a head, or of several heads.
__device__ __forceinline__ void schedule_even_split(WorkRange& work, const DecodeParams& params, int head,
                                                    int num_heads) {
    const int splits = params.splits_per_head;
    work.first_block = head * splits;
    if (splits > 0) {
        const int split = static_cast<int>(blockIdx.x) - work.first_block,
                  rest = work.first.num_tiles - splits * kMinTilesPerBlock;
        const int each = rest > 0 ? divide(rest, splits) : 0;
        work.begin = work.first.tile = split * kMinTilesPerBlock;
        work.end = min(work.begin + kMinTilesPerBlock, work.first.num_tiles);
        if (rest > 0) {
            const int remainder = rest - each * splits;  // the last `remainder` splits have one tile more
            const int before = split * each + max(split - (splits - remainder), 0),
                      own = each + (split >= splits - remainder);
            if (own > 0) {
                work.skip_at = work.end;
                work.skip_tiles = splits * kMinTilesPerBlock + before - work.end;
                work.end += work.skip_tiles + own;
            }
        }
    } else {
#pragma unroll 1
        for (int other = head; other < min(head + params.heads_per_block, num_heads); other++)
            work.end += count_tiles(params, other / params.num_kv_heads);
    }
}

// Stream-K: an equal range of all `total` tiles. A prefix sum over the slots, 32 at a time, finds the slot of its first
// tile.
__device__ __forceinline__ void schedule_stream_k(WorkRange& work, const DecodeParams& params, int total) {
    const int lane = threadIdx.x % 32, num_blocks = static_cast<int>(gridDim.x);
    work.is_even_split = false;
    work.tiles_per_block = max((total + num_blocks - 1) / num_blocks, kMinTilesPerBlock);
    work.begin = static_cast<int>(blockIdx.x) * work.tiles_per_block;
    work.end = min(total, work.begin + work.tiles_per_block);
    if (work.begin >= work.end) return;
    int before = 0;  // tiles of the slots before
#pragma unroll 1
    for (int slot = 0;; slot += 32) {
        const int own = count_tiles(params, slot + lane) * params.num_kv_heads;
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(~0u, sum, distance);
            sum += lane >= distance ? lower : 0;
        }
        const unsigned beyond = __ballot_sync(~0u, before + sum > work.begin);
        if (beyond) {
            int found = 0;
#pragma unroll 1
            while (!(beyond >> found & 1)) found++;
            before += __shfl_sync(~0u, sum - own, found);
            work.first.slot = slot + found;
            break;
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    work.first.load_lengths(params);
    work.first.kv_head = (work.begin - before) / work.first.num_tiles;
    work.first.tile = (work.begin - before) % work.first.num_tiles;
}

// Chooses between the two. For a whole warp; the same in all of them.
__device__ __forceinline__ WorkRange schedule(const DecodeParams& params, const EvenSplitStart& start,
                                              const EarlyLengths& early) {
    const int lane = threadIdx.x % 32, num_blocks = static_cast<int>(gridDim.x),
              num_heads = params.batch_size * params.num_kv_heads;
    WorkRange work;
    work.first = {early.lane_slot, 0, 0, 0, 0, 0, 0, 0};
    work.first.set_lengths(params, early.lane_length, early.lane_new_length);
    int total = lane < params.batch_size ? work.first.num_tiles : 0, longest = total;
    work.first = {start.slot, start.kv_head, 0, 0, 0, 0, 0, 0};
    work.first.set_lengths(params, early.length, early.new_length);
#pragma unroll 1
    for (int slot = lane + 32; slot - lane < params.batch_size; slot += 32) {
        const int tiles = count_tiles(params, slot);
        total += tiles;
        longest = max(longest, tiles);
    }
    total = warp_sum(total) * params.num_kv_heads;
    longest = warp_max(longest);
    // Tiles of the busiest block of an even split, and of each block with stream-K and what that costs; both times the
    // number of blocks.
    const float even_tiles = static_cast<float>(longest) * params.heads_per_block * num_blocks;
    const float stream_k_tiles =
        static_cast<float>(total) + (kStreamKCostTiles + params.width * params.group_size) * num_blocks;
    if (__builtin_expect(even_tiles > stream_k_tiles * max(params.splits_per_head, 1), 0)) {
        schedule_stream_k(work, params, total);
    } else if (start.head < num_heads) {
        schedule_even_split(work, params, start.head, num_heads);
    }
    return work;
}

// A walk over a WorkRange, kWarps tiles of one head at a time.
struct TileIterator {
    TileCoord at;     // the tile of warp 0
    int done;         // its number in the range
    int head_buffer;  // which of the kHeadBuffers buffers in shared memory the head's q, k, v and angles use

    __device__ __forceinline__ explicit TileIterator(const WorkRange& work)
        : at(work.first), done(work.begin), head_buffer(0) {}

    __device__ __forceinline__ bool starts_head(const WorkRange& work) const {
        return at.tile == 0 || done == work.begin;
    }
    // True if the block has the last tile of the head.
    __device__ __forceinline__ bool has_last_tile(const WorkRange& work) const {
        return done - at.tile + at.num_tiles <= work.end;
    }
    // Tiles of this step; warps from this number on have none.
    __device__ __forceinline__ int count(const WorkRange& work) const {
        return min(kWarps, min(work.end - done, at.num_tiles - at.tile));
    }
    __device__ __forceinline__ void advance(const DecodeParams& params, const WorkRange& work, int count) {
        done += count;
        at.tile += count;
        if (done == work.skip_at) {
            done += work.skip_tiles;
            at.tile += work.skip_tiles;
        }
        if (at.tile < at.num_tiles) return;
        at.tile = 0;
        head_buffer = head_buffer + 1 == kHeadBuffers ? 0 : head_buffer + 1;
        if (++at.kv_head < params.num_kv_heads) return;
        at.kv_head = 0;
        if (++at.slot < params.batch_size) at.load_lengths(params);
    }
};
