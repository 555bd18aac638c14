/* SPDX-License-Identifier: Apache-2.0 */
/* engine_session.c - sessions: the memory plan and its allocation.
 *
 * Everything a session will ever use is computed by plan_buffers() and kv_plan(), reported by
 * engine_session_plan(), and allocated by engine_session_open(); evaluations (engine_eval.c)
 * allocate nothing. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"

#define N_BATCH_DEFAULT 512u
#define N_BATCH_MAX     16384u
#define N_ROW_DEFAULT   4096u        /* of a prompt on a device with memory of its own, */
#define ROW_BYTES       (1ull << 30) /* unless its activations take more than this, */
#define ROW_SHARE       32u          /* or than this share of the device's memory */
#define N_SEQ_MAX       4096u
#define DISK_LAG_MAX    64u
#define SINK_NONE       UINT32_MAX

/* ---- plan ------------------------------------------------------------------------- */

static kvd_status complete_chunks(kvd_session_params *p, kvd_err *err)
{
    if (p->chunk_tokens == 0)
        p->chunk_tokens = KV_CHUNK_TOKENS;
    if (p->chunk_tokens != 4 && p->chunk_tokens != 8 && p->chunk_tokens != 16)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "chunks of %u tokens (chunk_tokens): expected 4, 8 or 16", p->chunk_tokens);
    p->n_sink = p->n_sink == 0 ? KV_SINK_TOKENS : p->n_sink == SINK_NONE ? 0 : p->n_sink;
    if (p->n_sink % p->chunk_tokens != 0 || p->n_sink > KV_BLOCK_TOKENS)
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "%u first tokens are kept (n_sink): expected whole chunks of %u, at most %u", p->n_sink,
            p->chunk_tokens, KV_BLOCK_TOKENS);
    if (p->n_local == 0)
        p->n_local = KV_LOCAL_TOKENS;
    if (p->n_local > p->n_ctx)
        p->n_local = p->n_ctx;
    return KVD_OK;
}

/* Zeros become defaults; limits are checked against the model. */
static kvd_status complete_params(const kvd_model *m, const kvd_session_params *in,
                                  kvd_session_params *p, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(m->net);

    *p = *in;
    if (p->n_ctx == 0)
        p->n_ctx = hp->n_ctx_train;
    if (p->n_ctx > hp->n_ctx_train)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "context of %u tokens asked for (n_ctx), the model has %u; RoPE scaling "
                        "(rope_scaling) by a factor (rope_factor) extends it",
                        p->n_ctx, hp->n_ctx_train);
    if (p->n_seq == 0)
        p->n_seq = 1;
    if (p->n_seq > N_SEQ_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "%u sequences (n_seq): at most %u", p->n_seq,
                        N_SEQ_MAX);
    if (p->kv_tokens == 0)
        p->kv_tokens = (uint64_t)kvd_align_up(p->n_ctx, KV_BLOCK_TOKENS) * p->n_seq;
    if (p->n_batch == 0)
        p->n_batch = N_BATCH_DEFAULT;
    if (p->n_batch > N_BATCH_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "batch of %u tokens (n_batch): at most %u", p->n_batch,
                        N_BATCH_MAX);
    if (p->n_batch < p->n_seq)
        p->n_batch = p->n_seq;
    if (p->n_logits == 0)
        p->n_logits = p->n_seq;
    if (p->n_logits > p->n_batch)
        p->n_logits = p->n_batch;
    if (p->kv_type == KVD_KV_AUTO)
        p->kv_type = m->precise ? KVD_KV_F32 : KVD_KV_BF16;
    if (p->kv_type != KVD_KV_F32 && p->kv_type != KVD_KV_BF16)
        return kvd_fail(err, KVD_E_INVAL, 0, "KV cache type (kv_type) %d is none of kvd_kv_type",
                        (int)p->kv_type);
    if (p->kv_record < KVD_KV_RECORD_SAME || p->kv_record > KVD_KV_RECORD_VALUES ||
        (p->kv_record != KVD_KV_RECORD_SAME && hp->head_dim % 2 != 0))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "records (kv_record) of type %d with heads of %u elements",
                        (int)p->kv_record, hp->head_dim);
    if (p->disk_lag > DISK_LAG_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "records from disk late by %u steps (disk_lag): at most %u", p->disk_lag,
                        DISK_LAG_MAX);
    p->disk_lag = p->disk_lag ? p->disk_lag : 1;
    if (p->lookup < KVD_LOOKUP_DEVICE || p->lookup > KVD_LOOKUP_HOST)
        return kvd_fail(err, KVD_E_INVAL, 0, "lookup (lookup) %d is none of kvd_lookup",
                        (int)p->lookup);
    if (p->host_records && p->n_host_records != hp->n_layer * hp->n_kv_head)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "host records (host_records) for %u lanes (n_host_records); the model has "
                        "%u layers x %u KV heads",
                        p->n_host_records, hp->n_layer, hp->n_kv_head);
    return complete_chunks(p, err);
}

