/* SPDX-License-Identifier: Apache-2.0 */
/* test_restore_held.c - the prefix cache adds to what a sequence holds: at once, in parts, given up
 * in the middle, and where nothing can be read; the text is as ever. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "kv/kv_cache.h"
#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/split.h"
#include "support/tiny.h"

enum { N_VOCAB = 264, N_CTX = 4000, N_BATCH = 96, N_PROMPT = 1700 };

static kvd_err       err;
static char          dir[64];
static bool          over_split; /* the backend works like a GPU's: support/split.h */
static kvd_kv_record record;
static uint64_t      kv_host; /* of sessions with tiers; 0: no limit, so nothing on disk alone */

static kvd_model *open_model(void)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    kvd_model       *m;

    p.path          = KVD_TEST_DATA "/tiny/llama.gguf";
    p.n_thread      = 2;
    p.deterministic = true; /* prompts are cut where the cache ends */
    p.rope_scaling  = KVD_ROPE_LINEAR;
    p.rope_factor   = 64.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    if (over_split)
        split_begin(m->be);
    return m;
}

static void close_model(kvd_model *m)
{
    if (over_split)
        split_end(m->be);
    kvd_model_close(m);
}

static kvd_session_params params_of(kvd_attention_params *a, kvd_attention mode)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;

    *a          = (kvd_attention_params)KVD_ATTENTION_PARAMS_INIT;
    a->mode     = mode;
    a->budget   = 96;
    a->min_mass = -1.0f;
    p.n_ctx     = N_CTX;
    p.n_batch   = N_BATCH;
    p.attention = a;
    p.kv_record = record;
    return p;
}

