// The matrices between the tokens of a chunk of the gated delta rule. They do not depend on states: matrix warps make
// them while state warps work on the chunk before.
#pragma once

#include "recurrent/delta_rule_memory.cuh"

template <class Type, int kKeyDim, int kStateWarps>
struct DeltaMatrixWarp {
    using Memory = DeltaMemory<kKeyDim, kStateWarps>;
    static constexpr int kSteps = kKeyDim / 16;

    const DeltaParams& params;
    Memory memory;
    long long slot, head, key_head, first_column;
    int count, warp, lane, row, column;  // row and column of this lane in fragments
    float a[kTokensPerLane], b[kTokensPerLane];

    __device__ __forceinline__ DeltaMatrixWarp(const DeltaParams& params, const Memory& memory, int count)
        : params(params), memory(memory), slot(blockIdx.z), head(blockIdx.y),
          key_head(head / (params.heads / params.key_heads)),
          first_column(static_cast<long long>(blockIdx.x) * Memory::kColumns), count(count),
          warp(static_cast<int>(threadIdx.x) / 32 - kStateWarps), lane(static_cast<int>(threadIdx.x) % 32),
          row(lane / 4), column(lane % 4 * 2) {}

    // Starts to copy the tiles of a chunk, with zeros behind the new tokens, keys and columns; closes a commit group.
    __device__ __forceinline__ void fetch(long long chunk) const {
        constexpr int kThreads = 32 * kDeltaMatrixWarps, kKeyChunks = kKeyDim / 8, kValueChunks = Memory::kColumns / 8;
        constexpr int kKeyRows = kThreads / (2 * kKeyChunks), kValueRows = kThreads / kValueChunks;
        const int thread = static_cast<int>(threadIdx.x) - Memory::kStateThreads;
        const long long first = chunk * kChunkTokens;
        {
            const int part = thread % (2 * kKeyChunks), place = part % kKeyChunks;
            const bool is_k = part < kKeyChunks, is_there = 8 * place < params.key_dim;
            const Tokens tokens{is_k ? params.k.data : params.q.data,
                                is_k ? params.k.slot_stride : params.q.slot_stride,
                                is_k ? params.k.token_stride : params.q.token_stride};
            const ChunkTile<kKeyDim> tile = is_k ? memory.k(chunk) : memory.q(chunk);
            const long long offset = 2 * (key_head * params.key_dim + (is_there ? 8 * place : 0));
#pragma unroll 4
            for (int token = thread / (2 * kKeyChunks); token < kChunkTokens; token += kKeyRows) {
                const bool is_new = first + token < count;
                cp_async(tile.at(token, place), tokens.row(slot, is_new ? first + token : 0) + offset,
                         is_new && is_there);
            }
        }
        const int place = thread % kValueChunks;
        const bool is_there = first_column + 8 * place < params.value_dim;
        const long long offset = 2 * (head * params.value_dim + (is_there ? first_column + 8 * place : 0));
#pragma unroll
        for (int token = thread / kValueChunks; token < kChunkTokens; token += kValueRows) {
            const bool is_new = first + token < count;
            cp_async(memory.v(chunk).at(token, place), params.v.row(slot, is_new ? first + token : 0) + offset,
                     is_new && is_there);
        }
        cp_async_commit_group();
    }

    // Loads the gates of a chunk: neighbouring tokens for each lane.
    __device__ __forceinline__ void load_gates(long long chunk) {
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) {
            const long long token = chunk * kChunkTokens + kTokensPerLane * lane + i;
            a[i] = token < count ? load_element(Type{}, params.a.row(slot, token), head) : 0.0f;
            b[i] = token < count ? load_element(Type{}, params.b.row(slot, token), head) : 0.0f;
        }
    }
    // Sums of the logarithms of decays, to base 2, and betas. A token that is not new changes nothing.
    __device__ __forceinline__ void share_gates(long long chunk) const {
        DeltaScratch& scratch = memory.scratch(warp);
        float sums[kTokensPerLane];
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) {
            const int token = kTokensPerLane * lane + i;
            const bool is_new = chunk * kChunkTokens + token < count;
            const float2 gate = log_gates(params, a[i], b[i], head);
            sums[i] = is_new ? gate.x * kLog2E : 0.0f;
            scratch.beta[token] = is_new ? gate.y : 0.0f;
        }
        sum_tokens(sums);
