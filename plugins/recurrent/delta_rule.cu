// The gated delta rule over the new tokens of each slot. Launched by trt_kvcache/kernels/delta_rule_kernels.py.
//
// A state is [heads, key_dim, value_dim]. It is read once and written once, by the same thread, so the past and the
// present state may be at one address. A decode step is in delta_rule_update.cuh, chunks of many tokens are in
// delta_rule_chunks.cuh, and a scan of a few tokens is here: a warp owns some columns of a state, all rows, and needs
// no other warp. A lane has one vector of columns in kRows rows that follow each other, in registers; kDeltaScanLanes
// lanes have the same rows.

#include "recurrent/delta_rule_chunks.cuh"
#include "recurrent/delta_rule_update.cuh"

// trt_kvcache/kernels/delta_rule_kernels.py has the same numbers.
constexpr int kDeltaThreads = 128;
constexpr int kDeltaScanLanes = 2;
constexpr int kDeltaTileTokens = 16;

constexpr int kWarps = kDeltaThreads / 32;

// Part of a state that a thread owns.
struct Part {
    static constexpr int kRows = kDeltaMaxKeyDim / (32 / kDeltaScanLanes);
    static constexpr int kBlockColumns = kWarps * kDeltaScanLanes * kColumns;
    static constexpr int kCount = 2 * kColumns;  // values that are summed over rows at once
    static_assert(32 / kDeltaScanLanes == kCount || 32 / kDeltaScanLanes == 2 * kCount,
                  "at most one step with a single value");

    long long slot, head, key_head;
    int row, column;  // the first row and column
    bool is_live;     // true if its columns exist
    bool stores;      // true if it stores an output of each token
    float state[kRows][kColumns];

