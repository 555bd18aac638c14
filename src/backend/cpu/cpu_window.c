/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_window.c - the difference between a window and a selection, and the window's change.
 *
 * Integers only, so "ref" and "cpu" share it and every backend must give the same bits.
 * Invariants, per lane, before and after:
 *  (1) slot_of[c] = s exactly if chunk_of[s] = c, for slots below the lane's cap;
 *  (2) slots from the cap on are never used.
 *
 * Scratch: one ranking of candidates per thread.
 * Owns: nothing.  Thread: the backend's caller; lanes run on its pool. */
#include "backend/cpu/cpu.h"

#define LANES_ALONE 4u /* that the caller takes alone */

typedef struct window_lane {
    const kvd_window_seq *q;
    uint32_t              cap, n_sel, step;
    const uint32_t       *sel;
    const uint16_t       *ema;
    uint16_t             *slot_of;
    uint32_t             *chunk_of, *stamp, *stay, *fetch, *into;
} window_lane;

typedef struct window_job {
    const kvd_window_args *a;
    uint64_t              *ranking; /* [n_thread][slots_max] */
    uint64_t               slots_max;
} window_job;

uint64_t cpu_window_scratch_bytes(const kvd_backend *b, const kvd_backend_limits *lim)
{
    return (uint64_t)b->n_thread * lim->n_slot * sizeof(uint64_t);
}

static window_lane lane_at(const kvd_window_args *a, uint32_t seq, uint32_t head)
{
    const kvd_window_seq *q = &a->seq[seq];

    return (window_lane){ .q        = q,
                          .cap      = q->cap[head],
                          .n_sel    = a->select[seq * a->n_kv_head + head].n_sel,
                          .step     = q->step,
                          .sel      = q->sel + head * a->sel_stride,
                          .ema      = q->ema + head * a->lane_stride,
                          .slot_of  = q->slot_of + head * a->lane_stride,
                          .chunk_of = q->chunk_of + head * a->slot_stride,
                          .stamp    = q->stamp + head * a->slot_stride,
                          .stay     = q->stay + head * a->slot_stride,
                          .fetch    = q->fetch + head * a->sel_stride,
                          .into     = q->into + head * a->sel_stride };
}

/* SplitMix64's finaliser (Steele, Lea, Flood 2014). */
static uint32_t hash32(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ (x >> 31)) >> 32);
}

static uint32_t rank_of(const kvd_window_args *a, const window_lane *w, uint32_t slot)
{
    const uint32_t chunk = w->chunk_of[slot];

    switch (a->policy) {
    case KVD_EVICT_EMA:
        return w->ema[chunk]; /* not negative: binary16 orders as an integer does */
    case KVD_EVICT_LRU:
    case KVD_EVICT_LFU:
        return w->stamp[slot];
    case KVD_EVICT_RANDOM:
        return hash32((uint64_t)w->step << 32 | chunk);
    }
    return 0;
}

/* ---- victims ----------------------------------------------------------------------- */

static void forget(const window_lane *w, uint32_t slot)
{
    w->slot_of[w->chunk_of[slot]] = KVD_SLOT_NONE;
    w->chunk_of[slot]             = KVD_CHUNK_NONE;
}

/* Empties n slots of those that stay[] does not mark as selected.  A candidate is its rank and its
 * chunk in one number: the least rank leaves first, of equals the least chunk. */
static void evict(const kvd_window_args *a, const window_lane *w, uint32_t n, uint64_t *candidate)
{
    uint32_t m = 0;

    if (n == 0)
        return;
    for (uint32_t s = 0; s < w->cap; s++) {
        if (w->chunk_of[s] != KVD_CHUNK_NONE && !w->stay[s])
            candidate[m++] = (uint64_t)rank_of(a, w, s) << 32 | w->chunk_of[s];
    }
    kvd_assert(n <= m);
    kvd_select_least(candidate, m, n);
    for (uint32_t i = 0; i < n; i++)
        forget(w, w->slot_of[(uint32_t)candidate[i]]);
}

