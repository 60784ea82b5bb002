/* Computes rows with a fused model (trainer/sampler/decode_model.py), and draws tokens from the logits.

   A row is one token to read. It sees the places of its cache up to its own position. The first places hold a
   prompt, which it may share with other rows, and the next ones hold its own tokens. Several rows of one cache
   may be read together, such as the tokens of a prompt.

   All threads run `decode` on the same batch, in phases (phases.h). Each number is computed within one unit
   of a phase, in an order that depends only on the model and on its own row. So it has the same bits whatever
   other rows are computed with it, and for any number of threads.

   Legend: H hidden, A query heads, K key heads, D head size, I inner, V vocabulary. */

#include "phases.h"
#include "vectors.h"

enum { DOUBLES = WIDE / 2 };

typedef double dvec __attribute__((vector_size(8 * DOUBLES), aligned(8), may_alias));
typedef int64_t livec __attribute__((vector_size(8 * DOUBLES)));

#define LANE(lane, step) (lane)
static const ivec PLACE = {OF_LANES(LANE, 0)};

/* The vector with each pair of neighbours swapped. */
static inline vec swapped(vec x) { return PICKED(x, x, OF_LANES(OTHER, 1)); }

enum { PORTIONS = 16, ENOUGH = 1 << 18 };

typedef struct {
    const float *qkv, *qkv_bias, *qk_norm, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
} Layer;

/* In the MLP's first matrix the outputs of the gate and the other outputs alternate, WIDE of each, so that a
   panel has both. cos and sin of the rotary embedding are (positions, D). The embedding is x cos + x' sin,
   where x' is x with each pair of neighbours swapped. */
typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary;
    float eps;
    const float *embedding, *norm, *head, *cos, *sin;
    const Layer *layer;
} Model;

/* A cache holds keys, then values, (layers, K, places, D) each. The number of places is a multiple of WIDE. The
   keys of WIDE places lie together, (places / WIDE, D, WIDE), so that the scores of WIDE places are one
   vector. */
typedef struct {
    int64_t token, position;
    const float *prompt;
    int64_t length, prompt_places;
    float *own;
    int64_t places, left;
} Row;

/* `active` lists the rows that are computed. `end` lists those of them, in order, whose logits are wanted. With
   `uniform` (steps, rows), each step draws a token per row, which the next step reads. A row ends when it draws
   one of `stop`, or when it has drawn as many tokens as `left` allows. It is not computed after that. `drawn`
   is (steps, rows). */
typedef struct {
    int64_t rows, steps, stops;
    _Atomic int64_t active, ends;
    Row *row;
    int64_t *actives, *end;
    const int64_t *stop;
    const double *uniform, *temperature;
    int64_t *drawn;
    double *logprob;
    float *rest, *logits;
    double *room;
    int64_t room_of_thread;
    Phase *phase;
} Batch;

/* The state of one thread. `ending` is set after the keys and values of the last layer. From there on only the
   rows whose logits are wanted are computed, and they come first. */
typedef struct {
    const Model *m;
    Batch *b;
    const Layer *w;
    Phase *phase;
    int64_t layer, step, ending;
    float *x, *u, *qkv, *seen, *inner, *scores;
    double *masses;
} Work;

/* Runs a phase. Its units are claimed in at most PORTIONS portions, because claiming one costs as much as
   computing a small unit. `size` is about how many products a unit computes: of large units a portion has no
   more than ENOUGH, so that no thread waits long for the last one. */
static void share(Work *k, int64_t units, int64_t size, void (*run)(const Work *, int64_t)) {
    Phase *p = k->phase++;
    const int64_t few = 1 + units / PORTIONS, enough = 1 + ENOUGH / (size + 1);
    for (Units u = {0}; claim(p, units, few < enough ? few : enough, &u);)
        for (; u.first < u.last; u.first++) run(k, u.first);
}

static inline const Row *row_of(const Work *k, int64_t j) { return k->b->row + k->b->actives[j]; }

static inline int64_t active(const Work *k) { return atomic_load_explicit(&k->b->active, memory_order_relaxed); }

static inline int64_t ends(const Work *k) { return atomic_load_explicit(&k->b->ends, memory_order_relaxed); }

static inline int64_t rows(const Work *k) { return k->ending ? ends(k) : active(k); }

