/* SPDX-License-Identifier: Apache-2.0 */
/* plan_exact.c - the exact solver: partial plans, group by group.
 *
 * A state is one way to choose for the groups so far.  Kept are those that no other dominates
 * (cheaper and at least as good) and whose linear bound over the groups to come beats the greedy
 * choice; what is left after the last group, if anything, is better than greedy and its last state
 * the best.  Equal costs across groups (caps are multiples of one record) collapse, so tables of
 * hundreds of lanes are often small; PLAN_EXACT_STATES refuses those that are not.
 *
 * Invariants: a level's states ascend strictly in cost and in benefit; every state fits the
 * capacity together with the cheapest options of the groups to come.  Any thread. */
#include <inttypes.h>
#include <stdlib.h>

#include "plan/plan_impl.h"

#define NODE_NONE UINT32_MAX

typedef struct node { /* how a state came about */
    uint32_t parent, option;
} node;

typedef struct state {
    uint64_t cost, benefit;
    uint32_t parent, option; /* becomes a node when the state is kept */
} state;

typedef struct exact {
    const plan_problem *p;
    plan_hull           h;
    uint64_t            best; /* benefit to beat */
    node               *node;
    uint32_t            n_node, node_cap;
    state    *level, *next; /* states after the groups so far; level's parent is its node */
    size_t    n_level, n_next, level_cap, next_cap;
    uint64_t  rest_cost, rest_benefit; /* cheapest options of the groups to come */
    uint64_t *sum_cost, *sum_benefit;  /* [n_sum + 1] edges of the groups to come, summed */
    uint32_t *edge;                    /* [n_sum] which ones */
    uint32_t  n_sum;
} exact;

/* Cheapest first, then best, then whatever came from the lower state and option. */
static int by_cost(const void *pa, const void *pb)
{
    const state *a = pa, *b = pb;

    if (a->cost != b->cost)
        return a->cost < b->cost ? -1 : 1;
    if (a->benefit != b->benefit)
        return a->benefit > b->benefit ? -1 : 1;
    if (a->parent != b->parent)
        return a->parent < b->parent ? -1 : 1;
    return (a->option > b->option) - (a->option < b->option);
}

/* Sums over what comes after group g. */
static void sum_rest(exact *x, uint32_t g)
{
    const plan_option *base = &x->p->group[g].option[x->h.base[g]];

    x->rest_cost -= base->cost;
    x->rest_benefit -= base->benefit;
    x->n_sum = 0;
    for (uint32_t i = 0; i < x->h.n_step; i++) {
        const plan_step *e = &x->h.step[i];

        if (e->group <= g)
            continue;
        x->edge[x->n_sum]            = i;
        x->sum_cost[x->n_sum + 1]    = x->sum_cost[x->n_sum] + e->cost;
        x->sum_benefit[x->n_sum + 1] = x->sum_benefit[x->n_sum] + e->benefit;
        x->n_sum++;
    }
}

/* The most benefit the groups to come can add for `left` beyond their cheapest options. */
static uint64_t rest_bound(const exact *x, uint64_t left)
{
    uint32_t low = 0, high = x->n_sum; /* edges that fit whole */

    while (low < high) {
        const uint32_t mid = high - (high - low) / 2;

        if (x->sum_cost[mid] <= left)
            low = mid;
        else
            high = mid - 1;
    }
    if (low == x->n_sum)
        return x->sum_benefit[low];
    return x->sum_benefit[low] + plan_part(&x->h.step[x->edge[low]], left - x->sum_cost[low]);
}

static kvd_status grow(void **p, size_t *cap, size_t bytes, kvd_err *err)
{
    const size_t more = *cap ? *cap * 2 : 1024;
    void        *q    = kvd_realloc(*p, more * bytes);

    if (!q)
        return kvd_fail(err, KVD_E_NOMEM, 0, "knapsack: no memory for %zu partial plans", more);
    *p   = q;
    *cap = more;
    return KVD_OK;
}

static kvd_status too_many(uint32_t g, kvd_err *err)
{
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                    "knapsack: the exact solver needs more than %u partial plans at group %u; the "
                    "greedy one takes any size",
                    PLAN_EXACT_STATES, g);
}

