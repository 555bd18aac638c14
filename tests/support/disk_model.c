/* SPDX-License-Identifier: Apache-2.0 */
#include "support/disk_model.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const kv_disk_bytes dm_prov[2] = { { "exact", 5 }, { "sparse:256", 10 } };

/* ---- directories ------------------------------------------------------------------ */

void dm_dir_make(char out[256])
{
    snprintf(out, 256, "%s/kvd-disk-XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    kvd_assert(mkdtemp(out) != NULL);
}

void dm_dir_empty(const char *dir)
{
    DIR           *d = opendir(dir);
    struct dirent *e;
    char           path[4096];

    while (d && (e = readdir(d)) != NULL) {
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (e->d_name[0] != '.')
            unlink(path);
    }
    if (d)
        closedir(d);
}

void dm_dir_remove(const char *dir)
{
    dm_dir_empty(dir);
    rmdir(dir);
}

void dm_dir_copy(const char *from, const char *to)
{
    DIR           *d = opendir(from);
    struct dirent *e;

    kvd_assert(d != NULL);
    while ((e = readdir(d)) != NULL) {
        char   path[4096], buf[65536];
        size_t n;
        FILE  *in, *out;

        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", from, e->d_name);
        in = fopen(path, "rb");
        snprintf(path, sizeof(path), "%s/%s", to, e->d_name);
        out = fopen(path, "wb");
        kvd_assert(in && out);
        while ((n = fread(buf, 1, sizeof(buf), in)) > 0)
            kvd_assert(fwrite(buf, 1, n, out) == n);
        fclose(in);
        fclose(out);
    }
    closedir(d);
}

kv_disk_params dm_params(const char *dir)
{
    kv_disk_params p = { .dir               = dir,
                         .geometry          = { DM_LANES, DM_BLOCK, DM_CHUNK, DM_RECORD, DM_AUX,
                                                DM_TAIL_TOKEN },
                         .read_stage_bytes  = 1u << 20,
                         .write_stage_bytes = 1u << 20,
                         .max_units         = 512,
                         .max_pieces        = 2048,
                         .timeout_ns        = 2000000000,
                         .pause_ns          = 1,
                         .io                = { .kind = OS_IO_AUTO, .n_thread = 2 } };

    memset(p.fingerprint, 7, sizeof(p.fingerprint));
    return p;
}

/* ---- bytes ------------------------------------------------------------------------ */

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

static uint64_t hash_tokens(const int32_t *token, uint64_t n)
{
    uint64_t h = 1;

    for (uint64_t i = 0; i < n; i++)
        h = mix(h, (uint32_t)token[i] + 1u);
    return h;
}

static void spread(uint8_t *out, uint32_t n, uint64_t h)
{
    for (uint32_t i = 0; i < n; i++) {
        if (i % 8 == 0)
            h = mix(h, i + 1);
        out[i] = (uint8_t)(h >> 8 * (i % 8));
    }
}

void dm_record(uint8_t out[DM_RECORD], const int32_t *token, uint64_t block, uint32_t prov,
               uint32_t lane, uint32_t chunk)
{
    const uint64_t h = hash_tokens(token, (block + 1) * DM_BLOCK);

    spread(out, DM_RECORD, mix(mix(mix(h, prov + 1), lane + 1), chunk + 1));
}

void dm_aux(uint8_t out[DM_AUX], const int32_t *token, uint64_t block, uint32_t prov, uint32_t lane)
{
    const uint64_t h = hash_tokens(token, (block + 1) * DM_BLOCK);

    spread(out, DM_AUX, mix(mix(mix(h, prov + 1), lane + 1), 1000000));
}

void dm_tail(uint8_t out[DM_TAIL_TOKEN], const int32_t *token, uint64_t position, uint32_t prov,
             uint32_t lane)
{
    const uint64_t h = hash_tokens(token, position + 1);

    spread(out, DM_TAIL_TOKEN, mix(mix(mix(h, prov + 1), lane + 1), 2000000));
}

/* ---- putting ---------------------------------------------------------------------- */

static uint32_t unit_tokens(const dm_unit *u)
{
    if (u->kind == KV_DISK_TAIL)
        return u->n_tail_token;
    return u->kind == KV_DISK_SEGMENT ? KV_DISK_SEGMENT_BLOCKS * DM_BLOCK : DM_BLOCK;
}

kv_disk_name dm_name(kv_disk *d, const int32_t *token, const dm_unit *u)
{
    kv_disk_name n = { .kind = KV_DISK_BLOCK, .n_token = DM_BLOCK, .provenance = dm_prov[0] };

    if (u->salt)
        n.salt = (kv_disk_bytes){ u->salt, (uint32_t)strlen(u->salt) };
    for (uint64_t b = 0; b < u->first_block; b++) { /* the chain, exact up to the unit */
        n.token = token + b * DM_BLOCK;
        kvd_assert(kv_disk_key_of(d, &n, &n.parent, NULL) == KVD_OK);
    }
    n.kind        = u->kind;
    n.first_token = u->first_block * DM_BLOCK;
    n.token       = token + n.first_token;
    n.n_token     = unit_tokens(u);
    n.provenance  = dm_prov[u->prov];
    return n;
}

static kvd_status put_lane(kv_disk *d, kv_disk_put put, const int32_t *token, const dm_unit *u,
                           uint32_t lane, kvd_err *err)
{
    static uint8_t rec[DM_SEGMENT_REC * DM_RECORD], aux[KV_DISK_SEGMENT_BLOCKS * DM_AUX];
    const uint32_t n_block = u->kind == KV_DISK_SEGMENT ? KV_DISK_SEGMENT_BLOCKS : 1;

    if (u->kind == KV_DISK_TAIL) {
        for (uint32_t i = 0; i < u->n_tail_token; i++)
            dm_tail(rec + (size_t)i * DM_TAIL_TOKEN, token, u->first_block * DM_BLOCK + i, u->prov,
                    lane);
        return kv_disk_put_lane(d, put, lane, rec, NULL, err);
    }
    for (uint32_t b = 0; b < n_block; b++) {
        for (uint32_t c = 0; c < DM_BLOCK_REC; c++)
            dm_record(rec + (size_t)(b * DM_BLOCK_REC + c) * DM_RECORD, token, u->first_block + b,
                      u->prov, lane, c);
        dm_aux(aux + (size_t)b * DM_AUX, token, u->first_block + b, u->prov, lane);
    }
    return kv_disk_put_lane(d, put, lane, rec, aux, err);
}

kvd_status dm_put_lanes(kv_disk *d, kv_disk_put put, const int32_t *token, const dm_unit *u,
                        uint32_t n_lane, kvd_rng *rng, kvd_err *err)
{
    const uint32_t first = (uint32_t)kvd_rng_below(rng, DM_LANES);

    for (uint32_t i = 0; i < n_lane; i++)
        KVD_TRY(put_lane(d, put, token, u, (first + i) % DM_LANES, err));
    return KVD_OK;
}

kvd_status dm_put(kv_disk *d, const int32_t *token, const dm_unit *u, kvd_rng *rng, kvd_err *err)
{
    const kv_disk_name n = dm_name(d, token, u);
    kv_disk_put        put;
    kvd_status         st;

    KVD_TRY(kv_disk_put_begin(d, &n, &put, err));
    if (put == KV_DISK_NONE)
        return KVD_OK;
    st = dm_put_lanes(d, put, token, u, DM_LANES, rng, err);
    if (st == KVD_OK)
        return kv_disk_put_commit(d, put, err);
    kv_disk_put_abort(d, put);
    return st;
}

/* ---- finding and reading ---------------------------------------------------------- */

kvd_status dm_find(kv_disk *d, const int32_t *token, uint64_t n_token, const char *salt,
                   kv_disk_match *m, kvd_err *err)
{
    kv_disk_query q = {
        .token = token, .n_token = n_token, .provenance = dm_prov, .n_provenance = 2
    };

    if (salt)
        q.salt = (kv_disk_bytes){ salt, (uint32_t)strlen(salt) };
    return kv_disk_find(d, &q, m, err);
}

static bool range_is(const uint8_t *got, const kv_disk_read *r, const kv_disk_span *s,
                     const int32_t *token, uint64_t position)
{
    uint8_t want[DM_RECORD];

    for (uint32_t i = 0; i < r->n; i++) {
        const uint32_t at = r->first + i; /* in the unit */
        uint32_t       bytes;

        if (s->kind == KV_DISK_TAIL) {
            bytes = DM_TAIL_TOKEN;
            dm_tail(want, token, position + at, s->provenance, r->lane);
        } else if (r->what == KV_DISK_AUX) {
            bytes = DM_AUX;
            dm_aux(want, token, position / DM_BLOCK + at - s->first_block, s->provenance, r->lane);
        } else {
            bytes = DM_RECORD;
            dm_record(want, token, position / DM_BLOCK + at / DM_BLOCK_REC - s->first_block,
                      s->provenance, r->lane, at % DM_BLOCK_REC);
        }
        if (memcmp(got + (size_t)i * bytes, want, bytes) != 0)
            return false;
    }
    return true;
}

#define READS 16u

/* A range of what the span has: all of it, or a random part. */
static kv_disk_read pick(const kv_disk_span *s, uint32_t lane, kv_disk_what what, kvd_rng *rng,
                         bool parts, uint8_t *dst)
{
    uint32_t first = 0, n = s->n_token;

    if (s->kind != KV_DISK_TAIL) {
        const uint32_t per_block = what == KV_DISK_AUX ? 1 : DM_BLOCK_REC;

        first = s->first_block * per_block;
        n     = s->n_block * per_block;
    }
    if (parts) {
        const uint32_t skip = (uint32_t)kvd_rng_below(rng, n);

        first += skip;
        n = 1 + (uint32_t)kvd_rng_below(rng, n - skip);
    }
    return (kv_disk_read){ s->unit, what, lane, first, n, dst };
}

static kvd_status read_span(kv_disk *d, const kv_disk_span *s, const int32_t *token,
                            uint64_t position, kvd_rng *rng, bool parts, kvd_err *err)
{
    static uint8_t buf[READS][DM_SEGMENT_REC * DM_RECORD];
    kv_disk_read   r[READS];
    uint32_t       n = 0;

    memset(buf, 0xee, sizeof(buf));
    for (uint32_t lane = 0; lane < DM_LANES; lane++) {
        r[n] = pick(s, lane, KV_DISK_RECORDS, rng, parts, buf[n]);
        n++;
        if (s->kind == KV_DISK_TAIL)
            continue;
        r[n] = pick(s, lane, KV_DISK_AUX, rng, parts, buf[n]);
        n++;
    }
    for (uint32_t i = n; i-- > 1;) { /* the store sorts */
        const uint32_t     j = (uint32_t)kvd_rng_below(rng, i + 1);
        const kv_disk_read t = r[i];

        r[i] = r[j];
        r[j] = t;
    }
    KVD_TRY(kv_disk_read_now(d, r, n, err));
    for (uint32_t i = 0; i < n; i++)
        if (!range_is(r[i].dst, &r[i], s, token, position))
            return kvd_fail(err, KVD_E_DEVICE, 0, "wrong bytes, position %llu lane %u",
                            (unsigned long long)position, r[i].lane);
    return KVD_OK;
}

kvd_status dm_read(kv_disk *d, const kv_disk_match *m, const int32_t *token, kvd_rng *rng,
                   bool parts, kvd_err *err)
{
    uint64_t position = 0;

    for (uint32_t i = 0; i < m->n_span; i++) {
        KVD_TRY(read_span(d, &m->span[i], token, position, rng, parts, err));
        position += m->span[i].n_token;
    }
    return KVD_OK;
}

uint64_t dm_known(kv_disk *d, const int32_t *token, uint64_t n_token, kvd_rng *rng, kvd_err *err)
{
    kv_disk_match m;
    uint64_t      n;

    if (dm_find(d, token, n_token, NULL, &m, err) != KVD_OK)
        return 0;
    n = dm_read(d, &m, token, rng, false, err) == KVD_OK ? m.n_token : 0;
    kv_disk_match_close(d, &m);
    return n;
}
