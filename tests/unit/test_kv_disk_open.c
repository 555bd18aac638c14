/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_disk_open.c - open blocks: a tail that grows writes only what is new, becomes a block in
 * its own place, serves whoever shares a part of it, and outlives a process that is killed while it
 * grows.  Every byte of K and V follows from the tokens before it, so a wrong one cannot pass. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"

#define LANES   3u
#define BLOCK   32u
#define CHUNK   4u
#define ROW     512u              /* K or V of a token */
#define RECORD  (CHUNK * 2 * ROW) /* a page: an open block grows by 4 tokens */
#define AUX     100u
#define PAGE    KV_DISK_PAGE_BYTES
#define N_TOKEN (3 * BLOCK)

static char                dir_[256];
static int32_t             token_[N_TOKEN];
static const kv_disk_bytes prov_[] = { { "exact", 5 }, { "sparse", 6 } };

static kv_disk_params params(void)
{
    kv_disk_params p = dm_params(dir_);

    p.geometry    = (kv_disk_geometry){ LANES, BLOCK, CHUNK, RECORD, AUX, 2 * ROW };
    p.raw_records = true;
    return p;
}

static kv_disk *open_store(void)
{
    const kv_disk_params p   = params();
    kvd_err              err = { 0 };
    kv_disk             *d;

    if (kv_disk_open(&d, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return d;
}

static kv_disk_stats stats_of(kv_disk *d)
{
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    return s;
}

static void flush_ok(kv_disk *d)
{
    kvd_err err = { 0 };

    if (kv_disk_flush(d, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kv_disk_check(d);
}

/* ---- bytes ------------------------------------------------------------------------ */

static void row_of(uint8_t out[ROW], uint32_t t, uint32_t lane, bool v)
{
    uint64_t h = lane * 2 + v + 1;

    for (uint32_t i = 0; i <= t; i++)
        h = (h ^ (uint32_t)token_[i]) * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (uint32_t i = 0; i < ROW; i++, h = h * 6364136223846793005u + 1442695040888963407u)
        out[i] = (uint8_t)(h >> 56);
}

/* Where token t's row is in records that begin with a block. */
static uint32_t in_record(uint32_t t, bool v)
{
    return t % BLOCK / CHUNK * RECORD + (v ? CHUNK * ROW : 0) + t % CHUNK * ROW;
}

static kvd_status put_lane(kv_disk *d, kv_disk_put put, kv_disk_kind kind, uint32_t first,
                           uint32_t n, uint32_t lane, kvd_err *err)
{
    static uint8_t buf[BLOCK * 2 * ROW], aux[AUX];

    for (uint32_t i = 0; i < 2 * n; i++) {
        const uint32_t at = kind == KV_DISK_TAIL ? i * ROW : in_record(first + i / 2, i % 2);

        row_of(buf + at, first + i / 2, lane, i % 2);
    }
    memset(aux, (int)(lane + first), sizeof(aux));
    return kv_disk_put_lane(d, put, lane, buf, kind == KV_DISK_BLOCK ? aux : NULL, err);
}

/* ---- putting ---------------------------------------------------------------------- */

static void parent_of(kv_disk *d, uint32_t first, uint32_t prov, kv_disk_key *out)
{
    kv_disk_name n = { .kind = KV_DISK_BLOCK, .n_token = BLOCK, .provenance = prov_[prov] };

    memset(out, 0, sizeof(*out));
    for (uint32_t at = 0; at < first; at += BLOCK) {
        n.parent = *out;
        n.token  = token_ + at;
        assert_int_equal(kv_disk_key_of(d, &n, out, NULL), KVD_OK);
    }
}

/* Leaves out the last `missing` lanes, and the commit then. */
static void put_unit(kv_disk *d, kv_disk_kind kind, const kv_disk_key *parent, uint32_t first,
                     uint32_t n, uint32_t prov, uint32_t missing)
{
    const kv_disk_name name = { .kind        = kind,
                                .parent      = *parent,
                                .first_token = first,
                                .token       = token_ + first,
                                .n_token     = n,
                                .provenance  = prov_[prov],
                                .takes       = prov_,
                                .n_takes     = prov };
    kvd_err            err  = { 0 };
    kv_disk_put        put;

    if (kv_disk_put_begin(d, &name, &put, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    if (put == KV_DISK_NONE)
        return;
    for (uint32_t lane = 0; lane < LANES - missing; lane++)
        if (put_lane(d, put, kind, first, n, lane, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    if (missing)
        kv_disk_put_abort(d, put);
    else if (kv_disk_put_commit(d, put, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* The first n tokens, as a sequence without sealed blocks stores them. */
static void store(kv_disk *d, uint32_t n, uint32_t prov)
{
    const uint32_t step = kv_disk_open_tokens(d);

    assert_int_equal(step, CHUNK);
    for (uint32_t first = 0; first < n; first += BLOCK) {
        const uint32_t here = n - first < BLOCK ? n - first : BLOCK;
        const uint32_t even = here - here % step;
        kv_disk_key    parent;

        parent_of(d, first, prov, &parent);
        if (even)
            put_unit(d, KV_DISK_OPEN, &parent, first, even, prov, 0);
        if (even && here > even) {
            const kv_disk_name open = { .kind        = KV_DISK_OPEN,
                                        .parent      = parent,
                                        .first_token = first,
                                        .token       = token_ + first,
                                        .n_token     = even,
                                        .provenance  = prov_[prov] };

            assert_int_equal(kv_disk_key_of(d, &open, &parent, NULL), KVD_OK);
        }
        if (here > even)
            put_unit(d, KV_DISK_TAIL, &parent, first + even, here - even, prov, 0);
    }
}

static void seal(kv_disk *d, uint32_t first, uint32_t prov)
{
    kv_disk_key parent;

    parent_of(d, first, prov, &parent);
    put_unit(d, KV_DISK_BLOCK, &parent, first, BLOCK, prov, 0);
}

/* ---- finding ---------------------------------------------------------------------- */

static kv_disk_match find(kv_disk *d, uint32_t n)
{
    const kv_disk_query q = {
        .token = token_, .n_token = n, .provenance = prov_, .n_provenance = 2
    };
    kv_disk_match m;
    kvd_err       err = { 0 };

    if (kv_disk_find(d, &q, &m, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return m;
}

static void read_span(kv_disk *d, const kv_disk_span *s, uint32_t first)
{
    static uint8_t buf[KV_DISK_SEGMENT_BLOCKS * BLOCK * 2 * ROW];
    uint8_t        want[ROW];
    const bool     tail = s->kind == KV_DISK_TAIL;

    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t     n = tail ? s->n_token : (s->n_token + CHUNK - 1) / CHUNK;
        const kv_disk_read r = { s->unit, KV_DISK_RECORDS, lane, s->first_block * BLOCK / CHUNK, n,
                                 buf };
        kvd_err            err = { 0 };

        if (kv_disk_read_now(d, &r, 1, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        for (uint32_t i = 0; i < 2 * s->n_token; i++) {
            const uint32_t at = tail ? i * ROW : in_record(first + i / 2, i % 2);

            row_of(want, first + i / 2, lane, i % 2);
            assert_memory_equal(buf + at, want, ROW);
        }
    }
}

static void read_match(kv_disk *d, const kv_disk_match *m)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < m->n_span; at += m->span[i++].n_token)
        read_span(d, &m->span[i], at);
    assert_int_equal(at, m->n_token + m->n_tail_token);
}

/* How many of the first n tokens are found; all of them are read. */
static uint32_t known(kv_disk *d, uint32_t n)
{
    kv_disk_match  m     = find(d, n);
    const uint32_t found = (uint32_t)m.n_token + m.n_tail_token;

    read_match(d, &m);
    kv_disk_match_close(d, &m);
    return found;
}

static void verify_ok(kv_disk *d)
{
    uint64_t n_ok, n_bad;

    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    assert_int_equal(n_bad, 0);
    assert_int_equal(n_ok, stats_of(d).n_unit);
    assert_int_equal(stats_of(d).n_quarantined, 0);
}

/* ---- tests ------------------------------------------------------------------------ */

/* Pages: of records 3 for each 4 tokens, of aux 3, of each put a table; a rest has 3 and a table.
 */
static void only_what_is_new_is_written(void **state)
{
    static const uint32_t at[] = { 3, 4, 10, 18, 19, 32 };
    kv_disk              *d    = open_store();
    kv_disk_match         held = { 0 };
    uint64_t              pages;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(at); i++) {
        store(d, at[i], 0);
        flush_ok(d);
        assert_int_equal(known(d, N_TOKEN), at[i]);
        /* the rest behind 8 tokens stays, since it is held */
        assert_int_equal(stats_of(d).n_tail, 1 + (at[i] > 3 && at[i] % CHUNK > 0) + (at[i] > 10));
        if (at[i] == 10)
            held = find(d, N_TOKEN);
    }
    read_match(d, &held); /* found before it grew */
    kv_disk_match_close(d, &held);
    pages = 8 * LANES /* records */ + 4 /* grown: to 4, 8, 16, 32 */ + 4 * (LANES + 1) /* rests */;
    assert_int_equal(stats_of(d).written_bytes, pages * PAGE);
    seal(d, 0, 0);
    flush_ok(d);
    assert_int_equal(stats_of(d).written_bytes, (pages + LANES + 1) * PAGE);
    assert_int_equal(stats_of(d).n_unit, 2); /* and the rest that was held */
    assert_int_equal(stats_of(d).n_block, 1);
    assert_int_equal(known(d, BLOCK), BLOCK);
    verify_ok(d);
    kv_disk_close(d);
    d = open_store();
    verify_ok(d);
    assert_int_equal(known(d, N_TOKEN), BLOCK);
    store(d, BLOCK + 5, 0); /* it goes on behind the block */
    flush_ok(d);
    assert_int_equal(stats_of(d).n_put_dup, 1); /* the block has what is first */
    assert_int_equal(known(d, N_TOKEN), BLOCK + 5);
    kv_disk_close(d);
}

/* Two whole blocks' tokens that are no blocks yet, and what is behind the first. */
static void open_blocks_in_a_row(void **state)
{
    kv_disk      *d = open_store();
    kv_disk_match m;

    (void)state;
    store(d, BLOCK + 14, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), BLOCK + 14);
    assert_int_equal(known(d, BLOCK + 13), BLOCK + 13);
    assert_int_equal(known(d, BLOCK), BLOCK);
    assert_int_equal(known(d, BLOCK - 1), BLOCK - 1);
    seal(d, 0, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), BLOCK + 14);
    m = find(d, N_TOKEN);
    assert_int_equal(m.n_token, BLOCK); /* the rest is a tail */
    assert_int_equal(m.n_tail_token, 14);
    kv_disk_match_close(d, &m);
    verify_ok(d);
    kv_disk_close(d);
}

static void branches_share_what_they_can(void **state)
{
    kv_disk *d = open_store();

    (void)state;
    store(d, 18, 0);
    flush_ok(d);
    token_[9]++;
    assert_int_equal(known(d, N_TOKEN), 9);
    store(d, 21, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 21);
    token_[9]--;
    store(d, BLOCK, 0);
    flush_ok(d);
    seal(d, 0, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), BLOCK);
    assert_int_equal(known(d, 15), 15); /* a part of a block that was open */
    token_[20]++;
    assert_int_equal(known(d, N_TOKEN), 20);
    token_[20]--;
    token_[9]++;
    assert_int_equal(known(d, N_TOKEN), 21);
    token_[9]--;
    verify_ok(d);
    kv_disk_close(d);
}

static void provenance_gets_worse_only(void **state)
{
    kv_disk *d = open_store();

    (void)state;
    store(d, 16, 0);
    flush_ok(d);
    store(d, 26, 1); /* takes over what is exact */
    flush_ok(d);
    assert_int_equal(stats_of(d).n_unit, 2);
    assert_int_equal(known(d, N_TOKEN), 26);
    store(d, 28, 0); /* what is sparse is not exact */
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 28);
    assert_int_equal(stats_of(d).n_unit, 3);
    verify_ok(d);
    kv_disk_close(d);
}

/* A put that ends early leaves pages and checksums behind, which mean nothing. */
static void what_was_aborted_does_not_matter(void **state)
{
    kv_disk    *d = open_store();
    kv_disk_key root;

    (void)state;
    memset(&root, 0, sizeof(root));
    store(d, 8, 0);
    flush_ok(d);
    token_[10]++;
    put_unit(d, KV_DISK_OPEN, &root, 0, 24, 0, 1);
    token_[10]--;
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 8);
    verify_ok(d);
    store(d, 28, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 28);
    assert_int_equal(stats_of(d).n_unit, 1);
    verify_ok(d);
    kv_disk_close(d);
}

/* While one grows, another is written as a whole, and replaces it. */
static void two_at_once(void **state)
{
    kv_disk *d = open_store();

    (void)state;
    store(d, 8, 0);
    flush_ok(d);
    store(d, 16, 0);
    store(d, 24, 0);
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 24);
    assert_int_equal(stats_of(d).n_unit, 1);
    verify_ok(d);
    kv_disk_close(d);
}

static void damage_is_found(void **state)
{
    kv_disk       *d = open_store();
    const uint8_t  x = 0xa5;
    kv_disk_match  m;
    kv_disk_read   r;
    static uint8_t buf[BLOCK * 2 * ROW];
    char           path[512];
    FILE          *f;

    (void)state;
    store(d, 8, 0);
    flush_ok(d);
    store(d, 16, 0);
    flush_ok(d);
    kv_disk_close(d);
    snprintf(path, sizeof(path), "%s/00000001.kvd", dir_);
    f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, 3 * PAGE + 7, SEEK_SET); /* lane 0, chunk 3 */
    fwrite(&x, 1, 1, f);
    fclose(f);
    d = open_store();
    m = find(d, N_TOKEN);
    assert_int_equal(m.n_tail_token, 16);
    r = (kv_disk_read){ m.span[0].unit, KV_DISK_RECORDS, 0, 0, 4, buf };
    assert_int_equal(kv_disk_read_now(d, &r, 1, NULL), KVD_E_CORRUPT);
    kv_disk_match_close(d, &m);
    assert_int_equal(known(d, N_TOKEN), 0);
    store(d, 16, 0); /* anew */
    flush_ok(d);
    assert_int_equal(known(d, N_TOKEN), 16);
    kv_disk_close(d);
}

/* ---- killed while it grows ---------------------------------------------------------- */

typedef struct doom {
    const char *point;
    uint32_t    left;
} doom;

static void at_point(void *ctx, const char *point)
{
    doom *m = ctx;

    if (strcmp(m->point, point) == 0 && m->left-- == 0)
        raise(SIGKILL);
}

static void grow_and_die(doom *m)
{
    kv_disk_params p = params();
    kv_disk       *d;

    p.point     = at_point;
    p.point_ctx = m;
    if (kv_disk_open(&d, &p, NULL) != KVD_OK)
        _exit(1);
    store(d, 18, 1);
    (void)kv_disk_flush(d, NULL);
    store(d, BLOCK + 9, 1);
    (void)kv_disk_flush(d, NULL);
    seal(d, 0, 1);
    (void)kv_disk_flush(d, NULL);
    _exit(0); /* the point was not reached so often */
}

static void kill_between_appends(void **state)
{
    static const char *const point[] = { "reserved", "written", "synced", "published", "evicted" };
    uint32_t                 n_kill  = 0;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(point) * 6; i++) {
        doom     m = { point[i / 6], i % 6 };
        kv_disk *d;
        pid_t    pid;
        int      status;
        uint32_t n;

        dm_dir_empty(dir_);
        d = open_store();
        store(d, 10, 0);
        flush_ok(d);
        kv_disk_close(d);
        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            grow_and_die(&m);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        n_kill += WIFSIGNALED(status);
        assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        d = open_store();
        kv_disk_check(d);
        verify_ok(d);
        n = known(d, N_TOKEN);
        assert_true(n >= 8 && n <= BLOCK + 9); /* a rest may have gone, and what is behind it */
        store(d, BLOCK + 9, 1);
        flush_ok(d);
        seal(d, 0, 1);
        flush_ok(d);
        assert_int_equal(known(d, N_TOKEN), BLOCK + 9);
        verify_ok(d);
        kv_disk_close(d);
    }
    print_message("%u kills\n", n_kill);
    assert_true(n_kill >= 18);
}

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    for (uint32_t i = 0; i < N_TOKEN; i++)
        token_[i] = (int32_t)(i * 3 + 1);
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
        cmocka_unit_test_setup_teardown(only_what_is_new_is_written, setup, teardown),
        cmocka_unit_test_setup_teardown(open_blocks_in_a_row, setup, teardown),
        cmocka_unit_test_setup_teardown(branches_share_what_they_can, setup, teardown),
        cmocka_unit_test_setup_teardown(provenance_gets_worse_only, setup, teardown),
        cmocka_unit_test_setup_teardown(what_was_aborted_does_not_matter, setup, teardown),
        cmocka_unit_test_setup_teardown(two_at_once, setup, teardown),
        cmocka_unit_test_setup_teardown(damage_is_found, setup, teardown),
        cmocka_unit_test_setup_teardown(kill_between_appends, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
