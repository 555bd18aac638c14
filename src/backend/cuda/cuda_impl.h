/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_impl.h - private to backend/cuda: the backend object, its scratch, errors, and the ops.
 *
 * The backend is a module of its own, libkvdrive-cuda.so, which backend_load.c opens at run time;
 * it shows one C function (kvd_backend_module).  Rules for every op of this directory:
 *   - The args struct is read by the host during the call, and may die after it.  Every pointer in
 *     it (activations, weights, token ids, sequences, block lists ...) is memory the device can
 *     read: from mem_alloc of kind DEVICE or PINNED.  The host never follows it.
 *   - Launch geometry depends on scalars of the args and on reserved limits (be->lim), never on
 *     what pointers lead to: n_past, lengths and counts are read on the device.  So a step can be
 *     captured in a CUDA graph and replayed with other contents.
 *   - Ops allocate nothing and wait for nothing; scratch is cuda_scratch_of() of the op's family,
 *     sized by reserve.  Two ops of one family may not run at once on two streams.
 *   - Errors at launch are the op's status, later ones come out of stream_sync (KVD_E_DEVICE, which
 *     is sticky: the context is lost).
 *   - A handle carries its device; every entry point of the table makes it current (cuda_enter).
 *     No other state is global.
 * Kernels assume nothing of alignment beyond what backend.h says. */
#ifndef KVD_CUDA_IMPL_H
#define KVD_CUDA_IMPL_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern "C" {
#include "backend/backend.h"
}

#define CUDA_LANES_MAX 65535u /* of a layer of a step: blocks in a launch's second dimension */
#define CUDA_GROUP_MAX 256u   /* query heads of a KV head that select takes */

/* One buffer per family of ops: those of one family follow each other, families may overlap. */
typedef enum cuda_scratch_id {
    CUDA_SCRATCH_MATMUL, /* cuda_matmul.cu */
    CUDA_SCRATCH_ATTN,   /* cuda_attn*.cu */
    CUDA_SCRATCH_SPAN,   /* cuda_span.cu */
    CUDA_SCRATCH_BUILD,  /* cuda_index_build.cu */
    CUDA_SCRATCH_SELECT, /* cuda_select.cu */
    CUDA_SCRATCH_WINDOW, /* cuda_window.cu */
    CUDA_SCRATCH_BEST,   /* cuda_best.cu */
    CUDA_SCRATCH_COUNT
} cuda_scratch_id;

typedef struct cuda_scratch {
    void    *ptr; /* device memory, 256-byte aligned */
    uint64_t bytes;
} cuda_scratch;

typedef struct cuda_lt   cuda_lt;   /* cuda_lt.cu: cuBLASLt, where it is installed */
typedef struct cuda_area cuda_area; /* cuda_pinned.cu: pages that were registered */

typedef struct cuda_backend {
    kvd_backend base;
    int         device;
    int         cc; /* compute capability, 90 for 9.0 */
    uint32_t    n_sm;
    uint16_t    n_cluster[2][16];  /* held at once, of 1 to 16 blocks of cuda_select_whole.cu
                                      that share a processor with none, with another */
    uint32_t           smem_sm;    /* bytes of shared memory of a processor */
    uint32_t           smem_block; /* bytes of shared memory that one block can get */
    bool               precise, deterministic;
    kvd_backend_limits lim; /* the largest of each that was reserved */
    cuda_scratch       scratch[CUDA_SCRATCH_COUNT];
    cuda_lt           *lt;                                   /* NULL: not there */
    cuda_area         *pinned;                               /* the large ones, the latest first */
    uint64_t           held_bytes, pinned_bytes, host_bytes; /* given by mem_alloc */
    uint64_t           context_bytes;                        /* what opening took */
    uint64_t           free_at_open;                         /* of the device, behind it */
    bool               can_register; /* pages of our own can have the same address on the device */
    bool               streamed;     /* there has been a stream: others take precedence of it */
} cuda_backend;

