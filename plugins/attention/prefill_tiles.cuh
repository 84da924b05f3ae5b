// How a prefill block fills its shared memory: queries, with RoPE, and tiles of keys and values, from the cache or from the new tokens.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_params.cuh"
#include "attention/prefill_schedule.cuh"
#include "attention/rope.cuh"
#include "attention/swizzle.cuh"

// kAppends: keys and values of the new tokens are in `k` and `v`, and this launch appends them; else they are in the cache.
template <bool kAppends, int kThreads, int kBlockRows, int kTileKeys>
struct PrefillTiles {
    using Rows = RowBlock<kAppends, kBlockRows, kTileKeys>;
    static constexpr int kTileBytes = kTileKeys * kRowBytes;

    static __device__ __forceinline__ void fill_queries(unsigned char* queries, const PrefillParams& params, const Rows& rows, int kv_head) {
        const unsigned char* const source = params.q + rows.slot * params.q_stride + static_cast<long long>(kv_head) * params.group_size * kRowBytes;
        const SharedAddress to = shared_address(queries);
#pragma unroll
        for (int i = 0; i < (kBlockRows * kRowChunks + kThreads - 1) / kThreads; i++) {
            const int x = i * kThreads + threadIdx.x, row = x / kRowChunks, chunk = x % kRowChunks;
            if (kBlockRows * kRowChunks % kThreads && row >= kBlockRows) break;
            const int token = divide(rows.first_row + row, params.group_size), head = rows.first_row + row - token * params.group_size;
            cp_async(to + swizzled_offset(row, chunk), source + token * params.q_token_stride + head * kRowBytes + chunk * 16, row < rows.rows);
        }
    }

    // Applies RoPE to the first `count` rows of a tile; position(row) is that of a row. The angles of several words are loaded together, as
    // each load takes long, and the first ones before arrived() is called, which says when the rows are there. For all threads of the block.
    template <int kAtOnce, class Position, class Arrived>
    static __device__ __forceinline__ void apply_rope(unsigned char* tile, const PrefillParams& params, int count, Position position, Arrived arrived) {
        const int half = params.rotary_dim / 4, words = count * half;
#pragma unroll 1
        for (int first = 0; first == 0 || first < words; first += kThreads * kAtOnce) {
            int rows[kAtOnce], places[kAtOnce];
            float2 cosines[kAtOnce], sines[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int x = first + i * kThreads + threadIdx.x;
                if (x >= words) continue;
                rows[i] = divide(x, half);
                places[i] = x - rows[i] * half;
                const RopeAngles angles(params.cos_sin, params.rotary_dim, position(rows[i]));
                cosines[i] = angles.cosine(places[i]);
                sines[i] = angles.sine(places[i]);
            }
            if (first == 0) arrived();
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                if (first + i * kThreads + static_cast<int>(threadIdx.x) < words) rotate_in_tile(tile, rows[i], places[i], half, cosines[i], sines[i]);
            }
        }
    }

    // Keys, then values, of a tile; rows that are not live are zeros. `tile` is counted from the first one of the row block.
    static __device__ __forceinline__ void fill(unsigned char* tiles, const PrefillParams& params, const Rows& rows, int kv_head, int tile) {
        const int first_key = (rows.first_tile + tile) * kTileKeys;
        const bool is_new = kAppends && tile == rows.num_tiles - 1;
        const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + first_key;
        const unsigned char* keys = params.cache + rows.slot * params.slot_stride + row * kRowBytes;
        const unsigned char* values = keys + params.kv_stride;
        long long key_stride = kRowBytes, value_stride = kRowBytes;
        int live = rows.keys_end - first_key;
        if (is_new) {
            keys = params.k + rows.slot * params.k_stride + kv_head * kRowBytes;
            values = params.v + rows.slot * params.v_stride + kv_head * kRowBytes;
            key_stride = params.k_token_stride;
            value_stride = params.v_token_stride;
            live = rows.count;
        }
        const SharedAddress to = shared_address(tiles);
#pragma unroll
        for (int i = 0; i < (kTileKeys * kRowChunks + kThreads - 1) / kThreads; i++) {
            const int x = i * kThreads + threadIdx.x, key = x / kRowChunks, chunk = x % kRowChunks;
            if (kTileKeys * kRowChunks % kThreads && key >= kTileKeys) break;
            const unsigned at = swizzled_offset(key, chunk);
            cp_async(to + at, keys + key * key_stride + chunk * 16, key < live);
            cp_async(to + kTileBytes + at, values + key * value_stride + chunk * 16, key < live);
        }
    }

    // Applies RoPE to the keys in the tile of the new tokens. The first row block of a slot appends keys and values to the cache. For all threads
    // of the block; there is a barrier behind RoPE.
    static __device__ __forceinline__ void append_new_tokens(unsigned char* tiles, const PrefillParams& params, const Rows& rows, int kv_head) {
        apply_rope<4>(tiles, params, rows.count, [&](int row) { return rows.past + row; }, [] {});
        __syncthreads();
        if (rows.first_row > 0) return;
        const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + rows.past;
        unsigned char* const keys = params.cache + rows.slot * params.slot_stride + row * kRowBytes;
#pragma unroll 1
        for (int x = threadIdx.x; x < rows.count * kRowChunks; x += kThreads) {
            const unsigned from = swizzled_offset(x / kRowChunks, x % kRowChunks);
            *reinterpret_cast<uint4*>(keys + 16 * x) = *reinterpret_cast<const uint4*>(tiles + from);
            *reinterpret_cast<uint4*>(keys + params.kv_stride + 16 * x) = *reinterpret_cast<const uint4*>(tiles + kTileBytes + from);
        }
    }
};
