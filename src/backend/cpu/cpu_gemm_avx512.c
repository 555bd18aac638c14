/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_avx512.c - float panels at the AVX-512 level: 8 tokens x 32 rows in 16 sums.  Also what
 * precise backends use where bf16 could be had. */
#define F32_BYTES  64
#define F32_TOKENS 8
#define F32_TILES  2
#define F32_MIN    16
#define F32_NAME   cpu_gemm_avx512

#include "backend/cpu/cpu_gemm_f32.h"
