/* Work that threads share as they come.

   A phase is a number of units that the threads claim, a few at a time, and nobody leaves a phase before
   all of its units are done. A thread that comes late finds the phases of before done, and goes through them; one
   that does not come at all is waited for by nobody. So a thread that the machine has no core for just now
   holds up nothing but what it has claimed. */

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

enum { PATIENCE = 256 };

/* All zero before its first claim; alone in its cache line. */
typedef struct {
    _Atomic int64_t next, done;
    int64_t apart[6];
} Phase;

/* What a thread has claimed; zero at first. */
typedef struct {
    int64_t first, last, claimed;
} Units;

static inline void idle(int64_t tries) {
    if (tries > PATIENCE) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next units of a phase, so many at a time, those claimed before being done; false once all of them
   are done, by whomever. */
static inline int claim(Phase *p, int64_t units, int64_t many, Units *u) {
    if (u->claimed) atomic_fetch_add_explicit(&p->done, u->claimed, memory_order_release);
    u->first = atomic_fetch_add_explicit(&p->next, many, memory_order_relaxed);
    if (u->first < units) {
        u->last = u->first + many < units ? u->first + many : units;
        u->claimed = u->last - u->first;
        return 1;
    }
    for (int64_t tries = 0; atomic_load_explicit(&p->done, memory_order_acquire) < units; tries++) idle(tries);
    return 0;
}
