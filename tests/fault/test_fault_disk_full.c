/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_disk_full.c - the block store on a filesystem of 3 MiB that fills up: stores pause
 * and say so, what is stored stays readable, and after making room stores go on.
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

#define N_DEPTH 40u

static char    dir_[256];
static int32_t token_[N_DEPTH * DM_BLOCK];

/* Stores sequences until the store refuses; returns how many units it took. */
static uint32_t fill_up(kv_disk *d, kvd_rng *rng, kvd_err *err)
{
    for (uint32_t n = 0; n < 1000; n++) {
        const dm_unit u = { KV_DISK_SEGMENT, 0, 0, 0, NULL };

        token_[0] = (int32_t)n;
        if (dm_put(d, token_, &u, rng, err) != KVD_OK || kv_disk_flush(d, err) != KVD_OK)
            return n;
    }
    return 1000;
}

static uint32_t count_right(kv_disk *d, kvd_rng *rng, uint32_t n)
{
    uint32_t n_right = 0;

    for (uint32_t i = 0; i < n; i++) {
        kv_disk_match m;
        kvd_err       err = { 0 };

        token_[0] = (int32_t)i;
        assert_int_equal(dm_find(d, token_, N_DEPTH * DM_BLOCK, NULL, &m, &err), KVD_OK);
        if (dm_read(d, &m, token_, rng, false, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        n_right += m.n_span > 0;
        kv_disk_match_close(d, &m);
    }
    return n_right;
}

static void a_full_filesystem(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk       *d;
    kv_disk_stats  s;
    kvd_rng        rng;
    kvd_err        err = { 0 };
    uint32_t       n, n_again;

    (void)state;
    kvd_rng_seed(&rng, 1);
    p.pause_ns = UINT64_C(3600000000000);
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    n = fill_up(d, &rng, &err);
    assert_true(n > 2 && n < 1000);
    kv_disk_stats_get(d, &s);
    print_message("%u units, then: %s\n", n, s.pause_text);
    assert_int_equal(s.pause, KV_DISK_PAUSE_FULL);
    assert_true(s.n_pause > 0);
    assert_non_null(strstr(s.pause_text, "No space left"));
    assert_int_equal(count_right(d, &rng, n), n); /* serving goes on */
    kv_disk_check(d);

    const dm_unit more = { KV_DISK_BLOCK, 0, 0, 0, NULL };

    token_[0] = 5000;
    assert_int_equal(dm_put(d, token_, &more, &rng, &err), KVD_E_BUSY); /* the pause lasts */
    kv_disk_close(d);

    p.pause_ns = 1;
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK); /* on the full filesystem */
    assert_int_equal(count_right(d, &rng, n), n);
    assert_int_equal(kv_disk_gc(d, 1, &err), KVD_OK);
    n_again = fill_up(d, &rng, &err); /* SQLite's log takes more room than at first */
    assert_true(n_again > n / 2);
    assert_int_equal(count_right(d, &rng, n_again), n_again);
    kv_disk_check(d);
    kv_disk_close(d);

    p.max_bytes = 1500000; /* with limits there is never a full filesystem */
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    assert_int_equal(kv_disk_gc(d, 0, &err), KVD_OK);
    for (uint32_t i = 0; i < 50; i++) {
        const dm_unit u = { KV_DISK_SEGMENT, 1, 0, 0, NULL };

        token_[0] = (int32_t)i;
        if (dm_put(d, token_, &u, &rng, &err) != KVD_OK || kv_disk_flush(d, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    kv_disk_check(d);
    kv_disk_close(d);
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
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_full_filesystem) };
    int                     n_failed;

    for (uint32_t i = 0; i < N_DEPTH * DM_BLOCK; i++)
        token_[i] = (int32_t)(i * 3);
    dm_dir_make(dir_);
    /* In a namespace of our own, the mount goes with the process. */
    if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvd-test", dir_, "tmpfs", 0, "size=3m,mode=0700") != 0 || !can_write()) {
        perror("skipped: no mount");
        rmdir(dir_);
        return 77;
    }
    n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    umount(dir_);
    rmdir(dir_);
    return n_failed;
}
