/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h - the door to backend/: memory kinds, streams, events and the op table.
 *
 * One kvd_backend is one device with its threads or queues.  Ops are ordered by their stream; on
 * the CPU they have run when the call returns.  Every op takes a const args struct: shapes first,
 * then pointers, then scalars; shapes are the caller's promise (asserted), device failures are a
 * status.  All table entries are mandatory.  Activations are float32, row-major, and every x_stride
 * is counted in elements between rows.  Outputs never overlap inputs unless an op says so.
 *
 * Memory: whatever an args struct points to, arrays of sequences and lists of blocks included, must
 * be memory the device reads, of kind DEVICE or PINNED of this backend; it is read when the op
 * runs, so it stays as it is until the stream has passed it.  The struct itself is read during the
 * call.  Where a backend is `unified` any memory will do, and host code may use DEVICE memory as
 * its own.  Launches are shaped by scalars of the args and by reserved limits alone, so a sequence
 * of ops may be recorded and replayed over other contents.  Errors of an op that has begun come out
 * of stream_sync: KVD_E_DEVICE, after which the backend can only be closed.
 *
 * Backends: "ref" is plain C, one thread, no quantised activations, no contraction: the oracle.
 * "cpu" picks kernels per processor at open.  "cuda" or "cuda:N", N the number of a GPU, is a
 * module of its own, loaded on demand.  This header compiles as C11 and C++17.
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
typedef struct kvd_graph   kvd_graph; /* ops that were recorded, to be run again and again */

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

/* y_i = x W_i^T (+ bias_i) for up to four weights that share x.  norm: of x normalised as by
 * rms_norm.  swiglu: of two outputs of equal shape, neither of which adds, the first becomes
 * silu(y_0) * y_1.  xn and then y_1 are room for that: what they hold afterwards is undefined. */
typedef struct kvd_matmul_args {
    uint32_t       n_token, n_col, n_out;
    uint64_t       x_stride;
    const float   *x; /* [n_token][n_col] */
    kvd_matmul_out out[KVD_MATMUL_OUT_MAX];
    const float   *norm;     /* [n_col] or NULL */
    float         *xn;       /* with norm: [n_token][n_col], not x */
    float          norm_eps; /* with norm */
    bool           swiglu;
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
    uint32_t          n_token; /* at least the sum of the sequences' n_row: shapes the launch */
    const kvd_kv_seq *seq;
    kvd_kv_layout     kv;
    uint64_t          k_stride, v_stride; /* between tokens */
    const float      *k, *v;              /* [n_token][n_kv_head][head_dim] */
} kvd_kv_append_args;

/* What q and k want after their projections, in one op: head norms where there are such, RoPE, both
 * in place as by head_norm and rope; then kv_append. */
typedef struct kvd_qkv_finish_args {
    uint32_t           n_token, n_head, n_kv_head, head_dim, n_rot;
    bool               neox;
    float              eps;             /* of the norms */
    uint64_t           q_stride;        /* between tokens; k's is store's */
    float             *q;               /* [n_token][n_head][head_dim] */
    float             *k;               /* [n_token][n_kv_head][head_dim]: store.k */
    const float       *q_norm, *k_norm; /* [head_dim] or NULL */
    const float       *cos_sin;         /* [n_token][n_rot] */
    kvd_kv_append_args store;           /* same n_token, n_kv_head, head_dim */
} kvd_qkv_finish_args;

/* Causal attention over everything stored: row r of a sequence attends to its tokens 0 ..
 * n_past + r, which have been appended.  Query head i reads KV head i / (n_head / n_kv_head).
 * out = softmax(scale * q K^T) V. */
typedef struct kvd_attn_args {
    uint32_t          n_seq, n_head;
    uint32_t          n_token; /* as above */
    const kvd_kv_seq *seq;
    kvd_kv_layout     kv;
    uint64_t          q_stride, out_stride; /* between tokens */
    const float      *q;                    /* [n_token][n_head][head_dim], after RoPE */
    float            *out;                  /* [n_token][n_head][head_dim] */
    float             scale;                /* 1/sqrt(head_dim) as a rule */
} kvd_attn_args;

/* ---- args: the selection index ----------------------------------------------------- */

/* What the index keeps of a sealed block's lane, so that chunks can be scored without their keys.
 * "q" below is a query after RoPE times the scale; logits and weights as in `select`. */
typedef enum kvd_index_kind {
    KVD_INDEX_MEAN,     /* q . mean, with a radius + |q| r / sqrt(head_dim), r the rms distance of
                           the chunk's keys to their mean */
    KVD_INDEX_MEAN_STD, /* q . mean + 0.4 sum_i |q_i| std_i */
    KVD_INDEX_BOX,      /* sum_i max(q_i min_i, q_i max_i) */
    KVD_INDEX_CLUSTER,  /* q . centroid of the cluster that the chunk's mean fell into */
    KVD_INDEX_QUANT_K,  /* log-sum-exp of q . key over the chunk's tokens */
    KVD_INDEX_CASCADE   /* as MEAN; then the best 4 k chunks again, as QUANT_K */
} kvd_index_kind;
#define KVD_INDEX_KIND_COUNT 6

