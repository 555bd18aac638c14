/* SPDX-License-Identifier: Apache-2.0 */
/* tool_form.c - the forms of tool calls and of reasoning; which of them a chat template has; and
 * calls and descriptions of tools written in a form, for templates that write neither. */
#include "text/tool_form.h"

#include <string.h>

/* DeepSeek's marks are made of U+FF5C and U+2581. */
#define BAR      "\xef\xbd\x9c"
#define LOW      "\xe2\x96\x81"
#define DS(word) "<" BAR word BAR ">"

static const tool_form forms[] = {
    [KVD_TOOLS_HERMES]   = { .body  = TOOL_OBJECT,
                             .open  = "",
                             .list  = "",
                             .begin = "<tool_call>\n",
                             .also  = "",
                             .key   = "arguments",
                             .end   = "\n</tool_call>",
                             .next  = "\n",
                             .close = "" },
    [KVD_TOOLS_LLAMA3]   = { .body  = TOOL_OBJECT,
                             .open  = "<|python_tag|>",
                             .list  = "",
                             .begin = "",
                             .also  = "",
                             .key   = "parameters",
                             .end   = "",
                             .next  = "; ",
                             .close = "",
                             .bare  = true },
    [KVD_TOOLS_PHI4]     = { .body  = TOOL_OBJECT,
                             .open  = "",
                             .list  = "",
                             .begin = "<|tool_call|>",
                             .also  = "",
                             .key   = "arguments",
                             .end   = "<|/tool_call|>",
                             .next  = "",
                             .close = "" },
    [KVD_TOOLS_GRANITE]  = { .body  = TOOL_OBJECT,
                             .open  = "<|tool_call|>",
                             .list  = "[",
                             .begin = "",
                             .also  = "",
                             .key   = "arguments",
                             .end   = "",
                             .next  = ", ",
                             .close = "]" },
    [KVD_TOOLS_MISTRAL]  = { .body  = TOOL_OBJECT,
                             .open  = "[TOOL_CALLS]",
                             .list  = "[",
                             .begin = "",
                             .also  = "",
                             .key   = "arguments",
                             .end   = "",
                             .next  = ", ",
                             .close = "]",
                             .id    = true },
    [KVD_TOOLS_DEEPSEEK] = { .body = TOOL_NAMED,
                             .open = DS("tool" LOW "calls" LOW "begin"),
                             .list = "",
                             .begin =
                                 DS("tool" LOW "call" LOW "begin") "function" DS("tool" LOW "sep"),
                             .also  = "",
                             .mid   = "\n```json\n",
                             .end   = "\n```" DS("tool" LOW "call" LOW "end"),
                             .next  = "\n",
                             .close = DS("tool" LOW "calls" LOW "end") },
    [KVD_TOOLS_HARMONY]  = { .body   = TOOL_NAMED,
                             .open   = "",
                             .list   = "",
                             .begin  = "<|channel|>commentary to=functions.",
                             .also   = "<|start|>assistant to=functions.",
                             .mid    = "<|message|>",
                             .skip   = { "<|channel|>commentary", "<|constrain|>", "json" },
                             .end    = "",
                             .next   = "",
                             .close  = "",
                             .single = true },
    [KVD_TOOLS_SEED]     = { .body  = TOOL_PARAMS,
                             .open  = "",
                             .list  = "",
                             .begin = "<seed:tool_call>\n",
                             .also  = "",
                             .end   = "\n</seed:tool_call>",
                             .next  = "\n",
                             .close = "" },
    [KVD_TOOLS_QWEN_XML] = { .body  = TOOL_PARAMS,
                             .open  = "",
                             .list  = "",
                             .begin = "<tool_call>\n",
                             .also  = "",
                             .end   = "\n</tool_call>",
                             .next  = "\n",
                             .close = "" }
};

