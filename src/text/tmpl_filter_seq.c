/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_filter_seq.c - filters over sequences: ends, order, choice, mapping.
 *
 * What Jinja makes a generator is worked out at once here, so that an error in it shows even if
 * the template never looks at the result. */
#include <string.h>

#include "text/tmpl_builtin.h"

/* ---- attribute paths ("function.name", 0) ---------------------------------------- */

static bool all_digits(const tmpl_str *s)
{
    for (size_t i = 0; i < s->len; i++) {
        if (s->data[i] < '0' || s->data[i] > '9')
            return false;
    }
    return s->len != 0 && s->len < 10;
}

static tmpl_val path_step(tmpl_run *r, tmpl_val obj, const tmpl_str *part)
{
    tmpl_val key = tmpl_of_str(part);

    if (all_digits(part)) {
        key = tmpl_int(0);
        for (size_t i = 0; i < part->len; i++)
            key.u.i = key.u.i * 10 + (part->data[i] - '0');
    }
    return tmpl_item(r, &obj, &key);
}

/* What path leads to from obj; deflt (or NULL) replaces an undefined value on the way. */
static tmpl_val follow(tmpl_run *r, tmpl_val obj, const tmpl_val *path, const tmpl_val *deflt)
{
    size_t from = 0;

    if (path->kind != TV_STR) {
        obj = tmpl_item(r, &obj, path);
        return obj.kind == TV_UNDEF && deflt ? *deflt : obj;
    }
    while (from <= path->u.s->len && tmpl_step(r, 1)) {
        const char    *dot  = memchr(path->u.s->data + from, '.', path->u.s->len - from);
        const size_t   to   = dot ? (size_t)(dot - path->u.s->data) : path->u.s->len;
        const tmpl_val part = tmpl_str_part(r, path->u.s, from, to);

        if (r->st != KVD_OK)
            break;
        obj = path_step(r, obj, part.u.s);
        if (obj.kind == TV_UNDEF && deflt)
            obj = *deflt;
        from = to + 1;
    }
    return obj;
}

static tmpl_val sort_key(tmpl_run *r, tmpl_val v, const tmpl_val *path, bool case_sensitive)
{
    if (path)
        v = follow(r, v, path, NULL);
    return v.kind == TV_STR && !case_sensitive ? tmpl_str_case(r, v.u.s, TMPL_LOWER) : v;
}

/* ---- order ----------------------------------------------------------------------- */

/* Stable merge of two sorted halves of idx, by key. */
static void merge(tmpl_run *r, const tmpl_val *key, size_t *idx, size_t *tmp, size_t mid, size_t n,
                  bool reverse)
{
    size_t i = 0, j = mid, k = 0;

    while (i < mid && j < n && r->st == KVD_OK) {
        const int c = reverse ? tmpl_order(r, &key[idx[i]], &key[idx[j]])
                              : tmpl_order(r, &key[idx[j]], &key[idx[i]]);

        tmp[k++] = c < 0 ? idx[j++] : idx[i++];
    }
    while (i < mid)
        tmp[k++] = idx[i++];
    while (j < n)
        tmp[k++] = idx[j++];
    memcpy(idx, tmp, k * sizeof(*idx));
}

/* Halves the range, so it nests at most 64 levels deep. */
static void merge_sort(tmpl_run *r, const tmpl_val *key, size_t *idx, size_t *tmp, size_t n,
                       bool reverse)
{
    if (n < 2 || r->st != KVD_OK)
        return;
    merge_sort(r, key, idx, tmp, n / 2, reverse);
    merge_sort(r, key, idx + n / 2, tmp, n - n / 2, reverse);
    merge(r, key, idx, tmp, n / 2, n, reverse);
}

/* items in the order of keys; both have n. */
static tmpl_val sorted(tmpl_run *r, const tmpl_seq *items, const tmpl_seq *keys, bool reverse)
{
    tmpl_seq *out = tmpl_seq_new(r, items->n);
    size_t   *idx = tmpl_alloc(r, items->n, 2 * sizeof(*idx));

    if (!out || !idx)
        return tmpl_undef(NULL);
    for (size_t i = 0; i < items->n; i++)
        idx[i] = i;
    merge_sort(r, keys->item, idx, idx + items->n, items->n, reverse);
    for (size_t i = 0; i < items->n; i++)
        out->item[i] = items->item[idx[i]];
    return tmpl_of_seq(TV_LIST, out);
}

