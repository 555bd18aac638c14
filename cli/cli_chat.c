/* SPDX-License-Identifier: Apache-2.0 */
/* cli_chat.c - kvdrive chat: turns, history, commands.
 *
 * Each turn renders the whole conversation anew and evaluates only what differs from the tokens
 * whose KV is held: as a rule the new message.  What the model itself said comes back with the same
 * ids as long as encoding its text gives them; where it does not, the difference is evaluated
 * again.
 *
 * Ctrl-C stops the answer, not the program; at the prompt it drops the line and says how to
 * leave. */
#include <editline/readline.h>
#include <inttypes.h>
#include <jansson.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define HISTORY_LINES 1000
#define PATH_BYTES    600

typedef struct chat {
    const kvd_opts *o;
    kvd_model      *m;
    kvd_session    *s;
    kvd_sampler    *sm;
    kvd_detok      *detok;
    kvd_plan        plan;
    json_t         *messages;
    int32_t        *held; /* [n_ctx] tokens in sequence 0 */
    uint32_t        n_held;
    bool            tty;
    char            history[PATH_BYTES];
} chat;

static const char help_text[] =
    "  /help            this\n"
    "  /system [TEXT]   set the system message (or clear it) and begin anew\n"
    "  /reset           forget the conversation\n"
    "  /undo            take the last question and answer back\n"
    "  /retry           answer the last question again\n"
    "  /stats           tokens, rates, memory\n"
    "  /quit            leave (also Ctrl-D)\n"
    "A line that ends in \\ goes on in the next one.\n";

/* false: the text is not valid UTF-8 (or there is no memory). */
static bool add_message(chat *c, const char *role, const char *text, size_t len)
{
    json_t *m = json_pack("{s:s, s:s%}", "role", role, "content", text, len);

    return json_array_append_new(c->messages, m) == 0;
}

static const char not_utf8[] = "kvdrive: the message is not valid UTF-8\n";

static bool last_is(const chat *c, const char *role)
{
    const size_t  n = json_array_size(c->messages);
    const json_t *m = n ? json_array_get(c->messages, n - 1) : NULL;

    return m && strcmp(json_string_value(json_object_get(m, "role")), role) == 0;
}

