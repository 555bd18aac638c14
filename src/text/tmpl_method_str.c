/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_method_str.c - the methods of str.  Pieces share the bytes of the string they come from. */
#include <string.h>

#include "text/tmpl_builtin.h"

/* ---- strip ----------------------------------------------------------------------- */

static bool in_set(tmpl_run *r, const tmpl_str *chars, const char *p, size_t n, uint32_t cp)
{
    if (!chars)
        return tmpl_is_space(cp);
    if (!tmpl_step(r, chars->len / 64))
        return false;
    for (size_t i = 0; i < chars->len;) {
        uint32_t     c;
        const size_t m = utf8_decode(chars->data + i, chars->len - i, &c);

        if (m == n && memcmp(chars->data + i, p, n) == 0)
            return true;
        i += m;
    }
    return false;
}

tmpl_val tmpl_str_strip(tmpl_run *r, const tmpl_str *s, const tmpl_str *chars, bool left,
                        bool right)
{
    size_t   from = 0, to = s->len, n;
    uint32_t cp;

    while (left && from < to && tmpl_step(r, from % 8 == 0)) {
        n = utf8_decode(s->data + from, to - from, &cp);
        if (!in_set(r, chars, s->data + from, n, cp))
            break;
        from += n;
    }
    while (right && to > from && tmpl_step(r, to % 8 == 0)) {
        size_t back = to - 1;

        while (back > from && ((unsigned char)s->data[back] & 0xc0) == 0x80)
            back--;
        utf8_decode(s->data + back, to - back, &cp);
        if (!in_set(r, chars, s->data + back, to - back, cp))
            break;
        to = back;
    }
    return tmpl_str_part(r, s, from, to);
}

static tmpl_val strip_method(tmpl_run *r, const tmpl_args *a, bool left, bool right)
{
    const tmpl_str *chars = tmpl_arg_none(a, 0) ? NULL : tmpl_arg_str(r, a, 0);

    return tmpl_str_strip(r, a->self.u.s, chars, left, right);
}

static tmpl_val m_strip(tmpl_run *r, const tmpl_args *a)
{
    return strip_method(r, a, true, true);
}

static tmpl_val m_lstrip(tmpl_run *r, const tmpl_args *a)
{
    return strip_method(r, a, true, false);
}

static tmpl_val m_rstrip(tmpl_run *r, const tmpl_args *a)
{
    return strip_method(r, a, false, true);
}

static tmpl_val cut_affix(tmpl_run *r, const tmpl_args *a, bool prefix)
{
    const tmpl_str *s = a->self.u.s, *x = tmpl_arg_str(r, a, 0);

    if (!x || x->len > s->len)
        return a->self;
    if (prefix)
        return memcmp(s->data, x->data, x->len) ? a->self : tmpl_str_part(r, s, x->len, s->len);
    return memcmp(s->data + s->len - x->len, x->data, x->len)
               ? a->self
               : tmpl_str_part(r, s, 0, s->len - x->len);
}

static tmpl_val m_removeprefix(tmpl_run *r, const tmpl_args *a)
{
    return cut_affix(r, a, true);
}

static tmpl_val m_removesuffix(tmpl_run *r, const tmpl_args *a)
{
    return cut_affix(r, a, false);
}

/* ---- split and join -------------------------------------------------------------- */

/* Last occurrence of b in a[0..end), or TMPL_UNKNOWN. */
static size_t find_last(tmpl_run *r, const tmpl_str *a, const tmpl_str *b, size_t end)
{
    if (b->len > end)
        return TMPL_UNKNOWN;
    for (size_t i = end - b->len + 1; i-- > 0 && tmpl_step(r, i % 8 == 0 ? 1 + b->len / 64 : 0);) {
        if (memcmp(a->data + i, b->data, b->len) == 0)
            return i;
    }
    return TMPL_UNKNOWN;
}

