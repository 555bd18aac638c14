/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_avx2.c - attention kernels, level avx2. */
#include "backend/cpu/cpu_attn_impl.h"

const cpu_attn_kernels cpu_attn_avx2 = CPU_ATTN_TABLE;
