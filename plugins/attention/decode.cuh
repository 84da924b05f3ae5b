// Attention of one new token per slot, or of a few, with RoPE and append, in one launch. kMaxNewTokens chooses
// between the two.
//
// The query heads of a K/V head (for each new token) are the rows of one matrix, so K and V are read once for all of
// them. A step of the main loop handles kWarps tiles of one head, one for each warp: scores on tensor cores, online
// softmax in registers, output on tensor cores. A head ends with reduce_warps, and with SplitKVReduce if other blocks
// share it.
//
//     schedule.cuh          tiles of this block
//     kv_pipeline.cuh       layout of shared memory, and the copies that fill it
//     mma.cuh               fragment layouts
//     decode_rows.cuh       products and softmax: rows of q are the rows of a product
//     decode_keys.cuh       the same for up to 8 rows, which are the columns of a product
//     few_new_tokens.cuh    several new tokens
//     few_new_keys.cuh      start of a head with several new tokens, for up to 8 rows
//     decode_quantized.cuh  quantized K and V with scales
//     split_kv_reduce.cuh   reduction of partial results
//
// The new token is in no tile: its key and value are read from `k` and `v`, and the last warp starts its softmax with
// them. Where an earlier launch has appended it (kSharedRows), these are its rows of the cache.
#pragma once

#include "attention/decode_keys.cuh"
#include "attention/decode_quantized.cuh"
#include "attention/decode_rows.cuh"
#include "attention/few_new_keys.cuh"
#include "attention/few_new_tokens.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/rope.cuh"
#include "attention/schedule.cuh"
#include "attention/split_kv_reduce.cuh"
#include "dependent_launch.cuh"

// Applies RoPE to the head's q in its buffer, puts the new token's k and v into smem.new_token, and appends them to the
// cache if this block has the head's last tile (with scales: does either only then). With kSharedRows applies RoPE
// alone. Ends with a barrier.
template <int kRows>
__device__ __forceinline__ void prepare_head(const DecodeParams& params, const DecodeSharedMemory<kRows>& smem,
                                             const TileCoord& at, unsigned char* head, float* new_scales,
                                             bool has_last_tile) {
    const unsigned* key = reinterpret_cast<const unsigned*>(head + kRows * kRowBytes);
    const RopeAngles angles(reinterpret_cast<const float*>(head + (kRows + 2) * kRowBytes), params.rotary_dim, 0);
    const int half = params.rotary_dim / 4;  // words
#pragma unroll 1
    for (int x = threadIdx.x; x < params.group_size * half && at.position >= 0; x += kBlockThreads) {
        apply_rope_in_tile(head, x / half, x % half, half, angles);
    }
    if constexpr (kSharedRows) {
        // k and v are as they are stored
    } else if constexpr (kQuantized) {
#pragma unroll 1
        for (int kv = kWarps - 1 - threadIdx.x / 32; kv < 2 && has_last_tile && at.position >= 0; kv += kWarps) {
            quantize_row(params, at, kv, at.position, smem.new_token + kv * kStoredRowBytes, new_scales + kv,
                         [&](int word) { return kv ? key[kRowWords + word] : apply_rope(key, word, angles); });
        }
    } else {
#pragma unroll 1
        for (int x = kBlockThreads - 1 - threadIdx.x; x < kRowWords && at.position >= 0; x += kBlockThreads) {
            unsigned* new_token = reinterpret_cast<unsigned*>(smem.new_token) + x;
            unsigned char* appended =
                params.cache + at.slot * params.slot_stride
                + (static_cast<long long>(at.kv_head) * params.max_sequence_length + at.position) * kRowBytes + 4 * x;
            new_token[0] = apply_rope(key, x, angles);
            new_token[kRowWords] = key[kRowWords + x];
            if (!has_last_tile) continue;
            *reinterpret_cast<unsigned*>(appended) = new_token[0];
            *reinterpret_cast<unsigned*>(appended + params.kv_stride) = new_token[kRowWords];
        }
    }
    __syncthreads();
}

// Halves of 16 columns in a published fragment. Several new tokens make many rows, whose partial results are packed.
constexpr int kHalves = kMaxNewTokens == 1 ? 1 : 2;
constexpr int kRowFragments = kFragmentsPerRow<kHalves>;

