// The same as prefill_ring.cuh for a quantized cache: its quantized values become tiles of the element type, which has
// all of their values. If tokens have scales of their own, scales of keys are factors of scores, in float32; values are
// multiplied with their scales and rounded to elements. Scales of heads are no part of a tile: see use_head_scales.
//
//     tiles             [2][2]: the one of this step, and the next one, which is converted while tensor cores are busy
//                       with the first
//     quantized values  [kStages - 1][2], in flight. A thread converts the chunks that it has loaded, so there is no
//                       barrier between load and conversion
//     scales            [2][kTileKeys], of the keys of the two tiles, if tokens have their own
//
// Commit group n is tile n.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/prefill_ring.cuh"
#include "attention/real_values.cuh"

template <bool kKeysAhead, class Tiles, class Work, int kThreads, int kTileKeys, int kStages>
struct PrefillRing<true, kKeysAhead, Tiles, Work, kThreads, kTileKeys, kStages> {
    static constexpr int kRings = 1, kQuantizedStages = kStages - 1;
    static constexpr int kQuantizedChunks = kHeadDim / 16, kQuantizedTileBytes = kTileKeys * kHeadDim,
                         kTilesBytes = 4 * Tiles::kTileBytes;
    static constexpr int kBytes = kTilesBytes + kQuantizedStages * 2 * kQuantizedTileBytes,
                         kScaleBytes = 2 * kTileKeys * static_cast<int>(sizeof(float));
    static constexpr int kChunksOfThread = (kTileKeys * kQuantizedChunks + kThreads - 1) / kThreads;
    static constexpr bool kAllHaveChunks = kTileKeys * kQuantizedChunks % kThreads == 0;
    static_assert(kTileKeys <= kThreads, "a thread has the scale of one key of a tile");

    unsigned char* ring;
    const PrefillParams& params;
    const Work& work;
    int stage = 0;             // of the quantized values that are converted next
    float next_key_scale = 0;  // of these: that of key threadIdx.x, and those of the values that this thread converts
    float next_value_scales[kChunksOfThread] = {};

    __device__ __forceinline__ PrefillRing(unsigned char* ring, const PrefillParams& params, const Work& work)
        : ring(ring), params(params), work(work) {}

    __device__ __forceinline__ int start() const { return work.begin; }
    static __device__ __forceinline__ int after(int tile) { return tile + 1; }
    __device__ __forceinline__ void barrier() const { __syncthreads(); }
    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (int i = 0; i < kQuantizedStages; i++) load_quantized(i, work.begin + i);
        load_key_scale(work.begin);
        load_value_scales(work.begin);
    }
    __device__ __forceinline__ void prepare_first() { convert(work.begin); }
    __device__ __forceinline__ void wait() {}

    // Keys, then values, of the tile of a step. With kKeysAhead, keys of the next tile and their scales are there, too.
    __device__ __forceinline__ unsigned char* tile(int tile) const {
        return ring + place_of_tile(tile) * 2 * Tiles::kTileBytes;
    }
    // Of its keys.
    __device__ __forceinline__ float* scales(int tile) const {
        return reinterpret_cast<float*>(ring + kBytes) + place_of_tile(tile) * kTileKeys;
    }
    // Memory after the scales.
    __device__ __forceinline__ unsigned char* column_sums() const { return ring + kBytes + kScaleBytes; }

    // Called after the barrier of the step of `tile`, with kKeysAhead also after its scores: converts the operands of the
    // next step.
    __device__ __forceinline__ void advance(int tile) { convert(tile + 1 + kKeysAhead); }

