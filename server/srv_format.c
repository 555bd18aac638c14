/* SPDX-License-Identifier: Apache-2.0 */
/* srv_format.c - response_format: the grammar that an answer keeps to.
 *
 * Opened by a worker, so that a schema which cannot be applied is the request's mistake; then the
 * engine's thread alone uses it, until the job ends. */
#include "srv_fields.h"

#include <string.h>

#define FORMAT "response_format"

static void get_schema(srv_fields *f, const json_t *o, kvd_buf *b)
{
    const json_t *js     = srv_get_object(f, o, "json_schema");
    const json_t *schema = json_object_get(js, "schema");

    if (!json_is_object(schema))
        srv_fields_bad(f, FORMAT, "json_schema.schema: expected a schema, an object");
    else
        srv_put_json(f, schema, b);
}

void srv_get_format(srv_fields *f, srv_request *r)
{
    const json_t      *o    = srv_get_object(f, f->root, FORMAT);
    const char        *type = json_string_value(srv_get(o, "type"));
    kvd_grammar_params p    = KVD_GRAMMAR_PARAMS_INIT;
    kvd_buf            text = { 0 };
    kvd_err            err  = { 0 };

    if (!o || f->bad || (type && strcmp(type, "text") == 0))
        return;
    if (type && strcmp(type, "json_schema") == 0) {
        get_schema(f, o, &text);
        p.schema_json = text.data;
    } else if (type && strcmp(type, "json_object") == 0) {
        p.json_object = true;
    } else {
        srv_fields_bad(f, FORMAT, "type: expected text, json_object or json_schema");
    }
    if (!f->bad)
        srv_fields_status(f, FORMAT, kvd_grammar_open(&r->grammar, f->s->model, &p, &err), &err);
    kvd_buf_free(&text);
}
