/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_whole.cuh - the stages of cuda_select_whole.cu up to chunks' scores.
 *
 * A thread has four neighbouring chunks (a quad) at a time, which are read and written together.
 * All that is known of them is one record of 32 bytes (64 for more than 4 heads): first their
 * weights, four of a head side by side, as binary16 against a scale of 32 chunks, which is kept
 * beside; then keys and whole_rest, and in place of the scales an upper bound of each quad's keys.
 * So shared memory holds many chunks, and a rounded weight is 2^-12 off.  A record's pieces of 16
 * bytes are swapped such that eight threads with eight records in a row use all banks. */
#ifndef KVD_CUDA_SELECT_WHOLE_CUH
#define KVD_CUDA_SELECT_WHOLE_CUH

#include "backend/cuda/cuda_select_fast.cuh"

#define WHOLE_WARPS  16u    /* of a block at most; half of them where two share a processor */
#define WHOLE_EACH   4u     /* chunks of a thread */
#define WHOLE_MOST   16384u /* of a block at most */
#define WHOLE_RANKS  16u    /* blocks of a cluster at most */
#define WHOLE_GROUP  FAST_HEADS
#define WHOLE_BINS   512u
#define WHOLE_PARTS  4u
#define WHOLE_FEW    512u /* keys of a cluster with the digit that is looked for, at most */
#define WHOLE_TINY   64u
#define WHOLE_RUN    CPU_INDEX_GROUP /* chunks whose weights have a scale in common */
#define WHOLE_ONE    7.0f            /* log2 of the largest weight when a scale is chosen, */
#define WHOLE_LIMIT  15.0f           /* and of one that does with it */
#define WHOLE_LOG2E  1.4426950408889634f
#define WHOLE_EASY   256u /* keys that are ranked by comparing each with all */
#define WHOLE_CHUNKS 26u  /* bits of a chunk's number */
#define WHOLE_SHIFT  19u  /* of a key to its digit */
#define WHOLE_DIGIT  (WHOLE_SHIFT + WHOLE_CHUNKS)
#define WHOLE_BASE   (0x7f0u - (WHOLE_BINS - 1)) /* a score of 1 has the last digit */

static_assert(1u << WHOLE_CHUNKS == KVD_SELECT_CHUNKS, "a chunk's number fits");

/* What blocks send each other, and which barrier of whole_mem counts it. */
enum whole_meeting {
    WHOLE_SUMS,
    WHOLE_COUNTS,
    WHOLE_KEYS,
    WHOLE_URGENT,
    WHOLE_SHARES,
    WHOLE_MEETINGS
};

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
typedef struct alignas(16) whole_count {
    uint32_t n_sel, n_urgent, n_bulk; /* urgent and bulk: of the misses */
    uint32_t n_out;                   /* chunks of the window that are not selected */
    uint64_t mass;
} whole_count;

typedef struct whole_mem {
    kvd_select_seq   seq;
    kvd_window_seq   window;
    kvd_window_place place;
    uint32_t         cap;
    uint64_t         at; /* where slots begin */
    uint64_t         arrived[WHOLE_WARPS][2];
    uint64_t         come[WHOLE_MEETINGS];     /* what peers send has come */
    alignas(16) uint32_t hist[2][WHOLE_BINS];  /* [goal] of this block; peers look */
    alignas(16) uint32_t count[2][WHOLE_BINS]; /* [goal], or of odd and even warps */
    alignas(
        16) uint32_t out[WHOLE_BINS]; /* the first block's: by peers, slots that may go by digit */
    float2      warp[WHOLE_WARPS][WHOLE_GROUP]; /* scale and sum */
    float2      part[WHOLE_RANKS][WHOLE_GROUP]; /* by peers: the same of a block */
    float       top[WHOLE_GROUP];               /* scale of the lane's weights */
    float       factor[WHOLE_GROUP], kept[WHOLE_GROUP];
    whole_goal  goal[2];                /* the selected, the urgent */
    uint32_t    first_few[2], n_few[2]; /* of a goal: what blocks before this one have; its own */
    sp_pick     pick[2];
    uint64_t    tiny[2][WHOLE_TINY];
    uint32_t    n[3][WHOLE_WARPS]; /* of a warp: selected, urgent misses, other misses */
    uint64_t    mass[WHOLE_WARPS];
    uint32_t    n_out[WHOLE_WARPS];
    whole_count block[WHOLE_RANKS]; /* by peers */
    uint64_t    last;
    uint32_t    list[WARP + 1];
} whole_mem;

