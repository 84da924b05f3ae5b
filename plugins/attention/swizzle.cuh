// Layout of rows in a tile of shared memory: without padding, and without bank conflicts of cp.async and ldmatrix.
//
// ldmatrix reads the same chunk (16 bytes) of 8 consecutive rows at once. Without a swizzle these lie kRowBytes apart,
// in the same banks where kRowBytes is a multiple of 128. So the chunks of a row are permuted: chunk c of row r lies at
// place c ^ f(r), where f has kSwizzlePlaces values. Example, head dim 64 (8 chunks a row, all 8 rows need different
// places):
//
//     row 0:  0 1 2 3 4 5 6 7
//     row 1:  1 0 3 2 5 4 7 6
//     row 2:  2 3 0 1 6 7 4 5      chunk 0 of rows 0 to 7: a diagonal, in 8 different groups of 4 banks
//     ...
#pragma once

#include "attention/config.cuh"
#include "shared_memory.cuh"

// Number of different places of a chunk that consecutive rows of kChunks chunks need. Without a swizzle, 2 consecutive
// rows already use different banks if kChunks is 4 mod 8, 4 rows if it is 2 mod 4, and all 8 if it is odd.
template <int kChunks>
constexpr unsigned kSwizzlePlaces = kChunks % 8 == 0   ? 8
                                    : kChunks % 4 == 0 ? 4
                                    : kChunks % 2 == 0 ? 2
                                                       : 1;

// The byte offset of a chunk of a row in a tile: of elements, or of what the cache stores.
template <int kChunks>
__device__ __forceinline__ unsigned swizzled_offset_of(unsigned row, unsigned chunk) {
    return row * (16 * kChunks) + (chunk ^ row / (8 / kSwizzlePlaces<kChunks>) % kSwizzlePlaces<kChunks>)*16;
}
__device__ __forceinline__ unsigned swizzled_offset(unsigned row, unsigned chunk) {
    return swizzled_offset_of<kRowChunks>(row, chunk);
}
__device__ __forceinline__ unsigned stored_offset(unsigned row, unsigned chunk) {
    return swizzled_offset_of<kStoredRowChunks>(row, chunk);
}

// Address of a chunk of a row in a tile of kRows rows. Without kPanels: as above, for ldmatrix. With kPanels: for
// products of a warpgroup (warpgroup.cuh), in panels of 64 columns, one after another, each of kRows rows of 128 bytes.
template <bool kPanels, int kRows>
struct TileLayout {
    static constexpr int kPanelBytes = 128 * kRows;
    static __device__ __forceinline__ unsigned offset(unsigned row, unsigned chunk) {
        return kPanels ? chunk / 8 * kPanelBytes + row * 128 + (chunk ^ row) % 8 * 16 : swizzled_offset(row, chunk);
    }
    // From the address of a chunk of a row, `step` rows further up or down in a tile whose rows have 8 places for a
    // chunk: the row must be below `step`, which is a multiple of a power of 2 above it.
    static __device__ __forceinline__ SharedAddress rows_below(SharedAddress chunk_of_row, int step) {
        static_assert(kSwizzlePlaces<kRowChunks> == 8, "a chunk's place is that of its row");
        return xor_address(chunk_of_row, step % 8 * 16) + step * (kPanels ? 128 : kRowBytes);
    }
};

// The addresses that one lane passes to a series of ldmatrix over a tile: of its row, and of chunk 0 or 1 (`chunk`) of
// each pair of chunks.
struct LdmatrixAddress {
    // With a power of 2 chunks a row, the chunk number is a bit field of the address, and another pair is an xor away.
    static constexpr bool kChunksAreBits = (kRowChunks & (kRowChunks - 1)) == 0;
    SharedAddress tile, first;
    unsigned row, chunk;

    __device__ __forceinline__ LdmatrixAddress(SharedAddress tile, unsigned row, unsigned chunk)
        : tile(tile), first(tile + swizzled_offset(row, chunk)), row(row), chunk(chunk) {}

    // For chunks 2 * pair and 2 * pair + 1, of rows that are `row_offset`, a multiple of 8, further down.
    __device__ __forceinline__ SharedAddress operator()(int pair, int row_offset) const {
        if constexpr (kChunksAreBits) return xor_address(first, 32 * pair) + row_offset * kRowBytes;
        return tile + swizzled_offset(row + row_offset, 2 * pair + chunk);
    }
};

// The address that a lane passes to a series of ldmatrix over a tile of quantized values: of row `lane` of 32 rows, and
// of the same chunk of each of them.
struct QuantizedAddress {
    static constexpr bool kChunksAreBits = (kStoredRowChunks & (kStoredRowChunks - 1)) == 0;
    SharedAddress tile, first;
    unsigned row;

    __device__ __forceinline__ QuantizedAddress(SharedAddress tile, unsigned row)
        : tile(tile), first(tile + stored_offset(row, 0)), row(row) {}

    // In the rows that are `row_offset`, a multiple of 32, further down.
    __device__ __forceinline__ SharedAddress operator()(int chunk, int row_offset) const {
        if constexpr (kChunksAreBits) return xor_address(first, 16 * chunk) + row_offset * kStoredRowBytes;
        return tile + stored_offset(row + row_offset, chunk);
    }
};
