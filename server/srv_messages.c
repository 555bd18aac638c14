/* SPDX-License-Identifier: Apache-2.0 */
/* srv_messages.c - messages of a chat, in OpenAI's form: checked, brought to the form that
 * templates know, rendered.
 *
 * What clients write stays text: special tokens are recognised only where the template wrote them.
 */
#include <string.h>

#include "srv_fields.h"

#define MESSAGES_MAX 8192u

static const char *const roles[] = { "system", "developer", "user", "assistant", "tool" };

static bool known_role(const char *role)
{
    for (size_t i = 0; i < KVD_COUNTOF(roles); i++)
        if (strcmp(roles[i], role) == 0)
            return true;
    return false;
}

/* The member that holds a part's text: a refusal, which an assistant's turn may be, has its own.
 * NULL: it is no part of text. */
static const char *text_member(const json_t *part, const char *kind)
{
    const json_t *type = srv_get(part, "type");

    if (!json_is_string(type))
        return NULL;
    if (strcmp(json_string_value(type), "refusal") == 0)
        return "refusal";
    return strcmp(json_string_value(type), kind) == 0 ? "text" : NULL;
}

/* Templates of text models expect one string. */
json_t *srv_join_parts(srv_fields *f, const json_t *parts, const char *where, const char *kind)
{
    kvd_buf b = { 0 };
    size_t  i;
    json_t *part, *out = NULL;

    json_array_foreach(parts, i, part)
    {
        const char   *member = text_member(part, kind);
        const json_t *text   = member ? srv_get(part, member) : NULL;

        if (!member) {
            srv_fields_word(f, srv_at("%s[%zu].type", where, i).s, srv_get(part, "type"), kind);
            break;
        }
        if (!json_is_string(text)) {
            srv_fields_bad(f, srv_at("%s[%zu].%s", where, i, member).s, "expected a string");
            break;
        }
        if (i > 0)
            kvd_buf_putc(&b, '\n');
        kvd_buf_put(&b, json_string_value(text), json_string_length(text));
    }
    if (!f->bad && !b.oom)
        out = json_stringn(b.data ? b.data : "", b.len);
    kvd_buf_free(&b);
    return out;
}

static bool normalise_content(srv_fields *f, json_t *m, const char *role, const char *where)
{
    json_t         *v  = json_object_get(m, "content");
    const srv_where at = srv_at("%s.content", where);

    if (json_is_string(v))
        return true;
    if (json_is_array(v)) {
        json_t *text = srv_join_parts(f, v, at.s, "text");

        if (!text || json_object_set_new(m, "content", text) != 0)
            return srv_fields_full(f, "no memory for its content");
        return true;
    }
    if (v && !json_is_null(v))
        return srv_fields_bad(f, at.s, "expected a string or a list of parts");
    if (strcmp(role, "assistant") == 0 && json_is_string(srv_get(m, "refusal")))
        return json_object_set(m, "content", json_object_get(m, "refusal")) == 0 ||
               srv_fields_full(f, "no memory for its content");
    if (strcmp(role, "assistant") != 0 || !srv_get(m, "tool_calls"))
        return srv_fields_bad(f, at.s, "is missing: expected a string or a list of parts");
    return json_object_set_new(m, "content", json_string("")) == 0 ||
           srv_fields_full(f, "no memory for its content");
}

static bool is_blank(const char *s, size_t len)
{
    return strspn(s, " \t\r\n") == len;
}

/* Templates write arguments as JSON, so those that clients give as text become what they say: an
 * object, empty where they say nothing. */
static bool normalise_call(srv_fields *f, json_t *call, const char *where, size_t i)
{
    json_t *function = srv_get(call, "function");
    json_t *args     = srv_get(function, "arguments");
    json_t *value;

    if (!json_is_string(srv_get(function, "name")))
        return srv_fields_bad(f, srv_at("%s.tool_calls[%zu].function.name", where, i).s,
                              "expected a string");
    if (args && !json_is_string(args) && !json_is_object(args))
        return srv_fields_bad(f, srv_at("%s.tool_calls[%zu].function.arguments", where, i).s,
                              "expected a text or an object");
    if (json_is_object(args))
        return true;
    if (!args || is_blank(json_string_value(args), json_string_length(args)))
        value = json_object();
    else
        value = srv_parse_json(f, json_string_value(args), json_string_length(args));
    if (json_is_null(value))
        value = json_object();
    if (!json_is_object(value)) { /* a call that was cut: as it was written */
        json_decref(value);
        return true;
    }
    return json_object_set_new(function, "arguments", value) == 0 ||
           srv_fields_full(f, "no memory for its calls");
}

static bool normalise_calls(srv_fields *f, json_t *m, const char *where)
{
    json_t *calls = srv_get(m, "tool_calls"), *call;
    size_t  i;

    if (calls && !json_is_array(calls))
        return srv_fields_bad(f, srv_at("%s.tool_calls", where).s, "expected a list");
    json_array_foreach(calls, i, call)
    {
        if (!normalise_call(f, call, where, i))
            return false;
    }
    return true;
}

