/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_finish.cu - from logits to the selection: scores, averages, the best; and, where that
 * is asked for, the window's change and its spans.
 *
 * A lane is the work of a cluster of blocks, each with a run of its chunks.  A chunk's key is its
 * score's bits + 1 (0: cannot be selected), which sorts as the score does.  The k-th largest key is
 * found digit by digit: each block counts its keys by digit (the first one while it makes the
 * scores), all add up the others' counts through distributed shared memory and so come to the same
 * digit.  Two goals go side by side: the selected and the urgent.  Keys that do not fit into shared
 * memory are read again from the scores.  The window is the first block's, when the others are
 * through.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select.cuh"

#include <stddef.h>

#define FINISH_THREADS 512u
#define FINISH_WARPS   (FINISH_THREADS / WARP)
#define FINISH_CLUSTER 8u    /* blocks of a lane at most */
#define FINISH_KEYS    8192u /* of a block, in shared memory */
#define FINISH_EACH    4u    /* neighbouring chunks of a thread */
#define DIGIT          10u
#define BINS           (1u << DIGIT)
#define LEVELS         3u /* a key has 30 bits */
#define GOAL_THREADS   (FINISH_THREADS / 2)
#define GOAL_WARPS     (GOAL_THREADS / WARP)

static_assert(GOAL_THREADS * 4 == BINS, "a thread looks at four bins of its goal");

typedef struct finish_mem {
    uint32_t key[FINISH_KEYS];
    uint32_t hist[LEVELS][2][BINS]; /* [goal] of this block; of the first level for both */
    sp_pick  pick[2];
    uint64_t scan[3][FINISH_WARPS];
    uint64_t count[3]; /* of this block, for its peers */
    float    most[SELECT_GROUP_MAX], factor[SELECT_GROUP_MAX];
    float    kept[SELECT_GROUP_MAX];
    uint64_t mass[LEVELS][BINS]; /* last: not there unless top_p is */
} finish_mem;

typedef struct finish_lane {
    const kvd_select_seq *q;
    uint32_t              index, head, rank, n_rank;
    uint32_t              first, n, end; /* chunks of this block: [first, end), n of them; first a
                                            multiple of 4, so that some may not be selected */
    float         *score;
    uint16_t      *ema;
    const uint8_t *listed; /* NULL: all may be selected */
    bool           rerank, by_mass;
} finish_lane;

/* What is looked for: keys from `from` on, and the first `ties` of those equal to `tie`. */
typedef struct finish_goal {
    uint32_t want, prefix; /* still so many, among the keys with this prefix */
    uint64_t target;       /* 0: none; of mass, likewise */
    uint32_t from, tie, ties;
    bool     done;
} finish_goal;

/* One number of each block, added up over the first n of the cluster: a lane reads a block's. */
static __device__ __forceinline__ uint64_t finish_add(const uint64_t *at, uint32_t n)
{
    const uint32_t lane = threadIdx.x % WARP;
    uint64_t       x    = lane < n ? *sp_peer(at, lane) : 0;

    for (uint32_t d = FINISH_CLUSTER / 2; d; d /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, d);
    return __shfl_sync(ALL_LANES, x, 0);
}

/* Sums of three numbers over the threads before this one, and over all. */
static __device__ void finish_scan(uint64_t (&x)[3], uint64_t (&all)[3],
                                   uint64_t (*mem)[FINISH_WARPS])
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

#pragma unroll
    for (uint32_t k = 0; k < 3; k++) {
        const uint64_t mine = x[k];

        for (uint32_t d = 1; d < WARP; d *= 2) {
            const uint64_t y = __shfl_up_sync(ALL_LANES, x[k], d);

            x[k] += lane >= d ? y : 0;
        }
        if (lane == WARP - 1)
            mem[k][warp] = x[k];
        x[k] -= mine;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < 3; k++) {
        const uint64_t mine = lane < FINISH_WARPS ? mem[k][lane] : 0;
        uint64_t       sum  = mine;

        for (uint32_t d = 1; d < FINISH_WARPS; d *= 2) {
            const uint64_t y = __shfl_up_sync(ALL_LANES, sum, d);

            sum += lane >= d ? y : 0;
        }
        all[k] = __shfl_sync(ALL_LANES, sum, FINISH_WARPS - 1);
        x[k] += __shfl_sync(ALL_LANES, sum - mine, warp);
    }
}

