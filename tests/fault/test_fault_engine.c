/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_engine.c - every allocation fails once, from opening the file to the last token.
 *
 * After each failure everything is closed and the heap must hold what it held before.  Allocations
 * inside evaluation cannot occur: the guard would assert. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/tiny.h"

#define N_MAX 20000

static char dir_[256];

/* The whole way; returns what the failing step returned. */
static kvd_status whole_way(const char *path, const char *backend, kvd_err *err)
{
    static const char      text[] = "Hello, <|im_start|> world 123";
    static const kvd_span  none   = { 0, 0 };
    kvd_model_params       p      = KVD_MODEL_PARAMS_INIT;
    kvd_session_params     sp     = KVD_SESSION_PARAMS_INIT;
    kvd_sampler_params     smp    = KVD_SAMPLER_PARAMS_INIT;
    const kvd_chat_request chat   = { .struct_size   = sizeof(chat),
                                      .messages_json = "[{\"role\":\"user\",\"content\":\"x\"}]",
                                      .add_generation_prompt = true };
    kvd_model             *m      = NULL;
    kvd_session           *s      = NULL;
    kvd_sampler           *sm     = NULL;
    kvd_detok             *d      = NULL;
    char                  *out    = NULL;
    kvd_span              *spans  = NULL;
    size_t                 n = 0, n_span = 0;
    int32_t                id[64];
    kvd_status             st;

    p.path     = path;
    p.backend  = backend;
    p.n_thread = 2;
    sp.n_ctx   = 64;

    sp.n_parked = 1;
    st          = kvd_model_open(&m, &p, err);
    if (st != KVD_OK &&
        (strncmp(err->msg, path, strlen(path)) != 0 || err->msg[strlen(path)] != ':'))
        fail_msg("'%s' does not name %s", err->msg, path);
    if (st == KVD_OK)
        st = kvd_tokenize(m, text, strlen(text), &none, 1, true, id, 64, &n, err);
    if (st == KVD_OK) {
        st = kvd_chat_render(m, &chat, &out, NULL, &spans, &n_span, err);
        st = st == KVD_E_UNSUPPORTED ? KVD_OK : st; /* the tiny models have no template */
    }
    if (st == KVD_OK)
        st = kvd_session_open(&s, m, &sp, err);
    if (st == KVD_OK)
        st = kvd_sampler_open(&sm, m, &smp, err);
    if (st == KVD_OK)
        st = kvd_detok_open(&d, m, err);
    if (st == KVD_OK)
        st = kvd_prefill(s, 0, id, n, NULL, NULL, err);
    for (int i = 0; st == KVD_OK && i < 3; i++) {
        kvd_batch b = KVD_BATCH_INIT;

        id[0]     = kvd_sampler_sample(sm, kvd_logits(s, 0));
        b.n_token = 1;
        b.token   = id;
        (void)kvd_detok_feed(d, id[0], true, NULL);
        st = kvd_eval(s, &b, err);
    }
    kvd_free(out);
    kvd_free(spans);
    kvd_detok_close(d);
    kvd_sampler_close(sm);
    kvd_session_close(s);
    kvd_model_close(m);
    return st;
}

static void fail_each(const char *name, const char *backend)
{
    char    path[512];
    kvd_err err;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    for (int n = 0; n < N_MAX; n++) {
        const uint64_t live = kvd_alloc_live();
        kvd_status     st;
        bool           hit;

        memset(&err, 0, sizeof(err));
        kvd_alloc_fault(n, false);
        st  = whole_way(path, backend, &err);
        hit = kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        if (kvd_alloc_live() != live)
            fail_msg("%s: %d blocks leaked when allocation %d failed", name,
                     (int)(kvd_alloc_live() - live), n);
        if (!hit) {
            assert_int_equal(st, KVD_OK);
            print_message("%s on %s: %d allocations, each failed once\n", name, backend, n);
            return;
        }
        if (st != KVD_E_NOMEM || err.code != KVD_E_NOMEM || !err.msg[0])
            fail_msg("%s: allocation %d failed, got %s '%s'", name, n, kvd_status_name(st),
                     err.msg);
    }
    fail_msg("%d allocations were not enough", N_MAX);
}

/* A session whose KV cache spills to disk is opened whole or not at all. */
static void test_each_allocation_of_tiers(void **state)
{
    const tiny_options o = {
        .dir = dir_, .tiers = true, .kv_host = 60000, .mode = KVD_ATTENTION_SPARSE
    };
    kvd_model   *m   = tiny_model("llama");
    kvd_err      err = { 0 };
    kvd_session *s;

    (void)state;
    dm_dir_make(dir_);
    assert_int_equal(tiny_session(&s, m, &o, &err), KVD_OK); /* what the model keeps from then on */
    kvd_session_close(s);
    for (int n = 0; n < N_MAX; n++) {
        const uint64_t live = kvd_alloc_live();
        kvd_status     st;
        bool           hit;

        s = NULL;
        kvd_alloc_fault(n, false);
        st  = tiny_session(&s, m, &o, &err);
        hit = kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        assert_true(hit || st == KVD_OK);
        kvd_session_close(s);
        if (kvd_alloc_live() != live)
            fail_msg("%d blocks leaked when allocation %d failed: %s",
                     (int)(kvd_alloc_live() - live), n, err.msg);
        if (!hit) {
            print_message("a session on disk: %d allocations, each failed once\n", n);
            break;
        }
        assert_true(st == KVD_E_NOMEM || st == KVD_OK); /* a cache goes on without some of them */
    }
    dm_dir_remove(dir_);
    kvd_model_close(m);
}

static void test_each_allocation(void **state)
{
    (void)state;
    fail_each("llama", "ref");
    fail_each("qwen3", "cpu");
    fail_each("phi3-longrope", "cpu");
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_each_allocation),
                                        cmocka_unit_test(test_each_allocation_of_tiers) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
