/* SPDX-License-Identifier: Apache-2.0 */
/* engine_pipeline.c - one batch through all layers: the only place where model meets kv.
 *
 * The last layer is computed only for the rows whose logits are wanted: its K and V are stored for
 * all rows, then the wanted rows move to the front and each attends as a part of its own.  In a
 * prefill that leaves one row of 512 to attention and feed-forward there.
 *
 * Cancellation is polled at layer edges.  Nothing here allocates: the guard is armed. */
#include <string.h>

#include "engine/engine.h"

model_run engine_run_of(kvd_session *s, uint32_t n_token)
{
    engine_buffers *b = &s->buf;

    return (model_run){
        .stream  = s->model->stream,
        .ops     = s->model->be->ops,
        .n_token = n_token,
        .cos_sin = b->cos_sin,
        .x       = b->x,
        .xn      = b->xn,
        .q       = b->q,
        .k       = b->k,
        .v       = b->v,
        .att     = b->att,
        .gate    = b->gate,
        .up      = b->up,
    };
}

static void fill_cos_sin(kvd_session *s)
{
    const uint32_t n_rot = model_get_hparams(s->model->net)->n_rot;

    for (uint32_t i = 0; i < s->n_part; i++) {
        const kvd_kv_seq *p = &s->buf.part[i];

        engine_rope_rows(s, p->n_past, p->n_row, s->seq[s->part_seq[i]].rope_long,
                         s->buf.cos_sin_host + (size_t)p->first_row * n_rot);
    }
}

static uint32_t count_rows(const kvd_kv_seq *part, uint32_t n_part)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_part; i++)
        n += part[i].n_row;
    return n;
}

kvd_kv_append_args engine_store_of(const kvd_session *s, const model_run *r,
                                   const kvd_kv_layout *layout, const kvd_kv_seq *part,
                                   uint32_t n_part)
{
    return (kvd_kv_append_args){
        .n_seq    = n_part,
        .n_token  = count_rows(part, n_part),
        .seq      = engine_dev(&s->buf, part),
        .kv       = *layout,
        .k_stride = (uint64_t)layout->n_kv_head * layout->head_dim,
        .v_stride = (uint64_t)layout->n_kv_head * layout->head_dim,
        .k        = r->k,
        .v        = r->v,
    };
}

/* Of the main stream's time, in a trace. */
static kvd_status begin_span(const kvd_session *s, const model_run *r, kvd_trace_kind kind,
                             uint32_t layer, uint32_t *span, kvd_err *err)
{
    return kvd_stamp_begin(s->stamps, r->stream, kind, KVD_TRACE_MAIN, layer, r->n_token, span,
                           err);
}

kvd_status engine_attn(kvd_session *s, const model_run *r, uint32_t layer,
                       const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                       kvd_err *err)
{
    const uint64_t       t0     = kvd_now_ns();
    const model_hparams *hp     = model_get_hparams(s->model->net);
    const uint64_t       stride = (uint64_t)hp->n_head * hp->head_dim;
    const kvd_attn_args  a      = {
              .n_seq      = n_part,
              .n_head     = hp->n_head,
              .n_token    = count_rows(part, n_part),
              .seq        = engine_dev(&s->buf, part),
              .kv         = *layout,
              .q_stride   = stride,
              .out_stride = stride,
              .q          = r->q,
              .out        = r->att,
              .scale      = hp->attn_scale,
    };
    uint64_t t1;
    uint32_t span;

    KVD_TRY(begin_span(s, r, KVD_TRACE_ATTENTION, layer, &span, err));
    KVD_TRY(r->ops->attn(r->stream, &a, err));
    KVD_TRY(kvd_stamp_end(s->stamps, r->stream, span, err));
    t1 = kvd_now_ns();
    s->stats.dense_ns += t1 - t0;
    kvd_trace_add(s->trace, KVD_TRACE_ATTENTION, t0, t1, layer, n_part);
    return KVD_OK;
}

/* Attention to all tokens.  Where not everything is resident a sequence's layer is brought up
 * first, one after the other; neighbouring parts of one sequence share that.  view has room for
 * n_part parts, and is a place of their own: ops of the layers before may not have read theirs. */
