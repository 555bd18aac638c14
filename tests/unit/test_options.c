/* SPDX-License-Identifier: Apache-2.0 */
/* test_options.c - precedence, parsing, and what the messages say. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

static const kvd_opt table[] = {
    { "ctx-size", "-c", KVD_OPT_INT, "N", "0", 0, 1000, 1, "context" },
    { "temp", "--temperature", KVD_OPT_NUM, "F", "0.8", 0, 10, 1, "temperature" },
    { "kv-host", "", KVD_OPT_SIZE, "SIZE", "1G", 0, 0, 1, "host tier" },
    { "fetch", "", KVD_OPT_CHOICE, "strict|deferred", "deferred", 0, 0, 1, "fetch mode" },
    { "raw", "", KVD_OPT_FLAG, "", "false", 0, 0, 3, "raw" },
    { "model", "-m", KVD_OPT_TEXT, "FILE", NULL, 0, 0, 3, "model" },
    { "cut", "-c", KVD_OPT_INT, "N", "0", 0, 1000, 2, "of command 2, with a short name of 1" },
    { "only-two", "", KVD_OPT_FLAG, "", "false", 0, 0, 2, "of command 2" },
    { "shift", "--no-shift", KVD_OPT_FOREIGN, "*", NULL, 0, 0, 1, "nothing is shifted" },
    { "adapter", "-ad", KVD_OPT_REFUSED, "", NULL, 0, 0, 1, "merge it" },
    { "thoughts", "", KVD_OPT_REFUSED, "none|plain", NULL, 0, 0, 1, "they stay" },
    { "tokens", "", KVD_OPT_COUNT, "N", "0", -1, 1 << 30, 1, "a count" },
    { "word", "-w", KVD_OPT_LIST, "WORD", NULL, 0, 0, 1, "several" },
    { "schema", "", KVD_OPT_TEXT, "FILE|TEXT", NULL, 0, 0, 1, "a file or a text" },
    { "title", "", KVD_OPT_TEXT, "TEXT", NULL, 0, 0, 1, "a text" },
    { "password", "", KVD_OPT_SECRET, "WORD", NULL, 0, 0, 1, "put it elsewhere" },
};

static kvd_opts o;
static kvd_err  err;

static kvd_status parse(int argc, ...)
{
    const char *argv[16];
    va_list     ap;

    va_start(ap, argc);
    for (int i = 0; i < argc; i++)
        argv[i] = va_arg(ap, const char *);
    va_end(ap);
    kvd_opts_close(&o);
    memset(&err, 0, sizeof(err));
    return kvd_opts_open(&o, table, KVD_COUNTOF(table), 1, argc, argv, &err);
}

static void expect_error(const char *part)
{
    assert_int_equal(err.code, KVD_E_INVAL);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not say '%s'", err.msg, part);
}

static int setup(void **state)
{
    (void)state;
    setenv("XDG_CONFIG_HOME", "/nonexistent", 1);
    unsetenv("KVDRIVE_CONFIG");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvd_opts_close(&o);
    return 0;
}

static void test_kinds(void **state)
{
    (void)state;
    assert_int_equal(parse(9, "-c", "17", "--temperature=1.5", "--kv-host", "2.5G", "--fetch",
                           "strict", "--raw", "file.txt"),
                     KVD_OK);
    assert_int_equal(kvd_opts_int(&o, "ctx-size"), 17);
    assert_true(kvd_opts_num(&o, "temp") == 1.5);
    assert_true(kvd_opts_size(&o, "kv-host") == 5ull << 29);
    assert_string_equal(kvd_opts_text(&o, "fetch"), "strict");
    assert_true(kvd_opts_flag(&o, "raw"));
    assert_null(kvd_opts_text(&o, "model"));
    assert_int_equal(o.n_rest, 1);
    assert_string_equal(o.rest[0], "file.txt");
    assert_int_equal(parse(5, "--raw", "--no-raw", "-", "--", "-c"), KVD_OK);
    assert_false(kvd_opts_flag(&o, "raw"));
    assert_int_equal(o.n_rest, 2);
}

static void test_precedence(void **state)
{
    char  path[] = "/tmp/kvd_options_XXXXXX";
    int   fd     = mkstemp(path);
    FILE *f      = fdopen(fd, "w");

    (void)state;
    fputs("# comment\n\n ctx-size = 5 \ntemp=2\nfetch = strict\nraw = on\n", f);
    fclose(f);
    setenv("KVDRIVE_TEMP", "3", 1);
    setenv("KVDRIVE_FETCH", "deferred", 1);
    assert_int_equal(parse(4, "--config", path, "--fetch", "strict"),
                     KVD_E_INVAL); /* no such option */
    expect_error("config");
    setenv("KVDRIVE_CONFIG", path, 1);
    assert_int_equal(parse(2, "--fetch", "strict"), KVD_OK);
    assert_int_equal(kvd_opts_get(&o, "ctx-size")->origin, KVD_OPT_FILE);
    assert_int_equal(kvd_opts_int(&o, "ctx-size"), 5);
    assert_int_equal(kvd_opts_get(&o, "temp")->origin, KVD_OPT_ENV);
    assert_true(kvd_opts_num(&o, "temp") == 3.0);
    assert_int_equal(kvd_opts_get(&o, "fetch")->origin, KVD_OPT_ARGV);
    assert_int_equal(kvd_opts_get(&o, "kv-host")->origin, KVD_OPT_DEFAULT);
    assert_true(kvd_opts_flag(&o, "raw"));
    unsetenv("KVDRIVE_TEMP");
    unsetenv("KVDRIVE_FETCH");
    unsetenv("KVDRIVE_CONFIG");
    unlink(path);
}

