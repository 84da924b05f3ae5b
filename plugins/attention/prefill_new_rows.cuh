// Loads of the rows of the new tokens into the shared memory of a prefill block: q and k, with RoPE, and v. A thread
// has two chunks of a row at a time, which RoPE rotates with each other. They stay in registers from the load to the
// store.
#pragma once

#include "attention/prefill_params.cuh"
#include "attention/rope.cuh"

// The chunks of a row in pairs: those that RoPE rotates with each other, `half` apart, then the others. None is rotated
// if rotary_dim does not end with a chunk.
struct ChunkPairs {
    static constexpr int kCount = kRowChunks / 2;
    const int half;

    __device__ __forceinline__ explicit ChunkPairs(int rotary_dim) : half(rotary_dim % 16 == 0 ? rotary_dim / 16 : 0) {}
    __device__ __forceinline__ bool is_rotated(int pair) const { return pair < half; }
    __device__ __forceinline__ int low(int pair) const { return pair < half ? pair : pair + half; }
    __device__ __forceinline__ int high(int pair) const { return pair + (pair < half ? half : kCount); }
};

// A pair that is on its way. Not live: zeros.
struct LoadedPair {
    uint4 low{}, high{};
    ChunkAngles angles;

    __device__ __forceinline__ void load(const ChunkPairs& pairs, int pair, const unsigned char* row) {
        low = reinterpret_cast<const uint4*>(row)[pairs.low(pair)];
        high = reinterpret_cast<const uint4*>(row)[pairs.high(pair)];
    }
    __device__ __forceinline__ void load(const ChunkPairs& pairs, int pair, const unsigned char* row,
                                         RopeAngles of_row) {
        load(pairs, pair, row);
        if (pairs.is_rotated(pair)) angles = chunk_angles(of_row, pair);
    }
    __device__ __forceinline__ void rotate(const ChunkPairs& pairs, int pair) {
        if (!pairs.is_rotated(pair)) return;
        const ChunkPair both = rotated_chunks(low, high, angles);
        low = both.low;
        high = both.high;
    }
    template <class Layout>
    __device__ __forceinline__ void store_in_tile(const ChunkPairs& pairs, int pair, unsigned char* tile,
                                                  int row) const {
        *reinterpret_cast<uint4*>(tile + Layout::offset(row, pairs.low(pair))) = low;
        *reinterpret_cast<uint4*>(tile + Layout::offset(row, pairs.high(pair))) = high;
    }
    __device__ __forceinline__ void store(const ChunkPairs& pairs, int pair, unsigned char* row) const {
        reinterpret_cast<uint4*>(row)[pairs.low(pair)] = low;
        reinterpret_cast<uint4*>(row)[pairs.high(pair)] = high;
    }
};

// Tiles: PrefillTiles.
template <class Tiles, int kThreads, int kBlockRows>
struct PrefillNewRows {
    using Rows = typename Tiles::Rows;
    static constexpr int kPairs = ChunkPairs::kCount, kPairsOfThread = (kBlockRows * kPairs + kThreads - 1) / kThreads;
    static constexpr int kAtOnce = kPairsOfThread < 4 ? kPairsOfThread : 4;  // of q: there are registers for so many

    // The queries of the row block. meanwhile() is called when the first of them are on their way. For all threads of
    // the block; a barrier follows.
    template <class Meanwhile>
    static __device__ __forceinline__ void fill_queries(unsigned char* queries, const PrefillParams& params,
                                                        const Rows& rows, int kv_head, Meanwhile meanwhile) {
        const unsigned char* const source =
            params.q + rows.slot * params.q_stride + static_cast<long long>(kv_head) * params.group_size * kRowBytes;
        const ChunkPairs pairs(params.rotary_dim);
        LoadedPair loaded[kAtOnce];
        const auto row_at = [](int x) { return x / kPairs; };
        const auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int x = (first + i) * kThreads + threadIdx.x, row = row_at(x);
                loaded[i] = {};
                if (row >= rows.rows) continue;
                const int token = rows.token_of(params, row), head = rows.head_of(params, row, token);
                loaded[i].load(pairs, x % kPairs, source + token * params.q_token_stride + head * kRowBytes,
                               RopeAngles(params.cos_sin, params.rotary_dim, rows.position_of(params, token)));
            }
        };
        load(0);
        meanwhile();
