/* SPDX-License-Identifier: Apache-2.0 */
/* test_tiers.c - sessions on tiny models with their KV cache on several tiers: the same bits as
 * with everything resident, dense and sparse, alone and in batches, after cuts and after
 * cancellation. */
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

enum { N_MIXED = 4 };

static kvd_err err;

static void test_same_text_dense(void **state)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_model           *m = tiers_model("llama", tiers.backend);

    (void)state;
    a.mode = KVD_ATTENTION_DENSE;
    tiers_same_text(m, &a);
    kvd_model_close(m);
}

static void test_same_text_sparse(void **state)
{
    kvd_model *m = tiers_model("qwen3", tiers.backend);

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        kvd_attention_params a = tiers_sparse(64 + 40 * i, i % 2 ? 4.0f : 2.0f);

        a.fetch  = i % 2 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        a.attend = i == 2 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        a.evict  = (kvd_evict)i;
        tiers_same_text(m, &a);
    }
    kvd_model_close(m);
}

static void test_same_text_other_indexes(void **state)
{
    static const char *const name[] = { "mean-bf16", "mean-std", "box",
                                        "cluster",   "quant-k",  "cascade+radius" };
    kvd_model               *m      = tiers_model("qwen2", tiers.backend);

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(name); i++) {
        kvd_attention_params a = tiers_sparse(96, 2.0f);

        a.index = name[i];
        tiers_same_text(m, &a);
    }
    kvd_model_close(m);
}

/* Packed records: wherever they lie, everything works with what they say. */
static void test_same_text_packed(void **state)
{
    kvd_attention_params a = tiers_sparse(96, 2.0f), d = KVD_ATTENTION_PARAMS_INIT;
    kvd_model           *m = tiers_model("qwen3", tiers.backend), *r = tiers_model("llama", "ref");

    (void)state;
    d.mode = KVD_ATTENTION_DENSE;
    for (tiers.record = KVD_KV_RECORD_INT8; tiers.record <= KVD_KV_RECORD_VALUES; tiers.record++) {
        tiers_same_text(m, &a);
        tiers_same_text(m, &d);
        if (!SANITIZED)
            tiers_same_text(r, &a);
    }
    tiers.record = KVD_KV_RECORD_SAME;
    kvd_model_close(m);
    kvd_model_close(r);
}

/* Records without K, whatever index has it: in bf16 nothing is lost, so all is as with whole
 * records; another index is refused, before and while the session is open. */
static void test_values(void **state)
{
    static const char *const name[] = { "quant-k-int8", "quant-k-int2", "cascade+radius" };
    kvd_attention_params     a      = tiers_sparse(96, 2.0f);
    kvd_model               *m      = tiers_model("qwen2", tiers.backend);
    kvd_session             *whole, *values;
    kvd_stats                u = { .struct_size = sizeof(u) }, v = u;

    (void)state;
    a.index      = "quant-k-bf16";
    whole        = tiers_session(m, &a, 1, true);
    tiers.record = KVD_KV_RECORD_VALUES;
    values       = tiers_session(m, &a, 1, true);
    tiers_prefill(whole, 0, N_PROMPT, 0);
    tiers_prefill(values, 0, N_PROMPT, 0);
    for (uint32_t i = 0; i < N_GEN; i++) {
        const int32_t token = tiers_next_token(whole, 0, i);

        tiers_same_logits(whole, values, 0);
        tiers_step(whole, &token, 1);
        tiers_step(values, &token, 1);
    }
    kvd_session_get_stats(whole, &u);
    kvd_session_get_stats(values, &v);
    assert_true(v.bytes_up > 0 && u.bytes_up == 2 * v.bytes_up);
    a.index = "mean";
    assert_int_equal(kvd_session_set_attention(values, &a, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "quant-k"));
    a.index = "quant-k";
    assert_int_equal(kvd_session_set_attention(values, &a, &err), KVD_E_INVAL);
    kvd_session_close(whole);
    kvd_session_close(values);
    for (size_t i = 0; i < KVD_COUNTOF(name); i++) {
        a.index = name[i];
        tiers_same_text(m, &a);
    }
    tiers.record = KVD_KV_RECORD_SAME;
    kvd_model_close(m);
}

