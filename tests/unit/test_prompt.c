/* SPDX-License-Identifier: Apache-2.0 */
/* test_prompt.c - kvd_prompt_begin(): prompts that come in pieces beside other sequences give the
 * bits of kvd_prefill(), wherever their K and V lie; the prefix cache gives them what it knows, by
 * salt; a cache that was emptied knows nothing; what is held stays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "support/disk_model.h"
#include "support/tiny.h"

enum { N_PROMPT = 1000, N_STEP = 24, N_OTHER = 300 };

static kvd_model *m_;
static kvd_rng    rng_;

static void fill(int32_t *token, uint32_t text, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        token[i] = tiny_token(text, i);
}

static kvd_session *open_with(const tiny_options *o)
{
    kvd_err      err = { 0 };
    kvd_session *s;

    if (tiny_session(&s, m_, o, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

static void begin(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n, const char *salt)
{
    kvd_prompt p   = KVD_PROMPT_INIT;
    kvd_err    err = { 0 };

    p.token      = token;
    p.n_token    = n;
    p.salt       = salt;
    p.salt_bytes = salt ? strlen(salt) : 0;
    if (kvd_prompt_begin(s, seq, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* One batch: the next n tokens of sequence 1's prompt, and one of sequence 0 if `other`. */
static void piece(kvd_session *s, const int32_t *token, uint32_t n, bool other, uint32_t step)
{
    int32_t   t[128];
    uint32_t  seq[128];
    uint8_t   want[128] = { 0 };
    kvd_batch b         = KVD_BATCH_INIT;
    kvd_err   err       = { 0 };

    if (other) {
        t[0]   = tiny_token(5, step);
        seq[0] = 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        t[i + other]   = token[i];
        seq[i + other] = 1;
    }
    want[n + other - 1] = 1;
    b.token             = t;
    b.seq               = seq;
    b.n_token           = n + other;
    b.want_logits       = want;
    if (kvd_eval(s, &b, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

/* The prompt's rest in pieces of random size beside steps of sequence 0, the last token alone. */
static void feed(kvd_session *s, const int32_t *token, uint32_t n)
{
    for (uint32_t step = 0; kvd_seq_len(s, 1) < n; step++) {
        const uint32_t left = n - kvd_seq_len(s, 1);
        const uint32_t some = 1 + (uint32_t)kvd_rng_below(&rng_, 90);

        piece(s, token + n - left,
              left == 1     ? 1
              : some < left ? some
                            : left - 1,
              step % 3 > 0, step);
    }
}

/* Greedy steps of one sequence; a hash of their logits, and of those before. */
static uint64_t steps(kvd_session *s, uint32_t seq)
{
    uint64_t h = 1469598103934665603u;

    for (uint32_t i = 0; i < N_STEP; i++) {
        const float *l = kvd_logits(s, 0);
        kvd_batch    b = KVD_BATCH_INIT;
        kvd_err      e = { 0 };
        int32_t      t = (int32_t)(i * 29 % 256);

        for (size_t k = 0; k < TINY_VOCAB * sizeof(float); k++)
            h = (h ^ ((const uint8_t *)l)[k]) * 1099511628211u;
        b.n_token = 1;
        b.token   = &t;
        b.seq     = &seq;
        if (kvd_eval(s, &b, &e) != KVD_OK)
            fail_msg("%s", e.msg);
    }
    return h;
}

static uint64_t whole(const tiny_options *o, const int32_t *token, uint32_t n)
{
    kvd_session *s   = open_with(o);
    kvd_err      err = { 0 };
    uint64_t     h;

    if (kvd_prefill(s, 1, token, n, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    h = steps(s, 1);
    kvd_session_close(s);
    return h;
}

static void same_bits_in_pieces(void **state)
{
    int32_t token[N_PROMPT], other[N_OTHER];

    (void)state;
    fill(token, 1, N_PROMPT);
    fill(other, 5, N_OTHER);
    for (uint32_t i = 0; i < 4; i++) {
        const tiny_options o   = { .n_seq = 2,
                                   .tiers = i % 2,
                                   .mode  = i / 2 ? KVD_ATTENTION_SPARSE : KVD_ATTENTION_DENSE };
        const uint64_t     h   = whole(&o, token, N_PROMPT);
        kvd_session       *s   = open_with(&o);
        kvd_err            err = { 0 };

        if (kvd_prefill(s, 0, other, N_OTHER, NULL, NULL, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        begin(s, 1, token, N_PROMPT, NULL);
        feed(s, token, N_PROMPT);
        assert_int_equal(steps(s, 1), h);
        kvd_session_close(s);
    }
}

static void ends_where_it_was_said(void **state)
{
    const tiny_options o = { .n_seq = 2 };
    kvd_session       *s = open_with(&o);
    kvd_prompt         p = KVD_PROMPT_INIT;
    int32_t            token[64];
    uint32_t           seq[64];
    kvd_batch          b   = KVD_BATCH_INIT;
    kvd_err            err = { 0 };

    (void)state;
    fill(token, 1, 64);
    for (uint32_t i = 0; i < 64; i++)
        seq[i] = 1;
    begin(s, 1, token, 40, NULL);
    b.token   = token;
    b.seq     = seq;
    b.n_token = 41;
    assert_int_equal(kvd_eval(s, &b, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_len(s, 1), 0);
    b.n_token = 30;
    assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
    assert_int_equal(kvd_seq_truncate(s, 1, 30, &err), KVD_OK); /* the prompt is over */
    b.n_token = 41;
    assert_int_equal(kvd_eval(s, &b, &err), KVD_OK);
    p.token   = token;
    p.n_token = 64;
    assert_int_equal(kvd_prompt_begin(s, 1, &p, &err), KVD_E_INVAL); /* it holds more */
    assert_int_equal(kvd_prompt_begin(s, 2, &p, &err), KVD_E_INVAL);
    p.salt       = "x";
    p.salt_bytes = KVD_SALT_BYTES_MAX + 1;
    assert_int_equal(kvd_prompt_begin(s, 0, &p, &err), KVD_E_INVAL);
    kvd_session_close(s);
}

static uint32_t known(kvd_session *s, const int32_t *token, uint32_t n, const char *salt)
{
    uint32_t len;

    assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
    begin(s, 1, token, n, salt);
    len = kvd_seq_len(s, 1);
    feed(s, token, n);
    assert_int_equal(kvd_session_flush(s, NULL), KVD_OK);
    return len;
}

static void cache_by_salt(void **state)
{
    char               dir[256];
    int32_t            token[N_PROMPT];
    const tiny_options o = { .n_seq = 2, .dir = dir };
    kvd_session       *s;
    char              *json;
    kvd_err            err = { 0 };

    (void)state;
    dm_dir_make(dir);
    fill(token, 1, N_PROMPT);
    s = open_with(&o);
    assert_int_equal(known(s, token, N_PROMPT, NULL), 0);
    assert_int_equal(known(s, token, N_PROMPT, NULL), N_PROMPT - 1);
    assert_int_equal(known(s, token, N_PROMPT, "a"), 0);
    assert_int_equal(known(s, token, N_PROMPT, "a"), N_PROMPT - 1);
    assert_int_equal(known(s, token, N_PROMPT, "b"), 0);
    kvd_session_close(s);

    s = open_with(&o); /* the salt's key is the directory's */
    assert_int_equal(known(s, token, N_PROMPT, "a"), N_PROMPT - 1);
    assert_int_equal(known(s, token, N_PROMPT, "c"), 0);
    assert_int_equal(kvd_seq_truncate(s, 1, 0, &err), KVD_OK);
    if (kvd_session_clear_cache(s, &json, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_non_null(strstr(json, "\"units\":0,"));
    kvd_free(json);
    assert_int_equal(known(s, token, N_PROMPT, "a"), 0);
    assert_int_equal(known(s, token, N_PROMPT, NULL), 0);
    kvd_session_close(s);
    dm_dir_remove(dir);
}

static void clear(kvd_session *s)
{
    kvd_err err = { 0 };
    char   *json;

    if (kvd_session_clear_cache(s, &json, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kvd_free(json);
}

/* A cache with room for some prompts: what is held is there after many others, what is not is not.
 * A hold on what is not known is none; what is held stays when the cache is emptied. */
static void hold_keeps(void **state)
{
    char         dir[256];
    int32_t      token[N_PROMPT];
    tiny_options o = { .n_seq = 2, .dir = dir };
    kvd_prompt   p = KVD_PROMPT_INIT;
    kvd_hold    *hold;
    kvd_session *s;
    kvd_stats    stats = { .struct_size = sizeof(stats) };

    (void)state;
    p.token   = token;
    p.n_token = N_PROMPT;
    for (int held = 0; held < 2; held++) {
        dm_dir_make(dir);
        o.cache_bytes = 0;
        s             = open_with(&o);
        fill(token, 1, N_PROMPT);
        assert_int_equal(kvd_hold_open(&hold, s, &p, NULL), KVD_OK);
        assert_null(hold);
        assert_int_equal(known(s, token, N_PROMPT, NULL), 0);
        kvd_session_get_stats(s, &stats);
        kvd_session_close(s);

        o.cache_bytes = 3 * stats.kv_disk_used_bytes + stats.kv_disk_used_bytes / 2;
        s             = open_with(&o);
        if (held) {
            assert_int_equal(kvd_hold_open(&hold, s, &p, NULL), KVD_OK);
            assert_non_null(hold);
        }
        for (uint32_t i = 2; i < 10; i++) {
            fill(token, i, N_PROMPT);
            assert_int_equal(known(s, token, N_PROMPT, NULL), 0);
        }
        assert_int_equal(known(s, token, N_PROMPT, NULL), N_PROMPT - 1); /* stored all the same */
        fill(token, 1, N_PROMPT);
        assert_int_equal(known(s, token, N_PROMPT, NULL), held ? N_PROMPT - 1 : 0);
        assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
        clear(s);
        assert_int_equal(known(s, token, N_PROMPT, NULL), held ? N_PROMPT - 1 : 0);
        kvd_hold_close(hold);
        assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
        clear(s);
        assert_int_equal(known(s, token, N_PROMPT, NULL), 0);
        kvd_session_close(s);
        dm_dir_remove(dir);
    }
    kvd_hold_close(NULL);
}

/* Three equal prompts, whose last blocks have room to grow, in a cache with room for 3.6 of them:
 * two are held, since holds may take half of it.  Salted ones may take an eighth. */
static void hold_has_a_limit(void **state)
{
    char         dir[256];
    int32_t      token[N_PROMPT];
    tiny_options o = { .n_seq = 2, .dir = dir };
    kvd_prompt   p = KVD_PROMPT_INIT;
    kvd_hold    *hold[3];
    kvd_session *s;
    kvd_stats    stats = { .struct_size = sizeof(stats) };

    (void)state;
    p.token   = token;
    p.n_token = N_PROMPT;
    for (int salted = 0; salted < 2; salted++) {
        p.salt       = salted ? "x" : NULL;
        p.salt_bytes = (size_t)salted;
        dm_dir_make(dir);
        o.cache_bytes = 0;
        s             = open_with(&o);
        for (uint32_t i = 0; i < 3; i++) {
            fill(token, i, N_PROMPT);
            assert_int_equal(known(s, token, N_PROMPT, p.salt), 0);
        }
        kvd_session_get_stats(s, &stats);
        kvd_session_close(s);

        o.cache_bytes = stats.kv_disk_used_bytes / 30 * (salted ? 140 : 36);
        s             = open_with(&o);
        for (uint32_t i = 0; i < 3; i++) {
            fill(token, i, N_PROMPT);
            assert_int_equal(kvd_hold_open(&hold[i], s, &p, NULL), KVD_OK);
        }
        assert_true(hold[0] && hold[1] && !hold[2]);
        kvd_hold_close(hold[0]);
        assert_int_equal(kvd_hold_open(&hold[2], s, &p, NULL), KVD_OK);
        assert_non_null(hold[2]);
        kvd_hold_close(hold[1]);
        kvd_hold_close(hold[2]);
        kvd_session_close(s);
        dm_dir_remove(dir);
    }
}

static void hold_refuses(void **state)
{
    const tiny_options o        = { .n_seq = 1 };
    int32_t            token[2] = { 1, 2 };
    kvd_prompt         p        = KVD_PROMPT_INIT;
    kvd_session       *s        = open_with(&o);
    kvd_hold          *hold;
    kvd_err            err = { 0 };

    (void)state;
    assert_int_equal(kvd_hold_open(&hold, s, &p, &err), KVD_E_INVAL);
    p.token   = token;
    p.n_token = TINY_CTX + 1;
    assert_int_equal(kvd_hold_open(&hold, s, &p, &err), KVD_E_FULL);
    p.n_token    = 2;
    p.salt       = "x";
    p.salt_bytes = KVD_SALT_BYTES_MAX + 1;
    assert_int_equal(kvd_hold_open(&hold, s, &p, &err), KVD_E_INVAL);
    p.salt_bytes = 1;
    assert_int_equal(kvd_hold_open(&hold, s, &p, &err), KVD_OK); /* no cache */
    assert_null(hold);
    kvd_session_close(s);
}

/* As little as can be of sequence 1's prefix. */
static kvd_status begin_some(kvd_session *s, const int32_t *token, uint32_t n, kvd_err *err)
{
    kvd_prompt p = KVD_PROMPT_INIT;

    p.token    = token;
    p.n_token  = n;
    p.slice_ns = 1;
    return kvd_prompt_begin(s, 1, &p, err);
}

/* The prefix of sequence 1 in parts, beside steps of sequence 0; how many. */
static uint32_t read_in_parts(kvd_session *s, const int32_t *token, uint32_t n)
{
    kvd_err    err = { 0 };
    uint32_t   i   = 0;
    kvd_status st;

    while ((st = begin_some(s, token, n, &err)) == KVD_E_BUSY) {
        kvd_prompt other = KVD_PROMPT_INIT;

        assert_int_equal(kvd_seq_len(s, 1), 0);
        piece(s, NULL, 0, true, i++);
        kv_check(s->kv);
        other.token    = token;
        other.n_token  = n;
        other.slice_ns = 1;
        assert_int_equal(kvd_prompt_begin(s, 2, &other, &err), KVD_E_BUSY); /* not its turn */
        assert_int_equal(kvd_seq_truncate(s, 2, 0, NULL), KVD_OK);
    }
    if (st != KVD_OK)
        fail_msg("%s", err.msg);
    return i;
}

static void begun_prompt_takes_nothing_else(kvd_session *s, const int32_t *token, uint32_t n)
{
    const uint32_t seq = 1;
    kvd_batch      b   = KVD_BATCH_INIT;
    kvd_err        err = { 0 };

    assert_int_equal(begin_some(s, token, n, &err), KVD_E_BUSY);
    b.token   = token;
    b.seq     = &seq;
    b.n_token = 1;
    assert_int_equal(kvd_eval(s, &b, &err), KVD_E_BUSY);
    assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK); /* given up */
    kv_check(s->kv);
    assert_int_equal(begin_some(s, token, n, &err), KVD_E_BUSY);
    assert_int_equal(begin_some(s, token + 1, n - 1, &err), KVD_OK); /* another: nothing is known */
    assert_int_equal(kvd_seq_len(s, 1), 0);
    assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
    assert_int_equal(begin_some(s, token, n, &err), KVD_E_BUSY);
    if (kvd_prefill(s, 1, token, n, NULL, NULL, &err) != KVD_OK) /* at once after all */
        fail_msg("%s", err.msg);
    assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
    kv_check(s->kv);
}

/* What is known comes back in parts, while another sequence goes on: the same bits, wherever K and
 * V lie. */
static void known_in_parts(void **state)
{
    char    dir[256];
    int32_t token[N_PROMPT], other[N_OTHER];

    (void)state;
    fill(token, 1, N_PROMPT);
    fill(other, 5, N_OTHER);
    for (uint32_t i = 0; i < 5; i++) {
        const tiny_options plain = { .n_seq = 3,
                                     .tiers = i % 2,
                                     .mode  = i / 2 ? KVD_ATTENTION_SPARSE : KVD_ATTENTION_DENSE };
        tiny_options       o     = plain;
        const uint64_t     h     = whole(&plain, token, N_PROMPT);
        kvd_err            err   = { 0 };
        kvd_session       *s;

        dm_dir_make(dir);
        o.dir = dir;
        assert_int_equal(whole(&o, token, N_PROMPT), h); /* and it is stored */
        s = open_with(&o);
        if (kvd_prefill(s, 0, other, N_OTHER, NULL, NULL, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        begun_prompt_takes_nothing_else(s, token, N_PROMPT);
        assert_true(read_in_parts(s, token, N_PROMPT) > 0);
        assert_int_equal(kvd_seq_len(s, 1), N_PROMPT - 1);
        feed(s, token, N_PROMPT);
        assert_int_equal(steps(s, 1), h);
        assert_int_equal(kvd_seq_truncate(s, 1, 0, NULL), KVD_OK);
        assert_int_equal(begin_some(s, token, N_PROMPT, &err), KVD_E_BUSY);
        kvd_session_close(s); /* in the midst of it */
        dm_dir_remove(dir);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_in_pieces), cmocka_unit_test(ends_where_it_was_said),
        cmocka_unit_test(hold_keeps),          cmocka_unit_test(hold_has_a_limit),
        cmocka_unit_test(hold_refuses),        cmocka_unit_test(cache_by_salt),
        cmocka_unit_test(known_in_parts)
    };
    const uint64_t seed = argc > 2 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 10)
                                                                     : kvd_now_ns() % 100000;
    int            failed;

    printf("--seed %llu\n", (unsigned long long)seed);
    kvd_rng_seed(&rng_, seed);
    m_     = tiny_model("llama");
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    kvd_model_close(m_);
    return failed;
}