/* How a landmark is stored.  INTn: asymmetric codes with a scale and a minimum in binary16 per
 * channel over a group: 32 chunks (16 where a block has no more; so many centroids as a block
 * holds), or 64 tokens for keys. */
typedef enum kvd_index_elem {
    KVD_INDEX_BF16,
    KVD_INDEX_INT8,
    KVD_INDEX_INT4,
    KVD_INDEX_INT2
} kvd_index_elem;
#define KVD_INDEX_ELEM_COUNT 4

typedef struct kvd_index_desc {
    kvd_index_kind kind;
    kvd_index_elem elem;         /* of landmarks */
    kvd_index_elem key_elem;     /* of keys: QUANT_K and CASCADE */
    bool           radius;       /* MEAN and CASCADE */
    uint32_t       chunk_tokens; /* 4, 8 or 16 */
    uint32_t       block_tokens; /* 256 */
    uint32_t       head_dim;
} kvd_index_desc;

/* Whether there is such an index: shapes and combinations. */
bool kvd_index_valid(const kvd_index_desc *d);
/* Bytes of one lane of one block, a multiple of 64; d is valid. */
uint64_t kvd_index_lane_bytes(const kvd_index_desc *d);

/* Where the index of a layer lies in its pool: the lane of KV head h of a block is at
 *   pool + iblock + lane_off + h * head_stride, on a multiple of 64 bytes. */
typedef struct kvd_index_layout {
    kvd_index_desc desc;
    uint32_t       n_kv_head;
    uint64_t       lane_off;
    uint64_t       head_stride;
    void          *pool;
} kvd_index_layout;

/* Indexes sealed blocks: neighbours of one sequence, in their order (CLUSTER clusters up to 16 of
 * one call together).  Same K bytes, same index bytes, on every backend. */
typedef struct kvd_index_build_args {
    uint32_t         n_block;
    kvd_kv_layout    kv;     /* its chunk_tokens may differ from the index's */
    kvd_index_layout index;  /* same block_tokens, head_dim, n_kv_head */
    const uint64_t  *block;  /* [n_block] byte offsets into kv.pool */
    const uint64_t  *iblock; /* [n_block] byte offsets into index.pool */
} kvd_index_build_args;

/* Means for an estimation zone: of each run of kv.block_tokens / zone.block_tokens tokens, one K
 * and one V row, laid out as tokens of `zone`.  Same bytes on every backend. */
typedef struct kvd_zone_build_args {
    uint32_t        n_block;
    kvd_kv_layout   kv, zone; /* same n_kv_head and head_dim */
    const uint64_t *block;    /* [n_block] byte offsets into kv.pool */
    const uint64_t *zblock;   /* [n_block] byte offsets into zone.pool */
} kvd_zone_build_args;

/* How the query heads of a group make one score: p_h(c) = weight_h(c) / sum of weights. */
typedef enum kvd_gqa_rule {
    KVD_GQA_MEAN_KEPT,  /* mean over heads; the sum runs over chunks and kept tokens (default) */
    KVD_GQA_MAX_KEPT,   /* largest; the same sum */
    KVD_GQA_MEAN,       /* mean; the sum runs over chunks alone */
    KVD_GQA_MEAN_LOGITS /* one p of the mean of the heads' logits, over chunks alone */
} kvd_gqa_rule;
#define KVD_GQA_RULE_COUNT 4

#define KVD_SELECT_URGENT  0x80000000u /* flag on a selected chunk's number */
#define KVD_SELECT_CHUNKS  (1u << 26)  /* most chunks of a sequence */
#define KVD_EMA_SCALE      0x1p15f     /* what an ema element holds times this is the average */
#define KVD_CASCADE_FACTOR 4u

/* One sequence, one new token.  Pointers are to KV head 0; strides of the args lead to the next. */
typedef struct kvd_select_seq {
    uint32_t        row;         /* of q and kept_lse */
    uint32_t        first_chunk; /* chunks [first_chunk, n_chunk) may be selected */
    uint32_t        n_chunk;     /* all of them in indexed blocks; <= KVD_SELECT_CHUNKS */
    const uint32_t *k;           /* [n_kv_head] select at most so many */
    const uint64_t *iblock;      /* byte offsets into index.pool */
    float          *score;       /* out [n_chunk]; in [0, 1]; 0 below first_chunk */
    uint16_t       *ema;         /* in, out [n_chunk] or NULL; a new chunk's is 0 */
    uint32_t       *sel;         /* out [k of the KV head] */
} kvd_select_seq;

typedef struct kvd_select_result {
    uint32_t n_sel, n_urgent;
    float    kept; /* p of the kept tokens, mean over the group; 0 without them in the sum */
    float    mass; /* kept + scores selected: the estimated mass, by the MEAN rules */
} kvd_select_result;

