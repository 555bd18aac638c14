/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_find.c - units in memory, and the search for the longest known prefix.
 *
 * A unit is in memory while somebody references it; its row and its range stay as long.
 * Handles are {index, generation}: a stale one is nobody's. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kv/kv_disk_int.h"

#define CANDIDATE_MAX 8u  /* units looked at for one block */
#define FRONTIER_MAX  8u  /* ways to go on at one block: more differ in provenance only */
#define TAIL_MAX      64u /* tails looked at behind one block */
#define TOUCH_MAX     64u /* units of one transaction */

/* ---- units ------------------------------------------------------------------------ */

bool kv_disk_unit_in_use(const kv_disk *d, int64_t id)
{
    for (uint32_t i = 0; id != 0 && i < d->n_unit_used; i++) /* 0 marks a free slot */
        if (d->unit[i].id == id)
            return true;
    return false;
}

kv_disk_unit kv_disk_unit_handle(const kv_disk *d, const disk_unit *u)
{
    return ((uint32_t)(u - d->unit) + 1) | (uint32_t)u->gen << 16;
}

disk_unit *kv_disk_unit_of(kv_disk *d, kv_disk_unit h)
{
    const uint32_t i = (h & 0xffff) - 1;

    if (i >= d->n_unit_used || !d->unit[i].id || d->unit[i].gen != h >> 16)
        return NULL;
    return &d->unit[i];
}

void kv_disk_unit_release(kv_disk *d, disk_unit *u)
{
    const uint16_t gen = (uint16_t)(u->gen + 1);

    kvd_assert(u->n_ref > 0);
    if (--u->n_ref > 0)
        return;
    if (u->has_fd)
        kv_disk_file_release(d, u->file);
    kvd_free(u->token);
    kvd_free(u->sum);
    kvd_free(u->place);
    memset(u, 0, sizeof(*u));
    u->gen = gen;
    while (d->n_unit_used > 0 && !d->unit[d->n_unit_used - 1].id)
        d->n_unit_used--;
}

void kv_disk_quarantine(kv_disk *d, disk_unit *u, const char *why)
{
    if (u->bad)
        return;
    u->bad     = true;
    d->look_ns = 0;
    kvd_log(KVD_LOG_WARN, "%s: unit %" PRId64 " is quarantined: %s", d->dir, u->id, why);
    if (d->gone)
        return;
    if (u->id > 0)
        kv_disk_cat_set_bad(d, u->id);
    else /* it gets no row */
        d->put[kv_disk_put_of_id(u->id)].error = EIO;
}

void kv_disk_unit_renamed(kv_disk *d, int64_t from, int64_t to)
{
    for (uint32_t i = 0; i < d->n_unit_used; i++)
        if (d->unit[i].id == from)
            d->unit[i].id = to;
}

static disk_unit *unit_slot(kv_disk *d)
{
    for (uint32_t i = 0; i < d->p.max_units; i++) {
        if (d->unit[i].id)
            continue;
        if (i == d->n_unit_used)
            d->n_unit_used++;
        return &d->unit[i];
    }
    return NULL;
}

static void unit_from_row(disk_unit *u, const disk_row *r)
{
    u->id        = r->id;
    u->n_ref     = 1;
    u->kind      = r->kind;
    u->key       = r->key;
    u->parent    = r->parent;
    u->seed      = kv_disk_key_seed(r->seed, &r->key);
    u->sums_hash = r->sums_hash;
    u->layout    = r->layout;
    u->file      = r->file;
    u->off       = r->off;
    u->n_token   = r->n_token;
    u->fd        = -1;
}

/* The tokens, and the checksums of a put; those of a row are read when they are needed. */
static bool unit_memory(kv_disk *d, disk_unit *u, const disk_row *r)
{
    u->token = kvd_malloc((size_t)r->n_token * 4);
    if (u->token)
        memcpy(u->token, r->token, (size_t)r->n_token * 4);
    if (u->token && r->id < 0) {
        u->sum = kvd_malloc(u->layout.n_page * 8);
        if (u->sum)
            memcpy(u->sum, d->put[kv_disk_put_of_id(r->id)].sum, u->layout.n_page * 8);
    }
    return u->token && (u->sum || r->id > 0);
}

