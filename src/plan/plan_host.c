/* SPDX-License-Identifier: Apache-2.0 */
/* plan_host.c - how lanes share a host tier that has no room for all records, by what a profile
 * says each size leaves to read from disk.
 *
 * Staging is no part of the trade: the block store's stage has as many read slots as its queue has
 * requests in flight, so more of it would stand idle, and it is not paid from the host budget.
 * Any thread. */
#include <inttypes.h>

#include "plan/plan.h"

#define WORTH 0.99 /* of the stalls: what saves less is noise of the profile */

typedef struct host_sizes {
    uint32_t n;
    uint32_t at[PLAN_MAX_OPTION];    /* index of the file's size */
    uint64_t bytes[PLAN_MAX_OPTION]; /* records of this context */
} host_sizes;

/* The file's sizes in this context; of those that round to the same the largest. */
static void scale(const plan_file *f, uint32_t lane_records, host_sizes *out)
{
    out->n = 0;
    for (uint32_t k = 0; k < f->n_size; k++) {
        const uint64_t n = (uint64_t)f->size[k] * lane_records / f->lane_records;

        out->n -= out->n > 0 && out->bytes[out->n - 1] == n;
        out->at[out->n]      = k;
        out->bytes[out->n++] = n;
    }
}

/* Nanoseconds of the profile's reads, per lane and size. */
static kvd_status stall_table(const plan_file *f, const host_sizes *z, uint64_t *ns, kvd_err *err)
{
    const uint64_t n_lane = (uint64_t)f->key.n_layer * f->key.n_kv_head;

    for (uint64_t i = 0; i < n_lane * z->n; i++) {
        const uint64_t at = i / z->n * f->n_size + z->at[i % z->n];
        uint64_t       urgent, late;

        if (!kvd_mul(f->urgent[at], f->urgent_ns, &urgent) ||
            !kvd_mul(f->late[at], f->late_ns, &late) || !kvd_add(urgent, late, &ns[i]))
            return kvd_fail(err, KVD_E_INVAL, 0, "plan: times of disk reads leave 64 bits");
    }
    return KVD_OK;
}

/* A lane's reads with n records, between the sizes of the table. */
static double reads_at(const plan_file *f, const uint64_t *reads, uint32_t lane_records, double n)
{
    const double want = n * f->lane_records / lane_records; /* as profiled */
    uint32_t     k    = 0;
    double       part;

    while (k + 1 < f->n_size && (double)f->size[k + 1] <= want)
        k++;
    if (k + 1 == f->n_size || want <= (double)f->size[k])
        return (double)reads[k];
    part = (want - f->size[k]) / (double)(f->size[k + 1] - f->size[k]);
    return (double)reads[k] + part * ((double)reads[k + 1] - (double)reads[k]);
}

/* Reads of a step with these records for lanes, or with `each` for all. */
static void sum_reads(const plan_file *f, uint32_t lane_records, const uint32_t *record,
                      double each, double *urgent, double *late)
{
    const double step = (double)kvd_max_u64(1, f->n_step);

    *urgent = *late = 0.0;
    for (uint64_t i = 0; i < (uint64_t)f->key.n_layer * f->key.n_kv_head; i++) {
        const double n = record ? (double)record[i] : each;

        *urgent += reads_at(f, f->urgent + i * f->n_size, lane_records, n) / step;
        *late += reads_at(f, f->late + i * f->n_size, lane_records, n) / step;
    }
}

/* What the sizes have left over goes to lanes that do not hold everything, the same to each. */
static void spread(uint32_t *record, uint32_t n_lane, uint32_t lane_records, uint64_t left)
{
    uint32_t open = n_lane;

    while (left > 0 && open > 0) {
        const uint64_t each = kvd_max_u64(1, left / open);

        open = 0;
        for (uint32_t i = 0; i < n_lane && left > 0; i++) {
            const uint64_t more =
                kvd_min_u64(kvd_min_u64(each, left), (uint64_t)lane_records - record[i]);

            record[i] += (uint32_t)more;
            left -= more;
            open += record[i] < lane_records;
        }
    }
}

static kvd_status balance(const plan_file *f, uint64_t n_record, uint32_t lane_records,
                          uint64_t *ns, uint32_t *record, kvd_err *err)
{
    const uint32_t n_lane = f->key.n_layer * f->key.n_kv_head;
    const uint64_t zero   = 0;
    host_sizes     z;
    plan_stalls    s = { .n_group       = n_lane,
                         .size_bytes    = z.bytes,
                         .group_ns      = ns,
                         .n_staging     = 1,
                         .staging_bytes = &zero,
                         .staging_ns    = &zero,
                         .host_bytes    = n_record };
    plan_balance   b;

    scale(f, lane_records, &z);
    s.n_size = z.n;
    KVD_TRY(stall_table(f, &z, ns, err));
    KVD_TRY(plan_balance_make(&s, record, &b, err));
    for (uint32_t i = 0; i < n_lane; i++)
        record[i] = (uint32_t)z.bytes[record[i]];
    spread(record, n_lane, lane_records, n_record - b.cache_bytes);
    return KVD_OK;
}

static double cost_of(const plan_file *f, double urgent, double late)
{
    return urgent * (double)f->urgent_ns + late * (double)f->late_ns;
}

kvd_status plan_file_share_host(const plan_file *f, uint64_t n_record, uint32_t lane_records,
                                uint32_t *record, plan_shares *out, kvd_err *err)
{
    const uint32_t n_lane = f->key.n_layer * f->key.n_kv_head;
    const uint32_t each   = (uint32_t)kvd_min_u64(n_record / n_lane, lane_records);
    uint64_t      *ns;
    kvd_status     st;

    *out = (plan_shares){ .least = UINT32_MAX };
    if (f->n_size == 0 || lane_records < 1 || lane_records > PLAN_MAX_RECORDS)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "plan: no reads from disk were profiled for lanes of %u records",
                        lane_records);
    ns = kvd_calloc((uint64_t)n_lane * f->n_size, sizeof(*ns));
    if (!ns)
        return kvd_fail(err, KVD_E_NOMEM, 0, "plan: no memory to share out the host tier");
    st = balance(f, n_record, lane_records, ns, record, err);
    kvd_free(ns);
    if (st != KVD_OK && st != KVD_E_FULL) /* full: not even the least size for all */
        return st;
    sum_reads(f, lane_records, NULL, each, &out->equal_urgent, &out->equal_late);
    if (st == KVD_OK)
        sum_reads(f, lane_records, record, 0.0, &out->shared_urgent, &out->shared_late);
    out->equal_ns  = cost_of(f, out->equal_urgent, out->equal_late);
    out->shared_ns = cost_of(f, out->shared_urgent, out->shared_late);
    out->by_stalls = st == KVD_OK && out->shared_ns < out->equal_ns * WORTH;
    for (uint32_t i = 0; i < n_lane; i++) {
        record[i]  = out->by_stalls ? record[i] : each;
        out->least = (uint32_t)kvd_min_u64(out->least, record[i]);
        out->most  = (uint32_t)kvd_max_u64(out->most, record[i]);
    }
    if (!out->by_stalls) {
        out->shared_urgent = out->equal_urgent;
        out->shared_late   = out->equal_late;
        out->shared_ns     = out->equal_ns;
    }
    return KVD_OK;
}
