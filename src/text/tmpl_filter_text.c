/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_filter_text.c - filters that give a string or a number. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/tmpl_builtin.h"

/* str(self) as the filters take it; an empty string once the run has failed. */
static const tmpl_str *self_str(tmpl_run *r, const tmpl_args *a)
{
    static const tmpl_str empty = { .data = "" };
    const tmpl_str       *s     = tmpl_to_str(r, &a->self);

    return s ? s : &empty;
}

#define CASE_FILTER(fn, how)                            \
    static tmpl_val fn(tmpl_run *r, const tmpl_args *a) \
    {                                                   \
        return tmpl_str_case(r, self_str(r, a), how);   \
    }
CASE_FILTER(f_upper, TMPL_UPPER)
CASE_FILTER(f_lower, TMPL_LOWER)
CASE_FILTER(f_title, TMPL_TITLE_FILTER)
CASE_FILTER(f_capitalize, TMPL_CAPITALIZE)

static tmpl_val f_string(tmpl_run *r, const tmpl_args *a)
{
    if (a->self.kind == TV_STR)
        return a->self;
    return tmpl_of_str(tmpl_to_str(r, &a->self));
}

static tmpl_val f_safe(tmpl_run *r, const tmpl_args *a)
{
    tmpl_val v = f_string(r, a);

    v.markup = true;
    return v;
}

static tmpl_val f_escape(tmpl_run *r, const tmpl_args *a)
{
    tmpl_val v;

    if (a->self.kind == TV_STR && a->self.markup)
        return a->self;
    v        = tmpl_str_escape(r, self_str(r, a));
    v.markup = true;
    return v;
}

static tmpl_val f_trim(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *chars = tmpl_arg_none(a, 0) ? NULL : tmpl_arg_str(r, a, 0);

    return tmpl_str_strip(r, self_str(r, a), chars, true, true);
}

static tmpl_val f_replace(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *s = self_str(r, a), *old = tmpl_to_str(r, &a->v[0]);
    const tmpl_str *with  = tmpl_to_str(r, &a->v[1]);
    const int64_t   count = tmpl_arg_none(a, 2) ? -1 : tmpl_arg_int(r, a, 2, -1);

    return r->st == KVD_OK ? tmpl_str_replace(r, s, old, with, count) : tmpl_undef(NULL);
}

/* One level of indentation: a text, or so many spaces. */
static const tmpl_str *indentation(tmpl_run *r, const tmpl_val *v)
{
    tmpl_val      s;
    const int64_t n = v->kind == TV_INT || v->kind == TV_BOOL ? tmpl_as_int(v) : 0;

    if (v->kind == TV_STR)
        return v->u.s;
    if (v->kind != TV_INT && v->kind != TV_BOOL) {
        tmpl_fail(r, KVD_E_INVAL, "an indentation cannot be '%s'", tmpl_type_name(v));
        return NULL;
    }
    s                    = tmpl_str_new(r, " ", 1, false);
    const tmpl_val times = tmpl_int(n);

    s = tmpl_arith(r, '*', &s, &times);
    return r->st == KVD_OK ? s.u.s : NULL;
}

static tmpl_val f_indent(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val  four  = tmpl_int(4);
    const tmpl_str *pad   = indentation(r, a->has[0] ? &a->v[0] : &four);
    const bool      first = tmpl_arg_truth(a, 1, false), blank = tmpl_arg_truth(a, 2, false);
    tmpl_val        text, lines;
    tmpl_sb         sb;

    if (a->self.kind != TV_STR)
        tmpl_fail(r, KVD_E_INVAL, "filter 'indent' needs a string, not '%s'",
                  tmpl_type_name(&a->self));
    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    text  = tmpl_str_new(r, "\n", 1, false);
    text  = tmpl_arith(r, '+', &a->self, &text); /* so that an empty last line counts */
    lines = r->st == KVD_OK ? tmpl_str_lines(r, text.u.s) : text;
    tmpl_sb_init(&sb, r);
    for (size_t i = 0; r->st == KVD_OK && i < lines.u.seq->n; i++) {
        const tmpl_str *line = lines.u.seq->item[i].u.s;

        if (i)
            tmpl_sb_puts(&sb, "\n");
        if (i ? blank || line->len : first)
            tmpl_sb_put_str(&sb, pad);
        tmpl_sb_put_str(&sb, line);
    }
    return tmpl_sb_take(&sb);
}

