/* SPDX-License-Identifier: Apache-2.0 */
/* model_place.c - weights moved to a device whose memory is not the host's.
 *
 * Every matrix and vector gets its place in one allocation, is copied there as it is stored, and
 * the model points to the copy from then on.  The file's mapping is not read any more.
 * Owns: the allocation, until model_displace().  Thread: the one that opens the model. */
#include "model/model_impl.h"

#define PLACE_ALIGN 256u /* of a matrix or vector: what wide loads want */

typedef struct placer {
    model      *m;
    kvd_stream *stream;
    uint64_t    bytes; /* placed so far */
    kvd_err    *err;
} placer;

/* Copies or, while there is no memory yet, only counts. */
static kvd_status place(placer *p, const void **at, uint64_t bytes)
{
    kvd_mem       *device = &p->m->device;
    const uint64_t off    = p->bytes;
    const kvd_mem  from   = { .ptr = (void *)(uintptr_t)*at, .bytes = bytes, .kind = KVD_MEM_HOST };

    if (!*at)
        return KVD_OK;
    p->bytes += kvd_align_up(bytes, PLACE_ALIGN);
    if (!device->ptr)
        return KVD_OK;
    KVD_TRY(p->m->be->ops->copy(p->stream, *device, off, from, 0, bytes, p->err));
    *at = (const uint8_t *)device->ptr + off;
    return KVD_OK;
}

static kvd_status place_weight(placer *p, kvd_weight *w)
{
    return place(p, &w->data, w->n_row * w->row_bytes);
}

static kvd_status place_vector(placer *p, const float **v, uint64_t n)
{
    const void *at = *v;

    KVD_TRY(place(p, &at, n * sizeof(float)));
    *v = at;
    return KVD_OK;
}

static kvd_status place_layer(placer *p, model_layer *l)
{
    const model_hparams *hp  = &p->m->hp;
    const uint64_t       n_q = (uint64_t)hp->n_head * hp->head_dim;
    const uint64_t       n_k = (uint64_t)hp->n_kv_head * hp->head_dim;

    KVD_TRY(place_weight(p, &l->q));
    KVD_TRY(place_weight(p, &l->k));
    KVD_TRY(place_weight(p, &l->v));
    KVD_TRY(place_weight(p, &l->o));
    KVD_TRY(place_weight(p, &l->gate));
    KVD_TRY(place_weight(p, &l->up));
    KVD_TRY(place_weight(p, &l->down));
    KVD_TRY(place_vector(p, &l->attn_norm, hp->n_embd));
    KVD_TRY(place_vector(p, &l->ffn_norm, hp->n_embd));
    KVD_TRY(place_vector(p, &l->q_norm, hp->head_dim));
    KVD_TRY(place_vector(p, &l->k_norm, hp->head_dim));
    KVD_TRY(place_vector(p, &l->q_bias, n_q));
    KVD_TRY(place_vector(p, &l->k_bias, n_k));
    return place_vector(p, &l->v_bias, n_k);
}

static kvd_status place_all(placer *p)
{
    model     *m    = p->m;
    const bool tied = m->output.data == m->embd.data;

    p->bytes = 0;
    KVD_TRY(place_weight(p, &m->embd));
    if (tied)
        m->output.data = m->embd.data;
    else
        KVD_TRY(place_weight(p, &m->output));
    KVD_TRY(place_vector(p, &m->output_norm, m->hp.n_embd));
    for (uint32_t il = 0; il < m->hp.n_layer; il++)
        KVD_TRY(place_layer(p, &m->layer[il]));
    return KVD_OK;
}

uint64_t model_place_bytes(const model *m)
{
    model  all = *m;
    placer p   = { .m = &all };

    if (m->device.ptr)
        return m->device.bytes;
    return place_all(&p) == KVD_OK ? p.bytes : 0; /* which counts only, and fails nowhere */
}

kvd_status model_place(model *m, kvd_backend *be, kvd_stream *stream, kvd_err *err)
{
    placer p = { .m = m, .stream = stream, .err = err };

    kvd_assert(!m->device.ptr);
    m->be = be;
    KVD_TRY(place_all(&p));
    KVD_TRY(be->ops->mem_alloc(be, KVD_MEM_DEVICE, p.bytes, &m->device, err));
    KVD_TRY(place_all(&p));
    return be->ops->stream_sync(stream, err);
}

void model_displace(model *m)
{
    if (m && m->be)
        m->be->ops->mem_free(m->be, &m->device);
}
