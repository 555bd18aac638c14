/* SPDX-License-Identifier: Apache-2.0 */
/* test_gguf.c - what good files give: values, tensors, split sets, look-ups, JSON.  The files are
 * made by scripts/make-tiny-gguf.py, the main one by the gguf package. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "format/format.h"
#include "format/gguf_impl.h"

#ifndef KVD_TEST_DATA
#define KVD_TEST_DATA "tests/data"
#endif

static gguf_file *open_good(const char *name)
{
    char       path[512];
    gguf_file *g;
    kvd_err    err = { 0 };

    snprintf(path, sizeof(path), "%s/gguf/good-%s.gguf", KVD_TEST_DATA, name);
    if (gguf_open(&g, path, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_non_null(g);
    return g;
}

static const gguf_kv *need(const gguf_file *g, const char *key, gguf_type type)
{
    const gguf_kv *kv = gguf_find(g, key);

    if (!kv)
        fail_msg("no key %s", key);
    assert_true(gguf_str_eq(gguf_kv_key(kv), key));
    assert_int_equal(gguf_kv_type(kv), type);
    return kv;
}

static void reads_every_metadata_type(void **state)
{
    gguf_file *g = open_good("all");
    uint64_t   u;
    int64_t    i;
    double     f;
    bool       b;
    gguf_str   s;

    (void)state;
    assert_true(gguf_kv_u64(need(g, "t.u8", GGUF_U8), 0, &u) && u == 200);
    assert_true(gguf_kv_i64(need(g, "t.i8", GGUF_I8), 0, &i) && i == -100);
    assert_true(gguf_kv_u64(need(g, "t.u16", GGUF_U16), 0, &u) && u == 60000);
    assert_true(gguf_kv_i64(need(g, "t.i16", GGUF_I16), 0, &i) && i == -30000);
    assert_true(gguf_kv_u64(need(g, "t.u32", GGUF_U32), 0, &u) && u == 4000000000);
    assert_true(gguf_kv_i64(need(g, "t.i32", GGUF_I32), 0, &i) && i == -2000000000);
    assert_true(gguf_kv_f64(need(g, "t.f32", GGUF_F32), 0, &f) && f == (double)0.1f);
    assert_true(gguf_kv_u64(need(g, "t.u64", GGUF_U64), 0, &u) && u == 18000000000000000000u);
    assert_true(gguf_kv_i64(need(g, "t.i64", GGUF_I64), 0, &i) && i == -9000000000000000000);
    assert_true(gguf_kv_f64(need(g, "t.f64", GGUF_F64), 0, &f) && f == 1e300);
    assert_true(gguf_kv_bool(need(g, "t.yes", GGUF_BOOL), 0, &b) && b);
    assert_true(gguf_kv_bool(need(g, "t.no", GGUF_BOOL), 0, &b) && !b);
    assert_true(gguf_kv_str(need(g, "t.str", GGUF_STRING), 0, &s));
    assert_true(gguf_str_eq(s, "na\xc3\xafve \xe4\xb8\x96\xe7\x95\x8c \xf0\x9f\x98\x80 "
                               "\"quoted\" back\\slash\nline\ttab\x01"));
    gguf_close(g);
}

static void reads_arrays(void **state)
{
    static const char *const strs[] = { "", "a", "bc", "\xc3\xa9" };
    gguf_file               *g      = open_good("all");
    const gguf_kv           *kv;
    int64_t                  i;
    uint64_t                 u;
    bool                     b;
    gguf_str                 s;
    char                     want[16];

    (void)state;
    kv = need(g, "t.strs", GGUF_ARRAY);
    assert_int_equal(gguf_kv_elem_type(kv), GGUF_STRING);
    assert_int_equal(gguf_kv_count(kv), 4);
    for (uint64_t k = 0; k < 4; k++)
        assert_true(gguf_kv_str(kv, k, &s) && gguf_str_eq(s, strs[k]));
    assert_false(gguf_kv_str(kv, 4, &s));
    assert_false(gguf_kv_str(kv, UINT64_MAX, &s));
    kv = need(g, "t.ints", GGUF_ARRAY);
    assert_int_equal(gguf_kv_count(kv), 7);
    for (uint64_t k = 0; k < 7; k++)
        assert_true(gguf_kv_i64(kv, k, &i) && i == (int64_t)k - 3);
    assert_false(gguf_kv_u64(kv, 0, &u)); /* -3 does not fit */
    assert_true(gguf_kv_u64(kv, 6, &u) && u == 3);
    assert_false(gguf_kv_i64(kv, 7, &i));
    kv = need(g, "t.bools", GGUF_ARRAY);
    assert_true(gguf_kv_bool(kv, 1, &b) && !b);
    assert_true(gguf_kv_bool(kv, 2, &b) && b);
    assert_false(gguf_kv_bool(kv, 3, &b));
    kv = need(g, "t.many", GGUF_ARRAY);
    for (uint64_t k = 0; k < 100; k++) {
        snprintf(want, sizeof(want), "token%d", (int)k);
        assert_true(gguf_kv_str(kv, k, &s) && gguf_str_eq(s, want));
    }
    gguf_close(g);
    g = open_good("vocab");
    assert_int_equal(gguf_kv_count(need(g, "empty", GGUF_ARRAY)), 0);
    assert_int_equal(gguf_kv_count(need(g, "none", GGUF_ARRAY)), 0);
    assert_true(gguf_kv_str(need(g, "e", GGUF_STRING), 0, &s) && s.len == 0);
    assert_int_equal(gguf_n_tensor(g), 0);
    gguf_close(g);
}

