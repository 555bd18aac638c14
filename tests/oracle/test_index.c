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
    { MEAN(KVD_INDEX_INT4, true, 4, 64), 4, 2, B16, 4, 1, { 600 }, { 300 }, { 20 } },
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
    { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_BF16, 4, 32), 6, 2, B16, 4, 1, { 1100 }, { 4 }, { 40 } },
    { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_BF16, 8, 80),
      3,
      1,
      F32,
      4,
      2,
      { 64, 33 },
      { 2, 0 },
      { 8, 8 } },
    { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_INT4, 4, 64), 7, 1, B16, 4, 1, { 290 }, { 4 }, { 40 } },
    { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_INT8, 16, 96), 4, 1, B16, 4, 1, { 300 }, { 1 }, { 9 } },
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
    const uint32_t           all = case_k(&c->sh, s, h), k = all < n ? all : n;
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
            if (c.sh.desc.kind != KVD_INDEX_CLUSTER || c.sh.desc.elem == KVD_INDEX_BF16)
                check_naive(&c, i);
        }
        case_close(&c);
    }
}

/* ---- cpu against ref ------------------------------------------------------------- */

/* How far a kernel's scores are from the reference's: |ln(score / want)| of chunks that hold more
 * than 1e-4 of their lane's most, as the root of the mean square, and how many are past a bound. */
typedef struct gap {
    double   sum, bound, worst;
    uint64_t n, n_past;
} gap;

static void gap_add(gap *g, const index_case *c, const float *want)
{
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
            const uint64_t at = ((uint64_t)s * c->sh.n_kv_head + h) * c->lane_chunks;

            float most = 1e-30f;

            for (uint32_t i = 0; i < c->sh.n_chunk[s]; i++)
                most = want[at + i] > most ? want[at + i] : most;
            for (uint32_t i = 0; i < c->sh.n_chunk[s]; i++) {
                double d;

                if (!(want[at + i] > 1e-4f * most))
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

/* ---- small print ------------------------------------------------------------------ */

/* Threads, pieces and the neighbours of a batch change no bit; "ref" builds the same index. */
static void test_threads_change_nothing(void **state)
{
    static const index_shape shape[] = {
        { MEAN(KVD_INDEX_INT4, true, 4, 64), 14, 2, B16, 4, 1, { 3000 }, { 4 }, { 190 } },
        { MEAN(KVD_INDEX_INT4, true, 4, 64),
          9,
          3,
          B16,
          4,
          3,
          { 700, 900, 320 },
          { 4, 700, 9 },
          { 40, 30, 20 } },
        { KEYS(KVD_INDEX_INT4, 4, 64), 8, 2, B16, 4, 1, { 700 }, { 4 }, { 40 } },
        { CASC(KVD_INDEX_INT4, KVD_INDEX_INT4, 4, 64), 14, 2, B16, 4, 1, { 900 }, { 4 }, { 30 } },
        { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_BF16, 4, 64),
          7,
          1,
          B16,
          4,
          2,
          { 1300, 64 },
          { 4, 4 },
          { 30, 8 } },
    };
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shape); i++) {
        index_case     c     = case_open(&shape[i], &rng);
        const uint64_t n_sel = (uint64_t)c.sh.n_seq * c.sh.n_kv_head * (c.k_max + 1);
        float         *score = case_mem(c.n_lane_chunk * sizeof(*score));
        uint32_t      *sel   = case_mem(n_sel * sizeof(*sel));
        uint8_t       *index = case_mem(c.ix_bytes);

        test_run(&c, "ref", NULL, 1);
        memcpy(index, c.ix.pool, c.ix_bytes);
        for (uint32_t t = 1; t <= 7; t += 2) {
            memset(c.ix.pool, 0, c.ix_bytes);
            test_run(&c, "cpu", NULL, t);
            assert_memory_equal(index, c.ix.pool, c.ix_bytes);
            if (t == 1) {
                memcpy(score, c.score, c.n_lane_chunk * sizeof(*score));
                memcpy(sel, c.sel, n_sel * sizeof(*sel));
            }
            assert_memory_equal(score, c.score, c.n_lane_chunk * sizeof(*score));
            assert_memory_equal(sel, c.sel, n_sel * sizeof(*sel));
        }
        kvd_pages_free(index, c.ix_bytes + 64);
        kvd_pages_free(sel, n_sel * sizeof(*sel) + 64);
        kvd_pages_free(score, c.n_lane_chunk * sizeof(*score) + 64);
        case_close(&c);
    }
}

