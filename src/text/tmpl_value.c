/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_value.c - run services, containers, and what every value can do: truth, equality, order,
 * membership, iteration, attributes and subscripts, as Python and Jinja's sandbox have them. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/tmpl_ast.h"

/* ---- run ------------------------------------------------------------------------- */

void tmpl_fail(tmpl_run *r, kvd_status st, const char *fmt, ...)
{
    char    what[400];
    va_list ap;

    if (r->st != KVD_OK)
        return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    r->st = kvd_fail(r->err, st, 0, "chat template line %u: %s", r->line, what);
}

bool tmpl_step(tmpl_run *r, uint64_t n)
{
    if (r->st != KVD_OK)
        return false;
    if (n > r->steps_left) {
        r->steps_left = 0;
        tmpl_fail(r, KVD_E_INVAL, "rendering takes too many steps");
        return false;
    }
    r->steps_left -= n;
    return true;
}

bool tmpl_enter(tmpl_run *r)
{
    if (r->depth >= TMPL_MAX_DEPTH) {
        tmpl_fail(r, KVD_E_INVAL, "rendering nests deeper than %u levels", TMPL_MAX_DEPTH);
        return false;
    }
    if (!tmpl_step(r, 1))
        return false;
    r->depth++;
    return true;
}

void tmpl_leave(tmpl_run *r)
{
    r->depth--;
}

void *tmpl_alloc(tmpl_run *r, size_t n, size_t bytes)
{
    void *p;

    if (!tmpl_step(r, n / 16))
        return NULL;
    p = kvd_arena_calloc(&r->mem, n, bytes);
    if (!p)
        tmpl_fail(r, r->mem.full ? KVD_E_INVAL : KVD_E_NOMEM,
                  r->mem.full ? "it needs too much memory" : "no memory");
    return p;
}

/* ---- containers ------------------------------------------------------------------ */

tmpl_seq *tmpl_seq_new(tmpl_run *r, size_t n)
{
    tmpl_seq *s = tmpl_alloc(r, 1, sizeof(*s));

    if (!s)
        return NULL;
    s->item = tmpl_alloc(r, n, sizeof(tmpl_val));
    if (!s->item)
        return NULL;
    s->n = n;
    return s;
}

tmpl_dict *tmpl_dict_new(tmpl_run *r, size_t cap)
{
    tmpl_dict *d = tmpl_alloc(r, 1, sizeof(*d));

    if (!d)
        return NULL;
    d->pair = tmpl_alloc(r, cap, sizeof(tmpl_pair));
    d->cap  = d->pair ? cap : 0;
    return d;
}

static bool is_hashable(const tmpl_val *v)
{
    return v->kind != TV_LIST && v->kind != TV_DICT && v->kind != TV_VIEW;
}

tmpl_val *tmpl_dict_get(tmpl_run *r, const tmpl_dict *d, const tmpl_val *key)
{
    if (key->kind == TV_STR)
        return tmpl_dict_find(r, d, key->u.s->data, key->u.s->len);
    if (!is_hashable(key)) {
        tmpl_fail(r, KVD_E_INVAL, "unhashable type: '%s'", tmpl_type_name(key));
        return NULL;
    }
    for (size_t i = 0; i < d->n && tmpl_step(r, 1); i++) {
        if (tmpl_equal(r, &d->pair[i].key, key))
            return &d->pair[i].val;
    }
    return NULL;
}

tmpl_val *tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, const char *key, size_t len)
{
    for (size_t i = 0; i < d->n; i++) {
        const tmpl_val *k = &d->pair[i].key;

        if (i % 16 == 15 && !tmpl_step(r, 1 + len / 16))
            return NULL;
        if (k->kind == TV_STR && k->u.s->len == len && memcmp(k->u.s->data, key, len) == 0)
            return &d->pair[i].val;
    }
    return NULL;
}

static void dict_append(tmpl_run *r, tmpl_dict *d, tmpl_val key, tmpl_val val)
{
    if (d->n == d->cap) {
        const size_t cap  = d->cap ? d->cap * 2 : 4;
        tmpl_pair   *pair = tmpl_alloc(r, cap, sizeof(*pair));

        if (!pair)
            return;
        if (d->n)
            memcpy(pair, d->pair, d->n * sizeof(*pair));
        d->pair = pair;
        d->cap  = cap;
    }
    d->pair[d->n++] = (tmpl_pair){ key, val };
}

