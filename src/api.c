/* SPDX-License-Identifier: Apache-2.0 */
/* api.c - the public functions: check struct_size, complete the structs, call engine/.
 *
 * A caller built against an older header passes shorter structs: what it does not know is zero.  A
 * caller built against a newer one passes longer structs: what we do not know must be zero, or it
 * is refused, because ignoring a wish would be worse than refusing it. */
#include <string.h>

#include "engine/engine.h"

#define STRUCT_BYTES_MAX 65536 /* a larger size is no size */

#define STR2(x) #x
#define STR(x)  STR2(x)

const char *kvd_version(void)
{
    return STR(KVD_VERSION_MAJOR) "." STR(KVD_VERSION_MINOR) "." STR(KVD_VERSION_PATCH);
}

/* Copies a caller's struct into ours of size bytes. */
static kvd_status take_struct(void *dst, size_t size, const void *src, const char *name,
                              kvd_err *err)
{
    size_t given;

    memset(dst, 0, size);
    if (!src)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: NULL", name);
    memcpy(&given, src, sizeof(given));
    if (given < sizeof(size_t) || given > STRUCT_BYTES_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s.struct_size is %zu, expected about %zu", name,
                        given, size);
    for (size_t i = size; i < given; i++)
        if (((const unsigned char *)src)[i])
            return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                            "%s: a field this library (%s) does not know is set", name,
                            kvd_version());
    memcpy(dst, src, given < size ? given : size);
    memcpy(dst, &size, sizeof(size));
    return KVD_OK;
}

/* Whether a caller's struct says its size, before anything is done for it. */
static kvd_status check_out(const void *out, const char *name, kvd_err *err)
{
    size_t given = 0;

    if (!out)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: NULL", name);
    memcpy(&given, out, sizeof(given));
    if (given >= sizeof(size_t) && given <= STRUCT_BYTES_MAX)
        return KVD_OK;
    return kvd_fail(err, KVD_E_INVAL, 0,
                    "%s.struct_size is %zu: begin with its initialiser, KVD_*_INIT", name, given);
}

/* The same where the function has no err: the log says it. */
static kvd_status check_out_log(const void *out, const char *name)
{
    kvd_err          err = { 0 };
    const kvd_status st  = check_out(out, name, &err);

    if (st != KVD_OK)
        kvd_log(KVD_LOG_ERROR, "%s", err.msg);
    return st;
}

/* Copies our struct out, no further than the caller's reaches. */
static void give_struct(void *dst, const void *src, size_t size)
{
    size_t given;

    memcpy(&given, dst, sizeof(given));
    memcpy(dst, src, given < size ? given : size);
    memcpy(dst, &given, sizeof(given));
}

/* ---- model ------------------------------------------------------------------------ */

kvd_status kvd_model_open(kvd_model **out, const kvd_model_params *p, kvd_err *err)
{
    kvd_model_params q;

    *out = NULL;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_model_params", err));
    return engine_model_open(out, &q, err);
}

void kvd_model_close(kvd_model *m)
{
    engine_model_close(m);
}

kvd_status kvd_model_get_info(const kvd_model *m, kvd_model_info *out)
{
    const model_hparams *hp = model_get_hparams(m->net);
    const uint64_t       kv = (uint64_t)hp->n_layer * hp->n_kv_head * hp->head_dim * 2;
    const kvd_model_info i  = {
         .arch               = hp->arch,
         .name               = m->name,
         .file_type          = m->file_type,
         .backend            = m->be->ops->name,
         .isa                = m->be->isa,
         .chat_template      = m->tmpl_text,
         .n_param            = model_n_param(m->net),
         .weight_bytes       = engine_model_weight_bytes(m),
         .n_layer            = hp->n_layer,
         .n_embd             = hp->n_embd,
         .n_head             = hp->n_head,
         .n_kv_head          = hp->n_kv_head,
         .head_dim           = hp->head_dim,
         .n_ff               = hp->n_ff,
         .n_vocab            = hp->n_vocab,
         .n_thread           = m->be->n_thread,
         .n_ctx_train        = hp->n_ctx_train,
         .kv_bytes_per_token = kv * (m->precise ? 4 : 2),
         .bos_token          = m->tok ? tok_bos(m->tok) : -1, /* a shape has no vocabulary */
         .eos_token          = m->tok ? tok_eos(m->tok) : -1,
    };

    KVD_TRY(check_out_log(out, "kvd_model_info"));
    give_struct(out, &i, sizeof(i));
    return KVD_OK;
}

