/* SPDX-License-Identifier: Apache-2.0 */
/* kv_leave.c - K and V of a prompt leave the device beside the work on it.
 *
 * What a batch has written to the stage is final, so whole blocks of it go down at once, on a
 * stream of their own, while the batch attends and later ones are computed.  The next layer writes
 * to the stage when that stream has come to the layer's end.  This is for records that go down as
 * they are, to places that are known before the prompt; others leave when their layer closes.
 *
 * Thread: the session's. */
#include "kv/kv_cache.h"

kvd_status kv_leave_open(kv_store *s, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;

    if (s->sizes.resident || !kv_leaves_early(&s->params))
        return KVD_OK;
    KVD_TRY(ops->stream_open(s->be, &s->down, err));
    KVD_TRY(ops->event_open(s->be, &s->written, err));
    return ops->event_open(s->be, &s->left, err);
}

void kv_leave_close(kv_store *s)
{
    const kvd_backend_ops *ops = s->be->ops;

    ops->stream_close(s->down);
    if (s->written)
        ops->event_close(s->written);
    if (s->left)
        ops->event_close(s->left);
}

/* Whether the n listed copies of a block are one: its lanes lie together on the stage, and mostly
 * its places, which have been taken one after the other. */
static bool is_one_run(const kv_copies *list, uint64_t n, uint64_t bytes)
{
    for (uint64_t i = 1; i < n; i++) {
        if (list->src[i] != list->src[i - 1] + bytes || list->dst[i] != list->dst[i - 1] + bytes)
            return false;
    }
    return n > 0;
}

/* Runs by the copy engine; the rest by a kernel, which takes processors from products that count on
 * all of them.  Each block has its own part of the list: others may not have been read yet. */
static kvd_status send_down(kv_store *s, uint32_t layer, uint32_t first, uint32_t end, kvd_err *err)
{
    const uint64_t at    = (uint64_t)first * s->block_chunks * s->params.n_kv_head;
    const uint64_t bytes = s->packed_bytes;
    kv_copies      list  = s->step.list[KV_COPIES_LATE];
    uint64_t       n     = 0;

    list.src += at;
    list.dst += at;
    for (uint32_t b = first; b < end; b++) {
        const uint64_t  m   = kv_list_down(s, &list, s->prompt.seq, layer, b, kv_stage_block(s, b),
                                           s->layout.head_stride, s->layout.record_bytes, n);
        const kv_copies own = { .src = list.src + n, .dst = list.dst + n };

        if (is_one_run(&own, m - n, bytes))
            KVD_TRY(s->be->ops->copy(s->down, s->host, own.dst[0], s->pool, own.src[0],
                                     (m - n) * bytes, err));
        else
            n = m;
    }
    return kv_copy_listed(s, s->down, &list, s->pool.ptr, s->host.ptr, bytes, n, err);
}

kvd_status kv_prompt_written(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t n_token,
                             kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    kv_prompt             *p   = &s->prompt;
    const uint32_t         end =
        (uint32_t)kvd_min_u64(p->end, (s->seq[p->seq].len + (uint64_t)n_token) / KV_BLOCK_TOKENS);

    if (!s->down || s->tier || end <= p->left)
        return KVD_OK;
    if (p->left == p->first) /* lists of the layer before */
        KVD_TRY(kv_wait_lists(s, s->down, err));
    KVD_TRY(ops->event_record(s->written, st, err));
    KVD_TRY(ops->event_wait(s->written, s->down, err));
    KVD_TRY(send_down(s, layer, p->left, end, err));
    p->left = end;
    return ops->event_record(s->left, s->down, err);
}

kvd_status kv_leave_layer(kv_store *s, kvd_stream *st, kvd_err *err)
{
    kv_prompt *p = &s->prompt;

    if (p->left > p->first)
        KVD_TRY(s->be->ops->event_wait(s->left, st, err));
    p->left = p->first;
    return KVD_OK;
}

kvd_status kv_leave_end(kv_store *s, kvd_err *err)
{
    return s->down ? s->be->ops->stream_sync(s->down, err) : KVD_OK;
}
