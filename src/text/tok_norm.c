/* SPDX-License-Identifier: Apache-2.0 */
/* tok_norm.c - NFC of any length of text in linear time.
 *
 * Characters below U+0300 are starters that never join what stands before them, so text is cut in
 * front of them; each piece between is decomposed, put into canonical order and composed.  The
 * order is made here: utf8proc's own sorting is quadratic in the length of a run of marks.
 * Invalid bytes also cut, and are copied.
 * Stateless, any thread. */
#include "text/tok_impl.h"

#include <utf8proc.h>

#define SMALL_RUN 24 /* marks sorted by insertion; longer runs by counting */

/* Decomposed code points of the piece at hand. */
typedef struct piece {
    utf8proc_int32_t *cp, *tmp;
    size_t            len, cap;
    bool              oom;
} piece;

static bool below_0300(uint8_t lead)
{
    return lead < 0xcc;
}

static int mark_class(utf8proc_int32_t cp)
{
    return utf8proc_get_property(cp)->combining_class;
}

/* Stable order of a run of marks by combining class. */
static void sort_marks(utf8proc_int32_t *cp, utf8proc_int32_t *tmp, size_t n)
{
    if (n <= SMALL_RUN) {
        for (size_t i = 1; i < n; i++) {
            const utf8proc_int32_t c   = cp[i];
            const int              ccc = mark_class(c);
            size_t                 j   = i;

            for (; j > 0 && mark_class(cp[j - 1]) > ccc; j--)
                cp[j] = cp[j - 1];
            cp[j] = c;
        }
        return;
    }
    size_t start[257] = { 0 };
    for (size_t i = 0; i < n; i++)
        start[(mark_class(cp[i]) & 255) + 1]++;
    for (size_t c = 1; c < 257; c++)
        start[c] += start[c - 1];
    for (size_t i = 0; i < n; i++)
        tmp[start[mark_class(cp[i]) & 255]++] = cp[i];
    memcpy(cp, tmp, n * sizeof(*cp));
}

static void piece_order(piece *p)
{
    size_t i = 0;

    while (i < p->len) {
        size_t j = i;

        while (j < p->len && mark_class(p->cp[j]) != 0)
            j++;
        if (j - i > 1)
            sort_marks(p->cp + i, p->tmp + i, j - i);
        i = j + 1;
    }
}

static bool piece_reserve(piece *p, size_t more)
{
    if (p->cap - p->len >= more)
        return true;
    const size_t      cap = (p->len + more) * 2;
    utf8proc_int32_t *cp  = kvd_realloc(p->cp, cap * sizeof(*cp));
    if (cp)
        p->cp = cp;
    utf8proc_int32_t *tmp = kvd_realloc(p->tmp, cap * sizeof(*tmp));
    if (tmp)
        p->tmp = tmp;
    p->oom = !cp || !tmp;
    if (!p->oom)
        p->cap = cap;
    return !p->oom;
}

/* The longest canonical decomposition of one character is 4 code points. */
#define MAX_DECOMPOSED 8

static void piece_add(piece *p, uint32_t cp)
{
    int bound = 0;

    if (!piece_reserve(p, MAX_DECOMPOSED))
        return;
    const utf8proc_ssize_t n =
        utf8proc_decompose_char((utf8proc_int32_t)cp, p->cp + p->len, MAX_DECOMPOSED,
                                UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &bound);
    if (n >= 0 && n <= MAX_DECOMPOSED)
        p->len += (size_t)n;
}

static void piece_flush(piece *p, kvd_buf *out)
{
    if (p->len == 0 || p->oom)
        return;
    piece_order(p);
    const utf8proc_ssize_t n = utf8proc_normalize_utf32(p->cp, (utf8proc_ssize_t)p->len,
                                                        UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    for (utf8proc_ssize_t i = 0; i < n; i++) {
        char u[4];

        kvd_buf_put(out, u, utf8_encode((uint32_t)p->cp[i], u));
    }
    p->len = 0;
}

/* Ideographs and Hangul syllables join nothing before them: pieces stay short in such text. */
static bool starts_piece(uint32_t cp)
{
    return cp < 0x300 || (cp >= 0x4e00 && cp <= 0x9fff) || (cp >= 0xac00 && cp <= 0xd7a3);
}

bool tok_nfc(const char *s, size_t len, kvd_buf *out)
{
    const size_t before = out->len;
    piece        p      = { 0 };
    size_t       i      = 0;

    while (i < len && below_0300((uint8_t)s[i]))
        i++;
    if (i == len)
        return false;
    kvd_buf_reserve(out, len);
    for (i = 0; i < len && !p.oom && !out->oom;) {
        uint32_t     cp;
        const size_t n = utf8_decode(s + i, len - i, &cp);

        if (starts_piece(cp))
            piece_flush(&p, out);
        if (cp == 0xfffd) { /* itself, or invalid bytes: as they are */
            piece_flush(&p, out);
            kvd_buf_put(out, s + i, n);
        } else if (n == 1 && (i + 1 == len || below_0300((uint8_t)s[i + 1]))) {
            kvd_buf_putc(out, s[i]);
        } else {
            piece_add(&p, cp);
        }
        i += n;
    }
    piece_flush(&p, out);
    out->oom |= p.oom;
    kvd_free(p.cp);
    kvd_free(p.tmp);
    if (out->oom)
        out->len = before;
    return !out->oom;
}
