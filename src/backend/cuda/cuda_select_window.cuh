/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_window.cuh - the stages of cuda_select_whole.cu behind the k-th best chunk: lists of
 * what is selected and missed, and the window's change, which is the first block's.
 *
 * Of a window's slot the first block knows a number: WHOLE_EMPTY, or the chunk with WHOLE_STAYS
 * where that is selected, else with its place in the order of victims above it. */
#ifndef KVD_CUDA_SELECT_WINDOW_CUH
#define KVD_CUDA_SELECT_WINDOW_CUH

#include "backend/cuda/cuda_select_cut.cuh"

#define WHOLE_STAYS 0x80000000u
#define WHOLE_EMPTY UINT64_MAX

#define FATE_SEL    1u
#define FATE_URGENT 2u /* flagged so in the selection */
#define FATE_MISS   4u
#define FATE_BITS   3u

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* ---- 4: what is selected ----------------------------------------------------------------- */

/* Three numbers of up to 4 x 32: selected, urgent misses, other misses. */
static __device__ __forceinline__ uint32_t whole_pack(uint32_t sel, uint32_t urgent, uint32_t bulk)
{
    return sel | urgent << 10 | bulk << 20;
}

static __device__ __forceinline__ uint32_t whole_packed(uint32_t x, uint32_t i)
{
    return x >> 10 * i & 1023u;
}

/* How misses are told from each other. */
static __device__ __forceinline__ bool whole_all_urgent(const whole_job &f, const whole_mem *m)
{
    return f.change.strict || m->window.refill;
}

static __device__ __forceinline__ uint32_t whole_digit_shift(const whole_job &f)
{
    return f.change.policy == KVD_EVICT_EMA ? 38 : 55; /* averages have 15 bits */
}

/* One of the window's slots, which go round the blocks: its chunk, and that's key and average. */
typedef struct whole_slot {
    uint32_t slot, chunk, key, ema;
} whole_slot;

static __device__ __forceinline__ whole_slot whole_slot_at(const whole_job &f, const whole_lane &l,
                                                           const whole_mem *m, uint32_t i)
{
    whole_slot s = { i * l.n_rank + l.rank, KVD_CHUNK_NONE, 0, 0 };

    if (f.window && s.slot < m->cap)
        s.chunk = m->window.chunk_of[l.head * f.change.slot_stride + s.slot];
    return s;
}

/* When all blocks have their keys.  A chunk that cannot be selected has none. */
static __device__ __forceinline__ void whole_slot_look(const whole_job &f, const whole_lane &l,
                                                       const whole_mem *m, whole_slot *s)
{
    uint32_t       at = s->chunk - l.base0;
    const uint32_t r  = at / l.each;

    if (s->chunk >= m->seq.n_chunk)
        return;
    if (s->chunk < l.first) {
        s->ema = m->window.ema[l.head * f.change.lane_stride + s->chunk];
        return;
    }
    at -= r * l.each;
    s->key = *sp_peer(whole_keys(l, at / WHOLE_EACH) + at % WHOLE_EACH, r);
    s->ema = *sp_peer(whole_more(l, at / WHOLE_EACH)->ema + at % WHOLE_EACH, r);
}

/* A chunk's place in an order of victims that is not by averages. */
static __device__ __noinline__ uint32_t whole_order(kvd_evict_policy policy, uint32_t step,
                                                    uint32_t stamp, uint32_t chunk)
{
    return policy == KVD_EVICT_RANDOM ? hash32((uint64_t)step << 32 | chunk) : stamp;
}

