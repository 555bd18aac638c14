/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem_avx2.c - element-wise kernels, level avx2. */
#include "backend/cpu/cpu_elem_impl.h"

const cpu_elem_kernels cpu_elem_avx2 = CPU_ELEM_TABLE;
