/* SPDX-License-Identifier: Apache-2.0 */
/* test_base.c - status, checked arithmetic, buffers, halves, random numbers, allocator.
 * usage: test_base [--seed N] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"

static uint64_t seed_;

static void test_json_depth(void **state)
{
    static const struct {
        const char *text;
        uint32_t    depth;
    } c[] = { { "", 0 },
              { "5", 0 },
              { "{}", 1 },
              { "[[],[[]]]", 3 },
              { "[{\"a\":[]},{}]", 3 },
              { "\"[[[[\"", 0 },
              { "[\"\\\"[[\",[]]", 2 },
              { "]]]][", 1 },
              { "[\"[[", 1 } };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(c); i++) {
        const size_t len = strlen(c[i].text);

        assert_false(kvd_json_deeper(c[i].text, len, c[i].depth));
        assert_true(c[i].depth == 0 || kvd_json_deeper(c[i].text, len, c[i].depth - 1));
    }
}

/* ---- status and checks ----------------------------------------------------------- */

static kvd_status forward(kvd_status st, bool *passed)
{
    KVD_TRY(st);
    *passed = true;
    return KVD_OK;
}

static void test_fail_fills_once(void **state)
{
    char    big[2 * KVD_ERR_MSG_BYTES];
    kvd_err err;
    bool    passed = false;

    (void)state;
    assert_int_equal(kvd_fail(&err, KVD_E_IO, ENOENT, "open %s", "x"), KVD_E_IO);
    assert_int_equal(err.code, KVD_E_IO);
    assert_int_equal(err.sys, ENOENT);
    assert_string_equal(err.msg, "open x: No such file or directory");
    assert_int_equal(kvd_fail(NULL, KVD_E_NOMEM, 0, "x"), KVD_E_NOMEM);

    memset(big, 'a', sizeof(big));
    big[sizeof(big) - 1] = 0;
    kvd_fail(&err, KVD_E_IO, EIO, "%s", big); /* too long: cut, terminated */
    assert_int_equal(strlen(err.msg), KVD_ERR_MSG_BYTES - 1);

    kvd_fail(&err, KVD_E_CORRUPT, 0, "name '%s'", "a\n\x1b[2J\xc3\xa9"); /* one harmless line */
    assert_string_equal(err.msg, "name 'a??[2J\xc3\xa9'");

    assert_int_equal(forward(KVD_E_BUSY, &passed), KVD_E_BUSY);
    assert_false(passed);
    assert_int_equal(forward(KVD_OK, &passed), KVD_OK);
    assert_true(passed);
}

static void test_status_names(void **state)
{
    (void)state;
    for (int c = 0; c >= KVD_E_FULL; c--)
        assert_string_not_equal(kvd_status_name((kvd_status)c), "?");
    assert_string_equal(kvd_status_name(KVD_E_INVAL), "KVD_E_INVAL");
    assert_string_equal(kvd_status_name((kvd_status)-100), "?");
}

static void test_checked_arithmetic(void **state)
{
    uint64_t v;

    (void)state;
    assert_true(kvd_mul(UINT32_MAX, UINT32_MAX, &v));
    assert_true(v == (uint64_t)UINT32_MAX * UINT32_MAX);
    assert_false(kvd_mul(1ull << 32, 1ull << 32, &v));
    assert_true(kvd_mul(0, UINT64_MAX, &v));
    assert_true(kvd_add(UINT64_MAX, 0, &v));
    assert_false(kvd_add(UINT64_MAX, 1, &v));
    assert_true(kvd_div_up(UINT64_MAX, 2) == 1ull << 63);
    assert_int_equal(kvd_div_up(0, 7), 0);
    assert_int_equal(kvd_div_up(7, 7), 1);
    assert_int_equal(kvd_div_up(8, 7), 2);
    assert_int_equal(kvd_align_up(0, 64), 0);
    assert_int_equal(kvd_align_up(1, 64), 64);
    assert_int_equal(kvd_align_up(64, 64), 64);
}

