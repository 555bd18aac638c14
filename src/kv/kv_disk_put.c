/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_put.c - writing units.
 *
 *      FREE --begin--> OPEN --commit--> WRITING --all written--> SYNCING --synced--> published,
 * FREE | abort              | failed, too late       | failed, too late
 *                       +------------------> DROPPED <----------------+   --nothing in flight-->
 * FREE
 *
 * Invariants
 *  (1) a unit is in the catalogue only after its bytes, and the name of a new file, are synced;
 *  (2) its range is given back only when no write into it is in flight, and nobody reads it;
 *  (3) the checksum of a page is taken from the stage, i.e. from the bytes that are written;
 *  (4) an open block grows in its own range: only pages that its row does not count are written, so
 *      the row means whole bytes until a later one takes its place, whatever becomes of the put.
 *      Its table of checksums is written over; entries of pages that the row counts stay the same,
 *      and the others are not looked at. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kv/kv_disk_int.h"

#define TAIL_LOOK_MAX 64u

/* What goes into one slot of the unit: two things one behind the other, zeros behind them. */
typedef struct put_source {
    const uint8_t *a, *b; /* b may be NULL */
    uint64_t       a_bytes, b_bytes;
} put_source;

static disk_put_unit *put_of(kv_disk *d, kv_disk_put h)
{
    const uint32_t i = (h & 0xffff) - 1;

    if (i >= KV_DISK_PUT_MAX || d->put[i].state != PUT_OPEN || d->put[i].gen != h >> 16)
        return NULL;
    return &d->put[i];
}

/* ---- begin ------------------------------------------------------------------------ */

static bool put_under_way(const kv_disk *d, const kv_disk_key *key, kv_disk_kind kind)
{
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++) {
        const disk_put_unit *p = &d->put[i];

        if (p->state != PUT_FREE && p->state != PUT_DROPPED && p->row.kind == kind &&
            memcmp(&p->row.key, key, sizeof(*key)) == 0)
            return true;
    }
    return false;
}

static bool bytes_equal(kv_disk_bytes a, kv_disk_bytes b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

/* ---- open blocks ------------------------------------------------------------------- */

/* Whether a unit of this name may stand for one of that provenance. */
static bool may_take(const kv_disk_name *n, kv_disk_bytes provenance)
{
    bool ok = bytes_equal(provenance, n->provenance);

    for (uint32_t i = 0; i < n->n_takes && !ok; i++)
        ok = bytes_equal(provenance, n->takes[i]);
    return ok;
}

static bool grows_now(const kv_disk *d, int64_t id)
{
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++)
        if (d->put[i].state != PUT_FREE && d->put[i].base && d->put[i].base->id == id)
            return true;
    return false;
}

typedef struct open_found {
    int64_t  covers; /* has all tokens of the name; 0: none */
    int64_t  grows;  /* has its first n_token tokens, and may grow; 0: none */
    uint32_t n_token;
} open_found;

static void open_look(kv_disk *d, const kv_disk_name *n, const disk_row *want, int64_t id,
                      open_found *out)
{
    disk_row r;
    uint32_t common;

    if (kv_disk_cat_row(d, id, &r) && may_take(n, r.provenance) &&
        memcmp(&r.salt_id, &want->salt_id, sizeof(r.salt_id)) == 0) {
        common = r.n_token < n->n_token ? r.n_token : n->n_token;
        if (memcmp(r.token, n->token, (size_t)common * 4) != 0)
            common = 0;
        if (common == n->n_token && n->kind == KV_DISK_OPEN)
            out->covers = id;
        else if (common == r.n_token && r.kind == KV_DISK_OPEN && common > out->n_token &&
                 !grows_now(d, id)) {
            out->grows   = id;
            out->n_token = common;
        }
    }
    kv_disk_cat_row_done(d);
}

/* An open block that has the unit's tokens, or some of them. */
static open_found open_find(kv_disk *d, const kv_disk_name *n, const disk_row *want)
{
    int64_t    id[TAIL_LOOK_MAX];
    open_found out   = { 0 };
    uint32_t   n_id  = 0;
    const bool grows = n->kind == KV_DISK_OPEN || (n->kind == KV_DISK_BLOCK && d->p.raw_records);

    if (grows)
        n_id = kv_disk_cat_behind(d, LOOK_OPENS, &want->parent, id, TAIL_LOOK_MAX);
    for (uint32_t i = 0; i < n_id && !out.covers; i++)
        open_look(d, n, want, id[i], &out);
    return out;
}