/* The unit in memory, one reference more; *bad: it is there, and damaged. */
static disk_unit *unit_known(kv_disk *d, int64_t id, bool *bad)
{
    *bad = false;
    for (uint32_t i = 0; i < d->n_unit_used; i++) {
        if (d->unit[i].id != id)
            continue;
        *bad = d->unit[i].bad;
        d->unit[i].n_ref += !*bad;
        return *bad ? NULL : &d->unit[i];
    }
    return NULL;
}

static disk_unit *unit_make(kv_disk *d, const disk_row *r, kvd_err *err)
{
    disk_unit *u   = unit_slot(d);
    kvd_err    why = { 0 };
    bool       ok;

    if (!u) {
        kvd_fail(err, KVD_E_BUSY, 0, "block store: more than %" PRIu32 " units in use",
                 d->p.max_units);
        return NULL;
    }
    unit_from_row(u, r);
    ok = unit_memory(d, u, r);
    kv_disk_cat_row_done(d); /* its tokens are copied; what follows may change the catalogue */
    u->has_fd = ok && kv_disk_file_use(d, u->file, &u->fd, &why) == KVD_OK;
    if (u->has_fd)
        return u;
    if (!ok)
        kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for a unit");
    else if (why.sys == ENOENT)
        kv_disk_quarantine(d, u, why.msg);
    else
        kvd_fail(err, why.code, why.sys, "%s", why.msg);
    kv_disk_unit_release(d, u);
    return NULL;
}

disk_unit *kv_disk_unit_acquire(kv_disk *d, int64_t id, kvd_err *err)
{
    bool       bad = false;
    disk_unit *u = id > 0 ? unit_known(d, id, &bad) : NULL; /* below 0: no row's, whoever says so */
    disk_row   r;

    if (u || bad || !kv_disk_cat_row(d, id, &r))
        return u;
    u = unit_make(d, &r, err);
    kv_disk_cat_row_done(d);
    return u;
}

/* Of a put that has no row yet. */
static disk_unit *acquire_put(kv_disk *d, uint32_t put, kvd_err *err)
{
    bool       bad;
    disk_unit *u = unit_known(d, kv_disk_put_id(put), &bad);
    disk_row   r = d->put[put].row;

    r.id = kv_disk_put_id(put);
    return u || bad ? u : unit_make(d, &r, err);
}

kvd_status kv_disk_unit_open(kv_disk *d, const kv_disk_key *key, kv_disk_kind kind,
                             kv_disk_unit *out, kvd_err *err)
{
    const int64_t id  = kv_disk_cat_unit(d, key, kind);
    kvd_err       why = { 0 };
    disk_unit    *u   = id ? kv_disk_unit_acquire(d, id, &why) : NULL;

    *out = KV_DISK_NONE;
    if (!u && why.code != KVD_OK)
        return kvd_fail(err, why.code, why.sys, "%s", why.msg);
    if (!u)
        return kvd_fail(err, KVD_E_BUSY, 0, "block store: no such unit is published");
    *out = kv_disk_unit_handle(d, u);
    return KVD_OK;
}

void kv_disk_unit_ref(kv_disk *d, kv_disk_unit h)
{
    disk_unit *u = kv_disk_unit_of(d, h);

    kvd_assert(u != NULL);
    u->n_ref++;
}

void kv_disk_unit_unref(kv_disk *d, kv_disk_unit h)
{
    disk_unit *u = kv_disk_unit_of(d, h);

    kvd_assert(u != NULL);
    kv_disk_unit_release(d, u);
}

bool kv_disk_unit_bad(const kv_disk *d, kv_disk_unit h)
{
    const uint32_t i = (h & 0xffff) - 1;

    return i >= d->n_unit_used || d->unit[i].gen != h >> 16 || d->unit[i].bad;
}

/* ---- search ----------------------------------------------------------------------- */

/* One known block of the prompt; it holds a reference to its unit. */
typedef struct find_node {
    kv_disk_key key;
    uint32_t    depth; /* blocks up to and with this one; 0: the root */
    uint32_t    prev;  /* node before it */
    uint32_t    provenance;
    uint32_t    block; /* in the unit */
    disk_unit  *unit;  /* NULL: the root */
} find_node;

