// K/V of batch slots: capture (save), restore (instantiate) and compact, for all layers of a head-dim group in one
// launch. Launched by trt_kvcache/kernels/kv_kernels.py; keep_paths by token_path_kernels.py.
//
// Rows (one token of one head, or the scales of four) are multiples of 16 bytes and start at multiples of 16 bytes, so
// whatever the dtype, vectors of 16 bytes are moved. Grid: x along the rows of a head, y over K and V of all heads, z
// over layers. y is as large as the layer with the most heads needs.

#include "argument_lists.cuh"
#include "compaction.cuh"
#include "tree_tokens.cuh"
#include "vector_copy.cuh"

// Written by kernels/layer_infos.py (KVLayerInfo).
struct KVLayer {
    unsigned char* data;
    long long slot_stride, kv_stride;             // bytes
    long long num_kv_heads, max_sequence_length;  // the latter in rows
};

// K or V of one head of one layer: what a block works on.
struct LayerHead {
    KVLayer layer;
    long long kv, head;  // kv: 0 for K, 1 for V

    __device__ __forceinline__ explicit LayerHead(const KVLayer* layers) : LayerHead(layers, blockIdx.y) {}
    // `index`: of K of each head, then of V.
    __device__ __forceinline__ LayerHead(const KVLayer* layers, long long index) : layer(layers[blockIdx.z]) {
        kv = index / layer.num_kv_heads;
        head = index % layer.num_kv_heads;
    }
    // False where the layer has fewer heads than the grid.
    __device__ __forceinline__ bool exists() const { return kv < 2; }
    __device__ __forceinline__ unsigned char* in_slot(long long slot, long long row_nbytes) const {
        return layer.data + slot * layer.slot_stride + kv * layer.kv_stride
               + head * layer.max_sequence_length * row_nbytes;
    }
    // In a contiguous saved tensor [2, H, saved_tokens, D] at this address.
    __device__ __forceinline__ unsigned char* in_saved(long long saved, long long saved_tokens,
                                                       long long row_nbytes) const {
        return reinterpret_cast<unsigned char*>(saved) + (kv * layer.num_kv_heads + head) * saved_tokens * row_nbytes;
    }
};

// Copies the first `tokens` rows of a slot of each layer to the layer's saved tensor [2, H, saved_tokens, D].
extern "C" __global__ void __launch_bounds__(kThreads)
    save_layers(const KVLayer* layers, long long row_nbytes, long long slot, long long tokens, long long saved_tokens,
                LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)};
    const LayerHead head(layers);
    if (!head.exists()) return;
    unsigned char* saved = head.in_saved(select_value(addresses, blockIdx.z), saved_tokens, row_nbytes);
    copy_bytes<uint4>(saved, head.in_slot(slot, row_nbytes), tokens * row_nbytes);
}

// The opposite: from the saved tensors to the slot.
extern "C" __global__ void __launch_bounds__(kThreads)
    instantiate_layers(const KVLayer* layers, long long row_nbytes, long long slot, long long tokens,
                       long long saved_tokens, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)};
    const LayerHead head(layers);
    if (!head.exists()) return;
    const unsigned char* saved = head.in_saved(select_value(addresses, blockIdx.z), saved_tokens, row_nbytes);
    copy_bytes<uint4>(head.in_slot(slot, row_nbytes), saved, tokens * row_nbytes);
}

// Both kernels for a single layer. Grid: y over heads, z over K and V. Strides in bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_layer(unsigned char* to, long long to_kv_stride, long long to_head_stride, const unsigned char* from,
               long long from_kv_stride, long long from_head_stride, long long nbytes) {
    copy_bytes<uint4>(to + blockIdx.z * to_kv_stride + blockIdx.y * to_head_stride,
                      from + blockIdx.z * from_kv_stride + blockIdx.y * from_head_stride, nbytes);
}

template <class Moves>
__device__ __forceinline__ void compact(const LayerHead& head, const Moves& moves, long long row_nbytes) {
    compact_columns<uint4>(head.in_slot(0, row_nbytes), head.layer.slot_stride, moves,
                           Extent{row_nbytes / static_cast<long long>(sizeof(uint4)), 0});
}

