/* SPDX-License-Identifier: Apache-2.0 */
/* gram_run.c - the automaton as it runs.
 *
 * A set holds the nodes that matter: those with a byte, a call or an end, and those where white
 * space or the end of the text may come; nodes that only lead on are followed.  What a byte does to
 * a set is found when it is first asked for and kept in a table by classes of bytes that all edges
 * treat alike; afterwards nodes whose bounds or whose way out do not fit the frame are dropped.
 *
 * All memory is taken at open.  When there are too many sets, `full` is raised and the byte counts
 * as one that may not come: the caller looks at `full`. */
#include <stdlib.h>
#include <string.h>

#include "text/gram_impl.h"

#define RETURN_SLOTS 32768u

/* ---- open ------------------------------------------------------------------------------------ */

static void find_classes(gram *g)
{
    bool     begins[257] = { true };
    uint32_t n           = 0;

    for (uint32_t i = 0; i < g->n_edge; i++)
        if (g->edge[i].kind == GRAM_BYTE) {
            begins[g->edge[i].lo]     = true;
            begins[g->edge[i].hi + 1] = true;
        }
    for (const char *s = "\t\n\r \"[]{}"; *s; s++)
        begins[(unsigned char)*s] = begins[(unsigned char)*s + 1] = true;
    for (uint32_t i = 0; i < 256; i++) {
        n += begins[i] && i;
        g->class_of[i] = (uint8_t)n;
    }
    g->n_class = n + 1;
}

kvd_status gram_run_open(gram *g, kvd_err *err)
{
    bool ok;

    find_classes(g);
    g->max_sets = (uint32_t)kvd_min_u64(GRAM_MAX_SETS, GRAM_MAX_TABLE / (4 * g->n_class));
    ok          = gram_sets_open(&g->sets, g->max_sets, GRAM_MAX_SET_NODES);
    ok &= gram_sets_open(&g->ends, g->max_sets, GRAM_MAX_SET_NODES / 4);
    g->set_flags  = kvd_calloc(g->max_sets, sizeof(*g->set_flags));
    g->table      = kvd_calloc((size_t)g->max_sets * g->n_class, sizeof(*g->table));
    g->return_key = kvd_calloc(RETURN_SLOTS, sizeof(*g->return_key));
    g->return_to  = kvd_calloc(RETURN_SLOTS, sizeof(*g->return_to));
    g->mark       = kvd_calloc(g->n_node, sizeof(*g->mark));
    g->list       = kvd_calloc(g->n_node, sizeof(*g->list));
    g->todo       = kvd_calloc(g->n_node, sizeof(*g->todo));
    if (!ok || !g->set_flags || !g->table || !g->return_key || !g->return_to || !g->mark ||
        !g->list || !g->todo)
        return kvd_fail(err, KVD_E_NOMEM, 0, "grammar: no memory for its states");
    return KVD_OK;
}

void gram_run_close(gram *g)
{
    gram_sets_close(&g->sets);
    gram_sets_close(&g->ends);
    kvd_free(g->set_flags);
    kvd_free(g->table);
    kvd_free(g->return_key);
    kvd_free(g->return_to);
    kvd_free(g->mark);
    kvd_free(g->list);
    kvd_free(g->todo);
}

/* ---- sets --------------------------------------------------------------------------------------
 */

static bool matters(const gram *g, uint32_t node)
{
    if (g->node[node].flags)
        return true;
    for (uint32_t i = g->node[node].edge; i != GRAM_NONE; i = g->edge[i].next)
        if (g->edge[i].kind != GRAM_EPS)
            return true;
    return false;
}

/* Adds what can be reached from a node without a byte to list[0 .. n); returns the new n.  Nodes
 * that no way leads out of are left out; the marks of this stamp are in already. */
