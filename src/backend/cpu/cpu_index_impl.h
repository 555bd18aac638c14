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

/* Channels' values to the lanes of eight heads each: two channels, one, or half of one. */
#if CPU_VEC_W == 16
#define IX_SPREAD 1
CPU_INLINE vf ix_spread(const float *c)
{
    return _mm512_insertf32x8(_mm512_set1_ps(c[0]), _mm256_set1_ps(c[1]), 1);
}
#else
#define IX_SPREAD (CPU_INDEX_HEADS / CPU_VEC_W)
CPU_INLINE vf ix_spread(const float *c)
{
    return vf_set1(c[0]);
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

/* exp(x) of x <= 0 in relative error 2e-7: what weights need, in two thirds of vf_exp's work.  A
 * NaN stays one; below -87 it is as good as none. */
#if CPU_VEC_W == 16
CPU_INLINE vf ix_exp(vf x)
{
    const vf magic = vf_set1(0x1.8p23f);
    vf       n, r, p;

    x = vf_max(vf_set1(-87.3f), x);
    n = vf_fma(x, vf_set1(0x1.715476p+0f), magic) - magic;
    r = vf_fma(n, vf_set1(-0x1.62e43p-1f), x);
    p = vf_set1(0.0083125f); /* (exp(r) - 1 - r) / r^2 for |r| <= ln(2)/2 */
    p = vf_fma(p, r, vf_set1(0.04189033f));
    p = vf_fma(p, r, vf_set1(0.16667115f));
    p = vf_fma(p, r, vf_set1(0.4999923f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return _mm512_scalef_ps(p, n);
}
#else
CPU_INLINE vf ix_exp(vf x)
{
    return vf_exp(x);
}
#endif

/* ---- dot products ---------------------------------------------------------------- */

/* Channels' scales times queries, heads side by side, and the minima's part of the sum. */
typedef struct ix_fold {
    float q[KVD_HEAD_DIM_MAX][CPU_INDEX_HEADS];
    float base[CPU_INDEX_HEADS];
} ix_fold;

static void ix_fold_group(const cpu_index_dots *d, const float *qt, uint32_t group, ix_fold *f)
{
    const cpu_index_plane *p = d->p;
    const uint16_t        *par =
        (const uint16_t *)(const void *)(d->lane + p->param_off) + (uint64_t)group * 2 * p->dim_pad;
    float scale[KVD_HEAD_DIM_MAX], min[KVD_HEAD_DIM_MAX], sums[16];
    vf    base[IX_SPREAD] = { vf_set1(0.0f) };

    for (uint32_t c = 0; c < p->dim_pad; c += CPU_VEC_W) { /* past the end lie codes */
        vf_store(scale + c, ix_load_f16(par + c));
        vf_store(min + c, ix_load_f16(par + p->dim_pad + c));
    }
    for (uint32_t v = 1; v < IX_SPREAD; v++)
        base[v] = vf_set1(0.0f);
    for (uint32_t i = 0; i < p->dim_pad * CPU_INDEX_HEADS; i += IX_SPREAD * CPU_VEC_W) {
        const uint32_t c = i / CPU_INDEX_HEADS;

#pragma GCC unroll 2
        for (uint32_t v = 0; v < IX_SPREAD; v++) {
            const vf q = vf_load(qt + i + v * CPU_VEC_W);

            vf_store(f->q[0] + i + v * CPU_VEC_W, q * ix_spread(scale + c));
            base[v] = vf_fma(q, ix_spread(min + c), base[v]);
        }
    }
    memset(sums, 0, sizeof(sums));
    for (uint32_t v = 0; v < IX_SPREAD; v++)
        vf_store(sums + v * CPU_VEC_W, base[v]);
    for (uint32_t h = 0; h < CPU_INDEX_HEADS; h++)
        f->base[h] = sums[h] + sums[8 + h];
}

CPU_INLINE void ix_add(vf *acc, const float *q, vf x, uint32_t n)
{
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n; h++)
        acc[h] = vf_fma(vf_set1(q[h]), x, acc[h]);
}

/* A vector of units for n heads (a constant after inlining, as is bits). */
CPU_INLINE void ix_units(const cpu_index_plane *p, const float *q, const uint8_t *code,
                         uint32_t bits, uint32_t n, vf *acc)
{
    uint32_t c = 0;

    if (bits == 16) {
        for (; c < p->dim; c++)
            ix_add(acc, q + c * CPU_INDEX_HEADS,
                   vf_load_bf16((const uint16_t *)(const void *)code + c * CPU_INDEX_TILE), n);
        return;
    }
    for (; c < p->dim_pad; code += 64) {
        for (uint32_t s = 0; s < 8; s += bits) {
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++, c++)
                ix_add(acc, q + c * CPU_INDEX_HEADS, ix_code(code, s + 8 * r, (1u << bits) - 1u),
                       n);
        }
    }
}

/* One tile for n heads (a constant after inlining). */
CPU_INLINE void ix_tile(const cpu_index_dots *d, const float *q, const float *base, uint32_t h0,
                        uint32_t n, uint32_t tile)
{
    const uint8_t *code = d->lane + d->p->code_off + tile * d->p->tile_bytes;
    const uint32_t bits = d->p->bits;

    for (uint32_t v = 0; v < CPU_INDEX_TILE; v += CPU_VEC_W) {
        vf acc[CPU_INDEX_HEADS];

#pragma GCC unroll 8
        for (uint32_t h = 0; h < n; h++)
            acc[h] = vf_set1(base[h]);
        if (bits == 16)
            ix_units(d->p, q, code + 2 * v, 16, n, acc);
        else if (bits == 8)
            ix_units(d->p, q, code + 4 * v, 8, n, acc);
        else if (bits == 4)
            ix_units(d->p, q, code + 4 * v, 4, n, acc);
        else
            ix_units(d->p, q, code + 4 * v, 2, n, acc);
#pragma GCC unroll 8
        for (uint32_t h = 0; h < n; h++) {
            float *out = d->out + (uint64_t)(h0 + h) * CPU_INDEX_BLOCK + tile * CPU_INDEX_TILE + v;

            if (d->add)
                acc[h] = acc[h] + vf_load(out);
            vf_store(out, acc[h]);
        }
    }
}

static void ix_tile_heads(const cpu_index_dots *d, const float *q, const float *base, uint32_t h0,
                          uint32_t n, uint32_t tile)
{
    switch (n) {
    case 1:
        ix_tile(d, q, base, h0, 1, tile);
        break;
    case 2:
        ix_tile(d, q, base, h0, 2, tile);
        break;
    case 3:
        ix_tile(d, q, base, h0, 3, tile);
        break;
    case 4:
        ix_tile(d, q, base, h0, 4, tile);
        break;
    case 5:
        ix_tile(d, q, base, h0, 5, tile);
        break;
    case 6:
        ix_tile(d, q, base, h0, 6, tile);
        break;
    case 7:
        ix_tile(d, q, base, h0, 7, tile);
        break;
    default:
        ix_tile(d, q, base, h0, 8, tile);
        break;
    }
}

static void ix_dots(const cpu_index_dots *d)
{
    static const float zero[CPU_INDEX_HEADS];
    const uint32_t     per_group = d->p->group / CPU_INDEX_TILE;
    ix_fold            f;

    for (uint32_t h0 = 0; h0 < d->n_head; h0 += CPU_INDEX_HEADS) {
        const uint32_t n      = d->n_head - h0 < CPU_INDEX_HEADS ? d->n_head - h0 : CPU_INDEX_HEADS;
        const float   *qt     = d->qt + (uint64_t)h0 * d->q_stride;
        uint32_t       folded = UINT32_MAX;

        for (uint32_t t = 0; t < d->p->n_unit / CPU_INDEX_TILE; t++) {
            if (!(d->tiles >> t & 1))
                continue;
            if (d->p->elem == KVD_INDEX_BF16) {
                ix_tile_heads(d, qt, zero, h0, n, t);
                continue;
            }
            if (folded != t / per_group)
                ix_fold_group(d, qt, t / per_group, &f);
            folded = t / per_group;
            ix_tile_heads(d, f.q[0], f.base, h0, n, t);
        }
    }
}

/* ---- weights --------------------------------------------------------------------- */

static float ix_scale_sum(float *x, float factor, uint32_t n)
{
    vf sum = vf_set1(0.0f);

    for (uint32_t i = 0; i < n; i += CPU_VEC_W) {
        const vf v = vf_load(x + i) * vf_set1(factor);

        sum = sum + v;
        vf_store(x + i, v);
    }
    return ix_sum_lane(sum);
}

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

static void ix_radius(float *logit, const uint16_t *radius, float q, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += CPU_VEC_W)
        vf_store(logit + i, vf_fma(vf_set1(q), ix_load_f16(radius + i), vf_load(logit + i)));
}

