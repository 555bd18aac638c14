/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_run.c - answers one prompt under every configuration.
 *
 * The prompt is prefilled once.  The logits of its last token are kept: they are the same for all,
 * because that token attends exactly.  Each configuration answers greedily from them, and the
 * sequence is cut back to the prompt before the next one.  Dense goes first: with --kl its logits
 * are kept, and the others are also made to say what it said. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "cli_eval.h"

typedef struct answer {
    kvd_buf     text;
    uint32_t    n_token;
    uint64_t    ns;
    eval_counts counts; /* of this answer */
} answer;

static void hear(eval_runner *r, answer *a, int32_t id)
{
    size_t      len;
    const char *text = kvd_detok_feed(r->detok, id, false, &len);

    kvd_buf_put(&a->text, text, len);
    a->n_token++;
}

static kvd_status say(eval_runner *r, int32_t id, const float **logits, kvd_err *err)
{
    kvd_batch b = KVD_BATCH_INIT;

    b.n_token = 1;
    b.token   = &id;
    KVD_TRY(kvd_eval(r->s, &b, err));
    *logits = kvd_logits(r->s, 0);
    return KVD_OK;
}

/* Greedy, from the kept logits; keep: what is said and expected goes to forced and forced_logits.
 */
static kvd_status generate(eval_runner *r, uint32_t max_new, bool keep, answer *a, kvd_err *err)
{
    const float *logits = r->logits;
    const char  *rest;
    size_t       len;

    while (a->n_token < max_new) {
        const int32_t id = kvd_sampler_sample(r->greedy, logits);

        if (kvd_token_is_end(r->m, id))
            break;
        hear(r, a, id);
        if (a->n_token == max_new)
            break;
        KVD_TRY(say(r, id, &logits, err));
        if (keep) {
            memcpy(r->forced_logits + (size_t)r->n_forced * r->n_vocab, logits,
                   r->n_vocab * sizeof(*logits));
            r->forced[r->n_forced++] = id;
        }
    }
    rest = kvd_detok_flush(r->detok, &len);
    kvd_buf_put(&a->text, rest, len);
    return a->text.oom ? kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the answer") : KVD_OK;
}

/* Back to the prompt, under a configuration. */
static kvd_status start(eval_runner *r, uint32_t config, uint32_t n_prompt, kvd_err *err)
{
    KVD_TRY(kvd_seq_truncate(r->s, 0, n_prompt, err));
    return eval_config_apply(&r->configs->config[config], r->s, err);
}

static eval_counts counts_now(const eval_runner *r)
{
    kvd_stats st = { .struct_size = sizeof(st) };

    kvd_session_get_stats(r->s, &st);
    return (eval_counts){ .n_step     = st.n_sparse,
                          .n_selected = st.n_selected,
                          .n_miss     = st.n_miss,
                          .n_urgent   = st.n_urgent,
                          .mass       = st.mass * (double)st.n_sparse };
}

static kvd_status answer_with(eval_runner *r, uint32_t config, const eval_sample *s,
                              uint32_t n_prompt, answer *a, kvd_err *err)
{
    const bool     keep = r->kl && config == r->configs->dense;
    const uint64_t t0   = kvd_now_ns();
    eval_counts    before, after;

    a->text.len = 0;
    a->n_token  = 0;
    r->n_forced = keep ? 0 : r->n_forced;
    KVD_TRY(start(r, config, n_prompt, err));
    before = counts_now(r);
    KVD_TRY(generate(r, s->task->max_new, keep, a, err));
    after     = counts_now(r);
    a->ns     = kvd_now_ns() - t0;
    a->counts = (eval_counts){ .n_step     = after.n_step - before.n_step,
                               .n_selected = after.n_selected - before.n_selected,
                               .n_miss     = after.n_miss - before.n_miss,
                               .n_urgent   = after.n_urgent - before.n_urgent,
                               .mass       = after.mass - before.mass };
    return KVD_OK;
}

/* Says what dense said, and compares what was expected at each token. */
static kvd_status force(eval_runner *r, uint32_t config, uint32_t n_prompt, answer *a, kvd_err *err)
{
    KVD_TRY(start(r, config, n_prompt, err));
    for (uint32_t i = 0; i < r->n_forced; i++) {
        const float *logits;

        KVD_TRY(say(r, r->forced[i], &logits, err));
        a->counts.kl += eval_kl(r->forced_logits + (size_t)i * r->n_vocab, logits, r->n_vocab);
        a->counts.n_kl++;
    }
    return KVD_OK;
}

/* ---- rows ------------------------------------------------------------------------ */

/* RFC 4180; what is no printable character becomes a blank, so that a row is a line. */
static void put_text(FILE *f, const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (s[i] == '"')
            fputc('"', f);
        fputc((unsigned char)s[i] < ' ' ? ' ' : s[i], f);
    }
}

static void put_field(FILE *f, const char *s, size_t len)
{
    fputc('"', f);
    put_text(f, s, len);
    fputc('"', f);
}

static void put_ratio(FILE *f, double sum, uint64_t n)
{
    fputc(',', f);
    if (n)
        fprintf(f, "%.6f", sum / (double)n);
}

