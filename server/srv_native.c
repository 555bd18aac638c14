/* SPDX-License-Identifier: Apache-2.0 */
/* srv_native.c - /completion: llama.cpp's own shape of a text that goes on. */
#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

static const char *const names[] = { SRV_PARAM_NAMES, "prompt", "max_tokens",
                                     "max_completion_tokens", "stop", "n_probs", "return_tokens",
                                     "return_progress", "response_format", "parse_special",
                                     /* nothing to do for these */
                                     "id_slot", "n_cache_reuse", "user" };

static const srv_refused refused[] = { { "n", "1", "use it in /v1/completions" },
                                       { "echo", "false", "use it in /v1/completions" },
                                       { "logprobs", "false 0", "use n_probs" },
                                       { "timings_per_token", "false",
                                         "the last event has timings" },
                                       { "tools", "[]", "use /v1/chat/completions" } };

/* ---- answers ----------------------------------------------------------------------------------
 */

static void put_ids(const srv_token *t, uint32_t n, kvd_buf *b)
{
    kvd_buf_puts(b, ",\"tokens\":[");
    for (uint32_t i = 0; i < n; i++)
        kvd_buf_printf(b, "%s%d", i ? "," : "", t[i].id);
    kvd_buf_putc(b, ']');
}

/* A token's members, without the brackets. */
static void put_prob(const srv *s, int32_t id, float logprob, kvd_buf *b)
{
    kvd_buf_printf(b, "\"id\":%d,\"token\":", id);
    srv_put_token(s, id, b);
    kvd_buf_puts(b, ",\"bytes\":");
    srv_put_token_bytes(s, id, b);
    kvd_buf_puts(b, ",\"logprob\":");
    srv_put_logprob(logprob, b);
}

static void put_probs(const srv *s, const srv_job *j, const srv_token *t, uint32_t n, kvd_buf *b)
{
    if (j->req.n_top == 0)
        return;
    kvd_buf_puts(b, ",\"completion_probabilities\":[");
    for (uint32_t i = 0; i < n; i++) {
        kvd_buf_puts(b, i ? ",{" : "{");
        put_prob(s, t[i].id, t[i].logprob, b);
        kvd_buf_puts(b, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < t[i].n_top; k++) {
            kvd_buf_puts(b, k ? ",{" : "{");
            put_prob(s, t[i].top[k].id, t[i].top[k].logprob, b);
            kvd_buf_putc(b, '}');
        }
        kvd_buf_puts(b, "]}");
    }
    kvd_buf_putc(b, ']');
}

static void put_settings(const srv *s, const srv_job *j, kvd_buf *b)
{
    const kvd_sampler_params *p     = &j->req.sampling;
    const long long           n_max = j->req.n_max == UINT32_MAX ? -1 : (long long)j->req.n_max;

    kvd_buf_printf(b,
                   ",\"generation_settings\":{\"n_ctx\":%u,\"n_predict\":%lld,\"seed\":%llu,"
                   "\"temperature\":%g,\"top_k\":%d,\"top_p\":%g,\"min_p\":%g,"
                   "\"repeat_penalty\":%g,\"repeat_last_n\":%d,\"presence_penalty\":%g,"
                   "\"frequency_penalty\":%g,\"ignore_eos\":%s,\"stream\":%s,\"stop\":[",
                   s->plan.n_ctx, n_max, (unsigned long long)p->seed, (double)p->temperature,
                   p->top_k, (double)p->top_p, (double)p->min_p, (double)p->repeat_penalty,
                   p->penalty_last_n, (double)p->presence_penalty, (double)p->frequency_penalty,
                   j->req.ignore_eos ? "true" : "false", j->req.stream ? "true" : "false");
    for (uint32_t i = 0; i < j->req.n_stop; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        srv_put_string(b, j->req.stop[i], j->req.stop_len[i]);
    }
    kvd_buf_puts(b, "]}");
}

static void put_prompt(const srv *s, const srv_input *in, kvd_buf *b)
{
    kvd_buf text = { 0 };

    for (uint32_t i = 0; i < in->n; i++) {
        size_t      len;
        const char *bytes = kvd_token_bytes(s->model, in->token[i], &len);

        kvd_buf_put(&text, bytes, len);
    }
    kvd_buf_puts(b, ",\"prompt\":");
    srv_put_string(b, text.data ? text.data : "", text.len);
    b->oom = b->oom || text.oom;
    kvd_buf_free(&text);
}

