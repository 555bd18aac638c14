/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_select.c - the CUDA backend's index and selection against "ref".
 * usage: test_cuda_select MODULE [quick | SHAPE]   (quick: small shapes alone, for memory checkers)
 *
 * The index must have ref's bits.  A selection must follow from the scores that come with it, bit
 * by bit; scores have a bound of their own. */
#include "gpu/gpu_sides.h"

#include <stddef.h>

#include "oracle/index_case.h"

static const char *module_file;
static bool        quick;
static int         only = -1; /* shape of test_select */
static gpu_world   W;

/* ---- selection: what follows from the scores ------------------------------------------- */

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

static uint64_t mass_of(float score)
{
    return (uint64_t)(score * 0x1p40f);
}

/* How many of the ranked are selected. */
static uint32_t want_count(const index_case *c, const rank *order, uint32_t n, uint32_t k)
{
    uint64_t all = 0, sum = 0, target;
    uint32_t most = k < n ? k : n, i = 0;

    if (c->args.top_p == 0.0f)
        return most;
    for (uint32_t u = 0; u < n; u++)
        all += mass_of(order[u].score);
    target = (uint64_t)((double)all * (double)c->args.top_p);
    target = target ? target : 1;
    while (i < most && sum < target)
        sum += mass_of(order[i++].score);
    return i;
}

static void check_lane(const index_case *c, uint32_t s, uint32_t h, const float *score,
                       const uint16_t *ema, const uint32_t *sel, const kvd_select_result *r)
{
    const uint64_t at    = ((uint64_t)s * c->sh.n_kv_head + h) * c->lane_chunks;
    const uint32_t first = c->sh.first[s], n = c->sh.n_chunk[s] - first;
    rank          *order = kvd_calloc(n + 1, sizeof(*order));
    uint8_t       *in    = kvd_calloc(c->sh.n_chunk[s] + 1, 1); /* 1: selected, 2: urgent */
    uint32_t       k, urgent, out = 0;
    uint64_t       mass = 0;

    for (uint32_t i = 0; i < first; i++)
        assert_true(score[i] == 0.0f);
    for (uint32_t i = 0; i < n; i++) {
        assert_true(score[first + i] >= 0.0f && score[first + i] <= 1.0f);
        order[i] = (rank){ score[first + i], first + i };
    }
    qsort(order, n, sizeof(*order), rank_cmp);
    k      = want_count(c, order, n, case_k(&c->sh, s, h));
    urgent = k < 16 ? k > 0 : k / 8;
    assert_int_equal(r->n_sel, k);
    assert_int_equal(r->n_urgent, urgent);
    for (uint32_t i = 0; i < k; i++) {
        in[order[i].chunk] = i < urgent ? 2 : 1;
        mass += mass_of(order[i].score);
    }
    for (uint32_t i = first; i < c->sh.n_chunk[s]; i++) {
        if (in[i] && sel[out++] != (i | (in[i] == 2 ? KVD_SELECT_URGENT : 0)))
            fail_msg("selected number %u: %x, not %u (%u)", out - 1, sel[out - 1], i, in[i]);
    }
    assert_true(isnan(r->kept) || r->mass == r->kept + (float)((double)mass * 0x1p-40));
    for (uint32_t i = 0; i < c->lane_chunks; i++) {
        uint16_t want = c->ema_was[at + i];

        if (i >= first && i < c->sh.n_chunk[s]) {
            const float old = kvd_f16_to_f32(want) * (1.0f - c->args.alpha);
            const float add = score[i] * (c->args.alpha * 32768.0f);

            want = kvd_f32_to_f16(old + add);
        }
        if (ema[i] != want)
            fail_msg("average of chunk %u: %04x, not %04x", i, ema[i], want);
    }
    kvd_free(order);
    kvd_free(in);
}

/* CASCADE: what was reranked is not seen from outside; the selection must be ref's but for a few.
 */
static void check_cascade(const index_case *c, uint32_t lane, const uint32_t *sel, uint32_t n_sel)
{
    const uint32_t *want   = c->sel + (uint64_t)lane * (c->k_max + 1);
    uint32_t        differ = 0;

    assert_int_equal(n_sel, c->result[lane].n_sel);
    for (uint32_t i = 0; i < n_sel; i++) {
        bool in = false;

        for (uint32_t u = 0; u < n_sel; u++)
            in = in || (want[u] & ~KVD_SELECT_URGENT) == (sel[i] & ~KVD_SELECT_URGENT);
        differ += !in;
    }
    assert_true(differ <= 2 + n_sel / 16);
}

