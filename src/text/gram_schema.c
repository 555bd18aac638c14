/* SPDX-License-Identifier: Apache-2.0 */
/* gram_schema.c - plain schemas to rules.
 *
 * A value is written where it stands, except for objects, arrays and strings, which are rules; the
 * insides of objects and arrays are written later, from a list, so a schema may refer to itself. */
#include <string.h>

#include "text/gram_impl.h"

static const char *const refused[] = { "not",
                                       "if",
                                       "then",
                                       "else",
                                       "contains",
                                       "minContains",
                                       "maxContains",
                                       "patternProperties",
                                       "$dynamicRef",
                                       "$recursiveRef",
                                       "dependentRequired",
                                       "dependencies",
                                       "dependentSchemas",
                                       "unevaluatedItems" };

/* Keywords that cannot be applied. */
static void check_keywords(gram_build *b, json_t *plain)
{
    json_t *more = json_object_get(plain, "unevaluatedProperties");

    for (size_t i = 0; i < KVD_COUNTOF(refused); i++)
        if (gram_has(plain, refused[i]))
            gram_refuse(b, "%s is not supported", refused[i]);
    if (json_is_true(json_object_get(plain, "uniqueItems")))
        gram_refuse(b, "uniqueItems is not supported");
    if (more && !json_is_boolean(more))
        gram_refuse(b, "unevaluatedProperties is supported as true or false only");
    if (json_is_false(more) && json_object_get(plain, "additionalProperties") &&
        !json_is_false(json_object_get(plain, "additionalProperties")))
        gram_refuse(b, "unevaluatedProperties: false beside additionalProperties");
}

static uint32_t white_node(gram_build *b)
{
    const uint32_t node = gram_node_new(b);

    if (b->st == KVD_OK)
        b->node[node].flags |= GRAM_WHITE;
    return node;
}

static void literal(gram_build *b, uint32_t from, uint32_t to, const char *s, size_t len)
{
    gram_eps(b, gram_literal(b, from, s, len), to);
}

/* ---- values of enum and const ---------------------------------------------------------------- */

static void constant(gram_build *b, uint32_t from, uint32_t to, json_t *v);

/* The rule of an object or array that is exactly v. */
static uint32_t constant_rule(gram_build *b, json_t *v)
{
    const bool     object = json_is_object(v);
    const uint32_t was = b->owner, rule = gram_rule_new(b, object ? '{' : '[');
    uint32_t       at, first;
    const char    *key;
    size_t         i = 0, len;
    json_t        *one;

    b->owner = rule;
    first = at = white_node(b);
    if (object) {
        json_object_keylen_foreach(v, key, len, one)
        {
            json_t  *name = gram_own(b, json_stringn(key, len));
            uint32_t pre = white_node(b), k = white_node(b), c = white_node(b), z = white_node(b);

            if (!name)
                break;
            if (i++)
                gram_byte(b, at, pre, ',', ',', true);
            else
                gram_eps(b, at, pre);
            gram_call(b, pre, k, gram_words(b, &name, 1));
            gram_byte(b, k, c, ':', ':', false);
            constant(b, c, z, one);
            at = z;
        }
    } else {
        json_array_foreach(v, i, one)
        {
            uint32_t pre = white_node(b), z = white_node(b);

            if (i)
                gram_byte(b, at, pre, ',', ',', true);
            else
                gram_eps(b, at, pre);
            constant(b, pre, z, one);
            at = z;
        }
    }
    gram_ret(b, at);
    if (b->st == KVD_OK)
        b->rule[rule].start = first;
    b->owner = was;
    return rule;
}

static void constant(gram_build *b, uint32_t from, uint32_t to, json_t *v)
{
    char        text[KVD_JSON_NUMBER_BYTES];
    const char *word;

    if (!gram_tick(b, 2))
        return;
    if (json_is_object(v) || json_is_array(v)) {
        gram_call(b, from, to, constant_rule(b, v));
        return;
    }
    if (json_is_string(v)) {
        gram_call(b, from, to, gram_words(b, &v, 1));
        return;
    }
    word = json_is_number(v) ? kvd_json_number(&b->texts, v, text) /* as the schema spells it */
           : json_is_null(v) ? "null"
           : json_is_true(v) ? "true"
                             : "false";
    literal(b, from, to, word, strlen(word));
}