void tmpl_dict_set(tmpl_run *r, tmpl_dict *d, tmpl_val key, tmpl_val val)
{
    tmpl_val *old = d ? tmpl_dict_get(r, d, &key) : NULL;

    if (!d || r->st != KVD_OK)
        return;
    if (old)
        *old = val;
    else
        dict_append(r, d, key, val);
}

/* ---- questions ------------------------------------------------------------------- */

const char *tmpl_type_name(const tmpl_val *v)
{
    static const char *const name[] = { "Undefined", "NoneType",    "bool",  "int",
                                        "float",     "int",         "str",   "list",
                                        "tuple",     "range",       "",      "generator",
                                        "dict",      "Namespace",   "Macro", "function",
                                        "method",    "LoopContext", "Joiner" };

    return v->kind == TV_VIEW ? v->u.seq->view : name[v->kind];
}

bool tmpl_truth(const tmpl_val *v)
{
    switch (v->kind) {
    case TV_UNDEF:
    case TV_NONE:
        return false;
    case TV_BOOL:
        return v->u.b;
    case TV_INT:
        return v->u.i != 0;
    case TV_FLOAT:
        return v->u.f != 0;
    case TV_STR:
        return v->u.s->len != 0;
    case TV_LIST:
    case TV_TUPLE:
    case TV_RANGE:
    case TV_VIEW:
        return v->u.seq->n != 0;
    case TV_DICT:
        return v->u.d->n != 0;
    default:
        return true;
    }
}

bool tmpl_is_number(const tmpl_val *v)
{
    return v->kind == TV_INT || v->kind == TV_FLOAT || v->kind == TV_BOOL;
}

int64_t tmpl_as_int(const tmpl_val *v)
{
    return v->kind == TV_BOOL ? v->u.b : v->u.i;
}

double tmpl_as_float(const tmpl_val *v)
{
    return v->kind == TV_FLOAT ? v->u.f : (double)tmpl_as_int(v);
}

/* Exact where an int meets a float beyond 2^53.  Unordered (NaN): 2. */
static int number_order(const tmpl_val *a, const tmpl_val *b)
{
    if (a->kind != TV_FLOAT && b->kind != TV_FLOAT) {
        const int64_t x = tmpl_as_int(a), y = tmpl_as_int(b);

        return x < y ? -1 : x > y;
    }
    if (a->kind == TV_FLOAT && b->kind == TV_FLOAT) {
        if (isnan(a->u.f) || isnan(b->u.f))
            return 2;
        return a->u.f < b->u.f ? -1 : a->u.f > b->u.f;
    }
    if (a->kind == TV_FLOAT) {
        const int o = number_order(b, a);

        return o == 2 ? 2 : -o;
    }
    if (isnan(b->u.f))
        return 2;
    if (b->u.f >= 0x1p63)
        return -1;
    if (b->u.f < -0x1p63)
        return 1;
    {
        const int64_t x = tmpl_as_int(a), y = (int64_t)b->u.f;

        if (x != y)
            return x < y ? -1 : 1;
        return b->u.f > (double)y ? -1 : b->u.f < (double)y;
    }
}

static bool dict_equal(tmpl_run *r, const tmpl_dict *a, const tmpl_dict *b)
{
    if (a == b)
        return true;
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++) {
        const tmpl_val *other = tmpl_dict_get(r, b, &a->pair[i].key);

        if (!other || !tmpl_equal(r, &a->pair[i].val, other))
            return false;
    }
    return true;
}

static bool seq_equal(tmpl_run *r, const tmpl_seq *a, const tmpl_seq *b)
{
    if (a == b)
        return true;
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++) {
        if (!tmpl_equal(r, &a->item[i], &b->item[i]))
            return false;
    }
    return true;
}

static bool equal_inside(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    if (tmpl_is_number(a) && tmpl_is_number(b))
        return number_order(a, b) == 0;
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case TV_UNDEF:
    case TV_NONE:
        return true;
    case TV_STR:
    case TV_DIGITS:
        return a->u.s->len == b->u.s->len && tmpl_step(r, a->u.s->len / 64) &&
               memcmp(a->u.s->data, b->u.s->data, a->u.s->len) == 0;
    case TV_LIST:
    case TV_TUPLE:
    case TV_RANGE:
        return seq_equal(r, a->u.seq, b->u.seq);
    case TV_DICT:
        return dict_equal(r, a->u.d, b->u.d);
    case TV_METHOD:
        return a->u.method->fn == b->u.method->fn;
    default:
        return a->u.macro == b->u.macro; /* identity: the pointers of the union */
    }
}

bool tmpl_equal(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    bool same;

    if (!tmpl_enter(r))
        return false;
    same = equal_inside(r, a, b);
    tmpl_leave(r);
    return same;
}