static kvd_status put_row(eval_runner *r, uint32_t config, const eval_sample *s, const answer *a,
                          double score, kvd_err *err)
{
    const char *name = r->configs->config[config].name;
    FILE       *f    = r->csv;

    if (!f)
        return KVD_OK;
    put_field(f, name, strlen(name));
    fprintf(f, ",%s,%u,%" PRIu64 ",%u,%" PRIu64 ",%u,%.6f,%.3f,%.3f", s->task->name, s->index,
            s->seed, s->length, s->n_token, a->n_token, score, r->prefill_s, (double)a->ns * 1e-9);
    fprintf(f, ",%" PRIu64 ",%" PRIu64 ",%" PRIu64, a->counts.n_selected, a->counts.n_miss,
            a->counts.n_urgent);
    put_ratio(f, a->counts.mass, a->counts.n_step);
    put_ratio(f, a->counts.kl, a->counts.n_kl);
    fputc(',', f);
    put_field(f, a->text.data ? a->text.data : "", a->text.len);
    fputs(",\"", f);
    for (uint32_t i = 0; i < s->n_answer; i++) {
        const char *text = eval_answer(s, i);

        fputs(i ? "|" : "", f);
        put_text(f, text, strlen(text));
    }
    fputs("\"\n", f);
    return fflush(f) == 0 ? KVD_OK : kvd_fail(err, KVD_E_IO, errno, "writing the rows");
}

static void add_counts(eval_counts *sum, const eval_counts *x)
{
    sum->n_step += x->n_step;
    sum->n_selected += x->n_selected;
    sum->n_miss += x->n_miss;
    sum->n_urgent += x->n_urgent;
    sum->mass += x->mass;
    sum->kl += x->kl;
    sum->n_kl += x->n_kl;
}

/* ---- one prompt ------------------------------------------------------------------ */

static kvd_status prefill(eval_runner *r, const cli_tokens *t, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    KVD_TRY(kvd_seq_truncate(r->s, 0, 0, err));
    KVD_TRY(kvd_prefill(r->s, 0, t->data, t->n, NULL, NULL, err));
    memcpy(r->logits, kvd_logits(r->s, 0), r->n_vocab * sizeof(*r->logits));
    r->prefill_s = (double)(kvd_now_ns() - t0) * 1e-9;
    return KVD_OK;
}

static kvd_status run_config(eval_runner *r, uint32_t config, uint32_t task, const eval_sample *s,
                             uint32_t n_prompt, answer *a, kvd_err *err)
{
    eval_table *t = r->table;
    double      score;

    KVD_TRY(answer_with(r, config, s, n_prompt, a, err));
    if (r->kl && config != r->configs->dense)
        KVD_TRY(force(r, config, n_prompt, a, err));
    score = eval_score(s, a->text.data ? a->text.data : "", a->text.len);
    t->score[((size_t)config * t->n_task + task) * t->n_sample + s->index] = (float)score;
    add_counts(&t->counts[config], &a->counts);
    return put_row(r, config, s, a, score, err);
}

kvd_status eval_run_sample(eval_runner *r, uint32_t task, const eval_sample *s,
                           const cli_tokens *prompt, kvd_err *err)
{
    const uint32_t dense = r->configs->dense;
    answer         a     = { 0 };
    kvd_status     st    = prefill(r, prompt, err);

    for (uint32_t i = 0; i < r->configs->n && st == KVD_OK; i++) { /* dense, then the others */
        const uint32_t config = i == 0 ? dense : i <= dense ? i - 1 : i;

        st = run_config(r, config, task, s, (uint32_t)prompt->n, &a, err);
    }
    kvd_buf_free(&a.text);
    return st;
}

kvd_status eval_runner_open(eval_runner *r, uint32_t max_new, kvd_err *err)
{
    kvd_sampler_params sp   = KVD_SAMPLER_PARAMS_INIT;
    kvd_model_info     info = { .struct_size = sizeof(info) };

    sp.temperature = 0;
    KVD_TRY(kvd_sampler_open(&r->greedy, r->m, &sp, err));
    KVD_TRY(kvd_detok_open(&r->detok, r->m, err));
    kvd_model_get_info(r->m, &info);
    r->n_vocab = info.n_vocab;
    r->logits  = kvd_calloc(r->n_vocab, sizeof(*r->logits));
    if (r->kl) {
        r->forced        = kvd_calloc(max_new, sizeof(*r->forced));
        r->forced_logits = kvd_calloc((size_t)max_new * r->n_vocab, sizeof(*r->forced_logits));
    }
    if (!r->logits || (r->kl && (!r->forced || !r->forced_logits)))
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the logits of %u tokens", max_new);
    if (r->csv)
        fputs("config,task,index,seed,length,prompt_tokens,answer_tokens,score,prefill_seconds,"
              "answer_seconds,selected,missed,urgent,mass,kl,answer,expected\n",
              r->csv);
    return KVD_OK;
}

void eval_runner_close(eval_runner *r)
{
    kvd_detok_close(r->detok);
    kvd_sampler_close(r->greedy);
    kvd_free(r->logits);
    kvd_free(r->forced);
    kvd_free(r->forced_logits);
    r->detok  = NULL;
    r->greedy = NULL;
    r->logits = r->forced_logits = NULL;
    r->forced                    = NULL;
}
