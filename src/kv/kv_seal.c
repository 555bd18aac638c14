/* SPDX-License-Identifier: Apache-2.0 */
/* kv_seal.c - raw blocks become indexed records, and back; one layer brought up for dense
 * attention.
 *
 * Blocks are sealed whole: kv_map_block() takes an index block and host records for all lanes, then
 * each layer is indexed and copied, then the raw block goes.  Nothing is lost by a failure: until
 * the last layer is done a block stays raw.
 * Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

kvd_status kv_copy_listed(kv_store *s, kvd_stream *st, const kv_copies *list, const void *src,
                          void *dst, uint64_t bytes, uint64_t n, kvd_err *err)
{
    const kvd_record_copy_args a = {
        .n = n, .bytes = bytes, .src_off = list->src, .dst_off = list->dst, .src = src, .dst = dst
    };

    return s->be->ops->record_copy(st, &a, err);
}

static kvd_status copy_records(kv_store *s, kvd_stream *st, const void *src, void *dst,
                               uint64_t bytes, uint64_t n, kvd_err *err)
{
    return kv_copy_listed(s, st, &s->step.list[KV_COPIES], src, dst, bytes, n, err);
}

static const uint32_t *host_of_block(const kv_store *s, uint32_t seq, uint32_t lane, uint32_t b)
{
    return s->host_of + (kv_lane(s, seq, 0) + lane) * s->n_chunk_max +
           (uint64_t)b * s->block_chunks;
}

uint64_t kv_list_down(const kv_store *s, const kv_copies *list, uint32_t seq, uint32_t layer,
                      uint32_t b, uint64_t at, uint64_t lane_bytes, uint64_t record_bytes,
                      uint64_t n)
{
    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t *host = host_of_block(s, seq, layer * s->params.n_kv_head + h, b);

        for (uint32_t i = 0; i < s->block_chunks; i++) {
            if (host[i] == KV_NO_HOST)
                continue;
            list->src[n]   = at + h * lane_bytes + i * record_bytes;
            list->dst[n++] = host[i] * s->packed_bytes;
        }
    }
    return n;
}

static kvd_status move_down(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                            uint32_t first, uint32_t end, const uint64_t *layer_at, kvd_err *err)
{
    const uint64_t lane = s->block_chunks * s->packed_bytes;
    uint64_t       n    = 0;

    KVD_TRY(kv_wait_lists(s, st, err));
    if (s->record.type == KVD_RECORD_RAW) {
        for (uint32_t b = first; b < end; b++)
            n = kv_list_down(s, &s->step.list[KV_COPIES], seq, layer, b, layer_at[b],
                             s->layout.head_stride, s->layout.record_bytes, n);
        return copy_records(s, st, s->pool.ptr, s->host.ptr, s->packed_bytes, n, err);
    }
    for (uint32_t b = first; b < end; b += KV_PACK_BLOCKS) {
        const uint32_t  m    = end - b < KV_PACK_BLOCKS ? end - b : KV_PACK_BLOCKS;
        const kv_copies list = { .src = s->step.list[KV_COPIES].src + n,
                                 .dst = s->step.list[KV_COPIES].dst + n };
        uint64_t        k    = 0;

        KVD_TRY(kv_pack_layer(s, st, seq, layer, b, m, layer_at + b, b - first, err));
        for (uint32_t i = 0; i < m; i++)
            k = kv_list_down(s, &list, seq, layer, b + i, i * s->params.n_kv_head * lane, lane,
                             s->packed_bytes, k);
        KVD_TRY(kv_copy_listed(s, st, &list, s->packed, s->host.ptr, s->packed_bytes, k, err));
        n += k;
    }
    return KVD_OK;
}

kvd_status kv_move_down(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                        uint32_t end, const uint64_t *layer_at, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    KVD_TRY(move_down(s, st, seq, layer, first, end, layer_at, err));
    kv_count_move(s, &s->counts.down_ns, t0);
    return KVD_OK;
}

kvd_status kv_keep_packed(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                          uint64_t at, kvd_err *err)
{
    uint64_t n = 0;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t *host = host_of_block(s, seq, layer * s->params.n_kv_head + h, b);
        const uint64_t  from = kv_packed_at(s, at + h * s->layout.head_stride, s->block_chunks);

        for (uint32_t i = 0; i < s->block_chunks; i++, n++) {
            s->step.list[KV_COPIES].src[n] = from + i * s->packed_bytes;
            s->step.list[KV_COPIES].dst[n] = host[i] * s->packed_bytes;
        }
    }
    return copy_records(s, st, s->pool.ptr, s->host.ptr, s->packed_bytes, n, err);
}

/* Host records of a layer's lanes of blocks [first, end) to layer_at[b]; the others from disk. */
static kvd_status bring_up(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                           uint32_t first, uint32_t end, const uint64_t *layer_at, kvd_err *err)
{
    uint64_t n = 0, t0;

    KVD_TRY(kv_wait_lists(s, st, err));
    for (uint32_t at = 0; at < s->params.n_kv_head * (end - first); at++) {
        const uint32_t  b = first + at % (end - first), h = at / (end - first);
        const uint32_t  lane = layer * s->params.n_kv_head + h;
        const uint32_t *host = host_of_block(s, seq, lane, b);
        const uint64_t  to   = layer_at[b] + h * s->layout.head_stride;

        for (uint32_t i = 0; i < s->block_chunks; i++) {
            if (host[i] != KV_NO_HOST)
                n = kv_list_up(s, &s->step.list[KV_COPIES], seq, lane, b * s->block_chunks + i,
                               host[i] * s->packed_bytes, to + i * s->layout.record_bytes, n);
        }
    }
    s->counts.bytes_dense += n * s->packed_bytes;
    t0 = kvd_now_ns();
    KVD_TRY(kv_copy_up(s, st, &s->step.list[KV_COPIES], n, err));
    kv_count_move(s, &s->counts.up_dense_ns, t0);
    return kv_tier_load(s, st, seq, layer, first, end, layer_at, err);
}

