/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_whole.cuh - the stages of cuda_select_whole.cu up to the k-th best chunk.
 *
 * A thread has four neighbouring chunks at a time, which are read and written together.  All that
 * is known of them is one record of 32 bytes (64 for more than 4 heads): first their weights, four
 * of a head side by side, as binary16 against the largest of 32 chunks, which is kept beside; then
 * whole_quad.  So shared memory holds many chunks, and a rounded weight is 2^-12 off. */
#ifndef KVD_CUDA_SELECT_WHOLE_CUH
#define KVD_CUDA_SELECT_WHOLE_CUH

#include "backend/cuda/cuda_select_fast.cuh"

#define WHOLE_WARPS  16u    /* of a block at most; half of them where two share a processor */
#define WHOLE_EACH   4u     /* chunks of a thread */
#define WHOLE_MOST   16384u /* of a block at most */
#define WHOLE_STEPS  (WHOLE_MOST / WHOLE_EACH / WARP) /* of its warps */
#define WHOLE_RANKS  16u                              /* blocks of a cluster at most */
#define WHOLE_GROUP  FAST_HEADS
#define WHOLE_BINS   512u
#define WHOLE_PARTS  4u
#define WHOLE_FEW    512u /* keys of a cluster with the digit that is looked for, at most */
#define WHOLE_TINY   64u
#define WHOLE_RUN    CPU_INDEX_GROUP /* chunks whose weights have a largest in common */
#define WHOLE_ONE    15.0f           /* log2 of the largest weight as it is stored */
#define WHOLE_LOG2E  1.4426950408889634f
#define WHOLE_CHUNKS 26u /* bits of a chunk's number */
#define WHOLE_DIGIT  (19u + WHOLE_CHUNKS)
#define WHOLE_BASE   (0x7f0u - (WHOLE_BINS - 1)) /* a score of 1 has the last digit */

static_assert(1u << WHOLE_CHUNKS == KVD_SELECT_CHUNKS, "a chunk's number fits");

typedef struct whole_job {
    select_job            j;
    fast_shape            s;
    kvd_window_args       change; /* if window */
    kvd_window_spans_args spans;
    float                 share;   /* one by the group */
    uint32_t              shift;   /* chunks of an index block, a power of two, as one */
    uint32_t              threads; /* of a block */
    uint32_t              each;    /* chunks of a block of threads at most, whole index blocks */
    uint32_t              slots;   /* of a window at most */
    uint32_t              quad;    /* bytes of four chunks' record */
    uint32_t              front;   /* bytes before records */
    bool                  beside, window;
} whole_job;

/* Keys are looked for in [low, high); still `want` of them from the top. */
typedef struct whole_goal {
    uint64_t low, high;
    uint32_t want, n; /* n: keys there are */
    uint64_t cut;     /* the least key that counts */
} whole_goal;

/* What a block has of the selection. */
typedef struct whole_count {
    uint32_t n_sel, n_urgent, n_bulk; /* urgent and bulk: of the misses */
    uint32_t n_out;                   /* chunks of the window that are not selected */
    uint64_t mass;
} whole_count;

typedef struct whole_mem {
    kvd_select_seq   seq;
    kvd_window_seq   window;
    kvd_window_place place;
    uint32_t         k, cap;
    uint64_t         at; /* where slots begin */
    uint64_t         arrived[WHOLE_WARPS][2];
    alignas(16) uint32_t hist[2][WHOLE_BINS];  /* [goal] of this block; peers look */
    alignas(16) uint32_t count[2][WHOLE_BINS]; /* [goal], or of odd and even warps */
    alignas(
        16) uint32_t out[WHOLE_BINS]; /* the first block's: by peers, slots that may go by digit */
    float2      warp[WHOLE_WARPS][WHOLE_GROUP]; /* largest logit and sum */
    float2      part[WHOLE_RANKS][WHOLE_GROUP]; /* by peers: the same of a block */
    float       top[WHOLE_GROUP];               /* largest logit of the lane */
    float       factor[WHOLE_GROUP], kept[WHOLE_GROUP];
    whole_goal  goal[2]; /* the selected, the urgent */
    uint32_t    first_few[2][WHOLE_RANKS], n_few[2];
    sp_pick     pick[2];
    uint64_t    tiny[2][WHOLE_TINY];
    uint32_t    n[WHOLE_STEPS]; /* of a warp's step; see whole_pack() */
    uint64_t    mass[WHOLE_WARPS];
    uint32_t    n_out[WHOLE_WARPS];
    whole_count block[WHOLE_RANKS]; /* by peers */
    uint64_t    last;
    uint32_t    list[WARP + 1];
} whole_mem;

