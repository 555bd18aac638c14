/* SPDX-License-Identifier: Apache-2.0 */
/* srv_conn.c - connections: accepting, reading requests, sending replies, closing.  All of it runs
 * on the net thread.
 *
 * epoll tells a change once (EPOLLET).  `readable` and `writable` keep it until the socket says
 * EAGAIN, so a connection is registered once and has no system call to change that.  What happens
 * to a connection puts it in the list of those that may go on; srv_conn_run() takes turns with
 * them.  Only srv_conn_run() and srv_conn_close_all() close connections. */
#define _GNU_SOURCE /* accept4 */
#include "srv_http.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define READ_BYTES (64u << 10) /* of a body, at once */
#define SEND_BYTES (128 << 10) /* in the kernel, of a reader that is behind */
#define TURNS      16u         /* of a connection, before others have theirs */

typedef enum turn { GO_ON, WAIT, CLOSE } turn;

/* ---- the list of those that may go on -------------------------------------------------------- */

void srv_conn_ready(srv *s, srv_conn *c)
{
    if (c->is_ready)
        return;
    c->is_ready   = true;
    c->next_ready = NULL;
    if (s->ready_last)
        s->ready_last->next_ready = c;
    else
        s->ready = c;
    s->ready_last = c;
}

static srv_conn *take_ready(srv *s)
{
    srv_conn *c = s->ready;

    if (!c)
        return NULL;
    s->ready = c->next_ready;
    if (!s->ready)
        s->ready_last = NULL;
    c->is_ready = false;
    return c;
}

void srv_conn_event(srv *s, srv_conn *c, uint32_t events)
{
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        c->readable = true;
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
        c->writable = true;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        srv_http_ended(c);
    srv_conn_ready(s, c);
}

/* ---- open and close -------------------------------------------------------------------------- */

static void open_conn(srv *s, int fd)
{
    const int          one = 1, buffer = SEND_BYTES;
    srv_conn          *c  = kvd_calloc(1, sizeof(*c));
    struct epoll_event ev = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                              .data   = { .ptr = c } };

    if (!c || epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0) {
        kvd_free(c);
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    c->fd       = fd;
    c->since_ns = s->now_ns;
    c->next     = s->conns;
    if (s->conns)
        s->conns->prev = c;
    s->conns = c;
    s->n_conn++;
}

/* Not while a worker has its call, nor while it is in the list of those that may go on. */
static void close_conn(srv *s, srv_conn *c)
{
    kvd_assert(!c->is_ready);
    if (c->call)
        srv_http_end(c->call);
    close(c->fd); /* epoll forgets it then */
    if (c->prev)
        c->prev->next = c->next;
    else
        s->conns = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_conn--;
    kvd_buf_free(&c->in);
    kvd_buf_free(&c->out);
    kvd_free(c);
}

/* Whether somebody may still wait at the socket: there is no room, or no descriptor, and it is
 * tried again in a while. */
static bool accept_all(srv *s, int listen_fd)
{
    while (s->n_conn < s->p.n_connection) {
        const int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0)
            open_conn(s, fd);
        else if (errno != EINTR && errno != ECONNABORTED)
            return errno != EAGAIN && errno != EWOULDBLOCK;
    }
    return true;
}

void srv_conn_accept(srv *s)
{
    bool waits = false;

    if (!s->knocks)
        return;
    for (uint32_t i = 0; i < SRV_LISTEN; i++)
        if (s->listen_fd[i] >= 0 && accept_all(s, s->listen_fd[i]))
            waits = true;
    s->knocks = waits;
}

void srv_conn_stop_listening(srv *s)
{
    for (uint32_t i = 0; i < SRV_LISTEN; i++) {
        if (s->listen_fd[i] >= 0)
            close(s->listen_fd[i]);
        s->listen_fd[i] = -1;
    }
    s->knocks = false;
}

/* ---- reading --------------------------------------------------------------------------------- */

static size_t n_in(const srv_conn *c)
{
    return c->in.len - c->in_at;
}

static void take_in(srv_conn *c, size_t n)
{
    c->in_at += n;
    kvd_assert(c->in_at <= c->in.len);
}

/* Moves what was not taken to the front; a connection that has nothing has no memory. */
static void pack_in(srv_conn *c)
{
    const size_t n = n_in(c);

    if (n == 0) {
        kvd_buf_free(&c->in);
    } else if (c->in_at > 0) {
        memmove(c->in.data, c->in.data + c->in_at, n);
        c->in.len     = n;
        c->in.data[n] = 0;
    }
    c->in_at = 0;
}

