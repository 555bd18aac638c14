/* SPDX-License-Identifier: Apache-2.0 */
/* test_workload.c - a session under a random workload: prompts, steps of several sequences
 * together, cuts, a cache that fills up.  What the process holds stays within what was planned plus
 * 16 MiB, whatever the placement, and the heap does not grow with the work.
 * usage: test_workload [--ops N] [--seed N] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/tiny.h"

enum { N_SEQ = 3, N_PROMPT_MAX = 900, N_STEP_MAX = 40 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLACK_BYTES (UINT64_C(4) << 30) /* theirs */
#else
#define SLACK_BYTES (UINT64_C(16) << 20)
#endif
#define HEAP_BYTES (UINT64_C(2) << 20) /* checksums of units in use, lists of the block store */

static uint32_t n_op_ = 60;
static uint64_t seed_ = 1;
static uint64_t peak_; /* of resident bytes */

static void look(void)
{
    peak_ = kvd_max_u64(peak_, os_rss());
}

static bool progress(void *ctx, uint64_t done, uint64_t total)
{
    (void)ctx;
    (void)done;
    (void)total;
    look();
    return true;
}

static void prompt(kvd_session *s, kvd_rng *rng)
{
    const uint32_t seq  = (uint32_t)kvd_rng_below(rng, N_SEQ);
    const uint32_t n    = 1 + (uint32_t)kvd_rng_below(rng, N_PROMPT_MAX);
    const uint32_t text = (uint32_t)kvd_rng_below(rng, 3), len = kvd_seq_len(s, seq);
    int32_t        token[N_PROMPT_MAX];
    kvd_err        err = { 0 };

    for (uint32_t i = 0; i < n; i++)
        token[i] = tiny_token(text, len + i);
    if (kvd_prefill(s, seq, token, n, progress, NULL, &err) != KVD_OK && err.code != KVD_E_FULL)
        fail_msg("prompt of %u tokens behind %u: %s", n, len, err.msg);
}

static void steps(kvd_session *s, kvd_rng *rng)
{
    for (uint32_t n = 1 + (uint32_t)kvd_rng_below(rng, N_STEP_MAX); n > 0; n--) {
        int32_t   token[N_SEQ];
        uint32_t  seq[N_SEQ];
        kvd_batch b   = KVD_BATCH_INIT;
        kvd_err   err = { 0 };

        b.token = token;
        b.seq   = seq;
        for (uint32_t q = 0; q < N_SEQ; q++) {
            if (kvd_seq_len(s, q) == 0 || kvd_seq_len(s, q) == TINY_CTX)
                continue;
            seq[b.n_token]     = q;
            token[b.n_token++] = (int32_t)kvd_rng_below(rng, 256);
        }
        if (b.n_token == 0 || (kvd_eval(s, &b, &err) != KVD_OK && err.code == KVD_E_FULL))
            return;
        if (err.code != KVD_OK)
            fail_msg("step of %u sequences: %s", b.n_token, err.msg);
        look();
    }
}

static void cut(kvd_session *s, kvd_rng *rng)
{
    const uint32_t seq = (uint32_t)kvd_rng_below(rng, N_SEQ), len = kvd_seq_len(s, seq);
    const uint32_t keep = kvd_rng_below(rng, 2) && len > 300
                              ? len - (uint32_t)kvd_rng_below(rng, 300)
                              : (uint32_t)(kvd_rng_below(rng, 2) ? kvd_rng_below(rng, len + 1) : 0);

    assert_int_equal(kvd_seq_truncate(s, seq, keep, NULL), KVD_OK);
}

static void work(kvd_session *s, kvd_rng *rng, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        switch (kvd_rng_below(rng, 5)) {
        case 0:
        case 1:
            prompt(s, rng);
            break;
        case 2:
        case 3:
            steps(s, rng);
            break;
        default:
            cut(s, rng);
        }
        kv_check(s->kv);
        look();
    }
}

/* Any shares of the host tier, together all of it. */
static void share(kvd_session_params *p, const kvd_plan *plan, uint32_t *record, kvd_rng *rng)
{
    uint64_t left = plan->kv_host_records / N_SEQ;

    for (uint32_t i = 0; i < p->n_host_records; i++) {
        record[i] = (uint32_t)(i + 1 < p->n_host_records ? kvd_rng_below(rng, left + 1) : left);
        left -= record[i];
    }
    p->host_records = record;
}

static void check(const char *what, bool tiers, uint64_t kv_host, bool cached, bool shares)
{
    char                 dir[256];
    kvd_model           *m    = tiny_model("qwen3");
    tiny_options         o    = { .n_seq       = N_SEQ,
                                  .tiers       = tiers,
                                  .kv_host     = kv_host,
                                  .cache_bytes = 3000000,
                                  .mode        = KVD_ATTENTION_SPARSE };
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_attention_params a;
    kvd_session_params   p;
    uint32_t             record[64];
    kvd_session         *s;
    kvd_rng              rng;
    kvd_err              err    = { 0 };
    const uint64_t       before = os_rss();
    uint64_t             heap, planned;

    kvd_rng_seed(&rng, seed_);
    if (cached)
        dm_dir_make(dir);
    o.dir = cached ? dir : NULL;
    p     = tiny_params(m, &o, &a);
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_OK);
    if (shares) {
        assert_true(plan.kv_spills);
        p.n_host_records =
            model_get_hparams(m->net)->n_layer * model_get_hparams(m->net)->n_kv_head;
        share(&p, &plan, record, &rng);
    }
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", what, err.msg);
    planned = plan.kv_bytes + plan.scratch_bytes + plan.host_bytes;
    peak_   = 0;
    work(s, &rng, n_op_ / 3);
    heap = kvd_alloc_bytes();
    work(s, &rng, n_op_ - n_op_ / 3);
    print_message("%s: %.1f MiB planned, %.1f MiB more resident at the most, heap %+.2f MiB\n",
                  what, (double)planned / 1048576.0,
                  (double)(peak_ > before ? peak_ - before : 0) / 1048576.0,
                  ((double)kvd_alloc_bytes() - (double)heap) / 1048576.0);
    assert_true(peak_ <= before + planned + SLACK_BYTES);
    assert_true(kvd_alloc_bytes() <= heap + HEAP_BYTES);
    kvd_session_close(s);
    kvd_model_close(m);
    if (cached)
        dm_dir_remove(dir);
}

static void test_resident(void **state)
{
    (void)state;
    check("resident", false, 0, false, false);
}

static void test_host(void **state)
{
    (void)state;
    check("device and host", true, 0, false, false);
}

static void test_cached(void **state)
{
    (void)state;
    check("resident, with a cache", false, 0, true, false);
}

static void test_disk(void **state)
{
    (void)state;
    check("device, host and disk", true, 150000, true, false);
    check("device, host and disk, by shares", true, 150000, true, true);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resident),
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_cached),
        cmocka_unit_test(test_disk),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--ops") == 0)
            n_op_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
    }
    print_message("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
