/* SPDX-License-Identifier: Apache-2.0 */
/* gram_build.c - nodes and edges: what all writers of a grammar use.
 *
 * Every function may be called after a failure: it does nothing then. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/gram_impl.h"

kvd_status gram_refuse(gram_build *b, const char *fmt, ...)
{
    char    msg[320];
    va_list ap;

    if (b->st != KVD_OK)
        return b->st;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    if (b->path[0])
        b->st = kvd_fail(b->err, KVD_E_INVAL, 0, "%s: %s (at %s)", b->what, msg, b->path);
    else
        b->st = kvd_fail(b->err, KVD_E_INVAL, 0, "%s: %s%s", b->what, msg,
                         b->root ? " (at its root)" : "");
    return b->st;
}

kvd_status gram_no_memory(gram_build *b)
{
    if (b->st == KVD_OK)
        b->st = kvd_fail(b->err, KVD_E_NOMEM, 0, "%s: no memory for its grammar", b->what);
    return b->st;
}

bool gram_tick(gram_build *b, uint64_t steps)
{
    if (b->st != KVD_OK)
        return false;
    b->steps += steps;
    if (b->steps > GRAM_MAX_STEPS)
        gram_refuse(b, "more than the %u steps that compiling may take", GRAM_MAX_STEPS);
    return b->st == KVD_OK;
}

void gram_build_free(gram_build *b)
{
    kvd_free(b->node);
    kvd_free(b->edge);
    kvd_free(b->rule);
    kvd_free(b->feas);
    kvd_free(b->expanded.slot);
    kvd_free(b->merged.slot);
    kvd_free(b->rules.slot);
    for (uint32_t i = 0; i < b->n_job; i++)
        kvd_free(b->job[i].path);
    kvd_free(b->job);
    json_decref(b->made);
    kvd_json_texts_free(&b->texts);
}

/* Room for one more of an array, at most `most` of them, of which `what` is the name. */
static bool grow(gram_build *b, void **array, uint32_t n, uint32_t *cap, size_t size, uint32_t most,
                 const char *what)
{
    const uint32_t want = *cap ? *cap * 2 : 256;
    void          *p;

    if (!gram_tick(b, 1))
        return false;
    if (n >= most) {
        gram_refuse(b, "more than %u %s", most, what);
        return false;
    }
    if (n < *cap)
        return true;
    p = kvd_realloc(*array, want * size);
    if (!p) {
        gram_no_memory(b);
        return false;
    }
    *array = p;
    *cap   = want;
    return true;
}

uint32_t gram_node_new(gram_build *b)
{
    const uint32_t most = b->max_node ? b->max_node : GRAM_MAX_NODES;

    if (b->n_node >= most) {
        gram_refuse(b, "more than %u states", most);
        return 0;
    }
    if (!grow(b, (void **)&b->node, b->n_node, &b->cap_node, sizeof(*b->node), GRAM_MAX_NODES,
              "states"))
        return 0;
    b->node[b->n_node] = (gram_node){
        .edge = GRAM_NONE, .rule = b->owner, .max = GRAM_NONE, .feas = GRAM_NONE, .need = GRAM_NONE
    };
    return b->n_node++;
}

static void edge_new(gram_build *b, uint32_t from, gram_edge e)
{
    if (!grow(b, (void **)&b->edge, b->n_edge, &b->cap_edge, sizeof(*b->edge), GRAM_MAX_EDGES,
              "edges"))
        return;
    e.next             = b->node[from].edge;
    b->edge[b->n_edge] = e;
    b->node[from].edge = b->n_edge++;
}

void gram_eps(gram_build *b, uint32_t from, uint32_t to)
{
    edge_new(b, from, (gram_edge){ .kind = GRAM_EPS, .to = to });
}

void gram_byte(gram_build *b, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi, bool counts)
{
    edge_new(b, from,
             (gram_edge){ .kind = GRAM_BYTE, .to = to, .lo = lo, .hi = hi, .counts = counts });
}