static void test_errors_say_what_and_where(void **state)
{
    (void)state;
    assert_int_equal(parse(2, "--ctx-sise", "4"), KVD_E_INVAL);
    expect_error("did you mean '--ctx-size'");
    assert_int_equal(parse(2, "-c", "4000"), KVD_E_INVAL);
    expect_error("from 0 to 1000");
    assert_int_equal(parse(2, "-c", "4.5"), KVD_E_INVAL);
    expect_error("whole number");
    assert_int_equal(parse(2, "-c", "4x"), KVD_E_INVAL);
    assert_int_equal(parse(1, "-c"), KVD_E_INVAL);
    expect_error("needs a value");
    assert_int_equal(parse(2, "--fetch", "lazy"), KVD_E_INVAL);
    expect_error("strict|deferred");
    assert_int_equal(parse(2, "--kv-host", "8X"), KVD_E_INVAL);
    expect_error("8G");
    assert_int_equal(parse(1, "--only-two"), KVD_E_INVAL);
    expect_error("does not belong");
    assert_int_equal(parse(1, "--raw=maybe"), KVD_E_INVAL);
    assert_int_equal(parse(1, "--no-raw=1"), KVD_E_INVAL);
    setenv("KVDRIVE_CTX_SIZE", "many", 1);
    assert_int_equal(parse(0), KVD_E_INVAL);
    expect_error("KVDRIVE_CTX_SIZE");
    unsetenv("KVDRIVE_CTX_SIZE");
    setenv("KVDRIVE_CONFIG", "/nonexistent/file", 1);
    assert_int_equal(parse(0), KVD_E_IO);
    unsetenv("KVDRIVE_CONFIG");
}

static void test_sizes(void **state)
{
    static const struct {
        const char *text;
        uint64_t    bytes; /* UINT64_MAX: refused */
    } cases[] = {
        { "0", 0 },
        { "17", 17 },
        { "512M", 512ull << 20 },
        { "8g", 8ull << 30 },
        { "8GiB", 8ull << 30 },
        { "1.5k", 1536 },
        { "1T", 1ull << 40 },
        { "3MB", 3ull << 20 },
        { "", UINT64_MAX },
        { "-1", UINT64_MAX },
        { "G", UINT64_MAX },
        { "1e30", UINT64_MAX },
        { "8GG", UINT64_MAX },
        { "nan", UINT64_MAX },
        { "8 G", UINT64_MAX },
        { "inf", UINT64_MAX },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(cases); i++) {
        uint64_t   x  = 0;
        const bool ok = kvd_parse_size(cases[i].text, &x);

        if (ok != (cases[i].bytes != UINT64_MAX) || (ok && x != cases[i].bytes))
            fail_msg("'%s' gave %d, %llu", cases[i].text, ok, (unsigned long long)x);
    }
}

