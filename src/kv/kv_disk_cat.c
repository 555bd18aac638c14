/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_cat.c - the catalogue: which units there are, in a SQLite database (WAL).
 *
 * Owns: catalog.db and its prepared statements.  Other processes are kept out by the directory's
 * lock, so SQLite holds its own lock all the time and needs no shared memory.
 * A row is believed only if its checksum over all that matters fits; a damaged one is quarantined.
 * A database that is damaged as a whole makes every lookup a miss and every store refused; the
 * file `damaged` tells the next open to start with an empty one. */
#include <errno.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "kv/kv_disk_int.h"

typedef enum cat_stmt {
    CAT_BEGIN,
    CAT_COMMIT,
    CAT_ROLLBACK,
    CAT_ROW,
    CAT_NAMES,
    CAT_UNIT,
    CAT_TAILS,
    CAT_OPENS,
    CAT_PUBLISH,
    CAT_GROW,
    CAT_TOKENS,
    CAT_GROW_TOKENS,
    CAT_NAME,
    CAT_REMOVE,
    CAT_REMOVE_TOKENS,
    CAT_BAD,
    CAT_REMOVE_NAMES,
    CAT_TOUCH,
    CAT_OLDEST,
    CAT_OLDEST_SALTED,
    CAT_META_GET,
    CAT_META_SET,
    CAT_N
} cat_stmt;

struct disk_cat {
    sqlite3      *db;
    sqlite3_stmt *stmt[CAT_N];
    bool          full; /* the last failure: the filesystem has no room */
};

#define INDEX_OPEN "CREATE INDEX unit_open ON unit(parent, used) WHERE seed <> 0 AND bad = 0;"

static const char schema_[] =
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;"
    "CREATE TABLE model(id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, n_lane INTEGER,"
    " block_tokens INTEGER, chunk_tokens INTEGER, record_bytes INTEGER, aux_bytes INTEGER,"
    " tail_token_bytes INTEGER);"
    "CREATE TABLE unit(id INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL,"
    " model INTEGER NOT NULL, kind INTEGER NOT NULL, bad INTEGER NOT NULL, first_token INTEGER,"
    " n_token INTEGER, ordered INTEGER, file INTEGER, off INTEGER, bytes INTEGER, salt BLOB,"
    " provenance BLOB, sums_hash INTEGER, row_hash INTEGER, used INTEGER,"
    " created INTEGER, seed INTEGER NOT NULL DEFAULT 0);"
    "CREATE TABLE token(unit INTEGER PRIMARY KEY, data BLOB);"
    "CREATE INDEX unit_place ON unit(file, off);"
    "CREATE INDEX unit_age ON unit(bad DESC, used, first_token DESC);"
    "CREATE INDEX unit_salted ON unit(bad DESC, used, first_token DESC) WHERE length(salt) > 0;"
    "CREATE INDEX unit_tail ON unit(parent, used) WHERE kind = 2 AND bad = 0;"
    "CREATE TABLE name(key BLOB NOT NULL, unit INTEGER NOT NULL, block INTEGER NOT NULL,"
    " PRIMARY KEY(key, unit)) WITHOUT ROWID;"
    "CREATE INDEX name_unit ON name(unit);" INDEX_OPEN;

/* What format 1 does not have. */
static const char upgrade_[] =
    "ALTER TABLE unit ADD COLUMN seed INTEGER NOT NULL DEFAULT 0;" INDEX_OPEN;

/* The columns of row_parse(), in its order. */
#define ROW_COLUMNS                                                                             \
    "SELECT u.id, u.key, u.parent, m.name, u.kind, u.bad, u.first_token, u.n_token, u.ordered," \
    " u.file, u.off, u.bytes, u.salt, u.provenance, t.data, u.sums_hash, u.row_hash, u.used,"   \
    " u.created, m.n_lane, m.block_tokens, m.chunk_tokens, m.record_bytes, m.aux_bytes,"        \
    " m.tail_token_bytes, u.seed FROM unit u LEFT JOIN model m ON m.id = u.model"               \
    " LEFT JOIN token t ON t.unit = u.id"

