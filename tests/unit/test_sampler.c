/* SPDX-License-Identifier: Apache-2.0 */
/* test_sampler.c - every filter against a slow, obvious version, and the distribution it draws. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"

enum { N = 500 };

static kvd_sampler_params plain(void)
{
    return (kvd_sampler_params){ .struct_size    = sizeof(kvd_sampler_params),
                                 .temperature    = 1.0f,
                                 .top_p          = 1.0f,
                                 .repeat_penalty = 1.0f,
                                 .seed           = 7 };
}

static kvd_sampler *open_it(const kvd_sampler_params *p)
{
    kvd_sampler *sm;
    kvd_err      err = { 0 };

    if (engine_sampler_open(&sm, N, NULL, p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return sm;
}

static void random_logits(float *x, uint64_t seed)
{
    kvd_rng r;

    kvd_rng_seed(&r, seed);
    for (int i = 0; i < N; i++)
        x[i] = 8.0f * kvd_rng_f32(&r) - 4.0f;
}

static void test_greedy_takes_the_lowest_of_equals(void **state)
{
    kvd_sampler_params p    = plain();
    float              x[N] = { 0 };
    kvd_sampler       *sm;

    (void)state;
    p.temperature = 0.0f;
    sm            = open_it(&p);
    x[17] = x[44] = 3.0f;
    assert_int_equal(engine_sampler_sample(sm, x), 17);
    x[5] = NAN; /* never chosen, never hides another */
    assert_int_equal(engine_sampler_sample(sm, x), 17);
    x[0] = NAN;
    assert_int_equal(engine_sampler_sample(sm, x), 17);
    engine_sampler_close(sm);
}

/* The set a filter may draw from, by sorting everything. */
static int by_logit(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return (x < y) - (x > y);
}

static void allowed(const kvd_sampler_params *p, const float *x, bool *ok)
{
    float  s[N];
    double total = 0.0, sum = 0.0;
    int    keep = N, k;

    memcpy(s, x, sizeof(s));
    qsort(s, N, sizeof(*s), by_logit);
    if (p->top_k > 0 && p->top_k < keep)
        keep = p->top_k;
    for (int i = 0; i < keep; i++)
        total += exp((double)s[i]);
    for (k = 0; k < keep && (p->top_p >= 1.0f || sum < (double)p->top_p * total); k++)
        sum += exp((double)s[k]);
    while (p->min_p > 0.0f && k > 1 && exp((double)(s[k - 1] - s[0])) < (double)p->min_p * 0.9999)
        k--;
    for (int i = 0; i < N; i++)
        ok[i] = x[i] >= s[k - 1];
}

static void check_filter(kvd_sampler_params p, const char *name)
{
    float        x[N];
    bool         ok[N];
    int          n_ok = 0, n_seen = 0;
    bool         seen[N] = { 0 };
    kvd_sampler *sm      = open_it(&p);

    random_logits(x, 11);
    allowed(&p, x, ok);
    for (int i = 0; i < 20000; i++) {
        const int32_t id = engine_sampler_sample(sm, x);

        if (!ok[id])
            fail_msg("%s: drew %d, which the filter excludes", name, id);
        n_seen += !seen[id];
        seen[id] = true;
    }
    for (int i = 0; i < N; i++)
        n_ok += ok[i];
    assert_true(n_seen > n_ok / 2); /* the filter does not exclude what it should keep */
    engine_sampler_close(sm);
}

static void test_filters(void **state)
{
    kvd_sampler_params p;

    (void)state;
    p       = plain();
    p.top_k = 10;
    check_filter(p, "top-k");
    p       = plain();
    p.top_p = 0.3f;
    check_filter(p, "top-p");
    p       = plain();
    p.min_p = 0.2f;
    check_filter(p, "min-p");
    p             = plain();
    p.top_k       = 50;
    p.top_p       = 0.8f;
    p.min_p       = 0.05f;
    p.temperature = 1.7f;
    check_filter(p, "all three");
}

