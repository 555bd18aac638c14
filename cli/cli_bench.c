/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench.c - kvdrive bench: tokens per second of prefill and decode, at any depth, for any
 * number of sequences.  The shape is llama-bench's: lists give cases, each case runs r times after
 * one warm-up, and rows show mean, deviation and median.
 *
 * Beside speed stands a sanity score: the mean probability that the model gives to the next tokens
 * of a counting sentence.  It says nothing across models, but broken numerics show at once: as nan,
 * near 0, or as a score that differs between two kernels on one file. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define RUNS_MAX 1000

typedef struct bench_case {
    uint32_t n_prompt, n_gen, depth, n_seq;
} bench_case;

typedef struct bench {
    const kvd_opts *o;
    kvd_model      *m;
    kvd_model_info  info;
    const char     *form;
    int             n_row; /* printed so far */
    double          sanity;
} bench;

kvd_status cli_parse_list(const kvd_opts *o, const char *name, cli_list *out, kvd_err *err)
{
    const char *s = kvd_opts_text(o, name);
    char        word[32];
    double      x;

    for (out->n = 0; out->n < CLI_LIST_MAX; out->n++) {
        const size_t len = strcspn(s, ",");

        snprintf(word, sizeof(word), "%.*s", (int)(len < sizeof(word) ? len : sizeof(word)), s);
        if (!kvd_parse_count(word, &x) || x < 0.0 || x > 1u << 30)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "--%s: expected numbers as in 128,512, found '%.20s'", name, s);
        out->x[out->n] = (uint32_t)x;
        if (!s[len]) {
            out->n++;
            return KVD_OK;
        }
        s += len + 1;
    }
    return kvd_fail(err, KVD_E_INVAL, 0, "--%s: more than %d numbers", name, CLI_LIST_MAX);
}

/* Token ids that exercise the whole vocabulary; speed does not depend on them. */
static int32_t some_token(const bench *b, uint32_t i)
{
    return (int32_t)((i * 2654435761u >> 8) % b->info.n_vocab);
}

static kvd_status fill(bench *b, kvd_session *s, uint32_t seq, uint32_t n, kvd_err *err)
{
    int32_t   *t;
    kvd_status st;

    if (n > 0 && kvd_opts_flag(b->o, "synthetic"))
        return kvd_seq_synthesize(s, seq, n, err);
    t = kvd_calloc(n, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u tokens", n);
    for (uint32_t i = 0; i < n; i++)
        t[i] = some_token(b, i);
    st = n ? kvd_prefill(s, seq, t, n, NULL, NULL, err) : KVD_OK;
    kvd_free(t);
    return st;
}

static kvd_status decode(bench *b, kvd_session *s, uint32_t n_seq, uint32_t n_gen, kvd_err *err)
{
    int32_t   *t  = kvd_calloc(n_seq, sizeof(*t));
    uint32_t  *q  = kvd_calloc(n_seq, sizeof(*q));
    uint8_t   *w  = kvd_calloc(n_seq, 1);
    kvd_batch  x  = KVD_BATCH_INIT;
    kvd_status st = t && q && w ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "no memory");

    for (uint32_t i = 0; st == KVD_OK && i < n_gen; i++) {
        for (uint32_t j = 0; j < n_seq; j++) {
            t[j] = some_token(b, i * 31 + j);
            q[j] = j;
            w[j] = 1;
        }
        x.n_token     = n_seq;
        x.token       = t;
        x.seq         = q;
        x.want_logits = w;
        x.n_best      = 1; /* as greedy decoding asks */
        st            = kvd_eval(s, &x, err);
    }
    kvd_free(t);
    kvd_free(q);
    kvd_free(w);
    return st;
}

