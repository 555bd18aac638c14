/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_parse.c - statements, and the services the expression grammar stands on.
 *
 * Every construct we do not run is refused here, by name and line.  The parser's error is sticky:
 * once it has failed, node constructors give NULL and every loop ends. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/tmpl_ast.h"

static tmpl_node *parse_body(tmpl_parser *p, const char *const *ends);

/* ---- services -------------------------------------------------------------------- */

void tmpl_parse_fail(tmpl_parser *p, kvd_status st, uint32_t line, const char *fmt, ...)
{
    char    what[256];
    va_list ap;

    if (p->st != KVD_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    p->st = st == KVD_E_UNSUPPORTED
                ? kvd_fail(p->err, st, 0, "chat template line %u: %s is not supported", line, what)
                : kvd_fail(p->err, st, 0, "chat template line %u: %s", line, what);
}

bool tmpl_parse_enter(tmpl_parser *p)
{
    if (p->st == KVD_OK && p->nest >= TMPL_MAX_NEST)
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "nesting deeper than %u levels",
                        TMPL_MAX_NEST);
    if (p->st != KVD_OK)
        return false;
    p->nest++;
    return true;
}

void tmpl_parse_next(tmpl_parser *p)
{
    if (p->tok->kind != TT_EOF)
        p->tok++;
}

bool tmpl_parse_at(const tmpl_parser *p, int op)
{
    return p->tok->kind == TT_OP && p->tok->op == op;
}

bool tmpl_parse_at_name(const tmpl_parser *p, const char *name)
{
    return p->tok->kind == TT_NAME && p->tok->len == strlen(name) &&
           memcmp(p->tok->text, name, p->tok->len) == 0;
}

bool tmpl_parse_skip(tmpl_parser *p, int op)
{
    if (!tmpl_parse_at(p, op))
        return false;
    tmpl_parse_next(p);
    return true;
}

bool tmpl_parse_skip_name(tmpl_parser *p, const char *name)
{
    if (!tmpl_parse_at_name(p, name))
        return false;
    tmpl_parse_next(p);
    return true;
}

void tmpl_parse_unexpected(tmpl_parser *p)
{
    static const char *const kind[] = { "the end of the template", "text", "'{{'", "'}}'", "'{%'",
                                        "the end of a tag" };
    const tmpl_token        *t      = p->tok;

    if (t->kind <= TT_BLOCK_END)
        tmpl_parse_fail(p, KVD_E_INVAL, t->line, "unexpected %s", kind[t->kind]);
    else
        tmpl_parse_fail(p, KVD_E_INVAL, t->line, "unexpected '%.*s'", (int)kvd_min_u64(t->len, 60),
                        t->text);
}

void tmpl_parse_expect(tmpl_parser *p, int op)
{
    if (p->st == KVD_OK && !tmpl_parse_skip(p, op))
        tmpl_parse_unexpected(p);
}

static void expect_kind(tmpl_parser *p, tmpl_tok_kind kind)
{
    if (p->st != KVD_OK)
        return;
    if (p->tok->kind == kind)
        tmpl_parse_next(p);
    else
        tmpl_parse_unexpected(p);
}

void *tmpl_parse_alloc(tmpl_parser *p, size_t n, size_t bytes)
{
    void *q = p->st == KVD_OK ? kvd_arena_calloc(&p->t->mem, n, bytes) : NULL;

    if (!q)
        tmpl_parse_fail(p, KVD_E_NOMEM, p->tok->line, "no memory to compile it");
    return q;
}

/* Takes the height of a child into account. */
void tmpl_node_raise(tmpl_parser *p, tmpl_node *n, const tmpl_node *child)
{
    if (!child || child->height < n->height)
        return;
    n->height = child->height + 1;
    if (n->height > TMPL_MAX_NEST)
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "nesting deeper than %u levels",
                        TMPL_MAX_NEST);
}

