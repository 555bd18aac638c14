/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_vec_w4.h - cpu_vec.h in the compilers' own vectors of four: SSE2, NEON or plain code. */
#ifndef KVD_CPU_VEC_W4_H
#define KVD_CPU_VEC_W4_H

#include "base/half.h"

#define CPU_VEC_W 4
typedef float    vf __attribute__((vector_size(16)));
typedef float    vf_any __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t  vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

CPU_INLINE vf vf_load(const float *p)
{
    return *(const vf_any *)p;
}
CPU_INLINE void vf_store(float *p, vf v)
{
    *(vf_any *)p = v;
}
CPU_INLINE vf vf_set1(float x)
{
    return (vf){ x, x, x, x };
}
CPU_INLINE vf vf_select(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}
CPU_INLINE vf vf_min(vf a, vf b)
{
    return vf_select((vi)(a < b), a, b);
}
CPU_INLINE vf vf_max(vf a, vf b)
{
    return vf_select((vi)(a > b), a, b);
}
CPU_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
/* 2^n for t = 0x1.8p23 + n. */
CPU_INLINE vf vf_pow2(vf t)
{
    return (vf)(((vu)t + 127u) << 23); /* unsigned: a NaN may wrap */
}
CPU_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return (vf){ kvd_bf16_to_f32(p[0]), kvd_bf16_to_f32(p[1]), kvd_bf16_to_f32(p[2]),
                 kvd_bf16_to_f32(p[3]) };
}
CPU_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    for (int i = 0; i < CPU_VEC_W; i++)
        p[i] = kvd_f32_to_bf16(v[i]);
}
CPU_INLINE vf vf_swap1(vf v)
{
    return (vf){ v[1], v[0], v[3], v[2] };
}
CPU_INLINE vf vf_swap2(vf v)
{
    return (vf){ v[2], v[3], v[0], v[1] };
}
CPU_INLINE vf vf_swap4(vf v)
{
    return v; /* never reached, nor swap8: a group is at most 4 lanes */
}
CPU_INLINE vf vf_swap8(vf v)
{
    return v;
}
/* Lane i of the result is the sum of all lanes of a[i]; the same additions for every i. */
CPU_INLINE vf vf_sum_each(const vf a[CPU_VEC_W])
{
    const vf p =
        (vf){ a[0][0], a[0][1], a[1][0], a[1][1] } + (vf){ a[0][2], a[0][3], a[1][2], a[1][3] };
    const vf q =
        (vf){ a[2][0], a[2][1], a[3][0], a[3][1] } + (vf){ a[2][2], a[2][3], a[3][2], a[3][3] };

    return (vf){ p[0], p[2], q[0], q[2] } + (vf){ p[1], p[3], q[1], q[3] };
}

#endif
