// Recurrent and conv states of batch slots: zero, copy, capture (save), restore (instantiate) and compact, for all
// layers in one launch. Launched by trt_kvcache/kernels/state_row_kernels.py.
//
// A row is the state of one slot of one layer; it may have any size and alignment. Grid: x along a row, y over slots, z
// over layers.

#include "argument_lists.cuh"
#include "compaction.cuh"
#include "vector_copy.cuh"

// Written by kernels/state_infos.py (StateInfo).
struct State {
    unsigned char* data;
    long long slot_stride, row_nbytes;

    __device__ __forceinline__ unsigned char* row(long long slot) const { return data + slot * slot_stride; }
    // Alignment of the vectors of every row: see with_widest_vector.
    __device__ __forceinline__ long long alignment() const { return address_of(data) | slot_stride | row_nbytes; }
};

// Zeros rows `slot` to `slot + gridDim.y - 1`.
extern "C" __global__ void __launch_bounds__(kThreads) zero_rows(const State* states, long long slot) {
    const State state = states[blockIdx.z];
    with_widest_vector(state.alignment(), [&](auto vector) {
        zero_bytes<decltype(vector)>(state.row(slot + blockIdx.y), state.row_nbytes);
    });
}

// Copies the same rows from other states.
extern "C" __global__ void __launch_bounds__(kThreads) copy_rows(const State* to, const State* from, long long slot) {
    const State destination = to[blockIdx.z], source = from[blockIdx.z];
    const long long row = slot + blockIdx.y;
    with_widest_vector(destination.alignment() | source.alignment(), [&](auto vector) {
        copy_bytes<decltype(vector)>(destination.row(row), source.row(row), destination.row_nbytes);
    });
}

// Copies row `slot` of each state to a contiguous saved tensor.
extern "C" __global__ void __launch_bounds__(kThreads)
    save_rows(const State* states, long long slot, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)}, saved = select_value(addresses, blockIdx.z);
    const State state = states[blockIdx.z];
    with_widest_vector(state.alignment() | saved, [&](auto vector) {
        copy_bytes<decltype(vector)>(reinterpret_cast<unsigned char*>(saved), state.row(slot), state.row_nbytes);
    });
}

// The opposite: from the saved tensors to row `slot`.
extern "C" __global__ void __launch_bounds__(kThreads)
    instantiate_rows(const State* states, long long slot, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)}, saved = select_value(addresses, blockIdx.z);
    const State state = states[blockIdx.z];
    with_widest_vector(state.alignment() | saved, [&](auto vector) {
        copy_bytes<decltype(vector)>(state.row(slot), reinterpret_cast<const unsigned char*>(saved), state.row_nbytes);
    });
}

template <class Moves>
__device__ __forceinline__ void compact(const State& state, const Moves& moves) {
    with_widest_vector(state.alignment(), [&](auto vector) {
        using Vector = decltype(vector);
        compact_columns<Vector>(state.data, state.slot_stride, moves,
                                Extent{0, state.row_nbytes / static_cast<long long>(sizeof(Vector))});
    });
}

template <int kCount>
__device__ __forceinline__ void compact_listed(const State* states, long long count,
                                               const long long (&packed)[kCount]) {
    SHARED_ARRAY(long long, moves, kCount);
    compact(states[blockIdx.z], share_moves(moves, packed, count, 0));
}

// Moves the rows of each state by a list of up to 8, 32 or 96 moves: any permutation. Whole rows move, whatever the
// tokens.
extern "C" __global__ void __launch_bounds__(kThreads)
    compact_rows_8(const State* states, long long count, LIST_8(long long move)) {
    const long long packed[] = {LIST_8(move)};
    compact_listed(states, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    compact_rows_32(const State* states, long long count, LIST_32(long long move)) {
    const long long packed[] = {LIST_32(move)};
    compact_listed(states, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    compact_rows_96(const State* states, long long count, LIST_96(long long move)) {
    const long long packed[] = {LIST_96(move)};
    compact_listed(states, count, packed);
}

// The same by a mapping that is read on the device: int32 [old_batch].
extern "C" __global__ void __launch_bounds__(kThreads)
    compact_rows_mapped(const State* states, const int* mapping, long long old_batch) {
    const int* no_lengths = mapping;  // whole rows move: nothing depends on them
    compact(states[blockIdx.z], read_mapping(mapping, no_lengths, old_batch, 0));
}
