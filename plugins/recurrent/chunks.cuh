// Chunks of tokens, one after another, with a state between them: the common part of Mamba-2 and the gated delta rule.
//
// States are computed transposed: tokens are columns, and a warp has 16 rows of the state. So the result of a product
// is in the registers that the next product reads, and the warps with states exchange nothing. Other warps compute the
// matrices between the tokens of a chunk, which do not depend on states. They do so one chunk ahead, for all warps with
// states. The copies from global memory are another chunk ahead.
#pragma once

#include "attention/cp_async.cuh"
#include "recurrent/chunk_tile.cuh"
#include "recurrent/elements.cuh"
#include "recurrent/functions.cuh"
#include "shared_memory.cuh"

// The macro: trt_kvcache/kernels/recurrent_chunks.py has it.
constexpr int kChunkTokens = CHUNK_TOKENS;
// one meets the state, one makes matrices, one is on its way
constexpr int kChunkStages = 3;
constexpr int kChunkBlocks = kChunkTokens / 16;                     // of 16 tokens
constexpr int kBlockPairs = kChunkBlocks * (kChunkBlocks + 1) / 2;  // of a block with itself or an earlier one
constexpr int kTokenTiles = kChunkTokens / 8, kTokensPerLane = kChunkTokens / 32;
constexpr int kMatrixTileBytes = 16 * 16 * 2;

// The place of a pair of blocks.
__device__ __forceinline__ constexpr int block_pair(int later, int earlier) {
    return later * (later + 1) / 2 + earlier;
}

// Runs state warps and matrix warps, with a barrier for each chunk: state warps take() chunk i while matrix warps make()
// the matrices of chunk i + 1. Threads from `state_threads` on are the matrix warps.
template <class MakeStateWarp, class MakeMatrixWarp>
__device__ __forceinline__ void run_chunks(int state_threads, int count, MakeStateWarp make_state_warp,
                                           MakeMatrixWarp make_matrix_warp) {
    const long long chunks = (count + kChunkTokens - 1) / kChunkTokens;
    if (static_cast<int>(threadIdx.x) < state_threads) {
        auto warp = make_state_warp();
        warp.load_state();
        __syncthreads();
        for (long long chunk = 0; chunk < chunks; chunk++) {
            __syncthreads();
            warp.take(chunk);
        }
        warp.store_state();
    } else {
        auto warp = make_matrix_warp();
        warp.fetch(0);
        warp.load_gates(0);
        for (long long chunk = 0; chunk < chunks; chunk++) {
            cp_async_wait_group<0>();
            __syncthreads();
            if (chunk + 1 < chunks) warp.fetch(chunk + 1);
            warp.make(chunk);
        }
        __syncthreads();
    }
}

// Prefix sums over the tokens of a chunk, in place. A lane has some consecutive tokens.
__device__ __forceinline__ void sum_tokens(float (&values)[kTokensPerLane]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 1; i < kTokensPerLane; i++) values[i] += values[i - 1];
    float sum = values[kTokensPerLane - 1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float before = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += before;
    }
    const float before = sum - values[kTokensPerLane - 1];
#pragma unroll
    for (int i = 0; i < kTokensPerLane; i++) values[i] += before;
}

// The products of the tokens of a block, which are rows of `left`, with all of the chunk, which are rows of `right`.
template <class Type, int kRowElements>
__device__ __forceinline__ void multiply_block(Type, const ChunkTile<kRowElements>& left,
                                               const ChunkTile<kRowElements>& right, int block,
                                               float (&products)[kTokenTiles][4]) {
#pragma unroll
    for (int step = 0; step < kRowElements / 16; step++) {
        unsigned rows[4];
        left.load_a(rows, 16 * block, step);
#pragma unroll
        for (int other = 0; other < kChunkBlocks; other++) {
            unsigned columns[4];
            right.load_b(columns, 16 * other, step);
            mma_m16n8k16(Type{}, products[2 * other], rows, columns[0], columns[1]);
            mma_m16n8k16(Type{}, products[2 * other + 1], rows, columns[2], columns[3]);
        }
    }
}

// Stores the transposed outputs of a warp. `out`: address of its first row and the chunk's first token; `tokens` and
// `rows`: how many exist from there on.
template <class Type>
__device__ __forceinline__ void store_transposed(Type, const float (&outputs)[kTokenTiles][4], unsigned char* out,
                                                 long long token_bytes, long long tokens, long long rows) {
    // Two lanes exchange values of two adjacent rows and tokens, so that each stores two tokens of one row.
    const int lane = static_cast<int>(threadIdx.x) % 32, odd = lane / 4 % 2, row = lane / 4 - odd,
              token = lane % 4 * 2 + odd;
    const int left = static_cast<int>(min(tokens, static_cast<long long>(kChunkTokens))) - token;
    const bool halves[] = {row < rows, row + 8 < rows};
    out += token * token_bytes + 2 * row;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned mine = pack(Type{}, {outputs[tile][2 * half], outputs[tile][2 * half + 1]}),
                           other = __shfl_xor_sync(~0u, mine, 4);
            const unsigned word = odd ? other >> 16 | (mine & 0xFFFF0000u) : (mine & 0xFFFFu) | other << 16;
            if (8 * tile < left && halves[half])
                *reinterpret_cast<unsigned*>(out + 8 * tile * token_bytes + 16 * half) = word;
        }
    }
}
