/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_json.c - JSON text to values.  Everything that comes out is untrusted. */
#include <float.h>
#include <string.h>

#include "base/json.h"
#include "text/tmpl_ast.h"

typedef struct source { /* values being turned into those of a run */
    tmpl_run      *run;
    kvd_json_texts texts;
} source;

static tmpl_val from_json(source *from, const json_t *j);

static tmpl_val from_array(source *from, const json_t *j)
{
    tmpl_run *r = from->run;
    tmpl_seq *s = tmpl_seq_new(r, json_array_size(j));

    for (size_t i = 0; s && i < s->n && r->st == KVD_OK; i++)
        s->item[i] = from_json(from, json_array_get(j, i));
    return tmpl_of_seq(TV_LIST, s);
}

/* Keys are unique already and in the text's order. */
static tmpl_val from_object(source *from, json_t *j)
{
    tmpl_run   *r = from->run;
    tmpl_dict  *d = tmpl_dict_new(r, json_object_size(j));
    const char *key;
    size_t      len;
    json_t     *value;

    if (!d)
        return tmpl_undef(NULL);
    for (void *it = json_object_iter(j); it && r->st == KVD_OK; it = json_object_iter_next(j, it)) {
        key                 = json_object_iter_key(it);
        len                 = json_object_iter_key_len(it);
        value               = json_object_iter_value(it);
        d->pair[d->n].key   = tmpl_str_new(r, key, len, false);
        d->pair[d->n++].val = from_json(from, value);
    }
    return (tmpl_val){ .kind = TV_DICT, .u.d = d };
}

/* A double, or the text of an integer beyond int64 and of what is beyond all doubles. */
static tmpl_val from_real(source *from, const json_t *j)
{
    char         buf[KVD_JSON_NUMBER_BYTES];
    const char  *text = kvd_json_number(&from->texts, j, buf);
    const double x    = json_real_value(j);
    tmpl_val     v;

    if (text[strcspn(text, ".eE")] && x < DBL_MAX && x > -DBL_MAX)
        return tmpl_float(x);
    if (x == 0.0) /* -0 */
        return tmpl_int(0);
    v = tmpl_str_new(from->run, text, strlen(text), false);
    if (v.kind == TV_STR)
        v.kind = TV_DIGITS;
    return v;
}

static tmpl_val from_json(source *from, const json_t *j)
{
    tmpl_run *r = from->run;
    tmpl_val  v = tmpl_none();

    if (!tmpl_enter(r))
        return tmpl_undef(NULL);
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        v = from_object(from, (json_t *)j);
        break; /* iterators want it so */
    case JSON_ARRAY:
        v = from_array(from, j);
        break;
    case JSON_STRING:
        v = tmpl_str_new(r, json_string_value(j), json_string_length(j), false);
        break;
    case JSON_INTEGER:
        v = tmpl_int(json_integer_value(j));
        break;
    case JSON_REAL:
        v = from_real(from, j);
        break;
    case JSON_TRUE:
        v = tmpl_bool(true);
        break;
    case JSON_FALSE:
        v = tmpl_bool(false);
        break;
    case JSON_NULL:
        break;
    }
    tmpl_leave(r);
    return v;
}

tmpl_val tmpl_json_read(tmpl_run *r, const char *text, const char *what, kvd_status *st)
{
    source         from = { .run = r };
    kvd_json_error at;
    json_t        *j = kvd_json_read(&from.texts, text, strlen(text), KVD_JSON_NUL, &at);
    tmpl_val       v = tmpl_undef(NULL);

    *st = KVD_OK;
    if (j) {
        v   = from_json(&from, j);
        *st = r->st;
    } else {
        *st = kvd_fail(r->err, at.no_memory ? KVD_E_NOMEM : KVD_E_INVAL, 0,
                       "%s: JSON line %u column %u: %s", what, at.line, at.column, at.text);
    }
    json_decref(j);
    kvd_json_texts_free(&from.texts);
    return v;
}
