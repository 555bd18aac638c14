/* SPDX-License-Identifier: Apache-2.0 */
/* cli_run.c - kvdrive run: one prompt, one answer. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define SCHEMA_MAX_BYTES (1u << 20)
#define ANSWER_ROOM      1024u /* context left for the answer when neither -n nor -c says */

typedef struct job {
    const kvd_opts *o;
    kvd_model      *m;
    kvd_session    *s;
    kvd_sampler    *sm;
    kvd_grammar    *grammar; /* NULL: none */
    kvd_detok      *detok;
    kvd_plan        plan;
    cli_tokens      prompt;
    cli_stops       stops;
    kvd_buf         told; /* what emit() lets through */
    kvd_buf         answer;
    kvd_buf         ids; /* generated ids, int32 */
    const char     *finish;
    bool            cut; /* by the end of the context, not by -n */
    double          load_s;
} job;

/* The prompt's text: the file, then -p; a positional "-" is standard input. */
static kvd_status prompt_text(const kvd_opts *o, kvd_buf *b, kvd_err *err)
{
    const char *file = cli_input_file(o, "file"), *p = kvd_opts_text(o, "prompt");

    if (!file && !p)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "no prompt: give -p TEXT, -f FILE or - for standard input");
    if (file)
        KVD_TRY(cli_read_input(o, file, b, err));
    if (file && p)
        kvd_buf_puts(b, "\n\n");
    if (p)
        cli_put_text(o, p, b);
    if (b->oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the prompt");
    return b->len ? KVD_OK : kvd_fail(err, KVD_E_INVAL, 0, "the prompt is empty");
}

static kvd_status tokenize_messages(job *j, const kvd_buf *text, kvd_err *err)
{
    const char *given  = kvd_opts_text(j->o, "system");
    json_t     *list   = json_array();
    kvd_buf     system = { 0 };
    char       *json   = NULL;
    kvd_status  st;

    if (given)
        cli_put_text(j->o, given, &system);
    st = cli_check_utf8("system text", system.data, system.len, err);
    if (st == KVD_OK)
        st = cli_check_utf8("prompt", text->data, text->len, err);
    if (st == KVD_OK && !system.oom &&
        (!given || cli_add_message(list, "system", system.data, system.len)) &&
        cli_add_message(list, "user", text->data, text->len))
        json = json_dumps(list, JSON_COMPACT);
    if (st == KVD_OK && !json)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the chat message");
    if (st == KVD_OK)
        st = cli_tokenize_chat(j->m, json, kvd_opts_text(j->o, "template-vars"), &j->prompt, err);
    free(json);
    kvd_buf_free(&system);
    json_decref(list);
    return st;
}

static kvd_status make_prompt(job *j, kvd_err *err)
{
    const char    *ids  = kvd_opts_text(j->o, "tokens");
    kvd_model_info info = { .struct_size = sizeof(info) };
    kvd_buf        text = { 0 };
    kvd_span       all  = { 0 };
    kvd_status     st;

    if (ids && (cli_input_file(j->o, "file") || kvd_opts_text(j->o, "prompt")))
        return kvd_fail(err, KVD_E_INVAL, 0, "give either --tokens or a text, not both");
    if (ids)
        return cli_read_ids(ids, &j->prompt, err);
    st = prompt_text(j->o, &text, err);
    kvd_model_get_info(j->m, &info);
    if (st == KVD_OK && !kvd_opts_flag(j->o, "raw") && !info.chat_template)
        st =
            kvd_fail(err, KVD_E_INVAL, 0,
                     "the model has no chat template: use --raw, or give one with --chat-template");
    if (st == KVD_OK && kvd_opts_flag(j->o, "raw")) {
        all.end = text.len;
        st      = cli_tokenize_text(j->m, text.data, text.len, &all, kvd_opts_flag(j->o, "special"),
                                    true, &j->prompt, err);
    } else if (st == KVD_OK) {
        st = tokenize_messages(j, &text, err);
    }
    kvd_buf_free(&text);
    if (st == KVD_OK && j->prompt.n == 0)
        st = kvd_fail(err, KVD_E_INVAL, 0, "the prompt is empty");
    return st;
}