void gram_call(gram_build *b, uint32_t from, uint32_t to, uint32_t rule)
{
    edge_new(b, from, (gram_edge){ .kind = GRAM_CALL, .to = to, .rule = rule });
}

void gram_ret(gram_build *b, uint32_t from)
{
    edge_new(b, from, (gram_edge){ .kind = GRAM_RET });
}

uint32_t gram_literal(gram_build *b, uint32_t from, const char *s, size_t len)
{
    for (size_t i = 0; i < len && b->st == KVD_OK; i++) {
        const uint32_t to = gram_node_new(b);

        gram_byte(b, from, to, (uint8_t)s[i], (uint8_t)s[i], false);
        from = to;
    }
    return from;
}

uint32_t gram_rule_new(gram_build *b, char open)
{
    if (!grow(b, (void **)&b->rule, b->n_rule, &b->cap_rule, sizeof(*b->rule), GRAM_MAX_RULES,
              "rules"))
        return 0;
    b->rule[b->n_rule] = (gram_rule){ .start  = GRAM_NONE,
                                      .height = GRAM_NONE,
                                      .max    = GRAM_NONE,
                                      .open   = open,
                                      .close  = open == '{'   ? '}'
                                                : open == '[' ? ']'
                                                              : open };
    return b->n_rule++;
}

/* ---- code points ------------------------------------------------------------------- */

/* lo..hi, all of n bytes in UTF-8: split until every byte has a range of its own. */
static void utf8_range(gram_build *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi,
                       size_t n)
{
    char     x[4], y[4];
    uint32_t at = from;

    for (size_t i = 1; i < n; i++) {
        const uint32_t low = (1u << (6 * i)) - 1;

        if ((lo & ~low) == (hi & ~low))
            continue;
        if (lo & low) {
            utf8_range(b, from, to, lo, lo | low, n);
            utf8_range(b, from, to, (lo | low) + 1, hi, n);
            return;
        }
        if ((hi & low) != low) {
            utf8_range(b, from, to, lo, (hi & ~low) - 1, n);
            utf8_range(b, from, to, hi & ~low, hi, n);
            return;
        }
    }
    utf8_encode(lo, x);
    utf8_encode(hi, y);
    for (size_t i = 0; i < n; i++) {
        const uint32_t next = i + 1 < n ? gram_node_new(b) : to;

        gram_byte(b, at, next, (uint8_t)x[i], (uint8_t)y[i], i == 0);
        at = next;
    }
}

/* A code point that JSON wants escaped, in its shortest form. */
static void escaped(gram_build *b, uint32_t from, uint32_t to, uint32_t cp)
{
    static const char letter[] = "btn?fr"; /* of 8 .. 13 */
    char              text[8];
    uint32_t          at = gram_node_new(b);

    if (cp == '"' || cp == '\\')
        snprintf(text, sizeof(text), "%c", (char)cp);
    else if (cp >= 8 && cp <= 13 && cp != 11)
        snprintf(text, sizeof(text), "%c", letter[cp - 8]);
    else
        snprintf(text, sizeof(text), "u%04x", (unsigned)cp);
    gram_byte(b, from, at, '\\', '\\', true);
    at = gram_literal(b, at, text, strlen(text) - 1);
    gram_byte(b, at, to, (uint8_t)text[strlen(text) - 1], (uint8_t)text[strlen(text) - 1], false);
}

void gram_points(gram_build *b, uint32_t from, uint32_t to, gram_range r)
{
    static const gram_range part[] = { { 0x20, 0x21 },       { 0x23, 0x5b },    { 0x5d, 0x7f },
                                       { 0x80, 0x7ff },      { 0x800, 0xd7ff }, { 0xe000, 0xffff },
                                       { 0x10000, 0x10ffff } };

    for (uint32_t cp = r.lo; cp < 0x20 && cp <= r.hi; cp++)
        escaped(b, from, to, cp);
    if (r.lo <= '"' && '"' <= r.hi)
        escaped(b, from, to, '"');
    if (r.lo <= '\\' && '\\' <= r.hi)
        escaped(b, from, to, '\\');
    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        const uint32_t lo = r.lo > part[i].lo ? r.lo : part[i].lo;
        const uint32_t hi = r.hi < part[i].hi ? r.hi : part[i].hi;

        if (lo <= hi)
            utf8_range(b, from, to, lo, hi, i < 3 ? 1 : i == 3 ? 2 : i < 6 ? 3 : 4);
    }
}

