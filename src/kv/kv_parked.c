/* SPDX-License-Identifier: Apache-2.0 */
/* kv_parked.c - sequences that take no tokens for now.
 *
 * A sequence that can be evaluated has lists, maps and windows for n_ctx tokens.  A parked one has
 * a chain of descriptors, one per block, so that the memory of all of them depends on the capacity
 * alone.  Parking moves the entries of a sequence's lists to descriptors, unparking moves them
 * back: K and V stay where they are.  Windows are not kept, since a prompt fills them anew.
 *
 * Owns: the descriptors with the tokens of parked sequences.
 *
 * Invariants
 *  (1) a descriptor is on the free chain or in exactly one parked sequence's chain;
 *  (2) what a descriptor names (raw block, index block, host records) is in no sequence's list and
 *      on no free stack; it counts in kv_store.n_held, its tokens in n_used;
 *  (3) a parked sequence has a descriptor for each block of its length, and no other;
 *  (4) the first n_sealed tokens are sealed; the rest is raw, and is given up when a sequence that
 *      is evaluated needs raw blocks and there are none.  So n_seq sequences have all raw blocks
 *      that they can need, whatever is parked.
 *
 * There are as many descriptors as blocks, so by (2) there is always one left.
 * Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

#define NONE UINT32_MAX

typedef struct parked_block {
    uint64_t    block, iblock; /* as in kv_seq's lists */
    kv_disk_key key;           /* of sealed blocks, with a block store */
    int32_t     token[KV_BLOCK_TOKENS];
    uint32_t    next; /* number of the descriptor behind it, or NONE */
    uint8_t     made; /* as kv_cache_seq.made */
} parked_block;

typedef struct parked_seq {
    uint64_t turn; /* of parking: the lowest was parked first */
    uint32_t len, n_block, n_sealed;
    uint32_t first; /* descriptor of its first block; read only where n_block > 0 */
    uint8_t  variant;
    uint8_t  salt[KVD_SALT_BYTES_MAX]; /* with a block store */
    uint32_t n_salt;
} parked_seq;

struct kv_parked {
    parked_seq   *seq;   /* [sizes.n_parked] */
    parked_block *block; /* [sizes.n_block] */
    uint32_t     *host;  /* [sizes.n_block][n_layer * n_kv_head][block_chunks] host records of a
                            descriptor's block; NULL: all is resident */
    uint32_t free;       /* first descriptor of the free chain, or NONE */
    uint64_t turn;
};

/* ---- open and close ----------------------------------------------------------------- */

static uint64_t host_entries(const kv_params *p)
{
    return (uint64_t)p->n_layer * p->n_kv_head * (KV_BLOCK_TOKENS / p->chunk_tokens);
}

uint64_t kv_parked_bytes(const kv_params *p, const kv_sizes *z)
{
    if (z->n_parked == 0)
        return 0;
    return sizeof(kv_parked) + z->n_parked * sizeof(parked_seq) +
           z->n_block * (sizeof(parked_block) + (z->resident ? 0 : 4 * host_entries(p)));
}

kvd_status kv_parked_open(kv_store *s, kvd_err *err)
{
    const kv_sizes *z = &s->sizes;
    kv_parked      *p;

    if (z->n_parked == 0)
        return KVD_OK;
    kvd_assert(!z->spills && z->n_block < NONE);
    p = s->parked = kvd_calloc(1, sizeof(*p));
    if (p) {
        p->seq   = kvd_calloc(z->n_parked, sizeof(*p->seq));
        p->block = kvd_calloc(z->n_block, sizeof(*p->block));
        if (!z->resident)
            p->host = kvd_calloc(z->n_block * host_entries(&s->params), sizeof(*p->host));
    }
    if (!p || !p->seq || !p->block || (!z->resident && !p->host))
        return kvd_fail(err, KVD_E_NOMEM, 0, "KV cache: no memory for parked sequences");
    for (uint32_t i = 0; i < z->n_block; i++)
        p->block[i].next = i + 1 < z->n_block ? i + 1 : NONE;
    return KVD_OK;
}

void kv_parked_close(kv_store *s)
{
    if (!s->parked)
        return;
    kvd_free(s->parked->seq);
    kvd_free(s->parked->block);
    kvd_free(s->parked->host);
    kvd_free(s->parked);
}

