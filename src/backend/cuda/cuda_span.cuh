/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_span.cuh - attention of one new token over spans: keys, and a warp's work with them.
 *
 * BF16 with a head_dim of 64, 128 or 256 goes by tensor cores: a warp takes 16 keys at a time.
 * Columns of the products are query heads: 2 h the high parts of head h's numbers (query, then
 * weight), 2 h + 1 the low parts, so that bfloat16 operands lose 2^-17 and not 2^-9.  Rows are
 * keys, then dimensions.  Which dimension is which number of a sum or row of the result does not
 * matter, so threads read K and V 16 bytes at a time as they lie and need no exchange: rows begin
 * on multiples of 16 bytes. */
#ifndef KVD_CUDA_SPAN_CUH
#define KVD_CUDA_SPAN_CUH

#include "backend/cuda/cuda_sparse.cuh"

#define SPAN_PIECES     64u
#define SPAN_PIECES_MIN 4u
#define SPAN_BLOCKS     2u /* of threads, for each processor */
#define SPAN_WARPS      8u
#define SPAN_THREADS    (SPAN_WARPS * WARP)
#define SPAN_STEP       16u /* keys a warp takes at a time */
#define SPAN_KEYS       (SPAN_WARPS * SPAN_STEP)
#define SPAN_HEADS      4u       /* of a set of columns */
#define SPAN_NO_KEY     (-1e30f) /* the maximum of nothing, as on the CPU */
#define SPAN_SPANS      2u

typedef struct span_job {
    kvd_attn_span_args a;
    uint32_t           group, n_piece, n_span;
    uint32_t           row_bytes; /* of a K or V row */
    uint64_t           part_floats;
    uint32_t          *count; /* [lane][gridDim.z] */
    float             *piece; /* [lane][SPAN_SPANS][n_piece][part_floats], laid out as part is */
} span_job;

/* Keys of one lane's span and where they are cut. */
typedef struct span_keys {
    kvd_attn_span s;
    uint32_t      n_record_key, n, each, n_piece;
} span_keys;

static __device__ __forceinline__ span_keys span_open(const span_job &j, uint32_t lane,
                                                      uint32_t span)
{
    span_keys k;

    k.s            = span ? j.a.then[lane] : j.a.span[lane];
    k.n_record_key = k.s.n_record * j.a.kv.chunk_tokens;
    k.n            = k.n_record_key + (k.s.end_key - k.s.first_key);
    k.each         = (k.n + j.n_piece * SPAN_KEYS - 1) / (j.n_piece * SPAN_KEYS) * SPAN_KEYS;
    k.n_piece      = k.n ? (k.n + k.each - 1) / k.each : 0;
    return k;
}

/* The K row of key i of the span. */
static __device__ __forceinline__ const uint8_t *span_row(const span_job &j, const span_keys &k,
                                                          uint32_t kv_head, uint32_t i)
{
    const kvd_kv_layout &kv = j.a.kv;

    if (i >= k.n_record_key)
        return cuda_kv_row(kv, k.s.block, kv_head, k.s.first_key + i - k.n_record_key);
    return (const uint8_t *)kv.pool + k.s.record[i / kv.chunk_tokens] +
           (uint64_t)(i % kv.chunk_tokens) * j.row_bytes;
}

/* ---- tensor cores ------------------------------------------------------------------- */

static __device__ __forceinline__ void span_mma(float (&c)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, uint2 b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/* Two floats as bfloat16, or what that has lost of them. */
static __device__ __forceinline__ uint32_t span_round(float x, float y, bool low)
{
    const __nv_bfloat162 hi = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 lo = __floats2bfloat162_rn(x - __low2float(hi), y - __high2float(hi));

    return low ? *(const uint32_t *)&lo : *(const uint32_t *)&hi;
}

/* The right operand of step s (16 dimensions) of a set of columns as a thread holds it: dimensions
 * 4 s' .. + 3 of what it reads of a key's row. */
static __device__ void span_queries(const span_job &j, uint32_t lane, uint32_t head0,
                                    uint32_t n_head, uint32_t n_set, uint32_t n_step,
                                    uint2 (*q)[WARP])
{
    const uint32_t dim = j.a.kv.head_dim, kv_head = lane % j.a.kv.n_kv_head;
    const float   *x = j.a.q + j.a.row[lane / j.a.kv.n_kv_head] * j.a.q_stride +
                     ((uint64_t)kv_head * j.group + head0) * dim;

    for (uint32_t k = threadIdx.x; k < n_set * n_step * WARP; k += blockDim.x) {
        const uint32_t s = k / WARP % n_step, col = k % WARP / 4, t = k % 4;
        const uint32_t h  = k / WARP / n_step * SPAN_HEADS + col / 2;
        const float   *at = x + (uint64_t)h * dim + s / 2 * 32 + 8 * t + s % 2 * 4;
        uint2          v  = make_uint2(0, 0);

        if (h < n_head) {
            v.x = span_round(at[0], at[1], col % 2);
            v.y = span_round(at[2], at[3], col % 2);
        }
        q[k / WARP][k % WARP] = v;
    }
}

/* A warp's softmax so far: columns of heads, of which a thread has t (and 4 + t); rows of o:
 * dimension 64 c + 8 g + 2 n + i / 2. */
template <int DIMS, int SETS> struct span_sum {
    float o[SETS][DIMS][4][4];
    float max[SETS], sum[SETS]; /* sum: of this thread's keys only */
};

/* What a thread reads of 16 keys: K of keys g and g + 8, V of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t.
 */
template <int DIMS> struct span_tile {
    uint4 k[2][2 * DIMS], v[DIMS][4];
};

/* row: of key number lane % 16. */
template <int DIMS>
static __device__ __forceinline__ void span_load(const uint8_t *row, uint64_t v_off,
                                                 span_tile<DIMS> &x)
{
    const uint32_t lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *k =
            (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)row, half * 8 + g);

#pragma unroll
        for (uint32_t i = 0; i < 2 * DIMS; i++)
            x.k[half][i] = *(const uint4 *)(k + 64 * i + 16 * t);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *v = (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)row,
                                                        i / 2 * 8 + 2 * t + i % 2) +
                           v_off + 16 * g;

