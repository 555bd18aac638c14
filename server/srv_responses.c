/* SPDX-License-Identifier: Apache-2.0 */
/* srv_responses.c - /v1/responses: OpenAI's newer shape of a chat, made of items.  Nothing is kept
 * of an answer: the next request brings all items with it. */
#include <math.h>
#include <string.h>

#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

static const char *const names[] = {
    SRV_PARAM_NAMES, "input", "instructions", "max_output_tokens", "stream_options", "text",
    "tools", "tool_choice", "parallel_tool_calls", "stop", "add_generation_prompt",
    "chat_template_kwargs", "include", "reasoning", "reasoning_format",
    /* nothing to do for these */
    "metadata", "user", "safety_identifier", "prompt_cache_key", "client_metadata", "service_tier"
};

static const srv_refused refused[] = {
    { "access_programs", "{}", SRV_SAY_NOTHING_LIKE },
    { "background", "false", "an answer comes to who waits for it: use stream, or leave it out" },
    { "background_options", "{}", "an answer comes to who waits for it: leave it out" },
    { "context_management", "[]", "all items count: leave out of input what shall not" },
    { "image", "{}", SRV_SAY_TEXT },
    { "max_tool_calls", "", "calls are the client's to make: count them there" },
    { "moderation", "", SRV_SAY_NOTHING_LIKE },
    { "prompt_cache_options", "{}", SRV_SAY_CACHED },
    { "prompt_cache_retention", "", SRV_SAY_CACHED },
    { "store", "false",
      "nothing is kept of an answer: use false, and send all items with each request" },
    { "truncation", "\"disabled\"", "prompts are never cut: leave items out of input" }
};

/* ---- answers ----------------------------------------------------------------------------------
 */

static void put_usage(const srv_job *j, kvd_buf *b)
{
    const srv_usage *u = &j->usage;

    kvd_buf_printf(b,
                   "{\"input_tokens\":%llu,\"input_tokens_details\":{\"cached_tokens\":%llu,"
                   "\"cache_write_tokens\":0,",
                   (unsigned long long)u->n_prompt, (unsigned long long)srv_n_cached(u));
    srv_put_tiers(u, b);
    kvd_buf_printf(b,
                   "},\"output_tokens\":%llu,\"output_tokens_details\":{\"reasoning_tokens\":%llu},"
                   "\"total_tokens\":%llu}",
                   (unsigned long long)u->n_generated, (unsigned long long)u->n_reasoning,
                   (unsigned long long)(u->n_prompt + u->n_generated));
}

static void put_item_id(const srv_job *j, const srv_answer *a, uint32_t i, kvd_buf *b)
{
    const srv_piece p = srv_piece_at(a, i);

    kvd_buf_printf(b, "\"%s_%s_%u\"",
                   p.is_call        ? "fc"
                   : p.is_reasoning ? "rs"
                                    : "msg",
                   j->id + strlen(j->shape->prefix), i);
}

/* What is whole: all but a last piece that the limit has cut. */
static const char *status_of(const srv_answer *a, uint32_t i)
{
    const srv_piece p   = srv_piece_at(a, i);
    const bool      cut = a->finish == SRV_FINISH_LENGTH && i + 1 == srv_n_piece(a);

    return (p.is_call ? p.complete : !cut) ? "completed" : "incomplete";
}

static void put_part(bool reasoning, const char *text, size_t len, kvd_buf *b)
{
    kvd_buf_puts(b, reasoning ? "{\"type\":\"reasoning_text\",\"text\":"
                              : "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[],"
                                "\"text\":");
    srv_put_string(b, text, len);
    kvd_buf_putc(b, '}');
}

