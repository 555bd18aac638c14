/* SPDX-License-Identifier: Apache-2.0 */
/* gram_merge.c - keywords: which there are, what two plain schemas say together, and whether a
 * value of one can fit the other. */
#include <string.h>

#include "text/gram_impl.h"

typedef enum join { /* to put a keyword's two values together */
                    EQUAL,
                    TYPE,
                    VALUES,
                    LARGER,
                    SMALLER,
                    PATTERN,
                    PROPERTIES,
                    BOTH, /* a schema: allOf of them */
                    REQUIRED
} join;

static const struct {
    const char *name;
    join        how;
} keyword[] = {
    { "type", TYPE },
    { "enum", VALUES },
    { "const", VALUES },
    { "minimum", LARGER },
    { "exclusiveMinimum", LARGER },
    { "maximum", SMALLER },
    { "exclusiveMaximum", SMALLER },
    { "multipleOf", EQUAL },
    { "minLength", LARGER },
    { "maxLength", SMALLER },
    { "pattern", PATTERN },
    { "format", PATTERN },
    { GRAM_PATTERNS, PATTERN },
    { "properties", PROPERTIES },
    { "additionalProperties", BOTH },
    { "propertyNames", BOTH },
    { "required", REQUIRED },
    { "minProperties", LARGER },
    { "maxProperties", SMALLER },
    { "items", BOTH },
    { "prefixItems", EQUAL },
    { "minItems", LARGER },
    { "maxItems", SMALLER },
    { "uniqueItems", EQUAL },
    { "nullable", EQUAL },
    { "additionalItems", EQUAL }, /* put in other words by gram_expand.c */
    /* taken apart by gram_expand.c */
    { "$ref", EQUAL },
    { "allOf", EQUAL },
    { "anyOf", EQUAL },
    { "oneOf", EQUAL },
    /* refused by gram_schema.c */
    { "not", EQUAL },
    { "if", EQUAL },
    { "then", EQUAL },
    { "else", EQUAL },
    { "patternProperties", EQUAL },
    { "dependentRequired", EQUAL },
    { "dependentSchemas", EQUAL },
    { "dependencies", EQUAL },
    { "unevaluatedProperties", EQUAL },
    { "unevaluatedItems", EQUAL },
    { "contains", EQUAL },
    { "minContains", EQUAL },
    { "maxContains", EQUAL },
    { "$dynamicRef", EQUAL },
    { "$recursiveRef", EQUAL },
};

static int find_keyword(const char *key)
{
    for (size_t i = 0; i < KVD_COUNTOF(keyword); i++)
        if (strcmp(keyword[i].name, key) == 0)
            return (int)i;
    return -1;
}

bool gram_is_annotation(const char *key)
{
    return find_keyword(key) < 0;
}

/* ---- types ------------------------------------------------------------------------------ */

static uint32_t type_named(const char *s)
{
    static const char *const name[] = { "null",   "boolean", "integer", "number",
                                        "string", "array",   "object" };

    for (uint32_t i = 0; s && i < KVD_COUNTOF(name); i++)
        if (strcmp(s, name[i]) == 0)
            return i == 3 ? GRAM_T_NUMBER | GRAM_T_INTEGER : 1u << i;
    return 0;
}

