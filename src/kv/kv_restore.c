/* SPDX-License-Identifier: Apache-2.0 */
/* kv_restore.c - the longest known prefix of a prompt comes back from the block store.
 *
 * Layer by layer: index and records of the blocks that are sealed at the prompt's final length, raw
 * rows of the rest.  What is restored is what the same tokens had when they were stored, so the
 * text goes on as if they had been evaluated here.  Any failure gives the sequence back empty: the
 * prompt is evaluated instead. Thread: the session's. */
#include <inttypes.h>
#include <string.h>

#include "kv/kv_cache.h"

const kv_disk_span *kv_restore_span(const kv_restore *r, uint32_t b, uint32_t *in_unit)
{
    const kv_disk_span *sp    = r->match.span;
    uint32_t            first = 0;

    while (b >= first + sp->n_block) {
        first += sp->n_block;
        sp++;
    }
    *in_unit = sp->first_block + b - first;
    return sp;
}

const kv_disk_span *kv_restore_tail(const kv_restore *r)
{
    return &r->match.span[r->match.n_span - 1];
}

/* How much of the match there is room for; what of it is sealed when the sequence has final_len
 * tokens. */
static void measure(kv_restore *r, uint32_t final_len)
{
    const kv_store *s = r->s;

    r->n_block = (uint32_t)(r->match.n_token / KV_BLOCK_TOKENS);
    r->n_tail  = r->match.n_tail_token;
    if (final_len == 0)
        final_len = r->n_block * KV_BLOCK_TOKENS + r->n_tail + 1;
    r->n_seal = kv_sealed_at(&s->params, final_len) / KV_BLOCK_TOKENS;
    if (r->n_seal > r->n_block)
        r->n_seal = r->n_block;
    if (s->record.type != KVD_RECORD_RAW && r->n_block > r->n_seal) {
        r->n_block =
            r->n_seal; /* what is not sealed must be raw, and packed records are not that */
        r->n_tail = 0;
    }
}

/* ---- blocks ------------------------------------------------------------------------- */

/* Index blocks and host records for what is sealed, raw blocks for the rest (all, if resident). */
static kvd_status take_blocks(kv_restore *r, kvd_err *err)
{
    kv_store      *s    = r->s;
    kv_seq        *q    = &s->seq[r->seq];
    const uint32_t need = r->n_block + (r->n_tail > 0) + (r->n_tail > KV_BLOCK_TOKENS);
    const uint32_t raw  = s->sizes.resident ? need : need - r->n_seal;

    if (need > s->blocks_max || need > s->sizes.n_block - s->n_held || raw > s->n_free)
        return kvd_fail(err, KVD_E_FULL, 0, "no room for %u blocks of a known prefix", need);
    for (uint32_t b = 0; b < r->n_seal; b++)
        kv_map_block(s, r->seq, b, !s->tier);
    kv_tier_bind_match(s, r->seq, &r->match, r->n_seal);
    for (; q->n_block < need; q->n_block++, s->n_held++)
        q->block[q->n_block] =
            !s->sizes.resident && q->n_block < r->n_seal ? KV_NO_BLOCK : s->free_stack[--s->n_free];
    q->n_sealed = r->n_seal * KV_BLOCK_TOKENS;
    return KVD_OK;
}

static uint64_t layer_at(const kv_restore *r, uint32_t b, uint32_t layer)
{
    const uint64_t block = r->s->seq[r->seq].block[b];

    return block == KV_NO_BLOCK ? kv_stage_block(r->s, b) : kv_layer_of(r->s, block, layer);
}

/* ---- reading ------------------------------------------------------------------------ */

static kvd_status read_records(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store     *s    = r->s;
    kv_disk_read *read = s->cache->read;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        uint32_t n = 0;

        for (uint32_t b = s->tier ? r->n_seal : 0; b < r->n_block; b++) {
            const uint64_t      at = layer_at(r, b, layer) + h * s->layout.head_stride;
            uint32_t            in_unit;
            const kv_disk_span *sp = kv_restore_span(r, b, &in_unit);

            read[n++] = (kv_disk_read){ .unit  = sp->unit,
                                        .what  = KV_DISK_RECORDS,
                                        .lane  = layer * s->params.n_kv_head + h,
                                        .first = in_unit * s->block_chunks,
                                        .n     = s->block_chunks,
                                        .dst   = (uint8_t *)s->pool.ptr +
                                               kv_packed_at(s, at, s->block_chunks) };
        }
        if (n > 0)
            KVD_TRY(kv_disk_read_now(s->cache->disk, read, n, err));
    }
    return KVD_OK;
}

static kvd_status read_index(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store     *s    = r->s;
    kv_disk_read *read = s->cache->read;
    uint32_t      n    = 0;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t lane = layer * s->params.n_kv_head + h;

        for (uint32_t b = 0; b < r->n_seal; b++) {
            uint32_t            in_unit;
            const kv_disk_span *sp = kv_restore_span(r, b, &in_unit);

            read[n++] =
                (kv_disk_read){ .unit  = sp->unit,
                                .what  = KV_DISK_AUX,
                                .lane  = lane,
                                .first = in_unit,
                                .n     = 1,
                                .dst   = (uint8_t *)s->landmarks.ptr + s->seq[r->seq].iblock[b] +
                                       lane * s->index.head_stride };
        }
    }
    return n == 0 ? KVD_OK : kv_disk_read_now(s->cache->disk, read, n, err);
}

