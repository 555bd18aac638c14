/* SPDX-License-Identifier: Apache-2.0 */
/* srv_messages.c - messages of a chat: checked, brought to the form that templates know, rendered.
 *
 * What clients write stays text: special tokens are recognised only where the template wrote them.
 */
#include <stdio.h>
#include <string.h>

#include "srv_fields.h"

#define MESSAGES_MAX 8192u
#define WHERE_BYTES  64

static const char *const roles[] = { "system", "developer", "user", "assistant", "tool" };

static bool known_role(const char *role)
{
    for (size_t i = 0; i < KVD_COUNTOF(roles); i++)
        if (strcmp(roles[i], role) == 0)
            return true;
    return false;
}

/* Text parts, each on a line of its own, as templates of text models expect one string. */
static json_t *join_parts(srv_fields *f, const json_t *parts, const char *where)
{
    kvd_buf b = { 0 };
    size_t  i;
    json_t *part, *out = NULL;

    json_array_foreach(parts, i, part)
    {
        const json_t *type = srv_get(part, "type"), *text = srv_get(part, "text");

        if (!json_is_string(type) || strcmp(json_string_value(type), "text") != 0) {
            srv_fields_bad(f, where, "only parts of type \"text\" are supported here");
            break;
        }
        if (!json_is_string(text)) {
            srv_fields_bad(f, where, "a part's text is not a string");
            break;
        }
        if (i > 0)
            kvd_buf_putc(&b, '\n');
        kvd_buf_put(&b, json_string_value(text), json_string_length(text));
    }
    if (!f->bad && !b.oom)
        out = json_stringn(b.data ? b.data : "", b.len);
    kvd_buf_free(&b);
    return out;
}

static bool normalise_content(srv_fields *f, json_t *m, const char *role, const char *where)
{
    json_t *v = json_object_get(m, "content");

    if (json_is_string(v))
        return true;
    if (json_is_array(v)) {
        json_t *text = join_parts(f, v, where);

        if (!text || json_object_set_new(m, "content", text) != 0)
            return srv_fields_full(f, "no memory for its content");
        return true;
    }
    if (v && !json_is_null(v))
        return srv_fields_bad(f, where, "content is neither a string nor a list of parts");
    if (strcmp(role, "assistant") != 0 || !srv_get(m, "tool_calls"))
        return srv_fields_bad(f, where, "content is missing");
    return json_object_set_new(m, "content", json_string("")) == 0 ||
           srv_fields_full(f, "no memory for its content");
}

static bool normalise(srv_fields *f, json_t *m, size_t i)
{
    const json_t *role = srv_get(m, "role");
    char          where[WHERE_BYTES];

    snprintf(where, sizeof(where), "messages[%zu]", i);
    if (!json_is_object(m))
        return srv_fields_bad(f, where, "expected an object");
    if (!json_is_string(role) || !known_role(json_string_value(role)))
        return srv_fields_bad(f, where, "role is none of system, developer, user, assistant, tool");
    if (!normalise_content(f, m, json_string_value(role), where))
        return false;
    if (strcmp(json_string_value(role), "developer") == 0 &&
        json_object_set_new(m, "role", json_string("system")) != 0)
        return srv_fields_full(f, "no memory for its role");
    return true;
}

static bool render(srv_fields *f, const kvd_buf *messages, const kvd_buf *vars, bool generate,
                   char **text, size_t *len, kvd_span **spans, size_t *n_span)
{
    kvd_chat_request r   = KVD_CHAT_REQUEST_INIT;
    kvd_err          err = { 0 };
    kvd_status       st;

    r.messages_json         = messages->data;
    r.vars_json             = vars->len ? vars->data : NULL;
    r.add_generation_prompt = generate;
    st                      = kvd_chat_render(f->s->model, &r, text, len, spans, n_span, &err);
    return srv_fields_status(f, "messages", st, &err);
}

bool srv_render(srv_fields *f, char **text, size_t *len, kvd_span **spans, size_t *n_span)
{
    json_t *list     = srv_get(f->root, "messages"), *m, *vars;
    kvd_buf messages = { 0 }, more = { 0 };
    bool    generate = true;
    size_t  i;

    *text  = NULL;
    *spans = NULL;
    if (!f->s->info.chat_template)
        return srv_fields_bad(f, "messages", "the model has no chat template (--chat-template)");
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MESSAGES_MAX)
        return srv_fields_bad(f, "messages", "expected a list of 1 to %u messages", MESSAGES_MAX);
    json_array_foreach(list, i, m)
    {
        if (!normalise(f, m, i))
            return false;
    }
    srv_get_bool(f, f->root, "add_generation_prompt", &generate);
    vars = srv_get_object(f, f->root, "chat_template_kwargs");
    if (!f->bad && srv_put_json(f, list, &messages) && (!vars || srv_put_json(f, vars, &more)))
        (void)!render(f, &messages, &more, generate, text, len, spans, n_span);
    kvd_buf_free(&messages);
    kvd_buf_free(&more);
    return !f->bad;
}
