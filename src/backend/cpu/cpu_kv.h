/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_kv.h - where a token's K and V rows lie in a pool (see kvd_kv_layout). */
#ifndef KVD_CPU_KV_H
#define KVD_CPU_KV_H

#include "backend/backend.h"

static inline uint64_t cpu_kv_elem_bytes(const kvd_kv_layout *kv)
{
    return kv->type == KVD_DTYPE_F32 ? 4 : 2;
}

static inline void cpu_kv_check(const kvd_kv_layout *kv)
{
    kvd_assert(kv->type == KVD_DTYPE_F32 || kv->type == KVD_DTYPE_BF16);
    kvd_assert(kv->n_kv_head > 0 && kv->head_dim > 0 && kv->chunk_tokens > 0);
    kvd_assert(kv->block_tokens % kv->chunk_tokens == 0);
    kvd_assert(kv->record_bytes ==
               2 * (uint64_t)kv->chunk_tokens * kv->head_dim * cpu_kv_elem_bytes(kv));
}

/* The K row of one token; its V row is chunk_tokens rows further. */
static inline uint8_t *cpu_kv_row(const kvd_kv_layout *kv, const uint64_t *block, uint32_t head,
                                  uint32_t token)
{
    const uint32_t in_block = token % kv->block_tokens;

    return (uint8_t *)kv->pool + block[token / kv->block_tokens] + kv->lane_off +
           head * kv->head_stride + (uint64_t)(in_block / kv->chunk_tokens) * kv->record_bytes +
           (uint64_t)(in_block % kv->chunk_tokens) * kv->head_dim * cpu_kv_elem_bytes(kv);
}

static inline uint64_t cpu_kv_v_off(const kvd_kv_layout *kv)
{
    return kv->record_bytes / 2;
}

/* A call for span alone, or for what is to be attended behind it. */
static inline kvd_attn_span_args cpu_span_alone(const kvd_attn_span_args *a, bool behind)
{
    kvd_attn_span_args s = *a;

    s.then = NULL;
    if (behind) {
        s.span  = a->then;
        s.first = false;
    } else if (a->then) {
        s.lse = NULL;
        s.out = NULL;
    }
    return s;
}

/* What attention to cells has in common with attention to spans: all but what is attended. */
static inline kvd_attn_span_args cpu_zone_as_span(const kvd_attn_zone_args *a)
{
    return (kvd_attn_span_args){ .n_row      = a->n_row,
                                 .n_head     = a->n_head,
                                 .kv         = a->zone,
                                 .row        = a->row,
                                 .q_stride   = a->q_stride,
                                 .out_stride = a->out_stride,
                                 .lse_stride = a->lse_stride,
                                 .q          = a->q,
                                 .part       = a->part,
                                 .lse        = a->lse,
                                 .out        = a->out,
                                 .scale      = a->scale };
}

#endif
