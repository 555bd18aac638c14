/* SPDX-License-Identifier: Apache-2.0 */
/* test_engine.c - sessions on tiny models: batches, limits, cancellation, growth and cutting back.
 *
 * "Same" means the same bits: in the reference backend, and in a deterministic one, a token's
 * logits must not depend on what else is in the batch or on how a prompt was cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"

#define N_VOCAB 264

static kvd_err err;

static kvd_model *open_model(const char *name, const char *backend, bool deterministic)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.deterministic = deterministic;
    p.n_thread      = 2;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", path, err.msg);
    return m;
}

static kvd_session *open_session(kvd_model *m, uint32_t n_ctx, uint32_t n_seq, uint32_t n_batch,
                                 uint32_t n_logits)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;
    kvd_session       *s;

    p.n_ctx    = n_ctx;
    p.n_seq    = n_seq;
    p.n_batch  = n_batch;
    p.n_logits = n_logits;
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

/* A text of its own for each sequence. */
static int32_t token_at(uint32_t seq, uint32_t i)
{
    return (int32_t)((i * 37 + seq * 101 + i * i % 13) % 256);
}

static void prefill(kvd_session *s, uint32_t seq, uint32_t n, uint32_t text)
{
    int32_t        t[256];
    const uint32_t at = kvd_seq_len(s, seq);

    for (uint32_t i = 0; i < n; i++)
        t[i] = token_at(text, at + i);
    if (kvd_prefill(s, seq, t, n, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* Logits after n tokens of a text, alone, in one batch: what everything else is compared with. */
static void alone(kvd_model *m, uint32_t text, uint32_t n, float *out)
{
    kvd_session *s = open_session(m, n, 1, n, 1);

    prefill(s, 0, n, text);
    memcpy(out, kvd_logits(s, 0), N_VOCAB * sizeof(float));
    kvd_session_close(s);
}

static void same_in_any_batch(const char *name, const char *backend, bool deterministic)
{
    static const uint32_t len[3] = { 1, 17, 40 };
    kvd_model            *m      = open_model(name, backend, deterministic);
    kvd_session          *s      = open_session(m, 64, 3, 64, 3);
    float                 want[N_VOCAB];
    int32_t               token[64];
    uint32_t              seq[64], n = 0;
    uint8_t               wanted[64] = { 0 };
    kvd_batch             b          = KVD_BATCH_INIT;

    for (uint32_t i = 0; i < 40; i++) { /* interleaved: 0 1 2 1 2 1 2 ... 2 2 2 */
        for (uint32_t q = 0; q < 3; q++) {
            if (i >= len[q])
                continue;
            token[n]  = token_at(q, i);
            seq[n]    = q;
            wanted[n] = i + 1 == len[q];
            n++;
        }
    }
    b.n_token     = n;
    b.token       = token;
    b.seq         = seq;
    b.want_logits = wanted;
    if (kvd_eval(s, &b, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    for (uint32_t q = 0; q < 3; q++) { /* logits come in the order of the batch: 0, 1, 2 */
        alone(m, q, len[q], want);
        assert_memory_equal(kvd_logits(s, q), want, sizeof(want));
    }
    assert_null(kvd_logits(s, 3));
    for (uint32_t step = 0; step < 5; step++) { /* decode of all three together */
        for (uint32_t q = 0; q < 3; q++) {
            token[q]  = token_at(q, len[q] + step);
            seq[q]    = 2 - q;
            wanted[q] = 1;
        }
        for (uint32_t q = 0; q < 3; q++)
            token[q] = token_at(2 - q, len[2 - q] + step);
        b.n_token = 3;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        for (uint32_t q = 0; q < 3; q++) {
            alone(m, 2 - q, len[2 - q] + step + 1, want);
            assert_memory_equal(kvd_logits(s, q), want, sizeof(want));
        }
    }
    kvd_session_close(s);
    kvd_model_close(m);
}

static void test_same_in_any_batch(void **state)
{
    (void)state;
    same_in_any_batch("llama", "ref", false);
    same_in_any_batch("qwen3", "ref", false);
    same_in_any_batch("llama", "cpu", true);
    same_in_any_batch("qwen2", "cpu", true);
    same_in_any_batch("phi3", "cpu", true);
}

static void same_however_cut(const char *name, const char *backend, bool deterministic)
{
    kvd_model *m = open_model(name, backend, deterministic);
    float      want[N_VOCAB];

    alone(m, 5, 60, want);
    for (uint32_t step = 1; step < 60; step += 1 + step / 3) {
        kvd_session *s = open_session(m, 60, 1, 60, 1);

        for (uint32_t at = 0; at < 60; at += step)
            prefill(s, 0, 60 - at < step ? 60 - at : step, 5);
        assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
        kvd_session_close(s);
    }
    kvd_model_close(m);
}

static void test_same_however_cut(void **state)
{
    (void)state;
    same_however_cut("llama", "ref", false);
    same_however_cut("llama", "cpu", true);
    same_however_cut("qwen3", "cpu", true);
}

static void test_cut_back_and_go_on(void **state)
{
    kvd_model   *m = open_model("llama3-rope", "ref", false);
    kvd_session *s = open_session(m, 100, 1, 32, 1);
    float        want[N_VOCAB];

    (void)state;
    prefill(s, 0, 90, 1);
    assert_int_equal(kvd_seq_truncate(s, 0, 30, &err), KVD_OK);
    prefill(s, 0, 21, 1);
    alone(m, 1, 51, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    assert_int_equal(kvd_seq_truncate(s, 0, 52, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_truncate(s, 1, 0, &err), KVD_E_INVAL);
    kvd_session_close(s);
    kvd_model_close(m);
}

/* The original context of this model is 64: K is rotated anew when the length crosses it. */
static void test_longrope_crossing(void **state)
{
    kvd_model   *m = open_model("phi3-longrope", "ref", false);
    kvd_session *s = open_session(m, 120, 1, 16, 1);
    float        want[N_VOCAB];

    (void)state;
    prefill(s, 0, 60, 2);
    for (uint32_t n = 61; n < 70; n++) { /* upwards, one by one */
        prefill(s, 0, 1, 2);
        alone(m, 2, n, want);
        assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    }
    assert_int_equal(kvd_seq_truncate(s, 0, 50, &err), KVD_OK); /* and back under it */
    prefill(s, 0, 5, 2);
    alone(m, 2, 55, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    prefill(s, 0, 60, 2); /* a prompt in several batches that ends beyond: long from its start */
    alone(m, 2, 115, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    kvd_session_close(s);
    kvd_model_close(m);
}

typedef struct stop_after {
    kvd_session *s;
    int          calls, left;
} stop_after;

static bool count_down(void *ctx, uint64_t done, uint64_t total)
{
    stop_after *c = ctx;

    assert_true(done <= total);
    c->calls++;
    return c->left-- > 0;
}

static void test_cancel_changes_nothing(void **state)
{
    kvd_model   *m = open_model("phi3-longrope", "ref", false);
    kvd_session *s = open_session(m, 120, 1, 8, 1);
    stop_after   c = { .s = s, .left = 3 };
    float        want[N_VOCAB];
    int32_t      t[80];
    kvd_batch    b = KVD_BATCH_INIT;

    (void)state;
    for (uint32_t i = 0; i < 80; i++)
        t[i] = token_at(3, 40 + i);
    prefill(s, 0, 40, 3);
    assert_int_equal(kvd_prefill(s, 0, t, 50, count_down, &c, &err), KVD_E_CANCELED);
    assert_int_equal(c.calls, 4);
    assert_int_equal(kvd_seq_len(s, 0), 40);

    b.n_token = 1;
    b.token   = t;
    kvd_session_cancel(
        s); /* its tokens were rotated with the long factors: the rebuild is cut off */
    assert_int_equal(kvd_eval(s, &b, &err), KVD_E_CANCELED);
    assert_int_equal(kvd_seq_len(s, 0), 40);
    assert_int_equal(kvd_eval(s, &b, &err), KVD_OK); /* the request was consumed */
    alone(m, 3, 41, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));

    kvd_session_cancel(s); /* too late for an evaluation: forgotten when asked to */
    assert_true(kvd_session_uncancel(s));
    assert_false(kvd_session_uncancel(s));
    assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
    kvd_session_close(s);
    kvd_model_close(m);
}

static void expect_refusal(kvd_session *s, const kvd_batch *b, kvd_status code, const char *part)
{
    const uint32_t len = kvd_seq_len(s, 0);

    memset(&err, 0, sizeof(err));
    assert_int_equal(kvd_eval(s, b, &err), code);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not say '%s'", err.msg, part);
    assert_int_equal(kvd_seq_len(s, 0), len);
}

static void test_limits(void **state)
{
    kvd_model         *m      = open_model("llama", "ref", false);
    kvd_session       *s      = open_session(m, 40, 2, 16, 2);
    const int32_t      bad_id = N_VOCAB, good = 5;
    const uint32_t     bad_seq = 2;
    const uint8_t      want[3] = { 1, 1, 1 };
    int32_t            t[64]   = { 0 };
    kvd_batch          b       = KVD_BATCH_INIT;
    kvd_session_params p       = KVD_SESSION_PARAMS_INIT;
    kvd_session       *none;

    (void)state;
    prefill(s, 0, 39, 0);
    b.n_token = 17;
    b.token   = t;
    expect_refusal(s, &b, KVD_E_INVAL, "1 to 16");
    b.n_token = 0;
    expect_refusal(s, &b, KVD_E_INVAL, "0 tokens");
    b.n_token = 2;
    expect_refusal(s, &b, KVD_E_FULL, "context is 40");
    b.n_token = 1;
    b.token   = &bad_id;
    expect_refusal(s, &b, KVD_E_INVAL, "264");
    b.token = &good;
    b.seq   = &bad_seq;
    expect_refusal(s, &b, KVD_E_INVAL, "sequence 2 of 2");
    b.seq         = NULL;
    b.token       = t;
    b.n_token     = 3;
    b.want_logits = want;
    expect_refusal(s, &b, KVD_E_INVAL, "logits of 3");
    assert_int_equal(kvd_prefill(s, 0, t, 2, NULL, NULL, &err), KVD_E_FULL);
    assert_int_equal(kvd_prefill(s, 9, t, 2, NULL, NULL, &err), KVD_E_INVAL);
    kvd_session_close(s);

    p.n_ctx = 129; /* the model has 128 */
    assert_int_equal(kvd_session_open(&none, m, &p, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "129"));
    assert_non_null(strstr(err.msg, "128"));
    assert_null(none);
    kvd_model_close(m);
}

/* The pool is shared: when one sequence takes it all, the other is refused and neither changes. */
static void test_full_pool_isolates(void **state)
{
    kvd_model         *m = open_model("llama", "ref", false);
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;
    float              want[N_VOCAB];
    kvd_session       *s;
    int32_t            t = 1;

    (void)state;
    p.n_ctx     = 128;
    p.n_seq     = 2;
    p.kv_tokens = 256; /* one block */
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    prefill(s, 0, 50, 0);
    assert_int_equal(kvd_prefill(s, 1, &t, 1, NULL, NULL, &err), KVD_E_FULL);
    assert_int_equal(kvd_seq_len(s, 1), 0);
    prefill(s, 0, 3, 0);
    alone(m, 0, 53, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    assert_int_equal(kvd_seq_truncate(s, 0, 0, &err), KVD_OK);
    prefill(s, 1, 20, 1);
    alone(m, 1, 20, want);
    assert_memory_equal(kvd_logits(s, 0), want, sizeof(want));
    kvd_session_close(s);
    kvd_model_close(m);
}

static void test_struct_sizes(void **state)
{
    struct {
        kvd_session_params p;
        uint64_t           later; /* a field of a future header */
    } big            = { .p = KVD_SESSION_PARAMS_INIT };
    kvd_model     *m = open_model("llama", "ref", false);
    kvd_model_info info;
    kvd_session   *s;

    (void)state;
    big.p.n_ctx       = 32;
    big.p.struct_size = sizeof(big);
    assert_int_equal(kvd_session_open(&s, m, &big.p, &err), KVD_OK);
    kvd_session_close(s);
    big.later = 1;
    assert_int_equal(kvd_session_open(&s, m, &big.p, &err), KVD_E_UNSUPPORTED);
    big.p.struct_size = offsetof(kvd_session_params, n_batch); /* an older header */
    assert_int_equal(kvd_session_open(&s, m, &big.p, &err), KVD_OK);
    kvd_session_close(s);
    big.p.struct_size = 3;
    assert_int_equal(kvd_session_open(&s, m, &big.p, &err), KVD_E_INVAL);

    memset(&info, 0x55, sizeof(info));
    info.struct_size = offsetof(kvd_model_info, n_layer);
    kvd_model_get_info(m, &info);
    assert_string_equal(info.arch, "llama");
    assert_int_equal(info.n_layer, 0x55555555); /* not written */
    kvd_model_close(m);
}

/* The heap a session takes is what its plan says, within 1 % and the allocator's rounding. */
static void plan_is_what_is_taken(kvd_model *m, uint32_t n_parked)
{
    kvd_session_params p      = KVD_SESSION_PARAMS_INIT;
    kvd_plan           plan   = { .struct_size = sizeof(plan) };
    const uint64_t     before = kvd_alloc_bytes(), rss = os_rss_anon();
    kvd_session       *s;
    uint64_t           grown;

    p.n_ctx     = 128;
    p.n_seq     = 64;
    p.kv_tokens = 1 << 17;
    p.n_parked  = n_parked;
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    grown = os_rss_anon() - rss;
    assert_true(grown <=
                (plan.kv_bytes + plan.scratch_bytes + plan.host_bytes) * 103 / 100 + (32 << 20));
    assert_true(grown + (4 << 20) >= plan.kv_bytes); /* the pool is really there */
    assert_true(kvd_alloc_bytes() - before <= plan.host_bytes + (64 << 10));
    assert_int_equal(plan.n_parked, n_parked < 512 ? n_parked : 512); /* a block each at least */
    kvd_session_close(s);
}

static void test_plan_is_what_is_taken(void **state)
{
    kvd_model *m = open_model("qwen3", "cpu", false);

    (void)state;
    plan_is_what_is_taken(m, 0);
    plan_is_what_is_taken(m, 300);
    plan_is_what_is_taken(m, 5000);
    kvd_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_in_any_batch),      cmocka_unit_test(test_same_however_cut),
        cmocka_unit_test(test_cut_back_and_go_on),     cmocka_unit_test(test_longrope_crossing),
        cmocka_unit_test(test_cancel_changes_nothing), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_full_pool_isolates),     cmocka_unit_test(test_struct_sizes),
        cmocka_unit_test(test_plan_is_what_is_taken),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