struct kvd_stream {
    cuda_backend *be;
    cudaStream_t  s;
};

/* ---- errors ------------------------------------------------------------------------ */

/* Fills err with "cuda: <what>: <name of the CUDA error> (its text)". */
kvd_status cuda_fail(kvd_err *err, cudaError_t e, const char *what);

#define CUDA_TRY(call, what, err)                     \
    do {                                              \
        const cudaError_t cuda_try_e_ = (call);       \
        if (cuda_try_e_ != cudaSuccess)               \
            return cuda_fail(err, cuda_try_e_, what); \
    } while (0)

/* After the launches of an op: what it returns. */
static inline kvd_status cuda_launched(const char *op, kvd_err *err)
{
    const cudaError_t e = cudaGetLastError();

    return e == cudaSuccess ? KVD_OK : cuda_fail(err, e, op);
}

/* First thing in every op: makes the stream's device current. */
static inline cuda_backend *cuda_enter(kvd_stream *st)
{
    cudaSetDevice(st->be->device);
    return st->be;
}

static inline void *cuda_scratch_of(const cuda_backend *be, cuda_scratch_id id, uint64_t bytes)
{
    kvd_assert(bytes <= be->scratch[id].bytes);
    return be->scratch[id].ptr;
}

static inline uint32_t cuda_div_up(uint64_t a, uint64_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* ---- scratch that limits ask for, one function per family ------------------------------ */

uint64_t cuda_matmul_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_attn_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_span_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_build_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_select_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_window_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);
uint64_t cuda_best_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim);

/* Fills in n_cluster; needs cc, smem_block and smem_sm. */
void cuda_select_clusters(cuda_backend *be);

/* ---- pinned memory (cuda_pinned.cu) -------------------------------------------------- */

/* Zeroed.  Messages name size, limit and remedy. */
kvd_status cuda_pinned_alloc(cuda_backend *be, uint64_t bytes, void **ptr, kvd_err *err);
void       cuda_pinned_free(cuda_backend *be, void *ptr); /* NULL is a no-op */
/* How many of n bytes from p on can be part of one copy: the driver takes what it knows as one
 * piece, and large areas are several. */
uint64_t cuda_pinned_run(const cuda_backend *be, const void *p, uint64_t n);

/* ---- the device's memory (cuda_memory.cu) ---------------------------------------------- */

/* Free bytes of a device before this process has a context there; 0: nobody can say. */
uint64_t cuda_free_before(int device);
/* Fills context_bytes and free_at_open. */
kvd_status cuda_measure_context(cuda_backend *be, uint64_t free_before, kvd_err *err);
void       cuda_memory(const kvd_backend *b, kvd_device_memory *out);

/* ---- ops --------------------------------------------------------------------------- */

/* cuda_elem.cu */
kvd_status cuda_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err);
kvd_status cuda_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err);
kvd_status cuda_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err);
/* cuda_heads.cu */
kvd_status cuda_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err);
kvd_status cuda_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err);
kvd_status cuda_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err);
kvd_status cuda_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err);
/* cuda_best.cu */
kvd_status cuda_best(kvd_stream *st, const kvd_best_args *a, kvd_err *err);
/* cuda_matmul.cu */
kvd_status cuda_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err);
/* cuda_attn.cu */
kvd_status cuda_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err);
/* cuda_index_build.cu */
kvd_status cuda_index_build(kvd_stream *st, const kvd_index_build_args *a, kvd_err *err);
kvd_status cuda_zone_build(kvd_stream *st, const kvd_zone_build_args *a, kvd_err *err);
/* cuda_select.cu */
kvd_status cuda_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err);
kvd_status cuda_choose(kvd_stream *st, const kvd_choose_args *a, kvd_err *err);
/* cuda_span.cu */
kvd_status cuda_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err);
/* cuda_zone.cu */
kvd_status cuda_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err);
/* cuda_window.cu */
kvd_status cuda_window(kvd_stream *st, const kvd_window_args *a, kvd_err *err);
/* cuda_window_lists.cu */
kvd_status cuda_window_spans(kvd_stream *st, const kvd_window_spans_args *a, kvd_err *err);
kvd_status cuda_window_post(kvd_stream *st, const kvd_window_post_args *a, kvd_err *err);
kvd_status cuda_window_fetch(kvd_stream *st, const kvd_window_fetch_args *a, kvd_err *err);
/* cuda_record.cu */
kvd_status cuda_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err);
kvd_status cuda_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err);
kvd_status cuda_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err);
/* cuda_synth.cu */
kvd_status cuda_synth(kvd_stream *st, const kvd_synth_args *a, kvd_err *err);