/* ---- selection: scores against ref's ----------------------------------------------------- */

/* |ln(score / want)| of chunks that hold more than 1e-4 of their lane's most. */
typedef struct gap {
    double   sum, worst;
    uint64_t n;
} gap;

static void gap_add(gap *g, const index_case *c, const float *got)
{
    for (uint32_t l = 0; l < c->sh.n_seq * c->sh.n_kv_head; l++) {
        const uint64_t at = (uint64_t)l * c->lane_chunks;
        const uint32_t s = l / c->sh.n_kv_head, first = c->sh.first[s];
        float          most = 1e-30f;

        for (uint32_t i = first; i < c->sh.n_chunk[s]; i++)
            most = c->score[at + i] > most ? c->score[at + i] : most;
        for (uint32_t i = first; i < c->sh.n_chunk[s]; i++) {
            const double d = fabs(log((double)got[at + i] / (double)c->score[at + i]));

            if (!(c->score[at + i] > 1e-4f * most))
                continue;
            g->worst = d > g->worst || isnan(d) ? d : g->worst;
            g->sum += d * d;
            g->n++;
        }
    }
}

/* Binary16 products of codes: a fraction of what the codes themselves lose.  bfloat16 pairs of
 * queries lose 2^-17. */
static double gap_bound(const kvd_index_desc *d)
{
    const bool keys = d->kind == KVD_INDEX_QUANT_K || d->kind == KVD_INDEX_CASCADE;

    return (keys ? d->key_elem : d->elem) == KVD_INDEX_BF16 ? 1e-3 : 6e-3;
}

/* ---- selection: one case on both sides ---------------------------------------------------- */

typedef struct both {
    index_case *c;
    gpu_buf     kv, ix, block, iblock, q, lse, score, ema, sel, k, result, seq;
    uint64_t    far;
} both;

static both both_open(index_case *c, uint64_t far)
{
    const index_shape *sh     = &c->sh;
    const uint64_t     n_lane = (uint64_t)sh->n_seq * sh->n_kv_head;
    both               b      = { .c = c, .far = far };
    kvd_mem            pool   = { .ptr = c->kv.pool, .bytes = c->kv_bytes, .kind = KVD_MEM_HOST };
    kvd_err            err    = { 0 };

    gpu_check(W.dev->ops->mem_alloc(W.dev, KVD_MEM_DEVICE, far + c->kv_bytes, &b.kv.dev, &err),
              &err);
    gpu_check(W.dev->ops->copy(W.st, b.kv.dev, far, pool, 0, c->kv_bytes, &err), &err);
    gpu_check(W.dev->ops->mem_alloc(W.dev, KVD_MEM_DEVICE, far + c->ix_bytes, &b.ix.dev, &err),
              &err);
    b.block  = gpu_over(&W, c->block, c->n_block_all * sizeof(uint64_t));
    b.iblock = gpu_over(&W, c->iblock, c->n_block_all * sizeof(uint64_t));
    gpu_up_far(&W, &b.block, c->n_block_all, far);
    gpu_up_far(&W, &b.iblock, c->n_block_all, far);
    b.q      = gpu_over(&W, c->q, sh->n_seq * c->args.q_stride * sizeof(float));
    b.lse    = gpu_over(&W, c->lse, sh->n_seq * c->args.lse_stride * sizeof(float));
    b.score  = gpu_over(&W, c->score, c->n_lane_chunk * sizeof(float));
    b.ema    = gpu_over(&W, c->ema, c->n_lane_chunk * sizeof(uint16_t));
    b.sel    = gpu_over(&W, c->sel, n_lane * (c->k_max + 1) * sizeof(uint32_t));
    b.k      = gpu_over(&W, c->k, n_lane * sizeof(uint32_t));
    b.result = gpu_over(&W, c->result, n_lane * sizeof(kvd_select_result));
    b.seq    = gpu_over(&W, c->seq, sizeof(c->seq));
    return b;
}