/* --json-schema and --json-object: what the sampler may pick. */
static kvd_status open_grammar(job *j, kvd_err *err)
{
    const char        *schema = kvd_opts_text(j->o, "json-schema");
    kvd_grammar_params p      = KVD_GRAMMAR_PARAMS_INIT;
    kvd_buf            file   = { 0 };
    kvd_status         st     = KVD_OK;

    p.json_object = kvd_opts_flag(j->o, "json-object");
    if (!schema && !p.json_object)
        return KVD_OK;
    if (kvd_opts_flag(j->o, "ignore-eos"))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--ignore-eos does not go with --json-schema or --json-object");
    p.schema_json = schema;
    if (schema && schema[strspn(schema, " \t\r\n")] != '{') {
        st            = cli_read_file(schema, SCHEMA_MAX_BYTES, &file, err);
        p.schema_json = file.data;
    }
    if (st == KVD_OK)
        st = kvd_grammar_open(&j->grammar, j->m, &p, err);
    kvd_buf_free(&file);
    return st == KVD_OK ? kvd_sampler_set_grammar(j->sm, j->grammar, err) : st;
}

static kvd_status open_session(job *j, kvd_err *err)
{
    kvd_model_info       info = { .struct_size = sizeof(info) };
    const int64_t        n    = kvd_opts_int(j->o, "predict");
    const uint64_t       room = n < 0 ? ANSWER_ROOM : n > 0 ? (uint64_t)n : 1;
    const uint64_t       want = j->prompt.n + room;
    kvd_session_params   p;
    kvd_attention_params a;

    kvd_model_get_info(j->m, &info);
    KVD_TRY(cli_session_params(&p, &a, j->o, err));
    if (p.n_ctx == 0)
        p.n_ctx = (uint32_t)kvd_min_u64(kvd_align_up(want, 256), info.n_ctx_train);
    if (j->prompt.n >= p.n_ctx)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "the prompt has %zu tokens, the context %u: no room for an answer (%s)",
                        j->prompt.n, p.n_ctx,
                        p.n_ctx < info.n_ctx_train
                            ? "a larger -c is possible"
                            : "it is the model's; --rope-scaling yarn extends it");
    KVD_TRY(cli_session_open(&j->s, &j->plan, j->m, &p, &a, j->o, err));
    KVD_TRY(cli_sampler_open(&j->sm, j->m, j->o, err));
    KVD_TRY(cli_stops_open(&j->stops, j->o, err));
    KVD_TRY(open_grammar(j, err));
    return kvd_detok_open(&j->detok, j->m, err);
}

/* What --stop lets through goes out; true: a stop string has ended the answer. */
static bool emit(job *j, const char *text, size_t len, bool last)
{
    bool stopped = cli_stops_feed(&j->stops, text, len, &j->told);

    for (int part = 0; part < (last && !stopped ? 2 : 1); part++) {
        if (part == 1)
            cli_stops_end(&j->stops, &j->told);
        kvd_buf_put(&j->answer, j->told.data, j->told.len);
        if (!kvd_opts_flag(j->o, "json") && j->told.len > 0)
            fwrite(j->told.data, 1, j->told.len, stdout);
    }
    fflush(stdout);
    return stopped;
}

static kvd_status generate(job *j, kvd_err *err)
{
    const int64_t  n_max   = kvd_opts_int(j->o, "predict");
    const bool     special = kvd_opts_flag(j->o, "special"), on = kvd_opts_flag(j->o, "ignore-eos");
    const uint32_t n_ctx = j->plan.n_ctx;
    const char    *text;
    size_t         len;

    j->finish = "length";
    for (int64_t n = 0; n_max < 0 || n < n_max; n++) {
        kvd_batch b = KVD_BATCH_INIT;
        int32_t   id;

        KVD_TRY(kvd_sampler_pick(j->sm, j->s, 0, &id, err));
        if (kvd_token_is_end(j->m, id) && !on) {
            j->finish = "stop";
            break;
        }
        kvd_buf_put(&j->ids, &id, sizeof(id));
        text = kvd_detok_feed(j->detok, id, special, &len);
        if (emit(j, text, len, false)) {
            j->finish = "stop";
            return KVD_OK;
        }
        if (kvd_seq_len(j->s, 0) >= n_ctx || n + 1 == n_max)
            break;
        b.n_token = 1;
        b.token   = &id;
        b.n_best  = kvd_sampler_n_best(j->sm);
        KVD_TRY(kvd_eval(j->s, &b, err));
    }
    text = kvd_detok_flush(j->detok, &len);
    if (emit(j, text, len, true))
        j->finish = "stop";
    j->cut = strcmp(j->finish, "length") == 0 && kvd_seq_len(j->s, 0) >= n_ctx &&
             (int64_t)(j->ids.len / sizeof(int32_t)) != n_max;
    return KVD_OK;
}

