/* SPDX-License-Identifier: Apache-2.0 */
/* model.h - the door to model/: hyper-parameters, bound weights, and the stages of a layer.
 *
 * A model knows its file and its mathematics; it does not know sequences, caches or schedules.  The
 * pipeline (engine/) calls the stages in order and puts the cache between qkv and ffn:
 *   model_embed, then per layer { model_qkv, [attention], model_ffn }, model_logits.
 * Where K and V are stored model_qkv is told in the backend's terms.
 *
 * Weights stay in the file's mapping, or are copied to the device; norms and biases are float.
 * Thread: immutable once opened, any thread. */
#ifndef KVD_MODEL_H
#define KVD_MODEL_H

#include "backend/backend.h"
#include "base/base.h"
#include "format/format.h"

typedef enum model_rope_kind { /* what is done to the rotation's frequencies */
                               MODEL_ROPE_PLAIN,
                               MODEL_ROPE_LINEAR,
                               MODEL_ROPE_YARN,
                               MODEL_ROPE_FACTORS, /* one divisor per frequency (Llama-3) */
                               MODEL_ROPE_LONG     /* two sets of divisors, chosen by the sequence's
                                                      length (LongRoPE) */
} model_rope_kind;

typedef struct model_rope_request { /* the user's wishes; zero: as the file says */
    kvd_rope_scaling scaling;
    float            factor;
    uint32_t         orig_ctx;
    float            base;
} model_rope_request;

typedef struct model_hparams {
    char     arch[16]; /* "llama" */
    uint32_t n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab;
    uint32_t n_ctx_train; /* longest context the chosen RoPE scaling serves */
    uint32_t n_window;    /* sliding window that has cut n_ctx_train; 0: none */
    float    rms_eps;
    float    attn_scale; /* 1/sqrt(head_dim) */
    bool     qk_norm;    /* RMS norm of each q and k head (qwen3) */

    bool            rope_neox; /* pairs (i, i + n_rot/2), else (2i, 2i+1) */
    uint32_t        n_rot;     /* rotated dimensions of a head */
    model_rope_kind rope_kind;
    float           rope_base, rope_factor;
    float           rope_mscale;   /* cosines and sines are multiplied by it */
    uint32_t        rope_orig_ctx; /* LONG: sequences longer than this use the long divisors */
} model_hparams;

typedef struct model model;

/* g must outlive the model.  Refuses by name: architectures we do not run, tensors that do not
 * belong to the architecture, shapes that contradict the metadata, element types we do not read. */
kvd_status           model_open(model **out, const gguf_file *g, const model_rope_request *rope,
                                kvd_err *err);
void                 model_close(model *m); /* NULL is a no-op */
const model_hparams *model_get_hparams(const model *m);
/* Copies all weights to the backend's device, for one that is not unified; the stages then work
 * there.  On failure the model can only be closed.  displace, before the backend closes, gives the
 * memory back and may be called for any model. */
kvd_status model_place(model *m, kvd_backend *be, kvd_stream *stream, kvd_err *err);
/* What that takes there. */
uint64_t model_place_bytes(const model *m);
void     model_displace(model *m);
uint64_t model_n_param(const model *m);
uint64_t model_heap_bytes(const model *m);
uint32_t model_max_cols(const model *m); /* widest matmul input */

/* Cosines then sines for one position, n_rot floats.  long_factors matters for LONG only. */
void model_rope_row(const model *m, uint32_t pos, bool long_factors, float *cos_sin);

/* Buffers of a running batch, all float, in device memory, n_token rows each. */
typedef struct model_run {
    kvd_stream            *stream;
    const kvd_backend_ops *ops;
    uint32_t               n_token;
    const float           *cos_sin;   /* [n_token][n_rot] */
    float                 *x;         /* [n_token][n_embd] residual stream */
    float                 *xn;        /* [n_token][n_embd] its norm */
    float                 *q;         /* [n_token][n_head * head_dim] */
    float                 *k, *v;     /* [n_token][n_kv_head * head_dim] */
    float                 *att;       /* [n_token][n_head * head_dim] */
    float                 *gate, *up; /* [n_token][n_ff] */
} model_run;

kvd_status model_embed(const model *m, const model_run *r, const int32_t *token, kvd_err *err);
/* x -> q, k, v after bias, head norm and RoPE; k and v of r are appended as store says. */
kvd_status model_qkv(const model *m, uint32_t layer, const model_run *r,
                     const kvd_kv_append_args *store, kvd_err *err);
/* att -> output projection into x, then the feed-forward part into x. */
kvd_status model_ffn(const model *m, uint32_t layer, const model_run *r, kvd_err *err);
/* x -> final norm -> logits [n_token][n_vocab]. */
kvd_status model_logits(const model *m, const model_run *r, float *logits, kvd_err *err);

#endif
