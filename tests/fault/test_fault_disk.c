/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_disk.c - the block store when each allocation, each request to the disk and each
 * operation of the catalogue fails once, or from then on: an error or the right bytes, nothing
 * leaks, and afterwards the store works. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "support/disk_model.h"

#define N_TOKEN (20u * DM_BLOCK)
#define N_MAX   3000

static char    dir_[256];
static int32_t token_[N_TOKEN];

static const dm_unit unit_[] = { { KV_DISK_BLOCK, 0, 0, 0, NULL },
                                 { KV_DISK_SEGMENT, 1, 0, 0, NULL },
                                 { KV_DISK_TAIL, 17, 40, 0, NULL },
                                 { KV_DISK_BLOCK, 17, 0, 1, NULL } };

/* ---- a filesystem under the catalogue that fails when asked to ---------------------- */

typedef struct bad_file {
    sqlite3_file  base;
    sqlite3_file *real; /* behind this struct */
} bad_file;

static sqlite3_vfs        bad_vfs_;
static sqlite3_vfs       *real_vfs_;
static sqlite3_io_methods bad_methods_;
static int64_t            vfs_left_ = -1; /* operations until the failure; -1: never */
static bool               vfs_forever_, vfs_hit_;

static bool vfs_fails(void)
{
    if (vfs_left_ < 0)
        return false;
    if (vfs_left_ > 0) {
        vfs_left_--;
        return false;
    }
    vfs_hit_ = true;
    if (!vfs_forever_)
        vfs_left_ = -1;
    return true;
}

#define REAL(f) ((bad_file *)(f))->real
static int bad_close(sqlite3_file *f)
{
    return REAL(f)->pMethods ? REAL(f)->pMethods->xClose(REAL(f)) : SQLITE_OK;
}
static int bad_read(sqlite3_file *f, void *p, int n, sqlite3_int64 at)
{
    return vfs_fails() ? SQLITE_IOERR_READ : REAL(f)->pMethods->xRead(REAL(f), p, n, at);
}
static int bad_write(sqlite3_file *f, const void *p, int n, sqlite3_int64 at)
{
    return vfs_fails() ? SQLITE_FULL : REAL(f)->pMethods->xWrite(REAL(f), p, n, at);
}
static int bad_truncate(sqlite3_file *f, sqlite3_int64 n)
{
    return vfs_fails() ? SQLITE_IOERR_TRUNCATE : REAL(f)->pMethods->xTruncate(REAL(f), n);
}
static int bad_sync(sqlite3_file *f, int flags)
{
    return vfs_fails() ? SQLITE_IOERR_FSYNC : REAL(f)->pMethods->xSync(REAL(f), flags);
}
static int bad_size(sqlite3_file *f, sqlite3_int64 *n)
{
    return vfs_fails() ? SQLITE_IOERR_FSTAT : REAL(f)->pMethods->xFileSize(REAL(f), n);
}
static int bad_lock(sqlite3_file *f, int level)
{
    return REAL(f)->pMethods->xLock(REAL(f), level);
}
static int bad_unlock(sqlite3_file *f, int level)
{
    return REAL(f)->pMethods->xUnlock(REAL(f), level);
}
static int bad_reserved(sqlite3_file *f, int *out)
{
    return REAL(f)->pMethods->xCheckReservedLock(REAL(f), out);
}
static int bad_control(sqlite3_file *f, int op, void *arg)
{
    return REAL(f)->pMethods->xFileControl(REAL(f), op, arg);
}
static int bad_sector(sqlite3_file *f)
{
    return REAL(f)->pMethods->xSectorSize(REAL(f));
}
static int bad_traits(sqlite3_file *f)
{
    return REAL(f)->pMethods->xDeviceCharacteristics(REAL(f));
}

static int bad_open(sqlite3_vfs *v, const char *name, sqlite3_file *f, int flags, int *out)
{
    bad_file *b = (bad_file *)f;
    int       rc;

    (void)v;
    memset(b, 0, sizeof(*b));
    if (vfs_fails())
        return SQLITE_CANTOPEN;
    b->real = (sqlite3_file *)(b + 1);
    rc      = real_vfs_->xOpen(real_vfs_, name, b->real, flags, out);
    if (rc == SQLITE_OK)
        b->base.pMethods = &bad_methods_;
    return rc;
}

static void vfs_install(void)
{
    real_vfs_ = sqlite3_vfs_find(NULL);
    bad_methods_ =
        (sqlite3_io_methods){ 1,           bad_close,  bad_read,   bad_write,  bad_truncate,
                              bad_sync,    bad_size,   bad_lock,   bad_unlock, bad_reserved,
                              bad_control, bad_sector, bad_traits, NULL,       NULL,
                              NULL,        NULL,       NULL,       NULL };
    bad_vfs_          = *real_vfs_;
    bad_vfs_.zName    = "bad";
    bad_vfs_.xOpen    = bad_open;
    bad_vfs_.szOsFile = real_vfs_->szOsFile + (int)sizeof(bad_file);
    bad_vfs_.pNext    = NULL;
    assert_int_equal(sqlite3_vfs_register(&bad_vfs_, 1), SQLITE_OK);
}

