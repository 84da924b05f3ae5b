// The decode kernels of more than 8 rows, and of several new tokens: the rows of q are the rows of a fragment, as in
// prefill (mma.cuh).
#pragma once

#include "attention/decode_layout.cuh"
#include "attention/decode_quantized.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/query_fragments.cuh"
#include "attention/schedule.cuh"

// Layout of the vectors of 8 rows of output fragments in a ring tile: one row after another. Vector v has columns 2v,
// 2v + 1, 2v + 8, 2v + 9. With quantized values it has 4v to 4v + 3.
struct RowOutputFragments {
    static __device__ __forceinline__ int row_at(int place) { return place / 4; }
    static __device__ __forceinline__ int vector_at(int place) { return place % 4; }
    static __device__ __forceinline__ float4 columns(float4 value) { return value; }
};

template <int kRows>
struct DecodeLayout<kRows, false> {
    using Queries = QueryFragments<kRows>;
    using State = RowStates<kRows>;
    using Scores = TileScores<kRows>;
    using OutputFragments = RowOutputFragments;
};

// Starts the softmax of a warp with the new token alone. new_token: k and v. Every column of B is the key, so every
// lane gets the products of its rows, and no shuffle is needed.
template <int kRows, class Quantized = Stored>
__device__ __forceinline__ void start_with_new_token(RowStates<kRows>& states, const QueryFragments<kRows>& queries,
                                                     const unsigned char* new_token, const ScoreTransform& score,
                                                     float key_scale, float value_scale) {
    const int lane = threadIdx.x % 32;
    auto& state = states[0];
    const unsigned *key = reinterpret_cast<const unsigned*>(new_token) + lane % 4, *value = key + kStoredRowBytes / 4;
    float products[2][4] = {};  // two sums that do not wait for each other
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        unsigned a[4];
        queries.a_fragment(a, 0, d);
        const uint2 b = new_key_words(key, d);
        mma_m16n8k16(Element{}, products[d % 2], a, b.x, b.y);
    }
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float product = (products[0][2 * i] + products[1][2 * i]) * key_scale;
        state.maxima[i] = score.has_softcap() ? score.softcap(product) : product;
        state.sums[i] = lane % 4 ? 0.0f : 1.0f;  // the probability is 1; one lane of the quad counts it
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; d++) {
        uint2 words;
        if constexpr (kQuantized) {
            words = widen(Element{}, Quantized{}, value[4 * d]);
        } else {
            words = {value[8 * d], value[8 * d + 4]};
        }
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
__device__ __forceinline__ void compute_scores(TileScores<kRows>& scores, const QueryFragments<kRows>& queries,
                                               const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    if constexpr (kQuantized) {
        multiply_quantized_keys<kRows>(scores, queries, tile);
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
            for (int other = 1; other < kQKAccumulators; other++)
                scores[m][x / 4][x % 4] += sums[other][m][x / 4][x % 4];
        }
    }
}

// Turns scores into probabilities, and adds them to the sums. The maximum of a row is updated only when a score exceeds
// it by kRescaleThreshold, so most steps need no shuffle. Rows must not depend on each other: without a query head, a
// row has the undefined contents of shared memory.
template <int kRows, int kFragments>
__device__ __forceinline__ void update(RowStates<kRows>& state, float (&scores)[kRowTiles<kRows>][kFragments][4],
                                       float factor) {
    float highest[kRowTiles<kRows>][2];
    bool is_far = false;
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
        for (int i = 0; i < kRowsOfTile<kRows> / 8; i++) {
            highest[m][i] = state[m].own_max_with(scores[m], i);
            is_far = is_far || (highest[m][i] - state[m].maxima[i]) * factor > kRescaleThreshold;
        }
    }
    const bool rescales = __any_sync(~0u, is_far);
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
        for (int i = 0; i < kRowsOfTile<kRows> / 8; i++) {
            if (rescales) state[m].rescale(i, followed(state[m].maxima[i], quad_max(highest[m][i]), factor), factor);
            state[m].exponentiate(scores[m], i, factor);
        }
    }
}

