/* SPDX-License-Identifier: Apache-2.0 */
/* gram_number.c - numbers between two bounds, digit by digit.
 *
 * The signs apart, a number is compared with a bound by its digits: as long as all of them so far
 * are the bound's it is *tight*, and the bound's next digit limits the next one.  Numbers with
 * fewer or more digits before the point than a bound are below or above it.  States that are tight
 * to neither bound are shared. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/gram_impl.h"

typedef struct decimal { /* not negative */
    char digit[GRAM_MAX_INT_DIGITS + GRAM_MAX_FRACTION + 2];
    int  n_int, n_frac; /* n_int 1 and digit 0 for what is below 1; 0: there is no bound */
    bool open;          /* the bound itself is outside */
} decimal;

typedef struct number {
    gram_build *b;
    decimal     lo, hi;
    bool        integer;
    uint32_t    to;
    uint32_t    free_int[GRAM_MAX_INT_DIGITS + 1]; /* so many digits follow */
    uint32_t    free_frac[GRAM_MAX_FRACTION + 1];  /* so many digits have come */
    uint32_t    tight_int[GRAM_MAX_INT_DIGITS + 1][2][2], tight_frac[GRAM_MAX_FRACTION + 1][2][2];
} number;

/* x >= 0 in decimal, as short as tells it from its neighbours.  A lower bound is rounded up, an
 * upper one down, to the digits that are written.  false: too large for a bound. */
static bool to_decimal(double x, bool lower, bool open, decimal *d)
{
    char  text[400], *dot;
    int   digits = 15;
    char  shortest[40];
    char *rest;

    if (!(x < 1e18))
        return false;
    do
        snprintf(shortest, sizeof(shortest), "%.*g", digits, x);
    while (digits++ < 17 && strtod(shortest, NULL) != x);
    /* The digits behind the point that the short form has */
    snprintf(text, sizeof(text), "%.*f",
             x == 0.0 ? 0 : (int)fmax(0.0, fmin(300.0, (double)digits - 1 - floor(log10(x)))), x);
    if (strtod(text, NULL) != x)
        snprintf(text, sizeof(text), "%.330f", x);
    dot      = strchr(text, '.');
    *d       = (decimal){ .open = open };
    d->n_int = (int)(dot ? dot - text : (long)strlen(text));
    if (d->n_int > GRAM_MAX_INT_DIGITS)
        return false;
    memcpy(d->digit, text, (size_t)d->n_int);
    rest = dot ? dot + 1 : text + d->n_int;
    while (*rest && d->n_frac < GRAM_MAX_FRACTION)
        d->digit[d->n_int + d->n_frac++] = *rest++;
    if (lower && strspn(rest, "0") != strlen(rest))
        d->open = true; /* between this and the next number that can be written */
    if (!lower && strspn(rest, "0") != strlen(rest))
        d->open = false;
    return true;
}

static int digit_at(const decimal *d, int i, bool frac)
{
    if (frac)
        return i < d->n_frac ? d->digit[d->n_int + i] - '0' : 0;
    return d->digit[i] - '0';
}

static bool zeros_from(const decimal *d, int k)
{
    for (; k < d->n_frac; k++)
        if (digit_at(d, k, true))
            return false;
    return true;
}

static bool may_end(const number *n, int k, bool tight_lo, bool tight_hi)
{
    if (tight_lo && (!zeros_from(&n->lo, k) || n->lo.open))
        return false;
    return !(tight_hi && zeros_from(&n->hi, k) && n->hi.open);
}

static uint32_t frac_node(number *n, int k, bool tl, bool th);
static uint32_t int_node(number *n, int len, int pos, bool tl, bool th);

/* The edges of the next digit: place i of the bounds. */
static void digits(number *n, uint32_t from, int len, int i, bool frac, bool tl, bool th)
{
    const int lo = tl ? digit_at(&n->lo, i, frac) : !frac && i == 0 && len > 1 ? 1 : 0;
    const int hi = th ? digit_at(&n->hi, i, frac) : 9;

    for (int d = lo; d <= hi && n->b->st == KVD_OK; d++) {
        const bool l = tl && d == lo, h = th && d == hi;
        int        last = d;
        uint32_t   to;

        if (!l && !h) /* all in between lead to the same */
            last = th ? hi - 1 : 9;
        to = frac ? frac_node(n, i + 1, l, h) : int_node(n, len, i + 1, l, h);
        gram_byte(n->b, from, to, (uint8_t)('0' + d), (uint8_t)('0' + last), false);
        d = last;
    }
}