/* Item i of the output; one that begins has nothing in it yet. */
static void put_item(const srv_job *j, const srv_answer *a, uint32_t i, bool begins, kvd_buf *b)
{
    const srv_piece p = srv_piece_at(a, i);

    kvd_buf_puts(b, "{\"id\":");
    put_item_id(j, a, i, b);
    kvd_buf_printf(b, ",\"status\":\"%s\"", begins ? "in_progress" : status_of(a, i));
    if (p.is_call) {
        kvd_buf_puts(b, ",\"type\":\"function_call\",\"call_id\":");
        srv_put_call_id(j, 0, p.call, b);
        srv_put_function(&j->req, a->said.data + p.name, p.n_name, b);
        kvd_buf_puts(b, ",\"arguments\":");
        srv_put_string(b, a->said.data + p.at, begins ? 0 : p.len);
        kvd_buf_putc(b, '}');
        return;
    }
    kvd_buf_puts(b, p.is_reasoning ? ",\"type\":\"reasoning\",\"summary\":[],\"content\":["
                                   : ",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
    if (!begins)
        put_part(p.is_reasoning, a->said.data + p.at, p.len, b);
    kvd_buf_puts(b, "]}");
}

/* The response; without an answer it has just begun, with an error it has failed. */
static void put_response(const srv *s, const srv_job *j, const srv_answer *a, const char *error,
                         kvd_buf *b)
{
    const bool  cut    = a && a->finish == SRV_FINISH_LENGTH;
    const char *status = error ? "failed" : !a ? "in_progress" : cut ? "incomplete" : "completed";

    kvd_buf_printf(b,
                   "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\","
                   "\"background\":false,\"store\":false,\"previous_response_id\":null,"
                   "\"truncation\":\"disabled\",\"model\":",
                   j->id, (long long)j->created, status);
    srv_put_text(b, s->name);
    kvd_buf_putc(b, ',');
    kvd_buf_put(b, j->req.again.data, j->req.again.len);
    kvd_buf_putc(b, ',');
    if (a || error)
        kvd_buf_put(b, j->req.again_last.data, j->req.again_last.len);
    else /* the client knows them: they may be most of the answer's bytes */
        kvd_buf_puts(b, "\"instructions\":null,\"tools\":[]");
    kvd_buf_puts(b, ",\"error\":");
    if (error) {
        kvd_buf_puts(b, "{\"code\":\"server_error\",\"message\":");
        srv_put_text(b, error);
        kvd_buf_putc(b, '}');
    } else {
        kvd_buf_puts(b, "null");
    }
    kvd_buf_printf(b, ",\"incomplete_details\":%s,\"output\":[",
                   cut ? "{\"reason\":\"max_output_tokens\"}" : "null");
    for (uint32_t i = 0; a && i < srv_n_piece(a); i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        put_item(j, a, i, false, b);
    }
    kvd_buf_puts(b, "],\"usage\":");
    if (a) {
        put_usage(j, b);
        srv_put_extras(j, b);
    } else {
        kvd_buf_puts(b, "null");
    }
    kvd_buf_putc(b, '}');
}

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    put_response(s, j, a, NULL, b);
}

/* ---- streams ------------------------------------------------------------------------------------
 */

static void begin_event(srv_job *j, const char *type, kvd_buf *b)
{
    srv_typed_begin(type, b);
    kvd_buf_printf(b, ",\"sequence_number\":%u", j->n_said++);
}

static void say_response(srv *s, srv_job *j, const char *type, const srv_answer *a,
                         const char *error, kvd_buf *b)
{
    begin_event(j, type, b);
    kvd_buf_puts(b, ",\"response\":");
    put_response(s, j, a, error, b);
    srv_typed_end(b);
}

/* An event of the last item, up to what is its own. */
static void begin_item_event(srv_job *j, const char *type, kvd_buf *b)
{
    const uint32_t i = srv_n_piece(&j->answer) - 1;

    begin_event(j, type, b);
    kvd_buf_printf(b, ",\"output_index\":%u,\"item_id\":", i);
    put_item_id(j, &j->answer, i, b);
}

static void say_item(srv_job *j, const char *type, bool begins, kvd_buf *b)
{
    const uint32_t i = srv_n_piece(&j->answer) - 1;

    begin_event(j, type, b);
    kvd_buf_printf(b, ",\"output_index\":%u,\"item\":", i);
    put_item(j, &j->answer, i, begins, b);
    srv_typed_end(b);
}

static void say_part(srv_job *j, const char *type, bool reasoning, const char *text, size_t len,
                     kvd_buf *b)
{
    begin_item_event(j, type, b);
    kvd_buf_puts(b, ",\"content_index\":0,\"part\":");
    put_part(reasoning, text, len, b);
    srv_typed_end(b);
}

