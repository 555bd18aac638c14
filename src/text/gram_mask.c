/* SPDX-License-Identifier: Apache-2.0 */
/* gram_mask.c - which tokens may come next: the automaton over the trie of the vocabulary.
 *
 * A subtree whose first byte may not come is left out, so at most places few nodes are visited. The
 * exception is the inside of strings, where most tokens may come:
 *
 *  - what may come inside a plain string is the vocabulary's, kept there by number of characters;
 *  - else a mask that took long is kept under its set: the tokens that stay within the frame, and
 * the *exits*, nodes whose byte leaves it, from where the walk goes on with the frame below.
 *
 * Memory is taken at open. */
#include <string.h>

#include "text/gram_impl.h"

#define MAX_EXITS 16384u
#define EXPENSIVE 2000u /* visited nodes from which on a mask is kept */

kvd_status gram_mask_open(gram *g, kvd_err *err)
{
    const gram_vocab *v = g->v;

    g->max_exit  = MAX_EXITS;
    g->conf      = kvd_calloc((size_t)v->max_bytes + 2, sizeof(*g->conf));
    g->link      = kvd_calloc(GRAM_MAX_DEPTH + (size_t)v->max_bytes + 2, sizeof(*g->link));
    g->exit      = kvd_calloc(g->max_exit, sizeof(*g->exit));
    g->slot_bits = kvd_calloc((size_t)GRAM_MASKS * v->words, sizeof(*g->slot_bits));
    g->slot_exit = kvd_calloc((size_t)GRAM_MASKS * g->max_exit, sizeof(*g->slot_exit));
    if (!g->conf || !g->link || !g->exit || !g->slot_bits || !g->slot_exit)
        return kvd_fail(err, KVD_E_NOMEM, 0, "grammar: no memory for its masks");
    for (int i = 0; i < GRAM_MASKS; i++)
        g->slot[i].set = GRAM_NONE;
    g->first = gram_set_at(g, g->start);
    if (g->first == GRAM_NONE)
        return kvd_fail(err, KVD_E_INVAL, 0, "grammar: no text fits");
    return KVD_OK;
}

void gram_mask_close(gram *g)
{
    kvd_free(g->conf);
    kvd_free(g->link);
    kvd_free(g->exit);
    kvd_free(g->slot_bits);
    kvd_free(g->slot_exit);
}

uint64_t gram_heap_bytes(const gram *g)
{
    return g->n_node * (sizeof(*g->node) + 3 * sizeof(uint32_t)) + g->n_edge * sizeof(*g->edge) +
           g->n_rule * sizeof(*g->rule) + gram_sets_bytes(&g->sets) + gram_sets_bytes(&g->ends) +
           (uint64_t)g->max_sets * (4 * g->n_class + 1) +
           GRAM_MASKS * (uint64_t)g->v->words * sizeof(*g->slot_bits) +
           (GRAM_MASKS + UINT64_C(1)) * g->max_exit * sizeof(*g->exit);
}

/* ---- the walk ----------------------------------------------------------------------------------
 */

typedef struct walk {
    gram         *g;
    uint64_t     *bits; /* or */
    gram_found_fn fn;
    void         *ctx;
    uint32_t      base; /* frames that are not left: exits; 0: all may be */
    bool          lost; /* more exits than there is room for */
} walk;

static void found(walk *w, const gram_trie_node *n, uint32_t count)
{
    const uint32_t *token = w->g->v->token;

    for (uint32_t i = n->token; i < n[1].token; i++) {
        if (w->bits)
            w->bits[token[i] / 64] |= UINT64_C(1) << (token[i] % 64);
        else
            w->fn(w->ctx, token[i], count);
    }
}

/* Most steps stay in a set in which nothing can die: those are taken here, without a call. */
static inline bool quick_step(const gram *g, gram_conf *c, uint8_t byte)
{
    const uint32_t move = g->table[(size_t)c->set * g->n_class + g->class_of[byte]];
    const uint32_t low  = move & ((1u << GRAM_MOVE_SHIFT) - 1);

    if ((low & ~GRAM_MOVE_COUNT) != GRAM_STAY || GRAM_MAX_DEPTH - c->depth < g->max_need ||
        g->set_flags[move >> GRAM_MOVE_SHIFT] & GRAM_SET_BOUNDS || c->count >= GRAM_NONE - 2)
        return false;
    c->set = move >> GRAM_MOVE_SHIFT;
    c->count += low != GRAM_STAY;
    c->white = 0;
    return true;
}

