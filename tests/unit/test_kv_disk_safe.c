/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_disk_safe.c - the block store's directory is its owner's alone: modes whatever the umask
 * says, directories of others refused, and nothing behind a symbolic link is read, written or
 * removed. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"

#define N_TOKEN (4u * DM_BLOCK)
#define VICTIM  "what must stay as it is"

static char    dir_[256], outside_[256];
static int32_t token_[N_TOKEN];
static kvd_rng rng_;

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    dm_dir_make(outside_);
    kvd_rng_seed(&rng_, 1);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)i;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)umask(022);
    chmod(dir_, 0700);
    dm_dir_remove(dir_);
    dm_dir_remove(outside_);
    return 0;
}

static kvd_status open_at(kv_disk **d, const char *dir, kvd_err *err)
{
    const kv_disk_params p = dm_params(dir);

    return kv_disk_open(d, &p, err);
}

static void put_block(kv_disk *d, uint32_t block)
{
    const dm_unit u   = { KV_DISK_BLOCK, block, 0, 0, NULL };
    kvd_err       err = { 0 };

    if (dm_put(d, token_, &u, &rng_, &err) != KVD_OK || kv_disk_flush(d, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

static uint64_t known(kv_disk *d)
{
    kvd_err        err = { 0 };
    const uint64_t n   = dm_known(d, token_, N_TOKEN, &rng_, &err);

    assert_int_not_equal(err.code, KVD_E_DEVICE); /* a wrong byte */
    return n;
}

static void check_mode(void *ctx, const char *name)
{
    struct stat st;
    char        path[600];

    (*(uint32_t *)ctx)++;
    snprintf(path, sizeof(path), "%s/%s", dir_, name);
    assert_int_equal(lstat(path, &st), 0);
    if (!S_ISREG(st.st_mode) || (st.st_mode & 07777) != 0600)
        fail_msg("%s has mode %o", name, (unsigned)st.st_mode);
}

/* ---- modes -------------------------------------------------------------------------- */

static void modes_whatever_the_umask(void **state)
{
    static const mode_t mask[] = { 0, 022, 0177, 0777 };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(mask); i++) {
        char        sub[300];
        struct stat st;
        kv_disk    *d;
        kvd_err     err = { 0 };
        uint32_t    n   = 0;

        (void)umask(mask[i]);
        snprintf(sub, sizeof(sub), "%s/new", dir_);
        if (open_at(&d, sub, &err) != KVD_OK)
            fail_msg("umask %o: %s", (unsigned)mask[i], err.msg);
        kv_disk_close(d);
        assert_int_equal(stat(sub, &st), 0);
        assert_int_equal(st.st_mode & 07777, 0700);
        dm_dir_remove(sub);

        if (open_at(&d, dir_, &err) != KVD_OK)
            fail_msg("umask %o: %s", (unsigned)mask[i], err.msg);
        put_block(d, 0);
        assert_int_equal(os_dir_list(dir_, check_mode, &n, NULL), KVD_OK);
        assert_true(n >= 4); /* lock, catalog.db, its log, data */
        kv_disk_close(d);
        (void)umask(022);
        dm_dir_empty(dir_);
    }
}

static void older_modes_are_closed(void **state)
{
    static const char *const name[] = { "lock", "catalog.db", "00000001.kvd" };
    kv_disk                 *d;
    char                     path[600];
    uint32_t                 n = 0;

    (void)state;
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    put_block(d, 0);
    kv_disk_close(d);
    for (uint32_t i = 0; i < KVD_COUNTOF(name); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir_, name[i]);
        assert_int_equal(chmod(path, 0666), 0);
    }
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    assert_int_equal(known(d), DM_BLOCK);
    assert_int_equal(os_dir_list(dir_, check_mode, &n, NULL), KVD_OK);
    kv_disk_close(d);
}

/* ---- whose directory ------------------------------------------------------------------ */

static void shared_directory_is_refused(void **state)
{
    static const mode_t bad[] = { 0770, 0702, 01777, 0720 }, good[] = { 0700, 0755, 0750 };
    kv_disk            *d;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(bad); i++) {
        kvd_err err = { 0 };

        assert_int_equal(chmod(dir_, bad[i]), 0);
        assert_int_equal(open_at(&d, dir_, &err), KVD_E_INVAL);
        assert_non_null(strstr(err.msg, dir_));
        assert_non_null(strstr(err.msg, "others may write to it"));
        assert_int_equal(rmdir(dir_), 0); /* nothing was made in it */
        assert_int_equal(mkdir(dir_, 0700), 0);
    }
    for (uint32_t i = 0; i < KVD_COUNTOF(good); i++) {
        assert_int_equal(chmod(dir_, good[i]), 0);
        assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
        kv_disk_close(d);
    }
}

