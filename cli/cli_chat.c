/* SPDX-License-Identifier: Apache-2.0 */
/* cli_chat.c - kvdrive chat: turns, history, commands.
 *
 * Each turn renders the whole conversation anew and evaluates only what differs from the tokens
 * whose KV is held: as a rule the new message.  What the model itself said comes back with the same
 * ids as long as encoding its text gives them; where it does not, the difference is evaluated
 * again.
 *
 * Ctrl-C stops the answer, not the program; at the prompt it drops the message and says how to
 * leave.  What is typed during an answer does not show in it: it is there at the next prompt. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli_chat.h"
#include "cli_tty.h"

bool chat_last_is(const chat *c, const char *role)
{
    const size_t  n = json_array_size(c->messages);
    const json_t *m = n ? json_array_get(c->messages, n - 1) : NULL;

    return m && strcmp(json_string_value(json_object_get(m, "role")), role) == 0;
}

void chat_drop_last(chat *c, const char *role)
{
    if (chat_last_is(c, role))
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

bool chat_begin_anew(chat *c, const char *system)
{
    kvd_buf b  = { 0 };
    bool    ok = true;

    json_array_clear(c->messages);
    c->attached.len = 0;
    if (system)
        cli_put_text(c->o, system, &b);
    if (b.len > 0)
        ok = !b.oom && cli_add_message(c->messages, "system", b.data, b.len);
    kvd_buf_free(&b);
    return ok;
}

/* ---- one turn --------------------------------------------------------------------- */

/* Brings sequence 0 to these tokens; the last one is always evaluated, for its logits. */
static kvd_status sync_tokens(chat *c, const cli_tokens *t, kvd_err *err)
{
    uint32_t     same = 0;
    cli_progress bar;
    kvd_status   st;

    if (t->n >= c->plan.n_ctx)
        return kvd_fail(
            err, KVD_E_FULL, 0,
            "the conversation has %zu tokens, the context %u: /undo, /reset, or start with "
            "a larger -c",
            t->n, c->plan.n_ctx);
    while (same < c->n_held && same + 1 < t->n && c->held[same] == t->data[same])
        same++;
    KVD_TRY(kvd_seq_truncate(c->s, 0, same, err));
    c->n_held = same;
    cli_progress_start(&bar, "prefill");
    st = kvd_prefill(c->s, 0, t->data + same, t->n - same, cli_progress_step, &bar, err);
    cli_progress_end(&bar);
    if (st != KVD_OK)
        return st;
    for (size_t i = same; i < t->n; i++)
        kvd_sampler_accept(c->sm, t->data[i]);
    memcpy(c->held, t->data, t->n * sizeof(*t->data));
    c->n_held = (uint32_t)t->n;
    return KVD_OK;
}

static void tell(chat *c, kvd_buf *answer)
{
    kvd_buf_put(answer, c->told.data, c->told.len);
    if (c->told.len > 0)
        fwrite(c->told.data, 1, c->told.len, stdout);
    fflush(stdout);
}

/* true: a stop string has ended the answer. */
static bool say(chat *c, kvd_buf *answer, const char *text, size_t len)
{
    const bool stopped = cli_stops_feed(&c->stops, text, len, &c->told);

    tell(c, answer);
    return stopped;
}

static kvd_status speak(chat *c, kvd_buf *answer, kvd_err *err)
{
    const int64_t n_max   = kvd_opts_int(c->o, "predict");
    kvd_status    st      = KVD_OK;
    bool          stopped = false;
    const char   *text;
    size_t        len;

    for (int64_t n = 0; n_max < 0 || n < n_max; n++) {
        kvd_batch b = KVD_BATCH_INIT;
        int32_t   id;

        st = kvd_sampler_pick(c->sm, c->s, 0, &id, err);
        if (st != KVD_OK)
            break;
        if (kvd_token_is_end(c->m, id))
            break;
        text    = kvd_detok_feed(c->detok, id, false, &len);
        stopped = say(c, answer, text, len);
        if (stopped)
            break;
        if (c->n_held >= c->plan.n_ctx) {
            fprintf(stderr, "\n[the context of %u tokens is full]", c->plan.n_ctx);
            break;
        }
        b.n_token = 1;
        b.token   = &id;
        b.n_best  = kvd_sampler_n_best(c->sm);
        st        = kvd_eval(c->s, &b, err);
        if (st != KVD_OK)
            break;
        c->held[c->n_held++] = id;
    }
    text = kvd_detok_flush(c->detok, &len);
    if (!stopped && !say(c, answer, text, len)) {
        cli_stops_end(&c->stops, &c->told);
        tell(c, answer);
    }
    putchar('\n');
    return st;
}