/* A reference to an open block that the unit can grow from; NULL: it is written as a whole. */
static disk_unit *open_base(kv_disk *d, const open_found *found, const disk_layout *l)
{
    kvd_err    why = { 0 };
    disk_unit *u   = found->grows ? kv_disk_unit_acquire(d, found->grows, &why) : NULL;

    if (!u)
        return NULL;
    if (u->layout.grows && u->layout.rec_slot == l->rec_slot && u->layout.bytes == l->bytes &&
        kv_disk_unit_load(d, u, &why) == KVD_OK)
        return u;
    kv_disk_unit_release(d, u);
    return NULL;
}

/* ---- what is known ----------------------------------------------------------------- */

/* Marks as used what is known already. */
static bool known(kv_disk *d, const disk_row *r, const open_found *found)
{
    int64_t  id[TAIL_LOOK_MAX] = { 0 };
    uint32_t block[1], n = 0;

    if (r->kind == KV_DISK_SEGMENT) {
        id[0] = kv_disk_cat_unit(d, &r->key, KV_DISK_SEGMENT);
        n     = id[0] != 0;
    } else if (r->kind == KV_DISK_BLOCK) {
        n = kv_disk_cat_names(d, &r->key, id, block, 1);
    } else if (r->kind == KV_DISK_OPEN) {
        id[0] = found->covers;
        n     = id[0] != 0;
    } else {
        const uint32_t n_tail = kv_disk_cat_behind(d, LOOK_TAILS, &r->parent, id, TAIL_LOOK_MAX);
        disk_row       other;

        for (uint32_t i = 0; n == 0 && i < n_tail; i++) {
            if (kv_disk_cat_row(d, id[i], &other) &&
                memcmp(&other.key, &r->key, sizeof(r->key)) == 0) {
                id[0] = id[i];
                n     = 1;
            }
            kv_disk_cat_row_done(d);
        }
    }
    kv_disk_cat_touch(d, id, n, d->clock++);
    return n > 0;
}

/* The keys of every block of the unit; the row's key, parent and salt. */
static bool put_names(kv_disk *d, const kv_disk_name *n, disk_row *r, kv_disk_key *name,
                      uint32_t *n_name)
{
    const uint32_t block = d->p.geometry.block_tokens;
    kv_disk_key    at;

    *n_name = 0;
    if (!kv_disk_salt_id(d, n->salt, &r->salt_id))
        return false;
    r->parent = n->parent;
    if (kv_disk_key_is_zero(&n->parent) && !kv_disk_root(d, &r->salt_id, &r->parent))
        return false;
    if (n->kind == KV_DISK_TAIL || n->kind == KV_DISK_OPEN)
        return kv_disk_chain(d, &r->parent, &r->salt_id, n->provenance, true, n->token, n->n_token,
                             &r->key);
    at = r->parent;
    for (uint32_t i = 0; i < n->n_token / block; i++) {
        if (!kv_disk_chain(d, &at, &r->salt_id, n->provenance, false, n->token + i * block, block,
                           &name[i]))
            return false;
        at = name[i];
    }
    *n_name = n->n_token / block;
    r->key  = at;
    return true;
}

static kvd_status put_fail_crypto(kvd_err *err)
{
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "block store: libcrypto refuses SHA-256");
}

