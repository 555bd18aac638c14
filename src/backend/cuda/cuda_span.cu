/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_span.cu - attention of one new token over a span per lane: split over the keys, in two
 * launches.
 *
 * A span's keys (its records' tokens, then keys of blocks) are cut into pieces of a multiple of 64,
 * at most SPAN_PIECES of them: fewer where there are many lanes (deterministic: where so many are
 * reserved), else how depends on the span alone.  Each piece gives a partial softmax;
 * `fold` merges them in their order behind what part holds.
 *
 * BF16 with a head_dim of 64, 128 or 256 goes by tensor cores: a warp takes 16 keys at a time.
 * Rows of the products are query heads: row g the high parts of head g's numbers (query, then
 * weight), row g + 8 the low parts, so that bfloat16 operands lose 2^-17 and not 2^-9.  Which
 * dimension is which number of a sum or column of the result does not matter, so threads read K and
 * V 16 bytes at a time as they lie and need no exchange: rows begin on multiples of 16 bytes. Every
 * other shape takes a plain kernel, a warp a key and a block of threads a query head. Scratch: the
 * pieces' partials.  Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_sparse.cuh"

#define SPAN_PIECES     64u
#define SPAN_PIECES_MIN 4u
#define SPAN_BLOCKS     8u /* of threads, for each processor */
#define SPAN_WARPS      4u
#define SPAN_STEP       16u /* keys a warp takes at a time */
#define SPAN_KEYS       (SPAN_WARPS * SPAN_STEP)
#define SPAN_HEADS      8u
#define SPAN_NO_KEY     (-1e30f) /* the maximum of nothing, as on the CPU */
#define FOLD_WIDTH      128u
#define FOLD_GROUPS     4u /* threads that share a dimension */
#define FOLD_EACH       (SPAN_PIECES / FOLD_GROUPS)

typedef struct span_job {
    kvd_attn_span_args a;
    uint32_t           group, n_piece;
    uint32_t           row_bytes; /* of a K or V row */
    uint64_t           part_floats;
    float             *piece; /* [lane][n_piece][part_floats], each laid out as part is */
} span_job;

/* Keys of one lane and where they are cut. */
typedef struct span_keys {
    kvd_attn_span s;
    uint32_t      n_record_key, n, each, n_piece;
} span_keys;

/* Pieces of a lane at most: enough of all lanes together to fill the processors. */
static uint32_t span_pieces(const cuda_backend *be, uint64_t n_lane)
{
    const uint64_t n = (uint64_t)SPAN_BLOCKS * be->n_sm / kvd_max_u64(1, n_lane);

    return (uint32_t)kvd_max_u64(SPAN_PIECES_MIN, kvd_min_u64(SPAN_PIECES, n));
}

/* Of any number of lanes up to lim's: n_lane x span_pieces(n_lane) is below either bound. */
uint64_t cuda_span_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t lanes = (uint64_t)lim->n_seq * lim->n_kv_head;
    const uint64_t group = kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));
    const uint64_t most  = kvd_max_u64((uint64_t)SPAN_BLOCKS * be->n_sm, SPAN_PIECES_MIN * lanes);

    return kvd_min_u64(SPAN_PIECES * lanes, most) * group * (lim->head_dim + 2) * sizeof(float);
}

