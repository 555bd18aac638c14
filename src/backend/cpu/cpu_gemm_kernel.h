/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_kernel.h - private to cpu_gemm*.c: what a level brings to the many-token product.
 *
 * Rows are worked on in tiles of 16, elements (k) in steps of 32.
 *   bf16 levels  panel of a row tile: [step][16 pairs of k][16 rows][2] bf16, 1 KiB a step;
 *                activations packed:  [16 tokens' tile][step][16 tokens][32 k] bf16, 1 KiB a step;
 *                both zero where k or the token does not exist.
 *   f32 levels   panel of a row tile: [k][16 rows] float; activations used where they are. */
#ifndef KVD_CPU_GEMM_KERNEL_H
#define KVD_CPU_GEMM_KERNEL_H

#include "backend/backend.h"

#define GEMM_ROW_TILE   16
#define GEMM_TOKEN_TILE 16
#define GEMM_STEP       32
#define GEMM_STEP_BYTES 1024 /* bf16: 32 k of 16 rows or tokens */
#define GEMM_PANEL_ROWS 32   /* rows unpacked before the tokens pass over them */

/* One pass: all tokens of an item over one panel. */
typedef struct gemm_block {
    uint32_t     n_token, n_row; /* n_row <= GEMM_PANEL_ROWS */
    uint32_t     n_k;            /* elements in the panel */
    const void  *panel;
    uint64_t     panel_stride; /* bytes between row tiles */
    const void  *x;            /* packed, or float: first token, first k of this panel */
    uint64_t     x_stride;     /* bytes between tiles of tokens (packed) or tokens (float) */
    float       *acc;          /* [n_token rounded up to 16][acc_stride] sums between panels */
    uint64_t     acc_stride;   /* elements */
    bool         first, last;  /* of the panels along k; acc is not touched if both */
    float       *y;            /* [n_token][y_stride]: written in the last pass */
    uint64_t     y_stride;
    const float *bias; /* [n_row] or NULL */
    bool         add;
} gemm_block;

typedef struct gemm_kernel {
    bool     packed;  /* bf16: activations are packed first */
    uint32_t k_block; /* longest panel, at least 256 */
    uint32_t min_token;
    /* One tile of n_token <= 16 tokens; n_step steps of which n_k elements exist. */
    void (*pack)(const float *x, uint64_t x_stride, uint32_t n_token, uint32_t n_k, void *packed);
    /* Elements [first, first + n_k) of n_row <= 16 rows. */
    void (*unpack)(kvd_dtype type, const uint8_t *row, uint64_t row_bytes, uint32_t n_row,
                   uint32_t first, uint32_t n_k, void *panel);
    void (*begin)(void); /* before and after the blocks of one item, on its thread */
    void (*end)(void);
    void (*block)(const gemm_block *b);
} gemm_kernel;

extern const gemm_kernel cpu_gemm_portable, cpu_gemm_avx2, cpu_gemm_avx512, cpu_gemm_avx512bf16,
    cpu_gemm_amx;

/* cpu_unpack_avx512bf16.c: shared by the two bf16 levels */
void cpu_unpack_bf16(kvd_dtype type, const uint8_t *row, uint64_t row_bytes, uint32_t n_row,
                     uint32_t first, uint32_t n_k, void *panel);
void cpu_pack_bf16(const float *x, uint64_t x_stride, uint32_t n_token, uint32_t n_k, void *packed);

#endif
