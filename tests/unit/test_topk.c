/* SPDX-License-Identifier: Apache-2.0 */
/* test_topk.c - picking the best k, the average's rule and a selection's small print, at every
 * level this machine has: exhaustively on small cases, then at random with many ties.
 *
 * --seed N repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_index_kernel.h"
#include "os/os.h"

#define N_MAX 5000u

static uint64_t test_seed = 1;

static const cpu_index_kernels *level(int isa)
{
    static const cpu_index_kernels *const k[] = { &cpu_index_portable, &cpu_index_avx2,
                                                  &cpu_index_avx512 };

    return isa < 3 && isa <= (int)os_cpu_get()->isa ? k[isa] : NULL;
}

/* How many of score[0 .. n) come before position i: higher, or equal and lower in position. */
static uint32_t rank_of(const float *score, uint32_t n, uint32_t i)
{
    uint32_t rank = 0;

    for (uint32_t j = 0; j < n; j++)
        rank += score[j] > score[i] || (score[j] == score[i] && j < i);
    return rank;
}

static void check_best(const cpu_index_kernels *k, const float *score, uint32_t n, uint32_t want)
{
    static uint32_t bits[N_MAX], pos[N_MAX];
    const uint32_t  got = k->best(score, n, want, bits, pos);
    uint32_t        at  = 0;

    assert_int_equal(got, want < n ? want : n);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t b;

        if (rank_of(score, n, i) >= want)
            continue;
        assert_true(at < got);
        if (pos[at] != i)
            fail_msg("best %u of %u: position %u is %u, not %u", want, n, at, pos[at], i);
        memcpy(&b, score + i, sizeof(b));
        assert_int_equal(bits[at], b);
        at++;
    }
    assert_int_equal(at, got);
}

/* Every array of up to 6 of 4 values, every k. */
static void test_best_exhaustive(void **state)
{
    static const float value[4] = { 0.0f, 1e-38f, 0.25f, 1.0f };
    float              score[6];

    (void)state;
    for (int isa = 0; level(isa); isa++) {
        for (uint32_t n = 0; n <= 6; n++) {
            for (uint32_t code = 0; code < 1u << (2 * n); code++) {
                for (uint32_t i = 0; i < n; i++)
                    score[i] = value[code >> (2 * i) & 3];
                for (uint32_t k = 0; k <= n + 1; k++)
                    check_best(level(isa), score, n, k);
            }
        }
    }
}

/* Scores as selections have them: a few large, most tiny, many equal (few distinct values, or 0).
 */
static float random_score(kvd_rng *r, uint32_t kind)
{
    const float x = kvd_rng_f32(r);

    switch (kind) {
    case 0:
        return x;
    case 1:
        return x * x * x * x * x * x * x * x;
    case 2:
        return (float)(uint32_t)(x * 5.0f) / 8.0f;
    case 3:
        return x < 0.98f ? 0.0f : x;
    default:
        return 0.125f;
    }
}

static void test_best_random(void **state)
{
    static float score[N_MAX + 1];
    kvd_rng      rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (uint32_t round = 0; round < 300; round++) {
        const uint32_t n   = (uint32_t)kvd_rng_below(&rng, round < 280 ? 700 : N_MAX);
        const uint32_t off = round % 2; /* scores need no alignment */
        const uint32_t k   = (uint32_t)kvd_rng_below(&rng, n + 2) >> kvd_rng_below(&rng, 6);

        for (uint32_t i = 0; i < n; i++)
            score[off + i] = random_score(&rng, round % 5);
        for (int isa = 0; level(isa); isa++)
            check_best(level(isa), score + off, n, k);
    }
}

