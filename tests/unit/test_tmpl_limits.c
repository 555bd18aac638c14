/* SPDX-License-Identifier: Apache-2.0 */
/* test_tmpl_limits.c - hostile templates end with an error and in bounded work, failed allocations
 * leave nothing behind, and provenance survives whatever a template does to a string. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/sanitized.h"
#include "text/text.h"

static kvd_status render(const char *t, const char *messages, const char *vars, kvd_buf *out,
                         kvd_span **span, size_t *n, kvd_err *err)
{
    const tmpl_input in = {
        .messages_json = messages, .vars_json = vars, .bos_token = "<s>", .eos_token = "</s>"
    };
    tmpl      *tm = NULL;
    kvd_status st = tmpl_open(&tm, t, strlen(t), err);

    if (st == KVD_OK)
        st = tmpl_render(tm, &in, out, span, n, err);
    tmpl_close(tm);
    return st;
}

/* ---- limits ---------------------------------------------------------------------- */

static const char *const hostile[] = {
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ range(10**9) }}",
    "{{ 'a' * 10**12 }}",
    "{{ ('ab' * 1000000) * 1000 }}",
    "{{ [1] * 10**12 }}",
    "{{ 9 ** 99 }}{{ 10 ** 10 ** 10 }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor "
    "%}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor "
    "%}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor "
    "%}",
    "{% set ns = namespace(s=1) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ "
    "ns.s }}",
    "{% set ns = namespace(s=1) %}{% for i in range(9000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ "
    "ns.s|tojson }}",
    "{% set a = namespace(s=1) %}{% for i in range(9000) %}{% set a.s = [a.s] %}{% endfor %}{% set "
    "x = a.s %}"
    "{% for i in range(9000) %}{% set a.s = [a.s] %}{% endfor %}{{ x == a.s }}{{ x < a.s }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n < 40 %}{{ f(n+1) }}{{ f(n+1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}"
    "{% endmacro %}{{ g() }}",
    "{% set s = 'a' * 3000000 %}{% for i in range(90000) %}{{ s.replace('b','') is string }}{% "
    "endfor %}",
    "{% set s = 'a' * 3000000 %}{% for i in range(90000) %}{{ 'aab' in s }}{{ s[2999999] }}{% "
    "endfor %}",
    "{% set s = 'a' * 3000000 %}{% for i in range(90000) %}{{ s|upper }}{{ s|tojson }}{% endfor %}",
    "{% set s = ' ' * 3000000 %}{% for i in range(90000) %}{{ s.strip() }}{{ s.split() }}{% endfor "
    "%}",
    "{% set s = 'ab' * 99999 %}{% for i in range(90000) %}{{ s.rfind('b' * 999) }}{% endfor %}",
    "{% set l = range(100000)|list %}{{ l|unique|list }}",
    "{% set l = range(100000)|list %}{% for i in l %}{{ l|sort|last }}{{ -1 in l }}{% endfor %}",
    "{% for i in range(100000) %}{% for k in range(100000) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxx' }}{% "
    "endfor %}{% endfor %}",
};

#define HOSTILE_MS (SANITIZED ? 3000.0 : 100.0)

/* Of this thread: neighbours do not count. */
static double thread_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void test_hostile(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(hostile); i++) {
        kvd_err      err  = { 0 };
        kvd_buf      out  = { 0 };
        kvd_span    *span = NULL;
        size_t       n    = 0;
        const double from = thread_ms();

        if (render(hostile[i], "[]", NULL, &out, &span, &n, &err) != KVD_E_INVAL)
            fail_msg("not stopped: %s: %s", hostile[i], err.msg);
        assert_true(thread_ms() - from < HOSTILE_MS);
        assert_null(span);
        assert_int_equal(out.len, 0);
        assert_int_equal(kvd_alloc_live(), 0);
    }
}

