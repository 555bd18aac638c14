/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_span.cu - attention of one new token over one or two spans per lane, in one launch.
 *
 * Where clusters of blocks of threads serve a lane, see cuda_span_cluster.cu.  Else a span's keys
 * (its records' tokens, then keys of blocks) are cut into pieces of a multiple of SPAN_KEYS, at
 * most n_piece of them: fewer where there are many lanes (deterministic: where so many are
 * reserved), else how depends on the span alone.  Each piece gives a partial softmax; the block of
 * threads that comes last of a lane's folds them in their order behind what part holds, span by
 * span, so that two spans at once have the bits of one after the other.
 *
 * Shapes that tensor cores do not serve (see cuda_span.cuh) take a plain kernel, a warp a key and a
 * block of threads a query head.
 *
 * Scratch: counters of the blocks that are through, 0 between launches; the pieces' partials.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_span.cuh"

#define FOLD_HEADS (2 * SPAN_HEADS) /* of a block of threads at most */
#define FOLD_AHEAD 8u

/* Pieces of a span at most: enough of all lanes together to fill the processors. */
static uint32_t span_pieces(const cuda_backend *be, uint64_t n_lane)
{
    const uint64_t n = (uint64_t)SPAN_BLOCKS * be->n_sm / kvd_max_u64(1, n_lane);

    return (uint32_t)kvd_max_u64(SPAN_PIECES_MIN, kvd_min_u64(SPAN_PIECES, n));
}

static uint64_t span_count_bytes(uint64_t n_seq, uint64_t n_head)
{
    return kvd_align_up(n_seq * n_head * sizeof(uint32_t), 256);
}

/* For any shapes up to lim's, those with one KV head included: n_lane x span_pieces(n_lane) is
 * below the larger of SPAN_BLOCKS x n_sm and SPAN_PIECES_MIN x n_lane. */
uint64_t cuda_span_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t heads = (uint64_t)lim->n_seq * lim->n_head;
    const uint64_t most =
        kvd_max_u64((uint64_t)SPAN_BLOCKS * be->n_sm * lim->n_head, SPAN_PIECES_MIN * heads);

    return span_count_bytes(lim->n_seq, lim->n_head) + SPAN_SPANS *
                                                           kvd_min_u64(SPAN_PIECES * heads, most) *
                                                           (lim->head_dim + 2) * sizeof(float);
}

static __device__ __forceinline__ float *span_piece(const span_job &j, uint32_t lane, uint32_t span,
                                                    uint32_t piece)
{
    return j.piece + (((uint64_t)lane * SPAN_SPANS + span) * j.n_piece + piece) * j.part_floats;
}

/* ---- fold ---------------------------------------------------------------------------- */

typedef struct fold_mem {
    float    factor[SPAN_SPANS][FOLD_HEADS][SPAN_PIECES], keep[SPAN_SPANS][FOLD_HEADS];
    float    max[FOLD_HEADS], sum[FOLD_HEADS];
    uint32_t n_piece[SPAN_SPANS], last;
} fold_mem;

/* One warp, one head: factors of a span's pieces and of what was there before. */
static __device__ void fold_factors(const span_job &j, const float *in, uint32_t span, uint32_t h,
                                    uint64_t max_at, fold_mem *m)
{
    const uint32_t lane = threadIdx.x % WARP, n = m->n_piece[span];
    float          x[SPAN_PIECES / WARP], max = SPAN_NO_KEY, sum = 0.0f, keep;

#pragma unroll
    for (uint32_t i = 0; i < SPAN_PIECES / WARP; i++) {
        const uint32_t p = lane + i * WARP;

        x[i] = p < n ? __ldcg(in + p * j.part_floats + max_at) : SPAN_NO_KEY;
        max  = fmaxf(max, x[i]);
    }
    max  = fmaxf(m->max[h], cuda_warp_max(max));
    keep = expf(m->max[h] - max);
#pragma unroll
    for (uint32_t i = 0; i < SPAN_PIECES / WARP; i++) {
        const uint32_t p = lane + i * WARP;
        const float    f = expf(x[i] - max);

        m->factor[span][h][p] = f;
        if (p < n)
            sum = __fmaf_rn(f, __ldcg(in + p * j.part_floats + max_at + j.group), sum);
    }
    sum = __fmaf_rn(m->sum[h], keep, cuda_warp_sum(sum));
    __syncwarp();
    if (lane == 0) {
        m->keep[span][h] = keep;
        m->max[h]        = max;
        m->sum[h]        = sum;
    }
    __syncwarp();
}