/* Whether a value of enum keeps to what stands beside it; strings are looked at later. */
static bool value_fits(gram_build *b, json_t *plain, json_t *v, uint32_t types)
{
    static const char *const inner[] = { "properties",    "required", "additionalProperties",
                                         "propertyNames", "items",    "prefixItems",
                                         "minItems",      "maxItems", "minProperties",
                                         "maxProperties" };

    switch (json_typeof(v)) {
    case JSON_STRING:
        return types & GRAM_T_STRING;
    case JSON_INTEGER:
    case JSON_REAL:
        return (types & GRAM_T_NUMBER || types & gram_type_of(b, v)) &&
               gram_number_fits(b, plain, v);
    case JSON_NULL:
        return types & GRAM_T_NULL;
    case JSON_TRUE:
    case JSON_FALSE:
        return types & GRAM_T_BOOL;
    default:
        for (size_t i = 0; i < KVD_COUNTOF(inner); i++)
            if (gram_has(plain, inner[i]))
                gram_refuse(b, "enum of objects or arrays beside %s", inner[i]);
        return types & (json_is_object(v) ? GRAM_T_OBJECT : GRAM_T_ARRAY);
    }
}

static void enumerated(gram_build *b, uint32_t from, uint32_t to, json_t *plain, uint32_t types)
{
    json_t  *list = json_object_get(plain, "enum"), *only = json_object_get(plain, "const"), *v;
    json_t **word;
    size_t   n = 0, i;

    if ((list && !json_is_array(list)) || json_array_size(list) > GRAM_MAX_ENUM) {
        gram_refuse(b, "enum must be a list of at most %u values", GRAM_MAX_ENUM);
        return;
    }
    if (!list)
        list = gram_own(b, json_pack("[O]", only));
    word = kvd_calloc(json_array_size(list) + 1, sizeof(*word));
    if (!word)
        gram_no_memory(b);
    json_array_foreach(list, i, v)
    {
        if (!gram_tick(b, 4) || (only && !gram_equal(b, v, only)) ||
            !value_fits(b, plain, v, types))
            continue;
        if (json_is_string(v))
            word[n++] = v;
        else
            constant(b, from, to, v);
    }
    if (n && b->st == KVD_OK)
        n = gram_words_that_fit(b, plain, word, n);
    if (n && b->st == KVD_OK)
        gram_call(b, from, to, gram_words(b, word, n));
    kvd_free(word);
}

/* ---- values --------------------------------------------------------------------------------- */

static uint32_t later(gram_build *b, json_t *plain, char open)
{
    const void *kind = open == '{' ? "{" : "[";
    gram_pair  *p    = gram_map_find(&b->rules, plain, kind);
    uint32_t    rule;

    if (p)
        return p->number;
    rule = gram_rule_new(b, open);
    p    = gram_map_add(b, &b->rules, plain, kind);
    if (!p)
        return 0;
    p->number = rule;
    if (b->n_job == b->cap_job) {
        const uint32_t cap = b->cap_job ? 2 * b->cap_job : 64;
        gram_job      *job = kvd_realloc(b->job, cap * sizeof(*job));

        if (!job) {
            gram_no_memory(b);
            return 0;
        }
        b->job     = job;
        b->cap_job = cap;
    }
    b->job[b->n_job] =
        (gram_job){ .rule = rule, .schema = plain, .path = kvd_strndup(b->path, strlen(b->path)) };
    if (!b->job[b->n_job++].path)
        gram_no_memory(b);
    return rule;
}

static uint32_t string_rule(gram_build *b, json_t *plain)
{
    static const char kind[] = "\"";
    gram_pair        *p      = gram_map_find(&b->rules, plain, kind);
    uint32_t          rule;

    if (p)
        return p->number;
    rule = gram_string_rule(b, plain, NULL);
    p    = gram_map_add(b, &b->rules, plain, kind);
    if (p)
        p->number = rule;
    return rule;
}

