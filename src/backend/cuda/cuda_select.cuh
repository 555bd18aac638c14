/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select.cuh - what the kernels of select share.
 *
 * Stages, each a launch over all lanes:
 *   scan    (cuda_select_scan.cu) logits of all chunks by the index, and per block of threads the
 *           largest logit of each head and the sum of exp(logit - largest)
 *   mean    rule MEAN_LOGITS: the heads' logits averaged
 *   sums    largest and sum again, where scan's are not those of the chunks' logits
 *   finish  (cuda_select_finish.cu) scores, averages, the best: one cluster of blocks per lane
 * The common case, whose logits fit into a cluster's shared memory, is one launch instead
 * (cuda_select_whole.cu).
 * CASCADE: scan, (mean, sums,) finish for the best 4 k, rerank (cuda_select.cu), (mean,) sums,
 * finish among those. */
#ifndef KVD_CUDA_SELECT_CUH
#define KVD_CUDA_SELECT_CUH

#include "backend/cuda/cuda_window.cuh"

extern "C" {
#include "backend/index_layout.h"
}

#define SELECT_GROUP_MAX CUDA_GROUP_MAX
#define SELECT_PARTS_MAX 64u /* blocks of threads that scan a lane */

/* An op's args and where its scratch lies.  Lane l = sequence * n_kv_head + KV head. */
typedef struct select_job {
    kvd_select_args a;
    cpu_index_shape s;
    uint32_t        group, n_lane, n_part;
    bool            fast;             /* scan by cuda_select_fast() */
    uint32_t        heads, first_row; /* rows of logits that are weighed */
    uint32_t        n_row;            /* group + 1: the last one is for the mean */
    uint64_t        row_stride;       /* a multiple of 4 */
    float          *logit;            /* [n_lane][n_row][row_stride] */
    float2         *part;             /* [n_lane][n_part][heads]: largest, sum */
    uint32_t       *list;   /* [n_lane][row_stride] CASCADE: what is reranked, ascending */
    uint32_t       *n_list; /* [n_lane] */
    uint8_t        *listed; /* [n_lane][row_stride] 1: is in list */
    float           log_tokens;
} select_job;

/* A centroid's logit stands at its number; its chunks find it by their assignment. */
static __device__ __forceinline__ uint32_t select_column(const select_job     &j,
                                                         const kvd_select_seq *q, uint32_t head,
                                                         uint32_t chunk, bool mapped)
{
    uint32_t       block, n_block, first, at;
    const uint8_t *cl;

    if (!mapped)
        return chunk;
    block   = chunk / j.s.n_chunk;
    n_block = (q->n_chunk + j.s.n_chunk - 1) / j.s.n_chunk;
    cl      = (const uint8_t *)j.a.index.pool + q->iblock[block] + j.a.index.lane_off +
         head * j.a.index.head_stride + j.s.cluster_off;
    first = block >= cl[0] ? block - cl[0] : block;
    at    = first * CPU_INDEX_CENTROID + cl[64 + chunk % j.s.n_chunk];
    if (block < cl[0] || at >= n_block * CPU_INDEX_CENTROID)
        return block * CPU_INDEX_CENTROID + cl[64 + chunk % j.s.n_chunk] % CPU_INDEX_CENTROID;
    return at;
}

static __device__ __forceinline__ bool select_mapped(const select_job &j)
{
    return j.s.kind == KVD_INDEX_CLUSTER && j.first_row == 0;
}

static __device__ __forceinline__ float *select_logits(const select_job &j, uint32_t lane,
                                                       uint32_t row)
{
    return j.logit + ((uint64_t)lane * j.n_row + row) * j.row_stride;
}

/* Sums of exp(x - max), merged. */
static __device__ __forceinline__ void select_merge(float *max, float *sum, float max2, float sum2)
{
    const float most = fmaxf(*max, max2);

    if (most == -INFINITY) { /* nothing yet, unless a NaN */
        *sum += sum2 != sum2 || max2 != max2 ? NAN : 0.0f;
        return;
    }
    *sum = *sum * expf(*max - most) + sum2 * expf(max2 - most);
    *max = most;
}

/* The average's new value, as kvd_select_args has it. */
static __device__ __forceinline__ uint16_t select_ema(uint16_t ema, float score, float alpha)
{
    return sp_to_f16(__fadd_rn(__fmul_rn(sp_from_f16(ema), __fsub_rn(1.0f, alpha)),
                               __fmul_rn(score, __fmul_rn(alpha, KVD_EMA_SCALE))));
}

/* The score of a key (its bits + 1), in units of 2^-40. */
static __device__ __forceinline__ uint64_t select_mass(uint32_t key)
{
    return (uint64_t)(__uint_as_float(key - 1) * 0x1p40f);
}

static __device__ __forceinline__ uint32_t select_n_urgent(uint32_t n_sel)
{
    return n_sel < 16 ? n_sel > 0 : n_sel / 8;
}

/* cuda_select_scan.cu; keys: of the key plane. */
cudaError_t cuda_select_scan(const cuda_backend *be, const select_job &j, bool keys,
                             cudaStream_t s);
/* cuda_select_fast.cu: the same of some indexes' landmarks, with so many parts; beside: the kernel
 * ahead began after all those before it, and this one reads nothing of what it writes. */
bool        cuda_select_fast_can(const cuda_backend *be, const select_job &j);
uint32_t    cuda_select_fast_parts(const cuda_backend *be, uint64_t n_lane);
cudaError_t cuda_select_fast(const cuda_backend *be, const select_job &j, bool beside,
                             cudaStream_t s);
/* cuda_select_whole.cu: all stages at once; *done: false where it does not serve the case.  window
 * and beside: as of the others. */
cudaError_t cuda_select_whole(const cuda_backend *be, const select_job &j,
                              const kvd_choose_args *window, bool beside, cudaStream_t s,
                              bool *done);
/* cuda_select_finish.cu; window (NULL: not wanted): goes on to the windows' change and spans;
 * rerank: only lists the best 4 k; listed: selects among these. */
cudaError_t cuda_select_finish(const cuda_backend *be, const select_job &j,
                               const kvd_choose_args *window, bool rerank, bool listed,
                               cudaStream_t s);

#endif
