/* SPDX-License-Identifier: Apache-2.0 */
/* test_json.c - JSON to values and back: numbers keep their text; what is no JSON is refused where
 * it stops to be; decimal digits compare exactly; failing allocations. */
#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/json.h"

/* ---- decimals ---------------------------------------------------------------------------- */

static kvd_decimal must_read(const char *text)
{
    kvd_decimal d;

    if (!kvd_decimal_read(text, &d))
        fail_msg("%s: not read", text);
    return d;
}

/* Ascending; those in one string, separated by blanks, are equal. */
static void decimals_compare(void **state)
{
    static const char *const order[] = { "-1e400",
                                         "-18446744073709551616",
                                         "-9007199254740993 -9007199254740993.000",
                                         "-9007199254740992",
                                         "-0.2",
                                         "-0.10 -1e-1 -10E-2",
                                         "0 -0 0.000 0e999999999999 -0e-5",
                                         "5e-324",
                                         "0.1 0.10 1E-1",
                                         "0.10000000000000000001",
                                         "1 1.0 10e-1 0.01e+2",
                                         "9.99",
                                         "10",
                                         "9007199254740992",
                                         "9007199254740993 900719925474099.3e1",
                                         "1.7976931348623157e308" };
    kvd_decimal              before  = { 0 }, d;

    (void)state;
    for (size_t i = 1; i < KVD_COUNTOF(order); i++)
        for (const char *s = order[i]; *s; s += strcspn(s, " "), s += *s == ' ') {
            char text[64];

            snprintf(text, sizeof(text), "%.*s", (int)strcspn(s, " "), s);
            d = must_read(text);
            if (s == order[i] && i > 1 && kvd_decimal_cmp(&before, &d) >= 0)
                fail_msg("%s is not above the one before", text);
            if (s == order[i] && i > 1 && kvd_decimal_cmp(&d, &before) <= 0)
                fail_msg("%s is not above the one before", text);
            if (s != order[i] && kvd_decimal_cmp(&before, &d) != 0)
                fail_msg("%s is another", text);
            before = d;
        }
    assert_false(kvd_decimal_read(order[0], &d));
    assert_false(kvd_decimal_read("1e-400", &d));
    assert_false(kvd_decimal_read("1e99999999999999999999", &d));
    assert_true(kvd_decimal_read("1e399", &d));
    assert_int_equal(d.n_int, 400);
}

static void decimals_as_integers(void **state)
{
    static const struct {
        const char *text;
        bool        fits;
        int64_t     value;
    } c[] = { { "9223372036854775807", true, INT64_MAX },
              { "9223372036854775808", false, 0 },
              { "-9223372036854775808", true, INT64_MIN },
              { "-9223372036854775809", false, 0 },
              { "9007199254740993.0", true, 9007199254740993 },
              { "16.0", true, 16 },
              { "1.6e1", true, 16 },
              { "-0", true, 0 },
              { "0.5", false, 0 },
              { "1e30", false, 0 } };
    kvd_decimal d;
    uint64_t    whole;

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(c); i++) {
        int64_t x = 0;

        d = must_read(c[i].text);
        if (kvd_decimal_int64(&d, &x) != c[i].fits || x != c[i].value)
            fail_msg("%s: %lld", c[i].text, (long long)x);
    }
    d = must_read("18446744073709551615");
    assert_true(kvd_decimal_whole(&d, &whole) && whole == UINT64_MAX);
    d = must_read("18446744073709551616");
    assert_false(kvd_decimal_whole(&d, &whole));
    d = must_read("9007199254740993");
    assert_true(kvd_decimal_multiple(&d, 3, 0));
    assert_false(kvd_decimal_multiple(&d, 2, 0));
    d = must_read("-19.99");
    assert_true(kvd_decimal_multiple(&d, 1, 2));
    assert_false(kvd_decimal_multiple(&d, 1, 1));
    assert_true(kvd_decimal_multiple(&d, 1999, 2));
}

/* ---- JSON -------------------------------------------------------------------------------- */

static json_t *must_parse(kvd_json_texts *t, const char *text)
{
    kvd_json_error e;
    json_t        *v = kvd_json_read(t, text, strlen(text), KVD_JSON_NUL, &e);

    if (!v)
        fail_msg("%s: byte %zu: %s", text, e.byte, e.text);
    return v;
}

