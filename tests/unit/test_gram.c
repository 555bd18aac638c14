/* SPDX-License-Identifier: Apache-2.0 */
/* test_gram.c - every keyword by texts that fit and texts that do not, refusals by their messages,
 * limits, hostile schemas, failing allocations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/gram_check.h"
#include "text/gram_impl.h"

static void types(void **state)
{
    (void)state;
    gram_check("{}",
               "null\ttrue\tfalse\t0\t-12.5e+3\t\"x\"\t[]\t[1, {\"a\": [null]}]\t{ }\t {\"a\":1 }",
               "nul\t01\t1.\t\"\t[1,]\t{\"a\"}\t{\"a\":1,}\ttrue \t{} x\t.5\t+1\t1e\tTrue");
    gram_check("true", "1\t\"a\"", "x");
    gram_check("{\"type\":\"boolean\"}", "true\tfalse", "null\t0\t\"true\"");
    gram_check("{\"type\":\"null\"}", "null", "0\ttrue");
    gram_check("{\"type\":\"integer\"}", "0\t-7\t1234567890123456789\t9223372036854775807",
               "1.0\t1e3\t00\t9223372036854775808\t-0");
    gram_check("{\"type\":\"number\"}", "0\t-7.25\t1e9\t1E-12", "NaN\t.1\t1.\t1e123");
    gram_check("{\"type\":[\"string\",\"null\"]}", "null\t\"\"", "1\t[]");
    gram_check("{\"type\":\"string\",\"nullable\":true}", "null\t\"\"", "1");
    gram_check("{\"type\":\"array\"}", "[]\t[1,\"a\",[]]", "{}\t[");
    gram_check("{\"type\":\"object\"}", "{}\t{\"a\":{\"b\":[1]},\"c\":null}", "[]\t{a:1}");
    gram_check("{\"minLength\":2}", "\"ab\"", "\"a\"\t12");
}

static void strings(void **state)
{
    (void)state;
    gram_check(
        "{\"type\":\"string\"}",
        "\"\"\t\"a\\n\\u00e9\\\"\\\\\\/"
        "\"\t\"\xc3\xa9\xf0\x9f\x98\x80\"\t\"\\ud83d\\ude00\"\t\"\\uD7ff\"",
        "\"\n\"\t\"\\x\"\t\"\\ud83d\"\t\"\\ude00\"\t\"\\ud83dx\"\t\"\xff\"\t\"\xc3\"\t\"\xed\xa0"
        "\x80\"\t"
        "\"\\u0000\"\t\"\\u12g4\"");
    gram_check("{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
               "\"ab\"\t\"abc\"\t\"\xc3\xa9\xf0\x9f\x98\x80\"\t\"\\n\\u00e9\\ud83d\\ude00\"",
               "\"\"\t\"a\"\t\"abcd\"\t\"\xc3\xa9\"\t\"\\n\\n\\n\\n\"");
    gram_check("{\"type\":\"string\",\"maxLength\":0}", "\"\"", "\"a\"");
    gram_check("{\"type\":\"string\",\"minLength\":3,\"maxLength\":3}", "\"abc\"",
               "\"ab\"\t\"abcd\"");
    gram_check(
        "{\"enum\":[\"a\",\"ab\",\"a\\\"\\n\\u0001\xc3\xa9\",1,2.5,null,true,[1,\"x\"],{\"k\":[]}"
        "]}",
        "\"a\"\t\"ab\"\t\"a\\\"\\n\\u0001\xc3\xa9\"\t1\t2.5\tnull\ttrue\t[1, \"x\"]\t{ \"k\" : [ "
        "] }",
        "\"b\"\t\"abc\"\t\"\"\t2\t[1]\t{\"k\":[1]}\t{}\tfalse\t12");
    gram_check("{\"const\":{\"a\":\"b\",\"c\":{}}}", "{\"a\":\"b\",\"c\":{}}", "{\"a\":\"b\"}\t{}");
    gram_check("{\"enum\":[\"abc\",\"d\",7],\"type\":\"string\",\"maxLength\":2}", "\"d\"",
               "\"abc\"\t7");
    gram_check("{\"enum\":[1,5,9.5,\"x\"],\"minimum\":4,\"type\":[\"number\",\"string\"]}",
               "5\t9.5\t\"x\"", "1");
    gram_check("{\"const\":\"a\",\"enum\":[\"a\",\"b\"]}", "\"a\"", "\"b\"");
}

static void patterns(void **state)
{
    (void)state;
    gram_check("{\"pattern\":\"^a+b?$\"}", "\"a\"\t\"aab\"", "\"\"\t\"b\"\t\"abb\"\t\"ba\"");
    gram_check("{\"pattern\":\"b\"}", "\"b\"\t\"abc\"\t\"\\n\xc3\xa9\\\"b\"", "\"\"\t\"ac\"");
    gram_check("{\"pattern\":\"^(?:ab|c{2,3})$\"}", "\"ab\"\t\"cc\"\t\"ccc\"",
               "\"c\"\t\"cccc\"\t\"abab\"");
    gram_check("{\"pattern\":\"^[^\\\\d\\\\s]{2}$\"}", "\"ab\"\t\"\xc3\xa9-\"",
               "\"a1\"\t\"a b\"\t\"a\"");
    gram_check("{\"pattern\":\"^\\\\w\\\\W\\\\d\\\\D\\\\s\\\\S$\"}", "\"a-1x y\"",
               "\"--1x y\"\t\"a-1x y \"");
    gram_check("{\"pattern\":\"^.\\\\.[\\\\]\\\\\\\\-]\\\\x41\\\\u00e9\\\\t$\"}",
               "\"x.]A\xc3\xa9\\t\"\t\"x.\\\\A\xc3\xa9\\t\"\t\"x.-A\xc3\xa9\\t\"",
               "\"x.]A\xc3\xa9 \"\t\"xx]A\xc3\xa9\\t\"\t\"\\n.]A\xc3\xa9\\t\"");
    gram_check("{\"pattern\":\"^a|b$\"}", "\"axx\"\t\"xxb\"\t\"ab\"", "\"xay\"\t\"bx\"");
    gram_check("{\"pattern\":\"^(|a)(b|)*?$\"}", "\"\"\t\"a\"\t\"bb\"\t\"abb\"", "\"ba\"\t\"aa\"");
    gram_check("{\"pattern\":\"^[0-9]{0,2}$\"}", "\"\"\t\"1\"\t\"12\"", "\"123\"");
    gram_check("{\"pattern\":\"^(ab)+$\",\"minLength\":3,\"maxLength\":5}", "\"abab\"",
               "\"ab\"\t\"ababab\"\t\"aba\"");
    gram_check("{\"pattern\":\"^a*$\",\"minLength\":2}", "\"aa\"\t\"aaaaaa\"", "\"a\"");
    gram_check("{\"pattern\":\"^[\\\"\\\\\\\\]+$\"}", "\"\\\"\\\\\"", "\"a\"");
    gram_check("{\"allOf\":[{\"pattern\":\"^a\"},{\"pattern\":\"z$\"},{\"type\":\"string\","
               "\"maxLength\":4}]}",
               "\"az\"\t\"abcz\"", "\"a\"\t\"z\"\t\"abcdz\"");
    gram_check("{\"type\":\"string\",\"format\":\"date\"}", "\"2024-02-28\"\t\"1999-12-31\"",
               "\"2024-13-01\"\t\"2024-02-30\"\t\"24-1-1\"\t\"2024-04-31\"");
    gram_check("{\"format\":\"date-time\"}",
               "\"2024-02-28T23:59:59Z\"\t\"2024-02-28T00:00:00.123+01:00\"",
               "\"2024-02-28\"\t\"2024-02-28T24:00:00Z\"\t\"2024-02-28T23:59:59\"");
    gram_check("{\"format\":\"time\"}", "\"12:30:00Z\"", "\"12:30\"");
    gram_check("{\"format\":\"uuid\"}", "\"123e4567-e89b-12d3-a456-426614174000\"", "\"123e4567\"");
    gram_check("{\"format\":\"email\"}", "\"a.b@c-d.org\"", "\"a@b\"\t\"@c.org\"\t\"a..b@c.org\"");
    gram_check("{\"format\":\"ipv4\"}", "\"127.0.0.255\"", "\"127.0.0.256\"\t\"1.2.3\"");
    gram_check("{\"format\":\"ipv6\"}", "\"::1\"\t\"fe80::1\"\t\"1:2:3:4:5:6:7:8\"",
               "\"1:2\"\t\":::\"");
    gram_check("{\"format\":\"hostname\"}", "\"a-b.example\"", "\"-a\"\t\"a..b\"");
    gram_check("{\"format\":\"duration\"}", "\"P3D\"\t\"PT5M\"", "\"3D\"\t\"P\"");
    gram_check("{\"format\":\"uri\"}", "\"https://x.org/a?b=1#c\"\t\"mailto:a@b\"",
               "\"x.org\"\t\"http:a b\"");
}

static void numbers(void **state)
{
    (void)state;
    gram_check("{\"type\":\"integer\",\"minimum\":-5,\"maximum\":12}", "-5\t-1\t0\t9\t10\t12",
               "-6\t13\t100\t1.5\t-10");
    gram_check("{\"type\":\"integer\",\"exclusiveMinimum\":0,\"exclusiveMaximum\":100}", "1\t99",
               "0\t100\t-1");
    gram_check("{\"type\":\"integer\",\"minimum\":123,\"maximum\":4567}", "123\t999\t1000\t4567",
               "122\t4568\t12\t45670");
    gram_check("{\"type\":\"integer\",\"minimum\":1.5,\"maximum\":3.5}", "2\t3", "1\t4");
    gram_check("{\"type\":\"integer\",\"minimum\":10}", "10\t123456789", "9\t1\t-10");
    gram_check("{\"type\":\"integer\",\"maximum\":-10}", "-10\t-11\t-999", "-9\t0\t10\t-1");
    gram_check("{\"type\":\"number\",\"minimum\":0,\"maximum\":1}", "0\t0.5\t1\t0.999\t1.0\t0.0",
               "1.01\t2\t-0.5\t1e0");
    gram_check("{\"type\":\"number\",\"minimum\":0.25,\"maximum\":0.5}",
               "0.25\t0.3\t0.5\t0.50\t0.2500", "0.24\t0.51\t0.2\t0\t0.500001");
    gram_check("{\"type\":\"number\",\"exclusiveMinimum\":-1.5,\"exclusiveMaximum\":2.25}",
               "-1.49\t0\t2.2499\t-0.1", "-1.5\t-1.50\t2.25\t2.3\t-2");
    gram_check("{\"type\":\"number\",\"exclusiveMaximum\":0}", "-0.5\t-7", "0\t0.0\t1");
    gram_check("{\"type\":\"number\",\"minimum\":1e-7}", "0.0000001\t1", "0.00000001\t0");
    gram_check("{\"type\":\"integer\",\"format\":\"int32\"}", "2147483647\t-2147483648",
               "2147483648");
    gram_check("{\"type\":\"number\",\"multipleOf\":1}", "3", "3.5");
}

static void objects(void **state)
{
    (void)state;
    gram_check(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{},\"c\":{"
        "\"type\":"
        "\"null\"}},\"required\":[\"b\"]}",
        "{\"b\":1}\t{\"a\":1,\"b\":[]}\t{ \"a\" : 1 , \"b\" : \"x\" , \"c\" : null "
        "}\t{\"b\":1,\"c\":null}",
        "{}\t{\"a\":1}\t{\"b\":1,\"a\":1}\t{\"b\":1,\"d\":1}\t{\"b\":1,\"b\":1}\t{\"b\":1,}\t{,"
        "\"b\":1}");
    gram_check("{\"properties\":{\"a\":{\"type\":\"integer\"}},\"additionalProperties\":{\"type\":"
               "\"null\"}}",
               "{}\t{\"a\":1}\t{\"a\":1,\"b\":null,\"aa\":null}\t{\"x\":null}\t{\"\":null}",
               "{\"a\":null}\t{\"b\":1}\t{\"b\":null,\"a\":1}\t{\"\\u0061\":null}");
    gram_check(
        "{\"properties\":{\"ab\":{},\"a\":{},\"\xc3\xa9\":{}},\"additionalProperties\":true}",
        "{\"abc\":1}\t{\"b\":2}\t{\"\xc3\xaa\":2}\t{\"a\":1,\"aa\":1}", "{\"b\":1,\"ab\":1}");
    gram_check("{\"type\":\"object\",\"properties\":{}}", "{}", "{\"a\":1}");
    gram_check(
        "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"},\"maxProperties\":2,"
        "\"minProperties\":1}",
        "{\"a\":1}\t{\"a\":1,\"b\":2}", "{}\t{\"a\":1,\"b\":2,\"c\":3}\t{\"a\":\"\"}");
    gram_check("{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"minProperties\":1}",
               "{\"a\":1}\t{\"b\":1}", "{}");
    gram_check("{\"type\":\"object\",\"properties\":{\"a\":{}},\"required\":[\"z\"],"
               "\"additionalProperties\":"
               "{\"type\":\"boolean\"}}",
               "{\"z\":true}\t{\"a\":1,\"z\":true,\"q\":false}", "{}\t{\"z\":1}\t{\"a\":1}");
    gram_check("{\"type\":\"object\",\"properties\":{\"a\":false,\"b\":{}}}", "{\"b\":1}\t{}",
               "{\"a\":1}");
}

static void arrays(void **state)
{
    (void)state;
    gram_check(
        "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}",
        "[1,2]\t[ 1 , 2 , 3 ]", "[]\t[1]\t[1,2,3,4]\t[1,\"\"]");
    gram_check("{\"type\":\"array\",\"maxItems\":1}", "[]\t[{}]", "[1,2]");
    gram_check("{\"type\":\"array\",\"maxItems\":0}", "[]", "[1]");
    gram_check("{\"items\":{\"type\":\"array\",\"items\":{\"const\":1},\"minItems\":1}}",
               "[]\t[[1],[1,1]]", "[[]]\t[1]");
    gram_check(
        "{\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"integer\"}],\"items\":{\"type\":"
        "\"null\"},"
        "\"minItems\":1,\"maxItems\":4}",
        "[\"a\"]\t[\"a\",1]\t[\"a\",1,null,null]",
        "[]\t[1]\t[\"a\",null]\t[\"a\",1,null,null,null]");
    gram_check("{\"prefixItems\":[{\"type\":\"string\"}]}", "[]\t[\"a\"]", "[\"a\",1]");
    gram_check("{\"prefixItems\":[{},{}],\"items\":false,\"minItems\":2}", "[1,2]", "[1]\t[1,2,3]");
    gram_check("{\"type\":\"array\",\"items\":false}", "[]", "[1]");
}

static void combined(void **state)
{
    (void)state;
    gram_check(
        "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"array\",\"items\":{\"type\":\"string\"}}]}",
        "1\t[\"a\"]", "\"a\"\t[1]");
    gram_check(
        "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"a\"},\"x\":{\"type\":"
        "\"integer\"}},\"required\":[\"k\",\"x\"]},{\"type\":\"object\",\"properties\":{\"k\":{"
        "\"const\":"
        "\"b\"},\"y\":{\"type\":\"null\"}},\"required\":[\"k\",\"y\"]}]}",
        "{\"k\":\"a\",\"x\":1}\t{\"k\":\"b\",\"y\":null}",
        "{\"k\":\"a\",\"y\":null}\t{\"k\":\"b\",\"x\":1}");
    gram_check("{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]}", "null\t\"\"", "1");
    gram_check(
        "{\"oneOf\":[{\"properties\":{\"t\":{\"const\":1}},\"required\":[\"t\"]},{\"properties\":"
        "{\"t\":"
        "{\"enum\":[2,3]}},\"required\":[\"t\"]}]}",
        "{\"t\":1}\t{\"t\":3}", "{\"t\":4}\t{}");
    gram_check(
        "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"oneOf\":[{\"required\":[\"a\"],"
        "\"properties\":{\"b\":false}},{\"required\":[\"b\"],\"properties\":{\"a\":false}}]}",
        "{\"a\":1}\t{\"b\":1}", "{}\t{\"a\":1,\"b\":1}");
    gram_check(
        "{\"allOf\":[{\"properties\":{\"a\":{\"type\":[\"integer\",\"null\"]}},\"required\":["
        "\"a\"]},"
        "{\"properties\":{\"a\":{\"minimum\":3},\"b\":{}}}],\"type\":\"object\"}",
        "{\"a\":3}\t{\"a\":4,\"b\":0}\t{\"a\":null}", "{\"a\":2}\t{}");
    gram_check(
        "{\"allOf\":[{\"properties\":{\"a\":{}},\"additionalProperties\":false},{\"properties\":{"
        "\"b\":{}}}"
        "]}",
        "{\"a\":1}\t{}", "{\"b\":1}");
    gram_check("{\"allOf\":[{\"enum\":[1,2,3]},{\"enum\":[2,3,4]},{\"const\":3}]}", "3", "2\t1\t4");
    gram_check(
        "{\"allOf\":[{\"type\":\"number\"},{\"type\":\"integer\",\"minimum\":2},{\"minimum\":5}]}",
        "5", "4\t5.5");
    gram_check(
        "{\"minimum\":1,\"anyOf\":[{\"type\":\"integer\"},{\"maximum\":3,\"type\":\"number\"}]}",
        "7\t2.5", "3.5\t0\t0.5");
    gram_check(
        "{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"l\":"
        "{\"$ref\":\"#/$defs/t\"},\"r\":{\"anyOf\":[{\"$ref\":\"#/$defs/"
        "t\"},{\"type\":\"null\"}]}},"
        "\"required\":[\"v\"]}},\"$ref\":\"#/$defs/t\"}",
        "{\"v\":1}\t{\"v\":1,\"l\":{\"v\":2,\"r\":{\"v\":3,\"r\":null}}}",
        "{\"v\":1,\"l\":null}\t{}");
    gram_check("{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}", "[]\t[[],[[]]]", "[1]");
    gram_check(
        "{\"definitions\":{\"a/b~c\":{\"type\":\"null\"}},\"$ref\":\"#/definitions/a~1b~0c\"}",
        "null", "1");
    gram_check("{\"$ref\":\"#/x/1\",\"x\":[{},{\"const\":5}],\"title\":\"t\",\"default\":1}", "5",
               "1");
    gram_check(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/n\",\"description\":\"d\","
        "\"maximum\":9}},\"$defs\":{\"n\":{\"type\":\"integer\",\"minimum\":7}}}",
        "{\"a\":8}", "{\"a\":6}\t{\"a\":10}");
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refusals(void **state)
{
    static const char *const key[] = { "not",
                                       "if",
                                       "then",
                                       "else",
                                       "contains",
                                       "minContains",
                                       "maxContains",
                                       "patternProperties",
                                       "dependentRequired",
                                       "dependentSchemas",
                                       "dependencies",
                                       "unevaluatedItems",
                                       "$dynamicRef",
                                       "$recursiveRef" };
    char                     schema[256];

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(key); i++) {
        snprintf(schema, sizeof(schema), "{\"properties\":{\"q\":{\"type\":\"object\",\"%s\":{}}}}",
                 key[i]);
        gram_must_refuse(schema, key[i]);
        gram_must_refuse(schema, "/q");
    }
    gram_must_refuse("{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems");
    gram_must_refuse("{\"unevaluatedProperties\":{\"type\":\"null\"}}", "unevaluatedProperties");
    gram_must_refuse("{\"type\":\"strin\"}", "strin");
    gram_must_refuse("{\"type\":[\"string\",1]}", "type");
    gram_must_refuse("{\"type\":7}", "type");
    gram_must_refuse("{\"type\":\"string\",\"format\":\"iri-reference\"}", "iri-reference");
    gram_must_refuse("{\"type\":\"string\",\"pattern\":7}", "pattern");
    gram_must_refuse("{\"type\":\"string\",\"minLength\":-1}", "minLength");
    gram_must_refuse("{\"type\":\"integer\",\"minimum\":\"1\"}", "minimum");
    gram_must_refuse("{\"enum\":7}", "enum");
    gram_must_refuse("{\"enum\":[{}],\"properties\":{}}", "enum of objects");
    gram_must_refuse("{\"required\":7}", "required");
    gram_must_refuse("{\"required\":[7]}", "required");
    gram_must_refuse("{\"properties\":7}", "properties");
    gram_must_refuse("{\"prefixItems\":7}", "prefixItems");
    gram_must_refuse("{\"anyOf\":[]}", "anyOf");
    gram_must_refuse("{\"oneOf\":{}}", "oneOf");
    gram_must_refuse("{\"allOf\":1}", "allOf");
    gram_must_refuse("{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "oneOf");
    gram_must_refuse("{\"oneOf\":[{\"type\":\"string\"},{\"const\":\"a\"}]}", "oneOf");
    gram_must_refuse("{\"oneOf\":[{\"properties\":{\"a\":{}}},{\"properties\":{\"b\":{}}}]}",
                     "oneOf");
    gram_must_refuse("{\"$ref\":\"other.json\"}", "$ref");
    gram_must_refuse("{\"$ref\":\"#/$defs/no\"}", "leads nowhere");
    gram_must_refuse("{\"$ref\":\"#anchor\"}", "$ref");
    gram_must_refuse("{\"properties\":{\"a\":{\"$id\":\"x\",\"type\":\"null\"}}}", "$id");
    gram_must_refuse("{\"minProperties\":3,\"type\":\"object\"}", "minProperties");
    gram_must_refuse("{\"maxProperties\":1,\"properties\":{\"a\":{},\"b\":{}}}", "maxProperties");
    gram_must_refuse("{\"allOf\":[{\"multipleOf\":1},{\"multipleOf\":2}]}", "multipleOf");
}

static void no_values(void **state)
{
    (void)state;
    gram_must_refuse("7", "a schema must be");
    gram_must_refuse("{\"properties\":{\"a\":7}}", "a schema must be");
    gram_must_refuse("{", "not JSON");
    gram_must_refuse("", "not JSON");
    gram_must_refuse("{} x", "not JSON");
    gram_must_refuse("false", "no value fits");
    gram_must_refuse("{\"type\":\"array\",\"items\":false,\"minItems\":1}", "no value fits");
    gram_must_refuse("{\"type\":\"integer\",\"minimum\":2,\"maximum\":1}", "no value fits");
    gram_must_refuse("{\"type\":\"integer\",\"exclusiveMinimum\":1,\"exclusiveMaximum\":2}",
                     "no value fits");
    gram_must_refuse("{\"allOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]}", "no value fits");
    gram_must_refuse("{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", "no value fits");
    gram_must_refuse("{\"type\":\"array\",\"minItems\":3,\"maxItems\":2}", "no value fits");
    gram_must_refuse("{\"pattern\":\"^abc$\",\"maxLength\":2}", "no value fits");
    gram_must_refuse("{\"enum\":[]}", "no value fits");
    gram_must_refuse("{\"required\":[\"a\"],\"properties\":{},\"additionalProperties\":false}",
                     "no value fits");
    gram_must_refuse("{\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}",
                     "no value fits");
}

static void bad_patterns(void **state)
{
    static const char *const bad[][2] = { { "(?=a)", "group" },
                                          { "(?<n>a)", "group" },
                                          { "\\\\bfoo", "\\b" },
                                          { "(a)\\\\1", "back-reference" },
                                          { "\\\\p{L}", "\\p" },
                                          { "a^b", "^" },
                                          { "(^a)", "^" },
                                          { "a$b", "$" },
                                          { "[a", "]" },
                                          { "(a", ")" },
                                          { "a)", ")" },
                                          { "*", "quantifier" },
                                          { "a{2", "}" },
                                          { "a{,2}", "{" },
                                          { "a{3,2}", "backwards" },
                                          { "[z-a]", "backwards" },
                                          { "a{1001}", "1000" },
                                          { "a++", "possessive" },
                                          { "\\\\", "backslash" },
                                          { "\\\\xg1", "hexadecimal" },
                                          { "\\\\cA", "escape" },
                                          { "[a-\\\\d]", "range" } };
    char                     schema[256];

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(bad); i++) {
        snprintf(schema, sizeof(schema), "{\"pattern\":\"%s\"}", bad[i][0]);
        gram_must_refuse(schema, bad[i][1]);
        gram_must_refuse(schema, "pattern");
    }
}

/* ---- limits and hostile schemas
 * ------------------------------------------------------------------ */

