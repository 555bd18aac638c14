/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench_grow.c - kvdrive bench --shape --grow: tokens per second as the batch grows, up to the
 * largest that memory holds.
 *
 * What fits the plans say.  Making up contexts takes longest, so sequences of one session are
 * filled as they are needed and stay; a second session is opened where the first numbers fit the
 * device and the others do not, since those would be slowed by tiers that they do not need. */
#include <stdio.h>

#include "cli_bench.h"

#define GROW_MAX 16

typedef struct growth {
    shape_case c;
    uint32_t   n[GROW_MAX]; /* sequences of each row */
    bool       resident[GROW_MAX];
    int        n_row;
} growth;

/* Whether a session of so many would open; else err says why not. */
static bool fits(growth *g, uint32_t n_seq, bool *resident, kvd_err *err)
{
    shape_case        *c    = &g->c;
    kvd_session_params p    = c->params;
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    uint64_t           need;

    p.n_ctx = c->context + GROW_MAX * (c->n_step + 2 * c->n_warm);
    p.n_seq = p.n_logits = n_seq;
    if (n_seq > BENCH_SEQS_MAX) {
        (void)kvd_fail(err, KVD_E_INVAL, 0, "%u sequences are the most", BENCH_SEQS_MAX);
        return false;
    }
    if (kvd_session_plan(c->m, &p, &plan, err) != KVD_OK)
        return false;
    need      = plan.device_limit_bytes > 0 ? plan.pinned_bytes + plan.host_bytes
                                            : plan.kv_bytes + plan.scratch_bytes + plan.host_bytes;
    *resident = plan.kv_resident;
    if (need <= plan.available_bytes)
        return true;
    (void)kvd_fail(err, KVD_E_NOMEM, 0, "%.0f MiB of host memory are needed, %.0f available",
                   cli_mib(need), cli_mib(plan.available_bytes));
    return false;
}

/* n_seq doubled as long as it fits, then the most that does. */
static void list_rows(growth *g, uint32_t n_seq, kvd_err *err)
{
    uint32_t good = 0, bad = n_seq;
    bool     resident;

    for (; g->n_row < GROW_MAX - 1 && fits(g, bad, &resident, err); bad *= 2) {
        good                  = bad;
        g->resident[g->n_row] = resident;
        g->n[g->n_row++]      = bad;
    }
    if (good == 0 || g->n_row == GROW_MAX - 1)
        return;
    while (bad - good > 1) {
        const uint32_t n = good + (bad - good) / 2;

        if (fits(g, n, &resident, err)) {
            good                  = n;
            g->resident[g->n_row] = resident;
        } else {
            bad = n;
        }
    }
    if (good > g->n[g->n_row - 1])
        g->n[g->n_row++] = good;
}

/* Rows [first, end) in one session, as far as it opens: a plan does not know what else wants the
 * host's memory. */
static kvd_status run_rows(growth *g, int first, int end, bool *any, kvd_err *err)
{
    shape_case *c  = &g->c;
    kvd_status  st = bench_case_open(c, g->n[end - 1], GROW_MAX, err);

    while (st == KVD_E_NOMEM && end - 1 > first) {
        fprintf(stderr, "bench: %u sequences: %s\n", g->n[end - 1], err->msg);
        st = bench_case_open(c, g->n[--end - 1], GROW_MAX, err);
    }
    if (st != KVD_OK)
        return st;
    for (int i = first; i < end; i++) {
        c->n_seq               = g->n[i];
        c->number[BENCH_BATCH] = g->n[i];
        KVD_TRY(bench_case_fill(c, g->n[i], err));
        KVD_TRY(bench_case_run(c, err));
        cli_bench_row(kvd_opts_text(c->o, "output"), !*any, c->o, c->number);
        *any = true;
    }
    return KVD_OK;
}

static kvd_status run_all(growth *g, bool *any, kvd_err *err)
{
    int first = 0, end;

    while (first < g->n_row) {
        for (end = first + 1; end < g->n_row && g->resident[end] == g->resident[first]; end++)
            ;
        KVD_TRY(run_rows(g, first, end, any, err));
        first = end;
    }
    return KVD_OK;
}

kvd_status bench_grow(kvd_model *m, const kvd_opts *o, uint32_t context, uint32_t n_seq, bool *any,
                      kvd_err *err)
{
    growth     g   = { .n_row = 0 };
    kvd_err    why = { 0 };
    kvd_status st  = bench_case_begin(&g.c, m, o, context, n_seq, err);

    if (st == KVD_OK)
        list_rows(&g, n_seq, &why);
    if (st == KVD_OK)
        st = run_all(&g, any, err);
    bench_case_close(&g.c);
    if (st == KVD_OK)
        fprintf(stderr, "bench: %u tokens: %u sequences fit; more do not: %s\n", context,
                g.n_row ? g.n[g.n_row - 1] : 0, why.msg);
    return st;
}
