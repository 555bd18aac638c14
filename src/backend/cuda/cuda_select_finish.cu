/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_finish.cu - from logits to the selection: scores, averages, the best.
 *
 * A lane is the work of a cluster of blocks, each with a run of its chunks.  A chunk's key is its
 * score's bits + 1 (0: cannot be selected), which sorts as the score does.  The k-th largest key is
 * found digit by digit: each block counts its keys by digit, all add up the others' counts through
 * distributed shared memory and so come to the same digit.  Two goals go side by side: the selected
 * and the urgent.  Keys that do not fit into shared memory are read again from the scores.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select.cuh"

#define FINISH_THREADS 512u
#define FINISH_CLUSTER 8u
#define FINISH_KEYS    8192u /* of a block, in shared memory */
#define FINISH_EACH    4u    /* neighbouring chunks of a thread when the selection is written */
#define LEVELS         4u

static_assert(FINISH_THREADS == 2 * RADIX, "a thread for each bin of two goals");

typedef struct finish_mem {
    uint32_t key[FINISH_KEYS];
    uint32_t hist[2][2][RADIX]; /* [level's parity][goal] of this block */
    uint64_t mass[2][RADIX];    /* [level's parity] */
    uint32_t all[2][RADIX];     /* [goal] of the cluster */
    uint64_t all_mass[RADIX];
    sp_pick  pick[2];
    uint64_t scan[WARP + 1];
    uint64_t sum[2]; /* of this block, for its peers */
    uint64_t count[2];
    float    most[SELECT_GROUP_MAX], factor[SELECT_GROUP_MAX];
    float    kept[SELECT_GROUP_MAX];
} finish_mem;

