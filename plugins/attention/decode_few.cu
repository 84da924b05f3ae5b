// The decode kernel for a few new tokens per slot. Launched by trt_kvcache/kernels/attention_kernels.py.

#include "attention/decode.cuh"

// clang-format off
#define PARAMETERS \
    const int *lengths, const int *new_lengths, long long max_sequence_length, long long window, \
    long long batch_size, long long num_kv_heads, long long splits_per_head, long long heads_per_block, \
    long long group_size, long long width, unsigned char *cache, long long slot_stride, long long kv_stride, \
    const unsigned char *q, long long q_stride, long long q_token_stride, const unsigned char *k, \
    long long k_stride, long long k_token_stride, const unsigned char *v, long long v_stride, \
    long long v_token_stride, const float *cos_sin, long long rotary_dim, double factor, double inverse_softcap, \
    const float *sinks, unsigned char *out, float4 *partials, float4 *own_partials SCALE_PARAMETERS
#define ARGUMENTS \
    {lengths, new_lengths, static_cast<int>(max_sequence_length), static_cast<int>(min(window, 0x7FFFFFFFLL)), \
     static_cast<int>(batch_size), static_cast<int>(num_kv_heads), static_cast<int>(splits_per_head), \
     static_cast<int>(heads_per_block), static_cast<int>(group_size), static_cast<int>(width), cache, slot_stride, \
     kv_stride, q, q_stride, q_token_stride, k, k_stride, k_token_stride, v, v_stride, v_token_stride, cos_sin, \
     static_cast<int>(rotary_dim), {factor, inverse_softcap}, {sinks}, out, partials, \
     own_partials SCALE_ARGUMENTS}
// clang-format on

// The number in a name is the maximum number of rows of a K/V head: new tokens times query heads.
extern "C" __global__ void __launch_bounds__(kBlockThreads, BLOCKS_PER_SM) attention_decode_few_8(PARAMETERS) {
    decode<8>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(kBlockThreads, BLOCKS_PER_SM) attention_decode_few_16(PARAMETERS) {
    decode<16>(ARGUMENTS);
}
// Launched only if MAX_ROWS is at least 32.
extern "C" __global__ void __launch_bounds__(kBlockThreads, BLOCKS_PER_SM) attention_decode_few_32(PARAMETERS) {
    if constexpr (MAX_ROWS >= 32) decode<32>(ARGUMENTS);
}