/* Tells the first block what becomes of it; returns whether the chunk may go. */
static __device__ __forceinline__ bool whole_slot_tell(const whole_job &f, const whole_lane &l,
                                                       whole_mem *m, const whole_slot &s)
{
    const kvd_evict_policy policy = f.change.policy;
    uint32_t              *stamp  = m->window.stamp + l.head * f.change.slot_stride + s.slot;
    bool                   sel;
    uint64_t               x;

    if (s.chunk == KVD_CHUNK_NONE)
        return false;
    if (m->window.refill) {
        m->window.slot_of[l.head * f.change.lane_stride + s.chunk] = KVD_SLOT_NONE;
        return false;
    }
    sel = s.key && whole_key(s.key, s.chunk) >= m->goal[0].cut;
    x   = policy == KVD_EVICT_EMA ? s.ema : whole_order(policy, m->window.step, *stamp, s.chunk);
    x   = sel ? WHOLE_STAYS | s.chunk : x << 32 | s.chunk;
    *sp_peer(l.slot + s.slot, 0) = x;
    if (sel)
        *stamp = policy == KVD_EVICT_LFU ? *stamp + 1 : m->window.step;
    else
        atomicAdd(sp_peer(&m->out[x >> whole_digit_shift(f) & (WHOLE_BINS - 1)], 0), 1);
    return !sel;
}

/* All of this block's slots, of which s is this thread's first; returns how many may go. */
static __device__ __forceinline__ uint32_t whole_slots_tell(const whole_job &f, const whole_lane &l,
                                                            whole_mem *m, whole_slot s)
{
    uint32_t n = 0;

#pragma unroll 1
    for (uint32_t i = threadIdx.x;;) {
        n += whole_slot_tell(f, l, m, s);
        i += blockDim.x;
        if (!f.window || i * l.n_rank >= m->cap)
            return n;
        s = whole_slot_at(f, l, m, i);
        whole_slot_look(f, l, m, &s);
    }
}

/* The fates of a quad; mass is added to. */
static __device__ __forceinline__ uint32_t whole_fates(const whole_job &f, const whole_lane &l,
                                                       const whole_mem *m, uint32_t quad,
                                                       uint64_t *mass)
{
    const uint64_t    cut = m->goal[0].cut, urgent = m->goal[1].cut;
    const uint4       v      = *(const uint4 *)whole_keys(l, quad);
    const uint32_t    key[4] = { v.x, v.y, v.z, v.w };
    const whole_rest *r      = whole_more(l, quad);
    uint32_t          fate   = 0;

#pragma unroll
    for (uint32_t e = 0; e < WHOLE_EACH; e++) {
        const uint64_t k = whole_key(key[e], l.base + WHOLE_EACH * quad + e);
        uint32_t       x = FATE_SEL;

        if (!key[e] || k < cut)
            continue;
        if (k >= urgent)
            x |= FATE_URGENT;
        if (f.window && (m->window.refill || r->u.slot_of[e] == KVD_SLOT_NONE))
            x |= FATE_MISS;
        fate |= x << FATE_BITS * e;
        *mass += select_mass(key[e]);
    }
    return fate;
}

/* How many of each kind a thread's four chunks are. */
static __device__ __forceinline__ uint32_t whole_kinds(uint32_t fate, bool all_urgent)
{
    const uint32_t ones   = 1u | 1u << FATE_BITS | 1u << 2 * FATE_BITS | 1u << 3 * FATE_BITS;
    const uint32_t miss   = fate >> 2 & ones;
    const uint32_t urgent = all_urgent ? miss : miss & fate >> 1;

    return whole_pack(__popc(fate & ones), __popc(urgent), __popc(miss & ~urgent));
}

/* Fates of the warp's n quads, and how many of each kind stand before each in its step, and in the
 * warp; of slots too. */
static __device__ void whole_counts(const whole_job &f, const whole_lane &l, whole_mem *m,
                                    const uint16_t *near_, uint32_t n, const whole_slot &slot)
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool     all_urgent = f.window && whole_all_urgent(f, m);
    uint32_t       sum[3]     = { 0, 0, 0 }, n_out;
    uint64_t       mass       = 0;