enum Then { STORE, ADD, GATE };

/* The sums of so many rows and two vectors stay in the registers too. A panel is read from the cache less often
   than with ROWS. */
enum { MORE = ROWS + ROWS / 2 };

/* The same as `some_rows_of`, for up to MORE rows. */
static inline __attribute__((always_inline)) void sums_of(const float *const *at, int many, int64_t inputs,
                                                          const float *w, vec *a, vec *b) {
#pragma GCC unroll 12
    for (int r = 0; r < many; r++) a[r] = b[r] = splat(0);
    for (int64_t i = 0; i < inputs; i++, w += LANES) {
        const vec left = *(const vec *)w, right = *(const vec *)(w + WIDE);
        __builtin_prefetch(w + AHEAD);
        __builtin_prefetch(w + AHEAD + WIDE);
#pragma GCC unroll 12
        for (int r = 0; r < many; r++) {
            a[r] += at[r][i] * left;
            b[r] += at[r][i] * right;
        }
    }
}

/* The products of `count` rows (at most `many`) with one panel. Rows begin at x, and results at out, where rows
   are `stride` apart. */
static inline __attribute__((always_inline)) void block(const float *x, int64_t count, int many, int64_t inputs,
                                                        const float *w, const float *bias, int64_t width,
                                                        float *out, int64_t stride, enum Then then) {
    const float *at[MORE];
    vec a[MORE], b[MORE], found[MORE][2];
#pragma GCC unroll 12
    for (int r = 0; r < many; r++) at[r] = x + (r < count ? r : 0) * inputs;
    sums_of(at, many, inputs, w, a, b);
#pragma GCC unroll 12
    for (int r = 0; r < many; r++) {
        found[r][0] = a[r] + *(const vec *)bias;
        found[r][1] = b[r] + *(const vec *)(bias + WIDE);
    }
    for (int64_t r = 0; r < count; r++, out += stride)
        if (then == GATE) {
            const vec gate = found[r][0];
            *(vec *)out = gate / (1.0f + vexp(-gate)) * found[r][1];
        } else
            for (int64_t o = 0; o < width; o++) out[o] = ((float *)found[r])[o] + (then == ADD ? out[o] : 0);
}

/* Panel `p` of x times w, for all rows. So the panel is read from memory once, and then stays in the cache. */
static inline __attribute__((always_inline)) void panel(const float *x, int64_t rows, int64_t inputs, const float *w,
                                                        const float *bias, int64_t outputs, int64_t p, float *out,
                                                        enum Then then) {
    const int64_t start = p * LANES, width = outputs - start < LANES ? outputs - start : LANES;
    const int64_t stride = then == GATE ? outputs / 2 : outputs;
    float biases[LANES] = {0};
    if (bias) memcpy(biases, bias + start, width * sizeof(float));
    w += start * inputs;
    out += then == GATE ? p * WIDE : start;
    for (int64_t count; rows > 0; rows -= count, x += count * inputs, out += count * stride) {
        count = rows < MORE ? rows : MORE;
        if (count > ROWS) block(x, count, MORE, inputs, w, biases, width, out, stride, then);
        else if (count > ROWS / 2) block(x, count, ROWS, inputs, w, biases, width, out, stride, then);
        else block(x, count, ROWS / 2, inputs, w, biases, width, out, stride, then);
    }
}

static inline int64_t panels(int64_t outputs) { return (outputs + LANES - 1) / LANES; }

static void begin(const Work *k, int64_t j) {
    const int64_t H = k->m->hidden;
    memcpy(k->x + j * H, k->m->embedding + row_of(k, j)->token * H, H * sizeof(float));
    unit(k->x + j * H, 0, H, k->m->eps, k->u + j * H);
}

static void norm(const Work *k, int64_t j) {
    const int64_t H = k->m->hidden;
    unit(k->x + j * H, 0, H, k->m->eps, k->u + j * H);
}

static void last_norm(const Work *k, int64_t e) {
    const int64_t H = k->m->hidden;
    unit(k->x + e * H, k->m->norm, H, k->m->eps, k->u + e * H);
}

