/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_span_cluster.cu - attention of one new token over one or two spans, a cluster of blocks of
 * threads a lane (compute capability 9.0 and later, shapes of cuda_span.cuh).
 *
 * The cluster's warps take 16 keys each in turn, first those of different blocks.  Each block has a
 * partial softmax of each span in shared memory; then each folds a share of the result's numbers
 * from all of these, in the order of blocks, behind what part holds, span by span, so that two
 * spans at once have the bits of one after the other.  The order depends on the span and on the
 * number of blocks, which depends on the number of lanes (deterministic: of those that are
 * reserved).
 *
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_span.cuh"

/* Blocks of a cluster: four of 8 would fill all places of a group of 16 processors, and wait where
 * anything else has one of them (H200, 122K, 4 sequences: 7.24 ms a step by 6 blocks a lane, 7.58
 * by 8). */
#define CLUSTER_RANKS 7u
#define CLUSTER_MIN   3u /* with fewer, separate blocks do as well */
#define CLUSTER_FEW   4u /* at most, for what comes first, the kept set: a few hundred keys */

/* A block's partial softmax of one span, and what it makes of all blocks'. */
template <int DIMS, int SETS> struct cluster_part {
    float o[SETS * SPAN_HEADS * 64 * DIMS];
    float max[SETS * SPAN_HEADS], sum[SETS * SPAN_HEADS]; /* peers look at these three */
    float factor[SETS * SPAN_HEADS][CLUSTER_RANKS], keep[SETS * SPAN_HEADS];
};

template <int DIMS, int SETS> struct cluster_mem {
    uint2                    q[SETS * 4 * DIMS][WARP];
    span_mem<DIMS, SETS>     span[SPAN_SPANS];
    cluster_part<DIMS, SETS> part[SPAN_SPANS];
    float                    max[SETS * SPAN_HEADS], sum[SETS * SPAN_HEADS]; /* of all */
};

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* A warp's share of a span. */
typedef struct cluster_walk {
    span_keys      k;
    const uint8_t *row;         /* where its first 16 keys lie */
    uint32_t       first, step; /* its keys are 16 from `first` on, of each `step` */
} cluster_walk;

/* Of the cluster's warps, those of different blocks first; of a first span few blocks' alone, and
 * no others add anything.  Asks for the rows. */
template <int DIMS>
static __device__ __forceinline__ cluster_walk cluster_open(const span_job &j, uint32_t lane,
                                                            uint32_t span)
{
    const bool     few    = j.a.first && span == 0;
    const uint32_t n_rank = few ? min(sp_cluster_size(), CLUSTER_FEW) : sp_cluster_size();
    const uint32_t rank = sp_cluster_rank(), half = threadIdx.x % WARP / SPAN_STEP;
    cluster_walk   w = {};

    if (span >= j.n_span || rank >= n_rank)
        return w;
    w.k     = span_open(j, lane, span);
    w.first = (threadIdx.x / WARP * n_rank + rank) * SPAN_STEP;
    w.step  = n_rank * SPAN_KEYS;
    if (w.first >= w.k.n)
        return w;
    w.row = span_mine(j, w.k, lane % j.a.kv.n_kv_head, w.first, w.k.n);
    for (uint32_t at = 0; at < DIMS; at++)
        sp_prefetch(w.row + half * (j.a.kv.record_bytes / 2) + 128 * at);
    return w;
}

template <int DIMS, int SETS>
static __device__ __forceinline__ void cluster_keys(const span_job &j, uint32_t lane,
                                                    const cluster_walk   &w, const uint2 (*q)[WARP],
                                                    span_mem<DIMS, SETS> *m)
{
    span_sum<DIMS, SETS> s = {};

#pragma unroll
    for (uint32_t b = 0; b < SETS; b++)
        s.max[b] = SPAN_NO_KEY;
    span_walk<DIMS, SETS>(j, w.k, lane % j.a.kv.n_kv_head, w.first, w.k.n, w.step, w.row, q, s);
    span_keep<DIMS, SETS>(s, m);
}

/* The block's partial of a span. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void cluster_merge(uint32_t n_head, const span_mem<DIMS, SETS> *m,
                                                     cluster_part<DIMS, SETS> *out)
{
    for (uint32_t i = threadIdx.x; i < n_head * 64 * DIMS; i += SPAN_THREADS) {
        const uint32_t h = i / (64 * DIMS), d = i % (64 * DIMS);
        float          max, sum;

        out->o[i] = span_merge<DIMS, SETS>(m, h, d, &max, &sum);
        if (d == 0) {
            out->max[h] = max;
            out->sum[h] = sum;
        }
    }
}

/* This block's keys of all spans. */
template <int DIMS, int SETS>
static __device__ void cluster_spans(const span_job &j, uint32_t lane, uint32_t head0,
                                     uint32_t n_head, cluster_mem<DIMS, SETS> *m)
{
    cluster_walk w = cluster_open<DIMS>(j, lane, 0), then = cluster_open<DIMS>(j, lane, 1);

    span_queries(j, lane, head0, n_head, SETS, 4 * DIMS, m->q);
    __syncthreads();
#pragma unroll 1 /* of all code that a layer runs, the less there is, the more is at hand */
    for (uint32_t s = 0; s < j.n_span; s++) {
        cluster_keys<DIMS, SETS>(j, lane, w, m->q, &m->span[s]);
        w = then;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t s = 0; s < j.n_span; s++)
        cluster_merge<DIMS, SETS>(n_head, &m->span[s], &m->part[s]);
}

