/* SPDX-License-Identifier: Apache-2.0 */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

void kvd_buf_reserve(kvd_buf *b, size_t more)
{
    uint64_t need, cap;
    char    *p;

    if (b->oom)
        return;
    if (!kvd_add(b->len, more, &need) || !kvd_add(need, 1, &need)) {
        b->oom = true;
        return;
    }
    if (need <= b->cap)
        return;
    cap = kvd_max_u64(need, kvd_max_u64(64, (uint64_t)b->cap + b->cap / 2));
    p   = kvd_realloc(b->data, cap);
    if (!p) {
        b->oom = true;
        return;
    }
    p[b->len] = 0;
    b->data   = p;
    b->cap    = cap;
}

void kvd_buf_put(kvd_buf *b, const void *p, size_t len)
{
    kvd_buf_reserve(b, len);
    if (b->oom || len == 0)
        return;
    memcpy(b->data + b->len, p, len);
    b->len += len;
    b->data[b->len] = 0;
}

void kvd_buf_puts(kvd_buf *b, const char *s)
{
    kvd_buf_put(b, s, strlen(s));
}

void kvd_buf_putc(kvd_buf *b, char c)
{
    kvd_buf_put(b, &c, 1);
}

void kvd_buf_printf(kvd_buf *b, const char *fmt, ...)
{
    va_list ap;
    int     n;

    va_start(ap, fmt);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) { /* more than INT_MAX bytes: as good as no memory */
        b->oom = true;
        return;
    }
    kvd_buf_reserve(b, (size_t)n);
    if (b->oom)
        return;
    va_start(ap, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
}

char *kvd_buf_take(kvd_buf *b)
{
    char *p;

    kvd_buf_reserve(b, 0);
    p = b->oom ? NULL : b->data;
    if (!p)
        kvd_free(b->data);
    *b = (kvd_buf){ 0 };
    return p;
}

void kvd_buf_free(kvd_buf *b)
{
    kvd_free(b->data);
    *b = (kvd_buf){ 0 };
}
