/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_disk_catalog.c - a catalogue that SQLite takes for a good one and that contradicts
 * itself, or acts by itself: the block store opens, finds no wrong bytes, and stores again, at the
 * latest when it is opened once more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "support/disk_model.h"

#define N_TOKEN (4u * DM_BLOCK)

static char    dir_[256];
static int32_t token_[N_TOKEN];
static kvd_rng rng_;

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    kvd_rng_seed(&rng_, 1);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)i;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dm_dir_remove(dir_);
    return 0;
}

static kv_disk *open_store(void)
{
    const kv_disk_params p   = dm_params(dir_);
    kvd_err              err = { 0 };
    kv_disk             *d;

    if (kv_disk_open(&d, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_disk_check(d);
    return d;
}

static kvd_status put_block(kv_disk *d, uint32_t block)
{
    const dm_unit u  = { KV_DISK_BLOCK, block, 0, 0, NULL };
    kvd_status    st = dm_put(d, token_, &u, &rng_, NULL);

    return st == KVD_OK ? kv_disk_flush(d, NULL) : st;
}

static uint64_t known(kv_disk *d)
{
    kvd_err        err = { 0 };
    const uint64_t n   = dm_known(d, token_, N_TOKEN, &rng_, &err);

    assert_int_not_equal(err.code, KVD_E_DEVICE); /* a wrong byte */
    return n;
}

/* A store of two blocks, whose catalogue is changed then. */
static void make_store(const char *change)
{
    kv_disk *d = open_store();
    sqlite3 *db;
    char     path[300], *why = NULL;

    assert_int_equal(put_block(d, 0), KVD_OK);
    assert_int_equal(put_block(d, 1), KVD_OK);
    kv_disk_close(d);
    snprintf(path, sizeof(path), "%s/catalog.db", dir_);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    if (sqlite3_exec(db, change, NULL, NULL, &why) != SQLITE_OK)
        fail_msg("%s", why);
    sqlite3_close(db);
}

/* Numbers of files that come in another order than theirs, as from a damaged index: text lies
 * behind numbers in a column without a type. */
static void files_out_of_order(void **state)
{
    kv_disk *d;

    (void)state;
    make_store("CREATE TABLE u AS SELECT * FROM unit; DROP TABLE unit;"
               "CREATE TABLE unit(id INTEGER PRIMARY KEY, key, parent, model, kind, bad,"
               " first_token, n_token, ordered, file, off, bytes, salt, provenance, sums_hash,"
               " row_hash, used, created, seed);"
               "INSERT INTO unit SELECT * FROM u; DROP TABLE u;"
               "UPDATE unit SET file = 7 WHERE id = 1;"
               "UPDATE unit SET file = '1' WHERE id = 2;");
    d = open_store();
    assert_int_equal(known(d), 0);
    assert_int_equal(put_block(d, 0), KVD_OK);
    assert_int_equal(put_block(d, 1), KVD_OK);
    kv_disk_check(d);
    assert_int_equal(known(d), 2 * DM_BLOCK);
    kv_disk_close(d);
}

static void triggers_do_nothing(void **state)
{
    kv_disk *d;

    (void)state;
    make_store("CREATE TRIGGER t AFTER INSERT ON name BEGIN DELETE FROM unit; END");
    d = open_store();
    assert_int_equal(put_block(d, 2), KVD_OK);
    kv_disk_check(d);
    assert_int_equal(known(d), 3 * DM_BLOCK);
    kv_disk_close(d);
}

/* Tokens of a unit that there is not have the number of the next one: nothing can be stored, so the
 * next open begins anew. */
static void rows_that_collide(void **state)
{
    kv_disk *d;

    (void)state;
    make_store("INSERT INTO token SELECT max(id) + 1, x'00' FROM unit");
    d = open_store();
    assert_int_equal(known(d), 2 * DM_BLOCK);
    assert_int_equal(kv_disk_verify_catalog(d, NULL), KVD_OK);
    assert_int_not_equal(put_block(d, 2), KVD_OK);
    assert_int_equal(kv_disk_verify_catalog(d, NULL), KVD_E_CORRUPT);
    kv_disk_close(d);
    d = open_store();
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(put_block(d, i), KVD_OK);
    assert_int_equal(known(d), 3 * DM_BLOCK);
    kv_disk_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(files_out_of_order, setup, teardown),
        cmocka_unit_test_setup_teardown(triggers_do_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(rows_that_collide, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
