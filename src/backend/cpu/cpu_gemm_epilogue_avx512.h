/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_epilogue_avx512.h - private: how finished sums reach the output, at AVX-512 levels. */
#ifndef KVD_CPU_GEMM_EPILOGUE_AVX512_H
#define KVD_CPU_GEMM_EPILOGUE_AVX512_H

#include "backend/cpu/cpu_gemm_kernel.h"

#include <immintrin.h>

/* Sums of the rows [row, row + 16) and one token go to y, as far as they exist. */
static inline __attribute__((always_inline)) void gemm_finish(const gemm_block *b, uint32_t token,
                                                              uint32_t row, __m512 sum)
{
    const uint32_t  n    = b->n_row - row;
    const __mmask16 mask = (__mmask16)(0xffffU >> (n >= 16 ? 0 : 16 - n));
    float          *y    = b->y + token * b->y_stride + row;

    if (b->bias)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, b->bias + row));
    if (b->add)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, y));
    _mm512_mask_storeu_ps(y, mask, sum);
}

#endif
