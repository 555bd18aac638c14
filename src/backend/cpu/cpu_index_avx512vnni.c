/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_avx512vnni.c - dot products over integer planes by VPDPBUSD.
 *
 * For a group of units that share channel parameters: with t_i = q_i scale_i, q . unit is
 *   sum_i t_i (code_i - c) + sum_i q_i (min_i + c scale_i),   c the middle code,
 * where the first sum takes t in whole steps of max|t| / 127 and the second is exact.  Centring
 * halves what rounding t costs.  Against 8-bit codes t has a second part, 1/128 of the step.
 * Thread: any. */
#include "backend/cpu/cpu_index_kernel.h"
#include "backend/cpu/cpu_vec.h"

#define VNNI_VECS (KVD_HEAD_DIM_MAX / 16u)

/* One group's queries in steps, for up to 8 heads. */
typedef struct vnni_group {
    int8_t q[2][CPU_INDEX_HEADS][KVD_HEAD_DIM_MAX];
    float  step[16], base[16]; /* by head: logit = step * dot + base */
} vnni_group;

/* Scales, and minima moved to the middle code, of n_vec x 16 channels; zero past dim_pad. */
CPU_INLINE void vnni_params(const cpu_index_dots *d, uint32_t group, uint32_t n_vec, __m512 *scale,
                            __m512 *mid)
{
    const cpu_index_plane *p = d->p;
    const uint16_t        *par =
        (const uint16_t *)(const void *)(d->lane + p->param_off) + (uint64_t)group * 2 * p->dim_pad;
    const __m512 c = _mm512_set1_ps((float)(1u << (p->bits - 1)));

    for (uint32_t v = 0; v < n_vec; v++) {
        const uint32_t  n  = p->dim_pad - 16 * v;
        const __mmask16 m  = (__mmask16)(n < 16 ? (1u << n) - 1u : 0xffffu);
        const __m256i   sc = _mm256_maskz_loadu_epi16(m, par + 16 * v);
        const __m256i   lo = _mm256_maskz_loadu_epi16(m, par + p->dim_pad + 16 * v);

        scale[v] = _mm512_cvtph_ps(sc);
        mid[v]   = _mm512_fmadd_ps(scale[v], c, _mm512_cvtph_ps(lo));
    }
}

/* Lane i: the largest of a[i]; the order of lanes within does not matter to a maximum. */
CPU_INLINE __m512 vnni_max_each(const __m512 a[CPU_INDEX_HEADS])
{
    __m512 b[4], c[2], x;

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_max_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) /* quarters of lanes 4 i .. 4 i + 3 */
        c[i] = _mm512_max_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
    x = _mm512_max_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x44),
                      _mm512_shuffle_f32x4(c[0], c[1], 0xee)); /* c0 c0 c1 c1 */
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_shuffle_f32x4(x, x, 0x08); /* c0 c1 c0 c0 */
}

CPU_INLINE __m512i vnni_pack(const __m512i x[4])
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i w0 = _mm512_packs_epi32(x[0], x[1]), w1 = _mm512_packs_epi32(x[2], x[3]);

    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(w0, w1));
}

/* Rounds q * scale to steps; returns their sum as 16 partial sums. */
CPU_INLINE __m512 vnni_round(const float *q, const __m512 *scale, uint32_t n_vec, __m512 inv,
                             int8_t *hi)
{
    __m512i sum = _mm512_setzero_si512();

    for (uint32_t v = 0; v < n_vec; v += 4) {
        __m512i x[4];

#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            x[i] = _mm512_setzero_si512();
            if (v + i < n_vec)
                x[i] = _mm512_cvtps_epi32(_mm512_loadu_ps(q + 16 * (v + i)) * scale[v + i] * inv);
        }
        x[0] = vnni_pack(x);
        _mm512_storeu_si512(hi + 16 * v, x[0]);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), x[0]);
    }
    return _mm512_cvtepi32_ps(sum);
}

