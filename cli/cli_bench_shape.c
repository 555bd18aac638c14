/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench_shape.c - kvdrive bench --shape: decode steps of a model that is only a shape, over
 * made-up q, K and V, so that hits come from real selections and windows and no file is needed.
 *
 * A case has four runs over one session, with --brief the first alone:
 *   1. steps as they are: ms, tokens per second, hits; after warm-up, in which the windows fill and
 *      sizes of micro-batches are tried;
 *   2. the same without fetches, where there are any;
 *   3. one step that fills the windows anew, marked: how fast records come up when there are many;
 *   4. steps with marks around their stages. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_bench.h"

#define WARM      16u
#define WARM_SIZE 6u /* more, for each size of micro-batches that is tried */
#define RUNS      4u
#define AXES_MAX  8
#define STEPS_MAX 100000u

typedef struct axis { /* of --sweep */
    char  name[32];
    char *value[CLI_LIST_MAX]; /* into the text */
    int   n, at;
} axis;

typedef struct sweep {
    char *text; /* a copy of the option, cut into pieces */
    axis  axis[AXES_MAX];
    int   n;
} sweep;

/* ---- sweeps --------------------------------------------------------------------------- */

static kvd_status parse_axis(axis *a, char *text, kvd_err *err)
{
    char *value = strchr(text, '=');

    if (!value || value == text || (size_t)(value - text) >= sizeof(a->name) || !value[1])
        return kvd_fail(err, KVD_E_INVAL, 0, "--sweep: expected NAME=A,B, found '%.40s'", text);
    snprintf(a->name, sizeof(a->name), "%.*s", (int)(value - text), text);
    while (value) {
        if (a->n == CLI_LIST_MAX)
            return kvd_fail(err, KVD_E_INVAL, 0, "--sweep: more than %d values of %s", CLI_LIST_MAX,
                            a->name);
        *value++         = 0;
        a->value[a->n++] = value;
        value            = strchr(value, ',');
    }
    return KVD_OK;
}

static kvd_status sweep_open(sweep *w, const kvd_opts *o, kvd_err *err)
{
    const char *given = kvd_opts_text(o, "sweep");

    *w = (sweep){ 0 };
    if (!given)
        return KVD_OK;
    w->text = kvd_strndup(given, strlen(given));
    if (!w->text)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for --sweep");
    for (char *s = w->text, *next; s; s = next) {
        next = strchr(s, ';');
        if (next)
            *next++ = 0;
        if (w->n == AXES_MAX)
            return kvd_fail(err, KVD_E_INVAL, 0, "--sweep: more than %d options", AXES_MAX);
        KVD_TRY(parse_axis(&w->axis[w->n++], s, err));
    }
    return KVD_OK;
}

static kvd_status sweep_apply(const sweep *w, kvd_opts *o, kvd_err *err)
{
    for (int i = 0; i < w->n; i++)
        KVD_TRY(kvd_opts_set(o, w->axis[i].name, w->axis[i].value[w->axis[i].at], err));
    return KVD_OK;
}

/* The last option changes fastest; false: all have been. */
static bool sweep_next(sweep *w)
{
    for (int i = w->n; i-- > 0;) {
        if (++w->axis[i].at < w->axis[i].n)
            return true;
        w->axis[i].at = 0;
    }
    return false;
}

/* ---- steps ---------------------------------------------------------------------------- */