/* Per sequence and KV head: weight_h(c) = exp(logit) x chunk_tokens (QUANT_K: exp(logit)); the
 * kept tokens weigh exp(kept_lse); score by the rule; ema = (1 - alpha) ema + alpha score, as
 *   f16(fl(fl(f32(ema) * fl(1 - alpha)) + fl(score * fl(alpha * KVD_EMA_SCALE)))), f16 to nearest
 * even.  Then the k best by score, ties to the lower chunk, in ascending order; of those the best
 * n_sel / 8, at least one, are urgent.  top_p in (0, 1): the smallest such set, within k, whose
 * scores add to top_p of all chunks' (in units of 2^-40, each rounded down).
 * CASCADE selects among its reranked chunks.  A NaN scores 0.  Given the scores, everything else is
 * the same bits on every backend. */
typedef struct kvd_select_args {
    uint32_t              n_seq, n_head;
    const kvd_select_seq *seq;
    kvd_index_layout      index;
    uint64_t              q_stride;    /* between rows */
    uint64_t              lse_stride;  /* between rows of kept_lse */
    uint64_t              lane_stride; /* elements of score and ema between KV heads */
    uint64_t              sel_stride;  /* of sel */
    const float          *q;           /* [row][n_head][head_dim] after RoPE */
    const float          *kept_lse;    /* [row][n_head] of the scaled logits; -INFINITY: none */
    kvd_select_result    *result;      /* out [n_seq][n_kv_head] */
    kvd_gqa_rule          rule;
    float                 scale; /* 1/sqrt(head_dim) as a rule */
    float                 alpha;
    float                 top_p; /* 0: exactly k, or all there are */
} kvd_select_args;

/* ---- args: the window -------------------------------------------------------------- */

/* A part of what one lane attends to: whole records anywhere in the pool, then keys of blocks. */
typedef struct kvd_attn_span {
    const uint64_t *record; /* [n_record] byte offsets into kv.pool; of a K row's start */
    const uint64_t *block;  /* as in kvd_kv_seq; read for keys [first_key, end_key) */
    uint32_t        n_record;
    uint32_t        first_key, end_key;
} kvd_attn_span;

/* Floats of a lane's partial softmax: [group][head_dim] weighted sums of V, then group maxima of
 * the scaled logits, then group sums of exp(logit - maximum). */
static inline uint64_t kvd_attn_part_floats(uint32_t group, uint32_t head_dim)
{
    return (uint64_t)group * (head_dim + 2);
}

/* Attention of one new token per row over a span per lane, merged by log-sum-exp with what part
 * holds already unless `first`.  The order of operations depends on the spans alone.  An empty span
 * adds nothing; the sum of all spans must not be empty where out is asked for. */
typedef struct kvd_attn_span_args {
    uint32_t             n_row, n_head;
    kvd_kv_layout        kv;   /* lane_off and head_stride serve blocks only */
    const uint32_t      *row;  /* [n_row] of q, out and lse */
    const kvd_attn_span *span; /* [n_row][n_kv_head] */
    const kvd_attn_span *then; /* likewise, behind span as by a call of its own; NULL: nothing */
    uint64_t             q_stride, out_stride, lse_stride;
    const float         *q;    /* [row][n_head][head_dim] after RoPE */
    float               *part; /* in, out [n_row][n_kv_head][kvd_attn_part_floats()] */
    float               *lse;  /* out [row][n_head] of the scaled logits so far; NULL: not wanted */
    float               *out;  /* [row][n_head][head_dim]: the softmax's result; NULL: not yet */
    float                scale;
    bool                 first;
} kvd_attn_span_args;

/* The estimation zone of one sequence: cells, each the mean K and V of as many neighbouring tokens
 * (zone_build). */
typedef struct kvd_zone_seq {
    uint32_t        n_cell; /* from the sequence's first token on; <= n_cell_max */
    const uint64_t *zblock; /* byte offsets into zone.pool */
    const uint16_t *left;   /* [n_cell] tokens that each cell stands for, of KV head 0 */
} kvd_zone_seq;

/* Attention of one new token per row to cells in place of their tokens: a cell weighs left x
 * exp(scale q . mean K), its value is mean V, and one with nothing left adds nothing.  Merged by
 * log-sum-exp with what part holds.  The order of operations depends on n_cell alone. */
typedef struct kvd_attn_zone_args {
    uint32_t            n_row, n_head, n_cell_max;
    kvd_kv_layout       zone; /* its tokens are cells */
    const uint32_t     *row;  /* [n_row] of q, out and lse */
    const kvd_zone_seq *seq;  /* [n_row] */
    uint64_t            q_stride, out_stride, lse_stride;
    uint64_t            left_stride; /* elements of left between KV heads */
    const float        *q;           /* [row][n_head][head_dim] after RoPE */
    float              *part;        /* in, out, as of attn_span */
    float              *lse;         /* out as of attn_span, or NULL */
    float              *out;         /* likewise */
    float               scale;
} kvd_attn_zone_args;

#define KVD_SLOT_NONE  0xffffu
#define KVD_CHUNK_NONE 0xffffffffu

