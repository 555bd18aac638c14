/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_ops.c - arithmetic with Python's rules; integers beyond 64 bits are an error, never wrap. */
#include <math.h>
#include <string.h>

#include "text/tmpl_value.h"

static tmpl_val overflow(tmpl_run *r)
{
    tmpl_fail(r, KVD_E_INVAL, "an integer exceeds 64 bits");
    return tmpl_undef(NULL);
}

static tmpl_val by_zero(tmpl_run *r)
{
    tmpl_fail(r, KVD_E_INVAL, "division by zero");
    return tmpl_undef(NULL);
}

static tmpl_val int_power(tmpl_run *r, int64_t a, int64_t b)
{
    int64_t v = 1;

    if (b < 0)
        return a == 0 ? by_zero(r) : tmpl_float(pow((double)a, (double)b));
    if (b > 64 && a != 0 && a != 1 && a != -1)
        return overflow(r);
    if (b > 64)
        b = 64 + (b & 1);
    for (; b; b--) {
        if (__builtin_mul_overflow(v, a, &v))
            return overflow(r);
    }
    return tmpl_int(v);
}

/* Floor division and its remainder, which has the sign of b; b != 0 and not (min, -1). */
static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static tmpl_val int_arith(tmpl_run *r, int op, int64_t a, int64_t b)
{
    int64_t v = 0;
    bool    bad;

    switch (op) {
    case '+':
        bad = __builtin_add_overflow(a, b, &v);
        break;
    case '-':
        bad = __builtin_sub_overflow(a, b, &v);
        break;
    case '*':
        bad = __builtin_mul_overflow(a, b, &v);
        break;
    case '/':
        return b == 0 ? by_zero(r) : tmpl_float((double)a / (double)b);
    case '%':
    case TMPL_OP_FLOOR:
        if (b == 0)
            return by_zero(r);
        bad = a == INT64_MIN && b == -1;
        if (bad && op == '%')
            return tmpl_int(0);
        if (!bad)
            v = op == '%' ? a - floor_div(a, b) * b : floor_div(a, b);
        break;
    default:
        return int_power(r, a, b);
    }
    return bad ? overflow(r) : tmpl_int(v);
}

static tmpl_val float_arith(tmpl_run *r, int op, double a, double b)
{
    double m;

    switch (op) {
    case '+':
        return tmpl_float(a + b);
    case '-':
        return tmpl_float(a - b);
    case '*':
        return tmpl_float(a * b);
    case '/':
        return b == 0 ? by_zero(r) : tmpl_float(a / b);
    case '%':
    case TMPL_OP_FLOOR:
        if (b == 0)
            return by_zero(r);
        m = fmod(a, b);
        if (m != 0 && (m < 0) != (b < 0))
            m += b;
        else if (m == 0)
            m = copysign(0.0, b);
        return tmpl_float(op == '%' ? m : floor((a - m) / b + 0.5));
    default:
        break;
    }
    if (a < 0 && b != floor(b)) {
        tmpl_fail(r, KVD_E_UNSUPPORTED, "a complex number");
        return tmpl_undef(NULL);
    }
    return a == 0 && b < 0 ? by_zero(r) : tmpl_float(pow(a, b));
}

/* Of a plain string and one that is markup the plain one is escaped first. */
static tmpl_val join_strs(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    tmpl_val x = *a, y = *b, v;

    if (a->markup && !b->markup)
        y = tmpl_str_escape(r, b->u.s);
    if (b->markup && !a->markup)
        x = tmpl_str_escape(r, a->u.s);
    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    v        = tmpl_str_concat(r, x.u.s, y.u.s);
    v.markup = a->markup || b->markup;
    return v;
}

static tmpl_val repeat_str(tmpl_run *r, const tmpl_val *v, int64_t n)
{
    const tmpl_str *s = v->u.s;
    tmpl_val        out;
    tmpl_sb         sb;
    uint64_t        total;

    tmpl_sb_init(&sb, r);
    if (n > 0 && s->len && (!kvd_mul((uint64_t)n, s->len, &total) || total > r->bytes.limit)) {
        tmpl_fail(r, KVD_E_INVAL, "a repeated string needs too much memory");
        return tmpl_undef(NULL);
    }
    for (int64_t i = 0; i < n && s->len && tmpl_step(r, i % 4 == 0); i++)
        tmpl_sb_put_str(&sb, s);
    out        = tmpl_sb_take(&sb);
    out.markup = v->markup;
    return out;
}

