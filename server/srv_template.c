/* SPDX-License-Identifier: Apache-2.0 */
/* srv_template.c - what a chat template does with tools, calls and results, found by rendering; and
 * messages brought to what it can show.
 *
 * What a template does not show is written into the texts of messages: the tools into the system's,
 * calls in the model's form into the assistant's, results into the user's. */
#include "srv_template.h"

#include <string.h>

#include "srv_fields.h"
#include "text/text.h"

#define SHORT_ID 9 /* characters of an id that Mistral's templates take */

/* Words that a rendered text has only if the template shows what they stand in. */
#define P_TOOL   "probe_tool_name"
#define P_CALL   "probe_call_name"
#define P_SECOND "probe_second_call"
#define P_VALUE  "probe_argument_value"
#define P_RESULT "probe_result_text"
#define P_SYSTEM "probe_system_text"

/* ---- probing --------------------------------------------------------------------------------- */

static int put_bytes(const char *text, size_t len, void *out)
{
    kvd_buf_put(out, text, len);
    return 0;
}

/* Whether the template renders the messages, with both words in them (NULL: any).  Takes messages.
 */
static bool shows(const srv *s, json_t *messages, json_t *tools, const char *one, const char *two)
{
    kvd_chat_request r = KVD_CHAT_REQUEST_INIT;
    kvd_buf          m = { 0 }, t = { 0 };
    char            *text = NULL;
    size_t           len;
    bool             ok = false;

    if (json_dump_callback(messages, put_bytes, &m, 0) != 0 ||
        (tools && json_dump_callback(tools, put_bytes, &t, 0) != 0))
        m.oom = true;
    r.messages_json = m.data;
    r.tools_json    = t.data;
    if (!m.oom && !t.oom && kvd_chat_render(s->model, &r, &text, &len, NULL, NULL, NULL) == KVD_OK)
        ok = strstr(text, one) && (!two || strstr(text, two));
    kvd_free(text);
    kvd_buf_free(&m);
    kvd_buf_free(&t);
    json_decref(messages);
    return ok;
}

static json_t *user(void)
{
    return json_pack("{s:s, s:s}", "role", "user", "content", "hello");
}

static bool shows_tools(const srv *s)
{
    json_t *tools =
        json_pack("[{s:s, s:{s:s, s:s, s:{s:s, s:{s:{s:s, s:s}}, s:[s]}}}]", "type", "function",
                  "function", "name", P_TOOL, "description", "d", "parameters", "type", "object",
                  "properties", "a", "type", "string", "description", "d", "required", "a");
    const bool ok = tools && shows(s, json_pack("[o]", user()), tools, P_TOOL, NULL);

    json_decref(tools);
    return ok;
}

/* A call of the name as history has it, in the variant of t. */
static json_t *call(const srv_template *t, const char *name, const char *id)
{
    json_t *args =
        t->text_args ? json_string("{\"a\": \"" P_VALUE "\"}") : json_pack("{s:s}", "a", P_VALUE);

    return json_pack("{s:s, s:s, s:{s:s, s:o}}", "id", t->short_ids ? id : "call_of_more", "type",
                     "function", "function", "name", name, "arguments", args);
}

/* A conversation with one call (two: and another) and its result. */
static json_t *conversation(const srv_template *t, bool two)
{
    json_t *calls = json_pack("[o]", call(t, P_CALL, "abcdefgh1"));

    if (two && calls)
        json_array_append_new(calls, call(t, P_SECOND, "abcdefgh2"));
    return json_pack("[o, {s:s, s:o, s:o}, {s:s, s:s, s:s}]", user(), "role", "assistant",
                     "content", t->null_content ? json_null() : json_string(""), "tool_calls",
                     calls, "role", "tool", "tool_call_id",
                     t->short_ids ? "abcdefgh1" : "call_of_more", "content", P_RESULT);
}

