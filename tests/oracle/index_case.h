/* SPDX-License-Identifier: Apache-2.0 */
/* index_case.h - sealed blocks with keys as attention has them, their index, and one query a
 * sequence.  Header-only help of test_index.c. */
#ifndef KVD_TEST_INDEX_CASE_H
#define KVD_TEST_INDEX_CASE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "os/os.h"

#define CASE_SEQ_MAX 3

typedef struct index_shape {
    kvd_index_desc desc;
    uint32_t       n_head, n_kv_head;
    kvd_dtype      type;
    uint32_t       kv_chunk; /* of the records */
    uint32_t       n_seq;
    uint32_t       n_chunk[CASE_SEQ_MAX], first[CASE_SEQ_MAX], k[CASE_SEQ_MAX];
} index_shape;

/* KV heads select differently many, as windows of different size ask for. */
static uint32_t case_k(const index_shape *sh, uint32_t s, uint32_t h)
{
    return sh->k[s] - (sh->k[s] > 4 ? h % 4 * (sh->k[s] / 5) : 0);
}

typedef struct index_case {
    index_shape        sh;
    kvd_kv_layout      kv;
    kvd_index_layout   ix;
    uint32_t           n_block[CASE_SEQ_MAX], first_block[CASE_SEQ_MAX], n_block_all;
    uint32_t           lane_chunks; /* lane_stride */
    uint32_t           k_max;
    uint64_t           kv_bytes, ix_bytes, n_lane_chunk;
    uint64_t          *block, *iblock;
    float             *q, *lse, *score;
    uint16_t          *ema, *ema_was;
    uint32_t          *sel, *k; /* k: [n_seq][n_kv_head] */
    kvd_select_result *result;
    kvd_select_seq     seq[CASE_SEQ_MAX];
    kvd_select_args    args;
} index_case;

static inline void *case_mem(uint64_t bytes)
{
    void *p = kvd_pages_alloc((size_t)bytes + 64);

    if (!p)
        exit(1);
    return p;
}

/* About normal: the sum of four uniforms, scaled to variance 1. */
static float case_normal(kvd_rng *r)
{
    return (kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) - 2.0f) * 1.7320508f;
}

static uint8_t *case_key_row(const index_case *c, uint32_t block, uint32_t head, uint32_t t)
{
    const uint64_t elem = c->sh.type == KVD_DTYPE_F32 ? 4 : 2;

    return (uint8_t *)c->kv.pool + c->block[block] + c->kv.lane_off + head * c->kv.head_stride +
           t / c->sh.kv_chunk * c->kv.record_bytes +
           t % c->sh.kv_chunk * elem * c->sh.desc.head_dim;
}

static inline float case_key(const index_case *c, uint32_t block, uint32_t head, uint32_t t,
                             uint32_t i)
{
    const void *row = case_key_row(c, block, head, t);

    return c->sh.type == KVD_DTYPE_F32 ? ((const float *)row)[i]
                                       : kvd_bf16_to_f32(((const uint16_t *)row)[i]);
}

static void case_set_key(index_case *c, uint32_t block, uint32_t head, uint32_t t, uint32_t i,
                         float x)
{
    void *row = case_key_row(c, block, head, t);

    if (c->sh.type == KVD_DTYPE_F32)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = kvd_f32_to_bf16(x);
}

/* Channels with offsets of their own, some large; neighbouring tokens alike (correlation 0.9). */
static void case_fill_keys(index_case *c, kvd_rng *rng)
{
    for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
        for (uint32_t i = 0; i < c->sh.desc.head_dim; i++) {
            const float offset = case_normal(rng) * (i % 13 == 5 ? 12.0f : 0.7f);
            float       x      = case_normal(rng);

            for (uint32_t b = 0; b < c->n_block_all; b++) {
                for (uint32_t t = 0; t < 256; t++) {
                    x = 0.9f * x + 0.43589f * case_normal(rng);
                    case_set_key(c, b, h, t, i, offset + x + 0.2f * case_normal(rng));
                }
            }
        }
    }
}

