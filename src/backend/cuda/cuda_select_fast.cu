/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_fast.cu - logits by INT4 landmarks of one plane: what cuda_select_scan.cu does, as
 * quickly as memory gives them (see cuda_select_fast.cuh).
 *
 * Where the kernel ahead is attention over the kept set, whose result this one does not read, it
 * runs beside that: see `beside`.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select_fast.cuh"

#define FAST_DEPTH 2u

typedef struct fast_job {
    select_job j;
    fast_shape s;
    bool       beside;
} fast_job;

typedef struct fast_mem {
    uint64_t arrived[FAST_WARPS][FAST_DEPTH];
    float    max[FAST_WARPS][FAST_HEADS], sum[FAST_WARPS][FAST_HEADS];
} fast_mem;

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* A thread's two heads: where their logits go, and their largest and sum so far. */
typedef struct fast_heads {
    float *row[2]; /* NULL: there is no such head */
    float  max[2], sum[2];
} fast_heads;

/* Four chunks from c on. */
static __device__ __forceinline__ void fast_put(fast_heads &h, uint32_t c, uint32_t first,
                                                uint32_t end, fast_four f)
{
    for (uint32_t k = 0; k < 2; k++)
        if (h.row[k])
            *(float4 *)(h.row[k] + c) = make_float4(f.v[k][0], f.v[k][1], f.v[k][2], f.v[k][3]);
    fast_ends(f, c, first, end);
    for (uint32_t k = 0; k < 2; k++) {
        const float *v    = f.v[k];
        const float  most = fmaxf(h.max[k], fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])));

        h.sum[k] = h.sum[k] * __expf(h.max[k] - most) +
                   (__expf(v[0] - most) + __expf(v[1] - most)) +
                   (__expf(v[2] - most) + __expf(v[3] - most));
        h.max[k] = most;
    }
}

