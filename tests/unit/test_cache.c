/* SPDX-License-Identifier: Apache-2.0 */
/* test_cache.c - the prefix cache end to end on tiny models: what comes back from the directory is
 * what was there, in this process and the next, whole, cut, damaged or of another model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "kv/kv_cache.h"
#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/split.h"
#include "support/tiny.h"

enum {
    N_VOCAB  = 264,
    N_CTX    = 4000,
    N_BATCH  = 96,
    N_PROMPT = 1700,
    N_GEN    = SANITIZED ? 170 : 330 /* over the next sealing */
};

static kvd_err err;
static char    dir[64];

static const char *backend;     /* NULL: the CPU's */
static bool        over_split;  /* the backend works like a GPU's: support/split.h */
static kvd_model  *split_model; /* the one that has it */

static kvd_model *open_model(const char *name)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.n_thread      = 2;
    p.deterministic = true; /* prompts are cut where the cache ends */
    p.rope_scaling  = KVD_ROPE_LINEAR;
    p.rope_factor   = 64.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", path, err.msg);
    if (over_split && !split_model) {
        split_model = m;
        split_begin(m->be);
    }
    return m;
}

static void close_model(kvd_model *m)
{
    if (m == split_model) {
        split_end(m->be);
        split_model = NULL;
    }
    kvd_model_close(m);
}

static kvd_resume    resume_mode;
static uint32_t      n_ctx = N_CTX;
static kvd_kv_record record;
static uint32_t      disk_lag;
static uint32_t      zone;
static kvd_lookup    lookup;
static kvd_fetch     fetch;
static kvd_attend    attend;
static uint32_t     *host_records, n_record;
static uint64_t      kv_host; /* of sessions with tiers; 0: no limit, so nothing on disk alone */

static kvd_session *open_session(kvd_model *m, kvd_attention mode, bool cache, uint64_t kv_device)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p = KVD_SESSION_PARAMS_INIT;
    kvd_session         *s;

    a.mode      = mode;
    a.budget    = 96;
    a.min_mass  = -1.0f;
    a.zone      = zone;
    a.fetch     = fetch;
    a.attend    = attend;
    p.lookup    = lookup;
    p.n_ctx     = n_ctx;
    p.n_batch   = N_BATCH;
    p.kv_device = kv_device;
    p.cache_dir = cache ? dir : NULL;
    p.kv_host   = cache && kv_device ? kv_host : 0;
    p.attention = &a;
    p.resume    = resume_mode;
    p.kv_record = record;
    p.disk_lag  = disk_lag;
    if (p.kv_host) {
        p.host_records   = host_records;
        p.n_host_records = n_record;
    }
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

typedef struct watch {
    uint64_t n_call, last, total, second; /* second: the first that is not 0 */
} watch;

static bool on_progress(void *ctx, uint64_t done, uint64_t total)
{
    watch *w = ctx;

    if (w->n_call++ == 0)
        assert_int_equal(done, 0);
    assert_true(done >= w->last && done <= total && total == w->total);
    w->last = done;
    if (w->second == 0)
        w->second = done;
    return true;
}

/* Progress counts the prompt's tokens from 0 to all of them, whether they were known or not. */
static void check_progress(const watch *w, uint32_t n, uint64_t known)
{
    assert_true(w->n_call >= 2 && w->second >= known);
    assert_int_equal(w->last, n);
    if (known)
        assert_int_equal(w->second, known);
}