static void split_by(tmpl_run *r, tmpl_seq *out, const tmpl_str *s, const tmpl_str *sep,
                     int64_t max)
{
    size_t from = 0, at;

    while (max-- != 0 && r->st == KVD_OK && (at = tmpl_str_find(r, s, sep, from)) != TMPL_UNKNOWN) {
        tmpl_seq_push(r, out, tmpl_str_part(r, s, from, at));
        from = at + sep->len;
    }
    tmpl_seq_push(r, out, tmpl_str_part(r, s, from, s->len));
}

static size_t word_end(const tmpl_str *s, size_t i, bool space)
{
    while (i < s->len) {
        uint32_t     cp;
        const size_t n = utf8_decode(s->data + i, s->len - i, &cp);

        if (tmpl_is_space(cp) != space)
            break;
        i += n;
    }
    return i;
}

static void split_words(tmpl_run *r, tmpl_seq *out, const tmpl_str *s, int64_t max)
{
    size_t from = word_end(s, 0, true), to;

    tmpl_step(r, s->len / 32);
    for (; from < s->len && r->st == KVD_OK; from = word_end(s, to, true)) {
        to = word_end(s, from, false);
        if (max-- == 0) { /* what is left keeps the white space at its end */
            tmpl_seq_push(r, out, tmpl_str_part(r, s, from, s->len));
            return;
        }
        tmpl_seq_push(r, out, tmpl_str_part(r, s, from, to));
    }
}

static void rsplit_by(tmpl_run *r, tmpl_seq *out, const tmpl_str *s, const tmpl_str *sep,
                      int64_t max)
{
    size_t to = s->len, at;

    while (max-- != 0 && r->st == KVD_OK && (at = find_last(r, s, sep, to)) != TMPL_UNKNOWN) {
        tmpl_seq_push(r, out, tmpl_str_part(r, s, at + sep->len, to));
        to = at;
    }
    tmpl_seq_push(r, out, tmpl_str_part(r, s, 0, to));
    for (size_t i = 0; i < out->n / 2; i++) {
        const tmpl_val swap       = out->item[i];
        out->item[i]              = out->item[out->n - 1 - i];
        out->item[out->n - 1 - i] = swap;
    }
}

static tmpl_val split_method(tmpl_run *r, const tmpl_args *a, bool right)
{
    const tmpl_str *sep = tmpl_arg_none(a, 0) ? NULL : tmpl_arg_str(r, a, 0);
    const int64_t   max = tmpl_arg_int(r, a, 1, -1);
    tmpl_seq       *out = tmpl_seq_new(r, 0);

    if (sep && sep->len == 0)
        tmpl_fail(r, KVD_E_INVAL, "empty separator");
    else if (right && !sep && max >= 0)
        tmpl_fail(r, KVD_E_UNSUPPORTED, "rsplit() by white space with a limit is not supported");
    if (r->st != KVD_OK || !out)
        return tmpl_undef(NULL);
    if (!sep)
        split_words(r, out, a->self.u.s, max);
    else if (right)
        rsplit_by(r, out, a->self.u.s, sep, max);
    else
        split_by(r, out, a->self.u.s, sep, max);
    return tmpl_of_seq(TV_LIST, out);
}

static tmpl_val m_split(tmpl_run *r, const tmpl_args *a)
{
    return split_method(r, a, false);
}

static tmpl_val m_rsplit(tmpl_run *r, const tmpl_args *a)
{
    return split_method(r, a, true);
}

