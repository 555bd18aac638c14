/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_disk.c - the block store: what was put is found and read back, by whole and by parts,
 * across reopening; names, limits, eviction, damage, tending; random operations against a model.
 * usage: test_kv_disk [--seed N] [--tampered LOADS] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "support/disk_model.h"

#define N_TOKEN (40u * DM_BLOCK)

static char     dir_[256];
static uint64_t seed_       = 1;
static uint32_t n_tampered_ = 90;
static kvd_rng  rng_;
static int32_t  token_[N_TOKEN];

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    kvd_rng_seed(&rng_, seed_);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)kvd_rng_below(&rng_, 50000);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dm_dir_remove(dir_);
    return 0;
}

static kv_disk *open_with(const kv_disk_params *p)
{
    kv_disk *d;
    kvd_err  err = { 0 };

    if (kv_disk_open(&d, p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return d;
}

static kv_disk *open_plain(void)
{
    const kv_disk_params p = dm_params(dir_);

    return open_with(&p);
}

static void put_ok(kv_disk *d, const dm_unit *u)
{
    kvd_err err = { 0 };

    if (dm_put(d, token_, u, &rng_, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

static void flush_ok(kv_disk *d)
{
    kvd_err err = { 0 };

    if (kv_disk_flush(d, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_disk_check(d);
}

/* Finds n tokens; tells how many are known, and that what is known is right. */
static uint64_t known(kv_disk *d, uint64_t n, const char *salt)
{
    kv_disk_match m;
    kvd_err       err = { 0 };
    uint64_t      n_known;

    if (dm_find(d, token_, n, salt, &m, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    if (dm_read(d, &m, token_, &rng_, false, &err) != KVD_OK ||
        dm_read(d, &m, token_, &rng_, true, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    n_known = m.n_token + m.n_tail_token;
    kv_disk_match_close(d, &m);
    return n_known;
}

static kv_disk_stats stats_of(const kv_disk *d)
{
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    return s;
}

/* ---- what was put is found -------------------------------------------------------- */

static const dm_unit blocks_[] = { { KV_DISK_BLOCK, 0, 0, 0, NULL },
                                   { KV_DISK_BLOCK, 1, 0, 0, NULL } };
static const dm_unit segment_  = { KV_DISK_SEGMENT, 2, 0, 0, NULL };
static const dm_unit segment2_ = { KV_DISK_SEGMENT, 18, 0, 0, NULL };
static const dm_unit tail_     = { KV_DISK_TAIL, 34, 45, 0, NULL };

static void put_all(kv_disk *d)
{
    put_ok(d, &blocks_[0]);
    put_ok(d, &blocks_[1]);
    put_ok(d, &segment_);
    put_ok(d, &segment2_);
    put_ok(d, &tail_);
    flush_ok(d);
}

static void check_all(kv_disk *d)
{
    assert_int_equal(known(d, N_TOKEN, NULL), 34 * DM_BLOCK + 45);
    assert_int_equal(known(d, 34 * DM_BLOCK + 12, NULL), 34 * DM_BLOCK + 12);
    assert_int_equal(known(d, 34 * DM_BLOCK, NULL), 34 * DM_BLOCK);
    assert_int_equal(known(d, 20 * DM_BLOCK + 5, NULL), 20 * DM_BLOCK); /* ends inside a segment */
    assert_int_equal(known(d, DM_BLOCK, NULL), DM_BLOCK);
    assert_int_equal(known(d, DM_BLOCK - 1, NULL), 0);
    assert_int_equal(known(d, 0, NULL), 0);
}

static void put_find_read(void **state)
{
    static const os_io_kind kind[] = { OS_IO_AUTO, OS_IO_POOL, OS_IO_MAP, OS_IO_SIM };
    static os_io_sim        sim    = { .seed = 3 };

    (void)state;
    for (uint32_t k = 0; k < KVD_COUNTOF(kind); k++) {
        kv_disk_params p = dm_params(dir_);
        kv_disk       *d;

        p.io.kind = kind[k];
        p.io.sim  = &sim;
        d         = open_with(&p);
        print_message("%s\n", kv_disk_mode(d));
        assert_int_equal(known(d, N_TOKEN, NULL), 0);
        put_all(d);
        check_all(d);
        put_all(d); /* nothing new */
        assert_int_equal(stats_of(d).n_put_dup, 5);
        assert_int_equal(stats_of(d).n_put_done, 5);
        assert_int_equal(stats_of(d).n_file, 1);
        assert_true(kv_disk_host_bytes(&p) > p.read_stage_bytes + p.write_stage_bytes);
        assert_int_equal(stats_of(d).record_bytes_put, 34u * DM_BLOCK_REC * DM_RECORD * DM_LANES);
        assert_int_equal(stats_of(d).aux_bytes_put, 34u * DM_AUX * DM_LANES);
        assert_int_equal(stats_of(d).tail_bytes_put, 45u * DM_TAIL_TOKEN * DM_LANES);
        kv_disk_close(d);
        d = open_with(&p);
        check_all(d);
        assert_int_equal(stats_of(d).n_unit, 5);
        assert_int_equal(stats_of(d).n_segment, 2);
        kv_disk_check(d);
        assert_int_equal(kv_disk_clear(d, NULL), KVD_OK);
        kv_disk_check(d);
        assert_int_equal(stats_of(d).n_unit, 0);
        assert_int_equal(stats_of(d).n_file, 0);
        assert_int_equal(known(d, N_TOKEN, NULL), 0);
        kv_disk_close(d);
    }
}

/* A span tells the unit's part; a unit can be referenced by its key. */
static void spans(void **state)
{
    kv_disk      *d = open_plain();
    kv_disk_match m;
    kv_disk_name  n;
    kv_disk_key   key;
    kv_disk_unit  u;

    (void)state;
    put_all(d);
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, NULL), KVD_OK);
    assert_int_equal(m.n_span, 5);
    assert_int_equal(m.n_token, 34 * DM_BLOCK);
    assert_int_equal(m.n_tail_token, 45);
    assert_int_equal(m.span[2].kind, KV_DISK_SEGMENT);
    assert_int_equal(m.span[2].n_block, KV_DISK_SEGMENT_BLOCKS);
    n = dm_name(d, token_, &segment2_);
    assert_int_equal(kv_disk_key_of(d, &n, &key, NULL), KVD_OK);
    assert_memory_equal(&key, &m.key, sizeof(key));
    assert_int_equal(kv_disk_unit_open(d, &key, KV_DISK_SEGMENT, &u, NULL), KVD_OK);
    assert_int_equal(u, m.span[3].unit);
    kv_disk_unit_ref(d, u);
    kv_disk_unit_unref(d, u);
    kv_disk_unit_unref(d, u);
    assert_false(kv_disk_unit_bad(d, u));
    assert_int_equal(kv_disk_unit_open(d, &key, KV_DISK_BLOCK, &u, NULL), KVD_E_BUSY);
    u = m.span[3].unit;
    kv_disk_match_close(d, &m);
    assert_true(kv_disk_unit_bad(d, u)); /* stale */
    kv_disk_close(d);
}

/* ---- names ------------------------------------------------------------------------ */

static void names_keep_apart(void **state)
{
    kv_disk      *d      = open_plain();
    const dm_unit salted = { KV_DISK_BLOCK, 0, 0, 0, "alice" };
    const dm_unit sparse = { KV_DISK_BLOCK, 2, 0, 1, NULL };
    kv_disk_match m;
    kv_disk_query q = { token_, N_TOKEN, { NULL, 0 }, dm_prov, 1, false };

    (void)state;
    put_ok(d, &salted);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    assert_int_equal(known(d, N_TOKEN, "bob"), 0);
    assert_int_equal(known(d, N_TOKEN, "alice"), DM_BLOCK);
    assert_true(stats_of(d).salted_bytes > 0);

    put_ok(d, &blocks_[0]);
    put_ok(d, &blocks_[1]);
    put_ok(d, &sparse);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 3 * DM_BLOCK);
    assert_int_equal(kv_disk_find(d, &q, &m, NULL), KVD_OK); /* exact alone */
    assert_int_equal(m.n_token, 2 * DM_BLOCK);
    kv_disk_match_close(d, &m);
    q.n_provenance = 0;
    assert_int_equal(kv_disk_find(d, &q, &m, NULL), KVD_OK);
    assert_int_equal(m.n_span, 0);
    kv_disk_match_close(d, &m);
    token_[5]++; /* other tokens, other name */
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    token_[5]--;
    kv_disk_close(d);

    /* Another model, another shape: not found, and left alone. */
    kv_disk_params p = dm_params(dir_);

    p.fingerprint[0] ^= 1;
    d = open_with(&p);
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    assert_int_equal(stats_of(d).n_unit, 4);
    kv_disk_close(d);
    p                       = dm_params(dir_);
    p.geometry.record_bytes = 256;
    d                       = open_with(&p);
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    kv_disk_close(d);
    d = open_plain();
    assert_int_equal(known(d, N_TOKEN, NULL), 3 * DM_BLOCK);
    kv_disk_close(d);
}

/* Two ways lead from the first block on; the one that is asked for second goes further. */
static void ways_part(void **state)
{
    kv_disk      *d      = open_plain();
    const dm_unit sparse = { KV_DISK_BLOCK, 1, 0, DM_PROV_SPARSE, NULL };
    dm_unit       last   = { KV_DISK_BLOCK, 2, 0, DM_PROV_SPARSE, NULL };
    kv_disk_name  n;
    kv_disk_key   key;
    kv_disk_put   put;
    kv_disk_match m;
    kvd_err       err;

    (void)state;
    put_ok(d, &blocks_[0]);
    put_ok(d, &blocks_[1]);
    put_ok(d, &sparse);
    n = dm_name(d, token_, &sparse);
    assert_int_equal(kv_disk_key_of(d, &n, &key, NULL), KVD_OK);
    n        = dm_name(d, token_, &last);
    n.parent = key; /* it follows the sparse one */
    assert_int_equal(kv_disk_put_begin(d, &n, &put, NULL), KVD_OK);
    assert_int_equal(dm_put_lanes(d, put, token_, &last, DM_LANES, &rng_, NULL), KVD_OK);
    assert_int_equal(kv_disk_put_commit(d, put, NULL), KVD_OK);
    flush_ok(d);
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, NULL), KVD_OK);
    assert_int_equal(m.n_token, 3 * DM_BLOCK);
    assert_int_equal(m.n_span, 3);
    assert_int_equal(m.span[0].provenance, DM_PROV_EXACT);
    assert_int_equal(m.span[1].provenance, DM_PROV_SPARSE);
    assert_int_equal(m.span[2].provenance, DM_PROV_SPARSE);
    assert_int_equal(dm_read(d, &m, token_, &rng_, false, &err), KVD_OK);
    kv_disk_match_close(d, &m);
    assert_int_equal(dm_find(d, token_, 2 * DM_BLOCK, NULL, &m, NULL), KVD_OK);
    assert_int_equal(m.span[1].provenance, DM_PROV_EXACT); /* equal length: the first asked for */
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

static void change_catalogue(const char *sql)
{
    char     path[512];
    sqlite3 *db;

    snprintf(path, sizeof(path), "%s/catalog.db", dir_);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

/* A table of names that points to another unit with the same tokens is not believed, nor is a row
 * that was changed. */
static void the_catalogue_is_checked(void **state)
{
    kv_disk *d = open_plain();

    (void)state;
    for (uint32_t i = 0; i < DM_BLOCK; i++)
        token_[DM_BLOCK + i] = token_[i]; /* two equal blocks: the same tokens, other keys */
    put_ok(d, &blocks_[0]);
    flush_ok(d);
    put_ok(d, &blocks_[1]);
    flush_ok(d);
    kv_disk_close(d);
    change_catalogue("UPDATE name SET unit = 3 - unit");
    d = open_plain();
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    assert_int_equal(stats_of(d).n_quarantined, 0);
    kv_disk_close(d);
    change_catalogue(
        "UPDATE name SET unit = 3 - unit; UPDATE unit SET first_token = 99 WHERE id = 2");
    d = open_plain();
    assert_int_equal(known(d, N_TOKEN, NULL), DM_BLOCK);
    assert_int_equal(stats_of(d).n_quarantined, 1);
    kv_disk_close(d);
}

/* The salt is in none of the files. */
static void salts_are_not_kept(void **state)
{
    const dm_unit u = { KV_DISK_BLOCK, 0, 0, 0, "correct-horse-battery" };
    kv_disk      *d = open_plain();
    char          command[512];

    (void)state;
    put_ok(d, &u);
    flush_ok(d);
    kv_disk_close(d);
    snprintf(command, sizeof(command), "grep -rqa correct-horse '%s'", dir_);
    FILE *f = popen(command, "r");

    assert_non_null(f);
    assert_int_not_equal(pclose(f), 0);
}

/* Tails: the longest that fits, a shorter one is superseded, one that starts before a known block
 * can win over it. */
static void tails(void **state)
{
    kv_disk      *d     = open_plain();
    const dm_unit t10   = { KV_DISK_TAIL, 0, 10, 0, NULL };
    const dm_unit t20   = { KV_DISK_TAIL, 0, 20, 0, NULL };
    const dm_unit t50   = { KV_DISK_TAIL, 0, 50, 0, NULL };
    const dm_unit spars = { KV_DISK_TAIL, 0, 50, 1, NULL };

    (void)state;
    put_ok(d, &t20);
    flush_ok(d);
    token_[15]++;
    put_ok(d, &t10); /* covered, but a name of its own */
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 15); /* of the first */
    token_[15]--;
    assert_int_equal(known(d, N_TOKEN, NULL), 20);
    put_ok(d, &t50);
    flush_ok(d);
    assert_int_equal(stats_of(d).n_tail, 1); /* both others are its prefixes */
    assert_int_equal(known(d, 30, NULL), 30);
    put_ok(d, &blocks_[0]);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 50); /* more than the block's 32 */
    put_ok(d, &blocks_[1]);
    put_ok(d, &spars);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 64);
    assert_int_equal(stats_of(d).n_tail, 2);
    kv_disk_close(d);
}

/* ---- misuse and limits ------------------------------------------------------------ */

static uint8_t rec_[DM_SEGMENT_REC * DM_RECORD]; /* bytes that do not matter */

static void puts_misused(void **state)
{
    kv_disk       *d = open_plain(), *other;
    dm_unit        u = { KV_DISK_SEGMENT, 0, 0, 0, NULL };
    kv_disk_name   n = dm_name(d, token_, &blocks_[0]);
    kv_disk_put    put, put2;
    kv_disk_params p = dm_params(dir_);
    kvd_err        err;

    (void)state;
    assert_int_equal(kv_disk_open(&other, &p, &err), KVD_E_BUSY); /* one process, one store */
    assert_null(other);
    assert_non_null(strstr(err.msg, "in use by another process"));

    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_OK);
    assert_int_equal(kv_disk_put_begin(d, &n, &put2, &err), KVD_OK);
    assert_int_equal(put2, KV_DISK_NONE); /* under way */
    assert_int_equal(kv_disk_put_lane(d, put, DM_LANES, rec_, rec_, &err), KVD_E_INVAL);
    assert_int_equal(kv_disk_put_lane(d, put, 0, rec_, rec_, &err), KVD_OK);
    assert_int_equal(kv_disk_put_lane(d, put, 0, rec_, rec_, &err), KVD_E_INVAL);
    assert_int_equal(kv_disk_put_commit(d, put, &err), KVD_E_INVAL); /* lanes are missing */
    assert_non_null(strstr(err.msg, "1 of 3 lanes"));
    assert_int_equal(kv_disk_put_commit(d, put, &err), KVD_E_INVAL); /* gone */
    kv_disk_put_abort(d, put);
    kv_disk_put_abort(d, 12345);
    flush_ok(d);
    assert_int_equal(stats_of(d).n_unit, 0);

    n.n_token = 5;
    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_E_INVAL);
    n.kind    = KV_DISK_TAIL;
    n.n_token = 2 * DM_BLOCK;
    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_E_INVAL);
    n.n_token          = 5;
    n.provenance.bytes = KV_DISK_PROV_BYTES + 1;
    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_E_INVAL);
    n = dm_name(d, token_, &u);
    assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_OK);
    kv_disk_put_abort(d, put);
    kv_disk_close(d);

    p.geometry.chunk_tokens = 5;
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_E_INVAL);
    p = dm_params("");
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_E_INVAL);
    p.dir = "/proc/nothing/here";
    assert_int_equal(kv_disk_open(&d, &p, &err), KVD_E_IO);
}