/* Fills the row; nothing is taken yet. */
static kvd_status put_describe(kv_disk *d, const kv_disk_name *n, disk_row *r, kv_disk_key *name,
                               uint32_t *n_name, kvd_err *err)
{
    memset(r, 0, sizeof(*r));
    if (!d->p.geometry.n_lane)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: opened without a model");
    if (n->provenance.bytes > KV_DISK_PROV_BYTES)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "block store: provenance of %" PRIu32 " bytes, at most %u",
                        n->provenance.bytes, KV_DISK_PROV_BYTES);
    if (n->n_takes > KV_DISK_TAKES_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: too many provenances to take");
    /* A segment has room for an order. */
    if (!kv_disk_layout_of(&d->p.geometry, n->kind, n->n_token, n->kind == KV_DISK_SEGMENT,
                           &r->layout))
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no unit has %" PRIu32 " tokens",
                        n->n_token);
    r->kind        = n->kind;
    r->model       = d->model;
    r->geometry    = d->p.geometry;
    r->ordered     = n->kind == KV_DISK_SEGMENT;
    r->n_token     = n->n_token;
    r->first_token = n->first_token;
    r->bytes       = r->layout.bytes;
    return put_names(d, n, r, name, n_name) ? KVD_OK : put_fail_crypto(err);
}

kvd_status kv_disk_key_of(kv_disk *d, const kv_disk_name *name, kv_disk_key *out, kvd_err *err)
{
    kv_disk_key keys[KV_DISK_SEGMENT_BLOCKS];
    uint32_t    n;
    disk_row    r;

    KVD_TRY(put_describe(d, name, &r, keys, &n, err));
    *out = r.key;
    return KVD_OK;
}

static void put_free(disk_put_unit *p)
{
    const uint16_t gen = (uint16_t)(p->gen + 1);

    kvd_free(p->token);
    kvd_free(p->lane_put);
    kvd_free(p->sum);
    memset(p, 0, sizeof(*p));
    p->gen = gen;
}

/* Pages of an open block stay when its key changes, so it has a seed of its own. */
static kvd_status put_seed(disk_put_unit *p, kvd_err *err)
{
    disk_row *r = &p->row;

    if (p->base) {
        r->seed  = p->base->seed;
        p->n_had = p->base->layout.n_valid;
        memcpy(p->sum, p->base->sum, r->layout.n_page * 8);
    } else if (r->kind == KV_DISK_OPEN) {
        if (!os_random(&r->seed, sizeof(r->seed)))
            return kvd_fail(err, KVD_E_IO, 0, "block store: no random numbers from the system");
        r->seed |= 1; /* 0 is none */
    }
    p->seed = kv_disk_key_seed(r->seed, &r->key);
    return KVD_OK;
}

static kvd_status put_memory(disk_put_unit *p, const kv_disk_name *n, kvd_err *err)
{
    const disk_layout *l = &p->row.layout;

    p->token    = kvd_malloc((size_t)n->n_token * 4);
    p->lane_put = kvd_calloc(l->n_lane, 1);
    p->sum      = kvd_calloc(1, l->bytes - l->sums_off);
    if (!p->token || !p->lane_put || !p->sum)
        return kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for a unit");
    memcpy(p->token, n->token, (size_t)n->n_token * 4);
    if (n->provenance.bytes)
        memcpy(p->prov, n->provenance.data, n->provenance.bytes);
    p->n_takes = n->n_takes;
    for (uint32_t i = 0; i < n->n_takes; i++) {
        if (n->takes[i].bytes > KV_DISK_PROV_BYTES)
            return kvd_fail(err, KVD_E_INVAL, 0, "block store: a provenance of %" PRIu32 " bytes",
                            n->takes[i].bytes);
        if (n->takes[i].bytes)
            memcpy(p->takes[i], n->takes[i].data, n->takes[i].bytes);
        p->takes_bytes[i] = n->takes[i].bytes;
    }
    p->row.token      = p->token;
    p->row.provenance = (kv_disk_bytes){ p->prov, n->provenance.bytes };
    return put_seed(p, err);
}

/* What is to be written, without the table of checksums. */
static uint64_t put_bytes(const disk_put_unit *p)
{
    const disk_layout *l = &p->row.layout;

    return l->n_lane *
           ((l->n_valid - p->n_had) * KV_DISK_PAGE_BYTES + (l->grows ? 0 : l->aux_slot));
}

/* In the range that its open block has. */
static kvd_status put_grow(kv_disk *d, disk_put_unit *p, kvd_err *err)
{
    KVD_TRY(kv_disk_space_admit(d, 0, put_bytes(p), !kv_disk_key_is_zero(&p->row.salt_id), err));
    p->row.file = p->base->file;
    p->row.off  = p->base->off;
    KVD_TRY(kv_disk_file_use(d, p->row.file, &p->fd, err));
    p->state = PUT_OPEN;
    kv_disk_at(d, "reserved");
    return KVD_OK;
}