/* Bytes of the line end at i (0: none), as str.splitlines() has them. */
static size_t line_end(const tmpl_str *s, size_t i)
{
    uint32_t     cp;
    const size_t n = utf8_decode(s->data + i, s->len - i, &cp);

    if (cp == '\r' && i + 1 < s->len && s->data[i + 1] == '\n')
        return 2;
    return (cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 || cp == 0x2028 ||
                   cp == 0x2029
               ? n
               : 0;
}

tmpl_val tmpl_str_lines(tmpl_run *r, const tmpl_str *s)
{
    tmpl_seq *out  = tmpl_seq_new(r, 0);
    size_t    from = 0;

    for (size_t i = 0; out && i < s->len && tmpl_step(r, i % 16 == 0);) {
        const size_t n = line_end(s, i);

        if (n) {
            tmpl_seq_push(r, out, tmpl_str_part(r, s, from, i));
            from = i + n;
        }
        i += n ? n : 1;
    }
    if (out && from < s->len)
        tmpl_seq_push(r, out, tmpl_str_part(r, s, from, s->len));
    return tmpl_of_seq(TV_LIST, out);
}

static tmpl_val m_splitlines(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_str_lines(r, a->self.u.s);
}

static tmpl_val partition(tmpl_run *r, const tmpl_args *a, bool right)
{
    const tmpl_str *s = a->self.u.s, *sep = tmpl_arg_str(r, a, 0);
    tmpl_seq       *out = tmpl_seq_new(r, 3);
    size_t          at;

    if (sep && sep->len == 0)
        tmpl_fail(r, KVD_E_INVAL, "empty separator");
    if (r->st != KVD_OK || !out || !sep)
        return tmpl_undef(NULL);
    at = right ? find_last(r, s, sep, s->len) : tmpl_str_find(r, s, sep, 0);
    if (at == TMPL_UNKNOWN) {
        for (size_t i = 0; i < 3; i++)
            out->item[i] = tmpl_str_new(r, "", 0, false);
        out->item[right ? 2 : 0] = a->self;
    } else {
        out->item[0] = tmpl_str_part(r, s, 0, at);
        out->item[1] = tmpl_of_str(sep);
        out->item[2] = tmpl_str_part(r, s, at + sep->len, s->len);
    }
    return tmpl_of_seq(TV_TUPLE, out);
}

static tmpl_val m_partition(tmpl_run *r, const tmpl_args *a)
{
    return partition(r, a, false);
}

static tmpl_val m_rpartition(tmpl_run *r, const tmpl_args *a)
{
    return partition(r, a, true);
}

static tmpl_val m_join(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->v[0]);
    tmpl_sb         sb;

    tmpl_sb_init(&sb, r);
    for (size_t i = 0; items && i < items->n && tmpl_step(r, 1); i++) {
        if (items->item[i].kind != TV_STR) {
            tmpl_fail(r, KVD_E_INVAL, "join(): a str was expected, not %s",
                      tmpl_type_name(&items->item[i]));
            break;
        }
        if (i)
            tmpl_sb_put_str(&sb, a->self.u.s);
        tmpl_sb_put_str(&sb, items->item[i].u.s);
    }
    return tmpl_sb_take(&sb);
}

/* ---- search and replace ---------------------------------------------------------- */

static bool has_affix(const tmpl_str *s, const tmpl_str *x, bool prefix)
{
    return x->len <= s->len &&
           memcmp(s->data + (prefix ? 0 : s->len - x->len), x->data, x->len) == 0;
}

static tmpl_val affix_method(tmpl_run *r, const tmpl_args *a, bool prefix)
{
    const tmpl_seq *any;

    if (a->v[0].kind != TV_TUPLE) {
        const tmpl_str *x = tmpl_arg_str(r, a, 0);

        return tmpl_bool(x && tmpl_step(r, x->len / 64) && has_affix(a->self.u.s, x, prefix));
    }
    any = a->v[0].u.seq;
    for (size_t i = 0; i < any->n && tmpl_step(r, 1); i++) {
        if (any->item[i].kind != TV_STR)
            tmpl_fail(r, KVD_E_INVAL, "a tuple of strings was expected");
        else if (has_affix(a->self.u.s, any->item[i].u.s, prefix))
            return tmpl_bool(true);
    }
    return tmpl_bool(false);
}

