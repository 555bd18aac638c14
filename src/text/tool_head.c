/* SPDX-License-Identifier: Apache-2.0 */
/* tool_head.c - the head of a call: its name, up to where its arguments begin. */
#include "text/tool_form.h"

#include <string.h>

/* ---- JSON, as far as it is here ----------------------------------------------------------------
 */

bool tool_is_white(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

size_t tool_skip_white(const char *s, size_t len, size_t at)
{
    while (at < len && tool_is_white(s[at]))
        at++;
    return at;
}

/* One byte of a value.  Returns 1: it belongs to it; 2: it is its last; 0: it is behind it. */
int tool_scan_byte(tool_scan *v, char c)
{
    if (v->string) {
        const bool quote = c == '"' && !v->escape;

        v->escape = c == '\\' && !v->escape;
        v->string = !quote;
        return quote && v->depth == 0 ? 2 : 1;
    }
    if (v->depth == 0 && (tool_is_white(c) || c == ',' || c == '}' || c == ']'))
        return 0;
    v->begun = true;
    if (c == '"')
        v->string = true;
    else if (c == '{' || c == '[')
        v->depth++;
    else if ((c == '}' || c == ']') && v->depth)
        return --v->depth == 0 ? 2 : 1;
    return 1;
}

/* The end of the value at *at. */
static tool_parse skip_value(const char *s, size_t len, size_t *at)
{
    tool_scan v = { 0 };

    while (*at < len) {
        const int k = tool_scan_byte(&v, s[*at]);

        if (k == 0)
            return v.begun ? TOOL_GOOD : TOOL_BAD;
        ++*at;
        if (k == 2)
            return TOOL_GOOD;
    }
    return TOOL_MORE;
}

static int hex_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* One escape behind a backslash: its code point; false: it is none. */
static bool escape_of(const char *s, size_t len, size_t *at, uint32_t *cp)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char        c     = s[(*at)++];
    const char       *found = c ? strchr(from, c) : NULL;

    if (found) {
        *cp = (unsigned char)to[found - from];
        return true;
    }
    *cp = 0;
    for (int i = 0; c == 'u' && i < 4; i++) {
        const int d = *at < len ? hex_of(s[*at]) : -1;

        if (d < 0)
            return false;
        *cp = *cp * 16 + (uint32_t)d;
        ++*at;
    }
    return c == 'u';
}

/* The string whose quote is at *at, decoded, at most TOOL_NAME_MAX bytes of it. */
static tool_parse read_string(const char *s, size_t len, size_t *at, char out[TOOL_NAME_MAX + 8],
                              size_t *n)
{
    size_t     end = *at;
    tool_parse p   = end < len && s[end] != '"' ? TOOL_BAD : skip_value(s, len, &end);

    *n = 0;
    if (p != TOOL_GOOD)
        return p;
    for (++*at; *at + 1 < end;) {
        uint32_t cp = 0;

        if (*n > TOOL_NAME_MAX)
            return TOOL_BAD;
        if (s[*at] != '\\') {
            out[(*n)++] = s[(*at)++];
            continue;
        }
        ++*at;
        if (!escape_of(s, end - 1, at, &cp))
            return TOOL_BAD;
        *n += utf8_encode(cp, out + *n);
    }
    *at = end;
    return TOOL_GOOD;
}

static bool is_key(const char *key, size_t n, const char *name)
{
    return n == strlen(name) && memcmp(key, name, n) == 0;
}

/* One member of the call's object; *stop: arguments begin at h->args and the name is known. */
static tool_parse read_member(const char *s, size_t len, size_t *at, tool_head *h, bool *stop)
{
    char       key[TOOL_NAME_MAX + 8];
    size_t     n;
    tool_parse p = read_string(s, len, at, key, &n);

    if (p != TOOL_GOOD)
        return p;
    *at = tool_skip_white(s, len, *at);
    if (*at < len && s[*at] != ':')
        return TOOL_BAD;
    *at = tool_skip_white(s, len, *at + 1);
    if (*at >= len)
        return TOOL_MORE;
    if (s[*at] == ',' || s[*at] == '}' || s[*at] == ']')
        return TOOL_BAD;
    if (is_key(key, n, "name") && !h->named) {
        p        = read_string(s, len, at, h->name, &h->n_name);
        h->named = p == TOOL_GOOD;
        return p == TOOL_GOOD && (h->n_name == 0 || h->n_name > TOOL_NAME_MAX) ? TOOL_BAD : p;
    }
    if (!h->has_args && (is_key(key, n, "arguments") || is_key(key, n, "parameters"))) {
        h->has_args = true;
        h->args     = *at;
        if (h->named) {
            *stop = true;
            return TOOL_GOOD;
        }
        p           = skip_value(s, len, at);
        h->args_end = *at;
        return p;
    }
    return skip_value(s, len, at);
}