static void reads_misused(void **state)
{
    kv_disk       *d = open_plain();
    kv_disk_ticket t[KV_DISK_TICKET_MAX], none;
    kv_disk_match  m;
    kvd_err        err;

    (void)state;
    put_all(d);
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, &err), KVD_OK);
    const kv_disk_unit  segment = m.span[2].unit;
    const kv_disk_read  r[]     = { { segment, KV_DISK_RECORDS, DM_LANES, 0, 1, rec_ },
                                    { segment, KV_DISK_RECORDS, 0, DM_SEGMENT_REC, 1, rec_ },
                                    { segment, KV_DISK_RECORDS, 0, 1, UINT32_MAX, rec_ },
                                    { segment, KV_DISK_AUX, 0, 16, 1, rec_ },
                                    { m.span[4].unit, KV_DISK_AUX, 0, 0, 1, rec_ },
                                    { 77, KV_DISK_AUX, 0, 0, 1, rec_ } };
    const kv_disk_read  one     = { segment, KV_DISK_RECORDS, 0, 0, DM_SEGMENT_REC, rec_ };
    static kv_disk_read many[2048 + 1]; /* dm_params().max_pieces, and one */

    for (uint32_t i = 0; i < KVD_COUNTOF(r); i++)
        assert_int_equal(kv_disk_read_now(d, &r[i], 1, &err), KVD_E_INVAL);
    assert_int_equal(kv_disk_read_poll(d, 99, &err), KVD_E_INVAL);
    assert_int_equal(kv_disk_read_now(d, r, 0, &err), KVD_OK);

    /* Tickets are counted; more ranges than max_pieces are refused. */
    for (uint32_t i = 0; i < KV_DISK_TICKET_MAX; i++)
        assert_int_equal(kv_disk_read_start(d, &one, 1, i & 1, &t[i], &err), KVD_OK);
    assert_int_equal(kv_disk_read_start(d, &one, 1, false, &none, &err), KVD_E_BUSY);
    for (uint32_t i = 0; i < KV_DISK_TICKET_MAX; i++)
        assert_int_equal(kv_disk_read_wait(d, t[i], &err), KVD_OK);
    for (uint32_t i = 0; i < KVD_COUNTOF(many); i++)
        many[i] = one;
    assert_int_equal(dm_params(dir_).max_pieces, KVD_COUNTOF(many) - 1);
    assert_int_equal(kv_disk_read_start(d, many, KVD_COUNTOF(many), false, &none, &err),
                     KVD_E_INVAL);
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
}

