// What an object built for the emulator shows to the stand-in driver: one `simt_kernel_NAME` for each kernel.
#pragma once

#include <cstddef>

namespace simt {

struct Extent {
    unsigned x, y, z;
};

// Of the device: multiprocessors, and blocks that one of them runs at once.
const unsigned kMultiprocessors = 4, kBlocksOfOne = 3, kAtOnce = kMultiprocessors * kBlocksOfOne;

struct Kernel {
    size_t parameter_count;
    const size_t* parameter_sizes;
    // Runs the whole grid, block after block, or (cooperative) all blocks at once, at most kAtOnce. Returns what went
    // wrong, or null.
    const char* (*run)(Extent grid, Extent block, size_t shared_bytes, bool cooperative, void** arguments);
};

}  // namespace simt
