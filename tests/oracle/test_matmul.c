/* SPDX-License-Identifier: Apache-2.0 */
/* test_matmul.c - the cpu backend's matmul against dequantised rows and double sums, on every level
 * this machine runs.
 *
 *   test_matmul [--seed N]   the tests
 *   test_matmul --perf       GB/s of weights read, by type and level (nothing else may run) */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_gemm.h"
#include "base/dtype_blocks.h"

#define N_TOKEN_MAX 9
#define FENCE       123456.0F /* what lies between rows of y and must stay */

static const kvd_dtype   ALL_TYPES[] = { KVD_DTYPE_F32,  KVD_DTYPE_F16,  KVD_DTYPE_BF16,
                                         KVD_DTYPE_Q8_0, KVD_DTYPE_Q4_0, KVD_DTYPE_Q4_1,
                                         KVD_DTYPE_Q5_0, KVD_DTYPE_Q5_1, KVD_DTYPE_Q2_K,
                                         KVD_DTYPE_Q3_K, KVD_DTYPE_Q4_K, KVD_DTYPE_Q5_K,
                                         KVD_DTYPE_Q6_K };
static const char *const LEVELS[]    = { "portable", "avx2", "avx512", "amx" };

static kvd_rng  rng;
static uint64_t seed = 1;

/* ---- random data ----------------------------------------------------------------- */

static float random_normal(void)
{
    float s = 0.0F;

    for (int i = 0; i < 12; i++)
        s += kvd_rng_f32(&rng);
    return s - 6.0F;
}

static void put_f16(uint8_t *at, float lo, float hi, bool sign)
{
    float          v = lo + (hi - lo) * kvd_rng_f32(&rng);
    const uint16_t h = kvd_f32_to_f16(sign && kvd_rng_below(&rng, 2) ? -v : v);

    memcpy(at, &h, sizeof(h));
}

/* One block: random bytes, then scales that are finite and moderate. */
static void random_block(kvd_dtype type, uint8_t *b)
{
    const kvd_dtype_info *info = kvd_dtype_get(type);

    for (uint32_t i = 0; i < info->block_bytes; i++)
        b[i] = (uint8_t)kvd_rng_u64(&rng);
    switch (type) {
    case KVD_DTYPE_F32: {
        const float v = random_normal();

        memcpy(b, &v, sizeof(v));
        break;
    }
    case KVD_DTYPE_F16:
        put_f16(b, 0.0F, 1.0F, true);
        break;
    case KVD_DTYPE_BF16: {
        const uint16_t h = kvd_f32_to_bf16(random_normal());

        memcpy(b, &h, sizeof(h));
        break;
    }
    case KVD_DTYPE_Q8_0:
    case KVD_DTYPE_Q4_0:
    case KVD_DTYPE_Q5_0:
        put_f16(b, 0.001F, 0.01F, true);
        break;
    case KVD_DTYPE_Q4_1:
    case KVD_DTYPE_Q5_1:
        put_f16(b, 0.001F, 0.01F, false);
        put_f16(b + 2, 0.02F, 0.1F, true);
        break;
    case KVD_DTYPE_Q2_K:
        put_f16(b + offsetof(kvd_block_q2_k, d), 0.001F, 0.01F, false);
        put_f16(b + offsetof(kvd_block_q2_k, dmin), 0.001F, 0.01F, false);
        break;
    case KVD_DTYPE_Q3_K:
        put_f16(b + offsetof(kvd_block_q3_k, d), 0.00002F, 0.001F, true); /* some subnormal */
        break;
    case KVD_DTYPE_Q4_K:
    case KVD_DTYPE_Q5_K:
        put_f16(b, 0.001F, 0.01F, false);
        put_f16(b + 2, 0.001F, 0.01F, false);
        break;
    case KVD_DTYPE_Q6_K:
        put_f16(b + offsetof(kvd_block_q6_k, d), 0.00002F, 0.001F, true);
        break;
    }
}

/* At an odd address, the last byte of its allocation being the last of its rows. */
static kvd_weight random_weight(kvd_dtype type, uint32_t n_row, uint32_t n_col, void **owner)
{
    const kvd_dtype_info *info      = kvd_dtype_get(type);
    const uint64_t        row_bytes = kvd_dtype_row_bytes(type, n_col);
    kvd_weight            w         = { type, n_row, n_col, row_bytes, NULL };
    const uint64_t        bytes     = w.row_bytes * n_row;
    uint8_t              *p         = kvd_malloc(bytes + 1);

    assert_non_null(p);
    *owner = p;
    w.data = p + 1;
    for (uint64_t i = 0; i < bytes; i += info->block_bytes)
        random_block(type, p + 1 + i);
    return w;
}