static tmpl_val m_startswith(tmpl_run *r, const tmpl_args *a)
{
    return affix_method(r, a, true);
}

static tmpl_val m_endswith(tmpl_run *r, const tmpl_args *a)
{
    return affix_method(r, a, false);
}

static tmpl_val find_method(tmpl_run *r, const tmpl_args *a, bool right, bool must)
{
    const tmpl_str *s = a->self.u.s, *x = tmpl_arg_str(r, a, 0);
    tmpl_str        before = *s;
    size_t          at;

    if (!x)
        return tmpl_undef(NULL);
    at = right ? find_last(r, s, x, s->len) : tmpl_str_find(r, s, x, 0);
    if (at == TMPL_UNKNOWN) {
        if (must)
            tmpl_fail(r, KVD_E_INVAL, "substring not found");
        return tmpl_int(-1);
    }
    before.len    = at;
    before.n_char = TMPL_UNKNOWN;
    return tmpl_int((int64_t)tmpl_str_chars(&before));
}

static tmpl_val m_find(tmpl_run *r, const tmpl_args *a)
{
    return find_method(r, a, false, false);
}

static tmpl_val m_rfind(tmpl_run *r, const tmpl_args *a)
{
    return find_method(r, a, true, false);
}

static tmpl_val m_index(tmpl_run *r, const tmpl_args *a)
{
    return find_method(r, a, false, true);
}

static tmpl_val m_rindex(tmpl_run *r, const tmpl_args *a)
{
    return find_method(r, a, true, true);
}

static tmpl_val m_count(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *s = a->self.u.s, *x = tmpl_arg_str(r, a, 0);
    int64_t         n = 0;

    if (!x)
        return tmpl_undef(NULL);
    if (x->len == 0)
        return tmpl_int((int64_t)tmpl_str_chars(s) + 1);
    for (size_t at = 0; (at = tmpl_str_find(r, s, x, at)) != TMPL_UNKNOWN && tmpl_step(r, 1);
         at += x->len)
        n++;
    return tmpl_int(n);
}

/* An empty old stands between all letters. */
static tmpl_val replace_empty(tmpl_run *r, const tmpl_str *s, const tmpl_str *with, int64_t count)
{
    size_t  at = 0;
    tmpl_sb sb;

    tmpl_sb_init(&sb, r);
    for (; count-- != 0 && at <= s->len && tmpl_step(r, 1);) {
        size_t end = at + 1;

        tmpl_sb_put_str(&sb, with);
        while (end < s->len && ((unsigned char)s->data[end] & 0xc0) == 0x80)
            end++;
        tmpl_sb_put_part(&sb, s, at, kvd_min_u64(end, s->len));
        at = end;
    }
    tmpl_sb_put_part(&sb, s, at, s->len);
    return tmpl_sb_take(&sb);
}

tmpl_val tmpl_str_replace(tmpl_run *r, const tmpl_str *s, const tmpl_str *old, const tmpl_str *with,
                          int64_t count)
{
    size_t  from = 0, at;
    tmpl_sb sb;

    if (old->len == 0)
        return replace_empty(r, s, with, count);
    tmpl_sb_init(&sb, r);
    while (count-- != 0 && tmpl_step(r, 1) &&
           (at = tmpl_str_find(r, s, old, from)) != TMPL_UNKNOWN) {
        tmpl_sb_put_part(&sb, s, from, at);
        tmpl_sb_put_str(&sb, with);
        from = at + old->len;
    }
    if (from == 0)
        return tmpl_of_str(s);
    tmpl_sb_put_part(&sb, s, from, s->len);
    return tmpl_sb_take(&sb);
}

static tmpl_val m_replace(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *old = tmpl_arg_str(r, a, 0), *with = tmpl_arg_str(r, a, 1);
    const int64_t   count = tmpl_arg_int(r, a, 2, -1);

    return r->st == KVD_OK ? tmpl_str_replace(r, a->self.u.s, old, with, count) : tmpl_undef(NULL);
}

