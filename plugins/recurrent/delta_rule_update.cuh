// One new token of each slot, by the gated delta rule.
//
// A block has kDeltaUpdateColumns columns of a state, all rows. Neighbouring lanes have neighbouring columns, so that
// memory is read and written in whole rows; a thread has kUpdateRows rows that follow each other, in registers. Sums
// over rows go through shared memory, once.
#pragma once

#include "dependent_launch.cuh"
#include "recurrent/delta_rule_step.cuh"
#include "shared_memory.cuh"

// trt_kvcache/kernels/delta_rule_kernels.py has the same numbers.
constexpr int kDeltaUpdateThreads = 256;
constexpr int kDeltaUpdateColumns = 128;

constexpr int kUpdateLanes = kDeltaUpdateColumns / kColumns;      // threads of a row
constexpr int kUpdateParts = kDeltaUpdateThreads / kUpdateLanes;  // threads of a column
constexpr int kUpdateRows = kDeltaMaxKeyDim / kUpdateParts;
constexpr int kUpdateBlocksPerSm = kBytesOf<Element> == 2 ? 2 : 1;  // floats take more registers

// A key or query in a thread, as it was loaded. All key dims are multiples of 8.
struct UpdateKey {
    static constexpr int kPer = kPerVector<Element>;
    Fetched<Element, kPer> vectors[kUpdateRows / kPer];

    __device__ __forceinline__ void fetch(const DeltaParams& params, const void* base, int row) {
#pragma unroll
        for (int i = 0; i < kUpdateRows / kPer; i++) {
            if (row + i * kPer < params.key_dim) vectors[i].fetch(base, row + i * kPer);
        }
    }
    __device__ __forceinline__ void unpack_to(float (&values)[kUpdateRows]) const {
#pragma unroll
        for (int i = 0; i < kUpdateRows / kPer; i++) {
            float some[kPer];
            vectors[i].unpack_to(some);
#pragma unroll
            for (int j = 0; j < kPer; j++) values[i * kPer + j] = some[j];
        }
    }
};

// Part of a state that a thread owns: kColumns columns of some rows.
struct UpdateShare {
    long long slot, head;
    int lane, part;   // among the threads of its rows, and of its columns
    int row, column;  // the first row and column
    bool is_live;     // true if its columns exist

    __device__ __forceinline__ explicit UpdateShare(const DeltaParams& params) : slot(blockIdx.z), head(blockIdx.y) {
        lane = static_cast<int>(threadIdx.x) % kUpdateLanes;
        part = static_cast<int>(threadIdx.x) / kUpdateLanes;
        row = part * kUpdateRows;
        column = static_cast<int>(blockIdx.x) * kDeltaUpdateColumns + lane * kColumns;
        is_live = column < params.value_dim;
    }
    // Of v and of an output.
    __device__ __forceinline__ long long in_heads(const DeltaParams& params) const {
        return head * params.value_dim + column;
    }
    // Calls visit(i, index) for rows that are there, with the index of the first column in the states of all slots.
    template <class Visit>
    __device__ __forceinline__ void each_row(const DeltaParams& params, Visit visit) const {
        const long long first = ((slot * params.heads + head) * params.key_dim + row) * params.value_dim + column;
#pragma unroll
        for (int eight = 0; eight < kUpdateRows; eight += 8) {
            if (!is_live || row + eight >= params.key_dim) continue;
#pragma unroll
            for (int i = eight; i < eight + 8; i++) visit(i, first + i * params.value_dim);
        }
    }
};

// Adds up what the parts have at sums[first], a part every `stride` floats.
template <int kCount>
__device__ __forceinline__ void sum_parts(const uint4* sums, int stride, int first, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = 0.0f;
#pragma unroll
    for (int part = 0; part < kUpdateParts; part++) {
        float some[kCount];
        load_elements(Float32{}, sums, part * stride + first, some);
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] += some[i];
    }
}

// A thread issues all its loads before it computes anything, and before it knows whether the slot has a new token.
__device__ __forceinline__ void update(const DeltaParams& params) {
    SHARED_ARRAY(uint4, key_sums, kUpdateParts * kDeltaUpdateColumns / 4);
    SHARED_ARRAY(uint4, query_sums, kUpdateParts * kDeltaUpdateColumns / 4);
    SHARED_ARRAY(uint4, norm_sums, kUpdateParts);
    const UpdateShare mine(params);
    const int key_dim = static_cast<int>(params.key_dim), key_head = static_cast<int>(key_head_of(params, mine.head));
    grid_dependency_wait();
    float state[kUpdateRows][kColumns] = {}, v[kColumns] = {};
    mine.each_row(params, [&](int i, long long index) { load_elements_once(State{}, params.past, index, state[i]); });
    UpdateKey key, query;
    key.fetch(params, params.k.row(mine.slot, 0) + key_head * key_dim * kBytesOf<Element>, mine.row);
    query.fetch(params, params.q.row(mine.slot, 0) + key_head * key_dim * kBytesOf<Element>, mine.row);
    if (mine.is_live) load_elements(Element{}, params.v.row(mine.slot, 0), mine.in_heads(params), v);
    const float2 gates = gates_of(params, mine.slot, 0, mine.head);
    grid_dependents_may_launch();  // not before the loads: the next launch can wait, they cannot
    const long long out = mine.slot * params.heads * params.value_dim + mine.in_heads(params);
    if (count_new(params.new_lengths, mine.slot, 1) == 0) {
        const float zeros[kColumns] = {};
        if (mine.is_live && mine.part == 0) store_elements(Element{}, params.out, out, zeros);
        if (params.past == params.present) return;
        return mine.each_row(
            params, [&](int, long long index) { copy_elements<State, kColumns>(params.present, params.past, index); });
    }

    float k[kUpdateRows], q[kUpdateRows], norms[4] = {}, of_key[kColumns] = {}, of_query[kColumns] = {};
    key.unpack_to(k);
    query.unpack_to(q);
#pragma unroll
    for (int i = 0; i < kUpdateRows; i++) {
        norms[0] += k[i] * k[i];
        norms[1] += q[i] * q[i];
        norms[2] += k[i] * q[i];
#pragma unroll
        for (int j = 0; j < kColumns; j++) {
            of_key[j] += k[i] * state[i][j];
            of_query[j] += q[i] * state[i][j];
        }
    }
    const int place = mine.part * kDeltaUpdateColumns + mine.lane * kColumns;
    store_elements(Float32{}, key_sums, place, of_key);
    store_elements(Float32{}, query_sums, place, of_query);
    if (mine.lane == 0) store_elements(Float32{}, norm_sums, 4 * mine.part, norms);
    __syncthreads();
    sum_parts(norm_sums, 4, 0, norms);
    sum_parts(key_sums, kDeltaUpdateColumns, mine.lane * kColumns, of_key);
    const DeltaStep token = delta_step(params, gates, norms[0], norms[1], norms[2]);
    float change[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) change[j] = token.change(v[j], of_key[j]);
    if (mine.is_live && mine.part == 0) {
        float outputs[kColumns];
        sum_parts(query_sums, kDeltaUpdateColumns, mine.lane * kColumns, of_query);
#pragma unroll
        for (int j = 0; j < kColumns; j++) outputs[j] = token.output(of_query[j], change[j]);
        store_elements(Element{}, params.out, out, outputs);
    }
    mine.each_row(params, [&](int i, long long index) {
#pragma unroll
        for (int j = 0; j < kColumns; j++) state[i][j] = token.decay * state[i][j] + k[i] * change[j];
        store_elements_once(State{}, params.present, index, state[i]);
    });
}
