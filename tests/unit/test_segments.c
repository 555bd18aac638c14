/* SPDX-License-Identifier: Apache-2.0 */
/* test_segments.c - prompts that are cut into segments: the bits of prompts given segment by
 * segment, wherever the KV cache lies, and of the whole where records are what the device has; and
 * what contexts of up to a million tokens take by plan.
 * usage: test_segments [--backend NAME] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "support/disk_model.h"
#include "support/split.h"
#include "support/tiers.h"
#include "support/tiny.h"

enum { N_SEGMENT = 6 * N_BATCH, N_LONG = 3 * N_SEGMENT + 70, N_STEP = 20 };

static kvd_err err;

static int32_t *text_of(uint32_t text, uint32_t n)
{
    int32_t *t = malloc(n * sizeof(*t));

    for (uint32_t i = 0; i < n; i++)
        t[i] = tiny_token(text, i);
    return t;
}

/* by_hand: segment by segment, each a prompt of its own. */
static void prefill(kvd_session *s, const int32_t *t, uint32_t n, bool by_hand)
{
    for (uint32_t done = 0, m; done < n; done += m) {
        m = by_hand && n - done > N_SEGMENT ? N_SEGMENT : n - done;
        if (kvd_prefill(s, 0, t + done, m, NULL, NULL, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    kv_check(s->kv);
}

/* The same logits after the prompt and in steps. */
static void go_on_alike(kvd_session *a, kvd_session *b)
{
    tiers_same_logits(a, b, 0);
    for (uint32_t i = 0; i < N_STEP; i++) {
        const int32_t token = tiers_next_token(a, 0, i);

        tiers_step(a, &token, 1);
        tiers_step(b, &token, 1);
        tiers_same_logits(a, b, 0);
    }
}

static void cut_alike(kvd_model *m, const kvd_attention_params *a)
{
    int32_t *t = text_of(0, N_LONG);

    for (int spread = 0; spread < 2; spread++) {
        kvd_session *cut = tiers_session(m, a, 1, spread), *hand = tiers_session(m, a, 1, false);

        cut->n_segment = N_SEGMENT;
        prefill(cut, t, N_LONG, false);
        prefill(hand, t, N_LONG, true);
        go_on_alike(hand, cut);
        assert_int_equal(kvd_seq_truncate(cut, 0, 900, &err), KVD_OK); /* over what is held */
        assert_int_equal(kvd_seq_truncate(hand, 0, 900, &err), KVD_OK);
        prefill(cut, t, N_SEGMENT + 300, false);
        prefill(hand, t, N_SEGMENT + 300, true);
        go_on_alike(hand, cut);
        kvd_session_close(cut);
        kvd_session_close(hand);
    }
    free(t);
}

static void whole_alike(kvd_model *m, const kvd_attention_params *a)
{
    kvd_session *cut = tiers_session(m, a, 1, true), *whole = tiers_session(m, a, 1, false);
    int32_t     *t = text_of(0, N_LONG);

    assert_true(whole->n_segment >= N_LONG);
    cut->n_segment = N_SEGMENT;
    prefill(cut, t, N_LONG, false);
    prefill(whole, t, N_LONG, false);
    go_on_alike(whole, cut);
    kvd_session_close(cut);
    kvd_session_close(whole);
    free(t);
}

static void on_model(kvd_model *m, const char *where)
{
    kvd_attention_params a = tiers_sparse(96, 2.0f), d = KVD_ATTENTION_PARAMS_INIT;

    print_message("%s\n", where);
    d.mode = KVD_ATTENTION_DENSE;
    whole_alike(m, &a);
    whole_alike(m, &d);
    cut_alike(m, &a);
    tiers.record = KVD_KV_RECORD_INT8;
    cut_alike(m, &a);
    tiers.record = KVD_KV_RECORD_SAME;
}

static void test_cut(void **state)
{
    kvd_model *m = tiers_model("qwen3", tiers.backend);

    (void)state;
    on_model(m, tiers.backend);
    kvd_model_close(m);
}

static void test_cut_split(void **state)
{
    kvd_model *m = tiers_model("llama", "cpu");

    (void)state;
    split_begin(m->be);
    on_model(m, "memory of its own");
    split_end(m->be);
    kvd_model_close(m);
}

/* ---- progress and failures ------------------------------------------------------------------ */

typedef struct watch {
    size_t n_call, last, n_token, stop; /* stop: from here on canceled */
} watch;

static bool on_progress(void *ctx, size_t done, size_t n_token)
{
    watch *w = ctx;

    assert_true(done >= w->last && done <= n_token && (w->n_call++ > 0 || done == 0));
    w->last    = done;
    w->n_token = n_token;
    return done < w->stop;
}

/* One count over all segments; canceled in the second one nothing of the first is left. */
static void test_progress(void **state)
{
    kvd_attention_params a = tiers_sparse(96, 2.0f);
    kvd_model           *m = tiers_model("qwen3", tiers.backend);
    kvd_session         *s = tiers_session(m, &a, 1, true), *r = tiers_session(m, &a, 1, false);
    int32_t             *t = text_of(0, N_LONG);
    watch                w = { .stop = N_SEGMENT + 200 };

    (void)state;
    s->n_segment = N_SEGMENT;
    assert_int_equal(kvd_prefill(s, 0, t, N_LONG, on_progress, &w, &err), KVD_E_CANCELED);
    assert_true(w.last >= N_SEGMENT + 200 && w.last < 2 * N_SEGMENT);
    assert_int_equal(w.n_token, N_LONG);
    assert_int_equal(kvd_seq_len(s, 0), 0);
    kv_check(s->kv);
    w = (watch){ .stop = SIZE_MAX };
    assert_int_equal(kvd_prefill(s, 0, t, N_LONG, on_progress, &w, &err), KVD_OK);
    assert_int_equal(w.last, N_LONG);
    prefill(r, t, N_LONG, false);
    go_on_alike(r, s);
    kvd_session_close(s);
    kvd_session_close(r);
    kvd_model_close(m);
    free(t);
}

/* ---- below the host tier -------------------------------------------------------------------- */

static kvd_session *open_spilling(kvd_model *m, const kvd_attention_params *a, const char *dir)
{
    kvd_session_params p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    kvd_session       *s;

    p.n_ctx     = N_CTX;
    p.n_batch   = N_BATCH;
    p.attention = a;
    p.cache_dir = dir;
    p.kv_host   = 200 << 10;
    tiny_least_device(m, &p);
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    assert_true(plan.kv_spills);
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

/* Earlier segments come up from host and disk. */
static void test_spilling(void **state)
{
    kvd_attention_params a = tiers_sparse(96, 2.0f);
    char                 dir[256];
    kvd_model           *m;
    int32_t             *t = text_of(0, N_LONG);

    (void)state;
    tiers.deterministic = true; /* with a prefix cache prompts are cut before their last token */
    for (int split = 0; split < 2; split++) {
        kvd_session *s, *r;
        kvd_stats    c = { .struct_size = sizeof(c) };

        m = tiers_model("qwen3", split ? "cpu" : tiers.backend);
        if (split)
            split_begin(m->be);
        dm_dir_make(dir);
        s            = open_spilling(m, &a, dir);
        r            = tiers_session(m, &a, 1, false);
        s->n_segment = N_SEGMENT;
        prefill(s, t, N_LONG, false);
        prefill(r, t, N_LONG, false);
        kvd_session_get_stats(s, &c);
        assert_true(c.disk_read_bytes > 0);
        go_on_alike(r, s);
        kvd_session_close(s);
        kvd_session_close(r);
        if (split)
            split_end(m->be);
        kvd_model_close(m);
        dm_dir_remove(dir);
    }
    tiers.deterministic = false;
    free(t);
}

/* ---- what long contexts take ---------------------------------------------------------------- */

enum { GIB_SHIFT = 30, WEIGHTS_GIB = 8, CARD_GIB = 24 };

static kvd_plan plan_of(kvd_model *m, uint32_t n_ctx, const char *dir)
{
    kvd_attention_params a    = tiers_sparse(4096, 2.0f);
    kvd_session_params   p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan             plan = { .struct_size = sizeof(plan) };

    p.n_ctx     = n_ctx;
    p.attention = &a;
    p.kv_record = KVD_KV_RECORD_INT8;
    p.cache_dir = dir;
    p.kv_host   = dir ? 48ull << GIB_SHIFT : 0;
    if (kvd_session_plan(m, &p, &plan, &err) != KVD_OK)
        fail_msg("%u tokens: %s", n_ctx, err.msg);
    assert_true(!plan.kv_resident && plan.kv_spills == (dir != NULL));
    return plan;
}

/* Llama-3-8B in 8 bits on a card of 24 GiB, half a gibibyte of it the driver's and as much scratch
 * of ops, which this backend does not need: a million tokens fit.  What is kept beside stage, index
 * and maps does not grow with the context. */
static void test_long_plans(void **state)
{
    kvd_model   *m   = tiers_model("llama", "cpu");
    model *const own = m->net;
    kvd_plan     half, all;

    (void)state;
    if (model_open_shape(&m->net, "llama-3-8b", "q8_0", &err) != KVD_OK) /* nothing is placed */
        fail_msg("%s", err.msg);
    split_begin(m->be);
    m->device_memory = (uint64_t)(CARD_GIB - WEIGHTS_GIB - 1) << GIB_SHIFT;
    half             = plan_of(m, (1u << 19) + 1200, NULL);
    all              = plan_of(m, (1u << 20) + 1200, "/nowhere");
    assert_true(half.weight_bytes >> GIB_SHIFT == WEIGHTS_GIB - 1);
    assert_true(half.kv_host_bytes >> GIB_SHIFT == 32 && all.kv_host_bytes >> GIB_SHIFT == 48);
    assert_true(all.device_bytes - all.kv_device_bytes <= half.device_bytes - half.kv_device_bytes);
    split_end(m->be);
    model_close(m->net);
    m->net = own;
    kvd_model_close(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut),        cmocka_unit_test(test_cut_split),
        cmocka_unit_test(test_progress),   cmocka_unit_test(test_spilling),
        cmocka_unit_test(test_long_plans),
    };

    if (argc == 3 && strcmp(argv[1], "--backend") == 0)
        tiers.backend = argv[2];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
