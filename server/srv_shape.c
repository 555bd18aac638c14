/* SPDX-License-Identifier: Apache-2.0 */
/* srv_shape.c - what all shapes of an answer share. */
#include "srv_shape.h"

#include <math.h>
#include <string.h>

#include "text/text.h"

const char *srv_finish_name(srv_finish f)
{
    static const char *const names[] = { [SRV_FINISH_STOP]   = "stop",
                                         [SRV_FINISH_LENGTH] = "length",
                                         [SRV_FINISH_CALLS]  = "tool_calls" };

    return names[f];
}

void srv_stream_error(const srv_event *e, kvd_buf *b)
{
    kvd_buf_puts(b, "data: ");
    srv_put_error(b, e->status, NULL, NULL, e->text);
    kvd_buf_puts(b, "\n\n");
}

uint64_t srv_n_cached(const srv_usage *u)
{
    return u->n_cached[SRV_TIER_DEVICE] + u->n_cached[SRV_TIER_HOST] + u->n_cached[SRV_TIER_DISK];
}

void srv_put_tiers(const srv_usage *u, kvd_buf *b)
{
    kvd_buf_printf(b, "\"cached_by_tier\":{\"device\":%llu,\"host\":%llu,\"disk\":%llu}",
                   (unsigned long long)u->n_cached[SRV_TIER_DEVICE],
                   (unsigned long long)u->n_cached[SRV_TIER_HOST],
                   (unsigned long long)u->n_cached[SRV_TIER_DISK]);
}

static void put_usage(const srv_job *j, kvd_buf *b)
{
    const srv_usage         *u      = &j->usage;
    const unsigned long long prompt = u->n_prompt, generated = u->n_generated;

    kvd_buf_printf(b,
                   "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
                   "\"prompt_tokens_details\":{\"cached_tokens\":%llu,",
                   prompt, generated, prompt + generated, (unsigned long long)srv_n_cached(u));
    srv_put_tiers(u, b);
    kvd_buf_puts(b, "},\"completion_tokens_details\":{\"reasoning_tokens\":");
    kvd_buf_printf(b, "%llu}}", (unsigned long long)u->n_reasoning);
}

static double rate(uint64_t n, uint64_t ns)
{
    return ns ? (double)n * 1e9 / (double)ns : 0.0;
}

static void put_timings(const srv_job *j, kvd_buf *b)
{
    const srv_usage *u     = &j->usage;
    const uint64_t   steps = u->n_generated > j->req.n ? u->n_generated - j->req.n : 0;

    kvd_buf_printf(b,
                   "{\"queue_ms\":%.3f,\"cache_n\":%llu,\"prompt_n\":%llu,\"prompt_ms\":%.3f,"
                   "\"prompt_per_second\":%.3f,\"predicted_n\":%llu,\"predicted_ms\":%.3f,"
                   "\"predicted_per_second\":%.3f}",
                   (double)u->queue_ns * 1e-6, (unsigned long long)srv_n_cached(u),
                   (unsigned long long)u->n_evaluated, (double)u->prompt_ns * 1e-6,
                   rate(u->n_evaluated, u->prompt_ns), (unsigned long long)u->n_generated,
                   (double)u->generate_ns * 1e-6, rate(steps, u->generate_ns));
}

void srv_put_extras(const srv_job *j, kvd_buf *b)
{
    kvd_buf_puts(b, ",\"timings\":");
    put_timings(j, b);
    srv_put_debug(j, b);
}

void srv_put_debug(const srv_job *j, kvd_buf *b)
{
    if (!j->req.debug_cache)
        return;
    kvd_buf_printf(b, ",\"debug_cache\":{\"first_differing_token\":%u,\"text\":", j->usage.miss_at);
    srv_put_text(b, j->usage.miss_text);
    kvd_buf_putc(b, '}');
}

void srv_put_head(const srv *s, const srv_job *j, const char *object, kvd_buf *b)
{
    kvd_buf_printf(b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", j->id, object,
                   (long long)j->created);
    srv_put_text(b, s->name);
    kvd_buf_printf(b, ",\"system_fingerprint\":\"kvdrive-%s\"", kvd_version());
}

void srv_put_tail(const srv_job *j, kvd_buf *b)
{
    kvd_buf_puts(b, "],\"usage\":");
    put_usage(j, b);
    srv_put_extras(j, b);
    kvd_buf_putc(b, '}');
}

void srv_chunk_begin(const srv *s, const srv_job *j, const char *object, kvd_buf *b)
{
    kvd_buf_puts(b, "data: ");
    srv_put_head(s, j, object, b);
}

