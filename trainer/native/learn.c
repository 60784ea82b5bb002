/* The learner's pass over a narrow model with adapters (trainer/native_pass.py): the hidden states of packed
   tokens, and the gradients of all adapters.

   Weight and adapter are added up first, so the forward pass has no adapters in it. Work comes in phases
   that all threads share: a phase is a list of jobs, whoever is free takes the next, and nobody begins the
   next phase before all have ended this one. What a job computes does not depend on who takes it, so the
   number of threads changes no bit: gradients are summed over STRETCHES of the tokens, always as many, and
   these in their order.

   Per token and layer a pass keeps both normed inputs, the heads before and after their norm, what was
   attended to, and what the MLP gates; weights of the attention are computed again.

   H hidden, A query heads, K key heads, D head size, I inner size, N tokens, R ranks of modules together. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "vectors.h"

enum { TILE = 64, QUERIES = 32, STRETCHES = 8, THREADS = 64, PHASES = 1024, PATIENCE = 20000 };
enum { QKV, OUT, GATE_UP, DOWN, FUSED };

typedef struct {
    int64_t outputs, rank;
    const real *weight, *a, *b; /* (outputs, inputs), (rank, inputs), (outputs, rank) */
    real *grad_a, *grad_b;      /* like a and b */
} Module;

/* Modules that share an input, as one matrix. The rest is filled in here: its panels, those of its
   transpose, those of the adapters, and where gradients lie in a stretch's share. */
typedef struct {
    int64_t inputs, outputs, count;
    const real *bias, *fold; /* (outputs), and (inputs): what the norm before multiplies the inputs with */
    const Module *module;
    int64_t ranks, width, share;
    real *forward, *backward, *low, *high;
} Fused;

typedef struct {
    Fused fused[FUSED];
    const real *qk_norm; /* (A + K, D) */
} Layer;

typedef struct {
    int64_t start, end, context, num_context;
} Segment;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, tokens, segments, trees, threads, keeps;
    double eps, scale; /* of the norms; of the adapters */
    const real *cos, *sin;  /* (N, D / 2) */
    const Segment *segment; /* in the order of N */
    const int64_t *tree;    /* (trees + 1): each tree's first segment; a tree's segments share a context */
    Layer *layer;
    real *x;    /* (N, H): embeddings in, hidden states out; then the gradient of these, changed in place */
    real *kept; /* kept_size(): what the way back needs */
    real *work; /* work_size(): panels, scratch */
    atomic_long team, arrived, next[PHASES];
} Pass;

/* What one layer keeps. */
typedef struct {
    real *u, *length, *qkv, *normed, *lengths, *seen, *mass, *v, *v_length, *gate_up;
} Kept;

static int64_t up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- products ------------------------------------------------------------------------------------- */

/* One panel's columns (one vector of them or two) of out = x w. */
static inline __attribute__((always_inline)) void panel(
    const real *x, int64_t x_stride, int64_t rows, int64_t inputs, const real *w, int lanes, int two,
    const real *bias, real *out, int64_t stride, int add) {
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t count = least(rows - first, ROWS);
        const real *p = w, *at[ROWS];
        vec a[ROWS], b[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            at[r] = x + (first + (r < count ? r : 0)) * x_stride;
            a[r] = b[r] = splat(0);
        }
        for (int64_t i = 0; i < inputs; i++, p += lanes) {
            const vec left = *(const vec *)p, right = two ? *(const vec *)(p + WIDE) : left;
            __builtin_prefetch(p + AHEAD);
            if (two) __builtin_prefetch(p + AHEAD + WIDE);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                a[r] += at[r][i] * left;
                if (two) b[r] += at[r][i] * right;
            }
        }
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

/* Lanes of the panels of that many outputs. */
static int64_t lanes_of(int64_t outputs) { return outputs <= WIDE ? WIDE : LANES; }

/* out[r, o] = bias[o] + sum_i x[r, i] w[i, o] (+ what is there, with `add`). Whole vectors are written:
   the rows of `out` are that much apart. Panels are `depth` inputs long, of which the first are used. */
