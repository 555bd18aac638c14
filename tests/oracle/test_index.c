/* SPDX-License-Identifier: Apache-2.0 */
/* test_index.c - the selection index: "ref" against formulas in double from the keys themselves,
 * every level of "cpu" against "ref", and what must hold for any scores.
 *
 * --seed N repeats a run; --perf [NAME] prints speeds in place of testing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "index_case.h"
#include "index_naive.h"

static uint64_t test_seed = 1;
static bool     test_precise;

#define MEAN(e, r, ct, d)                                \
    {                                                    \
        KVD_INDEX_MEAN, e, KVD_INDEX_BF16, r, ct, 256, d \
    }
#define KIND(k, e, ct, d)                       \
    {                                           \
        k, e, KVD_INDEX_BF16, false, ct, 256, d \
    }
#define KEYS(e, ct, d)                                          \
    {                                                           \
        KVD_INDEX_QUANT_K, KVD_INDEX_BF16, e, false, ct, 256, d \
    }
#define CASC(e, ke, ct, d)                         \
    {                                              \
        KVD_INDEX_CASCADE, e, ke, true, ct, 256, d \
    }
#define B16 KVD_DTYPE_BF16
#define F32 KVD_DTYPE_F32

static const index_shape shapes[] = {
    /* desc, n_head, n_kv_head, type, kv_chunk, n_seq, n_chunk, first, k */
    { MEAN(KVD_INDEX_INT4, true, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 40 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 64),
      9,
      3,
      B16,
      4,
      3,
      { 64, 250, 129 },
      { 4, 5, 64 },
      { 16, 32, 7 } },
    { MEAN(KVD_INDEX_INT4, false, 4, 128), 8, 1, B16, 4, 1, { 320 }, { 4 }, { 64 } },
    { MEAN(KVD_INDEX_INT4, true, 8, 80), 5, 1, F32, 4, 1, { 165 }, { 2 }, { 11 } },
    { MEAN(KVD_INDEX_INT4, true, 16, 96), 6, 1, B16, 8, 1, { 77 }, { 1 }, { 20 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 256), 4, 1, B16, 4, 1, { 192 }, { 4 }, { 24 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 20), 6, 2, B16, 4, 1, { 100 }, { 3 }, { 9 } },
    { MEAN(KVD_INDEX_INT8, true, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 40 } },
    { MEAN(KVD_INDEX_INT8, false, 8, 80), 7, 1, B16, 8, 1, { 95 }, { 2 }, { 30 } },
    { MEAN(KVD_INDEX_INT8, true, 16, 10), 2, 1, F32, 16, 1, { 31 }, { 1 }, { 5 } },
    { MEAN(KVD_INDEX_BF16, true, 4, 64), 14, 2, B16, 4, 1, { 300 }, { 4 }, { 40 } },
    { MEAN(KVD_INDEX_BF16, false, 16, 72), 3, 3, B16, 4, 2, { 33, 16 }, { 1, 0 }, { 16, 16 } },
    { KIND(KVD_INDEX_MEAN_STD, KVD_INDEX_INT4, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 40 } },
    { KIND(KVD_INDEX_MEAN_STD, KVD_INDEX_INT8, 8, 96), 4, 1, B16, 4, 1, { 99 }, { 2 }, { 25 } },
    { KIND(KVD_INDEX_MEAN_STD, KVD_INDEX_BF16, 16, 128), 4, 2, F32, 4, 1, { 40 }, { 1 }, { 8 } },
    { KIND(KVD_INDEX_BOX, KVD_INDEX_BF16, 16, 64), 14, 2, B16, 4, 1, { 80 }, { 1 }, { 12 } },
    { KIND(KVD_INDEX_BOX, KVD_INDEX_INT4, 4, 80), 3, 1, B16, 4, 1, { 120 }, { 4 }, { 12 } },
    { KIND(KVD_INDEX_BOX, KVD_INDEX_INT8, 8, 64), 8, 1, B16, 4, 1, { 64 }, { 2 }, { 12 } },
    { KEYS(KVD_INDEX_INT4, 4, 64), 14, 2, B16, 4, 1, { 320 }, { 4 }, { 40 } },
    { KEYS(KVD_INDEX_INT4, 8, 80), 6, 1, B16, 4, 1, { 90 }, { 2 }, { 13 } },
    { KEYS(KVD_INDEX_INT2, 4, 64), 7, 1, B16, 4, 1, { 130 }, { 4 }, { 13 } },
    { KEYS(KVD_INDEX_INT2, 16, 20), 2, 2, B16, 4, 1, { 30 }, { 1 }, { 13 } },
    { KEYS(KVD_INDEX_INT8, 4, 128), 4, 1, B16, 4, 1, { 70 }, { 4 }, { 13 } },
    { KEYS(KVD_INDEX_BF16, 16, 64), 14, 2, F32, 4, 1, { 48 }, { 1 }, { 13 } },
    { CASC(KVD_INDEX_INT4, KVD_INDEX_INT4, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 20 } },
    { CASC(KVD_INDEX_BF16, KVD_INDEX_INT2, 8, 80), 3, 1, B16, 4, 2, { 64, 7 }, { 2, 3 }, { 8, 9 } },
};