/* ---- the way through the store ---------------------------------------------------- */

/* Stores, finds and reads everything.  Failures are fine, wrong bytes are not. */
static kvd_status whole_way(const kv_disk_params *p, uint64_t *n_known)
{
    kv_disk      *d;
    kv_disk_match m;
    kvd_rng       rng;
    kvd_err       err = { 0 };
    kvd_status    first, st;

    *n_known = 0;
    kvd_rng_seed(&rng, 5);
    first = kv_disk_open(&d, p, &err);
    if (first != KVD_OK) {
        assert_null(d);
        assert_true(err.msg[0] != 0);
        return first;
    }
    for (uint32_t i = 0; i < KVD_COUNTOF(unit_); i++) {
        st    = dm_put(d, token_, &unit_[i], &rng, &err);
        first = first == KVD_OK ? st : first;
        st    = kv_disk_flush(d, &err);
        first = first == KVD_OK ? st : first;
    }
    st = dm_find(d, token_, N_TOKEN, NULL, &m, &err);
    if (st == KVD_OK) {
        *n_known = m.n_token + m.n_tail_token;
        st       = dm_read(d, &m, token_, &rng, true, &err);
        assert_int_not_equal(st, KVD_E_DEVICE);
        kv_disk_match_close(d, &m);
    }
    first = first == KVD_OK ? st : first;
    kv_disk_check(d);
    kv_disk_close(d);
    return first;
}

#define ALL_KNOWN (17u * DM_BLOCK + 40u) /* the tail reaches beyond the last block */

/* Without faults, over whatever the faults have left: everything is right again. */
static void heals(void)
{
    const kv_disk_params p = dm_params(dir_);
    uint64_t             n;

    if (whole_way(&p, &n) != KVD_OK) /* it may have had to quarantine something first */
        assert_int_equal(whole_way(&p, &n), KVD_OK);
    assert_int_equal(n, ALL_KNOWN);
}

static void each_allocation(void **state)
{
    const kv_disk_params p = dm_params(dir_);
    int64_t              n;

    (void)state;
    for (uint32_t forever = 0; forever < 2; forever++) {
        for (n = 0; n < N_MAX; n++) {
            const uint64_t live = kvd_alloc_live();
            uint64_t       n_known;
            kvd_status     st;
            bool           hit;

            dm_dir_empty(dir_);
            kvd_alloc_fault(n, forever);
            st  = whole_way(&p, &n_known);
            hit = kvd_alloc_fault_hit();
            kvd_alloc_fault(-1, false);
            assert_int_equal(kvd_alloc_live(), live);
            if (!hit) {
                assert_int_equal(st, KVD_OK);
                break;
            }
            heals();
        }
        assert_true(n > 40 && n < N_MAX);
        print_message("%d allocations\n", (int)n);
    }
}

static void each_request(void **state)
{
    uint64_t n;

    (void)state;
    for (n = 1; n < N_MAX; n++) {
        os_io_sim      sim = { .seed = n, .fail_nth = n };
        kv_disk_params p   = dm_params(dir_);
        uint64_t       n_known;
        kvd_status     st;

        dm_dir_empty(dir_);
        p.io.kind = OS_IO_SIM;
        p.io.sim  = &sim;
        st        = whole_way(&p, &n_known);
        if (sim.n_fault == 0) {
            assert_int_equal(st, KVD_OK);
            assert_int_equal(n_known, ALL_KNOWN);
            break;
        }
        assert_int_not_equal(st, KVD_OK);
        heals();
    }
    assert_true(n > 20 && n < N_MAX);
    print_message("%d requests\n", (int)n);
}

static void each_catalogue_operation(void **state)
{
    const kv_disk_params p = dm_params(dir_);

    (void)state;
    vfs_install();
    for (uint32_t forever = 0; forever < 2; forever++) {
        int64_t n;

        for (n = 0; n < N_MAX; n++) {
            const uint64_t live = kvd_alloc_live();
            uint64_t       n_known;

            dm_dir_empty(dir_);
            vfs_left_    = n;
            vfs_forever_ = forever;
            vfs_hit_     = false;
            (void)whole_way(&p, &n_known); /* some of them do no harm */
            vfs_left_ = -1;
            assert_int_equal(kvd_alloc_live(), live);
            if (!vfs_hit_)
                break;
            heals();
        }
        assert_true(n > 20 && n < N_MAX);
        print_message("%d catalogue operations\n", (int)n);
    }
    sqlite3_vfs_unregister(&bad_vfs_);
}

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)(i * 7 + i / 5);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dm_dir_remove(dir_);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_allocation),
        cmocka_unit_test(each_request),
        cmocka_unit_test(each_catalogue_operation),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