/* In place of the index blocks when they have been read.  Behind it the first block has slots and
 * misses. */
typedef struct whole_over {
    uint64_t own[2][WHOLE_FEW]; /* of this block; peers look */
    union {
        uint32_t sum[WHOLE_PARTS][WHOLE_BINS]; /* of the cluster's counts */
        uint64_t few[2][WHOLE_FEW];            /* of all; see whole_find() */
    } u;
} whole_over;

/* Four chunks' record from their scores on. */
typedef struct whole_quad {
    uint32_t key[WHOLE_EACH];
    union {
        uint16_t slot_of[WHOLE_EACH];
        struct {             /* when slots are no longer needed */
            uint32_t before; /* within the warp; see whole_pack() */
            uint32_t fate;   /* FATE_BITS each */
        } sel;
    } u;
    uint16_t ema[WHOLE_EACH];
} whole_quad;

typedef struct whole_lane {
    uint32_t  index, head, rank, n_rank;
    uint32_t  block, end_block; /* this block's part of the lane's index blocks */
    uint32_t  first, base, n;   /* of the lane; its chunks: [base, base + n) */
    uint32_t  base0, each;      /* the first block's base; chunks of each block but the last */
    uint8_t  *mem;              /* records */
    uint32_t  quad;             /* bytes of one */
    float    *largest;          /* log2 of it, [runs][heads] */
    uint64_t *slot;             /* the first block's: [slots] see cuda_select_window.cuh */
    uint32_t *miss;             /* likewise: [slots] chunks, in the order of fetch */
} whole_lane;

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

static __device__ __forceinline__ uint64_t whole_key(uint32_t key, uint32_t chunk)
{
    return (uint64_t)key << WHOLE_CHUNKS | (KVD_SELECT_CHUNKS - 1 - chunk);
}

/* Two binary16 in a word, x in its low half. */
static __device__ __forceinline__ uint32_t whole_halves(float x, float y)
{
    const __half2 h = __floats2half2_rn(x, y);

    return *(const uint32_t *)&h;
}

static __device__ __forceinline__ float2 whole_floats(uint32_t halves)
{
    return __half22float2(*(const __half2 *)&halves);
}

/* The record of chunk i of this block. */
static __device__ __forceinline__ whole_quad *whole_at(const whole_lane &l, uint32_t i)
{
    return (whole_quad *)(l.mem + i / WHOLE_EACH * l.quad);
}

static __device__ __forceinline__ uint32_t whole_digit(uint32_t key)
{
    const uint32_t d = key >> (WHOLE_DIGIT - WHOLE_CHUNKS);

    return d > WHOLE_BASE ? d - WHOLE_BASE : 0;
}

/* Sum over a warp of numbers below 2^47. */
static __device__ __forceinline__ uint64_t whole_add64(uint64_t x)
{
    const uint32_t low  = __reduce_add_sync(ALL_LANES, (uint32_t)x & 0xfffffu);
    const uint32_t high = __reduce_add_sync(ALL_LANES, (uint32_t)(x >> 20));

    return ((uint64_t)high << 20) + low;
}

/* ---- 1: logits ------------------------------------------------------------------------- */

