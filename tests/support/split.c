/* SPDX-License-Identifier: Apache-2.0 */
/* split.c - every op is put off until its stream is waited for, and DEVICE memory is accessible
 * while ops run and at no other time.
 *
 * All streams' ops are kept in the order of their calls, each with a number that grows; what has
 * run is taken out.  A wait for an event knows the number of its record. */
#include "support/split.h"
#include "support/split_reach.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define N_MAX        64
#define N_PINNED_MAX 1024
#define N_EVENT      256

typedef kvd_status (*task_fn)(kvd_stream *st, const void *args, kvd_err *err);

typedef struct copy_args {
    kvd_mem  dst, src;
    uint64_t dst_off, src_off, bytes;
} copy_args;

typedef struct fill_args {
    kvd_mem  mem;
    uint64_t off, pitch, row_bytes, n_row;
    uint8_t  value;
} fill_args;

typedef struct task {
    task_fn     fn; /* NULL: of an event */
    kvd_stream *st;
    void       *args; /* a copy: the caller's dies after the call */
    size_t      bytes;
    kvd_event  *event;
    bool        waits;
    uint64_t    number, after; /* waits: for the task of this number; 0: for none */
    bool        done;
} task;

typedef struct event_at {
    kvd_event *event;
    uint64_t   number; /* of its last record; 0: none yet */
} event_at;

struct kvd_graph {
    task  *task;
    size_t n;
};

static const kvd_backend_ops *real;
static kvd_backend_ops        split_ops;
static kvd_mem                held[N_MAX];         /* DEVICE */
static kvd_mem                shown[N_PINNED_MAX]; /* PINNED */
static task                  *tasks;
static size_t                 n_task, n_task_max;
static uint64_t               n_number;
static event_at               events[N_EVENT];
static bool                   others_first, dry; /* dry: ops do nothing */
static bool                   recording;
static size_t                 graph_at; /* of tasks: the first that is recorded */
static uint64_t               n_run;    /* of graphs */
static uint64_t               n_wait;
static uint64_t               n_op[2], fail_at[2]; /* ops run, copies down; which fails, or 0 */
static uint64_t               memory_total, memory_context, scratch, pinned;

/* A thread that runs a stream up to what somebody has asked for, whether it is done. */
static pthread_t   device;
static kvd_stream *device_stream;
static uint64_t    device_number;
static bool        busy;
static atomic_bool over;
static kvd_status  over_status;
static kvd_err     over_err;

static void check(bool ok)
{
    if (!ok)
        abort();
}

static void allow(int access)
{
    for (int i = 0; i < N_MAX; i++) {
        if (held[i].ptr)
            check(mprotect(held[i].ptr, held[i].bytes, access) == 0);
    }
}

static void *copy_of(const void *args, size_t bytes)
{
    void *p = malloc(bytes);

    check(p != NULL);
    return memcpy(p, args, bytes);
}

static kvd_status failed(kvd_err *err)
{
    for (int i = 0; i < 2; i++)
        if (fail_at[i] && n_op[i] >= fail_at[i])
            return kvd_fail(err, KVD_E_DEVICE, 0, "split: the device has failed (%s %llu)",
                            i ? "copy down" : "op", (unsigned long long)fail_at[i]);
    return KVD_OK;
}

static void settle(void)
{
    check(pthread_join(device, NULL) == 0);
    busy = false;
}

/* Before anything is given: what was given before has to have run; a failure shows when it is
 * waited for. */
static kvd_status ready(kvd_err *err)
{
    if (busy)
        settle();
    return failed(err);
}

static task *put(kvd_stream *st)
{
    if (n_task == n_task_max) {
        n_task_max = 2 * n_task_max + 64;
        tasks      = realloc(tasks, n_task_max * sizeof(*tasks));
        check(tasks != NULL);
    }
    tasks[n_task] = (task){ .st = st, .number = ++n_number };
    return &tasks[n_task++];
}

static kvd_status put_off(kvd_stream *st, task_fn fn, const void *args, size_t bytes, kvd_err *err)
{
    task *t;

    KVD_TRY(ready(err));
    t        = put(st);
    t->fn    = fn;
    t->args  = copy_of(args, bytes);
    t->bytes = bytes;
    return KVD_OK;
}

