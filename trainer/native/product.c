/* The product of a matrix with a weight, with the bits of the library that torch calls (trainer/native/product.py).

   That library sums `block` products of a number one after the other, with fused multiply and add. Then it adds
   this sum to the number, and continues with the next ones. The same is done here, so every number is the same.
   Only the order in which memory is read differs: a panel of LANES outputs of the weight is copied before it is
   used, and stays in the nearest cache for all rows. */

#include "phases.h"
#include "vectors.h"

enum { TILE = BYTES == 64 ? 14 : 6, MOST_BLOCK = 512, ALONE = 8, TOGETHER = 3 };

/* out[r, o] = add[r, o] + sum_i x[r, i] w[i, o]. Strides are those of rows; `x`, `add` and `out` have their columns
   one after the other. The weight has (inputs, outputs) if `across`, and else (outputs, inputs), in rows too.
   `add` is NULL, or has stride 0 if it is the same for all rows. */
typedef struct {
    int64_t rows, inputs, outputs, block, across, threads;
    const float *x, *w, *add;
    float *out;
    int64_t x_stride, w_stride, add_stride, out_stride;
    Phase phase;
} Product;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Copies `count` inputs of `width` outputs of the weight to a panel, and fills it up with zeros. */
static void copy_panel(const Product *p, int64_t input, int64_t count, int64_t output, int64_t width, float *panel) {
    if (width < LANES) memset(panel, 0, count * LANES * sizeof(float));
    if (p->across) {
        const float *from = p->w + input * p->w_stride + output;
        for (int64_t i = 0; i < count; i++, from += p->w_stride, panel += LANES) {
            if (width < LANES) memcpy(panel, from, width * sizeof(float));
            else {
                *(vec *)panel = *(const vec *)from;
                *(vec *)(panel + WIDE) = *(const vec *)(from + WIDE);
            }
        }
        return;
    }
    const float *from = p->w + output * p->w_stride + input;
    const int64_t whole_ = width == LANES ? count / WIDE * WIDE : 0;
    for (int64_t i = 0; i < whole_; i += WIDE)
        for (int64_t o = 0; o < LANES; o += WIDE) {
            vec square[WIDE];
            for (int r = 0; r < WIDE; r++) square[r] = *(const vec *)(from + (o + r) * p->w_stride + i);
            transpose(square);
            for (int r = 0; r < WIDE; r++) *(vec *)(panel + (i + r) * LANES + o) = square[r];
        }
    for (int64_t o = 0; o < width; o++)
        for (int64_t i = whole_; i < count; i++) panel[i * LANES + o] = from[o * p->w_stride + i];
}

/* Where the next panel is read from. It is asked for while this one is used, because the processor does not guess
   a panel's rows. After `left` places that are `stride` apart the next `per_row` begin `down` further on. */
typedef struct {
    const float *at;
    int64_t stride, down, left, per_row;
} Ahead;

/* The place that is copied after the panel at these inputs and outputs; none at the end of what a thread has
   claimed. Many rows take so long that asking gains nothing. */
static Ahead after(const Product *p, const Units *u, int64_t input, int64_t output) {
    const int64_t further = output + LANES < u->last * LANES, then = further ? input : input + p->block;
    const int64_t next = further ? output + LANES : u->first * LANES, per_row = p->block / LANES;
    if (then >= p->inputs || next + LANES > p->outputs || p->rows > 16 * TILE) return (Ahead){0};
    if (p->across) return (Ahead){p->w + then * p->w_stride + next, p->w_stride, 0, p->block, p->block};
    return (Ahead){p->w + next * p->w_stride + then, LANES, p->w_stride - p->block, per_row, per_row};
}

