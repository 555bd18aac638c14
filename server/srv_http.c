/* SPDX-License-Identifier: Apache-2.0 */
/* srv_http.c - calls: their requests' bodies, their replies and streams, and limits of time.
 * Everything here runs on the net thread.
 *
 * A reply that streams is pulled: more of it is made when the socket has taken what there was.  So
 * a reader that is behind holds its own events (bounded in srv_job.c) and nothing else. */
#include "srv_http.h"

#include <stdio.h>
#include <string.h>

#include "srv_shape.h"

#define STREAM_BLOCK 4096u
#define BODY_SMALL   (64u << 10) /* a body up to here is always read */
#define BODIES       8u          /* times the limit of one: all that are larger, together */
#define LINGER_S     2.0         /* that a client has to read the last reply and close */
#define NS           1000000000.0

/* ---- calls -------------------------------------------------------------------------------- */

static bool is_messages(const char *url)
{
    return strncmp(url, "/v1/messages", 12) == 0;
}

srv_call *srv_http_begin(srv *s, srv_conn *conn, srv_head *h)
{
    srv_call *c = s->closing ? NULL : kvd_calloc(1, sizeof(*c));

    if (!c) {
        srv_head_free(h);
        return NULL;
    }
    c->s              = s;
    c->conn           = conn;
    c->head           = *h;
    c->born_ns        = kvd_now_ns();
    c->said_ns        = s->now_ns;
    c->reply.messages = is_messages(h->path);
    c->next           = s->calls;
    if (s->calls)
        s->calls->prev = c;
    s->calls = c;
    s->n_call++;
    (void)srv_guard(c); /* what is wrong is in the reply then */
    return c;
}

/* What a job has taken is told once it has finished, even if nobody reads its answer to the end;
 * until then, and after an error, the engine thread may still be counting. */
static void log_call(const srv_call *c)
{
    const bool       whole = c->job && srv_job_finished(c->job);
    const srv_usage *u     = whole ? &c->job->usage : NULL;
    const double     ms    = (double)(kvd_now_ns() - c->born_ns) * 1e-6;

    if (u)
        kvd_log(KVD_LOG_INFO,
                "%s: %s, %.0f ms, prompt %llu (cached %llu+%llu+%llu), generated %llu", c->job->id,
                c->route->path, ms, (unsigned long long)u->n_prompt,
                (unsigned long long)u->n_cached[0], (unsigned long long)u->n_cached[1],
                (unsigned long long)u->n_cached[2], (unsigned long long)u->n_generated);
    else if (c->streams && c->ending)
        kvd_log(KVD_LOG_INFO, "%s: %s, ended by an error, %.0f ms", c->job->id, c->route->path, ms);
    else if (c->reply.status >= 400)
        kvd_log(KVD_LOG_INFO, "%s%s: status %d%s, %.0f ms", c->at ? c->at : "no route",
                c->reply.status == 404 ? c->nowhere : "", c->reply.status, c->reply.why, ms);
}

void srv_http_body_read(srv_call *c)
{
    c->s->n_body -= c->n_body;
    c->n_body = 0;
}

/* Nobody waits for the job any more. */
static void leave_job(srv_call *c)
{
    srv_job *j = c->job;

    if (!j)
        return;
    j->conn = NULL;
    if (!c->ending) {
        atomic_store_explicit(&j->canceled, true, memory_order_relaxed);
        srv_engine_nudge(c->s->engine);
    }
    srv_job_unref(j);
    c->job = NULL;
}

void srv_http_end(srv_call *c)
{
    srv *s = c->s;

    kvd_assert(!c->at_work);
    log_call(c);
    c->conn->call = NULL;
    leave_job(c);
    srv_http_body_read(c);
    if (c->prev)
        c->prev->next = c->next;
    else
        s->calls = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_call--;
    srv_head_free(&c->head);
    kvd_buf_free(&c->body);
    kvd_buf_free(&c->reply.body);
    kvd_buf_free(&c->out);
    kvd_free(c);
}