/* Cells stand for what is not attended: the same text wherever the cache lies. */
static void test_same_text_zone(void **state)
{
    static const uint32_t zone[] = { 4, 16, 256 };
    kvd_model *m = tiers_model("qwen3", tiers.backend), *ref = tiers_model("llama", "ref");

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(zone); i++) {
        kvd_attention_params a = tiers_sparse(64, 2.0f);

        a.zone       = zone[i];
        a.fetch      = i == 2 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        a.attend     = i == 1 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        tiers.record = i == 0 ? KVD_KV_RECORD_INT8 : KVD_KV_RECORD_SAME;
        tiers_same_text(m, &a);
        tiers.record = KVD_KV_RECORD_SAME;
        if (i == 1 && !SANITIZED)
            tiers_same_text(ref, &a);
    }
    kvd_model_close(m);
    kvd_model_close(ref);
}

/* Sum of squared differences of the logits of n steps from r's. */
static double steps_apart(kvd_session *s, kvd_session *r, uint32_t n)
{
    double sum = 0.0;

    for (uint32_t i = 0; i < n; i++) {
        const int32_t token = tiny_token(3, i);

        tiers_step(s, &token, 1);
        tiers_step(r, &token, 1);
        for (uint32_t k = 0; k < N_VOCAB; k++) {
            const double d = (double)kvd_logits(s, 0)[k] - (double)kvd_logits(r, 0)[k];

            sum += d * d;
        }
    }
    assert_int_equal(kvd_seq_truncate(s, 0, N_PROMPT, &err), KVD_OK);
    assert_int_equal(kvd_seq_truncate(r, 0, N_PROMPT, &err), KVD_OK);
    return sum;
}

/* Cells bring a small budget nearer to exact attention, the nearer the smaller they are; they are
 * turned off and on while a session is open, in the size it was opened for. */
static void test_zone_estimates(void **state)
{
    kvd_attention_params a = tiers_sparse(32, 1.0f), d = KVD_ATTENTION_PARAMS_INIT;
    kvd_model           *m    = tiers_model("llama", tiers.backend);
    double               last = 0.0;
    kvd_session         *s, *r;

    (void)state;
    d.mode = KVD_ATTENTION_DENSE;
    r      = tiers_session(m, &d, 1, false);
    tiers_prefill(r, 0, N_PROMPT, 0);
    for (uint32_t zone = 4; zone <= 64; zone *= 4) {
        kvd_stats c = { .struct_size = sizeof(c) };
        double    with, without;

        a.zone = zone;
        s      = tiers_session(m, &a, 1, true);
        tiers_prefill(s, 0, N_PROMPT, 0);
        with = steps_apart(s, r, 30);
        kvd_session_get_stats(s, &c);
        assert_true(c.zone_share > 0.01 && c.zone_share < 1.0 && c.zone_ns > 0);
        a.zone = 0;
        assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_OK);
        without = steps_apart(s, r, 30);
        a.zone  = zone;
        assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_OK);
        assert_true(steps_apart(s, r, 30) == with);
        if (!(with < without) || !(with > last))
            fail_msg("cells of %u: %g apart, %g without, %g before", zone, with, without, last);
        last   = with;
        a.zone = 2 * zone;
        assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_E_INVAL);
        assert_non_null(strstr(err.msg, "estimation zone"));
        kvd_session_close(s);
    }
    a.zone = 24;
    assert_int_equal(kvd_session_set_attention(r, &a, &err), KVD_E_INVAL);
    kvd_session_close(r);
    kvd_model_close(m);
}

/* The same on a device whose memory the host cannot touch. */
static void test_same_text_split(void **state)
{
    kvd_attention_params a = tiers_sparse(96, 2.0f), d = KVD_ATTENTION_PARAMS_INIT;
    kvd_model           *m = tiers_model("qwen3", "cpu");

    (void)state;
    d.mode = KVD_ATTENTION_DENSE;
    split_begin(m->be);
    tiers_same_text(m, &a);
    tiers_same_text(m, &d);
    tiers.record = KVD_KV_RECORD_INT8;
    a.attend     = KVD_ATTEND_SELECTED;
    tiers_same_text(m, &a);
    tiers.record  = KVD_KV_RECORD_SAME;
    tiers.n_batch = 0; /* prompts in larger pieces than batches */
    tiers_same_text(m, &a);
    tiers.n_batch = N_BATCH;
    split_end(m->be);
    kvd_model_close(m);
}

