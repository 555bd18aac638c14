/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - the door to plan/: who gets how much memory (kv_plan() says how much there is need of).
 * Pure: tables in, budgets out; no model, no device, no files.
 *
 *   knapsack   one option a group under a capacity: caps per (layer, KV head), or anything else
 *   balance    a host budget split into staging and cache by the stalls that each would save;
 *              of plans, the shares that lanes have in a host tier
 *   file       what `kvdrive profile` measured and chose, as JSON bytes (reading and writing files
 *              is the caller's: os_file_replace())
 *
 * Bytes and counts come from outside: every product and sum is checked, none reaches an assert.
 * Any thread. */
#ifndef KVD_PLAN_H
#define KVD_PLAN_H

#include "base/base.h"

/* ---- multiple-choice knapsack (plan_knapsack.c, plan_exact.c) ------------------------ */

#define PLAN_MAX_GROUP  (1u << 17) /* more layers x KV heads than any model has */
#define PLAN_MAX_OPTION 64u
/* Partial plans the exact solver may keep over all groups, and make at a time for one: 100 MiB at
 * most.  48 to 640 lanes with caps 1 to 32 need far fewer. */
#define PLAN_EXACT_STATES (1u << 20)

typedef struct plan_option {
    uint64_t cost;    /* device bytes */
    uint64_t benefit; /* bytes not transferred, or nanoseconds not stalled */
} plan_option;

typedef struct plan_group {
    const plan_option *option; /* in any order; need be neither monotone nor concave */
    uint32_t           n_option;
} plan_group;

typedef struct plan_problem {
    const plan_group *group; /* of each exactly one option is taken */
    uint32_t          n_group;
    uint64_t          capacity; /* most cost in all */
} plan_problem;

typedef struct plan_result {
    uint64_t cost, benefit;
    uint64_t bound; /* no choice has more benefit: the linear relaxation's value, rounded down */
    bool     exact; /* benefit is the most there is */
} plan_result;

/* choice [n_group] receives an option's index per group.  The same problem gives the same choice,
 * always: of equals the cheaper option, then the lower group and the lower index win.
 * KVD_E_FULL when even the cheapest options exceed the capacity (the message says by how much);
 * KVD_E_INVAL when a group is empty or sums leave 64 bits.
 *
 * greedy: increments of each group's convex hull by benefit / cost, then repair (single and paired
 * changes while they gain).  Loses at most the benefit of one hull increment against bound, so with
 * many groups of similar size next to nothing; with few groups whose increments are each a large
 * part of the capacity it can be far off - those are what the exact solver is for. */
kvd_status plan_solve_greedy(const plan_problem *p, uint32_t *choice, plan_result *out,
                             kvd_err *err);
/* exact: partial plans that no other dominates, cut off by the linear bound.  KVD_E_UNSUPPORTED,
 * naming the group, when there are more of them than PLAN_EXACT_STATES; choice and out then hold
 * the greedy answer. */
kvd_status plan_solve_exact(const plan_problem *p, uint32_t *choice, plan_result *out,
                            kvd_err *err);
/* The exact choice where it is small enough to find, else the greedy one. */
kvd_status plan_solve(const plan_problem *p, uint32_t *choice, plan_result *out, kvd_err *err);

/* ---- staging against host cache (plan_balance.c) --------------------------------- */

/* What a profile run says of a host budget.  A lane group is a (layer, KV head). */
typedef struct plan_stalls {
    uint32_t        n_group;
    uint32_t        n_size;
    const uint64_t *size_bytes; /* [n_size] host cache one group may get, ascending; 0 may be one */
    const uint64_t *group_ns;   /* [n_group][n_size] time steps waited for the group's disk reads */
    uint32_t        n_staging;
    const uint64_t *staging_bytes; /* [n_staging] pinned memory for reads under way, ascending */
    const uint64_t *staging_ns;    /* [n_staging] time reads waited for a staging buffer */
    uint64_t        host_bytes;    /* for both */
} plan_stalls;

typedef struct plan_balance {
    uint32_t staging; /* index into staging_bytes */
    uint64_t staging_bytes, cache_bytes;
    uint64_t stall_ns; /* what the profile says remains */
    uint64_t saved_ns; /* against the least of everything */
    bool     exact;
} plan_balance;

/* size [n_group] receives an index into size_bytes per group.  The split that leaves the fewest
 * nanoseconds of stalls: what stalls most per byte gets memory first, staging as well as lanes. */
kvd_status plan_balance_make(const plan_stalls *s, uint32_t *size, plan_balance *out, kvd_err *err);

/* ---- plan file (plan_file.c, plan_host.c) -----------------------------------------------------
 */

#define PLAN_FILE_VERSION   1
#define PLAN_FILE_MAX_BYTES (64u << 20)
#define PLAN_MAX_DIM        (1u << 16)   /* of layers, heads, head size, caps */
#define PLAN_MAX_TOKENS     (1ull << 40) /* of a budget */
#define PLAN_NAME_BYTES     160u
#define PLAN_MAX_RECORDS    (1u << 28)       /* of a lane */
#define PLAN_MAX_READ_NS    1000000000000ull /* of a read */
/* A read that is waited for takes the drive's latency: 97 us, median of 4,000 reads of 4 KiB, one
 * by one with O_DIRECT, on a virtual machine's disk.  One beside steps takes its share of the
 * drive: 4 KiB at 0.35 GB/s, measured elsewhere with io_uring, O_DIRECT and 32 in flight.  A plan
 * file has its own. */
#define PLAN_URGENT_NS 100000u
#define PLAN_LATE_NS   12000u

/* What a plan was made for; a plan for anything else is refused. */
typedef struct plan_key {
    char     fingerprint[PLAN_NAME_BYTES]; /* of the model, printable ASCII */
    uint32_t n_layer, n_kv_head, head_dim, chunk_tokens;
    uint64_t budget;    /* tokens a step selects */
    char     index[32]; /* index kind, as the option spells it */
} plan_key;

typedef struct plan_file {
    plan_key  key;
    uint32_t  n_cap;
    uint32_t *cap;      /* [n_cap] caps that were profiled, ascending, in budgets */
    uint64_t *benefit;  /* [n_layer][n_kv_head][n_cap] bytes not transferred, whole profile run */
    uint64_t *cost;     /* [n_layer][n_kv_head][n_cap] device bytes */
    uint64_t  capacity; /* what the caps were chosen under */
    uint32_t *caps;     /* [n_layer][n_kv_head] chosen, each one of cap */
    uint64_t  n_step;   /* decode steps profiled */

    /* Reads from disk that a host tier of each size leaves, under the chosen caps; n_size 0: the
     * profile has none. */
    uint32_t  n_size;
    uint32_t  lane_records;       /* of a lane in the profiled context */
    uint32_t *size;               /* [n_size] of them in the host tier, ascending */
    uint64_t  urgent_ns, late_ns; /* what one read that is waited for costs, and one beside steps */
    uint64_t *urgent, *late;      /* [n_layer][n_kv_head][n_size] reads, whole profile run */
} plan_file;

/* Zeroed tables for the key; plan_file_free() after success and failure. */
kvd_status plan_file_init(plan_file *f, const plan_key *key, uint32_t n_cap, kvd_err *err);
void       plan_file_free(plan_file *f);
/* Zeroed tables for n_size sizes of the host tier, with times of PLAN_URGENT_NS and PLAN_LATE_NS.
 */
kvd_status plan_file_add_host(plan_file *f, uint32_t n_size, kvd_err *err);
/* Fills caps from the tables under a capacity. */
kvd_status plan_file_choose(plan_file *f, uint64_t capacity, plan_result *out, kvd_err *err);
/* Appends the file's text. */
kvd_status plan_file_write(const plan_file *f, kvd_buf *out, kvd_err *err);
/* Strict: what is missing, unknown, repeated, of the wrong type or contradictory is KVD_E_CORRUPT
 * naming the field; another version KVD_E_UNSUPPORTED; another model, geometry, budget or index
 * than expected KVD_E_INVAL naming both.  expect NULL takes any. */
kvd_status plan_file_read(plan_file *f, const char *text, size_t len, const plan_key *expect,
                          kvd_err *err);

/* How a sequence's lanes share a host tier. */
typedef struct plan_shares {
    bool     by_stalls;         /* else all have the same: the profile sees no gain */
    uint32_t least, most;       /* records of a lane */
    double equal_ns, shared_ns; /* what the profile says of a step, if all had the same; as it is */
    /* the same in reads: waited for, beside steps */
    double equal_urgent, equal_late, shared_urgent, shared_late;
} plan_shares;

/* n_record host records for lanes that have lane_records each in this context: record [n_layer]
 * [n_kv_head] receives as many as leave the fewest nanoseconds of stalls, by plan_balance_make();
 * their sum is at most n_record.  Sizes are shares of the context, so the profiled one may have
 * been another.  KVD_E_INVAL when the file has no tables for it. */
kvd_status plan_file_share_host(const plan_file *f, uint64_t n_record, uint32_t lane_records,
                                uint32_t *record, plan_shares *out, kvd_err *err);

#endif