kvd_status kvd_inspect(const char *path, char **json, kvd_err *err)
{
    gguf_file *g;
    kvd_buf    b = { 0 };

    *json = NULL;
    if (!path)
        return kvd_fail(err, KVD_E_INVAL, 0, "no file to inspect");
    KVD_TRY(gguf_open(&g, path, err));
    gguf_to_json(g, &b);
    gguf_close(g);
    *json = kvd_buf_take(&b);
    return *json ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory to describe it", path);
}

static void put_limit(kvd_buf *b, const char *name, uint64_t x)
{
    if (x == UINT64_MAX)
        kvd_buf_printf(b, "\"%s\":\"unlimited\",", name);
    else
        kvd_buf_printf(b, "\"%s\":%llu,", name, (unsigned long long)x);
}

static void describe_limits(kvd_buf *b)
{
    char pages[32];

    kvd_buf_printf(b, "\"memory\":{\"total_bytes\":%llu,\"available_bytes\":%llu,",
                   (unsigned long long)os_mem_total(), (unsigned long long)os_mem_available());
    put_limit(b, "memlock_limit_bytes", os_limit_memlock());
    kvd_buf_printf(b, "\"transparent_huge_pages\":\"%s\"},", os_huge_pages(pages, sizeof(pages)));
    kvd_buf_puts(b, "\"limits\":{");
    put_limit(b, "open_files", os_limit_files());
    kvd_buf_printf(b, "\"direct_io_in_working_directory\":%s},",
                   os_direct_io(".") ? "true" : "false");
    kvd_buf_printf(b, "\"gpu\":{\"nvidia_driver\":%s,\"used\":false},",
                   os_has_nvidia() ? "true" : "false");
}

kvd_status kvd_doctor(char **json, kvd_err *err)
{
    const os_cpu *c = os_cpu_get();
    kvd_buf       b = { 0 };

    kvd_buf_printf(&b, "{\"version\":\"%s\",\"cpu\":{\"model\":\"", kvd_version());
    for (const char *s = c->model; *s; s++)
        if (*s >= ' ' && *s < 127 && *s != '"' && *s != '\\')
            kvd_buf_putc(&b, *s);
    kvd_buf_printf(&b,
                   "\",\"isa\":\"%s\",\"avx2\":%d,\"avx_vnni\":%d,\"avx512\":%d,\"avx512_vnni\":%d,"
                   "\"avx512_bf16\":%d,\"amx_int8\":%d,\"amx_bf16\":%d,\"n_cpu\":%u,"
                   "\"l1d_bytes\":%u,\"l2_bytes\":%u,\"l3_bytes\":%u},",
                   os_isa_name(c->isa), c->avx2, c->avx_vnni, c->avx512, c->avx512_vnni,
                   c->avx512_bf16, c->amx_int8, c->amx_bf16, c->n_cpu, c->l1d_bytes, c->l2_bytes,
                   c->l3_bytes);
    describe_limits(&b);
    kvd_buf_puts(&b, "\"backends\":[\"cpu\",\"ref\"]}");
    *json = kvd_buf_take(&b);
    return *json ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "no memory to describe the machine");
}

/* ---- text ------------------------------------------------------------------------- */

