/* SPDX-License-Identifier: Apache-2.0 */
/* srv_reply_head.c - the head of a reply. */
#include "srv_http.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *reason(int status)
{
    static const struct {
        int         status;
        const char *text;
    } known[] = {
        { 200, "OK" },
        { 204, "No Content" },
        { 400, "Bad Request" },
        { 401, "Unauthorized" },
        { 403, "Forbidden" },
        { 404, "Not Found" },
        { 405, "Method Not Allowed" },
        { 413, "Content Too Large" },
        { 414, "URI Too Long" },
        { 429, "Too Many Requests" },
        { 431, "Request Header Fields Too Large" },
        { 500, "Internal Server Error" },
        { 501, "Not Implemented" },
        { 503, "Service Unavailable" },
        { 505, "HTTP Version Not Supported" },
    };

    for (uint32_t i = 0; i < KVD_COUNTOF(known); i++)
        if (known[i].status == status)
            return known[i].text;
    return "Status";
}

/* "Sun, 06 Nov 1994 08:49:37 GMT", whatever the locale; made once a second. */
static const char *date(srv *s)
{
    static const char days[]   = "SunMonTueWedThuFriSat",
                      months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    const time_t now           = time(NULL);
    struct tm    t;

    if (s->date_s == (int64_t)now && *s->date)
        return s->date;
    s->date_s = (int64_t)now;
    if (!gmtime_r(&now, &t))
        memset(&t, 0, sizeof(t));
    snprintf(s->date, sizeof(s->date), "%.3s, %02u %.3s %04u %02u:%02u:%02u GMT",
             days + 3 * t.tm_wday, (unsigned)t.tm_mday % 100, months + 3 * t.tm_mon,
             (unsigned)(t.tm_year + 1900) % 10000, (unsigned)t.tm_hour % 100,
             (unsigned)t.tm_min % 100, (unsigned)t.tm_sec % 100);
    return s->date;
}

static void put_origin(kvd_buf *b, const char *origin, const srv_reply *r)
{
    kvd_buf_printf(b,
                   "Access-Control-Allow-Origin: %s\r\nAccess-Control-Allow-Headers: %s\r\n"
                   "Access-Control-Allow-Methods: GET, POST, DELETE\r\n",
                   origin,
                   *r->may_send ? r->may_send
                                : "authorization, content-type, x-api-key, anthropic-version");
}

static void put_reasons(kvd_buf *b, const srv_reply *r)
{
    if (r->policy)
        kvd_buf_printf(b, "Content-Security-Policy: %s\r\nReferrer-Policy: no-referrer\r\n",
                       r->policy);
    if (r->retry_s)
        kvd_buf_printf(b, "Retry-After: %u\r\n", r->retry_s);
    if (r->status == 405)
        kvd_buf_printf(b, "Allow: %s\r\n", r->allow);
    if (r->status == 401)
        kvd_buf_puts(b, "WWW-Authenticate: Bearer\r\n");
}

/* How the client finds the body's end, and whether there is another reply behind it. */
static void put_framing(srv_call *c, kvd_buf *b, uint64_t len)
{
    const bool stream = len == UINT64_MAX, chunks = stream && c->head.minor > 0;

    if (stream)
        kvd_buf_puts(b, "X-Accel-Buffering: no\r\n");
    if (chunks)
        kvd_buf_puts(b, "Transfer-Encoding: chunked\r\n");
    else if (!stream && c->reply.status != 204)
        kvd_buf_printf(b, "Content-Length: %" PRIu64 "\r\n", len);
    c->reply.last =
        c->reply.last || !c->head.keep || (stream && !chunks) || c->s->stop_ns || c->s->sick_ns;
    if (c->reply.last)
        kvd_buf_puts(b, "Connection: close\r\n");
    else if (c->head.minor == 0)
        kvd_buf_puts(b, "Connection: keep-alive\r\n");
}

void srv_reply_head(srv_call *c, const char *type, uint64_t len)
{
    kvd_buf *b = &c->conn->out;

    kvd_buf_printf(b,
                   "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\nCache-Control: no-store\r\n"
                   "X-Content-Type-Options: nosniff\r\n",
                   c->reply.status, reason(c->reply.status), date(c->s),
                   type ? type : "application/json");
    put_reasons(b, &c->reply);
    if (c->s->p.origin)
        put_origin(b, c->s->p.origin, &c->reply);
    put_framing(c, b, len);
    kvd_buf_puts(b, "\r\n");
}
