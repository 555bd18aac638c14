/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_portable.c - attention kernels, level portable. */
#include "backend/cpu/cpu_attn_impl.h"

const cpu_attn_kernels cpu_attn_portable = CPU_ATTN_TABLE;
