/* SPDX-License-Identifier: Apache-2.0 */
#include "support/schema_check.h"

#include <math.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

typedef struct check {
    json_t     *root;
    const char *why;
} check;

static bool fits(check *c, json_t *schema, json_t *v);

static bool broken(check *c, const char *why)
{
    c->why = why;
    return false;
}

static bool is_integer(const json_t *v)
{
    return json_is_integer(v) ||
           (json_is_real(v) && json_real_value(v) == floor(json_real_value(v)));
}

static bool has_type(const char *name, const json_t *v)
{
    return (strcmp(name, "null") == 0 && json_is_null(v)) ||
           (strcmp(name, "boolean") == 0 && json_is_boolean(v)) ||
           (strcmp(name, "integer") == 0 && is_integer(v)) ||
           (strcmp(name, "number") == 0 && json_is_number(v)) ||
           (strcmp(name, "string") == 0 && json_is_string(v)) ||
           (strcmp(name, "array") == 0 && json_is_array(v)) ||
           (strcmp(name, "object") == 0 && json_is_object(v));
}

static bool type_ok(json_t *schema, const json_t *v)
{
    json_t *t = json_object_get(schema, "type"), *one;
    size_t  i;

    if (!t || (json_is_string(t) && has_type(json_string_value(t), v)))
        return true;
    json_array_foreach(t, i, one)
    {
        if (has_type(json_string_value(one), v))
            return true;
    }
    return json_is_true(json_object_get(schema, "nullable")) && json_is_null(v);
}

static bool same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static bool among(json_t *list, json_t *v)
{
    json_t *one;
    size_t  i;

    json_array_foreach(list, i, one)
    {
        if (same(one, v))
            return true;
    }
    return false;
}

static double number(json_t *schema, const char *key, double missing)
{
    json_t *n = json_object_get(schema, key);

    return n ? json_number_value(n) : missing;
}

static size_t characters(const json_t *v)
{
    const char *s = json_string_value(v);
    size_t      n = 0;

    for (size_t i = 0; i < json_string_length(v); i++)
        n += ((unsigned char)s[i] & 0xc0) != 0x80;
    return n;
}

static bool matches(const char *pattern, const char *s)
{
    regex_t re;
    int     rc;

    if (regcomp(&re, pattern, REG_EXTENDED | REG_NOSUB) != 0)
        abort(); /* the tests' patterns are such that it can */
    rc = regexec(&re, s, 0, NULL, 0);
    regfree(&re);
    return rc == 0;
}

static bool is_date(const char *s)
{
    static const int days[] = { 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };
    int              y, m, d, n = 0;

    return sscanf(s, "%4d-%2d-%2d%n", &y, &m, &d, &n) == 3 && n == 10 && y > 0 && m >= 1 &&
           m <= 12 && d >= 1 && d <= days[m - 1] && !(m == 2 && d == 29);
}

static bool format_ok(const char *f, const char *s)
{
    if (strcmp(f, "date") == 0)
        return strlen(s) == 10 && is_date(s);
    if (strcmp(f, "time") == 0)
        return matches(
            "^[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?(Z|[+-][0-2][0-9]:[0-5][0-9])$", s);
    if (strcmp(f, "date-time") == 0)
        return is_date(s) && s[10] == 'T' && format_ok("time", s + 11);
    if (strcmp(f, "uuid") == 0)
        return matches("^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", s);
    if (strcmp(f, "email") == 0)
        return matches("^[^@ ]+@[^@ .]+(\\.[^@ .]+)+$", s);
    if (strcmp(f, "ipv4") == 0)
        return matches("^[0-9]{1,3}(\\.[0-9]{1,3}){3}$", s);
    return true;
}

static bool string_ok(check *c, json_t *schema, json_t *v)
{
    const double n = (double)characters(v);
    json_t      *p = json_object_get(schema, "pattern"), *f = json_object_get(schema, "format");

    if (n < number(schema, "minLength", 0))
        return broken(c, "minLength");
    if (n > number(schema, "maxLength", INFINITY))
        return broken(c, "maxLength");
    if (p && !matches(json_string_value(p), json_string_value(v)))
        return broken(c, "pattern");
    return !f || format_ok(json_string_value(f), json_string_value(v)) || broken(c, "format");
}