static kvd_status one_step(shape_case *c, double *ms, kvd_err *err)
{
    int32_t   token[BENCH_SEQS_MAX] = { 0 };
    uint32_t  seq[BENCH_SEQS_MAX];
    uint8_t   want[BENCH_SEQS_MAX];
    kvd_batch b = KVD_BATCH_INIT;
    uint64_t  t0;

    for (uint32_t i = 0; i < c->n_seq; i++) {
        seq[i]  = i;
        want[i] = 1;
    }
    b.n_token     = c->n_seq;
    b.token       = token;
    b.seq         = seq;
    b.want_logits = want;
    b.n_best      = 1; /* as greedy text asks for */
    t0            = kvd_now_ns();
    KVD_TRY(kvd_eval(c->s, &b, err));
    *ms = (double)(kvd_now_ns() - t0) * 1e-6;
    return KVD_OK;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Sorted times in c->ms, after warm-up. */
static kvd_status steps(shape_case *c, uint32_t n, kvd_err *err)
{
    for (uint32_t i = 0; i < n; i++)
        KVD_TRY(one_step(c, &c->ms[i], err));
    qsort(c->ms, n, sizeof(*c->ms), by_value);
    return KVD_OK;
}

static kvd_status measure(shape_case *c, bool stages, bool no_fetch, kvd_err *err)
{
    kvd_measure_params p = KVD_MEASURE_PARAMS_INIT;

    p.reuse    = (float)kvd_opts_num(c->o, "reuse");
    p.stages   = stages;
    p.no_fetch = no_fetch;
    return kvd_session_measure(c->s, &p, err);
}

/* What the disk tier did in n steps. */
static void take_disk(shape_case *c, const kvd_stats *a, const kvd_stats *b)
{
    const double n = (double)c->n_step;

    c->number[BENCH_DISK_RECORDS] = (double)(b->n_disk - a->n_disk) / n;
    c->number[BENCH_DISK_MB]      = (double)(b->disk_read_bytes - a->disk_read_bytes) * 1e-6 / n;
    c->number[BENCH_DISK_WAIT]    = (double)(b->disk_wait_ns - a->disk_wait_ns) * 1e-6 / n;
}

kvd_status bench_case_run(shape_case *c, kvd_err *err)
{
    kvd_stats a = { .struct_size = sizeof(a) }, b = a;
    double   *x = c->number;

    KVD_TRY(measure(c, false, false, err));
    KVD_TRY(steps(c, c->n_warm, err));
    kvd_session_get_stats(c->s, &a);
    KVD_TRY(steps(c, c->n_step, err));
    kvd_session_get_stats(c->s, &b);
    x[BENCH_N]      = c->n_step;
    x[BENCH_MS]     = c->ms[c->n_step / 2];
    x[BENCH_MS_P10] = c->ms[c->n_step / 10];
    x[BENCH_MS_P90] = c->ms[c->n_step - 1 - c->n_step / 10];
    x[BENCH_TOK_S]  = c->n_seq * 1e3 / x[BENCH_MS];
    c->dense        = b.n_sparse == a.n_sparse;
    if (b.n_selected > a.n_selected)
        x[BENCH_HITS] = 100.0 * (double)(b.n_hit - a.n_hit) / (double)(b.n_selected - a.n_selected);
    if (c->plan.kv_spills)
        take_disk(c, &a, &b);
    return KVD_OK;
}

static kvd_status without_fetches(shape_case *c, kvd_err *err)
{
    KVD_TRY(measure(c, false, true, err));
    KVD_TRY(steps(c, c->n_warm, err));
    KVD_TRY(steps(c, c->n_step, err));
    c->number[BENCH_OFF_MS] = c->ms[c->n_step / 2];
    return KVD_OK;
}

/* Bytes a nanosecond of a step that fills the windows: GB/s. */
static kvd_status fill_windows(shape_case *c, kvd_err *err)
{
    kvd_stages s = { .struct_size = sizeof(s) };

    KVD_TRY(measure(c, true, false, err));
    KVD_TRY(kvd_session_set_attention(c->s, &c->attention, err));
    KVD_TRY(steps(c, 1, err));
    kvd_session_get_stages(c->s, &s);
    if (s.bytes[KVD_STAGE_FETCH] > 0 && s.ns[KVD_STAGE_FETCH] > 0)
        c->number[BENCH_PCIE_RATE] =
            (double)s.bytes[KVD_STAGE_FETCH] / (double)s.ns[KVD_STAGE_FETCH];
    if (kvd_opts_num(c->o, "pcie-rate") > 0.0)
        c->number[BENCH_PCIE_RATE] = kvd_opts_num(c->o, "pcie-rate");
    return steps(c, c->n_warm, err);
}

static kvd_status stage_by_stage(shape_case *c, kvd_err *err)
{
    kvd_stages s = { .struct_size = sizeof(s) };
    double    *x = c->number;

    KVD_TRY(measure(c, true, false, err));
    KVD_TRY(steps(c, c->n_warm, err)); /* recorded anew in the first */
    KVD_TRY(measure(c, true, false, err));
    KVD_TRY(steps(c, c->n_step, err));
    kvd_session_get_stages(c->s, &s);
    x[BENCH_SUM_MS] = 0.0;
    for (int i = 0; i < KVD_STAGE_COUNT; i++) {
        x[BENCH_STAGE_MS + i] = (double)s.ns[i] * 1e-6 / (double)s.n_step;
        x[BENCH_STAGE_MB + i] = (double)s.bytes[i] * 1e-6 / (double)s.n_step;
        x[BENCH_SUM_MS] += x[BENCH_STAGE_MS + i];
    }
    return KVD_OK;
}

/* What follows from the runs.  MB / ms is GB/s. */
static void conclude(shape_case *c)
{
    double      *x    = c->number;
    const double pcie = x[BENCH_STAGE_MB + KVD_STAGE_FETCH];
    double       hbm  = 0.0;

    for (int i = 0; i < KVD_STAGE_COUNT; i++)
        hbm += x[BENCH_STAGE_MB + i]; /* what comes up is written once */
    x[BENCH_OF_SUM]  = x[BENCH_MS] / x[BENCH_SUM_MS];
    x[BENCH_HBM]     = hbm / x[BENCH_MS];
    x[BENCH_ROOF_MS] = hbm / kvd_opts_num(c->o, "hbm-rate");
    if (pcie > 0.0) {
        x[BENCH_PCIE]    = pcie / x[BENCH_MS];
        x[BENCH_ROOF_MS] = fmax(x[BENCH_ROOF_MS], pcie / x[BENCH_PCIE_RATE]);
        x[BENCH_EXPOSED] =
            100.0 * (x[BENCH_MS] - x[BENCH_OFF_MS]) / x[BENCH_STAGE_MS + KVD_STAGE_FETCH];
    }
    x[BENCH_ROOF] = 100.0 * x[BENCH_ROOF_MS] / x[BENCH_MS];
}

/* ---- a case --------------------------------------------------------------------------- */

/* Steps in which micro-batches of 1, 2, 4 ... rows are tried. */
static uint32_t trial_steps(const kvd_attention_params *a, uint32_t n_seq)
{
    uint32_t n = 0;

    if (a->schedule != KVD_SCHEDULE_ELASTIC || a->micro_batch != 0)
        return 0;
    for (uint32_t rows = 1; rows < 2 * n_seq; rows *= 2)
        n += WARM_SIZE;
    return n;
}

kvd_status bench_case_begin(shape_case *c, kvd_model *m, const kvd_opts *o, uint32_t context,
                            uint32_t n_seq, kvd_err *err)
{
    cli_list n;

    *c = (shape_case){ .m = m, .o = o, .context = context, .n_seq = n_seq };
    KVD_TRY(cli_parse_list(o, "n-gen", &n, err));
    if (n.x[0] == 0 || n.x[0] > STEPS_MAX || n_seq == 0 || n_seq > BENCH_SEQS_MAX || context == 0)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--shape: expected 1 to %u steps (-n), 1 to %u sequences (-np) and a "
                        "context (-d)",
                        STEPS_MAX, BENCH_SEQS_MAX);
    c->n_step = n.x[0];
    KVD_TRY(cli_session_params(&c->params, &c->attention, o, err));
    c->attention.min_mass = -1.0f; /* of numbers that mean nothing */
    c->n_warm             = WARM + trial_steps(&c->attention, n_seq);
    for (int i = 0; i < BENCH_N_NUMBER; i++)
        c->number[i] = (double)NAN;
    c->ms = kvd_calloc(c->n_step + c->n_warm, sizeof(*c->ms));
    return c->ms ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u times", c->n_step);
}

