/* SPDX-License-Identifier: Apache-2.0 */
/* gram_tool.c - grammars of tool calls: marks and text around {"name": .., "arguments": {..}}.
 *
 * Every function is a rule of its own, so the name that was written decides which parameters
 * follow. With `auto`, text is an automaton, too: it looks for the opening mark as Knuth, Morris
 * and Pratt do, and behind it only a call goes on.  Where calls have no mark of their own (Llama
 * 3), an answer that begins with { is one. */
#include <string.h>

#include "text/gram_impl.h"

typedef struct tools {
    gram_build      *b;
    const gram_desc *d;
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

/* {"name": NAME, "arguments": PARAMETERS} */
static uint32_t call_rule(tools *t, json_t *name, json_t *parameters)
{
    gram_build    *b   = t->b;
    const uint32_t was = b->owner, rule = gram_rule_new(b, '{');
    uint32_t       n[8];

    b->owner = rule;
    for (int i = 0; i < 8; i++)
        n[i] = white_node(b);
    gram_call(b, n[0], n[1], t->key_name);
    gram_byte(b, n[1], n[2], ':', ':', false);
    gram_call(b, n[2], n[3], gram_words(b, &name, 1));
    gram_byte(b, n[3], n[4], ',', ',', true);
    gram_call(b, n[4], n[5], t->key_args);
    gram_byte(b, n[5], n[6], ':', ':', false);
    gram_value(b, n[6], n[7], parameters, NULL);
    gram_ret(b, n[7]);
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

/* The schema of a function's arguments: an object in any case. */
static json_t *parameters_of(gram_build *b, json_t *function)
{
    json_t *p = json_object_get(function, "parameters");

    if (!p || json_is_null(p))
        return gram_own(b, json_pack("{s:s, s:{}}", "type", "object", "properties"));
    return gram_own(b, json_pack("{s:[O, {s:s}]}", "allOf", p, "type", "object"));
}

/* Adds the edge that calls a function; without "strict", any object where its schema cannot be
 * applied. */
static void add_function(tools *t, json_t *name, json_t *function)
{
    gram_build *b      = t->b;
    const bool  strict = json_is_true(json_object_get(function, "strict"));
    json_t     *schema = parameters_of(b, function);
    kvd_err     first, *err = b->err;
    gram_build  was;
    uint32_t    rule;

    if (!schema)
        return;
    b->root = json_object_get(function, "parameters");
    was     = *b;
    b->err  = strict ? err : &first;
    rule    = call_rule(t, name, schema);
    b->err  = err;
    if (!strict && b->st == KVD_E_INVAL && b->steps <= GRAM_MAX_STEPS) {
        forget(b, &was);
        kvd_buf_printf(t->notes, "%s%s; its arguments are any object", t->notes->len ? "\n" : "",
                       first.msg);
        schema = gram_own(b, json_pack("{s:s}", "type", "object"));
        rule   = call_rule(t, name, schema);
    } else if (!strict && b->st != KVD_OK && err) {
        *err = first;
    }
    gram_call(b, t->before, t->behind, rule);
    if (b->st == KVD_OK &&
        json_object_set_new(b->functions, json_string_value(name), json_integer(rule)) != 0)
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

/* ---- text around calls -------------------------------------------------------------------------
 */

/* How much of mark has been seen once byte follows seen bytes of it. */
static size_t matched(const char *mark, size_t seen, char byte)
{
    char   text[32];
    size_t n = seen + 1;

    memcpy(text, mark, seen);
    text[seen] = byte;
    while (n && memcmp(mark, text + (seen + 1 - n), n) != 0)
        n--;
    return n;
}

/* Edges of the bytes of free text from a node at which `seen` bytes of mark have come. */
static void text_edges(gram_build *b, uint32_t from, size_t seen, const char *mark,
                       const uint32_t *node, bool first)
{
    const size_t len = strlen(mark);
    size_t       lo = 0, to = 0;

    for (size_t c = 0; c <= 256; c++) {
        const bool   out  = first && c < 256 && strchr("{ \t\n\r", (int)c) && c;
        const size_t next = c == 256 ? SIZE_MAX : out ? SIZE_MAX - 1 : matched(mark, seen, (char)c);

        if (c && next != to) {
            if (to <= len)
                gram_byte(b, from, node[to], (uint8_t)lo, (uint8_t)(c - 1), false);
            lo = c;
        }
        to = next;
    }
}

/* Free text up to a mark, behind which node[len] is. */
static void free_text(tools *t, uint32_t start, const char *mark)
{
    gram_build  *b    = t->b;
    const size_t len  = strlen(mark);
    const bool   bare = t->d->format == KVD_TOOLS_LLAMA3; /* a call needs no mark */
    uint32_t     node[32];

    kvd_assert(len < KVD_COUNTOF(node));
    for (size_t k = 0; k < len; k++)
        node[k] = gram_node_new(b);
    node[len] = t->before;
    if (b->st != KVD_OK)
        return;
    for (size_t k = 0; k < len; k++) {
        b->node[node[k]].flags |= GRAM_TEXT | GRAM_ACCEPT;
        text_edges(b, node[k], k, mark, node, false);
    }
    if (!bare) {
        gram_eps(b, start, node[0]);
        return;
    }
    b->node[start].flags |= GRAM_TEXT | GRAM_ACCEPT | GRAM_WHITE;
    text_edges(b, start, 0, mark, node, true);
    for (uint32_t i = b->node[t->before].edge; i != GRAM_NONE && b->st == KVD_OK;
         i          = b->edge[i].next)
        if (b->edge[i].kind == GRAM_CALL)
            gram_call(b, start, b->edge[i].to, b->edge[i].rule);
}

static void around(tools *t, uint32_t start)
{
    gram_build *b      = t->b;
    const char *open   = tool_open_mark(t->d->format);
    const char *close  = tool_close_mark(t->d->format);
    const bool  hermes = t->d->format == KVD_TOOLS_HERMES;
    uint32_t    end, again;

    end = gram_literal(b, t->behind, close, strlen(close));
    if (b->st != KVD_OK)
        return;
    b->node[end].flags |= GRAM_ACCEPT;
    if (!t->d->single_call) {
        b->node[end].flags |= GRAM_WHITE;
        again = gram_literal(b, end, hermes ? open : ";", hermes ? strlen(open) : 1);
        gram_eps(b, again, t->before);
    }
    if (t->d->choice == KVD_TOOL_CHOICE_AUTO) {
        free_text(t, start, open);
        return;
    }
    b->node[start].flags |= GRAM_WHITE;
    gram_eps(b, gram_literal(b, start, open, strlen(open)), t->before);
    if (!hermes)
        gram_eps(b, start, t->before);
}

void gram_tools(gram_build *b, uint32_t start, const gram_desc *d, kvd_buf *notes)
{
    tools   t = { .b = b, .d = d, .notes = notes };
    json_t *list, *tool;
    size_t  i;

    b->what = "tools";
    if (d->format == KVD_TOOLS_NONE) {
        gram_refuse(b, "the model's chat template has no form of tool calls that is known");
        return;
    }
    list         = gram_own(b, gram_read_json(b, d->tools_json, strlen(d->tools_json)));
    t.seen       = gram_own(b, json_object());
    b->functions = gram_own(b, json_object());
    t.before     = white_node(b);
    t.behind     = d->format == KVD_TOOLS_HERMES ? white_node(b) : gram_node_new(b);
    t.key_name   = key_rule(b, "name");
    t.key_args   = key_rule(b, d->format == KVD_TOOLS_HERMES ? "arguments" : "parameters");
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
