/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_json.c - JSON text to values.  Everything that comes out is untrusted. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "text/tmpl_ast.h"

static tmpl_val from_json(tmpl_run *r, const json_t *j);

static tmpl_val from_array(tmpl_run *r, const json_t *j)
{
    tmpl_seq *s = tmpl_seq_new(r, json_array_size(j));

    for (size_t i = 0; s && i < s->n && r->st == KVD_OK; i++)
        s->item[i] = from_json(r, json_array_get(j, i));
    return tmpl_of_seq(TV_LIST, s);
}

/* Keys are unique already and in the text's order. */
static tmpl_val from_object(tmpl_run *r, json_t *j)
{
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
        d->pair[d->n++].val = from_json(r, value);
    }
    return (tmpl_val){ .kind = TV_DICT, .u.d = d };
}

static tmpl_val from_json(tmpl_run *r, const json_t *j)
{
    tmpl_val v = tmpl_none();

    if (!tmpl_enter(r))
        return tmpl_undef(NULL);
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        v = from_object(r, (json_t *)j);
        break; /* iterators want it so */
    case JSON_ARRAY:
        v = from_array(r, j);
        break;
    case JSON_STRING:
        v = tmpl_str_new(r, json_string_value(j), json_string_length(j), false);
        break;
    case JSON_INTEGER:
        v = tmpl_int(json_integer_value(j));
        break;
    case JSON_REAL:
        v = tmpl_float(json_real_value(j));
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
    json_error_t at;
    json_t      *j = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, &at);
    tmpl_val     v;

    *st = KVD_OK;
    if (!j) {
        const bool oom = json_error_code(&at) == json_error_out_of_memory;

        *st = kvd_fail(r->err, oom ? KVD_E_NOMEM : KVD_E_INVAL, 0, "%s: JSON line %d column %d: %s",
                       what, at.line, at.column, at.text);
        return tmpl_undef(NULL);
    }
    v = from_json(r, j);
    json_decref(j);
    *st = r->st;
    return v;
}
