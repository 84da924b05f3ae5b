// Loads of tiles of keys and values from the cache into the shared memory of a prefill block. prefill_new_rows.cuh
// loads the rows of the new tokens.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_params.cuh"
#include "attention/prefill_schedule.cuh"
#include "attention/swizzle.cuh"
#include "attention/warpgroup.cuh"

// kAppends: keys and values of the new tokens are in `k` and `v`, and this launch appends them; else they are in the
// cache. kPanels: tiles lie in panels. kRings: number of groups of threads, each of which fills a ring of its own.
template <bool kAppends, bool kPanels, int kThreads, int kBlockRows, int kNumTileKeys, int kNumRings>
struct PrefillTiles {
    static constexpr int kRings = kNumRings, kRingThreads = kThreads / kRings, kTileKeys = kNumTileKeys;
    using QueryLayout = TileLayout<kPanels, kBlockRows>;
    using KeyLayout = TileLayout<kPanels, kTileKeys>;
    using Rows = RowBlock<kAppends, kBlockRows, kTileKeys>;
    static constexpr int kTileBytes = kTileKeys * kRowBytes;

    // Of this thread, and its own number among those of the ring.
    static __device__ __forceinline__ int ring_number() {
        return kRings > 1 ? static_cast<int>(threadIdx.x) / kRingThreads : 0;
    }
    static __device__ __forceinline__ unsigned ring_thread() {
        return kRings > 1 ? threadIdx.x % kRingThreads : threadIdx.x;
    }

    // Keys, then values, of a tile in the cache; rows that are not live are zeros. `tile` is counted from the first one
    // of the row block.
    static __device__ __forceinline__ void fill(unsigned char* tiles, const PrefillParams& params, const Rows& rows,
                                                int kv_head, int tile) {
        // threadIdx.y is 0, which the compiler does not know: of an address whose parts differ between threads it puts
        // none into a uniform register. A copy with a policy and such an address is an illegal instruction in what
        // NVRTC 13.0 makes of it.
        const SharedAddress to = xor_address(shared_address(tiles), kAppends ? threadIdx.y : 0);
        const L2Policy policy = evict_first_policy();
        const int first_key = (rows.first_tile + tile) * kTileKeys, live = rows.keys_end - first_key;
        const long long row = static_cast<long long>(kv_head) * params.max_sequence_length + first_key;
        const unsigned char* const keys = params.cache + rows.slot * params.slot_stride + row * kRowBytes;
        const unsigned char* const values = keys + params.kv_stride;
        if constexpr (kKeyStep > 0) {
            const int key = ring_thread() / kRowChunks, chunk = ring_thread() % kRowChunks, live_behind = live - key;
            const SharedAddress first = to + KeyLayout::offset(key, chunk);
            const unsigned char* const from_keys = base_address(keys + ring_thread() * 16);
            const unsigned char* const from_values = base_address(values + ring_thread() * 16);
#pragma unroll
            for (int step = 0; step < kTileKeys; step += kKeyStep) {
                copy_chunk(KeyLayout::rows_below(first, step), from_keys + step * kRowBytes,
                           from_values + step * kRowBytes, step < live_behind, policy);
            }
        } else {
#pragma unroll
            for (int i = 0; i < (kTileKeys * kRowChunks + kRingThreads - 1) / kRingThreads; i++) {
                const int x = i * kRingThreads + ring_thread(), key = x / kRowChunks;
                if (kTileKeys * kRowChunks % kRingThreads && key >= kTileKeys) break;
                copy_chunk(to + KeyLayout::offset(key, x % kRowChunks), keys + x * 16, values + x * 16, key < live,
                           policy);
            }
        }
    }

    // Distance in rows of the chunks that a thread copies, if they are the same chunk of several rows; else 0. Their
    // addresses then differ by constants, which are part of the instructions. With separate addresses, copies would
    // wait for registers of earlier ones.
    static constexpr int kKeyStep = kRingThreads % kRowChunks == 0 ? kRingThreads / kRowChunks : 0;

    // A chunk of a key and of its value. Loads for few rows must not evict partial results from the L2.
    static __device__ __forceinline__ void copy_chunk(SharedAddress to, const unsigned char* key,
                                                      const unsigned char* value, bool is_live, L2Policy policy) {
        if constexpr (kAppends) {
            cp_async_with_policy(to, key, is_live, policy);
            cp_async_with_policy(to + kTileBytes, value, is_live, policy);
        } else {
            cp_async(to, key, is_live);
            cp_async(to + kTileBytes, value, is_live);
        }
    }
};
