/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_impl.h - text of the row kernels; included once by one file per level.
 *
 * Keys go in tiles of ATTN_TILE with online softmax.  NQ query rows (1, 2, 4, 8, at most a vector
 * wide) take NK = CPU_VEC_W / NQ keys at once: each K vector is widened once and multiplied with
 * all rows, and the NQ * NK sums are then reduced together.  Scores and weights of a tile lie as
 * vectors of NQ groups of NK lanes, so that lane q * NK + j of vector i is query q, key i * NK + j.
 * Per query and key the arithmetic does not depend on NQ or on the lane. */
#ifndef KVD_CPU_ATTN_IMPL_H
#define KVD_CPU_ATTN_IMPL_H

#include <math.h>

#include "backend/cpu/cpu_attn.h"
#include "backend/cpu/cpu_attn_tile_impl.h"
#include "backend/cpu/cpu_attn_walk.h"
#include "backend/cpu/cpu_vec.h"

#define ATTN_TILE   64u
#define ATTN_AHEAD  4096u /* bytes; the hardware's prefetcher alone leaves a third of the time */
#define ATTN_NQ_MAX (CPU_VEC_W < 8 ? CPU_VEC_W : 8)
#define ATTN_ACC    (CPU_VEC_W < 16 ? 8 : 16) /* output sums that fit the registers */

CPU_INLINE vf attn_load(const uint8_t *row, uint32_t i, bool bf16)
{
    return bf16 ? vf_load_bf16((const uint16_t *)(const void *)row + i)
                : vf_load((const float *)(const void *)row + i);
}

/* Asks for what lies `ahead` further in the lane, once per cache line. */
CPU_INLINE void attn_prefetch(const uint8_t *row, uint32_t i, uint32_t ahead, bool bf16)
{
    const uint32_t at = i * (bf16 ? 2 : 4);

    if (at % KVD_CACHE_LINE == 0)
        __builtin_prefetch((const void *)((uintptr_t)row + at + ahead), 0, 3);
}

/* Scores of a tile; keys past n repeat the last row and are masked by the caller. */
CPU_INLINE void attn_scores(const float *q, uint32_t dim, const uint8_t *const *row, float *s,
                            uint32_t n, uint32_t ahead, const uint32_t nq, const bool bf16)
{
    const uint32_t nk = CPU_VEC_W / nq;

    for (uint32_t k = 0; k < n; k += nk) {
        vf acc[CPU_VEC_W];

#pragma GCC unroll 16
        for (uint32_t i = 0; i < CPU_VEC_W; i++)
            acc[i] = vf_set1(0.0f);
        for (uint32_t d = 0; d < dim; d += CPU_VEC_W) {
#pragma GCC unroll 16
            for (uint32_t j = 0; j < nk; j++) {
                attn_prefetch(row[k + j], d, ahead, bf16);
                const vf kv = attn_load(row[k + j], d, bf16);

#pragma GCC unroll 8
                for (uint32_t i = 0; i < nq; i++)
                    acc[i * nk + j] = vf_fma(kv, vf_load(q + i * dim + d), acc[i * nk + j]);
            }
        }
        vf_store(s + k * nq, vf_sum_each(acc));
    }
}

/* Turns scores into weights, brings max up to date, and returns through alpha what the sums so
 * far must be multiplied with; lanes of one query agree. */
CPU_INLINE void attn_softmax(float *s, uint32_t n_vec, vf *max, vf *sum, vf *alpha,
                             const uint32_t nq)
{
    vf m = vf_load(s), l = vf_set1(0.0f);

    for (uint32_t i = 1; i < n_vec; i++)
        m = vf_max(m, vf_load(s + i * CPU_VEC_W));
    m      = vf_max(*max, vf_group_max(m, CPU_VEC_W / nq));
    *alpha = vf_exp(*max - m);
    *max   = m;
    for (uint32_t i = 0; i < n_vec; i++) {
        const vf p = vf_exp(vf_load(s + i * CPU_VEC_W) - m);

        vf_store(s + i * CPU_VEC_W, p);
        l = l + p;
    }
    *sum = vf_fma(*sum, *alpha, l);
}

/* The same where key k of the tile counts times[k] times.  One that does not count at all must not
 * lift the maximum either. */
