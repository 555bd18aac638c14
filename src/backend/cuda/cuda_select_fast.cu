/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_fast.cu - logits by INT4 landmarks of one plane: what cuda_select_scan.cu does, as
 * quickly as memory gives them, for heads of 64 or 128 and blocks of at least 32 chunks.
 *
 * A lane of an index block lies in one piece, so a warp has it copied into shared memory by the
 * bulk copy engine, two ahead, and depends on no other warp until its sums are added up.  It takes
 * 32 chunks at a time (those that share scales) by tensor cores: rows are chunks, columns 2 h and
 * 2 h + 1 the high and low part of query head h.  Codes are operands as they are: four bits that
 * are masked out of a word are a binary16 of code x 2^-24 (or 16 times that), exactly, which costs
 * one instruction for two of them.  Their channels' scales go to the other side: query x scale is
 * made anew for each 32 chunks, as a binary16 and what it has lost.  Minima are a product of their
 * own with the plain query, one for both halves of 64 chunks.
 *
 * Where the kernel ahead is attention over the kept set, whose result this one does not read, it
 * runs beside that: see `beside`.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select.cuh"

#define FAST_WARPS  16u
#define FAST_HEADS  4u
#define FAST_DEPTH  2u /* index blocks of a warp in shared memory */
#define FAST_GROUPS (CPU_INDEX_BLOCK / 4u / CPU_INDEX_GROUP)
#define FAST_NONE   (-1e30f) /* the maximum of nothing */

typedef struct fast_job {
    select_job j;
    uint32_t   bytes, stage; /* of a lane: what is read, and its room in shared memory */
    uint32_t   n_group;      /* of 32 chunks in a block */
    bool       beside;
} fast_job;

typedef struct fast_mem {
    uint64_t arrived[FAST_WARPS][FAST_DEPTH];
    float    max[FAST_WARPS][FAST_HEADS], sum[FAST_WARPS][FAST_HEADS];
} fast_mem;

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* ---- copies --------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t fast_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void fast_init(uint64_t *bar)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(fast_shared(bar)) : "memory");
}

static __device__ __forceinline__ void fast_ask(uint64_t *bar, void *to, const void *from,
                                                uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(fast_shared(bar)),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(fast_shared(to)),
                 "l"(from), "r"(bytes), "r"(fast_shared(bar))
                 : "memory");
}

static __device__ __forceinline__ void fast_await(uint64_t *bar, uint32_t parity)
{
    uint32_t done = 0;

    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(fast_shared(bar)), "r"(parity)
                     : "memory");
}

/* ---- queries -------------------------------------------------------------------------- */

/* A thread's channels: 8 (4 j + t) .. + 7 of row j, in pairs (0, 2), (1, 3), (4, 6), (5, 7).  The
 * query's high part and this column's part of it (column g: of head g / 2). */
template <int ROWS> struct fast_query {
    __half2 high[ROWS][4], own[ROWS][4];
    float   unit, radius; /* of head t: what products are to be multiplied by; |q| / sqrt(dim) */
    bool    low;
};

static __device__ __forceinline__ float fast_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

static __device__ __forceinline__ float fast_quad_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* q: of head 0 of those that are looked at, n_head of them. */
template <int ROWS>
static __device__ void fast_open(const select_job &j, const float *q, uint32_t n_head,
                                 fast_query<ROWS> &out)
{
    const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, h = g / 2;
    float          x[ROWS][8], max = 0.0f, sum = 0.0f, unit, radius;
    uint32_t       e;

#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t c = 0; c < 8; c++) {
            x[i][c] = h < n_head ? q[h * j.s.dim + 8 * (4 * i + t) + c] * j.a.scale : 0.0f;
            max     = fmaxf(max, fabsf(x[i][c]));
            sum += x[i][c] * x[i][c];
        }
    }
    max     = fast_quad_max(max);
    radius  = sqrtf(fast_quad_sum(sum)) / sqrtf((float)j.s.dim);
    e       = __float_as_uint(max) >> 23; /* biased; 0 and 255 stay unscaled */
    unit    = e > 4 && e < 250 ? __uint_as_float(e << 23) : 1.0f;
    out.low = g % 2;
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t p = 0; p < 4; p++) {
            const uint32_t c = p / 2 * 4 + p % 2;
            const float    a = x[i][c] / unit, b = x[i][c + 2] / unit;
            const __half2  high = __floats2half2_rn(a, b);

            out.high[i][p] = high;
            out.own[i][p] =
                out.low ? __floats2half2_rn(a - __low2float(high), b - __high2float(high)) : high;
        }
    }
    out.unit   = __shfl_sync(ALL_LANES, unit, 8 * t);
    out.radius = __shfl_sync(ALL_LANES, radius, 8 * t);
}