/* The same for code points that need no escape. */
static void unescaped(gram_build *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi)
{
    static const gram_range part[] = { { 0x20, '"' - 1 },
                                       { '"' + 1, '\\' - 1 },
                                       { '\\' + 1, 0x10ffff } };

    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        const uint32_t x = lo > part[i].lo ? lo : part[i].lo, y = hi < part[i].hi ? hi : part[i].hi;

        if (x <= y)
            gram_points(b, from, to, (gram_range){ x, y });
    }
}

/* ---- string rules ------------------------------------------------------------------- */

/* A hexadecimal digit of value lo..hi. */
static void hex(gram_build *b, uint32_t from, uint32_t to, unsigned lo, unsigned hi)
{
    const unsigned a = lo > 10 ? lo : 10;

    if (lo < 10)
        gram_byte(b, from, to, (uint8_t)('0' + lo), (uint8_t)('0' + (hi < 9 ? hi : 9)), false);
    if (hi < 10)
        return;
    gram_byte(b, from, to, (uint8_t)('a' + a - 10), (uint8_t)('a' + hi - 10), false);
    gram_byte(b, from, to, (uint8_t)('A' + a - 10), (uint8_t)('A' + hi - 10), false);
}

/* Behind \u: any code point but zero; a high surrogate with its low one. */
static void unicode_escape(gram_build *b, uint32_t u, uint32_t to)
{
    const uint32_t h1 = gram_node_new(b), h2 = gram_node_new(b), h3 = gram_node_new(b);
    const uint32_t z1 = gram_node_new(b), z2 = gram_node_new(b), z3 = gram_node_new(b);
    const uint32_t d1 = gram_node_new(b), s2 = gram_node_new(b), s3 = gram_node_new(b);
    uint32_t       low = gram_node_new(b), l1;

    hex(b, u, h1, 1, 12);
    hex(b, u, h1, 14, 15);
    hex(b, h1, h2, 0, 15);
    hex(b, h2, h3, 0, 15);
    hex(b, h3, to, 0, 15);
    hex(b, u, z1, 0, 0);
    hex(b, z1, h2, 1, 15);
    hex(b, z1, z2, 0, 0);
    hex(b, z2, h3, 1, 15);
    hex(b, z2, z3, 0, 0);
    hex(b, z3, to, 1, 15);
    hex(b, u, d1, 13, 13);
    hex(b, d1, h2, 0, 7);
    hex(b, d1, s2, 8, 11);
    hex(b, s2, s3, 0, 15);
    hex(b, s3, low, 0, 15);
    low = gram_literal(b, low, "\\u", 2);
    l1  = gram_node_new(b);
    hex(b, low, l1, 13, 13);
    hex(b, l1, h2, 12, 15);
}

uint32_t gram_plain_string(gram_build *b, uint32_t min, uint32_t max)
{
    const uint32_t was = b->owner, rule = gram_rule_new(b, '"');
    uint32_t       start, body, shut, slash, u;

    b->owner = rule;
    start    = gram_node_new(b);
    body     = gram_node_new(b);
    shut     = gram_node_new(b);
    slash    = gram_node_new(b);
    u        = gram_node_new(b);
    if (b->st == KVD_OK) {
        gram_eps(b, start, body);
        gram_eps(b, start, shut);
        if (min <= max)
            gram_ret(b, shut);
        unescaped(b, body, start, 0x20, 0x10ffff);
        gram_byte(b, body, slash, '\\', '\\', true);
        for (const char *s = "\"\\/bfnrt"; *s; s++)
            gram_byte(b, slash, start, (uint8_t)*s, (uint8_t)*s, false);
        gram_byte(b, slash, u, 'u', 'u', false);
        unicode_escape(b, u, start);
    }
    if (b->st == KVD_OK) {
        b->node[shut].min = min;
        if (max == 0)
            b->node[body].min = GRAM_NONE; /* never */
        else if (max != GRAM_NONE)
            b->node[body].max = max - 1;
        b->rule[rule].start = start;
        b->rule[rule].plain = true;
        b->rule[rule].min   = min;
        b->rule[rule].max   = max;
        b->rule[rule].body  = body;
        b->rule[rule].shut  = shut;
    }
    b->owner = was;
    return rule;
}

