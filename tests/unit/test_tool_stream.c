/* SPDX-License-Identifier: Apache-2.0 */
/* test_tool_stream.c - text to events: reasoning, calls of all forms, what only looks like one, and
 * the same events however the text is cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "text/text.h"

#define OPEN  "<tool_call>"
#define CLOSE "</tool_call>"

static uint64_t seed_ = 1;

/* Appends events as text: T(...) R(...) B0(name) D(...) E0 or X0 (not complete); deltas are joined.
 */
static void take(tool_stream *s, kvd_buf *out, kvd_tool_event_kind *last)
{
    kvd_tool_event e;

    while (tool_stream_next(s, &e)) {
        if (e.kind == *last && e.kind != KVD_TOOL_EVENT_BEGIN && e.kind != KVD_TOOL_EVENT_END) {
            out->len--; /* ) */
            kvd_buf_put(out, e.text, e.len);
            kvd_buf_putc(out, ')');
            continue;
        }
        *last = e.kind;
        if (e.kind == KVD_TOOL_EVENT_REASONING)
            kvd_buf_putc(out, 'R');
        else if (e.kind == KVD_TOOL_EVENT_TEXT || e.kind == KVD_TOOL_EVENT_DELTA)
            kvd_buf_putc(out, e.kind == KVD_TOOL_EVENT_TEXT ? 'T' : 'D');
        else if (e.kind == KVD_TOOL_EVENT_BEGIN)
            kvd_buf_printf(out, "B%u", e.call);
        else
            kvd_buf_printf(out, e.complete ? "E%u" : "X%u", e.call);
        assert_int_equal(e.text[e.len], 0);
        if (e.kind != KVD_TOOL_EVENT_END) {
            kvd_buf_putc(out, '(');
            kvd_buf_put(out, e.text, e.len);
            kvd_buf_putc(out, ')');
        }
    }
}

typedef enum end { FLUSH, CUT, CUT_MORE } end;

/* The events of a text cut into pieces of 1 to most bytes, most 0: not cut; then its end. */
static char *events_of(end how, const tool_desc *d, const char *text, size_t len, kvd_rng *r,
                       uint32_t most)
{
    kvd_buf             out  = { 0 };
    kvd_tool_event_kind last = KVD_TOOL_EVENT_END;
    tool_stream        *s;
    kvd_err             err;

    kvd_buf_puts(&out, "");
    assert_int_equal(tool_stream_open(&s, d, &err), KVD_OK);
    for (size_t at = 0; at < len;) {
        const size_t n = most ? 1 + kvd_rng_below(r, most) : len;
        const size_t k = n < len - at ? n : len - at;

        assert_int_equal(tool_stream_feed(s, text + at, k, &err), KVD_OK);
        if (!most || kvd_rng_below(r, 3)) /* now and then events pile up */
            take(s, &out, &last);
        at += k;
    }
    if (how == FLUSH)
        assert_int_equal(tool_stream_flush(s, &err), KVD_OK);
    else
        assert_int_equal(tool_stream_cut(s, how == CUT_MORE, &err), KVD_OK);
    take(s, &out, &last);
    tool_stream_close(s);
    return kvd_buf_take(&out);
}

static char *events_to(end how, kvd_tool_format f, const char *text, size_t len, kvd_rng *r,
                       uint32_t most)
{
    return events_of(how, &(tool_desc){ .format = f }, text, len, r, most);
}

static void check_desc(const tool_desc *d, const char *text, const char *want)
{
    kvd_rng r;

    kvd_rng_seed(&r, seed_);
    for (uint32_t k = 0; k < 12; k++) {
        char *got = events_of(FLUSH, d, text, strlen(text), &r, k);

        if (strcmp(got, want) != 0)
            fail_msg("pieces of %u:\n%s\ngave %s\nnot  %s", k, text, got, want);
        kvd_free(got);
    }
}

static void check(kvd_tool_format f, const char *text, const char *want)
{
    check_desc(&(tool_desc){ .format = f }, text, want);
}