/* ---- numbers --------------------------------------------------------------------- */

/* The text of a string without white space around it and underscores between digits, zero-
 * terminated; false: no number could be so long, or underscores are misplaced. */
static bool number_text(tmpl_run *r, const tmpl_str *s, char out[80])
{
    const tmpl_val t = tmpl_str_strip(r, s, NULL, true, true);
    size_t         n = 0;

    if (r->st != KVD_OK || t.u.s->len == 0 || t.u.s->len > 78)
        return false;
    for (size_t i = 0; i < t.u.s->len; i++) {
        const char c    = t.u.s->data[i];
        const char next = i + 1 < t.u.s->len ? t.u.s->data[i + 1] : 0;

        if (c == '_' &&
            (n == 0 || out[n - 1] < '0' || out[n - 1] > '9' || next < '0' || next > '9'))
            return false;
        if (c != '_')
            out[n++] = c;
    }
    out[n] = 0;
    return strlen(out) == n;
}

static bool parse_decimal(const char *p, int64_t base, int64_t *out)
{
    const bool minus = *p == '-';
    int64_t    v     = 0;

    p += *p == '-' || *p == '+';
    if (base == 16 && p[0] == '0' && (p[1] | 0x20) == 'x')
        p += 2;
    else if (base == 8 && p[0] == '0' && (p[1] | 0x20) == 'o')
        p += 2;
    else if (base == 2 && p[0] == '0' && (p[1] | 0x20) == 'b')
        p += 2;
    if (!*p)
        return false;
    for (; *p; p++) {
        const int64_t d = *p >= '0' && *p <= '9'                     ? *p - '0'
                          : (*p | 0x20) >= 'a' && (*p | 0x20) <= 'z' ? (*p | 0x20) - 'a' + 10
                                                                     : 99;

        if (d >= base || __builtin_mul_overflow(v, base, &v) ||
            __builtin_add_overflow(v, minus ? -d : d, &v))
            return false;
    }
    *out = v;
    return true;
}

/* float(text): [sign] digits [. digits] [e [sign] digits], inf, nan; independent of the locale. */
static bool parse_real(const char *p, double *out)
{
    char   digits[120];
    size_t n = 0, n_digit = 0;
    long   exp   = 0;
    bool   point = false;

    if (*p == '-' || *p == '+')
        digits[n++] = *p++;
    if (strcasecmp(p, "inf") == 0 || strcasecmp(p, "infinity") == 0 || strcasecmp(p, "nan") == 0) {
        *out = (p[0] | 0x20) == 'n' ? (double)NAN : n && digits[0] == '-' ? -HUGE_VAL : HUGE_VAL;
        return true;
    }
    for (; (*p >= '0' && *p <= '9') || (*p == '.' && !point); p++) {
        if (*p == '.') {
            point = true;
            continue;
        }
        digits[n++] = *p;
        n_digit++;
        exp -= point;
    }
    if (n_digit == 0)
        return false;
    if (*p == 'e' || *p == 'E') {
        char *end;

        if (!((p[1] >= '0' && p[1] <= '9') ||
              ((p[1] == '-' || p[1] == '+') && p[2] >= '0' && p[2] <= '9')))
            return false;
        exp += strtol(p + 1, &end, 10) % 100000;
        p = end;
    }
    if (*p)
        return false;
    snprintf(digits + n, sizeof(digits) - n, "e%ld", exp);
    *out = strtod(digits, NULL);
    return true;
}