/* The least recently used goes, the deepest of a chain first; what is referenced stays. */
static void eviction(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk       *d;
    dm_unit        u = blocks_[0];
    kv_disk_match  m;
    uint64_t       unit_bytes;

    (void)state;
    d = open_with(&p);
    put_ok(d, &u);
    flush_ok(d);
    unit_bytes = stats_of(d).unit_bytes;
    kv_disk_close(d);
    p.max_bytes = 4 * unit_bytes;
    d           = open_with(&p);
    for (u.first_block = 0; u.first_block < 4; u.first_block++)
        put_ok(d, &u);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 4 * DM_BLOCK);
    token_[0]++; /* another sequence takes one place */
    u.first_block = 0;
    put_ok(d, &u);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), DM_BLOCK);
    token_[0]--;
    assert_int_equal(known(d, N_TOKEN, NULL), 3 * DM_BLOCK);
    assert_int_equal(stats_of(d).n_evicted, 1);
    assert_int_equal(stats_of(d).n_unit, 4);

    /* Three units referenced: one can go, then nothing. */
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, NULL), KVD_OK);
    token_[0] += 2;
    put_ok(d, &u);
    flush_ok(d);
    const dm_unit u1 = { KV_DISK_BLOCK, 1, 0, 0, NULL };

    put_ok(d, &u1);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), 0); /* its first block gave way to its second */
    kv_disk_match m2;
    kvd_err       err;

    put_ok(d, &u);
    flush_ok(d);
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m2, NULL), KVD_OK);
    assert_int_equal(m2.n_span, 1);
    assert_int_equal(dm_put(d, token_, &u1, &rng_, &err), KVD_E_BUSY);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_MAX);
    assert_non_null(strstr(err.msg, "reached its size (cache_bytes) of "));
    kv_disk_match_close(d, &m2);
    token_[0] -= 2;
    assert_int_equal(dm_read(d, &m, token_, &rng_, false, &err), KVD_OK);
    kv_disk_match_close(d, &m);
    u.first_block = 3;
    put_ok(d, &u);
    flush_ok(d);
    assert_int_equal(stats_of(d).pause, KV_DISK_RUNNING);
    assert_int_equal(kv_disk_gc(d, 2 * unit_bytes, NULL), KVD_OK);
    assert_int_equal(stats_of(d).n_unit, 2);
    kv_disk_check(d);
    kv_disk_close(d);
}

