/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_synth.c - made-up rows and marks of time on a GPU: rows as "ref" makes them.
 * usage: test_cuda_synth MODULE [quick] */
#include "base/half.h"
#include "gpu/gpu_sides.h"

static gpu_world W;

enum { BLOCK = 64, CHUNK = 4 };

/* The largest difference of two numbers, of which a bf16 has 8 bits. */
static double worst_of(gpu_buf *b, bool f32)
{
    void        *got = gpu_fetched(&W, b);
    const size_t n   = (size_t)b->dev.bytes / (f32 ? 4 : 2);
    double       w   = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double x =
            f32 ? (double)((float *)got)[i] : (double)kvd_bf16_to_f32(((uint16_t *)got)[i]);
        const double y =
            f32 ? (double)((float *)b->host)[i] : (double)kvd_bf16_to_f32(((uint16_t *)b->host)[i]);

        w = fmax(w, fabs(x - y) - (f32 ? 0.0 : fabs(y) / 128.0));
    }
    kvd_pages_free(got, (size_t)b->dev.bytes);
    return w;
}

/* Sequences of given rows, the second further behind; what no sequence has stays as it is. */
static void check_rows(uint32_t n_head, uint32_t n_kv, uint32_t dim, const uint32_t *n_row,
                       uint32_t n_seq, bool with_q, bool f32)
{
    const uint64_t row_bytes = (f32 ? 4u : 2u) * dim, lane = BLOCK * 2 * row_bytes;
    const uint32_t n_block = 8;
    kvd_kv_layout  kv      = { .type         = f32 ? KVD_DTYPE_F32 : KVD_DTYPE_BF16,
                               .n_kv_head    = n_kv,
                               .head_dim     = dim,
                               .chunk_tokens = CHUNK,
                               .block_tokens = BLOCK,
                               .record_bytes = 2 * CHUNK * row_bytes,
                               .head_stride  = lane };
    uint32_t       n       = 2;
    gpu_buf        seq     = gpu_alloc(&W, n_seq * sizeof(kvd_kv_seq)), block[2], q, pool;

    for (uint32_t i = 0; i < n_seq; i++)
        n += n_row[i];
    q    = gpu_floats(&W, (uint64_t)n * n_head * dim);
    pool = gpu_alloc(&W, 2 * n_block * n_kv * lane);
    for (uint32_t i = 0; i < 2; i++) {
        block[i] = gpu_alloc(&W, n_block * 8);
        for (uint32_t k = 0; k < n_block; k++)
            ((uint64_t *)block[i].host)[k] = (2 * (uint64_t)k + i) * n_kv * lane;
        gpu_up(&W, &block[i]);
    }
    for (int dev = 1; dev >= 0; dev--) {
        kvd_synth_args a   = { .n_seq    = n_seq,
                               .n_head   = n_head,
                               .n_token  = n - 2,
                               .seq      = gpu_side(&seq, dev, 0),
                               .kv       = kv,
                               .layer    = 5,
                               .stream   = 3,
                               .q_stride = (uint64_t)n_head * dim,
                               .q        = with_q ? gpu_side(&q, dev, 0) : NULL,
                               .reuse    = 0.9f };
        kvd_err        err = { 0 };

        for (uint32_t i = 0, first = 1; i < n_seq; first += n_row[i++])
            ((kvd_kv_seq *)seq.host)[i] = (kvd_kv_seq){ .first_row = first,
                                                        .n_row     = n_row[i],
                                                        .n_past    = 7 + i * 100,
                                                        .block = gpu_side(&block[i % 2], dev, 0) };
        gpu_up(&W, &seq);
        a.kv.pool = gpu_side(&pool, dev, 0);
        gpu_check((dev ? W.dev : W.ref)->ops->synth(dev ? W.st : W.ref_st, &a, &err), &err);
        gpu_sync(&W);
    }
    if (!(worst_of(&q, true) < 1e-5 && worst_of(&pool, f32) < 1e-5)) /* sums of about 1 */
        fail_msg("q differs by %g, K and V by %g", worst_of(&q, true), worst_of(&pool, f32));
    gpu_free(&W, &seq);
    gpu_free(&W, &block[0]);
    gpu_free(&W, &block[1]);
    gpu_free(&W, &q);
    gpu_free(&W, &pool);
}

static void test_rows(void **state)
{
    static const uint32_t one[] = { 1 }, two[] = { 1, 5 }, many[] = { 300 };

    (void)state;
    check_rows(32, 8, 128, one, 1, true, false);
    check_rows(6, 2, 40, two, 2, true, true);
    check_rows(4, 4, 200, many, 1, false, false);
    check_rows(4, 1, 64, many, 0, true, true); /* none */
}

/* Times do not go back, and are nanoseconds. */
static void test_times(void **state)
{
    gpu_buf        at    = gpu_alloc(&W, 3 * sizeof(uint64_t));
    gpu_buf        some  = gpu_alloc(&W, 256 << 20);
    const uint64_t begun = kvd_now_ns();
    uint64_t      *t     = at.host, took;
    kvd_err        err   = { 0 };

    (void)state;
    for (int i = 0; i < 3; i++) {
        if (i == 2)
            gpu_check(W.dev->ops->fill(W.st, some.dev, 0, 0, some.dev.bytes, 1, 1, &err), &err);
        gpu_check(W.dev->ops->stamp(W.st, (uint64_t *)gpu_side(&at, true, 0) + i, &err), &err);
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
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rows), cmocka_unit_test(test_times) };
    int                     failed;

    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