/* Tokens [0, common) of text 0, then of another text; returns how many were known. */
static uint64_t prefill(kvd_session *s, uint32_t n, uint32_t common, uint32_t text)
{
    kvd_stats c = { .struct_size = sizeof(c) };
    int32_t  *t = malloc(n * sizeof(*t));
    uint64_t  before;
    watch     w = { .total = n };

    kvd_session_get_stats(s, &c);
    before = c.n_cached;
    for (uint32_t i = 0; i < n; i++)
        t[i] = tiny_token(i < common ? 0 : text, i);
    if (kvd_prefill(s, 0, t, n, on_progress, &w, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    free(t);
    assert_int_equal(kvd_seq_len(s, 0), n);
    kvd_session_get_stats(s, &c);
    check_progress(&w, n, c.n_cached - before);
    kv_check(s->kv);
    return c.n_cached - before;
}

/* n greedy tokens pushed about, with a hash of all logits on the way. */
static uint64_t generate(kvd_session *s, uint32_t n, int32_t *out)
{
    uint64_t hash = 1469598103934665603u;

    for (uint32_t i = 0; i < n; i++) {
        const float *l = kvd_logits(s, 0);
        kvd_batch    b = KVD_BATCH_INIT;
        int32_t      t = 0;

        for (size_t k = 0; k < N_VOCAB * sizeof(float); k++)
            hash = (hash ^ ((const uint8_t *)l)[k]) * 1099511628211u; /* FNV-1a */
        for (int32_t k = 1; k < N_VOCAB; k++)
            t = l[k] > l[t] ? k : t;
        t = (t + (int32_t)(i * 7 % 61)) % 256;
        if (out)
            out[i] = t;
        b.n_token = 1;
        b.token   = &t;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    return hash;
}

static uint64_t run(kvd_model *m, kvd_attention mode, bool cache, uint64_t kv_device, uint32_t n,
                    uint32_t common, uint64_t *known)
{
    kvd_session   *s = open_session(m, mode, cache, kv_device);
    const uint64_t k = prefill(s, n, common, 1);
    const uint64_t h = generate(s, N_GEN, NULL);

    if (known)
        *known = k;
    kvd_session_close(s);
    return h;
}

/* Enough for tiers, too little to be resident. */
static uint64_t small_device(kvd_model *m)
{
    kvd_attention_params a    = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan             plan = { .struct_size = sizeof(plan) };

    a.mode      = KVD_ATTENTION_SPARSE;
    a.budget    = 96;
    a.min_mass  = -1.0f;
    a.zone      = zone;
    p.lookup    = lookup;
    p.n_ctx     = n_ctx;
    p.n_batch   = N_BATCH;
    p.attention = &a;
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    return plan.kv_device_bytes - 1;
}

static int make_dir(void **state)
{
    (void)state;
    kv_host      = 0;
    host_records = NULL;
    disk_lag     = 0;
    zone         = 0;
    resume_mode  = KVD_RESUME_EXACT;
    record       = KVD_KV_RECORD_SAME;
    n_ctx        = N_CTX;
    snprintf(dir, sizeof(dir), "/tmp/kvd-test-cache.XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    dm_dir_remove(dir);
    return 0;
}

/* Cold, then known to the last token but one; then other endings; over every placement. */
static void check_hits(const char *name, kvd_attention mode)
{
    kvd_model *m = open_model(name);
    uint64_t   known, cold, small = small_device(m);

    cold = run(m, mode, false, 0, N_PROMPT, N_PROMPT, NULL);
    assert_true(run(m, mode, true, 0, N_PROMPT, N_PROMPT, &known) == cold);
    assert_int_equal(known, 0);
    for (uint32_t i = 0; i < (SANITIZED ? 2 : 4); i++) {
        assert_true(run(m, mode, true, i % 2 ? small : 0, N_PROMPT, N_PROMPT, &known) == cold);
        assert_int_equal(known, N_PROMPT - 1);
    }
    for (uint32_t common = 1500; common < 1700;
         common += SANITIZED ? 111 : 37) { /* a hit up to the middle of the tail */
        cold = run(m, mode, false, 0, N_PROMPT + 20, common, NULL);
        assert_true(run(m, mode, true, common % 2 ? small : 0, N_PROMPT + 20, common, &known) ==
                    cold);
        assert_int_equal(known, common < 1536 ? 1280 : common);
    }
    close_model(m);
}

static void test_hits_sparse(void **state)
{
    (void)state;
    check_hits("llama", KVD_ATTENTION_SPARSE);
}

static void test_hits_zone(void **state)
{
    (void)state;
    zone = 16;
    check_hits("llama", KVD_ATTENTION_SPARSE);
}

static void test_hits_dense(void **state)
{
    (void)state;
    check_hits("qwen3", KVD_ATTENTION_DENSE);
}

/* A conversation: prompt, answer, another prompt; then all of it in a new process: the answer's
 * blocks are found, and the text goes on as it would have. */
static void test_growing_conversation(void **state)
{
    kvd_model   *m = open_model("llama");
    kvd_session *s;
    int32_t      answer[700], *t = malloc(N_CTX * sizeof(*t));
    kvd_stats    c = { .struct_size = sizeof(c) };
    uint64_t     want, known;

    (void)state;
    s = open_session(m, KVD_ATTENTION_SPARSE, true, 0);
    prefill(s, N_PROMPT, N_PROMPT, 0);
    generate(s, 700, answer);
    kvd_session_close(s);
    for (uint32_t i = 0; i < N_PROMPT; i++)
        t[i] = tiny_token(0, i);
    memcpy(t + N_PROMPT, answer, sizeof(answer));
    for (uint32_t round = 0; round < 2; round++) { /* the second finds what the first has stored */
        s = open_session(m, KVD_ATTENTION_SPARSE, true, round ? small_device(m) : 0);
        assert_int_equal(kvd_prefill(s, 0, t, N_PROMPT + 700, NULL, NULL, &err), KVD_OK);
        kvd_session_get_stats(s, &c);
        known = c.n_cached;
        assert_int_equal(known, N_PROMPT + 699);
        if (round == 0)
            want = generate(s, 50, NULL);
        else
            assert_true(generate(s, 50, NULL) == want);
        kvd_session_close(s);
    }
    free(t);
    close_model(m);
}

static kvd_session *open_planned(kvd_model *m, const float *caps, uint32_t n)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p = KVD_SESSION_PARAMS_INIT;
    kvd_session         *s;

    a.mode      = KVD_ATTENTION_SPARSE;
    a.budget    = 96;
    a.min_mass  = -1.0f;
    a.caps      = caps;
    a.n_caps    = n;
    p.n_ctx     = N_CTX;
    p.n_batch   = N_BATCH;
    p.cache_dir = dir;
    p.attention = &a;
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

/* What was generated under a plan is found again under that plan only; the prompt always is. */
static void test_plans_are_told_apart(void **state)
{
    kvd_model           *m  = open_model("llama");
    const model_hparams *hp = model_get_hparams(m->net);
    const uint32_t       n  = hp->n_layer * hp->n_kv_head;
    int32_t              answer[700], *t = malloc(N_CTX * sizeof(*t));
    float                caps[3][64];

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        caps[0][i] = caps[1][i] = 1.0f + (float)(i % 3);
        caps[2][i]              = 1.0f + (float)((i + 1) % 3); /* the same largest */
    }
    for (uint32_t i = 0; i < N_PROMPT; i++)
        t[i] = tiny_token(0, i);
    for (uint32_t round = 0; round < 3; round++) {
        kvd_stats    c = { .struct_size = sizeof(c) };
        kvd_session *s;

        s = open_planned(m, caps[round], n);
        if (round == 0) {
            prefill(s, N_PROMPT, N_PROMPT, 0);
            generate(s, 700, answer);
            memcpy(t + N_PROMPT, answer, sizeof(answer));
        } else {
            assert_int_equal(kvd_prefill(s, 0, t, N_PROMPT + 700, NULL, NULL, &err), KVD_OK);
            kvd_session_get_stats(s, &c);
            if (round == 1)
                assert_int_equal(c.n_cached, N_PROMPT + 699);
            else
                assert_in_range(c.n_cached, N_PROMPT - 256, N_PROMPT);
        }
        kvd_session_close(s);
    }
    free(t);
    close_model(m);
}

/* An answer whose records may have come late is not found by those who count on the same text, nor
 * the other way round; a lag of 1 is the default's name. */
static void test_lags_are_told_apart(void **state)
{
    static const uint32_t lag[]  = { 3, 1, 3, 0 };
    static const bool     same[] = { false, false, true, true };
    kvd_model            *m      = open_model("llama");
    const uint64_t        small  = small_device(m);
    int32_t               answer[700], *t = malloc(N_CTX * sizeof(*t));

    (void)state;
    for (uint32_t i = 0; i < N_PROMPT; i++)
        t[i] = tiny_token(0, i);
    kv_host = 50000;
    for (uint32_t round = 0; round < KVD_COUNTOF(lag); round++) {
        kvd_stats    c = { .struct_size = sizeof(c) };
        kvd_session *s;

        disk_lag = lag[round];
        s        = open_session(m, KVD_ATTENTION_SPARSE, true, small);
        if (round == 0) {
            prefill(s, N_PROMPT, N_PROMPT, 0);
            generate(s, 700, answer);
            memcpy(t + N_PROMPT, answer, sizeof(answer));
        } else {
            assert_int_equal(kvd_prefill(s, 0, t, N_PROMPT + 700, NULL, NULL, &err), KVD_OK);
            generate(s, 10, NULL);
            kvd_session_get_stats(s, &c);
            if (same[round])
                assert_int_equal(c.n_cached, N_PROMPT + 699);
            else
                assert_in_range(c.n_cached, N_PROMPT - 256, N_PROMPT);
        }
        kv_check(s->kv);
        kvd_session_close(s);
    }
    free(t);
    disk_lag = 65;
    assert_int_equal(kvd_session_open(&(kvd_session *){ NULL }, m,
                                      &(kvd_session_params){ .struct_size =
                                                                 sizeof(kvd_session_params),
                                                             .n_ctx    = 512,
                                                             .disk_lag = disk_lag },
                                      &err),
                     KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "(disk_lag)"));
    close_model(m);
}

/* Changes a byte in every stretch of the data files. */
static void damage(uint32_t step)
{
    char  path[128];
    FILE *f;

    snprintf(path, sizeof(path), "%s/00000001.kvd", dir);
    f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    for (long at = 5000, end = ftell(f); at < end; at += (long)step) {
        int c;

        fseek(f, at, SEEK_SET);
        c = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(c ^ 0x40, f);
    }
    fclose(f);
}

/* Damaged blocks are recomputed: the text is right, and the next run finds them again. */
static void test_damage_is_recomputed(void **state)
{
    kvd_model     *m    = open_model("qwen3");
    const uint64_t cold = run(m, KVD_ATTENTION_SPARSE, false, 0, N_PROMPT, N_PROMPT, NULL);
    uint64_t       known;

    (void)state;
    run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, NULL);
    damage(70000);
    assert_true(run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known) == cold);
    assert_true(known < N_PROMPT - 1);
    assert_true(run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known) == cold);
    close_model(m);
}