/* ---- scores ------------------------------------------------------------------------ */

/* Factors that make exp(logit - most) a probability; one warp a head. */
static __device__ void finish_factors(const select_job &j, const finish_lane &l, finish_mem *m)
{
    const bool     whole = j.a.rule == KVD_GQA_MEAN_KEPT || j.a.rule == KVD_GQA_MAX_KEPT;
    const uint32_t lane  = threadIdx.x % WARP;
    const float   *lse   = j.a.kept_lse + l.q->row * j.a.lse_stride + (uint64_t)l.head * j.group;

    for (uint32_t h = threadIdx.x / WARP; h < j.heads; h += FINISH_THREADS / WARP) {
        float max = -INFINITY, sum = 0.0f, kept = 0.0f;

        for (uint32_t p = lane; p < j.n_part; p += WARP) {
            const float2 x = j.part[((uint64_t)l.index * j.n_part + p) * j.group + h];

            select_merge(&max, &sum, x.x, x.y);
        }
        for (uint32_t d = WARP / 2; d; d /= 2) {
            const float max2 = __shfl_xor_sync(ALL_LANES, max, d);
            const float sum2 = __shfl_xor_sync(ALL_LANES, sum, d);

            select_merge(&max, &sum, max2, sum2);
        }
        if (whole && lse[h] != -INFINITY)
            select_merge(&max, &sum, lse[h], 1.0f);
        if (whole && max > -INFINITY)
            kept = expf(lse[h] - max) / sum;
        if (lane == 0) {
            m->most[h]   = max;
            m->factor[h] = (j.a.rule == KVD_GQA_MAX_KEPT ? 1.0f : 1.0f / (float)j.heads) / sum;
            m->kept[h]   = kept;
        }
    }
    __syncthreads();
}

/* Four chunks: their scores, and averages as they were. */
typedef struct finish_four {
    float   x[FINISH_EACH];
    ushort4 ema;
    bool    whole; /* all count, and both can be accessed at once */
} finish_four;

/* Scores of the chunks c .. c + 3, c a multiple of 4. */
static __device__ void finish_score(const select_job &j, const finish_lane &l, uint32_t c,
                                    const finish_mem *m, finish_four &out)
{
    const float *at     = select_logits(j, l.index, j.first_row);
    const bool   mapped = select_mapped(j), largest = j.a.rule == KVD_GQA_MAX_KEPT;
    uint32_t     col[FINISH_EACH];

    out.whole = c >= l.q->first_chunk && c + FINISH_EACH <= l.end &&
                ((uint64_t)(l.score + c) & 15) == 0 && ((uint64_t)(l.ema + c) & 7) == 0;
    if (out.whole && l.ema)
        out.ema = *(const ushort4 *)(l.ema + c);
    for (uint32_t e = 0; e < FINISH_EACH; e++) {
        out.x[e] = 0.0f;
        col[e] =
            mapped ? select_column(j, l.q, l.head, c + e < l.end ? c + e : l.end - 1, true) : 0;
    }
#pragma unroll 4
    for (uint32_t h = 0; h < j.heads; h++, at += j.row_stride) {
        const float  most = m->most[h], factor = m->factor[h];
        const float4 v = mapped ? make_float4(at[col[0]], at[col[1]], at[col[2]], at[col[3]])
                                : *(const float4 *)(at + c);
        const float  p[FINISH_EACH] = { __expf(v.x - most) * factor, __expf(v.y - most) * factor,
                                        __expf(v.z - most) * factor, __expf(v.w - most) * factor };

#pragma unroll
        for (uint32_t e = 0; e < FINISH_EACH; e++)
            out.x[e] = !largest ? out.x[e] + p[e] : p[e] > out.x[e] ? p[e] : out.x[e];
    }
#pragma unroll
    for (uint32_t e = 0; e < FINISH_EACH; e++) {
        out.x[e] = out.x[e] > 0.0f ? out.x[e] : 0.0f; /* NaN too */
        out.x[e] = out.x[e] < 1.0f ? out.x[e] : 1.0f;
    }
}

static __device__ __forceinline__ uint32_t finish_key(const finish_lane &l, uint32_t i, float score)
{
    const uint32_t c = l.first + i;

    return c < l.q->first_chunk || (l.listed && !l.listed[c]) ? 0 : __float_as_uint(score) + 1;
}

