// Around the products of many rows with their experts (linear/expert_tiles.cuh): the order of pairs by expert before
// them, and the weighted sums of a row's products after them. Launched by trt_kvcache/kernels/expert_order_kernels.py.

#include "attention/element.cuh"
#include "dependent_launch.cuh"
#include "linear/row_tile.cuh"
#include "shared_memory.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ int sum_of_warp(int value) {
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
}

// Sorts pairs of a row and one of its choices by expert, those of an expert in their order, and cuts them into row tiles.
// Grid: a block for each expert, which reads the choices twice.
//
// An expert has row tiles from `first / tile_rows + expert` on, where `first` pairs have a lower expert: as many places as
// its tiles can be at most, so no block needs to know the tiles of others. Places that it does not need get count 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    sort_by_expert(const int* chosen, int* order, RowTile* row_tiles, long long pairs, long long max_tile_rows) {
    SHARED_ARRAY(int, lower_of_warps, kWarps);
    SHARED_ARRAY(int, equal_of_warps, kWarps);
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int per_warp = static_cast<int>((pairs + kWarps - 1) / kWarps), start = warp * per_warp;
    const int end = static_cast<int>(min(static_cast<long long>(start + per_warp), pairs));
    grid_dependency_wait();
    int lower = 0, equal = 0;
    for (int pair = start + lane; pair < end; pair += 32) {
        const int of_pair = chosen[pair];
        lower += of_pair < expert;
        equal += of_pair == expert;
    }
    lower = sum_of_warp(lower), equal = sum_of_warp(equal);
    if (lane == 0) lower_of_warps[warp] = lower, equal_of_warps[warp] = equal;
    __syncthreads();
    int first = 0, count = 0, place = 0;
    for (int other = 0; other < kWarps; other++) {
        first += lower_of_warps[other];
        count += equal_of_warps[other];
        if (other < warp) place += equal_of_warps[other];
    }
    for (int from = start; from < end; from += 32) {
        const int pair = from + lane;
        const bool is_mine = pair < end && chosen[pair] == expert;
        const unsigned mine = __ballot_sync(~0u, is_mine);
        if (is_mine) order[first + place + __popc(mine & ((1u << lane) - 1))] = pair;
        place += __popc(mine);
    }
    const int tile_rows = static_cast<int>(max_tile_rows), begin = first / tile_rows + expert,
              places = (first + count) / tile_rows + 1 - first / tile_rows;
    const int used = (count + tile_rows - 1) / tile_rows, each = used ? (count + used - 1) / used : 0;
    for (int tile = threadIdx.x; tile < places; tile += kThreads) {
        const int from = tile * each;
        row_tiles[begin + tile] = {expert, first + from, max(0, min(each, count - from)), 0};
    }
    grid_dependents_may_launch();
}

// out[row] = sum over choices of weights[row, choice] * products[row, choice], in their order, in float32. Grid: x along
// a row, in fours of elements; y over rows.
template <class Element>
__device__ __forceinline__ void weighted_sums(const uint2* products, const float* weights, uint2* out,
                                              long long choices, long long fours) {
    grid_dependency_wait();
    grid_dependents_may_launch();
    const long long at = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x, row = blockIdx.y;
    if (at >= fours) return;
    float4 sum{};
    for (int choice = 0; choice < choices; choice++) {
        const float weight = weights[row * choices + choice];
        const uint2 words = products[(row * choices + choice) * fours + at];
        const float2 low = unpack(Element{}, words.x), high = unpack(Element{}, words.y);
        sum.x += weight * low.x, sum.y += weight * low.y, sum.z += weight * high.x, sum.w += weight * high.y;
    }
    out[row * fours + at] = {pack(Element{}, {sum.x, sum.y}), pack(Element{}, {sum.z, sum.w})};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    weighted_sums_float16(const uint2* products, const float* weights, uint2* out, long long choices, long long fours) {
    weighted_sums<Float16>(products, weights, out, choices, fours);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    weighted_sums_bfloat16(const uint2* products, const float* weights, uint2* out, long long choices,
                           long long fours) {
    weighted_sums<BFloat16>(products, weights, out, choices, fours);
}
