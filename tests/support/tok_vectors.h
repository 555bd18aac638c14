/* SPDX-License-Identifier: Apache-2.0 */
/* tok_vectors.h - checks a tokenizer against stored vectors. */
#ifndef KVD_TEST_TOK_VECTORS_H
#define KVD_TEST_TOK_VECTORS_H

#include "support/ktv.h"

/* Opens a vocabulary, ends the program if that fails; ktv_free() and tok_close() it. */
tok *tok_must_open(ktv *k, const char *path);
/* Each return the number of differing strings, *n the number of strings; they print differences. */
size_t tok_check_llama_cpp(const tok *t, const char *inp, const char *out, size_t *n);
size_t tok_check_vec(const tok *t, const char *vec, size_t *n);

#endif