/* Takes the disk space; after it the put is OPEN. */
static kvd_status put_reserve(kv_disk *d, disk_put_unit *p, kvd_err *err)
{
    const bool salted = !kv_disk_key_is_zero(&p->row.salt_id);
    kvd_err    why    = { 0 };
    kvd_status st;

    if (p->base)
        return put_grow(d, p, err);
    KVD_TRY(kv_disk_space_admit(d, p->row.bytes, put_bytes(p), salted, err));
    st = kv_disk_space_alloc(d, p->row.bytes, &p->row.file, &p->row.off, &p->fd, &why);
    if (st != KVD_OK) {
        if (st == KVD_E_IO) {
            kv_disk_pause_error(d, why.sys, why.msg);
            return kv_disk_refuse(d, d->stats.pause, d->stats.pause_text, err);
        }
        return kvd_fail(err, st, why.sys, "%s", why.msg);
    }
    d->reserved_bytes += p->row.bytes;
    d->reserved_salted += salted ? p->row.bytes : 0;
    p->state = PUT_OPEN;
    kv_disk_at(d, "reserved");
    return KVD_OK;
}

static kvd_status begin(kv_disk *d, const kv_disk_name *name, kv_disk_put *out, kvd_err *err)
{
    disk_put_unit *p = NULL;
    kv_disk_key    keys[KV_DISK_SEGMENT_BLOCKS];
    uint32_t       n_key, i;
    disk_row       row;
    open_found     found;
    kvd_status     st;

    *out = KV_DISK_NONE;
    KVD_TRY(put_describe(d, name, &row, keys, &n_key, err));
    d->stats.n_put++;
    kv_disk_pump(d, 0); /* first: what it publishes may change what is found */
    found = open_find(d, name, &row);
    if (put_under_way(d, &row.key, row.kind) || known(d, &row, &found)) {
        d->stats.n_put_dup++;
        return KVD_OK;
    }
    for (i = 0; i < KV_DISK_PUT_MAX && !p; i++)
        if (d->put[i].state == PUT_FREE)
            p = &d->put[i];
    if (!p) {
        d->stats.n_put_refused++;
        return kvd_fail(err, KVD_E_BUSY, 0, "not stored: %u units are being written",
                        KV_DISK_PUT_MAX);
    }
    p->row    = row;
    p->n_name = n_key;
    memcpy(p->name, keys, sizeof(keys));
    p->base = open_base(d, &found, &row.layout);
    st      = put_memory(p, name, err);
    if (st == KVD_OK)
        st = put_reserve(d, p, err);
    if (st != KVD_OK) {
        if (p->base)
            kv_disk_unit_release(d, p->base);
        put_free(p);
        return st;
    }
    *out = i | (uint32_t)p->gen << 16;
    return KVD_OK;
}

kvd_status kv_disk_put_begin(kv_disk *d, const kv_disk_name *name, kv_disk_put *out, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    kv_disk_watch(d);
    return kv_disk_spent(&d->stats.put_ns, t0, begin(d, name, out, err));
}

/* ---- lanes ------------------------------------------------------------------------ */

static void copy_part(uint8_t *dst, const uint8_t *src, uint64_t src_bytes, uint64_t src_at,
                      uint64_t off, uint32_t n)
{
    const uint64_t from = kvd_max_u64(off, src_at);
    const uint64_t to   = kvd_min_u64(off + n, src_at + src_bytes);

    if (src && from < to)
        memcpy(dst + (from - off), src + (from - src_at), (size_t)(to - from));
}

static void fill(const put_source *s, uint64_t off, uint8_t *dst, uint32_t n)
{
    memset(dst, 0, n);
    copy_part(dst, s->a, s->a_bytes, 0, off, n);
    copy_part(dst, s->b, s->b_bytes, s->a_bytes, off, n);
}

