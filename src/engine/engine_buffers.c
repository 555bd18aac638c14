/* SPDX-License-Identifier: Apache-2.0 */
/* engine_buffers.c - the memory that batches work on: activations on the device, and what the host
 * writes for it or reads from it.  Where memory is unified the two are one and nothing is copied.
 *
 * Owns: two allocations of the backend.  Thread: the session's. */
#include "engine/engine.h"

#define SEGMENT_TOKENS (128u << 10) /* in contexts of up to 256K tokens; */
#define SEGMENT_AREA   (1ull << 35) /* times the context, in longer ones; */
#define SEGMENT_SHARE  24u          /* and not more than this share of the device's memory */

typedef struct buffer_part {
    void   **at;
    uint64_t row, n_row; /* bytes */
    bool     shared;
} buffer_part;

/* A longer context leaves less room for it beside the stage and the index, and what it costs, that
 * earlier segments come up once more for every layer, stays small against attention. */
uint32_t engine_segment_tokens(const kvd_model *m, uint32_t n_row, uint32_t n_ctx)
{
    const uint64_t    row = 4ull * model_get_hparams(m->net)->n_embd;
    uint64_t          n   = kvd_min_u64(SEGMENT_TOKENS, SEGMENT_AREA / n_ctx);
    kvd_device_memory d;

    if (!m->be->unified) {
        m->be->ops->memory(m->be, &d);
        n = kvd_min_u64(n, (m->device_memory ? m->device_memory : d.total) / SEGMENT_SHARE / row);
    }
    return (uint32_t)kvd_max_u64(1, n / n_row) * n_row;
}

/* Lays the buffers out one behind the other in two pieces; b without memory is only measured. */
static void place(engine_buffers *b, const kvd_model *m, const kvd_session_params *p,
                  uint32_t n_row, bool resident, uint64_t *device_bytes, uint64_t *shared_bytes)
{
    const uint64_t segment = engine_segment_tokens(m, n_row, p->n_ctx);
    const uint64_t n_all   = resident ? 0 : kvd_min_u64(segment, p->n_ctx); /* else none goes so */
    const uint64_t n_max = kvd_max_u64(n_row, n_all), mirror = m->be->unified ? 0 : 1;
    const model_hparams *hp   = model_get_hparams(m->net);
    const uint64_t       n_q  = 4ull * hp->n_head * hp->head_dim;
    const uint64_t       n_kv = 4ull * hp->n_kv_head * hp->head_dim;
    const uint64_t       n_x = 4ull * hp->n_embd, n_f = 4ull * hp->n_ff, n_v = 4ull * hp->n_vocab;
    const uint64_t       n_part = n_all ? n_all / n_row + 2 : 0;
    const buffer_part    part[] = {
           { (void **)&b->x, n_x, n_row, false },
           { (void **)&b->xn, n_x, n_row, false },
           { (void **)&b->q, n_q, n_row, false },
           { (void **)&b->k, n_kv, n_row, false },
           { (void **)&b->v, n_kv, n_row, false },
           { (void **)&b->att, n_q, n_row, false },
           { (void **)&b->gate, n_f, n_row, false },
           { (void **)&b->up, n_f, n_row, false },
           { (void **)&b->all_x, n_x, n_all, false },
           { (void **)&b->out, n_v, mirror * p->n_logits, false },
           { (void **)&b->logits, n_v, p->n_logits, true },
           { (void **)&b->best, KVD_BEST_MAX * sizeof(*b->best), p->n_logits, true },
           { (void **)&b->out_part, sizeof(*b->out_part), p->n_batch, true },
           { (void **)&b->view_part, 2 * sizeof(*b->view_part), p->n_batch, true },
           { (void **)&b->all_part, sizeof(*b->all_part), n_part, true },
           { (void **)&b->row_from, 2 * sizeof(*b->row_from), p->n_batch, true },
           { (void **)&b->row_to, 2 * sizeof(*b->row_to), p->n_batch, true },
           { (void **)&b->part, sizeof(*b->part), p->n_batch, true }, /* from here on mirrored */
           { (void **)&b->sparse_row, sizeof(*b->sparse_row), p->n_seq, true },
           { (void **)&b->token, 4, n_max, true },
           { (void **)&b->cos_sin_host, 4ull * hp->n_rot, n_max, true },
    };
    uint64_t off[2] = { 0, 0 };

    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        uint8_t *base = part[i].shared ? b->shared.ptr : b->mem.ptr;

        if (base)
            *part[i].at = base + off[part[i].shared];
        if (part[i].at == (void **)&b->part)
            b->listed_at = off[1];
        /* limits of model_hparams.c and complete_params() keep this far from 64 bits */
        off[part[i].shared] += kvd_align_up(part[i].row * part[i].n_row, KVD_CACHE_LINE);
    }
    b->listed_bytes = off[1] - b->listed_at;
    b->mirror_at    = off[0];
    *device_bytes   = off[0] + mirror * b->listed_bytes;
    *shared_bytes   = off[1];
}

