// The selective state space of Mamba-2 over the new tokens of each slot. Launched by
// trt_kvcache/kernels/mamba2_kernels.py.
//
// A state is [heads, head_dim, state_size]. `lanes` lanes of a warp own a row of it (state_size elements, in vectors of
// 16 bytes, so that neighbouring lanes have neighbouring vectors) and keep it in registers; a thread has its share of
// kRows rows. So every state is read once and written once, by the same thread, and the past and the present state may
// be at one address.

#include "dependent_launch.cuh"
#include "recurrent/mamba2_chunks.cuh"

// trt_kvcache/kernels/mamba2_kernels.py has the same numbers.
constexpr int kMambaThreads = 128;
constexpr int kMambaRows = 2;           // of a thread
constexpr int kMambaLaneElements = 16;  // of a row, in a thread
constexpr int kMambaTileTokens = 16;

constexpr int kWidth = kPerVector<State>;
constexpr int kVectors = kMambaLaneElements / kWidth;

// Part of a state that a thread owns: lane `lane` of `lanes`, of rows row(0), row(1), ... of a head of a slot.
struct Owned {
    long long slot, head, first_row;
    int lane, lanes, rows_at_once;

    __device__ __forceinline__ explicit Owned(const MambaParams& params)
        : slot(blockIdx.z), head(blockIdx.y), lane(static_cast<int>(threadIdx.x) & static_cast<int>(params.lanes - 1)),
          lanes(static_cast<int>(params.lanes)), rows_at_once(kMambaThreads / lanes) {
        first_row = static_cast<long long>(blockIdx.x) * block_rows() + static_cast<int>(threadIdx.x) / lanes;
    }
    __device__ __forceinline__ int block_rows() const { return kMambaRows * rows_at_once; }
    __device__ __forceinline__ long long row(int i) const {
        return first_row + static_cast<long long>(i) * rows_at_once;
    }
    // The first element of a vector.
    __device__ __forceinline__ int element(int vector) const { return (vector * lanes + lane) * kWidth; }
    // Index of the first element of a row in the states of all slots.
    __device__ __forceinline__ long long state_index(const MambaParams& params, int i) const {
        return ((slot * params.heads + head) * params.head_dim + row(i)) * params.state_size;
    }
    __device__ __forceinline__ const unsigned char* group_row(const MambaParams& params, const Tokens& tokens,
                                                              long long token) const {
        const int group = static_cast<int>(head) * static_cast<int>(params.groups) / static_cast<int>(params.heads);
        return tokens.row(slot, token) + group * params.state_size * kBytesOf<Element>;
    }
};

// This thread's share of a row of a state, or of B or C; 0 after the end of the row.
struct RowShare {
    float values[kVectors][kWidth];

    // Of B or C.
    __device__ __forceinline__ void load(const Owned& owned, const MambaParams& params, const void* base) {
        fill(owned, params, true,
             [&](int element, float (&vector)[kWidth]) { load_elements(Element{}, base, element, vector); });
    }
    // Of a state.
    __device__ __forceinline__ void load_state(const Owned& owned, const MambaParams& params, long long index,
                                               bool valid) {
        fill(owned, params, valid, [&](int element, float (&vector)[kWidth]) {
            load_elements_once(State{}, params.past, index + element, vector);
        });
    }
    __device__ __forceinline__ void store_state(const Owned& owned, const MambaParams& params, long long index) const {
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            if (owned.element(v) < params.state_size)
                store_elements_once(State{}, params.present, index + owned.element(v), values[v]);
        }
    }
    template <class Load>
    __device__ __forceinline__ void fill(const Owned& owned, const MambaParams& params, bool valid, Load load) {
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
            if (valid && owned.element(v) < params.state_size) {
                load(owned.element(v), values[v]);
            } else {
#pragma unroll
                for (int i = 0; i < kWidth; i++) values[v][i] = 0.0f;
            }
        }
    }
    // One token: state = state * decay + input * B. Returns this thread's share of state * C.
    __device__ __forceinline__ float step(float decay, float input, const RowShare& b, const RowShare& c) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; v++) {
#pragma unroll
            for (int i = 0; i < kWidth; i++) {
                values[v][i] = values[v][i] * decay + input * b.values[v][i];
                sum += values[v][i] * c.values[v][i];
            }
        }
        return sum;
    }
};

