/* SPDX-License-Identifier: Apache-2.0 */
/* gram_until.c - free text up to a mark, and reasoning.
 *
 * Text is an automaton that looks for marks as Aho and Corasick do: a state is the longest end of
 * what has come with which a mark begins. */
#include <string.h>

#include "text/gram_impl.h"
#include "text/tool_form.h"

typedef struct place { /* the first n bytes of mark i have come */
    size_t i, n;
} place;

typedef struct until {
    gram_build     *b;
    const tok_str  *mark;
    const uint32_t *to;
    size_t          n;
    uint32_t        node[GRAM_MAX_MARKS][TOOL_MARK_MAX]; /* of places */
} until;

/* Equal beginnings are one place, that of the first mark. */
static place place_of(const until *u, size_t i, size_t n)
{
    for (size_t k = 0; k < i; k++)
        if (u->mark[k].len >= n && memcmp(u->mark[k].data, u->mark[i].data, n) == 0)
            return (place){ .i = k, .n = n };
    return (place){ .i = i, .n = n };
}

/* Where a byte leads. */
static place next_place(const until *u, place at, char byte)
{
    char text[TOOL_MARK_MAX + 1];

    memcpy(text, u->mark[at.i].data, at.n);
    text[at.n] = byte;
    for (size_t n = at.n + 1; n > 0; n--)
        for (size_t i = 0; i < u->n; i++)
            if (u->mark[i].len >= n && u->mark[i].data[n - 1] == byte &&
                memcmp(u->mark[i].data, text + at.n + 1 - n, n) == 0)
                return place_of(u, i, n);
    return (place){ 0 };
}

static uint32_t target(const until *u, place p)
{
    return p.n == u->mark[p.i].len ? u->to[p.i] : u->node[p.i][p.n];
}

/* Edges of all bytes but those of `but` from a node at a place. */
static void text_edges(until *u, uint32_t from, place at, const char *but)
{
    uint32_t lo = 0, to = GRAM_NONE;

    for (uint32_t c = 0; c <= 256; c++) {
        const bool     out  = c == 256 || (c && but && strchr(but, (int)c));
        const uint32_t next = out ? GRAM_NONE : target(u, next_place(u, at, (char)c));

        if (c && next != to) {
            if (to != GRAM_NONE)
                gram_byte(u->b, from, to, (uint8_t)lo, (uint8_t)(c - 1), false);
            lo = c;
        }
        to = next;
    }
}

void gram_until(gram_build *b, uint32_t start, const tok_str *mark, const uint32_t *to, size_t n,
                uint8_t flags, const char *first, const char *seen)
{
    until u  = { .b = b, .mark = mark, .to = to, .n = n };
    place at = { 0 };

    kvd_assert(n > 0 && n <= GRAM_MAX_MARKS);
    for (size_t i = 0; i < n; i++) {
        kvd_assert(mark[i].len > 0 && mark[i].len < TOOL_MARK_MAX);
        for (size_t k = 0; k < mark[i].len; k++)
            if (place_of(&u, i, k).i == i)
                u.node[i][k] = gram_node_new(b);
    }
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < mark[i].len && gram_tick(b, 256); k++)
            if (place_of(&u, i, k).i == i) {
                b->node[u.node[i][k]].flags |= flags;
                text_edges(&u, u.node[i][k], (place){ .i = i, .n = k }, NULL);
            }
    if (b->st != KVD_OK)
        return;
    for (const char *s = seen; *s && at.n < mark[at.i].len; s++)
        at = next_place(&u, at, *s);
    if (!first) {
        gram_eps(b, start, target(&u, at));
        return;
    }
    b->node[start].flags |= flags;
    text_edges(&u, start, at, first);
}

static uint32_t literal(gram_build *b, uint32_t from, const char *s)
{
    const tok_str t = tool_trim(s);

    return gram_literal(b, from, t.data, t.len);
}

uint32_t gram_think(gram_build *b, uint32_t start, const gram_desc *d)
{
    const think_form *f     = think_form_get(d->reasoning);
    const bool        may   = d->tools_json && d->choice == KVD_TOOL_CHOICE_AUTO;
    uint32_t          think = gram_node_new(b), shut = gram_node_new(b), behind, out;
    tok_str           close;

    if (!f || d->state == KVD_REASONING_CANNOT || b->st != KVD_OK)
        return start;
    b->node[shut].flags |= GRAM_WHITE;
    close = tool_trim(f->close);
    gram_until(b, think, &close, &shut, 1, may ? GRAM_TEXT | GRAM_ACCEPT : GRAM_TEXT, NULL, "");
    behind = literal(b, shut, f->behind);
    out    = gram_node_new(b);
    gram_eps(b, d->state == KVD_REASONING_OPEN ? start : literal(b, start, f->open), think);
    if (d->tools_json) { /* the form of calls has its own head */
        if (d->state != KVD_REASONING_OPEN)
            gram_eps(b, start, out);
        gram_eps(b, behind, out);
        return out;
    }
    if (d->state != KVD_REASONING_OPEN)
        gram_eps(b, literal(b, start, f->answer), out);
    gram_eps(b, literal(b, behind, f->answer), out);
    return out;
}
