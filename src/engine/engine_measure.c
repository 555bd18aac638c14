/* SPDX-License-Identifier: Apache-2.0 */
/* engine_measure.c - how fast the stages of a step are, and steps over made-up rows.
 *
 * Times are those of the stream, written by ops between the stages (`stamp`), so they are right in
 * recorded steps, too.  Each mark takes a little time itself, which two in a row tell.  What a step
 * would fetch beside itself it fetches in its place meanwhile: stages follow each other, and their
 * sum is the step.
 *
 * Owns: the memory of the marks, from engine_measure() to the next or the session's end.
 * Thread: the session's. */
#include "engine/engine.h"

#define MARKS_LAYER 5u /* of a layer: after every stage but logits */
#define MARKS_FIRST 2u

static uint32_t n_mark(const kvd_session *s)
{
    return MARKS_FIRST + model_get_hparams(s->model->net)->n_layer * MARKS_LAYER + 1;
}

static kvd_status mark(kvd_session *s, uint32_t i, kvd_err *err)
{
    uint64_t *at = s->measure.at.ptr;

    return at ? s->model->be->ops->stamp(s->model->stream, at + i, err) : KVD_OK;
}

kvd_status engine_mark_begin(kvd_session *s, kvd_err *err)
{
    KVD_TRY(mark(s, 0, err));
    return mark(s, 1, err);
}

kvd_status engine_mark(kvd_session *s, uint32_t layer, kvd_stage stage, kvd_err *err)
{
    return mark(s, MARKS_FIRST + layer * MARKS_LAYER + (uint32_t)stage, err);
}

kvd_status engine_mark_end(kvd_session *s, kvd_err *err)
{
    const engine_measuring *m = &s->measure;

    if (!m->at.ptr)
        return KVD_OK;
    KVD_TRY(mark(s, n_mark(s) - 1, err));
    return s->model->be->ops->copy(s->model->stream, m->seen, 0, m->at, 0, m->at.bytes, err);
}

/* ---- after a step --------------------------------------------------------------------------- */

/* A stage that a step does not have leaves no mark. */
static void add_times(kvd_session *s)
{
    const uint64_t *t    = s->measure.seen.ptr;
    const uint64_t  cost = t[1] - t[0];
    uint64_t        last = t[1];

    for (uint32_t i = MARKS_FIRST; i < n_mark(s); i++) {
        const bool     end   = i + 1 == n_mark(s);
        const uint32_t stage = end ? KVD_STAGE_LOGITS : (i - MARKS_FIRST) % MARKS_LAYER;

        if (t[i] <= last) /* not there, or of a step that had it */
            continue;
        s->measure.sum.ns[stage] += t[i] - last > cost ? t[i] - last - cost : 0;
        last = t[i];
    }
}

static void add_bytes(kvd_session *s, uint32_t n_token)
{
    const model_bytes w   = model_get_bytes(s->model->net);
    kvd_stages       *sum = &s->measure.sum;
    kv_counts         c;

    kv_get_counts(s->kv, &c);
    sum->bytes[KVD_STAGE_QKV] += w.qkv;
    sum->bytes[KVD_STAGE_FFN] += w.ffn;
    sum->bytes[KVD_STAGE_LOGITS] += w.logits;
    sum->bytes[KVD_STAGE_FETCH] += c.bytes_up + c.bytes_dense - s->measure.moved;
    sum->bytes[KVD_STAGE_ATTEND] += (c.n_attend - s->measure.attended) * kv_record_raw(s->kv);
    for (uint32_t i = 0; i < s->n_sparse; i++)
        sum->bytes[KVD_STAGE_SELECT] += kv_select_bytes(s->kv, s->sparse_seq[i]);
    if (s->n_sparse == 0) {
        for (uint32_t i = 0; i < n_token; i++)
            sum->bytes[KVD_STAGE_ATTEND] += kv_dense_bytes(s->kv, s->part_seq[i]);
    }
    s->measure.moved    = c.bytes_up + c.bytes_dense;
    s->measure.attended = c.n_attend;
}

