/* SPDX-License-Identifier: Apache-2.0 */
/* tool_write.c - calls and tools written in a form, for chat templates that write neither. */
#include <string.h>

#include "text/tool_form.h"

static kvd_status full(kvd_err *err)
{
    return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory to write them");
}

static int put_bytes(const char *text, size_t len, void *out)
{
    kvd_buf_put(out, text, len);
    return 0;
}

static void put_json(const json_t *v, kvd_buf *out)
{
    if (json_dump_callback(v, put_bytes, out, JSON_ENCODE_ANY | JSON_PRESERVE_ORDER) != 0)
        out->oom = true;
}

static void put_params(const json_t *args, kvd_buf *out)
{
    const char *name;
    json_t     *v;

    json_object_foreach((json_t *)args, name, v)
    {
        kvd_buf_printf(out, TOOL_PARAM_OPEN "%s>", name);
        if (json_is_string(v))
            kvd_buf_put(out, json_string_value(v), json_string_length(v));
        else
            put_json(v, out);
        kvd_buf_puts(out, TOOL_PARAM_CLOSE "\n");
    }
}

static void put_call(const tool_form *f, const json_t *function, kvd_buf *out)
{
    const json_t *name = json_object_get(function, "name");
    const json_t *args = json_object_get(function, "arguments");

    switch (f->body) {
    case TOOL_OBJECT:
        kvd_buf_puts(out, "{\"name\": ");
        put_json(name, out);
        kvd_buf_printf(out, ", \"%s\": ", f->key);
        put_json(args, out);
        kvd_buf_putc(out, '}');
        break;
    case TOOL_NAMED:
        kvd_buf_printf(out, "%s%s", json_string_value(name), f->mid);
        put_json(args, out);
        break;
    case TOOL_PARAMS:
        kvd_buf_printf(out, TOOL_FUNCTION_OPEN "%s>\n", json_string_value(name));
        put_params(args, out);
        kvd_buf_puts(out, TOOL_FUNCTION_CLOSE);
        break;
    }
}

static void put_calls(const tool_form *f, const json_t *calls, kvd_buf *out)
{
    size_t  i;
    json_t *call;

    kvd_buf_printf(out, "%s%s", f->open, f->list);
    json_array_foreach(calls, i, call)
    {
        kvd_buf_printf(out, "%s%s", i ? f->next : "", f->begin);
        put_call(f, json_object_get(call, "function"), out);
        kvd_buf_puts(out, f->end);
    }
    kvd_buf_puts(out, f->close);
}

kvd_status tool_write_calls(kvd_tool_format form, const char *calls_json, kvd_buf *out,
                            kvd_err *err)
{
    const tool_form *f     = tool_form_get(form);
    json_t          *calls = json_loads(calls_json, 0, NULL);
    const size_t     was   = out->len;

    kvd_assert(f);
    if (!calls)
        return full(err);
    put_calls(f, calls, out);
    json_decref(calls);
    if (!out->oom)
        return KVD_OK;
    out->len = was;
    return full(err);
}

kvd_status tool_write_tools(kvd_tool_format form, const char *tools_json, kvd_buf *out,
                            kvd_err *err)
{
    const tool_form *f     = tool_form_get(form);
    json_t          *tools = json_loads(tools_json, 0, NULL), *tool;
    json_t      *shown = json_pack("[{s:{s:s, s:{s:s}}}]", "function", "name", "NAME", "arguments",
                                   "PARAMETER", "VALUE");
    const size_t was   = out->len;
    size_t       i;

    kvd_assert(f);
    if (tools && shown) {
        kvd_buf_puts(out, "# Tools\n\nYou may call these functions. Each line describes one, with "
                          "the JSON schema of its parameters:\n");
        json_array_foreach(tools, i, tool)
        {
            put_json(json_object_get(tool, "function"), out);
            kvd_buf_putc(out, '\n');
        }
        kvd_buf_puts(out, "\nTo call a function, write its name and arguments in this form, and "
                          "nothing behind it:\n");
        put_calls(f, shown, out);
        kvd_buf_puts(out, "\nThe result comes in the next message. Answer in plain text when no "
                          "function is needed.");
    }
    if (!tools || !shown)
        out->oom = true;
    json_decref(tools);
    json_decref(shown);
    if (!out->oom)
        return KVD_OK;
    out->len = was;
    return full(err);
}
