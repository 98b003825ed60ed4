/* Counters in memory that several processes share: publishing a number, and waiting for the peers' numbers.

   Each rank has a row of its own, which only it writes, but for its bell: a peer that has published something rings it.
   A waiter spins for a while, then sleeps on its bell (futex). It notes the bell before it looks at the counters, so a
   number that is published in between is never slept through. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { READY = 0, ABORTED = 1, LATE = 2, PAUSES_BEFORE_YIELD = 200 };

typedef struct {
    _Alignas(128) _Atomic uint64_t counters[2];
    _Alignas(128) _Atomic uint32_t bell;
    _Atomic uint32_t is_asleep;
} Row;

_Static_assert(sizeof(Row) == 256, "shared_memory.py lays out the rows");

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void ring(Row *row) {
    atomic_fetch_add(&row->bell, 1);
    if (atomic_load(&row->is_asleep)) syscall(SYS_futex, &row->bell, FUTEX_WAKE, 1, 0, 0, 0);
}

static int are_ready(Row *rows, uint64_t size, uint64_t which, uint64_t at_least) {
    for (uint64_t rank = 0; rank < size; ++rank)
        if (atomic_load_explicit(&rows[rank].counters[which], memory_order_acquire) < at_least) return 0;
    return 1;
}

static void pause_briefly(uint64_t turn) {
    if (turn >= PAUSES_BEFORE_YIELD) {
        sched_yield(); /* a rank that shares this core goes on */
    } else {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

/* Sets a counter of this rank and rings the others. */
void publish(Row *rows, uint64_t size, uint64_t rank, uint64_t which, uint64_t number) {
    atomic_store(&rows[rank].counters[which], number);
    for (uint64_t peer = 0; peer < size; ++peer)
        if (peer != rank) ring(&rows[peer]);
}

/* Rings this rank itself, after `*is_aborted` was set. */
void wake(Row *rows, uint64_t rank) { ring(&rows[rank]); }

/* Waits until a counter of all ranks has reached a number: spins for spin_ns, then sleeps until limit_ns are over. */
uint64_t wait_for_all(Row *rows, uint64_t size, uint64_t rank, uint64_t which, uint64_t at_least,
                      const _Atomic uint32_t *is_aborted, uint64_t spin_ns, uint64_t limit_ns) {
    if (are_ready(rows, size, which, at_least)) return READY;
    const uint64_t started = now_ns();
    for (uint64_t turn = 0;; ++turn) {
        if (atomic_load(is_aborted)) return ABORTED;
        if (are_ready(rows, size, which, at_least)) return READY;
        if ((turn & 15) == 0 && now_ns() - started >= spin_ns) break;
        pause_briefly(turn);
    }
    Row *own = &rows[rank];
    uint64_t result = LATE;
    atomic_store(&own->is_asleep, 1);
    for (;;) {
        const uint32_t bell = atomic_load(&own->bell);
        result = atomic_load(is_aborted) ? ABORTED : are_ready(rows, size, which, at_least) ? READY : LATE;
        const uint64_t passed = now_ns() - started;
        if (result != LATE || passed >= limit_ns) break;
        const uint64_t left = limit_ns - passed;
        const struct timespec limit = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
        syscall(SYS_futex, &own->bell, FUTEX_WAIT, bell, &limit, 0, 0);
    }
    atomic_store(&own->is_asleep, 0);
    return result;
}