/* Another model, another index, other chunks: nothing is found, nothing is harmed. */
static void test_foreign_blocks_are_misses(void **state)
{
    kvd_model *a = open_model("llama"), *b = open_model("qwen3");
    uint64_t   known;

    (void)state;
    run(a, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, NULL);
    run(b, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known);
    assert_int_equal(known, 0);
    run(a, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known);
    assert_int_equal(known, N_PROMPT - 1);
    close_model(a);
    close_model(b);
}

/* Cells are stored with the index: blocks without them, or with others, are not found. */
static void test_zones_are_told_apart(void **state)
{
    static const uint32_t size[] = { 16, 0, 8 };
    kvd_model            *m      = open_model("llama");
    uint64_t              cold[3], known;

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        zone    = size[i];
        cold[i] = run(m, KVD_ATTENTION_SPARSE, false, 0, N_PROMPT, N_PROMPT, NULL);
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known) == cold[i]);
        assert_int_equal(known, 0);
        for (uint32_t k = 0; k < i; k++)
            assert_true(cold[k] != cold[i]);
    }
    for (uint32_t i = 0; i < 3; i++) {
        zone = size[i];
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, small_device(m), N_PROMPT, N_PROMPT,
                        &known) == cold[i]);
        assert_int_equal(known, N_PROMPT - 1);
    }
    close_model(m);
}

