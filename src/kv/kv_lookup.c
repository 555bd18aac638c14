/* SPDX-License-Identifier: Apache-2.0 */
/* kv_lookup.c - windows changed by the CPU (--lookup host): the hit test of arXiv 2605.18071, kept
 * to be measured against.  A selection comes down, with the averages that eviction goes by; the CPU
 * compares it with maps of its own, lists what is to come up and what is attended, and the device
 * goes on with that.  The step waits for this once a layer and micro-batch; while the CPU compares
 * one, the device selects for the next.
 *
 * Windows, lists and results are those of the device's lookup, bit for bit.
 *
 * Owns: a CPU backend, whose window op this is.  Nothing allocates after open.
 * Thread: the session's. */
#include "kv/kv_cache.h"

kvd_status kv_lookup_open(kv_store *s, kvd_err *err)
{
    const kvd_backend_limits lim = { .n_token   = 1,
                                     .n_seq     = s->params.n_seq,
                                     .n_kv_head = s->params.n_kv_head,
                                     .n_slot    = s->slots_max };

    if (!s->params.host_lookup || s->be->unified || s->slots_max == 0)
        return KVD_OK;
    for (uint32_t i = 0; i < KVD_MICRO_BATCHES_MAX; i++)
        KVD_TRY(s->be->ops->event_open(s->be, &s->found[i], err));
    return kvd_backend_open_beside(&s->cpu, &s->cpu_stream, &lim, err);
}

void kv_lookup_close(kv_store *s)
{
    for (uint32_t i = 0; i < KVD_MICRO_BATCHES_MAX && s->found[i]; i++)
        s->be->ops->event_close(s->found[i]);
    kvd_backend_close_beside(s->cpu, s->cpu_stream);
}

/* ---- down, and the change ----------------------------------------------------------------- */

/* Averages, where the order of eviction goes by them; selections are written down as they are made.
 */
static kvd_status bring_down(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_mem *work = &s->region[KV_WORK], *list = &s->region[KV_LISTS];
    const uint64_t row = (uint64_t)s->params.n_kv_head * s->n_chunk_max;

    for (uint32_t i = 0; i < q->n_row && s->policy.evict == KVD_EVICT_EMA; i++) {
        const uint16_t *from = s->ema + kv_lane(s, q->seq[i], q->layer) * s->n_chunk_max;
        const uint16_t *to   = s->step.ema + (q->first + i) * row;

        KVD_TRY(s->be->ops->copy(st, *list, (uint64_t)((const uint8_t *)to - (uint8_t *)list->ptr),
                                 *work, (uint64_t)((const uint8_t *)from - (uint8_t *)work->ptr),
                                 row * sizeof(*from), err));
    }
    return KVD_OK;
}

kvd_status kv_lookup_change(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    KVD_TRY(bring_down(s, st, q, err));
    KVD_TRY(s->be->ops->stream_sync(st, err));
    return kv_change_windows(s, st, q, err);
}

/* ---- a layer ------------------------------------------------------------------------------- */

/* All that the device does for a micro-batch before the CPU's part. */
static kvd_status ask(kv_store *s, kvd_stream *st, const kv_query *part, uint32_t i, kvd_err *err)
{
    uint32_t span;

    KVD_TRY(kvd_stamp_begin(s->params.stamps, st, KVD_TRACE_SELECT, KVD_TRACE_MAIN, part->layer,
                            part->n_row, &span, err));
    KVD_TRY(kv_attend_kept(s, st, part, err));
    KVD_TRY(kv_score_chunks(s, st, part, err));
    KVD_TRY(bring_down(s, st, part, err));
    KVD_TRY(kvd_stamp_end(s->params.stamps, st, span, err));
    return s->be->ops->event_record(s->found[i], st, err);
}

/* The misses listed from number n on. */
static kv_copies list_from(const kv_store *s, const kv_copies *list, uint64_t n)
{
    kv_copies l = *list;

    l.src += n;
    l.dst += n;
    if (s->record.type != KVD_RECORD_RAW) {
        l.param += n;
        l.number += n;
    }
    return l;
}

kvd_status kv_lookup_misses(kv_store *s, kvd_stream *st, const kv_query *q, bool urgent,
                            kvd_err *err)
{
    const uint64_t  first = urgent ? s->step.n_up : 0;
    const kv_copies list  = list_from(s, &s->step.list[urgent ? KV_COPIES : KV_COPIES_LATE], first);
    uint64_t        n;
    uint32_t        span;

    if (s->sizes.resident || s->no_fetch)
        return KVD_OK;
    n = kv_list_misses(s, q, urgent, first) - first;
    s->step.n_up += urgent ? n : 0;
    if (n == 0)
        return KVD_OK;
    s->counts.bytes_up += n * s->packed_bytes;
    KVD_TRY(kvd_stamp_begin(s->params.stamps, st, urgent ? KVD_TRACE_FETCH : KVD_TRACE_FETCH_LATE,
                            kv_track_of(s, st), q->layer, q->n_row, &span, err));
    KVD_TRY(kv_copy_up(s, st, &list, n, err));
    return kvd_stamp_end(s->params.stamps, st, span, err);
}

/* Until a micro-batch's selection is there: a few microseconds, so that sleeping would take longer.
 */
static kvd_status wait_found(kv_store *s, kvd_stream *st, uint32_t i, bool all, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;

    if (all)
        return ops->stream_sync(st, err);
    while (ops->event_poll(s->found[i], NULL) == KVD_E_BUSY) {
    }
    return ops->event_poll(s->found[i], err);
}

/* What the device finds for the micro-batches, one after the other, and what follows from it. */
static kvd_status look_up(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint32_t n = kv_micro_batch(s, q->n_row);

    s->step.n_up = 0;
    for (uint32_t first = 0; first < q->n_row; first += n) {
        const kv_query part = kv_query_rows(q, first, n);

        KVD_TRY(wait_found(s, st, first / n, n == q->n_row, err));
        KVD_TRY(kv_change_windows(s, st, &part, err));
        kv_count_rows(s, &part);
        KVD_TRY(kv_start_urgent(s, st, &part, first / n, err));
    }
    return kv_start_late(s, st, q, (q->n_row - 1) / n, err);
}

kvd_status kv_lookup_layer(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    const uint32_t n  = kv_micro_batch(s, q->n_row);
    uint64_t       t1, t2;

    KVD_TRY(kv_begin_rows(s, st, q, err));
    for (uint32_t first = 0; first < q->n_row; first += n) {
        const kv_query part = kv_query_rows(q, first, n);

        KVD_TRY(ask(s, st, &part, first / n, err));
    }
    KVD_TRY(look_up(s, st, q, err));
    t1 = kvd_now_ns();
    kv_span_rows(s, q, false);
    KVD_TRY(kv_attend_near(s, st, q, err));
    kv_span_rows(s, q, true);
    KVD_TRY(kv_attend_urgent(s, st, q, err));
    t2 = kvd_now_ns();
    s->counts.select_ns += t1 - t0;
    s->counts.attend_ns += t2 - t1;
    kvd_trace_add(s->params.trace, KVD_TRACE_SELECT, t0, t1, q->layer, q->n_row);
    kvd_trace_add(s->params.trace, KVD_TRACE_ATTEND, t1, t2, q->layer, q->n_row);
    kv_finish_rows(s, q);
    return KVD_OK;
}
