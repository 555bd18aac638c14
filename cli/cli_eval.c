/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval.c - kvdrive eval ruler: the command, its prompts and what it sets up.
 *
 * Sample by sample over all tasks, so that an interrupted run has something of each; answers are
 * cli_eval_run.c's. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli_eval.h"

#define DEFAULT_SEED 42u
#define PATH_BYTES   4096

typedef struct job {
    const kvd_opts      *o;
    kvd_model           *m;
    kvd_session         *s;
    eval_data            data;
    kvd_session_params   params; /* as the command line has them */
    kvd_attention_params base;
    cli_plan_use         plan; /* of --plan */
    eval_configs         configs;
    const eval_task     *task[EVAL_MAX_TASK];
    uint32_t             n_task, n_sample, length;
    uint64_t             seed;
    bool                 raw;
    FILE                *csv;
    eval_table           table;
    eval_runner          runner;
} job;

/* ---- prompts --------------------------------------------------------------------- */

/* The template's text around the user's message, then the answer's beginning. */
static kvd_status encode(job *j, const kvd_buf *user, const kvd_buf *prefix, cli_tokens *out,
                         kvd_err *err)
{
    kvd_chat_request r     = KVD_CHAT_REQUEST_INIT;
    kvd_buf          all   = { 0 };
    kvd_span        *spans = NULL;
    char            *text  = NULL, *json;
    size_t           len = 0, n_span = 0;
    kvd_status       st = KVD_OK;

    if (j->raw) {
        kvd_buf_put(&all, user->data, user->len);
    } else {
        json_t *list = json_pack("[{s:s, s:s%}]", "role", "user", "content", user->data, user->len);

        json = list ? json_dumps(list, JSON_COMPACT) : NULL;
        json_decref(list);
        r.messages_json = json;
        r.vars_json     = kvd_opts_text(j->o, "template-vars");
        if (json)
            st = kvd_chat_render(j->m, &r, &text, &len, &spans, &n_span, err);
        else
            st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the message, or it is no UTF-8");
        kvd_buf_put(&all, text ? text : "", len);
        free(json);
    }
    kvd_buf_put(&all, prefix->data, prefix->len);
    if (st == KVD_OK && all.oom)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the prompt");
    if (st == KVD_OK)
        st = cli_tokenize_text(j->m, all.data, all.len, spans, n_span, true, out, err);
    kvd_buf_free(&all);
    kvd_free(text);
    kvd_free(spans);
    return st;
}

static kvd_status count_tokens(void *ctx, const kvd_buf *user, const kvd_buf *prefix, uint64_t *n,
                               kvd_err *err)
{
    cli_tokens t  = { 0 };
    kvd_status st = encode(ctx, user, prefix, &t, err);

    *n = t.n;
    kvd_free(t.data);
    return st;
}

static kvd_status make_sample(job *j, uint32_t task, uint32_t index, eval_sample *s, kvd_err *err)
{
    return eval_sample_make(s, &j->data, j->task[task], j->seed, index, j->length, count_tokens, j,
                            err);
}

static kvd_status print_samples(job *j, kvd_err *err)
{
    for (uint32_t k = 0; k < j->n_task; k++) {
        for (uint32_t i = 0; i < j->n_sample; i++) {
            eval_sample s  = { 0 };
            kvd_status  st = make_sample(j, k, i, &s, err);

            if (st == KVD_OK)
                st = eval_sample_print(&s, stdout, err);
            eval_sample_free(&s);
            KVD_TRY(st);
        }
    }
    return KVD_OK;
}

/* ---- the run --------------------------------------------------------------------- */

static kvd_status run_one(job *j, uint32_t task, uint32_t index, kvd_err *err)
{
    eval_sample s  = { 0 };
    cli_tokens  t  = { 0 };
    kvd_status  st = make_sample(j, task, index, &s, err);

    if (st == KVD_OK)
        st = encode(j, &s.user, &s.prefix, &t, err);
    if (st == KVD_OK)
        st = eval_run_sample(&j->runner, task, &s, &t, err);
    kvd_free(t.data);
    eval_sample_free(&s);
    return st;
}

