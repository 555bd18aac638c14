/* SPDX-License-Identifier: Apache-2.0 */
/* gram_vocab.c - the prefix trie of a vocabulary, and what of it may come inside a string.
 *
 * Nodes lie in preorder, tokens in the order of their bytes, so the tokens of a node are those from
 * its first to the next node's first.  Control tokens are not in it, except the marks of tool
 * calls; nor are ends of generation. */
#include <stdlib.h>
#include <string.h>

#include "text/gram_impl.h"

#define MAX_TOKEN_BYTES 1024 /* longer ones never come */

typedef struct word {
    const char *s;
    uint32_t    len, id;
} word;

static void *take(gram_vocab *v, size_t n, size_t size)
{
    v->heap_bytes += n * size;
    return kvd_calloc(n, size);
}

static int by_bytes(const void *a, const void *b)
{
    const word *x = a, *y = b;
    const int   c = memcmp(x->s, y->s, x->len < y->len ? x->len : y->len);

    if (c)
        return c;
    return x->len != y->len ? (x->len > y->len) - (x->len < y->len)
                            : (x->id > y->id) - (x->id < y->id);
}

/* The tokens that are in the trie, sorted; the others' bits. */
static uint32_t collect(gram_vocab *v, word *w)
{
    uint32_t n = 0;

    for (uint32_t id = 0; id < v->n_token; id++) {
        size_t      len;
        const char *s = tok_bytes(v->t, (int32_t)id, &len);

        if (tok_is_end(v->t, (int32_t)id))
            v->ends[id / 64] |= UINT64_C(1) << (id % 64);
        else if (tok_is_special(v->t, (int32_t)id) && !tool_is_mark(v->t, (int32_t)id))
            v->special[id / 64] |= UINT64_C(1) << (id % 64);
        else if (len > 0 && len <= MAX_TOKEN_BYTES)
            w[n++] = (word){ .s = s, .len = (uint32_t)len, .id = id };
    }
    qsort(w, n, sizeof(*w), by_bytes);
    return n;
}

static uint32_t common(const word *x, const word *y)
{
    uint32_t i = 0;

    while (i < x->len && i < y->len && x->s[i] == y->s[i])
        i++;
    return i;
}

static void measure(gram_vocab *v, const word *w, uint32_t n)
{
    v->n_sorted = n;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t push = 1;

        for (uint32_t k = 0; k < w[i].len; k++)
            push += w[i].s[k] == '{' || w[i].s[k] == '[';
        v->n_node += w[i].len - (i ? common(&w[i - 1], &w[i]) : 0);
        v->max_bytes = w[i].len > v->max_bytes ? w[i].len : v->max_bytes;
        v->max_push  = push > v->max_push ? push : v->max_push;
    }
}

static void fill(gram_vocab *v, const word *w, uint32_t n)
{
    uint32_t path[MAX_TOKEN_BYTES + 1] = { 0 }, depth = 0, at = 0;

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t same = i ? common(&w[i - 1], &w[i]) : 0;

        while (depth > same)
            v->node[path[depth--]].end = at;
        while (depth < w[i].len) {
            path[++depth] = at;
            v->node[at++] = (gram_trie_node){ .token = i,
                                              .depth = (uint16_t)depth,
                                              .byte  = (uint8_t)w[i].s[depth - 1] };
        }
        v->token[i] = w[i].id;
        v->in_trie[w[i].id / 64] |= UINT64_C(1) << (w[i].id % 64);
    }
    while (depth)
        v->node[path[depth--]].end = at;
    v->node[at] = (gram_trie_node){ .token = n, .end = at };
}

/* ---- what may come inside a string ---------------------------------------------------------- */

typedef struct plain {
    gram_vocab *v;
    uint32_t   *chars; /* [n_token] + 1; 0: it may not come */
    uint32_t    n;
} plain;

static void plain_found(void *ctx, uint32_t token, uint32_t count)
{
    plain *p = ctx;

    p->chars[token] = count + 1;
    p->n++;
    if (count > p->v->max_chars)
        p->v->max_chars = count;
}

