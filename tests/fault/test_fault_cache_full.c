/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_cache_full.c - the prefix cache of a session is on a filesystem of 3 MiB: when it is
 * full, serving goes on with the same text, and a warning says so.  Where records have nowhere else
 * to go, the prompt is refused, the sequence stays whole, and shorter ones go on.
 * Needs a mount of its own; exit code 77 (skipped) where that is not permitted. */
#define _GNU_SOURCE
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/tiny.h"

#define N_TEXT 10u
#define N_GEN  40u

static char     dir_[256];
static uint32_t n_warning_;
static char     warning_[1024];

static void watch_log(void *ctx, kvd_log_level level, const char *msg)
{
    (void)ctx;
    if (level != KVD_LOG_WARN)
        return;
    n_warning_++;
    snprintf(warning_, sizeof(warning_), "%s", msg);
}

static uint64_t answer(kvd_session *s, uint32_t text)
{
    kvd_err  err  = { 0 };
    uint64_t hash = 0;

    assert_int_equal(kvd_seq_truncate(s, 0, 0, &err), KVD_OK);
    if (tiny_prefill(s, text, 2000, &err) != KVD_OK ||
        tiny_generate(s, N_GEN, &hash, NULL, &err) != KVD_OK)
        fail_msg("text %u: %s", text, err.msg);
    kv_check(s->kv);
    return hash;
}

static void serving_goes_on(void **state)
{
    kvd_model   *m   = tiny_model("llama");
    tiny_options o   = { .mode = KVD_ATTENTION_SPARSE };
    kvd_stats    st  = { .struct_size = sizeof(st) };
    kvd_err      err = { 0 };
    kvd_session *plain, *cached;

    (void)state;
    assert_int_equal(tiny_session(&plain, m, &o, &err), KVD_OK);
    o.dir = dir_;
    for (uint32_t round = 0; round < 2; round++) { /* the second opens on a full filesystem */
        n_warning_ = 0;
        if (tiny_session(&cached, m, &o, &err) != KVD_OK)
            fail_msg("round %u: %s", round, err.msg);
        for (uint32_t i = 0; i < N_TEXT; i++)
            assert_true(answer(cached, i) == answer(plain, i));
        kvd_session_get_stats(cached, &st);
        kvd_session_close(cached);
        print_message("%llu units refused, %llu bytes stored, %u warnings; the last: %s\n",
                      (unsigned long long)st.n_disk_refused, (unsigned long long)st.disk_put_bytes,
                      n_warning_, warning_);
        assert_true(st.n_disk_refused > 0);
        assert_true(n_warning_ > 0 && n_warning_ < 40);
        assert_non_null(strstr(warning_, "not stored"));
        assert_null(strstr(warning_, "not stored: not stored"));
        assert_true(round == 1 || st.disk_put_bytes > 500000);
    }
    kvd_session_close(plain);
    kvd_model_close(m);
}

/* The disk is the only place for what the host tier does not hold. */
static void nowhere_to_go(void **state)
{
    kvd_model   *m     = tiny_model("llama");
    tiny_options o     = { .mode = KVD_ATTENTION_SPARSE };
    kvd_err      err   = { 0 };
    uint32_t     n_bad = 0;
    kvd_session *plain, *spills;

    (void)state;
    dm_dir_empty(dir_);
    assert_int_equal(tiny_session(&plain, m, &o, &err), KVD_OK);
    o.dir     = dir_;
    o.tiers   = true;
    o.kv_host = 60000;
    if (tiny_session(&spills, m, &o, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    for (uint32_t i = 0; i < N_TEXT; i++) {
        uint64_t hash;

        assert_int_equal(kvd_seq_truncate(spills, 0, 0, &err), KVD_OK);
        if (tiny_prefill(spills, i, 2000, &err) != KVD_OK) {
            assert_int_equal(err.code, KVD_E_FULL);
            assert_non_null(strstr(err.msg, "(kv_host)"));
            assert_int_equal(kvd_seq_len(spills, 0), 0);
            kv_check(spills->kv);
            assert_int_equal(tiny_prefill(spills, i, 200, &err), KVD_OK); /* nothing to seal */
            n_bad++;
            continue;
        }
        if (tiny_generate(spills, N_GEN, &hash, NULL, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        assert_true(hash == answer(plain, i));
    }
    assert_true(n_bad > 0 && n_bad < N_TEXT);
    kvd_session_close(spills);
    kvd_session_close(plain);
    kvd_model_close(m);
}

/* In a namespace of a user who is nobody there, a mount may be there and closed to us. */
static bool can_write(void)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/probe", dir_);
    return os_file_replace(path, "x", 1, NULL) == KVD_OK && unlink(path) == 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(serving_goes_on),
                                        cmocka_unit_test(nowhere_to_go) };
    int                     n_failed;

    dm_dir_make(dir_);
    /* In a namespace of our own, the mount goes with the process. */
    if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvd-test", dir_, "tmpfs", 0, "size=3m,mode=0700") != 0 || !can_write()) {
        perror("skipped: no mount");
        rmdir(dir_);
        return 77;
    }
    kvd_set_log(watch_log, NULL);
    n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvd_set_log(NULL, NULL);
    umount(dir_);
    rmdir(dir_);
    return n_failed;
}
