/* SPDX-License-Identifier: Apache-2.0 */
/* test_elem.c - embed, norms, rope and swiglu at every level this machine has, against "ref".
 *
 * --seed N repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "backend/backend.h"
#include "os/os.h"

/* A few roundings of float arithmetic per element, 6e-8 each: relative error below 5e-7. */
#define NMSE_ELEM 2.5e-13

static uint64_t test_seed = 1;

typedef struct elem_bench { /* the reference and one level, side by side */
    kvd_backend *ref, *cpu;
    kvd_stream  *ref_st, *cpu_st;
    const char  *isa;
    kvd_rng      rng;
} elem_bench;

typedef void (*elem_check)(elem_bench *);

static kvd_backend *elem_open(const char *name, const char *isa, uint32_t n_thread, kvd_stream **st)
{
    const kvd_backend_params p   = { .name = name, .cpu_isa = isa, .n_thread = n_thread };
    kvd_backend             *b   = NULL;
    kvd_err                  err = { 0 };

    if (kvd_backend_open(&b, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(b->ops->stream_open(b, st, NULL), KVD_OK);
    return b;
}

/* Runs a check at each level with one and with two threads. */
static void elem_each(elem_check check)
{
    for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
        for (uint32_t n_thread = 1; n_thread <= 2; n_thread++) {
            elem_bench e = { .isa = os_isa_name((os_isa)isa) };

            e.ref = elem_open("ref", NULL, 1, &e.ref_st);
            e.cpu = elem_open("cpu", e.isa, n_thread, &e.cpu_st);
            kvd_rng_seed(&e.rng, test_seed);
            check(&e);
            e.ref->ops->stream_close(e.ref_st);
            e.cpu->ops->stream_close(e.cpu_st);
            kvd_backend_close(e.ref);
            kvd_backend_close(e.cpu);
        }
    }
}

static float *elem_random(elem_bench *e, size_t n, float scale)
{
    float *x = kvd_malloc(n * sizeof(float));

    for (size_t i = 0; i < n; i++)
        x[i] = (kvd_rng_f32(&e->rng) * 2.0f - 1.0f) * scale;
    return x;
}

static float *elem_copy(const float *x, size_t n)
{
    float *y = kvd_malloc(n * sizeof(float));

    memcpy(y, x, n * sizeof(float));
    return y;
}

static void elem_compare(const elem_bench *e, const char *what, const float *got, const float *want,
                         size_t n)
{
    double err = 0.0, ref = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];

        err += d * d;
        ref += (double)want[i] * (double)want[i];
    }
    if (!(err <= NMSE_ELEM * ref))
        fail_msg("%s, %s, %zu elements: nmse %g", what, e->isa, n, err / ref);
}

static const uint32_t widths[] = { 1, 3, 16, 63, 64, 576, 1000, 1536 };
static const uint32_t rows[]   = { 1, 3, 100 };

/* ---- norms ----------------------------------------------------------------------- */

static void check_rms_norm(elem_bench *e)
{
    for (size_t i = 0; i < KVD_COUNTOF(widths) * KVD_COUNTOF(rows); i++) {
        const uint32_t    n = widths[i % KVD_COUNTOF(widths)], r = rows[i / KVD_COUNTOF(widths)];
        const size_t      stride = n + 5;
        float            *x = elem_random(e, r * stride, 3.0f), *w = elem_random(e, n, 1.0f);
        float            *y = elem_copy(x, r * stride), *z = elem_copy(x, r * stride);
        kvd_rms_norm_args a = { .n_row      = r,
                                .n_col      = n,
                                .x_stride   = stride,
                                .out_stride = stride,
                                .x          = x,
                                .w          = w,
                                .out        = y,
                                .eps        = 1e-5f };

        assert_int_equal(e->ref->ops->rms_norm(e->ref_st, &a, NULL), KVD_OK);
        a.x = a.out = z; /* in place */
        assert_int_equal(e->cpu->ops->rms_norm(e->cpu_st, &a, NULL), KVD_OK);
        elem_compare(e, "rms_norm", z, y, r * stride); /* the gaps too: untouched */
        kvd_free(x);
        kvd_free(w);
        kvd_free(y);
        kvd_free(z);
    }
}