static kvd_status run_copy(kvd_stream *st, const void *args, kvd_err *err);

static bool comes_down(const task *t)
{
    const copy_args *a = t->args;

    return t->fn == run_copy && a->src.kind == KVD_MEM_DEVICE && a->dst.kind == KVD_MEM_PINNED;
}

/* ---- running ------------------------------------------------------------------------- */

static kvd_status run_op(const task *t, kvd_err *err)
{
    n_op[0]++;
    n_op[1] += comes_down(t);
    KVD_TRY(failed(err));
    return t->fn(t->st, t->args, err);
}

/* A stream's tasks up to that of a number, and what they wait for. */
static kvd_status run_stream(kvd_stream *st, uint64_t number, kvd_err *err)
{
    kvd_status rc = KVD_OK;

    for (size_t i = 0; i < n_task && tasks[i].number <= number; i++) {
        task *t = &tasks[i];

        if (t->st != st || t->done)
            continue;
        t->done = true;
        for (size_t k = 0; t->waits && k < i && rc == KVD_OK; k++) {
            if (tasks[k].number == t->after && !tasks[k].done)
                rc = run_stream(tasks[k].st, t->after, err);
        }
        if (t->fn && !dry && rc == KVD_OK)
            rc = run_op(t, err);
    }
    return rc;
}

static kvd_status run_others(kvd_stream *st, kvd_err *err)
{
    kvd_status rc = KVD_OK;

    for (size_t i = 0; i < n_task; i++) {
        if (tasks[i].st != st && !tasks[i].done && rc == KVD_OK)
            rc = run_stream(tasks[i].st, n_number, err);
    }
    return rc;
}

/* What has run goes; after a failure everything does. */
static void sweep(bool all)
{
    size_t n = 0;

    for (size_t i = 0; i < n_task; i++) {
        if (all || tasks[i].done)
            free(tasks[i].args);
        else
            tasks[n++] = tasks[i];
    }
    n_task = n;
}

/* st NULL: all streams. */
static kvd_status run_tasks(kvd_stream *st, uint64_t number, kvd_err *err)
{
    kvd_status rc = KVD_OK;

    check(!recording); /* nothing may be waited for */
    allow(PROT_READ | PROT_WRITE);
    if (!st || others_first)
        rc = run_others(st, err);
    if (st && rc == KVD_OK)
        rc = run_stream(st, number, err);
    sweep(rc != KVD_OK);
    allow(PROT_NONE);
    return rc == KVD_OK ? failed(err) : rc;
}

static void *device_main(void *unused)
{
    (void)unused;
    over_status = run_tasks(device_stream, device_number, &over_err);
    atomic_store(&over, true);
    return NULL;
}

static kvd_status run(kvd_stream *st, uint64_t number, kvd_err *err)
{
    kvd_status rc;

    if (busy)
        settle();
    rc          = over_status;
    over_status = KVD_OK;
    if (rc != KVD_OK && err)
        *err = over_err;
    return rc == KVD_OK ? run_tasks(st, number, err) : rc;
}

static kvd_status split_sync(kvd_stream *st, kvd_err *err)
{
    n_wait++;
    KVD_TRY(run(st, n_number, err));
    return real->stream_sync(st, err);
}

static void split_stream_close(kvd_stream *st)
{
    kvd_err err = { 0 };

    if (st)
        check(run(st, n_number, &err) == KVD_OK || failed(NULL) != KVD_OK);
    real->stream_close(st);
}

/* ---- events -------------------------------------------------------------------------- */

static event_at *event_of(const kvd_event *ev)
{
    int i = 0;

    while (events[i].event != ev)
        check(++i < N_EVENT);
    return &events[i];
}

static kvd_status split_event_open(kvd_backend *be, kvd_event **out, kvd_err *err)
{
    KVD_TRY(real->event_open(be, out, err));
    *event_of(NULL) = (event_at){ .event = *out };
    return KVD_OK;
}

static void split_event_close(kvd_event *ev)
{
    *event_of(ev) = (event_at){ 0 };
    real->event_close(ev);
}

