/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select.cu - select: its scratch, its stages, and those of them that few cases need.
 * Owns: nothing (the backend owns the scratch).  Thread: the backend's caller. */
#include "backend/cuda/cuda_select.cuh"

#define SUM_THREADS  256u
#define RERANK_WARPS 8u
#define RERANK_GRID  32u
#define SCAN_UNITS   256u /* of one block of threads at least */

/* ---- averages of logits, sums -------------------------------------------------------- */

/* The mean of the heads' logits, into a row of its own. */
static __global__ void mean_logits(const __grid_constant__ select_job j)
{
    sp_begin();
    const kvd_select_seq *q      = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    const uint32_t        head   = blockIdx.y % j.a.index.n_kv_head;
    const bool            mapped = j.s.kind == KVD_INDEX_CLUSTER;
    const float          *in     = select_logits(j, blockIdx.y, 0);
    float                *out    = select_logits(j, blockIdx.y, j.group);

    /* whole groups of four, which are read together */
    for (uint32_t c = q->first_chunk / 4 * 4 + blockIdx.x * SUM_THREADS + threadIdx.x;
         c < (q->n_chunk + 3) / 4 * 4; c += gridDim.x * SUM_THREADS) {
        float x = 0.0f;

        for (uint32_t h = 0; h < j.group && c < q->n_chunk; h++)
            x += in[h * j.row_stride + select_column(j, q, head, c, mapped)];
        out[c] = x / (float)j.group;
    }
}

/* Largest logit and sum, as scan gives them, of logits that scan did not make as they are. */
static __global__ void sum_logits(const __grid_constant__ select_job j)
{
    sp_begin();
    __shared__ float      mem[2][SUM_THREADS / WARP];
    const kvd_select_seq *q    = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    const uint32_t        head = blockIdx.y % j.a.index.n_kv_head, lane = threadIdx.x % WARP;

    for (uint32_t h = 0; h < j.heads; h++) {
        const float *in  = select_logits(j, blockIdx.y, j.first_row + h);
        float        max = -INFINITY, sum = 0.0f;

        for (uint32_t c = q->first_chunk + blockIdx.x * SUM_THREADS + threadIdx.x; c < q->n_chunk;
             c += gridDim.x * SUM_THREADS)
            select_merge(&max, &sum, in[select_column(j, q, head, c, select_mapped(j))], 1.0f);
        for (uint32_t d = WARP / 2; d; d /= 2) {
            const float max2 = __shfl_xor_sync(ALL_LANES, max, d);
            const float sum2 = __shfl_xor_sync(ALL_LANES, sum, d);

            select_merge(&max, &sum, max2, sum2);
        }
        if (lane == 0) {
            mem[0][threadIdx.x / WARP] = max;
            mem[1][threadIdx.x / WARP] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (uint32_t w = 1; w < SUM_THREADS / WARP; w++)
                select_merge(&max, &sum, mem[0][w], mem[1][w]);
            j.part[((uint64_t)blockIdx.y * j.n_part + blockIdx.x) * j.group + h] =
                make_float2(max, sum);
        }
        __syncthreads();
    }
}

/* ---- CASCADE ------------------------------------------------------------------------ */

static __device__ float rerank_value(const cpu_index_plane &p, const uint8_t *lane, uint32_t unit,
                                     uint32_t c)
{
    const uint32_t  u = unit % CPU_INDEX_TILE, per_row = 32 / p.bits;
    const uint8_t  *tile = lane + p.code_off + unit / CPU_INDEX_TILE * p.tile_bytes;
    const uint16_t *par =
        (const uint16_t *)(lane + p.param_off) + (uint64_t)(unit / p.group) * 2 * p.dim_pad;
    uint32_t byte;

    if (p.elem == KVD_INDEX_BF16)
        return sp_from_bf16(((const uint16_t *)tile)[c * CPU_INDEX_TILE + u]);
    byte = tile[(uint64_t)(c / per_row) * 64 + 4 * u + c % 4];
    return (float)(byte >> (p.bits * (c % per_row / 4)) & ((1u << p.bits) - 1u)) *
               sp_from_f16(par[c]) +
           sp_from_f16(par[p.dim_pad + c]);
}

