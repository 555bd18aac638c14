/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_record.c - packing and unpacking of records, spread over the pool; "ref" takes the portable
 * kernels on the caller's thread, since results are the same bits everywhere.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cpu/cpu_record.h"

#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_ref.h"

#define UNPACK_ITEM 64u /* records */

typedef struct record_job {
    const cpu_record_kernels     *k;
    const kvd_record_pack_args   *pack;
    const kvd_record_unpack_args *unpack;
    cpu_index_shape               keys; /* of VALUES */
} record_job;

const cpu_record_kernels *cpu_record_kernels_of(const cpu_backend *be)
{
    return be->isa >= OS_ISA_AVX2 ? &cpu_record_avx2 : &cpu_record_portable;
}

static void record_check(const kvd_record_format *f)
{
    kvd_assert(f->type != KVD_RECORD_RAW && f->head_dim % 2 == 0 &&
               f->head_dim <= KVD_HEAD_DIM_MAX && f->chunk_tokens <= 16 &&
               KVD_RECORD_GROUP % f->chunk_tokens == 0 && f->block_tokens % KVD_RECORD_GROUP == 0);
}

static void record_keys(record_job *j, const kvd_record_format *f)
{
    if (f->type != KVD_RECORD_VALUES)
        return;
    cpu_index_shape_of(&j->keys, &f->keys);
    kvd_assert(j->keys.has_key && j->keys.dim == f->head_dim);
}

/* The V rows of a lane. */
static void pack_values(const kvd_record_format *f, const uint8_t *src, uint8_t *dst)
{
    const uint64_t raw = kvd_record_raw_bytes(f), packed = kvd_record_bytes(f);

    for (uint32_t c = 0; c < f->block_tokens / f->chunk_tokens; c++)
        memcpy(dst + c * packed, src + c * raw + packed, (size_t)packed);
}

static void pack_item(void *ctx, uint32_t item, uint32_t thread)
{
    const record_job           *j = ctx;
    const kvd_record_pack_args *a = j->pack;

    (void)thread;
    if (a->format.type == KVD_RECORD_VALUES) {
        pack_values(&a->format, (const uint8_t *)a->src + a->src_off[item],
                    (uint8_t *)a->dst + a->dst_off[item]);
        return;
    }
    j->k->pack(&a->format, (const uint8_t *)a->src + a->src_off[item],
               (uint8_t *)a->param + a->param_off[item], (uint8_t *)a->dst + a->dst_off[item]);
}

static void unpack_some(const record_job *j, uint64_t first, uint64_t end)
{
    const kvd_record_unpack_args *a = j->unpack;

    for (uint64_t i = first; i < end; i++) {
        const uint8_t *src   = (const uint8_t *)a->src + a->src_off[i];
        const uint8_t *param = (const uint8_t *)a->param + a->param_off[i];
        uint8_t       *dst   = (uint8_t *)a->dst + a->dst_off[i];

        if (a->format.type == KVD_RECORD_VALUES)
            j->k->unpack_values(&a->format, &j->keys, a->chunk[i], src, param, dst);
        else
            j->k->unpack(&a->format, a->chunk[i], src, param, dst);
    }
}

static void unpack_item(void *ctx, uint32_t item, uint32_t thread)
{
    const record_job *j     = ctx;
    const uint64_t    first = (uint64_t)item * UNPACK_ITEM;

    (void)thread;
    unpack_some(j, first, kvd_min_u64(j->unpack->n, first + UNPACK_ITEM));
}

kvd_status cpu_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err)
{
    cpu_backend *be = st->be;
    record_job   j  = { .k = cpu_record_kernels_of(be), .pack = a };

    (void)err;
    record_check(&a->format);
    if (a->n > 1 && be->base.n_thread > 1) {
        os_pool_run(be->pool, (uint32_t)a->n, pack_item, &j);
        return KVD_OK;
    }
    for (uint32_t i = 0; i < a->n; i++)
        pack_item(&j, i, 0);
    return KVD_OK;
}

kvd_status cpu_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err)
{
    cpu_backend *be = st->be;
    record_job   j  = { .k = cpu_record_kernels_of(be), .unpack = a };

    (void)err;
    record_check(&a->format);
    record_keys(&j, &a->format);
    if (a->n > UNPACK_ITEM && be->base.n_thread > 1)
        os_pool_run(be->pool, (uint32_t)kvd_div_up(a->n, UNPACK_ITEM), unpack_item, &j);
    else
        unpack_some(&j, 0, a->n);
    return KVD_OK;
}

kvd_status cpu_ref_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err)
{
    record_job j = { .k = &cpu_record_portable, .pack = a };

    (void)st;
    (void)err;
    record_check(&a->format);
    for (uint32_t i = 0; i < a->n; i++)
        pack_item(&j, i, 0);
    return KVD_OK;
}

kvd_status cpu_ref_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err)
{
    record_job j = { .k = &cpu_record_portable, .unpack = a };

    (void)st;
    (void)err;
    record_check(&a->format);
    record_keys(&j, &a->format);
    unpack_some(&j, 0, a->n);
    return KVD_OK;
}