static __device__ __forceinline__ uint32_t finish_key_at(const finish_lane &l, const finish_mem *m,
                                                         uint32_t i)
{
    return i < FINISH_KEYS ? m->key[i] : finish_key(l, i, l.score[l.first + i]);
}

/* Four averages and scores, in one access each where they lie so. */
static __device__ void finish_store(const select_job &j, const finish_lane &l, uint32_t c,
                                    const finish_four &f)
{
    float    *score = l.score + c;
    uint16_t *ema   = l.ema ? l.ema + c : NULL;

    if (f.whole) {
        *(float4 *)score = make_float4(f.x[0], f.x[1], f.x[2], f.x[3]);
        if (ema)
            *(ushort4 *)ema = make_ushort4(select_ema(f.ema.x, f.x[0], j.a.alpha),
                                           select_ema(f.ema.y, f.x[1], j.a.alpha),
                                           select_ema(f.ema.z, f.x[2], j.a.alpha),
                                           select_ema(f.ema.w, f.x[3], j.a.alpha));
        return;
    }
    for (uint32_t e = 0; e < FINISH_EACH && c + e < l.end; e++) {
        if (c + e < l.q->first_chunk)
            continue;
        score[e] = f.x[e];
        if (ema)
            ema[e] = select_ema(ema[e], f.x[e], j.a.alpha);
    }
}

/* Keys of four chunks, from number i on, and their first digits; returns the sum of the scores. */
static __device__ uint64_t finish_first(const finish_lane &l, finish_mem *m, uint32_t i,
                                        const finish_four &f)
{
    uint64_t all = 0;

    for (uint32_t e = 0; e < FINISH_EACH && i + e < l.n; e++) {
        const uint32_t k = finish_key(l, i + e, f.x[e]), d = k >> (LEVELS - 1) * DIGIT;

        if (i + e < FINISH_KEYS)
            m->key[i + e] = k;
        if (l.by_mass)
            all +=
                l.first + i + e < l.q->first_chunk ? 0 : select_mass(__float_as_uint(f.x[e]) + 1);
        if (k == 0)
            continue;
        atomicAdd(&m->hist[0][0][d], 1);
        if (l.by_mass)
            atomicAdd((unsigned long long *)&m->mass[0][d], select_mass(k));
    }
    return all;
}

/* Writes scores and averages, keeps the keys; two fours of chunks are read before the first is
 * written.  Returns the sum of this thread's scores if that is wanted. */
static __device__ uint64_t finish_scores(const select_job &j, const finish_lane &l, finish_mem *m)
{
    const uint32_t step = FINISH_EACH * FINISH_THREADS;
    uint64_t       all  = 0;

    for (uint32_t c = l.rank * FINISH_THREADS + threadIdx.x; c < l.q->first_chunk;
         c += l.n_rank * FINISH_THREADS)
        l.score[c] = 0.0f;
    for (uint32_t i = FINISH_EACH * threadIdx.x; i < l.n; i += 2 * step) {
        finish_four a, b;

        finish_score(j, l, l.first + i, m, a);
        if (i + step < l.n)
            finish_score(j, l, l.first + i + step, m, b);
        finish_store(j, l, l.first + i, a);
        all += finish_first(l, m, i, a);
        if (i + step >= l.n)
            break;
        finish_store(j, l, l.first + i + step, b);
        all += finish_first(l, m, i + step, b);
    }
    __syncthreads();
    return all;
}

/* ---- the k-th ---------------------------------------------------------------------- */

/* No key of a level has been counted.  Peers do not look. */
static __device__ void finish_clear(const finish_lane &l, finish_mem *m, uint32_t level)
{
    for (uint32_t b = threadIdx.x; b < (LEVELS - level) * 2 * BINS; b += FINISH_THREADS)
        m->hist[level][0][b] = 0;
    for (uint32_t b = threadIdx.x; l.by_mass && b < (LEVELS - level) * BINS; b += FINISH_THREADS)
        m->mass[level][b] = 0;
}

