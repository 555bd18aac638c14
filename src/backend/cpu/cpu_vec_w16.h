/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_vec_w16.h - cpu_vec.h for AVX-512 F BW DQ VL. */
#ifndef KVD_CPU_VEC_W16_H
#define KVD_CPU_VEC_W16_H

#include <immintrin.h>

#define CPU_VEC_W 16
typedef __m512 vf;

CPU_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
CPU_INLINE void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
CPU_INLINE vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}
CPU_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
CPU_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
CPU_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* 2^n for t = 0x1.8p23 + n. */
CPU_INLINE vf vf_pow2(vf t)
{
    const __m512i i = _mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
CPU_INLINE vf vf_load_bf16(const uint16_t *p)
{
    const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));

    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
/* Rounds to nearest even; NaN becomes quiet. */
CPU_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    const __m512i   u   = _mm512_castps_si512(v);
    const __m512i   odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i         r   = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));

    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
CPU_INLINE vf vf_swap1(vf v)
{
    return _mm512_permute_ps(v, 0xb1);
}
CPU_INLINE vf vf_swap2(vf v)
{
    return _mm512_permute_ps(v, 0x4e);
}
CPU_INLINE vf vf_swap4(vf v)
{
    return _mm512_shuffle_f32x4(v, v, 0xb1);
}
CPU_INLINE vf vf_swap8(vf v)
{
    return _mm512_shuffle_f32x4(v, v, 0x4e);
}
CPU_INLINE vf vf_add_44(vf a, vf b) /* quarters [a0+a2, a1+a3, b0+b2, b1+b3] */
{
    return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
}
CPU_INLINE vf vf_add_88(vf a, vf b) /* quarters [a0+a1, a2+a3, b0+b1, b2+b3] */
{
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}
CPU_INLINE vf vf_add_pd(vf a, vf b)
{
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);

    return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}
CPU_INLINE vf vf_add_ps(vf a, vf b)
{
    return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
}
/* Lane i of the result is the sum of all lanes of a[i]; the same additions for every i. */
CPU_INLINE vf vf_sum_each(const vf a[CPU_VEC_W])
{
    vf q[4];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* quarters: i, i+4, i+8, i+12 */
        q[i] = vf_add_88(vf_add_44(a[i], a[i + 4]), vf_add_44(a[i + 8], a[i + 12]));
    return vf_add_ps(vf_add_pd(q[0], q[1]), vf_add_pd(q[2], q[3]));
}

#endif