/* The pieces' weighted sums of one number behind x. */
static __device__ __forceinline__ float fold_number(const span_job &j, const float *in,
                                                    const float *factor, uint32_t n, float keep,
                                                    float x)
{
    float sum = 0.0f;

    for (uint32_t p0 = 0; p0 < n; p0 += FOLD_AHEAD) {
        float v[FOLD_AHEAD];

#pragma unroll
        for (uint32_t i = 0; i < FOLD_AHEAD; i++)
            v[i] = p0 + i < n ? __ldcg(in + (p0 + i) * j.part_floats) : 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < FOLD_AHEAD; i++)
            sum = __fmaf_rn(factor[p0 + i], v[i], sum);
    }
    return __fmaf_rn(x, keep, sum);
}

/* Heads head0 .. + n_head of a lane: all pieces behind what part holds; then what a lane gives. */
static __device__ void span_fold(const span_job &j, uint32_t lane, uint32_t head0, uint32_t n_head,
                                 fold_mem *m)
{
    const uint32_t dim = j.a.kv.head_dim, n_warp = blockDim.x / WARP;
    const uint64_t n_o = (uint64_t)j.group * dim, row = j.a.row[lane / j.a.kv.n_kv_head];
    const uint64_t head = (uint64_t)(lane % j.a.kv.n_kv_head) * j.group + head0;
    float         *part = j.a.part + lane * j.part_floats;

    for (uint32_t h = threadIdx.x / WARP; h < n_head; h += n_warp) {
        if (threadIdx.x % WARP == 0) {
            m->max[h] = j.a.first ? SPAN_NO_KEY : part[n_o + head0 + h];
            m->sum[h] = j.a.first ? 0.0f : part[n_o + j.group + head0 + h];
        }
        __syncwarp();
        for (uint32_t s = 0; s < j.n_span; s++)
            fold_factors(j, span_piece(j, lane, s, 0), s, h, n_o + head0 + h, m);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n_head * dim; i += blockDim.x) {
        const uint32_t h = i / dim;
        float         *o = part + (uint64_t)head0 * dim + i;
        float          x = j.a.first ? 0.0f : *o;

        for (uint32_t s = 0; s < j.n_span; s++)
            x = fold_number(j, span_piece(j, lane, s, 0) + (uint64_t)head0 * dim + i,
                            m->factor[s][h], m->n_piece[s], m->keep[s][h], x);
        *o = x;
        if (j.a.out)
            j.a.out[row * j.a.out_stride + head * dim + i] = x / m->sum[h];
    }
    if (threadIdx.x < n_head) {
        const uint32_t h   = threadIdx.x;
        const float    sum = m->sum[h];

        part[n_o + head0 + h]           = m->max[h];
        part[n_o + j.group + head0 + h] = sum;
        if (j.a.lse)
            j.a.lse[row * j.a.lse_stride + head + h] =
                sum > 0.0f ? m->max[h] + logf(sum) : -INFINITY;
    }
}

/* ---- pieces and blocks ----------------------------------------------------------------- */

/* A block takes every gridDim.x-th of the lane's pieces, those of the second span behind those of
 * the first. */
typedef struct span_work {
    span_keys k[SPAN_SPANS];
    uint32_t  n; /* pieces of both */
} span_work;