static uint32_t add_closure(gram *g, uint32_t node, uint32_t n)
{
    uint32_t n_todo = 0;

    if (g->mark[node] == g->stamp)
        return n;
    g->mark[node]     = g->stamp;
    g->todo[n_todo++] = node;
    while (n_todo) {
        const uint32_t at = g->todo[--n_todo];

        if (g->node[at].need == GRAM_NONE)
            continue;
        if (matters(g, at))
            g->list[n++] = at;
        for (uint32_t i = g->node[at].edge; i != GRAM_NONE; i = g->edge[i].next) {
            const uint32_t to = g->edge[i].to;

            if (g->edge[i].kind == GRAM_EPS && g->mark[to] != g->stamp) {
                g->mark[to]       = g->stamp;
                g->todo[n_todo++] = to;
            }
        }
    }
    return n;
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static uint8_t flags_of(const gram *g, const uint32_t *node, uint32_t n)
{
    const gram_rule *r     = &g->rule[g->node[node[0]].rule];
    uint8_t          flags = r->plain ? GRAM_SET_PLAIN : 0;

    for (uint32_t i = 0; i < n; i++) {
        const gram_node *q = &g->node[node[i]];

        if (q->flags & GRAM_ACCEPT)
            flags |= GRAM_SET_ACCEPT;
        if (q->flags & GRAM_TEXT)
            flags |= GRAM_SET_TEXT;
        if (g->rule[q->rule].bounds)
            flags |= GRAM_SET_BOUNDS;
        if (node[i] != r->body && node[i] != r->shut)
            flags &= (uint8_t)~GRAM_SET_PLAIN;
    }
    return flags;
}

/* The number of the set of list[0 .. n); GRAM_NONE: it is empty, or there is no room. */
static uint32_t set_of(gram *g, uint32_t n)
{
    const uint32_t have = g->sets.n;
    uint32_t       set;

    if (n == 0)
        return GRAM_NONE;
    qsort(g->list, n, sizeof(*g->list), ascending);
    set = gram_sets_add(&g->sets, g->list, n);
    if (set == GRAM_NONE)
        g->full = true;
    else if (g->sets.n > have)
        g->set_flags[set] = flags_of(g, g->list, n);
    return set;
}

/* Begins a list: returns its length, 0. */
static uint32_t next_stamp(gram *g)
{
    if (++g->stamp == 0) { /* once in four billion */
        memset(g->mark, 0, g->n_node * sizeof(*g->mark));
        g->stamp = 1;
    }
    return 0;
}

/* Without the nodes that are not alive with the frame's number, or need more frames than are left.
 */
static uint32_t keep_alive(gram *g, uint32_t set, uint32_t count, uint32_t left)
{
    const uint32_t *node = g->sets.item + g->sets.off[set];
    const uint32_t  n    = g->sets.off[set + 1] - g->sets.off[set];
    uint32_t        kept = 0;

    if (!(g->set_flags[set] & GRAM_SET_BOUNDS) && left >= g->max_need)
        return set;
    for (uint32_t i = 0; i < n; i++) {
        const gram_node *q  = &g->node[node[i]];
        bool             ok = q->need <= left && q->min <= count && count <= q->max;

        if (ok && q->feas != GRAM_NONE) {
            const uint32_t row = g->rule[q->rule].row;
            const uint64_t bit = (uint64_t)q->feas + (count < row ? count : row - 1);

            ok = g->feas[bit / 64] >> (bit % 64) & 1;
        }
        if (ok)
            g->list[kept++] = node[i];
    }
    return kept == n ? set : set_of(g, kept);
}

/* ---- transitions
 * ---------------------------------------------------------------------------------- */

static bool is_white(uint8_t byte)
{
    return byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r';
}

/* Everything that the nodes of a set do with a byte, by kind. */
typedef struct found {
    uint32_t n_stay, n_push, n_end;
    bool     counts, white;
} found;

/* Follows the edges of one kind into list. */
static uint32_t follow(gram *g, uint32_t set, uint8_t byte, int kind, found *f)
{
    const uint32_t off = g->sets.off[set], end = g->sets.off[set + 1];
    uint32_t       n = next_stamp(g);

    for (uint32_t i = off; i < end; i++) {
        const uint32_t   node = g->sets.item[i];
        const gram_node *q    = &g->node[node];

        if (kind == GRAM_BYTE && q->flags & GRAM_WHITE && is_white(byte)) {
            n        = add_closure(g, node, n);
            f->white = true;
        }
        for (uint32_t k = q->edge; k != GRAM_NONE; k = g->edge[k].next) {
            const gram_edge *e = &g->edge[k];

            if (e->kind != kind)
                continue;
            if (kind == GRAM_BYTE && e->lo <= byte && byte <= e->hi) {
                n = add_closure(g, e->to, n);
                f->counts |= e->counts;
            } else if (kind == GRAM_CALL && (uint8_t)g->rule[e->rule].open == byte &&
                       g->rule[e->rule].height != GRAM_NONE && g->node[e->to].need != GRAM_NONE) {
                n = add_closure(g, g->rule[e->rule].start, n);
            } else if (kind == GRAM_RET && (uint8_t)g->rule[q->rule].close == byte &&
                       (n == 0 || g->list[n - 1] != q->rule)) {
                g->list[n++] = q->rule;
            }
        }
    }
    return n;
}

/* Sorted, each once. */
static uint32_t unique(uint32_t *list, uint32_t n)
{
    uint32_t kept = 0;

    qsort(list, n, sizeof(*list), ascending);
    for (uint32_t i = 0; i < n; i++)
        if (kept == 0 || list[kept - 1] != list[i])
            list[kept++] = list[i];
    return kept;
}

static uint32_t entry(uint32_t number, uint32_t move, const found *f)
{
    if (number == GRAM_NONE)
        return GRAM_DEAD;
    return number << GRAM_MOVE_SHIFT | move | (f->counts ? GRAM_MOVE_COUNT : 0) |
           (f->white ? GRAM_MOVE_WHITE : 0);
}

/* What a byte does to a set.  No set has edges of two kinds for one byte: inside a string there are
 * no calls, and where a value may begin no bytes of text that are brackets or quotes. */
static uint32_t transition(gram *g, uint32_t set, uint8_t byte)
{
    uint32_t *slot = &g->table[(size_t)set * g->n_class + g->class_of[byte]];
    found     f    = { 0 };
    uint32_t  n;

    n = follow(g, set, byte, GRAM_BYTE, &f);
    if (n) {
        *slot = entry(set_of(g, n), GRAM_STAY, &f);
        return *slot;
    }
    n = follow(g, set, byte, GRAM_CALL, &f);
    if (n) {
        *slot = entry(set_of(g, n), GRAM_PUSH, &f);
        return *slot;
    }
    n = follow(g, set, byte, GRAM_RET, &f);
    if (n) {
        const uint32_t ends = gram_sets_add(&g->ends, g->list, unique(g->list, n));

        g->full |= ends == GRAM_NONE;
        *slot = entry(ends, GRAM_POP, &f);
        return *slot;
    }
    *slot = GRAM_DEAD;
    return *slot;
}

static bool holds(const gram *g, uint32_t ends, uint32_t rule)
{
    uint32_t lo = g->ends.off[ends], hi = g->ends.off[ends + 1];

    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;

        if (g->ends.item[mid] == rule)
            return true;
        if (g->ends.item[mid] < rule)
            lo = mid + 1;
        else
            hi = mid;
    }
    return false;
}