/* The node behind a byte that words share, if there is one. */
static uint32_t shared(const gram_build *b, uint32_t from, uint8_t byte)
{
    for (uint32_t i = b->node[from].edge; i != GRAM_NONE; i = b->edge[i].next)
        if (b->edge[i].kind == GRAM_BYTE && b->edge[i].lo == byte)
            return b->edge[i].to;
    return GRAM_NONE;
}

/* What a byte of a string is inside its quotes, and whether it begins a character. */
size_t gram_quoted(unsigned char c, char out[16], bool *first)
{
    static const char name[] = "btn?fr"; /* of 8 .. 13 */
    size_t            n      = 1;

    *first = (c & 0xc0) != 0x80;
    if (c == '"' || c == '\\') {
        out[0] = '\\';
        out[1] = (char)c;
        return 2;
    }
    out[0] = (char)c;
    if (c >= 8 && c <= 13 && c != 11) {
        out[0] = '\\';
        out[1] = name[c - 8];
        n      = 2;
    } else if (c < 0x20) {
        n = (size_t)snprintf(out, 16, "\\u%04x", c);
    }
    return n;
}

uint32_t gram_words(gram_build *b, json_t *const *word, size_t n)
{
    const uint32_t was = b->owner, rule = gram_rule_new(b, '"');
    uint32_t       start;

    b->owner = rule;
    start    = gram_node_new(b);
    for (size_t i = 0; i < n && b->st == KVD_OK; i++) {
        const char  *s   = json_string_value(word[i]);
        const size_t len = json_string_length(word[i]);
        uint32_t     at  = start;

        for (size_t k = 0; k < len && b->st == KVD_OK; k++) {
            char         out[16];
            bool         first;
            const size_t m = gram_quoted((unsigned char)s[k], out, &first);

            for (size_t j = 0; j < m && b->st == KVD_OK; j++) {
                uint32_t to = shared(b, at, (uint8_t)out[j]);

                if (to == GRAM_NONE) {
                    to = gram_node_new(b);
                    gram_byte(b, at, to, (uint8_t)out[j], (uint8_t)out[j], first && j == 0);
                }
                at = to;
            }
        }
        gram_ret(b, at);
    }
    if (b->st == KVD_OK)
        b->rule[rule].start = start;
    b->owner = was;
    return rule;
}

/* ---- keys that are none of a list ----------------------------------------------------- */

typedef struct key_list {
    const char **key;
    size_t      *len;
    size_t       n;
} key_list;

/* Strings that follow `depth` bytes of the keys [lo, hi), sorted, and are not one of them: any
 * character that no key has next leads to `any`. */
static void other_from(gram_build *b, const key_list *k, size_t lo, size_t hi, size_t depth,
                       uint32_t at, uint32_t any, int level)
{
    uint32_t next = 0x20; /* code points below were dealt with */
    bool     ends = false;

    if (level > 200) {
        gram_refuse(b, "a property's name is longer than 200 characters, beside others");
        return;
    }
    for (size_t i = lo; i < hi && b->st == KVD_OK;) {
        uint32_t cp, child;
        size_t   n, j = i;

        if (k->len[i] == depth) {
            ends = true;
            i++;
            continue;
        }
        n = utf8_decode(k->key[i] + depth, k->len[i] - depth, &cp);
        while (j < hi && k->len[j] >= depth + n &&
               memcmp(k->key[j] + depth, k->key[i] + depth, n) == 0)
            j++;
        if (cp >= 0x20 && cp != '"' && cp != '\\') {
            if (cp > next)
                unescaped(b, at, any, next, cp - 1);
            child = gram_node_new(b);
            gram_points(b, at, child, (gram_range){ cp, cp });
            other_from(b, k, i, j, depth + n, child, any, level + 1);
            next = cp + 1;
        }
        i = j;
    }
    unescaped(b, at, any, next, 0x10ffff);
    if (!ends)
        gram_ret(b, at);
}

