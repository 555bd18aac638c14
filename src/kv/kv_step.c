/* SPDX-License-Identifier: Apache-2.0 */
/* kv_step.c - a sparse decode step: select, fetch, attend, for one layer and all its rows.
 *
 *   select  attention over the kept set (sinks, and what is not sealed) gives its log-sum-exp; with
 *           that the index scores all sealed chunks; the window changes by the difference.
 *   fetch   urgent misses come up.
 *   attend  the window less its victims, then the urgent misses, then cells for what is left, if
 *           they are used (kv_zone.c); the other misses come up behind.
 *
 * A victim's slot may be written in the step in which it leaves, so it is not read in that step.
 * Everything resident: the same window and the same order, only that records are read in place.
 *
 * The host goes by what the device has found: where their memory is not one it waits once a layer,
 * after the windows' change, and lists of the layer before are free by then.
 *
 * Owns: nothing; all arrays are the store's.  Nothing here allocates.
 * Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

/* ---- admission ---------------------------------------------------------------------- */

void kv_set_policy(kv_store *s, const kv_policy *p)
{
    s->policy = *p;
}

void kv_seq_admit(kv_store *s, uint32_t seq, uint32_t budget, float cap)
{
    const uint64_t chunks = kvd_div_up(budget, s->params.chunk_tokens);
    uint64_t       least = chunks, n_slot = 0;

    kvd_assert(seq < s->params.n_seq && (budget == 0 || (s->params.sparse && cap >= 1.0f)));
    for (uint32_t i = 0; i < s->params.n_layer * s->params.n_kv_head; i++) {
        const double   c     = (double)(s->policy.caps ? s->policy.caps[i] : cap);
        const uint64_t slots = kvd_min_u64((uint64_t)((double)chunks * c), s->lane_slots[i]);

        s->cap[kv_lane(s, seq, 0) + i] = (uint32_t)slots;
        least                          = kvd_min_u64(least, slots);
        n_slot += slots;
    }
    s->seq[seq].n_slot = n_slot;
    s->seq[seq].budget = (uint32_t)least;
    s->seq[seq].step   = 0;
    s->seq[seq].mass   = 0.0;
    s->seq[seq].n_mass = 0;
    kv_tier_settle(s);
}

uint32_t kv_lane_window(const kv_store *s, uint32_t layer, uint32_t kv_head)
{
    return s->lane_slots[(uint64_t)layer * s->params.n_kv_head + kv_head] * s->params.chunk_tokens;
}

bool kv_seq_take_mass(kv_store *s, uint32_t seq, uint32_t n_step, double *mean)
{
    kv_seq        *q     = &s->seq[seq];
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;

    if (q->n_mass < n_step * lanes)
        return false;
    *mean     = q->mass / (double)q->n_mass;
    q->mass   = 0.0;
    q->n_mass = 0;
    return true;
}

bool kv_seq_sparse(const kv_store *s, uint32_t seq)
{
    const kv_seq *q = &s->seq[seq];

    return q->budget > 0 && q->n_sealed > s->params.n_sink;
}

void kv_seq_restart(kv_store *s, uint32_t seq)
{
    kv_tier_settle(s);
    s->seq[seq].step = 0;
}

/* Forgets windows and averages of all layers: what a refill starts from. */
kvd_status kv_clear_windows(kv_store *s, kvd_stream *st, uint32_t seq, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    const kvd_mem         *map = &s->region[KV_MAP], *work = &s->region[KV_WORK];
    const uint64_t         lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const uint64_t         pitch = s->n_chunk_max * sizeof(*s->ema);
    const uint64_t         lane  = kv_lane(s, seq, 0);
    /* on the host what is sealed later is cleared then; see kv_map_block() */
    const uint64_t width = s->mirror[KV_ARGS].ptr
                               ? pitch
                               : s->seq[seq].n_sealed / s->params.chunk_tokens * sizeof(*s->ema);
    const uint8_t *base  = map->ptr;

    KVD_TRY(ops->fill(
        st, *work, (uint64_t)((uint8_t *)(s->ema + lane * s->n_chunk_max) - (uint8_t *)work->ptr),
        pitch, s->cpu ? pitch : width, lanes, 0, err));
    KVD_TRY(ops->fill(st, *map, (uint64_t)((uint8_t *)(s->slot_of + lane * s->n_chunk_max) - base),
                      pitch, width, lanes, 0xff, err));
    return ops->fill(st, *map, (uint64_t)((uint8_t *)(s->chunk_of + lane * s->slots_max) - base), 0,
                     lanes * s->slots_max * sizeof(*s->chunk_of), 1, 0xff, err);
}

