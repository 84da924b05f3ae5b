// See matrix.h.

#include "matrix.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "block.h"

namespace simt {

namespace {

float computed_float16(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                                           : std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                                                        (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

unsigned bits_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace

float of_float16(unsigned bits) {
    static const std::vector<float> table = [] {
        std::vector<float> values(1 << 16);
        for (unsigned i = 0; i < values.size(); i++) values[i] = computed_float16(i);
        return values;
    }();
    return table[bits];
}

float of_bfloat16(unsigned bits) {
    float value;
    bits <<= 16;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

unsigned short to_float16(float value) {
    const unsigned sign = bits_of(value) >> 16 & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7FFF;
    if (magnitude >= 65520) return sign | 0x7C00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
    if (magnitude < std::ldexp(1.0f, -14)) exponent = -13;
    // 1024 of them, or more, unless it is denormal
    const float units = std::nearbyint(std::ldexp(magnitude, 11 - exponent));
    return sign | (static_cast<unsigned>(units) + (static_cast<unsigned>(exponent + 13) << 10));
}

unsigned short to_bfloat16(float value) {
    const unsigned bits = bits_of(value);
    return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

float of_float8(unsigned bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude =
        exponent == 15 && fraction == 7
            ? NAN
            : std::ldexp(static_cast<float>(exponent ? 8 + fraction : fraction), (exponent ? exponent : 1) - 10);
    return bits >> 7 ? -magnitude : magnitude;
}

unsigned char to_float8(float value) {
    const unsigned sign = bits_of(value) >> 24 & 0x80;
    const float magnitude = std::fmin(std::fabs(value), 448.0f);
    if (std::isnan(value)) return 0x7F;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
    if (magnitude < std::ldexp(1.0f, -6)) exponent = -5;
    // 8 of them, or more, unless it is denormal
    const float units = std::nearbyint(std::ldexp(magnitude, 4 - exponent));
    return sign | (static_cast<unsigned>(units) + (static_cast<unsigned>(exponent + 5) << 3));
}

void exchange_rows(void* const* lanes) {
    for (int lane = 0; lane < 32; lane++) {
        for (int matrix = 0; matrix < 4; matrix++) {
            static_cast<MatrixRow*>(lanes[lane])->to[matrix] =
                static_cast<MatrixRow*>(lanes[8 * matrix + lane / 4])->row[lane % 4];
        }
    }
}

void exchange_rows_transposed(void* const* lanes) {
    for (int lane = 0; lane < 32; lane++) {
        const int column = lane / 4, row = lane % 4 * 2;
        for (int matrix = 0; matrix < 4; matrix++) {
            unsigned pair = 0;
            for (int i = 0; i < 2; i++) {
                pair |= (static_cast<MatrixRow*>(lanes[8 * matrix + row + i])->row[column / 2] >> (column % 2 * 16)
                         & 0xFFFF)
                        << (16 * i);
            }
            static_cast<MatrixRow*>(lanes[lane])->to[matrix] = pair;
        }
    }
}

void transpose_words(void* const* lanes) {
    for (int lane = 0; lane < 32; lane++) {
        const int column = lane / 4, row = lane % 4 * 2;
        unsigned pair = 0;
        for (int i = 0; i < 2; i++) {
            pair |= (static_cast<MatrixWord*>(lanes[4 * (row + i) + column / 2])->word >> (column % 2 * 16) & 0xFFFF)
                    << (16 * i);
        }
        *static_cast<MatrixWord*>(lanes[lane])->to = pair;
    }
}

template <class ToFloat>
static inline void multiply_add(void* const* lanes, ToFloat to_float) {
    float a[16][16], b[16][8], products[16][8] = {};
    for (int lane = 0; lane < 32; lane++) {
        const auto& mine = *static_cast<const MatrixProduct*>(lanes[lane]);
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 2; i++) {
            for (int part = 0; part < 4; part++)
                a[group + part % 2 * 8][pair + part / 2 * 8 + i] = to_float(mine.a[part] >> (16 * i) & 0xFFFF);
            for (int part = 0; part < 2; part++)
                b[pair + part * 8 + i][group] = to_float(mine.b[part] >> (16 * i) & 0xFFFF);
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) products[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++)
            static_cast<MatrixProduct*>(lanes[lane])->sum[i] += products[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

void multiply_add_float16(void* const* lanes) {
    multiply_add(lanes, [](unsigned bits) { return of_float16(bits); });
}
void multiply_add_bfloat16(void* const* lanes) {
    multiply_add(lanes, [](unsigned bits) { return of_bfloat16(bits); });
}

static unsigned element(const unsigned* words, int number) { return words[number / 2] >> (number % 2 * 16) & 0xFFFF; }

template <class ToFloat>
static inline void multiply_panels(void* const* lanes, ToFloat to_float) {
    const auto of_lane = [&](int lane) -> WarpgroupProduct& { return *static_cast<WarpgroupProduct*>(lanes[lane]); };
    const bool is_transposed = of_lane(0).is_transposed;
    const int columns = 8 * of_lane(0).fragments;
    float a[16][16], b[16][64], products[16][64] = {};
    for (int lane = 0; lane < 32; lane++) {
        const WarpgroupProduct& mine = of_lane(lane);
        for (int i = 0; i < 8; i++) {
            if (is_transposed) {
                a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i / 4 * 8 + i % 2] = to_float(element(mine.a, i));
            } else {
                a[lane / 2][lane % 2 * 8 + i] = to_float(element(mine.a, i));
            }
            for (int part = 0; part < 4; part++) {
                const float value = to_float(element(mine.b[part], i));
                if (is_transposed) {
                    b[lane / 2][(lane % 2 * 4 + part) * 8 + i] = value;
                } else if (16 * part < columns) {
                    b[lane % 2 * 8 + i][16 * part + lane / 2] = value;
                }
            }
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < columns; column++) products[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < columns / 2; i++)
            of_lane(lane).product[i] = products[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
    }
}

void multiply_panels_float16(void* const* lanes) {
    multiply_panels(lanes, [](unsigned bits) { return of_float16(bits); });
}
void multiply_panels_bfloat16(void* const* lanes) {
    multiply_panels(lanes, [](unsigned bits) { return of_bfloat16(bits); });
}

}  // namespace simt
