/* SPDX-License-Identifier: Apache-2.0 */
/* test_fit.c - sessions that have to fit a device with memory of its own, which a split CPU backend
 * stands in for: resident first, tiers else, the least that would do is named and does, and what
 * is planned is what is taken. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/split.h"
#include "support/tiny.h"

#define MIB (1ull << 20)

static kvd_err              err;
static kvd_attention_params attention;

static kvd_session_params params(void)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;

    attention        = (kvd_attention_params)KVD_ATTENTION_PARAMS_INIT;
    attention.mode   = KVD_ATTENTION_SPARSE;
    attention.budget = 96;
    p.n_ctx          = TINY_CTX;
    p.n_seq          = 24;
    p.n_batch        = 96;
    p.attention      = &attention;
    return p;
}

static kvd_plan plan_of(const kvd_model *m, const kvd_session_params *p)
{
    kvd_plan plan = { .struct_size = sizeof(plan) };

    if (kvd_session_plan(m, p, &plan, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return plan;
}

/* Opens, and compares with the plan. */
static void check_taken(kvd_model *m, const kvd_session_params *p, const kvd_plan *plan)
{
    kvd_stats    st = { .struct_size = sizeof(st) };
    kvd_session *s;

    if (kvd_session_open(&s, m, p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kvd_session_get_stats(s, &st);
    assert_int_equal(st.device_used_bytes, plan->device_bytes);
    assert_int_equal(st.device_held_bytes, plan->device_bytes - plan->device_context_bytes);
    assert_int_equal(st.pinned_bytes, plan->pinned_bytes);
    kvd_session_close(s);
}

static void test_resident_first(void **state)
{
    kvd_model         *m = tiny_model("llama");
    kvd_session_params p = params();
    kvd_plan           all, less;

    (void)state;
    split_begin(m->be);
    all = plan_of(m, &p);
    assert_true(all.kv_resident);
    assert_true(all.device_bytes > 0 && all.pinned_bytes > 0);
    check_taken(m, &p, &all);

    m->device_memory = all.device_bytes; /* just enough */
    less             = plan_of(m, &p);
    assert_true(less.kv_resident);
    assert_int_equal(less.device_limit_bytes, all.device_bytes);
    check_taken(m, &p, &less);

    m->device_memory = all.device_bytes - 1;
    less             = plan_of(m, &p);
    assert_false(less.kv_resident);
    assert_true(less.device_bytes < all.device_bytes && less.pinned_bytes > all.pinned_bytes);
    check_taken(m, &p, &less);
    split_end(m->be);
    kvd_model_close(m);
}

/* The same without a cap, by what is free. */
static void test_what_is_free(void **state)
{
    kvd_model         *m = tiny_model("llama");
    kvd_session_params p = params();
    kvd_plan           all;

    (void)state;
    split_begin(m->be);
    split_set_memory(1ull << 60, 3 * MIB);
    all = plan_of(m, &p);
    assert_int_equal(all.device_context_bytes, 3 * MIB);
    split_set_memory(all.device_bytes * 64 / 63 + 64, 3 * MIB); /* a margin stays free */
    assert_true(plan_of(m, &p).kv_resident);
    split_set_memory(all.device_bytes * 64 / 63 - 64, 3 * MIB);
    assert_false(plan_of(m, &p).kv_resident);
    split_end(m->be);
    kvd_model_close(m);
}

/* The number in "...: N MiB are needed". */
static uint64_t named(void)
{
    const char *s = strstr(err.msg, " MiB are needed");

    assert_non_null(s);
    while (s > err.msg && s[-1] >= '0' && s[-1] <= '9')
        s--;
    return strtoull(s, NULL, 10);
}

static void test_too_small(void **state)
{
    kvd_model         *m    = tiny_model("llama");
    kvd_session_params p    = params();
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    kvd_session       *s    = NULL;

    (void)state;
    split_begin(m->be);
    split_set_memory(1ull << 60, 5 * MIB);
    for (int given = 0; given < 2; given++) {
        p.kv_device      = given ? 64 * MIB : 0;
        m->device_memory = 8 * MIB;
        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_E_NOMEM);
        assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_E_NOMEM);
        assert_null(s);
        assert_non_null(strstr(err.msg, "(device_memory)"));
        m->device_memory = named() * MIB;
        plan             = plan_of(m, &p);
        assert_true(plan.device_bytes <= m->device_memory);
        check_taken(m, &p, &plan);
        m->device_memory -= MIB;
        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_E_NOMEM);
    }
    split_end(m->be);
    kvd_model_close(m);
}

/* Two sessions share the cap. */
static void test_second_session(void **state)
{
    kvd_model         *m = tiny_model("llama");
    kvd_session_params p = params();
    kvd_plan           one, two;
    kvd_session       *s, *t;

    (void)state;
    split_begin(m->be);
    one              = plan_of(m, &p);
    m->device_memory = one.device_bytes + one.device_bytes / 2;
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    two = plan_of(m, &p);
    assert_false(two.kv_resident);
    assert_true(two.device_bytes <= m->device_memory);
    assert_int_equal(kvd_session_open(&t, m, &p, &err), KVD_OK);
    kvd_session_close(t);
    kvd_session_close(s);
    split_end(m->be);
    kvd_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resident_first),
        cmocka_unit_test(test_what_is_free),
        cmocka_unit_test(test_too_small),
        cmocka_unit_test(test_second_session),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
