/* SPDX-License-Identifier: Apache-2.0 */
/* split_reach.c - what an op is given leads to memory that its device reaches: every pointer of its
 * arguments, those in the arrays that they lead to, and the ends of what they stand for, as far as
 * arguments say.  But for weights: models are opened before split_begin(), in the host's memory. */
#include <stdio.h>
#include <stdlib.h>

#include "support/split.h"
#include "support/split_reach.h"

static void reach(const void *p, uint64_t bytes, const char *what)
{
    if (!p || bytes == 0 || split_reaches(p, bytes))
        return;
    fprintf(stderr, "split: the device cannot reach %s: %llu bytes at %p\n", what,
            (unsigned long long)bytes, p);
    abort();
}

#define ONE(p)     reach(p, sizeof(*(p)), #p)
#define MANY(p, n) reach(p, (uint64_t)(n) * sizeof(*(p)), #p)
/* n rows of `row` elements, `stride` apart */
#define ROWS(p, n, stride, row) \
    reach(p, (n) ? (((uint64_t)(n)-1) * (stride) + (row)) * sizeof(*(p)) : 0, #p)
#define RAW(p) reach(p, 1, #p)

static void reach_parts(const kvd_kv_seq *seq, uint32_t n, const kvd_kv_layout *kv)
{
    MANY(seq, n);
    RAW(kv->pool);
    for (uint32_t i = 0; i < n; i++)
        MANY(seq[i].block, kvd_div_up((uint64_t)seq[i].n_past + seq[i].n_row, kv->block_tokens));
}

void split_reach_embed(const kvd_embed_args *a)
{
    MANY(a->token, a->n_token);
    MANY(a->out, (uint64_t)a->n_token * a->table.n_col);
}

void split_reach_rms_norm(const kvd_rms_norm_args *a)
{
    ROWS(a->x, a->n_row, a->x_stride, a->n_col);
    ROWS(a->out, a->n_row, a->out_stride, a->n_col);
}

void split_reach_head_norm(const kvd_head_norm_args *a)
{
    ROWS(a->x, a->n_token, a->x_stride, (uint64_t)a->n_head * a->head_dim);
}

void split_reach_matmul(const kvd_matmul_args *a)
{
    ROWS(a->x, a->n_token, a->x_stride, a->n_col);
    for (uint32_t i = 0; i < a->n_out; i++) {
        const kvd_matmul_out *o = &a->out[i];

        ROWS(o->y, a->n_token, o->y_stride, o->w.n_row);
    }
    if (a->norm)
        MANY(a->xn, (uint64_t)a->n_token * a->n_col);
}

void split_reach_rope(const kvd_rope_args *a)
{
    ROWS(a->x, a->n_token, a->x_stride, (uint64_t)a->n_head * a->head_dim);
    MANY(a->cos_sin, (uint64_t)a->n_token * a->n_rot);
}

void split_reach_swiglu(const kvd_swiglu_args *a)
{
    ROWS(a->gate, a->n_token, a->gate_stride, a->n_col);
    ROWS(a->up, a->n_token, a->up_stride, a->n_col);
    ROWS(a->out, a->n_token, a->out_stride, a->n_col);
}

void split_reach_kv_append(const kvd_kv_append_args *a)
{
    const uint64_t row = (uint64_t)a->kv.n_kv_head * a->kv.head_dim;

    reach_parts(a->seq, a->n_seq, &a->kv);
    for (uint32_t i = 0; i < a->n_seq; i++) {
        ROWS(a->k, a->seq[i].first_row + a->seq[i].n_row, a->k_stride, row);
        ROWS(a->v, a->seq[i].first_row + a->seq[i].n_row, a->v_stride, row);
    }
}

void split_reach_qkv_finish(const kvd_qkv_finish_args *a)
{
    ROWS(a->q, a->n_token, a->q_stride, (uint64_t)a->n_head * a->head_dim);
    MANY(a->cos_sin, (uint64_t)a->n_token * a->n_rot);
    split_reach_kv_append(&a->store);
}

void split_reach_attn(const kvd_attn_args *a)
{
    const uint64_t row = (uint64_t)a->n_head * a->kv.head_dim;

    reach_parts(a->seq, a->n_seq, &a->kv);
    for (uint32_t i = 0; i < a->n_seq; i++) {
        ROWS(a->q, a->seq[i].first_row + a->seq[i].n_row, a->q_stride, row);
        ROWS(a->out, a->seq[i].first_row + a->seq[i].n_row, a->out_stride, row);
    }
}

void split_reach_index_build(const kvd_index_build_args *a)
{
    RAW(a->kv.pool);
    RAW(a->index.pool);
    MANY(a->block, a->n_block);
    MANY(a->iblock, a->n_block);
}

void split_reach_zone_build(const kvd_zone_build_args *a)
{
    RAW(a->kv.pool);
    RAW(a->zone.pool);
    MANY(a->block, a->n_block);
    MANY(a->zblock, a->n_block);
}

void split_reach_select(const kvd_select_args *a)
{
    const uint32_t n_kv = a->index.n_kv_head, dim = a->index.desc.head_dim;

    MANY(a->seq, a->n_seq);
    RAW(a->index.pool);
    MANY(a->result, (uint64_t)a->n_seq * n_kv);
    for (uint32_t i = 0; i < a->n_seq; i++) {
        const kvd_select_seq *s = &a->seq[i];

        ROWS(a->q, s->row + 1, a->q_stride, (uint64_t)a->n_head * dim);
        ROWS(a->kept_lse, s->row + 1, a->lse_stride, a->n_head);
        MANY(s->k, n_kv);
        MANY(s->iblock, kvd_div_up((uint64_t)s->n_chunk * a->index.desc.chunk_tokens,
                                   a->index.desc.block_tokens));
        ROWS(s->score, n_kv, a->lane_stride, s->n_chunk);
        ROWS(s->ema, n_kv, a->lane_stride, s->n_chunk);
        for (uint32_t h = 0; h < n_kv; h++)
            MANY(s->sel + h * a->sel_stride, s->k[h]);
    }
}

static void reach_spans(const kvd_attn_span *span, uint64_t n, const kvd_kv_layout *kv)
{
    MANY(span, n);
    for (uint64_t i = 0; i < n && span; i++) {
        MANY(span[i].record, span[i].n_record);
        if (span[i].end_key > span[i].first_key)
            MANY(span[i].block, kvd_div_up(span[i].end_key, kv->block_tokens));
    }
}

void split_reach_attn_zone(const kvd_attn_zone_args *a)
{
    const uint32_t n_kv = a->zone.n_kv_head;

    RAW(a->zone.pool);
    MANY(a->row, a->n_row);
    MANY(a->seq, a->n_row);
    MANY(a->part, a->n_row * n_kv * kvd_attn_part_floats(a->n_head / n_kv, a->zone.head_dim));
    for (uint32_t i = 0; i < a->n_row; i++) {
        const uint64_t rows = (uint64_t)a->row[i] + 1, row = (uint64_t)a->n_head * a->zone.head_dim;

        ROWS(a->q, rows, a->q_stride, row);
        ROWS(a->lse, rows, a->lse_stride, a->n_head);
        ROWS(a->out, rows, a->out_stride, row);
        RAW(a->seq[i].zblock);
        ROWS(a->seq[i].left, n_kv, a->left_stride, a->seq[i].n_cell);
    }
}

static void reach_windows(const kvd_window_seq *seq, uint32_t n)
{
    MANY(seq, n);
    for (uint32_t i = 0; i < n; i++) {
        ONE(seq[i].cap);
        ONE(seq[i].sel);
        ONE(seq[i].ema);
        ONE(seq[i].slot_of);
        ONE(seq[i].chunk_of);
        ONE(seq[i].stamp);
        ONE(seq[i].stay);
        ONE(seq[i].fetch);
        ONE(seq[i].into);
    }
}

static void reach_places(const kvd_window_place *place, uint32_t n)
{
    MANY(place, n);
    for (uint32_t i = 0; i < n; i++) {
        ONE(place[i].block);
        ONE(place[i].at);
        ONE(place[i].host_of);
        ONE(place[i].iblock);
    }
}

static void reach_link(const kvd_miss_link *l)
{
    ONE(l->queue);
    ONE(l->request);
    ONE(l->state);
    ONE(l->batch);
    MANY(l->place, l->n_place);
}

void split_reach_window(const kvd_window_args *a)
{
    reach_windows(a->seq, a->n_seq);
    MANY(a->select, (uint64_t)a->n_seq * a->n_kv_head);
    MANY(a->result, (uint64_t)a->n_seq * a->n_kv_head);
}

void split_reach_window_spans(const kvd_window_spans_args *a)
{
    const uint64_t lanes = (uint64_t)a->n_seq * a->n_kv_head;

    reach_windows(a->seq, a->n_seq);
    reach_places(a->place, a->n_seq);
    MANY(a->select, lanes);
    MANY(a->change, lanes);
    RAW(a->kv.pool);
    MANY(a->near, lanes * a->list_stride);
    MANY(a->urgent, lanes * a->list_stride);
    MANY(a->near_span, lanes);
    MANY(a->urgent_span, lanes);
}

void split_reach_choose(const kvd_choose_args *a)
{
    split_reach_attn_span(&a->kept);
    split_reach_select(&a->select);
    split_reach_window(&a->window);
    split_reach_window_spans(&a->spans);
}

void split_reach_window_post(const kvd_window_post_args *a)
{
    reach_windows(a->seq, a->n_seq);
    reach_places(a->place, a->n_seq);
    MANY(a->change, (uint64_t)a->n_seq * a->n_kv_head);
    reach_link(&a->link[0]);
    reach_link(&a->link[1]);
}

void split_reach_window_fetch(const kvd_window_fetch_args *a)
{
    reach_windows(a->seq, a->n_seq);
    reach_places(a->place, a->n_seq);
    MANY(a->change, (uint64_t)a->n_seq * a->n_kv_head);
    RAW(a->kv.pool);
    RAW(a->host);
    RAW(a->param);
    reach_link(&a->link);
}

static void reach_offsets(const void *base, const uint64_t *off, uint64_t n, uint64_t bytes,
                          const char *what)
{
    MANY(off, n);
    for (uint64_t i = 0; i < n; i++)
        reach((const uint8_t *)base + off[i], bytes, what);
}

void split_reach_record_copy(const kvd_record_copy_args *a)
{
    reach_offsets(a->src, a->src_off, a->n, a->bytes, "a record to copy");
    reach_offsets(a->dst, a->dst_off, a->n, a->bytes, "where a record is copied to");
}

void split_reach_record_pack(const kvd_record_pack_args *a)
{
    const uint64_t chunks = a->format.block_tokens / a->format.chunk_tokens;

    reach_offsets(a->src, a->src_off, a->n, chunks * kvd_record_raw_bytes(&a->format),
                  "a lane to pack");
    reach_offsets(a->dst, a->dst_off, a->n, chunks * kvd_record_bytes(&a->format),
                  "where a lane is packed to");
    if (kvd_record_param_bytes(&a->format) > 0)
        reach_offsets(a->param, a->param_off, a->n, kvd_record_param_bytes(&a->format),
                      "parameters of a packed lane");
}

void split_reach_record_unpack(const kvd_record_unpack_args *a)
{
    MANY(a->chunk, a->n);
    reach_offsets(a->src, a->src_off, a->n, kvd_record_bytes(&a->format), "a record to unpack");
    reach_offsets(a->dst, a->dst_off, a->n, kvd_record_raw_bytes(&a->format),
                  "where a record is unpacked to");
    reach_offsets(a->param, a->param_off, a->n,
                  a->format.type == KVD_RECORD_VALUES ? kvd_index_lane_bytes(&a->format.keys)
                                                      : kvd_record_param_bytes(&a->format),
                  "parameters of a record");
}

void split_reach_best(const kvd_best_args *a)
{
    ROWS(a->x, a->n_row, a->x_stride, a->n_col);
    ROWS(a->out, a->n_row, a->out_stride, a->k);
}

void split_reach_synth(const kvd_synth_args *a)
{
    reach_parts(a->seq, a->n_seq, &a->kv);
    for (uint32_t i = 0; i < a->n_seq; i++)
        ROWS(a->q, a->seq[i].first_row + a->seq[i].n_row, a->q_stride,
             (uint64_t)a->n_head * a->kv.head_dim);
}

void split_reach_attn_span(const kvd_attn_span_args *a)
{
    const uint32_t n_kv  = a->kv.n_kv_head;
    const uint64_t lanes = (uint64_t)a->n_row * n_kv, row = (uint64_t)a->n_head * a->kv.head_dim;

    RAW(a->kv.pool);
    MANY(a->row, a->n_row);
    reach_spans(a->span, lanes, &a->kv);
    reach_spans(a->then, lanes, &a->kv);
    MANY(a->part, lanes * kvd_attn_part_floats(a->n_head / n_kv, a->kv.head_dim));
    for (uint32_t i = 0; i < a->n_row; i++) {
        ROWS(a->q, (uint64_t)a->row[i] + 1, a->q_stride, row);
        ROWS(a->lse, (uint64_t)a->row[i] + 1, a->lse_stride, a->n_head);
        ROWS(a->out, (uint64_t)a->row[i] + 1, a->out_stride, row);
    }
}
