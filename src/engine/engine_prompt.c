/* SPDX-License-Identifier: Apache-2.0 */
/* engine_prompt.c - a prompt through the layers one by one: all its batches pass a layer before the
 * next begins.  So each layer's K and V are on the device exactly while they are needed, and leave
 * it once.  The batches, and with them every bit, are those of a prompt that is resident.
 *
 * The price is the hidden state of the whole prompt, kept between layers, so a long one comes in
 * segments (engine_eval.c), each over the KV of those before it.
 * Nothing here allocates: the guard is armed.  Thread: the session's. */
#include <string.h>

#include "engine/engine.h"

#define PLACE_TOKENS 64u /* of a prompt's end, by whose queries its records are placed */
#define PLACE_EVERY  4u  /* every so many of them: a quarter of the time */

typedef struct prompt {
    kvd_session    *s;
    uint32_t        seq, n_past, n_token;
    const int32_t  *token;
    kvd_kv_layout   layout; /* of the layer under way */
    const uint64_t *block;
    engine_progress to;
} prompt;

/* Rows [first, first + n) of the prompt as a run: their own rows of x, everything else shared. */
static model_run rows_of(const prompt *p, uint32_t first, uint32_t n)
{
    const model_hparams *hp = model_get_hparams(p->s->model->net);
    model_run            r  = engine_run_of(p->s, n);

    r.x       = p->s->buf.all_x + (size_t)first * hp->n_embd;
    r.cos_sin = p->s->buf.cos_sin + (size_t)first * hp->n_rot;
    return r;
}

static uint32_t batch_rows(const prompt *p, uint32_t first)
{
    return (uint32_t)kvd_min_u64(p->n_token - first, p->s->n_row);
}

static kvd_status embed(const prompt *p, kvd_err *err)
{
    const model *net   = p->s->model->net;
    const bool   longs = p->s->seq[p->seq].rope_long;

    engine_rope_rows(p->s, p->n_past, p->n_token, longs, p->s->buf.cos_sin_host);
    memcpy(p->s->buf.token, p->token, p->n_token * sizeof(*p->token));
    KVD_TRY(engine_buffers_upload(p->s, p->n_token, err));
    for (uint32_t first = 0; first < p->n_token; first += batch_rows(p, first)) {
        const uint32_t  n = batch_rows(p, first);
        const model_run r = rows_of(p, first, n);

        KVD_TRY(model_embed(net, &r, engine_dev(&p->s->buf, p->s->buf.token + first), err));
    }
    return KVD_OK;
}

static kvd_status ffn(const prompt *p, uint32_t layer, model_run *r, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    uint64_t       t1;

    KVD_TRY(model_ffn(p->s->model->net, layer, r, err));
    t1 = kvd_now_ns();
    p->s->stats.ffn_ns += t1 - t0;
    kvd_trace_add(p->s->trace, KVD_TRACE_FFN, t0, t1, layer, r->n_token);
    return KVD_OK;
}

/* The batches of a layer as parts, and behind them the last row alone.  The blocks are at the same
 * place in every layer. */
static void list_parts(const prompt *p)
{
    uint32_t n = 0;

    for (uint32_t first = 0; first < p->n_token; first += batch_rows(p, first))
        p->s->buf.all_part[n++] = (kvd_kv_seq){ .n_row  = batch_rows(p, first),
                                                .n_past = p->n_past + first,
                                                .block  = p->block };
    p->s->buf.all_part[n] =
        (kvd_kv_seq){ .n_row = 1, .n_past = p->n_past + p->n_token - 1, .block = p->block };
}

static const kvd_kv_seq *part_at(const prompt *p, uint32_t first)
{
    return p->s->buf.all_part + kvd_div_up(first, p->s->n_row);
}

/* In the last layer only the last token's row goes on. */
static kvd_status finish_last(const prompt *p, uint32_t layer, model_run *r, uint32_t n,
                              kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(p->s->model->net);

    r->q += (size_t)(n - 1) * hp->n_head * hp->head_dim;
    r->x += (size_t)(n - 1) * hp->n_embd;
    r->n_token = 1;
    KVD_TRY(engine_attn(p->s, r, layer, &p->layout, part_at(p, p->n_token), 1, err));
    KVD_TRY(ffn(p, layer, r, err));
    KVD_TRY(model_logits(p->s->model->net, r, p->s->buf.out, err));
    return engine_buffers_download(p->s, 1, err);
}

