// The decode kernel's shared memory, and the pipeline of asynchronous copies that fills it.
//
// Shared memory of a block, with R = kRows rows of q and T = kMaxNewTokens. trt_kvcache/kernels/attention_tiles.py
// computes the same size.
//
//     ring         [kWarps][kRingTiles] tiles of kTileBytes K and V of consecutive tiles in turn: K0 V0 K1 V1 ... A
//                  warp's tiles are filled and read by that warp alone, so __syncwarp is enough. At the end of a head
//                  the tile used last holds the warp's output (kernel: reduce_warps), and at the end of the kernel the
//                  whole ring holds what other blocks published (SplitKVReduce::collect).
//     heads        [kHeadBuffers] buffers of R + 4 T rows: R rows of q, T of k, T of v (all swizzled if T > 1, but
//                  for quantized rows with kSharedRows), 2 T of cosines and sines. Filled by all threads, read by
//                  all warps after a barrier. At the end of the kernel: fragments that this block merges.
//     scales       if the cache has scales, [kWarps][kRingTiles] scales of a tile's tokens: filled and read with the
//                  tile
//     new_scales   and [kHeadBuffers] scales of new tokens, T of k and T of v: filled with the head, or when the tokens
//                  are quantized
//     new_token    if T = 1, 2 rows: k after RoPE, and v, of the new token, as they are stored. Written by all threads
//                  at the start of a head; read by the last warp. Not used with kSharedRows: the rows of k and v in the
//                  head buffer are as they are stored.
//     warp_totals  [kWarps][R] float2: maximum and sum of each row and warp. Written at the end of a head, read by all
//                  warps.
//
// The pipeline. A step of the main loop is one tile for each warp; a stage is what a step needs. It is three commit
// groups:
//
//     H_i   head: q, k, v and angles, if step i starts a head of this block (else the group is empty)
//     K_i   the tile of K
//     V_i   the tile of V
//
// kStages - 1 stages are in flight when a step starts. kStages = 3:
//
//                          in flight when it waits, oldest first      waits for   which leaves
//     step i, head starts  H_i K_i V_i H_i+1 K_i+1 V_i+1              H_i         the 3 (kStages - 1) - 1 youngest
//     step i, scores       K_i V_i H_i+1 K_i+1 V_i+1                  K_i         the 3 (kStages - 1) - 2 youngest
//             issue        H_i+2 K_i+2 (into the tile that V_i-1 had)
//     step i, output       V_i H_i+1 K_i+1 V_i+1 H_i+2 K_i+2          V_i         the 3 (kStages - 1) - 3 + 2 youngest
//             issue        V_i+2 (into the tile that K_i had)
//
// So at most 2 (kStages - 1) tiles are in flight, and one more is read: kRingTiles in all. Before all this there may be
// one more group: the speculative part of K_0. It is older than K_0, so wait_for_keys waits for it too.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/decode_params.cuh"
#include "attention/schedule.cuh"
#include "attention/swizzle.cuh"

constexpr int kRingTiles = 2 * kStages - 1;
constexpr int kStageGroups = 3, kPrefilledGroups = kStageGroups * (kStages - 1);
constexpr int kGroupsYoungerThanHead = kPrefilledGroups - 1;
constexpr int kGroupsYoungerThanKeys = kPrefilledGroups - 2;
constexpr int kGroupsYoungerThanValues = kPrefilledGroups - 3 + 2;

__device__ __forceinline__ int next_ring_tile(int tile) { return tile + 1 == kRingTiles ? 0 : tile + 1; }

template <int kRows>
struct DecodeSharedMemory {
    static constexpr int kHeadBufferBytes = (kRows + 4 * kMaxNewTokens) * kRowBytes;
    static constexpr int kKeysOffset = kRows * kRowBytes, kValuesOffset = kKeysOffset + kMaxNewTokens * kRowBytes;
    static constexpr int kAnglesOffset = kValuesOffset + kMaxNewTokens * kRowBytes;
    static constexpr int kNewScaleBytes = kQuantized ? (8 * kMaxNewTokens + 15) / 16 * 16 : 0;
    static constexpr int kNewTokenBytes = kMaxNewTokens == 1 ? 2 * kStoredRowBytes : 0;

    unsigned char *ring, *heads, *scales, *new_scales, *new_token;
    float2* warp_totals;

