/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_vec_w1.h - cpu_vec.h one float at a time. */
#ifndef KVD_CPU_VEC_W1_H
#define KVD_CPU_VEC_W1_H

#include "base/half.h"

#define CPU_VEC_W 1
typedef float vf;

CPU_INLINE vf vf_load(const float *p)
{
    return *p;
}
CPU_INLINE void vf_store(float *p, vf v)
{
    *p = v;
}
CPU_INLINE vf vf_set1(float x)
{
    return x;
}
CPU_INLINE vf vf_min(vf a, vf b)
{
    return a < b ? a : b;
}
CPU_INLINE vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
CPU_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
/* 2^n for t = 0x1.8p23 + n. */
CPU_INLINE vf vf_pow2(vf t)
{
    return kvd_bits_to_f32((kvd_f32_to_bits(t) + 127u) << 23);
}
CPU_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return kvd_bf16_to_f32(*p);
}
CPU_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    *p = kvd_f32_to_bf16(v);
}
CPU_INLINE vf vf_swap1(vf v)
{
    return v; /* never reached, nor the others: a group is one lane */
}
CPU_INLINE vf vf_swap2(vf v)
{
    return v;
}
CPU_INLINE vf vf_swap4(vf v)
{
    return v;
}
CPU_INLINE vf vf_swap8(vf v)
{
    return v;
}
CPU_INLINE vf vf_sum_each(const vf a[CPU_VEC_W])
{
    return a[0];
}

#endif
