/* SPDX-License-Identifier: Apache-2.0 */
/* engine_graph.c - decode steps that are recorded once and run again, where the backend can: one
 * graph per number of rows and per what rows keep of their logits, sparse and dense.  What changes
 * from step to step is in memory that ops read (engine_buffers.c, kv_step_begin()), so a recorded
 * step fits all that follow with the same hash.  A graph whose hash has changed is recorded anew:
 * there is no other reason.
 *
 * A step qualifies when every row is the one new token of its sequence, wants its logits, and
 * attends like the others, without the host in between.  A step that cannot be recorded runs as it
 * is, from then on all of them.
 *
 * Owns: the session's graphs.  Thread: the session's. */
#include <xxhash.h>

#include "engine/engine.h"

#define N_KEPT 3u /* all logits, the best, KVD_BEST_MAX of them */

static uint32_t n_graph(const kvd_session *s)
{
    return 2 * N_KEPT * s->params.n_seq;
}

static struct engine_graph *graph_of(const kvd_session *s, uint32_t n_token)
{
    const uint32_t kept = s->best == 0 ? 0 : s->best == 1 ? 1 : 2;

    return &s->graph[((s->n_sparse ? N_KEPT : 0) + kept) * s->params.n_seq + n_token - 1];
}

/* All that a recorded step depends on but the memory that its ops read: the step program and the
 * policy's numbers, where ops find scratch, and what a measurement adds. */
static uint64_t hash_of(const kvd_session *s)
{
    const struct {
        uint64_t    step;
        const void *marks;
        float       reuse;
        uint32_t    n_reserve;
    } all = { kv_step_hash(s->kv), s->measure.at.ptr, s->measure.params.reuse,
              s->model->n_reserve };

    return XXH3_64bits(&all, sizeof(all));
}

static void drop(const kvd_session *s, struct engine_graph *g)
{
    s->model->be->ops->graph_close(g->ops);
    g->ops = NULL;
}

kvd_status engine_graphs_open(kvd_session *s, kvd_err *err)
{
    if (s->model->be->unified)
        return KVD_OK;
    s->graph = kvd_calloc(n_graph(s), sizeof(*s->graph));
    return s->graph ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for its graphs");
}

void engine_graphs_close(kvd_session *s)
{
    for (uint32_t i = 0; s->graph && i < n_graph(s); i++)
        drop(s, &s->graph[i]);
    kvd_free(s->graph);
    s->graph = NULL;
}

bool engine_graph_fits(const kvd_session *s, uint32_t n_token)
{
    const bool no_host = s->n_sparse == n_token ? kv_step_device_driven(s->kv)
                                                : s->n_sparse == 0 && kv_resident(s->kv);

    return s->graph && !s->trace && no_host && s->n_part == n_token && s->n_out == n_token &&
           s->in_order && n_token <= s->params.n_seq;
}

/* Records what fn gives to the stream.  Whatever fails, the stream is ready for work again. */
static kvd_status record(kvd_session *s, uint32_t n_token, engine_enqueue_fn fn, kvd_graph **out,
                         kvd_err *err)
{
    const kvd_backend_ops *ops    = s->model->be->ops;
    kvd_stream            *stream = s->model->stream;
    kvd_err                end    = { 0 };
    kvd_status             st, st_end;
    bool                   was;

    *out = NULL;
    KVD_TRY(ops->graph_begin(stream, err));
    kv_step_recording(s->kv, true);
    st = fn(s, n_token, err);
    kv_step_recording(s->kv, false);
    was    = kvd_alloc_guard(false); /* the graph itself, once */
    st_end = ops->graph_end(stream, out, st == KVD_OK ? err : &end);
    kvd_alloc_guard(was);
    if (st == KVD_OK || st_end != KVD_OK)
        return st == KVD_OK ? st_end : st;
    ops->graph_close(*out);
    *out = NULL;
    return st;
}

kvd_status engine_graph_step(kvd_session *s, uint32_t n_token, engine_enqueue_fn fn, kvd_err *err)
{
    struct engine_graph *g    = graph_of(s, n_token);
    const uint64_t       hash = hash_of(s);
    kvd_err              why  = { 0 };
    kvd_status           st;

    if (g->hash != hash)
        drop(s, g);
    g->hash = hash;
    if (atomic_exchange_explicit(&s->cancel, false, memory_order_relaxed))
        return kvd_fail(err, KVD_E_CANCELED, 0, "evaluation canceled");
    st = g->ops ? KVD_OK : record(s, n_token, fn, &g->ops, &why);
    if (st == KVD_E_CANCELED) /* while it was recorded: nothing has run */
        return kvd_fail(err, st, 0, "%s", why.msg);
    if (st != KVD_OK) {
        kvd_log(KVD_LOG_WARN, "steps are not recorded: %s", why.msg);
        engine_graphs_close(s);
        return fn(s, n_token, err);
    }
    return s->model->be->ops->graph_run(g->ops, s->model->stream, err);
}
