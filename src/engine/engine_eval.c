/* SPDX-License-Identifier: Apache-2.0 */
/* engine_eval.c - batches of tokens appended to sequences.
 *
 * Invariants
 *  (1) seq[i].token[0 .. n_token) are the sequence's tokens; the store holds the K and V of the
 *      first of them: of all, except after a rebuild that failed or was canceled half-way;
 *  (2) all K of a sequence were rotated with one set of RoPE factors (seq[i].rope_long);
 *  (3) a failed evaluation leaves every sequence with the tokens it had;
 *  (4) seq[i].prompt_end is 0 or more than seq[i].n_token.
 *
 * LongRoPE: the factors depend on the sequence's length.  When a sequence grows past the original
 * context (or is cut back under it), its tokens are evaluated again with the other set before
 * anything is added: K of both kinds never meet in one sequence. */
#include <string.h>

#include "engine/engine.h"

#define TELLING       32u  /* tokens of a batch that tell what one takes in a prompt */
#define RESUME_MAX    256u /* tokens behind a known prefix that --resume sparse takes as steps */
#define N_RECOVER     3u   /* times that an evaluation is tried when the disk tier loses records */
#define N_RECOVER_ALL 64u  /* the same, with another unit in quarantine each time */

/* A batch as it runs; the public one and pieces of a prefill are both turned into it. */
typedef struct work {
    uint32_t        n_token;
    const int32_t  *token;
    const uint32_t *seq; /* [n_token], or NULL: all of only_seq */
    uint32_t        only_seq;
    const uint8_t  *want; /* [n_token], or NULL: the last one if want_last */
    bool            want_last;
    bool            exact;  /* a prompt, or what was one */
    bool            more;   /* of the same prompt follows: its blocks are sealed together */
    uint32_t        n_best; /* that wanted rows keep of their logits; 0: all */
    uint32_t final_len;     /* what only_seq grows to in the end; 0: to what this batch makes it */
} work;

static uint32_t work_seq(const work *w, uint32_t i)
{
    return w->seq ? w->seq[i] : w->only_seq;
}

static bool work_wants(const work *w, uint32_t i)
{
    return w->want ? w->want[i] != 0 : w->want_last && i + 1 == w->n_token;
}

static kvd_status check_work(const kvd_session *s, const work *w, kvd_err *err)
{
    const uint32_t n_vocab = model_get_hparams(s->model->net)->n_vocab;
    const uint32_t most    = w->exact ? s->n_row : s->params.n_batch;
    uint32_t       n_want  = 0;

    if (w->n_token == 0 || w->n_token > most || !w->token)
        return kvd_fail(err, KVD_E_INVAL, 0, "batch of %u tokens: expected 1 to %u (n_batch)",
                        w->n_token, most);
    for (uint32_t i = 0; i < w->n_token; i++) {
        if (w->token[i] < 0 || (uint32_t)w->token[i] >= n_vocab)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "token %u of the batch has id %d, the vocabulary %u", i, w->token[i],
                            n_vocab);
        if (work_seq(w, i) >= s->params.n_seq)
            return kvd_fail(err, KVD_E_INVAL, 0, "token %u of the batch is for sequence %u of %u",
                            i, work_seq(w, i), s->params.n_seq);
        n_want += work_wants(w, i);
    }
    if (w->n_best > KVD_BEST_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "the best %u logits asked for (n_best): at most %u",
                        w->n_best, KVD_BEST_MAX);
    if (n_want > s->params.n_logits)
        return kvd_fail(err, KVD_E_INVAL, 0, "logits of %u tokens asked for, the session keeps %u",
                        n_want, s->params.n_logits);
    return KVD_OK;
}

/* n[seq] = rows of each sequence in the batch. */
static void count_rows(const kvd_session *s, const work *w, uint32_t *n)
{
    memset(n, 0, s->params.n_seq * sizeof(*n));
    for (uint32_t i = 0; i < w->n_token; i++)
        n[work_seq(w, i)]++;
}

/* Whether what a sequence gets now belongs to a prompt that has begun. */
static bool in_prompt(const kvd_session *s, uint32_t seq)
{
    return kv_seq_len(s->kv, seq) < s->seq[seq].prompt_end;
}

