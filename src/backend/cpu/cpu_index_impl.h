/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_impl.h - text of select's kernels; included once by one file per level.
 *
 * Units are the lanes: a tile of 16 is one vector or a few.  Built without contraction, so the
 * average and everything behind the scores has the same bits at every level. */
#ifndef KVD_CPU_INDEX_IMPL_H
#define KVD_CPU_INDEX_IMPL_H

#include <math.h>

#include "backend/cpu/cpu_index_kernel.h"
#include "backend/cpu/cpu_vec.h"

/* ---- vectors of codes and halves ------------------------------------------------- */

#if CPU_VEC_W == 16
CPU_INLINE vf ix_code(const uint8_t *p, uint32_t shift, uint32_t mask)
{
    const __m512i x = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128((int)shift));

    return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)mask)));
}
CPU_INLINE vf ix_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
CPU_INLINE void ix_store_f16(uint16_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
CPU_INLINE uint32_t ix_reach(vf v, vf t) /* bit i: v[i] >= t[i] */
{
    return _mm512_cmp_ps_mask(v, t, _CMP_GE_OQ);
}
#elif CPU_VEC_W == 8
CPU_INLINE vf ix_code(const uint8_t *p, uint32_t shift, uint32_t mask)
{
    const __m256i x = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p),
                                       _mm_cvtsi32_si128((int)shift));

    return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)mask)));
}
CPU_INLINE vf ix_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
CPU_INLINE void ix_store_f16(uint16_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
CPU_INLINE uint32_t ix_reach(vf v, vf t)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(v, t, _CMP_GE_OQ));
}
#else
typedef uint32_t vu_any __attribute__((vector_size(16), aligned(4), may_alias));

CPU_INLINE vf ix_code(const uint8_t *p, uint32_t shift, uint32_t mask)
{
    const vu x = (*(const vu_any *)(const void *)p >> shift) & mask;

    return __builtin_convertvector((vi)x, vf);
}
CPU_INLINE vf ix_load_f16(const uint16_t *p)
{
    return (vf){ kvd_f16_to_f32(p[0]), kvd_f16_to_f32(p[1]), kvd_f16_to_f32(p[2]),
                 kvd_f16_to_f32(p[3]) };
}
CPU_INLINE void ix_store_f16(uint16_t *p, vf v)
{
    for (int i = 0; i < CPU_VEC_W; i++)
        p[i] = kvd_f32_to_f16(v[i]);
}
CPU_INLINE uint32_t ix_reach(vf v, vf t)
{
    const vi m = (vi)(v >= t) & (vi){ 1, 2, 4, 8 };

    return (uint32_t)(m[0] | m[1] | m[2] | m[3]);
}
#endif

CPU_INLINE float ix_max_lane(vf v)
{
    float b[CPU_VEC_W];

    vf_store(b, vf_group_max(v, CPU_VEC_W));
    return b[0];
}

CPU_INLINE float ix_sum_lane(vf v)
{
    float b[CPU_VEC_W];

    vf_store(b, vf_group_add(v, CPU_VEC_W));
    return b[0];
}

/* ---- dot products ---------------------------------------------------------------- */

/* Channels' scales times queries, heads side by side, and the minima's part of the sum. */
typedef struct ix_fold {
    float q[KVD_HEAD_DIM_MAX][CPU_INDEX_HEADS];
    float base[CPU_INDEX_HEADS];
} ix_fold;

