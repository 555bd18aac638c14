/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index.c - select of backend "cpu": how a step's lanes are cut into items for the thread pool.
 *
 * A lane is *scanned* by spans of up to 256 chunks: a span's weights are relative to its own
 * largest logit, so that spans are independent and any cut gives the same bits.  Then it is
 * *finished*: the spans' sums are merged in their order, scores and averages written, the best
 * taken. Few lanes are scanned in pieces, as items of their own; many are scanned and finished in
 * one item each.
 *
 * Scratch: lane areas (see select_lane), then a work area per thread.
 * Owns: nothing (the backend owns the scratch).  Thread: the backend's caller. */
#include <math.h>

#include "backend/cpu/cpu_index.h"
#include "backend/cpu/cpu_index_kernel.h"

#define SELECT_APART    4u     /* lanes per thread below which they are scanned in pieces */
#define SELECT_PIECE    4u     /* spans of a piece, at least */
#define SELECT_ALONE    4096u  /* chunks x query heads up to which the pool takes longer to start */
#define SELECT_PREFETCH 4096u  /* bytes of a block at most */
#define SELECT_AHEAD    16384u /* bytes asked for ahead: a third of L1 */
#define SELECT_LANE16   16u    /* heads are padded to a multiple */

typedef struct select_job {
    const kvd_select_args   *a;
    const cpu_index_kernels *k;
    bool                     vnni;
    cpu_index_shape          s;
    uint32_t                 group, heads; /* heads: rows of weights; 1 where logits are averaged */
    uint32_t                 heads_pad, dim_pad, n_lane, n_piece;
    uint32_t                 span_blocks, span_chunks;
    uint32_t                 ahead; /* blocks asked for ahead */
    float                    log_tokens;
    bool                     apart;
    uint8_t                 *area; /* [lanes or threads][area_bytes] */
    float                   *work; /* [n_thread][work_floats]: logits of a block */
    uint64_t                 area_bytes, work_floats;
} select_job;

/* One lane and the parts of its area. */
typedef struct select_lane {
    const select_job     *j;
    const kvd_select_seq *seq;
    uint32_t              index, kv_head, n_block, n_span, first_span;
    float                *q[3]; /* [group][dim_pad], scaled: of both landmark planes, and of keys */
    float                *qt[3];               /* the same, eight heads side by side */
    float                *radius_q;            /* [heads_pad] */
    float                *max;                 /* [n_span][heads_pad] largest logits */
    float                *sum;                 /* [n_span][heads_pad] of weights */
    float                *scale;               /* [n_span][heads_pad] weights to p */
    float                *e;                   /* [n_span][heads][span_chunks] */
    float                *cent;                /* [heads][n_block * 16] logits of centroids */
    uint32_t             *bits, *pos, *rerank; /* [n_chunk] */
    uint32_t              n_rerank;
} select_lane;

/* ---- scratch --------------------------------------------------------------------- */

typedef struct select_dims {
    uint64_t group, heads_pad, dim_pad, n_block, n_span, n_chunk; /* n_chunk: of whole spans */
} select_dims;

static uint64_t select_take(uint64_t *at, uint64_t n)
{
    const uint64_t off = *at;

    *at += kvd_align_up(n * sizeof(float), KVD_CACHE_LINE);
    return off;
}

/* Places a lane's parts in its area; l NULL: only the size. */
static uint64_t select_place(select_lane *l, uint8_t *area, const select_dims *d)
{
    uint64_t off[15], at = 0;

    for (int i = 0; i < 3; i++)
        off[i] = select_take(&at, d->group * d->dim_pad);
    for (int i = 12; i < 15; i++)
        off[i] = select_take(&at, d->heads_pad * d->dim_pad);
    off[3] = select_take(&at, d->heads_pad);
    off[4] = select_take(&at, d->n_span * d->heads_pad);
    off[5] = select_take(&at, d->n_span * d->heads_pad);
    off[6] = select_take(&at, d->n_span * d->heads_pad);
    off[7] = select_take(&at, d->n_chunk * d->group);
    off[8] = select_take(&at, d->n_block * CPU_INDEX_CENTROID * d->group);
    for (int i = 9; i < 12; i++)
        off[i] = select_take(&at, d->n_chunk);
    if (l) {
        for (int i = 0; i < 3; i++) {
            l->q[i]  = (float *)(void *)(area + off[i]);
            l->qt[i] = (float *)(void *)(area + off[12 + i]);
        }
        l->radius_q = (float *)(void *)(area + off[3]);
        l->max      = (float *)(void *)(area + off[4]);
        l->sum      = (float *)(void *)(area + off[5]);
        l->scale    = (float *)(void *)(area + off[6]);
        l->e        = (float *)(void *)(area + off[7]);
        l->cent     = (float *)(void *)(area + off[8]);
        l->bits     = (uint32_t *)(void *)(area + off[9]);
        l->pos      = (uint32_t *)(void *)(area + off[10]);
        l->rerank   = (uint32_t *)(void *)(area + off[11]);
    }
    return at;
}

