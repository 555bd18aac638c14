/* SPDX-License-Identifier: Apache-2.0 */
/* gram_dfa.c - deterministic automata of patterns: by subsets, and what two of them accept. */
#include <string.h>

#include "text/gram_impl.h"

void gram_dfa_free(gram_dfa *d)
{
    kvd_free(d->next);
    kvd_free(d->flags);
    *d = (gram_dfa){ 0 };
}

bool gram_dfa_open(gram_build *b, gram_dfa *d)
{
    *d = (gram_dfa){ .next  = kvd_calloc((size_t)GRAM_MAX_DFA * 256, sizeof(*d->next)),
                     .flags = kvd_calloc(GRAM_MAX_DFA, sizeof(*d->flags)),
                     .max   = GRAM_NONE };
    if (!d->next || !d->flags)
        gram_no_memory(b);
    return gram_tick(b, 5000); /* so much does its memory cost */
}

bool gram_dfa_accepts(const gram_dfa *d, const char *s, size_t len)
{
    uint32_t at = 1;

    for (size_t i = 0; i < len && at; i++)
        at = d->next[at * 256 + (unsigned char)s[i]];
    return d->flags[at] & 1;
}

/* ---- by subsets ---------------------------------------------------------------------- */

typedef struct subset {
    gram_build       *out;
    const gram_build *nfa;
    gram_sets         sets;
    uint32_t         *list, *todo, *mark;
    uint32_t          n, stamp, accept;
} subset;