static tmpl_val repeat_seq(tmpl_run *r, const tmpl_val *v, int64_t n)
{
    const tmpl_seq *s = v->u.seq;
    tmpl_seq       *out;
    uint64_t        total;

    if (n < 0)
        n = 0;
    if (!kvd_mul((uint64_t)n, s->n, &total) || total > r->mem.limit / sizeof(tmpl_val)) {
        tmpl_fail(r, KVD_E_INVAL, "a repeated list needs too much memory");
        return tmpl_undef(NULL);
    }
    out = tmpl_seq_new(r, total);
    for (size_t i = 0; out && i < total; i++)
        out->item[i] = s->item[i % s->n];
    return tmpl_of_seq(v->kind, out);
}

static tmpl_val join_seqs(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    const size_t n   = a->u.seq->n;
    tmpl_seq    *out = tmpl_seq_new(r, n + b->u.seq->n);

    for (size_t i = 0; out && i < out->n; i++)
        out->item[i] = i < n ? a->u.seq->item[i] : b->u.seq->item[i - n];
    return tmpl_of_seq(a->kind, out);
}

static bool is_int(const tmpl_val *v)
{
    return v->kind == TV_INT || v->kind == TV_BOOL;
}

static bool is_list(const tmpl_val *v)
{
    return v->kind == TV_LIST || v->kind == TV_TUPLE;
}

static tmpl_val mismatch(tmpl_run *r, int op, const tmpl_val *a, const tmpl_val *b)
{
    const tmpl_val *undef = a->kind == TV_UNDEF ? a : b->kind == TV_UNDEF ? b : NULL;

    if (undef)
        tmpl_fail(r, KVD_E_INVAL, "'%.*s' is undefined",
                  undef->u.s ? (int)kvd_min_u64(undef->u.s->len, 60) : 5,
                  undef->u.s ? undef->u.s->data : "value");
    else if (a->kind == TV_DIGITS || b->kind == TV_DIGITS)
        return overflow(r);
    else if (op == '%' && a->kind == TV_STR)
        tmpl_fail(r, KVD_E_UNSUPPORTED, "string formatting with '%%' is not supported");
    else
        tmpl_fail(r, KVD_E_INVAL, "unsupported operand types for %s: '%s' and '%s'",
                  op == '+'             ? "+"
                  : op == '-'           ? "-"
                  : op == '*'           ? "*"
                  : op == '/'           ? "/"
                  : op == '%'           ? "%"
                  : op == TMPL_OP_FLOOR ? "//"
                                        : "**",
                  tmpl_type_name(a), tmpl_type_name(b));
    return tmpl_undef(NULL);
}

tmpl_val tmpl_arith(tmpl_run *r, int op, const tmpl_val *a, const tmpl_val *b)
{
    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    if (tmpl_is_number(a) && tmpl_is_number(b)) {
        tmpl_val v = is_int(a) && is_int(b)
                         ? int_arith(r, op, tmpl_as_int(a), tmpl_as_int(b))
                         : float_arith(r, op, tmpl_as_float(a), tmpl_as_float(b));

        v.trusted = a->trusted && b->trusted;
        return v;
    }
    if (op == '+' && a->kind == TV_STR && b->kind == TV_STR)
        return join_strs(r, a, b);
    if (op == '+' && is_list(a) && a->kind == b->kind)
        return join_seqs(r, a, b);
    if (op == '*' && is_int(b) && a->kind == TV_STR)
        return repeat_str(r, a, tmpl_as_int(b));
    if (op == '*' && is_int(a) && b->kind == TV_STR)
        return repeat_str(r, b, tmpl_as_int(a));
    if (op == '*' && is_int(b) && is_list(a))
        return repeat_seq(r, a, tmpl_as_int(b));
    if (op == '*' && is_int(a) && is_list(b))
        return repeat_seq(r, b, tmpl_as_int(a));
    return mismatch(r, op, a, b);
}

tmpl_val tmpl_negate(tmpl_run *r, const tmpl_val *v, bool minus)
{
    const tmpl_val zero = { .kind = TV_INT, .trusted = true };
    tmpl_val       out;

    if (v->kind == TV_FLOAT) {
        out         = tmpl_float(minus ? -v->u.f : v->u.f);
        out.trusted = v->trusted;
        return out;
    }
    if (v->kind != TV_UNDEF && !tmpl_is_number(v)) {
        tmpl_fail(r, KVD_E_INVAL, "bad operand type for unary %c: '%s'", minus ? '-' : '+',
                  tmpl_type_name(v));
        return tmpl_undef(NULL);
    }
    return tmpl_arith(r, minus ? '-' : '+', &zero, v);
}
