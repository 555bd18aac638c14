/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem_avx512.c - element-wise kernels, level avx512. */
#include "backend/cpu/cpu_elem_impl.h"

const cpu_elem_kernels cpu_elem_avx512 = CPU_ELEM_TABLE;
