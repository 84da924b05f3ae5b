// Attention of several new tokens per slot over what the cache holds already, with RoPE and, for few tokens, append.
//
// Flash attention over row blocks (prefill_schedule.cuh): the rows are new tokens times query heads of a K/V head, so K
// and V are read once for all of them. Tiles of kTileKeys keys and values pass by in a ring in shared memory; scores,
// probabilities and output stay in registers.
//
//     prefill_schedule.cuh   row blocks, and the tiles of this block
//     prefill_tiles.cuh      loads of tiles from the cache
//     prefill_new_rows.cuh   loads of the rows of the new tokens; RoPE; append
//     prefill_scores.cuh     scores of a warp for a tile
//     prefill_output.cuh     output that a warp accumulates
//     prefill_results.cuh    epilogue
//     split_kv_reduce.cuh    reduction over several blocks
//
// Shared memory of a block; trt_kvcache/kernels/attention_tiles.py computes the same size:
//
//     queries   [kBlockRows] rows, swizzled. A warp reads its own rows; at the end they may hold its output, until it
//               is stored.
//     rings     one, or one for each of two warpgroups: tiles of kRingKeys rows, swizzled: keys, then values
//               (prefill_ring.cuh; prefill_stored_ring.cuh). Filled and read by all threads of the ring. At the end of
//               the kernel it holds the fragments of the warps (and then what other blocks published), and after them
//               the fragments that this block merges.
//     scales    of the tiles of a quantized cache.
//     sums      if warps divide the columns (kColumnWarps): partial scores, which two warps add.
#pragma once

#include "attention/prefill_new_rows.cuh"
#include "attention/prefill_output.cuh"
#include "attention/prefill_results.cuh"
#include "attention/prefill_ring.cuh"
#include "attention/prefill_schedule.cuh"
#include "attention/prefill_scores.cuh"
#include "attention/prefill_stored_ring.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/split_kv_reduce.cuh"
#include "dependent_launch.cuh"

// The sizes of a variant of the kernel, and its steps. Warps are kRowWarps x kKeyWarps x kColumnWarps: each has kRowTiles
// times 16 rows, kWarpKeys of each kTileKeys keys and kWarpColumns of the columns. kWarpgroups: four of them, with 64
// rows and the same keys, multiply together.
template <bool kAppends, bool kWarpgroups, int kRowWarps, int kKeyWarps, int kRowTiles, int kTileKeys, int kStages,
          int kMinTilesPerSplit>
struct Prefill {
    static constexpr int kThreads = 32 * kColumnWarps * kRowWarps * kKeyWarps, kWarpRows = 16 * kRowTiles,
                         kBlockRows = kRowWarps * kWarpRows;
    // Two warpgroups that have the same rows have rings of their own, and so different tiles; else warps divide the
    // keys of each tile.
    static constexpr int kRings = kWarpgroups && !kQuantized ? kKeyWarps : 1, kRingKeys = kTileKeys / kRings;
    static constexpr int kWarpKeys = kTileKeys / kKeyWarps, kTileBytes = kRingKeys * kRowBytes;
    // True if a warpgroup starts the scores of the next tile before the softmax of this one. It pays off if conversion
    // makes steps long, and registers suffice for two tiles of scores.
    static constexpr bool kScoresAhead = kQuantized && kWarpgroups && kHeadDim <= 128;
    using Tiles = PrefillTiles<kAppends, kWarpgroups, kThreads, kBlockRows, kRingKeys, kRings>;
    using Rows = typename Tiles::Rows;
    using NewRows = PrefillNewRows<Tiles, kThreads, kBlockRows>;
    using Work = PrefillWork<Rows>;
    using Ring = PrefillRing<kQuantized, kScoresAhead, Tiles, Work, kThreads, kRingKeys, kStages>;
    using Scores = PrefillScores<Tiles, kRowTiles, kWarpKeys>;
    using Output = PrefillOutput<Tiles, kRowTiles, kWarpKeys>;
    static constexpr int kRowFragments = kFragmentsPerRow<2>, kMaxFragments = kBlockRows * kRowFragments,
                         kFragmentBytes = kFragmentVectors * 16;
    static constexpr int kOwnBytes = kMaxFragments / 2 * kFragmentBytes, kStagingBytes = Ring::kBytes - kOwnBytes;
    using Results = PrefillResults<Tiles, kWarpgroups, kRowWarps, kKeyWarps, kRowTiles, kStagingBytes>;
    using Partial = typename Results::Partial;
    static constexpr int kGroupRows = kWarpgroups ? 64 : kWarpRows;  // of the warps that compute together
    static_assert(!kWarpgroups || (kRowWarps % 4 == 0 && kRowTiles == 1 && kHeadDim % 64 == 0 && kColumnWarps == 1),
                  "whole warpgroups and panels");
    // True if the next tile is filled while the tensor cores are busy. Two blocks of eight warps leave too few
    // registers for it.
    static constexpr bool kFillsMeanwhile = kWarpgroups && kRowWarps == 4;
    // Vectors that a thread polls together: nearly all that it has.
    static constexpr int kPolledByThread = (kMaxFragments * kFragmentVectors + kThreads - 1) / kThreads < 16
                                               ? (kMaxFragments * kFragmentVectors + kThreads - 1) / kThreads
                                               : 16;
    static_assert(!kAppends || 64 % kWarpKeys == 0, "a tile of new tokens has values for all keys of their warps");
    static_assert(kWarpKeys % 16 == 0, "a warp's part of a tile is whole fragments");