static void limits(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk       *d;
    kvd_err        err;
    dm_unit        u = blocks_[0];
    uint64_t       unit_bytes;

    (void)state;
    d = open_with(&p);
    put_ok(d, &u);
    flush_ok(d);
    unit_bytes = stats_of(d).unit_bytes;
    kv_disk_close(d);

    p.max_bytes_per_day = 3 * unit_bytes; /* one was written: kept over reopening */
    d                   = open_with(&p);
    u.first_block       = 1;
    put_ok(d, &u);
    flush_ok(d);
    u.first_block = 2;
    put_ok(d, &u);
    flush_ok(d);
    u.first_block = 3;
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_E_BUSY);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_DAY);
    assert_string_equal(kv_disk_pause_name(KV_DISK_PAUSE_DAY), "day");
    assert_string_equal(kv_disk_pause_name(99), "?");
    kv_disk_close(d);

    p                 = dm_params(dir_);
    p.max_bytes_per_s = unit_bytes;
    d                 = open_with(&p);
    put_ok(d, &u);
    u.first_block = 4;
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_E_BUSY);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_RATE);
    kv_disk_close(d);

    p                = dm_params(dir_);
    p.min_free_bytes = UINT64_C(1) << 62;
    d                = open_with(&p);
    assert_int_equal(dm_put(d, token_, &u, &rng_, &err), KVD_E_BUSY);
    assert_int_equal(stats_of(d).pause, KV_DISK_PAUSE_MIN_FREE);
    assert_string_equal(stats_of(d).pause_text, "the filesystem has no more free than "
                                                "asked for (cache_min_free), 4503599627370496 KiB");
    assert_int_equal(stats_of(d).n_unit, 0); /* all were given up for it */
    kv_disk_close(d);

    p           = dm_params(dir_);
    p.max_bytes = 8 * unit_bytes; /* a quarter for salted ones */
    d           = open_with(&p);
    u.salt      = "carol";
    for (u.first_block = 0; u.first_block < 5; u.first_block++) {
        put_ok(d, &u);
        flush_ok(d);
        assert_true(stats_of(d).salted_bytes <= 2 * unit_bytes);
    }
    kv_disk_close(d);
}

