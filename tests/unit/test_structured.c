/* SPDX-License-Identifier: Apache-2.0 */
/* test_structured.c - grammars of tool calls, and constrained answers of a tiny model by the public
 * interface.  What a grammar of calls writes, the stream of events reads: names are those of the
 * functions, arguments fit their schemas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/schema_check.h"
#include "support/tok_vectors.h"

#define CALL_F  "{\"name\": \"f\", \"arguments\": {\"n\": 5}}"
#define OPEN    "<tool_call>"
#define CLOSE   "</tool_call>"
#define TAG     "<|python_tag|>"
#define N_VOCAB 264

static const char tools[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,"
                            "\"parameters\":{\"type\":\"object\","
                            "\"properties\":{\"n\":{\"$ref\":\"#/$defs/"
                            "n\"}},\"required\":[\"n\"],\"$defs\":{\"n\":{\"type\":"
                            "\"integer\",\"minimum\":1,\"maximum\":9}}}}},"
                            "{\"type\":\"function\",\"function\":{\"name\":\"g_2\",\"description\":"
                            "\"d\",\"parameters\":{\"type\":"
                            "\"object\",\"properties\":{\"s\":{\"type\":\"string\",\"maxLength\":6}"
                            ",\"o\":{\"enum\":[\"<\",null]}}}}},"
                            "{\"type\":\"function\",\"function\":{\"name\":\"none\"}}]";

/* Without free text: what is written at random would not end it. */
static const char no_text[] = "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{"
                              "\"n\":{\"type\":\"integer\",\"minimum\":"
                              "1,\"maximum\":9},\"w\":{\"enum\":[\"<\",\"a "
                              "b\"]},\"on\":{\"type\":\"boolean\"}},\"required\":[\"n\","
                              "\"on\"]}}},{\"function\":{\"name\":\"f2\",\"parameters\":{"
                              "\"properties\":{\"l\":{\"type\":\"array\","
                              "\"items\":{\"enum\":[1,null]},\"maxItems\":3}}}}}]";

static uint64_t    seed_ = 1;
static ktv         file;
static tok        *toks;
static gram_vocab *trie;
static kvd_err     err;

static int open_all(void **state)
{
    (void)state;
    toks = tok_must_open(&file, KVD_TEST_DATA "/tok/qwen3.ktv");
    return gram_vocab_open(&trie, toks, &err) == KVD_OK ? 0 : -1;
}

static int close_all(void **state)
{
    (void)state;
    gram_vocab_close(trie);
    tok_close(toks);
    ktv_free(&file);
    return kvd_alloc_live() == 0 ? 0 : -1;
}

