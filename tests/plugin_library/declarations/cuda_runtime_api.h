// TensorRT's headers include this one of CUDA. All that the plugin interface takes from it is the type of a stream.
#pragma once

typedef struct CUstream_st* cudaStream_t;
