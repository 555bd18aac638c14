/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_global.c - global functions, the methods of lists, dicts and loops, and the loop variable.
 */
#include <stdio.h>
#include <string.h>

#include "text/tmpl_builtin.h"

#define RANGE_MAX 100000u /* as Jinja's sandbox has it */

/* ---- lists and dicts ------------------------------------------------------------- */

static tmpl_val m_list_count(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *s = a->self.u.seq;
    int64_t         n = 0;

    for (size_t i = 0; i < s->n && r->st == KVD_OK; i++)
        n += tmpl_equal(r, &s->item[i], &a->v[0]);
    return tmpl_int(n);
}

static tmpl_val m_list_index(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_seq *s = a->self.u.seq;

    for (size_t i = 0; i < s->n && r->st == KVD_OK; i++) {
        if (tmpl_equal(r, &s->item[i], &a->v[0]))
            return tmpl_int((int64_t)i);
    }
    tmpl_fail(r, KVD_E_INVAL, "the value is not in the list");
    return tmpl_undef(NULL);
}

static tmpl_val m_copy(tmpl_run *r, const tmpl_args *a)
{
    (void)r;
    return a->self; /* neither lists nor dicts can change */
}

static tmpl_val dict_view(tmpl_run *r, const tmpl_args *a, const char *name)
{
    const tmpl_dict *d = a->self.u.d;
    tmpl_seq        *s = tmpl_seq_new(r, d->n);

    if (!s)
        return tmpl_undef(NULL);
    s->view = name;
    for (size_t i = 0; i < d->n && r->st == KVD_OK; i++)
        s->item[i] = strcmp(name, "dict_items") == 0    ? tmpl_pair_new(r, &d->pair[i])
                     : strcmp(name, "dict_values") == 0 ? d->pair[i].val
                                                        : d->pair[i].key;
    return tmpl_of_seq(TV_VIEW, s);
}

static tmpl_val m_items(tmpl_run *r, const tmpl_args *a)
{
    return dict_view(r, a, "dict_items");
}

static tmpl_val m_keys(tmpl_run *r, const tmpl_args *a)
{
    return dict_view(r, a, "dict_keys");
}

static tmpl_val m_values(tmpl_run *r, const tmpl_args *a)
{
    return dict_view(r, a, "dict_values");
}

static tmpl_val m_get(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_val *v = tmpl_dict_get(r, a->self.u.d, &a->v[0]);

    return v ? *v : a->has[1] ? a->v[1] : tmpl_none();
}

const tmpl_builtin tmpl_methods_list[] = {
    { "copy", "", 0, m_copy },
    { "count", "-value", 1, m_list_count },
    { "index", "-value", 1, m_list_index },
    { NULL, NULL, 0, NULL },
};

const tmpl_builtin tmpl_methods_dict[] = {
    { "copy", "", 0, m_copy },
    { "fromkeys", NULL, 0, NULL },
    { "get", "-key -default", 1, m_get },
    { "items", "", 0, m_items },
    { "keys", "", 0, m_keys },
    { "values", "", 0, m_values },
    { NULL, NULL, 0, NULL },
};

/* ---- loops ----------------------------------------------------------------------- */

static tmpl_val m_cycle(tmpl_run *r, const tmpl_args *a)
{
    if (a->n_pos == 0 || a->n_kw) {
        tmpl_fail(r, KVD_E_INVAL, "no items for cycling given");
        return tmpl_undef(NULL);
    }
    return a->val[a->self.u.loop->idx % a->n_pos];
}

static tmpl_val m_changed(tmpl_run *r, const tmpl_args *a)
{
    tmpl_loop *l    = a->self.u.loop;
    tmpl_seq  *seen = tmpl_seq_new(r, a->n_pos);
    bool       changed;

    if (!seen)
        return tmpl_undef(NULL);
    for (size_t i = 0; i < seen->n; i++)
        seen->item[i] = a->val[i];
    {
        const tmpl_val now = tmpl_of_seq(TV_TUPLE, seen), was = tmpl_of_seq(TV_TUPLE, l->seen);

        changed = !l->seen || !tmpl_equal(r, &now, &was);
    }
    l->seen = seen;
    return tmpl_bool(changed);
}

