/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_expr.c - the expression grammar, with Jinja's precedences:
 * inline if < or < and < not < comparisons, in < + - < ~ < * / // % < ** < signs < postfix, filters
 * and tests.  Recursion is bounded by tmpl_parse_enter(). */
#include <stdlib.h>
#include <string.h>

#include "text/tmpl_ast.h"

static tmpl_node *parse_unary(tmpl_parser *p, bool with_filters);

static tmpl_node *node_lit(tmpl_parser *p, tmpl_val v)
{
    tmpl_node *n = tmpl_node_new(p, TN_LIT, NULL, NULL, NULL);

    if (n) {
        v.trusted = true;
        n->lit    = v;
    }
    return n;
}

static tmpl_node *parse_int(tmpl_parser *p)
{
    const char *s    = p->tok->text;
    size_t      i    = 0;
    uint64_t    v    = 0;
    uint64_t    base = 10;

    if (p->tok->len > 2 && s[0] == '0' && !(s[1] >= '0' && s[1] <= '9') && s[1] != '_') {
        base = (s[1] | 0x20) == 'x' ? 16 : (s[1] | 0x20) == 'o' ? 8 : 2;
        i    = 2;
    }
    for (; i < p->tok->len; i++) {
        const char     c = s[i];
        const uint64_t d = (uint64_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);

        if (c == '_')
            continue;
        if (!kvd_mul(v, base, &v) || !kvd_add(v, d, &v) || v > INT64_MAX) {
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "integer %.*s exceeds 64 bits",
                            (int)kvd_min_u64(p->tok->len, 40), s);
            return NULL;
        }
    }
    tmpl_parse_next(p);
    return node_lit(p, tmpl_int((int64_t)v));
}

/* The decimal point of strtod() depends on the locale: digits and an exponent do not. */
static tmpl_node *parse_float(tmpl_parser *p)
{
    char   text[80];
    size_t n = 0, frac = 0, i = 0;
    bool   point = false;
    long   exp   = 0;

    for (; i < p->tok->len && n < 60; i++) {
        const char c = p->tok->text[i];

        if (c == 'e' || c == 'E')
            break;
        if (c == '.')
            point = true;
        else if (c != '_') {
            text[n++] = c;
            frac += point;
        }
    }
    if (i < p->tok->len && n < 60) {
        char   digits[16];
        size_t k = 0;

        for (i++; i < p->tok->len && k < 8; i++) {
            if (p->tok->text[i] != '_')
                digits[k++] = p->tok->text[i];
        }
        digits[k] = 0;
        exp       = strtol(digits, NULL, 10);
    }
    if (i < p->tok->len) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "a number of %zu digits", p->tok->len);
        return NULL;
    }
    exp -= (long)frac;
    text[n++] = 'e';
    text[n++] = exp < 0 ? '-' : '+';
    exp       = labs(exp);
    for (long unit = 100000000; unit; unit /= 10)
        text[n++] = (char)('0' + exp / unit % 10);
    text[n] = 0;
    tmpl_parse_next(p);
    return node_lit(p, tmpl_float(strtod(text, NULL)));
}

/* Adjacent strings are one. */
static tmpl_node *parse_string(tmpl_parser *p)
{
    const tmpl_token *first = p->tok;
    size_t            len = 0, n = 0;
    char             *text;

    for (const tmpl_token *t = first; t->kind == TT_STR; t++)
        len += t->len;
    text = tmpl_parse_alloc(p, len + 1, 1);
    if (!text)
        return NULL;
    for (; p->tok->kind == TT_STR; tmpl_parse_next(p)) {
        if (p->tok->len)
            memcpy(text + n, p->tok->text, p->tok->len);
        n += p->tok->len;
    }
    return node_lit(p, tmpl_of_str(tmpl_parse_str(p, text, len)));
}

static tmpl_node *parse_list(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_LIST, NULL, NULL, NULL);

    tmpl_parse_next(p);
    while (p->st == KVD_OK && !tmpl_parse_at(p, ']')) {
        tmpl_node_push(p, n, tmpl_parse_expr(p, true));
        if (!tmpl_parse_at(p, ']'))
            tmpl_parse_expect(p, ',');
    }
    tmpl_parse_expect(p, ']');
    return n;
}

static tmpl_node *parse_dict(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_DICT, NULL, NULL, NULL);

    tmpl_parse_next(p);
    while (p->st == KVD_OK && !tmpl_parse_at(p, '}')) {
        tmpl_node_push(p, n, tmpl_parse_expr(p, true));
        tmpl_parse_expect(p, ':');
        tmpl_node_push(p, n, tmpl_parse_expr(p, true));
        if (!tmpl_parse_at(p, '}'))
            tmpl_parse_expect(p, ',');
    }
    tmpl_parse_expect(p, '}');
    return n;
}

