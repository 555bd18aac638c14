/* SPDX-License-Identifier: Apache-2.0 */
/* kv_prompt.c - a prompt that goes through the layers one by one.
 *
 * The stage holds one layer of the whole sequence as raw blocks: sealed records come up, tokens
 * that are not sealed are copied in, new ones are written by the kernels.  When a layer closes,
 * blocks that are due are indexed and copied down from the stage, and the new tail goes to raw
 * blocks. Until the end nothing of the sequence has changed but reservations: blocks that become
 * sealed already have index blocks and host records, and keep their raw block if they have one.
 *
 * Where the host tier has no room for all, it gets the chunks that matter most to the prompt's last
 * queries, as the index sees it: by the mean over these queries of the scores that a step selects
 * by.  The index reads a fraction of what exact scores would, and the first step asks by the same
 * scores.  The mean lies where steps keep their averages; the first step clears those, so nothing
 * but the placement depends on it.
 *
 * Thread: the session's. */
#include "kv/kv_cache.h"

kvd_status kv_prompt_begin(kv_store *s, uint32_t seq, uint32_t n_new, bool reads, kvd_err *err)
{
    kv_seq    *q = &s->seq[seq];
    kv_prompt *p = &s->prompt;
    uint32_t   need, raw;

    kvd_assert(!s->sizes.resident && p->n_new == 0 && n_new > 0);
    kv_tier_settle(s);
    KVD_TRY(kv_check_growth(s, seq, n_new, &need, err));
    *p  = (kv_prompt){ .seq   = seq,
                       .n_new = n_new,
                       .reads = reads,
                       .first = q->n_sealed / KV_BLOCK_TOKENS,
                       .end   = kv_sealed_at(&s->params, q->len + n_new) / KV_BLOCK_TOKENS };
    raw = p->end > q->n_block ? p->end : q->n_block; /* blocks that need no new raw one */
    kv_parked_yield(s, need > raw ? need - raw : 0);
    if (need > raw && need - raw > s->n_free) {
        p->n_new = 0;
        return kv_refuse_unsealed(seq, err);
    }
    for (uint32_t b = p->first; b < p->end; b++)
        kv_map_block(s, seq, b, !s->tier); /* else kv_prompt_place() finds host records */
    kv_cache_put_begin(s, seq, p->first, p->end);
    for (; q->n_block < need; q->n_block++, s->n_held++)
        q->block[q->n_block] = q->n_block < p->end ? KV_NO_BLOCK : s->free_stack[--s->n_free];
    return KVD_OK;
}

/* Block b of one layer from its raw block to the stage, or back. */
static kvd_status copy_raw(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t b, bool up,
                           kvd_err *err)
{
    const uint64_t raw   = kv_layer_of(s, s->seq[s->prompt.seq].block[b], layer);
    const uint64_t stage = kv_stage_block(s, b);

    return s->be->ops->copy(st, s->pool, up ? stage : raw, s->pool, up ? raw : stage,
                            s->params.n_kv_head * s->layout.head_stride, err);
}

kvd_status kv_prompt_open(kv_store *s, kvd_stream *st, uint32_t layer, kvd_kv_layout *layout,
                          const uint64_t **block, kvd_err *err)
{
    const kv_prompt *p  = &s->prompt;
    const kv_seq    *q  = &s->seq[p->seq];
    const uint64_t   t0 = kvd_trace_now(s->params.trace);

    KVD_TRY(kv_leave_layer(s, st, err));
    if (p->reads)
        KVD_TRY(kv_fill_stage(s, st, layer, p->seq, err));
    for (uint32_t b = p->first; b < kv_blocks_for(q->len); b++)
        KVD_TRY(copy_raw(s, st, layer, b, true, err));
    for (uint32_t b = 0; b < q->n_block; b++)
        s->stage_block[b] = kv_stage_block(s, b); /* the same in every layer */
    kvd_trace_add(s->params.trace, KVD_TRACE_STAGE, t0, kvd_trace_now(s->params.trace), layer,
                  q->n_block);
    *layout          = kv_layout(s, layer);
    layout->lane_off = 0;
    *block           = s->stage_block;
    return KVD_OK;
}

/* The mean score that a row of last's gives each chunk, row by row into the averages. */
static kvd_status score_row(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t i, kvd_err *err)
{
    const kv_prompt_query *l = &s->prompt.last;
    kvd_select_args        a = { .n_seq       = 1,
                                 .n_head      = s->params.n_head,
                                 .seq         = s->step.select,
                                 .index       = s->index,
                                 .q_stride    = l->q_stride,
                                 .lse_stride  = s->params.n_head,
                                 .lane_stride = s->n_chunk_max,
                                 .sel_stride  = s->slots_max,
                                 .q           = l->q + i * l->q_stride,
                                 .kept_lse    = s->step.no_lse,
                                 .result      = s->step.chosen,
                                 .rule        = s->policy.rule,
                                 .scale       = l->scale,
                                 .alpha       = 1.0f / (float)(i + 1) };

    a.index.lane_off = (uint64_t)layer * s->params.n_kv_head * s->index.head_stride;
    return s->be->ops->select(st, &a, err);
}

