// Rows of recurrent and conv states: zero, copy, save, instantiate, compact. Launched by trt_kvcache/kernels/cuda/rows.py.
// A row is the state of one slot of one layer; it may have any size. Grid: x along a row, y over slots, z over layers.

#include "arguments.cuh"
#include "compaction.cuh"
#include "units.cuh"

// kernels/state_infos.py writes it.
struct State {
    unsigned char* data;
    long long slot_stride, row_nbytes;

    __device__ __forceinline__ unsigned char* row(long long slot) const { return data + slot * slot_stride; }
    // What a unit must divide to serve every row of this state.
    __device__ __forceinline__ long long grain() const { return address(data) | slot_stride | row_nbytes; }
};

// Rows `slot` to `slot + gridDim.y - 1`.
extern "C" __global__ void __launch_bounds__(kThreads) zero_rows(const State* states, long long slot) {
    const State state = states[blockIdx.z];
    with_widest_unit(state.grain(), [&](auto unit) { zero_run<decltype(unit)>(state.row(slot + blockIdx.y), state.row_nbytes); });
}

// The same rows of other states.
extern "C" __global__ void __launch_bounds__(kThreads) copy_rows(const State* to, const State* from, long long slot) {
    const State into = to[blockIdx.z], of = from[blockIdx.z];
    const long long row = slot + blockIdx.y;
    with_widest_unit(into.grain() | of.grain(),
                     [&](auto unit) { copy_run<decltype(unit)>(into.row(row), of.row(row), into.row_nbytes); });
}

// Row `slot` of each state, into a dense tensor.
extern "C" __global__ void __launch_bounds__(kThreads) save_rows(const State* states, long long slot, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)}, saved = pick(addresses, blockIdx.z);
    const State state = states[blockIdx.z];
    with_widest_unit(state.grain() | saved, [&](auto unit) {
        copy_run<decltype(unit)>(reinterpret_cast<unsigned char*>(saved), state.row(slot), state.row_nbytes);
    });
}

// The other way round.
extern "C" __global__ void __launch_bounds__(kThreads) instantiate_rows(const State* states, long long slot, LIST_64(long long saved)) {
    const long long addresses[] = {LIST_64(saved)}, saved = pick(addresses, blockIdx.z);
    const State state = states[blockIdx.z];
    with_widest_unit(state.grain() | saved, [&](auto unit) {
        copy_run<decltype(unit)>(state.row(slot), reinterpret_cast<const unsigned char*>(saved), state.row_nbytes);
    });
}

template <class Steps>
__device__ __forceinline__ void compact(const State& state, const Steps& steps) {
    with_widest_unit(state.grain(), [&](auto unit) {
        using Unit = decltype(unit);
        walk_columns<Unit>(state.data, state.slot_stride, steps, Extent{0, state.row_nbytes / static_cast<long long>(sizeof(Unit))});
    });
}

template <int kCount>
__device__ __forceinline__ void compact_listed(const State* states, long long count, const long long (&packed)[kCount]) {
    SHARED_ARRAY(long long, steps, kCount);
    compact(states[blockIdx.z], list_steps(steps, packed, count, 0));
}

// Rows of the slots of each state, by a list of steps: any permutation. Whole rows move, whatever the tokens.
extern "C" __global__ void __launch_bounds__(kThreads) compact_rows_8(const State* states, long long count, LIST_8(long long step)) {
    const long long packed[] = {LIST_8(step)};
    compact_listed(states, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads) compact_rows_32(const State* states, long long count, LIST_32(long long step)) {
    const long long packed[] = {LIST_32(step)};
    compact_listed(states, count, packed);
}

extern "C" __global__ void __launch_bounds__(kThreads) compact_rows_96(const State* states, long long count, LIST_96(long long step)) {
    const long long packed[] = {LIST_96(step)};
    compact_listed(states, count, packed);
}

// The same by a mapping that only the device knows: int32 [old_batch].
extern "C" __global__ void __launch_bounds__(kThreads) compact_rows_mapped(const State* states, const int* mapping, long long old_batch) {
    const int* no_lengths = mapping;  // whole rows move: nothing depends on them
    compact(states[blockIdx.z], map_steps(mapping, no_lengths, old_batch, 0));
}