static uint32_t types_told(const json_t *s)
{
    static const struct {
        const char *key;
        uint32_t    type;
    } told[]       = { { "properties", GRAM_T_OBJECT },
                       { "additionalProperties", GRAM_T_OBJECT },
                       { "propertyNames", GRAM_T_OBJECT },
                       { "required", GRAM_T_OBJECT },
                       { "minProperties", GRAM_T_OBJECT },
                       { "maxProperties", GRAM_T_OBJECT },
                       { "items", GRAM_T_ARRAY },
                       { "prefixItems", GRAM_T_ARRAY },
                       { "minItems", GRAM_T_ARRAY },
                       { "maxItems", GRAM_T_ARRAY },
                       { "minLength", GRAM_T_STRING },
                       { "maxLength", GRAM_T_STRING },
                       { "pattern", GRAM_T_STRING },
                       { "format", GRAM_T_STRING },
                       { GRAM_PATTERNS, GRAM_T_STRING },
                       { "minimum", GRAM_T_NUMBER | GRAM_T_INTEGER },
                       { "maximum", GRAM_T_NUMBER | GRAM_T_INTEGER },
                       { "exclusiveMinimum", GRAM_T_NUMBER | GRAM_T_INTEGER },
                       { "exclusiveMaximum", GRAM_T_NUMBER | GRAM_T_INTEGER },
                       { "multipleOf", GRAM_T_NUMBER | GRAM_T_INTEGER } };
    uint32_t types = 0;

    if (gram_has(s, "enum") || gram_has(s, "const"))
        return GRAM_T_ANY;
    for (size_t i = 0; i < KVD_COUNTOF(told); i++)
        if (gram_has(s, told[i].key))
            types |= told[i].type;
    return types ? types : GRAM_T_ANY;
}

uint32_t gram_types(gram_build *b, json_t *plain)
{
    json_t  *t     = json_object_get(plain, "type"), *one;
    uint32_t types = 0;
    size_t   i;

    if (!t) {
        types = types_told(plain);
    } else if (json_is_string(t)) {
        types = type_named(json_string_value(t));
        if (!types)
            gram_refuse(b, "type '%.40s' is not known", json_string_value(t));
    } else {
        json_array_foreach(t, i, one)
        {
            if (!type_named(json_string_value(one)))
                gram_refuse(b, "type: not all of the list are types");
            types |= type_named(json_string_value(one));
        }
        if (!json_is_array(t))
            gram_refuse(b, "type must be a string or a list of strings");
    }
    if (json_is_true(json_object_get(plain, "nullable")))
        types |= GRAM_T_NULL;
    return types;
}

uint32_t gram_type_of(gram_build *b, const json_t *v)
{
    kvd_decimal d;

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return GRAM_T_OBJECT;
    case JSON_ARRAY:
        return GRAM_T_ARRAY;
    case JSON_STRING:
        return GRAM_T_STRING;
    case JSON_INTEGER:
    case JSON_REAL:
        return gram_decimal(b, "enum", v, &d) && d.n_frac == 0 ? GRAM_T_INTEGER | GRAM_T_NUMBER
                                                               : GRAM_T_NUMBER;
    case JSON_NULL:
        return GRAM_T_NULL;
    default:
        return GRAM_T_BOOL;
    }
}

static bool equal_objects(gram_build *b, json_t *x, const json_t *y)
{
    const char *key;
    size_t      len;
    json_t     *v;

    if (json_object_size(x) != json_object_size(y))
        return false;
    json_object_keylen_foreach(x, key, len, v)
    {
        const json_t *w = json_object_getn(y, key, len);

        if (!w || !gram_equal(b, v, w))
            return false;
    }
    return true;
}

bool gram_equal(gram_build *b, const json_t *x, const json_t *y)
{
    kvd_decimal p, q;

    if (x == y)
        return true;
    if (json_is_number(x) && json_is_number(y) && json_number_value(x) != json_number_value(y))
        return false; /* the nearest doubles of equal numbers are equal */
    if (json_is_integer(x) && json_is_integer(y))
        return json_integer_value(x) == json_integer_value(y);
    if (json_is_number(x) && json_is_number(y))
        return gram_decimal(b, "a value", x, &p) && gram_decimal(b, "a value", y, &q) &&
               kvd_decimal_cmp(&p, &q) == 0;
    if (json_is_object(x) && json_is_object(y))
        return equal_objects(b, (json_t *)(uintptr_t)x, y); /* iterators want it so */
    if (!json_is_array(x) || !json_is_array(y) || json_array_size(x) != json_array_size(y))
        return json_equal(x, y);
    for (size_t i = 0; i < json_array_size(x); i++)
        if (!gram_equal(b, json_array_get(x, i), json_array_get(y, i)))
            return false;
    return true;
}

/* ---- together ----------------------------------------------------------------------------- */