    __device__ __forceinline__ explicit Part(const DeltaParams& params) : slot(blockIdx.z), head(blockIdx.y) {
        const int thread = threadIdx.x, lane = thread % 32;
        key_head = key_head_of(params, head);
        row = lane / kDeltaScanLanes * kRows;
        column = static_cast<int>(blockIdx.x) * kBlockColumns
                 + (thread / 32 * kDeltaScanLanes + lane % kDeltaScanLanes) * kColumns;
        is_live = column < params.value_dim;
        // Several lanes have the sum of a query. The first of them stores it: the one whose lane number has zeros in the
        // bits that select neither a value nor columns.
        const int last_distance = 32 / kCount;
        stores = own_value() >= kColumns && (lane & (last_distance - 1) & ~(kDeltaScanLanes - 1)) == 0;
    }
    __device__ __forceinline__ bool has_row(const DeltaParams& params, int i) const {
        return is_live && row + i < params.key_dim;
    }
    __device__ __forceinline__ long long index(const DeltaParams& params, int i) const {
        return ((slot * params.heads + head) * params.key_dim + row + i) * params.value_dim + column;
    }
    __device__ __forceinline__ void load(const DeltaParams& params) {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            if (has_row(params, i)) {
                load_elements_once(State{}, params.past, index(params, i), state[i]);
            } else {
#pragma unroll
                for (int j = 0; j < kColumns; j++) state[i][j] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void store(const DeltaParams& params) const {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            if (has_row(params, i)) store_elements_once(State{}, params.present, index(params, i), state[i]);
        }
    }
    // A slot without new tokens: its state, bit for bit.
    __device__ __forceinline__ void keep(const DeltaParams& params) const {
        if (params.past == params.present) return;
        for (int i = 0; i < kRows; i++) {
            if (has_row(params, i)) copy_elements<State, kColumns>(params.present, params.past, index(params, i));
        }
    }
    // This thread's rows of a key or query that begins at `base`; zeros behind the last one.
    __device__ __forceinline__ void load_rows(const DeltaParams& params, const void* base,
                                              float (&values)[kRows]) const {
#pragma unroll
        for (int first = 0; first < kRows; first += 8) {
            float some[8] = {};
            if (row + first < params.key_dim) load_elements(Element{}, base, row + first, some);
#pragma unroll
            for (int i = 0; i < 8; i++) values[first + i] = some[i];
        }
    }
    // Sums kCount values over all rows: each step halves the number of values in a lane. A lane gets only the sum of value
    // own_value().
    template <int kHalf = kCount / 2, int kDistance = 16>
    __device__ __forceinline__ float sum_rows(const float (&values)[2 * kHalf]) const {
        const bool upper = threadIdx.x & kDistance;
        float left[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
            left[i] = (upper ? values[i + kHalf] : values[i])
                      + __shfl_xor_sync(~0u, upper ? values[i] : values[i + kHalf], kDistance);
        }
        if constexpr (kHalf > 1) {
            return sum_rows<kHalf / 2, kDistance / 2>(left);
        } else if constexpr (kDistance > kDeltaScanLanes) {
            return left[0] + __shfl_xor_sync(~0u, left[0], kDistance / 2);
        } else {
            return left[0];
        }
    }
    // Index of the value whose sum sum_rows returns in this lane. lane_of: a lane with the sum of value `value`, of the
    // same columns as this lane.
    __device__ __forceinline__ int own_value() const {
        int value = 0;
#pragma unroll
        for (int distance = 16, half = kCount / 2; half > 0; distance /= 2, half /= 2) {
            if (threadIdx.x & distance) value += half;
        }
        return value;
    }
    __device__ __forceinline__ int lane_of(int value) const {
        int lane = threadIdx.x % kDeltaScanLanes;
#pragma unroll
        for (int distance = 16, half = kCount / 2; half > 0; distance /= 2, half /= 2) {
            if (value & half) lane += distance;
        }
        return lane;
    }
    // One token. The lanes that have the sum of a query store an output each.
    __device__ __forceinline__ void step(const DeltaParams& params, long long at, const DeltaStep& token,
                                         const float (&q)[kRows], const float (&k)[kRows], const float (&v)[kColumns]) {
        float sums[kCount] = {};  // of keys, then of queries
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) {
                sums[j] += k[i] * state[i][j];
                sums[kColumns + j] += q[i] * state[i][j];
            }
        }
        const float sum = sum_rows<>(sums);
        const int mine = own_value() - kColumns;
        float change[kColumns], my_change = 0.0f;
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
            change[j] = token.change(v[j], __shfl_sync(~0u, sum, lane_of(j)));
            if (j == mine) my_change = change[j];
        }
        if (is_live && stores) store_out(params, at, mine, token.output(sum, my_change));
#pragma unroll
        for (int i = 0; i < kRows; i++) {
#pragma unroll
            for (int j = 0; j < kColumns; j++) state[i][j] = token.decay * state[i][j] + k[i] * change[j];
        }
    }
    __device__ __forceinline__ void store_out(const DeltaParams& params, long long token, int in_column,
                                              float value) const {
        const long long index =
            ((slot * params.width + token) * params.heads + head) * params.value_dim + column + in_column;
        store_element(Element{}, params.out, index, value);
    }
};

// The shared memory of a scan: two stages of a tile of tokens, with their gates, and the steps of one.
struct ScanTiles {
    unsigned char* data;
    int key_bytes, value_bytes;  // of q or k, and of the block's part of v, of a token

    __device__ __forceinline__ int stage_bytes() const { return kDeltaTileTokens * (2 * key_bytes + value_bytes); }
    __device__ __forceinline__ unsigned char* q(int stage, int token) const {
        return data + stage * stage_bytes() + token * key_bytes;
    }
    __device__ __forceinline__ unsigned char* k(int stage, int token) const {
        return q(stage, kDeltaTileTokens + token);
    }
    __device__ __forceinline__ unsigned char* v(int stage, int token) const {
        return q(stage, 2 * kDeltaTileTokens) + token * value_bytes;
    }
    __device__ __forceinline__ float2* gates(int stage) const {
        return reinterpret_cast<float2*>(data + 2 * stage_bytes()) + stage * kDeltaTileTokens;
    }
    __device__ __forceinline__ DeltaStep* steps() const { return reinterpret_cast<DeltaStep*>(gates(2)); }

