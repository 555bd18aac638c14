/* SPDX-License-Identifier: Apache-2.0 */
/* srv_chat.c - /v1/chat/completions: OpenAI's shape of a chat. */
#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

#define CHUNK "chat.completion.chunk"

static const char *const names[] = {
    SRV_PARAM_NAMES, "messages", "max_tokens", "max_completion_tokens", "stop", "n",
    "stream_options", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice",
    "parallel_tool_calls", "return_progress", "add_generation_prompt", "chat_template_kwargs",
    "reasoning_format", "continue_final_message", "reasoning_effort", "verbosity",
    /* nothing to do for these */
    "user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier"
};

static const srv_refused refused[] = {
    { "moderation", "", SRV_SAY_NOTHING_LIKE },
    { "prediction", "", SRV_SAY_NOTHING_LIKE },
    { "prompt_cache_options", "{}", SRV_SAY_CACHED },
    { "prompt_cache_retention", "", SRV_SAY_CACHED },
};

/* ---- answers ----------------------------------------------------------------------------------
 */

static void put_one_logprob(const srv *s, int32_t id, float logprob, kvd_buf *b)
{
    kvd_buf_puts(b, "{\"token\":");
    srv_put_token(s, id, b);
    kvd_buf_puts(b, ",\"logprob\":");
    srv_put_logprob(logprob, b);
    kvd_buf_puts(b, ",\"bytes\":");
    srv_put_token_bytes(s, id, b);
}

static void put_logprobs(const srv *s, const srv_job *j, const srv_token *t, uint32_t n, kvd_buf *b)
{
    if (!j->req.logprobs) {
        kvd_buf_puts(b, "null");
        return;
    }
    kvd_buf_puts(b, "{\"content\":[");
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        put_one_logprob(s, t[i].id, t[i].logprob, b);
        kvd_buf_puts(b, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < t[i].n_top; k++) {
            if (k > 0)
                kvd_buf_putc(b, ',');
            put_one_logprob(s, t[i].top[k].id, t[i].top[k].logprob, b);
            kvd_buf_putc(b, '}');
        }
        kvd_buf_puts(b, "]}");
    }
    kvd_buf_puts(b, "],\"refusal\":null}");
}

/* Reasoning, text and calls of an answer; text that is not there beside calls is null. */
static void put_said(const srv_job *j, uint32_t choice, const srv_answer *a, kvd_buf *b)
{
    uint32_t n_call = 0;

    for (uint32_t i = 0; i < srv_n_piece(a); i++) {
        const srv_piece p = srv_piece_at(a, i);

        if (!p.is_call)
            continue;
        kvd_buf_puts(b, n_call++ ? ",{\"id\":" : ",\"tool_calls\":[{\"id\":");
        srv_put_call_id(j, choice, p.call, b);
        kvd_buf_puts(b, ",\"type\":\"function\",\"function\":{\"name\":");
        srv_put_string(b, a->said.data + p.name, p.n_name);
        kvd_buf_puts(b, ",\"arguments\":");
        srv_put_string(b, a->said.data + p.at, p.len);
        kvd_buf_puts(b, "}}");
    }
    if (n_call)
        kvd_buf_putc(b, ']');
    if (srv_answer_has(a, true)) {
        kvd_buf_puts(b, ",\"reasoning_content\":");
        srv_put_answer_text(a, true, b);
    }
    kvd_buf_puts(b, ",\"content\":");
    if (n_call && !srv_answer_has(a, false))
        kvd_buf_puts(b, "null");
    else
        srv_put_answer_text(a, false, b);
}

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    srv_put_head(s, j, "chat.completion", b);
    kvd_buf_puts(b, ",\"choices\":[");
    for (uint32_t i = 0; i < j->req.n; i++) {
        kvd_buf_printf(b, "%s{\"index\":%u,\"message\":{\"role\":\"assistant\"", i ? "," : "", i);
        put_said(j, i, &a[i], b);
        kvd_buf_puts(b, ",\"refusal\":null},\"logprobs\":");
        put_logprobs(s, j, (const srv_token *)(const void *)a[i].tokens.data,
                     (uint32_t)(a[i].tokens.len / sizeof(srv_token)), b);
        kvd_buf_printf(b, ",\"finish_reason\":\"%s\"}", srv_finish_name(a[i].finish));
    }
    srv_put_tail(j, b);
}

/* ---- streams ------------------------------------------------------------------------------------
 */