static void hermes(void **state)
{
    const kvd_tool_format f = KVD_TOOLS_HERMES;

    (void)state;
    check(f, "", "");
    check(f, "just text", "T(just text)");
    check(f, "  \n text \n", "T(  \n text \n)");
    check(f, OPEN "\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n" CLOSE,
          "B0(f)D({\"a\": [1, \"}\"]})E0");
    check(f,
          "I look.\n\n" OPEN "{\"name\":\"f\",\"arguments\":{}}" CLOSE "\n" OPEN
          "\n{\"name\":\"g\",\"arguments\":{\"x\":\"\\\"<\"}}" CLOSE "\n",
          "T(I look.)B0(f)D({})E0B1(g)D({\"x\":\"\\\"<\"})E1");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{}}" CLOSE " and text",
          "B0(f)D({})E0T( and text)");
    check(f, OPEN "{\"arguments\": {\"a\":1}, \"name\": \"f\"}" CLOSE, "B0(f)D({\"a\":1})E0");
    check(f, OPEN "{\"id\":7,\"name\":\"f\",\"arguments\":{} , \"x\":[\"}\"]}" CLOSE,
          "B0(f)D({})E0");
    check(f, OPEN "{\"name\":\"f\"}" CLOSE, "B0(f)D({})E0");
    check(f, OPEN "{\"name\":\"\\u0066\\n\\\"\",\"parameters\":null}" CLOSE, "B0(f\n\")D(null)E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":12}" CLOSE, "B0(f)D(12)E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":\"{}\"}" CLOSE, "B0(f)D(\"{}\")E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{\"s\":\"" CLOSE "\"}}" CLOSE,
          "B0(f)D({\"s\":\"" CLOSE "\"})E0"); /* the mark inside of a string is none */
    check(f, "\xc3\xa9" OPEN "{\"name\":\"\xc3\xa9\",\"arguments\":{\"\xc3\xa9\":1}}" CLOSE,
          "T(\xc3\xa9)B0(\xc3\xa9)D({\"\xc3\xa9\":1})E0");
}

static void not_calls(void **state)
{
    const kvd_tool_format f = KVD_TOOLS_HERMES;

    (void)state;
    check(f, "a <tool", "T(a <tool)");
    check(f, "a <tool_cal> b", "T(a <tool_cal> b)");
    check(f, "<<tool_call", "T(<<tool_call)");
    check(f, OPEN "hello", "T(" OPEN "hello)");
    check(f, OPEN "[1]", "T(" OPEN "[1])");
    check(f, OPEN "{}" CLOSE, "T(" OPEN "{}" CLOSE ")");
    check(f, OPEN "{\"name\":7}", "T(" OPEN "{\"name\":7})");
    check(f, OPEN "{\"name\":\"\",\"arguments\":{}}",
          "T(" OPEN "{\"name\":\"\",\"arguments\":{}})");
    check(f, OPEN "{\"name\":\"f\" \"arguments\"", "T(" OPEN "{\"name\":\"f\" \"arguments\")");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":}", "T(" OPEN "{\"name\":\"f\",\"arguments\":})");
    check(f, OPEN "{\"name\":\"f\",\"argu", "T(" OPEN "{\"name\":\"f\",\"argu)");
    check(f, OPEN OPEN "{\"name\":\"f\",\"arguments\":{}}" CLOSE, "T(" OPEN ")B0(f)D({})E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{\"a\":", "B0(f)D({\"a\":)X0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{\"a\":1}", "B0(f)D({\"a\":1})E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{}}", "B0(f)D({})E0");
    check(f, OPEN "{\"name\":\"f\",\"arguments\":{}}\n</tool", "B0(f)D({})E0T(\n</tool)");
    check(f, CLOSE "x", "T(" CLOSE "x)");
}