static void check_head_norm(elem_bench *e)
{
    static const uint32_t dims[] = { 16, 20, 64, 96, 128 };

    for (size_t i = 0; i < KVD_COUNTOF(dims) * KVD_COUNTOF(rows); i++) {
        const uint32_t     dim = dims[i % KVD_COUNTOF(dims)], r = rows[i / KVD_COUNTOF(dims)];
        const size_t       n = r * (9 * dim + 7);
        float             *x = elem_random(e, n, 3.0f), *y = elem_copy(x, n);
        float             *w = elem_random(e, dim, 1.0f);
        kvd_head_norm_args a = { .n_token  = r,
                                 .n_head   = 9,
                                 .head_dim = dim,
                                 .x_stride = 9 * dim + 7,
                                 .x        = x,
                                 .w        = w,
                                 .eps      = 1e-6f };

        assert_int_equal(e->ref->ops->head_norm(e->ref_st, &a, NULL), KVD_OK);
        a.x = y;
        assert_int_equal(e->cpu->ops->head_norm(e->cpu_st, &a, NULL), KVD_OK);
        elem_compare(e, "head_norm", y, x, n);
        kvd_free(x);
        kvd_free(y);
        kvd_free(w);
    }
}

/* ---- rope ------------------------------------------------------------------------ */

static void check_rope_case(elem_bench *e, uint32_t r, uint32_t dim, uint32_t n_rot, bool neox)
{
    const size_t  n = r * (5 * dim + 3);
    float        *x = elem_random(e, n, 2.0f), *y = elem_copy(x, n);
    float        *cs = elem_random(e, r * n_rot, 1.0f);
    kvd_rope_args a  = { .n_token  = r,
                         .n_head   = 5,
                         .head_dim = dim,
                         .n_rot    = n_rot,
                         .neox     = neox,
                         .x_stride = 5 * dim + 3,
                         .x        = x,
                         .cos_sin  = cs };

    assert_int_equal(e->ref->ops->rope(e->ref_st, &a, NULL), KVD_OK);
    a.x = y;
    assert_int_equal(e->cpu->ops->rope(e->cpu_st, &a, NULL), KVD_OK);
    elem_compare(e, neox ? "rope neox" : "rope pairs", y, x, n);
    kvd_free(x);
    kvd_free(y);
    kvd_free(cs);
}

static void check_rope(elem_bench *e)
{
    static const uint32_t dims[][2] = { { 64, 64 }, { 128, 96 }, { 96, 96 },
                                        { 20, 20 }, { 16, 10 },  { 16, 2 } };

    for (size_t i = 0; i < KVD_COUNTOF(dims); i++) {
        for (size_t r = 0; r < KVD_COUNTOF(rows); r++) {
            check_rope_case(e, rows[r], dims[i][0], dims[i][1], false);
            check_rope_case(e, rows[r], dims[i][0], dims[i][1], true);
        }
    }
}

/* ---- swiglu ---------------------------------------------------------------------- */

static void check_swiglu(elem_bench *e)
{
    for (size_t i = 0; i < KVD_COUNTOF(widths) * KVD_COUNTOF(rows); i++) {
        const uint32_t n = widths[i % KVD_COUNTOF(widths)], r = rows[i / KVD_COUNTOF(widths)];
        float *g = elem_random(e, (size_t)r * n, 20.0f), *u = elem_random(e, (size_t)r * n, 2.0f);
        float *y          = elem_copy(g, (size_t)r * n);
        kvd_swiglu_args a = { .n_token     = r,
                              .n_col       = n,
                              .gate_stride = n,
                              .up_stride   = n,
                              .out_stride  = n,
                              .gate        = g,
                              .up          = u,
                              .out         = y };

        assert_int_equal(e->ref->ops->swiglu(e->ref_st, &a, NULL), KVD_OK);
        a.out = g;
        assert_int_equal(e->cpu->ops->swiglu(e->cpu_st, &a, NULL), KVD_OK);
        elem_compare(e, "swiglu", g, y, (size_t)r * n);
        kvd_free(g);
        kvd_free(u);
        kvd_free(y);
    }
}

/* Gates far beyond what exp takes: no NaN, no infinity, and the right limits. */
static void check_swiglu_extremes(elem_bench *e)
{
    float           g[] = { -1e30f, -200.0f, -88.0f, -1.0f, 0.0f, 1.0f, 88.0f, 200.0f, 1e30f };
    float           u[] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, y[9];
    kvd_swiglu_args a   = { .n_token = 1, .n_col = 9, .gate = g, .up = u, .out = y };

    assert_int_equal(e->cpu->ops->swiglu(e->cpu_st, &a, NULL), KVD_OK);
    for (int i = 0; i < 9; i++) {
        assert_true(isfinite(y[i]));
        assert_true(i < 4 ? y[i] <= 0.0f : y[i] >= 0.0f);
    }
    assert_true(y[4] == 0.0f && y[7] == 200.0f && y[8] == 1e30f && fabsf(y[1]) < 1e-30f);
    g[5] = NAN;
    assert_int_equal(e->cpu->ops->swiglu(e->cpu_st, &a, NULL), KVD_OK);
    assert_true(isnan(y[5]) && y[4] == 0.0f);
}

