/* SPDX-License-Identifier: Apache-2.0 */
/* model_stage.c - the stages of a layer, as op calls.  Matrices that share an input go into one
 * matmul call, which costs one hand-over to the workers instead of three. */
#include "model/model_impl.h"

static kvd_matmul_out matmul_to(kvd_weight w, const float *bias, float *y, bool add)
{
    return (kvd_matmul_out){ .w = w, .bias = bias, .y = y, .y_stride = w.n_row, .add = add };
}

kvd_status model_embed(const model *m, const model_run *r, const int32_t *token, kvd_err *err)
{
    const kvd_embed_args a = {
        .n_token = r->n_token, .table = m->embd, .token = token, .out = r->x
    };

    return r->ops->embed(r->stream, &a, err);
}

/* A product with the norm of x; its outputs are the caller's to fill in. */
static kvd_matmul_args of_norm(const model *m, const model_run *r, const float *norm)
{
    return (kvd_matmul_args){ .n_token  = r->n_token,
                              .n_col    = m->hp.n_embd,
                              .x_stride = m->hp.n_embd,
                              .x        = r->x,
                              .norm     = norm,
                              .xn       = r->xn,
                              .norm_eps = m->hp.rms_eps };
}

/* A product that is added to x. */
static kvd_status add_to_x(const model_run *r, kvd_weight w, const float *from, kvd_err *err)
{
    const kvd_matmul_args a = { .n_token  = r->n_token,
                                .n_col    = w.n_col,
                                .n_out    = 1,
                                .x_stride = w.n_col,
                                .x        = from,
                                .out      = { matmul_to(w, NULL, r->x, true) } };

    return r->ops->matmul(r->stream, &a, err);
}

kvd_status model_qkv(const model *m, uint32_t layer, const model_run *r,
                     const kvd_kv_append_args *store, kvd_err *err)
{
    const model_hparams      *hp = &m->hp;
    const model_layer        *l  = &m->layer[layer];
    kvd_matmul_args           a  = of_norm(m, r, l->attn_norm);
    const kvd_qkv_finish_args f  = { .n_token   = r->n_token,
                                     .n_head    = hp->n_head,
                                     .n_kv_head = hp->n_kv_head,
                                     .head_dim  = hp->head_dim,
                                     .n_rot     = hp->n_rot,
                                     .neox      = hp->rope_neox,
                                     .eps       = hp->rms_eps,
                                     .q_stride  = (uint64_t)hp->n_head * hp->head_dim,
                                     .q         = r->q,
                                     .k         = r->k,
                                     .q_norm    = l->q_norm,
                                     .k_norm    = l->k_norm,
                                     .cos_sin   = r->cos_sin,
                                     .store     = *store };

    a.n_out  = 3;
    a.out[0] = matmul_to(l->q, l->q_bias, r->q, false);
    a.out[1] = matmul_to(l->k, l->k_bias, r->k, false);
    a.out[2] = matmul_to(l->v, l->v_bias, r->v, false);
    KVD_TRY(r->ops->matmul(r->stream, &a, err));
    return r->ops->qkv_finish(r->stream, &f, err);
}

kvd_status model_ffn(const model *m, uint32_t layer, const model_run *r, kvd_err *err)
{
    const model_layer *l = &m->layer[layer];
    kvd_matmul_args    a = of_norm(m, r, l->ffn_norm);

    a.n_out  = 2;
    a.swiglu = true;
    a.out[0] = matmul_to(l->gate, NULL, r->gate, false);
    a.out[1] = matmul_to(l->up, NULL, r->up, false);
    KVD_TRY(add_to_x(r, l->o, r->att, err));
    KVD_TRY(r->ops->matmul(r->stream, &a, err));
    return add_to_x(r, l->down, r->gate, err);
}

kvd_status model_logits(const model *m, const model_run *r, float *logits, kvd_err *err)
{
    kvd_matmul_args a = of_norm(m, r, m->output_norm);

    a.n_out  = 1;
    a.out[0] = matmul_to(m->output, NULL, logits, false);
    return r->ops->matmul(r->stream, &a, err);
}
