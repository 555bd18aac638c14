/* SPDX-License-Identifier: Apache-2.0 */
/* plan_impl.h - private to plan/: convex hulls of knapsack groups, shared by both solvers. */
#ifndef KVD_PLAN_IMPL_H
#define KVD_PLAN_IMPL_H

#include "plan/plan.h"

/* Products of two 64-bit numbers, for comparing fractions exactly. */
__extension__ typedef unsigned __int128 plan_wide;

/* One edge of a group's upper convex hull: from one option to a dearer and better one. */
typedef struct plan_step {
    uint64_t cost, benefit; /* differences, both > 0 */
    uint32_t group, from, to;
    uint32_t rank; /* place along the hull; fractions fall along it */
} plan_step;

typedef struct plan_hull {
    uint32_t  *base; /* [n_group] the cheapest option, of those the best */
    plan_step *step; /* [n_step] of all groups, by benefit / cost, highest first */
    uint32_t   n_step;
    uint64_t   cost, benefit; /* of all base options */
} plan_hull;

/* Checks the problem (see plan_solve_greedy) on the way. */
kvd_status plan_hull_make(plan_hull *h, const plan_problem *p, kvd_err *err);
void       plan_hull_free(plan_hull *h);

/* Benefit of the part of a step that `left` pays for, rounded down; left < step->cost. */
static inline uint64_t plan_part(const plan_step *s, uint64_t left)
{
    return (uint64_t)((plan_wide)s->benefit * left / s->cost);
}

#endif