tmpl_node *tmpl_node_new(tmpl_parser *p, tmpl_node_kind kind, tmpl_node *a, tmpl_node *b,
                         tmpl_node *c)
{
    tmpl_node *n = tmpl_parse_alloc(p, 1, sizeof(*n));

    if (!n)
        return NULL;
    n->kind = kind;
    n->line = p->tok->line;
    n->sym  = TMPL_NO_SYM;
    n->a    = a;
    n->b    = b;
    n->c    = c;
    tmpl_node_raise(p, n, a);
    tmpl_node_raise(p, n, b);
    tmpl_node_raise(p, n, c);
    return p->st == KVD_OK ? n : NULL;
}

/* Room for one more in a list whose length is n: its capacity is the next power of two. */
static tmpl_node **list_room(tmpl_parser *p, tmpl_node **list, uint32_t n)
{
    tmpl_node **grown;

    if (n != 0 && (n < 4 || (n & (n - 1)) != 0))
        return list;
    grown = tmpl_parse_alloc(p, n < 4 ? 4 : (size_t)n * 2, sizeof(tmpl_node *));
    if (grown && n)
        memcpy(grown, list, n * sizeof(tmpl_node *));
    return grown;
}

void tmpl_node_push(tmpl_parser *p, tmpl_node *list_of, tmpl_node *item)
{
    tmpl_node **list;

    if (p->st != KVD_OK || !list_of || !item)
        return;
    list = list_room(p, list_of->list, list_of->n);
    if (!list)
        return;
    list_of->list               = list;
    list_of->list[list_of->n++] = item;
    tmpl_node_raise(p, list_of, item);
}

const tmpl_str *tmpl_parse_str(tmpl_parser *p, const char *text, size_t len)
{
    tmpl_str *s    = tmpl_parse_alloc(p, 1, sizeof(*s));
    kvd_span *span = tmpl_parse_alloc(p, 1, sizeof(*span));

    if (!s || !span)
        return NULL;
    *span     = (kvd_span){ 0, len };
    *s        = (tmpl_str){ .data = text, .len = len, .n_char = TMPL_UNKNOWN };
    s->n_char = tmpl_str_chars(s); /* literals are shared by threads: nothing is left to fill in */
    if (len) {
        s->span   = span;
        s->n_span = 1;
    }
    return s;
}

/* ---- names ----------------------------------------------------------------------- */

static uint32_t hash_name(const char *name, size_t len)
{
    uint32_t h = 2166136261u;

    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)name[i]) * 16777619u;
    return h;
}

uint32_t tmpl_sym_find(const tmpl *t, const char *name, size_t len)
{
    if (t->cap_hash == 0)
        return TMPL_NO_SYM;
    for (uint32_t i = hash_name(name, len);; i++) {
        const uint32_t at = t->hash[i & (t->cap_hash - 1)];

        if (at == 0)
            return TMPL_NO_SYM;
        if (t->sym[at - 1].name->len == len && memcmp(t->sym[at - 1].name->data, name, len) == 0)
            return at - 1;
    }
}

static void hash_put(tmpl *t, uint32_t sym)
{
    uint32_t i = hash_name(t->sym[sym].name->data, t->sym[sym].name->len);

    while (t->hash[i & (t->cap_hash - 1)])
        i++;
    t->hash[i & (t->cap_hash - 1)] = sym + 1;
}

static bool syms_grow(tmpl_parser *p)
{
    tmpl          *t    = p->t;
    const uint32_t cap  = t->cap_sym ? t->cap_sym * 2 : 32;
    tmpl_sym      *sym  = tmpl_parse_alloc(p, cap, sizeof(*sym));
    uint32_t      *hash = tmpl_parse_alloc(p, cap * 2, sizeof(*hash));

    if (!sym || !hash)
        return false;
    if (t->n_sym)
        memcpy(sym, t->sym, t->n_sym * sizeof(*sym));
    t->sym      = sym;
    t->cap_sym  = cap;
    t->hash     = hash;
    t->cap_hash = cap * 2;
    for (uint32_t i = 0; i < t->n_sym; i++)
        hash_put(t, i);
    return true;
}