/* At most so many bytes.  Fewer mean that there are no more now.  CLOSE: the peer has ended, or
 * there is no memory. */
static turn read_some(srv_conn *c, size_t most)
{
    char         chunk[READ_BYTES];
    const size_t want = kvd_min_u64(most, sizeof(chunk));
    ssize_t      n;

    if (!c->readable)
        return WAIT;
    n = recv(c->fd, chunk, want, 0);
    if (n < 0 && errno == EINTR)
        return GO_ON;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        c->readable = false;
        return WAIT;
    }
    if (n <= 0)
        return CLOSE;
    c->readable = (size_t)n == want || c->ended;
    if (c->state == SRV_CONN_LINGER)
        return GO_ON;
    pack_in(c);
    kvd_buf_put(&c->in, chunk, (size_t)n);
    return c->in.oom ? CLOSE : GO_ON;
}

/* The request has come whole, or no more of it is to be read. */
static void begin_reply(srv_conn *c, bool whole)
{
    c->state = SRV_CONN_CALL;
    pack_in(c); /* a call may last */
    if (whole)
        srv_http_run(c->call);
    else
        c->call->reply.last = true;
}

/* The client waits with the body for this.  Nothing else is on its way: the socket takes it, or is
 * broken. */
static bool send_continue(srv_conn *c)
{
    static const char text[] = "HTTP/1.1 100 Continue\r\n\r\n";

    return send(c->fd, text, sizeof(text) - 1, MSG_NOSIGNAL | MSG_DONTWAIT) ==
           (ssize_t)sizeof(text) - 1;
}

/* A head of `len` bytes has come, or as many of one that is refused. */
static turn begin_call(srv *s, srv_conn *c, size_t len, srv_scan scan)
{
    srv_head h;
    bool     has_body, good;

    if (!srv_head_read(&h, c->in.data + c->in_at, len, scan))
        return CLOSE;
    take_in(c, len);
    c->scanned  = 0;
    c->has_crlf = false;
    c->left     = h.length;
    c->chunks   = (srv_chunks){ 0 };
    has_body    = h.chunked || h.length > 0;
    c->call     = srv_http_begin(s, c, &h);
    if (!c->call)
        return CLOSE;
    good = c->call->reply.status == 0;
    if (!has_body || !good) {
        begin_reply(c, !has_body && !c->call->head.status);
        return GO_ON;
    }
    c->state = SRV_CONN_BODY;
    return c->call->head.expects && n_in(c) == 0 && !send_continue(c) ? CLOSE : GO_ON;
}

static turn take_head(srv *s, srv_conn *c)
{
    const size_t n = kvd_min_u64(n_in(c), SRV_HEAD_BYTES);
    const char  *p;
    srv_scan     scan;

    if (n == 0) {
        const turn t = read_some(c, SRV_HEAD_BYTES);

        if (t == GO_ON)
            c->since_ns = s->now_ns;
        return t;
    }
    p = c->in.data + c->in_at;
    if (n >= 2 && !c->has_crlf && c->scanned < 2 && p[0] == '\r' && p[1] == '\n') {
        take_in(c, 2); /* some clients send one behind a body */
        c->has_crlf = true;
        c->scanned  = 0;
        return GO_ON;
    }
    scan = srv_head_scan(p, n, &c->scanned);
    if (scan == SRV_SCAN_MORE && n < SRV_HEAD_BYTES)
        return read_some(c, SRV_HEAD_BYTES - n);
    return begin_call(s, c, c->scanned, scan);
}

/* What a body in chunks that is none gets. */
static turn refuse_chunks(srv_conn *c)
{
    srv_reply_error(&c->call->reply, 400, NULL, NULL, "the body's chunks are not as HTTP has them");
    begin_reply(c, false);
    return GO_ON;
}

static turn take_chunks(srv_conn *c)
{
    size_t          used, n;
    const char     *p  = c->in.data + c->in_at;
    const srv_chunk is = srv_chunks_take(&c->chunks, p, n_in(c), &used, &n);

    take_in(c, used);
    if (is == SRV_CHUNK_BAD)
        return refuse_chunks(c);
    if (is == SRV_CHUNK_END)
        begin_reply(c, true);
    else if (is == SRV_CHUNK_DATA && !srv_http_body(c->call, p + used - n, n))
        begin_reply(c, false);
    return GO_ON;
}