static __device__ __forceinline__ span_work span_begin(const span_job &j, uint32_t lane)
{
    span_work w;

    w.k[0]         = span_open(j, lane, 0);
    w.k[1].n_piece = 0;
    if (j.n_span > 1)
        w.k[1] = span_open(j, lane, 1);
    w.n = w.k[0].n_piece + w.k[1].n_piece;
    return w;
}

/* Whether this block, having done its part, is the last one of those that have any: then it sees
 * what the others have written. */
static __device__ bool span_last(const span_job &j, const span_work &w, uint32_t lane, fold_mem *m)
{
    const uint32_t n = w.n < 1 ? 1 : w.n < gridDim.x ? w.n : gridDim.x;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *count = j.count + (uint64_t)lane * gridDim.z + blockIdx.z;

        m->last       = n == 1 || atomicAdd(count, 1) + 1 == n;
        m->n_piece[0] = w.k[0].n_piece;
        m->n_piece[1] = w.k[1].n_piece;
        if (m->last && n > 1)
            *count = 0; /* for the next launch */
        __threadfence();
    }
    __syncthreads();
    return m->last;
}

/* The block's warps merged, into the piece's partial. */
template <int DIMS, int SETS>
static __device__ void span_store(const span_job &j, const span_mem<DIMS, SETS> *m, float *out,
                                  uint32_t head0, uint32_t n_head)
{
    const uint32_t dim = 64 * DIMS;

    for (uint32_t k = threadIdx.x; k < n_head * dim; k += blockDim.x) {
        const uint32_t h = k / dim, d = k % dim;
        float          max, sum;

        out[(uint64_t)(head0 + h) * dim + d] = span_merge<DIMS, SETS>(m, h, d, &max, &sum);
        if (d == 0) {
            out[(uint64_t)j.group * dim + head0 + h]           = max;
            out[(uint64_t)j.group * dim + j.group + head0 + h] = sum;
        }
    }
    __syncthreads(); /* m is free again */
}

template <int DIMS, int SETS> struct tiles_mem {
    uint2                q[SETS * 4 * DIMS][WARP];
    span_mem<DIMS, SETS> span;
    fold_mem             fold;
};

template <int DIMS, int SETS>
static __global__ void __launch_bounds__(SPAN_THREADS, DIMS *SETS > 2 ? 1 : 2)
    span_tiles(const __grid_constant__ span_job j)
{
    sp_begin();
    extern __shared__ uint4 span_dynamic[];
    tiles_mem<DIMS, SETS>  *mem  = (tiles_mem<DIMS, SETS> *)span_dynamic;
    span_mem<DIMS, SETS>   *m    = &mem->span;
    const uint32_t          lane = blockIdx.y, kv_head = lane % j.a.kv.n_kv_head;
    const uint32_t          heads = SETS * SPAN_HEADS, head0 = blockIdx.z * heads;
    const uint32_t          n_head = j.group - head0 < heads ? j.group - head0 : heads;
    const uint32_t          mine   = threadIdx.x / WARP * SPAN_STEP;
    const span_work         w      = span_begin(j, lane);

    for (uint32_t i = blockIdx.x; i < w.n; i += gridDim.x) {
        const uint32_t       second = i >= w.k[0].n_piece, p = second ? i - w.k[0].n_piece : i;
        const span_keys      k     = second ? w.k[1] : w.k[0];
        const uint32_t       first = p * k.each + mine, last = (p + 1) * k.each;
        const uint32_t       end = last < k.n ? last : k.n;
        const uint8_t       *row = first < end ? span_mine(j, k, kv_head, first, end) : NULL;
        span_sum<DIMS, SETS> s   = {};

        if (i == blockIdx.x)
            span_queries(j, lane, head0, n_head, SETS, 4 * DIMS, mem->q);
        __syncthreads();
#pragma unroll
        for (uint32_t b = 0; b < SETS; b++)
            s.max[b] = SPAN_NO_KEY;
        span_walk<DIMS, SETS>(j, k, kv_head, first, end, SPAN_KEYS, row, mem->q, s);
        span_keep<DIMS, SETS>(s, m);
        __syncthreads();
        span_store<DIMS, SETS>(j, m, span_piece(j, lane, second, p), head0, n_head);
    }
    if (blockIdx.x < w.n || blockIdx.x == 0) {
        if (span_last(j, w, lane, &mem->fold))
            span_fold(j, lane, head0, n_head, &mem->fold);
    }
}

