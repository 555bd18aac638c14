/* SPDX-License-Identifier: Apache-2.0 */
/* srv_log.c - the log: lines on standard error, as text or as JSON.  Prompts and answers are never
 * in it. */
#include "srv_http.h"

#include <stdio.h>
#include <time.h>

static const char *const levels[] = { "debug", "info", "warning", "error" };

static const char *in_words(const server_params *p, const char *msg, char out[SERVER_WORDS_BYTES])
{
    return p->words ? p->words(msg, out) : msg;
}

static void stamp(char out[32])
{
    struct timespec t;
    struct tm       tm;
    size_t          n;

    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &tm);
    n = strftime(out, 24, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + n, 32 - n, ".%03ldZ", t.tv_nsec / 1000000);
}

static void line_text(void *ctx, kvd_log_level level, const char *msg)
{
    char at[32], words[SERVER_WORDS_BYTES];

    if (level == KVD_LOG_DEBUG)
        return;
    stamp(at);
    fprintf(stderr, "%s %s %s\n", at, levels[level], in_words(ctx, msg, words));
}

static void line_json(void *ctx, kvd_log_level level, const char *msg)
{
    kvd_buf b = { 0 };
    char    at[32], words[SERVER_WORDS_BYTES];

    if (level == KVD_LOG_DEBUG)
        return;
    stamp(at);
    kvd_buf_printf(&b, "{\"time\":\"%s\",\"level\":\"%s\",\"message\":", at, levels[level]);
    srv_put_text(&b, in_words(ctx, msg, words));
    kvd_buf_puts(&b, "}\n");
    if (!b.oom)
        fwrite(b.data, 1, b.len, stderr);
    kvd_buf_free(&b);
}

void srv_log_open(const server_params *p)
{
    kvd_set_log(p->log_json ? line_json : line_text, (void *)(uintptr_t)p);
}

void srv_log_close(void)
{
    fflush(stderr);
}

void srv_log_quote(const char *s, size_t len, char *out, size_t cap)
{
    size_t n = 0;

    for (size_t i = 0; i < len; i++) {
        const unsigned char c     = (unsigned char)s[i];
        const bool          plain = c > ' ' && c < 127 && c != '"' && c != '\\';

        if (n + sizeof("\\xHH...") > cap) { /* what comes now, and the mark of the cut */
            n += (size_t)snprintf(out + n, cap - n, "...");
            break;
        }
        n += (size_t)snprintf(out + n, cap - n, plain ? "%c" : "\\x%02x", c);
    }
    out[n] = 0;
}
