/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_span.c - attention over spans and over cells of the estimation zone, and the copying of
 * records.  A lane's cells are a span of blocks whose keys count several times.
 *
 * A span is cut into pieces whose length depends on the span alone: first its records, then its
 * keys of blocks.  Each piece gives a partial softmax; they are folded in ascending order behind
 * what the lane has already.  Whether the pieces of a lane run as items of their own or one after
 * another changes nothing in the result.
 *
 * Scratch: one lane_work per lane, then partials.
 * Owns: nothing.  Thread: the backend's caller. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_attn.h"
#include "backend/cpu/cpu_kv.h"

#define SPAN_PIECE     512u         /* keys */
#define SPAN_PIECE_MAX 64u          /* pieces of either kind; longer spans have longer ones */
#define SPAN_APART     8u           /* lanes per thread up to which pieces run apart */
#define SPAN_ALONE     256u         /* keys that the caller takes alone */
#define COPY_ITEM      (128u << 10) /* bytes of an item of record_copy */

typedef struct lane_work {
    uint32_t n_record_key, record_piece, n_record_piece;
    uint32_t n_block_key, block_piece, n_block_piece;
    uint32_t first_item;
} lane_work;

typedef struct span_job {
    const cpu_attn_kernels   *k;
    const kvd_attn_span_args *a;
    const kvd_attn_zone_args *zone; /* where these are cells; a has no spans then */
    lane_work                *lane; /* [n_lane] */
    uint32_t                  n_lane, group;
    bool                      apart;
    float                    *piece; /* [item or 2 x thread][piece_floats] */
    uint64_t                  piece_floats, part_floats;
} span_job;

static uint64_t piece_floats(uint32_t group, uint32_t head_dim)
{
    return kvd_align_up(kvd_attn_part_floats(group, head_dim), KVD_CACHE_LINE / sizeof(float));
}

static uint64_t lanes_bytes(uint64_t n_lane)
{
    return kvd_align_up(n_lane * sizeof(lane_work), KVD_CACHE_LINE);
}

uint64_t cpu_span_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint32_t group  = (uint32_t)kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));
    const uint64_t lanes  = (uint64_t)lim->n_seq * lim->n_kv_head;
    const uint64_t most   = kvd_min_u64(lanes, (uint64_t)SPAN_APART * be->base.n_thread);
    const uint64_t pieces = 2 * kvd_min_u64(SPAN_PIECE_MAX, kvd_div_up(lim->n_ctx, SPAN_PIECE));
    const uint64_t slots  = kvd_max_u64(most * pieces, 2 * (uint64_t)be->base.n_thread);

    return lanes_bytes(lanes) + slots * piece_floats(group, lim->head_dim) * sizeof(float);
}

/* ---- pieces ---------------------------------------------------------------------- */

static uint32_t piece_keys(uint32_t n_key)
{
    return SPAN_PIECE *
           (uint32_t)kvd_max_u64(1, kvd_div_up(n_key, (uint64_t)SPAN_PIECE * SPAN_PIECE_MAX));
}

static kvd_attn_span span_of(const span_job *j, uint32_t lane)
{
    const kvd_zone_seq *s;

    if (!j->zone)
        return j->a->span[lane];
    s = &j->zone->seq[lane / j->a->kv.n_kv_head];
    return (kvd_attn_span){ .block = s->zblock, .end_key = s->n_cell };
}

static const uint16_t *times_of(const span_job *j, uint32_t lane)
{
    const uint32_t n = j->a->kv.n_kv_head;

    return j->zone ? j->zone->seq[lane / n].left + lane % n * j->zone->left_stride : NULL;
}

/* Numbers the pieces of all lanes; returns how many keys there are. */
static uint64_t list_lanes(span_job *j)
{
    const kvd_attn_span_args *a    = j->a;
    uint32_t                  item = 0;
    uint64_t                  keys = 0;

    for (uint32_t i = 0; i < j->n_lane; i++) {
        const kvd_attn_span s = span_of(j, i);
        lane_work          *w = &j->lane[i];

        kvd_assert_dbg(s.first_key <= s.end_key);
        w->n_record_key   = s.n_record * a->kv.chunk_tokens;
        w->n_block_key    = s.end_key - s.first_key;
        w->record_piece   = piece_keys(w->n_record_key);
        w->block_piece    = piece_keys(w->n_block_key);
        w->n_record_piece = (uint32_t)kvd_div_up(w->n_record_key, w->record_piece);
        w->n_block_piece  = (uint32_t)kvd_div_up(w->n_block_key, w->block_piece);
        w->first_item     = item;
        item += w->n_record_piece + w->n_block_piece;
        keys += w->n_record_key + w->n_block_key;
    }
    return keys;
}

