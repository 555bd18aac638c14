/* SPDX-License-Identifier: Apache-2.0 */
/* test_gram_values.c - numbers to the last digit, literals as they are written, and keywords in the
 * words that clients and earlier drafts use. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "support/gram_check.h"
#include "text/gram_impl.h"

/* Digits decide, at any size: what a double rounds is one beside the other here. */
static void numbers_exact(void **state)
{
    (void)state;
    gram_check("{\"type\":\"integer\",\"minimum\":9007199254740993,\"maximum\":9007199254740993}",
               "9007199254740993", "9007199254740992\t9007199254740994\t-9007199254740993");
    gram_check("{\"type\":\"integer\",\"exclusiveMinimum\":9007199254740992,"
               "\"exclusiveMaximum\":9007199254740995}",
               "9007199254740993\t9007199254740994", "9007199254740992\t9007199254740995");
    gram_check("{\"type\":\"integer\",\"minimum\":-9007199254740995,\"maximum\":-9007199254740993}",
               "-9007199254740993\t-9007199254740995", "-9007199254740992\t-9007199254740996");
    gram_check("{\"type\":\"integer\",\"minimum\":-9223372036854775808,"
               "\"maximum\":9223372036854775807}",
               "9223372036854775807\t-9223372036854775808\t0\t1700000000000000000",
               "9223372036854775808\t-9223372036854775809\t10000000000000000000\t-0");
    gram_check("{\"type\":\"integer\",\"minimum\":0,\"maximum\":18446744073709551615}",
               "18446744073709551615\t0", "18446744073709551616\t-1\t20000000000000000000");
    gram_check("{\"type\":\"integer\",\"format\":\"uint64\"}", "18446744073709551615",
               "18446744073709551616\t-1");
    gram_check("{\"type\":\"integer\",\"format\":\"int64\"}", "9223372036854775807",
               "9223372036854775808");
    gram_check("{\"type\":\"integer\",\"format\":\"uint8\"}", "255\t0", "256\t-1");
    gram_check("{\"type\":\"integer\",\"minimum\":123456789012345678901234567890,"
               "\"maximum\":123456789012345678901234567891}",
               "123456789012345678901234567890\t123456789012345678901234567891",
               "123456789012345678901234567889\t123456789012345678901234567892");
    gram_check("{\"type\":\"integer\",\"minimum\":18446744073709551616}",
               "18446744073709551616\t99999999999999999999\t100000000000000000000",
               "18446744073709551615\t9");
    gram_check("{\"type\":\"integer\",\"minimum\":9223372036854775807}", "9223372036854775807",
               "9223372036854775808\t9999999999999999999");
    gram_check("{\"type\":\"integer\",\"exclusiveMaximum\":-9223372036854775808}",
               "-9223372036854775809", "-9223372036854775808\t0");
    gram_check("{\"type\":\"number\",\"minimum\":0.1,\"maximum\":0.30000000000000000001}",
               "0.1\t0.3\t0.30000000000000000001", "0.09\t0.30000000000000000002\t0.31");
    gram_check("{\"allOf\":[{\"minimum\":9007199254740992},{\"minimum\":9007199254740993}],"
               "\"type\":\"integer\",\"maximum\":9007199254740993}",
               "9007199254740993", "9007199254740992");
    gram_check("{\"enum\":[9007199254740992,9007199254740993,9007199254740994.5],"
               "\"minimum\":9007199254740993}",
               "9007199254740993\t9007199254740994.5", "9007199254740992");
    gram_check("{\"allOf\":[{\"enum\":[9007199254740992,18446744073709551616]},"
               "{\"enum\":[9007199254740993,18446744073709551616]}]}",
               "18446744073709551616", "9007199254740992\t9007199254740993\t18446744073709551617");
    gram_check("{\"oneOf\":[{\"const\":18446744073709551616},{\"const\":18446744073709551617}]}",
               "18446744073709551616\t18446744073709551617", "18446744073709551618");
}

/* Literals are written as the schema writes them. */
static void numbers_as_spelt(void **state)
{
    (void)state;
    gram_check("{\"enum\":[0.1,0.7,1.50,1E2,-0,-0.0]}", "0.1\t0.7\t1.50\t1E2\t-0\t-0.0",
               "0.10000000000000001\t0.69999999999999996\t1.5\t100.0\t0\t1e2");
    gram_check(
        "{\"const\":[0.1,{\"x\":18446744073709551616}]}", "[0.1,{\"x\":18446744073709551616}]",
        "[0.10000000000000001,{\"x\":18446744073709551616}]\t[0.1,{\"x\":1.8446744073709552e19}]");
    gram_check("{\"const\":1e999}", "1e999", "1");
    gram_check("{\"const\":2.0,\"type\":\"integer\",\"minimum\":2}", "2.0", "2");
    gram_check("{\"allOf\":[{\"enum\":[1.0,2]},{\"enum\":[1,3]}]}", "1.0", "1\t2\t3");
    gram_must_refuse("{\"type\":\"number\",\"maximum\":1e999}",
                     "maximum: a number of more than 400 digits");
    gram_must_refuse("{\"minLength\":1.00000000000000000001}", "minLength");
}

