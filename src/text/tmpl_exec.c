/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_exec.c - statements.  A loop and a macro open a scope, an if does not, as in Jinja. */
#include <string.h>

#include "text/tmpl_ast.h"

typedef enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow;

static flow exec(tmpl_run *r, const tmpl_node *n);

static flow exec_body(tmpl_run *r, const tmpl_node *body)
{
    flow f = FLOW_ON;

    for (uint32_t i = 0; i < body->n && f == FLOW_ON && r->st == KVD_OK; i++)
        f = exec(r, body->list[i]);
    return f;
}

/* The output of a body, as a string. */
static tmpl_val capture(tmpl_run *r, const tmpl_node *body)
{
    tmpl_sb *out = r->out, text;
    tmpl_val v;

    tmpl_sb_init(&text, r);
    r->out = &text;
    exec_body(r, body);
    v      = tmpl_sb_take(&text);
    r->out = out;
    return v;
}

/* ---- assignment ------------------------------------------------------------------ */

static void assign(tmpl_run *r, tmpl_scope *s, const tmpl_node *target, tmpl_val v);

static void assign_tuple(tmpl_run *r, tmpl_scope *s, const tmpl_node *target, const tmpl_val *v)
{
    const tmpl_seq *items;

    if (v->kind == TV_UNDEF || !tmpl_is_iterable(v)) {
        tmpl_fail(r, KVD_E_INVAL, "cannot unpack '%s'", tmpl_type_name(v));
        return;
    }
    items = tmpl_iterate(r, v);
    if (!items)
        return;
    if (items->n != target->n) {
        tmpl_fail(r, KVD_E_INVAL, "%zu values to unpack into %u names", items->n, target->n);
        return;
    }
    for (uint32_t i = 0; i < target->n && r->st == KVD_OK; i++)
        assign(r, s, target->list[i], items->item[i]);
}

static void assign(tmpl_run *r, tmpl_scope *s, const tmpl_node *target, tmpl_val v)
{
    if (target->kind == TN_NAME) {
        tmpl_scope_set(r, s, target->sym, v);
    } else if (target->kind == TN_TUPLE) {
        assign_tuple(r, s, target, &v);
    } else {
        const tmpl_val *ns = tmpl_scope_find(r, s, target->sym);

        if (!ns || ns->kind != TV_NS)
            tmpl_fail(r, KVD_E_INVAL, "cannot assign an attribute of what is no namespace");
        else
            tmpl_dict_set(r, ns->u.d, tmpl_of_str(target->name), v);
    }
}

/* ---- loops ----------------------------------------------------------------------- */

/* The items for which the loop's condition holds. */
static tmpl_seq *filter_items(tmpl_run *r, const tmpl_node *n, const tmpl_seq *all)
{
    tmpl_seq   *kept  = tmpl_seq_new(r, all->n);
    tmpl_scope *outer = r->scope;
    size_t      count = 0;

    for (size_t i = 0; kept && i < all->n && r->st == KVD_OK; i++) {
        tmpl_val cond;

        r->scope = tmpl_scope_new(r, outer);
        if (!r->scope)
            break;
        assign(r, r->scope, n->a, all->item[i]);
        cond = r->st == KVD_OK ? tmpl_eval(r, n->e) : tmpl_none();
        if (tmpl_truth(&cond))
            kept->item[count++] = all->item[i];
    }
    r->scope = outer;
    if (kept)
        kept->n = count;
    return r->st == KVD_OK ? kept : NULL;
}

static void loop_items(tmpl_run *r, const tmpl_node *n, const tmpl_seq *items)
{
    tmpl_scope *outer = r->scope, *inner = NULL;
    tmpl_loop  *loop = tmpl_alloc(r, 1, sizeof(*loop));
    flow        f    = FLOW_ON;

    if (!loop)
        return;
    *loop = (tmpl_loop){ .item = items->item, .n = items->n };
    for (; loop->idx < loop->n && f != FLOW_BREAK && r->st == KVD_OK; loop->idx++) {
        if (!inner || inner->captured)
            inner = tmpl_scope_new(r, outer);
        if (!inner || !tmpl_step(r, 1))
            break;
        inner->n = 0;
        tmpl_scope_set(r, inner, r->t->sym_loop, (tmpl_val){ .kind = TV_LOOP, .u.loop = loop });
        assign(r, inner, n->a, loop->item[loop->idx]);
        r->scope = inner;
        if (r->st == KVD_OK)
            f = exec_body(r, n->c);
        r->scope = outer;
    }
}

static flow exec_for(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val  over  = tmpl_eval(r, n->b);
    const tmpl_seq *items = r->st == KVD_OK ? tmpl_iterate(r, &over) : NULL;

    if (items && n->e)
        items = filter_items(r, n, items);
    if (!items)
        return FLOW_ON;
    if (items->n) {
        loop_items(r, n, items);
    } else if (n->d) {
        tmpl_scope *outer = r->scope;
        flow        f     = FLOW_ON;

        r->scope = tmpl_scope_new(r, outer);
        if (r->scope)
            f = exec_body(r, n->d);
        r->scope = outer;
        return f;
    }
    return FLOW_ON;
}

/* ---- blocks ---------------------------------------------------------------------- */