static void suspend(srv_call *c)
{
    c->suspended = c->waited = true;
    c->gone                  = c->gone || c->conn->ended; /* the next tick resumes it */
}

/* What has waited ends; a reply that needs no waiting may still be read. */
void srv_http_ended(srv_conn *conn)
{
    srv_call *c = conn->call;

    conn->ended = true;
    if (!c || !c->waited)
        return;
    c->gone = true;
    if (!c->at_work)
        srv_http_resume(c);
}

void srv_http_resume(srv_call *c)
{
    if (!c->suspended)
        return;
    c->suspended = false;
    srv_conn_ready(c->s, c->conn);
}

/* ---- replies ------------------------------------------------------------------------------ */

static bool is_head(const srv_call *c)
{
    return strcmp(c->head.method, "HEAD") == 0;
}

static void put_reply(srv_call *c)
{
    static const char oom[] = "{\"error\":{\"message\":\"no memory for the reply\",\"type\":"
                              "\"server_error\",\"param\":null,\"code\":null}}";
    srv_reply        *r     = &c->reply;
    kvd_buf          *b     = &r->body;
    const bool        fits  = !b->oom;

    c->said_ns = c->s->now_ns;
    c->told = c->whole = true;
    if (!fits)
        r->status = 503;
    srv_reply_head(c, fits ? r->type : NULL, fits ? b->len : sizeof(oom) - 1);
    if (!fits || is_head(c))
        kvd_buf_free(b);
    if (!fits && !is_head(c))
        kvd_buf_puts(&c->conn->out, oom);
}

/* ---- streams ------------------------------------------------------------------------------- */

static void end_stream_broken(srv_call *c, const char *why)
{
    srv_event *e = srv_event_new(SRV_EVENT_ERROR, 0, why, strlen(why), 0);

    if (e) {
        e->status = 500;
        c->job->shape->event(c->s, c->job, e, &c->out);
    }
    srv_event_free(e);
    c->ending = true;
}

/* More text for the reader, if there is any. */
static void fill(srv_call *c)
{
    srv_job   *j = c->job;
    srv_event *e;

    while (!c->ending && c->out.len < STREAM_BLOCK && (e = srv_job_take(j))) {
        j->shape->event(c->s, j, e, &c->out);
        c->ending = e->kind == SRV_EVENT_END || e->kind == SRV_EVENT_ERROR;
        srv_event_free(e);
    }
    if (srv_job_resumes(j))
        srv_engine_nudge(c->s->engine);
    if (c->out.len == 0 && !c->ending && (c->broken || srv_job_lost(j)))
        end_stream_broken(c, c->broken ? c->broken : "no memory for the answer");
    if (c->out.len == 0 && c->keepalive)
        kvd_buf_puts(&c->out, j->shape->keepalive ? j->shape->keepalive : ": keepalive\n\n");
    c->keepalive = false;
}

/* Frames what was made as a chunk, and the end as the chunk of no bytes. */
static void put_chunk(srv_call *c)
{
    kvd_buf   *out    = &c->conn->out;
    const bool framed = c->head.minor > 0;

    if (framed && c->out.len > 0)
        kvd_buf_printf(out, "%zx\r\n", c->out.len);
    kvd_buf_put(out, c->out.data, c->out.len);
    if (framed && c->out.len > 0)
        kvd_buf_puts(out, "\r\n");
    if (framed && c->whole)
        kvd_buf_puts(out, "0\r\n\r\n");
    c->said_ns = c->s->now_ns;
}

/* false: it ends in the middle. */
static bool put_more(srv_call *c)
{
    c->out.len = 0;
    if (!c->ending)
        fill(c);
    if (c->out.oom)
        return false;
    c->whole = c->ending;
    if (c->out.len > 0 || c->whole)
        put_chunk(c);
    else
        suspend(c);
    return true;
}

static void put_stream_head(srv_call *c)
{
    c->streams = c->told = true;
    c->reply.status      = 200;
    c->said_ns           = c->s->now_ns;
    srv_reply_head(c, "text/event-stream; charset=utf-8", UINT64_MAX);
}

