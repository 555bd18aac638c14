/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_span.cu - attention of one new token over one or two spans per lane, in one launch.
 *
 * A span's keys (its records' tokens, then keys of blocks) are cut into pieces of a multiple of
 * SPAN_KEYS, at most n_piece of them: fewer where there are many lanes (deterministic: where so
 * many are reserved), else how depends on the span alone.  Each piece gives a partial softmax; the
 * block of threads that comes last of a lane's folds them in their order behind what part holds,
 * span by span, so that two spans at once have the bits of one after the other.
 *
 * BF16 with a head_dim of 64, 128 or 256 goes by tensor cores: a warp takes 16 keys at a time.
 * Columns of the products are query heads: 2 h the high parts of head h's numbers (query, then
 * weight), 2 h + 1 the low parts, so that bfloat16 operands lose 2^-17 and not 2^-9.  Rows are
 * keys, then dimensions.  Which dimension is which number of a sum or row of the result does not
 * matter, so threads read K and V 16 bytes at a time as they lie and need no exchange: rows begin
 * on multiples of 16 bytes.  Every other shape takes a plain kernel, a warp a key and a block of
 * threads a query head.
 *
 * Scratch: counters of the blocks that are through, 0 between launches; the pieces' partials.
 * Owns: nothing.  Thread: the backend's caller. */
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
#define FOLD_HEADS      (2 * SPAN_HEADS) /* of a block of threads at most */
#define FOLD_AHEAD      8u

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

/* A warp's keys from i on; row: where those of the first step lie.  What the next step reads is
 * asked for one step ahead, where it lies is looked up two steps ahead. */
template <int DIMS, int SETS>
static __device__ __forceinline__ void span_walk(const span_job &j, const span_keys &k,
                                                 uint32_t kv_head, uint32_t i, uint32_t end,
                                                 const uint8_t        *row, const uint2 (*q)[WARP],
                                                 span_sum<DIMS, SETS> &s)
{
    const uint64_t half = threadIdx.x % WARP / SPAN_STEP * (j.a.kv.record_bytes / 2);
    const uint8_t *next = NULL, *after = NULL;

    if (i + SPAN_KEYS < end)
        next = span_mine(j, k, kv_head, i + SPAN_KEYS, end);
    for (; i < end; i += SPAN_KEYS) {
        if (i + 2 * SPAN_KEYS < end)
            after = span_mine(j, k, kv_head, i + 2 * SPAN_KEYS, end);
        for (uint32_t at = 0; i + SPAN_KEYS < end && at < DIMS; at++)
            sp_prefetch(next + half + 128 * at);
        span_step<DIMS, SETS>(j, row, end - i < SPAN_STEP ? end - i : SPAN_STEP, q, s);
        row  = next;
        next = after;
    }
}

/* Rows of o are two floats longer, so that neighbouring threads' stores meet no bank twice. */
template <int DIMS, int SETS> struct span_mem {
    uint2    q[SETS * 4 * DIMS][WARP];
    float    o[SPAN_WARPS][SETS * SPAN_HEADS][64 * DIMS + 2];
    float    max[SPAN_WARPS][SETS * SPAN_HEADS], sum[SPAN_WARPS][SETS * SPAN_HEADS];
    fold_mem fold;
};

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
    __syncthreads();
}

/* The block's warps merged, into the piece's partial. */
template <int DIMS, int SETS>
static __device__ void span_store(const span_job &j, const span_mem<DIMS, SETS> *m, float *out,
                                  uint32_t head0, uint32_t n_head)
{
    const uint32_t dim = 64 * DIMS;

    for (uint32_t k = threadIdx.x; k < n_head * dim; k += blockDim.x) {
        const uint32_t h = k / dim, d = k % dim;
        float          max = SPAN_NO_KEY, sum = 0.0f, o = 0.0f;

#pragma unroll
        for (uint32_t w = 0; w < SPAN_WARPS; w++)
            max = fmaxf(max, m->max[w][h]);
#pragma unroll
        for (uint32_t w = 0; w < SPAN_WARPS; w++) {
            const float f = __expf(m->max[w][h] - max);

            o += f * m->o[w][h][d];
            sum += f * m->sum[w][h];
        }
        out[(uint64_t)(head0 + h) * dim + d] = o;
        if (d == 0) {
            out[(uint64_t)j.group * dim + head0 + h]           = max;
            out[(uint64_t)j.group * dim + j.group + head0 + h] = sum;
        }
    }
    __syncthreads(); /* m is free again */
}

template <int DIMS, int SETS>
static __global__ void __launch_bounds__(SPAN_THREADS, DIMS *SETS > 2 ? 1 : 2)
    span_tiles(const __grid_constant__ span_job j)
{
    sp_begin();
    extern __shared__ uint4 span_dynamic[];
    span_mem<DIMS, SETS>   *m    = (span_mem<DIMS, SETS> *)span_dynamic;
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
            span_queries(j, lane, head0, n_head, SETS, 4 * DIMS, m->q);
        __syncthreads();
#pragma unroll
        for (uint32_t b = 0; b < SETS; b++)
            s.max[b] = SPAN_NO_KEY;
        span_walk<DIMS, SETS>(j, k, kv_head, first, end, row, m->q, s);
        span_keep<DIMS, SETS>(s, m);
        span_store<DIMS, SETS>(j, m, span_piece(j, lane, second, p), head0, n_head);
    }
    if (blockIdx.x < w.n || blockIdx.x == 0) {
        if (span_last(j, w, lane, &m->fold))
            span_fold(j, lane, head0, n_head, &m->fold);
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
    const uint32_t bytes = sizeof(span_mem<DIMS, SETS>), heads = SETS * SPAN_HEADS;

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
    uint64_t            bytes;
    uint8_t            *mem;

    if (n_lane == 0)
        return KVD_OK;
    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= KVD_HEAD_DIM_MAX);
    j.a      = *a;
    j.group  = a->n_head / a->kv.n_kv_head;
    j.n_span = a->then ? 2 : 1;
    j.n_piece =
        span_pieces(be, be->deterministic ? (uint64_t)be->lim.n_seq * a->kv.n_kv_head : n_lane);
    j.row_bytes   = (uint32_t)(a->kv.record_bytes / (2 * a->kv.chunk_tokens));
    j.part_floats = kvd_attn_part_floats(j.group, a->kv.head_dim);
    bytes         = counts + SPAN_SPANS * n_lane * j.n_piece * j.part_floats * sizeof(float);
    mem           = (uint8_t *)cuda_scratch_of(be, CUDA_SCRATCH_SPAN, bytes);
    j.count       = (uint32_t *)mem;
    j.piece       = (float *)(mem + counts);
    CUDA_TRY(span_launch(be, j, n_lane, st->s), "attn_span", err);
    return KVD_OK;
}