static void print_json(const job *j)
{
    kvd_stats st  = { .struct_size = sizeof(st) };
    json_t   *ids = json_array();
    json_t   *root;

    kvd_session_get_stats(j->s, &st);
    for (size_t i = 0; i < j->ids.len / sizeof(int32_t); i++) {
        int32_t id;

        memcpy(&id, j->ids.data + i * sizeof(id), sizeof(id));
        json_array_append_new(ids, json_integer(id));
    }
    root = json_pack("{s:s%, s:o, s:s, s:I, s:{s:f, s:I, s:f, s:I, s:f}, s:o}", "text",
                     j->answer.data ? j->answer.data : "", j->answer.len, "tokens", ids,
                     "finish_reason", j->finish, "prompt_tokens", (json_int_t)j->prompt.n,
                     "timings", "load_seconds", j->load_s, "prefill_tokens",
                     (json_int_t)st.n_prefill, "prefill_seconds", (double)st.prefill_ns * 1e-9,
                     "decode_tokens", (json_int_t)st.n_decode, "decode_seconds",
                     (double)st.decode_ns * 1e-9, "stats", cli_stats_json(j->s, &j->plan));
    if (root) {
        json_dumpf(root, stdout, JSON_COMPACT);
        fputc('\n', stdout);
    }
    json_decref(root);
}

static kvd_status run_job(job *j, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    cli_progress   bar;
    kvd_status     st;

    KVD_TRY(cli_model_open(&j->m, j->o, err));
    KVD_TRY(make_prompt(j, err));
    KVD_TRY(open_session(j, err));
    j->load_s = (double)(kvd_now_ns() - t0) * 1e-9;
    for (size_t i = 0; i < j->prompt.n; i++)
        kvd_sampler_accept(j->sm, j->prompt.data[i]);
    cli_interrupt_watch(j->s);
    cli_progress_start(&bar, "prefill");
    st = kvd_prefill(j->s, 0, j->prompt.data, j->prompt.n, cli_progress_step, &bar, err);
    cli_progress_end(&bar);
    if (st == KVD_OK)
        st = generate(j, err);
    cli_interrupt_watch(NULL);
    return st;
}

int cli_run(const kvd_opts *o)
{
    job        j   = { .o = o, .plan = { .struct_size = sizeof(kvd_plan) } };
    kvd_err    err = { 0 }, ignored = { 0 };
    kvd_status st = run_job(&j, &err);

    if (j.s && (kvd_opts_flag(o, "json") || kvd_opts_flag(o, "stats")))
        (void)!kvd_session_flush(j.s, &ignored); /* for the counts; what failed was warned of */
    if (st == KVD_OK && kvd_opts_flag(o, "json"))
        print_json(&j);
    else if (j.answer.len && !kvd_opts_flag(o, "json"))
        fputc('\n', stdout);
    fflush(stdout);
    if (j.cut)
        fprintf(stderr, "kvdrive: the answer was cut: the context of %u tokens is full (-c)\n",
                j.plan.n_ctx);
    if (j.s && kvd_opts_flag(o, "stats"))
        cli_print_stats(j.s, &j.plan, j.load_s, stderr);
    kvd_detok_close(j.detok);
    kvd_sampler_close(j.sm);
    kvd_grammar_close(j.grammar);
    kvd_session_close(j.s);
    kvd_model_close(j.m);
    kvd_free(j.prompt.data);
    cli_stops_close(&j.stops);
    kvd_buf_free(&j.told);
    kvd_buf_free(&j.answer);
    kvd_buf_free(&j.ids);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