#pragma unroll 1
    for (uint32_t u0 = 0; u0 < n; u0 += WARP) {
        const uint32_t quad = u0 + lane < n ? near_[u0 + lane] : 0;
        const uint32_t fate = u0 + lane < n ? whole_fates(f, l, m, quad, &mass) : 0;
        const uint32_t mine = whole_kinds(fate, all_urgent);
        const uint32_t x    = whole_lanes(mine);
        const uint32_t all  = __shfl_sync(ALL_LANES, x, WARP - 1);

        if (u0 + lane < n)
            *(uint2 *)&whole_more(l, quad)->u.sel = make_uint2(x - mine, fate);
        for (uint32_t k = 0; k < 3; k++)
            sum[k] += whole_packed(all, k);
    }
    mass  = whole_add64(mass);
    n_out = __reduce_add_sync(ALL_LANES, whole_slots_tell(f, l, m, slot));
    if (lane == 0) {
        for (uint32_t k = 0; k < 3; k++)
            m->n[k][warp] = sum[k];
        m->mass[warp]  = mass;
        m->n_out[warp] = n_out;
    }
}

/* Of the first n of this block's warps. */
static __device__ __forceinline__ whole_count whole_before(const whole_mem *m, uint32_t n)
{
    const uint32_t lane = threadIdx.x % WARP;
    whole_count    c    = {};

    c.n_sel    = __reduce_add_sync(ALL_LANES, lane < n ? m->n[0][lane] : 0);
    c.n_urgent = __reduce_add_sync(ALL_LANES, lane < n ? m->n[1][lane] : 0);
    c.n_bulk   = __reduce_add_sync(ALL_LANES, lane < n ? m->n[2][lane] : 0);
    return c;
}

/* One warp: gives all blocks this one's counts. */
static __device__ void whole_share(const whole_lane &l, whole_mem *m)
{
    const uint32_t lane   = threadIdx.x % WARP;
    const uint32_t n_warp = blockDim.x / WARP;
    whole_count    c      = whole_before(m, n_warp);

    c.mass  = whole_add64(lane < n_warp ? m->mass[lane] : 0);
    c.n_out = __reduce_add_sync(ALL_LANES, lane < n_warp ? m->n_out[lane] : 0);
    if (lane < l.n_rank) {
        const uint32_t to = bar_peer(&m->block[l.rank], lane);
        const uint32_t by = bar_peer(&m->come[WHOLE_SHARES], lane);

        bar_send4(to, by, make_uint4(c.n_sel, c.n_urgent, c.n_bulk, c.n_out));
        bar_send4(to + 16, by, make_uint4((uint32_t)c.mass, (uint32_t)(c.mass >> 32), 0, 0));
    }
}

/* ---- 5: lists -------------------------------------------------------------------------- */

/* Of all blocks, and of those before this one. */
static __device__ __forceinline__ whole_count whole_blocks(const whole_lane &l, whole_mem *m,
                                                           whole_count *before)
{
    const uint32_t lane = threadIdx.x % WARP;
    const bool     mine = lane < l.rank;
    whole_count    c;

    bar_come(&m->come[WHOLE_SHARES]);
    c = lane < l.n_rank ? m->block[lane] : whole_count{};

    before->n_sel    = __reduce_add_sync(ALL_LANES, mine ? c.n_sel : 0);
    before->n_urgent = __reduce_add_sync(ALL_LANES, mine ? c.n_urgent : 0);
    before->n_bulk   = __reduce_add_sync(ALL_LANES, mine ? c.n_bulk : 0);
    c.n_sel          = __reduce_add_sync(ALL_LANES, c.n_sel);
    c.n_urgent       = __reduce_add_sync(ALL_LANES, c.n_urgent);
    c.n_bulk         = __reduce_add_sync(ALL_LANES, c.n_bulk);
    c.n_out          = __reduce_add_sync(ALL_LANES, c.n_out);
    c.mass           = whole_add64(c.mass);
    return c;
}

