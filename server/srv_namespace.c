/* SPDX-License-Identifier: Apache-2.0 */
/* srv_namespace.c - namespaces of functions, which /v1/responses has: a template knows functions
 * alone, so each is shown by one name, and an answer's call says namespace and name again. */
#include "srv_fields.h"
#include "srv_shape.h"

#include <string.h>

#define JOINT "__" /* between the two names, unless the namespace ends with it */

json_t *srv_flat_name(srv_fields *f, const json_t *space, const json_t *name)
{
    const size_t n     = strlen(json_string_value(space));
    const bool   joint = n < 2 || memcmp(json_string_value(space) + n - 2, JOINT, 2) != 0;
    json_t      *out =
        json_pack("s++", json_string_value(space), joint ? JOINT : "", json_string_value(name));

    if (!out)
        srv_fields_full(f, "no memory for a function's name");
    return out;
}

/* What the namespace says of itself goes before what its first function says. */
static json_t *describe(const json_t *space, const json_t *function, size_t i)
{
    json_t     *own = srv_get(function, "description");
    const char *all = i == 0 ? json_string_value(srv_get(space, "description")) : NULL;

    if (!all || !*all)
        return json_incref(own);
    return json_is_string(own) ? json_pack("s++", all, "\n\n", json_string_value(own))
                               : json_string(all);
}

/* A name, up to a zero byte in it. */
static void keep(kvd_buf *b, const json_t *name)
{
    kvd_buf_put(b, json_string_value(name), strlen(json_string_value(name)) + 1);
}

static bool add(srv_fields *f, srv_request *r, json_t *list, const json_t *space,
                const json_t *function, size_t i)
{
    json_t *flat = srv_flat_name(f, srv_get(space, "name"), srv_get(function, "name"));

    if (!flat)
        return false;
    keep(&r->spaces, flat);
    keep(&r->spaces, srv_get(space, "name"));
    keep(&r->spaces, srv_get(function, "name"));
    if (r->spaces.oom) {
        json_decref(flat);
        return srv_fields_full(f, "no memory for the names of functions");
    }
    return srv_add_function(f, list,
                            json_pack("{s:o, s:o*, s:O*, s:O*}", "name", flat, "description",
                                      describe(space, function, i), "parameters",
                                      srv_get(function, "parameters"), "strict",
                                      srv_get(function, "strict")));
}

bool srv_add_space(srv_fields *f, srv_request *r, json_t *list, const json_t *space, size_t at)
{
    const json_t *functions = srv_get(space, "tools"), *function;
    size_t        i;

    if (!json_is_string(srv_get(space, "name")))
        return srv_fields_bad(f, srv_at("tools[%zu].name", at).s, "expected a string");
    if (!json_is_array(functions))
        return srv_fields_bad(f, srv_at("tools[%zu].tools", at).s, "expected a list of tools");
    json_array_foreach(functions, i, function)
    {
        const srv_where where = srv_at("tools[%zu].tools[%zu]", at, i);
        const json_t   *word  = srv_get(function, "type");
        const char     *type  = json_string_value(word);

        if (!type)
            return srv_fields_word(f, srv_at("%s.type", where.s).s, word, "function");
        if (strcmp(type, "function") != 0) {
            srv_leave_out(f, "tools", type);
            continue;
        }
        if (!json_is_string(srv_get(function, "name")))
            return srv_fields_bad(f, srv_at("%s.name", where.s).s, "expected a string");
        if (!add(f, r, list, space, function, i))
            return false;
    }
    return true;
}

void srv_put_function(const srv_request *r, const char *flat, size_t len, kvd_buf *b)
{
    const char *p = r->spaces.data, *end = p + r->spaces.len;

    while (p && p < end) {
        const char *space = p + strlen(p) + 1, *name = space + strlen(space) + 1;

        if (strlen(p) == len && memcmp(p, flat, len) == 0) {
            kvd_buf_puts(b, ",\"namespace\":");
            srv_put_text(b, space);
            kvd_buf_puts(b, ",\"name\":");
            srv_put_text(b, name);
            return;
        }
        p = name + strlen(name) + 1;
    }
    kvd_buf_puts(b, ",\"name\":");
    srv_put_string(b, flat, len);
}