/* What ops read of it, once they have read that of the layer before. */
static kvd_status list_scores(kv_store *s, kvd_stream *st, uint32_t layer, kvd_err *err)
{
    const kv_prompt *p = &s->prompt;

    KVD_TRY(kv_wait_lists(s, st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++)
        s->step.k[h] = 1; /* the scores alone are wanted */
    s->step.select[0] =
        (kvd_select_seq){ .first_chunk = s->sinks,
                          .n_chunk     = p->end * s->block_chunks,
                          .k           = s->step.k,
                          .iblock      = s->seq[p->seq].iblock,
                          .score       = s->step.score,
                          .ema         = s->ema + kv_lane(s, p->seq, layer) * s->n_chunk_max,
                          .sel         = s->step.sel };
    return KVD_OK;
}

kvd_status kv_prompt_place(kv_store *s, kvd_stream *st, uint32_t layer, kvd_err *err)
{
    const kv_prompt *p = &s->prompt;

    if (!s->tier || p->end == p->first)
        return KVD_OK;
    if (p->last.n_row > 0 && s->slots_max > 0)
        KVD_TRY(list_scores(s, st, layer, err));
    for (uint32_t i = 0; i < p->last.n_row && s->slots_max > 0; i++)
        KVD_TRY(score_row(s, st, layer, i, err));
    KVD_TRY(kv_tier_see(s, st, p->seq, layer, err));
    KVD_TRY(s->be->ops->stream_sync(st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++)
        kv_tier_place(s, kv_lane(s, p->seq, layer) + h, p->first * s->block_chunks,
                      p->end * s->block_chunks, p->last.n_row == 0);
    return KVD_OK;
}

kvd_status kv_prompt_close(kv_store *s, kvd_stream *st, uint32_t layer, const kv_prompt_query *last,
                           kvd_err *err)
{
    kv_prompt     *p  = &s->prompt;
    const kv_seq  *q  = &s->seq[p->seq];
    const uint64_t t0 = kvd_trace_now(s->params.trace);
    kvd_kv_layout  l  = kv_layout(s, layer);

    l.lane_off = 0;
    p->last    = last ? *last : (kv_prompt_query){ 0 };
    KVD_TRY(kv_seal_layer(s, st, p->seq, layer, p->first, p->end, &l, s->stage_block,
                          s->stage_block, err));
    for (uint32_t b = p->end; b < q->n_block; b++)
        KVD_TRY(copy_raw(s, st, layer, b, false, err));
    kvd_trace_add(s->params.trace, KVD_TRACE_SEAL, t0, kvd_trace_now(s->params.trace), layer,
                  p->end - p->first);
    return KVD_OK;
}

kvd_status kv_prompt_end(kv_store *s, kvd_err *err)
{
    kv_prompt *p = &s->prompt;
    kv_seq    *q = &s->seq[p->seq];

    kvd_assert(p->n_new > 0);
    KVD_TRY(kv_leave_end(s, err));
    kv_cache_put_end(s, true);
    KVD_TRY(kv_tier_bind(s, p->seq, p->end, err));
    for (uint32_t b = p->first; b < p->end; b++) {
        if (q->block[b] != KV_NO_BLOCK)
            s->free_stack[s->n_free++] = q->block[b];
        q->block[b] = KV_NO_BLOCK;
    }
    s->counts.n_sealed += p->end - p->first;
    s->counts.bytes_down += (p->end - p->first) * kv_packed_block_bytes(s);
    q->n_sealed = p->end * KV_BLOCK_TOKENS;
    q->len += p->n_new;
    s->n_used += p->n_new;
    p->n_new = 0;
    return KVD_OK;
}

void kv_prompt_abort(kv_store *s)
{
    kv_prompt *p = &s->prompt;
    kv_seq    *q = &s->seq[p->seq];

    if (p->n_new == 0)
        return;
    (void)!kv_leave_end(s, NULL); /* places below are given back */
    kv_cache_put_end(s, false);
    for (uint32_t b = p->end; b-- > p->first;)
        kv_unmap_block(s, p->seq, b);
    for (; q->n_block > kv_blocks_for(q->len); s->n_held--) {
        if (q->block[--q->n_block] != KV_NO_BLOCK)
            s->free_stack[s->n_free++] = q->block[q->n_block];
    }
    p->n_new = 0;
}
