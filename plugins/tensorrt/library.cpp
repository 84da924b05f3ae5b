// The functions that TensorRT looks up in a plugin library: one returns its creators, one takes the logger.
#include <NvInfer.h>

#include <iterator>
#include <vector>

#include "attention_attributes.hpp"
#include "creators.hpp"
#include "kv_cache_attention.hpp"
#include "log.hpp"

using namespace nvinfer1;

namespace trt_kvcache {
namespace {

// Makes the plugin of one version: for a network, and for an engine that is deserialised.
class KVCacheAttentionCreator final : public IPluginCreatorV3One {
public:
    explicit KVCacheAttentionCreator(bool quantized)
        : quantized_(quantized), fields_(trt_kvcache::field_names(quantized)),
          field_names_{static_cast<int32_t>(fields_.size()), fields_.data()} {}

    AsciiChar const* getPluginName() const noexcept override { return kPluginName; }
    AsciiChar const* getPluginVersion() const noexcept override {
        return quantized_ ? kQuantizedVersion : kPluginVersion;
    }
    AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    PluginFieldCollection const* getFieldNames() noexcept override { return &field_names_; }
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override {
        return reported<IPluginV3*>("createPlugin", nullptr, [&] {
            return new KVCacheAttention(AttentionAttributes::from_fields(*fields, quantized_));
        });
    }

private:
    bool const quantized_;
    std::vector<PluginField> const fields_;
    PluginFieldCollection const field_names_;
};

}  // namespace

IPluginCreatorInterface* const* creators(int32_t& count) {
    static KVCacheAttentionCreator plain(false), quantized(true);
    static IPluginCreatorInterface* const all[] = {&plain, &quantized};
    count = static_cast<int32_t>(std::size(all));
    return all;
}

}  // namespace trt_kvcache

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED IPluginCreatorInterface* const* getCreators(int32_t& count) { return trt_kvcache::creators(count); }

EXPORTED void setLoggerFinder(ILoggerFinder* finder) { trt_kvcache::set_logger_finder(finder); }