static void closure_add(subset *s, uint32_t node)
{
    uint32_t n_todo = 0;

    if (s->mark[node] == s->stamp)
        return;
    s->mark[node]     = s->stamp;
    s->todo[n_todo++] = node;
    while (n_todo) {
        const uint32_t at = s->todo[--n_todo];

        s->list[s->n++] = at;
        for (uint32_t i = s->nfa->node[at].edge; i != GRAM_NONE; i = s->nfa->edge[i].next) {
            const gram_edge *e = &s->nfa->edge[i];

            if (e->kind == GRAM_EPS && s->mark[e->to] != s->stamp) {
                s->mark[e->to]    = s->stamp;
                s->todo[n_todo++] = e->to;
            }
        }
    }
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

/* The number of the state of the list, 1 on; 0: failed. */
static uint32_t state_of(subset *s)
{
    uint32_t k;

    if (!gram_tick(s->out, s->n))
        return 0;
    qsort(s->list, s->n, sizeof(*s->list), ascending);
    k = gram_sets_add(&s->sets, s->list, s->n);
    if (k == GRAM_NONE || k + 1 >= GRAM_MAX_DFA) {
        gram_refuse(s->out, "pattern: more than %u states", GRAM_MAX_DFA);
        return 0;
    }
    return k + 1;
}

/* Where the bytes lo..hi, which all its edges treat alike, lead from state k. */
static void follow(subset *s, gram_dfa *d, uint32_t k, uint32_t lo, uint32_t hi)
{
    uint32_t to;

    s->n = 0;
    s->stamp++;
    for (uint32_t i = s->sets.off[k - 1]; i < s->sets.off[k]; i++)
        for (uint32_t j = s->nfa->node[s->sets.item[i]].edge; j != GRAM_NONE;
             j          = s->nfa->edge[j].next) {
            const gram_edge *e = &s->nfa->edge[j];

            if (e->kind != GRAM_BYTE || e->lo > lo || e->hi < hi)
                continue;
            if (e->counts)
                d->flags[k] |= 2;
            closure_add(s, e->to);
        }
    to = s->n ? state_of(s) : 0;
    for (uint32_t byte = lo; byte <= hi; byte++)
        d->next[k * 256 + byte] = (uint16_t)to;
}

static void expand_state(subset *s, gram_dfa *d, uint32_t k)
{
    uint8_t begins[257] = { 0 }; /* a range begins at the byte, or has ended before */
    bool    any         = false;

    for (uint32_t i = s->sets.off[k - 1]; i < s->sets.off[k]; i++) {
        const uint32_t node = s->sets.item[i];

        if (node == s->accept)
            d->flags[k] |= 1;
        for (uint32_t j = s->nfa->node[node].edge; j != GRAM_NONE; j = s->nfa->edge[j].next) {
            const gram_edge *e = &s->nfa->edge[j];

            if (e->kind != GRAM_BYTE)
                continue;
            begins[e->lo]     = 1;
            begins[e->hi + 1] = 1;
            any               = true;
        }
    }
    for (uint32_t lo = 0, hi; any && lo < 256 && s->out->st == KVD_OK; lo = hi) {
        hi = lo + 1;
        while (hi < 256 && !begins[hi])
            hi++;
        gram_tick(s->out, s->sets.off[k] - s->sets.off[k - 1]);
        follow(s, d, k, lo, hi - 1);
    }
}

bool gram_dfa_of(gram_build *out, const gram_build *nfa, uint32_t start, uint32_t accept,
                 gram_dfa *d)
{
    subset     s    = { .out = out, .nfa = nfa, .accept = accept };
    const bool sets = gram_sets_open(&s.sets, GRAM_MAX_DFA, 1u << 18);

    s.list = kvd_calloc(nfa->n_node, sizeof(*s.list));
    s.todo = kvd_calloc(nfa->n_node, sizeof(*s.todo));
    s.mark = kvd_calloc(nfa->n_node, sizeof(*s.mark));
    if (!sets || !s.list || !s.todo || !s.mark)
        gram_no_memory(out);
    if (out->st == KVD_OK && gram_dfa_open(out, d)) {
        s.stamp = 1;
        closure_add(&s, start);
        state_of(&s);
        for (uint32_t k = 1; k <= s.sets.n && out->st == KVD_OK; k++)
            expand_state(&s, d, k);
        d->n = s.sets.n + 1;
    }
    gram_sets_close(&s.sets);
    kvd_free(s.list);
    kvd_free(s.todo);
    kvd_free(s.mark);
    if (out->st != KVD_OK)
        gram_dfa_free(d);
    return out->st == KVD_OK;
}

/* ---- what two accept -------------------------------------------------------------------- */

bool gram_dfa_and(gram_build *b, gram_dfa *x, gram_dfa *y, gram_dfa *out)
{
    gram_sets pairs = { 0 };
    bool      ok    = b->st == KVD_OK && gram_sets_open(&pairs, GRAM_MAX_DFA, 2 * GRAM_MAX_DFA);

    *out = (gram_dfa){ 0 };
    if (!ok)
        gram_no_memory(b);
    if (ok && gram_dfa_open(b, out)) {
        (void)gram_sets_add(&pairs, (const uint32_t[]){ 1, 1 }, 2);
        for (uint32_t k = 1; k <= pairs.n && gram_tick(b, 256); k++) {
            const uint32_t i = pairs.item[2 * k - 2], j = pairs.item[2 * k - 1];

            out->flags[k] = (x->flags[i] & y->flags[j]) | ((x->flags[i] | y->flags[j]) & 2);
            for (uint32_t byte = 0; byte < 256; byte++) {
                const uint32_t to[2] = { x->next[i * 256 + byte], y->next[j * 256 + byte] };
                const uint32_t k2 = to[0] && to[1] ? gram_sets_add(&pairs, to, 2) : GRAM_NONE - 1;

                if (k2 == GRAM_NONE || k2 + 1 == GRAM_MAX_DFA) {
                    gram_refuse(b, "patterns that must hold together: more than %u states",
                                GRAM_MAX_DFA);
                    break;
                }
                out->next[k * 256 + byte] = (uint16_t)(k2 == GRAM_NONE - 1 ? 0 : k2 + 1);
            }
        }
        out->n   = pairs.n + 1;
        out->min = x->min > y->min ? x->min : y->min;
        out->max = x->max < y->max ? x->max : y->max;
    }
    gram_sets_close(&pairs);
    gram_dfa_free(x);
    gram_dfa_free(y);
    if (b->st != KVD_OK)
        gram_dfa_free(out);
    return b->st == KVD_OK;
}

/* ---- all but some ----------------------------------------------------------------------- */

#define ANY 2u /* state behind whatever is no beginning of a key */

/* Adds one key, as it stands in quotes, to the automaton of what is no key. */
static void except(gram_build *b, gram_dfa *d, const char *key, size_t len)
{
    uint32_t at = 1;

    for (size_t i = 0; i < len && b->st == KVD_OK; i++) {
        char         out[16];
        bool         first;
        const size_t m = gram_quoted((unsigned char)key[i], out, &first);

        for (size_t k = 0; k < m && gram_tick(b, 1); k++) {
            uint16_t *to = &d->next[at * 256 + (unsigned char)out[k]];

            if (*to == ANY && d->n == GRAM_MAX_DFA) {
                gram_refuse(b, "names beside propertyNames: more than %u states", GRAM_MAX_DFA);
                return;
            }
            if (*to == ANY) {
                for (uint32_t byte = 0; byte < 256; byte++)
                    d->next[d->n * 256 + byte] = ANY;
                d->flags[d->n] = 1;
                *to            = (uint16_t)d->n++;
            }
            at = *to;
        }
    }
    d->flags[at] = 0;
}

bool gram_dfa_without(gram_build *b, gram_dfa *d, json_t *keys, gram_dfa *out)
{
    gram_dfa    rest = { 0 };
    const char *key;
    size_t      len;
    json_t     *v;

    if (b->st == KVD_OK && gram_dfa_open(b, &rest)) {
        rest.n        = ANY + 1;
        rest.flags[1] = rest.flags[ANY] = 1;
        for (uint32_t byte = 0; byte < 256; byte++)
            rest.next[256 + byte] = rest.next[ANY * 256 + byte] = ANY;
        json_object_keylen_foreach(keys, key, len, v)
        {
            except(b, &rest, key, len);
        }
    }
    return gram_dfa_and(b, d, &rest, out);
}