static __device__ __forceinline__ span_keys span_open(const span_job &j, uint32_t lane)
{
    span_keys k;

    k.s            = j.a.span[lane];
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

static __device__ __forceinline__ float *span_piece(const span_job &j, uint32_t lane,
                                                    uint32_t piece)
{
    return j.piece + ((uint64_t)lane * j.n_piece + piece) * j.part_floats;
}

/* ---- tensor cores ------------------------------------------------------------------- */

static __device__ __forceinline__ void span_mma(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* Two floats as high parts (h) and low parts (l). */
static __device__ __forceinline__ void span_split(float x, float y, uint32_t *h, uint32_t *l)
{
    const __nv_bfloat162 hi = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 lo = __floats2bfloat162_rn(x - __low2float(hi), y - __high2float(hi));

    *h = *(const uint32_t *)&hi;
    *l = *(const uint32_t *)&lo;
}

/* The left operand of step s (16 dimensions) as a thread holds it: dimensions 4 s' .. + 3 of what
 * it reads of a key's row. */
static __device__ void span_queries(const span_job &j, uint32_t lane, uint32_t head0,
                                    uint32_t n_head, uint32_t n_step, uint4 (*q)[WARP])
{
    const uint32_t dim = j.a.kv.head_dim, kv_head = lane % j.a.kv.n_kv_head;
    const float   *x = j.a.q + j.a.row[lane / j.a.kv.n_kv_head] * j.a.q_stride +
                     ((uint64_t)kv_head * j.group + head0) * dim;

    for (uint32_t k = threadIdx.x; k < n_step * WARP; k += blockDim.x) {
        const uint32_t s = k / WARP, g = k % WARP / 4, t = k % 4;
        const float   *at = x + (uint64_t)g * dim + s / 2 * 32 + 8 * t + s % 2 * 4;
        uint4          v  = make_uint4(0, 0, 0, 0);

        if (g < n_head) {
            span_split(at[0], at[1], &v.x, &v.y);
            span_split(at[2], at[3], &v.z, &v.w);
        }
        q[s][k % WARP] = v;
    }
}

/* A warp's softmax so far: rows g of heads; columns of o: dimension 64 c + 8 (2 t + i % 2) + n. */
template <int SETS> struct span_sum {
    float o[SETS][8][4];
    float max, sum; /* sum: of this thread's columns only */
};

/* What a thread reads of 16 keys: K of keys g and g + 8, V of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t.
 */
template <int SETS> struct span_tile {
    uint4 k[2][2 * SETS], v[SETS][4];
};

/* row: of key number lane % 16. */
template <int SETS>
static __device__ __forceinline__ void span_load(const uint8_t *row, uint64_t v_off,
                                                 span_tile<SETS> &x)
{
    const uint32_t lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *k =
            (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)row, half * 8 + g);

#pragma unroll
        for (uint32_t i = 0; i < 2 * SETS; i++)
            x.k[half][i] = *(const uint4 *)(k + 64 * i + 16 * t);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *v = (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)row,
                                                        i / 2 * 8 + 2 * t + i % 2) +
                           v_off + 16 * g;

#pragma unroll
        for (uint32_t c = 0; c < SETS; c++)
            x.v[c][i] = *(const uint4 *)(v + 128 * c);
    }
}

/* Logits of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t for head g. */
template <int SETS>
static __device__ __forceinline__ void span_logits(const span_tile<SETS> &x, const uint4 (*q)[WARP],
                                                   float                  scale, float (&l)[4])
{
    const uint32_t lane = threadIdx.x % WARP;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        float c[4] = { 0.0f };

#pragma unroll
        for (uint32_t i = 0; i < 2 * SETS; i++) {
            span_mma(c, q[2 * i][lane], x.k[half][i].x, x.k[half][i].y);
            span_mma(c, q[2 * i + 1][lane], x.k[half][i].z, x.k[half][i].w);
        }
        l[2 * half]     = (c[0] + c[2]) * scale;
        l[2 * half + 1] = (c[1] + c[3]) * scale;
    }
}

/* o += weights x V of the 16 keys. */
template <int SETS>
static __device__ __forceinline__ void span_values(const span_tile<SETS> &x, uint4 p,
                                                   span_sum<SETS> &s)
{
#pragma unroll
    for (uint32_t c = 0; c < SETS; c++) {
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) { /* dimensions 2 n and 2 n + 1 of the thread's eight */
            const uint32_t a0 = (&x.v[c][0].x)[n], a1 = (&x.v[c][1].x)[n];
            const uint32_t a2 = (&x.v[c][2].x)[n], a3 = (&x.v[c][3].x)[n];

            span_mma(s.o[c][2 * n], p, __byte_perm(a0, a1, 0x5410), __byte_perm(a2, a3, 0x5410));
            span_mma(s.o[c][2 * n + 1], p, __byte_perm(a0, a1, 0x7632),
                     __byte_perm(a2, a3, 0x7632));
        }
    }
}

