/* SPDX-License-Identifier: Apache-2.0 */
/* test_eval_ruler.c - `kvdrive eval`: random choices, prompts at a length (tokens are words here),
 * scores and intervals.  What the prompts say is checked by tests/cli/check_ruler.py. */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cli_eval.h"

#define DATA KVD_TEST_DATA "/../../eval/data"

static eval_data data;

static int open_data(void **state)
{
    kvd_err err = { 0 };

    (void)state;
    if (eval_data_open(&data, DATA, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return 0;
}

static int close_data(void **state)
{
    (void)state;
    eval_data_close(&data);
    return 0;
}

/* ---- random choices -------------------------------------------------------------- */

static void test_pick(void **state)
{
    uint64_t x[8], count[10] = { 0 };
    kvd_rng  r;

    (void)state;
    kvd_rng_seed(&r, 1);
    for (int i = 0; i < 20000; i++) {
        eval_pick(&r, 10, 4, x);
        for (int k = 0; k < 4; k++) {
            assert_true(x[k] < 10 && (k == 0 || x[k] > x[k - 1]));
            count[x[k]]++;
        }
    }
    for (int i = 0; i < 10; i++) /* 8,000 each; the deviation is 69 */
        assert_in_range(count[i], 7650, 8350);
    eval_pick(&r, 8, 8, x);
    for (uint64_t k = 0; k < 8; k++)
        assert_true(x[k] == k);
    eval_pick(&r, 0, 0, x);
}

static void test_fill(void **state)
{
    static const char *const pairs[] = { "a", "{b}", "b", "2", NULL };
    kvd_buf                  out     = { 0 };

    (void)state;
    eval_fill(&out, "{a}{b} {c} {a {{b}}", pairs);
    assert_string_equal(out.data, "{b}2 {c} {a {2}");
    kvd_buf_free(&out);
}

/* ---- prompts --------------------------------------------------------------------- */

static kvd_status count_words(void *ctx, const kvd_buf *user, const kvd_buf *prefix, uint64_t *n,
                              kvd_err *err)
{
    const kvd_buf *part[] = { user, prefix };

    (void)err;
    *n = 7; /* a template's */
    ++*(int *)ctx;
    for (int i = 0; i < 2; i++) {
        for (const char *s = part[i]->data; *s;) {
            s += strspn(s, " \n");
            *n += *s != 0;
            s += strcspn(s, " \n");
        }
    }
    return KVD_OK;
}

static void make(eval_sample *s, const char *task, uint64_t seed, uint32_t index, uint32_t length)
{
    kvd_err err     = { 0 };
    int     n_count = 0;

    if (eval_sample_make(s, &data, eval_task_find(&data, task), seed, index, length, count_words,
                         &n_count, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_in_range(n_count, 2, 60);
}

static bool same(const kvd_buf *a, const kvd_buf *b)
{
    return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

static void test_tasks(void **state)
{
    (void)state;
    assert_int_equal(data.n_task, 12);
    assert_null(eval_task_find(&data, "qa_2"));
    assert_null(eval_task_find(&data, ""));
    assert_int_equal(eval_task_find(&data, "niah_multiquery")->n_key, 4);
    assert_true(eval_task_find(&data, "qa_1")->part);
    assert_false(eval_task_find(&data, "vt")->part);
    assert_int_equal(data.n_doc, 240);
    assert_int_equal(data.n_question, 1190);
}

static void test_lengths(void **state)
{
    static const uint32_t length[] = { 1500, 3000, 4096, 8192, 20000 };

    (void)state;
    for (uint32_t k = 0; k < data.n_task; k++) {
        for (size_t i = 0; i < KVD_COUNTOF(length); i++) {
            const eval_task *t    = &data.task[k];
            const uint64_t   room = length[i] - t->max_new;
            eval_sample      s;

            make(&s, t->name, 42, 0, length[i]);
            assert_true(s.n_token <= room);
            assert_true(s.n_token > room - 160 - room / 100); /* one document of qa_1 */
            assert_true(s.n_answer > 0 && s.user.len > 0 && s.prefix.len > 0);
            eval_sample_free(&s);
        }
    }
}

static void test_samples_stand_alone(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < data.n_task; k++) {
        const char *name = data.task[k].name;
        eval_sample a, b, c, d;

        make(&a, name, 42, 3, 2000);
        make(&b, name, 42, 3, 2000);
        make(&c, name, 42, 4, 2000);
        make(&d, name, 43, 3, 2000);
        assert_true(same(&a.user, &b.user) && same(&a.answers, &b.answers));
        assert_false(same(&a.user, &c.user));
        assert_false(same(&a.answers, &c.answers));
        assert_false(same(&a.user, &d.user));
        eval_sample_free(&a);
        eval_sample_free(&b);
        eval_sample_free(&c);
        eval_sample_free(&d);
    }
}

static void test_too_short(void **state)
{
    eval_sample s;
    kvd_err     err;
    int         n = 0;

    (void)state;
    assert_int_equal(eval_sample_make(&s, &data, eval_task_find(&data, "niah_single_1"), 1, 0, 128,
                                      count_words, &n, &err),
                     KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "128 tokens for its answer"));
    eval_sample_free(&s);
    assert_int_equal(eval_sample_make(&s, &data, eval_task_find(&data, "vt"), 1, 0, 256,
                                      count_words, &n, &err),
                     KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "the smallest vt takes"));
    eval_sample_free(&s);
}

static void test_every_failed_allocation(void **state)
{
    static const char *const task[] = { "niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe",
                                        "qa_1" };
    const uint64_t           live   = kvd_alloc_live();

    (void)state;
    for (size_t k = 0; k < KVD_COUNTOF(task); k++) {
        kvd_status st;
        int        n = 0, calls = 0;

        do {
            eval_sample s;

            kvd_alloc_fault(n++, false);
            st = eval_sample_make(&s, &data, eval_task_find(&data, task[k]), 1, 0, 1500,
                                  count_words, &calls, NULL);
            assert_true(st == KVD_E_NOMEM || (st == KVD_OK && !kvd_alloc_fault_hit()));
            kvd_alloc_fault(-1, false);
            eval_sample_free(&s);
            n += n / 16; /* there are thousands */
        } while (st != KVD_OK);
        assert_true(n > 5);
        assert_true(kvd_alloc_live() == live);
    }
}

/* ---- scores ---------------------------------------------------------------------- */

static double score(bool part, const char *answers, uint32_t n, const char *text)
{
    const eval_task t = { .part = part };
    eval_sample     s = { .task = &t, .n_answer = n };
    double          x;

    for (uint32_t i = 0; i < n; i++, answers += strlen(answers) + 1)
        kvd_buf_put(&s.answers, answers, strlen(answers) + 1);
    x = eval_score(&s, text, strlen(text));
    eval_sample_free(&s);
    return x;
}

static void test_string_match(void **state)
{
    (void)state;
    assert_float_equal(score(false, "1234567", 1, " it is 1234567."), 1.0, 0);
    assert_float_equal(score(false, "1234567", 1, " it is 123456."), 0.0, 0);
    assert_float_equal(score(false, "Foo\0bar\0baz", 3, "xFOObaRx"), 2.0 / 3, 1e-12);
    assert_float_equal(score(true, "Foo\0bar\0baz", 3, "nothing but Baz"), 1.0, 0);
    assert_float_equal(score(true, "Foo\0bar\0baz", 3, "ba"), 0.0, 0);
    assert_float_equal(score(false, "x", 1, ""), 0.0, 0);
    assert_float_equal(score(true, "aab", 1, "aaab"), 1.0, 0);
}

static void test_kl(void **state)
{
    const float  p[] = { 1, 2, 3, -INFINITY }, q[] = { 3, 2, 1, -5 }, r[] = { 801, 802, 803, -9 };
    const double z = exp(-2) + exp(-1) + 1;

    (void)state;
    /* The same softmax over three, the other way round: differences of logits are -2, 0, 2. */
    assert_float_equal(eval_kl(p, q, 3), (2 - 2 * exp(-2)) / z, 1e-12);
    assert_float_equal(eval_kl(p, r, 3), 0, 1e-12);
    assert_float_equal(eval_kl(p, p, 4), 0, 1e-12);
    assert_true(eval_kl(p, q, 4) > eval_kl(p, q, 3));
}

static void test_interval(void **state)
{
    double        x[400], sd = 0;
    eval_interval a, b;

    (void)state;
    for (int i = 0; i < 400; i++)
        x[i] = i % 4 == 0 ? 100 : 0;
    sd = sqrt(0.25 * 0.75) * 100;
    assert_true(eval_bootstrap(x, 400, 5, &a));
    assert_float_equal(a.mean, 25.0, 1e-9);
    assert_float_equal(a.low, 25 - 1.96 * sd / 20, 0.3);
    assert_float_equal(a.high, 25 + 1.96 * sd / 20, 0.3);
    assert_true(eval_bootstrap(x, 400, 5, &b));
    assert_true(a.low == b.low && a.high == b.high);
    assert_true(eval_bootstrap(x + 1, 3, 5, &b)); /* no spread */
    assert_true(b.mean == 0 && b.low == 0 && b.high == 0);
    assert_true(eval_bootstrap(x, 0, 5, &b));
    assert_true(b.mean == 0 && b.low == 0 && b.high == 0);
}

/* Two tasks, three samples, the last one not run with b: pairs are what both have run. */
static void test_table(void **state)
{
    const eval_task    t0 = { .name = "one" }, t1 = { .name = "two" };
    const eval_task   *task[]     = { &t0, &t1 };
    const eval_configs configs    = { .config = { { .name = "dense" }, { .name = "b" } }, .n = 2 };
    float              score_of[] = { 1, 0, 1, 1, 1, 1, /* b: */ 1, 1, -1, 0, 0.5f, -1 };
    eval_counts        counts[]   = { { 0 }, { 10, 400, 100, 2, 8.5, 0.4, 8 } };
    const eval_table   t          = { &configs, task, 2, 3, score_of, counts };
    char               text[4096];
    FILE              *f   = fmemopen(text, sizeof(text), "w");
    kvd_err            err = { 0 };
    json_t            *root, *b, *d;

    (void)state;
    assert_int_equal(eval_table_print(&t, 1, true, f, &err), KVD_OK);
    fclose(f);
    root = json_loads(text, 0, NULL);
    b    = json_array_get(root, 1);
    d    = json_object_get(b, "difference");
    assert_float_equal(json_number_value(json_object_get(b, "mean")), (100 + 25) / 2.0, 1e-3);
    assert_float_equal(json_number_value(json_object_get(d, "mean")), (0 + 100 - 100 - 50) / 4.0,
                       1e-3);
    assert_int_equal(json_integer_value(json_object_get(d, "n")), 4);
    assert_int_equal(json_integer_value(json_object_get(d, "better")), 1);
    assert_int_equal(json_integer_value(json_object_get(d, "worse")), 2);
    assert_float_equal(json_number_value(json_object_get(b, "mass")), 0.85, 1e-6);
    assert_float_equal(json_number_value(json_object_get(b, "miss_share")), 0.25, 1e-6);
    assert_float_equal(json_number_value(json_object_get(b, "urgent_share")), 0.005, 1e-6);
    assert_float_equal(json_number_value(json_object_get(b, "kl")), 0.05, 1e-6);
    assert_true(json_number_value(json_object_get(d, "low")) < -50);
    assert_true(json_number_value(json_object_get(d, "high")) > 20);
    b = json_array_get(root, 0);
    assert_float_equal(json_number_value(json_object_get(json_object_get(b, "tasks"), "one")),
                       200 / 3.0, 1e-3);
    assert_float_equal(json_number_value(json_object_get(json_object_get(b, "difference"), "high")),
                       0, 0);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pick),
        cmocka_unit_test(test_fill),
        cmocka_unit_test(test_tasks),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_samples_stand_alone),
        cmocka_unit_test(test_too_short),
        cmocka_unit_test(test_every_failed_allocation),
        cmocka_unit_test(test_string_match),
        cmocka_unit_test(test_kl),
        cmocka_unit_test(test_interval),
        cmocka_unit_test(test_table),
    };

    return cmocka_run_group_tests(tests, open_data, close_data);
}
