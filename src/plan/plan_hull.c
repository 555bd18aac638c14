/* SPDX-License-Identifier: Apache-2.0 */
/* plan_hull.c - a knapsack's groups reduced to convex hulls, all their edges in one order.
 *
 * Taking edges in this order solves the linear relaxation: within a group fractions fall from edge
 * to edge, so an edge comes after those before it on its hull.  No two edges compare equal, hence
 * the order does not depend on how sorting is done.  Any thread. */
#include <inttypes.h>
#include <stdlib.h>

#include "plan/plan_impl.h"

/* Whether the edge a -> b rises more steeply than b -> c: then b is a corner. */
static bool is_corner(const plan_option *a, const plan_option *b, const plan_option *c)
{
    const plan_wide first  = (plan_wide)(b->benefit - a->benefit) * (c->cost - b->cost);
    const plan_wide second = (plan_wide)(c->benefit - b->benefit) * (b->cost - a->cost);

    return first >= second; /* points on one line stay: smaller steps fill a capacity better */
}

/* The options of a group that are corners, cheapest first; returns how many. */
static uint32_t hull_of(const plan_group *g, uint32_t corner[PLAN_MAX_OPTION])
{
    const plan_option *o = g->option;
    uint32_t           sorted[PLAN_MAX_OPTION], n = 0;

    for (uint32_t i = 0; i < g->n_option; i++) { /* by cost, then best first, then index */
        uint32_t at = i;

        while (at > 0 &&
               (o[sorted[at - 1]].cost > o[i].cost || (o[sorted[at - 1]].cost == o[i].cost &&
                                                       o[sorted[at - 1]].benefit < o[i].benefit))) {
            sorted[at] = sorted[at - 1];
            at--;
        }
        sorted[at] = i;
    }
    for (uint32_t i = 0; i < g->n_option; i++) {
        const plan_option *c = &o[sorted[i]];

        if (n > 0 && (c->benefit <= o[corner[n - 1]].benefit || c->cost == o[corner[n - 1]].cost))
            continue;
        while (n > 1 && !is_corner(&o[corner[n - 2]], &o[corner[n - 1]], c))
            n--;
        corner[n++] = sorted[i];
    }
    return n;
}

static int by_fraction(const void *pa, const void *pb)
{
    const plan_step *a = pa, *b = pb;
    const plan_wide  l = (plan_wide)a->benefit * b->cost, r = (plan_wide)b->benefit * a->cost;

    if (l != r)
        return l > r ? -1 : 1;
    if (a->group != b->group)
        return a->group < b->group ? -1 : 1;
    return a->rank < b->rank ? -1 : 1;
}

static kvd_status check(const plan_problem *p, uint64_t *n_option, kvd_err *err)
{
    uint64_t cost = 0, benefit = 0;

    *n_option = 0;
    if (p->n_group > PLAN_MAX_GROUP)
        return kvd_fail(err, KVD_E_INVAL, 0, "knapsack: %u groups, at most %u", p->n_group,
                        PLAN_MAX_GROUP);
    for (uint32_t i = 0; i < p->n_group; i++) {
        const plan_group *g      = &p->group[i];
        uint64_t          most_c = 0, most_b = 0;

        if (g->n_option < 1 || g->n_option > PLAN_MAX_OPTION)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "knapsack: group %u has %u options, expected 1 to %u", i, g->n_option,
                            PLAN_MAX_OPTION);
        for (uint32_t k = 0; k < g->n_option; k++) {
            most_c = kvd_max_u64(most_c, g->option[k].cost);
            most_b = kvd_max_u64(most_b, g->option[k].benefit);
        }
        if (!kvd_add(cost, most_c, &cost) || !kvd_add(benefit, most_b, &benefit) ||
            cost > INT64_MAX || benefit > INT64_MAX) /* differences are signed */
            return kvd_fail(err, KVD_E_INVAL, 0, "knapsack: sums leave 63 bits at group %u", i);
        *n_option += g->n_option;
    }
    return KVD_OK;
}

static void add_group(plan_hull *h, const plan_problem *p, uint32_t group)
{
    const plan_option *o = p->group[group].option;
    uint32_t           corner[PLAN_MAX_OPTION];
    const uint32_t     n = hull_of(&p->group[group], corner);

    h->base[group] = corner[0];
    h->cost += o[corner[0]].cost;
    h->benefit += o[corner[0]].benefit;
    for (uint32_t i = 1; i < n; i++) {
        h->step[h->n_step++] = (plan_step){
            .cost    = o[corner[i]].cost - o[corner[i - 1]].cost,
            .benefit = o[corner[i]].benefit - o[corner[i - 1]].benefit,
            .group   = group,
            .from    = corner[i - 1],
            .to      = corner[i],
            .rank    = i,
        };
    }
}

kvd_status plan_hull_make(plan_hull *h, const plan_problem *p, kvd_err *err)
{
    uint64_t n_option;

    *h = (plan_hull){ 0 };
    KVD_TRY(check(p, &n_option, err));
    h->base = kvd_calloc(p->n_group, sizeof(*h->base));
    h->step = kvd_calloc(n_option, sizeof(*h->step));
    if (!h->base || !h->step) {
        plan_hull_free(h);
        return kvd_fail(err, KVD_E_NOMEM, 0, "knapsack: no memory for %u groups", p->n_group);
    }
    for (uint32_t i = 0; i < p->n_group; i++)
        add_group(h, p, i);
    qsort(h->step, h->n_step, sizeof(*h->step), by_fraction);
    if (h->cost > p->capacity) {
        const uint64_t least = h->cost;

        plan_hull_free(h);
        return kvd_fail(err, KVD_E_FULL, 0,
                        "knapsack: the cheapest options cost %" PRIu64 ", %" PRIu64
                        " more than the capacity %" PRIu64,
                        least, least - p->capacity, p->capacity);
    }
    return KVD_OK;
}

void plan_hull_free(plan_hull *h)
{
    kvd_free(h->base);
    kvd_free(h->step);
    *h = (plan_hull){ 0 };
}
