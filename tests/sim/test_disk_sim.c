/* SPDX-License-Identifier: Apache-2.0 */
/* test_disk_sim.c - the block store over a disk with faults: whatever happens, a read gives the
 * right bytes or an error.
 *
 * Each seed is one run: random faults, random stores, searches and reads, reopening, a crash point
 * in some.  Two canaries prove that the test can fail: without checksums wrong bytes are seen, and
 * so they are when the test looks for the bytes of other tokens.
 * usage: test_disk_sim [--seed FIRST] [--seeds N] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"

#define N_WAY   3u
#define N_DEPTH 36u

static uint64_t first_seed_ = 1, n_seed_ = 300;

typedef struct sim_run {
    char           dir[256];
    kvd_rng        rng;
    os_io_sim      sim;
    kv_disk_params p;
    kv_disk       *d;
    int32_t        way[N_WAY][N_DEPTH * DM_BLOCK];
    uint64_t       n_right, n_error, n_wrong; /* matches read */
    uint64_t       n_quarantined, n_fault;
} sim_run;

static uint32_t rate(kvd_rng *rng, uint32_t max)
{
    return kvd_rng_below(rng, 3) ? 0 : (uint32_t)kvd_rng_below(rng, max);
}

/* Which faults, and how many of each, differ between seeds. */
static void choose_faults(sim_run *r, uint64_t seed)
{
    kvd_rng *g = &r->rng;

    r->sim = (os_io_sim){ .seed           = seed,
                          .read_eio       = rate(g, 2000),
                          .write_eio      = rate(g, 1000),
                          .sync_eio       = rate(g, 2000),
                          .enospc         = rate(g, 1000),
                          .read_short     = rate(g, 2000),
                          .read_flip      = rate(g, 3000),
                          .write_flip     = rate(g, 3000),
                          .read_misdirect = rate(g, 3000),
                          .delay          = rate(g, 30000),
                          .lost           = kvd_rng_below(g, 8) ? 0 : 100,
                          .crash_nth      = kvd_rng_below(g, 3) ? 0 : 1 + kvd_rng_below(g, 400) };
}

static void random_put(sim_run *r)
{
    const int32_t *token = r->way[kvd_rng_below(&r->rng, N_WAY)];
    dm_unit        u     = { .kind = (kv_disk_kind)kvd_rng_below(&r->rng, 3),
                             .prov = kvd_rng_below(&r->rng, 8) == 0,
                             .salt = kvd_rng_below(&r->rng, 8) ? NULL : "salt" };

    u.n_tail_token =
        u.kind == KV_DISK_TAIL ? 1 + (uint32_t)kvd_rng_below(&r->rng, 2 * DM_BLOCK - 1) : 0;
    u.first_block = kvd_rng_below(&r->rng, u.kind == KV_DISK_SEGMENT ? N_DEPTH - 15 : 5);
    (void)dm_put(r->d, token, &u, &r->rng, NULL);
    if (kvd_rng_below(&r->rng, 3) == 0)
        (void)kv_disk_flush(r->d, NULL);
}

static void random_read(sim_run *r, int32_t token_shift)
{
    int32_t      *token = r->way[kvd_rng_below(&r->rng, N_WAY)];
    const char   *salt  = kvd_rng_below(&r->rng, 8) ? NULL : "salt";
    kv_disk_match m;
    kvd_err       err = { 0 };
    kvd_status    st;

    st = dm_find(r->d, token, kvd_rng_below(&r->rng, N_DEPTH * DM_BLOCK + 1), salt, &m, &err);
    if (st != KVD_OK) {
        r->n_error++;
        return;
    }
    token[0] += token_shift;
    st = dm_read(r->d, &m, token, &r->rng, kvd_rng_below(&r->rng, 2), &err);
    token[0] -= token_shift;
    r->n_right += st == KVD_OK && m.n_span > 0;
    r->n_error += st != KVD_OK && st != KVD_E_DEVICE;
    r->n_wrong += st == KVD_E_DEVICE;
    kv_disk_match_close(r->d, &m);
}

static void open_store(sim_run *r)
{
    kvd_err err = { 0 };

    if (kv_disk_open(&r->d, &r->p, &err) != KVD_OK)
        fail_msg("open: %s", err.msg);
}

