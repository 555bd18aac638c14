/* SPDX-License-Identifier: Apache-2.0 */
/* test_schedules.c - sparse steps under every order of their work and every lookup: the same bits,
 * for micro-batches of any size, in whichever order a device's streams get on; after cancellation;
 * and what traces tell of streams.  --backend NAME takes another than the CPU's, apart by split.h.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "support/split.h"
#include "support/tiers.h"
#include "support/tiny.h"

static kvd_err err;

/* A model whose device memory is its own: the one asked for, or the CPU's as such. */
static kvd_model *open_apart(const char *name)
{
    kvd_model *m;

    tiers.deterministic = true;
    m                   = tiers_model(name, tiers.backend);
    tiers.deterministic = false;
    if (m->be->unified)
        split_begin(m->be);
    return m;
}

static void close_apart(kvd_model *m)
{
    tiers.schedule    = KVD_SCHEDULE_SEQUENTIAL;
    tiers.lookup      = KVD_LOOKUP_DEVICE;
    tiers.micro_batch = 0;
    tiers.record      = KVD_KV_RECORD_SAME;
    if (strcmp(tiers.backend, "cpu") == 0)
        split_end(m->be);
    kvd_model_close(m);
}

/* Every schedule and lookup, with and without waiting for all misses: the same text wherever the
 * cache lies, in whichever order streams get on. */
static void test_same_text_schedules(void **state)
{
    kvd_model *m = open_apart("qwen3");

    (void)state;
    for (uint32_t i = 0; i < 16; i++) {
        kvd_attention_params a;

        if (SANITIZED && (i >> 3) != ((i ^ i >> 1 ^ i >> 2) & 1)) /* half, with all pairs in it */
            continue;
        tiers.schedule = i & 1 ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        a              = tiers_sparse(96, 2.0f);
        tiers.lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        a.fetch        = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        split_order(i & 8);
        a.attend     = i & 8 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        a.evict      = i & 8 ? KVD_EVICT_BY_LRU : KVD_EVICT_BY_EMA;
        tiers.record = i & 8 ? KVD_KV_RECORD_INT8 : KVD_KV_RECORD_SAME;
        tiers_same_text(m, &a);
    }
    close_apart(m);
}

static void read_whole(const char *path, kvd_buf *b)
{
    FILE *f = fopen(path, "rb");

    assert_non_null(f);
    for (int c = fgetc(f); c != EOF; c = fgetc(f))
        kvd_buf_putc(b, (char)c);
    fclose(f);
    kvd_buf_putc(b, '\0');
    assert_false(b->oom);
}

/* A span of this name on this thread of a trace. */
static bool has_span(const char *json, const char *name, uint32_t thread)
{
    char want[128];

    snprintf(want, sizeof(want),
             "{\"name\":\"%s\",\"cat\":\"device\",\"ph\":\"X\",\"pid\":1,\"tid\":%u,", name,
             thread);
    return strstr(json, want) != NULL;
}

/* What streams did when, in a trace: misses beside the main stream. */
static void test_trace_of_streams(void **state)
{
    static const char path[] = "test_tiers.trace.json";
    kvd_model        *m      = open_apart("qwen3");
    kvd_buf           b      = { 0 };

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        const bool           elastic = i & 1;
        kvd_attention_params a;
        kvd_session         *s;
        bool                 beside;

        tiers.schedule = elastic ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        tiers.lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        tiers.trace    = path;
        a              = tiers_sparse(96, 2.0f);
        a.fetch        = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        s              = tiers_session(m, &a, 1, true);
        tiers.trace    = NULL;
        tiers_prefill(s, 0, N_PROMPT, 0);
        for (uint32_t k = 0; k < 8; k++) {
            const int32_t token = tiers_next_token(s, 0, k);

            tiers_step(s, &token, 1);
        }
        kvd_session_close(s);
        read_whole(path, &b);
        assert_true(has_span(b.data, "qkv", 2) && has_span(b.data, "select", 2));
        assert_true(has_span(b.data, "attend", 2) && has_span(b.data, "ffn", 2));
        beside = elastic || (tiers.lookup == KVD_LOOKUP_DEVICE && a.fetch == KVD_FETCH_DEFERRED);
        assert_true(has_span(b.data, "fetch", beside ? 3 : 2));
        assert_false(has_span(b.data, "fetch", beside ? 2 : 3));
        assert_int_equal(has_span(b.data, "fetch late", 4), a.fetch == KVD_FETCH_DEFERRED);
        kvd_buf_free(&b);
    }
    remove(path);
    close_apart(m);
}