/* One session's answers with cells and without have provenances of their own: a prompt with the
 * answer is found up to the answer by the other. */
static void test_zone_is_provenance(void **state)
{
    kvd_model           *m = open_model("llama");
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    int32_t             *t = malloc(N_CTX * sizeof(*t));
    kvd_session         *s;
    kvd_stats            c = { .struct_size = sizeof(c) };

    (void)state;
    zone = 16;
    s    = open_session(m, KVD_ATTENTION_SPARSE, true, 0);
    prefill(s, N_PROMPT, N_PROMPT, 0);
    generate(s, 700, t + N_PROMPT);
    kvd_session_close(s);
    for (uint32_t i = 0; i < N_PROMPT; i++)
        t[i] = tiny_token(0, i);
    a.mode     = KVD_ATTENTION_SPARSE;
    a.budget   = 96;
    a.min_mass = -1.0f;
    for (uint32_t i = 0; i < 2; i++) {
        a.zone = i ? 16 : 0;
        s      = open_session(m, KVD_ATTENTION_SPARSE, true, 0);
        assert_int_equal(kvd_session_set_attention(s, &a, &err), KVD_OK);
        assert_int_equal(kvd_prefill(s, 0, t, N_PROMPT + 700, NULL, NULL, &err), KVD_OK);
        kvd_session_get_stats(s, &c);
        if (a.zone)
            assert_int_equal(c.n_cached, N_PROMPT + 699);
        else
            assert_in_range(c.n_cached, N_PROMPT - 256, N_PROMPT);
        kvd_session_close(s);
    }
    free(t);
    close_model(m);
}

static void test_one_process_per_directory(void **state)
{
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p = KVD_SESSION_PARAMS_INIT;
    kvd_model           *m = open_model("llama");
    kvd_session         *s = open_session(m, KVD_ATTENTION_DENSE, true, 0), *other;

    (void)state;
    p.n_ctx     = 512;
    p.cache_dir = dir;
    p.attention = &a;
    assert_int_equal(kvd_session_open(&other, m, &p, &err), KVD_E_BUSY);
    assert_non_null(strstr(err.msg, dir));
    assert_int_equal(kvd_seq_synthesize(s, 0, 300, &err), KVD_E_INVAL);
    kvd_session_close(s);
    close_model(m);
}

/* The host tier holds a part of the records, or none: the rest is read from disk, the text is the
 * same. */