/* Nodes [from, to), siblings and their subtrees, whose parent's bytes led to c. */
static void walk_nodes(walk *w, uint32_t from, uint32_t to, const gram_conf *c)
{
    gram                 *g    = w->g;
    const gram_trie_node *node = g->v->node;
    const uint32_t        top  = from < to ? node[from].depth - 1u : 0;
    uint64_t              n    = 0;

    g->conf[0]       = *c;
    g->conf[0].links = g->n_link;
    for (uint32_t i = from; i < to; n++) {
        const uint32_t   d    = node[i].depth - top;
        const gram_conf *prev = &g->conf[d - 1];
        gram_conf       *now  = &g->conf[d];
        uint32_t         ends = GRAM_NONE;

        *now      = *prev;
        g->n_link = prev->links;
        if (quick_step(g, now, node[i].byte) || gram_step(g, now, node[i].byte, w->base, &ends)) {
            now->links = g->n_link;
            found(w, &node[i], now->count);
            i++;
            continue;
        }
        if (ends != GRAM_NONE && g->n_exit < g->max_exit)
            g->exit[g->n_exit++] = (gram_exit){ .node = i, .rules = ends, .count = prev->count };
        else if (ends != GRAM_NONE)
            w->lost = true;
        i = node[i].end;
    }
    g->n_link = g->conf[0].links;
    g->stats.n_visited += n;
}

/* The tokens at and below a node whose byte has left the frame of c. */
static void leave(walk *w, uint32_t at, uint32_t ends, const gram_conf *c)
{
    gram     *g   = w->g;
    gram_conf out = *c;

    if (!gram_return(g, &out, ends))
        return;
    found(w, &g->v->node[at], 0);
    walk_nodes(w, at + 1, g->v->node[at].end, &out);
}

bool gram_walk_plain(gram *g, gram_found_fn fn, void *ctx)
{
    walk      w = { .g = g, .fn = fn, .ctx = ctx, .base = 2 };
    gram_conf c = { .depth = 2 };

    for (uint32_t i = 0; i < g->n_rule; i++)
        if (g->rule[i].plain && g->rule[i].min == 0 && g->rule[i].max == GRAM_NONE) {
            c.set     = gram_set_at(g, g->rule[i].start);
            g->n_exit = 0;
            g->n_link = 1;
            walk_nodes(&w, 0, g->v->n_node, &c);
            return !w.lost && !g->full;
        }
    return false;
}

/* ---- masks
 * --------------------------------------------------------------------------------------- */

static void or_bits(uint64_t *to, const uint64_t *from, uint32_t words)
{
    for (uint32_t i = 0; i < words; i++)
        to[i] |= from[i];
}

static void mask_plain(walk *w, const gram_conf *c)
{
    gram             *g    = w->g;
    const gram_vocab *v    = g->v;
    const uint32_t    rule = g->node[g->sets.item[g->sets.off[c->set]]].rule;
    const gram_rule  *r    = &g->rule[rule];
    const uint32_t    left = r->max == GRAM_NONE ? GRAM_NONE : r->max - c->count;
    const uint32_t    ends = gram_sets_add(&g->ends, &rule, 1);

    if (ends == GRAM_NONE) {
        g->full = true;
        return;
    }
    if (left >= v->max_chars)
        or_bits(w->bits, v->plain_bits, v->words);
    else
        for (uint32_t i = 0; i < v->plain_off[left + 1]; i++)
            w->bits[v->plain[i] / 64] |= UINT64_C(1) << (v->plain[i] % 64);
    for (uint32_t i = 0; i < v->n_plain_exit; i++) {
        const gram_exit *e = &v->plain_exit[i];

        if (e->count <= left && (uint64_t)c->count + e->count >= r->min)
            leave(w, e->node, ends, c);
    }
    g->stats.n_cached++;
}

static gram_mask_slot *find_slot(gram *g, uint32_t set)
{
    gram_mask_slot *oldest = &g->slot[0];

    for (int i = 0; i < GRAM_MASKS; i++) {
        if (g->slot[i].set == set)
            return &g->slot[i];
        if (g->slot[i].used < oldest->used)
            oldest = &g->slot[i];
    }
    return oldest;
}

/* A set whose mask depends on nothing but itself and what the exits find. */
static void mask_kept(walk *w, const gram_conf *c)
{
    gram           *g     = w->g;
    const uint32_t  words = g->v->words;
    gram_mask_slot *slot  = find_slot(g, c->set);
    uint64_t       *bits  = g->slot_bits + (size_t)(slot - g->slot) * words;
    gram_exit      *exit  = g->slot_exit + (size_t)(slot - g->slot) * g->max_exit;
    const uint64_t  was   = g->stats.n_visited;

    if (slot->set != c->set) {
        walk inner = { .g = g, .bits = bits, .base = c->depth };

        memset(bits, 0, words * sizeof(*bits));
        g->n_exit = 0;
        walk_nodes(&inner, 0, g->v->n_node, c);
        memcpy(exit, g->exit, g->n_exit * sizeof(*exit));
        slot->n_exit = g->n_exit;
        slot->set    = inner.lost || g->full ? GRAM_NONE : c->set;
        if (inner.lost) {
            walk_nodes(w, 0, g->v->n_node, c);
            return;
        }
    } else {
        g->stats.n_cached++;
    }
    slot->used = g->stats.n_mask;
    or_bits(w->bits, bits, words);
    for (uint32_t i = 0; i < slot->n_exit; i++)
        leave(w, exit[i].node, exit[i].rules, c);
    if (slot->set == c->set && g->stats.n_visited - was < EXPENSIVE && g->stats.n_visited > was)
        slot->used = 1; /* goes first */
}