static void both_close(both *b)
{
    gpu_buf *all[] = { &b->kv,    &b->ix,  &b->block, &b->iblock, &b->q,      &b->lse,
                       &b->score, &b->ema, &b->sel,   &b->k,      &b->result, &b->seq };

    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        gpu_over_free(&W, all[i]);
}

/* Inputs, and the sequences with pointers as the device sees them. */
static void both_up(both *b)
{
    index_case    *c = b->c;
    kvd_select_seq seq[CASE_SEQ_MAX];
    gpu_buf        up = b->seq;

    memcpy(c->ema, c->ema_was, c->n_lane_chunk * sizeof(*c->ema));
    gpu_up(&W, &b->ema);
    memset(c->score, 0x7f, c->n_lane_chunk * sizeof(*c->score));
    gpu_up(&W, &b->score);
    gpu_up(&W, &b->q);
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        seq[s]        = c->seq[s];
        seq[s].k      = gpu_at(&b->k, seq[s].k);
        seq[s].iblock = gpu_at(&b->iblock, seq[s].iblock);
        seq[s].score  = gpu_at(&b->score, seq[s].score);
        seq[s].ema    = seq[s].ema ? gpu_at(&b->ema, seq[s].ema) : NULL;
        seq[s].sel    = gpu_at(&b->sel, seq[s].sel);
    }
    up.host = seq;
    gpu_up(&W, &up);
}

static void both_build(both *b)
{
    index_case *c   = b->c;
    kvd_err     err = { 0 };

    assert_int_equal(case_build(c, W.ref, W.ref_st), KVD_OK);
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        kvd_index_build_args a = { .n_block = c->n_block[s],
                                   .kv      = c->kv,
                                   .index   = c->ix,
                                   .block   = gpu_at(&b->block, c->block + c->first_block[s]),
                                   .iblock  = gpu_at(&b->iblock, c->iblock + c->first_block[s]) };

        a.kv.pool    = b->kv.dev.ptr;
        a.index.pool = b->ix.dev.ptr;
        gpu_check(W.dev->ops->index_build(W.st, &a, &err), &err);
    }
    gpu_sync(&W);
}

static void check_index(both *b, size_t shape)
{
    const index_case *c    = b->c;
    uint8_t          *got  = kvd_pages_alloc((size_t)c->ix_bytes);
    kvd_mem           host = { .ptr = got, .bytes = c->ix_bytes, .kind = KVD_MEM_HOST };
    kvd_err           err  = { 0 };

    gpu_check(W.dev->ops->copy(W.st, host, 0, b->ix.dev, b->far, c->ix_bytes, &err), &err);
    gpu_sync(&W);
    for (uint64_t i = 0; i < c->ix_bytes; i++) {
        if (got[i] != ((const uint8_t *)c->ix.pool)[i])
            fail_msg("shape %zu: index byte %llu of %llu: %02x, not %02x", shape,
                     (unsigned long long)i, (unsigned long long)c->ix_bytes, got[i],
                     ((const uint8_t *)c->ix.pool)[i]);
    }
    kvd_pages_free(got, (size_t)c->ix_bytes);
}

/* Device first, so that what ref writes into the case stays. */
static void both_select(both *b)
{
    index_case     *c   = b->c;
    kvd_select_args a   = c->args;
    kvd_err         err = { 0 };

    both_up(b);
    a.seq        = b->seq.dev.ptr;
    a.index.pool = b->ix.dev.ptr;
    a.q          = b->q.dev.ptr;
    a.kept_lse   = b->lse.dev.ptr;
    a.result     = b->result.dev.ptr;
    gpu_check(W.dev->ops->select(W.st, &a, &err), &err);
    gpu_sync(&W);
    assert_int_equal(W.ref->ops->select(W.ref_st, &c->args, NULL), KVD_OK);
}

