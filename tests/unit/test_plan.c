/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan.c - the knapsack solvers against enumeration and against each other, and the balance of
 * staging and cache.
 *
 * What is asserted of greedy: (1) always, it loses at most the benefit of the dearest option of a
 * group against the upper bound; (2) hence within 2 % of it at the size of real models, where no
 * lane holds much; (3) over random small cases of 6 to 23 groups, whose options are large parts of
 * the capacity, within 2 % of exact but for at most one in a thousand, and never beyond 10 %.  With
 * a handful of large options it can lose more: test_greedy_can_be_far_off holds the worst of 4
 * million random cases, 18 %, and shows that plan_solve() does not lose it. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan.h"

enum { MOST_GROUP = 640, MOST_OPTION = 6 };

static uint64_t seed = 1;

typedef struct table {
    plan_option  option[MOST_GROUP][MOST_OPTION];
    plan_group   group[MOST_GROUP];
    plan_problem p;
    uint64_t     least, most; /* cost of the cheapest and of the dearest options */
} table;

static void finish(table *t, uint32_t n_group)
{
    t->p     = (plan_problem){ .group = t->group, .n_group = n_group };
    t->least = t->most = 0;
    for (uint32_t g = 0; g < n_group; g++) {
        uint64_t low = UINT64_MAX, high = 0;

        t->group[g].option = t->option[g];
        for (uint32_t k = 0; k < t->group[g].n_option; k++) {
            low  = kvd_min_u64(low, t->option[g][k].cost);
            high = kvd_max_u64(high, t->option[g][k].cost);
        }
        t->least += low;
        t->most += high;
    }
}

/* Options with nothing in common: dominated ones, equal ones, zero costs. */
static void fill_wild(table *t, kvd_rng *r, uint32_t n_group, uint64_t scale)
{
    for (uint32_t g = 0; g < n_group; g++) {
        t->group[g].n_option = 1 + (uint32_t)kvd_rng_below(r, MOST_OPTION);
        for (uint32_t k = 0; k < t->group[g].n_option; k++) {
            t->option[g][k].cost    = kvd_rng_below(r, scale);
            t->option[g][k].benefit = kvd_rng_below(r, scale);
        }
    }
    finish(t, n_group);
}

/* Caps 1, 2, 4, ... of lanes with falling returns, as a profile gives them; noise breaks ties. */
static void fill_lanes(table *t, kvd_rng *r, uint32_t n_group, uint32_t n_cap)
{
    for (uint32_t g = 0; g < n_group; g++) {
        const uint64_t worth = 1000000 + kvd_rng_below(r, 9000000);
        const uint64_t shape = 2 + kvd_rng_below(r, 6); /* how fast returns fall */

        t->group[g].n_option = n_cap;
        for (uint32_t k = 0; k < n_cap; k++) {
            const uint64_t cap = 1ull << k;

            t->option[g][k].cost    = cap * 524288;
            t->option[g][k].benefit = worth * cap / (cap + shape) + kvd_rng_below(r, 1000);
        }
    }
    finish(t, n_group);
}

static void check_choice(const plan_problem *p, const uint32_t *choice, const plan_result *r)
{
    uint64_t cost = 0, benefit = 0;

    for (uint32_t g = 0; g < p->n_group; g++) {
        assert_true(choice[g] < p->group[g].n_option);
        cost += p->group[g].option[choice[g]].cost;
        benefit += p->group[g].option[choice[g]].benefit;
    }
    assert_true(cost == r->cost && benefit == r->benefit);
    assert_true(cost <= p->capacity);
    assert_true(benefit <= r->bound);
    assert_true(!r->exact || benefit == r->bound);
}

/* The best benefit by trying everything; UINT64_MAX: nothing fits. */
static uint64_t enumerate(const plan_problem *p, uint32_t g, uint64_t cost, uint64_t benefit)
{
    uint64_t best = UINT64_MAX;

    if (g == p->n_group)
        return cost <= p->capacity ? benefit : UINT64_MAX;
    for (uint32_t k = 0; k < p->group[g].n_option; k++) {
        const plan_option *o = &p->group[g].option[k];
        const uint64_t     b = enumerate(p, g + 1, cost + o->cost, benefit + o->benefit);

        if (b != UINT64_MAX && (best == UINT64_MAX || b > best))
            best = b;
    }
    return best;
}