/* Keys of this block by their digit, for each goal; `both`: the goals still look at the same. */
static __device__ void finish_count(const finish_lane &l, finish_mem *m, const finish_goal *goal,
                                    uint32_t level, bool both)
{
    const uint32_t shift = (LEVELS - 1 - level) * DIGIT;

    for (uint32_t i = threadIdx.x; i < l.n; i += FINISH_THREADS) {
        const uint32_t k = finish_key_at(l, m, i), d = k >> shift & (BINS - 1);
        const uint32_t prefix = k >> (shift + DIGIT);

        if (k == 0)
            continue;
        if (!goal[0].done && prefix == goal[0].prefix) {
            atomicAdd(&m->hist[level][0][d], 1);
            if (goal[0].target)
                atomicAdd((unsigned long long *)&m->mass[level][d], select_mass(k));
        }
        if (!goal[1].done && !both && prefix == goal[1].prefix)
            atomicAdd(&m->hist[level][1][d], 1);
    }
}

/* Four bins of the cluster's blocks added up; all are read at once. */
static __device__ __forceinline__ void finish_bins(const uint32_t *bin, uint32_t n_rank,
                                                   uint32_t (&sum)[4])
{
    uint4 x[FINISH_CLUSTER];

#pragma unroll
    for (uint32_t r = 0; r < FINISH_CLUSTER; r++)
        x[r] = r < n_rank ? *(const uint4 *)sp_peer(bin, r) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t r = 1; r < FINISH_CLUSTER; r++) {
        x[0].x += x[r].x;
        x[0].y += x[r].y;
        x[0].z += x[r].z;
        x[0].w += x[r].w;
    }
    sum[0] = x[0].x;
    sum[1] = x[0].y;
    sum[2] = x[0].z;
    sum[3] = x[0].w;
}

static __device__ __forceinline__ void finish_masses(const uint64_t *bin, uint32_t n_rank,
                                                     uint64_t (&sum)[4])
{
    for (uint32_t b = 0; b < 4; b++) {
        sum[b] = 0;
        for (uint32_t r = 0; r < n_rank; r++)
            sum[b] += *sp_peer(bin + b, r);
    }
}

/* A number's sum over the goal's threads before this one. */
static __device__ uint64_t finish_goal_scan(uint64_t x, uint64_t *mem)
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint64_t mine = x;
    uint64_t       sum;

    for (uint32_t d = 1; d < WARP; d *= 2) {
        const uint64_t y = __shfl_up_sync(ALL_LANES, x, d);

        x += lane >= d ? y : 0;
    }
    if (lane == WARP - 1)
        mem[warp] = x;
    __syncthreads();
    sum = lane < warp % GOAL_WARPS ? mem[warp / GOAL_WARPS * GOAL_WARPS + lane] : 0;
    for (uint32_t d = GOAL_WARPS / 2; d; d /= 2)
        sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return __shfl_sync(ALL_LANES, sum, 0) + x - mine;
}

/* Finds the bin, from the highest on, where as many as wanted, or their mass, are reached. */
static __device__ void finish_pick(const finish_goal &g, uint32_t      bin, const uint32_t (&n)[4],
                                   const uint64_t (&mass)[4], uint32_t before, uint64_t before_m,
                                   sp_pick *out)
{
    for (int b = 3; b >= 0; b--) {
        if (before >= g.want || (g.target && before_m >= g.target))
            return;
        if (before + n[b] >= g.want || (g.target && before_m + mass[b] >= g.target)) {
            out->bin    = bin + (uint32_t)b;
            out->before = before;
            out->count  = n[b];
            out->mass   = before_m;
            return;
        }
        before += n[b];
        before_m += mass[b];
    }
}

/* Adds up the cluster's counts, half of the threads for each goal, and finds the goals' digits. */
static __device__ void finish_digits(const finish_lane &l, finish_mem *m, const finish_goal *goal,
                                     uint32_t level, bool both)
{
    const uint32_t    g = threadIdx.x / GOAL_THREADS, i = threadIdx.x % GOAL_THREADS;
    const uint32_t    bin  = BINS - 4 * (i + 1);
    const finish_goal mine = g ? goal[1] : goal[0];
    uint32_t          n[4];
    uint64_t          mass[4] = { 0, 0, 0, 0 }, before, before_m = 0;

    sp_cluster_sync();
    finish_bins(&m->hist[level][both || level == 0 ? 0 : g][bin], l.n_rank, n);
    before = finish_goal_scan((uint64_t)n[0] + n[1] + n[2] + n[3], m->scan[0]);
    if (goal[0].target) { /* goal 1 never has one */
        if (g == 0)
            finish_masses(&m->mass[level][bin], l.n_rank, mass);
        before_m = finish_goal_scan(mass[0] + mass[1] + mass[2] + mass[3], m->scan[1]);
    }
    if (!mine.done)
        finish_pick(mine, bin, n, mass, (uint32_t)before, before_m, &m->pick[g]);
    __syncthreads();
}