/* One more option behind one state, unless it cannot fit or cannot win. */
static kvd_status try_option(exact *x, const state *from, uint32_t g, uint32_t k, kvd_err *err)
{
    const plan_option *o    = &x->p->group[g].option[k];
    const uint64_t     cost = from->cost + o->cost, benefit = from->benefit + o->benefit;
    uint64_t           left;

    if (cost + x->rest_cost > x->p->capacity)
        return KVD_OK;
    left = x->p->capacity - cost - x->rest_cost;
    if (benefit + x->rest_benefit + rest_bound(x, left) <= x->best)
        return KVD_OK;
    if (x->n_next >= PLAN_EXACT_STATES)
        return too_many(g, err);
    if (x->n_next == x->next_cap)
        KVD_TRY(grow((void **)&x->next, &x->next_cap, sizeof(*x->next), err));
    x->next[x->n_next++] = (state){ cost, benefit, from->parent, k };
    return KVD_OK;
}

/* Keeps what nothing dominates, and makes nodes of it. */
static kvd_status keep_best(exact *x, uint32_t g, kvd_err *err)
{
    size_t n = 0;

    if (x->n_next)
        qsort(x->next, x->n_next, sizeof(*x->next), by_cost);
    for (size_t i = 0; i < x->n_next; i++) {
        if (n > 0 && x->next[i].benefit <= x->next[n - 1].benefit)
            continue;
        x->next[n++] = x->next[i];
    }
    for (size_t i = 0; i < n; i++) {
        if (x->n_node >= PLAN_EXACT_STATES)
            return too_many(g, err);
        if (x->n_node == x->node_cap) {
            size_t cap = x->node_cap;

            KVD_TRY(grow((void **)&x->node, &cap, sizeof(*x->node), err));
            x->node_cap = (uint32_t)cap; /* at most twice PLAN_EXACT_STATES */
        }
        x->node[x->n_node] = (node){ x->next[i].parent, x->next[i].option };
        x->next[i].parent  = x->n_node++;
    }
    x->n_next = n;
    return KVD_OK;
}

static kvd_status add_group(exact *x, uint32_t g, kvd_err *err)
{
    state *spare     = x->level;
    size_t spare_cap = x->level_cap;

    sum_rest(x, g);
    x->n_next = 0;
    for (size_t i = 0; i < x->n_level; i++) {
        for (uint32_t k = 0; k < x->p->group[g].n_option; k++)
            KVD_TRY(try_option(x, &x->level[i], g, k, err));
    }
    KVD_TRY(keep_best(x, g, err));
    x->level     = x->next;
    x->level_cap = x->next_cap;
    x->n_level   = x->n_next;
    x->next      = spare;
    x->next_cap  = spare_cap;
    return KVD_OK;
}

static kvd_status prepare(exact *x, kvd_err *err)
{
    const size_t n = x->h.n_step;

    x->rest_cost    = x->h.cost;
    x->rest_benefit = x->h.benefit;
    x->edge         = kvd_calloc(n + 1, sizeof(*x->edge));
    x->sum_cost     = kvd_calloc(n + 1, sizeof(*x->sum_cost));
    x->sum_benefit  = kvd_calloc(n + 1, sizeof(*x->sum_benefit));
    if (!x->edge || !x->sum_cost || !x->sum_benefit)
        return kvd_fail(err, KVD_E_NOMEM, 0, "knapsack: no memory for %zu edges", n);
    KVD_TRY(grow((void **)&x->level, &x->level_cap, sizeof(*x->level), err));
    x->level[0] = (state){ .parent = NODE_NONE };
    x->n_level  = 1;
    return KVD_OK;
}

static void take(const exact *x, uint32_t *choice, plan_result *out)
{
    const state *last = &x->level[x->n_level - 1]; /* the best, by the order of a level */
    uint32_t     at   = last->parent;

    out->cost    = last->cost;
    out->benefit = last->benefit;
    for (uint32_t g = x->p->n_group; g-- > 0;) {
        choice[g] = x->node[at].option;
        at        = x->node[at].parent;
    }
    kvd_assert(at == NODE_NONE);
}

kvd_status plan_solve_exact(const plan_problem *p, uint32_t *choice, plan_result *out, kvd_err *err)
{
    exact      x  = { .p = p };
    kvd_status st = plan_solve_greedy(p, choice, out, err);

    if (st != KVD_OK || out->exact)
        return st;
    x.best = out->benefit;
    st     = plan_hull_make(&x.h, p, err);
    if (st == KVD_OK)
        st = prepare(&x, err);
    for (uint32_t g = 0; st == KVD_OK && g < p->n_group; g++)
        st = add_group(&x, g, err);
    if (st == KVD_OK && x.n_level > 0)
        take(&x, choice, out);
    if (st == KVD_OK)
        out->bound = out->benefit;
    out->exact = st == KVD_OK;
    plan_hull_free(&x.h);
    kvd_free(x.node);
    kvd_free(x.level);
    kvd_free(x.next);
    kvd_free(x.edge);
    kvd_free(x.sum_cost);
    kvd_free(x.sum_benefit);
    return st;
}
