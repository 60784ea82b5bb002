/* Vectors, and products and norms that use them.

   They are the vector types of GCC and Clang, which the compiler maps to the instructions of the processor.
   Every sum is computed in an order that depends only on the sizes and on the row. So a row has the same bits
   whatever other rows are computed with it. Numbers are floats, or doubles with -DDOUBLE, which the tests use
   to compare.

   Weights are packed in panels of LANES outputs: (outputs / LANES, inputs, LANES). The last panel is filled up
   with zeros. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef DOUBLE
typedef double real;
typedef int64_t whole;
#else
typedef float real;
typedef int32_t whole;
#endif

/* BYTES is the size of the processor's vectors (trainer/native/compile.py), because GCC keeps larger ones in
   memory and compares them number by number. The sums of ROWS rows and two vectors stay in its registers. */
enum { WIDE = BYTES / sizeof(real), LANES = 2 * WIDE, ROWS = BYTES / 8, AHEAD = 16 * LANES };

typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef whole ivec __attribute__((vector_size(BYTES)));

static inline vec splat(real x) { return x - (vec){0}; }

static inline real sum(vec x) {
    real total = 0;
    for (int step = WIDE / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return total + x[0];
}

static inline vec chosen(ivec where, vec yes, vec no) {
    return (vec)((where & (ivec)yes) | (~where & (ivec)no));
}

/* The numbers at these places of two vectors. The places of the second vector come after those of the first. */
#ifdef __clang__
#define PICKED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICKED(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* A list with the place for each lane, computed by the macro `of` from (lane, step). */
#define OF_4(of, step) of(0, step), of(1, step), of(2, step), of(3, step)
#define OF_8(of, step) OF_4(of, step), of(4, step), of(5, step), of(6, step), of(7, step)
#define OF_16(of, step)                                                                              \
    OF_8(of, step), of(8, step), of(9, step), of(10, step), of(11, step), of(12, step), of(13, step), \
        of(14, step), of(15, step)
#if BYTES == 64 && !defined(DOUBLE)
#define OF_LANES OF_16
#elif BYTES == 64 || !defined(DOUBLE)
#define OF_LANES OF_8
#else
#define OF_LANES OF_4
#endif
#define OTHER(lane, step) ((lane) ^ (step))
#define LOW(lane, step) ((lane) & (step) ? (lane) + WIDE - (step) : (lane))
#define HIGH(lane, step) ((lane) & (step) ? (lane) + WIDE : (lane) + (step))

/* Swaps blocks of `step` lanes between rows whose indexes differ by `step`. */
#define CROSS(row, step)                                       \
    for (int i = 0; i < WIDE; i++)                             \
        if (!(i & (step))) {                                   \
            const vec a = row[i], b = row[i + (step)];         \
            row[i] = PICKED(a, b, OF_LANES(LOW, step));        \
            row[i + (step)] = PICKED(a, b, OF_LANES(HIGH, step)); \
        }

/* Transposes a square block of WIDE rows, in place. */
static inline void transpose(vec *row) {
    CROSS(row, 1)
    CROSS(row, 2)
#if BYTES == 64 || !defined(DOUBLE)
    CROSS(row, 4)
#endif
#if BYTES == 64 && !defined(DOUBLE)
    CROSS(row, 8)
#endif
}

#ifdef DOUBLE
static inline vec vexp(vec x) {
    for (int i = 0; i < WIDE; i++) x[i] = exp(x[i]);
    return x;
}
#else
/* exp to a relative error of about 1e-7, as 2^n e^r with |r| <= ln 2 / 2 and a polynomial for e^r. */
static inline vec vexp(vec x) {
    x = chosen(x < -87.3f, splat(-87.3f), x);
    x = chosen(x > 88.3f, splat(88.3f), x);
    vec n = x * 1.44269504f + 12582912.0f;
    n -= 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}
#endif

/* The products of `many` rows with one panel: a[r] and, with `two`, also b[r] = sum_i at[r][i] w[i]. */
static inline __attribute__((always_inline)) void some_rows_of(const real *const *at, int many, int64_t inputs,
                                                               const real *w, int lanes, int two, vec *a, vec *b) {
#pragma GCC unroll 8
    for (int r = 0; r < many; r++) a[r] = b[r] = splat(0);
    for (int64_t i = 0; i < inputs; i++, w += lanes) {
        const vec left = *(const vec *)w, right = two ? *(const vec *)(w + WIDE) : left;
        __builtin_prefetch(w + AHEAD);
        if (two) __builtin_prefetch(w + AHEAD + WIDE);
#pragma GCC unroll 8
        for (int r = 0; r < many; r++) {
            a[r] += at[r][i] * left;
            if (two) b[r] += at[r][i] * right;
        }
    }
}

/* The same for ROWS rows. */
static inline __attribute__((always_inline)) void rows_of(const real *const *at, int64_t inputs, const real *w,
                                                          int lanes, int two, vec *a, vec *b) {
    some_rows_of(at, ROWS, inputs, w, lanes, two, a, b);
}

static inline real dot(const real *x, const real *y, int64_t size) {
    vec total = splat(0);
    for (int64_t i = 0; i < size; i += WIDE) total += *(const vec *)(x + i) * *(const vec *)(y + i);
    return sum(total);
}

/* Writes x divided by the length of (x, sqrt(size eps)), multiplied by `by` unless that is NULL. */
static inline void unit(const real *x, const real *by, int64_t size, real eps, real *out) {
    const real scale = 1 / sqrt(dot(x, x, size) + size * eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * (by ? by[i] : 1);
}
