/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_cache_kill.c - a process that generates with a prefix cache is killed (SIGKILL) at
 * random times and at named points of the block store.  Then the directory opens in less than 2 s,
 * the text is that of a run without a cache, what a flush had acknowledged is found, nothing is in
 * quarantine, and kvd_cache_command() finds everything whole.
 * usage: test_fault_cache_kill [--rounds N] [--seed N] */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/kv_cache.h"
#include "kv/kv_disk_int.h"
#include "support/disk_model.h"
#include "support/split.h"
#include "support/tiny.h"

#define N_TEXT  6u
#define N_GEN   40u
#define OPEN_NS UINT64_C(30000000000) /* of wall time, on a busy machine */

static const char *const point_[] = { "reserved", "written", "synced", "published", "evicted" };

static uint32_t n_round_ = 10;
static uint64_t seed_    = 1;
static char     dir_[256];
static char     self_[4096];

/* How long a text is: some end within a block, some behind a segment. */
static uint32_t length_of(uint32_t text)
{
    return 300 + text * 950;
}

/* ---- the child: it is executed anew, because a process with threads must not fork --------- */

typedef struct doom {
    const char *point; /* NULL: somebody else kills us */
    uint32_t    left;  /* times the point is passed before */
} doom;

static void at_point(void *ctx, const char *point)
{
    doom *m = ctx;

    if (m->point && strcmp(m->point, point) == 0 && m->left-- == 0)
        raise(SIGKILL);
}

static int child_failed(const kvd_err *err)
{
    fprintf(stderr, "child: %s\n", err->msg);
    return 1;
}

/* Prompts, answers, cuts; tells through standard output which text a flush has acknowledged. */
static int child(const char *dir, uint64_t seed, const char *point, bool evicts)
{
    kvd_rng      rng;
    kvd_err      err = { 0 };
    kvd_model   *m   = tiny_model("llama");
    kvd_session *s;
    doom         d = { .point = *point ? point : NULL };
    tiny_options o = { .dir = dir, .mode = KVD_ATTENTION_SPARSE };

    kvd_rng_seed(&rng, seed);
    d.left        = (uint32_t)kvd_rng_below(&rng, 24);
    o.tiers       = kvd_rng_below(&rng, 2);
    o.kv_host     = kvd_rng_below(&rng, 2) ? 0 : 60000;
    o.cache_bytes = evicts ? 1500000 : 0;
    if (kvd_rng_below(&rng, 2)) /* what it stores is on its way from a device for some time */
        split_begin(m->be);
    if (tiny_session(&s, m, &o, &err) != KVD_OK)
        return child_failed(&err);
    s->kv->cache->disk->p.point     = at_point;
    s->kv->cache->disk->p.point_ctx = &d;
    for (uint32_t i = 0; i < 1000; i++) {
        const uint32_t text = (uint32_t)kvd_rng_below(&rng, N_TEXT);
        const uint32_t n    = length_of(text);

        if (tiny_prefill(s, text, n, &err) != KVD_OK ||
            tiny_generate(s, (uint32_t)kvd_rng_below(&rng, 300), NULL, NULL, &err) != KVD_OK ||
            kvd_session_flush(s, &err) != KVD_OK || kvd_seq_truncate(s, 0, 0, &err) != KVD_OK)
            return child_failed(&err);
        if (write(STDOUT_FILENO, &text, sizeof(text)) != sizeof(text))
            return 1;
        if (i % 8 == 7 && !evicts) { /* so that there is always something to write */
            kvd_session_close(s);
            (void)!write(STDOUT_FILENO, &(uint32_t){ UINT32_MAX }, sizeof(uint32_t));
            dm_dir_empty(dir);
            if (tiny_session(&s, m, &o, &err) != KVD_OK)
                return child_failed(&err);
            s->kv->cache->disk->p.point     = at_point;
            s->kv->cache->disk->p.point_ctx = &d;
        }
    }
    return 2; /* nobody killed us */
}

/* ---- the parent ------------------------------------------------------------------- */

static kvd_model *model_;
static uint64_t   want_[N_TEXT]; /* hashes of runs without a cache */
static bool       known_[N_TEXT];
static char       damage_[1024]; /* what the library said about damage */

static void watch_log(void *ctx, kvd_log_level level, const char *msg)
{
    (void)ctx;
    (void)level;
    if (strstr(msg, "damaged") || strstr(msg, "quarantin"))
        snprintf(damage_, sizeof(damage_), "%s", msg);
}

static uint64_t answer(const tiny_options *o, uint32_t text, uint64_t *n_cached, uint64_t *open_ns)
{
    const uint64_t t0   = kvd_now_ns();
    kvd_stats      st   = { .struct_size = sizeof(st) };
    kvd_err        err  = { 0 };
    uint64_t       hash = 0;
    kvd_session   *s;

    if (tiny_session(&s, model_, o, &err) != KVD_OK)
        fail_msg("open: %s", err.msg);
    *open_ns = kvd_now_ns() - t0;
    if (tiny_prefill(s, text, length_of(text), &err) != KVD_OK ||
        tiny_generate(s, N_GEN, &hash, NULL, &err) != KVD_OK)
        fail_msg("text %u: %s", text, err.msg);
    kvd_session_get_stats(s, &st);
    kv_check(s->kv);
    kvd_session_close(s);
    *n_cached = st.n_cached;
    return hash;
}