const tmpl_builtin tmpl_methods_loop[] = {
    { "changed", NULL, 0, m_changed },
    { "cycle", NULL, 0, m_cycle },
    { NULL, NULL, 0, NULL },
};

static tmpl_val counted(size_t n)
{
    tmpl_val v = tmpl_int((int64_t)n);

    v.trusted = true; /* the template's own counting */
    return v;
}

tmpl_val tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, const tmpl_val *self, const tmpl_str *name)
{
    const tmpl_builtin *fn;
    tmpl_method        *m;

    if (tmpl_str_is(name, "index0"))
        return counted(l->idx);
    if (tmpl_str_is(name, "index"))
        return counted(l->idx + 1);
    if (tmpl_str_is(name, "first"))
        return tmpl_bool(l->idx == 0);
    if (tmpl_str_is(name, "last"))
        return tmpl_bool(l->idx + 1 >= l->n);
    if (tmpl_str_is(name, "length"))
        return tmpl_int((int64_t)l->n);
    if (tmpl_str_is(name, "revindex"))
        return tmpl_int((int64_t)(l->n - l->idx));
    if (tmpl_str_is(name, "revindex0"))
        return tmpl_int((int64_t)(l->n - l->idx) - 1);
    if (tmpl_str_is(name, "depth"))
        return counted(1); /* loops are never recursive here */
    if (tmpl_str_is(name, "depth0"))
        return counted(0);
    if (tmpl_str_is(name, "previtem"))
        return l->idx > 0 && l->idx <= l->n ? l->item[l->idx - 1] : tmpl_undef(name);
    if (tmpl_str_is(name, "nextitem"))
        return l->idx + 1 < l->n ? l->item[l->idx + 1] : tmpl_undef(name);
    fn = tmpl_find_method(TV_LOOP, name->data, name->len);
    m  = fn ? tmpl_alloc(r, 1, sizeof(*m)) : NULL;
    if (!m)
        return tmpl_undef(name);
    *m = (tmpl_method){ *self, fn };
    return (tmpl_val){ .kind = TV_METHOD, .u.method = m };
}

/* ---- functions ------------------------------------------------------------------- */

static tmpl_val g_raise(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *s = tmpl_to_str(r, &a->v[0]);
    char            text[400];
    size_t          n = 0;

    for (; s && n < s->len && n < sizeof(text) - 1; n++)
        text[n] = (unsigned char)s->data[n] < 0x20 ? ' ' : s->data[n];
    text[utf8_complete_prefix(text, n)] = 0;
    tmpl_fail(r, KVD_E_INVAL, "%s", text);
    return tmpl_undef(NULL);
}

/* A dict from keywords, and from what one positional argument holds. */
static tmpl_dict *dict_from_args(tmpl_run *r, const tmpl_args *a)
{
    tmpl_dict *d = tmpl_dict_new(r, a->n_kw);

    if (a->n_pos > 1 || (a->n_pos == 1 && a->val[0].kind != TV_DICT && a->val[0].kind != TV_NS)) {
        tmpl_fail(r, KVD_E_UNSUPPORTED, "a dict or namespace made of '%s' is not supported",
                  tmpl_type_name(&a->val[0]));
        return NULL;
    }
    for (size_t i = 0; d && a->n_pos && i < a->val[0].u.d->n && r->st == KVD_OK; i++)
        tmpl_dict_set(r, d, a->val[0].u.d->pair[i].key, a->val[0].u.d->pair[i].val);
    for (size_t k = 0; d && k < a->n_kw && r->st == KVD_OK; k++)
        tmpl_dict_set(r, d, tmpl_of_str(a->kw[k]), a->val[a->n_pos + k]);
    return r->st == KVD_OK ? d : NULL;
}

static tmpl_val g_dict(tmpl_run *r, const tmpl_args *a)
{
    tmpl_dict *d = dict_from_args(r, a);

    return d ? (tmpl_val){ .kind = TV_DICT, .u.d = d } : tmpl_undef(NULL);
}

static tmpl_val g_namespace(tmpl_run *r, const tmpl_args *a)
{
    tmpl_dict *d = dict_from_args(r, a);

    for (size_t i = 0; d && i < d->n; i++) {
        const tmpl_val *key = &d->pair[i].key;

        if (key->kind == TV_STR && key->u.s->len && key->u.s->data[0] == '_') {
            tmpl_fail(r, KVD_E_INVAL, "a namespace attribute must not begin with '_'");
            return tmpl_undef(NULL);
        }
    }
    return d ? (tmpl_val){ .kind = TV_NS, .u.d = d } : tmpl_undef(NULL);
}

