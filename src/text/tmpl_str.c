/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_str.c - strings with provenance: making, cutting, joining, searching. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memmem() */
#endif
#include <string.h>

#include "text/tmpl_value.h"

#define SB_MIN_BYTES   64u
#define BYTES_PER_STEP 64u /* copying this much costs about what evaluating a node costs */

bool tmpl_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x20) || cp == 0x85 || cp == 0xa0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

/* ---- builder --------------------------------------------------------------------- */

void tmpl_sb_init(tmpl_sb *sb, tmpl_run *r)
{
    *sb = (tmpl_sb){ .run = r, .limit = SIZE_MAX };
}

static bool sb_room(tmpl_sb *sb, size_t more)
{
    tmpl_run *r = sb->run;
    uint64_t  need;
    size_t    cap;
    char     *p;

    if (!tmpl_step(r, more / BYTES_PER_STEP))
        return false;
    if (!kvd_add(sb->len, more, &need) || need > sb->limit) {
        tmpl_fail(r, KVD_E_INVAL, "the output exceeds %zu bytes", sb->limit);
        return false;
    }
    if (need <= sb->cap)
        return true;
    cap = kvd_max_u64(need, sb->cap ? (uint64_t)sb->cap * 2 : SB_MIN_BYTES);
    if (sb->cap && kvd_arena_extend(&r->bytes, sb->data, sb->cap, cap - sb->cap)) {
        sb->cap = cap;
        return true;
    }
    p = kvd_arena_bytes(&r->bytes, cap);
    if (!p) {
        tmpl_fail(r, r->bytes.full ? KVD_E_INVAL : KVD_E_NOMEM,
                  r->bytes.full ? "it needs too much memory" : "no memory");
        return false;
    }
    if (sb->len)
        memcpy(p, sb->data, sb->len);
    sb->data = p;
    sb->cap  = cap;
    return true;
}

/* Notes that [from, to) of the result is trusted. */
static void sb_span(tmpl_sb *sb, size_t from, size_t to)
{
    if (from == to)
        return;
    if (sb->n_span && sb->span[sb->n_span - 1].end == from) {
        sb->span[sb->n_span - 1].end = to;
        return;
    }
    if (sb->n_span == sb->cap_span) {
        const size_t cap  = sb->cap_span ? sb->cap_span * 2 : 4;
        kvd_span    *span = tmpl_alloc(sb->run, cap, sizeof(*span));

        if (!span)
            return;
        if (sb->n_span)
            memcpy(span, sb->span, sb->n_span * sizeof(*span));
        sb->span     = span;
        sb->cap_span = cap;
    }
    sb->span[sb->n_span++] = (kvd_span){ from, to };
}

void tmpl_sb_put(tmpl_sb *sb, const char *data, size_t len, bool trusted)
{
    if (len == 0 || !sb_room(sb, len))
        return;
    memcpy(sb->data + sb->len, data, len);
    if (trusted)
        sb_span(sb, sb->len, sb->len + len);
    sb->len += len;
}

void tmpl_sb_puts(tmpl_sb *sb, const char *text)
{
    tmpl_sb_put(sb, text, strlen(text), false);
}

