/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv.c - the KV store against a flat array.
 *
 * Random operations on several sequences; the model keeps for each sequence the stamps of its
 * tokens.  Rows are written through the backend's append with the stamp in every element and read
 * back through the layout, so blocks that were handed out twice, lost or mixed up show as a wrong
 * stamp.  kv_check() recounts after every step. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "kv/kv.h"

enum { N_LAYER = 2, N_KV = 3, HEAD = 8, N_SEQ = 4, N_CTX = 1500, N_TOKEN = 4000, N_STEP = 1500 };

static uint64_t seed;

typedef struct flat {
    uint32_t len[N_SEQ];
    float    stamp[N_SEQ][N_CTX];
} flat;

static float row_value(const kv_store *s, uint32_t layer, uint32_t head, uint32_t seq, uint32_t t,
                       bool v_row)
{
    const kvd_kv_layout l   = kv_layout(s, layer);
    const uint8_t      *rec = (const uint8_t *)l.pool + kv_seq_blocks(s, seq)[t / l.block_tokens] +
                         l.lane_off + head * l.head_stride +
                         (t % l.block_tokens) / l.chunk_tokens * l.record_bytes;
    const uint32_t row = t % l.chunk_tokens + (v_row ? l.chunk_tokens : 0);
    uint16_t       h;
    float          f;

    if (l.type == KVD_DTYPE_F32) {
        memcpy(&f, rec + (size_t)row * l.head_dim * 4, 4);
        return f;
    }
    memcpy(&h, rec + (size_t)row * l.head_dim * 2, 2);
    return kvd_bf16_to_f32(h);
}

/* Writes n rows for a sequence: K is the stamp, V its negative, plus the lane's number. */
static void write_rows(kvd_backend *be, kvd_stream *st, kv_store *s, uint32_t seq,
                       const float *stamp, uint32_t n)
{
    const kvd_kv_seq part = { .n_row  = n,
                              .n_past = kv_seq_len(s, seq),
                              .block  = kv_seq_blocks(s, seq) };
    float *k = calloc((size_t)n * N_KV * HEAD, sizeof(*k)), *v = calloc((size_t)n * N_KV * HEAD, 4);

    for (uint32_t il = 0; il < N_LAYER; il++) {
        kvd_kv_append_args a = { .n_seq    = 1,
                                 .seq      = &part,
                                 .kv       = kv_layout(s, il),
                                 .k_stride = N_KV * HEAD,
                                 .v_stride = N_KV * HEAD,
                                 .k        = k,
                                 .v        = v };

        for (uint32_t i = 0; i < n * N_KV * HEAD; i++) {
            k[i] = stamp[i / (N_KV * HEAD)];
            v[i] = -k[i];
        }
        assert_int_equal(be->ops->kv_append(st, &a, NULL), KVD_OK);
    }
    free(k);
    free(v);
}

static void compare(const kv_store *s, const flat *f)
{
    uint64_t used = 0;

    for (uint32_t q = 0; q < N_SEQ; q++) {
        assert_int_equal(kv_seq_len(s, q), f->len[q]);
        used += f->len[q];
        for (uint32_t t = 0; t < f->len[q]; t += 1 + t % 7) {
            const uint32_t il = t % N_LAYER, h = t % N_KV;

            assert_true(row_value(s, il, h, q, t, false) == f->stamp[q][t]);
            assert_true(row_value(s, il, h, q, t, true) == -f->stamp[q][t]);
        }
    }
    assert_int_equal(kv_used_tokens(s), used);
}