// Applies softcap and mask, and turns scores into probabilities.
template <int kRows>
__device__ __forceinline__ void update_softmax(RowStates<kRows>& state, TileScores<kRows>& scores,
                                               const DecodeParams& params, const TileCoord& at, int first_token,
                                               const ScoreTransform& score) {
    const int lane = threadIdx.x % 32;
    const bool needs_mask = first_token + kTileTokens > at.position || first_token < at.last_first_key(params);
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
                for (int i = 0; i < 2; i++)
                    first_keys[i] = at.first_key_of(params, divide_small(16 * m + 8 * i + lane / 4, params.group_size));
            }
#pragma unroll
            for (int x = 0; x < kTileTokens / 2; x++) {
                const int key = first_token + x / 4 * 8 + lane % 4 * 2 + x % 2;
                if (key >= at.position || key < first_keys[x % 4 / 2]) scores[m][x / 4][x % 4] = kMaskedScore;
            }
        }
    }
    update<kRows>(state, scores, score.factor);
}

// Adds probabilities times the values of a tile to the output.
template <int kRows>
__device__ __forceinline__ void accumulate_output(RowStates<kRows>& state, const TileScores<kRows>& probabilities,
                                                  const unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    if constexpr (kQuantized) {
        multiply_quantized_values<kRows>(state, probabilities, tile);
        return;
    }
    const LdmatrixAddress values(shared_address(tile), lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kTileTokens / 16; j++) {
        unsigned a[kRowTiles<kRows>][4];
#pragma unroll
        for (int m = 0; m < kRowTiles<kRows>; m++)
            pack_a_fragment(Element{}, a[m], probabilities[m][2 * j], probabilities[m][2 * j + 1]);
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

// Of HeadScales, for a tile.
template <int kRows>
__device__ __forceinline__ void scale_scores(const HeadScales& scales, const DecodeParams& params,
                                             TileScores<kRows>& scores, const TileScales& token_scales) {
    scales.scale_scores<kRows>(params, scores, token_scales);
}
template <int kRows>
__device__ __forceinline__ void scale_probabilities(HeadScales& scales, const DecodeParams& params,
                                                    RowStates<kRows>& state, TileScores<kRows>& probabilities,
                                                    const TileScales& token_scales) {
    scales.scale_probabilities<kRows>(params, state, probabilities, token_scales);
}

// Writes the maximum and the sum of each row of a warp.
template <int kRows>
__device__ __forceinline__ void write_totals(float2* totals, const RowStates<kRows>& state) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float sum = quad_sum(state[i / 2].sums[i % 2]);
        if (lane % 4) continue;
        totals[lane / 4 + 8 * i] = {state[i / 2].maxima[i % 2], sum};
    }
}
// Writes the output of kRoundRows rows from `row0` on as fragments of 16 columns, if they are among the first `rows`: a
// lane has a vector of each.
template <int kRows, int kRoundRows>
__device__ __forceinline__ void write_fragments(unsigned char* tile, const RowStates<kRows>& state, int row0, int rows,
                                                const HeadScales& scales) {
    constexpr int kColumns = kHeadDim / 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = 0; x < kColumns * kRoundRows / 8; x++) {
        const int fragment = x % kColumns, i = row0 / 8 + x / kColumns;
        const auto &low = state[i / 2].output[2 * fragment], &high = state[i / 2].output[2 * fragment + 1];
        const int e = 2 * (i % 2);
        if (lane / 4 + 8 * i >= rows) continue;
        float4 vector{low[e], low[e + 1], high[e], high[e + 1]};
        if constexpr (kQuantized)
            vector = {low[e] * scales.value, high[e] * scales.value, low[e + 1] * scales.value,
                      high[e + 1] * scales.value};
        reinterpret_cast<float4*>(tile)[32 * x + lane] = vector;
    }
}
