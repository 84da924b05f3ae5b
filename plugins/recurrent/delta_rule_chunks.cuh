// The gated delta rule over many new tokens, with tensor cores, by chunks ("Gated Delta Networks", Yang, Kautz and
// Hatamizadeh, 2024, section 3.3). A block has some columns of the state of a head.
//
// With decays, cum = the sums of their logarithms within a chunk, and S the state before it, the changes U of the
// chunk's tokens, U_t = change_t / |k_t|, which are added to the state as k_t^T U_t, are those for which
//
//     U_t = beta_t / |k_t| (v_t - exp(cum_t) / |k_t| k_t S - 1 / |k_t| sum_{s < t} exp(cum_t - cum_s) (k_t k_s) U_s)
//
// a triangular system (I + share) U = W, where share has the factors of U_s. It is solved by blocks of 16 tokens, whose
// own matrices I + share are inverted before. Then
//
//     out_t = scale / |q_t| (exp(cum_t) q_t S + sum_{s <= t} exp(cum_t - cum_s) (q_t k_s) U_s)
//     S = exp(cum_last) S + sum_s exp(cum_last - cum_s) k_s^T U_s
//
// So q and k are multiplied as they came, in 16 bits, and their norms scale rows. The operands that update a state are
// sums of two values of 16 bits (SplitPair), so that a state is as precise as with a scan. chunks.cuh describes the
// schedule of a block.
#pragma once

#include "recurrent/delta_rule_matrices.cuh"

// Two neighbouring tiles of results as the left side of a product, in two parts.
template <class Type>
struct SplitFragment {
    unsigned high[4], low[4];

    __device__ __forceinline__ void split(const float (&first)[4], const float (&second)[4]) {
        const float2 pairs[] = {
            {first[0], first[1]}, {first[2], first[3]}, {second[0], second[1]}, {second[2], second[3]}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const SplitPair<Type> parts(Type{}, pairs[i]);
            high[i] = parts.high;
            low[i] = parts.low;
        }
    }
    // The sum of both parts, of one register.
    __device__ __forceinline__ float2 sum(int i) const {
        const float2 large = unpack(Type{}, high[i]), small = unpack(Type{}, low[i]);
        return {large.x + small.x, large.y + small.y};
    }
};

template <class Type, int kKeyDim, int kStateWarps>
struct DeltaStateWarp {
    using Memory = DeltaMemory<kKeyDim, kStateWarps>;
    static constexpr int kKeyTiles = kKeyDim / 8;

    const DeltaParams& params;
    Memory memory;
    long long slot, head, first_column;
    int count, warp, lane, row, column;  // row and column of this lane in fragments
    float state[kKeyTiles][4];           // transposed

