// Loads objects that were built for the emulator in the place of cubins, and launches their kernels.

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../abi.h"
#include "driver.h"

namespace {

const Elf64_Half kMachineOfGpu = 190;  // EM_CUDA
const int kShared = 48 << 10, kMostShared = 227 << 10;

std::map<CUkernel, int> allowed_shared;

// An object is given as a pointer without a size; the size stands in its ELF header (the section headers come last).
size_t elf_nbytes(const Elf64_Ehdr* header) { return header->e_shoff + size_t{header->e_shentsize} * header->e_shnum; }

void* load(const void* image, size_t nbytes) {
    int file = memfd_create("kernels", 0);
    if (write(file, image, nbytes) != static_cast<ssize_t>(nbytes)) return nullptr;
    // Not "self", and left open: the program that finds line numbers for a sanitizer reads it too.
    std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) std::fprintf(stderr, "stand-in driver: %s\n", dlerror());
    return library;
}

std::vector<std::vector<char>> copy_arguments(const simt::Kernel& kernel, void** arguments) {
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < kernel.parameter_count; i++) {
        const char* start = static_cast<const char*>(arguments[i]);
        copies.emplace_back(start, start + kernel.parameter_sizes[i]);
    }
    return copies;
}

}  // namespace

extern "C" {

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
    LOG_CALL();
    const auto* header = static_cast<const Elf64_Ehdr*>(code);
    if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_INVALID_IMAGE;
    if (header->e_machine == kMachineOfGpu) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    *library = static_cast<CUlibrary>(load(code, elf_nbytes(header)));
    return *library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuLibraryUnload(CUlibrary) {
    LOG_CALL();
    return CUDA_SUCCESS;  // the object stays: launches that were captured may still need it
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    LOG_CALL();
    *kernel = static_cast<CUkernel>(dlsym(library, (std::string("simt_kernel_") + name).c_str()));
    return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Dynamic shared memory that a block may have beyond 48 KiB, by kernel. A preferred L1 has no effect here.
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
    LOG_CALL();
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT && value >= -1 && value <= 100)
        return CUDA_SUCCESS;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > kMostShared)
        return CUDA_ERROR_INVALID_VALUE;
    allowed_shared[kernel] = value;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    LOG_CALL();
    *blocks = simt::kBlocksOfOne;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
    LOG_CALL_IN_CONTEXT();
    const auto& kernel = *reinterpret_cast<const simt::Kernel*>(function);
    const simt::Extent grid{config->gridDimX, config->gridDimY, config->gridDimZ};
    const simt::Extent block{config->blockDimX, config->blockDimY, config->blockDimZ};
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z
        || size_t{block.x} * block.y * block.z > 1024) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool cooperative = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        cooperative = cooperative
                      || (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config->attrs[i].value.cooperative);
    }
    if (cooperative && size_t{grid.x} * grid.y * grid.z > simt::kAtOnce) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    const size_t shared_bytes = config->sharedMemBytes;
    const auto allowed = allowed_shared.find(reinterpret_cast<CUkernel>(function));
    if (shared_bytes > static_cast<size_t>(allowed == allowed_shared.end() ? kShared : allowed->second))
        return CUDA_ERROR_INVALID_VALUE;
    auto copies = copy_arguments(kernel, arguments);
    return standin::give(config->hStream, [=, &kernel] {
        std::vector<void*> pointers;
        for (const auto& copy : copies) pointers.push_back(const_cast<char*>(copy.data()));
        const char* error = kernel.run(grid, block, shared_bytes, cooperative, pointers.data());
        if (error) standin::fail(error);
    });
}

}  // extern "C"