#pragma unroll
        for (uint32_t c = 0; c < DIMS; c++)
            x.v[c][i] = *(const uint4 *)(v + 128 * c);
    }
}

/* Logits of keys g and g + 8 for head t of a set of columns. */
template <int DIMS>
static __device__ __forceinline__ void span_logits(const span_tile<DIMS> &x, const uint2 (*q)[WARP],
                                                   float                  scale, float (&l)[2])
{
    const uint32_t lane = threadIdx.x % WARP;
    float          c[4] = { 0.0f };

#pragma unroll
    for (uint32_t i = 0; i < 2 * DIMS; i++) {
        const uint4 &k0 = x.k[0][i], &k1 = x.k[1][i];

        span_mma(c, k0.x, k1.x, k0.y, k1.y, q[2 * i][lane]);
        span_mma(c, k0.z, k1.z, k0.w, k1.w, q[2 * i + 1][lane]);
    }
    l[0] = (c[0] + c[1]) * scale;
    l[1] = (c[2] + c[3]) * scale;
}

/* Weights of keys g and g + 8 for head t as the right operand: column g, keys 2 t, 2 t + 1 and
 * 8 + 2 t, 9 + 2 t. */
static __device__ __forceinline__ uint2 span_weights(const float (&p)[2])
{
    const uint32_t g = threadIdx.x % WARP / 4, from = threadIdx.x % 4 * 8 + g / 2;
    const float    x0 = __shfl_sync(ALL_LANES, p[0], from);
    const float    x1 = __shfl_sync(ALL_LANES, p[0], from + 4);
    const float    y0 = __shfl_sync(ALL_LANES, p[1], from);
    const float    y1 = __shfl_sync(ALL_LANES, p[1], from + 4);

    return make_uint2(span_round(x0, x1, g % 2), span_round(y0, y1, g % 2));
}

/* o += weights x V of the 16 keys. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void span_values(const span_tile<DIMS> &x, const uint2 (&p)[SETS],
                                                   span_sum<DIMS, SETS>  &s)
{
#pragma unroll
    for (uint32_t c = 0; c < DIMS; c++) {
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) { /* dimensions 2 n and 2 n + 1 of the thread's eight */
            const uint32_t v0 = (&x.v[c][0].x)[n], v1 = (&x.v[c][1].x)[n];
            const uint32_t v2 = (&x.v[c][2].x)[n], v3 = (&x.v[c][3].x)[n];
            const uint32_t a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
            const uint32_t a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);

#pragma unroll
            for (uint32_t b = 0; b < SETS; b++)
                span_mma(s.o[b][c][n], a0, a1, a2, a3, p[b]);
        }
    }
}