uint32_t tmpl_parse_sym(tmpl_parser *p, const char *name, size_t len)
{
    tmpl    *t  = p->t;
    uint32_t at = tmpl_sym_find(t, name, len);

    if (at != TMPL_NO_SYM || p->st != KVD_OK)
        return at;
    if (t->n_sym == t->cap_sym && !syms_grow(p))
        return TMPL_NO_SYM;
    at              = t->n_sym;
    t->sym[at].name = tmpl_parse_str(p, name, len);
    if (!t->sym[at].name)
        return TMPL_NO_SYM;
    t->sym[at].global = tmpl_find_global(name, len);
    t->n_sym++;
    hash_put(t, at);
    return at;
}

tmpl_node *tmpl_parse_name(tmpl_parser *p)
{
    tmpl_node *n;

    if (p->tok->kind != TT_NAME || (p->tok->text[0] >= '0' && p->tok->text[0] <= '9')) {
        tmpl_parse_unexpected(p);
        return NULL;
    }
    n = tmpl_node_new(p, TN_NAME, NULL, NULL, NULL);
    if (!n)
        return NULL;
    if (p->n_macro && (tmpl_parse_at_name(p, "varargs") || tmpl_parse_at_name(p, "kwargs"))) {
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "'%.*s' in a macro", (int)p->tok->len,
                        p->tok->text);
        return NULL;
    }
    n->sym = tmpl_parse_sym(p, p->tok->text, p->tok->len);
    if (n->sym == TMPL_NO_SYM)
        return NULL;
    n->name = p->t->sym[n->sym].name;
    tmpl_parse_next(p);
    return n;
}

/* ---- assignment targets ---------------------------------------------------------- */

static tmpl_node *parse_target_name(tmpl_parser *p, bool with_attr)
{
    static const char *const reserved[] = { "true", "True", "false", "False", "none", "None" };
    tmpl_node               *n;

    for (size_t i = 0; i < KVD_COUNTOF(reserved); i++) {
        if (tmpl_parse_at_name(p, reserved[i]))
            tmpl_parse_unexpected(p);
    }
    n = tmpl_parse_name(p);
    if (!n)
        return NULL;
    if (with_attr && tmpl_parse_skip(p, '.')) {
        if (p->tok->kind != TT_NAME) {
            tmpl_parse_unexpected(p);
            return NULL;
        }
        if (p->tok->text[0] == '_') {
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "namespace attribute '%.*s'",
                            (int)kvd_min_u64(p->tok->len, 60), p->tok->text);
            return NULL;
        }
        n->kind = TN_NS_ATTR;
        n->name = tmpl_parse_str(p, p->tok->text, p->tok->len);
        tmpl_parse_next(p);
        return n;
    }
    p->t->sym[n->sym].assigned = true;
    return n;
}

static tmpl_node *parse_target(tmpl_parser *p, bool with_attr)
{
    tmpl_node *n = NULL, *first;

    if (!tmpl_parse_enter(p))
        return NULL;
    if (tmpl_parse_skip(p, '(')) {
        first = parse_target(p, with_attr);
        tmpl_parse_expect(p, ')');
    } else {
        first = parse_target_name(p, with_attr);
    }
    if (tmpl_parse_at(p, ',')) {
        n = tmpl_node_new(p, TN_TUPLE, NULL, NULL, NULL);
        tmpl_node_push(p, n, first);
        while (p->st == KVD_OK && tmpl_parse_skip(p, ',')) {
            if (tmpl_parse_at(p, '(')) {
                tmpl_parse_next(p);
                tmpl_node_push(p, n, parse_target(p, with_attr));
                tmpl_parse_expect(p, ')');
            } else if (p->tok->kind == TT_NAME && !tmpl_parse_at_name(p, "in")) {
                tmpl_node_push(p, n, parse_target_name(p, with_attr));
            }
        }
        first = n;
    }
    p->nest--;
    return first;
}

/* ---- statements ------------------------------------------------------------------ */

static const char *const end_if[]     = { "elif", "else", "endif", NULL };
static const char *const end_last[]   = { "endif", NULL };
static const char *const end_for[]    = { "else", "endfor", NULL };
static const char *const end_endfor[] = { "endfor", NULL };