/* ---- products ------------------------------------------------------------------------- */

static __device__ __forceinline__ void fast_mma(float (&c)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, __half2 b0, __half2 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(*(const uint32_t *)&b0),
          "r"(*(const uint32_t *)&b1));
}

/* Eight numbers of neighbouring channels in the pairs of fast_query. */
static __device__ __forceinline__ void fast_pairs(uint4 v, uint32_t (&p)[4])
{
    p[0] = __byte_perm(v.x, v.y, 0x5410);
    p[1] = __byte_perm(v.x, v.y, 0x7632);
    p[2] = __byte_perm(v.z, v.w, 0x5410);
    p[3] = __byte_perm(v.z, v.w, 0x7632);
}

/* Query x minimum of both groups: out[k] of group k, for head t. */
template <int ROWS>
static __device__ __forceinline__ void fast_minima(const uint8_t *stage, uint32_t dim,
                                                   uint32_t n_group, const fast_query<ROWS> &q,
                                                   float (&out)[FAST_GROUPS])
{
    const uint32_t t  = threadIdx.x % 4;
    const uint8_t *at = stage + 2 * dim + 16 * t, *next = at + (n_group > 1 ? 4 * dim : 0);
    float          c[4] = { 0.0f };

#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        uint32_t a[4], b[4];

        fast_pairs(*(const uint4 *)(at + 64 * i), a);
        fast_pairs(*(const uint4 *)(next + 64 * i), b);
        fast_mma(c, a[0], b[0], a[1], b[1], q.own[i][0], q.own[i][1]);
        fast_mma(c, a[2], b[2], a[3], b[3], q.own[i][2], q.own[i][3]);
    }
    out[0] = c[0] + c[1];
    out[1] = c[2] + c[3];
}

/* Query x scale, this column's part of it; codes of the second two pairs are 16 times too much. */
template <int ROWS>
static __device__ __forceinline__ void fast_scaled(const uint8_t *scale, const fast_query<ROWS> &q,
                                                   uint32_t i, __half2 (&b)[4])
{
    const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00));
    uint32_t      v[4];

    fast_pairs(*(const uint4 *)(scale + 64 * i), v);
#pragma unroll
    for (uint32_t p = 0; p < 4; p++) {
        const __half2 s =
            p < 2 ? *(const __half2 *)&v[p] : __hmul2(*(const __half2 *)&v[p], sixteenth);
        const __half2 high = __hmul2_rn(q.high[i][p], s);
        const __half2 lost = __hfma2(q.high[i][p], s, __hneg2(high));
        const __half2 low  = __hfma2(q.own[i][p], s, lost);

        b[p] = q.low ? low : high;
    }
}