/* The schema whose rule stands for a type: one that all share where this one says nothing of it. */
static json_t *shared_by(gram_build *b, json_t *plain, uint32_t type)
{
    static const struct {
        uint32_t    type;
        const char *key;
    } says[] = { { GRAM_T_OBJECT, "properties" },
                 { GRAM_T_OBJECT, "required" },
                 { GRAM_T_OBJECT, "additionalProperties" },
                 { GRAM_T_OBJECT, "propertyNames" },
                 { GRAM_T_OBJECT, "minProperties" },
                 { GRAM_T_OBJECT, "maxProperties" },
                 { GRAM_T_ARRAY, "items" },
                 { GRAM_T_ARRAY, "prefixItems" },
                 { GRAM_T_ARRAY, "minItems" },
                 { GRAM_T_ARRAY, "maxItems" },
                 { GRAM_T_STRING, "minLength" },
                 { GRAM_T_STRING, "maxLength" },
                 { GRAM_T_STRING, "pattern" },
                 { GRAM_T_STRING, "format" },
                 { GRAM_T_STRING, GRAM_PATTERNS } };

    for (size_t i = 0; i < KVD_COUNTOF(says); i++)
        if (says[i].type == type && gram_has(plain, says[i].key))
            return plain;
    return b->any;
}

static void plain_value(gram_build *b, uint32_t from, uint32_t to, json_t *plain)
{
    const uint32_t types = gram_types(b, plain);
    gram_bounds    n;

    check_keywords(b, plain);
    if (b->st != KVD_OK)
        return;
    if (gram_has(plain, "enum") || gram_has(plain, "const")) {
        enumerated(b, from, to, plain, types);
        return;
    }
    if (types & GRAM_T_NULL)
        literal(b, from, to, "null", 4);
    if (types & GRAM_T_BOOL) {
        literal(b, from, to, "true", 4);
        literal(b, from, to, "false", 5);
    }
    if (types & (GRAM_T_NUMBER | GRAM_T_INTEGER)) {
        n = gram_bounds_of(b, plain, !(types & GRAM_T_NUMBER));
        if (b->st == KVD_OK)
            gram_number(b, from, to, &n);
    }
    if (types & GRAM_T_STRING)
        gram_call(b, from, to, string_rule(b, shared_by(b, plain, GRAM_T_STRING)));
    if (types & GRAM_T_ARRAY)
        gram_call(b, from, to, later(b, shared_by(b, plain, GRAM_T_ARRAY), '['));
    if (types & GRAM_T_OBJECT)
        gram_call(b, from, to, later(b, shared_by(b, plain, GRAM_T_OBJECT), '{'));
}

void gram_value(gram_build *b, uint32_t from, uint32_t to, json_t *schema, const char *step)
{
    const size_t at = strlen(b->path);
    json_t      *list, *plain;
    size_t       i;

    if (!gram_tick(b, 1))
        return;
    if (step)
        snprintf(b->path + at, sizeof(b->path) - at, "/%s", step);
    list = gram_expand(b, schema);
    json_array_foreach(list, i, plain)
    {
        plain_value(b, from, to, plain);
        if (b->st != KVD_OK)
            return;
    }
    b->path[at] = 0;
}

/* ---- objects ----------------------------------------------------------------------------------
 */

typedef struct object {
    gram_build *b;
    json_t     *props, *more; /* more: schema of other keys; NULL: there are none */
    json_t     *required;     /* object: name -> true */
    json_t     *names;        /* plain schema of all names; NULL: any will do */
    json_t     *fit;          /* with it: those listed that fit, an object */
    uint32_t    first;        /* behind {, while all so far may be left out; GRAM_NONE: no longer */
    uint32_t    last;         /* behind a member; GRAM_NONE: there is none yet */
    uint32_t    n_prop, n_required, min, max;
} object;

static void member(gram_build *b, uint32_t from, uint32_t to, uint32_t key, json_t *schema,
                   const char *name)
{
    const uint32_t k = white_node(b), v = white_node(b);

    gram_call(b, from, k, key);
    gram_byte(b, k, v, ':', ':', false);
    gram_value(b, v, to, schema, name);
}

static void property(object *o, const char *name, size_t len, json_t *schema)
{
    gram_build    *b    = o->b;
    json_t        *word = gram_own(b, json_stringn(name, len));
    const uint32_t pre = white_node(b), z = white_node(b);
    const bool     must = json_object_getn(o->required, name, len) != NULL;

    if (!word)
        return;
    if (o->first != GRAM_NONE)
        gram_eps(b, o->first, pre);
    if (o->last != GRAM_NONE)
        gram_byte(b, o->last, pre, ',', ',', true);
    member(b, pre, z, gram_words(b, &word, 1), schema, name);
    if (must)
        o->first = GRAM_NONE;
    else if (o->last != GRAM_NONE)
        gram_eps(b, o->last, z);
    o->last = z;
    o->n_prop++;
    o->n_required += must;
}