static tmpl_val real_to_int(tmpl_run *r, double f, tmpl_val deflt)
{
    if (isnan(f) || isinf(f))
        return deflt;
    if (f >= 0x1p63 || f < -0x1p63) {
        tmpl_fail(r, KVD_E_INVAL, "an integer exceeds 64 bits");
        return deflt;
    }
    return tmpl_int((int64_t)f);
}

static tmpl_val f_int(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val deflt = a->has[0] ? a->v[0] : tmpl_int(0);
    const int64_t  base  = tmpl_arg_int(r, a, 1, 10);
    char           text[80];
    int64_t        i;
    double         f;

    if (base < 2 || base > 36)
        tmpl_fail(r, KVD_E_UNSUPPORTED, "filter 'int' with such a base is not supported");
    if (a->self.kind == TV_UNDEF)
        tmpl_fail(r, KVD_E_INVAL, "filter 'int' of an undefined value");
    if (r->st != KVD_OK)
        return deflt;
    if (a->self.kind == TV_DIGITS)
        return a->self;
    if (a->self.kind == TV_FLOAT)
        return real_to_int(r, a->self.u.f, deflt);
    if (tmpl_is_number(&a->self))
        return tmpl_int(tmpl_as_int(&a->self));
    if (a->self.kind != TV_STR || !number_text(r, a->self.u.s, text))
        return deflt;
    if (parse_decimal(text, base, &i))
        return tmpl_int(i);
    return parse_real(text, &f) ? real_to_int(r, f, deflt) : deflt;
}

static tmpl_val f_float(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val deflt = a->has[0] ? a->v[0] : tmpl_float(0.0);
    char           text[80];
    double         f;

    if (a->self.kind == TV_UNDEF)
        tmpl_fail(r, KVD_E_INVAL, "filter 'float' of an undefined value");
    if (tmpl_is_number(&a->self))
        return tmpl_float(tmpl_as_float(&a->self));
    if ((a->self.kind != TV_STR && a->self.kind != TV_DIGITS) ||
        !number_text(r, a->self.u.s, text) || !parse_real(text, &f))
        return deflt;
    return tmpl_float(f);
}

static tmpl_val f_abs(tmpl_run *r, const tmpl_args *a)
{
    if (a->self.kind == TV_FLOAT)
        return tmpl_float(fabs(a->self.u.f));
    if (!tmpl_is_number(&a->self) || a->self.u.i == INT64_MIN) {
        tmpl_fail(r, KVD_E_INVAL, "bad operand type for abs(): '%s'", tmpl_type_name(&a->self));
        return tmpl_undef(NULL);
    }
    return tmpl_int(llabs(tmpl_as_int(&a->self)));
}

/* round(f, digits): to the nearest decimal, ties of the exact value to even, as printf rounds. */
static double round_to(double f, int64_t digits)
{
    char text[400];

    if (digits > 300 || isnan(f) || isinf(f))
        return f;
    if (digits < 0) {
        const double unit = pow(10.0, (double)-digits);

        return digits < -308 ? 0.0 : nearbyint(f / unit) * unit;
    }
    snprintf(text, sizeof(text), "%.*f", (int)(fabs(f) < 1e50 ? digits : 0), f);
    return strtod(text, NULL);
}

static tmpl_val f_round(tmpl_run *r, const tmpl_args *a)
{
    const int64_t   digits = tmpl_arg_int(r, a, 0, 0);
    const tmpl_str *how    = tmpl_arg_str(r, a, 1);
    const double    unit   = pow(10.0, (double)digits);
    double          f;

    if (!tmpl_is_number(&a->self)) {
        tmpl_fail(r, KVD_E_INVAL, "'%s' cannot be rounded", tmpl_type_name(&a->self));
        return tmpl_undef(NULL);
    }
    f = tmpl_as_float(&a->self);
    if (how && tmpl_str_is(how, "ceil"))
        return tmpl_float(ceil(f * unit) / unit);
    if (how && tmpl_str_is(how, "floor"))
        return tmpl_float(floor(f * unit) / unit);
    if (how && !tmpl_str_is(how, "common"))
        tmpl_fail(r, KVD_E_INVAL, "method must be common, ceil or floor");
    if (a->self.kind != TV_FLOAT && digits >= 0)
        return tmpl_int(tmpl_as_int(&a->self));
    return tmpl_float(round_to(f, digits));
}