static kvd_backend *test_open(const char *name, const char *isa, uint32_t n_thread,
                              const index_case *c, kvd_stream **st)
{
    const kvd_backend_params p = {
        .name = name, .cpu_isa = isa, .n_thread = n_thread, .precise = test_precise
    };
    const kvd_backend_limits lim = case_limits(c);
    kvd_backend             *b   = NULL;
    kvd_err                  err = { 0 };

    if (kvd_backend_open(&b, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(b->ops->stream_open(b, st, NULL), KVD_OK);
    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    return b;
}

static void test_close(kvd_backend *b, kvd_stream *st)
{
    b->ops->stream_close(st);
    kvd_backend_close(b);
}

/* Builds and selects into the case's own arrays, with allocation forbidden. */
static void test_run(index_case *c, const char *name, const char *isa, uint32_t n_thread)
{
    kvd_stream  *st;
    kvd_backend *b = test_open(name, isa, n_thread, c, &st);

    c->args.seq = c->seq; /* a case moves when it is returned */
    memcpy(c->ema, c->ema_was, c->n_lane_chunk * sizeof(*c->ema));
    memset(c->score, 0x7f, c->n_lane_chunk * sizeof(*c->score));
    kvd_alloc_guard(true);
    assert_int_equal(case_build(c, b, st), KVD_OK);
    assert_int_equal(b->ops->select(st, &c->args, NULL), KVD_OK);
    kvd_alloc_guard(false);
    test_close(b, st);
}

/* ---- what follows from the scores, exactly --------------------------------------- */

typedef struct rank {
    float    score;
    uint32_t chunk;
} rank;

static int rank_cmp(const void *a, const void *b)
{
    const rank *x = a, *y = b;

    if (x->score != y->score)
        return x->score < y->score ? 1 : -1;
    return x->chunk < y->chunk ? -1 : x->chunk > y->chunk;
}

static void check_ema(const index_case *c, uint32_t s, uint32_t h)
{
    const uint64_t at = ((uint64_t)s * c->sh.n_kv_head + h) * c->lane_chunks;

    for (uint32_t i = 0; i < c->lane_chunks; i++) {
        uint16_t want = c->ema_was[at + i];

        if (i >= c->sh.first[s] && i < c->sh.n_chunk[s]) {
            const float old = kvd_f16_to_f32(want) * (1.0f - c->args.alpha);
            const float add = c->score[at + i] * (c->args.alpha * 32768.0f);
            const float sum = old + add;

            want = kvd_f32_to_f16(sum);
        }
        if (c->ema[at + i] != want)
            fail_msg("ema of chunk %u: %04x, not %04x", i, c->ema[at + i], want);
    }
}

static void check_selection(const index_case *c, uint32_t s, uint32_t h)
{
    const uint64_t           lane  = (uint64_t)s * c->sh.n_kv_head + h;
    const float             *score = c->score + lane * c->lane_chunks;
    const uint32_t          *sel   = c->sel + lane * (c->k_max + 1);
    const kvd_select_result *r     = &c->result[lane];
    const uint32_t           first = c->sh.first[s], n = c->sh.n_chunk[s] - first;
    const uint32_t           k      = c->sh.k[s] < n ? c->sh.k[s] : n;
    const uint32_t           urgent = k / 8 > 1 ? k / 8 : 1;
    rank                    *order  = case_mem(n * sizeof(*order));
    double                   mass   = 0.0;

    for (uint32_t i = 0; i < n; i++)
        order[i] = (rank){ score[first + i], first + i };
    qsort(order, n, sizeof(*order), rank_cmp);
    assert_int_equal(r->n_sel, k);
    assert_int_equal(r->n_urgent, k ? urgent : 0);
    for (uint32_t i = 0; i < k; i++) {
        const uint32_t want = order[i].chunk | (i < urgent ? KVD_SELECT_URGENT : 0);
        uint32_t       at   = 0;

        while (at < k && sel[at] != want)
            at++;
        if (at == k)
            fail_msg("chunk %u (%s, score %g) is not selected", order[i].chunk,
                     i < urgent ? "urgent" : "bulk", (double)order[i].score);
        if (i > 0)
            assert_true((sel[i] & ~KVD_SELECT_URGENT) > (sel[i - 1] & ~KVD_SELECT_URGENT));
        mass += (double)order[i].score;
    }
    assert_true(fabs((double)r->mass - (double)r->kept - mass) < 1e-6);
    kvd_pages_free(order, n * sizeof(*order) + 64);
}

/* Scores of a rule that takes means add up to 1 with the kept tokens' share. */
static void check_sum(const index_case *c, uint32_t s, uint32_t h)
{
    const uint64_t lane  = (uint64_t)s * c->sh.n_kv_head + h;
    const float   *score = c->score + lane * c->lane_chunks;
    double         sum   = (double)c->result[lane].kept;

    for (uint32_t i = 0; i < c->sh.n_chunk[s]; i++) {
        if (i < c->sh.first[s])
            assert_true(score[i] == 0.0f);
        assert_true(score[i] >= 0.0f && score[i] <= 1.0f);
        sum += (double)score[i];
    }
    if (c->args.rule == KVD_GQA_MAX_KEPT)
        assert_true(sum > 0.99999);
    else if (!(fabs(sum - 1.0) < 1e-5))
        fail_msg("scores and kept share add to %g", sum);
}

static void check_follows(const index_case *c)
{
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
            check_ema(c, s, h);
            check_sum(c, s, h);
            if (c->sh.desc.kind != KVD_INDEX_CASCADE)
                check_selection(c, s, h);
        }
    }
}