static kvd_status split_event_record(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    task *t;

    KVD_TRY(ready(err));
    t                    = put(st);
    t->event             = ev;
    event_of(ev)->number = t->number;
    return KVD_OK;
}

static kvd_status split_event_wait(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    task *t;

    KVD_TRY(ready(err));
    t        = put(st);
    t->event = ev;
    t->waits = true;
    t->after = event_of(ev)->number;
    return KVD_OK;
}

/* What an event waits for, if that has not run. */
static const task *task_before(const kvd_event *ev)
{
    const uint64_t number = event_of(ev)->number;

    for (size_t i = 0; i < n_task; i++) {
        if (tasks[i].number == number)
            return &tasks[i];
    }
    return NULL;
}

/* As a GPU's event: what it is about runs meanwhile.  A failure shows here and in the next wait. */
static kvd_status split_event_poll(const kvd_event *ev, kvd_err *err)
{
    const task *t;

    if (busy && !atomic_load(&over))
        return kvd_fail(err, KVD_E_BUSY, 0, "not yet");
    if (busy)
        settle();
    if (over_status != KVD_OK)
        return kvd_fail(err, over_status, 0, "%s", over_err.msg);
    t = task_before(ev);
    if (!t)
        return failed(err);
    device_stream = t->st;
    device_number = t->number;
    atomic_store(&over, false);
    busy = true;
    check(pthread_create(&device, NULL, device_main, NULL) == 0);
    return kvd_fail(err, KVD_E_BUSY, 0, "not yet");
}

/* ---- graphs -------------------------------------------------------------------------- */

static kvd_status split_graph_begin(kvd_stream *st, kvd_err *err)
{
    (void)st;
    (void)err;
    check(!recording);
    if (busy)
        settle();
    recording = true;
    graph_at  = n_task;
    return KVD_OK;
}

/* What other streams were given is behind the one that is recorded, and waits for nothing that was
 * not. */
static void check_joined(kvd_stream *st)
{
    kvd_err err = { 0 };

    dry = true;
    check(run_stream(st, n_number, &err) == KVD_OK);
    dry = false;
    for (size_t i = graph_at; i < n_task; i++)
        check(tasks[i].done && (!tasks[i].waits || tasks[i].after >= tasks[graph_at].number));
    for (size_t i = 0; i < n_task; i++)
        tasks[i].done = false;
}

static kvd_status split_graph_end(kvd_stream *st, kvd_graph **out, kvd_err *err)
{
    kvd_graph *g;

    *out      = NULL;
    recording = false;
    KVD_TRY(failed(err));
    g = malloc(sizeof(*g));
    check(g && n_task > graph_at);
    check_joined(st);
    g->n    = n_task - graph_at;
    g->task = copy_of(tasks + graph_at, g->n * sizeof(*g->task));
    n_task  = graph_at;
    *out    = g;
    return KVD_OK;
}

static kvd_status split_graph_run(kvd_graph *g, kvd_stream *st, kvd_err *err)
{
    (void)st;
    for (size_t i = 0; i < g->n; i++) {
        const task *t = &g->task[i];

        if (t->fn)
            KVD_TRY(put_off(t->st, t->fn, t->args, t->bytes, err));
        else if (t->waits)
            KVD_TRY(split_event_wait(t->event, t->st, err));
        else
            KVD_TRY(split_event_record(t->event, t->st, err));
    }
    n_run++;
    return KVD_OK;
}

static void split_graph_close(kvd_graph *g)
{
    for (size_t i = 0; g && i < g->n; i++)
        free(g->task[i].args);
    if (g)
        free(g->task);
    free(g);
}