static void llama(void **state)
{
    const kvd_tool_format f = KVD_TOOLS_LLAMA3;

    (void)state;
    check(f, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "B0(f)D({\"a\": 1})E0");
    check(f, "\n {\"type\":\"function\",\"name\": \"f\", \"parameters\": {}}\n", "B0(f)D({})E0");
    check(f, "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "B0(f)D({})E0");
    check(f, "Text first. <|python_tag|>{\"name\": \"f\", \"parameters\": {}}",
          "T(Text first.)B0(f)D({})E0");
    check(f, "{\"name\":\"f\",\"parameters\":{}}; {\"name\":\"g\",\"parameters\":{}}",
          "B0(f)D({})E0B1(g)D({})E1");
    check(f, "{\"name\":\"f\",\"parameters\":{}}\n{\"name\":\"g\",\"parameters\":{}} done",
          "B0(f)D({})E0B1(g)D({})E1T( done)");
    check(f, "{\"answer\": 42}", "T({\"answer\": 42})");
    check(f, "{", "T({)");
    check(f, "Use {\"name\":\"f\",\"parameters\":{}}", "T(Use {\"name\":\"f\",\"parameters\":{}})");
    check(f, "<|python_tag|>print(1)", "T(<|python_tag|>print(1))");
    check(f, "{\"name\":\"f\",\"parameters\":{}};", "B0(f)D({})E0T(;)");
}

/* ---- other forms, and reasoning ----------------------------------------------------------------
 */

#define DS(word) "<\xef\xbd\x9c" word "\xef\xbd\x9c>"
#define TOOL     "tool\xe2\x96\x81"
#define DS_OPEN                 \
    DS(TOOL "calls\xe2\x96\x81" \
            "begin")
#define DS_CLOSE                \
    DS(TOOL "calls\xe2\x96\x81" \
            "end")
#define DS_CALL(name, args)                                                              \
    DS(TOOL "call\xe2\x96\x81"                                                           \
            "begin")                                                                     \
    "function" DS(TOOL "sep") name "\n```json\n" args "\n```" DS(TOOL "call\xe2\x96\x81" \
                                                                      "end")

static void marked_forms(void **state)
{
    static const char f[] = "{\"name\": \"f\", \"arguments\": {\"a\": [1]}}";
    static const char g[] = "{\"name\": \"g\", \"arguments\": {}, \"id\": \"abcDEF123\"}";
    char              text[512];

    (void)state;
    snprintf(text, sizeof(text),
             "Look. <|tool_call|>%s<|/tool_call|>\n<|tool_call|>%s<|/tool_call|>", f, g);
    check(KVD_TOOLS_PHI4, text, "T(Look.)B0(f)D({\"a\": [1]})E0B1(g)D({})E1");
    snprintf(text, sizeof(text), "<|tool_call|>[%s,\n%s]\n", f, g);
    check(KVD_TOOLS_PHI4, text, "B0(f)D({\"a\": [1]})E0B1(g)D({})E1");
    check(KVD_TOOLS_GRANITE, text, "B0(f)D({\"a\": [1]})E0B1(g)D({})E1");
    check(KVD_TOOLS_GRANITE, "<|tool_call|>[]", "T(<|tool_call|>[])");
    check(KVD_TOOLS_GRANITE, "<|tool_call|>[{\"name\":\"f\"}] yes", "B0(f)D({})E0T( yes)");
    snprintf(text, sizeof(text), "[TOOL_CALLS] [%s, %s]", f, g);
    check(KVD_TOOLS_MISTRAL, text, "B0(f)D({\"a\": [1]})E0B1(g)D({})E1");
    check(KVD_TOOLS_MISTRAL, "a [TOOL_ b", "T(a [TOOL_ b)");
    snprintf(text, sizeof(text), "<tool_call>[%s, %s]</tool_call>\n", f, g);
    check(KVD_TOOLS_HERMES, text, "B0(f)D({\"a\": [1]})E0B1(g)D({})E1");
}

static void named_forms(void **state)
{
    const tool_desc h = { .format = KVD_TOOLS_HARMONY, .reasoning = KVD_REASONING_HARMONY };

    (void)state;
    check(KVD_TOOLS_DEEPSEEK,
          "So.\n" DS_OPEN DS_CALL("f", "{\"a\": \"```\"}") "\n" DS_CALL("g", "{}") DS_CLOSE,
          "T(So.)B0(f)D({\"a\": \"```\"})E0B1(g)D({})E1");
    check(KVD_TOOLS_DEEPSEEK, DS_OPEN DS_CALL("f", "{}"), "B0(f)D({})E0");
    check(KVD_TOOLS_DEEPSEEK, DS_OPEN "x", "T(" DS_OPEN "x)");
    check_desc(&h, "<|channel|>final<|message|>Hello.<|end|>", "T(Hello.)");
    check_desc(&h,
               "<|channel|>analysis<|message|>I look. <|end|><|start|>assistant<|channel|>"
               "commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}",
               "R(I look.)B0(f)D({\"a\": 1})E0");
    check_desc(&h, " to=functions.f<|channel|>commentary json<|message|>{}", "B0(f)D({})E0");
    check_desc(&h,
               "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.f"
               "<|channel|>commentary<|message|>{}",
               "T(First.)B0(f)D({})E0");
    check_desc(&h, "", "");
}

static void raw_parameters(void **state)
{
    static const char tools[] = "[{\"function\":{\"name\":\"w\",\"parameters\":{\"properties\":{"
                                "\"s\":{\"type\":\"string\"},"
                                "\"n\":{\"type\":\"integer\"},\"o\":{\"type\":\"object\"}}}}}]";
    const tool_desc   d       = { .format = KVD_TOOLS_SEED, .tools_json = tools };
    const tool_desc   x       = { .format = KVD_TOOLS_QWEN_XML };

    (void)state;
    check_desc(&d,
               "Yes.\n<seed:tool_call>\n<function=w>\n<parameter=s>5</parameter>\n<parameter=n>5"
               "</parameter>\n<parameter=o>{\"k\": [true]}\n</parameter>\n</function>\n"
               "</seed:tool_call>\n<seed:tool_call><function=v></function></seed:tool_call>",
               "T(Yes.)B0(w)D({\"s\": \"5\", \"n\": 5, \"o\": {\"k\": [true]}})E0B1(v)D({})E1");
    check_desc(&d,
               "<seed:tool_call><function=w><parameter=s>\na\"\\\n\n</par\t</b\n</parameter>"
               "</function></seed:tool_call>",
               "B0(w)D({\"s\": \"a\\\"\\\\\\n\\n</par\\u0009</b\"})E0");
    check_desc(&x,
               "<tool_call><function=f><parameter=a>7</parameter><parameter=b>x y</parameter>"
               "</function></tool_call>",
               "B0(f)D({\"a\": 7, \"b\": \"x y\"})E0");
    check_desc(&d, "<seed:tool_call><function=w><parameter=s>ab", "B0(w)D({\"s\": \"ab)X0");
    check_desc(&d, "<seed:tool_call>no", "T(<seed:tool_call>no)");
}

static void reasoning(void **state)
{
    tool_desc d = { .reasoning = KVD_REASONING_THINK };

    (void)state;
    check_desc(&d, "<think>\nwell, </thin 5\n</think>\n\nYes. ", "R(well, </thin 5)T(Yes. )");
    check_desc(&d, "\n<think>\n\n</think>\n\nYes", "T(Yes)");
    check_desc(&d, "A <think>b</think>", "T(A <think>b</think>)");
    check_desc(&d, "<think>cut", "R(cut)");
    check_desc(&d, "plain\n", "T(plain\n)");
    d.state = KVD_REASONING_OPEN;
    check_desc(&d, "well</think>Yes</think>", "R(well)T(Yes</think>)");
    d.state = KVD_REASONING_CANNOT;
    check_desc(&d, "<think>a", "T(<think>a)");
    d.state  = KVD_REASONING_MAY;
    d.format = KVD_TOOLS_HERMES;
    check_desc(&d, "<think>I " OPEN "x</think>\n" OPEN "{\"name\":\"f\",\"arguments\":{}}" CLOSE,
               "R(I " OPEN "x)B0(f)D({})E0");
    d = (tool_desc){ .reasoning = KVD_REASONING_SEED };
    check_desc(&d, "<seed:think>a</seed:think>b", "R(a)T(b)");
}

/* ---- the same, at random -------------------------------------------------------------------- */

static void random_text(kvd_rng *r, kvd_buf *b)
{
    static const char *const piece[] = { OPEN,
                                         CLOSE,
                                         "<|python_tag|>",
                                         "{\"name\": \"f\", \"arguments\": ",
                                         "{\"name\":\"gg\",\"parameters\":",
                                         "{\"a\": \"x}\\\"{\", \"b\": [1, {}]}",
                                         "}",
                                         "{",
                                         "\"",
                                         "\\",
                                         "\n",
                                         "   ",
                                         "<tool_",
                                         "</",
                                         "word ",
                                         ";",
                                         "\xe2\x82\xac",
                                         "<|tool_call|>[",
                                         "<|/tool_call|>",
                                         "[TOOL_CALLS]",
                                         "]",
                                         ",",
                                         DS_OPEN,
                                         DS_CALL("f", "{}"),
                                         DS_CLOSE,
                                         "<|channel|>commentary to=functions.f",
                                         "<|message|>",
                                         "<|start|>assistant",
                                         "<|end|>",
                                         "<|channel|>analysis",
                                         "<seed:tool_call>",
                                         "<function=f>",
                                         "<parameter=p>",
                                         "</parameter>",
                                         "</function>",
                                         "<think>",
                                         "</think>",
                                         "\"name\": \"h\",",
                                         "\"arguments\"",
                                         ":" };

    for (uint64_t n = 1 + kvd_rng_below(r, 14); n; n--)
        kvd_buf_puts(b, piece[kvd_rng_below(r, KVD_COUNTOF(piece))]);
    if (kvd_rng_below(r, 40) == 0) /* beyond what is held back */
        for (uint64_t n = kvd_rng_below(r, 20000); n; n--)
            kvd_buf_putc(b, kvd_rng_below(r, 2) ? ' ' : 'x');
    if (kvd_rng_below(r, 20) == 0)
        for (uint64_t n = kvd_rng_below(r, 600); n; n--)
            kvd_buf_putc(b, ' ');
    if (kvd_rng_below(r, 2))
        kvd_buf_puts(b, OPEN "{\"name\":\"z\",\"arguments\":{}}" CLOSE);
}

static void any_cut(void **state)
{
    kvd_rng r;
    int     n_call = 0;

    (void)state;
    kvd_rng_seed(&r, seed_);
    for (int i = 0; i < 4000; i++) {
        const tool_desc d = { .format    = (kvd_tool_format)(1 + i % KVD_TOOLS_QWEN_XML),
                              .reasoning = (kvd_reasoning)(i / 9 % (KVD_REASONING_HARMONY + 1)),
                              .state     = (kvd_reasoning_state)(i / 36 % 3) };
        kvd_buf         b = { 0 };
        char           *whole, *cut;

        random_text(&r, &b);
        whole = events_of(FLUSH, &d, b.data, b.len, &r, 0);
        n_call += strstr(whole, "B0(") != NULL;
        for (uint32_t most = 1; most < 200; most *= 5) {
            cut = events_of(FLUSH, &d, b.data, b.len, &r, most);
            if (strcmp(whole, cut) != 0)
                fail_msg("text %d, pieces of %u: %s\nwhole: %s\ncut:   %s", i, most, b.data, whole,
                         cut);
            kvd_free(cut);
        }
        kvd_free(whole);
        kvd_buf_free(&b);
    }
    assert_in_range(n_call, 150, 3500);
}

static void check_end(end how, kvd_tool_format f, const char *text, const char *want)
{
    kvd_rng r;

    kvd_rng_seed(&r, seed_);
    for (uint32_t k = 0; k < 12; k++) {
        char *got = events_to(how, f, text, strlen(text), &r, k);

        if (strcmp(got, want) != 0)
            fail_msg("pieces of %u:\n%s\ngave %s\nnot  %s", k, text, got, want);
        kvd_free(got);
    }
}

/* A text that is cut ends in no part of a call; what is text for sure stays. */
static void cut_off(void **state)
{
    static const char *const whole[] = {
        [KVD_TOOLS_HERMES] =
            "I look.\n" OPEN "\n{\"name\": \"fg\", \"arguments\": {\"a\": 1}}\n" CLOSE "\n" OPEN
            "{\"name\":\"g\",\"arguments\":{}}" CLOSE "\n",
        [KVD_TOOLS_LLAMA3] = "{\"name\": \"fg\", \"parameters\": {\"a\": 1}} ; "
                             "{\"name\": \"g\", \"parameters\": {}} "
    };
    const end how[] = { CUT, CUT_MORE };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(how); i++) {
        const kvd_tool_format h = KVD_TOOLS_HERMES, l = KVD_TOOLS_LLAMA3;
        const bool            more = how[i] == CUT_MORE;

        check_end(how[i], h, "", "");
        check_end(how[i], h, "a text \n", "T(a text \n)");
        check_end(how[i], h, "a " OPEN, "T(a)");
        check_end(how[i], h, "a " OPEN "{\"name\": \"f", "T(a)");
        check_end(how[i], h, OPEN "{\"name\": \"f\", \"arg", "");
        check_end(how[i], h, OPEN "{\"name\": \"f\", \"arguments\": {\"a", "B0(f)D({\"a)X0");
        check_end(how[i], h, OPEN "{\"name\":\"f\",\"arguments\":{}}</tool", "B0(f)D({})E0");
        check_end(how[i], h, OPEN "{\"name\":\"f\",\"arguments\":{}}" CLOSE "\n<tool_",
                  "B0(f)D({})E0");
        check_end(how[i], h, "a < b <tool_", more ? "T(a < b )" : "T(a < b <tool_)");
        check_end(how[i], l, " {\"name", "");
        check_end(how[i], l, "no {", "T(no {)");
        check_end(how[i], l, "{\"name\":\"f\",\"parameters\":{}} ; ", "B0(f)D({})E0");
        check_end(how[i], l, "so <|py", more ? "T(so )" : "T(so <|py)");
        for (kvd_tool_format f = h; f <= l; f++) {
            for (size_t n = 0; n <= strlen(whole[f]); n++) {
                kvd_rng     r;
                char       *got;
                const char *t;

                kvd_rng_seed(&r, seed_ + n);
                got = events_to(CUT_MORE, f, whole[f], n, &r, 5);
                t   = strstr(got, "T(");
                assert_true(!t || (strncmp(t + 2, whole[f], strcspn(t + 2, "<{)")) == 0 &&
                                   strcspn(t + 2, "<{)") == strcspn(t + 2, ")")));
                assert_null(t ? strstr(t + 2, "T(") : NULL);
                kvd_free(got);
            }
        }
    }
}