/* ---- ref against the formulas ---------------------------------------------------- */

static void check_naive(const index_case *c, size_t i)
{
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
            const uint64_t lane  = (uint64_t)s * c->sh.n_kv_head + h;
            const float   *score = c->score + lane * c->lane_chunks;
            double        *want  = naive_scores(c, s, h);

            for (uint32_t n = c->sh.first[s]; n < c->sh.n_chunk[s]; n++) {
                if (!(fabs((double)score[n] - want[n]) <= 2e-6 * want[n] + 1e-12))
                    fail_msg("shape %zu, sequence %u, head %u, chunk %u: %.9g, not %.9g", i, s, h,
                             n, (double)score[n], want[n]);
            }
            kvd_pages_free(want, c->sh.n_chunk[s] * sizeof(*want) + 64);
        }
    }
}

static void test_ref_matches_formulas(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        index_case c = case_open(&shapes[i], &rng);

        for (int rule = 0; rule < KVD_GQA_RULE_COUNT; rule++) {
            c.args.rule = (kvd_gqa_rule)rule;
            test_run(&c, "ref", NULL, 1);
            check_follows(&c);
            check_naive(&c, i);
        }
        case_close(&c);
    }
}

/* ---- cpu against ref ------------------------------------------------------------- */

/* How far a kernel's scores are from the reference's: |ln(score / want)| of chunks that hold more
 * than 1e-5, as the root of the mean square, and how many are past a bound. */
typedef struct gap {
    double   sum, bound, worst;
    uint64_t n, n_past;
} gap;

static void gap_add(gap *g, const index_case *c, const float *want)
{
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
            const uint64_t at = ((uint64_t)s * c->sh.n_kv_head + h) * c->lane_chunks;

            for (uint32_t i = 0; i < c->sh.n_chunk[s]; i++) {
                double d;

                if (!(want[at + i] > 1e-5f))
                    continue;
                d        = fabs(log((double)c->score[at + i] / (double)want[at + i]));
                g->worst = d > g->worst ? d : g->worst;
                g->n++;
                if (d <= g->bound)
                    g->sum += d * d;
                else
                    g->n_past++;
            }
        }
    }
}

/* Float kernels sum a few hundred products in float.  Queries in 8 bits (16 against INT8) add about
 * a tenth of what INT4 itself loses.  A cascade may rerank other chunks at its edge. */
static void check_gap(const index_case *c, const float *want, const char *isa, bool integer)
{
    const kvd_index_desc *d    = &c->sh.desc;
    const bool            int8 = d->elem == KVD_INDEX_INT8 || d->key_elem == KVD_INDEX_INT8;
    const double          rms  = !integer ? 1e-5 : int8 ? 4e-4 : 0.03;
    const uint64_t        edge = d->kind != KVD_INDEX_CASCADE ? 0 : integer ? 32 : 2;
    gap                   g    = { .bound = 6 * rms };

    gap_add(&g, c, want);
    assert_true(g.n > 0);
    if (!(sqrt(g.sum / (double)g.n) <= rms && g.n_past <= edge))
        fail_msg(
            "kind %d, elements %d and %d, %s: scores differ by %.3g rms, %.3g at most, %u past",
            (int)d->kind, (int)d->elem, (int)d->key_elem, isa, sqrt(g.sum / (double)g.n), g.worst,
            (unsigned)g.n_past);
}