static const char *const sql_[CAT_N] = {
    [CAT_BEGIN]    = "BEGIN IMMEDIATE",
    [CAT_COMMIT]   = "COMMIT",
    [CAT_ROLLBACK] = "ROLLBACK",
    [CAT_ROW]      = ROW_COLUMNS " WHERE u.id = ?1",
    [CAT_NAMES] = "SELECT n.unit, n.block FROM name n JOIN unit u ON u.id = n.unit WHERE n.key = ?1"
                  " AND u.bad = 0 ORDER BY u.kind DESC, u.id LIMIT ?2",
    [CAT_UNIT]  = "SELECT u.id FROM name n JOIN unit u ON u.id = n.unit WHERE n.key = ?1 AND"
                  " u.kind = ?2 AND u.bad = 0 AND u.key = ?1 LIMIT 1",
    [CAT_TAILS] =
        "SELECT id FROM unit WHERE kind = 2 AND bad = 0 AND parent = ?1 ORDER BY used DESC"
        " LIMIT ?2",
    [CAT_OPENS] =
        "SELECT id FROM unit WHERE seed <> 0 AND bad = 0 AND parent = ?1 ORDER BY used DESC"
        " LIMIT ?2",
    [CAT_GROW]        = "UPDATE unit SET key = ?1, kind = ?4, n_token = ?6, provenance = ?12,"
                        " sums_hash = ?13, row_hash = ?14, used = ?15 WHERE id = ?18",
    [CAT_GROW_TOKENS] = "UPDATE token SET data = ?2 WHERE unit = ?1",
    [CAT_PUBLISH] =
        "INSERT INTO unit(key, parent, model, kind, bad, first_token, n_token, ordered,"
        " file, off, bytes, salt, provenance, sums_hash, row_hash, used, created, seed)"
        " VALUES(?1, ?2, ?3, ?4, 0, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
    [CAT_TOKENS]        = "INSERT INTO token(unit, data) VALUES(?1, ?2)",
    [CAT_NAME]          = "INSERT INTO name(key, unit, block) VALUES(?1, ?2, ?3)",
    [CAT_REMOVE]        = "DELETE FROM unit WHERE id = ?1",
    [CAT_REMOVE_TOKENS] = "DELETE FROM token WHERE unit = ?1",
    [CAT_BAD]           = "UPDATE unit SET bad = 1 WHERE id = ?1",
    [CAT_REMOVE_NAMES]  = "DELETE FROM name WHERE unit = ?1",
    [CAT_TOUCH]         = "UPDATE unit SET used = ?2 WHERE id = ?1",
    [CAT_OLDEST]        = ROW_COLUMNS " ORDER BY u.bad DESC, u.used, u.first_token DESC",
    [CAT_OLDEST_SALTED] = ROW_COLUMNS " WHERE length(u.salt) > 0 ORDER BY u.bad DESC, u.used,"
                                      " u.first_token DESC",
    [CAT_META_GET]      = "SELECT value FROM meta WHERE name = ?1",
    [CAT_META_SET]      = "INSERT OR REPLACE INTO meta(name, value) VALUES(?1, ?2)",
};

/* ---- helpers ---------------------------------------------------------------------- */

/* Rows that we add collide with none, unless some are left of units that there are not. */
static bool is_damage(int rc)
{
    return (rc & 0xff) == SQLITE_CORRUPT || (rc & 0xff) == SQLITE_NOTADB ||
           (rc & 0xff) == SQLITE_CONSTRAINT;
}

static void path_in(const kv_disk *d, const char *name, char out[DISK_PATH_BYTES])
{
    snprintf(out, DISK_PATH_BYTES, "%s/%s", d->dir, name);
}

/* Any failure of SQLite ends here.  KVD_E_CORRUPT breaks the catalogue for this process. */
static kvd_status cat_fail(kv_disk *d, int rc, kvd_err *err)
{
    const bool  full = (rc & 0xff) == SQLITE_FULL;
    int         sys  = d->cat && d->cat->db ? sqlite3_system_errno(d->cat->db) : 0;
    const char *text = d->cat && d->cat->db ? sqlite3_errmsg(d->cat->db) : sqlite3_errstr(rc);
    char        path[DISK_PATH_BYTES];

    if (is_damage(rc)) {
        if (!d->cat_broken) {
            kvd_log(KVD_LOG_WARN, "%s: the cache catalogue is damaged: %s", d->dir, text);
            d->cat_broken = true;
            path_in(d, "damaged", path);
            (void)os_file_replace(path, "1", 1, NULL);
        }
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s/catalog.db: %s", d->dir, text);
    }
    if (d->cat)
        d->cat->full = full;
    sys = full ? ENOSPC : sys;
    return kvd_fail(err, (rc & 0xff) == SQLITE_NOMEM ? KVD_E_NOMEM : KVD_E_IO, sys ? sys : EIO,
                    "%s/catalog.db: %s", d->dir, text);
}

/* KVD_E_CORRUPT once it has shown damage. */
static kvd_status cat_intact(const kv_disk *d, kvd_err *err)
{
    return d->cat_broken ? kvd_fail(err, KVD_E_CORRUPT, 0, "%s/catalog.db: damaged", d->dir)
                         : KVD_OK;
}

/* The statement ready for its parameters, or NULL. */
static sqlite3_stmt *cat_use(kv_disk *d, cat_stmt which)
{
    sqlite3_stmt *s;

    if (!d->cat || d->cat_broken)
        return NULL;
    s = d->cat->stmt[which];
    sqlite3_reset(s);
    return s;
}

static void bind_bytes(sqlite3_stmt *s, int at, const void *p, uint64_t bytes)
{
    if (bytes == 0)
        sqlite3_bind_zeroblob(s, at, 0);
    else
        sqlite3_bind_blob64(s, at, p, bytes, SQLITE_STATIC);
}

static void bind_key(sqlite3_stmt *s, int at, const kv_disk_key *k)
{
    bind_bytes(s, at, k->byte, KV_DISK_KEY_BYTES);
}

/* Runs a statement that gives no rows. */
static bool cat_run(kv_disk *d, sqlite3_stmt *s, kvd_status *st, kvd_err *err)
{
    int rc;

    if (!s) {
        *st = kvd_fail(err, KVD_E_CORRUPT, 0, "%s/catalog.db: damaged", d->dir);
        return false;
    }
    rc  = sqlite3_step(s);
    *st = rc == SQLITE_DONE ? KVD_OK : cat_fail(d, rc, err);
    sqlite3_reset(s);
    return *st == KVD_OK;
}

static bool cat_simple(kv_disk *d, cat_stmt which, int64_t id)
{
    sqlite3_stmt *s = cat_use(d, which);
    kvd_status    st;

    if (s)
        sqlite3_bind_int64(s, 1, id);
    return cat_run(d, s, &st, NULL);
}

