// Runs a grid of CUDA threads on the host. See simt.h.

#include <mutex>

#include "abi.h"
#include "block.h"

namespace simt {

namespace {

// Blocks take turns on these. To ThreadSanitizer the threads of one are always the same threads, so it sees a race between two
// blocks where their turns differ, and may miss it where they are equal.
const unsigned kTurns = 4;

}  // namespace

const char* run_grid(Extent grid, Extent size, size_t dynamic_nbytes, void (*kernel)(void** arguments), void** arguments) {
    static std::mutex one_at_a_time;
    static Block blocks[kTurns];
    static std::string error;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    error.clear();
    unsigned turn = 0;
    for (unsigned z = 0; z < grid.z && error.empty(); z++) {
        for (unsigned y = 0; y < grid.y && error.empty(); y++) {
            for (unsigned x = 0; x < grid.x && error.empty(); x++) {
                error = blocks[turn++ % kTurns].run(Extent{x, y, z}, grid, size, dynamic_nbytes, kernel, arguments);
            }
        }
    }
    for (Block& block : blocks) block.finish();
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace simt
