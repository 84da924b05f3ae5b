// The state space of Mamba-2 over many new tokens, with tensor cores: chunks of 64 tokens, one after another ("Transformers are SSMs", Dao and
// Gu, 2024, section 6: state space duality). A block has up to 64 rows of the state of a head; the state stays in registers, in float32.
//
// With steps dt, cum = their sums times a within a chunk, and S the state before it:
//
//     Y = (C B^T * exp(cum_t - cum_s) * dt_s, s <= t) X  +  exp(cum_t) C S^T  +  d X      a warp has 16 tokens
//     S = exp(cum_last) S  +  (exp(cum_last - cum_s) dt_s X)^T B                          a warp has 16 rows of S
//
// B, C and X have 16 bits, as have the matrix in front of X, and S, in Y. The scaled X enters its product as the sum of two values of 16 bits, what
// is rounded off the first one being the second, so that a state is as precise as that of a scan.
#pragma once

#include "attention/cp_async.cuh"
#include "attention/mma.cuh"
#include "recurrent/mamba2_params.cuh"
#include "shared_memory.cuh"

// trt_kvcache/kernels/cuda/mamba2.py has the same numbers.
constexpr int kChunkTokens = 64;
constexpr int kChunkRows = 64;  // of the state, in a block
constexpr int kChunkThreads = 128;

// Two values of 16 bits each, whose sum is a pair of floats.
template <class Type>
struct SplitPair {
    unsigned high, low;

    __device__ __forceinline__ SplitPair(Type, float2 values) {
        high = pack(Type{}, values);
        const float2 rounded = unpack(Type{}, high);
        low = pack(Type{}, {values.x - rounded.x, values.y - rounded.y});
    }
};

// A tile of rows of 16-bit elements, a multiple of 64 of them. Chunks of 16 bytes are permuted, so that ldmatrix meets no bank conflict.
template <int kRowElements>
struct ChunkTile {
    SharedAddress base;

    static constexpr int kRowBytes = 2 * kRowElements;
    __device__ __forceinline__ SharedAddress at(int row, int chunk) const { return base + row * kRowBytes + (chunk ^ (row & 7)) * 16; }