void bench_case_close(shape_case *c)
{
    cli_interrupt_watch(NULL);
    kvd_session_close(c->s);
    kvd_free(c->ms);
    c->s  = NULL;
    c->ms = NULL;
}

kvd_status bench_case_open(shape_case *c, uint32_t n_seq, uint32_t n_run, kvd_err *err)
{
    cli_interrupt_watch(NULL);
    kvd_session_close(c->s);
    c->s                    = NULL;
    c->n_fill               = 0;
    c->plan                 = (kvd_plan){ .struct_size = sizeof(c->plan) };
    c->params.n_ctx         = c->context + n_run * (c->n_step + 2 * c->n_warm);
    c->params.n_seq         = n_seq;
    c->params.n_logits      = n_seq;
    c->number[BENCH_FILL_S] = 0.0;
    KVD_TRY(cli_session_open(&c->s, &c->plan, c->m, &c->params, &c->attention, c->o, err));
    cli_interrupt_watch(c->s);
    c->number[BENCH_CONTEXT]    = c->context;
    c->number[BENCH_BATCH]      = n_seq;
    c->number[BENCH_DEVICE_MIB] = cli_mib(c->plan.kv_device_bytes);
    c->number[BENCH_HOST_MIB]   = cli_mib(c->plan.kv_host_bytes);
    return KVD_OK;
}

