// Compaction in place: a thread owns a column, a unit of bytes at the same place in every slot, and walks the steps for it.
// No two threads touch the same bytes, so threads need not wait for each other, and nothing needs scratch memory.
#pragma once

#include "arguments.cuh"
#include "shared_memory.cuh"
#include "units.cuh"

// In the place of a slot: the thread's register. kernels/steps.py has the same number.
constexpr int kRegister = 0xFFFF;

// Copy the first `tokens` of slot `source` to slot `destination`; either may be kRegister.
struct Step {
    int source, destination;
    long long tokens;
};

// Of 64 bits: 16 are the source, 16 the destination, 31 the tokens.
__device__ __forceinline__ Step unpack(long long step) {
    return {static_cast<int>(step >> 47), static_cast<int>(step >> 31 & 0xFFFF), step & 0x7FFFFFFF};
}

// Steps that the host listed.
struct ListedSteps {
    const long long* packed;
    int count;
    long long longest;  // tokens of the longest one

    __device__ __forceinline__ Step operator[](int index) const { return unpack(packed[index]); }
};

// Spreads the list of the launch's arguments over the threads of the block, which wait for each other.
template <int kCount>
__device__ __forceinline__ ListedSteps list_steps(long long* shared, const long long (&packed)[kCount], long long count, long long longest) {
    if (threadIdx.x < kCount) shared[threadIdx.x] = pick(packed, threadIdx.x);
    __syncthreads();
    return {shared, static_cast<int>(count), longest};
}

// Steps of a mapping that keeps the order: slot i goes to slot mapping[i] < i. Anything else in the mapping moves nothing.
struct MappedSteps {
    const int *mapping, *lengths;
    int count;
    long long most;  // tokens that fit into a slot
    long long longest;

    __device__ __forceinline__ Step operator[](int index) const {
        const int destination = mapping[index];
        const bool moves = 0 <= destination && destination < index;
        const long long tokens = moves ? lengths[index] : 0;
        return {index, moves ? destination : index, tokens < most ? tokens : most};
    }
};

__device__ __forceinline__ MappedSteps map_steps(const int* mapping, const int* lengths, long long count, long long most) {
    MappedSteps steps{mapping, lengths, static_cast<int>(count), most, 0};
    for (int i = 0; i < steps.count; i++) {
        const long long tokens = steps[i].tokens;
        steps.longest = tokens > steps.longest ? tokens : steps.longest;
    }
    return steps;
}

// Units of a slot that a step moves: so many for each token, or a number that depends on no length.
struct Extent {
    long long per_token, whole;

    __device__ __forceinline__ long long operator()(long long tokens) const { return per_token * tokens + whole; }
};

// The columns of a thread, from `first` on, every blockDim.x-th. What a step has loaded it stores while the next one loads: no step
// loads what the one before it stores, because every slot is loaded before it is stored.
template <class Unit>
struct Columns {
    unsigned char* slots;
    long long slot_stride, first;
    Unit held[kInFlight];

    __device__ __forceinline__ void load(const Step& step, long long end, Unit (&units)[kInFlight]) const {
        if (first >= end || step.source == step.destination) return;
        const Unit* from = reinterpret_cast<const Unit*>(slots + step.source * slot_stride) + first;
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            const long long apart = i * static_cast<long long>(blockDim.x);
            if (first + apart < end) units[i] = step.source == kRegister ? held[i] : from[apart];
        }
    }
    __device__ __forceinline__ void store(const Step& step, long long end, const Unit (&units)[kInFlight]) {
        if (first >= end || step.source == step.destination) return;
        Unit* to = reinterpret_cast<Unit*>(slots + step.destination * slot_stride) + first;
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            const long long apart = i * static_cast<long long>(blockDim.x);
            if (step.destination == kRegister) {
                held[i] = units[i];
            } else if (first + apart < end) {
                to[apart] = units[i];
            }
        }
    }
};

template <class Unit, class Steps>
__device__ __forceinline__ void walk_columns(unsigned char* slots, long long slot_stride, const Steps& steps, Extent extent) {
    const long long end = steps.count ? extent(steps.longest) : 0;
    for (long long first = first_unit(); first < end; first += units_of_grid()) {
        Columns<Unit> columns{slots, slot_stride, first, {}};
        Step step = steps[0];
        Unit units[kInFlight] = {};
        columns.load(step, extent(step.tokens), units);
        for (int s = 1; s < steps.count; s++) {
            const Step next = steps[s];
            Unit loaded[kInFlight] = {};
            columns.load(next, extent(next.tokens), loaded);
            columns.store(step, extent(step.tokens), units);
            step = next;
#pragma unroll
            for (int i = 0; i < kInFlight; i++) units[i] = loaded[i];
        }
        columns.store(step, extent(step.tokens), units);
    }
}