static tmpl_val g_joiner(tmpl_run *r, const tmpl_args *a)
{
    tmpl_joiner *j = tmpl_alloc(r, 1, sizeof(*j));

    if (!j)
        return tmpl_undef(NULL);
    j->sep = a->has[0] ? a->v[0] : tmpl_str_new(r, ", ", 2, false);
    return (tmpl_val){ .kind = TV_JOINER, .u.joiner = j };
}

static uint64_t range_count(int64_t start, int64_t stop, int64_t step)
{
    if (step > 0)
        return start < stop ? ((uint64_t)stop - (uint64_t)start - 1) / (uint64_t)step + 1 : 0;
    return start > stop ? ((uint64_t)start - (uint64_t)stop - 1) / (0 - (uint64_t)step) + 1 : 0;
}

static tmpl_val g_range(tmpl_run *r, const tmpl_args *a)
{
    const int64_t x = tmpl_arg_int(r, a, 0, 0), y = tmpl_arg_int(r, a, 1, 0);
    const int64_t step  = tmpl_arg_int(r, a, 2, 1);
    const int64_t start = a->has[1] ? x : 0, stop = a->has[1] ? y : x;
    uint64_t      n;
    tmpl_seq     *s;

    if (step == 0)
        tmpl_fail(r, KVD_E_INVAL, "range() arg 3 must not be zero");
    n = step ? range_count(start, stop, step) : 0;
    if (n > RANGE_MAX)
        tmpl_fail(r, KVD_E_INVAL, "Range too big. The sandbox blocks ranges larger than %u.",
                  RANGE_MAX);
    s = r->st == KVD_OK ? tmpl_seq_new(r, n) : NULL;
    if (!s)
        return tmpl_undef(NULL);
    for (uint64_t i = 0; i < n; i++)
        s->item[i] = tmpl_int(start + (int64_t)i * step);
    s->start = start;
    s->stop  = stop;
    s->step  = step;
    return tmpl_of_seq(TV_RANGE, s);
}

/* ---- the date -------------------------------------------------------------------- */

typedef struct civil {
    int64_t year;
    int     month, day, hour, minute, second, weekday, yearday; /* month 1.., weekday 0 = Sunday */
} civil;

/* Days since 1970 to a date of the Gregorian calendar (400-year cycles from 1 March of year 0). */
static civil civil_from_unix(int64_t t)
{
    static const int before[] = { 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334 };
    const int64_t    days     = t / 86400 - (t % 86400 < 0);
    const int        secs     = (int)(t - days * 86400);
    const int64_t    z        = days + 719468;
    const int64_t    era      = (z >= 0 ? z : z - 146096) / 146097;
    const int64_t    doe      = z - era * 146097;
    const int64_t    yoe      = (doe - doe / 1460 + doe / 36524 - doe / 146096) / 365;
    const int64_t    doy      = doe - (365 * yoe + yoe / 4 - yoe / 100);
    const int64_t    mp       = (5 * doy + 2) / 153;
    civil            c;

    c.day     = (int)(doy - (153 * mp + 2) / 5 + 1);
    c.month   = (int)(mp < 10 ? mp + 3 : mp - 9);
    c.year    = yoe + era * 400 + (c.month <= 2);
    c.hour    = secs / 3600;
    c.minute  = secs / 60 % 60;
    c.second  = secs % 60;
    c.weekday = (int)(((days + 4) % 7 + 7) % 7);
    c.yearday = before[c.month - 1] + c.day - 1;
    c.yearday += c.month > 2 && (c.year % 4 == 0 && (c.year % 100 != 0 || c.year % 400 == 0));
    return c;
}