static bool transaction(kv_disk *d, cat_stmt which, kvd_err *err, kvd_status *st)
{
    return cat_run(d, cat_use(d, which), st, err);
}

/* Some failures have rolled back by themselves. */
static void rollback(kv_disk *d)
{
    kvd_status ignored;

    if (!sqlite3_get_autocommit(d->cat->db))
        (void)transaction(d, CAT_ROLLBACK, NULL, &ignored);
}

/* Steps a query; false at its end or on an error, which is a miss. */
static bool cat_next(kv_disk *d, sqlite3_stmt *s)
{
    const int rc = s ? sqlite3_step(s) : SQLITE_DONE;

    if (rc == SQLITE_ROW)
        return true;
    if (rc != SQLITE_DONE)
        (void)cat_fail(d, rc, NULL);
    if (s)
        sqlite3_reset(s);
    return false;
}

/* ---- rows ------------------------------------------------------------------------- */

/* Everything that decides what the unit's bytes mean.  Without a seed of its own as in format 1. */
static uint64_t row_hash(const disk_row *r)
{
    const uint64_t field[] = {
        (uint64_t)r->kind, r->first_token, r->n_token,          r->ordered, r->file, r->off,
        r->bytes,          r->sums_hash,   r->provenance.bytes, r->seed
    };
    const size_t bytes = sizeof(field) - (r->seed ? 0 : sizeof(field[0]));
    XXH64_hash_t h = XXH3_64bits_withSeed(field, bytes, r->seed ? DISK_FORMAT : DISK_FORMAT_FIRST);

    h = XXH3_64bits_withSeed(r->key.byte, KV_DISK_KEY_BYTES, h);
    h = XXH3_64bits_withSeed(r->parent.byte, KV_DISK_KEY_BYTES, h);
    h = XXH3_64bits_withSeed(r->model.byte, KV_DISK_KEY_BYTES, h);
    h = XXH3_64bits_withSeed(r->salt_id.byte, KV_DISK_KEY_BYTES, h);
    h = XXH3_64bits_withSeed(r->provenance.data, r->provenance.bytes, h);
    return XXH3_64bits_withSeed(r->token, (size_t)r->n_token * 4, h);
}

static bool column_key(sqlite3_stmt *s, int at, kv_disk_key *out)
{
    const void *p = sqlite3_column_blob(s, at);

    memset(out, 0, sizeof(*out));
    if (!p || sqlite3_column_bytes(s, at) != KV_DISK_KEY_BYTES)
        return false;
    memcpy(out, p, KV_DISK_KEY_BYTES);
    return true;
}

static uint32_t column_u32(sqlite3_stmt *s, int at)
{
    const int64_t v = sqlite3_column_int64(s, at);

    return v < 0 || v > UINT32_MAX ? UINT32_MAX : (uint32_t)v; /* the largest is never valid */
}

static uint64_t column_u64(sqlite3_stmt *s, int at)
{
    return (uint64_t)sqlite3_column_int64(s, at);
}

static void row_geometry(sqlite3_stmt *s, int at, kv_disk_geometry *g)
{
    g->n_lane           = column_u32(s, at);
    g->block_tokens     = column_u32(s, at + 1);
    g->chunk_tokens     = column_u32(s, at + 2);
    g->record_bytes     = column_u32(s, at + 3);
    g->aux_bytes        = column_u32(s, at + 4);
    g->tail_token_bytes = column_u32(s, at + 5);
}

/* false: damaged.  id, file, off, bytes and used are set in any case. */
static bool row_parse(sqlite3_stmt *s, disk_row *r)
{
    bool           keys;
    const uint32_t kind = column_u32(s, 4);

    memset(r, 0, sizeof(*r));
    r->id               = sqlite3_column_int64(s, 0);
    keys                = column_key(s, 1, &r->key);
    keys                = column_key(s, 2, &r->parent) && keys;
    keys                = column_key(s, 3, &r->model) && keys;
    r->bad              = sqlite3_column_int(s, 5) != 0;
    r->first_token      = column_u64(s, 6);
    r->n_token          = column_u32(s, 7);
    r->ordered          = sqlite3_column_int(s, 8) != 0;
    r->file             = column_u32(s, 9);
    r->off              = column_u64(s, 10);
    r->bytes            = column_u64(s, 11);
    r->provenance.data  = sqlite3_column_blob(s, 13);
    r->provenance.bytes = (uint32_t)sqlite3_column_bytes(s, 13);
    r->token            = sqlite3_column_blob(s, 14);
    r->sums_hash        = column_u64(s, 15);
    r->used             = column_u64(s, 17);
    r->created          = sqlite3_column_int64(s, 18);
    row_geometry(s, 19, &r->geometry);
    r->seed         = column_u64(s, 25);
    r->salted       = sqlite3_column_bytes(s, 12) > 0;
    r->counted_kind = sqlite3_column_int(s, 4);
    if (r->salted)
        keys = column_key(s, 12, &r->salt_id) && keys;
    if (kind >= KV_DISK_KINDS || (kind == KV_DISK_OPEN && r->seed == 0))
        return false;
    r->kind = (kv_disk_kind)kind;
    return keys && r->id > 0 && r->provenance.bytes <= KV_DISK_PROV_BYTES &&
           r->file != UINT32_MAX && r->n_token <= DISK_RECORD_MAX * 64u && r->token &&
           (uint64_t)sqlite3_column_bytes(s, 14) == (uint64_t)r->n_token * 4 &&
           kv_disk_geometry_ok(&r->geometry) &&
           kv_disk_layout_of(&r->geometry, r->kind, r->n_token, r->ordered, &r->layout) &&
           r->layout.bytes == r->bytes && r->off % KV_DISK_PAGE_BYTES == 0 &&
           r->off <= INT64_MAX - r->bytes && row_hash(r) == column_u64(s, 16);
}