/* Each is written as it was read. */
static void round_trips(void **state)
{
    static const char *const text[] = {
        "0",
        "-0",
        "-0.0",
        "1.50",
        "1E+2",
        "0.1",
        "1e400",
        "-1e-400",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "123456789012345678901234567890",
        "[0.10,1,[],{}]",
        "{\"a\":1.0,\"b\":[2e0,{\"\":-1.10}]}",
        "\"\\\"\\\\\\b\\f\\n\\r\\t\\u0001\"",
        "\"\\u0000\"",
        "\"\x7f\xc3\xa9\xf0\x9f\x98\x80\xed\x9f\xbf\"",
        "[true,false,null]",
        "{\"maximum\":18446744073709551616,\"enum\":[0.10000000000000000001]}"
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(text); i++) {
        kvd_json_texts t   = { 0 };
        kvd_buf        out = { 0 };
        json_t        *v   = must_parse(&t, text[i]);

        kvd_json_put(&t, v, &out);
        assert_string_equal(out.data, text[i]);
        kvd_buf_free(&out);
        json_decref(v);
        kvd_json_texts_free(&t);
    }
}

static void values(void **state)
{
    kvd_json_texts t = { 0 };
    kvd_buf        b = { 0 };
    char           buf[KVD_JSON_NUMBER_BYTES];
    json_t *v = must_parse(&t, " { \"a\" : [ 1 , -2.5e1, 1e999, \"\\u00e9\\ud83d\\ude00\\/\" ] ,"
                               "\r\n\t\"a\": 7, \"b\": 18446744073709551616 } ");

    (void)state;
    assert_int_equal(json_object_size(v), 2); /* the last of two alike */
    assert_int_equal(json_integer_value(json_object_get(v, "a")), 7);
    assert_true(json_is_real(json_object_get(v, "b")));
    assert_true(json_real_value(json_object_get(v, "b")) == 0x1p64);
    json_decref(v);
    v = must_parse(&t, "[-2.5e1,1e999,-1e999,\"\\u00e9\\ud83d\\ude00\\/\"]");
    assert_true(json_real_value(json_array_get(v, 0)) == -25.0);
    assert_true(json_real_value(json_array_get(v, 1)) == DBL_MAX);
    assert_true(json_real_value(json_array_get(v, 2)) == -DBL_MAX);
    assert_string_equal(kvd_json_number(&t, json_array_get(v, 1), buf), "1e999");
    assert_string_equal(json_string_value(json_array_get(v, 3)), "\xc3\xa9\xf0\x9f\x98\x80/");
    json_decref(v);
    /* numbers that were made, not read */
    v = json_pack("[f, f, I]", 0.1, 5.0, (json_int_t)INT64_MIN);
    kvd_json_put(&t, v, &b);
    assert_string_equal(b.data, "[0.1,5.0,-9223372036854775808]");
    json_decref(v);
    kvd_buf_free(&b);
    kvd_json_texts_free(&t);
}

static void many_texts(void **state)
{
    kvd_json_texts t  = { 0 };
    kvd_buf        in = { 0 }, out = { 0 };
    json_t        *v;

    (void)state;
    for (int i = 0; i < 5000; i++)
        kvd_buf_printf(&in, "%c%d.50", i ? ',' : '[', i);
    kvd_buf_putc(&in, ']');
    v = must_parse(&t, in.data);
    assert_int_equal(t.n, 5000);
    kvd_json_put(&t, v, &out);
    assert_string_equal(out.data, in.data);
    json_decref(v);
    kvd_json_texts_free(&t);
    kvd_buf_free(&in);
    kvd_buf_free(&out);
}

