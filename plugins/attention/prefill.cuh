// Attention of several new tokens per slot over what the cache holds already, with RoPE and, for few tokens, append.
//
// Flash attention over row blocks (prefill_schedule.cuh): the rows are new tokens times query heads of a K/V head, so K and V are read once for
// all of them. Tiles of kTileKeys keys and values pass by in a ring in shared memory; scores, probabilities and output stay in registers.
//
//     prefill_schedule.cuh   row blocks, and which tiles of them this block has
//     prefill_tiles.cuh      how shared memory is filled; RoPE; append
//     mma.cuh               which lane has which element
//     softmax_state.cuh     what a warp accumulates
//     split_kv_reduce.cuh   how the results of several blocks become one
//
// Shared memory of a block; trt_kvcache/kernels/attention_tiles.py computes the same size:
//
//     queries   [kBlockRows] rows, swizzled. A warp reads its own rows; at the end they may hold its output, until it is stored.
//     ring      tiles of kTileKeys rows, swizzled: keys, then values (prefill_ring.cuh; prefill_stored_ring.cuh). Filled and read by all
//               threads. At the end of the kernel it holds the strips of the warps (and then what other blocks published), and behind them
//               the strips that this block merges.
//     scales    of the tiles of a quantized cache.
#pragma once

#include "attention/prefill_ring.cuh"
#include "attention/prefill_schedule.cuh"
#include "attention/prefill_stored_ring.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/mma.cuh"
#include "attention/split_kv_reduce.cuh"
#include "dependent_launch.cuh"

// The sizes of a form of the kernel, and its steps. Warps are kRowWarps x kKeyWarps: each has kRowTiles times 16 rows and a part of the keys of
// every tile. kWarpgroups: four of them, with 64 rows and the same keys, multiply together.
template <bool kAppends, bool kWarpgroups, int kRowWarps, int kKeyWarps, int kRowTiles, int kTileKeys, int kStages, int kMinTilesPerPart>
struct Prefill {
    static constexpr int kThreads = 32 * kRowWarps * kKeyWarps, kWarpRows = 16 * kRowTiles, kBlockRows = kRowWarps * kWarpRows;
    static constexpr int kWarpKeys = kTileKeys / kKeyWarps, kTileBytes = kTileKeys * kRowBytes;
    // Whether a warpgroup begins with the scores of the next tile before it makes probabilities of those of this one: where conversion makes steps
    // long, and there are registers for two tiles of scores.
    static constexpr bool kScoresAhead = kQuantized && kWarpgroups && kHeadDim <= 128;
    using Tiles = PrefillTiles<kAppends, kWarpgroups, kThreads, kBlockRows, kTileKeys>;
    using Rows = typename Tiles::Rows;
    using Work = PrefillWork<Rows>;
    using Ring = PrefillRing<kQuantized, kScoresAhead, Tiles, Work, kThreads, kTileKeys, kStages>;
    static constexpr int kColumns = kStripsPerRow<1>, kRowStrips = kStripsPerRow<2>;  // 16 columns in fragments, and strips that are handed on
    static constexpr int kRingBytes = Ring::kBytes, kMaxStrips = kBlockRows * kRowStrips, kStripBytes = kStripVectors * 16;
    static constexpr int kOwnBytes = kMaxStrips / 2 * kStripBytes, kStagingBytes = kRingBytes - kOwnBytes;
    static constexpr int kGroupRows = kWarpgroups ? 64 : kWarpRows;  // of the warps that compute together
    static_assert(!kWarpgroups || (kRowWarps % 4 == 0 && kRowTiles == 1 && kHeadDim % 64 == 0), "whole warpgroups and panels");
    // Whether the next tile is filled while the tensor cores are busy: not where two blocks of eight warps leave too few registers for it.
    static constexpr bool kFillsMeanwhile = kWarpgroups && kRowWarps == 4;
    // Chunks of q that a thread applies RoPE to, if all have it.
    static constexpr int kChunksByThread = (kBlockRows * (kHeadDim / 16) + kThreads - 1) / kThreads;
    // Vectors that a thread polls together: nearly all that it has.
    static constexpr int kPolledByThread = (kMaxStrips * kStripVectors + kThreads - 1) / kThreads < 16 ? (kMaxStrips * kStripVectors + kThreads - 1) / kThreads : 16;
    static_assert(kWarpKeys % 16 == 0, "a warp's part of a tile is whole fragments");
    static_assert(kKeyWarps == 1 || kWarpgroups || kStagingBytes >= kKeyWarps * kBlockRows * (kColumns * 64 + 8), "the ring also holds the results of all warps");
    static_assert(!kWarpgroups || kKeyWarps <= 2, "two warpgroups exchange halves of their rows");