static kvd_status check_spans(const kvd_span *s, size_t n, size_t len, kvd_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (s[i].start > s[i].end || s[i].end > len || (i > 0 && s[i].start < s[i - 1].end))
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "trusted span %zu is [%zu, %zu) in %zu bytes: spans must ascend", i,
                            s[i].start, s[i].end, len);
    return KVD_OK;
}

static kvd_status no_tokenizer(kvd_err *err)
{
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "a shape has no tokenizer");
}

kvd_status kvd_tokenize(const kvd_model *m, const char *text, size_t len, const kvd_span *trusted,
                        size_t n_trusted, bool add_bos, int32_t *token, size_t cap, size_t *n_token,
                        kvd_err *err)
{
    tok_ids    ids = { 0 };
    kvd_status st;

    *n_token = 0;
    if (!m->tok)
        return no_tokenizer(err);
    KVD_TRY(check_spans(trusted, n_trusted, len, err));
    st = tok_encode(m->tok, text, len, trusted, n_trusted, add_bos, &ids, err);
    if (st == KVD_OK) {
        *n_token = ids.len;
        if (ids.len && cap)
            memcpy(token, ids.data, (ids.len < cap ? ids.len : cap) * sizeof(*token));
        if (ids.len > cap)
            st = kvd_fail(err, KVD_E_FULL, 0, "%zu tokens, room for %zu", ids.len, cap);
    }
    tok_ids_free(&ids);
    return st;
}

const char *kvd_token_bytes(const kvd_model *m, int32_t token, size_t *len)
{
    if (m->tok)
        return tok_bytes(m->tok, token, len);
    if (len)
        *len = 0;
    return "";
}

bool kvd_token_is_end(const kvd_model *m, int32_t token)
{
    return m->tok && tok_is_end(m->tok, token);
}

bool kvd_token_is_special(const kvd_model *m, int32_t token)
{
    return m->tok && tok_is_special(m->tok, token);
}

/* A kvd_detok is a tok_stream: the public name of the same object. */
kvd_status kvd_detok_open(kvd_detok **out, const kvd_model *m, kvd_err *err)
{
    *out = NULL;
    return m->tok ? tok_stream_open((tok_stream **)out, m->tok, err) : no_tokenizer(err);
}

const char *kvd_detok_feed(kvd_detok *d, int32_t token, bool show_special, size_t *len)
{
    const char *text = tok_stream_feed((tok_stream *)d, token, show_special);

    if (len)
        *len = tok_stream_len((tok_stream *)d);
    return text;
}

const char *kvd_detok_flush(kvd_detok *d, size_t *len)
{
    const char *text = tok_stream_flush((tok_stream *)d);

    if (len)
        *len = tok_stream_len((tok_stream *)d);
    return text;
}

void kvd_detok_close(kvd_detok *d)
{
    tok_stream_close((tok_stream *)d);
}

kvd_status kvd_chat_render(const kvd_model *m, const kvd_chat_request *r, char **text, size_t *len,
                           kvd_span **spans, size_t *n_span, kvd_err *err)
{
    kvd_chat_request q;
    kvd_buf          out = { 0 };
    kvd_span        *sp  = NULL;
    size_t           n   = 0;
    kvd_status       st;

    *text = NULL;
    if (len)
        *len = 0;
    if (spans)
        *spans = NULL;
    if (n_span)
        *n_span = 0;
    KVD_TRY(take_struct(&q, sizeof(q), r, "kvd_chat_request", err));
    if (!q.messages_json)
        return kvd_fail(err, KVD_E_INVAL, 0, "kvd_chat_request.messages_json is NULL");
    st = engine_chat_render(m, &q, &out, &sp, &n, err);
    if (st == KVD_OK) {
        const size_t out_len = out.len;

        *text = kvd_buf_take(&out);
        if (!*text)
            st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the rendered chat");
        else if (len)
            *len = out_len;
    }
    kvd_buf_free(&out);
    if (st == KVD_OK && spans && n_span) {
        *spans  = sp;
        *n_span = n;
    } else {
        kvd_free(sp);
    }
    return st;
}

