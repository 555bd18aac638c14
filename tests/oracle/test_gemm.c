/* SPDX-License-Identifier: Apache-2.0 */
/* test_gemm.c - cpu_gemm() at every level this machine has against sums in double over the
 * reference dequantiser's values: types, shapes, edges, strides, bias, add, outputs, threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_gemm.h"
#include "base/dtype_blocks.h"

#define SEED 20240607

static const kvd_dtype types[] = { KVD_DTYPE_F32,  KVD_DTYPE_F16,  KVD_DTYPE_BF16, KVD_DTYPE_Q4_0,
                                   KVD_DTYPE_Q4_1, KVD_DTYPE_Q5_0, KVD_DTYPE_Q5_1, KVD_DTYPE_Q8_0,
                                   KVD_DTYPE_Q2_K, KVD_DTYPE_Q3_K, KVD_DTYPE_Q4_K, KVD_DTYPE_Q5_K,
                                   KVD_DTYPE_Q6_K };

static kvd_rng rng;

static float random_f32(void)
{
    return kvd_rng_f32(&rng) * 2.0F - 1.0F;
}

/* ---- backends, one per level and precision --------------------------------------- */

typedef struct level {
    const char *name;
    os_isa      isa;
    bool        bf16, precise;
    double      nmse; /* bound */
} level;

static const level levels[] = {
    { "portable", OS_ISA_PORTABLE, false, false, 1e-10 },
    { "avx2", OS_ISA_AVX2, false, false, 1e-10 },
    { "avx512", OS_ISA_AVX512, false, false, 1e-10 },
    { "avx512+bf16", OS_ISA_AVX512, true, false, 1e-5 },
    { "amx", OS_ISA_AMX, true, false, 1e-5 },
    { "amx precise", OS_ISA_AMX, true, true, 1e-10 },
};

static bool level_here(const level *l)
{
    return l->isa <= os_cpu_get()->isa && (!l->bf16 || os_cpu_get()->avx512_bf16);
}

static void open_level(cpu_backend *be, const level *l, uint32_t n_thread, uint32_t n_token,
                       uint32_t n_col)
{
    const kvd_backend_limits lim = { .n_token = n_token, .n_seq = 1, .n_col = n_col };

    *be = (cpu_backend){ .isa = l->isa, .bf16 = l->bf16, .vnni = l->bf16, .precise = l->precise };
    be->base.n_thread = n_thread;
    assert_int_equal(os_pool_open(&be->pool, n_thread, NULL), KVD_OK);
    be->mm_scratch_bytes = cpu_gemm_scratch_bytes(be, &lim);
    be->mm_scratch       = kvd_pages_alloc(be->mm_scratch_bytes);
    assert_non_null(be->mm_scratch);
    memset(be->mm_scratch, 0xff, be->mm_scratch_bytes); /* NaN: nothing may be taken as zero */
}

static void close_level(cpu_backend *be)
{
    kvd_pages_free(be->mm_scratch, be->mm_scratch_bytes);
    os_pool_close(be->pool);
}

/* ---- random weights -------------------------------------------------------------- */

/* Gives the f16 fields of a block sane values; all other bits are free. */
static void set_scales(kvd_dtype t, uint8_t *block)
{
    const uint16_t d = kvd_f32_to_f16(0.01F + 0.02F * kvd_rng_f32(&rng));
    const uint16_t m = kvd_f32_to_f16(0.1F * random_f32());

    switch (t) {
    case KVD_DTYPE_Q4_1:
    case KVD_DTYPE_Q5_1:
    case KVD_DTYPE_Q4_K:
    case KVD_DTYPE_Q5_K:
        memcpy(block, &d, 2);
        memcpy(block + 2, &m, 2);
        break;
    case KVD_DTYPE_Q4_0:
    case KVD_DTYPE_Q5_0:
    case KVD_DTYPE_Q8_0:
        memcpy(block, &d, 2);
        break;
    case KVD_DTYPE_Q2_K:
        memcpy(block + offsetof(kvd_block_q2_k, d), &d, 2);
        memcpy(block + offsetof(kvd_block_q2_k, dmin), &m, 2);
        break;
    case KVD_DTYPE_Q3_K:
        memcpy(block + offsetof(kvd_block_q3_k, d), &d, 2);
        break;
    case KVD_DTYPE_Q6_K:
        memcpy(block + offsetof(kvd_block_q6_k, d), &d, 2);
        break;
    case KVD_DTYPE_F32:
    case KVD_DTYPE_F16:
    case KVD_DTYPE_BF16:
        break;
    }
}