typedef enum kvd_evict_policy { /* which chunk outside the selection leaves the window first */
                                KVD_EVICT_EMA,   /* lowest average score; with alpha 1 the paper's
                                                    look-ahead */
                                KVD_EVICT_LRU,   /* selected longest ago */
                                KVD_EVICT_LFU,   /* selected least often since it came */
                                KVD_EVICT_RANDOM /* by a hash of step and chunk */
} kvd_evict_policy;
#define KVD_EVICT_POLICY_COUNT 4

/* One sequence's window in one layer.  Pointers are to KV head 0; the args' strides lead on. */
typedef struct kvd_window_seq {
    uint32_t        step;     /* of this sequence, for LRU and RANDOM */
    bool            refill;   /* the window becomes the selection; all of it is urgent */
    const uint32_t *cap;      /* [n_kv_head] slots that may be used; n_sel <= cap, nothing above */
    const uint32_t *sel;      /* as select leaves it: ascending chunks, KVD_SELECT_URGENT */
    const uint16_t *ema;      /* as select leaves it */
    uint16_t       *slot_of;  /* in, out [n_chunk]: slot or KVD_SLOT_NONE */
    uint32_t       *chunk_of; /* in, out [slots]: chunk or KVD_CHUNK_NONE */
    uint32_t       *stamp;    /* in, out [slots]: step of last selection, or their number (LFU) */
    uint32_t       *stay;  /* out [slots]: slots attended at once, ascending: victims have left */
    uint32_t       *fetch; /* out [n_sel]: missed chunks, urgent ones first, each part ascending */
    uint32_t       *into;  /* out [n_sel]: the slot of each */
} kvd_window_seq;

typedef struct kvd_window_result {
    uint32_t n_hit, n_miss, n_urgent; /* n_urgent: of the misses */
    uint32_t n_evict, n_stay;
} kvd_window_result;

/* Difference between a window and a selection, and the window's change.  Hits keep their slots.
 * Where room is short victims leave: chunks outside the selection, lowest in the policy's order, of
 * equals the lowest chunk.  Misses take the empty slots, lowest first, in the order of fetch.
 * strict: all misses are urgent. */
typedef struct kvd_window_args {
    uint32_t                 n_seq, n_kv_head;
    const kvd_window_seq    *seq;
    const kvd_select_result *select;      /* [n_seq][n_kv_head] n_sel is read */
    kvd_window_result       *result;      /* out [n_seq][n_kv_head] */
    uint64_t                 lane_stride; /* elements of ema and slot_of between KV heads */
    uint64_t                 slot_stride; /* of chunk_of, stamp and stay */
    uint64_t                 sel_stride;  /* of sel, fetch and into */
    kvd_evict_policy         policy;
    bool                     strict;
} kvd_window_args;

/* Where the records of one sequence's layer lie; pointers to KV head 0 as in kvd_window_seq. */
typedef struct kvd_window_place {
    const uint64_t *block; /* in place: as in kvd_kv_seq */
    const uint64_t *at;    /* else: [n_kv_head] byte offsets into kv.pool, slot_off before slot 0 */
    const uint32_t *host_of; /* likewise: [n_chunk] number of a chunk's record in the host tier, or
                                KVD_HOST_NONE: it is below */
    const uint64_t *iblock;  /* of packed records: byte offsets into the index, by block */
} kvd_window_place;

#define KVD_HOST_NONE 0xffffffffu

/* Misses whose records are below the host tier: window_post asks the host for them while the step
 * goes on, window_fetch waits until they have come.  Two queues, of urgent misses and of the
 * others, since two streams take from them; numbers count a queue's requests from 0 on. */
typedef struct kvd_miss_request {
    uint32_t lane; /* first_lane of window_post + number of the lane in the call */
    uint32_t chunk, slot;
    uint32_t score; /* its ema */
} kvd_miss_request;

/* PINNED, zeroed by the host when nothing uses it.  Each side writes its own cache lines. */
typedef struct kvd_miss_queue {
    /* by ops: requests posted; taken, in whole rounds of n_place; of batches that were not there
     * when they were needed: how many, and for how long */
    uint32_t posted, taken, n_wait;
    bool     too_late; /* a wait has reached its limit: what it was for has not been fetched */
    uint64_t wait_ns;
    uint8_t  gap[104];
    /* by the host: of requests below `arrived` the records are there; nothing more will come */
    uint32_t arrived, given_up;
    uint8_t  end[120];
} kvd_miss_queue;

typedef struct kvd_miss_state { /* what ops remember of a queue; zeroed before a step */
    uint32_t posted, taken, n_wait, unused;
    uint64_t wait_ns;
} kvd_miss_state;

typedef struct kvd_miss_batch { /* of one window_post in a queue */
    uint32_t first, n;
} kvd_miss_batch;

typedef struct kvd_miss_link { /* a queue as ops see it; queue NULL: nothing is below the host tier
                                */
    kvd_miss_queue   *queue;
    kvd_miss_request *request; /* PINNED [as many as a step's misses] */
    kvd_miss_state   *state;
    kvd_miss_batch   *batch;
    const uint32_t *place; /* PINNED [n_place] request i comes as host record place[i % n_place] */
    uint32_t        n_place;
    uint64_t        limit_ns; /* longest wait */
} kvd_miss_link;