static void others_directory_is_refused(void **state)
{
    kv_disk *d;
    kvd_err  err = { 0 };

    (void)state;
    if (geteuid() != 0)
        skip(); /* only root can make one */
    assert_int_equal(chown(dir_, 12345, 12345), 0);
    assert_int_equal(open_at(&d, dir_, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "belongs to user 12345"));
    assert_int_equal(chown(dir_, 0, 0), 0);
}

/* ---- symbolic links -------------------------------------------------------------------- */

static void victim_path(char out[600])
{
    snprintf(out, 600, "%s/victim", outside_);
}

static void plant(const char *name)
{
    char  at[600], victim[600];
    FILE *f;

    victim_path(victim);
    f = fopen(victim, "w");
    assert_non_null(f);
    fputs(VICTIM, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(victim, 0644), 0);
    snprintf(at, sizeof(at), "%s/%s", dir_, name);
    unlink(at);
    assert_int_equal(symlink(victim, at), 0);
}

static void victim_is_untouched(void)
{
    char        path[600], text[100] = "";
    struct stat st;
    FILE       *f;

    victim_path(path);
    f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    fclose(f);
    assert_string_equal(text, VICTIM);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0644);
}

/* A store is made, a link comes in a file's place, and the store is opened again. */
static void links_are_refused(void **state)
{
    static const char *const name[] = { "lock", "catalog.db", "catalog.db-wal", "catalog.db-shm",
                                        "catalog.db-journal" };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(name); i++) {
        kvd_err  err = { 0 };
        kv_disk *d;

        assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
        put_block(d, 0);
        kv_disk_close(d);
        plant(name[i]);
        assert_int_equal(open_at(&d, dir_, &err), KVD_E_IO);
        assert_non_null(strstr(err.msg, name[i]));
        assert_non_null(strstr(err.msg, "symbolic link"));
        victim_is_untouched();
        dm_dir_empty(dir_);
    }
}

/* These do no harm: what they stand for counts as not there. */
static void links_are_dropped(void **state)
{
    static const char *const name[] = { "damaged", "catalog.bad", "catalog.bad-wal", "00000001.kvd",
                                        "00000002.kvd" };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(name); i++) {
        const bool data = strcmp(name[i], "00000001.kvd") == 0;
        kv_disk   *d;

        assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
        put_block(d, 0);
        kv_disk_close(d);
        plant(name[i]);
        assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
        assert_int_equal(known(d), data ? 0 : DM_BLOCK);
        if (data)
            put_block(d, 0);
        put_block(d, 1);
        assert_int_equal(known(d), 2 * DM_BLOCK);
        kv_disk_check(d);
        kv_disk_close(d);
        victim_is_untouched();
        dm_dir_empty(dir_);
    }
}

/* The database is damaged, and links lie where it is put aside to. */
static void links_where_damage_goes(void **state)
{
    kv_disk *d;
    char     path[600];
    FILE    *f;

    (void)state;
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    kv_disk_close(d);
    snprintf(path, sizeof(path), "%s/catalog.db", dir_);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs("no database at all, but long enough to be looked at as one: ......................", f);
    fclose(f);
    plant("damaged");
    plant("catalog.bad");
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    put_block(d, 0);
    assert_int_equal(known(d), DM_BLOCK);
    kv_disk_close(d);
    victim_is_untouched();
}

/* While the store is open: what it opens next is not followed either. */
static void links_while_open(void **state)
{
    kv_disk *d;

    (void)state;
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    put_block(d, 0);
    assert_int_equal(known(d), DM_BLOCK);
    plant("00000001.kvd");
    assert_int_equal(known(d), 0);
    victim_is_untouched();
    kv_disk_close(d);
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    put_block(d, 0);
    assert_int_equal(known(d), DM_BLOCK);
    kv_disk_close(d);
    victim_is_untouched();
}

/* The way to the directory is its owner's business; no pipe is waited for. */
static void link_to_the_directory(void **state)
{
    char     link[300], fifo[600];
    kv_disk *d;
    kvd_err  err = { 0 };

    (void)state;
    snprintf(link, sizeof(link), "%s/way", outside_);
    assert_int_equal(symlink(dir_, link), 0);
    assert_int_equal(open_at(&d, link, NULL), KVD_OK);
    put_block(d, 0);
    kv_disk_close(d);
    assert_int_equal(open_at(&d, dir_, NULL), KVD_OK);
    assert_int_equal(known(d), DM_BLOCK);
    kv_disk_close(d);
    assert_int_equal(unlink(link), 0);
    snprintf(fifo, sizeof(fifo), "%s/lock", dir_);
    assert_int_equal(unlink(fifo), 0);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(open_at(&d, dir_, &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, "no regular file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(modes_whatever_the_umask, setup, teardown),
        cmocka_unit_test_setup_teardown(older_modes_are_closed, setup, teardown),
        cmocka_unit_test_setup_teardown(shared_directory_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(others_directory_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(links_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(links_are_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(links_where_damage_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(links_while_open, setup, teardown),
        cmocka_unit_test_setup_teardown(link_to_the_directory, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