/* The same with what is left, in 1/128 of the steps. */
static __m512 vnni_round2(const cpu_index_dots *d, const float *q, const __m512 *scale, __m512 inv,
                          int8_t *hi, int8_t *lo)
{
    const uint32_t n      = d->p->dim_pad;
    __m512i        sum[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };

    for (uint32_t i = 0; i < n; i += 64) {
        __m512i x[4], r[4];

        for (uint32_t v = 0; v < 4; v++) {
            __m512 t = _mm512_setzero_ps();

            if (i + 16 * v < n)
                t = _mm512_loadu_ps(q + i + 16 * v) * scale[i / 16 + v] * inv;
            x[v] = _mm512_cvtps_epi32(t);
            r[v] = _mm512_cvtps_epi32((t - _mm512_cvtepi32_ps(x[v])) * _mm512_set1_ps(128.0f));
        }
        x[0] = vnni_pack(x);
        r[0] = vnni_pack(r);
        _mm512_storeu_si512(hi + i, x[0]);
        _mm512_storeu_si512(lo + i, r[0]);
        sum[0] = _mm512_dpbusd_epi32(sum[0], _mm512_set1_epi8(1), x[0]);
        sum[1] = _mm512_dpbusd_epi32(sum[1], _mm512_set1_epi8(1), r[0]);
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[1]), _mm512_set1_ps(0x1p-7f),
                           _mm512_cvtepi32_ps(sum[0]));
}

/* n, the heads, and n_vec are constants after inlining where that pays. */
CPU_INLINE void vnni_quantise(const cpu_index_dots *d, uint32_t h0, uint32_t n, uint32_t n_vec,
                              uint32_t group, vnni_group *g)
{
    __m512 scale[VNNI_VECS], mid[VNNI_VECS], max[CPU_INDEX_HEADS], each[16], step, inv, sums, c;
    float  inv_h[16];

    vnni_params(d, group, n_vec, scale, mid);
#pragma GCC unroll 8
    for (uint32_t h = 0; h < CPU_INDEX_HEADS; h++) {
        const float *q = d->q + (h0 + (h < n ? h : 0)) * d->q_stride;

        max[h] = each[h] = each[8 + h] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (uint32_t v = 0; v < n_vec && h < n; v++) {
            const __m512 x = _mm512_loadu_ps(q + 16 * v);

            max[h]  = _mm512_range_ps(max[h], x * scale[v], 0x0b); /* the larger |.| */
            each[h] = _mm512_fmadd_ps(x, mid[v], each[h]);
        }
    }
    step = _mm512_max_ps(vnni_max_each(max), _mm512_set1_ps(1e-30f)) * _mm512_set1_ps(1.0f / 127);
    inv  = _mm512_rcp14_ps(step); /* a step may be off by 2^-14 of itself: it is what counts */
    _mm512_storeu_ps(inv_h, inv);
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n; h++) {
        const float *q = d->q + (h0 + h) * d->q_stride;

        if (d->p->bits == 8)
            each[8 + h] =
                vnni_round2(d, q, scale, _mm512_set1_ps(inv_h[h]), g->q[0][h], g->q[1][h]);
        else
            each[8 + h] = vnni_round(q, scale, n_vec, _mm512_set1_ps(inv_h[h]), g->q[0][h]);
    }
    sums = vf_sum_each(each); /* q . mid, then the sums of steps */
    c    = _mm512_set1_ps((float)(1u << (d->p->bits - 1))) * step;
    _mm512_storeu_ps(g->step, step);
    _mm512_storeu_ps(g->base, _mm512_fnmadd_ps(c, _mm512_shuffle_f32x4(sums, sums, 0x0e), sums));
}

typedef uint16_t vnni_words __attribute__((vector_size(64)));

CPU_INLINE __m512i vnni_shift(__m512i x, uint32_t n) /* the two compilers' intrinsics disagree */
{
    return (__m512i)((vnni_words)x >> (uint16_t)n);
}

CPU_INLINE __m512i vnni_q(const int8_t *q, uint32_t four)
{
    int32_t x;

    memcpy(&x, q + 4 * (uint64_t)four, sizeof(x));
    return _mm512_set1_epi32(x);
}

