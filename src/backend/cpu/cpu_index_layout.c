/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_layout.c - which indexes there are, and the sections of their lanes.
 * Owns: nothing.  Thread: any. */
#include "backend/index_layout.h"

static bool index_mark_ok(const kvd_index_desc *d)
{
    return d->elem == KVD_INDEX_BF16 || d->elem == KVD_INDEX_INT8 || d->elem == KVD_INDEX_INT4;
}

static bool index_key_ok(const kvd_index_desc *d)
{
    return index_mark_ok(&(kvd_index_desc){ .elem = d->key_elem }) || d->key_elem == KVD_INDEX_INT2;
}

bool kvd_index_valid(const kvd_index_desc *d)
{
    if (d->block_tokens != CPU_INDEX_BLOCK || d->head_dim < 1 || d->head_dim > KVD_HEAD_DIM_MAX)
        return false;
    if (d->chunk_tokens != 4 && d->chunk_tokens != 8 && d->chunk_tokens != 16)
        return false;
    switch (d->kind) {
    case KVD_INDEX_MEAN:
        return index_mark_ok(d);
    case KVD_INDEX_MEAN_STD:
    case KVD_INDEX_BOX:
    case KVD_INDEX_CLUSTER:
        return index_mark_ok(d) && !d->radius;
    case KVD_INDEX_QUANT_K:
        return index_key_ok(d) && !d->radius;
    case KVD_INDEX_CASCADE:
        return index_mark_ok(d) && index_key_ok(d);
    }
    return false;
}

static uint64_t index_section(uint64_t *at, uint64_t bytes)
{
    const uint64_t off = *at;

    *at += kvd_align_up(bytes, 64);
    return off;
}

static cpu_index_plane index_plane(uint64_t *at, kvd_index_elem elem, uint32_t dim, uint32_t n_unit,
                                   uint32_t group)
{
    static const uint32_t bits[KVD_INDEX_ELEM_COUNT] = { 16, 8, 4, 2 };
    cpu_index_plane       p                          = { .elem   = elem,
                                                         .bits   = bits[elem],
                                                         .n_unit = n_unit,
                                                         .group  = group < n_unit ? group : n_unit,
                                                         .dim    = dim };

    if (elem == KVD_INDEX_BF16) {
        p.dim_pad = dim;
    } else {
        p.dim_pad   = (uint32_t)kvd_align_up(dim, cpu_index_per_row(&p));
        p.param_off = index_section(at, (uint64_t)(n_unit / p.group) * 2 * p.dim_pad * 2);
    }
    p.tile_bytes = (uint64_t)p.dim_pad * CPU_INDEX_TILE * p.bits / 8;
    p.code_off   = index_section(at, n_unit / CPU_INDEX_TILE * p.tile_bytes);
    return p;
}

void cpu_index_shape_of(cpu_index_shape *s, const kvd_index_desc *d)
{
    static const uint32_t n_mark[KVD_INDEX_KIND_COUNT] = { 1, 2, 2, 1, 0, 1 };
    const bool            cluster                      = d->kind == KVD_INDEX_CLUSTER;

    kvd_assert(kvd_index_valid(d));
    *s = (cpu_index_shape){ .kind         = d->kind,
                            .n_chunk      = d->block_tokens / d->chunk_tokens,
                            .chunk_tokens = d->chunk_tokens,
                            .dim          = d->head_dim,
                            .n_mark       = n_mark[d->kind],
                            .radius       = d->radius };
    for (uint32_t i = 0; i < s->n_mark; i++)
        s->mark[i] = index_plane(&s->bytes, d->elem, d->head_dim,
                                 cluster ? CPU_INDEX_CENTROID : s->n_chunk, CPU_INDEX_GROUP);
    if (s->radius)
        s->radius_off = index_section(&s->bytes, 2 * (uint64_t)s->n_chunk);
    s->has_key = d->kind == KVD_INDEX_QUANT_K || d->kind == KVD_INDEX_CASCADE;
    if (s->has_key)
        s->key =
            index_plane(&s->bytes, d->key_elem, d->head_dim, d->block_tokens, CPU_INDEX_KGROUP);
    if (cluster)
        s->cluster_off = index_section(&s->bytes, 64 + (uint64_t)s->n_chunk);
}

uint64_t kvd_index_lane_bytes(const kvd_index_desc *d)
{
    cpu_index_shape s;

    cpu_index_shape_of(&s, d);
    return s.bytes;
}
