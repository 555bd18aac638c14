/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_host.c - a plan file's tables of disk reads: there and back, what is refused, and the
 * shares of a host tier that follow from them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan.h"

enum { LANES = 3, SIZES = 4, RECORDS = 64 };

static const plan_key key = { .fingerprint  = "sha256:0123abcd",
                              .n_layer      = 1,
                              .n_kv_head    = LANES,
                              .head_dim     = 64,
                              .chunk_tokens = 4,
                              .budget       = 512,
                              .index        = "mean-int4+radius" };

/* Lane 1 stalls most, lane 0 hardly. */
static const uint64_t urgent_reads[LANES][SIZES] = { { 20, 10, 4, 0 },
                                                     { 9000, 5000, 900, 0 },
                                                     { 300, 200, 150, 0 } };
static const uint64_t late_reads[LANES][SIZES]   = { { 100, 60, 30, 0 },
                                                     { 9000, 7000, 1000, 0 },
                                                     { 900, 500, 300, 0 } };

static plan_file sample(void)
{
    static const uint32_t size[SIZES] = { 0, 16, 32, 64 };
    plan_file             f;
    plan_result           r;
    kvd_err               err = { 0 };

    if (plan_file_init(&f, &key, 1, &err) != KVD_OK || plan_file_add_host(&f, SIZES, &err))
        fail_msg("%s", err.msg);
    f.cap[0] = 2;
    f.n_step = 100;
    assert_int_equal(plan_file_choose(&f, 9000, &r, &err), KVD_OK);
    f.lane_records = RECORDS;
    memcpy(f.size, size, sizeof(size));
    memcpy(f.urgent, urgent_reads, sizeof(urgent_reads));
    memcpy(f.late, late_reads, sizeof(late_reads));
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
    kvd_err   err = { 0 };
    char     *t, *again;

    (void)state;
    assert_int_equal(f.urgent_ns, PLAN_URGENT_NS);
    assert_int_equal(f.late_ns, PLAN_LATE_NS);
    f.urgent_ns = 77000; /* measured elsewhere */
    f.late_ns   = 0;
    t           = text_of(&f, &len);
    if (plan_file_read(&g, t, len, &key, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(g.n_size, SIZES);
    assert_int_equal(g.lane_records, RECORDS);
    assert_int_equal(g.urgent_ns, 77000);
    assert_int_equal(g.late_ns, 0);
    assert_memory_equal(g.size, f.size, SIZES * sizeof(*f.size));
    assert_memory_equal(g.urgent, urgent_reads, sizeof(urgent_reads));
    assert_memory_equal(g.late, late_reads, sizeof(late_reads));
    again = text_of(&g, &len2);
    assert_int_equal(len, len2);
    assert_memory_equal(t, again, len);
    for (size_t n = 0; n < len - 1; n++) /* no prefix is a plan */
        assert_int_equal(plan_file_read(&(plan_file){ 0 }, t, n, NULL, NULL), KVD_E_CORRUPT);
    plan_file_free(&f);
    plan_file_free(&g);
    kvd_free(t);
    kvd_free(again);
}

/* The text with the first `from` behind "host" replaced is refused, naming the field. */
static void expect(const char *text, const char *from, const char *to, const char *word)
{
    const char *at = strstr(strstr(text, "\"host\""), from);
    kvd_buf     b  = { 0 };
    plan_file   f;
    kvd_err     err = { 0 };

    assert_non_null(at);
    kvd_buf_printf(&b, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    if (plan_file_read(&f, b.data, b.len, &key, &err) != KVD_E_CORRUPT || !strstr(err.msg, word))
        fail_msg("%s -> %s: %s (expected '%s')", from, to, err.msg, word);
    assert_null(f.urgent);
    kvd_buf_free(&b);
}

static void test_what_is_wrong_is_named(void **state)
{
    plan_file f = sample();
    size_t    len;
    char     *t   = text_of(&f, &len);
    kvd_buf   b   = { 0 };
    kvd_err   err = { 0 };

    (void)state;
    expect(t, "\"host\"", "\"hose\"", "'hose'");
    expect(t, "\"lane_records\": 64", "\"lane_records\": 0", "lane_records");
    expect(t, "\"lane_records\": 64", "\"lane_records\": 63", "sizes");
    expect(t, "\"lane_records\": 64", "\"lane_records\": \"64\"", "lane_records");
    expect(t, "\"lane_records\": 64", "\"lane_records\": 268435457", "lane_records");
    expect(t, "\"lane_records\": 64", "\"records\": 64", "lane_records is missing");
    expect(t, "\"lane_records\": 64", "\"lane_records\": 64, \"x\": 1",
           "unknown field 'x' in host");
    expect(t, "[0, 16, 32, 64]", "[0, 32, 16, 64]", "sizes");
    expect(t, "[0, 16, 32, 64]", "[]", "sizes");
    expect(t, "[0, 16, 32, 64]", "[0, 16, 32]", "urgent");
    expect(t, "[0, 16, 32, 64]", "16", "sizes");
    expect(t, "\"urgent_read_ns\": 100000", "\"urgent_read_ns\": -1", "urgent_read_ns");
    expect(t, "\"late_read_ns\": 12000", "\"late_read_ns\": 1000000000001", "late_read_ns");
    expect(t, "[20,", "[20, 3,", "urgent");
    expect(t, "[900, 500,", "[900, null,", "late");
    expect(t, "\"late\":", "\"later\":", "late is missing");
    plan_file_free(&f);
    kvd_buf_printf(&b, "%.*s\"host\": null}", (int)(strstr(t, "\"host\"") - t), t);
    assert_int_equal(plan_file_read(&f, b.data, b.len, &key, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "host"));
    kvd_buf_free(&b);
    kvd_free(t);
    f         = sample();
    f.late[3] = UINT64_MAX;
    assert_int_equal(plan_file_write(&f, &b, &err), KVD_E_CORRUPT);
    plan_file_free(&f);
}

/* What stalls most gets room first; what is over goes to all alike. */
static void test_what_stalls_gets_more(void **state)
{
    plan_file   f = sample();
    uint32_t    record[LANES];
    plan_shares s;

    (void)state;
    assert_int_equal(plan_file_share_host(&f, 99, RECORDS, record, &s, NULL), KVD_OK);
    assert_true(s.by_stalls);
    assert_int_equal(record[1], RECORDS); /* all of its own */
    assert_int_equal(record[2], 32 + 1);  /* 3 are left over */
    assert_int_equal(record[0], 2);
    assert_int_equal(s.least, 2);
    assert_int_equal(s.most, RECORDS);
    /* 33 for each: at 1/32 between 32 and 64 */
    assert_float_equal(s.equal_urgent, (4 + 900 + 150) * 31.0 / 32 / 100, 1e-9);
    assert_float_equal(s.equal_late, (30 + 1000 + 300) * 31.0 / 32 / 100, 1e-9);
    assert_float_equal(s.shared_urgent, (20 - 10 * 2 / 16.0 + 150 - 150 / 32.0) / 100, 1e-9);
    assert_float_equal(s.shared_ns, s.shared_urgent * 100000 + s.shared_late * 12000, 1e-3);
    assert_true(s.shared_ns < s.equal_ns);

    /* Twice the context: twice the records, the same reads. */
    assert_int_equal(plan_file_share_host(&f, 198, 2 * RECORDS, record, &s, NULL), KVD_OK);
    assert_int_equal(record[1], 2 * RECORDS);
    assert_true(record[2] > record[0] && record[0] > 0);
    assert_int_equal(record[0] + record[1] + record[2], 198);

    /* Times decide: where only reads beside steps cost, lane 2 comes before lane 0 as well. */
    f.urgent_ns = 0;
    assert_int_equal(plan_file_share_host(&f, 40, RECORDS, record, &s, NULL), KVD_OK);
    assert_true(record[1] >= 32 && s.shared_ns < s.equal_ns);
    plan_file_free(&f);
}

static void test_no_better(void **state)
{
    plan_file   f = sample();
    uint32_t    record[LANES];
    plan_shares s;
    kvd_err     err = { 0 };

    (void)state;
    for (uint32_t i = 0; i < LANES * SIZES;
         i++) /* all lanes alike, twice the room is worth twice */
        f.urgent[i] = f.late[i] = (uint64_t)(RECORDS - f.size[i % SIZES]) * 10;
    assert_int_equal(plan_file_share_host(&f, 99, RECORDS, record, &s, NULL), KVD_OK);
    assert_false(s.by_stalls);
    for (uint32_t i = 0; i < LANES; i++)
        assert_int_equal(record[i], 33);
    assert_true(s.equal_ns > 0.0 && !(s.equal_ns > s.shared_ns) && !(s.equal_ns < s.shared_ns));

    /* Room for all; for nothing; for less than the least size. */
    assert_int_equal(plan_file_share_host(&f, 1000, RECORDS, record, &s, NULL), KVD_OK);
    assert_true(record[0] == RECORDS && s.least == RECORDS && !(s.shared_ns > 0.0));
    assert_int_equal(plan_file_share_host(&f, 0, RECORDS, record, &s, NULL), KVD_OK);
    assert_int_equal(s.most, 0);
    f.size[0] = 8;
    assert_int_equal(plan_file_share_host(&f, 20, RECORDS, record, &s, NULL), KVD_OK);
    assert_true(!s.by_stalls && record[0] == 6 && record[2] == 6);
    f.size[0] = 0;

    /* A context of a few records: sizes fall together. */
    assert_int_equal(plan_file_share_host(&f, 4, 2, record, &s, NULL), KVD_OK);
    assert_true(s.most <= 2 && record[0] + record[1] + record[2] <= 4);

    assert_int_equal(plan_file_share_host(&f, 20, 0, record, &s, &err), KVD_E_INVAL);
    f.urgent[1] = INT64_MAX;
    assert_int_equal(plan_file_share_host(&f, 20, RECORDS, record, &s, &err), KVD_E_INVAL);
    plan_file_free(&f);
    f.key = key;
    assert_int_equal(plan_file_share_host(&f, 20, RECORDS, record, &s, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "no reads from disk"));
}

/* Never more than there is, nor than a lane can use; all of it, where lanes have use for it. */
static void test_limits(void **state)
{
    plan_file   f = sample();
    uint32_t    record[LANES];
    plan_shares s;
    kvd_rng     rng;

    (void)state;
    kvd_rng_seed(&rng, 3);
    for (uint32_t round = 0; round < 2000; round++) {
        const uint32_t lane = 1 + (uint32_t)kvd_rng_below(&rng, 200);
        const uint64_t n    = kvd_rng_below(&rng, 700);
        uint64_t       sum  = 0;

        for (uint32_t i = 0; i < LANES * SIZES; i++) {
            f.urgent[i] = kvd_rng_below(&rng, 1000);
            f.late[i]   = kvd_rng_below(&rng, 1000);
        }
        assert_int_equal(plan_file_share_host(&f, n, lane, record, &s, NULL), KVD_OK);
        for (uint32_t i = 0; i < LANES; i++) {
            sum += record[i];
            assert_true(record[i] <= lane && record[i] >= s.least && record[i] <= s.most);
        }
        assert_true(sum <= n && s.shared_ns <= s.equal_ns);
        assert_true(!s.by_stalls || sum == kvd_min_u64(n, (uint64_t)LANES * lane));
    }
    plan_file_free(&f);
}

static void test_every_failed_allocation(void **state)
{
    plan_file      f    = sample(), g;
    const uint64_t live = kvd_alloc_live();
    size_t         len;
    char          *t = text_of(&f, &len);
    uint32_t       record[LANES];
    plan_shares    s;
    kvd_status     st = KVD_E_NOMEM;
    int64_t        n  = 0;

    (void)state;
    for (; n < 200 && st != KVD_OK; n++) {
        kvd_alloc_fault(n, false);
        st = plan_file_read(&g, t, len, &key, NULL);
        if (st == KVD_OK)
            st = plan_file_share_host(&g, 99, RECORDS, record, &s, NULL);
        plan_file_free(&g);
        assert_true(st == KVD_OK || st == KVD_E_NOMEM);
        assert_true(kvd_alloc_live() == live + 1);
    }
    kvd_alloc_fault(-1, false);
    assert_true(n > 10 && n < 200);
    kvd_free(t);
    plan_file_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_what_is_wrong_is_named),
        cmocka_unit_test(test_what_stalls_gets_more),
        cmocka_unit_test(test_no_better),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_every_failed_allocation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