/* In place of the index blocks when they have been read.  Behind it the first block has slots and
 * misses. */
typedef struct whole_over {
    uint64_t few[2][WHOLE_FEW]; /* by peers: their keys of the digit that is looked for */
    union {
        uint16_t all[WHOLE_RANKS][WHOLE_BINS]; /* by peers: what they have counted */
        uint32_t sum[WHOLE_PARTS][WHOLE_BINS]; /* later, of the cluster's counts */
        uint64_t own[2][WHOLE_FEW];            /* later, this block's keys of the digit */
    } u;
} whole_over;

/* The second piece of a quad's record from its scores on; the first are its keys. */
typedef struct whole_rest {
    union {
        uint16_t slot_of[WHOLE_EACH];
        struct {             /* when slots are no longer needed */
            uint32_t before; /* in the warp's step; see whole_pack() */
            uint32_t fate;   /* FATE_BITS each */
        } sel;
    } u;
    uint16_t ema[WHOLE_EACH];
} whole_rest;

/* Bytes of a quad's record. */
static __host__ __device__ __forceinline__ uint32_t whole_quad_bytes(bool wide)
{
    return wide ? 64 : 32;
}

typedef struct whole_lane {
    uint32_t  index, head, rank, n_rank;
    uint32_t  block, end_block; /* this block's part of the lane's index blocks */
    uint32_t  first, base, n;   /* of the lane; its chunks: [base, base + n) */
    uint32_t  base0, each;      /* the first block's base; chunks of each block but the last */
    uint8_t  *mem;              /* records */
    bool      wide;             /* for more than FAST_NARROW heads */
    float    *scale;            /* log2 of what weights are against, [runs][heads] */
    uint16_t *near_;            /* quads that may be selected, a part for each warp */
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

/* A piece of a quad's record. */
static __device__ __forceinline__ uint8_t *whole_piece(const whole_lane &l, bool wide,
                                                       uint32_t quad, uint32_t piece)
{
    const uint32_t at = wide ? piece ^ (quad >> 1 & 3) : piece ^ ((quad >> 2 ^ quad >> 3) & 1);

    return l.mem + (quad << (wide ? 6 : 5)) + 16 * at;
}

static __device__ __forceinline__ uint32_t *whole_keys(const whole_lane &l, uint32_t quad)
{
    return (uint32_t *)whole_piece(l, l.wide, quad, 0);
}

static __device__ __forceinline__ whole_rest *whole_more(const whole_lane &l, uint32_t quad)
{
    return (whole_rest *)whole_piece(l, l.wide, quad, 1);
}

/* Where the scales of a quad's run are, and later its bound: the high half of its largest key. */
static __device__ __forceinline__ float *whole_scales(const whole_lane &l, bool wide, uint32_t quad)
{
    return l.scale + quad / (WHOLE_RUN / WHOLE_EACH) * (wide ? FAST_HEADS : FAST_NARROW);
}

static __device__ __forceinline__ uint16_t *whole_bound(const whole_lane &l, bool wide,
                                                        uint32_t quad)
{
    return (uint16_t *)whole_scales(l, wide, quad) + quad % (WHOLE_RUN / WHOLE_EACH);
}

static __device__ __forceinline__ uint32_t whole_digit(uint32_t key)
{
    const uint32_t d = key >> WHOLE_SHIFT;

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

/* Sums of weights, each with the log2 of its scale, at one that does for both. */
static __device__ __forceinline__ float2 whole_merge(float2 a, float2 b)
{
    const float most = fmaxf(a.x, b.x);

    return make_float2(most, a.y * whole_exp(a.x - most) + b.y * whole_exp(b.x - most));
}

/* What a thread has of its two heads: log2 of the scale and sum so far; limit: log2 of the largest
 * weight that does with it (-INFINITY: it is 0 until there is a weight). */
typedef struct whole_sum {
    float scale[2], sum[2], limit[2];
} whole_sum;

/* A new scale, where one of the warp's weights is too large for its: rare after the first. */
static __device__ __forceinline__ void whole_rescale(const float (&most)[2], whole_sum &s,
                                                     fast_four &f)
{
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const float largest = whole_over_chunks(most[k]), by = largest - WHOLE_ONE;

        if (!(largest > s.limit[k]))
            continue;
        s.sum[k]   = s.sum[k] > 0.0f ? s.sum[k] * whole_exp(-by) : 0.0f;
        s.scale[k] = s.scale[k] + by;
        s.limit[k] = WHOLE_LIMIT;
#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            f.v[k][e] -= by;
    }
}

/* A thread's four chunks from i on, whose two heads have logits less the log2 of the scale: their
 * weights. */
template <bool WIDE>
static __device__ __forceinline__ void whole_weigh(const whole_lane &l, uint32_t i, bool real,
                                                   fast_four &f, whole_sum &s)
{
    uint32_t bits[2][2];
    float    most[2];

#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
        most[k] = fmaxf(fmaxf(f.v[k][0], f.v[k][1]), fmaxf(f.v[k][2], f.v[k][3]));
    if (__any_sync(ALL_LANES, most[0] > s.limit[0] || most[1] > s.limit[1]))
        whole_rescale(most, s, f);
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        float p[4];

#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            p[e] = whole_exp(f.v[k][e]);
        s.sum[k] += (p[0] + p[1]) + (p[2] + p[3]);
        bits[k][0] = whole_halves(p[0], p[1]);
        bits[k][1] = whole_halves(p[2], p[3]);
    }
    if (!real)
        return;
    *(uint4 *)whole_piece(l, WIDE, i / WHOLE_EACH, fast_head0<WIDE>() / 2) =
        make_uint4(bits[0][0], bits[0][1], bits[1][0], bits[1][1]);
    if (threadIdx.x % WARP < 4)
        *(float2 *)(whole_scales(l, WIDE, i / WHOLE_EACH) + fast_head0<WIDE>()) =
            make_float2(s.scale[0], s.scale[1]);
}

