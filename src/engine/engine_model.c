/* SPDX-License-Identifier: Apache-2.0 */
/* engine_model.c - a GGUF file made ready: weights bound, tokenizer built, template compiled,
 * backend opened.  Whatever of these cannot be served is an error here, with the way out in the
 * message.
 *
 * Owns everything in kvd_model.  Immutable after open, but for the backend's scratch. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"

#define ROOM_MARGIN (256ull << 20) /* of a device that stays free: allocations are rounded up */

/* ---- tokenizer -------------------------------------------------------------------- */

typedef struct vocab_tables { /* only alive while tok_open() reads them */
    tok_str *token, *merge;
    float   *score;
    int32_t *attr;
} vocab_tables;

static kvd_status read_strings(const gguf_kv *kv, tok_str **out, uint32_t *n, kvd_err *err)
{
    const uint64_t count = gguf_kv_count(kv);

    if (count > INT32_MAX)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "tokenizer: %llu entries",
                        (unsigned long long)count);
    *out = kvd_calloc(count, sizeof(**out));
    if (!*out)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory for %llu entries",
                        (unsigned long long)count);
    for (uint64_t i = 0; i < count; i++) {
        gguf_str s = { 0 };

        gguf_kv_str(kv, i, &s);
        (*out)[i] = (tok_str){ .data = s.data, .len = s.len };
    }
    *n = (uint32_t)count;
    return KVD_OK;
}

/* An array with one element for each token. */
static kvd_status read_per_token(const gguf_file *g, const char *key, bool required, gguf_type elem,
                                 uint32_t n_token, const gguf_kv **out, kvd_err *err)
{
    KVD_TRY(gguf_get_array(g, key, required, elem, out, err));
    if (*out && gguf_kv_count(*out) != n_token)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "key \"%s\" has %llu elements for %u tokens", key,
                        (unsigned long long)gguf_kv_count(*out), n_token);
    return KVD_OK;
}

/* The format lets any of these be absent.  Text would be wrong without the types, the merges of
 * BPE and the scores of SPM, so these are required. */
static kvd_status read_tables(const gguf_file *g, tok_vocab *v, vocab_tables *t, kvd_err *err)
{
    const bool     bpe = v->model == TOK_BPE;
    const gguf_kv *tokens, *merges, *scores, *attrs;

    KVD_TRY(gguf_get_array(g, "tokenizer.ggml.tokens", true, GGUF_STRING, &tokens, err));
    KVD_TRY(gguf_get_array(g, "tokenizer.ggml.merges", bpe, GGUF_STRING, &merges, err));
    KVD_TRY(read_strings(tokens, &t->token, &v->n_token, err));
    if (merges)
        KVD_TRY(read_strings(merges, &t->merge, &v->n_merge, err));
    KVD_TRY(read_per_token(g, "tokenizer.ggml.scores", !bpe, GGUF_F32, v->n_token, &scores, err));
    KVD_TRY(
        read_per_token(g, "tokenizer.ggml.token_type", true, GGUF_I32, v->n_token, &attrs, err));
    t->score = scores ? kvd_calloc(v->n_token, sizeof(float)) : NULL;
    t->attr  = kvd_calloc(v->n_token, sizeof(int32_t));
    if ((scores && !t->score) || !t->attr)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory for %u entries", v->n_token);
    for (uint32_t i = 0; i < v->n_token; i++) {
        double  d = 0;
        int64_t a = TOK_NORMAL;

        if (scores && gguf_kv_f64(scores, i, &d))
            t->score[i] = (float)d;
        if (gguf_kv_i64(attrs, i, &a))
            t->attr[i] = (int32_t)a;
    }
    v->token = t->token;
    v->merge = t->merge;
    v->score = t->score;
    v->attr  = t->attr;
    return KVD_OK;
}

/* Token ids are optional.  Absent is -1, and so is UINT32_MAX, by which some writers say that there
 * is none; any other id out of range is a damaged file. */