/* Checks the device's outputs against themselves and ref's. */
static void check_select(both *b, gap *g)
{
    const index_case  *c      = b->c;
    float             *score  = gpu_fetched(&W, &b->score);
    uint16_t          *ema    = gpu_fetched(&W, &b->ema);
    uint32_t          *sel    = gpu_fetched(&W, &b->sel);
    kvd_select_result *result = gpu_fetched(&W, &b->result);

    for (uint32_t l = 0; l < c->sh.n_seq * c->sh.n_kv_head; l++) {
        const uint32_t s    = l / c->sh.n_kv_head;
        const float    diff = fabsf(result[l].kept - c->result[l].kept);

        if (c->sh.desc.kind == KVD_INDEX_CASCADE)
            check_cascade(c, l, sel + (uint64_t)l * (c->k_max + 1), result[l].n_sel);
        else
            check_lane(c, s, l % c->sh.n_kv_head, score + (uint64_t)l * c->lane_chunks,
                       ema + (uint64_t)l * c->lane_chunks, sel + (uint64_t)l * (c->k_max + 1),
                       &result[l]);
        if (!(diff <= 0.02f) && c->sh.first[s] < c->sh.n_chunk[s])
            fail_msg("kept %g, not %g", (double)result[l].kept, (double)c->result[l].kept);
    }
    if (g)
        gap_add(g, c, score);
    kvd_pages_free(score, (size_t)b->score.dev.bytes);
    kvd_pages_free(ema, (size_t)b->ema.dev.bytes);
    kvd_pages_free(sel, (size_t)b->sel.dev.bytes);
    kvd_pages_free(result, (size_t)b->result.dev.bytes);
}

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

/* desc, n_head, n_kv_head, type, kv_chunk, n_seq, n_chunk, first, k */
static const index_shape shapes[] = {
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
    { MEAN(KVD_INDEX_INT4, true, 4, 128), 8, 2, B16, 4, 1, { 9000 }, { 4 }, { 140 } },
    { MEAN(KVD_INDEX_INT4, true, 8, 80), 5, 1, F32, 4, 1, { 165 }, { 2 }, { 11 } },
    { MEAN(KVD_INDEX_INT4, true, 16, 96), 6, 1, B16, 8, 1, { 77 }, { 1 }, { 20 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 256), 4, 1, B16, 4, 1, { 192 }, { 4 }, { 24 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 20), 6, 2, B16, 4, 1, { 100 }, { 3 }, { 9 } },
    { MEAN(KVD_INDEX_INT8, true, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 40 } },
    { MEAN(KVD_INDEX_INT8, false, 8, 80), 7, 1, B16, 8, 1, { 95 }, { 2 }, { 30 } },
    { MEAN(KVD_INDEX_INT8, true, 16, 10), 2, 1, F32, 16, 1, { 31 }, { 1 }, { 5 } },
    { MEAN(KVD_INDEX_BF16, true, 4, 64), 14, 2, B16, 4, 1, { 300 }, { 4 }, { 40 } },
    { MEAN(KVD_INDEX_BF16, false, 16, 72), 3, 3, B16, 4, 2, { 33, 16 }, { 1, 0 }, { 16, 16 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 64), 22, 2, B16, 4, 1, { 200 }, { 4 }, { 20 } },
    { MEAN(KVD_INDEX_BF16, true, 8, 512), 4, 1, F32, 8, 1, { 90 }, { 4 }, { 20 } },
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
    /* nothing to select from, nothing wanted, all wanted */
    { MEAN(KVD_INDEX_INT4, true, 4, 64),
      7,
      1,
      B16,
      4,
      3,
      { 64, 64, 65 },
      { 64, 4, 64 },
      { 9, 0, 9 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 128), 4, 1, B16, 4, 1, { 300 }, { 4 }, { 296 } },
    { MEAN(KVD_INDEX_INT4, true, 4, 128), 4, 1, B16, 4, 1, { 300 }, { 4 }, { 1000 } },
    { KEYS(KVD_INDEX_INT4, 16, 64), 2, 1, B16, 4, 3, { 16, 17, 1 }, { 16, 16, 0 }, { 3, 3, 100 } },
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

static void select_limits(const index_case *c)
{
    const kvd_backend_limits lim = case_limits(c);

    gpu_reserve(&W, &lim);
}

static void check_shape(size_t i, uint64_t far, gap all[2])
{
    index_case c = case_open(&shapes[i], &W.rng);
    both       b;

    c.args.seq = c.seq;
    select_limits(&c);
    b = both_open(&c, far);
    both_build(&b);
    check_index(&b, i);
    for (int rule = 0; rule < KVD_GQA_RULE_COUNT; rule++) {
        gap g = { 0 };

        c.args.rule = (kvd_gqa_rule)rule;
        both_select(&b);
        check_select(&b, &g);
        if (c.sh.desc.kind != KVD_INDEX_CASCADE &&
            !(sqrt(g.sum / (double)(g.n ? g.n : 1)) <= gap_bound(&c.sh.desc)))
            fail_msg("shape %zu, rule %d: scores differ by %.3g rms, %.3g at most", i, rule,
                     sqrt(g.sum / (double)g.n), g.worst);
        if (c.sh.desc.kind != KVD_INDEX_CASCADE) {
            gap *a = &all[gap_bound(&c.sh.desc) > 2e-3];

            a->sum += g.sum;
            a->n += g.n;
            a->worst = fmax(a->worst, g.worst);
        }
    }
    both_close(&b);
    case_close(&c);
}

static void test_select(void **state)
{
    gap all[2] = { 0 };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        if (only >= 0 ? (size_t)only == i : !quick || (shapes[i].n_chunk[0] < 150 && i % 2 == 0))
            check_shape(i, 0, all);
    }
    for (int i = 0; i < 2; i++)
        printf("ln(score) of %s: %.3g rms, %.3g at most\n", i ? "codes" : "BF16",
               sqrt(all[i].sum / (double)(all[i].n ? all[i].n : 1)), all[i].worst);
}

