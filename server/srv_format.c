/* SPDX-License-Identifier: Apache-2.0 */
/* srv_format.c - formats of answers: the grammar that an answer keeps to.
 *
 * Opened by a worker, so that a schema which cannot be applied is the request's mistake; then the
 * engine's thread alone uses it, until the job ends. */
#include "srv_fields.h"

#include <string.h>

void srv_want_grammar(srv_fields *f, const char *field, const kvd_grammar_params *p, kvd_buf *text)
{
    f->grammar       = *p;
    f->grammar_field = field;
    f->grammar_text  = *text;
    *text            = (kvd_buf){ 0 };
}

bool srv_open_grammar(srv_fields *f, srv_request *r)
{
    kvd_err    err = { 0 };
    kvd_status st;

    if (!f->grammar_field)
        return true;
    f->grammar.reasoning       = r->reasoning;
    f->grammar.reasoning_state = r->reasoning_state;
    st                         = kvd_grammar_open(&r->grammar, f->s->model, &f->grammar, &err);
    if (st == KVD_OK)
        srv_log_notes(f->s, kvd_grammar_notes(r->grammar));
    return srv_fields_status(f, f->grammar_field, st, &err);
}

/* The schema stands in "json_schema", as OpenAI's chats have it, or beside the type, as responses
 * and llama.cpp do.  NULL: there is none, or an error is told. */
static const json_t *schema_of(srv_fields *f, const char *field, const json_t *o)
{
    const json_t *in = srv_get(o, "json_schema"), *beside = srv_get(o, "schema");
    const json_t *schema = in ? srv_get(in, "schema") : beside;

    if (in && beside)
        srv_fields_bad(f, field, "schema and json_schema: expected one of them");
    else if ((in || schema) && !json_is_object(schema))
        srv_fields_bad(f, field, "%sschema: expected a schema, an object",
                       in ? "json_schema." : "");
    return f->bad ? NULL : schema;
}

/* What a format asks for: a schema, or any object; neither: any text. */
static const json_t *get_format(srv_fields *f, const char *field, const json_t *o, bool *object)
{
    const char   *type   = json_string_value(srv_get(o, "type"));
    const json_t *schema = schema_of(f, field, o);

    if (type && strcmp(type, "json_object") == 0)
        *object = json_object_size(schema) == 0;
    else if (type && strcmp(type, "json_schema") == 0 && !schema)
        srv_fields_bad(f, field, "schema: is missing");
    else if (type && strcmp(type, "text") == 0 && schema)
        srv_fields_bad(f, field, "schema: only with type json_object or json_schema");
    else if (!type)
        srv_fields_bad(f, field, "type: expected text, json_object or json_schema");
    else if (strcmp(type, "text") != 0 && strcmp(type, "json_schema") != 0)
        srv_fields_bad(f, field,
                       "type: \"%.40s\" is not supported here, only text, json_object, json_schema",
                       type);
    return *object ? NULL : schema;
}

/* vLLM's newer form: json, or json_object: true.  What else it has is as the older fields are. */
static const json_t *get_structured(srv_fields *f, bool *object)
{
    const json_t *o    = srv_get_object(f, f->root, "structured_outputs");
    const json_t *json = srv_get(o, "json"), *v;
    const char   *name;

    srv_get_bool(f, o, "json_object", object);
    json_object_foreach((json_t *)(uintptr_t)o, name, v)
    {
        if (strcmp(name, "json") != 0 && strcmp(name, "json_object") != 0 && !json_is_null(v) &&
            !json_is_false(v))
            srv_fields_bad(
                f, "structured_outputs",
                "%.40s: is not supported here, only json and json_object: " SRV_SAY_SCHEMA, name);
    }
    if (json && *object)
        srv_fields_bad(f, "structured_outputs", "json and json_object: expected one of them");
    return json;
}

/* A schema that is a field of its own, as llama.cpp and vLLM have it: the same as a format's.
 * *object: any object is asked for so. */
static const json_t *get_bare(srv_fields *f, const char *format, bool has_format,
                              const char **field, bool *object)
{
    static const char *const bare[] = { "json_schema", "guided_json", "structured_outputs" };
    const json_t            *schema = NULL;
    const char              *first  = has_format ? format : NULL;

    for (uint32_t i = 0; i < KVD_COUNTOF(bare); i++) {
        const bool    inside = i == KVD_COUNTOF(bare) - 1;
        const json_t *v      = inside ? get_structured(f, object) : srv_get(f->root, bare[i]);

        if (!v && !(inside && *object))
            continue;
        if (first)
            srv_fields_bad(f, bare[i], "not together with %s", first);
        else if (v && !json_is_object(v))
            srv_fields_bad(f, bare[i], "%sexpected a schema, an object", inside ? "json: " : "");
        first  = bare[i];
        schema = v;
        *field = bare[i];
    }
    return f->bad ? NULL : schema;
}

void srv_get_format(srv_fields *f, const char *field, const json_t *o)
{
    kvd_grammar_params p      = KVD_GRAMMAR_PARAMS_INIT;
    kvd_buf            text   = { 0 };
    const json_t      *schema = o && !f->bad ? get_format(f, field, o, &p.json_object) : NULL;
    bool               object = false;
    const json_t      *bare   = get_bare(f, field, schema || p.json_object, &field, &object);

    p.json_object = p.json_object || object;
    schema        = schema ? schema : bare;
    if (!f->bad && schema && srv_put_json(f, schema, &text))
        p.schema_json = text.data;
    if (!f->bad && (schema || p.json_object)) {
        srv_want_grammar(f, field, &p, &text);
        f->format = field;
    }
    kvd_buf_free(&text);
}