/* 16 keys more, the first n of them real. */
template <int SETS>
static __device__ __forceinline__ void span_step(const span_job &j, const uint8_t *row, uint32_t n,
                                                 const uint4 (*q)[WARP], span_sum<SETS> &s)
{
    const uint32_t  t = threadIdx.x % 4;
    float           l[4], max, shrink;
    uint4           p;
    span_tile<SETS> x;

    span_load<SETS>(row, j.a.kv.record_bytes / 2, x);
    span_logits<SETS>(x, q, j.a.scale, l);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        l[i] = i / 2 * 8 + 2 * t + i % 2 < n ? l[i] : -INFINITY;
    max    = fmaxf(fmaxf(l[0], l[1]), fmaxf(l[2], l[3]));
    max    = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 1));
    max    = fmaxf(s.max, fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 2)));
    shrink = __expf(s.max - max);
    s.max  = max;
    s.sum *= shrink;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        l[i] = __expf(l[i] - max);
        s.sum += l[i];
    }
#pragma unroll
    for (uint32_t c = 0; c < SETS; c++) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                s.o[c][i][e] *= shrink;
        }
    }
    span_split(l[0], l[1], &p.x, &p.y);
    span_split(l[2], l[3], &p.z, &p.w);
    span_values<SETS>(x, p, s);
}

/* The row of this lane's key of the 16 from i on, or of the last one. */
static __device__ __forceinline__ const uint8_t *span_mine(const span_job &j, const span_keys &k,
                                                           uint32_t kv_head, uint32_t i,
                                                           uint32_t end)
{
    const uint32_t mine = i + threadIdx.x % SPAN_STEP;

    return span_row(j, k, kv_head, mine < end ? mine : end - 1);
}

/* A warp's keys from i on.  What the next step reads is asked for one step ahead, where it lies is
 * looked up two steps ahead. */
template <int SETS>
static __device__ __forceinline__ void span_walk(const span_job &j, const span_keys &k,
                                                 uint32_t kv_head, uint32_t i, uint32_t end,
                                                 const uint4 (*q)[WARP], span_sum<SETS> &s)
{
    const uint64_t half = threadIdx.x % WARP / SPAN_STEP * (j.a.kv.record_bytes / 2);
    const uint8_t *row = NULL, *next = NULL, *after = NULL;

    if (i < end)
        row = span_mine(j, k, kv_head, i, end);
    if (i + SPAN_KEYS < end)
        next = span_mine(j, k, kv_head, i + SPAN_KEYS, end);
    for (; i < end; i += SPAN_KEYS) {
        if (i + 2 * SPAN_KEYS < end)
            after = span_mine(j, k, kv_head, i + 2 * SPAN_KEYS, end);
        for (uint32_t at = 0; i + SPAN_KEYS < end && at < SETS; at++)
            sp_prefetch(next + half + 128 * at);
        span_step<SETS>(j, row, end - i < SPAN_STEP ? end - i : SPAN_STEP, q, s);
        row  = next;
        next = after;
    }
}

template <int SETS> struct span_mem {
    uint4 q[4 * SETS][WARP];
    float o[SPAN_WARPS][SPAN_HEADS][64 * SETS];
    float max[SPAN_WARPS][SPAN_HEADS], sum[SPAN_WARPS][SPAN_HEADS];
};

