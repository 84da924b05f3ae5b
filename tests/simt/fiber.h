// A fiber: a function that runs on a stack of its own, and can be left and entered again.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

class Fiber {
public:
    Fiber();
    Fiber(const Fiber&) = delete;
    ~Fiber();

    // Makes the next `enter` call `body(argument)`. `body` must not return: it ends with `leave`, and is not entered
    // again until the fiber is started anew.
    void start(void (*body)(void*), void* argument);

    // From the host's own stack: runs the fiber until it leaves.
    void enter();

    // From the fiber: goes back to where it was entered.
    void leave();

private:
    static void first_entry();
    void begin();

    char* stack_ = nullptr;
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
#if defined(__x86_64__)
    void *own_ = nullptr, *host_ = nullptr;  // stack pointers of the side that does not run
#else
    ucontext_t own_, host_;
#endif
    const void* host_stack_ = nullptr;  // for AddressSanitizer
    size_t host_stack_nbytes_ = 0;
    void *own_fake_stack_ = nullptr, *host_fake_stack_ = nullptr;
    void *own_thread_ = nullptr, *host_thread_ = nullptr;  // for ThreadSanitizer
};

}  // namespace simt
