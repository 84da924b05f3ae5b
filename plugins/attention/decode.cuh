// Attention of one new token per slot, or of a few, with RoPE and append, in one launch. kMaxNewTokens says which of the two a file compiles.
//
// The query heads of a K/V head (for each new token) are the rows of one matrix, so K and V are read once for all of them. A step of the main loop handles kWarps
// tiles of one head, one for each warp: scores on tensor cores, online softmax in registers, output on tensor cores. A head ends with
// reduce_warps, and if other blocks share it with SplitKVReduce.
//
//     schedule.cuh         which tiles this block has
//     kv_pipeline.cuh      shared memory, and how it is filled
//     mma.cuh              which lane has which element
//     query_fragments.cuh  the matrix of q
//     few_new_tokens.cuh   what is different with several new tokens
//     decode_codes.cuh     what is different with codes and scales
//     softmax_state.cuh    what a warp accumulates
//     split_kv_reduce.cuh  how partial results become one
//
// The new token is in no tile: its key and value are read from `k` and `v`, and the last warp starts its softmax with them.
#pragma once

#include "attention/decode_codes.cuh"
#include "attention/few_new_tokens.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/mma.cuh"
#include "attention/query_fragments.cuh"
#include "attention/rope.cuh"
#include "attention/schedule.cuh"
#include "attention/softmax_state.cuh"
#include "attention/split_kv_reduce.cuh"
#include "dependent_launch.cuh"

