/* SPDX-License-Identifier: Apache-2.0 */
/* engine_schedule.c - how sparse steps are ordered, and how large their micro-batches are.
 *
 * The best size depends on the model, the link, misses and rows, so it is measured where it counts:
 * the first steps with a number of rows, which all attend sparsely and fill no window, go in sizes
 * of 1, 2, 4 ... rows up to all, each timed ENGINE_MICRO_STEPS times after one that is not; the
 * least median stays.  That takes no step more than are wanted anyway.  Where memory is unified
 * there is nothing to overlap, and nothing is tried.
 *
 * Owns: the session's trials.  Thread: the session's. */
#include <stdio.h>

#include "engine/engine.h"

kvd_status engine_schedule_open(kvd_session *s, kvd_err *err)
{
    if (s->model->be->unified || !s->sparse)
        return KVD_OK;
    s->trials = kvd_calloc(s->params.n_seq, sizeof(*s->trials));
    return s->trials ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for its trials");
}

void engine_schedule_close(kvd_session *s)
{
    kvd_free(s->trials);
    s->trials = NULL;
}

static bool tries(const kvd_session *s)
{
    return s->trials && s->attention.params.schedule == KVD_SCHEDULE_ELASTIC &&
           s->attention.params.micro_batch == 0;
}

static void set_rows(kvd_session *s, uint32_t rows)
{
    kv_set_schedule(s->kv,
                    &(kv_schedule){ .elastic = s->attention.params.schedule == KVD_SCHEDULE_ELASTIC,
                                    .micro_batch = rows });
}

void engine_schedule_apply(kvd_session *s)
{
    for (uint32_t i = 0; s->trials && i < s->params.n_seq; i++)
        s->trials[i] = (engine_trials){ 0 };
    set_rows(s, s->attention.params.micro_batch);
}

/* Powers of two below n_row, as far as a step may have so many micro-batches; then all. */
static uint32_t list_sizes(uint32_t n_row, uint32_t *rows)
{
    uint32_t n = 0;

    for (uint32_t r = 1; r < n_row && n + 1 < ENGINE_MICRO_MAX; r *= 2) {
        if (kv_micro_batch_fits(n_row, r))
            rows[n++] = r;
    }
    rows[n++] = n_row;
    return n;
}

void engine_schedule_begin(kvd_session *s, uint32_t n_token)
{
    uint32_t       rows[ENGINE_MICRO_MAX], want;
    engine_trials *t;
    kv_counts      c;

    if (!tries(s) || s->n_sparse == 0)
        return;
    t = &s->trials[s->n_sparse - 1];
    if (t->n_size == 0)
        t->n_size = list_sizes(s->n_sparse, rows);
    else
        list_sizes(s->n_sparse, rows);
    if (n_token != s->n_sparse) { /* neither timed nor recorded: trials stay as they are */
        set_rows(s, t->size < t->n_size ? s->n_sparse : t->best);
        return;
    }
    want = t->size < t->n_size ? rows[t->size] : t->best;
    if (t->rows != want)
        t->step = 0;
    t->rows = want;
    set_rows(s, want);
    kv_get_counts(s->kv, &c);
    s->trial_refill = c.n_refill;
    s->trial_ns     = kvd_now_ns();
}

static float median(const float *x)
{
    float y[ENGINE_MICRO_STEPS];

    for (uint32_t i = 0; i < ENGINE_MICRO_STEPS; i++) {
        uint32_t k = i;

        for (; k > 0 && y[k - 1] > x[i]; k--)
            y[k] = y[k - 1];
        y[k] = x[i];
    }
    return y[ENGINE_MICRO_STEPS / 2];
}

static void choose(const kvd_session *s, engine_trials *t)
{
    uint32_t rows[ENGINE_MICRO_MAX], best = 0;
    char     text[24 * ENGINE_MICRO_MAX] = "";
    size_t   at                          = 0;

    list_sizes(s->n_sparse, rows);
    for (uint32_t i = 0; i < t->n_size; i++) {
        best = median(t->ms[i]) < median(t->ms[best]) ? i : best;
        at += (size_t)snprintf(text + at, sizeof(text) - at, " %u: %.2f", rows[i],
                               (double)median(t->ms[i]));
    }
    t->best = rows[best];
    kvd_log(KVD_LOG_INFO, "%u rows in micro-batches of rows: ms of%s; %u are taken", s->n_sparse,
            text, t->best);
}

void engine_schedule_end(kvd_session *s, uint32_t n_token)
{
    const uint64_t ns = kvd_now_ns() - s->trial_ns;
    engine_trials *t;
    kv_counts      c;

    if (!tries(s) || s->n_sparse == 0 || n_token != s->n_sparse)
        return;
    t = &s->trials[s->n_sparse - 1];
    kv_get_counts(s->kv, &c);
    if (t->size == t->n_size || c.n_refill != s->trial_refill)
        return;
    if (t->step > 0)
        t->ms[t->size][t->step - 1] = (float)((double)ns * 1e-6);
    if (t->step++ < ENGINE_MICRO_STEPS)
        return;
    t->step = 0;
    if (++t->size == t->n_size)
        choose(s, t);
}

void engine_schedule_stats(const kvd_session *s, kvd_stats *out)
{
    uint32_t rows[ENGINE_MICRO_MAX];

    out->micro_batch =
        s->attention.params.schedule == KVD_SCHEDULE_ELASTIC ? s->attention.params.micro_batch : 0;
    for (uint32_t i = 0; tries(s) && i < s->params.n_seq; i++) {
        const engine_trials *t = &s->trials[i];

        if (t->n_size == 0 || t->size < t->n_size)
            continue;
        out->micro_batch = t->best;
        out->n_micro     = list_sizes(i + 1, rows);
        for (uint32_t k = 0; k < out->n_micro; k++) {
            out->micro_rows[k] = rows[k];
            out->micro_ms[k]   = (double)median(t->ms[k]);
        }
    }
}
