/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot.h - private to cpu_matmul.c, cpu_dot_*.c and cpu_quant_*.c: dot products of stored weight
 * rows with few tokens (decode).
 *
 * Activations come in one of two forms.
 *   groups  cpu_xgroup: 256 elements as 16-bit integers in blocks of 32, each with a float scale,
 *           kept as two int8 that kernels multiply one after the other while a weight is in a
 *           register.  8 bits alone cost greedy text: SmolLM2 parted from the reference at logit
 *           gaps up to 0.23.  One quantisation serves all weight types; elements past n_col are
 *           zero.
 *   floats  as the caller has them: for float weights, and for all weights when precise.
 *
 * A kernel computes rows [0, n_row) for all tokens of a job.  The operations behind one (row,
 * token) and their order depend on that row and token only: not on n_token, nor on how rows were
 * cut into jobs.  So results are the same bits for any batch and any number of threads.
 * A kernel reads no byte outside its rows.
 *
 * Thread: kernels are leaf functions, any thread. */
#ifndef KVD_CPU_DOT_H
#define KVD_CPU_DOT_H

#include "backend/backend.h"

#define CPU_XGROUP     256
#define CPU_XQUANT_MAX 32512 /* 127 * 256: so that the upper byte stays above -128 */
#define CPU_DOT_ROWS   4     /* rows a kernel works on together */
#define CPU_DOT_TOKENS 4     /* tokens at most, the same */

typedef struct cpu_xgroup {
    _Alignas(64) int8_t q[CPU_XGROUP], q_lo[CPU_XGROUP]; /* in order */
    /* The same again, by halves of blocks: 128 elements are the first 16 of four blocks, then the
     * last 16 of them, as nibbles lie in weights. */
    int8_t split[CPU_XGROUP], split_lo[CPU_XGROUP];
    float  d[8];     /* x = d * (256 q + q_lo), per block of 32 */
    float  sum[8];   /* of x, per block of 32 */
    float  half[16]; /* the same, per 16 */
} cpu_xgroup;

typedef struct cpu_dot_job {
    uint32_t       n_row, n_col, n_token;
    uint64_t       row_bytes;
    uint64_t       x_stride; /* groups or floats between tokens */
    uint64_t       y_stride;
    kvd_dtype      type;
    const uint8_t *w;    /* [n_row][row_bytes] */
    const void    *x;    /* cpu_xgroup or float */
    const float   *bias; /* [n_row] or NULL */
    float         *y;    /* [n_token][y_stride] */
    float         *rows; /* [CPU_DOT_ROWS][n_col rounded up to 16]: for the dequantised ones */
    bool           add;
} cpu_dot_job;

typedef void (*cpu_dot_fn)(const cpu_dot_job *job);

/* One token's n_col floats (a multiple of 32) into groups. */
typedef void (*cpu_quant_fn)(const float *x, uint32_t n_col, cpu_xgroup *out);

/* What a level brings.  quant[type] is NULL where the type has no kernel on int8 activations; flt
 * takes every type: F32, F16 and BF16 as stored, others through the dequantiser. */
typedef struct cpu_dot_level {
    cpu_quant_fn quantize;
    cpu_dot_fn   quant[KVD_DTYPE_BF16 + 1];
    cpu_dot_fn   flt;
} cpu_dot_level;

extern const cpu_dot_level cpu_dot_portable, cpu_dot_avx2, cpu_dot_avx512vnni;

typedef float cpu_dot_rows
    __attribute__((vector_size(CPU_DOT_ROWS * sizeof(float)), aligned(4), may_alias));

/* Places the sums of n_row results of one token at (row, token). */
static inline void cpu_dot_store(const cpu_dot_job *job, uint32_t row, uint32_t n_row,
                                 uint32_t token, const float sum[CPU_DOT_ROWS])
{
    float *y = job->y + token * job->y_stride + row;

    if (n_row >= CPU_DOT_ROWS) {
        cpu_dot_rows v = *(const cpu_dot_rows *)sum;

        if (job->bias)
            v += *(const cpu_dot_rows *)(job->bias + row);
        if (job->add)
            v += *(const cpu_dot_rows *)y;
        *(cpu_dot_rows *)y = v;
        return;
    }
    for (uint32_t r = 0; r < n_row; r++) {
        const float v = job->bias ? sum[r] + job->bias[row + r] : sum[r];

        y[r] = job->add ? v + y[r] : v;
    }
}

#endif