static void put_role(srv *s, srv_job *j, uint32_t choice, kvd_buf *b)
{
    if (j->has_role[choice])
        return;
    j->has_role[choice] = true;
    srv_chunk_begin(s, j, CHUNK, b);
    kvd_buf_printf(
        b,
        ",\"choices\":[{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
        "\"logprobs\":null,\"finish_reason\":null}]",
        choice);
    srv_chunk_end(j, b);
}

static void put_delta(const srv *s, const srv_job *j, const srv_event *e, kvd_buf *b)
{
    srv_chunk_begin(s, j, CHUNK, b);
    kvd_buf_printf(b, ",\"choices\":[{\"index\":%u,\"delta\":{\"%s\":", e->choice,
                   e->kind == SRV_EVENT_REASONING ? "reasoning_content" : "content");
    srv_put_string(b, e->text, e->len);
    kvd_buf_puts(b, "},\"logprobs\":");
    put_logprobs(s, j, e->token, e->n_token, b);
    kvd_buf_puts(b, ",\"finish_reason\":null}]");
    srv_chunk_end(j, b);
}

/* A call's beginning, with its name; or more of its arguments. */
static void put_call(const srv *s, const srv_job *j, const srv_event *e, kvd_buf *b)
{
    srv_chunk_begin(s, j, CHUNK, b);
    kvd_buf_printf(b, ",\"choices\":[{\"index\":%u,\"delta\":{\"tool_calls\":[{\"index\":%u,",
                   e->choice, e->call);
    if (e->kind == SRV_EVENT_CALL) {
        kvd_buf_puts(b, "\"id\":");
        srv_put_call_id(j, e->choice, e->call, b);
        kvd_buf_puts(b, ",\"type\":\"function\",\"function\":{\"name\":");
        srv_put_string(b, e->text, e->len);
        kvd_buf_puts(b, ",\"arguments\":\"\"}}]}");
    } else {
        kvd_buf_puts(b, "\"function\":{\"arguments\":");
        srv_put_string(b, e->text, e->len);
        kvd_buf_puts(b, "}}]}");
    }
    kvd_buf_puts(b, ",\"logprobs\":null,\"finish_reason\":null}]");
    srv_chunk_end(j, b);
}

static void event(srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    switch (e->kind) {
    case SRV_EVENT_START:
        put_role(s, j, e->choice, b);
        break;
    case SRV_EVENT_PROGRESS:
        srv_chunk_progress(s, j, CHUNK, e, b);
        break;
    case SRV_EVENT_TEXT:
    case SRV_EVENT_REASONING:
        put_delta(s, j, e, b);
        break;
    case SRV_EVENT_CALL:
    case SRV_EVENT_ARGUMENTS:
        put_call(s, j, e, b);
        break;
    case SRV_EVENT_CALL_END:
        break;
    case SRV_EVENT_FINISH:
        srv_chunk_begin(s, j, CHUNK, b);
        kvd_buf_printf(b,
                       ",\"choices\":[{\"index\":%u,\"delta\":{},\"logprobs\":null,"
                       "\"finish_reason\":\"%s\"}]",
                       e->choice, srv_finish_name(e->finish));
        srv_chunk_end(j, b);
        break;
    case SRV_EVENT_END:
        srv_chunk_last(s, j, CHUNK, b);
        break;
    case SRV_EVENT_ERROR:
        srv_stream_error(e, b);
        break;
    }
}

/* ---- requests ----------------------------------------------------------------------------------
 */

static bool get_request(srv_fields *f, srv_request *r)
{
    const json_t *tools;

    srv_check_names(f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
    srv_get_params(f, r);
    srv_get_choices(f, r);
    srv_get_format(f, "response_format", srv_get_object(f, f->root, "response_format"));
    srv_get_verbosity(f, srv_get(f->root, "verbosity"), "verbosity");
    tools = srv_get_tools(f, r);
    srv_get_bool(f, f->root, "logprobs", &r->logprobs);
    srv_get_u32(f, f->root, "top_logprobs", 0, SRV_TOP_MAX, &r->n_top);
    if (r->n_top && !r->logprobs)
        srv_fields_bad(f, "top_logprobs", "only with logprobs: true");
    return !f->bad && srv_get_prompt(f, srv_get(f->root, "messages"), tools, r);
}

static const srv_shape shape = {
    .prefix  = "chatcmpl-",
    .prompt  = "messages",
    .request = get_request,
    .event   = event,
    .whole   = whole,
};

void srv_route_chat(srv *s, srv_call *c)
{
    srv_submit(s, c, &shape);
}
