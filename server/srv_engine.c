/* SPDX-License-Identifier: Apache-2.0 */
/* srv_engine.c - the engine thread: takes jobs, steps, tells what has come of it. */
#include "srv_engine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define IDLE_NS       200000000ull  /* after the last step: what is stored is flushed then */
#define CACHE_LOOK_NS 2000000000ull /* an idle server looks whether its cache is there */

/* ---- open and close ---------------------------------------------------------------------- */

static kvd_status alloc_tables(srv_engine *e, kvd_err *err)
{
    const srv_engine_params *p    = &e->p;
    kvd_model_info           info = { .struct_size = sizeof(info) };
    const uint32_t           all  = p->n_seq + p->n_parked;

    kvd_model_get_info(p->model, &info);
    e->slot      = kvd_calloc(all, sizeof(*e->slot));
    e->row_token = kvd_calloc(p->n_batch, sizeof(*e->row_token));
    e->row_seq   = kvd_calloc(p->n_batch, sizeof(*e->row_seq));
    e->row_want  = kvd_calloc(p->n_batch, sizeof(*e->row_want));
    e->slot_rows = kvd_calloc(p->n_seq, sizeof(*e->slot_rows));
    e->view.slot = kvd_calloc(all, sizeof(*e->view.slot));
    e->map       = srv_map_new(info.n_layer, info.n_kv_head, all);
    if (!e->slot || !e->row_token || !e->row_seq || !e->row_want || !e->slot_rows ||
        !e->view.slot || !e->map)
        return kvd_fail(err, KVD_E_NOMEM, 0, "server: no memory for its slots");
    return KVD_OK;
}

