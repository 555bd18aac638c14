/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h - the door to backend/: memory kinds, streams, events and the op table.
 *
 * One kvd_backend is one device with its threads or queues.  Ops are ordered by their stream; on
 * the CPU they have run when the call returns.  Every op takes a const args struct: shapes first,
 * then pointers, then scalars; shapes are the caller's promise (asserted), device failures are a
 * status.  All table entries are mandatory.  Activations are float32, row-major, and every x_stride
 * is counted in elements between rows.  Outputs never overlap inputs unless an op says so.
 *
 * Backends: "ref" is plain C, one thread, no quantised activations, no contraction: the oracle.
 * "cpu" picks kernels per processor at open.  This header compiles as C11 and C++17.
 *
 * Thread: one thread at a time per backend. */
#ifndef KVD_BACKEND_H
#define KVD_BACKEND_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvd_backend kvd_backend;
typedef struct kvd_stream  kvd_stream;
typedef struct kvd_event   kvd_event;

typedef enum kvd_mem_kind {
    KVD_MEM_NONE,
    KVD_MEM_HOST,   /* pageable */
    KVD_MEM_PINNED, /* host memory the device can copy from asynchronously */
    KVD_MEM_DEVICE,
    KVD_MEM_MAP /* read-only file mapping, not owned */
} kvd_mem_kind;

/* Memory with its provenance; only the backend that gave it may release it. */
typedef struct kvd_mem {
    void        *ptr;
    uint64_t     bytes;
    kvd_mem_kind kind;
} kvd_mem;

#define KVD_HEAD_DIM_MAX 512u /* what attention takes; the caller refuses more */

/* A weight matrix as stored: n_row rows (outputs) of n_col elements (inputs). */
typedef struct kvd_weight {
    kvd_dtype   type;
    uint32_t    n_row, n_col;
    uint64_t    row_bytes;
    const void *data; /* [n_row][row_bytes]; no alignment is promised beyond 1 byte */
} kvd_weight;

/* ---- args ------------------------------------------------------------------------ */

typedef struct kvd_embed_args {
    uint32_t       n_token;
    kvd_weight     table; /* [n_vocab][n_embd] */
    const int32_t *token; /* [n_token], each in [0, n_vocab) */
    float         *out;   /* [n_token][n_embd] */
} kvd_embed_args;

/* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * w; out may be x.
 * Sum of squares in double in ref, any order elsewhere. */
typedef struct kvd_rms_norm_args {
    uint32_t     n_row, n_col;
    uint64_t     x_stride, out_stride;
    const float *x;   /* [n_row][n_col] */
    const float *w;   /* [n_col] */
    float       *out; /* [n_row][n_col] */
    float        eps;
} kvd_rms_norm_args;

/* q/k norm: the same over each head of each token, in place. */
typedef struct kvd_head_norm_args {
    uint32_t     n_token, n_head, head_dim;
    uint64_t     x_stride; /* between tokens */
    float       *x;        /* [n_token][n_head][head_dim] */
    const float *w;        /* [head_dim] */
    float        eps;
} kvd_head_norm_args;

#define KVD_MATMUL_OUT_MAX 4
typedef struct kvd_matmul_out {
    kvd_weight   w;    /* [n_row][n_col], n_col the same in all outputs */
    const float *bias; /* [n_row] or NULL */
    float       *y;    /* [n_token][n_row] */
    uint64_t     y_stride;
    bool         add; /* y += instead of y = (the residual stream) */
} kvd_matmul_out;

/* y_i = x W_i^T (+ bias_i) for up to four weights that share x. */
typedef struct kvd_matmul_args {
    uint32_t       n_token, n_col, n_out;
    uint64_t       x_stride;
    const float   *x; /* [n_token][n_col] */
    kvd_matmul_out out[KVD_MATMUL_OUT_MAX];
} kvd_matmul_args;

