/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_window.cu - the difference between a window and a selection, and the window's change: the
 * bits of cpu_window.c.  One block of threads per lane.
 *
 * Scratch: one key per slot and lane, where windows are too large for shared memory.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_window.cuh"

#define WINDOW_THREADS 1024u

uint64_t cuda_window_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    (void)be;
    return lim->n_slot <= WINDOW_KEYS
               ? 0
               : (uint64_t)lim->n_seq * lim->n_kv_head * lim->n_slot * sizeof(uint64_t);
}

uint64_t *cuda_window_keys(const cuda_backend *be, uint64_t n_lane)
{
    const uint64_t bytes = n_lane * be->lim.n_slot * sizeof(uint64_t);

    return be->lim.n_slot <= WINDOW_KEYS
               ? NULL
               : (uint64_t *)cuda_scratch_of(be, CUDA_SCRATCH_WINDOW, bytes);
}

static __global__ void __launch_bounds__(WINDOW_THREADS)
    change_windows(const __grid_constant__ kvd_window_args a, uint64_t *keys, uint32_t slots)
{
    extern __shared__ uint64_t window_keys[];
    __shared__ window_mem      m;

    sp_begin();
    window_change(a, blockIdx.x, keys ? keys + (uint64_t)blockIdx.x * slots : window_keys, &m);
}

kvd_status cuda_window(kvd_stream *st, const kvd_window_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const uint32_t      n_lane = a->n_seq * a->n_kv_head, slots = be->lim.n_slot;
    uint64_t           *keys = cuda_window_keys(be, n_lane);

    if (n_lane == 0)
        return KVD_OK;
    CUDA_TRY(sp_launch(be, st->s, dim3(n_lane), WINDOW_THREADS,
                       keys ? 0 : slots * (uint32_t)sizeof(uint64_t), 1, change_windows, *a, keys,
                       slots),
             "window", err);
    return KVD_OK;
}
