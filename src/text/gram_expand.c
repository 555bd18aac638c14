/* SPDX-License-Identifier: Apache-2.0 */
/* gram_expand.c - $ref, allOf, anyOf and oneOf: what a schema says as a list of plain schemas.
 *
 * The list of a schema is made once and kept under its address; a schema that comes to itself while
 * its list is made is refused.  Lists hold each plain schema once, so alternatives that repeat
 * themselves do not multiply. */
#include <string.h>

#include "text/gram_impl.h"

bool gram_has(const json_t *schema, const char *key)
{
    return json_object_get(schema, key) != NULL;
}

json_t *gram_own(gram_build *b, json_t *made)
{
    if (!made || json_array_append_new(b->made, made) != 0) {
        gram_no_memory(b);
        return NULL;
    }
    return b->st == KVD_OK ? made : NULL;
}

/* ---- references ----------------------------------------------------------------------- */

/* One part of a JSON pointer inside a URI fragment, up to the next /. */
static size_t pointer_part(const char *s, char *out, size_t cap, size_t *len)
{
    size_t i = 0;

    *len = 0;
    while (s[i] && s[i] != '/' && *len + 1 < cap) {
        unsigned hex;
        char     c = s[i++];

        if (c == '%' && sscanf(s + i, "%2x", &hex) == 1 && s[i + 1]) {
            c = (char)hex;
            i += 2;
        }
        if (c == '~' && (s[i] == '0' || s[i] == '1'))
            c = s[i++] == '0' ? '~' : '/';
        out[(*len)++] = c;
    }
    out[*len] = 0;
    return i;
}

static json_t *resolve(gram_build *b, json_t *ref)
{
    const char *s  = json_string_value(ref);
    json_t     *at = b->root;

    if (!s || s[0] != '#' || (s[1] && s[1] != '/')) {
        gram_refuse(b, "$ref '%.80s' is not supported: only places in the schema itself (#/...)",
                    s ? s : "");
        return NULL;
    }
    for (const char *p = s + 1; *p && at;) {
        char   part[512];
        size_t len, used = pointer_part(p + 1, part, sizeof(part), &len);

        p += 1 + used;
        if (json_is_array(at)) {
            char               *end;
            const unsigned long i = strtoul(part, &end, 10);

            at = *end || !len ? NULL : json_array_get(at, i);
        } else {
            at = json_object_getn(at, part, len);
        }
    }
    if (!at)
        gram_refuse(b, "$ref '%.80s' leads nowhere", s);
    return at;
}

/* ---- lists ----------------------------------------------------------------------------- */

static void add_plain(gram_build *b, json_t *list, json_t *plain)
{
    size_t  i;
    json_t *have;

    if (!gram_tick(b, json_array_size(list) / 8 + 1))
        return;
    json_array_foreach(list, i, have)
    {
        if (have == plain)
            return;
    }
    if (json_array_size(list) >= GRAM_MAX_PLAIN)
        gram_refuse(b, "more than %u alternatives", GRAM_MAX_PLAIN);
    else if (json_array_append(list, plain) != 0)
        gram_no_memory(b);
}

/* Adds to list what one of x and one of y say together. */
static void add_product(gram_build *b, json_t *list, json_t *x, json_t *y)
{
    size_t  i, j;
    json_t *p, *q;

    json_array_foreach(x, i, p)
    {
        json_array_foreach(y, j, q)
        {
            json_t *both = gram_merge(b, p, q);

            if (both)
                add_plain(b, list, both);
            if (b->st != KVD_OK)
                return;
        }
    }
}

/* A copy without a keyword; NULL: nothing else of it matters. */
static json_t *without(gram_build *b, json_t *schema, const char *key)
{
    const char *k;
    json_t     *v, *copy;
    bool        more = false;

    json_object_foreach(schema, k, v)
    {
        more |= strcmp(k, key) != 0 && !gram_is_annotation(k);
    }
    if (!more)
        return NULL;
    copy = gram_own(b, json_copy(schema));
    if (copy)
        json_object_del(copy, key);
    return copy;
}

/* The list of what stands beside a keyword. */
static json_t *rest_of(gram_build *b, json_t *schema, const char *key)
{
    json_t *rest = without(b, schema, key);

    return b->st == KVD_OK ? gram_expand(b, rest ? rest : b->any) : NULL;
}

static void expand_ref(gram_build *b, json_t *list, json_t *schema)
{
    json_t *rest   = rest_of(b, schema, "$ref");
    json_t *target = rest ? resolve(b, json_object_get(schema, "$ref")) : NULL;
    json_t *there  = target ? gram_expand(b, target) : NULL;

    if (there)
        add_product(b, list, rest, there);
}

static void expand_all(gram_build *b, json_t *list, json_t *schema)
{
    json_t *parts = json_object_get(schema, "allOf"), *part;
    json_t *now   = rest_of(b, schema, "allOf");
    size_t  i;

    if (!json_array_size(parts)) {
        gram_refuse(b, "allOf must be a list of schemas");
        return;
    }
    json_array_foreach(parts, i, part)
    {
        json_t *one  = now ? gram_expand(b, part) : NULL;
        json_t *next = one ? gram_own(b, json_array()) : NULL;

        if (!next)
            return;
        add_product(b, next, now, one);
        now = next;
    }
    json_array_foreach(now, i, part)
    {
        add_plain(b, list, part);
    }
}

