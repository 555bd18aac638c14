/* SPDX-License-Identifier: Apache-2.0 */
/* srv_format.c - formats of answers: the grammar that an answer keeps to.
 *
 * Opened by a worker, so that a schema which cannot be applied is the request's mistake; then the
 * engine's thread alone uses it, until the job ends. */
#include "srv_fields.h"

#include <string.h>

bool srv_open_grammar(srv_fields *f, const char *field, const kvd_grammar_params *p, srv_request *r)
{
    kvd_err    err = { 0 };
    kvd_status st  = kvd_grammar_open(&r->grammar, f->s->model, p, &err);

    if (st == KVD_OK)
        srv_log_notes(f->s, kvd_grammar_notes(r->grammar));
    return srv_fields_status(f, field, st, &err);
}

/* The schema stands in "json_schema", as chats have it, or beside the type, as responses do. */
static void get_schema(srv_fields *f, const char *field, const json_t *o, kvd_buf *b)
{
    const json_t *in     = srv_get(o, "json_schema");
    const json_t *schema = json_object_get(in ? in : o, "schema");

    if (!json_is_object(schema))
        srv_fields_bad(f, field, "%sschema: expected a schema, an object",
                       in ? "json_schema." : "");
    else
        srv_put_json(f, schema, b);
}

void srv_get_format(srv_fields *f, const char *field, const json_t *o, srv_request *r)
{
    const char        *type = json_string_value(srv_get(o, "type"));
    kvd_grammar_params p    = KVD_GRAMMAR_PARAMS_INIT;
    kvd_buf            text = { 0 };

    if (!o || f->bad || (type && strcmp(type, "text") == 0))
        return;
    if (type && strcmp(type, "json_schema") == 0) {
        get_schema(f, field, o, &text);
        p.schema_json = text.data;
    } else if (type && strcmp(type, "json_object") == 0) {
        p.json_object = true;
    } else {
        srv_fields_bad(f, field, "type: expected text, json_object or json_schema");
    }
    if (!f->bad)
        srv_open_grammar(f, field, &p, r);
    kvd_buf_free(&text);
}
