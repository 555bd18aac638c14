/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_whole.cuh - the stages of cuda_select_whole.cu up to the k-th best chunk.
 *
 * A thread has four neighbouring chunks at a time, which are read and written together. */
#ifndef KVD_CUDA_SELECT_WHOLE_CUH
#define KVD_CUDA_SELECT_WHOLE_CUH

#include "backend/cuda/cuda_select_fast.cuh"

#define WHOLE_WARPS  16u   /* of a block at most; half of them where two share a processor */
#define WHOLE_EACH   4u    /* chunks of a thread */
#define WHOLE_MOST   8192u /* of a block at most */
#define WHOLE_STEPS  (WHOLE_MOST / WHOLE_EACH / WARP) /* of its warps */
#define WHOLE_RANKS  16u                              /* blocks of a cluster at most */
#define WHOLE_GROUP  (2 * FAST_HEADS)
#define WHOLE_BINS   512u
#define WHOLE_PARTS  4u
#define WHOLE_FEW    512u /* keys of a cluster with the digit that is looked for, at most */
#define WHOLE_TINY   64u
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
    bool                  beside, window;
    bool                  over; /* slots lie where logits were */
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
    float       max[WHOLE_WARPS][WHOLE_GROUP], sum[WHOLE_WARPS][WHOLE_GROUP];
    float2      part[WHOLE_RANKS][WHOLE_GROUP]; /* by peers: largest logit and sum */
    float       top[WHOLE_GROUP];               /* largest logit of this block */
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

/* In place of the index blocks when they have been read. */
typedef struct whole_over {
    union {
        uint32_t sum[WHOLE_PARTS][WHOLE_BINS]; /* of the cluster's counts */
        struct {
            uint32_t before[WHOLE_MOST / WHOLE_EACH]; /* within the warp; see whole_pack() */
            uint16_t fate[WHOLE_MOST / WHOLE_EACH];   /* of four chunks, three bits each */
        } thread;
    } u;
    uint64_t own[2][WHOLE_FEW]; /* of this block; peers look */
    uint64_t few[2][WHOLE_FEW]; /* of all */
    uint16_t number[];          /* [2][each] slots, then averages */
} whole_over;

typedef struct whole_lane {
    uint32_t  index, head, rank, n_rank;
    uint32_t  block, end_block; /* this block's part of the lane's index blocks */
    uint32_t  first, base, n;   /* of the lane; its chunks: [base, base + n) */
    uint32_t  base0, each;      /* the first block's base; chunks of each block but the last */
    float    *logit;            /* [heads][each], then weights; row 0 holds keys later */
    uint32_t *key;              /* the same */
    uint64_t *slot;             /* the first block's: [slots] see cuda_select_window.cuh */
    uint32_t *miss;             /* likewise: [slots] chunks, in the order of fetch */
    uint16_t *slot_of, *ema;    /* copies */
} whole_lane;

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

static __device__ __forceinline__ uint64_t whole_key(uint32_t key, uint32_t chunk)
{
    return (uint64_t)key << WHOLE_CHUNKS | (KVD_SELECT_CHUNKS - 1 - chunk);
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

/* The largest of a warp's logits, for 4 heads. */
static __device__ __forceinline__ void whole_fold(whole_mem *m, const fast_head &h, uint32_t head0)
{
    const uint32_t lane = threadIdx.x % WARP;
    float          max  = h.max;

    for (uint32_t d = 4; d < WARP; d *= 2)
        max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, d));
    if (lane < FAST_HEADS)
        m->max[threadIdx.x / WARP][head0 + lane] = max;
}

/* All logits of this block's chunks, and each warp's largest. */
template <int ROWS, int SETS>
static __device__ void whole_scan(const whole_job &f, const whole_lane &l, whole_mem *m,
                                  uint8_t *stages)
{
    const select_job &j = f.j;
    const uint32_t    t = threadIdx.x % 4, warp = threadIdx.x / WARP;
    const float      *x = j.a.q + m->seq.row * j.a.q_stride + (uint64_t)l.head * j.group * j.s.dim;
    fast_query<ROWS>  q[SETS];
    fast_head         h[SETS];
    fast_walk         w;

    w.seq     = &m->seq;
    w.stage   = stages + warp * f.s.depth * f.s.stage;
    w.arrived = m->arrived[warp];
    w.step    = blockDim.x / WARP;
    w.end     = l.end_block;
    w.block   = l.block + warp;
    fast_begin(j, f.s, w);
#pragma unroll
    for (uint32_t s = 0; s < SETS; s++) {
        const uint32_t head0 = s * FAST_HEADS;

        fast_open<ROWS>(j, x + (uint64_t)head0 * j.s.dim, min(j.group - head0, FAST_HEADS), q[s]);
        h[s].row   = head0 + t < j.group ? l.logit + (uint64_t)(head0 + t) * f.each : NULL;
        h[s].first = l.first > l.base ? l.first - l.base : 0;
        h[s].end   = l.n;
        h[s].max   = FAST_NONE;
        h[s].sum   = 0.0f;
    }
#pragma unroll 1
    for (uint32_t n = 0; w.block + (uint64_t)n * w.step < w.end; n++) {
        const uint8_t *stage = fast_arrive(f.s, w, n);

#pragma unroll
        for (uint32_t s = 0; s < SETS; s++)
            fast_block<ROWS, false>(j, f.s, stage, q[s], (warp + n * w.step) * j.s.n_chunk, h[s]);
        fast_leave(f.s, w, n);
    }
#pragma unroll
    for (uint32_t s = 0; s < SETS; s++)
        whole_fold(m, h[s], s * FAST_HEADS);
}

