/* SPDX-License-Identifier: Apache-2.0 */
/* sparse_run.c - the executor: walks a step program for one layer.
 *
 * It alone records events, makes streams wait for them, waits on the host where a host stage reads
 * what a device stage wrote, and counts time by phase.  A stage only does its work. */
#include "sparse/sparse.h"

/* A selection takes microseconds, so the host polls: sleeping would take longer. */
static kvd_status wait_on_host(const sparse_machine *m, const sparse_wait *w, kvd_stream *of,
                               kvd_err *err)
{
    kvd_status st;

    if (w->event == SPARSE_NO_EVENT)
        return m->ops->stream_sync(of, err);
    do
        st = m->ops->event_poll(m->event[w->event], NULL);
    while (st == KVD_E_BUSY);
    return st == KVD_OK ? KVD_OK : m->ops->event_poll(m->event[w->event], err);
}

static kvd_status wait_for(const sparse_program *p, const sparse_machine *m, const sparse_stage *g,
                           kvd_err *err)
{
    for (uint32_t i = 0; i < g->n_wait; i++) {
        const sparse_wait *w = &g->wait[i];

        if (g->stream == SPARSE_HOST)
            KVD_TRY(wait_on_host(m, w, m->stream[p->stage[w->stage].stream], err));
        else
            KVD_TRY(m->ops->event_wait(m->event[w->event], m->stream[g->stream], err));
    }
    return KVD_OK;
}

static kvd_status run_stage(const sparse_program *p, sparse_machine *m, uint32_t i, kvd_err *err)
{
    const sparse_stage *g  = &p->stage[i];
    kvd_stream         *st = m->stream[g->stream == SPARSE_HOST ? SPARSE_MAIN : g->stream];
    uint32_t            first, n;

    KVD_TRY(wait_for(p, m, g, err));
    sparse_stage_rows(p, i, &first, &n);
    m->used |= 1u << g->stream;
    KVD_TRY(m->run(m->ctx, (sparse_kind)g->kind, st, first, n, err));
    return g->event == SPARSE_NO_EVENT ? KVD_OK : m->ops->event_record(m->event[g->event], st, err);
}

kvd_status sparse_program_run(const sparse_program *p, sparse_machine *m, kvd_err *err)
{
    uint64_t t0 = m->spent ? kvd_now_ns() : 0;

    for (uint32_t i = 0; i < p->n_stage; i++) {
        const sparse_phase phase = sparse_stage_phase((sparse_kind)p->stage[i].kind);
        const bool         last =
            i + 1 == p->n_stage || sparse_stage_phase((sparse_kind)p->stage[i + 1].kind) != phase;

        KVD_TRY(run_stage(p, m, i, err));
        if (m->spent && last) {
            const uint64_t t1 = kvd_now_ns();

            m->spent(m->ctx, phase, t0, t1);
            t0 = t1;
        }
    }
    return KVD_OK;
}
