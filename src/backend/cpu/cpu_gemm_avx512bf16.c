/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_avx512bf16.c - vdpbf16ps over the same panels and packed activations as AMX uses: lanes
 * are rows, a pair of a token's elements is broadcast.  8 tokens x 32 rows in 16 sums. */
#include "backend/cpu/cpu_gemm_epilogue_avx512.h"

#define BF16_TOKENS 8
#define BF16_INLINE static inline __attribute__((always_inline))

/* n_row: row tiles (a constant). */
BF16_INLINE void bf16_sums(const gemm_block *b, const uint8_t *x, uint32_t n_step, int n_row,
                           __m512 sum[BF16_TOKENS][2])
{
    const uint8_t *w = b->panel;

    for (uint32_t s = 0; s < n_step; s++) {
        for (int p = 0; p < GEMM_STEP / 2; p++) {
            const uint8_t *w1 = w + (n_row == 2 ? b->panel_stride : 0);
            const __m512bh a0 = (__m512bh)_mm512_load_si512(w + 64 * p);
            const __m512bh a1 = (__m512bh)_mm512_load_si512(w1 + 64 * p);

            for (int t = 0; t < BF16_TOKENS; t++) {
                const int32_t  pair = *(const int32_t *)(const void *)(x + 64 * t + 4 * p);
                const __m512bh v    = (__m512bh)_mm512_set1_epi32(pair);

                sum[t][0] = _mm512_dpbf16_ps(sum[t][0], a0, v);
                if (n_row == 2)
                    sum[t][1] = _mm512_dpbf16_ps(sum[t][1], a1, v);
            }
        }
        x += GEMM_STEP_BYTES;
        w += GEMM_STEP_BYTES;
    }
}

BF16_INLINE void bf16_run(const gemm_block *b, uint32_t token, int n_row)
{
    const uint8_t *x = (const uint8_t *)b->x + token / GEMM_TOKEN_TILE * b->x_stride +
                       token % GEMM_TOKEN_TILE * 64;
    float *acc = b->acc + token * b->acc_stride;
    __m512 sum[BF16_TOKENS][2];

    for (int t = 0; t < BF16_TOKENS; t++)
        for (int r = 0; r < n_row; r++)
            sum[t][r] = b->first ? _mm512_setzero_ps()
                                 : _mm512_load_ps(acc + (uint32_t)t * b->acc_stride + 16 * r);
    bf16_sums(b, x, (b->n_k + GEMM_STEP - 1) / GEMM_STEP, n_row, sum);
    for (uint32_t t = 0; t < BF16_TOKENS; t++) {
        for (uint32_t r = 0; r < (uint32_t)n_row; r++) {
            if (!b->last)
                _mm512_store_ps(acc + t * b->acc_stride + 16 * r, sum[t][r]);
            else if (token + t < b->n_token)
                gemm_finish(b, token + t, 16 * r, sum[t][r]);
        }
    }
}

static void bf16_block(const gemm_block *b)
{
    for (uint32_t t = 0; t < b->n_token; t += BF16_TOKENS) {
        if (b->n_row > GEMM_ROW_TILE)
            bf16_run(b, t, 2);
        else
            bf16_run(b, t, 1);
    }
}

static void bf16_nothing(void)
{
}

const gemm_kernel cpu_gemm_avx512bf16 = { .packed    = true,
                                          .k_block   = 512,
                                          .min_token = 24,
                                          .pack      = cpu_pack_bf16,
                                          .unpack    = cpu_unpack_bf16,
                                          .begin     = bf16_nothing,
                                          .end       = bf16_nothing,
                                          .block     = bf16_block };
