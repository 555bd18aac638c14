/* SPDX-License-Identifier: Apache-2.0 */
/* gram_string.c - string rules: length, pattern, format; and whether a value of enum keeps to them.
 *
 * Patterns and formats become one automaton.  Where a length is asked for besides, a table says for
 * every state and number of characters so far whether the string can still end well. */
#include <string.h>

#include "text/gram_impl.h"

#define HEX4  "[0-9a-fA-F]{4}"
#define OCTET "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
#define DATE                                                                            \
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12]" \
    "[0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
#define TIME                                                                                       \
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]" \
    ")"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define H16   "[0-9a-fA-F]{1,4}"

/* Each is narrower than its format where that is simpler: no 29th of February, say. */
static const struct {
    const char *name, *pattern;
} format[] = {
    { "date", "^" DATE "$" },
    { "time", "^" TIME "$" },
    { "date-time", "^" DATE "T" TIME "$" },
    { "duration",
      "^P([1-9][0-9]{0,5}W|[1-9][0-9]{0,5}D|T[1-9][0-9]{0,5}[HMS]|[1-9][0-9]{0,5}DT[1-9]"
      "[0-9]{0,5}[HMS]|[1-9][0-9]{0,5}[YM])$" },
    { "uuid", "^" HEX4 HEX4 "-" HEX4 "-" HEX4 "-" HEX4 "-" HEX4 HEX4 HEX4 "$" },
    { "email", "^[A-Za-z0-9_%+-]+(\\.[A-Za-z0-9_%+-]+)*@(" LABEL "\\.)+[A-Za-z]{2,24}$" },
    { "hostname", "^" LABEL "(\\." LABEL ")*$" },
    { "ipv4", "^" OCTET "(\\." OCTET "){3}$" },
    { "ipv6", "^((" H16 ":){7}" H16 "|::(" H16 "(:" H16 "){0,5})?|" H16 "::(" H16 "(:" H16
              "){0,4})?|" H16 ":" H16 "::(" H16 "(:" H16 "){0,3})?)$" },
    { "uri",
      "^[A-Za-z][A-Za-z0-9+.-]{0,15}:[A-Za-z0-9._~:/?@!$&'()*+,;=-]+(#[A-Za-z0-9._~:/?@!$&'()*+"
      ",;=-]*)?$" },
};

uint32_t gram_count(gram_build *b, json_t *schema, const char *key, uint32_t missing)
{
    json_t     *v = json_object_get(schema, key);
    kvd_decimal d;
    uint64_t    n;

    if (!v || !gram_decimal(b, key, v, &d))
        return missing;
    if (d.neg || d.n_frac) {
        gram_refuse(b, "%s must be a whole number of 0 or more", key);
        return missing;
    }
    return kvd_decimal_whole(&d, &n) && n < GRAM_NONE - 1 ? (uint32_t)n : GRAM_NONE - 1;
}

/* ---- automata --------------------------------------------------------------------------- */

static bool dfa_of_format(gram_build *b, const char *name, gram_dfa *out)
{
    for (size_t i = 0; i < KVD_COUNTOF(format); i++)
        if (strcmp(format[i].name, name) == 0)
            return gram_regex(b, format[i].pattern, strlen(format[i].pattern), out);
    gram_refuse(b, "format '%.40s' is not supported", name);
    return false;
}

/* Joins one more pattern ("p...") or format ("f...") to d, which is all so far (*n). */
static void add_pattern(gram_build *b, gram_dfa *d, int *n, char kind, json_t *text)
{
    const char *s = json_string_value(text);
    gram_dfa    one, both;
    bool        ok;

    if (!s) {
        gram_refuse(b, "pattern and format must be strings");
        return;
    }
    ok = kind == 'f' ? dfa_of_format(b, s, &one) : gram_regex(b, s, json_string_length(text), &one);
    if (!ok)
        return;
    if ((*n)++ == 0) {
        *d = one;
        return;
    }
    (void)gram_dfa_and(b, d, &one, &both);
    *d = both;
}

/* All patterns and formats of a schema; *n 0: it has none. */
static void dfa_of(gram_build *b, json_t *schema, gram_dfa *d, int *n)
{
    json_t *p = json_object_get(schema, "pattern"), *f = json_object_get(schema, "format"), *v;
    size_t  i;

    *d = (gram_dfa){ 0 };
    *n = 0;
    if (p)
        add_pattern(b, d, n, 'p', p);
    if (f && b->st == KVD_OK)
        add_pattern(b, d, n, 'f', f);
    json_array_foreach(json_object_get(schema, GRAM_PATTERNS), i, v)
    {
        json_t *text = b->st == KVD_OK ? gram_own(b, json_string(json_string_value(v) + 1)) : NULL;

        if (text)
            add_pattern(b, d, n, json_string_value(v)[0], text);
    }
}

