// How a prefill block fills its shared memory: queries, with RoPE, and tiles of keys and values, from the cache or from the new tokens.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_params.cuh"
#include "attention/prefill_schedule.cuh"
#include "attention/rope.cuh"
#include "attention/swizzle.cuh"
#include "attention/warpgroup.cuh"

// kAppends: keys and values of the new tokens are in `k` and `v`, and this launch appends them; else they are in the cache. kPanels: tiles lie
// in panels.
template <bool kAppends, bool kPanels, int kThreads, int kBlockRows, int kTileKeys>
struct PrefillTiles {
    using QueryLayout = TileLayout<kPanels, kBlockRows>;
    using KeyLayout = TileLayout<kPanels, kTileKeys>;
    using Rows = RowBlock<kAppends, kBlockRows, kTileKeys>;
    static constexpr int kTileBytes = kTileKeys * kRowBytes;

    static __device__ __forceinline__ void fill_queries(unsigned char* queries, const PrefillParams& params, const Rows& rows, int kv_head) {
        const unsigned char* const source = params.q + rows.slot * params.q_stride + static_cast<long long>(kv_head) * params.group_size * kRowBytes;
        const SharedAddress to = shared_address(queries);
#pragma unroll
        for (int i = 0; i < (kBlockRows * kRowChunks + kThreads - 1) / kThreads; i++) {
            const int x = i * kThreads + threadIdx.x, row = x / kRowChunks, chunk = x % kRowChunks;
            if (kBlockRows * kRowChunks % kThreads && row >= kBlockRows) break;
            const int token = rows.token_of(params, row), head = rows.head_of(params, row, token);
            cp_async(to + QueryLayout::offset(row, chunk), source + token * params.q_token_stride + head * kRowBytes + chunk * 16, row < rows.rows);
        }
    }

    // Applies RoPE to the first `count` rows of a tile; position(row) is that of a row. By chunks, if several at a time and
    // rotary_dim ends with one, or by words. The angles of several are loaded together, as each load takes long, the first chunks before arrived() is
    // called, which returns when the rows are there, and may ask for what comes later. For all threads of the block.
    template <class RowsLayout, int kChunksAtOnce, int kWordsAtOnce, class Position, class Arrived>
    static __device__ __forceinline__ void apply_rope(unsigned char* tile, const PrefillParams& params, int count, Position position, Arrived arrived) {
        const auto angles = [&](int row) { return RopeAngles(params.cos_sin, params.rotary_dim, position(row)); };
        const bool by_chunks = kChunksAtOnce > 0 && params.rotary_dim % 16 == 0;
        const int half = params.rotary_dim / (by_chunks ? 16 : 4);
        Places<ChunkAngles, kChunksAtOnce ? kChunksAtOnce : 1> chunks(count, half);
        const auto chunk = [&](int row, int place) { return chunk_angles(angles(row), place); };
        if (by_chunks) chunks.load(0, chunk);
        arrived();
        if (by_chunks) {
#pragma unroll 1
            for (int first = 0; first < chunks.all; first += chunks.kStep) {
                if (first) chunks.load(first, chunk);
                chunks.for_each(first, [&](int row, int place, const ChunkAngles& found) { rotate_chunks<RowsLayout>(tile, row, place, half, found); });
            }
        } else {
            Places<float4, kWordsAtOnce> words(count, half);
#pragma unroll 1
            for (int first = 0; first < words.all; first += words.kStep) {
                words.load(first, [&](int row, int word) {
                    const float2 cosine = angles(row).cosine(word), sine = angles(row).sine(word);
                    return float4{cosine.x, cosine.y, sine.x, sine.y};
                });
                words.for_each(first, [&](int row, int word, float4 found) {
                    rotate_in_tile<RowsLayout>(tile, row, word, half, {found.x, found.y}, {found.z, found.w});
                });
            }
        }
    }

    // Places of rows of which each thread has kAtOnce at a time, and their angles.
    template <class Angles, int kAtOnce>
    struct Places {
        static constexpr int kStep = kThreads * kAtOnce;
        const int of_row, all;
        int rows[kAtOnce], places[kAtOnce];
        Angles angles[kAtOnce];

