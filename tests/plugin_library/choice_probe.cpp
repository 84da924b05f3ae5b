// The kernels that the plugin library chooses for a GPU, for a test.
#include <cstring>
#include <exception>

#include "attention_kernels.hpp"

using namespace trt_kvcache;

// Returns the architecture of the kernels, negative for PTX; 0, and the error as text, if there are none.
extern "C" __attribute__((visibility("default"))) int32_t choice_of(int32_t arch, int32_t shared_nbytes,
                                                                    char const* dtype, int32_t head_dim,
                                                                    char const* kv_dtype, char* error, size_t room) {
    try {
        AttentionKernels const& kernels = find_kernels(arch, shared_nbytes, dtype, head_dim, kv_dtype);
        return kernels.is_ptx ? -kernels.arch : kernels.arch;
    } catch (std::exception const& refused) {
        std::strncpy(error, refused.what(), room - 1);
        return 0;
    }
}
