/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_disk_io.c - the block store's reads and writes in flight: time limits, late answers,
 * merging, pauses, syncs of the catalogue, no allocations while decoding; and the store as its
 * keeper sees it. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "kv/kv_disk_int.h"
#include "support/disk_model.h"

#define N_TOKEN (20u * DM_BLOCK)

#define PAUSE_NS 500000000u /* a busy machine may stop us for a tenth of it */

static char    dir_[256];
static kvd_rng rng_;
static int32_t token_[N_TOKEN];
static uint8_t buf_[DM_LANES][DM_SEGMENT_REC * DM_RECORD];

static const dm_unit segment_ = { KV_DISK_SEGMENT, 0, 0, 0, NULL };
static const dm_unit block_   = { KV_DISK_BLOCK, 16, 0, 0, NULL };

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

/* A store with a segment and a block in it, both found. */
static kv_disk *open_filled(const kv_disk_params *p, kv_disk_match *m)
{
    kv_disk *d;
    kvd_err  err = { 0 };

    if (kv_disk_open(&d, p, &err) != KVD_OK ||
        dm_put(d, token_, &segment_, &rng_, &err) != KVD_OK ||
        dm_put(d, token_, &block_, &rng_, &err) != KVD_OK || kv_disk_flush(d, &err) != KVD_OK ||
        dm_find(d, token_, N_TOKEN, NULL, m, &err) != KVD_OK ||
        dm_read(d, m, token_, &rng_, false, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(m->n_span, 2);
    return d;
}

static kv_disk_stats stats_of(const kv_disk *d)
{
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    return s;
}

/* ---- limits of time --------------------------------------------------------------- */

static void no_answer_is_an_error(void **state)
{
    os_io_sim      sim = { .seed = 1 };
    kv_disk_params p   = dm_params(dir_);
    kv_disk_match  m;
    kvd_err        err = { 0 };
    kv_disk_stats  was, is;

    (void)state;
    p.io.kind                = OS_IO_SIM;
    p.io.sim                 = &sim;
    p.timeout_ns             = 200000000;
    p.write_stage_bytes      = 4u << 20;
    kv_disk           *d     = open_filled(&p, &m);
    const kv_disk_read r     = { m.span[0].unit, KV_DISK_RECORDS, 0, 0, DM_SEGMENT_REC, buf_[0] };
    const uint64_t     start = kvd_now_ns();
    kv_disk_ticket     t;

    memset(buf_, 0xaa, sizeof(buf_));
    sim.lost = 65536;
    was      = stats_of(d);
    assert_true(was.read_ns > 0 && was.put_ns > 0);
    assert_int_equal(kv_disk_read_start(d, &r, 1, true, &t, &err), KVD_OK);
    assert_int_equal(kv_disk_read_poll(d, t, &err), KVD_E_BUSY);
    assert_int_equal(kv_disk_read_wait(d, t, &err), KVD_E_IO);
    is = stats_of(d);
    assert_true(is.read_ns - was.read_ns >= 190000000); /* waits are in it, and nothing else */
    assert_true(is.read_ns - was.read_ns <= kvd_now_ns() - start);
    assert_int_equal(is.put_ns, was.put_ns);
    assert_true(kvd_now_ns() - start < 60000000000);
    assert_non_null(strstr(err.msg, "00000001.kvd at 0: no answer within the time limit"));
    assert_int_equal(stats_of(d).n_timeout, 1);
    assert_int_equal(kv_disk_read_poll(d, t, &err), KVD_E_INVAL); /* the ticket is gone */
    assert_false(kv_disk_unit_bad(d, m.span[0].unit));            /* slow is not damaged */
    sim.lost = 0;
    assert_int_equal(kv_disk_read_now(d, &r, 1, &err), KVD_OK); /* the other slots go on */

    /* A store whose writes are not answered fails, and pauses. */
    const dm_unit u = { KV_DISK_BLOCK, 17, 0, 0, NULL };

    sim.lost = 65536;
    was      = stats_of(d);
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    assert_int_equal(kv_disk_flush(d, &err), KVD_E_IO);
    is = stats_of(d);
    assert_true(is.put_ns - was.put_ns >= p.timeout_ns);
    assert_int_equal(is.read_ns, was.read_ns);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_ERROR);
    assert_int_equal(stats_of(d).n_put_failed, 1);
    kv_disk_check(d);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* What is answered after its batch has ended goes nowhere. */
static void late_answers_are_dropped(void **state)
{
    os_io_sim      sim = { .seed = 1 };
    kv_disk_params p   = dm_params(dir_);
    kv_disk_match  m;

    (void)state;
    p.io.kind            = OS_IO_SIM;
    p.io.sim             = &sim;
    p.timeout_ns         = 200000000;
    kv_disk           *d = open_filled(&p, &m);
    const kv_disk_read r = { m.span[0].unit, KV_DISK_RECORDS, 0, 0, DM_SEGMENT_REC, buf_[0] };
    const kv_disk_read q = { m.span[0].unit, KV_DISK_RECORDS, 1, 0, DM_SEGMENT_REC, buf_[1] };
    kv_disk_ticket     t;

    memset(buf_, 0xaa, sizeof(buf_));
    sim.delay = 65536; /* polls get nothing, waits do */
    assert_int_equal(kv_disk_read_start(d, &r, 1, false, &t, NULL), KVD_OK);
    usleep(250000);
    assert_int_equal(kv_disk_read_poll(d, t, NULL), KVD_E_IO);
    assert_int_equal(kv_disk_read_now(d, &q, 1, NULL), KVD_OK); /* reaps the late ones, too */
    for (uint32_t i = 0; i < sizeof(buf_[0]); i++)
        assert_int_equal(buf_[0][i], 0xaa);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* Another process stops this one for so long. */
static void be_stopped(uint32_t ms)
{
    const struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };
    int                   status;
    const pid_t           pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        kill(getppid(), SIGSTOP);
        nanosleep(&t, NULL);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

/* Time in which the process was stopped is not the disk's. */
static void a_stop_is_not_late(void **state)
{
    os_io_sim      sim = { .seed = 1 };
    kv_disk_params p   = dm_params(dir_);
    kv_disk_match  m;

    (void)state;
    p.io.kind            = OS_IO_SIM;
    p.io.sim             = &sim;
    p.timeout_ns         = 1500000000;
    kv_disk           *d = open_filled(&p, &m);
    const kv_disk_read r = { m.span[0].unit, KV_DISK_RECORDS, 0, 0, DM_SEGMENT_REC, buf_[0] };
    const dm_unit      u = { KV_DISK_BLOCK, 17, 0, 0, NULL };
    kv_disk_ticket     t;
    kvd_err            err = { 0 };

    sim.delay = 65536; /* polls get nothing, waits do */
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    assert_int_equal(kv_disk_read_start(d, &r, 1, false, &t, &err), KVD_OK);
    be_stopped(1700);
    assert_int_equal(kv_disk_read_poll(d, t, &err), KVD_E_BUSY);
    assert_int_equal(kv_disk_read_wait(d, t, &err), KVD_OK);
    sim.delay = 0;
    assert_int_equal(kv_disk_flush(d, &err), KVD_OK);
    assert_int_equal(stats_of(d).n_timeout, 0);
    assert_int_equal(stats_of(d).pause, KV_DISK_RUNNING);
    kv_disk_check(d);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* ---- merging ---------------------------------------------------------------------- */

static void reads_are_merged(void **state)
{
    static const struct {
        uint32_t gap, first[3]; /* records of 512 bytes: 8 in a page */
        uint64_t n_read, read_bytes;
    } row[] = {
        { 1, { 0, 1, 2 }, 1, 4096 },       /* one page */
        { 1, { 7, 8, 0 }, 1, 8192 },       /* neighbours */
        { 1, { 0, 17, 100 }, 3, 12288 },   /* a page between: too far */
        { 4096, { 0, 17, 100 }, 2, 16384 } /* near enough: three pages, and one */
    };
    kv_disk_params p = dm_params(dir_);
    kv_disk_match  m;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(row); i++) {
        kv_disk_read  r[3];
        kv_disk_stats before, after;

        p.gap_bytes = row[i].gap;
        kv_disk *d  = open_filled(&p, &m);

        for (uint32_t k = 0; k < 3; k++)
            r[k] =
                (kv_disk_read){ m.span[0].unit, KV_DISK_RECORDS, 2, row[i].first[k], 1, buf_[k] };
        kv_disk_stats_get(d, &before);
        assert_int_equal(kv_disk_read_now(d, r, 3, NULL), KVD_OK);
        kv_disk_stats_get(d, &after);
        assert_int_equal(after.n_read - before.n_read, row[i].n_read);
        assert_int_equal(after.read_bytes - before.read_bytes, row[i].read_bytes);
        assert_int_equal(after.useful_bytes - before.useful_bytes, 3 * DM_RECORD);
        kv_disk_match_close(d, &m);
        kv_disk_close(d);
    }
}

/* ---- pauses ----------------------------------------------------------------------- */

static void a_bad_disk_pauses_stores(void **state)
{
    os_io_sim      sim = { .seed = 1 };
    kv_disk_params p   = dm_params(dir_);
    kv_disk_match  m;
    kvd_err        err = { 0 };
    const dm_unit  u   = { KV_DISK_BLOCK, 17, 0, 0, NULL };

    (void)state;
    p.io.kind  = OS_IO_SIM;
    p.io.sim   = &sim;
    p.pause_ns = PAUSE_NS;
    kv_disk *d = open_filled(&p, &m);

    sim.sync_eio = 65536;
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    assert_int_equal(kv_disk_flush(d, &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, "a unit was not stored: sync"));
    assert_int_equal(kv_disk_flush(d, &err), KVD_OK); /* told once */
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_E_BUSY);
    assert_non_null(strstr(err.msg, "not stored: sync: Input/output error"));
    assert_int_equal(dm_read(d, &m, token_, &rng_, false, &err), KVD_OK); /* serving goes on */
    sim.sync_eio = 0;
    sim.enospc   = 65536;
    usleep(PAUSE_NS / 1000 + 10000);
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK); /* the pause is over */
    assert_int_equal(kv_disk_flush(d, &err), KVD_E_IO);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_FULL);
    assert_int_equal(stats_of(d).n_pause, 2);
    sim.enospc = 0;
    usleep(PAUSE_NS / 1000 + 10000);
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    assert_int_equal(kv_disk_flush(d, &err), KVD_OK);
    assert_int_equal(stats_of(d).pause, KV_DISK_RUNNING);
    kv_disk_check(d);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* ---- the catalogue's log ------------------------------------------------------------ */

static uint64_t log_bytes(void)
{
    struct stat st;
    char        path[512];

    snprintf(path, sizeof(path), "%s/catalog.db-wal", dir_);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

/* Its pages are in the database, which cannot be synced: nothing is written over them. */
static void a_log_stays_until_it_is_synced(void **state)
{
    const dm_unit  u   = { .kind = KV_DISK_BLOCK };
    os_io_sim      sim = { .seed = 1 };
    kv_disk_params p   = dm_params(dir_);
    kvd_err        err = { 0 };
    uint64_t       was, n_ok, n_bad;
    kv_disk       *d;
    int32_t        n = 0;

    (void)state;
    p.io.kind = OS_IO_SIM;
    p.io.sim  = &sim;
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    for (; d->log.state != LOG_DATABASE; n++) {
        assert_true(n < 1000);
        token_[0] = n;
        assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
        for (uint32_t i = 0; i < 8 && d->log.state != LOG_DATABASE; i++)
            kv_disk_poll(d);
    }
    was          = log_bytes();
    sim.sync_eio = 65536;
    kv_disk_poll(d);
    assert_true(kv_disk_log_idle(d));
    assert_int_equal(kv_disk_flush(d, &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, "the catalogue cannot be synced"));
    sim.sync_eio = 0;
    token_[0]    = n++;
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    assert_int_equal(kv_disk_flush(d, &err), KVD_OK);
    assert_true(was > 0 && log_bytes() > was);
    kv_disk_check(d);
    kv_disk_close(d);
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, &err), KVD_OK);
    assert_true(n_ok == (uint64_t)n && n_bad == 0);
    kv_disk_close(d);
}

