/* SPDX-License-Identifier: Apache-2.0 */
/* tok_merge.c - the merge loop that BPE and SPM share.
 *
 * Symbols are ids; a pair of neighbours merges if the table knows it, lowest rank first, leftmost
 * of equal ranks.  Short words scan an array of ranks; long ones keep a heap of (rank, left),
 * where an entry is dropped when its pair has changed meanwhile: O(n log n), since each merge adds
 * at most two entries.
 * Thread: the scratch's owner. */
#include "text/tok_impl.h"

#define SHORT_WORD 32

static kvd_status grow(void **p, size_t *cap, size_t n, size_t size, kvd_err *err)
{
    if (n <= *cap)
        return KVD_OK;
    const size_t want = n + n / 2 + 64;
    void        *q    = kvd_realloc(*p, want * size);
    if (!q)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory for %zu symbols", want);
    *p   = q;
    *cap = want;
    return KVD_OK;
}

kvd_status tok_scratch_syms(tok_scratch *sc, size_t n, kvd_err *err)
{
    void            *p  = sc->sym;
    const kvd_status st = grow(&p, &sc->sym_cap, n, sizeof(*sc->sym), err);

    sc->sym = p;
    return st;
}

void tok_scratch_free(tok_scratch *sc)
{
    kvd_free(sc->sym);
    kvd_free(sc->node);
    kvd_free(sc->heap);
    *sc = (tok_scratch){ 0 };
}

static uint32_t rank_of(const tok *t, uint32_t left, uint32_t right)
{
    const tok_merge *m = left == TOK_NONE ? NULL : tok_merge_find(t, left, right);

    return m ? m->rank : TOK_NONE;
}

static size_t merge_short(const tok *t, tok_sym *sym, size_t n)
{
    uint32_t rank[SHORT_WORD];

    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = rank_of(t, sym[i].id, sym[i + 1].id);
    while (n > 1) {
        size_t best = 0;

        for (size_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best])
                best = i;
        }
        if (rank[best] == TOK_NONE)
            break;
        sym[best].id = tok_merge_find(t, sym[best].id, sym[best + 1].id)->id;
        n--;
        for (size_t i = best + 1; i < n; i++) {
            sym[i]      = sym[i + 1];
            rank[i - 1] = rank[i];
        }
        if (best + 1 < n)
            rank[best] = rank_of(t, sym[best].id, sym[best + 1].id);
        if (best > 0)
            rank[best - 1] = rank_of(t, sym[best - 1].id, sym[best].id);
    }
    return n;
}

/* A 4-ary heap: fewer cache misses than a binary one on the long runs it is for. */
static void heap_push(tok_scratch *sc, uint64_t key)
{
    size_t i = sc->heap_len++;

    while (i > 0 && sc->heap[(i - 1) / 4] > key) {
        sc->heap[i] = sc->heap[(i - 1) / 4];
        i           = (i - 1) / 4;
    }
    sc->heap[i] = key;
}

static uint64_t heap_pop(tok_scratch *sc)
{
    uint64_t      *h   = sc->heap;
    const uint64_t top = h[0], key = h[--sc->heap_len];
    const size_t   n = sc->heap_len;
    size_t         i = 0;

    for (;;) {
        const size_t first = 4 * i + 1, last = first + 4 < n ? first + 4 : n;
        size_t       best = first;

        if (first >= n)
            break;
        for (size_t c = first + 1; c < last; c++)
            best = h[c] < h[best] ? c : best;
        if (h[best] >= key)
            break;
        h[i] = h[best];
        i    = best;
    }
    if (n > 0)
        h[i] = key;
    return top;
}

/* Looks up what a node and its neighbour merge to, and queues it. */
static void queue_pair(const tok *t, tok_scratch *sc, uint32_t left)
{
    tok_node        *n = &sc->node[left];
    const tok_merge *m = n->id == TOK_NONE || n->next == TOK_NONE
                             ? NULL
                             : tok_merge_find(t, n->id, sc->node[n->next].id);

    n->rank = TOK_NONE;
    if (m) {
        n->rank   = m->rank;
        n->merged = m->id;
        heap_push(sc, (uint64_t)m->rank << 32 | left);
    }
}

static size_t merge_long(const tok *t, tok_scratch *sc, size_t n)
{
    tok_node *node = sc->node;

    sc->heap_len = 0;
    for (size_t i = 0; i < n; i++) {
        node[i] = (tok_node){ .id   = sc->sym[i].id,
                              .off  = sc->sym[i].off,
                              .prev = i ? (uint32_t)i - 1 : TOK_NONE,
                              .next = i + 1 < n ? (uint32_t)i + 1 : TOK_NONE };
    }
    for (size_t i = 0; i < n; i++)
        queue_pair(t, sc, (uint32_t)i);
    while (sc->heap_len > 0) {
        const uint64_t key  = heap_pop(sc);
        tok_node      *left = &node[(uint32_t)key];

        if (left->rank != (uint32_t)(key >> 32))
            continue; /* merged away, or one of the two has changed */
        tok_node *right = &node[left->next];
        right->rank     = TOK_NONE;
        left->id        = left->merged;
        left->next      = right->next;
        if (left->next != TOK_NONE)
            node[left->next].prev = (uint32_t)key;
        queue_pair(t, sc, (uint32_t)key);
        if (left->prev != TOK_NONE)
            queue_pair(t, sc, left->prev);
    }
    size_t out = 0;
    for (uint32_t i = 0; i != TOK_NONE; i = node[i].next)
        sc->sym[out++] = (tok_sym){ .id = node[i].id, .off = node[i].off };
    return out;
}

kvd_status tok_merge_all(const tok *t, tok_scratch *sc, size_t *n, kvd_err *err)
{
    if (*n <= SHORT_WORD) {
        *n = merge_short(t, sc->sym, *n);
        return KVD_OK;
    }
    void      *p  = sc->node;
    kvd_status st = grow(&p, &sc->node_cap, *n, sizeof(*sc->node), err);
    sc->node      = p;
    KVD_TRY(st);
    /* n - 1 pairs at first; each of at most n - 1 merges takes one entry out and puts two in. */
    p        = sc->heap;
    st       = grow(&p, &sc->heap_cap, *n * 2, sizeof(*sc->heap), err);
    sc->heap = p;
    KVD_TRY(st);
    *n = merge_long(t, sc, *n);
    return KVD_OK;
}
