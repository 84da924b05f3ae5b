#include "log.hpp"

#include <atomic>
#include <cstdio>

namespace trt_kvcache {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void log(nvinfer1::ILogger::Severity severity, std::string const& text) noexcept {
    nvinfer1::ILoggerFinder* const finder = logger_finder;
    nvinfer1::ILogger* const logger = finder ? finder->findLogger() : nullptr;
    if (logger) {
        logger->log(severity, text.c_str());
    } else {
        std::fprintf(stderr, "%s\n", text.c_str());  // TensorRT gave none, as where a program opens the library itself
    }
}

}  // namespace trt_kvcache
