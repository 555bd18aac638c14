/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_file.c - the plan file: there and back, every way it can be wrong, written whole. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "os/os.h"
#include "plan/plan.h"

static const plan_key key = { .fingerprint  = "sha256:0123abcd",
                              .n_layer      = 2,
                              .n_kv_head    = 2,
                              .head_dim     = 64,
                              .chunk_tokens = 4,
                              .budget       = 512,
                              .index        = "mean-int4+radius" };

/* Lane 3 gains most from a larger window, lane 0 least. */
static plan_file sample(void)
{
    static const uint32_t cap[] = { 1, 2, 4 };
    plan_file             f;
    plan_result           r;
    kvd_err               err = { 0 };

    if (plan_file_init(&f, &key, 3, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    memcpy(f.cap, cap, sizeof(cap));
    f.n_step = 256;
    for (uint32_t g = 0; g < 4; g++) {
        for (uint32_t k = 0; k < 3; k++) {
            f.cost[g * 3 + k]    = 1000u * cap[k];
            f.benefit[g * 3 + k] = (g + 1) * 700u * (k + 1);
        }
    }
    assert_int_equal(plan_file_choose(&f, 9000, &r, &err), KVD_OK);
    assert_true(r.exact && r.cost <= 9000);
    return f;
}

static char *text_of(const plan_file *f, size_t *len)
{
    kvd_buf b = { 0 };

    assert_int_equal(plan_file_write(f, &b, NULL), KVD_OK);
    *len = b.len;
    return kvd_buf_take(&b);
}

static void test_there_and_back(void **state)
{
    plan_file f = sample(), g;
    size_t    len, len2;
    char     *text = text_of(&f, &len), *again;
    kvd_err   err  = { 0 };

    (void)state;
    assert_int_equal(f.caps[3], 4); /* 3 x 2,100 more for 3,000 */
    assert_int_equal(f.caps[0], 1);
    if (plan_file_read(&g, text, len, &key, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_memory_equal(&g.key, &f.key, sizeof(key));
    assert_int_equal(g.n_cap, 3);
    assert_int_equal(g.n_step, 256);
    assert_true(g.capacity == f.capacity);
    assert_memory_equal(g.cap, f.cap, 3 * sizeof(*f.cap));
    assert_memory_equal(g.caps, f.caps, 4 * sizeof(*f.caps));
    assert_memory_equal(g.benefit, f.benefit, 12 * sizeof(*f.benefit));
    assert_memory_equal(g.cost, f.cost, 12 * sizeof(*f.cost));
    again = text_of(&g, &len2);
    assert_int_equal(len, len2);
    assert_memory_equal(text, again, len);
    plan_file_free(&g);
    assert_int_equal(plan_file_read(&g, text, len, NULL, &err), KVD_OK); /* any model */
    plan_file_free(&g);
    plan_file_free(&f);
    kvd_free(text);
    kvd_free(again);
}

/* The text with the first `from` after `mark` replaced, read; expects a code and a word. */
static void expect(const char *text, const char *mark, const char *from, const char *to,
                   kvd_status code, const char *word)
{
    const char *at   = strstr(strstr(text, mark), from);
    const int   head = (int)(at - text);
    kvd_buf     b    = { 0 };
    plan_file   f;
    kvd_err     err = { 0 };

    assert_non_null(at);
    kvd_buf_printf(&b, "%.*s%s%s", head, text, to, at + strlen(from));
    if (plan_file_read(&f, b.data, b.len, &key, &err) != code || !strstr(err.msg, word))
        fail_msg("%s -> %s: %s (expected %s, '%s')", from, to, err.msg, kvd_status_name(code),
                 word);
    assert_null(f.caps);
    kvd_buf_free(&b);
}

static void test_what_is_wrong_is_named(void **state)
{
    plan_file f = sample();
    size_t    len;
    char     *t = text_of(&f, &len);

    (void)state;
    expect(t, "format", "kvdrive-plan", "other", KVD_E_CORRUPT, "format");
    expect(t, "version", "1", "2", KVD_E_UNSUPPORTED, "version is 2");
    expect(t, "version", "1", "1.5", KVD_E_CORRUPT, "version");
    expect(t, "model", "0123abcd", "0123abce", KVD_E_INVAL, "sha256:0123abce");
    expect(t, "model", "0123abcd", "a b", KVD_E_CORRUPT, "model");
    expect(t, "model", "0123abcd", "a\\u0000b", KVD_E_CORRUPT, "line");
    expect(t, "index", "mean-", "box-", KVD_E_INVAL, "index is box-int4+radius");
    expect(t, "n_layer", "2", "3", KVD_E_INVAL, "n_layer is 3, expected 2");
    expect(t, "n_kv_head", "2", "4", KVD_E_INVAL, "n_kv_head");
    expect(t, "head_dim", "64", "128", KVD_E_INVAL, "head_dim");
    expect(t, "chunk_tokens", "4", "8", KVD_E_INVAL, "chunk_tokens");
    expect(t, "chunk_tokens", "4", "-4", KVD_E_CORRUPT, "chunk_tokens");
    expect(t, "budget_tokens", "512", "128", KVD_E_INVAL, "budget_tokens is 128");
    expect(t, "n_step", "256", "\"256\"", KVD_E_CORRUPT, "n_step");
    expect(t, "n_step", "256", "99999999999999999999", KVD_E_CORRUPT, "n_step is no whole number");
    expect(t, "index", "\"n_step\"", "\"n_stop\"", KVD_E_CORRUPT, "n_step is missing");
    expect(t, "index", "\"n_step\"", "\"more\": 1, \"n_step\"", KVD_E_CORRUPT, "'more'");
    expect(t, "geometry", "\"n_layer\"", "\"x\": 1, \"n_layer\"", KVD_E_CORRUPT, "geometry");
    expect(t, "index", "\"n_step\"", "\"n_step\": 1, \"n_step\"", KVD_E_CORRUPT, "duplicate");
    expect(t, "profiled_caps", "[1, 2, 4]", "[1, 4, 2]", KVD_E_CORRUPT, "profiled_caps");
    expect(t, "profiled_caps", "[1, 2, 4]", "[0, 2, 4]", KVD_E_CORRUPT, "profiled_caps");
    expect(t, "profiled_caps", "[1, 2, 4]", "[]", KVD_E_CORRUPT, "profiled_caps");
    expect(t, "profiled_caps", "[1, 2, 4]", "[1, 2, 4, 8]", KVD_E_CORRUPT, "benefit");
    expect(t, "profiled_caps", "[1, 2, 4]", "[1, 2, 8]", KVD_E_CORRUPT, "caps has 4");
    expect(t, "capacity_bytes", "9000", "8999", KVD_E_CORRUPT, "cost more than");
    expect(t, "\"caps\"", "[1,", "[3,", KVD_E_CORRUPT, "caps has 3");
    expect(t, "\"caps\"", "[1,", "[1, 1,", KVD_E_CORRUPT, "caps");
    expect(t, "\"benefit\"", "[700,", "[700, 7,", KVD_E_CORRUPT, "benefit");
    expect(t, "\"benefit\"", "[700,", "[true,", KVD_E_CORRUPT, "benefit");
    expect(t, "\"cost\"", "[[", "[5, [", KVD_E_CORRUPT, "cost");
    expect(t, "geometry", "{", "", KVD_E_CORRUPT, "line");
    kvd_free(t);
    plan_file_free(&f);
}

/* Sizes that the text does not back take no memory. */
static void test_size_claims(void **state)
{
    plan_file f = sample(), g;
    size_t    len;
    char     *t   = text_of(&f, &len), *at;
    kvd_err   err = { 0 };
    kvd_buf   b   = { 0 };

    (void)state;
    at = strstr(t, "\"n_layer\": 2");
    kvd_buf_printf(&b, "%.*s\"n_layer\": 60000%s", (int)(at - t), t, at + 12);
    kvd_alloc_peak(true);
    assert_int_equal(plan_file_read(&g, b.data, b.len, NULL, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "fewer entries"));
    assert_true(kvd_alloc_peak(false) < kvd_alloc_bytes() + 100000);
    kvd_buf_free(&b);
    for (size_t n = 0; n < len - 1; n++) { /* no prefix is a plan */
        assert_int_equal(plan_file_read(&g, t, n, NULL, NULL), KVD_E_CORRUPT);
        assert_null(g.cap);
    }
    assert_int_equal(plan_file_read(&g, t, (size_t)PLAN_FILE_MAX_BYTES + 1, NULL, &err),
                     KVD_E_CORRUPT);
    kvd_free(t);
    plan_file_free(&f);
}

static void test_writer_checks(void **state)
{
    plan_file f = sample(), g;
    plan_key  k = key;
    kvd_buf   b = { 0 };
    kvd_err   err;

    (void)state;
    f.caps[1] = 3;
    assert_int_equal(plan_file_write(&f, &b, &err), KVD_E_CORRUPT);
    assert_int_equal(b.len, 0);
    f.caps[1]    = 1;
    f.benefit[0] = UINT64_MAX;
    assert_int_equal(plan_file_write(&f, &b, &err), KVD_E_CORRUPT);
    plan_file_free(&f);
    snprintf(k.fingerprint, sizeof(k.fingerprint), "a\"b");
    assert_int_equal(plan_file_init(&g, &k, 3, &err), KVD_E_INVAL);
    memset(k.fingerprint, 'x', sizeof(k.fingerprint)); /* no terminator */
    assert_int_equal(plan_file_init(&g, &k, 3, &err), KVD_E_INVAL);
    k         = key;
    k.n_layer = k.n_kv_head = 60000;
    assert_int_equal(plan_file_init(&g, &k, 3, &err), KVD_E_INVAL);
    k = key;
    assert_int_equal(plan_file_init(&g, &k, 0, &err), KVD_E_INVAL);
    assert_int_equal(plan_file_init(&g, &k, PLAN_MAX_OPTION + 1, &err), KVD_E_INVAL);
}

static void test_every_failed_allocation(void **state)
{
    const uint64_t live = kvd_alloc_live();
    plan_file      f    = sample(), g;
    size_t         len;
    char          *t = text_of(&f, &len);
    plan_result    r;
    int            n = 0;

    (void)state;
    for (;; n++) {
        kvd_buf    b = { 0 };
        kvd_status st;

        kvd_alloc_fault(n, false);
        st = plan_file_read(&g, t, len, &key, NULL);
        if (st == KVD_OK)
            st = plan_file_choose(&g, 9000, &r, NULL);
        if (st == KVD_OK)
            st = plan_file_write(&g, &b, NULL);
        kvd_alloc_fault(-1, false);
        plan_file_free(&g);
        kvd_buf_free(&b);
        if (st == KVD_OK)
            break;
        assert_int_equal(st, KVD_E_NOMEM);
    }
    assert_true(n >= 8);
    kvd_free(t);
    plan_file_free(&f);
    assert_true(kvd_alloc_live() == live);
}

static void test_replaced_whole(void **state)
{
    char      path[] = "/tmp/kvd_plan_XXXXXX";
    char      name[64], back[8192];
    plan_file f = sample(), g;
    size_t    len, n;
    char     *t   = text_of(&f, &len);
    kvd_err   err = { 0 };
    FILE     *in;

    (void)state;
    assert_non_null(mkdtemp(path));
    snprintf(name, sizeof(name), "%s/plan.json", path);
    for (int i = 0; i < 2; i++) { /* new, then over the old one */
        if (os_file_replace(name, t, len, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        in = fopen(name, "rb");
        assert_non_null(in);
        n = fread(back, 1, sizeof(back), in);
        fclose(in);
        assert_int_equal(plan_file_read(&g, back, n, &key, NULL), KVD_OK);
        plan_file_free(&g);
    }
    remove(name);
    assert_int_equal(remove(path), 0); /* nothing was left beside it */
    assert_int_equal(os_file_replace(name, t, len, &err), KVD_E_IO);
    kvd_free(t);
    plan_file_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_what_is_wrong_is_named),
        cmocka_unit_test(test_size_claims),
        cmocka_unit_test(test_writer_checks),
        cmocka_unit_test(test_every_failed_allocation),
        cmocka_unit_test(test_replaced_whole),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
