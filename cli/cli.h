/* SPDX-License-Identifier: Apache-2.0 */
/* cli.h - private to cli/: what the commands share.
 *
 * Results go to stdout, everything else (progress, notices, statistics, errors) to stderr. */
#ifndef KVD_CLI_H
#define KVD_CLI_H

#include <jansson.h>
#include <stdio.h>

#include "base/base.h"
#include "kvdrive.h"
#include "plan/plan.h"

enum { /* exit codes, documented in kvdrive(1) */
       EXIT_OK          = 0,
       EXIT_FAILED      = 1, /* the work failed */
       EXIT_USAGE       = 2, /* options or arguments are wrong */
       EXIT_MODEL       = 3, /* the model file cannot be used */
       EXIT_MEMORY      = 4, /* memory or context does not suffice */
       EXIT_INTERRUPTED = 130
};

enum { /* bits of kvd_opt.commands */
       CMD_RUN        = 1 << 0,
       CMD_CHAT       = 1 << 1,
       CMD_BENCH      = 1 << 2,
       CMD_PERPLEXITY = 1 << 3,
       CMD_TOKENIZE   = 1 << 4,
       CMD_INSPECT    = 1 << 5,
       CMD_PLAN       = 1 << 6,
       CMD_DOCTOR     = 1 << 7,
       CMD_EVAL       = 1 << 8,
       CMD_CACHE      = 1 << 9,
       CMD_PROFILE    = 1 << 10,
       CMD_SERVE      = 1 << 11
};

extern const kvd_opt  cli_options[];
extern const uint32_t cli_n_option;
/* Names of the options that --help shows; NULL ends them. */
extern const char *const cli_first_options[];

int cli_run(const kvd_opts *o);
int cli_chat(const kvd_opts *o);
int cli_bench(const kvd_opts *o);
int cli_perplexity(const kvd_opts *o);
int cli_tokenize(const kvd_opts *o);
int cli_inspect(const kvd_opts *o);
int cli_plan(const kvd_opts *o);
int cli_doctor(const kvd_opts *o);
int cli_eval(const kvd_opts *o);
int cli_profile(const kvd_opts *o);
int cli_cache(const kvd_opts *o);
int cli_serve(const kvd_opts *o);

/* ---- cli_names.c --------------------------------------------------------------------- */

#define CLI_NAMES_BYTES 1024
/* Which command's options messages name: its bit. */
void cli_names_begin(uint32_t bit);
/* A message of the library with options in place of fields.  Returns out. */
const char *cli_name_options(const char *msg, char *out);

/* ---- cli_bench.c, cli_bench_schedules.c ---------------------------------------------- */

#define CLI_LIST_MAX 32
typedef struct cli_list {
    uint32_t x[CLI_LIST_MAX];
    int      n;
} cli_list;
/* "128,512" of an option. */
kvd_status cli_parse_list(const kvd_opts *o, const char *name, cli_list *out, kvd_err *err);
kvd_status cli_bench_schedules(kvd_model *m, const kvd_opts *o, kvd_err *err);

/* ---- cli_common.c ------------------------------------------------------------------ */

/* Prints "kvdrive: message" and gives the exit code that belongs to it. */
int cli_fail(const kvd_err *err);
/* The same for a mistake in the command line. */
int cli_usage(const char *fmt, ...) KVD_PRINTF(1, 2);
/* Gives st back.  An error that begins with the option's path, or a directory above it, then begins
 * with who named it, and ends with what to do where that is not plain. */
kvd_status cli_of_option(kvd_status st, const kvd_opts *o, const char *option, kvd_err *err);

/* The argument that is no option, or else the option's value; NULL: neither. */
const char *cli_input_file(const kvd_opts *o, const char *option);
kvd_status  cli_model_open(kvd_model **out, const kvd_opts *o, kvd_err *err);
/* *a is what p->attention then points to. */
kvd_status cli_session_params(kvd_session_params *p, kvd_attention_params *a, const kvd_opts *o,
                              kvd_err *err);