/* ---- no allocation in a decode step ------------------------------------------------ */

static void decode_allocates_nothing(void **state)
{
    const kv_disk_params p = dm_params(dir_);
    kv_disk_match        m;
    kvd_err              err = { 0 };
    kv_disk             *d   = open_filled(&p, &m);
    const dm_unit        u   = { KV_DISK_TAIL, 17, 20, 0, NULL };

    (void)state;
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_OK);
    (void)kvd_alloc_guard(true); /* an allocation asserts now */
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(dm_read(d, &m, token_, &rng_, true, &err), KVD_OK);
    assert_int_equal(kv_disk_flush(d, &err), KVD_OK); /* commits end meanwhile */
    (void)kvd_alloc_guard(false);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* ---- the keeper's view ------------------------------------------------------------- */

typedef struct seen {
    kv_disk_entry e[8];
    uint32_t      n, max;
} seen;

static bool see(void *ctx, const kv_disk_entry *e)
{
    seen *s = ctx;

    s->e[s->n++] = *e;
    return s->n < s->max;
}

static void listing(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk_match  m;
    seen           s = { .max = 8 };
    kv_disk_name   n;
    kv_disk_put    put;
    uint64_t       n_ok, n_bad;
    kvd_err        err;
    kv_disk       *d = open_filled(&p, &m);

    (void)state;
    assert_int_equal(kv_disk_ls(d, see, &s, NULL), KVD_OK);
    assert_int_equal(s.n, 2);
    assert_int_equal(s.e[0].kind, KV_DISK_BLOCK); /* of one search: the deepest goes first */
    assert_int_equal(s.e[0].first_token, 16 * DM_BLOCK);
    assert_int_equal(s.e[0].n_token, DM_BLOCK);
    assert_true(s.e[0].ours && !s.e[0].bad && !s.e[0].salted && s.e[0].created > 1500000000);
    assert_string_equal(s.e[0].file, "00000001.kvd");
    assert_memory_equal(&s.e[0].key, &m.key, sizeof(m.key));
    s = (seen){ .max = 1 };
    assert_int_equal(kv_disk_ls(d, see, &s, NULL), KVD_OK);
    assert_int_equal(s.n, 1);
    assert_int_equal(kv_disk_clear(d, NULL), KVD_OK);
    assert_int_equal(stats_of(d).n_unit, 2); /* referenced */
    n = dm_name(d, token_, &block_);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);

    /* Without a model: everything but storing and finding. */
    p.geometry = (kv_disk_geometry){ 0 };
    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, &err), KVD_E_INVAL);
    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_E_INVAL);
    s = (seen){ .max = 8 };
    assert_int_equal(kv_disk_ls(d, see, &s, NULL), KVD_OK);
    assert_int_equal(s.n, 2);
    assert_false(s.e[0].ours);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    assert_int_equal(n_ok, 2);
    assert_int_equal(kv_disk_clear(d, NULL), KVD_OK);
    assert_int_equal(stats_of(d).n_unit, 0);
    assert_int_equal(stats_of(d).n_file, 0);
    kv_disk_close(d);
}

