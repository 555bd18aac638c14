/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_call.c - finding builtins by name and binding arguments to their parameters. */
#include <string.h>

#include "text/tmpl_builtin.h"

/* ---- lookup ---------------------------------------------------------------------- */

static const tmpl_builtin *find(const tmpl_builtin *table, const char *name, size_t len)
{
    for (; table->name; table++) {
        if (strlen(table->name) == len && memcmp(table->name, name, len) == 0)
            return table;
    }
    return NULL;
}

const tmpl_builtin *tmpl_find_filter(const char *name, size_t len)
{
    const tmpl_builtin *b = find(tmpl_filters_text, name, len);

    if (!b)
        b = find(tmpl_filters_seq, name, len);
    return b ? b : find(tmpl_filters_pick, name, len);
}

const tmpl_builtin *tmpl_find_test(const char *name, size_t len)
{
    return find(tmpl_tests, name, len);
}

const tmpl_builtin *tmpl_find_global(const char *name, size_t len)
{
    return find(tmpl_globals, name, len);
}

const tmpl_builtin *tmpl_find_method(tmpl_kind kind, const char *name, size_t len)
{
    switch (kind) {
    case TV_STR:
        return find(tmpl_methods_str, name, len);
    case TV_LIST:
        return find(tmpl_methods_list, name, len);
    case TV_TUPLE:
    case TV_RANGE:
        return len == 4 && memcmp(name, "copy", 4) == 0 ? NULL : find(tmpl_methods_list, name, len);
    case TV_DICT:
        return find(tmpl_methods_dict, name, len);
    case TV_LOOP:
        return find(tmpl_methods_loop, name, len);
    default:
        return NULL;
    }
}

bool tmpl_method_mutates(const char *name, size_t len)
{
    static const char *const word[] = { "append",     "clear",   "extend", "insert",
                                        "pop",        "popitem", "remove", "reverse",
                                        "setdefault", "sort",    "update" };

    for (size_t i = 0; i < KVD_COUNTOF(word); i++) {
        if (strlen(word[i]) == len && memcmp(word[i], name, len) == 0)
            return true;
    }
    return false;
}

bool tmpl_method_runs(const char *name, size_t len)
{
    static const tmpl_kind kind[] = { TV_STR, TV_LIST, TV_DICT, TV_LOOP };

    for (size_t i = 0; i < KVD_COUNTOF(kind); i++) {
        const tmpl_builtin *b = tmpl_find_method(kind[i], name, len);

        if (b && b->fn)
            return true;
    }
    return false;
}

/* ---- binding --------------------------------------------------------------------- */

/* The index of the parameter called name, or the number of parameters with name NULL;
 * TMPL_UNKNOWN: there is none. */
static size_t param_index(const char *params, const tmpl_str *name)
{
    size_t i = 0;

    while (*params) {
        const size_t n = strcspn(params, " ");

        if (name && name->len == n && memcmp(params, name->data, n) == 0)
            return i;
        params += n;
        params += *params == ' ';
        i++;
    }
    return name ? TMPL_UNKNOWN : i;
}

const char *tmpl_args_check(const tmpl_builtin *b, size_t n_pos, const tmpl_str *const *kw,
                            size_t n_kw, const tmpl_str **arg)
{
    size_t n_required = n_pos < b->min_arg ? n_pos : b->min_arg;

    if (!b->params)
        return n_pos < b->min_arg ? "too few arguments" : NULL;
    if (n_pos > param_index(b->params, NULL))
        return "too many arguments";
    for (size_t k = 0; k < n_kw; k++) {
        const size_t i = param_index(b->params, kw[k]);

        if (i == TMPL_UNKNOWN || i < n_pos) {
            *arg = kw[k];
            return "argument";
        }
        n_required += i < b->min_arg;
    }
    return n_required < b->min_arg ? "too few arguments" : NULL;
}

/* What a builtin makes of markup: markup again, in lists too, except where Jinja takes str() of it
 * first.  Methods that would escape their arguments are not run. */
static tmpl_val keep_markup(tmpl_run *r, const tmpl_builtin *b, tmpl_val out)
{
    static const char *const plain[] = { "replace", "tojson", "join", "first" };
    const bool               method  = find(tmpl_methods_str, b->name, strlen(b->name)) == b;

    for (size_t i = 0; i < KVD_COUNTOF(plain); i++) {
        if (strcmp(b->name, plain[i]) != 0)
            continue;
        if (method)
            tmpl_fail(r, KVD_E_UNSUPPORTED,
                      "'%s()' of what filter 'safe' or 'escape' gave is not "
                      "supported",
                      b->name);
        return out;
    }
    out.markup = out.kind == TV_STR;
    for (size_t i = 0; method && tmpl_is_seq(&out) && i < out.u.seq->n; i++)
        out.u.seq->item[i].markup = true; /* a list just made */
    return out;
}

