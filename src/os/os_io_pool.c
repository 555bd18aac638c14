/* SPDX-License-Identifier: Apache-2.0 */
/* os_io_pool.c - file requests by threads that call pread and pwrite: for systems and containers
 * that refuse io_uring.
 *
 * Two lists under one mutex: to do and done.  Lists are linked through the slots, so they can
 * neither fill up nor allocate.  Threads: any worker runs any request. */
#include "os/os_io.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#define THREAD_DEFAULT 8u
#define THREAD_MAX     64u

typedef struct slot_list {
    io_slot *first, *last;
} slot_list;

typedef struct io_pool {
    io_backend      base;
    pthread_t       thread[THREAD_MAX];
    uint32_t        n_thread;
    pthread_mutex_t mutex;
    pthread_cond_t  work, ready; /* something to do; something done */
    bool            conds;       /* mutex and conditions exist */
    /* under mutex: */
    slot_list todo, done;
    bool      stop;
} io_pool;

static void list_put(slot_list *l, io_slot *s)
{
    s->next = NULL;
    if (l->last)
        l->last->next = s;
    else
        l->first = s;
    l->last = s;
}

static io_slot *list_take(slot_list *l)
{
    io_slot *s = l->first;

    if (s)
        l->first = s->next;
    if (!l->first)
        l->last = NULL;
    return s;
}

static void *worker(void *arg)
{
    io_pool *p = arg;

    pthread_mutex_lock(&p->mutex);
    for (;;) {
        io_slot *s = list_take(&p->todo);

        if (!s && p->stop)
            break;
        if (!s) {
            pthread_cond_wait(&p->work, &p->mutex);
            continue;
        }
        pthread_mutex_unlock(&p->mutex);
        s->result = os_io_slot_run(s);
        pthread_mutex_lock(&p->mutex);
        list_put(&p->done, s);
        pthread_cond_signal(&p->ready);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

static void pool_submit(io_backend *b, io_slot *const *slot, uint32_t n)
{
    io_pool *p = (io_pool *)b;

    pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < n; i++)
        list_put(&p->todo, slot[i]);
    if (n > 1)
        pthread_cond_broadcast(&p->work);
    else
        pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

static struct timespec deadline(uint64_t timeout_ns)
{
    struct timespec ts;
    uint64_t        nsec;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    nsec = (uint64_t)ts.tv_nsec + timeout_ns % 1000000000u;
    ts.tv_sec += (time_t)(timeout_ns / 1000000000u + nsec / 1000000000u);
    ts.tv_nsec = (long)(nsec % 1000000000u);
    return ts;
}

static uint32_t pool_reap(io_backend *b, io_slot **slot, uint32_t max, uint64_t timeout_ns)
{
    io_pool              *p  = (io_pool *)b;
    const struct timespec ts = deadline(timeout_ns);
    uint32_t              n  = 0;

    pthread_mutex_lock(&p->mutex);
    while (!p->done.first && timeout_ns > 0)
        if (pthread_cond_timedwait(&p->ready, &p->mutex, &ts) != 0)
            break;
    while (n < max && p->done.first)
        slot[n++] = list_take(&p->done);
    pthread_mutex_unlock(&p->mutex);
    return n;
}

/* Joins: a read that the system never ends keeps us here, as it would keep the process. */
static void pool_close(io_backend *b)
{
    io_pool *p = (io_pool *)b;

    if (p->conds) {
        pthread_mutex_lock(&p->mutex);
        p->stop = true;
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->mutex);
        for (uint32_t i = 0; i < p->n_thread; i++)
            pthread_join(p->thread[i], NULL);
        pthread_cond_destroy(&p->work);
        pthread_cond_destroy(&p->ready);
        pthread_mutex_destroy(&p->mutex);
    }
    kvd_free(p);
}

static const io_ops pool_ops = { IO_OPS_VERSION, pool_submit, pool_reap, pool_close };

kvd_status os_io_pool_open(io_backend **out, const os_io_params *q, kvd_err *err)
{
    const uint32_t     want = q->n_thread ? q->n_thread : THREAD_DEFAULT;
    io_pool           *p    = kvd_calloc(1, sizeof(*p));
    pthread_condattr_t attr;

    *out = NULL;
    if (!p)
        return kvd_fail(err, KVD_E_NOMEM, 0, "I/O threads: no memory");
    p->base = (io_backend){ .ops = &pool_ops, .name = "threads" };
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->ready, &attr);
    pthread_condattr_destroy(&attr);
    p->conds = true;
    while (p->n_thread < want && p->n_thread < THREAD_MAX &&
           pthread_create(&p->thread[p->n_thread], NULL, worker, p) == 0)
        p->n_thread++;
    if (p->n_thread == 0) {
        pool_close(&p->base);
        return kvd_fail(err, KVD_E_NOMEM, 0, "I/O threads: none could be started");
    }
    *out = &p->base;
    return KVD_OK;
}