    // A fragments of rows row to row + 15, elements 16 k to 16 k + 15.
    __device__ __forceinline__ void load_a(unsigned (&a)[4], int row, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(a, at(row + lane % 16, 2 * k + lane / 16));
    }
    // The same of the transposed tile: rows are elements 8 chunk to 8 chunk + 15, and k counts rows.
    __device__ __forceinline__ void load_a_trans(unsigned (&a)[4], int chunk, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4_trans(a, at(16 * k + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
    }
    // B fragments of two times 8 columns, which are rows row to row + 15: elements 0 and 1, and 2 and 3.
    __device__ __forceinline__ void load_b(unsigned (&b)[4], int row, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(b, at(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    }
    // The same of the transposed tile: columns are elements 8 chunk to 8 chunk + 15, and k counts rows.
    __device__ __forceinline__ void load_b_trans(unsigned (&b)[4], int chunk, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4_trans(b, at(16 * k + lane % 16, chunk + lane / 16));
    }
};

// Shared memory: two stages of the tiles of a chunk, the state before it, and steps with their sums.
template <int kStateSize>
struct ChunkMemory {
    static constexpr int kStateBytes = 2 * kChunkTokens * kStateSize, kXBytes = 2 * kChunkTokens * kChunkRows;
    static constexpr int kStageBytes = 2 * kStateBytes + kXBytes;

    unsigned char* data;

    __device__ __forceinline__ ChunkTile<kStateSize> b(int stage) const { return {shared_address(data + stage * kStageBytes)}; }
    __device__ __forceinline__ ChunkTile<kStateSize> c(int stage) const { return {shared_address(data + stage * kStageBytes + kStateBytes)}; }
    __device__ __forceinline__ ChunkTile<kChunkRows> x(int stage) const { return {shared_address(data + stage * kStageBytes + 2 * kStateBytes)}; }
    __device__ __forceinline__ ChunkTile<kStateSize> state() const { return {shared_address(data + 2 * kStageBytes)}; }
    __device__ __forceinline__ unsigned* state_word(int row, int chunk, int word) const {
        return reinterpret_cast<unsigned*>(data + 2 * kStageBytes + row * 2 * kStateSize + (chunk ^ (row & 7)) * 16) + word;
    }
    __device__ __forceinline__ float* steps(int stage) const {
        return reinterpret_cast<float*>(data + 2 * kStageBytes + 2 * kChunkRows * kStateSize) + stage * 2 * kChunkTokens;
    }
    __device__ __forceinline__ float* sums(int stage) const { return steps(stage) + kChunkTokens; }
};

template <class Type, int kStateSize>
struct ChunkScan {
    static constexpr int kStateTiles = kStateSize / 8, kTokenTiles = kChunkTokens / 8, kRowTiles = kChunkRows / 8;

    const MambaParams& params;
    ChunkMemory<kStateSize> memory;
    long long slot, head, group, first_row;
    int count, warp, lane, row, column;  // row and column of this lane in fragments
    float state[kStateTiles][4];

    __device__ __forceinline__ ChunkScan(const MambaParams& params, unsigned char* shared)
        : params(params),
          memory{shared},
          slot(blockIdx.z),
          head(blockIdx.y),
          group(head * params.groups / params.heads),
          first_row(static_cast<long long>(blockIdx.x) * kChunkRows),
          count(count_new(params.new_lengths, slot, params.width)),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32),
          row(16 * warp + lane / 4),
          column(lane % 4 * 2) {}

    // Row of the state, of register pair `half` of a fragment.
    __device__ __forceinline__ long long state_row(int half) const { return first_row + row + 8 * half; }
    __device__ __forceinline__ long long state_index(int half, int tile) const {
        return ((slot * params.heads + head) * params.head_dim + state_row(half)) * kStateSize + 8 * tile + column;
    }

    __device__ __forceinline__ void load_state() {
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float pair[2] = {};
                if (state_row(half) < params.head_dim) load_elements(State{}, params.past, state_index(half, tile), pair);
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
                if (state_row(half) < params.head_dim) store_elements(State{}, params.present, state_index(half, tile), pair);
            }
        }
    }
    // The state as an operand.
    __device__ __forceinline__ void share_state() const {
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *memory.state_word(row + 8 * half, tile, column / 2) = pack(Type{}, {state[tile][2 * half], state[tile][2 * half + 1]});
            }
        }
    }

    // Starts to copy the tiles of a chunk, with zeros behind the new tokens and rows; closes a commit group.
    __device__ __forceinline__ void fetch(int stage, long long first) const {
        constexpr int kStateChunks = kStateSize / 8, kXChunks = kChunkRows / 8, kChunks = 2 * kStateChunks + kXChunks;
        for (int i = threadIdx.x; i < kChunkTokens * kChunks; i += kChunkThreads) {
            const int token = i / kChunks, chunk = i % kChunks;
            const bool is_new = first + token < count;
            const long long from = is_new ? first + token : 0;
            if (chunk < 2 * kStateChunks) {
                const bool is_b = chunk < kStateChunks;
                const int place = is_b ? chunk : chunk - kStateChunks;
                const Tokens& tokens = is_b ? params.b : params.c;
                cp_async((is_b ? memory.b(stage) : memory.c(stage)).at(token, place),
                         tokens.row(slot, from) + group * 2 * kStateSize + 16 * place, is_new);
            } else {
                const int place = chunk - 2 * kStateChunks;
                const bool is_there = first_row + 8 * place < params.head_dim;
                cp_async(memory.x(stage).at(token, place),
                         params.x.row(slot, from) + 2 * (head * params.head_dim + (is_there ? first_row + 8 * place : 0)), is_new && is_there);
            }
        }
        cp_async_commit_group();
    }

    // What a chunk's steps come from: two tokens for each lane of the first warp.
    __device__ __forceinline__ float2 load_dt(long long first) const {
        const long long token = first + 2 * lane;
        return {warp == 0 && token < count ? load_element(Type{}, params.dt.row(slot, token), head) : 0.0f,
                warp == 0 && token + 1 < count ? load_element(Type{}, params.dt.row(slot, token + 1), head) : 0.0f};
    }
    // Steps of a chunk, and their sums times a. A token that is not new has a step of 0.
    __device__ __forceinline__ void share_steps(int stage, long long first, float2 dt, float bias, float a) const {
        if (warp != 0) return;
        const long long token = first + 2 * lane;
        const float low = token < count ? time_step(params, dt.x, bias, a).x : 0.0f;
        const float high = token + 1 < count ? time_step(params, dt.y, bias, a).x : 0.0f;
        float sum = (low + high) * a;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += before;
        }
        memory.steps(stage)[2 * lane] = low;
        memory.steps(stage)[2 * lane + 1] = high;
        memory.sums(stage)[2 * lane] = sum - high * a;
        memory.sums(stage)[2 * lane + 1] = sum;
    }

    // The outputs of a chunk.
    __device__ __forceinline__ void outputs(int stage, long long first, float d) const {
        const float *steps = memory.steps(stage), *sums = memory.sums(stage);
        const float cum[2] = {sums[row], sums[row + 8]};
        float y[kRowTiles][4] = {}, scores[kTokenTiles][4] = {};
#pragma unroll
        for (int k = 0; k < kStateSize / 16; k++) {
            unsigned c[4];
            memory.c(stage).load_a(c, 16 * warp, k);
#pragma unroll
            for (int pair = 0; pair < kRowTiles / 2; pair++) {
                unsigned b[4];
                memory.state().load_b(b, 16 * pair, k);
                mma_m16n8k16(Type{}, y[2 * pair], c, b[0], b[1]);
                mma_m16n8k16(Type{}, y[2 * pair + 1], c, b[2], b[3]);
            }
#pragma unroll
            for (int pair = 0; pair < kTokenTiles / 2; pair++) {
                if (pair > warp) continue;  // tokens behind those of this warp
                unsigned b[4];
                memory.b(stage).load_b(b, 16 * pair, k);
                mma_m16n8k16(Type{}, scores[2 * pair], c, b[0], b[1]);
                mma_m16n8k16(Type{}, scores[2 * pair + 1], c, b[2], b[3]);
            }
        }
        const float decay[2] = {expf(cum[0]), expf(cum[1])};
#pragma unroll
        for (int tile = 0; tile < kRowTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) y[tile][i] *= decay[i / 2];
        }