    using Scores = float[kRowTiles][kWarpKeys / 8][4];
    using State = SoftmaxState<16>[kRowTiles];
    using Partial = PartialState<2>;

    static __device__ __forceinline__ void clear(Scores& scores) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) scores[m][j][e] = 0;
            }
        }
    }

    static __device__ __forceinline__ void compute_scores(Scores& scores, const LdmatrixAddress& queries, const LdmatrixAddress& key_tile) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) ldmatrix_x4(a[m], queries(d, 16 * m));
#pragma unroll
            for (int j = 0; j < kWarpKeys / 16; j++) {
                unsigned b[4];
                ldmatrix_x4(b, key_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, scores[m][2 * j], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, scores[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // The same by a warpgroup: queries and keys are its 64 rows and its keys in their first panels. They are there behind warpgroup_wait.
    static __device__ __forceinline__ void begin_scores(Scores& scores, SharedAddress queries, SharedAddress keys) {
        constexpr int kPartFragments = kWarpKeys % 64 ? 4 : 8;
        using Part = float[kPartFragments][4];
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; j += kPartFragments) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                const SharedAddress a = queries + d / 4 * Tiles::QueryLayout::kPanelBytes + d % 4 * 32;
                const SharedAddress b = keys + d / 4 * Tiles::KeyLayout::kPanelBytes + d % 4 * 32 + j * 8 * 128;
                warpgroup_mma(Element{}, reinterpret_cast<Part&>(scores[0][j]), a, b);
            }
        }
        warpgroup_commit();
    }

    // Multiplies each column with the scale of its key.
    static __device__ __forceinline__ void apply_key_scales(Scores& scores, const float* scales) {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; j++) {
            const float2 both = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int e = 0; e < 4; e++) scores[m][j][e] *= e % 2 ? both.y : both.x;
            }
        }
    }

    static __device__ __forceinline__ void apply_softcap(Scores& scores, const ScoreTransform& score) {
        if (!score.has_softcap()) return;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) scores[m][j][e] = score.softcap(scores[m][j][e]);
            }
        }
    }

    // Causal, and within the window. positions: of this lane's two rows in each row tile; first_key: of the warp's part of the tile; there are no
    // keys from keys_end on.
    static __device__ __forceinline__ void apply_mask(Scores& scores, const int (&positions)[kRowTiles][2], int first_key, int keys_end, int span) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kWarpKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int key = first_key + 8 * j + lane % 4 * 2 + e % 2, distance = positions[m][e / 2] - key;
                    if (distance < 0 || distance >= span || key >= keys_end) scores[m][j][e] = kMaskedScore;
                }
            }
        }
    }

    // Turns scores into probabilities. Maxima follow only when a row of the warp is kRescaleThreshold above its own. Then, if kScoresAhead, true is
    // returned, and the output, which is in the making, has yet to be multiplied with `output_scales` of its rows.
    using RowScales = float[kRowTiles][2];
    static __device__ __forceinline__ bool update_softmax(State& state, Scores& scores, float factor, RowScales& output_scales) {
        float highest[kRowTiles][2];
        bool is_far = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                highest[m][i] = state[m].max_with(scores[m], i);
                is_far = is_far || (highest[m][i] - state[m].maxima[i]) * factor > kRescaleThreshold;
            }
        }
        is_far = __any_sync(~0u, is_far);
        if (is_far) {
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if constexpr (kScoresAhead) {
                        output_scales[m][i] = state[m].rescale_sum(i, highest[m][i], factor);
                    } else {
                        state[m].rescale(i, highest[m][i], factor);
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) state[m].exponentiate(scores[m], i, factor);
        }
        return is_far;
    }
    static __device__ __forceinline__ void scale_output(State& state, const RowScales& scales) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) state[m].scale_output(i, scales[m][i]);
        }
    }

    static __device__ __forceinline__ void accumulate_output(State& state, const Scores& probabilities, const LdmatrixAddress& value_tile) {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) pack_a_fragment(Element{}, a[m], probabilities[m][2 * j], probabilities[m][2 * j + 1]);
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                unsigned b[4];
                ldmatrix_x4_trans(b, value_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, state[m].output[2 * d], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, state[m].output[2 * d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // The same by a warpgroup: values are those of its keys in their first panel. The output is there behind warpgroup_wait.
    using Fragments = unsigned[kWarpKeys / 16][4];
    static __device__ __forceinline__ void pack_probabilities(Fragments& a, const Scores& probabilities) {
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++) pack_a_fragment(Element{}, a[j], probabilities[0][2 * j], probabilities[0][2 * j + 1]);
    }
    static __device__ __forceinline__ void begin_output(State& state, const Fragments& a, SharedAddress values) {
        using Panel = float[8][4];
        warpgroup_begin();
#pragma unroll
        for (int j = 0; j < kWarpKeys / 16; j++) {
#pragma unroll
            for (int panel = 0; panel < kHeadDim / 64; panel++) {
                const SharedAddress b = values + panel * Tiles::KeyLayout::kPanelBytes + 16 * j * 128;
                warpgroup_mma_transposed(Element{}, reinterpret_cast<Panel&>(state[0].output[8 * panel]), a[j], b);
            }
        }
        warpgroup_commit();
    }

    // Computes what the tiles of a part contribute to its row block. Ends with all copies arrived, without a barrier.
    static __device__ __forceinline__ void accumulate(State& state, unsigned char* queries, unsigned char* shared_ring, const PrefillParams& params,
                                                      const Work& work) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warp = warp % kRowWarps, key_warp = warp / kRowWarps;
        const int span = params.window > 0 ? params.window : 0x7FFFFFFF;
        const Rows& rows = work.rows;
        Tiles::fill_queries(queries, params, rows, work.kv_head);
        cp_async_commit_group();
        Ring ring(shared_ring, params, work);
        // Angles, too, are asked for before keys and values: behind these they would come last.
        Tiles::template apply_rope<typename Tiles::QueryLayout, kChunksByThread, 8>(
            queries, params, rows.rows, [&](int row) { return rows.past + rows.token_of(params, row); },
            [&] {
                ring.begin();
                cp_async_wait_group<Ring::kGroupsYoungerThanQueries>();  // q
                __syncthreads();
            });
        ring.prepare_first();  // the barrier of the first step follows
        const bool has_token_scales = kQuantized && params.scales.per_token;
        int positions[kRowTiles][2];
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                positions[m][i] = rows.past + rows.token_of(params, row_warp * kWarpRows + 16 * m + 8 * i + lane / 4);
            }
        }
        // Of the rows that are computed together: positions of the first and of the last one that is live; the last one is before the first if
        // none is.
        const int group_row = row_warp * kWarpRows / kGroupRows * kGroupRows, live = min(kGroupRows, rows.rows - group_row);
        const int group_first = rows.past + rows.token_of(params, group_row);
        const int group_last = live > 0 ? rows.past + rows.token_of(params, group_row + live - 1) : -1;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) state[m].reset();

        const SharedAddress group_queries = shared_address(queries) + group_row * 128;
        const auto part_of = [&](int tile) { return shared_address(ring.tile(tile)) + key_warp * kWarpKeys * (kWarpgroups ? 128 : kRowBytes); };
        // scales: of the warp's keys.
        const auto to_probabilities = [&](Scores& scores, int first_key, int keys_end, const float* scales, RowScales& row_scales) {
            if (has_token_scales) apply_key_scales(scores, scales);
            apply_softcap(scores, params.score);
            const bool needs_mask = first_key + kWarpKeys - 1 > group_first || first_key <= positions[kRowTiles - 1][1] - span;
            if (needs_mask || first_key + kWarpKeys > keys_end) apply_mask(scores, positions, first_key, keys_end, span);
            return update_softmax(state, scores, params.score.factor, row_scales);
        };
        if constexpr (kScoresAhead) {
            Fragments a;
            Scores scores;
            RowScales row_scales;
            const auto first_key_of = [&](int tile) { return (rows.first_tile + tile) * kTileKeys + key_warp * kWarpKeys; };
            const auto scales_of = [&](int tile) { return ring.scales(tile) + key_warp * kWarpKeys; };
            const auto meet = [] {
                shared_memory_fence();
                __syncthreads();
            };
            meet();
            clear(scores);
            begin_scores(scores, group_queries, part_of(work.begin));
            ring.advance(work.begin - 1);
            warpgroup_wait(scores[0]);
            to_probabilities(scores, first_key_of(work.begin), rows.keys_end, scales_of(work.begin), row_scales);  // there is no output yet
            pack_probabilities(a, scores);
#pragma unroll 1
            for (int tile = work.begin; tile + 1 < work.end; tile++) {
                meet();
                clear(scores);
                begin_scores(scores, group_queries, part_of(tile + 1));
                begin_output(state, a, part_of(tile) + kTileBytes);
                ring.advance(tile);
                warpgroup_wait<1>(scores[0]);
                const bool is_far = to_probabilities(scores, first_key_of(tile + 1), rows.keys_end, scales_of(tile + 1), row_scales);
                warpgroup_wait(state[0].output);
                hold_registers(a);
                if (is_far) scale_output(state, row_scales);
                pack_probabilities(a, scores);
            }
            meet();
            begin_output(state, a, part_of(work.end - 1) + kTileBytes);
            warpgroup_wait(state[0].output);
            cp_async_wait_group<0>();
            return;
        }

        const LdmatrixAddress query_rows(shared_address(queries + row_warp * kWarpRows * kRowBytes), lane % 16, lane / 16);
        for (int tile = work.begin; tile < work.end; tile++) {
            ring.wait();  // for this tile
            if constexpr (kWarpgroups) shared_memory_fence();
            __syncthreads();
            unsigned char* const tiles = ring.tile(tile);
            const SharedAddress part = part_of(tile);
            const float* const scales = ring.scales(tile) + key_warp * kWarpKeys;
            if constexpr (!kFillsMeanwhile) ring.advance(tile);
            int first_key = (rows.first_tile + tile) * kTileKeys, keys_end = rows.keys_end;
            if (kAppends && tile == rows.num_tiles - 1) {
                Tiles::append_new_tokens(tiles, params, rows, work.kv_head);
                first_key = rows.past;
                keys_end = rows.past + rows.count;
            }
            first_key += key_warp * kWarpKeys;
            if (first_key > group_last || first_key >= keys_end || first_key + kWarpKeys <= group_first - span + 1) {
                if constexpr (kFillsMeanwhile) ring.advance(tile);
                continue;
            }
            const LdmatrixAddress key_tile(part, lane % 8 + lane / 16 * 8, lane / 8 % 2), value_tile(part + kTileBytes, lane % 16, lane / 16);
            Scores scores = {};
            if constexpr (kWarpgroups) {
                begin_scores(scores, group_queries, part);
                if constexpr (kFillsMeanwhile) ring.advance(tile);
                warpgroup_wait(scores[0]);
            } else {
                compute_scores(scores, query_rows, key_tile);
            }
            RowScales row_scales;
            to_probabilities(scores, first_key, keys_end, scales, row_scales);
            if constexpr (kWarpgroups) {
                Fragments a;
                pack_probabilities(a, scores);
                begin_output(state, a, part + kTileBytes);
                warpgroup_wait(state[0].output);
                hold_registers(a);
            } else {
                accumulate_output(state, scores, value_tile);
            }
        }
        cp_async_wait_group<0>();
    }

    static __device__ __forceinline__ unsigned char* output_row(const PrefillParams& params, const Rows& rows, int kv_head, int row) {
        const int token = rows.token_of(params, row), head = rows.head_of(params, row, token);
        const long long first = (static_cast<long long>(rows.slot) * params.width + token) * params.num_kv_heads + kv_head;
        return params.out + (first * params.group_size + head) * kRowBytes;
    }

    // Writes one vector of a strip to the output.
    static __device__ __forceinline__ void store_vector(const PrefillParams& params, const Rows& rows, int kv_head, int strip, int vector,
                                                        const Partial& state) {
        const float inverse = reciprocal_approx(state.sum) * params.value_scale;
        unsigned* const to = reinterpret_cast<unsigned*>(output_row(params, rows, kv_head, strip / kRowStrips) + strip % kRowStrips * 64) + vector;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h > 0 && kColumns % 2 && strip % kRowStrips == kRowStrips - 1) break;  // the last strip of a row is a half one
            to[8 * h] = pack(Element{}, {state.values[h].x * inverse, state.values[h].y * inverse});
            to[8 * h + 4] = pack(Element{}, {state.values[h].z * inverse, state.values[h].w * inverse});
        }
    }

    // Writes the output of a warp, that has all keys of its rows: through the place of its queries in shared memory, so that it leaves in chunks
    // of 16 bytes.
    static __device__ __forceinline__ void store_rows(const State& state, unsigned char* queries, const PrefillParams& params, const Rows& rows,
                                                      int kv_head) {
        const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kWarpRows;
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float inverse = reciprocal_approx(quad_sum(state[m].sums[i])) * params.value_scale;
                const int row = warp_row + 16 * m + lane / 4 + 8 * i;
#pragma unroll
                for (int d = 0; d < kHeadDim / 8; d++) {
                    *reinterpret_cast<unsigned*>(queries + Tiles::QueryLayout::offset(row, d) + lane % 4 * 4) =
                        pack(Element{}, {state[m].output[d][2 * i] * inverse, state[m].output[d][2 * i + 1] * inverse});
                }
            }
        }
        __syncwarp();
        const int live = min(kWarpRows, rows.rows - warp_row);
