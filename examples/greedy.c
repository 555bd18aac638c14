/* SPDX-License-Identifier: Apache-2.0 */
/* greedy.c - the smallest useful program on libkvdrive: continues a text.
 *
 *   cc greedy.c $(pkg-config --cflags --libs kvdrive) -o greedy
 *   ./greedy model.gguf "Once upon a time" */
#include <kvdrive.h>
#include <stdio.h>
#include <string.h>

#define N_CTX 512
#define N_GEN 64

static kvd_status continue_text(kvd_model *m, const char *text, kvd_err *err)
{
    kvd_session_params sp  = KVD_SESSION_PARAMS_INIT;
    kvd_sampler_params smp = KVD_SAMPLER_PARAMS_INIT;
    kvd_model_info     info = KVD_MODEL_INFO_INIT;
    kvd_session       *s   = NULL;
    kvd_sampler       *sm  = NULL;
    kvd_detok         *d   = NULL;
    int32_t            token[N_CTX];
    size_t             n;
    kvd_status         st = kvd_model_get_info(m, &info);

    sp.n_ctx        = info.n_ctx_train < N_CTX ? info.n_ctx_train : N_CTX;
    smp.temperature = 0.0f;
    if (st == KVD_OK)
        st = kvd_tokenize(m, text, strlen(text), NULL, 0, true, token, sp.n_ctx - N_GEN, &n, err);
    if (st == KVD_OK)
        st = kvd_session_open(&s, m, &sp, err);
    if (st == KVD_OK)
        st = kvd_sampler_open(&sm, m, &smp, err);
    if (st == KVD_OK)
        st = kvd_detok_open(&d, m, err);
    if (st == KVD_OK)
        st = kvd_prefill(s, 0, token, n, NULL, NULL, err);
    for (int i = 0; st == KVD_OK && i < N_GEN; i++) {
        kvd_batch b = KVD_BATCH_INIT;
        int32_t   id;

        st = kvd_sampler_pick(sm, s, 0, &id, err);
        if (st != KVD_OK || kvd_token_is_end(m, id))
            break;
        fputs(kvd_detok_feed(d, id, false, NULL), stdout);
        b.n_token = 1;
        b.token   = &id;
        b.n_best  = kvd_sampler_n_best(sm);
        st        = kvd_eval(s, &b, err);
    }
    if (st == KVD_OK)
        puts(kvd_detok_flush(d, NULL));
    kvd_detok_close(d);
    kvd_sampler_close(sm);
    kvd_session_close(s);
    return st;
}

int main(int argc, char **argv)
{
    kvd_model_params p   = KVD_MODEL_PARAMS_INIT;
    kvd_err          err = { KVD_OK, 0, "" };
    kvd_model       *m;
    kvd_status       st;

    if (argc != 3) {
        fprintf(stderr, "usage: greedy MODEL TEXT\n");
        return 2;
    }
    p.path = argv[1];
    st     = kvd_model_open(&m, &p, &err);
    if (st == KVD_OK)
        st = continue_text(m, argv[2], &err);
    kvd_model_close(m);
    if (st != KVD_OK)
        fprintf(stderr, "greedy: %s\n", err.msg);
    return st == KVD_OK ? 0 : 1;
}
