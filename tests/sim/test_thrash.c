/* SPDX-License-Identifier: Apache-2.0 */
/* test_thrash.c - many sequences fight for all tiers: prompts, steps of many rows, cuts and cancels
 * in a random order, in two sessions at once, one with everything resident and one with the least
 * device memory, hardly any host memory and the rest on disk.  Every logit has the same bits.
 * usage: test_thrash [--seconds N] [--seed N] [--backend NAME] [--no-disk 1] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/tiny.h"

enum { N_SEQ = 32, N_PROMPT_MAX = 1200, N_STEP_MAX = 24, N_BATCH = 96, N_TOKEN = 96000 };

static uint32_t    seconds_ = 4;
static uint64_t    seed_    = 1;
static const char *backend_ = "cpu";
static bool        disk_    = true;

typedef struct pair {
    kvd_session *all, *tiers; /* resident; spread */
    kvd_rng      rng;
    uint64_t     n_row; /* compared */
} pair;

static kvd_model *open_model(void)
{
    kvd_model_params p   = KVD_MODEL_PARAMS_INIT;
    kvd_err          err = { 0 };
    kvd_model       *m;

    p.path          = KVD_TEST_DATA "/tiny/qwen3.gguf";
    p.backend       = backend_;
    p.n_thread      = 2;
    p.deterministic = true; /* a prompt begins where the cache of one of them ends */
    p.rope_scaling  = KVD_ROPE_LINEAR;
    p.rope_factor   = 64.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return m;
}

static kvd_session_params params(const kvd_attention_params *a)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;

    p.n_ctx     = TINY_CTX;
    p.n_seq     = N_SEQ;
    p.kv_tokens = N_TOKEN;
    p.n_batch   = N_BATCH;
    p.n_logits  = N_BATCH;
    p.attention = a;
    return p;
}

