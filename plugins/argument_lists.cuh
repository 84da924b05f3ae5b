// Lists of values among the arguments of a launch. Every argument has 64 bits, and a struct cannot be passed (see
// README.md). So a list is spelled out as that many parameters. The values are part of the launch: later changes on the
// host do not affect it.
#pragma once

// LIST_8(long long move) is `long long move0, long long move1, ... long long move7`; LIST_8(move) is their names.
#define LIST_8(name) name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7
#define LIST_16(name) LIST_8(name##0), LIST_8(name##1)
#define LIST_32(name) LIST_16(name), LIST_8(name##2), LIST_8(name##3)
#define LIST_64(name) LIST_32(name), LIST_8(name##4), LIST_8(name##5), LIST_8(name##6), LIST_8(name##7)
#define LIST_96(name) LIST_64(name), LIST_8(name##8), LIST_8(name##9), LIST_8(name##a), LIST_8(name##b)

// values[index], as a chain of selects: an index that is not known at compile time would make every thread store the
// array to local memory.
template <int kCount>
__device__ __forceinline__ long long select_value(const long long (&values)[kCount], unsigned index) {
    long long value = 0;
#pragma unroll
    for (unsigned i = 0; i < kCount; i++) value = i == index ? values[i] : value;
    return value;
}
