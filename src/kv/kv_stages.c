/* SPDX-License-Identifier: Apache-2.0 */
/* kv_stages.c - what each stage of a step program does (sparse.h), for steps that the host drives
 * and for steps that the device drives.
 *
 *   host    stages are ops and host functions in turn.  The host lists misses and records by what
 *           the device has found.
 *   device  stages only give ops out; the ops make those lists themselves (select, window_fetch).
 *           So a step can be recorded once and run again.
 * Both give the same windows and the same results, bit for bit.
 *
 * A stage does one thing for some rows of a layer.  Order, waits, events and time are the
 * executor's.
 *
 * Owns: nothing; all arrays are the store's.  Nothing here allocates.
 * Thread: the session's. */
#include "kv/kv_cache.h"

/* ---- select ------------------------------------------------------------------------- */

static kvd_status attend_kept(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_attn_span_args a = kv_kept_args(s, q);

    return s->be->ops->attn_span(st, &a, err);
}

static kvd_status score(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_select_args a = kv_select_args(s, q);

    return s->be->ops->select(st, &a, err);
}

static kvd_status join(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    bool refill = false;

    for (uint32_t i = 0; i < q->n_row; i++)
        refill = refill || kv_refills(&s->seq[q->seq[i]]);
    return kv_tier_begin(s, st, q->layer, refill, err);
}

static kvd_status list_rows(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    (void)err;
    s->step.n_up = 0;
    for (uint32_t i = 0; i < q->n_row; i++)
        kv_list_row(s, i, q->seq[i], q->row[i], q->layer);
    return KVD_OK;
}

/* Selections are written to memory of the host by the op that makes them. */
static kvd_status copy_averages(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_mem *work = &s->region[KV_WORK], *list = &s->region[KV_LISTS];
    const uint64_t row = (uint64_t)s->params.n_kv_head * s->n_chunk_max;

    for (uint32_t i = 0; i < q->n_row; i++) {
        const uint16_t *from = s->ema + kv_lane(s, q->seq[i], q->layer) * s->n_chunk_max;
        const uint16_t *to   = s->step.ema + (q->first + i) * row;

        KVD_TRY(s->be->ops->copy(st, *list, (uint64_t)((const uint8_t *)to - (uint8_t *)list->ptr),
                                 *work, (uint64_t)((const uint8_t *)from - (uint8_t *)work->ptr),
                                 row * sizeof(*from), err));
    }
    return KVD_OK;
}

static kvd_status change(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_args a   = kv_window_args(s, q);
    kvd_backend          *cpu = s->exec.cpu;

    return cpu ? cpu->ops->window(s->exec.cpu_stream, &a, err) : s->be->ops->window(st, &a, err);
}

/* Slots whose records are still being read are not attended, and their chunks, if selected, are no
 * hits. */
static void leave_out_late(kv_store *s, const kv_query *q, uint32_t i, uint32_t head)
{
    const kv_step     *t    = &s->step;
    const uint32_t     at   = (q->first + i) * s->params.n_kv_head + head;
    const uint64_t     lane = kv_lane(s, q->seq[i], q->layer) + head;
    const uint32_t    *sel  = t->sel + (uint64_t)at * s->slots_max;
    uint32_t          *stay = t->stay + (uint64_t)at * s->slots_max;
    kvd_window_result *r    = &s->step.change[at];
    uint32_t           n = 0, n_late = 0;

    for (uint32_t k = 0; k < r->n_stay; k++) {
        if (!kv_tier_is_late(s, lane, stay[k]))
            stay[n++] = stay[k];
    }
    r->n_stay = n;
    for (uint32_t k = 0; k < t->chosen[at].n_sel; k++)
        n_late +=
            kv_tier_is_late(s, lane,
                            s->slot_of[lane * s->n_chunk_max + (sel[k] & ~KVD_SELECT_URGENT)]);
    kv_count_late(s, q->layer, head, n_late);
    r->n_hit -= n_late;
}

