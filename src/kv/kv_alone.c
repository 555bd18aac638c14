/* SPDX-License-Identifier: Apache-2.0 */
/* kv_alone.c - a sparse step that the device goes through alone: what ops read is written for all
 * layers before the first, what they found is read after the last.  In between stages only give ops
 * to the stream, so a step can be recorded once and given again.
 *
 * Misses that are not urgent come up on a stream of their own, beside the rest of the step: their
 * slots are not read in it.  They are behind the step's end.
 *
 * Window, order of operations and results are those of kv_step.c, bit for bit; the lists that it
 * makes on the host come from window_spans and window_fetch.
 *
 * Owns: nothing; all arrays are the store's.  Nothing here allocates.
 * Thread: the session's. */
#include "kv/kv_cache.h"

/* ---- before the layers ---------------------------------------------------------------- */

static void place_row(kv_store *s, uint32_t i, uint32_t seq, uint32_t layer)
{
    const kv_seq  *q    = &s->seq[seq];
    const uint64_t lane = kv_lane(s, seq, layer);
    const bool     in   = s->sizes.resident;

    s->step.place[kv_seq_at(s, layer) + i] =
        (kvd_window_place){ .block   = kv_dev(s, q->block),
                            .at      = in ? NULL : kv_dev(s, s->lane_at + lane),
                            .host_of = in ? NULL : s->host_of + lane * s->n_chunk_max,
                            .iblock  = kv_dev(s, q->iblock) };
}

kvd_status kv_step_begin(kv_store *s, kvd_stream *st, const uint32_t *seq, const uint32_t *row,
                         uint32_t n_row, kvd_err *err)
{
    s->step.has_late = s->step.has_urgent = false;
    s->step.alone =
        s->params.device_steps && kv_serves(s) && !s->tap && !kv_zone_used(s) && n_row > 0;
    if (!s->step.alone)
        return KVD_OK;
    KVD_TRY(kv_serve_begin(s, st, err));
    s->step.n_row    = n_row;
    s->step.rows_seq = seq;
    for (uint32_t i = 0; i < n_row; i++) {
        if (kv_refills(&s->seq[seq[i]]))
            KVD_TRY(kv_clear_windows(s, st, seq[i], err));
        for (uint32_t il = 0; il < s->params.n_layer; il++) {
            kv_list_row(s, i, seq[i], row[i], il);
            place_row(s, i, seq[i], il);
        }
        s->counts.n_step++;
    }
    return KVD_OK;
}

kvd_status kv_step_upload(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_mem *host = &s->region[KV_ARGS], *dev = &s->mirror[KV_ARGS];

    return dev->ptr ? s->be->ops->copy(st, *dev, 0, *host, 0, host->bytes, err) : KVD_OK;
}

/* ---- after them ----------------------------------------------------------------------- */

static void count_lane(kv_store *s, uint32_t i, uint32_t layer, uint32_t head)
{
    const size_t             at  = kv_lane_at(s, layer) + i * s->params.n_kv_head + head;
    const kvd_window_result *r   = &s->step.change[at];
    const uint32_t           seq = s->step.rows_seq[i];

    kv_count_lane(s, seq, layer, head, &s->step.chosen[at], r);
    if (!s->sizes.resident && !s->no_fetch)
        s->counts.bytes_up += r->n_miss * s->packed_bytes;
}

kvd_status kv_step_end(kv_store *s, kvd_err *err)
{
    if (!s->step.alone)
        return KVD_OK;
    KVD_TRY(kv_serve_end(s, err));
    for (uint32_t i = 0; i < s->step.n_row; i++) {
        for (uint32_t at = 0; at < s->params.n_layer * s->params.n_kv_head; at++)
            count_lane(s, i, at / s->params.n_kv_head, at % s->params.n_kv_head);
        s->seq[s->step.rows_seq[i]].step++;
    }
    s->step.alone = false;
    return KVD_OK;
}

