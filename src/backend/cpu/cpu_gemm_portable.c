/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_portable.c - float panels at the portable level: 16-byte vectors, 2 tokens x 16 rows in
 * 8 sums. */
#define F32_BYTES  16
#define F32_TOKENS 2
#define F32_TILES  1
#define F32_MIN    32
#define F32_NAME   cpu_gemm_portable

#include "backend/cpu/cpu_gemm_f32.h"