template <int SETS> static __device__ void span_keep(const span_sum<SETS> &s, span_mem<SETS> *m)
{
    const uint32_t lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP;
    float          sum = s.sum;

    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
#pragma unroll
    for (uint32_t c = 0; c < SETS; c++) {
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
            m->o[warp][g][64 * c + 16 * t + n]     = s.o[c][n][0] + s.o[c][n][2];
            m->o[warp][g][64 * c + 16 * t + 8 + n] = s.o[c][n][1] + s.o[c][n][3];
        }
    }
    if (t == 0) {
        m->max[warp][g] = s.max;
        m->sum[warp][g] = sum;
    }
    __syncthreads();
}

/* The block's warps merged, into the piece's partial. */
template <int SETS>
static __device__ void span_store(const span_job &j, const span_mem<SETS> *m, float *out,
                                  uint32_t head0, uint32_t n_head)
{
    const uint32_t dim = 64 * SETS;

    for (uint32_t k = threadIdx.x; k < n_head * dim; k += blockDim.x) {
        const uint32_t h = k / dim, d = k % dim;
        float          max = SPAN_NO_KEY, sum = 0.0f, o = 0.0f;

        for (uint32_t w = 0; w < SPAN_WARPS; w++)
            max = fmaxf(max, m->max[w][h]);
        for (uint32_t w = 0; w < SPAN_WARPS; w++) {
            const float f = expf(m->max[w][h] - max);

            o += f * m->o[w][h][d];
            sum += f * m->sum[w][h];
        }
        out[(uint64_t)(head0 + h) * dim + d] = o;
        if (d == 0) {
            out[(uint64_t)j.group * dim + head0 + h]           = max;
            out[(uint64_t)j.group * dim + j.group + head0 + h] = sum;
        }
    }
}

template <int SETS>
static __global__ void __launch_bounds__(SPAN_WARPS *WARP)
    span_tiles(const __grid_constant__ span_job j)
{
    sp_begin();
    extern __shared__ uint4 span_dynamic[];
    span_mem<SETS>         *m    = (span_mem<SETS> *)span_dynamic;
    const uint32_t          lane = blockIdx.y, kv_head = lane % j.a.kv.n_kv_head;
    const uint32_t          head0 = blockIdx.z * SPAN_HEADS, warp = threadIdx.x / WARP;
    const uint32_t          n_head = j.group - head0 < SPAN_HEADS ? j.group - head0 : SPAN_HEADS;
    const span_keys         k      = span_open(j, lane);
    const uint32_t          end = (blockIdx.x + 1) * k.each < k.n ? (blockIdx.x + 1) * k.each : k.n;
    span_sum<SETS>          s   = {};

    if (blockIdx.x >= k.n_piece)
        return;
    span_queries(j, lane, head0, n_head, 4 * SETS, m->q);
    __syncthreads();
    s.max = SPAN_NO_KEY;
    span_walk<SETS>(j, k, kv_head, blockIdx.x * k.each + warp * SPAN_STEP, end, m->q, s);
    span_keep<SETS>(s, m);
    span_store<SETS>(j, m, span_piece(j, lane, blockIdx.x), head0, n_head);
}

/* ---- any shape ---------------------------------------------------------------------- */

#define PLAIN_EACH (KVD_HEAD_DIM_MAX / WARP)

typedef struct plain_mem {
    float o[SPAN_WARPS][KVD_HEAD_DIM_MAX], max[SPAN_WARPS], sum[SPAN_WARPS];
} plain_mem;

/* One warp: every fourth key of a piece. */
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

