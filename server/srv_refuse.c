/* SPDX-License-Identifier: Apache-2.0 */
/* srv_refuse.c - requests that the library refuses by itself, once it has their headers: HTTP/1.1
 * without Host, a Content-Length that is no number, cookies too large to be parsed.
 *
 * Versions of it (0.9.75 is one) then send the head of their answer twice, and no option keeps them
 * from either.  But they log before they answer.  At that moment the connection is the only one
 * whose headers are in while it has neither a call nor a response: the answer is written to its
 * socket, which takes nothing more after it.  A version that does not log answers as it likes. */
#include "srv_http.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static const char *header(const srv_conn *c, const char *name)
{
    return MHD_lookup_connection_value(c->c, MHD_HEADER_KIND, name);
}

static bool is_at_headers(const srv_conn *c)
{
    return c->reading && !c->call && !c->refused &&
           MHD_get_connection_info(c->c, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE) &&
           !MHD_get_connection_info(c->c, MHD_CONNECTION_INFO_HTTP_STATUS);
}

/* Decimal digits, and how many they may be is for the library. */
static bool is_number(const char *s)
{
    return *s && strspn(s, "0123456789") == strlen(s);
}

/* Puts what is wrong with the headers; false: nothing that is known here. */
static bool find_wrong(const srv *s, const srv_conn *c, srv_reply *r)
{
    const char *len = header(c, "Content-Length");

    if (len && !is_number(len))
        srv_reply_error(r, 400, NULL, NULL, "Content-Length is no number of bytes");
    else if (len && strlen(len) > 18) /* it would fit in 64 bits, else */
        srv_reply_error(r, 413, NULL, NULL, "a body of so many bytes: at most %llu (--body-limit)",
                        (unsigned long long)s->p.body_bytes);
    else if (!header(c, "Host"))
        srv_reply_error(r, 400, NULL, NULL, "the Host header is missing");
    else if (header(c, "Cookie"))
        srv_reply_error(r, 431, NULL, NULL, "the headers are too large: leave the cookies out");
    return r->status != 0;
}

static void answer(srv_conn *c, const srv_reply *r)
{
    const char *text = r->status == 400   ? "Bad Request"
                       : r->status == 413 ? "Content Too Large"
                                          : "Request Header Fields Too Large";
    kvd_buf     b    = { 0 };

    kvd_buf_printf(&b,
                   "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nCache-Control: no-store\r\n"
                   "X-Content-Type-Options: nosniff\r\nConnection: close\r\nContent-Length: %zu\r\n"
                   "\r\n",
                   r->status, text, r->body.len);
    kvd_buf_put(&b, r->body.data, r->body.len);
    /* one that does not even take this has not read answers before: it gets an end alone */
    if (!b.oom && !r->body.oom)
        (void)!send(c->fd, b.data, b.len, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(c->fd, SHUT_WR);
    kvd_buf_free(&b);
}

void srv_refuse_logged(void *cls, const char *fmt, va_list ap)
{
    srv *s = cls;

    (void)fmt;
    (void)ap;
    for (srv_conn *c = s->conns; c && !s->closing; c = c->next) {
        srv_reply r = { .messages = c->messages };

        if (!is_at_headers(c) || !find_wrong(s, c, &r))
            continue;
        c->refused = true;
        kvd_log(KVD_LOG_INFO, "no route: status %d%s", r.status, r.why);
        answer(c, &r);
        kvd_buf_free(&r.body);
        return;
    }
}