static bool read_object(object *o, json_t *plain)
{
    gram_build *b    = o->b;
    json_t     *list = json_object_get(plain, "required"), *v;
    size_t      i;

    o->props    = json_object_get(plain, "properties");
    o->more     = json_object_get(plain, "additionalProperties");
    o->required = gram_own(b, json_object());
    o->min      = gram_count(b, plain, "minProperties", 0);
    o->max      = gram_count(b, plain, "maxProperties", GRAM_NONE);
    if ((list && !json_is_array(list)) || (o->props && !json_is_object(o->props)))
        gram_refuse(b, "required must be a list of names, properties an object");
    json_array_foreach(list, i, v)
    {
        if (!json_is_string(v)) {
            gram_refuse(b, "required must be a list of names");
            break;
        }
        if (json_object_setn_new(o->required, json_string_value(v), json_string_length(v),
                                 json_true()) != 0)
            gram_no_memory(b);
    }
    return gram_tick(b, 4 + json_array_size(list));
}

/* Names of properties and those that are required: the keys of an object. */
static json_t *listed(object *o)
{
    json_t *all = gram_own(o->b, o->props ? json_copy(o->props) : json_object());

    if (all && json_object_update_missing(all, o->required) != 0)
        gram_no_memory(o->b);
    return o->b->st == KVD_OK ? all : NULL;
}

/* The rule of their names. */
static uint32_t other_key(object *o)
{
    json_t *all = listed(o);

    if (!all)
        return 0;
    if (o->names)
        return gram_names_rule(o->b, o->names, o->fit);
    return json_object_size(all) ? gram_other_keys(o->b, all) : o->b->free_string;
}

/* Members beyond those that are listed. */
static void other_members(object *o)
{
    gram_build *b = o->b;
    uint32_t    pre, comma, z;

    if (o->max <= o->n_prop)
        return;
    pre   = white_node(b);
    comma = white_node(b);
    z     = white_node(b);
    if (b->st == KVD_OK && o->max != GRAM_NONE) {
        b->node[comma].min = o->max >= 2 ? 0 : GRAM_NONE; /* never */
        b->node[comma].max = o->max >= 2 ? o->max - 2 : 0;
    }
    if (o->first != GRAM_NONE)
        gram_eps(b, o->first, pre);
    if (o->last != GRAM_NONE)
        gram_eps(b, o->last, comma);
    gram_byte(b, comma, pre, ',', ',', true);
    member(b, pre, z, other_key(o), o->more, "additionalProperties");
    gram_eps(b, z, comma);
    gram_ret(b, z);
}

static bool read_names(object *o, json_t *plain)
{
    json_t *all = listed(o);

    o->names = gram_names_of(o->b, plain);
    if (o->names && all)
        o->fit = gram_names_that_fit(o->b, o->names, all);
    return o->b->st == KVD_OK;
}

static void write_object(gram_build *b, uint32_t start, json_t *plain)
{
    object      o = { .b = b, .first = start, .last = GRAM_NONE };
    const char *name;
    size_t      len;
    json_t     *v;

    if (!read_object(&o, plain) || !read_names(&o, plain))
        return;
    json_object_keylen_foreach(o.props, name, len, v)
    {
        const bool may = !json_is_false(v) && (!o.names || json_object_getn(o.fit, name, len));

        if (b->st != KVD_OK)
            return;
        if (may || json_object_getn(o.required, name, len))
            property(&o, name, len, may ? v : b->none);
    }
    json_object_keylen_foreach(o.required, name, len, v)
    {
        const bool may = !o.names || json_object_getn(o.fit, name, len);

        if (!json_object_getn(o.props, name, len))
            property(&o, name, len, !may ? b->none : o.more ? o.more : b->any);
    }
    if (json_is_false(o.more) || (!o.more && o.props))
        o.more = NULL;
    else if (!o.more)
        o.more = b->any;
    if (o.min > o.n_required && !(o.min == 1 && o.n_required == 0))
        gram_refuse(b, "minProperties is supported up to the number of required ones, or 1");
    if (o.max < o.n_prop)
        gram_refuse(b, "maxProperties below the number of properties");
    if (o.first != GRAM_NONE && o.min == 0)
        gram_ret(b, o.first);
    if (o.last != GRAM_NONE)
        gram_ret(b, o.last);
    if (o.more)
        other_members(&o);
}

