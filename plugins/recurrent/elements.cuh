// Elements of activations and states: loading runs of them as floats, and storing them. ELEMENT and STATE, the types of
// both, are macros: trt_kvcache/kernels/source_variants.py lists the pairs.
#pragma once

#include "attention/element.cuh"

struct Float32 {};

template <class Type>
constexpr int kBytesOf = 2;
template <>
constexpr int kBytesOf<Float32> = 4;

// Elements of a vector of 16 bytes.
template <class Type>
constexpr int kPerVector = 16 / kBytesOf<Type>;

template <class Type>
__device__ __forceinline__ void unpack_vector(Type, uint4 vector, float* values) {
    const unsigned words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack(Type{}, words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void unpack_vector(Float32, uint4 vector, float* values) {
    const unsigned words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = __uint_as_float(words[i]);
}

template <class Type>
__device__ __forceinline__ uint4 pack_vector(Type, const float* values) {
    return {pack(Type{}, {values[0], values[1]}), pack(Type{}, {values[2], values[3]}),
            pack(Type{}, {values[4], values[5]}), pack(Type{}, {values[6], values[7]})};
}
__device__ __forceinline__ uint4 pack_vector(Float32, const float* values) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
}

// One element.
template <class Type>
__device__ __forceinline__ float load_element(Type, const void* base, long long index) {
    return unpack(Type{}, static_cast<const unsigned short*>(base)[index]).x;
}
__device__ __forceinline__ float load_element(Float32, const void* base, long long index) {
    return static_cast<const float*>(base)[index];
}

template <class Type>
__device__ __forceinline__ void store_element(Type, void* base, long long index, float value) {
    static_cast<unsigned short*>(base)[index] = static_cast<unsigned short>(pack(Type{}, {value, 0.0f}));
}
__device__ __forceinline__ void store_element(Float32, void* base, long long index, float value) {
    static_cast<float*>(base)[index] = value;
}

// kCount elements from base[index] on, at a multiple of 16 bytes if they are whole vectors, and of their own size if
// they are 4 or 8 bytes.
template <class Type, int kCount>
__device__ __forceinline__ void load_elements(Type, const void* base, long long index, float (&values)[kCount]) {
    const unsigned char* from = static_cast<const unsigned char*>(base) + index * kBytesOf<Type>;
    if constexpr (kCount % kPerVector<Type> == 0) {
        const uint4* vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll
        for (int i = 0; i < kCount / kPerVector<Type>; i++)
            unpack_vector(Type{}, vectors[i], values + i * kPerVector<Type>);
    } else if constexpr (kCount * kBytesOf<Type> == 8) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        float some[kPerVector<Type>];
        unpack_vector(Type{}, {words.x, words.y, 0, 0}, some);
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] = some[i];
    } else if constexpr (kCount == 2) {
        const float2 pair = unpack(Type{}, *reinterpret_cast<const unsigned*>(from));
        values[0] = pair.x;
        values[1] = pair.y;
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] = load_element(Type{}, base, index + i);
    }
}

template <class Type, int kCount>
__device__ __forceinline__ void store_elements(Type, void* base, long long index, const float (&values)[kCount]) {
    unsigned char* to = static_cast<unsigned char*>(base) + index * kBytesOf<Type>;
    if constexpr (kCount % kPerVector<Type> == 0) {
        uint4* vectors = reinterpret_cast<uint4*>(to);
#pragma unroll
        for (int i = 0; i < kCount / kPerVector<Type>; i++)
            vectors[i] = pack_vector(Type{}, values + i * kPerVector<Type>);
    } else if constexpr (kCount * kBytesOf<Type> == 8) {
        float some[kPerVector<Type>] = {};
#pragma unroll
        for (int i = 0; i < kCount; i++) some[i] = values[i];
        const uint4 vector = pack_vector(Type{}, some);
        *reinterpret_cast<uint2*>(to) = {vector.x, vector.y};
    } else if constexpr (kCount == 2) {
        *reinterpret_cast<unsigned*>(to) = pack(Type{}, {values[0], values[1]});
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) store_element(Type{}, base, index + i, values[i]);
    }
}