static void case_place(index_case *c)
{
    const uint64_t kv_block = c->kv.lane_off + c->kv.n_kv_head * c->kv.head_stride;
    const uint64_t ix_block = c->ix.lane_off + c->ix.n_kv_head * c->ix.head_stride;

    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        c->first_block[s] = c->n_block_all;
        c->n_block[s] =
            (uint32_t)kvd_div_up((uint64_t)c->sh.n_chunk[s] * c->sh.desc.chunk_tokens, 256);
        c->n_block_all += c->n_block[s];
        c->lane_chunks = c->sh.n_chunk[s] > c->lane_chunks ? c->sh.n_chunk[s] : c->lane_chunks;
        c->k_max       = c->sh.k[s] > c->k_max ? c->sh.k[s] : c->k_max;
    }
    c->lane_chunks += 3; /* a stride that is not the length */
    c->kv_bytes = c->n_block_all * kv_block;
    c->ix_bytes = c->n_block_all * ix_block;
    c->kv.pool  = case_mem(c->kv_bytes);
    c->ix.pool  = case_mem(c->ix_bytes);
    c->block    = case_mem(c->n_block_all * sizeof(*c->block));
    c->iblock   = case_mem(c->n_block_all * sizeof(*c->iblock));
    for (uint32_t b = 0; b < c->n_block_all; b++) {
        const uint32_t at = b % 2 ? c->n_block_all - 1 - b / 2 : b / 2;

        c->block[b]  = at * kv_block;
        c->iblock[b] = (c->n_block_all - 1 - at) * ix_block;
    }
}

static void case_outputs(index_case *c, kvd_rng *rng)
{
    const index_shape *sh     = &c->sh;
    const uint64_t     n_lane = (uint64_t)sh->n_seq * sh->n_kv_head;
    const uint32_t     dim    = sh->desc.head_dim;

    c->n_lane_chunk = n_lane * c->lane_chunks;
    c->q            = case_mem((uint64_t)sh->n_seq * (sh->n_head * dim + 5) * sizeof(float));
    c->lse          = case_mem((uint64_t)sh->n_seq * (sh->n_head + 1) * sizeof(float));
    c->score        = case_mem(c->n_lane_chunk * sizeof(float));
    c->ema          = case_mem(c->n_lane_chunk * sizeof(uint16_t));
    c->ema_was      = case_mem(c->n_lane_chunk * sizeof(uint16_t));
    c->sel          = case_mem(n_lane * (c->k_max + 1) * sizeof(uint32_t));
    c->result       = case_mem(n_lane * sizeof(*c->result));
    c->k            = case_mem(n_lane * sizeof(*c->k));
    for (uint64_t i = 0; i < n_lane; i++)
        c->k[i] = case_k(sh, (uint32_t)(i / sh->n_kv_head), (uint32_t)(i % sh->n_kv_head));
    for (uint64_t i = 0; i < sh->n_seq * (uint64_t)(sh->n_head * dim + 5); i++)
        c->q[i] = 2.5f * case_normal(rng); /* logits of deviation 2.5 and more: a peaked softmax */
    for (uint64_t i = 0; i < sh->n_seq * (uint64_t)(sh->n_head + 1); i++)
        c->lse[i] = 8.0f + 3.0f * case_normal(rng);
    for (uint64_t i = 0; i < c->n_lane_chunk; i++)
        c->ema_was[i] = kvd_f32_to_f16(40.0f * kvd_rng_f32(rng));
}

static void case_args(index_case *c)
{
    const index_shape *sh = &c->sh;

    for (uint32_t s = 0; s < sh->n_seq; s++) {
        const uint64_t lane = (uint64_t)s * sh->n_kv_head;

        c->seq[s] = (kvd_select_seq){ .row         = sh->n_seq - 1 - s,
                                      .first_chunk = sh->first[s],
                                      .n_chunk     = sh->n_chunk[s],
                                      .k           = c->k + lane,
                                      .iblock      = c->iblock + c->first_block[s],
                                      .score       = c->score + lane * c->lane_chunks,
                                      .ema         = c->ema + lane * c->lane_chunks,
                                      .sel         = c->sel + lane * (c->k_max + 1) };
    }
    c->args = (kvd_select_args){ .n_seq       = sh->n_seq,
                                 .n_head      = sh->n_head,
                                 .seq         = c->seq,
                                 .index       = c->ix,
                                 .q_stride    = (uint64_t)sh->n_head * sh->desc.head_dim + 5,
                                 .lse_stride  = sh->n_head + 1,
                                 .lane_stride = c->lane_chunks,
                                 .sel_stride  = c->k_max + 1,
                                 .q           = c->q,
                                 .kept_lse    = c->lse,
                                 .result      = c->result,
                                 .scale       = 1.0f / sqrtf((float)sh->desc.head_dim),
                                 .alpha       = 0.5f };
}

