/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_memory.c - the memory plan: sizes by hand, verdicts at the byte, what fits, and random
 * inputs against the rules every plan keeps. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan.h"

#define MIB 1048576ull

static uint64_t seed = 1;

/* 2 layers, 2 KV heads of 64: a bf16 record of 4 tokens is 1 KiB. */
static plan_input small(void)
{
    return (plan_input){ .n_layer       = 2,
                         .n_kv_head     = 2,
                         .head_dim      = 64,
                         .n_ctx         = 64 + 256 * 10, /* 10 sealed blocks, 640 records a lane */
                         .n_seq         = 1,
                         .chunk_tokens  = 4,
                         .seal_tokens   = 256,
                         .n_sink        = 16,
                         .n_local       = 64,
                         .budget        = 128,
                         .cap           = 2,
                         .index_bytes   = 3000,
                         .chunk_bytes   = 4,
                         .record        = { PLAN_BF16, PLAN_INT8, PLAN_INT4 },
                         .staging_bytes = 5000 };
}

enum {
    LANES   = 4,
    INDEX   = LANES * 10 * 3000,
    CHUNKS  = LANES * 640 * 4,
    KEPT    = LANES * (16 + 64 + 256) * 2 * 64 * 2,
    ALWAYS  = INDEX + CHUNKS + KEPT,
    WINDOWS = LANES * 2 * 32 * 1024,
    RECORDS = LANES * 640 * 1024,
};

static uint64_t bytes_of(const plan_memory *m, plan_tier t, const char *name)
{
    for (uint32_t i = 0; i < m->n_buffer; i++) {
        if (m->buffer[i].tier == t && strcmp(m->buffer[i].name, name) == 0)
            return m->buffer[i].bytes;
    }
    return 0;
}

static plan_memory make(const plan_input *in)
{
    plan_memory m;
    kvd_err     err = { 0 };

    if (plan_memory_make(in, &m, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return m;
}

static void test_record_sizes(void **state)
{
    (void)state;
    assert_int_equal(plan_record_bytes(4, 64, PLAN_BF16), 1024);
    assert_int_equal(plan_record_bytes(4, 128, PLAN_BF16), 2048);
    assert_int_equal(plan_record_bytes(4, 128, PLAN_INT8), 1024);
    assert_int_equal(plan_record_bytes(4, 128, PLAN_INT4), 512);
    assert_int_equal(plan_record_bytes(4, 128, PLAN_F32), 4096);
    assert_int_equal(plan_record_bytes(4, 80, PLAN_BF16), 2048); /* filled up to a power of two */
    assert_int_equal(plan_record_bytes(1, 1, PLAN_INT4), 1);
    assert_int_equal(plan_record_bytes(0, 64, PLAN_BF16), 0);
    assert_int_equal(plan_record_bytes(1u << 31, 1u << 31, PLAN_F32), 0);
    assert_int_equal(plan_record_bytes(4, 64, (plan_record)9), 0);
    assert_string_equal(plan_tier_name(PLAN_HOST), "host");
    assert_string_equal(plan_record_name(PLAN_INT4), "int4");
}

static void test_all_on_device(void **state)
{
    plan_input  in = small();
    plan_memory m;

    (void)state;
    in.budget_bytes[PLAN_DEVICE] = ALWAYS + RECORDS;
    in.budget_bytes[PLAN_HOST]   = 100 * MIB;
    in.budget_bytes[PLAN_DISK]   = 100 * MIB;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_ALL_ON_DEVICE);
    assert_int_equal(m.n_lane, LANES);
    assert_int_equal(m.n_record, 640);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "index"), INDEX);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "chunk metadata"), CHUNKS);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "kept set and tail"), KEPT);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "records"), RECORDS);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "windows"), 0);
    assert_int_equal(m.tier_bytes[PLAN_DEVICE], ALWAYS + RECORDS);
    assert_int_equal(m.tier_bytes[PLAN_HOST] + m.tier_bytes[PLAN_DISK], 0);
    assert_string_equal(m.fit.text,
                        "everything fits the device budget: host and disk tiers add nothing");
    in.budget_bytes[PLAN_HOST] = in.budget_bytes[PLAN_DISK] = 0;
    m                                                       = make(&in);
    assert_int_equal(m.fit.n_ctx_fits, 64 + 256 * 11 - 1); /* up to the next block's sealing */
    assert_string_equal(m.fit.text, "everything fits the device budget");
}