kvd_status bench_case_fill(shape_case *c, uint32_t n_seq, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    for (; c->n_fill < n_seq; c->n_fill++)
        KVD_TRY(kvd_seq_synthesize(c->s, c->n_fill, c->context, err));
    c->number[BENCH_FILL_S] += (double)(kvd_now_ns() - t0) * 1e-9;
    return KVD_OK;
}

static kvd_status runs(shape_case *c, kvd_err *err)
{
    KVD_TRY(bench_case_fill(c, c->n_seq, err));
    KVD_TRY(bench_case_run(c, err));
    if (kvd_opts_flag(c->o, "brief"))
        return KVD_OK;
    if (!c->plan.kv_resident && !c->dense)
        KVD_TRY(without_fetches(c, err));
    if (!c->plan.kv_resident && !c->dense)
        KVD_TRY(fill_windows(c, err));
    KVD_TRY(stage_by_stage(c, err));
    conclude(c);
    return KVD_OK;
}

static kvd_status run_case(kvd_model *m, const kvd_opts *o, uint32_t context, uint32_t n_seq,
                           bool first, kvd_err *err)
{
    shape_case c;
    kvd_status st = bench_case_begin(&c, m, o, context, n_seq, err);

    if (st == KVD_OK)
        st = bench_case_open(&c, n_seq, RUNS, err);
    if (st == KVD_OK)
        st = runs(&c, err);
    bench_case_close(&c);
    if (st == KVD_OK)
        cli_bench_row(kvd_opts_text(o, "output"), first, o, c.number);
    return st;
}

/* What a model is opened by, in words: another one means that it is opened anew. */
static void model_key(const kvd_opts *o, char *key, size_t cap)
{
    static const char *const names[] = { "shape",   "shape-type", "device-memory",
                                         "backend", "threads",    "weights",
                                         "cpu-isa", "precise",    "deterministic" };
    size_t                   at      = 0;

    for (size_t i = 0; i < KVD_COUNTOF(names) && at < cap; i++)
        at += (size_t)snprintf(key + at, cap - at, "%s ", kvd_opts_text(o, names[i]));
}

static kvd_status open_model(kvd_model **m, char key[256], const kvd_opts *o, kvd_err *err)
{
    char now[256];

    model_key(o, now, sizeof(now));
    if (*m && strcmp(now, key) == 0)
        return KVD_OK;
    memcpy(key, now, sizeof(now));
    kvd_model_close(*m);
    return cli_model_open(m, o, err);
}

static kvd_status run_lists(kvd_model **m, kvd_opts *o, sweep *w, bool *any, kvd_err *err)
{
    char     key[256] = "";
    cli_list d, np;

    KVD_TRY(cli_parse_list(o, "n-depth", &d, err));
    KVD_TRY(cli_parse_list(o, "n-parallel", &np, err));
    do {
        KVD_TRY(sweep_apply(w, o, err));
        KVD_TRY(open_model(m, key, o, err));
        if (!*any)
            cli_bench_head(kvd_opts_text(o, "output"), *m, o);
        for (int i = 0; i < d.n * np.n; i++) {
            const uint32_t context = d.x[i / np.n], n_seq = np.x[i % np.n];

            if (kvd_opts_flag(o, "grow")) {
                KVD_TRY(bench_grow(*m, o, context, n_seq, any, err));
                continue;
            }
            KVD_TRY(run_case(*m, o, context, n_seq, !*any, err));
            *any = true;
        }
    } while (sweep_next(w));
    return KVD_OK;
}

kvd_status cli_bench_shape(const kvd_opts *o, kvd_err *err)
{
    kvd_opts   own = *o; /* whose values are the same */
    kvd_model *m   = NULL;
    bool       any = false;
    sweep      w;
    kvd_status st = sweep_open(&w, o, err);

    if (st == KVD_OK)
        st = run_lists(&m, &own, &w, &any, err);
    cli_bench_foot(kvd_opts_text(o, "output"), any);
    kvd_model_close(m);
    kvd_free(w.text);
    return st;
}
