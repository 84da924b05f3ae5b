// Registers the creators when the library is opened: for programs that open it without TensorRT's registry.
//
// Polygraphy and Triton do. A registry that opens a library itself refuses creators that are there already, so this is
// in a second library.
#include <NvInfer.h>

#include <cstdint>

#include "creators.hpp"
#include "log.hpp"

namespace {

struct Registration {
    Registration() {
        int32_t count = 0;
        nvinfer1::IPluginCreatorInterface* const* const creators = trt_kvcache::creators(count);
        for (int32_t i = 0; i < count; i++) {
            auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
            if (!getPluginRegistry()->registerCreator(*creator, creator->getPluginNamespace())) {
                trt_kvcache::log(
                    nvinfer1::ILogger::Severity::kERROR,
                    "KVCacheAttention: expected none in the registry when this library registers it, got one.");
            }
        }
    }
};

Registration const registration;

}  // namespace