/* ---- session ---------------------------------------------------------------------- */

/* Session parameters and, where they point to them, those of attention. */
typedef struct session_args {
    kvd_session_params   p;
    kvd_attention_params attention;
} session_args;

static kvd_status take_session(session_args *a, const kvd_session_params *p, kvd_err *err)
{
    KVD_TRY(take_struct(&a->p, sizeof(a->p), p, "kvd_session_params", err));
    if (!a->p.attention)
        return KVD_OK;
    KVD_TRY(take_struct(&a->attention, sizeof(a->attention), a->p.attention, "kvd_attention_params",
                        err));
    a->p.attention = &a->attention;
    return KVD_OK;
}

kvd_status kvd_session_plan(const kvd_model *m, const kvd_session_params *p, kvd_plan *out,
                            kvd_err *err)
{
    session_args q;
    kvd_plan     plan = { 0 };

    KVD_TRY(check_out(out, "kvd_plan", err));
    KVD_TRY(take_session(&q, p, err));
    KVD_TRY(engine_session_plan(m, &q.p, &plan, err));
    give_struct(out, &plan, sizeof(plan));
    return KVD_OK;
}

kvd_status kvd_policy_apply(const char *name, kvd_session_params *p, kvd_attention_params *a,
                            kvd_err *err)
{
    return engine_policy_apply(name, p, a, err);
}

const char *kvd_policy_name(uint32_t i)
{
    const sparse_policy *r = sparse_policy_at(i);

    return r ? r->name : NULL;
}

kvd_status kvd_policy_list(char **text, kvd_err *err)
{
    kvd_buf b = { 0 };

    *text = NULL;
    sparse_policy_print(&b);
    if (b.oom) {
        kvd_buf_free(&b);
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the table of policies");
    }
    *text = kvd_buf_take(&b);
    return KVD_OK;
}

kvd_status kvd_session_steps(const kvd_model *m, const kvd_session_params *p, uint32_t n_row,
                             char **text, kvd_err *err)
{
    session_args q;

    *text = NULL;
    KVD_TRY(take_session(&q, p, err));
    return engine_session_steps(m, &q.p, n_row, text, err);
}

kvd_status kvd_session_open(kvd_session **out, kvd_model *m, const kvd_session_params *p,
                            kvd_err *err)
{
    session_args q;

    kvd_err own = { 0 };

    *out = NULL;
    err  = err ? err : &own;
    KVD_TRY(take_session(&q, p, err));
    KVD_TRY(engine_model_alive(m, err));
    return engine_model_note(m, engine_session_open(out, m, &q.p, err), err);
}

kvd_status kvd_session_set_attention(kvd_session *s, const kvd_attention_params *p, kvd_err *err)
{
    kvd_attention_params q;
    kvd_err              own = { 0 };

    err = err ? err : &own;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_attention_params", err));
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_session_set_attention(s, &q, err), err);
}

void kvd_session_close(kvd_session *s)
{
    engine_session_close(s);
}

kvd_status kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err)
{
    kvd_batch q;
    kvd_err   own = { 0 };

    err = err ? err : &own;
    KVD_TRY(take_struct(&q, sizeof(q), b, "kvd_batch", err));
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_eval(s, &q, err), err);
}

const float *kvd_logits(const kvd_session *s, uint32_t row)
{
    const size_t n_vocab = model_get_hparams(s->model->net)->n_vocab;

    return row < s->n_logits ? s->buf.logits + row * n_vocab : NULL;
}

kvd_status kvd_prefill(kvd_session *s, uint32_t seq, const int32_t *token, size_t n_token,
                       kvd_progress_fn fn, void *ctx, kvd_err *err)
{
    kvd_err own = { 0 };

    err = err ? err : &own;
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_prefill(s, seq, token, n_token, fn, ctx, err), err);
}