/* Whether what branches i and j of oneOf stand for cannot be the same value. */
static bool apart(gram_build *b, json_t *x, json_t *y)
{
    size_t  i, j;
    json_t *p, *q;

    json_array_foreach(x, i, p)
    {
        json_array_foreach(y, j, q)
        {
            if (!gram_excludes(b, p, q, 0) || !gram_excludes(b, q, p, 0))
                return false;
        }
    }
    return true;
}

static void check_apart(gram_build *b, json_t *branches)
{
    const size_t n = json_array_size(branches);

    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n && gram_tick(b, 8); j++)
            if (!apart(b, json_array_get(branches, i), json_array_get(branches, j)))
                gram_refuse(b,
                            "oneOf: a value may fit both alternative %zu and %zu, as far as can be "
                            "told; use anyOf, or a property with another const in each",
                            i, j);
}

static void expand_any(gram_build *b, json_t *list, json_t *schema, const char *key)
{
    json_t *parts = json_object_get(schema, key), *part, *one;
    json_t *rest  = rest_of(b, schema, key);
    json_t *all   = rest ? gram_own(b, json_array()) : NULL;
    size_t  i, j;

    if (!json_array_size(parts)) {
        gram_refuse(b, "%s must be a list of schemas", key);
        return;
    }
    json_array_foreach(parts, i, part)
    {
        json_t *there = all ? gram_expand(b, part) : NULL;
        json_t *both  = there ? gram_own(b, json_array()) : NULL;

        if (!both)
            return;
        add_product(b, both, rest, there);
        if (json_array_append(all, both) != 0)
            gram_no_memory(b);
        json_array_foreach(both, j, one)
        {
            add_plain(b, list, one);
        }
    }
    if (key[0] == 'o')
        check_apart(b, all);
}

/* A bound that draft 4 makes exclusive by a flag beside it. */
static void modern_bound(gram_build *b, json_t *schema, const char *key, const char *exclusive)
{
    json_t *v = json_object_get(schema, key), *flag = json_object_get(schema, exclusive);

    if (!json_is_boolean(flag))
        return;
    if (v && json_is_true(flag)) {
        if (json_object_set(schema, exclusive, v) != 0)
            gram_no_memory(b);
        json_object_del(schema, key);
    } else {
        json_object_del(schema, exclusive);
    }
}

/* A plain schema with what earlier drafts say in other words in those of 2020-12: items as a list
 * with additionalItems, and flags for exclusive bounds. */
static json_t *modern(gram_build *b, json_t *schema)
{
    json_t    *items = json_object_get(schema, "items"), *copy;
    json_t    *more  = json_object_get(schema, "additionalItems");
    const bool list  = json_is_array(items);

    if (!list && !more && !json_is_boolean(json_object_get(schema, "exclusiveMinimum")) &&
        !json_is_boolean(json_object_get(schema, "exclusiveMaximum")))
        return schema;
    if (list && gram_has(schema, "prefixItems"))
        gram_refuse(b, "items as a list beside prefixItems");
    copy = gram_own(b, json_copy(schema));
    if (!copy)
        return schema;
    if (list) {
        if (json_object_set(copy, "prefixItems", items) != 0 ||
            (more && json_object_set(copy, "items", more) != 0))
            gram_no_memory(b);
        if (!more)
            json_object_del(copy, "items");
    }
    json_object_del(copy, "additionalItems"); /* means nothing without a list */
    modern_bound(b, copy, "minimum", "exclusiveMinimum");
    modern_bound(b, copy, "maximum", "exclusiveMaximum");
    return copy;
}

static void expand_into(gram_build *b, json_t *list, json_t *schema)
{
    if (json_is_true(schema))
        add_plain(b, list, b->any);
    else if (json_is_false(schema))
        return;
    else if (!json_is_object(schema))
        gram_refuse(b, "a schema must be an object, true or false");
    else if (schema != b->root && json_is_string(json_object_get(schema, "$id")))
        gram_refuse(b, "$id below the root is not supported");
    else if (gram_has(schema, "$ref"))
        expand_ref(b, list, schema);
    else if (gram_has(schema, "allOf"))
        expand_all(b, list, schema);
    else if (gram_has(schema, "anyOf"))
        expand_any(b, list, schema, "anyOf");
    else if (gram_has(schema, "oneOf"))
        expand_any(b, list, schema, "oneOf");
    else
        add_plain(b, list, modern(b, schema));
}

json_t *gram_expand(gram_build *b, json_t *schema)
{
    gram_pair *p = gram_map_find(&b->expanded, schema, NULL);
    json_t    *list;

    if (b->st != KVD_OK)
        return NULL;
    if (p && p->ptr)
        return p->ptr;
    if (p) {
        gram_refuse(b, "a $ref that leads back to itself with no property or item between");
        return NULL;
    }
    if (b->nesting >= GRAM_MAX_NESTING) {
        gram_refuse(b, "more than %d schemas in each other", GRAM_MAX_NESTING);
        return NULL;
    }
    list = gram_own(b, json_array());
    if (!list || !gram_tick(b, 32) || !gram_map_add(b, &b->expanded, schema, NULL))
        return NULL;
    b->nesting++;
    expand_into(b, list, schema);
    b->nesting--;
    if (b->st != KVD_OK)
        return NULL;
    gram_map_find(&b->expanded, schema, NULL)->ptr = list;
    return list;
}