/* Gathers the batch's tokens by sequence: fills part, out_row and buf.token. */
static void lay_out(kvd_session *s, const work *w)
{
    uint32_t row = 0;

    count_rows(s, w, s->seq_rows);
    s->n_part   = 0;
    s->n_sparse = 0;
    for (uint32_t q = 0; q < s->params.n_seq; q++) {
        const uint32_t n = s->seq_rows[q];

        if (n == 0)
            continue;
        s->buf.part[s->n_part]   = (kvd_kv_seq){ .first_row = row,
                                                 .n_row     = n,
                                                 .n_past    = kv_seq_len(s->kv, q),
                                                 .block     = kv_seq_blocks(s->kv, q) };
        s->part_seq[s->n_part]   = q;
        s->part_exact[s->n_part] = w->exact || in_prompt(s, q);
        if (n == 1 && !s->part_exact[s->n_part] && kv_seq_sparse(s->kv, q)) {
            s->buf.sparse_row[s->n_sparse] = row;
            s->sparse_seq[s->n_sparse++]   = q;
        }
        s->n_part++;
        s->seq_rows[q] = row; /* from here on: the sequence's next row */
        row += n;
    }
    s->n_out    = 0;
    s->in_order = true;
    for (uint32_t i = 0; i < w->n_token; i++) {
        const uint32_t r = s->seq_rows[work_seq(w, i)]++;

        s->in_order = s->in_order && r == i && work_wants(w, i);

        s->buf.token[r] = w->token[i];
        if (work_wants(w, i))
            s->out_row[s->n_out++] = r;
    }
}

/* A decode step goes on in the sequence's mode; anything else is a prompt that decides it. */
static bool is_step(const kvd_session *s, uint32_t part)
{
    const kvd_kv_seq *p = &s->buf.part[part];

    return p->n_row == 1 && p->n_past > 0 && !s->part_exact[part];
}

static kv_made made_by(const kvd_session *s, uint32_t part)
{
    if (!is_step(s, part))
        return KV_MADE_PROMPT;
    return kv_seq_sparse(s->kv, s->part_seq[part]) ? KV_MADE_SPARSE : KV_MADE_DENSE;
}

/* Whether more of the part's prompt follows.  Where all is resident its blocks are then sealed
 * later, together; elsewhere there is no room for that. */
static bool seals_later(const kvd_session *s, uint32_t part, const work *w)
{
    return w->more || (kv_resident(s->kv) && in_prompt(s, s->part_seq[part]));
}

/* The last piece of a prompt that had begun has been sealed. */
static void end_prompt(kvd_session *s, uint32_t seq)
{
    engine_seq *q = &s->seq[seq];

    if (q->prompt_end == 0 || q->n_token < q->prompt_end)
        return;
    q->prompt_end = 0;
    kv_seq_store_tail(s->kv, s->model->stream, seq);
}

static kvd_status commit_parts(kvd_session *s, const work *w, kvd_err *err)
{
    for (uint32_t i = 0; i < s->n_part; i++) {
        const kvd_kv_seq *p = &s->buf.part[i];

        memcpy(s->seq[s->part_seq[i]].token + p->n_past, s->buf.token + p->first_row,
               p->n_row * sizeof(int32_t));
        kv_seq_commit(s->kv, s->part_seq[i], p->n_row, made_by(s, i));
    }
    for (uint32_t i = 0; i < s->n_part; i++)
        if (!seals_later(s, i, w))
            KVD_TRY(kv_seq_seal(s->kv, s->model->stream, s->part_seq[i], is_step(s, i), err));
    for (uint32_t i = 0; i < s->n_part; i++) {
        const kvd_kv_seq *p = &s->buf.part[i];
        engine_seq       *q = &s->seq[s->part_seq[i]];

        if (q->n_token < p->n_past + p->n_row)
            q->n_token = p->n_past + p->n_row;
        if (!is_step(s, i))
            engine_attention_admit(s, s->part_seq[i]);
        end_prompt(s, s->part_seq[i]);
    }
    return KVD_OK;
}

/* Back to what the sequences held; a step that was begun leaves windows half changed. */
static void undo_parts(kvd_session *s)
{
    for (uint32_t i = 0; i < s->n_part; i++) {
        const uint32_t seq = s->part_seq[i];

        if (kv_seq_len(s->kv, seq) > s->buf.part[i].n_past)
            kv_seq_truncate(s->kv, s->model->stream, seq, s->buf.part[i].n_past);
        kv_seq_release(s->kv, seq);
    }
    for (uint32_t i = 0; i < s->n_sparse; i++)
        kv_seq_restart(s->kv, s->sparse_seq[i]);
}