static int str_order(const tmpl_str *a, const tmpl_str *b)
{
    const int c = memcmp(a->data, b->data, kvd_min_u64(a->len, b->len));

    if (c) /* UTF-8 sorts as its code points */
        return c < 0 ? -1 : 1;
    return a->len < b->len ? -1 : a->len > b->len;
}

static int order_inside(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    if (tmpl_is_number(a) && tmpl_is_number(b))
        return number_order(a, b);
    if (a->kind == TV_STR && b->kind == TV_STR) {
        tmpl_step(r, kvd_min_u64(a->u.s->len, b->u.s->len) / 64);
        return str_order(a->u.s, b->u.s);
    }
    if (a->kind == b->kind && (a->kind == TV_LIST || a->kind == TV_TUPLE)) {
        for (size_t i = 0; i < a->u.seq->n && i < b->u.seq->n && r->st == KVD_OK; i++) {
            if (!tmpl_equal(r, &a->u.seq->item[i], &b->u.seq->item[i]))
                return tmpl_order(r, &a->u.seq->item[i], &b->u.seq->item[i]);
        }
        return a->u.seq->n < b->u.seq->n ? -1 : a->u.seq->n > b->u.seq->n;
    }
    if (a->kind == TV_UNDEF || b->kind == TV_UNDEF) {
        const tmpl_str *name = a->kind == TV_UNDEF ? a->u.s : b->u.s;

        tmpl_fail(r, KVD_E_INVAL, "'%.*s' is undefined", name ? (int)kvd_min_u64(name->len, 60) : 5,
                  name ? name->data : "value");
    } else {
        tmpl_fail(r, KVD_E_INVAL, "'%s' and '%s' cannot be ordered", tmpl_type_name(a),
                  tmpl_type_name(b));
    }
    return 0;
}

int tmpl_order(tmpl_run *r, const tmpl_val *a, const tmpl_val *b)
{
    int c;

    if (!tmpl_enter(r))
        return 0;
    c = order_inside(r, a, b);
    tmpl_leave(r);
    return c;
}

bool tmpl_contains(tmpl_run *r, const tmpl_val *container, const tmpl_val *v)
{
    const tmpl_seq *s;

    if (container->kind == TV_UNDEF)
        return false;
    if (container->kind == TV_STR) {
        if (v->kind != TV_STR) {
            tmpl_fail(r, KVD_E_INVAL, "'in <string>' requires a string, not %s", tmpl_type_name(v));
            return false;
        }
        return tmpl_str_find(r, container->u.s, v->u.s, 0) != TMPL_UNKNOWN;
    }
    if (container->kind == TV_DICT)
        return tmpl_dict_get(r, container->u.d, v) != NULL;
    if (!tmpl_is_seq(container)) {
        tmpl_fail(r, KVD_E_INVAL, "argument of type '%s' is not iterable",
                  tmpl_type_name(container));
        return false;
    }
    s = container->u.seq;
    for (size_t i = s->pos; i < s->n && r->st == KVD_OK; i++) {
        if (container->kind == TV_GEN)
            container->u.seq->pos = i + 1;
        if (tmpl_equal(r, &s->item[i], v))
            return true;
    }
    return false;
}

int64_t tmpl_length(tmpl_run *r, const tmpl_val *v)
{
    switch (v->kind) {
    case TV_UNDEF:
        return 0;
    case TV_STR:
        tmpl_step(r, v->u.s->len / 64);
        return (int64_t)tmpl_str_chars(v->u.s);
    case TV_LIST:
    case TV_TUPLE:
    case TV_RANGE:
    case TV_VIEW:
        return (int64_t)v->u.seq->n;
    case TV_DICT:
        return (int64_t)v->u.d->n;
    default:
        tmpl_fail(r, KVD_E_INVAL, "object of type '%s' has no len()", tmpl_type_name(v));
        return 0;
    }
}

/* ---- iteration ------------------------------------------------------------------- */

bool tmpl_is_iterable(const tmpl_val *v)
{
    return v->kind == TV_UNDEF || v->kind == TV_STR || tmpl_is_seq(v) || v->kind == TV_DICT ||
           v->kind == TV_LOOP;
}

static tmpl_seq *characters(tmpl_run *r, const tmpl_str *s)
{
    tmpl_seq *out = tmpl_seq_new(r, tmpl_str_chars(s));
    size_t    at  = 0;

    for (size_t i = 0; out && i < out->n && tmpl_step(r, 1); i++) {
        size_t end = at + 1;

        while (end < s->len && ((unsigned char)s->data[end] & 0xc0) == 0x80)
            end++;
        out->item[i] = tmpl_str_part(r, s, at, end);
        at           = end;
    }
    return r->st == KVD_OK ? out : NULL;
}