static void test_windows_and_host(void **state)
{
    plan_input  in = small();
    plan_memory m;

    (void)state;
    in.budget_bytes[PLAN_DEVICE] = ALWAYS + WINDOWS;
    in.budget_bytes[PLAN_HOST]   = 5000 + RECORDS / 2;
    in.budget_bytes[PLAN_DISK]   = MIB;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_ALL_IN_HOST);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "windows"), WINDOWS);
    assert_int_equal(bytes_of(&m, PLAN_HOST, "records"), RECORDS / 2);
    assert_int_equal(bytes_of(&m, PLAN_HOST, "staging"), 5000);
    assert_int_equal(m.tier_bytes[PLAN_DISK], 0);
    assert_int_equal(m.fit.cap_fits, 2);
    assert_non_null(strstr(m.fit.text, "the disk tier adds nothing"));
    assert_non_null(strstr(m.fit.text, "up to 2 budgets"));
}

static void test_disk(void **state)
{
    plan_input  in = small();
    plan_memory m;

    (void)state;
    in.budget_bytes[PLAN_DEVICE] = ALWAYS + WINDOWS + WINDOWS / 2;
    in.budget_bytes[PLAN_HOST]   = 5000 + RECORDS / 2 - 1; /* a byte too few */
    in.budget_bytes[PLAN_DISK]   = 2 * MIB;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_USES_DISK);
    assert_int_equal(m.fit.cap_fits, 3);
    assert_int_equal(bytes_of(&m, PLAN_DISK, "records"), RECORDS / 4);
    assert_int_equal(bytes_of(&m, PLAN_DISK, "index"), INDEX);
    assert_int_equal(bytes_of(&m, PLAN_DISK, "page checksums"), RECORDS / 4 / 4096 * 8);
    assert_int_equal(bytes_of(&m, PLAN_HOST, "record cache"), RECORDS / 2 - 512); /* whole ones */
    assert_true(m.tier_bytes[PLAN_HOST] <= in.budget_bytes[PLAN_HOST]);
}

static void test_no_fit_says_what_to_change(void **state)
{
    plan_input  in = small();
    plan_memory m;

    (void)state;
    in.budget_bytes[PLAN_DEVICE] = ALWAYS + WINDOWS - 1;
    in.budget_bytes[PLAN_HOST]   = 100 * MIB;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_NO_FIT);
    assert_int_equal(m.fit.short_tier, PLAN_DEVICE);
    assert_int_equal(m.fit.short_bytes, 1);
    assert_int_equal(m.fit.cap_fits, 1);
    assert_non_null(strstr(m.fit.text, "--kv-device"));
    assert_non_null(strstr(m.fit.text, "--cap 1"));
    assert_int_equal(m.fit.n_ctx_fits, 64 + 256 * 10 - 1); /* one block less is sealed */
    assert_int_equal(m.fit.n_seq_fits, 0);
    assert_int_equal(bytes_of(&m, PLAN_HOST, "records"), RECORDS / 2); /* the attempt is shown */

    in.budget_bytes[PLAN_DEVICE] = ALWAYS + WINDOWS;
    in.budget_bytes[PLAN_HOST]   = 5000 + RECORDS / 2 - 7;
    m                            = make(&in);
    assert_int_equal(m.fit.short_tier, PLAN_HOST);
    assert_int_equal(m.fit.short_bytes, 7);
    assert_non_null(strstr(m.fit.text, "--kv-host"));
    assert_non_null(strstr(m.fit.text, "--cache-dir"));

    in.budget_bytes[PLAN_DISK] = RECORDS / 4; /* lacks more than the host does */
    m                          = make(&in);
    assert_int_equal(m.fit.short_tier, PLAN_HOST);
    in.budget_bytes[PLAN_HOST] = 5000 + RECORDS / 8;
    m                          = make(&in);
    assert_int_equal(m.fit.short_tier, PLAN_DISK);
    assert_int_equal(m.fit.short_bytes, INDEX + RECORDS / 4 / 4096 * 8);
    assert_non_null(strstr(m.fit.text, "--kv-disk"));

    in.budget_bytes[PLAN_DEVICE] = 100;
    in.budget_bytes[PLAN_HOST]   = 0;
    m                            = make(&in);
    assert_int_equal(m.fit.short_tier, PLAN_DEVICE);
    assert_int_equal(m.fit.cap_fits, 0);
    assert_int_equal(m.fit.n_ctx_fits, 0);
    assert_non_null(strstr(m.fit.text, "--budget"));
}