static void random_floats(kvd_dtype t, uint8_t *data, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const float    f = random_f32();
        const uint16_t h = t == KVD_DTYPE_F16 ? kvd_f32_to_f16(f) : kvd_f32_to_bf16(f);

        if (t == KVD_DTYPE_F32)
            memcpy(data + 4 * i, &f, 4);
        else
            memcpy(data + 2 * i, &h, 2);
    }
}

/* A matrix at an odd address with gaps between rows; *base is to be freed. */
static kvd_weight random_weight(kvd_dtype t, uint32_t n_row, uint32_t n_col, uint8_t **base)
{
    const kvd_dtype_info *info = kvd_dtype_get(t);
    const uint64_t        used = kvd_dtype_row_bytes(t, n_col);
    kvd_weight            w    = { .type = t, .n_row = n_row, .n_col = n_col };
    uint8_t              *p;

    w.row_bytes = used + 2;
    *base       = malloc(n_row * w.row_bytes + 1);
    assert_non_null(*base);
    p      = *base + 1;
    w.data = p;
    for (uint32_t r = 0; r < n_row; r++, p += w.row_bytes) {
        for (uint64_t i = 0; i < w.row_bytes; i++)
            p[i] = (uint8_t)kvd_rng_u64(&rng);
        if (info->block_len == 1)
            random_floats(t, p, n_col);
        for (uint64_t i = 0; info->block_len > 1 && i < used; i += info->block_bytes)
            set_scales(t, p + i);
    }
    return w;
}

/* ---- one case -------------------------------------------------------------------- */

typedef struct shape {
    uint32_t n_token, n_col, n_out;
    uint32_t n_row[KVD_MATMUL_OUT_MAX];
    bool     bias, add;
} shape;

typedef struct product {
    kvd_matmul_args a;
    uint8_t        *weight[KVD_MATMUL_OUT_MAX];
    float          *x, *bias[KVD_MATMUL_OUT_MAX];
    float          *y[KVD_MATMUL_OUT_MAX], *before[KVD_MATMUL_OUT_MAX];
} product;

static float *random_floats_alloc(uint64_t n)
{
    float *p = malloc((n + 1) * sizeof(*p));

    assert_non_null(p);
    for (uint64_t i = 0; i < n; i++)
        p[i] = random_f32();
    return p;
}

static uint64_t y_count(const product *p, uint32_t i)
{
    return p->a.n_token * p->a.out[i].y_stride;
}

static void make_product(product *p, kvd_dtype type, const shape *s)
{
    kvd_matmul_args *a = &p->a;

    *p = (product){ 0 };
    *a = (kvd_matmul_args){
        .n_token = s->n_token, .n_col = s->n_col, .n_out = s->n_out, .x_stride = s->n_col + 3
    };
    p->x = random_floats_alloc(s->n_token * a->x_stride);
    for (uint64_t t = 0; t < s->n_token; t++) /* what is not x must not be read into a sum */
        for (uint64_t i = s->n_col; i < a->x_stride; i++)
            p->x[t * a->x_stride + i] = kvd_bits_to_f32(0x7fc00000);
    a->x = p->x;
    for (uint32_t i = 0; i < s->n_out; i++) {
        kvd_matmul_out *o = &a->out[i];

        o->w         = random_weight(type, s->n_row[i], s->n_col, &p->weight[i]);
        o->y_stride  = s->n_row[i] + 5;
        o->add       = s->add;
        p->y[i]      = random_floats_alloc(y_count(p, i));
        p->before[i] = malloc(y_count(p, i) * sizeof(float));
        assert_non_null(p->before[i]);
        memcpy(p->before[i], p->y[i], y_count(p, i) * sizeof(float));
        p->bias[i] = random_floats_alloc(s->n_row[i]);
        o->y       = p->y[i];
        o->bias    = s->bias ? p->bias[i] : NULL;
    }
}

