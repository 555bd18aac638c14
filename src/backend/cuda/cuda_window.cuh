/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_window.cuh - a window's change and the spans that follow from it, as a block of threads
 * makes them: kernels of their own (cuda_window.cu, cuda_window_lists.cu), or behind a selection
 * (cuda_select_finish.cu).
 *
 * Lists keep their order by sums over the block, a tile of one entry per thread after another.
 * Victims: the n least of the candidates' keys (rank, then chunk; all differ) by radix selection.
 */
#ifndef KVD_CUDA_WINDOW_CUH
#define KVD_CUDA_WINDOW_CUH

#include "backend/cuda/cuda_sparse.cuh"

#define WINDOW_KEYS 4096u /* slots whose keys lie in shared memory */
#define NO_VICTIM   UINT64_MAX

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

/* Scratch for keys where they do not fit into shared memory, else NULL. */
uint64_t *cuda_window_keys(const cuda_backend *be, uint64_t n_lane);

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

/* All threads; key: [cap] in shared memory or scratch. */
static __device__ void window_change(const kvd_window_args &a, uint32_t index, uint64_t *key,
                                     window_mem *m)
{
    window_lane       w = window_at(a, index);
    kvd_window_result r;
    uint32_t          used;

    w.key = key;
    window_clear(w, m);
    r.n_miss = mark_hits(a, w, m, &r.n_urgent);
    list_misses(a, w, m, r.n_urgent);
    used      = list_keys(a, w, m);
    r.n_hit   = w.n_sel - r.n_miss;
    r.n_evict = used + r.n_miss > w.cap ? used + r.n_miss - w.cap : 0;
    evict(a, w, m, r.n_evict);
    r.n_stay = admit(a, w, m, r.n_miss);
    if (threadIdx.x == 0)
        a.result[index] = r;
}

/* ---- spans ------------------------------------------------------------------------- */

typedef struct list_lane {
    kvd_window_seq   s;
    kvd_window_place p;
    uint32_t         at, head; /* at: number of the lane */
} list_lane;

static __device__ uint64_t list_record(const kvd_window_spans_args &a, const list_lane &l,
                                       uint32_t slot)
{
    const uint32_t per = a.kv.block_tokens / a.kv.chunk_tokens;
    uint32_t       chunk;

    if (!a.in_place)
        return l.p.at[l.head] + a.slot_off + slot * a.kv.record_bytes;
    chunk = l.s.chunk_of[l.head * a.slot_stride + slot];
    return l.p.block[chunk / per] + a.kv.lane_off + l.head * a.kv.head_stride +
           chunk % per * a.kv.record_bytes;
}

/* Whether an ascending list has it. */
static __device__ bool list_has(const uint32_t *list, uint32_t n, uint32_t x)
{
    uint32_t lo = 0;

    while (n > 0) {
        const uint32_t half = n / 2;

        if (list[lo + half] < x) {
            lo += half + 1;
            n -= half + 1;
        } else if (list[lo + half] == x) {
            return true;
        } else {
            n = half;
        }
    }
    return false;
}

/* Selected chunks that are no misses, in their order; returns how many. */
static __device__ uint32_t list_selected(const kvd_window_spans_args &a, const list_lane &l,
                                         uint64_t *out, uint32_t *mem)
{
    const kvd_window_result r       = a.change[l.at];
    const uint32_t         *sel     = l.s.sel + l.head * a.sel_stride;
    const uint32_t         *fetch   = l.s.fetch + l.head * a.sel_stride;
    const uint16_t         *slot_of = l.s.slot_of + l.head * a.lane_stride;
    const uint32_t          n_sel   = a.select[l.at].n_sel;
    uint32_t                n       = 0;

    for (uint32_t first = 0; first < n_sel; first += blockDim.x) {
        const uint32_t i     = first + threadIdx.x;
        const uint32_t chunk = i < n_sel ? sel[i] & ~KVD_SELECT_URGENT : 0;
        const bool     hit   = i < n_sel && !list_has(fetch, r.n_urgent, chunk) &&
                         !list_has(fetch + r.n_urgent, r.n_miss - r.n_urgent, chunk);
        uint32_t       all;
        const uint32_t before = sp_block_scan<uint32_t>(hit, &all, mem);

        if (hit)
            out[n + before] = list_record(a, l, slot_of[chunk]);
        n += all;
        __syncthreads();
    }
    return n;
}

/* All threads, after the lane's change is seen. */
static __device__ void window_list(const kvd_window_spans_args &a, uint32_t index, uint32_t *mem)
{
    list_lane         l;
    kvd_window_result r;
    uint64_t         *near_, *urgent;
    const uint32_t   *stay, *into;
    uint32_t          n;

    l.at   = index;
    l.head = l.at % a.n_kv_head;
    l.s    = a.seq[l.at / a.n_kv_head];
    l.p    = a.place[l.at / a.n_kv_head];
    r      = a.change[l.at];
    near_  = a.near + l.at * a.list_stride;
    urgent = a.urgent + l.at * a.list_stride;
    stay   = l.s.stay + l.head * a.slot_stride;
    into   = l.s.into + l.head * a.sel_stride;
    n      = r.n_stay;
    if (a.selected)
        n = list_selected(a, l, near_, mem);
    for (uint32_t i = threadIdx.x; i < n && !a.selected; i += blockDim.x)
        near_[i] = list_record(a, l, stay[i]);
    for (uint32_t i = threadIdx.x; i < r.n_urgent; i += blockDim.x)
        urgent[i] = list_record(a, l, into[i]);
    if (threadIdx.x == 0) {
        kvd_attn_span s = {};

        s.record            = near_;
        s.n_record          = n;
        a.near_span[l.at]   = s;
        s.record            = urgent;
        s.n_record          = r.n_urgent;
        a.urgent_span[l.at] = s;
    }
}

#endif