/* 32 chunks: products with head t of the chunks 4 (lane / 4) .. + 3. */
template <int ROWS>
static __device__ __forceinline__ void fast_group(const uint8_t *code, const uint8_t *scale,
                                                  const fast_query<ROWS> &q, float (&out)[4])
{
    const uint32_t t = threadIdx.x % 4, g = threadIdx.x % WARP / 4, m = 0x000f000f, n = 0x00f000f0;
    float          x[4] = { 0.0f }, y[4] = { 0.0f };

    code += g / 4 * (ROWS * 256) + 16 * (g % 4) + 64 * t;
    scale += 16 * t;
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        const uint4 w  = *(const uint4 *)(code + 256 * i);
        const uint4 w8 = make_uint4(w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8);
        __half2     b[4];

        fast_scaled<ROWS>(scale, q, i, b);
        fast_mma(x, w.x & m, w.y & m, w8.x & m, w8.y & m, b[0], b[1]);
        fast_mma(y, w.z & m, w.w & m, w8.z & m, w8.w & m, b[0], b[1]);
        fast_mma(x, w.x & n, w.y & n, w8.x & n, w8.y & n, b[2], b[3]);
        fast_mma(y, w.z & n, w.w & n, w8.z & n, w8.w & n, b[2], b[3]);
    }
    out[0] = x[0] + x[1];
    out[1] = x[2] + x[3];
    out[2] = y[0] + y[1];
    out[3] = y[2] + y[3];
}

/* ---- logits --------------------------------------------------------------------------- */

/* A thread's head: where its logits go, and their largest and sum so far. */
typedef struct fast_head {
    float   *row; /* NULL: there is no such head */
    uint32_t first, end;
    float    max, sum;
} fast_head;

/* Four chunks from c on. */
static __device__ __forceinline__ void fast_put(fast_head &h, uint32_t c, const float (&v)[4])
{
    const bool whole = c >= h.first && c + 4 <= h.end;
    float      most = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), add = 0.0f;

    if (!h.row)
        return;
    *(float4 *)(h.row + c) = make_float4(v[0], v[1], v[2], v[3]);
    if (!whole) {
        most = FAST_NONE;
        for (uint32_t i = 0; i < 4; i++)
            most = c + i >= h.first && c + i < h.end ? fmaxf(most, v[i]) : most;
    }
    most = fmaxf(most, h.max);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        add += whole || (c + i >= h.first && c + i < h.end) ? __expf(v[i] - most) : 0.0f;
    h.sum = h.sum * __expf(h.max - most) + add;
    h.max = most;
}

/* One block of the index, as it lies in shared memory; chunk: its first. */
template <int ROWS>
static __device__ __forceinline__ void fast_block(const fast_job &f, const uint8_t *stage,
                                                  const fast_query<ROWS> &q, uint32_t chunk,
                                                  fast_head &h)
{
    const cpu_index_plane &p = f.j.s.mark[0];
    const uint32_t         g = threadIdx.x % WARP / 4;
    float                  base[FAST_GROUPS];

    fast_minima<ROWS>(stage, p.dim, f.n_group, q, base);
    for (uint32_t k = 0; k < f.n_group; k++) {
        const uint8_t *code   = stage + p.code_off + 2 * k * (uint32_t)p.tile_bytes;
        const float    offset = q.unit * (k ? base[1] : base[0]) + f.j.log_tokens;
        float          v[4];

        fast_group<ROWS>(code, stage + 4 * k * p.dim, q, v);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            v[i] = v[i] * (q.unit * 0x1p24f) + offset;
        if (f.j.s.radius) {
            const uint2 r =
                *(const uint2 *)(stage + f.j.s.radius_off + 2 * (k * CPU_INDEX_GROUP + 4 * g));

            v[0] += q.radius * sp_from_f16((uint16_t)r.x);
            v[1] += q.radius * sp_from_f16((uint16_t)(r.x >> 16));
            v[2] += q.radius * sp_from_f16((uint16_t)r.y);
            v[3] += q.radius * sp_from_f16((uint16_t)(r.y >> 16));
        }
        fast_put(h, chunk + k * CPU_INDEX_GROUP + 4 * g, v);
    }
}

/* ---- the kernel ------------------------------------------------------------------------ */

/* A warp's blocks: every step-th from the first.  Lane i knows where the i-th of the next 32 lies.
 */
typedef struct fast_walk {
    const kvd_select_seq *seq;
    const uint8_t        *pool;
    uint8_t              *stage; /* this warp's */
    uint64_t             *arrived;
    uint32_t              block, step, end;
    uint64_t              off;
} fast_walk;

static __device__ __forceinline__ void fast_look(fast_walk &w, uint32_t n)
{
    const uint64_t mine = w.block + (uint64_t)(threadIdx.x % WARP + n) * w.step;

    w.off = mine < w.end ? w.seq->iblock[mine] : 0;
}

