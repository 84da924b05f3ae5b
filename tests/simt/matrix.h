// Instructions that a whole warp does together, and elements of 16 bits. Compiled without a sanitizer.
#pragma once

namespace simt {

struct MatrixRow {
    unsigned row[4];
    unsigned* to;
};

struct MatrixWord {
    unsigned word;
    unsigned* to;
};

struct MatrixProduct {
    float* sum;
    unsigned a[4], b[2];
};

// What a lane brings to a product of a warpgroup, of which its warp has 16 rows.
struct WarpgroupProduct {
    bool is_transposed;
    int fragments;     // of 8 columns
    unsigned a[4];     // half of row lane / 2; transposed: the fragment of A
    unsigned b[4][4];  // halves of rows 16 * i + lane / 2; transposed: half of row lane / 2, four chunks
    float product[32];
};

// Of Block::together: `lanes` points to what each of the 32 lanes brought.
void exchange_rows(void* const* lanes);
void exchange_rows_transposed(void* const* lanes);
void transpose_words(void* const* lanes);
void multiply_add_float16(void* const* lanes);
void multiply_add_bfloat16(void* const* lanes);
void multiply_panels_float16(void* const* lanes);
void multiply_panels_bfloat16(void* const* lanes);

float of_float16(unsigned bits);
float of_bfloat16(unsigned bits);
float of_float8(unsigned bits);
unsigned short to_float16(float value);
unsigned short to_bfloat16(float value);
unsigned char to_float8(float value);

}  // namespace simt