/* The first variant of a call that is shown. */
static void probe_calls(const srv *s, srv_template *t)
{
    for (uint32_t i = 0; i < 8 && !t->shows_calls; i++) {
        t->short_ids    = i & 4;
        t->text_args    = i & 2;
        t->null_content = i & 1;
        t->shows_calls  = shows(s, conversation(t, false), NULL, P_CALL, P_VALUE);
    }
    if (!t->shows_calls) {
        t->short_ids = t->text_args = t->null_content = false;
        return;
    }
    t->shows_results = shows(s, conversation(t, false), NULL, P_RESULT, NULL);
    t->one_call      = !shows(s, conversation(t, true), NULL, P_CALL, P_SECOND);
    t->takes_text    = t->text_args;
    if (!t->text_args) {
        srv_template cut = *t;

        cut.text_args = true;
        t->takes_text = shows(s, conversation(&cut, false), NULL, P_CALL, P_VALUE);
    }
}

void srv_template_probe(srv *s)
{
    srv_template *t = &s->tmpl;
    json_t       *result;

    *t = (srv_template){ .form = kvd_model_tool_format(s->model) };
    if (!s->info.chat_template)
        return;
    t->own = t->form != KVD_TOOLS_NONE;
    t->shows_system =
        shows(s, json_pack("[{s:s, s:s}, o]", "role", "system", "content", P_SYSTEM, user()), NULL,
              P_SYSTEM, NULL);
    if (!t->own) {
        t->form = KVD_TOOLS_HERMES;
        return;
    }
    t->shows_tools = shows_tools(s);
    probe_calls(s, t);
    if (t->shows_calls)
        return;
    result = json_pack("[o, {s:s, s:s}, {s:s, s:s}]", user(), "role", "assistant", "content", "c",
                       "role", "tool", "content", P_RESULT);
    t->shows_results = shows(s, result, NULL, P_RESULT, NULL);
}

/* ---- calls and results of messages
 * ---------------------------------------------------------------
 */

typedef struct adapt {
    srv_fields         *f;
    const srv_template *t;
    json_t             *out; /* list */
} adapt;

static bool set(adapt *a, json_t *o, const char *name, json_t *v)
{
    return json_object_set_new(o, name, v) == 0 ||
           srv_fields_full(a->f, "no memory for the messages");
}

/* Nine letters and digits that stand for an id. */
static json_t *short_id(const json_t *id)
{
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const char       *s        = json_is_string(id) ? json_string_value(id) : "";
    uint64_t          h        = UINT64_C(0xcbf29ce484222325);
    char              out[SHORT_ID + 1];

    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    for (int i = 0; i < SHORT_ID; i++, h /= sizeof(digits) - 1)
        out[i] = digits[h % (sizeof(digits) - 1)];
    out[SHORT_ID] = 0;
    return json_string(out);
}

/* Arguments that are no object (a call that was cut) stand in one where text is not taken. */
static bool adapt_args(adapt *a, json_t *function)
{
    json_t *args = srv_get(function, "arguments");
    kvd_buf text = { 0 };
    bool    ok   = true;

    if (json_is_object(args) && a->t->text_args) {
        ok = srv_put_json(a->f, args, &text) &&
             set(a, function, "arguments", json_stringn(text.data, text.len));
        kvd_buf_free(&text);
    } else if (!json_is_object(args) && !a->t->takes_text) {
        ok = set(a, function, "arguments", json_pack("{s:O}", "arguments", args));
    }
    return ok;
}

static bool adapt_calls(adapt *a, json_t *calls)
{
    json_t *call;
    size_t  i;

    json_array_foreach(calls, i, call)
    {
        if (!adapt_args(a, srv_get(call, "function")))
            return false;
        if (a->t->short_ids && !set(a, call, "id", short_id(srv_get(call, "id"))))
            return false;
    }
    return true;
}

/* The assistant's calls, written into its text. */
static bool write_calls(adapt *a, json_t *m, json_t *calls)
{
    const json_t *content = srv_get(m, "content");
    kvd_buf       text = { 0 }, json = { 0 };
    kvd_err       err = { 0 };
    bool          ok  = srv_put_json(a->f, calls, &json);

    if (json_string_length(content)) {
        kvd_buf_put(&text, json_string_value(content), json_string_length(content));
        kvd_buf_putc(&text, '\n');
    }
    ok = ok && srv_fields_status(a->f, "messages",
                                 tool_write_calls(a->t->form, json.data, &text, &err), &err);
    ok = ok && set(a, m, "content", json_stringn(text.data, text.len));
    if (ok)
        json_object_del(m, "tool_calls");
    kvd_buf_free(&text);
    kvd_buf_free(&json);
    return ok;
}

