/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_slow_sync.c - a disk that takes its time to sync: who stores units waits for no sync,
 * neither of their bytes nor of the catalogue, until a flush.  fsync() and fdatasync() are this
 * file's, for SQLite as well. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"

#define SYNC_US 20000u
#define PUT_MAX 4000u

static char        dir_[256];
static kvd_rng     rng_;
static int32_t     token_[DM_BLOCK];
static pthread_t   caller_;
static atomic_bool watched_;
static atomic_uint n_by_caller_, n_by_others_;

static int slow_sync(long call, int fd)
{
    if (atomic_load(&watched_)) {
        atomic_fetch_add(pthread_equal(pthread_self(), caller_) ? &n_by_caller_ : &n_by_others_, 1);
        usleep(SYNC_US);
    }
    return (int)syscall(call, fd);
}

int fsync(int fd)
{
    return slow_sync(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    return slow_sync(SYS_fdatasync, fd);
}

static uint64_t log_bytes(void)
{
    struct stat st;
    char        path[512];

    snprintf(path, sizeof(path), "%s/catalog.db-wal", dir_);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

/* Stores blocks until the catalogue's log has been emptied so often. */
static uint32_t put_until(kv_disk *d, uint32_t n_empty)
{
    const dm_unit u = { .kind = KV_DISK_BLOCK };
    uint32_t      n = 0;

    for (uint64_t was = 0, now; n_empty > 0; was = now) {
        kvd_err    err = { 0 };
        kvd_status st;

        token_[0] = (int32_t)n;
        st        = dm_put(d, token_, &u, &rng_, &err);
        assert_true(st == KVD_OK || st == KVD_E_BUSY); /* many are being synced */
        n += st == KVD_OK;
        assert_true(n < PUT_MAX);
        if (st == KVD_E_BUSY)
            usleep(1000);
        kv_disk_poll(d);
        now = log_bytes();
        n_empty -= now < was;
    }
    return n;
}

static void test_nobody_waits(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk_stats  s;
    kv_disk       *d;
    uint32_t       n;
    uint64_t       n_ok, n_bad;

    (void)state;
    p.io.kind = OS_IO_POOL;
    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    atomic_store(&watched_, true);
    n = put_until(d, 3);
    assert_int_equal(atomic_load(&n_by_caller_), 0);
    assert_true(atomic_load(&n_by_others_) > 50);
    atomic_store(&watched_, false);
    assert_int_equal(kv_disk_flush(d, NULL), KVD_OK);
    kv_disk_close(d);
    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    kv_disk_stats_get(d, &s);
    print_message("%u units, %u syncs by others\n", n, atomic_load(&n_by_others_));
    assert_int_equal(s.n_unit, n);
    assert_true(n_ok == n && n_bad == 0);
    kv_disk_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_nobody_waits) };
    int                     n_failed;

    caller_ = pthread_self();
    kvd_rng_seed(&rng_, 1);
    dm_dir_make(dir_);
    n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    dm_dir_remove(dir_);
    return n_failed;
}
