// How results of several parts of a head are put together: those of warps, and those of blocks that wait for each other.
#pragma once

#include "attention/common.cuh"

// Partial results are of units of 16 columns of a row: 4 pieces of 16 bytes with values, as a lane has them (piece i: columns 2 * i,
// 2 * i + 1, 2 * i + 8 and 2 * i + 9), and one with their maximum and sum.
constexpr int kUnits = kHeadDim / 16, kUnit = 5;
constexpr int kJoined = 8;  // parts that are put together at once
constexpr int kAtOnce = 2;  // pieces that a thread looks for: each costs time, found or not

// a / b, of numbers that are not negative, b below 2^20: by floats, several times as fast as by integers. The second quotient is of what
// the first one, not exact, leaves.
__device__ __forceinline__ int quotient(int a, int b) {
    const float one_of = reciprocal(static_cast<float>(b));
    const int first = static_cast<int>(static_cast<float>(a) * one_of);
    return first + static_cast<int>(floorf((static_cast<float>(a - first * b) + 0.5f) * one_of));
}

// Four results of a row, of several parts, relative to their maximum.
struct Together {
    float maximum = kLowest, sum = 0;
    float4 value{0, 0, 0, 0};

    // Parts in shared memory, some bytes from each other; a total is a maximum and a sum.
    __device__ __forceinline__ void add(const unsigned char* values, int further_value, const unsigned char* totals, int further_total, int count,
                                        float factor) {
#pragma unroll 1
        for (int first = 0; first < count; first += kJoined) {
            float2 total[kJoined];
            float4 part[kJoined];
            float highest = maximum;
#pragma unroll
            for (int i = 0; i < kJoined; i++) {
                const int number = min(first + i, count - 1);
                total[i] = *reinterpret_cast<const float2*>(totals + number * further_total);
                part[i] = *reinterpret_cast<const float4*>(values + number * further_value);
                highest = fmaxf(highest, total[i].x);
            }
            const float less = power_of_2((maximum - highest) * factor);
            maximum = highest;
            sum *= less;
            value = {value.x * less, value.y * less, value.z * less, value.w * less};
#pragma unroll
            for (int i = 0; i < kJoined; i++) {
                const float weight = first + i < count ? power_of_2((total[i].x - maximum) * factor) : 0;
                sum += weight * total[i].y;
                value = {value.x + weight * part[i].x, value.y + weight * part[i].y, value.z + weight * part[i].z, value.w + weight * part[i].w};
            }
        }
    }
};

// What blocks that have parts of a head do with them. Each keeps some units of its own, and puts those of all together; or (not `all_share`)
// the last one does. Whoever waits does so for blocks that run: the launch is cooperative.
struct Sharing {
    int units, first_block, number, with;  // number: of this block, of `with`; below 2: it shares nothing
    int begin, end;                        // units that this block puts together
    bool all_share;
    float4* partials;  // [blocks, units, kUnit]: for other blocks; last words are 0 before and after
    float4* own;       // [units, kUnit]: for this one

    // kept: in shared memory, units begin to end; or, not `all_share`, [blocks, units, kUnit].
    __device__ __forceinline__ Sharing(int units, int first_block, int with, bool all_share, float4* partials, float4* kept)
        : units(units), first_block(first_block), number(static_cast<int>(blockIdx.x) - first_block), with(with), all_share(all_share), partials(partials) {
        const int share = all_share && with > 1 ? quotient(units + with - 1, with) : units;
        begin = all_share ? number * share : 0;
        end = min(units, begin + share);
        own = all_share ? kept - begin * kUnit : kept + static_cast<long long>(blockIdx.x) * units * kUnit;
    }
    __device__ __forceinline__ float4* of(int block) const { return partials + static_cast<long long>(block) * units * kUnit; }

    // A piece of a unit; whether this block has the end of the head.
    __device__ __forceinline__ void give(int unit, int piece, const Together& all, bool ends_it) const {
        const bool keeps = all_share ? unit >= begin && unit < end : ends_it;
        float4* const place = (keeps ? own : of(blockIdx.x)) + unit * kUnit;
        if (keeps) {
            place[piece] = all.value;
            if (piece == 0) place[4] = {all.maximum, all.sum, 0, 0};
        } else {
            publish(place + piece, all.value);
            if (piece == 0) publish(place + 4, {all.maximum, all.sum, 1, 1});
        }
    }

    // Parts of others come to shared memory, of as many units as there is room for, and are added to what this block has.
    // Calls store(unit, piece, Together).
    template <class Store>
    __device__ __forceinline__ void take(float4* here, int nbytes, float factor, Store store) const {
        if (with < 2) return;
        const int threads = blockDim.x, others = with - 1, room = quotient(nbytes / (16 * kUnit), others);
#pragma unroll 1
        for (int from = begin, to; from < end; from = to) {
            to = min(end, from + room);
            const int pieces = (to - from) * kUnit, all = others * pieces;
            const float one_of = reciprocal(static_cast<float>(pieces));
            __syncthreads();
#pragma unroll 1
            for (int x = threadIdx.x; x < all; x += threads * kAtOnce) {
                float4 found[kAtOnce];
                float4* places[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) {
                    const int at = x + i * threads, other = static_cast<int>((static_cast<float>(at) + 0.5f) * one_of);
                    places[i] = of(first_block + other + (other >= number)) + from * kUnit + at - other * pieces;
                }
                for (;; look_again()) {  // for all at once: each look takes as long as a way through the L2
                    bool all_there = true;
#pragma unroll
                    for (int i = 0; i < kAtOnce; i++) {
                        found[i].w = 1;
                        if (x + i * threads < all) found[i] = peek(places[i]);
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; i++) all_there = all_there && has_come(found[i]);
                    if (all_there) break;
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) {
                    if (x + i * threads >= all) break;
                    here[x + i * threads] = found[i];
                    take_back(places[i]);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int x = threadIdx.x; x < (to - from) * 4; x += threads) {
                const int unit = from + x / 4;
                const float4 *const theirs = here + x / 4 * kUnit, *const ours = own + unit * kUnit;
                Together together{ours[4].x, ours[4].y, ours[x % 4]};
                together.add(reinterpret_cast<const unsigned char*>(theirs + x % 4), 16 * pieces, reinterpret_cast<const unsigned char*>(theirs + 4),
                             16 * pieces, others, factor);
                store(unit, x % 4, together);
            }
        }
    }
};