static void test_caps_budget_extras(void **state)
{
    static const uint32_t caps[4] = { 1, 2, 4, 1000000000 / 20000 };
    const plan_extra      extra[] = { { PLAN_DEVICE, "weights", 1000, 0, 0 },
                                      { PLAN_DEVICE, "hidden state", 0, 10, 3 },
                                      { PLAN_HOST, "tables", 77, 0, 0 } };
    plan_input            in      = small();
    plan_memory           m;

    (void)state;
    in.budget_bytes[PLAN_DEVICE] = ALWAYS + RECORDS;
    in.budget_bytes[PLAN_HOST]   = 100 * MIB;
    in.caps                      = caps;
    in.cap                       = 0; /* not looked at */
    in.extra                     = extra;
    in.n_extra                   = 3;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_ALL_IN_HOST); /* the extras push the records out */
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "windows"), (1 + 2 + 4) * 32 * 1024 + 640 * 1024);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "hidden state"), 10 + 3 * in.n_ctx);
    assert_int_equal(bytes_of(&m, PLAN_HOST, "tables"), 77);
    in.budget = 0;
    assert_int_equal(make(&in).budget, 1024);
    in.n_ctx = 32768;
    assert_int_equal(make(&in).budget, 2048);
    in.n_ctx = 1000000;
    assert_int_equal(make(&in).budget, 4096);
}

static void test_llama_8b_at_122k(void **state)
{
    plan_input  in = small();
    plan_memory m;

    (void)state;
    in.n_layer                   = 32;
    in.n_kv_head                 = 8;
    in.head_dim                  = 128;
    in.n_ctx                     = 124928;
    in.budget                    = 0;
    in.record[PLAN_HOST]         = PLAN_BF16;
    in.budget_bytes[PLAN_DEVICE] = 4096 * MIB;
    in.budget_bytes[PLAN_HOST]   = 32768 * MIB;
    m                            = make(&in);
    assert_int_equal(m.fit.verdict, PLAN_ALL_IN_HOST);
    assert_in_range(bytes_of(&m, PLAN_HOST, "records") / MIB, 15.2 * 1024, 15.25 * 1024);
    assert_int_equal(bytes_of(&m, PLAN_DEVICE, "windows"), 1024 * MIB); /* 2 x 4,096 tokens */
    assert_int_equal(m.fit.n_seq_fits, 2);
}

static void test_refusals(void **state)
{
    const struct {
        size_t      at;
        uint32_t    value;
        const char *name;
    } field[] = {
        { offsetof(plan_input, n_layer), 0, "n_layer" },
        { offsetof(plan_input, n_kv_head), 1u << 20, "n_kv_head" },
        { offsetof(plan_input, head_dim), 0, "head_dim" },
        { offsetof(plan_input, chunk_tokens), 0, "chunk_tokens" },
        { offsetof(plan_input, chunk_tokens), 3, "no multiple" },
        { offsetof(plan_input, seal_tokens), 0, "seal_tokens" },
        { offsetof(plan_input, cap), 0, "cap" },
        { offsetof(plan_input, record), 7, "record" },
        { offsetof(plan_input, n_extra), 99, "n_extra" },
    };
    plan_memory m;
    kvd_err     err;
    plan_input  in = small();

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(field); i++) {
        in = small();
        memcpy((char *)&in + field[i].at, &field[i].value, sizeof(uint32_t));
        assert_int_equal(plan_memory_make(&in, &m, &err), KVD_E_INVAL);
        if (!strstr(err.msg, field[i].name))
            fail_msg("%s: %s", field[i].name, err.msg);
    }
    in       = small();
    in.n_ctx = 0;
    assert_int_equal(plan_memory_make(&in, &m, &err), KVD_E_INVAL);
    in       = small();
    in.n_ctx = in.n_seq = PLAN_MAX_TOKENS;
    assert_int_equal(plan_memory_make(&in, &m, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "64 bits"));
}