/* n caps that differ from lane to lane, or do not. */
static uint32_t fill_caps(const kvd_model *m, float *cap, bool differ)
{
    const model_hparams *hp = model_get_hparams(m->net);

    for (uint32_t i = 0; i < hp->n_layer * hp->n_kv_head; i++)
        cap[i] = differ ? 1.0f + (float)(i * 5 % 7) / 2.0f : 2.0f;
    return hp->n_layer * hp->n_kv_head;
}

static void same_steps(kvd_session *a, kvd_session *b)
{
    tiers_prefill(a, 0, N_PROMPT, 0);
    tiers_prefill(b, 0, N_PROMPT, 0);
    for (uint32_t i = 0; i < 20; i++) {
        const int32_t token = tiny_token(4, i);

        tiers_step(a, &token, 1);
        tiers_step(b, &token, 1);
        tiers_same_logits(a, b, 0);
    }
    kvd_session_close(a);
    kvd_session_close(b);
}

/* Windows of different sizes: the same text on every tier, on both backends; equal ones are no more
 * than the cap for all. */
static void test_caps(void **state)
{
    float                caps[64];
    kvd_attention_params a = tiers_sparse(96, 0.0f), b = tiers_sparse(96, 2.0f);
    kvd_model *m = tiers_model("qwen3", tiers.backend), *ref = tiers_model("llama", "ref");

    (void)state;
    a.caps   = caps;
    a.n_caps = fill_caps(m, caps, true);
    tiers_same_text(m, &a);
    a.n_caps = fill_caps(ref, caps, true);
    if (!SANITIZED) /* the ops of "ref" alone differ */
        tiers_same_text(ref, &a);
    a.n_caps = fill_caps(m, caps, false);
    same_steps(tiers_session(m, &a, 1, true), tiers_session(m, &b, 1, true));
    kvd_model_close(m);
    kvd_model_close(ref);
}

/* Other caps for an open session: refused by lane where there is no room. */
static void test_set_caps(void **state)
{
    float                caps[64], other[64];
    kvd_attention_params a = tiers_sparse(96, 0.0f);
    kvd_model           *m = tiers_model("qwen3", tiers.backend);
    kvd_session         *s, *r;

    (void)state;
    a.caps   = caps;
    a.n_caps = fill_caps(m, caps, true);
    s        = tiers_session(m, &a, 1, true);
    memcpy(other, caps, sizeof(caps));
    a.caps   = other;
    other[1] = caps[1] + 0.5f;
    assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "layer 0, KV head 1"));
    other[1] = 0.5f;
    assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_E_INVAL);
    other[1] = 1.0f;
    a.n_caps--;
    assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_E_INVAL);
    a.n_caps++;
    assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_OK);
    r = tiers_session(m, &a, 1, false); /* as if opened so */
    memset(other, 0, sizeof(other));    /* borrowed for the calls only */
    same_steps(s, r);
    kvd_model_close(m);
}

/* The backend "ref" keeps the same rule. */
static void test_same_text_ref(void **state)
{
    const kvd_attention_params a = tiers_sparse(64, 2.0f);
    kvd_model                 *m = tiers_model("llama", "ref");

    (void)state;
    tiers_same_text(m, &a);
    kvd_model_close(m);
}

/* Attention that never suffices: the budget is doubled after 32 steps, given up after 64, at the
 * same steps wherever the cache lies; a new prompt starts over. */
static void test_fallback(void **state)
{
    kvd_attention_params a = tiers_sparse(64, 2.0f);
    kvd_model           *m = tiers_model("llama", tiers.backend);
    kvd_session         *s[2];
    kvd_stats            c = { .struct_size = sizeof(c) };

    (void)state;
    a.min_mass = 1.0f;
    for (uint32_t k = 0; k < 2; k++) {
        s[k] = tiers_session(m, &a, 1, k == 1);
        tiers_prefill(s[k], 0, N_PROMPT, 0);
    }
    for (uint32_t i = 0; i < 100; i++) {
        const int32_t token = tiers_next_token(s[0], 0, i);

        for (uint32_t k = 0; k < 2; k++) {
            tiers_step(s[k], &token, 1);
            kvd_session_get_stats(s[k], &c);
            assert_int_equal(c.n_fallback, (i + 1) / 32 < 2 ? (i + 1) / 32 : 2);
            assert_int_equal(c.n_sparse, i < 64 ? i + 1 : 64);
        }
        tiers_same_logits(s[0], s[1], 0);
    }
    tiers_prefill(s[0], 0, 10, 1);
    tiers_step(s[0], &(int32_t){ 7 }, 1);
    kvd_session_get_stats(s[0], &c);
    assert_int_equal(c.n_sparse, 65);
    kvd_session_close(s[0]);
    kvd_session_close(s[1]);
    kvd_model_close(m);
}