static kvd_status read_id(const gguf_file *g, const char *key, uint32_t n_token, int32_t *out,
                          kvd_err *err)
{
    uint32_t id = UINT32_MAX;

    KVD_TRY(gguf_get_u32(g, key, false, &id, err));
    *out = -1;
    if (id == UINT32_MAX)
        return KVD_OK;
    if (id >= n_token)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s is %u, the vocabulary has %u tokens", key, id,
                        n_token);
    *out = (int32_t)id;
    return KVD_OK;
}

static kvd_status read_vocab(const gguf_file *g, tok_vocab *v, vocab_tables *t, kvd_err *err)
{
    gguf_str kind = { 0 }, pre = { 0 };

    KVD_TRY(gguf_get_str(g, "tokenizer.ggml.model", true, &kind, err));
    if (gguf_str_eq(kind, "gpt2"))
        v->model = TOK_BPE;
    else if (gguf_str_eq(kind, "llama"))
        v->model = TOK_SPM;
    else
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "tokenizer model '%.*s' (known: gpt2, llama)",
                        (int)kvd_min_u64(kind.len, 64), kind.data);
    KVD_TRY(gguf_get_str(g, "tokenizer.ggml.pre", false, &pre, err));
    v->pre = (tok_str){ .data = pre.data, .len = pre.len };
    KVD_TRY(read_tables(g, v, t, err));
    KVD_TRY(read_id(g, "tokenizer.ggml.bos_token_id", v->n_token, &v->bos, err));
    KVD_TRY(read_id(g, "tokenizer.ggml.eos_token_id", v->n_token, &v->eos, err));
    KVD_TRY(read_id(g, "tokenizer.ggml.eot_token_id", v->n_token, &v->eot, err));
    KVD_TRY(read_id(g, "tokenizer.ggml.unknown_token_id", v->n_token, &v->unk, err));
    v->add_bos          = tok_default_add_bos(v->model, v->pre);
    v->add_space_prefix = v->model == TOK_SPM;
    KVD_TRY(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", false, &v->add_bos, err));
    KVD_TRY(gguf_get_bool(g, "tokenizer.ggml.add_eos_token", false, &v->add_eos, err));
    return gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", false, &v->add_space_prefix, err);
}

static kvd_status open_tokenizer(kvd_model *m, const char *pre, kvd_err *err)
{
    const uint32_t n_vocab = model_get_hparams(m->net)->n_vocab;
    tok_vocab      v       = { 0 };
    vocab_tables   t       = { 0 };
    kvd_status     st      = read_vocab(m->file, &v, &t, err);

    if (st == KVD_OK && v.n_token != n_vocab)
        st = kvd_fail(err, KVD_E_CORRUPT, 0,
                      "the tokenizer has %u tokens, token_embd.weight %u rows", v.n_token, n_vocab);
    if (pre)
        v.pre = (tok_str){ .data = pre, .len = strlen(pre) };
    if (st == KVD_OK)
        st = tok_open(&m->tok, &v, err);
    kvd_free(t.token);
    kvd_free(t.merge);
    kvd_free(t.score);
    kvd_free(t.attr);
    return st;
}

/* ---- chat template ---------------------------------------------------------------- */

static const char *special_text(const tok *t, int32_t id, char *out, size_t cap)
{
    size_t      len = 0;
    const char *s   = id >= 0 ? tok_bytes(t, id, &len) : "";

    snprintf(out, cap, "%.*s", (int)kvd_min_u64(len, cap - 1), s ? s : "");
    return out;
}

