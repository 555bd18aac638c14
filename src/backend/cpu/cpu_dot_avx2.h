/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_avx2.h - private to cpu_*_avx2.c: what the dot kernels of this level share.
 *
 * Include only from files that are built for the level. */
#ifndef KVD_CPU_DOT_AVX2_H
#define KVD_CPU_DOT_AVX2_H

#include <immintrin.h>

#include "backend/cpu/cpu_dot_tile.h"

void cpu_quantize_avx2(const float *x, uint32_t n_col, cpu_xgroup *out);
void cpu_dot_q2_k_avx2(const cpu_dot_job *job);
void cpu_dot_q3_k_avx2(const cpu_dot_job *job);
void cpu_dot_q4_k_avx2(const cpu_dot_job *job);
void cpu_dot_q5_k_avx2(const cpu_dot_job *job);
void cpu_dot_q6_k_avx2(const cpu_dot_job *job);
void cpu_dot_flt_avx2(const cpu_dot_job *job);

DOT_INLINE __m128i dot_load16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

DOT_INLINE __m256i dot_load32(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* 32 bits to 32 bytes, each 0 or value. */
DOT_INLINE __m256i dot_bits(const uint8_t *p, char value)
{
    const __m256i spread =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i v   = _mm256_shuffle_epi8(_mm256_set1_epi32(dot_load4(p)), spread);

    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit),
                            _mm256_set1_epi8(value));
}

/* Products with upper and lower bytes of activations as one. */
DOT_INLINE __m256 dot_pairs(__m256i hi, __m256i lo)
{
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo));
}

/* The sums of four vectors. */
DOT_INLINE __m128 dot_fold_rows(const __m256 acc[CPU_DOT_ROWS])
{
    const __m256 v = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));

    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

#endif