/* ---- one block ---------------------------------------------------------------------- */

static uint32_t *host_at(const kv_store *s, uint32_t d)
{
    return s->parked->host + d * host_entries(&s->params);
}

/* Where a sequence's map has the host records of a lane's block. */
static uint32_t *host_of(const kv_store *s, uint32_t seq, uint32_t lane, uint32_t b)
{
    return s->host_of + (kv_lane(s, seq, 0) + lane) * s->n_chunk_max +
           (uint64_t)b * s->block_chunks;
}

static void copy_host(kv_store *s, uint32_t seq, uint32_t b, uint32_t d, bool out)
{
    const size_t n = s->block_chunks;

    for (uint32_t l = 0; l < s->params.n_layer * s->params.n_kv_head; l++) {
        uint32_t *map = host_of(s, seq, l, b), *own = host_at(s, d) + l * n;

        memcpy(out ? own : map, out ? map : own, n * sizeof(*map));
    }
}

static uint32_t take_descriptor(kv_parked *p)
{
    const uint32_t d = p->free;

    kvd_assert(d != NONE); /* (2) */
    p->free = p->block[d].next;
    return d;
}

/* Returns the descriptor behind it. */
static uint32_t give_descriptor(kv_parked *p, uint32_t d)
{
    const uint32_t next = p->block[d].next;

    p->block[d].next = p->free;
    p->free          = d;
    return next;
}

static bool is_sealed(const parked_seq *q, uint32_t b)
{
    return b < q->n_sealed / KV_BLOCK_TOKENS;
}

/* What a descriptor names is free again. */
static void free_block(kv_store *s, const parked_seq *q, uint32_t b, uint32_t d)
{
    const parked_block *k = &s->parked->block[d];

    if (is_sealed(q, b) && s->params.sparse)
        s->ifree_stack[s->n_ifree++] = k->iblock;
    for (uint64_t i = host_entries(&s->params); is_sealed(q, b) && s->parked->host && i-- > 0;)
        s->hfree_stack[s->n_hfree++] = host_at(s, d)[i];
    if (k->block != KV_NO_BLOCK)
        s->free_stack[s->n_free++] = k->block;
    s->n_held--;
}

/* ---- park and unpark ---------------------------------------------------------------- */

void kv_park(kv_store *s, uint32_t seq, uint32_t place, const int32_t *token, uint8_t variant)
{
    kv_parked    *p    = s->parked;
    kv_seq       *q    = &s->seq[seq];
    kv_cache_seq *c    = s->cache ? &s->cache->seq[seq] : NULL;
    uint32_t     *link = &p->seq[place].first;

    kvd_assert(place < s->sizes.n_parked && p->seq[place].len == 0 && !kv_restoring(s, seq));
    kvd_assert(q->len > 0 && q->n_block == kv_blocks_for(q->len) && q->n_sealed <= q->len);
    for (uint32_t b = 0; b < q->n_block; b++) {
        const uint32_t d    = take_descriptor(p);
        const uint32_t done = b * KV_BLOCK_TOKENS;
        parked_block  *k    = &p->block[d];

        k->block  = q->block[b];
        k->iblock = s->params.sparse && done < q->n_sealed ? q->iblock[b] : 0;
        k->made   = c ? c->made[b] : 0;
        if (c && done < q->n_sealed)
            k->key = c->key[b];
        if (p->host && done < q->n_sealed)
            copy_host(s, seq, b, d, true);
        memcpy(k->token, token + done,
               kvd_min_u64(KV_BLOCK_TOKENS, q->len - done) * sizeof(*token));
        *link   = d;
        link    = &k->next;
        k->next = NONE;
    }
    p->seq[place] = (parked_seq){ .turn     = p->turn++,
                                  .len      = q->len,
                                  .n_block  = q->n_block,
                                  .n_sealed = q->n_sealed,
                                  .first    = p->seq[place].first,
                                  .variant  = variant,
                                  .n_salt   = c ? c->n_salt : 0 };
    if (c)
        memcpy(p->seq[place].salt, c->salt, c->n_salt);
    kv_cache_cut(s, seq, 0);
    q->len = q->n_block = q->n_sealed = q->step = 0;
}