kvd_status engine_chat_render(const kvd_model *m, const kvd_chat_request *r, kvd_buf *out,
                              kvd_span **spans, size_t *n_span, kvd_err *err)
{
    char       bos[64], eos[64];
    tmpl_input in = {
        .messages_json         = r->messages_json,
        .tools_json            = r->tools_json,
        .vars_json             = r->vars_json,
        .add_generation_prompt = r->add_generation_prompt,
        .now_unix              = (int64_t)time(NULL),
    };

    if (!m->tmpl)
        return kvd_fail(
            err, KVD_E_UNSUPPORTED, 0,
            "the model has no chat template; give one (chat_template) or use the raw text "
            "(kvd_tokenize)");
    in.bos_token = special_text(m->tok, tok_bos(m->tok), bos, sizeof(bos));
    in.eos_token = special_text(m->tok, tok_eos(m->tok), eos, sizeof(eos));
    return tmpl_render(m->tmpl, &in, out, spans, n_span, err);
}

/* One short dialogue is rendered at open, so that a template that cannot run is known at start.
 * A template may refuse the dialogue by its own rules (raise_exception): that is not our failure.
 */
static kvd_status test_template(const kvd_model *m, kvd_err *err)
{
    const kvd_chat_request r = {
        .struct_size           = sizeof(r),
        .messages_json         = "[{\"role\":\"user\",\"content\":\"hello\"}]",
        .add_generation_prompt = true,
    };
    kvd_buf    out   = { 0 };
    kvd_span  *spans = NULL;
    size_t     n     = 0;
    kvd_status st    = engine_chat_render(m, &r, &out, &spans, &n, err);

    kvd_buf_free(&out);
    kvd_free(spans);
    return st == KVD_E_INVAL ? KVD_OK : st;
}

static kvd_status open_template(kvd_model *m, const char *given, kvd_err *err)
{
    gguf_str   text = { 0 };
    kvd_err    why  = { 0 };
    kvd_status st;

    KVD_TRY(gguf_get_str(m->file, "tokenizer.chat_template", false, &text, err));
    if (given)
        text = (gguf_str){ .data = given, .len = strlen(given) };
    if (text.len == 0)
        return KVD_OK;
    m->tmpl_text = kvd_strndup(text.data, text.len);
    if (!m->tmpl_text)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the chat template");
    m->tools     = tool_format_of(text.data, text.len);
    m->reasoning = tool_reasoning_of(text.data, text.len);
    st           = tmpl_open(&m->tmpl, text.data, text.len, &why);
    if (st == KVD_OK)
        st = test_template(m, &why);
    if (st == KVD_OK || st == KVD_E_NOMEM) {
        if (err && st != KVD_OK)
            *err = why;
        return st;
    }
    return kvd_fail(err, st, 0, "the chat template cannot be run: %s; give another (chat_template)",
                    why.msg);
}

/* ---- open ------------------------------------------------------------------------- */

/* The element type that holds most of the weights, for people. */
static void name_file_type(kvd_model *m)
{
    uint64_t bytes[32] = { 0 };
    uint32_t best      = 0;

    for (uint64_t i = 0; i < gguf_n_tensor(m->file); i++) {
        const gguf_tensor *t = gguf_tensor_at(m->file, i);

        if (t->type_id < KVD_COUNTOF(bytes))
            bytes[t->type_id] += t->bytes;
    }
    for (uint32_t i = 0; i < KVD_COUNTOF(bytes); i++)
        if (bytes[i] > bytes[best])
            best = i;
    snprintf(m->file_type, sizeof(m->file_type), "%s", kvd_dtype_name(best));
}

/* Of the file, or of what was made for a shape. */
uint64_t engine_model_weight_bytes(const kvd_model *m)
{
    return m->file ? gguf_tensor_bytes(m->file) : model_get_bytes(m->net).all;
}

uint64_t engine_model_room(const kvd_model *m)
{
    kvd_device_memory d;
    uint64_t          most, taken;

    m->be->ops->memory(m->be, &d);
    most  = d.free - kvd_min_u64(d.free, kvd_min_u64(ROOM_MARGIN, d.total / 64)) + d.scratch;
    taken = d.held + d.context;
    if (m->device_memory)
        most = kvd_min_u64(most, m->device_memory > taken ? m->device_memory - taken : 0);
    return most;
}