typedef struct kvd_window_post_args {
    uint32_t                 n_seq, n_kv_head;
    const kvd_window_seq    *seq;
    const kvd_window_place  *place;
    const kvd_window_result *change;  /* [n_seq][n_kv_head] */
    kvd_miss_link            link[2]; /* urgent misses, the others; batch is written */
    uint64_t                 lane_stride, sel_stride;
    uint32_t                 first_lane;
} kvd_window_post_args;

/* What a step attends to after the window's change, as spans: near, the slots that stay (or, if
 * `selected`, of the selection what was held before), then urgent, the misses that have come. */
typedef struct kvd_window_spans_args {
    uint32_t                 n_seq, n_kv_head;
    const kvd_window_seq    *seq;
    const kvd_window_place  *place;
    const kvd_select_result *select; /* [n_seq][n_kv_head], as is change */
    const kvd_window_result *change;
    kvd_kv_layout            kv; /* of the layer */
    uint64_t                 slot_off;
    uint64_t                 lane_stride, slot_stride, sel_stride; /* as in kvd_window_args */
    uint64_t                 list_stride;   /* of near and urgent, at least that of slots */
    uint64_t                *near, *urgent; /* out [n_seq][n_kv_head][list_stride] records */
    kvd_attn_span           *near_span, *urgent_span; /* out [n_seq][n_kv_head] */
    bool                     in_place, selected;
} kvd_window_spans_args;

/* All that stands before a sparse step's fetches: attn_span kept, select, window, window_spans, as
 * one behind the other, over the same lanes. */
typedef struct kvd_choose_args {
    kvd_attn_span_args    kept;
    kvd_select_args       select;
    kvd_window_args       window;
    kvd_window_spans_args spans;
} kvd_choose_args;

/* How records lie below the device.  INTn: asymmetric codes, K with a scale and a minimum in
 * binary16 per channel over KVD_RECORD_GROUP tokens, V per token; these parameters lie apart, one
 * run for each lane of a block.  Measured on Qwen2.5 0.5B, 2,304 tokens, error of attention's
 * output: INT8 .0056, .0047 with K per 32 tokens and V per 32 dimensions (twice the parameters),
 * .0113 with one V scale a record; INT4 .098. */
typedef enum kvd_record_type {
    KVD_RECORD_RAW,
    KVD_RECORD_INT8,
    KVD_RECORD_INT4,
    KVD_RECORD_VALUES /* V rows as they are; K is what the index's keys say, on the device */
} kvd_record_type;
#define KVD_RECORD_GROUP 64u

typedef struct kvd_record_format {
    kvd_record_type type;
    kvd_dtype       raw; /* F32 or BF16 */
    uint32_t        chunk_tokens, block_tokens, head_dim;
    kvd_index_desc  keys; /* VALUES: the index that has keys; QUANT_K or CASCADE */
} kvd_record_format;

static inline uint64_t kvd_record_raw_bytes(const kvd_record_format *f)
{
    return 2ull * f->chunk_tokens * f->head_dim * (f->raw == KVD_DTYPE_F32 ? 4 : 2);
}
static inline uint64_t kvd_record_bytes(const kvd_record_format *f)
{
    const uint64_t n = 2ull * f->chunk_tokens * f->head_dim;

    switch (f->type) {
    case KVD_RECORD_RAW:
        return kvd_record_raw_bytes(f);
    case KVD_RECORD_VALUES:
        return kvd_record_raw_bytes(f) / 2;
    case KVD_RECORD_INT8:
        return n;
    case KVD_RECORD_INT4:
        break;
    }
    return n / 2;
}
/* Of one lane of a block, a multiple of 64: [group][head_dim] scales then minima of K, then
 * [block_tokens] scales then minima of V. */
static inline uint64_t kvd_record_param_bytes(const kvd_record_format *f)
{
    if (f->type == KVD_RECORD_RAW || f->type == KVD_RECORD_VALUES)
        return 0;
    return kvd_align_up(4ull * (f->block_tokens / KVD_RECORD_GROUP * f->head_dim + f->block_tokens),
                        64);
}

/* Packs n lanes of a block: raw records in, one behind the other; packed ones and parameters out
 * (VALUES: no parameters, param is not touched).  The same bits on every backend. */
typedef struct kvd_record_pack_args {
    kvd_record_format format; /* not RAW */
    uint64_t          n;
    const void       *src;
    void             *param, *dst;
    const uint64_t   *src_off, *param_off, *dst_off;
} kvd_record_pack_args;

/* Unpacks n records; chunk: its number in the block, param_off: its lane's parameters (VALUES: its
 * lane of the index, from where K comes, rounded to the raw type).  src and dst may be the same
 * record where dst + raw bytes <= src + packed bytes or the packed record begins at dst. */
typedef struct kvd_record_unpack_args {
    kvd_record_format format; /* not RAW */
    uint64_t          n;
    const void       *src, *param;
    void             *dst;
    const uint64_t   *src_off, *param_off, *dst_off;
    const uint32_t   *chunk;
} kvd_record_unpack_args;

