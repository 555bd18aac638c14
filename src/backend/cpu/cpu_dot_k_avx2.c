/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_k_avx2.c - dot products for the types of 256-element blocks: Q2_K ... Q6_K.
 *
 * 32 elements at a time.  Sub-blocks of 16 (Q2_K Q3_K Q6_K) are scaled as integers, in the
 * instruction that adds up pairs anyway; those of 32 (Q4_K Q5_K) as floats.  Quants are unsigned,
 * at most 63, so no sum of 16 bits saturates, nor does 256 times a scaled one 32 bits; what they
 * are off by is an offset per sub-block that meets the activations' sums.  See cpu_dot.h. */
#include "backend/cpu/cpu_dot_avx2.h"
#include "base/dtype_blocks.h"

#define N_PART 8 /* of 32 elements */

typedef struct super_scales {
    __m256  scale;     /* float, per part: times d only where integer scales are used */
    __m256  offset[2]; /* per part (offset[0]), or per 16 elements where integer scales are used */
    __m128i integer;   /* 16 int8 */
} super_scales;

typedef struct super_kind {
    uint32_t block_bytes;
    bool     by_16; /* sub-blocks of 16 with integer scales */
    void (*scales)(const uint8_t *block, super_scales *s);
    __m256i (*quants)(const uint8_t *block, uint32_t part);
} super_kind;

/* ---- pieces ---------------------------------------------------------------------- */

DOT_INLINE float f16_value(const uint8_t *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof(h));
    return _cvtsh_ss(h);
}

DOT_INLINE __m256 i8_to_f32(__m128i v)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
}

/* Bits shift .. of 32 bytes. */
DOT_INLINE __m256i load_bits(const uint8_t *p, uint32_t shift, char mask)
{
    return _mm256_and_si256(_mm256_srl_epi16(dot_load32(p), _mm_cvtsi32_si128((int)shift)),
                            _mm256_set1_epi8(mask));
}

/* value in each byte of which bit number bit of p is set. */
DOT_INLINE __m256i load_bit(const uint8_t *p, uint32_t bit, char value)
{
    const __m256i one = _mm256_set1_epi8((char)(1U << bit));

    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(dot_load32(p), one), one),
                            _mm256_set1_epi8(value));
}

/* Integer scales, offsets f times them. */
DOT_INLINE void set_by_16(super_scales *s, float d, __m128i integer, float f, __m128i by)
{
    const __m256 v = _mm256_set1_ps(f);

    s->scale     = _mm256_set1_ps(d);
    s->integer   = integer;
    s->offset[0] = _mm256_mul_ps(v, i8_to_f32(by));
    s->offset[1] = _mm256_mul_ps(v, i8_to_f32(_mm_unpackhi_epi64(by, by)));
}

/* ---- types ----------------------------------------------------------------------- */

DOT_INLINE void scales_q2_k(const uint8_t *block, super_scales *s)
{
    const kvd_block_q2_k *b    = (const void *)block;
    const __m128i         low4 = _mm_set1_epi8(15), v = dot_load16(b->scales);

    set_by_16(s, f16_value((const uint8_t *)&b->d), _mm_and_si128(v, low4),
              -f16_value((const uint8_t *)&b->dmin), _mm_and_si128(_mm_srli_epi16(v, 4), low4));
}

DOT_INLINE __m256i quants_q2_k(const uint8_t *block, uint32_t part)
{
    const kvd_block_q2_k *b = (const void *)block;

    return load_bits(b->qs + 32 * (part / 4), 2 * (part % 4), 3);
}