static index_case case_open(const index_shape *sh, kvd_rng *rng)
{
    const uint32_t dim = sh->desc.head_dim, elem = sh->type == KVD_DTYPE_F32 ? 4 : 2;
    index_case     c = { .sh = *sh };

    c.kv = (kvd_kv_layout){ .type         = sh->type,
                            .n_kv_head    = sh->n_kv_head,
                            .head_dim     = dim,
                            .chunk_tokens = sh->kv_chunk,
                            .block_tokens = 256,
                            .record_bytes = 2ull * sh->kv_chunk * dim * elem,
                            .lane_off     = 128,
                            .head_stride  = 512ull * dim * elem + 64 };
    c.ix = (kvd_index_layout){ .desc        = sh->desc,
                               .n_kv_head   = sh->n_kv_head,
                               .lane_off    = 192,
                               .head_stride = kvd_index_lane_bytes(&sh->desc) + 64 };
    case_place(&c);
    case_fill_keys(&c, rng);
    case_outputs(&c, rng);
    case_args(&c);
    return c;
}

static void case_close(index_case *c)
{
    const index_shape *sh     = &c->sh;
    const uint64_t     n_lane = (uint64_t)sh->n_seq * sh->n_kv_head;

    kvd_pages_free(c->kv.pool, c->kv_bytes + 64);
    kvd_pages_free(c->ix.pool, c->ix_bytes + 64);
    kvd_pages_free(c->block, c->n_block_all * sizeof(*c->block) + 64);
    kvd_pages_free(c->iblock, c->n_block_all * sizeof(*c->iblock) + 64);
    kvd_pages_free(c->q, sh->n_seq * (uint64_t)(sh->n_head * sh->desc.head_dim + 5) * 4 + 64);
    kvd_pages_free(c->lse, sh->n_seq * (uint64_t)(sh->n_head + 1) * 4 + 64);
    kvd_pages_free(c->score, c->n_lane_chunk * 4 + 64);
    kvd_pages_free(c->ema, c->n_lane_chunk * 2 + 64);
    kvd_pages_free(c->ema_was, c->n_lane_chunk * 2 + 64);
    kvd_pages_free(c->sel, n_lane * (c->k_max + 1) * 4 + 64);
    kvd_pages_free(c->result, n_lane * sizeof(*c->result) + 64);
    kvd_pages_free(c->k, n_lane * sizeof(*c->k) + 64);
}

static inline kvd_backend_limits case_limits(const index_case *c)
{
    return (kvd_backend_limits){ .n_token   = 1,
                                 .n_seq     = c->sh.n_seq,
                                 .n_col     = 64,
                                 .n_head    = c->sh.n_head,
                                 .n_kv_head = c->sh.n_kv_head,
                                 .head_dim  = c->sh.desc.head_dim,
                                 .n_ctx     = 16,
                                 .n_chunk   = c->lane_chunks };
}

/* Indexes all sequences, one call each, so that a segment never spans two. */
static inline kvd_status case_build(const index_case *c, kvd_backend *b, kvd_stream *st)
{
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        const kvd_index_build_args a = { .n_block = c->n_block[s],
                                         .kv      = c->kv,
                                         .index   = c->ix,
                                         .block   = c->block + c->first_block[s],
                                         .iblock  = c->iblock + c->first_block[s] };

        KVD_TRY(b->ops->index_build(st, &a, NULL));
    }
    return KVD_OK;
}

#endif
