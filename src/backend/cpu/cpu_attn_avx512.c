/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_avx512.c - attention kernels, level avx512. */
#include "backend/cpu/cpu_attn_impl.h"

const cpu_attn_kernels cpu_attn_avx512 = CPU_ATTN_TABLE;