/* Whatever is asked of a selection's edges: nothing to select, nothing wanted, all wanted. */
static void test_edges(void **state)
{
    static const index_shape shape[] = {
        { MEAN(KVD_INDEX_INT4, true, 4, 64),
          7,
          1,
          B16,
          4,
          3,
          { 64, 64, 65 },
          { 64, 4, 64 },
          { 9, 0, 9 } },
        { KEYS(KVD_INDEX_INT4, 16, 64),
          2,
          1,
          B16,
          4,
          3,
          { 16, 17, 1 },
          { 16, 16, 0 },
          { 3, 3, 100 } },
        { CASC(KVD_INDEX_INT4, KVD_INDEX_INT4, 8, 64),
          3,
          1,
          B16,
          4,
          3,
          { 32, 33, 9 },
          { 32, 32, 1 },
          { 3, 0, 100 } },
        { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_INT4, 8, 64),
          3,
          1,
          B16,
          4,
          3,
          { 32, 33, 9 },
          { 32, 32, 1 },
          { 3, 0, 100 } },
    };
    static const char *const name[] = { "ref", "cpu" };
    kvd_rng                  rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shape); i++) {
        index_case c = case_open(&shape[i], &rng);

        for (size_t b = 0; b < 2; b++) {
            for (int rule = 0; rule < KVD_GQA_RULE_COUNT; rule++) {
                c.args.rule = (kvd_gqa_rule)rule;
                test_run(&c, name[b], NULL, 2);
                for (uint32_t s = 0; s < c.sh.n_seq; s++) {
                    const uint32_t n = c.sh.n_chunk[s] - c.sh.first[s];
                    const uint32_t k = case_k(&c.sh, s, 0);

                    assert_int_equal(c.result[s].n_sel, k < n ? k : n);
                    check_ema(&c, s, 0);
                }
            }
        }
        case_close(&c);
    }
}

/* Queries that are no numbers, and an average that nobody keeps: scores of 0, the lowest chunks. */
static void test_nan_is_harmless(void **state)
{
    index_case c;
    kvd_rng    rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i += 3) {
        c = case_open(&shapes[i], &rng);
        for (uint64_t j = 0; j < c.sh.n_seq * c.args.q_stride; j++)
            c.q[j] = __builtin_nanf("");
        for (uint32_t s = 0; s < c.sh.n_seq; s++)
            c.seq[s].ema = NULL;
        for (int isa = -1; isa <= (int)os_cpu_get()->isa; isa++) {
            test_run(&c, isa < 0 ? "ref" : "cpu", isa < 0 ? NULL : os_isa_name((os_isa)isa), 2);
            assert_memory_equal(c.ema, c.ema_was, c.n_lane_chunk * sizeof(*c.ema));
            for (uint32_t s = 0; s < c.sh.n_seq; s++) {
                for (uint32_t j = 0; j < c.sh.n_chunk[s]; j++)
                    if (c.seq[s].score[j] != 0.0f)
                        fail_msg("shape %zu, level %d, chunk %u: %g", i, isa, j,
                                 (double)c.seq[s].score[j]);
                for (uint32_t j = 0; j < c.result[s * c.sh.n_kv_head].n_sel; j++)
                    assert_int_equal(c.seq[s].sel[j] & ~KVD_SELECT_URGENT, c.sh.first[s] + j);
            }
        }
        case_close(&c);
    }
}

/* The smallest set that reaches top_p, by its definition: best first, ties to the lower chunk. */
static void check_top_p(const index_case *c, uint32_t lane)
{
    const uint32_t  n = c->sh.n_chunk[0], first = c->sh.first[0], n_sel = c->result[lane].n_sel;
    const float    *score = c->score + (uint64_t)lane * c->lane_chunks;
    const uint32_t *sel   = c->sel + (uint64_t)lane * (c->k_max + 1);
    rank           *order = case_mem(n * sizeof(*order));
    uint64_t        all = 0, sum = 0, target;
    uint32_t        want = 0;

    for (uint32_t i = first; i < n; i++) {
        order[i - first] = (rank){ score[i], i };
        all += (uint64_t)((double)score[i] * 0x1p40);
    }
    qsort(order, n - first, sizeof(*order), rank_cmp);
    target = (uint64_t)((double)all * (double)c->args.top_p);
    target = target ? target : 1;
    while (want < case_k(&c->sh, 0, lane) && sum < target)
        sum += (uint64_t)((double)order[want++].score * 0x1p40);
    assert_int_equal(n_sel, want);
    for (uint32_t i = 0; i < want; i++) {
        bool in = false;

        for (uint32_t j = 0; j < n_sel; j++)
            in = in || (sel[j] & ~KVD_SELECT_URGENT) == order[i].chunk;
        assert_true(in);
    }
    kvd_pages_free(order, n * sizeof(*order) + 64);
}

