// The compiled attention kernels that this library carries, with the tile sizes that they were compiled with.
//
// embed_kernels.py compiles them and writes the table, so a launch has the sizes that its kernel was compiled with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace trt_kvcache {

constexpr int32_t kDecodeRows[] = {8, 16, 32};  // rows of q that a decode kernel has room for: attention_decode_8, ...
constexpr int32_t kMaxFewTokens = 8;            // new tokens of a slot, at most, of the decode kernels for a few
constexpr int32_t kMaxAppendedWidth = 32;       // new tokens of a slot, at most, that "16", "32" and "64" append

// The prefill kernels: attention_prefill_16, ...; k16 to k64 append up to kMaxAppendedWidth new tokens.
enum PrefillVariant { k16, k32, k64, kShort, kWide, kWhole, kNumPrefillVariants };
constexpr char const* kPrefillNames[] = {"16", "32", "64", "short", "wide", "whole"};

struct DecodeTiles {
    int32_t tile_tokens, min_tiles_per_block, blocks_per_sm, warps;
    int32_t max_rows;          // of the kernels for a few new tokens
    int32_t shared_nbytes[3];  // of a block, for each of kDecodeRows
};

struct PrefillTiles {
    int32_t rows;           // of a row block: new tokens times query heads
    int32_t warps;          // of a block
    int32_t tile_keys;      // keys of a tile
    int32_t min_tiles;      // fewest tiles for which another block pays
    int32_t blocks_per_sm;  // resident blocks of a multiprocessor
    int32_t shared_nbytes;  // of a block
    int32_t max_splits;     // of a row block
    int32_t spread_nbytes;  // least shared memory of a block that keeps further blocks from a multiprocessor
    bool warpgroups;        // four warps multiply together
};

// Kernels of one architecture, dtype of q, head dim and dtype of K and V.
struct AttentionKernels {
    int32_t arch;       // 89 of sm_89
    bool is_ptx;        // not machine code: for GPUs from this architecture on, compiled by their driver
    char const* dtype;  // float16 or bfloat16
    int32_t head_dim;
    char const* kv_dtype;     // float8_e4m3fn or int8; null: as dtype
    bool starts_early;        // programmatic dependent launch
    DecodeTiles decode, few;  // zeros, and null for their images, where prefill kernels take decode steps
    PrefillTiles prefill[kNumPrefillVariants];
    unsigned char const *decode_image, *few_image, *prefill_image;
};

// The table that embed_kernels.py writes.
extern AttentionKernels const kAttentionKernels[];
extern size_t const kNumAttentionKernels;

// The kernels for a GPU of an architecture (89 of sm_89) that has this much shared memory for a block: machine code of
// its architecture, else of the newest older one of its major version, else the newest PTX that it can run. Throws with
// what this library has instead.
AttentionKernels const& find_kernels(int32_t arch, int32_t shared_nbytes, std::string const& dtype, int32_t head_dim,
                                     char const* kv_dtype);

// Empty if this library has kernels of some architecture; else what it has instead.
std::string missing_kernels(std::string const& dtype, int32_t head_dim, char const* kv_dtype);

}  // namespace trt_kvcache
