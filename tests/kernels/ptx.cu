// Each wrapper of an instruction in plugins/attention alone, in one warp: what it is given, and what it makes of it.

#include "attention/cp_async.cuh"
#include "attention/element.cuh"
#include "attention/flagged_vector.cuh"
#include "attention/math.cuh"
#include "attention/mma.cuh"
#include "attention/packed_vector.cuh"
#include "attention/stored_kv.cuh"
#include "attention/warpgroup.cuh"
#include "load_once.cuh"
#include "shared_memory.cuh"

// sums [32, 4] += a [32, 4] * b [32, 2], as the lanes hold the fragments.
extern "C" __global__ void multiply(float* sums, const unsigned* a, const unsigned* b, long long bfloat16) {
    const int lane = threadIdx.x;
    float sum[4];
    unsigned left[4];
    for (int i = 0; i < 4; i++) {
        sum[i] = sums[4 * lane + i];
        left[i] = a[4 * lane + i];
    }
    if (bfloat16) {
        mma_m16n8k16(BFloat16{}, sum, left, b[2 * lane], b[2 * lane + 1]);
    } else {
        mma_m16n8k16(Float16{}, sum, left, b[2 * lane], b[2 * lane + 1]);
    }
    for (int i = 0; i < 4; i++) sums[4 * lane + i] = sum[i];
}

// Lane i passes the address of row `places[i]`.
extern "C" __global__ void matrices(unsigned* out, const unsigned* rows, const unsigned* places, long long transposed) {
    DYNAMIC_SHARED(unsigned, shared);
    const int lane = threadIdx.x;
    for (int i = 0; i < 4; i++) shared[32 * i + lane] = rows[32 * i + lane];
    __syncthreads();
    unsigned loaded[4];
    const SharedAddress place = xor_address(shared_address(shared), 16 * places[lane]);
    if (transposed) {
        ldmatrix_x4_trans(loaded, place);
    } else {
        ldmatrix_x4(loaded, place);
    }
    for (int i = 0; i < 4; i++) out[4 * lane + i] = loaded[i];
}

extern "C" __global__ void transposed_matrix(unsigned* out, const unsigned* words) {
    out[threadIdx.x] = transpose_matrix(words[threadIdx.x]);
}

// Two commit groups; the first is read while the second may still be in flight.
extern "C" __global__ void copies(uint4* out, const uint4* from, const unsigned* valid) {
    DYNAMIC_SHARED(uint4, pieces);
    const int lane = threadIdx.x;
    for (int x = lane; x < 64; x += 32) {
        cp_async(shared_address(pieces + x), from + x, valid[x]);
        cp_async_commit_group();
    }
    cp_async_wait_group<1>();
    out[lane] = pieces[lane];
    cp_async_wait_group<0>();
    out[lane + 32] = pieces[lane + 32];
}

extern "C" __global__ void loads(uint4* out, const uint4* from, const unsigned* valid) {
    out[threadIdx.x] = load_once(from + threadIdx.x, valid[threadIdx.x], evict_first_policy());
}

// Words of the first half of the lanes, whose loads are valid.
extern "C" __global__ void loads_if(uint4* out, const uint4* from) {
    const bool valid = threadIdx.x < 16;
    const uint4 words = load_once_if(from + threadIdx.x, valid, evict_first_policy());
    if (valid) out[threadIdx.x] = words;
}

extern "C" __global__ void convert(unsigned* packed, float2* unpacked, const float2* values, const unsigned* words,
                                   long long bfloat16) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    packed[x] = bfloat16 ? pack(BFloat16{}, values[x]) : pack(Float16{}, values[x]);
    unpacked[x] = bfloat16 ? unpack(BFloat16{}, words[x]) : unpack(Float16{}, words[x]);
}

template <class Type>
__device__ uint2 widened(Type, unsigned quantized, long long kind) {
    if (kind == 3) return widen_in_order(Type{}, Float8{}, quantized);
    return kind == 0   ? widen(Type{}, Int8{}, quantized)
           : kind == 1 ? widen(Type{}, Float8{}, quantized)
                       : widen_by_bits(Type{}, quantized);
}
// kind: 0 for Int8, 1 for Float8, 2 for Float8 by bits, 3 for Float8 in order.
extern "C" __global__ void widen_quantized(uint2* out, const unsigned* quantized, long long kind, long long bfloat16) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    out[x] = bfloat16 ? widened(BFloat16{}, quantized[x], kind) : widened(Float16{}, quantized[x], kind);
}
extern "C" __global__ void quantize_values(unsigned* quantized, const float4* values, const float* scales,
                                           long long kind) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    const float4 value = values[x];
    if (kind == 2) {
        quantized[x] = 0;
        const float all[4] = {value.x, value.y, value.z, value.w};
        for (int i = 0; i < 4; i++) quantized[x] |= float8_by_bits(__fdiv_rn(all[i], scales[x])) << (8 * i);
    } else {
        quantized[x] = kind ? quantize(Float8{}, {value.x, value.y}, {value.z, value.w}, scales[x])
                            : quantize(Int8{}, {value.x, value.y}, {value.z, value.w}, scales[x]);
    }
}