static void test_counts(void **state)
{
    static const struct {
        const char *text;
        double      n; /* NAN: refused */
    } cases[] = {
        { "0", 0 },       { "-1", -1 },      { "17", 17 },         { "8K", 8192 },   { "8k", 8192 },
        { "1.5K", 1536 }, { "1M", 1 << 20 }, { "1024M", 1 << 30 }, { "1025M", NAN }, { "8G", NAN },
        { "K", NAN },     { "1.3", NAN },    { "8KB", NAN },       { "", NAN },      { "nan", NAN },
        { "8 K", NAN },   { "-2", NAN },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(cases); i++) {
        const kvd_status st = parse(2, "--tokens", cases[i].text);

        if ((st == KVD_OK) == isnan(cases[i].n) ||
            (st == KVD_OK && kvd_opts_int(&o, "tokens") != (int64_t)cases[i].n))
            fail_msg("'%s' gave %d", cases[i].text, st);
    }
    expect_error("from -1 to 1073741824");
}

static void test_lists(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    setenv("KVDRIVE_WORD", "weak", 1);
    assert_int_equal(parse(0), KVD_OK);
    assert_int_equal(kvd_opts_get(&o, "word")->n_list, 1);
    assert_string_equal(kvd_opts_get(&o, "word")->list[0], "weak");
    assert_int_equal(parse(4, "-w", "a,b", "--word", ""), KVD_OK);
    unsetenv("KVDRIVE_WORD");
    assert_int_equal(kvd_opts_get(&o, "word")->n_list, 2);
    assert_string_equal(kvd_opts_get(&o, "word")->list[0], "a,b");
    assert_string_equal(kvd_opts_get(&o, "word")->list[1], "");
    kvd_opts_print(&o, &b);
    assert_non_null(strstr(b.data, "word                 = a,b, "));
    kvd_buf_free(&b);
}

/* ~/ in paths, from every source. */
static void test_home(void **state)
{
    char  path[] = "/tmp/kvd_home_XXXXXX", file[64], want[64];
    char *home = mkdtemp(path), *was = getenv("HOME");
    FILE *f;

    (void)state;
    assert_non_null(home);
    was = was ? strdup(was) : NULL;
    setenv("HOME", home, 1);
    snprintf(want, sizeof(want), "%s/x y", home);
    snprintf(file, sizeof(file), "%s/config", home);
    f = fopen(file, "w");
    fputs("model = ~/x y\n", f);
    fclose(f);
    setenv("KVDRIVE_CONFIG", "~/config", 1);
    assert_int_equal(parse(0), KVD_OK);
    assert_string_equal(kvd_opts_text(&o, "model"), want);
    assert_string_equal(o.config_path, file);
    unsetenv("KVDRIVE_CONFIG");
    setenv("KVDRIVE_MODEL", "~/x y", 1);
    assert_int_equal(parse(0), KVD_OK);
    assert_string_equal(kvd_opts_text(&o, "model"), want);
    unsetenv("KVDRIVE_MODEL");
    assert_int_equal(parse(3, "--model=~/x y", "~/x y", "~"), KVD_OK);
    assert_string_equal(kvd_opts_text(&o, "model"), want);
    assert_string_equal(o.rest[0], want);
    assert_string_equal(o.rest[1], home);
    assert_int_equal(parse(6, "-m", "~", "--schema", "~/x y", "--title", "~/x y"), KVD_OK);
    assert_string_equal(kvd_opts_text(&o, "model"), home);
    assert_string_equal(kvd_opts_text(&o, "schema"), want);
    assert_string_equal(kvd_opts_text(&o, "title"), "~/x y"); /* no path */
    assert_int_equal(parse(2, "-m", "./~/x"), KVD_OK);
    assert_string_equal(kvd_opts_text(&o, "model"), "./~/x");
    assert_int_equal(parse(2, "-m", "~bob/x"), KVD_E_INVAL);
    expect_error("-m: ~bob/x: only ~/ is known");
    unsetenv("HOME");
    assert_int_equal(parse(2, "-m", "~/x"), KVD_E_INVAL);
    expect_error("HOME is not set");
    if (was)
        setenv("HOME", was, 1);
    free(was);
    remove(file);
    rmdir(home);
}