/* Place of a word in "a|b|c"; -1: it is none of them. */
int cli_choice(const char *list, const char *word);
/* "512", or "6.25%" of the prompt; 0: by default.  False: it is neither. */
bool cli_parse_budget(const char *text, kvd_attention_params *a);
/* The kind of index of --index, or the default beside --kv-record. */
const char *cli_index_name(const kvd_opts *o);
/* All but the seed and biases.  Sequence breakers are the options'. */
void       cli_take_sampling(kvd_sampler_params *p, const kvd_opts *o);
kvd_status cli_sampler_open(kvd_sampler **out, const kvd_model *m, const kvd_opts *o, kvd_err *err);

/* Whole file (or "-": standard input) into b; at most max_bytes. */
kvd_status cli_read_file(const char *path, uint64_t max_bytes, kvd_buf *b, kvd_err *err);
/* The same for the file of an option, which errors name. */
kvd_status cli_read_option(const kvd_opts *o, const char *option, uint64_t max_bytes, kvd_buf *b,
                           kvd_err *err);
/* The same for the file that cli_input_file() gave. */
kvd_status cli_read_input(const kvd_opts *o, const char *path, kvd_buf *b, kvd_err *err);

typedef struct cli_tokens {
    int32_t *data;
    size_t   n;
} cli_tokens;
/* Reads token ids separated by white space; at least one. */
kvd_status cli_read_ids(const char *path, cli_tokens *out, kvd_err *err);
/* Encodes; specials only inside the spans. */
kvd_status cli_tokenize_text(const kvd_model *m, const char *text, size_t len,
                             const kvd_span *spans, size_t n_span, bool add_bos, cli_tokens *out,
                             kvd_err *err);
/* Renders messages (JSON array) with the model's template and encodes the result. */
kvd_status cli_tokenize_chat(const kvd_model *m, const char *messages_json, const char *vars_json,
                             cli_tokens *out, kvd_err *err);

/* "1,024" */
const char *cli_grouped(uint64_t n, char out[32]);
double      cli_mib(uint64_t bytes);

/* ---- cli_bench_shape.c, cli_bench_row.c ---------------------------------------------- */

/* bench --shape without -p: steps over made-up rows, stage by stage. */
kvd_status cli_bench_shape(const kvd_opts *o, kvd_err *err);

enum { /* columns that are numbers; names and forms are cli_bench_row.c's */
       BENCH_CONTEXT,
       BENCH_BATCH,
       BENCH_TOK_S,
       BENCH_MS,
       BENCH_MS_P10,
       BENCH_MS_P90,
       BENCH_N,
       BENCH_HITS,
       BENCH_STAGE_MS,                                    /* and 5 more, as kvd_stage */
       BENCH_STAGE_MB = BENCH_STAGE_MS + KVD_STAGE_COUNT, /* likewise */
       BENCH_SUM_MS   = BENCH_STAGE_MB + KVD_STAGE_COUNT,
       BENCH_OF_SUM,
       BENCH_OFF_MS,
       BENCH_EXPOSED,
       BENCH_PCIE,
       BENCH_HBM,
       BENCH_PCIE_RATE,
       BENCH_ROOF_MS,
       BENCH_ROOF,
       BENCH_DEVICE_MIB,
       BENCH_HOST_MIB,
       BENCH_FILL_S,
       BENCH_DISK_RECORDS,
       BENCH_DISK_MB,
       BENCH_DISK_WAIT,
       BENCH_N_NUMBER
};
/* One row of the table; NAN: does not apply. */
void cli_bench_row(const char *form, bool first, const kvd_opts *o, const double *number);
/* What stands before the first row and after the last of all. */
void cli_bench_head(const char *form, const kvd_model *m, const kvd_opts *o);
void cli_bench_foot(const char *form, bool any);

/* ---- cli_stats.c ------------------------------------------------------------------- */

/* Memory by kind and rates, as --stats shows them. */
void cli_print_stats(const kvd_session *s, const kvd_plan *plan, double load_seconds, FILE *f);
/* Planned and measured memory of a device that has its own; else nothing. */
void cli_print_device(const kvd_session *s, const kvd_plan *plan, FILE *f);
/* {"counts": every field of kvd_stats, "layers": [hit rates], "memory": the plan}; NULL: no memory.
 */
json_t *cli_stats_json(const kvd_session *s, const kvd_plan *plan);

/* ---- cli_plan_file.c ----------------------------------------------------------------- */

/* What a plan file for this model belongs to. */
void cli_plan_key(plan_key *k, const kvd_model *m, const kvd_session_params *p, const char *index,
                  uint64_t budget);