kvd_status kv_keep_sinks(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint64_t at,
                         kvd_err *err)
{
    const kv_copies *list = &s->step.list[KV_COPIES];
    uint64_t         n    = 0;

    KVD_TRY(kv_wait_lists(s, st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        for (uint32_t i = 0; i < s->sinks; i++, n++) {
            list->src[n] = at + h * s->layout.head_stride + i * s->layout.record_bytes;
            list->dst[n] = kv_record_in_window(s, kv_lane(s, seq, layer) + h, i);
        }
    }
    return copy_records(s, st, s->pool.ptr, s->pool.ptr, s->layout.record_bytes, n, err);
}

kvd_status kv_index_layer(kv_store *s, kvd_stream *st, uint32_t layer, const kvd_kv_layout *kv,
                          const uint64_t *block, const uint64_t *iblock, uint32_t n, kvd_err *err)
{
    kvd_index_build_args a = {
        .n_block = n, .kv = *kv, .index = s->index, .block = block, .iblock = iblock
    };

    a.index.lane_off = (uint64_t)layer * s->params.n_kv_head * s->index.head_stride;
    return s->be->ops->index_build(st, &a, err);
}

/* Otherwise all is forgotten on the device before a window is filled: kv_clear_windows(). */
static bool host_has_maps(const kv_store *s)
{
    return s->params.sparse && !s->mirror[KV_ARGS].ptr;
}

/* ---- maps --------------------------------------------------------------------------- */

void kv_forget_window(kv_store *s, uint32_t seq, uint32_t b)
{
    const uint64_t at = (uint64_t)b * s->block_chunks;

    for (uint32_t i = 0; host_has_maps(s) && i < s->params.n_layer * s->params.n_kv_head; i++) {
        const uint64_t first = (kv_lane(s, seq, 0) + i) * s->n_chunk_max + at;

        for (uint32_t c = 0; c < s->block_chunks; c++) {
            if (!s->exec.cpu)
                s->ema[first + c] = 0;
            s->slot_of[first + c] = KVD_SLOT_NONE;
        }
    }
}

void kv_map_block(kv_store *s, uint32_t seq, uint32_t b, bool host)
{
    const uint64_t at = (uint64_t)b * s->block_chunks;

    if (s->params.sparse)
        s->seq[seq].iblock[b] = s->ifree_stack[--s->n_ifree];
    kv_forget_window(s, seq, b);
    for (uint32_t i = 0; i < s->params.n_layer * s->params.n_kv_head; i++) {
        const uint64_t first = (kv_lane(s, seq, 0) + i) * s->n_chunk_max + at;

        for (uint32_t c = 0; !s->sizes.resident && c < s->block_chunks; c++)
            s->host_of[first + c] =
                host ? kv_tier_take(s, kv_lane(s, seq, 0) + i, (uint32_t)at + c) : KV_NO_HOST;
    }
}

void kv_unmap_block(kv_store *s, uint32_t seq, uint32_t b)
{
    const uint64_t at = (uint64_t)b * s->block_chunks;

    if (s->params.sparse)
        s->ifree_stack[s->n_ifree++] = s->seq[seq].iblock[b];
    if (s->sizes.resident)
        return;
    for (uint32_t i = s->params.n_layer * s->params.n_kv_head; i-- > 0;) {
        const uint64_t first = (kv_lane(s, seq, 0) + i) * s->n_chunk_max + at;

        kv_tier_forget(s, kv_lane(s, seq, 0) + i, (uint32_t)at);
        for (uint32_t c = s->block_chunks; c-- > 0;) {
            if (s->host_of[first + c] != KV_NO_HOST)
                s->hfree_stack[s->n_hfree++] = s->host_of[first + c];
        }
    }
    kv_tier_unbind(s, seq, b);
}

/* ---- sealing ------------------------------------------------------------------------ */

kvd_status kv_seal_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                         uint32_t end, const kvd_kv_layout *l, const uint64_t *block,
                         const uint64_t *layer_at, kvd_err *err)
{
    const kv_seq *q = &s->seq[seq];

    if (s->params.sparse && end > first)
        KVD_TRY(
            kv_index_layer(s, st, layer, l, block + first, q->iblock + first, end - first, err));
    if (end > first)
        KVD_TRY(kv_zone_build(s, st, layer, l, block + first, q->iblock + first, end - first, err));
    if (s->prompt.n_new > 0)
        KVD_TRY(kv_prompt_place(s, st, layer, err));
    if (s->tier && s->prompt.n_new == 0) {
        KVD_TRY(kv_tier_see(s, st, seq, layer, err));
        KVD_TRY(kv_wait_lists(s, st, err));
    }
    for (uint32_t h = 0; s->tier && s->prompt.n_new == 0 && h < s->params.n_kv_head; h++)
        kv_tier_place(s, kv_lane(s, seq, layer) + h, first * s->block_chunks, end * s->block_chunks,
                      true);
    kv_cache_put_layer(s, st, seq, layer, layer_at);
    if (!s->sizes.resident && !(s->prompt.n_new > 0 && s->prompt.left == end))
        KVD_TRY(kv_move_down(s, st, seq, layer, first, end, layer_at, err));
    for (uint32_t b = first; b < end && (s->sizes.resident || b == 0); b++)
        KVD_TRY(kv_settle_raw(s, st, seq, layer, b, layer_at[b], err));
    if (first > 0 || end == 0 || s->sizes.resident)
        return KVD_OK;
    return kv_keep_sinks(s, st, seq, layer, layer_at[0], err);
}