static void other_types_are_answers_not_asserts(void **state)
{
    gguf_file     *g   = open_good("all");
    const gguf_kv *str = need(g, "t.str", GGUF_STRING), *u8 = need(g, "t.u8", GGUF_U8);
    uint64_t       u = 11;
    int64_t        i = 12;
    double         f = 13;
    bool           b = true;
    gguf_str       s = { "x", 1 };

    (void)state;
    assert_false(gguf_kv_u64(str, 0, &u) || gguf_kv_i64(str, 0, &i) || gguf_kv_f64(str, 0, &f));
    assert_false(gguf_kv_bool(str, 0, &b) || gguf_kv_bool(u8, 0, &b) || gguf_kv_str(u8, 0, &s));
    assert_false(gguf_kv_u64(u8, 1, &u) || gguf_kv_f64(u8, 1, &f));
    assert_false(gguf_kv_u64(need(g, "t.f32", GGUF_F32), 0, &u)); /* no rounding unasked */
    assert_false(gguf_kv_i64(need(g, "t.u64", GGUF_U64), 0, &i));
    assert_true(u == 11 && i == 12 && f == 13 && b && s.len == 1);
    assert_true(gguf_kv_f64(u8, 0, &f) && f == 200);
    assert_true(gguf_kv_f64(need(g, "t.i64", GGUF_I64), 0, &f) && f == -9e18);
    gguf_close(g);
}

static void reads_every_tensor_type(void **state)
{
    static const char *const names[] = { "F32",  "F16",  "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0",
                                         "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K" };
    gguf_file               *g       = open_good("all");
    uint64_t                 sum     = 0;

    (void)state;
    assert_int_equal(gguf_version(g), 3);
    assert_int_equal(gguf_n_tensor(g), KVD_DTYPE_COUNT);
    for (size_t k = 0; k < KVD_COUNTOF(names); k++) {
        char                  name[16];
        const gguf_tensor    *t;
        const kvd_dtype_info *d;

        snprintf(name, sizeof(name), "w.%s", names[k]);
        t = gguf_tensor_find(g, name);
        assert_non_null(t);
        d = kvd_dtype_get(t->type_id);
        assert_non_null(d);
        assert_string_equal(d->name, names[k]);
        assert_int_equal(t->n_dim, 2);
        assert_int_equal(t->dim[0], d->block_len > 1 ? 2 * d->block_len : 6);
        assert_true(t->dim[1] == 3 && t->dim[2] == 1 && t->dim[3] == 1);
        assert_int_equal(t->n_elem, 3 * t->dim[0]);
        assert_int_equal(t->bytes, kvd_dtype_row_bytes(d->type, t->n_elem));
        assert_int_equal(t->offset % 32, 0);
        for (uint64_t i = 0; i < t->bytes; i++)
            assert_int_equal(((const uint8_t *)t->data)[i], (uint8_t)(7 * i + t->type_id));
        sum += t->bytes;
    }
    assert_int_equal(gguf_tensor_bytes(g), sum);
    assert_null(gguf_tensor_find(g, "w"));
    assert_null(gguf_tensor_find(g, "w.F32 "));
    assert_null(gguf_tensor_find(g, ""));
    assert_null(gguf_find(g, "t"));
    gguf_close(g);
}

static void reads_variants(void **state)
{
    gguf_file         *g = open_good("v2");
    const gguf_tensor *t;

    (void)state;
    assert_int_equal(gguf_version(g), 2);
    assert_int_equal(gguf_tensor_find(g, "w")->bytes, 128);
    gguf_close(g);
    g = open_good("bare");
    assert_true(gguf_n_kv(g) == 0 && gguf_n_tensor(g) == 0 && gguf_tensor_bytes(g) == 0);
    assert_null(gguf_find(g, "general.architecture"));
    gguf_close(g);
    g = open_good("align");
    t = gguf_tensor_find(g, "b");
    assert_true(t->offset % 256 == 0 && t->n_dim == 4 && t->n_elem == 4 && t->bytes == 16);
    gguf_close(g);
    g = open_good("unread"); /* stays in the directory, by its name, without data */
    t = gguf_tensor_find(g, "iq");
    assert_string_equal(kvd_dtype_name(t->type_id), "IQ4_XS");
    assert_true(t->data == NULL && t->bytes == 0 && t->n_elem == 512);
    t = gguf_tensor_find(g, "w");
    assert_true(t->bytes == 128 && ((const uint8_t *)t->data)[5] == 5);
    gguf_close(g);
}