/* Moves the rows whose logits are wanted to the front. They are in order, so no row is overwritten too early. */
static void gather(const Work *k, int64_t alone) {
    const int64_t H = k->m->hidden;
    for (int64_t e = alone; e < ends(k); e++) memmove(k->x + e * H, k->x + k->b->end[e] * H, H * sizeof(float));
}

static void qkv(const Work *k, int64_t p) {
    const Model *m = k->m;
    const int64_t outputs = (m->heads + 2 * m->kv_heads) * m->head_dim;
    panel(k->u, active(k), m->hidden, k->w->qkv, k->w->qkv_bias, outputs, p, k->qkv, STORE);
}

static void out(const Work *k, int64_t p) {
    const Model *m = k->m;
    panel(k->seen, rows(k), m->heads * m->head_dim, k->w->out, k->w->out_bias, m->hidden, p, k->x, ADD);
}

static void gate_up(const Work *k, int64_t p) {
    const Model *m = k->m;
    panel(k->u, rows(k), m->hidden, k->w->gate_up, k->w->gate_up_bias, 2 * m->inner, p, k->inner, GATE);
}

static void down(const Work *k, int64_t p) {
    const Model *m = k->m;
    panel(k->inner, rows(k), m->inner, k->w->down, k->w->down_bias, m->hidden, p, k->x, ADD);
}

static void head(const Work *k, int64_t p) {
    const Model *m = k->m;
    panel(k->u, ends(k), m->hidden, m->head, 0, m->vocabulary, p, k->b->logits, STORE);
}

/* Where the keys or values of a key head begin, in a cache of `places` places. */
static inline int64_t place_of(const Work *k, int64_t head, int64_t places, int values) {
    const Model *m = k->m;
    return ((values * m->layers + k->layer) * m->kv_heads + head) * places * m->head_dim;
}

/* Rotates a row's queries and keys by its position, and writes its keys and values to the cache. */
static void turn(const Work *k, int64_t j) {
    const Model *m = k->m;
    const Row *row = row_of(k, j);
    const int64_t D = m->head_dim, K = m->kv_heads, turned = m->heads + K;
    const float *c = m->cos + row->position * D, *s = m->sin + row->position * D;
    float *heads = k->qkv + j * (turned + K) * D;
    for (int64_t h = 0; h < turned; h++) {
        float *own = heads + h * D;
        if (k->w->qk_norm) unit(own, k->w->qk_norm + h * D, D, m->eps, own);
        for (int64_t d = 0; d < D; d += WIDE) {
            const vec x = *(vec *)(own + d);
            *(vec *)(own + d) = x * *(const vec *)(c + d) + swapped(x) * *(const vec *)(s + d);
        }
    }
    const int64_t t = row->position - row->length;
    for (int64_t h = 0; h < K; h++) {
        const float *key = heads + (m->heads + h) * D, *value = heads + (turned + h) * D;
        float *keys = row->own + place_of(k, h, row->places, 0) + t / WIDE * WIDE * D + t % WIDE;
        for (int64_t d = 0; d < D; d++) keys[d * WIDE] = key[d];
        memcpy(row->own + place_of(k, h, row->places, 1) + t * D, value, D * sizeof(float));
    }
}

/* Writes the scores of the first `seen` places, and -inf up to the end of the last vector. Returns the highest
   of them and `most`, for each lane of a vector separately. */
static vec score(const float *q, const float *keys, int64_t size, int64_t seen, float scale, float *scores,
                 vec most) {
    for (int64_t t = 0; t < seen; t += WIDE, keys += WIDE * size) {
        vec part[4] = {{0}};
        for (int64_t d = 0; d < size; d += 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) part[i] += q[d + i] * *(const vec *)(keys + (d + i) * WIDE);
        }
        vec found = (part[0] + part[1] + (part[2] + part[3])) * scale;
        if (seen - t < WIDE) found = chosen(PLACE < (int32_t)(seen - t), found, splat(-INFINITY));
        most = chosen(found > most, found, most);
        *(vec *)(scores + t) = found;
    }
    return most;
}

/* Adds weights times values (places, size) over the first `seen` places, `vectors` vectors each. The sum over
   places with even numbers is added to `even`, and that over the others to `odd`. */