/* First span that ends after from. */
static size_t first_span(const tmpl_str *s, size_t from)
{
    size_t lo = 0, hi = s->n_span;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;

        if (s->span[mid].end <= from)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool tmpl_str_trusted(const tmpl_str *s, size_t from, size_t to)
{
    const size_t i = first_span(s, from);

    return i < s->n_span && s->span[i].start <= from && to <= s->span[i].end;
}

void tmpl_sb_put_part(tmpl_sb *sb, const tmpl_str *s, size_t from, size_t to)
{
    const size_t at = sb->len;

    if (from >= to || !sb_room(sb, to - from))
        return;
    memcpy(sb->data + at, s->data + from, to - from);
    sb->len += to - from;
    for (size_t i = first_span(s, from); i < s->n_span && s->span[i].start < to; i++) {
        const size_t a = kvd_max_u64(s->span[i].start, from), b = kvd_min_u64(s->span[i].end, to);

        sb_span(sb, at + (a - from), at + (b - from));
        if (!tmpl_step(sb->run, 1))
            return;
    }
}

void tmpl_sb_put_str(tmpl_sb *sb, const tmpl_str *s)
{
    if (s)
        tmpl_sb_put_part(sb, s, 0, s->len);
}

tmpl_val tmpl_sb_take(tmpl_sb *sb)
{
    tmpl_str *s = tmpl_alloc(sb->run, 1, sizeof(*s));

    if (!s)
        return tmpl_undef(NULL);
    *s = (tmpl_str){ .data   = sb->data ? sb->data : "",
                     .len    = sb->len,
                     .n_char = TMPL_UNKNOWN,
                     .span   = sb->span,
                     .n_span = sb->n_span };
    tmpl_sb_init(sb, sb->run);
    return tmpl_of_str(s);
}

/* ---- strings --------------------------------------------------------------------- */

tmpl_val tmpl_str_new(tmpl_run *r, const char *data, size_t len, bool trusted)
{
    tmpl_sb sb;

    tmpl_sb_init(&sb, r);
    tmpl_sb_put(&sb, data, len, trusted);
    return tmpl_sb_take(&sb);
}

tmpl_val tmpl_str_part(tmpl_run *r, const tmpl_str *s, size_t from, size_t to)
{
    const size_t i = first_span(s, from);
    size_t       n = 0;
    kvd_span    *span;
    tmpl_str    *out;

    if (from == 0 && to == s->len)
        return tmpl_of_str(s);
    out = tmpl_alloc(r, 1, sizeof(*out));
    if (!out)
        return tmpl_undef(NULL);
    *out = (tmpl_str){ .data = s->data + from, .len = to - from, .n_char = TMPL_UNKNOWN };
    while (i + n < s->n_span && s->span[i + n].start < to)
        n++;
    if (n == 0 || from == to || !tmpl_step(r, n))
        return tmpl_of_str(out);
    span = tmpl_alloc(r, n, sizeof(*span));
    if (!span)
        return tmpl_undef(NULL);
    for (size_t k = 0; k < n; k++) {
        span[k].start = kvd_max_u64(s->span[i + k].start, from) - from;
        span[k].end   = kvd_min_u64(s->span[i + k].end, to) - from;
    }
    out->span   = span;
    out->n_span = n;
    return tmpl_of_str(out);
}

/* Strings are immutable, so a that lies last in the arena may share its bytes with the result. */
tmpl_val tmpl_str_concat(tmpl_run *r, const tmpl_str *a, const tmpl_str *b)
{
    tmpl_sb sb;

    if (a->len == 0)
        return tmpl_of_str(b);
    if (b->len == 0)
        return tmpl_of_str(a);
    tmpl_sb_init(&sb, r);
    if (kvd_arena_extend(&r->bytes, a->data, a->len, b->len)) {
        sb.data = (char *)a->data; /* our own bytes, and none of a's is written */
        sb.cap  = a->len + b->len;
        sb.len  = a->len;
        if (!tmpl_step(r, a->n_span))
            return tmpl_undef(NULL);
        for (size_t i = 0; i < a->n_span; i++)
            sb_span(&sb, a->span[i].start, a->span[i].end);
    } else if (sb_room(&sb, a->len + b->len)) {
        tmpl_sb_put_str(&sb, a);
    }
    tmpl_sb_put_str(&sb, b);
    return tmpl_sb_take(&sb);
}

tmpl_val tmpl_str_escape(tmpl_run *r, const tmpl_str *s)
{
    static const char        sign[] = "&<>\"'";
    static const char *const name[] = { "&amp;", "&lt;", "&gt;", "&#34;", "&#39;" };
    size_t                   from   = 0;
    tmpl_sb                  sb;

    tmpl_sb_init(&sb, r);
    for (size_t i = 0; i < s->len && tmpl_step(r, i % 16 == 0); i++) {
        const char *at = s->data[i] ? strchr(sign, s->data[i]) : NULL;

        if (!at)
            continue;
        tmpl_sb_put_part(&sb, s, from, i);
        tmpl_sb_puts(&sb, name[at - sign]);
        from = i + 1;
    }
    tmpl_sb_put_part(&sb, s, from, s->len);
    return tmpl_sb_take(&sb);
}

size_t tmpl_str_chars(const tmpl_str *s)
{
    size_t n = 0;

    if (s->n_char != TMPL_UNKNOWN)
        return s->n_char;
    for (size_t i = 0; i < s->len; i++)
        n += ((unsigned char)s->data[i] & 0xc0) != 0x80;
    return n;
}

size_t tmpl_str_offset(const tmpl_str *s, size_t n_char)
{
    size_t i = 0;

    if (s->n_char == s->len)
        return n_char;
    for (; n_char && i < s->len; n_char--) {
        i++;
        while (i < s->len && ((unsigned char)s->data[i] & 0xc0) == 0x80)
            i++;
    }
    return i;
}

bool tmpl_str_is(const tmpl_str *s, const char *text)
{
    return s->len == strlen(text) && memcmp(s->data, text, s->len) == 0;
}

size_t tmpl_str_find(tmpl_run *r, const tmpl_str *a, const tmpl_str *b, size_t from)
{
    const char *p;

    if (from > a->len || b->len > a->len - from)
        return TMPL_UNKNOWN;
    if (b->len == 0)
        return from;
    p = memmem(a->data + from, a->len - from, b->data, b->len);
    if (!tmpl_step(r, (p ? (size_t)(p - a->data) - from : a->len - from) / 16))
        return TMPL_UNKNOWN;
    return p ? (size_t)(p - a->data) : TMPL_UNKNOWN;
}
