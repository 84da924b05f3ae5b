// CUDA's driver API, opened when it is first needed: engines are built on machines without a GPU, too.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

namespace trt_kvcache {

class CudaDriver {
public:
    // The driver of this process. Throws if there is none.
    static CudaDriver const& get();

    // Throws if a call failed.
    void check(CUresult result, char const* what) const;

    decltype(&::cuCtxGetDevice) cuCtxGetDevice;
    decltype(&::cuDeviceGetAttribute) cuDeviceGetAttribute;
    decltype(&::cuGetErrorName) cuGetErrorName;
    decltype(&::cuKernelSetAttribute) cuKernelSetAttribute;
    decltype(&::cuLaunchKernelEx) cuLaunchKernelEx;
    decltype(&::cuLibraryGetKernel) cuLibraryGetKernel;
    decltype(&::cuLibraryLoadData) cuLibraryLoadData;
    decltype(&::cuMemcpyDtoDAsync) cuMemcpyDtoDAsync;
    decltype(&::cuMemsetD8Async) cuMemsetD8Async;

private:
    CudaDriver();
};

// The GPU that is current in this thread; TensorRT makes the engine's current.
struct Gpu {
    CUdevice device;
    int32_t arch;  // 89 of compute capability 8.9
    int32_t multiprocessors;
    int32_t shared_nbytes;  // that a block may have
};
Gpu current_gpu();

// Machine code, or PTX, which the driver compiles when it is loaded.
struct Image {
    unsigned char const* code;
    std::string name;  // for an error
};

// A kernel of an image. It stays loaded until the process ends. A block may have at least this much shared memory.
CUkernel load_kernel(Image const& image, char const* name, CUdevice device, int32_t shared_nbytes);

}  // namespace trt_kvcache