/* Raw blocks of one layer. */
static kvd_status seal_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                             uint32_t first, uint32_t end, kvd_err *err)
{
    const kvd_kv_layout l     = kv_layout(s, layer);
    const uint64_t     *block = s->seq[seq].block;

    for (uint32_t b = first; b < end; b++)
        s->stage_block[b] = kv_layer_of(s, block[b], layer);
    return kv_seal_layer(s, st, seq, layer, first, end, &l, block, s->stage_block, err);
}

static kvd_status seal_blocks(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n, kvd_err *err)
{
    kv_seq        *q     = &s->seq[seq];
    const uint32_t first = q->n_sealed / KV_BLOCK_TOKENS;
    kvd_status     rc    = KVD_OK;

    for (uint32_t b = first; b < first + n; b++)
        kv_map_block(s, seq, b, !s->tier); /* else host records are found layer by layer */
    kv_cache_put_begin(s, seq, first, first + n);
    for (uint32_t il = 0; il < s->params.n_layer && rc == KVD_OK; il++)
        rc = seal_layer(s, st, seq, il, first, first + n, err);
    kv_cache_put_end(s, rc == KVD_OK);
    if (rc == KVD_OK)
        rc = kv_tier_bind(s, seq, first + n, err);
    if (rc != KVD_OK) {
        for (uint32_t b = first + n; b-- > first;)
            kv_unmap_block(s, seq, b);
        return rc;
    }
    for (uint32_t b = first; b < first + n && !s->sizes.resident; b++) {
        s->free_stack[s->n_free++] = q->block[b];
        q->block[b]                = KV_NO_BLOCK;
        s->counts.bytes_down += kv_packed_block_bytes(s);
    }
    q->n_sealed += n * KV_BLOCK_TOKENS;
    s->counts.n_sealed += n;
    return KVD_OK;
}