static void repeat(kvd_buf *b, const char *s, int n)
{
    while (n--)
        kvd_buf_puts(b, s);
}

static kvd_status timed_open(gram **g, const gram_desc *d, double *s, kvd_err *err)
{
    const clock_t    t0 = clock();
    const kvd_status st = gram_open(g, gram_check_trie, d, err);

    *s = (double)(clock() - t0) / CLOCKS_PER_SEC;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    *s /= 20;
#endif
    return st;
}

/* Ends soon, by an error that says `what`, or taken (what NULL: either).  Neighbours on the
 * processor may slow it down, but not every time. */
static void hostile(kvd_buf *b, const char *what)
{
    const gram_desc d   = { .schema_json = b->data };
    kvd_err         err = { 0 };
    gram           *g;
    double          s;
    kvd_status      st = timed_open(&g, &d, &s, &err);

    for (int i = 0; s > 0.1 && i < 8; i++) {
        gram_close(g);
        st = timed_open(&g, &d, &s, &err);
    }
    printf("%.60s... %.1f ms: %.100s\n", b->data, s * 1e3, st ? err.msg : "taken");
    if (s > 0.1)
        fail_msg("%.100s: %.0f ms", b->data, s * 1e3);
    if (what && (st != KVD_E_INVAL || !strstr(err.msg, what)))
        fail_msg("%.100s: %s, expected '%s'", b->data, st ? err.msg : "taken", what);
    gram_close(g);
    kvd_buf_free(b);
}

