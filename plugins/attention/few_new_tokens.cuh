// The decode kernel with several new tokens for each slot: their rows, and the start of a head.
//
// Row `token * group_size + head` of a K/V head is a query head of a new token. New tokens are in no tile: their keys
// and values lie in the buffer of the head, and the last warp of the block that has the head's last tile begins with
// them. That block appends them, unless their rows are in the cache already (kSharedRows).
#pragma once

#include "attention/decode_quantized.cuh"
#include "attention/decode_rows.cuh"
#include "attention/kv_pipeline.cuh"
#include "attention/math.cuh"
#include "attention/query_fragments.cuh"
#include "attention/rope.cuh"
#include "attention/schedule.cuh"

// If this block has the head's last tile, appends the new tokens after RoPE, and stores their quantized values at the
// start of their rows (with kSharedRows does neither). If q stays in shared memory, permutes its columns in groups of
// 16, in the order that QueryFragments loads. Ends with a barrier.
template <int kRows>
__device__ __forceinline__ void quantize_few(const DecodeParams& params, const TileCoord& at, unsigned char* head,
                                             float* new_scales, bool has_last_tile) {
    using SharedMemory = DecodeSharedMemory<kRows>;
    if constexpr (!QueryFragments<kRows>::kInRegisters) {
#pragma unroll 1
        for (int x = threadIdx.x; x < at.rows(params) * (kRowChunks / 2); x += kBlockThreads) {
            const int row = x / (kRowChunks / 2), chunk = x % (kRowChunks / 2) * 2;
            uint4* const low = reinterpret_cast<uint4*>(head + swizzled_offset(row, chunk));
            uint4* const high = reinterpret_cast<uint4*>(head + swizzled_offset(row, chunk + 1));
            const uint4 a = *low, b = *high;
            *low = {a.x, a.z, b.x, b.z};
            *high = {a.y, a.w, b.y, b.w};
        }
    }
    const int rows = has_last_tile && !kSharedRows ? 2 * at.count : 0;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
        const int kv = row & 1, token = row / 2;
        unsigned char* const tile = head + (kv ? SharedMemory::kValuesOffset : SharedMemory::kKeysOffset);
        quantize_row(params, at, kv, at.position + token, tile + token * kRowBytes,
                     new_scales + kv * kMaxNewTokens + token, [&](int word) {
                         return reinterpret_cast<const unsigned*>(tile + swizzled_offset(token, word / 4))[word % 4];
                     });
    }
    __syncthreads();
}

// Applies RoPE to q in the head's buffer. If this block has the head's last tile, also applies RoPE to the new keys, and
// appends them with their values, but not with kSharedRows. There is a barrier after RoPE.
template <int kRows>
__device__ __forceinline__ void prepare_few(const DecodeParams& params, const TileCoord& at, unsigned char* head,
                                            float* new_scales, bool has_last_tile) {
    using SharedMemory = DecodeSharedMemory<kRows>;
    unsigned char* const keys = head + SharedMemory::kKeysOffset;
    const unsigned char* const values = head + SharedMemory::kValuesOffset;
    const float* const angles = reinterpret_cast<const float*>(head + SharedMemory::kAnglesOffset);
    const bool by_chunks = params.rotary_dim % 16 == 0;
    const int half = params.rotary_dim / (by_chunks ? 16 : 4);  // chunks, or words
    const int rows = at.rows(params), rotated_rows = rows + (has_last_tile && !kSharedRows ? at.count : 0);
#pragma unroll 1
    for (int x = threadIdx.x; x < rotated_rows * half; x += kBlockThreads) {
        const int row = divide_small(x, half), place = x - row * half,
                  token = row < rows ? divide_small(row, params.group_size) : row - rows;
        unsigned char* const tile = row < rows ? head : keys;
        const int tile_row = row < rows ? row : token;
        const RopeAngles row_angles(angles, params.rotary_dim, token);
        if (by_chunks) {
            rotate_chunks(tile, tile_row, place, half, chunk_angles(row_angles, place));
        } else {
            apply_rope_in_tile(tile, tile_row, place, half, row_angles);
        }
    }
    __syncthreads();
    if constexpr (kQuantized) {
        quantize_few<kRows>(params, at, head, new_scales, has_last_tile);
        return;
    }
    if constexpr (kSharedRows) return;
    if (!has_last_tile) return;
    unsigned char* const appended =
        params.cache + at.slot * params.slot_stride
        + (static_cast<long long>(at.kv_head) * params.max_sequence_length + at.position) * kRowBytes;
#pragma unroll 1
    for (int x = threadIdx.x; x < at.count * kRowChunks; x += kBlockThreads) {
        const unsigned from = swizzled_offset(x / kRowChunks, x % kRowChunks);
        *reinterpret_cast<uint4*>(appended + 16 * x) = *reinterpret_cast<const uint4*>(keys + from);
        *reinterpret_cast<uint4*>(appended + params.kv_stride + 16 * x) =
            *reinterpret_cast<const uint4*>(values + from);
    }
}

