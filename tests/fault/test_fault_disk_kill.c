/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_disk_kill.c - the block store's process is killed (SIGKILL) at named points and at
 * random times.  Reopened, the store starts in seconds; what was published is whole, nothing whole
 * is in quarantine, and what a flush had acknowledged is found.  Two processes: the second is
 * refused.
 * usage: test_fault_disk_kill [--rounds N] [--seed N] */
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

#include "support/disk_model.h"

#define OPEN_NS  UINT64_C(30000000000) /* of wall time, on a busy machine */
#define N_DEPTH  36u
#define ACKS_MAX 4096u

static const char *const point_[] = { "reserved", "written", "synced", "published", "evicted" };

static uint32_t n_round_ = 15;
static uint64_t seed_    = 1;
static char     dir_[256];
static int32_t  token_[N_DEPTH * DM_BLOCK];

/* ---- the child -------------------------------------------------------------------- */

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

/* Stores one thing after the other, tells through the pipe what a flush acknowledged. */
static void child(int ack, uint64_t seed, doom *m, bool evicts)
{
    kv_disk_params p = dm_params(dir_);
    kv_disk       *d;
    kvd_rng        rng;
    kvd_err        err;

    kvd_rng_seed(&rng, seed);
    p.point     = at_point;
    p.point_ctx = m;
    p.max_bytes = evicts ? 1500000 : 0;
    if (kv_disk_open(&d, &p, &err) != KVD_OK) {
        fprintf(stderr, "child: %s\n", err.msg);
        _exit(1);
    }
    for (uint32_t i = 0; i < 100000; i++) {
        dm_unit u = { .kind = (kv_disk_kind)kvd_rng_below(&rng, 3) };

        u.first_block = kvd_rng_below(&rng, u.kind == KV_DISK_SEGMENT ? N_DEPTH - 15 : N_DEPTH - 1);
        u.n_tail_token = u.kind == KV_DISK_TAIL ? 1 + (uint32_t)kvd_rng_below(&rng, DM_BLOCK) : 0;
        token_[0]      = (int32_t)kvd_rng_below(&rng, 50); /* another sequence each time */
        if (dm_put(d, token_, &u, &rng, &err) != KVD_OK ||
            (i % 4 == 3 && kv_disk_flush(d, &err) != KVD_OK)) {
            fprintf(stderr, "child: %s\n", err.msg);
            _exit(1);
        }
        if (u.kind == KV_DISK_BLOCK && i % 4 == 3) {
            const int32_t told[2] = { token_[0], (int32_t)u.first_block };

            if (write(ack, told, sizeof(told)) != sizeof(told))
                _exit(1);
        }
    }
    _exit(2); /* nobody killed us */
}

/* ---- the parent ------------------------------------------------------------------- */

static void acknowledged_is_there(kv_disk *d, const int32_t told[2])
{
    const dm_unit u = { KV_DISK_BLOCK, (uint64_t)told[1], 0, 0, NULL };
    kv_disk_name  n;
    kv_disk_put   put;

    token_[0] = told[0];
    n         = dm_name(d, token_, &u);
    assert_int_equal(kv_disk_put_begin(d, &n, &put, NULL), KVD_OK);
    assert_int_equal(put, KV_DISK_NONE); /* the store has it */
}

