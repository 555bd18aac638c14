/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_disk_golden.c - the sample directory tests/data/kv: the store opens and reads it, and an
 * independent reading by docs/format-kv.md finds the same: names, layout, checksums.
 * Its segment has its records in another order, which the store does not write, but reads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <openssl/evp.h>
#include <sqlite3.h>
#include <xxhash.h>

#include "support/disk_model.h"

#define LANES   2u
#define BLOCK   8u
#define RECORD  64u
#define AUX     12u
#define TAIL    16u
#define N_BLOCK 18u /* 1 block, 1 segment, 1 block; then a tail of 5 tokens */
#define N_TAIL  5u
#define CHUNKS  2u /* of a block */
#define PAGE    4096u

static int32_t             token_[N_BLOCK * BLOCK + N_TAIL];
static const kv_disk_bytes prov_ = { "exact", 5 };

static void make_tokens(void)
{
    for (uint32_t i = 0; i < KVD_COUNTOF(token_); i++)
        token_[i] = (int32_t)(i * 100 + 7);
}

static kv_disk_params params(const char *dir)
{
    kv_disk_params p = dm_params(dir);

    p.geometry = (kv_disk_geometry){ LANES, BLOCK, 4, RECORD, AUX, TAIL };
    for (uint32_t i = 0; i < KV_DISK_KEY_BYTES; i++)
        p.fingerprint[i] = (uint8_t)i;
    return p;
}

/* Byte i of a record, of the aux of a block, of a raw token. */
static uint8_t record_byte(uint32_t block, uint32_t lane, uint32_t chunk, uint32_t i)
{
    return (uint8_t)(block * 50 + lane * 20 + chunk * 7 + i);
}
static uint8_t aux_byte(uint32_t block, uint32_t lane, uint32_t i)
{
    return (uint8_t)(200 - block - lane * 3 - i);
}
static uint8_t tail_byte(uint32_t t, uint32_t lane, uint32_t i)
{
    return (uint8_t)(t * 31 + lane * 9 + i * 2);
}
/* The order of a lane of the segment: the chunk at place i. */
static uint16_t chunk_at(uint32_t lane, uint32_t i)
{
    return (uint16_t)((i * 5 + lane) % (KV_DISK_SEGMENT_BLOCKS * CHUNKS));
}

/* ---- the store reads it ----------------------------------------------------------- */

static void check_span(kv_disk *d, const kv_disk_span *s, uint32_t first)
{
    static uint8_t rec[KV_DISK_SEGMENT_BLOCKS * CHUNKS * RECORD], aux[KV_DISK_SEGMENT_BLOCKS * AUX];

    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t     n_rec = s->kind == KV_DISK_TAIL ? s->n_token : s->n_block * CHUNKS;
        const kv_disk_read r[]   = {
              { s->unit, KV_DISK_RECORDS, lane, s->first_block * CHUNKS, n_rec, rec },
              { s->unit, KV_DISK_AUX, lane, s->first_block, s->n_block, aux }
        };

        assert_int_equal(kv_disk_read_now(d, r, s->kind == KV_DISK_TAIL ? 1 : 2, NULL), KVD_OK);
        for (uint32_t i = 0; s->kind == KV_DISK_TAIL && i < n_rec * TAIL; i++)
            assert_int_equal(rec[i], tail_byte(i / TAIL, lane, i % TAIL));
        for (uint32_t i = 0; s->kind != KV_DISK_TAIL && i < n_rec * RECORD; i++)
            assert_int_equal(rec[i], record_byte(first + i / (CHUNKS * RECORD), lane,
                                                 i / RECORD % CHUNKS, i % RECORD));
        for (uint32_t i = 0; i < s->n_block * AUX; i++)
            assert_int_equal(aux[i], aux_byte(first + i / AUX, lane, i % AUX));
    }
}

/* Chunks one by one and in pairs, which lie apart where the segment has another order. */
static void check_chunks(kv_disk *d, const kv_disk_span *s, uint32_t first)
{
    uint8_t rec[2 * RECORD];

    for (uint32_t i = 0; i < LANES * s->n_block * CHUNKS; i++) {
        const uint32_t     lane = i % LANES, chunk = i / LANES;
        const uint32_t     n = chunk + 1 < s->n_block * CHUNKS && chunk % 3 ? 2 : 1;
        const kv_disk_read r = { s->unit, KV_DISK_RECORDS, lane, s->first_block * CHUNKS + chunk, n,
                                 rec };

        assert_int_equal(kv_disk_read_now(d, &r, 1, NULL), KVD_OK);
        for (uint32_t k = 0; k < n * RECORD; k++) {
            const uint32_t c = chunk + k / RECORD;

            assert_int_equal(rec[k], record_byte(first + c / CHUNKS, lane, c % CHUNKS, k % RECORD));
        }
    }
}