static void limits(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    repeat(&b, "{\"items\":", 60);
    repeat(&b, "{\"properties\":{\"a\":", 30);
    kvd_buf_puts(&b, "{}");
    repeat(&b, "}}", 30);
    repeat(&b, "}", 60);
    hostile(&b, "more than 100 brackets");
    repeat(&b, "[", 200000);
    hostile(&b, "more than 100 brackets");
    kvd_buf_puts(&b, "{\"a\":\"");
    repeat(&b, "0123456789", 110000);
    kvd_buf_puts(&b, "\"}");
    hostile(&b, "more than 1048576 bytes");
    repeat(&b, "{\"anyOf\":[", 45);
    kvd_buf_puts(&b, "{}");
    repeat(&b, "]}", 45);
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"enum\":[\"0\"");
    for (int i = 1; i <= 10000; i++)
        kvd_buf_printf(&b, ",\"%d\"", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, "enum must be a list of at most 10000");
    kvd_buf_puts(&b, "{\"enum\":[0");
    for (int i = 1; i < 10000; i++)
        kvd_buf_printf(&b, ",\"a long value, number %d, to make many states\"", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"anyOf\":[{\"const\":0}");
    for (int i = 1; i < 1500; i++)
        kvd_buf_printf(&b, ",{\"const\":%d}", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, "more than 1000 alternatives");
    kvd_buf_puts(&b, "{\"prefixItems\":[{}");
    for (int i = 0; i < 11000; i++)
        kvd_buf_printf(&b, ",{\"items\":{\"const\":%d}}", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, "more than 10000 rules");
    kvd_buf_puts(&b, "{\"pattern\":\"");
    repeat(&b, "abcdefghij", 101);
    kvd_buf_puts(&b, "\"}");
    hostile(&b, "more than 1000 bytes");
    kvd_buf_puts(&b, "{\"pattern\":\"^(a|b)*a(a|b){12}$\"}");
    hostile(&b, "more than 2000 states");
    kvd_buf_puts(&b, "{\"pattern\":\"^((a{100}){100}){100}$\"}");
    hostile(&b, "more than 40000 states");
    kvd_buf_puts(&b, "{\"pattern\":\"^(a|b){0,500}$\",\"maxLength\":1000000}");
    hostile(&b, "cases");
    kvd_buf_puts(&b, "{\"pattern\":\"^a*$\",\"maxLength\":4294967295}");
    hostile(&b, "cases");
    kvd_buf_puts(&b, "{\"pattern\":\"");
    repeat(&b, "(", 40);
    repeat(&b, ")", 40);
    kvd_buf_puts(&b, "\"}");
    hostile(&b, "more than 32 groups");
    kvd_buf_puts(
        &b,
        "{\"type\":\"array\",\"minItems\":4000000000,\"items\":{\"type\":\"string\",\"minLength\":"
        "4000000000}}");
    hostile(&b, NULL);
}