static uint64_t want(uint32_t text)
{
    const tiny_options o = { .mode = KVD_ATTENTION_SPARSE };
    uint64_t           n, ns;

    if (!known_[text])
        want_[text] = answer(&o, text, &n, &ns);
    known_[text] = true;
    return want_[text];
}

static uint64_t json_number(const char *json, const char *name)
{
    const char *at = strstr(json, name);

    assert_non_null(at);
    return strtoull(at + strlen(name), NULL, 10);
}

static uint64_t command_number(kvd_cache_verb verb, const char *name)
{
    kvd_err  err = { 0 };
    char    *json;
    uint64_t n;

    if (kvd_cache_command(dir_, verb, 0, &json, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    n = json_number(json, name);
    kvd_free(json);
    return n;
}

/* Returns how many tokens came from the cache. */
static uint64_t reopen_and_check(kvd_rng *rng, const bool acknowledged[N_TEXT])
{
    const uint32_t     text = (uint32_t)kvd_rng_below(rng, N_TEXT);
    const tiny_options o    = { .dir     = dir_,
                                .tiers   = kvd_rng_below(rng, 2),
                                .kv_host = kvd_rng_below(rng, 2) ? 0 : 60000,
                                .mode    = KVD_ATTENTION_SPARSE };
    uint64_t           n_cached, open_ns;

    damage_[0] = 0;
    assert_true(answer(&o, text, &n_cached, &open_ns) == want(text));
    assert_true(open_ns < OPEN_NS);
    if (acknowledged[text])
        assert_int_equal(n_cached, length_of(text) - 1);
    assert_int_equal(command_number(KVD_CACHE_VERIFY, "\"bad\":"), 0);
    assert_int_equal(command_number(KVD_CACHE_STATS, "\"quarantined\":"), 0);
    if (damage_[0])
        fail_msg("%s", damage_);
    return n_cached;
}

static pid_t start_child(uint64_t seed, const char *point, bool evicts, int *from)
{
    char  text[32];
    int   fd[2];
    pid_t pid;

    assert_int_equal(pipe(fd), 0);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fd[1], STDOUT_FILENO);
        close(fd[0]);
        close(fd[1]);
        execl(self_, self_, "--child", dir_, text, point, evicts ? "1" : "0", (char *)NULL);
        _exit(3);
    }
    close(fd[1]);
    *from = fd[0];
    return pid;
}

static void kill_and_reopen(void **state)
{
    kvd_rng  rng;
    bool     acknowledged[N_TEXT] = { false };
    uint64_t n_cached = 0, n_told = 0;

    (void)state;
    kvd_rng_seed(&rng, seed_);
    for (uint32_t round = 0; round < n_round_; round++) {
        const bool  evicts = round % 5 == 4, named = round % 2 == 1;
        const char *point = named ? point_[kvd_rng_below(&rng, evicts ? 5 : 4)] : "";
        int         from, status;
        uint32_t    told;
        pid_t       pid;

        if (evicts || round % 5 == 0) {
            dm_dir_empty(dir_);
            memset(acknowledged, 0, sizeof(acknowledged));
        }
        pid = start_child(seed_ * 1000 + round, point, evicts, &from);
        if (!named) {
            usleep(20000 + (useconds_t)kvd_rng_below(&rng, 1500000));
            kill(pid, SIGKILL);
        }
        while (read(from, &told, sizeof(told)) == sizeof(told)) {
            if (told == UINT32_MAX)
                memset(acknowledged, 0, sizeof(acknowledged));
            else
                acknowledged[told] = !evicts;
            n_told++;
        }
        close(from);
        while (waitpid(pid, &status, 0) < 0)
            assert_int_equal(errno, EINTR);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        n_cached += reopen_and_check(&rng, acknowledged);
    }
    print_message("%u kills, %llu texts acknowledged before, %llu tokens found after\n", n_round_,
                  (unsigned long long)n_told, (unsigned long long)n_cached);
    assert_true(n_told > 0 && n_cached > 0);
}

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    model_ = tiny_model("llama");
    kvd_set_log(watch_log, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvd_set_log(NULL, NULL);
    kvd_model_close(model_);
    dm_dir_remove(dir_);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(kill_and_reopen, setup, teardown),
    };
    const ssize_t n = readlink("/proc/self/exe", self_, sizeof(self_) - 1);

    if (argc == 6 && strcmp(argv[1], "--child") == 0)
        return child(argv[2], strtoull(argv[3], NULL, 10), argv[4], argv[5][0] == '1');
    if (n < 0)
        return 77;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--rounds") == 0)
            n_round_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
    }
    print_message("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