#pragma unroll
        for (int pair = 0; pair < kTokenTiles / 2; pair++) {
            if (pair > warp) continue;
            unsigned matrix[4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                float(&values)[4] = scores[2 * pair + tile];
                const int token = 16 * pair + 8 * tile + column;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int source = token + i % 2;
                    values[i] = source <= row + i / 2 * 8 ? values[i] * (expf(cum[i / 2] - sums[source]) * steps[source]) : 0.0f;
                }
            }
            pack_a_fragment(Type{}, matrix, scores[2 * pair], scores[2 * pair + 1]);
#pragma unroll
            for (int chunk = 0; chunk < kRowTiles; chunk += 2) {
                unsigned x[4];
                memory.x(stage).load_b_trans(x, chunk, pair);
                mma_m16n8k16(Type{}, y[chunk], matrix, x[0], x[1]);
                mma_m16n8k16(Type{}, y[chunk + 1], matrix, x[2], x[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const long long token = first + row + 8 * half;
            if (token >= count) continue;
            const unsigned char* inputs = params.x.row(slot, token);
#pragma unroll
            for (int tile = 0; tile < kRowTiles; tile++) {
                const long long of_head = first_row + 8 * tile + column;
                if (of_head >= params.head_dim) continue;
                const float2 x = unpack(Type{}, *reinterpret_cast<const unsigned*>(inputs + 2 * (head * params.head_dim + of_head)));
                const long long index = ((slot * params.width + token) * params.heads + head) * params.head_dim + of_head;
                *reinterpret_cast<unsigned*>(static_cast<unsigned char*>(params.out) + 2 * index) =
                    pack(Type{}, {y[tile][2 * half] + d * x.x, y[tile][2 * half + 1] + d * x.y});
            }
        }
    }

    // The state after a chunk.
    __device__ __forceinline__ void advance(int stage) {
        const float *steps = memory.steps(stage), *sums = memory.sums(stage);
        const float last = sums[kChunkTokens - 1], decay = expf(last);
#pragma unroll
        for (int tile = 0; tile < kStateTiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state[tile][i] *= decay;
        }
#pragma unroll
        for (int k = 0; k < kChunkTokens / 16; k++) {
            unsigned x[4], high[4], low[4];
            memory.x(stage).load_a_trans(x, 2 * warp, k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = 16 * k + i / 2 * 8 + column;
                const float2 pair = unpack(Type{}, x[i]);
                const SplitPair<Type> parts(Type{}, {pair.x * (expf(last - sums[token]) * steps[token]),
                                                     pair.y * (expf(last - sums[token + 1]) * steps[token + 1])});
                high[i] = parts.high;
                low[i] = parts.low;
            }
#pragma unroll
            for (int chunk = 0; chunk < kStateTiles; chunk += 2) {
                unsigned b[4];
                memory.b(stage).load_b_trans(b, chunk, k);
                mma_m16n8k16(Type{}, state[chunk], high, b[0], b[1]);
                mma_m16n8k16(Type{}, state[chunk + 1], high, b[2], b[3]);
                mma_m16n8k16(Type{}, state[chunk], low, b[0], b[1]);
                mma_m16n8k16(Type{}, state[chunk + 1], low, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void keep_state() const {
        if (params.past == params.present) return;
        for (int tile = 0; tile < kStateTiles; tile++) {
            for (int half = 0; half < 2; half++) {
                if (state_row(half) < params.head_dim) copy_elements<State, 2>(params.present, params.past, state_index(half, tile));
            }
        }
    }

    __device__ __forceinline__ void run(float a, float bias, float d) {
        const int rows = static_cast<int>(min(params.head_dim - first_row, static_cast<long long>(kChunkRows)));
        for (long long i = static_cast<long long>(count) * kChunkRows + threadIdx.x; i < params.width * kChunkRows; i += kChunkThreads) {
            if (i % kChunkRows >= rows) continue;
            const long long token = i / kChunkRows, of_head = first_row + i % kChunkRows;
            store_element(Type{}, params.out, ((slot * params.width + token) * params.heads + head) * params.head_dim + of_head, 0.0f);
        }
        if (count == 0) return keep_state();
        fetch(0, 0);
        load_state();
        share_state();
        share_steps(0, 0, load_dt(0), bias, a);
        int stage = 0;
        for (long long first = 0; first < count; first += kChunkTokens, stage ^= 1) {
            cp_async_wait_group<0>();
            __syncthreads();  // the tiles are there, and the stage before is free
            const float2 next_dt = load_dt(first + kChunkTokens);
            fetch(stage ^ 1, first + kChunkTokens);
            outputs(stage, first, d);
            __syncthreads();  // the state before the chunk is not needed any more
            advance(stage);
            share_state();
            share_steps(stage ^ 1, first + kChunkTokens, next_dt, bias, a);
        }
        cp_async_wait_group<0>();
        store_state();
    }
};