/* Draws of p from x are in the set ok, and reach most of it. */
static void check_set(const kvd_sampler_params *p, const float *x, const bool *ok, const char *name)
{
    kvd_sampler *sm      = open_it(p);
    bool         seen[N] = { 0 };
    int          n_ok = 0, n_seen = 0;

    for (int i = 0; i < 20000; i++) {
        const int32_t id = engine_sampler_sample(sm, x);

        if (!ok[id])
            fail_msg("%s: drew %d, which the filter excludes", name, id);
        n_seen += !seen[id];
        seen[id] = true;
    }
    for (int i = 0; i < N; i++)
        n_ok += ok[i];
    assert_in_range(n_ok, 2, N / 2);
    assert_true(n_seen > n_ok * 2 / 3);
    engine_sampler_close(sm);
}

/* By rank of |surprise - entropy|: in the set while those nearer have at most typical_p. */
static void test_typical(void **state)
{
    kvd_sampler_params p = plain();
    float              x[N];
    double             prob[N], total = 0.0, entropy = 0.0;
    bool               ok[N];

    (void)state;
    random_logits(x, 21);
    p.typical_p = 0.3f;
    for (int i = 0; i < N; i++)
        total += exp((double)x[i]);
    for (int i = 0; i < N; i++) {
        prob[i] = exp((double)x[i]) / total;
        entropy -= prob[i] * log(prob[i]);
    }
    for (int i = 0; i < N; i++) {
        double nearer = 0.0;

        for (int k = 0; k < N; k++)
            if (fabs(-log(prob[k]) - entropy) < fabs(-log(prob[i]) - entropy))
                nearer += prob[k];
        ok[i] = nearer <= (double)p.typical_p;
    }
    check_set(&p, x, ok, "typical");
    for (int i = 0; i < N; i++)
        x[i] = i < 4 ? 5.0f - (float)i : -INFINITY; /* one token at least, whatever is asked */
    p.typical_p       = 1e-6f;
    kvd_sampler  *sm  = open_it(&p);
    const int32_t one = engine_sampler_sample(sm, x);
    for (int i = 0; i < 100; i++)
        assert_int_equal(engine_sampler_sample(sm, x), one);
    engine_sampler_close(sm);
}

static void test_top_n_sigma(void **state)
{
    kvd_sampler_params p = plain();
    float              x[N];
    double             mean = 0.0, square = 0.0, top = -100.0;
    bool               ok[N];
    kvd_sampler       *sm;

    (void)state;
    random_logits(x, 22);
    p.top_n_sigma = 0.5f;
    x[0]          = -INFINITY; /* no part of the deviation */
    x[1]          = -1e9f;
    for (int i = 2; i < N; i++) {
        mean += (double)x[i] / (N - 2);
        top = fmax(top, (double)x[i]);
    }
    for (int i = 2; i < N; i++)
        square += ((double)x[i] - mean) * ((double)x[i] - mean) / (N - 2);
    for (int i = 0; i < N; i++)
        ok[i] = (double)x[i] >= top - 0.5 * sqrt(square);
    check_set(&p, x, ok, "top-n-sigma");
    p.top_k = 5;
    sm      = open_it(&p);
    assert_int_equal(engine_sampler_n_best(sm), 0); /* the deviation needs all logits */
    engine_sampler_close(sm);
}

/* Tokens of 0.4, 0.3, 0.2 and 0.1: with a threshold of 0.15 XTC leaves 0.2 and 0.1. */
static void test_xtc(void **state)
{
    static const float share[] = { 0.4f, 0.3f, 0.2f, 0.1f };
    kvd_sampler_params p       = plain();
    int                n[4]    = { 0 };
    float              x[N];
    kvd_sampler       *sm;

    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = i < 4 ? logf(share[i]) : -INFINITY;
    p.xtc_threshold   = 0.15f;
    p.xtc_probability = 1.0f;
    sm                = open_it(&p);
    for (int i = 0; i < 30000; i++)
        n[engine_sampler_sample(sm, x)]++;
    engine_sampler_close(sm);
    assert_int_equal(n[0] + n[1], 0);
    assert_in_range(n[2], 19500, 20500);
    p.xtc_probability = 0.5f;
    sm                = open_it(&p);
    memset(n, 0, sizeof(n));
    for (int i = 0; i < 30000; i++)
        n[engine_sampler_sample(sm, x)]++;
    engine_sampler_close(sm);
    assert_in_range(n[0], 5600, 6400);   /* 0.5 * 0.4 */
    assert_in_range(n[2], 12500, 13500); /* 0.5 * 0.2 + 0.5 * 2/3 */
    p.xtc_threshold = 0.6f;              /* off */
    sm              = open_it(&p);
    memset(n, 0, sizeof(n));
    for (int i = 0; i < 30000; i++)
        n[engine_sampler_sample(sm, x)]++;
    engine_sampler_close(sm);
    assert_in_range(n[0], 11500, 12500);
}