static float *random_floats(uint64_t n)
{
    float *x = kvd_malloc(n * sizeof(*x));

    assert_non_null(x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = random_normal();
    return x;
}

/* ---- backends -------------------------------------------------------------------- */

static cpu_backend *backend_open(const char *isa, uint32_t n_thread, bool precise, bool exact)
{
    const kvd_backend_params p   = { .name          = "cpu",
                                     .cpu_isa       = isa,
                                     .n_thread      = n_thread,
                                     .precise       = precise,
                                     .deterministic = exact };
    const kvd_backend_limits lim = { .n_token   = 128,
                                     .n_seq     = 1,
                                     .n_col     = 8960,
                                     .n_head    = 1,
                                     .n_kv_head = 1,
                                     .head_dim  = 64,
                                     .n_ctx     = 256 };
    kvd_backend             *be  = NULL;
    kvd_err                  err = { 0 };

    if (kvd_backend_open(&be, &p, &err) != KVD_OK) {
        assert_int_equal(err.code, KVD_E_UNSUPPORTED);
        return NULL;
    }
    assert_int_equal(be->ops->reserve(be, &lim, &err), KVD_OK);
    return (cpu_backend *)(void *)be;
}

static void matmul(cpu_backend *be, const kvd_matmul_args *a)
{
    kvd_stream st  = { .be = be };
    kvd_err    err = { 0 };

    assert_int_equal(be->base.ops->matmul(&st, a, &err), KVD_OK);
}

/* ---- one case -------------------------------------------------------------------- */

typedef struct error_sum {
    double err2, ref2;
    double worst; /* |error| / bound, at most 1 */
} error_sum;

/* What rounding x to 16 bits by blocks of 32 can do at most to one result, and float sums. */
static double error_bound(const float *w, const float *x, uint32_t n, bool quantised)
{
    double bound = 0.0, wmax = 0.0, xmax = 0.0;

    for (uint32_t b = 0; b < n; b += 32) {
        const uint32_t end  = b + 32 < n ? b + 32 : n;
        double         amax = 0.0, wsum = 0.0;

        for (uint32_t i = b; i < end; i++) {
            amax = fmax(amax, fabs((double)x[i]));
            wmax = fmax(wmax, fabs((double)w[i]));
            wsum += fabs((double)w[i]);
        }
        xmax = fmax(xmax, amax);
        if (quantised)
            bound += wsum * amax / 32512.0; /* half a step, a whole one at the ends of a byte */
    }
    return bound * 1.0001 + 1e-6 * sqrt((double)n) * 8.0 * wmax * xmax + 1e-30;
}

static void check_output(const kvd_matmul_args *a, uint32_t o, const float *before, bool quantised,
                         error_sum *sum)
{
    const kvd_matmul_out *out = &a->out[o];
    float                *row = kvd_malloc(a->n_col * sizeof(*row));

    for (uint32_t r = 0; r < out->w.n_row; r++) {
        kvd_dequantize(out->w.type, (const uint8_t *)out->w.data + r * out->w.row_bytes, row,
                       a->n_col);
        for (uint32_t t = 0; t < a->n_token; t++) {
            const float *x   = a->x + t * a->x_stride;
            const float  y   = out->y[t * out->y_stride + r];
            double       ref = 0.0, err;

            for (uint32_t i = 0; i < a->n_col; i++)
                ref += (double)row[i] * (double)x[i];
            sum->ref2 += ref * ref;
            ref += out->bias ? (double)out->bias[r] : 0.0;
            ref += out->add ? (double)before[t * out->y_stride + r] : 0.0;
            err = fabs((double)y - ref);
            sum->err2 += err * err;
            sum->worst = fmax(sum->worst,
                              err / (error_bound(row, x, a->n_col, quantised) + 1e-6 * fabs(ref)));
        }
    }
    for (uint32_t t = 0; t < a->n_token; t++)
        for (uint64_t r = out->w.n_row; r < out->y_stride; r++)
            assert_true(out->y[t * out->y_stride + r] == FENCE);
    kvd_free(row);
}

/* Fills y with what was there before (add) and fences. */
static float *before_y(const kvd_matmul_out *o, uint32_t n_token)
{
    float *y = random_floats(n_token * o->y_stride);

    for (uint32_t t = 0; t < n_token; t++)
        for (uint64_t r = o->w.n_row; r < o->y_stride; r++)
            y[t * o->y_stride + r] = FENCE;
    return y;
}

/* A token alone gives the bits it gave in the batch. */
static void check_alone(cpu_backend *be, const kvd_matmul_args *a, float *const *before)
{
    for (uint32_t t = 0; t < a->n_token; t++) {
        kvd_matmul_args one = *a;

        one.n_token = 1;
        one.x       = a->x + t * a->x_stride;
        for (uint32_t o = 0; o < a->n_out; o++) {
            one.out[o].y = kvd_malloc(a->out[o].y_stride * sizeof(float));
            memcpy(one.out[o].y, before[o] + t * a->out[o].y_stride,
                   a->out[o].y_stride * sizeof(float));
        }
        matmul(be, &one);
        for (uint32_t o = 0; o < a->n_out; o++) {
            assert_memory_equal(one.out[o].y, a->out[o].y + t * a->out[o].y_stride,
                                a->out[o].w.n_row * sizeof(float));
            kvd_free(one.out[o].y);
        }
    }
}

typedef struct matmul_case {
    uint32_t  n_token, n_col, n_out;
    uint32_t  n_row[KVD_MATMUL_OUT_MAX];
    kvd_dtype type[KVD_MATMUL_OUT_MAX];
} matmul_case;

static void run_case(cpu_backend *be, const matmul_case *c, error_sum *sum)
{
    kvd_matmul_args a = { .n_token  = c->n_token,
                          .n_col    = c->n_col,
                          .n_out    = c->n_out,
                          .x_stride = c->n_col + kvd_rng_below(&rng, 9) };
    float          *x = random_floats(c->n_token * a.x_stride), *before[KVD_MATMUL_OUT_MAX];
    void           *owner[KVD_MATMUL_OUT_MAX];

    a.x = x;
    for (uint32_t o = 0; o < c->n_out; o++) {
        kvd_matmul_out *out = &a.out[o];

        out->w        = random_weight(c->type[o], c->n_row[o], c->n_col, &owner[o]);
        out->bias     = kvd_rng_below(&rng, 2) ? random_floats(c->n_row[o]) : NULL;
        out->add      = kvd_rng_below(&rng, 2);
        out->y_stride = c->n_row[o] + kvd_rng_below(&rng, 5);
        before[o]     = before_y(out, c->n_token);
        out->y        = kvd_malloc(c->n_token * out->y_stride * sizeof(float));
        memcpy(out->y, before[o], c->n_token * out->y_stride * sizeof(float));
    }
    matmul(be, &a);
    for (uint32_t o = 0; o < c->n_out; o++)
        check_output(&a, o, before[o],
                     !be->precise && c->type[o] > KVD_DTYPE_F16 && c->type[o] != KVD_DTYPE_BF16,
                     sum);
    if (be->deterministic)
        check_alone(be, &a, before);
    for (uint32_t o = 0; o < c->n_out; o++) {
        kvd_free(owner[o]);
        kvd_free((void *)(uintptr_t)a.out[o].bias);
        kvd_free(a.out[o].y);
        kvd_free(before[o]);
    }
    kvd_free(x);
}

/* ---- tests ----------------------------------------------------------------------- */

static const uint32_t ROWS[] = { 1, 3, 17, 33, 64 };

/* n_col of each kind of tail: blocks of a unit, units of a group, single elements. */
static uint32_t some_n_col(kvd_dtype type, uint32_t i)
{
    static const uint32_t blocks[] = { 1, 2, 3, 4, 5, 18, 28, 48 };
    const uint32_t        len      = kvd_dtype_get(type)->block_len;

    if (len == 1)
        return blocks[i] * 13 + (i % 2) * 64;
    return len * (len == 256 ? 1 + i % 4 : blocks[i]);
}

/* All types, shapes and token counts; returns the noise-to-signal ratio of each type. */
static void sweep(const char *isa, bool precise, double nmse_max)
{
    cpu_backend *be = backend_open(isa, 2, precise, true);

    if (!be) {
        print_message("  %s: not on this machine\n", isa);
        return;
    }
    for (uint32_t i = 0; i < KVD_COUNTOF(ALL_TYPES); i++) {
        error_sum sum = { 0 };

        for (uint32_t k = 0; k < 8; k++)
            for (uint32_t t = 1; t <= N_TOKEN_MAX; t++) {
                const matmul_case c = { .n_token = t,
                                        .n_col   = some_n_col(ALL_TYPES[i], k),
                                        .n_out   = 1,
                                        .n_row   = { ROWS[(k + t) % KVD_COUNTOF(ROWS)] },
                                        .type    = { ALL_TYPES[i] } };

                run_case(be, &c, &sum);
            }
        print_message("  %-8s %-5s nmse %.2e  worst/bound %.3f\n", isa,
                      kvd_dtype_get(ALL_TYPES[i])->name, sum.err2 / sum.ref2, sum.worst);
        assert_true(sum.worst <= 1.0);
        assert_true(sum.err2 / sum.ref2 < nmse_max);
    }
    kvd_backend_close(&be->base);
}

/* x is normal: 16 bits by 32 round it with a noise of about (2.3 / 32512)^2 / 12 = 4e-10. */
static void test_default_mode(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(LEVELS); i++)
        sweep(LEVELS[i], false, 2e-9);
}