static kvd_status attend_dense(kvd_session *s, uint32_t layer, const model_run *r,
                               const kvd_kv_seq *part, const uint32_t *seq, uint32_t n_part,
                               kvd_kv_seq *view, kvd_err *err)
{
    kvd_kv_layout   layout = kv_layout(s->kv, layer);
    const uint64_t *block  = NULL;

    if (n_part == 0)
        return KVD_OK;
    if (kv_resident(s->kv))
        return engine_attn(s, r, layer, &layout, part, n_part, err);
    for (uint32_t i = 0; i < n_part; i++) {
        kvd_kv_seq *p = &view[i];

        if (i == 0 || seq[i] != seq[i - 1])
            KVD_TRY(kv_dense_view(s->kv, r->stream, layer, seq[i], &layout, &block, err));
        *p       = part[i]; /* the same in every layer */
        p->block = block;
        KVD_TRY(engine_attn(s, r, layer, &layout, p, 1, err));
    }
    return KVD_OK;
}

/* For the rows that attend sparsely. */
static kvd_status attend_sparse(kvd_session *s, uint32_t layer, const model_run *r, kvd_err *err)
{
    const model_hparams *hp     = model_get_hparams(s->model->net);
    const uint64_t       stride = (uint64_t)hp->n_head * hp->head_dim;
    /* the host reads it, too, where it has a part in the step */
    const uint32_t *row =
        kv_step_device_driven(s->kv) ? engine_dev(&s->buf, s->buf.sparse_row) : s->buf.sparse_row;
    const kv_query q = { .layer      = layer,
                         .n_row      = s->n_sparse,
                         .seq        = s->sparse_seq,
                         .row        = row,
                         .q_stride   = stride,
                         .out_stride = stride,
                         .q          = r->q,
                         .out        = r->att,
                         .scale      = hp->attn_scale };

    return kv_attend_sparse(s->kv, r->stream, &q, err);
}

/* A batch with sparse rows: the others, runs of them, attend to everything. */
static kvd_status attend_mixed(kvd_session *s, uint32_t layer, const model_run *r, kvd_err *err)
{
    uint32_t first = 0;

    KVD_TRY(attend_sparse(s, layer, r, err));
    for (uint32_t i = 0, k = 0; i <= s->n_part; i++) {
        const bool sparse = i < s->n_part && k < s->n_sparse && s->sparse_seq[k] == s->part_seq[i];

        if (i < s->n_part && !sparse)
            continue;
        KVD_TRY(attend_dense(s, layer, r, s->buf.part + first, s->part_seq + first, i - first,
                             s->buf.view_part + first, err));
        first = i + 1;
        k += sparse;
    }
    return KVD_OK;
}

/* The part of the batch that holds this row; the search goes on from where the last row was, since
 * rows mostly ascend. */
static const kvd_kv_seq *part_of_row(const kvd_session *s, const kvd_kv_seq *p, uint32_t row)
{
    if (row < p->first_row)
        p = s->buf.part;
    while (row - p->first_row >= p->n_row)
        p++; /* every row is in one */
    return p;
}

/* Row number i of the batch's wanted ones is `row` of the batch: listed for a buffer of n floats a
 * row, x first, then q or att. */
static void list_row(kvd_session *s, uint32_t which, uint32_t i, uint32_t row, uint64_t n)
{
    const size_t at = (size_t)which * s->params.n_batch + i;

    s->buf.row_from[at] = row * n * sizeof(float);
    s->buf.row_to[at]   = i * n * sizeof(float);
}

/* The listed rows of x (n floats each) move to the front; they may lie in any order, so they travel
 * through room, which holds nothing here. */
static kvd_status move_rows(kvd_session *s, const model_run *r, uint32_t which, float *x,
                            float *room, uint64_t n, kvd_err *err)
{
    const size_t               at = (size_t)which * s->params.n_batch;
    const kvd_record_copy_args a  = { .n       = s->n_out,
                                      .bytes   = n * sizeof(float),
                                      .src_off = s->buf.row_from + at,
                                      .dst_off = s->buf.row_to + at,
                                      .src     = x,
                                      .dst     = room };
    kvd_record_copy_args       b  = a;

    b.src_off = b.dst_off;
    b.src     = room;
    b.dst     = x;
    KVD_TRY(r->ops->record_copy(r->stream, &a, err));
    return r->ops->record_copy(r->stream, &b, err);
}

/* Moves the wanted rows of x and q to the front, in the order of their logits, and describes them
 * as parts of their own; neighbours stay together, so that they share the reading of K and V. */