/* What an answer says at its end, behind its text and tokens, to the end of the object. */
static void put_end(const srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    const srv_usage *u    = &j->usage;
    const bool       word = a->finish == SRV_FINISH_STOP && a->stop >= 0;
    const bool       full = a->finish == SRV_FINISH_LENGTH;

    kvd_buf_puts(b, ",\"id_slot\":-1,\"stop\":true,\"model\":");
    srv_put_text(b, s->name);
    kvd_buf_printf(b, ",\"tokens_predicted\":%llu,\"tokens_evaluated\":%llu",
                   (unsigned long long)u->n_generated, (unsigned long long)u->n_prompt);
    put_settings(s, j, b);
    put_prompt(s, &j->req.input[0], b);
    kvd_buf_printf(b, ",\"truncated\":%s,\"stop_type\":\"%s\",\"stopping_word\":",
                   full && u->n_prompt + u->n_generated >= s->plan.n_ctx ? "true" : "false",
                   full   ? "limit"
                   : word ? "word"
                          : "eos");
    if (word)
        srv_put_string(b, j->req.stop[a->stop], j->req.stop_len[a->stop]);
    else
        kvd_buf_puts(b, "\"\"");
    kvd_buf_printf(b, ",\"tokens_cached\":%llu", (unsigned long long)srv_n_cached(u));
    srv_put_extras(j, b);
    kvd_buf_putc(b, '}');
}

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    const srv_token *t = (const srv_token *)(const void *)a->tokens.data;
    const uint32_t   n = (uint32_t)(a->tokens.len / sizeof(*t));

    kvd_buf_puts(b, "{\"index\":0,\"content\":");
    srv_put_answer_text(a, false, b);
    put_ids(t, j->req.return_tokens ? n : 0, b);
    put_probs(s, j, t, n, b);
    put_end(s, j, a, b);
}

/* ---- streams ------------------------------------------------------------------------------------
 */

static void put_text(srv *s, const srv_job *j, const srv_event *e, kvd_buf *b)
{
    kvd_buf_puts(b, "data: {\"index\":0,\"content\":");
    srv_put_string(b, e->text, e->len);
    put_ids(e->token, e->n_token, b);
    put_probs(s, j, e->token, e->n_token, b);
    kvd_buf_puts(b, ",\"id_slot\":-1,\"stop\":false}\n\n");
}

static void event(srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    switch (e->kind) {
    case SRV_EVENT_START:
    case SRV_EVENT_REASONING: /* it stays text here, and there are no tools */
    case SRV_EVENT_CALL:
    case SRV_EVENT_ARGUMENTS:
    case SRV_EVENT_CALL_END:
        break;
    case SRV_EVENT_PROGRESS:
        kvd_buf_printf(b,
                       "data: {\"index\":0,\"content\":\"\",\"tokens\":[],\"stop\":false,"
                       "\"prompt_progress\":{\"total\":%u,\"cache\":%u,\"processed\":%u,"
                       "\"time_ms\":%.0f}}\n\n",
                       e->n_total, e->n_cached, e->n_done, (double)e->ns * 1e-6);
        break;
    case SRV_EVENT_TEXT:
        put_text(s, j, e, b);
        break;
    case SRV_EVENT_FINISH:
        srv_collect(&j->answer, e); /* the last event tells it */
        break;
    case SRV_EVENT_END:
        kvd_buf_puts(b, "data: {\"index\":0,\"content\":\"\",\"tokens\":[]");
        put_end(s, j, &j->answer, b);
        kvd_buf_puts(b, "\n\n");
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
    srv_check_names(f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
    srv_get_params(f, r);
    srv_get_choices(f, r);
    r->n = 1;
    srv_get_format(f, "response_format", srv_get_object(f, f->root, "response_format"));
    srv_get_u32(f, f->root, "n_probs", 0, SRV_TOP_MAX, &r->n_top);
    srv_get_bool(f, f->root, "return_tokens", &r->return_tokens);
    r->logprobs = r->stream || r->return_tokens || r->n_top > 0; /* tokens come with them */
    if (f->bad || !srv_get_prompts(f, r))
        return false;
    return r->n_input == 1 ||
           srv_fields_bad(f, "prompt", "expected one: /v1/completions takes a list of them");
}

static const srv_shape shape = {
    .prefix  = "cmpl-",
    .prompt  = "prompt",
    .request = get_request,
    .event   = event,
    .whole   = whole,
};

void srv_route_native(srv *s, srv_call *c)
{
    srv_submit(s, c, &shape);
}
