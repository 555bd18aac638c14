/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_avx512.c - select's kernels, level avx512. */
#include "backend/cpu/cpu_index_impl.h"

const cpu_index_kernels cpu_index_avx512 = CPU_INDEX_TABLE;
