/* SPDX-License-Identifier: Apache-2.0 */
/* srv_completion.c - /v1/completions: OpenAI's older shape, a text that goes on. */
#include <math.h>
#include <string.h>

#include "srv_fields.h"
#include "srv_routes.h"
#include "srv_shape.h"

static const char *const names[] = { SRV_PARAM_NAMES, "prompt", "max_tokens",
                                     "max_completion_tokens", "stop", "n", "stream_options",
                                     "logprobs", "echo", "response_format", "return_progress",
                                     "best_of", "parse_special",
                                     /* nothing to do for this */
                                     "user" };

#define CHATS "it belongs to chats: use /v1/chat/completions"

static const srv_refused refused[] = {
    { "add_generation_prompt", "true", CHATS },
    { "add_special_tokens", "true",
      "a text has them always: give the prompt as tokens (/tokenize)" },
    { "chat_template_kwargs", "{}", CHATS },
    { "tool_choice", "\"none\" \"auto\"", CHATS },
    { "tools", "[]", CHATS }
};

#define OBJECT        "text_completion"
#define N_MAX_DEFAULT 16u /* OpenAI's, where neither client nor server says */

/* ---- answers ----------------------------------------------------------------------------------
 */

/* Where each token's text begins in the answer: a token's own bytes add up to it. */
static void put_offsets(const srv *s, const srv_token *t, uint32_t n, uint64_t at, kvd_buf *b)
{
    for (uint32_t i = 0; i < n; i++) {
        size_t len;

        kvd_buf_printf(b, "%s%llu", i ? "," : "", (unsigned long long)at);
        kvd_token_bytes(s->model, t[i].id, &len);
        at += len;
    }
}

static void put_tops(const srv *s, const srv_token *t, kvd_buf *b)
{
    if (isnan(t->logprob)) {
        kvd_buf_puts(b, "null");
        return;
    }
    kvd_buf_putc(b, '{');
    for (uint32_t k = 0; k < t->n_top; k++) {
        if (k > 0)
            kvd_buf_putc(b, ',');
        srv_put_token(s, t->top[k].id, b);
        kvd_buf_putc(b, ':');
        srv_put_logprob(t->top[k].logprob, b);
    }
    kvd_buf_putc(b, '}');
}

static void put_logprobs(const srv *s, const srv_job *j, const srv_token *t, uint32_t n,
                         uint64_t at, kvd_buf *b)
{
    if (!j->req.logprobs) {
        kvd_buf_puts(b, "null");
        return;
    }
    kvd_buf_puts(b, "{\"tokens\":[");
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        srv_put_token(s, t[i].id, b);
    }
    kvd_buf_puts(b, "],\"token_logprobs\":[");
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        srv_put_logprob(t[i].logprob, b);
    }
    kvd_buf_puts(b, "],\"top_logprobs\":[");
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            kvd_buf_putc(b, ',');
        put_tops(s, &t[i], b);
    }
    kvd_buf_puts(b, "],\"text_offset\":[");
    put_offsets(s, t, n, at, b);
    kvd_buf_puts(b, "]}");
}

static void whole(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b)
{
    srv_put_head(s, j, OBJECT, b);
    kvd_buf_puts(b, ",\"choices\":[");
    for (uint32_t i = 0; i < j->req.n_input * j->req.n; i++) {
        kvd_buf_printf(b, "%s{\"index\":%u,\"text\":", i ? "," : "", i);
        srv_put_answer_text(&a[i], false, b);
        kvd_buf_puts(b, ",\"logprobs\":");
        put_logprobs(s, j, (const srv_token *)(const void *)a[i].tokens.data,
                     (uint32_t)(a[i].tokens.len / sizeof(srv_token)), 0, b);
        kvd_buf_printf(b, ",\"finish_reason\":\"%s\"}", srv_finish_name(a[i].finish));
    }
    srv_put_tail(j, b);
}

/* ---- streams ------------------------------------------------------------------------------------
 */