static kvd_status wait_slot(kv_disk *d, disk_slot **out, kvd_err *err)
{
    const uint64_t end = kvd_ran_ns() + d->p.timeout_ns;

    while (!(*out = kv_disk_slot_take(d, true))) {
        const uint64_t t0 = kvd_now_ns(), now = kvd_ran_ns();

        if (now >= end) {
            d->stats.n_timeout++;
            kv_disk_pause_error(d, ETIMEDOUT, "writes take longer than their time limit");
            return kvd_fail(err, KVD_E_IO, ETIMEDOUT,
                            "%s: writes take longer than their time limit", d->dir);
        }
        kv_disk_pump(d, end - now);
        d->stats.put_wait_ns += kvd_now_ns() - t0;
    }
    return KVD_OK;
}

/* Writes bytes [from, end) of the slot that is at `off` of the unit.  lane: for the checksums;
 * UINT32_MAX: none. */
static kvd_status put_write(kv_disk *d, disk_put_unit *p, uint32_t lane, uint64_t off,
                            uint64_t from, uint64_t end, const put_source *src, kvd_err *err)
{
    for (uint64_t at = from; at < end; at += DISK_SLOT_BYTES) {
        const uint32_t n = (uint32_t)kvd_min_u64(DISK_SLOT_BYTES, end - at);
        disk_slot     *s;

        KVD_TRY(wait_slot(d, &s, err));
        fill(src, at, s->buf, n);
        for (uint32_t i = 0; lane != UINT32_MAX && i < n / KV_DISK_PAGE_BYTES; i++)
            p->sum[(off + at) / KV_DISK_PAGE_BYTES + i] =
                kv_disk_page_sum(p->seed, lane, (uint32_t)(at / KV_DISK_PAGE_BYTES) + i,
                                 s->buf + (size_t)i * KV_DISK_PAGE_BYTES);
        s->put = (uint32_t)(p - d->put);
        p->n_flight++;
        d->stats.written_bytes += n;
        d->stats.day_bytes += n;
        kv_disk_slot_submit(d, s, OS_IO_WRITE, p->fd, p->row.off + off + at, n);
    }
    return KVD_OK;
}

static kvd_status put_lane(kv_disk *d, kv_disk_put put, uint32_t lane, const void *records,
                           const void *aux, kvd_err *err)
{
    disk_put_unit     *p = put_of(d, put);
    const disk_layout *l;

    if (!p || lane >= p->row.layout.n_lane || p->lane_put[lane])
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no such unit or lane to write");
    l                      = &p->row.layout;
    const put_source rec   = { .a = records, .a_bytes = (uint64_t)l->n_rec * l->rec_bytes };
    const put_source extra = { .a       = aux,
                               .a_bytes = (uint64_t)l->n_block * l->aux_bytes,
                               .b       = l->ordered ? (const uint8_t *)d->identity : NULL,
                               .b_bytes = l->ordered ? (uint64_t)l->n_rec * 2 : 0 };

    if (p->error)
        return kvd_fail(err, KVD_E_IO, p->error, "%s: a write failed", d->dir);
    KVD_TRY(put_write(d, p, lane, lane * l->rec_slot, p->n_had * KV_DISK_PAGE_BYTES,
                      l->n_valid * KV_DISK_PAGE_BYTES, &rec, err));
    if (!l->grows)
        KVD_TRY(put_write(d, p, l->n_lane + lane, l->n_lane * l->rec_slot + lane * l->aux_slot, 0,
                          l->aux_slot, &extra, err));
    p->lane_put[lane] = 1;
    p->n_lane++;
    return KVD_OK;
}

kvd_status kv_disk_put_lane(kv_disk *d, kv_disk_put put, uint32_t lane, const void *records,
                            const void *aux, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    return kv_disk_spent(&d->stats.put_ns, t0, put_lane(d, put, lane, records, aux, err));
}

/* ---- commit ----------------------------------------------------------------------- */

bool kv_disk_put_waits(const kv_disk *d, kv_disk_put put)
{
    const disk_put_unit *p    = put_of((kv_disk *)(uintptr_t)d, put);
    const uint32_t       most = d->n_slot - d->n_read_slot;
    uint32_t             need, room = 0;

    if (!p)
        return false;
    need = (uint32_t)(kvd_div_up(p->row.layout.rec_slot, DISK_SLOT_BYTES) +
                      kvd_div_up(p->row.layout.aux_slot, DISK_SLOT_BYTES));
    for (uint32_t i = d->n_read_slot; i < d->n_slot; i++)
        room += !d->slot[i].busy;
    return room < (need < most ? need : most);
}