/* Adds the products of `many` rows with a panel of `count` inputs to `add`, and writes them to `out`. */
static inline __attribute__((always_inline)) void tile(const Product *p, const float *x, int many, int64_t count,
                                                       const float *panel, const float *add, int64_t add_stride,
                                                       float *out, int64_t stride, Ahead *ahead, int64_t asked) {
    const float *at[TILE];
    vec a[TILE], b[TILE];
#pragma GCC unroll 14
    for (int r = 0; r < many; r++) at[r] = x + r * p->x_stride, a[r] = b[r] = splat(0);
    for (int64_t i = 0; i < count; i++, panel += LANES) {
        const vec left = *(const vec *)panel, right = *(const vec *)(panel + WIDE);
        if (i < asked) {
            __builtin_prefetch(ahead->at, 0, 2);
            __builtin_prefetch(ahead->at + WIDE, 0, 2);
            ahead->at += ahead->stride;
            if (!--ahead->left) ahead->at += ahead->down, ahead->left = ahead->per_row;
        }
#pragma GCC unroll 14
        for (int r = 0; r < many; r++) {
            a[r] += at[r][i] * left;
            b[r] += at[r][i] * right;
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < many; r++, add += add_stride) {
        if (add) a[r] = *(const vec *)add + a[r], b[r] = *(const vec *)(add + WIDE) + b[r];
        *(vec *)(out + r * stride) = a[r];
        *(vec *)(out + r * stride + WIDE) = b[r];
    }
}

#define CASE(many) \
    case many: tile(p, x, many, count, panel, add, add_stride, out, stride, ahead, asked); break;

static void some_rows(const Product *p, const float *x, int64_t many, int64_t count, const float *panel,
                      const float *add, int64_t add_stride, float *out, int64_t stride, Ahead *ahead,
                      int64_t asked) {
    switch (many) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if BYTES == 64
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
}

/* Adds the products of all rows with `count` inputs of one panel. `first`: these are the first inputs. */
static void panel_rows(const Product *p, int64_t input, int64_t count, int64_t output, int first, const float *panel,
                       Ahead *ahead) {
    const int64_t width = least(p->outputs - output, LANES), tiles = (p->rows + TILE - 1) / TILE;
    const int64_t asked = ahead->at ? (count + tiles - 1) / tiles : 0;
    for (int64_t t = 0, row = 0; t < tiles; t++) {
        const int64_t many = (p->rows - row) / (tiles - t);
        const float *x = p->x + row * p->x_stride + input;
        float *out = p->out + row * p->out_stride + output;
        const float *add = !first ? out : p->add ? p->add + row * p->add_stride + output : 0;
        const int64_t add_stride = first ? p->add_stride : p->out_stride;
        if (width == LANES) some_rows(p, x, many, count, panel, add, add ? add_stride : 0, out, p->out_stride, ahead,
                                     asked);
        else {
            float before[TILE * LANES] = {0}, found[TILE * LANES];
            for (int64_t r = 0; add && r < many; r++)
                memcpy(before + r * LANES, add + r * add_stride, width * sizeof(float));
            some_rows(p, x, many, count, panel, add ? before : 0, add ? LANES : 0, found, LANES, ahead, asked);
            for (int64_t r = 0; r < many; r++)
                memcpy(out + r * p->out_stride, found + r * LANES, width * sizeof(float));
        }
        row += many;
    }
}

void product(Product *p) {
    float room[MOST_BLOCK * LANES + WIDE], *panel = (float *)(((uintptr_t)room + BYTES - 1) / BYTES * BYTES);
    const int64_t panels = (p->outputs + LANES - 1) / LANES;
    for (Units u = {0}; claim(&p->phase, panels, p->threads > 1 ? TOGETHER : ALONE, &u);)
        for (int64_t input = 0; input < p->inputs; input += p->block) {
            const int64_t count = least(p->inputs - input, p->block);
            for (int64_t o = u.first * LANES; o < u.last * LANES; o += LANES) {
                copy_panel(p, input, count, o, least(p->outputs - o, LANES), panel);
                Ahead ahead = after(p, &u, input, o);
                panel_rows(p, input, count, o, !input, panel, &ahead);
            }
        }
}
