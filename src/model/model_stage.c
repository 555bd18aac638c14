/* SPDX-License-Identifier: Apache-2.0 */
/* model_stage.c - the stages of a layer, as op calls.  Matrices that share an input go into one
 * matmul call, which costs one hand-over to the workers instead of three. */
#include "model/model_impl.h"

static kvd_status norm_x(const model *m, const model_run *r, const float *w, kvd_err *err)
{
    const kvd_rms_norm_args a = {
        .n_row      = r->n_token,
        .n_col      = m->hp.n_embd,
        .x_stride   = m->hp.n_embd,
        .out_stride = m->hp.n_embd,
        .x          = r->x,
        .w          = w,
        .out        = r->xn,
        .eps        = m->hp.rms_eps,
    };

    return r->ops->rms_norm(r->stream, &a, err);
}

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

/* Head norm and rotation of q or k. */
static kvd_status finish_heads(const model *m, const model_run *r, float *x, uint32_t n_head,
                               const float *norm, kvd_err *err)
{
    const model_hparams *hp     = &m->hp;
    const uint64_t       stride = (uint64_t)n_head * hp->head_dim;

    if (norm) {
        const kvd_head_norm_args a = {
            .n_token  = r->n_token,
            .n_head   = n_head,
            .head_dim = hp->head_dim,
            .x_stride = stride,
            .x        = x,
            .w        = norm,
            .eps      = hp->rms_eps,
        };
        KVD_TRY(r->ops->head_norm(r->stream, &a, err));
    }
    const kvd_rope_args a = {
        .n_token  = r->n_token,
        .n_head   = n_head,
        .head_dim = hp->head_dim,
        .n_rot    = hp->n_rot,
        .neox     = hp->rope_neox,
        .x_stride = stride,
        .x        = x,
        .cos_sin  = r->cos_sin,
    };
    return r->ops->rope(r->stream, &a, err);
}

kvd_status model_qkv(const model *m, uint32_t layer, const model_run *r, kvd_err *err)
{
    const model_layer    *l = &m->layer[layer];
    const kvd_matmul_args a = {
        .n_token  = r->n_token,
        .n_col    = m->hp.n_embd,
        .n_out    = 3,
        .x_stride = m->hp.n_embd,
        .x        = r->xn,
        .out = { matmul_to(l->q, l->q_bias, r->q, false), matmul_to(l->k, l->k_bias, r->k, false),
                 matmul_to(l->v, l->v_bias, r->v, false) },
    };

    KVD_TRY(norm_x(m, r, l->attn_norm, err));
    KVD_TRY(r->ops->matmul(r->stream, &a, err));
    KVD_TRY(finish_heads(m, r, r->q, m->hp.n_head, l->q_norm, err));
    return finish_heads(m, r, r->k, m->hp.n_kv_head, l->k_norm, err);
}

kvd_status model_ffn(const model *m, uint32_t layer, const model_run *r, kvd_err *err)
{
    const model_hparams  *hp  = &m->hp;
    const model_layer    *l   = &m->layer[layer];
    const uint32_t        n_q = hp->n_head * hp->head_dim;
    const kvd_matmul_args o   = { .n_token  = r->n_token,
                                  .n_col    = n_q,
                                  .n_out    = 1,
                                  .x_stride = n_q,
                                  .x        = r->att,
                                  .out      = { matmul_to(l->o, NULL, r->x, true) } };
    const kvd_matmul_args gu  = { .n_token  = r->n_token,
                                  .n_col    = hp->n_embd,
                                  .n_out    = 2,
                                  .x_stride = hp->n_embd,
                                  .x        = r->xn,
                                  .out      = { matmul_to(l->gate, NULL, r->gate, false),
                                                matmul_to(l->up, NULL, r->up, false) } };
    const kvd_swiglu_args s   = { .n_token     = r->n_token,
                                  .n_col       = hp->n_ff,
                                  .gate_stride = hp->n_ff,
                                  .up_stride   = hp->n_ff,
                                  .out_stride  = hp->n_ff,
                                  .gate        = r->gate,
                                  .up          = r->up,
                                  .out         = r->gate };
    const kvd_matmul_args d   = { .n_token  = r->n_token,
                                  .n_col    = hp->n_ff,
                                  .n_out    = 1,
                                  .x_stride = hp->n_ff,
                                  .x        = r->gate,
                                  .out      = { matmul_to(l->down, NULL, r->x, true) } };

    KVD_TRY(r->ops->matmul(r->stream, &o, err));
    KVD_TRY(norm_x(m, r, l->ffn_norm, err));
    KVD_TRY(r->ops->matmul(r->stream, &gu, err));
    KVD_TRY(r->ops->swiglu(r->stream, &s, err));
    return r->ops->matmul(r->stream, &d, err);
}

kvd_status model_logits(const model *m, const model_run *r, float *logits, kvd_err *err)
{
    const kvd_matmul_args a = {
        .n_token  = r->n_token,
        .n_col    = m->hp.n_embd,
        .n_out    = 1,
        .x_stride = m->hp.n_embd,
        .x        = r->xn,
        .out      = { matmul_to(m->output, NULL, logits, false) },
    };

    KVD_TRY(norm_x(m, r, m->output_norm, err));
    return r->ops->matmul(r->stream, &a, err);
}
