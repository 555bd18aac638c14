/* SPDX-License-Identifier: Apache-2.0 */
/* srv_reply.c - JSON text, and errors in OpenAI's shape and in Anthropic's. */
#include "srv_http.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/text.h"

static void put_code_point(kvd_buf *b, uint32_t cp)
{
    char utf8[4];

    if (cp == '"' || cp == '\\')
        kvd_buf_printf(b, "\\%c", (char)cp);
    else if (cp == '\n')
        kvd_buf_puts(b, "\\n");
    else if (cp < 0x20 || cp == 0x7f || cp == 0x2028 || cp == 0x2029)
        kvd_buf_printf(b, "\\u%04x", cp);
    else
        kvd_buf_put(b, utf8, utf8_encode(cp, utf8));
}

void srv_put_string(kvd_buf *b, const char *s, size_t len)
{
    kvd_buf_putc(b, '"');
    for (size_t i = 0; i < len;) {
        uint32_t cp;

        i += utf8_decode(s + i, len - i, &cp);
        put_code_point(b, cp);
    }
    kvd_buf_putc(b, '"');
}

void srv_put_text(kvd_buf *b, const char *s)
{
    srv_put_string(b, s, strlen(s));
}

static const char *type_of(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

static void put_or_null(kvd_buf *b, const char *s)
{
    if (s)
        srv_put_text(b, s);
    else
        kvd_buf_puts(b, "null");
}

void srv_put_error(kvd_buf *b, int status, const char *param, const char *code, const char *msg)
{
    kvd_buf_puts(b, "{\"error\":{\"message\":");
    srv_put_text(b, msg);
    kvd_buf_printf(b, ",\"type\":\"%s\",\"param\":", type_of(status));
    put_or_null(b, param);
    kvd_buf_puts(b, ",\"code\":");
    put_or_null(b, code);
    kvd_buf_puts(b, "}}");
}

static const char *messages_type_of(int status)
{
    switch (status) {
    case 413:
        return "request_too_large";
    case 500:
        return "api_error";
    case 503:
        return "overloaded_error";
    default:
        return type_of(status);
    }
}

void srv_put_messages_error(kvd_buf *b, int status, const char *msg)
{
    kvd_buf_printf(b, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":",
                   messages_type_of(status));
    srv_put_text(b, msg);
    kvd_buf_puts(b, "},\"request_id\":null}");
}

/* For the log: never the message, in which there may be what somebody wrote. */
static void put_why(srv_reply *r, const char *param, const char *code)
{
    char quoted[sizeof(r->why) - sizeof(" (\"\")") + 1];

    if (param) {
        srv_log_quote(param, strlen(param), quoted, sizeof(quoted));
        snprintf(r->why, sizeof(r->why), " (\"%s\")", quoted);
    } else {
        snprintf(r->why, sizeof(r->why), " (%s)",
                 code          ? code
                 : r->messages ? messages_type_of(r->status)
                               : type_of(r->status));
    }
}

void srv_reply_error(srv_reply *r, int status, const char *param, const char *code, const char *fmt,
                     ...)
{
    char    msg[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    r->status   = status;
    r->body.len = 0;
    put_why(r, param, code);
    if (r->messages)
        srv_put_messages_error(&r->body, status, msg);
    else
        srv_put_error(&r->body, status, param, code, msg);
}