static void reads_split_sets(void **state)
{
    gguf_file *g = open_good("00001-of-00003");
    char       name[8];

    (void)state;
    assert_int_equal(gguf_n_split(g), 3);
    assert_int_equal(gguf_n_tensor(g), 3);
    assert_int_equal(gguf_tensor_bytes(g), 3 * 128);
    assert_non_null(strstr(gguf_split_path(g, 2), "good-00003-of-00003.gguf"));
    assert_null(gguf_split_path(g, 3));
    for (uint32_t i = 0; i < 3; i++) {
        const gguf_tensor *t = gguf_tensor_at(g, i);

        snprintf(name, sizeof(name), "w%u", i);
        assert_ptr_equal(t, gguf_tensor_find(g, name));
        assert_int_equal(t->split, i);
        assert_int_equal(((const uint8_t *)t->data)[127], 127);
    }
    assert_non_null(gguf_find(g, "general.architecture"));
    gguf_close(g);
    g = open_good("one-split");
    assert_int_equal(gguf_n_split(g), 1);
    gguf_close(g);
}

static void typed_lookups(void **state)
{
    gguf_file *g = open_good("all");
    uint32_t   u = 5;
    float      f = 6;
    bool       b = false;
    gguf_str   s = { "x", 1 };
    kvd_err    err;

    (void)state;
    assert_int_equal(gguf_get_u32(g, "t.u8", true, &u, &err), KVD_OK);
    assert_int_equal(u, 200);
    assert_int_equal(gguf_get_u32(g, "absent", false, &u, &err), KVD_OK);
    assert_int_equal(u, 200);
    assert_int_equal(gguf_get_u32(g, "absent", true, &u, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "no key \"absent\""));
    assert_int_equal(gguf_get_u32(g, "t.u64", true, &u, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "\"t.u64\" is u64 18000000000000000000; expected an integer"));
    assert_int_equal(gguf_get_u32(g, "t.i8", true, &u, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "i8 -100"));
    assert_int_equal(gguf_get_u32(g, "t.ints", true, &u, &err), KVD_E_CORRUPT);
    assert_non_null(strstr(err.msg, "array of 7 i32"));
    assert_int_equal(gguf_get_f32(g, "t.f32", true, &f, &err), KVD_OK);
    assert_true(f == 0.1f);
    assert_int_equal(gguf_get_f32(g, "t.u16", true, &f, &err), KVD_OK);
    assert_true(f == 60000);
    assert_int_equal(gguf_get_f32(g, "t.f64", true, &f, &err), KVD_E_CORRUPT); /* 1e300 */
    assert_int_equal(gguf_get_f32(g, "t.str", true, &f, &err), KVD_E_CORRUPT);
    assert_int_equal(gguf_get_bool(g, "t.yes", true, &b, &err), KVD_OK);
    assert_true(b);
    assert_int_equal(gguf_get_bool(g, "t.u8", true, &b, &err), KVD_E_CORRUPT);
    assert_int_equal(gguf_get_bool(g, "t.bools", true, &b, &err), KVD_E_CORRUPT);
    assert_int_equal(gguf_get_str(g, "general.architecture", true, &s, &err), KVD_OK);
    assert_true(gguf_str_eq(s, "llama"));
    assert_int_equal(gguf_get_str(g, "t.strs", false, &s, NULL), KVD_E_CORRUPT);
    assert_true(gguf_str_eq(s, "llama") && !gguf_str_eq(s, "llam") && !gguf_str_eq(s, "llamas"));
    gguf_close(g);
    g = open_good("bytes");
    assert_int_equal(gguf_get_f32(g, "inf", true, &f, &err), KVD_E_CORRUPT);
    assert_int_equal(gguf_get_f32(g, "nan", true, &f, &err), KVD_E_CORRUPT);
    gguf_close(g);
}

static json_t *to_json(const char *name)
{
    gguf_file   *g = open_good(name);
    kvd_buf      b = { 0 };
    json_error_t e;
    json_t      *j;

    gguf_to_json(g, &b);
    assert_false(b.oom);
    j = json_loadb(b.data, b.len, JSON_ALLOW_NUL, &e);
    if (!j)
        fail_msg("%s: line %d: %s", name, e.line, e.text);
    kvd_buf_free(&b);
    gguf_close(g);
    return j;
}

