// The kernels of packed.cu for weights in super-blocks (linear/super_block_values.cuh). Launched by
// trt_kvcache/kernels/packed_linear_kernels.py.

#include "linear/packed_stream.cuh"
#include "linear/super_block_values.cuh"

#define SUPER_BLOCK_ARGUMENTS \
    const unsigned char *x, const unsigned char *values, const unsigned char *scales, const unsigned char *factors, \
        const unsigned short *bias, void *out, long long rows, long long outputs, long long inputs, long long tiles, \
        long long tile_outputs, long long prefetched_steps, long long out_stride
#define SUPER_BLOCK_MATRIX {values, scales, factors, fragments_of(inputs)}
#define SUPER_BLOCK_PARAMS \
    {{x, bias, out, static_cast<int>(rows), static_cast<int>(outputs), static_cast<int>(inputs), \
      static_cast<int>(tiles), static_cast<int>(tile_outputs), static_cast<int>(prefetched_steps)}, \
     static_cast<int>(out_stride), \
     SUPER_BLOCK_MATRIX}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_16(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<1, false, SuperBlockMatrix<STORED>>, false, unsigned short>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_32(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<2, false, SuperBlockMatrix<STORED>>, false, unsigned short>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_float32_16(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<1, false, SuperBlockMatrix<STORED>>, false, float>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_float32_32(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<2, false, SuperBlockMatrix<STORED>>, false, float>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_silu_mul(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<2, true, SuperBlockMatrix<STORED>>, true, unsigned short>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads) super_blocks_linear_gelu_tanh_mul(SUPER_BLOCK_ARGUMENTS) {
    linear<PackedStream<2, true, SuperBlockMatrix<STORED>>, true, unsigned short, GeluTanh>(SUPER_BLOCK_PARAMS);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    super_blocks_dequantize(const unsigned char* values, const unsigned char* scales, const unsigned char* factors,
                            unsigned short* out, long long outputs, long long inputs, long long first_tile) {
    dequantize<SuperBlockMatrix<STORED>>(SUPER_BLOCK_MATRIX, out, outputs, inputs, first_tile);
}