/* Two to the x, 0 below 2^-126. */
static __device__ __forceinline__ float whole_exp(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The largest over the threads that have other chunks of the same heads. */
static __device__ __forceinline__ float whole_over_chunks(float x)
{
    for (uint32_t d = 4; d < WARP; d *= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

static __device__ __forceinline__ float2 whole_merge(float2 a, float2 b)
{
    const float most = fmaxf(a.x, b.x);

    return make_float2(most, a.y * whole_exp(a.x - most) + b.y * whole_exp(b.x - most));
}

/* A thread's four chunks from i on, of two heads from head0 on, which have logits: their weights;
 * sum: largest and sum so far.  A sum is 2^WHOLE_ONE times too much. */
static __device__ __forceinline__ void whole_weigh(const whole_lane &l, uint32_t i, uint32_t head0,
                                                   bool real, const fast_four &f, float2 (&sum)[2])
{
    uint32_t bits[2][2];
    float    largest[2];

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const float *v = f.v[k];
        float        p[4], one;

        largest[k] =
            whole_over_chunks(fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), FAST_NONE));
        one = largest[k] - WHOLE_ONE;
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            p[e] = whole_exp(v[e] - one);
        sum[k]     = whole_merge(sum[k], make_float2(largest[k], (p[0] + p[1]) + (p[2] + p[3])));
        bits[k][0] = whole_halves(p[0], p[1]);
        bits[k][1] = whole_halves(p[2], p[3]);
    }
    if (!real)
        return;
    *(uint4 *)((uint8_t *)whole_at(l, i) + 8 * head0) =
        make_uint4(bits[0][0], bits[0][1], bits[1][0], bits[1][1]);
    if (threadIdx.x % WARP < 4)
        *(float2 *)(l.largest + i / WHOLE_RUN * (l.quad / 8) + head0) =
            make_float2(largest[0], largest[1]);
}

/* A warp's largest logits and sums. */
template <bool WIDE>
static __device__ __forceinline__ void whole_fold(whole_mem *m, float2 (&sum)[2])
{
    const uint32_t lane = threadIdx.x % WARP;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        for (uint32_t d = 4; d < WARP; d *= 2)
            sum[k].y += __shfl_xor_sync(ALL_LANES, sum[k].y, d); /* of one largest */
        if (!WIDE)
            sum[k] = whole_merge(sum[k], make_float2(__shfl_xor_sync(ALL_LANES, sum[k].x, 2),
                                                     __shfl_xor_sync(ALL_LANES, sum[k].y, 2)));
        if (lane < (WIDE ? 4 : 2))
            m->warp[threadIdx.x / WARP][fast_head0<WIDE>() + k] = sum[k];
    }
}

/* All weights of this block's chunks, and each warp's largest logits and sums. */
template <int ROWS, bool WIDE>
static __device__ void whole_scan(const whole_job &f, const whole_lane &l, whole_mem *m,
                                  uint8_t *stages)
{
    const select_job &j    = f.j;
    const uint32_t    half = fast_half<WIDE>(), warp = threadIdx.x / WARP;
    const uint32_t    first = l.first > l.base ? l.first - l.base : 0;
    const float      *x = j.a.q + m->seq.row * j.a.q_stride + (uint64_t)l.head * j.group * j.s.dim;
    float2            sum[2] = { { FAST_NONE, 0.0f }, { FAST_NONE, 0.0f } };
    fast_query<ROWS>  q;
    fast_walk         w;

    w.seq     = &m->seq;
    w.stage   = stages + warp * f.s.depth * f.s.stage;
    w.arrived = m->arrived[warp];
    w.step    = blockDim.x / WARP;
    w.end     = l.end_block;
    w.block   = l.block + warp;
    fast_begin(j, f.s, w);
    fast_open<ROWS, WIDE>(j, x, j.a.scale * WHOLE_LOG2E, q);
#pragma unroll 1
    for (uint32_t n = 0; w.block + (uint64_t)n * w.step < w.end; n++) {
        const uint8_t *stage = fast_arrive(f.s, w, n);
        const uint32_t i     = (warp + n * w.step) * j.s.n_chunk + threadIdx.x % WARP / 4 * 4;
        const uint32_t more  = half * WHOLE_RUN;
        fast_four      v[WIDE ? 2 : 1];

        fast_block<ROWS, WIDE>(j, f.s, stage, q, j.log_tokens * WHOLE_LOG2E, v);
        fast_leave(f.s, w, n);
        fast_ends(v[0], i + more, first, half < f.s.n_group ? l.n : 0);
        whole_weigh(l, i + more, fast_head0<WIDE>(), half < f.s.n_group, v[0], sum);
        if (WIDE && f.s.n_group > 1) {
            fast_ends(v[WIDE], i + WHOLE_RUN, first, l.n);
            whole_weigh(l, i + WHOLE_RUN, fast_head0<WIDE>(), true, v[WIDE], sum);
        }
    }
    whole_fold<WIDE>(m, sum);
}

