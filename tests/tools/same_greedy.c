/* SPDX-License-Identifier: Apache-2.0 */
/* same_greedy.c - whether a backend gives another's greedy text on a real model.
 *
 *   same_greedy MODEL TEXT BACKEND [--prompts N] [--length TOKENS] [--predict TOKENS] [--precise]
 *
 * Prompts are N pieces of TEXT.  BACKEND answers each greedily; the CPU (--precise: in its precise
 * mode) is then given the same tokens, so that every one of them is judged by the CPU's logits: a
 * token that is not the CPU's best parts from its text there, at the gap between its best and the
 * token taken.  Dense, then sparse.  A row of CSV each; exit 1 if a gap is GAP_MOST or more. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvdrive.h"

#define GAP_MOST    0.05
#define PREDICT_MAX 1024

typedef struct side {
    kvd_model     *model;
    kvd_session   *session;
    kvd_model_info info;
} side;

static void die(const char *what, const kvd_err *err)
{
    fprintf(stderr, "same_greedy: %s: %s\n", what, err ? err->msg : "?");
    exit(1);
}

static void open_side(side *x, const char *path, const char *backend, bool precise, uint32_t n_ctx,
                      const kvd_attention_params *a)
{
    kvd_model_params   mp  = KVD_MODEL_PARAMS_INIT;
    kvd_session_params sp  = KVD_SESSION_PARAMS_INIT;
    kvd_err            err = { 0 };

    mp.path      = path;
    mp.backend   = backend;
    mp.precise   = precise;
    sp.n_ctx     = n_ctx;
    sp.attention = a;
    if (kvd_model_open(&x->model, &mp, &err) != KVD_OK)
        die(backend, &err);
    if (kvd_session_open(&x->session, x->model, &sp, &err) != KVD_OK)
        die(backend, &err);
    x->info.struct_size = sizeof(x->info);
    kvd_model_get_info(x->model, &x->info);
}

static void close_side(side *x)
{
    kvd_session_close(x->session);
    kvd_model_close(x->model);
}

static void prefill(side *x, const int32_t *token, uint32_t n)
{
    kvd_err err = { 0 };

    if (kvd_seq_truncate(x->session, 0, 0, &err) != KVD_OK ||
        kvd_prefill(x->session, 0, token, n, NULL, NULL, &err) != KVD_OK)
        die("prompt", &err);
}

static void step(side *x, int32_t token)
{
    kvd_batch b   = KVD_BATCH_INIT;
    kvd_err   err = { 0 };

    b.n_token = 1;
    b.token   = &token;
    if (kvd_eval(x->session, &b, &err) != KVD_OK)
        die("step", &err);
}

static int32_t best_of(const side *x)
{
    const float *logit = kvd_logits(x->session, 0);
    uint32_t     best  = 0;

    for (uint32_t i = 1; i < x->info.n_vocab; i++)
        if (logit[i] > logit[best])
            best = i;
    return (int32_t)best;
}

typedef struct tally {
    uint32_t n_token, n_parted, n_text_same;
    double   widest;
} tally;

static void compare(side *ours, side *cpu, const int32_t *prompt, uint32_t n_prompt,
                    uint32_t n_predict, tally *t)
{
    int32_t  answer[PREDICT_MAX];
    uint32_t n_parted = 0;

    prefill(ours, prompt, n_prompt);
    for (uint32_t i = 0; i < n_predict; i++) {
        answer[i] = best_of(ours);
        if (i + 1 < n_predict)
            step(ours, answer[i]);
    }
    prefill(cpu, prompt, n_prompt);
    for (uint32_t i = 0; i < n_predict; i++) {
        const float  *logit = kvd_logits(cpu->session, 0);
        const int32_t best  = best_of(cpu);
        const double  gap   = (double)logit[best] - (double)logit[answer[i]];

        if (best != answer[i])
            n_parted++;
        if (gap > t->widest)
            t->widest = gap;
        if (i + 1 < n_predict)
            step(cpu, answer[i]);
    }
    t->n_token += n_predict;
    t->n_parted += n_parted;
    t->n_text_same += n_parted == 0;
}

/* Tokens of the text file's beginning, at most cap. */
static size_t read_tokens(const kvd_model *m, const char *path, int32_t *token, size_t cap)
{
    const size_t most = cap * 8;
    FILE        *f    = fopen(path, "rb");
    char        *text = malloc(most);
    size_t       len, n;
    kvd_err      err = { 0 };

    if (!f || !text)
        die(path, NULL);
    len = fread(text, 1, most, f);
    fclose(f);
    if (kvd_tokenize(m, text, len, NULL, 0, false, token, cap, &n, &err) != KVD_OK &&
        err.code != KVD_E_FULL)
        die(path, &err);
    free(text);
    return n < cap ? n : cap;
}

typedef struct options {
    const char *model, *text, *backend;
    uint32_t    n_prompt, length, predict;
    bool        precise;
} options;

static bool run(const options *o, bool sparse)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    const size_t         n = (size_t)o->n_prompt * o->length;
    int32_t             *token;
    side                 ours, cpu;
    tally                t = { 0 };

    a.mode   = sparse ? KVD_ATTENTION_SPARSE : KVD_ATTENTION_DENSE;
    a.budget = o->length / 8;
    open_side(&ours, o->model, o->backend, false, o->length + o->predict, &a);
    open_side(&cpu, o->model, "cpu", o->precise, o->length + o->predict, &a);
    token = malloc(n * sizeof(*token));
    if (!token || read_tokens(cpu.model, o->text, token, n) < n)
        die("the text is too short", NULL);
    for (uint32_t i = 0; i < o->n_prompt; i++)
        compare(&ours, &cpu, token + (size_t)i * o->length, o->length, o->predict, &t);
    free(token);
    close_side(&ours);
    close_side(&cpu);
    printf("%s,%s,%u,%u,%u,%u,%u,%.4f\n", o->backend, sparse ? "sparse" : "dense", o->n_prompt,
           o->length, t.n_token, t.n_text_same, t.n_parted, t.widest);
    return t.widest < GAP_MOST;
}

int main(int argc, char **argv)
{
    options o = { .n_prompt = 8, .length = 1024, .predict = 64 };
    bool    ok;

    if (argc < 4) {
        fprintf(stderr, "usage: same_greedy MODEL TEXT BACKEND [--prompts N] [--length TOKENS] "
                        "[--predict TOKENS] [--precise]\n");
        return 2;
    }
    o.model   = argv[1];
    o.text    = argv[2];
    o.backend = argv[3];
    for (int i = 4; i < argc; i++) {
        const uint32_t n = i + 1 < argc ? (uint32_t)strtoul(argv[i + 1], NULL, 10) : 0;

        if (strcmp(argv[i], "--precise") == 0) {
            o.precise = true;
            continue;
        }
        if (strcmp(argv[i], "--prompts") == 0)
            o.n_prompt = n;
        else if (strcmp(argv[i], "--length") == 0)
            o.length = n;
        else if (strcmp(argv[i], "--predict") == 0)
            o.predict = n < PREDICT_MAX ? n : PREDICT_MAX;
        i++;
    }
    printf("backend,attention,prompts,length,tokens,texts_same,tokens_parted,widest_gap\n");
    ok = run(&o, false);
    ok = run(&o, true) && ok;
    return ok ? 0 : 1;
}
