// The decode kernels: one launch for a step of one new token per slot. Launched by
// trt_kvcache/kernels/attention_kernels.py.

#include "attention/decode.cuh"

// In the order of their first use: they come to a multiprocessor in lines of 64 bytes.
// clang-format off
#define PARAMETERS \
    const int *lengths, const int *new_lengths, long long max_sequence_length, long long window, \
    long long batch_size, long long num_kv_heads, long long splits_per_head, long long heads_per_block, \
    long long group_size, unsigned char *cache, long long slot_stride, long long kv_stride, const unsigned char *q, \
    long long q_stride, const unsigned char *k, long long k_stride, const unsigned char *v, long long v_stride, \
    const float *cos_sin, long long rotary_dim, double factor, double inverse_softcap, const float *sinks, \
    unsigned char *out, float4 *partials, float4 *own_partials SCALE_PARAMETERS
#define ARGUMENTS \
    {lengths, new_lengths, static_cast<int>(max_sequence_length), static_cast<int>(min(window, 0x7FFFFFFFLL)), \
     static_cast<int>(batch_size), static_cast<int>(num_kv_heads), static_cast<int>(splits_per_head), \
     static_cast<int>(heads_per_block), static_cast<int>(group_size), 1, cache, slot_stride, kv_stride, q, q_stride, \
     0, k, k_stride, 0, v, v_stride, 0, cos_sin, static_cast<int>(rotary_dim), {factor, inverse_softcap}, \
     {sinks}, out, partials, own_partials SCALE_ARGUMENTS}
// clang-format on

// Up to 8 query heads for a K/V head, and up to 16.
extern "C" __global__ void __launch_bounds__(kBlockThreads, BLOCKS_PER_SM) attention_decode_8(PARAMETERS) {
    decode<8>(ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(kBlockThreads, BLOCKS_PER_SM) attention_decode_16(PARAMETERS) {
    decode<16>(ARGUMENTS);
}
