/* SPDX-License-Identifier: Apache-2.0 */
/* backend_stamps.c - see kvd_stamps in backend.h.
 *
 * The device's clock has a zero of its own.  When the host has waited for the last of a batch's
 * spans it takes that span's end for now: late by what a wait takes to return, some microseconds.
 *
 * Owns: pinned memory with a beginning and an end for each span.  Thread: the backend's caller. */
#include "backend/backend.h"

typedef struct stamp_span {
    kvd_trace_kind kind;
    uint32_t       track, layer, n;
} stamp_span;

struct kvd_stamps {
    kvd_backend *be;
    kvd_mem      mem; /* [n_max][2] nanoseconds */
    uint32_t     n, n_max;
    stamp_span   span[];
};

kvd_status kvd_stamps_open(kvd_stamps **out, kvd_backend *be, uint32_t n_max, kvd_err *err)
{
    kvd_stamps *s = kvd_calloc(1, sizeof(*s) + n_max * sizeof(s->span[0]));
    kvd_status  st;

    *out = NULL;
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the device's trace");
    s->be    = be;
    s->n_max = n_max;
    st       = be->ops->mem_alloc(be, KVD_MEM_PINNED, 16ull * n_max, &s->mem, err);
    if (st != KVD_OK) {
        kvd_free(s);
        return st;
    }
    *out = s;
    return KVD_OK;
}

void kvd_stamps_close(kvd_stamps *s)
{
    if (s)
        s->be->ops->mem_free(s->be, &s->mem);
    kvd_free(s);
}

kvd_status kvd_stamp_begin(kvd_stamps *s, kvd_stream *st, kvd_trace_kind kind, uint32_t track,
                           uint32_t layer, uint32_t n, uint32_t *span, kvd_err *err)
{
    *span = KVD_STAMP_NONE;
    if (!s || s->n == s->n_max)
        return KVD_OK;
    *span          = s->n++;
    s->span[*span] = (stamp_span){ kind, track, layer, n };
    return s->be->ops->stamp(st, (uint64_t *)s->mem.ptr + 2 * (size_t)*span, err);
}

kvd_status kvd_stamp_end(kvd_stamps *s, kvd_stream *st, uint32_t span, kvd_err *err)
{
    return span == KVD_STAMP_NONE
               ? KVD_OK
               : s->be->ops->stamp(st, (uint64_t *)s->mem.ptr + 2 * (size_t)span + 1, err);
}

void kvd_stamps_take(kvd_stamps *s, kvd_trace *t)
{
    const uint64_t  now  = kvd_now_ns();
    const uint64_t *at   = s ? s->mem.ptr : NULL;
    uint64_t        last = 0;

    for (uint32_t i = 0; s && i < s->n; i++)
        last = kvd_max_u64(last, at[2 * i + 1]);
    for (uint32_t i = 0; s && i < s->n; i++)
        kvd_trace_add_track(t, s->span[i].track, s->span[i].kind, now - (last - at[2 * i]),
                            now - (last - at[2 * i + 1]), s->span[i].layer, s->span[i].n);
    if (s)
        s->n = 0;
}

void kvd_stamps_drop(kvd_stamps *s)
{
    if (s)
        s->n = 0;
}