static tmpl_seq *iterate_gen(tmpl_run *r, tmpl_seq *gen)
{
    tmpl_seq *out = tmpl_alloc(r, 1, sizeof(*out));

    if (!out)
        return NULL;
    out->item = gen->item + gen->pos;
    out->n    = gen->n - gen->pos;
    gen->pos  = gen->n;
    return out;
}

tmpl_seq *tmpl_iterate(tmpl_run *r, const tmpl_val *v)
{
    tmpl_seq *out;

    if (v->kind == TV_GEN)
        return iterate_gen(r, v->u.seq);
    if (tmpl_is_seq(v))
        return v->u.seq;
    if (v->kind == TV_STR)
        return characters(r, v->u.s);
    if (v->kind == TV_UNDEF)
        return tmpl_seq_new(r, 0);
    if (v->kind != TV_DICT) {
        tmpl_fail(r, KVD_E_INVAL, "'%s' object is not iterable", tmpl_type_name(v));
        return NULL;
    }
    out = tmpl_seq_new(r, v->u.d->n);
    for (size_t i = 0; out && i < out->n; i++)
        out->item[i] = v->u.d->pair[i].key;
    return out;
}

/* ---- attributes and subscripts --------------------------------------------------- */

static tmpl_val method_of(tmpl_run *r, const tmpl_val *obj, const tmpl_str *name)
{
    const tmpl_builtin *fn = tmpl_find_method(obj->kind, name->data, name->len);
    tmpl_method        *m;

    if (!fn)
        return tmpl_undef(name);
    m = tmpl_alloc(r, 1, sizeof(*m));
    if (!m)
        return tmpl_undef(name);
    *m = (tmpl_method){ *obj, fn };
    return (tmpl_val){ .kind = TV_METHOD, .u.method = m };
}

static void fail_undefined(tmpl_run *r, const tmpl_val *v)
{
    tmpl_fail(r, KVD_E_INVAL, "'%.*s' is undefined", v->u.s ? (int)kvd_min_u64(v->u.s->len, 60) : 5,
              v->u.s ? v->u.s->data : "value");
}

tmpl_val tmpl_attr(tmpl_run *r, const tmpl_val *obj, const tmpl_str *name)
{
    const tmpl_val *found;
    tmpl_val        m;

    switch (obj->kind) {
    case TV_UNDEF:
        fail_undefined(r, obj);
        break;
    case TV_LOOP:
        return tmpl_loop_attr(r, obj->u.loop, obj, name);
    case TV_NS:
        found = tmpl_dict_find(r, obj->u.d, name->data, name->len);
        return found ? *found : tmpl_undef(name);
    case TV_DICT:
        m = method_of(r, obj, name);
        if (m.kind != TV_UNDEF)
            return m;
        found = tmpl_dict_find(r, obj->u.d, name->data, name->len);
        return found ? *found : m;
    default:
        return method_of(r, obj, name);
    }
    return tmpl_undef(name);
}

/* The index-th of n, negative from the end; false: out of range. */
static bool place(int64_t index, size_t n, size_t *at)
{
    if (index < 0)
        index += (int64_t)n;
    if (index < 0 || (uint64_t)index >= n)
        return false;
    *at = (size_t)index;
    return true;
}

/* A piece of a string is markup as the whole is. */
static tmpl_val like(const tmpl_val *obj, tmpl_val piece)
{
    piece.markup = obj->markup;
    return piece;
}

static tmpl_val character(tmpl_run *r, const tmpl_str *s, int64_t index)
{
    size_t at, from, to;

    if (!tmpl_step(r, s->len / 64) || !place(index, tmpl_str_chars(s), &at))
        return tmpl_undef(NULL);
    from = tmpl_str_offset(s, at);
    for (to = from + 1; to < s->len && ((unsigned char)s->data[to] & 0xc0) == 0x80;)
        to++;
    return tmpl_str_part(r, s, from, to);
}