static void hostile_schemas(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    kvd_buf_puts(&b, "{\"$ref\":\"#\"}");
    hostile(&b, "leads back to itself");
    kvd_buf_puts(
        &b, "{\"$defs\":{\"a\":{\"$ref\":\"#/$defs/b\"},\"b\":{\"anyOf\":[{\"$ref\":\"#/$defs/a\"},"
            "{\"type\":\"null\"}]}},\"$ref\":\"#/$defs/a\"}");
    hostile(&b, "leads back to itself");
    kvd_buf_puts(&b, "{\"allOf\":[{\"$ref\":\"#\"}]}");
    hostile(&b, "leads back to itself");
    kvd_buf_puts(&b, "{\"$defs\":{"); /* doubles at every level */
    for (int i = 0; i < 60; i++)
        kvd_buf_printf(
            &b, "\"a%d\":{\"anyOf\":[{\"$ref\":\"#/$defs/a%d\"},{\"$ref\":\"#/$defs/a%d\"}]},", i,
            i + 1, i + 1);
    kvd_buf_puts(&b, "\"a60\":{\"type\":\"null\"}},\"$ref\":\"#/$defs/a0\"}");
    hostile(&b, "more than 100 schemas");
    kvd_buf_puts(&b, "{\"$defs\":{");
    for (int i = 0; i < 30; i++)
        kvd_buf_printf(
            &b, "\"a%d\":{\"anyOf\":[{\"$ref\":\"#/$defs/a%d\"},{\"$ref\":\"#/$defs/a%d\"}]},", i,
            i + 1, i + 1);
    kvd_buf_puts(&b, "\"a30\":{\"type\":\"null\"}},\"$ref\":\"#/$defs/a0\"}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"allOf\":["); /* a product of alternatives */
    for (int i = 0; i < 20; i++)
        kvd_buf_printf(&b, "%s{\"anyOf\":[{\"properties\":{\"p%d\":{}}},{\"required\":[\"q%d\"]}]}",
                       i ? "," : "", i, i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, "more than");
    kvd_buf_puts(&b, "{\"properties\":{"); /* merges that never end */
    kvd_buf_puts(
        &b, "\"a\":{\"allOf\":[{\"$ref\":\"#\"},{\"properties\":{\"a\":{\"minLength\":1}}}]}}}");
    hostile(&b, NULL);
    kvd_buf_puts(
        &b,
        "{\"$defs\":{\"x\":{\"properties\":{\"l\":{\"$ref\":\"#/$defs/y\"},\"r\":{\"$ref\":"
        "\"#/$defs/x\"}}},\"y\":{\"properties\":{\"l\":{\"$ref\":\"#/$defs/x\"},\"r\":{\"allOf\":"
        "[{\"$ref\":\"#/$defs/y\"},{\"$ref\":\"#/$defs/x\"}]}}}},\"allOf\":[{\"$ref\":"
        "\"#/$defs/x\"},{\"$ref\":\"#/$defs/y\"}]}");
    hostile(&b, NULL);
}