#define WRAP(op)                                                                         \
    static kvd_status run_##op(kvd_stream *st, const void *args, kvd_err *err)           \
    {                                                                                    \
        split_reach_##op(args);                                                          \
        return real->op(st, args, err);                                                  \
    }                                                                                    \
    static kvd_status split_##op(kvd_stream *st, const kvd_##op##_args *a, kvd_err *err) \
    {                                                                                    \
        return put_off(st, run_##op, a, sizeof(*a), err);                                \
    }

WRAP(embed)
WRAP(rms_norm)
WRAP(head_norm)
WRAP(matmul)
WRAP(rope)
WRAP(swiglu)
WRAP(kv_append)
WRAP(qkv_finish)
WRAP(attn)
WRAP(index_build)
WRAP(zone_build)
WRAP(select)
WRAP(attn_span)
WRAP(attn_zone)
WRAP(window)
WRAP(window_spans)
WRAP(choose)
WRAP(window_post)
WRAP(window_fetch)
WRAP(record_copy)
WRAP(record_pack)
WRAP(record_unpack)
WRAP(best)
WRAP(synth)

static bool lies_in(const kvd_mem *m, int n, const void *p, uint64_t bytes)
{
    for (int i = 0; i < n; i++) {
        const uintptr_t first = (uintptr_t)m[i].ptr, at = (uintptr_t)p;

        if (first && at >= first && at - first <= m[i].bytes && bytes <= m[i].bytes - (at - first))
            return true;
    }
    return false;
}

/* A GPU reaches what its backend allocated, and nothing else. */
bool split_reaches(const void *p, uint64_t bytes)
{
    return lies_in(held, N_MAX, p, bytes) || lies_in(shown, N_PINNED_MAX, p, bytes);
}

static kvd_status run_copy(kvd_stream *st, const void *args, kvd_err *err)
{
    const copy_args *a = args;

    return real->copy(st, a->dst, a->dst_off, a->src, a->src_off, a->bytes, err);
}

static kvd_status split_copy(kvd_stream *st, kvd_mem dst, uint64_t dst_off, kvd_mem src,
                             uint64_t src_off, uint64_t bytes, kvd_err *err)
{
    const copy_args a = { dst, src, dst_off, src_off, bytes };

    return put_off(st, run_copy, &a, sizeof(a), err);
}

static kvd_status run_fill(kvd_stream *st, const void *args, kvd_err *err)
{
    const fill_args *a = args;

    return real->fill(st, a->mem, a->off, a->pitch, a->row_bytes, a->n_row, a->value, err);
}

static kvd_status split_fill(kvd_stream *st, kvd_mem mem, uint64_t off, uint64_t pitch,
                             uint64_t row_bytes, uint64_t n_row, uint8_t value, kvd_err *err)
{
    const fill_args a = { mem, off, pitch, row_bytes, n_row, value };

    return put_off(st, run_fill, &a, sizeof(a), err);
}

static kvd_status run_stamp(kvd_stream *st, const void *args, kvd_err *err)
{
    return real->stamp(st, *(uint64_t *const *)args, err);
}

static kvd_status split_stamp(kvd_stream *st, uint64_t *at, kvd_err *err)
{
    return put_off(st, run_stamp, &at, sizeof(at), err);
}

static void split_memory(const kvd_backend *be, kvd_device_memory *out)
{
    (void)be;
    *out = (kvd_device_memory){
        .total = memory_total, .context = memory_context, .scratch = scratch, .pinned = pinned
    };
    for (int i = 0; i < N_MAX; i++)
        out->held += held[i].bytes;
    out->used = out->context + out->held + out->scratch;
    out->free = out->total > out->used ? out->total - out->used : 0;
}

void split_set_memory(uint64_t total, uint64_t context)
{
    memory_total   = total;
    memory_context = context;
}

static kvd_status split_reserve(kvd_backend *be, const kvd_backend_limits *lim, kvd_err *err)
{
    scratch = kvd_max_u64(scratch, real->reserve_bytes(be, lim));
    return real->reserve(be, lim, err);
}

static kvd_status split_alloc(kvd_backend *be, kvd_mem_kind kind, uint64_t bytes, kvd_mem *out,
                              kvd_err *err)
{
    int i = 0;

    if (kind != KVD_MEM_DEVICE || bytes == 0) {
        KVD_TRY(real->mem_alloc(be, kind, bytes, out, err));
        if (kind != KVD_MEM_PINNED || bytes == 0)
            return KVD_OK;
        pinned += bytes;
        while (shown[i].ptr)
            check(++i < N_PINNED_MAX);
        shown[i] = *out;
        return KVD_OK;
    }
    while (held[i].ptr)
        check(++i < N_MAX);
    out->ptr = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(out->ptr != MAP_FAILED);
    out->bytes = bytes;
    out->kind  = kind;
    held[i]    = *out;
    return KVD_OK;
}

static void split_free(kvd_backend *be, kvd_mem *m)
{
    kvd_err err = { 0 };

    check(run(NULL, 0, &err) == KVD_OK ||
          failed(NULL) != KVD_OK); /* as a GPU's, it waits for what may still use it */
    for (int i = 0; i < N_MAX; i++) {
        if (m->ptr && held[i].ptr == m->ptr) {
            munmap(m->ptr, m->bytes);
            held[i] = *m = (kvd_mem){ 0 };
            return;
        }
    }
    for (int i = 0; i < N_PINNED_MAX; i++) {
        if (m->ptr && shown[i].ptr == m->ptr)
            shown[i] = (kvd_mem){ 0 };
    }
    pinned -= m->kind == KVD_MEM_PINNED ? m->bytes : 0;
    real->mem_free(be, m);
}

void split_begin(kvd_backend *be)
{
    real                    = be->ops;
    split_ops               = *real;
    split_ops.embed         = split_embed;
    split_ops.rms_norm      = split_rms_norm;
    split_ops.head_norm     = split_head_norm;
    split_ops.matmul        = split_matmul;
    split_ops.rope          = split_rope;
    split_ops.swiglu        = split_swiglu;
    split_ops.kv_append     = split_kv_append;
    split_ops.qkv_finish    = split_qkv_finish;
    split_ops.attn          = split_attn;
    split_ops.index_build   = split_index_build;
    split_ops.zone_build    = split_zone_build;
    split_ops.select        = split_select;
    split_ops.attn_span     = split_attn_span;
    split_ops.attn_zone     = split_attn_zone;
    split_ops.window        = split_window;
    split_ops.window_spans  = split_window_spans;
    split_ops.choose        = split_choose;
    split_ops.window_post   = split_window_post;
    split_ops.window_fetch  = split_window_fetch;
    split_ops.record_copy   = split_record_copy;
    split_ops.record_pack   = split_record_pack;
    split_ops.record_unpack = split_record_unpack;
    split_ops.best          = split_best;
    split_ops.event_poll    = split_event_poll;
    split_ops.synth         = split_synth;
    split_ops.copy          = split_copy;
    split_ops.fill          = split_fill;
    split_ops.stamp         = split_stamp;
    split_ops.event_open    = split_event_open;
    split_ops.event_close   = split_event_close;
    split_ops.event_record  = split_event_record;
    split_ops.event_wait    = split_event_wait;
    split_ops.stream_sync   = split_sync;
    split_ops.stream_close  = split_stream_close;
    split_ops.graph_begin   = split_graph_begin;
    split_ops.graph_end     = split_graph_end;
    split_ops.graph_run     = split_graph_run;
    split_ops.graph_close   = split_graph_close;
    split_ops.mem_alloc     = split_alloc;
    split_ops.mem_free      = split_free;
    split_ops.memory        = split_memory;
    split_ops.reserve       = split_reserve;
    be->ops                 = &split_ops;
    be->unified             = false;
    n_run                   = 0;
    n_wait                  = 0;
    memset(n_op, 0, sizeof(n_op));
    memset(fail_at, 0, sizeof(fail_at));
    scratch = pinned = 0;
    memory_total     = 1ull << 60;
    memory_context   = 0;
}

void split_fail_at(uint64_t n, bool down)
{
    fail_at[down] = n_op[down] + n;
}

uint64_t split_ops_run(bool down)
{
    return n_op[down];
}

uint64_t split_waits(void)
{
    return n_wait;
}

uint64_t split_graph_runs(void)
{
    return n_run;
}

void split_order(bool first)
{
    others_first = first;
}

void split_end(kvd_backend *be)
{
    others_first = false;
    for (int i = 0; i < N_MAX; i++)
        check(!held[i].ptr);
    check(n_task == 0);
    free(tasks);
    tasks       = NULL;
    n_task_max  = 0;
    be->ops     = real;
    be->unified = true;
}
