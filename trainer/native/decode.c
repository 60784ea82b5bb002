/* One decoding step of a fused model (trainer/sampler/model.py), all of it, in one call.

   Rows do not meet: whatever a row's number comes from is summed in an order that depends on the
   model's sizes and the row's own position alone. So rows may be split over threads, and a row has the
   same bits in any company. */

#include "vectors.h"

typedef struct {
    const float *qkv, *qkv_bias, *qk_norm, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary, capacity;
    float eps;
    const float *embedding, *norm, *head;
    const Layer *layer;
} Model;

/* What one key head's query heads attend to: keys and values (places, size) up to `seen`. */
static void attend(const float *q, const float *keys, const float *values, int64_t groups, int64_t size,
                   int64_t seen, float *scores, float *out) {
    const int64_t padded = (seen + WIDE - 1) / WIDE * WIDE;
    const float scale = 1.0f / sqrtf((float)size);
    for (int64_t g = 0; g < groups; g++) {
        float most = -INFINITY;
        for (int64_t t = 0; t < seen; t++) {
            scores[t] = dot(q + g * size, keys + t * size, size) * scale;
            most = scores[t] > most ? scores[t] : most;
        }
        for (int64_t t = seen; t < padded; t++) scores[t] = -INFINITY;
        vec mass = splat(0);
        for (int64_t t = 0; t < padded; t += WIDE) {
            vec e = vexp(*(vec *)(scores + t) - most);
            for (int i = 0; i < WIDE; i++) if (t + i >= seen) e[i] = 0;
            *(vec *)(scores + t) = e;
            mass += e;
        }
        const float over = 1.0f / sum(mass);
        for (int64_t d = 0; d < size; d += WIDE) {
            vec total = splat(0);
            for (int64_t t = 0; t < seen; t++) total += *(const vec *)(values + t * size + d) * scores[t];
            *(vec *)(out + g * size + d) = total * over;
        }
    }
}

/* Rows first .. first + rows: reads one token each at its position (cos and sin of the rotary embedding
   are given, (rows, head_dim / 2)), writes its keys and values into the cache (layers, all_rows, kv_heads,
   capacity, head_dim), and the logits (rows, vocabulary) after it. `scratch` holds rows times
   2 hidden + (heads + 2 kv_heads + heads) head_dim + 3 inner floats, and capacity + WIDE more. */
void decode(const Model *m, int64_t all_rows, int64_t first, int64_t rows, const int64_t *tokens,
            const int64_t *positions, const float *cos_, const float *sin_, float *keys, float *values,
            float *scratch, float *logits) {
    const int64_t H = m->hidden, D = m->head_dim, K = m->kv_heads, A = m->heads, I = m->inner;
    const int64_t O = (A + 2 * K) * D, turned = A + K, groups = A / K, C = m->capacity;
    float *x = scratch, *u = x + rows * H, *qkv = u + rows * H, *seen = qkv + rows * O;
    float *gate_up = seen + rows * A * D, *inner = gate_up + rows * 2 * I, *scores = inner + rows * I;
    for (int64_t r = 0; r < rows; r++)
        memcpy(x + r * H, m->embedding + tokens[r] * H, H * sizeof(float));
    for (int64_t l = 0; l < m->layers; l++) {
        const Layer *w = m->layer + l;
        for (int64_t r = 0; r < rows; r++) unit(x + r * H, 0, H, m->eps, u + r * H);
        product(u, rows, H, w->qkv, w->qkv_bias, O, qkv, 0);
        for (int64_t r = 0; r < rows; r++) {
            float *own = qkv + r * O;
            for (int64_t h = 0; h < turned; h++) {
                float *head = own + h * D;
                if (w->qk_norm) unit(head, w->qk_norm + h * D, D, m->eps, head);
                for (int64_t d = 0; d < D / 2; d++) {
                    const float c = cos_[r * D / 2 + d], s = sin_[r * D / 2 + d];
                    const float real = head[2 * d], imaginary = head[2 * d + 1];
                    head[2 * d] = real * c - imaginary * s;
                    head[2 * d + 1] = real * s + imaginary * c;
                }
            }
            for (int64_t k = 0; k < K; k++) {
                const int64_t cache = ((l * all_rows + first + r) * K + k) * C * D;
                const int64_t place = cache + positions[r] * D;
                memcpy(keys + place, own + (A + k) * D, D * sizeof(float));
                memcpy(values + place, own + (turned + k) * D, D * sizeof(float));
                attend(own + k * groups * D, keys + cache, values + cache, groups, D, positions[r] + 1,
                       scores, seen + (r * A + k * groups) * D);
            }
        }
        product(seen, rows, A * D, w->out, w->out_bias, H, x, 1);
        for (int64_t r = 0; r < rows; r++) unit(x + r * H, 0, H, m->eps, u + r * H);
        product(u, rows, H, w->gate_up, w->gate_up_bias, 2 * I, gate_up, 0);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < I; i += WIDE) {
                const vec gate = *(vec *)(gate_up + r * 2 * I + i);
                const vec up = *(vec *)(gate_up + r * 2 * I + I + i);
                *(vec *)(inner + r * I + i) = gate / (1.0f + vexp(-gate)) * up;
            }
        product(inner, rows, I, w->down, w->down_bias, H, x, 1);
    }
    for (int64_t r = 0; r < rows; r++) unit(x + r * H, m->norm, H, m->eps, u + r * H);
    product(u, rows, H, m->head, 0, m->vocabulary, logits, 0);
}