static const think_form thinks[] = {
    [KVD_REASONING_THINK] = { .open = "<think>", .close = "</think>", .behind = "", .answer = "" },
    [KVD_REASONING_SEED]  = { .open   = "<seed:think>",
                              .close  = "</seed:think>",
                              .behind = "",
                              .answer = "" },
    [KVD_REASONING_HARMONY] = { .open     = "<|channel|>analysis<|message|>",
                                .close    = "<|end|>",
                                .behind   = "<|start|>assistant",
                                .answer   = "<|channel|>final<|message|>",
                                .drop     = { "<|start|>assistant", "<|channel|>final<|message|>",
                                              "<|channel|>commentary<|message|>", "<|end|>" },
                                .anywhere = true }
};

const tool_form *tool_form_get(kvd_tool_format f)
{
    return f > KVD_TOOLS_NONE && (size_t)f < KVD_COUNTOF(forms) ? &forms[f] : NULL;
}

const think_form *think_form_get(kvd_reasoning r)
{
    return r > KVD_REASONING_NONE && (size_t)r < KVD_COUNTOF(thinks) ? &thinks[r] : NULL;
}

tok_str tool_trim(const char *s)
{
    size_t len;

    s += strspn(s, " \n");
    for (len = strlen(s); len && (s[len - 1] == ' ' || s[len - 1] == '\n');)
        len--;
    return (tok_str){ .data = s, .len = len };
}

bool tool_plain_name(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!s[i] ||
            !strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-", s[i]))
            return false;
    return len > 0 && len <= TOOL_NAME_MAX;
}

/* ---- which form a template has ---------------------------------------------------------------
 */

static bool holds(const char *s, size_t len, const char *what)
{
    const size_t n   = strlen(what);
    const char  *end = s + len, *at = s;

    while ((size_t)(end - at) >= n && (at = memchr(at, what[0], (size_t)(end - at))) != NULL) {
        if ((size_t)(end - at) < n)
            return false;
        if (memcmp(at, what, n) == 0)
            return true;
        at++;
    }
    return false;
}

/* The words that tell a form, in the order in which the rows are tried. */
static const struct {
    kvd_tool_format form;
    const char     *all[4], *none;
} told_by[] = {
    { KVD_TOOLS_SEED, { "<seed:tool_call>", "<function=", "<parameter=" }, NULL },
    { KVD_TOOLS_QWEN_XML, { "<tool_call>", "<function=", "<parameter=" }, NULL },
    { KVD_TOOLS_HERMES, { "<tool_call>", "\"name\"", "\"arguments\"" }, "<function=" },
    { KVD_TOOLS_LLAMA3, { "<|python_tag|>", "\"name\"", "\"parameters\"" }, NULL },
    { KVD_TOOLS_LLAMA3, { "ipython", "\"name\"", "\"parameters\"" }, NULL },
    { KVD_TOOLS_HARMONY, { "<|channel|>commentary", "<|message|>", "functions." }, NULL },
    { KVD_TOOLS_DEEPSEEK, { DS("tool" LOW "calls" LOW "begin"), "```json" }, NULL },
    { KVD_TOOLS_PHI4, { "<|tool_call|>", "<|/tool_call|>" }, NULL },
    { KVD_TOOLS_GRANITE, { "<|tool_call|>", "<|start_of_role|>" }, NULL },
    { KVD_TOOLS_MISTRAL, { "[TOOL_CALLS][", "[TOOL_RESULTS]" }, NULL },
};

kvd_tool_format tool_format_of(const char *s, size_t len)
{
    for (size_t i = 0; s && i < KVD_COUNTOF(told_by); i++) {
        bool all = !told_by[i].none || !holds(s, len, told_by[i].none);

        for (size_t k = 0; k < KVD_COUNTOF(told_by[i].all) && told_by[i].all[k]; k++)
            all = all && holds(s, len, told_by[i].all[k]);
        if (all)
            return told_by[i].form;
    }
    return KVD_TOOLS_NONE;
}

kvd_reasoning tool_reasoning_of(const char *s, size_t len)
{
    static const struct {
        kvd_reasoning form;
        const char   *word;
    } word[] = { { KVD_REASONING_SEED, "</seed:think>" },
                 { KVD_REASONING_HARMONY, "<|channel|>analysis" },
                 { KVD_REASONING_THINK, "</think>" } };

    for (size_t i = 0; s && i < KVD_COUNTOF(word); i++)
        if (holds(s, len, word[i].word))
            return word[i].form;
    return KVD_REASONING_NONE;
}