static uint64_t dearest_edge(const plan_problem *p)
{
    uint64_t most = 0;

    for (uint32_t g = 0; g < p->n_group; g++) {
        uint64_t low = UINT64_MAX, high = 0;

        for (uint32_t k = 0; k < p->group[g].n_option; k++) {
            low  = kvd_min_u64(low, p->group[g].option[k].benefit);
            high = kvd_max_u64(high, p->group[g].option[k].benefit);
        }
        most = kvd_max_u64(most, high - low);
    }
    return most;
}

static void test_exact_equals_enumeration(void **state)
{
    static table t;
    kvd_rng      r;
    uint32_t     choice[8];
    plan_result  got, greedy;
    uint64_t     n_full = 0;

    (void)state;
    kvd_rng_seed(&r, seed);
    for (int i = 0; i < 20000; i++) {
        const uint32_t n = (uint32_t)kvd_rng_below(&r, 6);
        uint64_t       best;
        kvd_err        err = { 0 };

        fill_wild(&t, &r, n, i % 3 ? 12 : 1000000);
        t.p.capacity = kvd_rng_below(&r, t.most + 2);
        best         = enumerate(&t.p, 0, 0, 0);
        if (best == UINT64_MAX) {
            assert_int_equal(plan_solve_exact(&t.p, choice, &got, &err), KVD_E_FULL);
            assert_int_equal(plan_solve_greedy(&t.p, choice, &got, &err), KVD_E_FULL);
            n_full++;
            continue;
        }
        assert_int_equal(plan_solve_greedy(&t.p, choice, &greedy, &err), KVD_OK);
        check_choice(&t.p, choice, &greedy);
        assert_true(greedy.bound >= best);
        assert_true(greedy.bound - greedy.benefit <= dearest_edge(&t.p));
        assert_int_equal(plan_solve_exact(&t.p, choice, &got, &err), KVD_OK);
        check_choice(&t.p, choice, &got);
        assert_true(got.exact && got.benefit == best);
    }
    assert_in_range(n_full, 100, 15000);
}

static void test_greedy_is_near_exact_in_small_cases(void **state)
{
    static table t;
    kvd_rng      r;
    uint32_t     choice[24];
    plan_result  got, greedy;
    double       worst = 0;
    int          n_off = 0, n_case = 0;

    (void)state;
    kvd_rng_seed(&r, seed + 1);
    for (int i = 0; i < 4000; i++) {
        const uint32_t n = 6 + (uint32_t)kvd_rng_below(&r, 18);
        double         loss;

        if (i % 2)
            fill_lanes(&t, &r, n, 4);
        else
            fill_wild(&t, &r, n, 10000);
        t.p.capacity = t.least + kvd_rng_below(&r, t.most - t.least + 1);
        assert_int_equal(plan_solve_greedy(&t.p, choice, &greedy, NULL), KVD_OK);
        assert_int_equal(plan_solve_exact(&t.p, choice, &got, NULL), KVD_OK);
        loss  = got.benefit ? 1.0 - (double)greedy.benefit / (double)got.benefit : 0.0;
        worst = loss > worst ? loss : worst;
        n_off += loss > 0.02;
        n_case++;
    }
    print_message(
        "greedy against exact, %d cases of 6 to 23 groups: worst loss %.2f %%, beyond 2 %%: "
        "%d\n",
        n_case, 100 * worst, n_off);
    assert_true(worst <= 0.10);
    assert_true(n_off * 1000 <= n_case);
}

static void test_greedy_is_near_the_bound_at_model_size(void **state)
{
    static table    t;
    static uint32_t choice[MOST_GROUP], again[MOST_GROUP];
    kvd_rng         r;
    plan_result     got, twice;

    (void)state;
    kvd_rng_seed(&r, seed + 2);
    for (int i = 0; i < 200; i++) {
        const uint32_t n = 48 + (uint32_t)kvd_rng_below(&r, MOST_GROUP - 48);

        fill_lanes(&t, &r, n, 2 + (uint32_t)kvd_rng_below(&r, 5));
        t.p.capacity = t.least + kvd_rng_below(&r, t.most - t.least + 1);
        assert_int_equal(plan_solve_greedy(&t.p, choice, &got, NULL), KVD_OK);
        check_choice(&t.p, choice, &got);
        assert_true((double)got.benefit >= 0.98 * (double)got.bound);
        assert_int_equal(plan_solve(&t.p, again, &twice, NULL), KVD_OK);
        check_choice(&t.p, again, &twice);
        assert_true(twice.benefit >= got.benefit);
        assert_int_equal(plan_solve_greedy(&t.p, again, &twice, NULL), KVD_OK);
        assert_memory_equal(choice, again, n * sizeof(*choice));
    }
}

