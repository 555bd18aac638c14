/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench_schedules.c - kvdrive bench --schedules: sparse steps under every order of their work:
 * {sequential, elastic} x {deferred, strict} x {lookup on the device, on the host}, in one session
 * for each lookup, over the same K and V; as CSV, a row a configuration.
 *
 * Elastic rows come for each size of micro-batch that is tried, then for 0, the one that was chosen
 * by what the first steps took; its trials follow as comments.  A configuration's first steps are
 * not counted: they fill windows and try sizes.  ms is the median of the others. */
#include <inttypes.h>
#include <stdlib.h>

#include "cli.h"

#define STEPS_MAX  1024u
#define STEPS_WARM 2u /* that fill windows */
#define STEPS_SIZE 6u /* that try a size */

typedef struct schedules {
    kvd_model     *m;
    kvd_session   *s;
    kvd_model_info info;
    uint32_t       depth, n_seq, n_warm, n_gen, n_done; /* n_done: steps so far */
    int32_t        token[4096];
    uint32_t       seq[4096];
    uint8_t        want[4096];
} schedules;

/* Token ids that exercise the whole vocabulary. */
static int32_t some_token(const schedules *b, uint32_t i)
{
    return (int32_t)((i * 2654435761u >> 8) % b->info.n_vocab);
}

