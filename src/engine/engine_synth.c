/* SPDX-License-Identifier: Apache-2.0 */
/* engine_synth.c - a sequence filled with made-up K and V, for measuring speed at depths whose
 * prefill would take minutes.
 *
 * Rows follow a slow random walk around a direction of their lane, so that neighbours are alike and
 * selections have the locality of real text; nothing else about them means anything.
 * Thread: the session's. */
#include <string.h>

#include "engine/engine.h"

#define WALK 0.9f /* of a row stays in the next */

typedef struct synth {
    kvd_session *s;
    uint32_t     seq, n_token, width; /* floats of a K row over all heads */
    kvd_rng      rng;
    float       *base, *walk; /* [width] of the layer, in buf.gate and buf.up */
} synth;

/* About normal, variance 1. */
static float normal(kvd_rng *r)
{
    return (kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) - 2.0f) * 1.7320508f;
}

static void fill_rows(synth *y, uint32_t n)
{
    engine_buffers *b = &y->s->buf;

    for (uint32_t i = 0; i < n * y->width; i++) {
        float *w = &y->walk[i % y->width];

        *w      = WALK * *w + 0.43f * normal(&y->rng);
        b->k[i] = y->base[i % y->width] + *w;
        b->v[i] = normal(&y->rng);
    }
}

static kvd_status fill_layer(synth *y, uint32_t layer, const kvd_kv_layout *layout,
                             const uint64_t *block, uint32_t n_past, uint32_t n_token, kvd_err *err)
{
    kvd_session *s = y->s;

    kvd_rng_seed(&y->rng, ((uint64_t)layer << 32) + n_past);
    for (uint32_t i = 0; i < y->width; i++) {
        y->base[i] = normal(&y->rng);
        y->walk[i] = 0.0f;
    }
    for (uint32_t done = 0; done < n_token;) {
        const uint32_t   n    = (uint32_t)kvd_min_u64(n_token - done, s->params.n_batch);
        const kvd_kv_seq part = { .n_row = n, .n_past = n_past + done, .block = block };
        const model_run  r    = engine_run_of(s, n);

        fill_rows(y, n);
        KVD_TRY(engine_append(&r, layout, &part, 1, err));
        done += n;
    }
    return KVD_OK;
}

static kvd_status fill_resident(synth *y, uint32_t n_past, kvd_err *err)
{
    kv_store      *kv      = y->s->kv;
    const uint32_t n_layer = model_get_hparams(y->s->model->net)->n_layer;

    KVD_TRY(kv_seq_reserve(kv, y->seq, y->n_token, err));
    for (uint32_t il = 0; il < n_layer; il++) {
        const kvd_kv_layout l = kv_layout(kv, il);

        KVD_TRY(fill_layer(y, il, &l, kv_seq_blocks(kv, y->seq), n_past, y->n_token, err));
    }
    kv_seq_commit(kv, y->seq, y->n_token, KV_MADE_PROMPT);
    return kv_seq_seal(kv, y->s->model->stream, y->seq, false, err);
}

static kvd_status fill_tiers(synth *y, uint32_t n_past, kvd_err *err)
{
    kv_store      *kv      = y->s->kv;
    kvd_stream    *st      = y->s->model->stream;
    const uint32_t n_layer = model_get_hparams(y->s->model->net)->n_layer;
    kvd_status     rc      = KVD_OK;

    KVD_TRY(kv_prompt_begin(kv, y->seq, y->n_token, err));
    for (uint32_t il = 0; il < n_layer && rc == KVD_OK; il++) {
        const uint64_t *block;
        kvd_kv_layout   l;

        rc = kv_prompt_open(kv, st, il, &l, &block, err);
        if (rc == KVD_OK)
            rc = fill_layer(y, il, &l, block, n_past, y->n_token, err);
        if (rc == KVD_OK)
            rc = kv_prompt_close(kv, st, il, NULL, err);
    }
    if (rc == KVD_OK)
        rc = kv_prompt_end(kv, err);
    if (rc != KVD_OK)
        kv_prompt_abort(kv);
    return rc;
}

kvd_status engine_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);
    engine_seq          *q;
    synth                y = { .s       = s,
                               .seq     = seq,
                               .n_token = n_token,
                               .width   = hp->n_kv_head * hp->head_dim,
                               .base    = s->buf.gate,
                               .walk    = s->buf.up };

    if (seq >= s->params.n_seq || n_token == 0 || n_token > s->params.n_ctx - s->seq[seq].n_token)
        return kvd_fail(err, KVD_E_INVAL, 0, "%u made-up tokens for sequence %u of %u: context %u",
                        n_token, seq, s->params.n_seq, s->params.n_ctx);
    if (s->cached)
        return kvd_fail(err, KVD_E_INVAL, 0, "made-up tokens must not reach a cache (--cache-dir)");
    q = &s->seq[seq];
    kvd_assert(y.width <= hp->n_ff * s->params.n_batch);
    KVD_TRY((kv_resident(s->kv) ? fill_resident : fill_tiers)(&y, q->n_token, err));
    memset(q->token + q->n_token, 0, n_token * sizeof(*q->token));
    q->n_token += n_token;
    engine_attention_admit(s, seq);
    return KVD_OK;
}
