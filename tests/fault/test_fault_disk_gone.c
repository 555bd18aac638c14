/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_disk_gone.c - the directory of a block store is removed, replaced or emptied while it
 * is open: nothing is found, counted or stored, the reason is told, and after a while or on demand
 * the store goes on in a new one. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"

#define N_TOKEN  (2u * DM_BLOCK)
#define PAUSE_NS UINT64_C(300000000)

static char     dir_[256], parent_[256];
static int32_t  token_[N_TOKEN];
static kvd_rng  rng_;
static uint32_t n_gone_, n_back_;

static void count_lines(void *ctx, kvd_log_level level, const char *msg)
{
    (void)ctx;
    (void)level;
    n_gone_ += strstr(msg, "the cache directory was removed: nothing is stored or found") != NULL;
    n_back_ += strstr(msg, "the cache directory is back, with 0 units") != NULL;
}

static int setup(void **state)
{
    (void)state;
    dm_dir_make(parent_);
    snprintf(dir_, sizeof(dir_), "%.240s/cache", parent_);
    kvd_rng_seed(&rng_, 1);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)i;
    n_gone_ = n_back_ = 0;
    kvd_set_log(count_lines, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvd_set_log(NULL, NULL);
    dm_dir_remove(dir_);
    dm_dir_remove(parent_);
    return 0;
}

static kvd_status put_block(kv_disk *d, uint32_t block)
{
    const dm_unit u  = { KV_DISK_BLOCK, block, 0, 0, NULL };
    kvd_status    st = dm_put(d, token_, &u, &rng_, NULL);

    return st == KVD_OK ? kv_disk_flush(d, NULL) : st;
}

static kv_disk *open_with_block(void)
{
    kv_disk_params p   = dm_params(dir_);
    kvd_err        err = { 0 };
    kv_disk       *d;

    p.pause_ns = PAUSE_NS;
    if (kv_disk_open(&d, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(put_block(d, 0), KVD_OK);
    return d;
}

static kv_disk_stats stats_of(kv_disk *d)
{
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    return s;
}

static uint64_t known(kv_disk *d)
{
    return dm_known(d, token_, N_TOKEN, &rng_, NULL);
}

static void until_it_looks(kv_disk *d, kv_disk_pause want)
{
    for (uint32_t i = 0; i < 300 && stats_of(d).pause != want; i++) {
        kv_disk_poll(d);
        usleep(10000);
    }
    assert_int_equal(stats_of(d).pause, want);
}

static void is_gone(kv_disk *d)
{
    until_it_looks(d, KV_DISK_PAUSE_GONE);
    assert_int_equal(stats_of(d).n_unit, 0);
    assert_int_equal(stats_of(d).unit_bytes, 0);
    assert_int_equal(known(d), 0);
    assert_int_equal(put_block(d, 1), KVD_E_BUSY);
    assert_non_null(strstr(stats_of(d).pause_text, "the cache directory was removed"));
}

static void goes_on(kv_disk *d)
{
    assert_int_equal(stats_of(d).n_unit, 0);
    assert_int_equal(put_block(d, 0), KVD_OK);
    assert_int_equal(put_block(d, 1), KVD_OK);
    kv_disk_check(d);
    assert_int_equal(known(d), N_TOKEN);
    kv_disk_close(d);
    d = open_with_block(); /* and it is in the directory of that name */
    assert_int_equal(known(d), N_TOKEN);
    kv_disk_close(d);
}

static void removed(void **state)
{
    kv_disk *d = open_with_block();

    (void)state;
    dm_dir_remove(dir_);
    is_gone(d);
    until_it_looks(d, KV_DISK_RUNNING);
    assert_int_equal(n_gone_, 1);
    assert_int_equal(n_back_, 1);
    goes_on(d);
}

static void emptied(void **state)
{
    kv_disk *d = open_with_block();

    (void)state;
    dm_dir_empty(dir_);
    is_gone(d);
    until_it_looks(d, KV_DISK_RUNNING);
    goes_on(d);
}

static void replaced(void **state)
{
    kv_disk *d = open_with_block();
    kvd_err  err;

    (void)state;
    dm_dir_remove(dir_);
    assert_int_equal(mkdir(dir_, 0700), 0);
    assert_int_equal(kv_disk_look(d, &err), KVD_OK); /* on demand */
    goes_on(d);
}

/* Something else has its name, then another process has it. */
static void not_yet_back(void **state)
{
    kv_disk *d = open_with_block();
    kvd_err  err;
    char     lock[300];
    int      fd;

    (void)state;
    dm_dir_remove(dir_);
    fd = open(dir_, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    is_gone(d);
    assert_int_not_equal(kv_disk_look(d, &err), KVD_OK);
    assert_non_null(strstr(err.msg, "is not back"));
    unlink(dir_);
    assert_int_equal(mkdir(dir_, 0700), 0);
    snprintf(lock, sizeof(lock), "%s/lock", dir_);
    fd = open(lock, O_CREAT | O_RDWR, 0600);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_int_equal(kv_disk_look(d, &err), KVD_E_BUSY);
    close(fd);
    assert_int_equal(kv_disk_look(d, &err), KVD_OK);
    goes_on(d);
}

/* What a sequence has found it reads to the end; until then there is no other directory. */
static void in_use(void **state)
{
    kv_disk      *d = open_with_block();
    kv_disk_match m;
    kvd_err       err = { 0 };

    (void)state;
    assert_int_equal(dm_find(d, token_, DM_BLOCK, NULL, &m, &err), KVD_OK);
    assert_int_equal(kv_disk_prepare(d, m.span[0].unit, &err), KVD_OK);
    dm_dir_remove(dir_);
    assert_int_equal(kv_disk_look(d, &err), KVD_E_BUSY);
    assert_non_null(strstr(err.msg, "still read"));
    if (dm_read(d, &m, token_, &rng_, false, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_disk_match_close(d, &m);
    assert_int_equal(kv_disk_look(d, &err), KVD_OK);
    goes_on(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(removed, setup, teardown),
        cmocka_unit_test_setup_teardown(emptied, setup, teardown),
        cmocka_unit_test_setup_teardown(replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(not_yet_back, setup, teardown),
        cmocka_unit_test_setup_teardown(in_use, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
