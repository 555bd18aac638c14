/* SPDX-License-Identifier: Apache-2.0 */
/* srv_anthropic.c - /v1/messages: Anthropic's shape of a chat, made of content blocks. */
#include <stdio.h>
#include <string.h>

#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

static const char *const names[] = {
    SRV_PARAM_NAMES, "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice",
    "output_config", "add_generation_prompt", "chat_template_kwargs", "context_management",
    "thinking", "reasoning_format", "continue_final_message",
    /* nothing to do for these */
    "metadata", "cache_control", "user_profile_id", "workspace_id", "diagnostics", "service_tier"
};

static const srv_refused refused[] = {
    { "container", "", "tools are the client's to run: leave it out" },
    { "inference_geo", "", "this server is where it is: leave it out" },
    { "speed", "\"standard\"", "there is one speed: leave it out" }
};

/* ---- answers ----------------------------------------------------------------------------------
 */

static void put_usage(const srv_job *j, kvd_buf *b)
{
    const srv_usage *u      = &j->usage;
    const uint64_t   cached = srv_n_cached(u);

    kvd_buf_printf(b,
                   "{\"input_tokens\":%llu,\"cache_creation_input_tokens\":0,"
                   "\"cache_read_input_tokens\":%llu,\"output_tokens\":%llu,",
                   (unsigned long long)(u->n_prompt - cached), (unsigned long long)cached,
                   (unsigned long long)u->n_generated);
    srv_put_tiers(u, b);
    kvd_buf_putc(b, '}');
}

static void put_head(const srv *s, const srv_job *j, kvd_buf *b)
{
    kvd_buf_printf(b,
                   "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", j->id);
    srv_put_text(b, s->name);
}

/* "stop_reason":...,"stop_sequence":... */
static void put_stop(const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    static const char *const reasons[] = { [SRV_FINISH_STOP]   = "end_turn",
                                           [SRV_FINISH_LENGTH] = "max_tokens",
                                           [SRV_FINISH_CALLS]  = "tool_use" };

    if (a->finish == SRV_FINISH_STOP && a->stop >= 0) {
        kvd_buf_puts(b, "\"stop_reason\":\"stop_sequence\",\"stop_sequence\":");
        srv_put_string(b, j->req.stop[a->stop], j->req.stop_len[a->stop]);
    } else {
        kvd_buf_printf(b, "\"stop_reason\":\"%s\",\"stop_sequence\":null", reasons[a->finish]);
    }
}

static void put_tool_use(const srv_job *j, uint32_t call, const char *name, size_t n_name,
                         kvd_buf *b)
{
    kvd_buf_puts(b, "{\"type\":\"tool_use\",\"id\":");
    srv_put_call_id(j, 0, call, b);
    kvd_buf_puts(b, ",\"name\":");
    srv_put_string(b, name, n_name);
    kvd_buf_puts(b, ",\"input\":");
}

/* The arguments of a call that was cut are no object: it has none then. */
static void put_block(const srv_job *j, const srv_answer *a, uint32_t i, kvd_buf *b)
{
    const srv_piece p = srv_piece_at(a, i);

    if (!p.is_call) {
        kvd_buf_puts(b, p.is_reasoning ? "{\"type\":\"thinking\",\"signature\":\"\",\"thinking\":"
                                       : "{\"type\":\"text\",\"text\":");
        srv_put_string(b, a->said.data + p.at, p.len);
    } else {
        put_tool_use(j, p.call, a->said.data + p.name, p.n_name, b);
        if (p.complete)
            kvd_buf_put(b, a->said.data + p.at, p.len);
        else
            kvd_buf_puts(b, "{}");
    }
    kvd_buf_putc(b, '}');
}

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    put_head(s, j, b);
    kvd_buf_puts(b, ",\"content\":[");
    for (uint32_t i = 0; i < srv_n_piece(a); i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        put_block(j, a, i, b);
    }
    kvd_buf_puts(b, "],");
    put_stop(j, a, b);
    kvd_buf_puts(b, ",\"usage\":");
    put_usage(j, b);
    srv_put_debug(j, b);
    kvd_buf_putc(b, '}');
}

/* ---- streams ------------------------------------------------------------------------------------
 */

static void put_start(const srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    if (j->has_role[0])
        return;
    j->has_role[0] = true;
    srv_typed_begin("message_start", b);
    kvd_buf_puts(b, ",\"message\":");
    put_head(s, j, b);
    kvd_buf_printf(b,
                   ",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":"
                   "{\"input_tokens\":%u,\"cache_creation_input_tokens\":0,"
                   "\"cache_read_input_tokens\":%u,\"output_tokens\":0}}",
                   j->req.input[0].n - e->n_cached, e->n_cached);
    srv_typed_end(b);
}

