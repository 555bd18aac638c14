/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_window_lists.c - what a window's change means for records: spans to attend to, misses to
 * bring up.  Plain loops over lists, the same for "cpu" and "ref": a step's misses are few.
 * Owns: nothing.  Thread: the backend's caller. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_record.h"

/* ---- spans ------------------------------------------------------------------------ */

typedef struct span_lane {
    const kvd_window_spans_args *a;
    const kvd_window_seq        *s;
    const kvd_window_place      *p;
    uint32_t                     head, at; /* at: number of the lane */
} span_lane;

static uint64_t record_of(const span_lane *l, uint32_t slot)
{
    const kvd_kv_layout *kv  = &l->a->kv;
    const uint32_t       per = kv->block_tokens / kv->chunk_tokens;
    uint32_t             chunk;

    if (!l->a->in_place)
        return l->p->at[l->head] + l->a->slot_off + slot * kv->record_bytes;
    chunk = l->s->chunk_of[l->head * l->a->slot_stride + slot];
    return l->p->block[chunk / per] + kv->lane_off + l->head * kv->head_stride +
           chunk % per * kv->record_bytes;
}

/* Selected chunks that are no misses.  The misses are two ascending runs of the selection. */
static uint32_t list_selected(const span_lane *l, uint64_t *out)
{
    const kvd_window_spans_args *a       = l->a;
    const kvd_window_result     *r       = &a->change[l->at];
    const uint32_t              *sel     = l->s->sel + l->head * a->sel_stride;
    const uint32_t              *fetch   = l->s->fetch + l->head * a->sel_stride;
    const uint16_t              *slot_of = l->s->slot_of + l->head * a->lane_stride;
    uint32_t                     n = 0, u = 0, b = r->n_urgent;

    for (uint32_t i = 0; i < a->select[l->at].n_sel; i++) {
        const uint32_t chunk = sel[i] & ~KVD_SELECT_URGENT;

        if (u < r->n_urgent && fetch[u] == chunk)
            u++;
        else if (b < r->n_miss && fetch[b] == chunk)
            b++;
        else
            out[n++] = record_of(l, slot_of[chunk]);
    }
    return n;
}

static void list_lane(const span_lane *l)
{
    const kvd_window_spans_args *a      = l->a;
    const kvd_window_result     *r      = &a->change[l->at];
    const uint32_t              *stay   = l->s->stay + l->head * a->slot_stride;
    const uint32_t              *into   = l->s->into + l->head * a->sel_stride;
    uint64_t                    *near   = a->near + l->at * a->list_stride;
    uint64_t                    *urgent = a->urgent + l->at * a->list_stride;
    uint32_t                     n      = r->n_stay;

    if (a->selected)
        n = list_selected(l, near);
    for (uint32_t i = 0; i < n && !a->selected; i++)
        near[i] = record_of(l, stay[i]);
    for (uint32_t i = 0; i < r->n_urgent; i++)
        urgent[i] = record_of(l, into[i]);
    a->near_span[l->at]   = (kvd_attn_span){ .record = near, .n_record = n };
    a->urgent_span[l->at] = (kvd_attn_span){ .record = urgent, .n_record = r->n_urgent };
}

kvd_status cpu_window_spans(kvd_stream *st, const kvd_window_spans_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t at = 0; at < a->n_seq * a->n_kv_head; at++) {
        const uint32_t  i = at / a->n_kv_head;
        const span_lane l = {
            .a = a, .s = &a->seq[i], .p = &a->place[i], .head = at % a->n_kv_head, .at = at
        };

        list_lane(&l);
    }
    return KVD_OK;
}

/* ---- fetch ------------------------------------------------------------------------ */

static void fetch_lane(const kvd_window_fetch_args *a, const cpu_record_kernels *k,
                       const cpu_index_shape *keys, uint32_t at)
{
    const kvd_window_seq    *s       = &a->seq[at / a->n_kv_head];
    const kvd_window_place  *p       = &a->place[at / a->n_kv_head];
    const kvd_window_result *r       = &a->change[at];
    const uint32_t           head    = at % a->n_kv_head;
    const uint32_t          *fetch   = s->fetch + head * a->sel_stride;
    const uint32_t          *into    = s->into + head * a->sel_stride;
    const uint32_t          *host_of = p->host_of + head * a->lane_stride;
    const uint64_t           packed  = kvd_record_bytes(&a->format);
    const uint32_t           per     = a->kv.block_tokens / a->kv.chunk_tokens;

    for (uint32_t i = a->urgent ? 0 : r->n_urgent; i < (a->urgent ? r->n_urgent : r->n_miss); i++) {
        const uint8_t *src = (const uint8_t *)a->host + host_of[fetch[i]] * packed;
        uint8_t       *dst =
            (uint8_t *)a->kv.pool + p->at[head] + a->slot_off + into[i] * a->kv.record_bytes;
        const uint8_t *param = a->param;

        if (a->format.type == KVD_RECORD_RAW) {
            memcpy(dst, src, (size_t)packed);
            continue;
        }
        param += p->iblock[fetch[i] / per] + a->param_off + head * a->param_stride;
        if (a->format.type == KVD_RECORD_VALUES)
            k->unpack_values(&a->format, keys, fetch[i] % per, src, param, dst);
        else
            k->unpack(&a->format, fetch[i] % per, src, param, dst);
    }
}

kvd_status cpu_window_fetch(kvd_stream *st, const kvd_window_fetch_args *a, kvd_err *err)
{
    const cpu_record_kernels *k    = cpu_record_kernels_of(st->be);
    cpu_index_shape           keys = { 0 };

    (void)err;
    if (a->format.type == KVD_RECORD_VALUES)
        cpu_index_shape_of(&keys, &a->format.keys);
    for (uint32_t at = 0; at < a->n_seq * a->n_kv_head; at++)
        fetch_lane(a, k, &keys, at);
    return KVD_OK;
}