// Merges the partial results of all warps for the `rows` rows of a head. Each warp writes its output to kFreeTiles ring
// tiles, from `free_tile` on, as fragments of 16 columns. Then every warp merges some fragments and calls
// emit(fragment, vector, PartialState, is_live). Lanes without a row call it with `is_live` false if fragments are
// packed, else not at all. For all threads of the block.
template <int kFreeTiles, int kRows, class Emit>
__device__ __forceinline__ void reduce_warps(const DecodeSharedMemory<kRows>& smem, int free_tile,
                                             const typename DecodeLayout<kRows>::State& state, int rows, float factor,
                                             const HeadScales& scales, Emit emit) {
    using OutputFragments = typename DecodeLayout<kRows>::OutputFragments;
    // that fit into these tiles, in float
    constexpr int kFreeRows = kFreeTiles * kTileBytes / (4 * kHeadDim);
    constexpr int kRoundRows = kRows < kFreeRows ? kRows : kFreeRows;
    static_assert(kRows % kRoundRows == 0, "rounds of equal size");
    // of 8 rows and 16 columns each
    constexpr int kColumns = kFragmentsPerRow<1>, kRoundFragments = kColumns * kRoundRows / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A warp merges one fragment of 8 rows at a time, or two where only 4 rows are in use and fragments are more than
    // warps.
    const int fragments_at_once = kHalves == 1 && kColumns > kWarps && rows <= 4 ? 2 : 1;
    write_totals<kRows>(smem.warp_totals + warp * kRows, state);
#pragma unroll
    for (int row0 = 0; row0 < kRows; row0 += kRoundRows) {
        if (row0) __syncthreads();
        __syncwarp();
        write_fragments<kRows, kRoundRows>(smem.ring_tile(warp, free_tile), state, row0, rows, scales);
        __syncthreads();
        if constexpr (kHalves == 1) {
#pragma unroll 1
            for (int x = warp; x * fragments_at_once < kRoundFragments; x += kWarps) {
                const int fragment = x * fragments_at_once + lane * fragments_at_once / 32,
                          vector = lane % (32 / fragments_at_once);
                const int row = row0 + fragment / kColumns * 8 + OutputFragments::row_at(vector);
                if (row >= rows) continue;
                PartialState<1> merged;
                merged.merge(smem.ring_tile(0, free_tile) + (32 * fragment + vector) * 16, kRingTiles * kTileBytes, 0,
                             reinterpret_cast<const unsigned char*>(smem.warp_totals + row), kRows * sizeof(float2),
                             kWarps, factor);
                emit(row * kRowFragments + fragment % kColumns, OutputFragments::vector_at(vector), merged, true);
            }
        } else {
#pragma unroll 1
            for (int x = warp; x < kRowFragments * kRoundRows / 8; x += kWarps) {
                const int fragment = x % kRowFragments, first_row = row0 + x / kRowFragments * 8,
                          row = first_row + OutputFragments::row_at(lane), column = 2 * fragment;
                if (first_row >= rows) continue;
                // If the last fragment of a row has 16 columns only, these come twice.
                const int half_bytes = column + 1 < kColumns ? 32 * 16 : 0;
                PartialState<2> merged;
                merged.merge(smem.ring_tile(0, free_tile) + (32 * (x / kRowFragments * kColumns + column) + lane) * 16,
                             kRingTiles * kTileBytes, half_bytes,
                             reinterpret_cast<const unsigned char*>(smem.warp_totals + min(row, rows - 1)),
                             kRows * sizeof(float2), kWarps, factor);
                emit(row * kRowFragments + fragment, OutputFragments::vector_at(lane), merged, row < rows);
            }
        }
    }
}

// Row 0 of a head in `out`; those of the next token follow output_token_stride bytes further on.
__device__ __forceinline__ unsigned char* output_rows(const DecodeParams& params, const TileCoord& at) {
    const int first = kMaxNewTokens == 1 ? at.slot * params.num_kv_heads : at.slot * params.width * params.num_kv_heads;
    return params.out + static_cast<long long>(first + at.kv_head) * params.group_size * kRowBytes;
}
__device__ __forceinline__ long long output_token_stride(const DecodeParams& params) {
    return static_cast<long long>(params.num_kv_heads) * params.group_size * kRowBytes;
}