/* A session's parameters made complete, and what follows from them. */
typedef struct session_shape {
    kvd_session_params p;
    uint32_t           n_row; /* of a prompt that go through a layer together, at least n_batch */
    engine_attention   attention;
    kv_params          kv;
    uint32_t          *lane_tokens; /* kv.lane_tokens, or NULL; owned */
} session_shape;

static kvd_record_type record_type(kvd_kv_record r)
{
    switch (r) {
    case KVD_KV_RECORD_INT8:
        return KVD_RECORD_INT8;
    case KVD_KV_RECORD_INT4:
        return KVD_RECORD_INT4;
    case KVD_KV_RECORD_VALUES:
        return KVD_RECORD_VALUES;
    case KVD_KV_RECORD_SAME:
        break;
    }
    return KVD_RECORD_RAW;
}

static kv_params kv_params_of(const kvd_model *m, const session_shape *sh)
{
    const model_hparams      *hp     = model_get_hparams(m->net);
    const kvd_session_params *p      = &sh->p;
    const bool                sparse = engine_attention_sparse(&sh->attention, p->n_ctx);
    const bool                index  = sparse || p->cache_dir || p->kv_record != KVD_KV_RECORD_SAME;

    return (kv_params){
        .n_layer      = hp->n_layer,
        .n_head       = hp->n_head,
        .n_kv_head    = hp->n_kv_head,
        .head_dim     = hp->head_dim,
        .n_seq        = p->n_seq,
        .n_ctx        = p->n_ctx,
        .n_token      = p->kv_tokens,
        .n_batch      = p->n_batch,
        .type         = p->kv_type == KVD_KV_F32 ? KVD_DTYPE_F32 : KVD_DTYPE_BF16,
        .record       = record_type(p->kv_record),
        .chunk_tokens = p->chunk_tokens,
        .n_sink       = p->n_sink,
        .n_local      = p->n_local,
        .device_bytes = p->kv_device,
        .host_bytes   = p->kv_host,
        .lane_host    = p->host_records,
        .sparse       = index,
        .index        = sh->attention.index,
        .zone_tokens  = index ? sh->attention.params.zone : 0,
        .window_tokens =
            sparse ? engine_attention_largest(&sh->attention, p->n_ctx, p->chunk_tokens) : 0,
        .cache_dir      = p->cache_dir,
        .cache_bytes    = p->cache_bytes,
        .cache_min_free = p->cache_min_free,
        .apart          = !m->be->unified,
        .device_steps   = !m->be->unified && p->lookup == KVD_LOOKUP_DEVICE &&
                        (!index || sh->attention.params.zone == 0) &&
                        !(p->cache_dir && p->disk_lag > 1) && !m->watched,
        .host_lookup = p->lookup == KVD_LOOKUP_HOST && sparse,
        .lazy        = p->resume == KVD_RESUME_SPARSE,
        .tiered      = p->tiers == KVD_TIERS_ALWAYS,
        .disk_lag    = p->disk_lag,
        .n_parked    = p->n_parked,
    };
}

/* Room for windows of different sizes, where there are such. */
static kvd_status shape_lanes(session_shape *sh, kvd_err *err)
{
    const uint32_t n = sh->attention.params.n_caps;

    if (!sh->attention.params.caps || sh->kv.window_tokens == 0)
        return KVD_OK;
    sh->lane_tokens = kvd_calloc(n, sizeof(*sh->lane_tokens));
    if (!sh->lane_tokens)
        return kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for %u window sizes", n);
    for (uint32_t i = 0; i < n; i++)
        sh->lane_tokens[i] =
            engine_attention_window(&sh->attention, sh->p.n_ctx, sh->p.chunk_tokens, i);
    sh->kv.lane_tokens = sh->lane_tokens;
    return KVD_OK;
}

