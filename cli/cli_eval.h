/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval.h - private to the files of `kvdrive eval`: tasks, samples, configurations, scores.
 *
 * Data (word lists, essay, questions, templates) are files of a directory, nothing of it is in the
 * program.  A sample depends on data, task, seed, index, length and tokenizer alone: not on which
 * other tasks or samples are made, nor on the machine. */
#ifndef KVD_CLI_EVAL_H
#define KVD_CLI_EVAL_H

#include <jansson.h>

#include "cli.h"

#define EVAL_MAX_TASK   16u
#define EVAL_MAX_CONFIG 64u

/* ---- data (cli_eval_data.c) ------------------------------------------------------ */

typedef struct eval_words {
    kvd_buf      text; /* the words, each zero-terminated */
    const char **word; /* [n] into text */
    size_t       n;
} eval_words;

typedef struct eval_question {
    const char   *text;
    const json_t *answers; /* of {"text"}; not empty */
    uint32_t      doc;
} eval_question;

typedef enum eval_kind { EVAL_NIAH, EVAL_VT, EVAL_CWE, EVAL_FWE, EVAL_QA } eval_kind;
typedef enum eval_hay { EVAL_NOISE, EVAL_ESSAY, EVAL_NEEDLE } eval_hay;
typedef enum eval_key { EVAL_WORDS, EVAL_NUMBERS, EVAL_UUIDS } eval_key;

typedef struct eval_task {
    const char *name, *template, *prefix; /* borrowed from the data */
    eval_kind   kind;
    bool        part; /* string_match_part: one answer suffices */
    uint32_t    max_new;
    eval_hay    hay;
    eval_key    key, value;
    uint32_t    n_key, n_value, n_query; /* niah */
    uint32_t    n_hop;                   /* vt */
    uint32_t    n_common, freq_common, freq_other;
} eval_task;

typedef struct eval_data {
    json_t        *tasks_json, *questions_json;
    const char    *needle, *noise;
    eval_task      task[EVAL_MAX_TASK];
    uint32_t       n_task;
    eval_words     noun, adjective, verb, essay;
    const char   **word; /* [n_word] nouns, adjectives and verbs, each once, sorted */
    size_t         n_word;
    const char   **doc;     /* [n_doc] */
    uint32_t      *article; /* [n_doc] which one it is from */
    uint32_t       n_doc;
    eval_question *question;
    uint32_t       n_question;
} eval_data;

/* eval_data_close() after success and failure. */
kvd_status       eval_data_open(eval_data *d, const char *dir, kvd_err *err);
void             eval_data_close(eval_data *d);
const eval_task *eval_task_find(const eval_data *d, const char *name); /* NULL: there is none */

/* ---- samples (cli_eval_make.c, cli_eval_niah.c, cli_eval_lists.c) ------------------ */

typedef struct eval_sample {
    const eval_task *task;
    uint64_t         seed;
    uint32_t         index, length;
    kvd_buf          user;    /* the user's message */
    kvd_buf          prefix;  /* how the answer begins, behind the assistant's header */
    kvd_buf          answers; /* [n_answer], each zero-terminated */
    uint32_t         n_answer;
    uint64_t         n_token; /* of the prompt, prefix included */
} eval_sample;

/* Tokens of the prompt that a message and a prefix make. */
typedef kvd_status (*eval_count_fn)(void *ctx, const kvd_buf *user, const kvd_buf *prefix,
                                    uint64_t *n, kvd_err *err);

/* The longest prompt that with the task's answer takes at most length tokens (within 0.2 %).
 * KVD_E_INVAL when not even the smallest fits.  eval_sample_free() after success and failure. */
kvd_status eval_sample_make(eval_sample *s, const eval_data *d, const eval_task *t, uint64_t seed,
                            uint32_t index, uint32_t length, eval_count_fn count, void *ctx,
                            kvd_err *err);
void       eval_sample_free(eval_sample *s);
/* "task", "index", ..., "prompt", "answer_prefix", "answers" as one line of JSON. */
kvd_status eval_sample_print(const eval_sample *s, FILE *f, kvd_err *err);
/* The n-th answer, n < n_answer. */
const char *eval_answer(const eval_sample *s, uint32_t n);

/* What makes one sample: fills user, prefix and answers for a haystack of `size` units.  Memory
 * that fails shows in the buffers' oom or in failed. */
typedef struct eval_maker {
    const eval_data *d;
    eval_sample     *s;
    kvd_rng          rng; /* the sample's; the same at the start for every size */
    bool             failed;
} eval_maker;

typedef void (*eval_make_fn)(eval_maker *m, uint64_t size);
void eval_make_niah(eval_maker *m, uint64_t size); /* words of essay, or sentences */
void eval_make_vt(eval_maker *m, uint64_t size);   /* noise sentences */
void eval_make_cwe(eval_maker *m, uint64_t size);  /* different words */
void eval_make_fwe(eval_maker *m, uint64_t size);  /* words in all */
void eval_make_qa(eval_maker *m, uint64_t size);   /* documents */