kvd_status kv_seq_seal(kv_store *s, kvd_stream *st, uint32_t seq, bool grown, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    uint64_t       t1;
    kv_seq        *q;
    uint32_t       due;

    kvd_assert(seq < s->params.n_seq);
    q   = &s->seq[seq];
    due = kv_sealed_at(&s->params, q->len);
    if (q->n_sealed >= due || (s->sizes.resident && !s->params.sparse))
        return KVD_OK;
    due = (due - q->n_sealed) / KV_BLOCK_TOKENS;
    KVD_TRY(seal_blocks(s, st, seq, due, err));
    s->counts.n_grown += grown ? due : 0;
    t1 = kvd_now_ns();
    s->counts.seal_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_SEAL, t0, t1, KVD_TRACE_NOWHERE, due);
    return KVD_OK;
}

/* Back to n_sealed tokens: the others' records become raw blocks again. */
kvd_status kv_unseal(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n_sealed, kvd_err *err)
{
    kv_seq *q = &s->seq[seq];

    while (q->n_sealed > n_sealed) {
        const uint32_t b     = q->n_sealed / KV_BLOCK_TOKENS - 1;
        uint64_t       block = q->block[b];

        if (!s->sizes.resident) {
            kv_parked_yield(s, 1);
            kvd_assert(s->n_free > 0);
            block = s->free_stack[s->n_free - 1];
            for (uint32_t il = 0; il < s->params.n_layer; il++) {
                s->stage_block[b] = kv_layer_of(s, block, il);
                KVD_TRY(bring_up(s, st, seq, il, b, b + 1, s->stage_block, err));
            }
            s->n_free--;
        }
        kv_unmap_block(s, seq, b);
        q->block[b] = block;
        q->n_sealed = b * KV_BLOCK_TOKENS;
    }
    return KVD_OK;
}

/* ---- dense attention ---------------------------------------------------------------- */

kvd_status kv_fill_stage(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t seq, kvd_err *err)
{
    const uint32_t n = s->seq[seq].n_sealed / KV_BLOCK_TOKENS;

    if (n == 0)
        return KVD_OK;
    KVD_TRY(kv_wait_lists(s, st, err));
    for (uint32_t b = 0; b < n; b++)
        s->stage_block[b] = kv_stage_block(s, b);
    return bring_up(s, st, seq, layer, 0, n, s->stage_block, err);
}

kvd_status kv_dense_view(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t seq,
                         kvd_kv_layout *layout, const uint64_t **block, kvd_err *err)
{
    const kv_seq *q = &s->seq[seq];
    uint64_t      t0;

    *layout = kv_layout(s, layer);
    *block  = q->block;
    if (s->sizes.resident || q->n_sealed == 0)
        return KVD_OK;
    t0 = kvd_trace_now(s->params.trace);
    KVD_TRY(kv_fill_stage(s, st, layer, seq, err));
    kvd_trace_add(s->params.trace, KVD_TRACE_STAGE, t0, kvd_trace_now(s->params.trace), layer,
                  q->n_sealed / KV_BLOCK_TOKENS);
    for (uint32_t b = 0; b < q->n_block; b++)
        s->stage_block[b] =
            q->block[b] == KV_NO_BLOCK ? kv_stage_block(s, b) : kv_layer_of(s, q->block[b], layer);
    layout->lane_off = 0;
    *block           = s->stage_block;
    return KVD_OK;
}

kvd_status kv_set_index(kv_store *s, kvd_stream *st, const kvd_index_desc *desc, kvd_err *err)
{
    const kvd_index_desc before = s->index.desc;

    kv_tier_settle(s);
    kvd_assert(s->params.sparse && kvd_index_valid(desc));
    if (kvd_index_lane_bytes(desc) > s->param_off)
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "this index takes %llu bytes per block and lane, the session was opened for "
            "%llu",
            (unsigned long long)kvd_index_lane_bytes(desc), (unsigned long long)s->param_off);
    if (memcmp(&before, desc, sizeof(before)) == 0)
        return KVD_OK;
    if (s->cache)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "the prefix cache (cache_dir) was opened for another index: what is "
                        "stored there is indexed");
    if (s->record.type == KVD_RECORD_VALUES)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "records of values alone: the index has their keys and cannot be another");
    s->index.desc = *desc;
    kv_parked_drop_all(s); /* they have no lists to build an index by */
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        for (uint32_t il = 0; il < s->params.n_layer && s->seq[i].n_sealed > 0; il++) {
            const uint64_t *block;
            kvd_kv_layout   l;

            KVD_TRY(kv_dense_view(s, st, il, i, &l, &block, err));
            KVD_TRY(kv_index_layer(s, st, il, &l, block, s->seq[i].iblock,
                                   s->seq[i].n_sealed / KV_BLOCK_TOKENS, err));
        }
        s->seq[i].step = 0;
    }
    return KVD_OK;
}