static void check_disk_tier(void)
{
    static const uint64_t host[] = { 200000, 60000, 1 };
    kvd_model            *m      = open_model("llama");
    const uint64_t        small  = small_device(m);
    uint64_t              cold[2], known;

    cold[0] = run(m, KVD_ATTENTION_SPARSE, false, 0, N_PROMPT, N_PROMPT, NULL);
    cold[1] = run(m, KVD_ATTENTION_DENSE, false, 0, N_PROMPT, N_PROMPT, NULL);
    for (size_t i = 0; i < KVD_COUNTOF(host); i++) {
        kv_host = host[i];
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, small, N_PROMPT, N_PROMPT, &known) ==
                    cold[0]);
        assert_int_equal(known, i == 0 ? 0 : N_PROMPT - 1);
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, small, N_PROMPT, N_PROMPT, &known) ==
                    cold[0]);
        assert_int_equal(known, N_PROMPT - 1);
        assert_true(run(m, KVD_ATTENTION_DENSE, true, small, N_PROMPT, N_PROMPT, &known) ==
                    cold[1]);
    }
    close_model(m);
}

static void test_disk_tier(void **state)
{
    (void)state;
    check_disk_tier();
    zone = 8;
    check_disk_tier();
}

/* Where the host tier has not room for all, it has what matters most to the prompt's last queries;
 * of what the first step asks for, less is on disk then than if it had the prompt's beginning. */
static void test_placement(void **state)
{
    kvd_model   *m = open_model("qwen3");
    kvd_session *s;
    kvd_stats    c      = { .struct_size = sizeof(c) };
    uint64_t     n_lane = 0, n_in_order = 0, known, cold;
    uint32_t     n_chunk = 0, n_differ = 0;

    (void)state;
    if (!m->be->unified) { /* averages and windows are the device's */
        close_model(m);
        skip();
    }
    cold    = run(m, KVD_ATTENTION_SPARSE, false, 0, N_PROMPT, N_PROMPT, NULL);
    kv_host = 200000;
    s       = open_session(m, KVD_ATTENTION_SPARSE, true, small_device(m));
    prefill(s, N_PROMPT, N_PROMPT, 0);
    n_lane  = kv_n_lane(&s->kv->params);
    n_chunk = s->kv->seq[0].n_sealed / s->kv->params.chunk_tokens;
    for (uint64_t lane = 0; lane < n_lane; lane++) {
        const uint32_t *host = s->kv->host_of + lane * s->kv->n_chunk_max;
        const uint16_t *ema  = s->kv->ema + lane * s->kv->n_chunk_max;
        uint32_t        n = 0, least = UINT32_MAX, most = 0;

        for (uint32_t i = 0; i < n_chunk; i++) {
            n += host[i] != KV_NO_HOST;
            if (host[i] != KV_NO_HOST)
                least = ema[i] < least ? ema[i] : least;
            else
                most = ema[i] > most ? ema[i] : most;
        }
        assert_true(n == s->kv->n_hrecord / n_lane && n < n_chunk && most <= least && most > 0);
        for (uint32_t i = 0; i < n; i++)
            n_differ += host[i] == KV_NO_HOST;
    }
    assert_true(n_differ > 0);
    generate(s, 1, NULL);
    for (uint64_t i = 0; i < n_lane * s->kv->slots_max; i++)
        n_in_order +=
            s->kv->chunk_of[i] != KVD_CHUNK_NONE && s->kv->chunk_of[i] >= s->kv->n_hrecord / n_lane;
    kvd_session_get_stats(s, &c);
    print_message("the first step reads %llu records from disk, %llu if the host had the first\n",
                  (unsigned long long)c.n_disk, (unsigned long long)n_in_order);
    assert_true(c.n_disk < n_in_order);
    kvd_session_close(s);

    /* Restored, it keeps of what the last token read what came last. */
    s = open_session(m, KVD_ATTENTION_SPARSE, true, small_device(m));
    assert_int_equal(prefill(s, N_PROMPT, N_PROMPT, 0), N_PROMPT - 1);
    for (uint64_t lane = 0; lane < n_lane; lane++) {
        const uint32_t *host = s->kv->host_of + lane * s->kv->n_chunk_max;

        for (uint32_t i = 0; i < n_chunk; i++)
            assert_true((host[i] != KV_NO_HOST) == (i + s->kv->n_hrecord / n_lane >= n_chunk));
    }
    kvd_session_close(s);
    remove_dir(NULL);
    assert_true(run(m, KVD_ATTENTION_SPARSE, true, small_device(m), N_PROMPT, N_PROMPT, &known) ==
                cold);
    close_model(m);
}

