/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_score.c - RULER's string match, and the report: scores by task, and each configuration's
 * paired difference to dense with a bootstrap interval.
 *
 * Pairing is by sample: both configurations answered the same prompt, so how hard it was cancels.
 * Intervals are quantiles of the mean over N_RESAMPLE samples drawn with replacement. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli_eval.h"

#define N_RESAMPLE 10000u

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c; /* as RULER: ASCII texts */
}

static bool contains(const char *text, size_t len, const char *word)
{
    const size_t n = strlen(word);

    for (size_t at = 0; at + n <= len; at++) {
        size_t i = 0;

        while (i < n && lower(text[at + i]) == lower(word[i]))
            i++;
        if (i == n)
            return true;
    }
    return false;
}

double eval_score(const eval_sample *s, const char *text, size_t len)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_answer; i++)
        n += contains(text, len, eval_answer(s, i));
    if (s->task->part)
        return n > 0 ? 1.0 : 0.0;
    return s->n_answer ? (double)n / s->n_answer : 0.0;
}

static double log_sum_exp(const float *x, uint32_t n)
{
    float  max = x[0];
    double sum = 0;

    for (uint32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)(x[i] - max));
    return (double)max + log(sum);
}

double eval_kl(const float *p, const float *q, uint32_t n)
{
    const double zp = log_sum_exp(p, n), zq = log_sum_exp(q, n);
    double       kl = 0;

    for (uint32_t i = 0; i < n; i++) {
        const double lp = (double)p[i] - zp;

        if (exp(lp) > 0) /* else 0 times minus infinity */
            kl += exp(lp) * (lp - ((double)q[i] - zq));
    }
    return kl > 0 ? kl : 0; /* rounding, where both say the same */
}

static int by_value(const void *pa, const void *pb)
{
    const double a = *(const double *)pa, b = *(const double *)pb;

    return (a > b) - (a < b);
}

bool eval_bootstrap(const double *x, uint32_t n, uint64_t seed, eval_interval *out)
{
    double *mean = kvd_calloc(N_RESAMPLE, sizeof(*mean));
    kvd_rng r;

    *out = (eval_interval){ 0 };
    if (!mean)
        return false;
    kvd_rng_seed(&r, seed);
    for (uint32_t i = 0; i < n; i++)
        out->mean += x[i] / n;
    for (uint32_t k = 0; k < N_RESAMPLE && n > 0; k++) {
        for (uint32_t i = 0; i < n; i++)
            mean[k] += x[kvd_rng_below(&r, n)];
        mean[k] /= n;
    }
    qsort(mean, N_RESAMPLE, sizeof(*mean), by_value);
    out->low  = mean[N_RESAMPLE * 25 / 1000];
    out->high = mean[N_RESAMPLE - 1 - N_RESAMPLE * 25 / 1000];
    kvd_free(mean);
    return true;
}

/* ---- the report ------------------------------------------------------------------ */

static float score_at(const eval_table *t, uint32_t config, uint32_t task, uint32_t sample)
{
    return t->score[((size_t)config * t->n_task + task) * t->n_sample + sample];
}

typedef struct column {                /* one configuration's figures */
    double        task[EVAL_MAX_TASK]; /* mean score, below 0: nothing was run */
    double        mean;                /* over tasks that were run */
    eval_interval diff;                /* to dense, percent */
    uint32_t      n, better, worse;
} column;

static double task_mean(const eval_table *t, uint32_t config, uint32_t task)
{
    double   sum = 0;
    uint32_t n   = 0;

    for (uint32_t i = 0; i < t->n_sample; i++) {
        const float s = score_at(t, config, task, i);

        sum += s >= 0 ? (double)s : 0.0;
        n += s >= 0;
    }
    return n ? 100 * sum / n : -1.0;
}

/* Differences of the samples that both have run. */
static bool compare(const eval_table *t, uint32_t config, uint64_t seed, column *out)
{
    double *x = kvd_calloc((size_t)t->n_task * t->n_sample, sizeof(*x));
    bool    ok;

    if (!x)
        return false;
    for (uint32_t k = 0; k < t->n_task; k++) {
        for (uint32_t i = 0; i < t->n_sample; i++) {
            const float a = score_at(t, config, k, i), b = score_at(t, t->configs->dense, k, i);

            if (a < 0 || b < 0)
                continue;
            out->better += a > b;
            out->worse += a < b;
            x[out->n++] = 100.0 * ((double)a - (double)b);
        }
    }
    ok = eval_bootstrap(x, out->n, seed, &out->diff);
    kvd_free(x);
    return ok;
}