/* One warp, one head: what each block's partial of a span counts, and what was there before. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void cluster_factors(cluster_part<DIMS, SETS> *p, uint32_t h,
                                                       float *all, float *total)
{
    const uint32_t lane = threadIdx.x % WARP, n_rank = sp_cluster_size();
    const float    x   = lane < n_rank ? *sp_peer(&p->max[h], lane) : SPAN_NO_KEY;
    const float    y   = lane < n_rank ? *sp_peer(&p->sum[h], lane) : 0.0f;
    const float    max = fmaxf(*all, cuda_warp_max(x)), keep = expf(*all - max);
    const float    f = expf(x - max);

    if (lane < CLUSTER_RANKS)
        p->factor[h][lane] = lane < n_rank ? f : 0.0f;
    if (lane == 0)
        p->keep[h] = keep;
    *total = __fmaf_rn(*total, keep, cuda_warp_sum(lane < n_rank ? f * y : 0.0f));
    *all   = max;
}

/* All blocks' weighted sums of one number behind x. */
template <int DIMS, int SETS>
static __device__ __forceinline__ float cluster_number(const cluster_part<DIMS, SETS> *p,
                                                       uint32_t i, float x)
{
    const uint32_t h = i / (64 * DIMS), n_rank = sp_cluster_size();
    float          sum = 0.0f, v[CLUSTER_RANKS];

#pragma unroll
    for (uint32_t r = 0; r < CLUSTER_RANKS; r++)
        v[r] = r < n_rank ? *sp_peer(&p->o[i], r) : 0.0f;
#pragma unroll
    for (uint32_t r = 0; r < CLUSTER_RANKS; r++)
        sum = __fmaf_rn(p->factor[h][r], v[r], sum);
    return __fmaf_rn(x, p->keep[h], sum);
}

template <int DIMS, int SETS>
static __device__ void cluster_fold(const span_job &j, uint32_t lane, uint32_t head0,
                                    uint32_t n_head, cluster_mem<DIMS, SETS> *m)
{
    const uint32_t dim = 64 * DIMS, n = n_head * dim, n_rank = sp_cluster_size();
    const uint32_t each = (n + n_rank - 1) / n_rank, h = threadIdx.x / WARP;
    const uint32_t first = min(sp_cluster_rank() * each, n), end = min(first + each, n);
    const uint64_t n_o = (uint64_t)j.group * dim, row = j.a.row[lane / j.a.kv.n_kv_head];
    const uint64_t head = (uint64_t)(lane % j.a.kv.n_kv_head) * j.group + head0;
    float         *part = j.a.part + lane * j.part_floats, *o = part + (uint64_t)head0 * dim;
    float          max = SPAN_NO_KEY, sum = 0.0f, was = 0.0f;

    if (h < n_head && !j.a.first) {
        max = part[n_o + head0 + h];
        sum = part[n_o + j.group + head0 + h];
    }
    if (first + threadIdx.x < end && !j.a.first)
        was = o[first + threadIdx.x];
    sp_cluster_sync(); /* all partials are there */
#pragma unroll 1
    for (uint32_t s = 0; h < n_head && s < j.n_span; s++)
        cluster_factors<DIMS, SETS>(&m->part[s], h, &max, &sum);
    if (h < n_head && threadIdx.x % WARP == 0) {
        m->max[h] = max;
        m->sum[h] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = first + threadIdx.x; i < end; i += SPAN_THREADS) {
        float x = i == first + threadIdx.x ? was : j.a.first ? 0.0f : o[i];

#pragma unroll 1
        for (uint32_t s = 0; s < j.n_span; s++)
            x = cluster_number<DIMS, SETS>(&m->part[s], i, x);
        o[i] = x;
        if (j.a.out)
            j.a.out[row * j.a.out_stride + head * dim + i] = x / m->sum[i / dim];
    }
    sp_cluster_arrive();
    sp_cluster_wait(); /* peers have looked at this block's partials, and at part */
    if (sp_cluster_rank() == 0 && threadIdx.x < n_head) {
        const uint32_t a = threadIdx.x;

        part[n_o + head0 + a]           = m->max[a];
        part[n_o + j.group + head0 + a] = m->sum[a];
        if (j.a.lse)
            j.a.lse[row * j.a.lse_stride + head + a] =
                m->sum[a] > 0.0f ? m->max[a] + logf(m->sum[a]) : -INFINITY;
    }
}

