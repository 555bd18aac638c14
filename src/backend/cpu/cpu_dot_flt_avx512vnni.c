/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_flt_avx512vnni.c - dot products on float activations for AVX-512. */
#include "backend/cpu/cpu_dot_avx512vnni.h"
#include "backend/cpu/cpu_dot_flt_impl.h"

void cpu_dot_flt_avx512vnni(const cpu_dot_job *job)
{
    dot_flt_level(job);
}
