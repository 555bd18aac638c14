/* SPDX-License-Identifier: Apache-2.0 */
/* tiers.h - sessions on tiny models, alike but for where their KV cache lies: what tests that want
 * the same bits from all of them share.  Inside cmocka tests: failures fail the test. */
#ifndef KVD_TESTS_TIERS_H
#define KVD_TESTS_TIERS_H

#include "engine/engine.h"
#include "support/sanitized.h"

/* N_GEN: twice as many tokens seal blocks twice at least. */
enum { N_VOCAB = 264, N_CTX = 4000, N_BATCH = 96, N_PROMPT = 1700, N_GEN = SANITIZED ? 280 : 420 };

/* Of all models and sessions that are opened from now on. */
typedef struct tiers_setting {
    const char   *backend; /* what "cpu" stands for; tests pass it to tiers_model() */
    bool          deterministic;
    uint32_t      n_batch; /* of sessions; 0: as they choose */
    kvd_kv_record record;
    kvd_schedule  schedule; /* this and micro_batch: of tiers_sparse() */
    uint32_t      micro_batch;
    kvd_lookup    lookup;
    const char   *trace; /* path; NULL: none */
    uint32_t      n_parked;
} tiers_setting;
extern tiers_setting tiers;

kvd_model *tiers_model(const char *name, const char *backend);
/* spread: with the least device memory that is accepted. */
kvd_session *tiers_session(kvd_model *m, const kvd_attention_params *a, uint32_t n_seq,
                           bool spread);
/* The next n tokens of a text behind what the sequence holds. */
void tiers_prefill(kvd_session *s, uint32_t seq, uint32_t n, uint32_t text);
/* One token for each of the first n sequences, mixed up. */
void tiers_step(kvd_session *s, const int32_t *token, uint32_t n);
void tiers_same_logits(const kvd_session *a, const kvd_session *b, uint32_t row);
/* Greedy with logits pushed about, so that a tiny model does not fall into a loop. */
int32_t tiers_next_token(const kvd_session *s, uint32_t row, uint32_t i);
/* A long prompt, generation over several sealings, a cut, another prompt, more generation: with
 * everything resident and spread the same bits. */
void                 tiers_same_text(kvd_model *m, const kvd_attention_params *a);
kvd_attention_params tiers_sparse(uint32_t budget, float cap);

#endif
