/* SPDX-License-Identifier: Apache-2.0 */
/* test_zone.c - attention to cells of the estimation zone, behind a span, at every level against
 * "ref", and "ref" against a computation in double; where each cell is one token, against
 * attention.
 *
 * Cells are the first tokens of a sequence, the span is the rest of them.
 * --seed N repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attn_case.h"

#define REL_MAX 3e-5 /* of the largest output; 40,000 sums of floats without FMA reach 1e-5 */

static uint64_t test_seed = 1;

static const attn_shape shapes[] = {
    /* n_head, n_kv_head, head_dim, chunk, type, n_seq, n_past, n_row: one new token each */
    { 3, 3, 64, 4, KVD_DTYPE_BF16, 1, { 300 }, { 1 } },
    { 14, 2, 64, 256, KVD_DTYPE_BF16, 2, { 3000, 77 }, { 1, 1 } },
    { 8, 1, 128, 16, KVD_DTYPE_BF16, 1, { 9000 }, { 1 } },
    { 8, 2, 96, 1, KVD_DTYPE_F32, 3, { 1000, 63, 513 }, { 1, 1, 1 } },
    { 6, 2, 10, 8, KVD_DTYPE_BF16, 1, { 333 }, { 1 } },
    { 22, 2, 80, 256, KVD_DTYPE_F32, 1, { 700 }, { 1 } },
    { 4, 1, 64, 64, KVD_DTYPE_BF16, 1, { 40000 }, { 1 } },
};

typedef enum left_kind { LEFT_RANDOM, LEFT_NONE, LEFT_ONE, LEFT_FAR, LEFT_KINDS } left_kind;

typedef struct zone_case {
    attn_case     *c;
    uint32_t       n_cell[CASE_SEQ_MAX], row[CASE_SEQ_MAX], n_cell_max;
    kvd_attn_span *span; /* [n_seq][n_kv_head] */
    kvd_zone_seq  *seq;  /* [n_seq] */
    uint16_t      *left; /* [n_seq][n_kv_head][n_cell_max] */
    float         *part, *lse, *out;
    uint64_t       n_out, n_part, n_lse;
} zone_case;

/* Element i of token t's K or V row for a query head of a sequence. */
static double element(const attn_case *c, uint32_t s, uint32_t head, uint32_t t, uint32_t i,
                      bool v_row)
{
    const uint32_t per = c->kv.chunk_tokens, in = t % c->kv.block_tokens;
    const uint64_t row = (uint64_t)(in % per) + (v_row ? per : 0);
    const uint8_t *at  = (const uint8_t *)c->kv.pool + c->seq[s].block[t / c->kv.block_tokens] +
                        c->kv.lane_off +
                        head / (c->sh.n_head / c->sh.n_kv_head) * c->kv.head_stride +
                        in / per * c->kv.record_bytes + row * (c->kv.record_bytes / (2 * per));

    if (c->sh.type == KVD_DTYPE_F32)
        return (double)((const float *)(const void *)at)[i];
    return (double)kvd_bf16_to_f32(((const uint16_t *)(const void *)at)[i]);
}

static double logit(const attn_case *c, uint32_t s, uint32_t head, uint32_t t)
{
    const float *q   = c->q + ((uint64_t)s * c->sh.n_head + head) * c->sh.head_dim;
    double       sum = 0.0;

    for (uint32_t i = 0; i < c->sh.head_dim; i++)
        sum += (double)q[i] * element(c, s, head, t, i, false);
    return sum / sqrt((double)c->sh.head_dim);
}

