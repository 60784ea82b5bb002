/* The learner's pass over a model with adapters (trainer/native/learn.py): the hidden states of packed
   tokens, and the gradients of all adapters.

   Weight and adapter are added up first, so the forward pass has no adapters in it. That is done for the matrices
   between two attentions when they are used, and again in the backward pass. The work is done in
   phases that all threads share. A phase is a list of jobs: a free thread takes the next job, and no thread
   begins the next phase before all jobs of this one have ended. The result of a job does not depend on the
   thread, so the number of threads changes no bit. Gradients are always summed over the same number of
   STRETCHES of the tokens, and these in their order.

   Per token and layer a pass keeps both normed inputs, the heads before and after their norm, the
   attention's output, and the input of the MLP's gate. Attention weights are computed again.

   H hidden, A query heads, K key heads, D head size, I inner size, N tokens, R ranks of modules together. */

#include "attention.h"
#include "phases.h"

/* Applies the rotary embedding to one head, in place. With `way` -1 it applies the inverse. */
static inline void turn(real *restrict head, const real *restrict cos_, const real *restrict sin_,
                        int64_t half, real way) {
    for (int64_t d = 0; d < half; d++) {
        const real a = head[d], b = head[d + half];
        head[d] = a * cos_[d] - b * sin_[d] * way;
        head[d + half] = b * cos_[d] + a * sin_[d] * way;
    }
}

/* Computes the heads from x: norm, projection, norms of the heads, rotary embedding. */
static void into_heads(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *work) {
    const Layer *w = p->layer + layer;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, D = p->head_dim, turned = p->heads + p->kv_heads;
    const int64_t O = (turned + p->kv_heads) * D;
    const Fused *f = w->fused + QKV;
    for (int64_t n = first; n < first + rows; n++)
        k.length[n] = unit_of(p->x + n * H, H, p->eps, k.u + n * H);
    multiply(k.u + first * H, H, rows, H, f->panels, H, f->bias, O, work, O, 0);
    for (int64_t n = first; n < first + rows; n++) {
        memcpy(k.qkv + n * O, work + (n - first) * O, O * sizeof(real));
        for (int64_t h = 0; h < turned; h++) {
            real *head = k.qkv + n * O + h * D, *normed = k.normed + (n * turned + h) * D;
            const real *cos_ = p->cos + n * D / 2, *sin_ = p->sin + n * D / 2;
            if (w->qk_norm) {
                k.lengths[n * turned + h] = unit_of(head, D, p->eps, normed);
                for (int64_t d = 0; d < D; d++) head[d] = normed[d] * w->qk_norm[h * D + d];
            }
            turn(head, cos_, sin_, D / 2, 1);
        }
    }
}

/* From the output of attention to the end of the layer: adds its projection and the MLP to x. */
static void out_of_heads(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *work) {
    const Fused *f = p->layer[layer].fused;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, AD = p->heads * p->head_dim, I = p->inner;
    real *x = p->x + first * H, *gate_up = work, *inner = gate_up + TILE * 2 * I;
    multiply(k.seen + first * AD, AD, rows, AD, f[OUT].panels, AD, f[OUT].bias, H, x, H, 1);
    for (int64_t n = 0; n < rows; n++)
        k.v_length[first + n] = unit_of(x + n * H, H, p->eps, k.v + (first + n) * H);
    multiply(k.v + first * H, H, rows, H, f[GATE_UP].panels, H, f[GATE_UP].bias, 2 * I, gate_up, 2 * I, 0);
    for (int64_t n = 0; n < rows; n++)
        for (int64_t i = 0; i < I; i += WIDE) {
            const vec gate = *(vec *)(gate_up + n * 2 * I + i), up_ = *(vec *)(gate_up + n * 2 * I + I + i);
            real *keep = k.gate_up + (first + n) * 2 * I + i;
            *(vec *)(inner + n * I + i) = gate / (1 + vexp(-gate)) * up_;
            *(vec *)keep = gate;
            *(vec *)(keep + I) = up_;
        }
    multiply(inner, I, rows, I, f[DOWN].panels, I, f[DOWN].bias, H, x, H, 1);
}

/* Adds what these rows contribute to the gradients of the adapters of y = x W, given the gradient of y. */
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
            multiply(grad + output, f->outputs, rows, m->outputs, panels, m->outputs, 0, some, column, LANES,
                     0);
            for (int64_t n = 0; n < rows; n++)
                memcpy(high + n * f->width + rank + r, column + n * LANES, some * sizeof(real));
            panels += m->outputs * lanes;
        }
        gather(low + rank, f->width, m->rank, grad + output, f->outputs, m->outputs, rows, grad_b,
               m->outputs);
        grad_b += m->rank * m->outputs;
        rank += m->rank;
    }
    gather(high, f->width, f->ranks, x, f->inputs, f->inputs, rows, to, f->inputs);
}