static __global__ void __launch_bounds__(SPAN_WARPS *WARP)
    span_plain(const __grid_constant__ span_job j)
{
    sp_begin();
    __shared__ plain_mem m;
    const uint32_t       lane = blockIdx.y, dim = j.a.kv.head_dim, h = blockIdx.z;
    const uint32_t       kv_head = lane % j.a.kv.n_kv_head;
    const span_keys      k       = span_open(j, lane);
    const uint32_t       end = (blockIdx.x + 1) * k.each < k.n ? (blockIdx.x + 1) * k.each : k.n;
    float               *out = span_piece(j, lane, blockIdx.x);

    if (blockIdx.x >= k.n_piece)
        return;
    plain_keys(j, k, kv_head,
               j.a.q + j.a.row[lane / j.a.kv.n_kv_head] * j.a.q_stride +
                   ((uint64_t)kv_head * j.group + h) * dim,
               blockIdx.x * k.each, end, &m);
    for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x) {
        float max = SPAN_NO_KEY, sum = 0.0f, o = 0.0f;

        for (uint32_t w = 0; w < SPAN_WARPS; w++)
            max = fmaxf(max, m.max[w]);
        for (uint32_t w = 0; w < SPAN_WARPS; w++) {
            o += expf(m.max[w] - max) * m.o[w][d];
            sum += expf(m.max[w] - max) * m.sum[w];
        }
        out[(uint64_t)h * dim + d] = o;
        if (d == 0) {
            out[(uint64_t)j.group * dim + h]           = max;
            out[(uint64_t)j.group * dim + j.group + h] = sum;
        }
    }
}

/* ---- fold ---------------------------------------------------------------------------- */

typedef struct fold_mem {
    float factor[SPAN_PIECES], sum[SPAN_PIECES];
    float o[FOLD_GROUPS][KVD_HEAD_DIM_MAX];
} fold_mem;

/* Factors and sums of the pieces against the largest maximum, which is returned. */
static __device__ float fold_factors(const float *in, uint64_t stride, uint64_t max_at,
                                     uint64_t sum_at, uint32_t n_piece, float max, fold_mem *m)
{
    const uint32_t p = threadIdx.x;

    if (p < n_piece)
        m->factor[p] = in[p * stride + max_at];
    __syncthreads();
    for (uint32_t i = 0; i < n_piece; i++)
        max = fmaxf(max, m->factor[i]);
    __syncthreads();
    if (p < n_piece) {
        m->factor[p] = expf(m->factor[p] - max);
        m->sum[p]    = m->factor[p] * in[p * stride + sum_at];
    } else if (p < SPAN_PIECES) {
        m->factor[p] = 0.0f;
    }
    __syncthreads();
    return max;
}

/* The pieces' weighted sums of one head; FOLD_GROUPS threads share a dimension. */
static __device__ void fold_sums(const float *in, uint64_t stride, uint32_t n_piece, uint32_t dim,
                                 fold_mem *m)
{
    const uint32_t group = threadIdx.x / FOLD_WIDTH;

    for (uint32_t d = threadIdx.x % FOLD_WIDTH; d < dim; d += FOLD_WIDTH) {
        float v[FOLD_EACH], o = 0.0f;

#pragma unroll
        for (uint32_t i = 0; i < FOLD_EACH; i++) {
            const uint32_t p = group + i * FOLD_GROUPS;

            v[i] = p < n_piece ? in[p * stride + d] : 0.0f;
        }
#pragma unroll
        for (uint32_t i = 0; i < FOLD_EACH; i++)
            o += m->factor[group + i * FOLD_GROUPS] * v[i];
        m->o[group][d] = o;
    }
    __syncthreads();
}