typedef struct finder {
    kv_disk             *d;
    const kv_disk_query *q;
    kv_disk_key          salt_id;
    find_node           *node;
    uint32_t             n_node, cap;
    kvd_status           status;
    kvd_err             *err;
} finder;

static bool node_add(finder *f, const find_node *n)
{
    if (f->n_node == f->cap) {
        const uint32_t cap  = f->cap ? f->cap * 2 : 64;
        find_node     *more = kvd_realloc(f->node, cap * sizeof(*more));

        if (!more) {
            f->status = kvd_fail(f->err, KVD_E_NOMEM, 0, "block store: no memory for a search");
            return false;
        }
        f->node = more;
        f->cap  = cap;
    }
    f->node[f->n_node++] = *n;
    return true;
}

/* By the id of its row, or of its put. */
static disk_unit *acquire(finder *f, int64_t id, bool is_put)
{
    kvd_err    why = { 0 };
    disk_unit *u   = is_put ? acquire_put(f->d, kv_disk_put_of_id(id), &why)
                            : kv_disk_unit_acquire(f->d, id, &why);

    if (!u && why.code != KVD_OK)
        f->status = kvd_fail(f->err, why.code, why.sys, "%s", why.msg);
    return u;
}

/* Whether this block of the unit is what the node says: its tokens, and, where the way to it did
 * not lead through the unit, its key from the unit's parent on.  The table of names alone is not
 * believed. */
static bool block_is(finder *f, const disk_unit *u, uint32_t block, const find_node *n, bool stays)
{
    const uint32_t block_tokens = f->d->p.geometry.block_tokens;
    const int32_t *token        = f->q->token + (uint64_t)(n->depth - 1) * block_tokens;
    kv_disk_key    key          = u->parent;

    if (block >= u->layout.n_block || (uint64_t)(block + 1) * block_tokens > u->n_token ||
        memcmp(u->token + (size_t)block * block_tokens, token, (size_t)block_tokens * 4) != 0)
        return false;
    for (uint32_t i = 0; !stays && i <= block; i++)
        if (!kv_disk_chain(f->d, &key, &f->salt_id, f->q->provenance[n->provenance], false,
                           u->token + (size_t)i * block_tokens, block_tokens, &key))
            return false;
    return stays || memcmp(&key, &n->key, sizeof(key)) == 0;
}

/* Follows one block with one provenance; prefers to stay in the unit it is in. */
static void expand(finder *f, uint32_t from, uint32_t provenance)
{
    const uint32_t block = f->d->p.geometry.block_tokens;
    const int32_t *token = f->q->token + (uint64_t)f->node[from].depth * block;
    find_node best = { .depth = f->node[from].depth + 1, .prev = from, .provenance = provenance };
    int64_t   id[CANDIDATE_MAX];
    uint32_t  at[CANDIDATE_MAX], n_row, n;

    if (!kv_disk_chain(f->d, &f->node[from].key, &f->salt_id, f->q->provenance[provenance], false,
                       token, block, &best.key))
        return;
    n_row = n = kv_disk_cat_names(f->d, &best.key, id, at, CANDIDATE_MAX);
    if (f->q->unsynced)
        n += kv_disk_put_names(f->d, &best.key, id + n, at + n, CANDIDATE_MAX - n);
    for (uint32_t i = 0; i < n && f->status == KVD_OK; i++) {
        disk_unit *u = acquire(f, id[i], i >= n_row);
        bool       stays;

        if (!u)
            continue;
        stays = u == f->node[from].unit && at[i] == f->node[from].block + 1 &&
                provenance == f->node[from].provenance;
        if ((best.unit && !stays) || !block_is(f, u, at[i], &best, stays)) {
            kv_disk_unit_release(f->d, u);
            continue;
        }
        if (best.unit)
            kv_disk_unit_release(f->d, best.unit);
        best.unit  = u;
        best.block = at[i];
    }
    if (best.unit && (f->status != KVD_OK || !node_add(f, &best)))
        kv_disk_unit_release(f->d, best.unit);
}