static void run_piece(const span_job *j, uint32_t lane, uint32_t number, float *part)
{
    const kvd_attn_span_args *a       = j->a;
    const lane_work          *w       = &j->lane[lane];
    const kvd_attn_span       s       = span_of(j, lane);
    const uint32_t            kv_head = lane % a->kv.n_kv_head;
    const uint64_t            row     = a->row[lane / a->kv.n_kv_head];
    cpu_attn_rows             r       = { .kv      = &a->kv,
                                          .kv_head = kv_head,
                                          .n_q     = j->group,
                                          .q       = a->q + row * a->q_stride +
                                               (uint64_t)kv_head * j->group * a->kv.head_dim,
                                          .scale = a->scale,
                                          .part  = part };

    if (number < w->n_record_piece) {
        r.record    = s.record;
        r.first_key = number * w->record_piece;
        r.end_key   = (uint32_t)kvd_min_u64(w->n_record_key, r.first_key + w->record_piece);
    } else {
        r.block     = s.block;
        r.times     = times_of(j, lane);
        r.first_key = s.first_key + (number - w->n_record_piece) * w->block_piece;
        r.end_key   = (uint32_t)kvd_min_u64(s.end_key, r.first_key + w->block_piece);
    }
    j->k->rows(&r);
}

static void clear_part(const span_job *j, float *part)
{
    const uint32_t n = j->group * j->a->kv.head_dim;

    memset(part, 0, n * sizeof(float));
    for (uint32_t i = 0; i < j->group; i++) {
        part[n + i]            = -1e30f; /* what the kernels start from */
        part[n + j->group + i] = 0.0f;
    }
}

/* What a lane's partial gives beside itself. */
static void finish_lane(const span_job *j, uint32_t lane)
{
    const kvd_attn_span_args *a    = j->a;
    const uint32_t            dim  = a->kv.head_dim;
    const uint64_t            head = (uint64_t)(lane % a->kv.n_kv_head) * j->group;
    const uint64_t            row  = a->row[lane / a->kv.n_kv_head];
    const float              *part = a->part + lane * j->part_floats;
    const float              *max = part + j->group * dim, *sum = max + j->group;

    for (uint32_t i = 0; a->lse && i < j->group; i++)
        a->lse[row * a->lse_stride + head + i] = sum[i] > 0.0f ? max[i] + logf(sum[i]) : -INFINITY;
    if (a->out)
        j->k->finish(part, a->out + row * a->out_stride + head * dim, j->group, dim);
}

static void fold_pieces(const span_job *j, uint32_t lane)
{
    const lane_work *w    = &j->lane[lane];
    float           *part = j->a->part + lane * j->part_floats;

    for (uint32_t i = 0; i < w->n_record_piece + w->n_block_piece; i++)
        j->k->fold(part, j->piece + (w->first_item + i) * j->piece_floats, j->group,
                   j->a->kv.head_dim);
    finish_lane(j, lane);
}

static void lane_item(void *ctx, uint32_t lane, uint32_t thread)
{
    const span_job  *j     = ctx;
    const lane_work *w     = &j->lane[lane];
    float           *part  = j->a->part + lane * j->part_floats;
    float           *piece = j->piece + thread * j->piece_floats;

    for (uint32_t i = 0; i < w->n_record_piece + w->n_block_piece; i++) {
        run_piece(j, lane, i, piece);
        j->k->fold(part, piece, j->group, j->a->kv.head_dim);
    }
    finish_lane(j, lane);
}

static void piece_item(void *ctx, uint32_t item, uint32_t thread)
{
    const span_job *j  = ctx;
    uint32_t        lo = 0, hi = j->n_lane;

    (void)thread;
    while (hi - lo > 1) { /* the last lane whose first item is not past this one */
        const uint32_t mid = lo + (hi - lo) / 2;

        if (j->lane[mid].first_item <= item)
            lo = mid;
        else
            hi = mid;
    }
    run_piece(j, lo, item - j->lane[lo].first_item, j->piece + item * j->piece_floats);
}