static kvd_status run_batch(const prompt *p, uint32_t layer, uint32_t first, kvd_err *err)
{
    const model             *net   = p->s->model->net;
    const uint32_t           n     = batch_rows(p, first);
    const bool               last  = layer + 1 == model_get_hparams(net)->n_layer;
    const kvd_kv_seq        *part  = part_at(p, first);
    model_run                r     = rows_of(p, first, n);
    const kvd_kv_append_args store = engine_store_of(p->s, &r, &p->layout, part, 1);
    const uint64_t           t0    = kvd_now_ns();
    uint64_t                 t1;

    KVD_TRY(model_qkv(net, layer, &r, &store, err));
    KVD_TRY(engine_synth_batch(p->s, layer, &r, &p->layout, part, 1, p->seq, err));
    KVD_TRY(kv_prompt_written(p->s->kv, p->s->model->stream, layer, first + n, err));
    t1 = kvd_now_ns();
    p->s->stats.qkv_ns += t1 - t0;
    kvd_trace_add(p->s->trace, KVD_TRACE_QKV, t0, t1, layer, n);
    if (last)
        return first + n < p->n_token ? KVD_OK : finish_last(p, layer, &r, n, err);
    KVD_TRY(engine_attn(p->s, &r, layer, &p->layout, part, 1, err));
    return ffn(p, layer, &r, err);
}

static kvd_status trace_batch(const prompt *p, uint32_t layer, uint32_t first, kvd_err *err)
{
    const uint64_t t0 = kvd_trace_now(p->s->trace);

    KVD_TRY(run_batch(p, layer, first, err));
    kvd_trace_add(p->s->trace, KVD_TRACE_BATCH, t0, kvd_trace_now(p->s->trace), layer,
                  batch_rows(p, first));
    return KVD_OK;
}

/* Tells how far the prompt is, in tokens through all layers. */
static kvd_status report(const prompt *p, uint32_t layer, uint32_t first, kvd_err *err)
{
    const uint64_t n_layer = model_get_hparams(p->s->model->net)->n_layer;
    const uint64_t done    = p->to.done + ((uint64_t)layer * p->n_token + first) / n_layer;

    if (atomic_exchange_explicit(&p->s->cancel, false, memory_order_relaxed))
        return kvd_fail(err, KVD_E_CANCELED, 0, "prefill canceled in layer %u at token %u", layer,
                        first);
    return engine_tell_progress(&p->to, (uint32_t)done, err);
}

/* Queries of the last tokens, which the last batch has left in its buffer. */
static kv_prompt_query last_queries(const prompt *p)
{
    const model_hparams *hp   = model_get_hparams(p->s->model->net);
    const uint64_t       row  = (uint64_t)hp->n_head * hp->head_dim;
    const uint32_t       last = (p->n_token - 1) % p->s->n_row;
    const uint32_t       n    = (uint32_t)kvd_min_u64(last, PLACE_TOKENS - 1) / PLACE_EVERY + 1;

    return (kv_prompt_query){ .n_row    = n,
                              .q_stride = row * PLACE_EVERY,
                              .q        = p->s->buf.q + (last - (n - 1) * PLACE_EVERY) * row,
                              .scale    = hp->attn_scale };
}

static kvd_status run_layers(prompt *p, kvd_err *err)
{
    kvd_session          *s    = p->s;
    const kv_prompt_query last = last_queries(p);

    for (uint32_t il = 0; il < model_get_hparams(s->model->net)->n_layer; il++) {
        const uint64_t t0 = kvd_trace_now(s->trace);

        KVD_TRY(kv_prompt_open(s->kv, s->model->stream, il, &p->layout, &p->block, err));
        if (il == 0)
            list_parts(p);
        kvd_assert(p->block == s->buf.all_part[0].block);
        for (uint32_t first = 0; first < p->n_token; first += batch_rows(p, first)) {
            KVD_TRY(report(p, il, first, err));
            KVD_TRY(trace_batch(p, il, first, err));
        }
        KVD_TRY(kv_prompt_close(s->kv, s->model->stream, il, &last, err));
        kvd_trace_add(s->trace, KVD_TRACE_LAYER, t0, kvd_trace_now(s->trace), il, p->n_token);
    }
    return s->model->be->ops->stream_sync(s->model->stream, err);
}

kvd_status engine_prompt_run(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token,
                             const engine_progress *to, kvd_err *err)
{
    prompt     p   = { .s       = s,
                       .seq     = seq,
                       .n_past  = kv_seq_len(s->kv, seq),
                       .n_token = n_token,
                       .token   = token,
                       .to      = *to };
    kvd_err    end = { 0 };
    bool       was;
    kvd_status st;

    KVD_TRY(kv_prompt_begin(s->kv, seq, n_token, true, err));
    was = kvd_alloc_guard(true);
    st  = embed(&p, err);
    if (st == KVD_OK)
        st = run_layers(&p, err);
    kvd_alloc_guard(was);
    if (st == KVD_OK)
        st = kv_prompt_end(s->kv, err);
    if (st == KVD_OK)
        return KVD_OK;
    (void)!s->model->be->ops->stream_sync(s->model->stream, &end); /* lists are written anew next */
    kv_prompt_abort(s->kv);
    return st;
}
