/* SPDX-License-Identifier: Apache-2.0 */
/* plan_balance.c - a host budget split into staging buffers and record cache.
 *
 * The same knapsack: one group a lane group, whose options are cache sizes, and one more for the
 * staging; the benefit of an option is the stall time it saves against the group's worst.  So a
 * lane that stalls often gets cache before one that misses as much but is waited for less, and
 * staging grows exactly as far as it saves more per byte than cache does.  Any thread. */
#include <inttypes.h>

#include "plan/plan.h"

static kvd_status check_sizes(const char *what, const uint64_t *bytes, uint32_t n, kvd_err *err)
{
    if (n < 1 || n > PLAN_MAX_OPTION)
        return kvd_fail(err, KVD_E_INVAL, 0, "stall profile: %u sizes of %s, expected 1 to %u", n,
                        what, PLAN_MAX_OPTION);
    for (uint32_t i = 1; i < n; i++) {
        if (bytes[i] <= bytes[i - 1])
            return kvd_fail(err, KVD_E_INVAL, 0, "stall profile: sizes of %s do not ascend at %u",
                            what, i);
    }
    return KVD_OK;
}

/* Options of one group: what each size costs, and the stalls it saves. */
static void fill(plan_option *o, const uint64_t *bytes, const uint64_t *ns, uint32_t n)
{
    uint64_t worst = 0;

    for (uint32_t i = 0; i < n; i++)
        worst = kvd_max_u64(worst, ns[i]);
    for (uint32_t i = 0; i < n; i++)
        o[i] = (plan_option){ .cost = bytes[i], .benefit = worst - ns[i] };
}

static kvd_status solve(const plan_stalls *s, plan_group *group, plan_option *option,
                        uint32_t *choice, plan_balance *out, kvd_err *err)
{
    const plan_problem p = { .group = group, .n_group = s->n_group + 1, .capacity = s->host_bytes };
    plan_result        r;
    plan_option       *last = option + (size_t)s->n_group * s->n_size;

    for (uint32_t g = 0; g < s->n_group; g++) {
        const size_t at = (size_t)g * s->n_size;

        group[g] = (plan_group){ option + at, s->n_size };
        fill(option + at, s->size_bytes, s->group_ns + at, s->n_size);
    }
    group[s->n_group] = (plan_group){ last, s->n_staging };
    fill(last, s->staging_bytes, s->staging_ns, s->n_staging);
    KVD_TRY(plan_solve(&p, choice, &r, err));
    out->staging       = choice[s->n_group];
    out->staging_bytes = s->staging_bytes[out->staging];
    out->cache_bytes   = r.cost - out->staging_bytes;
    out->exact         = r.exact;
    return KVD_OK;
}

static kvd_status sum_stalls(const plan_stalls *s, const uint32_t *size, plan_balance *out,
                             kvd_err *err)
{
    uint64_t least = s->staging_ns[0];
    bool     ok    = true;

    out->stall_ns = s->staging_ns[out->staging];
    for (uint32_t g = 0; g < s->n_group; g++) {
        const uint64_t *ns = s->group_ns + (size_t)g * s->n_size;

        ok = ok && kvd_add(least, ns[0], &least) &&
             kvd_add(out->stall_ns, ns[size[g]], &out->stall_ns);
    }
    if (!ok)
        return kvd_fail(err, KVD_E_INVAL, 0, "stall profile: times leave 64 bits");
    out->saved_ns = least > out->stall_ns ? least - out->stall_ns : 0;
    return KVD_OK;
}

kvd_status plan_balance_make(const plan_stalls *s, uint32_t *size, plan_balance *out, kvd_err *err)
{
    uint64_t     n_option;
    plan_option *option;
    plan_group  *group;
    uint32_t    *choice;
    kvd_status   st;

    *out = (plan_balance){ 0 };
    KVD_TRY(check_sizes("host cache", s->size_bytes, s->n_size, err));
    KVD_TRY(check_sizes("staging", s->staging_bytes, s->n_staging, err));
    if (s->n_group >= PLAN_MAX_GROUP)
        return kvd_fail(err, KVD_E_INVAL, 0, "stall profile: %u groups, fewer than %u expected",
                        s->n_group, PLAN_MAX_GROUP);
    n_option = (uint64_t)s->n_group * s->n_size + s->n_staging;
    option   = kvd_calloc(n_option, sizeof(*option));
    group    = kvd_calloc(s->n_group + 1, sizeof(*group));
    choice   = kvd_calloc(s->n_group + 1, sizeof(*choice));
    if (option && group && choice)
        st = solve(s, group, option, choice, out, err);
    else
        st = kvd_fail(err, KVD_E_NOMEM, 0, "stall profile: no memory for %u groups", s->n_group);
    for (uint32_t g = 0; st == KVD_OK && g < s->n_group; g++)
        size[g] = choice[g];
    if (st == KVD_OK)
        st = sum_stalls(s, size, out, err);
    kvd_free(option);
    kvd_free(group);
    kvd_free(choice);
    return st;
}