/* A warp's scales and sums. */
template <bool WIDE>
static __device__ __forceinline__ void whole_fold(whole_mem *m, const whole_sum &s)
{
    const uint32_t lane = threadIdx.x % WARP;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const bool none = s.limit[k] == -INFINITY;
        float2     x    = make_float2(none ? FAST_NONE : s.scale[k], s.sum[k]);

        for (uint32_t d = 4; d < WARP; d *= 2)
            x.y += __shfl_xor_sync(ALL_LANES, x.y, d); /* of one scale */
        if (!WIDE)
            x = whole_merge(x, make_float2(__shfl_xor_sync(ALL_LANES, x.x, 2),
                                           __shfl_xor_sync(ALL_LANES, x.y, 2)));
        if (lane < (WIDE ? 4 : 2))
            m->warp[threadIdx.x / WARP][fast_head0<WIDE>() + k] = x;
    }
}

/* All weights of this block's chunks, and each warp's scales and sums. */
template <int ROWS, bool WIDE>
static __device__ void whole_scan(const whole_job &f, const whole_lane &l, whole_mem *m,
                                  uint8_t *stages)
{
    const select_job &j    = f.j;
    const uint32_t    half = fast_half<WIDE>(), warp = threadIdx.x / WARP;
    const uint32_t    first = l.first > l.base ? l.first - l.base : 0;
    const uint32_t    end   = half < f.s.n_group ? l.n : 0;
    const fast_spot   at    = fast_find<ROWS, WIDE>(j, f.s);
    const float       more  = j.log_tokens * WHOLE_LOG2E;
    const float *at_q = j.a.q + m->seq.row * j.a.q_stride + (uint64_t)l.head * j.group * j.s.dim;
    whole_sum    s    = { { 0.0f, 0.0f }, { 0.0f, 0.0f }, { -INFINITY, -INFINITY } };
    fast_query<ROWS> q;
    fast_walk        w;
    float            x[ROWS][8];

    w.seq     = &m->seq;
    w.stage   = stages + warp * f.s.depth * f.s.stage;
    w.arrived = m->arrived[warp];
    w.step    = blockDim.x / WARP;
    w.end     = l.end_block;
    w.block   = l.block + warp;
    fast_aim(j, w);
    fast_read<ROWS, WIDE>(at_q, j.group, x);
    fast_begin(f.s, w);
    fast_open<ROWS, WIDE>(x, j.a.scale * WHOLE_LOG2E, q);
#pragma unroll 1
    for (uint32_t n = 0; w.block + (uint64_t)n * w.step < w.end; n++) {
        const uint8_t *stage  = fast_arrive(f.s, w, n);
        const uint32_t i      = (warp + n * w.step) * j.s.n_chunk + threadIdx.x % WARP / 4 * 4;
        const uint32_t mine   = i + half * WHOLE_RUN;
        const float    add[2] = { more - s.scale[0], more - s.scale[1] };
        fast_four      v[WIDE ? 2 : 1];
        fast_raw<WIDE> r;

        fast_block<ROWS, WIDE>(at, stage, q, r);
        fast_leave(f.s, w, n);
        fast_close<ROWS, WIDE>(at, q, r, add, v);
        fast_ends(v[0], mine, first, end);
        whole_weigh<WIDE>(l, mine, half < f.s.n_group, v[0], s);
        if (WIDE && f.s.n_group > 1) {
            const float was[2] = { more - add[0], more - add[1] };

            for (uint32_t e = 0; e < 8; e++) /* the scale may have changed */
                v[WIDE].v[e / 4][e % 4] += was[e / 4] - s.scale[e / 4];
            fast_ends(v[WIDE], i + WHOLE_RUN, first, l.n);
            whole_weigh<WIDE>(l, i + WHOLE_RUN, true, v[WIDE], s);
        }
    }
    whole_fold<WIDE>(m, s);
}

