/* SPDX-License-Identifier: Apache-2.0 */
/* kv_cache.c - what is sealed goes to the block store as well, and comes back from it.
 *
 * Blocks that are sealed together become segments of 16 and single blocks; what is not sealed at
 * the end of a prompt becomes an open block, which grows by what is new, and a short tail.  A store
 * that refuses (full, paused, broken) costs nothing but that the blocks are not found later.
 *
 * Each block's key continues the chain of the block before it, so the keys of a sequence's sealed
 * blocks are kept.  Provenance says how K and V of a block came about: exactly (in prompts), or
 * with generated tokens among them, then under which options.
 *
 * Owns: the block store, buffers to gather lanes in.  Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

#define HELD_UNITS  2048u      /* a quarter of what the block store has references for */
#define STAGE_BYTES (8u << 20) /* of the block store, for reads and for writes */
#define STORE_BYTES (2ull * STAGE_BYTES + (8u << 20)) /* with its lists and the catalogue */
#define EVAL_NOTE   "eval_ns" /* in the catalogue: what evaluating a token of a prompt takes */
#define PROV_EXACT  'e'
#define PROV_DENSE  'd'
#define PROV_SPARSE 's'

/* ---- provenance --------------------------------------------------------------------- */

static char prov_kind(uint8_t made)
{
    return made & MADE_SPARSE ? PROV_SPARSE : made & MADE_DENSE ? PROV_DENSE : PROV_EXACT;
}

bool kv_cache_same_making(uint8_t a, uint8_t b)
{
    return prov_kind(a) == prov_kind(b);
}

/* kind, the sequence's variant, and the options where they matter. */
kv_cache_prov kv_cache_prov_of(const kv_cache *c, uint8_t made, uint8_t variant)
{
    const char    kind = prov_kind(made);
    kv_cache_prov p    = { .byte = { (uint8_t)kind, variant }, .bytes = 2 };

    if (kind == PROV_SPARSE) {
        memcpy(p.byte + 2, c->options, c->n_options);
        p.bytes += c->n_options;
    }
    return p;
}

void kv_cache_mark(kv_store *s, uint32_t seq, uint32_t first, uint32_t n, bool sparse)
{
    kv_cache_seq *q = s->cache ? &s->cache->seq[seq] : NULL;

    for (uint32_t b = first / KV_BLOCK_TOKENS; q && b <= (first + n - 1) / KV_BLOCK_TOKENS; b++)
        q->made[b] |= sparse ? MADE_SPARSE : MADE_DENSE;
}

/* ---- open and close ----------------------------------------------------------------- */

static uint64_t segment_bytes(const kv_store *s)
{
    return (uint64_t)KV_DISK_SEGMENT_BLOCKS * s->block_chunks * s->packed_bytes;
}

static uint64_t tail_token_bytes(const kv_store *s)
{
    return s->layout.record_bytes / s->params.chunk_tokens;
}

/* Tails of format 1 have up to two blocks' tokens. */
static uint64_t tail_bytes(const kv_store *s)
{
    return (uint64_t)2 * KV_BLOCK_TOKENS * tail_token_bytes(s);
}

uint64_t kv_cache_bytes(const kv_params *p)
{
    const uint64_t blocks = kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS);
    const uint64_t elem   = p->type == KVD_DTYPE_F32 ? 4 : 2;
    const uint64_t segment =
        (uint64_t)KV_DISK_SEGMENT_BLOCKS * KV_BLOCK_TOKENS * 2 * p->head_dim * elem;

    if (!p->cache_dir)
        return 0;
    return sizeof(kv_cache) + STORE_BYTES +
           p->n_seq * (sizeof(kv_cache_seq) + blocks * (sizeof(kv_disk_key) + 1)) + segment +
           KV_DISK_SEGMENT_BLOCKS * kv_aux_bytes(p) +
           p->n_kv_head * (blocks + 2) * sizeof(kv_disk_read) + 2 * blocks * sizeof(uint64_t);
}