/* Gives all blocks this one's largest and sums; one warp a head, a lane a peer. */
static __device__ __forceinline__ void whole_tell(const select_job &j, const whole_lane &l,
                                                  whole_mem *m)
{
    const uint32_t lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    const bool     mine = h < j.group && lane < blockDim.x / WARP;
    const float2   x    = mine ? m->warp[lane][h] : make_float2(FAST_NONE, 0.0f);
    const float    top  = cuda_warp_max(x.x);
    const float    sum  = cuda_warp_sum(x.y * whole_exp(x.x - top));

    if (h < j.group && lane < l.n_rank)
        *sp_peer(&m->part[l.rank][h], lane) = make_float2(top, sum);
}

/* ---- 2: scores ------------------------------------------------------------------------- */

/* Of the kept set, for the head whose factor this warp makes. */
static __device__ __forceinline__ float whole_kept(const select_job &j, const whole_lane &l,
                                                   const whole_mem *m)
{
    const uint32_t h = threadIdx.x / WARP;

    if (j.a.rule == KVD_GQA_MEAN || h >= j.group)
        return -INFINITY;
    return j.a.kept_lse[m->seq.row * j.a.lse_stride + (uint64_t)l.head * j.group + h];
}

/* What makes weights probabilities; one warp a head. */
static __device__ void whole_factors(const select_job &j, const whole_lane &l, whole_mem *m,
                                     float share, float lse)
{
    const uint32_t lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    float2         x = make_float2(FAST_NONE, 0.0f);
    float          max, sum, kept = 0.0f;

    if (h >= j.group)
        return;
    if (lane < l.n_rank)
        x = m->part[lane][h];
    lse *= WHOLE_LOG2E;
    max = fmaxf(cuda_warp_max(x.x), lse);
    sum = cuda_warp_sum(x.y * whole_exp(x.x - max)) * 0x1p-15f; /* WHOLE_ONE */
    if (lse > -INFINITY)
        kept = whole_exp(lse - max);
    sum += kept;
    if (lane == 0) {
        m->top[h]    = max + WHOLE_ONE;
        m->factor[h] = __fdividef(j.a.rule == KVD_GQA_MAX_KEPT ? 1.0f : share, sum);
        m->kept[h]   = sum > 0.0f ? __fdividef(kept, sum) * share : 0.0f;
    }
}

/* One head's part of four scores; top: its largest logit, of a weight of 1. */
static __device__ __forceinline__ void whole_head(uint2 weight, float largest, float top,
                                                  float factor, bool most, float (&x)[4])
{
    const float2 a = whole_floats(weight.x), b = whole_floats(weight.y);
    const float  by   = whole_exp(largest - top) * factor;
    const float  p[4] = { a.x * by, a.y * by, b.x * by, b.y * by };

#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        x[e] = !most ? x[e] + p[e] : p[e] > x[e] ? p[e] : x[e];
}

/* Scores of the four chunks from number i on. */
static __device__ __forceinline__ void whole_four(const whole_job &f, const whole_lane &l,
                                                  const whole_mem *m, uint32_t i, float (&x)[4])
{
    const bool   most = f.j.a.rule == KVD_GQA_MAX_KEPT;
    const uint4 *pair = (const uint4 *)whole_at(l, i);
    const float *own  = l.largest + i / WHOLE_RUN * (l.quad / 8);

    x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll 2
    for (uint32_t h = 0; h < f.j.group; h += 2) {
        const uint4 w = pair[h / 2];

        whole_head(make_uint2(w.x, w.y), own[h], m->top[h], m->factor[h], most, x);
        if (h + 1 < f.j.group)
            whole_head(make_uint2(w.z, w.w), own[h + 1], m->top[h + 1], m->factor[h + 1], most, x);
    }
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
        x[e] = x[e] > 0.0f ? x[e] : 0.0f; /* NaN too */
        x[e] = x[e] < 1.0f ? x[e] : 1.0f;
    }
}