void engine_measure_step(kvd_session *s, uint32_t n_token)
{
    if (!s->measure.at.ptr || s->n_part != n_token || s->n_out != n_token || !s->in_order ||
        (s->n_sparse != 0 && s->n_sparse != n_token))
        return;
    add_times(s);
    add_bytes(s, n_token);
    s->measure.sum.n_step++;
}

/* ---- made-up rows -----------------------------------------------------------------------------
 */

kvd_status engine_synth(kvd_session *s, uint32_t layer, const model_run *r,
                        const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                        uint32_t seq, float *q, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);
    const kvd_synth_args a  = { .n_seq    = n_part,
                                .n_head   = hp->n_head,
                                .n_token  = r->n_token,
                                .seq      = engine_dev(&s->buf, part),
                                .kv       = *layout,
                                .layer    = layer,
                                .stream   = seq,
                                .q_stride = (uint64_t)hp->n_head * hp->head_dim,
                                .q        = q,
                                .reuse    = s->measure.params.reuse };

    return r->ops->synth(r->stream, &a, err);
}

kvd_status engine_synth_batch(kvd_session *s, uint32_t layer, const model_run *r,
                              const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                              uint32_t seq, kvd_err *err)
{
    if (s->measure.params.reuse == 0.0f)
        return KVD_OK;
    return engine_synth(s, layer, r, layout, part, n_part, seq, r->q, err);
}

/* ---- begin and end -------------------------------------------------------------------------- */

void engine_measure_close(kvd_session *s)
{
    kvd_backend *be = s->model->be;

    be->ops->mem_free(be, &s->measure.at);
    be->ops->mem_free(be, &s->measure.seen);
}

static kvd_status alloc_marks(kvd_session *s, kvd_err *err)
{
    kvd_backend   *be    = s->model->be;
    const uint64_t bytes = n_mark(s) * sizeof(uint64_t);
    kvd_status     st    = be->ops->mem_alloc(be, KVD_MEM_DEVICE, bytes, &s->measure.at, err);

    if (st == KVD_OK)
        st = be->ops->mem_alloc(be, KVD_MEM_PINNED, bytes, &s->measure.seen, err);
    if (st != KVD_OK)
        engine_measure_close(s);
    return st;
}

static kvd_status mark_stage(void *ctx, uint32_t layer, uint32_t stage, kvd_err *err)
{
    return engine_mark(ctx, layer, (kvd_stage)stage, err);
}

kvd_status engine_measure(kvd_session *s, const kvd_measure_params *p, kvd_err *err)
{
    kvd_status st = KVD_OK;
    kv_counts  c;

    if (!(p->reuse >= 0.0f && p->reuse <= 1.0f))
        return kvd_fail(err, KVD_E_INVAL, 0, "reuse (reuse) %g: expected 0 to 1", (double)p->reuse);
    if (s->cached && s->model->file && (p->reuse > 0.0f || p->stages || p->no_fetch))
        return kvd_fail(err, KVD_E_INVAL, 0, "measured steps must not reach a cache (cache_dir)");
    engine_measure_close(s);
    kv_get_counts(s->kv, &c);
    s->measure = (engine_measuring){ .params   = *p,
                                     .sum      = { .struct_size = sizeof(kvd_stages) },
                                     .moved    = c.bytes_up + c.bytes_dense,
                                     .attended = c.n_attend };
    if (p->stages)
        st = alloc_marks(s, err);
    if (st != KVD_OK)
        s->measure = (engine_measuring){ 0 };
    kv_set_measure(s->kv, &(kv_measure){ .mark     = st == KVD_OK && p->stages ? mark_stage : NULL,
                                         .ctx      = s,
                                         .no_fetch = st == KVD_OK && p->no_fetch });
    return st;
}