static kvd_status alloc_cache(kv_store *s, kv_cache *c, kvd_err *err)
{
    const size_t blocks = s->blocks_max;

    c->gather = kvd_malloc((size_t)kvd_max_u64(segment_bytes(s), tail_bytes(s)));
    c->aux    = kvd_malloc((size_t)(KV_DISK_SEGMENT_BLOCKS * s->index.head_stride));
    c->read   = kvd_calloc(s->params.n_kv_head * (blocks + 2), sizeof(*c->read));
    c->aside  = kvd_calloc(2 * blocks, sizeof(*c->aside));
    c->seq    = kvd_calloc(s->params.n_seq, sizeof(*c->seq));
    c->keys   = kvd_calloc(s->params.n_seq * blocks, sizeof(*c->keys));
    c->made   = kvd_calloc(s->params.n_seq * blocks, sizeof(*c->made));
    if (!c->gather || !c->aux || !c->read || !c->aside || !c->seq || !c->keys || !c->made)
        return kvd_fail(err, KVD_E_NOMEM, 0, "prefix cache: no memory for its tables");
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        c->seq[i].key  = c->keys + i * blocks;
        c->seq[i].made = c->made + i * blocks;
    }
    return KVD_OK;
}

kvd_status kv_cache_open(kv_store *s, kvd_err *err)
{
    const kv_params       *p  = &s->params;
    const kv_disk_geometry g  = { .n_lane           = p->n_layer * p->n_kv_head,
                                  .block_tokens     = KV_BLOCK_TOKENS,
                                  .chunk_tokens     = p->chunk_tokens,
                                  .record_bytes     = (uint32_t)s->packed_bytes,
                                  .aux_bytes        = (uint32_t)s->index.head_stride,
                                  .tail_token_bytes = (uint32_t)tail_token_bytes(s) };
    kv_disk_params         dp = { .dir               = p->cache_dir,
                                  .geometry          = g,
                                  .max_bytes         = p->cache_bytes,
                                  .min_free_bytes    = p->cache_min_free,
                                  .raw_records       = s->record.type == KVD_RECORD_RAW,
                                  .read_stage_bytes  = STAGE_BYTES,
                                  .write_stage_bytes = STAGE_BYTES };
    kvd_status             st;

    if (!p->cache_dir)
        return KVD_OK;
    kvd_assert(p->sparse); /* blocks are stored with their index */
    memcpy(dp.fingerprint, p->fingerprint, sizeof(dp.fingerprint));
    if (p->disk_io)
        dp.io = *p->disk_io;
    if (p->disk_timeout_ns)
        dp.timeout_ns = p->disk_timeout_ns;
    if (s->sizes.spills) {
        dp.late_tickets = p->n_layer * kv_tier_lag(p);
        dp.late_pieces  = kv_tier_late_reads(p);
    }
    s->cache = kvd_calloc(1, sizeof(*s->cache));
    if (!s->cache)
        return kvd_fail(err, KVD_E_NOMEM, 0, "prefix cache: no memory");
    st = alloc_cache(s, s->cache, err);
    if (st == KVD_OK)
        st = kv_ferry_open(s, err);
    if (st == KVD_OK)
        st = kv_disk_open(&s->cache->disk, &dp, err);
    if (st == KVD_OK && kv_disk_note_get(s->cache->disk, EVAL_NOTE, &s->cache->eval_ns)) {
        s->cache->eval_ns_kept = s->cache->eval_ns;
        s->cache->eval_weight  = KV_BLOCK_TOKENS * 4; /* another process's, maybe on a busy day */
    }
    return st;
}

void kv_cache_close(kv_store *s)
{
    kv_cache *c   = s->cache;
    kvd_err   err = { 0 };

    if (!c)
        return;
    if (c->pending.s)
        kv_disk_match_close(c->disk, &c->pending.match);
    (void)!kv_flush(s, &err);
    kv_disk_close(c->disk);
    kv_ferry_close(s);
    kvd_free(c->gather);
    kvd_free(c->aux);
    kvd_free(c->read);
    kvd_free(c->aside);
    kvd_free(c->seq);
    kvd_free(c->keys);
    kvd_free(c->made);
    kvd_free(c);
    s->cache = NULL;
}

void kv_seq_source(kv_store *s, uint32_t seq, const int32_t *token, uint8_t variant)
{
    if (!s->cache)
        return;
    s->cache->seq[seq].token   = token;
    s->cache->seq[seq].variant = variant;
}