// Writes one vector of a fragment to `out`.
template <int kRows>
__device__ __forceinline__ void store_output(const DecodeParams& params, const TileCoord& at, int fragment, int vector,
                                             const PartialState<kHalves>& state) {
    unsigned* words = reinterpret_cast<unsigned*>(output_rows(params, at)) + (kQuantized ? 2 : 1) * vector;
    const int row = fragment / kRowFragments;
    int head = at.kv_head * params.group_size + row;
    if constexpr (kMaxNewTokens == 1) {
        words += 8 * fragment;
    } else {
        const int token = divide_small(row, params.group_size);
        head -= token * params.group_size;
        words += row * kRowWords + 16 * (fragment % kRowFragments)
                 + token * (output_token_stride(params) - params.group_size * kRowBytes) / 4;
    }
    const float inverse = reciprocal_approx(params.sinks.added_to(state.sum, state.maximum, params.score.factor, head));
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
        // the last fragment of a row is a half one
        if (h > 0 && kFragmentsPerRow<1> % 2 && fragment % kRowFragments == kRowFragments - 1) break;
        const float4 value = DecodeLayout<kRows>::OutputFragments::columns(state.values[h]);
        words[8 * h] = pack(Element{}, {value.x * inverse, value.y * inverse});
        words[8 * h + (kQuantized ? 1 : 4)] = pack(Element{}, {value.z * inverse, value.w * inverse});
    }
}

// Zeros for a slot that takes no part, from this token on.
__device__ __forceinline__ void store_zeros(const DecodeParams& params, const TileCoord& at, int first_token) {
#pragma unroll 1
    for (int token = first_token; token < params.width; token++) {
        unsigned char* out = output_rows(params, at);
        if constexpr (kMaxNewTokens > 1) out += token * output_token_stride(params);
#pragma unroll 1
        for (int x = threadIdx.x; x < params.group_size * kRowChunks; x += kBlockThreads)
            reinterpret_cast<uint4*>(out)[x] = uint4{};
    }
}

// The reduction over the blocks of this block's first head. Used if this block merges fragments of that head.
template <int kRows>
__device__ __forceinline__ SplitKVReduce<kHalves> first_head_reduce(const DecodeParams& params,
                                                                    const DecodeSharedMemory<kRows>& smem,
                                                                    const WorkRange& work) {
    const int head_begin = work.begin - work.first.tile, block = static_cast<int>(blockIdx.x);
    const bool has_last_tile = work.first.tile > 0 && head_begin + work.first.num_tiles <= work.end;
    const int first_block = work.is_even_split ? work.first_block
                            : has_last_tile    ? divide(head_begin, work.tiles_per_block)
                                               : block;
    const int num_blocks = work.is_even_split
                               ? min((work.first.num_tiles - 1) / kMinTilesPerBlock, params.splits_per_head - 1) + 1
                               : block - first_block + 1;
    float4* own = work.is_even_split ? reinterpret_cast<float4*>(smem.heads) : params.own_partials;
    return {work.first.rows(params) * kRowFragments,
            params.width * params.group_size * kRowFragments,
            first_block,
            num_blocks,
            work.is_even_split,
            params.partials,
            own};
}