static void test_unknown_variables(void **state)
{
    static const struct {
        const char *name, *message;
    } cases[] = {
        { "KVDRIVE_CTX_SISE", "KVDRIVE_CTX_SISE: no option has this variable; did you mean "
                              "'KVDRIVE_CTX_SIZE'?" },
        { "KVDRIVE_ONLY_TOW", "did you mean 'KVDRIVE_ONLY_TWO'?" },
        { "KVDRIVE_", "KVDRIVE_: no option" },
        { "KVDRIVE_ctx_size", "did you mean 'KVDRIVE_CTX_SIZE'?" },
        { "KVDRIVE_CTX-SIZE", "did you mean 'KVDRIVE_CTX_SIZE'?" },
        { "KVDRIVE_A_NAME_THAT_IS_LONGER_THAN_ANY_OPTION_OF_THE_PROGRAM_IS_OR_HAS_EVER_BEEN_BEFORE",
          "no option has this variable" },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(cases); i++) {
        setenv(cases[i].name, "hush", 1);
        assert_int_equal(parse(0), KVD_E_INVAL);
        expect_error(cases[i].message);
        assert_null(strstr(err.msg, "hush"));
        unsetenv(cases[i].name);
    }
    setenv("KVDRIVE_ONLY_TWO", "1", 1); /* of another command */
    setenv("KVDRIVEX", "1", 1);
    assert_int_equal(parse(0), KVD_OK);
    unsetenv("KVDRIVE_ONLY_TWO");
    unsetenv("KVDRIVEX");
}

static void test_every_allocation_may_fail(void **state)
{
    const char *const argv[] = { "-c", "5", "--raw", "-w", "a", "-w", "b", "-m", "x", "rest" };

    (void)state;
    kvd_opts_close(&o);
    for (int n = 0; n < 100; n++) {
        const uint64_t live = kvd_alloc_live();
        kvd_status     st;

        kvd_alloc_fault(n, false);
        st = kvd_opts_open(&o, table, KVD_COUNTOF(table), 1, (int)KVD_COUNTOF(argv), argv, &err);
        kvd_alloc_fault(-1, false);
        kvd_opts_close(&o);
        assert_int_equal(kvd_alloc_live(), live);
        if (st == KVD_OK)
            return;
        assert_int_equal(st, KVD_E_NOMEM);
    }
    fail_msg("100 allocations were not enough");
}

static void test_secrets(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    parse(2, "--password", "hush");
    expect_error("put it elsewhere");
    assert_null(strstr(err.msg, "hush"));
    parse(1, "--password=hush");
    expect_error("put it elsewhere");
    setenv("KVDRIVE_PASSWORD", "hush", 1);
    assert_int_equal(parse(0), KVD_OK);
    unsetenv("KVDRIVE_PASSWORD");
    assert_string_equal(kvd_opts_text(&o, "password"), "hush");
    kvd_opts_print(&o, &b);
    assert_non_null(strstr(b.data, "password"));
    assert_null(strstr(b.data, "hush"));
    b.len = 0;
    kvd_opts_help(table, KVD_COUNTOF(table), 1, NULL, &b);
    assert_null(strstr(b.data, "password"));
    kvd_buf_free(&b);
}

static void test_another_programs(void **state)
{
    kvd_buf b = { 0 };

    (void)state;
    assert_int_equal(parse(4, "--no-shift", "3", "--thoughts", "plain"), KVD_OK);
    assert_int_equal(o.n_rest, 0);
    assert_string_equal(kvd_opts_text(&o, "shift"), "--no-shift");
    assert_int_equal(parse(2, "--thoughts=none", "rest"), KVD_OK);
    assert_int_equal(o.n_rest, 1);
    assert_int_equal(parse(2, "--thoughts", "deep"), KVD_E_INVAL);
    expect_error("--thoughts: they stay");
    assert_int_equal(parse(1, "--thoughts"), KVD_E_INVAL);
    assert_int_equal(parse(1, "--thoughts=deep"), KVD_E_INVAL);
    assert_int_equal(parse(2, "-ad", "file"), KVD_E_INVAL);
    expect_error("-ad: merge it");
    setenv("KVDRIVE_ADAPTER", "file", 1);
    assert_int_equal(parse(0), KVD_E_INVAL);
    expect_error("KVDRIVE_ADAPTER: adapter: merge it");
    unsetenv("KVDRIVE_ADAPTER");
    setenv("KVDRIVE_THOUGHTS", "none", 1);
    assert_int_equal(parse(0), KVD_OK);
    setenv("KVDRIVE_THOUGHTS", "deep", 1);
    assert_int_equal(parse(0), KVD_E_INVAL);
    expect_error("KVDRIVE_THOUGHTS: thoughts: they stay");
    unsetenv("KVDRIVE_THOUGHTS");
    assert_int_equal(parse(1, "--adaptor"), KVD_E_INVAL);
    expect_error("unknown option '--adaptor'");
    assert_null(strstr(err.msg, "did you mean"));
    assert_int_equal(parse(0), KVD_OK);
    assert_int_equal(kvd_opts_set(&o, "adapter", "file", &err), KVD_E_INVAL);
    kvd_opts_print(&o, &b);
    kvd_opts_help(table, KVD_COUNTOF(table), 1, NULL, &b);
    assert_null(strstr(b.data, "adapter"));
    assert_null(strstr(b.data, "shift"));
    kvd_buf_free(&b);
}