/* Whether fn ends the process by an assert. */
static bool dies(void (*fn)(void))
{
    int         status;
    const pid_t pid = fork();

    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        fn();
        _exit(0);
    }
    return waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void assert_false_thing(void)
{
    kvd_assert(1 + 1 == 3);
}
static void assert_true_thing(void)
{
    kvd_assert(1 + 1 == 2);
}
static void allocate_under_guard(void)
{
    kvd_alloc_guard(true);
    kvd_free(kvd_malloc(1));
}
static void pages_under_guard(void)
{
    kvd_alloc_guard(true);
    kvd_pages_free(kvd_pages_alloc(1), 1);
}

static void test_asserts_and_guard(void **state)
{
    (void)state;
    assert_true(dies(assert_false_thing));
    assert_false(dies(assert_true_thing));
    assert_true(dies(allocate_under_guard));
    assert_true(dies(pages_under_guard));
    assert_false(kvd_alloc_guard(true));
    assert_true(kvd_alloc_guard(false));
}

/* ---- buffers --------------------------------------------------------------------- */

static void test_buf_appends(void **state)
{
    kvd_buf b = { 0 };
    char   *s;

    (void)state;
    kvd_buf_puts(&b, "ab");
    kvd_buf_putc(&b, 'c');
    kvd_buf_put(&b, "d\0e", 3);
    kvd_buf_put(&b, NULL, 0);
    kvd_buf_printf(&b, "%d-%s", 42, "x");
    assert_false(b.oom);
    assert_int_equal(b.len, 10);
    assert_memory_equal(b.data, "abcd\0e42-x", 11);
    for (int i = 0; i < 10000; i++)
        kvd_buf_printf(&b, "%d,", i);
    assert_false(b.oom);
    assert_int_equal(b.data[b.len], 0);
    s = kvd_buf_take(&b);
    assert_memory_equal(s + 10, "0,1,2,", 6);
    kvd_free(s);
    assert_null(b.data);

    s = kvd_buf_take(&b); /* of an empty buffer: the empty string */
    assert_string_equal(s, "");
    kvd_free(s);
}

static void test_buf_without_memory(void **state)
{
    const uint64_t live = kvd_alloc_live();
    kvd_buf        b    = { 0 };

    (void)state;
    kvd_buf_puts(&b, "kept");
    kvd_alloc_fault(0, true);
    for (int i = 0; i < 100; i++)
        kvd_buf_puts(&b, "more text than fits");
    assert_true(kvd_alloc_fault_hit());
    kvd_alloc_fault(-1, false);
    assert_true(b.oom);
    assert_memory_equal(b.data, "kept", 4);
    kvd_buf_puts(&b, "sticky");
    assert_true(b.oom);
    assert_null(kvd_buf_take(&b));
    assert_int_equal(kvd_alloc_live(), live);

    kvd_buf_reserve(&b, SIZE_MAX); /* a wrap is an out-of-memory, not a crash */
    assert_true(b.oom);
    kvd_buf_free(&b);
}

/* ---- halves ---------------------------------------------------------------------- */

/* What binary16 makes of x, by real arithmetic: p bits after the leading one. */
static double round_to_half(double x)
{
    const double a = fabs(x);
    int          e;

    if (a == 0.0 || isinf(x))
        return x;
    frexp(a, &e);
    e = e - 1 < -14 ? -14 : e - 1;
    return copysign(ldexp(nearbyint(ldexp(a, 10 - e)), e - 10), x);
}