/* ---- length beside a pattern ---------------------------------------------------------------- */

typedef struct feas {
    uint32_t *off, *next;    /* successors of a state, each once */
    uint32_t  row, min, max; /* row: min + 1, the last stands for all above; or max + 2 */
    uint64_t *bits;          /* [state][row] */
} feas;

static bool bit_at(const feas *f, uint32_t state, uint32_t count)
{
    const uint64_t i = (uint64_t)state * f->row + (count < f->row ? count : f->row - 1);

    return f->bits[i / 64] >> (i % 64) & 1;
}

static bool successors(gram_build *b, const gram_dfa *d, feas *f)
{
    uint32_t n = 0;

    f->off  = kvd_calloc((size_t)d->n + 1, sizeof(*f->off));
    f->next = kvd_calloc((size_t)d->n * 256, sizeof(*f->next));
    if (!f->off || !f->next || !gram_tick(b, d->n))
        return false;
    for (uint32_t s = 0; s < d->n; s++) {
        f->off[s] = n;
        for (uint32_t i = 0; i < 256; i++) {
            const uint32_t to = d->next[s * 256 + i];
            bool           in = to == 0;

            for (uint32_t k = f->off[s]; k < n && !in; k++)
                in = f->next[k] == to;
            if (!in)
                f->next[n++] = to;
        }
    }
    f->off[d->n] = n;
    return true;
}

/* All states at one number of characters, of which the next number is done. */
static bool fill_level(const gram_dfa *d, feas *f, uint32_t count)
{
    bool changed = false;

    for (uint32_t s = d->n - 1; s > 0; s--) {
        const bool     begins = d->flags[s] & 2;
        const uint64_t i      = (uint64_t)s * f->row + count;
        bool           ok     = d->flags[s] & 1 && count >= f->min && count <= f->max;

        if (bit_at(f, s, count))
            continue;
        if (!begins || count < f->max)
            for (uint32_t k = f->off[s]; k < f->off[s + 1] && !ok; k++)
                ok = bit_at(f, f->next[k], count + begins);
        if (ok)
            f->bits[i / 64] |= UINT64_C(1) << (i % 64);
        changed |= ok;
    }
    return changed;
}

static void fill(gram_build *b, const gram_dfa *d, feas *f)
{
    const uint64_t bits = (uint64_t)d->n * f->row;

    if (f->row < 2 || bits > GRAM_MAX_FEAS_BITS) { /* < 2: it has wrapped */
        gram_refuse(b, "pattern with a length: more than %u cases", GRAM_MAX_FEAS_BITS);
        return;
    }
    f->bits = kvd_calloc(bits / 64 + 1, sizeof(*f->bits));
    if (!f->bits || !successors(b, d, f)) {
        gram_no_memory(b);
        return;
    }
    for (uint32_t c = f->row; c-- > 0;)
        while (gram_tick(b, f->off[d->n] / 4 + 1) && fill_level(d, f, c))
            continue;
}

/* Appends f's rows to b->feas and hands them to the nodes. */
static void keep_feas(gram_build *b, const gram_dfa *d, const feas *f, uint32_t rule,
                      const uint32_t *node)
{
    const uint64_t words = ((uint64_t)d->n * f->row + 63) / 64, have = b->n_feas;
    uint64_t      *all = kvd_realloc(b->feas, (have + words) * sizeof(*all));

    if (!all || (have + words) * 64 > GRAM_NONE) {
        gram_no_memory(b);
        b->feas = all ? all : b->feas;
        return;
    }
    memcpy(all + have, f->bits, words * sizeof(*all));
    b->feas           = all;
    b->n_feas         = have + words;
    b->rule[rule].row = f->row;
    for (uint32_t s = 1; s < d->n; s++)
        b->node[node[s]].feas = (uint32_t)(have * 64 + (uint64_t)s * f->row);
}

/* ---- rules ------------------------------------------------------------------------------- */