bool kv_disk_cat_row(kv_disk *d, int64_t id, disk_row *out)
{
    sqlite3_stmt *s = cat_use(d, CAT_ROW);

    memset(out, 0, sizeof(*out));
    if (s)
        sqlite3_bind_int64(s, 1, id);
    if (!cat_next(d, s))
        return false;
    if (row_parse(s, out))
        return !out->bad;
    sqlite3_reset(s);
    if (!out->bad) {
        kvd_log(KVD_LOG_WARN, "%s: catalogue row %lld is damaged", d->dir, (long long)id);
        kv_disk_cat_set_bad(d, id);
    }
    return false;
}

void kv_disk_cat_row_done(kv_disk *d)
{
    if (d->cat)
        sqlite3_reset(d->cat->stmt[CAT_ROW]);
}

uint32_t kv_disk_cat_names(kv_disk *d, const kv_disk_key *key, int64_t *id, uint32_t *block,
                           uint32_t max)
{
    sqlite3_stmt *s = cat_use(d, CAT_NAMES);
    uint32_t      n = 0;

    if (s) {
        bind_key(s, 1, key);
        sqlite3_bind_int64(s, 2, max);
    }
    while (n < max && cat_next(d, s)) {
        id[n]      = sqlite3_column_int64(s, 0);
        block[n++] = column_u32(s, 1);
    }
    if (s)
        sqlite3_reset(s);
    return n;
}

int64_t kv_disk_cat_unit(kv_disk *d, const kv_disk_key *key, kv_disk_kind kind)
{
    sqlite3_stmt *s  = cat_use(d, CAT_UNIT);
    int64_t       id = 0;

    if (s) {
        bind_key(s, 1, key);
        sqlite3_bind_int(s, 2, (int)kind);
    }
    if (cat_next(d, s)) {
        id = sqlite3_column_int64(s, 0);
        sqlite3_reset(s);
    }
    return id;
}

uint32_t kv_disk_cat_behind(kv_disk *d, cat_look look, const kv_disk_key *parent, int64_t *id,
                            uint32_t max)
{
    sqlite3_stmt *s = cat_use(d, look == LOOK_TAILS ? CAT_TAILS : CAT_OPENS);
    uint32_t      n = 0;

    if (s) {
        bind_key(s, 1, parent);
        sqlite3_bind_int64(s, 2, max);
    }
    while (n < max && cat_next(d, s))
        id[n++] = sqlite3_column_int64(s, 0);
    if (s)
        sqlite3_reset(s);
    return n;
}

/* ---- changes ---------------------------------------------------------------------- */

/* For what has to be written now. */
static bool cat_begin(kv_disk *d, kvd_err *err, kvd_status *st)
{
    kv_disk_log_wait(d);
    return transaction(d, CAT_BEGIN, err, st);
}

static bool meta_set(kv_disk *d, const char *name, const void *p, uint64_t bytes, kvd_status *st,
                     kvd_err *err)
{
    sqlite3_stmt *s = cat_use(d, CAT_META_SET);

    if (s) {
        sqlite3_bind_text(s, 1, name, -1, SQLITE_STATIC);
        bind_bytes(s, 2, p, bytes);
    }
    return cat_run(d, s, st, err);
}

static bool meta_get(kv_disk *d, const char *name, void *p, uint64_t bytes)
{
    sqlite3_stmt *s  = cat_use(d, CAT_META_GET);
    bool          ok = false;

    if (s)
        sqlite3_bind_text(s, 1, name, -1, SQLITE_STATIC);
    if (cat_next(d, s)) {
        const void *v = sqlite3_column_blob(s, 0);

        ok = v && (uint64_t)sqlite3_column_bytes(s, 0) == bytes;
        if (ok)
            memcpy(p, v, (size_t)bytes);
        sqlite3_reset(s);
    }
    return ok;
}

/* Of a new row, or of one that has grown: the latter's statement leaves out what stays. */
static sqlite3_stmt *bind_row(kv_disk *d, const disk_row *r, bool grown)
{
    sqlite3_stmt *s = cat_use(d, grown ? CAT_GROW : CAT_PUBLISH);

    if (!s)
        return NULL;
    bind_key(s, 1, &r->key);
    bind_key(s, 2, &r->parent);
    sqlite3_bind_int64(s, 3, d->model_id);
    sqlite3_bind_int(s, 4, (int)r->kind);
    sqlite3_bind_int64(s, 5, (int64_t)r->first_token);
    sqlite3_bind_int64(s, 6, r->n_token);
    sqlite3_bind_int(s, 7, r->ordered);
    sqlite3_bind_int64(s, 8, r->file);
    sqlite3_bind_int64(s, 9, (int64_t)r->off);
    sqlite3_bind_int64(s, 10, (int64_t)r->bytes);
    bind_bytes(s, 11, r->salt_id.byte, kv_disk_key_is_zero(&r->salt_id) ? 0 : KV_DISK_KEY_BYTES);
    bind_bytes(s, 12, r->provenance.data, r->provenance.bytes);
    sqlite3_bind_int64(s, 13, (int64_t)r->sums_hash);
    sqlite3_bind_int64(s, 14, (int64_t)row_hash(r));
    sqlite3_bind_int64(s, 15, (int64_t)r->used);
    sqlite3_bind_int64(s, 16, r->created);
    sqlite3_bind_int64(s, 17, (int64_t)r->seed);
    if (grown)
        sqlite3_bind_int64(s, 18, r->id);
    return s;
}

