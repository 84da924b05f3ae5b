// The threads of a block. See block.h.

#include "block.h"

#include <cstdlib>
#include <cstring>

#include "sanitizers.h"

namespace simt {

Thread* running = nullptr;

// --- shared memory ---

void SharedMemory::Free::operator()(void* start) const { std::free(start); }

void* SharedMemory::array(const void* which, size_t nbytes) {
    for (const Array& array : arrays_) {
        if (array.which != which) continue;
        acquire(array.start.get());  // it was made before: nothing else is ordered
        return array.start.get();
    }
    void* start = nullptr;
    if (posix_memalign(&start, 1024, nbytes)) std::abort();
    auto* bytes = static_cast<volatile unsigned char*>(start);
    // memset would count as the work of the thread that came first
    for (size_t i = 0; i < nbytes; i++) bytes[i] = 0xFF;
    arrays_.push_back(Array{which, std::unique_ptr<unsigned char, Free>(static_cast<unsigned char*>(start))});
    release(start);
    return start;
}

// --- running ---

void Block::start(Extent index, Extent grid, Extent size, size_t dynamic_nbytes, void (*kernel)(void**),
                  void** arguments) {
    count_ = live_ = size.x * size.y * size.z;
    at_barrier_ = votes_ = 0;
    error_.clear();
    meetings_.assign((count_ + 31) / 32 * 32, Meeting{});
    for (NamedBarrier& barrier : named_) barrier.count = barrier.arrived = 0;
    // Under ThreadSanitizer it is kept until the launch is over: else another block's would be found at the same
    // address, and blocks are not ordered.
    if (!__tsan_create_fiber) shared_.clear();
    shared_.emplace_back();
    release(&start_order_);
    dynamic_nbytes_ = dynamic_nbytes;
    if (dynamic_nbytes) dynamic_shared();
    kernel_ = kernel;
    arguments_ = arguments;
    while (threads_.size() < count_) threads_.push_back(std::make_unique<Thread>());
    for (unsigned number = 0; number < count_; number++) {
        Thread& thread = *threads_[number];
        thread.index = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
        thread.block_index = index;
        thread.block_size = size;
        thread.grid_size = grid;
        thread.number = number;
        thread.block = this;
        thread.state = Thread::kReady;
        thread.copies.clear();
        thread.copy_group = 0;
        thread.products.clear();
        thread.product_groups.clear();
        thread.fiber.start(thread_body, &thread);
    }
}

bool Block::turn() {
    bool ran = false, moved = false;
    // The last thread comes first: whoever relies on lower threads to have done something reads what is not there yet.
    for (unsigned number = count_; number-- > 0 && error_.empty();) {
        Thread& thread = *threads_[number];
        if (thread.state != Thread::kReady) continue;
        ran = true;
        looked_ = false;
        running = &thread;
        thread.fiber.enter();
        running = nullptr;
        moved = moved || !looked_;
    }
    if (live_ && !ran && error_.empty()) {
        unsigned at_named = 0;
        for (unsigned number = 0; number < count_; number++)
            at_named += threads_[number]->state == Thread::kAtNamedBarrier;
        error_ = "deadlock: of " + std::to_string(count_) + " threads, " + std::to_string(at_barrier_)
                 + " wait at __syncthreads, "
                 + (at_named ? std::to_string(at_named) + " at a barrier of some threads, " : "")
                 + std::to_string(live_ - at_barrier_ - at_named)
                 + " for lanes of their warp, and the others have ended";
    }
    return moved;
}

void Block::look_again() {
    looked_ = true;
    running->fiber.leave();
}

void Block::finish() {
    acquire(&end_order_);
    shared_.clear();
    // ThreadSanitizer has room for 8128 threads, and each kernel that was built alone has threads of its own. New threads
    // take most of the time of short kernels, so a process of few kernels may keep them.
    static const bool keeps_threads = std::getenv("SIMT_KEEP_THREADS");
    if (__tsan_destroy_fiber && !keeps_threads) threads_.clear();
}

void Block::thread_body(void* argument) {
    Thread& thread = *static_cast<Thread*>(argument);
    Block& block = *thread.block;
    acquire(&block.start_order_);
    block.kernel_(block.arguments_);
    if (!thread.copies.empty()) block.fail("a thread ended without waiting for its asynchronous copies");
    if (!thread.products.empty()) block.fail("a thread ended without waiting for its asynchronous products");
    release(&block.end_order_);
    block.live_--;
    block.open_barrier_if_all_wait();
    block.wait(Thread::kEnded);
}

void Block::wait(decltype(Thread::state) why) {
    running->state = why;
    running->fiber.leave();
}

void Block::fail(const std::string& what) {
    const Extent block = running->block_index;
    error_ = what + " (block " + std::to_string(block.x) + "," + std::to_string(block.y) + "," + std::to_string(block.z)
             + ", thread " + std::to_string(running->number) + ")";
    running->fiber.leave();  // for ever
    std::abort();
}

// --- waiting for the block ---

unsigned Block::barrier(bool vote) {
    char* order = &barrier_order_[barrier_round_ % 2];
    release(order);
    at_barrier_++;
    votes_ += vote;
    running->state = Thread::kAtBarrier;
    open_barrier_if_all_wait();
    running->fiber.leave();
    acquire(order);
    return barrier_result_;
}

void Block::open_barrier_if_all_wait() {
    if (at_barrier_ == 0 || at_barrier_ != live_) return;
    barrier_round_++;
    barrier_result_ = votes_;
    at_barrier_ = votes_ = 0;
    for (unsigned number = 0; number < count_; number++) {
        Thread& thread = *threads_[number];
        if (thread.state == Thread::kAtBarrier) thread.state = Thread::kReady;
    }
}

void Block::named_barrier(unsigned number, unsigned count) {
    if (number < 1 || number > 15 || count % 32) fail("bar.sync: expected a number from 1 to 15 and whole warps");
    NamedBarrier& barrier = named_[number];
    if (barrier.arrived == 0) barrier.count = count;
    if (barrier.count != count) fail("threads meet at one barrier with different counts");
    char* order = &barrier.order[barrier.round % 2];
    release(order);
    if (++barrier.arrived < count) {
        running->named_barrier = number;
        wait(Thread::kAtNamedBarrier);
    } else {
        barrier.arrived = 0;
        barrier.round++;
        for (unsigned other = 0; other < count_; other++) {
            Thread& thread = *threads_[other];
            if (thread.state == Thread::kAtNamedBarrier && thread.named_barrier == number)
                thread.state = Thread::kReady;
        }
    }
    acquire(order);
}

// --- waiting for lanes of the warp ---

bool Block::meet(unsigned mask, Value offered, unsigned wanted, bool vote, const char* what) {
    const unsigned lane = running->number % 32, first = running->number - lane;
    if (!(mask >> lane & 1)) fail(std::string(what) + ": the calling lane is not in its mask");
    Meeting& meeting = meetings_[first + __builtin_ctz(mask)];
    if (!meeting.arrived) {
        meeting.mask = mask;
        meeting.what = what;
        meeting.votes = 0;
    } else if (meeting.mask != mask || std::strcmp(meeting.what, what) != 0) {
        fail(std::string("lanes of one warp meet in different operations: ") + meeting.what + " and " + what);
    }
    meeting.offered[lane] = offered;
    meeting.wanted[lane] = wanted;
    meeting.votes |= static_cast<unsigned>(vote) << lane;
    meeting.arrived |= 1u << lane;
    if (meeting.arrived != mask) {
        wait(Thread::kInWarp);
        return false;
    }
    // The last one to come serves all.
    meeting.round++;
    meeting.arrived = 0;
    for (unsigned other = 0; other < 32 && first + other < count_; other++) {
        if (!(mask >> other & 1)) continue;
        Thread& thread = *threads_[first + other];
        const unsigned source = meeting.wanted[other];
        // A lane outside the mask offers nothing: NaN.
        thread.received = mask >> source & 1 ? meeting.offered[source] : Value{{~0ull, ~0ull}};
        thread.votes = meeting.votes;
        thread.state = Thread::kReady;
    }
    return true;
}

Value Block::exchange(unsigned mask, Value offered, unsigned wanted, const char* what) {
    meet(mask, offered, wanted, false, what);
    return running->received;
}

unsigned Block::ballot(unsigned mask, bool vote, const char* what) {
    meet(mask, Value{}, 0, vote, what);
    return running->votes;
}

void Block::sync_warp(unsigned mask) {
    Meeting& meeting = meetings_[running->number / 32 * 32 + __builtin_ctz(mask)];
    char* order = &meeting.order[meeting.round % 2];
    release(order);
    meet(mask, Value{}, 0, false, "__syncwarp");
    acquire(order);
}

void Block::together(void* mine, const char* what, void (*work)(void* const* lanes)) {
    Meeting& meeting = meetings_[running->number / 32 * 32];
    meeting.brought[running->number % 32] = mine;
    if (meet(~0u, Value{}, 0, false, what)) work(meeting.brought);
}

// --- asynchronous copies: done as late as is allowed, so a wait that is missing reads what was there before ---

void Block::copy_async(void* to, const void* from, size_t nbytes, bool unsure) {
    running->copies.push_back(AsyncCopy{to, from, nbytes, running->copy_group, unsure});
}

// Not seen by ThreadSanitizer.
__attribute__((no_sanitize_thread)) static void copy_unseen(const AsyncCopy& copy) {
    for (size_t i = 0; i < copy.nbytes; i++)
        static_cast<volatile char*>(copy.to)[i] = static_cast<const volatile char*>(copy.from)[i];
}

void Block::commit_copies() { running->copy_group++; }

void Block::wait_for_copies(int groups_left) {
    std::vector<AsyncCopy> left;
    for (const AsyncCopy& copy : running->copies) {
        if (copy.group >= running->copy_group - groups_left) {
            left.push_back(copy);
        } else {
            copy.unsure ? copy_unseen(copy) : static_cast<void>(std::memcpy(copy.to, copy.from, copy.nbytes));
        }
    }
    running->copies = left;
}

// --- asynchronous products: likewise ---

void Block::product(float* to, const float* values, int count) {
    running->products.push_back(AsyncProduct{to, {values, values + count}});
}

void Block::commit_products() { running->product_groups.push_back(running->products.size()); }

void Block::wait_for_products(size_t groups_in_flight) {
    std::vector<size_t>& groups = running->product_groups;
    if (groups.size() <= groups_in_flight) return;
    const size_t ended = groups.size() - groups_in_flight, count = groups[ended - 1];
    for (size_t i = 0; i < count; i++) {
        const AsyncProduct& done = running->products[i];
        for (size_t x = 0; x < done.values.size(); x++) done.to[x] += done.values[x];
    }
    running->products.erase(running->products.begin(), running->products.begin() + static_cast<long>(count));
    groups.erase(groups.begin(), groups.begin() + static_cast<long>(ended));
    for (size_t& end : groups) end -= count;
}

}  // namespace simt