static void ix_fold_group(const cpu_index_dots *d, uint32_t h0, uint32_t n, uint32_t group,
                          ix_fold *f)
{
    const cpu_index_plane *p = d->p;
    const uint16_t        *par =
        (const uint16_t *)(const void *)(d->lane + p->param_off) + (uint64_t)group * 2 * p->dim_pad;
    float scale[KVD_HEAD_DIM_MAX], min[KVD_HEAD_DIM_MAX];

    for (uint32_t c = 0; c < p->dim; c++) {
        scale[c] = p->elem == KVD_INDEX_BF16 ? 1.0f : kvd_f16_to_f32(par[c]);
        min[c]   = p->elem == KVD_INDEX_BF16 ? 0.0f : kvd_f16_to_f32(par[p->dim_pad + c]);
    }
    for (uint32_t h = 0; h < n; h++) {
        const float *q    = d->q + (h0 + h) * d->q_stride;
        float        base = 0.0f;

        for (uint32_t c = 0; c < p->dim; c++) {
            f->q[c][h] = q[c] * scale[c];
            base += q[c] * min[c];
        }
        f->base[h] = base;
    }
}

/* One tile for n heads (a constant after inlining). */
CPU_INLINE void ix_tile(const cpu_index_dots *d, const ix_fold *f, uint32_t h0, uint32_t n,
                        uint32_t tile)
{
    const cpu_index_plane *p       = d->p;
    const uint32_t         per_row = p->elem == KVD_INDEX_BF16 ? 1 : cpu_index_per_row(p);
    const uint32_t         mask    = (1u << (p->bits & 15u)) - 1u;
    const uint8_t         *code    = d->lane + p->code_off + tile * p->tile_bytes;

    for (uint32_t v = 0; v < CPU_INDEX_TILE; v += CPU_VEC_W) {
        vf acc[CPU_INDEX_HEADS];

#pragma GCC unroll 8
        for (uint32_t h = 0; h < n; h++)
            acc[h] = vf_set1(f->base[h]);
        for (uint32_t c = 0; c < p->dim; c++) {
            vf x;

            if (p->elem == KVD_INDEX_BF16)
                x = vf_load_bf16((const uint16_t *)(const void *)code + c * CPU_INDEX_TILE + v);
            else
                x = ix_code(code + (uint64_t)(c / per_row) * 64 + 4 * v,
                            p->bits * (c % per_row / 4) + 8 * (c % 4), mask);
#pragma GCC unroll 8
            for (uint32_t h = 0; h < n; h++)
                acc[h] = vf_fma(vf_set1(f->q[c][h]), x, acc[h]);
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < n; h++) {
            float *out = d->out + (uint64_t)(h0 + h) * CPU_INDEX_BLOCK + tile * CPU_INDEX_TILE + v;

            if (d->add)
                acc[h] = acc[h] + vf_load(out);
            vf_store(out, acc[h]);
        }
    }
}

static void ix_tile_heads(const cpu_index_dots *d, const ix_fold *f, uint32_t h0, uint32_t n,
                          uint32_t tile)
{
    switch (n) {
    case 1:
        ix_tile(d, f, h0, 1, tile);
        break;
    case 2:
        ix_tile(d, f, h0, 2, tile);
        break;
    case 3:
        ix_tile(d, f, h0, 3, tile);
        break;
    case 4:
        ix_tile(d, f, h0, 4, tile);
        break;
    case 5:
        ix_tile(d, f, h0, 5, tile);
        break;
    case 6:
        ix_tile(d, f, h0, 6, tile);
        break;
    case 7:
        ix_tile(d, f, h0, 7, tile);
        break;
    default:
        ix_tile(d, f, h0, 8, tile);
        break;
    }
}

static void ix_dots(const cpu_index_dots *d)
{
    const uint32_t per_group = d->p->group / CPU_INDEX_TILE;
    ix_fold        f;

    for (uint32_t h0 = 0; h0 < d->n_head; h0 += CPU_INDEX_HEADS) {
        const uint32_t n      = d->n_head - h0 < CPU_INDEX_HEADS ? d->n_head - h0 : CPU_INDEX_HEADS;
        uint32_t       folded = UINT32_MAX;

        for (uint32_t t = 0; t < d->p->n_unit / CPU_INDEX_TILE; t++) {
            if (!(d->tiles >> t & 1))
                continue;
            if (folded != t / per_group)
                ix_fold_group(d, h0, n, t / per_group, &f);
            folded = t / per_group;
            ix_tile_heads(d, &f, h0, n, t);
        }
    }
}