/* Replaces the gradient of x after a layer by that of x after its attention, in place. Also computes the
   gradient of the attention's output. */
static void back_to_seen(const Pass *p, int64_t layer, int64_t first, int64_t rows, real *share,
                         real *grad_seen, real *work) {
    const Fused *f = p->layer[layer].fused;
    const Kept k = kept_of(p, layer, 0);
    const int64_t H = p->hidden, AD = p->heads * p->head_dim, I = p->inner;
    real *grad = p->x + first * H, *inner = work, *grad_inner = inner + TILE * I;
    real *grad_gate_up = grad_inner + TILE * I, *grad_v = grad_gate_up + TILE * 2 * I;
    real *low = grad_v + TILE * H;
    for (int64_t n = 0; n < rows; n++)
        for (int64_t i = 0; i < I; i += WIDE) {
            const real *from = k.gate_up + (first + n) * 2 * I + i;
            const vec gate = *(const vec *)from, sigmoid = 1 / (1 + vexp(-gate));
            *(vec *)(inner + n * I + i) = gate * sigmoid * *(const vec *)(from + I);
            *(vec *)(grad_gate_up + n * 2 * I + i) = sigmoid;
        }
    adapt(f + DOWN, inner, grad, rows, share, low);
    multiply(grad, H, rows, H, f[DOWN].panels, H, 0, I, grad_inner, I, 0);
    for (int64_t n = 0; n < rows; n++)
        for (int64_t i = 0; i < I; i += WIDE) {
            const real *from = k.gate_up + (first + n) * 2 * I + i;
            const vec gate = *(const vec *)from, up_ = *(const vec *)(from + I);
            real *to = grad_gate_up + n * 2 * I + i;
            const vec g = *(vec *)(grad_inner + n * I + i), sigmoid = *(vec *)to;
            *(vec *)to = g * up_ * sigmoid * (1 + gate * (1 - sigmoid));
            *(vec *)(to + I) = g * gate * sigmoid;
        }
    adapt(f + GATE_UP, k.v + first * H, grad_gate_up, rows, share, low);
    multiply(grad_gate_up, 2 * I, rows, 2 * I, f[GATE_UP].panels, 2 * I, 0, H, grad_v, H, 0);
    for (int64_t n = 0; n < rows; n++) {
        through_unit(grad_v + n * H, k.v + (first + n) * H, k.v_length[first + n], H);
        for (int64_t i = 0; i < H; i++) grad[n * H + i] += grad_v[n * H + i];
    }
    adapt(f + OUT, k.seen + first * AD, grad, rows, share, low);
    multiply(grad, H, rows, H, f[OUT].panels, H, 0, AD, grad_seen + first * AD, AD, 0);
}

/* Replaces the gradient of x after the attention by that of x before the layer, in place, given also the
   gradient of the heads. */
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
            turn(head, cos_, sin_, D / 2, -1);
            if (!w->qk_norm) continue;
            for (int64_t d = 0; d < D; d++) head[d] *= w->qk_norm[h * D + d];
            through_unit(head, k.normed + (n * turned + h) * D, k.lengths[n * turned + h], D);
        }
    adapt(f, k.u + first * H, grad, rows, share, low);
    if (!layer) return; /* embeddings are not trained */
    multiply(grad, O, rows, O, f->panels, O, 0, H, grad_u, H, 0);
    for (int64_t n = 0; n < rows; n++) {
        through_unit(grad_u + n * H, k.u + (first + n) * H, k.length[first + n], H);
        for (int64_t i = 0; i < H; i++) p->x[(first + n) * H + i] += grad_u[n * H + i];
    }
}

/* Packs the adapters in panels: B times the scale, and A times the factor of the norm before. */
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

/* The row of output o in the fused matrix, from input i on: weight and adapter, times the factor of the norm
   before. The rows after the last output are 0. */
typedef struct {
    const real *weight, *a, *b;
    int64_t rank;
} Row;

static Row row_of(const Fused *f, int64_t o) {
    for (const Module *m = f->module; m < f->module + f->count; o -= m++->outputs)
        if (o < m->outputs) return (Row){m->weight + o * f->inputs, m->a, m->b + o * m->rank, m->rank};
    return (Row){0};
}