// Starts the softmax of a warp with the new tokens: a causal mask, within the window. They are the 8 keys of one B
// fragment. If there are fewer than 8, the last one, whose value is live, is repeated, and the copies are masked.
template <int kRows>
__device__ __forceinline__ void start_with_few(RowStates<kRows>& state, const QueryFragments<kRows>& queries,
                                               const DecodeParams& params, const TileCoord& at, unsigned char* head,
                                               const float* new_scales, HeadScales& head_scales) {
    static_assert(kMaxNewTokens <= 8, "the new tokens are the keys of one fragment");
    using SharedMemory = DecodeSharedMemory<kRows>;
    const int lane = threadIdx.x % 32, token_row = min(lane % 8, at.count - 1);
    const SharedAddress keys = shared_address(head + SharedMemory::kKeysOffset),
                        values = shared_address(head + SharedMemory::kValuesOffset);
    // two sums that do not wait for each other
    float scores[kRowTiles<kRows>][1][4] = {}, odd[kRowTiles<kRows>][4] = {};
    // Scales of two adjacent new tokens; past the last one, its scale again.
    const auto scales_of = [&](int kv, int token) {
        const float* const scales = new_scales + kv * kMaxNewTokens;
        return float2{scales[min(token, at.count - 1)], scales[min(token + 1, at.count - 1)]};
    };
    const float2 key_scales = kQuantized ? scales_of(0, lane % 4 * 2) : float2{1, 1};
    if constexpr (kQuantized) multiply_new_quantized_keys<kRows>(scores, odd, queries, keys + token_row * kRowBytes);
#pragma unroll
    for (int d = 0; !kQuantized && d < kHeadDim / 16; d += 2) {
        unsigned b[4];
        ldmatrix_x4(b, keys + swizzled_offset(token_row, min(2 * d + lane / 8, kRowChunks - 1)));
#pragma unroll
        for (int i = 0; i < 2 && d + i < kHeadDim / 16; i++) {
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                unsigned a[4];
                queries.a_fragment(a, m, d + i);
                mma_m16n8k16(Element{}, i ? odd[m] : scores[m][0], a, b[2 * i], b[2 * i + 1]);
            }
        }
    }
    const int span = params.window > 0 ? params.window : 0x7FFFFFFF;
#pragma unroll
    for (int m = 0; m < kRowTiles<kRows>; m++) {
#pragma unroll
        for (int i = 0; i < kRowsOfTile<kRows> / 8; i++) {
            const int token = divide_small(16 * m + 8 * i + lane / 4, params.group_size);
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                scores[m][0][e] = (scores[m][0][e] + odd[m][e]) * (e % 2 ? key_scales.y : key_scales.x);
                const int distance = token - (lane % 4 * 2 + e % 2);
                if (params.score.has_softcap()) scores[m][0][e] = params.score.softcap(scores[m][0][e]);
                if (distance < 0 || distance >= span) scores[m][0][e] = kMaskedScore;
            }
        }
    }
    update<kRows>(state, scores, params.score.factor);
    if constexpr (kQuantized) {
        head_scales.scale_probabilities<kRows>(params, state, scores, [&](int token) { return scales_of(1, token); });
        multiply_new_quantized_values<kRows>(state, scores, values + token_row * kRowBytes);
        return;
    }
#pragma unroll
    for (int first = 0; first < kRowChunks; first += 4) {
        unsigned b[4];
        ldmatrix_x4_trans(b, values + swizzled_offset(token_row, min(first + lane / 8, kRowChunks - 1)));
#pragma unroll
        for (int i = 0; i < 4 && first + i < kRowChunks; i++) {
#pragma unroll
            for (int m = 0; m < kRowTiles<kRows>; m++) {
                const float (&p)[4] = scores[m][0];
                const unsigned a[4] = {pack(Element{}, {p[0], p[1]}), pack(Element{}, {p[2], p[3]}), 0, 0};
                mma_m16n8k16(Element{}, state[m].output[first + i], a, b[i], 0);
            }
        }
    }
}