/* The sinks' records to their slots on the device. */
static kvd_status bring_sinks(kv_store *s, kvd_stream *st, uint32_t seq, kvd_err *err)
{
    const kv_copies *list = &s->step.list[KV_COPIES];

    for (uint32_t il = 0; s->sinks > 0 && il < s->params.n_layer; il++) {
        uint64_t n = 0;

        KVD_TRY(kv_wait_lists(s, st, err));
        for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
            const uint32_t  lane = il * s->params.n_kv_head + h;
            const uint32_t *host = host_of(s, seq, lane, 0);

            for (uint32_t i = 0; i < s->sinks; i++)
                n = kv_list_up(s, list, seq, lane, i, host[i] * s->packed_bytes,
                               kv_record_in_window(s, kv_lane(s, seq, 0) + lane, i), n);
        }
        KVD_TRY(kv_copy_up(s, st, list, n, err));
    }
    return KVD_OK;
}

/* Descriptors' entries go back to the sequence's lists. */
static void take_lists(kv_store *s, parked_seq *from, uint32_t seq, int32_t *token)
{
    kv_parked    *p = s->parked;
    kv_seq       *q = &s->seq[seq];
    kv_cache_seq *c = s->cache ? &s->cache->seq[seq] : NULL;
    uint32_t      d = from->first;

    for (uint32_t b = 0; b < from->n_block; b++) {
        const parked_block *k    = &p->block[d];
        const uint32_t      done = b * KV_BLOCK_TOKENS;

        q->block[b] = k->block;
        if (s->params.sparse)
            q->iblock[b] = k->iblock;
        if (c) {
            c->made[b] = k->made;
            c->key[b]  = k->key;
        }
        if (is_sealed(from, b))
            kv_forget_window(s, seq, b);
        if (p->host && is_sealed(from, b))
            copy_host(s, seq, b, d, false);
        memcpy(token + done, k->token,
               kvd_min_u64(KV_BLOCK_TOKENS, from->len - done) * sizeof(*token));
        d = give_descriptor(p, d);
    }
    kv_seq_salt(s, seq, from->salt, from->n_salt);
    q->len      = from->len;
    q->n_block  = from->n_block;
    q->n_sealed = from->n_sealed;
    q->step     = 0;
    *from       = (parked_seq){ 0 };
}

kvd_status kv_unpark(kv_store *s, kvd_stream *st, uint32_t place, uint32_t seq, int32_t *token,
                     kvd_err *err)
{
    kv_seq    *q  = &s->seq[seq];
    kvd_status rc = KVD_OK;

    kvd_assert(place < s->sizes.n_parked && s->parked->seq[place].len > 0);
    kvd_assert(q->len == 0 && q->n_block == 0 && !kv_restoring(s, seq));
    take_lists(s, &s->parked->seq[place], seq, token);
    if (q->n_sealed > 0 && !s->sizes.resident)
        rc = bring_sinks(s, st, seq, err);
    if (rc == KVD_OK) /* where its raw tokens were given up */
        rc = kv_unseal(s, st, seq, kv_sealed_at(&s->params, q->len), err);
    if (rc != KVD_OK)
        kv_seq_truncate(s, st, seq, 0);
    return rc;
}

/* ---- giving up ------------------------------------------------------------------------ */

static void cut(kv_store *s, parked_seq *q, uint32_t n_keep)
{
    const uint32_t keep = kv_blocks_for(n_keep);
    uint32_t       d = q->first, *end = &q->first;

    kvd_assert(n_keep % KV_BLOCK_TOKENS == 0);
    for (uint32_t b = 0; b < keep; b++) {
        end = &s->parked->block[d].next;
        d   = *end;
    }
    for (uint32_t b = keep; b < q->n_block; b++) {
        free_block(s, q, b, d);
        d = give_descriptor(s->parked, d);
    }
    *end = NONE;
    s->n_used -= q->len - n_keep;
    q->len      = n_keep;
    q->n_block  = keep;
    q->n_sealed = (uint32_t)kvd_min_u64(q->n_sealed, n_keep);
}

void kv_parked_drop(kv_store *s, uint32_t place)
{
    kvd_assert(place < s->sizes.n_parked);
    cut(s, &s->parked->seq[place], 0);
}

