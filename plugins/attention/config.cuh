// Compile-time configuration of the attention kernels: the element type, the head dim and the type that the cache
// stores. Each source is compiled once for each of them. trt_kvcache/kernels/source_variants.py passes the macros, also
// those of the tile sizes.
#pragma once

#include "attention/element.cuh"
#include "attention/stored_kv.cuh"

using Element = ELEMENT;  // Float16 or BFloat16
#ifdef STORED
using Stored = STORED;  // what the cache holds: Float8 or Int8, with scales
#else
using Stored = Element;
#endif
constexpr bool kQuantized = kHasScales<Stored>;
constexpr int kHeadDim = HEAD_DIM;

// A row is one token of one head. Its elements have 16 bits: two in a word, eight in a chunk of 16 bytes, which is what
// one cp.async copies and what one lane addresses in an ldmatrix.
constexpr int kRowBytes = 2 * kHeadDim;
constexpr int kRowWords = kHeadDim / 2;
constexpr int kRowChunks = kHeadDim / 8;

// Warps of a prefill block that divide the columns of a row: 256 columns of 16 rows of output take 128 registers.
// trt_kvcache/kernels/attention_tiles.py has the same number.
constexpr int kColumnWarps = kHeadDim > 256 ? 2 : 1, kWarpColumns = kHeadDim / kColumnWarps;

// A row of the cache: quantized values have 8 bits, so a chunk holds sixteen.
constexpr int kStoredRowBytes = kQuantized ? kHeadDim : kRowBytes;
constexpr int kStoredRowChunks = kStoredRowBytes / 16;