    __device__ __forceinline__ DeltaStateWarp(const DeltaParams& params, const Memory& memory, int count)
        : params(params), memory(memory), slot(blockIdx.z), head(blockIdx.y),
          first_column(static_cast<long long>(blockIdx.x) * Memory::kColumns), count(count),
          warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32), row(lane / 4),
          column(lane % 4 * 2) {}

    // The column of the state that is row `row` or row + 8 here.
    __device__ __forceinline__ long long state_column(int half) const {
        return first_column + 16 * warp + 8 * half + row;
    }
    __device__ __forceinline__ bool is_there(int tile, int half) const {
        return 8 * tile < params.key_dim && state_column(half) < params.value_dim;
    }
    __device__ __forceinline__ long long state_index(int tile, int i) const {
        return ((slot * params.heads + head) * params.key_dim + 8 * tile + column + i % 2) * params.value_dim
               + state_column(i / 2);
    }
    __device__ __forceinline__ void load_state() {
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[tile][i] =
                    is_there(tile, i / 2) ? load_element(State{}, params.past, state_index(tile, i)) : 0.0f;
        }
    }
    __device__ __forceinline__ void store_state() const {
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (is_there(tile, i / 2)) store_element(State{}, params.present, state_index(tile, i), state[tile][i]);
            }
        }
    }

    // Products of the state before a chunk with its keys and its queries.
    __device__ __forceinline__ void multiply_state(long long chunk, float (&keys)[kTokenTiles][4],
                                                   float (&outputs)[kTokenTiles][4]) const {
        const ChunkTile<kKeyDim> k = memory.k(chunk), q = memory.q(chunk);
#pragma unroll
        for (int step = 0; step < kKeyTiles / 2; step++) {
            SplitFragment<Type> rows;
            rows.split(state[2 * step], state[2 * step + 1]);
#pragma unroll
            for (int block = 0; block < kChunkBlocks; block++) {
                unsigned columns[4];
                k.load_b(columns, 16 * block, step);
                mma_m16n8k16(Type{}, keys[2 * block], rows.high, columns[0], columns[1]);
                mma_m16n8k16(Type{}, keys[2 * block + 1], rows.high, columns[2], columns[3]);
                mma_m16n8k16(Type{}, keys[2 * block], rows.low, columns[0], columns[1]);
                mma_m16n8k16(Type{}, keys[2 * block + 1], rows.low, columns[2], columns[3]);
                q.load_b(columns, 16 * block, step);
                mma_m16n8k16(Type{}, outputs[2 * block], rows.high, columns[0], columns[1]);
                mma_m16n8k16(Type{}, outputs[2 * block + 1], rows.high, columns[2], columns[3]);
            }
        }
    }
    // The right side of the system, in place of the products with keys; and the scale of those with queries.
    __device__ __forceinline__ void scale_products(long long chunk, float (&keys)[kTokenTiles][4],
                                                   float (&outputs)[kTokenTiles][4]) const {
        const DeltaScales& scales = memory.matrices(chunk).scales();
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            unsigned values[4];
            if (tile % 2 == 0) {
                memory.v(chunk).load_a_trans(values, 2 * warp, tile / 2);
                right_side(scales, tile, values[0], values[1], keys[tile]);
                right_side(scales, tile + 1, values[2], values[3], keys[tile + 1]);
            }
            const float2 query = *reinterpret_cast<const float2*>(&scales.query[8 * tile + column]);
#pragma unroll
            for (int i = 0; i < 4; i++) outputs[tile][i] *= i % 2 ? query.y : query.x;
        }
    }
    __device__ __forceinline__ void right_side(const DeltaScales& scales, int tile, unsigned upper, unsigned lower,
                                               float (&keys)[4]) const {
        const float2 value = *reinterpret_cast<const float2*>(&scales.value[8 * tile + column]);
        const float2 key = *reinterpret_cast<const float2*>(&scales.key[8 * tile + column]);
        const float2 first = unpack(Type{}, upper), second = unpack(Type{}, lower);
        keys[0] = value.x * first.x - key.x * keys[0];
        keys[1] = value.y * first.y - key.y * keys[1];
        keys[2] = value.x * second.x - key.x * keys[2];
        keys[3] = value.y * second.y - key.y * keys[3];
    }

    // Adds rows times a matrix between tokens, in two parts.
    __device__ __forceinline__ static void add_product(float (&low)[4], float (&high)[4],
                                                       const SplitFragment<Type>& rows, const unsigned char* whole,
                                                       const unsigned char* rest) {
        unsigned columns[4], small[4];
        ChunkTile<16>{shared_address(whole)}.load_b(columns, 0, 0);
        ChunkTile<16>{shared_address(rest)}.load_b(small, 0, 0);
        mma_m16n8k16(Type{}, low, rows.high, columns[0], columns[1]);
        mma_m16n8k16(Type{}, high, rows.high, columns[2], columns[3]);
        mma_m16n8k16(Type{}, low, rows.low, columns[0], columns[1]);
        mma_m16n8k16(Type{}, high, rows.low, columns[2], columns[3]);
        mma_m16n8k16(Type{}, low, rows.high, small[0], small[1]);
        mma_m16n8k16(Type{}, high, rows.high, small[2], small[3]);
    }
    // Solves for the changes, block by block, and adds what outputs have of them.
    __device__ __forceinline__ void solve(long long chunk, float (&right)[kTokenTiles][4],
                                          SplitFragment<Type> (&changes)[kChunkBlocks],
                                          float (&outputs)[kTokenTiles][4]) const {
        const DeltaMatrices matrices = memory.matrices(chunk);
#pragma unroll
        for (int block = 0; block < kChunkBlocks; block++) {
            SplitFragment<Type> rows;
            rows.split(right[2 * block], right[2 * block + 1]);
            float low[4] = {}, high[4] = {};
            add_product(low, high, rows, matrices.change(block, block, 0), matrices.change(block, block, 1));
            changes[block].split(low, high);
#pragma unroll
            for (int later = block + 1; later < kChunkBlocks; later++) {
                add_product(right[2 * later], right[2 * later + 1], changes[block], matrices.change(later, block, 0),
                            matrices.change(later, block, 1));
            }
#pragma unroll
            for (int later = block; later < kChunkBlocks; later++) {
                unsigned columns[4];
                ChunkTile<16>{shared_address(matrices.score(later, block))}.load_b(columns, 0, 0);
                mma_m16n8k16(Type{}, outputs[2 * later], changes[block].high, columns[0], columns[1]);
                mma_m16n8k16(Type{}, outputs[2 * later + 1], changes[block].high, columns[2], columns[3]);
            }
        }
    }

    __device__ __forceinline__ void store_outputs(long long chunk, const float (&outputs)[kTokenTiles][4]) const {
        const long long first = chunk * kChunkTokens, warp_column = first_column + 16 * warp,
                        token_bytes = 2 * params.heads * params.value_dim;
        unsigned char* out = static_cast<unsigned char*>(params.out) + (slot * params.width + first) * token_bytes;
        store_transposed(Type{}, outputs, out + 2 * (head * params.value_dim + warp_column), token_bytes, count - first,
                         params.value_dim - warp_column);
    }

    // The state after a chunk.
    __device__ __forceinline__ void advance(long long chunk, const SplitFragment<Type> (&changes)[kChunkBlocks]) {
        const DeltaScales& scales = memory.matrices(chunk).scales();
        const ChunkTile<kKeyDim> k = memory.k(chunk);
        const float total = scales.total[0];
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state[tile][i] *= total;
        }