/* Reasoning by the names that templates have for it.  gpt-oss takes none beside text and calls. */
static bool name_reasoning(adapt *a, json_t *m)
{
    json_t *r = srv_get(m, "reasoning_content");

    r = r ? r : srv_get(m, "reasoning");
    if (!json_is_string(r) || !json_string_length(r))
        return true;
    if (json_object_set(m, "reasoning_content", r) != 0)
        return srv_fields_full(a->f, "no memory for the messages");
    if (srv_get(m, "tool_calls") && json_string_length(srv_get(m, "content")))
        return true;
    return json_object_set(m, "thinking", r) == 0 ||
           srv_fields_full(a->f, "no memory for the messages");
}

/* A message with no calls but this one. */
static bool add_with_call(adapt *a, const json_t *m, json_t *call, bool first)
{
    json_t *one = json_copy((json_t *)m);

    if (!one)
        return srv_fields_full(a->f, "no memory for the messages");
    if (!first) {
        json_object_del(one, "reasoning_content");
        json_object_del(one, "thinking");
    }
    if (json_object_set_new(one, "tool_calls", json_pack("[O]", call)) != 0 ||
        (!first && json_object_set_new(one, "content", json_string("")) != 0)) {
        json_decref(one);
        return srv_fields_full(a->f, "no memory for the messages");
    }
    return srv_add(a->f, a->out, one);
}

/* An assistant's message with calls, as the template shows it. */
static bool adapt_assistant(adapt *a, json_t *m)
{
    json_t *calls = srv_get(m, "tool_calls"), *text;

    if (!name_reasoning(a, m))
        return false;
    if (json_array_size(calls) == 0) {
        json_object_del(m, "tool_calls"); /* some templates ask whether it is there */
        return srv_add(a->f, a->out, json_incref(m));
    }
    if (!a->t->shows_calls)
        return write_calls(a, m, calls) && srv_add(a->f, a->out, json_incref(m));
    if (!adapt_calls(a, calls))
        return false;
    if (a->t->null_content) {
        text = json_copy(m);
        if (text && json_string_length(srv_get(m, "content"))) {
            json_object_del(text, "tool_calls");
            if (!srv_add(a->f, a->out, json_incref(text)))
                return false;
        }
        json_decref(text);
        if (!set(a, m, "content", json_null()))
            return false;
    }
    return srv_add(a->f, a->out, json_incref(m));
}

/* The text of a result, as the user's; results that follow each other are one message. */
static bool write_result(adapt *a, const json_t *m)
{
    const size_t  n    = json_array_size(a->out);
    json_t       *last = n ? json_array_get(a->out, n - 1) : NULL;
    const json_t *was  = srv_get(last, "results");
    kvd_buf       text = { 0 };
    bool          ok;

    if (was)
        kvd_buf_printf(&text, "%s\n", json_string_value(srv_get(last, "content")));
    kvd_buf_printf(&text, "<tool_response>\n%s\n</tool_response>",
                   json_string_value(srv_get(m, "content")));
    ok = !text.oom || srv_fields_full(a->f, "no memory for the messages");
    if (ok && was)
        ok = set(a, last, "content", json_stringn(text.data, text.len));
    else if (ok)
        ok = srv_add(a->f, a->out,
                     json_pack("{s:s, s:s%, s:b}", "role", "user", "content", text.data, text.len,
                               "results", 1));
    kvd_buf_free(&text);
    return ok;
}

static bool adapt_result(adapt *a, json_t *m)
{
    if (!a->t->shows_results)
        return write_result(a, m);
    if (a->t->short_ids && !set(a, m, "tool_call_id", short_id(srv_get(m, "tool_call_id"))))
        return false;
    return srv_add(a->f, a->out, json_incref(m));
}

/* The result of a call among the tool messages of list[from ..]; NULL: there is none. */
static json_t *result_of(json_t *list, size_t from, const json_t *id)
{
    for (size_t i = from; i < json_array_size(list); i++) {
        json_t     *m    = json_array_get(list, i);
        const char *role = json_string_value(srv_get(m, "role"));

        if (!role || strcmp(role, "tool") != 0)
            return NULL;
        if (json_equal(srv_get(m, "tool_call_id"), id))
            return m;
    }
    return NULL;
}

