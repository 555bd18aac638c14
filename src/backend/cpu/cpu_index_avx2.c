/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_avx2.c - select's kernels, level avx2. */
#include "backend/cpu/cpu_index_impl.h"

const cpu_index_kernels cpu_index_avx2 = CPU_INDEX_TABLE;