/* One digit further. */
static __device__ void finish_narrow(finish_goal *g, const sp_pick &p, uint32_t shift)
{
    if (g->done)
        return;
    g->prefix = g->prefix << DIGIT | p.bin;
    g->want -= p.before;
    g->target -= g->target ? p.mass : 0;
    if (!g->target && p.count == g->want) {
        g->from = g->prefix << shift ? g->prefix << shift : 1;
        g->done = true;
    } else if (shift == 0) {
        const uint64_t each = select_mass(g->prefix);

        g->from = g->prefix + 1;
        g->tie  = g->prefix;
        g->ties = g->want;
        if (g->target && each && (g->target + each - 1) / each < g->ties)
            g->ties = (uint32_t)((g->target + each - 1) / each);
        g->done = true;
    }
}

/* The first level has been counted. */
static __device__ void finish_find(const finish_lane &l, finish_mem *m, finish_goal *goal)
{
    for (uint32_t level = 0; level < LEVELS && !(goal[0].done && goal[1].done); level++) {
        const bool     both  = !goal[0].done && !goal[1].done && goal[0].prefix == goal[1].prefix;
        const uint32_t shift = (LEVELS - 1 - level) * DIGIT;

        if (level > 0)
            finish_count(l, m, goal, level, both);
        finish_digits(l, m, goal, level, both);
        finish_narrow(&goal[0], m->pick[0], shift);
        finish_narrow(&goal[1], m->pick[1], shift);
    }
}

static __device__ __forceinline__ finish_goal finish_goal_of(uint32_t want, uint64_t target)
{
    finish_goal g = { want, 0, target, UINT32_MAX, 0, 0, want == 0 };

    return g;
}

/* ---- the selection ------------------------------------------------------------------ */

/* What is above the goal, ties with it, ties with the urgent one: counted over the chunks before
 * this thread's.  Returns the mass of all that is above, of the whole lane. */
static __device__ uint64_t finish_before(const finish_lane &l, finish_mem *m,
                                         const finish_goal *goal, uint32_t first, uint32_t end,
                                         uint32_t (&before)[3])
{
    uint64_t x[3] = { 0, 0, 0 }, all[3], sum;

    for (uint32_t i = first; i < end; i++) {
        const uint32_t k = finish_key_at(l, m, i);

        x[0] += (uint64_t)(k >= goal[0].from) << 32 | (uint64_t)(k == goal[0].tie);
        x[1] += k == goal[1].tie;
        x[2] += k >= goal[0].from ? select_mass(k) : 0;
    }
    finish_scan(x, all, m->scan);
    if (threadIdx.x == 0) {
        for (uint32_t k = 0; k < 3; k++)
            m->count[k] = all[k];
    }
    sp_cluster_sync();
    sum       = finish_add(&m->count[0], l.rank);
    before[0] = (uint32_t)(sum >> 32) + (uint32_t)(x[0] >> 32);
    before[1] = (uint32_t)sum + (uint32_t)x[0];
    before[2] = (uint32_t)(finish_add(&m->count[1], l.rank) + x[1]);
    return finish_add(&m->count[2], l.n_rank);
}

/* Where the selection goes: the caller's list, or CASCADE's. */
static __device__ void finish_put(const select_job &j, const finish_lane &l, uint32_t at,
                                  uint32_t chunk, bool urgent)
{
    if (l.rerank)
        j.list[(uint64_t)l.index * j.row_stride + at] = chunk;
    else
        l.q->sel[l.head * j.a.sel_stride + at] = chunk | (urgent ? KVD_SELECT_URGENT : 0);
}

