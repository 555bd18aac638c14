/* SPDX-License-Identifier: Apache-2.0 */
/* attn_case.h - a pool of KV blocks with random content, and backends to compare on it.
 * Header-only help of test_attn.c. */
#ifndef KVD_TEST_ATTN_CASE_H
#define KVD_TEST_ATTN_CASE_H

#include <math.h>
#include <stdio.h>

#include "backend/backend.h"
#include "os/os.h"

#define CASE_SEQ_MAX 4

typedef struct attn_shape {
    uint32_t  n_head, n_kv_head, head_dim, chunk_tokens;
    kvd_dtype type;
    uint32_t  n_seq;
    uint32_t  n_past[CASE_SEQ_MAX], n_row[CASE_SEQ_MAX];
} attn_shape;

typedef struct attn_case {
    attn_shape    sh;
    kvd_kv_layout kv;
    kvd_kv_seq    seq[CASE_SEQ_MAX];
    uint64_t     *block;
    uint64_t      pool_bytes;
    uint32_t      n_row, n_ctx;
    float        *q, *k, *v, *out, *want;
} attn_case;

static float *case_floats(uint64_t n)
{
    return kvd_pages_alloc((size_t)(n * sizeof(float)));
}

/* About normal: the sum of four uniforms, scaled to variance 1. */
static float case_normal(kvd_rng *r)
{
    return (kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) - 2.0f) * 1.7320508f;
}

static void case_fill_pool(attn_case *c, kvd_rng *rng)
{
    for (uint64_t i = 0; i < c->pool_bytes / (c->sh.type == KVD_DTYPE_F32 ? 4 : 2); i++) {
        if (c->sh.type == KVD_DTYPE_F32)
            ((float *)c->kv.pool)[i] = case_normal(rng);
        else
            ((uint16_t *)c->kv.pool)[i] = kvd_f32_to_bf16(case_normal(rng));
    }
}

/* Blocks of all sequences lie mixed in the pool, with room before a layer's first lane. */
static void case_place(attn_case *c)
{
    const uint64_t lane_off = c->kv.lane_off;
    uint64_t       n_block = 0, at = 0, block_bytes;

    for (uint32_t s = 0; s < c->sh.n_seq; s++)
        n_block += kvd_div_up((uint64_t)c->sh.n_past[s] + c->sh.n_row[s], c->kv.block_tokens);
    block_bytes   = lane_off + c->kv.n_kv_head * c->kv.head_stride;
    c->pool_bytes = n_block * block_bytes;
    c->block      = kvd_malloc((size_t)n_block * sizeof(*c->block));
    c->kv.pool    = kvd_pages_alloc((size_t)c->pool_bytes);
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        const uint32_t n = c->sh.n_past[s] + c->sh.n_row[s];

        c->seq[s] = (kvd_kv_seq){ .first_row = c->n_row,
                                  .n_row     = c->sh.n_row[s],
                                  .n_past    = c->sh.n_past[s],
                                  .block     = c->block + at };
        for (uint64_t b = 0; b < kvd_div_up(n, c->kv.block_tokens); b++, at++)
            c->block[at] = (at % 2 ? n_block - 1 - at / 2 : at / 2) * block_bytes;
        c->n_row += c->sh.n_row[s];
        c->n_ctx = n > c->n_ctx ? n : c->n_ctx;
    }
}

static attn_case case_open(attn_shape sh, kvd_rng *rng)
{
    const uint32_t elem = sh.type == KVD_DTYPE_F32 ? 4 : 2;
    attn_case      c    = { .sh = sh };
    uint64_t       n_q, n_k;

    c.kv = (kvd_kv_layout){ .type         = sh.type,
                            .n_kv_head    = sh.n_kv_head,
                            .head_dim     = sh.head_dim,
                            .chunk_tokens = sh.chunk_tokens,
                            .block_tokens = 256,
                            .record_bytes = 2ull * sh.chunk_tokens * sh.head_dim * elem,
                            .lane_off     = 256,
                            .head_stride  = 512ull * sh.head_dim * elem };
    case_place(&c);
    case_fill_pool(&c, rng);
    n_q    = (uint64_t)c.n_row * sh.n_head * sh.head_dim;
    n_k    = (uint64_t)c.n_row * sh.n_kv_head * sh.head_dim;
    c.q    = case_floats(n_q);
    c.k    = case_floats(n_k);
    c.v    = case_floats(n_k);
    c.out  = case_floats(n_q);
    c.want = case_floats(n_q);
    for (uint64_t i = 0; i < n_q; i++)
        c.q[i] = 2.0f * case_normal(rng); /* scores of deviation 2: a peaked softmax */
    for (uint64_t i = 0; i < n_k; i++) {
        c.k[i] = case_normal(rng);
        c.v[i] = case_normal(rng);
    }
    return c;
}

static void case_close(attn_case *c)
{
    const uint64_t n_q = (uint64_t)c->n_row * c->sh.n_head * c->sh.head_dim * sizeof(float);
    const uint64_t n_k = (uint64_t)c->n_row * c->sh.n_kv_head * c->sh.head_dim * sizeof(float);

    kvd_pages_free(c->q, (size_t)n_q);
    kvd_pages_free(c->k, (size_t)n_k);
    kvd_pages_free(c->v, (size_t)n_k);
    kvd_pages_free(c->out, (size_t)n_q);
    kvd_pages_free(c->want, (size_t)n_q);
    kvd_pages_free(c->kv.pool, (size_t)c->pool_bytes);
    kvd_free(c->block);
}

static kvd_backend_limits case_limits(const attn_case *c)
{
    return (kvd_backend_limits){ .n_token   = c->n_row,
                                 .n_seq     = c->sh.n_seq,
                                 .n_col     = 64,
                                 .n_head    = c->sh.n_head,
                                 .n_kv_head = c->sh.n_kv_head,
                                 .head_dim  = c->sh.head_dim,
                                 .n_ctx     = c->n_ctx };
}

/* Attention of the sequences' rows, as one batch over what the pool holds. */
static kvd_status case_attn(const attn_case *c, kvd_backend *b, kvd_stream *st, float *out)
{
    const uint64_t      stride = (uint64_t)c->sh.n_head * c->sh.head_dim;
    const kvd_attn_args a      = { .n_seq      = c->sh.n_seq,
                                   .n_head     = c->sh.n_head,
                                   .n_token    = c->n_row,
                                   .seq        = c->seq,
                                   .kv         = c->kv,
                                   .q_stride   = stride,
                                   .out_stride = stride,
                                   .q          = c->q,
                                   .out        = out,
                                   .scale      = 1.0f / sqrtf((float)c->sh.head_dim) };

    return b->ops->attn(st, &a, NULL);
}

static inline double case_nmse(const float *got, const float *want, uint64_t n)
{
    double err = 0.0, ref = 0.0;

    for (uint64_t i = 0; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];

        err += d * d;
        ref += (double)want[i] * (double)want[i];
    }
    return err / ref; /* NaN if anything is: fails every bound */
}

#endif