/* Four numbers, of which n are there, from p (NULL: none) on; the others are 0. */
static __device__ __noinline__ ushort4 whole_load_some(const uint16_t *p, uint32_t n)
{
    ushort4 v = make_ushort4(0, 0, 0, 0);

    v.x = p && n > 0 ? p[0] : 0;
    v.y = p && n > 1 ? p[1] : 0;
    v.z = p && n > 2 ? p[2] : 0;
    v.w = p && n > 3 ? p[3] : 0;
    return v;
}

static __device__ __forceinline__ ushort4 whole_load(const uint16_t *p, uint32_t i, uint32_t n)
{
    if (p && i + 4 <= n && ((uint64_t)(p + i) & 7) == 0)
        return *(const ushort4 *)(p + i);
    return whole_load_some(p ? p + i : NULL, i < n ? n - i : 0);
}

/* What memory has of a thread's four chunks. */
typedef struct whole_had {
    ushort4 ema, slot_of;
} whole_had;

static __device__ __forceinline__ whole_had whole_known(const whole_job &f, const whole_lane &l,
                                                        const whole_mem *m, uint32_t i)
{
    const uint64_t at = (uint64_t)l.head * f.j.a.lane_stride + l.base;
    whole_had      x;

    x.ema = whole_load(m->seq.ema ? m->seq.ema + at : NULL, i, l.n);
    x.slot_of =
        whole_load(f.window ? m->window.slot_of + l.head * f.change.lane_stride + l.base : NULL, i,
                   l.n);
    return x;
}

/* Those of four scores and averages that count, one by one. */
static __device__ __noinline__ void whole_store_some(uint32_t skip, uint32_t n, float4 x, ushort4 e,
                                                     float *score, uint16_t *ema)
{
    const float    v[4] = { x.x, x.y, x.z, x.w };
    const uint16_t a[4] = { e.x, e.y, e.z, e.w };

#pragma unroll
    for (uint32_t u = 0; u < 4; u++) {
        if (u < skip || u >= n)
            continue;
        score[u] = v[u];
        if (ema)
            ema[u] = a[u];
    }
}

/* Four scores and averages to where they belong; score and ema: of number 0. */
static __device__ __forceinline__ void whole_store(const whole_lane &l, uint32_t i, float4 x,
                                                   ushort4 e, float *score, uint16_t *ema)
{
    const bool all = l.base + i >= l.first && i + 4 <= l.n && ((uint64_t)(score + i) & 15) == 0 &&
                     ((uint64_t)(ema + i) & 7) == 0;

    if (!all) {
        whole_store_some(l.first > l.base + i ? l.first - (l.base + i) : 0, l.n - i, x, e,
                         score + i, ema ? ema + i : NULL);
        return;
    }
    *(float4 *)(score + i) = x;
    if (ema)
        *(ushort4 *)(ema + i) = e;
}

