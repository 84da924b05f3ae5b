// The decode step with the arguments of a plugin that TensorRT launches by itself (attention_plugin/aot.py): its inputs, integers of 32
// bits, its outputs; no workspace. So each head has a block of its own (gridDim.x is 1), and what is no shape is a macro.
// blockIdx.y: K/V head, and 8 query heads of it; blockIdx.z: slot.
#pragma once

#define NO_DECODE_KERNELS
#include "attention/decode.cu"

extern "C" __global__ void __launch_bounds__(kBlock) attention_decode_aot(const unsigned char* q, const unsigned char* k, const unsigned char* v,
                                                                          const unsigned char*, const int* lengths, const float* cos_sin,
                                                                          int max_tokens, unsigned char* out, unsigned char* cache) {
    constexpr int kGroup = GROUP, kParts = (kGroup + 7) / 8;
    const long long head = blockIdx.y / kParts, first = blockIdx.y % kParts * 8, slot = blockIdx.z;
    const long long row = slot * KV_HEADS + head, query = (row * kGroup + first) * kRowBytes;
    const long long kv_stride = static_cast<long long>(KV_HEADS) * max_tokens * kRowBytes;
    cache += 2 * slot * kv_stride + head * max_tokens * kRowBytes;
    const int group = static_cast<int>(first + 8 < kGroup ? 8 : kGroup - first);
    decode<8>({lengths + slot, nullptr, max_tokens, WINDOW, 1, 1, 1, 1, group, cache, 0, kv_stride, q + query, 0, k + row * kRowBytes, 0,
               v + row * kRowBytes, 0, cos_sin, ROTARY_DIM, {FACTOR, INNER}, out + query, nullptr, nullptr});
}