/* ---- where records lie -------------------------------------------------------------- */

static uint64_t record_of_chunk(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                                uint32_t chunk)
{
    return kv_record_in_block(s, s->seq[seq].block[chunk / s->block_chunks], layer, head, chunk);
}

static uint64_t record_of_slot(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                               uint32_t slot)
{
    const uint64_t lane = kv_lane(s, seq, layer) + head;

    if (s->sizes.resident)
        return record_of_chunk(s, seq, layer, head, s->chunk_of[lane * s->slots_max + slot]);
    return kv_record_in_window(s, lane, s->sinks + slot);
}

static uint64_t record_of_sink(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                               uint32_t i)
{
    if (s->sizes.resident)
        return record_of_chunk(s, seq, layer, head, i);
    return kv_record_in_window(s, kv_lane(s, seq, layer) + head, i);
}

/* ---- attention over spans ------------------------------------------------------------ */

kvd_attn_span_args kv_span_args(const kv_store *s, const kv_query *q, const kvd_attn_span *span)
{
    const uint64_t part =
        kvd_attn_part_floats(s->params.n_head / s->params.n_kv_head, s->params.head_dim);

    return (kvd_attn_span_args){ .n_row      = q->n_row,
                                 .n_head     = s->params.n_head,
                                 .kv         = kv_layout(s, q->layer),
                                 .row        = q->row,
                                 .span       = span,
                                 .q_stride   = q->q_stride,
                                 .out_stride = q->out_stride,
                                 .lse_stride = s->params.n_head,
                                 .q          = q->q,
                                 .part       = s->step.part + kv_query_shared(s, q) * part,
                                 .scale      = q->scale };
}

kvd_status kv_attend_spans(kv_store *s, kvd_stream *st, const kv_query *q,
                           const kvd_attn_span *span, float *lse, float *out, kvd_err *err)
{
    kvd_attn_span_args a = kv_span_args(s, q, span);

    a.lse = lse;
    a.out = out;
    return s->be->ops->attn_span(st, &a, err);
}

/* Sinks and everything that is not sealed, the new token included. */
static void list_kept(kv_store *s, uint32_t i, uint32_t seq, uint32_t layer)
{
    const kv_seq *q = &s->seq[seq];

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const size_t at   = kv_lane_at(s, layer) + i * s->params.n_kv_head + h;
        uint64_t    *sink = s->step.sink + at * s->sinks;

        for (uint32_t k = 0; k < s->sinks; k++)
            sink[k] = record_of_sink(s, seq, layer, h, k);
        s->step.kept_span[at] = (kvd_attn_span){ .record    = kv_step_dev(s, sink),
                                                 .n_record  = s->sinks,
                                                 .block     = kv_step_dev(s, q->block),
                                                 .first_key = q->n_sealed,
                                                 .end_key   = q->len + 1 };
        s->step.k[at]         = kv_refills(q) ? s->cap[kv_lane(s, seq, layer) + h] : q->budget;
    }
}

