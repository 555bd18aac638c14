/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_portable.c - select's kernels, level portable. */
#include "backend/cpu/cpu_index_impl.h"

const cpu_index_kernels cpu_index_portable = CPU_INDEX_TABLE;
