// TensorRT's headers include this one of CUDA, for the type of a stream. The calls are those of examples/cpp, which
// runtime_stand_in.cpp defines.
#pragma once

#include <cstddef>

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };

extern "C" {
char const* cudaGetErrorString(cudaError_t);
cudaError_t cudaMalloc(void**, size_t);
cudaError_t cudaFree(void*);
cudaError_t cudaMemset(void*, int, size_t);
cudaError_t cudaMemcpyAsync(void*, void const*, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaStreamCreate(cudaStream_t*);
cudaError_t cudaStreamSynchronize(cudaStream_t);
}
