/* SPDX-License-Identifier: Apache-2.0 */
/* srv_http.c - calls, over libmicrohttpd.  Everything here runs on the net thread, which drives the
 * library by its external loop.
 *
 * A reply that streams is pulled: the library asks for bytes when the socket takes them, so a
 * reader that is behind holds its own events (bounded in srv_job.c) and nothing else. */
#define _GNU_SOURCE /* accept4 */
#include "srv_http.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "srv_shape.h"

#define CONN_BYTES   (16u << 10) /* of one connection in the library: headers must fit */
#define STREAM_BLOCK 4096u
#define SEND_BYTES   (128 << 10) /* in the kernel, of a reader that is behind */
#define BODY_SMALL   (64u << 10) /* a body up to here is always read */
#define BODIES       8u          /* times the limit of one: all that are larger, together */
#define NS           1000000000.0

/* ---- connections --------------------------------------------------------------------------- */

static srv_conn *conn_of(struct MHD_Connection *c)
{
    return MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static void open_conn(srv *s, struct MHD_Connection *c, void **ctx)
{
    const int          one = 1, buffer = SEND_BYTES;
    srv_conn          *conn = kvd_calloc(1, sizeof(*conn));
    struct epoll_event ev   = { .events = EPOLLRDHUP | EPOLLET, .data = { .ptr = conn } };

    *ctx = conn;
    if (!conn)
        return; /* its calls are refused */
    conn->fd       = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    conn->c        = c;
    conn->since_ns = kvd_now_ns();
    conn->next     = s->conns;
    if (s->conns)
        s->conns->prev = conn;
    s->conns = conn;
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(conn->fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    (void)epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, conn->fd, &ev); /* else its times are its end */
}

static void close_conn(srv *s, srv_conn *conn)
{
    if (!conn)
        return;
    (void)epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        s->conns = conn->next;
    if (conn->next)
        conn->next->prev = conn->prev;
    kvd_free(conn);
}

static void on_conn(void *cls, struct MHD_Connection *c, void **ctx,
                    enum MHD_ConnectionNotificationCode what)
{
    if (what == MHD_CONNECTION_NOTIFY_STARTED)
        open_conn(cls, c, ctx);
    else
        close_conn(cls, *ctx);
}

static bool is_messages(const char *url)
{
    return strncmp(url, "/v1/messages", 12) == 0;
}

/* A request line has come. */
static void *on_uri(void *cls, const char *uri, struct MHD_Connection *c)
{
    srv_conn *conn = conn_of(c);

    (void)cls;
    if (conn) {
        conn->reading  = true;
        conn->messages = is_messages(uri);
        conn->since_ns = kvd_now_ns();
    }
    return NULL;
}

/* ---- calls -------------------------------------------------------------------------------- */

static srv_call *open_call(srv *s, struct MHD_Connection *c, const char *url)
{
    srv_call *call = conn_of(c) && !s->closing ? kvd_calloc(1, sizeof(*call)) : NULL;

    if (!call)
        return NULL;
    call->s          = s;
    call->c          = c;
    call->conn       = conn_of(c);
    call->conn->call = call;
    call->born_ns = call->said_ns = kvd_now_ns();
    call->next                    = s->calls;
    if (s->calls)
        s->calls->prev = call;
    s->calls = call;
    s->n_call++;
    call->reply.messages = is_messages(url);
    return call;
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

static void on_completed(void *cls, struct MHD_Connection *mc, void **ctx,
                         enum MHD_RequestTerminationCode why)
{
    srv      *s = cls;
    srv_call *c = *ctx;

    (void)mc;
    (void)why;
    *ctx = NULL;
    if (!c)
        return;
    log_call(c);
    c->conn->call    = NULL;
    c->conn->in_call = c->conn->reading = false;
    c->conn->since_ns                   = kvd_now_ns();
    leave_job(c);
    srv_http_body_read(c);
    if (c->prev)
        c->prev->next = c->next;
    else
        s->calls = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_call--;
    kvd_buf_free(&c->body);
    kvd_buf_free(&c->reply.body);
    kvd_buf_free(&c->out);
    kvd_free(c);
}

static void suspend(srv_call *c)
{
    MHD_suspend_connection(c->c);
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
    c->woken_ns  = kvd_now_ns();
    MHD_resume_connection(c->c);
}

/* ---- replies ------------------------------------------------------------------------------ */

static enum MHD_Result send_response(srv_call *c, struct MHD_Response *r, unsigned status,
                                     const char *type)
{
    const char     *origin = c->s->p.origin;
    char            seconds[16];
    enum MHD_Result rc;

    if (!r)
        return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "Cache-Control", "no-store");
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (c->reply.policy) {
        MHD_add_response_header(r, "Content-Security-Policy", c->reply.policy);
        MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    }
    if (origin) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", origin);
        MHD_add_response_header(r, "Access-Control-Allow-Headers",
                                *c->reply.may_send ? c->reply.may_send
                                                   : "authorization, content-type, x-api-key, "
                                                     "anthropic-version");
        MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, DELETE");
    }
    if (c->reply.retry_s) {
        snprintf(seconds, sizeof(seconds), "%u", c->reply.retry_s);
        MHD_add_response_header(r, "Retry-After", seconds);
    }
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(r, "Allow", c->reply.allow);
    if (status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (c->reply.last || c->s->stop_ns || c->s->sick_ns)
        MHD_add_response_header(r, "Connection", "close");
    rc = MHD_queue_response(c->c, status, r);
    MHD_destroy_response(r);
    return rc;
}

static enum MHD_Result send_reply(srv_call *c)
{
    const kvd_buf *b   = &c->reply.body;
    const char    *oom = "{\"error\":{\"message\":\"no memory for the reply\",\"type\":"
                         "\"server_error\",\"param\":null,\"code\":null}}";

    c->said_ns = kvd_now_ns();
    if (b->oom)
        return send_response(c,
                             MHD_create_response_from_buffer(strlen(oom), (void *)(uintptr_t)oom,
                                                             MHD_RESPMEM_PERSISTENT),
                             503, "application/json");
    return send_response(
        c, MHD_create_response_from_buffer(b->len, b->data ? b->data : "", MHD_RESPMEM_MUST_COPY),
        (unsigned)c->reply.status, c->reply.type ? c->reply.type : "application/json");
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

    c->out.len = c->out_at = 0;
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

static ssize_t on_pull(void *cls, uint64_t pos, char *buf, size_t max)
{
    srv_call *c = cls;
    size_t    n;

    (void)pos;
    if (c->gone)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (c->out_at == c->out.len) {
        if (c->ending)
            return MHD_CONTENT_READER_END_OF_STREAM;
        fill(c);
    }
    if (c->out.oom)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    n = c->out.len - c->out_at;
    if (n == 0 && !c->ending) {
        suspend(c);
        return 0;
    }
    if (n == 0)
        return MHD_CONTENT_READER_END_OF_STREAM;
    n = n < max ? n : max;
    memcpy(buf, c->out.data + c->out_at, n);
    c->out_at += n;
    c->said_ns = kvd_now_ns();
    return (ssize_t)n;
}

static enum MHD_Result send_stream(srv_call *c)
{
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, on_pull, c, NULL);

    c->streams      = true;
    c->reply.status = 200;
    if (r)
        MHD_add_response_header(r, "X-Accel-Buffering", "no");
    return send_response(c, r, 200, "text/event-stream");
}

/* ---- requests ------------------------------------------------------------------------------ */

/* What there is to send now; or the connection sleeps until there is. */
static enum MHD_Result go_on(srv_call *c)
{
    if (c->gone)
        return MHD_NO;
    if (c->reply.status == 0 && c->job && c->job->req.stream)
        return send_stream(c);
    if (c->reply.status == 0 && c->job && srv_job_ended(c->job)) {
        srv_shape_whole(c->s, c->job, &c->reply);
        c->ending = true;
    }
    if (c->reply.status == 0 && c->broken)
        srv_reply_error(&c->reply, 503, NULL, NULL, "%s", c->broken);
    if (c->reply.status)
        return send_reply(c);
    suspend(c);
    return MHD_YES;
}

static void dispatch(srv_call *c)
{
    c->conn->in_call = true;
    c->worked        = true;
    if (c->reply.status)
        return;
    if (c->route->slow)
        srv_work_give(c->s, c);
    else
        c->route->run(c->s, c);
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

/* Part of a body; false: more than is allowed, and the length was not announced. */
static bool add_body(srv_call *c, const char *data, size_t len)
{
    if (c->reply.status)
        return true;
    if (len > c->s->p.body_bytes - c->body.len)
        return false;
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

/* It ends without an answer. */
static void conn_refused(struct MHD_Connection *mc)
{
    srv_conn *conn = conn_of(mc);

    if (conn)
        conn->refused = true;
}

static enum MHD_Result on_access(void *cls, struct MHD_Connection *mc, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *size, void **ctx)
{
    srv_call *c = *ctx;

    (void)version;
    if (!c) {
        *ctx = c = open_call(cls, mc, url);
        if (!c) {
            conn_refused(mc);
            return MHD_NO;
        }
        if (srv_guard(c, method, url))
            return MHD_YES;
        c->conn->in_call = true;
        return send_reply(c); /* before any body is read */
    }
    if (c->gone)
        return MHD_NO;
    if (*size) {
        const bool ok = add_body(c, data, *size);

        *size = 0;
        return ok ? MHD_YES : MHD_NO;
    }
    if (!c->worked)
        dispatch(c);
    if (c->at_work) {
        suspend(c);
        return MHD_YES;
    }
    return go_on(c);
}

/* ---- limits of time -------------------------------------------------------------------------- */

static bool late(uint64_t now, uint64_t since, double limit_s)
{
    return now > since && (double)(now - since) > limit_s * NS; /* it may have been woken since */
}

void srv_http_tick(srv *s, uint64_t now)
{
    for (srv_conn *c = s->conns; c; c = c->next) {
        if (!c->in_call && (s->stop_ns || c->drained ||
                            late(now, c->since_ns, c->reading ? s->p.read_s : s->p.idle_s)))
            shutdown(c->fd, SHUT_RDWR);
        c->drained = c->ended; /* at the next tick: the library reads in between */
    }
    for (srv_call *c = s->calls; c; c = c->next) {
        if (c->gone && !c->at_work)
            srv_http_resume(c);
        if (c->at_work || !c->reply.status || c->gone) /* nothing goes out yet */
            continue;
        if (c->suspended && late(now, c->said_ns, s->p.keepalive_s)) {
            c->keepalive = true;
            srv_http_resume(c);
        } else if (!c->suspended && late(now, kvd_max_u64(c->said_ns, c->woken_ns), s->p.read_s)) {
            c->gone = true; /* it does not read */
            shutdown(c->conn->fd, SHUT_RDWR);
        }
    }
}

/* ---- open and close ---------------------------------------------------------------------------
 */

kvd_status srv_http_open(srv *s, kvd_err *err)
{
    s->http =
        MHD_start_daemon(MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL,
                         NULL, on_access, s, MHD_OPTION_EXTERNAL_LOGGER, srv_refuse_logged, s,
                         MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
                         s->p.n_connection, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONN_BYTES,
                         MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_NOTIFY_CONNECTION,
                         on_conn, s, MHD_OPTION_URI_LOG_CALLBACK, on_uri, s,
                         MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    if (!s->http)
        return kvd_fail(err, KVD_E_IO, errno, "the HTTP library does not start");
    s->listen_fd = -1; /* the library's now */
    return KVD_OK;
}

void srv_http_stop_listening(srv *s)
{
    const int fd = MHD_quiesce_daemon(s->http);

    if (fd >= 0)
        close(fd);
    if (s->other_fd >= 0)
        close(s->other_fd);
    s->other_fd = -1;
    s->knocks   = false;
}

static bool has_room(const srv *s)
{
    return MHD_get_daemon_info(s->http, MHD_DAEMON_INFO_CURRENT_CONNECTIONS)->num_connections <
           s->p.n_connection;
}

void srv_http_accept(srv *s)
{
    while (s->knocks && has_room(s)) {
        struct sockaddr_storage a;
        socklen_t               len = sizeof(a);
        const int               fd =
            accept4(s->other_fd, (struct sockaddr *)&a, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            (void)MHD_add_connection(s->http, fd, (struct sockaddr *)&a, len); /* or closes it */
        } else if (errno != EINTR && errno != ECONNABORTED) {
            s->knocks = errno != EAGAIN; /* else it is tried again in a while */
            return;
        }
    }
}

void srv_http_close(srv *s)
{
    if (!s->http)
        return;
    s->closing = true; /* the library ends the process if a connection is suspended from here on */
    for (srv_call *c = s->calls; c; c = c->next) {
        c->gone    = true;
        c->at_work = false;
        srv_http_resume(c);
    }
    MHD_run(s->http);
    MHD_stop_daemon(s->http);
    s->http = NULL;
}