/* Two threads' barriers for what peers are going to send. */
static __device__ __forceinline__ void whole_await(const select_job &j, const whole_lane &l,
                                                   whole_mem *m)
{
    const uint32_t bytes[WHOLE_MEETINGS] = { (uint32_t)sizeof(float2) * j.group * l.n_rank,
                                             (uint32_t)sizeof(uint16_t) * WHOLE_BINS * l.n_rank, 0,
                                             0, (uint32_t)sizeof(whole_count) * l.n_rank };

    if (threadIdx.x != 0)
        return;
#pragma unroll
    for (uint32_t i = 0; i < WHOLE_MEETINGS; i++)
        bar_init(&m->come[i], 1);
    bar_fence();
#pragma unroll
    for (uint32_t i = 0; i < WHOLE_MEETINGS; i++)
        if (bytes[i])
            bar_expect(&m->come[i], bytes[i]);
}

/* Gives all blocks this one's scales and sums; one warp a head, a lane a peer. */
static __device__ __forceinline__ void whole_tell(const select_job &j, const whole_lane &l,
                                                  whole_mem *m)
{
    const uint32_t lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    const bool     mine = h < j.group && lane < blockDim.x / WARP;
    const float2   x    = mine ? m->warp[lane][h] : make_float2(FAST_NONE, 0.0f);
    const float    top  = cuda_warp_max(x.x);
    const float    sum  = cuda_warp_sum(x.y * whole_exp(x.x - top));

    if (h < j.group && lane < l.n_rank)
        bar_send2(bar_peer(&m->part[l.rank][h], lane), bar_peer(&m->come[WHOLE_SUMS], lane),
                  __float_as_uint(top), __float_as_uint(sum));
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

    if (h >= j.group) {
        if (h < WHOLE_GROUP && lane == 0)
            m->top[h] = m->factor[h] = 0.0f;
        return;
    }
    bar_come(&m->come[WHOLE_SUMS]);
    if (lane < l.n_rank)
        x = m->part[lane][h];
    lse *= WHOLE_LOG2E;
    max = fmaxf(cuda_warp_max(x.x), lse);
    sum = cuda_warp_sum(x.y * whole_exp(x.x - max));
    if (lse > -INFINITY)
        kept = whole_exp(lse - max);
    sum += kept;
    if (lane == 0) {
        m->top[h]    = max;
        m->factor[h] = __fdividef(j.a.rule == KVD_GQA_MAX_KEPT ? 1.0f : share, sum);
        m->kept[h]   = sum > 0.0f ? __fdividef(kept, sum) * share : 0.0f;
    }
}

/* One head's part of four scores; MOST: of their largest. */
template <bool MOST>
static __device__ __forceinline__ void whole_head(uint32_t w0, uint32_t w1, float by, float (&x)[4])
{
    const float2 a = whole_floats(w0), b = whole_floats(w1);
    const float  w[4] = { a.x, a.y, b.x, b.y };

#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        x[e] = MOST ? fmaxf(x[e], w[e] * by) : x[e] + w[e] * by;
}

/* What makes weights scores, of all heads. */
template <bool WIDE> struct whole_by {
    float top[WIDE ? FAST_HEADS : FAST_NARROW], factor[WIDE ? FAST_HEADS : FAST_NARROW];
};