kvd_status kvd_prompt_begin(kvd_session *s, uint32_t seq, const kvd_prompt *p, kvd_err *err)
{
    kvd_prompt q;
    kvd_err    own = { 0 };

    err = err ? err : &own;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_prompt", err));
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_prompt_begin(s, seq, &q, err), err);
}

kvd_status kvd_hold_open(kvd_hold **out, kvd_session *s, const kvd_prompt *p, kvd_err *err)
{
    kvd_prompt q;
    kvd_err    own = { 0 };

    err  = err ? err : &own;
    *out = NULL;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_prompt", err));
    return engine_hold_open(out, s, &q, err);
}

void kvd_hold_close(kvd_hold *h)
{
    engine_hold_close(h);
}

uint32_t kvd_seq_len(const kvd_session *s, uint32_t seq)
{
    return engine_seq_len(s, seq);
}

uint32_t kvd_seq_common(const kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token)
{
    return engine_seq_common(s, seq, token, n_token);
}

kvd_status kvd_seq_move(kvd_session *s, uint32_t from, uint32_t to, kvd_err *err)
{
    kvd_err own = { 0 };

    err = err ? err : &own;
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_seq_move(s, from, to, err), err);
}

kvd_status kvd_seq_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep, kvd_err *err)
{
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_seq_truncate(s, seq, n_keep, err);
}

kvd_status kvd_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token, kvd_err *err)
{
    kvd_err own = { 0 };

    err = err ? err : &own;
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_seq_synthesize(s, seq, n_token, err), err);
}

kvd_status kvd_session_measure(kvd_session *s, const kvd_measure_params *p, kvd_err *err)
{
    kvd_measure_params q   = KVD_MEASURE_PARAMS_INIT;
    kvd_err            own = { 0 };

    err = err ? err : &own;
    if (p)
        KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_measure_params", err));
    KVD_TRY(engine_model_alive(s->model, err));
    return engine_model_note(s->model, engine_measure(s, &q, err), err);
}

kvd_status kvd_session_get_stages(const kvd_session *s, kvd_stages *out)
{
    kvd_stages st = s->measure.sum;

    KVD_TRY(check_out_log(out, "kvd_stages"));
    give_struct(out, &st, sizeof(st));
    return KVD_OK;
}

void kvd_session_cancel(kvd_session *s)
{
    atomic_store_explicit(&s->cancel, true, memory_order_relaxed);
}

bool kvd_session_uncancel(kvd_session *s)
{
    return atomic_exchange_explicit(&s->cancel, false, memory_order_relaxed);
}