static void large_schemas(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    kvd_buf_puts(&b, "{\"oneOf\":[{\"const\":0}");
    for (int i = 1; i < 900; i++)
        kvd_buf_printf(&b, ",{\"const\":%d}", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"allOf\":[{}"); /* large parts */
    for (int i = 0; i < 90; i++) {
        kvd_buf_printf(&b, ",{\"required\":[\"a\"],\"properties\":{\"p%d\":{}", i);
        for (int k = 0; k < 300; k++)
            kvd_buf_printf(&b, ",\"q%d\":{\"type\":\"string\"}", k);
        kvd_buf_puts(&b, "}}");
    }
    kvd_buf_puts(&b, "]}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"allOf\":[{}");
    for (int i = 0; i < 90; i++)
        kvd_buf_printf(&b, ",{\"pattern\":\"^[a-z]*%c[a-z]*%c[a-z]*$\"}", 'a' + i % 26,
                       'a' + i / 26);
    kvd_buf_puts(&b, "]}");
    hostile(&b, "more than");
    kvd_buf_puts(&b, "{\"properties\":{\"p\":{}");
    for (int i = 0; i < 5000; i++)
        kvd_buf_printf(&b, ",\"p%d\":{\"pattern\":\"^a%d$\"}", i, i);
    kvd_buf_puts(&b, "}}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"pattern\":\"^[a-z]{1,9}$\",\"enum\":[\"p\"");
    for (int i = 0; i < 9999; i++)
        kvd_buf_printf(&b, ",\"p%d\"", i);
    kvd_buf_puts(&b, "]}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"allOf\":[{\"enum\":[0");
    for (int i = 1; i < 9999; i++)
        kvd_buf_printf(&b, ",%d", i);
    kvd_buf_puts(&b, "]},{\"enum\":[-1");
    for (int i = 1; i < 9999; i++)
        kvd_buf_printf(&b, ",%d", -i);
    kvd_buf_puts(&b, "]}]}");
    hostile(&b, NULL);
    kvd_buf_puts(&b, "{\"properties\":{\"p0\":{}");
    for (int i = 1; i < 20000; i++)
        kvd_buf_printf(&b, ",\"p%d\":{}", i);
    kvd_buf_puts(&b, "}}");
    hostile(&b, "more than");
    kvd_buf_puts(&b, "{\"type\":\"string\"");
    for (int i = 0; i < 50000; i++)
        kvd_buf_printf(&b, ",\"k%d\":0", i);
    kvd_buf_puts(&b, "}");
    hostile(&b, NULL);
}