/* ---- marks ---------------------------------------------------------------------------------- */

static bool in_text(const char *row, const char *s)
{
    return row && strstr(row, s) != NULL;
}

static bool in_list(const char *const *row, size_t n, const char *s)
{
    for (size_t i = 0; i < n; i++)
        if (in_text(row[i], s))
            return true;
    return false;
}

static bool in_forms(const char *s)
{
    for (size_t i = 1; i < KVD_COUNTOF(forms); i++) {
        const tool_form  *f       = &forms[i];
        const char *const texts[] = { f->open, f->begin, f->also, f->mid, f->end, f->close };

        if (in_list(texts, KVD_COUNTOF(texts), s) || in_list(f->skip, KVD_COUNTOF(f->skip), s))
            return true;
    }
    for (size_t i = 1; i < KVD_COUNTOF(thinks); i++) {
        const think_form *t       = &thinks[i];
        const char *const texts[] = { t->open, t->close, t->behind, t->answer };

        if (in_list(texts, KVD_COUNTOF(texts), s) || in_list(t->drop, KVD_COUNTOF(t->drop), s))
            return true;
    }
    return false;
}

bool tool_is_mark(const tok *t, int32_t id)
{
    char        text[TOOL_MARK_MAX];
    size_t      len;
    const char *s = tok_bytes(t, id, &len);

    if (!tok_is_special(t, id) || tok_is_end(t, id) || len < 3 || len >= sizeof(text) ||
        (s[0] != '<' && s[0] != '['))
        return false;
    memcpy(text, s, len);
    text[len] = 0;
    return in_forms(text);
}

kvd_reasoning_state tool_reasoning_state(kvd_reasoning r, const char *prompt, size_t len)
{
    const think_form *f = think_form_get(r);
    size_t            n;

    if (!f)
        return KVD_REASONING_CANNOT;
    while (len && strchr(" \n\t\r", prompt[len - 1]) && prompt[len - 1])
        len--;
    n = strlen(f->open);
    if (len >= n && memcmp(prompt + len - n, f->open, n) == 0)
        return KVD_REASONING_OPEN;
    n = strlen(f->close);
    if (!f->anywhere && len >= n && memcmp(prompt + len - n, f->close, n) == 0)
        return KVD_REASONING_CANNOT;
    return KVD_REASONING_MAY;
}

const char *tool_reasoning_text(kvd_reasoning r, tool_reasoning_part part)
{
    const think_form *f = think_form_get(r);

    if (!f)
        return "";
    return part == TOOL_REASONING_BEGIN    ? f->open
           : part == TOOL_REASONING_END    ? f->close
           : part == TOOL_REASONING_BEHIND ? f->behind
                                           : f->answer;
}

/* ---- schemas of parameters ----------------------------------------------------------------------
 */

#define TEXT_NESTING 8 /* of anyOf in each other that tool_takes_text() looks at */

static bool is_word(const json_t *v, const char *word)
{
    return json_is_string(v) && strcmp(json_string_value(v), word) == 0;
}

static bool takes_text(const json_t *schema, int depth)
{
    static const char *const lists[] = { "anyOf", "oneOf" };
    const json_t            *type    = json_object_get(schema, "type"), *v;
    size_t                   i;

    if (is_word(type, "string"))
        return true;
    json_array_foreach(type, i, v)
    {
        if (is_word(v, "string"))
            return true;
    }
    json_array_foreach(json_object_get(schema, "enum"), i, v)
    {
        if (!type && json_is_string(v))
            return true;
    }
    for (size_t k = 0; !type && depth < TEXT_NESTING && k < KVD_COUNTOF(lists); k++)
        json_array_foreach(json_object_get(schema, lists[k]), i, v)
        {
            if (takes_text(v, depth + 1))
                return true;
        }
    return !type && json_is_string(json_object_get(schema, "const"));
}

bool tool_takes_text(const json_t *schema)
{
    return takes_text(schema, 0);
}

const json_t *tool_param_schema(const json_t *parameters, const char *name, size_t len)
{
    return json_object_getn(json_object_get(parameters, "properties"), name, len);
}
