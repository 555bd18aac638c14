/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_synth.c - made-up rows and marks of time on a GPU: rows as "ref" makes them.
 * usage: test_cuda_synth MODULE [quick] */
#include "gpu/gpu_sides.h"

static gpu_world W;

/* Sequences of given rows, the second further behind; rows that no sequence has stay as they are.
 */
static void check_rows(uint32_t n_head, uint32_t n_kv, uint32_t dim, const uint32_t *n_row,
                       uint32_t n_seq, bool with_q)
{
    uint32_t n = 2;
    gpu_buf  seq, q, k, v;
    double   worst = 0.0;

    for (uint32_t i = 0; i < n_seq; i++)
        n += n_row[i];
    seq = gpu_alloc(&W, n_seq * sizeof(kvd_kv_seq));
    q   = gpu_floats(&W, (uint64_t)n * n_head * dim);
    k   = gpu_floats(&W, (uint64_t)n * n_kv * dim);
    v   = gpu_floats(&W, (uint64_t)n * n_kv * dim);
    for (uint32_t i = 0, first = 1; i < n_seq; first += n_row[i++])
        ((kvd_kv_seq *)seq.host)[i] =
            (kvd_kv_seq){ .first_row = first, .n_row = n_row[i], .n_past = 7 + i * 3000000000u };
    gpu_up(&W, &seq);
    for (int dev = 1; dev >= 0; dev--) {
        const kvd_synth_args a   = { .n_seq     = n_seq,
                                     .n_token   = n - 2,
                                     .seq       = gpu_side(&seq, dev, 0),
                                     .n_head    = n_head,
                                     .n_kv_head = n_kv,
                                     .head_dim  = dim,
                                     .layer     = 5,
                                     .stream    = 3,
                                     .q_stride  = (uint64_t)n_head * dim,
                                     .k_stride  = (uint64_t)n_kv * dim,
                                     .v_stride  = (uint64_t)n_kv * dim,
                                     .q         = with_q ? gpu_side(&q, dev, 0) : NULL,
                                     .k         = gpu_side(&k, dev, 0),
                                     .v         = gpu_side(&v, dev, 0),
                                     .reuse     = 0.9f };
        kvd_err              err = { 0 };

        gpu_check((dev ? W.dev : W.ref)->ops->synth(dev ? W.st : W.ref_st, &a, &err), &err);
    }
    for (int b = 0; b < 3; b++) {
        const gpu_buf *buf = b == 0 ? &q : b == 1 ? &k : &v;
        const uint64_t m   = (uint64_t)n * (b == 0 ? n_head : n_kv) * dim;
        float         *got = gpu_fetched(&W, buf);

        for (uint64_t i = 0; i < m; i++)
            worst = fmax(worst, fabs((double)got[i] - (double)((float *)buf->host)[i]));
        kvd_pages_free(got, (size_t)buf->dev.bytes);
    }
    if (!(worst < 1e-5)) /* sums of numbers of about 1 */
        fail_msg("rows differ by %g", worst);
    gpu_free(&W, &seq);
    gpu_free(&W, &q);
    gpu_free(&W, &k);
    gpu_free(&W, &v);
}

static void test_rows(void **state)
{
    static const uint32_t one[] = { 1 }, three[] = { 1, 0, 5 }, many[] = { 300 };

    (void)state;
    check_rows(32, 8, 128, one, 1, true);
    check_rows(6, 2, 40, three, 3, true);
    check_rows(4, 4, 200, many, 1, false);
    check_rows(4, 1, 64, many, 0, true); /* none */
}

/* Times do not go back, and are nanoseconds. */
static void test_marks(void **state)
{
    gpu_buf        at    = gpu_alloc(&W, 3 * sizeof(uint64_t));
    gpu_buf        some  = gpu_alloc(&W, 256 << 20);
    const uint64_t begun = kvd_now_ns();
    uint64_t      *t     = at.host, took;
    kvd_err        err   = { 0 };

    (void)state;
    for (int i = 0; i < 3; i++) {
        const kvd_mark_args a = { (uint64_t *)gpu_side(&at, true, 0) + i };

        if (i == 2)
            gpu_check(W.dev->ops->fill(W.st, some.dev, 0, 0, some.dev.bytes, 1, 1, &err), &err);
        gpu_check(W.dev->ops->mark(W.st, &a, &err), &err);
    }
    gpu_sync(&W);
    took = kvd_now_ns() - begun;
    gpu_down(&W, &at);
    assert_true(t[0] > 0 && t[0] <= t[1] && t[1] < t[2]);
    assert_true(t[2] - t[1] > 20000 && t[2] - t[0] < took); /* 256 MiB in 20 us: 13 TB/s */
    gpu_free(&W, &at);
    gpu_free(&W, &some);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rows), cmocka_unit_test(test_marks) };
    int                     failed;

    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