void engine_buffers_bytes(const kvd_model *m, const kvd_session_params *p, uint32_t n_row,
                          bool resident, uint64_t *device, uint64_t *shared)
{
    engine_buffers b = { 0 };

    place(&b, m, p, n_row, resident, device, shared);
}

kvd_status engine_buffers_open(engine_buffers *b, const kvd_model *m, const kvd_session_params *p,
                               uint32_t n_row, bool resident, kvd_err *err)
{
    uint64_t device, shared;

    *b = (engine_buffers){ .unified = m->be->unified };
    place(b, m, p, n_row, resident, &device, &shared);
    KVD_TRY(m->be->ops->mem_alloc(m->be, KVD_MEM_DEVICE, device, &b->mem, err));
    KVD_TRY(m->be->ops->mem_alloc(m->be, KVD_MEM_PINNED, shared, &b->shared, err));
    place(b, m, p, n_row, resident, &device, &shared);
    b->cos_sin = engine_dev(b, b->cos_sin_host);
    if (b->unified)
        b->out = b->logits;
    return KVD_OK;
}

void engine_buffers_close(engine_buffers *b, kvd_backend *be)
{
    be->ops->mem_free(be, &b->mem);
    be->ops->mem_free(be, &b->shared);
}

static uint64_t offset_of(const kvd_mem *m, const void *at)
{
    return (uint64_t)((const uint8_t *)at - (const uint8_t *)m->ptr);
}

void *engine_dev(const engine_buffers *b, const void *listed)
{
    if (b->unified || offset_of(&b->shared, listed) < b->listed_at)
        return (void *)(uintptr_t)listed;
    return (uint8_t *)b->mem.ptr + b->mirror_at + (offset_of(&b->shared, listed) - b->listed_at);
}

/* cos_sin is the last of what is listed, so only its rows in use go up. */
kvd_status engine_buffers_upload(kvd_session *s, uint32_t n, kvd_err *err)
{
    const engine_buffers *b     = &s->buf;
    const uint64_t        n_rot = model_get_hparams(s->model->net)->n_rot;

    if (b->unified)
        return KVD_OK;
    return s->model->be->ops->copy(
        s->model->stream, b->mem, b->mirror_at, b->shared, b->listed_at,
        offset_of(&b->shared, b->cos_sin_host) - b->listed_at + 4ull * n * n_rot, err);
}

kvd_status engine_buffers_download(kvd_session *s, uint32_t n, kvd_err *err)
{
    const engine_buffers *b = &s->buf;

    if (b->unified)
        return KVD_OK;
    return s->model->be->ops->copy(s->model->stream, b->shared, offset_of(&b->shared, b->logits),
                                   b->mem, offset_of(&b->mem, b->out),
                                   4ull * n * model_get_hparams(s->model->net)->n_vocab, err);
}