template <int kCount>
__device__ __forceinline__ void compact_listed(const KVLayer* layers, long long row_nbytes, long long max_tokens,
                                               long long count, const long long (&packed)[kCount]) {
    SHARED_ARRAY(long long, moves, kCount);
    const LayerHead head(layers);
    if (!head.exists()) return;  // the whole block
    compact(head, share_moves(moves, packed, count, max_tokens), row_nbytes);
}

// Moves the live tokens of the slots of each layer by a list of up to 8, 32 or 96 moves: any permutation.
extern "C" __global__ void __launch_bounds__(kThreads)
    compact_layers_8(const KVLayer* layers, long long row_nbytes, long long max_tokens, long long count,
                     LIST_8(long long move)) {
    const long long packed[] = {LIST_8(move)};
    compact_listed(layers, row_nbytes, max_tokens, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    compact_layers_32(const KVLayer* layers, long long row_nbytes, long long max_tokens, long long count,
                      LIST_32(long long move)) {
    const long long packed[] = {LIST_32(move)};
    compact_listed(layers, row_nbytes, max_tokens, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    compact_layers_96(const KVLayer* layers, long long row_nbytes, long long max_tokens, long long count,
                      LIST_96(long long move)) {
    const long long packed[] = {LIST_96(move)};
    compact_listed(layers, row_nbytes, max_tokens, count, packed);
}

// The same by a mapping and lengths that are read on the device: int32 [old_batch] each. A row belongs to
// `tokens_per_row` tokens.
extern "C" __global__ void __launch_bounds__(kThreads)
    compact_layers_mapped(const KVLayer* layers, long long row_nbytes, long long tokens_per_row, const int* mapping,
                          const int* lengths, long long old_batch) {
    const LayerHead head(layers);
    if (!head.exists()) return;
    compact(head, read_mapping(mapping, lengths, old_batch, head.layer.max_sequence_length, tokens_per_row),
            row_nbytes);
}

// Moves the vectors of a path to the front of the new tokens, in order. `tokens`: the vector of the first new token, of
// which there is room for `room`. A token only moves down: so what is overwritten has been moved, or is no token of
// the path.
template <class Vector>
__device__ __forceinline__ void keep_path(unsigned char* tokens, long long token_nbytes, long long room,
                                          const int* path, int count) {
    for (int first = 0; first < count; first += kInFlight) {
        Vector vectors[kInFlight] = {};
        bool moves[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            const int token = first + i < count ? path[first + i] : 0;
            moves[i] = first + i < token && token < room;
            if (moves[i]) vectors[i] = *reinterpret_cast<const Vector*>(tokens + token * token_nbytes);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            if (moves[i]) *reinterpret_cast<Vector*>(tokens + (first + i) * token_nbytes) = vectors[i];
        }
    }
}

// The accepted path of each slot: token starts[slot] + paths[slot][i] moves to starts[slot] + i, for i < counts[slot].
// int32 [slots], and [slots, kMaxTreeTokens] of paths. A row has one token, or scales of `tokens_per_row`. A thread owns
// a vector of all tokens of a head. Grid: x over vectors of a token in K and V of all heads, y over slots, z over layers.
extern "C" __global__ void __launch_bounds__(kThreads)
    keep_paths(const KVLayer* layers, long long row_nbytes, long long tokens_per_row, const int* starts,
               const int* paths, const int* counts) {
    const bool has_vectors = tokens_per_row == 1;
    const long long token_nbytes = row_nbytes / tokens_per_row, vector_nbytes = has_vectors ? 16 : 4,
                    vectors = token_nbytes / vector_nbytes,
                    x = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const LayerHead head(layers, x / vectors);
    const int slot = static_cast<int>(blockIdx.y), start = starts[slot], count = min(counts[slot], kMaxTreeTokens);
    if (!head.exists() || start < 0) return;
    unsigned char* const tokens = head.in_slot(slot, row_nbytes) + start * token_nbytes + x % vectors * vector_nbytes;
    const long long room = head.layer.max_sequence_length * tokens_per_row - start;
    const int* const path = paths + slot * kMaxTreeTokens;
    if (has_vectors) {
        keep_path<uint4>(tokens, token_nbytes, room, path, count);
    } else {
        keep_path<unsigned>(tokens, token_nbytes, room, path, count);
    }
}