static inline __attribute__((always_inline)) void mix(const float *weights, const float *values, int64_t size,
                                                      int64_t seen, vec even[4], vec odd[4], int vectors) {
    for (int64_t t = 0; t < seen; t += 2, values += 2 * size) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) even[i] += weights[t] * *(const vec *)(values + i * WIDE);
        if (t + 1 == seen) break;
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) odd[i] += weights[t + 1] * *(const vec *)(values + size + i * WIDE);
    }
}

/* The attention of one row in the query heads of one key head. Rows of one prompt follow each other. */
static void attend(const Work *k, int64_t unit) {
    const Model *m = k->m;
    const int64_t D = m->head_dim, A = m->heads, K = m->kv_heads, groups = A / K, j = unit % rows(k), h = unit / rows(k);
    const int64_t from = k->ending ? k->b->end[j] : j;
    const Row *row = row_of(k, from);
    const int64_t before = row->length, after = row->position + 1 - before;
    const int64_t upto = (before + WIDE - 1) / WIDE * WIDE, all = upto + (after + WIDE - 1) / WIDE * WIDE;
    const float *prompt = row->prompt + place_of(k, h, row->prompt_places, 0);
    const float *prompt_values = row->prompt + place_of(k, h, row->prompt_places, 1);
    const float *own = row->own + place_of(k, h, row->places, 0);
    const float *own_values = row->own + place_of(k, h, row->places, 1);
    const float scale = 1.0f / sqrtf((float)D);
    for (int64_t g = h * groups; g < (h + 1) * groups; g++) {
        const float *q = k->qkv + (from * (A + 2 * K) + g) * D;
        float *seen = k->seen + (j * A + g) * D, *scores = k->scores;
        vec highest = score(q, prompt, D, before, scale, scores, splat(-INFINITY));
        highest = score(q, own, D, after, scale, scores + upto, highest);
        float most = -INFINITY;
        for (int i = 0; i < WIDE; i++) most = highest[i] > most ? highest[i] : most;
        vec mass = splat(0);
        for (int64_t t = 0; t < all; t += WIDE) {
            const vec x = *(vec *)(scores + t);
            const vec e = chosen(x == splat(-INFINITY), splat(0), vexp(x - most));
            *(vec *)(scores + t) = e;
            mass += e;
        }
        const float over = 1.0f / sum(mass);
        int64_t d = 0;
        for (; d + 4 * WIDE <= D; d += 4 * WIDE) {
            vec even[4] = {{0}}, odd[4] = {{0}};
            mix(scores, prompt_values + d, D, before, even, odd, 4);
            mix(scores + upto, own_values + d, D, after, even, odd, 4);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) *(vec *)(seen + d + i * WIDE) = (even[i] + odd[i]) * over;
        }
        for (; d < D; d += WIDE) {
            vec even[4] = {{0}}, odd[4] = {{0}};
            mix(scores, prompt_values + d, D, before, even, odd, 1);
            mix(scores + upto, own_values + d, D, after, even, odd, 1);
            *(vec *)(seen + d) = (even[0] + odd[0]) * over;
        }
    }
}

/* exp of numbers that are at most 0, exact but for the last one or two bits. It is computed like vexp. */
static inline dvec dexp(dvec x) {
    const livec low = x < -708.0;
    x = (dvec)((low & (livec)((dvec){0} - 708.0)) | (~low & (livec)x));
    dvec n = x * 1.4426950408889634 + 6755399441055744.0;
    n -= 6755399441055744.0;
    const dvec r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    dvec p = (dvec){0} + 1.0 / 6227020800;
    static const double terms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                   1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
#pragma GCC unroll 16
    for (int i = 0; i < 13; i++) p = p * r + terms[i];
    return p * (dvec)((__builtin_convertvector(n, livec) + 1023) << 52);
}

/* The place of the first of the highest numbers. */
static int64_t highest(const float *x, int64_t count) {
    vec most = splat(x[0]);
    int64_t v = 0;
    for (; v + WIDE <= count; v += WIDE) {
        const vec here = *(const vec *)(x + v);
        most = chosen(here > most, here, most);
    }
    float top = x[0];
    for (int i = 0; i < WIDE; i++) top = most[i] > top ? most[i] : top;
    for (; v < count; v++) top = x[v] > top ? x[v] : top;
    for (v = 0; v < count - 1 && x[v] != top;) v++;
    return v;
}