/* All blocks become the first one: every score comes eight times. */
static void repeat_block(index_case *c)
{
    for (uint32_t b = 1; b < c->n_block_all; b++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++)
            memcpy(case_key_row(c, b, h, 0), case_key_row(c, 0, h, 0),
                   256 * 2 * c->sh.desc.head_dim * 2);
    }
}

static void test_top_p(void **state)
{
    static const index_shape shape = {
        MEAN(KVD_INDEX_INT4, true, 4, 64), 14, 2, B16, 4, 1, { 500 }, { 4 }, { 60 }
    };
    static const float p[]   = { 1e-6f, 0.3f, 0.5f, 0.9f, 0.999f };
    bool               fewer = false, all = false;
    kvd_rng            rng;
    index_case         c;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c = case_open(&shape, &rng);
    for (size_t i = 0; i < 2 * KVD_COUNTOF(p); i++) {
        if (i == KVD_COUNTOF(p))
            repeat_block(&c);
        c.args.top_p = p[i % KVD_COUNTOF(p)];
        for (int isa = -1; isa <= (int)os_cpu_get()->isa; isa++) {
            test_run(&c, isa < 0 ? "ref" : "cpu", isa < 0 ? NULL : os_isa_name((os_isa)isa), 1);
            for (uint32_t lane = 0; lane < 2; lane++) {
                check_top_p(&c, lane);
                fewer = fewer || (c.result[lane].n_sel > 1 && c.result[lane].n_sel < 60);
                all   = all || c.result[lane].n_sel == 60;
            }
        }
    }
    assert_true(fewer && all);
    case_close(&c);
}

/* Clusters must gather what lies together: a third of the variance is left at most. */
static void test_clusters_gather(void **state)
{
    static const index_shape shape = {
        KIND(KVD_INDEX_CLUSTER, KVD_INDEX_BF16, 4, 64), 1, 1, F32, 4, 1, { 1024 }, { 4 }, { 8 }
    };
    double     left = 0.0, all = 0.0;
    kvd_rng    rng;
    index_case c;
    naive_lane l;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c = case_open(&shape, &rng);
    for (uint32_t t = 0; t < 4096; t++) { /* 40 topics, come and gone */
        const uint32_t topic = t / 64 * 7919 % 40;

        for (uint32_t i = 0; i < 64; i++)
            case_set_key(&c, t / 256, 0, t % 256, i,
                         (float)((topic * 31 + i * 17) % 23) / 4.0f + 0.5f * case_normal(&rng));
    }
    test_run(&c, "cpu", NULL, 2);
    l = naive_marks(&c, 0, 0, NAIVE_MEAN);
    for (uint32_t i = 0; i < 64; i++) {
        double mean = 0.0;

        for (uint32_t u = 0; u < 1024; u++)
            mean += (double)naive_chunk(&l, u, i, NAIVE_MEAN) / 1024.0;
        for (uint32_t u = 0; u < 1024; u++) {
            const double x = (double)naive_chunk(&l, u, i, NAIVE_MEAN);

            all += (x - mean) * (x - mean);
            left += (x - (double)l.value[u * 64 + i]) * (x - (double)l.value[u * 64 + i]);
        }
    }
    if (!(left < 0.33 * all))
        fail_msg("clusters leave %.3g of the variance", left / all);
    naive_free(&l);
    case_close(&c);
}

/* Means of 16 tokens' K and V, as a layout of their own; "ref" and "cpu" give the same bytes. */
static void check_zone(const index_case *c, const kvd_kv_layout *zone, uint32_t b)
{
    for (uint32_t h = 0; h < c->sh.n_kv_head; h++) {
        for (uint32_t i = 0; i < 16 * c->sh.desc.head_dim; i++) {
            const uint32_t z = i / c->sh.desc.head_dim, d = i % c->sh.desc.head_dim;
            const uint8_t *at = (const uint8_t *)zone->pool + b * 2 * zone->head_stride + 64 +
                                h * zone->head_stride + z * zone->record_bytes;
            float k = 0.0f, v = 0.0f;

            for (uint32_t t = 16 * z; t < 16 * z + 16; t++) {
                const float *row = (const float *)(const void *)case_key_row(c, b, h, t);

                k += row[d];
                v += row[4 * c->sh.desc.head_dim + d]; /* records of 4 tokens: V behind K */
            }
            assert_int_equal(((const uint16_t *)(const void *)at)[d], kvd_f32_to_bf16(k / 16.0f));
            assert_int_equal(((const uint16_t *)(const void *)at)[c->sh.desc.head_dim + d],
                             kvd_f32_to_bf16(v / 16.0f));
        }
    }
}