static tmpl_node *parse_name(tmpl_parser *p)
{
    static const char *const word[] = { "true", "True", "false", "False", "none", "None" };

    for (size_t i = 0; i < KVD_COUNTOF(word); i++) {
        if (tmpl_parse_skip_name(p, word[i]))
            return node_lit(p, i < 4 ? tmpl_bool(i < 2) : tmpl_none());
    }
    return tmpl_parse_name(p);
}

static tmpl_node *parse_primary(tmpl_parser *p)
{
    tmpl_node *n;

    switch (p->tok->kind) {
    case TT_NAME:
        return parse_name(p);
    case TT_STR:
        return parse_string(p);
    case TT_INT:
        return parse_int(p);
    case TT_FLOAT:
        return parse_float(p);
    default:
        break;
    }
    if (tmpl_parse_at(p, '['))
        return parse_list(p);
    if (tmpl_parse_at(p, '{'))
        return parse_dict(p);
    if (tmpl_parse_skip(p, '(')) {
        n = tmpl_parse_tuple(p, true, true);
        tmpl_parse_expect(p, ')');
        return n;
    }
    tmpl_parse_unexpected(p);
    return NULL;
}

/* (a, b, key=c) into n->list, n_pos and kw; the current token is the bracket. */
static void parse_args(tmpl_parser *p, tmpl_node *n)
{
    const tmpl_str **kw  = NULL;
    uint32_t         cap = 0, n_kw = 0;

    tmpl_parse_expect(p, '(');
    while (p->st == KVD_OK && !tmpl_parse_at(p, ')')) {
        if (tmpl_parse_at(p, '*') || tmpl_parse_at(p, TMPL_OP2('*', '*'))) {
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "unpacking '*' in a call");
            return;
        }
        if (p->tok->kind == TT_NAME && p->tok[1].kind == TT_OP && p->tok[1].op == '=') {
            if (n_kw == cap) {
                const tmpl_str **grown =
                    tmpl_parse_alloc(p, cap ? cap * 2 : 4, sizeof(const tmpl_str *));

                if (!grown)
                    return;
                if (n_kw)
                    memcpy(grown, kw, n_kw * sizeof(*kw));
                kw  = grown;
                cap = cap ? cap * 2 : 4;
            }
            kw[n_kw++] = tmpl_parse_str(p, p->tok->text, p->tok->len);
            tmpl_parse_next(p);
            tmpl_parse_next(p);
        } else if (n_kw) {
            tmpl_parse_unexpected(p);
        }
        tmpl_node_push(p, n, tmpl_parse_expr(p, true));
        if (!tmpl_parse_at(p, ')'))
            tmpl_parse_expect(p, ',');
    }
    tmpl_parse_expect(p, ')');
    if (n && p->st == KVD_OK) {
        n->n_pos = n->n - n_kw;
        n->kw    = kw;
    }
}

/* What is called must be something we know: a method by name, or a plain name. */
static tmpl_node *parse_call(tmpl_parser *p, tmpl_node *callee)
{
    tmpl_node *n = tmpl_node_new(p, TN_CALL, callee, NULL, NULL);

    if (!n)
        return NULL;
    if (callee->kind == TN_ATTR) {
        if (!tmpl_method_runs(callee->name->data, callee->name->len) &&
            !tmpl_method_mutates(callee->name->data, callee->name->len)) {
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "method '.%.*s()'",
                            (int)kvd_min_u64(callee->name->len, 60), callee->name->data);
            return NULL;
        }
    } else if (callee->kind == TN_NAME) {
        n->d     = p->calls; /* macros may be defined further down */
        p->calls = n;
    } else {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "a call of an expression");
        return NULL;
    }
    parse_args(p, n);
    return n;
}

static tmpl_node *parse_slice_part(tmpl_parser *p)
{
    if (tmpl_parse_at(p, ':') || tmpl_parse_at(p, ']') || tmpl_parse_at(p, ','))
        return NULL;
    return tmpl_parse_expr(p, true);
}

