/* SPDX-License-Identifier: Apache-2.0 */
/* decimal.c - decimal digits: reading, comparing, whole numbers and multiples. */
#include "base/decimal.h"

#include <string.h>

#include "base/check.h"

#define EXPONENT_MOST 1000000000 /* larger ones are as this */

/* The digits of a number's text, without the zeros around them. */
typedef struct mantissa {
    const char *first, *end; /* from the first digit that is not 0 to behind the last such */
    int64_t     point;       /* digits from `first` to the point; negative: zeros behind it */
} mantissa;

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The exponent of a number, from its e on. */
static int64_t exponent(const char *s)
{
    const bool neg = *s && s[1] == '-';
    int64_t    e   = 0;

    s += *s != 0;
    for (s += *s == '-' || *s == '+'; is_digit(*s) && e < EXPONENT_MOST; s++)
        e = e * 10 + (*s - '0');
    return neg ? -e : e;
}

/* false: the number is zero. */
static bool read_mantissa(const char *s, mantissa *m)
{
    int64_t n_int = 0, before = 0; /* digits before the point; before the first that is not 0 */
    bool    point = false;

    *m = (mantissa){ 0 };
    for (; is_digit(*s) || *s == '.'; s++) {
        if (*s == '.') {
            point = true;
            continue;
        }
        n_int += !point;
        if (*s != '0') {
            m->first = m->first ? m->first : s;
            m->end   = s + 1;
        }
        before += !m->first;
    }
    m->point = n_int - before + exponent(s);
    return m->first != NULL;
}

bool kvd_decimal_read(const char *text, kvd_decimal *out)
{
    const bool neg = *text == '-';
    mantissa   m;
    int64_t    n = 0, n_int, n_frac;
    char      *p;

    *out = (kvd_decimal){ .n_int = 1, .digit = "0" };
    if (!read_mantissa(text + neg, &m))
        return true;
    for (const char *s = m.first; s < m.end; s++)
        n += *s != '.';
    n_int  = m.point > 0 ? m.point : 1;
    n_frac = n > m.point ? n - m.point : 0;
    if (n_int > KVD_DECIMAL_DIGITS || n_frac > KVD_DECIMAL_DIGITS - n_int)
        return false;
    memset(out->digit, '0', sizeof(out->digit));
    p = out->digit + n_int - m.point;
    for (const char *s = m.first; s < m.end; s++)
        if (*s != '.')
            *p++ = *s;
    out->neg    = neg;
    out->n_int  = (uint16_t)n_int;
    out->n_frac = (uint16_t)n_frac;
    return true;
}

static int cmp_magnitude(const kvd_decimal *x, const kvd_decimal *y)
{
    const uint32_t both = x->n_frac < y->n_frac ? x->n_frac : y->n_frac;
    int            c;

    if (x->n_int != y->n_int)
        return x->n_int < y->n_int ? -1 : 1;
    c = memcmp(x->digit, y->digit, x->n_int + both);
    return c ? c : (int)x->n_frac - (int)y->n_frac;
}

int kvd_decimal_cmp(const kvd_decimal *x, const kvd_decimal *y)
{
    if (x->neg != y->neg)
        return x->neg ? -1 : 1;
    return x->neg ? cmp_magnitude(y, x) : cmp_magnitude(x, y);
}

bool kvd_decimal_whole(const kvd_decimal *d, uint64_t *out)
{
    uint64_t x = 0;

    for (uint32_t i = 0; i < d->n_int; i++)
        if (!kvd_mul(x, 10, &x) || !kvd_add(x, (uint64_t)(d->digit[i] - '0'), &x))
            return false;
    *out = x;
    return d->n_frac == 0;
}

bool kvd_decimal_int64(const kvd_decimal *d, int64_t *out)
{
    uint64_t x;

    if (!kvd_decimal_whole(d, &x) || x > (uint64_t)INT64_MAX + d->neg)
        return false;
    *out = d->neg ? (int64_t)(0 - x) : (int64_t)x;
    return true;
}

bool kvd_decimal_multiple(const kvd_decimal *d, uint64_t k, uint32_t frac)
{
    const uint32_t n    = (uint32_t)d->n_int + frac;
    uint64_t       rest = 0;

    kvd_assert(k > 0 && k <= UINT64_C(100000000000000000));
    if (d->n_frac > frac)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const bool written = i < (uint32_t)d->n_int + d->n_frac;

        rest = (rest * 10 + (uint64_t)(written ? d->digit[i] - '0' : 0)) % k;
    }
    return rest == 0;
}