/* Urgent ones are waited for, the others are left out. */
static kvd_status settle(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint32_t n_h   = s->params.n_kv_head;
    const size_t   first = kv_query_shared(s, q);

    (void)st;
    if (!kv_tier_waits(s, q->layer))
        return KVD_OK;
    for (uint32_t at = 0; at < q->n_row * n_h; at++) {
        const uint64_t  lane = kv_lane(s, q->seq[at / n_h], q->layer) + at % n_h;
        const uint32_t *sel  = s->step.sel + (first + at) * s->slots_max;

        for (uint32_t k = 0; k < s->step.chosen[first + at].n_sel; k++)
            kv_tier_want(s, lane, s->slot_of[lane * s->n_chunk_max + (sel[k] & ~KVD_SELECT_URGENT)],
                         s->policy.strict || sel[k] & KVD_SELECT_URGENT);
    }
    KVD_TRY(kv_tier_claim(s, q->layer, err));
    for (uint32_t at = 0; at < q->n_row * n_h; at++)
        leave_out_late(s, q, at / n_h, at % n_h);
    return KVD_OK;
}

static kvd_status count(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    (void)err;
    kv_count_rows(s, q);
    return KVD_OK;
}

static kvd_status tap(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    (void)err;
    kv_tap_rows(s, q);
    return KVD_OK;
}

static kvd_status select_fused(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_choose_args a = { .kept   = kv_kept_args(s, q),
                                .select = kv_select_args(s, q),
                                .window = kv_window_args(s, q),
                                .spans  = kv_spans_args(s, q) };

    return s->be->ops->choose(st, &a, err);
}

/* ---- fetch -------------------------------------------------------------------------- */

/* Of one lane's misses the urgent ones or the rest: to copy from the host, or to read from disk. */
static uint64_t list_lane(kv_store *s, const kv_query *q, uint32_t at, bool urgent, uint64_t n)
{
    const kv_step           *t    = &s->step;
    const uint32_t           seq  = q->seq[at / s->params.n_kv_head - q->first];
    const uint64_t           lane = kv_lane(s, seq, q->layer) + at % s->params.n_kv_head;
    const kvd_window_result *r    = &t->change[at];
    const uint64_t           list = (uint64_t)at * s->slots_max;

    for (uint32_t i = urgent ? 0 : r->n_urgent; i < (urgent ? r->n_urgent : r->n_miss); i++) {
        const uint32_t chunk = t->fetch[list + i];
        const uint32_t host  = s->host_of[lane * s->n_chunk_max + chunk];
        const uint64_t to    = kv_record_in_window(s, lane, s->sinks + t->into[list + i]);

        if (host == KV_NO_HOST) {
            kv_tier_miss(s, q->layer, seq, lane, chunk, to);
            continue;
        }
        n = kv_list_up(s, &t->list[urgent ? KV_COPIES : KV_COPIES_LATE], seq,
                       (uint32_t)(lane - kv_lane(s, seq, 0)), chunk, host * s->packed_bytes, to, n);
    }
    return n;
}

/* The records listed from number n on. */
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

/* Urgent misses are listed behind those of the layer's other micro-batches, which may still be
 * copied. */
static kvd_status fetch_listed(kv_store *s, kvd_stream *st, const kv_query *q, bool urgent,
                               kvd_err *err)
{
    const uint64_t  first = urgent ? s->step.n_up : 0;
    const kv_copies list  = list_from(s, &s->step.list[urgent ? KV_COPIES : KV_COPIES_LATE], first);
    const uint32_t  lanes = (uint32_t)kv_query_shared(s, q);
    uint64_t        n     = first, t0;

    for (uint32_t i = 0; i < q->n_row * s->params.n_kv_head; i++)
        n = list_lane(s, q, lanes + i, urgent, n);
    n -= first;
    s->step.n_up += urgent ? n : 0;
    s->counts.bytes_up += n * s->packed_bytes;
    t0 = kvd_now_ns();
    if (n > 0)
        KVD_TRY(kv_copy_up(s, st, &list, n, err));
    kv_count_move(s, &s->counts.up_ns, t0);
    /* records from disk on the main stream, as those that join later: they share a list */
    return kv_tier_fetch(s, s->exec.machine.stream[SPARSE_MAIN], q->layer, urgent, err);
}