/* An array of types as text, for a merged schema. */
static json_t *type_list(gram_build *b, uint32_t types)
{
    static const char *const name[] = { "null",   "boolean", "integer", "number",
                                        "string", "array",   "object" };
    json_t                  *list   = json_array();

    for (uint32_t i = 0; list && i < KVD_COUNTOF(name); i++)
        if (types & 1u << i && !(i == 2 && types & GRAM_T_NUMBER))
            json_array_append_new(list, json_string(name[i]));
    if (!list)
        gram_no_memory(b);
    return list;
}

/* The values of enum, or the one of const. */
static json_t *values_of(gram_build *b, json_t *s)
{
    json_t *list = json_object_get(s, "enum"), *one = json_object_get(s, "const");

    if (list && !json_is_array(list))
        gram_refuse(b, "enum must be a list");
    if (!one)
        return list;
    return gram_own(b, json_pack("[O]", one));
}

/* enum and const of both, as one enum; false: none is left. */
static bool merge_values(gram_build *b, json_t *out, json_t *x, json_t *y)
{
    json_t *p = values_of(b, x), *q = values_of(b, y), *list, *v, *w;
    size_t  i, j;

    if (b->st != KVD_OK || (!p && !q))
        return b->st == KVD_OK;
    list = json_array();
    json_array_foreach(p ? p : q, i, v)
    {
        bool in = !p || !q;

        if (!gram_tick(b, p && q ? json_array_size(q) : 1))
            break;
        json_array_foreach(q, j, w)
        {
            in = in || gram_equal(b, v, w);
        }
        if (in)
            json_array_append(list, v);
    }
    json_object_del(out, "const");
    if (!list || json_object_set_new(out, "enum", list) != 0)
        gram_no_memory(b);
    return b->st == KVD_OK && json_array_size(json_object_get(out, "enum")) > 0;
}

static void merge_patterns(gram_build *b, json_t *out, json_t *x, json_t *y)
{
    json_t *list = json_array(), *from[2] = { x, y }, *v;
    size_t  k;

    for (int i = 0; i < 2; i++) {
        const char *p = json_string_value(json_object_get(from[i], "pattern"));
        const char *f = json_string_value(json_object_get(from[i], "format"));

        if (p)
            json_array_append_new(list, json_sprintf("p%s", p));
        if (f)
            json_array_append_new(list, json_sprintf("f%s", f));
        json_array_foreach(json_object_get(from[i], GRAM_PATTERNS), k, v)
        {
            json_array_append(list, v);
        }
    }
    json_object_del(out, "pattern");
    json_object_del(out, "format");
    if (!list || json_object_set_new(out, GRAM_PATTERNS, list) != 0)
        gram_no_memory(b);
}

/* What a property of x is that y does not list: y's additional ones are so, too. */
static json_t *beside(json_t *prop, json_t *y)
{
    json_t *more = json_object_get(y, "additionalProperties");

    if (!more || json_is_true(more))
        return json_incref(prop);
    if (json_is_false(more))
        return json_false();
    return json_pack("{s:[O, O]}", "allOf", prop, more);
}

static void merge_properties(gram_build *b, json_t *out, json_t *x, json_t *y)
{
    json_t     *p = json_object_get(x, "properties"), *q = json_object_get(y, "properties");
    json_t     *all = json_object(), *v;
    const char *key;
    size_t      len;

    if ((p && !json_is_object(p)) || (q && !json_is_object(q)) || !all) {
        gram_refuse(b, "properties must be an object");
        json_decref(all);
        return;
    }
    json_object_keylen_foreach(p, key, len, v)
    {
        json_t *w = json_object_getn(q, key, len);

        gram_tick(b, 64);
        if (json_object_setn_new(all, key, len,
                                 w ? json_pack("{s:[O, O]}", "allOf", v, w) : beside(v, y)) != 0)
            gram_no_memory(b);
    }
    json_object_keylen_foreach(q, key, len, v)
    {
        gram_tick(b, 64);
        if (!json_object_getn(p, key, len) &&
            json_object_setn_new(all, key, len, beside(v, x)) != 0)
            gram_no_memory(b);
    }
    if (json_object_set_new(out, "properties", all) != 0)
        gram_no_memory(b);
}

