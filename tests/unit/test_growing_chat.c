/* SPDX-License-Identifier: Apache-2.0 */
/* test_growing_chat.c - a chat of 12 turns with a prefix cache, in one process and with a new one
 * for every turn: only what is new is written.  All bytes of data files are at most 1.5 times the
 * new tokens' K and V in one process, and twice with a process a turn.
 * usage: test_growing_chat [MODEL.gguf]   (any model; without one the shape of a small one) */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/tiny.h"

enum {
    N_TURN        = SANITIZED ? 5 : 12,
    QUESTION_MIN  = 20,
    QUESTION_MORE = 60,
    ANSWER_MIN    = 40,
    ANSWER_MORE   = 100
};

static const char *path_;
static char        dir_[256];

typedef struct chat {
    int32_t  token[TINY_CTX];
    uint32_t n;
    kvd_rng  rng;
} chat;

typedef struct written {
    uint64_t record, index, tail;
} written;

static kvd_model *open_model(void)
{
    kvd_model_params p   = KVD_MODEL_PARAMS_INIT;
    kvd_err          err = { 0 };
    kvd_model       *m;

    p.path     = path_;
    p.shape    = path_ ? NULL : "tiny"; /* a token of a lane has as many bytes as in a real model */
    p.n_thread = 2;
    /* prompts are cut where the cache ends */
    p.deterministic = true;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return m;
}

static kvd_session *open_session(kvd_model *m)
{
    const tiny_options o   = { .dir = dir_, .mode = KVD_ATTENTION_SPARSE };
    kvd_err            err = { 0 };
    kvd_session       *s;

    if (tiny_session(&s, m, &o, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

static void add_written(kvd_session *s, written *w)
{
    kvd_stats st = { .struct_size = sizeof(st) };

    assert_int_equal(kvd_session_flush(s, NULL), KVD_OK);
    kvd_session_get_stats(s, &st);
    w->record += st.disk_put_bytes;
    w->index += st.disk_aux_bytes - st.disk_tail_bytes;
    w->tail += st.disk_tail_bytes;
}

/* A question and an answer; the sequence holds `held` tokens of the chat before. */
static void turn(chat *c, kvd_session *s, uint32_t held)
{
    const uint32_t n_question = QUESTION_MIN + (uint32_t)kvd_rng_below(&c->rng, QUESTION_MORE);
    const uint32_t n_answer   = ANSWER_MIN + (uint32_t)kvd_rng_below(&c->rng, ANSWER_MORE);
    kvd_err        err        = { 0 };

    assert_true(c->n + n_question + n_answer < TINY_CTX);
    for (uint32_t i = 0; i < n_question; i++, c->n++)
        c->token[c->n] = (int32_t)kvd_rng_below(&c->rng, 256);
    if (kvd_prefill(s, 0, c->token + held, c->n - held, NULL, NULL, &err) != KVD_OK ||
        tiny_generate(s, n_answer, NULL, c->token + c->n, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    c->n += n_answer;
}

/* Of the directory, with what sessions stored when they were closed. */
static uint64_t count_of(const char *name)
{
    kvd_err     err = { 0 };
    const char *at;
    uint64_t    n;
    char       *json;

    if (kvd_cache_command(dir_, KVD_CACHE_STATS, 0, &json, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    at = strstr(json, name);
    assert_non_null(at);
    n = strtoull(strchr(at, ':') + 1, NULL, 10);
    kvd_free(json);
    return n;
}

/* Returns bytes written by a chat whose sessions last one turn, or all of them. */
static written talk(kvd_model *m, bool one_session, uint32_t *n_token)
{
    written      w = { 0 };
    chat         c = { 0 };
    kvd_session *s = open_session(m);

    kvd_rng_seed(&c.rng, 5);
    for (uint32_t i = 0; i < N_TURN; i++) {
        kvd_stats st = { .struct_size = sizeof(st) };

        turn(&c, s, one_session ? c.n : 0);
        assert_int_equal(kvd_session_flush(s, NULL), KVD_OK); /* a real answer takes longer */
        kvd_session_get_stats(s, &st);
        if (!one_session && i > 0) /* all of the chat but its last token and the new question */
            assert_true(st.n_prefill + st.n_cached + ANSWER_MIN + ANSWER_MORE > c.n &&
                        st.n_prefill <= QUESTION_MIN + QUESTION_MORE + 1);
        if (one_session || i + 1 == N_TURN)
            continue;
        add_written(s, &w);
        kvd_session_close(s);
        s = open_session(m);
    }
    add_written(s, &w);
    kvd_session_close(s);
    *n_token = c.n;
    return w;
}

static void check(bool one_session, double most)
{
    kvd_model     *m = open_model();
    kvd_model_info i = { .struct_size = sizeof(i) };
    uint32_t       n;
    written        w;
    double         of_new, all;

    dm_dir_make(dir_);
    w = talk(m, one_session, &n);
    kvd_model_get_info(m, &i);
    of_new = 1.0 / ((double)n * (double)i.kv_bytes_per_token);
    all    = (double)count_of("\"written_today_bytes\":") * of_new;
    print_message("%s: %u turns, %u tokens: records %llu bytes (%.3f of the new tokens' records), "
                  "index %llu (%.3f), tails but those at close %llu (%.3f); in all with padding "
                  "%.3f; %llu tails are kept\n",
                  one_session ? "one process" : "a process a turn", N_TURN, n,
                  (unsigned long long)w.record, (double)w.record * of_new,
                  (unsigned long long)w.index, (double)w.index * of_new, (unsigned long long)w.tail,
                  (double)w.tail * of_new, all, (unsigned long long)count_of("\"tails\":"));
    assert_true((double)w.record * of_new <= 1.1);
    assert_true((double)w.record * of_new > 0.7); /* what is sealed is there */
    assert_true(all > 1.0 && all <= most);
    dm_dir_remove(dir_);
    kvd_model_close(m);
}

static void test_one_process(void **state)
{
    (void)state;
    check(true, 1.5);
}

static void test_a_process_a_turn(void **state)
{
    (void)state;
    check(false, 2.0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_process),
        cmocka_unit_test(test_a_process_a_turn),
    };

    path_ = argc > 1 ? argv[1] : NULL;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
