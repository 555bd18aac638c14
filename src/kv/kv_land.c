/* SPDX-License-Identifier: Apache-2.0 */
/* kv_land.c - where records from disk lie until a device with memory of its own has taken them.
 *
 * A disk writes to host memory, so such a device needs places in between: pinned, bounded, planned.
 * They are records behind those of the host tier, so one that stays is not copied: its place and a
 * record of the tier change roles.  Only the first n_now stay what they are, a contiguous run for
 * batches that are waited for.  From a place records go up by ops; it is written again only after
 * the stream has passed them, which callers see to.
 *
 * Owns: the lists, and which places flights have.  Thread: the session's. */
#include "kv/kv_cache.h"

#define NOW_BYTES  (16ull << 20)
#define LATE_BYTES (64ull << 20)
#define NOW_MAX    8192u
#define LATE_MIN   8u

static uint64_t packed_bytes(const kv_params *p)
{
    const kvd_record_format f = kv_record_format(p);

    return kvd_record_bytes(&f);
}

/* A run of a whole block of a lane fits at least. */
static uint32_t now_records(const kv_params *p)
{
    const uint64_t most = p->land_records ? p->land_records : NOW_BYTES / packed_bytes(p);

    return (uint32_t)kvd_max_u64(KV_BLOCK_TOKENS / p->chunk_tokens, kvd_min_u64(most, NOW_MAX));
}

static uint32_t late_records(const kv_params *p)
{
    const uint64_t most = p->land_records ? p->land_records : LATE_BYTES / packed_bytes(p);
    const uint64_t all  = (uint64_t)p->n_layer * kv_tier_lag(p) * p->n_seq * p->n_kv_head *
                         (p->window_tokens / p->chunk_tokens);

    return (uint32_t)kvd_max_u64(LATE_MIN, kvd_min_u64(most, all));
}

uint64_t kv_land_records(const kv_params *p)
{
    return p->apart ? (uint64_t)now_records(p) + late_records(p) : 0;
}

/* Of one place: its number, and its entries in the list. */
static uint64_t list_bytes(void)
{
    return 3 * sizeof(uint64_t) + 2 * sizeof(uint32_t);
}

uint64_t kv_land_bytes(const kv_params *p)
{
    return kv_land_records(p) * (packed_bytes(p) + list_bytes() + sizeof(uint32_t));
}

kvd_status kv_land_open(kv_store *s, kv_land *l, kvd_err *err)
{
    const kv_params *p = &s->params;
    uint64_t         n;

    if (!p->apart)
        return KVD_OK;
    l->n_now  = now_records(p);
    l->n_late = late_records(p);
    n         = kv_land_records(p);
    KVD_TRY(s->be->ops->mem_alloc(s->be, KVD_MEM_PINNED, n * list_bytes(), &l->mem, err));
    l->free = kvd_calloc(l->n_late, sizeof(*l->free));
    if (!l->free)
        return kvd_fail(err, KVD_E_NOMEM, 0, "disk tier: no memory for its tables");
    l->list.src    = l->mem.ptr;
    l->list.dst    = l->list.src + n;
    l->list.param  = l->list.dst + n;
    l->list.number = (uint32_t *)(l->list.param + n);
    l->record      = l->list.number + n;
    for (uint32_t i = 0; i < n; i++)
        l->record[i] = (uint32_t)(s->n_hrecord + i);
    for (; l->n_free < l->n_late; l->n_free++)
        l->free[l->n_free] = l->n_now + l->n_free;
    return KVD_OK;
}

void kv_land_close(kv_store *s, kv_land *l)
{
    s->be->ops->mem_free(s->be, &l->mem);
    kvd_free(l->free);
    *l = (kv_land){ 0 };
}

uint8_t *kv_land_at(const kv_store *s, const kv_land *l, uint32_t place)
{
    return (uint8_t *)s->host.ptr + l->record[place] * s->packed_bytes;
}

bool kv_land_take(const kv_store *s, kv_land *l, kv_arrival *a, uint32_t n)
{
    if (n > l->n_free)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        a[i].land   = l->free[--l->n_free];
        a[i].packed = kv_land_at(s, l, a[i].land);
    }
    return true;
}

void kv_land_give(kv_land *l, const kv_arrival *a, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;) {
        if (l->free && a[i].land >= l->n_now)
            l->free[l->n_free++] = a[i].land;
    }
}

kvd_status kv_land_up(kv_store *s, kvd_stream *st, kv_land *l, const kv_arrival *a, uint32_t n,
                      kvd_err *err)
{
    uint64_t n_list = 0;

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t lane = (uint32_t)(a[i].lane - kv_lane(s, a[i].seq, 0));
        const uint64_t from = (uint64_t)(a[i].packed - (uint8_t *)s->host.ptr);

        for (uint32_t k = 0; k < a[i].n; k++)
            n_list =
                kv_list_up(s, &l->list, a[i].seq, lane, a[i].chunk + k, from + k * s->packed_bytes,
                           a[i].at + k * s->layout.record_bytes, n_list);
    }
    return kv_bring(s, st, &l->list, s->host.ptr, n_list, err);
}