/* Scores of a quad; NaN becomes 0. */
template <bool WIDE, bool MOST>
static __device__ __forceinline__ void whole_four(const whole_lane &l, const whole_by<WIDE> &by,
                                                  uint32_t quad, float (&x)[4])
{
    const float *own = whole_scales(l, WIDE, quad);

    x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll
    for (uint32_t h = 0; h < (WIDE ? FAST_HEADS : FAST_NARROW); h += 2) {
        const uint4  w = *(const uint4 *)whole_piece(l, WIDE, quad, h / 2);
        const float2 s = *(const float2 *)(own + h);

        whole_head<MOST>(w.x, w.y, whole_exp(s.x - by.top[h]) * by.factor[h], x);
        whole_head<MOST>(w.z, w.w, whole_exp(s.y - by.top[h + 1]) * by.factor[h + 1], x);
    }
#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        x[e] = __saturatef(x[e]);
}

/* Four numbers, of which n are there, from p (NULL: none) on; the others are 0. */
static __device__ __noinline__ uint2 whole_load_some(const uint16_t *p, uint32_t n)
{
    uint32_t v[4];

#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        v[e] = p && e < n ? p[e] : 0;
    return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}

/* What memory has of a block's chunks. */
typedef struct whole_far {
    float    *score;
    uint16_t *ema, *slot_of; /* NULL: not wanted */
    bool      wide;          /* four of each may be read and written at once */
} whole_far;

static __device__ __forceinline__ whole_far whole_memory(const whole_job &f, const whole_lane &l,
                                                         const whole_mem *m)
{
    const uint64_t at = (uint64_t)l.head * f.j.a.lane_stride + l.base;
    whole_far      x;

    x.score   = m->seq.score + at;
    x.ema     = m->seq.ema ? m->seq.ema + at : NULL;
    x.slot_of = f.window ? m->window.slot_of + l.head * f.change.lane_stride + l.base : NULL;
    x.wide    = ((uint64_t)x.score & 15) == 0 && (((uint64_t)x.ema | (uint64_t)x.slot_of) & 7) == 0;
    return x;
}

/* Averages and slots of four chunks. */
typedef struct whole_had {
    uint2 ema, slot_of;
} whole_had;

static __device__ __forceinline__ whole_had whole_known(const whole_far &x, uint32_t i, uint32_t n)
{
    whole_had h = {};

    if (x.wide && i + 4 <= n) {
        if (x.ema)
            h.ema = *(const uint2 *)(x.ema + i);
        if (x.slot_of)
            h.slot_of = *(const uint2 *)(x.slot_of + i);
    } else if (i < n) {
        h.ema     = whole_load_some(x.ema ? x.ema + i : NULL, n - i);
        h.slot_of = whole_load_some(x.slot_of ? x.slot_of + i : NULL, n - i);
    }
    return h;
}

/* Those of four scores and averages that count, one by one. */
static __device__ __noinline__ void whole_store_some(uint32_t skip, uint32_t n, float4 x, uint2 e,
                                                     float *score, uint16_t *ema)
{
    const float    v[4] = { x.x, x.y, x.z, x.w };
    const uint32_t a[4] = { e.x, e.x >> 16, e.y, e.y >> 16 };

#pragma unroll
    for (uint32_t u = 0; u < 4; u++) {
        if (u < skip || u >= n)
            continue;
        score[u] = v[u];
        if (ema)
            ema[u] = (uint16_t)a[u];
    }
}

/* Two averages with two scores. */
static __device__ __forceinline__ uint32_t whole_ema(uint32_t e, float x, float y, float keep,
                                                     float add)
{
    const float2 a = whole_floats(e);

    return whole_halves(__fadd_rn(__fmul_rn(a.x, keep), __fmul_rn(x, add)),
                        __fadd_rn(__fmul_rn(a.y, keep), __fmul_rn(y, add)));
}

/* Scores of a quad from i on, of which [skip, n) can be selected, to memory; their keys, counted.
 */
static __device__ __forceinline__ uint4 whole_put4(const whole_far &to, uint32_t i, uint32_t skip,
                                                   uint32_t n, const float (&x)[4], uint2 e,
                                                   uint32_t *count)
{
    const bool all = skip == 0 && n >= 4;
    uint32_t   k[4];

#pragma unroll
    for (uint32_t u = 0; u < 4; u++) {
        k[u] = all || (u >= skip && u < n) ? __float_as_uint(x[u]) + 1 : 0;
        if (all || k[u])
            atomicAdd(&count[whole_digit(k[u])], 1);
    }
    if (all && to.wide) {
        *(float4 *)(to.score + i) = make_float4(x[0], x[1], x[2], x[3]);
        if (to.ema)
            *(uint2 *)(to.ema + i) = e;
    } else {
        whole_store_some(skip, n, make_float4(x[0], x[1], x[2], x[3]), e, to.score + i,
                         to.ema ? to.ema + i : NULL);
    }
    return make_uint4(k[0], k[1], k[2], k[3]);
}

