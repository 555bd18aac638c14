/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_scalar.c - attention kernels for head sizes that no vector divides; no model in use has
 * one, so they need to be right and not fast. */
#define CPU_VEC_SCALAR
#include "backend/cpu/cpu_attn_impl.h"

const cpu_attn_kernels cpu_attn_scalar = CPU_ATTN_TABLE;