/* The last block's. */
static void begin_block_event(const srv_job *j, const char *type, kvd_buf *b)
{
    srv_typed_begin(type, b);
    kvd_buf_printf(b, ",\"index\":%u", srv_n_piece(&j->answer) - 1);
}

static void open_block(srv_job *j, const srv_event *e, kvd_buf *b)
{
    begin_block_event(j, "content_block_start", b);
    kvd_buf_puts(b, ",\"content_block\":");
    if (e->kind == SRV_EVENT_CALL)
        put_tool_use(j, e->call, e->text, e->len, b);
    kvd_buf_puts(b, e->kind == SRV_EVENT_CALL ? "{}}"
                    : e->kind == SRV_EVENT_REASONING
                        ? "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"
                        : "{\"type\":\"text\",\"text\":\"\"}");
    srv_typed_end(b);
}

static void put_more(srv_job *j, const srv_event *e, kvd_buf *b)
{
    begin_block_event(j, "content_block_delta", b);
    kvd_buf_printf(b, ",\"delta\":{\"type\":%s:",
                   e->kind == SRV_EVENT_TEXT        ? "\"text_delta\",\"text\""
                   : e->kind == SRV_EVENT_REASONING ? "\"thinking_delta\",\"thinking\""
                                                    : "\"input_json_delta\",\"partial_json\"");
    srv_put_string(b, e->text, e->len);
    kvd_buf_putc(b, '}');
    srv_typed_end(b);
}

/* Nothing is signed: a block of thinking comes back as it is. */
static void close_block(srv_job *j, kvd_buf *b)
{
    if (srv_piece_at(&j->answer, srv_n_piece(&j->answer) - 1).is_reasoning) {
        begin_block_event(j, "content_block_delta", b);
        kvd_buf_puts(b, ",\"delta\":{\"type\":\"signature_delta\",\"signature\":\"\"}");
        srv_typed_end(b);
    }
    begin_block_event(j, "content_block_stop", b);
    srv_typed_end(b);
}

static const srv_piece_shape block_events = { open_block, put_more, close_block };

static void put_end(const srv_job *j, kvd_buf *b)
{
    srv_typed_begin("message_delta", b);
    kvd_buf_puts(b, ",\"delta\":{");
    put_stop(j, &j->answer, b);
    kvd_buf_puts(b, "},\"usage\":");
    put_usage(j, b);
    srv_put_debug(j, b);
    srv_typed_end(b);
    srv_typed_begin("message_stop", b);
    srv_typed_end(b);
}

static void event(srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    switch (e->kind) {
    case SRV_EVENT_START:
        put_start(s, j, e, b);
        break;
    case SRV_EVENT_PROGRESS:
        break;
    case SRV_EVENT_TEXT:
    case SRV_EVENT_REASONING:
    case SRV_EVENT_CALL:
    case SRV_EVENT_ARGUMENTS:
    case SRV_EVENT_CALL_END:
    case SRV_EVENT_FINISH:
        srv_piece_event(&block_events, j, e, b);
        break;
    case SRV_EVENT_END:
        put_end(j, b);
        break;
    case SRV_EVENT_ERROR:
        kvd_buf_puts(b, "event: error\ndata: ");
        srv_put_messages_error(b, e->status, e->text);
        kvd_buf_puts(b, "\n\n");
        break;
    }
}

/* ---- messages, brought to the form of OpenAI's chats -------------------------------------------
 */

static bool add_said(srv_fields *f, json_t *list, const char *role, const kvd_buf *text,
                     json_t *calls)
{
    json_t *m = text->oom ? NULL
                          : json_pack("{s:s, s:s%}", "role", role, "content",
                                      text->data ? text->data : "", text->len);

    if (m && calls && json_object_set(m, "tool_calls", calls) != 0) {
        json_decref(m);
        m = NULL;
    }
    return srv_add(f, list, m);
}

static bool is_type(const json_t *block, const char *type)
{
    const char *t = json_string_value(srv_get(block, "type"));

    return t && strcmp(t, type) == 0;
}

static bool add_text(srv_fields *f, const json_t *block, const char *where, kvd_buf *text)
{
    const json_t *v = srv_get(block, "text");

    if (!json_is_string(v))
        return srv_fields_bad(f, srv_at("%s.text", where).s, "expected a string");
    if (text->len)
        kvd_buf_putc(text, '\n');
    kvd_buf_put(text, json_string_value(v), json_string_length(v));
    return true;
}