#pragma unroll
        for (int i = 0; i < kTokensPerLane; i++) scratch.sums[kTokensPerLane * lane + i] = sums[i];
        __syncwarp();
    }

    // Of the products of a block with itself, those of row and row + 8 with themselves.
    __device__ __forceinline__ float2 diagonal(const float (&low)[4], const float (&high)[4]) const {
        const int source = lane / 4 * 4 + lane / 8;
        const float first = __shfl_sync(~0u, row % 2 ? low[1] : low[0], source),
                    second = __shfl_sync(~0u, row % 2 ? high[3] : high[2], source);
        return {first, second};
    }
    // Makes the matrix from earlier changes to the changes of a block.
    __device__ __forceinline__ void make_changes(long long chunk, int block) const {
        DeltaScratch& scratch = memory.scratch(warp);
        const DeltaMatrices matrices = memory.matrices(chunk);
        float products[kTokenTiles][4] = {};
        multiply_block(Type{}, memory.k(chunk), memory.k(chunk), block, products);
        float2 squares = {0.0f, 0.0f};
#pragma unroll
        for (int other = 0; other < kChunkBlocks; other++) {
            if (other == block) squares = diagonal(products[2 * other], products[2 * other + 1]);
        }
        const int tokens[] = {16 * block + row, 16 * block + row + 8};
        const float norms[] = {rsqrtf(squares.x + kNormEpsilon), rsqrtf(squares.y + kNormEpsilon)};
        float sums[2], factors[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sums[i] = scratch.sums[tokens[i]];
            factors[i] = norms[i] * norms[i] * scratch.beta[tokens[i]];
            if (column == 0) {
                matrices.scales().value[tokens[i]] = norms[i] * scratch.beta[tokens[i]];
                matrices.scales().key[tokens[i]] = factors[i] * exp2_approx(sums[i]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            const int other = tile / 2, of_block = tile % 2 * 8 + column;
            const float2 of_columns = *reinterpret_cast<const float2*>(&scratch.sums[16 * other + of_block]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 shares = {factors[i] * exp2_approx(sums[i] - of_columns.x) * products[tile][2 * i],
                                       factors[i] * exp2_approx(sums[i] - of_columns.y) * products[tile][2 * i + 1]};
                const SplitPair<Type> parts(Type{}, {-shares.x, -shares.y});
                if (other == block) *reinterpret_cast<float2*>(&scratch.block[row + 8 * i][of_block]) = shares;
                if (other < block) {
                    tile_word(matrices.change(block, other, 0), row + 8 * i, of_block) = parts.high;
                    tile_word(matrices.change(block, other, 1), row + 8 * i, of_block) = parts.low;
                }
            }
        }
        __syncwarp();
        invert(matrices, block);
        __syncwarp();
    }
    // The inverse of I + the shares of a block in itself, of which those below the diagonal count: a lane has a column.
    __device__ __forceinline__ void invert(const DeltaMatrices& matrices, int block) const {
        if (lane >= 16) return;
        const DeltaScratch& scratch = memory.scratch(warp);
        float inverse[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++) sum -= scratch.block[i][j] * inverse[j];
            inverse[i] = sum;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const SplitPair<Type> parts(Type{}, {inverse[i], 0.0f});
            const int offset = ChunkTile<16>::offset(i, lane / 8) + lane % 8 * 2;
            *reinterpret_cast<unsigned short*>(matrices.change(block, block, 0) + offset) =
                static_cast<unsigned short>(parts.high);
            *reinterpret_cast<unsigned short*>(matrices.change(block, block, 1) + offset) =
                static_cast<unsigned short>(parts.low);
        }
    }

    // Makes the matrix from changes to the outputs of a block.
    __device__ __forceinline__ void make_scores(long long chunk, int block) const {
        const DeltaScratch& scratch = memory.scratch(warp);
        const DeltaMatrices matrices = memory.matrices(chunk);
        DeltaScales& scales = matrices.scales();
        float products[kTokenTiles][4] = {}, own[2][4] = {};
        multiply_block(Type{}, memory.q(chunk), memory.k(chunk), block, products);
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            unsigned rows[4], columns[4];
            memory.q(chunk).load_a(rows, 16 * block, step);
            memory.q(chunk).load_b(columns, 16 * block, step);
            mma_m16n8k16(Type{}, own[0], rows, columns[0], columns[1]);
            mma_m16n8k16(Type{}, own[1], rows, columns[2], columns[3]);
        }
        const float2 squares = diagonal(own[0], own[1]);
        const int tokens[] = {16 * block + row, 16 * block + row + 8};
        const float scale = rsqrtf(static_cast<float>(params.key_dim)), last = scratch.sums[kChunkTokens - 1];
        const float factors[] = {scale * rsqrtf(squares.x + kNormEpsilon), scale * rsqrtf(squares.y + kNormEpsilon)};
        float sums[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sums[i] = scratch.sums[tokens[i]];
            if (column == 0) {
                scales.query[tokens[i]] = factors[i] * exp2_approx(sums[i]);
                scales.end[tokens[i]] = exp2_approx(last - sums[i]);
            }
        }
        if (block == 0 && lane == 0) scales.total[0] = exp2_approx(last);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; tile++) {
            const int other = tile / 2, of_block = tile % 2 * 8 + column, of_chunk = 16 * other + of_block;
            const float2 of_columns = *reinterpret_cast<const float2*>(&scratch.sums[of_chunk]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float first = of_chunk <= tokens[i]
                                        ? factors[i] * exp2_approx(sums[i] - of_columns.x) * products[tile][2 * i]
                                        : 0.0f;
                const float second = of_chunk + 1 <= tokens[i]
                                         ? factors[i] * exp2_approx(sums[i] - of_columns.y) * products[tile][2 * i + 1]
                                         : 0.0f;
                if (other <= block)
                    tile_word(matrices.score(block, other), row + 8 * i, of_block) = pack(Type{}, {first, second});
            }
        }
    }

    // All matrices of a chunk.
    __device__ __forceinline__ void make(long long chunk) {
        share_gates(chunk);
        load_gates(chunk + 1);
        for (int task = warp; task < 2 * kChunkBlocks; task += kDeltaMatrixWarps) {
            if (task < kChunkBlocks) {
                make_changes(chunk, task);
            } else {
                make_scores(chunk, task - kChunkBlocks);
            }
        }
        __syncwarp();
    }
};