static void count_time(kvd_session *s, uint32_t n_token, uint64_t t0, uint64_t t1)
{
    bool decode = true;

    for (uint32_t i = 0; i < s->n_part; i++)
        decode = decode && s->buf.part[i].n_row == 1;
    *(decode ? &s->stats.n_decode : &s->stats.n_prefill) += n_token;
    *(decode ? &s->stats.decode_ns : &s->stats.prefill_ns) += t1 - t0;
    if (!decode && n_token >= TELLING)
        kv_evaluated(s->kv, n_token, t1 - t0);
    kvd_trace_add(s->trace, decode ? KVD_TRACE_STEP : KVD_TRACE_PREFILL, t0, t1, KVD_TRACE_NOWHERE,
                  n_token);
}

/* Runs a checked batch whose sequences are current. */
static kvd_status run_work(kvd_session *s, const work *w, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_status     st = KVD_OK;

    s->n_logits = s->n_picks = 0;
    s->best = w->n_best > 1 ? KVD_BEST_MAX : w->n_best; /* few kinds: each is a recorded step */
    lay_out(s, w);
    for (uint32_t i = 0; i < s->n_part && st == KVD_OK; i++)
        st = kv_seq_reserve(s->kv, s->part_seq[i], s->buf.part[i].n_row, err);
    if (st == KVD_OK)
        st = engine_pipeline_run(s, w->n_token, err);
    if (st == KVD_OK)
        st = commit_parts(s, w, err);
    if (st != KVD_OK) {
        undo_parts(s);
        return st;
    }
    for (uint32_t i = 0; i < s->n_sparse; i++)
        engine_attention_watch(s, s->sparse_seq[i]);
    kv_poll(s->kv);
    *(s->best ? &s->n_picks : &s->n_logits) = s->n_out;
    count_time(s, w->n_token, t0, kvd_now_ns());
    return KVD_OK;
}

/* Whether a sequence that comes to hold so many tokens has the factors for long ones. */
static bool rope_long(const kvd_session *s, uint32_t final_len)
{
    const model_hparams *hp = model_get_hparams(s->model->net);

    return hp->rope_kind == MODEL_ROPE_LONG && final_len > hp->rope_orig_ctx;
}

/* Brings a sequence's KV up to its tokens, rotated with the factors that a length of final_len
 * asks for.  Costs nothing but in the two cases of invariant (1). */
static kvd_status make_current(kvd_session *s, uint32_t seq, uint32_t final_len, kvd_err *err)
{
    engine_seq *q    = &s->seq[seq];
    const bool  want = rope_long(s, final_len);

    if (want != q->rope_long) {
        if (q->n_token)
            kvd_log(KVD_LOG_INFO, "sequence %u: %u tokens are evaluated again with %s RoPE factors",
                    seq, q->n_token, want ? "long" : "short");
        kv_seq_truncate(s->kv, s->model->stream, seq, 0);
        q->rope_long = want;
        kv_seq_source(s->kv, seq, q->token, want);
    }
    while (kv_seq_len(s->kv, seq) < q->n_token) {
        const uint32_t len = kv_seq_len(s->kv, seq);
        const work     w = { .n_token  = (uint32_t)kvd_min_u64(q->n_token - len, s->params.n_batch),
                             .token    = q->token + len,
                             .only_seq = seq,
                             .exact    = true };

        KVD_TRY(run_work(s, &w, err));
    }
    return KVD_OK;
}

/* Losses of the disk tier during one evaluation.  Damage shows unit by unit, as it is read: a unit
 * that went into quarantine is progress, anything else is tried a few times. */
typedef struct losses {
    uint32_t n_try, n_same;
    uint64_t n_bad;
} losses;

static bool may_try_again(kvd_session *s, losses *l)
{
    kv_counts c;

    kv_get_counts(s->kv, &c);
    l->n_same = c.n_disk_bad > l->n_bad ? 0 : l->n_same + 1;
    l->n_bad  = c.n_disk_bad;
    return ++l->n_try < N_RECOVER_ALL && l->n_same < N_RECOVER;
}

/* After a failed read of the disk tier: sequences are cut to what can be read, so that the rest is
 * evaluated again.  Whether there was such a sequence, and trying again makes sense. */
