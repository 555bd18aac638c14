/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_fast.cuh - logits by INT4 landmarks of one plane, for heads of 64 or 128 and blocks
 * of at least 32 chunks: what the kernels of cuda_select_fast.cu and cuda_select_whole.cu share.
 *
 * A lane of an index block lies in one piece, so a warp has it copied into shared memory by the
 * bulk copy engine and depends on no other warp until its sums are added up.  It takes 32 chunks at
 * a time (those that share scales) by tensor cores: rows are chunks, columns 2 h and 2 h + 1 the
 * high and low part of query head h.  Codes are operands as they are: four bits that are masked out
 * of a word are a binary16 of code x 2^-24 (or 16 times that), exactly, which costs one instruction
 * for two of them.  Their channels' scales go to the other side: query x scale is made anew for
 * each 32 chunks, as a binary16 and what it has lost.  Minima are a product of their own with the
 * plain query, one for both halves of 64 chunks. */
#ifndef KVD_CUDA_SELECT_FAST_CUH
#define KVD_CUDA_SELECT_FAST_CUH

#include "backend/cuda/cuda_barrier.cuh"
#include "backend/cuda/cuda_select.cuh"

#define FAST_WARPS  16u
#define FAST_HEADS  4u
#define FAST_GROUPS (CPU_INDEX_BLOCK / 4u / CPU_INDEX_GROUP)
#define FAST_NONE   (-1e30f) /* the maximum of nothing */

/* How a lane of an index block is read. */
typedef struct fast_shape {
    uint32_t bytes, stage; /* what is read, and its room in shared memory */
    uint32_t n_group;      /* of 32 chunks in a block */
    uint32_t depth;        /* index blocks of a warp in shared memory: 1 or 2 */
} fast_shape;

void cuda_select_fast_shape(const cpu_index_shape *s, uint32_t depth, fast_shape *out);

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* ---- copies --------------------------------------------------------------------------- */

static __device__ __forceinline__ void fast_ask(uint64_t *bar, void *to, const void *from,
                                                uint32_t bytes)
{
    bar_expect(bar, bytes);
    bar_copy(to, from, bytes, bar);
}

/* bar_wait(), with a loop that the compiler sees. */
static __device__ __forceinline__ void fast_await(uint64_t *bar, uint32_t parity)
{
    uint32_t done = 0;

    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(bar_addr(bar)), "r"(parity)
                     : "memory");
}

/* ---- queries -------------------------------------------------------------------------- */

/* A thread's channels: 8 (4 j + t) .. + 7 of row j, in pairs (0, 2), (1, 3), (4, 6), (5, 7).  Its
 * column g is of head g / 2: own is the query's high part or what that has lost, high is the high
 * part where own is not (else 0). */
template <int ROWS> struct fast_query {
    __half2 high[ROWS][4], own[ROWS][4];
    float   unit, radius; /* of head t: what products are to be multiplied by; |q| / sqrt(dim) */
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

/* A thread's channels of a head, q its first; all are asked for before the first is used. */
template <int ROWS>
static __device__ __forceinline__ void fast_read(const float *q, bool real, float (&x)[ROWS][8])
{
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        const float4 a = real ? *(const float4 *)(q + 32 * i) : make_float4(0, 0, 0, 0);
        const float4 b = real ? *(const float4 *)(q + 32 * i + 4) : make_float4(0, 0, 0, 0);

        x[i][0] = a.x;
        x[i][1] = a.y;
        x[i][2] = a.z;
        x[i][3] = a.w;
        x[i][4] = b.x;
        x[i][5] = b.y;
        x[i][6] = b.z;
        x[i][7] = b.w;
    }
}

/* Square root as the hardware has it, to 2^-23 of it. */
static __device__ __forceinline__ float fast_root(float x)
{
    float y;

    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* q: of head 0 of those that are looked at, n_head of them. */
template <int ROWS>
static __device__ void fast_open(const select_job &j, const float *q, uint32_t n_head,
                                 fast_query<ROWS> &out)
{
    const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, h = g / 2;
    const bool     low = g % 2;
    float          x[ROWS][8], max = 0.0f, sum = 0.0f, unit, inverse, radius;
    uint32_t       e;

    fast_read<ROWS>(q + h * j.s.dim + 8 * t, h < n_head, x);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t c = 0; c < 8; c++) {
            x[i][c] *= j.a.scale;
            max = fmaxf(max, fabsf(x[i][c]));
            sum += x[i][c] * x[i][c];
        }
    }
    max     = fast_quad_max(max);
    radius  = fast_root(fast_quad_sum(sum) * (1.0f / (32 * ROWS))); /* heads of 32 x ROWS */
    e       = __float_as_uint(max) >> 23; /* biased; 0 and 255 stay unscaled */
    e       = e > 4 && e < 250 ? e : 127;
    unit    = __uint_as_float(e << 23);
    inverse = __uint_as_float((254 - e) << 23);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t p = 0; p < 4; p++) {
            const uint32_t c = p / 2 * 4 + p % 2;
            const float    a = x[i][c] * inverse, b = x[i][c + 2] * inverse;
            const __half2  high = __floats2half2_rn(a, b);

            out.high[i][p] = low ? high : __half2half2(__ushort_as_half(0));
            out.own[i][p] =
                low ? __floats2half2_rn(a - __low2float(high), b - __high2float(high)) : high;
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
    float          c[4] = { 0.0f }, d[4] = { 0.0f };

#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        uint32_t a[4], b[4];

        fast_pairs(*(const uint4 *)(at + 64 * i), a);
        fast_pairs(*(const uint4 *)(next + 64 * i), b);
        fast_mma(c, a[0], b[0], a[1], b[1], q.own[i][0], q.own[i][1]);
        fast_mma(d, a[2], b[2], a[3], b[3], q.own[i][2], q.own[i][3]);
    }
    out[0] = c[0] + c[1] + (d[0] + d[1]);
    out[1] = c[2] + c[3] + (d[2] + d[3]);
}