static void test_precise_mode(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(LEVELS); i++)
        sweep(LEVELS[i], true, 1e-11);
}

/* Several outputs of mixed types share x; many tokens, so that slices are cut. */
static void test_outputs_share_x(void **state)
{
    const matmul_case cases[] = {
        { 1, 512, 3, { 64, 32, 32 }, { KVD_DTYPE_Q4_K, KVD_DTYPE_Q6_K, KVD_DTYPE_Q8_0 } },
        { 3,
          256,
          4,
          { 1, 2, 5, 300 },
          { KVD_DTYPE_F32, KVD_DTYPE_Q4_1, KVD_DTYPE_Q2_K, KVD_DTYPE_BF16 } },
        { 70, 576, 2, { 40, 41 }, { KVD_DTYPE_Q4_1, KVD_DTYPE_Q5_0 } },
        { 2, 576, 2, { 3000, 700 }, { KVD_DTYPE_Q4_1, KVD_DTYPE_Q8_0 } },
        { 1, 8960, 1, { 9 }, { KVD_DTYPE_Q4_K } },
    };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(LEVELS); i++)
        for (uint32_t n_thread = 1; n_thread <= 3; n_thread += 2) {
            cpu_backend *be  = backend_open(LEVELS[i], n_thread, false, true);
            error_sum    sum = { 0 };

            if (!be)
                continue;
            for (uint32_t k = 0; k < KVD_COUNTOF(cases); k++)
                run_case(be, &cases[k], &sum);
            assert_true(sum.worst <= 1.0);
            kvd_backend_close(&be->base);
        }
}