static void set(table *t, uint32_t g, uint64_t c1, uint64_t b1, uint64_t c2, uint64_t b2)
{
    t->group[g].n_option = 2;
    t->option[g][0]      = (plan_option){ c1, b1 };
    t->option[g][1]      = (plan_option){ c2, b2 };
}

static void test_repair_reaches_what_edges_miss(void **state)
{
    static table t;
    uint32_t     choice[4];
    plan_result  got;

    (void)state;
    /* The small, steep edge goes first and leaves no room for the large one: repair swaps them. */
    set(&t, 0, 0, 0, 1, 2);
    set(&t, 1, 0, 0, 100, 100);
    finish(&t, 2);
    t.p.capacity = 100;
    assert_int_equal(plan_solve_greedy(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(got.benefit, 100);
    assert_int_equal(choice[0], 0);
    assert_int_equal(choice[1], 1);
    /* An option under the hull is the only one that fits. */
    t.group[0].n_option = 3;
    t.option[0][0]      = (plan_option){ 0, 0 };
    t.option[0][1]      = (plan_option){ 10, 100 };
    t.option[0][2]      = (plan_option){ 9, 50 };
    finish(&t, 1);
    t.p.capacity = 9;
    assert_int_equal(plan_solve_greedy(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(choice[0], 2);
    assert_int_equal(got.bound, 90);
}

static void test_greedy_can_be_far_off(void **state)
{
    static table t;
    uint32_t     choice[8];
    plan_result  got;

    (void)state;
    /* Two groups must step back, two others forward. */
    set(&t, 0, 0, 0, 46, 36);
    set(&t, 1, 0, 0, 52, 60);
    set(&t, 2, 0, 0, 22, 27);
    set(&t, 3, 0, 0, 56, 65);
    set(&t, 4, 0, 0, 45, 52);
    finish(&t, 5);
    t.p.capacity = 100;
    assert_int_equal(plan_solve_greedy(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(got.benefit, 92);
    assert_false(got.exact);
    assert_int_equal(plan_solve(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(got.benefit, 112);
    assert_true(got.exact);
}

static void test_ties_fall_the_same_way(void **state)
{
    static table t;
    uint32_t     choice[4];
    plan_result  got;

    (void)state;
    for (uint32_t g = 0; g < 3; g++)
        set(&t, g, 1, 5, 2, 6);
    t.group[2].n_option = 3;
    t.option[2][2]      = (plan_option){ 1, 5 }; /* a twin of option 0 */
    finish(&t, 3);
    t.p.capacity = 4; /* room for one step: the lowest group's */
    assert_int_equal(plan_solve(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(choice[0], 1);
    assert_int_equal(choice[1], 0);
    assert_int_equal(choice[2], 0);
    /* Of equal benefits the cheaper one. */
    set(&t, 0, 9, 5, 3, 5);
    finish(&t, 1);
    t.p.capacity = 9;
    assert_int_equal(plan_solve(&t.p, choice, &got, NULL), KVD_OK);
    assert_int_equal(choice[0], 1);
    assert_int_equal(got.cost, 3);
}

static void test_limits(void **state)
{
    static table      t;
    static plan_group many[PLAN_MAX_GROUP + 1];
    plan_option       wide[PLAN_MAX_OPTION + 1] = { { 0, 0 } };
    plan_problem      p                         = { .group = many };
    uint32_t          choice[4];
    plan_result       got;
    kvd_err           err = { 0 };

    (void)state;
    assert_int_equal(plan_solve(&p, choice, &got, &err), KVD_OK); /* no groups: nothing to do */
    assert_true(got.exact && got.benefit == 0);
    p.n_group = PLAN_MAX_GROUP + 1;
    assert_int_equal(plan_solve(&p, choice, &got, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "131073 groups"));
    p.n_group = 1;
    assert_int_equal(plan_solve(&p, choice, &got, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "group 0 has 0 options"));
    many[0] = (plan_group){ wide, PLAN_MAX_OPTION + 1 };
    assert_int_equal(plan_solve(&p, choice, &got, &err), KVD_E_INVAL);
    many[0].n_option = PLAN_MAX_OPTION;
    assert_int_equal(plan_solve(&p, choice, &got, &err), KVD_OK);

    set(&t, 0, INT64_MAX - 1, 0, 0, INT64_MAX);
    set(&t, 1, 1, 0, 0, 0);
    finish(&t, 2);
    t.p.capacity = UINT64_MAX;
    assert_int_equal(plan_solve(&t.p, choice, &got, &err), KVD_OK);
    assert_true(got.benefit == INT64_MAX);
    t.option[1][0].cost = 2;
    assert_int_equal(plan_solve(&t.p, choice, &got, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "group 1"));
    set(&t, 1, 1, UINT64_MAX, 1, 0);
    assert_int_equal(plan_solve(&t.p, choice, &got, &err), KVD_E_INVAL);

    set(&t, 0, 70, 1, 50, 1);
    set(&t, 1, 30, 1, 40, 1);
    t.p.capacity = 79;
    assert_int_equal(plan_solve(&t.p, choice, &got, &err), KVD_E_FULL);
    assert_non_null(strstr(err.msg, "cost 80, 1 more than the capacity 79"));
}

/* Costs without a common measure make partial plans that nothing dominates. */
static void test_exact_refuses_what_is_too_large(void **state)
{
    static table    t;
    static uint32_t choice[MOST_GROUP], again[MOST_GROUP];
    plan_result     got, greedy;
    kvd_err         err = { 0 };
    kvd_rng         r;

    (void)state;
    kvd_rng_seed(&r, 7);
    for (uint32_t g = 0; g < MOST_GROUP; g++) { /* benefit = cost: no bound cuts */
        t.group[g].n_option = 2;
        t.option[g][0]      = (plan_option){ 0, 0 };
        t.option[g][1].cost = t.option[g][1].benefit = 2 * kvd_rng_below(&r, 1ull << 40) + 2;
    }
    finish(&t, MOST_GROUP);
    t.p.capacity = t.most / 2 | 1; /* odd: no sum reaches it */
    assert_int_equal(plan_solve_greedy(&t.p, again, &greedy, NULL), KVD_OK);
    assert_int_equal(plan_solve_exact(&t.p, choice, &got, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "more than 1048576 partial plans at group"));
    assert_int_equal(plan_solve(&t.p, choice, &got, &err), KVD_OK);
    assert_memory_equal(choice, again, sizeof(again));
    assert_false(got.exact);
}

static void test_every_failed_allocation(void **state)
{
    static table   t;
    const uint64_t live = kvd_alloc_live();
    uint32_t       choice[24];
    plan_result    got;
    kvd_rng        r;
    int            n = 0;

    (void)state;
    kvd_rng_seed(&r, 3);
    do {
        fill_wild(&t, &r, 20, 10000);
        t.p.capacity = (t.least + t.most) / 2;
        assert_int_equal(plan_solve_greedy(&t.p, choice, &got, NULL), KVD_OK);
    } while (got.exact);
    for (;; n++) {
        kvd_status st;

        kvd_alloc_fault(n, false);
        st = plan_solve(&t.p, choice, &got, NULL);
        if (!kvd_alloc_fault_hit()) {
            kvd_alloc_fault(-1, false);
            assert_int_equal(st, KVD_OK);
            break;
        }
        assert_int_equal(st, KVD_E_NOMEM);
        assert_true(kvd_alloc_live() == live);
    }
    assert_true(n >= 10);
    assert_true(kvd_alloc_live() == live);
}

/* ---- staging against cache ------------------------------------------------------- */

enum { N_GROUP = 3, N_SIZE = 4, N_STAGING = 3 };

static const uint64_t sizes[N_SIZE]       = { 0, 100, 200, 400 };
static const uint64_t stagings[N_STAGING] = { 50, 100, 200 };

static plan_stalls stalls_of(const uint64_t ns[N_GROUP][N_SIZE], const uint64_t staging[N_STAGING],
                             uint64_t host)
{
    return (plan_stalls){ .n_group       = N_GROUP,
                          .n_size        = N_SIZE,
                          .size_bytes    = sizes,
                          .group_ns      = &ns[0][0],
                          .n_staging     = N_STAGING,
                          .staging_bytes = stagings,
                          .staging_ns    = staging,
                          .host_bytes    = host };
}

static void test_balance_favours_what_stalls(void **state)
{
    static const uint64_t lanes[N_GROUP][N_SIZE] = { { 10, 9, 8, 7 },
                                                     { 9000, 4000, 1500, 100 },
                                                     { 500, 300, 250, 240 } };
    static const uint64_t calm[N_STAGING] = { 20, 10, 0 }, tight[N_STAGING] = { 90000, 50, 0 };
    uint32_t              size[N_GROUP];
    plan_balance          got;
    plan_stalls           s = stalls_of(lanes, calm, 550);

    (void)state;
    assert_int_equal(plan_balance_make(&s, size, &got, NULL), KVD_OK);
    assert_int_equal(size[0], 0); /* waits little: gets nothing */
    assert_int_equal(size[1], 3);
    assert_int_equal(size[2], 1);
    assert_int_equal(got.staging, 0);
    assert_int_equal(got.cache_bytes, 500);
    assert_int_equal(got.stall_ns, 10 + 100 + 300 + 20);
    assert_int_equal(got.saved_ns, 10 + 9000 + 500 + 20 - got.stall_ns);
    /* Reads that wait for a staging buffer take memory from the lanes. */
    s = stalls_of(lanes, tight, 550);
    assert_int_equal(plan_balance_make(&s, size, &got, NULL), KVD_OK);
    assert_int_equal(got.staging, 1);
    assert_int_equal(size[1], 3);
    assert_int_equal(size[2], 0);
    /* Not even the least of everything fits. */
    s.host_bytes = 49;
    assert_int_equal(plan_balance_make(&s, size, &got, NULL), KVD_E_FULL);
}

static void test_balance_checks(void **state)
{
    static const uint64_t lanes[N_GROUP][N_SIZE] = { { 5, 6, 4, 3 },
                                                     { 5, 5, 5, 5 },
                                                     { 9, 3, 2, 1 } };
    static const uint64_t calm[N_STAGING] = { 20, 10, 0 }, twice[] = { 5, 5 };
    static const uint64_t huge[N_GROUP][N_SIZE] = { { UINT64_MAX, 0, 0, 0 },
                                                    { 1, 1, 1, 1 },
                                                    { 0 } };
    uint32_t              size[N_GROUP];
    plan_balance          got;
    kvd_err               err;
    plan_stalls           s = stalls_of(lanes, calm, 1000);

    (void)state;
    assert_int_equal(plan_balance_make(&s, size, &got, &err), KVD_OK); /* noise: 6 above 5 */
    assert_int_equal(size[1], 0);                                      /* nothing to gain */
    s.n_size = 0;
    assert_int_equal(plan_balance_make(&s, size, &got, &err), KVD_E_INVAL);
    s.n_size     = 2;
    s.size_bytes = twice;
    assert_int_equal(plan_balance_make(&s, size, &got, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "host cache do not ascend"));
    s = stalls_of(huge, calm, 1000);
    assert_int_equal(plan_balance_make(&s, size, &got, &err), KVD_E_INVAL);
    s.n_group = PLAN_MAX_GROUP;
    assert_int_equal(plan_balance_make(&s, size, &got, &err), KVD_E_INVAL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_equals_enumeration),
        cmocka_unit_test(test_greedy_is_near_exact_in_small_cases),
        cmocka_unit_test(test_greedy_is_near_the_bound_at_model_size),
        cmocka_unit_test(test_repair_reaches_what_edges_miss),
        cmocka_unit_test(test_greedy_can_be_far_off),
        cmocka_unit_test(test_ties_fall_the_same_way),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_exact_refuses_what_is_too_large),
        cmocka_unit_test(test_every_failed_allocation),
        cmocka_unit_test(test_balance_favours_what_stalls),
        cmocka_unit_test(test_balance_checks),
    };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed = strtoull(argv[2], NULL, 10);
    print_message("seed %" PRIu64 "\n", seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
