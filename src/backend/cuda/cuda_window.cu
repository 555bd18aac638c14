/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_window.cu - the difference between a window and a selection, and the window's change: the
 * bits of cpu_window.c.  One block of threads per lane.
 *
 * Lists keep their order by sums over the block, a tile of one entry per thread after another.
 * Victims: the n least of the candidates' keys (rank, then chunk; all differ) by radix selection.
 *
 * Scratch: one key per slot and lane, where windows are too large for shared memory.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_sparse.cuh"

#define WINDOW_THREADS 1024u
#define KEY_SMEM       4096u /* slots whose keys lie in shared memory */
#define NO_VICTIM      UINT64_MAX

typedef struct window_mem {
    uint32_t stays[(KVD_SLOT_NONE + 1u) / 32u]; /* bit: the slot's chunk is selected */
    uint32_t hist[RADIX];
    uint32_t scan[WARP + 1];
    uint64_t scan2[WARP + 1];
    sp_pick  pick;
} window_mem;

typedef struct window_lane {
    uint32_t        cap, n_sel, step;
    bool            refill;
    const uint32_t *sel;
    const uint16_t *ema;
    uint16_t       *slot_of;
    uint32_t       *chunk_of, *stamp, *stay, *fetch, *into;
    uint64_t       *key; /* [cap] */
} window_lane;

uint64_t cuda_window_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    (void)be;
    return lim->n_slot <= KEY_SMEM
               ? 0
               : (uint64_t)lim->n_seq * lim->n_kv_head * lim->n_slot * sizeof(uint64_t);
}

static __device__ window_lane window_at(const kvd_window_args &a, uint32_t index)
{
    const kvd_window_seq *q = &a.seq[index / a.n_kv_head];
    const uint32_t        h = index % a.n_kv_head;
    window_lane           w;

    w.cap      = q->cap[h];
    w.n_sel    = a.select[index].n_sel;
    w.step     = q->step;
    w.refill   = q->refill;
    w.sel      = q->sel + h * a.sel_stride;
    w.ema      = q->ema + h * a.lane_stride;
    w.slot_of  = q->slot_of + h * a.lane_stride;
    w.chunk_of = q->chunk_of + h * a.slot_stride;
    w.stamp    = q->stamp + h * a.slot_stride;
    w.stay     = q->stay + h * a.slot_stride;
    w.fetch    = q->fetch + h * a.sel_stride;
    w.into     = q->into + h * a.sel_stride;
    return w;
}

/* SplitMix64's finaliser (Steele, Lea, Flood 2014). */
static __device__ uint32_t hash32(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ (x >> 31)) >> 32);
}

static __device__ uint32_t rank_of(kvd_evict_policy policy, const window_lane &w, uint32_t slot,
                                   uint32_t chunk)
{
    if (policy == KVD_EVICT_EMA)
        return w.ema[chunk];
    if (policy == KVD_EVICT_RANDOM)
        return hash32((uint64_t)w.step << 32 | chunk);
    return w.stamp[slot];
}

/* ---- the difference ---------------------------------------------------------------- */

static __device__ bool is_urgent(const kvd_window_args &a, const window_lane &w, uint32_t sel)
{
    return a.strict || w.refill || (sel & KVD_SELECT_URGENT);
}

/* Marks hits and counts misses, *urgent of them urgent ones. */
static __device__ uint32_t mark_hits(const kvd_window_args &a, const window_lane &w, window_mem *m,
                                     uint32_t *urgent)
{
    uint32_t n = 0, n_urgent = 0;
    uint64_t all;

    for (uint32_t i = threadIdx.x; i < w.n_sel; i += blockDim.x) {
        const uint32_t sel = w.sel[i], slot = w.slot_of[sel & ~KVD_SELECT_URGENT];

        if (slot == KVD_SLOT_NONE) {
            n++;
            n_urgent += is_urgent(a, w, sel);
            continue;
        }
        atomicOr(&m->stays[slot / 32], 1u << slot % 32);
        w.stamp[slot] = a.policy == KVD_EVICT_LFU ? w.stamp[slot] + 1 : w.step;
    }
    sp_block_scan((uint64_t)n << 32 | n_urgent, &all, m->scan2);
    *urgent = (uint32_t)all;
    return (uint32_t)(all >> 32);
}