static tmpl_node *parse_if(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_IF, NULL, NULL, NULL);

    while (p->st == KVD_OK) {
        tmpl_node_push(p, n, tmpl_parse_tuple(p, false, false));
        expect_kind(p, TT_BLOCK_END);
        tmpl_node_push(p, n, parse_body(p, end_if));
        if (tmpl_parse_skip_name(p, "elif"))
            continue;
        if (tmpl_parse_skip_name(p, "else")) {
            expect_kind(p, TT_BLOCK_END);
            n->c = parse_body(p, end_last);
            tmpl_node_raise(p, n, n->c);
        }
        tmpl_parse_next(p);
        break;
    }
    return n;
}

static tmpl_node *parse_for(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_FOR, NULL, NULL, NULL);

    if (!n)
        return NULL;
    n->a = parse_target(p, false);
    if (!tmpl_parse_skip_name(p, "in"))
        tmpl_parse_unexpected(p);
    n->b = tmpl_parse_tuple(p, false, false);
    if (tmpl_parse_skip_name(p, "if"))
        n->e = tmpl_parse_expr(p, true);
    if (tmpl_parse_at_name(p, "recursive"))
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "a recursive loop");
    expect_kind(p, TT_BLOCK_END);
    p->n_loop++;
    n->c = parse_body(p, end_for);
    p->n_loop--;
    if (tmpl_parse_skip_name(p, "else")) {
        expect_kind(p, TT_BLOCK_END);
        n->d = parse_body(p, end_endfor);
    }
    tmpl_parse_next(p);
    tmpl_node_raise(p, n, n->b);
    tmpl_node_raise(p, n, n->c);
    tmpl_node_raise(p, n, n->d);
    tmpl_node_raise(p, n, n->e);
    return n;
}

/* The body of a block tag that is open, up to and with the name of its end. */
static tmpl_node *parse_block_body(tmpl_parser *p, const char *end)
{
    const char *const ends[] = { end, NULL };
    tmpl_node        *body;

    expect_kind(p, TT_BLOCK_END);
    body = parse_body(p, ends);
    tmpl_parse_next(p);
    return body;
}

static tmpl_node *parse_set(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_SET, NULL, NULL, NULL);

    if (!n)
        return NULL;
    n->a = parse_target(p, true);
    if (tmpl_parse_skip(p, '=')) {
        n->b = tmpl_parse_tuple(p, true, false);
    } else {
        n->kind = TN_SET_BLOCK;
        if (tmpl_parse_at(p, '|'))
            n->b = tmpl_parse_filters(p, NULL, false);
        n->c = parse_block_body(p, "endset");
    }
    tmpl_node_raise(p, n, n->b);
    tmpl_node_raise(p, n, n->c);
    return n;
}

/* (a, b=1) of a macro or call block. */
static void parse_signature(tmpl_parser *p, tmpl_node *n)
{
    tmpl_parse_expect(p, '(');
    while (p->st == KVD_OK && !tmpl_parse_at(p, ')')) {
        tmpl_node  *param = parse_target_name(p, false), *deflt = NULL;
        tmpl_node **list = list_room(p, n->deflt, n->n);

        if (tmpl_parse_skip(p, '='))
            deflt = tmpl_parse_expr(p, true);
        else if (n->n && n->deflt[n->n - 1])
            tmpl_parse_fail(p, KVD_E_INVAL, n->line, "a parameter without default follows one");
        if (!list || p->st != KVD_OK)
            return;
        list[n->n] = deflt;
        n->deflt   = list;
        tmpl_node_push(p, n, param);
        tmpl_node_raise(p, n, deflt);
        if (!tmpl_parse_at(p, ')'))
            tmpl_parse_expect(p, ',');
    }
    tmpl_parse_expect(p, ')');
}

