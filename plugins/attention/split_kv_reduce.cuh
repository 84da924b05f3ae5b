// The reduction of partial results: first of the warps of a block (PartialState), then of the blocks that share a K/V
// head (SplitKVReduce).
//
// The unit of a reduction is a fragment of an output row, of 16 * kHalves columns. The decode kernel of one new token
// merges few rows, and its latency counts: 16 columns in float. The other kernels merge many rows, and their bytes
// count: 32 columns, packed. Fragment `row * kFragmentsPerRow<kHalves> + s` has the columns from 16 * kHalves * s on.
// It takes five vectors of 16 bytes:
//
//     vector 0 .. 3   vector t has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 columns: the elements that lane t of
//                     a quad has in two accumulator fragments of mma. They are floats, or packed (packed_vector.cuh).
//                     The decode kernel of up to 8 rows and kernels over quantized values have other orders.
//     vector 4        maximum and sum of the row, for this part of the keys; the unit of packed values
//
// Protocol between the blocks of a head (SplitKVReduce):
//
//     merging block  Even split: every block merges some fragments ([begin, end)) over all blocks of the head.
//                    Stream-K: the block that has the last tile of the head merges all of them. It has the highest
//                    number; the other blocks do not wait.
//     publish        A block writes a fragment either for itself (into `own`: shared memory, or in stream-K its part of
//                    the workspace), or for the block that merges it (into `partials`, as flagged vectors: see
//                    flagged_vector.cuh).
//     visible        Each of the five vectors carries its own flag, and is valid as soon as the flag is set. The order
//                    of the vectors is open.
//     collect        The merging block polls the vectors of the others, copies them into its shared memory, and merges
//                    them with its own.
//     reset          The block that has read a flagged vector resets its flag to 0 at once. No other block reads it, so
//                    when the launch ends the workspace is as it was before, ready for the next launch or a replay of a CUDA
//                    graph; no counter exists.
//     progress       A block only waits for blocks of the same launch; the launch is cooperative, so all of them are
//                    resident.
#pragma once

#include "attention/config.cuh"
#include "attention/flagged_vector.cuh"
#include "attention/math.cuh"
#include "attention/packed_vector.cuh"
#include "attention/softmax_state.cuh"

template <int kHalves>
constexpr int kFragmentsPerRow = (kHeadDim + 16 * kHalves - 1) / (16 * kHalves);
constexpr int kFragmentVectors = 5;
constexpr int kMergedAtOnce = 8;  // partial results that one step of a merge loads together
// vectors that a thread polls together in a decode step; each costs time, published or not
constexpr int kPolledAtOnce = 2;

// Four of each 16 columns of a row, merged from several splits of the keys, relative to their highest maximum.
template <int kHalves>
struct PartialState {
    float maximum = kInitialMax, sum = 0;
    float4 values[kHalves]{};

    __device__ __forceinline__ void scale(float factor) {
        sum *= factor;
#pragma unroll
        for (int h = 0; h < kHalves; h++)
            values[h] = {values[h].x * factor, values[h].y * factor, values[h].z * factor, values[h].w * factor};
    }