tmpl_val tmpl_builtin_call(tmpl_run *r, const tmpl_builtin *b, tmpl_val self, const tmpl_val *val,
                           size_t n_pos, const tmpl_str *const *kw, size_t n_kw)
{
    tmpl_args       a   = { .self = self, .val = val, .kw = kw, .n_pos = n_pos, .n_kw = n_kw };
    const tmpl_str *bad = NULL;
    const char     *why;
    tmpl_val        out;

    if (!b->fn) {
        tmpl_fail(r, KVD_E_UNSUPPORTED, "'%s()' is not supported", b->name);
        return tmpl_undef(NULL);
    }
    why = tmpl_args_check(b, n_pos, kw, n_kw, &bad);
    if (why) {
        tmpl_fail(r, KVD_E_INVAL, "'%s' with %s%s%.*s", b->name, why, bad ? " " : "",
                  bad ? (int)kvd_min_u64(bad->len, 60) : 0, bad ? bad->data : "");
        return tmpl_undef(NULL);
    }
    for (size_t i = 0; b->params && i < n_pos; i++) {
        a.v[i]   = val[i];
        a.has[i] = true;
    }
    for (size_t k = 0; b->params && k < n_kw; k++) {
        const size_t i = param_index(b->params, kw[k]);

        a.v[i]   = val[n_pos + k];
        a.has[i] = true;
    }
    if (!tmpl_enter(r))
        return tmpl_undef(NULL);
    out = b->fn(r, &a);
    tmpl_leave(r);
    return self.kind == TV_STR && self.markup ? keep_markup(r, b, out) : out;
}

/* ---- arguments ------------------------------------------------------------------- */

int64_t tmpl_arg_int(tmpl_run *r, const tmpl_args *a, size_t i, int64_t deflt)
{
    if (!a->has[i])
        return deflt;
    if (a->v[i].kind != TV_INT && a->v[i].kind != TV_BOOL) {
        tmpl_fail(r, KVD_E_INVAL, "'%s' object cannot be interpreted as an integer",
                  tmpl_type_name(&a->v[i]));
        return deflt;
    }
    return tmpl_as_int(&a->v[i]);
}

bool tmpl_arg_truth(const tmpl_args *a, size_t i, bool deflt)
{
    return a->has[i] ? tmpl_truth(&a->v[i]) : deflt;
}

const tmpl_str *tmpl_arg_str(tmpl_run *r, const tmpl_args *a, size_t i)
{
    if (!a->has[i])
        return NULL;
    if (a->v[i].kind != TV_STR) {
        tmpl_fail(r, KVD_E_INVAL, "a string was expected, not '%s'", tmpl_type_name(&a->v[i]));
        return NULL;
    }
    return a->v[i].u.s;
}

bool tmpl_arg_none(const tmpl_args *a, size_t i)
{
    return !a->has[i] || a->v[i].kind == TV_NONE;
}

/* ---- building sequences ---------------------------------------------------------- */

void tmpl_seq_push(tmpl_run *r, tmpl_seq *s, tmpl_val v)
{
    if (!s || r->st != KVD_OK)
        return;
    if (s->n == 0 || (s->n >= 4 && (s->n & (s->n - 1)) == 0)) {
        tmpl_val *grown = tmpl_alloc(r, s->n < 4 ? 4 : s->n * 2, sizeof(*grown));

        if (!grown)
            return;
        if (s->n)
            memcpy(grown, s->item, s->n * sizeof(*grown));
        s->item = grown;
    }
    s->item[s->n++] = v;
}

tmpl_val tmpl_gen_new(tmpl_run *r, tmpl_seq *items)
{
    tmpl_seq *s = tmpl_alloc(r, 1, sizeof(*s));

    if (!s || !items)
        return tmpl_undef(NULL);
    *s = (tmpl_seq){ .item = items->item, .n = items->n, .view = "generator" };
    return tmpl_of_seq(TV_GEN, s);
}

tmpl_val tmpl_pair_new(tmpl_run *r, const tmpl_pair *p)
{
    tmpl_seq *s = tmpl_seq_new(r, 2);

    if (s) {
        s->item[0] = p->key;
        s->item[1] = p->val;
    }
    return tmpl_of_seq(TV_TUPLE, s);
}