/* What the sample had, among n_unit units. */
static void read_sample(const char *dir, uint64_t n_unit)
{
    kv_disk_params p = params(dir);
    kv_disk_match  m;
    kv_disk       *d;
    kv_disk_query  q = { token_, KVD_COUNTOF(token_), { NULL, 0 }, &prov_, 1, false };
    uint64_t       n_ok, n_bad;
    uint32_t       first = 0;

    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    assert_int_equal(kv_disk_find(d, &q, &m, NULL), KVD_OK);
    assert_int_equal(m.n_token, N_BLOCK * BLOCK);
    assert_int_equal(m.n_tail_token, N_TAIL);
    assert_int_equal(m.n_span, 4);
    for (uint32_t i = 0; i < m.n_span; i++) {
        check_span(d, &m.span[i], first);
        check_chunks(d, &m.span[i], first);
        first += m.span[i].n_block;
    }
    kv_disk_match_close(d, &m);
    q.salt = (kv_disk_bytes){ "golden", 6 };
    assert_int_equal(kv_disk_find(d, &q, &m, NULL), KVD_OK);
    assert_int_equal(m.n_token, BLOCK);
    kv_disk_match_close(d, &m);
    assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
    assert_int_equal(n_ok, n_unit);
    assert_int_equal(n_bad, 0);
    kv_disk_close(d);
}

static void the_store_reads_it(void **state)
{
    read_sample(*state, 5);
}

/* ---- what is added to it ------------------------------------------------------------ */

static int64_t pragma(const char *dir, const char *sql)
{
    char          path[512];
    sqlite3      *db;
    sqlite3_stmt *s;
    int64_t       v;

    snprintf(path, sizeof(path), "%s/catalog.db", dir);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(s), SQLITE_ROW);
    v = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    sqlite3_close(db);
    return v;
}

static uint32_t n_told_;

static void count_lines(void *ctx, kvd_log_level level, const char *msg)
{
    (void)ctx;
    (void)level;
    n_told_ += strstr(msg, "a cache of format 1, made one of format 2") != NULL;
}

/* An open block beside units of format 1: all are found, now and when it is opened again. */
static void it_becomes_format_2(void **state)
{
    static uint8_t     rec[BLOCK * TAIL];
    const kv_disk_name name = { .kind       = KV_DISK_OPEN,
                                .token      = (const int32_t[]){ 1, 2, 3, 4, 5, 6, 7, 8 },
                                .n_token    = BLOCK,
                                .provenance = prov_ };
    kv_disk_params     p    = params(*state);
    kv_disk_query      q    = { name.token, BLOCK, { NULL, 0 }, &prov_, 1, false };
    kv_disk_match      m;
    kv_disk           *d;
    kv_disk_put        put;
    uint64_t           n_ok, n_bad;

    assert_int_equal(pragma(*state, "PRAGMA user_version"), 1);
    kvd_set_log(count_lines, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
        assert_int_equal(kv_disk_put_begin(d, &name, &put, NULL), KVD_OK);
        assert_int_equal(put == KV_DISK_NONE, i); /* the second time it is known */
        for (uint32_t lane = 0; lane < LANES && i == 0; lane++)
            assert_int_equal(kv_disk_put_lane(d, put, lane, rec, NULL, NULL), KVD_OK);
        if (i == 0)
            assert_int_equal(kv_disk_put_commit(d, put, NULL), KVD_OK);
        assert_int_equal(kv_disk_flush(d, NULL), KVD_OK);
        assert_int_equal(kv_disk_find(d, &q, &m, NULL), KVD_OK);
        assert_int_equal(m.n_tail_token, BLOCK);
        kv_disk_match_close(d, &m);
        assert_int_equal(kv_disk_verify(d, &n_ok, &n_bad, NULL), KVD_OK);
        assert_int_equal(n_ok, 6);
        assert_int_equal(n_bad, 0);
        kv_disk_close(d);
    }
    kvd_set_log(NULL, NULL);
    assert_int_equal(n_told_, 1);
    assert_int_equal(pragma(*state, "PRAGMA user_version"), 2);
    read_sample(*state, 6);
}

/* ---- by the document, without the store's code -------------------------------------- */

