/* SPDX-License-Identifier: Apache-2.0 */
/* cli_main.c - picks the command, reads its options, runs it. */
#include <string.h>

#include "cli.h"

#define WORTH_LEAVING_OUT 12u /* options: with fewer more, help shows all */

typedef struct command {
    const char *name;
    uint32_t    bit;
    int         n_arg; /* most arguments that are no options */
    int (*run)(const kvd_opts *o);
    const char *usage, *help;
} command;

static const command commands[] = {
    { "run", CMD_RUN, 1, cli_run, "-m FILE [-p TEXT] [FILE | -]",
      "answer one prompt, or continue a text (--raw)" },
    { "chat", CMD_CHAT, 0, cli_chat, "-m FILE", "talk, with history; /help inside" },
    { "serve", CMD_SERVE, 0, cli_serve, "-m FILE [--port N] [--parallel N] [--cache-dir DIR]",
      "answer many clients over HTTP, in OpenAI's shape" },
    { "bench", CMD_BENCH, 0, cli_bench, "-m FILE [-p N,...] [-n N,...] [-d N,...]",
      "measure prefill and decode speed, also at depth" },
    { "perplexity", CMD_PERPLEXITY, 1, cli_perplexity, "-m FILE TEXTFILE",
      "how well the model predicts a text" },
    { "eval", CMD_EVAL, 1, cli_eval, "ruler -m FILE [--length N] [--tasks NAME,...] [--samples N]",
      "score answers to long prompts, under one configuration or several" },
    { "profile", CMD_PROFILE, 16, cli_profile, "-m FILE [-o PLAN] [--length N] TEXTFILE...",
      "what steps select of long texts, and the windows that follow" },
    { "tokenize", CMD_TOKENIZE, 1, cli_tokenize, "-m FILE [-p TEXT | FILE | -]",
      "show the tokens of a text" },
    { "inspect", CMD_INSPECT, 1, cli_inspect, "FILE", "what a model file holds, and what fits" },
    { "cache", CMD_CACHE, 1, cli_cache, "stats|ls|verify|clear|gc --cache-dir DIR",
      "look into a cache directory, check it, remove from it" },
    { "plan", CMD_PLAN, 0, cli_plan, "-m FILE [-c N] [--parallel N]",
      "the memory a context needs, before it is taken" },
    { "doctor", CMD_DOCTOR, 0, cli_doctor, "", "what this machine offers" },
};

static void print_overview(FILE *f)
{
    fprintf(
        f,
        "kvdrive %s - LLM inference with a tiered KV cache\n\nusage: kvdrive COMMAND [OPTIONS]\n\n",
        kvd_version());
    for (size_t i = 0; i < KVD_COUNTOF(commands); i++)
        fprintf(f, "  %-11s %s\n", commands[i].name, commands[i].help);
    fprintf(f, "\nkvdrive COMMAND --help lists the options of a command.\n");
}

static int unknown_command(const char *word)
{
    const char *name[KVD_COUNTOF(commands)];
    const char *near;

    for (size_t i = 0; i < KVD_COUNTOF(commands); i++)
        name[i] = commands[i].name;
    near = kvd_nearest(word, name, KVD_COUNTOF(commands));
    if (near)
        return cli_usage("unknown command '%s'; did you mean '%s'?", word, near);
    if (word[0] == '-')
        return cli_usage("the command comes before its options, as in kvdrive run %s", word);
    return cli_usage("unknown command '%s'; kvdrive --help lists them", word);
}

static int print_text(kvd_buf *b)
{
    if (!b->oom)
        fwrite(b->data ? b->data : "", 1, b->len, stdout);
    kvd_buf_free(b);
    return EXIT_OK;
}

static void log_line(void *ctx, kvd_log_level level, const char *msg)
{
    const bool *verbose = ctx;
    char        text[CLI_NAMES_BYTES];

    if (level >= KVD_LOG_WARN || *verbose)
        fprintf(stderr, "kvdrive: %s\n", cli_name_options(msg, text));
}