    // Merges `count` partial results from shared memory. `at`: the values of the first one, its second half half_stride
    // bytes further on; `totals`: its maximum and sum. The next ones follow at these distances in bytes.
    template <int kAtOnce = kMergedAtOnce>
    __device__ __forceinline__ void merge(const unsigned char* at, int value_stride, int half_stride,
                                          const unsigned char* totals, int total_stride, int count, float factor) {
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
            float2 total[kAtOnce];
            float4 part[kAtOnce][kHalves];
            float highest = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int index = min(first + i, count - 1);
                total[i] = *reinterpret_cast<const float2*>(totals + index * total_stride);
#pragma unroll
                for (int h = 0; h < kHalves; h++)
                    part[i][h] = *reinterpret_cast<const float4*>(at + index * value_stride + h * half_stride);
                highest = fmaxf(highest, total[i].x);
            }
            scale(exp2_approx((maximum - highest) * factor));
            maximum = highest;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const float weight = first + i < count ? exp2_approx((total[i].x - maximum) * factor) : 0;
                sum += weight * total[i].y;
#pragma unroll
                for (int h = 0; h < kHalves; h++) {
                    float4& value = values[h];
                    const float4& more = part[i][h];
                    value = {value.x + weight * more.x, value.y + weight * more.y, value.z + weight * more.z,
                             value.w + weight * more.w};
                }
            }
        }
    }

    // The state of one packed fragment.
    __device__ __forceinline__ void unpack(float4 total, float4 packed) {
        maximum = total.x;
        sum = total.y;
        add_packed(values[0], packed.x, packed.y, total.z);
        add_packed(values[kHalves - 1], packed.z, packed.w, total.z);
    }

    // Merges packed ones: vector `vector` of fragments in shared memory, every step-th of `count` from `first` on;
    // `stride` in vectors.
    __device__ __forceinline__ void merge_packed(const float4* fragments, int vector, int stride, int first, int step,
                                                 int count, float factor) {
        constexpr int kAtOnce = 4;
#pragma unroll 1
        for (int i0 = first; i0 < count; i0 += step * kAtOnce) {
            float4 total[kAtOnce], part[kAtOnce];
            float highest = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const float4* const fragment = fragments + min(i0 + i * step, count - 1) * stride;
                total[i] = fragment[4];
                part[i] = fragment[vector];
                highest = fmaxf(highest, total[i].x);
            }
            scale(exp2_approx((maximum - highest) * factor));
            maximum = highest;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const float weight = i0 + i * step < count ? exp2_approx((total[i].x - maximum) * factor) : 0,
                            unit = weight * total[i].z;
                sum += weight * total[i].y;
                add_packed(values[0], part[i].x, part[i].y, unit);
                add_packed(values[kHalves - 1], part[i].z, part[i].w, unit);
            }
        }
    }

    // Merges the states of lanes at the distances first_distance, twice that, and so on, below end_distance.
    __device__ __forceinline__ void join_lanes(int first_distance, int end_distance, float factor) {
        float highest = maximum;
#pragma unroll 1
        for (int distance = first_distance; distance < end_distance; distance *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
        scale(exp2_approx((maximum - highest) * factor));
        maximum = highest;
#pragma unroll 1
        for (int distance = first_distance; distance < end_distance; distance *= 2) {
            sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
            for (int h = 0; h < kHalves; h++) {
                float4& value = values[h];
                value.x += __shfl_xor_sync(~0u, value.x, distance);
                value.y += __shfl_xor_sync(~0u, value.y, distance);
                value.z += __shfl_xor_sync(~0u, value.z, distance);
                value.w += __shfl_xor_sync(~0u, value.w, distance);
            }
        }
    }

    // The largest of the values; NaN if one is.
    __device__ __forceinline__ float largest(float other = 0) const {
#pragma unroll
        for (int h = 0; h < kHalves; h++) other = largest_of(values[h], other);
        return other;
    }
};

// Reduction of the partial results of a head over the blocks that share it, with the protocol above. kHalves: 1,
// floats; 2, packed.
template <int kHalves>
struct SplitKVReduce {
    static constexpr bool kPacked = kHalves == 2;
    int num_fragments;     // of a head: rows * kFragmentsPerRow<kHalves>
    int place_fragments;   // that a block has room for in the workspace
    int first_block;       // of those that share the head
    int rank, num_blocks;  // rank: of this block among them; a head of fewer than 2 blocks is not shared
    int begin, end;        // fragments that this block merges
    bool all_merge;        // every block merges some fragments (even split); else the last one merges all (stream-K)
    // [blocks of the launch, place_fragments, kFragmentVectors]: flagged vectors for other blocks
    float4* partials;
    float4* own;  // [num_fragments, kFragmentVectors]: what this block keeps for itself