/* One timed run, back at the depth it began with afterwards; *rate in tokens per second. */
static kvd_status run_once(bench *b, kvd_session *s, const bench_case *c, double *rate,
                           kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_status     st = KVD_OK;
    uint64_t       n;

    if (c->n_prompt) {
        for (uint32_t q = 0; q < c->n_seq && st == KVD_OK; q++)
            st = fill(b, s, q, c->n_prompt, err);
        n = (uint64_t)c->n_prompt * c->n_seq;
    } else {
        st = decode(b, s, c->n_seq, c->n_gen, err);
        n  = (uint64_t)c->n_gen * c->n_seq;
    }
    *rate = (double)n * 1e9 / (double)(kvd_now_ns() - t0);
    for (uint32_t q = 0; q < c->n_seq && st == KVD_OK; q++)
        st = kvd_seq_truncate(s, q, c->depth, err);
    return st;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void print_row(bench *b, const bench_case *c, const double *rate, uint32_t n)
{
    double sorted[RUNS_MAX], mean = 0.0, var = 0.0, median;
    char   test[48];

    memcpy(sorted, rate, n * sizeof(*rate));
    qsort(sorted, n, sizeof(*sorted), by_value);
    for (uint32_t i = 0; i < n; i++)
        mean += rate[i] / n;
    for (uint32_t i = 0; i < n; i++)
        var += n > 1 ? (rate[i] - mean) * (rate[i] - mean) / (n - 1) : 0.0;
    median = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    snprintf(test, sizeof(test), "%s%u%s%.0u%s%.0u", c->n_prompt ? "pp" : "tg",
             c->n_prompt ? c->n_prompt : c->n_gen, c->depth ? " @ d" : "", c->depth,
             c->n_seq > 1 ? " x" : "", c->n_seq > 1 ? c->n_seq : 0);

    if (strcmp(b->form, "md") == 0) {
        if (b->n_row == 0)
            printf("| model | type | backend | threads | test | t/s | median | sanity |\n"
                   "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n");
        printf("| %s %.0fM | %s | %s %s | %u | %s | %.2f ± %.2f | %.2f | %.4f |\n", b->info.arch,
               (double)b->info.n_param * 1e-6, b->info.file_type, b->info.backend, b->info.isa,
               b->info.n_thread, test, mean, sqrt(var), median, b->sanity);
    } else if (strcmp(b->form, "csv") == 0) {
        if (b->n_row == 0)
            printf(
                "arch,n_param,type,backend,isa,n_threads,n_prompt,n_gen,n_depth,n_parallel,avg_ts,"
                "stddev_ts,median_ts,min_ts,max_ts,n_runs,sanity\n");
        printf("%s,%" PRIu64 ",%s,%s,%s,%u,%u,%u,%u,%u,%.3f,%.3f,%.3f,%.3f,%.3f,%u,%.6f\n",
               b->info.arch, b->info.n_param, b->info.file_type, b->info.backend, b->info.isa,
               b->info.n_thread, c->n_prompt, c->n_gen, c->depth, c->n_seq, mean, sqrt(var), median,
               sorted[0], sorted[n - 1], n, b->sanity);
    } else {
        printf("%s{\"arch\":\"%s\",\"n_param\":%" PRIu64 ",\"type\":\"%s\",\"backend\":\"%s\","
               "\"isa\":\"%s\",\"n_threads\":%u,\"n_prompt\":%u,\"n_gen\":%u,\"n_depth\":%u,"
               "\"n_parallel\":%u,\"avg_ts\":%.3f,\"stddev_ts\":%.3f,\"median_ts\":%.3f,\"sanity\":"
               "%.6f,"
               "\"samples_ts\":[",
               b->n_row ? ",\n " : "[", b->info.arch, b->info.n_param, b->info.file_type,
               b->info.backend, b->info.isa, b->info.n_thread, c->n_prompt, c->n_gen, c->depth,
               c->n_seq, mean, sqrt(var), median, b->sanity);
        for (uint32_t i = 0; i < n; i++)
            printf("%s%.3f", i ? "," : "", rate[i]);
        printf("]}");
    }
    b->n_row++;
    fflush(stdout);
}

static kvd_status run_case(bench *b, const bench_case *c, kvd_err *err)
{
    const uint32_t       n_run = (uint32_t)kvd_opts_int(b->o, "repetitions");
    const uint32_t       len   = c->depth + (c->n_prompt > c->n_gen ? c->n_prompt : c->n_gen);
    double               rate[RUNS_MAX];
    kvd_session         *s = NULL;
    kvd_session_params   p;
    kvd_attention_params a;
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_status           st;

    KVD_TRY(cli_session_params(&p, &a, b->o, err));
    p.n_ctx    = len;
    p.n_seq    = c->n_seq;
    p.n_logits = c->n_seq;
    KVD_TRY(cli_session_open(&s, &plan, b->m, &p, &a, b->o, err));
    cli_interrupt_watch(s);
    st = KVD_OK;
    for (uint32_t q = 0; q < c->n_seq && st == KVD_OK; q++)
        st = fill(b, s, q, c->depth, err);
    st = st == KVD_OK ? run_once(b, s, c, &rate[0], err) : st; /* warm-up */
    for (uint32_t i = 0; i < n_run && st == KVD_OK; i++)
        st = run_once(b, s, c, &rate[i], err);
    cli_interrupt_watch(NULL);
    cli_print_device(s, &plan, stderr);
    kvd_session_close(s);
    if (st == KVD_OK)
        print_row(b, c, rate, n_run);
    return st;
}

/* Mean probability of the next token over a counting sentence: high for any working model. */
static kvd_status sanity_score(bench *b, kvd_err *err)
{
    static const char    text[] = "one two three four five six seven eight nine ten eleven twelve. "
                                  "one two three four five six seven eight nine ten eleven twelve. "
                                  "one two three four five six seven eight nine ten eleven twelve.";
    kvd_session_params   p      = KVD_SESSION_PARAMS_INIT;
    kvd_attention_params a;
    kvd_session         *s = NULL;
    cli_tokens           t = { 0 };
    uint8_t              want[256];
    kvd_batch            x  = KVD_BATCH_INIT;
    kvd_status           st = cli_tokenize_text(b->m, text, strlen(text), NULL, 0, true, &t, err);

    if (st == KVD_OK)
        t.n = kvd_min_u64(t.n, kvd_min_u64(KVD_COUNTOF(want), b->info.n_ctx_train));
    if (st == KVD_OK)
        st = cli_session_params(&p, &a, b->o, err);
    p.n_ctx     = (uint32_t)t.n;
    p.n_batch   = (uint32_t)t.n;
    p.n_logits  = (uint32_t)t.n;
    p.kv_device = p.kv_host = 0;
    p.attention             = NULL;
    p.trace_path            = NULL;
    if (st == KVD_OK)
        st = cli_session_or_uncached(&s, NULL, b->m, &p, b->o, err);
    memset(want, 1, sizeof(want));
    x.n_token     = (uint32_t)t.n;
    x.token       = t.data;
    x.want_logits = want;
    if (st == KVD_OK)
        st = kvd_eval(s, &x, err);
    for (uint32_t i = 0; st == KVD_OK && i + 1 < t.n; i++) {
        const float *l   = kvd_logits(s, i);
        double       sum = 0.0;

        for (uint32_t v = 0; v < b->info.n_vocab; v++)
            sum += exp((double)l[v] - (double)l[t.data[i + 1]]);
        b->sanity += 1.0 / sum / (double)(t.n - 1);
    }
    kvd_session_close(s);
    kvd_free(t.data);
    return st;
}

static kvd_status run_lists(bench *b, kvd_err *err)
{
    cli_list p, n, d, np;

    KVD_TRY(cli_parse_list(b->o, "n-prompt", &p, err));
    KVD_TRY(cli_parse_list(b->o, "n-gen", &n, err));
    KVD_TRY(cli_parse_list(b->o, "n-depth", &d, err));
    KVD_TRY(cli_parse_list(b->o, "n-parallel", &np, err));
    for (int k = 0; k < np.n * d.n; k++) {
        bench_case c = { .depth = d.x[k % d.n], .n_seq = np.x[k / d.n] ? np.x[k / d.n] : 1 };

        for (int i = 0; i < p.n; i++) {
            c.n_prompt = p.x[i];
            if (c.n_prompt)
                KVD_TRY(run_case(b, &c, err));
        }
        c.n_prompt = 0;
        for (int i = 0; i < n.n; i++) {
            c.n_gen = n.x[i];
            if (c.n_gen)
                KVD_TRY(run_case(b, &c, err));
        }
    }
    return KVD_OK;
}

/* Whole runs, of prompts and answers. */
static kvd_status run_all(bench *b, kvd_err *err)
{
    kvd_status st;

    kvd_model_get_info(b->m, &b->info);
    if (!kvd_opts_text(b->o, "shape")) /* which knows no text */
        KVD_TRY(sanity_score(b, err));
    if (kvd_opts_flag(b->o, "schedules")) /* rows of another form */
        return cli_bench_schedules(b->m, b->o, err);
    st = run_lists(b, err);
    if (st == KVD_OK && b->n_row == 0)
        st = kvd_fail(err, KVD_E_INVAL, 0, "nothing to measure: -p and -n are both 0");
    if (b->n_row && strcmp(b->form, "json") == 0)
        puts("]");
    return st;
}

int cli_bench(const kvd_opts *o)
{
    const bool stages = kvd_opts_text(o, "shape") && !kvd_opts_given(o, "n-prompt") &&
                        !kvd_opts_flag(o, "schedules");
    bench      b   = { .o = o, .form = kvd_opts_text(o, "output") };
    kvd_err    err = { 0 };
    kvd_status st;

    if (kvd_opts_text(o, "cache-dir") && !stages) /* would keep what is measured */
        return cli_usage("bench: --cache-dir goes with --shape and made-up rows alone");
    st                 = stages ? cli_bench_shape(o, &err) : cli_model_open(&b.m, o, &err);
    b.info.struct_size = sizeof(b.info);
    if (st == KVD_OK && !stages)
        st = run_all(&b, &err);
    kvd_model_close(b.m);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