enum { N_ROW = 5, N_STEP = 26 };

/* Logits of steps of N_ROW sequences, out [N_STEP][N_ROW][N_VOCAB], or compared with it. */
static void rows_of_steps(kvd_model *m, const kvd_attention_params *a, bool spread, float *out,
                          bool compare)
{
    kvd_session *s = tiers_session(m, a, N_ROW, spread);
    kvd_stats    c = { .struct_size = sizeof(c) };

    for (uint32_t q = 0; q < N_ROW; q++)
        tiers_prefill(s, q, 700 + 90 * q, q);
    for (uint32_t i = 0; i < N_STEP; i++) {
        int32_t token[N_ROW];

        for (uint32_t q = 0; q < N_ROW; q++)
            token[q] = tiny_token(q + 5, i);
        tiers_step(s, token, N_ROW);
        for (uint32_t row = 0; row < N_ROW; row++) {
            float *at = out + ((size_t)i * N_ROW + row) * N_VOCAB;

            if (compare)
                assert_memory_equal(at, kvd_logits(s, row), N_VOCAB * sizeof(float));
            else
                memcpy(at, kvd_logits(s, row), N_VOCAB * sizeof(float));
        }
        kv_check(s->kv);
    }
    kvd_session_get_stats(s, &c);
    assert_true(c.n_sparse == N_ROW * N_STEP && c.n_miss > 0 && (!spread || c.bytes_up > 0));
    if (tiers.schedule == KVD_SCHEDULE_ELASTIC &&
        tiers.micro_batch == 0) { /* it has chosen one of 1, 2, 4, 5 */
        assert_int_equal(c.n_micro, 4);
        assert_int_equal(c.micro_rows[3], N_ROW);
        assert_true(c.micro_ms[0] > 0.0 && c.micro_ms[3] > 0.0);
    }
    assert_true(tiers.schedule == KVD_SCHEDULE_SEQUENTIAL ? c.micro_batch == 0 : c.micro_batch > 0);
    kvd_session_close(s);
}

/* Micro-batches of any size: the bits of a step in which all rows go together. */
static void test_micro_batches(void **state)
{
    static const uint32_t size[] = { 0, 3, 1, 2, 9 };
    const uint32_t        n_size = SANITIZED ? 3 : 5;
    kvd_model            *m      = open_apart("llama");
    float                *want   = malloc((size_t)N_STEP * N_ROW * N_VOCAB * sizeof(*want));

    (void)state;
    for (uint32_t strict = 0; strict < 2; strict++) {
        kvd_attention_params a;

        tiers.schedule    = KVD_SCHEDULE_SEQUENTIAL;
        tiers.micro_batch = 0;
        a                 = tiers_sparse(64, 2.0f);
        a.fetch           = strict ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        tiers.lookup      = KVD_LOOKUP_DEVICE;
        rows_of_steps(m, &a, false, want, false);
        tiers.lookup = KVD_LOOKUP_HOST;
        rows_of_steps(m, &a, false, want, true);
        rows_of_steps(m, &a, true, want, true);
        tiers.schedule = a.schedule = KVD_SCHEDULE_ELASTIC;
        for (uint32_t i = 0; i < 2 * n_size; i++) {
            tiers.micro_batch = a.micro_batch = size[i / 2];
            tiers.lookup                      = i % 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
            split_order(i % 3 == 0);
            rows_of_steps(m, &a, i != 2, want, true);
        }
    }
    free(want);
    close_apart(m);
}

