/* SPDX-License-Identifier: Apache-2.0 */
/* test_srv_pace.c - pieces of prompts keep to the pace of answers, over machines that are made up:
 * one whose cost is a straight line, one with a jump where other kernels begin, one that grows
 * slower, each with steps that spread. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/srv_engine.h"

enum { N_STEP = 6000, N_ROW = 4, MOST = 508 };
#define QUIET_NS 10e6

static kvd_rng rng_;

typedef double (*machine)(uint32_t n_prompt, uint32_t step);

static double line(uint32_t n, uint32_t step)
{
    (void)step;
    return 0.3e6 * n;
}

/* A few rows cost by the row; many cost the same at first. */
static double jump(uint32_t n, uint32_t step)
{
    (void)step;
    return n <= 4 ? 2e6 * n : n < 32 ? 14e6 : 6e6 + 0.04e6 * n;
}

static double deeper(uint32_t n, uint32_t step)
{
    return (0.05e6 + 0.001e6 * step) * n;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Steps with a prompt that never ends; their times beside a quiet step's, sorted; tokens done. */
static uint64_t run(machine m, double gap_ms, double *time)
{
    srv_pace p    = { .gap_ns = gap_ms * 1e6 };
    uint64_t done = 0;

    for (uint32_t i = 0; i < 20; i++)
        srv_pace_learn(&p, N_ROW, 0, QUIET_NS);
    for (uint32_t i = 0; i < N_STEP; i++) {
        const uint32_t n = srv_pace_budget(&p, N_ROW, MOST);

        assert_true(n <= MOST);
        time[i] = (QUIET_NS + (n ? m(n, i) : 0.0)) * (0.9 + 0.2 * (double)kvd_rng_f32(&rng_));
        srv_pace_learn(&p, N_ROW, n, time[i]);
        done += n;
    }
    qsort(time, N_STEP, sizeof(*time), by_value);
    return done;
}

static void keeps_the_pace(void **state)
{
    static double        time[N_STEP];
    static const machine machines[] = { line, jump, deeper };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(machines); i++) {
        run(machines[i], 0.0, time);
        assert_true(time[N_STEP * 99 / 100] <= 3.0 * QUIET_NS);
        run(machines[i], 50.0, time);
        assert_true(time[N_STEP * 99 / 100] <= 1.3 * 50e6);
    }
}

static void gets_on(void **state)
{
    static double time[N_STEP];

    (void)state;
    /* the best that a step of two quiet ones has room for is 33 and 100; of sizes 32 and 64 */
    assert_true(run(line, 0.0, time) > 0.5 * 32 * N_STEP);
    assert_true(run(jump, 0.0, time) > 0.4 * 64 * N_STEP); /* found beyond sizes that do not fit */
    assert_true(run(deeper, 0.0, time) >= N_STEP);
}

static void alone(void **state)
{
    srv_pace p = { 0 };

    (void)state;
    assert_true(srv_pace_budget(&p, 0, 512) > 0);
    assert_true(srv_pace_token_ns(&p) == 0.0);
    srv_pace_learn(&p, 1, 0,
                   QUIET_NS); /* no token of a prompt takes longer than one of an answer */
    assert_true(srv_pace_token_ns(&p) == QUIET_NS);
    for (uint32_t i = 0; i < 40; i++)
        srv_pace_learn(&p, 0, 64, 64 * 5e6);
    assert_in_range(srv_pace_budget(&p, 0, 512), 45, 55); /* a quarter of a second */
    assert_in_range(srv_pace_token_ns(&p), 4900000, 5100000);
    assert_int_equal(srv_pace_budget(&p, 0, 20), 20);
    assert_int_equal(srv_pace_budget(&p, 3, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(keeps_the_pace), cmocka_unit_test(gets_on),
                                        cmocka_unit_test(alone) };

    kvd_rng_seed(&rng_, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