bool chat_answer(chat *c)
{
    char      *json = json_dumps(c->messages, JSON_COMPACT);
    cli_tokens t    = { 0 };
    kvd_buf    text = { 0 };
    kvd_err    err  = { 0 };
    kvd_status st =
        json ? cli_tokenize_chat(c->m, json, kvd_opts_text(c->o, "template-vars"), &t, &err)
             : kvd_fail(&err, KVD_E_INVAL, 0, "the message is not valid UTF-8");

    cli_interrupted(true);
    cli_interrupt_watch(c->s);
    if (c->tty)
        line_typing_begin(&c->line);
    if (st == KVD_OK)
        st = sync_tokens(c, &t, &err);
    if (st == KVD_OK)
        st = speak(c, &text, &err);
    if (c->tty)
        line_typing_end(&c->line, cli_interrupted(false));
    cli_interrupt_watch(NULL);
    kvd_session_uncancel(c->s); /* a Ctrl-C behind the last evaluation is not for the next answer */
    if (text.oom)
        st = kvd_fail(&err, KVD_E_NOMEM, 0, "no memory to keep the answer");
    if ((st == KVD_OK || (st == KVD_E_CANCELED && text.len)) &&
        !cli_add_message(c->messages, "assistant", text.data, text.len))
        st = kvd_fail(&err, KVD_E_NOMEM, 0, "no memory to keep the answer");
    if (st != KVD_OK && !(st == KVD_E_CANCELED && text.len)) {
        if (st != KVD_E_CANCELED)
            (void)cli_fail(&err);
        chat_drop_last(c, "user"); /* it was not answered: as if not asked */
    }
    free(json);
    kvd_free(t.data);
    kvd_buf_free(&text);
    return st != KVD_E_DEVICE;
}

/* Adds the user's message, behind what was read for it, and answers; false when the program should
 * end. */
static bool ask(chat *c, const char *text, size_t len)
{
    kvd_err    err = { 0 };
    kvd_status st  = cli_check_utf8("message", text, len, &err);

    if (st == KVD_OK && c->attached.len > 0) {
        kvd_buf_puts(&c->attached, "\n\n");
        kvd_buf_put(&c->attached, text, len);
        text = c->attached.data;
        len  = c->attached.len;
    }
    if (st == KVD_OK && (c->attached.oom || !cli_add_message(c->messages, "user", text, len)))
        st = kvd_fail(&err, KVD_E_NOMEM, 0, "no memory for the message");
    kvd_buf_free(&c->attached);
    if (st == KVD_OK)
        return chat_answer(c);
    (void)cli_fail(&err);
    return true;
}

/* ---- input ------------------------------------------------------------------------ */

#define QUOTE "\"\"\""

static bool is_quoted(const kvd_buf *b)
{
    return b->len >= 3 && memcmp(b->data, QUOTE, 3) == 0;
}

/* Whether a message goes on in another line, which is then begun: within triple quotes, or after a
 * backslash, which the line's end replaces. */
static bool goes_on(kvd_buf *b)
{
    if (is_quoted(b)) {
        if (b->len >= 6 && memcmp(b->data + b->len - 3, QUOTE, 3) == 0)
            return false;
        kvd_buf_putc(b, '\n');
        return !b->oom;
    }
    if (b->len == 0 || b->data[b->len - 1] != '\\')
        return false;
    b->data[b->len - 1] = '\n';
    return true;
}

/* The text between triple quotes, without the line ends next to them; else all of it. */
static void unquote(const char **text, size_t *len)
{
    const char *s = *text;
    size_t      n = *len;

    if (n < 6 || memcmp(s, QUOTE, 3) != 0 || memcmp(s + n - 3, QUOTE, 3) != 0)
        return;
    s += 3;
    n -= 6;
    if (n > 0 && s[0] == '\n') {
        s++;
        n--;
    }
    n -= n > 0 && s[n - 1] == '\n';
    *text = s;
    *len  = n;
}

/* A message of an input that is not edited; false at the end. */
static bool read_lines(kvd_buf *b)
{
    const bool shown = cli_is_tty(stdin) && cli_is_tty(stdout);
    char      *line  = NULL;
    size_t     cap   = 0;
    ssize_t    n;
    bool       more = true;

    b->len = 0;
    while (more) {
        if (shown)
            fputs(b->len > 0 ? ". " : "> ", stdout);
        fflush(stdout);
        n = getline(&line, &cap, stdin);
        if (n < 0)
            break;
        kvd_buf_put(b, line, (size_t)(n > 0 && line[n - 1] == '\n' ? n - 1 : n));
        more = goes_on(b);
    }
    free(line);
    return !more || b->len > 0;
}