/* Apart from the row, which is written again each time the unit is used. */
static bool insert_tokens(kv_disk *d, const disk_row *r, bool grown, kvd_status *st, kvd_err *err)
{
    sqlite3_stmt *s = cat_use(d, grown ? CAT_GROW_TOKENS : CAT_TOKENS);

    if (s) {
        sqlite3_bind_int64(s, 1, r->id);
        bind_bytes(s, 2, r->token, (uint64_t)r->n_token * 4);
    }
    return cat_run(d, s, st, err);
}

static bool insert_names(kv_disk *d, int64_t id, const kv_disk_key *name, uint32_t n,
                         kvd_status *st, kvd_err *err)
{
    for (uint32_t i = 0; i < n; i++) {
        sqlite3_stmt *s = cat_use(d, CAT_NAME);

        if (s) {
            bind_key(s, 1, &name[i]);
            sqlite3_bind_int64(s, 2, id);
            sqlite3_bind_int64(s, 3, i);
        }
        if (!cat_run(d, s, st, err))
            return false;
    }
    return true;
}

kvd_status kv_disk_cat_publish(kv_disk *d, disk_row *r, const kv_disk_key *name, uint32_t n_name,
                               kvd_err *err)
{
    const uint64_t day[2] = { (uint64_t)d->day, d->stats.day_bytes };
    const bool     grown  = r->id > 0;
    kvd_status     st;

    if (!cat_begin(d, err, &st))
        return st;
    if (cat_run(d, bind_row(d, r, grown), &st, err)) {
        if (!grown)
            r->id = sqlite3_last_insert_rowid(d->cat->db);
        if (insert_tokens(d, r, grown, &st, err) &&
            insert_names(d, r->id, name, n_name, &st, err) &&
            meta_set(d, "day", day, sizeof(day), &st, err) && transaction(d, CAT_COMMIT, err, &st))
            return KVD_OK;
    }
    rollback(d);
    return st;
}

bool kv_disk_cat_full(const kv_disk *d)
{
    return d->cat && d->cat->full;
}

bool kv_disk_cat_remove(kv_disk *d, int64_t id)
{
    kvd_status st;

    if (!cat_begin(d, NULL, &st))
        return false;
    if (cat_simple(d, CAT_REMOVE, id) && cat_simple(d, CAT_REMOVE_TOKENS, id) &&
        cat_simple(d, CAT_REMOVE_NAMES, id) && transaction(d, CAT_COMMIT, NULL, &st))
        return true;
    rollback(d);
    return false;
}

void kv_disk_cat_set_bad(kv_disk *d, int64_t id)
{
    d->stats.n_quarantined++;
    d->stats.n_bad++;
    kv_disk_log_wait(d);
    (void)cat_simple(d, CAT_REMOVE_NAMES, id);
    (void)cat_simple(d, CAT_BAD, id);
}

/* Only a hint for eviction: failures do not matter. */
void kv_disk_cat_touch(kv_disk *d, const int64_t *id, uint32_t n, uint64_t used)
{
    kvd_status st;

    if (n == 0 || !kv_disk_log_idle(d) || !transaction(d, CAT_BEGIN, NULL, &st))
        return;
    for (uint32_t i = 0; i < n; i++) {
        sqlite3_stmt *s = cat_use(d, CAT_TOUCH);

        if (s) {
            sqlite3_bind_int64(s, 1, id[i]);
            sqlite3_bind_int64(s, 2, (int64_t)used);
        }
        if (!cat_run(d, s, &st, NULL))
            break;
    }
    if (!transaction(d, CAT_COMMIT, NULL, &st))
        rollback(d);
}

kvd_status kv_disk_cat_oldest(kv_disk *d, bool                                salted_only,
                              bool (*fn)(void *ctx, const disk_row *r), void *ctx, kvd_err *err)
{
    sqlite3_stmt *s  = cat_use(d, salted_only ? CAT_OLDEST_SALTED : CAT_OLDEST);
    int           rc = s ? sqlite3_step(s) : SQLITE_CORRUPT;
    disk_row      r;
    kvd_status    st = KVD_OK;

    while (rc == SQLITE_ROW) {
        (void)row_parse(s, &r);
        rc = fn(ctx, &r) ? sqlite3_step(s) : SQLITE_DONE;
    }
    if (rc != SQLITE_DONE)
        st = cat_fail(d, rc, err);
    if (s)
        sqlite3_reset(s);
    return st;
}

/* ---- open and close --------------------------------------------------------------- */

/* Puts a damaged catalogue aside, for whoever wants to look at it, or where that cannot be removes
 * it; what its rows named is then removed as unknown. */
