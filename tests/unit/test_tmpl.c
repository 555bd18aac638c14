/* SPDX-License-Identifier: Apache-2.0 */
/* test_tmpl.c - the template interpreter against what jinja2 made of the same input
 * (tests/data/tmpl/golden, written by scripts/tmpl-golden.py): byte by byte, errors where it has
 * errors, and the origin of every sign that special tokens are made of. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "text/text.h"

#define NOW 1721995200 /* as in the script */

static char *read_file(const char *path, size_t *len)
{
    FILE  *f = fopen(path, "rb");
    char  *text;
    size_t n, cap = 1u << 21;

    if (!f)
        fail_msg("%s cannot be opened", path);
    text = malloc(cap);
    assert_non_null(text);
    n = fread(text, 1, cap - 1, f);
    assert_true(n < cap - 1);
    text[n] = 0;
    fclose(f);
    if (len)
        *len = n;
    return text;
}

/* Calls fn with each line of a file of JSON objects. */
static void each_line(const char *path, void (*fn)(void *ctx, json_t *line), void *ctx)
{
    char *text = read_file(path, NULL), *save = NULL;

    for (char *p = strtok_r(text, "\n", &save); p; p = strtok_r(NULL, "\n", &save)) {
        json_error_t err;
        json_t      *j = json_loads(p, JSON_ALLOW_NUL, &err);

        if (!j)
            fail_msg("%s: %s", path, err.text);
        fn(ctx, j);
        json_decref(j);
    }
    free(text);
}

static const char *str_of(const json_t *line, const char *key)
{
    return json_string_value(json_object_get(line, key));
}

static bool inside(const kvd_span *span, size_t n, size_t at)
{
    for (size_t i = 0; i < n; i++) {
        if (at >= span[i].start && at < span[i].end)
            return true;
    }
    return false;
}

static void check_spans(const kvd_buf *out, const kvd_span *span, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        assert_true(span[i].start < span[i].end);
        assert_true(span[i].end <= out->len);
        assert_true(i == 0 || span[i - 1].end < span[i].start);
    }
}

static void compare(const json_t *line, const char *what, kvd_status st, const kvd_err *err,
                    const kvd_buf *out, uint32_t *n_bad)
{
    const json_t *want = json_object_get(line, "out");
    const char   *text = json_string_value(want);
    const size_t  len  = json_string_length(want);

    if (want && st == KVD_OK && out->len == len && (len == 0 || memcmp(out->data, text, len) == 0))
        return;
    if (!want && st != KVD_OK)
        return;
    (*n_bad)++;
    print_message("---- %s\nwanted: %s%s\ngot:    %s\n", what, want ? "" : "error ",
                  want ? text : str_of(line, "err"),
                  st != KVD_OK ? err->msg
                  : out->data  ? out->data
                               : "");
}

/* ---- small templates ------------------------------------------------------------- */

typedef struct small_ctx {
    char    *vars;
    uint32_t n, n_bad;
} small_ctx;

static void small_case(void *ctx, json_t *line)
{
    small_ctx  *c    = ctx;
    const char *t    = str_of(line, "t");
    tmpl_input  in   = { .messages_json = "[]", .now_unix = NOW };
    kvd_err     err  = { 0 };
    kvd_buf     out  = { 0 };
    kvd_span   *span = NULL;
    size_t      n    = 0;
    tmpl       *tm   = NULL;
    kvd_status  st;

    if (!t) {
        c->vars = json_dumps(json_object_get(line, "data"), JSON_COMPACT);
        return;
    }
    in.vars_json = c->vars;
    st           = tmpl_open(&tm, t, json_string_length(json_object_get(line, "t")), &err);
    if (st == KVD_OK)
        st = tmpl_render(tm, &in, &out, &span, &n, &err);
    check_spans(&out, span, n);
    compare(line, t, st, &err, &out, &c->n_bad);
    c->n++;
    tmpl_close(tm);
    kvd_free(span);
    kvd_buf_free(&out);
}

static void test_small(void **state)
{
    small_ctx c = { 0 };

    (void)state;
    each_line(KVD_TEST_DATA "/tmpl/golden/small.jsonl", small_case, &c);
    free(c.vars);
    print_message("%u templates\n", c.n);
    assert_true(c.n > 700);
    assert_int_equal(c.n_bad, 0);
    assert_int_equal(kvd_alloc_live(), 0);
}

static void refused_case(void *ctx, json_t *line)
{
    const char *t   = str_of(line, "t");
    kvd_err     err = { 0 };
    tmpl       *tm  = NULL;

    if (tmpl_open(&tm, t, strlen(t), &err) != KVD_E_UNSUPPORTED || tm)
        fail_msg("not refused as unsupported: %s (%s)", t, err.msg);
    assert_non_null(strstr(err.msg, "line 1: "));
    assert_non_null(strstr(err.msg, "not supported"));
    (*(uint32_t *)ctx)++;
}

static void test_refused(void **state)
{
    uint32_t n = 0;

    (void)state;
    each_line(KVD_TEST_DATA "/tmpl/golden/refused.jsonl", refused_case, &n);
    assert_true(n >= 30);
}

/* ---- dialogs over real templates ------------------------------------------------- */

typedef struct dialog_ctx {
    json_t  *dialogs;
    char     file[256], bos[64], eos[64];
    tmpl    *tm;
    uint32_t n, n_bad, n_origin;
} dialog_ctx;

