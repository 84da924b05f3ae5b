#include "attention_kernels.hpp"

#include "text.hpp"

namespace trt_kvcache {
namespace {

std::string name_of(std::string const& dtype, int32_t head_dim, char const* kv_dtype) {
    return text_of(dtype, "-", head_dim, kv_dtype ? "-" : "", kv_dtype ? kv_dtype : "");
}

}  // namespace

AttentionKernels const& find_kernels(std::string const& arch, std::string const& dtype, int32_t head_dim,
                                     char const* kv_dtype) {
    std::string const wanted = name_of(dtype, head_dim, kv_dtype);
    std::string present;
    for (size_t i = 0; i < kNumAttentionKernels; i++) {
        AttentionKernels const& kernels = kAttentionKernels[i];
        std::string const name = name_of(kernels.dtype, kernels.head_dim, kernels.kv_dtype);
        if (kernels.arch == arch && name == wanted) return kernels;
        present += text_of(present.empty() ? "" : ", ", name, " for ", kernels.arch);
    }
    throw_failure("kernels: expected ", wanted, " for ", arch, " in this library, got ",
                  present.empty() ? "none" : present,
                  ". Build it with them: make plugin-library ARCHS=... VARIANTS=...");
}

}  // namespace trt_kvcache