/* ---- the catalogue as a whole ------------------------------------------------------- */

static uint32_t n_whole_; /* times that it was read through */

static int count_whole(unsigned what, void *ctx, void *stmt, void *sql)
{
    (void)what;
    (void)ctx;
    (void)stmt;
    n_whole_ += strstr(sql, "integrity_check") != NULL;
    return 0;
}

static int watch_whole(sqlite3 *db, const char **why, const void *api)
{
    (void)why;
    (void)api;
    return sqlite3_trace_v2(db, SQLITE_TRACE_STMT, count_whole, NULL);
}

/* Whoever asks for what is not there asks again: that reads it all once, whatever comes of it. */
static void a_catalogue_is_read_through_once(void **state)
{
    const kv_disk_params p = dm_params(dir_);
    kv_disk_match        m;
    kvd_err              err = { 0 };
    uint64_t             n_ok, n_bad;
    char                 path[512];
    sqlite3             *db;
    kv_disk             *d;

    (void)state;
    n_whole_ = 0;
    sqlite3_auto_extension((void (*)(void))watch_whole);
    d = open_filled(&p, &m);
    kv_disk_match_close(d, &m);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(kv_disk_verify_catalog(d, &err), KVD_OK);
    assert_int_equal(n_whole_, 1);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, &err), KVD_OK); /* reads, for who asks so */
    assert_int_equal(n_whole_, 2);
    kv_disk_close(d);

    snprintf(path, sizeof(path), "%s/catalog.db", dir_);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db,
                                  "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql ="
                                  " 'CREATE INDEX name_unit ON name(block)' WHERE name ="
                                  " 'name_unit'",
                                  NULL, NULL, NULL),
                     SQLITE_OK);
    sqlite3_close(db);
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(kv_disk_verify_catalog(d, &err), KVD_E_CORRUPT);
    assert_int_equal(n_whole_, 3);
    kv_disk_close(d);
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_OK);
    assert_int_equal(stats_of(d).n_unit, 0); /* an empty one */
    assert_int_equal(kv_disk_verify_catalog(d, &err), KVD_OK);
    assert_int_equal(n_whole_, 4);
    kv_disk_close(d);
    sqlite3_cancel_auto_extension((void (*)(void))watch_whole);
}

