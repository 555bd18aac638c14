/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_window_lists.c - what a window's change means for records: spans to attend to, misses to
 * bring up.  Plain loops over lists, the same for "cpu" and "ref": a step's misses are few.
 * Owns: nothing.  Thread: the backend's caller. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_record.h"
#include "os/os.h"

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

/* ---- post ------------------------------------------------------------------------- */

static void post_lane(const kvd_window_post_args *a, uint32_t at, bool urgent)
{
    const kvd_window_seq    *s       = &a->seq[at / a->n_kv_head];
    const kvd_window_result *r       = &a->change[at];
    const uint32_t           head    = at % a->n_kv_head;
    const uint32_t          *fetch   = s->fetch + head * a->sel_stride;
    const uint32_t          *into    = s->into + head * a->sel_stride;
    const uint16_t          *ema     = s->ema + head * a->lane_stride;
    const uint32_t          *host_of = a->place[at / a->n_kv_head].host_of + head * a->lane_stride;
    const kvd_miss_link     *l       = &a->link[urgent ? 0 : 1];

    for (uint32_t i = urgent ? 0 : r->n_urgent; i < (urgent ? r->n_urgent : r->n_miss); i++) {
        if (host_of[fetch[i]] == KVD_HOST_NONE)
            l->request[l->state->posted++] = (kvd_miss_request){ .lane  = a->first_lane + at,
                                                                 .chunk = fetch[i],
                                                                 .slot  = into[i],
                                                                 .score = ema[fetch[i]] };
    }
}

kvd_status cpu_window_post(kvd_stream *st, const kvd_window_post_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t i = 0; i < KVD_COUNTOF(a->link); i++) {
        const kvd_miss_link *l = &a->link[i];

        l->batch->first = l->state->posted;
        for (uint32_t at = 0; at < a->n_seq * a->n_kv_head; at++)
            post_lane(a, at, i == 0);
        l->batch->n = l->state->posted - l->batch->first;
        __atomic_store_n(&l->queue->posted, l->state->posted, __ATOMIC_RELEASE);
    }
    return KVD_OK;
}

/* ---- fetch ------------------------------------------------------------------------ */

typedef struct fetch_all {
    const kvd_window_fetch_args *a;
    const cpu_record_kernels    *k;
    cpu_index_shape              keys; /* of VALUES */
} fetch_all;

/* Host record number `record` of a lane's chunk to its slot. */
static void fetch_record(const fetch_all *f, uint32_t at, uint32_t chunk, uint32_t slot,
                         uint32_t record)
{
    const kvd_window_fetch_args *a      = f->a;
    const kvd_window_place      *p      = &a->place[at / a->n_kv_head];
    const uint32_t               head   = at % a->n_kv_head;
    const uint64_t               packed = kvd_record_bytes(&a->format);
    const uint32_t               per    = a->kv.block_tokens / a->kv.chunk_tokens;
    const uint8_t               *src    = (const uint8_t *)a->host + record * packed;
    const uint8_t               *param  = a->param;
    uint8_t *dst = (uint8_t *)a->kv.pool + p->at[head] + a->slot_off + slot * a->kv.record_bytes;

    if (a->format.type == KVD_RECORD_RAW) {
        memcpy(dst, src, (size_t)packed);
        return;
    }
    param += p->iblock[chunk / per] + a->param_off + head * a->param_stride;
    if (a->format.type == KVD_RECORD_VALUES)
        f->k->unpack_values(&a->format, &f->keys, chunk % per, src, param, dst);
    else
        f->k->unpack(&a->format, chunk % per, src, param, dst);
}

static void fetch_lane(const fetch_all *f, uint32_t at)
{
    const kvd_window_fetch_args *a     = f->a;
    const kvd_window_seq        *s     = &a->seq[at / a->n_kv_head];
    const kvd_window_result     *r     = &a->change[at];
    const uint32_t               head  = at % a->n_kv_head;
    const uint32_t              *fetch = s->fetch + head * a->sel_stride;
    const uint32_t              *into  = s->into + head * a->sel_stride;
    const uint32_t *host_of = a->place[at / a->n_kv_head].host_of + head * a->lane_stride;

    for (uint32_t i = a->urgent ? 0 : r->n_urgent; i < (a->urgent ? r->n_urgent : r->n_miss); i++) {
        if (host_of[fetch[i]] != KVD_HOST_NONE)
            fetch_record(f, at, fetch[i], into[i], host_of[fetch[i]]);
    }
}

/* Whether a request's record has come; false: nothing more will. */
static bool wait_for(const kvd_miss_link *l, uint32_t i, bool *waited)
{
    kvd_miss_queue *q  = l->queue;
    const uint64_t  t0 = kvd_now_ns();

    while (__atomic_load_n(&q->arrived, __ATOMIC_ACQUIRE) <= i) {
        if (__atomic_load_n(&q->given_up, __ATOMIC_ACQUIRE))
            return false;
        if (kvd_now_ns() - t0 > l->limit_ns) {
            __atomic_store_n(&q->too_late, true, __ATOMIC_RELEASE);
            return false;
        }
        l->state->n_wait += !*waited;
        *waited = true;
        os_yield();
    }
    l->state->wait_ns += *waited ? kvd_now_ns() - t0 : 0;
    return true;
}

/* What was asked for, in order. */
static void fetch_posted(const fetch_all *f)
{
    const kvd_miss_link *l      = &f->a->link;
    bool                 waited = false;

    for (uint32_t k = 0; k < l->batch->n; k++) {
        const uint32_t          i = l->batch->first + k;
        const kvd_miss_request *r = &l->request[i];

        if (__atomic_load_n(&l->queue->too_late, __ATOMIC_RELAXED) || !wait_for(l, i, &waited))
            return;
        fetch_record(f, r->lane - f->a->first_lane, r->chunk, r->slot, l->place[i % l->n_place]);
        if (++l->state->taken % l->n_place == 0)
            __atomic_store_n(&l->queue->taken, l->state->taken, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&l->queue->n_wait, l->state->n_wait, __ATOMIC_RELAXED);
    __atomic_store_n(&l->queue->wait_ns, l->state->wait_ns, __ATOMIC_RELAXED);
}

kvd_status cpu_window_fetch(kvd_stream *st, const kvd_window_fetch_args *a, kvd_err *err)
{
    fetch_all f = { .a = a, .k = cpu_record_kernels_of(st->be) };

    (void)err;
    if (a->format.type == KVD_RECORD_VALUES)
        cpu_index_shape_of(&f.keys, &a->format.keys);
    for (uint32_t at = 0; at < a->n_seq * a->n_kv_head; at++)
        fetch_lane(&f, at);
    if (a->link.queue)
        fetch_posted(&f);
    return KVD_OK;
}