static kvd_status fetch_urgent(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    return fetch_listed(s, st, q, true, err);
}

static kvd_status fetch_late(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    return fetch_listed(s, st, q, false, err);
}

/* One list serves all layers: copies of the layer before must have read it. */
static kvd_status reuse_late(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kvd_stream *late = s->exec.machine.stream[SPARSE_LATE];

    (void)st;
    return q->layer == 0 ? KVD_OK : s->be->ops->stream_sync(late, err);
}

static kvd_status device_fetch_urgent(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_fetch_args a = kv_fetch_args(s, q, true);

    return s->be->ops->window_fetch(st, &a, err);
}

static kvd_status device_fetch_late(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_fetch_args a = kv_fetch_args(s, q, false);

    return s->be->ops->window_fetch(st, &a, err);
}

static kvd_status post(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_post_args a = kv_post_args(s, q);

    return s->be->ops->window_post(st, &a, err);
}

/* While ops are given out one by one: their queue would fill up behind an op that waits for a
 * record, and nobody would read it. */
static kvd_status serve(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)q;
    return s->step.recording ? KVD_OK : kv_step_wait(s, st, err);
}

/* ---- attend ------------------------------------------------------------------------- */

/* Of the slots that stay, those whose chunks are selected: both lists ascend by different keys, so
 * the selection is walked and its slots are looked up. */
static uint32_t list_selected(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                              uint32_t at, uint64_t *record)
{
    const kv_step           *t    = &s->step;
    const uint64_t           lane = kv_lane(s, seq, layer) + head;
    const uint64_t           list = (uint64_t)at * s->slots_max;
    const kvd_window_result *r    = &t->change[at];
    uint32_t                 n = 0, u = 0, b = r->n_urgent;

    for (uint32_t i = 0; i < t->chosen[at].n_sel; i++) {
        const uint32_t chunk = t->sel[list + i] & ~KVD_SELECT_URGENT;

        if (u < r->n_urgent && t->fetch[list + u] == chunk)
            u++;
        else if (b < r->n_miss && t->fetch[list + b] == chunk)
            b++;
        else if (!kv_tier_is_late(s, lane, s->slot_of[lane * s->n_chunk_max + chunk]))
            record[n++] =
                kv_record_of_slot(s, seq, layer, head, s->slot_of[lane * s->n_chunk_max + chunk]);
    }
    return n;
}

static void span_window(const kv_store *s, const kv_query *q, uint32_t i, uint32_t head)
{
    const kv_step *t    = &s->step;
    const uint32_t at   = (q->first + i) * s->params.n_kv_head + head;
    const uint64_t list = (uint64_t)at * s->slots_max;
    uint64_t      *near = t->near + list;
    uint32_t       n    = t->change[at].n_stay;

    if (s->policy.selected) {
        n = list_selected(s, q->seq[i], q->layer, head, at, near);
    } else {
        for (uint32_t k = 0; k < n; k++)
            near[k] = kv_record_of_slot(s, q->seq[i], q->layer, head, t->stay[list + k]);
    }
    t->near_span[at] = (kvd_attn_span){ .record = near, .n_record = n };
}

static void span_urgent(const kv_store *s, const kv_query *q, uint32_t i, uint32_t head)
{
    const kv_step *t      = &s->step;
    const uint32_t at     = (q->first + i) * s->params.n_kv_head + head;
    const uint64_t list   = (uint64_t)at * s->slots_max;
    uint64_t      *urgent = t->urgent + list;

    for (uint32_t k = 0; k < t->change[at].n_urgent; k++)
        urgent[k] = kv_record_of_slot(s, q->seq[i], q->layer, head, t->into[list + k]);
    t->urgent_span[at] = (kvd_attn_span){ .record = urgent, .n_record = t->change[at].n_urgent };
}

static kvd_status list_window(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t i = 0; i < q->n_row; i++) {
        for (uint32_t h = 0; h < s->params.n_kv_head; h++)
            span_window(s, q, i, h);
    }
    return KVD_OK;
}