        __device__ __forceinline__ Places(int count, int places_of_row) : of_row(places_of_row), all(count * places_of_row) {}
        template <class Load>
        __device__ __forceinline__ void load(int first, Load load_angles) {
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int x = first + i * kThreads + threadIdx.x;
                if (x >= all) continue;
                rows[i] = divide_small(x, of_row);
                places[i] = x - rows[i] * of_row;
                angles[i] = load_angles(rows[i], places[i]);
            }
        }
        template <class Use>
        __device__ __forceinline__ void for_each(int first, Use use) const {
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                if (first + i * kThreads + static_cast<int>(threadIdx.x) < all) use(rows[i], places[i], angles[i]);
            }
        }
    };

    // Keys, then values, of a tile; rows that are not live are zeros. `tile` is counted from the first one of the row block.
    static __device__ __forceinline__ void fill(unsigned char* tiles, const PrefillParams& params, const Rows& rows, int kv_head, int tile) {
        const SharedAddress to = shared_address(tiles);
        if (kAppends && tile == rows.num_tiles - 1) {
            const unsigned char* const keys = params.k + rows.slot * params.k_stride + kv_head * kRowBytes;
            const unsigned char* const values = params.v + rows.slot * params.v_stride + kv_head * kRowBytes;
#pragma unroll 1
            for (int x = threadIdx.x; x < kTileKeys * kRowChunks; x += kThreads) {
                const int key = x / kRowChunks, chunk = x % kRowChunks;
                copy_chunk(to + KeyLayout::offset(key, chunk), keys + key * params.k_token_stride + chunk * 16,
                           values + key * params.v_token_stride + chunk * 16, key < rows.count);
            }
            return;
        }
        const int first_key = (rows.first_tile + tile) * kTileKeys, live = rows.keys_end - first_key;
        const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + first_key;
        const unsigned char* const keys = params.cache + rows.slot * params.slot_stride + row * kRowBytes;
        const unsigned char* const values = keys + params.kv_stride;
        if constexpr (kKeyStep > 0) {
            const int key = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks, live_behind = live - key;
            const SharedAddress first = to + KeyLayout::offset(key, chunk);
            const unsigned char* const from_keys = base_address(keys + threadIdx.x * 16);
            const unsigned char* const from_values = base_address(values + threadIdx.x * 16);
#pragma unroll
            for (int step = 0; step < kTileKeys; step += kKeyStep) {
                copy_chunk(KeyLayout::rows_below(first, step), from_keys + step * kRowBytes, from_values + step * kRowBytes, step < live_behind);
            }
        } else {
#pragma unroll
            for (int i = 0; i < (kTileKeys * kRowChunks + kThreads - 1) / kThreads; i++) {
                const int x = i * kThreads + threadIdx.x, key = x / kRowChunks;
                if (kTileKeys * kRowChunks % kThreads && key >= kTileKeys) break;
                copy_chunk(to + KeyLayout::offset(key, x % kRowChunks), keys + x * 16, values + x * 16, key < live);
            }
        }
    }

    // Where a thread can copy the same chunk of several rows, these are so many rows apart: else 0. Its addresses then differ by constants, which are
    // part of the instructions; with addresses of their own, copies would wait for each other's registers.
    static constexpr int kKeyStep = kThreads % kRowChunks == 0 ? kThreads / kRowChunks : 0;

    // Of a key and of its value.
    static __device__ __forceinline__ void copy_chunk(SharedAddress to, const unsigned char* key, const unsigned char* value, bool is_live) {
        cp_async(to, key, is_live);
        cp_async(to + kTileBytes, value, is_live);
    }

    // Applies RoPE to the keys in the tile of the new tokens. The first row block of a slot appends keys and values to the cache. For all threads
    // of the block; there is a barrier behind RoPE.
    static __device__ __forceinline__ void append_new_tokens(unsigned char* tiles, const PrefillParams& params, const Rows& rows, int kv_head) {
        apply_rope<KeyLayout, 0, 4>(tiles, params, rows.count, [&](int row) { return rows.past + row; }, [] {});
        if constexpr (kPanels) shared_memory_fence();
        __syncthreads();
        if (rows.first_row > 0) return;
        const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + rows.past;
        unsigned char* const keys = params.cache + rows.slot * params.slot_stride + row * kRowBytes;
#pragma unroll 1
        for (int x = threadIdx.x; x < rows.count * kRowChunks; x += kThreads) {
            const unsigned from = KeyLayout::offset(x / kRowChunks, x % kRowChunks);
            *reinterpret_cast<uint4*>(keys + 16 * x) = *reinterpret_cast<const uint4*>(tiles + from);
            *reinterpret_cast<uint4*>(keys + params.kv_stride + 16 * x) = *reinterpret_cast<const uint4*>(tiles + kTileBytes + from);
        }
    }
};
