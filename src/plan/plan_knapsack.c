/* SPDX-License-Identifier: Apache-2.0 */
/* plan_knapsack.c - the greedy solver, and the choice between the two.
 *
 * Greedy takes hull edges by benefit / cost while they fit; the first that does not gives the upper
 * bound, those behind it fill what is left.  Then, unless the bound is reached:
 *   repair   changes one group, or lets one group pay for another, as long as that gains: options
 *            off the hull become reachable, and a last large edge that missed by little
 *   force    fixes one option of one group, runs greedy over the others, and keeps the best of all
 *            such answers, repaired: what needs several groups to pay for one
 * Every repair raises the benefit, or keeps it and lowers the cost, so repairing ends;
 * PLAN_REPAIR_WORK ends both sooner on tables of thousands of groups.
 *
 * Invariants: r->cost <= capacity; r->cost and r->benefit are the sums over choice.
 * Any thread. */
#include <string.h>

#include "plan/plan_impl.h"

#define NO_GROUP         UINT32_MAX
#define PLAN_REPAIR_WORK (1ull << 27) /* options looked at: well under a second */

typedef struct greedy {
    const plan_problem *p;
    const plan_hull    *h;
    uint32_t           *choice;
    plan_result        *r; /* bound: of the edges taken last */
    uint64_t            work;
} greedy;

/* Group's option in place of the one chosen: what it adds. */
typedef struct change {
    uint32_t group, option;
    int64_t  gain, cost;
} change;

static change change_of(const greedy *s, uint32_t group, uint32_t option)
{
    const plan_option *now  = &s->p->group[group].option[s->choice[group]];
    const plan_option *then = &s->p->group[group].option[option];

    return (change){ .group  = group,
                     .option = option,
                     .gain   = (int64_t)then->benefit - (int64_t)now->benefit,
                     .cost   = (int64_t)then->cost - (int64_t)now->cost };
}

/* More gain is better, then less cost; the one found first stays. */
static bool is_better(int64_t gain, int64_t cost, int64_t than_gain, int64_t than_cost)
{
    return gain > than_gain || (gain == than_gain && cost < than_cost);
}

static void apply(greedy *s, const change *c)
{
    s->choice[c->group] = c->option;
    s->r->cost          = (uint64_t)((int64_t)s->r->cost + c->cost);
    s->r->benefit       = (uint64_t)((int64_t)s->r->benefit + c->gain);
}

/* Capacity not used; a sum of costs never exceeds INT64_MAX, so neither need this. */
static int64_t left_of(const greedy *s)
{
    return (int64_t)kvd_min_u64(s->p->capacity - s->r->cost, INT64_MAX);
}

/* The best change of one group that fits. */
static bool repair_one(greedy *s)
{
    const int64_t left  = left_of(s);
    change        best  = { 0 };
    bool          found = false;

    for (uint32_t g = 0; g < s->p->n_group; g++) {
        for (uint32_t k = 0; k < s->p->group[g].n_option; k++) {
            const change c = change_of(s, g, k);

            if (c.cost <= left && is_better(c.gain, c.cost, best.gain, best.cost)) {
                best  = c;
                found = true;
            }
        }
        s->work += s->p->group[g].n_option;
    }
    if (found)
        apply(s, &best);
    return found;
}

/* The best way for another group to free what `up` lacks. */
static bool pay_for(greedy *s, const change *up, change *down)
{
    const int64_t lack  = up->cost - left_of(s);
    bool          found = false;

    for (uint32_t g = 0; g < s->p->n_group; g++) {
        for (uint32_t k = 0; g != up->group && k < s->p->group[g].n_option; k++) {
            const change c = change_of(s, g, k);

            if (-c.cost < lack || up->gain + c.gain < 0)
                continue;
            if (!found || is_better(c.gain, c.cost, down->gain, down->cost)) {
                *down = c;
                found = true;
            }
        }
        s->work += s->p->group[g].n_option;
    }
    return found && is_better(up->gain + down->gain, up->cost + down->cost, 0, 0);
}