void kv_step_abort(kv_store *s, kvd_stream *st)
{
    kvd_err err = { 0 };

    kv_serve_give_up(s);
    (void)!kv_step_join(s, st, &err);
    (void)!s->be->ops->stream_sync(st, &err);
    (void)!kv_serve_end(s, &err);
    s->step.alone = false;
}

kvd_status kv_step_wait(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;

    if (!s->step.alone || !s->tier)
        return ops->stream_sync(st, err);
    KVD_TRY(ops->event_record(s->step_done, st, err));
    while (ops->event_poll(s->step_done, NULL) == KVD_E_BUSY)
        kv_serve_poll(s);
    return ops->stream_sync(st, err);
}

void kv_step_recording(kv_store *s, bool on)
{
    s->step.recording = on;
}

bool kv_step_alone(const kv_store *s)
{
    return s->step.alone;
}

kvd_status kv_alone_misses(kv_store *s, kvd_stream *st, const kv_query *q, bool urgent,
                           kvd_err *err)
{
    const kvd_window_fetch_args a = {
        .n_seq       = q->n_row,
        .n_kv_head   = s->params.n_kv_head,
        .seq         = kv_dev(s, s->step.window + kv_query_seq(s, q)),
        .place       = kv_dev(s, s->step.place + kv_query_seq(s, q)),
        .change      = kv_found(s, s->step.change + kv_query_lane(s, q)),
        .kv          = s->layout,
        .format      = s->record,
        .host        = s->host.ptr,
        .param       = s->landmarks.ptr,
        .slot_off    = s->sinks * s->layout.record_bytes,
        .lane_stride = s->n_chunk_max,
        .sel_stride  = s->slots_max,
        .param_off   = (uint64_t)q->layer * s->params.n_kv_head * s->index.head_stride +
                     (s->record.type == KVD_RECORD_VALUES ? 0 : s->param_off),
        .param_stride = s->index.head_stride,
        .urgent       = urgent,
        .link         = kv_serve_link(s, q->layer, urgent),
        .first_lane   = (uint32_t)kv_query_lane(s, q)
    };
    uint32_t span;

    if (s->sizes.resident || s->no_fetch)
        return KVD_OK;
    KVD_TRY(kvd_stamp_begin(s->params.stamps, st, urgent ? KVD_TRACE_FETCH : KVD_TRACE_FETCH_LATE,
                            kv_track_of(s, st), q->layer, q->n_row, &span, err));
    KVD_TRY(s->be->ops->window_fetch(st, &a, err));
    return kvd_stamp_end(s->params.stamps, st, span, err);
}

/* ---- the stream beside ---------------------------------------------------------------- */

kvd_status kv_step_join(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_mem *host = &s->region[KV_FOUND], *dev = &s->mirror[KV_FOUND];

    if (s->step.has_late) {
        KVD_TRY(s->be->ops->event_record(s->late_done, s->late, err));
        KVD_TRY(s->be->ops->event_wait(s->late_done, st, err));
    }
    if (s->step.has_urgent) { /* else joined layer by layer, unless one has failed */
        KVD_TRY(s->be->ops->event_record(s->arrived[0], s->urgent, err));
        KVD_TRY(s->be->ops->event_wait(s->arrived[0], st, err));
    }
    return s->step.alone && dev->ptr ? s->be->ops->copy(st, *host, 0, *dev, 0, host->bytes, err)
                                     : KVD_OK;
}

/* ---- the stages ------------------------------------------------------------------------ */

