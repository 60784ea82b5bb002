/* Products of matrices with packed weights, and the norms around them. */

#pragma once

#include "vectors.h"

static int64_t up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The columns of one panel of out = x w. A panel has one vector of columns, or two. */
static inline __attribute__((always_inline)) void columns(const real *x, int64_t x_stride, int64_t rows,
                                                          int64_t inputs, const real *w, int lanes, int two,
                                                          const real *bias, real *out, int64_t stride, int add) {
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t count = least(rows - first, ROWS);
        const real *at[ROWS];
        vec a[ROWS], b[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) at[r] = x + (first + (r < count ? r : 0)) * x_stride;
        rows_of(at, inputs, w, lanes, two, a, b);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            if (r >= count) break;
            real *to = out + (first + r) * stride;
            if (bias) a[r] += *(const vec *)bias;
            if (add) a[r] += *(const vec *)to;
            *(vec *)to = a[r];
            if (!two) continue;
            if (bias) b[r] += *(const vec *)(bias + WIDE);
            if (add) b[r] += *(const vec *)(to + WIDE);
            *(vec *)(to + WIDE) = b[r];
        }
    }
}

/* The number of lanes of each panel, for a matrix of this many outputs. */
static int64_t lanes_of(int64_t outputs) { return outputs <= WIDE ? WIDE : LANES; }

/* out[r, o] = bias[o] + sum_i x[r, i] w[i, o]. With `add`, the result is added to what `out` holds. Whole
   vectors are written, so the rows of `out` must have room for them. Panels are `depth` inputs long, and the
   first `inputs` of them are used. */
static void multiply(const real *x, int64_t x_stride, int64_t rows, int64_t inputs, const real *w,
                     int64_t depth, const real *bias, int64_t outputs, real *out, int64_t stride, int add) {
    if (outputs <= WIDE) {
        columns(x, x_stride, rows, inputs, w, WIDE, 0, bias, out, stride, add);
        return;
    }
    for (int64_t o = 0; o < outputs; o += LANES, w += LANES * depth) {
        const real *here = bias ? bias + o : 0;
        if (outputs - o > WIDE) columns(x, x_stride, rows, inputs, w, LANES, 1, here, out + o, stride, add);
        else columns(x, x_stride, rows, inputs, w, LANES, 0, here, out + o, stride, add);
    }
}

static inline __attribute__((always_inline)) void strip(const real *x, int64_t x_stride, int64_t inner,
                                                        const real *y, int64_t y_stride, int64_t rows,
                                                        real *out, int64_t stride, int two) {
    for (int64_t first = 0; first < inner; first += ROWS) {
        const int64_t count = least(inner - first, ROWS);
        vec a[ROWS], b[ROWS];
        int64_t at[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            at[r] = first + (r < count ? r : 0);
            a[r] = *(vec *)(out + at[r] * stride);
            if (two) b[r] = *(vec *)(out + at[r] * stride + WIDE);
        }
        for (int64_t n = 0; n < rows; n++) {
            const vec left = *(const vec *)(y + n * y_stride);
            const vec right = two ? *(const vec *)(y + n * y_stride + WIDE) : left;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const real value = x[n * x_stride + at[r]];
                a[r] += value * left;
                if (two) b[r] += value * right;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            if (r >= count) break;
            *(vec *)(out + at[r] * stride) = a[r];
            if (two) *(vec *)(out + at[r] * stride + WIDE) = b[r];
        }
    }
}

/* out[i, o] += sum_n x[n, i] y[n, o], for `inner` i and `outputs` o, a multiple of WIDE. */
static void gather(const real *x, int64_t x_stride, int64_t inner, const real *y, int64_t y_stride,
                   int64_t outputs, int64_t rows, real *out, int64_t stride) {
    for (int64_t o = 0; o < outputs; o += LANES) {
        if (outputs - o > WIDE) strip(x, x_stride, inner, y + o, y_stride, rows, out + o, stride, 1);
        else strip(x, x_stride, inner, y + o, y_stride, rows, out + o, stride, 0);
    }
}

/* Writes x divided by the length of (x, sqrt(size eps)), and returns that length. */
static real unit_of(const real *x, int64_t size, double eps, real *out) {
    const real length = sqrt(dot(x, x, size) + size * eps), over = 1 / length;
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * over;
    return length;
}

/* Replaces the gradient of u = unit_of(x) by that of x, in place. */
static void through_unit(real *grad, const real *u, real length, int64_t size) {
    const real along = dot(grad, u, size), over = 1 / length;
    for (int64_t i = 0; i < size; i++) grad[i] = (grad[i] - u[i] * along) * over;
}
