/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_quant_avx512vnni.c - activations to int8 groups.  See cpu_dot.h.
 *
 * Blocks of 32 with scale absmax / 127, rounded to nearest.  A block whose absmax is below TINY
 * becomes zero, so that no reciprocal overflows. */
#include <immintrin.h>

#include "backend/cpu/cpu_dot_avx512vnni.h"

#define TINY 1e-30F

/* Largest absolute value, or NaN: as integers, whose order is that of magnitudes. */
DOT_INLINE float max_magnitude(__m512 x0, __m512 x1)
{
    const __m512i a = _mm512_castps_si512(_mm512_abs_ps(x0));
    const __m512i b = _mm512_castps_si512(_mm512_abs_ps(x1));

    return _mm_cvtss_f32(
        _mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)))));
}

DOT_INLINE void quantize_block(const float *x, cpu_xgroup *g, uint32_t b)
{
    const __m512  x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
    const float   amax = max_magnitude(x0, x1);
    const __m512  inv  = _mm512_set1_ps(amax <= TINY ? 0.0F : 127.0F / amax);
    const __m512i low  = _mm512_set1_epi32(-127); /* what NaN becomes, times d = NaN */
    const __m512i i0   = _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x0, inv)), low);
    const __m512i i1   = _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x1, inv)), low);
    const __m128i q0 = _mm512_cvtepi32_epi8(i0), q1 = _mm512_cvtepi32_epi8(i1);
    const int     s0 = _mm512_reduce_add_epi32(i0), s1 = _mm512_reduce_add_epi32(i1);
    int8_t       *split = g->split + 128 * (b / 4) + 16 * (b % 4);
    const float   d     = amax <= TINY ? 0.0F : amax / 127.0F;

    _mm_store_si128((__m128i *)(void *)(g->q + 32 * b), q0);
    _mm_store_si128((__m128i *)(void *)(g->q + 32 * b + 16), q1);
    _mm_store_si128((__m128i *)(void *)split, q0);
    _mm_store_si128((__m128i *)(void *)(split + 64), q1);
    g->d[b]            = d;
    g->half[2 * b]     = d * (float)s0;
    g->half[2 * b + 1] = d * (float)s1;
    g->sum[b]          = d * (float)(s0 + s1);
}

void cpu_quantize_avx512vnni(const float *x, uint32_t n_col, cpu_xgroup *out)
{
    const uint32_t n_block = n_col / 32;

    if (n_block % 8)
        memset(out + n_block / 8, 0, sizeof(*out));
    for (uint32_t b = 0; b < n_block; b++)
        quantize_block(x + (uint64_t)32 * b, out + b / 8, b % 8);
}
