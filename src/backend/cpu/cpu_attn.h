/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn.h - attention kernels, one table per level, and what the driver gives them.
 *
 * Two shapes of work.  *rows*: a few query rows (the query heads of one token that share a KV
 * head) over a span of keys read straight from the records; memory-bound, so each K and V row is
 * loaded once for all of them.  *tile*: many query columns (heads x tokens of one KV head) over all
 * keys; compute-bound, in tiles of keys that are unpacked once for all columns. */
#ifndef KVD_CPU_ATTN_H
#define KVD_CPU_ATTN_H

#include "backend/cpu/cpu.h"

/* Query rows of one KV head over keys [first_key, end_key).  The result is a partial softmax:
 * part[q][head_dim] weighted sums of V, then n_q maxima, then n_q sums of exp(score - maximum). */
typedef struct cpu_attn_rows {
    const kvd_kv_layout *kv;
    const uint64_t      *block;  /* of the sequence */
    const uint64_t      *record; /* instead of blocks: keys are counted through this list */
    const uint16_t      *times;  /* [end_key] how often each key counts; NULL: once */
    uint32_t             kv_head, n_q, first_key, end_key;
    const float         *q; /* [n_q][head_dim] */
    float                scale;
    float               *part;
} cpu_attn_rows;

/* Columns of one KV head: column c is query head c % group of row c / group, which sees keys
 * 0 .. n_past + c / group. */
typedef struct cpu_attn_tile {
    const kvd_kv_layout *kv;
    const uint64_t      *block;
    uint32_t             kv_head, group, n_row, n_past;
    uint64_t             q_stride, out_stride;
    const float         *q;   /* the first row's first head of the group */
    float               *out; /* likewise */
    float                scale;
    void                *scratch; /* scratch_bytes(), 64-byte aligned */
} cpu_attn_tile;

typedef struct cpu_attn_tile_kernel {
    uint32_t min_cols; /* from how many columns it beats the rows kernel (measured) */
    uint64_t (*scratch_bytes)(uint32_t n_col, uint32_t head_dim); /* a multiple of 64 */
    void (*run)(const cpu_attn_tile *);
} cpu_attn_tile_kernel;

typedef struct cpu_attn_kernels {
    uint32_t width; /* head_dim must be a multiple */
    void (*rows)(const cpu_attn_rows *);
    /* acc = acc + part, both as in cpu_attn_rows */
    void (*fold)(float *acc, const float *part, uint32_t n_q, uint32_t head_dim);
    void (*finish)(const float *acc, float *out, uint32_t n_q, uint32_t head_dim);
    /* one row into its record, rounded to nearest even */
    void (*store)(kvd_dtype type, const float *x, void *dst, uint32_t n);
    cpu_attn_tile_kernel tile;
} cpu_attn_kernels;

/* For bf16 KV and head_dim a multiple of 16. */
extern const cpu_attn_tile_kernel cpu_attn_tile_amx;
extern const cpu_attn_kernels cpu_attn_scalar, cpu_attn_portable, cpu_attn_avx2, cpu_attn_avx512;

#define CPU_ATTN_HEAD_DIM_MAX 512u

/* Kernels for a head size on this machine; part sizes are kvd_attn_part_floats(). */
const cpu_attn_kernels *cpu_attn_kernels_for(const cpu_backend *be, uint32_t head_dim);

#endif