void kv_list_row(kv_store *s, uint32_t i, uint32_t seq, uint32_t row, uint32_t layer)
{
    kv_step       *t    = &s->step;
    const kv_seq  *q    = &s->seq[seq];
    const uint32_t n_h  = s->params.n_kv_head;
    const uint64_t lane = kv_lane(s, seq, layer);
    const size_t   at   = kv_seq_at(s, layer) + i;
    const uint64_t list = (uint64_t)i * n_h * s->slots_max;
    const uint64_t own  = at * n_h * s->slots_max; /* what is still read in later layers */

    list_kept(s, i, seq, layer);
    t->select[at] = (kvd_select_seq){ .row         = row,
                                      .first_chunk = s->sinks,
                                      .n_chunk     = q->n_sealed / s->params.chunk_tokens,
                                      .k           = kv_step_dev(s, t->k + at * n_h),
                                      .iblock      = kv_step_dev(s, q->iblock),
                                      .score       = t->score + (uint64_t)i * n_h * s->n_chunk_max,
                                      .ema         = s->ema + lane * s->n_chunk_max,
                                      .sel         = t->sel + list };
    t->window[at] = (kvd_window_seq){ .step     = q->step,
                                      .refill   = kv_refills(q),
                                      .cap      = kv_step_dev(s, s->cap + lane),
                                      .sel      = t->sel + list,
                                      .ema      = s->cpu ? t->ema + i * n_h * s->n_chunk_max
                                                         : s->ema + lane * s->n_chunk_max,
                                      .slot_of  = s->slot_of + lane * s->n_chunk_max,
                                      .chunk_of = s->chunk_of + lane * s->slots_max,
                                      .stamp    = s->stamp + lane * s->slots_max,
                                      .stay     = t->stay + list,
                                      .fetch    = t->fetch + own,
                                      .into     = t->into + own };
}

kvd_attn_span_args kv_kept_args(const kv_store *s, const kv_query *q)
{
    kvd_attn_span_args a =
        kv_span_args(s, q, kv_step_dev(s, s->step.kept_span + kv_query_lane(s, q)));

    a.lse   = s->step.lse;
    a.first = true;
    return a;
}

/* ---- select -------------------------------------------------------------------------- */

kvd_select_args kv_select_args(const kv_store *s, const kv_query *q)
{
    kvd_select_args a = { .n_seq       = q->n_row,
                          .n_head      = s->params.n_head,
                          .seq         = kv_step_dev(s, s->step.select + kv_query_seq(s, q)),
                          .index       = s->index,
                          .q_stride    = q->q_stride,
                          .lse_stride  = s->params.n_head,
                          .lane_stride = s->n_chunk_max,
                          .sel_stride  = s->slots_max,
                          .q           = q->q,
                          .kept_lse    = s->step.lse,
                          .result      = kv_found(s, s->step.chosen + kv_query_lane(s, q)),
                          .rule        = s->policy.rule,
                          .scale       = q->scale,
                          .alpha       = s->policy.alpha,
                          .top_p       = s->policy.top_p };

    a.index.lane_off = (uint64_t)q->layer * s->params.n_kv_head * s->index.head_stride;
    return a;
}

kvd_window_args kv_window_args(const kv_store *s, const kv_query *q)
{
    return (kvd_window_args){ .n_seq       = q->n_row,
                              .n_kv_head   = s->params.n_kv_head,
                              .seq         = kv_step_dev(s, s->step.window + kv_query_seq(s, q)),
                              .select      = kv_found(s, s->step.chosen + kv_query_lane(s, q)),
                              .result      = kv_found(s, s->step.change + kv_query_lane(s, q)),
                              .lane_stride = s->n_chunk_max,
                              .slot_stride = s->slots_max,
                              .sel_stride  = s->slots_max,
                              .policy      = s->policy.evict,
                              .strict      = s->policy.strict };
}

kvd_status kv_attend_kept(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_attn_span_args a = kv_kept_args(s, q);

    return s->be->ops->attn_span(st, &a, err);
}

kvd_status kv_score_chunks(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_select_args a = kv_select_args(s, q);

    return s->be->ops->select(st, &a, err);
}

kvd_status kv_change_windows(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const kvd_window_args a = kv_window_args(s, q);

    return s->cpu ? s->cpu->ops->window(s->cpu_stream, &a, err) : s->be->ops->window(st, &a, err);
}

