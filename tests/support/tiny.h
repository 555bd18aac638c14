/* SPDX-License-Identifier: Apache-2.0 */
/* tiny.h - sessions over tiny models, for tests that end to end need a text: prompts that are
 * functions of a number, greedy answers, and a hash of every logit on the way. */
#ifndef KVD_TESTS_TINY_H
#define KVD_TESTS_TINY_H

#include "engine/engine.h"

enum { TINY_VOCAB = 264, TINY_CTX = 6000 };

/* Deterministic, and stretched so that TINY_CTX tokens fit.  Failures end the program. */
kvd_model *tiny_model(const char *name);

typedef struct tiny_options {
    const char   *dir; /* of the prefix cache; NULL: none */
    uint64_t      cache_bytes;
    bool          tiers;   /* the least device memory that is not resident and one byte less */
    uint64_t      kv_host; /* with tiers and dir */
    uint32_t      n_seq;   /* 0: 1 */
    kvd_attention mode;
} tiny_options;

kvd_session_params tiny_params(kvd_model *m, const tiny_options *o, kvd_attention_params *a);
kvd_status tiny_session(kvd_session **out, kvd_model *m, const tiny_options *o, kvd_err *err);

/* Sets the least device memory that is accepted, less than all takes; not resident then. */
void tiny_least_device(kvd_model *m, kvd_session_params *p);

/* Token i of text number `text`. */
int32_t tiny_token(uint32_t text, uint32_t i);
/* The first n tokens of a text into an empty sequence 0. */
kvd_status tiny_prefill(kvd_session *s, uint32_t text, uint32_t n, kvd_err *err);
/* n greedy tokens, pushed about so that they do not repeat.  hash and out may be NULL. */
kvd_status tiny_generate(kvd_session *s, uint32_t n, uint64_t *hash, int32_t *out, kvd_err *err);

#endif