static uint64_t wide_random(kvd_rng *r, uint64_t most)
{
    const uint64_t shift = kvd_rng_below(r, 24); /* every order of magnitude */

    return 1 + (kvd_rng_below(r, most) >> shift);
}

static plan_input random_input(kvd_rng *r)
{
    plan_input in = { .seal_tokens = 256 };

    in.n_layer       = (uint32_t)wide_random(r, 64);
    in.n_kv_head     = (uint32_t)wide_random(r, 16);
    in.head_dim      = 1u << kvd_rng_below(r, 9);
    in.n_ctx         = wide_random(r, 1 << 21);
    in.n_seq         = wide_random(r, 64);
    in.chunk_tokens  = 1u << kvd_rng_below(r, 5);
    in.n_sink        = (uint32_t)kvd_rng_below(r, 32);
    in.n_local       = (uint32_t)kvd_rng_below(r, 128);
    in.budget        = kvd_rng_below(r, 4096);
    in.cap           = 1 + (uint32_t)kvd_rng_below(r, 8);
    in.index_bytes   = kvd_rng_below(r, 8192);
    in.chunk_bytes   = kvd_rng_below(r, 16);
    in.staging_bytes = kvd_rng_below(r, MIB);
    for (int t = 0; t < PLAN_N_TIER; t++) {
        in.record[t]       = (plan_record)kvd_rng_below(r, 4);
        in.budget_bytes[t] = kvd_rng_below(r, 4) ? wide_random(r, 1ull << 36) : 0;
    }
    if (kvd_rng_below(r, 2)) { /* a long context, and budgets of about what its tiers need */
        plan_memory m;

        in.n_ctx                     = 8192 + kvd_rng_below(r, 100000);
        in.budget                    = 1 + kvd_rng_below(r, 512);
        in.budget_bytes[PLAN_DEVICE] = 0;
        m                            = make(&in);
        for (int t = 0; t < PLAN_N_TIER; t++)
            in.budget_bytes[t] = m.tier_bytes[t] / 8 * (6 + kvd_rng_below(r, 6));
    }
    return in;
}

static plan_verdict verdict_with(plan_input in, uint64_t n_ctx, uint64_t n_seq, uint32_t cap)
{
    in.n_ctx = n_ctx;
    in.n_seq = n_seq;
    in.cap   = cap;
    return make(&in).fit.verdict;
}

/* Sums are right, a plan that fits fits, and each limit is a limit: it fits there and not beyond.
 */
static void test_random_inputs(void **state)
{
    kvd_rng r;
    int     n_way[PLAN_NO_FIT + 1] = { 0 };

    (void)state;
    kvd_rng_seed(&r, seed);
    for (int i = 0; i < 3000; i++) {
        const plan_input  in               = random_input(&r);
        const plan_memory m                = make(&in);
        uint64_t          sum[PLAN_N_TIER] = { 0 };

        n_way[m.fit.verdict]++;
        for (uint32_t k = 0; k < m.n_buffer; k++)
            sum[m.buffer[k].tier] += m.buffer[k].bytes;
        for (int t = 0; t < PLAN_N_TIER; t++) {
            assert_true(sum[t] == m.tier_bytes[t]);
            assert_true(m.fit.verdict == PLAN_NO_FIT || sum[t] <= in.budget_bytes[t]);
        }
        assert_int_equal(m.fit.verdict == PLAN_NO_FIT, m.fit.n_ctx_fits < in.n_ctx);
        assert_int_equal(m.fit.verdict == PLAN_NO_FIT, m.fit.n_seq_fits < in.n_seq);
        assert_int_equal(m.fit.verdict == PLAN_NO_FIT, m.fit.cap_fits < in.cap);
        if (m.fit.n_ctx_fits)
            assert_int_not_equal(verdict_with(in, m.fit.n_ctx_fits, in.n_seq, in.cap), PLAN_NO_FIT);
        assert_int_equal(verdict_with(in, m.fit.n_ctx_fits + 1, in.n_seq, in.cap), PLAN_NO_FIT);
        assert_int_equal(verdict_with(in, in.n_ctx, m.fit.n_seq_fits + 1, in.cap), PLAN_NO_FIT);
        if (m.fit.cap_fits < PLAN_MAX_DIM)
            assert_int_equal(verdict_with(in, in.n_ctx, in.n_seq, m.fit.cap_fits + 1), PLAN_NO_FIT);
        if (m.fit.verdict == PLAN_NO_FIT) {
            plan_input more = in;

            assert_true(m.tier_bytes[m.fit.short_tier] ==
                        in.budget_bytes[m.fit.short_tier] + m.fit.short_bytes);
            more.budget_bytes[m.fit.short_tier] +=
                m.fit.short_bytes; /* then at least that tier suffices */
            assert_true(make(&more).fit.verdict != PLAN_NO_FIT ||
                        make(&more).fit.short_tier > m.fit.short_tier);
        }
    }
    print_message("verdicts: %d %d %d %d\n", n_way[0], n_way[1], n_way[2], n_way[3]);
    for (int v = 0; v <= PLAN_NO_FIT; v++)
        assert_true(n_way[v] > 20);
}