static void multiply(const real *x, int64_t x_stride, int64_t rows, int64_t inputs, const real *w,
                     int64_t depth, const real *bias, int64_t outputs, real *out, int64_t stride, int add) {
    if (outputs <= WIDE) {
        panel(x, x_stride, rows, inputs, w, WIDE, 0, bias, out, stride, add);
        return;
    }
    for (int64_t o = 0; o < outputs; o += LANES, w += LANES * depth) {
        const real *here = bias ? bias + o : 0;
        if (outputs - o > WIDE) panel(x, x_stride, rows, inputs, w, LANES, 1, here, out + o, stride, add);
        else panel(x, x_stride, rows, inputs, w, LANES, 0, here, out + o, stride, add);
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

/* ---- norms ---------------------------------------------------------------------------------------- */

/* x over the length of (x, sqrt(size eps)), which is returned. */
static real unit_of(const real *x, int64_t size, double eps, real *out) {
    const real length = sqrt(dot(x, x, size) + size * eps), over = 1 / length;
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * over;
    return length;
}

/* The gradient of x from that of u = unit_of(x), in its place. */
static void through_unit(real *grad, const real *u, real length, int64_t size) {
    const real along = dot(grad, u, size), over = 1 / length;
    for (int64_t i = 0; i < size; i++) grad[i] = (grad[i] - u[i] * along) * over;
}

/* ---- jobs ----------------------------------------------------------------------------------------- */

static int64_t take(Pass *p, int64_t phase) { return atomic_fetch_add(&p->next[phase], 1); }

/* Waits until all threads have come here. */
static void meet(Pass *p) {
    const int64_t team = atomic_load(&p->team), before = atomic_fetch_add(&p->arrived, 1);
    for (int64_t spins = 0; atomic_load(&p->arrived) < (before / team + 1) * team; spins++)
        if (spins > PATIENCE) sched_yield();
}

static Kept kept_of(const Pass *p, int64_t layer, real **end) {
    const int64_t N = p->tokens, H = p->hidden, D = p->head_dim, turned = p->heads + p->kv_heads;
    const int64_t sizes[] = {H, 1, (turned + p->kv_heads) * D, turned * D, turned, p->heads * D, p->heads,
                             H, 1, 2 * p->inner};
    int64_t total = 0;
    for (int i = 0; i < 10; i++) total += up(N * sizes[i], WIDE);
    real *at = p->kept + (p->keeps ? layer * total : 0), *found[10];
    for (int i = 0; i < 10; i++) {
        found[i] = at;
        at += up(N * sizes[i], WIDE);
    }
    if (end) *end = at;
    return (Kept){found[0], found[1], found[2], found[3], found[4],
                  found[5], found[6], found[7], found[8], found[9]};
}

/* ---- attention ------------------------------------------------------------------------------------ */

static int64_t key_row(const Segment *s, int64_t u) {
    return u < s->num_context ? s->context + u : s->start + u - s->num_context;
}

/* Rows of head `at` as panels of keys: what queries are multiplied with. */
static void by_key(const Pass *p, const Segment *s, const real *qkv, int64_t at, int64_t num_keys, real *to) {
    const int64_t D = p->head_dim, O = (p->heads + 2 * p->kv_heads) * D, lanes = lanes_of(num_keys);
    for (int64_t u = 0; u < up(num_keys, lanes); u++) {
        real *column = to + u / lanes * lanes * D + u % lanes;
        const real *from = u < num_keys ? qkv + key_row(s, u) * O + at * D : 0;
        for (int64_t d = 0; d < D; d++) column[d * lanes] = from ? from[d] : 0;
    }
}

/* The same as panels of the head's columns: what weights are multiplied with. */
static void by_column(const Pass *p, const Segment *s, const real *qkv, int64_t at, int64_t num_keys,
                      real *to) {
    const int64_t D = p->head_dim, O = (p->heads + 2 * p->kv_heads) * D, lanes = lanes_of(D);
    for (int64_t u = 0; u < num_keys; u++) {
        const real *from = qkv + key_row(s, u) * O + at * D;
        for (int64_t d = 0; d < D; d += WIDE)
            *(vec *)(to + d / lanes * lanes * num_keys + u * lanes + d % lanes) = *(const vec *)(from + d);
    }
}

/* exp(score - mass) for what may be seen, 0 for the rest up to `width`. */
static void weigh(real *scores, int64_t seen, int64_t width, real mass) {
    for (int64_t u = 0; u < width; u += WIDE) {
        vec e = vexp(*(vec *)(scores + u) - mass);
        if (u + WIDE > seen)
            for (int i = 0; i < WIDE; i++) if (u + i >= seen) e[i] = 0;
        *(vec *)(scores + u) = e;
    }
}

static real highest(const real *scores, int64_t seen) {
    real found = scores[0];
    for (int64_t u = 1; u < seen; u++) found = scores[u] > found ? scores[u] : found;
    return found;
}

/* One segment's queries of one key head. */
static void attend(const Pass *p, const Kept *k, const Segment *s, int64_t head, real *work) {
    const int64_t D = p->head_dim, A = p->heads, K = p->kv_heads, O = (A + 2 * K) * D, groups = A / K;
    const int64_t length = s->end - s->start, num_keys = s->num_context + length, U = up(num_keys, LANES);
    const real scale = 1 / sqrt((double)D);
    real *keys = work, *values = keys + U * D, *scores = values + num_keys * up(D, LANES);
    by_key(p, s, k->qkv, A + head, num_keys, keys);
    by_column(p, s, k->qkv, A + K + head, num_keys, values);
    for (int64_t t = 0; t < length; t += QUERIES) {
        const int64_t count = least(length - t, QUERIES), limit = s->num_context + t + count;
        const int64_t row = s->start + t, width = up(limit, WIDE);
        for (int64_t h = head * groups; h < (head + 1) * groups; h++) {
            multiply(k->qkv + row * O + h * D, O, count, D, keys, D, 0, width, scores, U, 0);
            for (int64_t r = 0; r < count; r++) {
                real *own = scores + r * U;
                const int64_t seen = s->num_context + t + r + 1;
                for (int64_t u = 0; u < width; u++) own[u] *= scale;
                const real top = highest(own, seen);
                weigh(own, seen, width, top);
                vec total = splat(0);
                for (int64_t u = 0; u < width; u += WIDE) total += *(vec *)(own + u);
                const real mass = sum(total), over = 1 / mass;
                for (int64_t u = 0; u < width; u++) own[u] *= over;
                k->mass[(row + r) * A + h] = top + log(mass);
            }
            multiply(scores, U, count, limit, values, num_keys, 0, D, k->seen + row * A * D + h * D, A * D, 0);
        }
    }
}

/* The way back through one tree's queries of one key head: from the gradient of `seen` (N, A D) to that of
   the heads (N, O). A context comes before what continues it, and is assigned; what continues it adds. */
static void unattend(const Pass *p, const Kept *k, int64_t tree, int64_t head, const real *grad_seen,
                     real *grad_qkv, real *work) {
    const int64_t D = p->head_dim, A = p->heads, K = p->kv_heads, O = (A + 2 * K) * D, groups = A / K;
    const real scale = 1 / sqrt((double)D);
    for (int64_t number = p->tree[tree]; number < p->tree[tree + 1]; number++) {
        const Segment *s = p->segment + number;
        const int64_t length = s->end - s->start, num_keys = s->num_context + length;
        const int64_t U = up(num_keys, LANES);
        real *keys = work, *values = keys + U * D, *columns = values + U * D;
        real *grad_keys = columns + num_keys * up(D, LANES), *grad_values = grad_keys + num_keys * D;
        real *weights = grad_values + num_keys * D, *grads = weights + QUERIES * U;
        by_key(p, s, k->qkv, A + head, num_keys, keys);
        by_key(p, s, k->qkv, A + K + head, num_keys, values);
        by_column(p, s, k->qkv, A + head, num_keys, columns);
        memset(grad_keys, 0, 2 * num_keys * D * sizeof(real));
        for (int64_t t = 0; t < length; t += QUERIES) {
            const int64_t count = least(length - t, QUERIES), limit = s->num_context + t + count;
            const int64_t row = s->start + t, width = up(limit, WIDE);
            for (int64_t h = head * groups; h < (head + 1) * groups; h++) {
                const real *query = k->qkv + row * O + h * D, *grad = grad_seen + row * A * D + h * D;
                multiply(query, O, count, D, keys, D, 0, width, weights, U, 0);
                multiply(grad, A * D, count, D, values, D, 0, width, grads, U, 0);
                for (int64_t r = 0; r < count; r++) {
                    real *own = weights + r * U, *to = grads + r * U;
                    const real *seen = k->seen + (row + r) * A * D + h * D;
                    const real along = dot(grad + r * A * D, seen, D);
                    for (int64_t u = 0; u < width; u++) own[u] *= scale;
                    weigh(own, s->num_context + t + r + 1, width, k->mass[(row + r) * A + h]);
                    for (int64_t u = 0; u < width; u++) to[u] = own[u] * (to[u] - along) * scale;
                }
                multiply(grads, U, count, limit, columns, num_keys, 0, D, grad_qkv + row * O + h * D, O, 0);
                gather(grads, U, limit, query, O, D, count, grad_keys, D);
                gather(weights, U, limit, grad, A * D, D, count, grad_values, D);
            }
        }
        for (int64_t u = 0; u < num_keys; u++) {
            real *key = grad_qkv + key_row(s, u) * O + (A + head) * D, *value = key + K * D;
            const int adds = u < s->num_context;
            for (int64_t d = 0; d < D; d++) {
                key[d] = (adds ? key[d] : 0) + grad_keys[u * D + d];
                value[d] = (adds ? value[d] : 0) + grad_values[u * D + d];
            }
        }
    }
}

/* ---- the rest of a layer, for some rows ----------------------------------------------------------- */

/* x -> heads, normed and turned. */
static void into_heads(const Pass *p, int64_t layer, int64_t first, int64_t rows) {
    const Layer *w = p->layer + layer;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, D = p->head_dim, turned = p->heads + p->kv_heads;
    const int64_t O = (turned + p->kv_heads) * D;
    const Fused *f = w->fused + QKV;
    for (int64_t n = first; n < first + rows; n++)
        k.length[n] = unit_of(p->x + n * H, H, p->eps, k.u + n * H);
    multiply(k.u + first * H, H, rows, H, f->forward, H, f->bias, O, k.qkv + first * O, O, 0);
    for (int64_t n = first; n < first + rows; n++)
        for (int64_t h = 0; h < turned; h++) {
            real *head = k.qkv + n * O + h * D, *normed = k.normed + (n * turned + h) * D;
            const real *cos_ = p->cos + n * D / 2, *sin_ = p->sin + n * D / 2;
            if (w->qk_norm) {
                k.lengths[n * turned + h] = unit_of(head, D, p->eps, normed);
                for (int64_t d = 0; d < D; d++) head[d] = normed[d] * w->qk_norm[h * D + d];
            }
            for (int64_t d = 0; d < D / 2; d++) {
                const real a = head[d], b = head[d + D / 2];
                head[d] = a * cos_[d] - b * sin_[d];
                head[d + D / 2] = b * cos_[d] + a * sin_[d];
            }
        }
}

/* silu(gate) up, of one row. */
static void gated(const real *gate_up, int64_t size, real *out) {
    for (int64_t i = 0; i < size; i += WIDE) {
        const vec gate = *(const vec *)(gate_up + i), up_ = *(const vec *)(gate_up + size + i);
        *(vec *)(out + i) = gate / (1 + vexp(-gate)) * up_;
    }
}

/* What was attended to -> x. */
static void out_of_heads(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *inner) {
    const Fused *f = p->layer[layer].fused;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, AD = p->heads * p->head_dim, I = p->inner;
    real *x = p->x + first * H, *gate_up = k.gate_up + first * 2 * I;
    multiply(k.seen + first * AD, AD, rows, AD, f[OUT].forward, AD, f[OUT].bias, H, x, H, 1);
    for (int64_t n = 0; n < rows; n++)
        k.v_length[first + n] = unit_of(x + n * H, H, p->eps, k.v + (first + n) * H);
    multiply(k.v + first * H, H, rows, H, f[GATE_UP].forward, H, f[GATE_UP].bias, 2 * I, gate_up, 2 * I, 0);
    for (int64_t n = 0; n < rows; n++) gated(gate_up + n * 2 * I, I, inner + n * I);
    multiply(inner, I, rows, I, f[DOWN].forward, I, f[DOWN].bias, H, x, H, 1);
}

/* Adds these rows' share to the gradients of the adapters of y = x W, from that of y. */
static void adapt(const Fused *f, const real *x, const real *grad, int64_t rows, real *share, real *low) {
    if (!f->ranks) return;
    real *high = low + TILE * f->width, *to = share + f->share, *panels = f->high;
    multiply(x, f->inputs, rows, f->inputs, f->low, f->inputs, 0, f->ranks, low, f->width, 0);
    int64_t output = 0, rank = 0;
    real *grad_b = to + f->ranks * f->inputs;
    for (const Module *m = f->module; m < f->module + f->count; output += m++->outputs) {
        if (!m->rank) continue;
        real column[TILE * LANES];
        for (int64_t r = 0; r < m->rank; r += LANES) {
            const int64_t some = least(m->rank - r, LANES), lanes = lanes_of(some);
            multiply(grad + output, f->outputs, rows, m->outputs, panels, m->outputs, 0, some, column, LANES, 0);
            for (int64_t n = 0; n < rows; n++)
                memcpy(high + n * f->width + rank + r, column + n * LANES, some * sizeof(real));
            panels += m->outputs * lanes;
        }
        gather(low + rank, f->width, m->rank, grad + output, f->outputs, m->outputs, rows, grad_b, m->outputs);
        grad_b += m->rank * m->outputs;
        rank += m->rank;
    }
    gather(high, f->width, f->ranks, x, f->inputs, f->inputs, rows, to, f->inputs);
}

/* The gradient of x after a layer, in its place -> that after its attention; and that of what was attended
   to. */
static void back_to_seen(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *share,
                         real *grad_seen, real *work) {
    const Fused *f = p->layer[layer].fused;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, AD = p->heads * p->head_dim, I = p->inner;
    real *grad = p->x + first * H, *inner = work, *grad_inner = inner + TILE * I;
    real *grad_gate_up = grad_inner + TILE * I, *grad_v = grad_gate_up + TILE * 2 * I, *low = grad_v + TILE * H;
    for (int64_t n = 0; n < rows; n++) gated(k.gate_up + (first + n) * 2 * I, I, inner + n * I);
    adapt(f + DOWN, inner, grad, rows, share, low);
    multiply(grad, H, rows, H, f[DOWN].backward, H, 0, I, grad_inner, I, 0);
    for (int64_t n = 0; n < rows; n++)
        for (int64_t i = 0; i < I; i += WIDE) {
            const real *from = k.gate_up + (first + n) * 2 * I + i;
            const vec gate = *(const vec *)from, up_ = *(const vec *)(from + I);
            const vec g = *(vec *)(grad_inner + n * I + i), sigmoid = 1 / (1 + vexp(-gate));
            *(vec *)(grad_gate_up + n * 2 * I + i) = g * up_ * sigmoid * (1 + gate * (1 - sigmoid));
            *(vec *)(grad_gate_up + n * 2 * I + I + i) = g * gate * sigmoid;
        }
    adapt(f + GATE_UP, k.v + first * H, grad_gate_up, rows, share, low);
    multiply(grad_gate_up, 2 * I, rows, 2 * I, f[GATE_UP].backward, 2 * I, 0, H, grad_v, H, 0);
    for (int64_t n = 0; n < rows; n++) {
        through_unit(grad_v + n * H, k.v + (first + n) * H, k.v_length[first + n], H);
        for (int64_t i = 0; i < H; i++) grad[n * H + i] += grad_v[n * H + i];
    }
    adapt(f + OUT, k.seen + first * AD, grad, rows, share, low);
    multiply(grad, H, rows, H, f[OUT].backward, H, 0, AD, grad_seen + first * AD, AD, 0);
}

/* The gradient of the heads, and of x after the attention, in its place -> that of x before the layer. */
static void back_to_input(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *share,
                          real *grad_qkv, real *work) {
    const Layer *w = p->layer + layer;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, D = p->head_dim, turned = p->heads + p->kv_heads;
    const int64_t O = (turned + p->kv_heads) * D;
    const Fused *f = w->fused + QKV;
    real *grad = grad_qkv + first * O, *grad_u = work, *low = grad_u + TILE * H;
    for (int64_t n = first; n < first + rows; n++)
        for (int64_t h = 0; h < turned; h++) {
            real *head = grad_qkv + n * O + h * D;
            const real *cos_ = p->cos + n * D / 2, *sin_ = p->sin + n * D / 2;
            for (int64_t d = 0; d < D / 2; d++) {
                const real a = head[d], b = head[d + D / 2];
                head[d] = a * cos_[d] + b * sin_[d];
                head[d + D / 2] = b * cos_[d] - a * sin_[d];
            }
            if (!w->qk_norm) continue;
            for (int64_t d = 0; d < D; d++) head[d] *= w->qk_norm[h * D + d];
            through_unit(head, k.normed + (n * turned + h) * D, k.lengths[n * turned + h], D);
        }
    adapt(f, k.u + first * H, grad, rows, share, low);
    if (!layer) return; /* embeddings are not trained */
    multiply(grad, O, rows, O, f->backward, O, 0, H, grad_u, H, 0);
    for (int64_t n = 0; n < rows; n++) {
        through_unit(grad_u + n * H, k.u + (first + n) * H, k.length[first + n], H);
        for (int64_t i = 0; i < H; i++) p->x[(first + n) * H + i] += grad_u[n * H + i];
    }
}

/* ---- weights -------------------------------------------------------------------------------------- */

/* Panels of the adapters: scale B, and A times what the norm before folds in. */
static void pack_adapters(const Fused *f, real scale) {
    const int64_t lanes = lanes_of(f->ranks);
    int64_t rank = 0;
    real *high = f->high;
    for (const Module *m = f->module; m < f->module + f->count; m++) {
        for (int64_t r = 0; r < m->rank; r++, rank++) {
            real *column = f->low + rank / lanes * lanes * f->inputs + rank % lanes;
            for (int64_t i = 0; i < f->inputs; i++)
                column[i * lanes] = m->a[r * f->inputs + i] * (f->fold ? f->fold[i] : 1);
        }
        for (int64_t r = 0; r < m->rank; r += LANES) {
            const int64_t some = least(m->rank - r, LANES), wide = lanes_of(some);
            for (int64_t o = 0; o < m->outputs; o++, high += wide)
                for (int64_t i = 0; i < wide; i++) high[i] = i < some ? m->b[o * m->rank + r + i] * scale : 0;
        }
    }
    for (; rank < f->width; rank++) {
        real *column = f->low + rank / lanes * lanes * f->inputs + rank % lanes;
        for (int64_t i = 0; i < f->inputs; i++) column[i * lanes] = 0;
    }
}

/* A panel of outputs of the matrix, adapters added in, and the rows of its transpose that they are. */
static void pack(const Fused *f, int64_t number, real scale, real *row) {
    const int64_t lanes = lanes_of(f->outputs), back = lanes_of(f->inputs);
    for (int64_t o = number * lanes; o < (number + 1) * lanes; o++) {
        real *column = f->forward + number * lanes * f->inputs + o % lanes;
        int64_t start = 0;
        const Module *m = f->module;
        while (m < f->module + f->count && o >= start + m->outputs) start += m++->outputs;
        if (m == f->module + f->count) {
            for (int64_t i = 0; i < f->inputs; i++) column[i * lanes] = 0;
            continue;
        }
        memcpy(row, m->weight + (o - start) * f->inputs, f->inputs * sizeof(real));
        for (int64_t r = 0; r < m->rank; r++) {
            const real by = m->b[(o - start) * m->rank + r] * scale, *a = m->a + r * f->inputs;
            for (int64_t i = 0; i < f->inputs; i++) row[i] += by * a[i];
        }
        if (f->fold) for (int64_t i = 0; i < f->inputs; i++) row[i] *= f->fold[i];
        for (int64_t i = 0; i < f->inputs; i++) {
            column[i * lanes] = row[i];
            f->backward[i / back * back * f->outputs + o * back + i % back] = row[i];
        }
    }
}

static real summed(const real *first, int64_t size) {
    real total = first[0];
    for (int s = 1; s < STRETCHES; s++) total += first[s * size];
    return total;
}

/* Sums a matrix's gradients over the stretches, into those of the tensors. */
static void finish(const Fused *f, const real *shares, int64_t size, real scale) {
    int64_t at = f->share;
    for (const Module *m = f->module; m < f->module + f->count; m++)
        for (int64_t i = 0; i < m->rank * f->inputs; i++, at++)
            m->grad_a[i] = summed(shares + at, size) * (f->fold ? f->fold[i % f->inputs] : 1);
    for (const Module *m = f->module; m < f->module + f->count; m++)
        for (int64_t r = 0; r < m->rank; r++)
            for (int64_t o = 0; o < m->outputs; o++, at++)
                m->grad_b[o * m->rank + r] = summed(shares + at, size) * scale;
}

/* ---- passes --------------------------------------------------------------------------------------- */

static int64_t scratch_size(const Pass *p) {
    int64_t keys = 0, ranks = 0, inputs = 0;
    for (int64_t s = 0; s < p->segments; s++)
        keys = most(keys, p->segment[s].num_context + p->segment[s].end - p->segment[s].start);
    for (int64_t l = 0; l < p->layers; l++)
        for (int f = 0; f < FUSED; f++) {
            const Fused *fused = p->layer[l].fused + f;
            int64_t total = 0;
            for (int64_t m = 0; m < fused->count; m++) total += fused->module[m].rank;
            ranks = most(ranks, up(total, LANES));
            inputs = most(inputs, fused->inputs);
        }
    const int64_t U = up(keys, LANES), D = up(p->head_dim, LANES);
    const int64_t rows = TILE * (4 * p->inner + p->hidden + 2 * ranks);
    return up(most(most(rows, inputs), 5 * U * D + 2 * QUERIES * U), WIDE) + 4 * WIDE;
}

/* Gives every matrix its place in `work`; then come the shares of the gradients, the gradients of `seen` and
   of the heads, and each thread's scratch. Returns how much that is in all. */
static int64_t places(Pass *p, real **shares, int64_t *share, real **grad_seen, real **grad_qkv,
                       real **scratch) {
    real *at = p->work;
    *share = 0;
    for (int64_t l = 0; l < p->layers; l++)
        for (int i = 0; i < FUSED; i++) {
            Fused *f = p->layer[l].fused + i;
            int64_t high = 0, held = 0;
            f->ranks = 0;
            for (const Module *m = f->module; m < f->module + f->count; m++) {
                for (int64_t r = 0; r < m->rank; r += LANES)
                    high += m->outputs * lanes_of(least(m->rank - r, LANES));
                f->ranks += m->rank;
                held += m->rank * (f->inputs + m->outputs);
            }
            f->width = up(f->ranks, lanes_of(f->ranks));
            f->share = *share;
            *share += held;
            f->forward = at, at += up(f->outputs, lanes_of(f->outputs)) * f->inputs;
            f->backward = at, at += up(f->inputs, lanes_of(f->inputs)) * f->outputs;
            f->low = at, at += f->width * f->inputs;
            f->high = at, at += high;
        }
    *share = up(*share, WIDE);
    at += AHEAD;
    *shares = at, at += p->keeps ? STRETCHES * *share : 0;
    *grad_seen = at, at += p->keeps ? p->tokens * p->heads * p->head_dim : 0;
    *grad_qkv = at, at += p->keeps ? p->tokens * (p->heads + 2 * p->kv_heads) * p->head_dim : 0;
    *scratch = at, at += p->threads * scratch_size(p);
    return at - p->work;
}

int64_t learn_kept_size(const Pass *p) {
    real *end;
    kept_of(p, p->keeps ? p->layers - 1 : 0, &end);
    return end - p->kept;
}

int64_t learn_work_size(Pass *p) {
    real *shares, *grad_seen, *grad_qkv, *scratch;
    int64_t share;
    return places(p, &shares, &share, &grad_seen, &grad_qkv, &scratch);
}

static void forward(Pass *p, real *scratch) {
    const int64_t tiles = (p->tokens + TILE - 1) / TILE, heads = p->kv_heads;
    int64_t phase = 0, job;
    for (; (job = take(p, phase)) < p->layers * FUSED;)
        pack_adapters(p->layer[job / FUSED].fused + job % FUSED, p->scale);
    for (int64_t i = 0; i < p->layers * FUSED; i++) {
        const Fused *f = p->layer[i / FUSED].fused + i % FUSED;
        const int64_t lanes = lanes_of(f->outputs);
        for (phase++; (job = take(p, phase)) * lanes < f->outputs;) pack(f, job, p->scale, scratch);
    }
    meet(p);
    for (int64_t l = 0; l <= p->layers; l++) {
        for (phase++; (job = take(p, phase)) < tiles;) {
            const int64_t first = job * TILE, rows = least(p->tokens - first, TILE);
            if (l) out_of_heads(p, l - 1, first, rows, scratch);
            if (l < p->layers) into_heads(p, l, first, rows);
        }
        meet(p);
        if (l == p->layers) break;
        const Kept k = kept_of(p, l, 0);
        for (phase++; (job = take(p, phase)) < p->segments * heads;)
            attend(p, &k, p->segment + job / heads, job % heads, scratch);
        meet(p);
    }
}

static void backward(Pass *p, real *scratch) {
    real *shares, *grad_seen, *grad_qkv, *unused;
    int64_t size, phase = -1, job;
    const int64_t heads = p->kv_heads, stretch = up((p->tokens + STRETCHES - 1) / STRETCHES, ROWS);
    places(p, &shares, &size, &grad_seen, &grad_qkv, &unused);
    for (int64_t l = p->layers; l >= 0; l--) {
        for (phase++; (job = take(p, phase)) < STRETCHES;) {
            real *share = shares + job * size;
            if (l == p->layers) memset(share, 0, size * sizeof(real));
            const int64_t end = least((job + 1) * stretch, p->tokens);
            for (int64_t first = job * stretch; first < end; first += TILE) {
                const int64_t rows = least(end - first, TILE);
                if (l < p->layers) back_to_input(p, l, first, rows, share, grad_qkv, scratch);
                if (l) back_to_seen(p, l - 1, first, rows, share, grad_seen, scratch);
            }
        }
        meet(p);
        if (!l) break;
        const Kept k = kept_of(p, l - 1, 0);
        for (phase++; (job = take(p, phase)) < p->trees * heads;)
            unattend(p, &k, job / heads, job % heads, grad_seen, grad_qkv, scratch);
        meet(p);
    }
    for (phase++; (job = take(p, phase)) < p->layers * FUSED;)
        finish(p->layer[job / FUSED].fused + job % FUSED, shares, size, p->scale);
}

/* ---- threads -------------------------------------------------------------------------------------- */

typedef struct {
    Pass *pass;
    void (*work)(Pass *, real *);
    real *scratch;
} Member;

static void *join_in(void *argument) {
    const Member *m = argument;
    while (!atomic_load(&m->pass->team)) sched_yield();
    m->work(m->pass, m->scratch);
    return 0;
}

/* Runs `work` on this thread and as many others as can be had. */
static void together(Pass *p, void (*work)(Pass *, real *)) {
    real *shares, *grad_seen, *grad_qkv, *scratch;
    int64_t size, others = 0;
    pthread_t thread[THREADS];
    Member member[THREADS];
    places(p, &shares, &size, &grad_seen, &grad_qkv, &scratch);
    atomic_store(&p->team, 0);
    atomic_store(&p->arrived, 0);
    for (int i = 0; i < PHASES; i++) atomic_store(&p->next[i], 0);
    for (; others + 1 < least(p->threads, THREADS); others++) {
        member[others] = (Member){p, work, scratch + (others + 1) * scratch_size(p)};
        if (pthread_create(thread + others, 0, join_in, member + others)) break;
    }
    atomic_store(&p->team, others + 1);
    work(p, scratch);
    for (int64_t i = 0; i < others; i++) pthread_join(thread[i], 0);
}

void learn_forward(Pass *p) { together(p, forward); }
void learn_backward(Pass *p) { together(p, backward); }