private:
    struct ChunkPlace {
        int key, chunk;
    };
    // The i-th chunk of this thread in a tile of quantized values. Eight lanes that write together have two rows of
    // four chunks. They write every second chunk of each, in different banks. If possible, the chunks of a thread are
    // kKeyStep rows apart, a multiple of 8: then they have the same place in a swizzled row.
    static __device__ __forceinline__ ChunkPlace chunk_of_thread(int i) {
        const int thread = static_cast<int>(threadIdx.x), x = kKeyStep ? thread : i * kThreads + thread;
        if constexpr (kQuantizedChunks % 4 == 0) {
            return {x / (2 * kQuantizedChunks) * 2 + x / 4 % 2 + i * kKeyStep,
                    x / 8 % (kQuantizedChunks / 4) * 4 + x % 4};
        }
        return {x / kQuantizedChunks, x % kQuantizedChunks};
    }
    static constexpr int kKeyStep =
        kQuantizedChunks % 4 == 0 && kThreads % (8 * kQuantizedChunks) == 0 ? kThreads / kQuantizedChunks : 0;
    // Address of the elements of that chunk in a tile. Those of its second half are one chunk further, before
    // swizzling: another bit of the address.
    static __device__ __forceinline__ unsigned place_of(int i) {
        const ChunkPlace at = chunk_of_thread(kKeyStep ? 0 : i);
        return Tiles::KeyLayout::offset(at.key, 2 * at.chunk)
               + (kKeyStep ? i * (Tiles::KeyLayout::offset(kKeyStep, 0) - Tiles::KeyLayout::offset(0, 0)) : 0);
    }

    __device__ __forceinline__ unsigned char* quantized_of(int stage) const {
        return ring + kTilesBytes + stage * 2 * kQuantizedTileBytes + threadIdx.x * 16;
    }

    __device__ __forceinline__ int place_of_tile(int tile) const { return (tile - work.begin) & 1; }

    // A commit group: keys of a tile, and values of the same one, or with kKeysAhead of the one before it. Empty behind
    // the last tile.
    __device__ __forceinline__ void load_quantized(int stage, int tile) const {
        load_rows(stage, 0, tile);
        load_rows(stage, 1, tile - kKeysAhead);
        cp_async_commit_group();
    }
    __device__ __forceinline__ void load_rows(int stage, int kv, int tile) const {
        if (tile >= work.end || tile < work.begin) return;
        const int first_key = (work.rows.first_tile + tile) * kTileKeys, live = work.rows.keys_end - first_key;
        const long long row = static_cast<long long>(work.kv_head) * params.max_sequence_length + first_key;
        const unsigned char* const rows =
            params.cache + work.rows.slot * params.slot_stride + kv * params.kv_stride + row * kHeadDim;
        const SharedAddress to = shared_address(quantized_of(stage) + kv * kQuantizedTileBytes);
#pragma unroll
        for (int i = 0; i < kChunksOfThread; i++) {
            const ChunkPlace at = chunk_of_thread(i);
            if (!kAllHaveChunks && at.key >= kTileKeys) break;
            cp_async(to + i * kThreads * 16, rows + at.key * kHeadDim + at.chunk * 16, at.key < live);
        }
    }

    __device__ __forceinline__ float scale_of(int kv, int tile, int row) const {
        const int key = (work.rows.first_tile + tile) * kTileKeys + row;
        return key < work.rows.keys_end ? *params.scales.of(work.rows.slot, kv, work.kv_head, key) : 0;
    }
    __device__ __forceinline__ void load_key_scale(int tile) {
        if (!params.scales.per_token || tile >= work.end || threadIdx.x >= kTileKeys) return;
        next_key_scale = scale_of(0, tile, threadIdx.x);
    }
    __device__ __forceinline__ void load_value_scales(int tile) {
        if (!params.scales.per_token || tile >= work.end) return;
#pragma unroll
        for (int i = 0; i < kChunksOfThread; i++) {
            const int row = chunk_of_thread(i).key;
            if (kAllHaveChunks || row < kTileKeys) next_value_scales[i] = scale_of(1, tile, row);
        }
    }

    // Converts the oldest quantized values: keys of `tile`, and values of the same one, or with kKeysAhead of the one
    // before it.
    __device__ __forceinline__ void convert(int tile) {
        const int values_tile = tile - kKeysAhead;
        if (values_tile >= work.end) return;
        cp_async_wait_group<kQuantizedStages - 1>();
        if (!kKeysAhead || tile < work.end) {
            convert_rows(0, tile,
                         [](int, unsigned quantized) { return widen_in_order(Element{}, Stored{}, quantized); });
            if (params.scales.per_token && threadIdx.x < kTileKeys) scales(tile)[threadIdx.x] = next_key_scale;
            load_key_scale(tile + 1);
        }
        if (!kKeysAhead || values_tile >= work.begin) {
            if (params.scales.per_token) {
                SplitScale scales[kChunksOfThread];
#pragma unroll
                for (int i = 0; i < kChunksOfThread; i++)
                    scales[i] = split_scale(Element{}, Stored{}, next_value_scales[i]);
                load_value_scales(values_tile + 1);
                convert_rows(1, values_tile, [&](int i, unsigned quantized) {
                    return real_values(Element{}, Stored{}, quantized, scales[i]);
                });
            } else {
                convert_rows(1, values_tile,
                             [](int, unsigned quantized) { return widen_in_order(Element{}, Stored{}, quantized); });
            }
        }
        load_quantized(stage, tile + kQuantizedStages);
        stage = stage + 1 == kQuantizedStages ? 0 : stage + 1;
    }
    // elements(i, quantized values): of four quantized values in the i-th chunk of this thread.
    template <class Elements>
    __device__ __forceinline__ void convert_rows(int kv, int tile, Elements elements) const {
        const unsigned char* const from = quantized_of(stage) + kv * kQuantizedTileBytes;
        unsigned char* const to = this->tile(tile) + kv * Tiles::kTileBytes;
#pragma unroll
        for (int i = 0; i < kChunksOfThread; i++) {
            if (!kAllHaveChunks && chunk_of_thread(i).key >= kTileKeys) break;
            const uint4 quantized = *reinterpret_cast<const uint4*>(from + i * kThreads * 16);
            const uint2 a = elements(i, quantized.x), b = elements(i, quantized.y), c = elements(i, quantized.z),
                        d = elements(i, quantized.w);
            const unsigned place = place_of(i);
            *reinterpret_cast<uint4*>(to + place) = {a.x, a.y, b.x, b.y};
            *reinterpret_cast<uint4*>(to + (place ^ 16)) = {c.x, c.y, d.x, d.y};
        }
    }
};