template <int DIMS, int SETS>
static __global__ void __launch_bounds__(SPAN_THREADS, DIMS *SETS > 2 ? 1 : 2)
    span_cluster(const __grid_constant__ span_job j)
{
    extern __shared__ uint4  cluster_dynamic[];
    cluster_mem<DIMS, SETS> *m     = (cluster_mem<DIMS, SETS> *)cluster_dynamic;
    const uint32_t           heads = SETS * SPAN_HEADS, head0 = blockIdx.z * heads;
    const uint32_t           n_head = j.group - head0 < heads ? j.group - head0 : heads;

    sp_begin();
    cluster_spans<DIMS, SETS>(j, blockIdx.y, head0, n_head, m);
    cluster_fold<DIMS, SETS>(j, blockIdx.y, head0, n_head, m);
}

#else

template <int DIMS, int SETS>
static __global__ void __launch_bounds__(SPAN_THREADS, DIMS *SETS > 2 ? 1 : 2)
    span_cluster(const __grid_constant__ span_job j)
{
    (void)j;
}

#endif

/* ---- for cuda_span.cu --------------------------------------------------------------------- */

/* Shared memory of a block; 0: the shape is not served. */
static uint64_t cluster_bytes(const span_job &j)
{
    const bool wide = j.group > SPAN_HEADS;

    switch (j.a.kv.type == KVD_DTYPE_BF16 ? j.a.kv.head_dim : 0) {
    case 64:
        return wide ? sizeof(cluster_mem<1, 2>) : sizeof(cluster_mem<1, 1>);
    case 128:
        return wide ? sizeof(cluster_mem<2, 2>) : sizeof(cluster_mem<2, 1>);
    case 256:
        return sizeof(cluster_mem<4, 1>);
    default:
        return 0;
    }
}

/* Places on all processors for blocks of clusters that share a lane's heads, of which there may be
 * several; wide blocks have a processor for themselves. */
static uint64_t cluster_places(const cuda_backend *be, const span_job &j)
{
    const uint32_t dims = j.a.kv.head_dim / 64, sets = j.group > SPAN_HEADS && dims <= 2 ? 2 : 1;
    const uint32_t heads = sets * SPAN_HEADS;

    return (uint64_t)(dims * sets > 2 ? 1 : SPAN_BLOCKS) * be->n_sm /
           ((j.group + heads - 1) / heads);
}

/* At most three quarters of all places are taken. */
uint32_t cuda_span_ranks(const cuda_backend *be, const span_job &j, uint64_t n_lane)
{
    const uint64_t bytes = cluster_bytes(j), places = cluster_places(be, j) * 3 / 4;
    const uint64_t n = kvd_min_u64(CLUSTER_RANKS, places / kvd_max_u64(1, n_lane));

    if (be->cc < 90 || bytes == 0 || bytes > be->smem_block || n < CLUSTER_MIN)
        return 0;
    return (uint32_t)(j.a.first && j.n_span == 1 ? kvd_min_u64(n, CLUSTER_FEW) : n);
}

template <int DIMS, int SETS>
static cudaError_t cluster_launch(const cuda_backend *be, const span_job &j, uint32_t n_rank,
                                  uint32_t n_lane, cudaStream_t s)
{
    const uint32_t    bytes = sizeof(cluster_mem<DIMS, SETS>), heads = SETS * SPAN_HEADS;
    const dim3        grid(n_rank, n_lane, (j.group + heads - 1) / heads);
    const auto        kernel = span_cluster<DIMS, SETS>;
    const cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);

    return e != cudaSuccess ? e : sp_launch(be, s, grid, SPAN_THREADS, bytes, n_rank, kernel, j);
}

cudaError_t cuda_span_cluster(const cuda_backend *be, const span_job &j, uint32_t n_rank,
                              uint32_t n_lane, cudaStream_t s)
{
    const bool wide = j.group > SPAN_HEADS;

    switch (j.a.kv.head_dim) {
    case 64:
        return wide ? cluster_launch<1, 2>(be, j, n_rank, n_lane, s)
                    : cluster_launch<1, 1>(be, j, n_rank, n_lane, s);
    case 128:
        return wide ? cluster_launch<2, 2>(be, j, n_rank, n_lane, s)
                    : cluster_launch<2, 1>(be, j, n_rank, n_lane, s);
    default:
        return cluster_launch<4, 1>(be, j, n_rank, n_lane, s);
    }
}