    // Keys of a warp in a tile: `first` to first + kWarpKeys - 1, of which those before `end` are live.
    struct Keys {
        int first, end;
    };

    // The steps of a warp over the tiles of its block. One of its three pipelines runs.
    struct Steps {
        Output& output;
        Ring& ring;
        const Work& work;
        const PrefillParams& params;
        const unsigned char* const queries;
        const bool has_token_scales;
        const int span;                 // tokens that a row sees, at most
        RowPlace places[kRowTiles][2];  // of this lane's rows
        // Of the rows that are computed together: the first one; the last key that all of them attend to, but for
        // windows; and the last key that one of them may attend to, -1 if none is live.
        int group_row, group_first, group_last;

        __device__ __forceinline__ Steps(Output& output, Ring& ring, const Work& work, const PrefillParams& params,
                                         const unsigned char* queries)
            : output(output), ring(ring), work(work), params(params), queries(queries),
              has_token_scales(kQuantized && params.scales.per_token),
              span(params.window > 0 ? params.window : 0x7FFFFFFF) {
            const Rows& rows = work.rows;
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = row_warp() * kWarpRows + 16 * m + 8 * i + lane / 4;
                    places[m][i].load(params.tree, rows.past, rows.slot, params.width, rows.token_of(params, row),
                                      rows.count);
                }
            }
            group_row = row_warp() * kWarpRows / kGroupRows * kGroupRows;
            const int live = min(kGroupRows, rows.rows - group_row);
            group_first = kTree ? rows.past - 1 : rows.past + rows.token_of(params, group_row);
            group_last = live > 0 ? rows.past + rows.token_of(params, group_row + live - 1) : -1;
        }

        // Scores ahead, of warpgroups over a quantized cache. A step starts two products: the scores of the next tile,
        // and the output of this one. While they run, it converts the tile after the next one.
        __device__ __forceinline__ void run_scores_ahead() const {
            const SharedAddress query_rows = shared_address(queries) + group_row * 128;
            const auto meet = [] {
                shared_memory_fence();
                __syncthreads();
            };
            typename Scores::Packed a;
            Scores scores;
            typename Output::RowScales row_scales;
            meet();
            scores.clear();
            scores.begin_products(query_rows, keys_address(work.begin));
            ring.advance(work.begin - 1);
            scores.wait();
            // there is no output yet
            to_probabilities(scores, keys_of(work.begin), scales_of(work.begin), row_scales);
            scores.pack(a);
#pragma unroll 1
            for (int tile = work.begin; tile + 1 < work.end; tile++) {
                meet();
                scores.clear();
                scores.begin_products(query_rows, keys_address(tile + 1));
                output.begin_products(a, keys_address(tile) + kTileBytes);
                ring.advance(tile);
                scores.template wait<1>();
                const bool is_far = to_probabilities(scores, keys_of(tile + 1), scales_of(tile + 1), row_scales);
                output.wait(a);
                if (is_far) output.scale(row_scales);
                scores.pack(a);
            }
            meet();
            output.begin_products(a, keys_address(work.end - 1) + kTileBytes);
            output.wait(a);
        }

        // Warpgroups: four warps multiply 64 rows with a tile (wgmma). A step computes scores, probabilities and output
        // of one tile, and fills the next place of the ring meanwhile (kFillsMeanwhile) or first.
        __device__ __forceinline__ void run_by_warpgroups() const {
            const SharedAddress query_rows = shared_address(queries) + group_row * 128;
            for (int tile = ring.start(); work.has(tile); tile = ring.after(tile)) {
                ring.wait();  // for this tile
                shared_memory_fence();
                ring.barrier();
                const SharedAddress tile_keys = keys_address(tile);
                const float* const scales = scales_of(tile);
                if constexpr (!kFillsMeanwhile) ring.advance(tile);
                const Keys keys = keys_of(tile);
                if (!sees(keys)) {
                    if constexpr (kFillsMeanwhile) ring.advance(tile);
                    continue;
                }
                Scores scores = {};
                scores.begin_products(query_rows, tile_keys);
                if constexpr (kFillsMeanwhile) ring.advance(tile);
                scores.wait();
                typename Output::RowScales row_scales;
                to_probabilities(scores, keys, scales, row_scales);
                typename Scores::Packed a;
                scores.pack(a);
                output.begin_products(a, tile_keys + kTileBytes);
                output.wait(a);
            }
        }

        // Warps: each one multiplies its rows with its keys of a tile (mma). A step fills the next place of the ring,
        // and then computes scores, probabilities and output of one tile.
        __device__ __forceinline__ void run_by_warps() const {
            const int lane = threadIdx.x % 32;
            const int first_chunk = column_warp() * (kWarpColumns / 8);
            const LdmatrixAddress query_rows(shared_address(queries + row_warp() * kWarpRows * kRowBytes), lane % 16,
                                             first_chunk + lane / 16);
            for (int tile = ring.start(); work.has(tile); tile = ring.after(tile)) {
                ring.wait();  // for this tile
                ring.barrier();
                const SharedAddress tile_keys = keys_address(tile);
                const float* const scales = scales_of(tile);
                ring.advance(tile);
                const Keys keys = keys_of(tile);
                if (!sees(keys)) continue;
                const LdmatrixAddress key_tile(tile_keys, lane % 8 + lane / 16 * 8, first_chunk + lane / 8 % 2),
                    value_tile(tile_keys + kTileBytes, lane % 16, first_chunk + lane / 16);
                Scores scores = {};
                scores.add_products(query_rows, key_tile);
                if constexpr (kColumnWarps > 1) {
                    const int pair = threadIdx.x / 32 % (kRowWarps * kKeyWarps);
                    scores.add_other_columns(ring.column_sums() + pair * Scores::kSumBytes, column_warp(), 1 + pair);
                }
                typename Output::RowScales row_scales;
                to_probabilities(scores, keys, scales, row_scales);
                output.add_products(scores, value_tile);
            }
        }

    private:
        static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % kRowWarps; }
        // The first key of this warp, counted from the start of a tile.
        static __device__ __forceinline__ int warp_key() {
            const int warp = static_cast<int>(threadIdx.x) / 32 / kRowWarps;
            return kRings < kKeyWarps ? (kColumnWarps > 1 ? warp % kKeyWarps : warp) * kWarpKeys : 0;
        }
        static __device__ __forceinline__ int column_warp() { return Results::column_warp(); }
        __device__ __forceinline__ SharedAddress keys_address(int tile) const {
            return shared_address(ring.tile(tile)) + warp_key() * (kWarpgroups ? 128 : kRowBytes);
        }
        __device__ __forceinline__ const float* scales_of(int tile) const { return ring.scales(tile) + warp_key(); }
        __device__ __forceinline__ Keys keys_of(int tile) const {
            const Rows& rows = work.rows;
            int first = (rows.first_tile + tile) * kRingKeys, end = rows.keys_end;
            if (work.has_new_tokens(tile)) {
                first = rows.past;
                end = rows.past + rows.count;
            }
            return {first + warp_key(), end};
        }
        // True if a row of the group may attend to one of these keys.
        __device__ __forceinline__ bool sees(const Keys& keys) const {
            return keys.first <= group_last && keys.first < keys.end && keys.first + kWarpKeys > group_first - span + 1;
        }
        // Of this lane's rows. In a chain it is that of the last row.
        __device__ __forceinline__ int last_position() const {
            int last = places[kRowTiles - 1][1].position;
#pragma unroll
            for (int i = 0; i < 2 * kRowTiles && kTree; i++) last = max(last, places[i / 2][i % 2].position);
            return last;
        }
        // Turns scores into probabilities, in place. scales: of the keys. With kScoresAhead, returns true if the caller
        // must multiply the output by row_scales.
        __device__ __forceinline__ bool to_probabilities(Scores& scores, const Keys& keys, const float* scales,
                                                         typename Output::RowScales& row_scales) const {
            if (has_token_scales) scores.apply_key_scales(scales);
            scores.apply_softcap(params.score);
            const bool needs_mask = keys.first + kWarpKeys - 1 > group_first || keys.first <= last_position() - span;
            if (needs_mask || keys.first + kWarpKeys > keys.end)
                scores.apply_mask(places, keys.first, work.rows.past, keys.end, span);
            return output.template update_softmax<kScoresAhead>(scores, params.score.factor, row_scales);
        }
    };

    // Accumulates the output of a block over the tiles of its work. Ends with all copies arrived, without a barrier.
    static __device__ __forceinline__ void accumulate(Output& output, unsigned char* queries,
                                                      unsigned char* shared_ring, const PrefillParams& params,
                                                      const Work& work) {
        Ring ring(shared_ring, params, work);
        NewRows::fill_queries(queries, params, work.rows, work.kv_head, [&] {
            ring.begin();
            if (work.has_new_tokens(ring.start()))
                NewRows::fill_new_tokens(ring.tile(ring.start()), params, work.rows, work.kv_head);
        });
        if constexpr (Ring::kRings > 1) {  // the threads of all rings have stored q
            shared_memory_fence();
            __syncthreads();
        }
        ring.prepare_first();  // the barrier of the first step follows
        const Steps steps(output, ring, work, params, queries);
        output.reset();
        if constexpr (kScoresAhead) {
            steps.run_scores_ahead();
        } else if constexpr (kWarpgroups) {
            steps.run_by_warpgroups();
        } else {
            steps.run_by_warps();
        }
        cp_async_wait_group<0>();
    }

    // Grid: x alone. kSplits: if params.order says so, several blocks may share a row block, and the launch is
    // cooperative. Else one block for each.
    template <bool kSplits>
    static __device__ __forceinline__ void run(PrefillParams params) {
        DYNAMIC_SHARED(unsigned char, queries);
        unsigned char* const ring = queries + kBlockRows * kRowBytes;
        const bool splits = kSplits && params.order == kSplit;
        // all blocks of this launch are resident: the next one takes no place of theirs
        if (splits) grid_dependents_may_launch();
        const BlocksForRowBlocks blocks(params);
        grid_dependency_wait();
        const Work work = splits ? split_of_row_block<Rows>(params, kMinTilesPerSplit * kRings, blocks)
                                 : whole_row_block<Rows>(params);
        const Rows& rows = work.rows;
        if (kQuantized && work.begin < work.end) params.use_head_scales(rows.slot, work.kv_head);
        const float factor = params.score.factor;
        if (work.begin < work.end) {
            Output output;
            accumulate(output, queries, ring, params, work);
            const typename Results::ToOutput to_output{params, rows, work.kv_head};
            if (kSplits && work.num_blocks > 1) {
                __syncthreads();  // all warps have left the ring
                float4* const own = reinterpret_cast<float4*>(ring + kStagingBytes);
                const SplitKVReduce<2> reduce(rows.rows * kRowFragments, kMaxFragments, work.first_block,
                                              work.num_blocks, true, params.partials, own);
                Results::for_each_vector(output.rows, ring, rows, factor, typename Results::ToBlocks{reduce});
                reduce.template collect<kPolledByThread>(reinterpret_cast<float4*>(ring), kStagingBytes, factor,
                                                         [&](int fragment, int vector, const Partial& merged) {
                                                             to_output.vector(fragment, vector, merged);
                                                         });
            } else if constexpr (kKeyWarps == 1) {
                Results::store_rows(output.rows, queries, params, rows, work.kv_head);
            } else {
                Results::for_each_vector(output.rows, ring, rows, factor, to_output);
            }
        }
        if (work.has_padding) Results::store_zeros(params);
    }
};