DOT_INLINE void scales_q3_k(const uint8_t *block, super_scales *s)
{
    const kvd_block_q3_k *b   = (const void *)block;
    const float           d   = f16_value((const uint8_t *)&b->d);
    const __m128i         nib = _mm_loadl_epi64((const __m128i *)(const void *)b->scales);
    const __m128i         top =
        _mm_srlv_epi32(_mm_set1_epi32(dot_load4(b->scales + 8)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i lo =
        _mm_and_si128(_mm_unpacklo_epi64(nib, _mm_srli_epi16(nib, 4)), _mm_set1_epi8(15));
    const __m128i hi = _mm_slli_epi16(_mm_and_si128(top, _mm_set1_epi8(3)), 4);
    const __m128i sc = _mm_sub_epi8(_mm_or_si128(lo, hi), _mm_set1_epi8(32));

    set_by_16(s, d, sc, -4.0F * d, sc);
}

DOT_INLINE __m256i quants_q3_k(const uint8_t *block, uint32_t part)
{
    const kvd_block_q3_k *b = (const void *)block;

    return _mm256_or_si256(load_bits(b->qs + 32 * (part / 4), 2 * (part % 4), 3),
                           load_bit(b->hmask, part, 4));
}

DOT_INLINE void scales_q6_k(const uint8_t *block, super_scales *s)
{
    const kvd_block_q6_k *b  = (const void *)block;
    const float           d  = f16_value((const uint8_t *)&b->d);
    const __m128i         sc = dot_load16((const uint8_t *)b->scales);

    set_by_16(s, d, sc, -32.0F * d, sc);
}

DOT_INLINE __m256i quants_q6_k(const uint8_t *block, uint32_t part)
{
    const kvd_block_q6_k *b    = (const void *)block;
    const uint32_t        half = part / 4, j = part % 4;

    return _mm256_or_si256(load_bits(b->ql + 64 * half + 32 * (j % 2), 4 * (j / 2), 15),
                           _mm256_slli_epi16(load_bits(b->qh + 32 * half, 2 * j, 3), 4));
}

/* 8 scales and 8 mins: see kvd_q4_k_scales(). */
DOT_INLINE void scales_q4_k(const uint8_t *block, super_scales *s)
{
    const kvd_block_q4_k *b = (const void *)block;
    const uint32_t w0 = (uint32_t)dot_load4(b->scales), w1 = (uint32_t)dot_load4(b->scales + 4);
    const uint32_t w2 = (uint32_t)dot_load4(b->scales + 8);
    const uint32_t sc = (w2 & 0x0f0f0f0fU) | ((w0 >> 2) & 0x30303030U);
    const uint32_t mn = ((w2 >> 4) & 0x0f0f0f0fU) | ((w1 >> 2) & 0x30303030U);

    s->scale     = _mm256_mul_ps(_mm256_set1_ps(f16_value((const uint8_t *)&b->d)),
                                 i8_to_f32(_mm_setr_epi32((int)(w0 & 0x3f3f3f3fU), (int)sc, 0, 0)));
    s->offset[0] = _mm256_mul_ps(_mm256_set1_ps(-f16_value((const uint8_t *)&b->dmin)),
                                 i8_to_f32(_mm_setr_epi32((int)(w1 & 0x3f3f3f3fU), (int)mn, 0, 0)));
}

DOT_INLINE __m256i quants_q4_k(const uint8_t *block, uint32_t part)
{
    const kvd_block_q4_k *b = (const void *)block;

    return load_bits(b->qs + 32 * (part / 2), 4 * (part % 2), 15);
}

DOT_INLINE __m256i quants_q5_k(const uint8_t *block, uint32_t part)
{
    const kvd_block_q5_k *b = (const void *)block;

    return _mm256_or_si256(load_bits(b->qs + 32 * (part / 2), 4 * (part % 2), 15),
                           load_bit(b->qh, part, 16));
}

/* ---- the kernel ------------------------------------------------------------------ */

/* Scales of the two halves of a part, one per 16 products. */
DOT_INLINE __m256i part_scales(__m128i integer, uint32_t part)
{
    const __m128i two = _mm_setr_epi32(0, 0, 0x01010101, 0x01010101);

    return _mm256_cvtepi8_epi16(
        _mm_shuffle_epi8(integer, _mm_add_epi8(two, _mm_set1_epi8((char)(2 * part)))));
}

/* One row meets a block of each token; float scales times d wait in memory to be broadcast. */
DOT_INLINE void super_row(const super_kind *k, const uint8_t *block, const cpu_xgroup *const *x,
                          uint32_t n_token, uint32_t r, __m256 (*acc)[CPU_DOT_ROWS])
{
    _Alignas(32) float scale[CPU_DOT_TOKENS][N_PART];
    super_scales       s;

    k->scales(block, &s);
    for (uint32_t t = 0; t < n_token; t++) {
        const float *sum = k->by_16 ? x[t]->half : x[t]->sum;

        _mm256_store_ps(scale[t], _mm256_mul_ps(s.scale, _mm256_load_ps(x[t]->d)));
        acc[t][r] = _mm256_fmadd_ps(s.offset[0], _mm256_load_ps(sum), acc[t][r]);
        if (k->by_16)
            acc[t][r] = _mm256_fmadd_ps(s.offset[1], _mm256_load_ps(sum + 8), acc[t][r]);
    }
    DOT_UNROLL
    for (uint32_t p = 0; p < N_PART; p++) {
        const __m256i q  = k->quants(block, p);
        const __m256i by = k->by_16 ? part_scales(s.integer, p) : _mm256_set1_epi16(1);

        for (uint32_t t = 0; t < n_token; t++) {
            const __m256i hi =
                _mm256_madd_epi16(_mm256_maddubs_epi16(q, dot_load32(x[t]->q + 32 * p)), by);
            const __m256i lo =
                _mm256_madd_epi16(_mm256_maddubs_epi16(q, dot_load32(x[t]->q_lo + 32 * p)), by);

            acc[t][r] =
                _mm256_fmadd_ps(dot_pairs(hi, lo), _mm256_broadcast_ss(&scale[t][p]), acc[t][r]);
        }
    }
}

DOT_INLINE void super_tile(const super_kind *k, const cpu_dot_job *job, const dot_tile *tile,
                           uint32_t n_token, float (*sum)[CPU_DOT_ROWS])
{
    __m256   acc[CPU_DOT_TOKENS][CPU_DOT_ROWS];
    uint64_t off = 0;

    for (uint32_t t = 0; t < n_token; t++)
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
            acc[t][r] = _mm256_setzero_ps();
    for (uint32_t g = 0; g < job->n_col / CPU_XGROUP; g++, off += k->block_bytes) {
        const cpu_xgroup *x[CPU_DOT_TOKENS];

        for (uint32_t t = 0; t < n_token; t++)
            x[t] = tile->x[t] + g;
        DOT_UNROLL
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
            dot_fetch(tile, CPU_DOT_ROWS * off + r * k->block_bytes, k->block_bytes);
            super_row(k, tile->row[r] + off, x, n_token, r, acc);
        }
    }
    for (uint32_t t = 0; t < n_token; t++)
        _mm_storeu_ps(sum[t], dot_fold_rows(acc[t]));
}

#define SUPER_KERNEL(type, by_16, scales)                                            \
    static const super_kind kind_##type = { sizeof(kvd_block_##type), by_16, scales, \
                                            quants_##type };                         \
    DOT_KERNEL(cpu_dot_##type##_avx2, super_tile, &kind_##type, 2)

SUPER_KERNEL(q2_k, true, scales_q2_k)
SUPER_KERNEL(q3_k, true, scales_q3_k)
SUPER_KERNEL(q4_k, false, scales_q4_k)
SUPER_KERNEL(q5_k, false, scales_q4_k)
SUPER_KERNEL(q6_k, true, scales_q6_k)