static bool recover(kvd_session *s, losses *l, const kvd_err *err)
{
    bool any = false;

    for (uint32_t q = 0; q < s->params.n_seq; q++) {
        const uint32_t lost = kv_seq_lost(s->kv, q);

        if (lost >= kv_seq_len(s->kv, q))
            continue;
        kvd_log(KVD_LOG_WARN, "sequence %u: %s; its tokens from %u on are evaluated again", q,
                err ? err->msg : "a read failed", lost);
        s->stats.n_disk_again += kv_seq_len(s->kv, q) - lost;
        kv_seq_truncate(s->kv, s->model->stream, q, lost);
        any = true;
    }
    return any && may_try_again(s, l);
}

/* What a sequence that gets n tokens now grows to. */
static uint32_t grows_to(const kvd_session *s, const work *w, uint32_t seq, uint32_t n)
{
    const engine_seq *q = &s->seq[seq];

    if (w->final_len)
        return w->final_len;
    return q->prompt_end ? q->prompt_end : q->n_token + n;
}

static kvd_status make_all_current(kvd_session *s, const work *w, kvd_err *err)
{
    for (uint32_t q = 0; q < s->params.n_seq; q++) {
        const uint32_t n = s->seq_new[q];

        if (n > 0)
            KVD_TRY(make_current(s, q, grows_to(s, w, q, n), err));
    }
    return KVD_OK;
}

/* Whether there is room for each sequence's new tokens. */
static kvd_status check_room(const kvd_session *s, kvd_err *err)
{
    for (uint32_t q = 0; q < s->params.n_seq; q++) {
        const uint32_t n = s->seq_new[q];

        if (n == 0)
            continue;
        if (kv_restoring(s->kv, q))
            return kvd_fail(err, KVD_E_BUSY, 0,
                            "sequence %u: what is known of its prompt is still being read", q);
        if (n > s->params.n_ctx - s->seq[q].n_token)
            return kvd_fail(err, KVD_E_FULL, 0,
                            "sequence %u holds %u tokens and cannot take %u more: its context is "
                            "%u tokens (n_ctx)",
                            q, s->seq[q].n_token, n, s->params.n_ctx);
        if (s->seq[q].prompt_end && n > s->seq[q].prompt_end - s->seq[q].n_token)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "%u tokens for sequence %u: its prompt ends after %u more", n, q,
                            s->seq[q].prompt_end - s->seq[q].n_token);
    }
    return KVD_OK;
}

static kvd_status eval_work(kvd_session *s, const work *w, kvd_err *err)
{
    losses     lost = { 0 };
    kvd_status st;

    KVD_TRY(check_work(s, w, err));
    count_rows(s, w, s->seq_new);
    KVD_TRY(check_room(s, err));
    for (;;) {
        st = make_all_current(s, w, err);
        if (st == KVD_OK)
            st = run_work(s, w, err);
        if (st == KVD_OK || !recover(s, &lost, err))
            break;
        count_rows(s, w, s->seq_new);
    }
    return st;
}

static void cut(kvd_session *s, uint32_t seq, uint32_t n_keep)
{
    kv_restore_stop(s->kv, s->model->stream, seq);
    if (kv_seq_len(s->kv, seq) > n_keep)
        kv_seq_truncate(s->kv, s->model->stream, seq, n_keep);
    s->seq[seq].n_token = n_keep;
    if (n_keep == 0 && s->seq[seq].synth)
        kv_seq_source(s->kv, seq, s->seq[seq].token, s->seq[seq].rope_long);
    s->seq[seq].synth = s->seq[seq].synth && n_keep > 0;
}

kvd_status engine_eval(kvd_session *s, const kvd_batch *b, kvd_err *err)
{
    const work w = { .n_token   = b->n_token,
                     .token     = b->token,
                     .seq       = b->seq,
                     .want      = b->want_logits,
                     .want_last = true,
                     .n_best    = b->n_best };

    return eval_work(s, &w, err);
}

kvd_status engine_tell_progress(const engine_progress *to, uint32_t done, kvd_err *err)
{
    if (done > *to->told)
        *to->told = done;
    if (!to->fn || to->fn(to->ctx, *to->told, to->n_token))
        return KVD_OK;
    return kvd_fail(err, KVD_E_CANCELED, 0, "prefill canceled after %u of %u tokens", done,
                    to->n_token);
}

