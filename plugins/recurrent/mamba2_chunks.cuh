// The state space of Mamba-2 over many new tokens, with tensor cores, by chunks ("Transformers are SSMs", Dao and Gu,
// 2024, section 6: state space duality). A block has up to 64 rows of the state of a head.
//
// With steps dt, cum = their sums times a within a chunk, and S the state before it:
//
//     Y = (C B^T * exp(cum_t - cum_s) * dt_s, s <= t, and d for t) X  +  exp(cum_t) C S^T
//     S = exp(cum_last) S + (exp(cum_last - cum_s) dt_s X)^T B
//
// B, C and X have 16 bits. For Y, two operands are rounded to 16 bits: the matrix that multiplies X, and S. For S, the
// scaled X is the sum of two 16-bit values, the second of which is the rounding error of the first, so that a state is
// as precise as with a scan. chunks.cuh describes the schedule of a block.
#pragma once

#include "recurrent/chunks.cuh"
#include "recurrent/mamba2_params.cuh"

// trt_kvcache/kernels/mamba2_kernels.py has the same numbers.
constexpr int kMambaChunkRows = 64;  // of the state, in a block
constexpr int kMambaMatrixWarps = kChunkBlocks;
constexpr int kMambaStateThreads = 32 * kMambaChunkRows / 16;
constexpr int kMambaChunkThreads = kMambaStateThreads + 32 * kMambaMatrixWarps;

// Numbers of the tokens of a chunk.
struct MambaScales {
    float decay[kChunkTokens];   // from the state before the chunk
    float weight[kChunkTokens];  // of an input in the state after the chunk
    float total[4];              // the decay over the chunk
};

// Scratch memory of a matrix warp: steps, and their sums times a, to base 2.
struct MambaScratch {
    float steps[kChunkTokens], sums[kChunkTokens];
};

template <int kStateSize>
struct MambaMemory {
    static constexpr int kStateBytes = 2 * kChunkTokens * kStateSize, kInputBytes = 2 * kChunkTokens * kMambaChunkRows;
    static constexpr int kStageBytes = 2 * kStateBytes + kInputBytes, kTilesBytes = kChunkStages * kStageBytes;
    static constexpr int kMatrixBytes = kBlockPairs * kMatrixTileBytes,
                         kMatricesBytes = kMatrixBytes + static_cast<int>(sizeof(MambaScales));

    unsigned char* data;

    __device__ __forceinline__ unsigned char* stage(long long chunk) const {
        return data + static_cast<int>(chunk % kChunkStages) * kStageBytes;
    }
    __device__ __forceinline__ ChunkTile<kStateSize> b(long long chunk) const { return {shared_address(stage(chunk))}; }
    __device__ __forceinline__ ChunkTile<kStateSize> c(long long chunk) const {
        return {shared_address(stage(chunk) + kStateBytes)};
    }
    __device__ __forceinline__ ChunkTile<kMambaChunkRows> x(long long chunk) const {
        return {shared_address(stage(chunk) + 2 * kStateBytes)};
    }
    __device__ __forceinline__ unsigned char* matrices(long long chunk) const {
        return data + kTilesBytes + static_cast<int>(chunk % 2) * kMatricesBytes;
    }
    // Matrix from the inputs of a block to the outputs of a later one.
    __device__ __forceinline__ unsigned char* matrix(long long chunk, int later, int earlier) const {
        return matrices(chunk) + block_pair(later, earlier) * kMatrixTileBytes;
    }
    __device__ __forceinline__ MambaScales& scales(long long chunk) const {
        return *reinterpret_cast<MambaScales*>(matrices(chunk) + kMatrixBytes);
    }
    __device__ __forceinline__ MambaScratch& scratch(int matrix_warp) const {
        return reinterpret_cast<MambaScratch*>(data + kTilesBytes + 2 * kMatricesBytes)[matrix_warp];
    }
};

// Place of a thread in its block and in fragments.
struct MambaPlace {
    long long slot, head, group, first_row;
    int lane, row, column;  // row and column in fragments

    __device__ __forceinline__ explicit MambaPlace(const MambaParams& params)
        : slot(blockIdx.z), head(blockIdx.y), group(head * params.groups / params.heads),
          first_row(static_cast<long long>(blockIdx.x) * kMambaChunkRows), lane(static_cast<int>(threadIdx.x) % 32),
          row(lane / 4), column(lane % 4 * 2) {}
};

