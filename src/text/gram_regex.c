/* SPDX-License-Identifier: Apache-2.0 */
/* gram_regex.c - regular expressions to a deterministic automaton over the bytes of a JSON string.
 *
 * The subset: literals, ., [..], [^..], \d \D \w \W \s \S, escapes of punctuation, \t \n \r \f \v
 * \0 \xHH \uHHHH, groups ( ) and (?: ), |, the quantifiers * + ? {n} {n,} {n,m} (a ? behind changes
 * nothing), ^ and $ at the ends of a top-level alternative.  Everything else is refused by name.
 *
 * A quantified atom is read once for every copy that it needs.  Nodes are those of gram_build.c, in
 * a builder of their own. */
#include <string.h>

#include "text/gram_impl.h"

#define MAX_GROUPS        32 /* in each other */
#define MAX_CLASS         256
#define MAX_POINT         0x10ffffu
#define MAX_PATTERN_NODES 40000u

typedef struct regex {
    gram_build *b;   /* of the pattern's own nodes */
    gram_build *out; /* whose failure is told */
    const char *s;
    size_t      len, pos;
    int         depth;
    gram_range  range[MAX_CLASS];
    uint32_t    n_range;
} regex;

static bool failed(const regex *r)
{
    return r->b->st != KVD_OK || r->out->st != KVD_OK;
}

static void refuse(regex *r, const char *what)
{
    if (!failed(r))
        gram_refuse(r->out, "pattern: %s at byte %zu of '%.60s'", what, r->pos, r->s);
}

static bool more(const regex *r)
{
    return r->pos < r->len && !failed(r);
}

static bool eat(regex *r, char c)
{
    if (!more(r) || r->s[r->pos] != c)
        return false;
    r->pos++;
    return true;
}

/* ---- classes ------------------------------------------------------------------------- */

static void add_range(regex *r, uint32_t lo, uint32_t hi)
{
    if (r->n_range == MAX_CLASS) {
        refuse(r, "a class of more than 256 ranges");
        return;
    }
    r->range[r->n_range++] = (gram_range){ lo, hi };
}

/* Sorts and joins the ranges from `from` on; then what is not in them, if wanted. */
static void tidy(regex *r, uint32_t from, bool negate)
{
    gram_range *x = r->range;
    uint32_t    n = from, next = 0, end = r->n_range;
    gram_range  gap[MAX_CLASS];
    uint32_t    n_gap = 0;

    for (uint32_t i = from + 1; i < end; i++)
        for (uint32_t j = i; j > from && x[j].lo < x[j - 1].lo; j--) {
            const gram_range t = x[j];

            x[j]     = x[j - 1];
            x[j - 1] = t;
        }
    for (uint32_t i = from; i < end; i++) {
        if (n > from && x[i].lo <= x[n - 1].hi + 1)
            x[n - 1].hi = x[i].hi > x[n - 1].hi ? x[i].hi : x[n - 1].hi;
        else
            x[n++] = x[i];
    }
    r->n_range = n;
    if (!negate)
        return;
    for (uint32_t i = from; i < n; i++) {
        if (x[i].lo > next)
            gap[n_gap++] = (gram_range){ next, x[i].lo - 1 };
        next = x[i].hi + 1;
    }
    r->n_range = from;
    for (uint32_t i = 0; i < n_gap; i++)
        add_range(r, gap[i].lo, gap[i].hi);
    if (next <= MAX_POINT)
        add_range(r, next, MAX_POINT);
}

/* \d, \w, \s and their opposites. */
static bool add_named(regex *r, char c)
{
    const uint32_t from = r->n_range;

    switch (c) {
    case 'd':
    case 'D':
        add_range(r, '0', '9');
        break;
    case 'w':
    case 'W':
        add_range(r, '0', '9');
        add_range(r, 'A', 'Z');
        add_range(r, '_', '_');
        add_range(r, 'a', 'z');
        break;
    case 's':
    case 'S':
        add_range(r, '\t', '\r');
        add_range(r, ' ', ' ');
        add_range(r, 0xa0, 0xa0);
        add_range(r, 0x1680, 0x1680);
        add_range(r, 0x2000, 0x200a);
        add_range(r, 0x2028, 0x2029);
        add_range(r, 0x202f, 0x202f);
        add_range(r, 0x205f, 0x205f);
        add_range(r, 0x3000, 0x3000);
        add_range(r, 0xfeff, 0xfeff);
        break;
    default:
        return false;
    }
    tidy(r, from, c < 'a');
    return true;
}

static uint32_t hex_digits(regex *r, int n)
{
    uint32_t x = 0;

    for (; n; n--) {
        const char c = more(r) ? r->s[r->pos] : '?';
        const int  d = c >= '0' && c <= '9'   ? c - '0'
                       : c >= 'a' && c <= 'f' ? c - 'a' + 10
                       : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                              : -1;

        if (d < 0) {
            refuse(r, "an escape that lacks hexadecimal digits");
            return 0;
        }
        x = x * 16 + (uint32_t)d;
        r->pos++;
    }
    return x;
}

