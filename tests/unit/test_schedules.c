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

enum { N_VOCAB = 264, N_CTX = 4000, N_BATCH = 96, N_PROMPT = 1700, N_GEN = 420 };

static kvd_err       err;
static const char   *fast = "cpu"; /* --backend NAME: another in its place */
static kvd_kv_record record;       /* of all sessions */
static kvd_schedule  schedule;     /* likewise */
static kvd_lookup    lookup;
static uint32_t      micro_batch;
static bool          deterministic; /* of models that are opened */
static const char   *trace;         /* of sessions that are */

static kvd_model *open_model(const char *name, const char *backend)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.n_thread      = 2;
    p.rope_scaling  = KVD_ROPE_LINEAR; /* for the context, not for sense */
    p.rope_factor   = 32.0f;
    p.deterministic = deterministic;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", path, err.msg);
    return m;
}

/* tiers: with the least device memory that is accepted. */
static kvd_session *open_session(kvd_model *m, const kvd_attention_params *a, uint32_t n_seq,
                                 bool tiers)
{
    kvd_session_params p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    kvd_session       *s;

    p.n_ctx      = N_CTX;
    p.n_seq      = n_seq;
    p.n_batch    = N_BATCH;
    p.n_logits   = N_BATCH;
    p.attention  = a;
    p.kv_record  = record;
    p.lookup     = lookup;
    p.trace_path = trace;
    if (tiers) {
        uint64_t lo = 1, hi;

        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
        hi = plan.kv_device_bytes - 1; /* not resident */
        while (lo < hi) {
            p.kv_device = lo + (hi - lo) / 2;
            if (kvd_session_plan(m, &p, &plan, &err) == KVD_OK)
                hi = p.kv_device;
            else
                lo = p.kv_device + 1;
        }
        p.kv_device = lo;
        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
        assert_false(plan.kv_resident);
    }
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

static int32_t token_at(uint32_t seq, uint32_t i)
{
    return (int32_t)((i * 37 + seq * 101 + i * i % 13 + i / 97) % 256);
}

static void prefill(kvd_session *s, uint32_t seq, uint32_t n, uint32_t text)
{
    int32_t       *t  = malloc(n * sizeof(*t));
    const uint32_t at = kvd_seq_len(s, seq);

    for (uint32_t i = 0; i < n; i++)
        t[i] = token_at(text, at + i);
    if (kvd_prefill(s, seq, t, n, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    free(t);
}

/* One token for each of the first n sequences, mixed up. */
static void step(kvd_session *s, const int32_t *token, uint32_t n)
{
    uint32_t  seq[8];
    uint8_t   want[8];
    int32_t   t[8];
    kvd_batch b = KVD_BATCH_INIT;

    for (uint32_t i = 0; i < n; i++) {
        seq[i]  = (i + 1) % n;
        t[i]    = token[seq[i]];
        want[i] = 1;
    }
    b.n_token     = n;
    b.token       = t;
    b.seq         = seq;
    b.want_logits = want;
    if (kvd_eval(s, &b, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

static int32_t best(const float *logits)
{
    int32_t b = 0;

    for (int32_t i = 1; i < N_VOCAB; i++)
        b = logits[i] > logits[b] ? i : b;
    return b;
}

static void same_logits(const kvd_session *a, const kvd_session *b, uint32_t row)
{
    assert_memory_equal(kvd_logits(a, row), kvd_logits(b, row), N_VOCAB * sizeof(float));
}

/* Greedy with logits pushed about, so that a tiny model does not fall into a loop. */
static int32_t next_token(const kvd_session *s, uint32_t row, uint32_t i)
{
    return (best(kvd_logits(s, row)) + (int32_t)(i * 7 % 61)) % 256;
}

/* A long prompt, generation over several sealings, a cut, another prompt, more generation. */
static void same_text(kvd_model *m, const kvd_attention_params *a)
{
    kvd_session *r = open_session(m, a, 1, false), *t = open_session(m, a, 1, true);
    kvd_stats    c = { .struct_size = sizeof(c) };

    prefill(r, 0, N_PROMPT, 0);
    prefill(t, 0, N_PROMPT, 0);
    same_logits(r, t, 0);
    for (uint32_t i = 0; i < 2 * N_GEN; i++) {
        const int32_t token = next_token(r, 0, i);

        if (i == N_GEN) {
            assert_int_equal(kvd_seq_truncate(r, 0, N_PROMPT - 300, &err), KVD_OK);
            assert_int_equal(kvd_seq_truncate(t, 0, N_PROMPT - 300, &err), KVD_OK);
            step(r, &token, 1); /* the window starts over */
            step(t, &token, 1);
            same_logits(r, t, 0);
            prefill(r, 0, 200, 1); /* a prompt over what is held: layer by layer there */
            prefill(t, 0, 200, 1);
        } else {
            step(r, &token, 1);
            step(t, &token, 1);
        }
        same_logits(r, t, 0);
        kv_check(t->kv);
    }
    kvd_session_get_stats(t, &c);
    if (a->mode == KVD_ATTENTION_SPARSE) {
        assert_true(c.n_sparse > N_GEN && c.n_miss > 0 && c.n_evicted > 0 && c.bytes_up > 0);
        assert_true(c.mass > 0.0 && c.mass <= 1.0001);
    } else {
        assert_true(c.n_sparse == 0 && c.bytes_dense > 0);
    }
    assert_true(c.n_grown_blocks > 0);
    kvd_session_close(r);
    kvd_session_close(t);
}

static kvd_attention_params sparse(uint32_t budget, float cap)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;

    a.mode        = KVD_ATTENTION_SPARSE;
    a.budget      = budget;
    a.cap         = cap;
    a.min_mass    = -1.0f;
    a.schedule    = schedule;
    a.micro_batch = micro_batch;
    return a;
}

/* A model whose device memory is its own: the one asked for, or the CPU's as such. */
static kvd_model *open_apart(const char *name)
{
    kvd_model *m;

    deterministic = true;
    m             = open_model(name, fast);
    deterministic = false;
    if (m->be->unified)
        split_begin(m->be);
    return m;
}

static void close_apart(kvd_model *m)
{
    schedule    = KVD_SCHEDULE_SEQUENTIAL;
    lookup      = KVD_LOOKUP_DEVICE;
    micro_batch = 0;
    record      = KVD_KV_RECORD_SAME;
    if (strcmp(fast, "cpu") == 0)
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

        schedule = i & 1 ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        a        = sparse(96, 2.0f);
        lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        a.fetch  = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        split_order(i & 8);
        a.attend = i & 8 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        a.evict  = i & 8 ? KVD_EVICT_BY_LRU : KVD_EVICT_BY_EMA;
        record   = i & 8 ? KVD_KV_RECORD_INT8 : KVD_KV_RECORD_SAME;
        same_text(m, &a);
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

        schedule = elastic ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        trace    = path;
        a        = sparse(96, 2.0f);
        a.fetch  = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        s        = open_session(m, &a, 1, true);
        trace    = NULL;
        prefill(s, 0, N_PROMPT, 0);
        for (uint32_t k = 0; k < 8; k++) {
            const int32_t token = next_token(s, 0, k);

            step(s, &token, 1);
        }
        kvd_session_close(s);
        read_whole(path, &b);
        assert_true(has_span(b.data, "qkv", 2) && has_span(b.data, "select", 2));
        assert_true(has_span(b.data, "attend", 2) && has_span(b.data, "ffn", 2));
        assert_true(has_span(b.data, "fetch", elastic ? 3 : 2));
        assert_false(has_span(b.data, "fetch", elastic ? 2 : 3));
        assert_int_equal(has_span(b.data, "fetch late", 4), a.fetch == KVD_FETCH_DEFERRED);
        kvd_buf_free(&b);
    }
    remove(path);
    close_apart(m);
}

enum { N_ROW = 5, N_STEP = 26 };

/* Logits of steps of N_ROW sequences, out [N_STEP][N_ROW][N_VOCAB], or compared with it. */
static void rows_of_steps(kvd_model *m, const kvd_attention_params *a, bool tiers, float *out,
                          bool compare)
{
    kvd_session *s = open_session(m, a, N_ROW, tiers);
    kvd_stats    c = { .struct_size = sizeof(c) };

    for (uint32_t q = 0; q < N_ROW; q++)
        prefill(s, q, 700 + 90 * q, q);
    for (uint32_t i = 0; i < N_STEP; i++) {
        int32_t token[N_ROW];

        for (uint32_t q = 0; q < N_ROW; q++)
            token[q] = token_at(q + 5, i);
        step(s, token, N_ROW);
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
    assert_true(c.n_sparse == N_ROW * N_STEP && c.n_miss > 0 && (!tiers || c.bytes_up > 0));
    if (schedule == KVD_SCHEDULE_ELASTIC &&
        micro_batch == 0) { /* it has chosen one of 1, 2, 4, 5 */
        assert_int_equal(c.n_micro, 4);
        assert_int_equal(c.micro_rows[3], N_ROW);
        assert_true(c.micro_ms[0] > 0.0 && c.micro_ms[3] > 0.0);
    }
    assert_true(schedule == KVD_SCHEDULE_SEQUENTIAL ? c.micro_batch == 0 : c.micro_batch > 0);
    kvd_session_close(s);
}

/* Micro-batches of any size: the bits of a step in which all rows go together. */
static void test_micro_batches(void **state)
{
    static const uint32_t size[] = { 1, 2, 3, 0, 9 };
    kvd_model            *m      = open_apart("llama");
    float                *want   = malloc((size_t)N_STEP * N_ROW * N_VOCAB * sizeof(*want));

    (void)state;
    for (uint32_t strict = 0; strict < 2; strict++) {
        kvd_attention_params a;

        schedule    = KVD_SCHEDULE_SEQUENTIAL;
        micro_batch = 0;
        a           = sparse(64, 2.0f);
        a.fetch     = strict ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        lookup      = KVD_LOOKUP_DEVICE;
        rows_of_steps(m, &a, false, want, false);
        lookup = KVD_LOOKUP_HOST;
        rows_of_steps(m, &a, false, want, true);
        rows_of_steps(m, &a, true, want, true);
        schedule = a.schedule = KVD_SCHEDULE_ELASTIC;
        for (uint32_t i = 0; i < 2 * KVD_COUNTOF(size); i++) {
            micro_batch = a.micro_batch = size[i / 2];
            lookup                      = i % 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
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
    step(r, &token, 1);
    step(t, &token, 1);
    same_logits(r, t, 0);
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

        schedule = i & 1 ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        lookup   = i & 2 ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        a        = sparse(64, 2.0f);
        a.fetch  = i & 4 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        r        = open_session(m, &a, 1, false);
        trace    = path;
        t        = open_session(m, &a, 1, true);
        trace    = NULL;
        prefill(r, 0, 1000, 0);
        prefill(t, 0, 1000, 0);
        for (uint32_t k = 0; k < 12; k++) {
            const int32_t token = token_at(9, k);

            step(r, &token, 1);
            step(t, &token, 1);
            same_logits(r, t, 0);
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_text_schedules),
        cmocka_unit_test(test_micro_batches),
        cmocka_unit_test(test_trace_of_streams),
        cmocka_unit_test(test_canceled_schedules),
    };

    if (argc >= 3 && strcmp(argv[1], "--backend") == 0)
        fast = argv[2];
    if (argc == 5 && strcmp(argv[3], "--only") == 0)
        cmocka_set_test_filter(argv[4]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