/* ---- arrays -------------------------------------------------------------------------------------
 */

typedef struct array {
    json_t  *prefix, *items; /* items NULL: no more of them */
    uint32_t min, max;
} array;

/* Items beyond the first ones: commas are counted, so n items are n - 1. */
static void more_items(gram_build *b, const array *a, uint32_t at, uint32_t n)
{
    const uint32_t pre = white_node(b), z = white_node(b);
    const uint32_t comma = white_node(b), shut = white_node(b);

    if (b->st != KVD_OK)
        return;
    if (n == 0)
        gram_eps(b, at, pre);
    else
        gram_eps(b, at, comma);
    gram_byte(b, comma, pre, ',', ',', true);
    gram_value(b, pre, z, a->items, "items");
    gram_eps(b, z, comma);
    gram_eps(b, z, shut);
    gram_ret(b, shut);
    if (b->st != KVD_OK)
        return;
    b->node[shut].min = a->min > 1 ? a->min - 1 : 0;
    if (a->max == 1)
        b->node[comma].min = GRAM_NONE; /* never */
    else if (a->max != GRAM_NONE)
        b->node[comma].max = a->max - 2;
}

static void write_array(gram_build *b, uint32_t start, json_t *plain)
{
    array    a  = { .prefix = json_object_get(plain, "prefixItems"),
                    .items  = json_object_get(plain, "items"),
                    .min    = gram_count(b, plain, "minItems", 0),
                    .max    = gram_count(b, plain, "maxItems", GRAM_NONE) };
    uint32_t at = start, n = 0;
    json_t  *v;
    size_t   i;

    if (a.prefix && !json_is_array(a.prefix))
        gram_refuse(b, "prefixItems must be a list of schemas");
    if (a.min > a.max)
        return; /* nothing fits */
    if (json_is_false(a.items) || (!a.items && a.prefix && a.min <= json_array_size(a.prefix)))
        a.items = NULL;
    else if (!a.items)
        a.items = b->any;
    json_array_foreach(a.prefix, i, v)
    {
        const uint32_t pre = white_node(b), z = white_node(b);
        char           step[32];

        if (n >= a.max || b->st != KVD_OK)
            break;
        if (n >= a.min)
            gram_ret(b, at);
        if (n)
            gram_byte(b, at, pre, ',', ',', true);
        else
            gram_eps(b, at, pre);
        snprintf(step, sizeof(step), "prefixItems/%zu", i);
        gram_value(b, pre, z, v, step);
        at = z;
        n++;
    }
    if (n >= a.min)
        gram_ret(b, at);
    if (a.items && n < a.max)
        more_items(b, &a, at, n);
}

/* ---- the list of rules to be written
 * -------------------------------------------------------------- */

void gram_run_jobs(gram_build *b)
{
    char path[sizeof(b->path)];

    memcpy(path, b->path, sizeof(path));
    while (b->n_done < b->n_job && b->st == KVD_OK) {
        const gram_job job = b->job[b->n_done++];
        uint32_t       start;

        b->owner = job.rule;
        snprintf(b->path, sizeof(b->path), "%s", job.path);
        start = white_node(b);
        if (b->st != KVD_OK)
            return;
        b->rule[job.rule].start = start;
        if (b->rule[job.rule].open == '{')
            write_object(b, start, job.schema);
        else
            write_array(b, start, job.schema);
    }
    if (b->st == KVD_OK)
        memcpy(b->path, path, sizeof(path));
}

json_t *gram_read_json(gram_build *b, const char *text, size_t len)
{
    kvd_json_error at;
    json_t        *j;

    if (len > GRAM_MAX_BYTES) {
        gram_refuse(b, "more than %u bytes", GRAM_MAX_BYTES);
        return NULL;
    }
    if (kvd_json_deeper(text, len, GRAM_MAX_NESTING)) { /* than a schema needs */
        gram_refuse(b, "more than %d brackets in each other", GRAM_MAX_NESTING);
        return NULL;
    }
    j = kvd_json_read(&b->texts, text, len, KVD_JSON_NUL, &at);
    if (!j && at.no_memory)
        gram_no_memory(b);
    else if (!j)
        gram_refuse(b, "not JSON: line %u column %u: %s", at.line, at.column, at.text);
    return j;
}