/* ---- the ops --------------------------------------------------------------------- */

static void run_lanes(cpu_backend *be, const kvd_attn_span_args *a, const kvd_attn_zone_args *zone)
{
    span_job j = { .k      = cpu_attn_kernels_for(be, a->kv.head_dim),
                   .a      = a,
                   .zone   = zone,
                   .lane   = be->at_scratch,
                   .n_lane = a->n_row * a->kv.n_kv_head,
                   .group  = a->n_head / a->kv.n_kv_head };
    uint64_t keys, slots;
    uint32_t n_piece;

    cpu_kv_check(&a->kv);
    if (j.n_lane == 0)
        return;
    j.part_floats  = kvd_attn_part_floats(j.group, a->kv.head_dim);
    j.piece_floats = piece_floats(j.group, a->kv.head_dim);
    j.piece        = (float *)(void *)((uint8_t *)be->at_scratch + lanes_bytes(j.n_lane));
    keys           = list_lanes(&j);
    n_piece        = j.lane[j.n_lane - 1].first_item + j.lane[j.n_lane - 1].n_record_piece +
              j.lane[j.n_lane - 1].n_block_piece;
    j.apart = j.n_lane <= SPAN_APART * be->base.n_thread && be->base.n_thread > 1 &&
              keys > SPAN_ALONE && n_piece > j.n_lane;
    slots = j.apart ? n_piece : be->base.n_thread;
    kvd_assert(lanes_bytes(j.n_lane) + slots * j.piece_floats * sizeof(float) <=
               be->at_scratch_bytes);
    for (uint32_t i = 0; a->first && i < j.n_lane; i++)
        clear_part(&j, a->part + i * j.part_floats);
    if (j.apart) {
        os_pool_run(be->pool, n_piece, piece_item, &j);
        for (uint32_t i = 0; i < j.n_lane; i++)
            fold_pieces(&j, i);
    } else if (be->base.n_thread > 1 && keys > SPAN_ALONE) {
        os_pool_run(be->pool, j.n_lane, lane_item, &j);
    } else {
        for (uint32_t i = 0; i < j.n_lane; i++)
            lane_item(&j, i, 0);
    }
}

kvd_status cpu_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err)
{
    (void)err;
    for (uint32_t i = 0; i < (a->then ? 2u : 1u); i++) {
        const kvd_attn_span_args s = cpu_span_alone(a, i > 0);

        run_lanes(st->be, &s, NULL);
    }
    return KVD_OK;
}

kvd_status cpu_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err)
{
    const kvd_attn_span_args s = cpu_zone_as_span(a);

    (void)err;
    for (uint32_t i = 0; i < a->n_row; i++)
        kvd_assert_dbg(a->seq[i].n_cell <= a->n_cell_max);
    run_lanes(st->be, &s, a);
    return KVD_OK;
}

/* ---- record_copy ------------------------------------------------------------------ */

typedef struct copy_job {
    const kvd_record_copy_args *a;
    uint64_t                    per_item;
} copy_job;

static void copy_item(void *ctx, uint32_t item, uint32_t thread)
{
    const copy_job             *j     = ctx;
    const kvd_record_copy_args *a     = j->a;
    const uint64_t              first = item * j->per_item;
    const uint64_t              end   = kvd_min_u64(a->n, first + j->per_item);

    (void)thread;
    for (uint64_t i = first; i < end; i++)
        memcpy((uint8_t *)a->dst + a->dst_off[i], (const uint8_t *)a->src + a->src_off[i],
               (size_t)a->bytes);
}

kvd_status cpu_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err)
{
    cpu_backend   *be = st->be;
    copy_job       j = { .a = a, .per_item = kvd_max_u64(1, COPY_ITEM / kvd_max_u64(1, a->bytes)) };
    const uint32_t n_item = (uint32_t)kvd_div_up(a->n, j.per_item);

    (void)err;
    if (n_item == 0)
        return KVD_OK;
    if (n_item == 1 || be->base.n_thread < 2) {
        for (uint32_t i = 0; i < n_item; i++)
            copy_item(&j, i, 0);
    } else {
        os_pool_run(be->pool, n_item, copy_item, &j);
    }
    return KVD_OK;
}