/* A budget that holds everything selects everything: near to dense, not the same bits, since sums
 * run in another order. */
static void test_whole_budget_is_dense(void **state)
{
    const kvd_attention_params a = tiers_sparse(N_CTX, 1.0f);
    kvd_attention_params       d = KVD_ATTENTION_PARAMS_INIT;
    kvd_model                 *m = tiers_model("llama", tiers.backend);
    kvd_session               *s, *r;

    (void)state;
    d.mode = KVD_ATTENTION_DENSE;
    s      = tiers_session(m, &a, 1, false);
    r      = tiers_session(m, &d, 1, false);
    tiers_prefill(s, 0, N_PROMPT, 0);
    tiers_prefill(r, 0, N_PROMPT, 0);
    for (uint32_t i = 0; i < 50; i++) {
        const int32_t token = tiny_token(3, i);

        tiers_step(s, &token, 1);
        tiers_step(r, &token, 1);
        for (uint32_t k = 0; k < N_VOCAB; k++) {
            const float x = kvd_logits(s, 0)[k], y = kvd_logits(r, 0)[k];

            if (!(x - y < 2e-3f && y - x < 2e-3f))
                fail_msg("step %u, logit %u: %g against %g", i, k, (double)x, (double)y);
        }
    }
    kvd_session_close(s);
    kvd_session_close(r);
    kvd_model_close(m);
}

/* Sequences in one batch: each as it is alone; two of them short, so dense, and apart. */
static void do_not_mix(kvd_model *m, uint32_t zone)
{
    static const uint32_t len[N_MIXED] = { N_PROMPT, 150, 900, 60 };
    kvd_attention_params  a            = tiers_sparse(64, 2.0f);
    kvd_session          *all, *one[N_MIXED];

    a.zone = zone;
    all    = tiers_session(m, &a, N_MIXED, true);
    for (uint32_t q = 0; q < N_MIXED; q++) {
        one[q] = tiers_session(m, &a, 1, q == 2);
        tiers_prefill(all, q, len[q], q);
        tiers_prefill(one[q], 0, len[q], q);
    }
    for (uint32_t i = 0; i < 40; i++) {
        int32_t token[N_MIXED];

        for (uint32_t q = 0; q < N_MIXED; q++) {
            token[q] = tiny_token(q + 5, i);
            tiers_step(one[q], &token[q], 1);
        }
        tiers_step(all, token, N_MIXED);
        for (uint32_t row = 0; row < N_MIXED; row++) {
            assert_memory_equal(kvd_logits(all, row), kvd_logits(one[(row + 1) % N_MIXED], 0),
                                N_VOCAB * sizeof(float));
        }
        kv_check(all->kv);
    }
    for (uint32_t q = 0; q < N_MIXED; q++)
        kvd_session_close(one[q]);
    kvd_session_close(all);
}

static void test_sequences_do_not_mix(void **state)
{
    kvd_model *m = tiers_model("qwen3", "ref");

    (void)state;
    if (!SANITIZED)
        do_not_mix(m, 0);
    do_not_mix(m, 8);
    kvd_model_close(m);
}