static void json_is_complete(void **state)
{
    json_t *j = to_json("all"), *meta = json_object_get(j, "metadata"), *x;

    (void)state;
    assert_int_equal(json_object_size(meta), 19);
    assert_int_equal(json_integer_value(json_object_get(meta, "t.i64")), -9000000000000000000);
    assert_string_equal(json_string_value(json_object_get(meta, "t.u64")), "18000000000000000000");
    assert_true(json_real_value(json_object_get(meta, "t.f32")) == 0.1);
    assert_true(json_is_true(json_object_get(meta, "t.yes")));
    assert_string_equal(json_string_value(json_object_get(meta, "t.str")),
                        "na\xc3\xafve \xe4\xb8\x96\xe7\x95\x8c \xf0\x9f\x98\x80 "
                        "\"quoted\" back\\slash\nline\ttab\x01");
    assert_int_equal(json_array_size(json_object_get(meta, "t.ints")), 7);
    x = json_object_get(meta, "t.many");
    assert_int_equal(json_integer_value(json_object_get(x, "count")), 100);
    assert_int_equal(json_array_size(json_object_get(x, "first")), 16);
    assert_int_equal(json_array_size(json_object_get(j, "tensors")), 13);
    x = json_array_get(json_object_get(j, "tensors"), 12);
    assert_string_equal(json_string_value(json_object_get(x, "type")), "Q6_K");
    assert_int_equal(json_integer_value(json_object_get(x, "bytes")), 1260);
    json_decref(j);
    j = to_json("bytes"); /* not UTF-8, U+0000, infinities */
    x = json_object_get(json_object_get(j, "metadata"), "k\xef\xbf\xbd\xef\xbf\xbd");
    assert_string_equal(json_string_value(x),
                        "\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    x = json_object_get(json_object_get(j, "metadata"), "nul");
    assert_int_equal(json_string_length(x), 3);
    json_decref(j);
    json_decref(to_json("bare"));
    json_decref(to_json("unread"));
    j = to_json("00001-of-00003");
    assert_int_equal(json_array_size(json_object_get(j, "files")), 3);
    json_decref(j);
}

/* Random names, often equal, sharing prefixes: order, look-up and duplicates. */
static void index_sorts_and_finds(void **state)
{
    const uint64_t seed = kvd_now_ns();
    kvd_rng        r;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    kvd_rng_seed(&r, seed);
    for (int round = 0; round < 300; round++) {
        struct {
            gguf_str name;
            char     text[8];
        } item[200];
        uint32_t       order[400], dup, n = (uint32_t)kvd_rng_below(&r, 200);
        const uint64_t letters = 2 + kvd_rng_below(&r, 20);
        bool           equal   = false;

        for (uint32_t i = 0; i < n; i++) {
            const uint64_t len = 1 + kvd_rng_below(&r, 7);

            for (uint64_t k = 0; k < len; k++)
                item[i].text[k] = (char)('a' + kvd_rng_below(&r, letters));
            item[i].text[len] = 0;
            item[i].name      = (gguf_str){ item[i].text, len };
            for (uint32_t k = 0; k < i; k++)
                equal |= strcmp(item[i].text, item[k].text) == 0;
        }
        assert_int_equal(gguf_index_build(item, sizeof(item[0]), n, order, &dup), !equal);
        for (uint32_t i = 1; i < n; i++)
            assert_true(strcmp(item[order[i - 1]].text, item[order[i]].text) <= 0);
        for (uint32_t i = 0; i < n; i++) {
            const gguf_str *s = gguf_index_find(item, sizeof(item[0]), n, order, item[i].text);

            assert_true(s && gguf_str_eq(*s, item[i].text));
        }
        assert_null(gguf_index_find(item, sizeof(item[0]), n, order, "0"));
        assert_null(gguf_index_find(item, sizeof(item[0]), n, order, "zzzzzzzzz"));
    }
}

static int nothing_leaked(void **state)
{
    (void)state;
    return kvd_alloc_live() != 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(reads_every_metadata_type, nothing_leaked),
        cmocka_unit_test_teardown(reads_arrays, nothing_leaked),
        cmocka_unit_test_teardown(other_types_are_answers_not_asserts, nothing_leaked),
        cmocka_unit_test_teardown(reads_every_tensor_type, nothing_leaked),
        cmocka_unit_test_teardown(reads_variants, nothing_leaked),
        cmocka_unit_test_teardown(reads_split_sets, nothing_leaked),
        cmocka_unit_test_teardown(typed_lookups, nothing_leaked),
        cmocka_unit_test_teardown(json_is_complete, nothing_leaked),
        cmocka_unit_test(index_sorts_and_finds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
