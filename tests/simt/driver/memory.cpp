// Device memory and page-locked memory, both from the host's heap. New bytes are 0xFF (NaN in every float type), so
// memory that was not written shows.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "driver.h"

namespace {

const size_t kAlignment = 256;

struct Block {
    size_t nbytes;
    bool on_device;
};
std::map<uintptr_t, Block> blocks;
int allocations_to_failure = 0;  // 0: none fails

uintptr_t allocate(size_t nbytes, bool on_device) {
    if (allocations_to_failure && --allocations_to_failure == 0) return 0;
    void* start = nullptr;
    if (posix_memalign(&start, kAlignment, nbytes)) return 0;
    std::memset(start, 0xFF, nbytes);
    blocks[reinterpret_cast<uintptr_t>(start)] = Block{nbytes, on_device};
    return reinterpret_cast<uintptr_t>(start);
}

CUresult release(uintptr_t start, bool on_device) {
    auto block = blocks.find(start);
    if (block == blocks.end() || block->second.on_device != on_device) return CUDA_ERROR_INVALID_VALUE;
    blocks.erase(block);
    std::free(reinterpret_cast<void*>(start));
    return CUDA_SUCCESS;
}

const Block* block_around(uintptr_t start, size_t nbytes) {
    auto block = blocks.upper_bound(start);
    if (block == blocks.begin()) return nullptr;
    --block;
    return start + nbytes <= block->first + block->second.nbytes ? &block->second : nullptr;
}

bool page_locked(const void* start, size_t nbytes) {
    const Block* block = block_around(reinterpret_cast<uintptr_t>(start), nbytes);
    return block && !block->on_device;
}

// Whether all of it lies inside one device allocation.
bool on_device(CUdeviceptr start, size_t nbytes) {
    const Block* block = block_around(start, nbytes);
    return block && block->on_device;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

// --- for the tests ---

// The n-th allocation from now fails (1: the next one); 0: none.
void standin_fail_allocation(int n) { allocations_to_failure = n; }

size_t standin_live_device_nbytes() {
    size_t sum = 0;
    for (const auto& [start, block] : blocks) sum += block.on_device ? block.nbytes : 0;
    return sum;
}

size_t standin_live_host_nbytes() {
    size_t sum = 0;
    for (const auto& [start, block] : blocks) sum += block.on_device ? 0 : block.nbytes;
    return sum;
}

// --- allocation ---

CUresult cuMemAlloc(CUdeviceptr* start, size_t nbytes) {
    LOG_CALL_IN_CONTEXT();
    *start = allocate(nbytes, true);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr start) {
    LOG_CALL_IN_CONTEXT();
    standin::finish_all();
    return release(start, true);
}

CUresult cuMemAllocHost(void** start, size_t nbytes) {
    LOG_CALL_IN_CONTEXT();
    *start = pointer(allocate(nbytes, false));
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void* start) {
    LOG_CALL_IN_CONTEXT();
    standin::finish_all();
    return release(reinterpret_cast<uintptr_t>(start), false);
}

// --- stream-ordered pools: they hold nothing back ---

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps*) {
    LOG_CALL();
    *pool = reinterpret_cast<CUmemoryPool>(0x5000);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool) {
    LOG_CALL();
    return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, size_t) {
    LOG_CALL();
    return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) {
    LOG_CALL();
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* start, size_t nbytes, CUmemoryPool, CUstream) {
    LOG_CALL();
    *start = allocate(nbytes, true);
    return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeAsync(CUdeviceptr start, CUstream stream) {
    LOG_CALL();
    return standin::give(stream, [start] {
        if (release(start, true) != CUDA_SUCCESS) standin::fail("cuMemFreeAsync: no such allocation");
    });
}

// --- copies ---

CUresult cuMemcpyHtoDAsync(CUdeviceptr destination, const void* source, size_t nbytes, CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    if (!on_device(destination, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    if (page_locked(source, nbytes)) {
        return standin::give(stream, [=] { std::memcpy(pointer(destination), source, nbytes); });
    }
    // Pageable memory is staged during the call.
    const char* bytes = static_cast<const char*>(source);
    std::vector<char> staged(bytes, bytes + nbytes);
    return standin::give(stream, [=] { std::memcpy(pointer(destination), staged.data(), nbytes); });
}

CUresult cuMemcpyDtoHAsync(void* destination, CUdeviceptr source, size_t nbytes, CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    if (!on_device(source, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = standin::give(stream, [=] { std::memcpy(destination, pointer(source), nbytes); });
    // A copy to pageable memory is done when the call returns.
    return page_locked(destination, nbytes) ? result : standin::finish(stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr destination, CUdeviceptr source, size_t nbytes, CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    if (!on_device(destination, nbytes) || !on_device(source, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    return standin::give(stream, [=] { std::memcpy(pointer(destination), pointer(source), nbytes); });
}

CUresult cuMemcpyDtoH(void* destination, CUdeviceptr source, size_t nbytes) {
    LOG_CALL_IN_CONTEXT();
    if (!on_device(source, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = standin::finish(nullptr);
    std::memcpy(destination, pointer(source), nbytes);
    return result;
}

CUresult cuMemsetD8Async(CUdeviceptr start, unsigned char value, size_t nbytes, CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    if (!on_device(start, nbytes)) return CUDA_ERROR_INVALID_VALUE;
    return standin::give(stream, [=] { std::memset(pointer(start), value, nbytes); });
}

// A device of 1 GiB, of which device memory takes what is allocated.
CUresult cuMemGetInfo(size_t* free, size_t* total) {
    LOG_CALL_IN_CONTEXT();
    *total = size_t(1) << 30;
    *free = *total;
    for (const auto& [start, block] : blocks) *free -= block.on_device ? block.nbytes : 0;
    return CUDA_SUCCESS;
}

// Every device pointer belongs to the one device; anything else is host memory.
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    const Block* block = block_around(address, 1);
    if (!block) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = block->on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<int*>(value) = 0; return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
    for (unsigned i = 0; i < count; i++) {
        CUresult result = cuPointerGetAttribute(values[i], attributes[i], address);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