    // Starts to copy a tile, and closes a commit group.
    __device__ __forceinline__ void fetch(const DeltaParams& params, const Part& part, int stage, long long first,
                                          long long count) const {
        const int tokens = static_cast<int>(max(min(count - first, static_cast<long long>(kDeltaTileTokens)), 0LL));
        const int key_chunks = key_bytes / 16, value_chunks = value_bytes / 16, chunks = 2 * key_chunks + value_chunks;
        for (int i = threadIdx.x; i < tokens * chunks; i += kDeltaThreads) {
            const int token = i / chunks, chunk = i % chunks;
            if (chunk < 2 * key_chunks) {
                const bool is_q = chunk < key_chunks;
                const int offset = 16 * (is_q ? chunk : chunk - key_chunks);
                const Tokens& from = is_q ? params.q : params.k;
                cp_async(shared_address((is_q ? q(stage, token) : k(stage, token)) + offset),
                         from.row(part.slot, first + token) + part.key_head * key_bytes + offset, true);
            } else {
                const long long offset = 16 * (chunk - 2 * key_chunks),
                                in_head = static_cast<long long>(blockIdx.x) * value_bytes + offset;
                const long long head_bytes = params.value_dim * kBytesOf<Element>;
                const unsigned char* from = params.v.row(part.slot, first + token) + part.head * head_bytes;
                const bool valid = in_head < head_bytes;
                cp_async(shared_address(v(stage, token) + offset), valid ? from + in_head : from, valid);
            }
        }
        cp_async_commit_group();
    }

    // The steps of a tile that is there: a warp for each token.
    __device__ __forceinline__ void make_steps(const DeltaParams& params, int stage, int tokens) const {
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        for (int token = warp; token < tokens; token += kWarps) {
            float keys[4] = {}, queries[4] = {}, kk = 0.0f, qq = 0.0f, kq = 0.0f;
            if (4 * lane < params.key_dim) {
                load_elements(Element{}, k(stage, token), 4 * lane, keys);
                load_elements(Element{}, q(stage, token), 4 * lane, queries);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                kk += keys[i] * keys[i];
                qq += queries[i] * queries[i];
                kq += keys[i] * queries[i];
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                kk += __shfl_xor_sync(~0u, kk, distance);
                qq += __shfl_xor_sync(~0u, qq, distance);
                kq += __shfl_xor_sync(~0u, kq, distance);
            }
            if (lane == 0) steps()[token] = delta_step(params, gates(stage)[token], kk, qq, kq);
        }
    }
};

