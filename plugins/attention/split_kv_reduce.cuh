// The reduction of partial results: first of the warps of a block (PartialState), then of the blocks that share a K/V head (SplitKVReduce).
//
// The unit of a reduction is a strip: 16 columns of one output row. Strip `row * kStripsPerRow + s` has columns 16 s to 16 s + 15 of a
// query head. It takes five vectors of 16 bytes:
//
//     vector 0 .. 3   vector t: columns 2t, 2t + 1, 2t + 8, 2t + 9 of the strip, as lane t of a quad has them in two fragments
//     vector 4        maximum and sum of the row, for this part of the keys
//
// Protocol between the blocks of a head (SplitKVReduce):
//
//     who merges     Even split: every block merges a run of the strips ([begin, end)) over all blocks of the head. Stream-K: the
//                    block that has the last tile of the head merges all of them; it has the highest number, the other blocks do not wait.
//     publish        A block writes a strip either for itself (into `own`: shared memory, or in stream-K its part of the workspace), or
//                    for the block that merges it (into `partials`, as flagged vectors: see flagged_vector.cuh).
//     visible        A flagged vector is visible as soon as it is there: each of the five carries its own flag, none orders another.
//     collect        The merging block polls the vectors of the others, copies them into its shared memory, and merges them with its own.
//     reset          Who has read a flagged vector sets its flag back to 0 at once. No other block reads it, so when the launch ends the
//                    workspace is as it was before, ready for the next launch or a replay of a CUDA graph; no counter exists.
//     progress       A block only waits for blocks of the same launch; the launch is cooperative, so all of them are resident.
#pragma once

#include "attention/config.cuh"
#include "attention/flagged_vector.cuh"
#include "attention/math.cuh"
#include "attention/softmax_state.cuh"

constexpr int kStripsPerRow = kHeadDim / 16;
constexpr int kStripVectors = 5;
constexpr int kMergedAtOnce = 8;  // partial results that one step of a merge loads together
constexpr int kPolledAtOnce = 2;  // vectors that a thread polls together in a decode step; each costs time, published or not

// Four columns of a row, merged from several parts of the keys, relative to the highest maximum among them.
struct PartialState {
    float maximum = kInitialMax, sum = 0;
    float4 value{0, 0, 0, 0};

    // Merges `count` partial results from shared memory. `values` and `totals` (maximum and sum) are those of the first one; the next
    // ones follow at these distances in bytes.
    template <int kAtOnce = kMergedAtOnce>
    __device__ __forceinline__ void merge(const unsigned char* values, int value_stride, const unsigned char* totals, int total_stride, int count,
                                          float factor) {
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
            float2 total[kAtOnce];
            float4 part[kAtOnce];
            float highest = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int index = min(first + i, count - 1);
                total[i] = *reinterpret_cast<const float2*>(totals + index * total_stride);
                part[i] = *reinterpret_cast<const float4*>(values + index * value_stride);
                highest = fmaxf(highest, total[i].x);
            }
            const float scale = exp2_approx((maximum - highest) * factor);
            maximum = highest;
            sum *= scale;
            value = {value.x * scale, value.y * scale, value.z * scale, value.w * scale};
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const float weight = first + i < count ? exp2_approx((total[i].x - maximum) * factor) : 0;
                sum += weight * total[i].y;
                value = {value.x + weight * part[i].x, value.y + weight * part[i].y, value.z + weight * part[i].z, value.w + weight * part[i].w};
            }
        }
    }
};

// What this block does with its partial result of a head that it shares with other blocks. See the protocol above.
struct SplitKVReduce {
    int num_strips;         // of a head: rows * kStripsPerRow
    int place_strips;       // that a block has room for in the workspace
    int first_block;        // of those that share the head
    int rank, num_blocks;   // rank: of this block among them; a head of fewer than 2 blocks is not shared
    int begin, end;         // strips that this block merges
    bool all_merge;         // every block merges some strips (even split); else the last one merges all (stream-K)
    float4* partials;       // [blocks of the launch, place_strips, kStripVectors]: flagged vectors for other blocks
    float4* own;            // [num_strips, kStripVectors]: what this block keeps for itself

    // own_partials: if all_merge, shared memory with room for strips begin to end; else [blocks of the launch, place_strips, kStripVectors].
    __device__ __forceinline__ SplitKVReduce(int num_strips, int place_strips, int first_block, int num_blocks, bool all_merge, float4* partials,
                                             float4* own_partials)
        : num_strips(num_strips), place_strips(place_strips), first_block(first_block), rank(static_cast<int>(blockIdx.x) - first_block), num_blocks(num_blocks),
          all_merge(all_merge), partials(partials) {
        const int strips_per_block = all_merge && num_blocks > 1 ? divide(num_strips + num_blocks - 1, num_blocks) : num_strips;
        begin = all_merge ? rank * strips_per_block : 0;
        end = min(num_strips, begin + strips_per_block);
        own = all_merge ? own_partials - begin * kStripVectors : own_partials + static_cast<long long>(blockIdx.x) * place_strips * kStripVectors;
    }
    __device__ __forceinline__ float4* partials_of(int block) const { return partials + static_cast<long long>(block) * place_strips * kStripVectors; }

    // Hands on one vector of a strip. has_last_tile: this block has the last tile of the head.
    __device__ __forceinline__ void publish(int strip, int vector, const PartialState& state, bool has_last_tile) const {
        const bool is_own = all_merge ? strip >= begin && strip < end : has_last_tile;
        float4* const to = (is_own ? own : partials_of(blockIdx.x)) + strip * kStripVectors;
        if (is_own) {
            to[vector] = state.value;
            if (vector == 0) to[4] = {state.maximum, state.sum, 0, 0};
        } else {
            publish_vector(to + vector, state.value);
            if (vector == 0) publish_vector(to + 4, {state.maximum, state.sum, 1, 1});
        }
    }

    // Merges the strips of this block: the partial results of the other blocks come to `staging`, shared memory of `nbytes`, as many strips at
    // a time as there is room for. Calls store(strip, vector, PartialState) for each. For all threads of the block.
    template <int kAtOnce = kPolledAtOnce, class Store>
    __device__ __forceinline__ void collect(float4* staging, int nbytes, float factor, Store store) const {
        if (num_blocks < 2) return;
        const int threads = blockDim.x, others = num_blocks - 1, room = divide(nbytes / (16 * kStripVectors), others);
#pragma unroll 1
        for (int first = begin, last; first < end; first = last) {
            last = min(end, first + room);
            const int vectors = (last - first) * kStripVectors;  // of each other block
            __syncthreads();
            gather<kAtOnce>(staging, first, vectors, others);
            __syncthreads();
#pragma unroll 1
            for (int x = threadIdx.x; x < (last - first) * 4; x += threads) {
                const int strip = first + x / 4;
                const float4 *const theirs = staging + x / 4 * kStripVectors, *const ours = own + strip * kStripVectors;
                PartialState state{ours[4].x, ours[4].y, ours[x % 4]};
                state.merge(reinterpret_cast<const unsigned char*>(theirs + x % 4), 16 * vectors, reinterpret_cast<const unsigned char*>(theirs + 4),
                            16 * vectors, others, factor);
                store(strip, x % 4, state);
            }
        }
    }

private:
    // Waits for `vectors` vectors, from strip `first` on, of each other block, and copies them to staging [others, vectors].
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
                addresses[i] = partials_of(first_block + other + (other >= rank)) + first * kStripVectors + at - other * vectors;
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
