/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_walk.h - stepping over the rows of a lane without a division per key: through the blocks
 * of a sequence, or through a list of whole records. */
#ifndef KVD_CPU_ATTN_WALK_H
#define KVD_CPU_ATTN_WALK_H

#include "backend/cpu/cpu_kv.h"

typedef struct attn_walk {
    const kvd_kv_layout *kv;
    const uint64_t      *block;
    const uint64_t      *record; /* the list's rest behind the record of row; NULL: blocks */
    const uint8_t       *row;    /* K row of the next key */
    uint32_t             kv_head, key, in_chunk, in_block;
    uint64_t             row_bytes;
} attn_walk;

static inline attn_walk attn_walk_from(const kvd_kv_layout *kv, const uint64_t *block,
                                       uint32_t kv_head, uint32_t key)
{
    return (attn_walk){ .kv        = kv,
                        .block     = block,
                        .row       = cpu_kv_row(kv, block, kv_head, key),
                        .kv_head   = kv_head,
                        .key       = key,
                        .in_chunk  = key % kv->chunk_tokens,
                        .in_block  = key % kv->block_tokens,
                        .row_bytes = kv->head_dim * cpu_kv_elem_bytes(kv) };
}

static inline attn_walk attn_walk_list(const kvd_kv_layout *kv, const uint64_t *record,
                                       uint32_t key)
{
    const uint32_t  in_chunk = key % kv->chunk_tokens;
    const uint64_t  bytes    = kv->head_dim * cpu_kv_elem_bytes(kv);
    const uint64_t *at       = record + key / kv->chunk_tokens;

    return (attn_walk){ .kv        = kv,
                        .record    = at + 1,
                        .row       = (const uint8_t *)kv->pool + *at + in_chunk * bytes,
                        .key       = key,
                        .in_chunk  = in_chunk,
                        .row_bytes = bytes };
}

/* The K row of the next key; block[] is not read before a key in that block is asked for. */
static inline const uint8_t *attn_walk_next(attn_walk *w)
{
    const uint8_t *row;

    if (w->record) {
        if (w->in_chunk == w->kv->chunk_tokens) {
            w->in_chunk = 0;
            w->row      = (const uint8_t *)w->kv->pool + *w->record++;
        }
    } else if (w->in_block == w->kv->block_tokens) {
        w->in_block = w->in_chunk = 0;
        w->row                    = cpu_kv_row(w->kv, w->block, w->kv_head, w->key);
    } else if (w->in_chunk == w->kv->chunk_tokens) {
        w->in_chunk = 0;
        w->row += w->kv->record_bytes / 2; /* over the V rows */
    }
    row = w->row;
    w->row += w->row_bytes;
    w->key++;
    w->in_chunk++;
    w->in_block++;
    return row;
}

#endif
