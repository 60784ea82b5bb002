/* Shares work between threads, however late each of them starts.

   A phase is a number of units. Threads claim a few units at a time, and no thread leaves a phase before all
   of its units are done. A thread that starts late finds earlier phases done and passes through them. No
   thread waits for one that never starts. So a thread without a core delays only the units it has claimed. */

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

enum { PATIENCE = 256 };

/* All zero before the first claim. It fills a cache line of its own. */
typedef struct {
    _Atomic int64_t next, done;
    int64_t apart[6];
} Phase;

/* The units that a thread has claimed; zero at first. */
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

/* Claim the next units of a phase, `many` at a time; the units claimed before are then done. False once all
   units are done by any thread. */
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
