/* SPDX-License-Identifier: Apache-2.0 */
/* srv_chat.c - /v1/chat/completions: OpenAI's shape of a chat. */
#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

#define CHUNK "chat.completion.chunk"

static const char *const names[] = {
    "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty",
    "repeat_last_n", "seed", "logit_bias", "stop", "n", "stream", "stream_options", "logprobs",
    "top_logprobs", "ignore_eos", "response_format", "return_progress", "debug_cache", "cache_salt",
    "add_generation_prompt", "chat_template_kwargs",
    /* nothing to do for these */
    "user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"
};
static const srv_refused refused[] = { { "audio", "" },
                                       { "chat_template", "" },
                                       { "function_call", "\"none\" \"auto\"" },
                                       { "functions", "[]" },
                                       { "grammar", "\"\"" },
                                       { "guided_json", "" },
                                       { "guided_regex", "" },
                                       { "modalities", "[\"text\"]" },
                                       { "prediction", "" },
                                       { "prompt_cache_retention", "" },
                                       { "reasoning_effort", "\"none\"" },
                                       { "service_tier", "\"auto\" \"default\"" },
                                       { "store", "false" },
                                       { "tool_choice", "\"none\" \"auto\"" },
                                       { "tools", "[]" },
                                       { "verbosity", "" },
                                       { "web_search_options", "" } };

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

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    srv_put_head(s, j, "chat.completion", b);
    kvd_buf_puts(b, ",\"choices\":[");
    for (uint32_t i = 0; i < j->req.n; i++) {
        kvd_buf_printf(b, "%s{\"index\":%u,\"message\":{\"role\":\"assistant\",\"content\":",
                       i ? "," : "", i);
        srv_put_string(b, a[i].text.data ? a[i].text.data : "", a[i].text.len);
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
    kvd_buf_printf(b, ",\"choices\":[{\"index\":%u,\"delta\":{\"content\":", e->choice);
    srv_put_string(b, e->text, e->len);
    kvd_buf_puts(b, "},\"logprobs\":");
    put_logprobs(s, j, e->token, e->n_token, b);
    kvd_buf_puts(b, ",\"finish_reason\":null}]");
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
        put_delta(s, j, e, b);
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

static const srv_shape shape = { .prefix = "chatcmpl-", .event = event, .whole = whole };

/* ---- requests ----------------------------------------------------------------------------------
 */

static bool get_prompt(srv_fields *f, srv_request *r)
{
    char     *text  = NULL;
    kvd_span *spans = NULL;
    size_t    len = 0, n = 0;
    bool      ok;

    r->input = kvd_calloc(1, sizeof(*r->input));
    if (!r->input)
        return srv_fields_full(f, "no memory for the prompt");
    r->n_input = 1;
    ok         = srv_render(f, &text, &len, &spans, &n) &&
         srv_tokenize(f, text, len, spans, n, true, &r->input[0]);
    kvd_free(text);
    kvd_free(spans);
    return ok;
}

void srv_route_chat(srv *s, srv_call *c)
{
    srv_fields f;
    srv_job   *j = srv_job_new();

    if (!j) {
        srv_reply_error(&c->reply, 503, NULL, NULL, "no memory for the request");
        return;
    }
    if (srv_fields_open(&f, s, c)) {
        srv_request *r = &j->req;

        srv_check_names(&f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
        srv_get_params(&f, r);
        srv_get_format(&f, r);
        srv_get_bool(&f, f.root, "logprobs", &r->logprobs);
        srv_get_u32(&f, f.root, "top_logprobs", 0, SRV_TOP_MAX, &r->n_top);
        if (r->n_top && !r->logprobs)
            srv_fields_bad(&f, "top_logprobs", "only with logprobs");
        if (!f.bad && get_prompt(&f, r))
            srv_submit(s, c, j, &shape);
    }
    srv_fields_close(&f);
    srv_job_unref(j);
}
