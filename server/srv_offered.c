/* SPDX-License-Identifier: Apache-2.0 */
/* srv_offered.c - which tools of /v1/messages the model is offered: its clients defer some until
 * the conversation refers to them; and edits of the conversation that Anthropic's servers make. */
#include "srv_fields.h"

#include <string.h>

static bool is_type(const json_t *o, const char *type)
{
    const char *t = json_string_value(srv_get(o, "type"));

    return t && strcmp(t, type) == 0;
}

bool srv_is_tool_change(const json_t *block)
{
    return is_type(block, "tool_addition") || is_type(block, "tool_removal");
}

/* The last word on a tool counts.  true where there was memory for it. */
static bool note(srv_fields *f, const json_t *name, bool on)
{
    return !json_is_string(name) ||
           json_object_set_new(f->offered, json_string_value(name), json_boolean(on)) == 0;
}

static bool note_block(srv_fields *f, const json_t *block)
{
    const json_t *part, *content = srv_get(block, "content");
    size_t        i;
    bool          ok = true;

    if (srv_is_tool_change(block))
        return note(f, srv_get(srv_get(block, "tool"), "name"), is_type(block, "tool_addition"));
    json_array_foreach(content, i, part)
    {
        if (is_type(part, "tool_reference"))
            ok = note(f, srv_get(part, "tool_name"), true) && ok;
    }
    return ok;
}

bool srv_read_offers(srv_fields *f)
{
    const json_t *messages = srv_get(f->root, "messages"), *m, *block;
    size_t        i, k;
    bool          ok;

    f->offered = json_object();
    ok         = f->offered != NULL;
    json_array_foreach(messages, i, m)
    {
        json_array_foreach(srv_get(m, "content"), k, block)
        {
            ok = ok && note_block(f, block);
        }
    }
    return ok || srv_fields_full(f, "no memory for the tools");
}

/* Anthropic's own search would find deferred tools; it is left out, so all are offered then. */
static bool has_search(const srv_fields *f)
{
    const json_t *tools = srv_get(f->root, "tools"), *tool;
    size_t        i;

    json_array_foreach(tools, i, tool)
    {
        const char *type = json_string_value(srv_get(tool, "type"));

        if (type && strncmp(type, "tool_search_tool", strlen("tool_search_tool")) == 0)
            return true;
    }
    return false;
}

static bool is_offered(const srv_fields *f, const json_t *tool)
{
    const char   *name = json_string_value(srv_get(tool, "name"));
    const json_t *said = name ? json_object_get(f->offered, name) : NULL;

    return said ? json_is_true(said)
                : !json_is_true(srv_get(tool, "defer_loading")) || has_search(f);
}

/* Those that the client runs itself, by a schema that Anthropic's models know. */
static bool is_clients(const char *type)
{
    static const char *const names[] = { "bash_", "text_editor_", "computer_", "memory_",
                                         "browser_" };

    for (size_t i = 0; i < KVD_COUNTOF(names); i++)
        if (strncmp(type, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

bool srv_add_claude_tool(srv_fields *f, srv_request *r, json_t *list, const json_t *tool, size_t i)
{
    const json_t *word   = srv_get(tool, "type");
    const char   *type   = json_string_value(word), *forced;
    json_t       *schema = srv_get(tool, "input_schema"), *name = srv_get(tool, "name");

    (void)r;
    forced = json_string_value(srv_get(srv_get(f->root, "tool_choice"), "name"));
    if (type && strcmp(type, "custom") != 0 && !is_clients(type) &&
        !(forced && json_is_string(name) && strcmp(forced, json_string_value(name)) == 0)) {
        srv_leave_out(f, "tools", type);
        return true;
    }
    if (word && (!type || strcmp(type, "custom") != 0))
        return srv_fields_word(f, srv_at("tools[%zu].type", i).s, word, "custom: the client's own");
    if (!json_is_string(name))
        return srv_fields_bad(f, srv_at("tools[%zu].name", i).s, "expected a string");
    if (!json_is_object(schema))
        return srv_fields_bad(f, srv_at("tools[%zu].input_schema", i).s,
                              "expected a schema, an object");
    return !is_offered(f, tool) ||
           srv_add_function(f, list,
                            json_pack("{s:O, s:O*, s:O, s:O*}", "name", name, "description",
                                      srv_get(tool, "description"), "parameters", schema, "strict",
                                      srv_get(tool, "strict")));
}

json_t *srv_without_references(srv_fields *f, const json_t *parts)
{
    json_t *out = json_array(), *part;
    size_t  i;
    bool    ok = out != NULL;

    json_array_foreach(parts, i, part)
    {
        json_t *name = srv_get(part, "tool_name");

        if (is_type(part, "tool_reference") && json_is_string(name))
            part = json_pack("{s:s, s:s++}", "type", "text", "text", "tool ",
                             json_string_value(name), " can be called now");
        else
            json_incref(part);
        ok = ok && json_array_append_new(out, part) == 0;
    }
    if (!ok) {
        json_decref(out);
        srv_fields_full(f, "no memory for a tool's result");
        return NULL;
    }
    return out;
}

/* Assistant's turns that have thinking. */
static size_t n_thinking(const srv_fields *f)
{
    const json_t *messages = srv_get(f->root, "messages"), *m, *block;
    size_t        i, k, n = 0;

    json_array_foreach(messages, i, m)
    {
        bool has = false;

        json_array_foreach(srv_get(m, "content"), k, block)
        {
            has = has || is_type(block, "thinking") || is_type(block, "redacted_thinking");
        }
        n += has;
    }
    return n;
}

/* Thinking of older turns; how many it is kept of: "all", or a number, 1 if nothing is said. */
static bool drops_nothing(const srv_fields *f, const json_t *edit)
{
    const json_t *keep  = srv_get(edit, "keep");
    const json_t *value = srv_get(keep, "value");

    if (!is_type(edit, "clear_thinking_20251015"))
        return false;
    if (is_type(keep, "all") ||
        (json_is_string(keep) && strcmp(json_string_value(keep), "all") == 0))
        return true;
    return (size_t)(json_is_integer(value) && json_integer_value(value) > 0
                        ? json_integer_value(value)
                        : 1) >= n_thinking(f);
}

void srv_check_edits(srv_fields *f)
{
    const json_t *o     = srv_get_object(f, f->root, "context_management");
    const json_t *edits = srv_get(o, "edits"), *edit;
    size_t        i;

    if (edits && !json_is_array(edits))
        srv_fields_bad(f, "context_management.edits", "expected a list of edits");
    json_array_foreach(edits, i, edit)
    {
        if (!drops_nothing(f, edit))
            srv_fields_bad(f, srv_at("context_management.edits[%zu]", i).s,
                           "all messages count, and this would drop some: leave out of messages "
                           "what shall not");
    }
}