static void sort_keys(key_list *k)
{
    for (size_t gap = k->n / 2; gap; gap /= 2) /* Shell's */
        for (size_t i = gap; i < k->n; i++)
            for (size_t j = i; j >= gap; j -= gap) {
                const char  *x = k->key[j - gap], *y = k->key[j];
                const size_t nx = k->len[j - gap], ny = k->len[j];
                const int    c = memcmp(x, y, nx < ny ? nx : ny);

                if (c < 0 || (c == 0 && nx <= ny))
                    break;
                k->key[j - gap] = y;
                k->key[j]       = x;
                k->len[j - gap] = ny;
                k->len[j]       = nx;
            }
}

uint32_t gram_other_keys(gram_build *b, json_t *object)
{
    const size_t   n   = json_object_size(object);
    const uint32_t was = b->owner, rule = gram_rule_new(b, '"');
    key_list       k = { .key = kvd_calloc(n + 1, sizeof(*k.key)),
                         .len = kvd_calloc(n + 1, sizeof(*k.len)) };
    uint32_t       start, any;

    b->owner = rule;
    start    = gram_node_new(b);
    any      = gram_node_new(b);
    if (!k.key || !k.len)
        gram_no_memory(b);
    for (void *it = json_object_iter(object); it && b->st == KVD_OK;
         it       = json_object_iter_next(object, it)) {
        k.key[k.n]   = json_object_iter_key(it);
        k.len[k.n++] = json_object_iter_key_len(it);
    }
    if (b->st == KVD_OK && gram_tick(b, k.n)) {
        sort_keys(&k);
        other_from(b, &k, 0, k.n, 0, start, any, 0);
        unescaped(b, any, any, 0x20, 0x10ffff);
        gram_ret(b, any);
        b->rule[rule].start = start;
    }
    kvd_free(k.key);
    kvd_free(k.len);
    b->owner = was;
    return rule;
}

/* ---- tables -------------------------------------------------------------------------- */

static size_t slot_of(const gram_map *m, const void *a, const void *key2)
{
    const uint64_t h =
        ((uint64_t)(uintptr_t)a * 3 + (uint64_t)(uintptr_t)key2) * UINT64_C(0x9e3779b97f4a7c15);
    size_t i = (size_t)(h >> 32) & (m->cap - 1);

    while (m->slot[i].a && (m->slot[i].a != a || m->slot[i].b != key2))
        i = (i + 1) & (m->cap - 1);
    return i;
}

gram_pair *gram_map_find(const gram_map *m, const void *a, const void *key2)
{
    gram_pair *p = m->cap ? &m->slot[slot_of(m, a, key2)] : NULL;

    return p && p->a ? p : NULL;
}

gram_pair *gram_map_add(gram_build *b, gram_map *m, const void *a, const void *key2)
{
    gram_pair *p;

    if (!gram_tick(b, 1))
        return NULL;
    if (2 * m->n >= m->cap) {
        gram_map bigger = { .cap = m->cap ? 2 * m->cap : 64 };

        bigger.slot = kvd_calloc(bigger.cap, sizeof(*bigger.slot));
        if (!bigger.slot) {
            gram_no_memory(b);
            return NULL;
        }
        for (uint32_t i = 0; i < m->cap; i++)
            if (m->slot[i].a)
                bigger.slot[slot_of(&bigger, m->slot[i].a, m->slot[i].b)] = m->slot[i];
        bigger.n = m->n;
        kvd_free(m->slot);
        *m = bigger;
    }
    p = &m->slot[slot_of(m, a, key2)];
    if (!p->a)
        m->n++;
    p->a = a;
    p->b = key2;
    return p;
}
