/* SPDX-License-Identifier: Apache-2.0 */
/* kv_ferry.c - from a device with memory of its own to the block store.
 *
 * Such a device's memory only ops can read, and they run later than they are given.  So what is to
 * be stored is brought to places in pinned memory by the stream, and put to the block store when an
 * event says that it has come: in a decode step nothing is waited for.  A place holds one block of
 * one layer, all its lanes: packed records, index, and the lists that pack them.  A *load* is
 * what belongs to one unit and layer, its blocks in consecutive places of a ring; loads are put in
 * their order.  Where the ring is full, which long prompts make it, the stream is waited for.
 *
 * A load whose event tells of a failed device is never put: its unit is dropped.
 *
 * Owns: the places and events.  Thread: the session's. */
#include <string.h>

#include "kv/kv_cache.h"

#define SLOTS_MIN (2 * KV_DISK_SEGMENT_BLOCKS)
#define SEQS_MAX  4u /* whose blocks find room when they are sealed in one step */

typedef struct load {
    kv_ferry_unit unit;            /* put KV_DISK_NONE: dropped; n_tail 0: sealed blocks */
    uint32_t      layer, first, n; /* places */
    uint32_t      n_put;           /* lanes that are put already */
    bool          last;            /* with it the unit is complete */
    kvd_event    *come;
} load;

struct kv_ferry {
    kvd_mem     mem;
    uint64_t    slot_bytes, aux_at, list_at; /* of a place; its records come first */
    uint32_t    n_slot, slot, n_used;        /* the next to be used; in use */
    load       *load;                        /* [n_slot] ring */
    uint32_t    first, n_load;
    kvd_stream *st; /* of the last load */
};

/* ---- sizes ------------------------------------------------------------------------------ */

static uint64_t records_bytes(const kv_params *p)
{
    const kvd_record_format f = kv_record_format(p);

    return p->n_kv_head * (KV_BLOCK_TOKENS / p->chunk_tokens) * kvd_record_raw_bytes(&f);
}

static uint64_t list_bytes(const kv_params *p)
{
    return kvd_align_up(3 * sizeof(uint64_t) * p->n_kv_head, KVD_CACHE_LINE);
}

static uint64_t slot_bytes(const kv_params *p)
{
    return records_bytes(p) + p->n_kv_head * kv_aux_bytes(p) + list_bytes(p);
}

/* A block of all layers for some sequences, and a segment of a layer twice. */
static uint32_t n_slots(const kv_params *p)
{
    const uint32_t seqs = p->n_seq < SEQS_MAX ? p->n_seq : SEQS_MAX;

    return p->n_layer * seqs > SLOTS_MIN ? p->n_layer * seqs : SLOTS_MIN;
}

uint64_t kv_ferry_bytes(const kv_params *p)
{
    return p->apart && p->cache_dir ? n_slots(p) * slot_bytes(p) : 0;
}

/* ---- open and close --------------------------------------------------------------------- */

kvd_status kv_ferry_open(kv_store *s, kvd_err *err)
{
    const kv_params *p = &s->params;
    kv_ferry        *f;

    if (!p->apart)
        return KVD_OK;
    f = s->cache->ferry = kvd_calloc(1, sizeof(*f));
    if (!f)
        return kvd_fail(err, KVD_E_NOMEM, 0, "prefix cache: no memory");
    f->aux_at     = records_bytes(p);
    f->list_at    = f->aux_at + p->n_kv_head * kv_aux_bytes(p);
    f->slot_bytes = slot_bytes(p);
    f->n_slot     = n_slots(p);
    f->load       = kvd_calloc(f->n_slot, sizeof(*f->load));
    if (!f->load)
        return kvd_fail(err, KVD_E_NOMEM, 0, "prefix cache: no memory for its tables");
    for (uint32_t i = 0; i < f->n_slot; i++)
        KVD_TRY(s->be->ops->event_open(s->be, &f->load[i].come, err));
    return s->be->ops->mem_alloc(s->be, KVD_MEM_PINNED, f->n_slot * f->slot_bytes, &f->mem, err);
}

void kv_ferry_close(kv_store *s)
{
    kv_ferry *f = s->cache->ferry;

    if (!f)
        return;
    for (uint32_t i = 0; f->load && i < f->n_slot; i++)
        if (f->load[i].come)
            s->be->ops->event_close(f->load[i].come);
    s->be->ops->mem_free(s->be, &f->mem);
    kvd_free(f->load);
    kvd_free(f);
    s->cache->ferry = NULL;
}