static kvd_status list_urgent(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t i = 0; i < q->n_row; i++) {
        for (uint32_t h = 0; h < s->params.n_kv_head; h++)
            span_urgent(s, q, i, h);
    }
    return KVD_OK;
}

static kvd_status attend_window(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_attn_span_args a = kv_span_args(s, q, s->step.near_span + kv_query_shared(s, q));

    return s->be->ops->attn_span(st, &a, err);
}

static kvd_status attend_urgent(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kvd_attn_span_args a = kv_span_args(s, q, s->step.urgent_span + kv_query_shared(s, q));

    a.out = q->out;
    return s->be->ops->attn_span(st, &a, err);
}

/* The same before an estimate, which goes on from the partial result and its log-sum-exp. */
static kvd_status attend_urgent_first(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kvd_attn_span_args a = kv_span_args(s, q, s->step.urgent_span + kv_query_shared(s, q));

    a.lse = s->step.lse;
    return s->be->ops->attn_span(st, &a, err);
}

static kvd_status attend_both(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kvd_attn_span_args a = kv_span_args(s, q, s->step.near_span + kv_query_shared(s, q));

    a.then = s->step.urgent_span + kv_query_shared(s, q);
    a.out  = q->out;
    return s->be->ops->attn_span(st, &a, err);
}

/* ---- measurements -------------------------------------------------------------------- */

static kvd_status mark_select(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    return s->exec.measure.mark(s->exec.measure.ctx, q->layer, KVD_STAGE_SELECT, err);
}

static kvd_status mark_fetch(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    (void)st;
    return s->exec.measure.mark(s->exec.measure.ctx, q->layer, KVD_STAGE_FETCH, err);
}

/* ---- tables -------------------------------------------------------------------------- */

static const kv_stage_fn host_stage[SPARSE_N_KIND] = {
    [SPARSE_JOIN]          = join,
    [SPARSE_LIST]          = list_rows,
    [SPARSE_ATTEND_KEPT]   = attend_kept,
    [SPARSE_SCORE]         = score,
    [SPARSE_TAP]           = tap,
    [SPARSE_AVERAGES]      = copy_averages,
    [SPARSE_CHANGE]        = change,
    [SPARSE_SETTLE]        = settle,
    [SPARSE_COUNT]         = count,
    [SPARSE_REUSE]         = reuse_late,
    [SPARSE_FETCH_URGENT]  = fetch_urgent,
    [SPARSE_FETCH_LATE]    = fetch_late,
    [SPARSE_LIST_WINDOW]   = list_window,
    [SPARSE_LIST_URGENT]   = list_urgent,
    [SPARSE_ATTEND_WINDOW] = attend_window,
    [SPARSE_ATTEND_URGENT] = attend_urgent,
    [SPARSE_ESTIMATE]      = kv_zone_attend,
    [SPARSE_MARK_SELECT]   = mark_select,
    [SPARSE_MARK_FETCH]    = mark_fetch,
};

static const kv_stage_fn device_stage[SPARSE_N_KIND] = {
    [SPARSE_SELECT]        = select_fused,
    [SPARSE_POST]          = post,
    [SPARSE_FETCH_URGENT]  = device_fetch_urgent,
    [SPARSE_FETCH_LATE]    = device_fetch_late,
    [SPARSE_ATTEND]        = attend_both,
    [SPARSE_ATTEND_WINDOW] = attend_window,
    [SPARSE_ATTEND_URGENT] = attend_urgent,
    [SPARSE_SERVE]         = serve,
    [SPARSE_MARK_SELECT]   = mark_select,
    [SPARSE_MARK_FETCH]    = mark_fetch,
};

void kv_stages_of(const sparse_program *p, kv_stage_fn *stage)
{
    const kv_stage_fn *table = p->desc.device_driven ? device_stage : host_stage;

    for (uint32_t i = 0; i < SPARSE_N_KIND; i++)
        stage[i] = table[i];
    if (p->desc.estimate)
        stage[SPARSE_ATTEND_URGENT] = attend_urgent_first;
    for (uint32_t i = 0; i < p->n_stage; i++)
        kvd_assert(stage[p->stage[i].kind]);
}