static void test_select_far(void **state)
{
    gap all[2] = { 0 };

    (void)state;
    if (quick)
        skip();
    check_shape(1, GPU_FAR, all);
}

/* All blocks become the first one: every score comes several times. */
static void repeat_block(index_case *c)
{
    for (uint32_t b = 1; b < c->n_block_all; b++) {
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++)
            memcpy(case_key_row(c, b, h, 0), case_key_row(c, 0, h, 0),
                   256 * 2 * c->sh.desc.head_dim * 2);
    }
}

static void test_ties_and_top_p(void **state)
{
    static const index_shape shape = {
        MEAN(KVD_INDEX_INT4, true, 4, 64), 14, 2, B16, 4, 1, { 500 }, { 4 }, { 60 }
    };
    static const float p[] = { 0.0f, 1e-6f, 0.3f, 0.5f, 0.9f, 0.999f };

    (void)state;
    for (int ties = 0; ties < 2; ties++) {
        index_case c = case_open(&shape, &W.rng);
        both       b;

        c.args.seq = c.seq;
        if (ties)
            repeat_block(&c);
        select_limits(&c);
        b = both_open(&c, 0);
        both_build(&b);
        for (size_t i = 0; i < KVD_COUNTOF(p); i++) {
            c.args.top_p = p[i];
            both_select(&b);
            check_select(&b, NULL);
        }
        both_close(&b);
        case_close(&c);
    }
}

/* Queries that are no numbers, and an average that nobody keeps: scores of 0, the lowest chunks. */
static void test_nan(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i += quick ? 15 : 3) {
        index_case c = case_open(&shapes[i], &W.rng);
        both       b;
        float     *score;
        uint32_t  *sel;
        uint16_t  *ema;

        for (uint64_t j = 0; j < c.sh.n_seq * c.args.q_stride; j++)
            c.q[j] = __builtin_nanf("");
        for (uint32_t s = 0; s < c.sh.n_seq; s++)
            c.seq[s].ema = NULL;
        c.args.seq = c.seq;
        select_limits(&c);
        b = both_open(&c, 0);
        both_build(&b);
        both_select(&b);
        score = gpu_fetched(&W, &b.score);
        sel   = gpu_fetched(&W, &b.sel);
        ema   = gpu_fetched(&W, &b.ema);
        assert_memory_equal(ema, c.ema_was, c.n_lane_chunk * sizeof(*ema));
        for (uint32_t s = 0; s < c.sh.n_seq; s++) {
            const uint32_t lane = s * c.sh.n_kv_head;

            for (uint32_t j = 0; j < c.sh.n_chunk[s]; j++)
                assert_true(score[(uint64_t)lane * c.lane_chunks + j] == 0.0f);
            for (uint32_t j = 0; j < c.result[lane].n_sel; j++)
                assert_int_equal(sel[(uint64_t)lane * (c.k_max + 1) + j] & ~KVD_SELECT_URGENT,
                                 c.sh.first[s] + j);
        }
        kvd_pages_free(score, (size_t)b.score.dev.bytes);
        kvd_pages_free(sel, (size_t)b.sel.dev.bytes);
        kvd_pages_free(ema, (size_t)b.ema.dev.bytes);
        both_close(&b);
        case_close(&c);
    }
}