kvd_status kvd_session_get_stats(const kvd_session *s, kvd_stats *out)
{
    kvd_stats         st = s->stats;
    kvd_device_memory d;
    kv_counts         c;
    kv_used           used;

    KVD_TRY(check_out_log(out, "kvd_stats"));
    kv_get_counts(s->kv, &c);
    st.kv_used_tokens     = kv_used_tokens(s->kv);
    st.kv_capacity_tokens = kv_capacity_tokens(s->kv);
    st.n_sparse           = c.n_step;
    st.n_selected         = c.n_select;
    st.n_hit              = c.n_hit;
    st.n_miss             = c.n_miss;
    st.n_urgent           = c.n_urgent;
    st.n_evicted          = c.n_evict;
    st.n_refilled         = c.n_refill;
    st.n_sealed_blocks    = c.n_sealed;
    st.n_grown_blocks     = c.n_grown;
    st.bytes_up           = c.bytes_up;
    st.bytes_down         = c.bytes_down;
    st.bytes_dense        = c.bytes_dense;
    st.select_ns          = c.select_ns;
    st.fetch_ns           = c.fetch_ns;
    st.attend_ns          = c.attend_ns;
    st.seal_ns            = c.seal_ns;
    st.n_disk             = c.n_disk;
    st.n_disk_urgent      = c.n_disk_urgent;
    st.disk_wait_ns       = c.disk_wait_ns;
    st.n_disk_read        = c.n_disk_read;
    st.disk_read_bytes    = c.disk_read_bytes;
    st.disk_useful_bytes  = c.disk_useful_bytes;
    st.disk_put_bytes     = c.disk_put_bytes;
    st.disk_aux_bytes     = c.disk_aux_bytes;
    st.n_disk_refused     = c.n_disk_refused;
    st.mass               = c.n_mass ? c.mass / (double)c.n_mass : 0.0;
    st.disk_tail_bytes    = c.disk_tail_bytes;
    st.n_disk_stall       = c.n_disk_stall;
    st.n_disk_late        = c.n_disk_late;
    st.zone_share         = c.n_mass ? c.zone / (double)c.n_mass : 0.0;
    st.zone_ns            = c.zone_ns;
    st.n_slow_prefix      = c.n_slow;
    st.cached_ns          = c.restore_ns;
    memcpy(st.cache_pause, c.disk_pause, sizeof(st.cache_pause));
    st.n_disk_failed    = c.n_disk_failed;
    st.n_disk_timeout   = c.n_disk_timeout;
    st.n_disk_corrupt   = c.n_disk_corrupt;
    st.up_ns            = c.up_ns;
    st.up_dense_ns      = c.up_dense_ns;
    st.down_ns          = c.down_ns;
    st.disk_read_ns     = c.disk_read_ns;
    st.disk_put_ns      = c.disk_put_ns;
    st.disk_put_wait_ns = c.disk_put_wait_ns;
    kv_used_bytes(s->kv, &used);
    st.kv_device_used_bytes = used.device_bytes;
    st.kv_host_used_bytes   = used.host_bytes;
    st.kv_disk_used_bytes   = used.disk_bytes;
    st.kv_disk_limit_bytes  = used.disk_limit_bytes;
    engine_schedule_stats(s, &st);
    s->model->be->ops->memory(s->model->be, &d);
    st.device_used_bytes = d.used;
    st.device_held_bytes = d.held + d.scratch;
    st.pinned_bytes      = d.pinned;
    give_struct(out, &st, sizeof(st));
    return KVD_OK;
}

kvd_status kvd_session_flush(kvd_session *s, kvd_err *err)
{
    kvd_err own = { 0 };

    err = err ? err : &own;
    return engine_model_note(s->model, kv_flush(s->kv, err), err);
}

kvd_status kvd_session_clear_cache(kvd_session *s, char **json, kvd_err *err)
{
    kvd_buf    b   = { 0 };
    kvd_err    own = { 0 };
    kvd_status st;

    *json = NULL;
    err   = err ? err : &own;
    st    = engine_model_note(s->model, kv_clear(s->kv, &b, err), err);
    if (st == KVD_OK && !(*json = kvd_buf_take(&b)))
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory to say what was removed");
    kvd_buf_free(&b);
    return st;
}

bool kvd_session_get_lane(const kvd_session *s, uint32_t layer, uint32_t kv_head,
                          uint64_t *n_selected, uint64_t *n_hit)
{
    const model_hparams *hp = model_get_hparams(s->model->net);

    *n_selected = *n_hit = 0;
    if (layer >= hp->n_layer || kv_head >= hp->n_kv_head)
        return false;
    kv_lane_counts(s->kv, layer, kv_head, n_selected, n_hit);
    return true;
}

double kvd_session_get_lane_mass(const kvd_session *s, uint32_t layer, uint32_t kv_head)
{
    const model_hparams *hp = model_get_hparams(s->model->net);

    return layer < hp->n_layer && kv_head < hp->n_kv_head ? kv_lane_mass(s->kv, layer, kv_head)
                                                          : 0.0;
}

