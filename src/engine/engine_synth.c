/* SPDX-License-Identifier: Apache-2.0 */
/* engine_synth.c - a sequence filled with made-up K and V, for measuring speed at depths whose
 * prefill would take minutes.  The numbers are op `synth`'s (backend/synth.h): neighbours are
 * alike, and the queries that kvd_session_measure() makes up find among them what they find in real
 * text.
 *
 * With a cache, which only models have that are made up themselves, what is stored has names that
 * no prompt has: a variant of its own, and tokens that spell the sequence's number.  K and V are a
 * function of that and the position, so they are found there the next time.
 *
 * Thread: the session's. */
#include <string.h>

#include "engine/engine.h"

#define VARIANT_SYNTH 2u /* LongRoPE's are 0 and 1 */

typedef struct synth {
    kvd_session *s;
    uint32_t     seq, n_token;
} synth;

static kvd_status fill_layer(synth *y, uint32_t layer, const kvd_kv_layout *layout,
                             const uint64_t *block, uint32_t n_past, uint32_t n_token, kvd_err *err)
{
    kvd_session   *s      = y->s;
    kvd_kv_seq    *part   = s->buf.out_part; /* which are read where they are */
    const uint32_t n_part = s->params.n_batch;
    model_run      r      = engine_run_of(s, 0);

    for (uint32_t done = 0, i = 0; done < n_token; done += r.n_token, i = (i + 1) % n_part) {
        if (i == 0)
            KVD_TRY(r.ops->stream_sync(r.stream, err)); /* before parts are written anew */
        r.n_token = (uint32_t)kvd_min_u64(n_token - done, s->params.n_batch);
        part[i]   = (kvd_kv_seq){ .n_row = r.n_token, .n_past = n_past + done, .block = block };
        KVD_TRY(engine_synth(s, layer, &r, layout, &part[i], 1, y->seq, NULL, err));
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

/* A segment, as of a prompt; what is there already nobody reads. */
static kvd_status fill_segment(synth *y, uint32_t n_past, uint32_t n_token, kvd_err *err)
{
    kv_store      *kv      = y->s->kv;
    kvd_stream    *st      = y->s->model->stream;
    const uint32_t n_layer = model_get_hparams(y->s->model->net)->n_layer;
    kvd_status     rc      = KVD_OK;

    KVD_TRY(kv_prompt_begin(kv, y->seq, n_token, false, err));
    for (uint32_t il = 0; il < n_layer && rc == KVD_OK; il++) {
        const uint64_t *block;
        kvd_kv_layout   l;

        rc = kv_prompt_open(kv, st, il, &l, &block, err);
        if (rc == KVD_OK)
            rc = fill_layer(y, il, &l, block, n_past, n_token, err);
        if (rc == KVD_OK)
            rc = kv_prompt_close(kv, st, il, NULL, err);
    }
    if (rc == KVD_OK)
        rc = kv_prompt_end(kv, err);
    if (rc != KVD_OK)
        kv_prompt_abort(kv);
    return rc;
}

static kvd_status fill_tiers(synth *y, uint32_t n_past, kvd_err *err)
{
    kvd_status rc = KVD_OK;

    for (uint32_t done = 0, n; done < y->n_token && rc == KVD_OK; done += n) {
        n  = (uint32_t)kvd_min_u64(y->n_token - done, y->s->n_segment);
        rc = fill_segment(y, n_past + done, n, err);
    }
    if (rc != KVD_OK && kv_seq_len(y->s->kv, y->seq) > n_past)
        kv_seq_truncate(y->s->kv, y->s->model->stream, y->seq, n_past);
    return rc;
}

/* The number's last digit, then the rest of it again and again. */
static void name_tokens(const synth *y, engine_seq *q)
{
    const uint32_t n_vocab = model_get_hparams(y->s->model->net)->n_vocab;

    if (q->n_token == 0)
        kv_seq_source(y->s->kv, y->seq, q->token, VARIANT_SYNTH);
    for (uint32_t i = 0; i < y->n_token; i++)
        q->token[q->n_token + i] = (int32_t)(y->seq / n_vocab % n_vocab);
    if (q->n_token == 0)
        q->token[0] = (int32_t)(y->seq % n_vocab);
}

kvd_status engine_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token, kvd_err *err)
{
    synth       y = { .s = s, .seq = seq, .n_token = n_token };
    engine_seq *q;

    if (seq >= s->params.n_seq || n_token == 0 || n_token > s->params.n_ctx - s->seq[seq].n_token)
        return kvd_fail(err, KVD_E_INVAL, 0, "%u made-up tokens for sequence %u of %u: context %u",
                        n_token, seq, s->params.n_seq, s->params.n_ctx);
    q = &s->seq[seq];
    if (s->cached && (s->model->file || (q->n_token > 0 && !q->synth)))
        return kvd_fail(err, KVD_E_INVAL, 0, "made-up tokens must not reach a cache (cache_dir)");
    kv_restore_stop(s->kv, s->model->stream, seq);
    name_tokens(&y, q);
    KVD_TRY((kv_resident(s->kv) ? fill_resident : fill_tiers)(&y, q->n_token, err));
    q->n_token += n_token;
    q->synth = true;
    engine_attention_admit(s, seq);
    return KVD_OK;
}