uint32_t kv_ferry_slots(const kv_store *s)
{
    return s->cache->ferry->n_slot;
}

kvd_mem kv_ferry_mem(const kv_store *s)
{
    return s->cache->ferry->mem;
}

uint64_t kv_ferry_at(const kv_store *s, uint32_t slot, bool aux)
{
    const kv_ferry *f = s->cache->ferry;

    return slot * f->slot_bytes + (aux ? f->aux_at : 0);
}

/* ---- to the block store ----------------------------------------------------------------- */

static load *load_at(kv_ferry *f, uint32_t i)
{
    return &f->load[(f->first + i) % f->n_slot];
}

static uint8_t *slot_of(const kv_ferry *f, const load *l, uint32_t i)
{
    return (uint8_t *)f->mem.ptr + (l->first + i) % f->n_slot * f->slot_bytes;
}

void kv_ferry_drop(kv_store *s, kv_disk_put put)
{
    kv_ferry *f = s->cache->ferry;

    for (uint32_t i = 0; i < f->n_load; i++)
        if (load_at(f, i)->unit.put == put)
            load_at(f, i)->unit.put = KV_DISK_NONE;
    kv_disk_put_abort(s->cache->disk, put);
}

/* Nothing of what is on its way will come. */
static void drop_all(kv_store *s)
{
    kv_ferry *f = s->cache->ferry;

    for (uint32_t i = 0; i < f->n_load; i++)
        if (load_at(f, i)->unit.put != KV_DISK_NONE)
            kv_cache_lost(s, load_at(f, i)->unit.put);
    f->n_load = f->n_used = 0;
}

/* One lane of a load: where it lies, or gathered from several places. */
static kvd_status put_lane(kv_store *s, const load *l, uint32_t h, kvd_err *err)
{
    kv_cache      *c     = s->cache;
    kv_ferry      *f     = c->ferry;
    const uint32_t lane  = l->layer * s->params.n_kv_head + h;
    const uint64_t bytes = s->block_chunks * s->packed_bytes, aux = s->index.head_stride;
    uint8_t       *at;

    if (l->unit.n_tail > 0)
        return kv_cache_put_tail_lane(s, &l->unit, lane,
                                      slot_of(f, l, 0) + h * s->layout.head_stride, err);
    if (l->n == 1) {
        at = slot_of(f, l, 0);
        return kv_disk_put_lane(c->disk, l->unit.put, lane, at + h * bytes,
                                at + f->aux_at + h * aux, err);
    }
    for (uint32_t i = 0; i < l->n; i++) {
        at = slot_of(f, l, i);
        memcpy(c->gather + i * bytes, at + h * bytes, (size_t)bytes);
        memcpy(c->aux + i * aux, at + f->aux_at + h * aux, (size_t)aux);
    }
    return kv_disk_put_lane(c->disk, l->unit.put, lane, c->gather, c->aux, err);
}

/* false: the block store would have to wait. */
static bool put_load(kv_store *s, load *l, bool wait)
{
    kvd_err    err = { 0 };
    kvd_status st  = KVD_OK;

    const kv_disk_put put = l->unit.put;

    for (; put != KV_DISK_NONE && l->n_put < s->params.n_kv_head && st == KVD_OK; l->n_put++) {
        if (!wait && kv_disk_put_waits(s->cache->disk, put))
            return false;
        st = put_lane(s, l, l->n_put, &err);
    }
    if (st == KVD_OK && put != KV_DISK_NONE && l->last)
        st = kv_disk_put_commit(s->cache->disk, put, &err);
    if (st != KVD_OK) {
        kv_cache_tell(s->cache, &err);
        kv_cache_lost(s, put);
    }
    return true;
}

static kvd_status drain(kv_store *s, bool wait, kvd_err *err)
{
    kv_ferry  *f  = s->cache->ferry;
    kvd_status st = KVD_OK;

    while (f->n_load > 0 && st == KVD_OK) {
        load *l = load_at(f, 0);

        st = s->be->ops->event_poll(l->come, err);
        if (st == KVD_E_BUSY && !wait)
            return KVD_OK;
        if (st == KVD_E_BUSY)
            st = s->be->ops->stream_sync(f->st, err);
        if (st != KVD_OK)
            break;
        if (!put_load(s, l, wait))
            return KVD_OK;
        f->n_used -= l->n;
        f->first = (f->first + 1) % f->n_slot;
        f->n_load--;
    }
    if (st != KVD_OK)
        drop_all(s);
    return st;
}