typedef struct cli_plan_use { /* what --plan gave; zeros without it */
    float      *caps;         /* [n_layer][n_kv_head] */
    uint32_t   *records;      /* [n_layer][n_kv_head] host records; NULL: all lanes have the same */
    plan_shares shares;       /* where the host tier spills and the plan has tables for it */
    bool        has_shares;
} cli_plan_use;
/* --plan: its caps to *a and its host records to *p, both of which borrow them; the caller releases
 * them, after failure, too. */
kvd_status cli_plan_apply(cli_plan_use *out, kvd_attention_params *a, kvd_session_params *p,
                          const kvd_model *m, const kvd_opts *o, kvd_err *err);
void       cli_plan_release(cli_plan_use *plan);
/* Opens a session.  Where another process has the prefix cache's directory it says which one, and
 * goes on without (p->cache_dir becomes NULL, and *plan is filled anew), unless the directory is
 * needed as a tier.  plan NULL: not wanted. */
kvd_status cli_session_or_uncached(kvd_session **out, kvd_plan *plan, kvd_model *m,
                                   kvd_session_params *p, const kvd_opts *o, kvd_err *err);
/* A session as cli_session_params() and --plan have it; plan NULL: not wanted. */
kvd_status cli_session_open(kvd_session **out, kvd_plan *plan, kvd_model *m, kvd_session_params *p,
                            kvd_attention_params *a, const kvd_opts *o, kvd_err *err);
/* The same; a directory that another process has is an error: a server keeps it for long. */
kvd_status cli_session_open_cached(kvd_session **out, kvd_plan *plan, kvd_model *m,
                                   kvd_session_params *p, kvd_attention_params *a,
                                   const kvd_opts *o, kvd_err *err);

/* ---- cli_serve.c -------------------------------------------------------------------- */

/* cli_session_params() of a server's session. */
kvd_status cli_serve_params(kvd_session_params *p, kvd_attention_params *a, const kvd_opts *o,
                            kvd_err *err);

/* ---- cli_text.c -------------------------------------------------------------------- */

/* Appends the text of an option; with --escape its escapes stand for characters. */
void cli_put_text(const kvd_opts *o, const char *text, kvd_buf *to);
/* KVD_E_INVAL names the first byte that is not UTF-8; what: "prompt". */
kvd_status cli_check_utf8(const char *what, const char *s, size_t len, kvd_err *err);

/* Appends a message to an array of a conversation.  false: the text is not UTF-8, or no memory. */
bool cli_add_message(json_t *messages, const char *role, const char *text, size_t len);

typedef struct cli_stops { /* --stop: text is held back while it may begin a stop string */
    kvd_buf *stop;         /* [n] */
    uint32_t n;
    kvd_buf  held;
} cli_stops;
kvd_status cli_stops_open(cli_stops *s, const kvd_opts *o, kvd_err *err);
void       cli_stops_close(cli_stops *s); /* also after a failure, or of zeros */
/* Adds text of an answer; *out: what of it can be told now.  true: a stop string has come, the
 * answer ends before it. */
bool cli_stops_feed(cli_stops *s, const char *text, size_t len, kvd_buf *out);
/* The answer has ended without one; *out: what was held back. */
void cli_stops_end(cli_stops *s, kvd_buf *out);

/* ---- cli_tty.c --------------------------------------------------------------------- */

/* A signal handler: gives the terminal its own modes back, and ends the process as the signal does
 * by default. */
void cli_tty_die(int sig);
/* The first half of it; does nothing where the modes were not changed. */
void cli_tty_restore(void);

/* ---- cli_term.c -------------------------------------------------------------------- */

typedef struct cli_progress { /* a bar on a terminal, silence elsewhere */
    const char *what;
    uint64_t    start_ns, shown_ns;
    bool        on;
} cli_progress;
void cli_progress_start(cli_progress *p, const char *what);
bool cli_progress_step(void *p, uint64_t done, uint64_t total); /* a kvd_progress_fn */
void cli_progress_end(cli_progress *p);

/* First Ctrl-C cancels the session's evaluation and sets the flag; a second one ends the program.
 * NULL restores the default. */
void     cli_interrupt_watch(kvd_session *s);
bool     cli_interrupted(bool reset);
bool     cli_is_tty(FILE *f);
uint64_t cli_rss_bytes(bool anonymous_only);

#endif