/* ---- weights --------------------------------------------------------------------- */

static void ix_sum_tokens(const cpu_index_weigh *w)
{
    for (uint32_t c = 0; c < w->n_chunk; c++) {
        const float *x   = w->logit + c * w->per_chunk;
        float        sum = 0.0f;

        for (uint32_t t = 0; t < w->per_chunk; t += 4)
            sum += (x[t] + x[t + 1]) + (x[t + 2] + x[t + 3]);
        w->e[c] = sum;
    }
}

static void ix_weigh(cpu_index_weigh *w)
{
    const uint32_t n    = w->n_chunk * w->per_chunk;
    const bool     part = w->lo > 0 || w->hi < w->n_chunk;
    vf             max = vf_set1(-HUGE_VALF), sum = vf_set1(0.0f);

    for (uint32_t i = 0; i < n && w->radius; i += CPU_VEC_W)
        vf_store(w->logit + i,
                 vf_fma(vf_set1(w->radius_q), ix_load_f16(w->radius + i), vf_load(w->logit + i)));
    for (uint32_t i = 0; i < n && part; i++) {
        if (i < w->lo * w->per_chunk || i >= w->hi * w->per_chunk)
            w->logit[i] = -HUGE_VALF;
    }
    for (uint32_t i = 0; i < n; i += CPU_VEC_W)
        max = vf_max(max, vf_load(w->logit + i));
    w->max = ix_max_lane(max);
    max    = vf_set1(w->max);
    for (uint32_t i = 0; i < n; i += CPU_VEC_W)
        vf_store((w->per_chunk > 1 ? w->logit : w->e) + i, vf_exp(vf_load(w->logit + i) - max));
    if (w->per_chunk > 1)
        ix_sum_tokens(w);
    for (uint32_t c = 0; c < w->n_chunk && part; c++)
        w->e[c] = c < w->lo || c >= w->hi ? 0.0f : w->e[c];
    for (uint32_t i = 0; i < w->n_chunk; i += CPU_VEC_W)
        sum = sum + vf_load(w->e + i);
    w->sum = ix_sum_lane(sum);
}

static void ix_exps(float *x, const float *max, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += CPU_VEC_W)
        vf_store(x + i, vf_exp(vf_load(x + i) - vf_load(max + i)));
}

/* vf_max(x, 0) is 0 for a NaN: its second operand is taken. */
CPU_INLINE vf ix_clamp(vf x)
{
    return vf_min(vf_max(x, vf_set1(0.0f)), vf_set1(1.0f));
}

static void ix_mix(const cpu_index_mix *m)
{
    for (uint32_t i = 0; i < m->n_out; i += CPU_VEC_W) {
        vf x = vf_set1(0.0f);

        for (uint32_t h = 0; h < m->n_head; h++) {
            const vf e = vf_load(m->e + (uint64_t)h * m->n_chunk + i);

            x = m->largest ? vf_max(vf_set1(m->scale[h]) * e, x)
                           : vf_fma(vf_set1(m->scale[h]), e, x);
        }
        x = ix_clamp(x);
        vf_storen(m->score + i, x, m->n_out - i < CPU_VEC_W ? m->n_out - i : CPU_VEC_W);
    }
}

/* The rule of kvd_select_args. */
static void ix_ema(uint16_t *ema, const float *score, uint32_t n, float alpha)
{
    const vf keep = vf_set1(1.0f - alpha), add = vf_set1(alpha * KVD_EMA_SCALE);
    uint32_t i = 0;

    for (; i + CPU_VEC_W <= n; i += CPU_VEC_W) {
        const vf a = ix_load_f16(ema + i) * keep, b = vf_load(score + i) * add;

        ix_store_f16(ema + i, a + b);
    }
    for (; i < n; i++)
        ema[i] = cpu_select_ema(ema[i], score[i], alpha);
}

/* ---- the best -------------------------------------------------------------------- */