/* Scores, averages, keys, and the keys' first digits counted; had: of the thread's first chunks. */
static __device__ void whole_scores(const whole_job &f, const whole_lane &l, whole_mem *m,
                                    whole_had had)
{
    const float alpha = f.j.a.alpha;
    float      *score = m->seq.score + l.head * f.j.a.lane_stride;
    uint16_t   *ema   = m->seq.ema ? m->seq.ema + l.head * f.j.a.lane_stride + l.base : NULL;
    uint32_t   *count = m->count[threadIdx.x / WARP % 2];
    uint32_t    next;

    for (uint32_t c = l.rank * blockDim.x + threadIdx.x; c < min(l.first, m->seq.n_chunk);
         c += l.n_rank * blockDim.x)
        score[c] = 0.0f;
#pragma unroll 1
    for (uint32_t i = WHOLE_EACH * threadIdx.x; i < l.n; i = next) {
        const whole_had now = had;
        whole_quad     *r   = whole_at(l, i);
        ushort4         e   = now.ema;
        float           x[4];
        uint32_t        k[4];

        next = i + WHOLE_EACH * blockDim.x;
        if (next < l.n)
            had = whole_known(f, l, m, next);
        whole_four(f, l, m, i, x);
#pragma unroll
        for (uint32_t u = 0; u < 4; u++) {
            k[u] = l.base + i + u < l.first || i + u >= l.n ? 0 : __float_as_uint(x[u]) + 1;
            if (k[u])
                atomicAdd(&count[whole_digit(k[u])], 1);
        }
        e.x                      = select_ema(e.x, x[0], alpha);
        e.y                      = select_ema(e.y, x[1], alpha);
        e.z                      = select_ema(e.z, x[2], alpha);
        e.w                      = select_ema(e.w, x[3], alpha);
        *(uint4 *)r->key         = make_uint4(k[0], k[1], k[2], k[3]);
        *(ushort4 *)r->u.slot_of = now.slot_of;
        *(ushort4 *)r->ema       = e;
        whole_store(l, i, make_float4(x[0], x[1], x[2], x[3]), e, score + l.base, ema);
    }
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < WHOLE_BINS; b += blockDim.x)
        m->hist[0][b] = m->count[0][b] + m->count[1][b];
}

/* ---- 3: the k-th ----------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t whole_shift(const whole_goal &g)
{
    const uint32_t bits = 64 - __clzll((long long)(g.high - g.low - 1));

    return bits > 9 ? bits - 9 : 0;
}

/* The cluster's counts of a goal added up. */
static __device__ __noinline__ void whole_sums(uint32_t n_rank, whole_mem *m, whole_over *o,
                                               uint32_t goal)
{
    const uint32_t part = threadIdx.x / (WHOLE_BINS / 4), bin = threadIdx.x % (WHOLE_BINS / 4) * 4;
    const uint32_t n_part = blockDim.x / (WHOLE_BINS / 4);
    uint4          sum    = make_uint4(0, 0, 0, 0);

#pragma unroll 2
    for (uint32_t r = part; r < n_rank; r += n_part) {
        const uint4 x = *(const uint4 *)sp_peer(&m->hist[goal][bin], r);

        sum = make_uint4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    *(uint4 *)&o->u.sum[part][bin] = sum;
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < WHOLE_BINS; b += blockDim.x) {
        uint32_t n = 0;

        for (uint32_t p = 0; p < n_part; p++)
            n += o->u.sum[p][b];
        m->count[goal][b] = n;
    }
    __syncthreads();
}

/* Sum of x over the lanes before this one, and with it. */
static __device__ __forceinline__ uint32_t whole_lanes(uint32_t x)
{
    const uint32_t lane = threadIdx.x % WARP;

#pragma unroll 1
    for (uint32_t d = 1; d < WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(ALL_LANES, x, d);

        x += lane >= d ? y : 0;
    }
    return x;
}

/* One warp: sp_pick_bin() without mass, over WHOLE_BINS counts on a multiple of 16 bytes: a lane
 * has 16 neighbours, then one number of those among which it is. */
static __device__ __noinline__ void whole_pick(const uint32_t *hist, bool down, uint32_t want,
                                               sp_pick *out)
{
    const uint32_t each = WHOLE_BINS / WARP, lane = threadIdx.x % WARP;
    const uint32_t mine = each * (down ? WARP - 1 - lane : lane);
    uint32_t       n    = 0, sum, before, bin, last;

#pragma unroll
    for (uint32_t i = 0; i < each; i += 4) {
        const uint4 a = *(const uint4 *)(hist + mine + i);

        n += a.x + a.y + a.z + a.w;
    }
    sum    = whole_lanes(n);
    last   = __ffs((int)__ballot_sync(ALL_LANES, sum >= want));
    last   = last ? last - 1 : WARP - 1; /* never: as many as wanted are there */
    before = __shfl_sync(ALL_LANES, sum - n, last);
    bin    = __shfl_sync(ALL_LANES, mine, last) + (down ? each - 1 - lane % each : lane % each);
    n      = lane < each ? hist[bin] : 0;
    sum    = whole_lanes(n);
    last   = __ffs((int)__ballot_sync(ALL_LANES, before + sum >= want && lane < each));
    if (lane + 1 == last) {
        out->bin    = bin;
        out->before = before + sum - n;
        out->count  = n;
    }
}