static void parse_macro_body(tmpl_parser *p, tmpl_node *n, const char *end)
{
    const uint32_t n_loop = p->n_loop;

    p->n_loop = 0; /* break does not reach out of a macro */
    p->n_macro++;
    n->c = parse_block_body(p, end);
    p->n_macro--;
    p->n_loop = n_loop;
    tmpl_node_raise(p, n, n->c);
}

static tmpl_node *parse_macro(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_MACRO, NULL, NULL, NULL), *name;

    name = n ? parse_target_name(p, false) : NULL;
    if (!name)
        return NULL;
    n->sym  = name->sym;
    n->name = name->name;
    parse_signature(p, n);
    parse_macro_body(p, n, "endmacro");
    return n;
}

static tmpl_node *parse_call_block(tmpl_parser *p)
{
    tmpl_node *n    = tmpl_node_new(p, TN_CALL_BLOCK, NULL, NULL, NULL);
    tmpl_node *body = tmpl_node_new(p, TN_MACRO, NULL, NULL, NULL);

    if (!n || !body)
        return NULL;
    body->name = p->t->sym[p->t->sym_caller].name;
    if (tmpl_parse_at(p, '('))
        parse_signature(p, body);
    n->a = tmpl_parse_expr(p, true);
    n->b = body;
    if (n->a && n->a->kind != TN_CALL)
        tmpl_parse_fail(p, KVD_E_INVAL, n->line, "a call block without a call");
    else if (n->a && n->a->a->kind != TN_NAME)
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "a call block of a method");
    tmpl_node_raise(p, n, n->a);
    parse_macro_body(p, body, "endcall");
    tmpl_node_raise(p, n, body);
    return n;
}

static tmpl_node *parse_filter_block(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_FILTER_BLOCK, NULL, NULL, NULL);

    if (!n)
        return NULL;
    n->b = tmpl_parse_filters(p, NULL, true);
    n->c = parse_block_body(p, "endfilter");
    tmpl_node_raise(p, n, n->b);
    tmpl_node_raise(p, n, n->c);
    return n;
}

static tmpl_node *parse_with(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_WITH, NULL, NULL, NULL);

    while (n && p->st == KVD_OK && p->tok->kind != TT_BLOCK_END) {
        tmpl_node  *target, *value;
        tmpl_node **list;

        if (n->n)
            tmpl_parse_expect(p, ',');
        list   = list_room(p, n->deflt, n->n);
        target = parse_target(p, false);
        tmpl_parse_expect(p, '=');
        value = tmpl_parse_expr(p, true);
        if (!list || p->st != KVD_OK)
            return NULL;
        list[n->n] = value;
        n->deflt   = list;
        tmpl_node_push(p, n, target);
        tmpl_node_raise(p, n, value);
    }
    if (!n)
        return NULL;
    n->c = parse_block_body(p, "endwith");
    tmpl_node_raise(p, n, n->c);
    return n;
}

/* {% generation %} marks what an assistant wrote, for training: to us only a scope. */
static tmpl_node *parse_generation(tmpl_parser *p)
{
    tmpl_node *n = tmpl_node_new(p, TN_WITH, NULL, NULL, NULL);

    if (!n)
        return NULL;
    n->c = parse_block_body(p, "endgeneration");
    tmpl_node_raise(p, n, n->c);
    return n;
}

static tmpl_node *parse_jump(tmpl_parser *p, tmpl_node_kind kind)
{
    if (p->n_loop == 0)
        tmpl_parse_fail(p, KVD_E_INVAL, p->tok->line, "break or continue outside of a loop");
    return tmpl_node_new(p, kind, NULL, NULL, NULL);
}

static tmpl_node *parse_break(tmpl_parser *p)
{
    return parse_jump(p, TN_BREAK);
}

static tmpl_node *parse_continue(tmpl_parser *p)
{
    return parse_jump(p, TN_CONTINUE);
}