/* Against each earlier place of the window, compared token by token. */
static void check_dry(const kvd_sampler_params *p, const int32_t *h, int n)
{
    const int lo =
        p->dry_penalty_last_n >= 0 && p->dry_penalty_last_n < n ? n - p->dry_penalty_last_n : 0;
    float       got[N] = { 0 }, want[N] = { 0 };
    engine_dry *d;

    assert_int_equal(engine_dry_open(&d, N, NULL, p, 1 << 20, NULL), KVD_OK);
    for (int i = 0; i < n; i++)
        engine_dry_accept(d, h[i]);
    engine_dry_apply(d, got);
    for (int e = lo; e < n - 1; e++) {
        int same = 0;

        while (e - same >= lo && h[e - same] == h[n - 1 - same])
            same++;
        if (same >= p->dry_allowed_length)
            want[h[e + 1]] =
                fminf(want[h[e + 1]], -p->dry_multiplier *
                                          powf(p->dry_base, (float)(same - p->dry_allowed_length)));
    }
    for (int i = 0; i < N; i++)
        assert_true(fabsf(got[i] - want[i]) <= 1e-4f * fabsf(want[i]));
    engine_dry_close(d);
}

static void test_dry(void **state)
{
    static const int32_t said[] = { 1, 2, 3, 4, 9, 1, 2, 3 };
    kvd_sampler_params   p      = plain();
    float                x[N];
    kvd_sampler         *sm;
    kvd_rng              r;

    (void)state;
    p.dry_multiplier     = 2.0f;
    p.dry_base           = 1.5f;
    p.dry_allowed_length = 2;
    p.dry_penalty_last_n = -1;
    kvd_rng_seed(&r, 5);
    for (int k = 0; k < 400; k++) {
        int32_t   h[60];
        const int n = 1 + (int)(kvd_rng_f32(&r) * 59.0f);

        for (int i = 0; i < n; i++)
            h[i] = (int32_t)(kvd_rng_f32(&r) * (k % 3 ? 2.0f : 3.0f));
        p.dry_penalty_last_n = k % 2 ? -1 : 1 + k % 50;
        p.dry_allowed_length = k % 4;
        check_dry(&p, h, n);
    }
    p.dry_penalty_last_n = -1;
    p.dry_allowed_length = 2;
    p.temperature        = 0.0f; /* a penalty counts greedily, too */
    for (int i = 0; i < 2; i++) {
        sm = open_it(&p);
        assert_int_equal(engine_sampler_n_best(sm), 0);
        for (size_t k = 0; k < KVD_COUNTOF(said); k++)
            engine_sampler_accept(sm, said[k]);
        memset(x, 0, sizeof(x));
        x[4] = 5.0f; /* 1 2 3 came before it: less 2 * 1.5^(3-2) */
        x[7] = i ? 2.01f : 1.99f;
        assert_int_equal(engine_sampler_sample(sm, x), i ? 7 : 4);
        engine_sampler_close(sm);
    }
}

