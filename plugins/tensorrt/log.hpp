// Errors and warnings of the plugin, to the logger of TensorRT.
#pragma once

#include <NvInfer.h>

#include <exception>
#include <string>

namespace trt_kvcache {

void set_logger_finder(nvinfer1::ILoggerFinder* finder);
void log(nvinfer1::ILogger::Severity severity, std::string const& text) noexcept;

// Runs a method that TensorRT calls: no exception may reach it, so one is logged, and the method fails.
template <typename Result, typename Method>
Result reported(char const* name, Result failure, Method method) noexcept {
    try {
        return method();
    } catch (std::exception const& error) {
        log(nvinfer1::ILogger::Severity::kERROR, std::string("KVCacheAttention.") + name + ": " + error.what());
    } catch (...) {
        log(nvinfer1::ILogger::Severity::kERROR, std::string("KVCacheAttention.") + name + ": unknown error.");
    }
    return failure;
}

}  // namespace trt_kvcache