/* Files take units up to their size; emptied ones go; space is taken again. */
static void files(void **state)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk       *d;
    dm_unit        u = { KV_DISK_BLOCK, 0, 0, 0, NULL };
    kv_disk_stats  s;

    (void)state;
    p.geometry.record_bytes = 1u << 20; /* 24 MiB a block: two a file of 64 MiB */
    p.file_bytes            = 1;        /* as small as may be */
    d                       = open_with(&p);
    uint8_t *big            = kvd_calloc(DM_BLOCK_REC, 1u << 20);

    for (u.first_block = 0; u.first_block < 5; u.first_block++) {
        const kv_disk_name n = dm_name(d, token_, &u);
        kv_disk_put        put;

        assert_int_equal(kv_disk_put_begin(d, &n, &put, NULL), KVD_OK);
        for (uint32_t lane = 0; lane < DM_LANES; lane++)
            assert_int_equal(kv_disk_put_lane(d, put, lane, big, big, NULL), KVD_OK);
        assert_int_equal(kv_disk_put_commit(d, put, NULL), KVD_OK);
    }
    flush_ok(d);
    s = stats_of(d);
    assert_int_equal(s.n_file, 3);
    assert_true(s.n_file <= s.unit_bytes / (64u << 20) + 2);
    assert_int_equal(kv_disk_gc(d, s.unit_bytes - 1, NULL), KVD_OK); /* one goes, its file stays */
    assert_int_equal(stats_of(d).n_file, 3);
    kv_disk_check(d);
    kvd_free(big);
    kv_disk_close(d);
}

