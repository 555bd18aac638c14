/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_portable.c - dot products before AVX2: always on float activations, where integer ones
 * would gain little.  Exact up to float rounding for all types. */
#include "backend/cpu/cpu_dot_flt_impl.h"

const cpu_dot_level cpu_dot_portable = { .flt = dot_flt_level };
