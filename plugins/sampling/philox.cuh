// Philox4x64-10 (Salmon et al., 2011) as NumPy's Generator(Philox(key=seed)) draws from it.
#pragma once

// 53 bits: 2^53 times the number `index` of Generator.random().
__device__ __forceinline__ unsigned long long random_bits(unsigned long long seed, unsigned long long index) {
    constexpr unsigned long long kMultiplier0 = 0xD2E7470EE14C6C93ull, kMultiplier1 = 0xCA5A826395121157ull;
    constexpr unsigned long long kWeyl0 = 0x9E3779B97F4A7C15ull, kWeyl1 = 0xBB67AE8584CAA73Bull;
    unsigned long long word0 = index / 4 + 1, word1 = 0, word2 = 0, word3 = 0, key0 = seed, key1 = 0;
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        const unsigned long long high0 = __umul64hi(kMultiplier0, word0), low0 = kMultiplier0 * word0;
        const unsigned long long high1 = __umul64hi(kMultiplier1, word2), low1 = kMultiplier1 * word2;
        word0 = high1 ^ word1 ^ key0;
        word1 = low1;
        word2 = high0 ^ word3 ^ key1;
        word3 = low0;
        key0 += kWeyl0;
        key1 += kWeyl1;
    }
    const int place = static_cast<int>(index % 4);
    return (place == 0 ? word0 : place == 1 ? word1 : place == 2 ? word2 : word3) >> 11;
}
