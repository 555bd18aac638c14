/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_test.c - what can stand after "is", and as a test's name in select() and its like. */
#include "text/tmpl_builtin.h"

#define KIND_TEST(fn, condition)                        \
    static tmpl_val fn(tmpl_run *r, const tmpl_args *a) \
    {                                                   \
        const tmpl_kind k = a->self.kind;               \
                                                        \
        (void)r;                                        \
        (void)k;                                        \
        return tmpl_bool(condition);                    \
    }
KIND_TEST(t_defined, k != TV_UNDEF)
KIND_TEST(t_undefined, k == TV_UNDEF)
KIND_TEST(t_none, k == TV_NONE)
KIND_TEST(t_boolean, k == TV_BOOL)
KIND_TEST(t_true, k == TV_BOOL && a->self.u.b)
KIND_TEST(t_false, k == TV_BOOL && !a->self.u.b)
KIND_TEST(t_integer, k == TV_INT || k == TV_DIGITS)
KIND_TEST(t_float, k == TV_FLOAT)
KIND_TEST(t_number, k == TV_INT || k == TV_FLOAT || k == TV_DIGITS || k == TV_BOOL)
KIND_TEST(t_string, k == TV_STR)
KIND_TEST(t_mapping, k == TV_DICT)
KIND_TEST(t_iterable, tmpl_is_iterable(&a->self))
KIND_TEST(t_sequence,
          k == TV_UNDEF || k == TV_STR || (k >= TV_LIST && k <= TV_RANGE) || k == TV_DICT)
KIND_TEST(t_callable, k == TV_UNDEF || (k >= TV_MACRO && k <= TV_JOINER))
KIND_TEST(t_escaped, k == TV_STR && a->self.markup)

static tmpl_val by_order(tmpl_run *r, const tmpl_args *a, bool less, bool equal, bool greater)
{
    const int c = tmpl_order(r, &a->self, &a->v[0]);

    return tmpl_bool(c != 2 && (c < 0 ? less : c > 0 ? greater : equal));
}

static tmpl_val t_lt(tmpl_run *r, const tmpl_args *a)
{
    return by_order(r, a, true, false, false);
}

static tmpl_val t_le(tmpl_run *r, const tmpl_args *a)
{
    return by_order(r, a, true, true, false);
}

static tmpl_val t_gt(tmpl_run *r, const tmpl_args *a)
{
    return by_order(r, a, false, false, true);
}

static tmpl_val t_ge(tmpl_run *r, const tmpl_args *a)
{
    return by_order(r, a, false, true, true);
}

static tmpl_val t_eq(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_bool(tmpl_equal(r, &a->self, &a->v[0]));
}

static tmpl_val t_ne(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_bool(!tmpl_equal(r, &a->self, &a->v[0]));
}

static tmpl_val t_in(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_bool(tmpl_contains(r, &a->v[0], &a->self));
}

/* Identity: of constants by value, of small integers too (Python keeps one of each). */
static tmpl_val t_sameas(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val *x = &a->self, *y = &a->v[0];

    (void)r;
    if (x->kind != y->kind)
        return tmpl_bool(false);
    switch (x->kind) {
    case TV_NONE:
        return tmpl_bool(true);
    case TV_BOOL:
        return tmpl_bool(x->u.b == y->u.b);
    case TV_INT:
        return tmpl_bool(x->u.i == y->u.i);
    case TV_FLOAT:
        return tmpl_bool(false);
    default:
        return tmpl_bool(x->u.seq == y->u.seq);
    }
}

static tmpl_val remainder_is(tmpl_run *r, const tmpl_args *a, const tmpl_val *by, int64_t want)
{
    const tmpl_val rest = tmpl_arith(r, '%', &a->self, by), w = tmpl_int(want);

    return r->st == KVD_OK ? tmpl_bool(tmpl_equal(r, &rest, &w)) : rest;
}

static tmpl_val t_odd(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val two = tmpl_int(2);

    return remainder_is(r, a, &two, 1);
}

static tmpl_val t_even(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val two = tmpl_int(2);

    return remainder_is(r, a, &two, 0);
}

static tmpl_val t_divisibleby(tmpl_run *r, const tmpl_args *a)
{
    return remainder_is(r, a, &a->v[0], 0);
}

static tmpl_val t_lower(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *s = tmpl_to_str(r, &a->self);

    return tmpl_bool(s && tmpl_str_all(r, s, "lower"));
}

static tmpl_val t_upper(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *s = tmpl_to_str(r, &a->self);

    return tmpl_bool(s && tmpl_str_all(r, s, "upper"));
}

const tmpl_builtin tmpl_tests[] = {
    { "!=", "other", 1, t_ne },        { "<", "other", 1, t_lt },
    { "<=", "other", 1, t_le },        { "==", "other", 1, t_eq },
    { ">", "other", 1, t_gt },         { ">=", "other", 1, t_ge },
    { "boolean", "", 0, t_boolean },   { "callable", "", 0, t_callable },
    { "defined", "", 0, t_defined },   { "divisibleby", "num", 1, t_divisibleby },
    { "eq", "other", 1, t_eq },        { "equalto", "other", 1, t_eq },
    { "escaped", "", 0, t_escaped },   { "even", "", 0, t_even },
    { "false", "", 0, t_false },       { "float", "", 0, t_float },
    { "ge", "other", 1, t_ge },        { "greaterthan", "other", 1, t_gt },
    { "gt", "other", 1, t_gt },        { "in", "seq", 1, t_in },
    { "integer", "", 0, t_integer },   { "iterable", "", 0, t_iterable },
    { "le", "other", 1, t_le },        { "lessthan", "other", 1, t_lt },
    { "lower", "", 0, t_lower },       { "lt", "other", 1, t_lt },
    { "mapping", "", 0, t_mapping },   { "ne", "other", 1, t_ne },
    { "none", "", 0, t_none },         { "number", "", 0, t_number },
    { "odd", "", 0, t_odd },           { "sameas", "other", 1, t_sameas },
    { "sequence", "", 0, t_sequence }, { "string", "", 0, t_string },
    { "true", "", 0, t_true },         { "undefined", "", 0, t_undefined },
    { "upper", "", 0, t_upper },       { NULL, NULL, 0, NULL },
};
