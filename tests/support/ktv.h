/* SPDX-License-Identifier: Apache-2.0 */
/* ktv.h - vocabularies as the tests store them; the layout is in scripts/tok_fixture.py. */
#ifndef KVD_TEST_KTV_H
#define KVD_TEST_KTV_H

#include "text/text.h"

typedef struct ktv {
    tok_vocab v; /* points into what follows */
    tok_str  *token, *merge;
    float    *score;
    int32_t  *attr;
    char     *file, *arena;
} ktv;

bool ktv_load(ktv *k, const char *path); /* false: no such file; a broken one ends the program */
void ktv_free(ktv *k);
/* The whole file, zero-terminated; NULL if it cannot be read.  kvd_free() it. */
char *ktv_read_file(const char *path, size_t *len);

#endif
