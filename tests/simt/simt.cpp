// Runs a grid of CUDA threads on the host. See simt.h.

#include "simt.h"

namespace simt {

thread_local Thread* running = nullptr;

namespace {

template <class Body>
void for_each(Extent size, Body body) {
    for (unsigned z = 0; z < size.z; z++) {
        for (unsigned y = 0; y < size.y; y++) {
            for (unsigned x = 0; x < size.x; x++) body(Extent{x, y, z});
        }
    }
}

}  // namespace

const char* run_grid(Extent grid, Extent block, void (*kernel)(void** arguments), void** arguments) {
    for_each(grid, [&](Extent block_index) {
        for_each(block, [&](Extent thread_index) {
            Thread thread{thread_index, block_index, block, grid};
            running = &thread;
            kernel(arguments);
        });
    });
    running = nullptr;
    return nullptr;
}

}  // namespace simt