static void open_item(srv_job *j, const srv_event *e, kvd_buf *b)
{
    say_item(j, "response.output_item.added", true, b);
    if (e->kind != SRV_EVENT_CALL)
        say_part(j, "response.content_part.added", e->kind == SRV_EVENT_REASONING, "", 0, b);
}

static void say_more(srv_job *j, const srv_event *e, kvd_buf *b)
{
    begin_item_event(j,
                     e->kind == SRV_EVENT_TEXT        ? "response.output_text.delta"
                     : e->kind == SRV_EVENT_REASONING ? "response.reasoning_text.delta"
                                                      : "response.function_call_arguments.delta",
                     b);
    if (e->kind == SRV_EVENT_TEXT)
        kvd_buf_puts(b, ",\"content_index\":0,\"logprobs\":[]");
    else if (e->kind == SRV_EVENT_REASONING)
        kvd_buf_puts(b, ",\"content_index\":0");
    kvd_buf_puts(b, ",\"delta\":");
    srv_put_string(b, e->text, e->len);
    srv_typed_end(b);
}

static void close_item(srv_job *j, kvd_buf *b)
{
    const srv_answer *a    = &j->answer;
    const srv_piece   p    = srv_piece_at(a, srv_n_piece(a) - 1);
    const char       *text = a->said.data + p.at;

    if (p.is_call) {
        begin_item_event(j, "response.function_call_arguments.done", b);
        srv_put_function(&j->req, a->said.data + p.name, p.n_name, b);
        kvd_buf_puts(b, ",\"arguments\":");
        srv_put_string(b, text, p.len);
        srv_typed_end(b);
    } else {
        begin_item_event(
            j, p.is_reasoning ? "response.reasoning_text.done" : "response.output_text.done", b);
        kvd_buf_printf(b, ",\"content_index\":0,%s\"text\":",
                       p.is_reasoning ? "" : "\"logprobs\":[],");
        srv_put_string(b, text, p.len);
        srv_typed_end(b);
        say_part(j, "response.content_part.done", p.is_reasoning, text, p.len, b);
    }
    say_item(j, "response.output_item.done", false, b);
}

static const srv_piece_shape item_events = { open_item, say_more, close_item };

static void say_error(srv *s, srv_job *j, const char *msg, kvd_buf *b)
{
    begin_event(j, "error", b);
    kvd_buf_puts(b, ",\"code\":\"server_error\",\"param\":null,\"message\":");
    srv_put_text(b, msg);
    srv_typed_end(b);
    say_response(s, j, "response.failed", NULL, msg, b);
}

static void event(srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    switch (e->kind) {
    case SRV_EVENT_START:
        if (j->n_said == 0) {
            say_response(s, j, "response.created", NULL, NULL, b);
            say_response(s, j, "response.in_progress", NULL, NULL, b);
        }
        break;
    case SRV_EVENT_PROGRESS:
        break;
    case SRV_EVENT_TEXT:
    case SRV_EVENT_REASONING:
    case SRV_EVENT_CALL:
    case SRV_EVENT_ARGUMENTS:
    case SRV_EVENT_CALL_END:
    case SRV_EVENT_FINISH:
        srv_piece_event(&item_events, j, e, b);
        break;
    case SRV_EVENT_END:
        say_response(s, j,
                     j->answer.finish == SRV_FINISH_LENGTH ? "response.incomplete"
                                                           : "response.completed",
                     &j->answer, NULL, b);
        break;
    case SRV_EVENT_ERROR:
        say_error(s, j, e->text, b);
        break;
    }
}

/* ---- items, brought to the form of chats -------------------------------------------------------
 */

/* The last message, if it is the assistant's and has reasoning alone; NULL: it is not. */
static json_t *bare_reasoning(const json_t *list)
{
    const size_t  n    = json_array_size(list);
    json_t       *last = n ? json_array_get(list, n - 1) : NULL;
    const json_t *text = srv_get(last, "content");

    return srv_get(last, "reasoning_content") && json_string_length(text) == 0 &&
                   !srv_get(last, "tool_calls")
               ? last
               : NULL;
}

/* Texts of a list of parts, a line each; parts of other types say nothing to a template. */
static void put_texts(const json_t *parts, kvd_buf *b)
{
    size_t  i;
    json_t *part;

    json_array_foreach(parts, i, part)
    {
        const json_t *text = srv_get(part, "text");

        if (!json_is_string(text))
            continue;
        if (b->len)
            kvd_buf_putc(b, '\n');
        kvd_buf_put(b, json_string_value(text), json_string_length(text));
    }
}