/* Behind k digits of the fraction; 0: the point may come. */
static uint32_t frac_node(number *n, int k, bool tl, bool th)
{
    uint32_t *have = tl || th ? &n->tight_frac[k][tl][th] : &n->free_frac[k];
    uint32_t  node, at;

    if (*have != GRAM_NONE)
        return *have;
    node = at = *have = gram_node_new(n->b);
    if (may_end(n, k, tl, th))
        gram_eps(n->b, node, n->to);
    if (n->integer || k == GRAM_MAX_FRACTION || n->b->st != KVD_OK)
        return node;
    if (k == 0)
        at = gram_literal(n->b, node, ".", 1);
    digits(n, at, 0, k, true, tl, th);
    return node;
}

/* Behind pos of len digits before the point. */
static uint32_t int_node(number *n, int len, int pos, bool tl, bool th)
{
    uint32_t *have = tl || th ? &n->tight_int[pos][tl][th] : &n->free_int[len - pos];

    if (pos == len)
        return frac_node(n, 0, tl, th);
    if (pos == 0 || *have == GRAM_NONE) {
        const uint32_t node = gram_node_new(n->b);

        if (pos)
            *have = node;
        if (n->b->st == KVD_OK)
            digits(n, node, len, pos, false, tl, th);
        return node;
    }
    return *have;
}

/* Numbers without sign in [lo, hi]. */
static void magnitude(number *n, uint32_t from)
{
    const int most = n->hi.n_int ? n->hi.n_int : GRAM_MAX_INT_DIGITS;

    memset(n->free_int, 0xff, sizeof(n->free_int));
    memset(n->free_frac, 0xff, sizeof(n->free_frac));
    for (int len = n->lo.n_int; len <= most && n->b->st == KVD_OK; len++) {
        memset(n->tight_int, 0xff, sizeof(n->tight_int));
        memset(n->tight_frac, 0xff, sizeof(n->tight_frac));
        gram_eps(n->b, from,
                 int_node(n, len, 0, len == n->lo.n_int, n->hi.n_int && len == n->hi.n_int));
    }
}

static void signed_part(gram_build *b, uint32_t from, uint32_t to, const gram_bounds *q)
{
    number n = { .b = b, .integer = q->integer, .to = to };

    if (!to_decimal(q->min, true, q->above, &n.lo))
        return; /* nothing that large is written */
    if (q->max < INFINITY && !to_decimal(q->max, false, q->below, &n.hi))
        n.hi.n_int = 0;
    magnitude(&n, from);
}

/* A number without bounds: up to 18 digits, a fraction of up to 16, an exponent of one or two. */
static void any_number(gram_build *b, uint32_t from, uint32_t to, bool integer)
{
    const uint32_t    sign = gram_node_new(b), exp = gram_node_new(b), e = gram_node_new(b);
    const uint32_t    e1 = gram_node_new(b), e2 = gram_node_new(b);
    const gram_bounds q = { .max = INFINITY, .integer = integer };

    gram_byte(b, from, sign, '-', '-', false);
    gram_eps(b, from, sign);
    signed_part(b, sign, integer ? to : exp, &q);
    if (integer)
        return;
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

void gram_number(gram_build *b, uint32_t from, uint32_t to, const gram_bounds *q)
{
    gram_bounds part = *q;
    uint32_t    minus;

    if (q->min == -INFINITY && q->max == INFINITY) {
        any_number(b, from, to, q->integer);
        return;
    }
    if (q->max >= 0.0) {
        part.min   = q->min > 0.0 ? q->min : 0.0;
        part.above = q->min >= 0.0 && q->above;
        signed_part(b, from, to, &part);
    }
    if (!(q->min < 0.0))
        return;
    minus = gram_literal(b, from, "-", 1);
    part  = (gram_bounds){ .min     = q->max < 0.0 ? -q->max : 0.0,
                           .above   = q->max <= 0.0 && q->below,
                           .max     = -q->min,
                           .below   = q->above,
                           .integer = q->integer };
    signed_part(b, minus, to, &part);
}
