/* SPDX-License-Identifier: Apache-2.0 */
/* test_span.c - attention over spans at every level against "ref", against attention over
 * everything, and against itself with other threads; record copies.
 *
 * --seed N repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attn_case.h"

#define REL_MAX     1e-5 /* of the largest output: what one pass and several may differ by */
#define N_CALL      3    /* spans per lane: kept, window, urgent */
#define N_SINK_RECS 2

static uint64_t test_seed = 1;

static const attn_shape shapes[] = {
    /* n_head, n_kv_head, head_dim, chunk, type, n_seq, n_past, n_row: one new token each */
    { 3, 3, 64, 4, KVD_DTYPE_BF16, 1, { 300 }, { 1 } },
    { 14, 2, 64, 4, KVD_DTYPE_BF16, 2, { 3000, 77 }, { 1, 1 } },
    { 8, 1, 128, 8, KVD_DTYPE_BF16, 1, { 9000 }, { 1 } },
    { 8, 2, 96, 16, KVD_DTYPE_F32, 3, { 1000, 63, 513 }, { 1, 1, 1 } },
    { 6, 2, 10, 8, KVD_DTYPE_BF16, 1, { 333 }, { 1 } },
    { 22, 2, 80, 4, KVD_DTYPE_F32, 1, { 700 }, { 1 } },
    { 4, 1, 64, 4, KVD_DTYPE_BF16, 1, { 40000 }, { 1 } },
};

/* All chunks of a sequence, dealt at random to three spans; the last tokens stay in blocks. */
typedef struct span_case {
    attn_case     *c;
    kvd_attn_span *span[N_CALL]; /* [n_seq][n_kv_head] */
    uint64_t      *record;
    uint32_t       row[CASE_SEQ_MAX];
    float         *part, *lse, *out;
    uint64_t       n_out, n_part, n_lse, n_record;
    bool           together; /* the last two spans in one call */
} span_case;

static uint64_t record_at(const attn_case *c, uint32_t seq, uint32_t head, uint32_t chunk)
{
    const uint32_t per = c->kv.block_tokens / c->kv.chunk_tokens;

    return c->seq[seq].block[chunk / per] + c->kv.lane_off + head * c->kv.head_stride +
           (uint64_t)(chunk % per) * c->kv.record_bytes;
}

/* full: the three spans together are all keys; else a third of the chunks is left out. */
static void deal_lane(span_case *s, uint32_t seq, uint32_t head, bool full, uint64_t *at)
{
    const attn_case *c      = s->c;
    const uint32_t   n_key  = c->seq[seq].n_past + 1;
    const uint32_t   sealed = n_key > 80 ? (n_key - 64) / c->kv.chunk_tokens : 0;
    const uint32_t   lane   = seq * c->kv.n_kv_head + head;

    for (uint32_t k = 0; k < N_CALL; k++) {
        kvd_attn_span *p = &s->span[k][lane];

        *p = (kvd_attn_span){ .record = s->record + *at, .block = c->seq[seq].block };
        if (k == 0) {
            p->first_key = sealed * c->kv.chunk_tokens;
            p->end_key   = n_key;
        }
        for (uint32_t i = 0; i < sealed; i++) {
            const bool     sink = i < N_SINK_RECS;
            const uint64_t mine = sink ? 0 : 1 + ((i * 2654435761u + lane) >> 8) % 2;

            if (mine != k || (!full && !sink && i % 3 == 0))
                continue;
            s->record[(*at)++] = record_at(c, seq, head, i);
            p->n_record++;
        }
    }
}

static span_case span_open(attn_case *c, bool full)
{
    const uint64_t lanes = (uint64_t)c->sh.n_seq * c->kv.n_kv_head;
    const uint32_t group = c->sh.n_head / c->kv.n_kv_head;
    span_case      s     = { .c        = c,
                             .n_out    = (uint64_t)c->n_row * c->sh.n_head * c->sh.head_dim,
                             .n_part   = lanes * kvd_attn_part_floats(group, c->sh.head_dim),
                             .n_lse    = (uint64_t)c->n_row * c->sh.n_head,
                             .n_record = lanes * (c->n_ctx / c->kv.chunk_tokens + 1) };
    uint64_t       at    = 0;

    s.record = kvd_malloc(s.n_record * sizeof(uint64_t));
    s.part   = case_floats(s.n_part);
    s.lse    = case_floats(s.n_lse);
    s.out    = case_floats(s.n_out);
    for (uint32_t k = 0; k < N_CALL; k++)
        s.span[k] = kvd_calloc(lanes, sizeof(kvd_attn_span));
    for (uint32_t q = 0; q < c->sh.n_seq; q++) {
        s.row[q] = q;
        for (uint32_t h = 0; h < c->kv.n_kv_head; h++)
            deal_lane(&s, q, h, full, &at);
    }
    return s;
}

