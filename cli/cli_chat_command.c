/* SPDX-License-Identifier: Apache-2.0 */
/* cli_chat_command.c - commands of kvdrive chat: messages that begin with a slash. */
#include <string.h>

#include "cli_chat.h"

#define READ_MAX_BYTES (64u << 20)

/* arg: what follows the command's name.  false when the program should end. */
typedef bool command_fn(chat *c, const char *arg);

static bool do_system(chat *c, const char *arg)
{
    if (!chat_begin_anew(c, arg))
        fputs("kvdrive: the message is not valid UTF-8\n", stderr);
    return true;
}

static bool do_reset(chat *c, const char *arg)
{
    (void)arg;
    (void)chat_begin_anew(c, kvd_opts_text(c->o, "system")); /* it was valid at the start */
    return true;
}

static bool do_undo(chat *c, const char *arg)
{
    (void)arg;
    chat_drop_last(c, "assistant");
    chat_drop_last(c, "user");
    return true;
}

static bool do_retry(chat *c, const char *arg)
{
    (void)arg;
    chat_drop_last(c, "assistant");
    if (chat_last_is(c, "user"))
        return chat_answer(c);
    puts("nothing to answer yet");
    return true;
}

static bool do_read(chat *c, const char *arg)
{
    char      *path = NULL;
    kvd_buf    b    = { 0 };
    kvd_err    err  = { 0 };
    char       n[32];
    kvd_status st = *arg ? kvd_expand_path(arg, &path, &err)
                         : kvd_fail(&err, KVD_E_INVAL, 0, "/read takes the name of a file");

    if (st == KVD_OK)
        st = cli_read_file(path, READ_MAX_BYTES, &b, &err);
    if (st == KVD_OK)
        st = cli_check_utf8("file", b.data, b.len, &err);
    if (st == KVD_OK && c->attached.len > 0)
        kvd_buf_puts(&c->attached, "\n\n");
    if (st == KVD_OK)
        kvd_buf_put(&c->attached, b.data, b.len);
    if (st == KVD_OK)
        printf("%s bytes, which go before your next message\n", cli_grouped(b.len, n));
    else
        (void)cli_fail(&err);
    kvd_buf_free(&b);
    kvd_free(path);
    return true;
}

static bool do_save(chat *c, const char *arg)
{
    kvd_model_info info     = { .struct_size = sizeof(info) };
    kvd_err        err      = { 0 };
    bool           replaced = false;

    kvd_model_get_info(c->m, &info);
    if (chat_save(c->messages, arg, info.name[0] ? info.name : info.arch, &replaced, &err) ==
        KVD_OK)
        printf("saved as %s%s\n", arg, replaced ? ", in place of what was there" : "");
    else
        (void)cli_fail(&err);
    return true;
}

static bool do_load(chat *c, const char *arg)
{
    json_t *messages;
    kvd_err err = { 0 };

    if (!*arg) {
        chat_list(stdout);
    } else if (chat_load(&messages, arg, &err) == KVD_OK) {
        json_decref(c->messages);
        c->messages     = messages;
        c->attached.len = 0;
        printf("%s has %zu messages\n", arg, json_array_size(messages));
    } else {
        (void)cli_fail(&err);
    }
    return true;
}

static bool do_stats(chat *c, const char *arg)
{
    (void)arg;
    cli_print_stats(c->s, &c->plan, 0.0, stdout);
    return true;
}

static bool do_quit(chat *c, const char *arg)
{
    (void)c;
    (void)arg;
    return false;
}

static command_fn do_help;

static const struct {
    const char *name, *arg, *help;
    command_fn *fn;
} commands[] = {
    { "/help", "", "this", do_help },
    { "/system", "[TEXT]", "set the system message (or clear it) and begin anew", do_system },
    { "/reset", "", "forget the conversation", do_reset },
    { "/undo", "", "take the last question and answer back", do_undo },
    { "/retry", "", "answer the last question again", do_retry },
    { "/read", "FILE", "put a file's text before the next message", do_read },
    { "/save", "NAME", "keep the conversation", do_save },
    { "/load", "[NAME]", "go on with a conversation that was kept, or list them", do_load },
    { "/stats", "", "tokens, rates, memory", do_stats },
    { "/quit", "", "leave (also Ctrl-D)", do_quit },
    { "/exit", "", "the same", do_quit },
};

static bool do_help(chat *c, const char *arg)
{
    (void)arg;
    for (size_t i = 0; i < KVD_COUNTOF(commands); i++)
        printf("  %-8s%-8s %s\n", commands[i].name, commands[i].arg, commands[i].help);
    puts("A line that ends in \\ goes on in the next one.  A message may also stand between \"\"\" "
         "and \"\"\".");
    if (c->tty)
        puts("Alt-Enter begins another line of a message.  A paste is one message.");
    return true;
}

bool chat_command(chat *c, const char *line)
{
    const size_t len = strcspn(line, " ");
    const char  *arg = line + len + strspn(line + len, " ");
    const char  *name[KVD_COUNTOF(commands)], *near;
    char         word[32];

    for (size_t i = 0; i < KVD_COUNTOF(commands); i++) {
        name[i] = commands[i].name;
        if (strlen(name[i]) == len && memcmp(name[i], line, len) == 0)
            return commands[i].fn(c, arg);
    }
    snprintf(word, sizeof(word), "%.*s", (int)(len < sizeof(word) ? len : sizeof(word)), line);
    near = kvd_nearest(word, name, KVD_COUNTOF(name));
    printf("unknown command %s; %s%s\n", word, near ? "did you mean " : "/help lists them",
           near ? near : "");
    return true;
}