static bool sort_plain(gram_vocab *v, const plain *p, const gram *g)
{
    uint32_t at = 0;

    v->plain      = take(v, p->n, sizeof(*v->plain));
    v->plain_off  = take(v, v->max_chars + 2, sizeof(*v->plain_off));
    v->plain_bits = take(v, v->words, sizeof(*v->plain_bits));
    v->plain_exit = take(v, g->n_exit, sizeof(*v->plain_exit));
    if (!v->plain || !v->plain_off || !v->plain_bits || !v->plain_exit)
        return false;
    for (uint32_t i = 0; i < v->n_token; i++)
        if (p->chars[i]) {
            v->plain_off[p->chars[i]]++;
            v->plain_bits[i / 64] |= UINT64_C(1) << (i % 64);
        }
    for (uint32_t k = 0; k <= v->max_chars + 1; k++) { /* counts to ends */
        at += v->plain_off[k];
        v->plain_off[k] = at;
    }
    for (uint32_t i = v->n_token; i-- > 0;)
        if (p->chars[i])
            v->plain[--v->plain_off[p->chars[i]]] = i;
    /* off[k + 1] is now where those of k characters begin */
    memmove(v->plain_off, v->plain_off + 1, (v->max_chars + 1) * sizeof(*v->plain_off));
    v->plain_off[v->max_chars + 1] = p->n;
    memcpy(v->plain_exit, g->exit, g->n_exit * sizeof(*g->exit));
    v->n_plain_exit = g->n_exit;
    return true;
}

/* By the automaton itself, of a grammar that has such a string. */
static kvd_status find_plain(gram_vocab *v, kvd_err *err)
{
    const gram_desc d = { .json_object = true };
    plain           p = { .v = v };
    gram           *g;
    kvd_status      st = gram_open(&g, v, &d, err);

    if (st != KVD_OK)
        return st;
    p.chars = kvd_calloc(v->n_token, sizeof(*p.chars));
    if (!p.chars || !gram_walk_plain(g, plain_found, &p) || !sort_plain(v, &p, g))
        st = kvd_fail(err, KVD_E_NOMEM, 0, "grammar: no memory for the vocabulary");
    kvd_free(p.chars);
    gram_close(g);
    return st;
}

kvd_status gram_vocab_open(gram_vocab **out, const tok *t, kvd_err *err)
{
    gram_vocab *v = kvd_calloc(1, sizeof(*v));
    word       *w = kvd_calloc(tok_n_token(t), sizeof(*w));
    uint32_t    n;
    kvd_status  st = KVD_OK;

    *out = NULL;
    if (v && w) {
        v->t       = t;
        v->n_token = tok_n_token(t);
        v->words   = (v->n_token + 63) / 64;
        v->special = take(v, v->words, sizeof(*v->special));
        v->ends    = take(v, v->words, sizeof(*v->ends));
        v->in_trie = take(v, v->words, sizeof(*v->in_trie));
    }
    if (v && w && v->special && v->ends && v->in_trie) {
        n = collect(v, w);
        measure(v, w, n);
        v->node  = take(v, (size_t)v->n_node + 1, sizeof(*v->node));
        v->token = take(v, n, sizeof(*v->token));
        if (v->node && v->token)
            fill(v, w, n);
    }
    if (!v || !v->node || !v->token)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "grammar: no memory for the vocabulary");
    kvd_free(w);
    if (st == KVD_OK)
        st = find_plain(v, err);
    if (st == KVD_OK)
        *out = v;
    else
        gram_vocab_close(v);
    return st;
}

void gram_vocab_close(gram_vocab *v)
{
    if (!v)
        return;
    kvd_free(v->node);
    kvd_free(v->token);
    kvd_free(v->special);
    kvd_free(v->ends);
    kvd_free(v->in_trie);
    kvd_free(v->plain);
    kvd_free(v->plain_off);
    kvd_free(v->plain_bits);
    kvd_free(v->plain_exit);
    kvd_free(v);
}

uint64_t gram_vocab_heap_bytes(const gram_vocab *v)
{
    return v->heap_bytes + sizeof(*v);
}
