// Parameters of the decode kernel, and the sizes that it is compiled for.
#pragma once

#include "attention/config.cuh"
#include "attention/sinks.cuh"
#include "attention/softmax_state.cuh"

constexpr int kWarps = WARPS, kBlockThreads = 32 * kWarps;
// of the pipeline: tiles of K and V of a warp that are in flight, and one in use
constexpr int kStages = STAGES;
// a tile: so many tokens of one K/V head of one batch slot, for one warp
constexpr int kTileTokens = TILE_TOKENS;
constexpr int kTileBytes = kTileTokens * kStoredRowBytes;
constexpr int kTileChunks = kTileTokens * kStoredRowChunks;
constexpr int kTileScaleBytes = kQuantized ? 4 * kTileTokens : 0;  // scales of its tokens
// The fewest tiles that are worth a block of their own. In the even split a block begins with so many of them, known
// without lengths.
constexpr int kMinTilesPerBlock = MIN_TILES_PER_BLOCK;
// Cost of stream-K for a block, in tiles that it could have loaded meanwhile. One more for each row, because one block
// alone merges a head.
constexpr int kStreamKCostTiles = STREAMK_COST_TILES;
// New tokens of a slot, at most: 1 in decode.cu, several in decode_few.cu. The rows of a K/V head are its new tokens
// times its query heads.
constexpr int kMaxNewTokens = MAX_NEW_TOKENS;
// True if an earlier launch has appended the new tokens, as in layers that share K and V: their rows are read from the
// cache instead of `k` and `v`, and nothing is appended.
#ifdef SHARED_ROWS
constexpr bool kSharedRows = true;
#else
constexpr bool kSharedRows = false;
#endif
// Buffers for q, k, v and angles of a head: kStages, or one less where they are large, which costs a barrier for each
// head.
constexpr int kHeadBuffers = HEAD_BUFFERS;
// Accumulators of Q K^T that do not wait for each other.
constexpr int kQKAccumulators = QK_ACCUMULATORS;
// Chunks of a lane's part of a tile that are loaded speculatively, before lengths are known: 32 KiB for a block.
constexpr int kSpeculativeChunks = kTileChunks < 2048 / kWarps ? kTileChunks / 32 : 64 / kWarps;

static_assert(kTileBytes >= 8 * 4 * kHeadDim, "a ring tile also holds a warp's output of 8 rows, in float");
static_assert(!kQuantized || kTileTokens % 32 == 0, "one ldmatrix takes a chunk of 32 tokens");
static_assert(kHeadBuffers == kStages || kHeadBuffers == kStages - 1,
              "as many as there are heads in flight, and the one in use");
static_assert(kMinTilesPerBlock % kWarps == 0,
              "in the even split, tiles of other blocks are skipped between two steps of kWarps tiles");

struct DecodeParams {
    const int *lengths, *new_lengths;  // [batch]; new_lengths may be null: `width` for all
    int max_sequence_length;           // rows of a head in the cache
    int window;                        // 0: no sliding window
    int batch_size, num_kv_heads;
    // of the even split: splits_per_head blocks a head, or if that is 0 heads_per_block heads a block
    int splits_per_head, heads_per_block;
    int group_size;        // query heads of a K/V head
    int width;             // new tokens of a slot, at most kMaxNewTokens
    unsigned char* cache;  // [batch, 2, num_kv_heads, max_sequence_length, kHeadDim]; strides in bytes
    long long slot_stride, kv_stride;
    // [batch, width, num_kv_heads, group_size, kHeadDim]; heads contiguous, strides in bytes
    const unsigned char* q;
    long long q_stride, q_token_stride;
    // [batch, width, num_kv_heads, kHeadDim], k before RoPE; neither is read with kSharedRows
    const unsigned char* k;
    long long k_stride, k_token_stride;
    const unsigned char* v;
    long long v_stride, v_token_stride;
    const float* cos_sin;  // [max_sequence_length or more, 2, rotary_dim / 2]
    int rotary_dim;
    ScoreTransform score;
    AttentionSinks sinks;
    unsigned char* out;               // as q, contiguous
    float4 *partials, *own_partials;  // the workspace: see SplitKVReduce
    // Of a cache with scales: one for each token and head, or (with a token stride of 0) for each head. Strides count
    // floats.
    float* scales = nullptr;  // [batch, 2, num_kv_heads, max_sequence_length]
    long long scale_slot_stride = 0, scale_kv_stride = 0, scale_head_stride = 0, scale_token_stride = 0;

    __device__ __forceinline__ bool scales_per_token() const { return scale_token_stride; }
    // The scale of K or (kv: 1) V of the first token of a head.
    __device__ __forceinline__ float* head_scales(int slot, int kv_head, int kv) const {
        return scales + slot * scale_slot_stride + kv * scale_kv_stride + kv_head * scale_head_stride;
    }
};

// Further parameters of the kernels for caches with scales.
#ifdef STORED
#define SCALE_PARAMETERS \
    , float *scales, long long scale_slot_stride, long long scale_kv_stride, long long scale_head_stride, \
        long long scale_token_stride
#define SCALE_ARGUMENTS , scales, scale_slot_stride, scale_kv_stride, scale_head_stride, scale_token_stride
#else
#define SCALE_PARAMETERS
#define SCALE_ARGUMENTS
#endif
