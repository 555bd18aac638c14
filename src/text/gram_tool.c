/* SPDX-License-Identifier: Apache-2.0 */
/* gram_tool.c - grammars of tool calls: the texts of a form around names and arguments.
 *
 * Every function has a way of its own between the nodes before and behind a call, so the name that
 * was written decides which parameters follow.  With `auto`, any text may come up to the mark of a
 * call, and behind it only a call goes on.  Where calls need no mark (Llama 3), an answer that
 * begins with { is one. */
#include <string.h>

#include "text/gram_impl.h"
#include "text/tool_form.h"

typedef struct tools {
    gram_build      *b;
    const gram_desc *d;
    const tool_form *f;
    kvd_buf         *notes;
    uint32_t         key_name, key_args; /* rules */
    uint32_t         before, behind;     /* nodes around a call */
    json_t          *seen;
} tools;

static uint32_t key_rule(gram_build *b, const char *name)
{
    json_t *word = gram_own(b, json_string(name));

    return word ? gram_words(b, &word, 1) : 0;
}

static uint32_t white_node(gram_build *b)
{
    const uint32_t node = gram_node_new(b);

    if (b->st == KVD_OK)
        b->node[node].flags |= GRAM_WHITE;
    return node;
}

/* Nodes of a text of the form, without the white space at its ends. */
static uint32_t literal(gram_build *b, uint32_t from, const char *text)
{
    const tok_str t = tool_trim(text);

    return gram_literal(b, from, t.data, t.len);
}

/* , "id": nine letters and digits */
static void id_member(gram_build *b, uint32_t from, uint32_t to)
{
    json_t *schema =
        gram_own(b, json_pack("{s:s, s:s}", "type", "string", "pattern", "^[a-zA-Z0-9]{9}$"));
    uint32_t n[4];

    for (int i = 0; i < 4; i++)
        n[i] = white_node(b);
    gram_eps(b, from, n[0]);
    gram_byte(b, n[0], n[1], ',', ',', true);
    gram_call(b, n[1], n[2], key_rule(b, "id"));
    gram_byte(b, n[2], n[3], ':', ':', false);
    if (schema)
        gram_value(b, n[3], to, schema, NULL);
}

/* {"name": NAME, "arguments": PARAMETERS} */
static uint32_t call_rule(tools *t, json_t *name, json_t *parameters)
{
    gram_build    *b   = t->b;
    const uint32_t was = b->owner, rule = gram_rule_new(b, '{');
    uint32_t       n[9];

    b->owner = rule;
    for (int i = 0; i < 9; i++)
        n[i] = white_node(b);
    gram_call(b, n[0], n[1], t->key_name);
    gram_byte(b, n[1], n[2], ':', ':', false);
    gram_call(b, n[2], n[3], gram_words(b, &name, 1));
    gram_byte(b, n[3], n[4], ',', ',', true);
    gram_call(b, n[4], n[5], t->key_args);
    gram_byte(b, n[5], n[6], ':', ':', false);
    gram_value(b, n[6], n[7], parameters, NULL);
    gram_ret(b, n[7]);
    if (t->f->id) {
        id_member(b, n[7], n[8]);
        gram_ret(b, n[8]);
    }
    if (b->st == KVD_OK)
        b->rule[rule].start = n[0];
    gram_run_jobs(b);
    b->owner = was;
    return rule;
}

/* What a schema that cannot be applied has left behind. */
static void forget(gram_build *b, const gram_build *was)
{
    for (uint32_t i = was->n_job; i < b->n_job; i++)
        kvd_free(b->job[i].path);
    if (b->expanded.slot)
        memset(b->expanded.slot, 0, b->expanded.cap * sizeof(*b->expanded.slot));
    if (b->merged.slot)
        memset(b->merged.slot, 0, b->merged.cap * sizeof(*b->merged.slot));
    b->expanded.n = b->merged.n = 0;
    b->st                       = KVD_OK;
    b->n_node                   = was->n_node;
    b->n_edge                   = was->n_edge;
    b->n_rule                   = was->n_rule;
    b->n_feas                   = was->n_feas;
    b->n_job                    = was->n_job;
    b->n_done                   = was->n_done;
    b->owner                    = was->owner;
    b->nesting                  = 0;
    b->path[0]                  = 0;
}