/* Zero is exact, NaN stays NaN and in its own token, the smallest floats do no harm. */
static void test_odd_activations(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(LEVELS); i++)
        for (uint32_t k = 0; k < KVD_COUNTOF(ALL_TYPES); k++) {
            cpu_backend    *be         = backend_open(LEVELS[i], 1, false, true);
            float           x[3 * 256] = { 0 }, y[3 * 8];
            void           *owner;
            kvd_matmul_args a = { .n_token = 3, .n_col = 256, .n_out = 1, .x_stride = 256, .x = x };

            if (!be)
                continue;
            a.out[0]   = (kvd_matmul_out){ .w        = random_weight(ALL_TYPES[k], 8, 256, &owner),
                                           .y        = y,
                                           .y_stride = 8 };
            x[256 + 7] = NAN;
            x[512 + 9] = 1e-38F;
            matmul(be, &a);
            for (uint32_t r = 0; r < 8; r++) {
                assert_true(y[r] == 0.0F);
                assert_true(isnan(y[8 + r]));
                assert_true(fabsf(y[16 + r]) < 1e-30F);
            }
            kvd_free(owner);
            kvd_backend_close(&be->base);
        }
}

/* ---- speed ----------------------------------------------------------------------- */

typedef struct perf_shape {
    kvd_dtype type;
    uint32_t  n_row, n_col;
} perf_shape;

static const perf_shape PERF[] = {
    { KVD_DTYPE_Q4_1, 1536, 576 },  { KVD_DTYPE_Q4_1, 576, 1536 },  { KVD_DTYPE_Q8_0, 49152, 576 },
    { KVD_DTYPE_Q5_0, 4864, 896 },  { KVD_DTYPE_Q5_0, 896, 896 },   { KVD_DTYPE_Q8_0, 151936, 896 },
    { KVD_DTYPE_Q6_K, 896, 4864 },  { KVD_DTYPE_Q4_K, 896, 4864 },  { KVD_DTYPE_Q4_K, 8960, 1536 },
    { KVD_DTYPE_Q6_K, 1536, 8960 }, { KVD_DTYPE_Q4_0, 4864, 896 },  { KVD_DTYPE_Q5_1, 4864, 896 },
    { KVD_DTYPE_Q5_K, 8960, 1536 }, { KVD_DTYPE_Q2_K, 8960, 1536 }, { KVD_DTYPE_Q3_K, 8960, 1536 },
    { KVD_DTYPE_BF16, 4864, 896 },  { KVD_DTYPE_F16, 4864, 896 },   { KVD_DTYPE_F32, 1536, 576 },
};

