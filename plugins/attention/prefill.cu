// The prefill kernels: attention of several new tokens per slot over the K and V in the cache.
//
// Few new tokens: attention_prefill_16, _32 and _64, with row blocks of 16, 32 and 64 rows. They also append to a
// cache in 16 bits. In all other cases attention_append first writes K and V to the cache.
// More new tokens: attention_prefill_short for few row blocks; attention_prefill_whole where the row blocks fill the
// GPU without split-KV; else attention_prefill_wide.
//
// trt_kvcache/kernels/prefill_plan.py chooses the kernel, trt_kvcache/kernels/attention_kernels.py launches it.

#include "attention/append_quantized.cuh"
#include "attention/prefill.cuh"

// Parameters of trees of draft tokens and of a quantized cache, after the others.
#ifdef TREE
#define TREE_PARAMETER , const unsigned long long* ancestors
#define TOKEN_TREE {ancestors}
#else
#define TREE_PARAMETER
#define TOKEN_TREE \
    { \
    }
#endif
#ifdef STORED
#define SCALE_PARAMETERS \
    , float *scales, long long scales_slot_stride, long long scales_kv_stride, long long scales_head_stride, \
        long long scales_per_token
#define SCALES {scales, scales_slot_stride, scales_kv_stride, scales_head_stride, scales_per_token != 0}
#else
#define SCALE_PARAMETERS
#define SCALES \
    { \
    }
#endif

constexpr int kAppendThreads = 256;

// Writes k, with RoPE, and v of the new tokens to the cache. Grid: x over chunks of the new rows of a slot, or over its
// new rows, each for a warp, if the cache is quantized; y over slots. Strides in bytes.
extern "C" __global__ void __launch_bounds__(kAppendThreads)
    attention_append(const unsigned char* k, const unsigned char* v, long long k_stride, long long v_stride,
                     long long k_token_stride, long long v_token_stride, unsigned char* cache, long long slot_stride,
                     long long kv_stride, long long max_sequence_length, const int* lengths, const int* new_lengths,
                     const float* cos_sin, long long rotary_dim, long long width,
                     long long num_kv_heads TREE_PARAMETER SCALE_PARAMETERS) {
    grid_dependency_wait();
    const TokenTree tree TOKEN_TREE;
    if constexpr (kQuantized) {
        const long long slot = blockIdx.y,
                        row = (static_cast<long long>(blockIdx.x) * kAppendThreads + threadIdx.x) / 32;
        const int token = static_cast<int>(row / num_kv_heads), kv_head = static_cast<int>(row % num_kv_heads);
        if (token >= count_new_tokens(lengths, new_lengths, slot, width, max_sequence_length)) return;
        const int past = lengths[slot], cache_row = past + token;
        const unsigned char* const key = k + slot * k_stride + token * k_token_stride + kv_head * kRowBytes;
        const unsigned char* const value = v + slot * v_stride + token * v_token_stride + kv_head * kRowBytes;
        unsigned char* const to = cache + slot * slot_stride + (kv_head * max_sequence_length + cache_row) * kHeadDim;
        append_quantized(Stored{}, key, value, to, to + kv_stride, KVScales SCALES, static_cast<int>(slot), kv_head,
                         cache_row, RopeAngles(cos_sin, rotary_dim, tree.position(past, slot, width, token)));
        grid_dependents_may_launch();
        return;
    }
    const long long slot = blockIdx.y, x = static_cast<long long>(blockIdx.x) * kAppendThreads + threadIdx.x;
    const int chunk = static_cast<int>(x % kRowChunks), token = static_cast<int>(x / (kRowChunks * num_kv_heads));
    const long long kv_head = x / kRowChunks % num_kv_heads;
    if (token >= count_new_tokens(lengths, new_lengths, slot, width, max_sequence_length)) return;
    const int past = lengths[slot], cache_row = past + token;
    const unsigned char* key = k + slot * k_stride + token * k_token_stride + kv_head * kRowBytes;
    const unsigned char* value = v + slot * v_stride + token * v_token_stride + kv_head * kRowBytes;
    unsigned char* to =
        cache + slot * slot_stride + (kv_head * max_sequence_length + cache_row) * kRowBytes + 16 * chunk;
    const int rotary = static_cast<int>(rotary_dim);
    const uint4 rotated = rotated_chunk(reinterpret_cast<const uint4*>(key), chunk, rotary,
                                        RopeAngles(cos_sin, rotary, tree.position(past, slot, width, token)));
    *reinterpret_cast<uint4*>(to) = rotated;
    *reinterpret_cast<uint4*>(to + kv_stride) = reinterpret_cast<const uint4*>(value)[chunk];
    grid_dependents_may_launch();  // at the end: its blocks would take the place of blocks of this launch
}