/* A thread's four chunks into the lists; at: where the first of each kind goes. */
static __device__ void whole_put(const whole_job &f, const whole_lane &l, const whole_mem *m,
                                 uint32_t chunk, uint32_t fate, whole_count at)
{
    const bool all_urgent = f.window && whole_all_urgent(f, m);
    uint32_t  *sel        = m->seq.sel + l.head * f.j.a.sel_stride;

#pragma unroll 1
    for (uint32_t e = 0; fate; e++, fate >>= FATE_BITS) {
        const bool urgent = fate & FATE_URGENT;
        uint32_t   i;

        if (fate & FATE_SEL)
            sel[at.n_sel++] = (chunk + e) | (urgent ? KVD_SELECT_URGENT : 0);
        if (!(fate & FATE_MISS))
            continue;
        i = all_urgent || urgent ? at.n_urgent++ : at.n_bulk++;
        m->window.fetch[l.head * f.change.sel_stride + i] = chunk + e;
        if (i < f.slots)
            *sp_peer(l.miss + i, 0) = chunk + e;
    }
}

/* The selection and the misses of the warp's n quads, in their order; at: what all blocks and warps
 * before have of each kind. */
static __device__ void whole_lists(const whole_job &f, const whole_lane &l, const whole_mem *m,
                                   const uint16_t *near_, uint32_t n, whole_count at)
{
    const uint32_t lane       = threadIdx.x % WARP;
    const bool     all_urgent = f.window && whole_all_urgent(f, m);

#pragma unroll 1
    for (uint32_t u0 = 0; u0 < n; u0 += WARP) {
        const uint32_t quad   = u0 + lane < n ? near_[u0 + lane] : 0;
        const uint32_t fate   = u0 + lane < n ? whole_more(l, quad)->u.sel.fate : 0;
        const uint32_t before = u0 + lane < n ? whole_more(l, quad)->u.sel.before : 0;
        const uint32_t all    = __reduce_add_sync(ALL_LANES, whole_kinds(fate, all_urgent));
        whole_count    mine   = at;

        mine.n_sel += whole_packed(before, 0);
        mine.n_urgent += whole_packed(before, 1);
        mine.n_bulk += whole_packed(before, 2);
        if (fate)
            whole_put(f, l, m, l.base + WHOLE_EACH * quad, fate, mine);
        at.n_sel += whole_packed(all, 0);
        at.n_urgent += whole_packed(all, 1);
        at.n_bulk += whole_packed(all, 2);
    }
}

/* Where a warp's part of the lists begins; blocks: what those before this one have, all: all. */
static __device__ __forceinline__ whole_count whole_begin(const whole_mem   *m,
                                                          const whole_count &blocks,
                                                          const whole_count &all)
{
    whole_count c = whole_before(m, threadIdx.x / WARP);

    c.n_sel += blocks.n_sel;
    c.n_urgent += blocks.n_urgent;
    c.n_bulk += blocks.n_bulk + all.n_urgent;
    return c;
}

static __device__ void whole_result(const select_job &j, const whole_lane &l, const whole_mem *m,
                                    const whole_count &all)
{
    kvd_select_result r = { all.n_sel, select_n_urgent(all.n_sel), 0.0f, 0.0f };

#pragma unroll 1
    for (uint32_t h = 0; h < j.group; h++)
        r.kept += m->kept[h];
    r.mass              = __fadd_rn(r.kept, __ull2float_rn(all.mass) * 0x1p-40f);
    j.a.result[l.index] = r;
}

/* ---- victims ------------------------------------------------------------------------------ */

static __device__ __forceinline__ bool whole_may_go(uint64_t slot)
{
    return !(slot & WHOLE_STAYS); /* an empty one has all bits */
}

/* Slots that may go, with what is known of the n-th least one, counted by the next digit: bits
 * [next, shift). */
static __device__ __noinline__ void whole_again(const uint64_t *slot, whole_mem *m, uint64_t prefix,
                                                uint32_t shift, uint32_t next)
{
    for (uint32_t b = threadIdx.x; b < WHOLE_BINS; b += blockDim.x)
        m->out[b] = 0;
    __syncthreads();
    for (uint32_t s = threadIdx.x; s < m->cap; s += blockDim.x) {
        const uint64_t x = slot[s];

        if (whole_may_go(x) && x >> shift == prefix)
            atomicAdd(&m->out[x >> next & ((1u << (shift - next)) - 1)], 1);
    }
    __syncthreads();
}