static tmpl_val f_sort(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->self);
    tmpl_seq       *keys  = items ? tmpl_seq_new(r, items->n) : NULL;

    if (!tmpl_arg_none(a, 2) && a->v[2].kind == TV_STR &&
        memchr(a->v[2].u.s->data, ',', a->v[2].u.s->len))
        tmpl_fail(r, KVD_E_UNSUPPORTED, "filter 'sort' by several attributes is not supported");
    if (!keys)
        return tmpl_undef(NULL);
    for (size_t i = 0; i < items->n && r->st == KVD_OK; i++)
        keys->item[i] = sort_key(r, items->item[i], tmpl_arg_none(a, 2) ? NULL : &a->v[2],
                                 tmpl_arg_truth(a, 1, false));
    return sorted(r, items, keys, tmpl_arg_truth(a, 0, false));
}

static tmpl_val f_dictsort(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str  *by       = tmpl_arg_str(r, a, 1);
    const bool       by_value = by && tmpl_str_is(by, "value");
    const tmpl_dict *d;
    tmpl_seq        *items, *keys;

    if (by && !by_value && !tmpl_str_is(by, "key"))
        tmpl_fail(r, KVD_E_INVAL, "You can only sort by either \"key\" or \"value\"");
    if (a->self.kind != TV_DICT) {
        tmpl_fail(r, KVD_E_INVAL, "'%s' object has no items", tmpl_type_name(&a->self));
        return tmpl_undef(NULL);
    }
    d     = a->self.u.d;
    items = tmpl_seq_new(r, d->n);
    keys  = tmpl_seq_new(r, d->n);
    for (size_t i = 0; items && keys && i < d->n && r->st == KVD_OK; i++) {
        items->item[i] = tmpl_pair_new(r, &d->pair[i]);
        keys->item[i]  = sort_key(r, by_value ? d->pair[i].val : d->pair[i].key, NULL,
                                  tmpl_arg_truth(a, 0, false));
    }
    return r->st == KVD_OK ? sorted(r, items, keys, tmpl_arg_truth(a, 2, false)) : tmpl_undef(NULL);
}

static tmpl_val best_of(tmpl_run *r, const tmpl_args *a, int sign)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->self);
    const tmpl_val *path  = tmpl_arg_none(a, 1) ? NULL : &a->v[1];
    tmpl_val        best = tmpl_undef(NULL), best_key = best;

    for (size_t i = 0; items && i < items->n && r->st == KVD_OK; i++) {
        const tmpl_val key = sort_key(r, items->item[i], path, tmpl_arg_truth(a, 0, false));
        const int      c   = i ? tmpl_order(r, &key, &best_key) : sign;

        if (i && (c == 2 || c * sign <= 0))
            continue;
        best     = items->item[i];
        best_key = key;
    }
    return best;
}

static tmpl_val f_min(tmpl_run *r, const tmpl_args *a)
{
    return best_of(r, a, -1);
}

static tmpl_val f_max(tmpl_run *r, const tmpl_args *a)
{
    return best_of(r, a, 1);
}

static tmpl_val f_reverse(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val  bound[3] = { tmpl_none(), tmpl_none(), tmpl_int(-1) };
    const tmpl_seq *items;
    tmpl_seq       *out;

    if (a->self.kind == TV_STR)
        return tmpl_slice(r, &a->self, bound);
    items = tmpl_iterate(r, &a->self);
    out   = items ? tmpl_seq_new(r, items->n) : NULL;
    for (size_t i = 0; out && i < items->n; i++)
        out->item[i] = items->item[items->n - 1 - i];
    if (a->self.kind == TV_GEN) /* cannot be walked backwards: Jinja makes a list of it */
        return tmpl_of_seq(TV_LIST, out);
    return tmpl_gen_new(r, out);
}

/* ---- ends, joins ----------------------------------------------------------------- */

static tmpl_val f_first(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val zero = tmpl_int(0);
    tmpl_seq      *gen;

    if (a->self.kind == TV_STR) {
        tmpl_val letter = tmpl_item(r, &a->self, &zero);

        letter.markup = false; /* str's own iterator gives plain strings */
        return letter;
    }
    if (a->self.kind >= TV_LIST && a->self.kind <= TV_RANGE)
        return tmpl_item(r, &a->self, &zero);
    if (a->self.kind == TV_GEN) {
        gen = a->self.u.seq;
        return gen->pos < gen->n ? gen->item[gen->pos++] : tmpl_undef(NULL);
    }
    gen = tmpl_iterate(r, &a->self);
    return gen && gen->n ? gen->item[0] : tmpl_undef(NULL);
}