kvd_status kv_ferry_drain(kv_store *s, bool wait, kvd_err *err)
{
    kvd_status st = KVD_OK;
    bool       was;

    if (!s->cache || !s->cache->ferry)
        return KVD_OK;
    was = kvd_alloc_guard(false); /* the block store has its own limits */
    st  = drain(s, wait, err);
    kvd_alloc_guard(was);
    return st;
}

/* ---- from the device -------------------------------------------------------------------- */

/* Block b of a layer, whose lanes lie raw at pool offset `at`: records as below the device, index.
 */
static kvd_status bring_block(kv_store *s, kvd_stream *st, uint32_t slot, uint32_t seq,
                              uint32_t layer, uint32_t b, uint64_t at, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    const kv_ferry        *f   = s->cache->ferry;
    const uint32_t         n_h = s->params.n_kv_head;
    const uint64_t         off = slot * f->slot_bytes, aux = s->index.head_stride;
    uint64_t *const        from = (uint64_t *)(void *)((uint8_t *)f->mem.ptr + off + f->list_at);
    uint64_t *const param = from + n_h, *const to = param + n_h;
    const kvd_record_pack_args a = { .format    = s->record,
                                     .n         = n_h,
                                     .src       = s->pool.ptr,
                                     .param     = s->landmarks.ptr,
                                     .dst       = f->mem.ptr,
                                     .src_off   = from,
                                     .param_off = param,
                                     .dst_off   = to };

    if (s->record.type == KVD_RECORD_RAW) {
        KVD_TRY(ops->copy(st, f->mem, off, s->pool, at, n_h * s->layout.head_stride, err));
    } else {
        for (uint32_t h = 0; h < n_h; h++) {
            from[h]  = at + h * s->layout.head_stride;
            param[h] = kv_params_of_block(s, seq, layer * n_h + h, b);
            to[h]    = off + h * s->block_chunks * s->packed_bytes;
        }
        KVD_TRY(ops->record_pack(st, &a, err));
    }
    return ops->copy(st, f->mem, off + f->aux_at, s->landmarks,
                     s->seq[seq].iblock[b] + layer * n_h * aux, n_h * aux, err);
}

static kvd_status bring_tail(kv_store *s, kvd_stream *st, uint32_t slot, uint32_t seq,
                             uint32_t layer, uint32_t b, kvd_err *err)
{
    const kv_ferry *f = s->cache->ferry;

    return s->be->ops->copy(st, f->mem, slot * f->slot_bytes, s->pool,
                            kv_layer_of(s, s->seq[seq].block[b], layer),
                            s->params.n_kv_head * s->layout.head_stride, err);
}

kvd_status kv_ferry_bring(kv_store *s, kvd_stream *st, const kv_ferry_unit *u, uint32_t layer,
                          const uint64_t *layer_at, kvd_err *err)
{
    kv_ferry  *f = s->cache->ferry;
    kvd_status rc;
    load      *l;

    kvd_assert(u->n > 0 && u->n <= f->n_slot);
    while (f->n_slot - f->n_used < u->n)
        KVD_TRY(kv_ferry_drain(s, true, err));
    l     = load_at(f, f->n_load);
    *l    = (load){ .unit = *u, .layer = layer, .first = f->slot, .n = u->n, .come = l->come };
    f->st = st;
    for (uint32_t i = 0; i < u->n; i++) {
        const uint32_t slot = (f->slot + i) % f->n_slot, b = u->first + i;

        rc = u->n_tail ? bring_tail(s, st, slot, u->seq, layer, b, err)
                       : bring_block(s, st, slot, u->seq, layer, b, layer_at[b], err);
        if (rc != KVD_OK)
            return rc;
    }
    KVD_TRY(s->be->ops->event_record(l->come, st, err));
    f->slot = (f->slot + u->n) % f->n_slot;
    f->n_used += u->n;
    f->n_load++;
    return KVD_OK;
}

kvd_status kv_ferry_commit(kv_store *s, kv_disk_put put, kvd_err *err)
{
    kv_ferry *f = s->cache->ferry;

    for (uint32_t i = f->n_load; i-- > 0;) {
        if (load_at(f, i)->unit.put == put) {
            load_at(f, i)->last = true;
            return KVD_OK;
        }
    }
    return kv_disk_put_commit(s->cache->disk, put, err); /* all of it is there already */
}
