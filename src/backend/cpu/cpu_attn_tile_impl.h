/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_tile_impl.h - text of the tile kernel in float; included once by one file per level.
 *
 * Lanes are columns (queries), so scores, maxima and sums need no reduction across a vector:
 * S[key][column] = sum over d of K[key][d] * Q[d][column], O[d][column] likewise from V and S, each
 * K or V element being broadcast.  A tile of keys is widened to float once for all columns.
 * Per column the arithmetic depends on nothing but its own keys. */
#ifndef KVD_CPU_ATTN_TILE_IMPL_H
#define KVD_CPU_ATTN_TILE_IMPL_H

#include <math.h>

#include "backend/cpu/cpu_attn.h"
#include "backend/cpu/cpu_attn_walk.h"
#include "backend/cpu/cpu_vec.h"

#define TILE_KEYS 64u
#define TILE_ACC  8u /* sums side by side */

typedef struct tile_work {
    const cpu_attn_tile *a;
    uint32_t             n_col, n_group; /* columns, and vectors of columns */
    uint32_t             dim;
    float               *q, *o; /* [n_group][dim][CPU_VEC_W] */
    float               *m, *l; /* [n_group][CPU_VEC_W] */
    float               *k, *v; /* [TILE_KEYS][dim] */
    float               *s;     /* [TILE_KEYS][CPU_VEC_W] */
} tile_work;

static uint64_t tile_floats(uint64_t n_group, uint64_t dim)
{
    return 2 * n_group * (dim + 1) * CPU_VEC_W + TILE_KEYS * (2 * dim + CPU_VEC_W);
}

static uint64_t attn_tile_scratch_bytes(uint32_t n_col, uint32_t dim)
{
    return kvd_align_up(tile_floats(kvd_div_up(n_col, CPU_VEC_W), dim) * sizeof(float),
                        KVD_CACHE_LINE);
}

static tile_work tile_open(const cpu_attn_tile *a)
{
    tile_work w = { .a = a, .n_col = a->group * a->n_row, .dim = a->kv->head_dim };
    uint64_t  size;

    w.n_group = (uint32_t)kvd_div_up(w.n_col, CPU_VEC_W);
    size      = (uint64_t)w.n_group * w.dim * CPU_VEC_W;
    w.q       = a->scratch;
    w.o       = w.q + size;
    w.m       = w.o + size;
    w.l       = w.m + w.n_group * CPU_VEC_W;
    w.s       = w.l + w.n_group * CPU_VEC_W;
    w.k       = w.s + TILE_KEYS * CPU_VEC_W;
    w.v       = w.k + TILE_KEYS * w.dim;
    memset(w.o, 0, (size_t)size * sizeof(float));
    for (uint32_t i = 0; i < w.n_group * CPU_VEC_W; i++) {
        w.m[i] = -1e30f;
        w.l[i] = 0.0f;
    }
    return w;
}

/* Columns past the last one repeat it. */
static void tile_load_queries(tile_work *w)
{
    const cpu_attn_tile *a = w->a;

    for (uint32_t c = 0; c < w->n_group * CPU_VEC_W; c++) {
        const uint32_t real = c < w->n_col ? c : w->n_col - 1;
        const float   *src =
            a->q + (real / a->group) * a->q_stride + (uint64_t)(real % a->group) * w->dim;
        float *dst = w->q + (uint64_t)(c / CPU_VEC_W) * w->dim * CPU_VEC_W + c % CPU_VEC_W;

        for (uint32_t d = 0; d < w->dim; d++)
            dst[d * CPU_VEC_W] = src[d] * a->scale;
    }
}

static void tile_widen(const kvd_kv_layout *kv, const uint8_t *row, float *dst)
{
    if (kv->type == KVD_DTYPE_F32) {
        memcpy(dst, row, kv->head_dim * sizeof(float));
        return;
    }
    for (uint32_t d = 0; d < kv->head_dim; d += CPU_VEC_W)
        vf_store(dst + d, vf_load_bf16((const uint16_t *)(const void *)row + d));
}

static void tile_load_keys(tile_work *w, attn_walk *walk, uint32_t n)
{
    const uint64_t v_off = cpu_kv_v_off(w->a->kv);

    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *row = attn_walk_next(walk);

        tile_widen(w->a->kv, row, w->k + i * w->dim);
        tile_widen(w->a->kv, row + v_off, w->v + i * w->dim);
    }
    for (uint32_t i = n; i < kvd_align_up(n, TILE_ACC); i++)
        memset(w->k + i * w->dim, 0, w->dim * sizeof(float));
}

/* Scores of n keys (rounded up to TILE_ACC) for one vector of columns. */
static void tile_scores(const tile_work *w, const float *q, uint32_t n)
{
    const uint32_t dim = w->dim;

    for (uint32_t k = 0; k < n; k += TILE_ACC) {
        const float *kr = w->k + k * dim;
        vf           acc[TILE_ACC];

#pragma GCC unroll 8
        for (uint32_t j = 0; j < TILE_ACC; j++)
            acc[j] = vf_set1(0.0f);
        for (uint32_t d = 0; d < dim; d++) {
            const vf x = vf_load(q + d * CPU_VEC_W);

#pragma GCC unroll 8
            for (uint32_t j = 0; j < TILE_ACC; j++)
                acc[j] = vf_fma(vf_set1(kr[j * dim + d]), x, acc[j]);
        }
#pragma GCC unroll 8
        for (uint32_t j = 0; j < TILE_ACC; j++)
            vf_store(w->s + (k + j) * CPU_VEC_W, acc[j]);
    }
}

