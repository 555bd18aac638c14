/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem_impl.h - text of the element-wise kernels; included once by one file per level. */
#ifndef KVD_CPU_ELEM_IMPL_H
#define KVD_CPU_ELEM_IMPL_H

#include <math.h>

#include "backend/cpu/cpu_elem.h"
#include "backend/cpu/cpu_vec.h"

static float elem_sum_squares(const float *x, uint32_t n)
{
    vf       s0 = vf_set1(0.0f), s1 = vf_set1(0.0f), v;
    uint32_t i = 0;

    for (; i + 2 * CPU_VEC_W <= n; i += 2 * CPU_VEC_W) {
        v  = vf_load(x + i);
        s0 = vf_fma(v, v, s0);
        v  = vf_load(x + i + CPU_VEC_W);
        s1 = vf_fma(v, v, s1);
    }
    for (; i < n; i += CPU_VEC_W) {
        v  = n - i < CPU_VEC_W ? vf_loadn(x + i, n - i) : vf_load(x + i);
        s0 = vf_fma(v, v, s0);
    }
    {
        float b[CPU_VEC_W];
        vf_store(b, vf_group_add(s0 + s1, CPU_VEC_W));
        return b[0];
    }
}

static void elem_norm(const float *x, const float *w, float *out, uint32_t n, float eps)
{
    const float scale = 1.0f / sqrtf(elem_sum_squares(x, n) / (float)n + eps);
    const vf    s     = vf_set1(scale);
    uint32_t    i     = 0;

    for (; i + CPU_VEC_W <= n; i += CPU_VEC_W)
        vf_store(out + i, vf_load(x + i) * s * vf_load(w + i));
    if (i < n)
        vf_storen(out + i, vf_loadn(x + i, n - i) * s * vf_loadn(w + i, n - i), n - i);
}

CPU_INLINE vf elem_silu_mul(vf g, vf u)
{
    const vf one = vf_set1(1.0f);

    return g / (one + vf_exp(vf_set1(0.0f) - g)) * u;
}

static void elem_swiglu(const float *gate, const float *up, float *out, uint32_t n)
{
    uint32_t i = 0;

    for (; i + CPU_VEC_W <= n; i += CPU_VEC_W)
        vf_store(out + i, elem_silu_mul(vf_load(gate + i), vf_load(up + i)));
    if (i < n)
        vf_storen(out + i, elem_silu_mul(vf_loadn(gate + i, n - i), vf_loadn(up + i, n - i)),
                  n - i);
}

static void elem_rope_neox(float *x, uint32_t n_head, uint32_t head_dim, uint32_t n_rot,
                           const float *cos_sin)
{
    const uint32_t half = n_rot / 2;

    for (uint32_t h = 0; h < n_head; h++, x += head_dim) {
        for (uint32_t i = 0; i < half; i += CPU_VEC_W) {
            const uint32_t n  = half - i < CPU_VEC_W ? half - i : CPU_VEC_W;
            const vf       c  = vf_loadn(cos_sin + i, n);
            const vf       s  = vf_loadn(cos_sin + half + i, n);
            const vf       x0 = vf_loadn(x + i, n), x1 = vf_loadn(x + half + i, n);

            vf_storen(x + i, x0 * c - x1 * s, n);
            vf_storen(x + half + i, vf_fma(x0, s, x1 * c), n);
        }
    }
}

/* Lanes hold pairs (2i, 2i+1): x * (c, c) + swapped x * (-s, s). */
static void elem_rope_pairs(float *x, uint32_t n_head, uint32_t head_dim, uint32_t n_rot,
                            const float *cos_sin)
{
    const uint32_t half = n_rot / 2;

    for (uint32_t i = 0; i < n_rot; i += CPU_VEC_W) {
        const uint32_t n            = n_rot - i < CPU_VEC_W ? n_rot - i : CPU_VEC_W;
        float          c[CPU_VEC_W] = { 0 }, s[CPU_VEC_W] = { 0 };

        for (uint32_t j = 0; j < n; j++) {
            c[j] = cos_sin[(i + j) / 2];
            s[j] = cos_sin[half + (i + j) / 2] * (j % 2 ? 1.0f : -1.0f);
        }
        for (uint32_t h = 0; h < n_head; h++) {
            float   *p = x + (uint64_t)h * head_dim + i;
            const vf v = vf_loadn(p, n);

            vf_storen(p, vf_fma(v, vf_load(c), vf_swap1(v) * vf_load(s)), n);
        }
    }
}

#define CPU_ELEM_TABLE                                                         \
    {                                                                          \
        .norm = elem_norm, .swiglu = elem_swiglu, .rope_neox = elem_rope_neox, \
        .rope_pairs = elem_rope_pairs                                          \
    }

#endif