static tmpl_val f_last(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val  end = tmpl_int(-1);
    const tmpl_seq *s;

    if (a->self.kind == TV_STR)
        return tmpl_item(r, &a->self, &end);
    if (a->self.kind == TV_GEN)
        tmpl_fail(r, KVD_E_INVAL, "'generator' object is not reversible");
    s = r->st == KVD_OK ? tmpl_iterate(r, &a->self) : NULL;
    return s && s->n ? s->item[s->n - 1] : tmpl_undef(NULL);
}

static tmpl_val f_list(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_of_seq(TV_LIST, tmpl_iterate(r, &a->self)); /* lists cannot change: no copy */
}

static tmpl_val f_join(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->self);
    const tmpl_str *sep   = a->has[0] ? tmpl_to_str(r, &a->v[0]) : NULL;
    tmpl_sb         sb;

    tmpl_sb_init(&sb, r);
    for (size_t i = 0; items && i < items->n && tmpl_step(r, 1); i++) {
        const tmpl_val v =
            tmpl_arg_none(a, 1) ? items->item[i] : follow(r, items->item[i], &a->v[1], NULL);

        if (i)
            tmpl_sb_put_str(&sb, sep);
        if (r->st == KVD_OK)
            tmpl_sb_put_str(&sb, tmpl_to_str(r, &v));
    }
    return tmpl_sb_take(&sb);
}

static tmpl_val f_sum(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->self);
    tmpl_val        total = a->has[1] ? a->v[1] : tmpl_int(0);

    for (size_t i = 0; items && i < items->n && r->st == KVD_OK; i++) {
        const tmpl_val v =
            tmpl_arg_none(a, 0) ? items->item[i] : follow(r, items->item[i], &a->v[0], NULL);

        if (v.kind == TV_STR)
            tmpl_fail(r, KVD_E_INVAL, "filter 'sum' cannot sum strings");
        total = tmpl_arith(r, '+', &total, &v);
    }
    return total;
}

static tmpl_val f_items(tmpl_run *r, const tmpl_args *a)
{
    tmpl_seq *out;

    if (a->self.kind == TV_UNDEF)
        return tmpl_gen_new(r, tmpl_seq_new(r, 0));
    if (a->self.kind != TV_DICT) {
        tmpl_fail(r, KVD_E_INVAL, "Can only get item pairs from a mapping.");
        return tmpl_undef(NULL);
    }
    out = tmpl_seq_new(r, a->self.u.d->n);
    for (size_t i = 0; out && i < out->n && r->st == KVD_OK; i++)
        out->item[i] = tmpl_pair_new(r, &a->self.u.d->pair[i]);
    return tmpl_gen_new(r, out);
}

static tmpl_val f_unique(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *items = tmpl_iterate(r, &a->self);
    tmpl_seq       *out = tmpl_seq_new(r, 0), *seen = tmpl_seq_new(r, 0);

    for (size_t i = 0; items && out && seen && i < items->n && r->st == KVD_OK; i++) {
        const tmpl_val key = sort_key(r, items->item[i], tmpl_arg_none(a, 1) ? NULL : &a->v[1],
                                      tmpl_arg_truth(a, 0, false));
        const tmpl_val all = tmpl_of_seq(TV_LIST, seen);

        if (key.kind == TV_LIST || key.kind == TV_DICT)
            tmpl_fail(r, KVD_E_INVAL, "unhashable type: '%s'", tmpl_type_name(&key));
        if (r->st != KVD_OK || tmpl_contains(r, &all, &key))
            continue;
        tmpl_seq_push(r, seen, key);
        tmpl_seq_push(r, out, items->item[i]);
    }
    return tmpl_gen_new(r, out);
}

const tmpl_builtin tmpl_filters_seq[] = {
    { "dictsort", "case_sensitive by reverse", 0, f_dictsort },
    { "first", "", 0, f_first },
    { "items", "", 0, f_items },
    { "join", "d attribute", 0, f_join },
    { "last", "", 0, f_last },
    { "list", "", 0, f_list },
    { "max", "case_sensitive attribute", 0, f_max },
    { "min", "case_sensitive attribute", 0, f_min },
    { "reverse", "", 0, f_reverse },
    { "sort", "reverse case_sensitive attribute", 0, f_sort },
    { "sum", "attribute start", 0, f_sum },
    { "unique", "case_sensitive attribute", 0, f_unique },
    { NULL, NULL, 0, NULL },
};

/* ---- map, select, reject --------------------------------------------------------- */

/* The items of self; none where Jinja does not even look at a false value. */
static const tmpl_seq *lazy_items(tmpl_run *r, const tmpl_args *a)
{
    return tmpl_truth(&a->self) ? tmpl_iterate(r, &a->self) : tmpl_seq_new(r, 0);
}

