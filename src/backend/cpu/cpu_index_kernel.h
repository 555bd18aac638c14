/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_kernel.h - kernels of select, one table per level: leaf functions over one block or one
 * lane.  Logits of a block lie as [head][CPU_INDEX_BLOCK]. */
#ifndef KVD_CPU_INDEX_KERNEL_H
#define KVD_CPU_INDEX_KERNEL_H

#include "backend/index_layout.h"

#define CPU_INDEX_HEADS 8u /* query heads that the plane kernels take at once */

/* q . unit for the tiles in `tiles` (bit i: tile i) of one block's plane. */
typedef struct cpu_index_dots {
    const cpu_index_plane *p;
    const uint8_t         *lane;
    uint32_t               tiles;
    uint32_t               n_head;
    uint64_t               q_stride; /* a multiple of 16 */
    const float           *q;        /* [n_head][q_stride], scaled; zero from dim on */
    const float           *qt;       /* the same: [n_head / 8 rounded up][q_stride][8] */
    float                 *out;      /* [n_head][CPU_INDEX_BLOCK] */
    bool                   add;      /* to what out holds */
} cpu_index_dots;

/* Logits of one head in one span to weights relative to their largest: e = exp(x - max). */
typedef struct cpu_index_weigh {
    uint32_t n_chunk, per_chunk; /* of the span; logits of a chunk.  n_chunk a multiple of 16 */
    uint32_t lo, hi;             /* chunks that count; the others weigh 0 */
    float   *logit;              /* [n_chunk * per_chunk] in, overwritten */
    float   *e;                  /* out [n_chunk] */
    float    max, sum;           /* out: largest logit; sum of e */
} cpu_index_weigh;

/* Score of one span's chunks from its weights: sum or largest of scale[h] * e[h][chunk]. */
typedef struct cpu_index_mix {
    uint32_t     n_chunk, n_head;
    const float *e;     /* [n_head][n_chunk] */
    const float *scale; /* [n_head] */
    float       *score; /* out [n_out], in [0, 1] */
    uint32_t     n_out; /* <= n_chunk */
    bool         largest;
} cpu_index_mix;

typedef struct cpu_index_kernels {
    void (*dots)(const cpu_index_dots *);
    /* logit[0 .. n) += q * radius, n a multiple of 16 */
    void (*radius)(float *logit, const uint16_t *radius, float q, uint32_t n);
    void (*weigh)(cpu_index_weigh *);
    /* x[0 .. n) *= factor, n a multiple of 16; returns the sum of the products */
    float (*scale_sum)(float *x, float factor, uint32_t n);
    void (*mix)(const cpu_index_mix *);
    void (*ema)(uint16_t *ema, const float *score, uint32_t n, float alpha);
    /* x[0 .. n) <- exp(x - max), n a multiple of 16 */
    void (*exps)(float *x, const float *max, uint32_t n);
    /* The k best of score[0 .. n), ties to the lower position, ascending: their bits and positions.
     * bits and pos have room for n; returns how many, min(k, n). */
    uint32_t (*best)(const float *score, uint32_t n, uint32_t k, uint32_t *bits, uint32_t *pos);
    /* The k-th largest of bits[0 .. n), 0 < k <= n, or anything between it and the next: a value
     * that at least k reach; *above of them are larger if more than k reach it, else k. */
    uint32_t (*threshold)(const uint32_t *bits, uint32_t n, uint32_t k, uint32_t *above);
} cpu_index_kernels;

extern const cpu_index_kernels cpu_index_portable, cpu_index_avx2, cpu_index_avx512;

/* cpu_index_avx512vnni.c: dots over integer planes; queries rounded to 8 bits by group of units
 * (16 bits against 8-bit codes). */
void cpu_index_dots_vnni(const cpu_index_dots *d);

#endif