static kvd_status keep_wanted_rows(kvd_session *s, const model_run *r, uint32_t *n_part,
                                   kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);
    const uint64_t       nx = hp->n_embd, nq = (uint64_t)hp->n_head * hp->head_dim;
    const kvd_kv_seq    *part = s->buf.part;
    uint32_t             n    = 0;

    for (uint32_t i = 0; i < s->n_out; i++) {
        const uint32_t          row  = s->out_row[i];
        const kvd_kv_seq *const last = part;

        part = part_of_row(s, last, row);
        list_row(s, 0, i, row, nx);
        list_row(s, 1, i, row, nq);
        if (i > 0 && row == s->out_row[i - 1] + 1 && part == last) {
            s->buf.out_part[n - 1].n_row++;
            continue;
        }
        s->out_seq[n]        = s->part_seq[part - s->buf.part];
        s->buf.out_part[n++] = (kvd_kv_seq){ .first_row = i,
                                             .n_row     = 1,
                                             .n_past    = part->n_past + row - part->first_row,
                                             .block     = part->block };
    }
    *n_part = n;
    KVD_TRY(move_rows(s, r, 0, r->x, r->xn, nx, err));
    return move_rows(s, r, 1, r->q, r->att, nq, err);
}

/* The same when they have attended already: x and att move. */
static kvd_status keep_attended_rows(kvd_session *s, const model_run *r, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);
    const uint64_t       nx = hp->n_embd, nq = (uint64_t)hp->n_head * hp->head_dim;

    for (uint32_t i = 0; i < s->n_out; i++) {
        list_row(s, 0, i, s->out_row[i], nx);
        list_row(s, 1, i, s->out_row[i], nq);
    }
    KVD_TRY(move_rows(s, r, 0, r->x, r->xn, nx, err));
    return move_rows(s, r, 1, r->att, r->q, nq, err);
}

static kvd_status attend(kvd_session *s, uint32_t layer, const model_run *r, kvd_err *err)
{
    if (s->n_sparse > 0)
        return attend_mixed(s, layer, r, err);
    return attend_dense(s, layer, r, s->buf.part, s->part_seq, s->n_part, s->buf.view_part, err);
}

/* In the last layer only the wanted rows go on.  Sparse rows attend first, wanted or not: their
 * windows move with every step. */
static kvd_status attend_last(kvd_session *s, uint32_t layer, model_run *r, kvd_err *err)
{
    if (s->in_order)
        return attend(s, layer, r, err); /* all rows go on, where they are */
    if (s->n_sparse > 0) {
        KVD_TRY(attend_mixed(s, layer, r, err));
        KVD_TRY(keep_attended_rows(s, r, err));
    } else {
        uint32_t n_part;

        KVD_TRY(keep_wanted_rows(s, r, &n_part, err));
        KVD_TRY(attend_dense(s, layer, r, s->buf.out_part, s->out_seq, n_part,
                             s->buf.view_part + s->params.n_batch, err));
    }
    r->n_token = s->n_out;
    return KVD_OK;
}

static kvd_status run_layer(kvd_session *s, uint32_t layer, bool last, model_run *r, kvd_err *err)
{
    const model             *net     = s->model->net;
    const kvd_kv_layout      layout  = kv_layout(s->kv, layer);
    const kvd_kv_append_args store   = engine_store_of(s, r, &layout, s->buf.part, s->n_part);
    const uint32_t           n_token = r->n_token;
    const uint64_t           t0      = kvd_now_ns();
    uint64_t                 t1, t2;
    uint32_t                 span;

    KVD_TRY(begin_span(s, r, KVD_TRACE_QKV, layer, &span, err));
    KVD_TRY(model_qkv(net, layer, r, &store, err));
    KVD_TRY(kvd_stamp_end(s->stamps, r->stream, span, err));
    KVD_TRY(engine_synth_batch(s, layer, r, &layout, s->buf.part, s->n_part, s->part_seq[0], err));
    KVD_TRY(engine_mark(s, layer, KVD_STAGE_QKV, err));
    t1 = kvd_now_ns();
    s->stats.qkv_ns += t1 - t0;
    kvd_trace_add(s->trace, KVD_TRACE_QKV, t0, t1, layer, n_token);
    KVD_TRY(last ? attend_last(s, layer, r, err) : attend(s, layer, r, err));
    KVD_TRY(engine_mark(s, layer, KVD_STAGE_ATTEND, err));
    t1 = kvd_now_ns();
    KVD_TRY(begin_span(s, r, KVD_TRACE_FFN, layer, &span, err));
    if (r->n_token > 0)
        KVD_TRY(model_ffn(net, layer, r, err));
    KVD_TRY(kvd_stamp_end(s->stamps, r->stream, span, err));
    KVD_TRY(engine_mark(s, layer, KVD_STAGE_FFN, err));
    t2 = kvd_now_ns();
    s->stats.ffn_ns += t2 - t1;
    kvd_trace_add(s->trace, KVD_TRACE_FFN, t1, t2, layer, r->n_token);
    kvd_trace_add(s->trace, KVD_TRACE_LAYER, t0, t2, layer, n_token);
    return KVD_OK;
}