static void sha256(uint8_t out[32], const void *const *part, const size_t *bytes, uint32_t n)
{
    EVP_MD_CTX *c = EVP_MD_CTX_new();

    assert_int_equal(EVP_DigestInit_ex(c, EVP_sha256(), NULL), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(EVP_DigestUpdate(c, part[i], bytes[i]), 1);
    assert_int_equal(EVP_DigestFinal_ex(c, out, NULL), 1);
    EVP_MD_CTX_free(c);
}

static void chain_of_blocks(uint8_t key[32], uint32_t n_block)
{
    const uint32_t shape[6] = { LANES, BLOCK, 4, RECORD, AUX, TAIL };
    const uint32_t head[3]  = { 5, 0, BLOCK };
    uint8_t        fingerprint[32], model[32], salt[32] = { 0 };

    for (uint32_t i = 0; i < 32; i++)
        fingerprint[i] = (uint8_t)i;
    sha256(model, (const void *[]){ "kvd1 model", fingerprint, shape }, (size_t[]){ 10, 32, 24 },
           3);
    sha256(key, (const void *[]){ "kvd1 root", model, salt }, (size_t[]){ 9, 32, 32 }, 3);
    for (uint32_t b = 0; b < n_block; b++)
        sha256(key,
               (const void *[]){ "kvd1 block", model, salt, key, head, "exact",
                                 token_ + b * BLOCK },
               (size_t[]){ 10, 32, 32, 32, 12, 5, BLOCK * 4 }, 7);
}

static void the_document_is_right(void **state)
{
    const uint32_t lane = 1, n_place = KV_DISK_SEGMENT_BLOCKS * CHUNKS;
    sqlite3       *db;
    sqlite3_stmt  *s;
    uint8_t        key[32], page[PAGE];
    uint64_t       off, bytes, sums_hash, sum[4], seed;
    char           path[512];
    FILE          *f;

    /* the segment's row, by the key of its last block */
    chain_of_blocks(key, 1 + KV_DISK_SEGMENT_BLOCKS);
    snprintf(path, sizeof(path), "%s/catalog.db", (const char *)*state);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db,
                                        "SELECT u.file, u.off, u.bytes, u.sums_hash FROM unit u"
                                        " JOIN name n ON n.unit = u.id WHERE n.key = ?1 AND"
                                        " n.block = 15 AND u.kind = 1 AND u.first_token = 8",
                                        -1, &s, NULL),
                     SQLITE_OK);
    sqlite3_bind_blob(s, 1, key, 32, SQLITE_STATIC);
    assert_int_equal(sqlite3_step(s), SQLITE_ROW);
    snprintf(path, sizeof(path), "%s/%08x.kvd", (const char *)*state, sqlite3_column_int(s, 0));
    off       = (uint64_t)sqlite3_column_int64(s, 1);
    bytes     = (uint64_t)sqlite3_column_int64(s, 2);
    sums_hash = (uint64_t)sqlite3_column_int64(s, 3);
    sqlite3_finalize(s);
    sqlite3_close(db);

    /* its layout: 2 lanes of records, 2 of aux and order, the table: a page each */
    assert_int_equal(bytes, 5 * PAGE);
    f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, (long)(off + lane * PAGE), SEEK_SET);
    assert_int_equal(fread(page, 1, PAGE, f), PAGE);
    for (uint32_t i = 0; i < n_place * RECORD; i++) {
        const uint32_t chunk = chunk_at(lane, i / RECORD);

        assert_int_equal(page[i],
                         record_byte(1 + chunk / CHUNKS, lane, chunk % CHUNKS, i % RECORD));
    }
    for (uint32_t i = n_place * RECORD; i < PAGE; i++)
        assert_int_equal(page[i], 0);
    fseek(f, (long)(off + (LANES + lane) * PAGE), SEEK_SET);
    assert_int_equal(fread(page, 1, PAGE, f), PAGE);
    for (uint32_t i = 0; i < KV_DISK_SEGMENT_BLOCKS * AUX; i++)
        assert_int_equal(page[i], aux_byte(1 + i / AUX, lane, i % AUX));
    for (uint32_t i = 0; i < n_place; i++) {
        uint16_t c;

        memcpy(&c, page + KV_DISK_SEGMENT_BLOCKS * AUX + 2 * i, 2);
        assert_int_equal(c, chunk_at(lane, i));
    }

    /* checksums: of this page (lane n_lane + 1, page 0), and of the table */
    const uint32_t at[2] = { LANES + lane, 0 };

    seed = XXH3_64bits(key, 32);
    fseek(f, (long)(off + 4 * PAGE), SEEK_SET);
    assert_int_equal(fread(sum, 1, sizeof(sum), f), sizeof(sum));
    fclose(f);
    assert_true(sum[3] == XXH3_64bits_withSeed(page, PAGE, XXH3_64bits_withSeed(at, 8, seed)));
    assert_true(sums_hash == XXH3_64bits_withSeed(sum, sizeof(sum), seed));
}

static int copy_sample(void **state)
{
    static char dir[256];

    dm_dir_make(dir);
    dm_dir_copy(KVD_TEST_DATA "/kv", dir);
    *state = dir;
    return 0;
}

static int drop_copy(void **state)
{
    dm_dir_remove(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_store_reads_it, copy_sample, drop_copy),
        cmocka_unit_test_setup_teardown(it_becomes_format_2, copy_sample, drop_copy),
        cmocka_unit_test_setup_teardown(the_document_is_right, copy_sample, drop_copy),
    };

    make_tokens();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