static void put_aside(kv_disk *d)
{
    static const char *const tail[] = { "", "-wal", "-shm" };
    char                     from[DISK_PATH_BYTES], to[DISK_PATH_BYTES];
    bool                     kept = true;

    for (uint32_t i = 0; i < KVD_COUNTOF(tail); i++) {
        snprintf(from, sizeof(from), "%s/catalog.db%s", d->dir, tail[i]);
        snprintf(to, sizeof(to), "%s/catalog.bad%s", d->dir, tail[i]);
        os_file_remove_in(d->dir_fd, to);
        if (os_file_rename_in(d->dir_fd, from, to, NULL) == KVD_OK)
            continue;
        kept = kept && i > 0; /* of the others there may be none */
        os_file_remove_in(d->dir_fd, from);
    }
    path_in(d, "damaged", to);
    os_file_remove_in(d->dir_fd, to);
    d->stats.n_quarantined++;
    d->cat_broken = false;
    kvd_log(KVD_LOG_WARN, "%s: the cache starts empty, its catalogue was damaged (%s)", d->dir,
            kept ? "kept as catalog.bad" : "removed, as it cannot be kept as catalog.bad");
}

static int64_t pragma_int(sqlite3 *db, const char *sql)
{
    sqlite3_stmt *s = NULL;
    int64_t       v = -1;

    if (sqlite3_prepare_v2(db, sql, -1, &s, NULL) == SQLITE_OK && sqlite3_step(s) == SQLITE_ROW)
        v = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    return v;
}

static kvd_status cat_schema(kv_disk *d, kvd_err *err)
{
    sqlite3      *db      = d->cat->db;
    const int64_t version = pragma_int(db, "PRAGMA user_version");
    char          sql[sizeof(schema_) + 64];
    int           rc;

    if (version > DISK_FORMAT)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "%s: a cache of format %lld, this program reads %d: take another directory",
                        d->dir, (long long)version, DISK_FORMAT);
    if (version == DISK_FORMAT)
        return KVD_OK;
    snprintf(sql, sizeof(sql), "BEGIN;%sPRAGMA user_version = %d;COMMIT;",
             version == DISK_FORMAT_FIRST ? upgrade_ : schema_, DISK_FORMAT);
    rc = sqlite3_exec(db, sql, NULL, NULL, NULL);
    if (rc == SQLITE_OK && version == DISK_FORMAT_FIRST)
        kvd_log(KVD_LOG_INFO, "%s: a cache of format %d, made one of format %d: it keeps its units",
                d->dir, DISK_FORMAT_FIRST, DISK_FORMAT);
    if (rc == SQLITE_ERROR) /* some other tables are there */
        rc = SQLITE_CORRUPT;
    return rc == SQLITE_OK ? KVD_OK : cat_fail(d, rc, err);
}

/* SQLite's files are regular ones and nobody else's before it opens them, which it does by name: by
 * one without symbolic links, since it follows none.  What it makes itself has the catalogue's
 * mode. */
static kvd_status cat_files(kv_disk *d, char path[DISK_PATH_BYTES], kvd_err *err)
{
    static const char *const other[] = { "catalog.db-wal", "catalog.db-shm", "catalog.db-journal" };
    char                     real[OS_PATH_BYTES];
    kvd_err                  why = { 0 };
    int                      fd;

    path_in(d, "catalog.db", path);
    KVD_TRY(os_file_open_in(&fd, d->dir_fd, path, OS_OPEN_CREATE, err));
    os_file_close(fd);
    for (uint32_t i = 0; i < KVD_COUNTOF(other); i++) {
        path_in(d, other[i], path);
        if (os_file_open_in(&fd, d->dir_fd, path, OS_OPEN_WRITE, &why) != KVD_OK) {
            if (why.sys == ENOENT)
                continue;
            if (err)
                *err = why;
            return why.code;
        }
        os_file_close(fd);
    }
    KVD_TRY(os_dir_real(d->dir_fd, d->dir, real, err));
    if (snprintf(path, DISK_PATH_BYTES, "%s/catalog.db", real) >= DISK_PATH_BYTES)
        return kvd_fail(err, KVD_E_INVAL, 0, "path too long: %.64s", real);
    return KVD_OK;
}