/* The object of a call from s on, up to its arguments if the name stands before them. */
tool_parse tool_read_object(const char *s, size_t len, tool_head *h)
{
    size_t at   = tool_skip_white(s, len, 0);
    bool   stop = false;

    *h = (tool_head){ 0 };
    if (at < len && s[at] != '{')
        return TOOL_BAD;
    for (at++;;) {
        tool_parse p;

        at = tool_skip_white(s, len, at);
        if (at >= len)
            return TOOL_MORE;
        if (s[at] == '}' && !h->named && !h->has_args)
            return TOOL_BAD;
        if (s[at] != '}') {
            p = read_member(s, len, &at, h, &stop);
            if (p != TOOL_GOOD || stop)
                return p;
            at = tool_skip_white(s, len, at);
            if (at >= len)
                return TOOL_MORE;
        }
        if (s[at] == '}') {
            h->closed = true;
            h->end    = at + 1;
            return h->named ? TOOL_GOOD : TOOL_BAD;
        }
        if (s[at++] != ',')
            return TOOL_BAD;
    }
}

/* ---- names without quotes -------------------------------------------------------------------- */

/* Whether the text at *at is there, behind white space: GOOD moves *at behind it. */
tool_parse tool_read_text(const char *s, size_t len, size_t *at, const char *text)
{
    const tok_str what = tool_trim(text);
    const size_t  from = tool_skip_white(s, len, *at);
    const size_t  n    = kvd_min_u64(len - from, what.len);

    if (memcmp(s + from, what.data, n) != 0)
        return TOOL_BAD;
    if (n < what.len)
        return TOOL_MORE;
    *at = from + n;
    return TOOL_GOOD;
}

/* A name at s[*at], as tool_plain_name() says; something has to follow it. */
static tool_parse read_name(const char *s, size_t len, size_t *at, tool_head *h)
{
    const size_t from = *at;

    while (*at < len && *at - from <= TOOL_NAME_MAX && tool_plain_name(s + *at, 1))
        ++*at;
    if (*at == len)
        return TOOL_MORE;
    h->n_name = *at - from;
    if (h->n_name == 0 || h->n_name > TOOL_NAME_MAX)
        return TOOL_BAD;
    memcpy(h->name, s + from, h->n_name);
    h->name[h->n_name] = 0;
    h->named           = true;
    return TOOL_GOOD;
}

tool_parse tool_read_named(const tool_form *f, const char *s, size_t len, tool_head *h)
{
    size_t     at = tool_skip_white(s, len, 0);
    tool_parse p;

    *h = (tool_head){ 0 };
    p  = at < len ? read_name(s, len, &at, h) : TOOL_MORE;
    while (p == TOOL_GOOD) {
        bool skipped = false;

        p = tool_read_text(s, len, &at, f->mid);
        if (p != TOOL_BAD)
            break;
        for (size_t i = 0; i < KVD_COUNTOF(f->skip) && f->skip[i] && !skipped; i++) {
            const tool_parse q = tool_read_text(s, len, &at, f->skip[i]);

            skipped = q == TOOL_GOOD;
            p       = q == TOOL_MORE ? TOOL_MORE : p;
        }
        if (!skipped)
            return p;
        p = TOOL_GOOD;
    }
    if (p != TOOL_GOOD)
        return p;
    at = tool_skip_white(s, len, at);
    if (at == len)
        return TOOL_MORE;
    h->has_args = true;
    h->args     = at;
    return s[at] == '{' ? TOOL_GOOD : TOOL_BAD;
}

tool_parse tool_read_function(const char *s, size_t len, tool_head *h)
{
    size_t     at = 0;
    tool_parse p  = tool_read_text(s, len, &at, TOOL_FUNCTION_OPEN);

    *h = (tool_head){ 0 };
    if (p == TOOL_GOOD)
        p = at < len ? read_name(s, len, &at, h) : TOOL_MORE;
    if (p == TOOL_GOOD && s[at] != '>')
        p = TOOL_BAD;
    h->args = at + 1;
    return p;
}
