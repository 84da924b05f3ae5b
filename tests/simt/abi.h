// What an object built for the emulator shows to the stand-in driver: one `simt_kernel_NAME` for each kernel.
#pragma once

#include <cstddef>

namespace simt {

struct Extent {
    unsigned x, y, z;
};

struct Kernel {
    size_t parameter_count;
    const size_t* parameter_sizes;
    // Runs the whole grid. Returns what went wrong, or null.
    const char* (*run)(Extent grid, Extent block, size_t shared_bytes, void** arguments);
};

}  // namespace simt
