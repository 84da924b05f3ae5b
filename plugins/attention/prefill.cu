// Attention of several new tokens per slot, with RoPE and append, over what the cache holds already. Two launches: attention_append writes the
// new keys and values to the cache, attention_prefill (or its short form) attends. Launched by trt_kvcache/kernels/cuda/attention.py.
//
// Flash attention: a block has kBlockRows new tokens of one query head, a warp 16 * kRowTiles of them. Tiles of kTileKeys keys and values pass
// by in a ring of kStages in shared memory; scores, probabilities and output stay in registers (mma.cuh says in which lane). Blocks of the
// last tokens, which see most keys, come first, so that the last blocks to end are short ones. Where there are few blocks, the short form, with
// fewer rows a block, has more of them.
//
// Shared memory of a block:
//
//     queries   [kBlockRows] rows, swizzled. A warp reads its own rows; at the end they hold its output, until it is stored.
//     ring      [kStages][2] tiles of kTileKeys rows, swizzled: keys, then values. Filled and read by all threads.
//
// Pipeline: commit group 0 is q, group 1 + n is tile n with its keys and values. A step waits for its tile; kStages - 2 younger groups may stay
// in flight. Behind the barrier that follows, all warps have left the tile before, and its place is filled with tile n + kStages - 1.

#include "attention/cp_async.cuh"
#include "attention/mma.cuh"
#include "attention/rope.cuh"
#include "attention/softmax_state.cuh"
#include "attention/swizzle.cuh"

constexpr int kAppendThreads = 256;
// The output stays relative to an older maximum until a score is so many powers of 2 above it: a probability of up to 256 is as exact as one
// of 1, and most steps need no rescaling.
constexpr float kRescaleThreshold = 8;

struct PrefillParams {
    const unsigned char* q;  // [batch, width, query heads, kHeadDim]; strides in bytes
    long long q_stride, q_token_stride;
    const unsigned char* cache;  // [batch, 2, K/V heads, max_sequence_length, kHeadDim]
    long long slot_stride, kv_stride, max_sequence_length;
    const int *lengths, *new_lengths;  // [batch]; new_lengths may be null: `width` for all
    const float* cos_sin;              // [max_sequence_length or more, 2, rotary_dim / 2]
    long long rotary_dim;
    unsigned char* out;  // as q, contiguous
    long long width, group_size, window;
    ScoreTransform score;
};

// New tokens of a slot that fit into the cache.
__device__ __forceinline__ int count_new_tokens(const int* lengths, const int* new_lengths, long long slot, long long width,
                                                long long max_sequence_length) {
    const long long past = lengths[slot], wanted = new_lengths ? min(static_cast<long long>(new_lengths[slot]), width) : width;
    return past < 0 ? 0 : static_cast<int>(max(min(wanted, max_sequence_length - past), 0LL));
}

// Writes k, with RoPE, and v of the new tokens to the cache. Grid: x over words of the new rows of a slot, y over slots. Strides in bytes.
extern "C" __global__ void __launch_bounds__(kAppendThreads)
    attention_append(const unsigned char* k, const unsigned char* v, long long k_stride, long long v_stride, long long k_token_stride,
                     long long v_token_stride, unsigned char* cache, long long slot_stride, long long kv_stride, long long max_sequence_length,
                     const int* lengths, const int* new_lengths, const float* cos_sin, long long rotary_dim, long long width,
                     long long num_kv_heads) {
    const long long slot = blockIdx.y, x = static_cast<long long>(blockIdx.x) * kAppendThreads + threadIdx.x;
    const int word = static_cast<int>(x % kRowWords), token = static_cast<int>(x / (kRowWords * num_kv_heads));
    const long long kv_head = x / kRowWords % num_kv_heads;
    if (token >= count_new_tokens(lengths, new_lengths, slot, width, max_sequence_length)) return;
    const int position = lengths[slot] + token;
    const unsigned char* key = k + slot * k_stride + token * k_token_stride + kv_head * kRowBytes;
    const unsigned char* value = v + slot * v_stride + token * v_token_stride + kv_head * kRowBytes;
    unsigned char* to = cache + slot * slot_stride + (kv_head * max_sequence_length + position) * kRowBytes + 4 * word;
    *reinterpret_cast<unsigned*>(to) = apply_rope(reinterpret_cast<const unsigned*>(key), word, RopeAngles(cos_sin, rotary_dim, position));
    *reinterpret_cast<unsigned*>(to + kv_stride) = reinterpret_cast<const unsigned*>(value)[word];
}