void kv_seq_salt(kv_store *s, uint32_t seq, const void *salt, uint32_t bytes)
{
    kv_cache_seq *q = s->cache ? &s->cache->seq[seq] : NULL;

    if (!q)
        return;
    kvd_assert(s->seq[seq].len == 0 && bytes <= sizeof(q->salt));
    if (bytes)
        memcpy(q->salt, salt, bytes);
    q->n_salt = bytes;
}

void kv_set_provenance(kv_store *s, const void *options, uint32_t bytes)
{
    if (!s->cache)
        return;
    kvd_assert(bytes <= KV_DISK_PROV_BYTES - 2);
    memcpy(s->cache->options, options, bytes);
    s->cache->n_options = bytes;
}

/* A sequence was cut: what follows is of a prompt until marked otherwise. */
void kv_cache_cut(kv_store *s, uint32_t seq, uint32_t n_keep)
{
    const uint32_t b = (uint32_t)kvd_div_up(n_keep, KV_BLOCK_TOKENS);

    if (s->cache)
        memset(s->cache->seq[seq].made + b, 0, s->blocks_max - b);
}

/* ---- names -------------------------------------------------------------------------- */

static const kv_disk_key *parent_of(const kv_cache_seq *q, uint32_t b)
{
    static const kv_disk_key none;

    return b == 0 ? &none : &q->key[b - 1];
}

/* A name, and what it points to. */
typedef struct cache_name {
    kv_cache_prov prov, better[KV_DISK_TAKES_MAX];
    kv_disk_bytes takes[KV_DISK_TAKES_MAX];
    kv_disk_name  name;
} cache_name;

/* Of a unit that begins with block b.  What was made in a better way may be part of it. */
static void name_unit(const kv_store *s, uint32_t seq, kv_disk_kind kind, uint32_t b,
                      uint32_t n_token, uint8_t made, cache_name *out)
{
    const kv_cache     *c       = s->cache;
    const kv_cache_seq *q       = &c->seq[seq];
    const uint8_t       worst   = made & MADE_SPARSE ? MADE_SPARSE : made;
    uint32_t            n_takes = 0;

    out->prov = kv_cache_prov_of(c, made, q->variant);
    for (uint32_t i = 0; i < KV_CACHE_ACCEPTED && kv_cache_accepted[i] < worst; i++, n_takes++) {
        out->better[n_takes] = kv_cache_prov_of(c, kv_cache_accepted[i], q->variant);
        out->takes[n_takes] =
            (kv_disk_bytes){ out->better[n_takes].byte, out->better[n_takes].bytes };
    }
    out->name = (kv_disk_name){ .kind        = kind,
                                .parent      = *parent_of(q, b),
                                .first_token = (uint64_t)b * KV_BLOCK_TOKENS,
                                .token       = q->token + (size_t)b * KV_BLOCK_TOKENS,
                                .n_token     = n_token,
                                .provenance  = { out->prov.byte, out->prov.bytes },
                                .takes       = out->takes,
                                .n_takes     = n_takes,
                                .salt        = { q->salt, q->n_salt } };
}

kvd_status kv_cache_name_block(kv_store *s, uint32_t seq, uint32_t b, kvd_err *err)
{
    kv_cache_seq *q = &s->cache->seq[seq];
    cache_name    n;

    name_unit(s, seq, KV_DISK_BLOCK, b, KV_BLOCK_TOKENS, q->made[b], &n);
    return kv_disk_key_of(s->cache->disk, &n.name, &q->key[b], err);
}

/* A refusal is the store's business; it is told once per reason, not once per block. */
void kv_cache_tell(kv_cache *c, const kvd_err *err)
{
    if (strcmp(c->told, err->msg) == 0)
        return;
    kvd_log(KVD_LOG_WARN, "prefix cache: %s", err->msg);
    memcpy(c->told, err->msg, sizeof(c->told));
}

void kv_cache_lost(kv_store *s, kv_disk_put put)
{
    kv_cache *c = s->cache;

    for (uint32_t i = 0; i < c->n_unit; i++)
        if (c->unit[i].put == put)
            c->unit[i].put = KV_DISK_NONE;
    if (c->tail == put)
        c->tail = KV_DISK_NONE;
    if (put != KV_DISK_NONE)
        kv_ferry_drop(s, put);
}

/* ---- storing blocks ----------------------------------------------------------------- */