void kv_count_lane(kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                   const kvd_select_result *chosen, const kvd_window_result *r)
{
    const size_t in_layer = (size_t)layer * s->params.n_kv_head + head;
    kv_counts   *c        = &s->counts;

    c->mass += (double)chosen->mass;
    c->n_mass++;
    s->seq[seq].mass += (double)chosen->mass;
    s->seq[seq].n_mass++;
    s->lane_mass[in_layer] += (double)chosen->mass;
    s->lane_n_mass[in_layer]++;
    if (kv_refills(&s->seq[seq])) {
        c->n_refill += r->n_miss;
        return;
    }
    c->n_select += r->n_hit + r->n_miss;
    c->n_hit += r->n_hit;
    c->n_miss += r->n_miss;
    c->n_urgent += r->n_urgent;
    c->n_evict += r->n_evict;
    c->n_attend +=
        s->policy.selected ? chosen->n_sel - (r->n_miss - r->n_urgent) : r->n_stay + r->n_urgent;
    s->lane_select[in_layer] += r->n_hit + r->n_miss;
    s->lane_hit[in_layer] += r->n_hit;
}

void kv_count_rows(kv_store *s, const kv_query *q)
{
    const uint32_t n_h = s->params.n_kv_head;

    for (uint32_t i = 0; i < q->n_row * n_h; i++) {
        const size_t at = kv_query_lane(s, q) + i;

        kv_count_lane(s, q->seq[i / n_h], q->layer, i % n_h, &s->step.chosen[at],
                      &s->step.change[at]);
    }
}

static void show_lanes(const kv_store *s, const kv_query *q)
{
    for (uint32_t at = 0; at < q->n_row * s->params.n_kv_head; at++) {
        const uint32_t        i = at / s->params.n_kv_head, h = at % s->params.n_kv_head;
        const kv_seq         *seq = &s->seq[q->seq[i]];
        const kvd_select_seq *c   = &s->step.select[i];

        s->tap(s->tap_ctx, &(kv_tap_lane){ .seq         = q->seq[i],
                                           .layer       = q->layer,
                                           .kv_head     = h,
                                           .step        = seq->step,
                                           .first_chunk = c->first_chunk,
                                           .n_chunk     = c->n_chunk,
                                           .budget      = seq->budget,
                                           .n_sel       = s->step.chosen[at].n_sel,
                                           .sel         = c->sel + (uint64_t)h * s->slots_max,
                                           .score       = c->score + (uint64_t)h * s->n_chunk_max,
                                           .ema         = c->ema + (uint64_t)h * s->n_chunk_max });
    }
}

/* Slots whose records are still on their way from disk are not attended, and their chunks, if
 * selected, are no hits. */
static void leave_out_late(kv_store *s, const kv_query *q, uint32_t i, uint32_t head)
{
    const kv_step     *t    = &s->step;
    const uint32_t     at   = i * s->params.n_kv_head + head;
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
    r->n_hit -= n_late;
    s->counts.n_disk_late += n_late;
    s->counts.n_select += n_late;
    s->lane_select[q->layer * s->params.n_kv_head + head] += n_late;
}

/* What late slots mean to this step: the urgent ones are waited for, the others are left out. */
static kvd_status settle_late(kv_store *s, const kv_query *q, kvd_err *err)
{
    const uint32_t n_h = s->params.n_kv_head;

    if (!kv_tier_waits(s, q->layer))
        return KVD_OK;
    for (uint32_t at = 0; at < q->n_row * n_h; at++) {
        const uint64_t  lane = kv_lane(s, q->seq[at / n_h], q->layer) + at % n_h;
        const uint32_t *sel  = s->step.sel + (uint64_t)at * s->slots_max;

        for (uint32_t k = 0; k < s->step.chosen[at].n_sel; k++)
            kv_tier_want(s, lane, s->slot_of[lane * s->n_chunk_max + (sel[k] & ~KVD_SELECT_URGENT)],
                         s->policy.strict || sel[k] & KVD_SELECT_URGENT);
    }
    KVD_TRY(kv_tier_claim(s, q->layer, err));
    for (uint32_t at = 0; at < q->n_row * n_h; at++)
        leave_out_late(s, q, at / n_h, at % n_h);
    return KVD_OK;
}