static void test_f16_all_values_round_trip(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float f = kvd_f16_to_f32((uint16_t)h);

        if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff)) {
            assert_true(isnan(f));
            assert_true(isnan(kvd_f16_to_f32(kvd_f32_to_f16(f))));
            continue;
        }
        if (kvd_f32_to_f16(f) != h)
            fail_msg("f16 %04x -> %g -> %04x", h, (double)f, kvd_f32_to_f16(f));
    }
    assert_true(kvd_f16_to_f32(0x3c00) == 1.0f);
    assert_true(kvd_f16_to_f32(0x0001) == 0x1p-24f);
    assert_true(kvd_f16_to_f32(0x7bff) == 65504.0f);
    assert_true(isinf(kvd_f16_to_f32(0xfc00)));
}

static void check_f16_rounding(float f)
{
    const double want = round_to_half((double)f);
    const float  got  = kvd_f16_to_f32(kvd_f32_to_f16(f));

    if (fabs(want) > 65504.0 ? !isinf(got) : (double)got != want)
        fail_msg("%a: got %a, want %a", (double)f, (double)got, want);
}

static void test_f16_rounds_to_nearest_even(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, seed_);
    for (int i = 0; i < 1000000; i++) {
        const float f = kvd_bits_to_f32((uint32_t)kvd_rng_u64(&rng));

        if (!isnan(f))
            check_f16_rounding(f);
    }
    for (uint32_t h = 0; h < 0x7bff; h++) { /* between neighbours: the tie, and just beside it */
        const float tie = 0.5f * (kvd_f16_to_f32((uint16_t)h) + kvd_f16_to_f32((uint16_t)(h + 1)));

        check_f16_rounding(tie);
        check_f16_rounding(nextafterf(tie, 0.0f));
        check_f16_rounding(nextafterf(tie, 1e9f));
    }
    assert_int_equal(kvd_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(kvd_f32_to_f16(65520.0f), 0x7c00);
}

static void test_bf16(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float f = kvd_bf16_to_f32((uint16_t)h);

        if (isnan(f))
            assert_true(isnan(kvd_bf16_to_f32(kvd_f32_to_bf16(f))));
        else
            assert_int_equal(kvd_f32_to_bf16(f), h);
    }
    assert_int_equal(kvd_f32_to_bf16(kvd_bits_to_f32(0x3f808000)), 0x3f80); /* tie, even below */
    assert_int_equal(kvd_f32_to_bf16(kvd_bits_to_f32(0x3f818000)), 0x3f82); /* tie, even above */
    assert_int_equal(kvd_f32_to_bf16(kvd_bits_to_f32(0x3f808001)), 0x3f81);
    assert_true(isnan(kvd_bf16_to_f32(kvd_f32_to_bf16(kvd_bits_to_f32(0x7f800001)))));
}

/* ---- random numbers, clock, log -------------------------------------------------- */

static void test_rng_known_values(void **state)
{
    kvd_rng r = { { 1, 2, 3, 4 } }; /* the authors' C code gives the same */

    (void)state;
    assert_true(kvd_rng_u64(&r) == 11520);
    assert_true(kvd_rng_u64(&r) == 0);
    assert_true(kvd_rng_u64(&r) == 1509978240);
    assert_true(kvd_rng_u64(&r) == 1215971899390074240ull);
    kvd_rng_seed(&r, 1234567);
    assert_true(r.s[0] == 6457827717110365317ull);
    assert_true(r.s[1] == 3203168211198807973ull);
    assert_true(r.s[3] == 4593380528125082431ull);
}

static void test_rng_ranges(void **state)
{
    uint32_t count[7] = { 0 };
    kvd_rng  r;
    double   sum = 0;

    (void)state;
    kvd_rng_seed(&r, seed_);
    for (int i = 0; i < 70000; i++) {
        const float f = kvd_rng_f32(&r);

        count[kvd_rng_below(&r, 7)]++;
        assert_true(f >= 0.0f && f < 1.0f);
        sum += (double)f;
    }
    for (int i = 0; i < 7; i++) /* 10,000 expected, standard deviation 93 */
        assert_in_range(count[i], 9300, 10700);
    assert_true(fabs(sum / 70000 - 0.5) < 0.01);
    assert_int_equal(kvd_rng_below(&r, 1), 0);
    assert_true(kvd_rng_below(&r, UINT64_MAX) < UINT64_MAX);
}