/* Level by level: all ways that are known, at most FRONTIER_MAX. */
static void search_blocks(finder *f)
{
    const uint64_t n_level = f->q->n_token / f->d->p.geometry.block_tokens;
    uint32_t       first = 0, end = f->n_node;

    for (uint64_t level = 0; level < n_level && first < end && f->status == KVD_OK; level++) {
        for (uint32_t i = first; i < end; i++)
            for (uint32_t p = 0; p < f->q->n_provenance && f->n_node - end < FRONTIER_MAX; p++)
                if (f->status == KVD_OK)
                    expand(f, i, p);
        first = end;
        end   = f->n_node;
    }
}

/* ---- tails ------------------------------------------------------------------------ */

#define WAY_SPANS 3u /* two open blocks, the first of them whole, and a tail */

/* Tokens behind a block: open blocks and a tail, referenced. */
typedef struct tail_way {
    uint32_t   n; /* tokens */
    uint32_t   n_span;
    disk_unit *unit[WAY_SPANS];
    uint32_t   n_token[WAY_SPANS], provenance[WAY_SPANS];
} tail_way;

static void way_drop(finder *f, tail_way *w)
{
    for (uint32_t i = 0; i < w->n_span; i++)
        kv_disk_unit_release(f->d, w->unit[i]);
    *w = (tail_way){ 0 };
}

/* The span, behind what there is; takes over the reference. */
static void way_add(tail_way *w, disk_unit *u, uint32_t n_token, uint32_t provenance)
{
    kvd_assert(w->n_span < WAY_SPANS);
    w->unit[w->n_span]       = u;
    w->n_token[w->n_span]    = n_token;
    w->provenance[w->n_span] = provenance;
    w->n_span++;
    w->n += n_token;
}

/* Whether the unit's name is made of what is asked for: key, salt, a provenance, its tokens. */
static bool tail_is(finder *f, const kv_disk_key *behind, const disk_unit *u, uint32_t *provenance)
{
    const bool  tail = u->kind != KV_DISK_BLOCK;
    kv_disk_key key;

    for (*provenance = 0; *provenance < f->q->n_provenance; ++*provenance)
        if (kv_disk_chain(f->d, behind, &f->salt_id, f->q->provenance[*provenance], tail, u->token,
                          u->n_token, &key) &&
            memcmp(&key, &u->key, sizeof(key)) == 0)
            return true;
    return false;
}

/* Leading tokens of a unit that are those from `first` on, at most `most`. */
static uint32_t common(const finder *f, const int32_t *token, uint32_t n, uint64_t first,
                       uint32_t most)
{
    uint32_t m = 0;

    while (m < n && m < most && token[m] == f->q->token[first + m])
        m++;
    return m;
}

/* The longest of the units behind a key that fits, referenced, and how many of its tokens do. */
static disk_unit *longest(finder *f, cat_look look, const kv_disk_key *behind, uint64_t first,
                          uint32_t most, uint32_t *n_fit, uint32_t *provenance)
{
    int64_t        id[TAIL_MAX];
    const uint32_t n_id = kv_disk_cat_behind(f->d, look, behind, id, TAIL_MAX);
    disk_unit     *best = NULL;

    *n_fit = 0;
    for (uint32_t i = 0; i < n_id && f->status == KVD_OK; i++) {
        disk_unit *u;
        disk_row   r;
        uint32_t   m = 0, p;

        if (kv_disk_cat_row(f->d, id[i], &r))
            m = common(f, r.token, r.n_token, first, most);
        kv_disk_cat_row_done(f->d);
        u = m > *n_fit ? acquire(f, id[i], false) : NULL;
        if (!u)
            continue;
        m = common(f, u->token, u->n_token, first, most);
        if (m <= *n_fit || !tail_is(f, behind, u, &p)) {
            kv_disk_unit_release(f->d, u);
            continue;
        }
        if (best)
            kv_disk_unit_release(f->d, best);
        best        = u;
        *n_fit      = m;
        *provenance = p;
    }
    return best;
}

/* The tail that goes on behind the last open block of a way, which then ends where the block's
 * growth did, if it reaches further. */