static inline vec sum_of(const Fused *f, const Row *row, real scale, int64_t i) {
    if (!row->weight) return splat(0);
    vec total = *(const vec *)(row->weight + i);
    for (int64_t r = 0; r < row->rank; r++)
        total += row->b[r] * scale * *(const vec *)(row->a + r * f->inputs + i);
    if (f->fold) total *= *(const vec *)(f->fold + i);
    return total;
}

/* Packs one panel of outputs of the matrix, with the adapters added, for the forward pass. With `is_transposed`
   it packs the same outputs as rows of the transpose, for the backward pass. */
static void pack(const Fused *f, int64_t number, real scale, int is_transposed) {
    const int64_t lanes = lanes_of(f->outputs), back = lanes_of(f->inputs), inputs = f->inputs;
    const int64_t first = number * lanes, count = least(lanes, f->outputs - first);
    Row row[LANES];
    for (int64_t o = 0; o < lanes; o++) row[o] = row_of(f, first + o);
    for (int64_t i = 0; i < inputs; i += WIDE) {
        if (is_transposed) {
            real *to = f->panels + i / back * back * f->outputs + first * back + i % back;
            for (int64_t o = 0; o < count; o++) *(vec *)(to + o * back) = sum_of(f, row + o, scale, i);
            continue;
        }
        for (int64_t o = 0; o < lanes; o += WIDE) {
            vec block[WIDE];
            for (int r = 0; r < WIDE; r++) block[r] = sum_of(f, row + o + r, scale, i);
            transpose(block);
            for (int r = 0; r < WIDE; r++)
                *(vec *)(f->panels + first * inputs + (i + r) * lanes + o) = block[r];
        }
    }
}

static real summed(const real *first, int64_t size) {
    real total = first[0];
    for (int s = 1; s < STRETCHES; s++) total += first[s * size];
    return total;
}

/* Sums the gradients of a matrix's adapters over the stretches, and writes them to the gradients of the
   tensors. */
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
    const int64_t heads = (p->heads + 2 * p->kv_heads) * p->head_dim;
    const int64_t rows = TILE * most(heads, 4 * p->inner + p->hidden + 2 * ranks);
    return up(most(most(rows, LANES * inputs), 5 * U * D + 2 * QUERIES * U), WIDE) + 4 * WIDE;
}

/* Assigns every buffer its place in `work`. Returns how many numbers they take together. The panels and the
   shares of all layers have the same place, because no two layers use them at the same time. */
static int64_t place(Pass *p) {
    real *at = p->work;
    p->share = 0;
    for (int i = 0; i < FUSED; i++) {
        int64_t low = 0, high = 0, held = 0;
        const Fused *any = p->layer[0].fused + i;
        const int64_t room = most(up(any->outputs, lanes_of(any->outputs)) * any->inputs,
                                  up(any->inputs, lanes_of(any->inputs)) * any->outputs);
        for (int64_t l = 0; l < p->layers; l++) {
            Fused *f = p->layer[l].fused + i;
            int64_t own = 0, own_held = 0;
            f->ranks = 0;
            for (const Module *m = f->module; m < f->module + f->count; m++) {
                for (int64_t r = 0; r < m->rank; r += LANES)
                    own += m->outputs * lanes_of(least(m->rank - r, LANES));
                f->ranks += m->rank;
                own_held += m->rank * (f->inputs + m->outputs);
            }
            f->width = up(f->ranks, lanes_of(f->ranks));
            low = most(low, f->width * f->inputs);
            high = most(high, own);
            held = most(held, own_held);
        }
        for (int64_t l = 0; l < p->layers; l++) {
            Fused *f = p->layer[l].fused + i;
            f->panels = at, f->low = at + room, f->high = f->low + low;
            f->share = p->share;
        }
        at += room + low + high;
        p->share += held;
    }
    at += AHEAD;
    p->shares = at, at += p->keeps ? STRETCHES * p->share : 0;
    p->grad_seen = at, at += p->keeps ? p->tokens * p->heads * p->head_dim : 0;
    p->grad_qkv = at, at += p->keeps ? p->tokens * (p->heads + 2 * p->kv_heads) * p->head_dim : 0;
    p->scratch = at, at += p->threads * scratch_size(p);
    return at - p->work;
}

/* Computes how many numbers `kept` and `work` must hold. */
void learn_sizes(Pass *p, int64_t *kept, int64_t *work) {
    real *end;
    kept_of(p, p->keeps ? p->layers - 1 : 0, &end);
    *kept = end - p->kept;
    *work = place(p);
}

/* Call this once, after `kept` and `work` are allocated. */
void learn_prepare(Pass *p) { place(p); }