/* One warp, one chunk: its logits by its keys. */
static __device__ void rerank_chunk(const select_job &j, const kvd_select_seq *q, uint32_t chunk)
{
    const uint32_t kv_head = blockIdx.y % j.a.index.n_kv_head, ct = j.s.chunk_tokens;
    const uint8_t *lane = (const uint8_t *)j.a.index.pool + q->iblock[chunk / j.s.n_chunk] +
                          j.a.index.lane_off + kv_head * j.a.index.head_stride;
    const float *x = j.a.q + q->row * j.a.q_stride + (uint64_t)kv_head * j.group * j.s.dim;

    for (uint32_t h = 0; h < j.group; h++, x += j.s.dim) {
        float max = -INFINITY, sum = 0.0f;

        for (uint32_t t = 0; t < ct; t++) {
            float dot = 0.0f;

            for (uint32_t c = threadIdx.x % WARP; c < j.s.dim; c += WARP)
                dot +=
                    x[c] * j.a.scale * rerank_value(j.s.key, lane, chunk % j.s.n_chunk * ct + t, c);
            select_merge(&max, &sum, cuda_warp_sum(dot), 1.0f);
        }
        if (threadIdx.x % WARP == 0)
            select_logits(j, blockIdx.y, h)[chunk] = max + logf(sum);
    }
}

static __global__ void __launch_bounds__(RERANK_WARPS *WARP)
    rerank(const __grid_constant__ select_job j)
{
    sp_begin();
    const kvd_select_seq *q = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    const uint32_t        n = j.n_list[blockIdx.y];

    for (uint32_t i = blockIdx.x * RERANK_WARPS + threadIdx.x / WARP; i < n;
         i += gridDim.x * RERANK_WARPS)
        rerank_chunk(j, q, j.list[(uint64_t)blockIdx.y * j.row_stride + i]);
}

/* ---- scratch ------------------------------------------------------------------------ */

static uint64_t row_stride_of(const kvd_backend_limits *lim)
{
    return kvd_align_up(lim->n_chunk, CPU_INDEX_BLOCK / 4);
}

static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t off = *at;

    *at += kvd_align_up(bytes, 256);
    return off;
}

/* Places the parts for so many lanes; returns their size. */
static uint64_t place(select_job *j, uint8_t *mem, uint64_t n_lane, uint64_t n_head)
{
    const uint64_t n     = j->row_stride;
    uint64_t       at    = 0;
    const uint64_t logit = take(&at, (n_head + n_lane) * n * sizeof(float));
    const uint64_t part  = take(&at, n_head * SELECT_PARTS_MAX * sizeof(float2));
    const uint64_t list  = take(&at, n_lane * n * sizeof(uint32_t));
    const uint64_t count = take(&at, n_lane * sizeof(uint32_t));
    const uint64_t flag  = take(&at, n_lane * n);

    j->logit  = (float *)(mem + logit);
    j->part   = (float2 *)(mem + part);
    j->list   = (uint32_t *)(mem + list);
    j->n_list = (uint32_t *)(mem + count);
    j->listed = mem + flag;
    return at;
}

uint64_t cuda_select_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    select_job j = {};

    (void)be;
    j.row_stride = row_stride_of(lim);
    return lim->n_chunk ? place(&j, NULL, (uint64_t)lim->n_seq * lim->n_kv_head,
                                (uint64_t)lim->n_seq * lim->n_head)
                        : 0;
}

/* ---- the op -------------------------------------------------------------------------- */

/* Blocks of threads that share a lane.  Sums are merged in their order, so where results must not
 * depend on the batch, neither may their number. */
static uint32_t parts_of(const cuda_backend *be, const select_job &j)
{
    const uint64_t lanes = be->deterministic ? j.a.index.n_kv_head : j.n_lane;
    const uint64_t most  = kvd_div_up(be->lim.n_chunk, SCAN_UNITS);
    const uint64_t n     = 2ull * be->n_sm / lanes; /* two fit into a processor at once */

    if (j.fast)
        return cuda_select_fast_parts(be, lanes);
    return (uint32_t)kvd_max_u64(1, kvd_min_u64(kvd_min_u64(n, most), SELECT_PARTS_MAX));
}