/* A part of a prompt and what is known of all of it. */
typedef struct prefill {
    uint32_t        seq, final_len;
    engine_progress to;
} prefill;

/* Batch by batch through all layers. */
static kvd_status prefill_batches(kvd_session *s, const prefill *p, const int32_t *token,
                                  uint32_t n_token, kvd_err *err)
{
    for (uint32_t done = 0; done < n_token;) {
        const uint32_t n   = (uint32_t)kvd_min_u64(n_token - done, s->n_row);
        const uint32_t all = p->to.done + done;
        const work     w   = { .n_token   = n,
                               .token     = token + done,
                               .only_seq  = p->seq,
                               .want_last = all + n == p->to.n_token,
                               .exact     = true,
                               .more      = done + n < n_token && kv_resident(s->kv),
                               .final_len = p->final_len };

        KVD_TRY(engine_tell_progress(&p->to, all, err));
        KVD_TRY(eval_work(s, &w, err));
        done += n;
    }
    return KVD_OK;
}

/* Layer by layer, where K and V cannot all stay on the device. */
static kvd_status prefill_layers(kvd_session *s, const prefill *p, const int32_t *token,
                                 uint32_t n_token, kvd_err *err)
{
    const uint64_t t0      = kvd_now_ns();
    const uint32_t n_vocab = model_get_hparams(s->model->net)->n_vocab;
    engine_seq    *q       = &s->seq[p->seq];
    kvd_status     st      = KVD_OK;
    losses         lost    = { 0 };
    uint64_t       t1;

    for (uint32_t i = 0; i < n_token; i++) {
        if (token[i] < 0 || (uint32_t)token[i] >= n_vocab)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "token %u of the prompt has id %d, the vocabulary %u", i, token[i],
                            n_vocab);
    }
    s->n_logits = s->n_picks = 0;
    s->best                  = 0;
    memcpy(q->token + q->n_token, token, n_token * sizeof(*token)); /* names what is stored */
    for (;;) {
        st = make_current(s, p->seq, p->final_len, err);
        if (st == KVD_OK)
            st = engine_prompt_run(s, p->seq, token, n_token, &p->to, err);
        if (st == KVD_OK || !recover(s, &lost, err))
            break;
    }
    if (st != KVD_OK)
        return st;
    q->n_token += n_token;
    s->n_logits = 1;
    engine_attention_admit(s, p->seq);
    s->stats.n_prefill += n_token;
    t1 = kvd_now_ns();
    s->stats.prefill_ns += t1 - t0;
    kv_evaluated(s->kv, n_token, t1 - t0);
    kvd_trace_add(s->trace, KVD_TRACE_PREFILL, t0, t1, KVD_TRACE_NOWHERE, n_token);
    return KVD_OK;
}

/* What is on its way back to a sequence was of other tokens. */
static void stop_other(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token)
{
    engine_seq *q = &s->seq[seq];

    if (q->prompt_end != n_token || memcmp(q->token, token, n_token * sizeof(*token)) != 0)
        kv_restore_stop(s->kv, s->model->stream, seq);
}

/* Whether a sequence holds the first of the tokens, so that the prefix cache may add to them. */
static bool goes_on(const kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token)
{
    const engine_seq *q = &s->seq[seq];

    return !q->synth && q->rope_long == rope_long(s, n_token) && q->n_token < n_token &&
           kv_seq_len(s->kv, seq) == q->n_token &&
           kvd_common_tokens(q->token, token, q->n_token) == q->n_token;
}

/* Fills a sequence with what is known of its prompt beyond what it holds, at most all but the last
 * token.  Until that is there the sequence keeps its tokens, whatever the store holds meanwhile.
 * KVD_E_BUSY: slice_ns, if there is such a limit, were not enough; it goes on in the next call. */