static void merge_required(gram_build *b, json_t *out, json_t *x, json_t *y)
{
    json_t *all = json_array();

    gram_tick(b, 2 * (json_array_size(x) + json_array_size(y)));
    if (json_array_extend(all, x) != 0 || json_array_extend(all, y) != 0 ||
        json_object_set_new(out, "required", all) != 0)
        gram_refuse(b, "required must be a list of names");
}

/* A keyword that both have; false: nothing fits both. */
static bool merge_one(gram_build *b, json_t *out, const char *key, join how, json_t *v, json_t *w)
{
    json_t     *both = NULL;
    kvd_decimal x, y;

    switch (how) {
    case LARGER:
    case SMALLER:
        if (!gram_decimal(b, key, v, &x) || !gram_decimal(b, key, w, &y))
            return false;
        both = json_incref((kvd_decimal_cmp(&x, &y) < 0) == (how == LARGER) ? w : v);
        break;
    case BOTH:
        both = json_is_false(v) || json_is_false(w) ? json_false()
               : json_is_true(v)                    ? json_incref(w)
               : json_is_true(w)                    ? json_incref(v)
                                                    : json_pack("{s:[O, O]}", "allOf", v, w);
        break;
    case REQUIRED:
        merge_required(b, out, v, w);
        return b->st == KVD_OK;
    case EQUAL:
        if (!gram_equal(b, v, w))
            gram_refuse(b, "allOf: %s is in two of the parts", key);
        return b->st == KVD_OK;
    default:
        return true; /* dealt with as a whole */
    }
    if (!both || json_object_set_new(out, key, both) != 0)
        gram_no_memory(b);
    return b->st == KVD_OK;
}

static bool merge_types(gram_build *b, json_t *out, json_t *x, json_t *y)
{
    uint32_t types;

    if (!gram_has(x, "type") && !gram_has(y, "type") && !gram_has(x, "nullable") &&
        !gram_has(y, "nullable"))
        return true;
    types = (gram_has(x, "type") ? gram_types(b, x) : GRAM_T_ANY) &
            (gram_has(y, "type") ? gram_types(b, y) : GRAM_T_ANY);
    json_object_del(out, "nullable");
    if (b->st == KVD_OK && json_object_set_new(out, "type", type_list(b, types)) != 0)
        gram_no_memory(b);
    return b->st == KVD_OK && types;
}

/* Items of one part beside the first items of another would have to go into both. */
static void check_items(gram_build *b, json_t *x, json_t *y)
{
    if ((gram_has(x, "prefixItems") && gram_has(y, "items") && !gram_has(y, "prefixItems")) ||
        (gram_has(y, "prefixItems") && gram_has(x, "items") && !gram_has(x, "prefixItems")))
        gram_refuse(b, "allOf: prefixItems in one part and items in another");
}

static json_t *merge_new(gram_build *b, json_t *x, json_t *y)
{
    json_t     *out = gram_own(b, json_copy(x)), *v;
    const char *key;
    bool        fits = out != NULL;

    if (!out)
        return NULL;
    check_items(b, x, y);
    json_object_foreach(y, key, v)
    {
        const int i    = find_keyword(key);
        json_t   *have = json_object_get(x, key);

        if (i < 0 || !fits)
            continue;
        if (!have && json_object_set(out, key, v) != 0)
            gram_no_memory(b);
        if (have)
            fits = merge_one(b, out, key, keyword[i].how, have, v);
    }
    fits = fits && merge_types(b, out, x, y) && merge_values(b, out, x, y);
    if (fits && (gram_has(x, "pattern") || gram_has(x, "format") || gram_has(x, GRAM_PATTERNS)) &&
        (gram_has(y, "pattern") || gram_has(y, "format") || gram_has(y, GRAM_PATTERNS)))
        merge_patterns(b, out, x, y);
    if (fits && (gram_has(x, "properties") || gram_has(y, "properties")))
        merge_properties(b, out, x, y);
    return fits && b->st == KVD_OK ? out : NULL;
}