static uint32_t ix_count(const uint32_t *bits, uint32_t n, uint32_t least)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++)
        count += bits[i] >= least;
    return count;
}

/* Bisection between what all and what none reach; ends early where exactly k reach. */
static uint32_t ix_threshold(const uint32_t *bits, uint32_t n, uint32_t k, uint32_t *above)
{
    uint32_t lo = UINT32_MAX, hi = 0;

    for (uint32_t i = 0; i < n; i++) {
        lo = bits[i] < lo ? bits[i] : lo;
        hi = bits[i] > hi ? bits[i] : hi;
    }
    *above = k;
    if (k == n)
        return lo;
    hi++; /* scores are at most 1: no wrap */
    while (hi - lo > 1) {
        const uint32_t mid   = lo + (hi - lo) / 2;
        const uint32_t count = ix_count(bits, n, mid);

        if (count == k)
            return mid;
        if (count > k)
            lo = mid;
        else
            hi = mid;
    }
    *above = ix_count(bits, n, lo + 1);
    return lo;
}

#define IX_ROWS 8u /* vectors whose lanes' largest are taken together */

/* A value that at least k scores reach: the k-th largest of n / 8 groups' maxima. */
static float ix_floor(const float *score, uint32_t n, uint32_t k, uint32_t *bits)
{
    const uint32_t step  = IX_ROWS * CPU_VEC_W;
    uint32_t       n_max = 0, above, least;
    float          out;

    if (n / IX_ROWS < k + CPU_VEC_W)
        return 0.0f;
    for (uint32_t i = 0; i + step <= n; i += step, n_max += CPU_VEC_W) {
        vf m = vf_load(score + i);

        for (uint32_t r = 1; r < IX_ROWS; r++)
            m = vf_max(m, vf_load(score + i + r * CPU_VEC_W));
        vf_store((float *)(void *)(bits + n_max), m);
    }
    if (n_max < k)
        return 0.0f;
    least = ix_threshold(bits, n_max, k, &above);
    memcpy(&out, &least, sizeof(out));
    return out;
}

/* Those that reach `least`, ascending. */
static uint32_t ix_collect(const float *score, uint32_t n, float least, uint32_t *bits,
                           uint32_t *pos)
{
    const vf t     = vf_set1(least);
    uint32_t count = 0, i = 0;

    for (; i + CPU_VEC_W <= n; i += CPU_VEC_W) {
        for (uint32_t m = ix_reach(vf_load(score + i), t); m; m &= m - 1) {
            pos[count] = i + (uint32_t)__builtin_ctz(m);
            memcpy(bits + count, score + pos[count], sizeof(*bits));
            count++;
        }
    }
    for (; i < n; i++) {
        if (score[i] >= least) {
            pos[count] = i;
            memcpy(bits + count, score + i, sizeof(*bits));
            count++;
        }
    }
    return count;
}

static uint32_t ix_best(const float *score, uint32_t n, uint32_t k, uint32_t *bits, uint32_t *pos)
{
    uint32_t count, least, above, out = 0;

    if (k == 0 || n == 0)
        return 0;
    count = ix_collect(score, n, k < n ? ix_floor(score, n, k, bits) : 0.0f, bits, pos);
    if (count <= k)
        return count;
    least = ix_threshold(bits, count, k, &above);
    for (uint32_t i = 0, ties = k - above; i < count; i++) {
        const bool exact = above == k; /* then all that reach it */

        if (bits[i] < least || (bits[i] == least && !exact && ties == 0))
            continue;
        ties -= bits[i] == least && !exact;
        bits[out] = bits[i];
        pos[out]  = pos[i];
        out++;
    }
    return out;
}

#define CPU_INDEX_TABLE                                                                    \
    {                                                                                      \
        .dots = ix_dots, .weigh = ix_weigh, .mix = ix_mix, .ema = ix_ema, .exps = ix_exps, \
        .best = ix_best, .threshold = ix_threshold                                         \
    }

#endif
