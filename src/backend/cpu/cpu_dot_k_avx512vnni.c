/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_k_avx512vnni.c - dot products for the types of 256-element blocks: Q2_K ... Q6_K.
 *
 * A block of a row becomes four vectors of unsigned quants in order, and a vector of 16 floats that
 * holds its scales: those of 16 sub-blocks (Q2_K Q3_K Q6_K, with a second vector of offsets), or
 * eight scales and eight mins of sub-blocks of 32 (Q4_K Q5_K), which multiply d and sum of an
 * activation group as they lie.  See cpu_dot.h. */
#include <immintrin.h>

#include "backend/cpu/cpu_dot_avx512vnni.h"
#include "base/dtype_blocks.h"

#define N_VEC 4 /* vectors of 64 quants in a block */

typedef struct super_block {
    __m512i q[N_VEC];
    __m512  scale;
    __m512  offset; /* per 16 elements; not for pairs */
} super_block;

typedef struct super_kind {
    uint32_t block_bytes;
    bool     pairs; /* scale holds 8 scales, 8 mins */
    void (*load)(const uint8_t *block, super_block *b);
} super_kind;

/* ---- pieces ---------------------------------------------------------------------- */

DOT_INLINE int dot_load2(const uint8_t *p)
{
    uint16_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* An f16 through a vector. */
DOT_INLINE __m512 f16_all(const uint8_t *p)
{
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(dot_load2(p))));
}

/* Two f16 that lie together: the first through the lower half. */
DOT_INLINE __m512 f16_halves(const uint8_t *p)
{
    const __m256i pick = _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100,
                                            0x0302030203020302, 0x0302030203020302);

    return _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(dot_load4(p)), pick));
}

DOT_INLINE __m512 u8_to_f32(__m128i v)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(v));
}

DOT_INLINE __m512 i8_to_f32(__m128i v)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
}

/* Per 16-bit element: shift of the lower and of the upper 32 bytes. */
DOT_INLINE __m512i shift_halves(short low, short high)
{
    return _mm512_inserti64x4(_mm512_set1_epi16(low), _mm256_set1_epi16(high), 1);
}

/* 32 bytes twice, shifted right by low and by high. */
DOT_INLINE __m512i load_shifted(const uint8_t *p, short low, short high)
{
    return _mm512_srlv_epi16(_mm512_broadcast_i64x4(dot_load32(p)), shift_halves(low, high));
}

/* ---- types ----------------------------------------------------------------------- */

/* 8 scales then 8 mins as floats: see kvd_q4_k_scales(). */
DOT_INLINE __m512 load_scale_pairs(const uint8_t *packed)
{
    const uint32_t w0 = (uint32_t)dot_load4(packed), w1 = (uint32_t)dot_load4(packed + 4);
    const uint32_t w2 = (uint32_t)dot_load4(packed + 8);
    const uint32_t sc = (w2 & 0x0f0f0f0fU) | ((w0 >> 2) & 0x30303030U);
    const uint32_t mn = ((w2 >> 4) & 0x0f0f0f0fU) | ((w1 >> 2) & 0x30303030U);

    return u8_to_f32(
        _mm_setr_epi32((int)(w0 & 0x3f3f3f3fU), (int)sc, (int)(w1 & 0x3f3f3f3fU), (int)mn));
}

DOT_INLINE void load_q4_k(const uint8_t *block, super_block *b)
{
    const kvd_block_q4_k *k = (const void *)block;

    for (uint32_t v = 0; v < N_VEC; v++)
        b->q[v] = _mm512_and_si512(load_shifted(k->qs + 32 * v, 0, 4), _mm512_set1_epi8(15));
    b->scale = _mm512_mul_ps(f16_halves(block), load_scale_pairs(k->scales));
}