static kvd_status place_weights(kvd_model *m, kvd_err *err)
{
    const uint64_t    need = model_place_bytes(m->net);
    kvd_device_memory d;

    m->be->ops->memory(m->be, &d);
    if (need > engine_model_room(m))
        return kvd_fail(err, KVD_E_NOMEM, 0,
                        "weights of %llu MiB do not fit the device's memory: of %llu MiB "
                        "(device_memory) the driver's context takes %llu and %llu MiB are free; "
                        "at least %llu MiB and what a session takes are needed",
                        (unsigned long long)(need >> 20),
                        (unsigned long long)((m->device_memory ? m->device_memory : d.total) >> 20),
                        (unsigned long long)(d.context >> 20), (unsigned long long)(d.free >> 20),
                        (unsigned long long)((need + d.context + d.held) >> 20) + 1);
    return model_place(m->net, m->be, m->stream, err);
}

/* A model that is only a shape: no file, no tokenizer, no template. */
static kvd_status open_made(kvd_model *m, const kvd_model_params *p, kvd_err *err)
{
    KVD_TRY(model_open_shape(&m->net, p->shape, p->shape_weights, err));
    snprintf(m->name, sizeof(m->name), "%s, random weights", p->shape);
    snprintf(m->file_type, sizeof(m->file_type), "%s",
             p->shape_weights ? p->shape_weights : "bf16");
    KVD_TRY(m->be->ops->stream_open(m->be, &m->stream, err));
    if (!m->be->unified)
        return place_weights(m, err);
    return model_place(m->net, m->be, m->stream, err);
}

static kvd_status open_parts(kvd_model *m, const kvd_model_params *p, kvd_err *err)
{
    const model_rope_request rope = { .scaling  = p->rope_scaling,
                                      .factor   = p->rope_factor,
                                      .orig_ctx = p->rope_orig_ctx,
                                      .base     = p->rope_base };
    const kvd_backend_params be   = { .name          = p->backend,
                                      .cpu_isa       = p->cpu_isa,
                                      .n_thread      = p->n_thread,
                                      .precise       = p->precise,
                                      .deterministic = p->deterministic };
    gguf_str                 name = { 0 };

    KVD_TRY(kvd_backend_open(&m->be, &be, err));
    if (m->be->unified && p->device_memory)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "backend %s has no memory of its own to be limited (device_memory); the "
                        "device tier of the KV cache has a limit (kv_device)",
                        m->be->ops->name);
    m->device_memory = p->device_memory;
    if (p->shape)
        return open_made(m, p, err);
    KVD_TRY(gguf_open(&m->file, p->path, err));
    if (m->be->unified && /* else they go to the device */
        (p->weights == KVD_WEIGHTS_COPY ||
         (p->weights == KVD_WEIGHTS_AUTO && gguf_mapped_bytes(m->file) <= os_mem_available() / 2)))
        gguf_copy_to_memory(m->file);
    KVD_TRY(model_open(&m->net, m->file, &rope, err));
    KVD_TRY(gguf_get_str(m->file, "general.name", false, &name, err));
    snprintf(m->name, sizeof(m->name), "%.*s", (int)kvd_min_u64(name.len, sizeof(m->name) - 1),
             name.data ? name.data : "");
    name_file_type(m);
    KVD_TRY(open_tokenizer(m, p->pre_tokenizer, err));
    KVD_TRY(open_template(m, p->chat_template, err));
    KVD_TRY(m->be->ops->stream_open(m->be, &m->stream, err));
    return m->be->unified ? KVD_OK : place_weights(m, err);
}

/* Whatever a file could not be opened for, the message names the file. */
static kvd_status fail_open(const kvd_model_params *p, kvd_status st, kvd_err *err)
{
    if (p->path && !p->shape)
        kvd_err_name_path(err, p->path);
    return st;
}

