// Epilogue of a prefill block: results to the output, or as fragments to the blocks that merge them
// (split_kv_reduce.cuh).
#pragma once

#include "attention/mma.cuh"
#include "attention/new_tokens.cuh"
#include "attention/prefill_params.cuh"
#include "attention/softmax_state.cuh"
#include "attention/split_kv_reduce.cuh"

// The template parameters are those of Prefill; kStagingBytes: of the ring, which is free by then, without the
// fragments that this block merges.
template <class Tiles, bool kWarpgroups, int kRowWarps, int kKeyWarps, int kRowTiles, int kStagingBytes>
struct PrefillResults {
    using Rows = typename Tiles::Rows;
    using State = SoftmaxState<16>[kRowTiles];
    using Partial = PartialState<2>;
    static constexpr int kThreads = 32 * kColumnWarps * kRowWarps * kKeyWarps, kWarpRows = 16 * kRowTiles,
                         kBlockRows = kRowWarps * kWarpRows;
    // 16 columns in fragments, and fragments that are handed on
    static constexpr int kColumns = kFragmentsPerRow<1>, kRowFragments = kFragmentsPerRow<2>;
    // the same of a warp
    static constexpr int kOwnColumns = kColumns / kColumnWarps,
                         kOwnFragments = (kRowFragments + kColumnWarps - 1) / kColumnWarps;
    static_assert(kKeyWarps == 1 || kWarpgroups || kStagingBytes >= kKeyWarps * kBlockRows * (kColumns * 64 + 8),
                  "the ring also holds the results of all warps");
    static_assert(!kWarpgroups || kKeyWarps <= 2, "two warpgroups exchange halves of their rows");

    static __device__ __forceinline__ unsigned char* output_row(const PrefillParams& params, const Rows& rows,
                                                                int kv_head, int row) {
        const int token = rows.token_of(params, row), head = rows.head_of(params, row, token);
        const long long first =
            (static_cast<long long>(rows.slot) * params.width + token) * params.num_kv_heads + kv_head;
        return params.out + (first * params.group_size + head) * kRowBytes;
    }
    // Factor of the output of a row, from the sum and the maximum of its softmax.
    static __device__ __forceinline__ float output_factor(const PrefillParams& params, const Rows& rows, int kv_head,
                                                          int row, float sum, float maximum) {
        const int head = rows.head_of(params, row, rows.token_of(params, row));
        const float whole =
            params.sinks.added_to(sum, maximum, params.score.factor, kv_head * params.group_size + head);
        return reciprocal_approx(whole) * params.value_scale;
    }

    // Index of this warp among those that divide the columns.
    static __device__ __forceinline__ int column_warp() {
        return kColumnWarps > 1 ? static_cast<int>(threadIdx.x) / 32 / (kRowWarps * kKeyWarps) : 0;
    }

    // A destination of the results of a row block takes one vector of a fragment at a time, or this warp's columns of a
    // row of which each lane of a quad has a vector of each fragment.
    // Results go to the output.
    struct ToOutput {
        const PrefillParams& params;
        const Rows& rows;
        int kv_head;

        __device__ __forceinline__ void vector(int fragment, int vector, const Partial& state, float = 0) const {
            const int row = fragment / kRowFragments;
            const float factor = output_factor(params, rows, kv_head, row, state.sum, state.maximum);
            unsigned* const to =
                reinterpret_cast<unsigned*>(output_row(params, rows, kv_head, row) + fragment % kRowFragments * 64)
                + vector;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // the last fragment of a row is a half one
                if (h > 0 && kColumns % 2 && fragment % kRowFragments == kRowFragments - 1) break;
                to[8 * h] = pack(Element{}, {state.values[h].x * factor, state.values[h].y * factor});
                to[8 * h + 4] = pack(Element{}, {state.values[h].z * factor, state.values[h].w * factor});
            }
        }
        __device__ __forceinline__ void row(int row, const Partial (&fragments)[kOwnFragments], float) const {
#pragma unroll
            for (int s = 0; s < kOwnFragments; s++)
                vector(row * kRowFragments + column_warp() * kOwnFragments + s, threadIdx.x % 4, fragments[s]);
        }
    };
    // Results go to the blocks that merge them.
    struct ToBlocks {
        const SplitKVReduce<2>& reduce;

        __device__ __forceinline__ void vector(int fragment, int vector, const Partial& state, float largest) const {
            reduce.publish(fragment, vector, state, largest, false);
        }
        __device__ __forceinline__ void row(int row, const Partial (&fragments)[kOwnFragments], float largest) const {
            reduce.publish_row(row, column_warp() * kOwnFragments, fragments, largest);
        }
    };

    // Writes the output of a warp that has processed all keys of its rows. It goes through the warp's queries in shared
    // memory, so that it is stored in chunks of 16 bytes.
    static __device__ __forceinline__ void store_rows(const State& state, unsigned char* queries,
                                                      const PrefillParams& params, const Rows& rows, int kv_head) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - column_warp() * kRowWarps,
                  warp_row = warp * kWarpRows, first_chunk = column_warp() * (kWarpColumns / 8);
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = warp_row + 16 * m + lane / 4 + 8 * i;
                const float factor =
                    output_factor(params, rows, kv_head, row, quad_sum(state[m].sums[i]), state[m].maxima[i]);
