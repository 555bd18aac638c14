/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn.cuh - between the files of attention. */
#ifndef KVD_CUDA_ATTN_CUH
#define KVD_CUDA_ATTN_CUH

#include "backend/cuda/cuda_impl.h"

#define ATTN_LOG2E     1.4426950408889634f
#define ATTN_SPLIT_MAX 128u /* splits of a row's keys */

/* Whether rows of K and V begin on 16 bytes where they are whole octets: blocks do. */
static inline bool cuda_attn_aligned(const kvd_kv_layout *kv)
{
    return (uintptr_t)kv->pool % 16 == 0 && kv->lane_off % 16 == 0 && kv->head_stride % 16 == 0;
}

/* cuda_attn_rows.cu: rows [first, first + n) of all the sequences' rows, each by itself, its keys
 * split among n_split blocks.  part: [n][n_head][n_split][head_dim + 2] floats, unused when
 * n_split is 1: sums weighted with exp2(logit - maximum), the maximum, the sum of weights. */
void cuda_attn_rows(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                    uint32_t n_split, float *part, cudaStream_t s);
/* The splits' parts become the result. */
void cuda_attn_merge(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                     uint32_t n_split, const float *part, cudaStream_t s);

/* cuda_attn_decode.cu: the same rows over bf16 keys. */
bool cuda_attn_decode_can(const kvd_kv_layout *kv);
/* Blocks of it that a multiprocessor holds at once. */
uint32_t cuda_attn_decode_blocks(const kvd_kv_layout *kv);
void cuda_attn_decode(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                      uint32_t n_split, float *part, cudaStream_t s);

/* cuda_attn_flash.cu: many rows of bf16 keys on tensor cores; q and probabilities round to bf16. */
bool       cuda_attn_flash_can(const kvd_kv_layout *kv);
kvd_status cuda_attn_flash(const kvd_attn_args *a, cudaStream_t s, kvd_err *err);

/* cuda_attn_hopper.cu: the same on compute capability 9.0, for some layouts; *done: it was one. */
kvd_status cuda_attn_hopper(const kvd_attn_args *a, cudaStream_t s, bool *done, kvd_err *err);

#ifdef __CUDACC__
#define ATTN_SPLIT_STEP 64u

/* The keys of this block's split: whole steps but for the last key, and none at all where there are
 * fewer steps than splits. */
static __device__ __forceinline__ void cuda_attn_split(uint32_t n_key, uint32_t n_split,
                                                       uint32_t *begin, uint32_t *end)
{
    const uint32_t n   = (n_key + ATTN_SPLIT_STEP - 1) / ATTN_SPLIT_STEP;
    const uint32_t len = (n + n_split - 1) / n_split * ATTN_SPLIT_STEP;

    *begin = min(n_key, blockIdx.x * len);
    *end   = min(n_key, *begin + len);
}
#endif

#endif