static kvd_window_spans_args spans_args(const kv_store *s, const kv_query *q)
{
    const size_t shared = kv_query_shared(s, q), list = shared * s->slots_max;

    return (kvd_window_spans_args){ .n_seq     = q->n_row,
                                    .n_kv_head = s->params.n_kv_head,
                                    .seq       = kv_dev(s, s->step.window + kv_query_seq(s, q)),
                                    .place     = kv_dev(s, s->step.place + kv_query_seq(s, q)),
                                    .select    = kv_found(s, s->step.chosen + kv_query_lane(s, q)),
                                    .change    = kv_found(s, s->step.change + kv_query_lane(s, q)),
                                    .kv        = kv_layout(s, q->layer),
                                    .slot_off  = s->sinks * s->layout.record_bytes,
                                    .lane_stride = s->n_chunk_max,
                                    .slot_stride = s->slots_max,
                                    .sel_stride  = s->slots_max,
                                    .list_stride = s->slots_max,
                                    .near        = s->step.near + list,
                                    .urgent      = s->step.urgent + list,
                                    .near_span   = s->step.near_span + shared,
                                    .urgent_span = s->step.urgent_span + shared,
                                    .in_place    = s->sizes.resident,
                                    .selected    = s->policy.selected };
}

/* Asks the host for what is on disk, before anything else: that takes longest. */
static kvd_status post_misses(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_post_args a = { .n_seq     = q->n_row,
                                     .n_kv_head = s->params.n_kv_head,
                                     .seq       = kv_dev(s, s->step.window + kv_query_seq(s, q)),
                                     .place     = kv_dev(s, s->step.place + kv_query_seq(s, q)),
                                     .change    = kv_found(s, s->step.change + kv_query_lane(s, q)),
                                     .link      = { kv_serve_link(s, q->layer, true),
                                                    kv_serve_link(s, q->layer, false) },
                                     .lane_stride = s->n_chunk_max,
                                     .sel_stride  = s->slots_max,
                                     .first_lane  = (uint32_t)kv_query_lane(s, q) };

    return s->tier && !s->no_fetch ? s->be->ops->window_post(st, &a, err) : KVD_OK;
}

kvd_status kv_alone_choose(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_choose_args a = { .kept   = kv_kept_args(s, q),
                                .select = kv_select_args(s, q),
                                .window = kv_window_args(s, q),
                                .spans  = spans_args(s, q) };
    uint32_t              span;

    KVD_TRY(kvd_stamp_begin(s->params.stamps, st, KVD_TRACE_SELECT, KVD_TRACE_MAIN, q->layer,
                            q->n_row, &span, err));
    KVD_TRY(s->be->ops->choose(st, &a, err));
    KVD_TRY(post_misses(s, st, q, err));
    return kvd_stamp_end(s->params.stamps, st, span, err);
}

kvd_status kv_alone_select(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    KVD_TRY(kv_alone_choose(s, st, q, err));
    return kv_start_late(s, st, q, 0, err);
}

/* From disk they take longer than the window's attention: then it goes first. */
kvd_status kv_alone_fetch(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    if (!s->tier)
        KVD_TRY(kv_alone_misses(s, st, q, true, err));
    return s->in_place ? kv_alone_misses(s, st, q, false, err) : KVD_OK;
}

/* What has stayed, then what has come. */
kvd_status kv_alone_attend(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kvd_attn_span_args a = kv_span_args(s, q, s->step.near_span);
    uint32_t           span;

    if (s->tier) {
        KVD_TRY(kv_attend_near(s, st, q, err));
        KVD_TRY(kv_alone_misses(s, st, q, true, err));
        KVD_TRY(kv_attend_urgent(s, st, q, err));
    } else {
        a.then = s->step.urgent_span;
        a.out  = q->out;
        KVD_TRY(kvd_stamp_begin(s->params.stamps, st, KVD_TRACE_ATTEND, KVD_TRACE_MAIN, q->layer,
                                q->n_row, &span, err));
        KVD_TRY(s->be->ops->attn_span(st, &a, err));
        KVD_TRY(kvd_stamp_end(s->params.stamps, st, span, err));
    }
    /* or the queue of launches fills up behind an op that waits, and nobody serves it */
    return s->tier && !s->step.recording ? kv_step_wait(s, st, err) : KVD_OK;
}