/* Reasoning belongs to the assistant's message or call behind it; its summary stands for it where
 * there is no more. */
static bool add_reasoning(srv_fields *f, json_t *list, const json_t *item)
{
    kvd_buf text = { 0 };
    bool    ok   = true;

    put_texts(srv_get(item, "content"), &text);
    if (text.len == 0)
        put_texts(srv_get(item, "summary"), &text);
    if (text.oom)
        ok = srv_fields_full(f, "no memory for the messages");
    else if (text.len)
        ok = srv_add(f, list, json_pack("{s:s, s:s}", "role", "assistant", "content", "")) &&
             srv_add_reasoning(f, list, text.data, text.len);
    kvd_buf_free(&text);
    return ok;
}

static bool add_message(srv_fields *f, json_t *list, const json_t *item, const char *where)
{
    const json_t *word = srv_get(item, "role");
    const char   *role = json_string_value(word);
    const bool    ours = role && strcmp(role, "assistant") == 0;

    if (!role || (!ours && strcmp(role, "user") != 0 && strcmp(role, "system") != 0 &&
                  strcmp(role, "developer") != 0))
        return srv_fields_word(f, srv_at("%s.role", where).s, word,
                               "user, assistant, system, developer");
    if (ours && bare_reasoning(list)) {
        json_t *text =
            srv_text_of(f, srv_get(item, "content"), "output_text", srv_at("%s.content", where).s);

        return !f->bad && (json_object_set_new(bare_reasoning(list), "content", text) == 0 ||
                           srv_fields_full(f, "no memory for the messages"));
    }
    return srv_add_message(f, list, role, srv_get(item, "content"),
                           ours ? "output_text" : "input_text", srv_at("%s.content", where).s);
}

/* A string of an item; NULL: it has none, which is told. */
static json_t *text_of(srv_fields *f, const json_t *item, const char *name, const char *where)
{
    json_t *v = srv_get(item, name);

    if (json_is_string(v))
        return v;
    srv_fields_bad(f, srv_at("%s.%s", where, name).s, "expected a string");
    return NULL;
}

/* The name that the template was shown. */
static json_t *name_of(srv_fields *f, const json_t *item, const char *where)
{
    const json_t *space = srv_get(item, "namespace");
    json_t       *name  = text_of(f, item, "name", where);

    if (space && !json_is_string(space))
        srv_fields_bad(f, srv_at("%s.namespace", where).s, "expected a string");
    if (!name || f->bad)
        return NULL;
    return space ? srv_flat_name(f, space, name) : json_incref(name);
}

/* The calls of the assistant's message at the end, which begins there if need be; NULL: there was
 * no memory. */
static json_t *calls_at_end(srv_fields *f, json_t *list)
{
    const size_t n    = json_array_size(list);
    json_t      *last = n ? json_array_get(list, n - 1) : NULL;
    const char  *role = json_string_value(srv_get(last, "role"));

    if (!role || strcmp(role, "assistant") != 0) {
        if (!srv_add(f, list, json_pack("{s:s, s:s}", "role", "assistant", "content", "")))
            return NULL;
        last = json_array_get(list, n);
    }
    if (!srv_get(last, "tool_calls") &&
        json_object_set_new(last, "tool_calls", json_array()) != 0) {
        srv_fields_full(f, "no memory for the messages");
        return NULL;
    }
    return srv_get(last, "tool_calls");
}

/* A call belongs to the assistant's message before it. */
static bool add_call(srv_fields *f, json_t *list, const json_t *item, const char *where)
{
    json_t *id    = text_of(f, item, "call_id", where);
    json_t *name  = id ? name_of(f, item, where) : NULL;
    json_t *args  = name ? text_of(f, item, "arguments", where) : NULL;
    json_t *calls = args ? calls_at_end(f, list) : NULL;
    bool    ok    = calls && srv_add_call(f, calls, id, name, args);

    json_decref(name);
    return ok;
}