    __device__ __forceinline__ explicit DecodeSharedMemory(unsigned char* start) {
        ring = start;
        heads = ring + kWarps * kRingTiles * kTileBytes;
        scales = heads + kHeadBuffers * kHeadBufferBytes;
        new_scales = scales + kWarps * kRingTiles * kTileScaleBytes;
        new_token = new_scales + kHeadBuffers * kNewScaleBytes;
        warp_totals = reinterpret_cast<float2*>(new_token + kNewTokenBytes);
    }
    __device__ __forceinline__ unsigned char* ring_tile(int warp, int tile) const {
        return ring + (warp * kRingTiles + tile) * kTileBytes;
    }
    __device__ __forceinline__ float* tile_scales(int warp, int tile) const {
        return reinterpret_cast<float*>(scales + (warp * kRingTiles + tile) * kTileScaleBytes);
    }
    __device__ __forceinline__ float* scales_of_head(int number) const {
        return reinterpret_cast<float*>(new_scales + number * kNewScaleBytes);
    }
    __device__ __forceinline__ unsigned char* head_buffer(int number) const {
        return heads + number * kHeadBufferBytes;
    }
};

// Keys of this warp's tile, if the tile of warp 0 is `tile`, counted from the start of the cache.
__device__ __forceinline__ const unsigned char* key_rows(const DecodeParams& params, int slot, int kv_head, int tile) {
    const int warp = threadIdx.x / 32;
    const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + (tile + warp) * kTileTokens;
    return params.cache + slot * params.slot_stride + row * kStoredRowBytes;
}

// Calls copy(to, from, valid) for chunks kFirst to kEnd of this lane's part of a tile; only the first `tokens` rows of
// it are valid.
template <int kFirst, int kEnd, class Copy>
__device__ __forceinline__ void copy_tile_chunks(SharedAddress tile, const unsigned char* rows, int tokens, Copy copy) {
    const int lane = threadIdx.x % 32;
    if constexpr (32 % kStoredRowChunks == 0) {
        constexpr int kRowsAtOnce = 32 / kStoredRowChunks, kPlaces = kSwizzlePlaces<kStoredRowChunks>;
        const int row = lane / kStoredRowChunks, tokens_behind = tokens - row;
        const SharedAddress to = tile + stored_offset(row, lane % kStoredRowChunks);
        const unsigned char* const from = base_address(rows + lane * 16);
#pragma unroll
        for (int i = kFirst; i < kEnd; i++) {
            copy(xor_address(to, i * kRowsAtOnce / (8 / kPlaces) % kPlaces * 16) + i * kRowsAtOnce * kStoredRowBytes,
                 from + i * kRowsAtOnce * kStoredRowBytes, i * kRowsAtOnce < tokens_behind);
        }
    } else {
#pragma unroll
        for (int i = kFirst; i < kEnd; i++) {
            const int row = (i * 32 + lane) / kStoredRowChunks, chunk = (i * 32 + lane) % kStoredRowChunks;
            copy(tile + stored_offset(row, chunk), rows + row * kStoredRowBytes + chunk * 16, row < tokens);
        }
    }
}

// The row of K of the first new token of a head in the cache, with kSharedRows; those of the next tokens follow.
__device__ __forceinline__ const unsigned char* new_rows(const DecodeParams& params, const TileCoord& at) {
    return params.cache + at.slot * params.slot_stride
           + (static_cast<long long>(at.kv_head) * params.max_sequence_length + at.position) * kStoredRowBytes;
}

// Before the previous launch has ended: brings the first keys and values into the L2, if a block can have at least four
// times as many tokens as it begins with. In short caches the prefetch costs more than it brings.
__device__ __forceinline__ void prefetch_first_tiles(const DecodeParams& params, const EvenSplitStart& start) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, offset = lane * 16 * kSpeculativeChunks;
    const bool can_be_long = static_cast<long long>(params.max_sequence_length) * params.heads_per_block
                             >= 4 * kMinTilesPerBlock * kTileTokens * max(params.splits_per_head, 1);
    const int tokens = min(params.max_sequence_length - (start.tile + warp) * kTileTokens, kTileTokens);
    if (!can_be_long || !start.is_certain || offset >= tokens * kStoredRowBytes) return;
    const unsigned char* keys = key_rows(params, start.slot, start.kv_head, start.tile) + offset;
#pragma unroll
    for (int line = 0; line < 16 * kSpeculativeChunks; line += 128) {
        prefetch_l2_line(keys + line);
        prefetch_l2_line(keys + line + params.kv_stride);
    }
}

// Before lengths are known: loads the first chunks of the keys that this warp begins with in the even split, into ring
// tile 0. With stream-K or a sliding window they are the wrong ones, and are ignored: the pipeline then begins with
// ring tile 1.
template <int kRows>
__device__ __forceinline__ void load_speculative_keys(const DecodeParams& params, const DecodeSharedMemory<kRows>& smem,
                                                      const EvenSplitStart& start, L2Policy policy) {
    const int warp = threadIdx.x / 32,
              tokens = start.is_certain ? params.max_sequence_length - (start.tile + warp) * kTileTokens : 0;
    copy_tile_chunks<0, kSpeculativeChunks>(
        shared_address(smem.ring_tile(warp, 0)), key_rows(params, start.slot, start.kv_head, start.tile), tokens,
        [&](SharedAddress to, const void* from, bool valid) { cp_async_speculative(to, from, valid, policy); });
    cp_async_commit_group();
}