static kvd_status restore(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token,
                          uint64_t slice_ns, kvd_err *err)
{
    const bool           sparse = s->params.resume == KVD_RESUME_SPARSE;
    const kv_restore_ask ask    = { .n_token   = n_token - 1,
                                    .final_len = sparse ? 0 : n_token,
                                    .until_ns  = slice_ns ? kvd_now_ns() + slice_ns : 0 };
    engine_seq          *q      = &s->seq[seq];
    const uint32_t       before = q->n_token;
    uint64_t             t0;
    bool                 over;

    if (!s->cached || before + 1 >= n_token)
        return KVD_OK;
    if (before > 0 && !kv_restoring(s->kv, seq) && !goes_on(s, seq, token, n_token))
        return KVD_OK;
    if (before == 0)
        KVD_TRY(make_current(s, seq, n_token, err));
    t0 = kvd_trace_now(s->trace);
    memcpy(q->token, token, n_token * sizeof(*token));
    over       = kv_seq_restore(s->kv, s->model->stream, seq, &ask);
    q->n_token = over ? kv_seq_len(s->kv, seq) : before;
    s->stats.n_cached += q->n_token > before ? q->n_token - before : 0;
    kvd_trace_add(s->trace, KVD_TRACE_RESTORE, t0, kvd_trace_now(s->trace), KVD_TRACE_NOWHERE,
                  q->n_token);
    return over ? KVD_OK
                : kvd_fail(err, KVD_E_BUSY, 0, "what is known of the prompt is still being read");
}

/* The next n_token tokens of a prompt of which to->done are there, in segments.  Each is sealed
 * before the next one, so they are cut at the same places where all is resident. */
static kvd_status prefill_part(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token,
                               const engine_progress *to, kvd_err *err)
{
    prefill p = { .seq = seq, .final_len = s->seq[seq].n_token + n_token, .to = *to };

    for (uint32_t done = 0; done < n_token;) {
        const uint32_t n       = (uint32_t)kvd_min_u64(n_token - done, s->n_segment);
        const bool     batches = kv_resident(s->kv) || n <= s->params.n_batch;

        KVD_TRY((batches ? prefill_batches : prefill_layers)(s, &p, token + done, n, err));
        done += n;
        p.to.done += n;
    }
    return KVD_OK;
}

/* With a prefix cache the last token is always a batch of its own, as it is when all others are
 * known: the same prompt gives the same bits, cold or not. */
static kvd_status prefill_rest(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n,
                               const engine_progress *to, kvd_err *err)
{
    engine_progress last = *to;

    if (!s->cached || n == 1)
        return prefill_part(s, seq, token, n, to, err);
    KVD_TRY(prefill_part(s, seq, token, n - 1, to, err));
    last.done += n - 1;
    return prefill_part(s, seq, token + n - 1, 1, &last, err);
}

/* Whether what is left of a prompt of n tokens goes on as decode steps over a restored index. */
static bool resumes_sparsely(const kvd_session *s, uint32_t known, uint32_t n)
{
    return s->params.resume == KVD_RESUME_SPARSE && known > 0 && n - known <= RESUME_MAX &&
           s->sparse && engine_attention_sparse(&s->attention, n);
}

static kvd_status resume_sparse(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n,
                                const engine_progress *to, kvd_err *err)
{
    engine_attention_admit(s, seq);
    for (uint32_t i = 0; i < n; i++) {
        const work w = {
            .n_token = 1, .token = token + i, .only_seq = seq, .want_last = i + 1 == n
        };

        KVD_TRY(engine_tell_progress(to, to->done + i, err));
        KVD_TRY(eval_work(s, &w, err));
    }
    return KVD_OK;
}

kvd_status engine_prefill(kvd_session *s, uint32_t seq, const int32_t *token, size_t n_token,
                          kvd_progress_fn fn, void *ctx, kvd_err *err)
{
    uint32_t        before, told = 0;
    engine_progress to = { .fn = fn, .ctx = ctx, .told = &told };
    kvd_status      st;

    if (seq >= s->params.n_seq || n_token == 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "prefill of %zu tokens into sequence %u of %u",
                        n_token, seq, s->params.n_seq);
    s->seq[seq].prompt_end = 0; /* from here on this call is the prompt */
    kv_restore_stop(s->kv, s->model->stream, seq);

    before = s->seq[seq].n_token;
    if (n_token > s->params.n_ctx - before)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "the prompt has %zu tokens, the sequence holds %u, and its context is %u "
                        "tokens (n_ctx)",
                        n_token, before, s->params.n_ctx);
    if (before == 0)
        kv_seq_salt(s->kv, seq, NULL, 0);
    to.n_token = (uint32_t)n_token;
    KVD_TRY(engine_tell_progress(&to, 0, err));
    if (before == 0)
        KVD_TRY(restore(s, seq, token, to.n_token, 0, err));
    to.done = s->seq[seq].n_token - before;
    st      = (resumes_sparsely(s, to.done, to.n_token)
                   ? resume_sparse
                   : prefill_rest)(s, seq, token + to.done, to.n_token - to.done, &to, err);
    if (st == KVD_OK)
        kv_seq_store_tail(s->kv, s->model->stream, seq);
    if (st == KVD_OK && fn)
        fn(ctx, n_token, n_token);
    if (st != KVD_OK) {
        cut(s, seq, before);
        engine_attention_admit(s, seq); /* anew: how far it came depends on where its KV lies */
    }
    return st;
}