/* ---- letters --------------------------------------------------------------------- */

#define CASE_METHOD(fn, how)                            \
    static tmpl_val fn(tmpl_run *r, const tmpl_args *a) \
    {                                                   \
        return tmpl_str_case(r, a->self.u.s, how);      \
    }
CASE_METHOD(m_upper, TMPL_UPPER)
CASE_METHOD(m_lower, TMPL_LOWER)
CASE_METHOD(m_capitalize, TMPL_CAPITALIZE)
CASE_METHOD(m_title, TMPL_TITLE)

#define LETTER_METHOD(fn, what)                               \
    static tmpl_val fn(tmpl_run *r, const tmpl_args *a)       \
    {                                                         \
        return tmpl_bool(tmpl_str_all(r, a->self.u.s, what)); \
    }
LETTER_METHOD(m_isalpha, "alpha")
LETTER_METHOD(m_isalnum, "alnum")
LETTER_METHOD(m_isdigit, "digit")
LETTER_METHOD(m_isdecimal, "decimal")
LETTER_METHOD(m_isspace, "space")
LETTER_METHOD(m_isascii, "ascii")
LETTER_METHOD(m_islower, "lower")
LETTER_METHOD(m_isupper, "upper")

/* Parameters with "-" cannot be given by name, as in Python. */
const tmpl_builtin tmpl_methods_str[] = {
    { "capitalize", "", 0, m_capitalize },
    { "casefold", "", 0, NULL },
    { "center", "width fillchar", 1, NULL },
    { "count", "-sub", 1, m_count },
    { "encode", "encoding errors", 0, NULL },
    { "endswith", "-suffix", 1, m_endswith },
    { "expandtabs", "tabsize", 0, NULL },
    { "find", "-sub", 1, m_find },
    { "format", NULL, 0, NULL },
    { "format_map", "mapping", 1, NULL },
    { "index", "-sub", 1, m_index },
    { "isalnum", "", 0, m_isalnum },
    { "isalpha", "", 0, m_isalpha },
    { "isascii", "", 0, m_isascii },
    { "isdecimal", "", 0, m_isdecimal },
    { "isdigit", "", 0, m_isdigit },
    { "isidentifier", "", 0, NULL },
    { "islower", "", 0, m_islower },
    { "isnumeric", "", 0, NULL },
    { "isprintable", "", 0, NULL },
    { "isspace", "", 0, m_isspace },
    { "istitle", "", 0, NULL },
    { "isupper", "", 0, m_isupper },
    { "join", "-iterable", 1, m_join },
    { "ljust", "width fillchar", 1, NULL },
    { "lower", "", 0, m_lower },
    { "lstrip", "-chars", 0, m_lstrip },
    { "maketrans", NULL, 0, NULL },
    { "partition", "-sep", 1, m_partition },
    { "removeprefix", "-prefix", 1, m_removeprefix },
    { "removesuffix", "-suffix", 1, m_removesuffix },
    { "replace", "-old -new -count", 2, m_replace },
    { "rfind", "-sub", 1, m_rfind },
    { "rindex", "-sub", 1, m_rindex },
    { "rjust", "width fillchar", 1, NULL },
    { "rpartition", "-sep", 1, m_rpartition },
    { "rsplit", "sep maxsplit", 0, m_rsplit },
    { "rstrip", "-chars", 0, m_rstrip },
    { "split", "sep maxsplit", 0, m_split },
    { "splitlines", "", 0, m_splitlines },
    { "startswith", "-prefix", 1, m_startswith },
    { "strip", "-chars", 0, m_strip },
    { "swapcase", "", 0, NULL },
    { "title", "", 0, m_title },
    { "translate", "table", 1, NULL },
    { "upper", "", 0, m_upper },
    { "zfill", "width", 1, NULL },
    { NULL, NULL, 0, NULL },
};
