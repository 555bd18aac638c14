/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_eval.c - scopes, expressions and calls.
 *
 * Recursion is bounded by tmpl_enter(): the height of a tree (TMPL_MAX_NEST) times the calls of
 * macros within each other, TMPL_MAX_DEPTH in all. */
#include <string.h>

#include "text/tmpl_ast.h"

/* ---- scopes ---------------------------------------------------------------------- */

tmpl_scope *tmpl_scope_new(tmpl_run *r, tmpl_scope *parent)
{
    tmpl_scope *s = tmpl_alloc(r, 1, sizeof(*s));

    if (s)
        s->parent = parent;
    return s;
}

tmpl_scope *tmpl_scope_root(tmpl_run *r)
{
    tmpl_scope *s = tmpl_scope_new(r, NULL);

    if (!s)
        return NULL;
    s->slot = tmpl_alloc(r, r->t->n_sym, sizeof(*s->slot));
    if (!s->slot)
        return NULL;
    s->dense = true;
    s->n = s->cap = r->t->n_sym;
    for (uint32_t i = 0; i < s->n; i++)
        s->slot[i].sym = TMPL_NO_SYM;
    return s;
}

static tmpl_slot *slot_in(tmpl_run *r, const tmpl_scope *s, uint32_t sym)
{
    if (s->dense)
        return s->slot[sym].sym == sym ? &s->slot[sym] : NULL;
    for (uint32_t i = 0; i < s->n; i++) {
        if (i % 16 == 15 && !tmpl_step(r, 1))
            return NULL;
        if (s->slot[i].sym == sym)
            return &s->slot[i];
    }
    return NULL;
}

tmpl_val *tmpl_scope_find(tmpl_run *r, tmpl_scope *s, uint32_t sym)
{
    for (; s; s = s->parent) {
        tmpl_slot *slot = slot_in(r, s, sym);

        if (slot)
            return &slot->val;
    }
    return NULL;
}

void tmpl_scope_set(tmpl_run *r, tmpl_scope *s, uint32_t sym, tmpl_val v)
{
    tmpl_slot *slot = s->dense ? &s->slot[sym] : slot_in(r, s, sym);

    if (r->st != KVD_OK)
        return;
    if (!slot && s->n == s->cap) {
        const uint32_t cap   = s->cap ? s->cap * 2 : 4;
        tmpl_slot     *grown = tmpl_alloc(r, cap, sizeof(*grown));

        if (!grown)
            return;
        if (s->n)
            memcpy(grown, s->slot, s->n * sizeof(*grown));
        s->slot = grown;
        s->cap  = cap;
    }
    if (!slot)
        slot = &s->slot[s->n++];
    *slot = (tmpl_slot){ sym, v };
}

/* ---- calls ----------------------------------------------------------------------- */

#define ARGS_INLINE 8u

/* Evaluates the arguments of a call into room (or the arena, when there are more). */
static const tmpl_val *eval_args(tmpl_run *r, const tmpl_node *n, tmpl_val room[ARGS_INLINE])
{
    tmpl_val *val = n->n <= ARGS_INLINE ? room : tmpl_alloc(r, n->n, sizeof(*val));

    for (uint32_t i = 0; val && i < n->n && r->st == KVD_OK; i++)
        val[i] = tmpl_eval(r, n->list[i]);
    return r->st == KVD_OK ? val : NULL;
}

