/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem_portable.c - element-wise kernels, level portable. */
#include "backend/cpu/cpu_elem_impl.h"

const cpu_elem_kernels cpu_elem_portable = CPU_ELEM_TABLE;
