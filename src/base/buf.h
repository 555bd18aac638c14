/* SPDX-License-Identifier: Apache-2.0 */
/* buf.h - a growable byte buffer with a sticky out-of-memory flag, so that a series of appends is
 * checked once at its end.  Always zero-terminated beyond len once anything was reserved.
 * One thread at a time. */
#ifndef KVD_BASE_BUF_H
#define KVD_BASE_BUF_H

#include "base/status.h"

typedef struct kvd_buf {
    char  *data; /* NULL while empty */
    size_t len, cap;
    bool   oom; /* an append failed; data holds what came before */
} kvd_buf;

void kvd_buf_reserve(kvd_buf *b, size_t more);
void kvd_buf_put(kvd_buf *b, const void *p, size_t len);
void kvd_buf_puts(kvd_buf *b, const char *s);
void kvd_buf_putc(kvd_buf *b, char c);
void kvd_buf_printf(kvd_buf *b, const char *fmt, ...) KVD_PRINTF(2, 3);
/* Hands the bytes over (never NULL unless oom) and empties b. */
char *kvd_buf_take(kvd_buf *b);
void  kvd_buf_free(kvd_buf *b);

#endif
