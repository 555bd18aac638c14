/* SPDX-License-Identifier: Apache-2.0 */
/* kv_zone.c - the estimation zone (RetroInfer, arXiv 2505.02922): the mean K and V of each cell of
 * zone_tokens neighbours stand for the tokens that a sparse step does not attend to.
 *
 * Cells lie on the device, in a lane's part of an index block, so they are stored and restored with
 * the index and nothing of them moves in a step.  They are made of K and V as these were computed,
 * before records are packed, as the index is: then restored cells are those that were made here.
 *
 * What a step has attended to, per lane: the first chunks, the window's slots that stay (or of them
 * the selected ones), and urgent misses; the rest of a cell's tokens is left to it.
 * Owns: nothing.  Nothing here allocates.  Thread: the session's. */
#include <math.h>

#include "kv/kv_impl.h"

void kv_zone_layout(kv_store *s)
{
    const kv_params *p    = &s->params;
    const uint64_t   elem = p->type == KVD_DTYPE_F32 ? 4 : 2;
    uint32_t         n;

    if (p->zone_tokens == 0)
        return;
    while (p->chunk_tokens << s->zone_shift < p->zone_tokens)
        s->zone_shift++;
    n       = KV_BLOCK_TOKENS / p->zone_tokens;
    s->zone = (kvd_kv_layout){ .type         = p->type,
                               .n_kv_head    = p->n_kv_head,
                               .head_dim     = p->head_dim,
                               .chunk_tokens = n, /* a block's mean K, then its mean V */
                               .block_tokens = n,
                               .record_bytes = 2 * n * elem * p->head_dim,
                               .head_stride  = s->index.head_stride,
                               .pool         = s->landmarks.ptr };
}

/* Where the cells of a layer lie. */
static kvd_kv_layout layout_of(const kv_store *s, uint32_t layer)
{
    kvd_kv_layout l = s->zone;

    l.lane_off = (uint64_t)layer * s->params.n_kv_head * l.head_stride + kv_aux_bytes(&s->params) -
                 kv_zone_bytes(&s->params);
    return l;
}

kvd_status kv_zone_build(kv_store *s, kvd_stream *st, uint32_t layer, const kvd_kv_layout *kv,
                         const uint64_t *block, const uint64_t *iblock, uint32_t n, kvd_err *err)
{
    kvd_zone_build_args a = { .n_block = n, .kv = *kv, .block = block, .zblock = iblock };

    if (s->params.zone_tokens == 0)
        return KVD_OK;
    a.zone = layout_of(s, layer);
    return s->be->ops->zone_build(st, &a, err);
}

bool kv_zone_used(const kv_store *s)
{
    return s->policy.zone && s->params.zone_tokens > 0;
}

/* ---- what is left -------------------------------------------------------------------- */

static void take(const kv_store *s, uint16_t *left, uint32_t chunk)
{
    const uint32_t n    = s->params.chunk_tokens;
    uint16_t      *cell = &left[chunk >> s->zone_shift];

    kvd_assert_dbg(*cell >= n);
    *cell = (uint16_t)(*cell - n);
}

/* Selected chunks that were in the window: all of them, less the misses. */
static void take_selected(const kv_store *s, uint16_t *left, uint32_t at)
{
    const kv_step           *t    = &s->step;
    const kvd_window_result *r    = &t->change[at];
    const uint64_t           list = (uint64_t)at * s->slots_max;

    for (uint32_t i = 0; i < t->chosen[at].n_sel; i++)
        take(s, left, t->sel[list + i] & ~KVD_SELECT_URGENT);
    for (uint32_t i = r->n_urgent; i < r->n_miss; i++) { /* not yet here */
        uint16_t *cell = &left[t->fetch[list + i] >> s->zone_shift];

        *cell = (uint16_t)(*cell + s->params.chunk_tokens);
    }
}

/* Of one lane of row i, of n_cell cells. */
static void count_left(const kv_store *s, const kv_query *q, uint32_t at, uint32_t n_cell,
                       uint16_t *left)
{
    const kv_step *t = &s->step;
    const uint64_t lane =
        kv_lane(s, q->seq[at / s->params.n_kv_head], q->layer) + at % s->params.n_kv_head;
    const uint32_t *chunk_of = s->chunk_of + lane * s->slots_max;
    const uint64_t  list     = (uint64_t)at * s->slots_max;

    for (uint32_t c = 0; c < n_cell; c++)
        left[c] = (uint16_t)s->params.zone_tokens;
    for (uint32_t c = 0; c < s->sinks; c++)
        take(s, left, c);
    if (s->policy.selected) {
        take_selected(s, left, at);
        return;
    }
    for (uint32_t i = 0; i < t->change[at].n_stay; i++)
        take(s, left, chunk_of[t->stay[list + i]]);
    for (uint32_t i = 0; i < t->change[at].n_urgent; i++)
        take(s, left, t->fetch[list + i]);
}

/* The share of a lane's weight that its cells have: mean over the group. */
static double share_of(const kv_store *s, uint32_t row, uint32_t head)
{
    const uint32_t group = s->params.n_head / s->params.n_kv_head;
    const uint64_t at    = (uint64_t)row * s->params.n_head + (uint64_t)head * group;
    double         sum   = 0.0;

    for (uint32_t i = 0; i < group; i++)
        sum += 1.0 - exp((double)s->step.lse[at + i] - (double)s->step.zone_lse[at + i]);
    return sum / group;
}

kvd_status kv_zone_attend(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    const uint64_t     t0    = kvd_now_ns();
    const uint32_t     n_h   = s->params.n_kv_head;
    const uint32_t     cells = s->blocks_max * s->zone.block_tokens;
    kv_step           *t     = &s->step;
    kvd_attn_zone_args a     = { .n_row       = q->n_row,
                                 .n_head      = s->params.n_head,
                                 .n_cell_max  = cells,
                                 .zone        = layout_of(s, q->layer),
                                 .row         = q->row,
                                 .seq         = t->zone,
                                 .q_stride    = q->q_stride,
                                 .out_stride  = q->out_stride,
                                 .lse_stride  = s->params.n_head,
                                 .left_stride = cells,
                                 .q           = q->q,
                                 .part        = t->part,
                                 .lse         = t->zone_lse,
                                 .out         = q->out,
                                 .scale       = q->scale };
    uint64_t           t1;

    for (uint32_t at = 0; at < q->n_row * n_h; at++) {
        const kv_seq  *seq    = &s->seq[q->seq[at / n_h]];
        uint16_t      *left   = t->left + (uint64_t)at * cells;
        const uint32_t n_cell = seq->n_sealed / s->params.zone_tokens;

        count_left(s, q, at, n_cell, left);
        if (at % n_h == 0)
            t->zone[at / n_h] =
                (kvd_zone_seq){ .n_cell = n_cell, .zblock = seq->iblock, .left = left };
    }
    KVD_TRY(s->be->ops->attn_zone(st, &a, err));
    KVD_TRY(kv_wait_lists(s, st, err)); /* for zone_lse */
    for (uint32_t at = 0; at < q->n_row * n_h; at++)
        s->counts.zone += share_of(s, q->row[at / n_h], at % n_h);
    t1 = kvd_now_ns();
    s->counts.zone_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_ZONE, t0, t1, q->layer, q->n_row);
    return KVD_OK;
}