    // own_partials: if all_merge, shared memory with room for fragments begin to end; else [blocks of the launch,
    // place_fragments, kFragmentVectors].
    __device__ __forceinline__ SplitKVReduce(int num_fragments, int place_fragments, int first_block, int num_blocks,
                                             bool all_merge, float4* partials, float4* own_partials)
        : num_fragments(num_fragments), place_fragments(place_fragments), first_block(first_block),
          rank(static_cast<int>(blockIdx.x) - first_block), num_blocks(num_blocks), all_merge(all_merge),
          partials(partials) {
        // packed fragments are assigned by rows, which is less work for the publishing block
        constexpr int kUnit = kPacked ? kFragmentsPerRow<kHalves> : 1;
        const int units = num_fragments / kUnit,
                  units_per_block =
                      all_merge && num_blocks > 1 ? divide_small(units + num_blocks - 1, num_blocks) : units;
        const int fragments_per_block = units_per_block * kUnit;
        begin = all_merge ? rank * fragments_per_block : 0;
        end = min(num_fragments, begin + fragments_per_block);
        own = all_merge ? own_partials - begin * kFragmentVectors
                        : own_partials + static_cast<long long>(blockIdx.x) * place_fragments * kFragmentVectors;
    }
    __device__ __forceinline__ float4* partials_of(int block) const {
        return partials + static_cast<long long>(block) * place_fragments * kFragmentVectors;
    }

    // Hands on one vector of a fragment. `largest`: of all values that share a unit (packed), which may be those of a
    // row. has_last_tile: this block has the last tile of the head.
    __device__ __forceinline__ void publish(int fragment, int vector, const PartialState<kHalves>& state, float largest,
                                            bool has_last_tile) const {
        const bool is_own = all_merge ? fragment >= begin && fragment < end : has_last_tile;
        float4* const to = (is_own ? own : partials_of(blockIdx.x)) + fragment * kFragmentVectors;
        const float unit = kPacked ? packed_unit(largest) : 1;
        float4 values = state.values[0];
        if constexpr (kPacked) values = pack_vector(state.values[0], state.values[1], unit);
        if (is_own) {
            to[vector] = values;
            if (vector == 0) to[4] = {state.maximum, state.sum, unit, 0};
        } else {
            publish_vector(to + vector, values);
            if (vector == 0) publish_vector(to + 4, {state.maximum, state.sum, unit, 1});
        }
    }

    // The same for a row, of whose fragments the lanes of a quad have a vector each; they have one maximum, sum and unit.
    // If several warps divide the columns, this one has the fragments from `first_fragment` of the row on. For whole warps.
    template <int kRowFragments>
    __device__ __forceinline__ void publish_row(int row, int first_fragment,
                                                const PartialState<kHalves> (&fragments)[kRowFragments],
                                                float largest) const {
        static_assert(kPacked && kRowFragments * kColumnWarps == kFragmentsPerRow<kHalves>,
                      "rows are handed on whole, or kept");
        const int first = row * kFragmentsPerRow<kHalves> + first_fragment, lane = threadIdx.x % 4;
        const bool is_own = first >= begin && first < end;
        float4* const to = (is_own ? own : partials_of(blockIdx.x)) + first * kFragmentVectors;
        const float unit = packed_unit(largest);
        const auto each = [&](auto store) {
#pragma unroll
            for (int s = 0; s < kRowFragments; s++)
                store(to + s * kFragmentVectors + lane,
                      pack_vector(fragments[s].values[0], fragments[s].values[1], unit));
#pragma unroll
            for (int s = 0; s < kRowFragments; s += 4) {
                if (s + lane < kRowFragments)
                    store(to + (s + lane) * kFragmentVectors + 4,
                          float4{fragments[0].maximum, fragments[0].sum, unit, 1});
            }
        };
        if (is_own) {
            each([](float4* at, float4 vector) { *at = vector; });
        } else {
            each([](float4* at, float4 vector) { publish_vector(at, vector); });
        }
    }

