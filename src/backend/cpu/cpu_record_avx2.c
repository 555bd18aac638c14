/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_record_avx2.c - record kernels, level avx2. */
#include "backend/cpu/cpu_record_impl.h"

const cpu_record_kernels cpu_record_avx2 = CPU_RECORD_TABLE;
