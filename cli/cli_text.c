/* SPDX-License-Identifier: Apache-2.0 */
/* cli_text.c - texts of options and answers: escapes, UTF-8, stop strings. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "text/text.h"

/* Length of the escape sequence that s begins with, and the byte it stands for; 0: it is none. */
static size_t escape(const char *s, char *c)
{
    static const char names[] = "nrt\\'\"", bytes[] = "\n\r\t\\'\"";
    const char       *at;
    char              hex[3] = { 0 }, *end;

    if (s[0] != '\\' || !s[1])
        return 0;
    if (s[1] == 'x') {
        memcpy(hex, s + 2, strnlen(s + 2, 2));
        *c = (char)strtoul(hex, &end, 16);
        return end == hex + 2 && hex[0] != '+' && hex[0] != '-' && hex[0] != ' ' ? 4 : 0;
    }
    at = strchr(names, s[1]);
    if (at)
        *c = bytes[at - names];
    return at ? 2 : 0;
}

void cli_put_text(const kvd_opts *o, const char *text, kvd_buf *to)
{
    const bool escapes = kvd_opts_flag(o, "escape");

    while (*text) {
        char         c = *text;
        const size_t n = escapes ? escape(text, &c) : 0;

        kvd_buf_putc(to, c);
        text += n ? n : 1;
    }
}

kvd_status cli_check_utf8(const char *what, const char *s, size_t len, kvd_err *err)
{
    for (size_t i = 0, n; i < len; i += n) {
        uint32_t cp;

        n = utf8_decode(s + i, len - i, &cp);
        if (cp == 0xfffd && !(n == 3 && memcmp(s + i, "\xef\xbf\xbd", 3) == 0))
            return kvd_fail(
                err, KVD_E_INVAL, 0,
                "the %s cannot go into a chat message: byte %zu (0x%02x) is not UTF-8; "
                "convert it (iconv), or use --raw of kvdrive run, which takes any bytes",
                what, i, (unsigned char)s[i]);
    }
    return KVD_OK;
}

bool cli_add_message(json_t *messages, const char *role, const char *text, size_t len)
{
    json_t *m = json_pack("{s:s, s:s%}", "role", role, "content", text ? text : "", len);

    return json_array_append_new(messages, m) == 0;
}

/* ---- stop strings ---------------------------------------------------------------------- */

kvd_status cli_stops_open(cli_stops *s, const kvd_opts *o, kvd_err *err)
{
    const kvd_opt_value *v = kvd_opts_get(o, "stop");

    *s = (cli_stops){ .n = v->n_list };
    if (s->n > 0 && !(s->stop = kvd_calloc(s->n, sizeof(*s->stop))))
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the stop strings");
    for (uint32_t i = 0; i < s->n; i++) {
        cli_put_text(o, v->list[i], &s->stop[i]);
        if (s->stop[i].oom)
            return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the stop strings");
        if (s->stop[i].len == 0)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "--stop is an empty text, which would end every "
                            "answer before it begins");
    }
    return KVD_OK;
}

void cli_stops_close(cli_stops *s)
{
    for (uint32_t i = 0; s->stop && i < s->n; i++)
        kvd_buf_free(&s->stop[i]);
    kvd_free(s->stop);
    kvd_buf_free(&s->held);
    *s = (cli_stops){ 0 };
}

/* First byte of the held text where a stop string begins; whole: all of it is there, else the rest
 * may still come.  held.len: there is none. */
static size_t find_stop(const cli_stops *s, bool whole)
{
    for (size_t at = 0; at < s->held.len; at++) {
        const size_t left = s->held.len - at;

        for (uint32_t i = 0; i < s->n; i++) {
            const size_t n = s->stop[i].len;

            if (whole ? n > left : n <= left)
                continue;
            if (memcmp(s->held.data + at, s->stop[i].data, whole ? n : left) == 0)
                return at;
        }
    }
    return s->held.len;
}

bool cli_stops_feed(cli_stops *s, const char *text, size_t len, kvd_buf *out)
{
    size_t at;
    bool   stopped;

    kvd_buf_put(&s->held, text, len);
    at      = find_stop(s, true);
    stopped = at < s->held.len;
    if (!stopped)
        at = find_stop(s, false);
    out->len = 0;
    kvd_buf_put(out, s->held.data, at);
    out->oom = out->oom || s->held.oom;
    if (at > 0)
        memmove(s->held.data, s->held.data + at, s->held.len - at);
    s->held.len = stopped ? 0 : s->held.len - at;
    return stopped;
}

void cli_stops_end(cli_stops *s, kvd_buf *out)
{
    out->len = 0;
    kvd_buf_put(out, s->held.data, s->held.len);
    s->held.len = 0;
}