/* ---- embed ----------------------------------------------------------------------- */

static void check_embed(elem_bench *e)
{
    enum { N_VOCAB = 37, N_EMBD = 96, N_TOKEN = 500 };
    uint8_t       *data  = kvd_malloc(N_VOCAB * 3 * 34);
    int32_t       *token = kvd_malloc(N_TOKEN * sizeof(*token));
    float         *x = kvd_malloc(sizeof(float) * N_TOKEN * N_EMBD), *y = elem_copy(x, 1);
    kvd_embed_args a = { .table = { .type      = KVD_DTYPE_Q8_0,
                                    .n_row     = N_VOCAB,
                                    .n_col     = N_EMBD,
                                    .row_bytes = 3 * 34,
                                    .data      = data },
                         .token = token };

    kvd_free(y);
    y = kvd_malloc(sizeof(float) * N_TOKEN * N_EMBD);
    for (size_t i = 0; i < N_VOCAB * 3 * 34; i++)
        data[i] = (uint8_t)(i % 34 == 1 ? 0x3c : kvd_rng_below(&e->rng, 256)); /* finite scales */
    for (int i = 0; i < N_TOKEN; i++)
        token[i] = (int32_t)kvd_rng_below(&e->rng, N_VOCAB);
    for (uint32_t n = 1; n <= N_TOKEN; n += N_TOKEN - 1) {
        a.n_token = n;
        a.out     = x;
        assert_int_equal(e->ref->ops->embed(e->ref_st, &a, NULL), KVD_OK);
        a.out = y;
        assert_int_equal(e->cpu->ops->embed(e->cpu_st, &a, NULL), KVD_OK);
        assert_int_equal(memcmp(x, y, sizeof(float) * n * N_EMBD), 0);
    }
    kvd_free(data);
    kvd_free(token);
    kvd_free(x);
    kvd_free(y);
}

/* ---- a row alone and among others ------------------------------------------------- */

static void check_rows_stand_alone(elem_bench *e)
{
    enum { R = 64, N = 1000 };
    float            *g = elem_random(e, R * N, 5.0f), *u = elem_random(e, R * N, 2.0f);
    float            *y = elem_copy(g, R * N), *z = elem_copy(g, R * N);
    kvd_swiglu_args   a = { .n_token     = R,
                            .n_col       = N,
                            .gate_stride = N,
                            .up_stride   = N,
                            .out_stride  = N,
                            .gate        = g,
                            .up          = u,
                            .out         = y };
    kvd_rms_norm_args b = {
        .n_row = R, .n_col = N, .x_stride = N, .out_stride = N, .x = y, .w = u, .out = y
    };

    assert_int_equal(e->cpu->ops->swiglu(e->cpu_st, &a, NULL), KVD_OK);
    assert_int_equal(e->cpu->ops->rms_norm(e->cpu_st, &b, NULL), KVD_OK);
    a.n_token = b.n_row = 1;
    for (size_t r = 0; r < R; r++) {
        a.gate = g + r * N;
        a.up   = u + r * N;
        a.out  = z + r * N;
        b.x = b.out = z + r * N;
        assert_int_equal(e->cpu->ops->swiglu(e->cpu_st, &a, NULL), KVD_OK);
        assert_int_equal(e->cpu->ops->rms_norm(e->cpu_st, &b, NULL), KVD_OK);
    }
    if (memcmp(y, z, sizeof(float) * R * N) != 0)
        fail_msg("%s: a row alone differs from the row in a batch", e->isa);
    kvd_free(g);
    kvd_free(u);
    kvd_free(y);
    kvd_free(z);
}

#define ELEM_TEST(check)                   \
    static void test_##check(void **state) \
    {                                      \
        (void)state;                       \
        elem_each(check_##check);          \
    }
ELEM_TEST(rms_norm)
ELEM_TEST(head_norm)
ELEM_TEST(rope)
ELEM_TEST(swiglu)
ELEM_TEST(swiglu_extremes)
ELEM_TEST(embed)
ELEM_TEST(rows_stand_alone)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rms_norm),
        cmocka_unit_test(test_head_norm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_extremes),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_rows_stand_alone),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