static select_job job_of(const cuda_backend *be, const kvd_select_args *a)
{
    select_job j = {};
    uint64_t   bytes;

    j.a = *a;
    cpu_index_shape_of(&j.s, &a->index.desc);
    j.group      = a->n_head / a->index.n_kv_head;
    j.n_lane     = a->n_seq * a->index.n_kv_head;
    j.n_row      = j.group + 1;
    j.heads      = a->rule == KVD_GQA_MEAN_LOGITS ? 1 : j.group;
    j.first_row  = a->rule == KVD_GQA_MEAN_LOGITS ? j.group : 0;
    j.row_stride = row_stride_of(&be->lim);
    j.log_tokens = logf((float)j.s.chunk_tokens);
    j.fast       = cuda_select_fast_can(be, j);
    j.n_part     = parts_of(be, j);
    bytes        = place(&j, NULL, j.n_lane, (uint64_t)a->n_seq * a->n_head);
    place(&j, (uint8_t *)cuda_scratch_of(be, CUDA_SCRATCH_SELECT, bytes), j.n_lane,
          (uint64_t)a->n_seq * a->n_head);
    return j;
}

/* Makes the sums over the logits as they are. */
static cudaError_t weigh(const cuda_backend *be, const select_job &j, cudaStream_t s)
{
    const dim3 grid(j.n_part, j.n_lane);

    if (j.first_row) {
        const cudaError_t e = sp_launch(be, s, grid, SUM_THREADS, 0, 1, mean_logits, j);

        if (e != cudaSuccess)
            return e;
    }
    return sp_launch(be, s, grid, SUM_THREADS, 0, 1, sum_logits, j);
}

/* window: NULL, or what finish goes on to; beside: see cuda_select_fast(). */
static kvd_status run(kvd_stream *st, const kvd_select_args *a, const kvd_choose_args *window,
                      bool beside, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);
    select_job          j;
    bool                cascade, whole;

    kvd_assert(a->n_head % a->index.n_kv_head == 0);
    if (a->n_head / a->index.n_kv_head > SELECT_GROUP_MAX)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "cuda: select: %u query heads share a KV head",
                        a->n_head / a->index.n_kv_head);
    j       = job_of(be, a);
    cascade = j.s.kind == KVD_INDEX_CASCADE;
    CUDA_TRY(cuda_select_whole(be, j, window, beside, st->s, &whole), "select", err);
    if (whole)
        return KVD_OK;
    if (j.fast)
        CUDA_TRY(cuda_select_fast(be, j, beside, st->s), "select", err);
    else
        CUDA_TRY(cuda_select_scan(be, j, j.s.kind == KVD_INDEX_QUANT_K, st->s), "select", err);
    if (j.first_row || j.s.kind == KVD_INDEX_CLUSTER)
        CUDA_TRY(weigh(be, j, st->s), "select", err);
    if (cascade) {
        CUDA_TRY(cuda_select_finish(be, j, NULL, true, false, st->s), "select", err);
        CUDA_TRY(sp_launch(be, st->s, dim3(RERANK_GRID, j.n_lane), RERANK_WARPS * WARP, 0, 1,
                           rerank, j),
                 "select", err);
        CUDA_TRY(weigh(be, j, st->s), "select", err);
    }
    CUDA_TRY(cuda_select_finish(be, j, window, false, cascade, st->s), "select", err);
    return KVD_OK;
}

kvd_status cuda_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err)
{
    return a->n_seq ? run(st, a, NULL, false, err) : KVD_OK;
}

/* Attention over the kept set begins when all before it is done, so the scan may run beside it. */
kvd_status cuda_choose(kvd_stream *st, const kvd_choose_args *a, kvd_err *err)
{
    if (a->select.n_seq == 0)
        return KVD_OK;
    KVD_TRY(cuda_attn_span(st, &a->kept, err));
    return run(st, &a->select, a, true, err);
}
