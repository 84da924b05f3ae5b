// How tiles of keys and values pass through the shared memory of a prefill block, one after another. Here those of 16 bits, which lie in the
// cache as they are multiplied; prefill_stored_ring.cuh has those of a quantized cache.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_params.cuh"

// A ring of kStages tiles. Commit group 0 of the block is q; group 1 + n is tile n with its keys and values. A step waits for its tile;
// kStages - 2 younger groups may stay in flight. Behind the barrier that follows, all warps have left the tile before, and its place is filled
// with tile n + kStages - 1.
template <bool kCodes, bool kKeysAhead, class Tiles, class Work, int kThreads, int kTileKeys, int kStages>
struct PrefillRing {
    static constexpr int kBytes = kStages * 2 * Tiles::kTileBytes, kScaleBytes = 0;
    static constexpr int kGroupsYoungerThanQueries = kStages - 1;

    unsigned char* ring;
    const PrefillParams& params;
    const Work& work;
    int place = 0;  // in the ring, of this step's tile

    __device__ __forceinline__ PrefillRing(unsigned char* ring, const PrefillParams& params, const Work& work)
        : ring(ring), params(params), work(work) {}

    // Behind the group of q.
    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (int stage = 0; stage < kStages - 1; stage++) {
            if (work.begin + stage < work.end) Tiles::fill(ring + stage * 2 * Tiles::kTileBytes, params, work.rows, work.kv_head, work.begin + stage);
            cp_async_commit_group();
        }
    }
    // Before the barriers: of the first step alone, and of each one.
    __device__ __forceinline__ void prepare_first() {}
    __device__ __forceinline__ void wait() { cp_async_wait_group<kStages - 2>(); }

    // Keys, then values, of the tile of this step.
    __device__ __forceinline__ unsigned char* tile(int) const { return ring + place * 2 * Tiles::kTileBytes; }
    __device__ __forceinline__ const float* scales(int) const { return nullptr; }

    // Behind the barrier of the step of `tile`: begins to fill the place of the tile before. tile() is then that of the next step.
    __device__ __forceinline__ void advance(int tile) {
        const int next = tile + kStages - 1;
        if (next < work.end) {
            unsigned char* const to = ring + (place == 0 ? kStages - 1 : place - 1) * 2 * Tiles::kTileBytes;
            Tiles::fill(to, params, work.rows, work.kv_head, next);
        }
        cp_async_commit_group();
        place = place + 1 == kStages ? 0 : place + 1;
    }
};