/* The n-th least of the slots that may go: by digits until few have them, then among those. */
static __device__ uint64_t whole_last(const whole_job &f, const whole_lane &l, whole_mem *m,
                                      whole_over *o, uint32_t n)
{
    uint32_t  shift = whole_digit_shift(f), width = 9, next;
    uint64_t *few = o->few[0], prefix = 0;

#pragma unroll 1
    for (;; shift = next) {
        if (threadIdx.x < WARP)
            whole_pick(m->out, false, n, &m->pick[0]);
        else if (threadIdx.x == WARP)
            m->n_few[0] = 0;
        __syncthreads();
        prefix = prefix << width | m->pick[0].bin;
        n -= m->pick[0].before;
        if (m->pick[0].count <= WHOLE_FEW)
            break;
        next  = shift > 9 ? shift - 9 : 0;
        width = shift - next;
        whole_again(l.slot, m, prefix, shift, next);
    }
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < m->cap; s += blockDim.x)
        if (whole_may_go(l.slot[s]) && l.slot[s] >> shift == prefix)
            few[atomicAdd(&m->n_few[0], 1)] = ~l.slot[s];
    __syncthreads();
    whole_rank(few, m->pick[0].count, n, threadIdx.x, blockDim.x, &m->last);
    __syncthreads();
    return ~m->last;
}

/* n victims leave. */
static __device__ void whole_evict(const whole_job &f, const whole_lane &l, whole_mem *m,
                                   whole_over *o, uint32_t n)
{
    uint16_t      *slot_of  = m->window.slot_of + l.head * f.change.lane_stride;
    uint32_t      *chunk_of = m->window.chunk_of + l.head * f.change.slot_stride;
    const uint64_t last     = whole_last(f, l, m, o, n);

#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < m->cap; s += blockDim.x) {
        const uint64_t x = l.slot[s];

        if (whole_may_go(x) && x <= last) {
            slot_of[(uint32_t)x] = KVD_SLOT_NONE;
            chunk_of[s]          = KVD_CHUNK_NONE;
            l.slot[s]            = WHOLE_EMPTY;
        }
    }
    __syncthreads();
}

/* ---- the window ----------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t whole_record(const whole_job &f, const whole_lane &l,
                                                        const whole_mem *m, uint32_t slot,
                                                        uint32_t chunk)
{
    const kvd_window_spans_args &a   = f.spans;
    const uint32_t               per = a.kv.block_tokens / a.kv.chunk_tokens;

    if (!a.in_place)
        return m->at + slot * a.kv.record_bytes;
    return m->place.block[chunk / per] + a.kv.lane_off + l.head * a.kv.head_stride +
           chunk % per * a.kv.record_bytes;
}

/* Miss i takes the empty slot s. */
static __device__ __forceinline__ void whole_admit(const whole_job &f, const whole_lane &l,
                                                   const whole_mem *m, uint32_t s, uint32_t i,
                                                   uint32_t chunk)
{
    const uint64_t slots = l.head * f.change.slot_stride;

    m->window.into[l.head * f.change.sel_stride + i]         = s;
    m->window.chunk_of[slots + s]                            = chunk;
    m->window.stamp[slots + s]                               = m->window.step;
    m->window.slot_of[l.head * f.change.lane_stride + chunk] = (uint16_t)s;
    if (f.change.policy == KVD_EVICT_LFU)
        m->window.stamp[slots + s] = 1;
}

/* Slots in their order: those that stay are listed, misses go into the empty ones.  Returns how
 * many stay. */
