/* SPDX-License-Identifier: Apache-2.0 */
/* model_impl.h - private to model/: the bound weights, and what the architecture table says. */
#ifndef KVD_MODEL_IMPL_H
#define KVD_MODEL_IMPL_H

#include "model/model.h"

typedef struct model_layer {
    const float *attn_norm, *ffn_norm; /* [n_embd] */
    const float *q_norm, *k_norm;      /* [head_dim] or NULL */
    kvd_weight   q, k, v, o, gate, up, down;
    const float *q_bias, *k_bias, *v_bias; /* or NULL */
} model_layer;

struct model {
    model_hparams hp;
    kvd_weight    embd, output; /* [n_vocab][n_embd]; the same when tied */
    const float  *output_norm;
    model_layer  *layer;         /* [n_layer] */
    float        *inv_freq;      /* [n_rot/2] */
    float        *inv_freq_long; /* [n_rot/2], LONG only */
    float        *vectors;       /* norms and biases, one allocation */
    uint64_t      n_param, heap_bytes;
    kvd_backend  *be;     /* of device; borrowed */
    kvd_mem       device; /* matrices and vectors, where they were placed */
    bool          made;   /* a shape: weights are random; tied: there is one matrix for both ends */
    bool          tied;
};

/* One row per architecture we run. */
typedef struct model_arch {
    const char *name;
    bool        neox;     /* pairing of rotated dimensions */
    bool        qk_norm;  /* attn_q_norm and attn_k_norm are required */
    bool        qkv_bias; /* attn_{q,k,v}.bias are required */
    bool        fused;    /* attn_qkv and a double-width ffn_up in place of separate matrices */
} model_arch;

/* model_hparams.c */
kvd_status model_hparams_read(model_hparams *hp, const model_arch **arch, const gguf_file *g,
                              kvd_err *err);
/* model_rope.c: fills hp's rope fields and the frequency tables; needs geometry in hp. */
kvd_status model_rope_init(model *m, const gguf_file *g, const model_rope_request *r, kvd_err *err);

/* model_shape.c: random bits that are weights of a type, one piece of memory for each type that a
 * shape has; all zeros at first, but be. */
typedef struct model_tile {
    kvd_dtype type;
    uint64_t  bytes; /* whole blocks */
    kvd_mem   mem;
} model_tile;
typedef struct model_noise {
    kvd_backend *be;
    model_tile   tile[2];
    uint64_t     n_block; /* where the next weight begins, in blocks */
} model_noise;
/* Gives the copies to the stream, which read the noise. */
kvd_status model_noise_copy(model_noise *n, kvd_stream *st, kvd_dtype type, kvd_mem dst,
                            uint64_t off, uint64_t bytes, kvd_err *err);
void       model_noise_close(model_noise *n);

#endif