/* Rotary embedding in place over the first n_rot dimensions of each head.
 * cos_sin holds for each token n_rot/2 cosines then n_rot/2 sines (already scaled by the
 * attention factor).  Pairs: (i, i + n_rot/2) when neox, else (2i, 2i+1). */
typedef struct kvd_rope_args {
    uint32_t     n_token, n_head, head_dim, n_rot;
    bool         neox;
    uint64_t     x_stride; /* between tokens */
    float       *x;        /* [n_token][n_head][head_dim] */
    const float *cos_sin;  /* [n_token][n_rot] */
} kvd_rope_args;

/* out = silu(gate) * up; out may be gate. */
typedef struct kvd_swiglu_args {
    uint32_t     n_token, n_col;
    uint64_t     gate_stride, up_stride, out_stride;
    const float *gate, *up; /* [n_token][n_col] */
    float       *out;
} kvd_swiglu_args;

/* How the KV of one layer lies in a pool.  A sequence is a list of blocks of block_tokens tokens;
 * in a block, each lane is a contiguous run of records; a record is chunk_tokens K rows then
 * chunk_tokens V rows of head_dim elements.  Token t of KV head h is in block t / block_tokens, at
 *   pool + block[t / block_tokens] + lane_off + h * head_stride
 *        + ((t % block_tokens) / chunk_tokens) * record_bytes
 * where its K row is number t % chunk_tokens and its V row chunk_tokens + t % chunk_tokens. */
typedef struct kvd_kv_layout {
    kvd_dtype type; /* F32 or BF16 */
    uint32_t  n_kv_head, head_dim, chunk_tokens, block_tokens;
    uint64_t  record_bytes; /* 2 * chunk_tokens * head_dim * sizeof(element) */
    uint64_t  lane_off;     /* bytes: this layer's first lane inside a block */
    uint64_t  head_stride;  /* bytes between the lanes of neighbouring KV heads */
    void     *pool;
} kvd_kv_layout;

/* The part of one sequence that a batch touches: rows [first_row, first_row + n_row) of the batch
 * are its tokens n_past, n_past + 1, ... */
typedef struct kvd_kv_seq {
    uint32_t        first_row, n_row;
    uint32_t        n_past;
    const uint64_t *block; /* byte offsets into the pool, for all n_past + n_row tokens */
} kvd_kv_seq;

/* Stores K (after RoPE) and V of the batch's tokens. */
typedef struct kvd_kv_append_args {
    uint32_t          n_seq;
    const kvd_kv_seq *seq;
    kvd_kv_layout     kv;
    uint64_t          k_stride, v_stride; /* between tokens */
    const float      *k, *v;              /* [n_token][n_kv_head][head_dim] */
} kvd_kv_append_args;

/* Causal attention over everything stored: row r of a sequence attends to its tokens 0 ..
 * n_past + r, which have been appended.  Query head i reads KV head i / (n_head / n_kv_head).
 * out = softmax(scale * q K^T) V. */
typedef struct kvd_attn_args {
    uint32_t          n_seq, n_head;
    const kvd_kv_seq *seq;
    kvd_kv_layout     kv;
    uint64_t          q_stride, out_stride; /* between tokens */
    const float      *q;                    /* [n_token][n_head][head_dim], after RoPE */
    float            *out;                  /* [n_token][n_head][head_dim] */
    float             scale;                /* 1/sqrt(head_dim) as a rule */
} kvd_attn_args;

/* The largest shapes a session will ask for: what scratch is sized by. */
typedef struct kvd_backend_limits {
    uint32_t n_token; /* rows of one matmul or attention call */
    uint32_t n_seq;   /* sequences of one call */
    uint32_t n_col;   /* widest matmul input */
    uint32_t n_head, n_kv_head, head_dim;
    uint32_t n_ctx; /* longest sequence */
} kvd_backend_limits;

/* ---- the table ------------------------------------------------------------------- */