/* Message i has several calls, and the template shows one: each comes with its result behind it.
 * The results are taken out of the list. */
static bool split_calls(adapt *a, json_t *list, size_t i)
{
    json_t *m = json_array_get(list, i), *calls = srv_get(m, "tool_calls"), *call, *result;
    size_t  k, at;

    if (!name_reasoning(a, m))
        return false;
    json_array_foreach(calls, k, call)
    {
        if (!adapt_args(a, srv_get(call, "function")) || !add_with_call(a, m, call, k == 0))
            return false;
        result = result_of(list, i + 1, srv_get(call, "id"));
        if (!result)
            continue;
        if (!adapt_result(a, result))
            return false;
        for (at = i + 1; json_array_get(list, at) != result;)
            at++;
        json_array_remove(list, at);
    }
    return true;
}

/* ---- tools ------------------------------------------------------------------------------------
 */

/* What the template does not say of the tools stands in the system's message. */
static bool write_tools(adapt *a, const json_t *tools)
{
    json_t       *first = json_array_get(a->out, 0);
    const char   *role  = json_string_value(srv_get(first, "role"));
    const bool    has   = role && strcmp(role, a->t->shows_system ? "system" : "user") == 0;
    const json_t *was   = has ? srv_get(first, "content") : NULL;
    kvd_buf       text = { 0 }, json = { 0 };
    kvd_err       err = { 0 };
    bool          ok  = srv_put_json(a->f, tools, &json);

    if (json_string_length(was) && a->t->shows_system)
        kvd_buf_printf(&text, "%s\n\n", json_string_value(was));
    ok = ok && srv_fields_status(a->f, "tools",
                                 tool_write_tools(a->t->form, json.data, &text, &err), &err);
    if (json_string_length(was) && !a->t->shows_system)
        kvd_buf_printf(&text, "\n\n%s", json_string_value(was));
    if (ok && text.oom)
        ok = srv_fields_full(a->f, "no memory for the messages");
    if (ok && has)
        ok = set(a, first, "content", json_stringn(text.data, text.len));
    else if (ok)
        ok = json_array_insert_new(a->out, 0,
                                   json_pack("{s:s, s:s%}", "role",
                                             a->t->shows_system ? "system" : "user", "content",
                                             text.data, text.len)) == 0 ||
             srv_fields_full(a->f, "no memory for the messages");
    kvd_buf_free(&text);
    kvd_buf_free(&json);
    if (ok)
        srv_log_notes(a->f->s, a->t->own ? "tools: the chat template does not show them; the "
                                           "server describes them in the system message"
                                         : "tools: the chat template has no form of calls; the "
                                           "server describes tools in the system message and has "
                                           "the model write <tool_call>{\"name\", \"arguments\"}"
                                           "</tool_call>");
    return ok;
}

static bool adapt_message(adapt *a, json_t *list, size_t i)
{
    json_t     *m    = json_array_get(list, i);
    const char *role = json_string_value(srv_get(m, "role"));

    if (strcmp(role, "tool") == 0)
        return adapt_result(a, m);
    if (strcmp(role, "assistant") != 0)
        return srv_add(a->f, a->out, json_incref(m));
    if (a->t->shows_calls && a->t->one_call && json_array_size(srv_get(m, "tool_calls")) > 1)
        return split_calls(a, list, i);
    return adapt_assistant(a, m);
}

json_t *srv_template_adapt(srv_fields *f, json_t *list, const json_t **tools)
{
    adapt a = { .f = f, .t = &f->s->tmpl, .out = json_array() };

    if (!a.out) {
        srv_fields_full(f, "no memory for the messages");
        return NULL;
    }
    for (size_t i = 0; i < json_array_size(list) && !f->bad; i++)
        adapt_message(&a, list, i);
    if (!f->bad && json_array_size(*tools) && !a.t->shows_tools) {
        write_tools(&a, *tools);
        *tools = NULL;
    }
    if (!f->bad)
        return a.out;
    json_decref(a.out);
    return NULL;
}
