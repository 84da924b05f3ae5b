// Fibers: a few instructions on x86-64, ucontext (a hundred times slower) elsewhere.

#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "sanitizers.h"

namespace simt {

namespace {

const size_t kStack = 128 << 10, kGuard = 4096;
const unsigned kNotOrdered = 1;  // for ThreadSanitizer: that one fiber runs after another does not order what they do

// Stacks that are mapped together, behind one page that must not be touched: a process may have so many mappings only,
// and the libraries of all kernels, each with its own threads, share them. A word at the end of each stack says whether
// it was too short.
const size_t kStacksAtOnce = 64;
const unsigned long long kUntouched = 0x5AFE57AC5AFE57AC;

Fiber* starting = nullptr;

// Where stacks that no fiber has begin. Never destroyed, as fibers may be later.
std::vector<char*>& free_stacks() {
    static auto* stacks = new std::vector<char*>;
    return *stacks;
}

char* take_stack() {
    std::vector<char*>& stacks = free_stacks();
    if (stacks.empty()) {
        void* start = mmap(nullptr, kGuard + kStacksAtOnce * kStack, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED || mprotect(start, kGuard, PROT_NONE)) {
            std::perror("the emulator has no memory for stacks");
            std::abort();
        }
        for (size_t i = 0; i < kStacksAtOnce; i++) stacks.push_back(static_cast<char*>(start) + kGuard + i * kStack);
    }
    char* stack = stacks.back();
    stacks.pop_back();
    std::memcpy(stack, &kUntouched, sizeof kUntouched);
    return stack;
}

}  // namespace

#if defined(__x86_64__)

// simt_switch(&mine, other): saves what a function must preserve on the stack, and the stack pointer in `mine`; goes on
// at `other`, where another call of it did the same.
extern "C" void simt_switch(void** mine, void* other);
asm(R"(
    .text
    .globl simt_switch
    .hidden simt_switch
    .type simt_switch, @function
simt_switch:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
    .size simt_switch, . - simt_switch
)");

#endif

Fiber::Fiber() : stack_(take_stack()) {
    if (__tsan_create_fiber) own_thread_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
    if (own_thread_) __tsan_destroy_fiber(own_thread_);
    free_stacks().push_back(stack_);
}

void Fiber::start(void (*body)(void*), void* argument) {
    body_ = body;
    argument_ = argument;
#if defined(__x86_64__)
    // The first switch pops six registers and returns into first_entry, as if that had just been called: the return
    // address that a call would have pushed is null, and lies 8 bytes past a multiple of 16.
    void** top = reinterpret_cast<void**>(stack_ + kStack);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(first_entry);
    own_ = std::memset(top - 6, 0, 6 * sizeof(void*));
#else
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_;
    own_.uc_stack.ss_size = kStack;
    own_.uc_link = nullptr;
    makecontext(&own_, first_entry, 0);
#endif
}

void Fiber::first_entry() { starting->begin(); }

void Fiber::begin() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &host_stack_, &host_stack_nbytes_);
    body_(argument_);
    std::abort();
}

void Fiber::enter() {
    starting = this;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&host_fake_stack_, stack_, kStack);
    if (__tsan_switch_to_fiber) {
        host_thread_ = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(own_thread_, kNotOrdered);
    }
#if defined(__x86_64__)
    simt_switch(&host_, own_);
#else
    swapcontext(&host_, &own_);
#endif
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(host_fake_stack_, nullptr, nullptr);
    if (std::memcmp(stack_, &kUntouched, sizeof kUntouched)) {
        std::fputs("a thread of the emulator needs a larger stack\n", stderr);
        std::abort();
    }
}

void Fiber::leave() {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&own_fake_stack_, host_stack_, host_stack_nbytes_);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(host_thread_, kNotOrdered);
#if defined(__x86_64__)
    simt_switch(&own_, host_);
#else
    swapcontext(&own_, &host_);
#endif
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(own_fake_stack_, nullptr, nullptr);
}

}  // namespace simt
