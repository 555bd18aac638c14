/* SPDX-License-Identifier: Apache-2.0 */
/* kv_measure.c - what measurements of speed change and ask. */
#include "kv/kv_cache.h"

void kv_set_measure(kv_store *s, bool in_place, bool no_fetch)
{
    s->in_place = in_place;
    s->no_fetch = no_fetch;
}

uint64_t kv_select_bytes(const kv_store *s, uint32_t seq)
{
    const kv_seq  *q     = &s->seq[seq];
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const uint64_t kept  = s->sinks + kvd_div_up(q->len - q->n_sealed, s->params.chunk_tokens);

    return lanes * (q->n_sealed / KV_BLOCK_TOKENS * kvd_index_lane_bytes(&s->index.desc) +
                    kept * s->layout.record_bytes);
}

uint64_t kv_record_raw(const kv_store *s)
{
    return s->layout.record_bytes;
}

uint64_t kv_dense_bytes(const kv_store *s, uint32_t seq)
{
    return s->seq[seq].len * s->sizes.bytes_per_token;
}