/* The least device memory that is accepted, and host memory for an eighth of the records. */
static void press(kvd_model *m, kvd_session_params *p, const char *dir)
{
    kvd_plan plan = { .struct_size = sizeof(plan) };
    kvd_err  err  = { 0 };

    tiny_least_device(m, p);
    if (!dir)
        return;
    p->cache_dir   = dir;
    p->cache_bytes = UINT64_C(64) << 20;
    assert_int_equal(kvd_session_plan(m, p, &plan, &err), KVD_OK);
    p->kv_host = plan.kv_host_bytes / 8;
    if (kvd_session_plan(m, p, &plan, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_true(plan.kv_spills);
}

static void same(pair *p, uint32_t row)
{
    const float *a = kvd_logits(p->all, row), *b = kvd_logits(p->tiers, row);

    if (memcmp(a, b, TINY_VOCAB * sizeof(float)) != 0)
        fail_msg("row %u of the %llu-th: logits differ", row, (unsigned long long)p->n_row);
    p->n_row++;
}

static bool cancel_late(void *ctx, uint64_t done, uint64_t total)
{
    (void)total;
    return done < *(const uint64_t *)ctx;
}

static void prompt(pair *p)
{
    const uint32_t seq  = (uint32_t)kvd_rng_below(&p->rng, N_SEQ);
    const uint32_t n    = 1 + (uint32_t)kvd_rng_below(&p->rng, N_PROMPT_MAX);
    const uint32_t text = (uint32_t)kvd_rng_below(&p->rng, 5), len = kvd_seq_len(p->all, seq);
    uint64_t       until = kvd_rng_below(&p->rng, 8) ? UINT64_MAX : kvd_rng_below(&p->rng, n);
    int32_t        token[N_PROMPT_MAX];
    kvd_err        err = { 0 };
    kvd_status     a, b;

    for (uint32_t i = 0; i < n; i++)
        token[i] = tiny_token(text, len + i);
    a = kvd_prefill(p->all, seq, token, n, cancel_late, &until, &err);
    if (a == KVD_OK) {
        b = kvd_prefill(p->tiers, seq, token, n, NULL, NULL, &err);
        if (b != KVD_OK)
            fail_msg("prompt of %u behind %u: %s", n, len, err.msg);
        same(p, 0);
        return;
    }
    if (a != KVD_E_FULL && a != KVD_E_CANCELED)
        fail_msg("prompt of %u behind %u: %s", n, len, err.msg);
    /* how far the other comes may differ; both are cut back */
    (void)!kvd_prefill(p->tiers, seq, token, n, cancel_late, &until, &err);
    assert_int_equal(kvd_seq_truncate(p->all, seq, len, NULL), KVD_OK);
    assert_int_equal(kvd_seq_truncate(p->tiers, seq, len, NULL), KVD_OK);
}

static uint32_t lay_out(pair *p, uint32_t *seq, int32_t *token, uint8_t *want)
{
    const uint32_t first = (uint32_t)kvd_rng_below(&p->rng, N_SEQ);
    const uint32_t most  = 1 + (uint32_t)kvd_rng_below(&p->rng, N_SEQ);
    uint32_t       n     = 0;

    for (uint32_t i = 0; i < N_SEQ && n < most; i++) {
        const uint32_t q = (first + i) % N_SEQ, len = kvd_seq_len(p->all, q);

        if (len == 0 || len == TINY_CTX)
            continue;
        seq[n]     = q;
        want[n]    = 1;
        token[n++] = (int32_t)kvd_rng_below(&p->rng, 256);
    }
    return n;
}

static void steps(pair *p)
{
    uint32_t  seq[N_SEQ];
    int32_t   token[N_SEQ];
    uint8_t   want[N_SEQ];
    kvd_batch b = KVD_BATCH_INIT;

    b.n_token     = lay_out(p, seq, token, want);
    b.token       = token;
    b.seq         = seq;
    b.want_logits = want;
    for (uint32_t n = 1 + (uint32_t)kvd_rng_below(&p->rng, N_STEP_MAX); n > 0 && b.n_token; n--) {
        kvd_err          err = { 0 };
        const kvd_status st  = kvd_eval(p->all, &b, &err);

        if (st == KVD_E_FULL) { /* no room, or a sequence has come to its end */
            assert_int_equal(kvd_eval(p->tiers, &b, &err), KVD_E_FULL);
            return;
        }
        if (st != KVD_OK || kvd_eval(p->tiers, &b, &err) != KVD_OK)
            fail_msg("step of %u rows: %s", b.n_token, err.msg);
        for (uint32_t i = 0; i < b.n_token; i++) {
            same(p, i);
            token[i] = (token[i] * 5 + (int32_t)i + 1) % 256;
        }
    }
}

static void cut(pair *p)
{
    const uint32_t seq = (uint32_t)kvd_rng_below(&p->rng, N_SEQ), len = kvd_seq_len(p->all, seq);
    const uint32_t keep = (uint32_t)kvd_rng_below(&p->rng, 3) ? 0 : len - len / 5;

    assert_int_equal(kvd_seq_truncate(p->all, seq, keep, NULL), KVD_OK);
    assert_int_equal(kvd_seq_truncate(p->tiers, seq, keep, NULL), KVD_OK);
    if (kvd_seq_len(p->tiers, seq) != keep) { /* it could not be cut there: both start anew */
        assert_int_equal(kvd_seq_truncate(p->all, seq, 0, NULL), KVD_OK);
        assert_int_equal(kvd_seq_truncate(p->tiers, seq, 0, NULL), KVD_OK);
    }
}

static void thrash(pair *p)
{
    const uint64_t end = kvd_now_ns() + seconds_ * UINT64_C(1000000000);

    while (kvd_now_ns() < end) {
        switch (kvd_rng_below(&p->rng, 6)) {
        case 0:
        case 1:
            prompt(p);
            break;
        case 2:
            cut(p);
            break;
        default:
            steps(p);
        }
    }
}

static void report(const pair *p)
{
    kvd_stats s = { .struct_size = sizeof(s) };

    kvd_session_get_stats(p->tiers, &s);
    print_message("seed %llu: %llu rows equal; %llu misses fetched, %llu evicted, %llu read from "
                  "disk\n",
                  (unsigned long long)seed_, (unsigned long long)p->n_row,
                  (unsigned long long)s.n_miss, (unsigned long long)s.n_evicted,
                  (unsigned long long)s.n_disk);
    assert_true(p->n_row > 0 && s.n_miss > 0 && s.n_evicted > 0 && (!disk_ || s.n_disk > 0));
}

static void test_thrash(void **state)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_model           *m = open_model();
    kvd_session_params   sp;
    pair                 p   = { 0 };
    kvd_err              err = { 0 };
    char                 dir[256];

    (void)state;
    a.mode   = KVD_ATTENTION_SPARSE;
    a.budget = 96;
    sp       = params(&a);
    kvd_rng_seed(&p.rng, seed_);
    assert_int_equal(kvd_session_open(&p.all, m, &sp, &err), KVD_OK);
    if (disk_)
        dm_dir_make(dir);
    press(m, &sp, disk_ ? dir : NULL);
    if (kvd_session_open(&p.tiers, m, &sp, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    thrash(&p);
    report(&p);
    kvd_session_close(p.tiers);
    kvd_session_close(p.all);
    kvd_model_close(m);
    if (disk_)
        dm_dir_remove(dir);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_thrash) };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0)
            seconds_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--backend") == 0)
            backend_ = argv[i + 1];
        else if (strcmp(argv[i], "--no-disk") == 0)
            disk_ = false;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
