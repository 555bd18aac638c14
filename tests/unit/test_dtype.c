/* SPDX-License-Identifier: Apache-2.0 */
/* test_dtype.c - the reference dequantisers against golden blocks (tests/data/dtype), the type
 * tables, and the block layouts.  KVD_TEST_DATA: path of tests/data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

#ifndef KVD_TEST_DATA
#define KVD_TEST_DATA "tests/data"
#endif

static const struct {
    kvd_dtype   type;
    const char *name, *file;
    uint32_t    block_len, block_bytes;
} types[] = {
    { KVD_DTYPE_F32, "F32", "f32", 1, 4 },        { KVD_DTYPE_F16, "F16", "f16", 1, 2 },
    { KVD_DTYPE_BF16, "BF16", "bf16", 1, 2 },     { KVD_DTYPE_Q8_0, "Q8_0", "q8_0", 32, 34 },
    { KVD_DTYPE_Q4_0, "Q4_0", "q4_0", 32, 18 },   { KVD_DTYPE_Q4_1, "Q4_1", "q4_1", 32, 20 },
    { KVD_DTYPE_Q5_0, "Q5_0", "q5_0", 32, 22 },   { KVD_DTYPE_Q5_1, "Q5_1", "q5_1", 32, 24 },
    { KVD_DTYPE_Q2_K, "Q2_K", "q2_k", 256, 84 },  { KVD_DTYPE_Q3_K, "Q3_K", "q3_k", 256, 110 },
    { KVD_DTYPE_Q4_K, "Q4_K", "q4_k", 256, 144 }, { KVD_DTYPE_Q5_K, "Q5_K", "q5_k", 256, 176 },
    { KVD_DTYPE_Q6_K, "Q6_K", "q6_k", 256, 210 },
};

/* The file's bytes at an odd address, so that an aligned access in a dequantiser shows. */
static uint8_t *load(const char *file, const char *ext, size_t *len)
{
    char     path[512];
    FILE    *f;
    uint8_t *p;
    long     n;

    snprintf(path, sizeof(path), "%s/dtype/%s.%s", KVD_TEST_DATA, file, ext);
    f = fopen(path, "rb");
    if (!f)
        fail_msg("%s: cannot open", path);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    n = ftell(f);
    assert_true(n > 0);
    rewind(f);
    p = malloc((size_t)n + 1);
    assert_non_null(p);
    assert_int_equal(fread(p + 1, 1, (size_t)n, f), (size_t)n);
    fclose(f);
    *len = (size_t)n;
    return p;
}

static void dequantises_golden_blocks_bit_for_bit(void **state)
{
    (void)state;
    for (size_t t = 0; t < KVD_COUNTOF(types); t++) {
        size_t       n_block_bytes, n_want;
        uint8_t     *src  = load(types[t].file, "blocks", &n_block_bytes);
        uint8_t     *gold = load(types[t].file, "f32", &n_want);
        const size_t n    = n_want / sizeof(float);
        float       *got  = malloc(n * sizeof(float));

        assert_non_null(got);
        assert_int_equal(kvd_dtype_row_bytes(types[t].type, n), n_block_bytes);
        kvd_dequantize(types[t].type, src + 1, got, n);
        for (size_t i = 0; i < n; i++) {
            float want;

            memcpy(&want, gold + 1 + i * sizeof(want), sizeof(want));
            if (want != want && got[i] != got[i])
                continue; /* which NaN an operation yields is the processor's choice */
            if (kvd_f32_to_bits(want) != kvd_f32_to_bits(got[i]))
                fail_msg("%s: element %zu: expected %a, got %a", types[t].name, i, (double)want,
                         (double)got[i]);
        }
        free(got);
        free(gold);
        free(src);
    }
}

static void knows_its_types(void **state)
{
    uint32_t n_known = 0;

    (void)state;
    for (size_t t = 0; t < KVD_COUNTOF(types); t++) {
        const kvd_dtype_info *d = kvd_dtype_get((uint32_t)types[t].type);

        assert_non_null(d);
        assert_int_equal(d->type, types[t].type);
        assert_string_equal(d->name, types[t].name);
        assert_string_equal(kvd_dtype_name((uint32_t)types[t].type), types[t].name);
        assert_int_equal(d->block_len, types[t].block_len);
        assert_int_equal(d->block_bytes, types[t].block_bytes);
        assert_int_equal(kvd_dtype_row_bytes(types[t].type, 0), 0);
    }
    for (uint32_t id = 0; id < 100; id++)
        n_known += kvd_dtype_get(id) != NULL;
    assert_int_equal(n_known, KVD_COUNTOF(types));
    assert_int_equal(KVD_COUNTOF(types), KVD_DTYPE_COUNT);
}

static void names_types_it_does_not_read(void **state)
{
    (void)state;
    assert_string_equal(kvd_dtype_name(23), "IQ4_XS");
    assert_string_equal(kvd_dtype_name(39), "MXFP4");
    assert_string_equal(kvd_dtype_name(31), "Q4_0_4_4");
    assert_string_equal(kvd_dtype_name(28), "F64");
    assert_string_equal(kvd_dtype_name(34), "TQ1_0");
    assert_null(kvd_dtype_get(23));
    assert_null(kvd_dtype_get(4));
    assert_null(kvd_dtype_name(1000));
    assert_null(kvd_dtype_name(UINT32_MAX));
    assert_null(kvd_dtype_get(UINT32_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dequantises_golden_blocks_bit_for_bit),
        cmocka_unit_test(knows_its_types),
        cmocka_unit_test(names_types_it_does_not_read),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