static bool says_nothing(const json_t *s)
{
    const char *key;
    json_t     *v;

    json_object_foreach((json_t *)s, key, v)
    {
        if (!gram_is_annotation(key))
            return false;
    }
    return true;
}

json_t *gram_merge(gram_build *b, json_t *x, json_t *y)
{
    gram_pair *p;
    json_t    *both;

    if (!gram_tick(b, 4))
        return NULL;
    if (x == y || says_nothing(x))
        return y;
    if (says_nothing(y))
        return x;
    p = gram_map_find(&b->merged, x, y);
    if (p)
        return p->ptr;
    if (!gram_tick(b, 600 + 32 * (json_object_size(x) + json_object_size(y))))
        return NULL;
    both = merge_new(b, x, y);
    p    = gram_map_add(b, &b->merged, x, y);
    if (p)
        p->ptr = both;
    return b->st == KVD_OK ? both : NULL;
}

/* ---- apart --------------------------------------------------------------------------------- */

static bool lists_name(json_t *list, const char *name)
{
    size_t  i;
    json_t *v;

    json_array_foreach(list, i, v)
    {
        if (json_is_string(v) && strcmp(json_string_value(v), name) == 0)
            return true;
    }
    return false;
}

/* Properties that are not listed may be written. */
static bool writes_others(json_t *s)
{
    json_t *more = json_object_get(s, "additionalProperties");

    return more ? !json_is_false(more) : !gram_has(s, "properties");
}

/* All values of property `name` as x writes them are none of y's. */
static bool property_apart(gram_build *b, json_t *x, json_t *y, int depth)
{
    json_t *p = gram_expand(b, x), *q = p ? gram_expand(b, y) : NULL, *v, *w;
    size_t  i, j;

    if (!q)
        return false;
    json_array_foreach(p, i, v)
    {
        json_array_foreach(q, j, w)
        {
            if (!gram_excludes(b, v, w, depth + 1))
                return false;
        }
    }
    return true;
}

static bool objects_apart(gram_build *b, json_t *x, json_t *y, int depth)
{
    json_t *px = json_object_get(x, "properties"), *py = json_object_get(y, "properties");
    json_t *rx = json_object_get(x, "required"), *ry = json_object_get(y, "required"), *v;
    size_t  i;

    json_array_foreach(ry, i, v)
    {
        const char *name = json_string_value(v);

        if (name && !json_object_get(px, name) && !lists_name(rx, name) && !writes_others(x))
            return true;
    }
    json_array_foreach(rx, i, v)
    {
        const char *name = json_string_value(v);
        json_t     *p    = name ? json_object_get(px, name) : NULL,
               *q        = json_object_get(py, name ? name : "");

        if (name && !q && json_is_false(json_object_get(y, "additionalProperties")))
            return true;
        if (p && q && gram_tick(b, 16) && property_apart(b, p, q, depth))
            return true;
    }
    return false;
}

static bool values_apart(gram_build *b, json_t *values, json_t *y)
{
    json_t        *other = values_of(b, y), *v, *w;
    const uint32_t types = gram_types(b, y);
    size_t         i, j;

    json_array_foreach(values, i, v)
    {
        bool fits = types & gram_type_of(b, v);

        if (fits && other) {
            fits = false;
            gram_tick(b, json_array_size(other));
            json_array_foreach(other, j, w)
            {
                fits = fits || gram_equal(b, v, w);
            }
        }
        if (fits)
            return false;
    }
    return true;
}

bool gram_excludes(gram_build *b, json_t *x, json_t *y, int depth)
{
    const uint32_t common = gram_types(b, x) & gram_types(b, y);
    json_t        *values = values_of(b, x);

    if (b->st != KVD_OK || depth > 3 || !gram_tick(b, 64))
        return false;
    if (!common)
        return true;
    if (values)
        return values_apart(b, values, y);
    return common == GRAM_T_OBJECT && objects_apart(b, x, y, depth);
}