static bool normalise(srv_fields *f, json_t *m, size_t i)
{
    const srv_where at   = srv_at("messages[%zu]", i);
    const json_t   *role = srv_get(m, "role");

    if (!json_is_object(m))
        return srv_fields_bad(f, at.s, "expected an object");
    if (!json_is_string(role) || !known_role(json_string_value(role)))
        return srv_fields_word(f, srv_at("%s.role", at.s).s, role,
                               "system, developer, user, assistant, tool");
    if (!normalise_content(f, m, json_string_value(role), at.s) || !normalise_calls(f, m, at.s))
        return false;
    if (strcmp(json_string_value(role), "developer") == 0 &&
        json_object_set_new(m, "role", json_string("system")) != 0)
        return srv_fields_full(f, "no memory for its role");
    return true;
}

/* What the template gets, as JSON. */
static void put_input(srv_fields *f, const json_t *messages, const json_t *tools, kvd_buf out[3])
{
    json_t *vars = srv_template_vars(f);

    if (!f->bad)
        srv_put_json(f, messages, &out[0]);
    if (!f->bad && tools)
        srv_put_json(f, tools, &out[1]);
    if (!f->bad && vars)
        srv_put_json(f, vars, &out[2]);
    json_decref(vars);
}

/* The template over messages that it can show. */
static bool render(srv_fields *f, json_t *list, const json_t *tools, srv_prompt *out)
{
    kvd_chat_request r     = KVD_CHAT_REQUEST_INIT;
    kvd_buf          in[3] = { 0 };
    kvd_err          err   = { 0 };
    json_t          *shown = srv_template_adapt(f, list, &tools);

    if (!shown)
        return false;
    srv_get_bool(f, f->root, "add_generation_prompt", &r.add_generation_prompt);
    put_input(f, shown, tools, in);
    r.messages_json = in[0].data;
    r.tools_json    = in[1].data;
    r.vars_json     = in[2].data;
    if (!f->bad)
        srv_fields_status(f, "messages",
                          kvd_chat_render(f->s->model, &r, &out->text, &out->len, &out->spans,
                                          &out->n_span, &err),
                          &err);
    for (size_t i = 0; i < KVD_COUNTOF(in); i++)
        kvd_buf_free(&in[i]);
    json_decref(shown);
    return !f->bad;
}

bool srv_render(srv_fields *f, json_t *list, const json_t *tools, srv_prompt *out)
{
    json_t *m;
    size_t  i;

    if (!f->s->info.chat_template)
        return srv_fields_bad(
            f, "messages",
            "the model has no chat template: --chat-template FILE gives the server one, and "
            "/v1/completions takes texts without");
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MESSAGES_MAX)
        return srv_fields_bad(f, "messages", "%sexpected a list of 1 to %u messages",
                              list ? "" : "is missing: ", MESSAGES_MAX);
    json_array_foreach(list, i, m)
    {
        if (!normalise(f, m, i))
            return false;
    }
    m = srv_take_prefill(f, list);
    if (!f->bad && render(f, list, tools, out)) {
        kvd_chat_reasoning(f->s->model, out->text, out->len, &out->state);
        if (m)
            srv_add_prefill(f, m, out);
    }
    json_decref(m);
    return !f->bad;
}

/* Whether reasoning is told apart, as the request or the server says. */
static void get_reasoning(srv_fields *f, kvd_reasoning_state state, srv_request *r)
{
    const json_t       *word = srv_get(f->root, "reasoning_format");
    const char         *s    = json_string_value(word);
    const kvd_reasoning form = kvd_chat_reasoning(f->s->model, "", 0, NULL);
    bool                on   = f->s->p.reasoning;

    if (word && (!s || (strcmp(s, "auto") != 0 && strcmp(s, "none") != 0)))
        srv_fields_word(f, "reasoning_format", word, "auto, none");
    else if (word)
        on = *s == 'a';
    if (!on || (state == KVD_REASONING_CANNOT && form != KVD_REASONING_HARMONY))
        return;
    r->reasoning       = form;
    r->reasoning_state = state;
}

bool srv_get_prompt(srv_fields *f, json_t *messages, const json_t *tools, srv_request *r)
{
    srv_prompt p = { 0 };

    r->input = kvd_calloc(1, sizeof(*r->input));
    if (!r->input)
        return srv_fields_full(f, "no memory for the prompt");
    r->n_input = 1;
    if (srv_render(f, messages, tools, &p)) {
        get_reasoning(f, p.state, r);
        srv_tokenize(f, p.text, p.len, p.spans, p.n_span, true, &r->input[0]);
    }
    srv_prompt_free(&p);
    return !f->bad;
}