/* More than there is, and the shares of another model. */
static void check_share_refusals(kvd_model *m, uint32_t *share, uint32_t room)
{
    kvd_attention_params a    = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_session         *s;

    a.mode           = KVD_ATTENTION_SPARSE;
    a.budget         = 96;
    a.min_mass       = -1.0f;
    p.n_ctx          = n_ctx;
    p.n_batch        = N_BATCH;
    p.kv_device      = small_device(m);
    p.kv_host        = kv_host;
    p.cache_dir      = dir;
    p.attention      = &a;
    p.host_records   = share;
    p.n_host_records = n_record;
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    assert_true(plan.kv_spills && plan.kv_host_records == room);
    assert_int_equal(plan.kv_lane_records, kvd_align_up(n_ctx, KV_BLOCK_TOKENS) / 4);
    memset(share, 0, n_record * sizeof(*share));
    share[0]    = room / 2;
    p.n_seq     = 2;
    p.kv_device = p.kv_device * 3 / 2;
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    assert_true(plan.kv_spills && plan.kv_host_records == room);
    share[0] = room / 2 + 1;
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "each of 2 sequence(s)"));
    share[0]    = room + 1;
    p.n_seq     = 1;
    p.kv_device = small_device(m);
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "share out"));
    p.n_host_records--;
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "(host_records)"));
}

/* Shares of the host tier by lane: the same text, no lane above its own, the memory of equal ones;
 * and a profile of such a session reads from disk about what it says. */
static void test_host_shares(void **state)
{
    kvd_model           *m     = open_model("qwen3");
    const model_hparams *hp    = model_get_hparams(m->net);
    const uint32_t       lanes = hp->n_layer * hp->n_kv_head;
    const uint64_t       small = small_device(m);
    uint64_t             cold, known, bytes[2];
    uint32_t             share[64], room;
    kvd_session         *s;

    (void)state;
    cold     = run(m, KVD_ATTENTION_SPARSE, false, 0, N_PROMPT, N_PROMPT, NULL);
    kv_host  = 200000;
    bytes[0] = kvd_alloc_bytes();
    s        = open_session(m, KVD_ATTENTION_SPARSE, true, small);
    bytes[0] = kvd_alloc_bytes() - bytes[0];
    room     = (uint32_t)s->kv->n_hrecord;
    kvd_session_close(s);
    for (uint32_t i = 0; i < lanes; i++) /* one has nothing, the last one most */
        share[i] = i == 1 ? 0 : room / lanes / 2;
    share[lanes - 1] += room / lanes / 2;
    host_records = share;
    n_record     = lanes;
    for (uint32_t i = 0; i < 2; i++)
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, small, N_PROMPT, N_PROMPT, &known) == cold);
    assert_int_equal(known, N_PROMPT - 1);
    remove_dir(NULL);
    bytes[1] = kvd_alloc_bytes();
    s        = open_session(m, KVD_ATTENTION_SPARSE, true, small);
    bytes[1] = kvd_alloc_bytes() - bytes[1];
    assert_true(bytes[1] <= bytes[0] + 1024);
    prefill(s, N_PROMPT, N_PROMPT, 0);
    for (uint32_t k = 0; k < 2; k++) {
        for (uint32_t lane = 0; lane < lanes; lane++) {
            const uint32_t *host = s->kv->host_of + lane * s->kv->n_chunk_max;
            uint32_t        n    = 0;

            for (uint32_t i = 0; i < s->kv->seq[0].n_sealed / 4; i++)
                n += host[i] != KV_NO_HOST;
            assert_int_equal(n, share[lane]);
        }
        generate(s, N_GEN, NULL);
        kv_check(s->kv);
    }
    kvd_session_close(s);
    check_share_refusals(m, share, room);
    host_records = NULL;
    close_model(m);
}

/* The first step's scores stand for those of the prompt's last queries, so it is not exact. */
static void near_to(uint64_t profiled, uint64_t made)
{
    assert_true(made > (SANITIZED ? 300 : 1000) && profiled * 10 > made * 9 &&
                profiled * 10 < made * 11);
}