/* Directives that are a number: its value and how many digits it is padded to. */
static bool number_directive(char d, const civil *c, int *value, int *width)
{
    const int h12 = c->hour % 12 ? c->hour % 12 : 12;
    const struct {
        char d;
        int  value, width;
    } known[] = {
        { 'Y', (int)c->year, 1 },
        { 'y', (int)(c->year % 100), 2 },
        { 'm', c->month, 2 },
        { 'd', c->day, 2 },
        { 'H', c->hour, 2 },
        { 'I', h12, 2 },
        { 'M', c->minute, 2 },
        { 'S', c->second, 2 },
        { 'j', c->yearday + 1, 3 },
        { 'w', c->weekday, 1 },
        { 'u', c->weekday ? c->weekday : 7, 1 },
    };

    for (size_t i = 0; i < KVD_COUNTOF(known); i++) {
        if (known[i].d != d)
            continue;
        *value = known[i].value;
        *width = known[i].width;
        return true;
    }
    return false;
}

/* One directive, in English whatever the locale; bare: no padding.  false: unknown. */
static bool put_directive(char out[40], char d, bool bare, const civil *c)
{
    static const char *const month[] = { "January",   "February", "March",    "April",
                                         "May",       "June",     "July",     "August",
                                         "September", "October",  "November", "December" };
    static const char *const day[]   = { "Sunday",   "Monday", "Tuesday", "Wednesday",
                                         "Thursday", "Friday", "Saturday" };
    int                      value, width;

    if (number_directive(d, c, &value, &width))
        snprintf(out, 40, "%0*d", bare ? 1 : width, value);
    else if (d == 'e')
        snprintf(out, 40, "%*d", bare ? 1 : 2, c->day);
    else if (d == 'p')
        snprintf(out, 40, "%s", c->hour < 12 ? "AM" : "PM");
    else if (d == 'B' || d == 'b' || d == 'h')
        snprintf(out, 40, d == 'B' ? "%s" : "%.3s", month[c->month - 1]);
    else if (d == 'A' || d == 'a')
        snprintf(out, 40, d == 'A' ? "%s" : "%.3s", day[c->weekday]);
    else if (d == 'F')
        snprintf(out, 40, "%d-%02d-%02d", (int)c->year, c->month, c->day);
    else if (d == 'D')
        snprintf(out, 40, "%02d/%02d/%02d", c->month, c->day, (int)(c->year % 100));
    else if (d == 'T' || d == 'R')
        snprintf(out, 40, d == 'T' ? "%02d:%02d:%02d" : "%02d:%02d", c->hour, c->minute, c->second);
    else if (d == '%')
        snprintf(out, 40, "%%");
    else
        return false;
    return true;
}

static tmpl_val g_strftime(tmpl_run *r, const tmpl_args *a)
{
    const tmpl_str *f = tmpl_arg_str(r, a, 0);
    civil           c;
    tmpl_sb         sb;

    if (r->now_unix < -62135596800 || r->now_unix > 253402300799) /* years 1 to 9999 */
        tmpl_fail(r, KVD_E_INVAL, "the time is beyond the calendar");
    if (!f || r->st != KVD_OK)
        return tmpl_undef(NULL);
    c = civil_from_unix(r->now_unix);
    tmpl_sb_init(&sb, r);
    for (size_t i = 0; i < f->len && tmpl_step(r, 1); i++) {
        char text[40];
        bool bare;

        if (f->data[i] != '%') {
            tmpl_sb_put_part(&sb, f, i, i + 1);
            continue;
        }
        bare = i + 1 < f->len && f->data[i + 1] == '-';
        i += bare ? 2 : 1;
        if (i >= f->len || !put_directive(text, f->data[i], bare, &c)) {
            tmpl_fail(r, KVD_E_UNSUPPORTED, "a directive of strftime_now() is not supported: %%%c",
                      i < f->len && f->data[i] > 0x20 ? f->data[i] : ' ');
            break;
        }
        tmpl_sb_put(&sb, text, strlen(text), tmpl_str_trusted(f, i, i + 1));
    }
    return tmpl_sb_take(&sb);
}

const tmpl_builtin tmpl_globals[] = {
    { "cycler", NULL, 0, NULL },
    { "dict", NULL, 0, g_dict },
    { "joiner", "sep", 0, g_joiner },
    { "lipsum", NULL, 0, NULL },
    { "namespace", NULL, 0, g_namespace },
    { "raise_exception", "message", 1, g_raise },
    { "range", "-start -stop -step", 1, g_range },
    { "strftime_now", "format", 1, g_strftime },
    { NULL, NULL, 0, NULL },
};
