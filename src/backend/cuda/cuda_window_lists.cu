/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_window_lists.cu - what a window's change means for records: spans to attend to, misses to
 * bring up from pinned memory.  All counts are read on the device.
 *
 * The gather runs on few blocks with many bytes in flight: that fills PCIe, and more would only
 * take processors from what runs beside it (see cuda_record.cu).
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_record.cuh"
#include "backend/cuda/cuda_window.cuh"

#define LIST_THREADS  256u
#define POST_THREADS  1024u
#define FETCH_THREADS 512u
#define FETCH_GRID    8u /* of packed records, which take time to unpack */
#define FETCH_SMEM    32768u

/* Of raw ones.  Products of a layer take nearly all processors at once, and each that a gather is
 * on gives way to a second wave of them (H200, 122K, 4 sequences: 7.6 ms a step by 4 blocks, 8.2 by
 * 6 and 8, 7.8 by 3, 10.4 by 2, which do not fill the link). */
#define FETCH_RAW_GRID 4u

/* ---- spans ------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(LIST_THREADS)
    list_spans(const __grid_constant__ kvd_window_spans_args a)
{
    __shared__ uint32_t mem[WARP + 1];

    sp_begin();
    window_list(a, blockIdx.x, mem);
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

/* Host record number `record` of a lane's chunk, and its slot. */
static __device__ __forceinline__ unpack_place fetch_place(const kvd_window_fetch_args &a,
                                                           const record_shape &s, uint32_t at,
                                                           uint32_t chunk, uint32_t slot,
                                                           uint32_t record)
{
    const kvd_window_place &w     = a.place[at / a.n_kv_head];
    const uint32_t          head  = at % a.n_kv_head;
    const bool              raw   = a.format.type == KVD_RECORD_RAW;
    const uint32_t          per   = a.kv.block_tokens / a.kv.chunk_tokens;
    const uint64_t          bytes = raw ? a.kv.record_bytes : s.packed;
    unpack_place            p;

    p.src   = (const uint8_t *)a.host + record * bytes;
    p.dst   = (uint8_t *)a.kv.pool + w.at[head] + a.slot_off + slot * a.kv.record_bytes;
    p.chunk = chunk % per;
    p.param = raw ? NULL
                  : (const uint8_t *)a.param + w.iblock[chunk / per] + a.param_off +
                        head * a.param_stride;
    return p;
}

/* Number i of a lane's misses; false: it is below the host tier. */
static __device__ __forceinline__ bool fetch_find(const kvd_window_fetch_args &a,
                                                  const record_shape &s, uint32_t at, uint32_t i,
                                                  unpack_place *p)
{
    const kvd_window_seq &q      = a.seq[at / a.n_kv_head];
    const uint32_t        head   = at % a.n_kv_head;
    const uint32_t        chunk  = q.fetch[head * a.sel_stride + i];
    const uint32_t        slot   = q.into[head * a.sel_stride + i];
    const uint32_t        record = a.place[at / a.n_kv_head].host_of[head * a.lane_stride + chunk];

    if (record == KVD_HOST_NONE)
        return false;
    *p = fetch_place(a, s, at, chunk, slot, record);
    return true;
}

static __device__ __forceinline__ unpack_place fetch_of(const unpack_place &p, int lane)
{
    unpack_place q;

    q.src   = (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)p.src, lane);
    q.param = (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)p.param, lane);
    q.dst   = (uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)p.dst, lane);
    q.chunk = __shfl_sync(ALL_LANES, p.chunk, lane);
    return q;
}

template <bool RAW>
static __device__ __forceinline__ void fetch_record(const kvd_window_fetch_args &a,
                                                    const record_shape &s, const unpack_place &p,
                                                    uint8_t *packed)
{
    if constexpr (RAW)
        copy_record(p.src, p.dst, a.kv.record_bytes);
    else
        unpack_place_one(s, p, packed);
}

/* One warp: the records that its lanes have found, two at a time. */
template <bool RAW>
static __device__ __forceinline__ void fetch_found(const kvd_window_fetch_args &a,
                                                   const record_shape &s, const unpack_place &mine,
                                                   bool found, uint8_t *packed)
{
    uint32_t left = __ballot_sync(ALL_LANES, found);

    while (left) {
        const unpack_place p = fetch_of(mine, __ffs((int)left) - 1);

        left &= left - 1;
        if (left == 0) {
            fetch_record<RAW>(a, s, p, packed);
            return;
        }
        const unpack_place q = fetch_of(mine, __ffs((int)left) - 1);
        if constexpr (RAW)
            copy_all<2>({ p.src, q.src }, { p.dst, q.dst }, a.kv.record_bytes);
        else
            unpack_place_two(s, p, q, packed);
        left &= left - 1;
    }
}