kvd_status engine_model_open(kvd_model **out, const kvd_model_params *p, kvd_err *err)
{
    kvd_model *m;
    kvd_status st;

    *out = NULL;
    if (!p->path && !p->shape)
        return kvd_fail(err, KVD_E_INVAL, 0, "no model file (path) and no shape given");
    m = kvd_calloc(1, sizeof(*m));
    if (!m)
        return fail_open(p, kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the model"), err);
    m->precise = p->precise || (p->backend && strcmp(p->backend, "ref") == 0);
    st         = open_parts(m, p, err);
    if (st != KVD_OK) {
        engine_model_close(m);
        return fail_open(p, st, err);
    }
    *out = m;
    return KVD_OK;
}

kvd_status engine_model_reserve(kvd_model *m, const kvd_backend_limits *lim, kvd_err *err)
{
    m->n_reserve++; /* a part of it may have grown even where all of it could not */
    return m->be->ops->reserve(m->be, lim, err);
}

kvd_status engine_model_note(kvd_model *m, kvd_status st, const kvd_err *err)
{
    if (st == KVD_E_DEVICE && !*m->device_error)
        snprintf(m->device_error, sizeof(m->device_error), "%s",
                 err && *err->msg ? err->msg : "the device has failed");
    return st;
}

kvd_status engine_model_alive(const kvd_model *m, kvd_err *err)
{
    if (!*m->device_error)
        return KVD_OK;
    return kvd_fail(err, KVD_E_DEVICE, 0,
                    "the device is lost: %.400s (close sessions and model; what the prefix cache "
                    "had by then is kept)",
                    m->device_error);
}

void engine_model_close(kvd_model *m)
{
    if (!m)
        return;
    model_displace(m->net);
    if (m->stream)
        m->be->ops->stream_close(m->stream);
    kvd_backend_close(m->be);
    tmpl_close(m->tmpl);
    kvd_free(m->tmpl_text);
    gram_vocab_close(atomic_load(&m->trie));
    tok_close(m->tok);
    model_close(m->net);
    gguf_close(m->file);
    kvd_free(m);
}

/* Two threads may come here at once: one of the tries is kept. */
static kvd_status open_trie(kvd_model *m, kvd_err *err)
{
    gram_vocab *none = NULL, *v;

    if (atomic_load(&m->trie))
        return KVD_OK;
    if (!m->tok)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "grammar: the model has no tokenizer");
    KVD_TRY(gram_vocab_open(&v, m->tok, err));
    if (!atomic_compare_exchange_strong(&m->trie, &none, v))
        gram_vocab_close(v);
    return KVD_OK;
}

kvd_status engine_grammar_open(gram **out, kvd_model *m, const kvd_grammar_params *p, kvd_err *err)
{
    const gram_desc d = { .schema_json = p->schema_json,
                          .json_object = p->json_object,
                          .tools_json  = p->tools_json,
                          .format      = p->tool_format ? p->tool_format : m->tools,
                          .choice      = p->tool_choice,
                          .tool_name   = p->tool_name,
                          .single_call = p->single_call,
                          .max_calls   = p->max_calls,
                          .reasoning   = p->reasoning,
                          .state       = p->reasoning_state };

    *out = NULL;
    KVD_TRY(open_trie(m, err));
    return gram_open(out, atomic_load(&m->trie), &d, err);
}

uint64_t engine_model_heap_bytes(const kvd_model *m)
{
    const gram_vocab *trie = atomic_load(&m->trie);

    return (trie ? gram_vocab_heap_bytes(trie) : 0) + sizeof(*m) +
           (m->file ? gguf_heap_bytes(m->file) : 0) + model_heap_bytes(m->net) +
           (m->tok ? tok_heap_bytes(m->tok) : 0) + (m->tmpl_text ? strlen(m->tmpl_text) : 0);
}