/* Ascending: a thread takes a run of chunks.  Returns the sum of all selected scores. */
static __device__ uint64_t finish_write(const select_job &j, const finish_lane &l, finish_mem *m,
                                        const finish_goal *goal)
{
    const uint32_t run   = (l.n + FINISH_THREADS - 1) / FINISH_THREADS;
    const uint32_t first = run * threadIdx.x < l.n ? run * threadIdx.x : l.n;
    const uint32_t end   = first + run < l.n ? first + run : l.n;
    uint32_t       before[3];
    const uint64_t mass = finish_before(l, m, goal, first, end, before);

    for (uint32_t i = first; i < end; i++) {
        const uint32_t k  = finish_key_at(l, m, i);
        const bool     eq = k == goal[0].tie, eq1 = k == goal[1].tie;
        const bool     in = k >= goal[0].from || (eq && before[1] < goal[0].ties);

        if (in)
            finish_put(j, l, before[0] + (before[1] < goal[0].ties ? before[1] : goal[0].ties),
                       l.first + i, k >= goal[1].from || (eq1 && before[2] < goal[1].ties));
        if (l.rerank)
            j.listed[(uint64_t)l.index * j.row_stride + l.first + i] = in;
        before[0] += k >= goal[0].from;
        before[1] += eq;
        before[2] += eq1;
    }
    return mass + (goal[0].ties ? goal[0].ties * select_mass(goal[0].tie) : 0);
}

/* ---- the window ----------------------------------------------------------------------- */

typedef struct finish_job {
    select_job            j;
    kvd_window_args       change; /* if window */
    kvd_window_spans_args spans;
    uint64_t             *keys; /* NULL: in shared memory */
    uint32_t              slots;
    bool                  rerank, listed, window;
} finish_job;

typedef struct finish_next {
    window_mem window;
    uint32_t   list[WARP + 1];
    uint64_t   keys[]; /* [slots] */
} finish_next;

static __device__ void finish_window(const finish_job &f, uint32_t index, finish_next *m)
{
    window_change(f.change, index, f.keys ? f.keys + (uint64_t)index * f.slots : m->keys,
                  &m->window);
    __syncthreads();
    window_list(f.spans, index, m->list);
}

/* ---- the kernel ---------------------------------------------------------------------- */

static __device__ finish_lane finish_open(const select_job &j, bool rerank, bool listed)
{
    finish_lane l;
    uint32_t    each, at, n;

    l.index   = blockIdx.y;
    l.head    = blockIdx.y % j.a.index.n_kv_head;
    l.q       = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    l.rank    = sp_cluster_rank();
    l.n_rank  = sp_cluster_size();
    l.score   = l.q->score + l.head * j.a.lane_stride;
    l.ema     = l.q->ema && !rerank ? l.q->ema + l.head * j.a.lane_stride : NULL;
    l.listed  = listed ? j.listed + (uint64_t)l.index * j.row_stride : NULL;
    l.rerank  = rerank;
    l.by_mass = j.a.top_p > 0.0f && !rerank;
    l.first   = l.q->first_chunk / FINISH_EACH * FINISH_EACH;
    n         = l.q->n_chunk > l.first ? l.q->n_chunk - l.first : 0;
    each      = ((n + l.n_rank - 1) / l.n_rank + FINISH_EACH - 1) / FINISH_EACH * FINISH_EACH;
    at        = l.rank * each < n ? l.rank * each : n;
    l.first += at;
    l.n   = n - at < each ? n - at : each;
    l.end = l.first + l.n;
    return l;
}

/* How many are selected at most, of all the lane's. */
static __device__ uint32_t finish_most(const select_job &j, const finish_lane &l)
{
    const uint32_t first = l.q->first_chunk, n_chunk = l.q->n_chunk;
    const uint32_t n = l.listed ? j.n_list[l.index] : n_chunk > first ? n_chunk - first : 0;
    const uint64_t k = (uint64_t)l.q->k[l.head] * (l.rerank ? KVD_CASCADE_FACTOR : 1);

    return k < n ? (uint32_t)k : n;
}

static __device__ void finish_result(const select_job &j, const finish_lane &l, const finish_mem *m,
                                     uint32_t n_sel, uint32_t n_urgent, uint64_t mass)
{
    kvd_select_result r = { n_sel, n_urgent, 0.0f, 0.0f };

    for (uint32_t h = 0; h < j.heads; h++)
        r.kept += m->kept[h];
    r.kept /= (float)j.heads;
    r.mass              = __fadd_rn(r.kept, (float)((double)mass * 0x1p-40));
    j.a.result[l.index] = r;
}