/* ---- cuBLASLt ---------------------------------------------------------------------- */

/* cuda_lt.cu: opened with dlopen; *out NULL and KVD_OK where there is none. */
kvd_status cuda_lt_open(cuda_lt **out, kvd_err *err);
void       cuda_lt_close(cuda_lt *lt);
/* y [n_token][n_row] float, row stride y_stride, = (beta y +) x [n_token][n_col] w
 * [n_row][n_col]^T, both bf16 and dense. */
kvd_status cuda_lt_gemm(cuda_lt *lt, cudaStream_t s, uint32_t n_token, uint32_t n_row,
                        uint32_t n_col, const void *x, const void *w, float beta, float *y,
                        uint64_t y_stride, void *work, uint64_t work_bytes, kvd_err *err);

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- device helpers ---------------------------------------------------------------- */

/* The K row of one token of a sequence; its V row is record_bytes / 2 further. */
static __device__ __forceinline__ uint8_t *cuda_kv_row(const kvd_kv_layout &kv,
                                                       const uint64_t *block, uint32_t head,
                                                       uint32_t token)
{
    const uint32_t in   = token % kv.block_tokens;
    const uint32_t elem = kv.type == KVD_DTYPE_F32 ? 4 : 2;

    return (uint8_t *)kv.pool + block[token / kv.block_tokens] + kv.lane_off +
           head * kv.head_stride + (uint64_t)(in / kv.chunk_tokens) * kv.record_bytes +
           (uint64_t)(in % kv.chunk_tokens) * kv.head_dim * elem;
}

/* Row number i of all rows that the sequences have, one behind the other: its sequence and its
 * number in that; false: there are no so many.  Whole warps ask, each for one row; a lane looks at
 * a sequence, so that loads do not wait for each other. */
static __device__ __forceinline__ bool cuda_find_row(const kvd_kv_seq *seq, uint32_t n_seq,
                                                     uint32_t i, kvd_kv_seq *q, uint32_t *r)
{
    const uint32_t lane = threadIdx.x % 32;

    for (uint32_t first = 0; first < n_seq; first += 32) {
        const uint32_t n   = first + lane < n_seq ? seq[first + lane].n_row : 0;
        uint32_t       end = n; /* of this lane's rows */

        for (uint32_t d = 1; d < 32; d *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, end, d);
            end += lane >= d ? before : 0;
        }
        const uint32_t past = __ballot_sync(0xffffffffu, i < end);
        if (past) {
            const int at = __ffs((int)past) - 1;
            *q           = seq[first + at];
            *r           = i - __shfl_sync(0xffffffffu, end - n, at);
            return true;
        }
        i -= __shfl_sync(0xffffffffu, end, 31);
    }
    return false;
}

static __device__ __forceinline__ float cuda_bf16_at(const void *row, uint32_t i)
{
    return __uint_as_float((uint32_t)((const uint16_t *)row)[i] << 16);
}

static __device__ __forceinline__ float cuda_warp_sum(float x)
{
    for (int d = 16; d; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
static __device__ __forceinline__ float cuda_warp_max(float x)
{
    for (int d = 16; d; d >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
#endif

#endif