static void span_close(span_case *s)
{
    for (uint32_t k = 0; k < N_CALL; k++)
        kvd_free(s->span[k]);
    kvd_free(s->record);
    kvd_pages_free(s->part, s->n_part * sizeof(float));
    kvd_pages_free(s->lse, s->n_lse * sizeof(float));
    kvd_pages_free(s->out, s->n_out * sizeof(float));
}

static void span_run(span_case *s, const char *name, const char *isa, uint32_t n_thread)
{
    const attn_case         *c   = s->c;
    const kvd_backend_params bp  = { .name = name, .cpu_isa = isa, .n_thread = n_thread };
    const kvd_backend_limits lim = case_limits(c);
    kvd_backend             *b   = NULL;
    kvd_stream              *st  = NULL;
    kvd_err                  err = { 0 };

    if (kvd_backend_open(&b, &bp, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(b->ops->stream_open(b, &st, &err), KVD_OK);
    assert_int_equal(b->ops->reserve(b, &lim, &err), KVD_OK);
    memset(s->part, 0x7f, s->n_part * sizeof(float)); /* a first call must not read it */
    for (uint32_t k = 0; k < (s->together ? N_CALL - 1 : N_CALL); k++) {
        const bool               last = k + 1 == (s->together ? N_CALL - 1 : N_CALL);
        const kvd_attn_span_args a    = { .n_row      = c->sh.n_seq,
                                          .n_head     = c->sh.n_head,
                                          .kv         = c->kv,
                                          .row        = s->row,
                                          .span       = s->span[k],
                                          .then       = last && s->together ? s->span[k + 1] : NULL,
                                          .q_stride   = (uint64_t)c->sh.n_head * c->sh.head_dim,
                                          .out_stride = (uint64_t)c->sh.n_head * c->sh.head_dim,
                                          .lse_stride = c->sh.n_head,
                                          .q          = c->q,
                                          .part       = s->part,
                                          .lse        = k == 0 ? s->lse : NULL,
                                          .out        = last ? s->out : NULL,
                                          .scale      = 1.0f / sqrtf((float)c->sh.head_dim),
                                          .first      = k == 0 };

        assert_int_equal(b->ops->attn_span(st, &a, &err), KVD_OK);
    }
    b->ops->stream_close(st);
    kvd_backend_close(b);
}

/* Largest difference of x and y, over the largest y. */
static double worst(const float *x, const float *y, uint64_t n)
{
    double err = 0.0, top = 0.0;

    for (uint64_t i = 0; i < n; i++) {
        err = fmax(err, fabs((double)x[i] - (double)y[i]));
        top = fmax(top, fabs((double)y[i]));
    }
    return err / top;
}

static void check_isa(span_case *s, size_t i, const char *isa, const float *want, const float *lse)
{
    float *one = case_floats(s->n_out);

    span_run(s, "cpu", isa, 1);
    memcpy(one, s->out, s->n_out * sizeof(float));
    if (!(worst(s->out, want, s->n_out) <= REL_MAX) || !(worst(s->lse, lse, s->n_lse) <= REL_MAX))
        fail_msg("shape %zu, %s: %g, lse %g", i, isa, worst(s->out, want, s->n_out),
                 worst(s->lse, lse, s->n_lse));
    span_run(s, "cpu", isa, 2);
    if (memcmp(one, s->out, s->n_out * sizeof(float)) != 0)
        fail_msg("shape %zu, %s: 1 and 2 threads differ", i, isa);
    s->together = true;
    span_run(s, "cpu", isa, 1);
    s->together = false;
    if (memcmp(one, s->out, s->n_out * sizeof(float)) != 0)
        fail_msg("shape %zu, %s: two spans in one call and in two differ", i, isa);
    kvd_pages_free(one, s->n_out * sizeof(float));
}

/* Levels against ref; with all keys dealt out, ref against attention in one pass too. */
static void check_shape(size_t i, bool full, kvd_rng *rng)
{
    attn_case    c    = case_open(shapes[i], rng);
    span_case    s    = span_open(&c, full);
    float       *want = case_floats(s.n_out), *lse = case_floats(s.n_lse);
    kvd_backend *b;
    kvd_stream  *st;

    span_run(&s, "ref", NULL, 1);
    memcpy(want, s.out, s.n_out * sizeof(float));
    memcpy(lse, s.lse, s.n_lse * sizeof(float));
    s.together = true;
    span_run(&s, "ref", NULL, 1);
    s.together = false;
    assert_memory_equal(want, s.out, s.n_out * sizeof(float));
    if (full) {
        const kvd_backend_limits lim = case_limits(&c);

        assert_int_equal(kvd_backend_open(&b, &(kvd_backend_params){ .name = "ref" }, NULL),
                         KVD_OK);
        assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
        assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
        assert_int_equal(case_attn(&c, b, st, c.want), KVD_OK);
        b->ops->stream_close(st);
        kvd_backend_close(b);
        assert_true(worst(want, c.want, s.n_out) <= REL_MAX);
    }
    for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++)
        check_isa(&s, i, os_isa_name((os_isa)isa), want, lse);
    kvd_pages_free(want, s.n_out * sizeof(float));
    kvd_pages_free(lse, s.n_lse * sizeof(float));
    span_close(&s);
    case_close(&c);
}

static void test_spans(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        check_shape(i, true, &rng);
        check_shape(i, false, &rng);
    }
}

