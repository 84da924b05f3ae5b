// Ring buffer of tiles of keys and values in the shared memory of a prefill block. This one is for a 16-bit cache,
// whose tiles are multiplied as they are stored. prefill_stored_ring.cuh has the one for a quantized cache.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_params.cuh"
#include "attention/thread_barrier.cuh"

// A ring of kStages tiles. Commit group n has keys and values of the tile of step n; it is empty for the new tokens. A
// step waits for its tile; kStages - 2 younger groups may stay in flight. After the barrier that follows, all warps
// have finished the previous tile, and its place is filled with the tile of step n + kStages - 1. If there are several
// rings, each has its own threads and processes every other tile: no ring waits for another one.
template <bool kQuantizedValues, bool kKeysAhead, class Tiles, class Work, int kThreads, int kTileKeys, int kStages>
struct PrefillRing {
    static constexpr int kRings = Tiles::kRings, kRingBytes = kStages * 2 * Tiles::kTileBytes,
                         kBytes = kRings * kRingBytes, kScaleBytes = 0;

    unsigned char* ring;
    const PrefillParams& params;
    const Work& work;
    const int number;  // of this ring
    int place = 0;     // in the ring, of this step's tile

    __device__ __forceinline__ PrefillRing(unsigned char* rings, const PrefillParams& params, const Work& work)
        : ring(rings + Tiles::ring_number() * kRingBytes), params(params), work(work), number(Tiles::ring_number()) {}

    // The first tile, and the one of the next step.
    __device__ __forceinline__ int start() const { return work.after(work.start(), number); }
    static __device__ __forceinline__ int after(int tile, int steps = 1) { return Work::after(tile, steps * kRings); }
    // For all threads of the ring.
    __device__ __forceinline__ void barrier() const {
        if constexpr (kRings > 1) {
            barrier_of_threads(1 + number, Tiles::kRingThreads);
        } else {
            __syncthreads();
        }
    }

    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (int stage = 0; stage < kStages - 1; stage++) {
            const int tile = after(start(), stage);
            if (work.has(tile) && !work.has_new_tokens(tile))
                Tiles::fill(ring + stage * 2 * Tiles::kTileBytes, params, work.rows, work.kv_head, tile);
            cp_async_commit_group();
        }
    }
    // Before the barriers: of the first step alone, and of each one.
    __device__ __forceinline__ void prepare_first() {}
    __device__ __forceinline__ void wait() { cp_async_wait_group<kStages - 2>(); }

    // Keys, then values, of the tile of this step.
    __device__ __forceinline__ unsigned char* tile(int) const { return ring + place * 2 * Tiles::kTileBytes; }
    __device__ __forceinline__ const float* scales(int) const { return nullptr; }
    // Memory after the ring.
    __device__ __forceinline__ unsigned char* column_sums() const { return ring + kBytes; }

    // Called after the barrier of the step of `tile`: begins to fill the place of the previous tile. tile() then returns
    // the tile of the next step.
    __device__ __forceinline__ void advance(int tile) {
        const int next = after(tile, kStages - 1);
        if (work.has(next)) {
            unsigned char* const to = ring + (place == 0 ? kStages - 1 : place - 1) * 2 * Tiles::kTileBytes;
            Tiles::fill(to, params, work.rows, work.kv_head, next);
        }
        cp_async_commit_group();
        place = place + 1 == kStages ? 0 : place + 1;
    }
};