// Each has a block of tokens.
template <class Type, int kStateSize>
struct MambaMatrixWarp : MambaPlace {
    const MambaParams& params;
    MambaMemory<kStateSize> memory;
    int count, warp;
    float a, bias, d, dt[kTokensPerLane];

    __device__ __forceinline__ MambaMatrixWarp(const MambaParams& params, const MambaMemory<kStateSize>& memory,
                                               int count)
        : MambaPlace(params), params(params), memory(memory), count(count),
          warp((static_cast<int>(threadIdx.x) - kMambaStateThreads) / 32), a(params.a[head]),
          bias(params.dt_bias ? params.dt_bias[head] : 0.0f), d(params.d ? params.d[head] : 0.0f) {}

    // Starts to copy a tile, with zeros behind the new tokens and after `chunks` vectors of 8 elements.
    template <int kRowElements>
    __device__ __forceinline__ void fetch_tile(const ChunkTile<kRowElements>& tile, const Tokens& tokens,
                                               long long first, long long element, long long chunks) const {
        constexpr int kThreads = 32 * kMambaMatrixWarps, kChunks = kRowElements / 8;
        const int thread = static_cast<int>(threadIdx.x) - kMambaStateThreads, place = thread % kChunks;
        const bool is_there = place < chunks;
        const unsigned char* from = tokens.row(slot, 0) + 2 * (element + (is_there ? 8 * place : 0));
#pragma unroll 4
        for (int token = thread / kChunks; token < kChunkTokens; token += kThreads / kChunks) {
            const bool is_new = first + token < count;
            cp_async(tile.at(token, place), from + (is_new ? first + token : 0) * tokens.token_stride,
                     is_new && is_there);
        }
    }
    // Starts to copy the tiles of a chunk; closes a commit group.
    __device__ __forceinline__ void fetch(long long chunk) const {
        const long long first = chunk * kChunkTokens;
        fetch_tile(memory.b(chunk), params.b, first, group * kStateSize, kStateSize / 8);
        fetch_tile(memory.c(chunk), params.c, first, group * kStateSize, kStateSize / 8);
        fetch_tile(memory.x(chunk), params.x, first, head * params.head_dim + first_row,
                   (params.head_dim - first_row) / 8);
        cp_async_commit_group();
    }
    // Loads the gates of a chunk: neighbouring tokens for each lane.
    __device__ __forceinline__ void load_gates(long long chunk) {
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) {
            const long long token = chunk * kChunkTokens + kTokensPerLane * lane + i;
            dt[i] = token < count ? load_element(Type{}, params.dt.row(slot, token), head) : 0.0f;
        }
    }
    // Steps of a chunk, and their sums times a. A token that is not new has a step of 0.
    __device__ __forceinline__ void share_steps(long long chunk) const {
        MambaScratch& scratch = memory.scratch(warp);
        float sums[kTokensPerLane];
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) {
            const int token = kTokensPerLane * lane + i;
            const float step = chunk * kChunkTokens + token < count ? time_step(params, dt[i], bias, a).x : 0.0f;
            scratch.steps[token] = step;
            sums[i] = step * a * kLog2E;
        }
        sum_tokens(sums);
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) scratch.sums[kTokensPerLane * lane + i] = sums[i];
        __syncwarp();
    }

    // The matrix of a chunk, and its scales.
    __device__ __forceinline__ void make(long long chunk) {
        const MambaScratch& scratch = memory.scratch(warp);
        MambaScales& scales = memory.scales(chunk);
        share_steps(chunk);
        load_gates(chunk + 1);
        float products[kTokenTiles][4] = {};
        multiply_block(Type{}, memory.c(chunk), memory.b(chunk), warp, products);
        const int tokens[] = {16 * warp + row, 16 * warp + row + 8};
        const float last = scratch.sums[kChunkTokens - 1], sums[] = {scratch.sums[tokens[0]], scratch.sums[tokens[1]]};
        if (column == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                scales.decay[tokens[i]] = exp2_approx(sums[i]);
                scales.weight[tokens[i]] = exp2_approx(last - sums[i]) * scratch.steps[tokens[i]];
            }
        }
        if (warp == 0 && lane == 0) scales.total[0] = exp2_approx(last);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            const int other = tile / 2, of_block = tile % 2 * 8 + column, of_chunk = 16 * other + of_block;
            const float2 steps = *reinterpret_cast<const float2*>(&scratch.steps[of_chunk]);
            const float2 of_columns = *reinterpret_cast<const float2*>(&scratch.sums[of_chunk]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float first = products[tile][2 * i] * (exp2_approx(sums[i] - of_columns.x) * steps.x)
                                    + (of_chunk == tokens[i] ? d : 0.0f);
                const float second = products[tile][2 * i + 1] * (exp2_approx(sums[i] - of_columns.y) * steps.y)
                                     + (of_chunk + 1 == tokens[i] ? d : 0.0f);
                if (other > warp) continue;
                tile_word(memory.matrix(chunk, warp, other), row + 8 * i, of_block) =
                    pack(Type{}, {of_chunk <= tokens[i] ? first : 0.0f, of_chunk + 1 <= tokens[i] ? second : 0.0f});
            }
        }
        __syncwarp();
    }
};

