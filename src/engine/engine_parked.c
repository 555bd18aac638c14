/* SPDX-License-Identifier: Apache-2.0 */
/* engine_parked.c - sequences that take no tokens for now, and how they come back.
 *
 * Number n_seq + i is place i of the store (kv_parked.c), which has the tokens as well.
 * Thread: the session's. */
#include "engine/engine.h"

static bool is_parked(const kvd_session *s, uint32_t seq)
{
    return seq >= s->params.n_seq && seq - s->params.n_seq < kv_parked_places(s->kv);
}

static uint32_t place_of(const kvd_session *s, uint32_t seq)
{
    return seq - s->params.n_seq;
}

uint32_t engine_seq_len(const kvd_session *s, uint32_t seq)
{
    if (seq < s->params.n_seq)
        return s->seq[seq].n_token;
    return is_parked(s, seq) ? kv_parked_len(s->kv, place_of(s, seq)) : 0;
}

uint32_t engine_seq_common(const kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n)
{
    const uint32_t len = engine_seq_len(s, seq);

    if (len == 0 || n == 0)
        return 0;
    if (is_parked(s, seq))
        return kv_parked_common(s->kv, place_of(s, seq), token, n);
    return kvd_common_tokens(s->seq[seq].token, token, len < n ? len : n);
}

bool engine_seq_where(const kvd_session *s, uint32_t seq, kv_where *out)
{
    if (seq < s->params.n_seq)
        kv_seq_where(s->kv, seq, out);
    else if (is_parked(s, seq))
        kv_parked_where(s->kv, place_of(s, seq), out);
    else
        return false;
    return true;
}

static kvd_status park(kvd_session *s, uint32_t seq, uint32_t place, kvd_err *err)
{
    engine_seq *q = &s->seq[seq];

    if (q->synth)
        return kvd_fail(err, KVD_E_INVAL, 0, "sequence %u has made-up tokens and cannot be parked",
                        seq);
    /* its prompt ends; what a rebuild has not come to is not parked */
    KVD_TRY(engine_seq_truncate(s, seq, kv_seq_len(s->kv, seq), err));
    if (q->n_token > 0)
        kv_park(s->kv, seq, place, q->token, q->rope_long);
    q->n_token = 0;
    engine_attention_admit(s, seq);
    return KVD_OK;
}

static kvd_status unpark(kvd_session *s, uint32_t place, uint32_t seq, kvd_err *err)
{
    const uint32_t n = kv_parked_len(s->kv, place);
    engine_seq    *q = &s->seq[seq];

    KVD_TRY(engine_seq_truncate(s, seq, 0, err));
    if (n == 0)
        return KVD_OK;
    q->rope_long = kv_parked_variant(s->kv, place) != 0;
    kv_seq_source(s->kv, seq, q->token, q->rope_long);
    KVD_TRY(kv_unpark(s->kv, s->model->stream, place, seq, q->token, err));
    q->n_token = kv_seq_len(s->kv, seq);
    engine_attention_admit(s, seq);
    return KVD_OK;
}

kvd_status engine_seq_move(kvd_session *s, uint32_t from, uint32_t to, kvd_err *err)
{
    const bool parks = from < s->params.n_seq && is_parked(s, to);

    if (!parks && !(is_parked(s, from) && to < s->params.n_seq))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "sequence %u cannot move to %u: one of them must be below %u, the other "
                        "one of the %u parked ones from there on",
                        from, to, s->params.n_seq, kv_parked_places(s->kv));
    if (engine_seq_len(s, to) > 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "sequence %u cannot move to %u, which holds %u tokens",
                        from, to, engine_seq_len(s, to));
    return parks ? park(s, from, place_of(s, to), err) : unpark(s, place_of(s, from), to, err);
}

kvd_status engine_parked_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep, kvd_err *err)
{
    if (!is_parked(s, seq) || (n_keep != 0 && n_keep != engine_seq_len(s, seq)))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "cut to %u tokens: sequence %u is none that is evaluated, and only all of "
                        "a parked one (%u to %u) can be dropped",
                        n_keep, seq, s->params.n_seq, s->params.n_seq + kv_parked_places(s->kv));
    if (n_keep == 0)
        kv_parked_drop(s->kv, place_of(s, seq));
    return KVD_OK;
}

void engine_parked_store_tails(kvd_session *s)
{
    kvd_err err = { 0 };

    for (uint32_t i = 0; s->cached && i < kv_parked_places(s->kv); i++) {
        if (kv_parked_len(s->kv, i) == 0)
            continue;
        if (engine_seq_truncate(s, 0, 0, &err) != KVD_OK || unpark(s, i, 0, &err) != KVD_OK) {
            kvd_log(KVD_LOG_WARN, "a parked sequence is not stored: %s", err.msg);
            return;
        }
        kv_seq_store_tail(s->kv, s->model->stream, 0);
    }
}
