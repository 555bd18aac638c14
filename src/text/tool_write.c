/* SPDX-License-Identifier: Apache-2.0 */
/* tool_write.c - calls and tools written in a form, for chat templates that write neither. */
#include <string.h>

#include "base/json.h"
#include "text/tool_form.h"

static void put_params(const kvd_json_texts *t, const json_t *args, kvd_buf *out)
{
    const char *name;
    json_t     *v;

    json_object_foreach((json_t *)args, name, v)
    {
        kvd_buf_printf(out, TOOL_PARAM_OPEN "%s>", name);
        if (json_is_string(v))
            kvd_buf_put(out, json_string_value(v), json_string_length(v));
        else
            kvd_json_put(t, v, out);
        kvd_buf_puts(out, TOOL_PARAM_CLOSE "\n");
    }
}

static void put_call(const tool_form *f, const kvd_json_texts *t, const json_t *function,
                     kvd_buf *out)
{
    const json_t *name = json_object_get(function, "name");
    const json_t *args = json_object_get(function, "arguments");

    switch (f->body) {
    case TOOL_OBJECT:
        kvd_buf_puts(out, "{\"name\": ");
        kvd_json_put(t, name, out);
        kvd_buf_printf(out, ", \"%s\": ", f->key);
        kvd_json_put(t, args, out);
        kvd_buf_putc(out, '}');
        break;
    case TOOL_NAMED:
        kvd_buf_printf(out, "%s%s", json_string_value(name), f->mid);
        kvd_json_put(t, args, out);
        break;
    case TOOL_PARAMS:
        kvd_buf_printf(out, TOOL_FUNCTION_OPEN "%s>\n", json_string_value(name));
        put_params(t, args, out);
        kvd_buf_puts(out, TOOL_FUNCTION_CLOSE);
        break;
    }
}

/* Numbers have their texts in t. */
static void put_calls(const tool_form *f, const kvd_json_texts *t, const json_t *calls,
                      kvd_buf *out)
{
    size_t  i;
    json_t *call;

    kvd_buf_printf(out, "%s%s", f->open, f->list);
    json_array_foreach(calls, i, call)
    {
        kvd_buf_printf(out, "%s%s", i ? f->next : "", f->begin);
        put_call(f, t, json_object_get(call, "function"), out);
        kvd_buf_puts(out, f->end);
    }
    kvd_buf_puts(out, f->close);
}

/* What was appended since `was` stays if there was memory for all of it. */
static kvd_status end(kvd_buf *out, size_t was, bool ok, kvd_err *err)
{
    if (ok && !out->oom)
        return KVD_OK;
    out->len = was;
    return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory to write them");
}

kvd_status tool_write_calls(kvd_tool_format form, const char *calls_json, kvd_buf *out,
                            kvd_err *err)
{
    const tool_form *f     = tool_form_get(form);
    kvd_json_texts   t     = { 0 };
    json_t          *calls = kvd_json_read(&t, calls_json, strlen(calls_json), KVD_JSON_NUL, NULL);
    const size_t     was   = out->len;
    const bool       ok    = calls != NULL;

    kvd_assert(f);
    if (ok)
        put_calls(f, &t, calls, out);
    json_decref(calls);
    kvd_json_texts_free(&t);
    return end(out, was, ok, err);
}

kvd_status tool_write_tools(kvd_tool_format form, const char *tools_json, kvd_buf *out,
                            kvd_err *err)
{
    const tool_form *f     = tool_form_get(form);
    kvd_json_texts   t     = { 0 };
    json_t          *tools = kvd_json_read(&t, tools_json, strlen(tools_json), KVD_JSON_NUL, NULL);
    json_t      *shown = json_pack("[{s:{s:s, s:{s:s}}}]", "function", "name", "NAME", "arguments",
                                   "PARAMETER", "VALUE");
    const size_t was   = out->len;
    const bool   ok    = tools && shown;
    json_t      *tool;
    size_t       i;

    kvd_assert(f);
    if (ok) {
        kvd_buf_puts(out, "# Tools\n\nYou may call these functions. Each line describes one, with "
                          "the JSON schema of its parameters:\n");
        json_array_foreach(tools, i, tool)
        {
            json_t *function = json_object_get(tool, "function");

            kvd_json_put(&t, function ? function : tool, out);
            kvd_buf_putc(out, '\n');
        }
        kvd_buf_puts(out, "\nTo call a function, write its name and arguments in this form, and "
                          "nothing behind it:\n");
        put_calls(f, &t, shown, out);
        kvd_buf_puts(out, "\nThe result comes in the next message. Answer in plain text when no "
                          "function is needed.");
    }
    json_decref(tools);
    json_decref(shown);
    kvd_json_texts_free(&t);
    return end(out, was, ok, err);
}