static __device__ uint32_t whole_settle(const whole_job &f, const whole_lane &l, whole_mem *m,
                                        const kvd_window_result &r)
{
    const uint32_t lane = threadIdx.x % WARP, below = (1u << lane) - 1, warp = threadIdx.x / WARP;
    const uint32_t run   = (m->cap + blockDim.x - 1) / blockDim.x * WARP;
    const uint32_t first = min(warp * run, m->cap), end = min(first + run, m->cap);
    uint32_t      *stay   = m->window.stay + l.head * f.change.slot_stride;
    uint64_t      *near_  = f.spans.near + l.index * f.spans.list_stride;
    uint64_t      *urgent = f.spans.urgent + l.index * f.spans.list_stride;
    uint32_t       n_stay = 0, n_empty, all;

#pragma unroll 1
    for (uint32_t s = first + lane; s < end; s += WARP)
        n_stay += l.slot[s] != WHOLE_EMPTY;
    n_stay = __reduce_add_sync(ALL_LANES, n_stay);
    if (lane == 0)
        m->list[warp] = n_stay;
    __syncthreads();
    all     = __reduce_add_sync(ALL_LANES, lane < blockDim.x / WARP ? m->list[lane] : 0);
    n_stay  = __reduce_add_sync(ALL_LANES, lane < warp ? m->list[lane] : 0);
    n_empty = first - n_stay;
#pragma unroll 1
    for (uint32_t s0 = first; s0 < end; s0 += WARP) {
        const uint32_t s      = s0 + lane;
        const uint64_t x      = s < end ? l.slot[s] : WHOLE_EMPTY;
        const bool     stays  = x != WHOLE_EMPTY;
        const uint32_t stayed = __ballot_sync(ALL_LANES, stays);
        const uint32_t empty  = __ballot_sync(ALL_LANES, s < end && !stays);
        const uint32_t i =
            stays ? n_stay + __popc(stayed & below) : n_empty + __popc(empty & below);
        const bool come  = !stays && s < end && i < r.n_miss;
        uint32_t   chunk = (uint32_t)x & ~WHOLE_STAYS;

        if (stays)
            stay[i] = s;
        if (come) {
            chunk = l.miss[i];
            whole_admit(f, l, m, s, i, chunk);
        } else if (!stays && s < end && m->window.refill) {
            m->window.chunk_of[l.head * f.change.slot_stride + s] = KVD_CHUNK_NONE;
        }
        if ((stays && !f.spans.selected) || (come && i < r.n_urgent))
            (stays ? near_ : urgent)[i] = whole_record(f, l, m, s, chunk);
        n_stay += __popc(stayed);
        n_empty += __popc(empty);
    }
    return all;
}

/* Spans of the selection alone. */
static __device__ __noinline__ void whole_selected(const whole_job *f, uint32_t index,
                                                   uint32_t *mem)
{
    window_list(f->spans, index, mem);
}

/* The first block: the window's change and its spans; all: of all blocks. */
static __device__ void whole_change(const whole_job &f, const whole_lane &l, whole_mem *m,
                                    whole_over *o, const whole_count &all)
{
    const kvd_window_spans_args &a = f.spans;
    kvd_window_result            r = {};
    uint32_t                     used;

    r.n_urgent = all.n_urgent;
    r.n_miss   = all.n_urgent + all.n_bulk;
    r.n_hit    = all.n_sel - r.n_miss;
    used       = r.n_hit + all.n_out;
    r.n_evict  = used + r.n_miss > m->cap ? used + r.n_miss - m->cap : 0;
    if (r.n_evict)
        whole_evict(f, l, m, o, r.n_evict);
    sp_cluster_wait(); /* 5 */
    r.n_stay = whole_settle(f, l, m, r);
    if (threadIdx.x == 0) {
        kvd_attn_span s = {};

        f.change.result[l.index] = r;
        s.record                 = a.near + l.index * a.list_stride;
        s.n_record               = r.n_stay;
        a.near_span[l.index]     = s;
        s.record                 = a.urgent + l.index * a.list_stride;
        s.n_record               = r.n_urgent;
        a.urgent_span[l.index]   = s;
    }
    __syncthreads();
    if (a.selected)
        whole_selected(&f, l.index, m->list);
}

#endif /* of compute capability 9.0 */

#endif