/* The states of d as nodes of a new rule. */
static uint32_t rule_of_dfa(gram_build *b, const gram_dfa *d, uint32_t min, uint32_t max)
{
    const uint32_t was = b->owner, rule = gram_rule_new(b, '"');
    uint32_t      *node = kvd_calloc(d->n, sizeof(*node)), shut;
    feas           f    = { .min = min, .max = max, .row = max != GRAM_NONE ? max + 2 : min + 1 };

    b->owner = rule;
    if (!node)
        gram_no_memory(b);
    shut = gram_node_new(b);
    gram_ret(b, shut);
    if (b->st == KVD_OK) {
        b->node[shut].min = min;
        b->node[shut].max = max;
    }
    for (uint32_t s = 1; s < d->n && b->st == KVD_OK; s++)
        node[s] = gram_node_new(b);
    for (uint32_t s = 1; s < d->n && gram_tick(b, 16); s++) {
        const uint16_t *next = d->next + (size_t)s * 256;

        if (d->flags[s] & 1)
            gram_eps(b, node[s], shut);
        for (uint32_t lo = 0, hi; lo < 256; lo = hi) {
            for (hi = lo + 1; hi < 256 && next[hi] == next[lo];)
                hi++;
            if (next[lo])
                gram_byte(b, node[s], node[next[lo]], (uint8_t)lo, (uint8_t)(hi - 1),
                          d->flags[s] & 2);
        }
    }
    if (b->st == KVD_OK && (min || max != GRAM_NONE)) {
        fill(b, d, &f);
        if (b->st == KVD_OK)
            keep_feas(b, d, &f, rule, node);
    }
    if (b->st == KVD_OK)
        b->rule[rule].start = node[1];
    kvd_free(node);
    kvd_free(f.off);
    kvd_free(f.next);
    kvd_free(f.bits);
    b->owner = was;
    return rule;
}

static void lengths(gram_build *b, json_t *schema, uint32_t *min, uint32_t *max)
{
    *min = gram_count(b, schema, "minLength", 0);
    *max = gram_count(b, schema, "maxLength", GRAM_NONE);
}

/* What a schema says of a string: patterns and formats as one automaton, and lengths. */
typedef struct limits {
    uint32_t min, max; /* characters */
    gram_dfa d;
    int      n; /* patterns and formats in d; 0: d is empty */
} limits;

static void limits_of(gram_build *b, json_t *schema, limits *l)
{
    lengths(b, schema, &l->min, &l->max);
    dfa_of(b, schema, &l->d, &l->n);
    if (l->n && l->d.min > l->min)
        l->min = l->d.min;
    if (l->n && l->d.max < l->max)
        l->max = l->d.max;
}

/* The same without the keys of an object. */
static void leave_out(gram_build *b, limits *l, json_t *keys)
{
    static const char any[] = "^[\\s\\S]*$";
    gram_dfa          rest;

    if (b->st == KVD_OK && l->n++ == 0)
        (void)gram_regex(b, any, sizeof(any) - 1, &l->d);
    (void)gram_dfa_without(b, &l->d, keys, &rest);
    l->d = rest;
}

uint32_t gram_string_rule(gram_build *b, json_t *schema, json_t *without)
{
    uint32_t rule;
    limits   l;

    limits_of(b, schema, &l);
    if (json_object_size(without))
        leave_out(b, &l, without);
    if (b->st != KVD_OK)
        rule = 0;
    else if (l.n)
        rule = rule_of_dfa(b, &l.d, l.min, l.max);
    else if (l.min == 0 && l.max == GRAM_NONE)
        rule = b->free_string;
    else
        rule = gram_plain_string(b, l.min, l.max);
    gram_dfa_free(&l.d);
    return rule;
}

/* Whether one value keeps to them. */
static bool word_fits(gram_build *b, json_t *value, const limits *l)
{
    const char  *s     = json_string_value(value);
    const size_t len   = json_string_length(value);
    kvd_buf      in    = { 0 };
    uint32_t     chars = 0;
    bool         fits;

    for (size_t i = 0; i < len; i++) {
        char         out[16];
        bool         first;
        const size_t m = gram_quoted((unsigned char)s[i], out, &first);

        chars += first;
        if (l->n)
            kvd_buf_put(&in, out, m);
    }
    if (in.oom)
        gram_no_memory(b);
    fits = gram_tick(b, len + 1) && chars >= l->min && chars <= l->max &&
           (l->n == 0 || gram_dfa_accepts(&l->d, in.data, in.len));
    kvd_buf_free(&in);
    return fits;
}

size_t gram_words_that_fit(gram_build *b, json_t *schema, json_t **word, size_t n_word)
{
    size_t kept = 0;
    limits l;

    limits_of(b, schema, &l);
    for (size_t i = 0; i < n_word && b->st == KVD_OK; i++)
        if (word_fits(b, word[i], &l))
            word[kept++] = word[i];
    gram_dfa_free(&l.d);
    return kept;
}