static void close_store(sim_run *r)
{
    kv_disk_stats s;

    kv_disk_stats_get(r->d, &s);
    r->n_quarantined += s.n_quarantined;
    kv_disk_close(r->d);
    r->d = NULL;
}

static void run_seed(sim_run *r, uint64_t seed, bool unchecked, int32_t token_shift)
{
    const uint64_t n_op = 40;

    kvd_rng_seed(&r->rng, seed);
    dm_dir_make(r->dir);
    for (uint32_t w = 0; w < N_WAY; w++)
        for (uint32_t i = 0; i < N_DEPTH * DM_BLOCK; i++)
            r->way[w][i] = i < w * 70 && w ? r->way[w - 1][i] : (int32_t)kvd_rng_below(&r->rng, 9);
    choose_faults(r, seed);
    r->p            = dm_params(r->dir);
    r->p.io.kind    = OS_IO_SIM;
    r->p.io.sim     = &r->sim;
    r->p.unchecked  = unchecked;
    r->p.timeout_ns = r->sim.lost ? 2000000 : 2000000000;
    r->p.gap_bytes  = 1 + (uint32_t)kvd_rng_below(&r->rng, 20000);
    r->p.max_bytes  = kvd_rng_below(&r->rng, 2) ? 0 : 2000000;
    open_store(r);
    for (uint64_t i = 0; i < n_op; i++) {
        const uint64_t op = kvd_rng_below(&r->rng, 12);

        if (op < 6)
            random_put(r);
        else if (op < 11)
            random_read(r, token_shift);
        else {
            close_store(r);
            open_store(r);
        }
        if (i % 8 == 0)
            kv_disk_check(r->d);
    }
    close_store(r);
    r->n_fault += r->sim.n_fault + (r->sim.crash_nth != 0);
    /* After the faults: what is found is right, or found out. */
    r->sim = (os_io_sim){ .seed = seed };
    open_store(r);
    for (uint32_t i = 0; i < 10; i++)
        random_read(r, token_shift);
    kv_disk_check(r->d);
    close_store(r);
    dm_dir_remove(r->dir);
}

static void right_or_error(void **state)
{
    sim_run *r = kvd_calloc(1, sizeof(*r));

    (void)state;
    for (uint64_t seed = first_seed_; seed < first_seed_ + n_seed_; seed++) {
        run_seed(r, seed, false, 0);
        if (r->n_wrong)
            fail_msg("wrong bytes with --seed %llu --seeds 1", (unsigned long long)seed);
    }
    print_message("%llu seeds from %llu: %llu faults, %llu reads right, %llu failed, %llu units"
                  " quarantined\n",
                  (unsigned long long)n_seed_, (unsigned long long)first_seed_,
                  (unsigned long long)r->n_fault, (unsigned long long)r->n_right,
                  (unsigned long long)r->n_error, (unsigned long long)r->n_quarantined);
    if (n_seed_ >= 100) { /* the runs were about something */
        assert_true(r->n_fault > n_seed_);
        assert_true(r->n_right > n_seed_);
        assert_true(r->n_error > n_seed_ / 4);
        assert_true(r->n_quarantined > n_seed_ / 4);
    }
    kvd_free(r);
}

static void canary_without_checksums(void **state)
{
    sim_run *r = kvd_calloc(1, sizeof(*r));

    (void)state;
    for (uint64_t seed = first_seed_; seed < first_seed_ + 30 && !r->n_wrong; seed++)
        run_seed(r, seed, true, 0);
    assert_true(r->n_wrong > 0);
    kvd_free(r);
}

static void canary_with_other_tokens(void **state)
{
    sim_run *r = kvd_calloc(1, sizeof(*r));

    (void)state;
    for (uint64_t seed = first_seed_; seed < first_seed_ + 30 && !r->n_wrong; seed++)
        run_seed(r, seed, false, 1);
    assert_true(r->n_wrong > 0);
    kvd_free(r);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_or_error),
        cmocka_unit_test(canary_without_checksums),
        cmocka_unit_test(canary_with_other_tokens),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            first_seed_ = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seeds") == 0)
            n_seed_ = strtoull(argv[i + 1], NULL, 10);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