kvd_status kv_begin_rows(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    for (uint32_t i = 0; i < q->n_row && q->layer == 0; i++) {
        if (kv_refills(&s->seq[q->seq[i]]))
            KVD_TRY(kv_clear_windows(s, st, q->seq[i], err));
        s->counts.n_step++;
    }
    for (uint32_t i = 0; i < q->n_row; i++)
        kv_list_row(s, i, q->seq[i], q->row[i], q->layer);
    return KVD_OK;
}

/* The windows' change, and waits for it. */
static kvd_status change_windows(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    if (s->cpu)
        return kv_lookup_change(s, st, q, err);
    KVD_TRY(kv_change_windows(s, st, q, err));
    return kv_wait_lists(s, st, err); /* what follows goes by the change */
}

static kvd_status host_select(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint64_t t0     = kvd_now_ns();
    bool           refill = false;
    uint64_t       t1;

    for (uint32_t i = 0; i < q->n_row; i++)
        refill = refill || kv_refills(&s->seq[q->seq[i]]);
    KVD_TRY(kv_tier_begin(s, q->layer, refill, err)); /* earlier steps' late records */
    KVD_TRY(kv_begin_rows(s, st, q, err));
    KVD_TRY(kv_attend_kept(s, st, q, err));
    KVD_TRY(kv_score_chunks(s, st, q, err));
    if (s->tap) {
        KVD_TRY(s->be->ops->stream_sync(st, err));
        show_lanes(s, q);
    }
    KVD_TRY(change_windows(s, st, q, err));
    KVD_TRY(settle_late(s, q, err));
    kv_count_rows(s, q);
    t1 = kvd_now_ns();
    s->counts.select_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_SELECT, t0, t1, q->layer, q->n_row);
    return KVD_OK;
}

/* ---- fetch --------------------------------------------------------------------------- */

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

uint64_t kv_list_misses(kv_store *s, const kv_query *q, bool urgent, uint64_t n)
{
    const size_t first = kv_query_shared(s, q);

    for (uint32_t i = 0; i < q->n_row * s->params.n_kv_head; i++)
        n = list_lane(s, q, (uint32_t)first + i, urgent, n);
    return n;
}

/* Brings up the urgent misses, or starts what brings up the rest. */
static kvd_status fetch_part(kv_store *s, kvd_stream *st, const kv_query *q, bool urgent,
                             kvd_err *err)
{
    uint64_t n, t0;

    if (s->sizes.resident || s->no_fetch)
        return KVD_OK;
    n = kv_list_misses(s, q, urgent, 0);
    s->counts.bytes_up += n * s->packed_bytes;
    t0 = kvd_now_ns();
    KVD_TRY(kv_copy_up(s, st, &s->step.list[urgent ? KV_COPIES : KV_COPIES_LATE], n, err));
    kv_count_move(s, &s->counts.up_ns, t0);
    return kv_tier_fetch(s, st, q->layer, urgent, err);
}

kvd_status kv_select(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    return s->step.alone ? kv_alone_select(s, st, q, err) : host_select(s, st, q, err);
}

kvd_status kv_fetch(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_status rc = s->step.alone ? kv_alone_fetch(s, st, q, err) : fetch_part(s, st, q, true, err);
    uint64_t   t1;

    if (rc == KVD_OK && !s->step.alone && s->in_place)
        rc = fetch_part(s, st, q, false, err);
    t1 = kvd_now_ns();

    s->counts.fetch_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_FETCH, t0, t1, q->layer, q->n_row);
    return rc;
}

/* ---- attend -------------------------------------------------------------------------- */

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
                record_of_slot(s, seq, layer, head, s->slot_of[lane * s->n_chunk_max + chunk]);
    }
    return n;
}

