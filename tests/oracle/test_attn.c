/* SPDX-License-Identifier: Apache-2.0 */
/* test_attn.c - attention and the KV store at every level this machine has, against "ref".
 *
 * --seed N repeats a run; --perf prints speeds in place of testing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attn_case.h"

/* Row kernels work in float: a dot of 64-128 products and a sum of up to 8K weights leave about
 * 1e-6 relative, squared 1e-12. */
#define NMSE_F32 1e-11
/* Tiles in bf16 round each weight (2^-9) and the rest of the split query (2^-17); the weights'
 * roundings are independent, so the result's relative error stays below theirs: (2^-9)^2 / 3. */
#define NMSE_BF16 1.5e-6

static uint64_t test_seed = 1;

static const attn_shape shapes[] = {
    /* n_head, n_kv_head, head_dim, chunk, type, n_seq, n_past, n_row */
    { 3, 3, 64, 4, KVD_DTYPE_BF16, 1, { 0 }, { 1 } },
    { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 0 }, { 5 } },
    { 9, 3, 64, 4, KVD_DTYPE_F32, 1, { 254 }, { 3 } },
    { 14, 2, 64, 4, KVD_DTYPE_BF16, 1, { 1021 }, { 1 } },
    { 8, 1, 128, 8, KVD_DTYPE_BF16, 1, { 515 }, { 2 } },
    { 8, 2, 96, 16, KVD_DTYPE_BF16, 1, { 63 }, { 1 } },
    { 20, 2, 80, 4, KVD_DTYPE_F32, 1, { 700 }, { 2 } },
    { 4, 2, 16, 4, KVD_DTYPE_F32, 2, { 3, 0 }, { 9, 2 } },
    { 4, 4, 24, 4, KVD_DTYPE_BF16, 1, { 70 }, { 4 } },
    { 4, 2, 20, 4, KVD_DTYPE_F32, 1, { 70 }, { 4 } },
    { 6, 2, 10, 8, KVD_DTYPE_BF16, 1, { 33 }, { 3 } },
    { 22, 2, 32, 4, KVD_DTYPE_BF16, 1, { 300 }, { 1 } },
    { 9, 3, 64, 4, KVD_DTYPE_BF16, 4, { 0, 700, 511, 255 }, { 70, 1, 2, 33 } },
    { 14, 2, 64, 4, KVD_DTYPE_BF16, 3, { 5, 256, 0 }, { 128, 1, 17 } },
    { 8, 8, 128, 4, KVD_DTYPE_BF16, 1, { 100 }, { 100 } },
    { 24, 8, 128, 4, KVD_DTYPE_BF16, 1, { 77 }, { 65 } },
    { 6, 2, 96, 16, KVD_DTYPE_BF16, 1, { 300 }, { 90 } },
    { 4, 2, 32, 8, KVD_DTYPE_BF16, 1, { 1 }, { 300 } },
    { 4, 1, 48, 4, KVD_DTYPE_BF16, 1, { 31 }, { 40 } },
    { 9, 3, 64, 4, KVD_DTYPE_F32, 1, { 130 }, { 130 } },
    { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 8190 }, { 1 } },
    { 3, 1, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 48 } },
    { 1, 1, 64, 4, KVD_DTYPE_BF16, 1, { 40000 }, { 1 } },
};

static kvd_backend *test_open(const char *name, const char *isa, uint32_t n_thread,
                              bool deterministic, kvd_stream **st)
{
    const kvd_backend_params p = {
        .name = name, .cpu_isa = isa, .n_thread = n_thread, .deterministic = deterministic
    };
    kvd_backend *b   = NULL;
    kvd_err      err = { 0 };

    if (kvd_backend_open(&b, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(b->ops->stream_open(b, st, NULL), KVD_OK);
    return b;
}

static void test_close(kvd_backend *b, kvd_stream *st)
{
    b->ops->stream_close(st);
    kvd_backend_close(b);
}

static void test_run(const attn_case *c, const char *name, const char *isa, uint32_t n_thread,
                     bool deterministic, float *out)
{
    const kvd_backend_limits lim = case_limits(c);
    kvd_stream              *st;
    kvd_backend             *b = test_open(name, isa, n_thread, deterministic, &st);

    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    assert_int_equal(case_attn(c, b, st, out), KVD_OK);
    test_close(b, st);
}

static void check_shape(const attn_case *c, size_t i, const char *isa, bool deterministic)
{
    const uint64_t n     = (uint64_t)c->n_row * c->sh.n_head * c->sh.head_dim;
    const double   bound = deterministic || c->sh.type == KVD_DTYPE_F32 ? NMSE_F32 : NMSE_BF16;
    double         nmse;
    float         *again = case_floats(n);

    test_run(c, "cpu", isa, 1, deterministic, c->out);
    test_run(c, "cpu", isa, 2, deterministic, again);
    nmse = case_nmse(c->out, c->want, n);
    if (!(nmse <= bound))
        fail_msg("shape %zu, %s: nmse %g > %g", i, isa, nmse, bound);
    if (memcmp(c->out, again, (size_t)n * sizeof(float)) != 0)
        fail_msg("shape %zu, %s: 1 and 2 threads differ", i, isa);
    kvd_pages_free(again, (size_t)n * sizeof(float));
}

static void test_attn_matches_ref(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        attn_case c = case_open(shapes[i], &rng);

        test_run(&c, "ref", NULL, 1, false, c.want);
        for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
            check_shape(&c, i, os_isa_name((os_isa)isa), false);
            check_shape(&c, i, os_isa_name((os_isa)isa), true);
        }
        case_close(&c);
    }
}