static bool add_output(srv_fields *f, json_t *list, const json_t *item, const char *where)
{
    json_t *id = text_of(f, item, "call_id", where);

    return id && srv_add_result(f, list, id,
                                srv_text_of(f, srv_get(item, "output"), "input_text",
                                            srv_at("%s.output", where).s));
}

static bool add_item(srv_fields *f, json_t *list, const json_t *item, size_t i)
{
    const srv_where where = srv_at("input[%zu]", i);
    const json_t   *word  = srv_get(item, "type");
    const char     *type  = json_string_value(word);

    if (!json_is_object(item))
        return srv_fields_bad(f, where.s, "expected an object");
    if (!word || (type && strcmp(type, "message") == 0))
        return add_message(f, list, item, where.s);
    if (type && strcmp(type, "function_call") == 0)
        return add_call(f, list, item, where.s);
    if (type && strcmp(type, "function_call_output") == 0)
        return add_output(f, list, item, where.s);
    if (type && strcmp(type, "reasoning") == 0)
        return add_reasoning(f, list, item);
    return srv_fields_word(f, srv_at("%s.type", where.s).s, word,
                           "message, reasoning, function_call, function_call_output");
}

static bool add_messages(srv_fields *f, json_t *list)
{
    json_t *in = srv_get(f->root, "input"), *first = srv_get(f->root, "instructions"), *item;
    size_t  i;

    if (first && !json_is_string(first))
        return srv_fields_bad(f, "instructions", "expected a string");
    if (!json_is_string(in) && json_array_size(in) == 0)
        return srv_fields_bad(f, "input", "%sexpected a string or a list of items",
                              in ? "" : "is missing: ");
    if (first && !srv_add_message(f, list, "system", first, "input_text", "instructions"))
        return false;
    if (json_is_string(in))
        return srv_add_message(f, list, "user", in, "input_text", "input");
    json_array_foreach(in, i, item)
    {
        if (!add_item(f, list, item, i))
            return false;
    }
    return true;
}

/* ---- requests ----------------------------------------------------------------------------------
 */

/* A function stands beside the type here, in chats below it.  Tools that OpenAI's servers run, or
 * whose calls are no JSON, are left out. */
static bool add_tool(srv_fields *f, srv_request *r, json_t *list, const json_t *tool, size_t i)
{
    const json_t *word = srv_get(tool, "type");
    const char   *type = json_string_value(word);

    if (!type)
        return srv_fields_word(f, srv_at("tools[%zu].type", i).s, word, "function, namespace");
    if (strcmp(type, "namespace") == 0)
        return srv_add_space(f, r, list, tool, i);
    if (strcmp(type, "function") != 0) {
        srv_leave_out(f, "tools", type);
        return true;
    }
    return srv_add_function(f, list,
                            json_pack("{s:O*, s:O*, s:O*, s:O*}", "name", srv_get(tool, "name"),
                                      "description", srv_get(tool, "description"), "parameters",
                                      srv_get(tool, "parameters"), "strict",
                                      srv_get(tool, "strict")));
}

static void get_choice(srv_fields *f, srv_tools *t)
{
    const json_t *v    = srv_get(f->root, "tool_choice");
    const char   *type = json_string_value(srv_get(v, "type"));
    bool          many = true;

    srv_get_bool(f, f->root, "parallel_tool_calls", &many);
    t->single = !many;
    if (type && strcmp(type, "function") == 0)
        t->name = json_string_value(srv_get(v, "name"));
    else if (type) /* also of a tool that is left out */
        srv_fields_word(f, "tool_choice.type", srv_get(v, "type"), "function");
    if (t->name)
        t->choice = SRV_CHOICE_CALL;
    else if (v)
        srv_get_choice(f, v, &t->choice);
}

static void get_text(srv_fields *f)
{
    const json_t *o = srv_get_object(f, f->root, "text");

    srv_get_verbosity(f, srv_get(o, "verbosity"), "text.verbosity");
    srv_get_format(f, "text", srv_get_object(f, o, "format"));
}

/* More of an answer: of tools that never run, of images, or of reasoning, which is there anyway. */
static void get_include(srv_fields *f)
{
    const json_t *list = srv_get(f->root, "include"), *v;
    size_t        i;

    if (list && !json_is_array(list))
        srv_fields_bad(f, "include", "expected a list of strings");
    json_array_foreach(list, i, v)
    {
        if (!json_is_string(v))
            srv_fields_bad(f, srv_at("include[%zu]", i).s, "expected a string");
        else if (strcmp(json_string_value(v), "message.output_text.logprobs") == 0)
            srv_log_once(f->s, "requests include message.output_text.logprobs, which are left out: "
                               "/v1/chat/completions has logprobs");
    }
}