// Each has 16 rows of the state.
template <class Type, int kStateSize>
struct MambaStateWarp : MambaPlace {
    static constexpr int kStateTiles = kStateSize / 8;

    const MambaParams& params;
    MambaMemory<kStateSize> memory;
    int count, warp;
    float state[kStateTiles][4];

    __device__ __forceinline__ MambaStateWarp(const MambaParams& params, const MambaMemory<kStateSize>& memory,
                                              int count)
        : MambaPlace(params), params(params), memory(memory), count(count), warp(static_cast<int>(threadIdx.x) / 32) {}

    // Row of the state, of register pair `half` of a fragment.
    __device__ __forceinline__ long long state_row(int half) const { return first_row + 16 * warp + row + 8 * half; }
    __device__ __forceinline__ long long state_index(int half, int tile) const {
        return ((slot * params.heads + head) * params.head_dim + state_row(half)) * kStateSize + 8 * tile + column;
    }
    __device__ __forceinline__ void load_state() {
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float pair[2] = {};
                if (state_row(half) < params.head_dim)
                    load_elements(State{}, params.past, state_index(half, tile), pair);
                state[tile][2 * half] = pair[0];
                state[tile][2 * half + 1] = pair[1];
            }
        }
    }
    __device__ __forceinline__ void store_state() const {
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float pair[2] = {state[tile][2 * half], state[tile][2 * half + 1]};
                if (state_row(half) < params.head_dim)
                    store_elements(State{}, params.present, state_index(half, tile), pair);
            }
        }
    }

    // Adds the contribution of the state before the chunk to its outputs.
    __device__ __forceinline__ void multiply_state(long long chunk, float (&outputs)[kTokenTiles][4]) const {
        const MambaScales& scales = memory.scales(chunk);
#pragma unroll
        for (int step = 0; step < kStateSize / 16; step++) {
            unsigned rows[4];
            pack_a_fragment(Type{}, rows, state[2 * step], state[2 * step + 1]);
#pragma unroll
            for (int block = 0; block < kChunkBlocks; block++) {
                unsigned columns[4];
                memory.c(chunk).load_b(columns, 16 * block, step);
                mma_m16n8k16(Type{}, outputs[2 * block], rows, columns[0], columns[1]);
                mma_m16n8k16(Type{}, outputs[2 * block + 1], rows, columns[2], columns[3]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            const float2 decay = *reinterpret_cast<const float2*>(&scales.decay[8 * tile + column]);
#pragma unroll
            for (int i = 0; i < 4; i++) outputs[tile][i] *= i % 2 ? decay.y : decay.x;
        }
    }
    // Adds the contribution of the inputs of the chunk, which are rows of X^T.
    __device__ __forceinline__ void multiply_inputs(long long chunk, const unsigned (&inputs)[kChunkBlocks][4],
                                                    float (&outputs)[kTokenTiles][4]) const {
#pragma unroll
        for (int block = 0; block < kChunkBlocks; block++) {
#pragma unroll
            for (int later = block; later < kChunkBlocks; later++) {
                unsigned columns[4];
                ChunkTile<16>{shared_address(memory.matrix(chunk, later, block))}.load_b(columns, 0, 0);
                mma_m16n8k16(Type{}, outputs[2 * later], inputs[block], columns[0], columns[1]);
                mma_m16n8k16(Type{}, outputs[2 * later + 1], inputs[block], columns[2], columns[3]);
            }
        }
    }
    // The state after a chunk.
    __device__ __forceinline__ void advance(long long chunk, const unsigned (&inputs)[kChunkBlocks][4]) {
        const MambaScales& scales = memory.scales(chunk);
        const float total = scales.total[0];
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state[tile][i] *= total;
        }
#pragma unroll
        for (int block = 0; block < kChunkBlocks; block++) {
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = unpack(Type{}, inputs[block][i]);
                const float2 weight = *reinterpret_cast<const float2*>(&scales.weight[16 * block + i / 2 * 8 + column]);
                const SplitPair<Type> parts(Type{}, {pair.x * weight.x, pair.y * weight.y});
                high[i] = parts.high;
                low[i] = parts.low;
            }
#pragma unroll
            for (int tile = 0; tile < kStateTiles; tile += 2) {
                unsigned columns[4];
                memory.b(chunk).load_b_trans(columns, tile, block);
                mma_m16n8k16(Type{}, state[tile], high, columns[0], columns[1]);
                mma_m16n8k16(Type{}, state[tile + 1], high, columns[2], columns[3]);
                mma_m16n8k16(Type{}, state[tile], low, columns[0], columns[1]);
                mma_m16n8k16(Type{}, state[tile + 1], low, columns[2], columns[3]);
            }
        }
    }

    // One chunk, whose matrix is there.
    __device__ __forceinline__ void take(long long chunk) {
        float outputs[kTokenTiles][4] = {};
        unsigned inputs[kChunkBlocks][4];
#pragma unroll
        for (int block = 0; block < kChunkBlocks; block++) memory.x(chunk).load_a_trans(inputs[block], 2 * warp, block);
        multiply_state(chunk, outputs);
        multiply_inputs(chunk, inputs, outputs);
        const long long first = chunk * kChunkTokens, warp_row = first_row + 16 * warp,
                        token_bytes = 2 * params.heads * params.head_dim;
        unsigned char* out = static_cast<unsigned char*>(params.out) + (slot * params.width + first) * token_bytes;
        store_transposed(Type{}, outputs, out + 2 * (head * params.head_dim + warp_row), token_bytes, count - first,
                         params.head_dim - warp_row);
        advance(chunk, inputs);
    }
};

