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
    kvd_mem      room;        /* PINNED: what follows */
    float       *base, *walk; /* [width] of the layer */
    float       *k, *v;       /* [n_batch][width] */
} synth;

/* About normal, variance 1. */
static float normal(kvd_rng *r)
{
    return (kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) - 2.0f) * 1.7320508f;
}

static void fill_rows(synth *y, uint32_t n)
{
    for (uint32_t i = 0; i < n * y->width; i++) {
        float *w = &y->walk[i % y->width];

        *w      = WALK * *w + 0.43f * normal(&y->rng);
        y->k[i] = y->base[i % y->width] + *w;
        y->v[i] = normal(&y->rng);
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
        const uint32_t     n    = (uint32_t)kvd_min_u64(n_token - done, s->params.n_batch);
        const kvd_kv_seq   part = { .n_row = n, .n_past = n_past + done, .block = block };
        model_run          r    = engine_run_of(s, n);
        kvd_kv_append_args store;

        fill_rows(y, n);
        r.k                = y->k;
        r.v                = y->v;
        s->buf.out_part[0] = part; /* which is read where it is */
        store              = engine_store_of(s, &r, layout, s->buf.out_part, 1);
        KVD_TRY(r.ops->kv_append(r.stream, &store, err));
        KVD_TRY(r.ops->stream_sync(r.stream, err)); /* before rows are made anew */
        done += n;
    }
    return KVD_OK;
}

static kvd_status fill_resident(synth *y, uint32_t n_past, kvd_err *err)
{
    kv_store      *kv      = y->s->kv;
    const uint32_t n_layer = model_get_hparams(y->s->model->net)->n_layer;

    KVD_TRY(kv_seq_reserve(kv, y->seq, y->n_token, err));
    KVD_TRY(kv_step_upload(kv, y->s->model->stream, err));
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

static kvd_status take_room(synth *y, kvd_err *err)
{
    kvd_backend   *be   = y->s->model->be;
    const uint64_t rows = y->s->params.n_batch, row = y->width * sizeof(float);

    KVD_TRY(be->ops->mem_alloc(be, KVD_MEM_PINNED, (2 * rows + 2) * row, &y->room, err));
    y->base = y->room.ptr;
    y->walk = y->base + y->width;
    y->k    = y->walk + y->width;
    y->v    = y->k + rows * y->width;
    return KVD_OK;
}

kvd_status engine_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);
    engine_seq          *q;
    synth y = { .s = s, .seq = seq, .n_token = n_token, .width = hp->n_kv_head * hp->head_dim };
    kvd_status st;

    if (seq >= s->params.n_seq || n_token == 0 || n_token > s->params.n_ctx - s->seq[seq].n_token)
        return kvd_fail(err, KVD_E_INVAL, 0, "%u made-up tokens for sequence %u of %u: context %u",
                        n_token, seq, s->params.n_seq, s->params.n_ctx);
    if (s->cached)
        return kvd_fail(err, KVD_E_INVAL, 0, "made-up tokens must not reach a cache (--cache-dir)");
    q = &s->seq[seq];
    KVD_TRY(take_room(&y, err));
    st = (kv_resident(s->kv) ? fill_resident : fill_tiers)(&y, q->n_token, err);
    s->model->be->ops->mem_free(s->model->be, &y.room);
    KVD_TRY(st);
    memset(q->token + q->n_token, 0, n_token * sizeof(*q->token));
    q->n_token += n_token;
    engine_attention_admit(s, seq);
    return KVD_OK;
}