/* One block, one query head: the pieces behind what part holds; then what a lane gives. */
static __global__ void __launch_bounds__(FOLD_WIDTH *FOLD_GROUPS)
    span_fold(const __grid_constant__ span_job j)
{
    sp_begin();
    __shared__ fold_mem m;
    const uint32_t      lane = blockIdx.y, h = blockIdx.x, dim = j.a.kv.head_dim;
    const uint64_t      n_o = (uint64_t)j.group * dim, row = j.a.row[lane / j.a.kv.n_kv_head];
    const uint64_t      head = (uint64_t)(lane % j.a.kv.n_kv_head) * j.group + h;
    const span_keys     k    = span_open(j, lane);
    const float        *in   = span_piece(j, lane, 0);
    float              *part = j.a.part + lane * j.part_floats, *o = part + (uint64_t)h * dim;
    const float         max0 = j.a.first ? SPAN_NO_KEY : part[n_o + h];
    float               max, sum, shrink;

    sum    = j.a.first ? 0.0f : part[n_o + j.group + h];
    max    = fold_factors(in, j.part_floats, n_o + h, n_o + j.group + h, k.n_piece, max0, &m);
    shrink = expf(max0 - max);
    sum *= shrink;
    for (uint32_t p = 0; p < k.n_piece; p++)
        sum += m.sum[p];
    fold_sums(in + (uint64_t)h * dim, j.part_floats, k.n_piece, dim, &m);
    for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x) {
        float x = j.a.first ? 0.0f : o[d] * shrink;

        for (uint32_t g = 0; g < FOLD_GROUPS; g++)
            x += m.o[g][d];
        o[d] = x;
        if (j.a.out)
            j.a.out[row * j.a.out_stride + head * dim + d] = x / sum;
    }
    if (threadIdx.x == 0) {
        part[n_o + h]           = max;
        part[n_o + j.group + h] = sum;
        if (j.a.lse)
            j.a.lse[row * j.a.lse_stride + head] = sum > 0.0f ? max + logf(sum) : -INFINITY;
    }
}

/* ---- the op -------------------------------------------------------------------------- */

template <int SETS>
static cudaError_t tiles_launch(const cuda_backend *be, const span_job &j, dim3 grid,
                                cudaStream_t s)
{
    const uint32_t bytes = sizeof(span_mem<SETS>);

    if (bytes > 48u << 10) {
        const cudaError_t e =
            cudaFuncSetAttribute(span_tiles<SETS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)bytes);

        if (e != cudaSuccess)
            return e;
    }
    grid.z = (j.group + SPAN_HEADS - 1) / SPAN_HEADS;
    return sp_launch(be, s, grid, SPAN_WARPS * WARP, bytes, 1, span_tiles<SETS>, j);
}

static cudaError_t span_launch(const cuda_backend *be, const span_job &j, uint32_t n_lane,
                               cudaStream_t s)
{
    const uint32_t dim = j.a.kv.type == KVD_DTYPE_BF16 ? j.a.kv.head_dim : 0;

    if (dim == 64)
        return tiles_launch<1>(be, j, dim3(j.n_piece, n_lane), s);
    if (dim == 128)
        return tiles_launch<2>(be, j, dim3(j.n_piece, n_lane), s);
    if (dim == 256)
        return tiles_launch<4>(be, j, dim3(j.n_piece, n_lane), s);
    return sp_launch(be, s, dim3(j.n_piece, n_lane, j.group), SPAN_WARPS * WARP, 0, 1, span_plain,
                     j);
}

kvd_status cuda_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const uint32_t      n_lane = a->n_row * a->kv.n_kv_head;
    span_job            j      = {};

    if (n_lane == 0)
        return KVD_OK;
    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= KVD_HEAD_DIM_MAX);
    j.a     = *a;
    j.group = a->n_head / a->kv.n_kv_head;
    j.n_piece =
        span_pieces(be, be->deterministic ? (uint64_t)be->lim.n_seq * a->kv.n_kv_head : n_lane);
    j.row_bytes   = (uint32_t)(a->kv.record_bytes / (2 * a->kv.chunk_tokens));
    j.part_floats = kvd_attn_part_floats(j.group, a->kv.head_dim);
    j.piece       = (float *)cuda_scratch_of(be, CUDA_SCRATCH_SPAN,
                                             n_lane * j.n_piece * j.part_floats * sizeof(float));
    CUDA_TRY(span_launch(be, j, n_lane, st->s), "attn_span", err);
    CUDA_TRY(sp_launch(be, st->s, dim3(j.group, n_lane), FOLD_WIDTH * FOLD_GROUPS, 0, 1, span_fold,
                       j),
             "attn_span", err);
    return KVD_OK;
}
