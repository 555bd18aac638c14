/* SPDX-License-Identifier: Apache-2.0 */
/* sparse_policy.c - the policy table: one row is one system, by what it indexes, selects, keeps,
 * fetches and attends.
 *
 * Pure data.  Thread: any. */
#include <stdio.h>
#include <string.h>

#include "sparse/sparse.h"

#define DEFAULT_MASS 0.7f /* share of attention below which a step falls back */

static const sparse_policy rows[] = {
    { .name         = "kvdrive",
      .title        = "landmarks of 4 tokens, window of 2 budgets, deferred fetch",
      .source       = "this engine's default",
      .attention    = { .mode = KVD_ATTENTION_AUTO, .min_mass = DEFAULT_MASS },
      .chunk_tokens = 4,
      .n_sink       = 16,
      .n_local      = 64 },
    { .name   = "kvdrive-paper",
      .title  = "clusters, look-ahead eviction, all misses waited for, windows changed by the CPU, "
                "micro-batches",
      .source = "arXiv 2605.18071",
      .attention    = { .mode     = KVD_ATTENTION_SPARSE,
                        .fetch    = KVD_FETCH_STRICT,
                        .attend   = KVD_ATTEND_SELECTED,
                        .evict    = KVD_EVICT_BY_LOOKAHEAD,
                        .index    = "cluster",
                        .min_mass = -1.0f,
                        .schedule = KVD_SCHEDULE_ELASTIC },
      .chunk_tokens = 4,
      .n_sink       = 4,
      .n_local      = 64,
      .lookup       = KVD_LOOKUP_HOST },
    { .name         = "full",
      .title        = "attention to all tokens, resident where they fit",
      .source       = "exact attention",
      .attention    = { .mode = KVD_ATTENTION_DENSE, .min_mass = DEFAULT_MASS },
      .chunk_tokens = 4,
      .n_sink       = 16,
      .n_local      = 64 },
    { .name         = "stream",
      .title        = "attention to all tokens, brought up from host memory or disk layer by layer",
      .source       = "FlexGen, arXiv 2303.06865",
      .attention    = { .mode = KVD_ATTENTION_DENSE, .min_mass = DEFAULT_MASS },
      .chunk_tokens = 4,
      .n_sink       = 16,
      .n_local      = 64,
      .tiers        = KVD_TIERS_ALWAYS },
};

const sparse_policy *sparse_policy_at(uint32_t i)
{
    return i < sizeof(rows) / sizeof(*rows) ? &rows[i] : NULL;
}

const sparse_policy *sparse_policy_find(const char *name)
{
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    }
    return NULL;
}

/* The word number i of "a|b|c". */
static void put_word(kvd_buf *b, const char *words, int i)
{
    for (; i > 0; i--)
        words = strchr(words, '|') + 1;
    kvd_buf_printf(b, "%.*s", (int)strcspn(words, "|"), words);
}

static void print_row(const sparse_policy *r, kvd_buf *b)
{
    const kvd_attention_params *a = &r->attention;

    kvd_buf_printf(b, "%-14s %s\n%-14s source: %s\n%-14s attention=", r->name, r->title, "",
                   r->source, "");
    put_word(b, KVD_ATTENTION_NAMES, (int)a->mode);
    if (a->mode != KVD_ATTENTION_DENSE) {
        kvd_buf_printf(b, " index=%s fetch=", a->index ? a->index : "mean-int4+radius");
        put_word(b, KVD_FETCH_NAMES, (int)a->fetch);
        kvd_buf_puts(b, " attend=");
        put_word(b, KVD_ATTEND_NAMES, (int)a->attend);
        kvd_buf_puts(b, " evict=");
        put_word(b, KVD_EVICT_NAMES, (int)a->evict);
        kvd_buf_puts(b, " lookup=");
        put_word(b, KVD_LOOKUP_NAMES, (int)r->lookup);
        kvd_buf_puts(b, " schedule=");
        put_word(b, KVD_SCHEDULE_NAMES, (int)a->schedule);
        kvd_buf_printf(b, " sink=%u", r->n_sink);
    }
    kvd_buf_puts(b, " kv-tiers=");
    put_word(b, KVD_TIERS_NAMES, (int)r->tiers);
    kvd_buf_puts(b, "\n");
}

void sparse_policy_print(kvd_buf *out)
{
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        print_row(&rows[i], out);
}