static kvd_status no_token(const gram *g, kvd_err *err)
{
    if (g->full)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "grammar: this text needs more than %u states, or they are too large",
                        g->max_sets);
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "grammar: no token of the vocabulary can come next");
}

kvd_status gram_mask(gram *g, const gram_at *at, uint64_t *bits, kvd_err *err)
{
    const gram_vocab *v   = g->v;
    walk              w   = { .g = g, .bits = bits };
    uint64_t          any = 0;
    gram_conf         c;
    uint8_t           flags;

    memset(bits, 0, v->words * sizeof(*bits));
    if (at->ended)
        return kvd_fail(err, KVD_E_INVAL, 0, "grammar: the text has ended");
    gram_load(g, at, &c);
    flags = g->set_flags[c.set];
    g->stats.n_mask++;
    if (flags & GRAM_SET_PLAIN && v->plain)
        mask_plain(&w, &c);
    else if (!(flags & GRAM_SET_BOUNDS) && c.white == 0 &&
             GRAM_MAX_DEPTH - c.depth >= g->max_need + v->max_push)
        mask_kept(&w, &c);
    else
        walk_nodes(&w, 0, v->n_node, &c);
    if (flags & GRAM_SET_TEXT)
        or_bits(bits, v->special, v->words);
    if (flags & GRAM_SET_ACCEPT)
        or_bits(bits, v->ends, v->words);
    for (uint32_t i = 0; i < v->words; i++)
        any |= bits[i];
    return any && !g->full ? KVD_OK : no_token(g, err);
}

/* ---- one token
 * --------------------------------------------------------------------------------------- */

void gram_begin(const gram *g, gram_at *at)
{
    *at              = (gram_at){ .depth = 1 };
    at->frame[0].set = g->first;
}

static bool has(const uint64_t *bits, int32_t token)
{
    return bits[token / 64] >> (token % 64) & 1;
}

static bool follow_bytes(gram *g, gram_conf *c, const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (g->n_link + 1 >= GRAM_MAX_DEPTH + g->v->max_bytes) /* text, not a token: start anew */
            return false;
        if (!gram_step(g, c, (uint8_t)s[i], 0, NULL))
            return false;
    }
    return true;
}

/* Moves c on; false: the token may not come. */
static bool follow_token(gram *g, const gram_at *at, gram_conf *c, int32_t token, bool *ended)
{
    const gram_vocab *v = g->v;
    const char       *s;
    size_t            len;

    *ended = false;
    if (at->ended || token < 0 || (uint32_t)token >= v->n_token)
        return false;
    gram_load(g, at, c);
    if (has(v->ends, token))
        return *ended = g->set_flags[c->set] & GRAM_SET_ACCEPT;
    if (has(v->special, token))
        return g->set_flags[c->set] & GRAM_SET_TEXT;
    if (!has(v->in_trie, token))
        return false;
    s = tok_bytes(v->t, token, &len);
    return follow_bytes(g, c, s, len);
}

bool gram_allows(gram *g, const gram_at *at, int32_t token)
{
    gram_conf c;
    bool      ended;

    return follow_token(g, at, &c, token, &ended);
}

kvd_status gram_accept(gram *g, gram_at *at, int32_t token, kvd_err *err)
{
    gram_conf c;
    bool      ended;

    if (!follow_token(g, at, &c, token, &ended))
        return g->full
                   ? no_token(g, err)
                   : kvd_fail(err, KVD_E_INVAL, 0, "grammar: token %d may not come here", token);
    gram_store(g, &c, at);
    at->ended = ended;
    return KVD_OK;
}

kvd_status gram_accept_text(gram *g, gram_at *at, const char *text, size_t len, kvd_err *err)
{
    gram_at now = *at;

    for (size_t i = 0; i < len; i++) {
        gram_conf c;

        gram_load(g, &now, &c);
        if (at->ended || !follow_bytes(g, &c, text + i, 1))
            return g->full
                       ? no_token(g, err)
                       : kvd_fail(err, KVD_E_INVAL, 0, "grammar: byte %zu may not come there", i);
        gram_store(g, &c, &now);
    }
    *at = now;
    return KVD_OK;
}

bool gram_may_end(const gram *g, const gram_at *at)
{
    return at->ended || g->set_flags[at->frame[at->depth - 1].set] & GRAM_SET_ACCEPT;
}
