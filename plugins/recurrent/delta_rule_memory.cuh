// Chunks of tokens of the gated delta rule: the layout of shared memory.
#pragma once

#include "recurrent/chunks.cuh"
#include "recurrent/delta_rule_params.cuh"

// trt_kvcache/kernels/delta_rule_kernels.py has the same number.
constexpr int kDeltaMatrixWarps = 4;

// Numbers of the tokens of a chunk.
struct DeltaScales {
    float value[kChunkTokens];  // beta / |k|: of v in what changes
    float key[kChunkTokens];    // beta / |k|^2 times the decay from the state before the chunk: of k S
    float query[kChunkTokens];  // scale / |q| times that decay: of q S
    float end[kChunkTokens];    // the decay from the token to the end of the chunk
    float total[4];             // the decay over the chunk
};

// Scratch memory of a matrix warp.
struct DeltaScratch {
    float sums[kChunkTokens];  // logarithms of the decay from the state before the chunk, to base 2
    float beta[kChunkTokens];
    float block[16][16];
};

// The matrices of a chunk, [16 x 16] for each pair of blocks, later tokens down, and the scales.
struct DeltaMatrices {
    static constexpr int kBytes = 3 * kBlockPairs * kMatrixTileBytes + static_cast<int>(sizeof(DeltaScales));

    unsigned char* data;

    // Matrix from the changes of an earlier block to those of a later one: minus their share. Of a block with itself:
    // the inverse of I + share. In two parts.
    __device__ __forceinline__ unsigned char* change(int later, int earlier, int part) const {
        return data + (2 * block_pair(later, earlier) + part) * kMatrixTileBytes;
    }
    // Matrix from changes to outputs.
    __device__ __forceinline__ unsigned char* score(int later, int earlier) const {
        return data + (2 * kBlockPairs + block_pair(later, earlier)) * kMatrixTileBytes;
    }
    __device__ __forceinline__ DeltaScales& scales() const {
        return *reinterpret_cast<DeltaScales*>(data + 3 * kBlockPairs * kMatrixTileBytes);
    }
};

// kStateWarps warps of a block have 16 columns of a state each.
template <int kKeyDim, int kStateWarps>
struct DeltaMemory {
    static constexpr int kStateThreads = 32 * kStateWarps, kThreads = kStateThreads + 32 * kDeltaMatrixWarps,
                         kColumns = 16 * kStateWarps;
    static constexpr int kKeyBytes = 2 * kChunkTokens * kKeyDim, kValueBytes = 2 * kChunkTokens * kColumns;
    static constexpr int kStageBytes = 2 * kKeyBytes + kValueBytes, kTilesBytes = kChunkStages * kStageBytes;

    unsigned char* data;

    __device__ __forceinline__ unsigned char* stage(long long chunk) const {
        return data + static_cast<int>(chunk % kChunkStages) * kStageBytes;
    }
    __device__ __forceinline__ ChunkTile<kKeyDim> k(long long chunk) const { return {shared_address(stage(chunk))}; }
    __device__ __forceinline__ ChunkTile<kKeyDim> q(long long chunk) const {
        return {shared_address(stage(chunk) + kKeyBytes)};
    }
    __device__ __forceinline__ ChunkTile<kColumns> v(long long chunk) const {
        return {shared_address(stage(chunk) + 2 * kKeyBytes)};
    }
    __device__ __forceinline__ DeltaMatrices matrices(long long chunk) const {
        return {data + kTilesBytes + static_cast<int>(chunk % 2) * DeltaMatrices::kBytes};
    }
    __device__ __forceinline__ DeltaScratch& scratch(int matrix_warp) const {
        return reinterpret_cast<DeltaScratch*>(data + kTilesBytes + 2 * DeltaMatrices::kBytes)[matrix_warp];
    }
};