/* ---- any shape ---------------------------------------------------------------------- */

#define PLAIN_EACH (KVD_HEAD_DIM_MAX / WARP)

typedef struct plain_mem {
    float    o[SPAN_WARPS][KVD_HEAD_DIM_MAX], max[SPAN_WARPS], sum[SPAN_WARPS];
    fold_mem fold;
} plain_mem;

/* One warp: every SPAN_WARPS-th key of a piece. */
static __device__ void plain_keys(const span_job &j, const span_keys &k, uint32_t kv_head,
                                  const float *q, uint32_t first, uint32_t end, plain_mem *m)
{
    const uint32_t  dim = j.a.kv.head_dim, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const kvd_dtype type          = j.a.kv.type;
    float           o[PLAIN_EACH] = { 0.0f }, max = SPAN_NO_KEY, sum = 0.0f;

    for (uint32_t i = first + warp; i < end; i += SPAN_WARPS) {
        const uint8_t *row = span_row(j, k, kv_head, i);
        float          dot = 0.0f, most, shrink, p;

        for (uint32_t d = lane; d < dim; d += WARP)
            dot += q[d] * sp_row_at(type, row, d);
        dot    = cuda_warp_sum(dot) * j.a.scale;
        most   = fmaxf(max, dot);
        shrink = expf(max - most);
        p      = expf(dot - most);
        max    = most;
        sum    = sum * shrink + p;
#pragma unroll
        for (uint32_t e = 0; e < PLAIN_EACH; e++) {
            if (e * WARP + lane < dim)
                o[e] = o[e] * shrink +
                       p * sp_row_at(type, row + j.a.kv.record_bytes / 2, e * WARP + lane);
        }
    }
#pragma unroll
    for (uint32_t e = 0; e < PLAIN_EACH; e++) {
        if (e * WARP + lane < dim)
            m->o[warp][e * WARP + lane] = o[e];
    }
    m->max[warp] = max;
    m->sum[warp] = sum;
    __syncthreads();
}

/* The block's warps merged, into the piece's partial of head h. */
static __device__ void plain_store(const span_job &j, const plain_mem *m, float *out, uint32_t h)
{
    const uint32_t dim = j.a.kv.head_dim;

    for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x) {
        float max = SPAN_NO_KEY, sum = 0.0f, o = 0.0f;

        for (uint32_t w = 0; w < SPAN_WARPS; w++)
            max = fmaxf(max, m->max[w]);
        for (uint32_t w = 0; w < SPAN_WARPS; w++) {
            o += expf(m->max[w] - max) * m->o[w][d];
            sum += expf(m->max[w] - max) * m->sum[w];
        }
        out[(uint64_t)h * dim + d] = o;
        if (d == 0) {
            out[(uint64_t)j.group * dim + h]           = max;
            out[(uint64_t)j.group * dim + j.group + h] = sum;
        }
    }
    __syncthreads(); /* m is free again */
}

static __global__ void __launch_bounds__(SPAN_THREADS)
    span_plain(const __grid_constant__ span_job j)
{
    sp_begin();
    __shared__ plain_mem m;
    const uint32_t       lane = blockIdx.y, h = blockIdx.z, kv_head = lane % j.a.kv.n_kv_head;
    const span_work      w = span_begin(j, lane);
    const float         *q = j.a.q + j.a.row[lane / j.a.kv.n_kv_head] * j.a.q_stride +
                     ((uint64_t)kv_head * j.group + h) * j.a.kv.head_dim;

    for (uint32_t i = blockIdx.x; i < w.n; i += gridDim.x) {
        const uint32_t  second = i >= w.k[0].n_piece, p = second ? i - w.k[0].n_piece : i;
        const span_keys k    = second ? w.k[1] : w.k[0];
        const uint32_t  last = (p + 1) * k.each;

        plain_keys(j, k, kv_head, q, p * k.each, last < k.n ? last : k.n, &m);
        plain_store(j, &m, span_piece(j, lane, second, p), h);
    }
    if (blockIdx.x < w.n || blockIdx.x == 0) {
        if (span_last(j, w, lane, &m.fold))
            span_fold(j, lane, h, 1, &m.fold);
    }
}