static gram *must_open(gram_desc d)
{
    gram *g;

    if (!d.tools_json)
        d.tools_json = tools;
    if (gram_open(&g, trie, &d, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return g;
}

/* Whether the text as a whole is of the grammar; begins: or the beginning of one. */
static bool takes(gram *g, const char *text, bool begins)
{
    gram_at at;

    gram_begin(g, &at);
    return gram_accept_text(g, &at, text, strlen(text), NULL) == KVD_OK &&
           (begins || gram_may_end(g, &at));
}

/* ---- which texts are calls ------------------------------------------------------------------- */

static void hermes(void **state)
{
    gram *g =
        must_open((gram_desc){ .format = KVD_TOOLS_HERMES, .choice = KVD_TOOL_CHOICE_REQUIRED });

    (void)state;
    assert_true(takes(g, OPEN "\n" CALL_F "\n" CLOSE, false));
    assert_true(
        takes(g, OPEN CALL_F CLOSE "\n" OPEN "{\"name\":\"none\",\"arguments\":{}}" CLOSE, false));
    assert_true(takes(g, OPEN "{\"name\":\"g_2\",\"arguments\":{\"o\":\"<\"}}" CLOSE, false));
    assert_false(takes(g, "", false));
    assert_false(takes(g, "Hello", true));
    assert_false(takes(g, CALL_F, true));
    assert_false(takes(g, OPEN "{\"name\":\"h\"", true));
    assert_false(takes(g, OPEN "{\"name\":\"f\",\"arguments\":{\"n\":0", true));
    assert_false(takes(g, OPEN "{\"name\":\"f\",\"arguments\":{}", true));
    assert_false(takes(g, OPEN "{\"name\":\"g_2\",\"arguments\":{\"n\"", true));
    assert_false(takes(g, OPEN "{\"name\":\"none\",\"arguments\":{\"", true));
    assert_false(takes(g, OPEN CALL_F CLOSE "x", true));
    gram_close(g);
    g = must_open((gram_desc){ .format      = KVD_TOOLS_HERMES,
                               .choice      = KVD_TOOL_CHOICE_REQUIRED,
                               .tool_name   = "none",
                               .single_call = true });
    assert_true(takes(g, OPEN "{\"name\":\"none\",\"arguments\":{}}" CLOSE, false));
    assert_false(takes(g, OPEN "{\"name\":\"f", true));
    assert_false(takes(g, OPEN "{\"name\":\"none\",\"arguments\":{}}" CLOSE "\n", true));
    gram_close(g);
}

static void hermes_auto(void **state)
{
    gram *g = must_open((gram_desc){ .format = KVD_TOOLS_HERMES });

    (void)state;
    assert_true(takes(g, "", false));
    assert_true(takes(g, "{\"name\": \"f\" and any <text> <tool_cal <<tool_call", false));
    assert_true(takes(g, "Text\n<" OPEN CALL_F CLOSE "\n", false));
    assert_true(takes(g, "<tool_<tool_cal" OPEN "\n" CALL_F "\n" CLOSE OPEN CALL_F CLOSE, false));
    assert_false(takes(g, "Text " OPEN, false));
    assert_false(takes(g, "Text " OPEN "x", true));
    assert_false(takes(g, "Text " OPEN "{\"name\":\"x", true));
    assert_false(takes(g, "<tool_call<tool_call>x", true));
    assert_false(takes(g, OPEN CALL_F CLOSE "more text", true));
    gram_close(g);
}

static void llama(void **state)
{
    static const char call[] = "{\"name\": \"f\", \"parameters\": {\"n\": 5}}";
    gram             *g =
        must_open((gram_desc){ .format = KVD_TOOLS_LLAMA3, .choice = KVD_TOOL_CHOICE_REQUIRED });
    char text[256];

    (void)state;
    assert_true(takes(g, call, false));
    snprintf(text, sizeof(text), TAG "%s", call);
    assert_true(takes(g, text, false));
    snprintf(text, sizeof(text), "%s; %s", call, call);
    assert_true(takes(g, text, false));
    assert_false(takes(g, "x", true));
    assert_false(takes(g, "{\"name\": \"f\", \"arguments\"", true));
    gram_close(g);
    g = must_open((gram_desc){ .format = KVD_TOOLS_LLAMA3, .single_call = true });
    assert_true(takes(g, "", false));
    assert_true(takes(g, "any text {\"name\": 7} <|python_ta", false));
    assert_true(takes(g, "[1] \"x\"", false));
    assert_true(takes(g, "\n ", false));
    snprintf(text, sizeof(text), "text " TAG "%s", call);
    assert_true(takes(g, text, false));
    snprintf(text, sizeof(text), "\n%s", call);
    assert_true(takes(g, text, false));
    assert_false(takes(g, "{\"answer\"", true));
    assert_false(takes(g, TAG "print", true));
    snprintf(text, sizeof(text), "%s;", call);
    assert_false(takes(g, text, true));
    gram_close(g);
}

/* Marks and special tokens by their ids. */
static void tokens(void **state)
{
    gram   *g     = must_open((gram_desc){ .format = KVD_TOOLS_HERMES });
    int32_t start = tok_find_special(toks, "<|im_start|>", 12), end = 0;
    int32_t open = tok_find_special(toks, OPEN, 11), close = tok_find_special(toks, CLOSE, 12);
    gram_at at;

    (void)state;
    while (!tok_is_end(toks, end))
        end++;
    assert_true(start >= 0 && open >= 0 && close >= 0);
    gram_begin(g, &at);
    assert_true(gram_allows(g, &at, start)); /* as without a grammar */
    assert_true(gram_allows(g, &at, end));
    assert_false(gram_allows(g, &at, -1));
    assert_int_equal(gram_accept(g, &at, open, &err), KVD_OK);
    assert_false(gram_allows(g, &at, start));
    assert_false(gram_allows(g, &at, end));
    assert_false(gram_allows(g, &at, open));
    assert_int_equal(gram_accept_text(g, &at, CALL_F, strlen(CALL_F), &err), KVD_OK);
    assert_false(gram_allows(g, &at, end));
    assert_int_equal(gram_accept(g, &at, close, &err), KVD_OK);
    assert_true(gram_allows(g, &at, end));
    assert_true(gram_allows(g, &at, open));
    assert_false(gram_allows(g, &at, start));
    gram_close(g);
}

/* ---- refusals -----------------------------------------------------------------------------------
 */

static void refuse(gram_desc d, const char *what)
{
    gram *g;

    if (gram_open(&g, trie, &d, &err) != KVD_E_INVAL || !strstr(err.msg, what))
        fail_msg("%s, expected '%s'", g ? "taken" : err.msg, what);
}

static void refusals(void **state)
{
    const kvd_tool_format f = KVD_TOOLS_HERMES;

    (void)state;
    refuse((gram_desc){ .tools_json = tools }, "no form of tool calls");
    refuse((gram_desc){ .tools_json = "[]", .format = f }, "list of functions");
    refuse((gram_desc){ .tools_json = "{}", .format = f }, "list of functions");
    refuse((gram_desc){ .tools_json = "[1]", .format = f }, "every tool");
    refuse((gram_desc){ .tools_json = "[{\"type\":\"web_search\"}]", .format = f }, "every tool");
    refuse((gram_desc){ .tools_json = "[{\"function\":{\"name\":\"\"}}]", .format = f },
           "every tool");
    refuse((gram_desc){ .tools_json = "[{\"name\":\"a\"},{\"name\":\"a\"}]", .format = f },
           "two functions 'a'");
    refuse((gram_desc){ .tools_json = tools, .format = f, .tool_name = "q" }, "no function 'q'");
    refuse((gram_desc){ .tools_json =
                            "[{\"name\":\"a\",\"strict\":true,\"parameters\":{\"type\":\"object\","
                            "\"properties\":{\"x\":{\"not\":{}}}}}]",
                        .format = f },
           "tools: a: not is not supported (at /x)");
    refuse(
        (gram_desc){ .tools_json =
                         "[{\"name\":\"a\",\"strict\":true,\"parameters\":{\"type\":\"array\"}}]",
                     .format = f },
        "no arguments fit function 'a'");
    refuse((gram_desc){ .tools_json = "[{", .format = f }, "not JSON");
}

/* A function that is not strict takes any object where its schema cannot be applied, which is told;
 * the others keep theirs. */
static void relaxed(void **state)
{
    static const char list[] = "[{\"name\":\"a\",\"parameters\":{\"type\":\"object\","
                               "\"properties\":{\"x\":{\"type\":\"integer\"},"
                               "\"y\":{\"patternProperties\":{}}}}},{\"name\":\"b\",\"parameters\":"
                               "{\"properties\":{\"x\":{\"type\":"
                               "\"integer\"}}}}]";
    const gram_desc   d      = { .tools_json = list,
                                 .format     = KVD_TOOLS_HERMES,
                                 .choice     = KVD_TOOL_CHOICE_REQUIRED };
    gram             *g      = must_open(d);

    (void)state;
    assert_non_null(strstr(gram_notes(g), "tools: a: patternProperties is not supported"));
    assert_non_null(strstr(gram_notes(g), "any object"));
    assert_null(strstr(gram_notes(g), "tools: b"));
    assert_true(
        takes(g, OPEN "{\"name\":\"a\",\"arguments\":{\"x\":\"s\",\"q\":[1]}}" CLOSE, false));
    assert_false(takes(g, OPEN "{\"name\":\"a\",\"arguments\":7", true));
    assert_true(takes(g, OPEN "{\"name\":\"b\",\"arguments\":{\"x\":1}}" CLOSE, false));
    assert_false(takes(g, OPEN "{\"name\":\"b\",\"arguments\":{\"x\":\"", true));
    gram_close(g);
    /* the first schema of all fails, when nothing has been built yet */
    g = must_open((gram_desc){
        .tools_json = "[{\"name\":\"a\",\"parameters\":{\"type\":5,\"properties\":{}}}]",
        .format     = KVD_TOOLS_HERMES });
    assert_non_null(strstr(gram_notes(g), "any object"));
    gram_close(g);
    g = must_open((gram_desc){ .format = KVD_TOOLS_HERMES });
    assert_string_equal(gram_notes(g), "");
    gram_close(g);
}

/* The place that a note names is of its own function, whatever came before. */
static void notes_have_own_paths(void **state)
{
    gram *g = must_open((gram_desc){
        .tools_json = "[{\"name\":\"a\",\"parameters\":{\"properties\":{\"x\":{\"items\":{"
                      "\"type\":\"object\",\"properties\":{\"k\":{\"items\":{}}}}}}}},"
                      "{\"name\":\"b\",\"parameters\":{\"properties\":{\"m\":{\"type\":\"object\","
                      "\"patternProperties\":{}}}}},"
                      "{\"name\":\"c\",\"parameters\":{\"properties\":{\"n\":{\"items\":{"
                      "\"not\":{}}}}}}]",
        .format     = KVD_TOOLS_HERMES });

    (void)state;
    assert_string_equal(gram_notes(g),
                        "tools: b: patternProperties is not supported (at /m); its arguments are "
                        "any object\n"
                        "tools: c: not is not supported (at /n/items); its arguments are any "
                        "object");
    gram_close(g);
}

static uint32_t nodes_of(uint32_t n_tool)
{
    kvd_buf    list = { 0 };
    gram_stats stats;
    gram      *g;

    for (uint32_t i = 0; i < n_tool; i++)
        kvd_buf_printf(&list,
                       "%c{\"name\":\"f%02u\",\"parameters\":{\"properties\":{\"x\":{\"items\":{"
                       "\"type\":\"integer\"}},\"y\":{\"properties\":{\"k\":{}}}}}}",
                       i ? ',' : '[', i);
    kvd_buf_putc(&list, ']');
    g = must_open((gram_desc){ .tools_json = list.data, .format = KVD_TOOLS_HERMES });
    gram_get_stats(g, &stats);
    gram_close(g);
    kvd_buf_free(&list);
    return stats.n_node;
}

/* Every function's rules are written once. */
static void rules_once(void **state)
{
    (void)state;
    assert_int_equal(nodes_of(30) - nodes_of(20), nodes_of(20) - nodes_of(10));
}

static void no_memory(void **state)
{
    const gram_desc d    = { .tools_json = tools, .format = KVD_TOOLS_LLAMA3 };
    const uint64_t  live = kvd_alloc_live();
    kvd_status      st   = KVD_E_NOMEM;
    int             n    = 0;

    (void)state;
    for (; st != KVD_OK && n < 2000; n++) {
        gram *g;

        kvd_alloc_fault(n, false);
        st = gram_open(&g, trie, &d, &err);
        kvd_alloc_fault(-1, false);
        assert_true(st == KVD_OK || st == KVD_E_NOMEM);
        gram_close(g);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_in_range(n, 40, 1999);
}

/* ---- other forms, reasoning, bounds ------------------------------------------------------------
 */

#define DS(word) "<\xef\xbd\x9c" word "\xef\xbd\x9c>"
#define TOOL     "tool\xe2\x96\x81"
#define DS_CALL                \
    DS(TOOL "call\xe2\x96\x81" \
            "begin")           \
    "function" DS(TOOL "sep")
#define DS_F                                                         \
    DS_CALL "f\n```json\n{\"n\": 5}\n```" DS(TOOL "call\xe2\x96\x81" \
                                                  "end")
#define DS_OPEN                 \
    DS(TOOL "calls\xe2\x96\x81" \
            "begin")
#define DS_CLOSE                \
    DS(TOOL "calls\xe2\x96\x81" \
            "end")
#define HARMONY_F "functions.f <|constrain|>json<|message|>{\"n\":5}"
#define SEED_F \
    "<seed:tool_call>\n<function=f>\n<parameter=n>5</parameter>\n</function>\n</seed:tool_call>"

/* One call, and two; what is no call of the form. */
static void other_forms(void **state)
{
    static const struct {
        kvd_tool_format f;
        const char     *one, *two, *wrong, *part;
    } of[] = {
        { KVD_TOOLS_PHI4, "<|tool_call|>" CALL_F "<|/tool_call|>",
          "<|tool_call|>" CALL_F "<|/tool_call|><|tool_call|>" CALL_F "<|/tool_call|>",
          "<|tool_call|>[", "<|tool_call|>{\"name\": \"f\", \"arguments\": {\"n\": 0" },
        { KVD_TOOLS_GRANITE, "<|tool_call|>[" CALL_F "]", "<|tool_call|> [" CALL_F ", " CALL_F "]",
          "<|tool_call|>{", "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"n\": 0" },
        { KVD_TOOLS_MISTRAL,
          "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"n\": 5}, \"id\": \"abcDEF123\"}]",
          "[TOOL_CALLS][" CALL_F ", " CALL_F "]", "[TOOL_CALLS]{",
          "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"n\": 5}, \"id\": \"abc\"" },
        { KVD_TOOLS_DEEPSEEK, DS_OPEN DS_F DS_CLOSE, DS_OPEN DS_F "\n" DS_F DS_CLOSE, DS_OPEN "{",
          DS_OPEN DS_CALL "f\n```json\n{\"n\": 0" },
        { KVD_TOOLS_HARMONY, "<|channel|>commentary to=" HARMONY_F, NULL,
          "<|channel|>commentary to=functions.q",
          " to=functions.f<|channel|>commentary json<|message|>{\"n\":0" },
        { KVD_TOOLS_SEED, SEED_F, SEED_F "\n" SEED_F, "<seed:tool_call>{",
          "<seed:tool_call><function=f><parameter=n>0" },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(of); i++)
        for (int two = 0; two < 4; two++) {
            const bool  must = two < 2, single = two % 2;
            const char *text = of[i].one;
            gram_desc   d    = { .format = of[i].f, .single_call = single };
            gram       *g;

            d.choice = must ? KVD_TOOL_CHOICE_REQUIRED : KVD_TOOL_CHOICE_AUTO;
            if (d.format == KVD_TOOLS_HARMONY)
                d.reasoning = KVD_REASONING_HARMONY;
            g = must_open(d);

            if (!takes(g, text, false))
                fail_msg("%s", text);
            assert_int_equal(takes(g, "Hello <|tool", true), !must);
            if (of[i].two && takes(g, of[i].two, false) == single)
                fail_msg("%s", of[i].two);
            if (takes(g, of[i].wrong, true) || takes(g, of[i].part, true))
                fail_msg("%s or %s", of[i].wrong, of[i].part);
            gram_close(g);
        }
}

/* Raw text where a string may be, JSON elsewhere. */
static void raw_parameters(void **state)
{
    static const char list[] =
        "[{\"name\":\"w\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\",\"maxLength\":"
        "2},"
        "\"n\":{\"type\":\"integer\"},\"e\":{\"type\":\"string\",\"enum\":[\"up\"]}},"
        "\"required\":[\"s\"]}}]";
    gram *g = must_open((gram_desc){
        .tools_json = list, .format = KVD_TOOLS_QWEN_XML, .choice = KVD_TOOL_CHOICE_REQUIRED });
#define W(params) OPEN "<function=w>" params "</function>" CLOSE

    (void)state;
    assert_non_null(strstr(gram_notes(g), "tools: w: patterns, formats and lengths"));
    assert_true(takes(g, W("<parameter=s>a </b>\n\"{</parameter>"), false));
    assert_true(takes(g, W("<parameter=s></parameter><parameter=n> -7</parameter>"), false));
    assert_true(takes(g, W("<parameter=s>x</parameter><parameter=e>up</parameter>"), false));
    assert_false(takes(g, W(""), true));
    assert_false(takes(g, W("<parameter=s>x</parameter><parameter=e>u</"), true));
    assert_false(takes(g, W("<parameter=s>x</parameter><parameter=n>x"), true));
    assert_false(takes(g, W("<parameter=n>"), true));
    gram_close(g);
}

/* One call of a function that was named; else at most max_calls. */
static void bounded(void **state)
{
    for (kvd_tool_format f = KVD_TOOLS_HERMES; f <= KVD_TOOLS_LLAMA3; f++)
        for (uint32_t most = 0; most <= 3; most++) {
            const bool     hermes = f == KVD_TOOLS_HERMES;
            const uint32_t limit  = most ? most : 16;
            gram_desc      d      = { .format = f, .max_calls = most };
            gram          *g;
            kvd_buf        text = { 0 };

            (void)state;
            d.choice = KVD_TOOL_CHOICE_REQUIRED;
            g        = must_open(d);
            for (uint32_t n = 1; n <= limit + 1; n++) {
                if (n > 1 && !hermes)
                    kvd_buf_putc(&text, ';');
                kvd_buf_puts(&text, hermes ? OPEN CALL_F CLOSE
                                           : "{\"name\":\"f\",\"parameters\":{\"n\":5}}");
                assert_int_equal(takes(g, text.data, false), n <= limit);
            }
            gram_close(g);
            kvd_buf_free(&text);
        }
    gram *g = must_open((gram_desc){
        .format = KVD_TOOLS_HERMES, .choice = KVD_TOOL_CHOICE_REQUIRED, .tool_name = "f" });

    assert_true(takes(g, OPEN CALL_F CLOSE, false));
    assert_false(takes(g, OPEN CALL_F CLOSE OPEN, true));
    gram_close(g);
}

static void reasoning(void **state)
{
    static const char schema[] = "{\"type\":\"integer\"}";
    gram_desc         d        = { .schema_json = schema, .reasoning = KVD_REASONING_THINK };
    gram             *g;

    (void)state;
    assert_int_equal(gram_open(&g, trie, &d, &err), KVD_OK);
    assert_true(takes(g, "7", false));
    assert_true(takes(g, "<think>\nwell {\n</think>\n\n7", false));
    assert_false(takes(g, "<think>7", false));
    assert_false(takes(g, "<think></think>x", true));
    gram_close(g);
    d.state = KVD_REASONING_OPEN;
    assert_int_equal(gram_open(&g, trie, &d, &err), KVD_OK);
    assert_false(takes(g, "7", false));
    assert_true(takes(g, "so 7</think>7", false));
    gram_close(g);
    d.state = KVD_REASONING_CANNOT;
    assert_int_equal(gram_open(&g, trie, &d, &err), KVD_OK);
    assert_false(takes(g, "<", true));
    gram_close(g);
    d.state     = KVD_REASONING_MAY;
    d.reasoning = KVD_REASONING_HARMONY;
    assert_int_equal(gram_open(&g, trie, &d, &err), KVD_OK);
    assert_true(takes(g, "<|channel|>final<|message|>7", false));
    assert_true(takes(g,
                      "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
                      "<|message|>7",
                      false));
    assert_false(takes(g, "7", true));
    gram_close(g);
    g = must_open((gram_desc){ .format    = KVD_TOOLS_HERMES,
                               .choice    = KVD_TOOL_CHOICE_REQUIRED,
                               .reasoning = KVD_REASONING_THINK,
                               .state     = KVD_REASONING_OPEN });
    assert_true(takes(g, "so " OPEN "x</think>\n" OPEN CALL_F CLOSE, false));
    assert_false(takes(g, "so </think>Hello", true));
    gram_close(g);
}

/* ---- at random, and read again
 * ------------------------------------------------------------------- */

static int32_t pick(kvd_rng *r, const uint64_t *bits, int step)
{
    const uint32_t n     = tok_n_token(toks);
    uint32_t       count = 0, k;

    for (uint32_t i = 0; i < n; i++) {
        size_t      len;
        const char *s  = tok_bytes(toks, (int32_t)i, &len);
        const bool  on = bits[i / 64] >> (i % 64) & 1;

        count += on;
        if (on && step > 60 && kvd_rng_below(r, 2) &&
            (tok_is_end(toks, (int32_t)i) || (len == 1 && strchr("\"}]<", s[0]) && s[0])))
            return (int32_t)i;
    }
    k = (uint32_t)kvd_rng_below(r, count);
    for (uint32_t i = 0;; i++)
        if (bits[i / 64] >> (i % 64) & 1 && k-- == 0)
            return (int32_t)i;
}

/* Feeds the text of a grammar to its end; false: it did not end. */
static bool generate(kvd_rng *r, gram *g, tool_stream *s, kvd_buf *text)
{
    uint64_t *bits = calloc(tok_n_token(toks) / 64 + 1, 8);
    gram_at   at;

    gram_begin(g, &at);
    for (int step = 0; step < 1500 && !at.ended; step++) {
        size_t      len;
        const char *bytes;
        int32_t     id;

        if (gram_mask(g, &at, bits, &err) != KVD_OK)
            fail_msg("%s: %s", text->data, err.msg);
        id    = pick(r, bits, step);
        bytes = tok_bytes(toks, id, &len);
        assert_int_equal(gram_accept(g, &at, id, &err), KVD_OK);
        if (at.ended)
            break;
        kvd_buf_put(text, bytes, len);
        assert_int_equal(tool_stream_feed(s, bytes, len, &err), KVD_OK);
    }
    free(bits);
    assert_int_equal(tool_stream_flush(s, &err), KVD_OK);
    return at.ended;
}

/* The schema of a function's parameters; NULL: there is no such function. */
static json_t *schema_of(json_t *list, const char *name)
{
    json_t *tool;
    size_t  i;

    json_array_foreach(list, i, tool)
    {
        json_t *f = json_object_get(tool, "function");

        if (strcmp(json_string_value(json_object_get(f, "name")), name) == 0)
            return json_object_get(f, "parameters") ? json_object_get(f, "parameters")
                                                    : json_true();
    }
    return NULL;
}

/* Checks the events of a text that ended; the number of calls. */
static int check_events(tool_stream *s, json_t *list, const char *text)
{
    kvd_buf        args   = { 0 };
    json_t        *schema = NULL, *v;
    kvd_tool_event e;
    const char    *why;
    int            n = 0;

    while (tool_stream_next(s, &e)) {
        if (e.kind == KVD_TOOL_EVENT_TEXT)
            fail_msg("text in a call: '%s' of %s", e.text, text);
        if (e.kind == KVD_TOOL_EVENT_BEGIN)
            schema = schema_of(list, e.text);
        assert_non_null(schema);
        if (e.kind == KVD_TOOL_EVENT_DELTA)
            kvd_buf_put(&args, e.text, e.len);
        if (e.kind != KVD_TOOL_EVENT_END)
            continue;
        assert_true(e.complete);
        v = json_loadb(args.data, args.len, 0, NULL);
        if (!v || !json_is_object(v) || !schema_check(schema, schema, v, &why))
            fail_msg("%s: %.*s", text, (int)args.len, args.data);
        json_decref(v);
        args.len = 0;
        n++;
    }
    kvd_buf_free(&args);
    return n;
}

static void round_trips(void **state)
{
    json_t *all = json_loads(tools, 0, NULL), *plain = json_loads(no_text, 0, NULL);
    int     n_call = 0, n_cut = 0;
    kvd_rng r;

    (void)state;
    kvd_rng_seed(&r, seed_);
    for (int i = 0; i < 90; i++) {
        const kvd_tool_format f    = (kvd_tool_format)(KVD_TOOLS_HERMES + i % KVD_TOOLS_QWEN_XML);
        const bool            xml  = f >= KVD_TOOLS_SEED;
        json_t               *list = xml ? plain : all;
        kvd_buf               text = { 0 };
        tool_stream          *s;
        gram                 *g;

        g = must_open((gram_desc){ .format      = f,
                                   .choice      = KVD_TOOL_CHOICE_REQUIRED,
                                   .single_call = i / 9 % 3 == 0,
                                   .tools_json  = xml ? no_text : tools });
        assert_int_equal(tool_stream_open(&s,
                                          &(tool_desc){ .format     = f,
                                                        .tools_json = xml ? no_text : tools,
                                                        .reasoning  = f == KVD_TOOLS_HARMONY
                                                                          ? KVD_REASONING_HARMONY
                                                                          : KVD_REASONING_NONE },
                                          &err),
                         KVD_OK);
        if (generate(&r, g, s, &text))
            n_call += check_events(s, list, text.data);
        else
            n_cut++;
        tool_stream_close(s);
        gram_close(g);
        kvd_buf_free(&text);
    }
    json_decref(all);
    json_decref(plain);
    printf("%d calls, %d texts cut\n", n_call, n_cut);
    assert_true(n_call >= 60 && n_cut <= 30);
}

/* ---- formats
 * ------------------------------------------------------------------------------------- */

static void formats(void **state)
{
    static const struct {
        const char     *name;
        kvd_tool_format f;
        kvd_reasoning   r;
    } of[] = { { "Qwen-Qwen2.5-7B-Instruct", KVD_TOOLS_HERMES, KVD_REASONING_NONE },
               { "Qwen-QwQ-32B", KVD_TOOLS_HERMES, KVD_REASONING_THINK },
               { "Qwen-Qwen3-0.6B", KVD_TOOLS_HERMES, KVD_REASONING_THINK },
               { "SmolLM2-135M-Instruct", KVD_TOOLS_NONE, KVD_REASONING_NONE },
               { "microsoft-Phi-3.5-mini-instruct", KVD_TOOLS_NONE, KVD_REASONING_NONE },
               { "openai-gpt-oss-120b", KVD_TOOLS_HARMONY, KVD_REASONING_HARMONY },
               { "mistralai-Mistral-Nemo-Instruct-2407", KVD_TOOLS_MISTRAL, KVD_REASONING_NONE },
               { "microsoft-Phi-4-mini-instruct", KVD_TOOLS_PHI4, KVD_REASONING_NONE },
               { "ibm-granite-granite-3.3-2B-Instruct", KVD_TOOLS_GRANITE, KVD_REASONING_THINK },
               { "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", KVD_TOOLS_DEEPSEEK,
                 KVD_REASONING_THINK },
               { "ByteDance-Seed-OSS", KVD_TOOLS_SEED, KVD_REASONING_SEED } };
    /* of Llama 3.1's template, which may not be stored here: the words it is told by */
    static const char llama3[] =
        "Respond in the format {\"name\": function name, \"parameters\": dictionary} "
        "... Environment: ipython ... <|python_tag|>";
    static const char xml[]  = "<tool_call>\n<function=name>\n<parameter=a> \"name\" \"arguments\"";
    static const char half[] = "<tool_call>\n<function=name> \"name\" \"arguments\"";

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(of); i++) {
        char   path[512];
        size_t len;
        char  *text;

        snprintf(path, sizeof(path), KVD_TEST_DATA "/tmpl/templates/%s.jinja", of[i].name);
        text = ktv_read_file(path, &len);
        assert_non_null(text);
        if (tool_format_of(text, len) != of[i].f || tool_reasoning_of(text, len) != of[i].r)
            fail_msg("%s: %d, %d", of[i].name, (int)tool_format_of(text, len),
                     (int)tool_reasoning_of(text, len));
        kvd_free(text);
    }
    assert_int_equal(tool_format_of(llama3, strlen(llama3)), KVD_TOOLS_LLAMA3);
    assert_int_equal(tool_format_of(xml, strlen(xml)), KVD_TOOLS_QWEN_XML);
    assert_int_equal(tool_format_of(half, strlen(half)), KVD_TOOLS_NONE);
    assert_int_equal(tool_format_of(NULL, 0), KVD_TOOLS_NONE);
}

/* ---- a model
 * ---------------------------------------------------------------------------------------- */

typedef struct run {
    kvd_model   *m;
    kvd_session *s;
    kvd_sampler *sm;
    kvd_grammar *g;
} run;

static run open_run(const kvd_grammar_params *gp, float temperature, bool blanks)
{
    kvd_model_params   mp   = KVD_MODEL_PARAMS_INIT;
    kvd_session_params sp   = KVD_SESSION_PARAMS_INIT;
    kvd_sampler_params pp   = KVD_SAMPLER_PARAMS_INIT;
    kvd_logit_bias     no[] = { { 9, -1e9f }, { 10, -1e9f }, { 13, -1e9f }, { 32, -1e9f } };
    run                r    = { 0 };

    mp.path          = KVD_TEST_DATA "/tiny/qwen2.gguf";
    mp.chat_template = OPEN "{\"name\": .., \"arguments\": ..}";
    pp.temperature   = temperature;
    pp.seed          = seed_;
    pp.top_k         = 0;
    pp.bias          = no;
    pp.n_bias        = blanks ? 0 : 4;
    assert_int_equal(kvd_model_open(&r.m, &mp, &err), KVD_OK);
    assert_int_equal(kvd_session_open(&r.s, r.m, &sp, &err), KVD_OK);
    assert_int_equal(kvd_sampler_open(&r.sm, r.m, &pp, &err), KVD_OK);
    if (kvd_grammar_open(&r.g, r.m, gp, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(kvd_sampler_set_grammar(r.sm, r.g, &err), KVD_OK);
    assert_int_equal(kvd_prefill(r.s, 0, (const int32_t[]){ 65, 66 }, 2, NULL, NULL, &err), KVD_OK);
    return r;
}

static void close_run(run *r)
{
    kvd_sampler_close(r->sm);
    kvd_grammar_close(r->g);
    kvd_session_close(r->s);
    kvd_model_close(r->m);
}

/* The answer, up to its end; false: there is none within the context. */
static bool answer(run *r, kvd_buf *text)
{
    for (int i = 0; i < 250; i++) {
        kvd_batch   b = KVD_BATCH_INIT;
        const char *s;
        size_t      len;
        int32_t     id;

        if (kvd_sampler_pick(r->sm, r->s, 0, &id, &err) != KVD_OK)
            fail_msg("%s: %s", text->data, err.msg);
        if (kvd_token_is_end(r->m, id))
            return true;
        s = kvd_token_bytes(r->m, id, &len);
        kvd_buf_put(text, s, len);
        b.n_token = 1;
        b.token   = &id;
        b.n_best  = kvd_sampler_n_best(r->sm);
        assert_int_equal(b.n_best, 0); /* all logits */
        assert_int_equal(kvd_eval(r->s, &b, &err), KVD_OK);
    }
    return false;
}

static void model_answers(void **state)
{
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"integer\",\"minimum\":"
        "10,\"maximum\":99},\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\","
        "\"bc\"]},\"maxItems\":3},\"s\":{\"type\":\"string\",\"maxLength\":4}},"
        "\"required\":[\"id\",\"tags\",\"s\"]}";
    kvd_grammar_params gp   = KVD_GRAMMAR_PARAMS_INIT;
    json_t            *root = json_loads(schema, 0, NULL), *v;
    const char        *why;

    (void)state;
    gp.schema_json = schema;
    for (int i = 0; i < 12; i++) {
        run     r    = open_run(&gp, i % 3 == 0 ? 0.0f : (float)i, i % 2);
        kvd_buf text = { 0 };

        if (answer(&r, &text)) {
            v = json_loadb(text.data, text.len, 0, NULL);
            if (!v || !schema_check(root, root, v, &why))
                fail_msg("%s", text.data);
            json_decref(v);
        } else {
            assert_true(i % 2); /* many blanks */
        }
        close_run(&r);
        kvd_buf_free(&text);
    }
    json_decref(root);
}

static void model_calls(void **state)
{
    kvd_grammar_params gp   = KVD_GRAMMAR_PARAMS_INIT;
    kvd_tool_event     e    = { .struct_size = sizeof(e) };
    kvd_buf            text = { 0 };
    kvd_tool_stream   *t;
    run                r;

    (void)state;
    gp.tools_json  = tools;
    gp.tool_choice = KVD_TOOL_CHOICE_REQUIRED;
    gp.tool_name   = "f";
    gp.single_call = true;
    r              = open_run(&gp, 1.0f, false);
    assert_int_equal(kvd_model_tool_format(r.m), KVD_TOOLS_HERMES);
    assert_string_equal(kvd_grammar_notes(r.g), "");
    assert_false(kvd_token_is_tool_mark(r.m, 65));
    assert_true(answer(&r, &text));
    assert_int_equal(kvd_tool_open(&t, kvd_model_tool_format(r.m), &err), KVD_OK);
    assert_int_equal(kvd_tool_feed(t, text.data, text.len, &err), KVD_OK);
    assert_int_equal(kvd_tool_flush(t, &err), KVD_OK);
    assert_true(kvd_tool_next(t, &e) && e.kind == KVD_TOOL_EVENT_BEGIN);
    assert_string_equal(e.text, "f");
    assert_true(kvd_tool_next(t, &e) && e.kind == KVD_TOOL_EVENT_DELTA && e.text[0] == '{');
    assert_true(kvd_tool_next(t, &e) && e.kind == KVD_TOOL_EVENT_END && e.complete);
    assert_false(kvd_tool_next(t, &e));
    kvd_tool_close(t);
    kvd_buf_free(&text);
    close_run(&r);
    kvd_tool_close(NULL);
    kvd_grammar_close(NULL);
}

/* Going back to a place, forcing, leaving the grammar. */
static void places(void **state)
{
    kvd_grammar_params gp              = KVD_GRAMMAR_PARAMS_INIT;
    void              *place           = calloc(1, kvd_sampler_place_bytes());
    float              logits[N_VOCAB] = { 0 };
    run                r;

    (void)state;
    gp.schema_json = "{\"enum\":[\"ab\",\"ac\"]}";
    r              = open_run(&gp, 0.0f, true);
    assert_false(kvd_sampler_may_end(r.sm));
    assert_int_equal(kvd_sampler_force(r.sm, 'x', &err), KVD_E_INVAL);
    assert_int_equal(kvd_sampler_force(r.sm, '"', &err), KVD_OK);
    kvd_sampler_save_place(r.sm, place);
    assert_int_equal(kvd_sampler_sample(r.sm, logits), 'a');
    assert_int_equal(kvd_sampler_sample(r.sm, logits), 'b');
    assert_int_equal(kvd_sampler_force(r.sm, '"', &err), KVD_OK);
    assert_true(kvd_sampler_may_end(r.sm));
    kvd_sampler_load_place(r.sm, place);
    assert_false(kvd_sampler_may_end(r.sm));
    logits['c'] = 1.0f;
    assert_int_equal(kvd_sampler_sample(r.sm, logits), 'a');
    assert_int_equal(kvd_sampler_sample(r.sm, logits), 'c');
    assert_int_equal(kvd_sampler_sample(r.sm, logits), '"');
    assert_true(kvd_token_is_end(r.m, kvd_sampler_sample(r.sm, logits)));
    assert_int_equal(kvd_sampler_sample(r.sm, logits), -1); /* the text has ended */
    assert_int_equal(kvd_sampler_set_grammar(r.sm, NULL, &err), KVD_OK);
    assert_int_equal(kvd_sampler_sample(r.sm, logits), 'c');
    assert_int_equal(kvd_sampler_n_best(r.sm), 1);
    assert_true(kvd_sampler_may_end(r.sm));
    assert_int_equal(kvd_sampler_force(r.sm, 'x', &err), KVD_OK);
    close_run(&r);
    free(place);
}

static void wrong_params(void **state)
{
    kvd_model_params   mp = KVD_MODEL_PARAMS_INIT;
    kvd_grammar_params gp = KVD_GRAMMAR_PARAMS_INIT;
    kvd_grammar       *g;
    kvd_model         *m;

    (void)state;
    mp.path = KVD_TEST_DATA "/tiny/qwen2.gguf";
    assert_int_equal(kvd_model_open(&m, &mp, &err), KVD_OK);
    assert_int_equal(kvd_grammar_open(&g, m, NULL, &err), KVD_E_INVAL);
    assert_int_equal(kvd_grammar_open(&g, m, &gp, &err), KVD_E_INVAL);
    gp.tools_json = tools;
    assert_int_equal(kvd_grammar_open(&g, m, &gp, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "chat template"));
    gp.struct_size = 3;
    assert_int_equal(kvd_grammar_open(&g, m, &gp, &err), KVD_E_INVAL);
    assert_null(g);
    kvd_model_close(m);
    mp       = (kvd_model_params)KVD_MODEL_PARAMS_INIT;
    mp.shape = "tiny";
    assert_int_equal(kvd_model_open(&m, &mp, &err), KVD_OK);
    gp             = (kvd_grammar_params)KVD_GRAMMAR_PARAMS_INIT;
    gp.json_object = true;
    assert_int_equal(kvd_grammar_open(&g, m, &gp, &err), KVD_E_UNSUPPORTED);
    assert_int_equal(kvd_model_tool_format(m), KVD_TOOLS_NONE);
    assert_false(kvd_token_is_tool_mark(m, 1));
    kvd_model_close(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hermes),       cmocka_unit_test(hermes_auto),
        cmocka_unit_test(llama),        cmocka_unit_test(tokens),
        cmocka_unit_test(refusals),     cmocka_unit_test(relaxed),
        cmocka_unit_test(no_memory),    cmocka_unit_test(round_trips),
        cmocka_unit_test(formats),      cmocka_unit_test(model_answers),
        cmocka_unit_test(model_calls),  cmocka_unit_test(places),
        cmocka_unit_test(wrong_params), cmocka_unit_test(notes_have_own_paths),
        cmocka_unit_test(rules_once),   cmocka_unit_test(other_forms),
        cmocka_unit_test(bounded),      cmocka_unit_test(raw_parameters),
        cmocka_unit_test(reasoning),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed_ = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, open_all, close_all);
}