/* Helpers of the makers. */
void eval_add_answer(eval_maker *m, const char *text);
/* out[0..k) distinct numbers below n, ascending; k <= n. */
void eval_pick(kvd_rng *r, uint64_t n, uint32_t k, uint64_t *out);
void eval_shuffle(kvd_rng *r, uint32_t *x, size_t n);
/* 0..n-1 in random order; NULL: no memory (m->failed is set). */
uint32_t *eval_permutation(eval_maker *m, size_t n);
/* Appends a template with {name} replaced; pairs are name, value, ..., NULL. */
void eval_fill(kvd_buf *out, const char *template, const char *const *pairs);

/* ---- configurations (cli_eval_config.c) ------------------------------------------ */

typedef struct eval_config {
    char                *line; /* owned; name and texts of attention point into it */
    const char          *name;
    kvd_attention_params attention;
} eval_config;

typedef struct eval_configs {
    eval_config config[EVAL_MAX_CONFIG];
    uint32_t    n;
    uint32_t    dense; /* the one the others are compared with */
} eval_configs;

/* From --configs FILE (a line each, # begins a comment) and --with "name: k=v, ...; name: ...".
 * What a configuration does not say is as base has it, which must outlive them.  Without any, base
 * is one where --attention is given; a dense one is put in front if there is none. */
kvd_status eval_configs_open(eval_configs *c, const kvd_attention_params *base, const kvd_opts *o,
                             kvd_err *err);
void       eval_configs_close(eval_configs *c);
/* What a session must be opened with so that every configuration can be set later: the largest
 * window and the largest index of all. */
kvd_status eval_configs_widest(const eval_configs *c, const kvd_model *m, kvd_session_params p,
                               kvd_attention_params *out, kvd_err *err);
/* The one place where a configuration reaches the engine: called before each answer, with the
 * sequence holding the prompt. */
kvd_status eval_config_apply(const eval_config *c, kvd_session *s, kvd_err *err);

/* ---- scores (cli_eval_score.c) --------------------------------------------------- */

/* RULER's: the share of answers that occur in the text, letters of either case being one; with
 * part whether one does. */
double eval_score(const eval_sample *s, const char *text, size_t len);
/* KL divergence in nats of the softmax of q from that of p. */
double eval_kl(const float *p, const float *q, uint32_t n);

/* What sparse steps did, summed over a configuration's answers. */
typedef struct eval_counts {
    uint64_t n_step, n_selected, n_miss, n_urgent;
    double   mass; /* sum over steps of the estimated share of the softmax attended */
    double   kl;   /* sum over n_kl tokens of KL(dense || this), the dense answer being forced */
    uint64_t n_kl;
} eval_counts;

typedef struct eval_table {
    const eval_configs *configs;
    const eval_task   **task; /* [n_task] */
    uint32_t            n_task, n_sample;
    float              *score;  /* [config][task][sample]; below 0: not run */
    eval_counts        *counts; /* [config] */
} eval_table;

/* Mean of x with its 95 % interval over resampled means: the 2.5 % and 97.5 % quantiles. */
typedef struct eval_interval {
    double mean, low, high;
} eval_interval;
/* false: no memory. */
bool eval_bootstrap(const double *x, uint32_t n, uint64_t seed, eval_interval *out);
/* A table for people, or one JSON array with an object a configuration. */
kvd_status eval_table_print(const eval_table *t, uint64_t seed, bool json, FILE *f, kvd_err *err);

/* ---- answers (cli_eval_run.c) ---------------------------------------------------- */

typedef struct eval_runner {
    /* set by the caller, borrowed */
    kvd_model          *m;
    kvd_session        *s;
    const eval_configs *configs;
    eval_table         *table; /* scores and counts go here */
    FILE               *csv;   /* NULL: no rows */
    bool                kl;
    /* the runner's */
    kvd_sampler *greedy;
    kvd_detok   *detok;
    uint32_t     n_vocab, n_forced;
    float       *logits;        /* [n_vocab] of the prompt's last token */
    int32_t     *forced;        /* [n_forced] the dense answer */
    float       *forced_logits; /* [n_forced][n_vocab] behind each of its tokens */
    double       prefill_s;
} eval_runner;

/* For answers of at most max_new tokens; eval_runner_close() after success and failure. */
kvd_status eval_runner_open(eval_runner *r, uint32_t max_new, kvd_err *err);
void       eval_runner_close(eval_runner *r);
kvd_status eval_run_sample(eval_runner *r, uint32_t task, const eval_sample *s,
                           const cli_tokens *prompt, kvd_err *err);

#endif
