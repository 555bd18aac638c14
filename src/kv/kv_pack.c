/* SPDX-License-Identifier: Apache-2.0 */
/* kv_pack.c - records in the form they have below the device: as they are, or in 8 or 4 bits.
 *
 * Parameters of a lane's block lie behind its index, and travel with it to the block store.  From
 * sealing on the device works with exactly what the packed record says, wherever it came from.
 * Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

static bool is_raw(const kv_store *s)
{
    return s->record.type == KVD_RECORD_RAW;
}

uint64_t kv_list_up(const kv_store *s, const kv_copies *list, uint32_t seq, uint32_t lane,
                    uint32_t chunk, uint64_t src, uint64_t dst, uint64_t n)
{
    list->src[n] = src;
    list->dst[n] = dst;
    if (!is_raw(s)) {
        list->number[n] = chunk % s->block_chunks;
        list->param[n]  = kv_params_of_block(s, seq, lane, chunk / s->block_chunks);
    }
    return n + 1;
}

/* n listed records from `from` to the pool. */
kvd_status kv_bring(kv_store *s, kvd_stream *st, const kv_copies *list, const void *from,
                    uint64_t n, kvd_err *err)
{
    const kvd_record_copy_args   copy   = { .n       = n,
                                            .bytes   = s->layout.record_bytes,
                                            .src_off = list->src,
                                            .dst_off = list->dst,
                                            .src     = from,
                                            .dst     = s->pool.ptr };
    const kvd_record_unpack_args unpack = { .format    = s->record,
                                            .n         = n,
                                            .src       = from,
                                            .param     = s->landmarks.ptr,
                                            .dst       = s->pool.ptr,
                                            .src_off   = list->src,
                                            .param_off = list->param,
                                            .dst_off   = list->dst,
                                            .chunk     = list->number };

    return is_raw(s) ? s->be->ops->record_copy(st, &copy, err)
                     : s->be->ops->record_unpack(st, &unpack, err);
}

kvd_status kv_copy_up(kv_store *s, kvd_stream *st, const kv_copies *list, uint64_t n, kvd_err *err)
{
    return kv_bring(s, st, list, s->host.ptr, n, err);
}

kvd_status kv_pack_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                         uint64_t at, kvd_err *err)
{
    uint64_t *const from = s->step.pack, *const param = from + s->params.n_kv_head;
    uint64_t *const            to = param + s->params.n_kv_head;
    const kvd_record_pack_args a  = { .format    = s->record,
                                      .n         = s->params.n_kv_head,
                                      .src       = s->pool.ptr,
                                      .param     = s->landmarks.ptr,
                                      .dst       = s->packed,
                                      .src_off   = from,
                                      .param_off = param,
                                      .dst_off   = to };

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        from[h]  = at + h * s->layout.head_stride;
        param[h] = kv_params_of_block(s, seq, layer * s->params.n_kv_head + h, b);
        to[h]    = h * s->block_chunks * s->packed_bytes;
    }
    return s->be->ops->record_pack(st, &a, err);
}

kvd_status kv_pack_lane(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t lane, uint32_t b,
                        uint64_t at, uint8_t *dst, kvd_err *err)
{
    const uint64_t             zero  = 0;
    const uint64_t             param = is_raw(s) ? 0 : kv_params_of_block(s, seq, lane, b);
    const kvd_record_pack_args a     = { .format    = s->record,
                                         .n         = 1,
                                         .src       = s->pool.ptr,
                                         .param     = s->landmarks.ptr,
                                         .dst       = dst,
                                         .src_off   = &at,
                                         .param_off = &param,
                                         .dst_off   = &zero };

    if (!is_raw(s))
        return s->be->ops->record_pack(st, &a, err);
    memcpy(dst, (const uint8_t *)s->pool.ptr + at, s->block_chunks * s->layout.record_bytes);
    return KVD_OK;
}

kvd_status kv_unpack_run(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t lane, uint32_t chunk,
                         uint32_t n, uint64_t at, kvd_err *err)
{
    const uint64_t raw = s->layout.record_bytes, packed = s->packed_bytes;
    const uint64_t from = at + n * (raw - packed);
    const uint64_t param =
        is_raw(s) ? 0 : kv_params_of_block(s, seq, lane, chunk / s->block_chunks);

    for (uint32_t i = 0; i < n && !is_raw(s); i++) {
        const uint64_t               src = from + i * packed, dst = at + i * raw;
        const uint32_t               number = chunk % s->block_chunks + i;
        const kvd_record_unpack_args a      = { .format    = s->record,
                                                .n         = 1,
                                                .src       = s->pool.ptr,
                                                .param     = s->landmarks.ptr,
                                                .dst       = s->pool.ptr,
                                                .src_off   = &src,
                                                .param_off = &param,
                                                .dst_off   = &dst,
                                                .chunk     = &number };

        KVD_TRY(s->be->ops->record_unpack(st, &a, err));
    }
    return KVD_OK;
}

kvd_status kv_settle_raw(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                         uint64_t at, kvd_err *err)
{
    uint64_t n = 0;

    if (is_raw(s))
        return KVD_OK;
    KVD_TRY(kv_wait_lists(s, st, err));
    KVD_TRY(kv_pack_layer(s, st, seq, layer, b, at, err));
    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint64_t to = at + h * s->layout.head_stride;

        for (uint32_t i = 0; i < s->block_chunks; i++)
            n = kv_list_up(s, &s->step.list[KV_COPIES], seq, layer * s->params.n_kv_head + h,
                           b * s->block_chunks + i,
                           ((uint64_t)h * s->block_chunks + i) * s->packed_bytes,
                           to + i * s->layout.record_bytes, n);
    }
    return kv_bring(s, st, &s->step.list[KV_COPIES], s->packed, n, err);
}