void srv_chunk_end(const srv_job *j, kvd_buf *b)
{
    kvd_buf_puts(b, j->req.include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
}

void srv_chunk_progress(const srv *s, const srv_job *j, const char *object, const srv_event *e,
                        kvd_buf *b)
{
    srv_chunk_begin(s, j, object, b);
    kvd_buf_printf(
        b,
        ",\"choices\":[],\"prompt_progress\":{\"total\":%u,\"cache\":%u,\"processed\":%u,"
        "\"time_ms\":%.0f}",
        e->n_total, e->n_cached, e->n_done, (double)e->ns * 1e-6);
    srv_chunk_end(j, b);
}

void srv_chunk_last(const srv *s, const srv_job *j, const char *object, kvd_buf *b)
{
    if (j->req.include_usage) {
        srv_chunk_begin(s, j, object, b);
        kvd_buf_puts(b, ",\"choices\":[");
        srv_put_tail(j, b);
        kvd_buf_puts(b, "\n\n");
    }
    kvd_buf_puts(b, "data: [DONE]\n\n");
}

void srv_typed_begin(const char *type, kvd_buf *b)
{
    kvd_buf_printf(b, "event: %s\ndata: {\"type\":\"%s\"", type, type);
}

void srv_typed_end(kvd_buf *b)
{
    kvd_buf_puts(b, "}\n\n");
}

static bool is_utf8(const char *s, size_t len)
{
    static const char replacement[] = "\xef\xbf\xbd";
    uint32_t          cp;

    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_decode(s + i, len - i, &cp);
        if (cp == 0xfffd && (n != 3 || memcmp(s + i, replacement, 3) != 0))
            return false;
    }
    return true;
}

/* A part of a character is no text: then its bytes are named, as OpenAI does. */
void srv_put_token(const srv *s, int32_t id, kvd_buf *b)
{
    size_t      len;
    const char *text = kvd_token_bytes(s->model, id, &len);

    if (is_utf8(text, len)) {
        srv_put_string(b, text, len);
        return;
    }
    kvd_buf_puts(b, "\"bytes:");
    for (size_t i = 0; i < len; i++)
        kvd_buf_printf(b, "\\\\x%02x", (unsigned)(unsigned char)text[i]);
    kvd_buf_putc(b, '"');
}

void srv_put_token_bytes(const srv *s, int32_t id, kvd_buf *b)
{
    size_t      len;
    const char *text = kvd_token_bytes(s->model, id, &len);

    kvd_buf_putc(b, '[');
    for (size_t i = 0; i < len; i++)
        kvd_buf_printf(b, "%s%u", i ? "," : "", (unsigned)(unsigned char)text[i]);
    kvd_buf_putc(b, ']');
}

void srv_put_piece(const srv *s, int32_t id, kvd_buf *b)
{
    size_t      len;
    const char *text = kvd_token_bytes(s->model, id, &len);

    if (is_utf8(text, len))
        srv_put_string(b, text, len);
    else
        srv_put_token_bytes(s, id, b);
}

/* JSON has no infinities: a token that cannot be has -9999, as with OpenAI. */
void srv_put_logprob(float x, kvd_buf *b)
{
    if (isnan(x))
        kvd_buf_puts(b, "null");
    else
        kvd_buf_printf(b, "%.6f", x > -9999.0f ? (double)x : -9999.0);
}

/* ---- answers as they come together ------------------------------------------------------------
 */

uint32_t srv_n_piece(const srv_answer *a)
{
    return (uint32_t)(a->pieces.len / sizeof(srv_piece));
}

srv_piece srv_piece_at(const srv_answer *a, uint32_t i)
{
    srv_piece p;

    memcpy(&p, a->pieces.data + i * sizeof(p), sizeof(p));
    return p;
}

static void begin_piece(srv_answer *a, const srv_event *e)
{
    const bool call = e->kind == SRV_EVENT_CALL;
    srv_piece  p    = { .is_call      = call,
                        .is_reasoning = e->kind == SRV_EVENT_REASONING,
                        .call         = e->call,
                        .n_name       = call ? e->len : 0 };

    p.name = a->said.len;
    if (call)
        kvd_buf_put(&a->said, e->text, e->len);
    p.at = a->said.len;
    kvd_buf_put(&a->pieces, &p, sizeof(p));
}

/* Goes on with the last piece, or ends it. */
static void add_said(srv_answer *a, const srv_event *e)
{
    const size_t at = a->pieces.len - sizeof(srv_piece);
    srv_piece    p;

    if (a->pieces.oom || a->pieces.len == 0)
        return;
    kvd_buf_put(&a->said, e->text, e->len);
    memcpy(&p, a->pieces.data + at, sizeof(p));
    p.len += e->len;
    p.complete = e->complete;
    memcpy(a->pieces.data + at, &p, sizeof(p));
}

/* Text or reasoning that does not go on with the last piece. */
static bool begins_text(const srv_answer *a, const srv_event *e)
{
    const uint32_t n    = srv_n_piece(a);
    const bool     text = e->kind == SRV_EVENT_TEXT || e->kind == SRV_EVENT_REASONING;
    srv_piece      p;

    if (!text || e->len == 0 || n == 0)
        return text && e->len > 0;
    p = srv_piece_at(a, n - 1);
    return p.is_call || p.is_reasoning != (e->kind == SRV_EVENT_REASONING);
}