static kvd_session           *to_cancel;
static const kvd_backend_ops *plain;

static kvd_status cancel_in_attention(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *e)
{
    kvd_session_cancel(to_cancel);
    return plain->attn_span(st, a, e);
}

/* A step that is canceled between two layers, misses of the first under way: the window starts
 * over, in r, where it was not, too. */
static void cancel_step(kvd_session *r, kvd_session *t, int32_t token)
{
    kvd_backend    *be   = t->model->be;
    const uint32_t  len  = kvd_seq_len(t, 0);
    kvd_batch       b    = KVD_BATCH_INIT;
    kvd_backend_ops hook = *be->ops;

    plain          = be->ops;
    to_cancel      = t;
    hook.attn_span = cancel_in_attention;
    b.n_token      = 1;
    b.token        = &token;
    be->ops        = &hook;
    assert_int_equal(kvd_eval(t, &b, &err), KVD_E_CANCELED);
    be->ops = plain;
    assert_int_equal(kvd_seq_len(t, 0), len);
    kv_check(t->kv);
    kv_seq_restart(r->kv, 0);
    assert_int_equal(kvd_seq_truncate(r, 0, len - 1, &err), KVD_OK);
    assert_int_equal(kvd_seq_truncate(t, 0, len - 1, &err), KVD_OK);
    tiers_step(r, &token, 1);
    tiers_step(t, &token, 1);
    tiers_same_logits(r, t, 0);
}

/* Traced, so that no step is recorded: those are canceled as a whole. */
static void test_canceled_schedules(void **state)
{
    static const char path[] = "test_tiers.cancel.json";
    kvd_model        *m      = open_apart("llama");

    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        kvd_attention_params a;
        kvd_session         *r, *t;

        tiers.schedule = i & 1 ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        tiers.lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        a              = tiers_sparse(64, 2.0f);
        a.fetch        = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        r              = tiers_session(m, &a, 1, false);
        tiers.trace    = path;
        t              = tiers_session(m, &a, 1, true);
        tiers.trace    = NULL;
        tiers_prefill(r, 0, 1000, 0);
        tiers_prefill(t, 0, 1000, 0);
        for (uint32_t k = 0; k < 12; k++) {
            const int32_t token = tiny_token(9, k);

            tiers_step(r, &token, 1);
            tiers_step(t, &token, 1);
            tiers_same_logits(r, t, 0);
            if (k % 5 == 3)
                cancel_step(r, t, token);
            if (k == 6) { /* another schedule while the session is open */
                a.schedule = KVD_SCHEDULE_SEQUENTIAL;
                assert_int_equal(kvd_session_set_attention(r, &a, &err), KVD_OK);
                a.schedule    = KVD_SCHEDULE_ELASTIC;
                a.micro_batch = i & 1;
                assert_int_equal(kvd_session_set_attention(t, &a, &err), KVD_OK);
            }
        }
        kvd_session_close(r);
        kvd_session_close(t);
    }
    remove(path);
    close_apart(m);
}

/* As kvdrive.h says: no size is tried that would make more micro-batches. */
static void test_micro_batches_max(void **state)
{
    (void)state;
    for (uint32_t rows = 1; rows <= 64; rows *= 2) {
        assert_true(kv_micro_batch_fits(KVD_MICRO_BATCHES_MAX * rows, rows));
        assert_false(kv_micro_batch_fits(KVD_MICRO_BATCHES_MAX * rows + 1, rows));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_text_schedules), cmocka_unit_test(test_micro_batches),
        cmocka_unit_test(test_micro_batches_max),   cmocka_unit_test(test_trace_of_streams),
        cmocka_unit_test(test_canceled_schedules),
    };

    if (argc >= 3 && strcmp(argv[1], "--backend") == 0)
        tiers.backend = argv[2];
    if (argc == 5 && strcmp(argv[3], "--only") == 0)
        cmocka_set_test_filter(argv[4]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
