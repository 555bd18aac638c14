/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_cut.cuh - the stage of cuda_select_whole.cu that finds the k-th best chunk, and the
 * last urgent one. */
#ifndef KVD_CUDA_SELECT_CUT_CUH
#define KVD_CUDA_SELECT_CUT_CUH

#include "backend/cuda/cuda_select_whole.cuh"

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

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

#pragma unroll
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

/* One warp: narrows a goal to the digit that its want-th key has, and finds out how many of those
 * the blocks before this one have. */
static __device__ __noinline__ void whole_narrow(uint32_t rank, whole_mem *m, const whole_over *o,
                                                 uint32_t g, bool first)
{
    const uint32_t lane = threadIdx.x % WARP;
    whole_goal    *goal = &m->goal[g];
    uint32_t       n    = 0, bin, shift;

    whole_pick(m->count[first ? 0 : g], true, goal->want, &m->pick[g]);
    __syncwarp();
    bin = m->pick[g].bin;
    if (lane < rank)
        n = first ? o->u.all[lane][bin] : *sp_peer(&m->hist[g][bin], lane);
    n = __reduce_add_sync(ALL_LANES, n);
    if (lane == 0) {
        m->first_few[g] = n;
        shift           = whole_shift(*goal);
        goal->low       = first ? bin ? (uint64_t)(WHOLE_BASE + bin) << WHOLE_DIGIT : 0
                                : goal->low + ((uint64_t)bin << shift);
        goal->high =
            first ? (uint64_t)(WHOLE_BASE + bin + 1) << WHOLE_DIGIT : goal->low + (1ull << shift);
        goal->want -= m->pick[g].before;
        goal->n = m->pick[g].count;
    }
    __syncwarp();
}

/* The cluster's first counts added up, when they have come. */
static __device__ __forceinline__ void whole_counted(const whole_lane &l, whole_mem *m,
                                                     const whole_over *o)
{
    bar_come(&m->come[WHOLE_COUNTS]);
    for (uint32_t b = threadIdx.x; b < WHOLE_BINS; b += blockDim.x) {
        uint32_t n = 0;

#pragma unroll 4
        for (uint32_t r = 0; r < l.n_rank; r++)
            n += o->u.all[r][b];
        m->count[0][b] = n;
    }
    __syncthreads();
}

/* A goal whose digit too many keys have: by the next one. */
static __device__ __noinline__ void whole_divide(whole_lane l, whole_mem *m, whole_over *o)
{
    const uint32_t g = threadIdx.x / WARP;

    sp_cluster_sync(); /* all have come here, and peers have looked at the counts */
    for (uint32_t b = threadIdx.x; b < 2 * WHOLE_BINS; b += blockDim.x)
        m->hist[0][b] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < l.n; i += blockDim.x) {
        const uint32_t key = whole_keys(l, i / WHOLE_EACH)[i % WHOLE_EACH];
        const uint64_t k   = whole_key(key, l.base + i);

        for (uint32_t a = 0; a < 2 && key; a++)
            if (k >= m->goal[a].low && k < m->goal[a].high)
                atomicAdd(&m->hist[a][(k - m->goal[a].low) >> whole_shift(m->goal[a])], 1);
    }
    sp_cluster_sync();
    whole_sums(l.n_rank, m, o, 0);
    whole_sums(l.n_rank, m, o, 1);
    if (g < 2 && m->goal[g].n > WHOLE_FEW)
        whole_narrow(l.rank, m, o, g, false);
    __syncthreads();
}

/* A warp's quads which may have selected chunks, in their order; returns how many. */
static __device__ __forceinline__ uint32_t whole_sift(const whole_lane &l, const whole_mem *m,
                                                      uint16_t **out)
{
    const uint32_t lane = threadIdx.x % WARP, n_warp = blockDim.x / WARP;
    const uint32_t least = max(1u, (uint32_t)(m->goal[0].low >> WHOLE_CHUNKS)) >> 16;
    const uint32_t quads = (l.n + WHOLE_EACH - 1) / WHOLE_EACH,
                   each  = (quads + n_warp - 1) / n_warp;
    const uint32_t first = min(threadIdx.x / WARP * each, quads), end = min(first + each, quads);
    uint16_t      *list = l.near_ + first;
    uint32_t       n    = 0;

#pragma unroll 2
    for (uint32_t q0 = first; q0 < end; q0 += WARP) {
        const uint32_t q   = q0 + lane;
        const bool     may = q < end && *whole_bound(l, l.wide, q) >= least;
        const uint32_t all = __ballot_sync(ALL_LANES, may);

        if (may)
            list[n + __popc(all & ((1u << lane) - 1))] = (uint16_t)q;
        n += __popc(all);
    }
    __syncwarp();
    *out = list;
    return n;
}

