/* SPDX-License-Identifier: Apache-2.0 */
/* gram_check.h - schemas against texts, over the vocabulary of SmolLM2. */
#ifndef KVD_TEST_GRAM_CHECK_H
#define KVD_TEST_GRAM_CHECK_H

#include "text/text.h"

/* Of the whole group of tests: opened and closed by the two functions, which cmocka calls. */
extern tok        *gram_check_toks;
extern gram_vocab *gram_check_trie;
int                gram_check_open(void **state);
int                gram_check_close(void **state);

/* The grammar of a schema, owned by the caller; any failure fails the test. */
gram *gram_must_open(const char *schema);
/* Whether a text as a whole is of the grammar. */
bool gram_takes(gram *g, const char *text, size_t len);
/* Texts that a schema takes, and that it does not, separated by tabs. */
void gram_check(const char *schema, const char *good, const char *bad);
/* The schema is refused, with `what` in the message. */
void gram_must_refuse(const char *schema, const char *what);

#endif
