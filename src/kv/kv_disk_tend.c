/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_tend.c - looking after a store: ls, verify, clear, gc, and the check of its invariants.
 * Each walks the catalogue once; rows are changed only between walks. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kv/kv_disk_int.h"

/* ---- ls --------------------------------------------------------------------------- */

typedef struct lister {
    const kv_disk *d;
    bool (*fn)(void *ctx, const kv_disk_entry *e);
    void *ctx;
} lister;

static bool list_row(void *ctx, const disk_row *r)
{
    const lister *l = ctx;
    kv_disk_entry e = { .key    = r->key,
                        .kind   = r->kind,
                        .bad    = r->bad,
                        .salted = r->salted,
                        .ours   = l->d->p.geometry.n_lane &&
                                memcmp(&r->model, &l->d->model, sizeof(r->model)) == 0,
                        .n_token     = r->n_token,
                        .first_token = r->first_token,
                        .bytes       = r->bytes,
                        .created     = r->created,
                        .used        = r->used,
                        .off         = r->off };

    snprintf(e.file, sizeof(e.file), "%08" PRIx32 ".kvd", r->file);
    return l->fn(l->ctx, &e);
}

kvd_status kv_disk_ls(kv_disk *d, bool (*fn)(void *ctx, const kv_disk_entry *e), void *ctx,
                      kvd_err *err)
{
    lister l = { d, fn, ctx };

    return kv_disk_cat_oldest(d, false, list_row, &l, err);
}

/* ---- ids of all units, to walk while rows change ------------------------------------ */

typedef struct id_list {
    int64_t *id;
    uint64_t n, cap;
    bool     oom;
} id_list;

static bool id_add(void *ctx, const disk_row *r)
{
    id_list *l = ctx;

    if (l->n == l->cap) {
        const uint64_t cap = l->cap ? l->cap * 2 : 1024;
        int64_t       *p   = kvd_realloc(l->id, cap * sizeof(*p));

        if (!p) {
            l->oom = true;
            return false;
        }
        l->id  = p;
        l->cap = cap;
    }
    l->id[l->n++] = r->id;
    return true;
}

static kvd_status list_ids(kv_disk *d, id_list *l, kvd_err *err)
{
    kvd_status st = kv_disk_cat_oldest(d, false, id_add, l, err);

    if (st == KVD_OK && l->oom)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for a list of units");
    if (st != KVD_OK)
        kvd_free(l->id);
    return st;
}

/* ---- verify ----------------------------------------------------------------------- */

kvd_status kv_disk_verify(kv_disk *d, uint64_t *n_ok, uint64_t *n_bad, kvd_err *err)
{
    const uint64_t bad_before = d->stats.n_quarantined;
    id_list        l          = { 0 };
    kvd_status     st         = kv_disk_cat_verify(d, err);

    *n_ok  = 0;
    *n_bad = 0;
    if (st == KVD_OK)
        st = list_ids(d, &l, err);
    if (st != KVD_OK)
        return st;
    for (uint64_t i = 0; st == KVD_OK && i < l.n; i++) {
        kvd_err    why = { 0 };
        disk_unit *u   = kv_disk_unit_acquire(d, l.id[i], &why);

        st = why.code;
        if (!u)
            continue;
        st = kv_disk_unit_verify(d, u, &why);
        *n_ok += st == KVD_OK;
        if (u->bad)
            st = KVD_OK; /* counted below */
        kv_disk_unit_release(d, u);
        if (st != KVD_OK && err)
            *err = why;
    }
    *n_bad = d->stats.n_quarantined - bad_before;
    kvd_free(l.id);
    return st;
}

kvd_status kv_disk_verify_catalog(kv_disk *d, kvd_err *err)
{
    return d->cat_sound && !d->cat_broken ? KVD_OK : kv_disk_cat_verify(d, err);
}

/* ---- clear, gc -------------------------------------------------------------------- */

/* Evicts while there is something to evict and `more` says so. */
static kvd_status evict_while(kv_disk *d, evict_which which, bool (*more)(kv_disk *d, uint64_t max),
                              uint64_t max, kvd_err *err)
{
    kvd_status st   = KVD_OK;
    bool       gone = true;

    d->space.punch_later = true; /* whole files go, mostly */
    while (st == KVD_OK && gone && more(d, max))
        st = kv_disk_evict_oldest(d, which, &gone, err);
    d->space.punch_later = false;
    return st == KVD_OK ? kv_disk_space_tidy(d, err) : st;
}

static bool always(kv_disk *d, uint64_t max)
{
    (void)d;
    (void)max;
    return true;
}

static bool too_much(kv_disk *d, uint64_t max)
{
    return d->stats.unit_bytes > max;
}

kvd_status kv_disk_clear(kv_disk *d, kvd_err *err)
{
    return evict_while(d, EVICT_ANY, always, 0, err);
}

kvd_status kv_disk_gc(kv_disk *d, uint64_t max_bytes, kvd_err *err)
{
    const uint64_t own  = d->p.max_bytes ? d->p.max_bytes : UINT64_MAX;
    const uint64_t max  = max_bytes && max_bytes < own ? max_bytes : own;
    bool           gone = true;

    KVD_TRY(evict_while(d, EVICT_BAD, always, 0, err));
    KVD_TRY(evict_while(d, EVICT_ANY, too_much, max, err));
    while (gone && os_dir_free(d->dir) <
                       d->p.min_free_bytes) /* one by one: each gives its space back at once */
        KVD_TRY(kv_disk_evict_oldest(d, EVICT_ANY, &gone, err));
    return KVD_OK;
}

/* ---- check ------------------------------------------------------------------------ */

typedef struct recount {
    kv_disk *d;
    uint64_t n_unit, bytes, salted;
} recount;

static bool count_row(void *ctx, const disk_row *r)
{
    recount *c = ctx;

    c->n_unit++;
    c->bytes += r->bytes;
    c->salted += r->salted ? r->bytes : 0;
    return true;
}

void kv_disk_check(kv_disk *d)
{
    const disk_space *s      = &d->space;
    recount           c      = { .d = d };
    uint64_t          n_unit = 0, all = 0, free = 0, puts = 0;

    if (kv_disk_cat_oldest(d, false, count_row, &c, NULL) != KVD_OK)
        return;
    kvd_assert(c.n_unit == d->stats.n_unit && c.bytes == d->stats.unit_bytes);
    kvd_assert(c.salted == d->stats.salted_bytes);
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++) {
        const bool own = d->put[i].state != PUT_FREE && !d->put[i].base; /* a range of its own */

        puts += own;
        all -= own ? d->put[i].row.bytes : 0;
    }
    for (uint32_t i = 0; i < s->n_file; i++) {
        n_unit += s->file[i].n_unit;
        all += s->file[i].end;
        kvd_assert(s->file[i].n_unit > 0);
        kvd_assert(i == 0 || s->file[i - 1].id < s->file[i].id);
        kvd_assert((s->file[i].fd >= 0) == (s->file[i].n_open > 0));
    }
    for (uint32_t i = 0; i < s->n_free; i++) {
        const disk_range *r = &s->free[i];

        free += r->bytes;
        kvd_assert(i == 0 || r[-1].file < r->file || r[-1].off + r[-1].bytes < r->off);
    }
    kvd_assert(n_unit == c.n_unit + puts);
    kvd_assert(all == c.bytes + free); /* invariant (1) of kv_disk_space.c */
}