static void pick(kvd_sampler *sm, const kvd_session *s, int32_t *token)
{
    if (kvd_sampler_pick(sm, s, 0, token, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* Tokens picked from the best that a step kept are those picked from all of its logits; each step
 * keeps what it is asked to keep, recorded or not. */
static void same_picks(kvd_model *m, const kvd_attention_params *a)
{
    kvd_session       *s = tiers_session(m, a, 1, false), *r = tiers_session(m, a, 1, false);
    kvd_sampler_params p = KVD_SAMPLER_PARAMS_INIT;
    kvd_sampler       *sm[2][2]; /* [of s or r][greedy, by chance] */
    int32_t            t[2];

    for (int i = 0; i < 4; i++) {
        p.temperature = i % 2 ? 1.5f : 0.0f;
        assert_int_equal(kvd_sampler_open(&sm[i / 2][i % 2], m, &p, &err), KVD_OK);
        assert_int_equal(kvd_sampler_n_best(sm[i / 2][i % 2]), i % 2 ? 40 : 1);
    }
    tiers_prefill(s, 0, N_PROMPT, 0);
    tiers_prefill(r, 0, N_PROMPT, 0);
    for (uint32_t i = 0; i < 60; i++) {
        const uint32_t by = i % 3 != 0;
        kvd_batch      b  = KVD_BATCH_INIT;

        pick(sm[0][by], s, &t[0]);
        pick(sm[1][by], r, &t[1]);
        assert_int_equal(t[0], t[1]);
        b.n_token = 1;
        b.token   = &t[0];
        assert_int_equal(kvd_eval(r, &b, &err), KVD_OK);
        b.n_best = i % 5 == 0 ? 0 : kvd_sampler_n_best(sm[0][(i + 1) % 3 != 0]);
        assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
        assert_true((kvd_logits(s, 0) == NULL) == (b.n_best > 0));
        if (b.n_best == 1)
            assert_int_equal(kvd_sampler_pick(sm[0][1], s, 0, &t[0], &err), KVD_E_INVAL);
        if (b.n_best > 0)
            assert_int_equal(kvd_sampler_pick(sm[0][0], s, 1, &t[0], &err), KVD_E_INVAL);
        b.n_best = 129;
        assert_int_equal(kvd_eval(s, &b, &err), KVD_E_INVAL);
    }
    for (int i = 0; i < 4; i++)
        kvd_sampler_close(sm[i / 2][i % 2]);
    kvd_session_close(s);
    kvd_session_close(r);
}

static void test_picks(void **state)
{
    const kvd_attention_params dense = KVD_ATTENTION_PARAMS_INIT, few = tiers_sparse(64, 2.0f);
    kvd_model                 *m = tiers_model("llama", tiers.backend);

    (void)state;
    same_picks(m, &dense);
    same_picks(m, &few);
    kvd_model_close(m);
    m = tiers_model("llama", "cpu");
    split_begin(m->be);
    same_picks(m, &dense);
    assert_true(split_graph_runs() > 0);
    same_picks(m, &few);
    split_end(m->be);
    kvd_model_close(m);
}

/* Sequences that come and go there, batches in any order, rows without logits. */
static void test_split_sequences(void **state)
{
    kvd_model *m = tiers_model("llama", "cpu");

    (void)state;
    split_begin(m->be);
    do_not_mix(m, 0);
    assert_true(split_graph_runs() > 0);
    do_not_mix(m, 8);
    tiers.lookup = KVD_LOOKUP_HOST;
    do_not_mix(m, 8);
    for (uint32_t i = 0; i < 2; i++) { /* two of the four rows attend sparsely */
        tiers.schedule    = KVD_SCHEDULE_ELASTIC;
        tiers.micro_batch = i;
        tiers.lookup      = i ? KVD_LOOKUP_HOST : KVD_LOOKUP_DEVICE;
        do_not_mix(m, 0);
    }
    tiers.schedule    = KVD_SCHEDULE_SEQUENTIAL;
    tiers.lookup      = KVD_LOOKUP_DEVICE;
    tiers.micro_batch = 0;
    split_end(m->be);
    kvd_model_close(m);
}

static bool stop_late(void *ctx, uint64_t done, uint64_t total)
{
    (void)ctx;
    return done < total * 2 / 3;
}

/* A prompt that is canceled in some layer leaves the sequence as it was. */
static void test_canceled_prompt(void **state)
{
    const kvd_attention_params a = tiers_sparse(64, 2.0f);
    kvd_model                 *m = tiers_model("llama", tiers.backend);
    kvd_session *r = tiers_session(m, &a, 1, false), *t = tiers_session(m, &a, 1, true);
    int32_t      token[900];

    (void)state;
    tiers_prefill(r, 0, 700, 0);
    tiers_prefill(t, 0, 700, 0);
    for (uint32_t i = 0; i < 900; i++)
        token[i] = tiny_token(9, i);
    assert_int_equal(kvd_prefill(t, 0, token, 900, stop_late, NULL, &err), KVD_E_CANCELED);
    assert_int_equal(kvd_seq_len(t, 0), 700);
    kv_check(t->kv);
    tiers_prefill(r, 0, 600, 2);
    tiers_prefill(t, 0, 600, 2);
    tiers_same_logits(r, t, 0);
    for (uint32_t i = 0; i < 30; i++) {
        tiers_step(r, &token[i], 1);
        if (i == 7) { /* a step that is canceled: the window starts over, in both */
            kvd_batch b = KVD_BATCH_INIT;

            b.n_token = 1;
            b.token   = &token[i];
            kvd_session_cancel(t);
            assert_int_equal(kvd_eval(t, &b, &err), KVD_E_CANCELED);
            assert_int_equal(kvd_seq_truncate(r, 0, 1300 + 8, &err), KVD_OK);
            kv_seq_restart(r->kv, 0);
            assert_int_equal(kvd_seq_truncate(r, 0, 1300 + 7, &err), KVD_OK);
            tiers_step(r, &token[i], 1);
        }
        tiers_step(t, &token[i], 1);
        tiers_same_logits(r, t, 0);
    }
    kvd_session_close(r);
    kvd_session_close(t);
    kvd_model_close(m);
}

/* What may not be moved, cut or evaluated. */
static void refuses_moves(kvd_session *s)
{
    const uint32_t seq   = 1;
    const int32_t  token = 5;
    kvd_batch      b     = KVD_BATCH_INIT;

    b.n_token = 1;
    b.token   = &token;
    b.seq     = &seq;
    assert_int_equal(kvd_eval(s, &b, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_move(s, 0, 0, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_move(s, 1, 2, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_move(s, 1, 3, &err), KVD_E_INVAL); /* there are two */
    assert_int_equal(kvd_seq_truncate(s, 1, 1, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_truncate(s, 3, 0, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_len(s, 3), 0);
    assert_false(kvd_seq_placement(s, 3, &(kvd_placement){ .struct_size = sizeof(kvd_placement) }));
}

/* The rest of a text's first n tokens, as far as the sequence does not hold them. */
static void fill_up(kvd_session *s, uint32_t n, uint32_t text)
{
    if (kvd_seq_len(s, 0) < n)
        tiers_prefill(s, 0, n - kvd_seq_len(s, 0), text);
}

/* A text goes on with the same bits after its sequence was parked, while others ran in its place.
 */
static void parked_text(kvd_model *m, const kvd_attention_params *a, bool spread)
{
    kvd_session  *r = tiers_session(m, a, 1, false), *t;
    kvd_placement w = { .struct_size = sizeof(w) };
    int32_t       token[N_PROMPT];
    kvd_stats     c = { .struct_size = sizeof(c) };

    tiers.n_parked = 2;
    t              = tiers_session(m, a, 1, spread);
    tiers.n_parked = 0;
    for (uint32_t i = 0; i < N_PROMPT; i++)
        token[i] = tiny_token(0, i);
    tiers_prefill(r, 0, N_PROMPT, 0);
    tiers_prefill(t, 0, N_PROMPT, 0);
    tiers_same_logits(r, t, 0);
    assert_int_equal(kvd_seq_move(t, 0, 1, &err), KVD_OK);
    kv_check(t->kv);
    assert_int_equal(kvd_seq_len(t, 0), 0);
    assert_int_equal(kvd_seq_len(t, 1), N_PROMPT);
    token[1500] ^= 1;
    assert_int_equal(kvd_seq_common(t, 1, token, N_PROMPT), 1500);
    assert_int_equal(kvd_seq_common(t, 1, token, 300), 300);
    assert_int_equal(kvd_seq_common(t, 2, token, 300), 0);
    assert_true(kvd_seq_placement(t, 1, &w));
    assert_int_equal(w.device_tokens + w.host_tokens, N_PROMPT);
    assert_true(spread == (w.host_tokens > 0));
    tiers_prefill(t, 0, 900, 1);
    for (uint32_t i = 0; i < 3; i++)
        tiers_step(t, &token[i], 1);
    refuses_moves(t);
    assert_int_equal(kvd_seq_move(t, 1, 0, &err), KVD_E_INVAL); /* it holds something */
    assert_int_equal(kvd_seq_move(t, 0, 2, &err), KVD_OK);
    kvd_session_get_stats(t, &c);
    assert_int_equal(c.kv_used_tokens, kvd_seq_len(t, 1) + kvd_seq_len(t, 2));
    assert_int_equal(kvd_seq_move(t, 1, 0, &err), KVD_OK);
    kv_check(t->kv);
    assert_true(kvd_seq_len(t, 0) + KV_BLOCK_TOKENS + KV_LOCAL_TOKENS > N_PROMPT);
    fill_up(t, N_PROMPT, 0);
    tiers_prefill(r, 0, 50, 3);
    tiers_prefill(t, 0, 50, 3);
    for (uint32_t i = 0; i < 40; i++) {
        tiers_same_logits(r, t, 0);
        tiers_step(r, &token[i], 1);
        tiers_step(t, &token[i], 1);
    }
    assert_int_equal(kvd_seq_truncate(t, 2, 0, &err), KVD_OK);
    assert_int_equal(kvd_seq_len(t, 2), 0);
    kv_check(t->kv);
    kvd_session_close(r);
    kvd_session_close(t);
}

static void test_parked(void **state)
{
    const kvd_attention_params sparse = tiers_sparse(64, 2.0f), dense = KVD_ATTENTION_PARAMS_INIT;
    kvd_model                 *m;

    (void)state;
    tiers.deterministic = true; /* prompts are cut where something was given up */
    m                   = tiers_model("llama", tiers.backend);
    for (int i = 0; i < 4; i++)
        parked_text(m, i / 2 ? &dense : &sparse, i % 2);
    tiers.record = KVD_KV_RECORD_INT8;
    parked_text(m, &sparse, false);
    tiers.record = KVD_KV_RECORD_SAME;
    if (strcmp(tiers.backend, "cpu") == 0) { /* as if its memory were apart */
        split_begin(m->be);
        parked_text(m, &sparse, true);
        split_end(m->be);
    }
    kvd_model_close(m);
    tiers.deterministic = false;
}

/* Another policy and index from one step to the next: as if the session had been opened so. */
static void test_set_attention(void **state)
{
    kvd_attention_params a = tiers_sparse(128, 2.0f), b = tiers_sparse(64, 2.0f);
    kvd_model           *m = tiers_model("qwen3", tiers.backend);
    kvd_session         *s, *r;

    (void)state;
    a.index = "mean-bf16+radius";
    b.index = "mean-int8";
    b.fetch = KVD_FETCH_STRICT;
    s       = tiers_session(m, &a, 1, true);
    r       = tiers_session(m, &b, 1, false);
    tiers_prefill(s, 0, N_PROMPT, 0);
    tiers_prefill(r, 0, N_PROMPT, 0);
    for (uint32_t i = 0; i < 10; i++) {
        const int32_t token = tiny_token(4, i);

        tiers_step(s, &token, 1);
    }
    assert_int_equal(kvd_seq_truncate(s, 0, N_PROMPT, &err), KVD_OK);
    assert_int_equal(kvd_session_set_attention(s, &b, &err), KVD_OK);
    for (uint32_t i = 0; i < 10; i++) {
        const int32_t token = tiny_token(4, i);

        tiers_step(s, &token, 1);
        tiers_step(r, &token, 1);
        tiers_same_logits(r, s, 0);
    }
    b.budget = 1024;
    assert_int_equal(kvd_session_set_attention(s, &b, &err), KVD_E_INVAL);
    b.budget = 64;
    b.index  = "quant-k-int8";
    assert_int_equal(kvd_session_set_attention(s, &b, &err), KVD_E_INVAL);
    b.index = "nonsense";
    assert_int_equal(kvd_session_set_attention(s, &b, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "nonsense"));
    kvd_session_close(s);
    kvd_session_close(r);
    kvd_model_close(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_caps),
        cmocka_unit_test(test_set_caps),
        cmocka_unit_test(test_same_text_dense),
        cmocka_unit_test(test_same_text_sparse),
        cmocka_unit_test(test_same_text_other_indexes),
        cmocka_unit_test(test_same_text_ref),
        cmocka_unit_test(test_same_text_packed),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_same_text_split),
        cmocka_unit_test(test_same_text_zone),
        cmocka_unit_test(test_zone_estimates),
        cmocka_unit_test(test_fallback),
        cmocka_unit_test(test_whole_budget_is_dense),
        cmocka_unit_test(test_sequences_do_not_mix),
        cmocka_unit_test(test_split_sequences),
        cmocka_unit_test(test_picks),
        cmocka_unit_test(test_canceled_prompt),
        cmocka_unit_test(test_parked),
        cmocka_unit_test(test_set_attention),
    };

    if (argc == 3 && strcmp(argv[1], "--backend") == 0)
        tiers.backend = argv[2];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