static void random_walk(kvd_dtype type)
{
    const kv_params          p  = { .n_layer   = N_LAYER,
                                    .n_kv_head = N_KV,
                                    .head_dim  = HEAD,
                                    .n_seq     = N_SEQ,
                                    .n_ctx     = N_CTX,
                                    .n_token   = N_TOKEN,
                                    .type      = type };
    const kvd_backend_params bp = { .name = "ref" };
    kvd_backend             *be;
    kvd_stream              *st;
    kv_store                *s;
    kvd_rng                  r;
    flat                    *f    = calloc(1, sizeof(*f));
    uint32_t                 next = 1, n_full = 0;

    kvd_rng_seed(&r, seed);
    assert_int_equal(kvd_backend_open(&be, &bp, NULL), KVD_OK);
    assert_int_equal(be->ops->stream_open(be, &st, NULL), KVD_OK);
    assert_int_equal(kv_store_open(&s, be, &p, NULL), KVD_OK);
    for (int step = 0; step < N_STEP; step++) {
        const uint32_t q = (uint32_t)kvd_rng_below(&r, N_SEQ);
        const uint32_t n = (uint32_t)kvd_rng_below(&r, step % 3 ? 40 : 600);
        float          stamp[600];

        if (kvd_rng_below(&r, 10) < 2) {
            const uint32_t keep = (uint32_t)kvd_rng_below(&r, f->len[q] + 1);

            kv_seq_truncate(s, q, keep);
            f->len[q] = keep;
        } else if (kv_seq_reserve(s, q, n, NULL) == KVD_OK) {
            assert_true(f->len[q] + n <= N_CTX);
            for (uint32_t i = 0; i < n; i++)
                stamp[i] = (float)(next++ % 256); /* exact in bf16 */
            write_rows(be, st, s, q, stamp, n);
            if (kvd_rng_below(&r, 5) == 0) { /* the evaluation failed */
                kv_seq_release(s, q);
            } else {
                kv_seq_commit(s, q, n);
                memcpy(f->stamp[q] + f->len[q], stamp, n * sizeof(float));
                f->len[q] += n;
            }
        } else {
            n_full++;
        }
        kv_check(s);
        if (step % 50 == 0)
            compare(s, f);
    }
    compare(s, f);
    assert_true(n_full > 0); /* the walk reached the limits */
    kv_store_close(s);
    be->ops->stream_close(st);
    kvd_backend_close(be);
    free(f);
}

static void test_random_walk_bf16(void **state)
{
    (void)state;
    random_walk(KVD_DTYPE_BF16);
}

static void test_random_walk_f32(void **state)
{
    (void)state;
    random_walk(KVD_DTYPE_F32);
}

static void test_limits_are_named(void **state)
{
    const kv_params          p  = { .n_layer   = 1,
                                    .n_kv_head = 1,
                                    .head_dim  = 16,
                                    .n_seq     = 2,
                                    .n_ctx     = 1024,
                                    .n_token   = 1024,
                                    .type      = KVD_DTYPE_BF16 };
    const kvd_backend_params bp = { .name = "ref" };
    kvd_backend             *be;
    kv_store                *s;
    kvd_err                  err = { 0 };

    (void)state;
    assert_int_equal(kvd_backend_open(&be, &bp, NULL), KVD_OK);
    assert_int_equal(kv_store_open(&s, be, &p, NULL), KVD_OK);
    assert_int_equal(kv_seq_reserve(s, 0, 1025, &err), KVD_E_FULL);
    assert_non_null(strstr(err.msg, "1024"));
    assert_int_equal(kv_seq_reserve(s, 0, 600, &err), KVD_OK);
    kv_seq_commit(s, 0, 600);
    assert_int_equal(kv_seq_reserve(s, 1, 300, &err), KVD_E_FULL); /* two blocks, one is free */
    assert_non_null(strstr(err.msg, "sequence 1"));
    kv_check(s);
    kv_seq_truncate(s, 0, 0);
    assert_int_equal(kv_seq_reserve(s, 1, 1024, &err), KVD_OK);
    kv_store_close(s);
    kvd_backend_close(be);
}

static void test_plan_refuses_what_wraps(void **state)
{
    const kv_params p = { .n_layer   = 1024,
                          .n_kv_head = 4096,
                          .head_dim  = 1024,
                          .n_seq     = 4096,
                          .n_ctx     = 1u << 30,
                          .n_token   = UINT64_MAX / 2,
                          .type      = KVD_DTYPE_BF16 };
    kv_sizes        sz;
    kvd_err         err = { 0 };

    (void)state;
    assert_int_equal(kv_plan(&p, &sz, &err), KVD_E_INVAL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walk_bf16),
        cmocka_unit_test(test_random_walk_f32),
        cmocka_unit_test(test_limits_are_named),
        cmocka_unit_test(test_plan_refuses_what_wraps),
    };

    seed = argc == 3 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 0)
                                                       : (uint64_t)time(NULL);
    printf("seed %llu (--seed N repeats)\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