/* n times a, then b, then n times c. */
static char *nested(const char *a, const char *b, const char *c, size_t n)
{
    kvd_buf t = { 0 };

    for (size_t i = 0; i < n; i++)
        kvd_buf_puts(&t, a);
    kvd_buf_puts(&t, b);
    for (size_t i = 0; i < n; i++)
        kvd_buf_puts(&t, c);
    return kvd_buf_take(&t);
}

static void *open_deep(void *arg)
{
    static const char *const part[][3] = {
        { "(", "1", ")" },
        { "-", "1", "" },
        { "not ", "1", "" },
        { "1 + ", "1", "" },
        { "[", "1", "]" },
        { "{1:", "1", "}" },
        { "x if x else ", "1", "" },
        { "", "x", "|trim" },
        { "", "x", ".y" },
        { "", "x", "[0]" },
        { "x[", "0", "]" },
        { "f(", "0", ")" },
        { "{% if 1 %}", "", "{% endif %}" },
        { "{% for i in x %}", "", "{% endfor %}" },
        { "{% macro f(a=1) %}", "", "{% endmacro %}" },
        { "1 < (", "1", ")" },
        { "x is eq(", "1", ")" },
        { "1 and ", "1", "" },
        { "{% if 1 %}{% else %}", "", "" },
        { "{% with a = 1 %}", "", "" },
        { "{% filter trim %}", "", "" },
        { "{% set a %}", "", "" },
    };
    static const size_t depth[] = { 100, 190, 250, 3000 };

    for (size_t i = 0; i < KVD_COUNTOF(hostile); i++) {
        kvd_buf out = { 0 };
        size_t  n;

        if (!strstr(hostile[i], "range(100000)"))
            render(hostile[i], "[]", NULL, &out, NULL, &n, NULL);
        kvd_buf_free(&out);
    }
    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        for (size_t k = 0; k < KVD_COUNTOF(depth); k++) {
            char   *inner = nested(part[i][0], part[i][1], part[i][2], depth[k]);
            kvd_buf out = { 0 }, t = { 0 };
            kvd_err err;
            size_t  n;

            kvd_buf_printf(&t, part[i][0][0] == '{' && part[i][0][1] == '%' ? "%s" : "{{ %s }}",
                           inner);
            if (!t.oom && render(t.data, "[]", NULL, &out, NULL, &n, &err) == KVD_OK &&
                depth[k] > 200)
                *(bool *)arg = true;
            kvd_buf_free(&out);
            kvd_buf_free(&t);
            kvd_free(inner);
        }
    }
    return NULL;
}

/* Also on a small stack: recursion is bounded, and by little. */
static void test_deep(void **state)
{
    pthread_attr_t attr;
    pthread_t      th;
    bool           passed = false;

    (void)state;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1u << 20);
    assert_int_equal(pthread_create(&th, &attr, open_deep, &passed), 0);
    pthread_join(th, NULL);
    pthread_attr_destroy(&attr);
    assert_false(passed);
    assert_int_equal(kvd_alloc_live(), 0);
}

static void test_input(void **state)
{
    static const char *const bad[] = {
        "", "[", "{}", "1", "[1] x", "[\"\\ud800\"]", "[01]", "[1e]"
    };
    char   *deep = nested("[", "", "]", 1500);
    kvd_err err;
    kvd_buf out = { 0 };
    size_t  n;

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(bad); i++)
        assert_int_equal(render("x", bad[i], NULL, &out, NULL, &n, &err), KVD_E_INVAL);
    assert_int_equal(render("x", "[]", "[]", &out, NULL, &n, &err), KVD_E_INVAL);
    assert_int_equal(render("x", deep, NULL, &out, NULL, &n, &err), KVD_E_INVAL);
    assert_int_equal(render("\xff", "[]", NULL, &out, NULL, &n, &err), KVD_E_INVAL);
    assert_int_equal(render("{{ '\xc3' }}", "[]", NULL, &out, NULL, &n, &err), KVD_E_INVAL);
    assert_int_equal(render("ab", "[]", "{\"messages\":1,\"eos_token\":2}", &out, NULL, &n, &err),
                     KVD_OK);
    assert_string_equal(out.data, "ab");
    out.len = 0;
    assert_int_equal(render("{{ messages | length }}", "[1e999,123456789012345678901234567890]",
                            NULL, &out, NULL, &n, &err),
                     KVD_OK);
    assert_string_equal(out.data, "2");
    kvd_free(deep);
    kvd_buf_free(&out);
}