DOT_INLINE void load_q5_k(const uint8_t *block, super_block *b)
{
    const kvd_block_q5_k *k    = (const void *)block;
    const __m512i         high = _mm512_broadcast_i64x4(dot_load32(k->qh));

    for (uint32_t v = 0; v < N_VEC; v++) {
        const __m512i   bit = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << 2 * v)),
                                                 _mm256_set1_epi8((char)(2 << 2 * v)), 1);
        const __mmask64 set = _mm512_test_epi8_mask(high, bit);
        const __m512i   q =
            _mm512_and_si512(load_shifted(k->qs + 32 * v, 0, 4), _mm512_set1_epi8(15));

        b->q[v] = _mm512_mask_add_epi8(q, set, q, _mm512_set1_epi8(16));
    }
    b->scale = _mm512_mul_ps(f16_halves(block), load_scale_pairs(k->scales));
}

DOT_INLINE void load_q6_k(const uint8_t *block, super_block *b)
{
    const kvd_block_q6_k *k    = (const void *)block;
    const __m512i         low4 = _mm512_set1_epi8(15), high2 = _mm512_set1_epi8(0x30);

    for (uint32_t h = 0; h < 2; h++) {
        const __m512i ql = _mm512_loadu_si512(k->ql + 64 * h);
        const __m512i qh = _mm512_broadcast_i64x4(dot_load32(k->qh + 32 * h));
        const __m512i h0 = _mm512_sllv_epi16(qh, shift_halves(4, 2));
        const __m512i h1 = _mm512_srlv_epi16(qh, shift_halves(0, 2));

        b->q[2 * h]     = _mm512_or_si512(_mm512_and_si512(ql, low4), _mm512_and_si512(h0, high2));
        b->q[2 * h + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(ql, 4), low4),
                                          _mm512_and_si512(h1, high2));
    }
    b->scale  = _mm512_mul_ps(f16_all((const uint8_t *)&k->d),
                              i8_to_f32(dot_load16((const uint8_t *)k->scales)));
    b->offset = _mm512_mul_ps(b->scale, _mm512_set1_ps(-32.0F));
}

DOT_INLINE void load_q2_k(const uint8_t *block, super_block *b)
{
    const kvd_block_q2_k *k  = (const void *)block;
    const __m128i         sc = dot_load16(k->scales), low4 = _mm_set1_epi8(15);
    const __m512          dmin = f16_all((const uint8_t *)&k->dmin);
    const __m512i         low2 = _mm512_set1_epi8(3);

    for (uint32_t h = 0; h < 2; h++) {
        b->q[2 * h]     = _mm512_and_si512(load_shifted(k->qs + 32 * h, 0, 2), low2);
        b->q[2 * h + 1] = _mm512_and_si512(load_shifted(k->qs + 32 * h, 4, 6), low2);
    }
    b->scale  = _mm512_mul_ps(f16_all((const uint8_t *)&k->d), u8_to_f32(_mm_and_si128(sc, low4)));
    b->offset = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), dmin),
                              u8_to_f32(_mm_and_si128(_mm_srli_epi16(sc, 4), low4)));
}

/* 16 scales less 32 as floats: see kvd_q3_k_scales(). */
DOT_INLINE __m512 load_scales_q3_k(const uint8_t *packed)
{
    const __m128i nib = _mm_loadl_epi64((const __m128i *)(const void *)packed);
    const __m128i top =
        _mm_srlv_epi32(_mm_set1_epi32(dot_load4(packed + 8)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i lo =
        _mm_and_si128(_mm_unpacklo_epi64(nib, _mm_srli_epi16(nib, 4)), _mm_set1_epi8(15));
    const __m128i hi = _mm_slli_epi16(_mm_and_si128(top, _mm_set1_epi8(3)), 4);

    return i8_to_f32(_mm_sub_epi8(_mm_or_si128(lo, hi), _mm_set1_epi8(32)));
}

DOT_INLINE void load_q3_k(const uint8_t *block, super_block *b)
{
    const kvd_block_q3_k *k    = (const void *)block;
    const __m512i         low2 = _mm512_set1_epi8(3), four = _mm512_set1_epi8(4);
    const __m512i         high = _mm512_broadcast_i64x4(dot_load32(k->hmask));

    for (uint32_t v = 0; v < N_VEC; v++) {
        const __m512i   bit = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << 2 * v)),
                                                 _mm256_set1_epi8((char)(2 << 2 * v)), 1);
        const __mmask64 set = _mm512_test_epi8_mask(high, bit);
        const short     at  = (short)(4 * (v % 2));
        const __m512i   q =
            _mm512_and_si512(load_shifted(k->qs + 32 * (v / 2), at, (short)(at + 2)), low2);

        b->q[v] = _mm512_mask_add_epi8(q, set, q, four);
    }
    b->scale  = _mm512_mul_ps(f16_all((const uint8_t *)&k->d), load_scales_q3_k(k->scales));
    b->offset = _mm512_mul_ps(b->scale, _mm512_set1_ps(-4.0F));
}