/* Somebody else's layout: 10 bytes a token on the device, or 1 with 9 in the host. */
static bool measure_toy(void *ctx, const plan_point *at, plan_verdict way,
                        uint64_t need[PLAN_N_TIER])
{
    const uint64_t tokens = at->n_ctx * at->n_seq, cap = at->cap ? at->cap : 2;

    ++*(int *)ctx;
    if (way == PLAN_USES_DISK)
        return false;
    need[PLAN_DEVICE] = way == PLAN_ALL_ON_DEVICE ? 10 * tokens : tokens + 100 * cap;
    need[PLAN_HOST]   = way == PLAN_ALL_ON_DEVICE ? 0 : 9 * tokens;
    return true;
}

static bool measure_nothing(void *ctx, const plan_point *at, plan_verdict way,
                            uint64_t need[PLAN_N_TIER])
{
    (void)ctx;
    (void)at;
    (void)need;
    return way == PLAN_NO_FIT;
}

static void test_fit_of_another_layout(void **state)
{
    int        calls = 0;
    plan_query q     = { .measure = measure_toy,
                         .ctx     = &calls,
                         .at      = { 1000, 2, 0 },
                         .most    = { 1 << 20, 64, 16 },
                         .budget  = { 2300, UINT64_MAX, 0 } };
    plan_fit   f;
    kvd_err    err;

    (void)state;
    assert_int_equal(plan_fit_find(&q, &f, &err), KVD_OK);
    assert_int_equal(f.verdict, PLAN_ALL_IN_HOST);
    assert_int_equal(f.need[PLAN_DEVICE], 2200);
    assert_int_equal(f.need[PLAN_HOST], 18000);
    assert_int_equal(f.n_ctx_fits, 1050);
    assert_int_equal(f.n_seq_fits, 2);
    assert_int_equal(f.cap_fits, 3);
    assert_in_range(calls, 10, 100);
    q.budget[PLAN_DEVICE] = 1 << 30; /* then the limits are those of the search */
    assert_int_equal(plan_fit_find(&q, &f, &err), KVD_OK);
    assert_int_equal(f.verdict, PLAN_ALL_ON_DEVICE);
    assert_int_equal(f.n_ctx_fits, 1 << 20);
    assert_int_equal(f.n_seq_fits, 64);
    assert_int_equal(f.cap_fits, 16);
    assert_non_null(strstr(f.text, "the host tier adds nothing"));
    q.budget[PLAN_DEVICE] = 2199;
    assert_int_equal(plan_fit_find(&q, &f, &err), KVD_OK);
    assert_int_equal(f.verdict, PLAN_NO_FIT);
    assert_int_equal(f.way, PLAN_ALL_IN_HOST);
    assert_int_equal(f.short_bytes, 1);
    assert_int_equal(f.cap_fits, 1);
    q.measure = measure_nothing;
    assert_int_equal(plan_fit_find(&q, &f, &err), KVD_E_INVAL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_record_sizes),
        cmocka_unit_test(test_all_on_device),
        cmocka_unit_test(test_windows_and_host),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_no_fit_says_what_to_change),
        cmocka_unit_test(test_caps_budget_extras),
        cmocka_unit_test(test_llama_8b_at_122k),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_random_inputs),
        cmocka_unit_test(test_fit_of_another_layout),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed = strtoull(argv[2], NULL, 10);
    print_message("seed %" PRIu64 "\n", seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