extern "C" __global__ void functions(float* powers, float* reciprocals, const float* exponents, const float* values) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    powers[x] = exp2_approx(exponents[x]);
    reciprocals[x] = reciprocal_approx(values[x]);
}

// Lane by lane: the larger of two; then eight values packed with the unit of a quad, and unpacked.
extern "C" __global__ void pack_values(float* larger, float4* unpacked, const float4* values) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    const float4 low = values[2 * x], high = values[2 * x + 1];
    larger[x] = max_or_nan(low.x, low.y);
    const float unit = packed_unit(quad_max_or_nan(largest_of(low, largest_of(high, 0))));
    const float4 packed = pack_vector(low, high, unit);
    float4 sums[2] = {};
    add_packed(sums[0], packed.x, packed.y, unit);
    add_packed(sums[1], packed.z, packed.w, unit);
    for (int h = 0; h < 2; h++) unpacked[2 * x + h] = sums[h];
}

extern "C" __global__ void warp_reductions(int* sums, int* maxima, const int* values) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    sums[x] = warp_sum(values[x]);
    maxima[x] = warp_max(values[x]);
}

// Each block writes for the next one.
extern "C" __global__ void publish(float4* received, float4* places, const float4* values) {
    const int x = blockIdx.x * 32 + threadIdx.x;
    publish_vector(places + x, values[x]);
    if (blockIdx.x == 0) return;
    while (!is_published(received[x] = poll_vector(places + x - 32))) poll_again();
    reset_vector(places + x - 32);
}

#ifdef WARPGROUPS
// A warpgroup: sums [64, columns] += a * b, where a and b are [64, 64], and of each only 16 columns are taken, from 16
// * `part` on: a row of b gives a column of the product. With `transposed`, 16 rows of b.
template <class Type, int kFragments>
__device__ void multiply_panels(float* sums, const unsigned char* a, const unsigned char* b, long long part,
                                long long transposed) {
    DYNAMIC_SHARED(unsigned char, panels);  // two of 64 rows
    const int thread = threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int x = thread; x < 64 * 8; x += 128) {
        const unsigned at = x / 8 * 128 + (x % 8 ^ x / 8 % 8) * 16;
        *reinterpret_cast<uint4*>(panels + at) = reinterpret_cast<const uint4*>(a)[x];
        *reinterpret_cast<uint4*>(panels + 8192 + at) = reinterpret_cast<const uint4*>(b)[x];
    }
    shared_memory_fence();
    __syncthreads();
    float sum[kFragments][4];
    unsigned left[4];
    for (int j = 0; j < kFragments; j++) {
        for (int e = 0; e < 4; e++) sum[j][e] = sums[(row + e / 2 * 8) * 64 + 8 * j + column + e % 2];
    }
    for (int i = 0; i < 4; i++) {
        left[i] =
            *reinterpret_cast<const unsigned*>(a + (row + i % 2 * 8) * 128 + 32 * part + (column + i / 2 * 8) * 2);
    }
    const SharedAddress start = shared_address(panels);
    warpgroup_begin();
    if constexpr (kFragments == 8) {
        if (transposed) {
            warpgroup_mma_transposed(Type{}, sum, left, start + 8192 + 16 * part * 128);
        } else {
            warpgroup_mma(Type{}, sum, start + 32 * part, start + 8192 + 32 * part);
        }
    } else {
        warpgroup_mma(Type{}, sum, start + 32 * part, start + 8192 + 32 * part);
    }
    warpgroup_commit();
    warpgroup_wait(sum);
    for (int j = 0; j < kFragments; j++) {
        for (int e = 0; e < 4; e++) sums[(row + e / 2 * 8) * 64 + 8 * j + column + e % 2] = sum[j][e];
    }
}
extern "C" __global__ void panel_products(float* sums, const unsigned char* a, const unsigned char* b, long long part,
                                          long long transposed, long long columns, long long bfloat16) {
    if (columns == 32) {
        bfloat16 ? multiply_panels<BFloat16, 4>(sums, a, b, part, 0) : multiply_panels<Float16, 4>(sums, a, b, part, 0);
    } else {
        bfloat16 ? multiply_panels<BFloat16, 8>(sums, a, b, part, transposed)
                 : multiply_panels<Float16, 8>(sums, a, b, part, transposed);
    }
}
#endif