/* FAR: the cell that every query of the lane likes best has nothing left. */
static void fill_left(zone_case *z, left_kind kind, kvd_rng *rng)
{
    const attn_case *c     = z->c;
    const uint32_t   group = c->sh.n_head / c->sh.n_kv_head;

    for (uint32_t lane = 0; lane < c->sh.n_seq * c->sh.n_kv_head; lane++) {
        const uint32_t s = lane / c->sh.n_kv_head, h = lane % c->sh.n_kv_head;
        uint16_t      *left = z->left + (uint64_t)lane * z->n_cell_max;

        for (uint32_t t = 0; t < z->n_cell[s]; t++)
            left[t] =
                (uint16_t)(kind == LEFT_NONE  ? 0
                           : kind == LEFT_ONE ? 1
                                              : kvd_rng_below(rng, 4) * kvd_rng_below(rng, 86));
        for (uint32_t i = 0; i < group && kind == LEFT_FAR && z->n_cell[s] > 0; i++) {
            uint32_t best = 0;

            for (uint32_t t = 1; t < z->n_cell[s]; t++)
                best = logit(c, s, h * group + i, t) > logit(c, s, h * group + i, best) ? t : best;
            left[best] = 0;
        }
    }
}

static zone_case zone_open(attn_case *c, uint32_t spare)
{
    const uint32_t group = c->sh.n_head / c->sh.n_kv_head;
    const uint64_t lanes = (uint64_t)c->sh.n_seq * c->sh.n_kv_head;
    zone_case      z     = { .c          = c,
                             .n_cell_max = c->n_ctx,
                             .span       = kvd_calloc(lanes, sizeof(*z.span)),
                             .seq        = kvd_calloc(c->sh.n_seq, sizeof(*z.seq)),
                             .left       = kvd_calloc(lanes * c->n_ctx, sizeof(*z.left)),
                             .n_out      = (uint64_t)c->n_row * c->sh.n_head * c->sh.head_dim,
                             .n_part     = lanes * kvd_attn_part_floats(group, c->sh.head_dim),
                             .n_lse      = (uint64_t)c->n_row * c->sh.n_head };

    z.part = case_floats(z.n_part);
    z.lse  = case_floats(z.n_lse);
    z.out  = case_floats(z.n_out);
    for (uint32_t s = 0; s < c->sh.n_seq; s++) {
        const uint32_t  n    = c->seq[s].n_past + 1;
        const uint16_t *left = z.left + (uint64_t)s * c->sh.n_kv_head * z.n_cell_max;

        z.row[s]    = s;
        z.n_cell[s] = n > spare ? n - spare : 1;
        z.seq[s]    = (kvd_zone_seq){ z.n_cell[s], c->seq[s].block, left };
        for (uint32_t h = 0; h < c->sh.n_kv_head; h++)
            z.span[s * c->sh.n_kv_head + h] =
                (kvd_attn_span){ .block = c->seq[s].block, .first_key = z.n_cell[s], .end_key = n };
    }
    return z;
}

static void zone_close(zone_case *z)
{
    kvd_free(z->span);
    kvd_free(z->seq);
    kvd_free(z->left);
    kvd_pages_free(z->part, z->n_part * sizeof(float));
    kvd_pages_free(z->lse, z->n_lse * sizeof(float));
    kvd_pages_free(z->out, z->n_out * sizeof(float));
}

static void zone_run(zone_case *z, const char *name, const char *isa, uint32_t n_thread, bool cells)
{
    const attn_case         *c      = z->c;
    const uint64_t           stride = (uint64_t)c->sh.n_head * c->sh.head_dim;
    const kvd_backend_params bp     = { .name = name, .cpu_isa = isa, .n_thread = n_thread };
    const kvd_backend_limits lim    = case_limits(c);
    const float              scale  = 1.0f / sqrtf((float)c->sh.head_dim);
    const kvd_attn_span_args span   = { .n_row      = c->sh.n_seq,
                                        .n_head     = c->sh.n_head,
                                        .kv         = c->kv,
                                        .row        = z->row,
                                        .span       = z->span,
                                        .q_stride   = stride,
                                        .out_stride = stride,
                                        .lse_stride = c->sh.n_head,
                                        .q          = c->q,
                                        .part       = z->part,
                                        .lse        = cells ? NULL : z->lse,
                                        .out        = cells ? NULL : z->out,
                                        .scale      = scale,
                                        .first      = true };
    const kvd_attn_zone_args zone   = { .n_row       = c->sh.n_seq,
                                        .n_head      = c->sh.n_head,
                                        .n_cell_max  = z->n_cell_max,
                                        .zone        = c->kv,
                                        .row         = z->row,
                                        .seq         = z->seq,
                                        .q_stride    = stride,
                                        .out_stride  = stride,
                                        .lse_stride  = c->sh.n_head,
                                        .left_stride = z->n_cell_max,
                                        .q           = c->q,
                                        .part        = z->part,
                                        .lse         = z->lse,
                                        .out         = z->out,
                                        .scale       = scale };
    kvd_backend             *b;
    kvd_stream              *st;

    assert_int_equal(kvd_backend_open(&b, &bp, NULL), KVD_OK);
    assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    assert_int_equal(b->ops->attn_span(st, &span, NULL), KVD_OK);
    if (cells)
        assert_int_equal(b->ops->attn_zone(st, &zone, NULL), KVD_OK);
    b->ops->stream_close(st);
    kvd_backend_close(b);
}