/* The keyword argument of that name, or NULL. */
static const tmpl_val *keyword(const tmpl_args *a, const char *name)
{
    for (size_t k = 0; k < a->n_kw; k++) {
        if (tmpl_str_is(a->kw[k], name))
            return &a->val[a->n_pos + k];
    }
    return NULL;
}

static tmpl_val map_attribute(tmpl_run *r, const tmpl_args *a, const tmpl_val *path)
{
    const tmpl_seq *items = lazy_items(r, a);
    const tmpl_val *deflt = keyword(a, "default");
    tmpl_seq       *out   = items ? tmpl_seq_new(r, items->n) : NULL;

    if (a->n_kw > 1 + (deflt != NULL))
        tmpl_fail(r, KVD_E_INVAL, "unexpected keyword argument of filter 'map'");
    if (deflt && deflt->kind == TV_NONE)
        deflt = NULL;
    for (size_t i = 0; out && i < items->n && r->st == KVD_OK; i++)
        out->item[i] = follow(r, items->item[i], path, deflt);
    return tmpl_gen_new(r, out);
}

/* The builtin named by the at-th positional argument. */
static const tmpl_builtin *named(tmpl_run *r, const tmpl_args *a, size_t at,
                                 const tmpl_builtin *(*find)(const char *, size_t))
{
    const tmpl_val     *v = &a->val[at];
    const tmpl_builtin *b = v->kind == TV_STR ? find(v->u.s->data, v->u.s->len) : NULL;

    if (!b)
        tmpl_fail(r, KVD_E_UNSUPPORTED, "no filter or test named '%.*s' is supported",
                  v->kind == TV_STR ? (int)kvd_min_u64(v->u.s->len, 60) : 1,
                  v->kind == TV_STR ? v->u.s->data : "?");
    return b;
}

static tmpl_val f_map(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val     *path = keyword(a, "attribute");
    const tmpl_builtin *fn;
    const tmpl_seq     *items;
    tmpl_seq           *out;

    if (a->n_pos == 0) {
        if (path)
            return map_attribute(r, a, path);
        tmpl_fail(r, KVD_E_INVAL, "map requires a filter argument");
        return tmpl_undef(NULL);
    }
    fn    = named(r, a, 0, tmpl_find_filter);
    items = fn ? lazy_items(r, a) : NULL;
    out   = items ? tmpl_seq_new(r, items->n) : NULL;
    for (size_t i = 0; out && i < items->n && r->st == KVD_OK; i++)
        out->item[i] =
            tmpl_builtin_call(r, fn, items->item[i], a->val + 1, a->n_pos - 1, a->kw, a->n_kw);
    return tmpl_gen_new(r, out);
}

static tmpl_val pick(tmpl_run *r, const tmpl_args *a, bool by_attr, bool want)
{
    const size_t        at    = by_attr ? 1 : 0;
    const tmpl_builtin *test  = a->n_pos > at ? named(r, a, at, tmpl_find_test) : NULL;
    const tmpl_seq     *items = r->st == KVD_OK ? lazy_items(r, a) : NULL;
    tmpl_seq           *out   = tmpl_seq_new(r, 0);

    for (size_t i = 0; items && i < items->n && r->st == KVD_OK; i++) {
        tmpl_val v = by_attr ? follow(r, items->item[i], &a->val[0], NULL) : items->item[i];

        if (test)
            v = tmpl_builtin_call(r, test, v, a->val + at + 1, a->n_pos - at - 1, a->kw, a->n_kw);
        if (r->st == KVD_OK && tmpl_truth(&v) == want)
            tmpl_seq_push(r, out, items->item[i]);
    }
    return tmpl_gen_new(r, out);
}

static tmpl_val f_select(tmpl_run *r, const tmpl_args *a)
{
    return pick(r, a, false, true);
}

static tmpl_val f_reject(tmpl_run *r, const tmpl_args *a)
{
    return pick(r, a, false, false);
}

static tmpl_val f_selectattr(tmpl_run *r, const tmpl_args *a)
{
    return pick(r, a, true, true);
}

static tmpl_val f_rejectattr(tmpl_run *r, const tmpl_args *a)
{
    return pick(r, a, true, false);
}

const tmpl_builtin tmpl_filters_pick[] = {
    { "map", NULL, 0, f_map },
    { "reject", NULL, 0, f_reject },
    { "rejectattr", NULL, 1, f_rejectattr },
    { "select", NULL, 0, f_select },
    { "selectattr", NULL, 1, f_selectattr },
    { NULL, NULL, 0, NULL },
};
