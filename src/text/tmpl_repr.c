/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_repr.c - values as text: Python's str() and repr(), and json.dumps().  All of it is
 * untrusted, except that str() of a string is that string and that a literal number stays one. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "text/tmpl_ast.h"

/* ---- numbers --------------------------------------------------------------------- */

/* The shortest digits that read back as f, and its decimal exponent.  Only digits are taken from
 * the C library, so the locale's decimal point does not matter. */
static int shortest_digits(double f, char digits[20], int *exp10)
{
    char text[40];
    int  n = 0;

    for (int prec = 0; prec < 17; prec++) {
        snprintf(text, sizeof(text), "%.*e", prec, f);
        if (strtod(text, NULL) == f)
            break;
    }
    for (const char *p = text; *p && *p != 'e'; p++) {
        if (*p >= '0' && *p <= '9')
            digits[n++] = *p;
    }
    while (n > 1 && digits[n - 1] == '0')
        n--;
    *exp10 = (int)strtol(strchr(text, 'e') + 1, NULL, 10);
    return n;
}

void tmpl_float_text(double f, char out[TMPL_FLOAT_TEXT])
{
    char digits[20];
    int  n, exp10, at = 0;

    if (isnan(f) || isinf(f)) {
        snprintf(out, TMPL_FLOAT_TEXT, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    if (signbit(f))
        out[at++] = '-';
    n = shortest_digits(fabs(f), digits, &exp10);
    if (exp10 < -4 || exp10 >= 16) {
        out[at++] = digits[0];
        if (n > 1)
            out[at++] = '.';
        for (int i = 1; i < n; i++)
            out[at++] = digits[i];
        snprintf(out + at, (size_t)(TMPL_FLOAT_TEXT - at), "e%c%02d", exp10 < 0 ? '-' : '+',
                 abs(exp10));
        return;
    }
    for (int i = exp10 < 0 ? exp10 : 0; i < n || i <= exp10 + 1; i++) {
        if (i == exp10 + 1)
            out[at++] = '.';
        out[at++] = i >= 0 && i < n ? digits[i] : '0';
    }
    out[at] = 0;
}

/* ---- repr() ---------------------------------------------------------------------- */

static bool printable(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return cp == ' ';
    default:
        return true;
    }
}

static void repr_str(tmpl_sb *sb, const tmpl_str *s)
{
    const bool single = !memchr(s->data, '\'', s->len) || memchr(s->data, '"', s->len);
    const char quote  = single ? '\'' : '"';

    tmpl_sb_put(sb, &quote, 1, false);
    for (size_t i = 0; i < s->len && tmpl_step(sb->run, i % 8 == 0);) {
        uint32_t     cp;
        const size_t n = utf8_decode(s->data + i, s->len - i, &cp);
        char         esc[12];

        if (cp == '\\' || cp == (unsigned char)quote)
            snprintf(esc, sizeof(esc), "\\%c", (char)cp);
        else if (cp == '\n' || cp == '\r' || cp == '\t')
            snprintf(esc, sizeof(esc), "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
        else if (cp < 0x20 || cp == 0x7f || (cp > 0x7f && cp < 0x100 && !printable(cp)))
            snprintf(esc, sizeof(esc), "\\x%02x", cp);
        else if (cp < 0x80 || printable(cp))
            esc[0] = 0;
        else
            snprintf(esc, sizeof(esc), cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
        if (esc[0])
            tmpl_sb_puts(sb, esc);
        else
            tmpl_sb_put(sb, s->data + i, n, false);
        i += n;
    }
    tmpl_sb_put(sb, &quote, 1, false);
}

static void repr_seq(tmpl_sb *sb, const tmpl_val *v, const char *open, const char *close)
{
    const tmpl_seq *s = v->u.seq;

    tmpl_sb_puts(sb, open);
    for (size_t i = 0; i < s->n && sb->run->st == KVD_OK; i++) {
        if (i)
            tmpl_sb_puts(sb, ", ");
        tmpl_repr(sb, &s->item[i]);
    }
    tmpl_sb_puts(sb, v->kind == TV_TUPLE && s->n == 1 ? ",)" : close);
}

static void repr_dict(tmpl_sb *sb, const tmpl_dict *d, const char *open, const char *close)
{
    tmpl_sb_puts(sb, open);
    for (size_t i = 0; i < d->n && sb->run->st == KVD_OK; i++) {
        if (i)
            tmpl_sb_puts(sb, ", ");
        tmpl_repr(sb, &d->pair[i].key);
        tmpl_sb_puts(sb, ": ");
        tmpl_repr(sb, &d->pair[i].val);
    }
    tmpl_sb_puts(sb, close);
}

static void repr_range(tmpl_sb *sb, const tmpl_seq *s)
{
    char text[80];

    snprintf(text, sizeof(text), "range(%" PRId64 ", %" PRId64, s->start, s->stop);
    tmpl_sb_puts(sb, text);
    snprintf(text, sizeof(text), ", %" PRId64, s->step);
    tmpl_sb_puts(sb, s->step == 1 ? "" : text);
    tmpl_sb_puts(sb, ")");
}

/* Constants and numbers; a literal of the template keeps being one. */
static void repr_scalar(tmpl_sb *sb, const tmpl_val *v)
{
    char text[TMPL_FLOAT_TEXT];

    if (v->kind == TV_NONE)
        snprintf(text, sizeof(text), "%s", "None");
    else if (v->kind == TV_BOOL)
        snprintf(text, sizeof(text), "%s", v->u.b ? "True" : "False");
    else if (v->kind == TV_INT)
        snprintf(text, sizeof(text), "%" PRId64, v->u.i);
    else
        tmpl_float_text(v->u.f, text);
    tmpl_sb_put(sb, text, strlen(text), v->trusted);
}

static void repr_object(tmpl_sb *sb, const tmpl_val *v)
{
    if (v->kind == TV_NS) {
        repr_dict(sb, v->u.d, "<Namespace {", "}>");
        return;
    }
    tmpl_sb_puts(sb, "<");
    tmpl_sb_puts(sb, tmpl_type_name(v));
    if (v->kind == TV_MACRO) {
        const tmpl_val name = tmpl_of_str(v->u.macro->node->name);

        tmpl_sb_puts(sb, " ");
        tmpl_repr(sb, &name);
    }
    tmpl_sb_puts(sb, ">");
}

void tmpl_repr(tmpl_sb *sb, const tmpl_val *v)
{
    if (!tmpl_enter(sb->run))
        return;
    switch (v->kind) {
    case TV_UNDEF:
        tmpl_sb_puts(sb, "Undefined");
        break;
    case TV_NONE:
    case TV_BOOL:
    case TV_INT:
    case TV_FLOAT:
        repr_scalar(sb, v);
        break;
    case TV_DIGITS:
        tmpl_sb_put(sb, v->u.s->data, v->u.s->len, false);
        break;
    case TV_STR:
        repr_str(sb, v->u.s);
        break;
    case TV_LIST:
        repr_seq(sb, v, "[", "]");
        break;
    case TV_TUPLE:
        repr_seq(sb, v, "(", ")");
        break;
    case TV_RANGE:
        repr_range(sb, v->u.seq);
        break;
    case TV_VIEW:
        tmpl_sb_puts(sb, v->u.seq->view);
        repr_seq(sb, v, "([", "])");
        break;
    case TV_DICT:
        repr_dict(sb, v->u.d, "{", "}");
        break;
    default:
        repr_object(sb, v);
        break;
    }
    tmpl_leave(sb->run);
}

const tmpl_str *tmpl_to_str(tmpl_run *r, const tmpl_val *v)
{
    tmpl_sb  sb;
    tmpl_val s;

    if (v->kind == TV_STR)
        return v->u.s;
    tmpl_sb_init(&sb, r);
    if (v->kind != TV_UNDEF)
        tmpl_repr(&sb, v);
    s = tmpl_sb_take(&sb);
    return r->st == KVD_OK ? s.u.s : NULL;
}

/* ---- json.dumps() ---------------------------------------------------------------- */

static void json_str(tmpl_sb *sb, const tmpl_str *s, bool ascii)
{
    static const char plain[] = "\"\\\n\r\t\f\b", letter[] = "\"\\nrtfb";
    size_t            from = 0;

    tmpl_sb_puts(sb, "\"");
    for (size_t i = 0; i < s->len && tmpl_step(sb->run, i % 16 == 0);) {
        const unsigned char c     = (unsigned char)s->data[i];
        const char         *known = c ? strchr(plain, c) : NULL;
        char                esc[16];
        uint32_t            cp = c;
        size_t              n  = 1;

        if (!known && c >= 0x20 && !(ascii && c >= 0x7f)) {
            i++;
            continue;
        }
        if (c >= 0x80)
            n = utf8_decode(s->data + i, s->len - i, &cp);
        if (known)
            snprintf(esc, sizeof(esc), "\\%c", letter[known - plain]);
        else if (cp < 0x10000)
            snprintf(esc, sizeof(esc), "\\u%04x", cp);
        else
            snprintf(esc, sizeof(esc), "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                     0xdc00 + (cp & 0x3ff));
        tmpl_sb_put(sb, s->data + from, i - from, false);
        tmpl_sb_puts(sb, esc);
        i += n;
        from = i;
    }
    tmpl_sb_put(sb, s->data + from, s->len - from, false);
    tmpl_sb_puts(sb, "\"");
}

static void json_scalar(tmpl_sb *sb, const tmpl_val *v)
{
    char text[TMPL_FLOAT_TEXT];

    if (v->kind == TV_NONE)
        snprintf(text, sizeof(text), "%s", "null");
    else if (v->kind == TV_BOOL)
        snprintf(text, sizeof(text), "%s", v->u.b ? "true" : "false");
    else if (v->kind == TV_INT)
        snprintf(text, sizeof(text), "%" PRId64, v->u.i);
    else if (isnan(v->u.f) || isinf(v->u.f))
        snprintf(text, sizeof(text), "%s",
                 isnan(v->u.f) ? "NaN"
                 : v->u.f < 0  ? "-Infinity"
                               : "Infinity");
    else
        tmpl_float_text(v->u.f, text);
    tmpl_sb_puts(sb, text);
}

static void json_put_sep(tmpl_sb *sb, const tmpl_str *sep, const char *usual)
{
    if (sep)
        tmpl_sb_put(sb, sep->data, sep->len, false);
    else
        tmpl_sb_puts(sb, usual);
}

static void json_newline(tmpl_sb *sb, const tmpl_json_style *style, uint32_t level)
{
    if (!style->pretty)
        return;
    tmpl_sb_puts(sb, "\n");
    for (uint32_t i = 0; i < level; i++)
        tmpl_sb_put(sb, style->indent->data, style->indent->len, false);
}

static void json_value(tmpl_sb *sb, const tmpl_val *v, const tmpl_json_style *style,
                       uint32_t level);

static void json_list(tmpl_sb *sb, const tmpl_seq *s, const tmpl_json_style *style, uint32_t level)
{
    if (s->n == 0) {
        tmpl_sb_puts(sb, "[]");
        return;
    }
    tmpl_sb_puts(sb, "[");
    for (size_t i = 0; i < s->n && sb->run->st == KVD_OK; i++) {
        if (i)
            json_put_sep(sb, style->item_sep, style->pretty ? "," : ", ");
        json_newline(sb, style, level + 1);
        json_value(sb, &s->item[i], style, level + 1);
    }
    json_newline(sb, style, level);
    tmpl_sb_puts(sb, "]");
}

static void json_key(tmpl_sb *sb, const tmpl_val *key, const tmpl_json_style *style)
{
    if (key->kind == TV_STR) {
        json_str(sb, key->u.s, style->ascii);
        return;
    }
    if (key->kind != TV_NONE && !tmpl_is_number(key)) {
        tmpl_fail(sb->run, KVD_E_INVAL, "keys must be str, int, float, bool or None, not %s",
                  tmpl_type_name(key));
        return;
    }
    tmpl_sb_puts(sb, "\"");
    json_scalar(sb, key);
    tmpl_sb_puts(sb, "\"");
}

static int key_order(const void *a, const void *b)
{
    const tmpl_str *x = ((const tmpl_pair *)a)->key.u.s, *y = ((const tmpl_pair *)b)->key.u.s;
    const int       c = memcmp(x->data, y->data, kvd_min_u64(x->len, y->len));

    return c ? c : x->len < y->len ? -1 : x->len > y->len;
}

/* The pairs of d in the order of their keys; NULL: failed. */
static const tmpl_pair *sorted_pairs(tmpl_run *r, const tmpl_dict *d)
{
    tmpl_pair *pair = tmpl_alloc(r, d->n, sizeof(*pair));

    if (!pair || !tmpl_step(r, d->n))
        return NULL;
    for (size_t i = 0; i < d->n; i++) {
        if (d->pair[i].key.kind != TV_STR) {
            tmpl_fail(r, KVD_E_UNSUPPORTED, "sort_keys with keys that are not strings");
            return NULL;
        }
        pair[i] = d->pair[i];
    }
    qsort(pair, d->n, sizeof(*pair), key_order);
    return pair;
}

static void json_dict(tmpl_sb *sb, const tmpl_dict *d, const tmpl_json_style *style, uint32_t level)
{
    const tmpl_pair *pair = d->pair;

    if (d->n == 0) {
        tmpl_sb_puts(sb, "{}");
        return;
    }
    if (style->sort_keys)
        pair = sorted_pairs(sb->run, d);
    tmpl_sb_puts(sb, "{");
    for (size_t i = 0; pair && i < d->n && sb->run->st == KVD_OK; i++) {
        if (i)
            json_put_sep(sb, style->item_sep, style->pretty ? "," : ", ");
        json_newline(sb, style, level + 1);
        json_key(sb, &pair[i].key, style);
        json_put_sep(sb, style->key_sep, ": ");
        json_value(sb, &pair[i].val, style, level + 1);
    }
    json_newline(sb, style, level);
    tmpl_sb_puts(sb, "}");
}

static void json_value(tmpl_sb *sb, const tmpl_val *v, const tmpl_json_style *style, uint32_t level)
{
    if (!tmpl_enter(sb->run))
        return;
    switch (v->kind) {
    case TV_NONE:
    case TV_BOOL:
    case TV_INT:
    case TV_FLOAT:
        json_scalar(sb, v);
        break;
    case TV_DIGITS:
        tmpl_sb_put(sb, v->u.s->data, v->u.s->len, false);
        break;
    case TV_STR:
        json_str(sb, v->u.s, style->ascii);
        break;
    case TV_LIST:
    case TV_TUPLE:
        json_list(sb, v->u.seq, style, level);
        break;
    case TV_DICT:
        json_dict(sb, v->u.d, style, level);
        break;
    default:
        tmpl_fail(sb->run, KVD_E_INVAL, "object of type %s is not JSON serializable",
                  tmpl_type_name(v));
    }
    tmpl_leave(sb->run);
}

void tmpl_json_write(tmpl_sb *sb, const tmpl_val *v, const tmpl_json_style *style)
{
    json_value(sb, v, style, 0);
}
