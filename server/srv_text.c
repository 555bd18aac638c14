/* SPDX-License-Identifier: Apache-2.0 */
/* srv_text.c - routes between text and tokens. */
#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

static void put_tokens(const srv *s, const srv_input *in, bool pieces, bool strings, kvd_buf *b)
{
    kvd_buf_puts(b, "{\"tokens\":[");
    for (uint32_t i = 0; i < in->n; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        if (!pieces) {
            kvd_buf_printf(b, "%d", in->token[i]);
            continue;
        }
        kvd_buf_printf(b, "{\"id\":%d,\"piece\":", in->token[i]);
        srv_put_piece(s, in->token[i], b);
        kvd_buf_putc(b, '}');
    }
    kvd_buf_printf(b, "],\"count\":%u,\"max_model_len\":%u,\"token_strs\":", in->n, s->plan.n_ctx);
    for (uint32_t i = 0; strings && i < in->n; i++) {
        kvd_buf_putc(b, i ? ',' : '[');
        srv_put_token(s, in->token[i], b);
    }
    kvd_buf_puts(b, !strings ? "null}" : in->n ? "]}" : "[]}");
}

/* A text that is a special token's and nothing else is that token: clients ask for its id so. */
static bool is_special(const srv_fields *f, const json_t *text, srv_input *out)
{
    const size_t   len = json_string_length(text);
    const kvd_span all = { 0, len };
    int32_t        id  = -1;
    size_t         n   = 0;
    kvd_err        err = { 0 };

    if (len == 0 || kvd_tokenize(f->s->model, json_string_value(text), len, &all, 1, false, &id, 1,
                                 &n, &err) != KVD_OK)
        return false;
    if (n != 1 || !kvd_token_is_special(f->s->model, id) ||
        !(out->token = kvd_malloc(sizeof(*out->token))))
        return false;
    out->token[0] = id;
    out->n        = 1;
    return true;
}

/* llama-server's content, or vLLM's prompt with its names and what it takes for granted. */
static bool tokenize(srv_fields *f, srv_input *in)
{
    const json_t *content = srv_get(f->root, "content"), *prompt = srv_get(f->root, "prompt");
    const json_t *text = prompt ? prompt : content;
    const char   *name = prompt ? "prompt" : "content";
    bool          bos = prompt != NULL, special = false;

    srv_get_bool(f, f->root, "add_special", &bos);
    srv_get_bool(f, f->root, "add_special_tokens", &bos);
    if (!srv_get_special(f, &special))
        return false;
    if (content && prompt)
        return srv_fields_bad(f, "prompt", "not together with content");
    if (!json_is_string(text))
        return srv_fields_bad(f, name, "%sexpected a string", text ? "" : "is missing: ");
    if (f->bad || (prompt && !bos && is_special(f, prompt, in)))
        return !f->bad;
    return srv_tokenize_raw(f, text, bos, in);
}

void srv_route_tokenize(srv *s, srv_call *c)
{
    static const char *const names[] = {
        "content", "add_special",        "with_pieces",       "model",
        "prompt",  "add_special_tokens", "return_token_strs", "parse_special"
    };
    static const srv_refused refused[] = {
        { "messages", "", "use content; /v1/messages/count_tokens counts those of messages" }
    };
    srv_fields f;
    srv_input  in     = { 0 };
    bool       pieces = false, strings = false;

    if (srv_fields_open(&f, s, c)) {
        srv_check_names(&f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
        srv_get_bool(&f, f.root, "with_pieces", &pieces);
        srv_get_bool(&f, f.root, "return_token_strs", &strings);
        if (tokenize(&f, &in)) {
            c->reply.status = 200;
            put_tokens(s, &in, pieces, strings, &c->reply.body);
        }
    }
    kvd_free(in.token);
    srv_fields_close(&f);
}

static bool detokenize(srv_fields *f, const json_t *list, kvd_buf *out)
{
    kvd_detok  *d   = NULL;
    kvd_err     err = { 0 };
    const char *text;
    size_t      i, len;
    json_t     *v;

    if (!json_is_array(list))
        return srv_fields_bad(f, "tokens", "%sexpected a list of tokens",
                              list ? "" : "is missing: ");
    if (!srv_fields_status(f, NULL, kvd_detok_open(&d, f->s->model, &err), &err))
        return false;
    json_array_foreach(list, i, v)
    {
        const json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;

        if (id < 0 || id >= f->s->info.n_vocab) {
            srv_fields_bad(f, "tokens", "entry %zu is none of this model's tokens, 0 to %u", i,
                           f->s->info.n_vocab - 1);
            break;
        }
        text = kvd_detok_feed(d, (int32_t)id, true, &len);
        kvd_buf_put(out, text, len);
    }
    text = kvd_detok_flush(d, &len);
    kvd_buf_put(out, text, len);
    kvd_detok_close(d);
    return !f->bad;
}

void srv_route_detokenize(srv *s, srv_call *c)
{
    static const char *const names[] = { "tokens", "model" };
    srv_fields               f;
    kvd_buf                  text = { 0 };

    if (srv_fields_open(&f, s, c)) {
        srv_check_names(&f, names, KVD_COUNTOF(names), NULL, 0);
        if (!f.bad && detokenize(&f, srv_get(f.root, "tokens"), &text)) {
            c->reply.status = 200;
            kvd_buf_puts(&c->reply.body, "{\"content\":");
            srv_put_string(&c->reply.body, text.data ? text.data : "", text.len);
            kvd_buf_puts(&c->reply.body, ",\"prompt\":"); /* vLLM's name */
            srv_put_string(&c->reply.body, text.data ? text.data : "", text.len);
            kvd_buf_putc(&c->reply.body, '}');
            c->reply.body.oom = c->reply.body.oom || text.oom;
        }
    }
    kvd_buf_free(&text);
    srv_fields_close(&f);
}

void srv_route_template(srv *s, srv_call *c)
{
    static const char *const names[] = {
        "messages", "add_generation_prompt", "chat_template_kwargs", "tools",
        "model",    "continue_final_message"
    };
    static const srv_refused refused[] = {
        { "chat_template", "", "the template is the server's (--chat-template FILE): leave it out" }
    };
    srv_fields f;
    srv_prompt p = { 0 };

    if (srv_fields_open(&f, s, c)) {
        const json_t *tools = srv_get(f.root, "tools");

        srv_check_names(&f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
        if (tools && !json_is_array(tools))
            srv_fields_bad(&f, "tools", "expected a list of tools");
        if (!f.bad && srv_render(&f, srv_get(f.root, "messages"), tools, &p)) {
            c->reply.status = 200;
            kvd_buf_puts(&c->reply.body, "{\"prompt\":");
            srv_put_string(&c->reply.body, p.text, p.len);
            kvd_buf_putc(&c->reply.body, '}');
        }
    }
    srv_prompt_free(&p);
    srv_fields_close(&f);
}