/* ---- attention to the kept set, selection, windows and spans at once --------------------------
 */

/* What choose writes beside what select does, and what it reads. */
typedef struct chain {
    both    *b;
    uint32_t n_lane, slots;
    gpu_buf  cap, slot_of, chunk_of, stamp, stay, fetch, into, change;
    gpu_buf  near, urgent, near_span, urgent_span, part, kept, row, win, place;
} chain;

static void chain_lists(chain *n)
{
    const index_case *c = n->b->c;

    for (uint32_t l = 0; l < n->n_lane; l++) {
        const uint32_t s = l / c->sh.n_kv_head;

        ((uint32_t *)n->cap.host)[l]       = n->slots - l % 3;
        ((kvd_attn_span *)n->kept.host)[l] = (kvd_attn_span){
            .block   = gpu_at(&n->b->block, c->block + c->first_block[s]),
            .end_key = c->sh.first[s] * c->sh.desc.chunk_tokens,
        };
    }
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        const uint64_t l = (uint64_t)s * c->sh.n_kv_head, slots = l * n->slots * 4;
        const uint64_t sel = l * (c->k_max + 1) * 4;

        ((uint32_t *)n->row.host)[s]           = c->seq[s].row;
        ((kvd_window_place *)n->place.host)[s] = (kvd_window_place){
            .block = gpu_at(&n->b->block, c->block + c->first_block[s]),
        };
        ((kvd_window_seq *)n->win.host)[s] = (kvd_window_seq){
            .step     = 3,
            .cap      = gpu_side(&n->cap, true, l * 4),
            .sel      = gpu_side(&n->b->sel, true, sel),
            .ema      = gpu_side(&n->b->ema, true, l * c->lane_chunks * 2),
            .slot_of  = gpu_side(&n->slot_of, true, l * c->lane_chunks * 2),
            .chunk_of = gpu_side(&n->chunk_of, true, slots),
            .stamp    = gpu_side(&n->stamp, true, slots),
            .stay     = gpu_side(&n->stay, true, slots),
            .fetch    = gpu_side(&n->fetch, true, sel),
            .into     = gpu_side(&n->into, true, sel),
        };
    }
}

static chain chain_open(both *b)
{
    const index_case *c = b->c;
    const uint32_t    n = c->sh.n_seq * c->sh.n_kv_head, slots = c->k_max + c->k_max / 2 + 3;
    const uint32_t    group = c->sh.n_head / c->sh.n_kv_head;
    const uint64_t    part  = kvd_attn_part_floats(group, c->sh.desc.head_dim);
    chain             x     = { .b = b, .n_lane = n, .slots = slots };

    x.cap         = gpu_alloc(&W, n * 4ull);
    x.slot_of     = gpu_alloc(&W, c->n_lane_chunk * 2);
    x.chunk_of    = gpu_alloc(&W, (uint64_t)n * slots * 4);
    x.stamp       = gpu_alloc(&W, (uint64_t)n * slots * 4);
    x.stay        = gpu_alloc(&W, (uint64_t)n * slots * 4);
    x.fetch       = gpu_alloc(&W, (uint64_t)n * (c->k_max + 1) * 4);
    x.into        = gpu_alloc(&W, (uint64_t)n * (c->k_max + 1) * 4);
    x.change      = gpu_alloc(&W, n * sizeof(kvd_window_result));
    x.near        = gpu_alloc(&W, (uint64_t)n * slots * 8);
    x.urgent      = gpu_alloc(&W, (uint64_t)n * slots * 8);
    x.near_span   = gpu_alloc(&W, n * sizeof(kvd_attn_span));
    x.urgent_span = gpu_alloc(&W, n * sizeof(kvd_attn_span));
    x.part        = gpu_alloc(&W, n * 4 * part);
    x.kept        = gpu_alloc(&W, n * sizeof(kvd_attn_span));
    x.row         = gpu_alloc(&W, c->sh.n_seq * 4ull);
    x.win         = gpu_alloc(&W, c->sh.n_seq * sizeof(kvd_window_seq));
    x.place       = gpu_alloc(&W, c->sh.n_seq * sizeof(kvd_window_place));
    memset(x.slot_of.host, 0xff, x.slot_of.dev.bytes);
    memset(x.chunk_of.host, 0xff, x.chunk_of.dev.bytes);
    chain_lists(&x);
    return x;
}