static void free_product(product *p)
{
    free(p->x);
    for (uint32_t i = 0; i < p->a.n_out; i++) {
        free(p->weight[i]);
        free(p->bias[i]);
        free(p->y[i]);
        free(p->before[i]);
    }
}

/* Squared error of output i over the squared products that were summed: an average, so few values
 * may lie above it.  What lies between rows must be untouched. */
static double output_nmse(const product *p, uint32_t i)
{
    const kvd_matmul_args *a   = &p->a;
    const kvd_matmul_out  *o   = &a->out[i];
    float                 *row = malloc(a->n_col * sizeof(float));
    double                 err = 0, ref = 0;

    assert_non_null(row);
    for (uint32_t r = 0; r < o->w.n_row; r++) {
        kvd_dequantize(o->w.type, (const uint8_t *)o->w.data + r * o->w.row_bytes, row, a->n_col);
        for (uint32_t t = 0; t < a->n_token; t++) {
            const uint64_t at  = t * o->y_stride + r;
            double         sum = (o->bias ? o->bias[r] : 0) + (o->add ? p->before[i][at] : 0);

            for (uint32_t k = 0; k < a->n_col; k++) {
                const double v = (double)row[k] * a->x[t * a->x_stride + k];

                sum += v;
                ref += v * v;
            }
            err += (o->y[at] - sum) * (o->y[at] - sum);
        }
    }
    for (uint32_t t = 0; t < a->n_token; t++) {
        const uint64_t at = t * o->y_stride + o->w.n_row;

        assert_memory_equal(o->y + at, p->before[i] + at, (o->y_stride - o->w.n_row) * 4);
    }
    free(row);
    return err / (ref > 0 ? ref : 1) / (1 + 20.0 / (a->n_token * o->w.n_row));
}

static void check_case(const level *l, kvd_dtype type, const shape *s, uint32_t n_thread)
{
    cpu_backend be;
    product     p;

    make_product(&p, type, s);
    open_level(&be, l, n_thread, s->n_token, s->n_col);
    cpu_gemm(&be, &p.a);
    for (uint32_t i = 0; i < s->n_out; i++) {
        const double nmse = output_nmse(&p, i);

        if (!(nmse <= l->nmse))
            fail_msg("%s %s %u tokens, %u x %u, output %u, bias %d add %d: nmse %g > %g", l->name,
                     kvd_dtype_get(type)->name, s->n_token, s->n_row[i], s->n_col, i, s->bias,
                     s->add, nmse, l->nmse);
    }
    close_level(&be);
    free_product(&p);
}

/* ---- tests ----------------------------------------------------------------------- */

static void for_each_level(void (*fn)(const level *, kvd_dtype))
{
    kvd_rng_seed(&rng, SEED);
    for (size_t l = 0; l < KVD_COUNTOF(levels); l++)
        for (size_t t = 0; level_here(&levels[l]) && t < KVD_COUNTOF(types); t++)
            fn(&levels[l], types[t]);
}

static uint32_t cols_of(kvd_dtype t, uint32_t small, uint32_t super)
{
    return kvd_dtype_get(t)->block_len == KVD_BLOCK_SUPER ? super : small;
}

static void edges(const level *l, kvd_dtype type)
{
    static const uint32_t tokens[] = { 1, 2, 15, 16, 17, 31, 33, 64, 70 };
    static const uint32_t rows[]   = { 1, 15, 17, 32, 100 };

    for (size_t t = 0; t < KVD_COUNTOF(tokens); t++) {
        for (size_t r = 0; r < KVD_COUNTOF(rows); r++) {
            const shape s = { tokens[t], cols_of(type, 96, 256), 1, { rows[r] }, r % 2, t % 2 };

            check_case(l, type, &s, 1);
        }
    }
}

