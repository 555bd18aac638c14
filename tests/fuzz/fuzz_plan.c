/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_plan.c - any bytes as a plan file.  What is read is written again, reads the same, and its
 * caps can be chosen anew under what the file says they cost; a host tier can be shared out. */
#include <string.h>

#include "plan/plan.h"

static void check_host(const plan_file *f, const plan_file *g)
{
    const uint64_t n   = (uint64_t)f->key.n_layer * f->key.n_kv_head;
    uint64_t       sum = 0;
    uint32_t       record[64];
    plan_shares    s;

    kvd_assert(f->n_size == g->n_size && f->lane_records == g->lane_records);
    kvd_assert(f->urgent_ns == g->urgent_ns && f->late_ns == g->late_ns);
    if (f->n_size == 0)
        return;
    kvd_assert(memcmp(g->size, f->size, f->n_size * sizeof(*g->size)) == 0);
    kvd_assert(memcmp(g->urgent, f->urgent, n * f->n_size * sizeof(*g->urgent)) == 0);
    kvd_assert(memcmp(g->late, f->late, n * f->n_size * sizeof(*g->late)) == 0);
    if (n > 64 || plan_file_share_host(f, 100, 40, record, &s, NULL) != KVD_OK)
        return;
    for (uint64_t i = 0; i < n; i++) {
        kvd_assert(record[i] <= 40);
        sum += record[i];
    }
    kvd_assert(sum <= 100);
}

static void check_again(plan_file *f)
{
    kvd_buf     b = { 0 };
    plan_file   g;
    plan_result r;
    uint64_t    n = (uint64_t)f->key.n_layer * f->key.n_kv_head;
    kvd_status  st;

    kvd_assert(plan_file_write(f, &b, NULL) == KVD_OK);
    kvd_assert(plan_file_read(&g, b.data, b.len, &f->key, NULL) == KVD_OK);
    kvd_assert(g.n_cap == f->n_cap && g.capacity == f->capacity && g.n_step == f->n_step);
    kvd_assert(memcmp(g.caps, f->caps, n * sizeof(*g.caps)) == 0);
    kvd_assert(memcmp(g.cost, f->cost, n * f->n_cap * sizeof(*g.cost)) == 0);
    kvd_assert(memcmp(g.benefit, f->benefit, n * f->n_cap * sizeof(*g.benefit)) == 0);
    check_host(f, &g);
    /* Sums over all options may leave 63 bits; the caps of the file fit, so others do. */
    st = n <= 64 ? plan_file_choose(&g, g.capacity, &r, NULL) : KVD_E_INVAL;
    kvd_assert(st == KVD_E_INVAL || (st == KVD_OK && r.cost <= g.capacity));
    plan_file_free(&g);
    kvd_buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    plan_file f;
    kvd_err   err;

    if (plan_file_read(&f, (const char *)data, size, NULL, &err) == KVD_OK)
        check_again(&f);
    plan_file_free(&f);
    return 0;
}
