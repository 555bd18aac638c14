/* SPDX-License-Identifier: Apache-2.0 */
/* gram_number.c - numbers between two bounds, digit by digit, and the keywords that bound them.
 *
 * Bounds are decimal digits, so they are exact at any size.  The sign apart, a number is compared
 * with a bound by its digits: as long as all of them so far are the bound's it is *tight*, and the
 * bound's next digit limits the next one.  Numbers with fewer or more digits before the point than
 * a bound are below or above it.  States that are tight to neither bound are shared.
 *
 * With multipleOf a state also has the remainder of the digits so far.  Along a bound it follows
 * from the place. */
#include <string.h>

#include "text/gram_impl.h"

typedef struct number {
    gram_build        *b;
    const kvd_decimal *lo, *hi; /* absolute values; hi NULL: there is no such bound */
    bool               lo_open, hi_open;
    uint32_t           step, step_frac;     /* as in gram_bounds, but 1 for any number */
    uint32_t           most_int, most_frac; /* digits */
    uint32_t           to;
    uint32_t          *free_int;  /* [most_int + 1][step]: so many digits follow */
    uint32_t          *free_frac; /* [most_frac + 1][step]: so many digits have come */
    uint32_t           tight_int[KVD_DECIMAL_DIGITS + 2][2][2];
    uint32_t           tight_frac[KVD_DECIMAL_DIGITS + 2][2][2];
} number;

static const kvd_decimal zero = { .n_int = 1, .digit = "0" };

static bool is_zero(const kvd_decimal *d)
{
    return kvd_decimal_cmp(d, &zero) == 0;
}

/* ---- keywords --------------------------------------------------------------------------- */

bool gram_decimal(gram_build *b, const char *what, const json_t *v, kvd_decimal *out)
{
    char        buf[KVD_JSON_NUMBER_BYTES];
    const char *text = json_is_number(v) ? kvd_json_number(&b->texts, v, buf) : NULL;

    if (!text)
        gram_refuse(b, "%s must be a number", what);
    else if (gram_tick(b, 8 + strlen(text) / 8) && !kvd_decimal_read(text, out))
        gram_refuse(b, "%s: a number of more than %u digits", what, KVD_DECIMAL_DIGITS);
    return b->st == KVD_OK;
}

static void raise_min(gram_bounds *n, const kvd_decimal *d, bool open)
{
    const int c = n->has_min ? kvd_decimal_cmp(d, &n->min) : 1;

    if (c < 0 || (c == 0 && !open))
        return;
    n->has_min = true;
    n->min     = *d;
    n->above   = open;
}

static void lower_max(gram_bounds *n, const kvd_decimal *d, bool open)
{
    const int c = n->has_max ? kvd_decimal_cmp(d, &n->max) : -1;

    if (c > 0 || (c == 0 && !open))
        return;
    n->has_max = true;
    n->max     = *d;
    n->below   = open;
}

static void lower_bound(gram_build *b, const json_t *schema, const char *key, bool open,
                        gram_bounds *n)
{
    const json_t *v = json_object_get(schema, key);
    kvd_decimal   d;

    if (v && gram_decimal(b, key, v, &d))
        raise_min(n, &d, open);
}

static void upper_bound(gram_build *b, const json_t *schema, const char *key, bool open,
                        gram_bounds *n)
{
    const json_t *v = json_object_get(schema, key);
    kvd_decimal   d;

    if (v && gram_decimal(b, key, v, &d))
        lower_max(n, &d, open);
}

