// The PTX that the attention kernels use, one thin wrapper for each instruction. tests/simt/ptx.h has the same names for the
// emulator. Two elements of 16 bits lie in an `unsigned`, the first one in its lower half.
#pragma once

#ifndef EMULATED_PTX

struct Float16 {};
struct BFloat16 {};

// Where something is in shared memory; adding bytes to it gives another place there.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ SharedAddress flip_bits(SharedAddress address, unsigned bits) { return address ^ bits; }

// 16 bytes from global to shared memory, done when the group that they are part of is waited for; where not `valid`, zeros, and nothing
// is read.
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same of what is read once: the L2 gives it up before all else.
using OncePolicy = unsigned long long;
__device__ __forceinline__ OncePolicy once() {
    OncePolicy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_async_once(SharedAddress to, const void* from, bool valid, OncePolicy policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
// The same of bytes that others may be writing: then nobody looks at what comes.
__device__ __forceinline__ void copy_async_unsure(SharedAddress to, const void* from, bool valid, OncePolicy policy) {
    copy_async_once(to, from, valid, policy);
}
// Brings 128 bytes to the L2, and no further: whoever reads them reads what is there by then.
__device__ __forceinline__ void prefetch_line(const void* place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }
// Waits until the launch before has ended, if this one may begin earlier (sm_90 and later).
__device__ __forceinline__ void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the youngest kGroups groups of this thread.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four matrices of 8 rows of 16 bytes: lane i says where row i % 8 of matrix i / 8 is, and gets two elements of row i / 4
// (transposed: of column i / 4) of each.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// sum (16 x 8) += a (16 x 16) * b (16 x 8). Lane i has of `sum` two elements each of rows i / 4 and i / 4 + 8, at column 2 * (i % 4).
__device__ __forceinline__ void multiply_add(Float16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(BFloat16, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats to two elements, rounded to nearest even, and back.
__device__ __forceinline__ unsigned pack(Float16, float2 values) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values.y), "f"(values.x));
    return word;
}
__device__ __forceinline__ unsigned pack(BFloat16, float2 values) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values.y), "f"(values.x));
    return word;
}
__device__ __forceinline__ float2 unpack(Float16, unsigned word) {
    float2 values;
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}" : "=f"(values.x), "=f"(values.y) : "r"(word));
    return values;
}
__device__ __forceinline__ float2 unpack(BFloat16, unsigned word) { return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)}; }

// 2 to the power of x, and 1 / x: relative errors of 2^-22 and 2^-23; a result that is denormal is 0.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over the warp.
__device__ __forceinline__ int sum_of_warp(int value) {
    int sum;
    asm volatile("redux.sync.add.s32 %0, %1, 0xFFFFFFFF;" : "=r"(sum) : "r"(value));
    return sum;
}
__device__ __forceinline__ int max_of_warp(int value) {
    int maximum;
    asm volatile("redux.sync.max.s32 %0, %1, 0xFFFFFFFF;" : "=r"(maximum) : "r"(value));
    return maximum;
}

// What one block tells another that waits for it: 16 bytes in global memory, written and read as one. Their last word is 0 until then,
// and never after: -0 takes its place. Whoever reads takes it back.
__device__ __forceinline__ void publish(float4* place, float4 value) {
    if (value.w == 0) value.w = -0.0f;
    asm volatile(
        "{.reg .b128 all; .reg .b64 low, high; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 all, {low, high};"
        "st.relaxed.gpu.global.b128 [%0], all;}" ::"l"(place),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
        : "memory");
}
// What is there by now.
__device__ __forceinline__ float4 peek(const float4* place) {
    float4 value;
    asm volatile(
        "{.reg .b128 all; .reg .b64 low, high; ld.relaxed.gpu.global.b128 all, [%4]; mov.b128 {low, high}, all;"
        "mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high;}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "l"(place)
        : "memory");
    return value;
}
__device__ __forceinline__ bool has_come(float4 value) { return __float_as_uint(value.w); }
__device__ __forceinline__ void take_back(float4* place) { place->w = 0; }
// Between two looks at what has not come yet.
__device__ __forceinline__ void look_again() {}

#endif