/* Rows of a prompt that go through a layer together: a GPU wants thousands.  Their number follows
 * from what the device is, not from what is free just then: it decides about last bits. */
static uint32_t prompt_rows(const kvd_model *m, const kvd_session_params *in,
                            const kvd_session_params *p)
{
    const model_hparams *hp = model_get_hparams(m->net);
    const uint64_t floats   = 2ull * (hp->n_embd + hp->n_ff + (uint64_t)hp->n_head * hp->head_dim) +
                            2ull * hp->n_kv_head * hp->head_dim;
    kvd_device_memory d;
    uint64_t          bytes, rows;

    if (in->n_batch != 0 || m->be->unified)
        return p->n_batch;
    m->be->ops->memory(m->be, &d);
    bytes = kvd_min_u64(ROW_BYTES, (m->device_memory ? m->device_memory : d.total) / ROW_SHARE);
    rows  = bytes / (4 * floats) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    rows  = kvd_min_u64(rows, kvd_min_u64(N_ROW_DEFAULT, p->n_ctx));
    return (uint32_t)kvd_max_u64(rows, p->n_batch);
}

/* The caller frees lane_tokens when it has succeeded. */
static kvd_status shape_of(const kvd_model *m, const kvd_session_params *in, session_shape *sh,
                           kvd_err *err)
{
    static const kvd_attention_params defaults = KVD_ATTENTION_PARAMS_INIT;

    KVD_TRY(complete_params(m, in, &sh->p, err));
    sh->n_row = prompt_rows(m, in, &sh->p);
    KVD_TRY(engine_attention_complete(in->attention ? in->attention : &defaults, &sh->p,
                                      model_get_hparams(m->net), &sh->attention, err));
    sh->p.attention = NULL; /* borrowed for the call */
    sh->kv          = kv_params_of(m, sh);
    sh->lane_tokens = NULL;
    return shape_lanes(sh, err);
}

static kvd_backend_limits limits_of(const kvd_model *m, const session_shape *sh)
{
    const model_hparams      *hp = model_get_hparams(m->net);
    const kvd_session_params *p  = &sh->p;

    return (kvd_backend_limits){ .n_token   = sh->n_row,
                                 .n_seq     = p->n_seq,
                                 .n_col     = model_max_cols(m->net),
                                 .n_head    = hp->n_head,
                                 .n_kv_head = hp->n_kv_head,
                                 .head_dim  = hp->head_dim,
                                 .n_ctx     = p->n_ctx,
                                 .n_chunk   = sh->kv.sparse
                                                  ? (uint32_t)kvd_div_up(p->n_ctx, p->chunk_tokens)
                                                  : 0,
                                 .n_slot    = sh->kv.window_tokens / p->chunk_tokens,
                                 .n_vocab   = hp->n_vocab };
}

static uint64_t session_host_bytes(const kvd_model *m, const kvd_session_params *p)
{
    const uint64_t per_row = 3 * sizeof(uint32_t);
    const uint64_t per_seq =
        sizeof(engine_seq) + sizeof(engine_trials) + 16 + 4 * (uint64_t)p->n_ctx;
    const uint64_t trace = p->trace_path ? engine_trace_bytes(m) : 0;

    return sizeof(kvd_session) + per_row * p->n_batch + per_seq * p->n_seq + trace;
}

