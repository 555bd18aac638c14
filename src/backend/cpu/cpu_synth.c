/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_synth.c - what measurements of speed need: made-up rows.
 *
 * Serves "ref" as well, on the caller alone.
 * Owns: nothing.  Thread: the backend's caller; rows are shared out by the pool. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/synth.h"
#include "base/half.h"

typedef struct synth_row {
    const kvd_kv_seq *seq;
    uint32_t          stream, pos;
    uint64_t          row; /* of the batch */
} synth_row;

/* Row number i of all rows that the sequences have. */
static synth_row find_row(const kvd_synth_args *a, uint32_t i)
{
    uint32_t s = 0;

    for (; i >= a->seq[s].n_row; s++)
        i -= a->seq[s].n_row; /* the caller promises that there is one */
    return (synth_row){ &a->seq[s], a->stream + s, a->seq[s].n_past + i, a->seq[s].first_row + i };
}

static void make_q(const kvd_synth_args *a, const synth_row *r)
{
    const uint32_t group = a->n_head / a->kv.n_kv_head;

    for (uint32_t h = 0; h < a->n_head; h++) {
        const uint32_t seed  = synth_seed(SYNTH_Q, r->stream, a->layer, h);
        const float    noise = synth_noise(a->reuse, a->layer, h / group);
        float         *q     = a->q + r->row * a->q_stride + (uint64_t)h * a->kv.head_dim;

        for (uint32_t d = 0; d < a->kv.head_dim; d++)
            q[d] = synth_q_at(seed, d, r->pos, noise);
    }
}

static void store(const kvd_kv_layout *kv, uint8_t *row, uint32_t d, float x)
{
    const uint16_t h = kvd_f32_to_bf16(x);

    if (kv->type == KVD_DTYPE_F32)
        memcpy(row + 4 * (size_t)d, &x, sizeof(x));
    else
        memcpy(row + 2 * (size_t)d, &h, sizeof(h));
}

static void make_kv(const kvd_synth_args *a, const synth_row *r)
{
    for (uint32_t h = 0; h < a->kv.n_kv_head; h++) {
        const uint32_t ks = synth_seed(SYNTH_K, r->stream, a->layer, h);
        const uint32_t vs = synth_seed(SYNTH_V, r->stream, a->layer, h);
        uint8_t       *k  = cpu_kv_row(&a->kv, r->seq->block, h, r->pos);

        for (uint32_t d = 0; d < a->kv.head_dim; d++) {
            store(&a->kv, k, d, synth_k_at(ks, d, r->pos));
            store(&a->kv, k + cpu_kv_v_off(&a->kv), d, synth_v_at(vs, d, r->pos));
        }
    }
}

static void synth_item(void *ctx, uint32_t item, uint32_t thread)
{
    const kvd_synth_args *a = ctx;
    const synth_row       r = find_row(a, item);

    (void)thread;
    if (a->q)
        make_q(a, &r);
    make_kv(a, &r);
}

kvd_status cpu_synth(kvd_stream *st, const kvd_synth_args *a, kvd_err *err)
{
    kvd_synth_args copy = *a;
    uint32_t       n    = 0;

    (void)err;
    cpu_kv_check(&a->kv);
    for (uint32_t s = 0; s < a->n_seq; s++)
        n += a->seq[s].n_row;
    if (st->be->pool)
        os_pool_run(st->be->pool, n, synth_item, &copy);
    for (uint32_t i = 0; i < n && !st->be->pool; i++)
        synth_item(&copy, i, 0);
    return KVD_OK;
}