static int compare_u64(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

#define PERF_CALLS_MAX 4096

/* Passes over copies of a matrix that together are set_bytes; the median call counts. */
static double perf_one(cpu_backend *be, const perf_shape *s, uint32_t n_token, uint64_t set_bytes)
{
    const uint64_t row_bytes = kvd_dtype_row_bytes(s->type, s->n_col);
    const uint64_t bytes     = row_bytes * s->n_row;
    const uint64_t n_copy    = kvd_max_u64(1, set_bytes / bytes);
    uint8_t       *w         = kvd_pages_alloc(bytes * n_copy);
    float         *x         = random_floats((uint64_t)n_token * s->n_col);
    float         *y         = random_floats((uint64_t)n_token * s->n_row);
    uint64_t       ns[PERF_CALLS_MAX], n_call = 0;

    assert_non_null(w);
    for (uint64_t i = 0; i < bytes; i += kvd_dtype_get(s->type)->block_bytes)
        random_block(s->type, w + i);
    for (uint64_t c = 1; c < n_copy; c++)
        memcpy(w + c * bytes, w, bytes);
    for (int pass = 0; pass < 7; pass++)
        for (uint64_t c = 0; c < n_copy && n_call < PERF_CALLS_MAX; c++) {
            kvd_matmul_args a = {
                .n_token = n_token, .n_col = s->n_col, .n_out = 1, .x_stride = s->n_col, .x = x
            };
            const uint64_t t0 = kvd_now_ns();

            a.out[0] =
                (kvd_matmul_out){ .w = { s->type, s->n_row, s->n_col, row_bytes, w + c * bytes },
                                  .y = y,
                                  .y_stride = s->n_row };
            matmul(be, &a);
            ns[n_call++] = kvd_now_ns() - t0;
        }
    qsort(ns, n_call, sizeof(ns[0]), compare_u64);
    kvd_free(x);
    kvd_free(y);
    kvd_pages_free(w, bytes * n_copy);
    return (double)bytes / (double)ns[n_call / 2];
}

static int perf(const char *level, uint64_t set_bytes)
{
    printf("GB/s of weights, median call: 1 thread and 1 token, 2 threads and 1, 2 and 2, 2 and 4 "
           "tokens\n");
    for (uint32_t i = 0; i < KVD_COUNTOF(LEVELS); i++) {
        cpu_backend *be[2];

        if (level && strcmp(level, LEVELS[i]) != 0)
            continue;
        be[0] = backend_open(LEVELS[i], 1, false, true);
        be[1] = backend_open(LEVELS[i], 2, false, true);
        for (uint32_t k = 0; be[0] && be[1] && k < KVD_COUNTOF(PERF); k++) {
            printf("%-8s %-5s %6u x %5u", LEVELS[i], kvd_dtype_get(PERF[k].type)->name,
                   PERF[k].n_row, PERF[k].n_col);
            printf("  %6.1f", perf_one(be[0], &PERF[k], 1, set_bytes));
            for (uint32_t t = 1; t <= 4; t *= 2)
                printf("  %6.1f", perf_one(be[1], &PERF[k], t, set_bytes));
            printf("\n");
            fflush(stdout);
        }
        kvd_backend_close(be[0] ? &be[0]->base : NULL);
        kvd_backend_close(be[1] ? &be[1]->base : NULL);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default_mode),
        cmocka_unit_test(test_precise_mode),
        cmocka_unit_test(test_outputs_share_x),
        cmocka_unit_test(test_odd_activations),
    };

    if (argc > 2 && strcmp(argv[1], "--seed") == 0)
        seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed);
    kvd_rng_seed(&rng, seed);
    if (argc > 1 && strcmp(argv[1], "--perf") == 0)
        return perf(argc > 2 ? argv[2] : NULL, (argc > 3 ? strtoull(argv[3], NULL, 10) : 96) << 20);
    return cmocka_run_group_tests_name("matmul", tests, NULL, NULL);
}