/* To FREE when nothing is in flight and nobody reads it; until then DROPPED. */
void kv_disk_put_drop(kv_disk *d, disk_put_unit *p)
{
    const disk_row *r = &p->row;

    p->state = PUT_DROPPED;
    if (p->n_flight > 0 || kv_disk_unit_in_use(d, kv_disk_put_id((uint32_t)(p - d->put))))
        return;
    kv_disk_file_release(d, r->file);
    if (p->base) { /* it has its range, and stays as it was */
        kv_disk_unit_release(d, p->base);
        put_free(p);
        return;
    }
    d->reserved_bytes -= r->bytes;
    d->reserved_salted -= kv_disk_key_is_zero(&r->salt_id) ? 0 : r->bytes;
    kv_disk_space_free(d, r->file, r->off, r->bytes);
    put_free(p);
}

void kv_disk_put_abort(kv_disk *d, kv_disk_put put)
{
    disk_put_unit *p = put_of(d, put);

    if (!p)
        return;
    d->stats.n_put_aborted++;
    kv_disk_put_drop(d, p);
}

static void put_failed(kv_disk *d, disk_put_unit *p, int sys, const char *what)
{
    char text[128];

    snprintf(text, sizeof(text), "%.63s: %.62s", what, sys ? strerror(sys) : "failed");
    d->stats.n_put_failed++;
    kv_disk_pause_error(d, sys, text);
    if (d->put_status == KVD_OK)
        d->put_status =
            kvd_fail(&d->put_err, KVD_E_IO, sys, "%s: a unit was not stored: %s", d->dir, text);
    kv_disk_put_drop(d, p);
}

static kvd_status commit(kv_disk *d, kv_disk_put put, kvd_err *err)
{
    disk_put_unit *p = put_of(d, put);
    kvd_status     st;

    if (!p)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no such unit to commit");
    const disk_layout *l     = &p->row.layout;
    const put_source   table = { .a = (const uint8_t *)p->sum, .a_bytes = l->n_page * 8 };

    if (p->n_lane < l->n_lane) {
        kvd_fail(err, KVD_E_INVAL, 0, "block store: %" PRIu32 " of %" PRIu32 " lanes were put",
                 p->n_lane, l->n_lane);
        kv_disk_put_abort(d, put);
        return KVD_E_INVAL;
    }
    p->row.sums_hash = kv_disk_table_sum(p->seed, p->sum, l->n_page);
    st = put_write(d, p, UINT32_MAX, l->sums_off, 0, l->bytes - l->sums_off, &table, err);
    if (st != KVD_OK) {
        kv_disk_put_abort(d, put);
        return st;
    }
    p->state    = PUT_WRITING;
    p->deadline = kvd_ran_ns() + DISK_COMMIT_TIMEOUTS * d->p.timeout_ns;
    kv_disk_pump(d, 0);
    return KVD_OK;
}

kvd_status kv_disk_put_commit(kv_disk *d, kv_disk_put put, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    return kv_disk_spent(&d->stats.put_ns, t0, commit(d, put, err));
}

/* Whether the unit has a tail's or an open block's tokens, which begin at its token `at`, and may
 * stand for it. */
static bool covers(const disk_put_unit *p, uint32_t at, const disk_row *other)
{
    const disk_row *r  = &p->row;
    bool            ok = bytes_equal(other->provenance, r->provenance);

    for (uint32_t i = 0; i < p->n_takes && !ok; i++)
        ok = bytes_equal(other->provenance, (kv_disk_bytes){ p->takes[i], p->takes_bytes[i] });
    return ok && other->n_token <= r->n_token - at &&
           memcmp(other->token, r->token + at, (size_t)other->n_token * 4) == 0 &&
           memcmp(&other->salt_id, &r->salt_id, sizeof(r->salt_id)) == 0;
}

