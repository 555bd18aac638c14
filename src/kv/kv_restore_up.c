/* SPDX-License-Identifier: Apache-2.0 */
/* kv_restore_up.c - kv_restore.c's work on a layer, for a device with memory of its own.
 *
 * The disk writes to pinned memory: to the host tier, where a block's records have their places in
 * a row, else to places of kv_ferry.c, from where copies and kernels take them.  Blocks go in
 * groups of as many as there are places, and the stream is waited for between groups. Thread: the
 * session's. */
#include <string.h>

#include "kv/kv_cache.h"

static uint32_t lane_of(const kv_restore *r, uint32_t layer, uint32_t h)
{
    return layer * r->s->params.n_kv_head + h;
}

static uint8_t *slot_at(const kv_store *s, uint32_t slot, bool aux)
{
    return (uint8_t *)kv_ferry_mem(s).ptr + kv_ferry_at(s, slot, aux);
}

static uint32_t *host_of(const kv_restore *r, uint32_t layer, uint32_t h, uint32_t b)
{
    const kv_store *s = r->s;

    return s->host_of + (kv_lane(s, r->seq, layer) + h) * s->n_chunk_max +
           (uint64_t)b * s->block_chunks;
}

static bool in_a_row(const uint32_t *host, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        if (host[i] != host[0] + i)
            return false;
    return true;
}

static uint64_t lane_bytes(const kv_store *s)
{
    return s->block_chunks * s->packed_bytes;
}

/* Whether block b's records are read now: sealed ones stay on disk where that is a tier. */
static bool reads_records(const kv_restore *r, uint32_t b)
{
    return !r->s->tier || b >= r->n_seal;
}

/* Whether they belong to the host tier. */
static bool for_host(const kv_restore *r, uint32_t b)
{
    return !r->s->sizes.resident && b < r->n_seal;
}

/* Where block b's records of a lane are read to. */
static uint8_t *records_to(const kv_restore *r, uint32_t layer, uint32_t h, uint32_t b,
                           uint32_t slot)
{
    const kv_store *s = r->s;

    if (for_host(r, b)) {
        const uint32_t *host = host_of(r, layer, h, b);

        if (in_a_row(host, s->block_chunks))
            return (uint8_t *)s->host.ptr + host[0] * s->packed_bytes;
    }
    return slot_at(s, slot, false) + h * lane_bytes(s);
}

static kvd_status read_group(kv_restore *r, uint32_t layer, uint32_t first, uint32_t end, bool aux,
                             kvd_err *err)
{
    kv_store     *s    = r->s;
    kv_disk_read *read = s->cache->read;
    uint32_t      n    = 0;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        for (uint32_t b = first; b < end; b++) {
            uint32_t            in_unit;
            const kv_disk_span *sp = kv_restore_span(r, b, &in_unit);

            if (aux ? b >= r->n_seal : !reads_records(r, b))
                continue;
            read[n++] = (kv_disk_read){
                .unit  = sp->unit,
                .what  = aux ? KV_DISK_AUX : KV_DISK_RECORDS,
                .lane  = lane_of(r, layer, h),
                .first = aux ? in_unit : in_unit * s->block_chunks,
                .n     = aux ? 1 : s->block_chunks,
                .dst   = aux ? slot_at(s, b - first, true) + h * s->index.head_stride
                             : records_to(r, layer, h, b, b - first),
            };
        }
    }
    return kv_restore_read(r, read, n, err);
}

/* What a place has of the host tier's records. */
static void keep_on_host(kv_restore *r, uint32_t layer, uint32_t b, uint32_t slot)
{
    kv_store *s = r->s;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t *host = host_of(r, layer, h, b);
        const uint8_t  *from = slot_at(s, slot, false) + h * lane_bytes(s);

        for (uint32_t i = 0; !in_a_row(host, s->block_chunks) && i < s->block_chunks; i++)
            memcpy((uint8_t *)s->host.ptr + host[i] * s->packed_bytes, from + i * s->packed_bytes,
                   (size_t)s->packed_bytes);
    }
}