template <int kRows>
__device__ __forceinline__ void decode(const DecodeParams& params) {
    DYNAMIC_SHARED(unsigned char, start_of_shared);
    const DecodeSharedMemory<kRows> smem(start_of_shared);
    static_assert(
        kHeadBuffers * DecodeSharedMemory<kRows>::kHeadBufferBytes >= 16 * kRows * kRowFragments * kFragmentVectors,
        "the head buffers also hold a block's own fragments");
    const int warp = threadIdx.x / 32;
    const L2Policy policy = evict_first_policy();

    // Lengths take longest to arrive: whatever needs none of them is started before they are used.
    const EvenSplitStart start = even_split_start(params);
    prefetch_first_tiles(params, start);
    // most of the time here is latency, in which the next launch can begin to read its weights
    grid_dependents_may_launch();
    grid_dependency_wait();
    const EarlyLengths early = load_early_lengths(params, start.slot);
    load_speculative_keys(params, smem, start, policy);
    const WorkRange work = schedule(params, start, early);
    if (work.begin >= work.end) {
        cp_async_wait_group<0>();
        return;
    }

    const bool speculated_right = params.window == 0 && work.is_even_split;
    KVPipeline<kRows> pipeline(params, smem, work, policy, speculated_right);
    pipeline.prefill();
    const ScoreTransform score = params.score;
    const SplitKVReduce<kHalves> reduce = first_head_reduce(params, smem, work);

    HeadScales scales;
    typename DecodeLayout<kRows>::Queries queries;
    typename DecodeLayout<kRows>::State state;
    reset(state);  // every head begins with it anyway; here it lets the compiler place the accumulators better
    TileIterator tiles(work);
    int ring_tile = !speculated_right;  // of K, then of V, of this step
    for (int count; tiles.done < work.end; tiles.advance(params, work, count)) {
        const TileCoord& at = tiles.at;
        count = tiles.count(work);
        const int head_begin = tiles.done - at.tile;  // in the numbers of `work`
        const bool has_last_tile = tiles.has_last_tile(work);
        if (tiles.starts_head(work)) {
            pipeline.wait_for_head();
            __syncthreads();
            unsigned char* const head = smem.head_buffer(tiles.head_buffer);
            float* const new_scales = smem.scales_of_head(tiles.head_buffer);
            if constexpr (kMaxNewTokens == 1) {
                prepare_head(params, smem, at, head, new_scales, has_last_tile);
            } else {
                prepare_few<kRows>(params, at, head, new_scales, has_last_tile);
            }
            queries.load(head);
            if constexpr (kQuantized) scales.start(params, new_scales);
            reset(state);
            if (warp == kWarps - 1 && has_last_tile && at.position >= 0) {
                if constexpr (kMaxNewTokens == 1) {
                    const float value_scale = kQuantized ? scales.relative_to_new_value(params, new_scales[1]) : 1.0f;
                    const unsigned char* const new_token = kSharedRows ? head + kRows * kRowBytes : smem.new_token;
                    start_with_new_token(state, queries, new_token, score, scales.key, value_scale);
                } else {
                    start_with_few(state, queries, params, at, head, new_scales, scales);
                }
            }
            if constexpr (kHeadBuffers < kStages) {
                static_assert(DecodeLayout<kRows>::Queries::kInRegisters, "nothing of the head is read after this");
                __syncthreads();  // the buffer is filled again in this step
            }
        }
        const bool has_tile = warp < count && at.position >= 0;
        typename DecodeLayout<kRows>::Scores scores = {};
        pipeline.wait_for_keys();
        pipeline.fill_keys();
        if (has_tile) {
            const unsigned char* const tile = smem.ring_tile(warp, ring_tile);
            compute_scores<kRows>(scores, queries, tile);
            if constexpr (kQuantized)
                scale_scores<kRows>(scales, params, scores, TileScales{smem.tile_scales(warp, ring_tile)});
            update_softmax<kRows>(state, scores, params, at, at.first_token(warp), score);
        }
        ring_tile = next_ring_tile(ring_tile);
        pipeline.wait_for_values();
        pipeline.fill_values();
        if (has_tile) {
            const unsigned char* const tile = smem.ring_tile(warp, ring_tile);
            if constexpr (kQuantized)
                scale_probabilities<kRows>(scales, params, state, scores,
                                           TileScales{smem.tile_scales(warp, ring_tile)});
            accumulate_output<kRows>(state, scores, tile);
        }
        const int free_tile = ring_tile;
        ring_tile = next_ring_tile(ring_tile);

        // or this block's part of it
        const bool ends_head = at.tile + count >= at.num_tiles || tiles.done + count >= work.end;
        if (!ends_head) continue;
        if (at.position < 0) {
            store_zeros(params, at, 0);
            continue;
        }
        if (kMaxNewTokens > 1 && has_last_tile) store_zeros(params, at, at.count);
        const bool has_whole_head = work.begin <= head_begin && has_last_tile;
        const auto emit = [&](int fragment, int vector, const PartialState<kHalves>& merged, bool is_live) {
            if (has_whole_head) {
                if (is_live) store_output<kRows>(params, at, fragment, vector, merged);
                return;
            }
            const float largest = kHalves == 1 ? 0 : quad_max_or_nan(merged.largest());
            if (is_live) reduce.publish(fragment, vector, merged, largest, has_last_tile);
        };
        if (kMaxNewTokens > 1 && tiles.done + count >= work.end) {  // all copies have arrived: every tile is free
            reduce_warps<(kRingTiles < 4 ? 2 : 4), kRows>(smem, 0, state, at.rows(params), score.factor, scales, emit);
        } else {
            reduce_warps<1, kRows>(smem, free_tile, state, at.rows(params), score.factor, scales, emit);
        }
    }
    cp_async_wait_group<0>();
    // With several new tokens, all that a thread has if every row is in use.
    constexpr int kVectorsOfThread = (kRows * kRowFragments * kFragmentVectors + kBlockThreads - 1) / kBlockThreads;
    constexpr int kAtOnce = kMaxNewTokens == 1 ? kPolledAtOnce : kVectorsOfThread < 8 ? kVectorsOfThread : 8;
    reduce.collect<kAtOnce>(reinterpret_cast<float4*>(smem.ring), kWarps * kRingTiles * kTileBytes, score.factor,
                            [&](int fragment, int vector, const PartialState<kHalves>& merged) {
                                store_output<kRows>(params, work.first, fragment, vector, merged);
                            });
}