static void plan_tiers(const kv_sizes *kv, const session_shape *sh, kvd_plan *out)
{
    out->kv_device_bytes    = kv->device_bytes;
    out->kv_host_bytes      = kv->host_bytes - kv->bytes[KV_BUF_TABLE];
    out->kv_bytes           = out->kv_device_bytes + out->kv_host_bytes;
    out->kv_raw_bytes       = kv->bytes[KV_BUF_RAW];
    out->kv_window_bytes    = kv->bytes[KV_BUF_WINDOW];
    out->kv_stage_bytes     = kv->bytes[KV_BUF_STAGE];
    out->kv_index_bytes     = kv->bytes[KV_BUF_INDEX];
    out->kv_zone_bytes      = kv->zone_bytes;
    out->kv_map_bytes       = kv->bytes[KV_BUF_MAP];
    out->kv_resident        = kv->resident;
    out->kv_spills          = kv->spills;
    out->kv_bytes_per_token = kv->bytes_per_token;
    out->window_tokens      = sh->kv.window_tokens;
    out->kv_host_records    = kv->n_host;
    out->n_parked           = kv->n_parked;
    out->kv_lane_records =
        (uint32_t)kvd_align_up(sh->p.n_ctx, KV_BLOCK_TOKENS) / sh->p.chunk_tokens;
}

/* What lies where the device has memory of its own. */
static void plan_device(const kvd_model *m, const kv_sizes *kv, uint64_t buffers, uint64_t shared,
                        uint64_t scratch, kvd_plan *out)
{
    kvd_device_memory d;

    if (m->be->unified)
        return;
    m->be->ops->memory(m->be, &d);
    out->weight_bytes         = model_place_bytes(m->net);
    out->device_context_bytes = d.context;
    out->device_limit_bytes   = m->device_memory ? m->device_memory : d.total;
    out->device_bytes         = d.context + d.held + kv->device_bytes + buffers + scratch;
    out->pinned_bytes         = kv->pinned_bytes + shared;
}

static uint32_t longest_context(const kvd_model *m, const kvd_plan *plan, const kv_sizes *kv)
{
    const uint64_t fixed = m->be->unified
                               ? plan->total_bytes - plan->kv_bytes
                               : plan->host_bytes + plan->pinned_bytes - plan->kv_host_bytes;
    const uint64_t room  = plan->available_bytes > fixed ? plan->available_bytes - fixed : 0;

    return (uint32_t)kvd_min_u64(room / kv->bytes_per_token,
                                 model_get_hparams(m->net)->n_ctx_train);
}

static kvd_status fill_plan(const kvd_model *m, session_shape *sh, kvd_plan *out, kvd_err *err)
{
    const kvd_session_params *p       = &sh->p;
    const kvd_backend_limits  lim     = limits_of(m, sh);
    const uint64_t            scratch = m->be->ops->reserve_bytes(m->be, &lim);
    kv_sizes                  kv;
    uint64_t                  buffers, shared;

    KVD_TRY(engine_fit(m, p, &lim, &sh->kv, &kv, err));
    engine_buffers_bytes(m, p, sh->n_row, kv.resident, &buffers, &shared);
    plan_tiers(&kv, sh, out);
    out->weight_bytes  = m->file ? gguf_mapped_bytes(m->file) : engine_model_weight_bytes(m);
    out->scratch_bytes = buffers + shared + scratch;
    plan_device(m, &kv, buffers, shared, scratch, out);
    out->host_bytes = engine_model_heap_bytes(m) + kv.bytes[KV_BUF_TABLE] +
                      session_host_bytes(m, p) + engine_rope_bytes(m, p->n_ctx);
    out->total_bytes = out->weight_bytes + out->kv_bytes + out->scratch_bytes + out->host_bytes +
                       out->device_context_bytes;
    out->available_bytes = os_mem_available();
    out->n_ctx           = p->n_ctx;
    out->n_seq           = p->n_seq;
    out->n_batch         = p->n_batch;
    out->n_ctx_fits      = longest_context(m, out, &kv);
    return KVD_OK;
}

/* Micro-batches have the size that is asked for, or, as long as none was measured, one row. */
static void print_steps(const session_shape *sh, const kv_sizes *z, uint32_t n_row, kvd_buf *out)
{
    const kvd_attention_params *a        = &sh->attention.params;
    const kv_schedule           schedule = { .elastic     = a->schedule == KVD_SCHEDULE_ELASTIC,
                                             .micro_batch = a->micro_batch ? a->micro_batch : 1 };

    if (sh->kv.window_tokens == 0)
        kvd_buf_puts(out, "dense: attention to all tokens has no step program\n");
    else
        kv_print_steps(&sh->kv, z, &sh->attention.policy, &schedule, n_row, out);
}