static void drop_last(chat *c, const char *role)
{
    if (last_is(c, role))
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

static bool begin_anew(chat *c, const char *system)
{
    json_array_clear(c->messages);
    return !system || !*system || add_message(c, "system", system, strlen(system));
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

static void say(kvd_buf *answer, const char *text, size_t len)
{
    kvd_buf_put(answer, text, len);
    fwrite(text, 1, len, stdout);
    fflush(stdout);
}

static kvd_status speak(chat *c, kvd_buf *answer, kvd_err *err)
{
    const int64_t n_max = kvd_opts_int(c->o, "predict");
    kvd_status    st    = KVD_OK;
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
        text = kvd_detok_feed(c->detok, id, false, &len);
        say(answer, text, len);
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
    say(answer, text, len);
    putchar('\n');
    return st;
}

/* Answers the conversation as it stands; false when the program should end. */
static bool answer(chat *c)
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
    if (st == KVD_OK)
        st = sync_tokens(c, &t, &err);
    if (st == KVD_OK)
        st = speak(c, &text, &err);
    cli_interrupt_watch(NULL);
    kvd_session_uncancel(c->s); /* a Ctrl-C behind the last evaluation is not for the next answer */
    if (text.oom)
        st = kvd_fail(&err, KVD_E_NOMEM, 0, "no memory to keep the answer");
    if ((st == KVD_OK || (st == KVD_E_CANCELED && text.len)) &&
        !add_message(c, "assistant", text.data ? text.data : "", text.len))
        st = kvd_fail(&err, KVD_E_NOMEM, 0, "no memory to keep the answer");
    if (st != KVD_OK && !(st == KVD_E_CANCELED && text.len)) {
        if (st != KVD_E_CANCELED)
            (void)cli_fail(&err);
        drop_last(c, "user"); /* it was not answered: as if not asked */
    }
    free(json);
    kvd_free(t.data);
    kvd_buf_free(&text);
    return st != KVD_E_DEVICE;
}

/* ---- input ------------------------------------------------------------------------ */

static sigjmp_buf at_prompt;

static void on_prompt_interrupt(int sig)
{
    (void)sig;
    siglongjmp(at_prompt, 1);
}

/* libedit has no way to give a line up from a signal handler but to jump out of it; it sets the
 * terminal up anew in the next call. */
static char *edit_line(const char *prompt)
{
    struct sigaction sa;
    char            *line;

    memset(&sa, 0, sizeof(sa));
    sigemptyset(&sa.sa_mask);
    if (sigsetjmp(at_prompt, 1))
        puts("\n(Ctrl-D or /quit leaves)");
    sa.sa_handler = on_prompt_interrupt;
    sigaction(SIGINT, &sa, NULL);
    line          = readline(prompt);
    sa.sa_handler = SIG_DFL;
    sigaction(SIGINT, &sa, NULL);
    return line;
}

/* One line, allocated with malloc by libedit or getline; NULL at the end. */
static char *read_line(const chat *c, const char *prompt)
{
    char  *line = NULL;
    size_t cap  = 0;
    size_t n;

    if (c->tty)
        return edit_line(prompt);
    if (getline(&line, &cap, stdin) < 0) {
        free(line);
        return NULL;
    }
    n = strlen(line);
    if (n && line[n - 1] == '\n')
        line[n - 1] = 0;
    return line;
}

/* A message: lines joined while they end in a backslash.  false at the end of input. */
static bool read_message(const chat *c, kvd_buf *b)
{
    const char *prompt = "> ";

    for (;;) {
        char  *line = read_line(c, prompt);
        size_t n;
        bool   more;

        if (!line)
            return b->len > 0;
        n    = strlen(line);
        more = n > 0 && line[n - 1] == '\\';
        kvd_buf_put(b, line, more ? n - 1 : n);
        free(line);
        if (!more)
            return true;
        kvd_buf_putc(b, '\n');
        prompt = ". ";
    }
}

/* A line that begins with a slash; false when it asks to leave. */
static bool command(chat *c, const char *line)
{
    static const char *const names[] = { "/help",  "/system", "/reset", "/undo",
                                         "/retry", "/stats",  "/quit" };
    const char              *arg     = line + strcspn(line, " ");
    char                     word[32];

    snprintf(word, sizeof(word), "%.*s", (int)(arg - line), line);
    arg += strspn(arg, " ");
    if (strcmp(word, "/quit") == 0 || strcmp(word, "/exit") == 0)
        return false;
    if (strcmp(word, "/help") == 0) {
        fputs(help_text, stdout);
    } else if (strcmp(word, "/system") == 0) {
        if (!begin_anew(c, arg))
            fputs(not_utf8, stderr);
    } else if (strcmp(word, "/reset") == 0) {
        (void)begin_anew(c, kvd_opts_text(c->o, "system")); /* it was valid at the start */
    } else if (strcmp(word, "/undo") == 0) {
        drop_last(c, "assistant");
        drop_last(c, "user");
    } else if (strcmp(word, "/retry") == 0) {
        drop_last(c, "assistant");
        if (last_is(c, "user"))
            return answer(c);
        puts("nothing to answer yet");
    } else if (strcmp(word, "/stats") == 0) {
        cli_print_stats(c->s, &c->plan, 0.0, stdout);
    } else {
        const char *near = kvd_nearest(word, names, KVD_COUNTOF(names));

        printf("unknown command %s; %s%s\n", word, near ? "did you mean " : "/help lists them",
               near ? near : "");
    }
    return true;
}

static void talk(chat *c)
{
    bool go_on = true;

    while (go_on) {
        kvd_buf b = { 0 };

        if (!read_message(c, &b)) {
            kvd_buf_free(&b);
            break;
        }
        if (b.len && c->tty)
            add_history(b.data);
        if (b.len && b.data[0] == '/') {
            go_on = command(c, b.data);
        } else if (b.len) {
            if (add_message(c, "user", b.data, b.len))
                go_on = answer(c);
            else
                fputs(not_utf8, stderr);
        }
        kvd_buf_free(&b);
    }
}

/* ---- start and end ---------------------------------------------------------------- */

static kvd_status open_chat(chat *c, kvd_err *err)
{
    kvd_model_info       info = { .struct_size = sizeof(info) };
    kvd_session_params   p;
    kvd_attention_params a;
    char                 dir[PATH_BYTES - 32];

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
    c->tty = cli_is_tty(stdin) && cli_is_tty(stdout);
    if (c->tty && kvd_user_dir("XDG_STATE_HOME", ".local/state", dir, sizeof(dir))) {
        snprintf(c->history, sizeof(c->history), "%s/kvdrive_history", dir);
        using_history();
        stifle_history(HISTORY_LINES);
        read_history(c->history);
    }
    if (!begin_anew(c, kvd_opts_text(c->o, "system")))
        return kvd_fail(err, KVD_E_INVAL, 0, "--system is not valid UTF-8");
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
    if (c.history[0])
        write_history(c.history); /* a convenience: the directory may not exist */
    if (st == KVD_OK && kvd_opts_flag(o, "stats")) {
        (void)!kvd_session_flush(c.s, &err); /* for the counts; what failed was warned of */
        cli_print_stats(c.s, &c.plan, 0.0, stderr);
    }
    json_decref(c.messages);
    kvd_free(c.held);
    kvd_detok_close(c.detok);
    kvd_sampler_close(c.sm);
    kvd_session_close(c.s);
    kvd_model_close(c.m);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