static kvd_status cat_connect(kv_disk *d, kvd_err *err)
{
    static const char setup[] = "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL;"
                                "PRAGMA synchronous = NORMAL; PRAGMA trusted_schema = OFF;"
                                "PRAGMA cell_size_check = ON;";
    char              path[DISK_PATH_BYTES];
    int               rc;

    KVD_TRY(cat_files(d, path, err));
    rc = sqlite3_open_v2(path, &d->cat->db,
                         SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW, NULL);
    if (rc == SQLITE_OK) /* we make no triggers: those that are there are somebody else's */
        rc = sqlite3_db_config(d->cat->db, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, (int *)NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(d->cat->db, setup, NULL, NULL, NULL);
    if (rc == SQLITE_ERROR) /* a header that SQLite does not take for a newer format's */
        rc = SQLITE_CORRUPT;
    if (rc != SQLITE_OK)
        return cat_fail(d, rc, err);
    KVD_TRY(cat_schema(d, err));
    for (uint32_t i = 0; i < CAT_N; i++) {
        rc = sqlite3_prepare_v3(d->cat->db, sql_[i], -1, SQLITE_PREPARE_PERSISTENT,
                                &d->cat->stmt[i], NULL);
        if (rc == SQLITE_ERROR) /* our tables are not there or not ours */
            rc = SQLITE_CORRUPT;
        if (rc != SQLITE_OK)
            return cat_fail(d, rc, err);
    }
    return KVD_OK;
}

/* The id of our model; makes it known. */
static kvd_status cat_model(kv_disk *d, kvd_err *err)
{
    const kv_disk_geometry *g       = &d->p.geometry;
    const uint32_t          field[] = { g->n_lane,       g->block_tokens, g->chunk_tokens,
                                        g->record_bytes, g->aux_bytes,    g->tail_token_bytes };
    static const char       insert[] =
        "INSERT INTO model(name, n_lane, block_tokens, chunk_tokens, record_bytes, aux_bytes,"
        " tail_token_bytes) VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT(name) DO UPDATE SET"
        " n_lane = ?2, block_tokens = ?3, chunk_tokens = ?4, record_bytes = ?5, aux_bytes = ?6,"
        " tail_token_bytes = ?7 RETURNING id";
    sqlite3_stmt *s  = NULL;
    int           rc = sqlite3_prepare_v2(d->cat->db, insert, -1, &s, NULL);

    if (rc == SQLITE_OK) {
        bind_key(s, 1, &d->model);
        for (uint32_t i = 0; i < KVD_COUNTOF(field); i++)
            sqlite3_bind_int64(s, (int)i + 2, field[i]);
        rc = sqlite3_step(s);
    }
    if (rc == SQLITE_ROW) {
        d->model_id = sqlite3_column_int64(s, 0);
        rc          = sqlite3_step(s);
    }
    sqlite3_finalize(s);
    return rc == SQLITE_DONE ? KVD_OK : cat_fail(d, rc, err);
}

static kvd_status cat_meta(kv_disk *d, kvd_err *err)
{
    uint64_t   day[2] = { 0, 0 };
    kvd_status st;

    if (!meta_get(d, "salt_key", d->salt_key, sizeof(d->salt_key))) {
        if (!os_random(d->salt_key, sizeof(d->salt_key)))
            return kvd_fail(err, KVD_E_IO, 0, "%s: no random numbers from the system", d->dir);
        if (!meta_set(d, "salt_key", d->salt_key, sizeof(d->salt_key), &st, err))
            return st;
    }
    if (meta_get(d, "day", day, sizeof(day))) {
        d->day             = (int64_t)day[0];
        d->stats.day_bytes = day[1];
    }
    d->clock = (uint64_t)pragma_int(d->cat->db, "SELECT ifnull(max(used), 0) + 1 FROM unit");
    return cat_intact(d, err);
}

static void note_name(const kv_disk *d, const char *name, char out[96])
{
    int n = snprintf(out, 20, "%.15s:", name);

    for (size_t i = 0; i < sizeof(d->model.byte); i++)
        n += snprintf(out + n, 3, "%02x", d->model.byte[i]);
}

bool kv_disk_note_get(kv_disk *d, const char *name, double *v)
{
    char   full[96];
    double x = 0.0;

    note_name(d, name, full);
    if (!meta_get(d, full, &x, sizeof(x)) || !(x > 0.0 && x < 1e18)) /* it may be no number */
        return false;
    *v = x;
    return true;
}

bool kv_disk_note_put(kv_disk *d, const char *name, double v)
{
    char       full[96];
    kvd_status st;

    note_name(d, name, full);
    kv_disk_log_wait(d);
    return meta_set(d, full, &v, sizeof(v), &st, NULL);
}

static void count_row(kv_disk *d, sqlite3_stmt *s)
{
    const uint64_t bytes = column_u64(s, 3);
    const int      kind  = sqlite3_column_int(s, 5);

    d->stats.n_unit++;
    d->stats.n_block += kind == KV_DISK_BLOCK;
    d->stats.n_segment += kind == KV_DISK_SEGMENT;
    d->stats.n_tail += kind == KV_DISK_TAIL || kind == KV_DISK_OPEN;
    d->stats.n_bad += sqlite3_column_int(s, 6) != 0;
    d->stats.unit_bytes += bytes;
    d->stats.salted_bytes += sqlite3_column_bytes(s, 4) > 0 ? bytes : 0;
}

/* Tells the space about every unit; a row that lies over another, or outside its file, goes. */
static kvd_status cat_load(kv_disk *d, kvd_err *err)
{
    static const char sql[] = "SELECT id, file, off, bytes, salt, kind, bad FROM unit"
                              " ORDER BY file, off";
    sqlite3_stmt     *s     = NULL;
    int               rc    = sqlite3_prepare_v2(d->cat->db, sql, -1, &s, NULL);

    while (rc == SQLITE_OK && (rc = sqlite3_step(s)) == SQLITE_ROW) {
        const int64_t id = sqlite3_column_int64(s, 0);
        kvd_status    st =
            kv_disk_space_seen(d, column_u32(s, 1), column_u64(s, 2), column_u64(s, 3), err);

        rc = SQLITE_OK;
        if (st == KVD_OK)
            count_row(d, s);
        else if (st == KVD_E_CORRUPT && kv_disk_cat_remove(d, id))
            d->stats.n_quarantined++;
        else {
            sqlite3_finalize(s);
            return st;
        }
    }
    sqlite3_finalize(s);
    return rc == SQLITE_DONE ? KVD_OK : cat_fail(d, rc, err);
}

bool kv_disk_cat_checkpoint(kv_disk *d, bool empty)
{
    int       n_log = 0, n_copied = -1;
    const int mode = empty ? SQLITE_CHECKPOINT_TRUNCATE : SQLITE_CHECKPOINT_PASSIVE;
    const int rc   = d->cat_broken
                         ? SQLITE_CORRUPT
                         : sqlite3_wal_checkpoint_v2(d->cat->db, NULL, mode, &n_log, &n_copied);

    if (rc != SQLITE_OK) {
        (void)cat_fail(d, rc, NULL);
        return false;
    }
    if (empty)
        d->log.pages = 0;
    return n_log == n_copied;
}

static int note_pages(void *ctx, sqlite3 *db, const char *name, int n)
{
    kv_disk *d = ctx;

    (void)db;
    (void)name;
    d->log.pages = (uint32_t)n;
    return SQLITE_OK;
}

void kv_disk_cat_alone(kv_disk *d)
{
    if (!d->cat->db)
        return;
    (void)sqlite3_exec(d->cat->db, "PRAGMA synchronous = NORMAL", NULL, NULL, NULL);
    (void)sqlite3_wal_autocheckpoint(d->cat->db, DISK_LOG_PAGES); /* in the hook's place */
    d->log.pages = 0;
}

static void disconnect(kv_disk *d)
{
    for (uint32_t i = 0; i < CAT_N; i++) {
        sqlite3_finalize(d->cat->stmt[i]);
        d->cat->stmt[i] = NULL;
    }
    sqlite3_close(d->cat->db);
    d->cat->db = NULL;
}

/* SQLite would write over a log of which it has copied all; one that it opens, it reads whole. */
void kv_disk_cat_again(kv_disk *d)
{
    if (d->cat_broken)
        return;
    (void)sqlite3_db_config(d->cat->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, (int *)NULL);
    disconnect(d);
    if (cat_connect(d, NULL) != KVD_OK)
        d->cat_broken = true; /* for this process: the next one finds the log as it is */
}

/* From here on kv_disk_log.c syncs what SQLite writes; until the log is known to be empty the
 * catalogue is not written.  Where there is no room to empty it now, SQLite keeps at it. */
static kvd_status cat_take_over(kv_disk *d, kvd_err *err)
{
    char path[DISK_PATH_BYTES];
    int  rc;

    kv_disk_cat_alone(d);
    if (!kv_disk_cat_checkpoint(d, true))
        return cat_intact(d, err);
    path_in(d, "catalog.db", path);
    KVD_TRY(os_file_open_in(&d->log.db_fd, d->dir_fd, path, OS_OPEN_WRITE, err));
    path_in(d, "catalog.db-wal", path);
    KVD_TRY(os_file_open_in(&d->log.fd, d->dir_fd, path, OS_OPEN_WRITE, err));
    KVD_TRY(os_dir_sync(d->dir, err)); /* the log may be a new file */
    rc = sqlite3_exec(d->cat->db, "PRAGMA synchronous = OFF", NULL, NULL, NULL);
    if (rc != SQLITE_OK)
        return cat_fail(d, rc, err);
    (void)sqlite3_wal_hook(d->cat->db, note_pages, d);
    kv_disk_log_begin(d);
    return KVD_OK;
}

static kvd_status cat_try(kv_disk *d, kvd_err *err)
{
    d->cat = kvd_calloc(1, sizeof(*d->cat));
    if (!d->cat)
        return kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory for the catalogue", d->dir);
    d->cat_sound = false;
    KVD_TRY(cat_connect(d, err));
    KVD_TRY(cat_meta(d, err));
    if (d->p.geometry.n_lane)
        KVD_TRY(cat_model(d, err));
    KVD_TRY(cat_load(d, err));
    return cat_take_over(d, err);
}

kvd_status kv_disk_cat_open(kv_disk *d, kvd_err *err)
{
    char       path[DISK_PATH_BYTES];
    kvd_status st;
    int        fd;

    path_in(d, "damaged", path);
    if (os_file_open_in(&fd, d->dir_fd, path, OS_OPEN_READ, NULL) == KVD_OK) {
        os_file_close(fd);
        put_aside(d);
    }
    st = cat_try(d, err);
    if (st != KVD_E_CORRUPT)
        return st;
    kv_disk_cat_close(d);
    put_aside(d);
    kv_disk_space_reset(d);
    return cat_try(d, err);
}

kvd_status kv_disk_cat_verify(kv_disk *d, kvd_err *err)
{
    sqlite3_stmt *s = NULL;
    int           rc;

    KVD_TRY(cat_intact(d, err));
    rc = sqlite3_prepare_v2(d->cat->db, "PRAGMA integrity_check(1)", -1, &s, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_step(s);
    if (rc == SQLITE_ROW) {
        const char *text = (const char *)sqlite3_column_text(s, 0);

        rc = text && strcmp(text, "ok") == 0 ? SQLITE_OK : SQLITE_CORRUPT;
    }
    sqlite3_finalize(s);
    d->cat_sound = rc == SQLITE_OK;
    return d->cat_sound ? KVD_OK : cat_fail(d, rc, err);
}

void kv_disk_cat_lose(kv_disk *d)
{
    d->cat_broken = true;     /* for this process, until it is opened anew */
    if (d->cat && d->cat->db) /* or SQLite would remove by its name a log that may be another's */
        (void)sqlite3_db_config(d->cat->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, (int *)NULL);
}

void kv_disk_cat_close(kv_disk *d)
{
    if (!d->cat)
        return;
    if (!d->gone)
        kv_disk_cat_alone(d);
    disconnect(d);
    /* not sooner: closing a file drops SQLite's locks on it */
    os_file_close(d->log.fd);
    os_file_close(d->log.db_fd);
    d->log =
        (disk_log){ .fd = -1, .db_fd = -1, .turn = d->log.turn }; /* a late sync is no new one */
    kvd_free(d->cat);
    d->cat = NULL;
}