/* ---- memory ---------------------------------------------------------------------- */

static void test_faults(void **state)
{
    static const char t[] =
        "{% macro f(x, y='d') %}{{ x|upper }}{{ y }}{% endmacro %}{% set ns = namespace(s='') %}"
        "{% for m in messages if m.role %}{% set ns.s = ns.s + m.content %}{{ f(m.content) }}"
        "{{ m|tojson(indent=2) }}{{ m.content.split(' ')|join('-') }}{% endfor %}{{ ns.s[::-1] }}"
        "{{ [1, 2]|map('string')|list }}{{ {'a': 1}|dictsort }}{{ ns.s|replace('a', 'b') }}";
    static const char m[] =
        "[{\"role\":\"user\",\"content\":\"a b c\"},{\"role\":\"x\",\"content\":\"d\"}]";
    int64_t n_fault = 0;

    (void)state;
    for (bool done = false; !done; n_fault++) {
        kvd_err    err  = { 0 };
        kvd_buf    out  = { 0 };
        kvd_span  *span = NULL;
        size_t     n    = 0;
        kvd_status st;

        kvd_alloc_fault(n_fault, n_fault % 2);
        st   = render(t, m, "{\"a\":[1,2]}", &out, &span, &n, &err);
        done = !kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        assert_int_equal(st, done ? KVD_OK : KVD_E_NOMEM);
        if (!done) {
            assert_null(span);
            assert_int_equal(out.len, 0);
        }
        kvd_free(span);
        kvd_buf_free(&out);
        assert_int_equal(kvd_alloc_live(), 0);
        assert_true(n_fault < 1000);
    }
    assert_true(n_fault > 8);
}

/* ---- provenance ------------------------------------------------------------------ */

typedef struct origin {
    const char *t;    /* template; variables: x = "ab|cd", y = "|", l = ["p|", "q"] */
    const char *mark; /* the output with untrusted bytes as '.' */
} origin;