static void keep_line(void *ctx, kvd_log_level level, const char *msg)
{
    snprintf(ctx, 64, "%d %.50s", (int)level, msg);
}

/* Of a gap in which nobody looked, as while the process is stopped, half a second counts. */
static void test_clock_of_limits(void **state)
{
    static const struct {
        uint64_t now, ran;
    } looks[] = {
        { 77000000000u, 1 },           /* the first look */
        { 77000000000u, 1 },           /* no time has passed */
        { 77250000000u, 250000001 },   /* counts whole */
        { 77750000000u, 750000001 },   /* the most that counts */
        { 677750000000u, 1250000001 }, /* ten minutes */
        { 677749999999u, 1250000001 }, /* of a thread that was held up before it looked */
        { 677750000007u, 1250000008 }, { UINT64_MAX, 1750000008 },
    };
    kvd_ran_clock c = { 0 };
    uint64_t      t = kvd_ran_ns();

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(looks); i++)
        assert_int_equal(kvd_ran_look(&c, looks[i].now), looks[i].ran);
    for (const uint64_t end = kvd_now_ns() + 5000000; kvd_now_ns() < end;)
        assert_true(kvd_ran_ns() >= t);
    assert_true(t > 0 && kvd_ran_ns() - t >= 4000000);
}

static void test_log_and_clock(void **state)
{
    const uint64_t t0       = kvd_now_ns();
    char           line[64] = "";
    char           big[4096];

    (void)state;
    kvd_log(KVD_LOG_WARN, "nobody listens");
    kvd_set_log(keep_line, line);
    kvd_log(KVD_LOG_WARN, "n = %d", 5);
    assert_string_equal(line, "2 n = 5");
    memset(big, 'x', sizeof(big));
    big[sizeof(big) - 1] = 0;
    kvd_log(KVD_LOG_INFO, "%s", big);
    assert_memory_equal(line, "1 xxxx", 6);
    kvd_set_log(NULL, NULL);
    kvd_log(KVD_LOG_WARN, "silence");
    assert_true(kvd_now_ns() >= t0);
}

/* ---- allocator ------------------------------------------------------------------- */

static void test_alloc_accounts(void **state)
{
    const uint64_t live = kvd_alloc_live(), bytes = kvd_alloc_bytes();
    char          *p, *q;
    size_t         zero = 0, huge = SIZE_MAX / 2;

    (void)state;
    p = kvd_malloc(1000);
    assert_int_equal(kvd_alloc_live(), live + 1);
    assert_true(kvd_alloc_bytes() >= bytes + 1000);
    memset(p, 7, 1000);
    q = kvd_realloc(p, 100000);
    assert_non_null(q);
    assert_int_equal(q[999], 7);
    assert_int_equal(kvd_alloc_live(), live + 1);
    assert_true(kvd_alloc_bytes() >= bytes + 100000);
    kvd_free(q);
    p = kvd_malloc(zero);
    q = kvd_calloc(zero, 8);
    assert_non_null(p);
    assert_non_null(q);
    kvd_free(p);
    kvd_free(q);
    kvd_free(NULL);
    p = kvd_strndup("hello", 3);
    assert_string_equal(p, "hel");
    kvd_free(p);
    p = kvd_strndup(NULL, 0);
    assert_string_equal(p, "");
    kvd_free(p);
    assert_null(kvd_calloc(huge, 4)); /* the product wraps */
    assert_int_equal(kvd_alloc_live(), live);
    assert_int_equal(kvd_alloc_bytes(), bytes);
}

static void test_pages(void **state)
{
    unsigned char *p = kvd_pages_alloc(1 << 20);

    (void)state;
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % KVD_CACHE_LINE, 0);
    for (size_t i = 0; i < 1 << 20; i += 511)
        assert_int_equal(p[i], 0);
    memset(p, 1, 1 << 20);
    kvd_pages_free(p, 1 << 20);
    kvd_pages_free(NULL, 5);
}

