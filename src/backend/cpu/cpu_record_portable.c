/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_record_portable.c - record kernels, level portable. */
#include "backend/cpu/cpu_record_impl.h"

const cpu_record_kernels cpu_record_portable = CPU_RECORD_TABLE;
