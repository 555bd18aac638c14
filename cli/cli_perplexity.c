/* SPDX-License-Identifier: Apache-2.0 */
/* cli_perplexity.c - kvdrive perplexity: exp of the mean negative log-likelihood of a text.
 *
 * The text is cut into consecutive windows of n_ctx tokens that do not overlap; where the model
 * wants a BOS, each window's first token is replaced by it.  Of each window the second half is
 * scored (so that every scored token has at least half a window before it), or with --score-all
 * every token but the first.  This is llama-perplexity's definition.  A rest shorter than a window
 * is not scored, unless the text is shorter than one window. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "cli.h"

#define WINDOW_DEFAULT 512u
#define BATCH_DEFAULT  512u
#define TEXT_MAX_BYTES (1ull << 32)

typedef struct score {
    double   nll, nll2; /* sums over scored tokens */
    uint64_t n;
} score;

typedef struct run {
    const kvd_opts *o;
    kvd_model      *m;
    kvd_session    *s;
    kvd_plan        plan;
    uint32_t        n_vocab, n_ctx, n_batch;
    int32_t         bos; /* -1: the model adds none */
    cli_tokens      text;
    uint8_t        *want; /* [n_batch] */
    FILE           *out;
    score           sum;
} run;

static double log_sum_exp(const float *x, uint32_t n)
{
    float  max = x[0];
    double sum = 0.0;

    for (uint32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)(x[i] - max));
    return (double)max + log(sum);
}

/* Scores the rows of the last evaluation, which began at window position first. */
static kvd_status score_rows(run *r, const int32_t *window, uint32_t first, uint32_t n,
                             kvd_err *err)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < n; i++) {
        const float *logits;
        double       nll;

        if (!r->want[i])
            continue;
        logits = kvd_logits(r->s, row++);
        nll    = log_sum_exp(logits, r->n_vocab) - (double)logits[window[first + i + 1]];
        r->sum.nll += nll;
        r->sum.nll2 += nll * nll;
        r->sum.n++;
        if (r->out && fwrite(logits, sizeof(float), r->n_vocab, r->out) != r->n_vocab)
            return kvd_fail(err, KVD_E_IO, errno, "writing %s", kvd_opts_text(r->o, "logits-out"));
    }
    return KVD_OK;
}

static kvd_status score_window(run *r, int32_t *window, uint32_t n, kvd_err *err)
{
    const uint32_t from = kvd_opts_flag(r->o, "score-all") ? 0 : n / 2; /* first row that counts */
    const int32_t  kept = window[0];

    KVD_TRY(kvd_seq_truncate(r->s, 0, 0, err));
    if (r->bos >= 0)
        window[0] = r->bos;
    for (uint32_t at = 0; at < n; at += r->n_batch) {
        const uint32_t k = n - at < r->n_batch ? n - at : r->n_batch;
        kvd_batch      b = KVD_BATCH_INIT;

        for (uint32_t i = 0; i < k; i++)
            r->want[i] = at + i >= from && at + i + 1 < n;
        b.n_token     = k;
        b.token       = window + at;
        b.want_logits = r->want;
        KVD_TRY(kvd_eval(r->s, &b, err));
        KVD_TRY(score_rows(r, window, at, k, err));
    }
    window[0] = kept;
    return KVD_OK;
}

static double perplexity(const score *s)
{
    return s->n ? exp(s->nll / (double)s->n) : 0.0;
}

/* Standard error of the perplexity, from that of the mean log-likelihood. */
static double perplexity_error(const score *s)
{
    const double n = (double)s->n, mean = s->n ? s->nll / n : 0.0;

    return s->n > 1 ? sqrt((s->nll2 / n - mean * mean) / (n - 1)) * perplexity(s) : 0.0;
}

static kvd_status score_text(run *r, kvd_err *err)
{
    const int64_t  limit    = kvd_opts_int(r->o, "chunks");
    uint64_t       n_window = r->text.n / r->n_ctx;
    cli_progress   bar;
    kvd_status     st = KVD_OK;
    const uint32_t n  = r->text.n < r->n_ctx ? (uint32_t)r->text.n : r->n_ctx;

    if (n_window == 0)
        n_window = 1;
    if (limit >= 0 && (uint64_t)limit < n_window)
        n_window = (uint64_t)limit;
    cli_progress_start(&bar, "perplexity");
    for (uint64_t w = 0; w < n_window && st == KVD_OK; w++) {
        st = score_window(r, r->text.data + w * r->n_ctx, n, err);
        if (st == KVD_OK && !cli_progress_step(&bar, (w + 1) * n, n_window * n))
            st = kvd_fail(err, KVD_E_CANCELED, 0, "stopped after %" PRIu64 " windows", w + 1);
    }
    cli_progress_end(&bar);
    return st;
}