/* ---- the op -------------------------------------------------------------------------- */

template <int DIMS, int SETS>
static cudaError_t tiles_launch(const cuda_backend *be, const span_job &j, dim3 grid,
                                cudaStream_t s)
{
    const uint32_t bytes = sizeof(tiles_mem<DIMS, SETS>), heads = SETS * SPAN_HEADS;

    if (bytes > 48u << 10) {
        const cudaError_t e =
            cudaFuncSetAttribute(span_tiles<DIMS, SETS>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);

        if (e != cudaSuccess)
            return e;
    }
    grid.z = (j.group + heads - 1) / heads;
    return sp_launch(be, s, grid, SPAN_THREADS, bytes, 1, span_tiles<DIMS, SETS>, j);
}

static cudaError_t span_launch(const cuda_backend *be, const span_job &j, uint32_t n_lane,
                               cudaStream_t s)
{
    const uint32_t dim  = j.a.kv.type == KVD_DTYPE_BF16 ? j.a.kv.head_dim : 0;
    const bool     wide = j.group > SPAN_HEADS;
    const dim3     grid(j.n_piece, n_lane);

    if (dim == 64)
        return wide ? tiles_launch<1, 2>(be, j, grid, s) : tiles_launch<1, 1>(be, j, grid, s);
    if (dim == 128)
        return wide ? tiles_launch<2, 2>(be, j, grid, s) : tiles_launch<2, 1>(be, j, grid, s);
    if (dim == 256)
        return tiles_launch<4, 1>(be, j, grid, s);
    return sp_launch(be, s, dim3(j.n_piece, n_lane, j.group), SPAN_THREADS, 0, 1, span_plain, j);
}

kvd_status cuda_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const uint32_t      n_lane = a->n_row * a->kv.n_kv_head;
    const uint64_t      counts = span_count_bytes(be->lim.n_seq, be->lim.n_head);
    span_job            j      = {};
    uint64_t            lanes, bytes;
    uint32_t            n_rank;
    uint8_t            *mem;

    if (n_lane == 0)
        return KVD_OK;
    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= KVD_HEAD_DIM_MAX);
    j.a           = *a;
    j.group       = a->n_head / a->kv.n_kv_head;
    j.n_span      = a->then ? 2 : 1;
    lanes         = be->deterministic ? (uint64_t)be->lim.n_seq * a->kv.n_kv_head : n_lane;
    j.row_bytes   = (uint32_t)(a->kv.record_bytes / (2 * a->kv.chunk_tokens));
    j.part_floats = kvd_attn_part_floats(j.group, a->kv.head_dim);
    n_rank        = cuda_span_ranks(be, j, lanes);
    if (n_rank) {
        CUDA_TRY(cuda_span_cluster(be, j, n_rank, n_lane, st->s), "attn_span", err);
        return KVD_OK;
    }
    j.n_piece = span_pieces(be, lanes);
    bytes     = counts + SPAN_SPANS * n_lane * j.n_piece * j.part_floats * sizeof(float);
    mem       = (uint8_t *)cuda_scratch_of(be, CUDA_SCRATCH_SPAN, bytes);
    j.count   = (uint32_t *)mem;
    j.piece   = (float *)(mem + counts);
    CUDA_TRY(span_launch(be, j, n_lane, st->s), "attn_span", err);
    return KVD_OK;
}