/* Misses, urgent ones first, each part in the order of the selection. */
static __device__ void list_misses(const kvd_window_args &a, const window_lane &w, window_mem *m,
                                   uint32_t n_urgent)
{
    uint32_t u = 0, b = n_urgent;

    for (uint32_t i0 = 0; i0 < w.n_sel; i0 += blockDim.x) {
        const uint32_t i = i0 + threadIdx.x, sel = i < w.n_sel ? w.sel[i] : 0;
        const uint32_t chunk  = sel & ~KVD_SELECT_URGENT;
        const bool     miss   = i < w.n_sel && w.slot_of[chunk] == KVD_SLOT_NONE;
        const bool     urgent = miss && is_urgent(a, w, sel);
        uint64_t       all, at;

        at = sp_block_scan((uint64_t)(miss && !urgent) << 32 | (uint64_t)urgent, &all, m->scan2);
        if (miss)
            w.fetch[urgent ? u + (uint32_t)at : b + (uint32_t)(at >> 32)] = chunk;
        u += (uint32_t)all;
        b += (uint32_t)(all >> 32);
    }
}

/* ---- victims ----------------------------------------------------------------------- */

/* Keys of the candidates; returns how many slots are in use. */
static __device__ uint32_t list_keys(const kvd_window_args &a, const window_lane &w, window_mem *m)
{
    uint32_t used = 0, all;

    for (uint32_t s = threadIdx.x; s < w.cap; s += blockDim.x) {
        const uint32_t chunk = w.chunk_of[s];
        const bool     out   = chunk != KVD_CHUNK_NONE && !(m->stays[s / 32] >> s % 32 & 1);

        used += chunk != KVD_CHUNK_NONE;
        w.key[s] = out ? (uint64_t)rank_of(a.policy, w, s, chunk) << 32 | chunk : NO_VICTIM;
    }
    sp_block_scan(used, &all, m->scan);
    return all;
}

