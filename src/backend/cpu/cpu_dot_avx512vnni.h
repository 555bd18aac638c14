/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_avx512vnni.h - private to cpu_*_avx512vnni.c: what the dot kernels of this level share.
 *
 * Include only from files that are built for the level. */
#ifndef KVD_CPU_DOT_AVX512VNNI_H
#define KVD_CPU_DOT_AVX512VNNI_H

#include "backend/cpu/cpu_dot_tile.h"
#include <immintrin.h>

void cpu_quantize_avx512vnni(const float *x, uint32_t n_col, cpu_xgroup *out);
void cpu_dot_q2_k_avx512vnni(const cpu_dot_job *job);
void cpu_dot_q3_k_avx512vnni(const cpu_dot_job *job);
void cpu_dot_q4_k_avx512vnni(const cpu_dot_job *job);
void cpu_dot_q5_k_avx512vnni(const cpu_dot_job *job);
void cpu_dot_q6_k_avx512vnni(const cpu_dot_job *job);
void cpu_dot_flt_avx512vnni(const cpu_dot_job *job);

DOT_INLINE __m128i dot_load16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

DOT_INLINE __m256i dot_load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Products with upper and lower bytes of activations as one. */
DOT_INLINE __m512i dot_pairs(__m512i hi, __m512i lo)
{
    return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo);
}

/* Element r of each lane: the sum of that lane of acc[r]. */
DOT_INLINE __m512 dot_fold_rows(const __m512 acc[CPU_DOT_ROWS])
{
    const __m512 a =
        _mm512_add_ps(_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1]));
    const __m512 b =
        _mm512_add_ps(_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3]));

    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

DOT_INLINE __m128 dot_sum_lanes(__m512 v)
{
    const __m256 w = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));

    return _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

#endif