static turn take_body(srv_conn *c)
{
    const size_t n = (size_t)kvd_min_u64(n_in(c), c->left);

    if (n_in(c) == 0)
        return read_some(c, READ_BYTES);
    if (c->call->head.chunked)
        return take_chunks(c);
    c->left -= n;
    take_in(c, n);
    if (!srv_http_body(c->call, c->in.data + c->in_at - n, n))
        begin_reply(c, false);
    else if (c->left == 0)
        begin_reply(c, true);
    return GO_ON;
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Of the reply's body, which follows `out` where the reply is no stream. */
static size_t n_body(const srv_conn *c)
{
    return c->call->whole ? c->call->reply.body.len - c->body_at : 0;
}

static size_t n_out(const srv_conn *c)
{
    return c->out.len - c->out_at + n_body(c);
}

static void sent(srv *s, srv_conn *c, size_t n)
{
    const size_t head = kvd_min_u64(n, c->out.len - c->out_at);

    c->out_at += head;
    c->body_at += n - head;
    c->call->said_ns = s->now_ns;
    if (c->out_at == c->out.len)
        c->out.len = c->out_at = 0;
}

static turn send_some(srv *s, srv_conn *c)
{
    char         *body    = c->call->reply.body.data;
    struct iovec  part[2] = { { c->out.data + c->out_at, c->out.len - c->out_at },
                              { body ? body + c->body_at : NULL, n_body(c) } };
    const size_t  first   = part[0].iov_len == 0;
    struct msghdr m       = { .msg_iov = part + first, .msg_iovlen = 2 - first };
    ssize_t       n;

    if (!c->writable)
        return WAIT;
    n = sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
        sent(s, c, (size_t)n);
    else if (errno == EAGAIN || errno == EWOULDBLOCK)
        c->writable = false;
    else if (errno != EINTR)
        return CLOSE;
    return GO_ON;
}

/* The reply is out: the next request, or the end.  Where the client may still send, its bytes are
 * read and dropped: if they were left, the kernel would reset the connection and the client might
 * lose the reply. */
static turn next_request(srv *s, srv_conn *c)
{
    const srv_call *call = c->call;
    const bool      last = call->reply.last, silent = call->worked && !call->head.keep;

    srv_http_end(c->call);
    kvd_buf_free(&c->out);
    c->out_at = c->body_at = 0;
    c->since_ns            = s->now_ns;
    if (!last) {
        c->state = SRV_CONN_HEAD;
        pack_in(c);
        return GO_ON;
    }
    if (silent && n_in(c) == 0)
        return CLOSE;
    c->state = SRV_CONN_LINGER;
    kvd_buf_free(&c->in);
    c->in_at = 0;
    shutdown(c->fd, SHUT_WR);
    return GO_ON;
}

static turn answer(srv *s, srv_conn *c)
{
    srv_call *call = c->call;

    if (call->at_work)
        return WAIT;
    if (n_out(c) > 0)
        return send_some(s, c);
    if (call->whole)
        return next_request(s, c);
    if (!srv_http_more(call) || c->out.oom)
        return CLOSE;
    return call->suspended ? WAIT : GO_ON;
}

/* ---- turns ----------------------------------------------------------------------------------- */

static turn take_turn(srv *s, srv_conn *c)
{
    if (c->expired)
        return CLOSE;
    switch (c->state) {
    case SRV_CONN_HEAD:
        return take_head(s, c);
    case SRV_CONN_BODY:
        return take_body(c);
    case SRV_CONN_CALL:
        return answer(s, c);
    default:
        return read_some(c, READ_BYTES);
    }
}

static void take_turns(srv *s, srv_conn *c)
{
    turn t = GO_ON;

    for (uint32_t i = 0; i < TURNS && t == GO_ON; i++)
        t = take_turn(s, c);
    if (t == CLOSE)
        close_conn(s, c);
    else if (t == GO_ON)
        srv_conn_ready(s, c);
}

void srv_conn_run(srv *s)
{
    const srv_conn *last = s->ready_last; /* who comes behind it has the next turn */
    bool            more = last != NULL;

    while (more) {
        srv_conn *c = take_ready(s);

        more = c != last;
        take_turns(s, c);
    }
}

void srv_conn_close_all(srv *s)
{
    s->closing = true;
    for (srv_call *c = s->calls; c; c = c->next)
        c->at_work = false;
    while (take_ready(s))
        continue;
    while (s->conns)
        close_conn(s, s->conns);
}