/* Formats of OpenAPI that bound integers. */
static void integer_format(const json_t *schema, gram_bounds *n)
{
    static const struct {
        const char *name, *min, *max;
    } known[]     = { { "int8", "-128", "127" },
                      { "uint8", "0", "255" },
                      { "int16", "-32768", "32767" },
                      { "uint16", "0", "65535" },
                      { "int32", "-2147483648", "2147483647" },
                      { "uint32", "0", "4294967295" },
                      { "int64", "-9223372036854775808", "9223372036854775807" },
                      { "uint64", "0", "18446744073709551615" } };
    const char *f = json_string_value(json_object_get(schema, "format"));
    kvd_decimal d;

    for (size_t i = 0; f && i < KVD_COUNTOF(known); i++)
        if (strcmp(f, known[i].name) == 0) {
            (void)kvd_decimal_read(known[i].min, &d);
            raise_min(n, &d, false);
            (void)kvd_decimal_read(known[i].max, &d);
            lower_max(n, &d, false);
        }
}

/* multipleOf: a whole number over a power of ten. */
static void step_of(gram_build *b, const json_t *schema, gram_bounds *n)
{
    const json_t *v = json_object_get(schema, "multipleOf");
    kvd_decimal   d;

    if (!v || !gram_decimal(b, "multipleOf", v, &d))
        return;
    n->step_frac = d.n_frac;
    d.n_int      = (uint16_t)(d.n_int + d.n_frac); /* the digits without the point */
    d.n_frac     = 0;
    if (d.neg || !kvd_decimal_whole(&d, &n->step) || n->step == 0 || n->step > GRAM_MAX_STEP ||
        n->step_frac > GRAM_MAX_FRACTION)
        gram_refuse(b, "multipleOf is supported from 1e-%d, with digits up to %llu",
                    GRAM_MAX_FRACTION, (unsigned long long)GRAM_MAX_STEP);
    n->integer |= n->step_frac == 0;
}

gram_bounds gram_bounds_of(gram_build *b, const json_t *schema, bool integer)
{
    gram_bounds n = { .integer = integer };

    lower_bound(b, schema, "minimum", false, &n);
    lower_bound(b, schema, "exclusiveMinimum", true, &n);
    upper_bound(b, schema, "maximum", false, &n);
    upper_bound(b, schema, "exclusiveMaximum", true, &n);
    step_of(b, schema, &n);
    if (n.integer)
        integer_format(schema, &n);
    return n;
}

bool gram_number_fits(gram_build *b, const json_t *schema, const json_t *v)
{
    const gram_bounds n = gram_bounds_of(b, schema, false);
    kvd_decimal       d;
    int               min, max;

    if (!n.has_min && !n.has_max && !n.integer && !n.step)
        return true;
    if (!gram_decimal(b, "enum", v, &d))
        return false;
    min = n.has_min ? kvd_decimal_cmp(&d, &n.min) : 1;
    max = n.has_max ? kvd_decimal_cmp(&d, &n.max) : -1;
    return min >= n.above && max <= -(int)n.below && !(n.integer && d.n_frac) &&
           (!n.step || kvd_decimal_multiple(&d, n.step, n.step_frac));
}

/* ---- digits ----------------------------------------------------------------------------- */

static uint32_t digit_at(const kvd_decimal *d, uint32_t i, bool frac)
{
    if (frac)
        return i < d->n_frac ? (uint32_t)(d->digit[d->n_int + i] - '0') : 0;
    return (uint32_t)(d->digit[i] - '0');
}

/* Behind k digits of the fraction, of which the number so far leaves the remainder `rest`. */
static bool may_end(const number *n, uint32_t k, bool tight_lo, bool tight_hi, uint32_t rest)
{
    for (uint32_t i = k; i < n->step_frac; i++)
        rest = rest * 10 % n->step;
    if (rest)
        return false;
    if (tight_lo && (n->lo->n_frac > k || n->lo_open))
        return false;
    return !(tight_hi && n->hi->n_frac <= k && n->hi_open);
}

static uint32_t frac_node(number *n, uint32_t k, bool tl, bool th, uint32_t rest);
static uint32_t int_node(number *n, uint32_t len, uint32_t pos, bool tl, bool th, uint32_t rest);