static kvd_status read_text(run *r, kvd_err *err)
{
    const char *ids  = kvd_opts_text(r->o, "tokens");
    const char *file = cli_input_file(r->o, "file");
    kvd_buf     text = { 0 };
    kvd_status  st;

    if (ids)
        return cli_read_ids(ids, &r->text, err);
    if (!file)
        return kvd_fail(err, KVD_E_INVAL, 0, "no text: kvdrive perplexity -m FILE TEXTFILE");
    st = cli_read_file(file, TEXT_MAX_BYTES, &text, err);
    if (st == KVD_OK)
        st = cli_tokenize_text(r->m, text.data, text.len, NULL, 0, true, &r->text, err);
    kvd_buf_free(&text);
    return st;
}

/* What the model puts before a text, if anything: the token that encoding nothing gives. */
static int32_t find_bos(const kvd_model *m)
{
    cli_tokens t   = { 0 };
    int32_t    bos = -1;

    if (cli_tokenize_text(m, "", 0, NULL, 0, true, &t, NULL) == KVD_OK && t.n == 1)
        bos = t.data[0];
    kvd_free(t.data);
    return bos;
}

static kvd_status prepare(run *r, kvd_err *err)
{
    kvd_model_info       info = { .struct_size = sizeof(info) };
    const char          *path = kvd_opts_text(r->o, "logits-out");
    kvd_session_params   p;
    kvd_attention_params a;

    KVD_TRY(cli_model_open(&r->m, r->o, err));
    kvd_model_get_info(r->m, &info);
    r->n_vocab = info.n_vocab;
    r->bos     = find_bos(r->m);
    KVD_TRY(read_text(r, err));
    if (r->text.n < 2)
        return kvd_fail(err, KVD_E_INVAL, 0, "the text has %zu tokens: at least 2 are needed",
                        r->text.n);
    KVD_TRY(cli_session_params(&p, &a, r->o, err));
    if (p.n_ctx == 0)
        p.n_ctx = (uint32_t)kvd_min_u64(WINDOW_DEFAULT, info.n_ctx_train);
    if (p.n_batch == 0)
        p.n_batch = BATCH_DEFAULT;
    if (p.n_batch > p.n_ctx)
        p.n_batch = p.n_ctx;
    p.n_logits = p.n_batch;
    r->n_ctx   = p.n_ctx;
    r->n_batch = p.n_batch;
    r->want    = kvd_calloc(p.n_batch, 1);
    if (!r->want)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory");
    if (path && !(r->out = fopen(path, "wb")))
        return kvd_fail(err, KVD_E_IO, errno, "%s", path);
    KVD_TRY(cli_session_or_uncached(&r->s, NULL, r->m, &p, r->o, err));
    return kvd_session_plan(r->m, &p, &r->plan, err);
}

static void print_result(const run *r)
{
    const double ppl = perplexity(&r->sum), dev = perplexity_error(&r->sum);

    if (kvd_opts_flag(r->o, "json"))
        printf("{\"perplexity\":%.6f,\"error\":%.6f,\"scored_tokens\":%" PRIu64 ",\"window\":%u}\n",
               ppl, dev, r->sum.n, r->n_ctx);
    else
        printf("perplexity %.4f +/- %.4f over %" PRIu64 " tokens (windows of %u)\n", ppl, dev,
               r->sum.n, r->n_ctx);
}

int cli_perplexity(const kvd_opts *o)
{
    run        r   = { .o = o, .plan = { .struct_size = sizeof(kvd_plan) } };
    kvd_err    err = { 0 };
    kvd_status st  = prepare(&r, &err);

    if (st == KVD_OK) {
        cli_interrupt_watch(r.s);
        st = score_text(&r, &err);
        cli_interrupt_watch(NULL);
    }
    if (r.out && fclose(r.out) != 0 && st == KVD_OK)
        st = kvd_fail(&err, KVD_E_IO, errno, "writing %s", kvd_opts_text(o, "logits-out"));
    if (st == KVD_OK)
        print_result(&r);
    if (st == KVD_OK && kvd_opts_flag(o, "stats"))
        cli_print_stats(r.s, &r.plan, 0.0, stderr);
    kvd_session_close(r.s);
    kvd_model_close(r.m);
    kvd_free(r.text.data);
    kvd_free(r.want);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