/* The schema of a function's arguments (NULL: it has none): an object in any case. */
static json_t *parameters_of(gram_build *b, json_t *p)
{
    if (!p)
        return gram_own(b, json_pack("{s:s, s:{}}", "type", "object", "properties"));
    return gram_own(b, json_pack("{s:[O, {s:s}]}", "allOf", p, "type", "object"));
}

/* From `loose`, where white space may come, or `tight`, right behind a name, to a text of the form.
 */
static void behind_name(gram_build *b, uint32_t tight, uint32_t loose, const char *text,
                        uint32_t to)
{
    const tok_str t = tool_trim(text);

    gram_eps(b, gram_literal(b, loose, t.data, t.len), to);
    if (!tool_plain_name(t.data, 1)) /* else it would belong to the name */
        gram_eps(b, gram_literal(b, tight, t.data, t.len), to);
}

/* NAME, what may stand behind it, ARGUMENTS */
static void named_call(tools *t, uint32_t at, const char *name, json_t *schema)
{
    gram_build    *b     = t->b;
    const uint32_t tight = gram_literal(b, at, name, strlen(name)), args = white_node(b);
    uint32_t       loose = white_node(b);

    gram_byte(b, tight, loose, ' ', ' ', false);
    gram_byte(b, tight, loose, '\n', '\n', false);
    for (size_t i = 0; i < KVD_COUNTOF(t->f->skip) && t->f->skip[i]; i++) {
        const uint32_t next = white_node(b);

        gram_eps(b, loose, next);
        behind_name(b, tight, loose, t->f->skip[i], next);
        loose = next;
    }
    behind_name(b, tight, loose, t->f->mid, args);
    gram_value(b, args, t->behind, schema, NULL);
    gram_run_jobs(b);
}

/* <function=NAME> parameters </function> */
static void params_call(tools *t, uint32_t at, const char *name, json_t *parameters)
{
    gram_build    *b   = t->b;
    const uint32_t end = white_node(b);

    at = gram_literal(b, at, TOOL_FUNCTION_OPEN, strlen(TOOL_FUNCTION_OPEN));
    at = gram_literal(b, at, name, strlen(name));
    at = gram_literal(b, at, ">", 1);
    if (!gram_params(b, at, end, parameters))
        kvd_buf_printf(t->notes,
                       "%s%s: patterns, formats and lengths of texts are not applied in the "
                       "template's form of calls",
                       t->notes->len ? "\n" : "", b->what);
    gram_eps(b, literal(b, end, TOOL_FUNCTION_CLOSE), t->behind);
    gram_run_jobs(b);
}

/* A way of a function's calls from a new node on; its parameters are those of the schema, NULL:
 * any.
 */
static uint32_t function_way(tools *t, json_t *name, json_t *parameters)
{
    gram_build    *b    = t->b;
    const uint32_t from = gram_node_new(b);
    const char    *s    = json_string_value(name);

    if (t->f->body != TOOL_OBJECT && !tool_plain_name(s, json_string_length(name)))
        gram_refuse(b, "the name cannot be written in the template's form of calls");
    if (b->st != KVD_OK)
        return from;
    switch (t->f->body) {
    case TOOL_OBJECT:
        gram_call(b, from, t->behind, call_rule(t, name, parameters_of(b, parameters)));
        break;
    case TOOL_NAMED:
        named_call(t, from, s, parameters_of(b, parameters));
        break;
    case TOOL_PARAMS:
        params_call(t, from, s, parameters);
        break;
    }
    return from;
}

