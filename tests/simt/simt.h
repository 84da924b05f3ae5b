// Compile a file of plugins/ with a host compiler: `g++ -x c++ -include simt.h lengths.cu`, then SIMT_KERNEL for each kernel.
//
// CUDA threads run one after another, in the order of their indices. That is enough for kernels whose threads do not wait
// for each other; barriers and warp operations have no place here yet and do not compile.
#pragma once

#include <tuple>
#include <utility>

#include "abi.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

namespace simt {

struct Thread {
    Extent index, block, block_size, grid_size;
};
extern thread_local Thread* running;

// Calls `kernel(arguments)` for every thread of the grid.
const char* run_grid(Extent grid, Extent block, void (*kernel)(void** arguments), void** arguments);

template <auto kernel>
struct Launcher;

template <class... Parameters, void (*kernel)(Parameters...)>
struct Launcher<kernel> {
    static constexpr size_t sizes[] = {sizeof(Parameters)...};

    template <size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<Parameters*>(arguments[I])...);
    }
    static void call_all(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>{}); }
    static const char* run(Extent grid, Extent block, size_t, void** arguments) { return run_grid(grid, block, call_all, arguments); }
    static constexpr Kernel describe() { return {sizeof...(Parameters), sizes, run}; }
};

}  // namespace simt

#define SIMT_KERNEL(name) extern "C" const simt::Kernel simt_kernel_##name = simt::Launcher<name>::describe();

#define threadIdx (simt::running->index)
#define blockIdx (simt::running->block)
#define blockDim (simt::running->block_size)
#define gridDim (simt::running->grid_size)