static void check_level(index_case *c, os_isa isa, bool precise, const float *want)
{
    test_precise = precise;
    test_run(c, "cpu", os_isa_name(isa), 1 + (uint32_t)c->args.rule % 3);
    test_precise = false;
    check_follows(c);
    check_gap(c, want, os_isa_name(isa),
              !precise && isa >= OS_ISA_AVX512 && os_cpu_get()->avx512_vnni);
}

static void test_cpu_matches_ref(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        index_case c    = case_open(&shapes[i], &rng);
        float     *want = case_mem(c.n_lane_chunk * sizeof(*want));

        for (int rule = 0; rule < KVD_GQA_RULE_COUNT; rule++) {
            c.args.rule = (kvd_gqa_rule)rule;
            test_run(&c, "ref", NULL, 1);
            memcpy(want, c.score, c.n_lane_chunk * sizeof(*want));
            for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
                check_level(&c, (os_isa)isa, false, want);
                check_level(&c, (os_isa)isa, true, want);
            }
        }
        kvd_pages_free(want, c.n_lane_chunk * sizeof(*want) + 64);
        case_close(&c);
    }
}

/* ---- speed ----------------------------------------------------------------------- */

static double perf_best(index_case *c, const char *isa, uint32_t n_thread, bool build)
{
    kvd_stream  *st;
    kvd_backend *b    = test_open("cpu", isa, n_thread, c, &st);
    uint64_t     best = UINT64_MAX;

    c->args.seq = c->seq;
    assert_int_equal(case_build(c, b, st), KVD_OK);
    for (int i = 0; i < 200; i++) {
        const uint64_t t0 = kvd_now_ns();
        uint64_t       t;

        if (build)
            assert_int_equal(case_build(c, b, st), KVD_OK);
        else
            assert_int_equal(b->ops->select(st, &c->args, NULL), KVD_OK);
        t    = kvd_now_ns() - t0;
        best = t < best ? t : best;
    }
    test_close(b, st);
    return (double)best / 1e3;
}

static int perf_main(const char *only)
{
    static const struct {
        const char *name;
        index_shape sh;
    } perf[] = {
        { "mean int4 + radius",
          { MEAN(KVD_INDEX_INT4, true, 4, 64), 7, 1, B16, 4, 1, { 8192 }, { 4 }, { 128 } } },
        { "  6.25 %",
          { MEAN(KVD_INDEX_INT4, true, 4, 64), 7, 1, B16, 4, 1, { 8192 }, { 4 }, { 512 } } },
        { "  group 4, d 128",
          { MEAN(KVD_INDEX_INT4, true, 4, 128), 4, 1, B16, 4, 1, { 8192 }, { 4 }, { 128 } } },
        { "mean int8 + radius",
          { MEAN(KVD_INDEX_INT8, true, 4, 64), 7, 1, B16, 4, 1, { 8192 }, { 4 }, { 128 } } },
        { "mean bf16 + radius",
          { MEAN(KVD_INDEX_BF16, true, 4, 64), 7, 1, B16, 4, 1, { 8192 }, { 4 }, { 128 } } },
        { "mean-std int4",
          { KIND(KVD_INDEX_MEAN_STD, KVD_INDEX_INT4, 4, 64),
            7,
            1,
            B16,
            4,
            1,
            { 8192 },
            { 4 },
            { 128 } } },
        { "quant-k 4", { KEYS(KVD_INDEX_INT4, 4, 64), 7, 1, B16, 4, 1, { 8192 }, { 4 }, { 128 } } },
        { "cascade int4 4",
          { CASC(KVD_INDEX_INT4, KVD_INDEX_INT4, 4, 64),
            7,
            1,
            B16,
            4,
            1,
            { 8192 },
            { 4 },
            { 128 } } },
        { "cluster bf16",
          { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_BF16, 4, 64),
            7,
            1,
            B16,
            4,
            1,
            { 8192 },
            { 4 },
            { 128 } } },
    };
    kvd_rng rng;

    kvd_rng_seed(&rng, 1);
    printf("8,192 chunks, one lane, one thread; us\n%-20s %10s %10s %10s %10s\n", "", "select",
           "avx2", "portable", "build");
    for (size_t i = 0; i < KVD_COUNTOF(perf); i++) {
        index_case c;

        if (only && strstr(perf[i].name, only) == NULL)
            continue;
        c = case_open(&perf[i].sh, &rng);
        printf("%-20s %10.1f %10.1f %10.1f %10.1f\n", perf[i].name, perf_best(&c, NULL, 1, false),
               perf_best(&c, "avx2", 1, false), perf_best(&c, "portable", 1, false),
               i < 8 ? perf_best(&c, NULL, 1, true) : 0.0);
        case_close(&c);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ref_matches_formulas),
        cmocka_unit_test(test_cpu_matches_ref),
    };

    if (argc >= 2 && strcmp(argv[1], "--perf") == 0)
        return perf_main(argc > 2 ? argv[2] : NULL);
    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
