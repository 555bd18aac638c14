/* SPDX-License-Identifier: Apache-2.0 */
/* kv_sched.c - in which order a layer's sparse attention is given to which stream.
 *
 *   sequential  all rows select, urgent misses come up on the main stream, all rows attend.
 *   elastic     rows go in micro-batches (arXiv 2605.18071): each selects on the main stream, and
 * its urgent misses come up on the stream `urgent` while the next ones select.  Behind the last
 * selection all rows attend to what they hold, then each micro-batch to its misses as they arrive.
 * Other misses start once the urgent ones are through, which then have the link for themselves.
 *
 * Where fetches are deferred and the device does all of a step, the first, too, has the few urgent
 * misses come up while rows attend to what they hold: as the second with all rows in one.
 *
 * Events alone order the streams, so a step can be recorded.  Rows, windows and lists are the same
 * either way; what an op gives for a row may depend on how many it takes at once, as it may on a
 * batch's composition.  That goes by the micro-batch alone, so where everything is resident rows
 * select in micro-batches, too; where there is a disk below they all go together.
 *
 * Owns: the streams and events beside the main stream.  Nothing allocates after open.
 * Thread: the session's. */
#include "kv/kv_cache.h"

kvd_status kv_sched_open(kv_store *s, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;

    if ((!s->params.device_steps && !s->params.host_lookup) || s->sizes.resident ||
        s->slots_max == 0)
        return KVD_OK;
    KVD_TRY(ops->stream_open(s->be, &s->late, err));
    KVD_TRY(ops->stream_open(s->be, &s->urgent, err));
    KVD_TRY(ops->event_open(s->be, &s->change_known, err));
    for (uint32_t i = 0; i < KVD_MICRO_BATCHES_MAX; i++)
        KVD_TRY(ops->event_open(s->be, &s->arrived[i], err));
    KVD_TRY(ops->event_open(s->be, &s->step_done, err));
    return ops->event_open(s->be, &s->late_done, err);
}

void kv_sched_close(kv_store *s)
{
    const kvd_backend_ops *ops = s->be->ops;

    ops->stream_close(s->late);
    ops->stream_close(s->urgent);
    if (s->change_known)
        ops->event_close(s->change_known);
    if (s->late_done)
        ops->event_close(s->late_done);
    if (s->step_done)
        ops->event_close(s->step_done);
    for (uint32_t i = 0; i < KVD_MICRO_BATCHES_MAX && s->arrived[i]; i++)
        ops->event_close(s->arrived[i]);
}

void kv_set_schedule(kv_store *s, const kv_schedule *p)
{
    s->schedule = *p;
}

bool kv_micro_batch_fits(uint32_t n_row, uint32_t rows)
{
    return kvd_div_up(n_row, rows) <= KVD_MICRO_BATCHES_MAX;
}

uint32_t kv_micro_batch(const kv_store *s, uint32_t n_row)
{
    const uint32_t least = (uint32_t)kvd_div_up(n_row, KVD_MICRO_BATCHES_MAX);

    if (!s->schedule.elastic || s->tier || s->schedule.micro_batch == 0 ||
        s->schedule.micro_batch > n_row)
        return n_row;
    return s->schedule.micro_batch < least ? least : s->schedule.micro_batch;
}

kv_query kv_query_rows(const kv_query *q, uint32_t first, uint32_t n)
{
    kv_query part = *q;

    part.first += first;
    part.seq += first;
    part.row += first;
    part.n_row = (uint32_t)kvd_min_u64(n, q->n_row - first);
    return part;
}

uint32_t kv_track_of(const kv_store *s, const kvd_stream *st)
{
    if (st == s->late)
        return KVD_TRACE_LATE;
    return st == s->urgent ? KVD_TRACE_URGENT : KVD_TRACE_MAIN;
}

/* ---- attention ------------------------------------------------------------------------- */

kvd_status kv_attend_near(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    uint32_t span;

    KVD_TRY(kvd_stamp_begin(s->params.stamps, st, KVD_TRACE_ATTEND, KVD_TRACE_MAIN, q->layer,
                            q->n_row, &span, err));
    KVD_TRY(kv_attend_spans(s, st, q, s->step.near_span + kv_query_shared(s, q), NULL, NULL, err));
    return kvd_stamp_end(s->params.stamps, st, span, err);
}

