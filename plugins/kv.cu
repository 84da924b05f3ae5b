// K/V of slots: save, instantiate, compact. Launched by trt_kvcache/kernels/cuda/kv.py.
// Rows are multiples of 16 bytes and everything starts at one, so whatever the dtype, units of 16 bytes are moved.
// Grid: x along the tokens of a head, y over K and V of all heads, z over the layers of a head-dim group. Layers may have
// fewer heads than the grid.

#include "arguments.cuh"
#include "compaction.cuh"
#include "units.cuh"

// kernels/layer_infos.py writes it.
struct KVLayer {
    unsigned char* data;
    long long slot_stride, kv_stride;  // bytes
    long long num_kv_heads, max_sequence_length;
};

// K or V of one head of one layer, by blockIdx.
struct Head {
    KVLayer layer;
    long long kv, head;

    __device__ __forceinline__ explicit Head(const KVLayer* layers) : layer(layers[blockIdx.z]) {
        kv = blockIdx.y / layer.num_kv_heads;
        head = blockIdx.y % layer.num_kv_heads;
    }
    __device__ __forceinline__ bool is_there() const { return kv < 2; }
    __device__ __forceinline__ unsigned char* in_slot(long long slot, long long row_nbytes) const {
        return layer.data + slot * layer.slot_stride + kv * layer.kv_stride + head * layer.max_sequence_length * row_nbytes;
    }
    // In a dense tensor [2, H, tokens, D].
    __device__ __forceinline__ unsigned char* in_saved(long long saved, long long tokens, long long row_nbytes) const {
        return reinterpret_cast<unsigned char*>(saved) + (kv * layer.num_kv_heads + head) * tokens * row_nbytes;
    }
};

// The first tokens of a slot of each layer, into the layer's saved tensor [2, H, saved_tokens, D].
extern "C" __global__ void __launch_bounds__(kThreads) save_layers(const KVLayer* layers, long long row_nbytes, long long slot,
                                                                  long long tokens, long long saved_tokens, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)};
    const Head head(layers);
    if (!head.is_there()) return;
    unsigned char* saved = head.in_saved(pick(addresses, blockIdx.z), saved_tokens, row_nbytes);
    copy_run<uint4>(saved, head.in_slot(slot, row_nbytes), tokens * row_nbytes);
}

// The other way round.
extern "C" __global__ void __launch_bounds__(kThreads) instantiate_layers(const KVLayer* layers, long long row_nbytes, long long slot,
                                                                         long long tokens, long long saved_tokens,
                                                                         LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)};
    const Head head(layers);
    if (!head.is_there()) return;
    const unsigned char* saved = head.in_saved(pick(addresses, blockIdx.z), saved_tokens, row_nbytes);
    copy_run<uint4>(head.in_slot(slot, row_nbytes), saved, tokens * row_nbytes);
}

// One layer, either way: y is the head, z is K or V. Strides are bytes.
extern "C" __global__ void __launch_bounds__(kThreads) copy_layer(unsigned char* to, long long to_kv_stride, long long to_head_stride,
                                                                 const unsigned char* from, long long from_kv_stride,
                                                                 long long from_head_stride, long long nbytes) {
    copy_run<uint4>(to + blockIdx.z * to_kv_stride + blockIdx.y * to_head_stride,
                    from + blockIdx.z * from_kv_stride + blockIdx.y * from_head_stride, nbytes);
}

template <class Steps>
__device__ __forceinline__ void compact(const Head& head, const Steps& steps, long long row_nbytes) {
    walk_columns<uint4>(head.in_slot(0, row_nbytes), head.layer.slot_stride, steps,
                        Extent{row_nbytes / static_cast<long long>(sizeof(uint4)), 0});
}

template <int kCount>
__device__ __forceinline__ void compact_listed(const KVLayer* layers, long long row_nbytes, long long longest, long long count,
                                              const long long (&packed)[kCount]) {
    SHARED_ARRAY(long long, steps, kCount);
    const Head head(layers);
    if (!head.is_there()) return;  // the whole block
    compact(head, list_steps(steps, packed, count, longest), row_nbytes);
}

// Live tokens of the slots of each layer, by a list of steps: any permutation. `longest`: tokens of the longest step.
extern "C" __global__ void __launch_bounds__(kThreads) compact_layers_8(const KVLayer* layers, long long row_nbytes, long long longest,
                                                                       long long count, LIST_8(long long step)) {
    const long long packed[] = {LIST_8(step)};
    compact_listed(layers, row_nbytes, longest, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads) compact_layers_32(const KVLayer* layers, long long row_nbytes, long long longest,
                                                                        long long count, LIST_32(long long step)) {
    const long long packed[] = {LIST_32(step)};
    compact_listed(layers, row_nbytes, longest, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads) compact_layers_96(const KVLayer* layers, long long row_nbytes, long long longest,
                                                                        long long count, LIST_96(long long step)) {
    const long long packed[] = {LIST_96(step)};
    compact_listed(layers, row_nbytes, longest, count, packed);
}

// The same by a mapping and lengths that only the device knows: int32 [old_batch] each.
extern "C" __global__ void __launch_bounds__(kThreads) compact_layers_mapped(const KVLayer* layers, long long row_nbytes, const int* mapping,
                                                                            const int* lengths, long long old_batch) {
    const Head head(layers);
    if (!head.is_there()) return;
    compact(head, map_steps(mapping, lengths, old_batch, head.layer.max_sequence_length), row_nbytes);
}
