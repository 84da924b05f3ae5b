// The launches of one enqueue: planned when shapes change, then run at the addresses that TensorRT gives.
//
// trt_kvcache/trt/plugin/enqueue.py and trt_kvcache/kernels/attention_kernels.py do the same.
#pragma once

#include <cuda.h>

#include <string>

#include "attention_attributes.hpp"
#include "cuda_driver.hpp"
#include "launch_plan.hpp"
#include "plugin_tensors.hpp"

namespace trt_kvcache {

// Addresses of all tensors of a call; null for those that are not there.
struct AttentionAddresses {
    void const *q, *k, *v;
    void* cache;
    void const* lengths;
    void* kv_scales;
    void const *cos_sin, *new_lengths;
    void *out, *workspace;
};

class AttentionCall {
public:
    // Plans the launches for a GPU, and loads the kernels.
    AttentionCall(AttentionAttributes const& attributes, AttentionSizes const& sizes, char const* dtype,
                  Gpu const& gpu);

    // Launches the kernels: neither waits nor allocates, and can be captured in a graph.
    void run(AttentionAddresses const& addresses, CUstream stream) const;

    // True if the driver compiled the kernels, for lack of machine code.
    bool is_ptx() const { return kernels_->is_ptx; }

    // Bytes of a tensor that is updated in place.
    int64_t nbytes_of(Input input) const;

private:
    struct Launch {
        CUkernel kernel = nullptr;
        unsigned grid_x = 0, grid_y = 1, threads = 0, shared_nbytes = 0;
        bool cooperative = false;
    };

    CUkernel load(unsigned char const* code, char const* name, Gpu const& gpu, int32_t shared_nbytes) const;
    void plan_decode_launch(DecodePlan const& plan, Gpu const& gpu);
    void plan_prefill_launches(PrefillPlan const& plan, Gpu const& gpu);
    void decode(AttentionAddresses const& addresses, CUstream stream) const;
    void append(AttentionAddresses const& addresses, CUstream stream) const;
    void prefill(AttentionAddresses const& addresses, CUstream stream) const;
    void launch(Launch const& launch, void** arguments, CUstream stream) const;

    AttentionAttributes attributes_;
    AttentionShape shape_;
    AttentionKernels const* kernels_;
    int64_t slot_nbytes_, kv_nbytes_;  // of the cache
    int64_t slot_scales_;              // scales by token of a slot
    int64_t flagged_nbytes_;           // of the workspace, to be zeros before a launch
    int64_t own_partials_;             // bytes from the start of the workspace
    bool is_decode_;
    DecodePlan decode_plan_{};
    PrefillPlan prefill_plan_{};
    Launch main_, append_;
};

}  // namespace trt_kvcache