/* The edges of the next digit: place i of the bounds. */
static void digits(number *n, uint32_t from, uint32_t len, uint32_t i, bool tl, bool th,
                   uint32_t rest)
{
    const bool     frac  = len == 0;
    const uint32_t least = !frac && i == 0 && len > 1 ? 1 : 0;
    const uint32_t lo    = tl ? digit_at(n->lo, i, frac) : least;
    const uint32_t hi    = th ? digit_at(n->hi, i, frac) : 9;

    for (uint32_t d = lo; d <= hi && n->b->st == KVD_OK; d++) {
        const bool     l = tl && d == lo, h = th && d == hi;
        const uint32_t rest2 = (rest * 10 + d) % n->step;
        uint32_t       last  = d, to;

        if (!l && !h && n->step == 1) /* all in between lead to the same */
            last = th ? hi - 1 : 9;
        to = frac ? frac_node(n, i + 1, l, h, rest2) : int_node(n, len, i + 1, l, h, rest2);
        gram_byte(n->b, from, to, (uint8_t)('0' + d), (uint8_t)('0' + last), false);
        d = last;
    }
}

/* Behind k digits of the fraction; 0: the point may come. */
static uint32_t frac_node(number *n, uint32_t k, bool tl, bool th, uint32_t rest)
{
    uint32_t *have = tl || th ? &n->tight_frac[k][tl][th] : &n->free_frac[k * n->step + rest];
    uint32_t  node, at;

    if (*have != GRAM_NONE)
        return *have;
    node = at = *have = gram_node_new(n->b);
    if (may_end(n, k, tl, th, rest))
        gram_eps(n->b, node, n->to);
    if (k == n->most_frac || n->b->st != KVD_OK)
        return node;
    if (k == 0)
        at = gram_literal(n->b, node, ".", 1);
    digits(n, at, 0, k, tl, th, rest);
    return node;
}

/* Behind pos of len digits before the point. */
static uint32_t int_node(number *n, uint32_t len, uint32_t pos, bool tl, bool th, uint32_t rest)
{
    uint32_t *have =
        tl || th ? &n->tight_int[pos][tl][th] : &n->free_int[(len - pos) * n->step + rest];

    if (pos == len)
        return frac_node(n, 0, tl, th, rest);
    if (pos == 0 || *have == GRAM_NONE) {
        const uint32_t node = gram_node_new(n->b);

        if (pos)
            *have = node;
        if (n->b->st == KVD_OK)
            digits(n, node, len, pos, tl, th, rest);
        return node;
    }
    return *have;
}

/* Numbers without sign in [lo, hi]. */
static void magnitude(number *n, uint32_t from)
{
    const size_t n_int  = ((size_t)n->most_int + 1) * n->step;
    const size_t n_frac = ((size_t)n->most_frac + 1) * n->step;

    n->free_int  = kvd_malloc((n_int + n_frac) * sizeof(*n->free_int));
    n->free_frac = n->free_int + n_int;
    if (!n->free_int) {
        gram_no_memory(n->b);
        return;
    }
    memset(n->free_int, 0xff, (n_int + n_frac) * sizeof(*n->free_int));
    for (uint32_t len = n->lo->n_int; len <= n->most_int && n->b->st == KVD_OK; len++) {
        memset(n->tight_int, 0xff, sizeof(n->tight_int));
        memset(n->tight_frac, 0xff, sizeof(n->tight_frac));
        gram_eps(n->b, from,
                 int_node(n, len, 0, len == n->lo->n_int, n->hi && len == n->hi->n_int, 0));
    }
    kvd_free(n->free_int);
}

static uint32_t larger(uint32_t x, uint32_t y)
{
    return x > y ? x : y;
}

