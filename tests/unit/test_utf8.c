/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "text/text.h"

static void test_round_trip(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp < 0x110800; cp++) {
        const bool   valid = cp <= 0x10ffff && !(cp >= 0xd800 && cp <= 0xdfff);
        char         u[4];
        uint32_t     back;
        const size_t n = utf8_encode(cp, u);

        assert_int_equal(utf8_decode(u, n, &back), n);
        assert_int_equal(back, valid ? cp : 0xfffd);
        for (size_t cut = 1; cut < n; cut++)
            assert_int_equal(utf8_complete_prefix(u, cut), 0);
        assert_int_equal(utf8_complete_prefix(u, n), n);
    }
}

/* Unicode 15, section 3.9, tables 3-8 to 3-11 and their like: one U+FFFD per maximal subpart. */
static void test_maximal_subparts(void **state)
{
    static const struct {
        const char *bytes;
        size_t      used[9]; /* of each step; 0 ends */
        uint32_t    last;    /* the last code point */
    } table[] = {
        { "\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 'A' },
        { "\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 'A' },
        { "\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 'B' },
        { "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", { 2, 1, 3, 2, 1 }, 'A' },
        { "\xf0\x90\x80", { 3 }, 0xfffd },
        { "\xc3(", { 1, 1 }, '(' },
        { "\xf5\x80", { 1, 1 }, 0xfffd },
        { "\xf4\x8f\xbf\xbf", { 4 }, 0x10ffff },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(table); i++) {
        const size_t len = strlen(table[i].bytes);
        size_t       pos = 0;
        uint32_t     cp  = 0;

        for (size_t step = 0; pos < len; step++) {
            const size_t used = utf8_decode(table[i].bytes + pos, len - pos, &cp);

            assert_int_equal(used, table[i].used[step]);
            pos += used;
        }
        assert_int_equal(pos, len);
        assert_int_equal(cp, table[i].last);
    }
}

static size_t decode_all(const char *s, size_t len, uint32_t *cp)
{
    size_t n = 0;

    for (size_t i = 0; i < len; n++)
        i += utf8_decode(s + i, len - i, &cp[n]);
    return n;
}

/* Decoding the complete prefix, and then the rest with what follows, is decoding the whole. */
static void test_prefix_of_random_bytes(void **state)
{
    static const char pool[] =
        "a\x80\xbf\x90\xa0\x9f\x8f\xc2\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff\xc0";
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, 7);
    for (int round = 0; round < 200000; round++) {
        char         s[12];
        uint32_t     whole[12], parts[24];
        const size_t len = 1 + kvd_rng_below(&rng, sizeof(s)), cut = kvd_rng_below(&rng, len + 1);

        for (size_t i = 0; i < len; i++)
            s[i] = pool[kvd_rng_below(&rng, sizeof(pool) - 1)];
        const size_t safe = utf8_complete_prefix(s, cut);
        assert_true(safe <= cut && cut - safe <= 3);
        const size_t n = decode_all(s, len, whole);
        const size_t a = decode_all(s, safe, parts),
                     b = decode_all(s + safe, len - safe, parts + a);
        assert_int_equal(a + b, n);
        assert_memory_equal(whole, parts, n * sizeof(*whole));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_maximal_subparts),
        cmocka_unit_test(test_prefix_of_random_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