/* What a profile says of a host tier is about what a session with such a one reads. */
static void test_profiled_reads(void **state)
{
    kvd_model           *m     = open_model("qwen3");
    const model_hparams *hp    = model_get_hparams(m->net);
    const uint32_t       lanes = hp->n_layer * hp->n_kv_head;
    uint64_t             small;

    (void)state;
    m->watched = true;
    small      = small_device(m);
    for (uint32_t size = 1; size < 4; size++) {
        kvd_stats       c = { .struct_size = sizeof(c) };
        engine_profile *p;
        uint64_t        urgent = 0, late = 0;
        kvd_session    *s;

        kv_host = (uint64_t)kvd_align_up(n_ctx, KV_BLOCK_TOKENS) / 4 * engine_profile_size[size] /
                  16 * lanes * (2 * 2 * 4 * hp->head_dim);
        s = open_session(m, KVD_ATTENTION_SPARSE, true, small);
        assert_int_equal(engine_profile_open(&p, s, N_GEN, &err), KVD_OK);
        assert_int_equal(s->kv->n_hrecord, engine_profile_records(p, size) * lanes);
        prefill(s, N_PROMPT, N_PROMPT, 0);
        generate(s, N_GEN, NULL);
        for (uint32_t i = 0; i < lanes; i++) {
            urgent += engine_profile_lanes(p)[i].urgent_read[2][size];
            late += engine_profile_lanes(p)[i].late_read[2][size];
        }
        kvd_session_get_stats(s, &c);
        print_message("host %u/16: %llu + %llu reads profiled, %llu + %llu made\n",
                      engine_profile_size[size], (unsigned long long)urgent,
                      (unsigned long long)late, (unsigned long long)c.n_disk_urgent,
                      (unsigned long long)(c.n_disk - c.n_disk_urgent));
        near_to(urgent, c.n_disk_urgent);
        near_to(late, c.n_disk - c.n_disk_urgent);
        engine_profile_close(p);
        kvd_session_close(s);
        remove_dir(NULL);
    }
    close_model(m);
}

/* The same with packed records, whose text is not that of others but the same everywhere. */
static void test_disk_tier_packed(void **state)
{
    kvd_model *m = open_model("qwen3");
    uint64_t   known, want, small;

    (void)state;
    for (record = KVD_KV_RECORD_INT8; record <= KVD_KV_RECORD_VALUES; record++) {
        small = small_device(m);
        want  = run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known);
        assert_int_equal(known, 0);
        for (uint32_t i = 0; i < 3; i++) {
            kv_host = i * 40000;
            assert_true(run(m, KVD_ATTENTION_SPARSE, true, small, N_PROMPT, N_PROMPT, &known) ==
                        want);
            assert_int_equal(known, N_PROMPT - 1);
        }
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, 0, N_PROMPT, N_PROMPT, &known) == want);
        assert_int_equal(known, N_PROMPT - 1);
    }
    record = KVD_KV_RECORD_SAME;
    close_model(m);
}

/* Cuts, other prompts, records that come late: against everything resident, step by step. */
static void test_disk_tier_steps(void **state)
{
    kvd_model   *m = open_model("qwen3");
    kvd_session *r = open_session(m, KVD_ATTENTION_SPARSE, false, 0), *d;
    kvd_stats    c = { .struct_size = sizeof(c) };

    (void)state;
    kv_host = 50000;
    d       = open_session(m, KVD_ATTENTION_SPARSE, true, small_device(m));
    prefill(r, N_PROMPT, N_PROMPT, 0);
    prefill(d, N_PROMPT, N_PROMPT, 0);
    for (uint32_t round = 0; round < 3; round++) {
        assert_true(generate(r, N_GEN, NULL) == generate(d, N_GEN, NULL));
        kv_check(d->kv);
        assert_int_equal(kvd_seq_truncate(r, 0, N_PROMPT - 200, &err), KVD_OK);
        assert_int_equal(kvd_seq_truncate(d, 0, N_PROMPT - 200, &err), KVD_OK);
        for (uint32_t i = 0; i < 2; i++) {
            kvd_session  *s    = i ? d : r;
            const int32_t t[3] = { 5, (int32_t)round, 7 };

            assert_int_equal(kvd_prefill(s, 0, t, 2, NULL, NULL, &err), KVD_OK);
            assert_int_equal(kvd_prefill(s, 0, t, 3, NULL, NULL, &err), KVD_OK);
        }
    }
    kvd_session_get_stats(d, &c);
    assert_true(c.n_disk > 1000 && c.n_disk_urgent > 0 && c.n_hit > 0);
    kvd_session_close(r);
    kvd_session_close(d);
    close_model(m);
}

/* The same where the CPU changes windows on maps of its own: with the disk tier, prefixes found
 * again, in the paper's mode, too; test_spill has several rows. */
static void test_host_window(void **state)
{
    lookup = KVD_LOOKUP_HOST;
    check_disk_tier();
    test_disk_tier_steps(state);
    fetch  = KVD_FETCH_STRICT;
    attend = KVD_ATTEND_SELECTED;
    test_disk_tier_steps(state);
    fetch  = KVD_FETCH_DEFERRED;
    attend = KVD_ATTEND_WINDOW;
    lookup = KVD_LOOKUP_DEVICE;
}

