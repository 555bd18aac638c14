/* SPDX-License-Identifier: Apache-2.0 */
/* decimal.h - numbers of JSON as the decimal digits they are written with: exact where a double is
 * not.  Plain values without memory of their own.  Any thread. */
#ifndef KVD_BASE_DECIMAL_H
#define KVD_BASE_DECIMAL_H

#include <stdbool.h>
#include <stdint.h>

/* Digits of a number without an exponent.  The largest double has 309, the smallest 324. */
#define KVD_DECIMAL_DIGITS 400u

typedef struct kvd_decimal {
    bool     neg;           /* never of zero */
    uint16_t n_int, n_frac; /* digits before the point: 1 or more; behind it: the last is not 0 */
    char     digit[KVD_DECIMAL_DIGITS]; /* '0'..'9': n_int, then n_frac of them */
} kvd_decimal;

/* Reads a number as JSON writes it.  false: it has more digits than KVD_DECIMAL_DIGITS. */
bool kvd_decimal_read(const char *text, kvd_decimal *out);
/* Less than 0, 0 or more than 0, as x is to y. */
int kvd_decimal_cmp(const kvd_decimal *x, const kvd_decimal *y);
/* Of a whole number: its absolute value.  false: it has a fraction, or does not fit. */
bool kvd_decimal_whole(const kvd_decimal *d, uint64_t *out);
/* false: it has a fraction, or does not fit. */
bool kvd_decimal_int64(const kvd_decimal *d, int64_t *out);
/* Whether the number is a multiple of k / 10^frac; 0 < k <= 10^17. */
bool kvd_decimal_multiple(const kvd_decimal *d, uint64_t k, uint32_t frac);

#endif
