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
    KVD_TRY(kv_send_down(s, s->down, p->seq, layer, p->left, end, err));
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
