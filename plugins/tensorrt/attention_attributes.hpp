// The attributes of KVCacheAttention, checked, and as plugin fields: as in trt_kvcache/ops/attention_attributes.py.
#pragma once

#include <NvInfer.h>

#include <cstdint>
#include <vector>

namespace trt_kvcache {

// Values of the fields kv_dtype and kv_scales of version 2; 0: not given, K and V have the dtype of q.
enum KVDtype : int32_t { kFloat8 = 1, kInt8 = 2 };
enum KVScales : int32_t { kPerHead = 1, kPerToken = 2 };

struct AttentionAttributes {
    int32_t num_heads = 0;  // 1 to 16 query heads share a K/V head
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;    // 64, 80, 96, 128, 256 or 512
    double scale = 0;        // of the scores q k; 0: 1 / sqrt(head_dim)
    int32_t window = 0;      // tokens that a token attends to, itself included; 0: all
    double softcap = 0;      // 0: none
    int32_t rotary_dim = 0;  // elements of a row that RoPE is applied to, a multiple of 4; 0: none
    int32_t kv_dtype = 0;    // KVDtype
    int32_t kv_scales = 0;   // KVScales

    // Reads and checks the fields of a version. Throws std::invalid_argument.
    static AttentionAttributes from_fields(nvinfer1::PluginFieldCollection const& fields, bool quantized);

    bool quantized() const { return kv_dtype != 0; }
    // The dtype of K and V; null for that of q.
    char const* stored_dtype() const {
        return kv_dtype == kFloat8 ? "float8_e4m3fn" : kv_dtype == kInt8 ? "int8" : nullptr;
    }
    int32_t group() const { return num_heads / num_kv_heads; }
    double score_scale() const;
    // Fields that point into this object.
    std::vector<nvinfer1::PluginField> fields() const;
};

// Names and types of the fields of a version, without data.
std::vector<nvinfer1::PluginField> field_names(bool quantized);

}  // namespace trt_kvcache