/* Brings up from the host tier what the window's change has missed: the urgent misses, or the
 * others, each into its slot.  Records lie there packed (RAW: as they are), one behind the other.
 * With a link then those that window_post has asked for, as they come: it waits for them, at most
 * limit_ns at a time, and leaves the rest where that is over or the host has given up.
 */
typedef struct kvd_window_fetch_args {
    uint32_t                 n_seq, n_kv_head;
    const kvd_window_seq    *seq;
    const kvd_window_place  *place;
    const kvd_window_result *change;
    kvd_kv_layout            kv; /* pool and record_bytes */
    kvd_record_format        format;
    const void              *host, *param;
    uint64_t                 slot_off;
    uint64_t                 lane_stride, sel_stride;
    uint64_t param_off, param_stride; /* bytes: of KV head 0 in an index block; between heads */
    bool     urgent;
    kvd_miss_link link; /* of the same misses */
    uint32_t      first_lane;
} kvd_window_fetch_args;

/* Copies n records of `bytes` (a multiple of 16) each: dst + dst_off[i] = src + src_off[i].
 * Destinations do not overlap. */
typedef struct kvd_record_copy_args {
    uint64_t        n;
    uint64_t        bytes;
    const uint64_t *src_off, *dst_off;
    const void     *src;
    void           *dst;
} kvd_record_copy_args;

/* ---- args: measuring --------------------------------------------------------------- */

/* Made-up q, K and V in place of a model's, for measuring speed: rows are numbers of their position
 * in one stream for each sequence (synth.h says which), whatever else the batch holds.  K and V go
 * where kv_append would store them. */
typedef struct kvd_synth_args {
    uint32_t          n_seq, n_head;
    uint32_t          n_token; /* as in kvd_attn_args */
    const kvd_kv_seq *seq;
    kvd_kv_layout     kv;
    uint32_t          layer, stream; /* stream of the first sequence, then + 1 */
    uint64_t          q_stride;      /* between tokens */
    float            *q;             /* [n_token][n_head][head_dim], or NULL: K and V alone */
    float             reuse; /* share of a query's variance that stays from step to step, <= 1 */
} kvd_synth_args;

/* ---- args: the choice of a token ---------------------------------------------------- */

#define KVD_BEST_MAX 128u

typedef struct kvd_best_item {
    float   value;
    int32_t at; /* -1: none */
} kvd_best_item;

/* The k largest of each row, best first, of equals the lower index; -0 counts, and comes out, as 0.
 * A NaN is none of them: where a row has fewer than k, the rest is { 0, -1 }.  The same bits on
 * every backend. */
typedef struct kvd_best_args {
    uint32_t       n_row, n_col, k; /* 1 <= k <= KVD_BEST_MAX */
    uint64_t       x_stride, out_stride;
    const float   *x;   /* [n_row][n_col] */
    kvd_best_item *out; /* [n_row][k] */
} kvd_best_args;

/* The largest shapes a session will ask for: what scratch is sized by. */
typedef struct kvd_backend_limits {
    uint32_t n_token; /* rows of one matmul or attention call */
    uint32_t n_seq;   /* sequences of one select, window or attn_span call */
    uint32_t n_col;   /* widest matmul input */
    uint32_t n_head, n_kv_head, head_dim;
    uint32_t n_ctx;   /* longest sequence */
    uint32_t n_chunk; /* chunks of the longest index; 0: no index_build, no select */
    uint32_t n_slot;  /* of the largest window; 0: window is not called */
    uint32_t n_vocab; /* elements of a row of best; 0: it is not called */
} kvd_backend_limits;

/* ---- the table ------------------------------------------------------------------- */

/* Bytes of a device with memory of its own; all zero where memory is unified. */
typedef struct kvd_device_memory {
    uint64_t total, free;   /* of the device, now, whoever uses it */
    uint64_t context;       /* what opening the backend took: the driver's context, code */
    uint64_t held, scratch; /* given as DEVICE and not yet freed; reserved for ops */
    uint64_t pinned;        /* of host memory: given as PINNED and not yet freed */
    uint64_t used;          /* by how much free has sunk since before the backend was opened */
} kvd_device_memory;

