#include "log.hpp"

#include <atomic>
#include <cstdio>

using nvinfer1::ILogger;
using nvinfer1::ILoggerFinder;

namespace trt_kvcache {
namespace {

std::atomic<ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(ILoggerFinder* finder) { logger_finder = finder; }

void log(ILogger::Severity severity, std::string const& text) noexcept {
    ILoggerFinder* const finder = logger_finder;
    ILogger* const logger = finder ? finder->findLogger() : nullptr;
    if (logger) {
        logger->log(severity, text.c_str());
    } else {
        std::fprintf(stderr, "%s\n", text.c_str());  // there is no TensorRT, or it has no logger yet
    }
}

}  // namespace trt_kvcache