/* What a sequence holds when all begins. */
static kvd_status fill(schedules *b, const kvd_opts *o, uint32_t seq, kvd_err *err)
{
    int32_t   *t;
    kvd_status st;

    if (kvd_opts_flag(o, "synthetic"))
        return kvd_seq_synthesize(b->s, seq, b->depth, err);
    t = kvd_calloc(b->depth, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u tokens", b->depth);
    for (uint32_t i = 0; i < b->depth; i++)
        t[i] = some_token(b, i + seq);
    st = kvd_prefill(b->s, seq, t, b->depth, NULL, NULL, err);
    kvd_free(t);
    return st;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static kvd_status one_step(schedules *b, double *ms, kvd_err *err)
{
    kvd_batch x = KVD_BATCH_INIT;
    uint64_t  t0;

    for (uint32_t i = 0; i < b->n_seq; i++) {
        b->token[i] = (int32_t)(((b->n_done * 31 + i) * 2654435761u >> 8) % b->info.n_vocab);
        b->seq[i]   = i;
        b->want[i]  = 1;
    }
    b->n_done++;
    x.n_token     = b->n_seq;
    x.token       = b->token;
    x.seq         = b->seq;
    x.want_logits = b->want;
    t0            = kvd_now_ns();
    KVD_TRY(kvd_eval(b->s, &x, err));
    *ms = (double)(kvd_now_ns() - t0) * 1e-6;
    return KVD_OK;
}

static void print_trials(const kvd_stats *st)
{
    for (uint32_t i = 0; i < st->n_micro; i++)
        printf("# micro-batches of %u: %.3f ms%s\n", st->micro_rows[i], st->micro_ms[i],
               st->micro_rows[i] == st->micro_batch ? ", taken" : "");
}

static const char *name_of(bool second, const char *a, const char *b)
{
    return second ? b : a;
}

/* Back at the depth, so that all configurations step over the same tokens. */
static kvd_status run(schedules *b, const kvd_attention_params *a, bool host, kvd_err *err)
{
    kvd_stats from = { .struct_size = sizeof(from) }, to = from;
    double    ms[STEPS_MAX], up;

    KVD_TRY(kvd_session_set_attention(b->s, a, err));
    b->n_done = 0;
    for (uint32_t i = 0; i < b->n_warm; i++)
        KVD_TRY(one_step(b, &ms[0], err));
    kvd_session_get_stats(b->s, &from);
    for (uint32_t i = 0; i < b->n_gen; i++)
        KVD_TRY(one_step(b, &ms[i], err));
    kvd_session_get_stats(b->s, &to);
    for (uint32_t q = 0; q < b->n_seq; q++)
        KVD_TRY(kvd_seq_truncate(b->s, q, b->depth, err));
    qsort(ms, b->n_gen, sizeof(*ms), by_value);
    up = (double)(to.bytes_up - from.bytes_up) / b->n_gen;
    printf("%s,%s,%s,%u,%u,%u,%.3f,%.1f,%.4f,%.3f\n", name_of(host, "device", "host"),
           name_of(a->fetch, "deferred", "strict"), name_of(a->schedule, "sequential", "elastic"),
           a->micro_batch, b->depth, b->n_seq, ms[b->n_gen / 2], b->n_seq * 1e3 / ms[b->n_gen / 2],
           (double)(to.n_hit - from.n_hit) / (double)(to.n_selected - from.n_selected + 1),
           up * 1e-6);
    if (a->schedule && !a->micro_batch)
        print_trials(&to);
    fflush(stdout);
    return KVD_OK;
}

static kvd_status run_lookup(schedules *b, kvd_attention_params *a, bool host, kvd_err *err)
{
    for (uint32_t strict = 0; strict < 2; strict++) {
        a->fetch       = strict ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        a->schedule    = KVD_SCHEDULE_SEQUENTIAL;
        a->micro_batch = 0;
        KVD_TRY(run(b, a, host, err));
        a->schedule = KVD_SCHEDULE_ELASTIC;
        for (uint32_t n = 1; n < 2 * b->n_seq; n *= 2) {
            a->micro_batch = n < b->n_seq ? n : b->n_seq;
            KVD_TRY(run(b, a, host, err));
        }
        a->micro_batch = 0;
        KVD_TRY(run(b, a, host, err));
    }
    return KVD_OK;
}

static kvd_status run_case(schedules *b, const kvd_opts *o, kvd_err *err)
{
    kvd_session_params   p;
    kvd_attention_params a;
    kvd_status           st = KVD_OK;

    for (uint32_t host = 0; host < 2 && st == KVD_OK; host++) {
        KVD_TRY(cli_session_params(&p, &a, o, err));
        a.min_mass = -1.0f; /* what is measured stays what it is */
        p.n_ctx    = b->depth + b->n_gen + b->n_warm;
        p.n_seq    = b->n_seq;
        p.n_logits = b->n_seq;
        p.lookup   = host ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        KVD_TRY(cli_session_open(&b->s, NULL, b->m, &p, &a, o, err));
        cli_interrupt_watch(b->s);
        for (uint32_t q = 0; q < b->n_seq && st == KVD_OK; q++)
            st = fill(b, o, q, err);
        if (st == KVD_OK)
            st = run_lookup(b, &a, host, err);
        cli_interrupt_watch(NULL);
        kvd_session_close(b->s);
    }
    return st;
}

kvd_status cli_bench_schedules(kvd_model *m, const kvd_opts *o, kvd_err *err)
{
    schedules *b = kvd_calloc(1, sizeof(*b));
    cli_list   n, d, np;
    kvd_status st;

    if (!b)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory");
    b->m                = m;
    b->info.struct_size = sizeof(b->info);
    kvd_model_get_info(m, &b->info);
    st = cli_parse_list(o, "n-depth", &d, err);
    if (st == KVD_OK)
        st = cli_parse_list(o, "n-parallel", &np, err);
    if (st == KVD_OK)
        st = cli_parse_list(o, "n-gen", &n, err);
    if (st == KVD_OK && (n.x[0] == 0 || n.x[0] > STEPS_MAX))
        st = kvd_fail(err, KVD_E_INVAL, 0, "--schedules: -n from 1 to %u steps", STEPS_MAX);
    if (st == KVD_OK)
        printf("lookup,fetch,schedule,micro_batch,n_depth,n_parallel,ms,ts,hit,mb_up\n");
    for (int k = 0; k < np.n * d.n && st == KVD_OK; k++) {
        b->depth  = d.x[k % d.n];
        b->n_seq  = np.x[k / d.n] ? np.x[k / d.n] : 1;
        b->n_gen  = n.x[0];
        b->n_warm = STEPS_WARM;
        for (uint32_t i = 1; i < 2 * b->n_seq; i *= 2)
            b->n_warm += STEPS_SIZE;
        st = b->n_seq <= KVD_COUNTOF(b->seq) ? run_case(b, o, err)
                                             : kvd_fail(err, KVD_E_INVAL, 0, "-np %u: at most %zu",
                                                        b->n_seq, KVD_COUNTOF(b->seq));
    }
    kvd_free(b);
    return st;
}