#define KVD_BACKEND_ABI 6
typedef struct kvd_backend_ops {
    uint32_t    abi;
    const char *name;
    void (*close)(kvd_backend *);

    /* Bytes that reserve would hold for these limits; reserve grows to cover them and never
     * shrinks.  Ops allocate nothing. */
    uint64_t (*reserve_bytes)(const kvd_backend *, const kvd_backend_limits *);
    kvd_status (*reserve)(kvd_backend *, const kvd_backend_limits *, kvd_err *);

    /* Zeroed. */
    kvd_status (*mem_alloc)(kvd_backend *, kvd_mem_kind, uint64_t bytes, kvd_mem *out, kvd_err *);
    void (*mem_free)(kvd_backend *, kvd_mem *); /* zeroes *m; NONE and MAP are no-ops */
    void (*memory)(const kvd_backend *, kvd_device_memory *out);

    /* The first is for the bulk of the work; small work on others is begun ahead of it. */
    kvd_status (*stream_open)(kvd_backend *, kvd_stream **out, kvd_err *);
    void (*stream_close)(kvd_stream *);                 /* NULL is a no-op */
    kvd_status (*stream_sync)(kvd_stream *, kvd_err *); /* waits for all that was called on it */
    kvd_status (*event_open)(kvd_backend *, kvd_event **out, kvd_err *);
    void (*event_close)(kvd_event *);
    kvd_status (*event_record)(kvd_event *, kvd_stream *, kvd_err *);
    kvd_status (*event_wait)(kvd_event *, kvd_stream *, kvd_err *); /* stream waits for event */
    /* Without waiting.  KVD_E_BUSY: not yet; KVD_E_DEVICE: the device has failed. */
    kvd_status (*event_poll)(const kvd_event *, kvd_err *);
    /* Between any kinds; ordered by the stream, and HOST and MAP memory may be read and written
     * until then. */
    kvd_status (*copy)(kvd_stream *, kvd_mem dst, uint64_t dst_off, kvd_mem src, uint64_t src_off,
                       uint64_t bytes, kvd_err *);

    /* Sets n_row runs of row_bytes, pitch bytes apart, to a byte; ordered by the stream. */
    kvd_status (*fill)(kvd_stream *, kvd_mem, uint64_t off, uint64_t pitch, uint64_t row_bytes,
                       uint64_t n_row, uint8_t value, kvd_err *);

    /* The device's time in nanoseconds, when the stream has come so far; its zero is anywhere. */
    kvd_status (*stamp)(kvd_stream *, uint64_t *at, kvd_err *);

    /* Between begin and end, what is called on the stream is recorded instead of run: ops, copies
     * that leave HOST and MAP memory alone, events that lead to other streams and back.  run runs
     * it all in order, over what the pointers lead to by then; arguments themselves are fixed,
     * and scratch is as reserved: after a reserve that asks for more, record again.
     * KVD_E_UNSUPPORTED from begin where ops run in their calls anyway: "cpu" and "ref". */
    kvd_status (*graph_begin)(kvd_stream *, kvd_err *);
    kvd_status (*graph_end)(kvd_stream *, kvd_graph **out, kvd_err *);
    kvd_status (*graph_run)(kvd_graph *, kvd_stream *, kvd_err *);
    void (*graph_close)(kvd_graph *); /* NULL is a no-op */

    kvd_status (*embed)(kvd_stream *, const kvd_embed_args *, kvd_err *);
    kvd_status (*rms_norm)(kvd_stream *, const kvd_rms_norm_args *, kvd_err *);
    kvd_status (*head_norm)(kvd_stream *, const kvd_head_norm_args *, kvd_err *);
    kvd_status (*matmul)(kvd_stream *, const kvd_matmul_args *, kvd_err *);
    kvd_status (*rope)(kvd_stream *, const kvd_rope_args *, kvd_err *);
    kvd_status (*swiglu)(kvd_stream *, const kvd_swiglu_args *, kvd_err *);
    kvd_status (*kv_append)(kvd_stream *, const kvd_kv_append_args *, kvd_err *);
    kvd_status (*qkv_finish)(kvd_stream *, const kvd_qkv_finish_args *, kvd_err *);
    kvd_status (*attn)(kvd_stream *, const kvd_attn_args *, kvd_err *);
    kvd_status (*index_build)(kvd_stream *, const kvd_index_build_args *, kvd_err *);
    kvd_status (*zone_build)(kvd_stream *, const kvd_zone_build_args *, kvd_err *);
    kvd_status (*select)(kvd_stream *, const kvd_select_args *, kvd_err *);
    kvd_status (*attn_span)(kvd_stream *, const kvd_attn_span_args *, kvd_err *);
    kvd_status (*attn_zone)(kvd_stream *, const kvd_attn_zone_args *, kvd_err *);
    kvd_status (*window)(kvd_stream *, const kvd_window_args *, kvd_err *);
    kvd_status (*window_spans)(kvd_stream *, const kvd_window_spans_args *, kvd_err *);
    kvd_status (*choose)(kvd_stream *, const kvd_choose_args *, kvd_err *);
    kvd_status (*window_post)(kvd_stream *, const kvd_window_post_args *, kvd_err *);
    kvd_status (*window_fetch)(kvd_stream *, const kvd_window_fetch_args *, kvd_err *);
    kvd_status (*record_copy)(kvd_stream *, const kvd_record_copy_args *, kvd_err *);
    kvd_status (*record_pack)(kvd_stream *, const kvd_record_pack_args *, kvd_err *);
    kvd_status (*record_unpack)(kvd_stream *, const kvd_record_unpack_args *, kvd_err *);
    kvd_status (*synth)(kvd_stream *, const kvd_synth_args *, kvd_err *);
    kvd_status (*best)(kvd_stream *, const kvd_best_args *, kvd_err *);
} kvd_backend_ops;