#define CHAIN_BUFS 17

static void chain_bufs(chain *n, gpu_buf *all[CHAIN_BUFS])
{
    gpu_buf *b[] = { &n->slot_of, &n->chunk_of,  &n->stamp,       &n->stay, &n->fetch, &n->into,
                     &n->change,  &n->near,      &n->urgent,      &n->part, &n->cap,   &n->kept,
                     &n->row,     &n->near_span, &n->urgent_span, &n->win,  &n->place };

    memcpy(all, b, sizeof(b));
}

static kvd_choose_args chain_args(chain *n, bool selected, kvd_evict_policy policy)
{
    const index_case *c = n->b->c;
    kvd_choose_args   a = { .select = c->args };

    a.select.seq        = n->b->seq.dev.ptr;
    a.select.index.pool = n->b->ix.dev.ptr;
    a.select.q          = n->b->q.dev.ptr;
    a.select.kept_lse   = n->b->lse.dev.ptr;
    a.select.result     = n->b->result.dev.ptr;
    a.kept              = (kvd_attn_span_args){ .n_row      = c->sh.n_seq,
                                                .n_head     = c->sh.n_head,
                                                .kv         = c->kv,
                                                .row        = n->row.dev.ptr,
                                                .span       = n->kept.dev.ptr,
                                                .q_stride   = c->args.q_stride,
                                                .lse_stride = c->args.lse_stride,
                                                .q          = n->b->q.dev.ptr,
                                                .part       = n->part.dev.ptr,
                                                .lse        = n->b->lse.dev.ptr,
                                                .scale      = c->args.scale,
                                                .first      = true };
    a.kept.kv.pool      = n->b->kv.dev.ptr;
    a.window            = (kvd_window_args){ .n_seq       = c->sh.n_seq,
                                             .n_kv_head   = c->sh.n_kv_head,
                                             .seq         = n->win.dev.ptr,
                                             .select      = n->b->result.dev.ptr,
                                             .result      = n->change.dev.ptr,
                                             .lane_stride = c->lane_chunks,
                                             .slot_stride = n->slots,
                                             .sel_stride  = c->k_max + 1,
                                             .policy      = policy };
    a.spans             = (kvd_window_spans_args){ .n_seq       = c->sh.n_seq,
                                                   .n_kv_head   = c->sh.n_kv_head,
                                                   .seq         = n->win.dev.ptr,
                                                   .place       = n->place.dev.ptr,
                                                   .select      = n->b->result.dev.ptr,
                                                   .change      = n->change.dev.ptr,
                                                   .kv          = a.kept.kv,
                                                   .lane_stride = c->lane_chunks,
                                                   .slot_stride = n->slots,
                                                   .sel_stride  = c->k_max + 1,
                                                   .list_stride = n->slots,
                                                   .near        = n->near.dev.ptr,
                                                   .urgent      = n->urgent.dev.ptr,
                                                   .near_span   = n->near_span.dev.ptr,
                                                   .urgent_span = n->urgent_span.dev.ptr,
                                                   .in_place    = true,
                                                   .selected    = selected };
    return a;
}

/* From the same state by one op and by four: the same bytes everywhere, which are the next state.
 */