// clang-format off
#define PARAMETERS \
    const int *lengths, const int *new_lengths, long long max_sequence_length, long long window, \
    long long batch_size, long long num_kv_heads, long long group_size, long long width, long long row_blocks, \
    long long order, unsigned char *cache, long long slot_stride, long long kv_stride, const unsigned char *q, \
    long long q_stride, long long q_token_stride, const unsigned char *k, long long k_stride, \
    long long k_token_stride, const unsigned char *v, long long v_stride, long long v_token_stride, \
    const float *cos_sin, long long rotary_dim, double factor, double inverse_softcap, const float *sinks, \
    unsigned char *out, float4 *partials TREE_PARAMETER SCALE_PARAMETERS
#define ARGUMENTS \
    {lengths, new_lengths, static_cast<int>(max_sequence_length), static_cast<int>(min(window, 0x7FFFFFFFLL)), \
     static_cast<int>(batch_size), static_cast<int>(num_kv_heads), static_cast<int>(group_size), \
     static_cast<int>(width), static_cast<int>(row_blocks), static_cast<int>(order), cache, slot_stride, kv_stride, \
     q, q_stride, q_token_stride, k, k_stride, k_token_stride, v, v_stride, v_token_stride, cos_sin, \
     static_cast<int>(rotary_dim), {factor, inverse_softcap}, {sinks}, out, partials, TOKEN_TREE, SCALES}
// clang-format on

extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_16 * KEY_WARPS_16, BLOCKS_PER_SM_16)
    attention_prefill_16(PARAMETERS) {
    Prefill<!kQuantized, WARPGROUPS_16, ROW_WARPS_16, KEY_WARPS_16, ROW_TILES_16, TILE_KEYS_16, STAGES_16,
            MIN_TILES_16>::run<true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_32 * KEY_WARPS_32, BLOCKS_PER_SM_32)
    attention_prefill_32(PARAMETERS) {
    Prefill<!kQuantized, WARPGROUPS_32, ROW_WARPS_32, KEY_WARPS_32, ROW_TILES_32, TILE_KEYS_32, STAGES_32,
            MIN_TILES_32>::run<true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_64 * KEY_WARPS_64, BLOCKS_PER_SM_64)
    attention_prefill_64(PARAMETERS) {
    Prefill<!kQuantized, WARPGROUPS_64, ROW_WARPS_64, KEY_WARPS_64, ROW_TILES_64, TILE_KEYS_64, STAGES_64,
            MIN_TILES_64>::run<true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_SHORT * KEY_WARPS_SHORT, BLOCKS_PER_SM_SHORT)
    attention_prefill_short(PARAMETERS) {
    Prefill<false, WARPGROUPS_SHORT, ROW_WARPS_SHORT, KEY_WARPS_SHORT, ROW_TILES_SHORT, TILE_KEYS_SHORT, STAGES_SHORT,
            MIN_TILES_SHORT>::run<true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_WIDE * KEY_WARPS_WIDE, BLOCKS_PER_SM_WIDE)
    attention_prefill_wide(PARAMETERS) {
    Prefill<false, WARPGROUPS_WIDE, ROW_WARPS_WIDE, KEY_WARPS_WIDE, ROW_TILES_WIDE, TILE_KEYS_WIDE, STAGES_WIDE,
            MIN_TILES_WIDE>::run<true>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(32 * kColumnWarps * ROW_WARPS_WHOLE * KEY_WARPS_WHOLE, BLOCKS_PER_SM_WHOLE)
    attention_prefill_whole(PARAMETERS) {
    Prefill<false, WARPGROUPS_WHOLE, ROW_WARPS_WHOLE, KEY_WARPS_WHOLE, ROW_TILES_WHOLE, TILE_KEYS_WHOLE, STAGES_WHOLE,
            MIN_TILES_WHOLE>::run<false>(ARGUMENTS);
}