/* Every backend object begins with this. */
struct kvd_backend {
    const kvd_backend_ops *ops;
    char                   isa[32]; /* what kernels run, for people: "avx512+vnni+bf16" */
    uint32_t               n_thread;
    bool                   unified; /* one memory for host and device: see above */
};

/* ---- device time (backend_stamps.c) ------------------------------------------------- */

/* What the device did when, in a batch: spans of work on streams, for traces.  begin gives the
 * number of a span whose end follows on the same stream; with NULL stamps, or n_max spans begun,
 * there is none.  take, when all streams have been waited for, adds them to the trace and begins
 * anew; drop only begins anew.  Not while a graph is recorded. */
typedef struct kvd_stamps kvd_stamps;
#define KVD_STAMP_NONE UINT32_MAX
kvd_status kvd_stamps_open(kvd_stamps **out, kvd_backend *be, uint32_t n_max, kvd_err *err);
void       kvd_stamps_close(kvd_stamps *s); /* NULL is a no-op */
kvd_status kvd_stamp_begin(kvd_stamps *s, kvd_stream *st, kvd_trace_kind kind, uint32_t track,
                           uint32_t layer, uint32_t n, uint32_t *span, kvd_err *err);
kvd_status kvd_stamp_end(kvd_stamps *s, kvd_stream *st, uint32_t span, kvd_err *err);
void       kvd_stamps_take(kvd_stamps *s, kvd_trace *t);
void       kvd_stamps_drop(kvd_stamps *s);

typedef struct kvd_backend_params {
    const char *name;          /* "cpu", "ref", "cuda" or "cuda:N"; NULL: "cpu" */
    const char *module;        /* file of the module; NULL: looked for beside the program or the
                                  library, and in the library directory beside the program's */
    const char *cpu_isa;       /* a name of os_isa; NULL: the best this machine runs */
    uint32_t    n_thread;      /* 0: as many as this process may use */
    bool        precise;       /* float activations in matmul, float queries in select */
    bool        deterministic; /* a token's result does not depend on the rest of the batch, nor on
                                  how a prompt was cut into batches: same bits */
} kvd_backend_params;

/* What libkvdrive-NAME.so shows, by the function kvd_backend_module(). */
typedef struct kvd_backend_module_info {
    uint32_t abi; /* KVD_BACKEND_ABI */
    const char
        *version; /* KVD_VERSION_STRING of the build: ops and args are those of this version */
    kvd_status (*open)(kvd_backend **out, const kvd_backend_params *p, kvd_err *err);
} kvd_backend_module_info;
#define KVD_BACKEND_MODULE_SYMBOL "kvd_backend_module"
typedef const kvd_backend_module_info *(*kvd_backend_module_fn)(void);

/* A level the machine lacks is KVD_E_UNSUPPORTED (no GPU, an old driver, no module as well),
 * an unknown name KVD_E_INVAL. */
kvd_status kvd_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err);
void       kvd_backend_close(kvd_backend *b); /* NULL is a no-op */

/* A "cpu" backend beside another one, for the host's part of what that one does: reserved for these
 * limits, with one stream.  A failure leaves nothing open. */
kvd_status kvd_backend_open_beside(kvd_backend **out, kvd_stream **st,
                                   const kvd_backend_limits *lim, kvd_err *err);
void       kvd_backend_close_beside(kvd_backend *b, kvd_stream *st); /* NULL: a no-op */

/* The rows [first, first + n) of a weight, as a weight: how fused projections are taken apart. */
static inline kvd_weight kvd_weight_rows(kvd_weight w, uint32_t first, uint32_t n)
{
    kvd_weight v = w;

    kvd_assert((uint64_t)first + n <= w.n_row);
    v.data  = (const uint8_t *)w.data + (uint64_t)first * w.row_bytes;
    v.n_row = n;
    return v;
}

/* A product's norm and its swiglu as ops of their own, for a backend that runs them so. */
static inline kvd_rms_norm_args kvd_matmul_norm(const kvd_matmul_args *a)
{
    kvd_rms_norm_args n; /* every member is set: no braces fit both C and C++ */

    n.n_row      = a->n_token;
    n.n_col      = a->n_col;
    n.x_stride   = a->x_stride;
    n.out_stride = a->n_col;
    n.x          = a->x;
    n.w          = a->norm;
    n.out        = a->xn;
    n.eps        = a->norm_eps;
    return n;
}
static inline kvd_swiglu_args kvd_matmul_swiglu(const kvd_matmul_args *a)
{
    const kvd_matmul_out *gate = &a->out[0], *up = &a->out[1];
    kvd_swiglu_args       s;

    kvd_assert(a->n_out == 2 && gate->w.n_row == up->w.n_row && !gate->add && !up->add);
    s.n_token     = a->n_token;
    s.n_col       = gate->w.n_row;
    s.gate_stride = gate->y_stride;
    s.up_stride   = up->y_stride;
    s.out_stride  = gate->y_stride;
    s.gate        = gate->y;
    s.up          = up->y;
    s.out         = gate->y;
    return s;
}

#ifdef __cplusplus
}
#endif
#endif
