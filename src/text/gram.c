/* SPDX-License-Identifier: Apache-2.0 */
/* gram.c - a description to a grammar: writes the rules, then finds for every node how many frames
 * the way to its rule's end takes, so that the running automaton never enters what it cannot leave.
 *
 * Those numbers are found level by level: on level h, all nodes from which the end can be reached
 * by rules of height h or less.  Each node is settled once, each edge looked at twice. */
#include <string.h>

#include "text/gram_impl.h"

/* ---- writing ------------------------------------------------------------------------------ */

static void build_open(gram_build *b, kvd_err *err)
{
    uint32_t from, to;

    *b = (gram_build){ .err = err, .what = "schema", .made = json_array() };
    if (!b->made)
        gram_no_memory(b);
    b->any  = gram_own(b, json_object());
    b->none = json_false();
    (void)gram_rule_new(b, 0); /* rule 0: the text itself */
    b->free_string = gram_plain_string(b, 0, GRAM_NONE);
    from           = gram_node_new(b);
    to             = gram_node_new(b);
    if (b->st == KVD_OK)
        gram_value(b, from, to, b->any, NULL); /* the rules that all schemas share */
    gram_run_jobs(b);
    b->owner = 0;
}

static void write_schema(gram_build *b, uint32_t start, const gram_desc *d)
{
    json_t  *schema = d->json_object ? json_pack("{s:s}", "type", "object")
                                     : gram_read_json(b, d->schema_json, strlen(d->schema_json));
    uint32_t end    = gram_node_new(b);

    if (!gram_own(b, schema))
        return;
    b->root = schema;
    b->node[start].flags |= GRAM_WHITE;
    b->node[end].flags |= GRAM_ACCEPT;
    gram_value(b, start, end, schema, NULL);
    gram_run_jobs(b);
}

/* ---- the way out --------------------------------------------------------------------------- */

typedef struct levels {
    gram_build *b;
    uint32_t   *from;             /* [n_edge] */
    uint32_t   *in_off, *in;      /* edges that lead to a node */
    uint32_t   *call_off, *call;  /* edges that call a rule */
    uint32_t   *start_of;         /* [n_node] rule that begins there */
    uint32_t   *todo, *next_rule; /* settled on this level; rules of the next one */
    uint32_t    n_todo, n_next;
} levels;

static bool alive_at_first(const gram_build *b, uint32_t node)
{
    const gram_node *n = &b->node[node];

    return n->min == 0 && (n->feas == GRAM_NONE || (b->feas[n->feas / 64] >> (n->feas % 64) & 1));
}

static void settle(levels *l, uint32_t node, uint32_t h)
{
    gram_node *n = &l->b->node[node];

    if (n->need != GRAM_NONE || n->min == GRAM_NONE)
        return;
    n->need              = h;
    l->todo[l->n_todo++] = node;
    if (l->start_of[node] != GRAM_NONE && alive_at_first(l->b, node)) {
        l->b->rule[l->start_of[node]].height = h + 1;
        l->next_rule[l->n_next++]            = l->start_of[node];
    }
}

static void settle_level(levels *l, uint32_t h)
{
    while (l->n_todo) {
        const uint32_t node = l->todo[--l->n_todo];

        for (uint32_t i = l->in_off[node]; i < l->in_off[node + 1]; i++) {
            const gram_edge *e = &l->b->edge[l->in[i]];

            if (e->kind != GRAM_CALL || l->b->rule[e->rule].height <= h)
                settle(l, l->from[l->in[i]], h);
        }
    }
}