/* n_chunk chunks of 4 to 16 tokens: at most so many blocks, spans, and chunks of whole spans. */
static select_dims select_dims_most(uint32_t group, uint32_t head_dim, uint32_t n_chunk)
{
    return (select_dims){ .group     = group,
                          .heads_pad = kvd_align_up(group, SELECT_LANE16),
                          .dim_pad   = kvd_align_up(head_dim, SELECT_LANE16),
                          .n_block   = (uint64_t)n_chunk / 16 + 1,
                          .n_span    = (uint64_t)n_chunk / 16 + 1,
                          .n_chunk   = (uint64_t)n_chunk + CPU_INDEX_BLOCK };
}

static uint64_t select_work_floats(uint32_t group)
{
    return (uint64_t)group * CPU_INDEX_BLOCK;
}

uint64_t cpu_select_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint32_t    group = (uint32_t)kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));
    const select_dims most  = select_dims_most(group, lim->head_dim, lim->n_chunk);
    const uint64_t    lanes = kvd_min_u64((uint64_t)lim->n_seq * lim->n_kv_head,
                                          (uint64_t)SELECT_APART * be->base.n_thread);

    if (lim->n_chunk == 0)
        return 0;
    return kvd_max_u64(lanes, be->base.n_thread) * select_place(NULL, NULL, &most) +
           be->base.n_thread * select_work_floats(group) * sizeof(float);
}

/* ---- scanning -------------------------------------------------------------------- */

static void select_lane_open(select_lane *l, const select_job *j, uint32_t lane, uint8_t *area)
{
    const kvd_select_seq *seq = &j->a->seq[lane / j->a->index.n_kv_head];
    select_dims           d   = { .group     = j->group,
                                  .heads_pad = j->heads_pad,
                                  .dim_pad   = j->dim_pad,
                                  .n_block   = kvd_div_up(seq->n_chunk, j->s.n_chunk) };

    d.n_span  = kvd_div_up(d.n_block, j->span_blocks);
    d.n_chunk = d.n_span * j->span_chunks;
    *l        = (select_lane){ .j          = j,
                               .seq        = seq,
                               .index      = lane,
                               .kv_head    = lane % j->a->index.n_kv_head,
                               .n_block    = (uint32_t)d.n_block,
                               .n_span     = (uint32_t)d.n_span,
                               .first_span = seq->first_chunk / j->span_chunks };
    kvd_assert(select_place(l, area, &d) <= j->area_bytes);
}

