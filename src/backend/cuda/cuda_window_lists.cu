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
#define FETCH_THREADS 512u
#define FETCH_GRID    8u
#define FETCH_SMEM    32768u

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

/* ---- fetch ------------------------------------------------------------------------- */

static __device__ void fetch_record(const kvd_window_fetch_args &a, const record_shape &s,
                                    const kvd_window_seq &q, const kvd_window_place &p,
                                    uint32_t head, uint32_t i, uint8_t *packed)
{
    const uint32_t chunk = q.fetch[head * a.sel_stride + i];
    const uint32_t slot  = q.into[head * a.sel_stride + i];
    const uint32_t per   = a.kv.block_tokens / a.kv.chunk_tokens;
    const uint64_t bytes = a.format.type == KVD_RECORD_RAW ? a.kv.record_bytes : s.packed;
    const uint8_t *src = (const uint8_t *)a.host + p.host_of[head * a.lane_stride + chunk] * bytes;
    uint8_t       *dst = (uint8_t *)a.kv.pool + p.at[head] + a.slot_off + slot * a.kv.record_bytes;

    if (a.format.type == KVD_RECORD_RAW)
        copy_record(src, dst, bytes);
    else
        unpack_record(s, chunk % per, src,
                      (const uint8_t *)a.param + p.iblock[chunk / per] + a.param_off +
                          head * a.param_stride,
                      dst, packed);
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
            fetch_record(a, s, a.seq[at / a.n_kv_head], a.place[at / a.n_kv_head], at % a.n_kv_head,
                         first + i, packed);
        before = (before + n) % n_warp;
    }
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
