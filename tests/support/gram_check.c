/* SPDX-License-Identifier: Apache-2.0 */
#include "support/gram_check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "support/tok_vectors.h"

static ktv  file;
tok        *gram_check_toks;
gram_vocab *gram_check_trie;

int gram_check_open(void **state)
{
    kvd_err err;

    (void)state;
    gram_check_toks = tok_must_open(&file, KVD_TEST_DATA "/tok/smollm2.ktv");
    return gram_vocab_open(&gram_check_trie, gram_check_toks, &err) == KVD_OK ? 0 : -1;
}

int gram_check_close(void **state)
{
    (void)state;
    gram_vocab_close(gram_check_trie);
    tok_close(gram_check_toks);
    ktv_free(&file);
    return kvd_alloc_live() == 0 ? 0 : -1;
}

gram *gram_must_open(const char *schema)
{
    const gram_desc d = { .schema_json = schema };
    kvd_err         err;
    gram           *g;

    if (gram_open(&g, gram_check_trie, &d, &err) != KVD_OK)
        fail_msg("%s\n%s", err.msg, schema);
    return g;
}

bool gram_takes(gram *g, const char *text, size_t len)
{
    gram_at at;

    gram_begin(g, &at);
    return gram_accept_text(g, &at, text, len, NULL) == KVD_OK && gram_may_end(g, &at);
}

void gram_check(const char *schema, const char *good, const char *bad)
{
    gram *g = gram_must_open(schema);

    for (int i = 0; i < 2; i++)
        for (const char *s = i ? bad : good; *s;) {
            const size_t len = strcspn(s, "\t");

            if (gram_takes(g, s, len) != (i == 0))
                fail_msg("%s %s: %.*s", schema, i ? "takes" : "does not take", (int)len, s);
            s += len + (s[len] == '\t');
        }
    gram_close(g);
}

void gram_must_refuse(const char *schema, const char *what)
{
    const gram_desc d   = { .schema_json = schema };
    kvd_err         err = { 0 };
    gram           *g;
    kvd_status      st = gram_open(&g, gram_check_trie, &d, &err);

    if (st != KVD_E_INVAL || !strstr(err.msg, what))
        fail_msg("%.200s: %s, expected '%s'", schema, st ? err.msg : "taken", what);
    assert_null(g);
}