// The sizes of a form of the kernel, and its steps. `kRowTiles`: of 16 rows, for each warp.
template <int kWarps, int kRowTiles, int kTileKeys, int kStages>
struct Prefill {
    static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kRowTiles, kBlockRows = kWarps * kWarpRows, kTileBytes = kTileKeys * kRowBytes;
    static_assert(kBlockRows * kRowChunks % kThreads == 0, "each thread loads as many chunks of q");

    using Scores = float[kRowTiles][kTileKeys / 8][4];

    // What a block works on: rows row0 to row0 + rows of the new tokens of a slot, of one query head.
    struct Block {
        int slot, head, row0, rows;
        int count;           // new tokens of the slot
        int first_position;  // in the cache, of row0
        int span;            // keys that a row sees at most, with itself: the window
        int first_tile, last_tile, keys_end;
    };

    // Tile `tile` of keys and values, to its place in the ring. Rows from keys_end on are zeros.
    static __device__ __forceinline__ void fill(unsigned char* ring, const unsigned char* keys, long long kv_stride, const Block& block, int tile) {
        const SharedAddress to = shared_address(ring + (tile - block.first_tile) % kStages * 2 * kTileBytes);
        const unsigned char* source = keys + static_cast<long long>(tile) * kTileBytes;
#pragma unroll
        for (int i = 0; i < (kTileKeys * kRowChunks + kThreads - 1) / kThreads; i++) {
            const int x = i * kThreads + threadIdx.x, row = x / kRowChunks, chunk = x % kRowChunks;
            if (kTileKeys * kRowChunks % kThreads && row >= kTileKeys) break;
            const bool is_live = tile * kTileKeys + row < block.keys_end;
            const unsigned char* from = source + row * kRowBytes + chunk * 16;
            cp_async(to + swizzled_offset(row, chunk), from, is_live);
            cp_async(to + kTileBytes + swizzled_offset(row, chunk), from + kv_stride, is_live);
        }
    }

    static __device__ __forceinline__ void fill_queries(unsigned char* queries, const PrefillParams& params, const Block& block) {
        const unsigned char* source = params.q + block.slot * params.q_stride + block.row0 * params.q_token_stride + block.head * kRowBytes;
        const SharedAddress to = shared_address(queries);
#pragma unroll
        for (int i = 0; i < kBlockRows * kRowChunks / kThreads; i++) {
            const int x = i * kThreads + threadIdx.x, row = x / kRowChunks, chunk = x % kRowChunks;
            cp_async(to + swizzled_offset(row, chunk), source + row * params.q_token_stride + chunk * 16, row < block.rows);
        }
    }

    static __device__ __forceinline__ void apply_rope_to_queries(unsigned char* queries, const PrefillParams& params, const Block& block) {
        const int half = static_cast<int>(params.rotary_dim / 4);  // words
        for (int x = threadIdx.x; x < block.rows * half; x += kThreads) {
            const int row = x / half;
            apply_rope_in_tile(queries, row, x % half, half, RopeAngles(params.cos_sin, params.rotary_dim, block.first_position + row));
        }
    }

    static __device__ __forceinline__ void compute_scores(Scores& scores, const LdmatrixAddress& queries, const LdmatrixAddress& key_tile) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) ldmatrix_x4(a[m], queries(d, 16 * m));