static tmpl_node *parse_bracket(tmpl_parser *p, tmpl_node *of)
{
    tmpl_node *part[3] = { NULL, NULL, NULL }, *n;

    tmpl_parse_next(p);
    part[0] = parse_slice_part(p);
    if (!tmpl_parse_at(p, ':')) {
        if (!part[0])
            tmpl_parse_unexpected(p);
        if (tmpl_parse_at(p, ','))
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "a tuple as subscript");
        tmpl_parse_expect(p, ']');
        return tmpl_node_new(p, TN_ITEM, of, part[0], NULL);
    }
    tmpl_parse_next(p);
    part[1] = parse_slice_part(p);
    if (tmpl_parse_skip(p, ':'))
        part[2] = parse_slice_part(p);
    tmpl_parse_expect(p, ']');
    n = tmpl_node_new(p, TN_SLICE, of, NULL, NULL);
    if (!n)
        return NULL;
    n->list = tmpl_parse_alloc(p, 3, sizeof(tmpl_node *));
    if (!n->list)
        return NULL;
    for (int i = 0; i < 3; i++) {
        n->list[i] = part[i];
        if (part[i])
            tmpl_node_raise(p, n, part[i]);
    }
    n->n = 3;
    return n;
}

static tmpl_node *parse_dot(tmpl_parser *p, tmpl_node *of)
{
    tmpl_node *n;

    tmpl_parse_next(p);
    if (p->tok->kind == TT_INT) {
        n = parse_int(p);
        return tmpl_node_new(p, TN_ITEM, of, n, NULL);
    }
    if (p->tok->kind != TT_NAME) {
        tmpl_parse_unexpected(p);
        return NULL;
    }
    n = tmpl_node_new(p, TN_ATTR, of, NULL, NULL);
    if (n)
        n->name = tmpl_parse_str(p, p->tok->text, p->tok->len);
    tmpl_parse_next(p);
    return n;
}

static tmpl_node *parse_postfix(tmpl_parser *p, tmpl_node *n)
{
    while (n && p->st == KVD_OK) {
        if (tmpl_parse_at(p, '.'))
            n = parse_dot(p, n);
        else if (tmpl_parse_at(p, '['))
            n = parse_bracket(p, n);
        else if (tmpl_parse_at(p, '('))
            n = parse_call(p, n);
        else
            break;
    }
    return n;
}

/* A filter's or test's arguments must suit it, and names given to map() and its like exist. */
static void check_args(tmpl_parser *p, const tmpl_node *n, const char *what)
{
    const tmpl_str *bad = NULL;
    const char     *why;
    const bool      by_attr = n->kind == TN_FILTER && strstr(n->fn->name, "attr") != NULL;
    const uint32_t  at      = by_attr ? 1 : 0;
    const tmpl_str *name;

    if (p->st != KVD_OK) /* the arguments are incomplete */
        return;
    why = tmpl_args_check(n->fn, n->n_pos, n->kw, n->n - n->n_pos, &bad);
    if (why) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "%s '%s' with %s%s%.*s", what, n->fn->name,
                        why, bad ? " " : "", bad ? (int)kvd_min_u64(bad->len, 60) : 0,
                        bad ? bad->data : "");
        return;
    }
    if (n->kind != TN_FILTER || n->fn->params || at >= n->n_pos || n->list[at]->kind != TN_LIT ||
        n->list[at]->lit.kind != TV_STR)
        return;
    name = n->list[at]->lit.u.s;
    if (strcmp(n->fn->name, "map") == 0 ? !tmpl_find_filter(name->data, name->len)
                                        : !tmpl_find_test(name->data, name->len))
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "'%.*s' in filter '%s'",
                        (int)kvd_min_u64(name->len, 60), name->data, n->fn->name);
}

static tmpl_node *parse_filter(tmpl_parser *p, tmpl_node *of)
{
    const tmpl_token   *name = p->tok;
    const tmpl_builtin *fn;
    tmpl_node          *n;

    if (name->kind != TT_NAME) {
        tmpl_parse_unexpected(p);
        return NULL;
    }
    fn = tmpl_find_filter(name->text, name->len);
    if (!fn) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, name->line, "filter '%.*s'",
                        (int)kvd_min_u64(name->len, 60), name->text);
        return NULL;
    }
    n = tmpl_node_new(p, TN_FILTER, of, NULL, NULL);
    tmpl_parse_next(p);
    if (!n)
        return NULL;
    n->fn = fn;
    if (tmpl_parse_at(p, '('))
        parse_args(p, n);
    check_args(p, n, "filter");
    return n;
}

/* Whether the current token begins the bracket-less argument of a test. */
static bool at_test_arg(const tmpl_parser *p)
{
    if (p->tok->kind == TT_NAME)
        return !tmpl_parse_at_name(p, "else") && !tmpl_parse_at_name(p, "or") &&
               !tmpl_parse_at_name(p, "and");
    return p->tok->kind == TT_STR || p->tok->kind == TT_INT || p->tok->kind == TT_FLOAT ||
           tmpl_parse_at(p, '[') || tmpl_parse_at(p, '{');
}

