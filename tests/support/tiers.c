/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tiers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/tiny.h"

tiers_setting tiers = { .backend = "cpu", .n_batch = N_BATCH };

static kvd_err err;

kvd_model *tiers_model(const char *name, const char *backend)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.n_thread      = 2;
    p.rope_scaling  = KVD_ROPE_LINEAR; /* for the context, not for sense */
    p.rope_factor   = 32.0f;
    p.deterministic = tiers.deterministic;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", path, err.msg);
    return m;
}

kvd_session *tiers_session(kvd_model *m, const kvd_attention_params *a, uint32_t n_seq, bool spread)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;
    kvd_session       *s;

    p.n_ctx      = N_CTX;
    p.n_seq      = n_seq;
    p.n_batch    = tiers.n_batch;
    p.n_logits   = N_BATCH;
    p.attention  = a;
    p.kv_record  = tiers.record;
    p.lookup     = tiers.lookup;
    p.trace_path = tiers.trace;
    p.n_parked   = tiers.n_parked;
    if (spread)
        tiny_least_device(m, &p);
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

void tiers_prefill(kvd_session *s, uint32_t seq, uint32_t n, uint32_t text)
{
    int32_t       *t  = malloc(n * sizeof(*t));
    const uint32_t at = kvd_seq_len(s, seq);

    for (uint32_t i = 0; i < n; i++)
        t[i] = tiny_token(text, at + i);
    if (kvd_prefill(s, seq, t, n, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    free(t);
}

void tiers_step(kvd_session *s, const int32_t *token, uint32_t n)
{
    uint32_t  seq[8];
    uint8_t   want[8];
    int32_t   t[8];
    kvd_batch b = KVD_BATCH_INIT;

    for (uint32_t i = 0; i < n; i++) {
        seq[i]  = (i + 1) % n;
        t[i]    = token[seq[i]];
        want[i] = 1;
    }
    b.n_token     = n;
    b.token       = t;
    b.seq         = seq;
    b.want_logits = want;
    if (kvd_eval(s, &b, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

static int32_t best(const float *logits)
{
    int32_t b = 0;

    for (int32_t i = 1; i < N_VOCAB; i++)
        b = logits[i] > logits[b] ? i : b;
    return b;
}

void tiers_same_logits(const kvd_session *a, const kvd_session *b, uint32_t row)
{
    assert_memory_equal(kvd_logits(a, row), kvd_logits(b, row), N_VOCAB * sizeof(float));
}

int32_t tiers_next_token(const kvd_session *s, uint32_t row, uint32_t i)
{
    return (best(kvd_logits(s, row)) + (int32_t)(i * 7 % 61)) % 256;
}

void tiers_same_text(kvd_model *m, const kvd_attention_params *a)
{
    kvd_session *r = tiers_session(m, a, 1, false), *t = tiers_session(m, a, 1, true);
    kvd_stats    c = { .struct_size = sizeof(c) };

    tiers_prefill(r, 0, N_PROMPT, 0);
    tiers_prefill(t, 0, N_PROMPT, 0);
    tiers_same_logits(r, t, 0);
    for (uint32_t i = 0; i < 2 * N_GEN; i++) {
        const int32_t token = tiers_next_token(r, 0, i);

        if (i == N_GEN) {
            assert_int_equal(kvd_seq_truncate(r, 0, N_PROMPT - 300, &err), KVD_OK);
            assert_int_equal(kvd_seq_truncate(t, 0, N_PROMPT - 300, &err), KVD_OK);
            tiers_step(r, &token, 1); /* the window starts over */
            tiers_step(t, &token, 1);
            tiers_same_logits(r, t, 0);
            tiers_prefill(r, 0, 200, 1); /* a prompt over what is held: layer by layer there */
            tiers_prefill(t, 0, 200, 1);
        } else {
            tiers_step(r, &token, 1);
            tiers_step(t, &token, 1);
        }
        tiers_same_logits(r, t, 0);
        kv_check(t->kv);
    }
    kvd_session_get_stats(t, &c);
    if (a->mode == KVD_ATTENTION_SPARSE) {
        assert_true(c.n_sparse > N_GEN && c.n_miss > 0 && c.n_evicted > 0 && c.bytes_up > 0);
        assert_true(c.mass > 0.0 && c.mass <= 1.0001);
    } else {
        assert_true(c.n_sparse == 0 && c.bytes_dense > 0);
    }
    assert_true(c.n_grown_blocks > 0);
    kvd_session_close(r);
    kvd_session_close(t);
}

kvd_attention_params tiers_sparse(uint32_t budget, float cap)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;

    a.mode        = KVD_ATTENTION_SPARSE;
    a.budget      = budget;
    a.cap         = cap;
    a.min_mass    = -1.0f;
    a.schedule    = tiers.schedule;
    a.micro_batch = tiers.micro_batch;
    return a;
}