static kvd_status check_prompt(const kvd_session *s, const kvd_prompt *p, kvd_err *err)
{
    if (p->salt_bytes > KVD_SALT_BYTES_MAX || (p->salt_bytes && !p->salt))
        return kvd_fail(err, KVD_E_INVAL, 0, "a salt of %zu bytes (salt_bytes): at most %u",
                        p->salt_bytes, KVD_SALT_BYTES_MAX);
    if (p->n_token > s->params.n_ctx)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "the prompt has %u tokens, the sequence's context is %u tokens (n_ctx)",
                        p->n_token, s->params.n_ctx);
    return KVD_OK;
}

kvd_status engine_prompt_begin(kvd_session *s, uint32_t seq, const kvd_prompt *p, kvd_err *err)
{
    engine_seq *q;
    kvd_status  st;

    if (seq >= s->params.n_seq || !p->token || p->n_token <= s->seq[seq].n_token)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "a prompt of %u tokens in all for sequence %u of %u, which holds %u",
                        p->n_token, seq, s->params.n_seq,
                        seq < s->params.n_seq ? s->seq[seq].n_token : 0);
    q = &s->seq[seq];
    KVD_TRY(check_prompt(s, p, err));
    if (p->skip_cache)
        kv_restore_stop(s->kv, s->model->stream, seq);
    stop_other(s, seq, p->token, p->n_token);
    if (q->n_token == 0 && !kv_restoring(s->kv, seq))
        kv_seq_salt(s->kv, seq, p->salt, (uint32_t)p->salt_bytes);
    q->prompt_end = 0;
    st = p->skip_cache ? KVD_OK : restore(s, seq, p->token, p->n_token, p->slice_ns, err);
    if (st == KVD_OK || st == KVD_E_BUSY)
        q->prompt_end = p->n_token;
    return st;
}

struct kvd_hold {
    kv_hold *kv;
};

kvd_status engine_hold_open(kvd_hold **out, kvd_session *s, const kvd_prompt *p, kvd_err *err)
{
    kv_prefix  known;
    kv_hold   *kv;
    kvd_status st;

    *out = NULL;
    if (!p->token || p->n_token == 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "a prompt of no tokens to hold");
    KVD_TRY(check_prompt(s, p, err));
    known = (kv_prefix){ .token   = p->token,
                         .n_token = p->n_token - 1,
                         .salt    = p->salt,
                         .n_salt  = (uint32_t)p->salt_bytes,
                         .variant = rope_long(s, p->n_token) };
    st    = kv_hold_open(&kv, s->kv, &known, err);
    if (st != KVD_OK || !kv)
        return st;
    *out = kvd_malloc(sizeof(**out));
    if (!*out) {
        kv_hold_close(kv);
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for a hold on a prompt");
    }
    (*out)->kv = kv;
    return KVD_OK;
}

void engine_hold_close(kvd_hold *h)
{
    if (!h)
        return;
    kv_hold_close(h->kv);
    kvd_free(h);
}

kvd_status engine_seq_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep, kvd_err *err)
{
    if (seq >= s->params.n_seq)
        return engine_parked_truncate(s, seq, n_keep, err);
    if (n_keep > s->seq[seq].n_token)
        return kvd_fail(err, KVD_E_INVAL, 0, "cut to %u tokens: sequence %u of %u holds %u", n_keep,
                        seq, s->params.n_seq, s->seq[seq].n_token);
    cut(s, seq, n_keep);
    if (s->seq[seq].prompt_end == 0)
        return KVD_OK;
    s->seq[seq].prompt_end = 0; /* what was to be sealed together at its end is sealed now */
    return kv_seq_seal(s->kv, s->model->stream, seq, false, err);
}
