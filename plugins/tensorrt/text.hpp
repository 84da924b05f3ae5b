// Errors whose text is made of parts. The text follows the package's form: "object: expected ..., got ....".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace trt_kvcache {

template <typename... Parts>
std::string text_of(Parts const&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

// Something that was given does not fit.
template <typename... Parts>
[[noreturn]] void throw_invalid(Parts const&... parts) {
    throw std::invalid_argument(text_of(parts...));
}

// Something failed that was given rightly: the driver, or a GPU that this library has no kernels for.
template <typename... Parts>
[[noreturn]] void throw_failure(Parts const&... parts) {
    throw std::runtime_error(text_of(parts...));
}

}  // namespace trt_kvcache
