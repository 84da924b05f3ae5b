// One block of threads: they take turns, each until it waits for others or ends. See simt.h for what kernels see of it.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "fiber.h"

namespace simt {

class Block;

// Up to 16 bytes of a value that lanes of a warp exchange.
struct Value {
    unsigned long long words[2];
};

struct AsyncCopy {
    void* to;
    const void* from;
    size_t nbytes;
    int group;
    bool unsure;  // others may be writing it
};

// What is added to registers when it has been waited for.
struct AsyncProduct {
    float* to;
    std::vector<float> values;
};

struct Thread {
    Extent index, block_index, block_size, grid_size;
    unsigned number = 0;  // in the block
    Block* block = nullptr;
    enum { kReady, kAtBarrier, kAtNamedBarrier, kInWarp, kEnded } state = kEnded;
    unsigned named_barrier = 0;  // at which it waits
    Fiber fiber;
    Value received = {};            // of the last exchange
    unsigned votes = 0;             // of the last ballot
    std::vector<AsyncCopy> copies;  // not done yet
    int copy_group = 0;
    std::vector<AsyncProduct> products;  // not added yet
    std::vector<size_t> product_groups;  // how many of them there are up to the end of each commit group
};

extern Thread* running;

// Memory that is there for one block, of the exact size, filled with NaN.
class SharedMemory {
public:
    void* array(const void* which, size_t nbytes);

private:
    struct Free {
        void operator()(void* start) const;
    };
    struct Array {
        const void* which;
        std::unique_ptr<unsigned char, Free> start;
    };
    std::list<Array> arrays_;  // which does not move, so nothing is freed by another thread than made it
};

// One launch after another, and some blocks of each, run on the same object: its threads keep their stacks.
class Block {
public:
    void start(Extent index, Extent grid, Extent size, size_t dynamic_nbytes, void (*kernel)(void**), void** arguments);
    // A turn for each thread that waits for none of its block. Returns whether one did more than look for what others
    // write.
    bool turn();
    bool ended() const { return live_ == 0; }
    // What went wrong; empty if nothing did.
    const std::string& error() const { return error_; }

    // After the last block of a launch: what the host does from here on comes after all that the threads did.
    void finish();

    // --- for the running thread ---

    // Waits for all threads of the block that have not ended; returns how many of them had a vote.
    unsigned barrier(bool vote);
    // Waits for `count` threads that meet at this number.
    void named_barrier(unsigned number, unsigned count);
    // Waits for the lanes of `mask`; returns what lane `wanted` offered.
    Value exchange(unsigned mask, Value offered, unsigned wanted, const char* what);
    // Waits for the lanes of `mask`; returns a bit for each that voted.
    unsigned ballot(unsigned mask, bool vote, const char* what);
    // Waits for the lanes of `mask`, and orders memory between them.
    void sync_warp(unsigned mask);
    // Lets all others have a turn.
    void look_again();
    // Waits for all lanes of the warp; `work` is done once, with what each of them brought.
    void together(void* mine, const char* what, void (*work)(void* const* lanes));

    void* shared_array(const void* which, size_t nbytes) { return shared_.back().array(which, nbytes); }
    void* dynamic_shared() { return shared_array(nullptr, dynamic_nbytes_); }

    // Ends the launch with an error.
    [[noreturn]] void fail(const std::string& what);

    void copy_async(void* to, const void* from, size_t nbytes, bool unsure = false);
    void commit_copies();
    void wait_for_copies(int groups_left);
    void product(float* to, const float* values, int count);
    void commit_products();
    void wait_for_products(size_t groups_in_flight);

private:
    // Lanes of one warp that wait for each other.
    struct Meeting {
        unsigned mask = 0, arrived = 0, votes = 0;
        const char* what = nullptr;
        Value offered[32];
        unsigned wanted[32];  // lanes
        void* brought[32];
        unsigned round = 0;
        char order[2];  // tags
    };

    // Some threads of the block that wait for each other.
    struct NamedBarrier {
        unsigned count = 0, arrived = 0, round = 0;
        char order[2];  // tags
    };

    static void thread_body(void* thread);
    // Returns whether this was the last one to come: the others go on after it.
    bool meet(unsigned mask, Value offered, unsigned wanted, bool vote, const char* what);
    void open_barrier_if_all_wait();
    void wait(decltype(Thread::state) why);

    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<Meeting> meetings_;  // 32 for each warp: by the lowest lane of the mask
    NamedBarrier named_[16];         // by their numbers; 0 is that of __syncthreads
    unsigned count_ = 0, live_ = 0, at_barrier_ = 0, votes_ = 0, barrier_result_ = 0;
    std::vector<SharedMemory> shared_;
    size_t dynamic_nbytes_ = 0;
    std::string error_;
    bool looked_ = false;  // the thread that runs, in vain
    void (*kernel_)(void**) = nullptr;
    void** arguments_ = nullptr;
    // Tags. Two that take turns where threads meet: who comes to the next meeting early must not be ordered before
    // those who have yet to leave this one.
    unsigned barrier_round_ = 0;
    char start_order_, barrier_order_[2], end_order_;
};

}  // namespace simt
