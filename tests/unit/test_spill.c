/* SPDX-License-Identifier: Apache-2.0 */
/* test_spill.c - sessions on tiny models whose host tier has no room for their records, on a device
 * with memory of its own: what lies on disk gives the same bits as with everything resident.
 * usage: test_spill [--backend NAME] */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/split.h"
#include "support/tiny.h"

enum {
    N_VOCAB  = 264,
    N_CTX    = 4000,
    N_BATCH  = 96,
    N_PROMPT = 1700,
    N_GEN    = SANITIZED ? 160 : 240, /* over the next sealing */
    N_SEQ    = 3
};

static kvd_err     err;
static const char *backend; /* NULL: the CPU's, its memory hidden */
static char        dir[256];
static kvd_plan    plan = { .struct_size = sizeof(plan) }; /* of the last session that spills */

typedef struct setting {
    kvd_attention_params a;
    uint32_t             n_seq, disk_lag;
    kvd_kv_record        record;
    kvd_lookup           lookup;
    uint64_t             kv_host; /* 0: everything resident */
} setting;

static setting sparse(uint64_t kv_host)
{
    setting s = { .a = KVD_ATTENTION_PARAMS_INIT, .n_seq = 1, .kv_host = kv_host, .disk_lag = 1 };

    s.a.mode     = KVD_ATTENTION_SPARSE;
    s.a.budget   = 96;
    s.a.min_mass = -1.0f;
    return s;
}

static kvd_model *open_model(const char *name)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.n_thread      = 2;
    p.deterministic = true; /* with a prefix cache prompts are cut before their last token */
    p.rope_scaling  = KVD_ROPE_LINEAR;
    p.rope_factor   = 64.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", path, err.msg);
    if (!backend)
        split_begin(m->be);
    return m;
}

static void close_model(kvd_model *m)
{
    if (!backend)
        split_end(m->be);
    kvd_model_close(m);
}

