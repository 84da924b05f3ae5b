// Inputs and outputs of KVCacheAttention: names, shapes, dtypes. As in trt_kvcache/trt/plugin/plugin_tensors.py.
#pragma once

#include <NvInfer.h>

#include <cstdint>
#include <vector>

#include "attention_attributes.hpp"

namespace trt_kvcache {

// Numbers are positions of the inputs up to the scales, which is all that outputs are like.
enum class Input : int32_t { kQ, kK, kV, kCache, kLengths, kKVScales, kCosSin, kNewLengths };

constexpr int32_t kMaxInputs = static_cast<int32_t>(Input::kNewLengths) + 1;

// Sizes of a tensor; kUnknown for one that is not known yet.
using Sizes = std::vector<int64_t>;
constexpr int64_t kUnknown = -1;

// Sizes that the shapes of the inputs give.
struct AttentionSizes {
    int64_t batch = kUnknown, width = kUnknown, tokens = kUnknown, positions = kUnknown, scales = kUnknown;
};

// An output has shape and dtype of an input, and maybe its address.
struct Output {
    Input like;
    bool aliased;
};

// The inputs in order: without cos_sin if RoPE is not applied; new_lengths is optional. Throws if the count is wrong.
std::vector<Input> inputs_of(AttentionAttributes const& attributes, int32_t count);
std::vector<Output> outputs_of(AttentionAttributes const& attributes);

// Checks the shapes of the inputs as far as they are known, in the order of inputs_of.
AttentionSizes check_shapes(AttentionAttributes const& attributes, std::vector<Sizes> const& shapes);

// Checks the dtypes of the inputs.
void check_dtypes(AttentionAttributes const& attributes, std::vector<nvinfer1::DataType> const& dtypes);

bool is_dtype_of_q(nvinfer1::DataType dtype);

// True if an input, or an output that is like it, has the right dtype, given that of q.
bool takes_dtype(Input input, AttentionAttributes const& attributes, nvinfer1::DataType dtype, nvinfer1::DataType q);

}  // namespace trt_kvcache
