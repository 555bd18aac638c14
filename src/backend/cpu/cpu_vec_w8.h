/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_vec_w8.h - cpu_vec.h for AVX2 with FMA. */
#ifndef KVD_CPU_VEC_W8_H
#define KVD_CPU_VEC_W8_H

#include <immintrin.h>

#define CPU_VEC_W 8
typedef __m256 vf;

CPU_INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
CPU_INLINE void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
CPU_INLINE vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}
CPU_INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
CPU_INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
CPU_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
/* 2^n for t = 0x1.8p23 + n. */
CPU_INLINE vf vf_pow2(vf t)
{
    const __m256i i = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
CPU_INLINE vf vf_load_bf16(const uint16_t *p)
{
    const __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));

    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
/* Rounds to nearest even; NaN becomes quiet. */
CPU_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    const __m256i u   = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i       r   = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));

    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    r = _mm256_srli_epi32(r, 16);
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
CPU_INLINE vf vf_swap1(vf v)
{
    return _mm256_permute_ps(v, 0xb1);
}
CPU_INLINE vf vf_swap2(vf v)
{
    return _mm256_permute_ps(v, 0x4e);
}
CPU_INLINE vf vf_swap4(vf v)
{
    return _mm256_permute2f128_ps(v, v, 0x01);
}
CPU_INLINE vf vf_swap8(vf v)
{
    return v; /* never reached: a group is at most 8 lanes */
}
CPU_INLINE vf vf_add_half(vf a, vf b)
{
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
CPU_INLINE vf vf_add_pd(vf a, vf b)
{
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);

    return _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)) + _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
}
CPU_INLINE vf vf_add_ps(vf a, vf b)
{
    return _mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xdd);
}
/* Lane i of the result is the sum of all lanes of a[i]; the same additions for every i. */
CPU_INLINE vf vf_sum_each(const vf a[CPU_VEC_W])
{
    const vf h0 = vf_add_half(a[0], a[4]), h1 = vf_add_half(a[1], a[5]);
    const vf h2 = vf_add_half(a[2], a[6]), h3 = vf_add_half(a[3], a[7]);

    return vf_add_ps(vf_add_pd(h0, h1), vf_add_pd(h2, h3));
}

#endif
