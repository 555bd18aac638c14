/* SPDX-License-Identifier: Apache-2.0 */
/* plan_fit.c - verdict, limits and advice from what a cache needs and what it may have.
 *
 * Ways are tried in the order of plan_verdict; the first that fits every tier is taken, else the
 * one that lacks least is what the advice is about.  Needs grow with context, sequences and caps,
 * so the largest of each that fits is found by halving.  Knows no layout: whoever asks brings the
 * numbers.  Any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "plan/plan.h"

static const char *const tier_name[PLAN_N_TIER] = { "device", "host", "disk" };
static const char *const tier_flag[PLAN_N_TIER] = { "--kv-device", "--kv-host", "--kv-disk" };

const char *plan_tier_name(plan_tier t)
{
    return tier_name[t];
}

static bool fits(const plan_query *q, const uint64_t need[PLAN_N_TIER], plan_tier t)
{
    return need[t] != UINT64_MAX && need[t] <= q->budget[t];
}

/* Bytes that lack over all tiers; UINT64_MAX: too many to count. */
static uint64_t lacking(const plan_query *q, const uint64_t need[PLAN_N_TIER])
{
    uint64_t sum = 0;

    for (int t = 0; t < PLAN_N_TIER; t++) {
        const uint64_t more = fits(q, need, (plan_tier)t) ? 0 : need[t] - q->budget[t];

        if (need[t] == UINT64_MAX || !kvd_add(sum, more, &sum))
            return UINT64_MAX;
    }
    return sum;
}

/* The verdict at a point, with the way and its needs; where none fits, of the way that lacks least
 * (of equals the first). */
static plan_verdict judge(const plan_query *q, const plan_point *at, plan_verdict *way,
                          uint64_t need[PLAN_N_TIER])
{
    uint64_t least = UINT64_MAX;

    *way = PLAN_NO_FIT;
    for (int w = PLAN_ALL_ON_DEVICE; w < PLAN_NO_FIT; w++) {
        uint64_t n[PLAN_N_TIER] = { 0 }, lack;

        if (!q->measure(q->ctx, at, (plan_verdict)w, n))
            continue;
        lack = lacking(q, n);
        if (*way == PLAN_NO_FIT || lack < least) {
            *way  = (plan_verdict)w;
            least = lack;
            memcpy(need, n, sizeof(n));
        }
        if (lack == 0)
            return *way;
    }
    return PLAN_NO_FIT;
}

typedef enum grows { CTX, SEQ, CAP } grows;

/* The largest value with which everything fits, the others as they are; 0: none. */
static uint64_t largest(const plan_query *q, grows what, uint64_t most)
{
    uint64_t low = 0, high = most;

    while (low < high) {
        const uint64_t mid = high - (high - low) / 2;
        plan_point     at  = q->at;
        uint64_t       need[PLAN_N_TIER];
        plan_verdict   way;

        if (what == CTX)
            at.n_ctx = mid;
        else if (what == SEQ)
            at.n_seq = mid;
        else
            at.cap = (uint32_t)mid;
        if (judge(q, &at, &way, need) != PLAN_NO_FIT)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

/* ---- telling --------------------------------------------------------------------- */

static double mib(uint64_t bytes)
{
    return (double)bytes / (1024.0 * 1024.0);
}

static void say_no_fit(plan_fit *out, const plan_query *q)
{
    const plan_tier t          = out->short_tier;
    char            other[160] = "";

    if (t == PLAN_DEVICE && out->cap_fits > 0)
        snprintf(other, sizeof(other), ", or windows of %u budgets (--cap %u)", out->cap_fits,
                 out->cap_fits);
    else if (t == PLAN_DEVICE)
        snprintf(other, sizeof(other), ", or a smaller --budget");
    else if (t == PLAN_HOST && q->budget[PLAN_DISK] == 0)
        snprintf(other, sizeof(other), ", or give a disk tier (--cache-dir with --kv-disk)");
    snprintf(out->text, sizeof(out->text),
             "does not fit: the %s lacks %.1f MiB; raise %s to %.1f MiB%s; as it is, %" PRIu64
             " tokens (-c) with %" PRIu64 " sequences would fit, or %" PRIu64
             " sequences with %" PRIu64 " tokens",
             tier_name[t], mib(out->short_bytes), tier_flag[t],
             mib(out->short_bytes) + mib(q->budget[t]), other, out->n_ctx_fits, q->at.n_seq,
             out->n_seq_fits, q->at.n_ctx);
}

static void say(plan_fit *out, const plan_query *q)
{
    const bool host = q->budget[PLAN_HOST] > 0, disk = q->budget[PLAN_DISK] > 0;

    switch (out->verdict) {
    case PLAN_ALL_ON_DEVICE:
        snprintf(out->text, sizeof(out->text), "everything fits the device budget%s%s%s",
                 host || disk ? ": " : "",
                 host && disk ? "host and disk"
                 : host       ? "the host"
                 : disk       ? "the disk"
                              : "",
                 host && disk   ? " tiers add nothing"
                 : host || disk ? " tier adds nothing"
                                : "");
        break;
    case PLAN_ALL_IN_HOST:
        snprintf(out->text, sizeof(out->text),
                 "windows on the device, all records in the host%s; windows of up to %u budgets "
                 "would fit (--cap)",
                 disk ? ": the disk tier adds nothing" : "", out->cap_fits);
        break;
    case PLAN_USES_DISK:
        snprintf(out->text, sizeof(out->text),
                 "windows on the device, all records on disk, as many as %.1f MiB hold cached in "
                 "the host; windows of up to %u budgets would fit (--cap)",
                 mib(q->budget[PLAN_HOST]), out->cap_fits);
        break;
    case PLAN_NO_FIT:
        say_no_fit(out, q);
        break;
    }
}

kvd_status plan_fit_find(const plan_query *q, plan_fit *out, kvd_err *err)
{
    *out         = (plan_fit){ .way = PLAN_NO_FIT };
    out->verdict = judge(q, &q->at, &out->way, out->need);
    if (out->way == PLAN_NO_FIT)
        return kvd_fail(err, KVD_E_INVAL, 0, "memory plan: no way to lay it out");
    for (int t = PLAN_N_TIER - 1; t >= 0 && out->verdict == PLAN_NO_FIT; t--) {
        if (out->need[t] == UINT64_MAX)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "memory plan: n_ctx %" PRIu64 " x n_seq %" PRIu64
                            " takes more bytes than 64 bits count",
                            q->at.n_ctx, q->at.n_seq);
        if (!fits(q, out->need, (plan_tier)t)) { /* the first tier that is short is named */
            out->short_tier  = (plan_tier)t;
            out->short_bytes = out->need[t] - q->budget[t];
        }
    }
    out->n_ctx_fits = largest(q, CTX, q->most.n_ctx);
    out->n_seq_fits = largest(q, SEQ, q->most.n_seq);
    out->cap_fits   = (uint32_t)largest(q, CAP, q->most.cap);
    say(out, q);
    return KVD_OK;
}