#pragma unroll 1
        for (int x = lane; x < live * kRowChunks; x += 32) {
            const int row = warp_row + x / kRowChunks, chunk = x % kRowChunks;
            *reinterpret_cast<uint4*>(output_row(params, rows, kv_head, row) + chunk * 16) =
                *reinterpret_cast<const uint4*>(queries + Tiles::QueryLayout::offset(row, chunk));
        }
    }

    // Merges what two warpgroups have of the same rows, and calls emit as for_each_vector does. They exchange halves: then the first one has rows
    // 0 to 7 of the 16 of each warp, and the second one the others.
    template <class Emit>
    static __device__ __forceinline__ void exchange_halves(const State& state, unsigned char* ring, const Rows& rows, float factor, Emit emit) {
        constexpr int kGroupThreads = kThreads / 2;
        static_assert(2 * kGroupThreads * (16 * kColumns + 8) <= kStagingBytes, "what this block merges lies behind it");
        float4* const values = reinterpret_cast<float4*>(ring);  // [2][kColumns][kGroupThreads]: what each gives to the other
        float2* const totals = reinterpret_cast<float2*>(values + 2 * kColumns * kGroupThreads);
        const bool is_second = threadIdx.x >= kGroupThreads;
        const int thread = threadIdx.x % kGroupThreads, own = is_second * kGroupThreads + thread, other = !is_second * kGroupThreads + thread;
        // Of two values, that of row `half` of a lane. By bits: a conditional index would put the registers of `state` into memory.
        const auto chosen = [](float first, float second, unsigned mask) {
            return __uint_as_float((__float_as_uint(first) & ~mask) | (__float_as_uint(second) & mask));
        };
        const auto half = [&](int s, unsigned mask) {
            const float(&low)[4] = state[0].output[2 * s], (&high)[4] = state[0].output[2 * s + 1];
            return float4{chosen(low[0], low[2], mask), chosen(low[1], low[3], mask), chosen(high[0], high[2], mask),
                          chosen(high[1], high[3], mask)};
        };
        const unsigned kept = is_second ? ~0u : 0;
        const float sums[2] = {quad_sum(state[0].sums[0]), quad_sum(state[0].sums[1])};
        const float own_maximum = chosen(state[0].maxima[0], state[0].maxima[1], kept), own_sum = chosen(sums[0], sums[1], kept);
        __syncthreads();  // all warps have left the ring
#pragma unroll
        for (int s = 0; s < kColumns; s++) values[(is_second * kColumns + s) * kGroupThreads + thread] = half(s, ~kept);
        totals[own] = {chosen(state[0].maxima[0], state[0].maxima[1], ~kept), chosen(sums[0], sums[1], ~kept)};
        __syncthreads();
        const int row = thread / 32 * 16 + 8 * is_second + thread % 32 / 4;
        if (row - thread % 32 / 4 >= rows.rows) return;  // all rows of the warp
        const float2 theirs = totals[other];
        const float maximum = fmaxf(own_maximum, theirs.x), weight = exp2_approx((own_maximum - maximum) * factor);
        const float their_weight = exp2_approx((theirs.x - maximum) * factor), sum = weight * own_sum + their_weight * theirs.y;
        Partial parts[kRowStrips];
#pragma unroll
        for (int s = 0; s < kColumns; s++) {
            const float4 a = half(s, kept), b = values[(!is_second * kColumns + s) * kGroupThreads + thread];
            parts[s / 2].values[s % 2] = {weight * a.x + their_weight * b.x, weight * a.y + their_weight * b.y, weight * a.z + their_weight * b.z,
                                          weight * a.w + their_weight * b.w};
        }
        emit_row(parts, maximum, sum, row, row < rows.rows, emit);
    }

    // Calls emit for the strips of a row, of which the lanes of a quad have a vector each. For whole warps.
    template <class Emit>
    static __device__ __forceinline__ void emit_row(Partial (&parts)[kRowStrips], float maximum, float sum, int row, bool is_live, Emit emit) {
        float largest = 0;
#pragma unroll
        for (int s = 0; s < kRowStrips; s++) largest = parts[s].largest(largest);
        largest = quad_max_or_nan(largest);
        if (!is_live) return;
#pragma unroll
        for (int s = 0; s < kRowStrips; s++) {
            parts[s].maximum = maximum;
            parts[s].sum = sum;
            emit(row * kRowStrips + s, threadIdx.x % 4, parts[s], largest);
        }
    }

    // Calls emit(strip, vector, PartialState, largest value of the row) for each vector of the row block, with what this block has of it. For all
    // threads of the block.
    template <class Emit>
    static __device__ __forceinline__ void for_each_vector(const State& state, unsigned char* ring, const Rows& rows, float factor, Emit emit) {
        if constexpr (kWarpgroups && kKeyWarps == 2) {
            exchange_halves(state, ring, rows, factor, emit);
            return;
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warp = warp % kRowWarps, key_warp = warp / kRowWarps;
        constexpr int kVectors = kBlockRows * kColumns * 4;
        float4* const values = reinterpret_cast<float4*>(ring);  // [kKeyWarps][kBlockRows][kColumns][4]
        float2* const totals = reinterpret_cast<float2*>(values + kKeyWarps * kVectors);
        if (kKeyWarps > 1) __syncthreads();  // all warps have left the ring
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = quad_sum(state[m].sums[i]);
                const int row = row_warp * kWarpRows + 16 * m + 8 * i + lane / 4;
                if (row - lane / 4 >= rows.rows) continue;  // all rows of the warp
                if constexpr (kKeyWarps == 1) {
                    Partial parts[kRowStrips];
#pragma unroll
                    for (int s = 0; s < kColumns; s++) parts[s / 2].values[s % 2] = vector_of(state[m], s, i);
                    emit_row(parts, state[m].maxima[i], sum, row, row < rows.rows, emit);
                } else {
#pragma unroll
                    for (int s = 0; s < kColumns; s++) values[key_warp * kVectors + (row * kColumns + s) * 4 + lane % 4] = vector_of(state[m], s, i);
                    if (lane % 4 == 0) totals[key_warp * kBlockRows + row] = {state[m].maxima[i], sum};
                }
            }
        }
        if constexpr (kKeyWarps > 1) {
            __syncthreads();
            const int all = rows.rows * kRowStrips * 4;
#pragma unroll 1
            for (int first = threadIdx.x / 32 * 32; first < all; first += kThreads) {
                const int x = min(first + lane, all - 1), strip = x / 4, row = strip / kRowStrips, column = strip % kRowStrips * 2;
                // Where the last strip of a row is a half one, that half comes twice.
                const int half_bytes = column + 1 < kColumns ? 64 : 0;
                Partial merged;
                merged.merge<kKeyWarps>(reinterpret_cast<const unsigned char*>(values + (row * kColumns + column) * 4 + x % 4), 16 * kVectors, half_bytes,
                                        reinterpret_cast<const unsigned char*>(totals + row), 8 * kBlockRows, kKeyWarps, factor);
                const float largest = quad_max_or_nan(merged.largest());
                if (first + lane < all) emit(strip, x % 4, merged, largest);
            }
        }
    }

    // What a lane has of 16 columns of a row.
    static __device__ __forceinline__ float4 vector_of(const SoftmaxState<16>& state, int s, int i) {
        const float(&low)[4] = state.output[2 * s], (&high)[4] = state.output[2 * s + 1];
        return {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
    }

    // Zeros for the tokens of each slot that are not new: the blocks of the launch share them.
    static __device__ __forceinline__ void store_zeros(const PrefillParams& params) {
        const int lane = threadIdx.x % 32, token_chunks = params.num_kv_heads * params.group_size * kRowChunks;
        const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
        for (int first = 0; first < params.batch_size; first += 32) {
            const int own = min(first + lane, params.batch_size - 1);
            const int own_count = count_new_tokens(params.lengths, params.new_lengths, own, params.width, params.max_sequence_length);
            const unsigned padded = __ballot_sync(~0u, own_count < params.width && first + lane < params.batch_size);
#pragma unroll 1
            for (int i = 0; i < 32 && padded >> i; i++) {
                if (!(padded >> i & 1)) continue;
                const int count = __shfl_sync(~0u, own_count, i), chunks = (params.width - count) * token_chunks;
                uint4* const to = reinterpret_cast<uint4*>(params.out) + (static_cast<long long>(first + i) * params.width + count) * token_chunks;
#pragma unroll 1
                for (int x = block * kThreads + threadIdx.x; x < chunks; x += num_blocks * kThreads) to[x] = uint4{};
            }
        }
    }

    // Grid: x alone. kSplits: if params.order says so, several blocks may share a row block, and the launch is cooperative. Else one block for each.
    template <bool kSplits>
    static __device__ __forceinline__ void run(PrefillParams params) {
        DYNAMIC_SHARED(unsigned char, queries);
        unsigned char* const ring = queries + kBlockRows * kRowBytes;
        grid_dependency_wait();
        const Work work = kSplits && params.order == kSplit ? part_of_row_block<Rows>(params, kMinTilesPerPart) : whole_row_block<Rows>(params);
        const Rows& rows = work.rows;
        if (kQuantized && work.begin < work.end) params.use_head_scales(rows.slot, work.kv_head);
        const float factor = params.score.factor;
        if (work.begin < work.end) {
            State state;
            accumulate(state, queries, ring, params, work);
            const auto store = [&](int strip, int vector, const Partial& merged) { store_vector(params, rows, work.kv_head, strip, vector, merged); };
            if (kSplits && work.num_blocks > 1) {
                __syncthreads();  // all warps have left the ring
                float4* const own = reinterpret_cast<float4*>(ring + kStagingBytes);
                const SplitKVReduce<2> reduce(rows.rows * kRowStrips, kMaxStrips, work.first_block, work.num_blocks, true, params.partials, own);
                for_each_vector(state, ring, rows, factor, [&](int strip, int vector, const Partial& merged, float largest) {
                    reduce.publish(strip, vector, merged, largest, false);
                });
                reduce.template collect<kPolledByThread>(reinterpret_cast<float4*>(ring), kStagingBytes, factor, store);
            } else if constexpr (kKeyWarps == 1) {
                store_rows(state, queries, params, rows, work.kv_head);
            } else {
                for_each_vector(state, ring, rows, factor, [&](int strip, int vector, const Partial& merged, float) { store(strip, vector, merged); });
            }
        }
        if (work.has_padding) store_zeros(params);
    }
};
