/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tend.c - kvd_cache_command(): looks into and after a cache directory that no session has open,
 * whatever models its units are of; and what a session does of that to its own.
 *
 * Owns: the block store for the length of one command.  Thread: any one. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "kv/kv_cache.h"

#define STAGE_BYTES (2u << 20)
#define PATH_BYTES  4096

static void no_name(void *ctx, const char *name)
{
    (void)ctx;
    (void)name;
}

/* Opening makes what is missing; here that would hide a mistyped name. */
static kvd_status check_is_cache(const char *dir, kvd_err *err)
{
    char       path[PATH_BYTES];
    kvd_err    why = { 0 };
    const int  n   = snprintf(path, sizeof(path), "%s/catalog.db", dir);
    int        fd;
    kvd_status st;

    if (n < 0 || (size_t)n >= sizeof(path))
        return kvd_fail(err, KVD_E_INVAL, 0, "cache directory: too long a name");
    if (os_dir_list(dir, no_name, NULL, &why) != KVD_OK) {
        if (why.sys == ENOENT)
            return kvd_fail(err, KVD_E_IO, ENOENT, "%s: there is no such cache directory", dir);
        return kvd_fail(err, why.code, why.sys, "%s: the directory cannot be read", dir);
    }
    st = os_file_open(&fd, path, 0, &why);
    if (st != KVD_OK && why.sys == ENOENT)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: no cache: there is no catalog.db in it", dir);
    if (st != KVD_OK)
        return kvd_fail(err, why.code, why.sys, "%s: cannot be opened", path);
    os_file_close(fd);
    return KVD_OK;
}

/* ---- the answers -------------------------------------------------------------------- */

static void put_stats(const kv_disk *d, const char *dir, kvd_buf *b)
{
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    kvd_buf_printf(b,
                   "{\"units\":%" PRIu64 ",\"blocks\":%" PRIu64 ",\"segments\":%" PRIu64
                   ",\"tails\":%" PRIu64 ",\"quarantined\":%" PRIu64 ",\"files\":%" PRIu64,
                   s.n_unit, s.n_block, s.n_segment, s.n_tail, s.n_bad, s.n_file);
    kvd_buf_printf(b,
                   ",\"bytes\":%" PRIu64 ",\"salted_bytes\":%" PRIu64
                   ",\"written_today_bytes\":%" PRIu64 ",\"free_bytes\":%" PRIu64 "}",
                   s.unit_bytes, s.salted_bytes, s.day_bytes, os_dir_free(dir));
}

static const char *text_of(bool b)
{
    return b ? "true" : "false";
}

static bool put_entry(void *ctx, const kv_disk_entry *e)
{
    kvd_buf *b = ctx;

    kvd_buf_printf(b, "%s{\"key\":\"", b->len > 1 ? ",\n" : "");
    for (size_t i = 0; i < sizeof(e->key.byte); i++)
        kvd_buf_printf(b, "%02x", e->key.byte[i]);
    kvd_buf_printf(b,
                   "\",\"kind\":\"%s\",\"first_token\":%" PRIu64 ",\"tokens\":%u,\"bytes\":%" PRIu64
                   ",\"created\":%" PRId64
                   ",\"quarantined\":%s,\"salted\":%s,\"file\":\"%s\",\"offset\":%" PRIu64 "}",
                   kv_disk_kind_name(e->kind), e->first_token, e->n_token, e->bytes, e->created,
                   text_of(e->bad), text_of(e->salted), e->file, e->off);
    return !b->oom;
}

static kvd_status list_units(kv_disk *d, kvd_buf *b, kvd_err *err)
{
    kvd_buf_putc(b, '[');
    KVD_TRY(kv_disk_ls(d, put_entry, b, err));
    kvd_buf_putc(b, ']');
    return KVD_OK;
}

/* A catalogue that was damaged has been replaced by an empty one when the store was opened. */
static kvd_status verify(kv_disk *d, const char *dir, kvd_buf *b, kvd_err *err)
{
    uint64_t      n_ok, n_bad;
    kv_disk_stats s;

    kv_disk_stats_get(d, &s);
    if (s.n_quarantined > 0)
        return kvd_fail(err, KVD_E_CORRUPT, 0,
                        "%s: the catalogue was damaged: it is kept as catalog.bad, the cache is "
                        "empty now",
                        dir);
    KVD_TRY(kv_disk_verify(d, &n_ok, &n_bad, err));
    kvd_buf_printf(b, "{\"ok\":%" PRIu64 ",\"bad\":%" PRIu64 "}", n_ok, n_bad);
    return KVD_OK;
}

static kvd_status remove_units(kv_disk *d, bool all, uint64_t max_bytes, kvd_buf *b, kvd_err *err)
{
    kv_disk_stats was, is;

    kv_disk_stats_get(d, &was);
    KVD_TRY(all ? kv_disk_clear(d, err) : kv_disk_gc(d, max_bytes, err));
    kv_disk_stats_get(d, &is);
    kvd_buf_printf(b,
                   "{\"removed_units\":%" PRIu64 ",\"removed_bytes\":%" PRIu64 ",\"units\":%" PRIu64
                   ",\"bytes\":%" PRIu64 "}",
                   was.n_unit - is.n_unit, was.unit_bytes - is.unit_bytes, is.n_unit,
                   is.unit_bytes);
    return KVD_OK;
}

static kvd_status command(kv_disk *d, const char *dir, kvd_cache_verb verb, uint64_t max_bytes,
                          kvd_buf *b, kvd_err *err)
{
    switch (verb) {
    case KVD_CACHE_STATS:
        put_stats(d, dir, b);
        return KVD_OK;
    case KVD_CACHE_LS:
        return list_units(d, b, err);
    case KVD_CACHE_VERIFY:
        return verify(d, dir, b, err);
    case KVD_CACHE_CLEAR:
        return remove_units(d, true, 0, b, err);
    case KVD_CACHE_GC:
        return remove_units(d, false, max_bytes, b, err);
    }
    return kvd_fail(err, KVD_E_INVAL, 0, "verb %d is none of kvd_cache_verb", (int)verb);
}

kvd_status kv_clear(kv_store *s, kvd_buf *json, kvd_err *err)
{
    if (!s->cache) {
        kvd_buf_puts(json, "{\"removed_units\":0,\"removed_bytes\":0,\"units\":0,\"bytes\":0}");
        return KVD_OK;
    }
    KVD_TRY(kv_disk_look(s->cache->disk, err)); /* what was removed by others is not removed here */
    KVD_TRY(kv_flush(s, err));
    return remove_units(s->cache->disk, true, 0, json, err);
}

kvd_status kv_tend(const char *dir, kvd_cache_verb verb, uint64_t max_bytes, kvd_buf *json,
                   kvd_err *err)
{
    const kv_disk_params p = { .dir               = dir,
                               .read_stage_bytes  = STAGE_BYTES,
                               .write_stage_bytes = STAGE_BYTES };
    kv_disk             *d;
    kvd_status           st;

    KVD_TRY(check_is_cache(dir, err));
    KVD_TRY(kv_disk_open(&d, &p, err));
    st = command(d, dir, verb, max_bytes, json, err);
    kv_disk_close(d);
    return st;
}