kvd_status engine_session_steps(const kvd_model *m, const kvd_session_params *in, uint32_t n_row,
                                char **text, kvd_err *err)
{
    kvd_backend_limits lim;
    session_shape      sh;
    kv_sizes           kv;
    kvd_status         st;
    kvd_buf            b = { 0 };

    *text = NULL;
    KVD_TRY(shape_of(m, in, &sh, err));
    lim = limits_of(m, &sh);
    st  = engine_fit(m, &sh.p, &lim, &sh.kv, &kv, err);
    if (st == KVD_OK && (n_row == 0 || n_row > sh.p.n_seq))
        st = kvd_fail(err, KVD_E_INVAL, 0, "steps of %u rows: expected 1 to n_seq, %u", n_row,
                      sh.p.n_seq);
    if (st == KVD_OK)
        print_steps(&sh, &kv, n_row, &b);
    kvd_free(sh.lane_tokens);
    if (st == KVD_OK && b.oom)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the text of a step program");
    if (st == KVD_OK)
        *text = kvd_buf_take(&b);
    kvd_buf_free(&b);
    return st;
}

kvd_status engine_session_plan(const kvd_model *m, const kvd_session_params *in, kvd_plan *out,
                               kvd_err *err)
{
    session_shape sh;
    kvd_status    st;

    KVD_TRY(shape_of(m, in, &sh, err));
    st = fill_plan(m, &sh, out, err);
    kvd_free(sh.lane_tokens);
    return st;
}

/* ---- open and close --------------------------------------------------------------- */

static kvd_status alloc_tables(kvd_session *s, kvd_err *err)
{
    const kvd_session_params *p  = &s->params;
    const model_hparams      *hp = model_get_hparams(s->model->net);

    s->part_seq   = kvd_calloc(p->n_batch, sizeof(*s->part_seq));
    s->part_exact = kvd_calloc(p->n_batch, sizeof(*s->part_exact));
    s->out_row    = kvd_calloc(p->n_batch, sizeof(*s->out_row));
    s->out_seq    = kvd_calloc(p->n_batch, sizeof(*s->out_seq));
    s->sparse_seq = kvd_calloc(p->n_seq, sizeof(*s->sparse_seq));
    s->seq_rows   = kvd_calloc(p->n_seq, sizeof(*s->seq_rows));
    s->seq_new    = kvd_calloc(p->n_seq, sizeof(*s->seq_new));
    s->seq        = kvd_calloc(p->n_seq, sizeof(*s->seq));
    s->tokens     = kvd_calloc((size_t)p->n_seq * p->n_ctx, sizeof(*s->tokens));
    s->caps       = kvd_calloc((size_t)hp->n_layer * hp->n_kv_head, sizeof(*s->caps));
    if (!s->caps || !s->part_seq || !s->part_exact || !s->out_row || !s->out_seq ||
        !s->sparse_seq || !s->seq_rows || !s->seq_new || !s->seq || !s->tokens)
        return kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for its tables");
    for (uint32_t i = 0; i < p->n_seq; i++)
        s->seq[i].token = s->tokens + (size_t)i * p->n_ctx;
    return KVD_OK;
}

/* A plan that cannot fit this machine's memory (what a device's own can hold its allocation tells)
 * is refused before the machine starts to swap or kill. */
static kvd_status check_fits(const kvd_plan *plan, bool unified, kvd_err *err)
{
    const uint64_t need    = unified ? plan->kv_bytes + plan->scratch_bytes + plan->host_bytes
                                     : plan->pinned_bytes + plan->host_bytes;
    const uint32_t fits    = plan->n_ctx_fits / plan->n_seq;
    char           way[48] = "";

    if (need <= plan->available_bytes)
        return KVD_OK;
    if (fits)
        snprintf(way, sizeof(way), "; a context (n_ctx) of %u would", fits);
    return kvd_fail(err, KVD_E_NOMEM, 0,
                    "KV cache %" PRIu64 " MiB and scratch %" PRIu64 " MiB for a context of %u "
                    "tokens x %u do not fit the %" PRIu64 " MiB available%s",
                    plan->kv_bytes >> 20, plan->scratch_bytes >> 20, plan->n_ctx, plan->n_seq,
                    plan->available_bytes >> 20, way);
}