static bool add_result(srv_fields *f, json_t *list, const json_t *block, const char *where)
{
    json_t *content = srv_get(block, "content"), *id = srv_get(block, "tool_use_id");
    json_t *parts = json_is_array(content) ? srv_without_references(f, content) : NULL;
    json_t *text;

    if (!json_is_string(id))
        srv_fields_bad(f, srv_at("%s.tool_use_id", where).s, "expected a string");
    text = f->bad ? NULL
           : !content
               ? json_string("")
               : srv_text_of(f, parts ? parts : content, "text", srv_at("%s.content", where).s);
    json_decref(parts);
    return srv_add_result(f, list, id, text);
}

static bool add_use(srv_fields *f, json_t *calls, const json_t *block, const char *where)
{
    json_t *id = srv_get(block, "id"), *name = srv_get(block, "name");
    json_t *input = srv_get(block, "input");

    if (!json_is_string(id) || !json_is_string(name))
        return srv_fields_bad(f, srv_at("%s.%s", where, json_is_string(id) ? "name" : "id").s,
                              "expected a string");
    if (!json_is_object(input))
        return srv_fields_bad(f, srv_at("%s.input", where).s, "expected an object");
    return srv_add_call(f, calls, id, name, input);
}

/* Results are messages of their own, text around them is the user's, in their order. */
static bool add_user(srv_fields *f, json_t *list, const json_t *blocks, const char *where)
{
    kvd_buf text = { 0 };
    size_t  i, was = json_array_size(list);
    json_t *block;
    bool    ok = true;

    json_array_foreach(blocks, i, block)
    {
        const srv_where at = srv_at("%s[%zu]", where, i);

        if (srv_is_tool_change(block))
            continue;
        if (is_type(block, "text"))
            ok = add_text(f, block, at.s, &text);
        else if (!is_type(block, "tool_result"))
            ok = srv_fields_word(f, srv_at("%s.type", at.s).s, srv_get(block, "type"),
                                 "text, tool_result");
        else if (text.len)
            ok = add_said(f, list, "user", &text, NULL) && add_result(f, list, block, at.s);
        else
            ok = add_result(f, list, block, at.s);
        if (is_type(block, "tool_result"))
            text.len = 0;
        if (!ok)
            break;
    }
    if (ok && (text.len || json_array_size(list) == was))
        ok = add_said(f, list, "user", &text, NULL);
    kvd_buf_free(&text);
    return ok;
}

/* A block of thinking; what is redacted says nothing. */
static bool add_thinking(srv_fields *f, const json_t *block, const char *where, kvd_buf *thinking)
{
    const json_t *v = srv_get(block, "thinking");

    if (is_type(block, "redacted_thinking"))
        return true;
    if (!json_is_string(v))
        return srv_fields_bad(f, srv_at("%s.thinking", where).s, "expected a string");
    if (thinking->len)
        kvd_buf_putc(thinking, '\n');
    kvd_buf_put(thinking, json_string_value(v), json_string_length(v));
    return true;
}

static bool add_assistant(srv_fields *f, json_t *list, const json_t *blocks, const char *where)
{
    kvd_buf text = { 0 }, thinking = { 0 };
    json_t *calls = json_array(), *block;
    bool    ok    = true;
    size_t  i;

    json_array_foreach(blocks, i, block)
    {
        const srv_where at = srv_at("%s[%zu]", where, i);

        if (is_type(block, "text"))
            ok = add_text(f, block, at.s, &text);
        else if (is_type(block, "tool_use"))
            ok = add_use(f, calls, block, at.s);
        else if (is_type(block, "thinking") || is_type(block, "redacted_thinking"))
            ok = add_thinking(f, block, at.s, &thinking);
        else
            ok = srv_fields_word(f, srv_at("%s.type", at.s).s, srv_get(block, "type"),
                                 "text, tool_use, thinking, redacted_thinking");
        if (!ok)
            break;
    }
    ok = ok && add_said(f, list, "assistant", &text, json_array_size(calls) ? calls : NULL) &&
         srv_add_reasoning(f, list, thinking.data, thinking.len);
    json_decref(calls);
    kvd_buf_free(&thinking);
    kvd_buf_free(&text);
    return ok;
}

/* A message of texts that may stand anywhere; what it says of tools is known already. */
static bool add_system(srv_fields *f, json_t *list, const json_t *blocks, const char *where)
{
    kvd_buf text = { 0 };
    json_t *block;
    size_t  i, n = 0;
    bool    ok = true;

    json_array_foreach(blocks, i, block)
    {
        const srv_where at = srv_at("%s[%zu]", where, i);

        if (srv_is_tool_change(block))
            continue;
        n++;
        ok = is_type(block, "text")
                 ? add_text(f, block, at.s, &text)
                 : srv_fields_word(f, srv_at("%s.type", at.s).s, srv_get(block, "type"), "text");
        if (!ok)
            break;
    }
    if (ok && (n || i == 0))
        ok = add_said(f, list, "system", &text, NULL);
    kvd_buf_free(&text);
    return ok;
}