#pragma unroll
        for (int block = 0; block < kChunkBlocks; block++) {
            SplitFragment<Type> rows;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 change = changes[block].sum(i),
                             end = *reinterpret_cast<const float2*>(&scales.end[16 * block + i / 2 * 8 + column]);
                const SplitPair<Type> parts(Type{}, {change.x * end.x, change.y * end.y});
                rows.high[i] = parts.high;
                rows.low[i] = parts.low;
            }
#pragma unroll
            for (int tile = 0; tile < kKeyTiles; tile += 2) {
                unsigned columns[4];
                k.load_b_trans(columns, tile, block);
                mma_m16n8k16(Type{}, state[tile], rows.high, columns[0], columns[1]);
                mma_m16n8k16(Type{}, state[tile + 1], rows.high, columns[2], columns[3]);
                mma_m16n8k16(Type{}, state[tile], rows.low, columns[0], columns[1]);
                mma_m16n8k16(Type{}, state[tile + 1], rows.low, columns[2], columns[3]);
            }
        }
    }

    // One chunk, whose matrices are there.
    __device__ __forceinline__ void take(long long chunk) {
        float keys[kTokenTiles][4] = {}, outputs[kTokenTiles][4] = {};
        SplitFragment<Type> changes[kChunkBlocks];
        multiply_state(chunk, keys, outputs);
        scale_products(chunk, keys, outputs);
        solve(chunk, keys, changes, outputs);
        store_outputs(chunk, outputs);
        advance(chunk, changes);
    }
};

template <class Type, int kKeyDim, int kStateWarps>
struct DeltaChunks {
    using Memory = DeltaMemory<kKeyDim, kStateWarps>;

    const DeltaParams& params;
    Memory memory;
    long long slot, head, first_column;
    int count;

    __device__ __forceinline__ DeltaChunks(const DeltaParams& params, unsigned char* shared)
        : params(params), memory{shared}, slot(blockIdx.z), head(blockIdx.y),
          first_column(static_cast<long long>(blockIdx.x) * Memory::kColumns),
          count(count_new(params.new_lengths, slot, params.width)) {}

    // For each vector of 8 columns of the block in `rows` rows.
    template <class Work>
    __device__ __forceinline__ void for_runs(long long rows, Work work) const {
        constexpr int kVectors = Memory::kColumns / 8;
        for (long long i = threadIdx.x; i < rows * kVectors; i += Memory::kThreads) {
            const long long of_head = first_column + i % kVectors * 8;
            if (of_head < params.value_dim) work(i / kVectors, of_head);
        }
    }
    __device__ __forceinline__ void zero_padding() const {
        for_runs(params.width - count, [&](long long row, long long of_head) {
            const float zeros[8] = {};
            store_elements(Type{}, params.out,
                           ((slot * params.width + count + row) * params.heads + head) * params.value_dim + of_head,
                           zeros);
        });
    }
    __device__ __forceinline__ void keep_state() const {
        if (params.past == params.present) return;
        for_runs(params.key_dim, [&](long long row, long long of_head) {
            copy_elements<State, 8>(params.present, params.past,
                                    ((slot * params.heads + head) * params.key_dim + row) * params.value_dim + of_head);
        });
    }

    __device__ __forceinline__ void run() const {
        zero_padding();
        if (count == 0) return keep_state();
        run_chunks(
            Memory::kStateThreads, count,
            [&] { return DeltaStateWarp<Type, kKeyDim, kStateWarps>(params, memory, count); },
            [&] { return DeltaMatrixWarp<Type, kKeyDim, kStateWarps>(params, memory, count); });
    }
};
