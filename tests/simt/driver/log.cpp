// The call log: what the tests look at to see that a step neither waits nor allocates.

#include <mutex>
#include <string>

#include "driver.h"

namespace {
std::mutex mutex;
std::string lines;
std::string copy;
}  // namespace

namespace standin {
void log_call(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    lines += name;
    lines += '\n';
}
}  // namespace standin

extern "C" void standin_clear_log() {
    std::lock_guard<std::mutex> lock(mutex);
    lines.clear();
}

// One name a line, in the order of the calls. Valid until the next call of this function.
extern "C" const char* standin_log() {
    std::lock_guard<std::mutex> lock(mutex);
    copy = lines;
    return copy.c_str();
}