/* The set behind the calls of rules that have ended. */
static uint32_t behind(gram *g, uint32_t set, uint32_t ends)
{
    const uint64_t key = (uint64_t)set << 32 | ends;
    uint32_t       i   = (uint32_t)(key * UINT64_C(0x9e3779b97f4a7c15) >> 32) % RETURN_SLOTS;
    uint32_t       n   = next_stamp(g), to;

    if (g->return_to[i] && g->return_key[i] == key)
        return g->return_to[i] - 1;
    for (uint32_t k = g->sets.off[set]; k < g->sets.off[set + 1]; k++)
        for (uint32_t j = g->node[g->sets.item[k]].edge; j != GRAM_NONE; j = g->edge[j].next)
            if (g->edge[j].kind == GRAM_CALL && holds(g, ends, g->edge[j].rule))
                n = add_closure(g, g->edge[j].to, n);
    to = set_of(g, n);
    if (to != GRAM_NONE) {
        g->return_key[i] = key;
        g->return_to[i]  = to + 1;
    }
    return to;
}

bool gram_return(gram *g, gram_conf *c, uint32_t ends)
{
    const gram_link *below = &g->link[c->parent];

    c->set    = behind(g, below->set, ends);
    c->count  = below->count;
    c->parent = below->parent;
    c->white  = 0;
    c->depth--;
    if (c->set != GRAM_NONE)
        c->set = keep_alive(g, c->set, c->count, GRAM_MAX_DEPTH - c->depth);
    return c->set != GRAM_NONE;
}