static void put_text(srv *s, srv_job *j, const srv_event *e, kvd_buf *b)
{
    srv_chunk_begin(s, j, OBJECT, b);
    kvd_buf_printf(b, ",\"choices\":[{\"index\":%u,\"text\":", e->choice);
    srv_put_string(b, e->text, e->len);
    kvd_buf_puts(b, ",\"logprobs\":");
    put_logprobs(s, j, e->token, e->n_token, j->offset[e->choice], b);
    kvd_buf_puts(b, ",\"finish_reason\":null}]");
    srv_chunk_end(j, b);
    for (uint32_t i = 0; i < e->n_token; i++) {
        size_t len;

        kvd_token_bytes(s->model, e->token[i].id, &len);
        j->offset[e->choice] += len;
    }
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
        srv_chunk_progress(s, j, OBJECT, e, b);
        break;
    case SRV_EVENT_TEXT:
        put_text(s, j, e, b);
        break;
    case SRV_EVENT_FINISH:
        srv_chunk_begin(s, j, OBJECT, b);
        kvd_buf_printf(b,
                       ",\"choices\":[{\"index\":%u,\"text\":\"\",\"logprobs\":null,"
                       "\"finish_reason\":\"%s\"}]",
                       e->choice, srv_finish_name(e->finish));
        srv_chunk_end(j, b);
        break;
    case SRV_EVENT_END:
        srv_chunk_last(s, j, OBJECT, b);
        break;
    case SRV_EVENT_ERROR:
        srv_stream_error(e, b);
        break;
    }
}

/* ---- requests ----------------------------------------------------------------------------------
 */

static bool get_ids(srv_fields *f, const json_t *list, srv_input *in)
{
    size_t  i;
    json_t *v;

    in->token = kvd_calloc(json_array_size(list), sizeof(*in->token));
    if (!in->token)
        return srv_fields_full(f, "no memory for it");
    json_array_foreach(list, i, v)
    {
        const json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;

        if (id < 0 || id >= f->s->info.n_vocab)
            return srv_fields_bad(f, "prompt", "entry %zu is none of this model's tokens, 0 to %u",
                                  i, f->s->info.n_vocab - 1);
        in->token[i] = (int32_t)id;
    }
    in->n = (uint32_t)json_array_size(list);
    return true;
}

static bool get_input(srv_fields *f, const json_t *v, srv_input *in)
{
    if (json_is_string(v))
        return srv_tokenize_raw(f, v, true, in);
    if (json_is_array(v))
        return get_ids(f, v, in);
    return srv_fields_bad(f, "prompt", "expected a text, a list of texts, or of tokens");
}

bool srv_get_prompts(srv_fields *f, srv_request *r)
{
    const json_t *v     = srv_get(f->root, "prompt");
    const json_t *first = json_array_get(v, 0);
    const bool    many  = json_is_string(first) || json_is_array(first);
    const size_t  n     = many ? json_array_size(v) : 1;

    if (!v)
        return srv_fields_bad(f, "prompt",
                              "is missing: expected a text, a list of texts, or of tokens");
    if (n * r->n > SRV_CHOICE_MAX)
        return srv_fields_bad(f, "prompt", "%zu prompts, %u choices each: at most %u in all", n,
                              r->n, SRV_CHOICE_MAX);
    r->input = kvd_calloc(n, sizeof(*r->input));
    if (!r->input)
        return srv_fields_full(f, "no memory for it");
    for (r->n_input = 0; r->n_input < n; r->n_input++) {
        srv_input *in = &r->input[r->n_input];

        if (!get_input(f, many ? json_array_get(v, r->n_input) : v, in)) {
            r->n_input++; /* what there is of it is freed with the others */
            return false;
        }
    }
    return true;
}

static void get_logprobs(srv_fields *f, srv_request *r)
{
    const json_t *v = srv_get(f->root, "logprobs");

    if (json_is_boolean(v)) { /* as in chats */
        r->logprobs = json_is_true(v);
        return;
    }
    srv_get_u32(f, f->root, "logprobs", 0, SRV_TOP_MAX, &r->n_top);
    r->logprobs = v != NULL;
}

static bool has_limit(const json_t *o)
{
    return srv_get(o, "max_tokens") || srv_get(o, "max_completion_tokens") ||
           srv_get(o, "n_predict");
}

static bool get_request(srv_fields *f, srv_request *r)
{
    uint32_t best_of;

    srv_check_names(f, names, KVD_COUNTOF(names), refused, KVD_COUNTOF(refused));
    srv_get_params(f, r);
    srv_get_choices(f, r);
    srv_get_format(f, "response_format", srv_get_object(f, f->root, "response_format"));
    if (r->n_max == UINT32_MAX && !has_limit(f->root))
        r->n_max = N_MAX_DEFAULT;
    best_of = r->n;
    srv_get_u32(f, f->root, "best_of", r->n, r->n, &best_of);
    get_logprobs(f, r);
    srv_get_bool(f, f->root, "echo", &r->echo);
    return !f->bad && srv_get_prompts(f, r);
}

static const srv_shape shape = {
    .prefix  = "cmpl-",
    .prompt  = "prompt",
    .request = get_request,
    .event   = event,
    .whole   = whole,
};

void srv_route_completion(srv *s, srv_call *c)
{
    srv_submit(s, c, &shape);
}
