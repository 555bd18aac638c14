/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Messages quote files and users: whatever they hold, a message is one line and commands no
 * terminal. */
static void make_printable(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < ' ' || *s == 127)
            *s = '?';
}

kvd_status kvd_fail(kvd_err *err, kvd_status code, int sys, const char *fmt, ...)
{
    va_list ap;

    kvd_assert(code != KVD_OK);
    if (!err)
        return code;
    err->code = code;
    err->sys  = sys;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
    va_end(ap);
    if (sys) {
        const size_t n = strlen(err->msg);
        snprintf(err->msg + n, sizeof(err->msg) - n, ": %s", strerror(sys));
    }
    make_printable(err->msg);
    return code;
}

const char *kvd_short_path(const char *path, char buf[KVD_SHORT_PATH_BYTES])
{
    enum { path_max = 200 }; /* so that a long path does not push the cause out of the message */
    const size_t len  = strlen(path);
    const char  *tail = len > path_max ? path + (len - path_max) : path;

    while (((unsigned char)*tail & 0xc0) == 0x80) /* not into the middle of a character */
        tail++;
    snprintf(buf, KVD_SHORT_PATH_BYTES, "%s%s", len > path_max ? "..." : "", tail);
    return buf;
}

void kvd_err_name_path(kvd_err *err, const char *path)
{
    char   name[KVD_SHORT_PATH_BYTES], text[KVD_ERR_MSG_BYTES];
    size_t len;

    if (!err)
        return;
    kvd_short_path(path, name);
    make_printable(name);
    len = strlen(name);
    if (strncmp(err->msg, name, len) == 0 && err->msg[len] == ':')
        return;
    memcpy(text, err->msg, sizeof(text));
    snprintf(err->msg, sizeof(err->msg), "%s: %.*s", name, (int)(sizeof(text) - len - 3), text);
}

const char *kvd_status_name(kvd_status code)
{
    switch (code) {
    case KVD_OK:
        return "KVD_OK";
    case KVD_E_INVAL:
        return "KVD_E_INVAL";
    case KVD_E_NOMEM:
        return "KVD_E_NOMEM";
    case KVD_E_IO:
        return "KVD_E_IO";
    case KVD_E_CORRUPT:
        return "KVD_E_CORRUPT";
    case KVD_E_BUSY:
        return "KVD_E_BUSY";
    case KVD_E_CANCELED:
        return "KVD_E_CANCELED";
    case KVD_E_UNSUPPORTED:
        return "KVD_E_UNSUPPORTED";
    case KVD_E_DEVICE:
        return "KVD_E_DEVICE";
    case KVD_E_FULL:
        return "KVD_E_FULL";
    }
    return "?";
}

void kvd_assert_failed(const char *expr, const char *file, int line)
{
    /* The one place of the library that writes to stderr and ends the process: memory may be
     * wrong already, and only our own mistake leads here. */
    fprintf(stderr, "kvdrive: internal error: %s (%s:%d)\n", expr, file, line);
    abort();
}