bool gram_step(gram *g, gram_conf *c, uint8_t byte, uint32_t base, uint32_t *ends)
{
    uint32_t move = g->table[(size_t)c->set * g->n_class + g->class_of[byte]];

    if (move == GRAM_UNKNOWN)
        move = transition(g, c->set, byte);
    switch (move & ((1u << GRAM_MOVE_BITS) - 1)) {
    case GRAM_STAY:
        c->white = move & GRAM_MOVE_WHITE ? c->white + 1 : 0;
        if (c->white > GRAM_MAX_WHITE)
            return false;
        if (move & GRAM_MOVE_COUNT && c->count < GRAM_NONE - 1)
            c->count++;
        c->set = move >> GRAM_MOVE_SHIFT;
        break;
    case GRAM_PUSH:
        if (c->depth == GRAM_MAX_DEPTH)
            return false;
        g->link[g->n_link] = (gram_link){ .set = c->set, .count = c->count, .parent = c->parent };
        c->parent          = g->n_link++;
        c->depth++;
        c->count = c->white = 0;
        c->set              = move >> GRAM_MOVE_SHIFT;
        break;
    case GRAM_POP:
        if (c->depth == base) {
            *ends = move >> GRAM_MOVE_SHIFT;
            return false;
        }
        return gram_return(g, c, move >> GRAM_MOVE_SHIFT);
    default:
        return false;
    }
    c->set = keep_alive(g, c->set, c->count, GRAM_MAX_DEPTH - c->depth);
    return c->set != GRAM_NONE;
}

/* ---- places
 * ------------------------------------------------------------------------------------------ */

void gram_load(gram *g, const gram_at *at, gram_conf *c)
{
    g->n_link = 0;
    for (uint32_t i = 0; i + 1 < at->depth; i++)
        g->link[g->n_link++] = (gram_link){ .set    = at->frame[i].set,
                                            .count  = at->frame[i].count,
                                            .parent = i ? i - 1 : GRAM_NONE };
    *c = (gram_conf){ .set    = at->frame[at->depth - 1].set,
                      .count  = at->frame[at->depth - 1].count,
                      .parent = at->depth > 1 ? at->depth - 2 : GRAM_NONE,
                      .depth  = at->depth,
                      .white  = at->white };
}

void gram_store(const gram *g, const gram_conf *c, gram_at *at)
{
    uint32_t parent = c->parent;

    at->depth                     = c->depth;
    at->white                     = c->white;
    at->frame[c->depth - 1].set   = c->set;
    at->frame[c->depth - 1].count = c->count;
    for (uint32_t i = c->depth - 1; i-- > 0;) {
        at->frame[i].set   = g->link[parent].set;
        at->frame[i].count = g->link[parent].count;
        parent             = g->link[parent].parent;
    }
}

uint32_t gram_set_at(gram *g, uint32_t node)
{
    const uint32_t n   = next_stamp(g);
    const uint32_t set = set_of(g, add_closure(g, node, n));

    return set == GRAM_NONE ? set : keep_alive(g, set, 0, GRAM_MAX_DEPTH - 1);
}