/* Adds a function; without "strict", with any object where its schema cannot be applied. */
static void add_function(tools *t, json_t *name, json_t *function)
{
    gram_build *b      = t->b;
    const bool  strict = json_is_true(json_object_get(function, "strict"));
    json_t     *schema = json_object_get(function, "parameters");
    kvd_err     first, *err = b->err;
    gram_build  was;
    uint32_t    way;

    b->root = schema;
    was     = *b;
    b->err  = strict ? err : &first;
    way     = function_way(t, name, json_is_null(schema) ? NULL : schema);
    b->err  = err;
    if (!strict && b->st == KVD_E_INVAL && b->steps <= GRAM_MAX_STEPS) {
        forget(b, &was);
        kvd_buf_printf(t->notes, "%s%s; its arguments are any object", t->notes->len ? "\n" : "",
                       first.msg);
        way = function_way(t, name, b->any);
    } else if (!strict && b->st != KVD_OK && err) {
        *err = first;
    }
    gram_eps(b, t->before, way);
    if (b->st == KVD_OK &&
        json_object_set_new(b->functions, json_string_value(name), json_integer(way)) != 0)
        gram_no_memory(b);
}

static void add_tool(tools *t, json_t *tool)
{
    gram_build *b        = t->b;
    json_t     *function = json_object_get(tool, "function");
    const char *type     = json_string_value(json_object_get(tool, "type"));
    json_t     *name;
    const char *s;
    char        what[128];

    if (!json_is_object(function))
        function = tool;
    name = json_object_get(function, "name");
    s    = json_string_value(name);
    if (!json_is_object(tool) || (type && strcmp(type, "function") != 0) || !s || !*s ||
        json_string_length(name) > 256) {
        gram_refuse(b, "every tool must be a function with a name of 1 to 256 bytes");
        return;
    }
    if (json_object_get(t->seen, s)) {
        gram_refuse(b, "two functions '%.60s'", s);
        return;
    }
    if (json_object_set(t->seen, s, name) != 0)
        gram_no_memory(b);
    if (t->d->tool_name && strcmp(t->d->tool_name, s) != 0)
        return;
    snprintf(what, sizeof(what), "tools: %.100s", s);
    b->what = what;
    add_function(t, name, function);
    b->what = "tools";
    b->root = NULL;
}

/* ---- what is around calls -----------------------------------------------------------------------
 */

/* From behind one call to before the next: at most `most` calls in all. */
static void next_call(tools *t, uint32_t from, uint32_t most)
{
    gram_build    *b    = t->b;
    const tok_str  next = tool_trim(t->f->next), begin = tool_trim(t->f->begin);
    const tok_str  first = next.len ? next : begin;
    const uint32_t gate = white_node(b), at = gram_node_new(b);
    uint32_t       end;

    if (b->st != KVD_OK)
        return;
    kvd_assert(first.len > 0 && most > 1);
    b->node[gate].max = most - 2;
    gram_eps(b, from, gate);
    gram_byte(b, gate, at, (uint8_t)first.data[0], (uint8_t)first.data[0], true);
    end = gram_literal(b, at, first.data + 1, first.len - 1);
    if (next.len && begin.len) {
        const uint32_t white = white_node(b);

        gram_eps(b, end, white);
        end = gram_literal(b, white, begin.data, begin.len);
    }
    gram_eps(b, end, t->before);
}

/* Behind a call: its end, then that of all calls, or another one. */
static void after_call(tools *t)
{
    gram_build    *b    = t->b;
    const uint32_t most = t->d->max_calls ? t->d->max_calls : TOOL_CALLS_MAX;
    const bool     one  = t->d->single_call || t->d->tool_name || t->f->single || most == 1;
    const uint32_t end  = literal(b, t->behind, t->f->end);
    uint32_t       shut = end;

    if (b->st != KVD_OK)
        return;
    if (*t->f->close) {
        const uint32_t white = white_node(b);

        gram_eps(b, end, white);
        shut = literal(b, white, t->f->close);
    }
    if (b->st != KVD_OK)
        return;
    b->node[shut].flags |= GRAM_ACCEPT;
    if (one)
        return;
    b->node[shut].flags |= GRAM_WHITE;
    next_call(t, end, most);
}