tmpl_val tmpl_item(tmpl_run *r, const tmpl_val *obj, const tmpl_val *key)
{
    const bool      by_int = key->kind == TV_INT || key->kind == TV_BOOL;
    const tmpl_val *found;
    size_t          at;

    if (obj->kind == TV_UNDEF) {
        fail_undefined(r, obj);
        return tmpl_undef(NULL);
    }
    if (obj->kind == TV_DICT && is_hashable(key)) {
        found = tmpl_dict_get(r, obj->u.d, key);
        if (found)
            return *found;
    } else if (by_int && obj->kind == TV_STR) {
        return like(obj, character(r, obj->u.s, tmpl_as_int(key)));
    } else if (by_int && obj->kind >= TV_LIST && obj->kind <= TV_RANGE) {
        if (place(tmpl_as_int(key), obj->u.seq->n, &at))
            return obj->u.seq->item[at];
    }
    if (key->kind != TV_STR)
        return tmpl_undef(NULL);
    return obj->kind == TV_DICT ? method_of(r, obj, key->u.s) : tmpl_attr(r, obj, key->u.s);
}

/* Python's slice.indices(): first, end and step over n items; false: failed. */
static bool slice_bounds(tmpl_run *r, const tmpl_val bound[3], int64_t n, int64_t out[3])
{
    int64_t v[3] = { 0, 0, 1 };
    bool    has[3];

    for (int i = 0; i < 3; i++) {
        has[i] = bound[i].kind == TV_INT || bound[i].kind == TV_BOOL;
        if (has[i])
            v[i] = tmpl_as_int(&bound[i]);
        else if (bound[i].kind != TV_NONE) {
            tmpl_fail(r, KVD_E_INVAL, "slice indices must be integers or None");
            return false;
        }
    }
    if (v[2] == 0) {
        tmpl_fail(r, KVD_E_INVAL, "slice step cannot be zero");
        return false;
    }
    if (v[2] < -INT64_MAX)
        v[2] = -INT64_MAX;
    for (int i = 0; i < 2; i++) {
        const int64_t low = v[2] < 0 ? -1 : 0, high = v[2] < 0 ? n - 1 : n;

        if (!has[i])
            v[i] = (v[2] < 0) == (i == 0) ? high : low;
        else if (v[i] < 0)
            v[i] = v[i] + n < low ? low : v[i] + n;
        else if (v[i] > high)
            v[i] = high;
    }
    memcpy(out, v, sizeof(v));
    return true;
}

static size_t slice_count(const int64_t b[3])
{
    if (b[2] > 0)
        return b[0] < b[1] ? (size_t)((b[1] - b[0] - 1) / b[2] + 1) : 0;
    return b[0] > b[1] ? (size_t)((b[0] - b[1] - 1) / -b[2] + 1) : 0;
}

static tmpl_val slice_str(tmpl_run *r, const tmpl_val *obj, const int64_t b[3])
{
    const tmpl_str *s = obj->u.s;
    const size_t    n = slice_count(b);
    tmpl_seq       *chars;
    tmpl_sb         sb;

    if (b[2] == 1) {
        const size_t from = tmpl_str_offset(s, (size_t)b[0]);

        return tmpl_str_part(r, s, from, n ? tmpl_str_offset(s, (size_t)b[1]) : from);
    }
    chars = tmpl_iterate(r, obj);
    tmpl_sb_init(&sb, r);
    for (size_t i = 0; chars && i < n && r->st == KVD_OK; i++)
        tmpl_sb_put_str(&sb, chars->item[b[0] + (int64_t)i * b[2]].u.s);
    return tmpl_sb_take(&sb);
}

tmpl_val tmpl_slice(tmpl_run *r, const tmpl_val *obj, const tmpl_val bound[3])
{
    int64_t   b[3];
    tmpl_seq *out;
    size_t    n;

    if (obj->kind == TV_UNDEF)
        fail_undefined(r, obj);
    else if (obj->kind != TV_STR && !(obj->kind >= TV_LIST && obj->kind <= TV_RANGE))
        tmpl_fail(r, KVD_E_INVAL, "'%s' object cannot be sliced", tmpl_type_name(obj));
    if (r->st != KVD_OK)
        return tmpl_undef(NULL);
    if (!slice_bounds(r, bound, tmpl_length(r, obj), b))
        return tmpl_undef(NULL);
    if (obj->kind == TV_STR)
        return like(obj, slice_str(r, obj, b));
    n   = slice_count(b);
    out = tmpl_seq_new(r, b[2] == 1 ? 0 : n);
    if (out && b[2] == 1) { /* lists cannot change: a part shares their items */
        out->item = obj->u.seq->item + b[0];
        out->n    = n;
    }
    for (size_t i = 0; out && b[2] != 1 && i < n; i++)
        out->item[i] = obj->u.seq->item[b[0] + (int64_t)i * b[2]];
    return tmpl_of_seq(obj->kind == TV_TUPLE ? TV_TUPLE : TV_LIST, out);
}