bool kvd_seq_placement(const kvd_session *s, uint32_t seq, kvd_placement *out)
{
    kvd_placement p     = { 0 };
    kv_where      w     = { 0 };
    const bool    found = engine_seq_where(s, seq, &w);

    if (check_out_log(out, "kvd_placement") != KVD_OK)
        return false;
    p.device_tokens = w.device;
    p.host_tokens   = w.host;
    p.disk_tokens   = w.disk;
    p.window_tokens = w.window;
    give_struct(out, &p, sizeof(p));
    return found;
}

kvd_status kvd_cache_command(const char *dir, kvd_cache_verb verb, uint64_t max_bytes, char **json,
                             kvd_err *err)
{
    kvd_buf    b = { 0 };
    kvd_status st;

    *json = NULL;
    if (!dir || !*dir)
        return kvd_fail(err, KVD_E_INVAL, 0, "no cache directory (dir)");
    st = kv_tend(dir, verb, max_bytes, &b, err);
    if (st == KVD_OK && !(*json = kvd_buf_take(&b)))
        st = kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory to describe it", dir);
    kvd_buf_free(&b);
    return st;
}

/* ---- sampler ---------------------------------------------------------------------- */

kvd_status kvd_sampler_open(kvd_sampler **out, const kvd_model *m, const kvd_sampler_params *p,
                            kvd_err *err)
{
    kvd_sampler_params q;

    *out = NULL;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_sampler_params", err));
    return engine_sampler_open(out, model_get_hparams(m->net)->n_vocab, m->tok, &q, err);
}

void kvd_sampler_close(kvd_sampler *sm)
{
    engine_sampler_close(sm);
}

void kvd_sampler_accept(kvd_sampler *sm, int32_t token)
{
    engine_sampler_accept(sm, token);
}

int32_t kvd_sampler_sample(kvd_sampler *sm, const float *logits)
{
    return engine_sampler_sample(sm, logits);
}

uint32_t kvd_sampler_n_best(const kvd_sampler *sm)
{
    return engine_sampler_n_best(sm);
}

kvd_status kvd_sampler_pick(kvd_sampler *sm, const kvd_session *s, uint32_t row, int32_t *token,
                            kvd_err *err)
{
    const float   *logits = kvd_logits(s, row);
    const uint32_t need   = engine_sampler_n_best(sm);

    if (logits)
        return engine_sampler_take(sm, logits, token, err);
    if (row >= s->n_picks || need == 0 || need > s->best)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "row %u of %u kept rows of %u best logits: the sampler needs %s%u", row,
                        s->n_picks, s->best, need ? "" : "all, not ", need);
    *token = engine_sampler_choose(sm, s->buf.best + (size_t)row * KVD_BEST_MAX, s->best);
    return KVD_OK;
}

/* ---- constrained generation --------------------------------------------------------- */

struct kvd_grammar {
    gram *g;
};

struct kvd_tool_stream {
    tool_stream *s;
    bool         sizeless; /* the struct that the last kvd_tool_next() was given had no size */
};

kvd_tool_format kvd_model_tool_format(const kvd_model *m)
{
    return m->tools;
}

bool kvd_token_is_tool_mark(const kvd_model *m, int32_t token)
{
    return m->tok && tool_is_mark(m->tok, token);
}

kvd_reasoning kvd_chat_reasoning(const kvd_model *m, const char *prompt, size_t len,
                                 kvd_reasoning_state *state)
{
    if (state)
        *state = tool_reasoning_state(m->reasoning, prompt, len);
    return m->reasoning;
}

kvd_status kvd_grammar_open(kvd_grammar **out, const kvd_model *m, const kvd_grammar_params *p,
                            kvd_err *err)
{
    kvd_grammar_params q;
    kvd_grammar       *g;
    kvd_status         st;

    *out = NULL;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_grammar_params", err));
    g = kvd_calloc(1, sizeof(*g));
    if (!g)
        return kvd_fail(err, KVD_E_NOMEM, 0, "grammar: no memory");
    st = engine_grammar_open(&g->g, (kvd_model *)m, &q, err); /* whose trie is made when needed */
    if (st == KVD_OK)
        *out = g;
    else
        kvd_free(g);
    return st;
}