// Over the lanes of a row.
__device__ __forceinline__ float row_sum(float value, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

// A slot without new tokens: its state, bit for bit, and zeros.
__device__ __forceinline__ void keep_state(const MambaParams& params, const Owned& owned) {
    if (params.past == params.present) return;
    for (int i = 0; i < kMambaRows; i++) {
        if (owned.row(i) >= params.head_dim) continue;
        for (int v = 0; v < kVectors; v++) {
            if (owned.element(v) >= params.state_size) continue;
            copy_elements<State, kWidth>(params.present, params.past, owned.state_index(params, i) + owned.element(v));
        }
    }
}

// One new token for each slot. A thread issues all its loads before it computes anything, and before it knows whether
// the slot has a new token.
__device__ __forceinline__ void update(const MambaParams& params) {
    const Owned owned(params);
    const float a = params.a[owned.head], d = params.d ? params.d[owned.head] : 0.0f;
    const float bias = params.dt_bias ? params.dt_bias[owned.head] : 0.0f;
    grid_dependency_wait();
    RowShare rows[kMambaRows], b, c;
    float x[kMambaRows];
#pragma unroll
    for (int i = 0; i < kMambaRows; i++) {
        const bool valid = owned.row(i) < params.head_dim;
        rows[i].load_state(owned, params, owned.state_index(params, i), valid);
        x[i] = valid ? load_element(Element{}, params.x.row(owned.slot, 0), owned.head * params.head_dim + owned.row(i))
                     : 0.0f;
    }
    b.load(owned, params, owned.group_row(params, params.b, 0));
    c.load(owned, params, owned.group_row(params, params.c, 0));
    const float2 step = time_step(params, load_element(Element{}, params.dt.row(owned.slot, 0), owned.head), bias, a);
    const bool is_new = count_new(params.new_lengths, owned.slot, 1) > 0;
    if (!is_new) keep_state(params, owned);
#pragma unroll
    for (int i = 0; i < kMambaRows; i++) {
        const float y = row_sum(rows[i].step(step.y, step.x * x[i], b, c), owned.lanes) + d * x[i];
        if (owned.row(i) >= params.head_dim) continue;
        if (is_new) rows[i].store_state(owned, params, owned.state_index(params, i));
        if (owned.lane == 0) {
            store_element(Element{}, params.out,
                          (owned.slot * params.heads + owned.head) * params.head_dim + owned.row(i), is_new ? y : 0.0f);
        }
    }
}

// The shared memory of a scan: two stages of a tile of tokens, and the outputs of one.
struct ScanTiles {
    unsigned char* data;
    int row_bytes, x_bytes, rows;  // of B or C, and of x, of a token

    __device__ __forceinline__ ScanTiles(const MambaParams& params, const Owned& owned, unsigned char* shared)
        : data(shared), row_bytes(static_cast<int>(params.state_size) * kBytesOf<Element>),
          x_bytes(owned.block_rows() * kBytesOf<Element>), rows(owned.block_rows()) {}
    __device__ __forceinline__ int stage_bytes() const { return kMambaTileTokens * (2 * row_bytes + x_bytes); }
    __device__ __forceinline__ unsigned char* b(int stage, int token) const {
        return data + stage * stage_bytes() + token * row_bytes;
    }
    __device__ __forceinline__ unsigned char* c(int stage, int token) const {
        return b(stage, kMambaTileTokens + token);
    }
    __device__ __forceinline__ unsigned char* x(int stage, int token) const {
        return b(stage, 2 * kMambaTileTokens) + token * x_bytes;
    }
    __device__ __forceinline__ float2* steps(int stage) const {
        return reinterpret_cast<float2*>(data + 2 * stage_bytes()) + stage * kMambaTileTokens;
    }
    __device__ __forceinline__ float* y(int token) const { return reinterpret_cast<float*>(steps(2)) + token * rows; }

    // Starts to copy a tile, and closes a commit group.
    __device__ __forceinline__ void fetch(const MambaParams& params, const Owned& owned, int stage, long long first,
                                          long long count) const {
        const int tokens = static_cast<int>(max(min(count - first, static_cast<long long>(kMambaTileTokens)), 0LL));
        const int row_chunks = row_bytes / 16, x_chunks = x_bytes / 16, chunks = 2 * row_chunks + x_chunks;
        const long long first_row = static_cast<long long>(blockIdx.x) * rows;
        for (int i = threadIdx.x; i < tokens * chunks; i += kMambaThreads) {
            const int token = i / chunks, chunk = i % chunks;
            if (chunk < 2 * row_chunks) {
                const bool is_b = chunk < row_chunks;
                const int offset = 16 * (is_b ? chunk : chunk - row_chunks);
                cp_async(shared_address((is_b ? b(stage, token) : c(stage, token)) + offset),
                         owned.group_row(params, is_b ? params.b : params.c, first + token) + offset, true);
            } else {
                const int offset = 16 * (chunk - 2 * row_chunks);
                const bool valid = first_row * kBytesOf<Element> + offset < params.head_dim * kBytesOf<Element>;
                const unsigned char* from = params.x.row(owned.slot, first + token);
                cp_async(shared_address(x(stage, token) + offset),
                         valid ? from + (owned.head * params.head_dim + first_row) * kBytesOf<Element> + offset : from,
                         valid);
            }
        }
        cp_async_commit_group();
    }
};

// Several new tokens for each slot, one after another, with the state in registers. The next tile is on its way while
// one is computed.
__device__ __forceinline__ void scan(const MambaParams& params, unsigned char* shared) {
    const Owned owned(params);
    const ScanTiles tiles(params, owned, shared);
    const float a = params.a[owned.head], d = params.d ? params.d[owned.head] : 0.0f;
    const float bias = params.dt_bias ? params.dt_bias[owned.head] : 0.0f;
    grid_dependency_wait();
    const int count = count_new(params.new_lengths, owned.slot, params.width);
    const long long out_row = owned.head * params.head_dim + static_cast<long long>(blockIdx.x) * tiles.rows,
                    out_stride = params.heads * params.head_dim;
    const int live_rows = static_cast<int>(
        min(params.head_dim - static_cast<long long>(blockIdx.x) * tiles.rows, static_cast<long long>(tiles.rows)));
    for (long long i = static_cast<long long>(count) * tiles.rows + threadIdx.x; i < params.width * tiles.rows;
         i += kMambaThreads) {
        const long long token = i / tiles.rows, row = i % tiles.rows;
        if (row < live_rows)
            store_element(Element{}, params.out, (owned.slot * params.width + token) * out_stride + out_row + row,
                          0.0f);
    }
    if (count == 0) return keep_state(params, owned);

    const int thread = threadIdx.x;
    const auto load_dt = [&](long long token) {
        return thread < kMambaTileTokens && token + thread < count
                   ? load_element(Element{}, params.dt.row(owned.slot, token + thread), owned.head)
                   : 0.0f;
    };
    tiles.fetch(params, owned, 0, 0, count);
    RowShare rows[kMambaRows];
#pragma unroll
    for (int i = 0; i < kMambaRows; i++) {
        rows[i].load_state(owned, params, owned.state_index(params, i), owned.row(i) < params.head_dim);
    }
    if (thread < kMambaTileTokens) tiles.steps(0)[thread] = time_step(params, load_dt(0), bias, a);
    int stage = 0;
    for (long long first = 0; first < count; first += kMambaTileTokens, stage ^= 1) {
        const float next_dt = load_dt(first + kMambaTileTokens);
        tiles.fetch(params, owned, stage ^ 1, first + kMambaTileTokens, count);
        cp_async_wait_group<1>();
        __syncthreads();
        const int tokens = static_cast<int>(min(count - first, static_cast<long long>(kMambaTileTokens)));
        for (int token = 0; token < tokens; token++) {
            RowShare b, c;
            b.load(owned, params, tiles.b(stage, token));
            c.load(owned, params, tiles.c(stage, token));
            const float2 step = tiles.steps(stage)[token];
#pragma unroll
            for (int i = 0; i < kMambaRows; i++) {
                const int row = static_cast<int>(owned.row(i) - static_cast<long long>(blockIdx.x) * tiles.rows);
                const float x = load_element(Element{}, tiles.x(stage, token), row);
                const float y = row_sum(rows[i].step(step.y, step.x * x, b, c), owned.lanes) + d * x;
                if (owned.lane == 0) tiles.y(token)[row] = y;
            }
        }
        if (thread < kMambaTileTokens) tiles.steps(stage ^ 1)[thread] = time_step(params, next_dt, bias, a);
        __syncthreads();
        for (int i = thread; i < tokens * tiles.rows; i += kMambaThreads) {
            const int token = i / tiles.rows, row = i % tiles.rows;
            if (row >= live_rows) continue;
            store_element(Element{}, params.out,
                          (owned.slot * params.width + first + token) * out_stride + out_row + row,
                          tiles.y(token)[row]);
        }
    }
#pragma unroll
    for (int i = 0; i < kMambaRows; i++) {
        if (owned.row(i) < params.head_dim) rows[i].store_state(owned, params, owned.state_index(params, i));
    }
}

#define PARAMETERS \
    const unsigned char *x, long long x_slot, long long x_token, const unsigned char *dt, long long dt_slot, \
        long long dt_token, const unsigned char *b, long long b_slot, long long b_token, const unsigned char *c, \
        long long c_slot, long long c_token, const float *a, const float *d, const float *dt_bias, double dt_min, \
        double dt_max, const void *past, void *present, const int *new_lengths, long long width, long long heads, \
        long long head_dim, long long groups, long long state_size, long long lanes, void *out
#define ARGUMENTS \
    {{x, x_slot, x_token}, \
     {dt, dt_slot, dt_token}, \
     {b, b_slot, b_token}, \
     {c, c_slot, c_token}, \
     a, \
     d, \
     dt_bias, \
     static_cast<float>(dt_min), \
     static_cast<float>(dt_max), \
     past, \
     present, \
     new_lengths, \
     width, \
     heads, \
     head_dim, \
     groups, \
     state_size, \
     lanes, \
     out}

// Grid: x over the rows of a head, y over heads, z over slots.
extern "C" __global__ void __launch_bounds__(kMambaThreads) mamba2_update(PARAMETERS) { update(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(kMambaThreads) mamba2_scan(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan(ARGUMENTS, shared);
}

template <class Type, int kStateSize>
__device__ __forceinline__ void scan_chunks(const MambaParams& params, unsigned char* shared) {
    if constexpr (kBytesOf<Type> == 2) {
        grid_dependency_wait();
        MambaChunks<Type, kStateSize>(params, shared).run();
    }
}

// Many new tokens, of 16 bits, by tensor cores. For state sizes of 64 and 128.
extern "C" __global__ void __launch_bounds__(kMambaChunkThreads) mamba2_chunks_64(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 64>(ARGUMENTS, shared);
}
extern "C" __global__ void __launch_bounds__(kMambaChunkThreads) mamba2_chunks_128(PARAMETERS) {
    DYNAMIC_SHARED(unsigned char, shared);
    scan_chunks<Element, 128>(ARGUMENTS, shared);
}
