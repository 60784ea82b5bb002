/* Attention over packed segments, forward and backward. The queries of a segment see the tokens of its context,
   and those of the segment itself up to their own. */

#pragma once

#include "pass.h"

static int64_t key_row(const Pass *p, const Segment *s, int64_t u) {
    return u < s->num_context ? p->context[s->context + u] : s->start + u - s->num_context;
}

/* Writes the rows of head `at` as panels of keys, with which queries are multiplied. A block of queries sees
   all keys of the segment, or more than QUERIES of them, which is more than one vector. So the number of
   lanes that `multiply` chooses for the keys that a block sees is the one chosen here for all keys. */
static void by_key(const Pass *p, const Segment *s, const real *qkv, int64_t at, int64_t num_keys, real *to) {
    const int64_t D = p->head_dim, O = (p->heads + 2 * p->kv_heads) * D, lanes = lanes_of(num_keys);
    for (int64_t u = 0; u < up(num_keys, lanes); u += WIDE) {
        const real *from[WIDE];
        for (int i = 0; i < WIDE; i++)
            from[i] = u + i < num_keys ? qkv + key_row(p, s, u + i) * O + at * D : 0;
        for (int64_t d = 0; d < D; d += WIDE) {
            vec block[WIDE];
            for (int i = 0; i < WIDE; i++) block[i] = from[i] ? *(const vec *)(from[i] + d) : splat(0);
            transpose(block);
            for (int i = 0; i < WIDE; i++)
                *(vec *)(to + u / lanes * lanes * D + (d + i) * lanes + u % lanes) = block[i];
        }
    }
}

/* Writes the same rows as panels of the head's columns, with which attention weights are multiplied. */
static void by_column(const Pass *p, const Segment *s, const real *qkv, int64_t at, int64_t num_keys,
                      real *to) {
    const int64_t D = p->head_dim, O = (p->heads + 2 * p->kv_heads) * D, lanes = lanes_of(D);
    for (int64_t u = 0; u < num_keys; u++) {
        const real *from = qkv + key_row(p, s, u) * O + at * D;
        for (int64_t d = 0; d < D; d += WIDE)
            *(vec *)(to + d / lanes * lanes * num_keys + u * lanes + d % lanes) = *(const vec *)(from + d);
    }
}

/* exp(scale score - mass) for one vector of scores, from place u on. It is 0 for places from `seen` on. */
static inline vec weight(const real *scores, int64_t u, int64_t seen, real scale, real mass) {
    vec e = vexp(*(const vec *)(scores + u) * scale - mass);
    if (u + WIDE > seen)
        for (int i = 0; i < WIDE; i++) if (u + i >= seen) e[i] = 0;
    return e;
}

static real highest(const real *scores, int64_t seen) {
    real found = scores[0];
    int64_t u = 0;
    if (seen >= WIDE) {
        vec top = *(const vec *)scores;
        for (u = WIDE; u + WIDE <= seen; u += WIDE) {
            const vec x = *(const vec *)(scores + u);
            top = chosen(x > top, x, top);
        }
        for (int i = 0; i < WIDE; i++) found = top[i] > found ? top[i] : found;
    }
    for (; u < seen; u++) found = scores[u] > found ? scores[u] : found;
    return found;
}

/* The forward pass for the queries of one segment, in the query heads of one key head. */
static void attend(const Pass *p, const Kept *k, const Segment *s, int64_t head, real *work) {
    const int64_t D = p->head_dim, A = p->heads, K = p->kv_heads, O = (A + 2 * K) * D, groups = A / K;
    const int64_t length = s->end - s->start, num_keys = s->num_context + length, U = up(num_keys, LANES);
    const real scale = 1 / sqrt((double)D);
    real *keys = work, *values = keys + U * D, *scores = values + num_keys * up(D, LANES), mass[QUERIES];
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
                const real top = highest(own, seen) * scale;
                vec total = splat(0);
                for (int64_t u = 0; u < width; u += WIDE)
                    total += *(vec *)(own + u) = weight(own, u, seen, scale, top);
                mass[r] = sum(total);
                k->mass[(row + r) * A + h] = top + log(mass[r]);
            }
            real *out = k->seen + row * A * D + h * D;
            multiply(scores, U, count, limit, values, num_keys, 0, D, out, A * D, 0);
            for (int64_t r = 0; r < count; r++, out += A * D)
                for (int64_t d = 0; d < D; d += WIDE) *(vec *)(out + d) /= mass[r];
        }
    }
}

/* The backward pass for the queries of one tree, in the query heads of one key head. It turns the gradient of
   `seen` (N, A D) into that of the heads (N, O). A segment comes after its context. The gradients of its own
   keys are assigned, and the segments that see them add to them. */
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
                    const real along = dot(grad + r * A * D, seen, D), mass = k->mass[(row + r) * A + h];
                    for (int64_t u = 0; u < width; u += WIDE) {
                        const vec e = weight(own, u, s->num_context + t + r + 1, scale, mass);
                        *(vec *)(own + u) = e;
                        *(vec *)(to + u) = e * (*(vec *)(to + u) - along) * scale;
                    }
                }
                multiply(grads, U, count, limit, columns, num_keys, 0, D, grad_qkv + row * O + h * D, O, 0);
                gather(grads, U, limit, query, O, D, count, grad_keys, D);
                gather(weights, U, limit, grad, A * D, D, count, grad_values, D);
            }
        }
        for (int64_t u = 0; u < num_keys; u++) {
            real *key = grad_qkv + key_row(p, s, u) * O + (A + head) * D, *value = key + K * D;
            const int adds = u < s->num_context;
            for (int64_t d = 0; d < D; d++) {
                key[d] = (adds ? key[d] : 0) + grad_keys[u * D + d];
                value[d] = (adds ? value[d] : 0) + grad_values[u * D + d];
            }
        }
    }
}
