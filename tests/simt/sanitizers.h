// What the sanitizers must be told about fibers. The emulator itself is compiled without them, and finds them when a
// kernel (or the process) was built with one: each of these is null otherwise.
#pragma once

#include <cstddef>

#define IF_LINKED __attribute__((weak))

extern "C" {
// AddressSanitizer: the stack changes.
IF_LINKED void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t nbytes);
IF_LINKED void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack, size_t* old_nbytes);

// ThreadSanitizer: another thread runs; what one released, another acquires.
IF_LINKED void* __tsan_get_current_fiber();
IF_LINKED void* __tsan_create_fiber(unsigned flags);
IF_LINKED void __tsan_destroy_fiber(void* fiber);
IF_LINKED void __tsan_switch_to_fiber(void* fiber, unsigned flags);
IF_LINKED void __tsan_acquire(void* tag);
IF_LINKED void __tsan_release(void* tag);
}

#undef IF_LINKED

namespace simt {

// What was done before `release(tag)` is ordered before what comes after `acquire(tag)`: for ThreadSanitizer alone,
// since there is only one thread of the host.
inline void release(void* tag) {
    if (__tsan_release) __tsan_release(tag);
}
inline void acquire(void* tag) {
    if (__tsan_acquire) __tsan_acquire(tag);
}

}  // namespace simt
