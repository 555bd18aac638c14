/* SPDX-License-Identifier: Apache-2.0 */
/* test_half.c - binary16 and bfloat16 conversions against an independent rounding in double:
 * every 16-bit pattern, every midpoint between neighbours and the floats next to it, random bits.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"

/* x rounded to nearest even with man mantissa bits, least exponent e_min, greatest value max:
 * what the format can hold, in double. */
static double rounded(double x, int man, int e_min, double max)
{
    int    e;
    double q;

    if (x != x || isinf(x) || x == 0)
        return x;
    (void)frexp(x, &e);
    e = e - 1 < e_min ? e_min : e - 1;
    q = ldexp(nearbyint(ldexp(x, man - e)), e - man); /* every step exact but nearbyint */
    return fabs(q) > max ? copysign(INFINITY, x) : q;
}

static void check(float f)
{
    const double f16  = (double)kvd_f16_to_f32(kvd_f32_to_f16(f));
    const double bf16 = (double)kvd_bf16_to_f32(kvd_f32_to_bf16(f));
    const double w16  = rounded((double)f, 10, -14, 65504);
    const double wbf  = rounded((double)f, 7, -126, 0x1.fep127);

    if (f != f) {
        assert_true(f16 != f16 && bf16 != bf16);
        return;
    }
    if (f16 != w16 || signbit(f16) != signbit(w16))
        fail_msg("f16(%a): expected %a, got %a", (double)f, w16, f16);
    if (bf16 != wbf || signbit(bf16) != signbit(wbf))
        fail_msg("bf16(%a): expected %a, got %a", (double)f, wbf, bf16);
}

/* f and its neighbours, both signs. */
static void check_around(float f)
{
    for (int sign = -1; sign <= 1; sign += 2) {
        const float x = (float)sign * f;

        check(x);
        check(nextafterf(x, INFINITY));
        check(nextafterf(x, -INFINITY));
    }
}

static void every_pattern_survives(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        const float f = kvd_f16_to_f32((uint16_t)h), b = kvd_bf16_to_f32((uint16_t)h);

        if (f == f)
            assert_int_equal(kvd_f32_to_f16(f), h);
        else
            assert_int_equal(kvd_f32_to_f16(f) & 0x7e00, 0x7e00);
        if (b == b)
            assert_int_equal(kvd_f32_to_bf16(b), h);
        else
            assert_int_equal(kvd_f32_to_bf16(b) & 0x7fc0, 0x7fc0);
    }
}

static void f16_decodes_by_definition(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++) {
        const uint32_t exp = h >> 10, man = h & 1023;
        const double   v = exp ? ldexp(1024 + man, (int)exp - 25) : ldexp(man, -24);

        assert_true((double)kvd_f16_to_f32((uint16_t)h) == v);
        assert_true((double)kvd_f16_to_f32((uint16_t)(h | 0x8000)) == -v);
    }
    assert_true(isinf(kvd_f16_to_f32(0x7c00)) && isinf(kvd_f16_to_f32(0xfc00)));
    assert_true(kvd_f16_to_f32(0xfc00) < 0);
}

static void midpoints_round_to_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7c00; h++) {
        const float low  = kvd_f16_to_f32((uint16_t)h);
        const float high = h == 0x7bff ? 65536.0f : kvd_f16_to_f32((uint16_t)(h + 1));

        check_around(low);
        check_around((low + high) / 2);
    }
    for (uint32_t h = 0; h < 0x7f80; h++) {
        check_around(kvd_bits_to_f32(h << 16));
        check_around(kvd_bits_to_f32(h << 16 | 0x8000));
    }
}

static void random_bits(void **state)
{
    const uint64_t seed = kvd_now_ns();
    kvd_rng        r;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kvd_rng_seed(&r, seed);
    for (int i = 0; i < 1000000; i++)
        check(kvd_bits_to_f32((uint32_t)kvd_rng_u64(&r)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_survives),
        cmocka_unit_test(f16_decodes_by_definition),
        cmocka_unit_test(midpoints_round_to_even),
        cmocka_unit_test(random_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
