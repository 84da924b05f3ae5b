/* The products of float32 in NumPy's OpenBLAS with the terms of their sums in another order; to be preloaded.
 *
 * The terms are handed to OpenBLAS itself in an order that is drawn from the sizes of the product and SUM_ORDER: equal products have
 * equal results, bit for bit, and products of other sizes have other rounding errors, as from one CPU to the next.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, PLAIN = 111, TRANSPOSED = 112 };

typedef void (*Gemm)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float, float *, int64_t);
typedef void (*Gemv)(int, int, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float, float *, int64_t);
typedef float (*Dot)(int64_t, const float *, int64_t, const float *, int64_t);

static const char *setting(const char *name) {
    const char *value = getenv(name);
    if (!value) {
        fprintf(stderr, "%s is not set\n", name);
        abort();
    }
    return value;
}

/* The function of OpenBLAS that one of this file stands before. */
static void *behind(const char *name) {
    void *library = dlopen(setting("SUM_ORDER_BLAS"), RTLD_NOW);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        abort();
    }
    return function;
}

static void *room(int64_t count, size_t size) {
    void *memory = malloc((count + 1) * size);
    if (!memory)
        abort();
    return memory;
}

static int64_t *shuffled(int64_t m, int64_t n, int64_t k) {
    int64_t *order = room(k, sizeof *order);
    uint64_t state = (atoll(setting("SUM_ORDER")) + 1) * 0x9E3779B97F4A7C15u + 1000003 * m + 7919 * n + k;
    for (int64_t i = 0; i < k; i++)
        order[i] = i;
    for (int64_t i = k - 1; i > 0; i--) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17; /* xorshift64, Marsaglia 2003 */
        int64_t other = state % (uint64_t)(i + 1), kept = order[i];
        order[i] = order[other], order[other] = kept;
    }
    return order;
}

/* The vector of k elements `stride` apart, in that order. */
static float *vector(int64_t k, const float *x, int64_t stride, const int64_t *order) {
    float *result = room(k, sizeof *result);
    for (int64_t i = 0; i < k; i++)
        result[i] = x[order[i] * stride];
    return result;
}

/* The matrix [rows, k], or [k, rows] if `down`, of which element (i, j) is x[i * row + j * term], with its terms in that order. */
static float *matrix(int64_t rows, int64_t k, const float *x, int64_t row, int64_t term, const int64_t *order, int down) {
    float *result = room(rows * k, sizeof *result);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < k; j++)
            result[down ? j * rows + i : i * k + j] = x[i * row + order[j] * term];
    return result;
}

static int64_t at_least_1(int64_t size) { return size > 1 ? size : 1; }

void scipy_cblas_sgemm64_(int layout, int op_a, int op_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                          const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    static Gemm gemm;
    if (!gemm)
        gemm = (Gemm)behind("scipy_cblas_sgemm64_");
    int a_by_row = (layout == ROW_MAJOR) == (op_a == PLAIN), b_by_row = (layout == ROW_MAJOR) == (op_b == PLAIN);
    int64_t *order = shuffled(m, n, k);
    float *left = matrix(m, k, a, a_by_row ? lda : 1, a_by_row ? 1 : lda, order, 0);
    float *right = matrix(n, k, b, b_by_row ? 1 : ldb, b_by_row ? ldb : 1, order, 1);
    int op = layout == ROW_MAJOR ? PLAIN : TRANSPOSED; /* both are by row now */
    gemm(layout, op, op, m, n, k, alpha, left, at_least_1(k), right, at_least_1(n), beta, c, ldc);
    free(right), free(left), free(order);
}

void scipy_cblas_sgemv64_(int layout, int op, int64_t m, int64_t n, float alpha, const float *a, int64_t lda, const float *x,
                          int64_t x_stride, float beta, float *y, int64_t y_stride) {
    static Gemv gemv;
    if (!gemv)
        gemv = (Gemv)behind("scipy_cblas_sgemv64_");
    if (x_stride < 0) { /* then x is its last element */
        gemv(layout, op, m, n, alpha, a, lda, x, x_stride, beta, y, y_stride);
        return;
    }
    int by_row = (layout == ROW_MAJOR) == (op == PLAIN);
    int64_t rows = op == PLAIN ? m : n, k = op == PLAIN ? n : m, *order = shuffled(rows, 1, k);
    float *left = matrix(rows, k, a, by_row ? lda : 1, by_row ? 1 : lda, order, 0), *right = vector(k, x, x_stride, order);
    gemv(ROW_MAJOR, PLAIN, rows, k, alpha, left, at_least_1(k), right, 1, beta, y, y_stride);
    free(right), free(left), free(order);
}

float scipy_cblas_sdot64_(int64_t k, const float *x, int64_t x_stride, const float *y, int64_t y_stride) {
    static Dot dot;
    if (!dot)
        dot = (Dot)behind("scipy_cblas_sdot64_");
    if (x_stride < 0 || y_stride < 0)
        return dot(k, x, x_stride, y, y_stride);
    int64_t *order = shuffled(1, 1, k);
    float *left = vector(k, x, x_stride, order), *right = vector(k, y, y_stride, order), sum = dot(k, left, 1, right, 1);
    free(right), free(left), free(order);
    return sum;
}