static void test_who_said_it(void **state)
{
    char where[KVD_OPT_WHERE_BYTES];

    (void)state;
    assert_int_equal(parse(2, "-m", "x"), KVD_OK);
    assert_string_equal(kvd_opts_where(&o, "model", where), "--model");
    setenv("KVDRIVE_KV_HOST", "1G", 1);
    assert_int_equal(parse(0), KVD_OK);
    unsetenv("KVDRIVE_KV_HOST");
    assert_string_equal(kvd_opts_where(&o, "kv-host", where), "KVDRIVE_KV_HOST");
    setenv("KVDRIVE_MODEL", "", 1); /* of a variable that was not set */
    assert_int_equal(parse(0), KVD_E_INVAL);
    unsetenv("KVDRIVE_MODEL");
    expect_error("KVDRIVE_MODEL: model is an empty text");
}

static void test_nearest(void **state)
{
    static const char *const name[] = { "port",    "prompt",  "predict",      "run",
                                        "threads", "kv-host", "api-key-file", "prefix" };
    static const struct {
        const char *word, *meant; /* NULL: nothing is near */
    } cases[] = {
        { "prot", "port" },  /* two letters changed places: one edit */
        { "porrt", "port" }, /* one in four letters */
        { "qorst", NULL },   /* two */
        { "pert", "port" },
        { "lora", NULL },
        { "fun", "run" }, /* one in three */
        { "ru", NULL },   /* too short for any */
        { "promtp", "prompt" },
        { "prdeict", "predict" },
        { "trhedas", "threads" }, /* two in seven */
        { "treadz", "threads" },  /* left out, and replaced */
        { "shreadz", NULL },      /* two, and begins otherwise */
        { "no-host", NULL },      /* likewise */
        { "ssl-key-file", NULL }, /* three are too many in any length */
        { "api-kye-flie", "api-key-file" },
        { "thr", "threads" }, /* the beginning of one */
        { "pre", NULL },      /* of two */
        { "th", NULL },       /* too short a beginning */
        { "", NULL },
        { "a word of more than sixty-four letters, which is longer than any option's name", NULL },
    };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(cases); i++) {
        const char *got = kvd_nearest(cases[i].word, name, KVD_COUNTOF(name));

        if (!got != !cases[i].meant || (got && strcmp(got, cases[i].meant) != 0))
            fail_msg("'%s' gave '%s'", cases[i].word, got ? got : "nothing");
    }
}

static void test_text_for_people(void **state)
{
    static const char *const first[] = { "only-two", "raw", NULL };
    kvd_buf                  b       = { 0 };

    (void)state;
    assert_int_equal(parse(2, "-c", "9"), KVD_OK);
    kvd_opts_print(&o, &b);
    assert_non_null(
        strstr(b.data, "ctx-size             = 9                        # command line"));
    assert_null(strstr(b.data, "only-two"));
    kvd_buf_free(&b);
    kvd_opts_help(table, KVD_COUNTOF(table), 1, NULL, &b);
    assert_non_null(strstr(b.data, "-c, --ctx-size N"));
    b.len = 0;
    assert_int_equal(kvd_opts_help(table, KVD_COUNTOF(table), 1, first, &b), 9);
    assert_non_null(strstr(b.data, "--raw"));
    assert_null(strstr(b.data, "--ctx-size"));
    kvd_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_errors_say_what_and_where),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_home),
        cmocka_unit_test(test_unknown_variables),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_secrets),
        cmocka_unit_test(test_another_programs),
        cmocka_unit_test(test_who_said_it),
        cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_text_for_people),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