static uint8_t made_of_blocks(const kv_cache_seq *q, uint32_t first, uint32_t n)
{
    uint8_t made = 0;

    for (uint32_t b = first; b < first + n; b++)
        made |= q->made[b];
    return made;
}

/* Blocks of one segment must have one provenance. */
static uint32_t unit_blocks(const kv_cache_seq *q, uint32_t first, uint32_t end)
{
    if (end - first < KV_DISK_SEGMENT_BLOCKS)
        return 1;
    for (uint32_t b = first + 1; b < first + KV_DISK_SEGMENT_BLOCKS; b++) {
        if (prov_kind(q->made[b]) != prov_kind(q->made[first]))
            return 1;
    }
    return KV_DISK_SEGMENT_BLOCKS;
}

static void begin_unit(kv_store *s, uint32_t seq, uint32_t first, uint32_t n)
{
    kv_cache      *c   = s->cache;
    kv_cache_unit *u   = &c->unit[c->n_unit];
    kvd_err        err = { 0 };
    cache_name     n_u;

    *u = (kv_cache_unit){ .first = first, .n = n };
    name_unit(s, seq, n == 1 ? KV_DISK_BLOCK : KV_DISK_SEGMENT, first, n * KV_BLOCK_TOKENS,
              made_of_blocks(&c->seq[seq], first, n), &n_u);
    if (kv_disk_put_begin(c->disk, &n_u.name, &u->put, &err) != KVD_OK)
        kv_cache_tell(c, &err);
    else if (u->put != KV_DISK_NONE)
        c->n_unit++;
}

void kv_cache_put_begin(kv_store *s, uint32_t seq, uint32_t first, uint32_t end)
{
    kv_cache *c   = s->cache;
    kvd_err   err = { 0 };

    if (!c)
        return;
    c->n_unit = 0;
    for (uint32_t b = first; b < end; b++) {
        if (kv_cache_name_block(s, seq, b, &err) != KVD_OK) {
            kv_cache_tell(c, &err);
            return;
        }
    }
    while (first < end && c->n_unit < KV_DISK_PUT_MAX) {
        const uint32_t n = unit_blocks(&c->seq[seq], first, end);

        begin_unit(s, seq, first, n);
        first += n;
    }
}

/* Index of a lane's blocks, one behind the other. */
static void gather_aux(const kv_store *s, uint32_t seq, uint32_t lane, const kv_cache_unit *u)
{
    const uint64_t bytes = s->index.head_stride;

    for (uint32_t i = 0; i < u->n; i++)
        memcpy(s->cache->aux + i * bytes,
               (const uint8_t *)s->landmarks.ptr + s->seq[seq].iblock[u->first + i] + lane * bytes,
               (size_t)bytes);
}

static void put_lane(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t head,
                     const uint64_t *layer_at, kv_cache_unit *u)
{
    kv_cache      *c     = s->cache;
    const uint32_t lane  = layer * s->params.n_kv_head + head;
    const uint64_t bytes = s->block_chunks * s->packed_bytes;
    kvd_err        err   = { 0 };
    kvd_status     rc    = KVD_OK;

    for (uint32_t i = 0; i < u->n && rc == KVD_OK; i++)
        rc = kv_pack_lane(s, st, seq, lane, u->first + i,
                          layer_at[u->first + i] + head * s->layout.head_stride,
                          c->gather + i * bytes, &err);
    gather_aux(s, seq, lane, u);
    if (rc == KVD_OK)
        rc = kv_disk_put_lane(c->disk, u->put, lane, c->gather, c->aux, &err);
    if (rc == KVD_OK)
        return;
    kv_cache_tell(c, &err);
    kv_disk_put_abort(c->disk, u->put);
    u->put = KV_DISK_NONE;
}

static void bring_unit(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                       const uint64_t *layer_at, kv_cache_unit *u)
{
    const kv_ferry_unit f   = { .put = u->put, .seq = seq, .first = u->first, .n = u->n };
    kvd_err             err = { 0 };

    if (u->put == KV_DISK_NONE || kv_ferry_bring(s, st, &f, layer, layer_at, &err) == KVD_OK)
        return;
    kv_cache_tell(s->cache, &err);
    kv_cache_lost(s, f.put);
}

