/* SPDX-License-Identifier: Apache-2.0 */
/* kv_args.c - arguments of the ops of a sparse step: where records are, and what each op reads and
 * writes.
 *
 * A step that the device drives has lists of its own for every layer, written before the first; the
 * host drives a step layer by layer and reuses one set.  kv_step.seq_stride and the two shifts say
 * which, so nothing here asks.
 *
 * Owns: nothing; all arrays are the store's.  Nothing here allocates.
 * Thread: the session's. */
#include "kv/kv_cache.h"

/* ---- where records are -------------------------------------------------------------- */

static uint64_t record_of_chunk(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                                uint32_t chunk)
{
    return kv_record_in_block(s, s->seq[seq].block[chunk / s->block_chunks], layer, head, chunk);
}

uint64_t kv_record_of_slot(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
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

/* ---- lists that the host writes ---------------------------------------------------- */

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
                                      .ema      = s->exec.cpu ? t->ema + i * n_h * s->n_chunk_max
                                                              : s->ema + lane * s->n_chunk_max,
                                      .slot_of  = s->slot_of + lane * s->n_chunk_max,
                                      .chunk_of = s->chunk_of + lane * s->slots_max,
                                      .stamp    = s->stamp + lane * s->slots_max,
                                      .stay     = t->stay + list,
                                      .fetch    = t->fetch + own,
                                      .into     = t->into + own };
}

/* ---- arguments ------------------------------------------------------------------------ */

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

kvd_attn_span_args kv_kept_args(const kv_store *s, const kv_query *q)
{
    kvd_attn_span_args a =
        kv_span_args(s, q, kv_step_dev(s, s->step.kept_span + kv_query_lane(s, q)));

    a.lse   = s->step.lse;
    a.first = true;
    return a;
}

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

static void place_row(kv_store *s, uint32_t i, uint32_t seq, uint32_t layer)
{
    const kv_seq  *q    = &s->seq[seq];
    const uint64_t lane = kv_lane(s, seq, layer);
    const bool     in   = s->sizes.resident;

    s->step.place[kv_seq_at(s, layer) + i] =
        (kvd_window_place){ .block   = kv_step_dev(s, q->block),
                            .at      = in ? NULL : kv_step_dev(s, s->lane_at + lane),
                            .host_of = in ? NULL : s->host_of + lane * s->n_chunk_max,
                            .iblock  = kv_step_dev(s, q->iblock) };
}

void kv_list_all_layers(kv_store *s, uint32_t i, uint32_t seq, uint32_t row)
{
    for (uint32_t il = 0; il < s->params.n_layer; il++) {
        kv_list_row(s, i, seq, row, il);
        place_row(s, i, seq, il);
    }
}

kvd_window_spans_args kv_spans_args(const kv_store *s, const kv_query *q)
{
    const size_t shared = kv_query_shared(s, q), list = shared * s->slots_max;

    return (kvd_window_spans_args){ .n_seq     = q->n_row,
                                    .n_kv_head = s->params.n_kv_head,
                                    .seq      = kv_step_dev(s, s->step.window + kv_query_seq(s, q)),
                                    .place    = kv_step_dev(s, s->step.place + kv_query_seq(s, q)),
                                    .select   = kv_found(s, s->step.chosen + kv_query_lane(s, q)),
                                    .change   = kv_found(s, s->step.change + kv_query_lane(s, q)),
                                    .kv       = kv_layout(s, q->layer),
                                    .slot_off = s->sinks * s->layout.record_bytes,
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

kvd_window_post_args kv_post_args(const kv_store *s, const kv_query *q)
{
    return (kvd_window_post_args){ .n_seq     = q->n_row,
                                   .n_kv_head = s->params.n_kv_head,
                                   .seq       = kv_step_dev(s, s->step.window + kv_query_seq(s, q)),
                                   .place     = kv_step_dev(s, s->step.place + kv_query_seq(s, q)),
                                   .change    = kv_found(s, s->step.change + kv_query_lane(s, q)),
                                   .link      = { kv_serve_link(s, q->layer, true),
                                                  kv_serve_link(s, q->layer, false) },
                                   .lane_stride = s->n_chunk_max,
                                   .sel_stride  = s->slots_max,
                                   .first_lane  = (uint32_t)kv_query_lane(s, q) };
}

kvd_window_fetch_args kv_fetch_args(const kv_store *s, const kv_query *q, bool urgent)
{
    return (kvd_window_fetch_args){
        .n_seq       = q->n_row,
        .n_kv_head   = s->params.n_kv_head,
        .seq         = kv_step_dev(s, s->step.window + kv_query_seq(s, q)),
        .place       = kv_step_dev(s, s->step.place + kv_query_seq(s, q)),
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
}
