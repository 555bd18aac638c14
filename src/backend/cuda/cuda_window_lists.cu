/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_window_lists.cu - what a window's change means for records: spans to attend to, misses to
 * bring up from pinned memory.  All counts are read on the device.
 *
 * The gather runs on few blocks with many bytes in flight: that fills PCIe, and more would only
 * take processors from what runs beside it (see cuda_record.cu).
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_record.cuh"

#define LIST_THREADS  256u
#define POST_THREADS  1024u
#define FETCH_THREADS 512u
#define FETCH_GRID    8u
#define FETCH_SMEM    32768u

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
                                         uint64_t *out)
{
    __shared__ uint32_t     mem[WARP + 1];
    const kvd_window_result r       = a.change[l.at];
    const uint32_t         *sel     = l.s.sel + l.head * a.sel_stride;
    const uint32_t         *fetch   = l.s.fetch + l.head * a.sel_stride;
    const uint16_t         *slot_of = l.s.slot_of + l.head * a.lane_stride;
    const uint32_t          n_sel   = a.select[l.at].n_sel;
    uint32_t                n       = 0;

    for (uint32_t first = 0; first < n_sel; first += LIST_THREADS) {
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

static __global__ void __launch_bounds__(LIST_THREADS)
    list_spans(const __grid_constant__ kvd_window_spans_args a)
{
    list_lane         l;
    kvd_window_result r;
    uint64_t         *near_, *urgent;
    const uint32_t   *stay, *into;
    uint32_t          n;

    sp_begin();
    l.at   = blockIdx.x;
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
        n = list_selected(a, l, near_);
    for (uint32_t i = threadIdx.x; i < n && !a.selected; i += LIST_THREADS)
        near_[i] = list_record(a, l, stay[i]);
    for (uint32_t i = threadIdx.x; i < r.n_urgent; i += LIST_THREADS)
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

kvd_status cuda_window_spans(kvd_stream *st, const kvd_window_spans_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);

    if (a->n_seq == 0)
        return KVD_OK;
    CUDA_TRY(sp_launch(be, st->s, dim3(a->n_seq * a->n_kv_head), LIST_THREADS, 0, 1, list_spans,
                       *a),
             "window_spans", err);
    return KVD_OK;
}

/* ---- post -------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t post_clock()
{
    uint64_t t;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* One warp: of a lane's misses [i0, i0 + 32) those of one queue that are below the host tier. */
static __device__ void post_some(const kvd_window_post_args &a, const kvd_miss_link &l, uint32_t at,
                                 uint32_t i, bool mine, uint32_t first, uint32_t *n)
{
    const kvd_window_seq &q     = a.seq[at / a.n_kv_head];
    const uint64_t        miss  = at % a.n_kv_head * a.sel_stride + i;
    const uint32_t        mask  = __ballot_sync(0xffffffffu, mine);
    uint32_t              place = 0;
    kvd_miss_request      r;

    if (mask == 0)
        return;
    if (threadIdx.x % WARP == 0)
        place = atomicAdd(n, (uint32_t)__popc(mask));
    place = __shfl_sync(0xffffffffu, place, 0) +
            (uint32_t)__popc(mask & ((1u << threadIdx.x % WARP) - 1u));
    if (!mine)
        return;
    r.lane                   = a.first_lane + at;
    r.chunk                  = q.fetch[miss];
    r.slot                   = q.into[miss];
    r.score                  = q.ema[at % a.n_kv_head * a.lane_stride + r.chunk];
    l.request[first + place] = r;
}

static __device__ void post_lane(const kvd_window_post_args &a, uint32_t at, const uint32_t *first,
                                 uint32_t *n)
{
    const kvd_window_result r       = a.change[at];
    const uint32_t          head    = at % a.n_kv_head;
    const uint32_t         *fetch   = a.seq[at / a.n_kv_head].fetch + head * a.sel_stride;
    const uint32_t         *host_of = a.place[at / a.n_kv_head].host_of + head * a.lane_stride;

    for (uint32_t i0 = 0; i0 < r.n_miss; i0 += WARP) {
        const uint32_t i     = i0 + threadIdx.x % WARP;
        const bool     below = i < r.n_miss && host_of[fetch[i]] == KVD_HOST_NONE;

        post_some(a, a.link[0], at, i, below && i < r.n_urgent, first[0], &n[0]);
        post_some(a, a.link[1], at, i, below && i >= r.n_urgent, first[1], &n[1]);
    }
}

static __device__ void post_end(const kvd_miss_link &l, uint32_t first, uint32_t n)
{
    kvd_miss_batch b;

    b.first                                      = first;
    b.n                                          = n;
    *l.batch                                     = b;
    l.state->posted                              = first + n;
    ((volatile kvd_miss_queue *)l.queue)->posted = first + n;
}

/* One block, a warp for each lane.  The order of requests is that in which warps come. */
static __global__ void __launch_bounds__(POST_THREADS)
    post_misses(const __grid_constant__ kvd_window_post_args a)
{
    __shared__ uint32_t first[2], n[2];

    sp_begin();
    if (threadIdx.x == 0) {
        first[0] = a.link[0].state->posted;
        first[1] = a.link[1].state->posted;
        n[0] = n[1] = 0;
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x / WARP; at < a.n_seq * a.n_kv_head; at += POST_THREADS / WARP)
        post_lane(a, at, first, n);
    __threadfence_system(); /* what is posted can be read */
    __syncthreads();
    if (threadIdx.x == 0) {
        post_end(a.link[0], first[0], n[0]);
        post_end(a.link[1], first[1], n[1]);
    }
}

kvd_status cuda_window_post(kvd_stream *st, const kvd_window_post_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);

    if (a->n_seq == 0)
        return KVD_OK;
    CUDA_TRY(sp_launch(be, st->s, dim3(1), POST_THREADS, 0, 1, post_misses, *a), "window_post",
             err);
    return KVD_OK;
}

/* ---- fetch ------------------------------------------------------------------------- */

/* Host record number `record` of a lane's chunk to its slot. */
static __device__ void fetch_record(const kvd_window_fetch_args &a, const record_shape &s,
                                    const kvd_window_place &p, uint32_t head, uint32_t chunk,
                                    uint32_t slot, uint32_t record, uint8_t *packed)
{
    const uint32_t per   = a.kv.block_tokens / a.kv.chunk_tokens;
    const uint64_t bytes = a.format.type == KVD_RECORD_RAW ? a.kv.record_bytes : s.packed;
    const uint8_t *src   = (const uint8_t *)a.host + record * bytes;
    uint8_t       *dst = (uint8_t *)a.kv.pool + p.at[head] + a.slot_off + slot * a.kv.record_bytes;

    if (a.format.type == KVD_RECORD_RAW)
        copy_record(src, dst, bytes);
    else
        unpack_record(s, chunk % per, src,
                      (const uint8_t *)a.param + p.iblock[chunk / per] + a.param_off +
                          head * a.param_stride,
                      dst, packed);
}

/* Number i of a lane's misses, unless it is below the host tier. */
static __device__ void fetch_miss(const kvd_window_fetch_args &a, const record_shape &s,
                                  uint32_t at, uint32_t i, uint8_t *packed)
{
    const kvd_window_seq   &q      = a.seq[at / a.n_kv_head];
    const kvd_window_place &p      = a.place[at / a.n_kv_head];
    const uint32_t          head   = at % a.n_kv_head;
    const uint32_t          chunk  = q.fetch[head * a.sel_stride + i];
    const uint32_t          record = p.host_of[head * a.lane_stride + chunk];

    if (record != KVD_HOST_NONE)
        fetch_record(a, s, p, head, chunk, q.into[head * a.sel_stride + i], record, packed);
}

/* Until request i's record is there; returns how many there are then, or 0: nothing more will
 * come.  One thread of a block. */
static __device__ uint32_t fetch_wait(const kvd_miss_link &l, uint32_t i)
{
    volatile kvd_miss_queue *q    = l.queue;
    const uint64_t           t0   = post_clock();
    uint32_t                 n    = q->arrived;
    const bool               wait = n <= i;

    while (n <= i) {
        if (q->given_up || q->too_late)
            return 0;
        if (post_clock() - t0 > l.limit_ns) {
            q->too_late = true;
            return 0;
        }
        __nanosleep(500);
        n = q->arrived;
    }
    if (blockIdx.x == 0 && wait) {
        q->n_wait  = ++l.state->n_wait;
        q->wait_ns = l.state->wait_ns += post_clock() - t0;
    }
    __threadfence_system(); /* what lies there was written before */
    return n;
}

/* One warp: request i's record, which is there, to its slot. */
static __device__ void fetch_request(const kvd_window_fetch_args &a, const record_shape &s,
                                     uint32_t i, uint8_t *packed)
{
    const kvd_miss_link   &l    = a.link;
    const kvd_miss_request r    = l.request[i];
    const uint32_t         at   = r.lane - a.first_lane;
    const uint32_t         from = l.place[i % l.n_place];
    uint32_t               n;

    fetch_record(a, s, a.place[at / a.n_kv_head], at % a.n_kv_head, r.chunk, r.slot, from, packed);
    __threadfence(); /* before others may write there */
    __syncwarp();
    if (threadIdx.x % WARP != 0)
        return;
    n = atomicAdd(&l.state->taken, 1u) + 1;
    if (n % l.n_place == 0) {
        __threadfence_system();
        ((volatile kvd_miss_queue *)l.queue)->taken = n;
    }
}

/* What was asked for, as it comes, in groups of as many requests as a block has warps. */
static __device__ void fetch_posted(const kvd_window_fetch_args &a, const record_shape &s,
                                    uint8_t *packed)
{
    __shared__ uint32_t  come;
    const kvd_miss_batch b      = *a.link.batch;
    const uint32_t       n_warp = blockDim.x / WARP, warp = threadIdx.x / WARP;
    const uint32_t       end = b.first + b.n;

    for (uint32_t g = b.first + blockIdx.x * n_warp; g < end; g += gridDim.x * n_warp) {
        const uint32_t size = min(n_warp, end - g);

        for (uint32_t done = 0, to; done < size; done = to) {
            if (threadIdx.x == 0)
                come = fetch_wait(a.link, g + done);
            __syncthreads();
            if (come == 0)
                return;
            to = min(come - g, size);
            if (warp >= done && warp < to)
                fetch_request(a, s, g + warp, packed);
            __syncthreads();
        }
    }
}

/* The lanes' misses, one behind the other, go round the warps. */
static __global__ void fetch_misses(const __grid_constant__ kvd_window_fetch_args a,
                                    const __grid_constant__ record_shape s, uint32_t each)
{
    extern __shared__ uint4 fetch_mem[];
    uint8_t                *packed = (uint8_t *)fetch_mem + threadIdx.x / WARP * each;
    const uint32_t          n_warp = gridDim.x * (blockDim.x / WARP);
    const uint32_t          warp   = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    uint32_t                before = 0; /* misses of the lanes before, modulo n_warp */

    sp_begin();
    for (uint32_t at = 0; at < a.n_seq * a.n_kv_head; at++) {
        const kvd_window_result r     = a.change[at];
        const uint32_t          first = a.urgent ? 0 : r.n_urgent;
        const uint32_t          n     = (a.urgent ? r.n_urgent : r.n_miss) - first;

        for (uint32_t i = (warp + n_warp - before) % n_warp; i < n; i += n_warp)
            fetch_miss(a, s, at, first + i, packed);
        before = (before + n) % n_warp;
    }
    if (a.link.queue)
        fetch_posted(a, s, packed);
}

kvd_status cuda_window_fetch(kvd_stream *st, const kvd_window_fetch_args *a, kvd_err *err)
{
    const cuda_backend *be   = cuda_enter(st);
    const bool          raw  = a->format.type == KVD_RECORD_RAW;
    record_shape        s    = {};
    uint32_t            each = 0, n_warp = FETCH_THREADS / WARP;

    if (a->n_seq == 0)
        return KVD_OK;
    if (!raw) {
        s      = cuda_record_shape(&a->format);
        each   = (uint32_t)kvd_align_up(s.packed, 16);
        n_warp = (uint32_t)kvd_min_u64(n_warp, FETCH_SMEM / each);
    }
    CUDA_TRY(sp_launch(be, st->s, dim3(FETCH_GRID), n_warp * WARP, n_warp * each, 1, fetch_misses,
                       *a, s, each),
             "window_fetch", err);
    return KVD_OK;
}