static void collect_text(srv_answer *a, const srv_event *e)
{
    kvd_buf_put(&a->tokens, e->token, e->n_token * sizeof(*e->token));
    if (e->len == 0)
        return;
    if (begins_text(a, e))
        begin_piece(a, e);
    add_said(a, e);
}

void srv_collect(srv_answer *a, const srv_event *e)
{
    if (e->kind == SRV_EVENT_TEXT || e->kind == SRV_EVENT_REASONING)
        collect_text(a, e);
    else if (e->kind == SRV_EVENT_CALL)
        begin_piece(a, e);
    else if (e->kind == SRV_EVENT_ARGUMENTS || e->kind == SRV_EVENT_CALL_END)
        add_said(a, e);
    else if (e->kind == SRV_EVENT_FINISH) {
        a->finish = e->finish;
        a->stop   = e->stop;
    }
}

static void close_piece(const srv_piece_shape *p, srv_job *j, kvd_buf *b)
{
    if (j->piece_open)
        p->close(j, b);
    j->piece_open = false;
}

void srv_piece_event(const srv_piece_shape *p, srv_job *j, const srv_event *e, kvd_buf *b)
{
    const bool begins = e->kind == SRV_EVENT_CALL || begins_text(&j->answer, e);

    if (begins)
        close_piece(p, j, b);
    srv_collect(&j->answer, e);
    if (srv_answer_oom(&j->answer)) {
        b->oom = true; /* ends the stream */
        return;
    }
    if (begins) {
        j->piece_open = true;
        p->open(j, e, b);
    }
    if (e->kind == SRV_EVENT_CALL_END || e->kind == SRV_EVENT_FINISH)
        close_piece(p, j, b);
    else if (e->len > 0 && e->kind != SRV_EVENT_CALL)
        p->more(j, e, b);
}

void srv_answer_free(srv_answer *a)
{
    kvd_buf_free(&a->said);
    kvd_buf_free(&a->tokens);
    kvd_buf_free(&a->pieces);
}

bool srv_answer_oom(const srv_answer *a)
{
    return a->said.oom || a->tokens.oom || a->pieces.oom;
}

bool srv_answer_has(const srv_answer *a, bool reasoning)
{
    for (uint32_t i = 0; i < srv_n_piece(a); i++) {
        const srv_piece p = srv_piece_at(a, i);

        if (!p.is_call && p.is_reasoning == reasoning)
            return true;
    }
    return false;
}

void srv_put_answer_text(const srv_answer *a, bool reasoning, kvd_buf *b)
{
    kvd_buf text = { 0 };

    for (uint32_t i = 0; i < srv_n_piece(a); i++) {
        const srv_piece p = srv_piece_at(a, i);

        if (!p.is_call && p.is_reasoning == reasoning)
            kvd_buf_put(&text, a->said.data + p.at, p.len);
    }
    srv_put_string(b, text.data ? text.data : "", text.len);
    b->oom = b->oom || text.oom;
    kvd_buf_free(&text);
}

void srv_put_call_id(const srv_job *j, uint32_t choice, uint32_t call, kvd_buf *b)
{
    kvd_buf_printf(b, "\"call_%s_%u_%u\"", j->id + strlen(j->shape->prefix), choice, call);
}

/* The job's n answers; false: it has failed, and the reply says how. */
static bool collect_all(srv_job *j, srv_answer *a, uint32_t n, srv_reply *r)
{
    srv_event *e;
    bool       ok = false;

    while ((e = srv_job_take(j))) {
        if (e->kind == SRV_EVENT_ERROR)
            srv_reply_error(r, e->status, NULL, NULL, "%s", e->text);
        ok = ok || e->kind == SRV_EVENT_END;
        srv_collect(&a[e->choice], e);
        srv_event_free(e);
    }
    for (uint32_t i = 0; i < n; i++) /* its pieces have places in text that is not there */
        ok = ok && !srv_answer_oom(&a[i]);
    if (!ok && !r->status)
        srv_reply_error(r, 503, NULL, NULL, "no memory for the answer");
    return ok && !r->status;
}

void srv_shape_whole(srv *s, srv_job *j, srv_reply *r)
{
    const uint32_t n = j->req.n_input * j->req.n;
    srv_answer    *a = kvd_calloc(n, sizeof(*a));

    if (!a) {
        srv_reply_error(r, 503, NULL, NULL, "no memory for the answer");
        return;
    }
    if (collect_all(j, a, n, r)) {
        r->status = 200;
        j->shape->whole(s, j, a, &r->body);
    }
    for (uint32_t i = 0; i < n; i++)
        srv_answer_free(&a[i]);
    kvd_free(a);
}
