/* The structs of a pass, which trainer/native/learn.py fills in, and the numbers that a pass keeps. */

#pragma once

#include "matrix.h"

enum { TILE = 48, QUERIES = 32, STRETCHES = 8 };
enum { QKV, OUT, GATE_UP, DOWN, FUSED };

typedef struct {
    int64_t outputs, rank;
    const real *weight, *a, *b; /* (outputs, inputs), (rank, inputs), (outputs, rank) */
    real *grad_a, *grad_b;      /* like a and b */
} Module;

/* Modules that share an input, as one matrix. Python fills in the fields up to `module`. C fills in the others:
   the panels of the matrix or of its transpose (`panels`) and of the adapters (`low`, `high`), and where the
   gradients of this matrix begin in a stretch's share of the gradients. */
typedef struct {
    int64_t inputs, outputs, count;
    const real *bias, *fold; /* (outputs); (inputs): the factor of the norm before */
    const Module *module;
    int64_t ranks, width, share;
    real *panels, *low, *high;
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
    const Segment *segment; /* in the order of N; `context` is a place in the next table */
    const int64_t *context; /* the tokens of all contexts */
    const int64_t *tree;    /* (trees + 1): first segment of each tree, which sees nothing before it */
    Layer *layer;
    real *x;    /* (N, H): embeddings, then hidden states; later their gradient, changed in place */
    real *kept; /* what the backward pass needs */
    real *work; /* panels, then the four below */
    real *shares, *grad_seen, *grad_qkv, *scratch; /* per stretch, gradients of the adapters; gradient of the
                                                      attention's output; of the heads; one per thread */
    int64_t share; /* numbers in the share of one stretch, for the matrices between two attentions */
} Pass;

/* The numbers that one layer keeps for the backward pass. */
typedef struct {
    real *u, *length, *qkv, *normed, *lengths, *seen, *mass, *v, *v_length, *gate_up;
} Kept;

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