static double worst(const float *x, const float *y, uint64_t n)
{
    double err = 0.0, top = 0.0;

    for (uint64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return INFINITY;
        err = fmax(err, fabs((double)x[i] - (double)y[i]));
        top = fmax(top, fabs((double)y[i]));
    }
    return err / top;
}

/* One query head in double: output and log-sum-exp. */
static void naive_head(const zone_case *z, uint32_t s, uint32_t head, double *acc, float *lse)
{
    const attn_case *c    = z->c;
    const uint32_t   lane = s * c->sh.n_kv_head + head / (c->sh.n_head / c->sh.n_kv_head);
    const uint16_t  *left = z->left + (uint64_t)lane * z->n_cell_max;
    double           sum = 0.0, shift = logit(c, s, head, c->seq[s].n_past);

    memset(acc, 0, c->sh.head_dim * sizeof(*acc));
    for (uint32_t t = 0; t <= c->seq[s].n_past; t++) {
        const double n = t < z->n_cell[s] ? left[t] : 1.0;
        const double p = n * exp(logit(c, s, head, t) - shift);

        sum += p;
        for (uint32_t i = 0; i < c->sh.head_dim && n > 0.0; i++)
            acc[i] += p * element(c, s, head, t, i, true);
    }
    for (uint32_t i = 0; i < c->sh.head_dim; i++)
        acc[i] /= sum;
    *lse = (float)(shift + log(sum));
}

static void check_ref(const zone_case *z)
{
    const attn_case *c   = z->c;
    float           *out = case_floats(z->n_out), *lse = case_floats(z->n_lse);
    double           acc[KVD_HEAD_DIM_MAX];

    for (uint32_t i = 0; i < z->n_lse; i++) {
        naive_head(z, i / c->sh.n_head, i % c->sh.n_head, acc, &lse[i]);
        for (uint32_t d = 0; d < c->sh.head_dim; d++)
            out[(uint64_t)i * c->sh.head_dim + d] = (float)acc[d];
    }
    assert_true(worst(z->out, out, z->n_out) <= REL_MAX);
    assert_true(worst(z->lse, lse, z->n_lse) <= REL_MAX);
    kvd_pages_free(out, z->n_out * sizeof(float));
    kvd_pages_free(lse, z->n_lse * sizeof(float));
}