/* layer_at[b]: where block b's lanes of this layer lie in the pool. */
void kv_cache_put_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                        const uint64_t *layer_at)
{
    const bool was = kvd_alloc_guard(false); /* the block store has its own limits */

    for (uint32_t i = 0; s->cache && i < s->cache->n_unit; i++) {
        kv_cache_unit *u = &s->cache->unit[i];

        if (s->cache->ferry)
            bring_unit(s, st, seq, layer, layer_at, u);
        for (uint32_t h = 0; !s->cache->ferry && h < s->params.n_kv_head && u->put != KV_DISK_NONE;
             h++)
            put_lane(s, st, seq, layer, h, layer_at, u);
    }
    kvd_alloc_guard(was);
}

static kvd_status commit(kv_store *s, kv_disk_put put, kvd_err *err)
{
    return s->cache->ferry ? kv_ferry_commit(s, put, err)
                           : kv_disk_put_commit(s->cache->disk, put, err);
}

static void drop(kv_store *s, kv_disk_put put)
{
    if (s->cache->ferry)
        kv_ferry_drop(s, put);
    else
        kv_disk_put_abort(s->cache->disk, put);
}

void kv_cache_put_end(kv_store *s, bool ok)
{
    kv_cache *c   = s->cache;
    kvd_err   err = { 0 };

    for (uint32_t i = 0; c && i < c->n_unit; i++) {
        if (c->unit[i].put == KV_DISK_NONE)
            continue;
        if (!ok)
            drop(s, c->unit[i].put);
        else if (commit(s, c->unit[i].put, &err) != KVD_OK)
            kv_cache_tell(c, &err);
    }
    if (c)
        c->n_unit = 0;
    if (c && s->tier && kv_ferry_drain(s, true, &err) != KVD_OK) /* to be found there at once */
        kv_cache_tell(c, &err);
}

/* ---- tails -------------------------------------------------------------------------- */

/* K row, then V row, of token t of a block's lane. */
static uint8_t *raw_row(const kv_store *s, uint8_t *lane, uint32_t t, bool v)
{
    const uint32_t ct  = s->params.chunk_tokens;
    const uint64_t row = tail_token_bytes(s) / 2;

    return lane + t / ct * s->layout.record_bytes + (t % ct + (v ? ct : 0)) * row;
}

void kv_cache_copy_rows(const kv_store *s, uint8_t *raw, uint32_t first, uint32_t n,
                        uint8_t *packed, bool out)
{
    const uint64_t row = tail_token_bytes(s) / 2;

    kvd_assert(first + n <= KV_BLOCK_TOKENS);
    for (uint32_t i = 2 * first; i < 2 * (first + n); i++, packed += row) {
        uint8_t *at = raw_row(s, raw, i / 2, i % 2);

        memcpy(out ? packed : at, out ? at : packed, (size_t)row);
    }
}

uint8_t *kv_cache_raw_lane(const kv_store *s, uint32_t seq, uint32_t b, uint32_t lane)
{
    const uint32_t layer = lane / s->params.n_kv_head, head = lane % s->params.n_kv_head;

    return (uint8_t *)s->pool.ptr + kv_record_in_block(s, s->seq[seq].block[b], layer, head, 0);
}

kvd_status kv_cache_put_tail_lane(kv_store *s, const kv_ferry_unit *u, uint32_t lane, uint8_t *raw,
                                  kvd_err *err)
{
    kv_cache *c = s->cache;

    if (!u->open)
        kv_cache_copy_rows(s, raw, u->at, u->n_tail, c->gather, true);
    return kv_disk_put_lane(c->disk, u->put, lane, u->open ? raw : c->gather, NULL, err);
}

static kvd_status put_tail(kv_store *s, kvd_stream *st, const kv_ferry_unit *u, kvd_err *err)
{
    kv_cache      *c   = s->cache;
    const uint32_t n_h = s->params.n_kv_head;

    for (uint32_t il = 0; c->ferry && il < s->params.n_layer && c->tail != KV_DISK_NONE; il++)
        KVD_TRY(kv_ferry_bring(s, st, u, il, NULL, err));
    for (uint32_t l = 0; !c->ferry && l < s->params.n_layer * n_h; l++)
        KVD_TRY(kv_cache_put_tail_lane(s, u, l, kv_cache_raw_lane(s, u->seq, u->first, l), err));
    return c->tail == KV_DISK_NONE ? KVD_OK : commit(s, c->tail, err);
}