    // Merges the fragments of this block: the partial results of the other blocks come to `staging`, shared memory of
    // `nbytes`, as many fragments at a time as there is room for. Calls store(fragment, vector, PartialState) for each.
    // For all threads of the block.
    template <int kAtOnce = kPolledAtOnce, class Store>
    __device__ __forceinline__ void collect(float4* staging, int nbytes, float factor, Store store) const {
        if (num_blocks < 2) return;
        const int others = num_blocks - 1, room = divide(nbytes / (16 * kFragmentVectors), others);
#pragma unroll 1
        for (int first = begin, last; first < end; first = last) {
            last = min(end, first + room);
            const int vectors = (last - first) * kFragmentVectors;  // of each other block
            __syncthreads();
            gather<kAtOnce>(staging, first, vectors, others);
            __syncthreads();
            merge(staging, first, last, others, factor, store);
        }
    }

private:
    template <class Store>
    __device__ __forceinline__ void merge(const float4* staging, int first, int last, int others, float factor,
                                          Store store) const {
        const int threads = blockDim.x, vectors = (last - first) * kFragmentVectors, all = (last - first) * 4;
        if constexpr (!kPacked) {
#pragma unroll 1
            for (int x = threadIdx.x; x < all; x += threads) {
                const int fragment = first + x / 4;
                const float4 *const theirs = staging + x / 4 * kFragmentVectors, *const ours =
                                                                                     own + fragment * kFragmentVectors;
                PartialState<1> state{ours[4].x, ours[4].y, {ours[x % 4]}};
                state.merge(reinterpret_cast<const unsigned char*>(theirs + x % 4), 16 * vectors, 0,
                            reinterpret_cast<const unsigned char*>(theirs + 4), 16 * vectors, others, factor);
                store(fragment, x % 4, state);
            }
        } else {
            // several lanes share a vector, with 4 or more partial results each, where threads are more than vectors
            int share_bits = 0;
            while (share_bits < 3 && 8 << share_bits <= others && all << (share_bits + 1) <= threads) share_bits++;
            const int shares = 1 << share_bits, end_x = all << share_bits;
#pragma unroll 1
            for (int x0 = threadIdx.x / 32 * 32; x0 < end_x; x0 += threads) {
                const int x = x0 + threadIdx.x % 32, vector = x % 4, share = x / 4 % 8 & (shares - 1);
                const int fragment = min(first + (x >> (share_bits + 2)), last - 1);
                PartialState<kHalves> state;
                if (share == 0)
                    state.unpack(own[fragment * kFragmentVectors + 4], own[fragment * kFragmentVectors + vector]);
                state.merge_packed(staging + (fragment - first) * kFragmentVectors, vector, vectors, share, shares,
                                   others, factor);
                if (shares > 1) state.join_lanes(4, 4 * shares, factor);
                if (share == 0 && x < end_x) store(fragment, vector, state);
            }
        }
    }

    // Waits for `vectors` vectors, from fragment `first` on, of each other block, and copies them to staging [others,
    // vectors].
    template <int kAtOnce>
    __device__ __forceinline__ void gather(float4* staging, int first, int vectors, int others) const {
        const int threads = blockDim.x, all = others * vectors;
        const float inverse = reciprocal_approx(static_cast<float>(vectors));
#pragma unroll 1
        for (int x = threadIdx.x; x < all; x += threads * kAtOnce) {
            float4 found[kAtOnce];
            float4* addresses[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int at = x + i * threads, other = static_cast<int>((static_cast<float>(at) + 0.5f) * inverse);
                addresses[i] = partials_of(first_block + other + (other >= rank)) + first * kFragmentVectors + at
                               - other * vectors;
            }
            for (;; poll_again()) {  // all together: a poll takes a round trip to the L2
                bool all_published = true;
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) {
                    found[i].w = 1;
                    if (x + i * threads < all) found[i] = poll_vector(addresses[i]);
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) all_published = all_published && is_published(found[i]);
                if (all_published) break;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                if (x + i * threads >= all) break;
                staging[x + i * threads] = found[i];
                reset_vector(addresses[i]);
            }
        }
    }
};