/* Behind a backslash: one code point. */
static uint32_t escape(regex *r)
{
    static const char from[] = "tnrfv0", to[] = "\t\n\r\f\v";
    const char        c     = more(r) ? r->s[r->pos] : 0;
    const char       *found = c ? strchr(from, c) : NULL;
    uint32_t          x;

    if (!c) {
        refuse(r, "a backslash at the end");
        return 0;
    }
    r->pos++;
    if (found)
        return (unsigned char)to[found - from];
    if (c == 'x')
        return hex_digits(r, 2);
    if (c == 'u') {
        x = hex_digits(r, 4);
        if (x >= 0xd800 && x <= 0xdbff && r->pos + 6 <= r->len && r->s[r->pos] == '\\' &&
            r->s[r->pos + 1] == 'u') {
            r->pos += 2;
            x = 0x10000 + ((x & 0x3ff) << 10) + (hex_digits(r, 4) & 0x3ff);
        }
        return x;
    }
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
        r->pos--;
        refuse(r, c == 'b' || c == 'B'   ? "\\b is not supported:"
                  : c >= '1' && c <= '9' ? "a back-reference is not supported:"
                  : c == 'p' || c == 'P' ? "\\p{..} is not supported:"
                                         : "an escape that is not supported:");
        return 0;
    }
    r->pos--;
    r->pos += utf8_decode(r->s + r->pos, r->len - r->pos, &x);
    return x;
}

/* One code point of a class or of text; false: a named class was added instead. */
static bool point(regex *r, uint32_t *cp)
{
    if (eat(r, '\\')) {
        if (more(r) && add_named(r, r->s[r->pos])) {
            r->pos++;
            return false;
        }
        *cp = escape(r);
        return true;
    }
    r->pos += utf8_decode(r->s + r->pos, r->len - r->pos, cp);
    return true;
}

/* Behind [. */
static void class_of(regex *r)
{
    const bool negate = eat(r, '^');

    while (more(r) && r->s[r->pos] != ']') {
        uint32_t lo, hi;

        if (r->s[r->pos] == '\\' && r->pos + 1 < r->len && r->s[r->pos + 1] == 'b') {
            r->pos += 2;
            add_range(r, '\b', '\b');
            continue;
        }
        if (!point(r, &lo))
            continue;
        hi = lo;
        if (r->pos + 1 < r->len && r->s[r->pos] == '-' && r->s[r->pos + 1] != ']') {
            r->pos++;
            if (!point(r, &hi))
                refuse(r, "a range that ends in a class");
            else if (hi < lo)
                refuse(r, "a range that goes backwards");
        }
        add_range(r, lo, hi);
    }
    if (!eat(r, ']'))
        refuse(r, "a class without ]");
    tidy(r, 0, negate);
}

static void emit_class(regex *r, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < r->n_range && !failed(r); i++)
        gram_points(r->b, from, to, r->range[i]);
}

/* ---- expressions ---------------------------------------------------------------------- */

static void alternatives(regex *r, uint32_t from, uint32_t to, bool top);

/* Behind (. */
static void group(regex *r, uint32_t from, uint32_t to)
{
    if (eat(r, '?') && !eat(r, ':')) {
        refuse(r, "a group of this kind ((?=, (?!, (?<) is not supported:");
        return;
    }
    if (++r->depth > MAX_GROUPS)
        refuse(r, "more than 32 groups in each other");
    else
        alternatives(r, from, to, false);
    r->depth--;
    if (!eat(r, ')'))
        refuse(r, "a group without )");
}

static void atom(regex *r, uint32_t from, uint32_t to)
{
    const char c = r->s[r->pos];
    uint32_t   cp;

    r->n_range = 0;
    if (c == '(') {
        r->pos++;
        group(r, from, to);
        return;
    }
    if (c == '^' || c == '$') {
        refuse(r, "^ and $ are supported at the ends of the pattern only:");
        return;
    }
    if (c == '*' || c == '+' || c == '?' || c == '{') {
        refuse(r, "a quantifier behind nothing");
        return;
    }
    if (eat(r, '[')) {
        class_of(r);
    } else if (eat(r, '.')) {
        add_range(r, '\n', '\n');
        add_range(r, '\r', '\r');
        add_range(r, 0x2028, 0x2029);
        tidy(r, 0, true);
    } else if (point(r, &cp)) {
        add_range(r, cp, cp);
    }
    emit_class(r, from, to);
}

static uint32_t decimal(regex *r)
{
    uint32_t x = 0;

    if (!more(r) || r->s[r->pos] < '0' || r->s[r->pos] > '9')
        refuse(r, "{ that is no quantifier (write \\{)");
    for (; more(r) && r->s[r->pos] >= '0' && r->s[r->pos] <= '9'; r->pos++) {
        x = x * 10 + (uint32_t)(r->s[r->pos] - '0');
        if (x > GRAM_MAX_REPEAT)
            refuse(r, "more than 1000 repetitions");
    }
    return x;
}