/* ---- damage ----------------------------------------------------------------------- */

static void data_file(char path[512])
{
    snprintf(path, 512, "%s/00000001.kvd", dir_);
}

/* Turns a bit, or exchanges two pages, of the data file.  false: nothing that counts has changed.
 */
static bool tamper(uint64_t bytes)
{
    const uint64_t n_page = bytes / KV_DISK_PAGE_BYTES;
    uint64_t       a = kvd_rng_below(&rng_, n_page), b = kvd_rng_below(&rng_, n_page);
    uint64_t       at   = kvd_rng_below(&rng_, KV_DISK_PAGE_BYTES);
    const bool     swap = kvd_rng_below(&rng_, 2);
    char           page[2][KV_DISK_PAGE_BYTES], path[512];
    FILE          *f;

    data_file(path);
    f = fopen(path, "r+b");
    assert_non_null(f);
    b = swap ? b : a;
    fseek(f, (long)(a * KV_DISK_PAGE_BYTES), SEEK_SET);
    assert_int_equal(fread(page[0], 1, KV_DISK_PAGE_BYTES, f), KV_DISK_PAGE_BYTES);
    fseek(f, (long)(b * KV_DISK_PAGE_BYTES), SEEK_SET);
    assert_int_equal(fread(page[1], 1, KV_DISK_PAGE_BYTES, f), KV_DISK_PAGE_BYTES);
    if (!swap)
        page[0][at] ^= (char)(1 << at % 8);
    fseek(f, (long)(b * KV_DISK_PAGE_BYTES), SEEK_SET);
    fwrite(page[0], 1, KV_DISK_PAGE_BYTES, f);
    if (swap) {
        fseek(f, (long)(a * KV_DISK_PAGE_BYTES), SEEK_SET);
        fwrite(page[1], 1, KV_DISK_PAGE_BYTES, f);
    }
    fclose(f);
    /* The last page is the table of checksums; behind its entries nothing counts. */
    return swap ? memcmp(page[0], page[1], KV_DISK_PAGE_BYTES) != 0
                : a + 1 < n_page || at < (n_page - 1) * 8;
}

/* A load after tampering: what counts is found out, the unit is gone, the next store heals it. */
static void tampered_units(void **state)
{
    static const dm_unit one[]   = { { KV_DISK_BLOCK, 0, 0, 0, NULL },
                                     { KV_DISK_SEGMENT, 0, 0, 0, NULL },
                                     { KV_DISK_TAIL, 0, 60, 0, NULL } };
    uint32_t             n_found = 0;

    (void)state;
    for (uint32_t round = 0; round < n_tampered_; round++) {
        const dm_unit *u = &one[round % 3];
        kv_disk       *d = open_plain();
        kv_disk_match  m;
        kvd_err        err = { 0 };
        bool           counts;
        kvd_status     st;

        assert_int_equal(kv_disk_clear(d, NULL), KVD_OK);
        put_ok(d, u);
        flush_ok(d);
        const uint64_t bytes = stats_of(d).unit_bytes;

        kv_disk_close(d);
        counts = tamper(bytes);
        d      = open_plain();
        assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, &err), KVD_OK);
        assert_int_equal(m.n_span, 1);
        st = dm_read(d, &m, token_, &rng_, false, &err);
        assert_int_equal(st, counts ? KVD_E_CORRUPT : KVD_OK);
        if (counts) {
            n_found++;
            assert_true(kv_disk_unit_bad(d, m.span[0].unit));
            assert_int_equal(dm_read(d, &m, token_, &rng_, false, &err), KVD_E_CORRUPT);
            assert_int_equal(stats_of(d).n_quarantined, 1);
            assert_int_equal(known(d, N_TOKEN, NULL), 0);
        }
        kv_disk_match_close(d, &m);
        put_ok(d, u);
        flush_ok(d);
        assert_true(known(d, N_TOKEN, NULL) > 0);
        assert_int_equal(stats_of(d).n_bad, counts);
        assert_int_equal(kv_disk_gc(d, 0, NULL), KVD_OK);
        assert_int_equal(stats_of(d).n_bad, 0);
        kv_disk_check(d);
        kv_disk_close(d);
    }
    print_message("%u of %u loads were tampered with\n", n_found, n_tampered_);
    assert_true(n_found > n_tampered_ / 2);
}