static kvd_session *open_session(kvd_model *m, kvd_attention mode, uint64_t kv_device)
{
    kvd_attention_params a;
    kvd_session_params   p = params_of(&a, mode);
    kvd_session         *s;

    p.kv_device = kv_device;
    p.cache_dir = dir;
    p.kv_host   = kv_device ? kv_host : 0;
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

/* Enough for tiers, too little to be resident. */
static uint64_t small_device(kvd_model *m)
{
    kvd_attention_params a;
    kvd_session_params   p    = params_of(&a, KVD_ATTENTION_SPARSE);
    kvd_plan             plan = { .struct_size = sizeof(plan) };

    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    return plan.kv_device_bytes - 1;
}

static int make_dir(void **state)
{
    (void)state;
    kv_host = 0;
    record  = KVD_KV_RECORD_SAME;
    snprintf(dir, sizeof(dir), "/tmp/kvd-test-restore.XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    dm_dir_remove(dir);
    return 0;
}

/* Changes a byte in every stretch of the data files. */
static void damage(uint32_t step)
{
    char  path[128];
    FILE *f;

    snprintf(path, sizeof(path), "%s/00000001.kvd", dir);
    f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    for (long at = 5000, end = ftell(f); at < end; at += (long)step) {
        int c;

        fseek(f, at, SEEK_SET);
        c = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(c ^ 0x40, f);
    }
    fclose(f);
}

/* n greedy tokens pushed about; a hash of all logits on the way. */
static uint64_t generate(kvd_session *s, uint32_t n)
{
    uint64_t hash = 1469598103934665603u;

    for (uint32_t i = 0; i < n; i++) {
        const float *l = kvd_logits(s, 0);
        kvd_batch    b = KVD_BATCH_INIT;
        int32_t      t = 0;

        for (size_t k = 0; k < N_VOCAB * sizeof(float); k++)
            hash = (hash ^ ((const uint8_t *)l)[k]) * 1099511628211u; /* FNV-1a */
        for (int32_t k = 1; k < N_VOCAB; k++)
            t = l[k] > l[t] ? k : t;
        t         = (t + (int32_t)(i * 7 % 61)) % 256;
        b.n_token = 1;
        b.token   = &t;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    return hash;
}

/* A prompt of text 0 for a sequence that holds its first tokens. */
static kvd_status go_on(kvd_session *s, uint32_t n, uint64_t slice_ns)
{
    kvd_prompt p = KVD_PROMPT_INIT;
    int32_t   *t = malloc(n * sizeof(*t));
    kvd_status st;

    for (uint32_t i = 0; i < n; i++)
        t[i] = tiny_token(0, i);
    p.token    = t;
    p.n_token  = n;
    p.slice_ns = slice_ns;
    st         = kvd_prompt_begin(s, 0, &p, &err);
    kv_check(s->kv);
    free(t);
    return st;
}

/* The rest of the prompt; then what follows it. */
static uint64_t finish(kvd_session *s)
{
    const uint32_t at = kvd_seq_len(s, 0);
    int32_t        t[N_PROMPT];

    for (uint32_t i = at; i < N_PROMPT; i++)
        t[i - at] = tiny_token(0, i);
    if (kvd_prefill(s, 0, t, N_PROMPT - at, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_check(s->kv);
    return generate(s, 20);
}

/* What a sequence holds: `held` tokens of the prompt, the store asked for none of them. */
static void hold(kvd_session *s, uint32_t held)
{
    kvd_prompt p = KVD_PROMPT_INIT;
    int32_t    t[N_PROMPT];

    for (uint32_t i = 0; i < held; i++)
        t[i] = tiny_token(0, i);
    p.token      = t;
    p.n_token    = held;
    p.skip_cache = true;
    assert_int_equal(kvd_prompt_begin(s, 0, &p, &err), KVD_OK);
    for (uint32_t at = 0; at < held; at += N_BATCH) {
        kvd_batch b = KVD_BATCH_INIT;

        b.n_token = held - at < N_BATCH ? held - at : N_BATCH;
        b.token   = t + at;
        assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
    }
    assert_int_equal(kvd_seq_len(s, 0), held);
}

/* The store adds to what a sequence holds, at once and in parts; given up in the middle the
 * sequence is as it was.  The text is the same in all cases. */
static void adds(kvd_model *m, kvd_attention mode, uint64_t kv_device, uint32_t held, uint64_t want)
{
    kvd_session *s = open_session(m, mode, kv_device);
    kvd_stats    c = { .struct_size = sizeof(c) };
    uint32_t     n = 0;

    hold(s, held);
    assert_int_equal(go_on(s, N_PROMPT, 0), KVD_OK);
    assert_int_equal(kvd_seq_len(s, 0), N_PROMPT - 1);
    kvd_session_get_stats(s, &c);
    assert_int_equal(c.n_cached, N_PROMPT - 1 - held);
    assert_true(finish(s) == want);
    assert_int_equal(kvd_seq_truncate(s, 0, held, &err), KVD_OK);
    assert_int_equal(go_on(s, N_PROMPT, 1), KVD_E_BUSY);
    assert_int_equal(kvd_seq_len(s, 0), held);
    assert_int_equal(kvd_seq_truncate(s, 0, held, &err), KVD_OK); /* given up */
    kv_check(s->kv);
    assert_int_equal(kvd_seq_len(s, 0), held);
    while (go_on(s, N_PROMPT, 1) == KVD_E_BUSY)
        n++;
    assert_true(n > 0);
    assert_int_equal(kvd_seq_len(s, 0), N_PROMPT - 1);
    assert_true(finish(s) == want);
    if (record ==
        KVD_KV_RECORD_SAME) { /* else it attends to packed records, not as a whole prompt */
        assert_int_equal(kvd_seq_truncate(s, 0, held, &err), KVD_OK);
        assert_int_equal(go_on(s, N_PROMPT, 1), KVD_E_BUSY);
        assert_int_equal(kvd_seq_truncate(s, 0, held, &err), KVD_OK);
        assert_true(finish(s) == want);
    }
    kvd_session_close(s);
}

static void add_all(kvd_attention mode)
{
    static const uint32_t held[] = { 1, 200, 257, 424, 767, 1280, 1690 };
    /* packed: what is sealed of more tokens attended to packed records, so it has other bits */
    const uint32_t n_held = record == KVD_KV_RECORD_SAME ? KVD_COUNTOF(held) : 4;
    kvd_model     *m      = open_model();
    const uint64_t small  = small_device(m);
    kvd_session   *s      = open_session(m, mode, 0);
    uint64_t       want;

    want = finish(s);
    kvd_session_close(s);
    for (uint32_t i = 0; i < n_held; i += SANITIZED ? 3 : 1) {
        adds(m, mode, 0, held[i], want);
        adds(m, mode, small, held[i], want);
    }
    kv_host = 30000; /* the rest lies on disk */
    for (uint32_t i = 1; i < n_held; i += 3)
        adds(m, mode, small, held[i], want);
    kv_host = 0;
    close_model(m);
}

static void test_adds_to_what_is_held(void **state)
{
    (void)state;
    add_all(KVD_ATTENTION_SPARSE);
}

static void test_adds_packed(void **state)
{
    (void)state;
    record = KVD_KV_RECORD_INT8;
    add_all(KVD_ATTENTION_SPARSE);
}

static void test_adds_dense(void **state)
{
    (void)state;
    add_all(KVD_ATTENTION_DENSE);
}

/* What is set aside goes when another sequence needs its room; then the prompt is read all the
 * same, or evaluated from what was sealed. */
static void test_others_go_before(void **state)
{
    kvd_model           *m = open_model();
    kvd_attention_params a;
    kvd_session_params   p          = params_of(&a, KVD_ATTENTION_SPARSE);
    kvd_session         *s          = open_session(m, KVD_ATTENTION_SPARSE, 0);
    const uint64_t       want       = finish(s);
    int32_t              t[N_BATCH] = { 0 };
    uint32_t             seq[N_BATCH];
    kvd_batch            b = KVD_BATCH_INIT;

    (void)state;
    kvd_session_close(s);
    p.cache_dir = dir;
    p.n_seq     = 2;
    p.kv_tokens = 8 * KV_BLOCK_TOKENS; /* 7 of them for the prompt */
    for (uint32_t i = 0; i < N_BATCH; i++)
        seq[i] = 1;
    b.n_token = N_BATCH;
    b.token   = t;
    b.seq     = seq;
    for (int gives_up = 0; gives_up < 2; gives_up++) {
        assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
        hold(s, 424); /* 256 sealed, a raw block behind them */
        assert_int_equal(go_on(s, N_PROMPT, 1), KVD_E_BUSY);
        assert_int_equal(kv_restore_n_aside(s->kv), 1);
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(kv_restore_n_aside(s->kv), 0);
        kv_check(s->kv);
        if (gives_up)
            assert_int_equal(kvd_seq_truncate(s, 0, 424, &err), KVD_OK);
        while (!gives_up && go_on(s, N_PROMPT, 1) == KVD_E_BUSY)
            ;
        kv_check(s->kv);
        assert_int_equal(kvd_seq_len(s, 0), gives_up ? 424 : N_PROMPT - 1);
        assert_true(finish(s) == want);
        kvd_session_close(s);
    }
    close_model(m);
}

/* Where nothing can be read a sequence keeps all that it holds, sealed or not. */
static void test_damage_takes_nothing(void **state)
{
    kvd_model     *m     = open_model();
    const uint64_t small = small_device(m);
    uint64_t       want;
    kvd_session   *s;

    (void)state;
    s    = open_session(m, KVD_ATTENTION_SPARSE, 0);
    want = finish(s);
    kvd_session_close(s);
    for (uint32_t i = 0; i < 2; i++) {
        damage(i ? 1370 : 1000); /* what was stored anew, too */
        s = open_session(m, KVD_ATTENTION_SPARSE, i ? small : 0);
        hold(s, 700);
        assert_int_equal(go_on(s, N_PROMPT, 0), KVD_OK);
        assert_int_equal(kvd_seq_len(s, 0), 700);
        assert_true(finish(s) == want);
        kvd_session_close(s);
    }
    close_model(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_adds_to_what_is_held, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_adds_packed, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_adds_dense, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_others_go_before, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_damage_takes_nothing, make_dir, remove_dir),
    };

    over_split = argc == 2 && strcmp(argv[1], "--split") == 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