/* The next message, whole; false at the end of input. */
static bool read_message(chat *c)
{
    line_end end = LINE_DROPPED;

    if (!c->tty)
        return read_lines(&c->line.text);
    while (end == LINE_DROPPED) {
        end = line_edit(&c->line, goes_on);
        if (end == LINE_DROPPED)
            puts("(Ctrl-D or /quit leaves)");
    }
    return end == LINE_DONE;
}

/* Follows one message; false when the program should end. */
static bool follow(chat *c)
{
    const char *text = c->line.text.data;
    size_t      len  = c->line.text.len;

    if (c->line.text.oom) {
        fputs("kvdrive: no memory for the message\n", stderr);
        return false;
    }
    if (len == 0)
        return true;
    if (c->tty)
        line_history_add(&c->line.history, text);
    if (text[0] == '/' && !memchr(text, '\n', len))
        return chat_command(c, text);
    unquote(&text, &len);
    return ask(c, text, len) && !kvd_opts_flag(c->o, "single-turn");
}

static void talk(chat *c)
{
    const char *first = kvd_opts_text(c->o, "prompt");
    kvd_buf     b     = { 0 };
    bool        go_on = true;

    if (first) {
        cli_put_text(c->o, first, &b);
        go_on = ask(c, b.data, b.len) && !kvd_opts_flag(c->o, "single-turn");
        kvd_buf_free(&b);
    }
    while (go_on && read_message(c))
        go_on = follow(c);
}

/* ---- start and end ---------------------------------------------------------------- */

static kvd_status open_chat(chat *c, kvd_err *err)
{
    kvd_model_info       info = { .struct_size = sizeof(info) };
    kvd_session_params   p;
    kvd_attention_params a;
    char                 dir[sizeof(c->line.history.path) - 32];
    char                 path[sizeof(c->line.history.path)];

    KVD_TRY(cli_model_open(&c->m, c->o, err));
    kvd_model_get_info(c->m, &info);
    if (!info.chat_template)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "the model has no chat template: give one with --chat-template FILE");
    KVD_TRY(cli_session_params(&p, &a, c->o, err));
    KVD_TRY(cli_session_open(&c->s, &c->plan, c->m, &p, &a, c->o, err));
    KVD_TRY(cli_sampler_open(&c->sm, c->m, c->o, err));
    KVD_TRY(kvd_detok_open(&c->detok, c->m, err));
    c->messages = json_array();
    c->held     = kvd_calloc(c->plan.n_ctx, sizeof(*c->held));
    if (!c->messages || !c->held)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the conversation");
    KVD_TRY(cli_stops_open(&c->stops, c->o, err));
    if (!chat_begin_anew(c, kvd_opts_text(c->o, "system")))
        return kvd_fail(err, KVD_E_INVAL, 0, "--system is not valid UTF-8");
    c->tty = cli_tty_open();
    if (c->tty && kvd_user_dir("XDG_STATE_HOME", ".local/state", dir, sizeof(dir))) {
        snprintf(path, sizeof(path), "%s/kvdrive_history", dir);
        line_history_open(&c->line.history, path);
    }
    if (c->tty)
        printf("%s on %s %s, context %u tokens; /help lists commands\n",
               info.name[0] ? info.name : info.arch, info.backend, info.isa, c->plan.n_ctx);
    return KVD_OK;
}

int cli_chat(const kvd_opts *o)
{
    chat       c   = { .o = o, .plan = { .struct_size = sizeof(kvd_plan) } };
    kvd_err    err = { 0 };
    kvd_status st;

    st = open_chat(&c, &err);
    if (st == KVD_OK)
        talk(&c);
    cli_tty_close();
    if (st == KVD_OK && kvd_opts_flag(o, "stats")) {
        (void)!kvd_session_flush(c.s, &err); /* for the counts; what failed was warned of */
        cli_print_stats(c.s, &c.plan, 0.0, stderr);
    }
    json_decref(c.messages);
    cli_stops_close(&c.stops);
    kvd_buf_free(&c.told);
    kvd_buf_free(&c.attached);
    line_close(&c.line);
    kvd_free(c.held);
    kvd_detok_close(c.detok);
    kvd_sampler_close(c.sm);
    kvd_session_close(c.s);
    kvd_model_close(c.m);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