static tmpl_node *parse_test(tmpl_parser *p, tmpl_node *of)
{
    const bool        negated = tmpl_parse_skip_name(p, "not");
    const tmpl_token *name    = p->tok;
    tmpl_node        *n;

    if (name->kind != TT_NAME) {
        tmpl_parse_unexpected(p);
        return NULL;
    }
    n = tmpl_node_new(p, TN_TEST, of, NULL, NULL);
    if (!n)
        return NULL;
    n->fn = tmpl_find_test(name->text, name->len);
    if (!n->fn) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, name->line, "test '%.*s'",
                        (int)kvd_min_u64(name->len, 60), name->text);
        return NULL;
    }
    tmpl_parse_next(p);
    if (tmpl_parse_at(p, '(')) {
        parse_args(p, n);
    } else if (at_test_arg(p)) {
        if (tmpl_parse_at_name(p, "is"))
            tmpl_parse_unexpected(p);
        tmpl_node_push(p, n, parse_postfix(p, parse_primary(p)));
        n->n_pos = n->n;
    }
    check_args(p, n, "test");
    return negated ? tmpl_node_new(p, TN_NOT, n, NULL, NULL) : n;
}

tmpl_node *tmpl_parse_filters(tmpl_parser *p, tmpl_node *of, bool start)
{
    tmpl_node *n = of;

    while (p->st == KVD_OK) {
        if (start || tmpl_parse_skip(p, '|'))
            n = parse_filter(p, n);
        else if (n && tmpl_parse_skip_name(p, "is"))
            n = parse_test(p, n);
        else if (n && tmpl_parse_at(p, '('))
            n = parse_call(p, n);
        else
            break;
        start = false;
    }
    return n;
}

static tmpl_node *parse_unary(tmpl_parser *p, bool with_filters)
{
    tmpl_node *n;

    if (!tmpl_parse_enter(p))
        return NULL;
    if (tmpl_parse_skip(p, '-'))
        n = tmpl_node_new(p, TN_NEG, parse_unary(p, false), NULL, NULL);
    else if (tmpl_parse_skip(p, '+'))
        n = tmpl_node_new(p, TN_POS, parse_unary(p, false), NULL, NULL);
    else
        n = parse_primary(p);
    n = parse_postfix(p, n);
    if (with_filters && n)
        n = tmpl_parse_filters(p, n, false);
    p->nest--;
    return n;
}

static tmpl_node *node_arith(tmpl_parser *p, int op, tmpl_node *a, tmpl_node *b)
{
    tmpl_node *n = tmpl_node_new(p, TN_ARITH, a, b, NULL);

    if (n)
        n->op = op;
    if (n && op == '%' && a->kind == TN_LIT && a->lit.kind == TV_STR) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "string formatting with '%%'");
        return NULL;
    }
    return n;
}

static tmpl_node *parse_pow(tmpl_parser *p)
{
    tmpl_node *n = parse_unary(p, true);

    while (p->st == KVD_OK && tmpl_parse_skip(p, TMPL_OP2('*', '*')))
        n = node_arith(p, TMPL_OP2('*', '*'), n, parse_unary(p, true));
    return n;
}

static tmpl_node *parse_product(tmpl_parser *p)
{
    tmpl_node *n = parse_pow(p);

    while (p->st == KVD_OK && (tmpl_parse_at(p, '*') || tmpl_parse_at(p, '/') ||
                               tmpl_parse_at(p, '%') || tmpl_parse_at(p, TMPL_OP2('/', '/')))) {
        const int op = p->tok->op;

        tmpl_parse_next(p);
        n = node_arith(p, op, n, parse_pow(p));
    }
    return n;
}

static tmpl_node *parse_concat(tmpl_parser *p)
{
    tmpl_node *first = parse_product(p), *n;

    if (!tmpl_parse_at(p, '~'))
        return first;
    n = tmpl_node_new(p, TN_CONCAT, NULL, NULL, NULL);
    tmpl_node_push(p, n, first);
    while (p->st == KVD_OK && tmpl_parse_skip(p, '~'))
        tmpl_node_push(p, n, parse_product(p));
    return n;
}

static tmpl_node *parse_sum(tmpl_parser *p)
{
    tmpl_node *n = parse_concat(p);

    while (p->st == KVD_OK && (tmpl_parse_at(p, '+') || tmpl_parse_at(p, '-'))) {
        const int op = p->tok->op;

        tmpl_parse_next(p);
        n = node_arith(p, op, n, parse_concat(p));
    }
    return n;
}