static kvd_status run_all(job *j, kvd_err *err)
{
    cli_progress bar;
    kvd_status   st = KVD_OK;
    uint64_t     n  = 0;

    cli_progress_start(&bar, "eval");
    for (uint32_t i = 0; i < j->n_sample && st == KVD_OK; i++) {
        for (uint32_t k = 0; k < j->n_task && st == KVD_OK; k++) {
            st = run_one(j, k, i, err);
            if (st == KVD_OK && !cli_progress_step(&bar, ++n, (uint64_t)j->n_sample * j->n_task))
                st = kvd_fail(err, KVD_E_CANCELED, 0, "stopped after %" PRIu64 " prompts", n);
        }
    }
    cli_progress_end(&bar);
    return st;
}

/* ---- setting up ------------------------------------------------------------------ */

/* --data, or beside the program as installed, or in the tree it was built from. */
static kvd_status open_data(job *j, kvd_err *err)
{
    const char *given = kvd_opts_text(j->o, "data");
    char        dir[PATH_BYTES];
    ssize_t     n = readlink("/proc/self/exe", dir, sizeof(dir) - 64);
    char       *slash;

    if (given)
        return eval_data_open(&j->data, given, err);
    dir[n > 0 ? n : 0] = 0;
    slash              = strrchr(dir, '/');
    if (slash) {
        snprintf(slash, 64, "/../share/kvdrive/eval");
        if (access(dir, R_OK) == 0)
            return eval_data_open(&j->data, dir, err);
    }
    if (access(KVD_EVAL_DATA, R_OK) == 0)
        return eval_data_open(&j->data, KVD_EVAL_DATA, err);
    return kvd_fail(err, KVD_E_INVAL, 0, "no data at %s nor at " KVD_EVAL_DATA ": --data DIR", dir);
}

static kvd_status unknown_task(const job *j, const char *name, kvd_err *err)
{
    const char *list[EVAL_MAX_TASK];
    const char *near;

    if (strcmp(name, "qa_2") == 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "qa_2 asks HotpotQA, which is not in the data");
    for (uint32_t i = 0; i < j->data.n_task; i++)
        list[i] = j->data.task[i].name;
    near = kvd_nearest(name, list, j->data.n_task);
    return kvd_fail(err, KVD_E_INVAL, 0, "--tasks: unknown task '%.40s'%s%s", name,
                    near ? "; did you mean " : "; --tasks all runs each of them", near ? near : "");
}

/* "niah_single_1,vt", or "all" */
static kvd_status choose_tasks(job *j, kvd_err *err)
{
    const char *list = kvd_opts_text(j->o, "tasks");
    char        name[64];

    for (uint32_t i = 0; strcmp(list, "all") == 0 && i < j->data.n_task; i++)
        j->task[j->n_task++] = &j->data.task[i];
    for (const char *s = list; j->n_task < EVAL_MAX_TASK && strcmp(list, "all") != 0 && *s;) {
        const size_t     n = strcspn(s, ",");
        const eval_task *t;

        snprintf(name, sizeof(name), "%.*s", (int)kvd_min_u64(n, sizeof(name) - 1), s);
        t = eval_task_find(&j->data, name);
        if (!t)
            return unknown_task(j, name, err);
        for (uint32_t i = 0; i < j->n_task; i++) {
            if (j->task[i] == t)
                return kvd_fail(err, KVD_E_INVAL, 0, "--tasks: %s twice", name);
        }
        j->task[j->n_task++] = t;
        s += n + (s[n] != 0);
    }
    return j->n_task ? KVD_OK : kvd_fail(err, KVD_E_INVAL, 0, "--tasks: none given");
}

static kvd_status open_model(job *j, kvd_err *err)
{
    kvd_model_info info = { .struct_size = sizeof(info) };

    KVD_TRY(cli_model_open(&j->m, j->o, err));
    kvd_model_get_info(j->m, &info);
    j->raw = kvd_opts_flag(j->o, "raw");
    if (!j->raw && !info.chat_template)
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "the model has no chat template: use --raw, or give one with --chat-template");
    return KVD_OK;
}

static kvd_status open_session(job *j, kvd_err *err)
{
    kvd_session_params   p = j->params;
    kvd_attention_params widest;

    if (p.n_ctx < j->length)
        return kvd_fail(err, KVD_E_INVAL, 0, "--length %u is more than the context -c %u",
                        j->length, p.n_ctx);
    KVD_TRY(eval_configs_widest(&j->configs, j->m, p, &widest, err));
    p.attention = &widest;
    return cli_session_or_uncached(&j->s, NULL, j->m, &p, j->o, err);
}

