// KVCacheAttention: attention over a combined cache as a plugin layer. plugins/README.md has its inputs and outputs.
//
// The same plugin as in trt_kvcache/trt/plugin: same name, versions, fields and stored bytes.
#pragma once

#include <NvInfer.h>

#include <optional>
#include <vector>

#include "attention_attributes.hpp"
#include "attention_call.hpp"
#include "plugin_tensors.hpp"

namespace trt_kvcache {

constexpr char const *kPluginName = "KVCacheAttention", *kPluginNamespace = "trt_kvcache";
constexpr char const *kPluginVersion = "1", *kQuantizedVersion = "2";

class KVCacheAttention final : public nvinfer1::IPluginV3,
                               public nvinfer1::IPluginV3OneCore,
                               public nvinfer1::IPluginV3OneBuildV2,
                               public nvinfer1::IPluginV3OneRuntime {
public:
    explicit KVCacheAttention(AttentionAttributes const& attributes);

    // IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // IPluginV3OneCore
    nvinfer1::AsciiChar const* getPluginName() const noexcept override { return kPluginName; }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

    // IPluginV3OneBuildV2
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs_.size()); }
    int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t num_outputs, nvinfer1::DataType const* input_types,
                               int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                            nvinfer1::DimsExprs const* shape_inputs, int32_t num_shape_inputs,
                            nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const* outputs,
                            int32_t num_outputs) const noexcept override;

    // IPluginV3OneRuntime
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
                          nvinfer1::PluginTensorDesc const* outputs, int32_t num_outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &stored_fields_; }

private:
    // Shapes that onShapeChange was given.
    struct Shapes {
        std::vector<Input> inputs;
        AttentionSizes sizes;
        char const* dtype;
    };

    AttentionAttributes const attributes_;
    std::vector<Output> const outputs_;
    std::vector<nvinfer1::PluginField> const fields_;  // they point into attributes_
    nvinfer1::PluginFieldCollection const stored_fields_;
    std::optional<Shapes> shapes_;
    std::optional<AttentionCall> call_;  // for these shapes, planned by the first enqueue
};

}  // namespace trt_kvcache