// Applies RoPE to the head's q in its buffer, puts the new token's k and v into smem.new_token, and appends them to the cache if this block
// has the head's last tile (with scales: does either only then). Ends with a barrier.
template <int kRows>
__device__ __forceinline__ void prepare_head(const DecodeParams& params, const DecodeSharedMemory<kRows>& smem, const TileCoord& at,
                                             unsigned char* head, float* new_scales, bool has_last_tile) {
    const unsigned* key = reinterpret_cast<const unsigned*>(head + kRows * kRowBytes);
    const RopeAngles angles(reinterpret_cast<const float*>(head + (kRows + 2) * kRowBytes), params.rotary_dim, 0);
    const int half = params.rotary_dim / 4;  // words
#pragma unroll 1
    for (int x = threadIdx.x; x < params.group_size * half && at.position >= 0; x += kBlockThreads) {
        apply_rope_in_tile(head, x / half, x % half, half, angles);
    }
    if constexpr (kQuantized) {
#pragma unroll 1
        for (int kv = kWarps - 1 - threadIdx.x / 32; kv < 2 && has_last_tile && at.position >= 0; kv += kWarps) {
            quantize_row(params, at, kv, at.position, smem.new_token + kv * kStoredRowBytes, new_scales + kv,
                         [&](int word) { return kv ? key[kRowWords + word] : apply_rope(key, word, angles); });
        }
    } else {
#pragma unroll 1
        for (int x = kBlockThreads - 1 - threadIdx.x; x < kRowWords && at.position >= 0; x += kBlockThreads) {
            unsigned* new_token = reinterpret_cast<unsigned*>(smem.new_token) + x;
            unsigned char* appended = params.cache + at.slot * params.slot_stride
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

// Starts the softmax of a warp with the new token alone. new_token: k and v. Every column of B is the key, so every lane gets the products of
// its rows, and no shuffle is needed.
template <int kRows>
__device__ __forceinline__ void start_with_new_token(RowStates<kRows>& states, const QueryFragments<kRows>& queries, const unsigned char* new_token,
                                                     const ScoreTransform& score, float key_scale, float value_scale) {
    const int lane = threadIdx.x % 32;
    auto& state = states[0];
    const unsigned *key = reinterpret_cast<const unsigned*>(new_token) + lane % 4, *value = key + kStoredRowBytes / 4;
    // Both words that a lane has of 16 columns of K, or of V.
    const auto words_of = [](const auto* row, int d, bool is_key) {
        if constexpr (kQuantized) return is_key ? widen_in_order(Element{}, Stored{}, row[4 * d]) : widen(Element{}, Stored{}, row[4 * d]);
        return uint2{row[8 * d], row[8 * d + 4]};
    };
    float products[2][4] = {};  // two sums that do not wait for each other
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        unsigned a[4];
        queries.a_fragment(a, 0, d);
        uint2 b = words_of(key, d, true);
        if constexpr (QueryFragments<kRows>::kPairs) {
            const uint2 even = words_of(key, d / 2 * 2, true), odd = words_of(key, d / 2 * 2 + 1, true);
            b = d % 2 ? uint2{even.y, odd.y} : uint2{even.x, odd.x};
        }
        mma_m16n8k16(Element{}, products[d % 2], a, b.x, b.y);
    }
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float product = queries.with_odd(products[0], products[1], 2 * i) * key_scale;
        state.maxima[i] = score.has_softcap() ? score.softcap(product) : product;
        state.sums[i] = lane % 4 ? 0.0f : 1.0f;  // the probability is 1; one lane of the quad counts it
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        const uint2 words = words_of(value, d, false);
        float2 low = unpack(Element{}, words.x), high = unpack(Element{}, words.y);
        low = {low.x * value_scale, low.y * value_scale};
        high = {high.x * value_scale, high.y * value_scale};
#pragma unroll
        for (int i = 0; i < kRows / 8; i++) {
            state.output[2 * d][2 * i] = low.x;
            state.output[2 * d][2 * i + 1] = low.y;
            state.output[2 * d + 1][2 * i] = high.x;
            state.output[2 * d + 1][2 * i + 1] = high.y;
        }
    }
}

// Products of q and the keys of a tile: [16 rows x 8 keys] in each fragment.
template <int kRows>
__device__ __forceinline__ void compute_scores(TileScores<kRows>& scores, const QueryFragments<kRows>& queries, const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    if constexpr (kQuantized) {
        multiply_key_codes<kRows>(scores, queries, tile);
        return;
    }
    const LdmatrixAddress keys(shared_address(tile), lane % 8 + lane / 16 * 8, lane / 8 % 2);
    TileScores<kRows> sums[kQKAccumulators] = {};
#pragma unroll
    for (int j = 0; j < kTileTokens / 16; j++) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned b[4];
            ldmatrix_x4(b, keys(d, 16 * j));
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                unsigned a[4];
                queries.a_fragment(a, m, d);
                mma_m16n8k16(Element{}, sums[d % kQKAccumulators][m][2 * j], a, b[0], b[1]);
                mma_m16n8k16(Element{}, sums[d % kQKAccumulators][m][2 * j + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
        for (int x = 0; x < kTileTokens / 2; x++) {
            scores[m][x / 4][x % 4] = sums[0][m][x / 4][x % 4];
#pragma unroll
            for (int other = 1; other < kQKAccumulators; other++) scores[m][x / 4][x % 4] += sums[other][m][x / 4][x % 4];
        }
    }
}

// Applies softcap and mask, and turns scores into probabilities relative to the new maximum of each row.
template <int kRows>
__device__ __forceinline__ void update_softmax(RowStates<kRows>& state, TileScores<kRows>& scores, const DecodeParams& params, const TileCoord& at,
                                               int first_token, const ScoreTransform& score) {
    const int lane = threadIdx.x % 32;
    const int last_first_key = kMaxNewTokens == 1 ? at.first_key : at.first_key_of(params, at.count - 1);  // of the last new token
    const bool needs_mask = first_token + kTileTokens > at.position || first_token < last_first_key;
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
        if (score.has_softcap()) {
#pragma unroll
            for (int x = 0; x < kTileTokens / 2; x++) {
                if (x % 4 < kRowsOfTile<kRows> / 4) scores[m][x / 4][x % 4] = score.softcap(scores[m][x / 4][x % 4]);
            }
        }
        if (needs_mask) {
            int first_keys[2] = {at.first_key, at.first_key};  // of this lane's rows
            if constexpr (kMaxNewTokens > 1) {
#pragma unroll
                for (int i = 0; i < 2; i++) first_keys[i] = at.first_key_of(params, divide(16 * m + 8 * i + lane / 4, params.group_size));
            }
#pragma unroll
            for (int x = 0; x < kTileTokens / 2; x++) {
                const int key = first_token + x / 4 * 8 + lane % 4 * 2 + x % 2;
                if (key >= at.position || key < first_keys[x % 4 / 2]) scores[m][x / 4][x % 4] = kMaskedScore;
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsOfTile<kRows> / 8; i++) {
            state[m].rescale(i, state[m].max_with(scores[m], i), score.factor);
            state[m].exponentiate(scores[m], i, score.factor);
        }
    }
}

// Adds probabilities times the values of a tile to the output.
template <int kRows>
__device__ __forceinline__ void accumulate_output(RowStates<kRows>& state, const TileScores<kRows>& probabilities, const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    if constexpr (kQuantized) {
        multiply_value_codes<kRows>(state, probabilities, tile);
        return;
    }
    const LdmatrixAddress values(shared_address(tile), lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kTileTokens / 16; j++) {
        unsigned a[kRowTiles<kRows>][4];
#pragma unroll
        for (int m = 0; m < kRowTiles<kRows>; m++) pack_a_fragment(Element{}, a[m], probabilities[m][2 * j], probabilities[m][2 * j + 1]);
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, values(d, 16 * j));
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                mma_m16n8k16(Element{}, state[m].output[2 * d], a[m], b[0], b[1]);
                mma_m16n8k16(Element{}, state[m].output[2 * d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Halves of a strip that is handed on. With several new tokens rows are many: partial results are packed.
constexpr int kHalves = kMaxNewTokens == 1 ? 1 : 2;
constexpr int kRowStrips = kStripsPerRow<kHalves>;

// Merges what the warps have of the `rows` rows of a head. Each writes its output to kFreeTiles ring tiles, from `free_tile` on, as strips of 16
// columns, then every warp merges some strips and calls emit(strip, vector, PartialState, is_live), where `is_live` is false for lanes that have no
// row, if strips are packed; else these do not call it. For all threads of the block.
template <int kFreeTiles, int kRows, class Emit>
__device__ __forceinline__ void reduce_warps(const DecodeSharedMemory<kRows>& smem, int free_tile, const RowStates<kRows>& state, int rows,
                                             float factor, const HeadScales& scales, Emit emit) {
    constexpr int kFreeRows = kFreeTiles * kTileBytes / (4 * kHeadDim);            // that fit into these tiles, in float
    constexpr int kRoundRows = kRows < kFreeRows ? kRows : kFreeRows;
    static_assert(kRows % kRoundRows == 0, "rounds of equal size");
    constexpr int kColumns = kStripsPerRow<1>, kRoundStrips = kColumns * kRoundRows / 8;  // of 8 rows and 16 columns each
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A warp merges one strip of 8 rows at a time, or two where only 4 rows are in use and strips are more than warps.
    const int strips_at_once = kHalves == 1 && kColumns > kWarps && rows <= 4 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float sum = quad_sum(state[i / 2].sums[i % 2]);
        if (lane % 4) continue;
        smem.warp_totals[warp * kRows + lane / 4 + 8 * i] = {state[i / 2].maxima[i % 2], sum};
    }
#pragma unroll
    for (int row0 = 0; row0 < kRows; row0 += kRoundRows) {
        if (row0) __syncthreads();
        __syncwarp();
#pragma unroll
        for (int x = 0; x < kRoundStrips; x++) {
            const int strip = x % kColumns, i = row0 / 8 + x / kColumns;
            const auto &low = state[i / 2].output[2 * strip], &high = state[i / 2].output[2 * strip + 1];
            const int e = 2 * (i % 2);
            if (lane / 4 + 8 * i >= rows) continue;
            float4 vector{low[e], low[e + 1], high[e], high[e + 1]};
            if constexpr (kQuantized) vector = {low[e] * scales.value, high[e] * scales.value, low[e + 1] * scales.value, high[e + 1] * scales.value};
            reinterpret_cast<float4*>(smem.ring_tile(warp, free_tile))[32 * x + lane] = vector;
        }
        __syncthreads();
        if constexpr (kHalves == 1) {
#pragma unroll 1
            for (int x = warp; x * strips_at_once < kRoundStrips; x += kWarps) {
                const int strip = x * strips_at_once + lane * strips_at_once / 32, vector = lane % (32 / strips_at_once);
                const int row = row0 + strip / kColumns * 8 + vector / 4;
                if (row >= rows) continue;
                PartialState<1> merged;
                merged.merge(smem.ring_tile(0, free_tile) + (32 * strip + vector) * 16, kRingTiles * kTileBytes, 0,
                             reinterpret_cast<const unsigned char*>(smem.warp_totals + row), kRows * sizeof(float2), kWarps, factor);
                emit(row * kRowStrips + strip % kColumns, vector % 4, merged, true);
            }
        } else {
#pragma unroll 1
            for (int x = warp; x < kRowStrips * kRoundRows / 8; x += kWarps) {
                const int strip = x % kRowStrips, row = row0 + x / kRowStrips * 8 + lane / 4, column = 2 * strip;
                if (row - lane / 4 >= rows) continue;
                // Where the last strip of a row is a half one, that half comes twice.
                const int half_bytes = column + 1 < kColumns ? 32 * 16 : 0;
                PartialState<2> merged;
                merged.merge(smem.ring_tile(0, free_tile) + (32 * (x / kRowStrips * kColumns + column) + lane) * 16, kRingTiles * kTileBytes, half_bytes,
                             reinterpret_cast<const unsigned char*>(smem.warp_totals + min(row, rows - 1)), kRows * sizeof(float2), kWarps, factor);
                emit(row * kRowStrips + strip, lane % 4, merged, row < rows);
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

// Writes one vector of a strip to `out`.
__device__ __forceinline__ void store_output(const DecodeParams& params, const TileCoord& at, int strip, int vector, const PartialState<kHalves>& state) {
    const float inverse = reciprocal_approx(state.sum);
    unsigned* words = reinterpret_cast<unsigned*>(output_rows(params, at)) + (kQuantized ? 2 : 1) * vector;
    if constexpr (kMaxNewTokens == 1) {
        words += 8 * strip;
    } else {
        const int row = strip / kRowStrips, token = divide(row, params.group_size);
        words += row * kRowWords + 16 * (strip % kRowStrips) + token * (output_token_stride(params) - params.group_size * kRowBytes) / 4;
    }
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
        if (h > 0 && kStripsPerRow<1> % 2 && strip % kRowStrips == kRowStrips - 1) break;  // the last strip of a row is a half one
        const float4& value = state.values[h];
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
        for (int x = threadIdx.x; x < params.group_size * kRowChunks; x += kBlockThreads) reinterpret_cast<uint4*>(out)[x] = uint4{};
    }
}

// The reduction over the blocks of the head that this block begins with, if it merges anything of it.
template <int kRows>
__device__ __forceinline__ SplitKVReduce<kHalves> first_head_reduce(const DecodeParams& params, const DecodeSharedMemory<kRows>& smem, const WorkRange& work) {
    const int head_begin = work.begin - work.first.tile, block = static_cast<int>(blockIdx.x);
    const bool has_last_tile = work.first.tile > 0 && head_begin + work.first.num_tiles <= work.end;
    const int first_block = work.is_even_split ? work.first_block : has_last_tile ? divide(head_begin, work.tiles_per_block) : block;
    const int num_blocks = work.is_even_split ? min((work.first.num_tiles - 1) / kMinTilesPerBlock, params.splits_per_head - 1) + 1
                                              : block - first_block + 1;
    float4* own = work.is_even_split ? reinterpret_cast<float4*>(smem.heads) : params.own_partials;
    return {work.first.rows(params) * kRowStrips, params.width * params.group_size * kRowStrips, first_block, num_blocks, work.is_even_split, params.partials, own};
}

template <int kRows>
__device__ __forceinline__ void decode(const DecodeParams& params) {
    DYNAMIC_SHARED(unsigned char, start_of_shared);
    const DecodeSharedMemory<kRows> smem(start_of_shared);
    static_assert(kHeadBuffers * DecodeSharedMemory<kRows>::kHeadBufferBytes >= 16 * kRows * kRowStrips * kStripVectors,
                  "the head buffers also hold a block's own strips");
    const int warp = threadIdx.x / 32;
    const L2Policy policy = evict_first_policy();

    // Lengths take longest to arrive: whatever needs none of them is started before they are used.
    const EvenSplitStart start = even_split_start(params);
    prefetch_first_tiles(params, start);
    grid_dependents_may_launch();  // most of the time here is latency, in which the next launch can begin to read its weights
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
    QueryFragments<kRows> queries;
    RowStates<kRows> state;
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
                    start_with_new_token(state, queries, smem.new_token, score, scales.key, value_scale);
                } else {
                    start_with_few(state, queries, params, at, head, new_scales, scales);
                }
            }
            if constexpr (kHeadBuffers < kStages) {
                static_assert(QueryFragments<kRows>::kInRegisters, "nothing of the head is read after this");
                __syncthreads();  // the buffer is filled again in this step
            }
        }
        const bool has_tile = warp < count && at.position >= 0;
        TileScores<kRows> scores = {};
        const auto token_scales = [&](int token) { return reinterpret_cast<const float2*>(smem.tile_scales(warp, ring_tile))[token / 2]; };
        pipeline.wait_for_keys();
        pipeline.fill_keys();
        if (has_tile) {
            const unsigned char* const tile = smem.ring_tile(warp, ring_tile);
            compute_scores(scores, queries, tile);
            if constexpr (kQuantized) scales.scale_scores<kRows>(params, scores, token_scales);
            update_softmax<kRows>(state, scores, params, at, at.first_token(warp), score);
        }
        ring_tile = next_ring_tile(ring_tile);
        pipeline.wait_for_values();
        pipeline.fill_values();
        if (has_tile) {
            const unsigned char* const tile = smem.ring_tile(warp, ring_tile);
            if constexpr (kQuantized) scales.scale_probabilities<kRows>(params, state, scores, token_scales);
            accumulate_output<kRows>(state, scores, tile);
        }
        const int free_tile = ring_tile;
        ring_tile = next_ring_tile(ring_tile);

        const bool ends_head = at.tile + count >= at.num_tiles || tiles.done + count >= work.end;  // or this block's part of it
        if (!ends_head) continue;
        if (at.position < 0) {
            store_zeros(params, at, 0);
            continue;
        }
        if (kMaxNewTokens > 1 && has_last_tile) store_zeros(params, at, at.count);
        const bool has_whole_head = work.begin <= head_begin && has_last_tile;
        const auto emit = [&](int strip, int vector, const PartialState<kHalves>& merged, bool is_live) {
            if (has_whole_head) {
                if (is_live) store_output(params, at, strip, vector, merged);
                return;
            }
            const float largest = kHalves == 1 ? 0 : quad_max_or_nan(merged.largest());
            if (is_live) reduce.publish(strip, vector, merged, largest, has_last_tile);
        };
        if (kMaxNewTokens > 1 && tiles.done + count >= work.end) {  // all copies have arrived: every tile is free
            reduce_warps<(kRingTiles < 4 ? 2 : 4), kRows>(smem, 0, state, at.rows(params), score.factor, scales, emit);
        } else {
            reduce_warps<1, kRows>(smem, free_tile, state, at.rows(params), score.factor, scales, emit);
        }
    }
    cp_async_wait_group<0>();
    // With several new tokens, all that a thread has if every row is in use.
    constexpr int kVectorsOfThread = (kRows * kRowStrips * kStripVectors + kBlockThreads - 1) / kBlockThreads;
    constexpr int kAtOnce = kMaxNewTokens == 1 ? kPolledAtOnce : kVectorsOfThread < 8 ? kVectorsOfThread : 8;
    reduce.collect<kAtOnce>(reinterpret_cast<float4*>(smem.ring), kWarps * kRingTiles * kTileBytes, score.factor,
                   [&](int strip, int vector, const PartialState<kHalves>& merged) { store_output(params, work.first, strip, vector, merged); });
}