/* Runs `call` for each of the jobs of the next phase that this thread claims. */
#define EACH(jobs, job, call)                              \
    for (Units u = {0}; claim(phase, jobs, 1, &u);)        \
        for (int64_t job = u.first; job < u.last; job++) { \
            call;                                          \
        }                                                  \
    phase++

static int64_t panels_of(const Fused *f) { return up(f->outputs, lanes_of(f->outputs)) / lanes_of(f->outputs); }

/* The matrices that are used between two attentions: before that of `layer`, the last three of the layer before,
   and then its own first one. */
typedef struct {
    const Fused *fused[FUSED];
    int64_t count, panels;
} Between;

static Between between(const Pass *p, int64_t layer) {
    Between found = {0};
    for (int i = OUT; layer && i < FUSED; i++) found.fused[found.count++] = p->layer[layer - 1].fused + i;
    if (layer < p->layers) found.fused[found.count++] = p->layer[layer].fused + QKV;
    for (int64_t i = 0; i < found.count; i++) found.panels += panels_of(found.fused[i]);
    return found;
}

static void pack_any(const Between *b, int64_t job, real scale, int is_transposed) {
    int64_t i = 0;
    for (; job >= panels_of(b->fused[i]); i++) job -= panels_of(b->fused[i]);
    pack(b->fused[i], job, scale, is_transposed);
}

/* What comes before the backward pass between two attentions: gradients of the adapters between the two after it
   are finished, and its own adapters and panels are packed. */
static void prepare_any(const Pass *p, const Between *after, const Between *own, int64_t job) {
    if (job < after->count) {
        finish(after->fused[job], p->shares, p->share, p->scale);
        return;
    }
    job -= after->count;
    if (job < own->count) pack_adapters(own->fused[job], p->scale);
    else pack_any(own, job - own->count, p->scale, 1);
}

static void forward_tile(const Pass *p, int64_t layer, int64_t tile, real *scratch) {
    const int64_t first = tile * TILE, rows = least(p->tokens - first, TILE);
    if (layer) out_of_heads(p, layer - 1, first, rows, scratch);
    if (layer < p->layers) into_heads(p, layer, first, rows, scratch);
}

static void backward_stretch(const Pass *p, int64_t layer, int64_t number, real *scratch) {
    const int64_t stretch = up((p->tokens + STRETCHES - 1) / STRETCHES, ROWS);
    const int64_t end = least((number + 1) * stretch, p->tokens);
    real *share = p->shares + number * p->share;
    memset(share, 0, p->share * sizeof(real));
    for (int64_t first = number * stretch; first < end; first += TILE) {
        const int64_t rows = least(end - first, TILE);
        if (layer < p->layers) back_to_input(p, layer, first, rows, share, p->grad_qkv, scratch);
        if (layer) back_to_seen(p, layer - 1, first, rows, share, p->grad_seen, scratch);
    }
}

/* The forward pass of one thread. Any number of threads may call it. `phase`: (3 layers + 2), zero at first. */
void learn_forward(const Pass *p, Phase *phase, int64_t thread) {
    const int64_t tiles = (p->tokens + TILE - 1) / TILE, heads = p->kv_heads;
    real *scratch = p->scratch + thread * scratch_size(p);
    for (int64_t l = 0; l <= p->layers; l++) {
        const Between b = between(p, l);
        EACH(b.panels, job, pack_any(&b, job, p->scale, 0));
        EACH(tiles, tile, forward_tile(p, l, tile, scratch));
        if (l == p->layers) break;
        const Kept k = kept_of(p, l, 0);
        EACH(p->segments * heads, job, attend(p, &k, p->segment + job / heads, job % heads, scratch));
    }
}

/* The backward pass of one thread. `phase`: (3 layers + 3), but other ones. */
void learn_backward(const Pass *p, Phase *phase, int64_t thread) {
    const int64_t heads = p->kv_heads;
    real *scratch = p->scratch + thread * scratch_size(p);
    Between after = {0};
    for (int64_t l = p->layers; l >= 0; l--) {
        const Between own = between(p, l);
        const int64_t panels = l ? own.panels : 0; /* embeddings are not trained */
        EACH(after.count + own.count + panels, job, prepare_any(p, &after, &own, job));
        EACH(STRETCHES, number, backward_stretch(p, l, number, scratch));
        after = own;
        if (!l) break;
        const Kept k = kept_of(p, l - 1, 0);
        EACH(p->trees * heads, job,
             unattend(p, &k, job / heads, job % heads, p->grad_seen, p->grad_qkv, scratch));
    }
    EACH(after.count, job, finish(after.fused[job], p->shares, p->share, p->scale));
}