static void test_edges_of_tokens_and_rows(void **state)
{
    (void)state;
    for_each_level(edges);
}

static void all_tokens(const level *l, kvd_dtype type)
{
    if (type != KVD_DTYPE_Q4_1 && type != KVD_DTYPE_Q6_K)
        return;
    for (uint32_t n = 1; n <= 70; n++) {
        const shape s = { n, cols_of(type, 64, 256), 1, { 33 }, n % 3 == 0, n % 3 == 1 };

        check_case(l, type, &s, 1);
    }
}

static void test_every_number_of_tokens(void **state)
{
    (void)state;
    for_each_level(all_tokens);
}

static void several_panels(const level *l, kvd_dtype type)
{
    const uint32_t n_col    = cols_of(type, 1568, 2304);
    const shape    shapes[] = {
           { 40, n_col, 1, { 50 }, false, false },
           { 19, n_col, 3, { 48, 16, 7 }, true, false },
           { 33, n_col, 4, { 1, 2, 33, 40 }, true, true },
           { 300, n_col, 2, { 40, 20 }, false, true },
    };

    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++)
        check_case(l, type, &shapes[i], 2);
}

static void test_long_rows_and_several_outputs(void **state)
{
    (void)state;
    for_each_level(several_panels);
}

static void odd_columns(const level *l, kvd_dtype type)
{
    static const uint32_t cols[] = { 1, 3, 20, 33, 65, 801 };

    if (kvd_dtype_get(type)->block_len > 1)
        return;
    for (size_t i = 0; i < KVD_COUNTOF(cols); i++) {
        const shape s = { 18, cols[i], 1, { 19 }, false, i % 2 };

        check_case(l, type, &s, 1);
    }
}

static void test_columns_that_fill_no_step(void **state)
{
    (void)state;
    for_each_level(odd_columns);
}

/* Runs tokens [first, first + n) of p as a call of their own and compares bits. */
static void same_bits(const level *l, const product *p, uint32_t first, uint32_t n,
                      uint32_t n_thread)
{
    const kvd_matmul_out *o = &p->a.out[0];
    kvd_matmul_args       a = p->a;
    float                *y = malloc(n * o->y_stride * sizeof(*y));
    cpu_backend           be;

    assert_non_null(y);
    a.n_token  = n;
    a.x        = p->x + first * a.x_stride;
    a.out[0].y = y;
    open_level(&be, l, n_thread, n, a.n_col);
    cpu_gemm(&be, &a);
    for (uint32_t t = 0; t < n; t++)
        assert_memory_equal(y + t * o->y_stride, o->y + (first + t) * o->y_stride,
                            o->w.n_row * sizeof(float));
    close_level(&be);
    free(y);
}

static void same_whatever_the_batch(const level *l, kvd_dtype type)
{
    const shape s = { 1100, 1600, 1, { 70 }, false, false };
    cpu_backend be;
    product     p;

    if (type != KVD_DTYPE_Q8_0)
        return;
    make_product(&p, type, &s);
    open_level(&be, l, 1, s.n_token, s.n_col);
    cpu_gemm(&be, &p.a);
    close_level(&be);
    same_bits(l, &p, 0, s.n_token, 2);
    same_bits(l, &p, 0, s.n_token, 7);
    same_bits(l, &p, 0, 1, 1);
    same_bits(l, &p, 1030, 1, 2);
    same_bits(l, &p, 13, 45, 3);
    same_bits(l, &p, 500, 600, 2);
    free_product(&p);
}

static void test_a_token_does_not_depend_on_threads_or_batch(void **state)
{
    (void)state;
    for_each_level(same_whatever_the_batch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edges_of_tokens_and_rows),
        cmocka_unit_test(test_every_number_of_tokens),
        cmocka_unit_test(test_long_rows_and_several_outputs),
        cmocka_unit_test(test_columns_that_fill_no_step),
        cmocka_unit_test(test_a_token_does_not_depend_on_threads_or_batch),
    };

    printf("seed %d\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