#pragma unroll
            for (int j = 0; j < kTileKeys / 16; j++) {
                unsigned b[4];
                ldmatrix_x4(b, key_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, scores[m][2 * j], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, scores[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void apply_softcap(Scores& scores, const ScoreTransform& score) {
        if (!score.has_softcap()) return;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kTileKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) scores[m][j][e] = score.softcap(scores[m][j][e]);
            }
        }
    }

    // Causal, and within the window. warp_position: of the warp's first row; first_key: of the tile.
    static __device__ __forceinline__ void apply_mask(Scores& scores, int warp_position, int first_key, int span) {
        const int lane = threadIdx.x % 32;
        if (first_key + kTileKeys - 1 <= warp_position && first_key >= warp_position + kWarpRows - span) return;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int j = 0; j < kTileKeys / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int distance = warp_position + 16 * m + lane / 4 + e / 2 * 8 - (first_key + 8 * j + lane % 4 * 2 + e % 2);
                    if (distance < 0 || distance >= span) scores[m][j][e] = kMaskedScore;
                }
            }
        }
    }

    // Turns scores into probabilities. Maxima follow only when a row of the warp is kRescaleThreshold above its own.
    static __device__ __forceinline__ void update_softmax(SoftmaxState<16> (&state)[kRowTiles], Scores& scores, float factor) {
        float highest[kRowTiles][2];
        bool is_far = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                highest[m][i] = state[m].max_with(scores[m], i);
                is_far = is_far || (highest[m][i] - state[m].maxima[i]) * factor > kRescaleThreshold;
            }
        }
        if (__any_sync(~0u, is_far)) {
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) state[m].rescale(i, highest[m][i], factor);
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) state[m].exponentiate(scores[m], i, factor);
        }
    }

    static __device__ __forceinline__ void accumulate_output(SoftmaxState<16> (&state)[kRowTiles], const Scores& probabilities, const LdmatrixAddress& value_tile) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 16; j++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) pack_a_fragment(Element{}, a[m], probabilities[m][2 * j], probabilities[m][2 * j + 1]);
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                unsigned b[4];
                ldmatrix_x4_trans(b, value_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    mma_m16n8k16(Element{}, state[m].output[2 * d], a[m], b[0], b[1]);
                    mma_m16n8k16(Element{}, state[m].output[2 * d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Writes the output of a warp: through the place of its queries in shared memory, so that it leaves in chunks of 16 bytes. `out` is that of
    // row0; rows behind the slot's new tokens become zeros.
    static __device__ __forceinline__ void store_output(const SoftmaxState<16> (&state)[kRowTiles], unsigned char* warp_rows, unsigned char* out,
                                                        long long out_stride, long long width, const Block& block) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float inverse = reciprocal_approx(quad_sum(state[m].sums[i]));
                const int row = 16 * m + lane / 4 + 8 * i;
#pragma unroll
                for (int d = 0; d < kHeadDim / 8; d++) {
                    *reinterpret_cast<unsigned*>(warp_rows + swizzled_offset(row, d) + lane % 4 * 4) =
                        pack(Element{}, {state[m].output[d][2 * i] * inverse, state[m].output[d][2 * i + 1] * inverse});
                }
            }
        }
        __syncwarp();
        for (int x = lane; x < kWarpRows * kRowChunks; x += 32) {
            const int row = x / kRowChunks, chunk = x % kRowChunks, token = block.row0 + warp * kWarpRows + row;
            if (token >= width) continue;
            const uint4 words = token < block.count ? *reinterpret_cast<const uint4*>(warp_rows + swizzled_offset(row, chunk)) : uint4{};
            *reinterpret_cast<uint4*>(out + (warp * kWarpRows + row) * out_stride + chunk * 16) = words;
        }
    }

    // A block none of whose rows are new tokens.
    static __device__ __forceinline__ void store_zeros(unsigned char* out, long long out_stride, long long width, int row0) {
        for (int x = threadIdx.x; x < kBlockRows * kRowChunks; x += kThreads) {
            if (row0 + x / kRowChunks < width) *reinterpret_cast<uint4*>(out + x / kRowChunks * out_stride + x % kRowChunks * 16) = uint4{};
        }
    }

    // Grid: x over query heads, y over blocks of rows, z over slots.
    static __device__ __forceinline__ void run(const PrefillParams& params) {
        DYNAMIC_SHARED(unsigned char, queries);
        unsigned char* const ring = queries + kBlockRows * kRowBytes;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Block block;
        block.slot = static_cast<int>(blockIdx.z);
        block.head = static_cast<int>(blockIdx.x);
        block.row0 = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kBlockRows;
        const int past = params.lengths[block.slot];
        block.count = count_new_tokens(params.lengths, params.new_lengths, block.slot, params.width, params.max_sequence_length);
        const long long out_stride = static_cast<long long>(gridDim.x) * kRowBytes;
        unsigned char* out = params.out + (block.slot * params.width + block.row0) * out_stride + block.head * kRowBytes;
        if (block.row0 >= block.count) {
            store_zeros(out, out_stride, params.width, block.row0);
            return;
        }
        block.rows = min(kBlockRows, block.count - block.row0);
        block.span = static_cast<int>(params.window > 0 ? min(params.window, 0x7FFFFFFFLL) : 0x7FFFFFFF);
        block.first_position = past + block.row0;
        block.keys_end = block.first_position + block.rows;
        block.first_tile = max(block.first_position - block.span + 1, 0) / kTileKeys;
        block.last_tile = (block.keys_end - 1) / kTileKeys;
        const unsigned char* keys = params.cache + block.slot * params.slot_stride
                                    + block.head / params.group_size * params.max_sequence_length * kRowBytes;

        fill_queries(queries, params, block);
        cp_async_commit_group();
#pragma unroll
        for (int stage = 0; stage < kStages - 1; stage++) {
            if (block.first_tile + stage <= block.last_tile) fill(ring, keys, params.kv_stride, block, block.first_tile + stage);
            cp_async_commit_group();
        }
        cp_async_wait_group<kStages - 1>();  // q
        __syncthreads();
        apply_rope_to_queries(queries, params, block);  // the barrier of the first step follows

        const ScoreTransform score = params.score;
        SoftmaxState<16> state[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) state[m].reset();
        const int warp_position = block.first_position + warp * kWarpRows;
        const LdmatrixAddress query_rows(shared_address(queries + warp * kWarpRows * kRowBytes), lane % 16, lane / 16);
        for (int tile = block.first_tile; tile <= block.last_tile; tile++) {
            cp_async_wait_group<kStages - 2>();  // this tile
            __syncthreads();
            if (tile + kStages - 1 <= block.last_tile) fill(ring, keys, params.kv_stride, block, tile + kStages - 1);
            cp_async_commit_group();
            const int first_key = tile * kTileKeys;
            const bool warp_sees_keys = first_key < warp_position + kWarpRows && warp_position < block.keys_end
                                        && first_key + kTileKeys > warp_position - block.span + 1;
            if (!warp_sees_keys) continue;
            const SharedAddress tiles = shared_address(ring + (tile - block.first_tile) % kStages * 2 * kTileBytes);
            const LdmatrixAddress key_tile(tiles, lane % 8 + lane / 16 * 8, lane / 8 % 2), value_tile(tiles + kTileBytes, lane % 16, lane / 16);
            Scores scores = {};
            compute_scores(scores, query_rows, key_tile);
            apply_softcap(scores, score);
            apply_mask(scores, warp_position, first_key, block.span);
            update_softmax(state, scores, score.factor);
            accumulate_output(state, scores, value_tile);
        }
        cp_async_wait_group<0>();
        store_output(state, queries + warp * kWarpRows * kRowBytes, out, out_stride, params.width, block);
    }
};

#define PARAMETERS                                                                                                                       \
    const unsigned char *q, long long q_stride, long long q_token_stride, const unsigned char *cache, long long slot_stride,             \
        long long kv_stride, long long max_sequence_length, const int *lengths, const int *new_lengths, const float *cos_sin,            \
        long long rotary_dim, unsigned char *out, long long width, long long group_size, long long window, double factor,                \
        double inverse_softcap
#define ARGUMENTS                                                                                                                          \
    {q, q_stride, q_token_stride, cache, slot_stride, kv_stride, max_sequence_length, lengths, new_lengths, cos_sin, rotary_dim, out, width, \
     group_size, window, {factor, inverse_softcap}}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) attention_prefill(PARAMETERS) {
    Prefill<WARPS, ROW_TILES, TILE_KEYS, STAGES>::run(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * SHORT_WARPS, SHORT_BLOCKS_PER_SM) attention_prefill_short(PARAMETERS) {
    Prefill<SHORT_WARPS, SHORT_ROW_TILES, SHORT_TILE_KEYS, STAGES>::run(ARGUMENTS);
}