/* ---- the kernel ------------------------------------------------------------------ */

/* The scales of vector number v, from 8 or 16 of them. */
DOT_INLINE __m512 spread_scales(__m512 scale, uint32_t v, bool pairs)
{
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i idx =
        pairs ? _mm512_add_epi32(_mm512_srli_epi32(lane, 1), _mm512_set1_epi32((int)(2 * v)))
              : _mm512_add_epi32(lane, _mm512_set1_epi32((int)(4 * v)));

    return _mm512_permutexvar_ps(idx, scale);
}

/* One row, one token, one block. */
DOT_INLINE __m512 super_dot(const super_kind *k, const super_block *b, const cpu_xgroup *x,
                            __m512 xd, __m512 acc)
{
    const __m512 scale = _mm512_mul_ps(b->scale, xd);

    if (k->pairs)
        acc = _mm512_mask_sub_ps(acc, 0xff00, acc, scale);
    else
        acc = _mm512_fmadd_ps(b->offset, _mm512_load_ps(x->half), acc);
    DOT_UNROLL
    for (uint32_t v = 0; v < N_VEC; v++) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i dot =
            dot_pairs(_mm512_dpbusd_epi32(zero, b->q[v], _mm512_load_si512(x->q + 64 * v)),
                      _mm512_dpbusd_epi32(zero, b->q[v], _mm512_load_si512(x->q_lo + 64 * v)));

        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), spread_scales(scale, v, k->pairs), acc);
    }
    return acc;
}

DOT_INLINE __m512 super_x_scales(const super_kind *k, const cpu_xgroup *x)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);

    if (k->pairs)
        return _mm512_load_ps(x->d); /* and sum */
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_load_ps(x->d)));
}

DOT_INLINE void super_tile(const super_kind *k, const cpu_dot_job *job, const dot_tile *tile,
                           uint32_t n_token, float (*sum)[CPU_DOT_ROWS])
{
    __m512   acc[CPU_DOT_TOKENS][CPU_DOT_ROWS], xd[CPU_DOT_TOKENS];
    uint64_t off = 0;

    for (uint32_t t = 0; t < n_token; t++)
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
            acc[t][r] = _mm512_setzero_ps();
    for (uint32_t g = 0; g < job->n_col / CPU_XGROUP; g++, off += k->block_bytes) {
        for (uint32_t t = 0; t < n_token; t++)
            xd[t] = super_x_scales(k, tile->x[t] + g);
        DOT_UNROLL
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
            super_block b;

            dot_fetch(tile, CPU_DOT_ROWS * off + r * k->block_bytes, k->block_bytes);
            k->load(tile->row[r] + off, &b);
            for (uint32_t t = 0; t < n_token; t++)
                acc[t][r] = super_dot(k, &b, tile->x[t] + g, xd[t], acc[t][r]);
        }
    }
    for (uint32_t t = 0; t < n_token; t++)
        _mm_storeu_ps(sum[t], dot_sum_lanes(dot_fold_rows(acc[t])));
}

#define SUPER_KERNEL(type, pairs)                                                           \
    static const super_kind kind_##type = { sizeof(kvd_block_##type), pairs, load_##type }; \
    DOT_KERNEL(cpu_dot_##type##_avx512vnni, super_tile, &kind_##type, 4)

SUPER_KERNEL(q2_k, false)
SUPER_KERNEL(q3_k, false)
SUPER_KERNEL(q4_k, true)
SUPER_KERNEL(q5_k, true)
SUPER_KERNEL(q6_k, false)
