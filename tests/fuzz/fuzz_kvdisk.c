/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_kvdisk.c - a cache directory as somebody has damaged it: the sample of tests/data/kv with
 * bytes of its files and values of its catalogue replaced.  The store opens or says why not; what
 * it finds and reads is right or refused; storing, verifying, listing and clearing go through.
 *
 * Input: a sequence of [kind, ...]:  0 n off16 bytes: in the data file;  1 n off16 bytes: in the
 * catalogue's file;  2 column row value64: an integer;  3 column row n bytes: a blob;
 * 4 size16: the data file cut. */
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/disk_model.h"

#define OPS_MAX 32

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const int_column_[]  = { "unit SET kind",
                                            "unit SET bad",
                                            "unit SET first_token",
                                            "unit SET n_token",
                                            "unit SET ordered",
                                            "unit SET file",
                                            "unit SET off",
                                            "unit SET bytes",
                                            "unit SET model",
                                            "unit SET sums_hash",
                                            "unit SET row_hash",
                                            "unit SET used",
                                            "unit SET created",
                                            "model SET n_lane",
                                            "model SET block_tokens",
                                            "model SET chunk_tokens",
                                            "model SET record_bytes",
                                            "model SET aux_bytes",
                                            "model SET tail_token_bytes",
                                            "name SET unit",
                                            "name SET block",
                                            "unit SET id" };
static const char *const blob_column_[] = { "unit SET key",   "unit SET parent",
                                            "unit SET salt",  "unit SET provenance",
                                            "token SET data", "model SET name",
                                            "name SET key",   "meta SET value" };

typedef struct input {
    const uint8_t *p;
    size_t         left;
} input;

static uint64_t take(input *in, uint32_t bytes)
{
    uint64_t v = 0;

    for (uint32_t i = 0; i < bytes && in->left > 0; i++, in->p++, in->left--)
        v |= (uint64_t)*in->p << 8 * i;
    return v;
}

static void die(const char *why)
{
    fprintf(stderr, "fuzz_kvdisk: %s\n", why);
    abort();
}

static void patch(const char *path, input *in)
{
    const uint32_t n   = (uint32_t)take(in, 1) % 17;
    const long     off = (long)take(in, 2) * 2; /* the sample has less than 128 KiB */
    FILE          *f   = fopen(path, "r+b");

    for (uint32_t i = 0; i < n; i++) {
        const int c = (int)take(in, 1);

        if (f && fseek(f, off + (long)i, SEEK_SET) == 0)
            fputc(c, f);
    }
    if (f)
        fclose(f);
}

static void update(const char *path, input *in, bool blob)
{
    const uint32_t column = (uint32_t)take(in, 1);
    const int64_t  row    = (int64_t)take(in, 1);
    uint8_t        bytes[64];
    uint32_t       n = 0;
    char           sql[160];
    sqlite3       *db = NULL;
    sqlite3_stmt  *s  = NULL;
    const char    *target =
        blob ? blob_column_[column % (sizeof(blob_column_) / sizeof(blob_column_[0]))]
                : int_column_[column % (sizeof(int_column_) / sizeof(int_column_[0]))];
    const char *const where = target[0] == 'u' || strncmp(target, "mo", 2) == 0 ? " WHERE id = ?2"
                              : target[0] == 't'                                ? " WHERE unit = ?2"
                                                                                : "";

    snprintf(sql, sizeof(sql), "UPDATE OR IGNORE %s = ?1%s", target, where);
    if (blob)
        for (n = (uint32_t)take(in, 1) % sizeof(bytes); n > 0 && in->left < n; n--)
            ;
    for (uint32_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)take(in, 1);
    if (sqlite3_open(path, &db) == SQLITE_OK &&
        sqlite3_prepare_v2(db, sql, -1, &s, NULL) == SQLITE_OK) {
        if (blob)
            sqlite3_bind_blob(s, 1, bytes, (int)n, SQLITE_STATIC);
        else
            sqlite3_bind_int64(s, 1, (int64_t)take(in, 8));
        if (where[0])
            sqlite3_bind_int64(s, 2, 1 + row % 5);
        (void)sqlite3_step(s);
    }
    sqlite3_finalize(s);
    sqlite3_close(db);
}

/* false: the catalogue's own pages were changed, so that it need not agree with itself. */
static bool damage(const char *dir, input *in)
{
    bool whole = true;
    char data[512], catalog[512];

    snprintf(data, sizeof(data), "%s/00000001.kvd", dir);
    snprintf(catalog, sizeof(catalog), "%s/catalog.db", dir);
    for (uint32_t i = 0; i < OPS_MAX && in->left > 0; i++) {
        const uint64_t kind = take(in, 1) % 5;

        if (kind == 0)
            patch(data, in);
        else if (kind == 1)
            patch(catalog, in);
        else if (kind < 4)
            update(catalog, in, kind == 3);
        else if (truncate(data, (off_t)take(in, 2) * 2) != 0)
            die("truncate");
        whole = whole && kind != 1;
    }
    return whole;
}