// Fills the ring and the head buffers, kStages - 1 steps ahead of the main loop and over the ends of heads.
template <int kRows>
struct KVPipeline {
    const DecodeParams& params;
    const DecodeSharedMemory<kRows>& smem;
    const WorkRange& work;
    L2Policy policy;
    TileIterator ahead;     // of the step that is filled next
    bool has_first_chunks;  // the speculative chunks are the first ones of the tile that is filled next
    int fill_tile;          // of the ring, filled next

    __device__ __forceinline__ KVPipeline(const DecodeParams& params, const DecodeSharedMemory<kRows>& smem,
                                          const WorkRange& work, L2Policy policy, bool speculated_right)
        : params(params), smem(smem), work(work), policy(policy), ahead(work), has_first_chunks(speculated_right),
          fill_tile(!speculated_right) {}

    __device__ __forceinline__ void prefill() {
#pragma unroll 1
        for (int stage = 0; stage < kStages - 1; stage++) {
            fill_keys();
            fill_values();
        }
    }

    // Issues H and K of the next step, if there is one. The groups are committed either way, so that counts stay what
    // they are.
    __device__ __forceinline__ void fill_keys() {
        if (ahead.count(work) > 0 && ahead.at.position >= 0 && ahead.starts_head(work)) {
            if constexpr (kMaxNewTokens == 1) {
                fill_head();
            } else {
                fill_head_of_few();
            }
            if constexpr (kQuantized) fill_head_scales();
        }
        cp_async_commit_group();
        fill_ring_tile(0);
    }

    // Issues V of the same step, and advances to the next step.
    __device__ __forceinline__ void fill_values() {
        fill_ring_tile(1);
        if (ahead.done < work.end) ahead.advance(params, work, ahead.count(work));
    }

    // H_i: a barrier of the block must follow.
    __device__ __forceinline__ void wait_for_head() const { cp_async_wait_group<kGroupsYoungerThanHead>(); }
    // K_i and V_i: a warp waits for its own tiles.
    __device__ __forceinline__ void wait_for_keys() const {
        cp_async_wait_group<kGroupsYoungerThanKeys>();
        __syncwarp();
    }
    __device__ __forceinline__ void wait_for_values() const {
        cp_async_wait_group<kGroupsYoungerThanValues>();
        __syncwarp();
    }

private:
    // q, k and v of a head (with kSharedRows the stored rows of k and v), and the angles of its position, by all
    // threads of the block.
    __device__ __forceinline__ void fill_head() {
        const TileCoord& at = ahead.at;
        const SharedAddress to = shared_address(smem.head_buffer(ahead.head_buffer));
        const int group_size = params.group_size, chunks = (group_size + 2) * kRowChunks;
#pragma unroll 1
        for (int x = threadIdx.x; x < chunks + params.rotary_dim / 4; x += kBlockThreads) {
            const int row = x / kRowChunks, offset = x % kRowChunks * 16;
            if (row < group_size) {
                cp_async(to + swizzled_offset(row, x % kRowChunks),
                         params.q + at.slot * params.q_stride + (at.kv_head * group_size + row) * kRowBytes + offset,
                         true);
            } else if (kSharedRows && x < chunks) {
                const int kv = row - group_size;
                if (offset < kStoredRowBytes)
                    cp_async(to + kRows * kRowBytes + kv * kStoredRowBytes + offset,
                             new_rows(params, at) + kv * params.kv_stride + offset, true);
            } else if (row == group_size) {
                cp_async(to + kRows * kRowBytes + offset,
                         params.k + at.slot * params.k_stride + at.kv_head * kRowBytes + offset, true);
            } else if (x < chunks) {
                cp_async(to + (kRows + 1) * kRowBytes + offset,
                         params.v + at.slot * params.v_stride + at.kv_head * kRowBytes + offset, true);
            } else {
                cp_async(to + (kRows + 2) * kRowBytes + (x - chunks) * 16,
                         params.cos_sin + static_cast<long long>(at.position) * params.rotary_dim + (x - chunks) * 4,
                         true);
            }
        }
    }