/* ---- the rest -------------------------------------------------------------------- */

static tmpl_val f_default(tmpl_run *r, const tmpl_args *a)
{
    const bool use =
        a->self.kind == TV_UNDEF || (tmpl_arg_truth(a, 1, false) && !tmpl_truth(&a->self));

    if (!use)
        return a->self;
    return a->has[0] ? a->v[0] : tmpl_str_new(r, "", 0, false);
}

static tmpl_val f_length(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_int(tmpl_length(r, &a->self));
}

static tmpl_val f_attr(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *name = tmpl_arg_str(r, a, 0);

    if (!name)
        return tmpl_undef(NULL);
    if (a->self.kind == TV_DICT) { /* not its keys, unlike a.name */
        const tmpl_builtin *fn = tmpl_find_method(TV_DICT, name->data, name->len);

        return fn ? tmpl_attr(r, &a->self, name) : tmpl_undef(name);
    }
    return tmpl_attr(r, &a->self, name);
}

/* HF's tojson: json.dumps(x, ensure_ascii, indent, separators, sort_keys). */
static tmpl_val f_tojson(tmpl_run *r, const tmpl_args *a)
{
    tmpl_json_style style = { .ascii     = tmpl_arg_truth(a, 0, false),
                              .pretty    = !tmpl_arg_none(a, 1),
                              .sort_keys = tmpl_arg_truth(a, 3, false) };
    tmpl_sb         sb;

    if (style.pretty)
        style.indent = indentation(r, &a->v[1]);
    if (!tmpl_arg_none(a, 2)) {
        const tmpl_val *v = &a->v[2];

        if ((v->kind != TV_TUPLE && v->kind != TV_LIST) || v->u.seq->n != 2 ||
            v->u.seq->item[0].kind != TV_STR || v->u.seq->item[1].kind != TV_STR) {
            tmpl_fail(r, KVD_E_INVAL, "separators must be two strings");
            return tmpl_undef(NULL);
        }
        style.item_sep = v->u.seq->item[0].u.s;
        style.key_sep  = v->u.seq->item[1].u.s;
    }
    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    tmpl_sb_init(&sb, r);
    tmpl_json_write(&sb, &a->self, &style);
    return tmpl_sb_take(&sb);
}

const tmpl_builtin tmpl_filters_text[] = {
    { "abs", "", 0, f_abs },
    { "attr", "name", 1, f_attr },
    { "capitalize", "", 0, f_capitalize },
    { "count", "", 0, f_length },
    { "d", "default_value boolean", 0, f_default },
    { "default", "default_value boolean", 0, f_default },
    { "e", "", 0, f_escape },
    { "escape", "", 0, f_escape },
    { "float", "default", 0, f_float },
    { "indent", "width first blank", 0, f_indent },
    { "int", "default base", 0, f_int },
    { "length", "", 0, f_length },
    { "lower", "", 0, f_lower },
    { "replace", "old new count", 2, f_replace },
    { "round", "precision method", 0, f_round },
    { "safe", "", 0, f_safe },
    { "string", "", 0, f_string },
    { "title", "", 0, f_title },
    { "tojson", "ensure_ascii indent separators sort_keys", 0, f_tojson },
    { "trim", "chars", 0, f_trim },
    { "upper", "", 0, f_upper },
    { NULL, NULL, 0, NULL },
};