void kv_parked_drop_all(kv_store *s)
{
    for (uint32_t i = 0; i < s->sizes.n_parked; i++)
        kv_parked_drop(s, i);
}

void kv_parked_yield(kv_store *s, uint64_t n_raw)
{
    while (!s->sizes.resident && s->n_free < n_raw) {
        parked_seq *old = NULL;

        for (uint32_t i = 0; i < s->sizes.n_parked; i++) {
            parked_seq *q = &s->parked->seq[i];

            if (q->len > q->n_sealed && (!old || q->turn < old->turn))
                old = q;
        }
        if (!old)
            return;
        cut(s, old, old->n_sealed);
    }
}

/* ---- looking in --------------------------------------------------------------------- */

uint32_t kv_parked_places(const kv_store *s)
{
    return s->sizes.n_parked;
}

uint32_t kv_parked_len(const kv_store *s, uint32_t place)
{
    return place < s->sizes.n_parked ? s->parked->seq[place].len : 0;
}

uint8_t kv_parked_variant(const kv_store *s, uint32_t place)
{
    return place < s->sizes.n_parked ? s->parked->seq[place].variant : 0;
}

uint32_t kv_parked_common(const kv_store *s, uint32_t place, const int32_t *token, uint32_t n_token)
{
    const parked_seq *q    = &s->parked->seq[place];
    const uint32_t    most = q->len < n_token ? q->len : n_token;
    uint32_t          n    = 0;

    for (uint32_t d = q->first; n < most; d = s->parked->block[d].next) {
        const int32_t *own  = s->parked->block[d].token;
        const uint32_t here = (uint32_t)kvd_min_u64(most - n, KV_BLOCK_TOKENS);
        const uint32_t same = kvd_common_tokens(own, token + n, here);

        n += same;
        if (same < here)
            break;
    }
    return n;
}

void kv_parked_where(const kv_store *s, uint32_t place, kv_where *out)
{
    const parked_seq *q   = &s->parked->seq[place];
    const uint32_t    low = s->sizes.resident ? 0 : q->n_sealed;

    kvd_assert(place < s->sizes.n_parked);
    *out = (kv_where){ .device = q->len - low, .host = low };
}

/* ---- recounting --------------------------------------------------------------------- */

void kv_parked_count(const kv_store *s, uint64_t raw, uint64_t index, uint32_t *n_raw,
                     uint32_t *n_index)
{
    for (uint32_t i = 0; i < s->sizes.n_parked; i++) {
        const parked_seq *q = &s->parked->seq[i];
        uint32_t          d = q->first;

        for (uint32_t b = 0; b < q->n_block; b++, d = s->parked->block[d].next) {
            *n_raw += s->parked->block[d].block == raw;
            *n_index += is_sealed(q, b) && s->parked->block[d].iblock == index;
        }
    }
}

/* Host records that a parked sequence's blocks have. */
static uint64_t host_records(const kv_store *s, const parked_seq *q)
{
    return s->parked->host ? q->n_sealed / KV_BLOCK_TOKENS * host_entries(&s->params) : 0;
}

void kv_parked_check(const kv_store *s, uint64_t *used, uint64_t *held, uint64_t *records)
{
    const kv_parked *p   = s->parked;
    uint64_t         all = 0;

    for (uint32_t i = 0; i < s->sizes.n_parked; i++) {
        const parked_seq *q = &p->seq[i];
        uint32_t          d = q->first;

        kvd_assert(q->n_block == kv_blocks_for(q->len)); /* (3) */
        kvd_assert(q->n_sealed % KV_BLOCK_TOKENS == 0 && q->n_sealed <= q->len);
        for (uint32_t b = 0; b < q->n_block; b++, d = p->block[d].next)
            kvd_assert((p->block[d].block == KV_NO_BLOCK) ==
                       (!s->sizes.resident && is_sealed(q, b))); /* (4) */
        kvd_assert(q->n_block == 0 || d == NONE);
        all += q->n_block;
        *used += q->len;
        *held += q->n_block;
        *records += host_records(s, q);
    }
    for (uint32_t d = p ? p->free : NONE; d != NONE; d = p->block[d].next)
        all++;
    kvd_assert(!p || all == s->sizes.n_block); /* (1) */
}