static void refused(void **state)
{
    static const struct {
        const char *text;
        size_t      byte;
        const char *what;
    } c[]            = { { "", 0, "ends" },
                         { "  ", 2, "ends" },
                         { "[1,]", 3, "a value" },
                         { "[1", 2, "ends" },
                         { "[1 2]", 3, "',' or ']'" },
                         { "{\"a\"}", 4, "':'" },
                         { "{\"a\":1,}", 7, "a key" },
                         { "{a:1}", 1, "a key" },
                         { "01", 1, "the end" },
                         { "-", 1, "a digit" },
                         { "1.", 2, "a digit" },
                         { "1e", 2, "a digit" },
                         { "1e+", 3, "a digit" },
                         { ".5", 0, "a value" },
                         { "+1", 0, "a value" },
                         { "NaN", 0, "a value" },
                         { "nul", 0, "a value" },
                         { "truex", 4, "the end" },
                         { "\"a", 2, "ends" },
                         { "\"\n\"", 1, "byte 0x0a" },
                         { "\"\\x\"", 2, "an escape" },
                         { "\"\\u12g4\"", 5, "hexadecimal" },
                         { "\"\\ud800\"", 7, "surrogate" },
                         { "\"\\ud800\\u0041\"", 13, "surrogate" },
                         { "\"\\udc00\"", 7, "surrogate" },
                         { "\"\xff\"", 1, "UTF-8" },
                         { "\"\xc3\"", 1, "UTF-8" },
                         { "\"\xc0\xaf\"", 1, "UTF-8" },
                         { "\"\xe0\x80\x80\"", 1, "UTF-8" },
                         { "\"\xed\xa0\x80\"", 1, "UTF-8" },
                         { "\"\xf4\x90\x80\x80\"", 1, "UTF-8" },
                         { "{\"\\u0000\":1}", 9, "zero byte" },
                         { "\xef\xbb\xbf{}", 0, "byte 0xef" },
                         { "1 x", 2, "the end" } };
    kvd_json_texts t = { 0 };
    kvd_json_error e;

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(c); i++) {
        json_t *v = kvd_json_read(&t, c[i].text, strlen(c[i].text), KVD_JSON_NUL, &e);

        if (v || e.byte != c[i].byte || !strstr(e.text, c[i].what) || e.no_memory)
            fail_msg("%s: %s (byte %zu)", c[i].text, v ? "taken" : e.text, e.byte);
    }
    assert_null(kvd_json_read(&t, "[\n 1,\n x]", 9, 0, &e));
    assert_int_equal(e.line, 3);
    assert_int_equal(e.column, 2);
    assert_null(kvd_json_read(&t, "1\0", 2, 0, &e));
    assert_null(kvd_json_read(&t, "\"\\u0000\"", 8, 0, &e));
    assert_null(kvd_json_read(&t, "{\"a\":1,\"a\":1}", 13, KVD_JSON_UNIQUE, &e));
    assert_non_null(strstr(e.text, "duplicate"));
    kvd_json_texts_free(&t);
}

static void depth(void **state)
{
    kvd_json_texts t  = { 0 };
    kvd_buf        in = { 0 };
    kvd_json_error e;
    json_t        *v;

    (void)state;
    for (int i = 0; i < KVD_JSON_MAX_DEPTH + 100; i++)
        kvd_buf_putc(&in, '[');
    assert_null(kvd_json_read(&t, in.data, in.len, 0, &e));
    assert_non_null(strstr(e.text, "in each other"));
    in.len = KVD_JSON_MAX_DEPTH;
    for (int i = 0; i < KVD_JSON_MAX_DEPTH; i++)
        kvd_buf_putc(&in, ']');
    v = kvd_json_read(&t, in.data, in.len, 0, &e);
    assert_non_null(v);
    json_decref(v);
    kvd_buf_free(&in);
    kvd_json_texts_free(&t);
}

static void no_memory(void **state)
{
    const uint64_t live = kvd_alloc_live();
    bool           more = true;

    (void)state;
    for (int64_t n = 0; more; n++) {
        kvd_json_texts t   = { 0 };
        kvd_buf        out = { 0 };
        kvd_json_error e;
        json_t        *v;

        kvd_alloc_fault(n, false);
        v = kvd_json_read(&t, "{\"a\":[1.5,\"x\",2.5],\"b\":{\"c\":1e99}}", 34, 0, &e);
        if (v)
            kvd_json_put(&t, v, &out);
        more = kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        assert_true(v || e.no_memory);
        assert_int_equal(more, !v || out.oom);
        json_decref(v);
        kvd_json_texts_free(&t);
        kvd_buf_free(&out);
        assert_int_equal(kvd_alloc_live(), live);
        assert_true(n < 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decimals_compare),
        cmocka_unit_test(decimals_as_integers),
        cmocka_unit_test(round_trips),
        cmocka_unit_test(values),
        cmocka_unit_test(many_texts),
        cmocka_unit_test(refused),
        cmocka_unit_test(depth),
        cmocka_unit_test(no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