static bool same_name(const tmpl_str *a, const tmpl_str *b)
{
    return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

/* The value given for parameter i, or NULL. */
static const tmpl_val *arg_given(const tmpl_node *macro, uint32_t i, const tmpl_val *val,
                                 size_t n_pos, const tmpl_str *const *kw, size_t n_kw)
{
    if (i < n_pos)
        return &val[i];
    for (size_t k = 0; k < n_kw; k++) {
        if (same_name(kw[k], macro->list[i]->name))
            return &val[n_pos + k];
    }
    return NULL;
}

/* Whether every argument has a parameter to go to, once. */
static bool args_fit(tmpl_run *r, const tmpl_node *macro, size_t n_pos, const tmpl_str *const *kw,
                     size_t n_kw)
{
    if (n_pos > macro->n) {
        tmpl_fail(r, KVD_E_INVAL, "macro '%.*s' takes not more than %u arguments",
                  (int)kvd_min_u64(macro->name->len, 60), macro->name->data, macro->n);
        return false;
    }
    for (size_t k = 0; k < n_kw; k++) {
        uint32_t i = 0;

        while (i < macro->n && !same_name(kw[k], macro->list[i]->name))
            i++;
        if (i < n_pos || i == macro->n) {
            tmpl_fail(r, KVD_E_INVAL, "macro '%.*s' cannot take argument '%.*s'",
                      (int)kvd_min_u64(macro->name->len, 60), macro->name->data,
                      (int)kvd_min_u64(kw[k]->len, 60), kw[k]->data);
            return false;
        }
    }
    return true;
}

tmpl_val tmpl_macro_call(tmpl_run *r, const tmpl_macro *m, const tmpl_val *val, size_t n_pos,
                         const tmpl_str *const *kw, size_t n_kw, const tmpl_macro *caller)
{
    const tmpl_node *node  = m->node;
    tmpl_scope      *outer = r->scope;
    tmpl_sb         *out   = r->out, text;
    tmpl_val         result;

    if (!args_fit(r, node, n_pos, kw, n_kw) || !tmpl_enter(r))
        return tmpl_undef(NULL);
    r->scope = tmpl_scope_new(r, m->scope);
    if (caller && r->scope)
        tmpl_scope_set(r, r->scope, r->t->sym_caller,
                       (tmpl_val){ .kind = TV_MACRO, .u.macro = caller });
    for (uint32_t i = 0; i < node->n && r->st == KVD_OK; i++) {
        const tmpl_val *given = arg_given(node, i, val, n_pos, kw, n_kw);
        tmpl_val        v     = given            ? *given
                                : node->deflt[i] ? tmpl_eval(r, node->deflt[i])
                                                 : tmpl_undef(node->list[i]->name);

        tmpl_scope_set(r, r->scope, node->list[i]->sym, v);
    }
    tmpl_sb_init(&text, r);
    r->out = &text;
    if (r->st == KVD_OK)
        tmpl_exec(r, node->c);
    result   = tmpl_sb_take(&text);
    r->out   = out;
    r->scope = outer;
    tmpl_leave(r);
    return result;
}

static tmpl_val call_value(tmpl_run *r, const tmpl_node *n, const tmpl_val *callee,
                           const tmpl_val *val)
{
    const size_t n_kw = n->n - n->n_pos;

    switch (callee->kind) {
    case TV_MACRO:
        return tmpl_macro_call(r, callee->u.macro, val, n->n_pos, n->kw, n_kw, NULL);
    case TV_FUNC:
        return tmpl_builtin_call(r, callee->u.fn, tmpl_none(), val, n->n_pos, n->kw, n_kw);
    case TV_METHOD:
        return tmpl_builtin_call(r, callee->u.method->fn, callee->u.method->self, val, n->n_pos,
                                 n->kw, n_kw);
    case TV_JOINER:
        if (callee->u.joiner->used)
            return callee->u.joiner->sep;
        callee->u.joiner->used = true;
        return tmpl_str_new(r, "", 0, false);
    case TV_UNDEF:
        tmpl_fail(r, KVD_E_INVAL, "'%.*s' is undefined",
                  callee->u.s ? (int)kvd_min_u64(callee->u.s->len, 60) : 5,
                  callee->u.s ? callee->u.s->data : "value");
        break;
    default:
        tmpl_fail(r, KVD_E_INVAL, "'%s' object is not callable", tmpl_type_name(callee));
    }
    return tmpl_undef(NULL);
}

static tmpl_val eval_call(tmpl_run *r, const tmpl_node *n)
{
    tmpl_val        room[ARGS_INLINE];
    const tmpl_val  callee = tmpl_eval(r, n->a);
    const tmpl_val *val    = eval_args(r, n, room);

    if (!val)
        return tmpl_undef(NULL);
    r->line = n->line;
    if (n->a->kind == TN_ATTR && callee.kind == TV_UNDEF &&
        tmpl_method_mutates(n->a->name->data, n->a->name->len))
        tmpl_fail(r, KVD_E_INVAL, "'.%.*s()' changes a value, which the sandbox forbids",
                  (int)n->a->name->len, n->a->name->data);
    return r->st == KVD_OK ? call_value(r, n, &callee, val) : tmpl_undef(NULL);
}

/* ---- filters and tests ----------------------------------------------------------- */

tmpl_val tmpl_eval_filter_on(tmpl_run *r, const tmpl_node *n, tmpl_val v)
{
    tmpl_val        room[ARGS_INLINE];
    const tmpl_val *val;

    if (!tmpl_enter(r))
        return tmpl_undef(NULL);
    if (n->a)
        v = n->a->kind == TN_FILTER ? tmpl_eval_filter_on(r, n->a, v) : tmpl_undef(NULL);
    val = eval_args(r, n, room);
    if (val)
        v = tmpl_builtin_call(r, n->fn, v, val, n->n_pos, n->kw, n->n - n->n_pos);
    tmpl_leave(r);
    return v;
}

static tmpl_val eval_builtin(tmpl_run *r, const tmpl_node *n)
{
    tmpl_val        room[ARGS_INLINE];
    const tmpl_val  self = tmpl_eval(r, n->a);
    const tmpl_val *val  = eval_args(r, n, room);

    if (!val)
        return tmpl_undef(NULL);
    r->line = n->line;
    return tmpl_builtin_call(r, n->fn, self, val, n->n_pos, n->kw, n->n - n->n_pos);
}

/* ---- operators ------------------------------------------------------------------- */

static bool compare(tmpl_run *r, int op, const tmpl_val *a, const tmpl_val *b)
{
    int o;

    switch (op) {
    case TMPL_OP2('=', '='):
        return tmpl_equal(r, a, b);
    case TMPL_OP2('!', '='):
        return !tmpl_equal(r, a, b);
    case TMPL_OP_IN:
        return tmpl_contains(r, b, a);
    case TMPL_OP_NOT_IN:
        return !tmpl_contains(r, b, a);
    default:
        break;
    }
    o = tmpl_order(r, a, b);
    if (o == 2) /* NaN */
        return false;
    return op == '<' ? o < 0 : op == '>' ? o > 0 : op == TMPL_OP2('<', '=') ? o <= 0 : o >= 0;
}

/* a < b < c: each operand evaluated once, up to the first that does not hold. */
static tmpl_val eval_compare(tmpl_run *r, const tmpl_node *n)
{
    tmpl_val left = tmpl_eval(r, n->a);

    for (uint32_t i = 0; i < n->n && r->st == KVD_OK; i++) {
        const tmpl_val right = tmpl_eval(r, n->list[i]);

        if (r->st != KVD_OK || !compare(r, n->ops[i], &left, &right))
            return tmpl_bool(false);
        left = right;
    }
    return tmpl_bool(true);
}

static tmpl_val eval_concat(tmpl_run *r, const tmpl_node *n)
{
    tmpl_sb sb;

    tmpl_sb_init(&sb, r);
    for (uint32_t i = 0; i < n->n && r->st == KVD_OK; i++) {
        const tmpl_val v = tmpl_eval(r, n->list[i]);

        if (r->st == KVD_OK)
            tmpl_sb_put_str(&sb, tmpl_to_str(r, &v));
    }
    return tmpl_sb_take(&sb);
}

static tmpl_val eval_logic(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val a = tmpl_eval(r, n->a);

    if (r->st != KVD_OK || tmpl_truth(&a) == (n->kind == TN_OR))
        return a;
    return tmpl_eval(r, n->b);
}

/* ---- the rest -------------------------------------------------------------------- */

static tmpl_val eval_name(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val     *v      = tmpl_scope_find(r, r->scope, n->sym);
    const tmpl_builtin *global = r->t->sym[n->sym].global;

    if (v)
        return *v;
    return global ? (tmpl_val){ .kind = TV_FUNC, .u.fn = global } : tmpl_undef(n->name);
}

static tmpl_val eval_list(tmpl_run *r, const tmpl_node *n)
{
    tmpl_seq *s = tmpl_seq_new(r, n->n);

    for (uint32_t i = 0; s && i < n->n && r->st == KVD_OK; i++)
        s->item[i] = tmpl_eval(r, n->list[i]);
    return tmpl_of_seq(n->kind == TN_TUPLE ? TV_TUPLE : TV_LIST, s);
}

static tmpl_val eval_dict(tmpl_run *r, const tmpl_node *n)
{
    tmpl_dict *d = tmpl_dict_new(r, n->n / 2);

    for (uint32_t i = 0; d && i + 1 < n->n && r->st == KVD_OK; i += 2) {
        const tmpl_val key = tmpl_eval(r, n->list[i]), val = tmpl_eval(r, n->list[i + 1]);

        tmpl_dict_set(r, d, key, val);
    }
    return d ? (tmpl_val){ .kind = TV_DICT, .u.d = d } : tmpl_undef(NULL);
}

static tmpl_val eval_slice(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val obj = tmpl_eval(r, n->a);
    tmpl_val       bound[3];

    for (int i = 0; i < 3; i++)
        bound[i] = n->list[i] ? tmpl_eval(r, n->list[i]) : tmpl_none();
    return r->st == KVD_OK ? tmpl_slice(r, &obj, bound) : tmpl_undef(NULL);
}

static tmpl_val eval_access(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val obj = tmpl_eval(r, n->a);
    tmpl_val       key;

    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    if (n->kind == TN_ATTR)
        return tmpl_attr(r, &obj, n->name);
    key = tmpl_eval(r, n->b);
    return r->st == KVD_OK ? tmpl_item(r, &obj, &key) : key;
}

static tmpl_val eval_cond(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val cond = tmpl_eval(r, n->a);

    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    if (tmpl_truth(&cond))
        return tmpl_eval(r, n->b);
    return n->c ? tmpl_eval(r, n->c) : tmpl_undef(NULL);
}

static tmpl_val eval_not(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val v = tmpl_eval(r, n->a);

    return tmpl_bool(!tmpl_truth(&v));
}

static tmpl_val eval_arith(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val a = tmpl_eval(r, n->a);
    tmpl_val       b;

    if (n->kind != TN_ARITH)
        return r->st == KVD_OK ? tmpl_negate(r, &a, n->kind == TN_NEG) : a;
    b = tmpl_eval(r, n->b);
    return tmpl_arith(r, n->op, &a, &b);
}

static tmpl_val eval_inside(tmpl_run *r, const tmpl_node *n)
{
    switch (n->kind) {
    case TN_LIT:
        return n->lit;
    case TN_NAME:
        return eval_name(r, n);
    case TN_LIST:
    case TN_TUPLE:
        return eval_list(r, n);
    case TN_DICT:
        return eval_dict(r, n);
    case TN_ATTR:
    case TN_ITEM:
        return eval_access(r, n);
    case TN_SLICE:
        return eval_slice(r, n);
    case TN_CALL:
        return eval_call(r, n);
    case TN_FILTER:
    case TN_TEST:
        return eval_builtin(r, n);
    case TN_NOT:
        return eval_not(r, n);
    case TN_NEG:
    case TN_POS:
    case TN_ARITH:
        return eval_arith(r, n);
    case TN_AND:
    case TN_OR:
        return eval_logic(r, n);
    case TN_COND:
        return eval_cond(r, n);
    case TN_CONCAT:
        return eval_concat(r, n);
    case TN_COMPARE:
        return eval_compare(r, n);
    default:
        kvd_assert(n->kind < TN_BODY);
        return tmpl_undef(NULL);
    }
}

tmpl_val tmpl_eval(tmpl_run *r, const tmpl_node *n)
{
    tmpl_val v;

    if (!tmpl_enter(r))
        return tmpl_undef(NULL);
    v = eval_inside(r, n);
    tmpl_leave(r);
    return v;
}