/* What is held back is bounded: of a text without calls only a mark's beginning and white space. */
static void held_back(void **state)
{
    static const char text[] = "some text < and <tool ";
    tool_stream      *s;
    kvd_tool_event    e;
    kvd_err           err;
    size_t            fed = 0, told = 0;

    (void)state;
    assert_int_equal(tool_stream_open(&s, &(tool_desc){ .format = KVD_TOOLS_HERMES }, &err),
                     KVD_OK);
    for (int i = 0; i < 2000; i++) {
        assert_int_equal(tool_stream_feed(s, &text[i % 22], 1, &err), KVD_OK);
        fed++;
        while (tool_stream_next(s, &e))
            told += e.len;
        assert_in_range(fed - told, 0, strlen("<tool_call>") + 1);
    }
    tool_stream_close(s);
}

static void no_memory(void **state)
{
    static const char text[] = "text " OPEN "{\"name\":\"f\",\"arguments\":{\"a\":1}}" CLOSE;
    const uint64_t    live   = kvd_alloc_live();
    kvd_status        st     = KVD_E_NOMEM;
    kvd_err           err;
    int               n = 0;

    (void)state;
    for (; st != KVD_OK && n < 100; n++) {
        tool_stream   *s;
        kvd_tool_event e;

        kvd_alloc_fault(n, false);
        st = tool_stream_open(&s, &(tool_desc){ .format = KVD_TOOLS_HERMES }, &err);
        if (st == KVD_OK)
            st = tool_stream_feed(s, text, strlen(text), &err);
        if (st == KVD_OK)
            st = tool_stream_flush(s, &err);
        kvd_alloc_fault(-1, false);
        assert_true(st == KVD_OK || st == KVD_E_NOMEM);
        while (s && tool_stream_next(s, &e)) /* what is told is all there */
            assert_int_equal(strlen(e.text), e.len);
        tool_stream_close(s);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_in_range(n, 4, 99);
    assert_int_equal(kvd_tool_open(&(kvd_tool_stream *){ NULL }, KVD_TOOLS_NONE, &err),
                     KVD_E_UNSUPPORTED);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hermes),      cmocka_unit_test(not_calls),
        cmocka_unit_test(llama),       cmocka_unit_test(any_cut),
        cmocka_unit_test(held_back),   cmocka_unit_test(cut_off),
        cmocka_unit_test(no_memory),   cmocka_unit_test(marked_forms),
        cmocka_unit_test(named_forms), cmocka_unit_test(raw_parameters),
        cmocka_unit_test(reasoning),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed_ = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
