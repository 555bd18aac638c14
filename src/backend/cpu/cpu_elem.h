/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem.h - row kernels of the element-wise ops, one table per level. */
#ifndef KVD_CPU_ELEM_H
#define KVD_CPU_ELEM_H

#include "backend/backend.h"

typedef struct cpu_elem_kernels {
    void (*norm)(const float *x, const float *w, float *out, uint32_t n, float eps);
    void (*swiglu)(const float *gate, const float *up, float *out, uint32_t n);
    /* all heads of one token; cos_sin as in kvd_rope_args */
    void (*rope_neox)(float *x, uint32_t n_head, uint32_t head_dim, uint32_t n_rot,
                      const float *cos_sin);
    void (*rope_pairs)(float *x, uint32_t n_head, uint32_t head_dim, uint32_t n_rot,
                       const float *cos_sin);
} cpu_elem_kernels;

extern const cpu_elem_kernels cpu_elem_portable, cpu_elem_avx2, cpu_elem_avx512;

#endif
