/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_flt_avx2.c - dot products on float activations for AVX2. */
#include "backend/cpu/cpu_dot_avx2.h"
#include "backend/cpu/cpu_dot_flt_impl.h"

void cpu_dot_flt_avx2(const cpu_dot_job *job)
{
    dot_flt_level(job);
}