/* Largest and sum of this block of threads. */
template <bool WIDE>
static __device__ void fast_fold(const select_job &j, fast_mem *m, const fast_heads &h)
{
    const uint32_t lane = threadIdx.x % WARP, head0 = fast_head0<WIDE>();

    for (uint32_t k = 0; k < 2; k++) {
        float max = h.max[k], sum = h.sum[k];

        for (uint32_t d = WIDE ? 4 : 2; d < WARP; d *= 2) {
            const float max2 = __shfl_xor_sync(ALL_LANES, max, d);
            const float sum2 = __shfl_xor_sync(ALL_LANES, sum, d);

            select_merge(&max, &sum, max2, sum2);
        }
        if (lane < (WIDE ? 4 : 2)) {
            m->max[threadIdx.x / WARP][head0 + k] = max;
            m->sum[threadIdx.x / WARP][head0 + k] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x < j.group) {
        float2 all = make_float2(FAST_NONE, 0.0f);

        for (uint32_t w = 0; w < FAST_WARPS; w++)
            select_merge(&all.x, &all.y, m->max[w][threadIdx.x], m->sum[w][threadIdx.x]);
        if (all.x == FAST_NONE && all.y == 0.0f)
            all.x = -INFINITY;
        j.part[((uint64_t)blockIdx.y * j.n_part + blockIdx.x) * j.group + threadIdx.x] = all;
    }
}

template <int ROWS, bool WIDE>
static __global__ void __launch_bounds__(FAST_WARPS *WARP, 1)
    scan_fast(const __grid_constant__ fast_job f)
{
    extern __shared__ uint4 fast_dynamic[];
    __shared__ fast_mem     m;
    const select_job       &j     = f.j;
    const uint32_t          head0 = fast_head0<WIDE>(), half = fast_half<WIDE>();
    const fast_spot         at      = fast_find<ROWS, WIDE>(j, f.s);
    const float             more[2] = { j.log_tokens, j.log_tokens };
    fast_query<ROWS>        q;
    float                   x[ROWS][8];
    fast_heads              h;
    fast_walk               w;

    if (f.beside)
        cuda_pdl_go();
    else
        sp_begin();
    w.seq     = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    w.stage   = (uint8_t *)fast_dynamic + threadIdx.x / WARP * FAST_DEPTH * f.s.stage;
    w.arrived = m.arrived[threadIdx.x / WARP];
    w.step    = gridDim.x * FAST_WARPS;
    w.end     = (w.seq->n_chunk + j.s.n_chunk - 1) / j.s.n_chunk;
    w.block   = w.seq->first_chunk / j.s.n_chunk + threadIdx.x / WARP * gridDim.x + blockIdx.x;
    fast_aim(j, w);
    fast_read<ROWS, WIDE>(j.a.q + w.seq->row * j.a.q_stride +
                              (uint64_t)(blockIdx.y % j.a.index.n_kv_head) * j.group * j.s.dim,
                          j.group, x);
    fast_begin(f.s, w);
    fast_open<ROWS, WIDE>(x, j.a.scale, q);
    for (uint32_t k = 0; k < 2; k++) {
        h.row[k] = head0 + k < j.group && half < f.s.n_group
                       ? select_logits(j, blockIdx.y, head0 + k)
                       : NULL;
        h.max[k] = FAST_NONE;
        h.sum[k] = 0.0f;
    }
    for (uint32_t n = 0; w.block + (uint64_t)n * w.step < w.end; n++) {
        const uint32_t chunk = (w.block + n * w.step) * j.s.n_chunk + threadIdx.x % WARP / 4 * 4;
        fast_four      v[WIDE ? 2 : 1];
        fast_raw<WIDE> r;

        fast_block<ROWS, WIDE>(at, fast_arrive(f.s, w, n), q, r);
        fast_leave(f.s, w, n);
        fast_close<ROWS, WIDE>(at, q, r, more, v);
        if (half < f.s.n_group)
            fast_put(h, chunk + half * CPU_INDEX_GROUP, w.seq->first_chunk, w.seq->n_chunk, v[0]);
        if (WIDE && f.s.n_group > 1)
            fast_put(h, chunk + CPU_INDEX_GROUP, w.seq->first_chunk, w.seq->n_chunk, v[WIDE]);
    }
    fast_fold<WIDE>(j, &m, h);
    if (f.beside)
        cuda_pdl_wait();
}

#else

template <int ROWS, bool WIDE>
static __global__ void __launch_bounds__(FAST_WARPS *WARP, 1)
    scan_fast(const __grid_constant__ fast_job f)
{
    (void)f;
}

#endif

/* ---- for cuda_select.cu ----------------------------------------------------------------- */

void cuda_select_fast_shape(const cpu_index_shape *s, uint32_t depth, fast_shape *out)
{
    const cpu_index_plane *p = &s->mark[0];

    out->bytes = (uint32_t)(p->code_off + p->n_unit / CPU_INDEX_TILE * p->tile_bytes);
    if (s->radius)
        out->bytes = (uint32_t)(s->radius_off + 2ull * s->n_chunk);
    out->stage   = (uint32_t)kvd_align_up(out->bytes, 128);
    out->n_group = s->n_chunk / CPU_INDEX_GROUP;
    out->depth   = depth;
}

bool cuda_select_fast_can(const cuda_backend *be, const select_job &j)
{
    const cpu_index_plane *p = &j.s.mark[0];
    fast_shape             f;

    cuda_select_fast_shape(&j.s, FAST_DEPTH, &f);
    return be->cc >= 90 && ((uint64_t)j.a.q & 15) == 0 && j.a.q_stride % 4 == 0 &&
           (j.s.kind == KVD_INDEX_MEAN || j.s.kind == KVD_INDEX_CASCADE) &&
           p->elem == KVD_INDEX_INT4 && (p->dim == 64 || p->dim == 128) &&
           p->group == CPU_INDEX_GROUP && p->param_off == 0 && j.group <= FAST_HEADS &&
           FAST_WARPS * FAST_DEPTH * f.stage + sizeof(fast_mem) <= be->smem_block;
}

uint32_t cuda_select_fast_parts(const cuda_backend *be, uint64_t n_lane)
{
    const uint64_t most = kvd_div_up(be->lim.n_chunk, CPU_INDEX_BLOCK / 4 * FAST_WARPS);

    return (uint32_t)kvd_max_u64(1, kvd_min_u64(kvd_min_u64(be->n_sm / n_lane, most),
                                                SELECT_PARTS_MAX));
}

template <int ROWS, bool WIDE>
static cudaError_t fast_launch(const cuda_backend *be, const fast_job &f, cudaStream_t s)
{
    const uint32_t    bytes = FAST_WARPS * FAST_DEPTH * f.s.stage;
    const dim3        grid(f.j.n_part, f.j.n_lane);
    const cudaError_t e =
        cudaFuncSetAttribute(scan_fast<ROWS, WIDE>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)bytes);

    return e != cudaSuccess
               ? e
               : sp_launch(be, s, grid, FAST_WARPS * WARP, bytes, 1, scan_fast<ROWS, WIDE>, f);
}

cudaError_t cuda_select_fast(const cuda_backend *be, const select_job &j, bool beside,
                             cudaStream_t s)
{
    fast_job f = {};

    f.j      = j;
    f.beside = beside;
    cuda_select_fast_shape(&j.s, FAST_DEPTH, &f.s);
    if (j.s.dim == 64)
        return j.group <= FAST_NARROW ? fast_launch<2, false>(be, f, s)
                                      : fast_launch<2, true>(be, f, s);
    return j.group <= FAST_NARROW ? fast_launch<4, false>(be, f, s)
                                  : fast_launch<4, true>(be, f, s);
}