static bool number_ok(check *c, json_t *schema, const json_t *v)
{
    const double x = json_number_value(v);

    if (x < number(schema, "minimum", -INFINITY) || x > number(schema, "maximum", INFINITY))
        return broken(c, "minimum or maximum");
    return (x > number(schema, "exclusiveMinimum", -INFINITY) &&
            x < number(schema, "exclusiveMaximum", INFINITY)) ||
           broken(c, "exclusive bounds");
}

static bool array_ok(check *c, json_t *schema, json_t *v)
{
    json_t      *prefix = json_object_get(schema, "prefixItems"), *items, *one;
    const double n      = (double)json_array_size(v);
    size_t       i;

    items = json_object_get(schema, "items");
    if (n < number(schema, "minItems", 0) || n > number(schema, "maxItems", INFINITY))
        return broken(c, "minItems or maxItems");
    json_array_foreach(v, i, one)
    {
        json_t *s = i < json_array_size(prefix) ? json_array_get(prefix, i) : items;

        if (s && !fits(c, s, one))
            return false;
    }
    return true;
}

static bool object_ok(check *c, json_t *schema, json_t *v)
{
    json_t      *props = json_object_get(schema, "properties"), *one, *name;
    json_t      *more  = json_object_get(schema, "additionalProperties");
    const double n     = (double)json_object_size(v);
    const char  *key;
    size_t       i;

    json_array_foreach(json_object_get(schema, "required"), i, name)
    {
        if (!json_object_get(v, json_string_value(name)))
            return broken(c, "required");
    }
    if (n < number(schema, "minProperties", 0) || n > number(schema, "maxProperties", INFINITY))
        return broken(c, "minProperties or maxProperties");
    json_object_foreach(v, key, one)
    {
        json_t *s = json_object_get(props, key);

        s = s ? s : more;
        if (s && !fits(c, s, one))
            return false;
    }
    return true;
}

static bool all_of(check *c, json_t *schema, json_t *v)
{
    json_t *ref = json_object_get(schema, "$ref"), *one;
    size_t  i;
    int     n = 0;
    bool    any;

    if (ref) { /* "#" or "#/$defs/NAME" */
        const char *name = json_string_value(ref);

        one = c->root;
        if (strlen(name) > 8)
            one = json_object_get(json_object_get(c->root, "$defs"), name + 8);
        if (!fits(c, one, v))
            return false;
    }
    json_array_foreach(json_object_get(schema, "allOf"), i, one)
    {
        if (!fits(c, one, v))
            return false;
    }
    any = !json_object_get(schema, "anyOf");
    json_array_foreach(json_object_get(schema, "anyOf"), i, one)
    {
        any = any || fits(c, one, v);
    }
    json_array_foreach(json_object_get(schema, "oneOf"), i, one)
    {
        n += fits(c, one, v);
    }
    if (json_object_get(schema, "oneOf") && n != 1)
        return broken(c, "oneOf");
    return any;
}

static bool fits(check *c, json_t *schema, json_t *v)
{
    if (json_is_boolean(schema))
        return json_is_true(schema) || broken(c, "false");
    if (!type_ok(schema, v))
        return broken(c, "type");
    if (json_object_get(schema, "enum") && !among(json_object_get(schema, "enum"), v))
        return broken(c, "enum");
    if (json_object_get(schema, "const") && !same(json_object_get(schema, "const"), v))
        return broken(c, "const");
    if (json_is_string(v) && !string_ok(c, schema, v))
        return false;
    if (json_is_number(v) && !number_ok(c, schema, v))
        return false;
    if (json_is_array(v) && !array_ok(c, schema, v))
        return false;
    if (json_is_object(v) && !object_ok(c, schema, v))
        return false;
    return all_of(c, schema, v);
}

bool schema_check(json_t *root, json_t *schema, json_t *value, const char **why)
{
    check c = { .root = root };
    bool  ok;

    ok = fits(&c, schema, value);
    if (why)
        *why = ok ? "" : c.why;
    return ok;
}
