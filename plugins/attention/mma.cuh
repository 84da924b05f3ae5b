// Tensor core products: ldmatrix and mma.m16n8k16, and which lane holds which element.
//
// Lane l is g = l / 4 (its group) and t = l % 4 (its place in the quad). Each register of an A or B fragment holds two
// neighbouring elements.
//
//     A [16 x 16], row major         B [16 x 8], column major        C and D [16 x 8], float
//     a0: row g,     k 2t, 2t+1      b0: k 2t,   2t+1, column g      d0, d1: row g,     columns 2t, 2t+1
//     a1: row g + 8, k 2t, 2t+1      b1: k 2t+8, 2t+9, column g      d2, d3: row g + 8, columns 2t, 2t+1
//     a2: row g,     k 2t+8, 2t+9
//     a3: row g + 8, k 2t+8, 2t+9
//
// Operands of attention in prefill (rows: query tokens times query heads):
//
//     S = Q K^T   A: Q [16 rows x 16 of the head dim]      ldmatrix_x4 of the tile of Q
//                 B: K^T [16 of the head dim x 8 keys]     ldmatrix_x4 of the tile of K; one load gives B for 16 keys
//                 D: scores of 8 keys: lane l has rows g and g + 8, keys 2t and 2t + 1
//     O = P V     A: P [16 rows x 16 keys]                 two fragments of scores, as A (pack_a_fragment)
//                 B: V [16 keys x 8 of the head dim]       ldmatrix_x4_trans of the tile of V: B for 16 columns
//                 D: 8 columns of the output: lane l has rows g and g + 8, columns 2t and 2t + 1
//
// So the maximum or the sum of a row of scores is one over the registers of a lane and then over its quad (quad_max,
// quad_sum in math.cuh).
//
// In decode the rows of q are few, so they are the 8 columns, and nothing is multiplied with rows that are not there:
//
//     S^T = K Q^T    A: K [16 keys x 16 of the head dim]     ldmatrix_x4 of the tile of K
//                    B: Q^T [16 of the head dim x 8 rows]    ldmatrix_x4 of the tile of Q
//                    D: scores of 16 keys: lane l has keys g and g + 8, rows 2t and 2t + 1
//     O^T = V^T P^T  A: V^T [16 of the head dim x 16 keys]   ldmatrix_x4_trans of the tile of V
//                    B: P^T [16 keys x 8 rows]               the scores, transposed 8 keys at a time (transpose_matrix)
//                    D: 16 columns of the output: lane l has columns g and g + 8, rows 2t and 2t + 1
//
// There the maximum or the sum of a row is one over the lanes with the same t (column_max, column_sum).
#pragma once

#include "attention/element.cuh"
#include "shared_memory.cuh"

#ifndef EMULATED_PTX

// Loads four matrices of 8 rows of 16 bytes. Lane l passes the address of row l % 8 of matrix l / 8, and gets of each
// matrix the elements 2t and 2t + 1 of row g.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
// The same with each matrix transposed: the lane gets elements 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Transposes a matrix of 8 x 8 elements: the lane has elements 2t and 2t + 1 of row g, and gets those of column g.
__device__ __forceinline__ unsigned transpose_matrix(unsigned words) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(words));
    return transposed;
}

// d += a * b
__device__ __forceinline__ void mma_m16n8k16(Float16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16(BFloat16, float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// Two D fragments side by side, [16 x 8] each, rounded to one A fragment [16 x 16]: every element stays in its lane.
template <class Element>
__device__ __forceinline__ void pack_a_fragment(Element, unsigned (&a)[4], const float (&low)[4],
                                                const float (&high)[4]) {
    a[0] = pack(Element{}, {low[0], low[1]});
    a[1] = pack(Element{}, {low[2], low[3]});
    a[2] = pack(Element{}, {high[0], high[1]});
    a[3] = pack(Element{}, {high[2], high[3]});
}
