/* SPDX-License-Identifier: Apache-2.0 */
/* srv_convert.c - chats of other shapes, brought to the form of OpenAI's: messages with a role, a
 * text, and calls of tools. */
#include "srv_fields.h"

#include <stdio.h>
#include <string.h>

bool srv_add(srv_fields *f, json_t *list, json_t *m)
{
    return (m && json_array_append_new(list, m) == 0) ||
           srv_fields_full(f, "no memory for the messages");
}

json_t *srv_text_of(srv_fields *f, json_t *v, const char *type, const char *where)
{
    if (json_is_string(v))
        return json_incref(v);
    if (json_is_array(v))
        return srv_join_parts(f, v, where, type);
    srv_fields_bad(f, where, "expected a string or a list of parts");
    return NULL;
}

bool srv_add_message(srv_fields *f, json_t *list, const char *role, json_t *content,
                     const char *type, const char *where)
{
    json_t *text = srv_text_of(f, content, type, where);

    return !f->bad && srv_add(f, list, json_pack("{s:s, s:o}", "role", role, "content", text));
}

bool srv_add_reasoning(srv_fields *f, json_t *list, const char *text, size_t len)
{
    json_t *last = json_array_get(list, json_array_size(list) - 1);

    return len == 0 ||
           json_object_set_new(last, "reasoning_content", json_stringn(text, len)) == 0 ||
           srv_fields_full(f, "no memory for the messages");
}

bool srv_add_call(srv_fields *f, json_t *calls, json_t *id, json_t *name, json_t *arguments)
{
    return srv_add(f, calls,
                   json_pack("{s:O, s:s, s:{s:O, s:O}}", "id", id, "type", "function", "function",
                             "name", name, "arguments", arguments));
}

bool srv_add_result(srv_fields *f, json_t *list, json_t *id, json_t *text)
{
    return !f->bad && srv_add(f, list,
                              json_pack("{s:s, s:O, s:o}", "role", "tool", "tool_call_id", id,
                                        "content", text));
}

bool srv_add_function(srv_fields *f, json_t *list, json_t *function)
{
    return srv_add(f, list, json_pack("{s:s, s:o}", "type", "function", "function", function));
}

void srv_leave_out(srv_fields *f, const char *what, const char *type)
{
    char word[64], text[160];

    srv_log_quote(type, strlen(type), word, sizeof(word));
    snprintf(text, sizeof(text), "requests have %s of type %s, which are left out", what, word);
    srv_log_once(f->s, text);
}

/* NULL: there are no tools, or they are not what they should be. */
static json_t *get_functions(srv_fields *f, const srv_conversion *to, srv_request *r)
{
    json_t *in = srv_get(f->root, "tools"), *tool, *list;
    size_t  i;

    if (!in)
        return NULL;
    if (!json_is_array(in))
        srv_fields_bad(f, "tools", "expected a list of tools");
    list = json_array();
    json_array_foreach(in, i, tool)
    {
        if (!json_is_object(tool))
            srv_fields_bad(f, srv_at("tools[%zu]", i).s, "expected an object");
        if (f->bad || !to->add_tool(f, r, list, tool, i))
            break;
    }
    return list;
}

bool srv_get_converted(srv_fields *f, const srv_conversion *to, srv_tools *t, srv_request *r)
{
    json_t       *functions = NULL, *messages = NULL;
    const json_t *shown;

    if (!f->bad)
        t->list = functions = get_functions(f, to, r);
    shown = srv_use_tools(f, t, r);
    if (!f->bad)
        messages = json_array();
    if (!f->bad && to->add_messages(f, messages))
        srv_get_prompt(f, messages, shown, r);
    json_decref(functions);
    json_decref(messages);
    return !f->bad;
}