static tmpl_node *parse_statement(tmpl_parser *p)
{
    static const struct {
        const char *name;
        tmpl_node *(*parse)(tmpl_parser *p);
    } tag[] = {
        { "if", parse_if },           { "for", parse_for },
        { "set", parse_set },         { "macro", parse_macro },
        { "call", parse_call_block }, { "filter", parse_filter_block },
        { "with", parse_with },       { "generation", parse_generation },
        { "break", parse_break },     { "continue", parse_continue },
    };
    tmpl_node *n;

    for (size_t i = 0; i < KVD_COUNTOF(tag); i++) {
        if (!tmpl_parse_skip_name(p, tag[i].name))
            continue;
        n = tag[i].parse(p);
        expect_kind(p, TT_BLOCK_END);
        return n;
    }
    if (p->tok->kind != TT_NAME || (p->tok->len >= 3 && memcmp(p->tok->text, "end", 3) == 0) ||
        tmpl_parse_at_name(p, "else") || tmpl_parse_at_name(p, "elif"))
        tmpl_parse_unexpected(p);
    else
        tmpl_parse_fail(p, KVD_E_UNSUPPORTED, p->tok->line, "tag '%.*s'",
                        (int)kvd_min_u64(p->tok->len, 60), p->tok->text);
    return NULL;
}

static bool at_any(const tmpl_parser *p, const char *const *names)
{
    for (; *names; names++) {
        if (tmpl_parse_at_name(p, *names))
            return true;
    }
    return false;
}

/* Up to one of the ends, whose name is the current token then; ends NULL: up to the end. */
static tmpl_node *parse_body(tmpl_parser *p, const char *const *ends)
{
    tmpl_node *body = tmpl_node_new(p, TN_BODY, NULL, NULL, NULL), *n;

    if (!tmpl_parse_enter(p))
        return NULL;
    while (p->st == KVD_OK && (p->tok->kind != TT_EOF || ends)) {
        if (p->tok->kind == TT_DATA) {
            n = tmpl_node_new(p, TN_TEXT, NULL, NULL, NULL);
            if (n)
                n->lit = tmpl_of_str(tmpl_parse_str(p, p->tok->text, p->tok->len));
            tmpl_parse_next(p);
        } else if (p->tok->kind == TT_VAR_BEGIN) {
            tmpl_parse_next(p);
            n = tmpl_node_new(p, TN_PRINT, tmpl_parse_tuple(p, true, false), NULL, NULL);
            expect_kind(p, TT_VAR_END);
        } else if (p->tok->kind == TT_BLOCK_BEGIN) {
            tmpl_parse_next(p);
            if (ends && at_any(p, ends))
                break;
            n = parse_statement(p);
        } else {
            tmpl_parse_unexpected(p);
            break;
        }
        tmpl_node_push(p, body, n);
    }
    p->nest--;
    return p->st == KVD_OK ? body : NULL;
}

/* A plain name that is called must be a function we have or something the template defines. */
static void check_calls(tmpl_parser *p)
{
    for (const tmpl_node *n = p->calls; n && p->st == KVD_OK; n = n->d) {
        const tmpl_sym *s   = &p->t->sym[n->a->sym];
        const tmpl_str *bad = NULL;
        const char     *why;

        if (s->assigned || n->a->sym == p->t->sym_caller)
            continue;
        if (!s->global || !s->global->fn) {
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "function '%.*s()'",
                            (int)kvd_min_u64(s->name->len, 60), s->name->data);
            return;
        }
        why = tmpl_args_check(s->global, n->n_pos, n->kw, n->n - n->n_pos, &bad);
        if (why)
            tmpl_parse_fail(p, KVD_E_UNSUPPORTED, n->line, "function '%s()' with %s%s%.*s",
                            s->global->name, why, bad ? " " : "",
                            bad ? (int)kvd_min_u64(bad->len, 60) : 0, bad ? bad->data : "");
    }
}

kvd_status tmpl_parse(tmpl *t, const tmpl_token *token, kvd_err *err)
{
    tmpl_parser p = { .t = t, .tok = token, .err = err };

    t->sym_loop   = tmpl_parse_sym(&p, "loop", 4);
    t->sym_caller = tmpl_parse_sym(&p, "caller", 6);
    t->root       = parse_body(&p, NULL);
    check_calls(&p);
    return p.st;
}