/* Sends this block's keys within the goals to all blocks; near_: the warp's n quads. */
static __device__ void whole_list(const whole_lane &l, whole_mem *m, whole_over *o,
                                  const uint16_t *near_, uint32_t n)
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
    for (uint32_t u = threadIdx.x % WARP; u < n; u += WARP) {
        const uint32_t quad   = near_[u];
        const uint4    v      = *(const uint4 *)whole_keys(l, quad);
        const uint32_t key[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
        for (uint32_t g = 0; g < 2; g++) {
#pragma unroll
            for (uint32_t e = 0; e < WHOLE_EACH; e++) {
                const uint64_t k = whole_key(key[e], l.base + WHOLE_EACH * quad + e);

                if (key[e] >= least[g] && key[e] <= most[g] && k >= low[g] && k < high[g])
                    o->u.own[g][atomicAdd(&m->n_few[g], 1)] = k;
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t g = 0; g < 2; g++) {
        for (uint32_t p = threadIdx.x; p < m->n_few[g] * l.n_rank; p += blockDim.x) {
            const uint32_t i = p / l.n_rank, r = p % l.n_rank;
            const uint64_t k = o->u.own[g][i];

            bar_send2(bar_peer(&o->few[g][m->first_few[g] + i], r),
                      bar_peer(&m->come[WHOLE_KEYS + g], r), (uint32_t)k, (uint32_t)(k >> 32));
        }
    }
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

/* Counts a goal's keys by its next digit; i: number of this thread of n_thread. */
static __device__ __forceinline__ void whole_digits(whole_mem *m, const whole_over *o, uint32_t g,
                                                    uint32_t i, uint32_t n_thread)
{
    const uint64_t low   = m->goal[g].low;
    const uint32_t shift = whole_shift(m->goal[g]);

    for (; i < m->goal[g].n; i += n_thread)
        atomicAdd(&m->count[g][(o->few[g][i] - low) >> shift], 1);
}

/* The goal's cut is among those that have the digit; i and n_thread as above. */
static __device__ __forceinline__ void whole_tiny(whole_mem *m, whole_over *o, uint32_t g,
                                                  uint32_t i, uint32_t n_thread)
{
    const uint64_t low   = m->goal[g].low;
    const uint32_t shift = whole_shift(m->goal[g]);

    for (; i < m->goal[g].n; i += n_thread)
        if ((o->few[g][i] - low) >> shift == m->pick[g].bin)
            m->tiny[g][atomicAdd(&m->n_few[g], 1) % WHOLE_TINY] = o->few[g][i];
}

/* Both goals' cuts among keys that have come, by another digit; half of the threads a goal. */
static __device__ __noinline__ void whole_hard(whole_mem *m, whole_over *o)
{
    const uint32_t n = blockDim.x / 2, g = threadIdx.x / n, i = threadIdx.x % n;
    bool           few;

    for (uint32_t b = threadIdx.x; b < 2 * WHOLE_BINS; b += blockDim.x)
        m->count[0][b] = 0;
    __syncthreads();
    whole_digits(m, o, g, i, n);
    if (i == 0)
        m->n_few[g] = 0;
    __syncthreads();
    if (i < WARP && m->goal[g].n)
        whole_pick(m->count[g], true, m->goal[g].want, &m->pick[g]);
    __syncthreads();
    whole_tiny(m, o, g, i, n);
    __syncthreads();
    few = m->goal[g].n && m->pick[g].count <= WHOLE_TINY;
    whole_rank(few ? m->tiny[g] : o->few[g], few ? m->pick[g].count : m->goal[g].n,
               m->goal[g].want - (few ? m->pick[g].before : 0), i, n, &m->goal[g].cut);
}

/* The same, few: four threads a key, which compare it with a fourth each. */
static __device__ __forceinline__ void whole_easy(whole_mem *m, const whole_over *o)
{
    const uint32_t t = threadIdx.x % 4;

#pragma unroll 1
    for (uint32_t g = 0; g < 2; g++) {
        const uint64_t *few = o->few[g];
        const uint32_t  n = m->goal[g].n, want = m->goal[g].want;

#pragma unroll 1
        for (uint32_t i0 = threadIdx.x / WARP * (WARP / 4); i0 < n; i0 += blockDim.x / 4) {
            const uint32_t i     = i0 + threadIdx.x % WARP / 4;
            const uint64_t k     = i < n ? few[i] : 0;
            uint32_t       above = 0;

#pragma unroll 4
            for (uint32_t u = t; u < n; u += 4)
                above += few[u] > k;
            above += __shfl_xor_sync(ALL_LANES, above, 1);
            above += __shfl_xor_sync(ALL_LANES, above, 2);
            if (i < n && above + 1 == want)
                m->goal[g].cut = k;
        }
    }
}

/* Both goals' cuts, when all counts have come; returns what whole_sift() does. */
static __device__ uint32_t whole_find(const whole_lane &l, whole_mem *m, whole_over *o,
                                      uint16_t **near_)
{
    const uint32_t warp = threadIdx.x / WARP;
    uint32_t       n;

    if (warp < 2 && m->goal[warp].want > 0)
        whole_narrow(l.rank, m, o, warp, true);
    __syncthreads();
    while (m->goal[0].n > WHOLE_FEW || m->goal[1].n > WHOLE_FEW)
        whole_divide(l, m, o);
    if (threadIdx.x < 2 && m->goal[threadIdx.x].n)
        bar_expect(&m->come[WHOLE_KEYS + threadIdx.x],
                   (uint32_t)sizeof(uint64_t) * m->goal[threadIdx.x].n);
    n = whole_sift(l, m, near_);
    whole_list(l, m, o, *near_, n);
    for (uint32_t g = 0; g < 2; g++)
        if (m->goal[g].n)
            bar_come(&m->come[WHOLE_KEYS + g]);
    if (m->goal[0].n <= WHOLE_EASY && m->goal[1].n <= WHOLE_EASY)
        whole_easy(m, o);
    else
        whole_hard(m, o);
    __syncthreads();
    return n;
}

#endif /* of compute capability 9.0 */

#endif