/* What `threshold` promises: at least k reach it, and `above` says how many are larger if more. */
static void test_threshold(void **state)
{
    static uint32_t bits[N_MAX];
    kvd_rng         rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (uint32_t round = 0; round < 2000; round++) {
        const uint32_t n = 1 + (uint32_t)kvd_rng_below(&rng, 60);
        const uint32_t k = 1 + (uint32_t)kvd_rng_below(&rng, n);

        for (uint32_t i = 0; i < n; i++) {
            const float x = random_score(&rng, round % 5);
            memcpy(bits + i, &x, sizeof(x));
        }
        for (int isa = 0; level(isa); isa++) {
            uint32_t       above, reach = 0, larger = 0;
            const uint32_t least = level(isa)->threshold(bits, n, k, &above);

            for (uint32_t i = 0; i < n; i++) {
                reach += bits[i] >= least;
                larger += bits[i] > least;
            }
            assert_true(reach >= k);
            if (reach == k)
                assert_true(above == k || above == larger);
            else
                assert_true(above == larger && larger < k);
        }
    }
}

/* Every half that an average can be, against the rule spelled out. */
static void test_ema_rule(void **state)
{
    static const float alpha[] = { 0.5f, 1.0f, 0.0f, 0.3f, 0.1f };
    static uint16_t    ema[0x7c00];
    static float       score[0x7c00];
    kvd_rng            rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t a = 0; a < KVD_COUNTOF(alpha); a++) {
        for (uint32_t i = 0; i < 0x7c00; i++)
            score[i] = random_score(&rng, i % 5);
        for (int isa = 0; level(isa); isa++) {
            for (uint32_t i = 0; i < 0x7c00; i++)
                ema[i] = (uint16_t)i;
            level(isa)->ema(ema, score, 0x7c00 - 3, alpha[a]);
            for (uint32_t i = 0; i < 0x7c00 - 3; i++) {
                volatile float keep = 1.0f - alpha[a], add = alpha[a] * 32768.0f;
                volatile float old = kvd_f16_to_f32((uint16_t)i) * keep, now = score[i] * add;
                volatile float sum = old + now;

                if (ema[i] != kvd_f32_to_f16(sum))
                    fail_msg("level %d, alpha %g: average %04x and score %g give %04x, not %04x",
                             isa, (double)alpha[a], i, (double)score[i], ema[i],
                             kvd_f32_to_f16(sum));
            }
            assert_int_equal(ema[0x7c00 - 1], 0x7c00 - 1);
        }
    }
}

/* A NaN mixes to 0, not past 1, and masses are whole units. */
static void test_scores_stay_in_range(void **state)
{
    float         e[16], out[16];
    const float   scale[1] = { 1.0f };
    cpu_index_mix m        = {
               .n_chunk = 16, .n_head = 1, .e = e, .scale = scale, .score = out, .n_out = 15
    };

    (void)state;
    for (int isa = 0; level(isa); isa++) {
        for (int largest = 0; largest < 2; largest++) {
            for (uint32_t i = 0; i < 16; i++)
                e[i] = i % 4 == 0 ? __builtin_nanf("") : i % 4 == 1 ? 3.0f : 0.25f;
            m.largest = largest;
            out[15]   = 7.0f;
            level(isa)->mix(&m);
            for (uint32_t i = 0; i < 15; i++)
                assert_true(out[i] == (i % 4 == 0 ? 0.0f : i % 4 == 1 ? 1.0f : 0.25f));
            assert_true(out[15] == 7.0f);
        }
    }
    assert_true(cpu_select_clamp(__builtin_nanf("")) == 0.0f);
    assert_true(cpu_select_mass(1.0f) == 1ull << 40 && cpu_select_mass(0x1p-41f) == 0);
    assert_int_equal(cpu_select_n_urgent(0), 0);
    assert_int_equal(cpu_select_n_urgent(1), 1);
    assert_int_equal(cpu_select_n_urgent(15), 1);
    assert_int_equal(cpu_select_n_urgent(512), 64);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best_exhaustive),
        cmocka_unit_test(test_best_random),
        cmocka_unit_test(test_threshold),
        cmocka_unit_test(test_ema_rule),
        cmocka_unit_test(test_scores_stay_in_range),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