/* Query x scale, this column's part of it: rounded, or what that has lost and what the query has.
 */
template <int ROWS>
static __device__ __forceinline__ void fast_scaled(const uint8_t *scale, const fast_query<ROWS> &q,
                                                   uint32_t i, __half2 (&b)[4])
{
    uint32_t v[4];

    fast_pairs(*(const uint4 *)(scale + 64 * i), v);
#pragma unroll
    for (uint32_t p = 0; p < 4; p++) {
        const __half2 s    = *(const __half2 *)&v[p];
        const __half2 high = __hmul2_rn(q.high[i][p], s);
        const __half2 lost = __hfma2(q.high[i][p], s, __hneg2(high));

        b[p] = __hfma2(q.own[i][p], s, lost);
    }
}

/* 32 chunks: products with head t of the chunks 4 (lane / 4) .. + 3.  Codes of the second two pairs
 * are 16 times too much. */
template <int ROWS>
static __device__ __forceinline__ void fast_group(const uint8_t *code, const uint8_t *scale,
                                                  const fast_query<ROWS> &q, float (&out)[4])
{
    const uint32_t t = threadIdx.x % 4, g = threadIdx.x % WARP / 4, m = 0x000f000f, n = 0x00f000f0;
    float          x[4] = { 0.0f }, y[4] = { 0.0f }, x16[4] = { 0.0f }, y16[4] = { 0.0f };

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
        fast_mma(x16, w.x & n, w.y & n, w8.x & n, w8.y & n, b[2], b[3]);
        fast_mma(y16, w.z & n, w.w & n, w8.z & n, w8.w & n, b[2], b[3]);
    }
    out[0] = x[0] + x[1] + (x16[0] + x16[1]) * 0.0625f;
    out[1] = x[2] + x[3] + (x16[2] + x16[3]) * 0.0625f;
    out[2] = y[0] + y[1] + (y16[0] + y16[1]) * 0.0625f;
    out[3] = y[2] + y[3] + (y16[2] + y16[3]) * 0.0625f;
}

/* ---- logits --------------------------------------------------------------------------- */

/* A thread's head: where its logits go, and their largest and sum so far. */
typedef struct fast_head {
    float   *row; /* NULL: there is no such head */
    uint32_t first, end;
    float    max, sum;
} fast_head;

/* Four chunks from c on; SUM: false: their sum is not wanted. */
template <bool SUM>
static __device__ __forceinline__ void fast_put(fast_head &h, uint32_t c, float (&v)[4])
{
    float most;

    if (!h.row)
        return;
    *(float4 *)(h.row + c) = make_float4(v[0], v[1], v[2], v[3]);
    if (c < h.first || c + 4 > h.end) {
        for (uint32_t i = 0; i < 4; i++)
            v[i] = c + i >= h.first && c + i < h.end ? v[i] : -INFINITY;
    }
    most = fmaxf(h.max, fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])));
    if (SUM)
        h.sum = h.sum * __expf(h.max - most) + (__expf(v[0] - most) + __expf(v[1] - most)) +
                (__expf(v[2] - most) + __expf(v[3] - most));
    h.max = most;
}

/* Products of 32 chunks to logits; radius: theirs, NULL: none. */
template <int ROWS>
static __device__ __forceinline__ void fast_logits(const select_job &j, const uint8_t *radius,
                                                   const fast_query<ROWS> &q, float base,
                                                   float (&v)[4])
{
    const float offset = q.unit * base + j.log_tokens;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        v[i] = v[i] * (q.unit * 0x1p24f) + offset;
    if (radius) {
        const uint2 r = *(const uint2 *)radius;

        v[0] += q.radius * sp_from_f16((uint16_t)r.x);
        v[1] += q.radius * sp_from_f16((uint16_t)(r.x >> 16));
        v[2] += q.radius * sp_from_f16((uint16_t)r.y);
        v[3] += q.radius * sp_from_f16((uint16_t)(r.y >> 16));
    }
}