static kvd_session *open_session(kvd_model *m, const setting *x)
{
    kvd_session_params p = KVD_SESSION_PARAMS_INIT;
    kvd_session       *s;

    p.n_ctx     = N_CTX;
    p.n_seq     = x->n_seq;
    p.n_batch   = N_BATCH;
    p.n_logits  = x->n_seq;
    p.attention = &x->a;
    p.kv_record = x->record;
    p.lookup    = x->lookup;
    if (x->kv_host) {
        p.kv_host   = x->kv_host;
        p.cache_dir = dir;
        p.disk_lag  = x->disk_lag;
        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
        p.kv_device = plan.kv_device_bytes - 1; /* not resident */
        if (kvd_session_plan(m, &p, &plan, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        assert_true(plan.kv_spills && !plan.kv_resident);
    }
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

/* As it goes with a prefix cache: the last token is a batch of its own. */
static void prefill(kvd_session *s, uint32_t seq, uint32_t n, uint32_t text)
{
    int32_t       *t     = calloc(n, sizeof(*t));
    const uint32_t first = s->cached ? n : n - 1;

    for (uint32_t i = 0; i < n; i++)
        t[i] = tiny_token(text, i);
    if (kvd_prefill(s, seq, t, first, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    if (first < n && kvd_prefill(s, seq, t + first, n - first, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    free(t);
}

static void step(kvd_session *s, const int32_t *token, uint32_t n)
{
    static const uint32_t seq[N_SEQ]  = { 0, 1, 2 };
    static const uint8_t  want[N_SEQ] = { 1, 1, 1 };
    kvd_batch             b           = KVD_BATCH_INIT;

    b.n_token     = n;
    b.token       = token;
    b.seq         = seq;
    b.want_logits = want;
    if (kvd_eval(s, &b, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* Greedy with logits pushed about, so that a tiny model does not fall into a loop. */
static int32_t next_token(const kvd_session *s, uint32_t row, uint32_t i)
{
    const float *l = kvd_logits(s, row);
    int32_t      b = 0;

    for (int32_t k = 1; k < N_VOCAB; k++)
        b = l[k] > l[b] ? k : b;
    return (b + (int32_t)(i * 7 % 61)) % 256;
}

static void same_logits(const kvd_session *r, const kvd_session *d, uint32_t n)
{
    for (uint32_t row = 0; row < n; row++)
        assert_memory_equal(kvd_logits(r, row), kvd_logits(d, row), N_VOCAB * sizeof(float));
}

/* n steps of both, bit for bit; with records that come late the window is another. */
static void generate(kvd_session *r, kvd_session *d, const setting *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        int32_t token[N_SEQ];

        if (x->disk_lag == 1)
            same_logits(r, d, x->n_seq);
        for (uint32_t q = 0; q < x->n_seq; q++)
            token[q] = next_token(r, q, i);
        step(r, token, x->n_seq);
        step(d, token, x->n_seq);
        kv_check(d->kv);
    }
}

/* Prompts, generation over sealings, a cut, another prompt, generation again. */
static void same_text(kvd_model *m, const setting *x)
{
    setting      resident = *x;
    kvd_session *r, *d;
    kvd_stats    c = { .struct_size = sizeof(c) };

    resident.kv_host = 0;
    dm_dir_make(dir);
    r = open_session(m, &resident);
    d = open_session(m, x);
    for (uint32_t q = 0; q < x->n_seq; q++) {
        prefill(r, q, N_PROMPT - 300 * q, q);
        prefill(d, q, N_PROMPT - 300 * q, q);
    }
    for (uint32_t i = 0; i < 2 && x->n_seq > 1; i++) { /* each its own logits */
        int32_t token[N_SEQ] = { 1, 2, 3 };

        step(r, token, x->n_seq);
        step(d, token, x->n_seq);
    }
    generate(r, d, x, N_GEN);
    assert_int_equal(kvd_seq_truncate(r, 0, N_PROMPT - 200, &err), KVD_OK);
    assert_int_equal(kvd_seq_truncate(d, 0, N_PROMPT - 200, &err), KVD_OK);
    prefill(r, 0, 40, 7);
    prefill(d, 0, 40, 7);
    step(r, (int32_t[]){ 9, 9, 9 }, x->n_seq);
    step(d, (int32_t[]){ 9, 9, 9 }, x->n_seq);
    generate(r, d, x, 40);
    kvd_session_get_stats(d, &c);
    print_message("%llu of %llu misses from disk, %llu urgent, %llu stalls, %llu reads\n",
                  (unsigned long long)c.n_disk, (unsigned long long)c.n_miss,
                  (unsigned long long)c.n_disk_urgent, (unsigned long long)c.n_disk_stall,
                  (unsigned long long)c.n_disk_read);
    if (x->a.mode == KVD_ATTENTION_SPARSE)
        assert_true(c.n_disk > 0 && c.n_disk_urgent > 0 && c.n_hit > 0);
    kvd_session_close(r);
    kvd_session_close(d);
    dm_dir_remove(dir);
}

static void test_host_sizes(void **state)
{
    static const uint64_t host[] = { 200000, 60000, 1 };
    kvd_model            *m      = open_model("llama");

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(host); i++) {
        const setting x = sparse(host[i]);

        same_text(m, &x);
    }
    close_model(m);
}

static void test_dense(void **state)
{
    kvd_model *m = open_model("llama");
    setting    x = sparse(60000);

    (void)state;
    x.a.mode = KVD_ATTENTION_DENSE;
    same_text(m, &x);
    close_model(m);
}

static void test_policies(void **state)
{
    kvd_model *m = open_model("qwen3");

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        setting x = sparse(i % 2 ? 60000 : 150000);

        x.a.fetch  = i == 1 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        x.a.attend = i == 2 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        x.a.evict  = (kvd_evict)i;
        x.a.cap    = i == 3 ? 4.0f : 2.0f;
        x.a.zone   = i == 2 ? 16 : 0;
        same_text(m, &x);
    }
    close_model(m);
}

static void test_packed(void **state)
{
    kvd_model *m = open_model("qwen3");
    setting    x = sparse(40000);

    (void)state;
    for (x.record = KVD_KV_RECORD_INT8; x.record <= KVD_KV_RECORD_VALUES; x.record++)
        same_text(m, &x);
    close_model(m);
}

static void test_sequences(void **state)
{
    kvd_model *m = open_model("llama");
    setting    x = sparse(200000);

    (void)state;
    x.n_seq = N_SEQ;
    same_text(m, &x);
    close_model(m);
}

/* Windows that the CPU changes, in micro-batches and all rows at once, in the
                   paper's mode, too. */
static void test_host_window(void **state)
{
    kvd_model *m = open_model("qwen3");

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        setting x = sparse(60000);

        if (SANITIZED && (i == 1 || i == 2))
            continue;
        x.n_seq         = N_SEQ;
        x.lookup        = KVD_LOOKUP_HOST;
        x.a.schedule    = i & 1 ? KVD_SCHEDULE_ELASTIC : KVD_SCHEDULE_SEQUENTIAL;
        x.a.micro_batch = 2;
        x.a.fetch       = i & 2 ? KVD_FETCH_STRICT : KVD_FETCH_DEFERRED;
        x.a.attend      = i & 2 ? KVD_ATTEND_SELECTED : KVD_ATTEND_WINDOW;
        same_text(m, &x);
    }
    close_model(m);
}

static void test_late(void **state)
{
    kvd_model *m = open_model("llama");
    setting    x = sparse(60000);

    (void)state;
    for (x.disk_lag = 2; x.disk_lag < 5; x.disk_lag += 2)
        same_text(m, &x);
    close_model(m);
}

/* Stages of evaluations: each has taken time, and together no more than there was. */
static void check_times(const kvd_stats *c)
{
    const uint64_t all = c->prefill_ns + c->decode_ns;

    assert_true(c->qkv_ns > 0 && c->dense_ns > 0 && c->ffn_ns > 0 && c->logits_ns > 0);
    assert_true(c->qkv_ns + c->dense_ns + c->ffn_ns + c->logits_ns + c->select_ns + c->fetch_ns +
                    c->attend_ns + c->seal_ns <=
                all);
}

/* The mean over layers and heads is the session's. */
static void check_mass(const kvd_session *s, double mass)
{
    double   sum = 0.0;
    uint32_t n   = 0;
    uint64_t n_selected, n_hit;

    for (uint32_t il = 0; kvd_session_get_lane(s, il, 0, &n_selected, &n_hit); il++) {
        for (uint32_t h = 0; kvd_session_get_lane(s, il, h, &n_selected, &n_hit); h++, n++) {
            assert_true(kvd_session_get_lane_mass(s, il, h) > 0.0);
            sum += kvd_session_get_lane_mass(s, il, h);
        }
        assert_true(kvd_session_get_lane_mass(s, il, 1000) == 0.0);
    }
    assert_true(n > 1 && fabs(sum / n - mass) < 1e-9);
}

/* What is told of where K and V lie. */
static void test_told(void **state)
{
    const setting x = sparse(60000);
    kvd_model    *m = open_model("llama");
    kvd_stats     c = { .struct_size = sizeof(c) };
    kvd_placement w = { .struct_size = sizeof(w) };
    kvd_session  *s;

    (void)state;
    dm_dir_make(dir);
    s = open_session(m, &x);
    kvd_session_get_stats(s, &c);
    assert_true(kvd_seq_placement(s, 0, &w) && w.device_tokens == 0 && w.disk_tokens == 0);
    assert_false(kvd_seq_placement(s, 1, &w));
    assert_true(kvd_session_get_lane_mass(s, 0, 0) == 0.0 && c.kv_disk_used_bytes == 0);
    assert_true(c.kv_device_used_bytes < plan.kv_device_bytes);
    assert_true(c.kv_host_used_bytes + 50000 < plan.kv_host_bytes);
    prefill(s, 0, N_PROMPT, 0);
    for (int32_t i = 0; i < 20; i++)
        step(s, &i, 1);
    assert_int_equal(kvd_session_flush(s, &err), KVD_OK);
    assert_true(kvd_seq_placement(s, 0, &w));
    assert_int_equal(w.device_tokens + w.host_tokens + w.disk_tokens, N_PROMPT + 20);
    assert_int_equal(w.host_tokens + w.disk_tokens, (N_PROMPT + 20 - 64) / 256 * 256);
    assert_true(w.host_tokens > 0 && w.disk_tokens > w.host_tokens && w.window_tokens == 192);
    kvd_session_get_stats(s, &c);
    assert_true(c.kv_host_used_bytes <= plan.kv_host_bytes &&
                c.kv_host_used_bytes + 10000 > plan.kv_host_bytes);
    assert_true(c.kv_device_used_bytes <= plan.kv_device_bytes);
    assert_true(c.kv_disk_used_bytes >= c.disk_put_bytes && c.kv_disk_limit_bytes == 0);
    check_times(&c);
    check_mass(s, c.mass);
    kvd_session_close(s);
    dm_dir_remove(dir);
    close_model(m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_sizes),  cmocka_unit_test(test_dense),
        cmocka_unit_test(test_policies),    cmocka_unit_test(test_packed),
        cmocka_unit_test(test_sequences),   cmocka_unit_test(test_late),
        cmocka_unit_test(test_host_window), cmocka_unit_test(test_told),
    };

    if (argc == 3 && strcmp(argv[1], "--backend") == 0)
        backend = argv[2];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