static bool add_message(srv_fields *f, json_t *list, const json_t *m, size_t i)
{
    const srv_where at      = srv_at("messages[%zu].content", i);
    const json_t   *word    = srv_get(m, "role");
    const char     *role    = json_string_value(word);
    json_t         *content = srv_get(m, "content");

    if (!json_is_object(m))
        return srv_fields_bad(f, srv_at("messages[%zu]", i).s, "expected an object");
    if (!role || (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0 &&
                  strcmp(role, "system") != 0))
        return srv_fields_word(f, srv_at("messages[%zu].role", i).s, word,
                               "user, assistant, system");
    if (!json_is_array(content))
        return srv_add_message(f, list, role, content, "text", at.s);
    if (*role == 's')
        return add_system(f, list, content, at.s);
    return *role == 'u' ? add_user(f, list, content, at.s) : add_assistant(f, list, content, at.s);
}

static bool add_messages(srv_fields *f, json_t *list)
{
    json_t *in = srv_get(f->root, "messages"), *system = srv_get(f->root, "system"), *m;
    size_t  i;

    if (json_array_size(in) == 0)
        return srv_fields_bad(f, "messages", "%sexpected a list of messages",
                              in ? "" : "is missing: ");
    if (system && !srv_add_message(f, list, "system", system, "text", "system"))
        return false;
    json_array_foreach(in, i, m)
    {
        if (!add_message(f, list, m, i))
            return false;
    }
    return true;
}

/* ---- requests ----------------------------------------------------------------------------------
 */

static void get_choice(srv_fields *f, srv_tools *t)
{
    const json_t *o    = srv_get_object(f, f->root, "tool_choice");
    const char   *type = json_string_value(srv_get(o, "type"));

    srv_get_bool(f, o, "disable_parallel_tool_use", &t->single);
    if (!o)
        return;
    t->name = json_string_value(srv_get(o, "name"));
    if (type && (strcmp(type, "any") == 0 || (strcmp(type, "tool") == 0 && t->name))) {
        t->name   = *type == 't' ? t->name : NULL;
        t->choice = SRV_CHOICE_CALL;
    } else if (type && (strcmp(type, "auto") == 0 || strcmp(type, "none") == 0)) {
        t->name   = NULL;
        t->choice = *type == 'n' ? SRV_CHOICE_NONE : SRV_CHOICE_AUTO;
    } else {
        srv_fields_word(f, "tool_choice.type", srv_get(o, "type"),
                        "auto, any, none, or tool with a name");
    }
}

static void get_output(srv_fields *f)
{
    const json_t *o = srv_get_object(f, f->root, "output_config");

    srv_get_format(f, "output_config", srv_get_object(f, o, "format"));
}

/* What both routes read: the prompt, with what belongs to it. */
static bool get_request(srv_fields *f, srv_request *r)
{
    static const srv_conversion conversion = { srv_add_claude_tool, add_messages };
    srv_tools                   t          = { 0 };

    srv_check_names(f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
    srv_get_params(f, r);
    srv_get_u32(f, f->root, "max_tokens", 0, UINT32_MAX - 1, &r->n_max);
    srv_get_stops(f, r, "stop_sequences");
    get_output(f);
    get_choice(f, &t);
    srv_check_edits(f);
    return !f->bad && srv_read_offers(f) && srv_get_converted(f, &conversion, &t, r);
}

static bool get_message(srv_fields *f, srv_request *r)
{
    if (!srv_get(f->root, "max_tokens"))
        return srv_fields_bad(f, "max_tokens", "is missing: expected the most tokens of an answer");
    return get_request(f, r);
}

static const srv_shape shape = { .prefix    = "msg_",
                                 .prompt    = "messages",
                                 .keepalive = "event: ping\ndata: {\"type\":\"ping\"}\n\n",
                                 .request   = get_message,
                                 .event     = event,
                                 .whole     = whole };

void srv_route_messages(srv *s, srv_call *c)
{
    srv_submit(s, c, &shape);
}

void srv_route_count(srv *s, srv_call *c)
{
    srv_job *j = srv_read_job(s, c, get_request);

    if (j) {
        c->reply.status = 200;
        kvd_buf_printf(&c->reply.body, "{\"input_tokens\":%u}", j->req.input[0].n);
    }
    srv_job_unref(j);
}
