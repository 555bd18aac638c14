/* SPDX-License-Identifier: Apache-2.0 */
/* split.c - every op is wrapped: DEVICE memory is accessible while it runs and at no other time. */
#include "support/split.h"

#include <stdlib.h>
#include <sys/mman.h>

#define N_MAX 64

static const kvd_backend_ops *real;
static kvd_backend_ops        split_ops;
static kvd_mem                held[N_MAX];

static void check(bool ok)
{
    if (!ok)
        abort();
}

static void allow(int access)
{
    for (int i = 0; i < N_MAX; i++) {
        if (held[i].ptr)
            check(mprotect(held[i].ptr, held[i].bytes, access) == 0);
    }
}

#define AROUND(call)               \
    kvd_status st_;                \
                                   \
    allow(PROT_READ | PROT_WRITE); \
    st_ = real->call;              \
    allow(PROT_NONE);              \
    return st_;

#define WRAP(op)                                                                         \
    static kvd_status split_##op(kvd_stream *st, const kvd_##op##_args *a, kvd_err *err) \
    {                                                                                    \
        AROUND(op(st, a, err))                                                           \
    }

WRAP(embed)
WRAP(rms_norm)
WRAP(head_norm)
WRAP(matmul)
WRAP(rope)
WRAP(swiglu)
WRAP(kv_append)
WRAP(attn)
WRAP(index_build)
WRAP(zone_build)
WRAP(select)
WRAP(attn_span)
WRAP(attn_zone)
WRAP(window)
WRAP(window_spans)
WRAP(window_fetch)
WRAP(record_copy)
WRAP(record_pack)
WRAP(record_unpack)

static kvd_status split_copy(kvd_stream *st, kvd_mem dst, uint64_t dst_off, kvd_mem src,
                             uint64_t src_off, uint64_t bytes, kvd_err *err)
{
    AROUND(copy(st, dst, dst_off, src, src_off, bytes, err))
}

static kvd_status split_fill(kvd_stream *st, kvd_mem mem, uint64_t off, uint64_t pitch,
                             uint64_t row_bytes, uint64_t n_row, uint8_t value, kvd_err *err)
{
    AROUND(fill(st, mem, off, pitch, row_bytes, n_row, value, err))
}

static kvd_status split_alloc(kvd_backend *be, kvd_mem_kind kind, uint64_t bytes, kvd_mem *out,
                              kvd_err *err)
{
    int i = 0;

    if (kind != KVD_MEM_DEVICE || bytes == 0)
        return real->mem_alloc(be, kind, bytes, out, err);
    while (held[i].ptr)
        check(++i < N_MAX);
    out->ptr = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(out->ptr != MAP_FAILED);
    out->bytes = bytes;
    out->kind  = kind;
    held[i]    = *out;
    return KVD_OK;
}

static void split_free(kvd_backend *be, kvd_mem *m)
{
    for (int i = 0; i < N_MAX; i++) {
        if (m->ptr && held[i].ptr == m->ptr) {
            munmap(m->ptr, m->bytes);
            held[i] = *m = (kvd_mem){ 0 };
            return;
        }
    }
    real->mem_free(be, m);
}

void split_begin(kvd_backend *be)
{
    real                    = be->ops;
    split_ops               = *real;
    split_ops.embed         = split_embed;
    split_ops.rms_norm      = split_rms_norm;
    split_ops.head_norm     = split_head_norm;
    split_ops.matmul        = split_matmul;
    split_ops.rope          = split_rope;
    split_ops.swiglu        = split_swiglu;
    split_ops.kv_append     = split_kv_append;
    split_ops.attn          = split_attn;
    split_ops.index_build   = split_index_build;
    split_ops.zone_build    = split_zone_build;
    split_ops.select        = split_select;
    split_ops.attn_span     = split_attn_span;
    split_ops.attn_zone     = split_attn_zone;
    split_ops.window        = split_window;
    split_ops.window_spans  = split_window_spans;
    split_ops.window_fetch  = split_window_fetch;
    split_ops.record_copy   = split_record_copy;
    split_ops.record_pack   = split_record_pack;
    split_ops.record_unpack = split_record_unpack;
    split_ops.copy          = split_copy;
    split_ops.fill          = split_fill;
    split_ops.mem_alloc     = split_alloc;
    split_ops.mem_free      = split_free;
    be->ops                 = &split_ops;
    be->unified             = false;
}

void split_end(kvd_backend *be)
{
    for (int i = 0; i < N_MAX; i++)
        check(!held[i].ptr);
    be->ops     = real;
    be->unified = true;
}