/* One block of the index, as it lies in shared memory; chunk: its first.  Both halves of 64 chunks
 * are under way at once; where there is one half it is taken twice. */
template <int ROWS, bool SUM>
static __device__ __forceinline__ void fast_block(const select_job &j, const fast_shape &f,
                                                  const uint8_t *stage, const fast_query<ROWS> &q,
                                                  uint32_t chunk, fast_head &h)
{
    const cpu_index_plane &p = j.s.mark[0];
    const uint32_t         g = threadIdx.x % WARP / 4, two = f.n_group > 1;
    const uint8_t         *code = stage + p.code_off, *radius = stage + j.s.radius_off + 8 * g;
    float                  base[FAST_GROUPS], v[4], w[4];

    fast_minima<ROWS>(stage, p.dim, f.n_group, q, base);
    fast_group<ROWS>(code, stage, q, v);
    fast_group<ROWS>(code + 2 * two * (uint32_t)p.tile_bytes, stage + 4 * two * p.dim, q, w);
    fast_logits<ROWS>(j, j.s.radius ? radius : NULL, q, base[0], v);
    fast_logits<ROWS>(j, j.s.radius ? radius + 2 * two * CPU_INDEX_GROUP : NULL, q, base[1], w);
    fast_put<SUM>(h, chunk + 4 * g, v);
    if (two)
        fast_put<SUM>(h, chunk + CPU_INDEX_GROUP + 4 * g, w);
}

/* ---- walks --------------------------------------------------------------------------- */

/* A warp's blocks: every step-th from the first.  Lane i knows where the i-th of the next 32 lies.
 */
typedef struct fast_walk {
    const kvd_select_seq *seq;
    const uint8_t        *pool;
    uint8_t              *stage;   /* this warp's [depth] */
    uint64_t             *arrived; /* likewise */
    uint32_t              block, step, end;
    uint64_t              off;
} fast_walk;

static __device__ __forceinline__ void fast_look(fast_walk &w, uint32_t n)
{
    const uint64_t mine = w.block + (uint64_t)(threadIdx.x % WARP + n) * w.step;

    w.off = mine < w.end ? w.seq->iblock[mine] : 0;
}

/* Which of its places the n-th block has, and how often it has been filled before, modulo 2. */
static __device__ __forceinline__ uint32_t fast_place(const fast_shape &f, uint32_t n)
{
    return n & (f.depth - 1);
}

static __device__ __forceinline__ uint32_t fast_turn(const fast_shape &f, uint32_t n)
{
    return n >> (f.depth - 1) & 1;
}

/* Asks for the warp's n-th block, if there is one. */
static __device__ __forceinline__ void fast_next(const fast_shape &f, const fast_walk &w,
                                                 uint32_t n)
{
    const uint64_t off = __shfl_sync(ALL_LANES, (unsigned long long)w.off, n % WARP);

    if (threadIdx.x % WARP == 0 && w.block + (uint64_t)n * w.step < w.end)
        fast_ask(w.arrived + fast_place(f, n), w.stage + fast_place(f, n) * f.stage, w.pool + off,
                 f.bytes);
}

/* Asks for the first ones; w.block, step, end, stage and arrived are there. */
static __device__ __forceinline__ void fast_begin(const select_job &j, const fast_shape &f,
                                                  fast_walk &w)
{
    w.pool = (const uint8_t *)j.a.index.pool + j.a.index.lane_off +
             blockIdx.y % j.a.index.n_kv_head * j.a.index.head_stride;
    fast_look(w, 0);
    if (threadIdx.x % WARP == 0) {
        bar_init(w.arrived, 1);
        if (f.depth > 1)
            bar_init(w.arrived + 1, 1);
        bar_fence();
    }
    __syncwarp();
    fast_next(f, w, 0);
    if (f.depth > 1)
        fast_next(f, w, 1);
}

/* Its n-th block, when it is there. */
static __device__ __forceinline__ const uint8_t *fast_arrive(const fast_shape &f,
                                                             const fast_walk &w, uint32_t n)
{
    fast_await(w.arrived + fast_place(f, n), fast_turn(f, n));
    return w.stage + fast_place(f, n) * f.stage;
}

/* All lanes have read the n-th block: its place may be filled again. */
static __device__ __forceinline__ void fast_leave(const fast_shape &f, fast_walk &w, uint32_t n)
{
    __syncwarp();
    if ((n + f.depth) % WARP == 0)
        fast_look(w, n + f.depth);
    fast_next(f, w, n + f.depth);
}

#endif /* of compute capability 9.0 */

#endif