CPU_INLINE void attn_softmax_times(float *s, const uint16_t *times, uint32_t n, uint32_t n_vec,
                                   vf *max, vf *sum, vf *alpha, const uint32_t nq)
{
    const uint32_t nk                         = CPU_VEC_W / nq;
    float          w[ATTN_TILE * ATTN_NQ_MAX] = { 0 };
    vf             l = vf_set1(0.0f), before = *sum, unused = vf_set1(0.0f);

    for (uint32_t k = 0; k < n; k++) {
        const uint32_t at = k / nk * CPU_VEC_W + k % nk;

        for (uint32_t i = 0; i < nq; i++)
            w[at + i * nk] = times[k];
        for (uint32_t i = 0; i < nq && times[k] == 0; i++)
            s[at + i * nk] = -INFINITY;
    }
    attn_softmax(s, n_vec, max, &unused, alpha, nq);
    for (uint32_t i = 0; i < n_vec; i++) {
        const vf p = vf_load(s + i * CPU_VEC_W) * vf_load(w + i * CPU_VEC_W);

        vf_store(s + i * CPU_VEC_W, p);
        l = l + p;
    }
    *sum = vf_fma(before, *alpha, l);
}

/* o[q][d .. d + NV vectors) = o * alpha[q] + sum over the tile's keys of weight * V. */
CPU_INLINE void attn_values_at(float *o, uint32_t dim, uint32_t d, const uint8_t *const *row,
                               uint64_t v_off, const float *p, const float *alpha, uint32_t n,
                               uint32_t ahead, const uint32_t nq, const uint32_t nv,
                               const bool bf16)
{
    const uint32_t nk = CPU_VEC_W / nq;
    vf             acc[ATTN_ACC];

#pragma GCC unroll 8
    for (uint32_t i = 0; i < nq; i++)
#pragma GCC unroll 16
        for (uint32_t j = 0; j < nv; j++)
            acc[i * nv + j] = vf_load(o + i * dim + d + j * CPU_VEC_W) * vf_set1(alpha[i * nk]);
    for (uint32_t k = 0; k < n; k++) {
        const float *pk = p + (k / nk) * CPU_VEC_W + k % nk;

#pragma GCC unroll 16
        for (uint32_t j = 0; j < nv; j++) {
            attn_prefetch(row[k] + v_off, d + j * CPU_VEC_W, ahead, bf16);
            const vf v = attn_load(row[k] + v_off, d + j * CPU_VEC_W, bf16);

#pragma GCC unroll 8
            for (uint32_t i = 0; i < nq; i++)
                acc[i * nv + j] = vf_fma(v, vf_set1(pk[i * nk]), acc[i * nv + j]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < nq; i++)
#pragma GCC unroll 16
        for (uint32_t j = 0; j < nv; j++)
            vf_store(o + i * dim + d + j * CPU_VEC_W, acc[i * nv + j]);
}

CPU_INLINE void attn_values(float *o, uint32_t dim, const uint8_t *const *row, uint64_t v_off,
                            const float *p, const float *alpha, uint32_t n, uint32_t ahead,
                            const uint32_t nq, const bool bf16)
{
    const uint32_t nv = ATTN_ACC / nq < 4 ? ATTN_ACC / nq : 4;
    uint32_t       d  = 0;

    for (; d + nv * CPU_VEC_W <= dim; d += nv * CPU_VEC_W)
        attn_values_at(o, dim, d, row, v_off, p, alpha, n, ahead, nq, nv, bf16);
    for (; d < dim; d += CPU_VEC_W)
        attn_values_at(o, dim, d, row, v_off, p, alpha, n, ahead, nq, 1, bf16);
}

/* Asks for the records of the next tile: they lie anywhere, no prefetcher finds them. */
CPU_INLINE void attn_fetch_records(const attn_walk *w, uint32_t end_key)
{
    const uint32_t chunk = w->kv->chunk_tokens;
    const uint32_t left  = end_key - w->key < ATTN_TILE ? end_key - w->key : ATTN_TILE;

    for (uint32_t i = 0; i < left / chunk; i++) {
        const uint8_t *at = (const uint8_t *)w->kv->pool + w->record[i];

        for (uint64_t b = 0; b < w->kv->record_bytes; b += KVD_CACHE_LINE)
            __builtin_prefetch(at + b, 0, 3);
    }
}

/* The same for cells, whose blocks are short and lie far apart. */
CPU_INLINE void attn_fetch_cells(attn_walk w, uint32_t end_key)
{
    const uint32_t left = end_key - w.key < ATTN_TILE ? end_key - w.key : ATTN_TILE;

    for (uint32_t i = 0; i < left; i++) {
        const uint8_t *row = attn_walk_next(&w);

        for (uint64_t b = 0; b < w.row_bytes; b += KVD_CACHE_LINE) {
            __builtin_prefetch(row + b, 0, 3);
            __builtin_prefetch(row + cpu_kv_v_off(w.kv) + b, 0, 3);
        }
    }
}

/* NQ rows, of which the first n_q are real; q and o have NQ rows of head_dim. */
CPU_INLINE void attn_pass(const cpu_attn_rows *a, const float *q, float *o, float *m_out,
                          float *l_out, const uint32_t nq, const bool bf16)
{
    const uint32_t dim   = a->kv->head_dim;
    const uint64_t v_off = cpu_kv_v_off(a->kv);
    const uint8_t *row[ATTN_TILE];
    float          s[ATTN_TILE * ATTN_NQ_MAX], lane[CPU_VEC_W], alpha[CPU_VEC_W];
    vf             max = vf_set1(-1e30f), sum = vf_set1(0.0f), al;
    attn_walk      w     = a->record ? attn_walk_list(a->kv, a->record, a->first_key)
                                     : attn_walk_from(a->kv, a->block, a->kv_head, a->first_key);
    const uint32_t ahead = a->record || a->times ? 0 : ATTN_AHEAD;

    for (uint32_t key = a->first_key; key < a->end_key; key += ATTN_TILE) {
        const uint32_t n  = a->end_key - key < ATTN_TILE ? a->end_key - key : ATTN_TILE;
        const uint32_t nk = CPU_VEC_W / nq, n_vec = (n + nk - 1) / nk;

        for (uint32_t k = 0; k < n; k++)
            row[k] = attn_walk_next(&w);
        if (a->record)
            attn_fetch_records(&w, a->end_key);
        else if (a->times)
            attn_fetch_cells(w, a->end_key);
        for (uint32_t k = n; k < n_vec * nk; k++)
            row[k] = row[n - 1];
        attn_scores(q, dim, row, s, n, ahead, nq, bf16);
        for (uint32_t k = n; k < n_vec * nk; k++) {
            for (uint32_t i = 0; i < nq; i++)
                s[(n_vec - 1) * CPU_VEC_W + i * nk + k % nk] = -INFINITY;
        }
        if (a->times)
            attn_softmax_times(s, a->times + key, n, n_vec, &max, &sum, &al, nq);
        else
            attn_softmax(s, n_vec, &max, &sum, &al, nq);
        vf_store(alpha, al);
        attn_values(o, dim, row, v_off, s, alpha, n, ahead, nq, bf16);
    }
    vf_store(lane, max);
    for (uint32_t i = 0; i < nq; i++)
        m_out[i] = lane[i * (CPU_VEC_W / nq)];
    vf_store(lane, vf_group_add(sum, CPU_VEC_W / nq));
    for (uint32_t i = 0; i < nq; i++)
        l_out[i] = lane[i * (CPU_VEC_W / nq)];
}

static void attn_pass_1(const cpu_attn_rows *a, const float *q, float *o, float *m, float *l)
{
    if (a->kv->type == KVD_DTYPE_BF16)
        attn_pass(a, q, o, m, l, 1, true);
    else
        attn_pass(a, q, o, m, l, 1, false);
}

#if CPU_VEC_W >= 4
static void attn_pass_2(const cpu_attn_rows *a, const float *q, float *o, float *m, float *l)
{
    if (a->kv->type == KVD_DTYPE_BF16)
        attn_pass(a, q, o, m, l, 2, true);
    else
        attn_pass(a, q, o, m, l, 2, false);
}

static void attn_pass_4(const cpu_attn_rows *a, const float *q, float *o, float *m, float *l)
{
    if (a->kv->type == KVD_DTYPE_BF16)
        attn_pass(a, q, o, m, l, 4, true);
    else
        attn_pass(a, q, o, m, l, 4, false);
}
#endif

#if CPU_VEC_W >= 8
static void attn_pass_8(const cpu_attn_rows *a, const float *q, float *o, float *m, float *l)
{
    if (a->kv->type == KVD_DTYPE_BF16)
        attn_pass(a, q, o, m, l, 8, true);
    else
        attn_pass(a, q, o, m, l, 8, false);
}
#endif

/* Rows first .. first + n of the item, n <= ATTN_NQ_MAX, in the next size that has a kernel. */
static void attn_rows_some(const cpu_attn_rows *a, uint32_t first, uint32_t n)
{
    const uint32_t dim = a->kv->head_dim;
    float          q[ATTN_NQ_MAX * CPU_ATTN_HEAD_DIM_MAX], o[ATTN_NQ_MAX * CPU_ATTN_HEAD_DIM_MAX];
    float          m[ATTN_NQ_MAX], l[ATTN_NQ_MAX];
    const uint32_t nq = n <= 2 ? n : n <= 4 ? 4 : 8;

    for (uint32_t i = 0; i < n * dim; i++)
        q[i] = a->q[first * dim + i] * a->scale;
    memset(q + n * dim, 0, (size_t)(nq - n) * dim * sizeof(float));
    memset(o, 0, (size_t)nq * dim * sizeof(float));
#if CPU_VEC_W >= 8
    if (nq == 8)
        attn_pass_8(a, q, o, m, l);
#endif
#if CPU_VEC_W >= 4
    if (nq == 4)
        attn_pass_4(a, q, o, m, l);
    if (nq == 2)
        attn_pass_2(a, q, o, m, l);
#endif
    if (nq == 1)
        attn_pass_1(a, q, o, m, l);
    memcpy(a->part + first * dim, o, (size_t)n * dim * sizeof(float));
    memcpy(a->part + a->n_q * dim + first, m, n * sizeof(float));
    memcpy(a->part + a->n_q * dim + a->n_q + first, l, n * sizeof(float));
}

static void attn_rows(const cpu_attn_rows *a)
{
    kvd_assert(a->kv->head_dim <= CPU_ATTN_HEAD_DIM_MAX && a->first_key < a->end_key);
    for (uint32_t i = 0; i < a->n_q; i += ATTN_NQ_MAX)
        attn_rows_some(a, i, a->n_q - i < ATTN_NQ_MAX ? a->n_q - i : ATTN_NQ_MAX);
}

/* ---- joining partial results ----------------------------------------------------- */

CPU_INLINE float attn_exp1(float x)
{
    float b[CPU_VEC_W];

    vf_store(b, vf_exp(vf_set1(x)));
    return b[0];
}

static void attn_fold(float *acc, const float *part, uint32_t n_q, uint32_t dim)
{
    float       *m_acc = acc + (uint64_t)n_q * dim, *l_acc = m_acc + n_q;
    const float *m_part = part + (uint64_t)n_q * dim, *l_part = m_part + n_q;

    for (uint32_t i = 0; i < n_q; i++) {
        const float m = m_acc[i] > m_part[i] ? m_acc[i] : m_part[i];
        const float x = attn_exp1(m_acc[i] - m), y = attn_exp1(m_part[i] - m);
        const vf    vx = vf_set1(x), vy = vf_set1(y);

        for (uint32_t d = i * dim; d < (i + 1) * dim; d += CPU_VEC_W)
            vf_store(acc + d, vf_fma(vf_load(part + d), vy, vf_load(acc + d) * vx));
        l_acc[i] = l_acc[i] * x + l_part[i] * y;
        m_acc[i] = m;
    }
}

static void attn_finish(const float *acc, float *out, uint32_t n_q, uint32_t dim)
{
    const float *l = acc + (uint64_t)n_q * dim + n_q;

    for (uint32_t i = 0; i < n_q; i++) {
        const vf inv = vf_set1(1.0f / l[i]);

        for (uint32_t d = i * dim; d < (i + 1) * dim; d += CPU_VEC_W)
            vf_store(out + d, vf_load(acc + d) * inv);
    }
}

/* ---- storing --------------------------------------------------------------------- */

static void attn_store(kvd_dtype type, const float *x, void *dst, uint32_t n)
{
    if (type == KVD_DTYPE_F32) {
        memcpy(dst, x, n * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < n; i += CPU_VEC_W)
        vf_store_bf16((uint16_t *)dst + i, vf_load(x + i));
}

#define CPU_ATTN_TABLE                                                                           \
    {                                                                                            \
        .width = CPU_VEC_W, .rows = attn_rows, .fold = attn_fold, .finish = attn_finish,         \
        .store = attn_store,                                                                     \
        .tile  = { .min_cols = 32, .scratch_bytes = attn_tile_scratch_bytes, .run = attn_tile }, \
    }

#endif