/* ---- running ----------------------------------------------------------------------------------
 */

static void depth(void **state)
{
    gram   *g = gram_must_open("{}");
    gram_at at;
    int     n = 0;

    (void)state;
    gram_begin(g, &at);
    while (gram_accept_text(g, &at, "[", 1, NULL) == KVD_OK)
        n++;
    assert_int_equal(n, GRAM_MAX_DEPTH - 1);
    assert_int_equal(gram_accept_text(g, &at, "\"", 1, NULL), KVD_E_INVAL);
    assert_int_equal(gram_accept_text(g, &at, "1", 1, NULL), KVD_OK);
    while (n--)
        assert_int_equal(gram_accept_text(g, &at, "]", 1, NULL), KVD_OK);
    assert_true(gram_may_end(g, &at));
    gram_close(g);
    /* each level needs another: the last one that fits still can be ended */
    g = gram_must_open(
        "{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"k\":{\"anyOf\":[{\"$ref\":"
        "\"#/$defs/t\"},{\"type\":\"array\",\"items\":{\"type\":\"array\",\"minItems\":1},"
        "\"minItems\":1}]}},\"required\":[\"k\"]}},\"$ref\":\"#/$defs/t\"}");
    gram_begin(g, &at);
    for (n = 0; gram_accept_text(g, &at, "{\"k\":", 5, NULL) == KVD_OK;)
        n++;
    assert_int_equal(n, GRAM_MAX_DEPTH - 3);
    assert_int_equal(gram_accept_text(g, &at, "[[0]]", 5, NULL), KVD_OK);
    while (n--)
        assert_int_equal(gram_accept_text(g, &at, "}", 1, NULL), KVD_OK);
    assert_true(gram_may_end(g, &at));
    gram_close(g);
}