/* One warp: narrows a goal to the digit that its want-th key has, and finds out which blocks have
 * how many of those; `from`: whose counts are looked at. */
static __device__ __noinline__ void whole_narrow(uint32_t n_rank, whole_mem *m, uint32_t g,
                                                 uint32_t from, bool first)
{
    const uint32_t lane = threadIdx.x % WARP;
    whole_goal    *goal = &m->goal[g];
    uint32_t       n    = 0, bin, shift;

    whole_pick(m->count[from], true, goal->want, &m->pick[g]);
    __syncwarp();
    bin = m->pick[g].bin;
    if (lane < n_rank)
        n = *sp_peer(&m->hist[from][bin], lane);
    n = whole_lanes(n);
    if (lane < WHOLE_RANKS)
        m->first_few[g][lane] = n; /* behind those of block `lane` */
    if (lane == 0) {
        shift     = whole_shift(*goal);
        goal->low = first ? (bin ? (uint64_t)(WHOLE_BASE + bin) << WHOLE_DIGIT : 0)
                          : goal->low + ((uint64_t)bin << shift);
        goal->high =
            first ? (uint64_t)(WHOLE_BASE + bin + 1) << WHOLE_DIGIT : goal->low + (1ull << shift);
        goal->want -= m->pick[g].before;
        goal->n = m->pick[g].count;
    }
    __syncwarp();
}

/* A goal whose digit too many keys have: by the next one. */
static __device__ __noinline__ void whole_divide(whole_lane l, whole_mem *m, whole_over *o)
{
    const uint32_t g = threadIdx.x / WARP;

    sp_cluster_sync(); /* peers have looked at the counts */
    for (uint32_t b = threadIdx.x; b < 2 * WHOLE_BINS; b += blockDim.x)
        m->hist[0][b] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < l.n; i += blockDim.x) {
        const uint32_t key = whole_at(l, i)->key[i % WHOLE_EACH];
        const uint64_t k   = whole_key(key, l.base + i);

        for (uint32_t a = 0; a < 2 && key; a++)
            if (k >= m->goal[a].low && k < m->goal[a].high)
                atomicAdd(&m->hist[a][(k - m->goal[a].low) >> whole_shift(m->goal[a])], 1);
    }
    sp_cluster_sync();
    whole_sums(l.n_rank, m, o, 0);
    whole_sums(l.n_rank, m, o, 1);
    if (g < 2 && m->goal[g].n > WHOLE_FEW)
        whole_narrow(l.n_rank, m, g, g, false);
    __syncthreads();
}

/* Lists this block's keys within the goals. */
static __device__ void whole_list(const whole_lane &l, whole_mem *m, whole_over *o)
{
    uint64_t low[2], high[2];
    uint32_t least[2], most[2]; /* the same without the chunks' numbers */

#pragma unroll
    for (uint32_t g = 0; g < 2; g++) {
        low[g]   = m->goal[g].low;
        high[g]  = m->goal[g].high;
        least[g] = max(1u, (uint32_t)(low[g] >> WHOLE_CHUNKS));
        most[g]  = high[g] ? (uint32_t)((high[g] - 1) >> WHOLE_CHUNKS) : 0;
    }
#pragma unroll 1
    for (uint32_t i = WHOLE_EACH * threadIdx.x; i < l.n; i += WHOLE_EACH * blockDim.x) {
        const uint4    v      = *(const uint4 *)whole_at(l, i)->key;
        const uint32_t key[4] = { v.x, v.y, v.z, v.w };

        for (uint32_t e = 0; e < WHOLE_EACH; e++) {
            const uint64_t k = whole_key(key[e], l.base + i + e);

#pragma unroll
            for (uint32_t g = 0; g < 2; g++)
                if (key[e] >= least[g] && key[e] <= most[g] && k >= low[g] && k < high[g])
                    o->own[g][atomicAdd(&m->n_few[g], 1)] = k;
        }
    }
    for (uint32_t b = threadIdx.x; b < 2 * WHOLE_BINS; b += blockDim.x)
        m->count[0][b] = 0;
}