/* rests: nothing more comes of it soon. */
static void take_view(srv_engine *e, bool rests)
{
    srv_view       *v      = &e->view;
    const kvd_stats before = v->stats;

    v->counts            = e->counts;
    v->stats.struct_size = sizeof(v->stats);
    kvd_session_get_stats(e->p.session, &v->stats);
    srv_map_add(e->map, &e->ended, &before, &v->stats);
    srv_map_take(e->map, e->p.session, rests);
    v->n_running = v->n_parked = 0;
    for (uint32_t i = 0; i < e->p.n_seq + e->p.n_parked; i++) {
        const srv_slot *s = &e->slot[i];
        srv_slot_view  *w = &v->slot[i];

        *w = (srv_slot_view){ .n_token = s->n };
        v->n_parked += i >= e->p.n_seq && s->n > 0;
        if (!s->gen)
            continue;
        v->n_running++;
        w->state       = s->gen->state;
        w->n_prompt    = s->gen->n_prompt;
        w->n_generated = s->gen->n_token - s->gen->n_prompt;
        w->n_target    = s->gen->n_target;
        memcpy(w->id, s->gen->job->id, sizeof(w->id));
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

static bool has_running(const srv_engine *e)
{
    for (uint32_t i = 0; i < e->p.n_seq; i++)
        if (e->slot[i].gen)
            return true;
    return false;
}

static void begin_job(srv_engine *e, srv_job *j)
{
    const uint32_t n = j->req.n_input * j->req.n;

    j->n_left = n;
    for (uint32_t i = 0; i < n; i++) {
        srv_gen *g = srv_gen_new(j, i);

        if (!g) {
            srv_step_fail(e, j, 503, "no memory for the request");
            break;
        }
        srv_sched_enqueue(e, g, false);
    }
}

static void clear(srv_engine *e)
{
    char   *json = NULL;
    kvd_err err  = { 0 };

    srv_sched_drop_idle(e);
    srv_sched_drop_holds(e);
    if (kvd_session_clear_cache(e->p.session, &json, &err) != KVD_OK)
        kvd_log(KVD_LOG_WARN, "clearing the cache: %s", err.msg);
    pthread_mutex_lock(&e->lock);
    kvd_free(e->cleared_json);
    e->cleared_json = json;
    e->clear_asked  = false;
    e->n_clear++;
    pthread_cond_broadcast(&e->cleared);
    pthread_mutex_unlock(&e->lock);
}

/* What has come from outside; false: the thread ends. */
static bool take_inbox(srv_engine *e)
{
    srv_job *inbox;
    bool     clear_asked;
    srv_stop stop;

    pthread_mutex_lock(&e->lock);
    inbox    = e->inbox;
    e->inbox = e->inbox_last = NULL;
    e->nudged                = false;
    clear_asked              = e->clear_asked;
    stop                     = e->stop;
    take_view(e, false);
    pthread_mutex_unlock(&e->lock);

    for (srv_job *j = inbox, *next; j; j = next) {
        next = j->next_in;
        begin_job(e, j);
        srv_job_unref(j);
    }
    if (stop == SRV_STOP_NOW)
        srv_step_fail_all(e, 503, e->broken ? e->why.msg : "the server is stopping");
    srv_sched_drop_canceled(e);
    if (clear_asked)
        clear(e);
    return stop == SRV_RUN || e->queue || has_running(e);
}

static struct timespec in_ns(uint64_t ns)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    ns += (uint64_t)t.tv_nsec;
    t.tv_sec += (time_t)(ns / 1000000000ull);
    t.tv_nsec = (long)(ns % 1000000000ull);
    return t;
}

/* Until something comes from outside; what was stored is on the disk soon after the last step. */
static void rest(srv_engine *e)
{
    const bool            looks = e->p.cached; /* whether its directory is there */
    const struct timespec until = in_ns(e->stale ? IDLE_NS : CACHE_LOOK_NS);
    int                   rc    = 0;
    bool                  flush;

    pthread_mutex_lock(&e->lock);
    take_view(e, true);
    while (!e->nudged && rc != ETIMEDOUT)
        rc = e->stale || looks ? pthread_cond_timedwait(&e->wake, &e->lock, &until)
                               : pthread_cond_wait(&e->wake, &e->lock);
    flush = (e->stale || looks) && !e->nudged;
    pthread_mutex_unlock(&e->lock);
    if (!flush)
        return;
    e->stale = false;
    (void)!kvd_session_flush(e->p.session,
                             NULL); /* the library warns of what could not be stored */
}

static void *run(void *arg)
{
    srv_engine *e = arg;

    while (!e->broken && take_inbox(e)) {
        srv_sched_admit(e);
        srv_sched_make_room(e);
        if (!srv_step_run(e))
            rest(e);
    }
    if (e->broken) { /* what has come during the last step is told as well */
        srv_engine_stop(e, SRV_STOP_NOW);
        take_inbox(e);
    } else {
        (void)!kvd_session_flush(e->p.session, NULL);
    }
    pthread_mutex_lock(&e->lock);
    e->stop = SRV_STOP_NOW;
    pthread_cond_broadcast(&e->cleared);
    pthread_mutex_unlock(&e->lock);
    atomic_store_explicit(&e->finished, true, memory_order_release);
    e->p.told(e->p.ctx, NULL);
    return NULL;
}

kvd_status srv_engine_open(srv_engine **out, const srv_engine_params *p, kvd_err *err)
{
    srv_engine        *e = kvd_calloc(1, sizeof(*e));
    pthread_condattr_t attr;
    kvd_status         st;
    int                rc;

    *out = NULL;
    if (!e)
        return kvd_fail(err, KVD_E_NOMEM, 0, "server: no memory");
    e->p           = *p;
    e->pace.gap_ns = p->gap_ms * 1e6;
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&e->wake, &attr);
    pthread_cond_init(&e->cleared, &attr);
    pthread_condattr_destroy(&attr);
    st        = alloc_tables(e, err);
    e->n_open = p->n_seq;
    if (st == KVD_OK) {
        take_view(e, true);
        rc = pthread_create(&e->thread, NULL, run, e);
        if (rc)
            st = kvd_fail(err, KVD_E_NOMEM, 0, "server: no thread: %s", strerror(rc));
        e->has_thread = rc == 0;
    }
    if (st != KVD_OK)
        srv_engine_close(e);
    else
        *out = e;
    return st;
}