/* The n-th least key, or anything up to the next one. */
static __device__ uint64_t last_victim(const window_lane &w, window_mem *m, uint32_t n,
                                       uint32_t shift)
{
    uint64_t prefix = 0;

    for (;; shift -= 8) {
        for (uint32_t i = threadIdx.x; i < RADIX; i += blockDim.x)
            m->hist[i] = 0;
        __syncthreads();
        for (uint32_t s = threadIdx.x; s < w.cap; s += blockDim.x) {
            const uint64_t k = w.key[s];

            if (k != NO_VICTIM && (shift == 56 || k >> (shift + 8) == prefix))
                atomicAdd(&m->hist[k >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x < WARP)
            sp_pick_bin(m->hist, NULL, false, n, 0, &m->pick);
        __syncthreads();
        prefix = prefix << 8 | m->pick.bin;
        n -= m->pick.before;
        if (m->pick.count == n || shift == 0)
            return prefix << shift | ((1ull << shift) - 1);
        __syncthreads();
    }
}

static __device__ void evict(const kvd_window_args &a, const window_lane &w, window_mem *m,
                             uint32_t n)
{
    uint64_t last;

    if (n == 0)
        return;
    last = last_victim(w, m, n, a.policy == KVD_EVICT_EMA ? 40 : 56);
    for (uint32_t s = threadIdx.x; s < w.cap; s += blockDim.x) {
        if (w.key[s] <= last && w.key[s] != NO_VICTIM) {
            w.slot_of[(uint32_t)w.key[s]] = KVD_SLOT_NONE;
            w.chunk_of[s]                 = KVD_CHUNK_NONE;
        }
    }
    __syncthreads();
}

/* ---- the change -------------------------------------------------------------------- */

/* Lists the slots that stay and puts the misses into the empty ones; returns how many stay. */
static __device__ uint32_t admit(const kvd_window_args &a, const window_lane &w, window_mem *m,
                                 uint32_t n_miss)
{
    uint32_t n_stay = 0, n_empty = 0;

    for (uint32_t s0 = 0; s0 < w.cap; s0 += blockDim.x) {
        const uint32_t s     = s0 + threadIdx.x;
        const bool     stay  = s < w.cap && w.chunk_of[s] != KVD_CHUNK_NONE;
        const bool     empty = s < w.cap && !stay;
        uint64_t       all, at;

        at = sp_block_scan((uint64_t)empty << 32 | (uint64_t)stay, &all, m->scan2);
        if (stay)
            w.stay[n_stay + (uint32_t)at] = s;
        if (empty && n_empty + (uint32_t)(at >> 32) < n_miss) {
            const uint32_t i = n_empty + (uint32_t)(at >> 32), chunk = w.fetch[i];

            w.into[i]        = s;
            w.chunk_of[s]    = chunk;
            w.slot_of[chunk] = (uint16_t)s;
            w.stamp[s]       = a.policy == KVD_EVICT_LFU ? 1 : w.step;
        }
        n_stay += (uint32_t)all;
        n_empty += (uint32_t)(all >> 32);
    }
    return n_stay;
}

static __device__ void window_clear(const window_lane &w, window_mem *m)
{
    for (uint32_t i = threadIdx.x; i < (w.cap + 31) / 32; i += blockDim.x)
        m->stays[i] = 0;
    for (uint32_t s = threadIdx.x; w.refill && s < w.cap; s += blockDim.x) {
        const uint32_t chunk = w.chunk_of[s];

        if (chunk != KVD_CHUNK_NONE)
            w.slot_of[chunk] = KVD_SLOT_NONE;
        w.chunk_of[s] = KVD_CHUNK_NONE;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(WINDOW_THREADS)
    change_windows(const kvd_window_args a, uint64_t *keys, uint32_t slots)
{
    extern __shared__ uint64_t window_keys[];
    __shared__ window_mem      m;
    window_lane                w;
    kvd_window_result          r;
    uint32_t                   used;

    sp_begin();
    w     = window_at(a, blockIdx.x);
    w.key = keys ? keys + (uint64_t)blockIdx.x * slots : window_keys;
    window_clear(w, &m);
    r.n_miss = mark_hits(a, w, &m, &r.n_urgent);
    list_misses(a, w, &m, r.n_urgent);
    used      = list_keys(a, w, &m);
    r.n_hit   = w.n_sel - r.n_miss;
    r.n_evict = used + r.n_miss > w.cap ? used + r.n_miss - w.cap : 0;
    evict(a, w, &m, r.n_evict);
    r.n_stay = admit(a, w, &m, r.n_miss);
    if (threadIdx.x == 0)
        a.result[blockIdx.x] = r;
}

kvd_status cuda_window(kvd_stream *st, const kvd_window_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const uint32_t      n_lane = a->n_seq * a->n_kv_head, slots = be->lim.n_slot;
    const bool          inside = slots <= KEY_SMEM;
    uint64_t           *keys   = NULL;

    if (n_lane == 0)
        return KVD_OK;
    if (!inside)
        keys = (uint64_t *)cuda_scratch_of(be, CUDA_SCRATCH_WINDOW,
                                           (uint64_t)n_lane * slots * sizeof(uint64_t));
    CUDA_TRY(sp_launch(be, st->s, dim3(n_lane), WINDOW_THREADS,
                       inside ? slots * (uint32_t)sizeof(uint64_t) : 0, 1, change_windows, *a, keys,
                       slots),
             "window", err);
    return KVD_OK;
}