/* How many digits a number may have: those that its bounds ask for, and a few more. */
static void set_most(number *n, bool integer)
{
    const uint32_t lo = n->lo->n_int + 1u;

    n->most_int = larger(n->lo->n_int > GRAM_MAX_INT_DIGITS ? lo : 0, GRAM_MAX_INT_DIGITS);
    if (n->hi) {
        n->most_int = larger(lo, GRAM_MAX_WIDE_DIGITS);
        if (n->most_int > n->hi->n_int)
            n->most_int = n->hi->n_int;
    }
    n->most_frac = larger(GRAM_MAX_FRACTION, n->lo->n_frac + 1u);
    n->most_frac = larger(n->most_frac, n->hi ? n->hi->n_frac + 1u : 0);
    if (n->most_frac > KVD_DECIMAL_DIGITS)
        n->most_frac = KVD_DECIMAL_DIGITS;
    if (n->step > 1 || n->step_frac)
        n->most_frac = n->step_frac;
    if (integer)
        n->most_frac = 0;
}

/* A number without bounds: up to 19 digits, a fraction of up to 16, an exponent of one or two. */
static void any_number(gram_build *b, uint32_t from, uint32_t to)
{
    const uint32_t sign = gram_node_new(b), exp = gram_node_new(b), e = gram_node_new(b);
    const uint32_t e1 = gram_node_new(b), e2 = gram_node_new(b);
    number         n = { .b = b, .lo = &zero, .step = 1, .to = exp };

    gram_byte(b, from, sign, '-', '-', false);
    gram_eps(b, from, sign);
    set_most(&n, false);
    magnitude(&n, sign);
    gram_eps(b, exp, to);
    gram_byte(b, exp, e, 'e', 'e', false);
    gram_byte(b, exp, e, 'E', 'E', false);
    gram_byte(b, e, e1, '+', '+', false);
    gram_byte(b, e, e1, '-', '-', false);
    gram_eps(b, e, e1);
    gram_byte(b, e1, e2, '0', '9', false);
    gram_byte(b, e2, to, '0', '9', false);
    gram_eps(b, e2, to);
}

/* An integer without a bound fits int64, as far as its other bound lets it. */
static void default_bounds(gram_bounds *q)
{
    kvd_decimal min, max;
    int         low, high; /* bounds that are there against those of int64 */

    (void)kvd_decimal_read("-9223372036854775808", &min);
    (void)kvd_decimal_read("9223372036854775807", &max);
    low  = q->has_max ? kvd_decimal_cmp(&q->max, &min) : 1;
    high = q->has_min ? kvd_decimal_cmp(&q->min, &max) : -1;
    if (!q->has_max && (high < 0 || (high == 0 && !q->above)))
        lower_max(q, &max, false);
    if (!q->has_min && (low > 0 || (low == 0 && !q->below)))
        raise_min(q, &min, false);
}

void gram_number(gram_build *b, uint32_t from, uint32_t to, const gram_bounds *q)
{
    gram_bounds r = *q;
    number      n = { .b = b, .to = to, .step_frac = q->step_frac };
    bool        minus, plus;

    if (r.integer)
        default_bounds(&r);
    if (!r.has_min && !r.has_max && !r.step) {
        any_number(b, from, to);
        return;
    }
    n.step = r.step ? (uint32_t)r.step : 1;
    minus  = !r.has_min || r.min.neg;
    plus   = !r.has_max || !r.max.neg;
    if (plus) {
        n.lo      = minus ? &zero : &r.min;
        n.lo_open = !minus && r.above;
        n.hi      = r.has_max ? &r.max : NULL;
        n.hi_open = r.below;
        set_most(&n, r.integer);
        magnitude(&n, from);
    }
    if (minus) {
        r.min.neg = r.max.neg = false; /* absolute values from here on */
        n.lo                  = plus ? &zero : &r.max;
        n.lo_open = plus ? r.integer || (r.has_max && is_zero(&r.max) && r.below) : r.below;
        n.hi      = r.has_min ? &r.min : NULL;
        n.hi_open = r.above;
        set_most(&n, r.integer);
        magnitude(&n, gram_literal(b, from, "-", 1));
    }
}