/* Of the units behind a key, which stands for the unit's first `at` tokens. */
static void supersede(kv_disk *d, const disk_put_unit *p, cat_look look, const kv_disk_key *behind,
                      uint32_t at)
{
    int64_t        id[TAIL_LOOK_MAX];
    const uint32_t n = kv_disk_cat_behind(d, look, behind, id, TAIL_LOOK_MAX);

    for (uint32_t i = 0; i < n; i++) {
        disk_row   other;
        const bool covered = id[i] != p->row.id && kv_disk_cat_row(d, id[i], &other) &&
                             (other.kind == KV_DISK_TAIL || other.kind == KV_DISK_OPEN) &&
                             covers(p, at, &other);

        kv_disk_cat_row_done(d);
        if (covered)
            (void)kv_disk_evict(d, &other);
    }
}

/* A longer tail with the same beginning makes the shorter one useless, and so does an open block.
 * was: the key that it had before it grew, and its tokens; NULL: it is new. */
static void supersede_tails(kv_disk *d, const disk_put_unit *p, const kv_disk_key *was,
                            uint32_t n_was)
{
    const kv_disk_kind kind = p->row.kind;

    if (kind == KV_DISK_TAIL || p->row.seed)
        supersede(d, p, LOOK_TAILS, &p->row.parent, 0);
    if (kind == KV_DISK_OPEN)
        supersede(d, p, LOOK_OPENS, &p->row.parent, 0);
    if (was)
        supersede(d, p, LOOK_TAILS, was, n_was);
}

/* The open block in memory is what its row now says. */
static void base_grown(disk_put_unit *p)
{
    disk_unit *const u     = p->base;
    int32_t *const   token = u->token;
    uint64_t *const  sum   = u->sum;

    u->kind      = p->row.kind;
    u->key       = p->row.key;
    u->layout    = p->row.layout;
    u->n_token   = p->row.n_token;
    u->sums_hash = p->row.sums_hash;
    u->token     = p->token;
    u->sum       = p->sum;
    p->token     = token; /* put_free() frees what was */
    p->sum       = sum;
    p->row.token = u->token;
}

static void count_kind(kv_disk_stats *s, kv_disk_kind kind, int by)
{
    uint64_t *const n[KV_DISK_KINDS] = { &s->n_block, &s->n_segment, &s->n_tail, &s->n_tail };

    *n[kind] += (uint64_t)(int64_t)by;
}

static void count_published(kv_disk *d, const disk_put_unit *p)
{
    const disk_layout *l = &p->row.layout;
    kv_disk_stats     *s = &d->stats;

    s->n_put_done++;
    count_kind(s, p->row.kind, 1);
    if (p->row.kind == KV_DISK_OPEN) {
        s->tail_bytes_put += l->n_lane * (l->n_valid - p->n_had) * KV_DISK_PAGE_BYTES;
    } else if (p->row.kind == KV_DISK_TAIL) {
        s->tail_bytes_put += (uint64_t)l->n_lane * l->n_rec * l->rec_bytes;
    } else {
        s->record_bytes_put += (uint64_t)l->n_lane * l->n_rec * l->rec_bytes;
        s->aux_bytes_put += (uint64_t)l->n_lane * l->n_block * l->aux_bytes;
    }
    if (p->base) {
        count_kind(s, p->base->kind, -1);
        return;
    }
    s->n_unit++;
    s->unit_bytes += p->row.bytes;
    d->reserved_bytes -= p->row.bytes;
    if (!kv_disk_key_is_zero(&p->row.salt_id)) {
        s->salted_bytes += p->row.bytes;
        d->reserved_salted -= p->row.bytes;
    }
}

static void put_publish(kv_disk *d, disk_put_unit *p)
{
    disk_unit *const  base  = p->base;
    const kv_disk_key was   = base ? base->key : p->row.parent;
    const uint32_t    n_was = base ? base->n_token : 0;
    kvd_err           err   = { 0 };

    if (base && base->bad) { /* quarantined meanwhile, and a part of this with it */
        d->stats.n_put_aborted++;
        kv_disk_put_drop(d, p);
        return;
    }
    kv_disk_at(d, "synced");
    p->row.id      = base ? base->id : 0;
    p->row.used    = d->clock++;
    p->row.created = (int64_t)time(NULL);
    if (kv_disk_cat_publish(d, &p->row, p->name, p->n_name, &err) != KVD_OK) {
        put_failed(d, p, err.sys, err.msg);
        return;
    }
    kv_disk_at(d, "published");
    kv_disk_file_set_named(d, p->row.file);
    kv_disk_unit_renamed(d, kv_disk_put_id((uint32_t)(p - d->put)), p->row.id);
    count_published(d, p);
    kv_disk_file_release(d, p->row.file);
    if (base)
        base_grown(p);
    supersede_tails(d, p, base ? &was : NULL, n_was);
    if (base)
        kv_disk_unit_release(d, base);
    put_free(p);
}