    // The same for several new tokens; their k and v only if this block has the head's last tile.
    __device__ __forceinline__ void fill_head_of_few() {
        using SharedMemory = DecodeSharedMemory<kRows>;
        const TileCoord& at = ahead.at;
        const SharedAddress to = shared_address(smem.head_buffer(ahead.head_buffer));
        const int group_size = params.group_size, new_chunks = ahead.has_last_tile(work) ? at.count * kRowChunks : 0;
        const unsigned char* const queries =
            params.q + at.slot * params.q_stride + static_cast<long long>(at.kv_head) * group_size * kRowBytes;
#pragma unroll 1
        for (int x = threadIdx.x; x < at.rows(params) * kRowChunks; x += kBlockThreads) {
            const int row = x / kRowChunks, chunk = x % kRowChunks, token = divide_small(row, group_size);
            cp_async(to + swizzled_offset(row, chunk),
                     queries + token * params.q_token_stride + (row - token * group_size) * kRowBytes + chunk * 16,
                     true);
        }
        const float* const angles = params.cos_sin + static_cast<long long>(at.position) * params.rotary_dim;
#pragma unroll 1
        for (int x = threadIdx.x; x < at.count * (params.rotary_dim / 4); x += kBlockThreads) {
            cp_async(to + SharedMemory::kAnglesOffset + x * 16, angles + x * 4, true);
        }
        if constexpr (kSharedRows) {
            fill_shared_rows(to);
            return;
        }
#pragma unroll 1
        for (int x = threadIdx.x; x < new_chunks; x += kBlockThreads) {
            const int token = x / kRowChunks, chunk = x % kRowChunks;
            const unsigned at_offset = swizzled_offset(token, chunk);
            const long long column = at.kv_head * kRowBytes + chunk * 16;
            cp_async(to + SharedMemory::kKeysOffset + at_offset,
                     params.k + at.slot * params.k_stride + token * params.k_token_stride + column, true);
            cp_async(to + SharedMemory::kValuesOffset + at_offset,
                     params.v + at.slot * params.v_stride + token * params.v_token_stride + column, true);
        }
    }

    // The new tokens as they are stored, if this block has the head's last tile: where quantize_few would put them.
    __device__ __forceinline__ void fill_shared_rows(SharedAddress head) {
        using SharedMemory = DecodeSharedMemory<kRows>;
        const TileCoord& at = ahead.at;
        const unsigned char* const rows = new_rows(params, at);
        const int chunks = ahead.has_last_tile(work) ? at.count * kStoredRowChunks : 0;
#pragma unroll 1
        for (int x = threadIdx.x; x < chunks; x += kBlockThreads) {
            const int token = x / kStoredRowChunks, chunk = x % kStoredRowChunks;
            const unsigned at_offset = kQuantized ? token * kRowBytes + chunk * 16 : swizzled_offset(token, chunk);
            cp_async(head + SharedMemory::kKeysOffset + at_offset, rows + x * 16, true);
            cp_async(head + SharedMemory::kValuesOffset + at_offset, rows + params.kv_stride + x * 16, true);
        }
    }

    // Scales of a head of which there is one for all tokens, in the place of those of each new token. With kSharedRows
    // also the scales of the new tokens.
    __device__ __forceinline__ void fill_head_scales() {
        const int x = kBlockThreads - 1 - static_cast<int>(threadIdx.x), kv = x / kMaxNewTokens;
        if ((!kSharedRows && params.scales_per_token()) || kv > 1) return;
        const int token = kSharedRows ? ahead.at.position + min(x % kMaxNewTokens, ahead.at.count - 1) : 0;
        cp_async_word(shared_address(smem.scales_of_head(ahead.head_buffer) + x),
                      params.head_scales(ahead.at.slot, ahead.at.kv_head, kv) + token * params.scale_token_stride,
                      true);
    }

    // K or (kv: 1) V of this warp's tile, if it has one, and their scales. Rows from the first new token on are zeros.
    __device__ __forceinline__ void fill_ring_tile(int kv) {
        const int warp = threadIdx.x / 32;
        const TileCoord& at = ahead.at;
        if (ahead.count(work) > warp && at.position >= 0) {
            const int tokens = at.position - at.first_token(warp);
            const unsigned char* rows =
                key_rows(params, at.slot, at.kv_head, at.first_tile + at.tile) + (kv ? params.kv_stride : 0);
            const SharedAddress tile = shared_address(smem.ring_tile(warp, fill_tile));
            const auto copy = [&](SharedAddress to, const void* from, bool valid) {
                cp_async_with_policy(to, from, valid, policy);
            };
            if (!has_first_chunks) copy_tile_chunks<0, kSpeculativeChunks>(tile, rows, tokens, copy);
            copy_tile_chunks<kSpeculativeChunks, kTileChunks / 32>(tile, rows, tokens, copy);
            if (kQuantized && params.scales_per_token()) {
                const int lane = threadIdx.x % 32;
                const float* const scales = params.head_scales(at.slot, at.kv_head, kv) + at.first_token(warp);
                const SharedAddress to = shared_address(smem.tile_scales(warp, fill_tile));
#pragma unroll
                for (int token = lane; token < kTileTokens; token += 32)
                    cp_async_word(to + 4 * token, scales + token, token < tokens);
            }
        }
        has_first_chunks = false;
        cp_async_commit_group();
        fill_tile = next_ring_tile(fill_tile);
    }
};