void srv_engine_close(srv_engine *e)
{
    if (!e)
        return;
    if (e->has_thread)
        pthread_join(e->thread, NULL);
    for (srv_job *j = e->inbox, *next; j; j = next) {
        next = j->next_in;
        srv_job_unref(j);
    }
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->cleared);
    pthread_mutex_destroy(&e->lock);
    kvd_free(e->cleared_json);
    kvd_free(e->slot);
    kvd_free(e->row_token);
    kvd_free(e->row_seq);
    kvd_free(e->row_want);
    kvd_free(e->slot_rows);
    kvd_free(e->view.slot);
    srv_map_free(e->map);
    kvd_free(e);
}

void srv_engine_cache_pause(srv_engine *e, char *out, size_t bytes)
{
    pthread_mutex_lock(&e->lock);
    snprintf(out, bytes, "%s", e->view.stats.cache_pause);
    pthread_mutex_unlock(&e->lock);
}

/* ---- from outside ------------------------------------------------------------------------- */

kvd_status srv_engine_submit(srv_engine *e, srv_job *j, kvd_err *err)
{
    kvd_status st = KVD_OK;

    pthread_mutex_lock(&e->lock);
    if (e->stop != SRV_RUN) {
        e->counts.n_rejected[SRV_REJECT_STOPPING]++;
        st = kvd_fail(err, KVD_E_CANCELED, 0, "the server is stopping");
    } else if (!srv_sched_may_wait(e, j)) {
        e->counts.n_rejected[SRV_REJECT_QUEUE]++;
        st =
            kvd_fail(err, KVD_E_BUSY, 0,
                     "%u requests are waiting, beyond free sequences at most %u may (--queue): try "
                     "again later",
                     e->n_waiting, e->p.n_queue);
    } else {
        srv_job_ref(j);
        j->submit_ns = kvd_now_ns();
        if (e->inbox_last)
            e->inbox_last->next_in = j;
        else
            e->inbox = j;
        e->inbox_last = j;
        e->nudged     = true;
        pthread_cond_signal(&e->wake);
    }
    pthread_mutex_unlock(&e->lock);
    return st;
}

void srv_engine_nudge(srv_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->nudged = true;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void srv_engine_stop(srv_engine *e, srv_stop how)
{
    pthread_mutex_lock(&e->lock);
    e->stop   = how > e->stop ? how : e->stop;
    e->nudged = true;
    pthread_cond_signal(&e->wake);
    pthread_cond_broadcast(&e->cleared);
    pthread_mutex_unlock(&e->lock);
}

kvd_status srv_engine_clear(srv_engine *e, char **json, kvd_err *err)
{
    kvd_status st;
    uint64_t   before;

    *json = NULL;
    pthread_mutex_lock(&e->lock);
    before         = e->n_clear;
    e->clear_asked = e->nudged = true;
    pthread_cond_signal(&e->wake);
    while (e->n_clear == before && e->stop != SRV_STOP_NOW)
        pthread_cond_wait(&e->cleared, &e->lock);
    if (e->n_clear == before)
        st = kvd_fail(err, KVD_E_CANCELED, 0, "the server is stopping");
    else if (!e->cleared_json || !(*json = kvd_strndup(e->cleared_json, strlen(e->cleared_json))))
        st = kvd_fail(err, KVD_E_IO, 0, "the cache could not be emptied; the log says why");
    else
        st = KVD_OK;
    pthread_mutex_unlock(&e->lock);
    return st;
}

void srv_engine_look(srv_engine *e, srv_view *out, srv_slot_view *slot)
{
    pthread_mutex_lock(&e->lock);
    *out           = e->view;
    out->slot      = slot;
    out->n_waiting = e->n_waiting;
    memcpy(out->counts.n_rejected, e->counts.n_rejected, sizeof(e->counts.n_rejected));
    memcpy(slot, e->view.slot, (e->p.n_seq + e->p.n_parked) * sizeof(*slot));
    pthread_mutex_unlock(&e->lock);
}

void srv_engine_look_map(srv_engine *e, srv_map *out)
{
    pthread_mutex_lock(&e->lock);
    srv_map_copy(out, e->map);
    pthread_mutex_unlock(&e->lock);
}