/* A place's records to where the block lies raw. */
static kvd_status bring_up(kv_restore *r, uint32_t layer, uint32_t b, uint32_t slot, kvd_err *err)
{
    kv_store        *s    = r->s;
    const kv_copies *list = &s->step.list[KV_COPIES];
    const uint64_t   at   = kv_layer_of(s, s->seq[r->seq].block[b], layer);
    uint64_t         n    = 0;

    if (s->record.type == KVD_RECORD_RAW)
        return s->be->ops->copy(r->st, s->pool, at, kv_ferry_mem(s), kv_ferry_at(s, slot, false),
                                s->params.n_kv_head * s->layout.head_stride, err);
    KVD_TRY(kv_wait_lists(s, r->st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++)
        for (uint32_t i = 0; i < s->block_chunks; i++)
            n = kv_list_up(s, list, r->seq, lane_of(r, layer, h), b * s->block_chunks + i,
                           kv_ferry_at(s, slot, false) + h * lane_bytes(s) + i * s->packed_bytes,
                           at + h * s->layout.head_stride + i * s->layout.record_bytes, n);
    return kv_bring(s, r->st, list, kv_ferry_mem(s).ptr, n, err);
}

static kvd_status restore_group(kv_restore *r, uint32_t layer, uint32_t first, uint32_t end,
                                kvd_err *err)
{
    kv_store      *s   = r->s;
    const uint64_t aux = s->params.n_kv_head * s->index.head_stride;

    KVD_TRY(s->be->ops->stream_sync(r->st, err)); /* it has passed what the places had */
    KVD_TRY(read_group(r, layer, first, end, true, err));
    KVD_TRY(read_group(r, layer, first, end, false, err));
    for (uint32_t b = first; b < end; b++) {
        const uint32_t slot = b - first;

        if (b < r->n_seal)
            KVD_TRY(s->be->ops->copy(r->st, s->landmarks, s->seq[r->seq].iblock[b] + layer * aux,
                                     kv_ferry_mem(s), kv_ferry_at(s, slot, true), aux, err));
        if (!reads_records(r, b))
            continue;
        if (for_host(r, b))
            keep_on_host(r, layer, b, slot);
        else
            KVD_TRY(bring_up(r, layer, b, slot, err));
    }
    return KVD_OK;
}

/* The sinks' records to their slots on the device: from the host tier, or from disk. */
static kvd_status restore_sinks(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store           *s    = r->s;
    const kv_copies    *list = &s->step.list[KV_COPIES];
    uint64_t            n    = 0;
    uint32_t            in_unit;
    const kv_disk_span *sp;

    if (r->n_seal == 0 || r->base > 0 || s->sizes.resident || s->sinks == 0)
        return KVD_OK;
    sp = kv_restore_span(r, 0, &in_unit);
    KVD_TRY(s->be->ops->stream_sync(r->st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        s->cache->read[h] = (kv_disk_read){ .unit  = sp->unit,
                                            .what  = KV_DISK_RECORDS,
                                            .lane  = lane_of(r, layer, h),
                                            .first = in_unit * s->block_chunks,
                                            .n     = s->sinks,
                                            .dst   = slot_at(s, 0, false) + h * lane_bytes(s) };
        for (uint32_t i = 0; i < s->sinks; i++) {
            const uint64_t from =
                s->tier ? kv_ferry_at(s, 0, false) + h * lane_bytes(s) + i * s->packed_bytes
                        : host_of(r, layer, h, 0)[i] * s->packed_bytes;

            n = kv_list_up(s, list, r->seq, lane_of(r, layer, h), i, from,
                           kv_record_in_window(s, kv_lane(s, r->seq, layer) + h, i), n);
        }
    }
    if (s->tier)
        KVD_TRY(kv_disk_read_now(s->cache->disk, s->cache->read, s->params.n_kv_head, err));
    return kv_bring(s, r->st, list, s->tier ? kv_ferry_mem(s).ptr : s->host.ptr, n, err);
}

static kvd_status restore_tail(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store      *s = r->s;
    const uint32_t n = kv_blocks_for(r->n_tail);

    if (r->n_tail == 0)
        return KVD_OK;
    KVD_TRY(s->be->ops->stream_sync(r->st, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        kv_tail_part p = { 0 };

        while (kv_restore_part(r, &p))
            KVD_TRY(kv_restore_read_part(r, &p, lane_of(r, layer, h),
                                         slot_at(s, p.block, false) + h * s->layout.head_stride,
                                         err));
    }
    for (uint32_t i = 0; i < n; i++)
        KVD_TRY(s->be->ops->copy(r->st, s->pool,
                                 kv_layer_of(s, s->seq[r->seq].block[r->n_block + i], layer),
                                 kv_ferry_mem(s), kv_ferry_at(s, i, false),
                                 s->params.n_kv_head * s->layout.head_stride, err));
    return KVD_OK;
}

kvd_status kv_restore_up(kv_restore *r, uint32_t layer, kvd_err *err)
{
    const uint32_t n_slot = kv_ferry_slots(r->s);

    for (uint32_t b = r->base; b < r->n_block; b += n_slot)
        KVD_TRY(restore_group(r, layer, b, (uint32_t)kvd_min_u64(r->n_block, b + n_slot), err));
    KVD_TRY(restore_sinks(r, layer, err));
    return restore_tail(r, layer, err);
}
