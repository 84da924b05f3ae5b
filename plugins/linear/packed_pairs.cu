// Products of a few rows with two matrices of packed weights in different formats, such as q and k in Q4_K and v in Q6_K:
// the kernels of packed.cu and super_blocks.cu one after the other, in one launch. Launched by
// trt_kvcache/kernels/packed_pair_kernels.py.
//
// The tiles of the second matrix follow those of the first one: a block takes every gridDim.x'th of all. So it changes
// the format at most once, and the blocks that have fewer tiles of the first matrix begin with the second one.

#include "linear/packed_stream.cuh"
#include "linear/super_block_values.cuh"

#define PART_ARGUMENTS(part) \
    const unsigned char *part##_values, const unsigned char *part##_scales, const unsigned char *part##_factors, \
        const unsigned short *part##_bias, void *part##_out, long long part##_outputs, long long part##_tiles, \
        long long part##_prefetched_steps
#define PART_PARAMS(part, ...) \
    {{x, part##_bias, part##_out, static_cast<int>(rows), static_cast<int>(part##_outputs), static_cast<int>(inputs), \
      static_cast<int>(part##_tiles), static_cast<int>(tile_outputs), static_cast<int>(part##_prefetched_steps)}, \
     static_cast<int>(out_stride), \
     __VA_ARGS__}

using First = SuperBlockMatrix<FIRST>;
#define FIRST_MATRIX {first_values, first_scales, first_factors, fragments_of(inputs)}

#ifdef SCALE
// Of Q8_0: weights of 8 bits in groups, whose zero points would be the third pointer.
#include "linear/packed_values.cuh"

using Second = GroupedMatrix<false>;
#define SECOND_ARGUMENTS PART_ARGUMENTS(second), long long groups, long long group_shift, long long scale_pairs
#define SECOND_MATRIX \
    { \
        { \
            second_values, second_scales, second_factors, fragments_of(inputs), static_cast<int>(groups), \
                static_cast<int>(group_shift), static_cast<int>(scale_pairs) \
        } \
    }
#else
using Second = SuperBlockMatrix<SECOND>;
#define SECOND_ARGUMENTS PART_ARGUMENTS(second)
#define SECOND_MATRIX {second_values, second_scales, second_factors, fragments_of(inputs)}
#endif

template <int kTiles>
__device__ __forceinline__ void linear_pair(const PackedParams<First>& first, const PackedParams<Second>& second) {
    using FirstStream = PackedStream<kTiles, false, First>;
    using SecondStream = PackedStream<kTiles, false, Second>;
    SHARED_ARRAY(float, shared_sums, 2 * PartialSums<kTiles>::kFloats);
    const int block = blockIdx.x, blocks = gridDim.x, second_tile = (block + blocks - first.tiles % blocks) % blocks;
    // The loads of the second matrix begin only after the sums of the first one: they then come from the L2.
    SecondStream(second, 0, second_tile).prefetch_steps(0, SecondStream::kDepth);
    tiles_of_block<FirstStream, false, unsigned short, Silu>(first, block, shared_sums);
    __syncthreads();  // the last sums of the first matrix may be in the buffer that is written first
    tiles_of_block<SecondStream, false, unsigned short, Silu>(second, second_tile, shared_sums);
}

#define PAIR_ARGUMENTS \
    const unsigned char *x, long long rows, long long inputs, long long tile_outputs, long long out_stride, \
        PART_ARGUMENTS(first), SECOND_ARGUMENTS
#define PAIR_PARAMS PART_PARAMS(first, FIRST_MATRIX), PART_PARAMS(second, SECOND_MATRIX)

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_pair_16(PAIR_ARGUMENTS) {
    linear_pair<1>(PAIR_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_pair_32(PAIR_ARGUMENTS) {
    linear_pair<2>(PAIR_PARAMS);
}
