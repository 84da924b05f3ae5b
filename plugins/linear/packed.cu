// Products of a few rows with a matrix of weights in 4 or 8 bits, and those weights as elements. Launched by
// trt_kvcache/kernels/packed_linear_kernels.py.
//
// The loads, the overlap with the launch before and the distribution over blocks and warps are those of linear.cu. The
// weights become elements in registers (linear/packed_values.cuh), which the tensor cores multiply.

#include "linear/packed_stream.cuh"
#include "linear/packed_values.cuh"

#define PACKED_ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, \
        const unsigned char *zero_points, const unsigned short *bias, void *out, long long rows, long long outputs, \
        long long inputs, long long tiles, long long tile_outputs, long long prefetched_steps, long long out_stride, \
        long long groups, long long group_shift, long long scale_pairs
#define PACKED_MATRIX \
    { \
        { \
            values, scales, zero_points, fragments_of(inputs), static_cast<int>(groups), \
                static_cast<int>(group_shift), static_cast<int>(scale_pairs) \
        } \
    }
#define PACKED_PARAMS \
    {{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), \
      static_cast<int>(tiles), static_cast<int>(tile_outputs), static_cast<int>(prefetched_steps)}, \
     static_cast<int>(out_stride), \
     PACKED_MATRIX}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, GroupedMatrix<false>>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, GroupedMatrix<false>>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_float32_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, GroupedMatrix<false>>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_float32_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, GroupedMatrix<false>>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_silu_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, GroupedMatrix<false>>, true, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_linear_gelu_tanh_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, GroupedMatrix<false>>, true, unsigned short, GeluTanh>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, GroupedMatrix<true>>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, GroupedMatrix<true>>, false, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_float32_16(PACKED_ARGUMENTS) {
    linear<PackedStream<1, false, GroupedMatrix<true>>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_float32_32(PACKED_ARGUMENTS) {
    linear<PackedStream<2, false, GroupedMatrix<true>>, false, float>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_silu_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, GroupedMatrix<true>>, true, unsigned short>(PACKED_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_linear_gelu_tanh_mul(PACKED_ARGUMENTS) {
    linear<PackedStream<2, true, GroupedMatrix<true>>, true, unsigned short, GeluTanh>(PACKED_PARAMS);
}

#define DEQUANTIZE_ARGUMENTS \
    const unsigned char *values, const unsigned char *scales, const unsigned char *zero_points, unsigned short *out, \
        long long outputs, long long inputs, long long groups, long long group_shift, long long scale_pairs, \
        long long first_tile

extern "C" __global__ void __launch_bounds__(kThreads) packed_dequantize(DEQUANTIZE_ARGUMENTS) {
    dequantize<GroupedMatrix<false>>(PACKED_MATRIX, out, outputs, inputs, first_tile);
}

extern "C" __global__ void __launch_bounds__(kThreads) packed_zero_points_dequantize(DEQUANTIZE_ARGUMENTS) {
    dequantize<GroupedMatrix<true>>(PACKED_MATRIX, out, outputs, inputs, first_tile);
}