/* Nothing kept: the log-sum-exp of no keys is -infinity, and later spans count alone. */
static void test_empty_span(void **state)
{
    kvd_rng   rng;
    attn_case c;
    span_case s;
    float    *want;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    c    = case_open(shapes[0], &rng);
    s    = span_open(&c, true);
    want = case_floats(s.n_out);
    for (uint32_t h = 0; h < c.kv.n_kv_head; h++)
        s.span[0][h] = (kvd_attn_span){ 0 };
    span_run(&s, "ref", NULL, 1);
    memcpy(want, s.out, s.n_out * sizeof(float));
    for (uint64_t i = 0; i < s.n_lse; i++)
        assert_true(isinf(s.lse[i]) && s.lse[i] < 0.0f);
    span_run(&s, "cpu", NULL, 2);
    for (uint64_t i = 0; i < s.n_lse; i++)
        assert_true(isinf(s.lse[i]) && s.lse[i] < 0.0f);
    assert_true(worst(s.out, want, s.n_out) <= REL_MAX);
    kvd_pages_free(want, s.n_out * sizeof(float));
    span_close(&s);
    case_close(&c);
}

#define COPY_N     1000u
#define COPY_BYTES 1024u
static void test_record_copy(void **state)
{
    uint64_t    *src_off = kvd_malloc(COPY_N * sizeof(uint64_t));
    uint64_t    *dst_off = kvd_malloc(COPY_N * sizeof(uint64_t));
    uint8_t     *src = kvd_malloc(COPY_N * COPY_BYTES), *dst = kvd_calloc(COPY_N, COPY_BYTES);
    kvd_backend *b;
    kvd_stream  *st;
    kvd_rng      rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (uint32_t i = 0; i < COPY_N * COPY_BYTES; i++)
        src[i] = (uint8_t)kvd_rng_u64(&rng);
    for (uint32_t i = 0; i < COPY_N; i++) {
        src_off[i] = kvd_rng_below(&rng, COPY_N) * COPY_BYTES;
        dst_off[i] = (uint64_t)((i * 7 + 3) % COPY_N) * COPY_BYTES;
    }
    for (int ref = 0; ref < 2; ref++) {
        const kvd_backend_params   p = { .name = ref ? "ref" : "cpu", .n_thread = ref ? 1 : 2 };
        const kvd_record_copy_args a = { COPY_N, COPY_BYTES, src_off, dst_off, src, dst };

        assert_int_equal(kvd_backend_open(&b, &p, NULL), KVD_OK);
        assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
        memset(dst, 0, COPY_N * COPY_BYTES);
        assert_int_equal(b->ops->record_copy(st, &a, NULL), KVD_OK);
        for (uint32_t i = 0; i < COPY_N; i++)
            assert_memory_equal(dst + dst_off[i], src + src_off[i], COPY_BYTES);
        b->ops->stream_close(st);
        kvd_backend_close(b);
    }
    kvd_free(src_off);
    kvd_free(dst_off);
    kvd_free(src);
    kvd_free(dst);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_spans),
                                        cmocka_unit_test(test_empty_span),
                                        cmocka_unit_test(test_record_copy) };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 0);
    print_message("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