/* nt neighbouring tiles for nh heads; bits, nh and nt are constants after inlining. */
CPU_INLINE void vnni_tiles(const cpu_index_dots *d, const vnni_group *g, uint32_t h0, uint32_t tile,
                           uint32_t bits, uint32_t nh, uint32_t nt)
{
    const cpu_index_plane *p     = d->p;
    const uint32_t         parts = bits == 8 ? 2 : 1, n_shift = 8 / bits;
    const uint8_t         *code = d->lane + p->code_off + tile * p->tile_bytes;
    const __m512i          mask = _mm512_set1_epi8((int8_t)((1u << bits) - 1u));
    __m512i                acc[2][CPU_INDEX_HEADS][2];

    for (uint32_t i = 0; i < parts * nh * nt; i++)
        acc[i / (nh * nt)][i / nt % nh][i % nt] = _mm512_setzero_si512();
    for (uint32_t row = 0; row < p->dim_pad / (4 * n_shift); row++) {
        __m512i x[2];

#pragma GCC unroll 2
        for (uint32_t t = 0; t < nt; t++)
            x[t] = _mm512_loadu_si512(code + t * p->tile_bytes + 64 * (uint64_t)row);
#pragma GCC unroll 4
        for (uint32_t s = 0; s < n_shift; s++) {
            __m512i c[2];

#pragma GCC unroll 2
            for (uint32_t t = 0; t < nt; t++)
                c[t] = bits == 8 ? x[t] : _mm512_and_si512(vnni_shift(x[t], s * bits), mask);
#pragma GCC unroll 16
            for (uint32_t i = 0; i < parts * nh; i++) {
                const __m512i q = vnni_q(g->q[i / nh][i % nh], row * n_shift + s);

#pragma GCC unroll 2
                for (uint32_t t = 0; t < nt; t++)
                    acc[i / nh][i % nh][t] = _mm512_dpbusd_epi32(acc[i / nh][i % nh][t], c[t], q);
            }
        }
    }
    for (uint32_t i = 0; i < nh * nt; i++) {
        const uint32_t h = i / nt, t = i % nt;
        float *out = d->out + (uint64_t)(h0 + h) * CPU_INDEX_BLOCK + (tile + t) * CPU_INDEX_TILE;
        __m512 x   = _mm512_cvtepi32_ps(acc[0][h][t]);

        if (parts == 2)
            x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[1][h][t]), _mm512_set1_ps(0x1p-7f), x);
        x = _mm512_fmadd_ps(x, _mm512_set1_ps(g->step[h]), _mm512_set1_ps(g->base[h]));
        if (d->add)
            x = x + _mm512_loadu_ps(out);
        _mm512_storeu_ps(out, x);
    }
}

CPU_INLINE void vnni_heads(const cpu_index_dots *d, const vnni_group *g, uint32_t h0, uint32_t tile,
                           uint32_t bits, uint32_t n, uint32_t nt)
{
    switch (n) {
    case 1:
        vnni_tiles(d, g, h0, tile, bits, 1, nt);
        break;
    case 2:
        vnni_tiles(d, g, h0, tile, bits, 2, nt);
        break;
    case 3:
        vnni_tiles(d, g, h0, tile, bits, 3, nt);
        break;
    case 4:
        vnni_tiles(d, g, h0, tile, bits, 4, nt);
        break;
    case 5:
        vnni_tiles(d, g, h0, tile, bits, 5, nt);
        break;
    case 6:
        vnni_tiles(d, g, h0, tile, bits, 6, nt);
        break;
    case 7:
        vnni_tiles(d, g, h0, tile, bits, 7, nt);
        break;
    default:
        vnni_tiles(d, g, h0, tile, bits, 8, nt);
        break;
    }
}

static void vnni_one(const cpu_index_dots *d, const vnni_group *g, uint32_t h0, uint32_t n,
                     uint32_t tile)
{
    if (d->p->bits == 8)
        vnni_heads(d, g, h0, tile, 8, n, 1);
    else if (d->p->bits == 4)
        vnni_heads(d, g, h0, tile, 4, n, 1);
    else
        vnni_heads(d, g, h0, tile, 2, n, 1);
}

