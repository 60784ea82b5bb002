/* Finds the token that a uniform number picks (trainer/native/pick.py): the first one whose cumulative mass
   exceeds that share of all mass. Where a token's cumulative mass is so near to the share that rounding could
   decide, it finds none. */

#include "phases.h"
#include "vectors.h"

enum { DOUBLES = BYTES / 8, BLOCK = 64 * DOUBLES, NONE = -1 };

typedef double dvec __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef int64_t livec __attribute__((vector_size(BYTES)));

/* logprobs (rows, vocabulary), and a uniform number and a token for each row. `near` is a share of all mass. */
typedef struct {
    int64_t rows, vocabulary;
    const double *logprobs, *uniform;
    int64_t *token;
    double near;
    Phase phase;
} Pick;

/* exp of numbers that are at most 0, to a relative error of 1e-12. */
static inline dvec mass(dvec x) {
    const livec low = x < -700.0;
    x = (dvec)((low & (livec)((dvec){0} - 700.0)) | (~low & (livec)x));
    dvec n = x * 1.4426950408889634 + 6755399441055744.0;
    n -= 6755399441055744.0;
    const dvec r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    dvec p = (dvec){0} + 1.0 / 3628800;
    static const double terms[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                   1.0 / 24,     1.0 / 6,     0.5,        1,         1};
#pragma GCC unroll 10
    for (int i = 0; i < 10; i++) p = p * r + terms[i];
    return p * (dvec)((__builtin_convertvector(n, livec) + 1023) << 52);
}

/* The mass of `count` tokens, at most BLOCK. With `each`, also that of every one of them. */
static inline double sum_block(const double *logprobs, int64_t count, double *each) {
    dvec total = {0};
    const int64_t whole_ = count / DOUBLES * DOUBLES;
    for (int64_t v = 0; v < whole_; v += DOUBLES) {
        const dvec found = mass(*(const dvec *)(logprobs + v));
        if (each) *(dvec *)(each + v) = found;
        total += found;
    }
    double sum = 0;
    for (int i = 0; i < DOUBLES; i++) sum += total[i];
    for (int64_t v = whole_; v < count; v++) {
        const double found = mass((dvec){0} + logprobs[v])[0];
        if (each) each[v] = found;
        sum += found;
    }
    return sum;
}

static int64_t pick_of(const Pick *p, int64_t row) {
    const double *logprobs = p->logprobs + row * p->vocabulary;
    const int64_t blocks = (p->vocabulary + BLOCK - 1) / BLOCK;
    double total = 0, each[BLOCK], sums[blocks];
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t left = p->vocabulary - b * BLOCK;
        total += sums[b] = sum_block(logprobs + b * BLOCK, left < BLOCK ? left : BLOCK, NULL);
    }
    const double share = p->uniform[row] * total, near = p->near * total;
    double upto = 0;
    int64_t b = 0;
    while (b < blocks - 1 && upto + sums[b] <= share) upto += sums[b++];
    const int64_t first = b * BLOCK, left = p->vocabulary - first, count = left < BLOCK ? left : BLOCK;
    sum_block(logprobs + first, count, each);
    int64_t v = 0;
    while (v < count - 1 && upto + each[v] <= share) upto += each[v++];
    const int is_after = first + v == 0 || share - upto > near, is_before = upto + each[v] - share > near;
    return is_after && is_before ? first + v : NONE;
}

/* The entry point, which every thread calls. */
void pick(Pick *p) {
    for (Units u = {0}; claim(&p->phase, p->rows, 1, &u);)
        for (; u.first < u.last; u.first++) p->token[u.first] = pick_of(p, u.first);
}