/* ---- one lane ---------------------------------------------------------------------- */

/* Marks hits in stay[]; misses go to fetch[], urgent ones first; returns used slots. */
static uint32_t compare(const kvd_window_args *a, const window_lane *w, kvd_window_result *r)
{
    uint32_t used = 0;

    for (uint32_t s = 0; s < w->cap; s++) {
        w->stay[s] = 0;
        used += w->chunk_of[s] != KVD_CHUNK_NONE;
    }
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < w->n_sel; i++) {
            const uint32_t chunk  = w->sel[i] & ~KVD_SELECT_URGENT;
            const uint32_t slot   = w->slot_of[chunk];
            const bool     urgent = a->strict || w->q->refill || w->sel[i] & KVD_SELECT_URGENT;

            if (urgent != (pass == 0))
                continue;
            if (slot == KVD_SLOT_NONE) {
                w->fetch[r->n_miss++] = chunk;
                r->n_urgent += urgent;
                continue;
            }
            w->stay[slot]  = 1;
            w->stamp[slot] = a->policy == KVD_EVICT_LFU ? w->stamp[slot] + 1 : w->step;
            r->n_hit++;
        }
    }
    return used;
}

/* Puts the misses into the empty slots, lowest first, in the order of fetch[]. */
static void admit(const kvd_window_args *a, const window_lane *w, uint32_t n)
{
    uint32_t slot = 0;

    for (uint32_t i = 0; i < n; i++) {
        while (w->chunk_of[slot] != KVD_CHUNK_NONE)
            slot++;
        kvd_assert_dbg(slot < w->cap);
        w->into[i]              = slot;
        w->chunk_of[slot]       = w->fetch[i];
        w->slot_of[w->fetch[i]] = (uint16_t)slot;
        w->stamp[slot]          = a->policy == KVD_EVICT_LFU ? 1 : w->step;
    }
}

static void window_lane_run(const kvd_window_args *a, const window_lane *w, uint64_t *ranking,
                            kvd_window_result *r)
{
    uint32_t used;

    kvd_assert(w->n_sel <= w->cap && w->cap < KVD_SLOT_NONE);
    *r = (kvd_window_result){ 0 };
    for (uint32_t s = 0; w->q->refill && s < w->cap; s++) {
        if (w->chunk_of[s] != KVD_CHUNK_NONE)
            forget(w, s);
    }
    used       = compare(a, w, r);
    r->n_evict = used + r->n_miss > w->cap ? used + r->n_miss - w->cap : 0;
    evict(a, w, r->n_evict, ranking);
    for (uint32_t s = 0; s < w->cap; s++) { /* stay[] turns from marks into a list */
        if (w->chunk_of[s] != KVD_CHUNK_NONE)
            w->stay[r->n_stay++] = s;
    }
    admit(a, w, r->n_miss);
}

static void window_item(void *ctx, uint32_t item, uint32_t thread)
{
    const window_job      *j = ctx;
    const kvd_window_args *a = j->a;
    const window_lane      w = lane_at(a, item / a->n_kv_head, item % a->n_kv_head);

    kvd_assert(w.cap <= j->slots_max);
    window_lane_run(a, &w, j->ranking + thread * j->slots_max, &a->result[item]);
}

kvd_status cpu_window(kvd_stream *st, const kvd_window_args *a, kvd_err *err)
{
    cpu_backend   *be     = st->be;
    const uint64_t each   = be->at_scratch_bytes / be->base.n_thread;
    const uint32_t n_lane = a->n_seq * a->n_kv_head;
    window_job     j = { .a = a, .ranking = be->at_scratch, .slots_max = each / sizeof(uint64_t) };

    (void)err;
    if (n_lane <= LANES_ALONE || be->base.n_thread < 2) {
        for (uint32_t i = 0; i < n_lane; i++)
            window_item(&j, i, 0);
    } else {
        os_pool_run(be->pool, n_lane, window_item, &j);
    }
    return KVD_OK;
}