static bool fill_column(const eval_table *t, uint32_t config, uint64_t seed, column *c)
{
    uint32_t n = 0;

    *c = (column){ 0 };
    for (uint32_t k = 0; k < t->n_task; k++) {
        c->task[k] = task_mean(t, config, k);
        c->mean += c->task[k] >= 0 ? c->task[k] : 0.0;
        n += c->task[k] >= 0;
    }
    c->mean = n ? c->mean / n : 0.0;
    return compare(t, config, seed, c);
}

/* sum / n, or a dash where there is nothing to divide by. */
static void print_ratio(FILE *f, int width, int digits, double sum, uint64_t n)
{
    if (n)
        fprintf(f, " %*.*f", width, digits, sum / (double)n);
    else
        fprintf(f, " %*s", width, "-");
}

static void set_ratio(json_t *o, const char *name, double sum, uint64_t n)
{
    if (n)
        json_object_set_new(o, name, json_real(sum / (double)n));
}

static void print_text(const eval_table *t, const column *c, FILE *f)
{
    fprintf(f, "%-18s", "score");
    for (uint32_t k = 0; k < t->n_task; k++) {
        const char *name = t->task[k]->name;

        fprintf(f, " %10.10s", strncmp(name, "niah_", 5) == 0 ? name + 5 : name);
    }
    fprintf(f, " %10s\n", "mean");
    for (uint32_t i = 0; i < t->configs->n; i++) {
        fprintf(f, "%-18.18s", t->configs->config[i].name);
        for (uint32_t k = 0; k < t->n_task; k++)
            print_ratio(f, 10, 1, c[i].task[k], c[i].task[k] >= 0);
        fprintf(f, " %10.1f\n", c[i].mean);
    }
    fprintf(f, "\n%-18s %7s %19s %7s %6s %4s %6s %7s %7s %8s\n", "paired, to dense", "points",
            "95 % interval", "better", "worse", "n", "mass", "miss %", "urgent", "KL");
    for (uint32_t i = 0; i < t->configs->n; i++) {
        fprintf(f, "%-18.18s %+7.1f   [%+7.1f,%+7.1f] %7u %6u %4u", t->configs->config[i].name,
                c[i].diff.mean, c[i].diff.low, c[i].diff.high, c[i].better, c[i].worse, c[i].n);
        print_ratio(f, 6, 3, t->counts[i].mass, t->counts[i].n_step);
        print_ratio(f, 7, 2, 100.0 * (double)t->counts[i].n_miss, t->counts[i].n_selected);
        print_ratio(f, 7, 2, 100.0 * (double)t->counts[i].n_urgent, t->counts[i].n_selected);
        print_ratio(f, 8, 4, t->counts[i].kl, t->counts[i].n_kl);
        fputc('\n', f);
    }
}

static json_t *config_json(const eval_table *t, uint32_t config, const column *c)
{
    const eval_counts *n    = &t->counts[config];
    json_t            *task = json_object(), *o;

    for (uint32_t k = 0; k < t->n_task; k++) {
        if (c->task[k] >= 0)
            json_object_set_new(task, t->task[k]->name, json_real(c->task[k]));
    }
    o = json_pack("{s:s, s:o, s:f, s:{s:f, s:f, s:f, s:I, s:I, s:I}}", "name",
                  t->configs->config[config].name, "tasks", task, "mean", c->mean, "difference",
                  "mean", c->diff.mean, "low", c->diff.low, "high", c->diff.high, "n",
                  (json_int_t)c->n, "better", (json_int_t)c->better, "worse", (json_int_t)c->worse);
    set_ratio(o, "mass", n->mass, n->n_step);
    set_ratio(o, "miss_share", (double)n->n_miss, n->n_selected);
    set_ratio(o, "urgent_share", (double)n->n_urgent, n->n_selected);
    set_ratio(o, "kl", n->kl, n->n_kl);
    return o;
}

static bool print_json(const eval_table *t, const column *c, FILE *f)
{
    json_t *list = json_array();
    bool    ok;

    for (uint32_t i = 0; i < t->configs->n; i++)
        json_array_append_new(list, config_json(t, i, &c[i]));
    ok = json_dumpf(list, f, JSON_COMPACT | JSON_REAL_PRECISION(6)) == 0 && fputc('\n', f) != EOF;
    json_decref(list);
    return ok;
}

kvd_status eval_table_print(const eval_table *t, uint64_t seed, bool json, FILE *f, kvd_err *err)
{
    column *c  = kvd_calloc(t->configs->n, sizeof(*c));
    bool    ok = c != NULL;

    for (uint32_t i = 0; ok && i < t->configs->n; i++)
        ok = fill_column(t, i, seed, &c[i]);
    if (ok && json)
        ok = print_json(t, c, f);
    else if (ok)
        print_text(t, c, f);
    kvd_free(c);
    return ok ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the report");
}