#pragma unroll 1
        for (int first = 0; first < kPairsOfThread; first += kAtOnce) {
            if (first > 0) load(first);
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int x = (first + i) * kThreads + threadIdx.x, row = row_at(x);
                if (kBlockRows * kPairs % (kAtOnce * kThreads) && row >= kBlockRows) break;
                loaded[i].rotate(pairs, x % kPairs);
                loaded[i].template store_in_tile<typename Tiles::QueryLayout>(pairs, x % kPairs, queries, row);
            }
        }
        if (params.rotary_dim % 16) rotate_words(queries, params, rows);
    }

    // The tile of the new tokens: keys, then values, and zeros up to where no warp has keys that are live. The first
    // row block of a slot appends them to the cache. For all threads of a ring; a barrier follows.
    static __device__ __forceinline__ void fill_new_tokens(unsigned char* tile, const PrefillParams& params,
                                                           const Rows& rows, int kv_head) {
        const unsigned char* const keys = params.k + rows.slot * params.k_stride + kv_head * kRowBytes;
        const unsigned char* const values = params.v + rows.slot * params.v_stride + kv_head * kRowBytes;
        const long long first_row = static_cast<long long>(kv_head) * params.max_sequence_length + rows.past;
        unsigned char* const cache = params.cache + rows.slot * params.slot_stride + first_row * kRowBytes;
        const ChunkPairs pairs(params.rotary_dim);
        const int end = min(Tiles::kTileKeys, (rows.count + 63) / 64 * 64) * kPairs;
#pragma unroll 1
        for (int x = Tiles::ring_thread(); x < end; x += Tiles::kRingThreads) {
            const int row = x / kPairs, pair = x % kPairs;
            LoadedPair key, value;
            if (row < rows.count) {
                const RopeAngles angles(params.cos_sin, params.rotary_dim, rows.position_of(params, row));
                const unsigned char* const source = keys + row * params.k_token_stride;
                key.load(pairs, pair, source, angles);
                value.load(pairs, pair, values + row * params.v_token_stride);
                key.rotate(pairs, pair);
                if (params.rotary_dim % 16) {
                    key.low = rotated_chunk(reinterpret_cast<const uint4*>(source), pairs.low(pair), params.rotary_dim,
                                            angles);
                    key.high = rotated_chunk(reinterpret_cast<const uint4*>(source), pairs.high(pair),
                                             params.rotary_dim, angles);
                }
                if (rows.first_row == 0) {
                    key.store(pairs, pair, cache + row * kRowBytes);
                    value.store(pairs, pair, cache + params.kv_stride + row * kRowBytes);
                }
            }
            key.template store_in_tile<typename Tiles::KeyLayout>(pairs, pair, tile, row);
            value.template store_in_tile<typename Tiles::KeyLayout>(pairs, pair, tile + Tiles::kTileBytes, row);
        }
    }

private:
    // RoPE for queries that are in shared memory, by words: with rotary_dim not a multiple of two chunks.
    static __device__ __forceinline__ void rotate_words(unsigned char* queries, const PrefillParams& params,
                                                        const Rows& rows) {
        const int half = params.rotary_dim / 4;
        __syncthreads();
#pragma unroll 1
        for (int x = threadIdx.x; x < rows.rows * half; x += kThreads) {
            const int row = divide_small(x, half), word = x - row * half;
            const RopeAngles angles(params.cos_sin, params.rotary_dim, rows.position_of_row(params, row));
            rotate_in_tile<typename Tiles::QueryLayout>(queries, row, word, half, angles.cosine(word),
                                                        angles.sine(word));
        }
    }
};