/* Chi-square over 8 tokens, 40,000 draws: 99.99 % quantile of 7 degrees of freedom is 29.9. */
static void test_distribution_follows_temperature(void **state)
{
    const int          n_draw = 40000;
    kvd_sampler_params p      = plain();
    float              x[N];
    double             want[8], total = 0.0, chi = 0.0;
    int                got[8] = { 0 };
    kvd_sampler       *sm;

    (void)state;
    p.temperature = 0.7f;
    sm            = open_it(&p);
    for (int i = 0; i < N; i++)
        x[i] = i < 8 ? 0.4f * (float)i : -INFINITY;
    for (int i = 0; i < 8; i++)
        total += want[i] = exp(0.4 * i / 0.7);
    for (int i = 0; i < n_draw; i++) {
        const int32_t id = engine_sampler_sample(sm, x);

        assert_in_range(id, 0, 7);
        got[id]++;
    }
    for (int i = 0; i < 8; i++) {
        const double e = n_draw * want[i] / total;

        chi += (got[i] - e) * (got[i] - e) / e;
    }
    assert_true(chi < 29.9);
    engine_sampler_close(sm);
}

static void test_penalties(void **state)
{
    kvd_sampler_params p = plain();
    float              x[N];
    kvd_sampler       *sm;

    (void)state;
    p.temperature       = 0.0f;
    p.penalty_last_n    = 3;
    p.repeat_penalty    = 2.0f;
    p.frequency_penalty = 0.25f;
    p.presence_penalty  = 0.5f;
    sm                  = open_it(&p);
    for (int i = 0; i < N; i++)
        x[i] = -10.0f;
    x[1] = 4.0f; /* seen twice: 4/2 - 2*0.25 - 0.5 = 1.0 */
    x[2] = 1.1f; /* not seen */
    engine_sampler_accept(sm, 1);
    engine_sampler_accept(sm, 1);
    assert_int_equal(engine_sampler_sample(sm, x), 2);
    /* now 1, 1, 2 are in the ring; 2 becomes 1.1/2 - 0.75 = -0.2 */
    assert_int_equal(engine_sampler_sample(sm, x), 1);
    /* the ring forgot the first 1: still 1 (twice), 2 (once) */
    engine_sampler_accept(sm, 9);
    engine_sampler_accept(sm, 9);
    engine_sampler_accept(sm, 9);
    assert_int_equal(engine_sampler_sample(sm, x), 1); /* nothing of 1 and 2 is remembered */
    engine_sampler_close(sm);
}

static void test_bias_and_seed(void **state)
{
    const kvd_logit_bias bias = { .token = 300, .bias = 100.0f };
    kvd_sampler_params   p    = plain();
    float                x[N];
    kvd_sampler         *a, *b;

    (void)state;
    random_logits(x, 3);
    a = open_it(&p);
    b = open_it(&p);
    for (int i = 0; i < 200; i++)
        assert_int_equal(engine_sampler_sample(a, x), engine_sampler_sample(b, x));
    engine_sampler_close(a);
    engine_sampler_close(b);
    p.bias   = &bias;
    p.n_bias = 1;
    a        = open_it(&p);
    assert_int_equal(engine_sampler_sample(a, x), 300);
    engine_sampler_close(a);
}

/* Logits with ties, some of them nothing to pick from. */
static void awkward_logits(float *x, uint64_t seed)
{
    kvd_rng r;

    random_logits(x, seed);
    kvd_rng_seed(&r, seed);
    for (int i = 0; i < N; i++) {
        const uint32_t what = (uint32_t)(kvd_rng_f32(&r) * 10.0f);

        if (what == 0)
            x[i] = NAN;
        else if (what == 1)
            x[i] = -INFINITY;
        else if (what < 6)
            x[i] = floorf(x[i]); /* -0 and 0 among them */
    }
    if (seed % 5 == 0) {
        for (int i = 0; i < N; i++)
            x[i] = seed % 2 ? NAN : -INFINITY;
    }
}

