// The decode step as TensorRT launches it by itself, from a plugin that is compiled ahead of time
// (trt_kvcache/trt/plugin/aot.py). Its arguments are the inputs, integers of 32 bits, and the outputs. There is no
// workspace, so heads are not split: each head has one block, and gridDim.x is 1. Values that do not follow from shapes
// are macros.
//
// Grid: y over K/V heads, and for each over groups of 8 of its query heads; z over slots.
#pragma once

#include "attention/decode.cuh"

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    attention_decode_aot(const unsigned char* q, const unsigned char* k, const unsigned char* v, const unsigned char*,
                         const int* lengths, const float* cos_sin, int max_sequence_length, unsigned char* out,
                         unsigned char* cache) {
    constexpr int kGroupSize = GROUP_SIZE, kBlocksPerHead = (kGroupSize + 7) / 8;
    const long long kv_head = blockIdx.y / kBlocksPerHead, first = blockIdx.y % kBlocksPerHead * 8, slot = blockIdx.z;
    const long long row = slot * NUM_KV_HEADS + kv_head, query = (row * kGroupSize + first) * kRowBytes;
    const long long kv_stride = static_cast<long long>(NUM_KV_HEADS) * max_sequence_length * kRowBytes;
    cache += 2 * slot * kv_stride + kv_head * max_sequence_length * kRowBytes;
    const int group_size = static_cast<int>(first + 8 < kGroupSize ? 8 : kGroupSize - first);
    // One slot, one head, one split: everything of this block begins at these addresses.
    // clang-format off
    decode<8>({lengths + slot, nullptr, max_sequence_length, WINDOW, 1, 1, 1, 1, group_size, 1, cache, 0, kv_stride,
               q + query, 0, 0, k + row * kRowBytes, 0, 0, v + row * kRowBytes, 0, 0, cos_sin, ROTARY_DIM,
               {FACTOR, INVERSE_SOFTCAP}, {nullptr}, out + query, nullptr, nullptr});
    // clang-format on
}