/* ---- what the sample holds, as tests/unit/test_kv_disk_golden.c has written it ------ */

#define LANES   2u
#define BLOCK   8u
#define RECORD  64u
#define N_BLOCK 18u
#define N_TAIL  5u

static uint8_t want_byte(const kv_disk_span *s, uint32_t block, uint32_t lane, uint32_t i)
{
    if (s->kind == KV_DISK_TAIL)
        return (uint8_t)(i / 16 * 31 + lane * 9 + i % 16 * 2);
    return (uint8_t)((block + i / (2 * RECORD)) * 50 + lane * 20 + i / RECORD % 2 * 7 + i % RECORD);
}

static void read_span(kv_disk *d, const kv_disk_span *s, uint32_t block)
{
    static uint8_t buf[16 * 2 * RECORD];

    for (uint32_t lane = 0; lane < LANES; lane++) {
        const bool         tail  = s->kind == KV_DISK_TAIL;
        const uint32_t     n     = tail ? s->n_token : s->n_block * 2;
        const uint32_t     bytes = n * (tail ? 16 : RECORD);
        const kv_disk_read r     = { s->unit, KV_DISK_RECORDS, lane, s->first_block * 2, n, buf };

        if (bytes > sizeof(buf))
            die("a span longer than its unit");
        if (kv_disk_read_now(d, &r, 1, NULL) != KVD_OK)
            return;
        for (uint32_t i = 0; i < bytes; i++)
            if (buf[i] != want_byte(s, block, lane, i))
                die("wrong bytes");
    }
}

static void find_and_read(kv_disk *d, const int32_t *token, uint32_t n)
{
    const kv_disk_bytes prov = { "exact", 5 };
    const kv_disk_query q    = { token, n, { NULL, 0 }, &prov, 1, false };
    kv_disk_match       m;
    uint32_t            block = 0;

    if (kv_disk_find(d, &q, &m, NULL) != KVD_OK)
        return;
    if (m.n_token + m.n_tail_token > n)
        die("more found than asked for");
    for (uint32_t i = 0; i < m.n_span; i++) {
        read_span(d, &m.span[i], block);
        block += m.span[i].n_block;
    }
    kv_disk_match_close(d, &m);
}

static bool any_entry(void *ctx, const kv_disk_entry *e)
{
    *(uint64_t *)ctx += e->bytes;
    return true;
}

static void use_store(const char *dir, bool whole)
{
    int32_t        token[N_BLOCK * BLOCK + N_TAIL];
    uint8_t        rec[2 * RECORD] = { 0 };
    kv_disk_params p               = dm_params(dir);
    kv_disk_name   n = { .token = token, .n_token = BLOCK, .provenance = { "other", 5 } };
    kv_disk       *d;
    kv_disk_put    put;
    uint64_t       n_ok, n_bad, sum = 0;

    p.geometry  = (kv_disk_geometry){ LANES, BLOCK, 4, RECORD, 12, 16 };
    p.max_units = 16;
    p.io.kind   = OS_IO_POOL;
    for (uint32_t i = 0; i < KV_DISK_KEY_BYTES; i++)
        p.fingerprint[i] = (uint8_t)i;
    for (uint32_t i = 0; i < N_BLOCK * BLOCK + N_TAIL; i++)
        token[i] = (int32_t)(i * 100 + 7);
    if (kv_disk_open(&d, &p, NULL) != KVD_OK)
        return;
    find_and_read(d, token, N_BLOCK * BLOCK + N_TAIL);
    find_and_read(d, token, BLOCK * 3);
    if (kv_disk_put_begin(d, &n, &put, NULL) == KVD_OK && put != KV_DISK_NONE) {
        for (uint32_t lane = 0; lane < LANES; lane++)
            (void)kv_disk_put_lane(d, put, lane, rec, rec, NULL);
        (void)kv_disk_put_commit(d, put, NULL);
    }
    (void)kv_disk_flush(d, NULL);
    if (whole)
        kv_disk_check(d);
    (void)kv_disk_ls(d, any_entry, &sum, NULL);
    (void)kv_disk_verify(d, &n_ok, &n_bad, NULL);
    find_and_read(d, token, N_BLOCK * BLOCK + N_TAIL);
    (void)kv_disk_gc(d, sum / 2, NULL);
    if (whole)
        kv_disk_check(d);
    (void)kv_disk_clear(d, NULL);
    if (whole)
        kv_disk_check(d);
    kv_disk_close(d);
}

static char dir_[256];

static void drop_dir(void)
{
    dm_dir_remove(dir_);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = { data, size };

    if (!dir_[0]) {
        dm_dir_make(dir_);
        atexit(drop_dir);
    }
    dm_dir_empty(dir_);
    dm_dir_copy(KVD_TEST_DATA "/kv", dir_);
    use_store(dir_, damage(dir_, &in));
    return 0;
}
