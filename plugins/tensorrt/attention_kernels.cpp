#include "attention_kernels.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "text.hpp"

namespace trt_kvcache {
namespace {

constexpr int32_t kJetsonOrin = 87;  // no other GPU of its major version runs its machine code, nor it theirs

// From worst to best.
enum Match { kNone, kPtx, kSameMajor, kExact };

std::string name_of(std::string const& dtype, int32_t head_dim, char const* kv_dtype) {
    return text_of(dtype, "-", head_dim, kv_dtype ? "-" : "", kv_dtype ? kv_dtype : "");
}

// Shared memory of the largest block: a GPU of another architecture may have less.
int32_t shared_nbytes_of(AttentionKernels const& kernels) {
    int32_t most = 0;
    for (size_t i = 0; i < std::size(kDecodeRows); i++) {
        bool const has_decode = i + 1 < std::size(kDecodeRows), has_few = kDecodeRows[i] <= kernels.few.max_rows;
        if (has_decode) most = std::max(most, kernels.decode.shared_nbytes[i]);
        if (has_few) most = std::max(most, kernels.few.shared_nbytes[i]);
    }
    for (PrefillTiles const& tiles : kernels.prefill) {
        most = std::max({most, tiles.shared_nbytes, tiles.spread_nbytes});
    }
    return most;
}

// All kernels of this library, in words.
std::string present_kernels() {
    std::string present;
    for (size_t i = 0; i < kNumAttentionKernels; i++) {
        AttentionKernels const& kernels = kAttentionKernels[i];
        std::string const name = name_of(kernels.dtype, kernels.head_dim, kernels.kv_dtype);
        present += text_of(present.empty() ? "" : ", ", name, " for sm_", kernels.arch, kernels.is_ptx ? " (PTX)" : "");
    }
    return present.empty() ? "none" : present;
}

constexpr char const* kHint = "Build it with them: make plugin-library ARCHS=... VARIANTS=...";

Match match(AttentionKernels const& kernels, int32_t arch, int32_t shared_nbytes) {
    if (kernels.arch == arch && !kernels.is_ptx) return kExact;
    if (kernels.arch > arch || shared_nbytes_of(kernels) > shared_nbytes) return kNone;
    if (kernels.is_ptx) return kPtx;
    bool const is_orin = arch == kJetsonOrin || kernels.arch == kJetsonOrin;
    return kernels.arch / 10 == arch / 10 && !is_orin ? kSameMajor : kNone;
}

}  // namespace

AttentionKernels const& find_kernels(int32_t arch, int32_t shared_nbytes, std::string const& dtype, int32_t head_dim,
                                     char const* kv_dtype) {
    std::string const wanted = name_of(dtype, head_dim, kv_dtype);
    AttentionKernels const* best = nullptr;
    std::pair<Match, int32_t> best_rank{kNone, 0};
    for (size_t i = 0; i < kNumAttentionKernels; i++) {
        AttentionKernels const& kernels = kAttentionKernels[i];
        std::string const name = name_of(kernels.dtype, kernels.head_dim, kernels.kv_dtype);
        std::pair<Match, int32_t> const rank{match(kernels, arch, shared_nbytes), kernels.arch};
        if (name != wanted || rank.first == kNone || rank <= best_rank) continue;
        best = &kernels;
        best_rank = rank;
    }
    if (best) return *best;
    throw_failure("kernels: expected ", wanted, " for sm_", arch, " in this library, got ", present_kernels(), ". ",
                  kHint);
}

std::string missing_kernels(std::string const& dtype, int32_t head_dim, char const* kv_dtype) {
    std::string const wanted = name_of(dtype, head_dim, kv_dtype);
    for (size_t i = 0; i < kNumAttentionKernels; i++) {
        AttentionKernels const& kernels = kAttentionKernels[i];
        if (name_of(kernels.dtype, kernels.head_dim, kernels.kv_dtype) == wanted) return "";
    }
    return text_of("kernels: expected ", wanted, " in this library, got ", present_kernels(),
                   ". An engine with it fails in its first step. ", kHint);
}

}  // namespace trt_kvcache