static void open_template(dialog_ctx *c, const json_t *line)
{
    char    path[512];
    kvd_err err = { 0 };
    size_t  len;
    char   *text;

    snprintf(c->file, sizeof(c->file), "%s", str_of(line, "file"));
    snprintf(c->bos, sizeof(c->bos), "%s", str_of(line, "bos"));
    snprintf(c->eos, sizeof(c->eos), "%s", str_of(line, "eos"));
    snprintf(path, sizeof(path), "%s/tmpl/templates/%s", KVD_TEST_DATA, c->file);
    text = read_file(path, &len);
    tmpl_close(c->tm);
    if (tmpl_open(&c->tm, text, len, &err) != KVD_OK)
        fail_msg("%s: %s", c->file, err.msg);
    free(text);
}

/* Every <, | and > of the output: inside a span exactly where the template wrote it. */
static void check_origins(dialog_ctx *c, const char *what, const char *from, const kvd_buf *out,
                          const kvd_span *span, size_t n_span)
{
    size_t k = 0;

    for (size_t i = 0; i < out->len; i++) {
        if (!strchr("<|>", out->data[i]))
            continue;
        assert_true(from[k] != 0);
        if (inside(span, n_span, i) != (from[k] == 't')) {
            print_message("---- %s\nbyte %zu is %s: %.30s\n", what, i,
                          from[k] == 't' ? "not trusted" : "trusted", out->data + i);
            c->n_bad++;
            return;
        }
        k++;
        c->n_origin++;
    }
    assert_int_equal(from[k], 0);
}

static void dialog_case(void *ctx, json_t *line)
{
    dialog_ctx   *c  = ctx;
    tmpl_input    in = { .now_unix = NOW, .bos_token = c->bos, .eos_token = c->eos };
    const json_t *dialog, *tools;
    char         *messages, *vars, *tools_text = NULL, what[400];
    kvd_err       err  = { 0 };
    kvd_buf       out  = { 0 };
    kvd_span     *span = NULL;
    size_t        n    = 0;
    kvd_status    st;

    if (json_object_get(line, "dialogs")) {
        c->dialogs = json_incref(json_object_get(line, "dialogs"));
        return;
    }
    if (json_object_get(line, "file")) {
        open_template(c, line);
        return;
    }
    dialog   = json_object_get(c->dialogs, str_of(line, "dialog"));
    messages = json_dumps(json_object_get(dialog, "messages"), 0);
    vars     = json_dumps(json_object_get(dialog, "vars"), 0);
    tools    = json_object_get(json_object_get(dialog, "vars"), "tools");
    if (tools)
        tools_text = json_dumps(tools, 0);
    in.messages_json         = messages;
    in.vars_json             = vars;
    in.tools_json            = tools_text;
    in.add_generation_prompt = json_is_true(json_object_get(line, "prompt"));
    st                       = tmpl_render(c->tm, &in, &out, &span, &n, &err);
    snprintf(what, sizeof(what), "%s, %s", c->file, str_of(line, "dialog"));
    check_spans(&out, span, n);
    compare(line, what, st, &err, &out, &c->n_bad);
    if (st == KVD_OK && json_is_string(json_object_get(line, "from")))
        check_origins(c, what, str_of(line, "from"), &out, span, n);
    c->n++;
    free(messages);
    free(vars);
    free(tools_text);
    kvd_free(span);
    kvd_buf_free(&out);
}

static void test_dialogs(void **state)
{
    dialog_ctx c = { 0 };

    (void)state;
    each_line(KVD_TEST_DATA "/tmpl/golden/dialogs.jsonl", dialog_case, &c);
    tmpl_close(c.tm);
    json_decref(c.dialogs);
    print_message("%u renders, %u signs traced\n", c.n, c.n_origin);
    assert_true(c.n >= 600);
    assert_true(c.n_origin > 10000);
    assert_int_equal(c.n_bad, 0);
    assert_int_equal(kvd_alloc_live(), 0);
}

/* Integers beyond 64 bits are written and compared, but not computed with. */
static void test_long_numbers(void **state)
{
    static const struct {
        const char *text, *want; /* want NULL: 64 bits are too few */
    } c[] = { { "{{ x }}", "18446744073709551616" },
              { "{{ l | tojson }}", "[-9223372036854775809, 9223372036854775807, 0.5, 1e999]" },
              { "{{ x is integer }} {{ x is number }} {{ x is string }}", "True True False" },
              { "{{ x == x }} {{ x == l[0] }} {{ x == '18446744073709551616' }}",
                "True False False" },
              { "{{ x | int }} {{ x | string | length }} {{ x | float }}",
                "18446744073709551616 20 1.8446744073709552e+19" },
              { "{% if x %}yes{% endif %}", "yes" },
              { "{{ x + 1 }}", NULL } };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(c); i++) {
        const char vars[] = "{\"x\":18446744073709551616,"
                            "\"l\":[-9223372036854775809,9223372036854775807,0.50,1e999]}";
        tmpl_input in     = { .now_unix = NOW, .messages_json = "[]", .vars_json = vars };
        tmpl      *tm     = NULL;
        kvd_err    err    = { 0 };
        kvd_buf    out    = { 0 };
        kvd_span  *span   = NULL;
        size_t     n      = 0;

        assert_int_equal(tmpl_open(&tm, c[i].text, strlen(c[i].text), &err), KVD_OK);
        if (c[i].want) {
            assert_int_equal(tmpl_render(tm, &in, &out, &span, &n, &err), KVD_OK);
            assert_string_equal(out.data, c[i].want);
        } else {
            assert_int_equal(tmpl_render(tm, &in, &out, &span, &n, &err), KVD_E_INVAL);
            assert_non_null(strstr(err.msg, "64 bits"));
        }
        kvd_free(span);
        kvd_buf_free(&out);
        tmpl_close(tm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_dialogs),
        cmocka_unit_test(test_long_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