static flow exec_if(tmpl_run *r, const tmpl_node *n)
{
    for (uint32_t i = 0; i + 1 < n->n; i += 2) {
        const tmpl_val cond = tmpl_eval(r, n->list[i]);

        if (r->st != KVD_OK)
            return FLOW_ON;
        if (tmpl_truth(&cond))
            return exec_body(r, n->list[i + 1]);
    }
    return n->c ? exec_body(r, n->c) : FLOW_ON;
}

static const tmpl_macro *make_macro(tmpl_run *r, const tmpl_node *n)
{
    tmpl_macro *m = tmpl_alloc(r, 1, sizeof(*m));

    if (!m)
        return NULL;
    *m = (tmpl_macro){ n, r->scope };
    for (tmpl_scope *s = r->scope; s && !s->captured; s = s->parent)
        s->captured = true;
    return m;
}

static void exec_call_block(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_node *call   = n->a;
    const tmpl_val   callee = tmpl_eval(r, call->a);
    tmpl_val        *val    = tmpl_alloc(r, call->n, sizeof(*val));
    tmpl_val         text;

    for (uint32_t i = 0; val && i < call->n && r->st == KVD_OK; i++)
        val[i] = tmpl_eval(r, call->list[i]);
    if (r->st != KVD_OK)
        return;
    if (callee.kind != TV_MACRO) {
        tmpl_fail(r, KVD_E_INVAL, "a call block needs a macro, not '%s'", tmpl_type_name(&callee));
        return;
    }
    text = tmpl_macro_call(r, callee.u.macro, val, call->n_pos, call->kw, call->n - call->n_pos,
                           make_macro(r, n->b));
    if (r->st == KVD_OK)
        tmpl_sb_put_str(r->out, text.u.s);
}

static void exec_filter_block(tmpl_run *r, const tmpl_node *n)
{
    tmpl_scope *outer = r->scope;
    tmpl_val    text;

    r->scope = tmpl_scope_new(r, outer);
    if (r->scope) {
        text = capture(r, n->c);
        if (r->st == KVD_OK)
            text = tmpl_eval_filter_on(r, n->b, text);
        if (r->st == KVD_OK)
            tmpl_sb_put_str(r->out, tmpl_to_str(r, &text));
    }
    r->scope = outer;
}

static void exec_set_block(tmpl_run *r, const tmpl_node *n)
{
    tmpl_scope *outer = r->scope;
    tmpl_val    text;

    r->scope = tmpl_scope_new(r, outer);
    if (r->scope) {
        text = capture(r, n->c);
        if (r->st == KVD_OK && n->b)
            text = tmpl_eval_filter_on(r, n->b, text);
        if (r->st == KVD_OK)
            assign(r, outer, n->a, text);
    }
    r->scope = outer;
}

static flow exec_with(tmpl_run *r, const tmpl_node *n)
{
    tmpl_scope *outer = r->scope, *inner = tmpl_scope_new(r, outer);
    flow        f = FLOW_ON;

    for (uint32_t i = 0; inner && i < n->n && r->st == KVD_OK; i++)
        assign(r, inner, n->list[i], tmpl_eval(r, n->deflt[i]));
    if (r->st == KVD_OK) {
        r->scope = inner;
        f        = exec_body(r, n->c);
    }
    r->scope = outer;
    return f;
}

static void exec_print(tmpl_run *r, const tmpl_node *n)
{
    const tmpl_val v = tmpl_eval(r, n->a);

    if (r->st == KVD_OK)
        tmpl_sb_put_str(r->out, tmpl_to_str(r, &v));
}

static flow exec_inside(tmpl_run *r, const tmpl_node *n)
{
    r->line = n->line;
    switch (n->kind) {
    case TN_BODY:
        return exec_body(r, n);
    case TN_TEXT:
        tmpl_sb_put_str(r->out, n->lit.u.s);
        break;
    case TN_PRINT:
        exec_print(r, n);
        break;
    case TN_IF:
        return exec_if(r, n);
    case TN_FOR:
        return exec_for(r, n);
    case TN_SET:
        assign(r, r->scope, n->a, tmpl_eval(r, n->b));
        break;
    case TN_SET_BLOCK:
        exec_set_block(r, n);
        break;
    case TN_MACRO:
        tmpl_scope_set(r, r->scope, n->sym,
                       (tmpl_val){ .kind = TV_MACRO, .u.macro = make_macro(r, n) });
        break;
    case TN_CALL_BLOCK:
        exec_call_block(r, n);
        break;
    case TN_FILTER_BLOCK:
        exec_filter_block(r, n);
        break;
    case TN_WITH:
        return exec_with(r, n);
    case TN_BREAK:
        return FLOW_BREAK;
    case TN_CONTINUE:
        return FLOW_CONTINUE;
    default:
        kvd_assert(n->kind >= TN_BODY);
    }
    return FLOW_ON;
}

static flow exec(tmpl_run *r, const tmpl_node *n)
{
    flow f;

    if (!tmpl_enter(r))
        return FLOW_ON;
    f = exec_inside(r, n);
    tmpl_leave(r);
    return f;
}

void tmpl_exec(tmpl_run *r, const tmpl_node *body)
{
    exec_body(r, body);
}