static void check_isas(zone_case *z, size_t shape, left_kind kind)
{
    float *want = case_floats(z->n_out), *lse = case_floats(z->n_lse), *one = case_floats(z->n_out);

    memcpy(want, z->out, z->n_out * sizeof(float));
    memcpy(lse, z->lse, z->n_lse * sizeof(float));
    for (int i = OS_ISA_PORTABLE; i <= (int)os_cpu_get()->isa; i++) {
        const char *isa = os_isa_name((os_isa)i);

        zone_run(z, "cpu", isa, 1, true);
        memcpy(one, z->out, z->n_out * sizeof(float));
        if (!(worst(one, want, z->n_out) <= REL_MAX) || !(worst(z->lse, lse, z->n_lse) <= REL_MAX))
            fail_msg("shape %zu, left %d, %s: %g, lse %g", shape, (int)kind, isa,
                     worst(one, want, z->n_out), worst(z->lse, lse, z->n_lse));
        zone_run(z, "cpu", isa, 2, true);
        if (memcmp(one, z->out, z->n_out * sizeof(float)) != 0)
            fail_msg("shape %zu, left %d, %s: 1 and 2 threads differ", shape, (int)kind, isa);
        if (kind != LEFT_NONE)
            continue;
        zone_run(z, "cpu", isa, 2, false); /* cells with nothing left change no bit */
        assert_memory_equal(one, z->out, z->n_out * sizeof(float));
    }
    kvd_pages_free(want, z->n_out * sizeof(float));
    kvd_pages_free(lse, z->n_lse * sizeof(float));
    kvd_pages_free(one, z->n_out * sizeof(float));
}

/* Each token a cell that stands for itself: attention over everything. */
static void check_exact(zone_case *z)
{
    attn_case               *c   = z->c;
    const kvd_backend_limits lim = case_limits(c);
    kvd_backend             *b;
    kvd_stream              *st;

    assert_int_equal(kvd_backend_open(&b, &(kvd_backend_params){ .name = "ref" }, NULL), KVD_OK);
    assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    assert_int_equal(case_attn(c, b, st, c->want), KVD_OK);
    b->ops->stream_close(st);
    kvd_backend_close(b);
    assert_true(worst(z->out, c->want, z->n_out) <= REL_MAX);
}

/* Cells are all tokens but `spare`. */
static void check_shape(size_t shape, uint32_t spare, kvd_rng *rng)
{
    attn_case c = case_open(shapes[shape], rng);
    zone_case z = zone_open(&c, spare);

    for (left_kind kind = 0; kind < LEFT_KINDS; kind++) {
        if (kind == LEFT_NONE && spare == 0)
            continue; /* nothing to attend to */
        fill_left(&z, kind, rng);
        zone_run(&z, "ref", NULL, 1, true);
        check_ref(&z);
        if (kind == LEFT_ONE)
            check_exact(&z);
        check_isas(&z, shape, kind);
    }
    zone_close(&z);
    case_close(&c);
}

static void test_cells(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        check_shape(i, 0, &rng);
        check_shape(i, 45, &rng);
        check_shape(i, UINT32_MAX, &rng); /* one cell */
    }
}

/* A sequence without cells keeps what it has; one cell that is far off, taken or not, harms none.
 */
static void test_edges(void **state)
{
    kvd_rng   rng;
    attn_case c;
    zone_case z;
    float    *want;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c    = case_open(shapes[3], &rng);
    z    = zone_open(&c, 20);
    want = case_floats(z.n_out);
    zone_run(&z, "cpu", NULL, 2, false);
    memcpy(want, z.out, z.n_out * sizeof(float));
    for (uint32_t s = 0; s < c.sh.n_seq; s++)
        z.seq[s].n_cell = 0;
    zone_run(&z, "cpu", NULL, 2, true);
    assert_memory_equal(z.out, want, z.n_out * sizeof(float));
    for (uint32_t s = 0; s < c.sh.n_seq; s++)
        z.seq[s].n_cell = 3;
    fill_left(&z, LEFT_RANDOM, &rng);
    for (uint64_t i = 0; i < z.n_out; i++)
        c.q[i] *= 200.0f; /* logits of some hundreds: what is taken must not count by rounding */
    zone_run(&z, "ref", NULL, 1, true);
    memcpy(want, z.out, z.n_out * sizeof(float));
    zone_run(&z, "cpu", NULL, 2, true);
    assert_true(worst(z.out, want, z.n_out) <= 1e-3);
    kvd_pages_free(want, z.n_out * sizeof(float));
    zone_close(&z);
    case_close(&c);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_cells),
                                        cmocka_unit_test(test_edges) };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 0);
    print_message("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
