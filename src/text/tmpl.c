/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl.c - opening and rendering chat templates; see text.h for what callers rely on.
 *
 * A tmpl is its arena: source, tree and literals, immutable after tmpl_open().  A render has two
 * arenas of its own, limited by the size of its input, which are given back whatever happens.
 *
 * Trust: bytes from the template and the two special tokens of the model are trusted, and so is
 * the role of a message when it is one of the known words, because templates write special tokens
 * around it ('<|' + role + '|>').  Everything else from outside is not. */
#include <string.h>

#include "text/tmpl_ast.h"

kvd_status tmpl_open(tmpl **out, const char *src, size_t len, kvd_err *err)
{
    tmpl       *t;
    tmpl_token *token;
    kvd_status  st;

    *out = NULL;
    if (len > TMPL_MAX_SOURCE)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "chat template: %zu bytes, more than %u", len,
                        TMPL_MAX_SOURCE);
    t = kvd_calloc(1, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "chat template: no memory to compile it");
    kvd_arena_init(&t->mem, SIZE_MAX); /* a fixed multiple of len */
    st = tmpl_lex(t, src, len, &token, err);
    if (st == KVD_OK)
        st = tmpl_parse(t, token, err);
    if (st != KVD_OK) {
        tmpl_close(t);
        return st;
    }
    *out = t;
    return KVD_OK;
}

void tmpl_close(tmpl *t)
{
    if (!t)
        return;
    kvd_arena_free(&t->mem);
    kvd_free(t);
}

/* ---- input ----------------------------------------------------------------------- */

static void bind(tmpl_run *r, const char *name, size_t len, tmpl_val v)
{
    const uint32_t sym = tmpl_sym_find(r->t, name, len);

    if (sym != TMPL_NO_SYM && r->st == KVD_OK)
        tmpl_scope_set(r, r->scope, sym, v);
}

static bool is_known_role(const tmpl_str *s)
{
    static const char *const role[] = { "system",  "user",      "assistant",
                                        "tool",    "developer", "function",
                                        "ipython", "model",     "environment" };

    for (size_t i = 0; i < KVD_COUNTOF(role); i++) {
        if (tmpl_str_is(s, role[i]))
            return true;
    }
    return false;
}

static void trust_roles(tmpl_run *r, const tmpl_seq *messages)
{
    for (size_t i = 0; i < messages->n && r->st == KVD_OK; i++) {
        const tmpl_val *m    = &messages->item[i];
        tmpl_val       *role = m->kind == TV_DICT ? tmpl_dict_find(r, m->u.d, "role", 4) : NULL;

        if (role && role->kind == TV_STR && is_known_role(role->u.s))
            *role = tmpl_str_new(r, role->u.s->data, role->u.s->len, true);
    }
}

static kvd_status bind_vars(tmpl_run *r, const char *json)
{
    kvd_status     st;
    const tmpl_val v = tmpl_json_read(r, json, "template variables", &st);

    KVD_TRY(st);
    if (v.kind != TV_DICT)
        return kvd_fail(r->err, KVD_E_INVAL, 0, "template variables: not a JSON object");
    for (size_t i = 0; i < v.u.d->n; i++)
        bind(r, v.u.d->pair[i].key.u.s->data, v.u.d->pair[i].key.u.s->len, v.u.d->pair[i].val);
    return r->st;
}

static kvd_status bind_input(tmpl_run *r, const tmpl_input *in)
{
    const char *bos = in->bos_token ? in->bos_token : "", *eos = in->eos_token ? in->eos_token : "";
    kvd_status  st;
    tmpl_val    v;

    if (in->vars_json)
        KVD_TRY(bind_vars(r, in->vars_json));
    v = tmpl_json_read(r, in->messages_json, "messages", &st);
    KVD_TRY(st);
    if (v.kind != TV_LIST)
        return kvd_fail(r->err, KVD_E_INVAL, 0, "messages: not a JSON array");
    trust_roles(r, v.u.seq);
    bind(r, "messages", 8, v);
    if (in->tools_json) {
        v = tmpl_json_read(r, in->tools_json, "tools", &st);
        KVD_TRY(st);
        bind(r, "tools", 5, v);
    }
    bind(r, "add_generation_prompt", 21, tmpl_bool(in->add_generation_prompt));
    bind(r, "bos_token", 9, tmpl_str_new(r, bos, strlen(bos), true));
    bind(r, "eos_token", 9, tmpl_str_new(r, eos, strlen(eos), true));
    return r->st;
}

/* ---- rendering ------------------------------------------------------------------- */

static kvd_status hand_over(tmpl_run *r, const tmpl_sb *text, kvd_buf *out, kvd_span **spans,
                            size_t *n_span)
{
    const size_t at   = out->len;
    kvd_span    *span = NULL;

    if (text->n_span) {
        span = kvd_malloc(text->n_span * sizeof(*span));
        if (!span)
            return kvd_fail(r->err, KVD_E_NOMEM, 0, "chat template: no memory for its output");
    }
    kvd_buf_put(out, text->data, text->len);
    if (out->oom) {
        kvd_free(span);
        return kvd_fail(r->err, KVD_E_NOMEM, 0, "chat template: no memory for its output");
    }
    for (size_t i = 0; i < text->n_span; i++)
        span[i] = (kvd_span){ text->span[i].start + at, text->span[i].end + at };
    *spans  = span;
    *n_span = text->n_span;
    return KVD_OK;
}

static kvd_status run(tmpl_run *r, const tmpl_input *in, kvd_buf *out, kvd_span **spans,
                      size_t *n_span)
{
    tmpl_sb text;

    tmpl_sb_init(&text, r);
    text.limit = TMPL_MAX_OUTPUT;
    r->out     = &text;
    r->scope   = tmpl_scope_root(r);
    if (!r->scope)
        return r->st;
    KVD_TRY(bind_input(r, in));
    tmpl_exec(r, r->t->root);
    KVD_TRY(r->st);
    return hand_over(r, &text, out, spans, n_span);
}

kvd_status tmpl_render(const tmpl *t, const tmpl_input *in, kvd_buf *out, kvd_span **spans,
                       size_t *n_span, kvd_err *err)
{
    const size_t bytes = strlen(in->messages_json) + (in->tools_json ? strlen(in->tools_json) : 0) +
                         (in->vars_json ? strlen(in->vars_json) : 0);
    tmpl_run   r    = { .t = t, .err = err, .line = 1, .now_unix = in->now_unix };
    kvd_span  *span = NULL;
    size_t     n    = 0;
    kvd_status st;

    if (bytes > SIZE_MAX / 2 / TMPL_MEMORY_PER_BYTE)
        return kvd_fail(err, KVD_E_INVAL, 0, "chat template: %zu bytes of input", bytes);
    r.steps_left = TMPL_MAX_STEPS + (uint64_t)bytes * TMPL_STEPS_PER_BYTE;
    kvd_arena_init(&r.mem, TMPL_MAX_MEMORY + bytes * TMPL_MEMORY_PER_BYTE);
    kvd_arena_init(&r.bytes, TMPL_MAX_MEMORY + bytes * TMPL_MEMORY_PER_BYTE);
    st = run(&r, in, out, &span, &n);
    kvd_arena_free(&r.mem);
    kvd_arena_free(&r.bytes);
    if (spans)
        *spans = span;
    else
        kvd_free(span);
    if (n_span)
        *n_span = spans ? n : 0;
    return st;
}
