// Fibers: a few instructions on x86-64, ucontext (a hundred times slower) elsewhere.

#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "sanitizers.h"

namespace simt {

namespace {

const size_t kStack = 128 << 10, kGuard = 4096;
const unsigned kNotOrdered = 1;  // for ThreadSanitizer: that one fiber runs after another does not order what they do

Fiber* starting = nullptr;

}  // namespace

#if defined(__x86_64__)

// simt_switch(&mine, other): saves what a function must preserve on the stack, and the stack pointer in `mine`; goes on at
// `other`, where another call of it did the same.
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

Fiber::Fiber() {
    void* start = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED || mprotect(start, kGuard, PROT_NONE)) std::abort();
    stack_ = static_cast<char*>(start);
    if (__tsan_create_fiber) own_thread_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
    if (own_thread_) __tsan_destroy_fiber(own_thread_);
    munmap(stack_, kGuard + kStack);
}

void Fiber::start(void (*body)(void*), void* argument) {
    body_ = body;
    argument_ = argument;
#if defined(__x86_64__)
    // The first switch pops six registers and returns into first_entry, as if that had just been called: the return address
    // that a call would have pushed is null, and lies 8 bytes past a multiple of 16.
    void** top = reinterpret_cast<void**>(stack_ + kGuard + kStack);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(first_entry);
    own_ = std::memset(top - 6, 0, 6 * sizeof(void*));
#else
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_ + kGuard;
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
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&host_fake_stack_, stack_ + kGuard, kStack);
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
}

void Fiber::leave() {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&own_fake_stack_, host_stack_, host_stack_nbytes_);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(host_thread_, kNotOrdered);
#if defined(__x86_64__)
    simt_switch(&own_, host_);
#else
    swapcontext(&own_, &host_);
#endif
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(own_fake_stack_, nullptr, nullptr);
}

}  // namespace simt