void kv_disk_put_written(kv_disk *d, disk_put_unit *p, int error)
{
    (void)d;
    kvd_assert(p->n_flight > 0);
    p->n_flight--;
    if (error && !p->error)
        p->error = error;
}

static void start_sync(kv_disk *d, uint32_t put)
{
    disk_put_unit *p = &d->put[put];

    p->n_flight = 1;
    kv_disk_sync_submit(d, put, p->fd);
    if (!kv_disk_file_is_named(d, p->row.file)) {
        p->n_flight++;
        kv_disk_sync_dir_submit(d, put);
    }
}

void kv_disk_put_advance(kv_disk *d)
{
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++) {
        disk_put_unit *p = &d->put[i];

        if (p->state == PUT_DROPPED && p->n_flight == 0)
            kv_disk_put_drop(d, p);
        if (p->state != PUT_WRITING && p->state != PUT_SYNCING)
            continue;
        if (p->error) {
            put_failed(d, p, p->error, p->state == PUT_SYNCING ? "sync" : "write");
        } else if (p->n_flight > 0) {
            if (kvd_ran_ns() > p->deadline)
                put_failed(d, p, ETIMEDOUT, "write");
        } else if (p->state == PUT_WRITING) {
            kv_disk_at(d, "written");
            p->state = PUT_SYNCING;
            start_sync(d, i);
        } else if (kv_disk_log_idle(d)) {
            put_publish(d, p);
        }
    }
}

/* Its bytes are on the disk, but it has no row: not yet, or never, as long as somebody reads it. */
static bool readable(const kv_disk *d, uint32_t put)
{
    const disk_put_unit *p = &d->put[put];

    return p->state == PUT_SYNCING
               ? p->error == 0
               : p->state == PUT_DROPPED && kv_disk_unit_in_use(d, kv_disk_put_id(put));
}

uint32_t kv_disk_put_names(const kv_disk *d, const kv_disk_key *key, int64_t *id, uint32_t *block,
                           uint32_t max)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++) {
        for (uint32_t b = 0; b < d->put[i].n_name && n < max && readable(d, i); b++) {
            if (memcmp(&d->put[i].name[b], key, sizeof(*key)) != 0)
                continue;
            id[n]      = kv_disk_put_id(i);
            block[n++] = b;
        }
    }
    return n;
}

static bool commits_under_way(const kv_disk *d, put_state last)
{
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++)
        if (d->put[i].state >= PUT_WRITING && d->put[i].state <= last)
            return true;
    return false;
}

void kv_disk_poll(kv_disk *d)
{
    const uint64_t t0 = kvd_now_ns();

    kv_disk_watch(d);
    kv_disk_pump(d, 0);
    d->stats.put_ns += kvd_now_ns() - t0;
}

/* Until no commit is in these states.  Each has a deadline, so this ends. */
static kvd_status flush(kv_disk *d, put_state last, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_status     st;

    for (kv_disk_pump(d, 0); commits_under_way(d, last);)
        kv_disk_pump(d, 10000000);
    d->stats.put_ns += kvd_now_ns() - t0;
    st            = d->put_status;
    d->put_status = KVD_OK;
    if (st != KVD_OK && err)
        *err = d->put_err;
    return st;
}

kvd_status kv_disk_flush(kv_disk *d, kvd_err *err)
{
    kv_disk_watch(d);
    return flush(d, PUT_SYNCING, err);
}

kvd_status kv_disk_flush_writes(kv_disk *d, kvd_err *err)
{
    return flush(d, PUT_WRITING, err);
}
