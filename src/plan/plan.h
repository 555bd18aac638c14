/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - the door to plan/: who gets how much memory.  Pure: tables in, budgets out; no model, no
 * device, no files.
 *
 *   knapsack   one option a group under a capacity: caps per (layer, KV head), or anything else
 *   fit        needs by tier (from whoever knows the layout) and budgets -> verdict, limits, advice
 *   memory     a cache's geometry and the budgets of three tiers -> named buffers, and what fits
 *   balance    a host budget split into staging and cache by the stalls that each would save
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

/* ---- what fits (plan_fit.c) ------------------------------------------------------ */

typedef enum plan_tier { PLAN_DEVICE, PLAN_HOST, PLAN_DISK, PLAN_N_TIER } plan_tier;
const char *plan_tier_name(plan_tier t); /* "device" */

typedef enum plan_verdict {
    PLAN_ALL_ON_DEVICE, /* every record stays on the device: lower tiers add nothing */
    PLAN_ALL_IN_HOST,   /* windows on the device, the rest in the host: the disk adds nothing */
    PLAN_USES_DISK,     /* the host holds a part, the disk all */
    PLAN_NO_FIT
} plan_verdict;

#define PLAN_MAX_TOKENS (1ull << 40) /* of one sequence; also the most sequences */

typedef struct plan_point {
    uint64_t n_ctx, n_seq;
    uint32_t cap; /* the same window for every lane, in budgets; 0: as configured */
} plan_point;

/* Bytes by tier that a cache takes at a point, laid out one of the first three ways; UINT64_MAX
 * where they leave 64 bits.  false: there is no such way here.  No tier's bytes may fall when
 * n_ctx, n_seq or cap grows, unless a way stops fitting. */
typedef bool (*plan_measure_fn)(void *ctx, const plan_point *at, plan_verdict way,
                                uint64_t need[PLAN_N_TIER]);

typedef struct plan_query {
    plan_measure_fn measure;
    void           *ctx;
    plan_point      at;                  /* what is asked for */
    plan_point      most;                /* upper ends of the search for what fits */
    uint64_t        budget[PLAN_N_TIER]; /* UINT64_MAX: no limit; host, disk 0: no such tier */
} plan_query;

typedef struct plan_fit {
    plan_verdict verdict;
    plan_verdict way; /* the verdict's, or of NO_FIT the one that lacks least */
    uint64_t     need[PLAN_N_TIER];
    plan_tier    short_tier;  /* NO_FIT: where bytes lack first */
    uint64_t     short_bytes; /* and how many */
    uint64_t     n_ctx_fits;  /* the longest context with n_seq sequences; 0: none */
    uint64_t     n_seq_fits;  /* the most sequences with n_ctx; 0: none */
    uint32_t     cap_fits;    /* the largest same cap for all lanes; 0: none */
    char         text[512];   /* one line: the verdict, and what to change */
} plan_fit;

/* The first way that fits every tier.  KVD_E_INVAL when the bytes leave 64 bits; "does not fit" is
 * a verdict, not a failure. */
kvd_status plan_fit_find(const plan_query *q, plan_fit *out, kvd_err *err);

/* ---- memory by tier (plan_memory.c) ---------------------------------------------- */

typedef enum plan_record { PLAN_BF16, PLAN_INT8, PLAN_INT4, PLAN_F32 } plan_record;
const char *plan_record_name(plan_record r); /* "int8" */

#define PLAN_MAX_DIM    (1u << 16) /* of layers, heads, head size, caps */
#define PLAN_MAX_EXTRA  12u
#define PLAN_MAX_BUFFER (PLAN_MAX_EXTRA + 16u)

/* A buffer of the caller's that counts against a tier: weights, logits, prefill's hidden state. */
typedef struct plan_extra {
    plan_tier   tier;
    const char *name; /* borrowed */
    uint64_t    bytes, bytes_per_seq;
    uint64_t    bytes_per_ctx_token; /* times n_ctx, once, not once a sequence */
} plan_extra;

typedef struct plan_input {
    uint32_t n_layer, n_kv_head, head_dim; /* every layer keeps K and V of every head */
    uint64_t n_ctx;                        /* most tokens of one sequence */
    uint64_t n_seq;

    uint32_t        chunk_tokens;    /* a record's positions: 4, 8 or 16 */
    uint32_t        seal_tokens;     /* 256 */
    uint32_t        n_sink, n_local; /* 16, 64 */
    uint64_t        budget;          /* tokens a step selects; 0: clamp(n_ctx / 16, 1024, 4096) */
    uint32_t        cap;             /* window in budgets, where caps is NULL */
    const uint32_t *caps;            /* [n_layer][n_kv_head] */

    uint64_t    index_bytes; /* what the index keeps of one lane's sealed block, on the device */
    uint64_t    chunk_bytes; /* metadata of a lane's chunk on the device: slot map, EMA, scales */
    plan_record record[PLAN_N_TIER];
    uint64_t    budget_bytes[PLAN_N_TIER]; /* host, disk: 0 is "no such tier" */
    uint64_t    staging_bytes;             /* of the host's budget, once there is a lower tier */
    const plan_extra *extra;
    uint32_t          n_extra;
} plan_input;

typedef struct plan_buffer {
    plan_tier   tier;
    const char *name;
    uint64_t    bytes;
} plan_buffer;

typedef struct plan_memory {
    plan_fit    fit;
    plan_buffer buffer[PLAN_MAX_BUFFER]; /* by tier; none is empty; of NO_FIT what way would take */
    uint32_t    n_buffer;
    uint64_t    tier_bytes[PLAN_N_TIER];
    uint64_t    record_bytes[PLAN_N_TIER]; /* of one record */
    uint64_t    n_lane;                    /* of all sequences */
    uint64_t    n_record;                  /* of a lane at n_ctx: what is sealed */
    uint64_t    budget;                    /* tokens, as it will be used */
} plan_memory;

/* Index, chunk metadata and kept set always on the device.  KVD_E_INVAL, naming
 * the field, for an input that means nothing or leaves 64 bits. */
kvd_status plan_memory_make(const plan_input *in, plan_memory *out, kvd_err *err);
/* K rows, then V rows, filled up to a power of two; 0 when out of range. */
uint64_t plan_record_bytes(uint32_t chunk_tokens, uint32_t head_dim, plan_record type);

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

/* ---- plan file (plan_file.c) ----------------------------------------------------- */

#define PLAN_FILE_VERSION   1
#define PLAN_FILE_MAX_BYTES (64u << 20)
#define PLAN_NAME_BYTES     160u

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
} plan_file;

/* Zeroed tables for the key; plan_file_free() after success and failure. */
kvd_status plan_file_init(plan_file *f, const plan_key *key, uint32_t n_cap, kvd_err *err);
void       plan_file_free(plan_file *f);
/* Fills caps from the tables under a capacity. */
kvd_status plan_file_choose(plan_file *f, uint64_t capacity, plan_result *out, kvd_err *err);
/* Appends the file's text. */
kvd_status plan_file_write(const plan_file *f, kvd_buf *out, kvd_err *err);
/* Strict: what is missing, unknown, repeated, of the wrong type or contradictory is KVD_E_CORRUPT
 * naming the field; another version KVD_E_UNSUPPORTED; another model, geometry, budget or index
 * than expected KVD_E_INVAL naming both.  expect NULL takes any. */
kvd_status plan_file_read(plan_file *f, const char *text, size_t len, const plan_key *expect,
                          kvd_err *err);

#endif
