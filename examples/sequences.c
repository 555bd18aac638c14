/* SPDX-License-Identifier: Apache-2.0 */
/* sequences.c - several texts at once: each is a sequence of one session, and every step evaluates
 * one token of each that goes on.  Weights are read once a step, whatever the number of sequences.
 *
 *   cc sequences.c $(pkg-config --cflags --libs kvdrive) -o sequences
 *   ./sequences model.gguf "Once upon a time" "The capital of France is" */
#include <kvdrive.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_CTX 512
#define N_GEN 64
#define N_SEQ 16

typedef struct text {
    const char  *prompt;
    kvd_sampler *sampler; /* its own: it remembers what it has picked */
    kvd_detok   *detok;   /* likewise: a character may be cut in the middle */
    int32_t      token;   /* picked, not evaluated yet */
    char        *said;
    size_t       len;
    bool         over;
} text;

static kvd_status say(text *t, const char *piece, kvd_err *err)
{
    const size_t n    = strlen(piece);
    char        *more = realloc(t->said, t->len + n + 1);

    if (!more) {
        snprintf(err->msg, sizeof(err->msg), "no memory for a text");
        return KVD_E_NOMEM;
    }
    t->said = more;
    memcpy(t->said + t->len, piece, n + 1);
    t->len += n;
    return KVD_OK;
}

/* Picks the next token of a text from a row of the last evaluation's logits. */
static kvd_status pick(const kvd_model *m, const kvd_session *s, text *t, uint32_t row, kvd_err *err)
{
    kvd_status st = kvd_sampler_pick(t->sampler, s, row, &t->token, err);

    if (st != KVD_OK)
        return st;
    t->over = kvd_token_is_end(m, t->token);
    if (t->over)
        return KVD_OK;
    return say(t, kvd_detok_feed(t->detok, t->token, false, NULL), err);
}

/* The prompt into its sequence, and the first token of the answer. */
static kvd_status begin(kvd_model *m, kvd_session *s, text *t, uint32_t seq, size_t n_ctx,
                        kvd_err *err)
{
    kvd_sampler_params p = KVD_SAMPLER_PARAMS_INIT;
    int32_t            token[N_CTX];
    size_t             n;
    kvd_status         st;

    p.temperature = 0.0f;
    st = kvd_tokenize(m, t->prompt, strlen(t->prompt), NULL, 0, true, token, n_ctx - N_GEN, &n, err);
    if (st == KVD_OK)
        st = kvd_sampler_open(&t->sampler, m, &p, err);
    if (st == KVD_OK)
        st = kvd_detok_open(&t->detok, m, err);
    if (st == KVD_OK)
        st = kvd_prefill(s, seq, token, n, NULL, NULL, err);
    return st == KVD_OK ? pick(m, s, t, 0, err) : st;
}

/* One token of every text that goes on; *n_left is how many did. */
static kvd_status step(kvd_model *m, kvd_session *s, text *t, uint32_t n, uint32_t *n_left,
                       kvd_err *err)
{
    kvd_batch  b = KVD_BATCH_INIT;
    int32_t    token[N_SEQ];
    uint32_t   seq[N_SEQ];
    uint8_t    want[N_SEQ];
    kvd_status st;

    memset(want, 1, sizeof(want)); /* logits of every row */
    for (uint32_t i = 0; i < n; i++) {
        if (t[i].over)
            continue;
        token[b.n_token] = t[i].token;
        seq[b.n_token++] = i;
    }
    *n_left = b.n_token;
    if (b.n_token == 0)
        return KVD_OK;
    b.token       = token;
    b.seq         = seq;
    b.want_logits = want;
    b.n_best      = kvd_sampler_n_best(t[seq[0]].sampler);
    st            = kvd_eval(s, &b, err);
    for (uint32_t row = 0; st == KVD_OK && row < b.n_token; row++)
        st = pick(m, s, &t[seq[row]], row, err);
    return st;
}

static kvd_status continue_texts(kvd_model *m, text *t, uint32_t n, kvd_err *err)
{
    kvd_session_params sp     = KVD_SESSION_PARAMS_INIT;
    kvd_model_info     info   = KVD_MODEL_INFO_INIT;
    kvd_session       *s      = NULL;
    uint32_t           n_left = n;
    kvd_status         st     = kvd_model_get_info(m, &info);

    sp.n_ctx = info.n_ctx_train < N_CTX ? info.n_ctx_train : N_CTX;
    sp.n_seq = n;
    if (st == KVD_OK)
        st = kvd_session_open(&s, m, &sp, err);
    for (uint32_t i = 0; st == KVD_OK && i < n; i++)
        st = begin(m, s, &t[i], i, sp.n_ctx, err);
    for (uint32_t i = 1; st == KVD_OK && n_left > 0 && i < N_GEN; i++)
        st = step(m, s, t, n, &n_left, err);
    for (uint32_t i = 0; st == KVD_OK && i < n; i++)
        st = say(&t[i], kvd_detok_flush(t[i].detok, NULL), err);
    kvd_session_close(s);
    return st;
}

int main(int argc, char **argv)
{
    kvd_model_params p        = KVD_MODEL_PARAMS_INIT;
    kvd_err          err      = { KVD_OK, 0, "" };
    text             t[N_SEQ] = { { 0 } };
    const int        n        = argc - 2;
    kvd_model       *m;
    kvd_status       st;

    if (n < 1 || n > N_SEQ) {
        fprintf(stderr, "usage: sequences MODEL TEXT... (1 to %d texts)\n", N_SEQ);
        return 2;
    }
    p.path          = argv[1];
    p.deterministic = true; /* a text does not depend on those beside it */
    for (int i = 0; i < n; i++)
        t[i].prompt = argv[2 + i];
    st = kvd_model_open(&m, &p, &err);
    if (st == KVD_OK)
        st = continue_texts(m, t, (uint32_t)n, &err);
    for (int i = 0; i < n; i++) {
        if (st == KVD_OK)
            printf("%d: %s\n", i, t[i].said);
        kvd_detok_close(t[i].detok);
        kvd_sampler_close(t[i].sampler);
        free(t[i].said);
    }
    kvd_model_close(m);
    if (st != KVD_OK)
        fprintf(stderr, "sequences: %s\n", err.msg);
    return st == KVD_OK ? 0 : 1;
}