/* A prompt long enough for a segment of 16 blocks. */
static void test_segments(void **state)
{
    kvd_model *m = open_model("llama");
    uint64_t   known, want, small;

    (void)state;
    n_ctx = 5500;
    small = small_device(m);
    want  = run(m, KVD_ATTENTION_SPARSE, false, 0, 4700, 4700, NULL);
    for (uint32_t round = 0; round < 3; round++) {
        kv_host = round == 2 ? 100000 : 0;
        assert_true(run(m, KVD_ATTENTION_SPARSE, true, round ? small : 0, 4700, 4700, &known) ==
                    want);
        assert_int_equal(known, round ? 4699 : 0);
    }
    kv_host = 0; /* a prefix that ends inside the segment */
    run(m, KVD_ATTENTION_SPARSE, true, small, 4200, 3000, &known);
    assert_int_equal(known, 3000 / 256 * 256);
    close_model(m);
}

/* A known prefix and a short rest as sparse steps: the text is that of a session which had
 * prefilled the prefix and then taken the rest as steps; less is read than is stored. */
static void test_resume_sparse(void **state)
{
    kvd_model     *m    = open_model("llama");
    kvd_stats      c    = { .struct_size = sizeof(c) };
    kvd_model_info info = { .struct_size = sizeof(info) };
    kvd_session   *s;
    uint64_t       want;

    (void)state;
    s = open_session(m, KVD_ATTENTION_SPARSE, true, 0);
    prefill(s, N_PROMPT, N_PROMPT, 0);
    kvd_session_close(s);
    s = open_session(m, KVD_ATTENTION_SPARSE, false, 0);
    prefill(s, N_PROMPT, N_PROMPT, 0);
    for (uint32_t i = 0; i < 9; i++) { /* the rest of the prompt below */
        const int32_t t = tiny_token(0, N_PROMPT + i);
        kvd_batch     b = KVD_BATCH_INIT;

        b.n_token = 1;
        b.token   = &t;
        assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
    }
    want = generate(s, 300, NULL);
    kvd_session_close(s);

    kvd_model_get_info(m, &info);
    resume_mode = KVD_RESUME_SPARSE;
    s           = open_session(m, KVD_ATTENTION_SPARSE, true, 0);
    assert_int_equal(prefill(s, N_PROMPT + 9, N_PROMPT + 9, 0), N_PROMPT);
    kvd_session_get_stats(s, &c);
    assert_int_equal(c.n_sparse, 9);
    assert_true(c.disk_useful_bytes < N_PROMPT * info.kv_bytes_per_token);
    assert_true(generate(s, 300, NULL) == want);
    kvd_session_close(s);
    close_model(m);
}

/* Steps that seal blocks and store them wait for a device of its own no more often than others. */
static void test_steps_do_not_wait(void **state)
{
    kvd_model *m = open_model("llama");
    uint64_t   n_wait[2];

    (void)state;
    if (m != split_model) {
        close_model(m);
        skip();
    }
    for (int cache = 0; cache < 2; cache++) {
        kvd_stats    c = { .struct_size = sizeof(c) };
        kvd_session *s = open_session(m, KVD_ATTENTION_SPARSE, cache, 0);

        prefill(s, N_PROMPT, N_PROMPT, 0);
        n_wait[cache] = split_waits();
        generate(s, 600, NULL);
        n_wait[cache] = split_waits() - n_wait[cache];
        assert_int_equal(kvd_session_flush(s, &err), KVD_OK);
        kvd_session_get_stats(s, &c);
        assert_true(c.n_grown_blocks >= 2 && (c.disk_put_bytes > 0) == cache);
        kvd_session_close(s);
    }
    assert_int_equal(n_wait[0], n_wait[1]);
    close_model(m);
}

/* --backend NAME: on another backend than the CPU's; --split: on that as if it were a GPU's. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hits_sparse, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_hits_dense, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_hits_zone, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_zones_are_told_apart, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_zone_is_provenance, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_growing_conversation, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_plans_are_told_apart, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_lags_are_told_apart, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_disk_tier, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_placement, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_host_shares, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_profiled_reads, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_disk_tier_packed, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_disk_tier_steps, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_host_window, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_segments, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_resume_sparse, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_steps_do_not_wait, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_damage_is_recomputed, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_foreign_blocks_are_misses, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_one_process_per_directory, make_dir, remove_dir),
    };

    if (argc == 3 && strcmp(argv[1], "--backend") == 0)
        backend = argv[2];
    over_split = argc == 2 && strcmp(argv[1], "--split") == 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