/* Sum over the cluster of one number of each thread. */
static __device__ uint64_t finish_sum(uint64_t mine, finish_mem *m, const finish_lane &l)
{
    uint64_t x[3] = { mine, 0, 0 }, all[3];

    finish_scan(x, all, m->scan);
    if (threadIdx.x == 0)
        m->count[0] = all[0];
    sp_cluster_sync();
    return finish_add(&m->count[0], l.n_rank);
}

/* Finds both goals; returns how many are selected.  mass: of this thread's chunks. */
static __device__ uint32_t finish_goals(const select_job &j, const finish_lane &l, finish_mem *m,
                                        uint64_t mass, finish_goal *goal)
{
    const uint32_t most  = finish_most(j, l);
    uint32_t       n_sel = most;

    goal[0] = finish_goal_of(most, 0);
    goal[1] = finish_goal_of(0, 0);
    if (l.by_mass) { /* how many there are is known only then */
        const uint64_t all    = finish_sum(mass, m, l);
        const uint64_t target = (uint64_t)((double)all * (double)j.a.top_p);

        goal[0] = finish_goal_of(most, target ? target : 1);
        finish_find(l, m, goal);
        n_sel = most - goal[0].want + goal[0].ties;
        sp_cluster_sync(); /* peers have looked at the counts */
        finish_clear(l, m, 1);
        __syncthreads();
    }
    if (!l.rerank)
        goal[1] = finish_goal_of(select_n_urgent(n_sel), 0);
    finish_find(l, m, goal);
    return n_sel;
}

static __global__ void __launch_bounds__(FINISH_THREADS)
    finish(const __grid_constant__ finish_job f)
{
    extern __shared__ uint4 finish_dynamic[];
    finish_mem             *m = (finish_mem *)finish_dynamic;
    const select_job       &j = f.j;
    finish_lane             l;
    finish_goal             goal[2];
    uint32_t                n_sel;
    uint64_t                mass;

    l.by_mass = j.a.top_p > 0.0f && !f.rerank;
    finish_clear(l, m, 0);
    sp_begin();
    l = finish_open(j, f.rerank, f.listed);
    finish_factors(j, l, m);
    mass  = finish_scores(j, l, m);
    n_sel = finish_goals(j, l, m, mass, goal);
    mass  = finish_write(j, l, m, goal);
    if (l.rank == 0 && threadIdx.x == 0) {
        if (f.rerank)
            j.n_list[l.index] = n_sel;
        else
            finish_result(j, l, m, n_sel, select_n_urgent(n_sel), mass);
    }
    sp_cluster_sync(); /* peers read this block's memory until here; the selection is written */
    if (l.rank == 0 && f.window && !f.rerank)
        finish_window(f, l.index, (finish_next *)finish_dynamic);
}

/* Blocks that share a lane: as many as fit into the processors, two at a time. */
static uint32_t cluster_of(const cuda_backend *be, uint32_t n_lane)
{
    uint32_t n = be->cc >= 90 ? FINISH_CLUSTER : 1;

    while (n > 1 && n * n_lane > 2 * be->n_sm)
        n /= 2;
    return n;
}

cudaError_t cuda_select_finish(const cuda_backend *be, const select_job &j,
                               const kvd_choose_args *window, bool rerank, bool listed,
                               cudaStream_t s)
{
    const uint32_t n     = cluster_of(be, j.n_lane);
    uint32_t       bytes = j.a.top_p > 0.0f ? sizeof(finish_mem) : offsetof(finish_mem, mass);
    finish_job     f     = {};
    cudaError_t    e;

    f.j      = j;
    f.rerank = rerank;
    f.listed = listed;
    if (window) {
        f.window = true;
        f.change = window->window;
        f.spans  = window->spans;
        f.keys   = cuda_window_keys(be, j.n_lane);
        f.slots  = be->lim.n_slot;
        bytes    = (uint32_t)kvd_max_u64(bytes, sizeof(finish_next) +
                                                    (f.keys ? 0 : f.slots * sizeof(uint64_t)));
    }
    e = cudaFuncSetAttribute(finish, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    return e != cudaSuccess
               ? e
               : sp_launch(be, s, dim3(n, j.n_lane), FINISH_THREADS, bytes, n, finish, f);
}