/* The want-th largest of n different keys, by n_thread threads of which this is number i. */
static __device__ __noinline__ void whole_rank(const uint64_t *few, uint32_t n, uint32_t want,
                                               uint32_t i, uint32_t n_thread, uint64_t *out)
{
    for (; i < n; i += n_thread) {
        const uint64_t k     = few[i];
        uint32_t       above = 0;

#pragma unroll 2
        for (uint32_t u = 0; u < n; u++)
            above += few[u] > k;
        if (above + 1 == want)
            *out = k;
    }
}

/* Fetches all blocks' keys of a goal and counts them by the goal's next digit; i: number of this
 * thread of n_thread. */
static __device__ __forceinline__ void whole_gather(const whole_lane &l, whole_mem *m,
                                                    whole_over *o, uint32_t g, uint32_t i,
                                                    uint32_t n_thread)
{
    const uint64_t low   = m->goal[g].low;
    const uint32_t shift = whole_shift(m->goal[g]);

    for (; i < m->goal[g].n; i += n_thread) {
        uint32_t r = 0, before = 0;
        uint64_t k;

        for (; i >= m->first_few[g][r]; r++)
            before = m->first_few[g][r];
        k              = *sp_peer(&o->own[g][i - before], r);
        o->u.few[g][i] = k;
        atomicAdd(&m->count[g][(k - low) >> shift], 1);
    }
}

/* The goal's cut is among the gathered that have the digit; i and n_thread as above. */
static __device__ __forceinline__ void whole_tiny(whole_mem *m, whole_over *o, uint32_t g,
                                                  uint32_t i, uint32_t n_thread)
{
    const uint64_t low   = m->goal[g].low;
    const uint32_t shift = whole_shift(m->goal[g]);

    for (; i < m->goal[g].n; i += n_thread)
        if ((o->u.few[g][i] - low) >> shift == m->pick[g].bin)
            m->tiny[g][atomicAdd(&m->n_few[g], 1) % WHOLE_TINY] = o->u.few[g][i];
}

/* Both goals' cuts; all blocks have counted the first digits. */
static __device__ void whole_find(const whole_lane &l, whole_mem *m, whole_over *o)
{
    const uint32_t warp = threadIdx.x / WARP, n = blockDim.x / 2, g = threadIdx.x / n;
    const uint32_t i = threadIdx.x % n;
    bool           few;

    whole_sums(l.n_rank, m, o, 0);
    if (warp < 2 && m->goal[warp].want > 0)
        whole_narrow(l.n_rank, m, warp, 0, true);
    __syncthreads();
    while (m->goal[0].n > WHOLE_FEW || m->goal[1].n > WHOLE_FEW)
        whole_divide(l, m, o);
    whole_list(l, m, o);
    sp_cluster_sync(); /* 3 */
    whole_gather(l, m, o, g, i, n);
    __syncthreads();
    if (i < WARP && m->goal[g].n)
        whole_pick(m->count[g], true, m->goal[g].want, &m->pick[g]);
    if (i == WARP)
        m->n_few[g] = 0;
    __syncthreads();
    whole_tiny(m, o, g, i, n);
    __syncthreads();
    few = m->goal[g].n && m->pick[g].count <= WHOLE_TINY;
    whole_rank(few ? m->tiny[g] : o->u.few[g], few ? m->pick[g].count : m->goal[g].n,
               m->goal[g].want - (few ? m->pick[g].before : 0), i, n, &m->goal[g].cut);
    __syncthreads();
}

#endif /* of compute capability 9.0 */

#endif
