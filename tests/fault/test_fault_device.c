/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_device.c - a device that fails for good, at one op after the other of a session with a
 * prefix cache: an error then and from every call from then on, no hang, and a directory that is
 * whole: what others find there gives the text that it always gave. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/split.h"
#include "support/tiny.h"

enum { N_PROMPT = 1900, N_GEN = 300, N_PLACE = SANITIZED ? 6 : 10 };

static kvd_err err;
static char    dir[64];

/* Whether the device has failed in it. */
static kvd_status work(kvd_session *s, uint64_t *hash)
{
    KVD_TRY(tiny_prefill(s, 0, N_PROMPT, &err));
    KVD_TRY(tiny_generate(s, N_GEN, hash, NULL, &err));
    return kvd_session_flush(s, &err);
}

static void refused(kvd_status st)
{
    if (st != KVD_E_DEVICE || !strstr(err.msg, "the device is lost: split: the device has failed"))
        fail_msg("%d: %s", (int)st, err.msg);
}

/* Every call of the interface that works on the device. */
static void check_lost(kvd_session *s, kvd_model *m, const tiny_options *o)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_batch            b = KVD_BATCH_INIT;
    kvd_session         *other;
    kvd_session_params   p = tiny_params(m, o, &a);
    const int32_t        t = 1;

    b.n_token   = 1;
    b.token     = &t;
    p.cache_dir = NULL;
    p.kv_host   = 0;
    refused(kvd_eval(s, &b, &err));
    refused(kvd_prefill(s, 0, &t, 1, NULL, NULL, &err));
    refused(kvd_seq_truncate(s, 0, 0, &err));
    refused(kvd_seq_synthesize(s, 0, 1, &err));
    refused(kvd_session_set_attention(s, &a, &err));
    refused(kvd_session_open(&other, m, &p, &err));
    assert_null(other);
    assert_int_not_equal(kvd_eval(s, &b, NULL), KVD_OK);
    (void)!kvd_session_flush(s, &err); /* nothing may be left to be stored: then it is well */
}

static void check_directory(void)
{
    char *json;

    assert_int_equal(kvd_cache_command(dir, KVD_CACHE_VERIFY, 0, &json, &err), KVD_OK);
    if (!strstr(json, "\"bad\":0"))
        fail_msg("%s", json);
    kvd_free(json);
}

/* A new session, whose device works. */
static void check_text(kvd_model *m, const tiny_options *o, uint64_t want, uint64_t *n_cached)
{
    kvd_stats    c = { .struct_size = sizeof(c) };
    kvd_session *s;
    uint64_t     got = 0;

    assert_int_equal(tiny_session(&s, m, o, &err), KVD_OK);
    if (work(s, &got) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_true(got == want);
    kvd_session_get_stats(s, &c);
    *n_cached = c.n_cached;
    kvd_session_close(s);
}

static uint64_t with_failure(const tiny_options *o, uint64_t at, bool down, uint64_t want)
{
    kvd_model   *m = tiny_model("llama");
    kvd_session *s;
    uint64_t     hash, n_cached;
    kvd_status   st;

    split_begin(m->be);
    assert_int_equal(tiny_session(&s, m, o, &err), KVD_OK);
    split_fail_at(at, down);
    st = work(s, &hash);
    if (st == KVD_OK)
        fail_msg("op %llu does not fail (%d)", (unsigned long long)at, down);
    assert_int_equal(st, KVD_E_DEVICE);
    assert_int_equal(kvd_eval(s, NULL, NULL), KVD_E_INVAL); /* as ever */
    check_lost(s, m, o);
    kvd_session_close(s);
    split_end(m->be);
    kvd_model_close(m);

    check_directory();
    m = tiny_model("llama");
    split_begin(m->be);
    check_text(m, o, want, &n_cached);
    split_end(m->be);
    kvd_model_close(m);
    return n_cached;
}

static void over_all_ops(const tiny_options *o)
{
    kvd_model *m = tiny_model("llama");
    uint64_t   want, again, n_op[2], n_cached, most = 0;

    split_begin(m->be);
    {
        kvd_session *s;

        assert_int_equal(tiny_session(&s, m, o, &err), KVD_OK);
        if (work(s, &want) != KVD_OK)
            fail_msg("%s", err.msg);
        n_op[0] = split_ops_run(false);
        n_op[1] = split_ops_run(true);
        assert_true(n_op[1] > 5 * N_PLACE);
        kvd_session_close(s);
    }
    check_text(m, o, want, &again);
    assert_int_equal(again, N_PROMPT - 1);
    split_end(m->be);
    kvd_model_close(m);
    for (uint32_t i = 0; i < 2 * N_PLACE; i++) {
        const bool     down = i % 2; /* the first copies down are of what the prompt has sealed */
        const uint64_t at   = 1 + (down ? 5 * (i / 2) : n_op[0] * (i / 2) / N_PLACE);

        dm_dir_remove(dir);
        n_cached = with_failure(o, at, down, want);
        most     = n_cached > most ? n_cached : most;
    }
    assert_true(most > 0); /* what was stored before the failure is found */
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/kvd-test-device.XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    dm_dir_remove(dir);
    return 0;
}

static void test_resident(void **state)
{
    (void)state;
    over_all_ops(&(tiny_options){ .dir = dir, .mode = KVD_ATTENTION_SPARSE });
}

static void test_tiers(void **state)
{
    (void)state;
    over_all_ops(&(tiny_options){ .dir = dir, .tiers = true, .mode = KVD_ATTENTION_SPARSE });
}

static void test_disk(void **state)
{
    (void)state;
    over_all_ops(&(tiny_options){
        .dir = dir, .tiers = true, .kv_host = 200000, .mode = KVD_ATTENTION_SPARSE });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_resident, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_tiers, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_disk, make_dir, remove_dir),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