/* Scores, averages, keys, and the keys' first digits counted; had: of the thread's first chunks. */
template <bool WIDE, bool MOST>
static __device__ __forceinline__ void whole_scores(const whole_job &f, const whole_lane &l,
                                                    whole_mem *m, const whole_far &far,
                                                    whole_had had)
{
    const uint32_t first = l.first > l.base ? l.first - l.base : 0;
    const float    keep  = __fsub_rn(1.0f, f.j.a.alpha);
    const float    add   = __fmul_rn(f.j.a.alpha, KVD_EMA_SCALE);
    uint32_t      *count = m->count[threadIdx.x / WARP % 2];
    whole_by<WIDE> by;

#pragma unroll
    for (uint32_t h = 0; h < (WIDE ? FAST_HEADS : FAST_NARROW); h++) {
        by.top[h]    = m->top[h];
        by.factor[h] = m->factor[h];
    }
#pragma unroll 1
    for (uint32_t i0 = WHOLE_EACH * (threadIdx.x - threadIdx.x % WARP); i0 < l.n;
         i0 += WHOLE_EACH * blockDim.x) {
        const uint32_t  i    = i0 + WHOLE_EACH * (threadIdx.x % WARP);
        const uint32_t  quad = (i < l.n ? i : i0) / WHOLE_EACH;
        const whole_had now  = had;
        float           x[4];

        had = whole_known(far, i + WHOLE_EACH * blockDim.x, l.n);
        whole_four<WIDE, MOST>(l, by, quad, x);
        __syncwarp(); /* all have read their run's scales */
        if (i < l.n) {
            const uint2 e = make_uint2(whole_ema(now.ema.x, x[0], x[1], keep, add),
                                       whole_ema(now.ema.y, x[2], x[3], keep, add));
            const uint4 k = whole_put4(far, i, first > i ? first - i : 0, l.n - i, x, e, count);

            *(uint4 *)whole_piece(l, WIDE, quad, 0) = k;
            *(uint4 *)whole_piece(l, WIDE, quad, 1) =
                make_uint4(now.slot_of.x, now.slot_of.y, e.x, e.y);
            *whole_bound(l, WIDE, quad) = (uint16_t)(max(max(k.x, k.y), max(k.z, k.w)) >> 16);
        }
    }
}

template <bool WIDE>
static __device__ __forceinline__ void whole_score(const whole_job &f, const whole_lane &l,
                                                   whole_mem *m, const whole_far &far,
                                                   const whole_had &had)
{
    float *score = m->seq.score + l.head * f.j.a.lane_stride;

    for (uint32_t c = l.rank * blockDim.x + threadIdx.x; c < min(l.first, m->seq.n_chunk);
         c += l.n_rank * blockDim.x)
        score[c] = 0.0f;
    if (f.j.a.rule == KVD_GQA_MAX_KEPT)
        whole_scores<WIDE, true>(f, l, m, far, had);
    else
        whole_scores<WIDE, false>(f, l, m, far, had);
}

/* Gives all blocks this one's counts; 8 digits a thread. */
static __device__ __forceinline__ void whole_give(const whole_lane &l, whole_mem *m, whole_over *o)
{
    const uint32_t each = WHOLE_BINS / 8, b = threadIdx.x % each * 8;
    const uint4    x0 = *(const uint4 *)&m->count[0][b], x1 = *(const uint4 *)&m->count[0][b + 4];
    const uint4    y0 = *(const uint4 *)&m->count[1][b], y1 = *(const uint4 *)&m->count[1][b + 4];
    const uint4    v =
        make_uint4((x0.x + y0.x) | (x0.y + y0.y) << 16, (x0.z + y0.z) | (x0.w + y0.w) << 16,
                   (x1.x + y1.x) | (x1.y + y1.y) << 16, (x1.z + y1.z) | (x1.w + y1.w) << 16);

    for (uint32_t r = threadIdx.x / each; r < l.n_rank; r += blockDim.x / each)
        bar_send4(bar_peer(&o->u.all[l.rank][b], r), bar_peer(&m->come[WHOLE_COUNTS], r), v);
}

#endif /* of compute capability 9.0 */

#endif
