/* SPDX-License-Identifier: Apache-2.0 */
/* The vectors of Llama-3, Qwen2 and Llama-2, whose vocabularies are not stored here: runs on what
 * scripts/get-vocabs put into the cache (or into $KVD_TEST_VOCABS), else it is skipped (77). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/tok_vectors.h"

static char folder[4096];

static void find_folder(void)
{
    const char *given = getenv("KVD_TEST_VOCABS"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");

    if (given)
        snprintf(folder, sizeof(folder), "%s", given);
    else if (cache && cache[0])
        snprintf(folder, sizeof(folder), "%s/kvdrive/vocabs", cache);
    else
        snprintf(folder, sizeof(folder), "%s/.cache/kvdrive/vocabs", home ? home : "");
}

static void check(const char *name, const char *out)
{
    char   path[4200], out_path[512];
    ktv    k;
    size_t n;

    snprintf(path, sizeof(path), "%s/%s.ktv", folder, name);
    snprintf(out_path, sizeof(out_path), KVD_TEST_DATA "/tok/%s", out);
    tok *t = tok_must_open(&k, path);
    assert_int_equal(tok_check_llama_cpp(t, KVD_TEST_DATA "/tok/llama-cpp.inp", out_path, &n), 0);
    assert_int_equal(n, 47);
    tok_close(t);
    ktv_free(&k);
}

static void test_llama_bpe(void **state)
{
    (void)state;
    check("llama-bpe", "llama-bpe.out");
}

static void test_qwen2(void **state)
{
    (void)state;
    check("qwen2", "qwen2.out");
}

static void test_llama_spm(void **state)
{
    (void)state;
    check("llama-spm", "phi-3.out");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_bpe),
        cmocka_unit_test(test_qwen2),
        cmocka_unit_test(test_llama_spm),
    };
    char  path[4200];
    FILE *f;

    find_folder();
    snprintf(path, sizeof(path), "%s/llama-bpe.ktv", folder);
    f = fopen(path, "rb");
    if (!f) {
        printf("no vocabularies in %s: run scripts/get-vocabs\n", folder);
        return 77;
    }
    fclose(f);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