static void white_space(void **state)
{
    gram   *g = gram_must_open("{\"type\":\"array\"}");
    gram_at at;
    int     n = 0;

    (void)state;
    gram_begin(g, &at);
    assert_int_equal(gram_accept_text(g, &at, "[", 1, NULL), KVD_OK);
    while (gram_accept_text(g, &at, n % 2 ? " " : "\n", 1, NULL) == KVD_OK)
        n++;
    assert_int_equal(n, GRAM_MAX_WHITE);
    assert_int_equal(gram_accept_text(g, &at, "]", 1, NULL), KVD_OK);
    gram_close(g);
}

static void ends(void **state)
{
    gram     *g    = gram_must_open("{\"type\":\"integer\",\"minimum\":10,\"maximum\":99}");
    uint64_t *bits = calloc(tok_n_token(gram_check_toks) / 64 + 1, 8);
    int32_t   end  = tok_eos(gram_check_toks);
    kvd_err   err;
    gram_at   at;

    (void)state;
    assert_true(end >= 0 && tok_is_end(gram_check_toks, end));
    gram_begin(g, &at);
    assert_false(gram_allows(g, &at, end));
    assert_int_equal(gram_accept_text(g, &at, "42", 2, NULL), KVD_OK);
    assert_int_equal(gram_mask(g, &at, bits, &err), KVD_OK);
    for (uint32_t i = 0; i < tok_n_token(gram_check_toks); i++) /* nothing but ends */
        assert_int_equal(bits[i / 64] >> (i % 64) & 1, tok_is_end(gram_check_toks, (int32_t)i));
    assert_int_equal(gram_accept(g, &at, end, &err), KVD_OK);
    assert_true(at.ended);
    assert_int_equal(gram_accept(g, &at, end, &err), KVD_E_INVAL);
    assert_int_equal(gram_mask(g, &at, bits, &err), KVD_E_INVAL);
    assert_int_equal(gram_accept_text(g, &at, "1", 1, &err), KVD_E_INVAL);
    assert_false(gram_allows(g, &at, -1));
    assert_false(gram_allows(g, &at, INT32_MAX));
    free(bits);
    gram_close(g);
}