static void newer_formats_are_refused(void **state)
{
    const kv_disk_params p = dm_params(dir_);
    kv_disk_match        m;
    kvd_err              err;
    char                 path[512];
    sqlite3             *db;
    kv_disk             *d = open_filled(&p, &m);

    (void)state;
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
    snprintf(path, sizeof(path), "%s/catalog.db", dir_);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "PRAGMA user_version = 3", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "a cache of format 3, this program reads 2"));
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "PRAGMA user_version = 2", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    d = open_filled(&p, &m); /* nothing was touched */
    assert_int_equal(stats_of(d).n_put_dup, 2);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(no_answer_is_an_error, setup, teardown),
        cmocka_unit_test_setup_teardown(late_answers_are_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(a_stop_is_not_late, setup, teardown),
        cmocka_unit_test_setup_teardown(reads_are_merged, setup, teardown),
        cmocka_unit_test_setup_teardown(a_bad_disk_pauses_stores, setup, teardown),
        cmocka_unit_test_setup_teardown(a_log_stays_until_it_is_synced, setup, teardown),
        cmocka_unit_test_setup_teardown(decode_allocates_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(listing, setup, teardown),
        cmocka_unit_test_setup_teardown(a_catalogue_is_read_through_once, setup, teardown),
        cmocka_unit_test_setup_teardown(newer_formats_are_refused, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
