/* SPDX-License-Identifier: Apache-2.0 */
/* srv_tools.c - functions that a model may call: checked, shown to the template, and made a grammar
 * of the answer, so that a call names one of them with arguments that fit.  Shapes bring theirs to
 * the form of OpenAI's chats. */
#include "srv_fields.h"

#include <string.h>

#define TOOLS_MAX 1024u

static const json_t *function_of(const json_t *tool)
{
    return srv_get(tool, "function");
}

static bool check_tool(srv_fields *f, size_t i, const json_t *tool)
{
    const json_t *word = srv_get(tool, "type");
    const char   *type = json_string_value(word);

    if (!json_is_object(tool))
        return srv_fields_bad(f, srv_at("tools[%zu]", i).s, "expected an object");
    if (!type || strcmp(type, "function") != 0)
        return srv_fields_word(f, srv_at("tools[%zu].type", i).s, word, "function");
    if (!json_is_object(function_of(tool)))
        return srv_fields_bad(f, srv_at("tools[%zu].function", i).s, "expected an object");
    return true;
}

static bool check_tools(srv_fields *f, const srv_tools *t)
{
    bool    found = t->name == NULL;
    json_t *tool;
    size_t  i;

    if (!json_is_array(t->list) || json_array_size(t->list) > TOOLS_MAX)
        return srv_fields_bad(f, "tools", "expected a list of at most %u tools", TOOLS_MAX);
    json_array_foreach(t->list, i, tool)
    {
        const char *name;

        if (!check_tool(f, i, tool))
            return false;
        name  = json_string_value(srv_get(function_of(tool), "name"));
        found = found || (name && strcmp(name, t->name) == 0);
    }
    if (!found)
        return srv_fields_bad(f, "tool_choice", "there is no tool \"%.64s\"", t->name);
    return true;
}

const json_t *srv_use_tools(srv_fields *f, const srv_tools *t, srv_request *r)
{
    kvd_grammar_params p    = KVD_GRAMMAR_PARAMS_INIT;
    kvd_buf            text = { 0 };

    if (f->bad || (t->list && !check_tools(f, t)))
        return NULL;
    if (json_array_size(t->list) == 0) {
        if (t->choice == SRV_CHOICE_CALL)
            srv_fields_bad(f, "tool_choice", "only with tools");
        return NULL;
    }
    if (t->choice == SRV_CHOICE_NONE)
        return NULL;
    if (f->grammar_field) {
        srv_fields_bad(f, f->format, "not together with tools that may be called");
        return NULL;
    }
    p.tool_choice = t->choice == SRV_CHOICE_CALL ? KVD_TOOL_CHOICE_REQUIRED : KVD_TOOL_CHOICE_AUTO;
    p.tool_name   = t->name;
    p.single_call = t->single;
    p.tool_format = f->s->tmpl.form;
    if (srv_put_json(f, t->list, &text)) {
        r->tools      = p.tool_format;
        r->tools_json = kvd_strndup(text.data, text.len);
        p.tools_json  = text.data;
        srv_want_grammar(f, "tools", &p, &text);
    }
    kvd_buf_free(&text);
    if (!f->bad && !r->tools_json)
        srv_fields_full(f, "no memory for the tools");
    return f->bad ? NULL : t->list;
}

void srv_get_choice(srv_fields *f, const json_t *word, srv_choice *out)
{
    static const char *const words[] = {
        [SRV_CHOICE_AUTO] = "auto", [SRV_CHOICE_NONE] = "none", [SRV_CHOICE_CALL] = "required"
    };
    const char *s = json_string_value(word);

    for (uint32_t i = 0; s && i < KVD_COUNTOF(words); i++) {
        if (strcmp(s, words[i]) == 0) {
            *out = (srv_choice)i;
            return;
        }
    }
    if (s)
        srv_fields_word(f, "tool_choice", word, "none, auto, required or a function");
    else
        srv_fields_bad(f, "tool_choice", "expected none, auto, required or a function");
}

const json_t *srv_get_tools(srv_fields *f, srv_request *r)
{
    const json_t *choice = srv_get(f->root, "tool_choice");
    srv_tools     t      = { .list = srv_get(f->root, "tools") };
    bool          many   = true;

    srv_get_bool(f, f->root, "parallel_tool_calls", &many);
    t.single = !many;
    t.name   = json_string_value(srv_get(srv_get(choice, "function"), "name"));
    if (t.name)
        t.choice = SRV_CHOICE_CALL;
    else if (choice)
        srv_get_choice(f, choice, &t.choice);
    return srv_use_tools(f, &t, r);
}
