// Runs a grid of CUDA threads on the host. See simt.h.

#include <mutex>
#include <string>

#include "abi.h"
#include "block.h"

namespace simt {

namespace {

// Blocks that run one after another take turns on so many. To ThreadSanitizer the threads of one are always the same
// threads, so it sees a race between two blocks where their turns differ, and may miss it where they are equal.
const unsigned kTurns = 4;

// Rounds of turns in which all looked in vain, after which they would for ever.
const int kInVain = 8;

// Runs some blocks at once, to their end. Returns what went wrong; empty if nothing did.
std::string run_blocks(Block* first, unsigned count) {
    for (int in_vain = 0; in_vain < kInVain; in_vain++) {
        bool ended = true;
        for (Block* block = first; block < first + count; block++) {
            if (block->turn()) in_vain = 0;
            if (!block->error().empty()) return block->error();
            ended = ended && block->ended();
        }
        if (ended) return "";
    }
    return "a block waits for what no block that runs will write";
}

}  // namespace

const char* run_grid(Extent grid, Extent size, size_t dynamic_nbytes, bool cooperative,
                     void (*kernel)(void** arguments), void** arguments) {
    static Block blocks[kAtOnce];
    static std::mutex one_at_a_time;
    static std::string error;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    error.clear();
    const size_t count = static_cast<size_t>(grid.x) * grid.y * grid.z;
    for (size_t number = 0; number < count && error.empty(); number++) {
        const Extent index{static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                           static_cast<unsigned>(number / grid.x / grid.y)};
        Block& block = blocks[number % (cooperative ? kAtOnce : kTurns)];
        block.start(index, grid, size, dynamic_nbytes, kernel, arguments);
        if (!cooperative) error = run_blocks(&block, 1);
    }
    if (cooperative) error = run_blocks(blocks, static_cast<unsigned>(count));
    for (Block& block : blocks) block.finish();
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace simt