typedef struct finish_lane {
    const kvd_select_seq *q;
    uint32_t              index, head, rank, n_rank;
    uint32_t              first, n, end; /* chunks of this block: [first, end), n of them; first a
                                            multiple of 4, so that some may not be selected */
    float         *score;
    uint16_t      *ema;
    const uint8_t *listed; /* NULL: all may be selected */
    bool           rerank;
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

/* Sum over the cluster of one number of each block; slot: 0 or 1, in turn. */
static __device__ uint64_t finish_sum(uint64_t x, finish_mem *m, const finish_lane &l,
                                      uint32_t slot)
{
    uint64_t total;

    sp_block_scan(x, &total, m->scan);
    if (threadIdx.x == 0)
        m->sum[slot] = total;
    sp_cluster_sync();
    return finish_add(&m->sum[slot], l.n_rank);
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

/* Scores of the chunks c .. c + 3, c a multiple of 4. */
static __device__ void finish_score(const select_job &j, const finish_lane &l, uint32_t c,
                                    const finish_mem *m, float (&x)[FINISH_EACH])
{
    const float *at     = select_logits(j, l.index, j.first_row);
    const bool   mapped = select_mapped(j), largest = j.a.rule == KVD_GQA_MAX_KEPT;
    uint32_t     col[FINISH_EACH];

    for (uint32_t e = 0; e < FINISH_EACH; e++) {
        x[e] = 0.0f;
        col[e] =
            mapped ? select_column(j, l.q, l.head, c + e < l.end ? c + e : l.end - 1, true) : 0;
    }
#pragma unroll 4
    for (uint32_t h = 0; h < j.heads; h++, at += j.row_stride) {
        const float  most = m->most[h], factor = m->factor[h];
        const float4 v = mapped ? make_float4(at[col[0]], at[col[1]], at[col[2]], at[col[3]])
                                : *(const float4 *)(at + c);
        const float  p[FINISH_EACH] = { expf(v.x - most) * factor, expf(v.y - most) * factor,
                                        expf(v.z - most) * factor, expf(v.w - most) * factor };

#pragma unroll
        for (uint32_t e = 0; e < FINISH_EACH; e++)
            x[e] = !largest ? x[e] + p[e] : p[e] > x[e] ? p[e] : x[e];
    }
#pragma unroll
    for (uint32_t e = 0; e < FINISH_EACH; e++) {
        x[e] = x[e] > 0.0f ? x[e] : 0.0f; /* NaN too */
        x[e] = x[e] < 1.0f ? x[e] : 1.0f;
    }
}

/* The average's new value, as kvd_select_args has it. */
static __device__ uint16_t finish_ema(uint16_t ema, float score, float alpha)
{
    return sp_to_f16(__fadd_rn(__fmul_rn(sp_from_f16(ema), __fsub_rn(1.0f, alpha)),
                               __fmul_rn(score, __fmul_rn(alpha, KVD_EMA_SCALE))));
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

/* A key's score in units of 2^-40. */
static __device__ __forceinline__ uint64_t finish_mass(uint32_t key)
{
    return (uint64_t)(__uint_as_float(key - 1) * 0x1p40f);
}

/* Four averages and scores, in one access each where they lie so. */
static __device__ void finish_store(const select_job &j, const finish_lane &l, uint32_t c,
                                    const float (&x)[FINISH_EACH])
{
    const bool whole = c >= l.q->first_chunk && c + FINISH_EACH <= l.end;
    float     *score = l.score + c;
    uint16_t  *ema   = l.ema ? l.ema + c : NULL;

    if (whole && ((uint64_t)score & 15) == 0 && ((uint64_t)ema & 7) == 0) {
        *(float4 *)score = make_float4(x[0], x[1], x[2], x[3]);
        if (ema) {
            ushort4 v = *(ushort4 *)ema;

            v.x             = finish_ema(v.x, x[0], j.a.alpha);
            v.y             = finish_ema(v.y, x[1], j.a.alpha);
            v.z             = finish_ema(v.z, x[2], j.a.alpha);
            v.w             = finish_ema(v.w, x[3], j.a.alpha);
            *(ushort4 *)ema = v;
        }
        return;
    }
    for (uint32_t e = 0; e < FINISH_EACH && c + e < l.end; e++) {
        if (c + e < l.q->first_chunk)
            continue;
        score[e] = x[e];
        if (ema)
            ema[e] = finish_ema(ema[e], x[e], j.a.alpha);
    }
}

/* Writes scores and averages, keeps the keys; returns the sum of this thread's scores. */
static __device__ uint64_t finish_scores(const select_job &j, const finish_lane &l, finish_mem *m)
{
    uint64_t all = 0;

    for (uint32_t c = l.rank * FINISH_THREADS + threadIdx.x; c < l.q->first_chunk;
         c += l.n_rank * FINISH_THREADS)
        l.score[c] = 0.0f;
    for (uint32_t i = FINISH_EACH * threadIdx.x; i < l.n; i += FINISH_EACH * FINISH_THREADS) {
        float x[FINISH_EACH];

        finish_score(j, l, l.first + i, m, x);
        finish_store(j, l, l.first + i, x);
        for (uint32_t e = 0; e < FINISH_EACH && i + e < l.n; e++) {
            const uint32_t k = finish_key(l, i + e, x[e]);

            if (i + e < FINISH_KEYS)
                m->key[i + e] = k;
            all += l.first + i + e < l.q->first_chunk ? 0 : finish_mass(__float_as_uint(x[e]) + 1);
        }
    }
    __syncthreads();
    return all;
}

/* ---- the k-th ---------------------------------------------------------------------- */

/* Keys of this block by their digit, for each goal; `both`: the goals still look at the same. */
static __device__ void finish_count(const finish_lane &l, finish_mem *m, const finish_goal *goal,
                                    uint32_t parity, uint32_t shift, uint32_t width, bool both)
{
    for (uint32_t b = threadIdx.x; b < RADIX; b += FINISH_THREADS) {
        m->hist[parity][0][b] = 0;
        m->hist[parity][1][b] = 0;
        m->mass[parity][b]    = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < l.n; i += FINISH_THREADS) {
        const uint32_t k = finish_key_at(l, m, i), d = k >> shift & ((1u << width) - 1u);

        if (k == 0)
            continue;
        if (!goal[0].done && k >> (shift + width) == goal[0].prefix) {
            atomicAdd(&m->hist[parity][0][d], 1);
            if (goal[0].target)
                atomicAdd((unsigned long long *)&m->mass[parity][d], finish_mass(k));
        }
        if (!goal[1].done && !both && k >> (shift + width) == goal[1].prefix)
            atomicAdd(&m->hist[parity][1][d], 1);
    }
}

/* Adds up one bin of the cluster's blocks; all are read at once. */
template <typename T> static __device__ __forceinline__ T finish_bin(const T *bin, uint32_t n_rank)
{
    T x[FINISH_CLUSTER], sum = 0;

#pragma unroll
    for (uint32_t r = 0; r < FINISH_CLUSTER; r++)
        x[r] = r < n_rank ? *sp_peer(bin, r) : 0;
#pragma unroll
    for (uint32_t r = 0; r < FINISH_CLUSTER; r++)
        sum += x[r];
    return sum;
}

/* Adds up the cluster's counts, half of the threads for each goal, and finds the goals' digits. */
static __device__ void finish_digits(const finish_lane &l, finish_mem *m, const finish_goal *goal,
                                     uint32_t parity, bool both)
{
    const uint32_t g = threadIdx.x / RADIX, b = threadIdx.x % RADIX, warp = threadIdx.x / WARP;

    sp_cluster_sync();
    m->all[g][b] = finish_bin(&m->hist[parity][both ? 0 : g][b], l.n_rank);
    if (g == 0 && goal[0].target)
        m->all_mass[b] = finish_bin(&m->mass[parity][b], l.n_rank);
    __syncthreads();
    if (warp < 2 && !goal[warp].done)
        sp_pick_bin(m->all[warp], goal[warp].target ? m->all_mass : NULL, true, goal[warp].want,
                    goal[warp].target, &m->pick[warp]);
    __syncthreads();
}

/* One digit further. */
static __device__ void finish_narrow(finish_goal *g, const sp_pick &p, uint32_t shift,
                                     uint32_t width)
{
    if (g->done)
        return;
    g->prefix = g->prefix << width | p.bin;
    g->want -= p.before;
    g->target -= g->target ? p.mass : 0;
    if (!g->target && p.count == g->want) {
        g->from = g->prefix << shift ? g->prefix << shift : 1;
        g->done = true;
    } else if (shift == 0) {
        const uint64_t each = finish_mass(g->prefix);

        g->from = g->prefix + 1;
        g->tie  = g->prefix;
        g->ties = g->want;
        if (g->target && each && (g->target + each - 1) / each < g->ties)
            g->ties = (uint32_t)((g->target + each - 1) / each);
        g->done = true;
    }
}

static __device__ void finish_find(const finish_lane &l, finish_mem *m, finish_goal *goal)
{
    uint32_t shift = 30;

    for (uint32_t level = 0; level < LEVELS && !(goal[0].done && goal[1].done); level++) {
        const uint32_t width = level < 2 ? 8 : 7;
        const bool     both  = !goal[0].done && !goal[1].done && goal[0].prefix == goal[1].prefix;

        shift -= width;
        finish_count(l, m, goal, level % 2, shift, width, both);
        finish_digits(l, m, goal, level % 2, both);
        finish_narrow(&goal[0], m->pick[0], shift, width);
        finish_narrow(&goal[1], m->pick[1], shift, width);
    }
}

static __device__ __forceinline__ finish_goal finish_goal_of(uint32_t want, uint64_t target)
{
    finish_goal g = { want, 0, target, UINT32_MAX, 0, 0, want == 0 };

    return g;
}

/* ---- the selection ------------------------------------------------------------------ */

/* How many chunks before this block's are above the goal, tie with it, tie with the urgent one. */
static __device__ void finish_before(const finish_lane &l, finish_mem *m, const finish_goal *goal,
                                     uint32_t before[3])
{
    uint32_t above = 0, tie = 0, urgent = 0;
    uint64_t sum[2];

    for (uint32_t i = threadIdx.x; i < l.n; i += FINISH_THREADS) {
        const uint32_t k = finish_key_at(l, m, i);

        above += k >= goal[0].from;
        tie += k == goal[0].tie;
        urgent += k == goal[1].tie;
    }
    sp_block_scan((uint64_t)above << 32 | tie, &sum[0], m->scan);
    sp_block_scan((uint64_t)urgent, &sum[1], m->scan);
    if (threadIdx.x == 0) {
        m->count[0] = sum[0];
        m->count[1] = sum[1];
    }
    sp_cluster_sync();
    sum[0]    = finish_add(&m->count[0], l.rank);
    before[0] = (uint32_t)(sum[0] >> 32);
    before[1] = (uint32_t)sum[0];
    before[2] = (uint32_t)finish_add(&m->count[1], l.rank);
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

/* Ascending; returns the sum of this thread's selected scores. */
static __device__ uint64_t finish_write(const select_job &j, const finish_lane &l, finish_mem *m,
                                        const finish_goal *goal)
{
    uint32_t before[3];
    uint64_t mass = 0;

    finish_before(l, m, goal, before);
    for (uint32_t i0 = 0; i0 < l.n; i0 += FINISH_EACH * FINISH_THREADS) {
        const uint32_t i = i0 + FINISH_EACH * threadIdx.x;
        uint32_t       k[FINISH_EACH], above, tie, urgent;
        uint64_t       mine = 0, all, at;

        for (uint32_t e = 0; e < FINISH_EACH; e++) { /* 16 bits each are enough for a tile */
            k[e] = i + e < l.n ? finish_key_at(l, m, i + e) : 0;
            mine += (uint64_t)(k[e] >= goal[0].from) << 32 | (uint64_t)(k[e] == goal[0].tie) << 16 |
                    (uint64_t)(k[e] == goal[1].tie);
        }
        at     = sp_block_scan(mine, &all, m->scan);
        above  = before[0] + (uint32_t)(at >> 32);
        tie    = before[1] + (uint32_t)(at >> 16 & 0xffff);
        urgent = before[2] + (uint32_t)(at & 0xffff);
        for (uint32_t e = 0; e < FINISH_EACH && i + e < l.n; e++) {
            const bool eq  = k[e] == goal[0].tie,
                       in  = k[e] >= goal[0].from || (eq && tie < goal[0].ties);
            const bool eq1 = k[e] == goal[1].tie;

            if (in) {
                finish_put(j, l, above + (tie < goal[0].ties ? tie : goal[0].ties), l.first + i + e,
                           k[e] >= goal[1].from || (eq1 && urgent < goal[1].ties));
                mass += finish_mass(k[e]);
            }
            if (l.rerank)
                j.listed[(uint64_t)l.index * j.row_stride + l.first + i + e] = in;
            above += k[e] >= goal[0].from;
            tie += eq;
            urgent += eq1;
        }
        before[0] += (uint32_t)(all >> 32);
        before[1] += (uint32_t)(all >> 16 & 0xffff);
        before[2] += (uint32_t)(all & 0xffff);
    }
    return mass;
}

/* ---- the kernel ---------------------------------------------------------------------- */

static __device__ finish_lane finish_open(const select_job &j, bool rerank, bool listed)
{
    finish_lane l;
    uint32_t    each, at, n;

    l.index  = blockIdx.y;
    l.head   = blockIdx.y % j.a.index.n_kv_head;
    l.q      = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    l.rank   = sp_cluster_rank();
    l.n_rank = sp_cluster_size();
    l.score  = l.q->score + l.head * j.a.lane_stride;
    l.ema    = l.q->ema && !rerank ? l.q->ema + l.head * j.a.lane_stride : NULL;
    l.listed = listed ? j.listed + (uint64_t)l.index * j.row_stride : NULL;
    l.rerank = rerank;
    l.first  = l.q->first_chunk / FINISH_EACH * FINISH_EACH;
    n        = l.q->n_chunk > l.first ? l.q->n_chunk - l.first : 0;
    each     = ((n + l.n_rank - 1) / l.n_rank + FINISH_EACH - 1) / FINISH_EACH * FINISH_EACH;
    at       = l.rank * each < n ? l.rank * each : n;
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

static __global__ void __launch_bounds__(FINISH_THREADS)
    finish(const __grid_constant__ select_job j, const bool rerank, const bool listed)
{
    sp_begin();
    __shared__ finish_mem m;
    const finish_lane     l       = finish_open(j, rerank, listed);
    const uint32_t        most    = finish_most(j, l);
    const bool            by_mass = j.a.top_p > 0.0f && !rerank;
    finish_goal           goal[2];
    uint32_t              n_sel = most, n_urgent = 0;
    uint64_t              mass;

    finish_factors(j, l, &m);
    mass    = finish_scores(j, l, &m);
    goal[1] = finish_goal_of(0, 0);
    if (by_mass) { /* how many there are is known only then */
        const uint64_t all    = finish_sum(mass, &m, l, 0);
        const uint64_t target = (uint64_t)((double)all * (double)j.a.top_p);

        goal[0] = finish_goal_of(most, target ? target : 1);
        finish_find(l, &m, goal);
        n_sel = most - goal[0].want + goal[0].ties;
        sp_cluster_sync();
    } else {
        goal[0] = finish_goal_of(most, 0);
    }
    if (!rerank) {
        n_urgent = n_sel < 16 ? n_sel > 0 : n_sel / 8;
        goal[1]  = finish_goal_of(n_urgent, 0);
    }
    finish_find(l, &m, goal);
    mass = finish_sum(finish_write(j, l, &m, goal), &m, l, 1);
    if (l.rank == 0 && threadIdx.x == 0) {
        if (rerank)
            j.n_list[l.index] = n_sel;
        else
            finish_result(j, l, &m, n_sel, n_urgent, mass);
    }
    sp_cluster_sync(); /* peers read this block's memory until here */
}

cudaError_t cuda_select_finish(const cuda_backend *be, const select_job &j, bool rerank,
                               bool listed, cudaStream_t s)
{
    const uint32_t n = be->cc >= 90 ? FINISH_CLUSTER : 1;

    return sp_launch(be, s, dim3(n, j.n_lane), FINISH_THREADS, 0, n, finish, j, rerank, listed);
}