static void multiples(void **state)
{
    (void)state;
    gram_check("{\"type\":\"integer\",\"multipleOf\":7}", "0\t14\t-21\t9223372036854775807",
               "15\t9223372036854775806\t-1\t7.0");
    gram_check("{\"type\":\"integer\",\"multipleOf\":5,\"minimum\":9007199254740991,"
               "\"maximum\":9007199254741000}",
               "9007199254740995\t9007199254741000", "9007199254740993\t9007199254740990");
    gram_check("{\"type\":\"number\",\"multipleOf\":0.01,\"minimum\":0,\"maximum\":1}",
               "0.25\t1\t0.5\t0.50\t1.00", "0.255\t1.01\t-0.1");
    gram_check("{\"type\":\"number\",\"multipleOf\":2.5}", "7.5\t5\t5.0\t-2.5",
               "7\t7.55\t0.5\t1e1");
    gram_check("{\"type\":\"integer\",\"multipleOf\":2.5}", "5\t-10\t0", "2\t7\t7.5");
    gram_check("{\"type\":\"number\",\"multipleOf\":1.0}", "3", "3.5");
    gram_check("{\"enum\":[9007199254740993,9007199254740992,0.3],\"multipleOf\":3}",
               "9007199254740993", "9007199254740992\t0.3");
    gram_must_refuse("{\"multipleOf\":1.00000000000000000001}", "multipleOf");
    gram_must_refuse("{\"multipleOf\":1001}", "multipleOf");
    gram_must_refuse("{\"multipleOf\":0}", "multipleOf");
    gram_must_refuse("{\"multipleOf\":-2}", "multipleOf");
    gram_must_refuse("{\"multipleOf\":\"2\"}", "multipleOf must be a number");
    gram_must_refuse("{\"type\":\"integer\",\"multipleOf\":7,\"minimum\":15,\"maximum\":20}",
                     "no value fits");
}

/* As clients send them. */
static void property_names(void **state)
{
    (void)state;
    gram_check("{\"type\":\"object\",\"propertyNames\":{\"type\":\"string\"},"
               "\"additionalProperties\":{\"type\":\"integer\"}}",
               "{}\t{\"a\":1,\"\\u0062\":2}", "{\"a\":\"x\"}\t{1:1}");
    gram_check(
        "{\"propertyNames\":{\"enum\":[\"a\",\"b\"]},\"properties\":{\"a\":{\"type\":\"null\"},"
        "\"c\":{}},\"additionalProperties\":{\"type\":\"integer\"}}",
        "{}\t{\"a\":null,\"b\":1}\t{\"b\":1}", "{\"c\":1}\t{\"a\":1}\t{\"d\":1}");
    gram_check("{\"propertyNames\":{\"pattern\":\"^[a-c]+$\",\"maxLength\":3},"
               "\"properties\":{\"ab\":{\"type\":\"null\"}},\"additionalProperties\":true}",
               "{\"ab\":null,\"abc\":1,\"a\":2}\t{\"b\":1}", "{\"ab\":1}\t{\"d\":1}\t{\"abca\":1}");
    gram_check("{\"propertyNames\":{\"minLength\":2},\"properties\":{\"ab\":{\"type\":\"null\"}},"
               "\"additionalProperties\":{\"type\":\"integer\"}}",
               "{\"xyz\":1}\t{\"ab\":null,\"a\\\"\":1}", "{\"ab\":1}\t{\"a\":1}\t{\"\":1}");
    gram_check("{\"type\":\"object\",\"propertyNames\":false}", "{}", "{\"a\":1}");
    gram_check(
        "{\"allOf\":[{\"propertyNames\":{\"pattern\":\"^a\"}},{\"propertyNames\":{\"pattern\":"
        "\"b$\"}}],\"type\":\"object\"}",
        "{\"axb\":1}\t{}", "{\"a\":1}\t{\"b\":1}");
    gram_must_refuse("{\"propertyNames\":{\"pattern\":\"^a$\"},\"required\":[\"b\"]}",
                     "no value fits");
    gram_must_refuse("{\"propertyNames\":{\"anyOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}]}}",
                     "propertyNames");
}