// Several new tokens for each slot, one after another, with the state in registers. The next tile is on its way while
// one is computed.
__device__ __forceinline__ void scan(const DeltaParams& params, unsigned char* shared) {
    Part part(params);
    const ScanTiles tiles{shared, static_cast<int>(params.key_dim) * kBytesOf<Element>,
                          Part::kBlockColumns * kBytesOf<Element>};
    grid_dependency_wait();
    const int count = count_new(params.new_lengths, part.slot, params.width), thread = threadIdx.x;
    const float zeros[kColumns] = {};
    const int row_groups = 32 / kDeltaScanLanes, group = thread % 32 / kDeltaScanLanes;
    if (part.is_live) {
        for (long long token = count + group; token < params.width; token += row_groups) {
            store_elements(
                Element{}, params.out,
                ((part.slot * params.width + token) * params.heads + part.head) * params.value_dim + part.column,
                zeros);
        }
    }
    if (count == 0) return part.keep(params);

    const auto load_gates = [&](long long token) {
        return thread < kDeltaTileTokens && token + thread < count
                   ? gates_of(params, part.slot, token + thread, part.head)
                   : float2{0.0f, 0.0f};
    };
    tiles.fetch(params, part, 0, 0, count);
    part.load(params);
    if (thread < kDeltaTileTokens) tiles.gates(0)[thread] = load_gates(0);
    int stage = 0;
    for (long long first = 0; first < count; first += kDeltaTileTokens, stage ^= 1) {
        const float2 next_gates = load_gates(first + kDeltaTileTokens);
        tiles.fetch(params, part, stage ^ 1, first + kDeltaTileTokens, count);
        cp_async_wait_group<1>();
        __syncthreads();
        const int tokens = static_cast<int>(min(count - first, static_cast<long long>(kDeltaTileTokens)));
        tiles.make_steps(params, stage, tokens);
        __syncthreads();
        for (int token = 0; token < tokens; token++) {
            float q[Part::kRows], k[Part::kRows], v[kColumns];
            part.load_rows(params, tiles.k(stage, token), k);
            part.load_rows(params, tiles.q(stage, token), q);
            load_elements(Element{}, tiles.v(stage, token), part.column % Part::kBlockColumns, v);
            part.step(params, first + token, tiles.steps()[token], q, k, v);
        }
        if (thread < kDeltaTileTokens) tiles.gates(stage ^ 1)[thread] = next_gates;
        __syncthreads();
    }
    part.store(params);
}

#define PARAMETERS \
    const unsigned char *q, long long q_slot, long long q_token, const unsigned char *k, long long k_slot, \
        long long k_token, const unsigned char *v, long long v_slot, long long v_token, const unsigned char *a, \
        long long a_slot, long long a_token, const unsigned char *b, long long b_slot, long long b_token, \
        const float *decay, const float *dt_bias, const void *past, void *present, const int *new_lengths, \
        long long width, long long heads, long long key_heads, long long key_dim, long long value_dim, void *out
#define ARGUMENTS \
    {{q, q_slot, q_token}, \
     {k, k_slot, k_token}, \
     {v, v_slot, v_token}, \
     {a, a_slot, a_token}, \
     {b, b_slot, b_token}, \
     decay, \
     dt_bias, \
     past, \
     present, \
     new_lengths, \
     width, \
     heads, \
     key_heads, \
     key_dim, \
     value_dim, \
     out}

// Grid: x over columns, y over heads, z over slots.
extern "C" __global__ void __launch_bounds__(kDeltaUpdateThreads, kUpdateBlocksPerSm) delta_rule_update(PARAMETERS) {
    update(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(kDeltaThreads) delta_rule_scan(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan(ARGUMENTS, shared);
}

template <class Type, int kKeyDim, int kStateWarps>
__device__ __forceinline__ void scan_chunks(const DeltaParams& params, unsigned char* shared) {
    if constexpr (kBytesOf<Type> == 2) {
        grid_dependency_wait();
        DeltaChunks<Type, kKeyDim, kStateWarps>(params, shared).run();
    }
}

// Many new tokens, of 16 bits, by tensor cores. For keys of up to 64 and of up to 128 elements, with 2 warps of 16
// columns in a block, and with 4.
extern "C" __global__ void __launch_bounds__(DeltaMemory<64, 2>::kThreads, 1) delta_rule_chunks_64_2(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 64, 2>(ARGUMENTS, shared);
}
extern "C" __global__ void __launch_bounds__(DeltaMemory<64, 4>::kThreads, 1) delta_rule_chunks_64_4(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 64, 4>(ARGUMENTS, shared);
}
extern "C" __global__ void __launch_bounds__(DeltaMemory<128, 2>::kThreads, 1) delta_rule_chunks_128_2(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 128, 2>(ARGUMENTS, shared);
}
extern "C" __global__ void __launch_bounds__(DeltaMemory<128, 4>::kThreads, 1) delta_rule_chunks_128_4(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 128, 4>(ARGUMENTS, shared);
}