/* Pages exchanged between two units of one shape. */
static void swapped_units(void **state)
{
    char     path[512], a[KV_DISK_PAGE_BYTES], b[KV_DISK_PAGE_BYTES];
    kv_disk *d = open_plain();
    uint64_t n_ok, n_bad;
    FILE    *f;

    (void)state;
    put_ok(d, &blocks_[0]);
    flush_ok(d);
    put_ok(d, &blocks_[1]);
    flush_ok(d);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    assert_int_equal(n_ok, 2);
    assert_int_equal(n_bad, 0);
    kv_disk_close(d);
    data_file(path);
    f = fopen(path, "r+b");
    assert_non_null(f);
    for (long page = 0; page < 7; page++) { /* all of them: 3 + 3 + 1 each */
        fseek(f, page * KV_DISK_PAGE_BYTES, SEEK_SET);
        assert_int_equal(fread(a, 1, sizeof(a), f), sizeof(a));
        fseek(f, (page + 7) * KV_DISK_PAGE_BYTES, SEEK_SET);
        assert_int_equal(fread(b, 1, sizeof(b), f), sizeof(b));
        fseek(f, (page + 7) * KV_DISK_PAGE_BYTES, SEEK_SET);
        fwrite(a, 1, sizeof(a), f);
        fseek(f, page * KV_DISK_PAGE_BYTES, SEEK_SET);
        fwrite(b, 1, sizeof(b), f);
    }
    fclose(f);
    d = open_plain();
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    assert_int_equal(n_bad, 2);
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    kv_disk_check(d);
    kv_disk_close(d);
}

static void lost_files(void **state)
{
    kv_disk      *d = open_plain();
    kv_disk_match m;
    char          path[512];
    FILE         *f;
    kvd_err       err;

    (void)state;
    put_all(d);
    kv_disk_close(d);
    data_file(path);
    assert_int_equal(truncate(path, 5000), 0);
    d = open_plain();
    assert_int_equal(dm_find(d, token_, N_TOKEN, NULL, &m, NULL), KVD_OK);
    assert_int_equal(dm_read(d, &m, token_, &rng_, false, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "00000001.kvd at "));
    kv_disk_match_close(d, &m);
    kv_disk_close(d);
    unlink(path);
    d = open_plain();
    assert_int_equal(known(d, N_TOKEN, NULL), 0);
    assert_int_equal(stats_of(d).n_unit, 0);
    put_ok(d, &blocks_[0]);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN, NULL), DM_BLOCK);
    kv_disk_close(d);

    /* A catalogue that is none: put aside, the store starts empty; removed, if something is there
     * that it cannot take the place of. */
    for (int taken = 0; taken < 2; taken++) {
        snprintf(path, sizeof(path), "%s/catalog.db", dir_);
        f = fopen(path, "wb");
        assert_non_null(f);
        for (int i = 0; i < 100; i++)
            fputs("this is not a database at all, not even close to one", f);
        fclose(f);
        d = open_plain();
        assert_int_equal(stats_of(d).n_unit, 0);
        assert_true(stats_of(d).n_quarantined > 0);
        put_all(d);
        check_all(d);
        kv_disk_close(d);
        snprintf(path, sizeof(path), "%s/catalog.bad", dir_);
        assert_int_equal(access(path, F_OK), 0);
        if (!taken)
            assert_true(unlink(path) == 0 && mkdir(path, 0700) == 0);
    }
    assert_int_equal(rmdir(path), 0);
}

/* ---- against a model -------------------------------------------------------------- */

#define MODEL_DEPTH 36u
#define MODEL_WAYS  3u
#define MODEL_UNITS 4096u

typedef struct model {
    int32_t  way[MODEL_WAYS][MODEL_DEPTH * DM_BLOCK]; /* sequences that share beginnings */
    uint64_t n_op;
    struct {
        uint32_t way;
        dm_unit  u;
    } put[MODEL_UNITS]; /* what was published */
    uint32_t n_put;
} model;

/* How many leading tokens of a sequence the published units cover. */
static uint64_t model_known(const model *m, uint32_t way, uint64_t n)
{
    uint64_t best = 0, blocks = 0;

    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < m->n_put; i++) {
            const dm_unit *u     = &m->put[i].u;
            const uint32_t n_blk = u->kind == KV_DISK_SEGMENT ? KV_DISK_SEGMENT_BLOCKS : 1;
            const uint64_t end   = (blocks + 1) * DM_BLOCK;

            if (u->kind == KV_DISK_TAIL || blocks < u->first_block ||
                blocks >= u->first_block + n_blk || end > n ||
                memcmp(m->way[m->put[i].way], m->way[way], end * 4) != 0)
                continue;
            blocks++;
            more = true;
            break;
        }
    }
    best = blocks * DM_BLOCK;
    for (uint32_t i = 0; i < m->n_put; i++) {
        const dm_unit *u = &m->put[i].u;
        uint64_t       k = 0;

        if (u->kind != KV_DISK_TAIL || u->first_block + 1 < blocks || u->first_block > blocks)
            continue;
        while (k < u->first_block * DM_BLOCK + u->n_tail_token && k < n &&
               m->way[m->put[i].way][k] == m->way[way][k])
            k++;
        if (k >= u->first_block * DM_BLOCK)
            best = kvd_max_u64(best, k);
    }
    return best;
}