/* The same rows in batches of one sequence each, cut at every place: the same bits. */
static void check_cuts(const attn_case *c, const char *isa)
{
    const kvd_backend_limits lim    = case_limits(c);
    const uint64_t           stride = (uint64_t)c->sh.n_head * c->sh.head_dim;
    kvd_stream              *st;
    kvd_backend             *b = test_open("cpu", isa, 2, true, &st);

    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    assert_int_equal(case_attn(c, b, st, c->want), KVD_OK);
    for (uint32_t step = 1; step <= 3; step++) {
        for (uint32_t s = 0; s < c->sh.n_seq; s++) {
            for (uint32_t r = 0; r < c->seq[s].n_row; r += step) {
                attn_case one = *c;

                one.sh.n_seq         = 1;
                one.seq[0]           = c->seq[s];
                one.seq[0].first_row = 0;
                one.seq[0].n_past    = c->seq[s].n_past + r;
                one.seq[0].n_row     = c->seq[s].n_row - r < step ? c->seq[s].n_row - r : step;
                one.q                = c->q + (c->seq[s].first_row + r) * stride;
                assert_int_equal(
                    case_attn(&one, b, st, c->out + (c->seq[s].first_row + r) * stride), KVD_OK);
            }
        }
        if (memcmp(c->out, c->want, (size_t)(c->n_row * stride) * sizeof(float)) != 0)
            fail_msg("%s: %u rows at a time differ from all at once", isa, step);
    }
    test_close(b, st);
}

static void test_deterministic_whatever_the_cut(void **state)
{
    static const attn_shape some[] = {
        { 9, 3, 64, 4, KVD_DTYPE_BF16, 3, { 0, 700, 511 }, { 40, 1, 7 } },
        { 14, 2, 64, 4, KVD_DTYPE_BF16, 2, { 500, 30 }, { 30, 1 } },
        { 2, 2, 128, 8, KVD_DTYPE_F32, 1, { 1020 }, { 33 } },
    };
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(some); i++) {
        attn_case c = case_open(some[i], &rng);

        for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++)
            check_cuts(&c, os_isa_name((os_isa)isa));
        case_close(&c);
    }
}

/* Storing rounds as the reference does, everywhere and nowhere else. */
static void check_append(const attn_case *c, const char *isa, const uint8_t *want)
{
    const uint64_t           stride = (uint64_t)c->sh.n_kv_head * c->sh.head_dim;
    const kvd_kv_append_args a      = { .n_seq    = c->sh.n_seq,
                                        .n_token  = c->n_row,
                                        .seq      = c->seq,
                                        .kv       = c->kv,
                                        .k_stride = stride,
                                        .v_stride = stride,
                                        .k        = c->k,
                                        .v        = c->v };
    kvd_stream              *st;
    kvd_backend             *b = test_open(isa ? "cpu" : "ref", isa, isa ? 2 : 1, false, &st);

    assert_int_equal(b->ops->kv_append(st, &a, NULL), KVD_OK);
    if (want && memcmp(want, c->kv.pool, (size_t)c->pool_bytes) != 0)
        fail_msg("%s: the pool differs from the reference's", isa);
    test_close(b, st);
}