/* How many of n numbers that never fall, one a lane, are at most i; at most 31. */
static __device__ __forceinline__ uint32_t fetch_below(uint32_t end, uint32_t i)
{
    uint32_t k = 0;

#pragma unroll
    for (uint32_t d = WARP / 2; d > 0; d /= 2)
        k += __shfl_sync(ALL_LANES, end, (int)(k + d - 1)) <= i ? d : 0;
    return k;
}

/* The misses of up to 32 lanes from `first` on, one behind the other, go round the warps; `before`
 * of n_warp have been earlier misses' last.  Each of a warp's lanes looks for one of its misses, so
 * that what leads to them is waited for once.  Returns what is before the next. */
template <bool RAW>
static __device__ uint32_t fetch_lanes(const kvd_window_fetch_args &a, const record_shape &s,
                                       uint32_t first, uint32_t before, uint8_t *packed)
{
    const uint32_t lane = threadIdx.x % WARP, n_warp = gridDim.x * (blockDim.x / WARP);
    const uint32_t warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    uint32_t       from = 0, n = 0, end, total;

    if (first + lane < a.n_seq * a.n_kv_head) {
        const kvd_window_result r = a.change[first + lane];

        from = a.urgent ? 0 : r.n_urgent;
        n    = (a.urgent ? r.n_urgent : r.n_miss) - from;
    }
    end = n;
    for (uint32_t d = 1; d < WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(ALL_LANES, end, d);
        end += lane >= d ? y : 0;
    }
    total = __shfl_sync(ALL_LANES, end, WARP - 1);
    for (uint32_t i0 = (warp + n_warp - before) % n_warp; i0 < total; i0 += WARP * n_warp) {
        const uint32_t i = i0 + lane * n_warp, at = fetch_below(end, i);
        const uint32_t in =
            i - __shfl_sync(ALL_LANES, end - n, (int)at) + __shfl_sync(ALL_LANES, from, (int)at);
        unpack_place mine  = {};
        const bool   found = i < total && fetch_find(a, s, first + at, in, &mine);

        fetch_found<RAW>(a, s, mine, found, packed);
    }
    return (before + total) % n_warp;
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
template <bool RAW>
static __device__ void fetch_request(const kvd_window_fetch_args &a, const record_shape &s,
                                     uint32_t i, uint8_t *packed)
{
    const kvd_miss_link   &l    = a.link;
    const kvd_miss_request r    = l.request[i];
    const uint32_t         at   = r.lane - a.first_lane;
    const uint32_t         from = l.place[i % l.n_place];
    uint32_t               n;

    fetch_record<RAW>(a, s, fetch_place(a, s, at, r.chunk, r.slot, from), packed);
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
template <bool RAW>
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
                fetch_request<RAW>(a, s, g + warp, packed);
            __syncthreads();
        }
    }
}

/* Raw records need few registers, so that a block takes no more of a processor than one of a
 * product's does. */
template <bool RAW>
static __global__ void __launch_bounds__(FETCH_THREADS, RAW ? 2 : 1)
    fetch_misses(const __grid_constant__ kvd_window_fetch_args a,
                 const __grid_constant__ record_shape s, uint32_t each)
{
    extern __shared__ uint4 fetch_mem[];
    uint8_t                *packed = (uint8_t *)fetch_mem + threadIdx.x / WARP * each;
    uint32_t                before = 0;

    sp_begin();
    for (uint32_t first = 0; first < a.n_seq * a.n_kv_head; first += WARP)
        before = fetch_lanes<RAW>(a, s, first, before, packed);
    if (a.link.queue)
        fetch_posted<RAW>(a, s, packed);
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
    CUDA_TRY(sp_launch(be, st->s, dim3(raw ? FETCH_RAW_GRID : FETCH_GRID), n_warp * WARP,
                       n_warp * each, 1, raw ? fetch_misses<true> : fetch_misses<false>, *a, s,
                       each),
             "window_fetch", err);
    return KVD_OK;
}
