/* SPDX-License-Identifier: Apache-2.0 */
/* gram_param.c - arguments as <parameter=NAME>VALUE</parameter>, in the order of the schema.
 *
 * A value that may be a string is raw text; of such a schema only an enum is applied.  All others
 * are JSON, as their schemas say. */
#include <string.h>

#include "text/gram_impl.h"
#include "text/tool_form.h"

typedef struct params {
    gram_build *b;
    json_t     *required;
    bool        all; /* everything that the schemas say is applied */
} params;

/* Keywords of strings that raw text does not keep to. */
static bool says_more(const json_t *schema)
{
    static const char *const words[] = { "pattern",   "format", "minLength",
                                         "maxLength", "allOf",  "$ref" };

    for (size_t i = 0; i < KVD_COUNTOF(words); i++)
        if (json_object_get(schema, words[i]))
            return true;
    return false;
}

static void raw_text(gram_build *b, uint32_t from, uint32_t to)
{
    const tok_str close = tool_trim(TOOL_PARAM_CLOSE);

    gram_until(b, from, &close, &to, 1, 0, NULL, "");
}

/* The value and its closing mark. */
static void value(params *p, uint32_t from, uint32_t to, json_t *schema, const char *name)
{
    gram_build *b     = p->b;
    json_t     *words = json_object_get(schema, "enum"), *word;
    uint32_t    end;
    size_t      i;

    if (!tool_takes_text(schema)) {
        end = gram_node_new(b);
        if (b->st == KVD_OK)
            b->node[end].flags |= GRAM_WHITE;
        gram_value(b, from, end, schema, name);
        gram_eps(b, gram_literal(b, end, TOOL_PARAM_CLOSE, strlen(TOOL_PARAM_CLOSE)), to);
        return;
    }
    p->all = p->all && !says_more(schema);
    if (json_array_size(words) == 0) {
        raw_text(b, from, to);
        return;
    }
    json_array_foreach(words, i, word)
    {
        if (json_is_string(word)) {
            end = gram_literal(b, from, json_string_value(word), json_string_length(word));
            gram_eps(b, gram_literal(b, end, TOOL_PARAM_CLOSE, strlen(TOOL_PARAM_CLOSE)), to);
        }
    }
}

static void open_mark(gram_build *b, uint32_t from, uint32_t to, const char *name, size_t len)
{
    uint32_t at = gram_literal(b, from, TOOL_PARAM_OPEN, strlen(TOOL_PARAM_OPEN));

    at = gram_literal(b, at, name, len);
    gram_byte(b, at, to, '>', '>', false);
}

static bool requires(const params *p, const char *name)
{
    size_t  i;
    json_t *v;

    json_array_foreach(p->required, i, v)
    {
        if (json_is_string(v) && strcmp(json_string_value(v), name) == 0)
            return true;
    }
    return false;
}

/* One parameter between two nodes, which are the same place where it may be left out. */
static void parameter(params *p, uint32_t from, uint32_t to, const char *name, size_t len,
                      json_t *schema)
{
    gram_build    *b    = p->b;
    const uint32_t open = gram_node_new(b);

    if (!tool_plain_name(name, len))
        gram_refuse(b, "the name of parameter '%.60s' cannot be written in the template's form",
                    name);
    if (b->st != KVD_OK)
        return;
    open_mark(b, from, open, name, len);
    if (!tool_takes_text(schema))
        b->node[open].flags |= GRAM_WHITE;
    value(p, open, to, schema, name);
    if (!requires(p, name))
        gram_eps(b, from, to);
}

/* Parameters of any name and text, any number of them. */
static void any_params(gram_build *b, uint32_t from, uint32_t to)
{
    static const gram_range name[] = {
        { 'a', 'z' }, { 'A', 'Z' }, { '0', '9' }, { '_', '_' }, { '-', '.' }
    };
    const uint32_t first = gram_literal(b, from, TOOL_PARAM_OPEN, strlen(TOOL_PARAM_OPEN));
    const uint32_t more = gram_node_new(b), open = gram_node_new(b);

    for (size_t i = 0; i < KVD_COUNTOF(name); i++) {
        gram_byte(b, first, more, (uint8_t)name[i].lo, (uint8_t)name[i].hi, false);
        gram_byte(b, more, more, (uint8_t)name[i].lo, (uint8_t)name[i].hi, false);
    }
    gram_byte(b, more, open, '>', '>', false);
    if (b->st == KVD_OK)
        raw_text(b, open, from);
    gram_eps(b, from, to);
}

static uint32_t white_node(gram_build *b)
{
    const uint32_t node = gram_node_new(b);

    if (b->st == KVD_OK)
        b->node[node].flags |= GRAM_WHITE;
    return node;
}

bool gram_params(gram_build *b, uint32_t from, uint32_t to, json_t *parameters)
{
    json_t     *props = json_object_get(parameters, "properties"), *schema;
    params      p = { .b = b, .required = json_object_get(parameters, "required"), .all = true };
    const char *name;
    size_t      len;
    uint32_t    at = white_node(b), next;

    gram_eps(b, from, at);
    if (!json_is_object(props) ||
        (json_object_size(props) == 0 && !json_array_size(p.required) &&
         !json_is_false(json_object_get(parameters, "additionalProperties")) &&
         json_object_get(parameters, "additionalProperties"))) {
        any_params(b, at, to);
        return true;
    }
    json_object_keylen_foreach(props, name, len, schema)
    {
        if (b->st != KVD_OK)
            break;
        next = white_node(b);
        parameter(&p, at, next, name, len, schema);
        at = next;
    }
    gram_eps(b, at, to);
    return p.all;
}
