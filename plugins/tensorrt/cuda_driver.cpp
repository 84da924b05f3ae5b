#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "text.hpp"

namespace trt_kvcache {
namespace {

constexpr int32_t kDefaultSharedNbytes = 48 * 1024;  // more must be allowed first

template <typename Function>
void find(void* library, char const* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function)
        throw_failure("libcuda.so.1: expected ", name, ", which a driver of CUDA 12 has, got an older driver.");
}

int attribute(CUdevice_attribute name, CUdevice device) {
    CudaDriver const& driver = CudaDriver::get();
    int value = 0;
    driver.check(driver.cuDeviceGetAttribute(&value, name, device), "cuDeviceGetAttribute");
    return value;
}

struct LoadedKernel {
    CUkernel kernel = nullptr;
    int32_t shared_nbytes = kDefaultSharedNbytes;  // allowed
};

// Modules that this process has loaded. One library serves all GPUs of its architecture; attributes are set for each GPU.
std::mutex mutex;
std::map<unsigned char const*, CUlibrary> libraries;
std::map<std::pair<CUlibrary, std::pair<std::string, CUdevice>>, LoadedKernel> kernels;

}  // namespace

// cuda.h defines some names as those of a later version (cuMemcpyDtoDAsync_v2): the library has these.
#define NAME_OF(function) #function
#define FIND(function) find(library, NAME_OF(function), function)

CudaDriver::CudaDriver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw_failure("libcuda.so.1: expected the driver of an NVIDIA GPU, got none (", dlerror(), ").");
    FIND(cuCtxGetDevice);
    FIND(cuDeviceGetAttribute);
    FIND(cuGetErrorName);
    FIND(cuKernelSetAttribute);
    FIND(cuLaunchKernelEx);
    FIND(cuLibraryGetKernel);
    FIND(cuLibraryLoadData);
    FIND(cuMemcpyDtoDAsync);
    FIND(cuMemsetD8Async);
}

CudaDriver const& CudaDriver::get() {
    static CudaDriver const driver;  // made again by the next call if it throws
    return driver;
}

void CudaDriver::check(CUresult result, char const* what) const {
    if (result == CUDA_SUCCESS) return;
    char const* name = nullptr;
    cuGetErrorName(result, &name);
    throw_failure(what, ": ", name ? name : "unknown error", ".");
}

Gpu current_gpu() {
    CudaDriver const& driver = CudaDriver::get();
    Gpu gpu{};
    driver.check(driver.cuCtxGetDevice(&gpu.device), "cuCtxGetDevice");
    gpu.arch = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu.device)
               + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu.device);
    gpu.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu.device);
    gpu.shared_nbytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, gpu.device);
    return gpu;
}

CUkernel load_kernel(Image const& image, char const* name, CUdevice device, int32_t shared_nbytes) {
    CudaDriver const& driver = CudaDriver::get();
    std::lock_guard<std::mutex> const lock(mutex);
    CUlibrary& library = libraries[image.code];
    if (!library)
        driver.check(driver.cuLibraryLoadData(&library, image.code, nullptr, nullptr, 0, nullptr, nullptr, 0),
                     text_of("cuLibraryLoadData: ", image.name).c_str());
    LoadedKernel& loaded = kernels[{library, {name, device}}];
    if (!loaded.kernel) driver.check(driver.cuLibraryGetKernel(&loaded.kernel, library, name), name);
    if (shared_nbytes > loaded.shared_nbytes) {
        driver.check(driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_nbytes,
                                                 loaded.kernel, device),
                     name);
        loaded.shared_nbytes = shared_nbytes;
    }
    return loaded.kernel;
}

}  // namespace trt_kvcache