static void test_zone_means(void **state)
{
    static const index_shape shape = {
        MEAN(KVD_INDEX_INT4, true, 4, 80), 2, 1, F32, 4, 1, { 192 }, { 0 }, { 8 }
    };
    kvd_rng    rng;
    index_case c;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c = case_open(&shape, &rng);
    for (uint64_t i = 0; i < c.kv_bytes / 4; i++)
        ((float *)c.kv.pool)[i] = case_normal(&rng);
    for (int ref = 0; ref < 2; ref++) {
        kvd_stream         *st;
        kvd_backend        *b     = test_open(ref ? "ref" : "cpu", NULL, 2, &c, &st);
        kvd_kv_layout       zone  = { .type         = B16,
                                      .n_kv_head    = 1,
                                      .head_dim     = 80,
                                      .chunk_tokens = 1,
                                      .block_tokens = 16,
                                      .record_bytes = 320,
                                      .lane_off     = 64,
                                      .head_stride  = 16 * 320 };
        const uint64_t      at[3] = { 0, 2 * zone.head_stride, 4 * zone.head_stride };
        kvd_zone_build_args a     = { .n_block = 3, .kv = c.kv, .block = c.block, .zblock = at };

        zone.pool = case_mem(6 * zone.head_stride);
        a.zone    = zone;
        assert_int_equal(b->ops->zone_build(st, &a, NULL), KVD_OK);
        for (uint32_t i = 0; i < 3; i++)
            check_zone(&c, &zone, i);
        kvd_pages_free(zone.pool, 6 * zone.head_stride + 64);
        test_close(b, st);
    }
    case_close(&c);
}

/* INT4 landmarks against the chunks' exact means: what quantising loses, of what selects. */
static void test_int4_is_close_to_exact(void **state)
{
    static const index_shape shape = {
        MEAN(KVD_INDEX_INT4, true, 4, 64), 7, 1, F32, 4, 1, { 4096 }, { 4 }, { 256 }
    };
    index_shape exact  = shape;
    uint32_t   *sel    = case_mem(256 * sizeof(*sel));
    uint32_t    common = 0;
    kvd_rng     rng;
    index_case  c;

    (void)state;
    exact.desc.elem = KVD_INDEX_BF16;
    kvd_rng_seed(&rng, test_seed);
    c = case_open(&exact, &rng);
    test_run(&c, "ref", NULL, 1);
    memcpy(sel, c.sel, 256 * sizeof(*sel));
    case_close(&c);
    kvd_rng_seed(&rng, test_seed);
    c = case_open(&shape, &rng);
    test_run(&c, "cpu", NULL, 1);
    for (uint32_t i = 0, j = 0; i < 256; i++) {
        while (j < 255 && (c.sel[j] & ~KVD_SELECT_URGENT) < (sel[i] & ~KVD_SELECT_URGENT))
            j++;
        common += (c.sel[j] & ~KVD_SELECT_URGENT) == (sel[i] & ~KVD_SELECT_URGENT);
    }
    if (common < 225)
        fail_msg("of 256 chunks selected by exact means, INT4 finds %u", common);
    kvd_pages_free(sel, 256 * sizeof(*sel) + 64);
    case_close(&c);
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
        cmocka_unit_test(test_ref_matches_formulas),   cmocka_unit_test(test_cpu_matches_ref),
        cmocka_unit_test(test_threads_change_nothing), cmocka_unit_test(test_edges),
        cmocka_unit_test(test_nan_is_harmless),        cmocka_unit_test(test_top_p),
        cmocka_unit_test(test_clusters_gather),        cmocka_unit_test(test_zone_means),
        cmocka_unit_test(test_int4_is_close_to_exact),
    };

    if (argc >= 2 && strcmp(argv[1], "--perf") == 0)
        return perf_main(argc > 2 ? argv[2] : NULL);
    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
