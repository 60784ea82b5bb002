/* Adds adapters to matrices in panels. Threads claim panels one after the other. */

#include <stdatomic.h>

#include "vectors.h"

/* out = base + a b. base and out are (panels, inputs, LANES), a is (inputs, rank), b is (panels, rank, LANES). */
typedef struct {
    const float *base, *a, *b;
    float *out;
    int64_t panels, inputs, rank;
} Adapted;

static int is_zero(const float *x) {
    int found = 1;
    for (int i = 0; i < WIDE; i++) found &= x[i] == 0;
    return found;
}

/* Computes one panel. Outputs of different modules lie next to each other, and each module uses only its own
   adapter's part of the rank. So for each half of the panel only the part of b that is not zero is used. */
static void add(const Adapted *m, int64_t panel) {
    const float *base = m->base + panel * m->inputs * LANES, *b = m->b + panel * m->rank * LANES;
    float *out = m->out + panel * m->inputs * LANES;
    int64_t first[2] = {0, 0}, last[2] = {m->rank, m->rank};
    for (int h = 0; h < 2; h++) {
        while (last[h] > 0 && is_zero(b + (last[h] - 1) * LANES + h * WIDE)) last[h]--;
        while (first[h] < last[h] && is_zero(b + first[h] * LANES + h * WIDE)) first[h]++;
    }
    for (int64_t i = 0; i < m->inputs; i += ROWS) {
        const int64_t count = m->inputs - i < ROWS ? m->inputs - i : ROWS;
        for (int h = 0; h < 2; h++) {
            const float *row[ROWS];
            vec total[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = i + (r < count ? r : 0);
                row[r] = m->a + at * m->rank;
                total[r] = *(const vec *)(base + at * LANES + h * WIDE);
            }
            for (int64_t k = first[h]; k < last[h]; k++) {
                const vec column = *(const vec *)(b + k * LANES + h * WIDE);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) total[r] += row[r][k] * column;
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                if (r < count) *(vec *)(out + (i + r) * LANES + h * WIDE) = total[r];
        }
    }
}

void adapt(const Adapted *matrix, int64_t matrices, _Atomic int64_t *next) {
    int64_t claimed = atomic_fetch_add(next, 1), before = 0;
    for (const Adapted *m = matrix; m < matrix + matrices; before += m->panels, m++)
        for (; claimed - before < m->panels; claimed = atomic_fetch_add(next, 1))
            add(m, claimed - before);
}
