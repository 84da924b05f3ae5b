// Tensor core products of a warpgroup (wgmma), which sm_90 alone has: 64 rows of a matrix times a matrix that lies in
// shared memory, read once for all four warps. Warp w of the four has rows 16 w to 16 w + 15 of A and of the product,
// in the fragments of mma.cuh.
//
// In shared memory a matrix is a panel (PanelLayout in swizzle.cuh): rows of 128 bytes, 64 elements, whose chunks are
// swizzled. It begins at a multiple of 1024 bytes.
//
//     S = Q K^T   A: Q, a panel of 64 rows       B: K, a panel of N rows; 16 columns of both for each product
//     O = P V     A: P, in registers             B: V, 16 rows of a panel of 64 columns, transposed
//
// Products are asynchronous. A product is complete, and its operands may be overwritten, once warpgroup_wait has
// returned. Between warpgroup_begin and warpgroup_wait no register of a product may be touched. A product reads shared
// memory that was written before shared_memory_fence and a barrier.
#pragma once

#include "attention/element.cuh"
#include "shared_memory.cuh"

#ifndef EMULATED_PTX

__device__ __forceinline__ void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the kGroups youngest groups of products are in flight. Those of these fragments are there then.
template <int kGroups = 0, int kFragments>
__device__ __forceinline__ void warpgroup_wait(float (&d)[kFragments][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#pragma unroll
    for (int j = 0; j < kFragments; j++)
        asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}
// For a product whose A is in registers: called after warpgroup_wait, so that the registers keep A until then.
template <int kParts>
__device__ __forceinline__ void hold_registers(unsigned (&a)[kParts][4]) {
#pragma unroll
    for (int j = 0; j < kParts; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3]));
}
// Makes what this thread wrote to shared memory visible to products.
__device__ __forceinline__ void shared_memory_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Descriptor of a panel: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ unsigned long long panel_descriptor(SharedAddress start) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (start & 0x3FFFF) >> 4;
}

#define FRAGMENT(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FRAGMENTS_4 FRAGMENT(0), FRAGMENT(1), FRAGMENT(2), FRAGMENT(3)
#define FRAGMENTS_8 FRAGMENTS_4, FRAGMENT(4), FRAGMENT(5), FRAGMENT(6), FRAGMENT(7)
#define REGISTERS_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define REGISTERS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define WARPGROUP_MMA(columns, type) \
    "{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " "
#define WARPGROUP_PRODUCTS(Type, type) \
    /* d += a * b^T; 16 columns of each, from these addresses on. */ \
    __device__ __forceinline__ void warpgroup_mma(Type, float (&d)[8][4], SharedAddress a, SharedAddress b) { \
        asm volatile(WARPGROUP_MMA("64", type) REGISTERS_32 ", %32, %33, p, 1, 1, 0, 0; }" \
                     : FRAGMENTS_8 \
                     : "l"(panel_descriptor(a)), "l"(panel_descriptor(b))); \
    } \
    __device__ __forceinline__ void warpgroup_mma(Type, float (&d)[4][4], SharedAddress a, SharedAddress b) { \
        asm volatile(WARPGROUP_MMA("32", type) REGISTERS_16 ", %16, %17, p, 1, 1, 0, 0; }" \
                     : FRAGMENTS_4 \
                     : "l"(panel_descriptor(a)), "l"(panel_descriptor(b))); \
    } \
    /* d += a * b; 16 rows of b, from this address on. */ \
    __device__ __forceinline__ void warpgroup_mma_transposed(Type, float (&d)[8][4], const unsigned (&a)[4], \
                                                             SharedAddress b) { \
        asm volatile(WARPGROUP_MMA("64", type) REGISTERS_32 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }" \
                     : FRAGMENTS_8 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(panel_descriptor(b))); \
    }
WARPGROUP_PRODUCTS(Float16, "f16")
WARPGROUP_PRODUCTS(BFloat16, "bf16")
#undef WARPGROUP_PRODUCTS
#undef WARPGROUP_MMA
#undef REGISTERS_32
#undef REGISTERS_16
#undef FRAGMENTS_8
#undef FRAGMENTS_4
#undef FRAGMENT

#endif