/* Begins the unit, puts and commits it, if it is not known. */
static kvd_status store_unit(kv_store *s, kvd_stream *st, const kv_disk_name *name,
                             kv_ferry_unit *u, kvd_err *err)
{
    kv_cache  *c = s->cache;
    kvd_status rc;

    c->tail = KV_DISK_NONE;
    rc      = kv_disk_put_begin(c->disk, name, &c->tail, err);
    u->put  = c->tail;
    if (rc == KVD_OK && c->tail != KV_DISK_NONE)
        rc = put_tail(s, st, u, err);
    if (rc != KVD_OK && c->tail != KV_DISK_NONE)
        drop(s, c->tail);
    c->tail = KV_DISK_NONE;
    return rc;
}

/* The first n tokens of block b: those that end with a page as an open block, the others as a tail
 * behind it. */
static kvd_status store_block(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t b, uint32_t n,
                              kvd_err *err)
{
    kv_cache      *c      = s->cache;
    kv_cache_seq  *q      = &c->seq[seq];
    const uint32_t step   = kv_disk_open_tokens(c->disk);
    const uint32_t n_open = n == KV_BLOCK_TOKENS || step == 0 ? (step ? n : 0) : n - n % step;
    kv_ferry_unit  u      = { .seq = seq, .first = b, .n = 1, .n_tail = n_open, .open = true };
    cache_name     open, rest;

    name_unit(s, seq, KV_DISK_OPEN, b, n_open, q->made[b], &open);
    if (n_open > 0)
        KVD_TRY(store_unit(s, st, &open.name, &u, err));
    if (n == KV_BLOCK_TOKENS)
        return kv_cache_name_block(s, seq, b, err); /* the parent of what follows */
    if (n == n_open)
        return KVD_OK;
    u = (kv_ferry_unit){ .seq = seq, .first = b, .n = 1, .n_tail = n - n_open, .at = n_open };
    name_unit(s, seq, KV_DISK_TAIL, b, n - n_open, q->made[b], &rest);
    rest.name.token += n_open;
    rest.name.first_token += n_open;
    if (n_open > 0)
        KVD_TRY(kv_disk_key_of(c->disk, &open.name, &rest.name.parent, err));
    return store_unit(s, st, &rest.name, &u, err);
}

void kv_seq_store_tail(kv_store *s, kvd_stream *st, uint32_t seq)
{
    kv_cache      *c     = s->cache;
    const kv_seq  *q     = &s->seq[seq];
    const uint32_t first = q->n_sealed, n = q->len - q->n_sealed;
    const uint64_t t0  = kvd_trace_now(s->params.trace);
    kvd_err        err = { 0 };
    kvd_status     rc  = KVD_OK;

    if (!c || n == 0 || n >= 2 * KV_BLOCK_TOKENS)
        return;
    for (uint32_t at = 0; at < n && rc == KVD_OK; at += KV_BLOCK_TOKENS)
        rc = store_block(s, st, seq, (first + at) / KV_BLOCK_TOKENS,
                         (uint32_t)kvd_min_u64(n - at, KV_BLOCK_TOKENS), &err);
    kvd_trace_add(s->params.trace, KVD_TRACE_TAIL, t0, kvd_trace_now(s->params.trace),
                  KVD_TRACE_NOWHERE, n);
    if (rc != KVD_OK)
        kv_cache_tell(c, &err);
}

/* What is accepted, the best first; kv_cache_accepted[] says what it is made of. */
const uint8_t kv_cache_accepted[KV_CACHE_ACCEPTED] = { 0, MADE_DENSE, MADE_SPARSE };

static kvd_status find(const kv_cache *c, const kv_prefix *p, bool unsynced, kv_disk_match *out,
                       kvd_err *err)
{
    kv_cache_prov       prov[KV_CACHE_ACCEPTED];
    kv_disk_bytes       accept[KV_CACHE_ACCEPTED];
    const kv_disk_query query = { .token        = p->token,
                                  .n_token      = p->n_token,
                                  .salt         = { p->salt, p->n_salt },
                                  .provenance   = accept,
                                  .n_provenance = KV_CACHE_ACCEPTED,
                                  .unsynced     = unsynced };

    for (uint32_t i = 0; i < KV_CACHE_ACCEPTED; i++) {
        prov[i]   = kv_cache_prov_of(c, kv_cache_accepted[i], p->variant);
        accept[i] = (kv_disk_bytes){ prov[i].byte, prov[i].bytes };
    }
    return kv_disk_find(c->disk, &query, out, err);
}