static void reopen_and_check(const int32_t (*told)[2], uint32_t n_told, bool evicts)
{
    const kv_disk_params p     = dm_params(dir_);
    const uint64_t       start = kvd_now_ns();
    uint64_t             n_ok, n_bad, open_ns;
    kv_disk_stats        s;
    kv_disk             *d;
    kvd_err              err = { 0 };

    if (kv_disk_open(&d, &p, &err) != KVD_OK)
        fail_msg("reopen: %s", err.msg);
    open_ns = kvd_now_ns() - start;
    assert_true(open_ns < OPEN_NS);
    kv_disk_check(d);
    if (kv_disk_verify(d, &n_ok, &n_bad, &err) != KVD_OK)
        fail_msg("verify: %s", err.msg);
    kv_disk_stats_get(d, &s);
    assert_int_equal(n_bad, 0);
    assert_int_equal(s.n_quarantined, 0);
    assert_int_equal(s.n_bad, 0);
    assert_int_equal(n_ok, s.n_unit);
    for (uint32_t i = 0; i < n_told && !evicts; i++)
        acknowledged_is_there(d, told[i]);
    for (int32_t t = 0; t < 50; t++) { /* what is found is right */
        kv_disk_match m;
        kvd_rng       rng;

        kvd_rng_seed(&rng, 1);
        token_[0] = t;
        assert_int_equal(dm_find(d, token_, N_DEPTH * DM_BLOCK, NULL, &m, &err), KVD_OK);
        if (dm_read(d, &m, token_, &rng, false, &err) != KVD_OK)
            fail_msg("read: %s", err.msg);
        kv_disk_match_close(d, &m);
    }
    kv_disk_close(d);
}

static void kill_and_reopen(void **state)
{
    static int32_t told[ACKS_MAX][2];
    kvd_rng        rng;
    uint32_t       n_told = 0, n_all = 0;

    (void)state;
    kvd_rng_seed(&rng, seed_);
    for (uint32_t round = 0; round < n_round_; round++) {
        const bool named  = round % 3 != 2;
        const bool evicts = round / 8 % 2 == 1; /* the store is kept for eight rounds */
        doom       m      = { .left = (uint32_t)kvd_rng_below(&rng, 60) };
        int        ack[2], status;
        pid_t      pid;
        ssize_t    n;

        if (round % 8 == 0) {
            dm_dir_empty(dir_);
            n_told = 0;
        }
        if (named) /* "evicted" is passed only where there are limits */
            m.point = point_[kvd_rng_below(&rng, evicts ? 5 : 4)];
        assert_int_equal(pipe(ack), 0);
        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            close(ack[0]);
            child(ack[1], seed_ * 1000 + round, &m, evicts);
        }
        close(ack[1]);
        if (!named) {
            usleep(1000 + (useconds_t)kvd_rng_below(&rng, 60000));
            kill(pid, SIGKILL);
        }
        while (n_told < ACKS_MAX && (n = read(ack[0], told[n_told], sizeof(told[0]))) > 0) {
            assert_int_equal(n, sizeof(told[0]));
            n_told++;
            n_all++;
        }
        close(ack[0]); /* more than we can take note of: it ends there */
        while (waitpid(pid, &status, 0) < 0)
            assert_int_equal(errno, EINTR);
        assert_true(WIFSIGNALED(status) &&
                    (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGPIPE));
        reopen_and_check((const int32_t(*)[2])told, n_told, evicts);
    }
    print_message("%u kills, %u acknowledged units looked for\n", n_round_, n_all);
    assert_true(n_all > 0);
}

static void two_processes(void **state)
{
    const kv_disk_params p = dm_params(dir_);
    kv_disk             *d;
    pid_t                pid;
    int                  status;

    (void)state;
    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        kv_disk *other;
        kvd_err  err = { 0 };
        char     want[64];

        snprintf(want, sizeof(want), "in use by another process, %ld", (long)getppid());
        _exit(kv_disk_open(&other, &p, &err) == KVD_E_BUSY && strstr(err.msg, want) ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    kv_disk_close(d);
    assert_int_equal(kv_disk_open(&d, &p, NULL), KVD_OK);
    kv_disk_close(d);
}

static int setup(void **state)
{
    (void)state;
    dm_dir_make(dir_);
    for (uint32_t i = 0; i < N_DEPTH * DM_BLOCK; i++)
        token_[i] = (int32_t)(i % 1000);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    dm_dir_remove(dir_);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(kill_and_reopen, setup, teardown),
        cmocka_unit_test_setup_teardown(two_processes, setup, teardown),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--rounds") == 0)
            n_round_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