static void model_put(model *m, kv_disk *d, bool commit)
{
    const uint32_t way = (uint32_t)kvd_rng_below(&rng_, MODEL_WAYS);
    dm_unit        u   = { .kind = (kv_disk_kind)kvd_rng_below(&rng_, 3) };
    kvd_err        err = { 0 };

    u.n_tail_token =
        u.kind == KV_DISK_TAIL ? 1 + (uint32_t)kvd_rng_below(&rng_, 2 * DM_BLOCK - 1) : 0;
    u.first_block = kvd_rng_below(&rng_, u.kind == KV_DISK_SEGMENT ? MODEL_DEPTH - 15 : 6);
    if (!commit) {
        const kv_disk_name n = dm_name(d, m->way[way], &u);
        kv_disk_put        put;

        assert_int_equal(kv_disk_put_begin(d, &n, &put, &err), KVD_OK);
        assert_int_equal(put == KV_DISK_NONE
                             ? KVD_OK
                             : dm_put_lanes(d, put, m->way[way], &u, 2, &rng_, &err),
                         KVD_OK);
        kv_disk_put_abort(d, put);
        return;
    }
    if (dm_put(d, m->way[way], &u, &rng_, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_true(m->n_put < MODEL_UNITS);
    m->put[m->n_put].way = way;
    m->put[m->n_put++].u = u;
}

static void model_find(model *m, kv_disk *d)
{
    const uint32_t way = (uint32_t)kvd_rng_below(&rng_, MODEL_WAYS);
    const uint64_t n   = kvd_rng_below(&rng_, MODEL_DEPTH * DM_BLOCK + 1);
    kv_disk_match  match;
    kvd_err        err = { 0 };

    flush_ok(d);
    assert_int_equal(dm_find(d, m->way[way], n, NULL, &match, &err), KVD_OK);
    assert_int_equal(match.n_token + match.n_tail_token, model_known(m, way, n));
    if (dm_read(d, &match, m->way[way], &rng_, true, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_disk_match_close(d, &match);
}

static void random_operations(void **state)
{
    model   *m = kvd_calloc(1, sizeof(*m));
    kv_disk *d = open_plain();

    (void)state;
    for (uint32_t w = 0; w < MODEL_WAYS; w++)
        for (uint32_t i = 0; i < MODEL_DEPTH * DM_BLOCK; i++)
            m->way[w][i] = i < w * 70 && w ? m->way[w - 1][i] : (int32_t)kvd_rng_below(&rng_, 9);
    for (m->n_op = 0; m->n_op < 600; m->n_op++) {
        const uint64_t op = kvd_rng_below(&rng_, 20);

        if (op < 8)
            model_put(m, d, true);
        else if (op < 10)
            model_put(m, d, false);
        else if (op < 18)
            model_find(m, d);
        else if (op == 18) {
            kv_disk_close(d);
            d = open_plain();
        } else if (kvd_rng_below(&rng_, 8) == 0) {
            flush_ok(d);
            assert_int_equal(kv_disk_clear(d, NULL), KVD_OK);
            m->n_put = 0;
        }
        if (m->n_op % 50 == 0)
            kv_disk_check(d);
    }
    print_message("seed %llu: %u units in the end\n", (unsigned long long)seed_, m->n_put);
    kv_disk_close(d);
    kvd_free(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(put_find_read, setup, teardown),
        cmocka_unit_test_setup_teardown(spans, setup, teardown),
        cmocka_unit_test_setup_teardown(names_keep_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(ways_part, setup, teardown),
        cmocka_unit_test_setup_teardown(the_catalogue_is_checked, setup, teardown),
        cmocka_unit_test_setup_teardown(salts_are_not_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(tails, setup, teardown),
        cmocka_unit_test_setup_teardown(puts_misused, setup, teardown),
        cmocka_unit_test_setup_teardown(reads_misused, setup, teardown),
        cmocka_unit_test_setup_teardown(eviction, setup, teardown),
        cmocka_unit_test_setup_teardown(limits, setup, teardown),
        cmocka_unit_test_setup_teardown(files, setup, teardown),
        cmocka_unit_test_setup_teardown(tampered_units, setup, teardown),
        cmocka_unit_test_setup_teardown(swapped_units, setup, teardown),
        cmocka_unit_test_setup_teardown(lost_files, setup, teardown),
        cmocka_unit_test_setup_teardown(random_operations, setup, teardown),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--tampered") == 0)
            n_tampered_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
