/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_avx2.c - float panels at the AVX2 level: 6 tokens x 16 rows in 12 sums. */
#define F32_BYTES  32
#define F32_TOKENS 6
#define F32_TILES  1
#define F32_MIN    24
#define F32_NAME   cpu_gemm_avx2

#include "backend/cpu/cpu_gemm_f32.h"
