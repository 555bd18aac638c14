/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_zone.c - means of keys and values for the estimation zone, for "cpu" and "ref" alike.
 *
 * Float sums in the order of the tokens, without contraction: the same K and V give the same bytes
 * everywhere.  Owns: nothing.  Thread: the backend's caller; a pool item is one lane of one block.
 */
#include "backend/cpu/cpu_index.h"
#include "backend/cpu/cpu_kv.h"

static void zone_add(kvd_dtype type, const uint8_t *row, uint32_t dim, float *sum)
{
    for (uint32_t i = 0; i < dim && type == KVD_DTYPE_F32; i++)
        sum[i] += ((const float *)(const void *)row)[i];
    for (uint32_t i = 0; i < dim && type != KVD_DTYPE_F32; i++)
        sum[i] += kvd_bf16_to_f32(((const uint16_t *)(const void *)row)[i]);
}

static void zone_store(kvd_dtype type, const float *sum, uint32_t dim, float part, uint8_t *row)
{
    for (uint32_t i = 0; i < dim && type == KVD_DTYPE_F32; i++)
        ((float *)(void *)row)[i] = sum[i] * part;
    for (uint32_t i = 0; i < dim && type != KVD_DTYPE_F32; i++)
        ((uint16_t *)(void *)row)[i] = kvd_f32_to_bf16(sum[i] * part);
}

static void zone_item(void *ctx, uint32_t item, uint32_t thread)
{
    const kvd_zone_build_args *a    = ctx;
    const uint32_t             head = item % a->kv.n_kv_head, b = item / a->kv.n_kv_head;
    const uint32_t             n = a->kv.block_tokens / a->zone.block_tokens, dim = a->kv.head_dim;
    const uint64_t             v_off[2] = { 0, cpu_kv_v_off(&a->kv) };
    const uint64_t             z_off[2] = { 0, cpu_kv_v_off(&a->zone) };

    (void)thread;
    for (uint32_t z = 0; z < a->zone.block_tokens; z++) {
        for (int v = 0; v < 2; v++) {
            float sum[KVD_HEAD_DIM_MAX] = { 0 };

            for (uint32_t t = 0; t < n; t++)
                zone_add(a->kv.type, cpu_kv_row(&a->kv, a->block + b, head, z * n + t) + v_off[v],
                         dim, sum);
            zone_store(a->zone.type, sum, dim, 1.0f / (float)n,
                       cpu_kv_row(&a->zone, a->zblock + b, head, z) + z_off[v]);
        }
    }
}

kvd_status cpu_zone_build(kvd_stream *st, const kvd_zone_build_args *a, kvd_err *err)
{
    cpu_backend        *be     = st->be;
    const uint32_t      n_item = a->n_block * a->kv.n_kv_head;
    kvd_zone_build_args args   = *a;

    (void)err;
    cpu_kv_check(&a->kv);
    cpu_kv_check(&a->zone);
    kvd_assert(a->kv.n_kv_head == a->zone.n_kv_head && a->kv.head_dim == a->zone.head_dim);
    kvd_assert(a->kv.head_dim <= KVD_HEAD_DIM_MAX);
    kvd_assert(a->kv.block_tokens % a->zone.block_tokens == 0);
    if (be->pool && n_item > 1) {
        os_pool_run(be->pool, n_item, zone_item, &args);
    } else {
        for (uint32_t i = 0; i < n_item; i++)
            zone_item(&args, i, 0);
    }
    return KVD_OK;
}