/* The best of the logits lead to the token that all of them lead to, draw after draw. */
static void test_the_best_are_enough(void **state)
{
    static const kvd_sampler_params kind[] = {
        { .temperature = 0.0f, .top_p = 1.0f },
        { .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f },
        { .temperature = 1.5f, .top_k = 128, .top_p = 1.0f },
        { .temperature = 1.0f, .top_k = 1, .top_p = 0.5f },
        { .temperature     = 1.0f,
          .top_k           = 30,
          .top_p           = 0.9f,
          .typical_p       = 0.8f,
          .xtc_probability = 0.5f,
          .xtc_threshold   = 0.05f },
        { .temperature = 3.0f, .top_k = 17, .top_p = 0.3f, .min_p = 0.01f },
    };
    const kvd_backend_params bp = { .name = "cpu", .n_thread = 1 };
    kvd_backend             *be;
    kvd_stream              *st;

    (void)state;
    assert_int_equal(kvd_backend_open(&be, &bp, NULL), KVD_OK);
    assert_int_equal(be->ops->stream_open(be, &st, NULL), KVD_OK);
    for (size_t i = 0; i < KVD_COUNTOF(kind); i++) {
        kvd_sampler_params p = kind[i];
        kvd_sampler       *a, *b;
        uint32_t           k;

        p.repeat_penalty = 1.0f;
        p.seed           = 11 + i;
        a                = open_it(&p);
        b                = open_it(&p);
        k                = engine_sampler_n_best(a);
        assert_int_equal(k, p.temperature > 0.0f ? p.top_k : 1);
        for (uint64_t seed = 1; seed < 300; seed++) {
            float         x[N];
            kvd_best_item best[KVD_BEST_MAX];
            kvd_best_args q = {
                .n_row = 1, .n_col = N, .k = k, .x_stride = N, .out_stride = k, .x = x, .out = best
            };

            awkward_logits(x, seed);
            assert_int_equal(be->ops->best(st, &q, NULL), KVD_OK);
            assert_int_equal(engine_sampler_sample(a, x), engine_sampler_choose(b, best, k));
        }
        engine_sampler_close(a);
        engine_sampler_close(b);
    }
    be->ops->stream_close(st);
    kvd_backend_close(be);
}

/* Where all logits matter, it says so. */
static void test_when_the_best_are_not_enough(void **state)
{
    const kvd_logit_bias bias = { .token = 3, .bias = 1.0f };

    (void)state;
    for (int i = 0; i < 6; i++) {
        kvd_sampler_params p = plain();
        kvd_sampler       *sm;

        p.top_k             = i == 0 ? 0 : i == 1 ? KVD_BEST_MAX + 1 : 5;
        p.repeat_penalty    = i == 2 ? 1.1f : 1.0f;
        p.presence_penalty  = i == 3 ? 0.5f : 0.0f;
        p.frequency_penalty = i == 4 ? 0.5f : 0.0f;
        p.bias              = i == 5 ? &bias : NULL;
        p.n_bias            = i == 5;
        sm                  = open_it(&p);
        assert_int_equal(engine_sampler_n_best(sm), 0);
        engine_sampler_close(sm);
    }
}

static void test_bad_params_are_refused(void **state)
{
    const kvd_logit_bias bias   = { .token = N, .bias = 1.0f };
    const kvd_logit_bias forced = { .token = 1, .bias = INFINITY };
    const kvd_logit_bias barred = { .token = 1, .bias = -INFINITY };
    kvd_sampler_params   p;
    kvd_sampler         *sm;

    (void)state;
    p             = plain();
    p.temperature = NAN;
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    p           = plain();
    p.typical_p = NAN;
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    p                = plain();
    p.dry_multiplier = 1.0f; /* without a base of 1 at least */
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    p                = plain();
    p.repeat_penalty = 0.0f;
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    p        = plain();
    p.bias   = &bias;
    p.n_bias = 1;
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    p.bias = &forced; /* there is no softmax with it */
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_E_INVAL);
    assert_null(sm);
    p.bias = &barred;
    assert_int_equal(engine_sampler_open(&sm, N, NULL, &p, NULL), KVD_OK);
    engine_sampler_close(sm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(test_filters),
        cmocka_unit_test(test_typical),
        cmocka_unit_test(test_top_n_sigma),
        cmocka_unit_test(test_xtc),
        cmocka_unit_test(test_dry),
        cmocka_unit_test(test_distribution_follows_temperature),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_bias_and_seed),
        cmocka_unit_test(test_the_best_are_enough),
        cmocka_unit_test(test_when_the_best_are_not_enough),
        cmocka_unit_test(test_bad_params_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