#pragma unroll
                for (int d = 0; d < kWarpColumns / 8; d++) {
                    *reinterpret_cast<unsigned*>(queries + Tiles::QueryLayout::offset(row, first_chunk + d)
                                                 + lane % 4 * 4) =
                        pack(Element{}, {state[m].output[d][2 * i] * factor, state[m].output[d][2 * i + 1] * factor});
                }
            }
        }
        __syncwarp();
        const int live = min(kWarpRows, rows.rows - warp_row);
#pragma unroll 1
        for (int x = lane; x < live * (kWarpColumns / 8); x += 32) {
            const int row = warp_row + x / (kWarpColumns / 8), chunk = first_chunk + x % (kWarpColumns / 8);
            *reinterpret_cast<uint4*>(output_row(params, rows, kv_head, row) + chunk * 16) =
                *reinterpret_cast<const uint4*>(queries + Tiles::QueryLayout::offset(row, chunk));
        }
    }

    // Merges the results of two warpgroups for the same rows, and emits the rows. The warpgroups exchange halves: then
    // the first one has rows 0 to 7 of the 16 of each warp, and the second one rows 8 to 15.
    template <class Emit>
    static __device__ __forceinline__ void exchange_halves(const State& state, unsigned char* ring, const Rows& rows,
                                                           float factor, const Emit& emit) {
        constexpr int kGroupThreads = kThreads / 2;
        static_assert(2 * kGroupThreads * (16 * kColumns + 8) <= kStagingBytes,
                      "the fragments that this block merges follow the staging bytes");
        // [2][kColumns][kGroupThreads]: what each gives to the other
        float4* const values = reinterpret_cast<float4*>(ring);
        float2* const totals = reinterpret_cast<float2*>(values + 2 * kColumns * kGroupThreads);
        const bool is_second = threadIdx.x >= kGroupThreads;
        const int thread = threadIdx.x % kGroupThreads, own = is_second * kGroupThreads + thread,
                  other = !is_second * kGroupThreads + thread;
        // Selects the value of row `half` of a lane. With a mask, because a conditional index would put the registers of
        // `state` into local memory.
        const auto chosen = [](float first, float second, unsigned mask) {
            return __uint_as_float((__float_as_uint(first) & ~mask) | (__float_as_uint(second) & mask));
        };
        const auto half = [&](int s, unsigned mask) {
            const float (&low)[4] = state[0].output[2 * s], (&high)[4] = state[0].output[2 * s + 1];
            return float4{chosen(low[0], low[2], mask), chosen(low[1], low[3], mask), chosen(high[0], high[2], mask),
                          chosen(high[1], high[3], mask)};
        };
        const unsigned kept = is_second ? ~0u : 0;
        const float sums[2] = {quad_sum(state[0].sums[0]), quad_sum(state[0].sums[1])};
        const float own_maximum = chosen(state[0].maxima[0], state[0].maxima[1], kept),
                    own_sum = chosen(sums[0], sums[1], kept);
        __syncthreads();  // all warps have left the ring
#pragma unroll
        for (int s = 0; s < kColumns; s++) values[(is_second * kColumns + s) * kGroupThreads + thread] = half(s, ~kept);
        totals[own] = {chosen(state[0].maxima[0], state[0].maxima[1], ~kept), chosen(sums[0], sums[1], ~kept)};
        __syncthreads();
        const int row = thread / 32 * 16 + 8 * is_second + thread % 32 / 4;
        if (row - thread % 32 / 4 >= rows.rows) return;  // all rows of the warp
        const float2 theirs = totals[other];
        const float maximum = fmaxf(own_maximum, theirs.x), weight = exp2_approx((own_maximum - maximum) * factor);
        const float their_weight = exp2_approx((theirs.x - maximum) * factor),
                    sum = weight * own_sum + their_weight * theirs.y;
        Partial parts[kRowFragments];
#pragma unroll
        for (int s = 0; s < kColumns; s++) {
            const float4 a = half(s, kept), b = values[(!is_second * kColumns + s) * kGroupThreads + thread];
            parts[s / 2].values[s % 2] = {weight * a.x + their_weight * b.x, weight * a.y + their_weight * b.y,
                                          weight * a.z + their_weight * b.z, weight * a.w + their_weight * b.w};
        }
        emit_row(parts, maximum, sum, row, row < rows.rows, emit);
    }

    // Emits a row, of whose fragments the lanes of a quad have a vector each. For whole warps.
    template <class Emit>
    static __device__ __forceinline__ void emit_row(Partial (&parts)[kOwnFragments], float maximum, float sum, int row,
                                                    bool is_live, const Emit& emit) {
        float largest = 0;
#pragma unroll
        for (int s = 0; s < kOwnFragments; s++) {
            largest = parts[s].largest(largest);
            parts[s].maximum = maximum;
            parts[s].sum = sum;
        }
        largest = quad_max_or_nan(largest);
        if (is_live) emit.row(row, parts, largest);
    }

    // Calls emit.vector(fragment, vector, PartialState, largest value of the fragment), or emit.row, with the results of
    // this block for the whole row block. For all threads of the block.
    template <class Emit>
    static __device__ __forceinline__ void for_each_vector(const State& state, unsigned char* ring, const Rows& rows,
                                                           float factor, const Emit& emit) {
        if constexpr (kWarpgroups && kKeyWarps == 2) {
            exchange_halves(state, ring, rows, factor, emit);
            return;
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - column_warp() * kRowWarps * kKeyWarps,
                  row_warp = warp % kRowWarps, key_warp = warp / kRowWarps;
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
                    Partial parts[kOwnFragments];
#pragma unroll
                    for (int s = 0; s < kOwnColumns; s++) parts[s / 2].values[s % 2] = vector_of(state[m], s, i);
                    emit_row(parts, state[m].maxima[i], sum, row, row < rows.rows, emit);
                } else {
#pragma unroll
                    for (int s = 0; s < kOwnColumns; s++)
                        values[key_warp * kVectors + (row * kColumns + column_warp() * kOwnColumns + s) * 4
                               + lane % 4] = vector_of(state[m], s, i);
                    // the same from all warps that divide the columns
                    if (lane % 4 == 0 && column_warp() == 0)
                        totals[key_warp * kBlockRows + row] = {state[m].maxima[i], sum};
                }
            }
        }
        if constexpr (kKeyWarps > 1) {
            __syncthreads();
            const int all = rows.rows * kRowFragments * 4;
#pragma unroll 1
            for (int first = threadIdx.x / 32 * 32; first < all; first += kThreads) {
                const int x = min(first + lane, all - 1), fragment = x / 4, row = fragment / kRowFragments,
                          column = fragment % kRowFragments * 2;
                // If the last fragment of a row has 16 columns only, these come twice.
                const int half_bytes = column + 1 < kColumns ? 64 : 0;
                Partial merged;
                merged.merge<kKeyWarps>(
                    reinterpret_cast<const unsigned char*>(values + (row * kColumns + column) * 4 + x % 4),
                    16 * kVectors, half_bytes, reinterpret_cast<const unsigned char*>(totals + row), 8 * kBlockRows,
                    kKeyWarps, factor);
                const float largest = quad_max_or_nan(merged.largest());
                if (first + lane < all) emit.vector(fragment, x % 4, merged, largest);
            }
        }
    }

    // Values of a lane in 16 columns of a row.
    static __device__ __forceinline__ float4 vector_of(const SoftmaxState<16>& state, int s, int i) {
        const float (&low)[4] = state.output[2 * s], (&high)[4] = state.output[2 * s + 1];
        return {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
    }

    // Zeros for the tokens of each slot that are not new: the blocks of the launch share them.
    static __device__ __forceinline__ void store_zeros(const PrefillParams& params) {
        const int lane = threadIdx.x % 32, token_chunks = params.num_kv_heads * params.group_size * kRowChunks;
        const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
        for (int first = 0; first < params.batch_size; first += 32) {
            const int own = min(first + lane, params.batch_size - 1);
            const int own_count =
                count_new_tokens(params.lengths, params.new_lengths, own, params.width, params.max_sequence_length);
            const unsigned padded = __ballot_sync(~0u, own_count < params.width && first + lane < params.batch_size);
#pragma unroll 1
            for (int i = 0; i < 32 && padded >> i; i++) {
                if (!(padded >> i & 1)) continue;
                const int count = __shfl_sync(~0u, own_count, i), chunks = (params.width - count) * token_chunks;
                uint4* const to = reinterpret_cast<uint4*>(params.out)
                                  + (static_cast<long long>(first + i) * params.width + count) * token_chunks;
#pragma unroll 1
                for (int x = block * kThreads + threadIdx.x; x < chunks; x += num_blocks * kThreads) to[x] = uint4{};
            }
        }
    }
};
