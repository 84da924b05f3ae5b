// What the attention kernels are compiled for: one element type and one head dim. Each source is compiled once for every pair of them;
// trt_kvcache/kernels/attention_tiles.py passes the macros, those of the tile sizes too.
#pragma once

#include "attention/element.cuh"

using Element = ELEMENT;  // Float16 or BFloat16
constexpr int kHeadDim = HEAD_DIM;

// A row is one token of one head. Its elements have 16 bits: two in a word, eight in a chunk of 16 bytes, which is what one cp.async
// copies and what one lane addresses in an ldmatrix.
constexpr int kRowBytes = 2 * kHeadDim;
constexpr int kRowWords = kHeadDim / 2;
constexpr int kRowChunks = kHeadDim / 8;