/* Counting sort of edges by what `key` says of them. */
static void sort_edges(const levels *l, bool calls, uint32_t *off, uint32_t *list, uint32_t n)
{
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < l->b->n_edge; i++) {
            const gram_edge *e = &l->b->edge[i];

            if (e->kind == GRAM_RET || (calls && e->kind != GRAM_CALL))
                continue;
            if (pass == 0)
                off[(calls ? e->rule : e->to) + 1]++;
            else
                list[--off[(calls ? e->rule : e->to) + 1]] = i;
        }
        if (pass == 0)
            for (uint32_t i = 0; i < n; i++)
                off[i + 1] += off[i];
    }
    /* The second pass has moved every end to its beginning: off[i + 1] is where list i begins. */
    memmove(off, off + 1, n * sizeof(*off));
    off[n] = 0;
    for (uint32_t i = 0; i < l->b->n_edge; i++)
        off[n] += l->b->edge[i].kind != GRAM_RET && (!calls || l->b->edge[i].kind == GRAM_CALL);
}

static void find_levels(levels *l)
{
    gram_build *b = l->b;

    for (uint32_t i = 0; i < b->n_node; i++) {
        l->start_of[i] = GRAM_NONE;
        for (uint32_t e = b->node[i].edge; e != GRAM_NONE; e = b->edge[e].next)
            l->from[e] = i;
    }
    for (uint32_t i = 0; i < b->n_rule; i++)
        if (b->rule[i].start != GRAM_NONE)
            l->start_of[b->rule[i].start] = i;
    sort_edges(l, false, l->in_off, l->in, b->n_node);
    sort_edges(l, true, l->call_off, l->call, b->n_rule);
    for (uint32_t i = 0; i < b->n_node; i++)
        if (b->node[i].flags & GRAM_ACCEPT)
            settle(l, i, 0);
    for (uint32_t i = 0; i < b->n_edge; i++)
        if (b->edge[i].kind == GRAM_RET)
            settle(l, l->from[i], 0);
    settle_level(l, 0);
    for (uint32_t h = 1, done = 0; done < l->n_next; h++) {
        const uint32_t end = l->n_next; /* rules of height h: [done, end) */

        for (; done < end; done++) {
            const uint32_t rule = l->next_rule[done];

            for (uint32_t i = l->call_off[rule]; i < l->call_off[rule + 1]; i++)
                if (b->node[b->edge[l->call[i]].to].need != GRAM_NONE)
                    settle(l, l->from[l->call[i]], h);
        }
        settle_level(l, h);
    }
}

static void find_needs(gram_build *b)
{
    levels l = { .b = b };

    l.from      = kvd_calloc(b->n_edge, sizeof(*l.from));
    l.in_off    = kvd_calloc((size_t)b->n_node + 1, sizeof(*l.in_off));
    l.in        = kvd_calloc(b->n_edge, sizeof(*l.in));
    l.call_off  = kvd_calloc((size_t)b->n_rule + 1, sizeof(*l.call_off));
    l.call      = kvd_calloc(b->n_edge, sizeof(*l.call));
    l.start_of  = kvd_calloc(b->n_node, sizeof(*l.start_of));
    l.todo      = kvd_calloc(b->n_node, sizeof(*l.todo));
    l.next_rule = kvd_calloc(b->n_rule, sizeof(*l.next_rule));
    if (l.from && l.in_off && l.in && l.call_off && l.call && l.start_of && l.todo && l.next_rule)
        find_levels(&l);
    else
        gram_no_memory(b);
    kvd_free(l.from);
    kvd_free(l.in_off);
    kvd_free(l.in);
    kvd_free(l.call_off);
    kvd_free(l.call);
    kvd_free(l.start_of);
    kvd_free(l.todo);
    kvd_free(l.next_rule);
}

/* A function that can never be called would go unnoticed. */
static void check_functions(gram_build *b)
{
    const char *name;
    json_t     *node;

    json_object_foreach(b->functions, name, node)
    {
        if (b->st == KVD_OK && b->node[json_integer_value(node)].need == GRAM_NONE)
            gram_refuse(b, "no arguments fit function '%.60s'", name);
    }
}