/* The best pair of one change for the better that does not fit and one that pays for it. */
static bool repair_pair(greedy *s)
{
    const int64_t left    = left_of(s);
    change        best_up = { 0 }, best_down = { 0 };
    bool          found = false;

    for (uint32_t g = 0; g < s->p->n_group; g++) {
        for (uint32_t k = 0; k < s->p->group[g].n_option; k++) {
            const change up = change_of(s, g, k);
            change       down;

            if (up.gain <= 0 || up.cost <= left || s->work >= PLAN_REPAIR_WORK ||
                !pay_for(s, &up, &down))
                continue;
            if (!found || is_better(up.gain + down.gain, up.cost + down.cost,
                                    best_up.gain + best_down.gain, best_up.cost + best_down.cost)) {
                best_up   = up;
                best_down = down;
                found     = true;
            }
        }
    }
    if (found) {
        apply(s, &best_down);
        apply(s, &best_up);
    }
    return found;
}

/* Takes edges in order while they fit; fixed: a group that stays as it is, or NO_GROUP. */
static void take_edges(greedy *s, uint32_t fixed)
{
    const plan_hull *h     = s->h;
    bool             split = false;

    for (uint32_t i = 0; i < h->n_step; i++) {
        const plan_step *e    = &h->step[i];
        const uint64_t   left = s->p->capacity - s->r->cost;

        if (e->group == fixed)
            continue;
        if (e->cost > left && !split) {
            s->r->bound = s->r->benefit + plan_part(e, left);
            split       = true;
        }
        if (e->cost > left || s->choice[e->group] != e->from)
            continue; /* where an edge did not fit, its group stays */
        s->choice[e->group] = e->to;
        s->r->cost += e->cost;
        s->r->benefit += e->benefit;
    }
    if (!split)
        s->r->bound = s->r->benefit;
    s->work += h->n_step;
}

static void start_at_base(greedy *s)
{
    for (uint32_t g = 0; g < s->p->n_group; g++)
        s->choice[g] = s->h->base[g];
    s->r->cost    = s->h->cost;
    s->r->benefit = s->h->benefit;
    s->work += s->p->n_group;
}

static void repair(greedy *s)
{
    while (s->r->benefit < s->r->bound && s->work < PLAN_REPAIR_WORK &&
           (repair_one(s) || repair_pair(s)))
        continue;
}

/* Greedy with one group's option fixed, into s->choice and s->r; false: it does not fit. */
static bool force(greedy *s, uint32_t group, uint32_t option)
{
    change c;

    start_at_base(s);
    c = change_of(s, group, option);
    if (c.cost > left_of(s))
        return false;
    apply(s, &c);
    take_edges(s, group);
    return true;
}

/* Takes over every forced answer that beats what there is. */
static void force_all(greedy *s, uint32_t *scratch)
{
    plan_result r = { 0 };
    greedy      f = { .p = s->p, .h = s->h, .choice = scratch, .r = &r, .work = s->work };

    for (uint32_t g = 0; g < s->p->n_group; g++) {
        for (uint32_t k = 0; k < s->p->group[g].n_option && f.work < PLAN_REPAIR_WORK; k++) {
            if (!force(&f, g, k) || r.benefit <= s->r->benefit)
                continue;
            memcpy(s->choice, scratch, s->p->n_group * sizeof(*scratch));
            s->r->cost    = r.cost;
            s->r->benefit = r.benefit;
        }
    }
    s->work = f.work;
}

kvd_status plan_solve_greedy(const plan_problem *p, uint32_t *choice, plan_result *out,
                             kvd_err *err)
{
    plan_hull h;
    greedy    s = { .p = p, .h = &h, .choice = choice, .r = out };
    uint32_t *scratch;

    *out = (plan_result){ 0 };
    KVD_TRY(plan_hull_make(&h, p, err));
    scratch = kvd_calloc(p->n_group, sizeof(*scratch));
    if (scratch) {
        start_at_base(&s);
        take_edges(&s, NO_GROUP);
        repair(&s);
        if (out->benefit < out->bound) {
            force_all(&s, scratch);
            repair(&s);
        }
    }
    plan_hull_free(&h);
    if (!scratch)
        return kvd_fail(err, KVD_E_NOMEM, 0, "knapsack: no memory for %u groups", p->n_group);
    kvd_free(scratch);
    kvd_assert(out->cost <= p->capacity && out->benefit <= out->bound);
    out->exact = out->benefit == out->bound;
    return KVD_OK;
}

kvd_status plan_solve(const plan_problem *p, uint32_t *choice, plan_result *out, kvd_err *err)
{
    kvd_err          why = { 0 };
    const kvd_status st  = plan_solve_exact(p, choice, out, &why);

    if (st == KVD_E_UNSUPPORTED)
        return KVD_OK; /* what it started from, the greedy answer, stands */
    if (st != KVD_OK && err)
        *err = why;
    return st;
}