/* Two tiles share the broadcast queries; 8-bit codes have no registers left for that. */
static void vnni_two(const cpu_index_dots *d, const vnni_group *g, uint32_t h0, uint32_t n,
                     uint32_t tile)
{
    if (d->p->bits == 4) {
        vnni_heads(d, g, h0, tile, 4, n, 2);
    } else if (d->p->bits == 2) {
        vnni_heads(d, g, h0, tile, 2, n, 2);
    } else {
        vnni_one(d, g, h0, n, tile);
        vnni_one(d, g, h0, n, tile + 1);
    }
}

static void vnni_heads_of(const cpu_index_dots *d, uint32_t h0, uint32_t n)
{
    const uint32_t per = d->p->group / CPU_INDEX_TILE;
    vnni_group     g;

    for (uint32_t t0 = 0; t0 < d->p->n_unit / CPU_INDEX_TILE; t0 += per) {
        uint32_t tiles = d->tiles >> t0 & ((1u << per) - 1u);

        if (!tiles)
            continue;
        vnni_quantise(d, h0, n, (d->p->dim_pad + 15) / 16, t0 / per, &g);
        for (; tiles; tiles &= tiles - 1) {
            const uint32_t t = (uint32_t)__builtin_ctz(tiles);

            if (tiles >> (t + 1) & 1) {
                vnni_two(d, &g, h0, n, t0 + t);
                tiles &= tiles - 1;
            } else {
                vnni_one(d, &g, h0, n, t0 + t);
            }
        }
    }
}

/* What most models have: INT4 codes of 64 or 128 channels, everything in constants. */
CPU_INLINE void vnni_int4(const cpu_index_dots *d, uint32_t h0, uint32_t n, uint32_t n_vec)
{
    const uint32_t per = d->p->group / CPU_INDEX_TILE;
    vnni_group     g;

    for (uint32_t t0 = 0; t0 < d->p->n_unit / CPU_INDEX_TILE; t0 += per) {
        uint32_t tiles = d->tiles >> t0 & ((1u << per) - 1u);

        if (tiles)
            vnni_quantise(d, h0, n, n_vec, t0 / per, &g);
        for (; tiles; tiles &= tiles - 1) {
            const uint32_t t = (uint32_t)__builtin_ctz(tiles);

            if (tiles >> (t + 1) & 1) {
                vnni_tiles(d, &g, h0, t0 + t, 4, n, 2);
                tiles &= tiles - 1;
            } else {
                vnni_one(d, &g, h0, n, t0 + t);
            }
        }
    }
}

CPU_INLINE void vnni_int4_heads(const cpu_index_dots *d, uint32_t h0, uint32_t n, uint32_t n_vec)
{
    switch (n) {
    case 1:
        vnni_int4(d, h0, 1, n_vec);
        break;
    case 2:
        vnni_int4(d, h0, 2, n_vec);
        break;
    case 3:
        vnni_int4(d, h0, 3, n_vec);
        break;
    case 4:
        vnni_int4(d, h0, 4, n_vec);
        break;
    case 5:
        vnni_int4(d, h0, 5, n_vec);
        break;
    case 6:
        vnni_int4(d, h0, 6, n_vec);
        break;
    case 7:
        vnni_int4(d, h0, 7, n_vec);
        break;
    default:
        vnni_int4(d, h0, 8, n_vec);
        break;
    }
}

void cpu_index_dots_vnni(const cpu_index_dots *d)
{
    for (uint32_t h0 = 0; h0 < d->n_head; h0 += CPU_INDEX_HEADS) {
        const uint32_t n = d->n_head - h0 < CPU_INDEX_HEADS ? d->n_head - h0 : CPU_INDEX_HEADS;

        if (d->p->bits == 4 && d->p->dim_pad == 64)
            vnni_int4_heads(d, h0, n, 4);
        else if (d->p->bits == 4 && d->p->dim_pad == 128)
            vnni_int4_heads(d, h0, n, 8);
        else
            vnni_heads_of(d, h0, n);
    }
}