/* A vocabulary of two tokens cannot write what is asked for: an error, no hang. */
static void poor_vocabulary(void **state)
{
    static const tok_str token[] = { { "[", 1 }, { "1", 1 } };
    const tok_vocab      v       = { .model   = TOK_BPE,
                                     .pre     = { "gpt-2", 5 },
                                     .n_token = 2,
                                     .token   = token,
                                     .bos     = -1,
                                     .eos     = -1,
                                     .eot     = -1,
                                     .unk     = -1 };
    const gram_desc      d = { .schema_json = "{\"type\":\"array\",\"items\":{\"const\":1}}" };
    uint64_t             bits[1];
    gram_vocab          *poor;
    tok                 *t;
    gram                *g;
    gram_at              at;
    kvd_err              err;

    (void)state;
    assert_int_equal(tok_open(&t, &v, &err), KVD_OK);
    assert_int_equal(gram_vocab_open(&poor, t, &err), KVD_OK);
    assert_int_equal(gram_open(&g, poor, &d, &err), KVD_OK);
    gram_begin(g, &at);
    assert_int_equal(gram_accept(g, &at, 0, &err), KVD_OK);
    assert_int_equal(gram_accept(g, &at, 1, &err), KVD_OK);
    assert_int_equal(gram_mask(g, &at, bits, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "no token"));
    gram_close(g);
    gram_vocab_close(poor);
    tok_close(t);
}

static void no_memory(void **state)
{
    const gram_desc d = {
        .schema_json = "{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"a\":"
                       "{\"pattern\":\"^a+$\",\"maxLength\":9},\"b\":{\"allOf\":[{\"format\":"
                       "\"date\"},{\"pattern\":\"1$\"}]},\"c\":{\"enum\":[\"x\",{\"k\":[1]}]}},"
                       "\"additionalProperties\":{\"anyOf\":[{\"$ref\":\"#/$defs/t\"},{\"type\":"
                       "\"null\"}]}}},\"$ref\":\"#/$defs/t\"}"
    };
    const uint64_t live = kvd_alloc_live();
    kvd_status     st   = KVD_E_NOMEM;
    kvd_err        err;
    int            n = 0;

    (void)state;
    for (; st != KVD_OK && n < 2000; n++) {
        gram *g;

        kvd_alloc_fault(n, false);
        st = gram_open(&g, gram_check_trie, &d, &err);
        kvd_alloc_fault(-1, false);
        assert_true(st == KVD_OK || st == KVD_E_NOMEM);
        gram_close(g);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_in_range(n, 50, 1999);
    for (n = 0, st = KVD_E_NOMEM; st != KVD_OK && n < 200; n++) {
        gram_vocab *v;

        kvd_alloc_fault(n, true);
        st = gram_vocab_open(&v, gram_check_toks, &err);
        kvd_alloc_fault(-1, false);
        assert_true(st == KVD_OK || st == KVD_E_NOMEM);
        gram_vocab_close(v);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_in_range(n, 10, 199);
}

static void no_allocation(void **state)
{
    gram *g =
        gram_must_open("{\"type\":\"object\",\"additionalProperties\":{\"pattern\":\"^.{3,9}$\"}}");
    uint64_t *bits = calloc(tok_n_token(gram_check_toks) / 64 + 1, 8);
    kvd_err   err;
    gram_at   at;

    (void)state;
    gram_begin(g, &at);
    kvd_alloc_guard(true); /* an allocation would end the program */
    for (const char *s = "{\"a\":\"xyz\""; *s; s++) {
        assert_int_equal(gram_mask(g, &at, bits, &err), KVD_OK);
        assert_int_equal(gram_accept_text(g, &at, s, 1, &err), KVD_OK);
    }
    kvd_alloc_guard(false);
    free(bits);
    gram_close(g);
}

static void descriptions(void **state)
{
    const gram_desc none = { 0 }, both = { .schema_json = "{}", .json_object = true };
    const gram_desc odd = { .json_object = true, .choice = (kvd_tool_choice)7 };
    kvd_err         err;
    gram           *g;

    (void)state;
    assert_int_equal(gram_open(&g, gram_check_trie, &none, &err), KVD_E_INVAL);
    assert_int_equal(gram_open(&g, gram_check_trie, &both, &err), KVD_E_INVAL);
    assert_int_equal(gram_open(&g, gram_check_trie, &odd, &err), KVD_E_INVAL);
    assert_null(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(types),           cmocka_unit_test(strings),
        cmocka_unit_test(patterns),        cmocka_unit_test(numbers),
        cmocka_unit_test(objects),         cmocka_unit_test(arrays),
        cmocka_unit_test(combined),        cmocka_unit_test(refusals),
        cmocka_unit_test(bad_patterns),    cmocka_unit_test(limits),
        cmocka_unit_test(hostile_schemas), cmocka_unit_test(large_schemas),
        cmocka_unit_test(no_values),       cmocka_unit_test(depth),
        cmocka_unit_test(white_space),     cmocka_unit_test(ends),
        cmocka_unit_test(poor_vocabulary), cmocka_unit_test(no_memory),
        cmocka_unit_test(no_allocation),   cmocka_unit_test(descriptions),
    };

    return cmocka_run_group_tests(tests, gram_check_open, gram_check_close);
}