/* n successes, then one failure (or failures ever after), on every door. */
static void test_alloc_faults(void **state)
{
    void *p, *q;

    (void)state;
    kvd_alloc_fault(2, false);
    p = kvd_malloc(8);
    q = kvd_calloc(1, 8);
    assert_non_null(p);
    assert_non_null(q);
    assert_false(kvd_alloc_fault_hit());
    assert_null(kvd_realloc(p, 4096)); /* the old block stays */
    assert_true(kvd_alloc_fault_hit());
    kvd_free(p);
    kvd_free(q);
    p = kvd_malloc(8); /* once means once */
    assert_non_null(p);
    kvd_free(p);

    kvd_alloc_fault(0, true);
    for (int i = 0; i < 3; i++) {
        assert_null(kvd_malloc(8));
        assert_null(kvd_pages_alloc(8));
        assert_null(kvd_strndup("x", 1));
    }
    kvd_alloc_fault(-1, false);
    p = kvd_malloc(8);
    assert_non_null(p);
    kvd_free(p);
}

static void *churn(void *arg)
{
    kvd_rng r;

    kvd_rng_seed(&r, seed_ + (uintptr_t)arg);
    for (int i = 0; i < 2000; i++)
        kvd_free(kvd_realloc(kvd_malloc(kvd_rng_below(&r, 500)), kvd_rng_below(&r, 5000)));
    return NULL;
}

static void test_alloc_from_threads(void **state)
{
    const uint64_t live = kvd_alloc_live(), bytes = kvd_alloc_bytes();
    pthread_t      id[4];

    (void)state;
    for (uintptr_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&id[i], NULL, churn, (void *)i), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(id[i], NULL);
    assert_int_equal(kvd_alloc_live(), live);
    assert_int_equal(kvd_alloc_bytes(), bytes);
}

/* Every k of random permutations: the k least come first, and nothing is lost. */
static void test_select_least(void **state)
{
    uint64_t v[40];
    kvd_rng  r;

    (void)state;
    kvd_rng_seed(&r, seed_);
    for (uint32_t round = 0; round < 2000; round++) {
        const uint32_t n    = (uint32_t)kvd_rng_below(&r, KVD_COUNTOF(v) + 1);
        const uint32_t k    = (uint32_t)kvd_rng_below(&r, n + 1);
        uint64_t       seen = 0;

        for (uint32_t i = 0; i < n; i++) { /* inside out: a random permutation of 0 .. n - 1 */
            const uint32_t j = (uint32_t)kvd_rng_below(&r, i + 1);

            v[i] = v[j];
            v[j] = i;
        }
        kvd_select_least(v, n, k);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(v[i] < k, i < k);
            seen |= UINT64_C(1) << v[i];
        }
        assert_int_equal(seen, n ? UINT64_MAX >> (64 - n) : 0);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fail_fills_once),
        cmocka_unit_test(test_status_names),
        cmocka_unit_test(test_checked_arithmetic),
        cmocka_unit_test(test_asserts_and_guard),
        cmocka_unit_test(test_buf_appends),
        cmocka_unit_test(test_buf_without_memory),
        cmocka_unit_test(test_f16_all_values_round_trip),
        cmocka_unit_test(test_f16_rounds_to_nearest_even),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_rng_known_values),
        cmocka_unit_test(test_rng_ranges),
        cmocka_unit_test(test_select_least),
        cmocka_unit_test(test_clock_of_limits),
        cmocka_unit_test(test_log_and_clock),
        cmocka_unit_test(test_json_depth),
        cmocka_unit_test(test_alloc_accounts),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_alloc_faults),
        cmocka_unit_test(test_alloc_from_threads),
    };

    seed_ =
        argc == 3 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 10) : kvd_now_ns();
    printf("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
