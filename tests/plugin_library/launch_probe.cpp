// The launches of an enqueue of the plugin library, over a driver that writes them down, for a test that compares them
// with those of Python.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "attention_call.hpp"

using namespace trt_kvcache;

namespace {

std::vector<std::string> names;  // of the kernels that were loaded; a kernel is its place in this list, from 1 on
std::vector<int32_t> shared_nbytes;
int64_t* written;        // what is to be written next
int64_t const* lengths;  // numbers of arguments of the launches to come

CUresult record_launch(CUlaunchConfig const* config, CUfunction function, void** arguments, void**) {
    bool cooperative = false, early = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        CUlaunchAttribute const& one = config->attrs[i];
        cooperative = cooperative || (one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && one.value.cooperative);
        early = early
                || (one.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                    && one.value.programmaticStreamSerializationAllowed);
    }
    auto const kernel = static_cast<int64_t>(reinterpret_cast<intptr_t>(function));
    bool const allowed = static_cast<int32_t>(config->sharedMemBytes) <= shared_nbytes[kernel - 1];
    for (int64_t const value : {kernel, int64_t{config->gridDimX}, int64_t{config->gridDimY}, int64_t{config->gridDimZ},
                                int64_t{config->blockDimX}, int64_t{config->sharedMemBytes}, int64_t{cooperative},
                                int64_t{early}, int64_t{allowed}}) {
        *written++ = value;
    }
    for (int64_t i = 0; i < *lengths; i++) std::memcpy(written++, arguments[i], sizeof(int64_t));
    lengths++;
    return CUDA_SUCCESS;
}

CUresult record_zeros(CUdeviceptr address, unsigned char value, size_t nbytes, CUstream) {
    for (int64_t const one : {static_cast<int64_t>(address), int64_t{value}, static_cast<int64_t>(nbytes)}) {
        *written++ = one;
    }
    return CUDA_SUCCESS;
}

}  // namespace

// These are defined here in place of cuda_driver.cpp.
namespace trt_kvcache {

CudaDriver::CudaDriver() {
    cuLaunchKernelEx = record_launch;
    cuMemsetD8Async = record_zeros;
}

CudaDriver const& CudaDriver::get() {
    static CudaDriver const driver;
    return driver;
}

void CudaDriver::check(CUresult, char const*) const {}

CUkernel load_kernel(Image const&, char const* name, CUdevice, int32_t nbytes) {
    names.push_back(name);
    shared_nbytes.push_back(nbytes);
    return reinterpret_cast<CUkernel>(names.size());
}

}  // namespace trt_kvcache

extern "C" {
__attribute__((visibility("default"))) int64_t launches_of(int32_t arch, char const* dtype,
                                                           AttentionAttributes const* attributes, int64_t const* sizes,
                                                           int32_t multiprocessors, AttentionAddresses const* addresses,
                                                           int64_t const* counts, int64_t* found) {
    names.clear();
    shared_nbytes.clear();
    AttentionSizes const given{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
    AttentionCall const call(*attributes, given, dtype, {0, arch, multiprocessors, 227 << 10});
    written = found;
    lengths = counts;
    call.run(*addresses, nullptr);
    return written - found;
}

__attribute__((visibility("default"))) char const* name_of_kernel(int64_t kernel) { return names[kernel - 1].c_str(); }
}