static void add_rest(finder *f, const kv_disk_key *behind, uint64_t first, uint32_t most,
                     tail_way *w)
{
    const uint32_t last = w->n_span - 1, fits = w->n_token[last];
    const uint32_t even = fits - fits % kv_disk_open_step(&f->d->p.geometry);
    uint32_t       n, p;
    kv_disk_key    key;
    disk_unit     *u;

    if (even == 0 ||
        !kv_disk_chain(f->d, behind, &f->salt_id, f->q->provenance[w->provenance[last]], true,
                       f->q->token + first, even, &key))
        return;
    u = longest(f, LOOK_TAILS, &key, first + even, most - even, &n, &p);
    if (u && even + n > fits) {
        w->n -= fits - even;
        w->n_token[last] = even;
        way_add(w, u, n, p);
    } else if (u) {
        kv_disk_unit_release(f->d, u);
    }
}

/* Open blocks behind a key, one whole one at most before another, and a tail behind the last. */
static void open_way(finder *f, const kv_disk_key *behind, uint64_t first, uint64_t left,
                     tail_way *w)
{
    const uint32_t block = f->d->p.geometry.block_tokens;
    kv_disk_key    at    = *behind;
    uint32_t       n     = block, p, most;

    while (n == block && w->n_span < WAY_SPANS - 1) {
        disk_unit *u;

        most = (uint32_t)kvd_min_u64(left, w->n_span ? block - 1 : block);
        u    = longest(f, LOOK_OPENS, &at, first, most, &n, &p);
        if (!u) {
            u = w->n_span ? longest(f, LOOK_TAILS, &at, first, most, &n, &p) : NULL;
            if (u)
                way_add(w, u, n, p);
            return;
        }
        way_add(w, u, n, p);
        if (n < block) {
            add_rest(f, &at, first, most, w);
            return;
        }
        if (!kv_disk_chain(f->d, &at, &f->salt_id, f->q->provenance[p], false, f->q->token + first,
                           block, &at))
            return;
        first += block;
        left -= block;
    }
}

/* The longest way behind a block. */
static tail_way way_behind(finder *f, const find_node *n)
{
    const uint64_t first = (uint64_t)n->depth * f->d->p.geometry.block_tokens;
    const uint64_t left  = f->q->n_token - first;
    tail_way       open = { 0 }, tail = { 0 };
    uint32_t       n_fit, p;
    disk_unit     *u;

    u = longest(f, LOOK_TAILS, &n->key, first, (uint32_t)kvd_min_u64(left, UINT32_MAX), &n_fit, &p);
    if (u)
        way_add(&tail, u, n_fit, p);
    if (f->status == KVD_OK)
        open_way(f, &n->key, first, left, &open);
    way_drop(f, open.n > tail.n ? &tail : &open);
    return open.n > 0 ? open : tail;
}

/* Blocks from the root to a node, as spans. */
static kvd_status make_spans(finder *f, uint32_t last, kv_disk_match *out)
{
    const uint32_t block = f->d->p.geometry.block_tokens;
    const uint32_t depth = f->node[last].depth;
    uint32_t       first = depth + 1;

    out->span = kvd_calloc((size_t)depth + WAY_SPANS, sizeof(*out->span));
    if (!out->span)
        return kvd_fail(f->err, KVD_E_NOMEM, 0, "block store: no memory for a match");
    for (uint32_t i = last; f->node[i].unit; i = f->node[i].prev) { /* from the back */
        const find_node   *n = &f->node[i];
        const kv_disk_unit h = kv_disk_unit_handle(f->d, n->unit);
        kv_disk_span      *s = &out->span[first];

        if (first <= depth && s->unit == h && s->first_block == n->block + 1 &&
            s->provenance == n->provenance) {
            s->first_block--;
            s->n_block++;
            s->n_token += block;
            continue;
        }
        n->unit->n_ref++;
        out->span[--first] = (kv_disk_span){ h, n->unit->kind, n->provenance, n->block, 1, block };
    }
    out->n_span = depth + 1 - first;
    memmove(out->span, out->span + first, out->n_span * sizeof(*out->span));
    out->n_token = (uint64_t)depth * block;
    if (depth)
        out->key = f->node[last].key;
    return KVD_OK;
}