/* One warp a head: the block's largest logit. */
static __device__ __forceinline__ void whole_top(const select_job &j, whole_mem *m)
{
    const uint32_t lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    const float    max = h < j.group && lane < blockDim.x / WARP ? m->max[lane][h] : FAST_NONE;
    const float    top = cuda_warp_max(max);

    if (h < j.group && lane == 0)
        m->top[h] = top;
}

/* Chunks at the ends that cannot be selected get no weight. */
static __device__ __forceinline__ void whole_ends(const whole_job &f, const whole_lane &l)
{
    const uint32_t first = min(l.first > l.base ? l.first - l.base : 0, l.n);
    const uint32_t all   = (l.n + WHOLE_EACH - 1) / WHOLE_EACH * WHOLE_EACH;

    for (uint32_t h = 0; h < f.j.group; h++) {
        float *row = l.logit + (uint64_t)h * f.each;

        for (uint32_t i = threadIdx.x; i < first; i += blockDim.x)
            row[i] = -INFINITY;
        if (l.n + threadIdx.x < all)
            row[l.n + threadIdx.x] = -INFINITY;
    }
}

/* Logits become weights against the block's largest; sums of each warp. */
static __device__ void whole_weights(const whole_job &f, const whole_lane &l, whole_mem *m)
{
#pragma unroll 1
    for (uint32_t h = 0; h < f.j.group; h++) {
        float      *row = l.logit + (uint64_t)h * f.each, sum = 0.0f;
        const float top = m->top[h];

#pragma unroll 1
        for (uint32_t i = WHOLE_EACH * threadIdx.x; i < l.n; i += WHOLE_EACH * blockDim.x) {
            float4 v = *(const float4 *)(row + i);

            v.x = __expf(v.x - top);
            v.y = __expf(v.y - top);
            v.z = __expf(v.z - top);
            v.w = __expf(v.w - top);
            sum += (v.x + v.y) + (v.z + v.w);
            *(float4 *)(row + i) = v;
        }
        sum = cuda_warp_sum(sum);
        if (threadIdx.x % WARP == 0)
            m->sum[threadIdx.x / WARP][h] = sum;
    }
}

/* Gives all blocks this one's largest and sums; one warp a head, a lane a peer. */
static __device__ __forceinline__ void whole_tell(const select_job &j, const whole_lane &l,
                                                  whole_mem *m)
{
    const uint32_t lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    const float    mine = h < j.group && lane < blockDim.x / WARP ? m->sum[lane][h] : 0.0f;
    const float    sum  = cuda_warp_sum(mine);

    if (h < j.group && lane < l.n_rank)
        *sp_peer(&m->part[l.rank][h], lane) = make_float2(m->top[h], sum);
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

/* Factors that make weights probabilities; one warp a head. */
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
    max = fmaxf(cuda_warp_max(x.x), lse);
    sum = cuda_warp_sum(x.y * __expf(x.x - max));
    if (lse > -INFINITY)
        kept = __expf(lse - max);
    sum += kept;
    if (lane == 0) {
        m->factor[h] =
            __fdividef(__expf(m->top[h] - max) * (j.a.rule == KVD_GQA_MAX_KEPT ? 1.0f : share),
                       sum);
        m->kept[h] = sum > 0.0f ? __fdividef(kept, sum) * share : 0.0f;
    }
}