kvd_status kv_attend_urgent(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint32_t n = kv_micro_batch(s, q->n_row);

    for (uint32_t first = 0; first < q->n_row; first += n) {
        const kv_query part = kv_query_rows(q, first, n);
        uint32_t       span;

        if (s->step.has_urgent)
            KVD_TRY(s->be->ops->event_wait(s->arrived[first / n], st, err));
        KVD_TRY(kvd_stamp_begin(s->params.stamps, st, KVD_TRACE_ATTEND, KVD_TRACE_MAIN, q->layer,
                                part.n_row, &span, err));
        KVD_TRY(kv_attend_spans(s, st, &part, s->step.urgent_span + kv_query_shared(s, &part), NULL,
                                q->out, err));
        KVD_TRY(kvd_stamp_end(s->params.stamps, st, span, err));
    }
    s->step.has_urgent = false;
    return KVD_OK;
}

/* ---- misses on streams beside the main one ------------------------------------------------- */

static kvd_status bring_up(kv_store *s, kvd_stream *st, const kv_query *q, bool urgent,
                           kvd_err *err)
{
    return s->step.alone ? kv_alone_misses(s, st, q, urgent, err)
                         : kv_lookup_misses(s, st, q, urgent, err);
}

/* Has `beside` go on once windows have changed on `st`; where the host changes them, they have. */
static kvd_status behind_change(kv_store *s, kvd_stream *st, kvd_stream *beside, kvd_err *err)
{
    if (!s->step.alone)
        return KVD_OK;
    KVD_TRY(s->be->ops->event_record(s->change_known, st, err));
    return s->be->ops->event_wait(s->change_known, beside, err);
}

kvd_status kv_start_urgent(kv_store *s, kvd_stream *st, const kv_query *part, uint32_t i,
                           kvd_err *err)
{
    if (!s->urgent)
        return KVD_OK;
    if (!s->schedule.elastic && !s->step.alone)
        return bring_up(s, st, part, true, err);
    s->step.has_urgent = true;
    KVD_TRY(behind_change(s, st, s->urgent, err));
    KVD_TRY(bring_up(s, s->urgent, part, true, err));
    return s->be->ops->event_record(s->arrived[i], s->urgent, err);
}

kvd_status kv_start_late(kv_store *s, kvd_stream *st, const kv_query *q, uint32_t last,
                         kvd_err *err)
{
    /* in place, kv_fetch() brings them up, which a host that looks up goes without */
    const bool elsewhere = s->step.alone ? s->in_place : s->no_fetch;

    if (!s->late || s->policy.strict || elsewhere)
        return KVD_OK;
    /* the host lists them, in one list for all layers: those of the layer before have to be through
     */
    if (s->step.has_late && !s->step.alone)
        KVD_TRY(s->be->ops->stream_sync(s->late, err));
    s->step.has_late = true;
    if (s->step.has_urgent)
        KVD_TRY(s->be->ops->event_wait(s->arrived[last], s->late, err));
    else
        KVD_TRY(behind_change(s, st, s->late, err));
    return bring_up(s, s->late, q, false, err);
}

/* ---- without the host --------------------------------------------------------------------- */

/* Whether urgent misses come up beside: in micro-batches, or where few are waited for. */
static bool urgent_beside(const kv_store *s)
{
    return s->schedule.elastic || (!s->policy.strict && !s->sizes.resident);
}

static kvd_status attend_beside(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint32_t n = kv_micro_batch(s, q->n_row);

    for (uint32_t first = 0; first < q->n_row; first += n) {
        const kv_query part = kv_query_rows(q, first, n);

        KVD_TRY(kv_alone_choose(s, st, &part, err));
        KVD_TRY(kv_start_urgent(s, st, &part, first / n, err));
    }
    KVD_TRY(kv_start_late(s, st, q, (q->n_row - 1) / n, err));
    KVD_TRY(kv_attend_near(s, st, q, err));
    return kv_attend_urgent(s, st, q, err);
}

kvd_status kv_attend_sparse(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    if (s->step.alone && urgent_beside(s) && !s->tier)
        return attend_beside(s, st, q, err);
    if (s->cpu && !s->tier && !s->tap && !kv_zone_used(s))
        return kv_lookup_layer(s, st, q, err);
    KVD_TRY(kv_select(s, st, q, err));
    KVD_TRY(kv_fetch(s, st, q, err));
    return kv_attend(s, st, q, err);
}