static kvd_status open_csv(job *j, kvd_err *err)
{
    const char *path = kvd_opts_text(j->o, "csv");

    if (!path)
        return KVD_OK;
    j->csv = fopen(path, "wb");
    return j->csv ? KVD_OK : kvd_fail(err, KVD_E_IO, errno, "%s", path);
}

static kvd_status open_runner(job *j, kvd_err *err)
{
    const size_t n_score = (size_t)j->configs.n * j->n_task * j->n_sample;
    uint32_t     max_new = 0;

    for (uint32_t k = 0; k < j->n_task; k++)
        max_new = j->task[k]->max_new > max_new ? j->task[k]->max_new : max_new;
    j->table = (eval_table){ .configs  = &j->configs,
                             .task     = j->task,
                             .n_task   = j->n_task,
                             .n_sample = j->n_sample,
                             .score    = kvd_calloc(n_score, sizeof(float)),
                             .counts   = kvd_calloc(j->configs.n, sizeof(eval_counts)) };
    if (!j->table.score || !j->table.counts)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %zu scores", n_score);
    for (size_t i = 0; i < n_score; i++)
        j->table.score[i] = -1.0f;
    j->runner = (eval_runner){ .m       = j->m,
                               .s       = j->s,
                               .configs = &j->configs,
                               .table   = &j->table,
                               .csv     = j->csv,
                               .kl      = kvd_opts_flag(j->o, "kl") };
    return eval_runner_open(&j->runner, max_new, err);
}

static kvd_status run_job(job *j, kvd_err *err)
{
    const int64_t seed = kvd_opts_int(j->o, "seed");
    const bool    json = kvd_opts_flag(j->o, "json");
    kvd_status    st;
    kvd_err       late;

    j->length   = (uint32_t)kvd_opts_int(j->o, "length");
    j->n_sample = (uint32_t)kvd_opts_int(j->o, "samples");
    j->seed     = seed < 0 ? DEFAULT_SEED : (uint64_t)seed;
    KVD_TRY(cli_session_params(&j->params, &j->base, j->o, err));
    if (j->params.n_ctx == 0)
        j->params.n_ctx = j->length;
    KVD_TRY(open_data(j, err));
    KVD_TRY(choose_tasks(j, err));
    KVD_TRY(open_model(j, err));
    KVD_TRY(cli_plan_apply(&j->plan, &j->base, &j->params, j->m, j->o, err));
    KVD_TRY(eval_configs_open(&j->configs, &j->base, j->o, err));
    if (kvd_opts_flag(j->o, "generate-only"))
        return print_samples(j, err);
    KVD_TRY(open_session(j, err));
    KVD_TRY(open_csv(j, err));
    KVD_TRY(open_runner(j, err));
    cli_interrupt_watch(j->s);
    st = run_all(j, err);
    cli_interrupt_watch(NULL);
    if (st == KVD_OK)
        return eval_table_print(&j->table, j->seed, json, stdout, err);
    if (st == KVD_E_CANCELED && eval_table_print(&j->table, j->seed, json, stdout, &late) != KVD_OK)
        fprintf(stderr, "kvdrive: %s\n", late.msg);
    return st;
}

int cli_eval(const kvd_opts *o)
{
    job        j   = { .o = o };
    kvd_err    err = { 0 };
    kvd_status st;

    if (o->n_rest < 1 || strcmp(o->rest[0], "ruler") != 0)
        return cli_usage("eval: what? kvdrive eval ruler -m FILE");
    st = run_job(&j, &err);
    if (j.csv && fclose(j.csv) != 0 && st == KVD_OK)
        st = kvd_fail(&err, KVD_E_IO, errno, "writing %s", kvd_opts_text(o, "csv"));
    eval_runner_close(&j.runner);
    kvd_session_close(j.s);
    kvd_model_close(j.m);
    eval_data_close(&j.data);
    eval_configs_close(&j.configs);
    cli_plan_release(&j.plan);
    kvd_free(j.table.score);
    kvd_free(j.table.counts);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