static void test_append_matches_ref(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        attn_case c      = case_open(shapes[i], &rng);
        uint8_t  *before = kvd_malloc((size_t)c.pool_bytes);
        uint8_t  *want   = kvd_malloc((size_t)c.pool_bytes);

        c.k[0] = NAN;
        c.v[0] = -INFINITY;
        memcpy(before, c.kv.pool, (size_t)c.pool_bytes);
        check_append(&c, NULL, NULL);
        memcpy(want, c.kv.pool, (size_t)c.pool_bytes);
        assert_int_equal(memcmp(before, want, 256), 0); /* before the layer's lanes */
        for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
            memcpy(c.kv.pool, before, (size_t)c.pool_bytes);
            check_append(&c, os_isa_name((os_isa)isa), want);
        }
        kvd_free(before);
        kvd_free(want);
        case_close(&c);
    }
}

/* A token alone in its sequence: the softmax of one score, whatever it is. */
static void test_one_token_returns_its_value(void **state)
{
    const attn_shape sh = { 4, 2, 64, 4, KVD_DTYPE_F32, 1, { 0 }, { 1 } };
    kvd_rng          rng;
    attn_case        c;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c      = case_open(sh, &rng);
    c.q[0] = 3e4f; /* scores far beyond what exp takes */
    for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
        const float *v = (const float *)(const void *)((uint8_t *)c.kv.pool + c.seq[0].block[0] +
                                                       c.kv.lane_off + c.kv.record_bytes / 2);

        test_run(&c, "cpu", os_isa_name((os_isa)isa), 1, false, c.out);
        for (uint32_t i = 0; i < 64; i++)
            assert_true(c.out[i] == v[i] && c.out[64 + i] == v[i]);
    }
    case_close(&c);
}

/* ---- speed ----------------------------------------------------------------------- */

static void perf_shape(const char *name, attn_shape sh, const char *isa, uint32_t n_thread)
{
    const uint32_t elem = sh.type == KVD_DTYPE_F32 ? 4 : 2;
    uint64_t       best = UINT64_MAX;
    double         bytes;
    kvd_rng        rng;
    kvd_stream    *st;
    kvd_backend   *b = test_open("cpu", isa, n_thread, false, &st);
    attn_case      c;

    kvd_rng_seed(&rng, test_seed);
    c = case_open(sh, &rng);
    {
        const kvd_backend_limits lim = case_limits(&c);
        assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    }
    for (int i = 0; i < 15; i++) {
        const uint64_t t0 = kvd_now_ns();
        uint64_t       t;

        assert_int_equal(case_attn(&c, b, st, c.out), KVD_OK);
        t    = kvd_now_ns() - t0;
        best = t < best ? t : best;
    }
    bytes = 2.0 * (sh.n_past[0] + sh.n_row[0]) * sh.n_kv_head * sh.head_dim * elem;
    printf("%-28s %-9s %u thr %10.1f us  %7.2f GB/s of K+V\n", name, isa, n_thread,
           (double)best / 1e3, bytes / (double)best);
    case_close(&c);
    test_close(b, st);
}

static int perf_main(void)
{
    static const struct {
        const char *name;
        attn_shape  sh;
    } perf[] = {
        { "smollm2 decode @7680", { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 1 } } },
        { "qwen-0.5b decode @7680", { 14, 2, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 1 } } },
        { "qwen-0.5b decode @16384", { 14, 2, 64, 4, KVD_DTYPE_BF16, 1, { 16384 }, { 1 } } },
        { "smollm2 decode @64", { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 64 }, { 1 } } },
        { "smollm2 8 rows @7680", { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 8 } } },
        { "smollm2 prefill 512 @0", { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 0 }, { 512 } } },
        { "smollm2 prefill 512 @7680", { 9, 3, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 512 } } },
        { "qwen-0.5b prefill 512 @7680", { 14, 2, 64, 4, KVD_DTYPE_BF16, 1, { 7680 }, { 512 } } },
    };

    for (size_t i = 0; i < KVD_COUNTOF(perf); i++) {
        for (int isa = (int)os_cpu_get()->isa; isa >= OS_ISA_PORTABLE; isa--)
            perf_shape(perf[i].name, perf[i].sh, os_isa_name((os_isa)isa), os_cpu_get()->n_cpu);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attn_matches_ref),
        cmocka_unit_test(test_deterministic_whatever_the_cut),
        cmocka_unit_test(test_append_matches_ref),
        cmocka_unit_test(test_one_token_returns_its_value),
    };

    if (argc == 2 && strcmp(argv[1], "--perf") == 0)
        return perf_main();
    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