/* Column c sees keys below n_past + c / group + 1; only tiles on the diagonal come here with any
 * that it does not. */
static void tile_mask(const tile_work *w, uint32_t col, uint32_t key, uint32_t n)
{
    const cpu_attn_tile *a = w->a;

    for (uint32_t j = 0; j < CPU_VEC_W; j++) {
        const uint32_t real = col + j < w->n_col ? col + j : w->n_col - 1;
        const uint32_t see  = a->n_past + real / a->group + 1;

        for (uint32_t k = see > key ? see - key : 0; k < n; k++)
            w->s[k * CPU_VEC_W + j] = -INFINITY;
    }
}

static vf tile_softmax(const tile_work *w, float *m, float *l, uint32_t n)
{
    const vf old = vf_load(m);
    vf       max = old, sum = vf_set1(0.0f), alpha;

    for (uint32_t k = 0; k < n; k++)
        max = vf_max(max, vf_load(w->s + k * CPU_VEC_W));
    for (uint32_t k = 0; k < n; k++) {
        const vf p = vf_exp(vf_load(w->s + k * CPU_VEC_W) - max);

        vf_store(w->s + k * CPU_VEC_W, p);
        sum = sum + p;
    }
    alpha = vf_exp(old - max);
    vf_store(m, max);
    vf_store(l, vf_fma(vf_load(l), alpha, sum));
    return alpha;
}

CPU_INLINE void tile_values_at(const tile_work *w, float *o, uint32_t d, vf alpha, uint32_t n,
                               const uint32_t nd)
{
    const float *v = w->v + d;
    vf           acc[TILE_ACC];

#pragma GCC unroll 8
    for (uint32_t j = 0; j < nd; j++)
        acc[j] = vf_load(o + (d + j) * CPU_VEC_W) * alpha;
    for (uint32_t k = 0; k < n; k++, v += w->dim) {
        const vf p = vf_load(w->s + k * CPU_VEC_W);

#pragma GCC unroll 8
        for (uint32_t j = 0; j < nd; j++)
            acc[j] = vf_fma(vf_set1(v[j]), p, acc[j]);
    }
#pragma GCC unroll 8
    for (uint32_t j = 0; j < nd; j++)
        vf_store(o + (d + j) * CPU_VEC_W, acc[j]);
}

static void tile_values(const tile_work *w, float *o, vf alpha, uint32_t n)
{
    uint32_t d = 0;

    for (; d + TILE_ACC <= w->dim; d += TILE_ACC)
        tile_values_at(w, o, d, alpha, n, TILE_ACC);
    for (; d < w->dim; d++)
        tile_values_at(w, o, d, alpha, n, 1);
}

/* One vector of columns over the loaded tile [key, key + n). */
static void tile_group(tile_work *w, uint32_t g, uint32_t key, uint32_t n)
{
    const cpu_attn_tile *a    = w->a;
    const uint32_t       col  = g * CPU_VEC_W;
    const uint32_t       last = col + CPU_VEC_W < w->n_col ? col + CPU_VEC_W - 1 : w->n_col - 1;
    const uint32_t see = a->n_past + last / a->group + 1, least = a->n_past + col / a->group + 1;
    const uint64_t at = (uint64_t)g * w->dim * CPU_VEC_W;
    vf             alpha;

    if (see <= key)
        return;
    n = see - key < n ? see - key : n;
    tile_scores(w, w->q + at, n);
    if (least < key + n)
        tile_mask(w, col, key, n);
    alpha = tile_softmax(w, w->m + col, w->l + col, n);
    tile_values(w, w->o + at, alpha, n);
}

static void tile_store(const tile_work *w)
{
    const cpu_attn_tile *a = w->a;

    for (uint32_t c = 0; c < w->n_col; c++) {
        const float  inv = 1.0f / w->l[c];
        const float *src = w->o + (uint64_t)(c / CPU_VEC_W) * w->dim * CPU_VEC_W + c % CPU_VEC_W;
        float *dst = a->out + (c / a->group) * a->out_stride + (uint64_t)(c % a->group) * w->dim;

        for (uint32_t d = 0; d < w->dim; d++)
            dst[d] = src[d * CPU_VEC_W] * inv;
    }
}

static void attn_tile(const cpu_attn_tile *a)
{
    const uint32_t n_key = a->n_past + a->n_row;
    tile_work      w     = tile_open(a);
    attn_walk      walk  = attn_walk_from(a->kv, a->block, a->kv_head, 0);

    tile_load_queries(&w);
    for (uint32_t key = 0; key < n_key; key += TILE_KEYS) {
        const uint32_t n = n_key - key < TILE_KEYS ? n_key - key : TILE_KEYS;

        tile_load_keys(&w, &walk, n);
        for (uint32_t g = 0; g < w.n_group; g++)
            tile_group(&w, g, key, n);
    }
    tile_store(&w);
}

#endif