void kvd_grammar_close(kvd_grammar *g)
{
    if (!g)
        return;
    gram_close(g->g);
    kvd_free(g);
}

const char *kvd_grammar_notes(const kvd_grammar *g)
{
    return gram_notes(g->g);
}

kvd_status kvd_sampler_set_grammar(kvd_sampler *sm, kvd_grammar *g, kvd_err *err)
{
    return engine_sampler_set_grammar(sm, g ? g->g : NULL, err);
}

kvd_status kvd_sampler_force(kvd_sampler *sm, int32_t token, kvd_err *err)
{
    return engine_sampler_force(sm, token, err);
}

bool kvd_sampler_may_end(const kvd_sampler *sm)
{
    return engine_sampler_may_end(sm);
}

size_t kvd_sampler_place_bytes(void)
{
    return sizeof(gram_at);
}

void kvd_sampler_save_place(const kvd_sampler *sm, void *place)
{
    memcpy(place, engine_sampler_at((kvd_sampler *)sm), sizeof(gram_at));
}

void kvd_sampler_load_place(kvd_sampler *sm, const void *place)
{
    memcpy(engine_sampler_at(sm), place, sizeof(gram_at));
}

kvd_status kvd_tool_open(kvd_tool_stream **out, kvd_tool_format format, kvd_err *err)
{
    kvd_answer_params p = KVD_ANSWER_PARAMS_INIT;

    p.tools = format;
    return kvd_answer_open(out, &p, err);
}

kvd_status kvd_answer_open(kvd_tool_stream **out, const kvd_answer_params *p, kvd_err *err)
{
    kvd_answer_params q;
    tool_desc         d;
    kvd_tool_stream  *t;
    kvd_status        st;

    *out = NULL;
    KVD_TRY(take_struct(&q, sizeof(q), p, "kvd_answer_params", err));
    d = (tool_desc){ .format     = q.tools,
                     .tools_json = q.tools_json,
                     .reasoning  = q.reasoning,
                     .state      = q.reasoning_state };
    t = kvd_calloc(1, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory");
    st = tool_stream_open(&t->s, &d, err);
    if (st == KVD_OK)
        *out = t;
    else
        kvd_free(t);
    return st;
}

void kvd_tool_close(kvd_tool_stream *t)
{
    if (!t)
        return;
    tool_stream_close(t->s);
    kvd_free(t);
}

static kvd_status check_events(const kvd_tool_stream *t, kvd_err *err)
{
    return t->sizeless ? kvd_fail(err, KVD_E_INVAL, 0,
                                  "kvd_tool_event.struct_size was none where the last event was "
                                  "asked for: begin with KVD_TOOL_EVENT_INIT")
                       : KVD_OK;
}

kvd_status kvd_tool_feed(kvd_tool_stream *t, const char *text, size_t len, kvd_err *err)
{
    KVD_TRY(check_events(t, err));
    return tool_stream_feed(t->s, text, len, err);
}

kvd_status kvd_tool_flush(kvd_tool_stream *t, kvd_err *err)
{
    KVD_TRY(check_events(t, err));
    return tool_stream_flush(t->s, err);
}

kvd_status kvd_tool_cut(kvd_tool_stream *t, bool more, kvd_err *err)
{
    KVD_TRY(check_events(t, err));
    return tool_stream_cut(t->s, more, err);
}

bool kvd_tool_reasons(const kvd_tool_stream *t)
{
    return tool_stream_reasons(t->s);
}

bool kvd_tool_next(kvd_tool_stream *t, kvd_tool_event *out)
{
    kvd_tool_event e;

    t->sizeless = check_out_log(out, "kvd_tool_event") != KVD_OK;
    if (t->sizeless || !tool_stream_next(t->s, &e))
        return false;
    give_struct(out, &e, sizeof(e));
    return true;
}