/* Draw row j's token from its logits as trainer/sampler/draw_token.py does: in doubles, the first token whose
   cumulative mass exceeds its share of the whole. */
static void draw(const Work *k, int64_t j) {
    Batch *b = k->b;
    const int64_t V = k->m->vocabulary, r = b->actives[j], at = k->step * b->rows + r;
    const float *logits = b->logits + j * V;
    const double heat = b->temperature[r] == 0 ? 1 : b->temperature[r];
    const int64_t best = highest(logits, V);
    const double most = logits[best] / heat;
    double total = 0, upto = 0;
    if (heat == 1)
        for (int64_t v = 0; v < V; v++) k->masses[v] = logits[v] - most;
    else
        for (int64_t v = 0; v < V; v++) k->masses[v] = logits[v] / heat - most;
    for (int64_t v = 0; v < V; v += DOUBLES) *(dvec *)(k->masses + v) = dexp(*(dvec *)(k->masses + v));
    for (int64_t v = 0; v < V; v++) total += k->masses[v];
    int64_t token = best;
    if (b->temperature[r] != 0) {
        const double target = b->uniform[at] * total;
        for (token = 0; token < V - 1 && (upto += k->masses[token]) <= target;) token++;
    }
    b->drawn[at] = token;
    b->logprob[at] = logits[token] / heat - most - log(total);
}

/* Each row will read the token that it has drawn. Rows that have ended are removed. */
static void go_on(const Work *k, int64_t unit) {
    (void)unit;
    Batch *b = k->b;
    int64_t kept = 0;
    for (int64_t j = 0, count = active(k); j < count; j++) {
        const int64_t r = b->actives[j], at = k->step * b->rows + r;
        Row *row = b->row + r;
        int over = --row->left <= 0 || !isfinite(b->logprob[at]);
        for (int64_t i = 0; i < b->stops; i++) over |= b->drawn[at] == b->stop[i];
        row->token = b->drawn[at];
        row->position++;
        if (!over) b->actives[kept++] = r;
    }
    atomic_store_explicit(&b->active, kept, memory_order_relaxed);
    atomic_store_explicit(&b->ends, kept, memory_order_relaxed);
}

/* The entry point, which every thread calls. `rest` holds 2 H + (2 A + 2 K) D + I floats per row.
   `room_of_thread` is a number of doubles: V of them in whole vectors, and as many floats as two caches have
   places. `phase` holds (8 layers + 6) phases for each step, which are all zero at first. */
void decode(const Model *m, Batch *b, int64_t thread) {
    const int64_t H = m->hidden, D = m->head_dim, I = m->inner, V = m->vocabulary, A = m->heads;
    const int64_t O = (A + 2 * m->kv_heads) * D;
    float *rest = b->rest;
    double *room = b->room + thread * b->room_of_thread;
    Work k = {.m = m, .b = b, .phase = b->phase, .masses = room, .scores = (float *)room};
    k.x = rest, k.u = k.x + b->rows * H, k.qkv = k.u + b->rows * H;
    k.seen = k.qkv + b->rows * O, k.inner = k.seen + b->rows * A * D;
    for (k.step = 0; k.step < b->steps && active(&k); k.step++) {
        k.ending = 0;
        share(&k, active(&k), H, begin);
        for (k.layer = 0; k.layer < m->layers; k.layer++) {
            k.w = m->layer + k.layer;
            if (k.layer) share(&k, active(&k), H, norm);
            share(&k, panels(O), active(&k) * H * LANES, qkv);
            share(&k, active(&k), O, turn);
            k.ending = k.layer + 1 == m->layers;
            if (k.ending) share(&k, 1, 1, gather);
            share(&k, rows(&k) * m->kv_heads, O, attend);
            share(&k, panels(H), rows(&k) * A * D * LANES, out);
            share(&k, rows(&k), H, norm);
            share(&k, panels(2 * I), rows(&k) * H * LANES, gate_up);
            share(&k, panels(H), rows(&k) * I * LANES, down);
        }
        share(&k, ends(&k), H, last_norm);
        share(&k, panels(V), ends(&k) * H * LANES, head);
        if (!b->uniform) return;
        share(&k, active(&k), V, draw);
        share(&k, 1, 1, go_on);
    }
}