/* Largest of n, a multiple of 16. */
static float ix_max(const float *x, uint32_t n)
{
    vf       m[4] = { vf_load(x), vf_load(x), vf_load(x), vf_load(x) };
    uint32_t i    = 0;

    for (; i + 4 * CPU_VEC_W <= n; i += 4 * CPU_VEC_W) {
#pragma GCC unroll 4
        for (uint32_t v = 0; v < 4; v++)
            m[v] = vf_max(m[v], vf_load(x + i + v * CPU_VEC_W));
    }
    for (; i < n; i += CPU_VEC_W)
        m[0] = vf_max(m[0], vf_load(x + i));
    return ix_max_lane(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
}

static void ix_weigh(cpu_index_weigh *w)
{
    const uint32_t n    = w->n_chunk * w->per_chunk;
    const bool     part = w->lo > 0 || w->hi < w->n_chunk;
    float         *e    = w->per_chunk > 1 ? w->logit : w->e;
    vf             max, sum = vf_set1(0.0f);

    for (uint32_t i = 0; i < n && part; i++) {
        if (i < w->lo * w->per_chunk || i >= w->hi * w->per_chunk)
            w->logit[i] = -HUGE_VALF;
    }
    w->max = ix_max(w->logit, n);
    max    = vf_set1(w->max);
    for (uint32_t i = 0; i < n; i += CPU_VEC_W) {
        const vf x = ix_exp(vf_load(w->logit + i) - max);

        sum = sum + x;
        vf_store(e + i, x);
    }
    if (w->per_chunk > 1)
        ix_sum_tokens(w);
    for (uint32_t c = 0; c < w->n_chunk && part; c++)
        w->e[c] = c < w->lo || c >= w->hi ? 0.0f : w->e[c];
    w->sum = part ? ix_scale_sum(w->e, 1.0f, w->n_chunk) : ix_sum_lane(sum);
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

#define CPU_INDEX_TABLE                                                                           \
    {                                                                                             \
        .dots = ix_dots, .radius = ix_radius, .weigh = ix_weigh, .scale_sum = ix_scale_sum,       \
        .mix = ix_mix, .ema = ix_ema, .exps = ix_exps, .best = ix_best, .threshold = ix_threshold \
    }

#endif