/* Commands with many options show those that people use first. */
static void put_help(const command *c, bool all, kvd_buf *text)
{
    kvd_buf        first = { 0 };
    const uint32_t left_out =
        kvd_opts_help(cli_options, cli_n_option, c->bit, cli_first_options, &first);

    kvd_buf_printf(text, "usage: kvdrive %s%s%s\n\n%s\n\n", c->name, *c->usage ? " " : "", c->usage,
                   c->help);
    if (all || left_out < WORTH_LEAVING_OUT) {
        kvd_opts_help(cli_options, cli_n_option, c->bit, NULL, text);
    } else {
        kvd_buf_put(text, first.data, first.len);
        kvd_buf_printf(text, "\nkvdrive %s --help-all lists the other %u options, too.\n", c->name,
                       left_out);
    }
    kvd_buf_free(&first);
}

/* What was given of another program's options, and what there is instead. */
static void tell_foreign(const kvd_opts *o)
{
    for (uint32_t i = 0; i < o->n; i++)
        if ((o->table[i].kind == KVD_OPT_FOREIGN || o->table[i].kind == KVD_OPT_REFUSED) &&
            o->value[i].origin == KVD_OPT_ARGV)
            fprintf(stderr, "kvdrive: %s is another program's and changes nothing here: %s\n",
                    o->value[i].text, o->table[i].help);
}

/* --policy list, of commands that have the option. */
static bool asks_for_policies(const command *c, const kvd_opts *o)
{
    const uint32_t without = CMD_TOKENIZE | CMD_INSPECT | CMD_CACHE | CMD_DOCTOR;

    return !(c->bit & without) && strcmp(kvd_opts_text(o, "policy"), "list") == 0;
}

static int print_policies(void)
{
    kvd_err err  = { 0 };
    char   *text = NULL;

    if (kvd_policy_list(&text, &err) != KVD_OK)
        return cli_fail(&err);
    fputs(text, stdout);
    kvd_free(text);
    return EXIT_OK;
}

static int run_command(const command *c, int argc, const char *const *argv)
{
    kvd_err  err = { 0 };
    kvd_opts o;
    kvd_buf  text = { 0 };
    bool     verbose;
    int      code;

    cli_names_begin(c->bit);
    if (kvd_opts_open(&o, cli_options, cli_n_option, c->bit, argc, argv, &err) != KVD_OK) {
        fprintf(stderr, "kvdrive %s: %s\n", c->name, err.msg);
        code = EXIT_USAGE;
    } else if (kvd_opts_flag(&o, "help-all")) {
        put_help(c, true, &text);
        code = print_text(&text);
    } else if (kvd_opts_flag(&o, "help")) {
        put_help(c, false, &text);
        code = print_text(&text);
    } else if (asks_for_policies(c, &o)) {
        code = print_policies();
    } else if (kvd_opts_flag(&o, "print-config")) {
        kvd_opts_print(&o, &text);
        code = print_text(&text);
    } else if (o.n_rest > c->n_arg) {
        code = cli_usage("%s: unexpected argument '%s'%s", c->name, o.rest[c->n_arg],
                         c->bit & (CMD_RUN | CMD_TOKENIZE) ? "; a text goes in quotes behind -p"
                         : c->bit & (CMD_CHAT | CMD_BENCH | CMD_PLAN | CMD_SERVE)
                             ? "; a model file goes behind -m"
                             : "");
    } else {
        tell_foreign(&o);
        verbose = kvd_opts_flag(&o, "verbose");
        kvd_set_log(log_line, &verbose);
        code = c->run(&o);
        kvd_set_log(NULL, NULL);
    }
    kvd_opts_close(&o);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "kvdrive: writing to standard output failed\n");
        code = code ? code : EXIT_FAILED;
    }
    return code;
}

static int dispatch(const char *name, int argc, const char *const *argv)
{
    for (size_t i = 0; i < KVD_COUNTOF(commands); i++)
        if (strcmp(name, commands[i].name) == 0)
            return run_command(&commands[i], argc, argv);
    return unknown_command(name);
}

int main(int argc, char **argv)
{
    static const char *const help = "--help";

    if (argc < 2) {
        print_overview(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 && argc > 2)
        return dispatch(argv[2], 1, &help);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_overview(stdout);
        return EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("kvdrive %s\n", kvd_version());
        return EXIT_OK;
    }
    return dispatch(argv[1], argc - 2, (const char *const *)argv + 2);
}