static void chain_step(chain *n, bool selected, kvd_evict_policy policy)
{
    const kvd_choose_args a = chain_args(n, selected, policy);
    both                 *b = n->b;
    gpu_buf *all[CHAIN_BUFS + 5], *own[] = { &b->score, &b->ema, &b->sel, &b->result, &b->lse };
    void    *one[KVD_COUNTOF(all)];
    kvd_err  err = { 0 };

    chain_bufs(n, all);
    memcpy(all + CHAIN_BUFS, own, sizeof(own));
    for (int way = 0; way < 2; way++) {
        both_up(b);
        for (size_t i = 0; i < CHAIN_BUFS; i++)
            gpu_up(&W, all[i]);
        gpu_up(&W, &b->sel);
        gpu_up(&W, &b->result);
        gpu_up(&W, &b->lse);
        if (way == 0) {
            gpu_check(W.dev->ops->choose(W.st, &a, &err), &err);
        } else {
            gpu_check(W.dev->ops->attn_span(W.st, &a.kept, &err), &err);
            gpu_check(W.dev->ops->select(W.st, &a.select, &err), &err);
            gpu_check(W.dev->ops->window(W.st, &a.window, &err), &err);
            gpu_check(W.dev->ops->window_spans(W.st, &a.spans, &err), &err);
        }
        gpu_sync(&W);
        for (size_t i = 0; way == 0 && i < KVD_COUNTOF(all); i++)
            one[i] = gpu_fetched(&W, all[i]);
    }
    for (size_t i = 0; i < KVD_COUNTOF(all); i++) {
        gpu_down(&W, all[i]);
        if (memcmp(one[i], all[i]->host, all[i]->dev.bytes) != 0)
            fail_msg("choose: buffer %zu differs", i);
        kvd_pages_free(one[i], (size_t)all[i]->dev.bytes);
    }
    memcpy(b->c->ema_was, b->c->ema, b->c->n_lane_chunk * sizeof(*b->c->ema));
}

static void test_choose(void **state)
{
    static const index_shape own[] = {
        { MEAN(KVD_INDEX_INT4, true, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 40 } },
        { MEAN(KVD_INDEX_INT4, true, 4, 128),
          4,
          1,
          B16,
          4,
          3,
          { 64, 9250, 129 },
          { 4, 5, 64 },
          { 16, 900, 7 } },
        { MEAN(KVD_INDEX_BF16, false, 8, 80), 3, 3, F32, 8, 1, { 95 }, { 2 }, { 30 } },
        { KEYS(KVD_INDEX_INT8, 4, 64), 6, 2, B16, 4, 1, { 120 }, { 4 }, { 20 } },
        { KIND(KVD_INDEX_CLUSTER, KVD_INDEX_INT4, 4, 64), 7, 1, B16, 4, 1, { 290 }, { 4 }, { 40 } },
        { CASC(KVD_INDEX_INT4, KVD_INDEX_INT4, 4, 64), 14, 2, B16, 4, 1, { 640 }, { 4 }, { 20 } },
    };

    (void)state;
    for (size_t i = 0; i < (quick ? 1 : KVD_COUNTOF(own)); i++) {
        index_case         c   = case_open(&own[i], &W.rng);
        kvd_backend_limits lim = case_limits(&c);
        both               b;
        chain              n;
        gpu_buf           *all[CHAIN_BUFS];

        c.args.seq = c.seq;
        lim.n_slot = c.k_max * 2 + 3;
        gpu_reserve(&W, &lim);
        b = both_open(&c, 0);
        both_build(&b);
        n = chain_open(&b);
        for (int step = 0; step < 8; step++) {
            for (uint64_t k = 0; k < c.sh.n_seq * c.args.q_stride; k++)
                c.q[k] = step ? 0.7f * c.q[k] + 0.7f * case_normal(&W.rng) : c.q[k];
            c.args.rule  = (kvd_gqa_rule)(step % KVD_GQA_RULE_COUNT);
            c.args.top_p = step > 5 ? 0.5f : 0.0f;
            if (step == 4) /* windows hold chunks that can no longer be selected */
                c.seq[0].first_chunk += c.seq[0].n_chunk / 8;
            chain_step(&n, step % 3 == 2, (kvd_evict_policy)(step / 2 % KVD_EVICT_POLICY_COUNT));
        }
        chain_bufs(&n, all);
        for (size_t k = 0; k < CHAIN_BUFS; k++)
            gpu_free(&W, all[k]);
        both_close(&b);
        case_close(&c);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_select), cmocka_unit_test(test_ties_and_top_p),
        cmocka_unit_test(test_nan),    cmocka_unit_test(test_select_far),
        cmocka_unit_test(test_choose),
    };
    int failed;

    module_file = argc > 1 ? argv[1] : NULL;
    quick       = argc > 2 && strcmp(argv[2], "quick") == 0;
    only        = argc > 2 && !quick ? (int)strtol(argv[2], NULL, 10) : -1;
    if (!gpu_open_with(&W, module_file, false, false))
        return GPU_SKIP;
    if (only >= 0)
        cmocka_set_test_filter("test_select");
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
