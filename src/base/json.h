/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - JSON text to jansson's values and back; numbers keep the text they were written with.
 *
 * A value of jansson holds a number as an int64 or a double, and its parser refuses what fits
 * neither.  This reader takes every number.  Those that their value alone does not give back (all
 * with a point or an exponent, integers beyond int64, -0) are kept as text in a kvd_json_texts.
 * Their value is a real: the nearest finite double.
 * One thread at a time. */
#ifndef KVD_BASE_JSON_H
#define KVD_BASE_JSON_H

#include <jansson.h>

#include "base/buf.h"
#include "base/decimal.h"

#define KVD_JSON_MAX_DEPTH    2048 /* lists and objects in each other: the reader recurses */
#define KVD_JSON_NUMBER_BYTES 32   /* of a number that has no text of its own, terminated */

typedef struct kvd_json_text {
    json_t *value;  /* holds a reference, so that its address stays its own; NULL: free */
    size_t  offset; /* of its text in kvd_json_texts.text */
} kvd_json_text;

/* Texts of the numbers of one or more documents; zeroed: none. */
typedef struct kvd_json_texts {
    kvd_json_text *slot; /* [cap] hash table by address */
    size_t         n, cap;
    kvd_buf        text; /* one after the other, each terminated */
} kvd_json_texts;

void kvd_json_texts_free(kvd_json_texts *t);

enum kvd_json_flag {
    KVD_JSON_NUL    = 1, /* strings may have zero bytes (\u0000); keys never */
    KVD_JSON_UNIQUE = 2  /* an object that has a key twice is refused; else the last one counts */
};

typedef struct kvd_json_error {
    bool     no_memory;
    size_t   byte;         /* where, from 0 */
    uint32_t line, column; /* from 1; columns count bytes */
    char     text[80];
} kvd_json_error;

/* One value of any kind, blanks around it.  NULL: *e says why.  Texts are added to t. */
json_t *kvd_json_read(kvd_json_texts *t, const char *s, size_t len, unsigned flags,
                      kvd_json_error *e);
/* Appends the value as compact JSON, numbers as they were written.  Failures are in b->oom. */
void kvd_json_put(const kvd_json_texts *t, const json_t *v, kvd_buf *b);
/* The text of a number: t's, or made in buf.  t may be NULL. */
const char *kvd_json_number(const kvd_json_texts *t, const json_t *v,
                            char buf[KVD_JSON_NUMBER_BYTES]);
/* A number as decimal digits; false: it has more than KVD_DECIMAL_DIGITS. */
bool kvd_json_decimal(const kvd_json_texts *t, const json_t *v, kvd_decimal *out);

#endif
