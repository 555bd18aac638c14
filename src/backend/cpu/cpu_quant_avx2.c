/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_quant_avx2.c - activations to groups of two int8 each.  See cpu_dot.h.
 *
 * Blocks of 32 with scale absmax / 32512 (127 * 256), rounded to nearest.  A block whose absmax is
 * below TINY becomes zero, so that no reciprocal overflows. */
#include "backend/cpu/cpu_dot_avx2.h"

#define TINY 1e-30F

/* Largest lane, or NaN: magnitudes as integers have the same order. */
DOT_INLINE float max_lane(__m256i v)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

/* Sums of 16 int8. */
DOT_INLINE int sum_bytes(__m128i q)
{
    const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), q);
    __m128i       v     = _mm_madd_epi16(pairs, _mm_set1_epi16(1));

    v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtsi128_si32(v) + _mm_extract_epi32(v, 1);
}

/* 16 words to bytes. */
DOT_INLINE __m128i pack_16(__m256i w)
{
    return _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

/* 16 floats to upper and lower bytes; what NaN becomes is the lowest, times d = NaN.  A lower byte
 * of -128 becomes -127, since VPSIGNB cannot turn it round: an error of 2^-15 of the largest. */
DOT_INLINE void round_16(__m256 x0, __m256 x1, __m256 inv, __m128i *hi, __m128i *lo)
{
    const __m256i low = _mm256_set1_epi32(-CPU_XQUANT_MAX);
    const __m256i i0  = _mm256_max_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x0, inv)), low);
    const __m256i i1  = _mm256_max_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x1, inv)), low);
    const __m256i w   = _mm256_permute4x64_epi64(_mm256_packs_epi32(i0, i1), 0xd8);
    const __m256i h   = _mm256_srai_epi16(_mm256_add_epi16(w, _mm256_set1_epi16(128)), 8);
    const __m256i l   = _mm256_sub_epi16(w, _mm256_slli_epi16(h, 8));

    *hi = pack_16(h);
    *lo = pack_16(_mm256_max_epi16(l, _mm256_set1_epi16(-127)));
}

DOT_INLINE void store_16(int8_t *at, __m128i q)
{
    _mm_store_si128((__m128i *)(void *)at, q);
}

static void quantize_block(const float *x, cpu_xgroup *g, uint32_t b)
{
    const __m256i  magnitude = _mm256_set1_epi32(0x7fffffff);
    const uint32_t at = 32 * b, split = 128 * (b / 4) + 16 * (b % 4);
    __m256         v[4], inv;
    __m256i        max = _mm256_setzero_si256();
    float          amax, d;
    __m128i        hi[2], lo[2];
    int            s0, s1;

    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        max  = _mm256_max_epi32(max, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    amax = max_lane(max);
    d    = amax <= TINY ? 0.0F : amax / (float)CPU_XQUANT_MAX;
    inv  = _mm256_set1_ps(amax <= TINY ? 0.0F : (float)CPU_XQUANT_MAX / amax);
    round_16(v[0], v[1], inv, &hi[0], &lo[0]);
    round_16(v[2], v[3], inv, &hi[1], &lo[1]);
    s0 = 256 * sum_bytes(hi[0]) + sum_bytes(lo[0]);
    s1 = 256 * sum_bytes(hi[1]) + sum_bytes(lo[1]);
    for (uint32_t i = 0; i < 2; i++) {
        store_16(g->q + at + 16 * i, hi[i]);
        store_16(g->q_lo + at + 16 * i, lo[i]);
        store_16(g->split + split + 64 * i, hi[i]);
        store_16(g->split_lo + split + 64 * i, lo[i]);
    }
    g->d[b]            = d;
    g->half[2 * b]     = d * (float)s0;
    g->half[2 * b + 1] = d * (float)s1;
    g->sum[b]          = d * (float)(s0 + s1);
}

void cpu_quantize_avx2(const float *x, uint32_t n_col, cpu_xgroup *out)
{
    const uint32_t n_block = n_col / 32;

    if (n_block % 8)
        memset(out + n_block / 8, 0, sizeof(*out));
    for (uint32_t b = 0; b < n_block; b++)
        quantize_block(x + (uint64_t)32 * b, out + b / 8, b % 8);
}
