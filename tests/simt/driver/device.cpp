// One device and its one context: they hold nothing, and are there so that cuda.core finds them.

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "../abi.h"
#include "driver.h"

namespace {
const int kDeviceCount = 1;
const CUcontext kContext = reinterpret_cast<CUcontext>(0x1000);
// An architecture that no GPU has, so that an object built for the emulator and a real cubin are never taken for each
// other.
const int kComputeCapabilityMajor = 99, kComputeCapabilityMinor = 0;
thread_local std::vector<CUcontext> stack;  // the last one is current

bool pools = true;

int attribute(CUdevice_attribute name) {
    switch (name) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return kComputeCapabilityMajor;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return kComputeCapabilityMinor;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return simt::kMultiprocessors;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 << 10;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return pools;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
        default: return 0;
    }
}
}  // namespace

namespace standin {
bool has_context() { return !stack.empty() && stack.back() == kContext; }
}  // namespace standin

extern "C" {

// For the tests: a device without memory pools.
void standin_take_pools_away() { pools = false; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
    *version = 13020;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    *count = kDeviceCount;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (ordinal < 0 || ordinal >= kDeviceCount) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice) {
    std::strncpy(name, "stand-in", size);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice) {
    *value = attribute(name);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = kContext;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = stack.empty() ? nullptr : stack.back();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!stack.empty()) stack.pop_back();
    stack.push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    stack.push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack.back();
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    if (!standin::has_context()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) {
    switch (error) {
#define NAMED(value) \
    case value: *text = #value; break;
        NAMED(CUDA_SUCCESS)
        NAMED(CUDA_ERROR_INVALID_VALUE)
        NAMED(CUDA_ERROR_OUT_OF_MEMORY)
        NAMED(CUDA_ERROR_INVALID_CONTEXT)
        NAMED(CUDA_ERROR_INVALID_DEVICE)
        NAMED(CUDA_ERROR_INVALID_IMAGE)
        NAMED(CUDA_ERROR_NO_BINARY_FOR_GPU)
        NAMED(CUDA_ERROR_NOT_FOUND)
        NAMED(CUDA_ERROR_NOT_READY)
        NAMED(CUDA_ERROR_LAUNCH_FAILED)
        NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
#undef NAMED
        default: *text = "CUDA_ERROR_UNKNOWN";
    }
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

// NVRTC looks here, and does without.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

// The functions that this driver has. What it lacks is "not found" to cuda.bindings, which then raises by name.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
    static void* self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *function = nullptr;
    for (const char* suffix : {"_v3", "_v2", ""}) {
        if (!*function) *function = dlsym(self, (std::string(symbol) + suffix).c_str());
    }
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