static kvd_status read_tail(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t h = 0; h < s->params.n_kv_head && r->n_tail > 0; h++) {
        const uint32_t     lane = layer * s->params.n_kv_head + h;
        const kv_disk_read read = { .unit = kv_restore_tail(r)->unit,
                                    .what = KV_DISK_RECORDS,
                                    .lane = lane,
                                    .n    = r->n_tail,
                                    .dst  = s->cache->gather };

        KVD_TRY(kv_disk_read_now(s->cache->disk, &read, 1, err));
        kv_cache_copy_tail(s, r->seq, lane, r->n_block * KV_BLOCK_TOKENS, r->n_tail,
                           s->cache->gather, false);
    }
    return KVD_OK;
}

/* The sinks' records, where all others stay on disk for now. */
static kvd_status read_sinks(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store           *s = r->s;
    uint32_t            in_unit;
    const kv_disk_span *sp = kv_restore_span(r, 0, &in_unit);

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint64_t at = kv_stage_block(s, 0) + h * s->layout.head_stride;

        s->cache->read[h] =
            (kv_disk_read){ .unit  = sp->unit,
                            .what  = KV_DISK_RECORDS,
                            .lane  = layer * s->params.n_kv_head + h,
                            .first = in_unit * s->block_chunks,
                            .n     = s->sinks,
                            .dst   = (uint8_t *)s->pool.ptr + kv_packed_at(s, at, s->sinks) };
    }
    return kv_disk_read_now(s->cache->disk, s->cache->read, s->params.n_kv_head, err);
}

static kvd_status unpack_lanes(kv_restore *r, uint32_t layer, uint32_t b, uint32_t n, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++)
        KVD_TRY(kv_unpack_run(s, r->st, r->seq, layer * s->params.n_kv_head + h,
                              b * s->block_chunks, n,
                              layer_at(r, b, layer) + h * s->layout.head_stride, err));
    return KVD_OK;
}

/* Records that were read go on to where they belong: in place, or from the stage to the host. */
static kvd_status settle(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t b = 0; b < r->n_seal && !s->tier; b++) {
        if (!s->sizes.resident)
            KVD_TRY(kv_keep_packed(s, r->st, r->seq, layer, b, kv_stage_block(s, b), err));
        if (s->sizes.resident || b == 0)
            KVD_TRY(unpack_lanes(r, layer, b, s->block_chunks, err));
    }
    if (r->n_seal == 0 || s->sizes.resident || s->sinks == 0)
        return KVD_OK;
    if (s->tier) {
        KVD_TRY(read_sinks(r, layer, err));
        KVD_TRY(unpack_lanes(r, layer, 0, s->sinks, err));
    }
    return kv_keep_sinks(s, r->st, r->seq, layer, kv_stage_block(s, 0), err);
}

static kvd_status read_layers(kv_restore *r, kvd_err *err)
{
    for (uint32_t il = 0; il < r->s->params.n_layer; il++) {
        if (r->s->cache->ferry) {
            KVD_TRY(kv_restore_up(r, il, err));
            continue;
        }
        KVD_TRY(read_index(r, il, err)); /* first: with it come the records' parameters */
        KVD_TRY(read_records(r, il, err));
        KVD_TRY(read_tail(r, il, err));
        KVD_TRY(settle(r, il, err));
    }
    return KVD_OK;
}

/* Keys and makings of the blocks, so that what follows continues the chain. */
static kvd_status name_blocks(kv_restore *r, kvd_err *err)
{
    kv_cache_seq *q = &r->s->cache->seq[r->seq];

    for (uint32_t b = 0; b < r->n_block; b++) {
        uint32_t in_unit;

        q->made[b] = kv_cache_accepted[kv_restore_span(r, b, &in_unit)->provenance];
        KVD_TRY(kv_cache_name_block(r->s, r->seq, b, err));
    }
    for (uint32_t t = 0; t < r->n_tail; t += KV_BLOCK_TOKENS)
        q->made[r->n_block + t / KV_BLOCK_TOKENS] =
            kv_cache_accepted[kv_restore_tail(r)->provenance];
    return KVD_OK;
}

uint32_t kv_seq_restore(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n_token,
                        uint32_t final_len)
{
    kv_restore r   = { .s = s, .st = st, .seq = seq };
    kv_seq    *q   = &s->seq[seq];
    kvd_err    err = { 0 };
    kvd_status rc;

    kvd_assert(q->len == 0 && q->n_block == 0);
    if (!s->cache || n_token == 0)
        return 0;
    rc = kv_cache_find(s, seq, n_token, &r.match, &err);
    if (rc == KVD_OK) {
        measure(&r, final_len);
        rc = r.n_block + r.n_tail == 0 ? KVD_OK : take_blocks(&r, &err);
    }
    if (rc == KVD_OK && q->n_block > 0)
        rc = kv_ferry_drain(s, true, &err);
    if (rc == KVD_OK && q->n_block > 0)
        rc = read_layers(&r, &err);
    if (rc == KVD_OK && q->n_block > 0)
        rc = name_blocks(&r, &err);
    if (rc == KVD_OK) {
        q->len = r.n_block * KV_BLOCK_TOKENS + r.n_tail;
        s->n_used += q->len;
        s->counts.n_restored += q->len;
    } else {
        kvd_log(KVD_LOG_WARN, "prefix cache: %s; the prompt is evaluated instead", err.msg);
        kv_seq_truncate(s, st, seq, 0);
    }
    kv_disk_match_close(s->cache->disk, &r.match);
    return q->len;
}