static void add_way(finder *f, const tail_way *w, kv_disk_match *out)
{
    for (uint32_t i = 0; i < w->n_span; i++) {
        const kv_disk_kind kind = w->unit[i]->kind == KV_DISK_TAIL ? KV_DISK_TAIL : KV_DISK_OPEN;

        out->span[out->n_span++] = (kv_disk_span){
            kv_disk_unit_handle(f->d, w->unit[i]), kind, w->provenance[i], 0, 0, w->n_token[i]
        };
    }
    out->n_tail_token = w->n;
    out->n_tail_span  = w->n_span;
}

/* The deepest node, or one a block above it with a tail that reaches further. */
static kvd_status conclude(finder *f, kv_disk_match *out)
{
    const uint32_t block   = f->d->p.geometry.block_tokens;
    const uint32_t deepest = f->node[f->n_node - 1].depth;
    uint32_t       last    = f->n_node - 1;
    uint64_t       covered = (uint64_t)deepest * block;
    tail_way       best    = { 0 };
    kvd_status     st;

    while (last > 0 && f->node[last - 1].depth == deepest)
        last--;
    /* the deepest first: of what reaches equally far, whole blocks are better */
    for (uint32_t k = 0; k < 2 * f->n_node && f->status == KVD_OK; k++) {
        const uint32_t i = k % f->n_node;
        tail_way       w;

        if (f->node[i].depth + k / f->n_node != deepest)
            continue;
        w = way_behind(f, &f->node[i]);
        if ((uint64_t)f->node[i].depth * block + w.n > covered) {
            way_drop(f, &best);
            covered = (uint64_t)f->node[i].depth * block + w.n;
            best    = w;
            last    = i;
        } else {
            way_drop(f, &w);
        }
    }
    st = f->status == KVD_OK ? make_spans(f, last, out) : f->status;
    if (st == KVD_OK)
        add_way(f, &best, out);
    else
        way_drop(f, &best);
    return st;
}

static void count_find(kv_disk *d, const kv_disk_match *m)
{
    d->stats.n_find++;
    d->stats.n_find_hit += m->n_span > 0;
    d->stats.found_tokens += m->n_token + m->n_tail_token;
    for (uint32_t i = 0; i < m->n_span; i += TOUCH_MAX) {
        int64_t  id[TOUCH_MAX];
        uint32_t n = 0;

        for (; n < TOUCH_MAX && i + n < m->n_span; n++)
            id[n] = kv_disk_unit_of(d, m->span[i + n].unit)->id;
        kv_disk_cat_touch(d, id, n, d->clock);
    }
    d->clock++; /* the whole match has one time */
}

kvd_status kv_disk_find(kv_disk *d, const kv_disk_query *q, kv_disk_match *out, kvd_err *err)
{
    finder     f    = { .d = d, .q = q, .err = err };
    find_node  root = { 0 };
    kvd_status st;

    memset(out, 0, sizeof(*out));
    kv_disk_watch(d);
    if (!d->p.geometry.n_lane || q->n_provenance > KV_DISK_PROV_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: %s",
                        d->p.geometry.n_lane ? "too many provenances" : "opened without a model");
    if (!kv_disk_salt_id(d, q->salt, &f.salt_id) || !kv_disk_root(d, &f.salt_id, &root.key))
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "block store: libcrypto refuses SHA-256");
    if (node_add(&f, &root)) {
        search_blocks(&f);
        if (f.status == KVD_OK)
            f.status = conclude(&f, out);
    }
    st = f.status;
    for (uint32_t i = 0; i < f.n_node; i++)
        if (f.node[i].unit)
            kv_disk_unit_release(d, f.node[i].unit);
    kvd_free(f.node);
    if (st != KVD_OK)
        kv_disk_match_close(d, out);
    else
        count_find(d, out);
    return st;
}

void kv_disk_match_close(kv_disk *d, kv_disk_match *m)
{
    for (uint32_t i = 0; i < m->n_span; i++)
        kv_disk_unit_unref(d, m->span[i].unit);
    kvd_free(m->span);
    memset(m, 0, sizeof(*m));
}