/* Asks for the warp's n-th block, if there is one. */
static __device__ __forceinline__ void fast_next(const fast_job &f, const fast_walk &w, uint32_t n)
{
    const uint64_t off = __shfl_sync(ALL_LANES, (unsigned long long)w.off, n % WARP);

    if (threadIdx.x % WARP == 0 && w.block + (uint64_t)n * w.step < w.end)
        fast_ask(w.arrived + n % FAST_DEPTH, w.stage + n % FAST_DEPTH * f.stage, w.pool + off,
                 f.bytes);
}

static __device__ __forceinline__ fast_walk fast_begin(const fast_job &f, fast_mem *m,
                                                       uint8_t *stages)
{
    const select_job &j    = f.j;
    const uint32_t    warp = threadIdx.x / WARP;
    fast_walk         w;

    w.seq  = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    w.pool = (const uint8_t *)j.a.index.pool + j.a.index.lane_off +
             blockIdx.y % j.a.index.n_kv_head * j.a.index.head_stride;
    w.stage   = stages + warp * FAST_DEPTH * f.stage;
    w.arrived = m->arrived[warp];
    w.step    = gridDim.x * FAST_WARPS;
    w.end     = (w.seq->n_chunk + j.s.n_chunk - 1) / j.s.n_chunk;
    w.block   = w.seq->first_chunk / j.s.n_chunk + warp * gridDim.x + blockIdx.x;
    fast_look(w, 0);
    if (threadIdx.x % WARP == 0) {
        for (uint32_t i = 0; i < FAST_DEPTH; i++)
            fast_init(w.arrived + i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    for (uint32_t i = 0; i < FAST_DEPTH; i++)
        fast_next(f, w, i);
    return w;
}

/* Largest and sum of this block of threads. */
static __device__ void fast_fold(const select_job &j, fast_mem *m, float max, float sum,
                                 uint32_t head0, uint32_t n_head)
{
    const uint32_t lane = threadIdx.x % WARP;

    for (uint32_t d = 4; d < WARP; d *= 2) {
        const float max2 = __shfl_xor_sync(ALL_LANES, max, d);
        const float sum2 = __shfl_xor_sync(ALL_LANES, sum, d);

        select_merge(&max, &sum, max2, sum2);
    }
    if (lane < 4) {
        m->max[threadIdx.x / WARP][lane] = max;
        m->sum[threadIdx.x / WARP][lane] = sum;
    }
    __syncthreads();
    if (threadIdx.x < n_head) {
        float2 all = make_float2(FAST_NONE, 0.0f);

        for (uint32_t w = 0; w < FAST_WARPS; w++)
            select_merge(&all.x, &all.y, m->max[w][threadIdx.x], m->sum[w][threadIdx.x]);
        if (all.x == FAST_NONE && all.y == 0.0f)
            all.x = -INFINITY;
        j.part[((uint64_t)blockIdx.y * j.n_part + blockIdx.x) * j.group + head0 + threadIdx.x] =
            all;
    }
}

template <int ROWS>
static __global__ void __launch_bounds__(FAST_WARPS *WARP, 1)
    scan_fast(const __grid_constant__ fast_job f)
{
    extern __shared__ uint4 fast_dynamic[];
    __shared__ fast_mem     m;
    const select_job       &j     = f.j;
    const uint32_t          head0 = blockIdx.z * FAST_HEADS, t = threadIdx.x % 4;
    const uint32_t          n_head = j.group - head0 < FAST_HEADS ? j.group - head0 : FAST_HEADS;
    fast_query<ROWS>        q;
    fast_head               h;
    fast_walk               w;

    if (f.beside)
        cuda_pdl_go();
    else
        sp_begin();
    w = fast_begin(f, &m, (uint8_t *)fast_dynamic);
    fast_open<ROWS>(j,
                    j.a.q + w.seq->row * j.a.q_stride +
                        ((uint64_t)(blockIdx.y % j.a.index.n_kv_head) * j.group + head0) * j.s.dim,
                    n_head, q);
    h.row   = t < n_head ? select_logits(j, blockIdx.y, head0 + t) : NULL;
    h.first = w.seq->first_chunk;
    h.end   = w.seq->n_chunk;
    h.max   = FAST_NONE;
    h.sum   = 0.0f;
    for (uint32_t n = 0; w.block + (uint64_t)n * w.step < w.end; n++) {
        fast_await(w.arrived + n % FAST_DEPTH, n / FAST_DEPTH % 2);
        fast_block<ROWS>(f, w.stage + n % FAST_DEPTH * f.stage, q,
                         (w.block + n * w.step) * j.s.n_chunk, h);
        __syncwarp(); /* all have read */
        if ((n + FAST_DEPTH) % WARP == 0)
            fast_look(w, n + FAST_DEPTH);
        fast_next(f, w, n + FAST_DEPTH);
    }
    fast_fold(j, &m, h.max, h.sum, head0, n_head);
    if (f.beside)
        cuda_pdl_wait();
}

#else

template <int ROWS>
static __global__ void __launch_bounds__(FAST_WARPS *WARP, 1)
    scan_fast(const __grid_constant__ fast_job f)
{
    (void)f;
}

#endif

/* ---- for cuda_select.cu ----------------------------------------------------------------- */

static uint32_t fast_stage(const cpu_index_shape *s, uint32_t *bytes)
{
    const cpu_index_plane *p = &s->mark[0];

    *bytes = (uint32_t)(p->code_off + p->n_unit / CPU_INDEX_TILE * p->tile_bytes);
    if (s->radius)
        *bytes = (uint32_t)(s->radius_off + 2ull * s->n_chunk);
    return (uint32_t)kvd_align_up(*bytes, 128);
}

bool cuda_select_fast_can(const cuda_backend *be, const select_job &j)
{
    const cpu_index_plane *p = &j.s.mark[0];
    uint32_t               bytes;

    return be->cc >= 90 && (j.s.kind == KVD_INDEX_MEAN || j.s.kind == KVD_INDEX_CASCADE) &&
           p->elem == KVD_INDEX_INT4 && (p->dim == 64 || p->dim == 128) &&
           p->group == CPU_INDEX_GROUP && p->param_off == 0 && j.group <= 2 * FAST_HEADS &&
           FAST_WARPS * FAST_DEPTH * fast_stage(&j.s, &bytes) + sizeof(fast_mem) <= be->smem_block;
}

uint32_t cuda_select_fast_parts(const cuda_backend *be, uint64_t n_lane, uint32_t group)
{
    const uint64_t z    = kvd_div_up(group, FAST_HEADS);
    const uint64_t most = kvd_div_up(be->lim.n_chunk, CPU_INDEX_BLOCK / 4 * FAST_WARPS);

    return (uint32_t)kvd_max_u64(1, kvd_min_u64(kvd_min_u64(be->n_sm / (n_lane * z), most),
                                                SELECT_PARTS_MAX));
}

template <int ROWS>
static cudaError_t fast_launch(const cuda_backend *be, const fast_job &f, cudaStream_t s)
{
    const uint32_t    bytes = FAST_WARPS * FAST_DEPTH * f.stage;
    const dim3        grid(f.j.n_part, f.j.n_lane, (f.j.group + FAST_HEADS - 1) / FAST_HEADS);
    const cudaError_t e =
        cudaFuncSetAttribute(scan_fast<ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)bytes);

    return e != cudaSuccess
               ? e
               : sp_launch(be, s, grid, FAST_WARPS * WARP, bytes, 1, scan_fast<ROWS>, f);
}

cudaError_t cuda_select_fast(const cuda_backend *be, const select_job &j, bool beside,
                             cudaStream_t s)
{
    fast_job f = {};

    f.j       = j;
    f.stage   = fast_stage(&j.s, &f.bytes);
    f.n_group = j.s.n_chunk / CPU_INDEX_GROUP;
    f.beside  = beside;
    return j.s.dim == 64 ? fast_launch<2>(be, f, s) : fast_launch<4>(be, f, s);
}
