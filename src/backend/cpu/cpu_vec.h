/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_vec.h - a vector of floats as wide as the level of the including file allows.
 *
 * Kernels whose text is the same at every level are written once over these functions in a
 * *_impl.h header and compiled by one small file per level.  CPU_VEC_W is 16 (AVX-512), 8 (AVX2),
 * 4 (portable), or 1 where the includer sets CPU_VEC_SCALAR: for row lengths that no vector
 * divides.  Per-lane arithmetic is the same whatever the lane, so results do not depend on where
 * in a vector a value lies.  NaN in gives NaN out everywhere. */
#ifndef KVD_CPU_VEC_H
#define KVD_CPU_VEC_H

#include <stdint.h>
#include <string.h>

#define CPU_INLINE static inline __attribute__((always_inline))

/* (exp(r) - 1 - r) / r^2 for |r| <= ln(2)/2, least largest error relative to exp(r). */
#define CPU_EXP_C0 0.499999934123f
#define CPU_EXP_C1 0.166665201055f
#define CPU_EXP_C2 0.041668394259f
#define CPU_EXP_C3 0.008368780622f
#define CPU_EXP_C4 0.001381446475f

#if defined(CPU_VEC_SCALAR)
#include "backend/cpu/cpu_vec_w1.h"
#elif defined(__AVX512F__)
#include "backend/cpu/cpu_vec_w16.h"
#elif defined(__AVX2__)
#include "backend/cpu/cpu_vec_w8.h"
#else
#include "backend/cpu/cpu_vec_w4.h"
#endif

/* n <= CPU_VEC_W elements; the other lanes are zero, and are not stored. */
CPU_INLINE vf vf_loadn(const float *p, uint32_t n)
{
    float b[CPU_VEC_W] = { 0 };

    memcpy(b, p, n * sizeof(float));
    return vf_load(b);
}

CPU_INLINE void vf_storen(float *p, vf v, uint32_t n)
{
    float b[CPU_VEC_W];

    if (n == CPU_VEC_W) {
        vf_store(p, v);
        return;
    }
    vf_store(b, v);
    memcpy(p, b, n * sizeof(float));
}

/* Sum and maximum of neighbouring groups of n lanes (a power of two), in every lane of the group.
 * Lanes at distance 1, 2, 4, 8 are added, in this order at every level of the group. */
CPU_INLINE vf vf_group_add(vf v, uint32_t n)
{
    if (n > 1)
        v = v + vf_swap1(v);
    if (n > 2)
        v = v + vf_swap2(v);
    if (n > 4)
        v = v + vf_swap4(v);
    if (n > 8)
        v = v + vf_swap8(v);
    return v;
}

CPU_INLINE vf vf_group_max(vf v, uint32_t n)
{
    if (n > 1)
        v = vf_max(v, vf_swap1(v));
    if (n > 2)
        v = vf_max(v, vf_swap2(v));
    if (n > 4)
        v = vf_max(v, vf_swap4(v));
    if (n > 8)
        v = vf_max(v, vf_swap8(v));
    return v;
}

/* exp(x): n = round(x / ln 2), a polynomial of degree 6 in the rest (error 3.1e-9, so rounding
 * decides: below 2 ulp), scaled by 2^n.  Below -87.3 it stays at 1.2e-38, above 88.3 at 2.2e38. */
CPU_INLINE vf vf_exp(vf x)
{
    const vf magic = vf_set1(0x1.8p23f);
    vf       t, n, r, p;

    x = vf_min(vf_set1(88.3f), vf_max(vf_set1(-87.3f), x));
    t = vf_fma(x, vf_set1(0x1.715476p+0f), magic);
    n = t - magic;
    r = vf_fma(n, vf_set1(-0x1.62e4p-1f), x);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    p = vf_set1(CPU_EXP_C4);
    p = vf_fma(p, r, vf_set1(CPU_EXP_C3));
    p = vf_fma(p, r, vf_set1(CPU_EXP_C2));
    p = vf_fma(p, r, vf_set1(CPU_EXP_C1));
    p = vf_fma(p, r, vf_set1(CPU_EXP_C0));
    p = vf_fma(p * r, r, r) + vf_set1(1.0f);
    return p * vf_pow2(t);
}

#endif