static void counted_patterns(void **state)
{
    const char *schema = "{\"type\":\"string\",\"allOf\":[{\"pattern\":\"^[^\\\\n\\\\r]*$\"},"
                         "{\"pattern\":\"^[\\\\s\\\\S]{0,300}$\"}]}";
    kvd_buf     text   = { 0 };
    gram       *g      = gram_must_open(schema);

    (void)state;
    kvd_buf_puts(&text, "\"\xc3\xa9");
    for (int i = 0; i < 299; i++)
        kvd_buf_putc(&text, 'x');
    kvd_buf_puts(&text, "x\"");
    assert_false(gram_takes(g, text.data, text.len));
    text.data[--text.len - 1] = '"';
    assert_true(gram_takes(g, text.data, text.len));
    assert_true(gram_takes(g, "\"\"", 2));
    assert_true(gram_takes(g, "\"a\\tb\"", 6));
    assert_false(gram_takes(g, "\"a\\nb\"", 6));
    kvd_buf_free(&text);
    gram_close(g);
    gram_check("{\"pattern\":\"^[a-z]{2,3}$\",\"minLength\":3}", "\"abc\"", "\"ab\"\t\"abcd\"");
    gram_check("{\"pattern\":\"^a{2}$\"}", "\"aa\"", "\"a\"\t\"aaa\"");
    gram_check("{\"pattern\":\"^.{1,}$\"}", "\"a\"\t\"\xc3\xa9\xc3\xa9\"", "\"\"\t\"\\n\"");
    gram_check("{\"enum\":[\"a\",\"bb\",\"ccc\"],\"pattern\":\"^\\\\w{2}$\"}", "\"bb\"",
               "\"a\"\t\"ccc\"");
    gram_check("{\"allOf\":[{\"pattern\":\"^[a-z]{2,9}$\"},{\"pattern\":\"^[b-y]{0,4}$\"},"
               "{\"pattern\":\"^b\"}]}",
               "\"bb\"\t\"bcde\"", "\"b\"\t\"bcdef\"\t\"ab\"\t\"cb\"");
}

/* Draft 4 and OpenAPI 3.0: items as a list, flags for exclusive bounds. */
static void earlier_drafts(void **state)
{
    (void)state;
    gram_check("{\"type\":\"array\",\"items\":[{\"type\":\"string\"},{\"type\":\"integer\"}]}",
               "[]\t[\"a\"]\t[\"a\",1]", "[1]\t[\"a\",\"b\"]\t[\"a\",1,2]");
    gram_check("{\"items\":[{\"type\":\"string\"}],\"additionalItems\":{\"type\":\"null\"}}",
               "[\"a\"]\t[\"a\",null,null]", "[null]\t[\"a\",1]");
    gram_check("{\"items\":[{},{}],\"additionalItems\":false,\"minItems\":2}", "[1,2]",
               "[1]\t[1,2,3]");
    gram_check("{\"items\":[{\"type\":\"null\"}],\"minItems\":2}", "[null,1]\t[null,\"a\",2]",
               "[null]\t[1,1]");
    gram_check("{\"items\":{\"type\":\"null\"},\"additionalItems\":false}", "[null,null]", "[1]");
    gram_check("{\"type\":\"integer\",\"minimum\":3,\"exclusiveMinimum\":true,\"maximum\":6,"
               "\"exclusiveMaximum\":false}",
               "4\t6", "3\t7");
    gram_check("{\"allOf\":[{\"type\":\"integer\",\"maximum\":6,\"exclusiveMaximum\":true},"
               "{\"minimum\":4}]}",
               "4\t5", "6\t3");
    gram_must_refuse("{\"items\":[{}],\"prefixItems\":[{}]}", "items as a list");
}

static void no_memory(void **state)
{
    static const char *const schema[] = {
        "{\"enum\":[0.5,{\"a\":18446744073709551616}],\"minimum\":0.25}",
        "{\"type\":\"number\",\"multipleOf\":0.5,\"maximum\":1e20}",
        ("{\"propertyNames\":{\"pattern\":\"^a{0,9}$\"},\"properties\":{\"aa\":{}},"
         "\"additionalProperties\":true}"),
        "{\"propertyNames\":{\"enum\":[\"a\",\"b\"]},\"items\":[{}]}"
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(schema); i++)
        for (int64_t n = 0;; n++) {
            const gram_desc d   = { .schema_json = schema[i] };
            kvd_err         err = { 0 };
            gram           *g;
            kvd_status      st;

            kvd_alloc_fault(n, false);
            st = gram_open(&g, gram_check_trie, &d, &err);
            gram_close(g);
            if (!kvd_alloc_fault_hit()) {
                kvd_alloc_fault(-1, false);
                assert_int_equal(st, KVD_OK);
                break;
            }
            assert_int_equal(st, KVD_E_NOMEM);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_exact),    cmocka_unit_test(numbers_as_spelt),
        cmocka_unit_test(multiples),        cmocka_unit_test(property_names),
        cmocka_unit_test(counted_patterns), cmocka_unit_test(earlier_drafts),
        cmocka_unit_test(no_memory),
    };

    return cmocka_run_group_tests(tests, gram_check_open, gram_check_close);
}