/* Scores of the four chunks from number i on. */
static __device__ __forceinline__ void whole_four(const whole_job &f, const whole_lane &l,
                                                  const whole_mem *m, uint32_t i, float (&x)[4])
{
    const bool largest = f.j.a.rule == KVD_GQA_MAX_KEPT;

    x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll 1
    for (uint32_t h = 0; h < f.j.group; h++) {
        const float  factor = m->factor[h];
        const float4 v      = *(const float4 *)(l.logit + (uint64_t)h * f.each + i);
        const float  p[4]   = { v.x * factor, v.y * factor, v.z * factor, v.w * factor };

#pragma unroll
        for (uint32_t e = 0; e < 4; e++)
            x[e] = !largest ? x[e] + p[e] : p[e] > x[e] ? p[e] : x[e];
    }
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
        x[e] = x[e] > 0.0f ? x[e] : 0.0f; /* NaN too */
        x[e] = x[e] < 1.0f ? x[e] : 1.0f;
    }
}

/* Those of four scores and averages that count, one by one. */
static __device__ __noinline__ void whole_store_some(uint32_t skip, uint32_t n, float4 x,
                                                     const uint16_t *from, float *score,
                                                     uint16_t *ema)
{
    const float v[4] = { x.x, x.y, x.z, x.w };

#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
        if (e < skip || e >= n)
            continue;
        score[e] = v[e];
        if (ema)
            ema[e] = from[e];
    }
}

/* Four scores and averages to where they belong; score and ema: of number 0. */
static __device__ __forceinline__ void whole_store(const select_job &j, const whole_lane &l,
                                                   uint32_t i, float4 x, float *score,
                                                   uint16_t *ema)
{
    const bool all = l.base + i >= l.first && i + 4 <= l.n && ((uint64_t)(score + i) & 15) == 0 &&
                     ((uint64_t)(ema + i) & 7) == 0;

    if (ema) {
        ushort4 e = *(const ushort4 *)(l.ema + i);

        e.x                     = select_ema(e.x, x.x, j.a.alpha);
        e.y                     = select_ema(e.y, x.y, j.a.alpha);
        e.z                     = select_ema(e.z, x.z, j.a.alpha);
        e.w                     = select_ema(e.w, x.w, j.a.alpha);
        *(ushort4 *)(l.ema + i) = e;
        if (all)
            *(ushort4 *)(ema + i) = e;
    }
    if (all)
        *(float4 *)(score + i) = x;
    else
        whole_store_some(l.first > l.base + i ? l.first - (l.base + i) : 0, l.n - i, x, l.ema + i,
                         score + i, ema ? ema + i : NULL);
}

/* Scores, averages, keys, and the keys' first digits counted. */
static __device__ void whole_scores(const whole_job &f, const whole_lane &l, whole_mem *m)
{
    float    *score = m->seq.score + l.head * f.j.a.lane_stride;
    uint16_t *ema   = m->seq.ema ? m->seq.ema + l.head * f.j.a.lane_stride + l.base : NULL;
    uint32_t *count = m->count[threadIdx.x / WARP % 2];

    for (uint32_t c = l.rank * blockDim.x + threadIdx.x; c < l.first; c += l.n_rank * blockDim.x)
        score[c] = 0.0f;
#pragma unroll 1
    for (uint32_t i = WHOLE_EACH * threadIdx.x; i < l.n; i += WHOLE_EACH * blockDim.x) {
        float    x[4];
        uint32_t k[4];

        whole_four(f, l, m, i, x);
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            k[e] = l.base + i + e < l.first || i + e >= l.n ? 0 : __float_as_uint(x[e]) + 1;
            if (k[e])
                atomicAdd(&count[whole_digit(k[e])], 1);
        }
        *(uint4 *)(l.key + i) = make_uint4(k[0], k[1], k[2], k[3]);
        whole_store(f.j, l, i, make_float4(x[0], x[1], x[2], x[3]), score + l.base, ema);
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
        const uint64_t k = whole_key(l.key[i], l.base + i);

        for (uint32_t a = 0; a < 2 && l.key[i]; a++)
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
    for (uint32_t i = threadIdx.x; i < l.n; i += blockDim.x) {
        const uint32_t key = l.key[i];
        const uint64_t k   = whole_key(key, l.base + i);

#pragma unroll
        for (uint32_t g = 0; g < 2; g++)
            if (key >= least[g] && key <= most[g] && k >= low[g] && k < high[g])
                o->own[g][atomicAdd(&m->n_few[g], 1)] = k;
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
        k            = *sp_peer(&o->own[g][i - before], r);
        o->few[g][i] = k;
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
        if ((o->few[g][i] - low) >> shift == m->pick[g].bin)
            m->tiny[g][atomicAdd(&m->n_few[g], 1) % WHOLE_TINY] = o->few[g][i];
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
    whole_rank(few ? m->tiny[g] : o->few[g], few ? m->pick[g].count : m->goal[g].n,
               m->goal[g].want - (few ? m->pick[g].before : 0), i, n, &m->goal[g].cut);
    __syncthreads();
}

#endif /* of compute capability 9.0 */

#endif