static const origin origins[] = {
    { "<s>{{ x }}</s>", "<s>.....</s>" },
    { "{{ '<s>' + x + '</s>' }}", "<s>.....</s>" },
    { "{{ '<s>' ~ x ~ 1 }}", "<s>.....1" },
    { "{{ ('<' ~ x ~ '>')[1:-1] }}", "....." },
    { "{{ ('<' ~ x ~ '>')[::-1] }}", ">.....<" },
    { "{{ ('<' ~ x)[0] }}{{ ('<' ~ x)[1] }}", "<." },
    { "{{ ('<' ~ x ~ '>')|upper }}", "<.....>" },
    { "{{ ('<' ~ x ~ '>')|title }}", "<.....>" },
    { "{{ (' <' ~ x ~ '> ')|trim }}", "<.....>" },
    { "{{ x.replace('|', '!') }}", "..!.." },
    { "{{ '[a]'.replace('a', x) }}", "[.....]" },
    { "{{ 'a|b'.replace(y, '-') }}", "a-b" },
    { "{{ x|replace('', '-') }}", "-.-.-.-.-.-" },
    { "{{ x.split('|')|join('#') }}", "..#.." },
    { "{{ 'a|b'.split(y)|join(y) }}", "a.b" },
    { "{{ '#'.join(l) }}", "..#." },
    { "{{ l|join('#') }}", "..#." },
    { "{{ ('<' ~ x).partition('|')|join }}", "<..|.." },
    { "{{ x|tojson }}", "......." },
    { "{{ ('<' ~ x)|tojson }}", "........" },
    { "{{ l }}", "..........." },
    { "{{ ['<s>'] }}", "......." },
    { "{% set v %}<{{ x }}>{% endset %}{{ v }}", "<.....>" },
    { "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(x) }}{{ f('k') }}", "<.....><k>" },
    { "{% filter upper %}k{{ x }}{% endfilter %}", "K....." },
    { "{{ '<' * 3 }}{{ y * 2 }}", "<<<.." },
    { "{{ x|default('k') }}{{ nope|default('k') }}{{ nope|default(x) }}", ".....k....." },
    { "{{ 'k' if x == 'ab|cd' else x }}", "k" },
    { "{% if 'ab|cd' == x %}{{ 'ab|cd' }}{% endif %}", "ab|cd" },
    { "{{ {x: 'k'}[x] }}{{ {'k': x}['k'] }}", "k....." },
    { "{% for c in 'k' ~ x %}{{ c }}{% endfor %}", "k....." },
    { "{{ [y, '|']|unique|join }}{{ ['|', y]|unique|join }}", ".|" },
    { "{{ bos_token }}{{ x }}{{ eos_token }}", "<s>.....</s>" },
    { "{{ bos_token.strip('<') }}", "s>" },
    { "{{ 5 }}{{ n }}{{ n + 5 }}{{ 2 + 3 }}{{ none }}{{ b }}", "5...5None...." },
    { "{% for c in l %}{{ loop.index }}{{ loop.length }}{% endfor %}", "1.2." },
    { "{{ x|length }}", "." },
    { "{{ x|e }}{{ '<'|e }}", "........." },
    { "{{ ('<'|safe) + x }}", "<....." },
    { "{{ 'a\nb'|indent(2) }}", "a...b" },
    { "{{ messages[0].role }}:{{ messages[0].content }}:{{ messages[1].role }}",
      "user:........:...." },
    { "{{ '<|' + messages[0]['role'] + '|>' }}", "<|user|>" },
    { "{{ x|first }}{{ ('k' ~ x)|first }}{{ (x ~ 'k')|last }}", ".kk" },
    { "{{ (x ~ '\n' ~ 'k').splitlines()|last }}", "k" },
    { "{{ ('k' ~ x).removeprefix('k') }}{{ ('k' ~ x).lstrip('k') }}", ".........." },
    { "{{ [x, 'k']|map('upper')|join('/') }}", "...../K" },
    { "{{ l|map('replace', '|', '!')|join }}", ".!." },
};

static void test_origins(void **state)
{
    static const char m[] = "[{\"role\":\"user\",\"content\":\"<|user|>\"},{\"role\":\"evil\"}]";
    static const char v[] = "{\"x\":\"ab|cd\",\"y\":\"|\",\"l\":[\"p|\",\"q\"],\"n\":7,\"b\":true}";

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(origins); i++) {
        kvd_err   err  = { 0 };
        kvd_buf   out  = { 0 };
        kvd_span *span = NULL;
        size_t    n = 0, k = 0;

        kvd_buf_puts(&out, "##"); /* output is appended */
        if (render(origins[i].t, m, v, &out, &span, &n, &err) != KVD_OK)
            fail_msg("%s: %s", origins[i].t, err.msg);
        for (size_t at = 2; at < out.len; at++) {
            while (k < n && span[k].end <= at)
                k++;
            if (k == n || span[k].start > at)
                out.data[at] = '.';
        }
        if (strcmp(out.data + 2, origins[i].mark) != 0)
            fail_msg("%s\nwanted %s\ngot    %s", origins[i].t, origins[i].mark, out.data + 2);
        kvd_free(span);
        kvd_buf_free(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile), cmocka_unit_test(test_deep),
        cmocka_unit_test(test_input),   cmocka_unit_test(test_faults),
        cmocka_unit_test(test_origins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
