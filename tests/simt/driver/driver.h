// What the parts of the stand-in driver share. See ../README.md.
#pragma once

#include <functional>

#include <cuda.h>

namespace standin {

// log.cpp
void log_call(const char* name);

// device.cpp
bool has_context();  // whether the calling thread has made the device current

// streams.cpp
using Work = std::function<void()>;
CUresult give(CUstream stream, Work work);  // run when the host waits for the stream, or capture
CUresult finish(CUstream stream);           // run what is pending
CUresult finish_all();
void fail(const char* message);  // from running work: every later wait reports it

}  // namespace standin

#define LOG_CALL() standin::log_call(__func__)

// The same, for calls that work in the current context.
#define LOG_CALL_IN_CONTEXT() \
    LOG_CALL(); \
    if (!standin::has_context()) return CUDA_ERROR_INVALID_CONTEXT