/* Its effort is for the template (srv_template_vars()); reasoning itself is in the answer, so no
 * summary of it is. */
static void get_reasoning(srv_fields *f)
{
    const json_t *o    = srv_get_object(f, f->root, "reasoning");
    const char   *mode = json_string_value(srv_get(o, "mode"));

    if (srv_get(o, "mode") && (!mode || strcmp(mode, "standard") != 0))
        srv_fields_word(f, "reasoning.mode", srv_get(o, "mode"), "standard");
}

/* 0.8 and not what a float makes of it. */
static double decimal(float x)
{
    return round((double)x * 1e6) / 1e6;
}

/* The members of an object, which is freed, without its brackets; NULL: there was no memory. */
static bool put_members(srv_fields *f, json_t *o, kvd_buf *b)
{
    kvd_buf all = { 0 };
    bool    ok  = o ? srv_put_json(f, o, &all) : srv_fields_full(f, "no memory for the request");

    if (ok)
        kvd_buf_put(b, all.data + 1, all.len - 2);
    if (b->oom)
        ok = srv_fields_full(f, "no memory for the request");
    kvd_buf_free(&all);
    json_decref(o);
    return ok;
}

/* Fields of the request as they are, or else what stands for none. */
typedef struct said {
    const char *name, *or_else;
} said;

static bool put_said(srv_fields *f, json_t *o, const said *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        json_t *v = srv_get(f->root, list[i].name);

        v = v ? json_incref(v) : json_loads(list[i].or_else, JSON_DECODE_ANY, NULL);
        if (json_object_set_new(o, list[i].name, v) != 0)
            return srv_fields_full(f, "no memory for the request");
    }
    return true;
}

/* What a response says of its request. */
static bool keep_request(srv_fields *f, srv_request *r)
{
    static const said always[]  = { { "max_output_tokens", "null" },
                                    { "metadata", "{}" },
                                    { "parallel_tool_calls", "true" },
                                    { "reasoning", "{\"effort\":null,\"summary\":null}" },
                                    { "text", "{\"format\":{\"type\":\"text\"}}" },
                                    { "tool_choice", "\"auto\"" } };
    static const said at_last[] = { { "instructions", "null" }, { "tools", "[]" } };
    json_t *o    = json_pack("{s:f, s:f}", "temperature", decimal(r->sampling.temperature), "top_p",
                             decimal(r->sampling.top_p));
    json_t *last = json_object();
    bool    ok   = put_said(f, o, always, KVD_COUNTOF(always)) &&
              put_said(f, last, at_last, KVD_COUNTOF(at_last));

    ok = put_members(f, o, &r->again) && ok;
    return put_members(f, last, &r->again_last) && ok;
}

static bool get_request(srv_fields *f, srv_request *r)
{
    static const srv_conversion conversion = { add_tool, add_messages };
    srv_tools                   t          = { 0 };

    srv_check_names(f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
    srv_get_params(f, r);
    srv_get_u32(f, f->root, "max_output_tokens", 0, UINT32_MAX - 1, &r->n_max);
    srv_get_stops(f, r, "stop");
    get_text(f);
    get_include(f);
    get_reasoning(f);
    get_choice(f, &t);
    f->no_prefill = true;
    return srv_get_converted(f, &conversion, &t, r) && keep_request(f, r);
}

static const srv_shape shape = {
    .prefix  = "resp_",
    .prompt  = "input",
    .request = get_request,
    .event   = event,
    .whole   = whole,
};

void srv_route_responses(srv *s, srv_call *c)
{
    srv_submit(s, c, &shape);
}

void srv_route_input_tokens(srv *s, srv_call *c)
{
    srv_job *j = srv_read_job(s, c, get_request);

    if (j) {
        c->reply.status = 200;
        kvd_buf_printf(&c->reply.body, "{\"object\":\"response.input_tokens\",\"input_tokens\":%u}",
                       j->req.input[0].n);
    }
    srv_job_unref(j);
}