kvd_status kv_cache_find(kv_store *s, uint32_t seq, uint32_t n_token, bool unsynced,
                         kv_disk_match *out, kvd_err *err)
{
    const kv_cache_seq *q = &s->cache->seq[seq];
    const kv_prefix     p = { q->token, n_token, q->salt, q->n_salt, q->variant };

    return find(s->cache, &p, unsynced, out, err);
}

struct kv_hold {
    kv_cache     *cache;
    kv_disk_match match;
    uint64_t      bytes;
    bool          salted;
};

/* Holds must leave room for what is stored meanwhile: at most half of what there may be. */
static bool may_hold(const kv_store *s, const kv_hold *h)
{
    const kv_cache *c     = s->cache;
    const uint64_t  limit = s->params.cache_bytes;

    return c->n_held_unit + h->match.n_span <= HELD_UNITS &&
           (limit == 0 || (c->held[0] + c->held[1] + h->bytes <= limit / 2 &&
                           (!h->salted || c->held[1] + h->bytes <= limit / 8)));
}

static void count_hold(const kv_hold *h, int sign)
{
    h->cache->n_held_unit += (uint32_t)sign * h->match.n_span;
    h->cache->held[h->salted] += (uint64_t)(int64_t)sign * h->bytes;
}

kvd_status kv_hold_open(kv_hold **out, kv_store *s, const kv_prefix *p, kvd_err *err)
{
    kv_hold h = { .cache = s->cache, .salted = p->n_salt > 0 };

    *out = NULL;
    if (!s->cache || p->n_token == 0)
        return KVD_OK;
    KVD_TRY(find(s->cache, p, false, &h.match, err)); /* it counts as used now */
    h.bytes = (h.match.n_token + h.match.n_tail_token) / s->params.chunk_tokens *
              s->params.n_layer * s->params.n_kv_head * s->packed_bytes;
    /* where sequences store what they need themselves, they go before */
    if (h.match.n_span == 0 || s->tier || !may_hold(s, &h)) {
        kv_disk_match_close(s->cache->disk, &h.match);
        return KVD_OK;
    }
    *out = kvd_malloc(sizeof(**out));
    if (!*out) {
        kv_disk_match_close(s->cache->disk, &h.match);
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for a hold on a prompt");
    }
    **out = h;
    count_hold(*out, 1);
    return KVD_OK;
}

void kv_hold_close(kv_hold *h)
{
    if (!h)
        return;
    count_hold(h, -1);
    kv_disk_match_close(h->cache->disk, &h->match);
    kvd_free(h);
}

void kv_poll(kv_store *s)
{
    kvd_err err = { 0 };

    if (!s->cache)
        return;
    if (kv_ferry_drain(s, false, &err) != KVD_OK)
        kv_cache_tell(s->cache, &err);
    kv_disk_poll(s->cache->disk);
}

/* Only where it says something new: it is a write to the disk. */
static void keep_eval_ns(kv_cache *c)
{
    if (c->eval_ns > 0.8 * c->eval_ns_kept && c->eval_ns < 1.25 * c->eval_ns_kept)
        return;
    if (c->eval_ns > 0.0 && kv_disk_note_put(c->disk, EVAL_NOTE, c->eval_ns))
        c->eval_ns_kept = c->eval_ns;
}

kvd_status kv_flush(kv_store *s, kvd_err *err)
{
    kvd_err    why = { 0 }, disk_why = { 0 };
    kvd_status st, disk_st;

    if (!s->cache || !s->cache->disk)
        return KVD_OK;
    keep_eval_ns(s->cache);
    st      = kv_ferry_drain(s, true, &why);
    disk_st = kv_disk_flush(s->cache->disk, &disk_why);
    if (st == KVD_OK) {
        st  = disk_st;
        why = disk_why;
    }
    if (st != KVD_OK)
        kv_cache_tell(s->cache, &why);
    if (st != KVD_OK && err)
        *err = why;
    return st;
}