#define KVD_BACKEND_ABI 1
typedef struct kvd_backend_ops {
    uint32_t    abi;
    const char *name;
    void (*close)(kvd_backend *);

    /* Bytes kvd reserve() would hold for these limits; reserve grows to cover them and never
     * shrinks.  Ops allocate nothing. */
    uint64_t (*reserve_bytes)(const kvd_backend *, const kvd_backend_limits *);
    kvd_status (*reserve)(kvd_backend *, const kvd_backend_limits *, kvd_err *);

    kvd_status (*mem_alloc)(kvd_backend *, kvd_mem_kind, uint64_t bytes, kvd_mem *out, kvd_err *);
    void (*mem_free)(kvd_backend *, kvd_mem *); /* zeroes *m; NONE and MAP are no-ops */

    kvd_status (*stream_open)(kvd_backend *, kvd_stream **out, kvd_err *);
    void (*stream_close)(kvd_stream *); /* NULL is a no-op */
    kvd_status (*stream_sync)(kvd_stream *, kvd_err *);
    kvd_status (*event_open)(kvd_backend *, kvd_event **out, kvd_err *);
    void (*event_close)(kvd_event *);
    kvd_status (*event_record)(kvd_event *, kvd_stream *, kvd_err *);
    kvd_status (*event_wait)(kvd_event *, kvd_stream *, kvd_err *); /* stream waits for event */
    bool (*event_done)(const kvd_event *);
    kvd_status (*copy)(kvd_stream *, kvd_mem dst, uint64_t dst_off, kvd_mem src, uint64_t src_off,
                       uint64_t bytes, kvd_err *);

    kvd_status (*embed)(kvd_stream *, const kvd_embed_args *, kvd_err *);
    kvd_status (*rms_norm)(kvd_stream *, const kvd_rms_norm_args *, kvd_err *);
    kvd_status (*head_norm)(kvd_stream *, const kvd_head_norm_args *, kvd_err *);
    kvd_status (*matmul)(kvd_stream *, const kvd_matmul_args *, kvd_err *);
    kvd_status (*rope)(kvd_stream *, const kvd_rope_args *, kvd_err *);
    kvd_status (*swiglu)(kvd_stream *, const kvd_swiglu_args *, kvd_err *);
    kvd_status (*kv_append)(kvd_stream *, const kvd_kv_append_args *, kvd_err *);
    kvd_status (*attn)(kvd_stream *, const kvd_attn_args *, kvd_err *);
} kvd_backend_ops;

/* Every backend object begins with this. */
struct kvd_backend {
    const kvd_backend_ops *ops;
    char                   isa[32]; /* what kernels run, for people: "avx512+vnni+bf16" */
    uint32_t               n_thread;
};

typedef struct kvd_backend_params {
    const char *name;          /* "cpu" or "ref"; NULL: "cpu" */
    const char *cpu_isa;       /* a name of os_isa; NULL: the best this machine runs */
    uint32_t    n_thread;      /* 0: as many as this process may use */
    bool        precise;       /* float activations in matmul */
    bool        deterministic; /* a token's result does not depend on the rest of the batch, nor on
                                  how a prompt was cut into batches: same bits */
} kvd_backend_params;

/* A level the machine lacks is KVD_E_UNSUPPORTED, an unknown name KVD_E_INVAL. */
kvd_status kvd_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err);
void       kvd_backend_close(kvd_backend *b); /* NULL is a no-op */

/* The rows [first, first + n) of a weight, as a weight: how fused projections are taken apart. */
static inline kvd_weight kvd_weight_rows(kvd_weight w, uint32_t first, uint32_t n)
{
    kvd_weight v = w;

    kvd_assert((uint64_t)first + n <= w.n_row);
    v.data  = (const uint8_t *)w.data + (uint64_t)first * w.row_bytes;
    v.n_row = n;
    return v;
}

#ifdef __cplusplus
}
#endif
#endif