/* From behind the mark that opens the calls to before the first. */
static uint32_t open_calls(tools *t)
{
    gram_build    *b    = t->b;
    const uint32_t at   = white_node(b);
    uint32_t       next = at;

    if (*t->f->open && *t->f->list) {
        next = white_node(b);
        gram_eps(b, literal(b, at, t->f->list), next);
    }
    if (*t->f->open)
        next = literal(b, next, t->f->begin);
    gram_eps(b, next, t->before);
    return at;
}

/* What the prompt ends with of the head of the answer; "": nothing. */
static const char *seen_head(const tools *t)
{
    const think_form *f = think_form_get(t->d->reasoning);

    return f && f->anywhere && t->d->state != KVD_REASONING_CANNOT &&
                   strncmp(t->f->also, f->behind, strlen(f->behind)) == 0
               ? f->behind
               : "";
}

/* A call that goes on with the head that the prompt has begun. */
static void in_head(tools *t, uint32_t start)
{
    const size_t   n  = strlen(seen_head(t));
    const uint32_t at = white_node(t->b);

    if (n == 0)
        return;
    gram_eps(t->b, start, at);
    gram_eps(t->b, literal(t->b, at, t->f->also + n), t->before);
}

static void around(tools *t, uint32_t start)
{
    gram_build    *b       = t->b;
    const tok_str  mark[2] = { tool_trim(*t->f->open ? t->f->open : t->f->begin),
                               tool_trim(t->f->also) };
    const uint32_t to[2]   = { open_calls(t), t->before };

    after_call(t);
    if (t->f->bare)
        gram_eps(b, start, t->before);
    if (b->st != KVD_OK)
        return;
    if (t->d->choice == KVD_TOOL_CHOICE_AUTO) {
        gram_until(b, start, mark, to, mark[1].len ? 2 : 1, GRAM_TEXT | GRAM_ACCEPT,
                   t->f->bare ? "{ \t\n\r" : NULL, seen_head(t));
        if (b->st == KVD_OK && t->f->bare)
            b->node[start].flags |= GRAM_WHITE;
        return;
    }
    in_head(t, start);
    b->node[start].flags |= GRAM_WHITE;
    gram_eps(b, gram_literal(b, start, mark[0].data, mark[0].len), to[0]);
}

void gram_tools(gram_build *b, uint32_t start, const gram_desc *d, kvd_buf *notes)
{
    tools   t = { .b = b, .d = d, .f = tool_form_get(d->format), .notes = notes };
    json_t *list, *tool;
    size_t  i;

    b->what = "tools";
    if (!t.f) {
        gram_refuse(b, "the model's chat template has no form of tool calls that is known");
        return;
    }
    list         = gram_own(b, gram_read_json(b, d->tools_json, strlen(d->tools_json)));
    t.seen       = gram_own(b, json_object());
    b->functions = gram_own(b, json_object());
    t.before     = white_node(b);
    t.behind     = *t.f->end ? white_node(b) : gram_node_new(b);
    t.key_name   = key_rule(b, "name");
    t.key_args   = t.f->key ? key_rule(b, t.f->key) : 0;
    if (!json_array_size(list)) {
        gram_refuse(b, "must be a list of functions");
        return;
    }
    json_array_foreach(list, i, tool)
    {
        if (b->st == KVD_OK)
            add_tool(&t, tool);
    }
    if (b->st == KVD_OK && d->tool_name && !json_object_get(t.seen, d->tool_name))
        gram_refuse(b, "there is no function '%.60s'", d->tool_name);
    b->path[0] = 0;
    if (b->st == KVD_OK)
        around(&t, start);
    if (notes->oom)
        gram_no_memory(b);
}
