/* SPDX-License-Identifier: Apache-2.0 */
/* engine_rope.c - cosines and sines of positions, for RoPE.  They take a microsecond a token, which
 * a GPU would wait for: there the session keeps those from position 0 on that it has had.
 *
 * Nothing here allocates but open.  Thread: the session's. */
#include <string.h>

#include "engine/engine.h"

uint64_t engine_rope_bytes(const kvd_model *m, uint32_t n_ctx)
{
    return m->be->unified ? 0 : 4ull * n_ctx * model_get_hparams(m->net)->n_rot;
}

kvd_status engine_rope_open(kvd_session *s, kvd_err *err)
{
    const uint64_t bytes = engine_rope_bytes(s->model, s->params.n_ctx);

    if (bytes == 0)
        return KVD_OK;
    s->rope.row = kvd_malloc(bytes); /* touched as far as positions go */
    return s->rope.row ? KVD_OK
                       : kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for its tables");
}

void engine_rope_close(kvd_session *s)
{
    kvd_free(s->rope.row);
}

void engine_rope_rows(kvd_session *s, uint32_t first, uint32_t n, bool longs, float *to)
{
    const model   *net   = s->model->net;
    const uint32_t n_rot = model_get_hparams(net)->n_rot;
    engine_rope   *rope  = &s->rope;

    if (rope->longs != longs)
        rope->n = 0;
    rope->longs = longs;
    if (!rope->row || first > rope->n) {
        for (uint32_t i = 0; i < n; i++)
            model_rope_row(net, first + i, longs, to + (size_t)i * n_rot);
        return;
    }
    for (; rope->n < first + n; rope->n++)
        model_rope_row(net, rope->n, longs, rope->row + (size_t)rope->n * n_rot);
    memcpy(to, rope->row + (size_t)first * n_rot, (size_t)n * n_rot * sizeof(*to));
}
