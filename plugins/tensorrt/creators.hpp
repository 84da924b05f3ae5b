// The creators of this library. Not getCreators, which another plugin library of the process may have, too.
#pragma once

#include <NvInfer.h>

#include <cstdint>

namespace trt_kvcache {

nvinfer1::IPluginCreatorInterface* const* creators(int32_t& count);

}  // namespace trt_kvcache