template <class Type, int kStateSize>
struct MambaChunks : MambaPlace {
    const MambaParams& params;
    MambaMemory<kStateSize> memory;
    int count;

    __device__ __forceinline__ MambaChunks(const MambaParams& params, unsigned char* shared)
        : MambaPlace(params), params(params), memory{shared}, count(count_new(params.new_lengths, slot, params.width)) {
    }

    __device__ __forceinline__ void zero_padding() const {
        constexpr int kVectors = kMambaChunkRows / 8;
        for (long long i = count * kVectors + threadIdx.x; i < params.width * kVectors; i += kMambaChunkThreads) {
            const long long of_head = first_row + i % kVectors * 8;
            const float zeros[8] = {};
            if (of_head >= params.head_dim) continue;
            store_elements(Type{}, params.out,
                           ((slot * params.width + i / kVectors) * params.heads + head) * params.head_dim + of_head,
                           zeros);
        }
    }
    __device__ __forceinline__ void keep_state() const {
        if (params.past == params.present) return;
        const long long rows = min(params.head_dim - first_row, static_cast<long long>(kMambaChunkRows));
        const long long first = ((slot * params.heads + head) * params.head_dim + first_row) * kStateSize;
        for (long long i = threadIdx.x; i < rows * kStateSize / 8; i += kMambaChunkThreads) {
            copy_elements<State, 8>(params.present, params.past, first + 8 * i);
        }
    }
    __device__ __forceinline__ void run() const {
        zero_padding();
        if (count == 0) return keep_state();
        run_chunks(
            kMambaStateThreads, count, [&] { return MambaStateWarp<Type, kStateSize>(params, memory, count); },
            [&] { return MambaMatrixWarp<Type, kStateSize>(params, memory, count); });
    }
};
