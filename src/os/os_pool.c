/* SPDX-License-Identifier: Apache-2.0 */
/* os_pool.c - the thread pool: one job at a time, items handed out one by one.
 *
 * A job is published in one 64-bit word, the *ticket*: generation << 32 | items left.  A thread
 * takes an item by lowering the ticket with compare-and-swap.
 *
 * Invariants
 *  (1) fn, ctx and n_item are written only while no item of the last job is unfinished, and read
 *      only by a thread that holds an unfinished item: success of the compare-and-swap on the
 *      ticket is what makes them visible and keeps them in place;
 *  (2) n_done counts finished items of the current job; a thread adds what it finished when it
 *      finds no item left; the job has ended when n_done == n_item;
 *  (3) a job never waits for a worker that holds no item, so a worker that the system has taken
 *      off its processor, or that still wakes up, delays nothing.
 *
 * Waiting, on both sides, is a short spin and then a futex, so that a thread that waits for one
 * whose processor is taken by another process gives its own processor away.  The pairs "announce
 * that I sleep, look again" and "change the word, look for sleepers" are sequentially consistent
 * on both sides: one of the two always sees the other.
 *
 * Thread: run and close from one thread at a time; workers are private and take no signals. */
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/os.h"

#define N_THREAD_MAX 1024u
#define SPIN_NS      100000u /* longer than the gaps between the jobs of one decode step */
#define SPIN_PAUSES  8       /* between looks at the clock */
#define PAD_BYTES    128     /* two lines: neighbours are prefetched in pairs */

typedef struct worker {
    pthread_t       id;
    struct os_pool *pool;
    uint32_t        thread; /* 1 .. n_thread - 1 */
} worker;

struct os_pool {
    uint32_t n_thread, n_started;
    uint64_t spin_ns;
    worker  *worker; /* [n_thread - 1] */

    /* the job: invariant (1) */
    os_pool_fn fn;
    void      *ctx;
    uint32_t   n_item;
    bool       running;

    char             pad0[PAD_BYTES];
    _Atomic uint64_t ticket;
    char             pad1[PAD_BYTES];
    _Atomic uint32_t n_done; /* the caller's futex word */
    _Atomic uint32_t caller_asleep;
    char             pad2[PAD_BYTES];
    _Atomic uint32_t n_job; /* the workers' futex word: raised by each job and by close */
    _Atomic uint32_t n_asleep;
    _Atomic bool     closing;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Takes one item of whatever job is published; false when none is left. */
static bool take_item(os_pool *p, uint32_t *left)
{
    uint64_t t = atomic_load_explicit(&p->ticket, memory_order_relaxed);

    do {
        *left = (uint32_t)t;
        if (*left == 0)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&p->ticket, &t, t - 1, memory_order_acquire,
                                                    memory_order_relaxed));
    return true;
}

/* Runs items until none is left.  All items a thread runs in one call are of one job: while it has
 * not reported those it finished, that job cannot end. */
static void run_items(os_pool *p, uint32_t thread)
{
    uint32_t left, n_item = 0, n_ran = 0;

    while (take_item(p, &left)) {
        n_item = p->n_item;
        p->fn(p->ctx, n_item - left, thread);
        n_ran++;
    }
    if (n_ran == 0)
        return;
    if (atomic_fetch_add(&p->n_done, n_ran) + n_ran == n_item && thread != 0 &&
        atomic_load(&p->caller_asleep))
        futex_wake(&p->n_done, 1);
}

static bool work_waits(const os_pool *p)
{
    return (uint32_t)atomic_load_explicit(&p->ticket, memory_order_relaxed) != 0 ||
           atomic_load_explicit(&p->closing, memory_order_relaxed);
}

static bool job_ended(const os_pool *p)
{
    return atomic_load_explicit(&p->n_done, memory_order_acquire) == p->n_item;
}

/* Waits at most spin_ns for the question to turn true; its answer. */
static bool spin(const os_pool *p, bool (*question)(const os_pool *))
{
    uint64_t end;

    if (question(p))
        return true;
    if (p->spin_ns == 0)
        return false;
    end = kvd_now_ns() + p->spin_ns;
    do {
        for (int i = 0; i < SPIN_PAUSES; i++) {
            cpu_pause();
            if (question(p))
                return true;
        }
    } while (kvd_now_ns() < end);
    return false;
}