static void span_near(const kv_store *s, const kv_query *q, uint32_t i, uint32_t head)
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
            near[k] = record_of_slot(s, q->seq[i], q->layer, head, t->stay[list + k]);
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
        urgent[k] = record_of_slot(s, q->seq[i], q->layer, head, t->into[list + k]);
    t->urgent_span[at] = (kvd_attn_span){ .record = urgent, .n_record = t->change[at].n_urgent };
}

void kv_span_rows(kv_store *s, const kv_query *q, bool urgent)
{
    for (uint32_t i = 0; i < q->n_row; i++) {
        for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
            if (urgent)
                span_urgent(s, q, i, h);
            else
                span_near(s, q, i, h);
        }
    }
}

void kv_finish_rows(kv_store *s, const kv_query *q)
{
    for (uint32_t i = 0; i < q->n_row && q->layer + 1 == s->params.n_layer; i++)
        s->seq[q->seq[i]].step++;
}

static kvd_status host_attend(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    uint64_t       t1, t2;

    kv_span_rows(s, q, false);
    KVD_TRY(kv_attend_spans(s, st, q, s->step.near_span, NULL, NULL, err));
    kv_span_rows(s, q, true);
    if (kv_zone_used(s)) {
        KVD_TRY(kv_attend_spans(s, st, q, s->step.urgent_span, s->step.lse, NULL, err));
        KVD_TRY(kv_zone_attend(s, st, q, err));
    } else {
        KVD_TRY(kv_attend_spans(s, st, q, s->step.urgent_span, NULL, q->out, err));
    }
    t1 = kvd_now_ns();
    s->counts.attend_ns += t1 - t0;
    if (!s->in_place)
        KVD_TRY(fetch_part(s, st, q, false, err));
    t2 = kvd_now_ns();
    s->counts.fetch_ns += t2 - t1;
    kvd_trace_add(s->params.trace, KVD_TRACE_ATTEND, t0, t1, q->layer, q->n_row);
    kvd_trace_add(s->params.trace, KVD_TRACE_FETCH_LATE, t1, t2, q->layer, q->n_row);
    kv_finish_rows(s, q);
    return KVD_OK;
}

kvd_status kv_attend(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    return s->step.alone ? kv_alone_attend(s, st, q, err) : host_attend(s, st, q, err);
}

/* ---- looking in ---------------------------------------------------------------------- */

bool kv_set_tap(kv_store *s, kv_tap_fn fn, void *ctx)
{
    if (fn && (s->mirror[KV_ARGS].ptr || s->cpu))
        return false;
    s->tap     = fn;
    s->tap_ctx = ctx;
    return true;
}

static void check_lane(const kv_store *s, const kv_seq *q, uint64_t lane)
{
    const uint16_t *slot_of  = s->slot_of + lane * s->n_chunk_max;
    const uint32_t *chunk_of = s->chunk_of + lane * s->slots_max;
    const uint32_t  n_chunk  = q->n_sealed / s->params.chunk_tokens;

    for (uint32_t c = 0; c < n_chunk; c++)
        kvd_assert(slot_of[c] == KVD_SLOT_NONE ||
                   (slot_of[c] < s->cap[lane] && chunk_of[slot_of[c]] == c && c >= s->sinks));
    for (uint32_t i = 0; i < s->slots_max; i++)
        kvd_assert(chunk_of[i] == KVD_CHUNK_NONE ||
                   (i < s->cap[lane] && chunk_of[i] < n_chunk && slot_of[chunk_of[i]] == i));
}

void kv_check_windows(const kv_store *s)
{
    for (uint32_t i = 0; i < s->params.n_seq && !s->mirror[KV_ARGS].ptr; i++) {
        if (!kv_seq_sparse(s, i) || kv_refills(&s->seq[i]))
            continue;
        for (uint32_t l = 0; l < s->params.n_layer * s->params.n_kv_head; l++)
            check_lane(s, &s->seq[i], kv_lane(s, i, 0) + l);
    }
    kv_tier_check(s);
}