/* The softmax of one set goes on by two logits, which become weights. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void span_softmax(span_sum<DIMS, SETS> &s, uint32_t b,
                                                    float (&l)[2])
{
    float max = fmaxf(l[0], l[1]), shrink;

    max      = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 4));
    max      = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 8));
    max      = fmaxf(s.max[b], fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 16)));
    shrink   = __expf(s.max[b] - max);
    s.max[b] = max;
    l[0]     = __expf(l[0] - max);
    l[1]     = __expf(l[1] - max);
    s.sum[b] = s.sum[b] * shrink + (l[0] + l[1]);
#pragma unroll
    for (uint32_t c = 0; c < DIMS; c++) {
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                s.o[b][c][n][e] *= shrink;
        }
    }
}

/* 16 keys more, the first n of them real. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void span_step(const span_job &j, const uint8_t *row, uint32_t n,
                                                 const uint2 (*q)[WARP], span_sum<DIMS, SETS> &s)
{
    const uint32_t  g = threadIdx.x % WARP / 4;
    uint2           p[SETS];
    span_tile<DIMS> x;

    span_load<DIMS>(row, j.a.kv.record_bytes / 2, x);
#pragma unroll
    for (uint32_t b = 0; b < SETS; b++) {
        float l[2];

        span_logits<DIMS>(x, q + b * 4 * DIMS, j.a.scale, l);
        l[0] = g < n ? l[0] : -INFINITY;
        l[1] = g + 8 < n ? l[1] : -INFINITY;
        span_softmax<DIMS, SETS>(s, b, l);
        p[b] = span_weights(l);
    }
    span_values<DIMS, SETS>(x, p, s);
}

/* The row of this lane's key of the 16 from i on, or of the last one. */
static __device__ __forceinline__ const uint8_t *span_mine(const span_job &j, const span_keys &k,
                                                           uint32_t kv_head, uint32_t i,
                                                           uint32_t end)
{
    const uint32_t mine = i + threadIdx.x % SPAN_STEP;

    return span_row(j, k, kv_head, mine < end ? mine : end - 1);
}

/* A warp's keys from i on, 16 of each `step`; row: where the first 16 lie.  What the next step
 * reads is asked for one step ahead, where it lies is looked up two steps ahead. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void span_walk(const span_job &j, const span_keys &k,
                                                 uint32_t kv_head, uint32_t i, uint32_t end,
                                                 uint32_t step, const uint8_t                 *row,
                                                 const uint2 (*q)[WARP], span_sum<DIMS, SETS> &s)
{
    const uint64_t half = threadIdx.x % WARP / SPAN_STEP * (j.a.kv.record_bytes / 2);
    const uint8_t *next = NULL, *after = NULL;

    if (i + step < end)
        next = span_mine(j, k, kv_head, i + step, end);
#pragma unroll 1
    for (; i < end; i += step) {
        if (i + 2 * step < end)
            after = span_mine(j, k, kv_head, i + 2 * step, end);
        for (uint32_t at = 0; i + step < end && at < DIMS; at++)
            sp_prefetch(next + half + 128 * at);
        span_step<DIMS, SETS>(j, row, end - i < SPAN_STEP ? end - i : SPAN_STEP, q, s);
        row  = next;
        next = after;
    }
}

/* Partial softmaxes of a block's warps.  Rows of o are two floats longer, so that neighbouring
 * threads' stores meet no bank twice. */
template <int DIMS, int SETS> struct span_mem {
    float o[SPAN_WARPS][SETS * SPAN_HEADS][64 * DIMS + 2];
    float max[SPAN_WARPS][SETS * SPAN_HEADS], sum[SPAN_WARPS][SETS * SPAN_HEADS];
};

/* Others may look after a barrier. */
template <int DIMS, int SETS>
static __device__ void span_keep(const span_sum<DIMS, SETS> &s, span_mem<DIMS, SETS> *m)
{
    const uint32_t lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP;

#pragma unroll
    for (uint32_t b = 0; b < SETS; b++) {
        const uint32_t h   = b * SPAN_HEADS + t;
        float          sum = s.sum[b];

        sum += __shfl_xor_sync(ALL_LANES, sum, 4);
        sum += __shfl_xor_sync(ALL_LANES, sum, 8);
        sum += __shfl_xor_sync(ALL_LANES, sum, 16);
#pragma unroll
        for (uint32_t c = 0; c < DIMS; c++) {
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                *(float2 *)&m->o[warp][h][64 * c + 8 * g + 2 * n] =
                    make_float2(s.o[b][c][n][0] + s.o[b][c][n][1],
                                s.o[b][c][n][2] + s.o[b][c][n][3]);
        }
        if (g == 0) {
            m->max[warp][h] = s.max[b];
            m->sum[warp][h] = sum;
        }
    }
}

/* One number of a head, of the block's warps merged; *max, *sum: the head's. */
template <int DIMS, int SETS>
static __device__ __forceinline__ float span_merge(const span_mem<DIMS, SETS> *m, uint32_t h,
                                                   uint32_t d, float *max, float *sum)
{
    float o = 0.0f;

    *max = SPAN_NO_KEY;
    *sum = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < SPAN_WARPS; w++)
        *max = fmaxf(*max, m->max[w][h]);
#pragma unroll
    for (uint32_t w = 0; w < SPAN_WARPS; w++) {
        const float f = __expf(m->max[w][h] - *max);

        o += f * m->o[w][h][d];
        *sum += f * m->sum[w][h];
    }
    return o;
}

/* cuda_span_cluster.cu: how many blocks share a lane where n_lane are at work, 0: it cannot, or
 * need not. */
uint32_t    cuda_span_ranks(const cuda_backend *be, const span_job &j, uint64_t n_lane);
cudaError_t cuda_span_cluster(const cuda_backend *be, const span_job &j, uint32_t n_rank,
                              uint32_t n_lane, cudaStream_t s);

#endif