static void finish(gram_build *b, uint32_t start)
{
    if (b->st != KVD_OK)
        return;
    find_needs(b);
    b->path[0] = 0;
    check_functions(b);
    if (b->st == KVD_OK && b->node[start].need == GRAM_NONE)
        gram_refuse(b, "no value fits");
    else if (b->st == KVD_OK && b->node[start].need >= GRAM_MAX_DEPTH)
        gram_refuse(b, "every value has more than %d brackets in each other", GRAM_MAX_DEPTH - 1);
    for (uint32_t i = 0; i < b->n_node; i++) {
        const gram_node *n = &b->node[i];

        if (n->min || n->max != GRAM_NONE || n->feas != GRAM_NONE)
            b->rule[n->rule].bounds = true;
    }
}

/* ---- open ------------------------------------------------------------------------------------ */

static void take_over(gram *g, gram_build *b, uint32_t start)
{
    g->node   = b->node;
    g->edge   = b->edge;
    g->rule   = b->rule;
    g->feas   = b->feas;
    g->n_node = b->n_node;
    g->n_edge = b->n_edge;
    g->n_rule = b->n_rule;
    g->start  = start;
    b->node   = NULL;
    b->edge   = NULL;
    b->rule   = NULL;
    b->feas   = NULL;
    for (uint32_t i = 0; i < g->n_node; i++)
        if (g->node[i].need != GRAM_NONE && g->node[i].need > g->max_need)
            g->max_need = g->node[i].need;
}

static kvd_status check_desc(const gram_desc *d, kvd_err *err)
{
    const int n = !!d->schema_json + d->json_object + !!d->tools_json;

    if (n != 1)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "a grammar takes one of schema_json, json_object and tools_json, not %d",
                        n);
    if (d->choice != KVD_TOOL_CHOICE_AUTO && d->choice != KVD_TOOL_CHOICE_REQUIRED)
        return kvd_fail(err, KVD_E_INVAL, 0, "tool_choice %d is not known", (int)d->choice);
    return KVD_OK;
}

kvd_status gram_open(gram **out, const gram_vocab *v, const gram_desc *d, kvd_err *err)
{
    gram_build b;
    kvd_buf    notes = { 0 };
    gram      *g;
    uint32_t   start, behind;
    kvd_status st;

    *out = NULL;
    KVD_TRY(check_desc(d, err));
    build_open(&b, err);
    start  = gram_node_new(&b);
    behind = gram_think(&b, start, d);
    if (b.st == KVD_OK && d->tools_json)
        gram_tools(&b, behind, d, &notes);
    else if (b.st == KVD_OK)
        write_schema(&b, behind, d);
    finish(&b, start);
    g = b.st == KVD_OK ? kvd_calloc(1, sizeof(*g)) : NULL;
    if (!g)
        gram_no_memory(&b);
    st = b.st;
    if (g) {
        g->v = v;
        take_over(g, &b, start);
        g->notes = kvd_buf_take(&notes);
        st       = g->notes ? gram_run_open(g, err) : gram_no_memory(&b);
        if (st == KVD_OK)
            st = gram_mask_open(g, err);
    }
    gram_build_free(&b);
    kvd_buf_free(&notes);
    if (st == KVD_OK)
        *out = g;
    else
        gram_close(g);
    return st;
}

void gram_close(gram *g)
{
    if (!g)
        return;
    gram_mask_close(g);
    gram_run_close(g);
    kvd_free(g->node);
    kvd_free(g->edge);
    kvd_free(g->rule);
    kvd_free(g->feas);
    kvd_free(g->notes);
    kvd_free(g);
}

const char *gram_notes(const gram *g)
{
    return g->notes;
}

uint32_t gram_n_token(const gram *g)
{
    return g->v->n_token;
}

void gram_get_stats(const gram *g, gram_stats *out)
{
    *out        = g->stats;
    out->n_rule = g->n_rule;
    out->n_node = g->n_node;
    out->n_set  = g->sets.n;
    out->n_trie = g->v->n_node;
}
