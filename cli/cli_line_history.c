/* SPDX-License-Identifier: Apache-2.0 */
/* cli_line_history.c - messages written before, in memory and in a file.
 *
 * A line of the file is a message in which a backslash stands before another, and \n for the end of
 * a line; \ooo is a byte in octal, as libedit wrote them.  Messages are appended as they come, so
 * several programs may share the file and none has to end in order.  It is the user's alone. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli_line.h"
#include "os/os.h"

#define FILE_MODE      0600
#define FILE_MAX_BYTES (8u << 20)

static bool is_octal(const char *s)
{
    return s[0] >= '0' && s[0] <= '3' && s[1] >= '0' && s[1] <= '7' && s[2] >= '0' && s[2] <= '7';
}

/* s ends in a zero byte at or behind len. */
static void decode(const char *s, size_t len, kvd_buf *out)
{
    for (size_t i = 0; i < len; i++) {
        if (s[i] != '\\' || i + 1 == len) {
            kvd_buf_putc(out, s[i]);
        } else if (i + 3 < len && is_octal(s + i + 1)) {
            kvd_buf_putc(out,
                         (char)((s[i + 1] - '0') << 6 | (s[i + 2] - '0') << 3 | (s[i + 3] - '0')));
            i += 3;
        } else {
            i++;
            kvd_buf_putc(out, s[i] == 'n' ? '\n' : s[i]);
        }
    }
}

static void encode(const char *text, kvd_buf *out)
{
    for (const char *s = text; *s; s++) {
        if (*s == '\n' || *s == '\\')
            kvd_buf_putc(out, '\\');
        kvd_buf_putc(out, *s == '\n' ? 'n' : *s);
    }
    kvd_buf_putc(out, '\n');
}

static bool remember(line_history *h, const char *text)
{
    char *copy;

    if (!*text || (h->n > 0 && strcmp(h->entry[h->n - 1], text) == 0))
        return false;
    copy = kvd_strndup(text, strlen(text));
    if (!copy)
        return false;
    if (h->n == LINE_HISTORY_MAX) {
        kvd_free(h->entry[0]);
        memmove(h->entry, h->entry + 1, (LINE_HISTORY_MAX - 1) * sizeof(*h->entry));
        h->n--;
    }
    h->entry[h->n++] = copy;
    return true;
}

/* The end of the file, whole lines of it; *n_line: of those. */
static void read_end(const char *path, kvd_buf *b, uint64_t *size)
{
    FILE  *f = fopen(path, "rbe");
    char   block[4096];
    size_t n;
    long   bytes;

    *size = 0;
    if (!f)
        return;
    bytes = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    *size = bytes > 0 ? (uint64_t)bytes : 0;
    if (bytes < 0 ||
        fseek(f, bytes > (long)FILE_MAX_BYTES ? bytes - (long)FILE_MAX_BYTES : 0, SEEK_SET) != 0) {
        fclose(f);
        return;
    }
    while ((n = fread(block, 1, sizeof(block), f)) > 0)
        kvd_buf_put(b, block, n);
    fclose(f);
}

static void write_anew(const line_history *h)
{
    kvd_buf b   = { 0 };
    kvd_err err = { 0 };

    for (uint32_t i = 0; i < h->n; i++)
        encode(h->entry[i], &b);
    if (!b.oom && b.len > 0)
        (void)!os_file_replace(h->path, b.data, b.len, &err); /* next time, else */
    kvd_buf_free(&b);
}

void line_history_open(line_history *h, const char *path)
{
    kvd_buf  b = { 0 }, text = { 0 };
    uint64_t size;
    uint32_t n_line = 0;
    bool     libedits;

    *h = (line_history){ 0 };
    snprintf(h->path, sizeof(h->path), "%s", path);
    read_end(path, &b, &size);
    libedits = b.len > 0 && strncmp(b.data, "_HiStOrY_V2_", 12) == 0;
    for (size_t at = 0, n; at < b.len && !b.oom; at += n + 1, n_line++) {
        n        = strcspn(b.data + at, "\n");
        text.len = 0;
        decode(b.data + at, n, &text);
        if (n_line > 0 || !(libedits || size > b.len)) /* a header, or a part of a line */
            remember(h, text.data && !text.oom ? text.data : "");
    }
    if (libedits || size > b.len || n_line > 2 * LINE_HISTORY_MAX)
        write_anew(h);
    kvd_buf_free(&b);
    kvd_buf_free(&text);
}

void line_history_add(line_history *h, const char *text)
{
    kvd_buf b = { 0 };
    int     fd;

    if (!remember(h, text) || !h->path[0])
        return;
    encode(text, &b);
    fd = b.oom ? -1 : open(h->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, FILE_MODE);
    if (fd >= 0) { /* a convenience: the directory may not exist */
        (void)!write(fd, b.data, b.len);
        close(fd);
    }
    kvd_buf_free(&b);
}

void line_history_close(line_history *h)
{
    for (uint32_t i = 0; i < h->n; i++)
        kvd_free(h->entry[i]);
    *h = (line_history){ 0 };
}