/* Eight sums side by side. */
static float select_norm(const float *x, uint32_t n)
{
    float    s[8] = { 0 };
    uint32_t i    = 0;

    for (; i + 8 <= n; i += 8) {
        for (uint32_t v = 0; v < 8; v++)
            s[v] += x[i + v] * x[i + v];
    }
    for (; i < n; i++)
        s[0] += x[i] * x[i];
    return sqrtf(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
}

/* Where logits are averaged over heads and linear in q, q is averaged instead. */
static void select_average_queries(const select_lane *l)
{
    const select_job *j    = l->j;
    const float       part = 1.0f / (float)j->group;

    for (uint32_t p = 0; p < j->s.n_mark; p++) {
        for (uint32_t i = 0; i < j->dim_pad; i++) {
            for (uint32_t h = 1; h < j->group; h++)
                l->q[p][i] += l->q[p][(uint64_t)h * j->dim_pad + i];
            l->q[p][i] *= part;
        }
    }
    for (uint32_t h = 1; h < j->group; h++)
        l->radius_q[0] += l->radius_q[h];
    l->radius_q[0] *= part;
}

static bool select_by_vnni(const select_job *j, kvd_index_elem elem)
{
    return j->vnni && elem != KVD_INDEX_BF16;
}

static void select_transpose(const select_lane *l, uint32_t p)
{
    const select_job *j = l->j;

    for (uint32_t h0 = 0; h0 < j->group; h0 += CPU_INDEX_HEADS) {
        float *out = l->qt[p] + (uint64_t)h0 * j->dim_pad;

        for (uint32_t i = 0; i < j->dim_pad; i++) {
            for (uint32_t h = h0; h < h0 + CPU_INDEX_HEADS; h++)
                *out++ = h < j->group ? l->q[p][(uint64_t)h * j->dim_pad + i] : 0.0f;
        }
    }
}

/* What plane p is multiplied with, from q scaled; a NaN stays one. */
static void select_query_plane(const select_lane *l, uint32_t p)
{
    const select_job *j = l->j;
    const uint64_t    n = (uint64_t)j->group * j->dim_pad;
    const float      *x = l->q[2];
    float            *q = l->q[p];

    if (j->s.kind == KVD_INDEX_BOX) {
        for (uint64_t i = 0; i < n && p == 0; i++)
            q[i] = x[i] > 0.0f ? 0.0f : x[i];
        for (uint64_t i = 0; i < n && p == 1; i++)
            q[i] = x[i] < 0.0f ? 0.0f : x[i];
    } else if (p == 0) {
        memcpy(q, x, n * sizeof(float));
    } else {
        for (uint64_t i = 0; i < n; i++)
            q[i] = fabsf(x[i]) * CPU_INDEX_STD;
    }
}

static void select_queries(const select_lane *l)
{
    const select_job *j = l->j;
    const float      *q =
        j->a->q + l->seq->row * j->a->q_stride + (uint64_t)l->kv_head * j->group * j->s.dim;

    for (uint32_t h = 0; h < j->group; h++, q += j->s.dim) {
        float *x = l->q[2] + (uint64_t)h * j->dim_pad;

        memset(x, 0, j->dim_pad * sizeof(float));
        for (uint32_t i = 0; i < j->s.dim; i++)
            x[i] = q[i] * j->a->scale;
        l->radius_q[h] = j->s.radius ? select_norm(x, j->s.dim) / sqrtf((float)j->s.dim) : 0.0f;
    }
    for (uint32_t p = 0; p < j->s.n_mark; p++)
        select_query_plane(l, p);
    if (j->heads < j->group)
        select_average_queries(l);
    for (uint32_t p = 0; p < j->s.n_mark; p++) {
        if (!select_by_vnni(j, j->s.mark[p].elem))
            select_transpose(l, p);
    }
    if (j->s.has_key && !select_by_vnni(j, j->s.key.elem))
        select_transpose(l, 2);
}

static void select_dots(const select_lane *l, const cpu_index_plane *p, uint32_t q, uint32_t block,
                        uint32_t tiles, float *out)
{
    const select_job    *j = l->j;
    const cpu_index_dots d = { .p = p,
                               .lane =
                                   cpu_index_lane(&j->a->index, l->seq->iblock[block], l->kv_head),
                               .tiles    = tiles & ((1u << p->n_unit / CPU_INDEX_TILE) - 1u),
                               .n_head   = q == 2 ? j->group : j->heads,
                               .q_stride = j->dim_pad,
                               .q        = l->q[q],
                               .qt       = l->qt[q],
                               .out      = out,
                               .add      = q == 1 };

    if (select_by_vnni(j, p->elem))
        cpu_index_dots_vnni(&d);
    else
        j->k->dots(&d);
}

/* Logits of the block's centroids, kept for all blocks of the sequence. */
static void select_centroids(const select_lane *l, uint32_t block, float *logit)
{
    select_dots(l, &l->j->s.mark[0], 0, block, 1, logit);
    for (uint32_t h = 0; h < l->j->heads; h++)
        memcpy(l->cent + ((uint64_t)h * l->n_block + block) * CPU_INDEX_CENTROID,
               logit + (uint64_t)h * CPU_INDEX_BLOCK, CPU_INDEX_CENTROID * sizeof(float));
}

static void select_assigned(const select_lane *l, uint32_t block, float *logit)
{
    const cpu_index_shape *s = &l->j->s;
    const uint8_t         *cl =
        cpu_index_lane(&l->j->a->index, l->seq->iblock[block], l->kv_head) + s->cluster_off;

    for (uint32_t c = 0; c < s->n_chunk; c++) {
        const uint32_t at = cpu_index_centroid(block, l->n_block, cl[0], cl[64 + c]);

        for (uint32_t h = 0; h < l->j->heads; h++)
            logit[(uint64_t)h * CPU_INDEX_BLOCK + c] =
                l->cent[(uint64_t)h * l->n_block * CPU_INDEX_CENTROID + at];
    }
}

static uint32_t select_in_span(const select_lane *l, uint32_t span, uint32_t chunk)
{
    const uint64_t first = (uint64_t)span * l->j->span_chunks;

    return chunk <= first ? 0 : (uint32_t)kvd_min_u64(chunk - first, l->j->span_chunks);
}

/* Token logits by the keys; where heads are averaged, the chunks' logits in place of them. */
static void select_key_logits(const select_lane *l, uint32_t block, uint32_t tiles, float *logit)
{
    const select_job      *j = l->j;
    const cpu_index_shape *s = &j->s;
    float                  e[CPU_INDEX_BLOCK / 4], mean[CPU_INDEX_BLOCK / 4] = { 0 };

    select_dots(l, &s->key, 2, block, tiles, logit);
    if (j->heads == j->group)
        return;
    for (uint32_t h = 0; h < j->group; h++) {
        cpu_index_weigh w = { .n_chunk   = s->n_chunk,
                              .per_chunk = s->chunk_tokens,
                              .hi        = s->n_chunk,
                              .logit     = logit + (uint64_t)h * CPU_INDEX_BLOCK,
                              .e         = e };

        j->k->weigh(&w);
        for (uint32_t c = 0; c < s->n_chunk; c++)
            mean[c] += (w.max + logf(e[c])) / (float)j->group;
    }
    memcpy(logit, mean, s->n_chunk * sizeof(float));
}

static uint32_t select_per_chunk(const select_job *j)
{
    return j->heads == j->group ? j->s.chunk_tokens : 1;
}

/* Weights of the span's chunks from its logits. */
static void select_weigh(const select_lane *l, uint32_t span, float *logit)
{
    const select_job *j    = l->j;
    const bool        keys = j->s.kind == KVD_INDEX_QUANT_K;

    for (uint32_t h = 0; h < j->heads; h++) {
        const uint64_t  at = (uint64_t)span * j->heads_pad + h;
        cpu_index_weigh w  = { .n_chunk   = j->span_chunks,
                               .per_chunk = keys ? select_per_chunk(j) : 1,
                               .lo        = select_in_span(l, span, l->seq->first_chunk),
                               .hi        = select_in_span(l, span, l->seq->n_chunk),
                               .logit     = logit + (uint64_t)h * CPU_INDEX_BLOCK,
                               .e = l->e + ((uint64_t)span * j->heads + h) * j->span_chunks };

        j->k->weigh(&w);
        l->max[at] = w.max + (keys ? 0.0f : j->log_tokens);
        l->sum[at] = w.sum;
    }
}

/* The lanes of a sequence's blocks lie apart, too short for the processor to see them coming: from
 * memory, a scan takes half as long when they are asked for several blocks ahead. */
static void select_prefetch(const select_lane *l, uint32_t block)
{
    const uint8_t *lane;

    if (block >= l->n_block)
        return;
    lane = cpu_index_lane(&l->j->a->index, l->seq->iblock[block], l->kv_head);
    for (uint64_t i = 0; i < l->j->s.bytes && i < SELECT_PREFETCH; i += KVD_CACHE_LINE)
        __builtin_prefetch(lane + i);
}

static void select_mark_logits(const select_lane *l, uint32_t block, float *logit)
{
    const cpu_index_shape *s = &l->j->s;
    const uint8_t *lane      = cpu_index_lane(&l->j->a->index, l->seq->iblock[block], l->kv_head);

    for (uint32_t p = 0; p < s->n_mark; p++)
        select_dots(l, &s->mark[p], p, block, UINT32_MAX, logit);
    for (uint32_t h = 0; h < l->j->heads && s->radius; h++)
        l->j->k->radius(logit + (uint64_t)h * CPU_INDEX_BLOCK,
                        (const uint16_t *)(const void *)(lane + s->radius_off), l->radius_q[h],
                        s->n_chunk);
}

static void select_scan_span(const select_lane *l, uint32_t span, float *logit)
{
    const select_job *j     = l->j;
    const uint32_t    first = span * j->span_blocks;

    for (uint32_t i = 0; i < j->span_blocks && first + i < l->n_block; i++) {
        float *at = logit + (uint64_t)i * j->s.n_chunk;

        if ((uint64_t)(first + i + 1) * j->s.n_chunk <= l->seq->first_chunk)
            continue;
        select_prefetch(l, first + i + j->ahead);
        if (j->s.kind == KVD_INDEX_CLUSTER)
            select_assigned(l, first + i, at);
        else if (j->s.kind == KVD_INDEX_QUANT_K)
            select_key_logits(l, first + i, UINT32_MAX, at);
        else
            select_mark_logits(l, first + i, at);
    }
    select_weigh(l, span, logit);
}

static void select_scan(const select_lane *l, uint32_t first, uint32_t end, float *logit)
{
    if (l->j->s.kind == KVD_INDEX_CLUSTER) { /* chunks may belong to any block of the segment */
        for (uint32_t b = 0; b < l->n_block; b++)
            select_centroids(l, b, logit);
    }
    for (uint32_t b = 0; b < l->j->ahead; b++)
        select_prefetch(l, first * l->j->span_blocks + b);
    for (uint32_t i = first; i < end; i++)
        select_scan_span(l, i, logit);
}

/* ---- scores ---------------------------------------------------------------------- */

/* The factors that make weights p: scale = exp(max - most) / total, for up to 16 heads from h0.
 * Returns the sum of the kept tokens' p. */
static float select_merge_heads(const select_lane *l, uint32_t h0, uint32_t n, bool whole)
{
    const select_job *j = l->j;
    const float      *lse =
        j->a->kept_lse + l->seq->row * j->a->lse_stride + (uint64_t)l->kv_head * j->group + h0;
    float share = 0.0f, most[SELECT_LANE16], total[SELECT_LANE16], kept[SELECT_LANE16];

    for (uint32_t h = 0; h < SELECT_LANE16; h++)
        most[h] = kept[h] = whole && h < n ? lse[h] : -HUGE_VALF;
    for (uint32_t i = l->first_span; i < l->n_span; i++) {
        const float *max = l->max + (uint64_t)i * j->heads_pad + h0;

        for (uint32_t h = 0; h < n; h++)
            most[h] = max[h] > most[h] ? max[h] : most[h];
    }
    j->k->exps(kept, most, SELECT_LANE16);
    for (uint32_t h = 0; h < SELECT_LANE16; h++)
        total[h] = whole ? kept[h] : 0.0f;
    for (uint32_t i = l->first_span; i < l->n_span; i++) {
        const uint64_t at    = (uint64_t)i * j->heads_pad + h0;
        float         *scale = l->scale + at;

        memcpy(scale, l->max + at, SELECT_LANE16 * sizeof(float));
        j->k->exps(scale, most, SELECT_LANE16);
        for (uint32_t h = 0; h < n; h++)
            total[h] += scale[h] * l->sum[at + h];
    }
    for (uint32_t h = 0; h < n; h++) {
        share += whole ? kept[h] / total[h] : 0.0f;
        total[h] = (j->a->rule == KVD_GQA_MAX_KEPT ? 1.0f : 1.0f / (float)j->heads) / total[h];
    }
    for (uint32_t i = l->first_span; i < l->n_span; i++) {
        for (uint32_t h = 0; h < n; h++)
            l->scale[(uint64_t)i * j->heads_pad + h0 + h] *= total[h];
    }
    return share;
}

/* Scores from the weights; returns the kept tokens' share. */
static float select_scores(const select_lane *l, float *score)
{
    const select_job *j     = l->j;
    const bool        whole = j->a->rule == KVD_GQA_MEAN_KEPT || j->a->rule == KVD_GQA_MAX_KEPT;
    float             share = 0.0f;

    for (uint32_t h0 = 0; h0 < j->heads; h0 += SELECT_LANE16)
        share +=
            select_merge_heads(l, h0, j->heads - h0 < SELECT_LANE16 ? j->heads - h0 : SELECT_LANE16,
                               whole);
    memset(score, 0, (uint64_t)l->first_span * j->span_chunks * sizeof(float));
    for (uint32_t i = l->first_span; i < l->n_span; i++) {
        const uint64_t      first = (uint64_t)i * j->span_chunks;
        const cpu_index_mix m     = { .n_chunk = j->span_chunks,
                                      .n_head  = j->heads,
                                      .e       = l->e + first * j->heads,
                                      .scale   = l->scale + (uint64_t)i * j->heads_pad,
                                      .score   = score + first,
                                      .n_out   = (uint32_t)kvd_min_u64(l->seq->n_chunk - first,
                                                                       j->span_chunks),
                                      .largest = j->a->rule == KVD_GQA_MAX_KEPT };

        j->k->mix(&m);
    }
    return share / (float)j->heads;
}

/* ---- cascade --------------------------------------------------------------------- */

/* Gives n chunks of one block (ascending) weights by their keys, among the span's others. */
static void select_rerank_block(const select_lane *l, uint32_t block, const uint32_t *chunk,
                                uint32_t n, float *logit)
{
    const select_job      *j     = l->j;
    const cpu_index_shape *s     = &j->s;
    const uint32_t         first = block * s->n_chunk, span = block / j->span_blocks;
    uint32_t               tiles = 0;
    float                  key[CPU_INDEX_BLOCK / 4];

    for (uint32_t i = 0; i < n; i++)
        tiles |= 1u << (chunk[i] - first) * s->chunk_tokens / CPU_INDEX_TILE;
    for (uint64_t i = 0; i < (uint64_t)j->group * CPU_INDEX_BLOCK; i++)
        logit[i] = -HUGE_VALF;
    select_key_logits(l, block, tiles, logit);
    for (uint32_t h = 0; h < j->heads; h++) {
        float          *e   = l->e + ((uint64_t)span * j->heads + h) * j->span_chunks;
        float          *max = l->max + (uint64_t)span * j->heads_pad + h;
        cpu_index_weigh w   = { .n_chunk   = s->n_chunk,
                                .per_chunk = select_per_chunk(j),
                                .hi        = s->n_chunk,
                                .logit     = logit + (uint64_t)h * CPU_INDEX_BLOCK,
                                .e         = key };
        float           most, x[SELECT_LANE16] = { 0 };

        j->k->weigh(&w);
        most = w.max > *max ? w.max : *max;
        x[0] = *max - most; /* what the span's weights so far shrink by */
        x[1] = w.max - most;
        j->k->exps(x, (const float[SELECT_LANE16]){ 0 }, SELECT_LANE16);
        *max = most;
        j->k->scale_sum(e, x[0], j->span_chunks);
        for (uint32_t i = 0; i < n; i++)
            e[chunk[i] % j->span_chunks] = key[chunk[i] - first] * x[1];
    }
}

/* Picks the best 4 k by the scores so far and reranks them. */
static void select_rerank(select_lane *l, const float *score, float *logit)
{
    const select_job *j     = l->j;
    const uint32_t    first = l->seq->first_chunk, n = l->seq->n_chunk - first;
    const uint64_t    most = (uint64_t)KVD_CASCADE_FACTOR * l->seq->k[l->kv_head];

    l->n_rerank = j->k->best(score + first, n, (uint32_t)kvd_min_u64(n, most), l->bits, l->pos);
    for (uint32_t i = 0; i < l->n_rerank; i++)
        l->rerank[i] = first + l->pos[i];
    for (uint32_t i = 0, end; i < l->n_rerank; i = end) {
        const uint32_t block = l->rerank[i] / j->s.n_chunk;

        for (end = i + 1; end < l->n_rerank && l->rerank[end] / j->s.n_chunk == block;)
            end++;
        select_rerank_block(l, block, l->rerank + i, end - i, logit);
    }
    for (uint32_t i = l->first_span; i < l->n_span; i++) {
        for (uint32_t h = 0; h < j->heads; h++)
            l->sum[(uint64_t)i * j->heads_pad + h] =
                j->k->scale_sum(l->e + ((uint64_t)i * j->heads + h) * j->span_chunks, 1.0f,
                                j->span_chunks);
    }
}

/* ---- the selection --------------------------------------------------------------- */

/* The fewest of the n selected whose scores reach top_p, moved to the front.  Bisection by the
 * score, then ties by position. */
static uint32_t select_top_p(const select_lane *l, const float *score, uint32_t n)
{
    uint64_t all = 0, sum = 0, target;
    uint32_t lo = 0, hi = UINT32_MAX, out = 0;

    for (uint32_t c = 0; c < l->seq->n_chunk; c++)
        all += cpu_select_mass(score[c]);
    target = cpu_select_target(all, l->j->a->top_p);
    for (uint32_t i = 0; i < n; i++)
        sum += cpu_select_mass(score[l->pos[i]]);
    if (sum < target)
        return n;
    while (hi - lo > 1) { /* those that reach lo add up to target, those that reach hi do not */
        const uint32_t mid = lo + (hi - lo) / 2;

        sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += l->bits[i] >= mid ? cpu_select_mass(score[l->pos[i]]) : 0;
        if (sum >= target)
            lo = mid;
        else
            hi = mid;
    }
    sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += l->bits[i] > lo ? cpu_select_mass(score[l->pos[i]]) : 0;
    for (uint32_t i = 0; i < n; i++) {
        if (l->bits[i] < lo || (l->bits[i] == lo && sum >= target))
            continue;
        sum += l->bits[i] == lo ? cpu_select_mass(score[l->pos[i]]) : 0;
        l->bits[out] = l->bits[i];
        l->pos[out]  = l->pos[i];
        out++;
    }
    return out;
}

/* The best k as bits and chunks. */
static uint32_t select_best(const select_lane *l, const float *score)
{
    const select_job *j     = l->j;
    const uint32_t    first = l->seq->first_chunk;
    uint32_t          n;

    if (j->s.kind == KVD_INDEX_CASCADE) {
        for (uint32_t i = 0; i < l->n_rerank; i++)
            l->e[i] = score[l->rerank[i]];
        n = j->k->best(l->e, l->n_rerank, l->seq->k[l->kv_head], l->bits, l->pos);
        for (uint32_t i = 0; i < n; i++)
            l->pos[i] = l->rerank[l->pos[i]];
    } else {
        n = j->k->best(score + first, l->seq->n_chunk - first, l->seq->k[l->kv_head], l->bits,
                       l->pos);
        for (uint32_t i = 0; i < n; i++)
            l->pos[i] += first;
    }
    return j->a->top_p > 0.0f && n > 0 ? select_top_p(l, score, n) : n;
}

static void select_emit(const select_lane *l, const float *score, uint32_t n, kvd_select_result *r)
{
    uint32_t *sel   = l->seq->sel + l->kv_head * l->j->a->sel_stride;
    uint64_t  mass  = 0;
    uint32_t  least = 0, above = 0, ties;

    r->n_sel    = n;
    r->n_urgent = cpu_select_n_urgent(n);
    if (n > 0)
        least = l->j->k->threshold(l->bits, n, r->n_urgent, &above);
    ties = above == r->n_urgent ? n : r->n_urgent - above;
    for (uint32_t i = 0; i < n; i++) {
        const bool tie    = l->bits[i] == least;
        const bool urgent = l->bits[i] > least || (tie && ties > 0);

        ties -= tie && ties > 0;
        sel[i] = l->pos[i] | (urgent ? KVD_SELECT_URGENT : 0);
        mass += cpu_select_mass(score[l->pos[i]]);
    }
    r->mass = r->kept + cpu_select_share(mass);
}

static void select_finish(select_lane *l, float *logit)
{
    const select_job  *j     = l->j;
    const uint32_t     first = l->seq->first_chunk;
    float             *score = l->seq->score + l->kv_head * j->a->lane_stride;
    kvd_select_result *r     = &j->a->result[l->index];

    r->kept = select_scores(l, score);
    if (j->s.kind == KVD_INDEX_CASCADE) {
        select_rerank(l, score, logit);
        r->kept = select_scores(l, score);
    }
    if (l->seq->ema)
        j->k->ema(l->seq->ema + l->kv_head * j->a->lane_stride + first, score + first,
                  l->seq->n_chunk - first, j->a->alpha);
    select_emit(l, score, select_best(l, score), r);
}

/* ---- items ----------------------------------------------------------------------- */

static void select_lane_item(void *ctx, uint32_t item, uint32_t thread)
{
    const select_job *j     = ctx;
    float            *logit = j->work + thread * j->work_floats;
    select_lane       l;

    select_lane_open(&l, j, item, j->area + (j->apart ? item : thread) * j->area_bytes);
    if (!j->apart) {
        select_queries(&l);
        select_scan(&l, l.first_span, l.n_span, logit);
    }
    select_finish(&l, logit);
}

static void select_piece_item(void *ctx, uint32_t item, uint32_t thread)
{
    const select_job *j    = ctx;
    const uint32_t    lane = item / j->n_piece;
    uint64_t          n, at = item % j->n_piece;
    select_lane       l;

    select_lane_open(&l, j, lane, j->area + lane * j->area_bytes);
    n = l.n_span - l.first_span;
    select_scan(&l, l.first_span + (uint32_t)(at * n / j->n_piece),
                l.first_span + (uint32_t)((at + 1) * n / j->n_piece),
                j->work + thread * j->work_floats);
}

static void select_items(cpu_backend *be, select_job *j, uint32_t n, os_pool_fn fn, bool alone)
{
    if (!alone && n > 1) {
        os_pool_run(be->pool, n, fn, j);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        fn(j, i, 0);
}

static void select_run(cpu_backend *be, select_job *j, uint64_t most_spans)
{
    const uint32_t n_thread = be->base.n_thread;
    const bool     alone =
        n_thread < 2 || j->n_lane * most_spans * j->span_chunks * j->group <= SELECT_ALONE;

    j->apart = !alone && j->n_lane < SELECT_APART * n_thread && j->s.kind != KVD_INDEX_CLUSTER;
    kvd_assert((j->apart && j->n_lane > n_thread ? j->n_lane : n_thread) * j->area_bytes +
                   n_thread * j->work_floats * sizeof(float) <=
               be->ix_scratch_bytes);
    if (j->apart) {
        j->n_piece = (uint32_t)kvd_max_u64(
            1, kvd_min_u64(most_spans / SELECT_PIECE,
                           kvd_div_up((uint64_t)SELECT_APART * n_thread, j->n_lane)));
        for (uint32_t i = 0; i < j->n_lane; i++) {
            select_lane l;

            select_lane_open(&l, j, i, j->area + i * j->area_bytes);
            select_queries(&l);
        }
        select_items(be, j, j->n_lane * j->n_piece, select_piece_item, alone);
    }
    select_items(be, j, j->n_lane, select_lane_item, alone);
}

static const cpu_index_kernels *select_kernels(const cpu_backend *be)
{
    if (be->isa >= OS_ISA_AVX512)
        return &cpu_index_avx512;
    return be->isa == OS_ISA_AVX2 ? &cpu_index_avx2 : &cpu_index_portable;
}

kvd_status cpu_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err)
{
    cpu_backend *be   = st->be;
    uint32_t     most = 0;
    select_dims  d;
    select_job   j = { .a      = a,
                       .k      = select_kernels(be),
                       .vnni   = be->vnni && !be->precise,
                       .group  = a->n_head / a->index.n_kv_head,
                       .n_lane = a->n_seq * a->index.n_kv_head };

    (void)err;
    kvd_assert(a->n_head % a->index.n_kv_head == 0);
    cpu_index_shape_of(&j.s, &a->index.desc);
    for (uint32_t i = 0; i < a->n_seq; i++) {
        kvd_assert(a->seq[i].first_chunk <= a->seq[i].n_chunk);
        most = a->seq[i].n_chunk > most ? a->seq[i].n_chunk : most;
    }
    d             = select_dims_most(j.group, j.s.dim, most);
    j.span_blocks = j.s.kind == KVD_INDEX_QUANT_K ? 1 : CPU_INDEX_BLOCK / j.s.n_chunk;
    j.span_chunks = j.span_blocks * j.s.n_chunk;
    j.ahead       = (uint32_t)kvd_min_u64(8, kvd_max_u64(1, SELECT_AHEAD / j.s.bytes));
    j.heads       = a->rule == KVD_GQA_MEAN_LOGITS ? 1 : j.group;
    j.heads_pad   = (uint32_t)d.heads_pad;
    j.dim_pad     = (uint32_t)d.dim_pad;
    j.log_tokens  = logf((float)j.s.chunk_tokens);
    j.area_bytes  = select_place(NULL, NULL, &d);
    j.work_floats = select_work_floats(j.group);
    j.work        = be->ix_scratch;
    j.area        = (uint8_t *)(j.work + be->base.n_thread * j.work_floats);
    select_run(be, &j, kvd_div_up(most, j.span_chunks));
    return KVD_OK;
}