/* The comparison at the current token, which is skipped; 0: none. */
static int take_comparison(tmpl_parser *p)
{
    const int op = p->tok->kind == TT_OP ? p->tok->op : 0;

    if (op == '<' || op == '>' || op == TMPL_OP2('=', '=') || op == TMPL_OP2('!', '=') ||
        op == TMPL_OP2('<', '=') || op == TMPL_OP2('>', '=')) {
        tmpl_parse_next(p);
        return op;
    }
    if (tmpl_parse_skip_name(p, "in"))
        return TMPL_OP_IN;
    if (tmpl_parse_at_name(p, "not") && p->tok[1].kind == TT_NAME && p->tok[1].len == 2 &&
        memcmp(p->tok[1].text, "in", 2) == 0) {
        tmpl_parse_next(p);
        tmpl_parse_next(p);
        return TMPL_OP_NOT_IN;
    }
    return 0;
}

static tmpl_node *parse_compare(tmpl_parser *p)
{
    tmpl_node *first = parse_sum(p), *n = NULL;
    int       *ops  = NULL;
    uint32_t   n_op = 0, cap = 0;

    while (p->st == KVD_OK) {
        const int op = take_comparison(p);

        if (!op)
            break;
        if (!n)
            n = tmpl_node_new(p, TN_COMPARE, first, NULL, NULL);
        if (n_op == cap) {
            int *grown = tmpl_parse_alloc(p, cap ? cap * 2 : 2, sizeof(*ops));

            if (!grown)
                return NULL;
            if (n_op)
                memcpy(grown, ops, n_op * sizeof(*ops));
            ops = grown;
            cap = cap ? cap * 2 : 2;
        }
        ops[n_op++] = op;
        tmpl_node_push(p, n, parse_sum(p));
    }
    if (!n)
        return first;
    n->ops = ops;
    return n;
}

static tmpl_node *parse_not(tmpl_parser *p)
{
    tmpl_node *n;

    if (!tmpl_parse_at_name(p, "not"))
        return parse_compare(p);
    if (!tmpl_parse_enter(p))
        return NULL;
    tmpl_parse_next(p);
    n = tmpl_node_new(p, TN_NOT, parse_not(p), NULL, NULL);
    p->nest--;
    return n;
}

static tmpl_node *parse_and(tmpl_parser *p)
{
    tmpl_node *n = parse_not(p);

    while (p->st == KVD_OK && tmpl_parse_skip_name(p, "and"))
        n = tmpl_node_new(p, TN_AND, n, parse_not(p), NULL);
    return n;
}

static tmpl_node *parse_or(tmpl_parser *p)
{
    tmpl_node *n = parse_and(p);

    while (p->st == KVD_OK && tmpl_parse_skip_name(p, "or"))
        n = tmpl_node_new(p, TN_OR, n, parse_and(p), NULL);
    return n;
}

tmpl_node *tmpl_parse_expr(tmpl_parser *p, bool with_cond)
{
    tmpl_node *n, *cond, *other;

    if (!tmpl_parse_enter(p))
        return NULL;
    n = parse_or(p);
    while (with_cond && p->st == KVD_OK && tmpl_parse_skip_name(p, "if")) {
        cond  = parse_or(p);
        other = tmpl_parse_skip_name(p, "else") ? tmpl_parse_expr(p, true) : NULL;
        n     = tmpl_node_new(p, TN_COND, cond, n, other);
    }
    p->nest--;
    return n;
}

static bool at_tuple_end(const tmpl_parser *p)
{
    return p->tok->kind == TT_VAR_END || p->tok->kind == TT_BLOCK_END || tmpl_parse_at(p, ')') ||
           tmpl_parse_at_name(p, "recursive");
}

tmpl_node *tmpl_parse_tuple(tmpl_parser *p, bool with_cond, bool parens)
{
    tmpl_node *n = NULL, *first = NULL;

    if (!at_tuple_end(p)) {
        first = tmpl_parse_expr(p, with_cond);
        if (!tmpl_parse_at(p, ','))
            return first;
    } else if (!parens) {
        tmpl_parse_unexpected(p);
        return NULL;
    }
    n = tmpl_node_new(p, TN_TUPLE, NULL, NULL, NULL);
    if (first)
        tmpl_node_push(p, n, first);
    while (p->st == KVD_OK && tmpl_parse_skip(p, ',') && !at_tuple_end(p))
        tmpl_node_push(p, n, tmpl_parse_expr(p, with_cond));
    return n;
}