/* ---- requests ------------------------------------------------------------------------------ */

/* Begins the reply if it is known; else the call sleeps until it is. */
static void begin_reply(srv_call *c)
{
    const bool waits = c->reply.status == 0 && c->job;

    if (waits && c->job->req.stream) {
        put_stream_head(c);
        return;
    }
    if (waits && srv_job_ended(c->job)) {
        srv_shape_whole(c->s, c->job, &c->reply);
        c->ending = true;
    }
    if (c->reply.status == 0 && c->broken)
        srv_reply_error(&c->reply, 503, NULL, NULL, "%s", c->broken);
    if (c->reply.status)
        put_reply(c);
    else
        suspend(c);
}

bool srv_http_more(srv_call *c)
{
    if (c->gone)
        return false;
    if (c->told)
        return put_more(c);
    begin_reply(c);
    return true;
}

void srv_http_run(srv_call *c)
{
    c->worked = true;
    if (c->reply.status)
        return;
    if (!c->route->slow) {
        c->route->run(c->s, c);
        return;
    }
    srv_work_give(c->s, c);
    suspend(c);
}

/* Whether there is room for so much more of a body; it is counted then. */
static bool count_body(srv_call *c, size_t len)
{
    const uint64_t n = c->body.len + len, all = c->s->n_body - c->n_body + n;

    if (n <= BODY_SMALL)
        return true;
    if (all / BODIES > c->s->p.body_bytes)
        return false;
    c->s->n_body = all;
    c->n_body    = n;
    return true;
}

bool srv_http_body(srv_call *c, const char *data, size_t len)
{
    if (c->reply.status)
        return true; /* the rest of what is refused */
    if (len > c->s->p.body_bytes - c->body.len) {
        srv_reply_error(&c->reply, 413, NULL, NULL, "a body of more than %llu bytes (--body-limit)",
                        (unsigned long long)c->s->p.body_bytes);
        return false;
    }
    if (!count_body(c, len)) {
        srv_reply_error(&c->reply, 503, NULL, NULL,
                        "requests that are being read take all memory there is for them, %u times "
                        "--body-limit: try again",
                        BODIES);
        c->reply.retry_s = 1;
        srv_http_body_read(c);
        kvd_buf_free(&c->body);
        return true;
    }
    kvd_buf_put(&c->body, data, len);
    if (c->body.oom)
        srv_reply_error(&c->reply, 503, NULL, NULL, "no memory for the request");
    return true;
}

/* ---- limits of time -------------------------------------------------------------------------- */

static bool late(const srv *s, uint64_t since, double limit_s)
{
    return (double)(s->now_ns - since) > limit_s * NS;
}

/* Outside of a call. */
static bool is_expired(const srv *s, const srv_conn *c)
{
    const bool reading = c->state == SRV_CONN_BODY || c->in.len > c->in_at;

    if (c->state == SRV_CONN_LINGER)
        return late(s, c->since_ns, LINGER_S);
    return s->stop_ns || late(s, c->since_ns, reading ? s->p.read_s : s->p.idle_s);
}

static void look_at_call(srv *s, srv_call *c)
{
    if (c->at_work || c->conn->state != SRV_CONN_CALL)
        return;
    if (c->gone) {
        srv_http_resume(c);
    } else if (c->suspended && c->streams && late(s, c->said_ns, s->p.keepalive_s)) {
        c->keepalive = true;
        srv_http_resume(c);
    } else if (!c->conn->writable && late(s, c->said_ns, s->p.read_s)) {
        c->conn->expired = true; /* it does not read: the socket took nothing for so long */
        srv_conn_ready(s, c->conn);
    }
}

void srv_http_tick(srv *s)
{
    for (srv_conn *c = s->conns; c; c = c->next) {
        if (c->state == SRV_CONN_CALL || !is_expired(s, c))
            continue;
        c->expired = true;
        srv_conn_ready(s, c);
    }
    for (srv_call *c = s->calls; c; c = c->next)
        look_at_call(s, c);
}