static kvd_status run_layers(kvd_session *s, model_run *r, kvd_err *err)
{
    const uint32_t n_layer = model_get_hparams(s->model->net)->n_layer;

    for (uint32_t il = 0; il < n_layer; il++) {
        if (atomic_exchange_explicit(&s->cancel, false, memory_order_relaxed))
            return kvd_fail(err, KVD_E_CANCELED, 0, "evaluation canceled at layer %u", il);
        KVD_TRY(run_layer(s, il, il + 1 == n_layer, r, err));
    }
    return KVD_OK;
}

/* The best of each wanted row, straight into memory that the host reads. */
static kvd_status pick_best(kvd_session *s, const model_run *r, kvd_err *err)
{
    const uint32_t      n_vocab = model_get_hparams(s->model->net)->n_vocab;
    const kvd_best_args a       = { .n_row      = s->n_out,
                                    .n_col      = n_vocab,
                                    .k          = s->best,
                                    .x_stride   = n_vocab,
                                    .out_stride = KVD_BEST_MAX,
                                    .x          = s->buf.out,
                                    .out        = s->buf.best };

    return r->ops->best(r->stream, &a, err);
}

static kvd_status run_logits(kvd_session *s, const model_run *r, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    uint64_t       t1;
    uint32_t       span;

    KVD_TRY(begin_span(s, r, KVD_TRACE_LOGITS, KVD_TRACE_NOWHERE, &span, err));
    KVD_TRY(model_logits(s->model->net, r, s->buf.out, err));
    KVD_TRY(s->best ? pick_best(s, r, err) : engine_buffers_download(s, s->n_out, err));
    KVD_TRY(kvd_stamp_end(s->stamps, r->stream, span, err));
    t1 = kvd_now_ns();
    s->stats.logits_ns += t1 - t0;
    kvd_trace_add(s->trace, KVD_TRACE_LOGITS, t0, t1, KVD_TRACE_NOWHERE, s->n_out);
    return KVD_OK;
}

/* All that a batch gives to the stream. */
static kvd_status enqueue(kvd_session *s, uint32_t n_token, kvd_err *err)
{
    model_run r = engine_run_of(s, n_token);

    KVD_TRY(engine_mark_begin(s, err));
    KVD_TRY(engine_buffers_upload(s, n_token, err));
    KVD_TRY(kv_step_upload(s->kv, r.stream, err));
    KVD_TRY(model_embed(s->model->net, &r, engine_dev(&s->buf, s->buf.token), err));
    KVD_TRY(run_layers(s, &r, err));
    KVD_TRY(kv_step_join(s->kv, r.stream, err));
    if (s->n_out > 0)
        KVD_TRY(run_logits(s, &r, err));
    return engine_mark_end(s, err);
}

kvd_status engine_pipeline_run(kvd_session *s, uint32_t n_token, kvd_err *err)
{
    const bool was = kvd_alloc_guard(true);
    kvd_status st;

    fill_cos_sin(s);
    kvd_stamps_drop(s->stamps);
    engine_schedule_begin(s, n_token);
    st = kv_step_begin(s->kv, s->model->stream, s->sparse_seq, s->buf.sparse_row, s->n_sparse, err);
    if (st == KVD_OK)
        st = engine_graph_fits(s, n_token) ? engine_graph_step(s, n_token, enqueue, err)
                                           : enqueue(s, n_token, err);
    if (st == KVD_OK)
        st = kv_step_wait(s->kv, s->model->stream, err);
    if (st == KVD_OK)
        st = kv_step_end(s->kv, err);
    if (st != KVD_OK) { /* before the host writes lists anew and gives blocks and slots to others */
        kv_step_abort(s->kv, s->model->stream);
    } else {
        engine_measure_step(s, n_token);
        engine_schedule_end(s, n_token);
        kvd_stamps_take(s->stamps, s->trace);
    }
    kvd_alloc_guard(was);
    return st;
}