// The same for whole vectors that nobody will look at again soon: they leave the caches first.
template <class Type, int kCount>
__device__ __forceinline__ void load_elements_once(Type, const void* base, long long index, float (&values)[kCount]) {
    static_assert(kCount % kPerVector<Type> == 0, "whole vectors");
    const uint4* vectors =
        reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(base) + index * kBytesOf<Type>);
#pragma unroll
    for (int i = 0; i < kCount / kPerVector<Type>; i++)
        unpack_vector(Type{}, __ldcs(vectors + i), values + i * kPerVector<Type>);
}
template <class Type, int kCount>
__device__ __forceinline__ void store_elements_once(Type, void* base, long long index, const float (&values)[kCount]) {
    static_assert(kCount % kPerVector<Type> == 0, "whole vectors");
    uint4* vectors = reinterpret_cast<uint4*>(static_cast<unsigned char*>(base) + index * kBytesOf<Type>);
#pragma unroll
    for (int i = 0; i < kCount / kPerVector<Type>; i++)
        __stcs(vectors + i, pack_vector(Type{}, values + i * kPerVector<Type>));
}

// kCount elements on their way: those of one vector as they were loaded, which takes fewer registers than floats; or
// fewer.
template <class Type, int kCount>
struct Fetched {
    float elements[kCount] = {};

    __device__ __forceinline__ void fetch(const void* base, long long index) {
        load_elements(Type{}, base, index, elements);
    }
    __device__ __forceinline__ void unpack_to(float (&values)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] = elements[i];
    }
};
template <class Type>
struct Fetched<Type, kPerVector<Type>> {
    uint4 vector = {};

    __device__ __forceinline__ void fetch(const void* base, long long index) {
        vector = *reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(base) + index * kBytesOf<Type>);
    }
    __device__ __forceinline__ void unpack_to(float (&values)[kPerVector<Type>]) const {
        unpack_vector(Type{}, vector, values);
    }
};

// kCount elements, bit for bit.
template <class Type, int kCount>
__device__ __forceinline__ void copy_elements(void* to, const void* from, long long index) {
    constexpr int kBytes = kCount * kBytesOf<Type>;
    unsigned char* destination = static_cast<unsigned char*>(to) + index * kBytesOf<Type>;
    const unsigned char* source = static_cast<const unsigned char*>(from) + index * kBytesOf<Type>;
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; i++)
            reinterpret_cast<uint4*>(destination)[i] = reinterpret_cast<const uint4*>(source)[i];
    } else {
#pragma unroll
        for (int i = 0; i < kBytes / 2; i++) {
            reinterpret_cast<unsigned short*>(destination)[i] = reinterpret_cast<const unsigned short*>(source)[i];
        }
    }
}

// A float as it is after it was stored.
template <class Type>
__device__ __forceinline__ float rounded(Type, float value) {
    return unpack(Type{}, pack(Type{}, {value, 0.0f})).x;
}
__device__ __forceinline__ float rounded(Float32, float value) { return value; }

// Tokens of an activation [B, s, ...]: strides of slots and of tokens count bytes.
struct Tokens {
    const unsigned char* data;
    long long slot_stride;
    long long token_stride;

    __device__ __forceinline__ const unsigned char* row(long long slot, long long token) const {
        return data + slot * slot_stride + token * token_stride;
    }
};

// New tokens of a slot; the others of its `width` are padding. new_lengths may be null: all are new.
__device__ __forceinline__ int count_new(const int* new_lengths, long long slot, long long width) {
    const long long wanted = new_lengths ? new_lengths[slot] : width;
    return static_cast<int>(max(min(wanted, width), 0LL));
}