static void sleep_for_work(os_pool *p)
{
    const uint32_t seen = atomic_load(&p->n_job);

    atomic_fetch_add(&p->n_asleep, 1);
    if (!work_waits(p))
        futex_wait(&p->n_job, seen);
    atomic_fetch_sub(&p->n_asleep, 1);
}

static void *worker_main(void *arg)
{
    const worker *w = arg;
    os_pool      *p = w->pool;

    while (!atomic_load(&p->closing)) {
        run_items(p, w->thread);
        if (!spin(p, work_waits))
            sleep_for_work(p);
    }
    return NULL;
}

static void wait_for_end(os_pool *p)
{
    if (spin(p, job_ended))
        return;
    atomic_store(&p->caller_asleep, 1);
    for (;;) {
        const uint32_t seen = atomic_load(&p->n_done);

        if (seen == p->n_item)
            break;
        futex_wait(&p->n_done, seen);
    }
    atomic_store(&p->caller_asleep, 0);
}

void os_pool_run(os_pool *p, uint32_t n_item, os_pool_fn fn, void *ctx)
{
    uint64_t t;
    uint32_t n_wake;

    kvd_assert(!p->running);
    if (n_item <= 1 || p->n_thread == 1) {
        for (uint32_t i = 0; i < n_item; i++)
            fn(ctx, i, 0);
        return;
    }
    p->running = true;
    p->fn      = fn;
    p->ctx     = ctx;
    p->n_item  = n_item;
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    t = atomic_load_explicit(&p->ticket, memory_order_relaxed);
    atomic_store_explicit(&p->ticket, ((t >> 32) + 1) << 32 | n_item, memory_order_release);
    atomic_fetch_add(&p->n_job, 1);
    n_wake = (uint32_t)kvd_min_u64(atomic_load(&p->n_asleep), n_item - 1);
    if (n_wake > 0)
        futex_wake(&p->n_job, n_wake);

    run_items(p, 0);
    wait_for_end(p);
    p->running = false;
}

static kvd_status start_workers(os_pool *p, kvd_err *err)
{
    sigset_t all, old;
    int      rc = 0;

    /* Signals are the host program's: they go to its own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (p->n_started < p->n_thread - 1) {
        worker *w = &p->worker[p->n_started];

        *w = (worker){ .pool = p, .thread = p->n_started + 1 };
        rc = pthread_create(&w->id, NULL, worker_main, w);
        if (rc != 0)
            break;
        p->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0)
        return kvd_fail(err, KVD_E_BUSY, 0, "thread %u of %u cannot be started: %s",
                        p->n_started + 2, p->n_thread, strerror(rc));
    return KVD_OK;
}

kvd_status os_pool_open(os_pool **out, uint32_t n_thread, kvd_err *err)
{
    kvd_status st;
    os_pool   *p;

    *out = NULL;
    if (n_thread == 0 || n_thread > N_THREAD_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "%u threads: 1 to %u can be used", n_thread,
                        N_THREAD_MAX);
    p = kvd_calloc(1, sizeof(*p));
    if (!p)
        return kvd_fail(err, KVD_E_NOMEM, 0, "thread pool");
    p->n_thread = n_thread;
    /* With more threads than processors the one waited for may need ours. */
    p->spin_ns = n_thread <= os_cpu_get()->n_cpu ? SPIN_NS : 0;
    p->worker  = kvd_calloc(n_thread - 1, sizeof(*p->worker));
    if (!p->worker)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "thread pool of %u", n_thread);
    else
        st = start_workers(p, err);
    if (st != KVD_OK) {
        os_pool_close(p);
        return st;
    }
    *out = p;
    return KVD_OK;
}

void os_pool_close(os_pool *p)
{
    if (!p)
        return;
    kvd_assert(!p->running);
    atomic_store(&p->closing, true);
    atomic_fetch_add(&p->n_job, 1);
    futex_wake(&p->n_job, N_THREAD_MAX);
    for (uint32_t i = 0; i < p->n_started; i++)
        pthread_join(p->worker[i].id, NULL);
    kvd_free(p->worker);
    kvd_free(p);
}

uint32_t os_pool_n_thread(const os_pool *p)
{
    return p->n_thread;
}

void os_yield(void)
{
    sched_yield();
}
