// Programmatic dependent launch: a launch that begins while the one before it on the stream still runs.
#pragma once

#ifndef EMULATED_PTX

// Waits until the previous launch on the stream has ended, if this launch was allowed to start earlier (sm_90 and
// later).
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch on the stream start now, if it was allowed to start before this one has ended; it still waits
// for the end of this one.
__device__ __forceinline__ void grid_dependents_may_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