/* Everything that a session allocates. */
static kvd_status open_parts(kvd_session *s, session_shape *sh, const kvd_plan *plan, kvd_err *err)
{
    kvd_model               *m   = s->model;
    const kvd_backend_limits lim = limits_of(m, sh);

    KVD_TRY(alloc_tables(s, err));
    KVD_TRY(engine_rope_open(s, err));
    KVD_TRY(engine_trace_open(s, s->params.trace_path, err));
    sh->kv.trace  = s->trace;
    sh->kv.stamps = s->stamps;
    KVD_TRY(engine_model_reserve(m, &lim, err));
    KVD_TRY(engine_graphs_open(s, err));
    KVD_TRY(engine_schedule_open(s, err));
    if (s->cached)
        KVD_TRY(engine_fingerprint(m, &sh->kv, sh->kv.fingerprint, err));
    KVD_TRY(kv_store_open(&s->kv, m->be, &sh->kv, err));
    return engine_buffers_open(&s->buf, m, &s->params, s->n_row, plan->kv_resident, err);
}

static kvd_status open_shape(kvd_session **out, kvd_model *m, session_shape *sh, kvd_err *err)
{
    const kvd_session_params *p    = &sh->p;
    kvd_plan                  plan = { 0 };
    kvd_session              *s;
    kvd_status                st;

    KVD_TRY(fill_plan(m, sh, &plan, err));
    KVD_TRY(check_fits(&plan, m->be->unified, err));
    s = kvd_calloc(1, sizeof(*s));
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory");
    s->model               = m;
    s->params              = *p;
    s->n_row               = sh->n_row;
    s->n_segment           = engine_segment_tokens(m, sh->n_row, p->n_ctx);
    s->params.host_records = NULL; /* borrowed for the call */
    s->sparse              = sh->kv.window_tokens > 0;
    s->zone                = sh->kv.zone_tokens;
    s->cached              = p->cache_dir != NULL;
    st                     = open_parts(s, sh, &plan, err);
    if (st != KVD_OK) {
        engine_session_close(s);
        return st;
    }
    engine_attention_keep(s, &sh->attention);
    engine_attention_apply(s);
    for (uint32_t i = 0; i < p->n_seq; i++)
        kv_seq_source(s->kv, i, s->seq[i].token, 0);
    kvd_log(KVD_LOG_INFO,
            "session: %u sequence(s) of up to %u tokens, KV %" PRIu64 " MiB (%" PRIu64
            " bytes a token), scratch %" PRIu64 " MiB",
            p->n_seq, p->n_ctx, plan.kv_bytes >> 20, plan.kv_bytes_per_token,
            plan.scratch_bytes >> 20);
    *out = s;
    return KVD_OK;
}

kvd_status engine_session_open(kvd_session **out, kvd_model *m, const kvd_session_params *in,
                               kvd_err *err)
{
    session_shape sh;
    kvd_status    st;

    *out = NULL;
    KVD_TRY(shape_of(m, in, &sh, err));
    st = open_shape(out, m, &sh, err);
    kvd_free(sh.lane_tokens);
    return st;
}

void engine_session_close(kvd_session *s)
{
    if (!s)
        return;
    if (s->kv && s->buf.mem.ptr)
        (void)!kv_flush(s->kv, NULL); /* tails grow from what is stored */
    for (uint32_t i = 0; s->kv && s->buf.mem.ptr && i < s->params.n_seq; i++)
        kv_seq_store_tail(s->kv, s->model->stream, i);
    if (s->kv && s->buf.mem.ptr)
        engine_parked_store_tails(s);
    engine_graphs_close(s);
    engine_measure_close(s);
    engine_schedule_close(s);
    engine_buffers_close(&s->buf, s->model->be);
    kv_store_close(s->kv);
    engine_trace_close(s);
    engine_rope_close(s);
    kvd_free(s->part_seq);
    kvd_free(s->part_exact);
    kvd_free(s->out_row);
    kvd_free(s->out_seq);
    kvd_free(s->sparse_seq);
    kvd_free(s->seq_rows);
    kvd_free(s->seq_new);
    kvd_free(s->seq);
    kvd_free(s->tokens);
    kvd_free(s->caps);
    kvd_free(s);
}