/* How often what stands before may come; max GRAM_NONE: any number of times. */
static void quantifier(regex *r, uint32_t *min, uint32_t *max)
{
    *min = *max = 1;
    if (eat(r, '*')) {
        *min = 0;
        *max = GRAM_NONE;
    } else if (eat(r, '+')) {
        *max = GRAM_NONE;
    } else if (eat(r, '?')) {
        *min = 0;
    } else if (eat(r, '{')) {
        *min = *max = decimal(r);
        if (eat(r, ','))
            *max = more(r) && r->s[r->pos] == '}' ? GRAM_NONE : decimal(r);
        if (!eat(r, '}'))
            refuse(r, "a quantifier without }");
        if (*max < *min)
            refuse(r, "a quantifier that goes backwards");
    } else {
        return;
    }
    (void)eat(r, '?'); /* lazy: the language is the same */
    if (more(r) && r->s[r->pos] == '+')
        refuse(r, "a possessive quantifier is not supported:");
}

/* An atom with its quantifier; returns the node behind. */
static uint32_t repeated(regex *r, uint32_t from)
{
    const size_t begin = r->pos;
    uint32_t     a = gram_node_new(r->b), z = gram_node_new(r->b), to, min, max;
    size_t       end;

    atom(r, a, z);
    quantifier(r, &min, &max);
    end = r->pos;
    to  = gram_node_new(r->b);
    if (min == 0)
        gram_eps(r->b, from, to);
    if (max == 0)
        return to;
    for (uint32_t i = 0;; i++) { /* from -a..z-> once, then again from z */
        const bool last = max == GRAM_NONE ? i + 1 >= min : i + 1 == max;

        gram_eps(r->b, from, a);
        if (i + 1 >= min)
            gram_eps(r->b, z, to);
        if (last && max == GRAM_NONE)
            gram_eps(r->b, z, a);
        if (last || failed(r))
            break;
        from   = z;
        a      = gram_node_new(r->b);
        z      = gram_node_new(r->b);
        r->pos = begin;
        atom(r, a, z);
        r->pos = end;
    }
    return to;
}

static void anything(regex *r, uint32_t at)
{
    gram_points(r->b, at, at, (gram_range){ 0, MAX_POINT });
}

static void sequence(regex *r, uint32_t from, uint32_t to, bool top)
{
    uint32_t at = gram_node_new(r->b);

    gram_eps(r->b, from, at);
    if (top && !eat(r, '^'))
        anything(r, at);
    while (more(r) && r->s[r->pos] != '|' && r->s[r->pos] != ')') {
        const size_t next = r->pos + 1;

        if (top && r->s[r->pos] == '$' && (next == r->len || r->s[next] == '|')) {
            r->pos++;
            gram_eps(r->b, at, to);
            return;
        }
        at = repeated(r, at);
    }
    if (top) {
        const uint32_t tail = gram_node_new(r->b);

        gram_eps(r->b, at, tail);
        anything(r, tail);
        at = tail;
    }
    gram_eps(r->b, at, to);
}

static void alternatives(regex *r, uint32_t from, uint32_t to, bool top)
{
    do
        sequence(r, from, to, top);
    while (eat(r, '|'));
    if (top && more(r))
        refuse(r, "a ) without (");
}

/* A pattern that is one class of characters as a whole, so often: "^[a-z]{1,300}$".  Its characters
 * are counted, in place of a copy of the class for each.  false: it is another. */
static bool one_class(regex *r, uint32_t from, uint32_t to, uint32_t *min, uint32_t *max)
{
    const uint32_t loop = gram_node_new(r->b);
    bool           whole;

    if (!eat(r, '^') || !more(r) || strchr("(^$*+?{|)", r->s[r->pos]))
        return false;
    atom(r, loop, loop);
    quantifier(r, min, max);
    whole = eat(r, '$') && r->pos == r->len;
    if (whole) {
        gram_eps(r->b, from, loop);
        gram_eps(r->b, loop, to);
    }
    return whole;
}

bool gram_regex(gram_build *b, const char *text, size_t len, gram_dfa *out)
{
    gram_build nfa = {
        .err = b->err, .what = b->what, .root = b->root, .max_node = MAX_PATTERN_NODES
    };
    regex    r = { .b = &nfa, .out = b, .s = text, .len = len };
    uint32_t from, to, min = 0, max = GRAM_NONE;

    *out = (gram_dfa){ 0 };
    if (b->st != KVD_OK)
        return false;
    if (len > GRAM_MAX_PATTERN) {
        gram_refuse(b, "pattern: more than %u bytes", GRAM_MAX_PATTERN);
        return false;
    }
    memcpy(nfa.path, b->path, sizeof(nfa.path));
    from = gram_node_new(&nfa);
    to   = gram_node_new(&nfa);
    if (!one_class(&r, from, to, &min, &max)) {
        r.pos = 0;
        min   = 0;
        max   = GRAM_NONE;
        alternatives(&r, from, to, true);
    }
    b->steps += nfa.steps;
    if (b->st == KVD_OK)
        b->st = nfa.st;
    if (gram_tick(b, 1) && gram_dfa_of(b, &nfa, from, to, out)) {
        out->min = min;
        out->max = max;
    }
    gram_build_free(&nfa);
    return b->st == KVD_OK;
}
